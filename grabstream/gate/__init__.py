"""The gate: takes commands, has the scripts decide them shard by shard, and returns the answers."""
