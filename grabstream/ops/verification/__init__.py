"""Verification: compares read models, audit trail and Redis with the journal."""
