"""Verbs of whoever runs a system."""
