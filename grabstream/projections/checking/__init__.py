"""Comparisons of read models: with a second build, with the audit trail, and with verified sums."""
