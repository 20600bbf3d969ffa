"""User projections: read models that a user writes."""
