"""Sizes that no run of every day can have, each with what it took: `make nightly` plays them.

A million holds that end in a second, twenty thousand offers that close at once, the retirement of an offer
with a million grabs, a queue of a hundred thousand, two hundred thousand callers who go before they have
their answer.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from grabstream.lua.gate.queue import QueueEntry
from grabstream.models.commands import Amend, AnyCommand, Close, Grab, Open
from grabstream.models.offers import Changes, EnvelopeTerms, StockTerms
from tests.lua.conftest import event_lines
from tests.lua.costs.calls import SLOWER, Measured, longest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3_600)]

HOLD_MS = 60_000
LIST = 2_000


@pytest.fixture
async def system(own_server: Any) -> AsyncIterator[Measured]:
    one = Measured(own_server[1])
    await one.begin()
    yield one
    await one.end()


async def grab_all(system: Measured, offer: str, count: int, wait: bool = False) -> None:
    """As many grabs by as many users; the outbox is emptied meanwhile, as a relay does."""
    for start in range(0, count, LIST):
        places = range(start, min(start + LIST, count))
        answers = await system.decide(
            [Grab(id=f"g{n}", offer=offer, user=f"u{n}", wait=wait) for n in places]
        )
        assert {answer.outcome for answer in answers} <= {"held", "granted", "waiting"}
        await system.redis.xtrim(system.keys.outbox, maxlen=0, approximate=False)


def report(what: str, system: Measured, began: float) -> None:
    """What it took, on this machine; no call may be long."""
    print(f"\n{what}: {time.monotonic() - began:.1f} s, {len(system.calls):,} calls")
    for call in longest(system.calls).values():
        print(f"  {call.script}: longest {call.cpu_ms:.1f} ms of Redis' thread")
        assert call.cpu_ms < 10 * SLOWER, call


async def test_a_million_holds_that_end_in_a_second(system: Measured) -> None:
    count = 1_000_000
    await system.decide([Open(id="o", offer="o", terms=StockTerms(issuer="i", total=count, hold_ms=HOLD_MS))])
    for start in range(0, count, 100_000):
        system.now += 100
        for first in range(start, start + 100_000, LIST):
            await system.decide(
                [Grab(id=f"g{n}", offer="o", user=f"u{n}") for n in range(first, first + LIST)]
            )
        await system.redis.xtrim(system.keys.outbox, maxlen=0, approximate=False)
    system.now += HOLD_MS
    began = time.monotonic()
    with system.measuring():
        assert await system.sweeper.sweep(system.now) == count
    report("a million holds end", system, began)
    assert await system.redis.zcard(system.keys.holds) == 0
    assert await system.redis.hmget(system.keys.offer("o"), ["held", "units_left"]) == [b"0", b"%d" % count]


async def test_twenty_thousand_offers_that_close_at_once(system: Measured) -> None:
    count = 20_000
    terms = StockTerms(
        issuer="i", total=5, hold_ms=3_600_000, waiting_list=True, closes_at=system.now + 1_000
    )
    for start in range(0, count, 500):
        await system.decide(
            [Open(id=f"open-{n}", offer=f"o{n}", terms=terms) for n in range(start, start + 500)]
        )
        await system.decide(
            [Grab(id=f"g{n}", offer=f"o{n}", user="u", quantity=1) for n in range(start, start + 500)]
        )
    await system.decide(
        [Open(id="short", offer="short", terms=StockTerms(issuer="i", total=1, hold_ms=1_000))]
    )
    await system.decide([Grab(id="held", offer="short", user="u")])
    system.now += 1_000
    began = time.monotonic()
    with system.measuring() as calls:
        await asyncio.gather(system.sweeper.see_to_offers(system.now), system.sweeper.expire_all(system.now))
    report("twenty thousand offers close", system, began)
    assert [call.script for call in calls].index("expire") < 3
    lines = await event_lines(system.redis, system.space, 0)
    assert sum(b'"offer.closed"' in line for line in lines) == count


async def test_the_retirement_of_an_offer_with_a_million_grabs(system: Measured) -> None:
    count = 1_000_000
    terms = EnvelopeTerms(
        issuer="a", funding="f", asset="CNY", total=10**9, parts=count, draw="at_grab", retire_after_ms=1
    )
    await system.decide(
        [
            Open(id="o", offer="c:o", terms=terms),
            Open(id="other", offer="c:other", terms=StockTerms(issuer="i", total=1)),
        ]
    )
    await grab_all(system, "c:o", count)
    system.now += 10
    began = time.monotonic()
    with system.measuring() as calls:
        await system.sweeper.sweep(system.now)
        retired = len(calls)
        await system.sweeper.clean(system.now)
    report(
        f"an offer with a million grabs retires ({retired} calls, then its answers are cleaned)",
        system,
        began,
    )
    assert retired <= 2
    assert await system.redis.hkeys(system.keys.answers("c")) == [b"other"]


async def test_a_queue_of_a_hundred_thousand(system: Measured) -> None:
    count = 100_000
    terms = StockTerms(issuer="i", total=1, hold_ms=HOLD_MS * 1_000, waiting_list=True)
    await system.decide([Open(id="o", offer="o", terms=terms), Grab(id="first", offer="o", user="first")])
    await grab_all(system, "o", count, wait=True)
    began = time.monotonic()
    with system.measuring():
        [amended] = await system.decide([Amend(id="a", offer="o", changes=Changes(total=count // 2 + 1))])
        assert amended.outcome == "amended"
        await system.sweeper.sweep(system.now)
        assert await system.redis.zcard(system.keys.holds) == count // 2 + 1
        await system.decide([Close(id="c", offer="o")])
        await system.sweeper.sweep(system.now)
    report("of a queue of a hundred thousand one half is served, the other sent home", system, began)
    assert await system.redis.zcard(system.keys.of_offer("o")[7]) == 0


async def test_two_hundred_thousand_callers_who_go(system: Measured) -> None:
    """Callers that do not wait for their answers cost no other one its answer, and leave nothing behind in
    the gate.
    """
    count, kept = 200_000, 2_000
    await system.decide([Open(id="o", offer="o", terms=StockTerms(issuer="i", total=10**9))])
    began = time.monotonic()

    async def go(numbers: range) -> None:
        for start in numbers[::1_000]:
            callers = [
                asyncio.create_task(system.decide([Grab(id=f"g{n}", offer="o", user=f"u{n}")]))
                for n in range(start, start + 1_000)
            ]
            await asyncio.sleep(0)
            for turn, caller in enumerate(callers):
                if turn % 7 == 3:
                    await asyncio.sleep(0)
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)

    async def stay() -> list[Any]:
        commands: list[AnyCommand] = [Grab(id=f"k{n}", offer="o", user=f"k{n}") for n in range(kept)]
        return [answer for command in commands for answer in await system.decide([command])]

    _, answers = await asyncio.gather(go(range(count)), stay())
    assert [answer.outcome for answer in answers] == ["granted"] * kept
    again = await system.decide([Grab(id=f"k{n}", offer="o", user=f"k{n}") for n in range(kept)])
    assert all(answer.repeated for answer in again)
    lines = await event_lines(system.redis, system.space, 0)
    assert len({line for line in lines if b'"command":"k' in line}) == kept
    for shard in system.gate._shards:
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                while shard.in_flight or shard.queued:
                    await asyncio.sleep(0.01)
        assert (list(shard.queue), shard.queued, shard.in_flight) == ([], 0, [])
    del answers, again
    gc.collect()
    left = sum(isinstance(one, QueueEntry) for one in gc.get_objects())
    print(
        f"\n{count:,} callers went in {time.monotonic() - began:.1f} s; {len(lines) - 1:,} grabs decided; "
        f"{left} tickets left"
    )
    assert left < 10
