"""The gate: commands in, answers out, decided in batches by shard."""
