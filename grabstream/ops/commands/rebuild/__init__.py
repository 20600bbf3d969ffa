"""Verbs that rebuild and replay."""
