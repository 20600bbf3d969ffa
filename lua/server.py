"""Reads from the server that has a key: its epoch, which changes when it restarts or is promoted
(includes/shard.lua), and its time.
"""

from typing import Any

from grabstream.lua.gate.calls import run_script


async def server_epoch_of(redis: Any, key: str) -> str:
    """Returns run id and replication id of the server that has a key; raises the client's errors."""
    return str((await run_script(redis, "server_epoch", [key], [])).decode())


async def time_ms_of(redis: Any, key: str) -> int:
    """Returns the time of the server that has a key, ms since 1970 UTC; raises the client's errors."""
    return int(await run_script(redis, "time", [key], []))
