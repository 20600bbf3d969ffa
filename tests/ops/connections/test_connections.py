"""The connections of a process, on real servers."""

import asyncio

from grabstream.ops.connections.opening import open_redis
from grabstream.ops.settings import Settings


async def test_a_cancellation_is_never_swallowed(servers: Settings) -> None:
    """redis-py did so in a fifth of these: a worker that was told to stop just then went on for ever."""
    swallowed = 0
    for ticks in range(60):
        client = open_redis(servers)
        asking = asyncio.create_task(client.ping())
        for _ in range(ticks):
            await asyncio.sleep(0)
        if not asking.done():
            asking.cancel()
            await asyncio.wait({asking})
            swallowed += not asking.cancelled()
        await client.aclose()
    assert swallowed == 0
