"""Read models rebuilt next to the live ones, and the journal restored from the audit trail."""
