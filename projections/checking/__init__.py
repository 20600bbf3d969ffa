"""Read models compared: with a second build, with the audit trail, with what was verified."""
