"""The function library disappears under traffic: the relays load it again, and no answer is lost."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from grabstream.connections.opening import key_space, open_redis
from grabstream.lua.library import MISSING, library, missing_or_unusable
from grabstream.settings import Settings
from tests.conftest import until
from tests.streams.traffic import traffic

#: A relay that waits for events asks so often whether it still owns its shard; then it takes over again.
LOADED_SECONDS_MAX = 10.0


@pytest.mark.long
async def test_a_deleted_library_is_loaded_again_under_traffic(
    private: Settings, worker: Callable[..., Any]
) -> None:
    """Every shard is relayed again with functions, and none runs plain scripts."""
    deciding, projecting = worker(private, "decide,relay,sweep"), worker(private, "project,publish")
    client = open_redis(private)
    states = [key_space(private).shard(number).state for number in range(private.shards)]
    try:
        async with traffic(private) as crowd:
            await crowd.begin()
            for share in (0.2, 0.4, 0.6):
                await crowd.until_answered(share)
                await client.execute_command("FUNCTION", "FLUSH")
                assert await missing_or_unusable(client, states[0]) in (MISSING, "")
                began = asyncio.get_running_loop().time()
                await crowd.seconds_to_next_answer()
                assert asyncio.get_running_loop().time() - began < LOADED_SECONDS_MAX
            await crowd.adds_up()
        assert await missing_or_unusable(client, states[0]) == ""
        assert [await client.hexists(state, "plain") for state in states] == [False] * len(states)
    finally:
        await client.aclose()
    assert deciding.stop() == 0
    assert projecting.stop() == 0


@pytest.mark.long
async def test_an_idle_system_loads_a_deleted_library_by_itself(
    private: Settings, worker: Callable[..., Any]
) -> None:
    worker(private, "relay,sweep")
    client = open_redis(private)
    keys = key_space(private)
    try:

        async def all_decide() -> bool:
            lives = [await client.hget(keys.shard(n).state, "server_epoch") for n in range(private.shards)]
            return None not in lives

        await until(all_decide, 60, "the first takeover")
        await client.execute_command("FUNCTION", "DELETE", library().name)

        async def is_loaded() -> bool:
            return await missing_or_unusable(client, keys.shard(0).state) == ""

        await until(is_loaded, LOADED_SECONDS_MAX, "the library")
    finally:
        await client.aclose()
