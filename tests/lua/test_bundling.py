"""Calls of scripts that tasks make at the same moment, on a real Redis: one request, and a reply for each."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import ResponseError

from grabstream.lua.bundling import Bundled
from grabstream.lua.gate.calls import run_script
from grabstream.lua.keys import KeySpace
from grabstream.lua.library import provide
from grabstream.ops.settings import Settings


async def requests_of(client: Any, calls: list[Coroutine[Any, Any, Any]]) -> tuple[list[Any], int]:
    """The replies or errors of calls made at the same moment, and the requests that the server has read."""
    await client.ping()
    before = (await client.info("stats"))["total_reads_processed"]
    replies = await asyncio.gather(*calls, return_exceptions=True)
    after = (await client.info("stats"))["total_reads_processed"]
    return replies, after - before - 1  # INFO itself


async def test_calls_of_one_moment_are_one_request(
    private_server: tuple[Any, int], settings: Settings
) -> None:
    """On a server of its own: others would send requests meanwhile."""
    keys = KeySpace(settings.prefix, 8)
    client = redis.asyncio.Redis(port=private_server[1])
    bundled = Bundled(client, 5.0)

    # A server without the library would get each script a second time, as plain text.
    assert not await provide(client, keys.shard(0).state)

    def lease(shard: int) -> Coroutine[Any, Any, Any]:
        of_shard = keys.shard(shard)
        return run_script(
            bundled,
            "lease",
            [of_shard.lease, of_shard.state, of_shard.present],
            [f"w{shard}", 60_000, "", ""],
        )

    replies, requests = await requests_of(client, [lease(shard) for shard in range(8)])
    assert [reply[0] for reply in replies] == [b"w%d" % shard for shard in range(8)]
    assert requests == 1
    await bundled.aclose()
    await client.aclose()


async def test_an_error_is_that_of_its_call_only(redis_client: Any, settings: Settings) -> None:
    keys = KeySpace(settings.prefix, 2)
    bundled = Bundled(redis_client, 5.0)
    await redis_client.hset(keys.shard(0).lease, "not", "a string")
    calls = [
        bundled.execute_command(
            "EVAL", "return redis.call('GET', KEYS[1]) or 'none'", 1, keys.shard(shard).lease
        )
        for shard in range(2)
    ]
    replies, _ = await requests_of(redis_client, calls)
    assert isinstance(replies[0], ResponseError)
    assert replies[1] == b"none"
    await bundled.aclose()


async def test_a_server_that_hangs_ends_its_calls_in_time(redis_client: Any, settings: Settings) -> None:
    bundled = Bundled(redis_client, 0.1)
    await redis_client.client_pause(600, all=True)
    key = KeySpace(settings.prefix, 1).shard(0).lease
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5) as patience:
            await bundled.execute_command("EVAL", "return 1", 1, key)
    assert not patience.expired()
    await redis_client.client_unpause()


async def test_a_call_that_was_cancelled_before_it_was_sent_is_not_made(
    redis_client: Any, settings: Settings
) -> None:
    bundled = Bundled(redis_client, 5.0)
    keys = [KeySpace(settings.prefix, 2).shard(shard).lease for shard in range(2)]
    calls = [
        asyncio.ensure_future(bundled.execute_command("EVAL", "redis.call('INCR', KEYS[1])", 1, key))
        for key in keys
    ]
    asyncio.get_running_loop().call_soon(calls[0].cancel)
    await asyncio.wait(calls)
    assert [await redis_client.get(key) for key in keys] == [None, b"1"]
    await bundled.aclose()
