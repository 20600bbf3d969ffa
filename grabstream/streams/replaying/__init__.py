"""Replay: events read again between any two points, into lines, a topic or read models."""
