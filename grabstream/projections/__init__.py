"""Read models: tables computed from blocks of the journal. Each stores its cursor beside its rows."""
