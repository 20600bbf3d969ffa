"""Owning a shard: leases, the relay from its outbox to the journal, take-over and recovery."""
