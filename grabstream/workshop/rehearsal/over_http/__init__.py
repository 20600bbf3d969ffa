"""Rehearsals over HTTP: a crowd in a shape sends its grabs to a gateway process (docs/rehearsing.md)."""
