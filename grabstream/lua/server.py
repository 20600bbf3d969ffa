"""Calls about the server that has a key: its epoch, which changes when it restarts or is promoted
(includes/shard.lua), its time, and the first step of a takeover.
"""

from typing import Any

from grabstream.lua.library import provide
from grabstream.lua.running import run_script


async def server_epoch_of(redis: Any, key: str) -> str:
    """Returns run id and replication id of the server that has a key; raises the client's errors."""
    return str((await run_script(redis, "server_epoch", [key], [])).decode())


async def has_server_epoch(redis: Any, state: str, epoch: bytes | None) -> bool:
    """Whether a shard with this state and epoch is reconciled with the server that has it now; raises the
    client's errors.
    """
    return epoch is not None and epoch.decode() == await server_epoch_of(redis, state)


async def time_ms_of(redis: Any, key: str) -> int:
    """Returns the time of the server that has a key, ms since 1970 UTC; raises the client's errors."""
    return int(await run_script(redis, "time", [key], []))


async def let_callers_set_time(redis: Any, state: str) -> None:
    """Lets callers name the time at which the shard with this key decides, for a test or a rehearsal whose
    clock runs faster. Raises ValueError when the shard has events: times would jump in its history.

    Raises the client's errors. Shards of production are never marked so: there, a call that sets its time is
    refused.
    """
    if await redis.hget(state, "clock") == b"caller":
        return
    if int(await redis.hget(state, "seq") or 0):
        raise ValueError(f"the shard of {state} has events already, so it keeps the clock of its server")
    await redis.hset(state, "clock", "caller")


async def raise_term(redis: Any, state: str, floor: int, owner: str) -> tuple[list[bytes], str]:
    """Loads the library where it is missing, and raises the term of the shard with this key above `floor`.

    Returns the reply of the script, and why functions cannot be used, in words, or ''. Raises the client's
    errors, among them the script's error NEWER.
    """
    plain = await provide(redis, state)
    return await run_script(redis, "raise_term", [state], [floor, owner, plain]), plain
