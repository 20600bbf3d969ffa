"""Read models: tables computed from blocks of the journal. Each stores its cursor next to its rows."""
