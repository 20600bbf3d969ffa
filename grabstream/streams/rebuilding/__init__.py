"""Read models rebuilt beside the live ones, and the journal restored from the audit trail."""
