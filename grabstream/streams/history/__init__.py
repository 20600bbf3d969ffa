"""One reader of history: the events of a shard, in order, from the journal or the audit trail."""
