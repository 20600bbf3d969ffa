"""Projections of a user's own."""
