"""How often the sweeper reads what is due: once a second while nothing happens, at once after new events."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
import redis.asyncio

from grabstream.connections.opening import cancellable
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.lua.library import load
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import StockTerms
from grabstream.streams.deciding import sweeper as sweeper_module
from grabstream.streams.deciding.sweeper import (
    POLL_SECONDS_MAX,
    WATCHED_POLL_SECONDS_MAX,
    Sweeper,
    SweepSchedule,
)
from tests.conftest import until
from tests.support.shards import SEALER, take_over


class CountingClient(redis.asyncio.Redis):
    """Counts the commands that it sends."""

    sent = 0

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        self.sent += 1
        return await super().execute_command(*args, **options)


@pytest.mark.parametrize(
    ("due", "seconds"),
    [
        (SweepSchedule(1_000, None, None, None, False, False), POLL_SECONDS_MAX),
        (SweepSchedule(1_000, None, None, None, True, True), POLL_SECONDS_MAX),
        (SweepSchedule(1_000, 1_500, None, None, False, False), 0.5),
        (SweepSchedule(1_000, 1_500, 1_200, 1_300, False, False), 0.2),
        (SweepSchedule(1_000, None, None, 1_250, False, False), 0.25),
        (SweepSchedule(1_000, 900, None, 1_250, False, False), 0.0),
        (SweepSchedule(1_000, 1_900, None, None, False, False, 1_300), 0.3),
        (SweepSchedule(1_000, 10**15, 10**15, None, False, False), POLL_SECONDS_MAX),
    ],
)
def test_the_next_poll_is_when_the_next_thing_is_due(due: SweepSchedule, seconds: float) -> None:
    assert due.seconds(POLL_SECONDS_MAX) == seconds


@pytest.mark.long
async def test_an_idle_shard_costs_a_call_a_second(private_server: Any) -> None:
    client, keys = cancellable(CountingClient(port=private_server[1])), KeySpace("own", 1)
    await load(client)
    client.sent = 0
    loop = asyncio.get_running_loop()
    sweeping = asyncio.create_task(Sweeper(client, keys.shard(0), 1, 10**9).run())
    try:
        await until(lambda: client.sent, 10, "the first call")
        began, client.sent = loop.time(), 0
        await until(lambda: client.sent >= 3, 30, "three calls")
        # Each pause is a second, or longer on a busy machine.
        assert loop.time() - began > 1.9 * POLL_SECONDS_MAX
    finally:
        sweeping.cancel()
        with suppress(asyncio.CancelledError):
            await sweeping
        await client.aclose()


@pytest.mark.long
async def test_a_shard_whose_relay_waits_for_events_is_polled_more_rarely(private_server: Any) -> None:
    """Until the relay does something else, and says so."""
    client, keys, decided = (
        cancellable(CountingClient(port=private_server[1])),
        KeySpace("own", 1),
        asyncio.Event(),
    )
    await load(client)
    client.sent = 0
    loop, is_watched = asyncio.get_running_loop(), True
    sweeper = Sweeper(client, keys.shard(0), 1, 10**9, decided=decided, is_watched=lambda: is_watched)
    sweeping = asyncio.create_task(sweeper.run())
    try:
        await until(lambda: client.sent, 10, "the first call")
        client.sent = 0
        # The first pause ends with those of other shards, after which it is a whole one.
        await until(lambda: client.sent, 30, "the second call")
        began, client.sent = loop.time(), 0
        await until(lambda: client.sent, 30, "the third call")
        assert loop.time() - began > 0.9 * WATCHED_POLL_SECONDS_MAX
        is_watched, client.sent = False, 0
        decided.set()
        await until(lambda: client.sent >= 3, WATCHED_POLL_SECONDS_MAX, "calls every second")
    finally:
        sweeping.cancel()
        with suppress(asyncio.CancelledError):
            await sweeping
        await client.aclose()


async def test_new_events_are_swept_when_they_are_due(
    private_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hold of 300 ms, made while the sweeper would rest for a minute."""
    monkeypatch.setattr(sweeper_module, "POLL_SECONDS_MAX", 60.0)
    client, keys, decided = (
        cancellable(CountingClient(port=private_server[1])),
        KeySpace("own", 1),
        asyncio.Event(),
    )
    await take_over(client, keys)
    gate, of_shard = Gate(client, keys, SEALER), keys.shard(0)
    terms = StockTerms(issuer="i", total=9, hold_ms=300)
    await gate.decide([Open(id="o", offer="s", terms=terms)], "decided")
    client.sent = 0
    sweeping = asyncio.create_task(Sweeper(client, of_shard, 1, 10**9, decided=decided).run())
    try:
        await until(lambda: client.sent, 10, "the first call")
        [held] = await gate.decide([Grab(id="g", offer="s", user="u")], "decided")
        assert held.outcome == "held"
        decided.set()

        async def is_over() -> bool:
            return not await client.zcard(of_shard.holds)

        await until(is_over, 30, "the end of the hold")
    finally:
        sweeping.cancel()
        with suppress(asyncio.CancelledError):
            await sweeping
        await gate.close()
        await client.aclose()
