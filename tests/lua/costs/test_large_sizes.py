"""Sizes too large for the daily tests; `make nightly` runs them, and each prints its times.

A million holds that end within a second, twenty thousand offers that close at once, the retirement of an
offer with a million grabs, a queue of a hundred thousand grabs, two hundred thousand callers that leave
before they have their answers.
"""

import asyncio
import gc
import time
from contextlib import suppress
from typing import Any

import pytest

from grabstream.gate.queue import QueueEntry
from grabstream.models.commands import Amend, AnyCommand, Close, Grab, Open
from grabstream.models.offers import Changes, EnvelopeTerms, StockTerms
from tests.lua.costs.measured_shard import SLOWER, MeasuredShard, longest
from tests.support.shards import event_lines

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3_600)]

HOLD_MS = 60_000
LIST = 2_000


async def grab_all(system: MeasuredShard, offer: str, count: int, wait: bool = False) -> None:
    """Sends `count` grabs of as many users, and empties the outbox after each list, as a relay does."""
    for start in range(0, count, LIST):
        numbers = range(start, min(start + LIST, count))
        answers = await system.decide(
            [Grab(id=f"g{n}", offer=offer, user=f"u{n}", wait=wait) for n in numbers]
        )
        assert {answer.outcome for answer in answers} <= {"held", "granted", "waiting"}
        await system.redis.xtrim(system.keys.outbox, maxlen=0, approximate=False)


def report(name: str, system: MeasuredShard, began: float) -> None:
    """Prints times and number of calls since `began`; checks that no call is long."""
    print(f"\n{name}: {time.monotonic() - began:.1f} s, {len(system.calls):,} calls")
    for call in longest(system.calls).values():
        print(f"  {call.script}: longest {call.cpu_ms:.1f} ms of Redis' thread")
        assert call.cpu_ms < 10 * SLOWER, call


async def test_a_million_holds_end_together_in_short_calls(system: MeasuredShard) -> None:
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


async def test_twenty_thousand_offers_close_at_once_in_short_calls(system: MeasuredShard) -> None:
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
        await asyncio.gather(system.sweeper.handle_offers(system.now), system.sweeper.expire_all(system.now))
    report("twenty thousand offers close", system, began)
    assert [call.script for call in calls].index("expire") < 3
    lines = await event_lines(system.redis, system.space, 0)
    assert sum(b'"offer.closed"' in line for line in lines) == count


async def test_an_offer_with_a_million_grabs_retires_in_short_calls(system: MeasuredShard) -> None:
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


async def test_a_queue_of_a_hundred_thousand_is_served_in_short_calls(system: MeasuredShard) -> None:
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
    report(
        "a queue of a hundred thousand: one half is served, the other half removed by the close",
        system,
        began,
    )
    assert await system.redis.zcard(system.keys.offer_keys("o")[7]) == 0


async def test_two_hundred_thousand_callers_that_leave_cost_no_other_answer(system: MeasuredShard) -> None:
    """Callers that do not wait for their answers cost no other caller its answer, and no entry of theirs
    stays in the gate.
    """
    count, staying = 200_000, 2_000
    await system.decide([Open(id="o", offer="o", terms=StockTerms(issuer="i", total=10**9))])
    began = time.monotonic()

    async def leave(numbers: range) -> None:
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
        commands: list[AnyCommand] = [Grab(id=f"k{n}", offer="o", user=f"k{n}") for n in range(staying)]
        return [answer for command in commands for answer in await system.decide([command])]

    _, answers = await asyncio.gather(leave(range(count)), stay())
    assert [answer.outcome for answer in answers] == ["granted"] * staying
    repeats = await system.decide([Grab(id=f"k{n}", offer="o", user=f"k{n}") for n in range(staying)])
    assert all(answer.repeated for answer in repeats)
    lines = await event_lines(system.redis, system.space, 0)
    assert len({line for line in lines if b'"command":"k' in line}) == staying
    for shard in system.gate._shards:
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                while shard.in_flight or shard.queued:
                    await asyncio.sleep(0.01)
        assert (list(shard.queue), shard.queued, shard.in_flight) == ([], 0, [])
    del answers, repeats
    gc.collect()
    entries_left = sum(isinstance(object_, QueueEntry) for object_ in gc.get_objects())
    print(
        f"\n{count:,} callers left in {time.monotonic() - began:.1f} s; {len(lines) - 1:,} grabs decided; "
        f"{entries_left} queue entries left"
    )
    assert entries_left < 10
