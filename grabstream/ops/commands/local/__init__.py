"""Verbs for one machine: local servers, and the rehearsal."""
