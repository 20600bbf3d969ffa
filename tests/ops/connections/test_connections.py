"""A process's connections to real servers."""

import asyncio

from grabstream.ops.connections.opening import open_redis
from grabstream.ops.settings import Settings


async def test_client_never_swallows_a_cancellation(servers: Settings) -> None:
    """redis-py swallowed a fifth of these: a worker that was asked to stop at that moment never ended."""
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
