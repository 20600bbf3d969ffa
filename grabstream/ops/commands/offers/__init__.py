"""Verbs about offers and grabs."""
