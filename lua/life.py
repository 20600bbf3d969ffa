"""A server's life, as the scripts know it: what changes when it starts anew, or is promoted (see includes/shard.lua)."""

from typing import Any


async def life_of(redis: Any) -> str:
    """Run id and replication id of the server; raises the client's own errors."""
    return str((await redis.info("server"))["run_id"]) + str((await redis.info("replication"))["master_replid"])
