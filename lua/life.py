"""A server's life, as the scripts know it: what changes when it starts anew, or is promoted (see includes/shard.lua)."""

from typing import Any

from lua.gate import run_script


async def life_of(redis: Any, key: str) -> str:
    """Run id and replication id of the server that has a key; raises the client's own errors."""
    return str((await run_script(redis, "life", [key], [])).decode())
