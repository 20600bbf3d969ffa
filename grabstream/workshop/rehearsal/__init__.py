"""Rehearsals: a crowd of made-up users on its own system, shown live and checked at the end by a verdict."""
