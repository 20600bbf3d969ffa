"""Verbs that only read."""
