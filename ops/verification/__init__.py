"""Everything that is kept anywhere, against the journal."""
