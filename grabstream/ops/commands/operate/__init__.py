"""Verbs for operators of a system."""
