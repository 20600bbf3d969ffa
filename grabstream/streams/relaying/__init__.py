"""Owning a shard: leases, the relay from its outbox to the journal, takeover and recovery."""
