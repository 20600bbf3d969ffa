"""A process's connections to real servers."""

import asyncio

from grabstream.connections.opening import open_redis
from grabstream.settings import Settings


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


async def test_a_sending_that_fails_does_not_swallow_a_cancellation(servers: Settings) -> None:
    """A worker is asked to stop at the moment at which its server goes away."""
    for ticks in range(8):
        client = open_redis(servers)
        connection = await client.connection_pool.get_connection()
        broken = asyncio.get_running_loop().create_future()
        connection._send_packed_command = lambda command, broken=broken: broken
        sending = asyncio.create_task(connection.send_command("PING"))
        while not broken._callbacks:
            await asyncio.sleep(0)
        broken.set_exception(ConnectionResetError(104, "reset by the server"))
        for _ in range(ticks):
            await asyncio.sleep(0)
        if not sending.done():
            sending.cancel()
            await asyncio.wait({sending})
            assert sending.cancelled(), f"lost after {ticks} turns of the loop"
        else:
            sending.exception()
        await client.connection_pool.release(connection)
        await client.aclose()
