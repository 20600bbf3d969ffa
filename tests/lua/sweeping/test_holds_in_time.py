"""A hold ends within a second of its deadline by the clock of Redis, in real time, whatever else its shard
does.

Meanwhile the same shard decides grabs, offers with full queues close, hundreds of offers retire, and their
answers are deleted. A process without a processor ends no holds, so the worst delay of this process's event
loop is subtracted.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import redis.asyncio

from grabstream.connections.opening import cancellable
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.lua.server import time_ms_of
from grabstream.models.commands import Amend, AnyCommand, Close, Grab, Open
from grabstream.models.offers import Changes, EnvelopeTerms, StockTerms, Terms
from grabstream.streams.deciding.sweeper import SWEEP_EVERY_SECONDS, Sweeper
from tests.support.shards import SEALER, event_lines, take_over

pytestmark = pytest.mark.long

LATE_MS_MAX = 1_000
HOLD_MS = 2_000
TICK_SECONDS = 0.02


class LoopDelay:
    """Measures the worst delay of this process's event loop, which no bound of the sweeper can prevent."""

    def __init__(self) -> None:
        self.late_ms = 0.0

    async def watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            self.late_ms = max(self.late_ms, 1_000 * (time.monotonic() - before - TICK_SECONDS))


@pytest.fixture
async def shard(private_server: Any) -> AsyncIterator[tuple[Any, KeySpace, Gate]]:
    client, keys = cancellable(redis.asyncio.Redis(port=private_server[1])), KeySpace("own", 1)
    await take_over(client, keys)
    gate = Gate(
        client,
        keys,
        SEALER,
        GateLimits(timeout_ms=120_000, queue_commands_max=10**6, outbox_events_max=10**9),
    )
    yield client, keys, gate
    await gate.close()
    await client.aclose()


async def decided(gate: Gate, commands: list[AnyCommand]) -> None:
    for start in range(0, len(commands), 1_000):
        answers = await gate.decide(commands[start : start + 1_000], "decided")
        assert all(answer.positive for answer in answers), answers


async def grab_until_cancelled(gate: Gate) -> None:
    """Sends one list of grabs after the other until cancelled."""
    number = 0
    while True:
        await decided(
            gate, [Grab(id=f"t{n}", offer="c:live", user=f"t{n}") for n in range(number, number + 50)]
        )
        number += 50
        await asyncio.sleep(TICK_SECONDS)


async def fill_queues(gate: Gate, names: list[str], waiting: int) -> None:
    """Holds the unit of each offer, and adds `waiting` grabs to its waiting list."""
    for name in names:
        grabs: list[AnyCommand] = [Grab(id=f"{name}-h", offer=name, user="h")]
        grabs += [Grab(id=f"{name}-w{n}", offer=name, user=f"w{n}", wait=True) for n in range(waiting)]
        await decided(gate, grabs)


@pytest.mark.parametrize(
    ("seconds", "retiring", "closing", "waiting", "held"),
    [(5, 200, 10, 60, 20), pytest.param(60, 10_000, 300, 200, 200, marks=pytest.mark.nightly)],
)
@pytest.mark.timeout(900)
async def test_holds_end_within_a_second_of_their_deadline(
    shard: Any, seconds: int, retiring: int, closing: int, waiting: int, held: int
) -> None:  # fmt: skip
    client, keys, gate = shard
    queued = StockTerms(issuer="i", total=1, hold_ms=10**8, waiting_list=True)
    closing_names, gone_names = [f"q{n}" for n in range(closing)], [f"c:{n}" for n in range(retiring)]
    of_offer: dict[str, Terms] = {
        "c:live": EnvelopeTerms(
            issuer="a", funding="f", asset="CNY", total=10**9, parts=1_000_000, draw="at_grab"
        ),
        "h": StockTerms(issuer="i", total=10**6, hold_ms=HOLD_MS),
        **dict.fromkeys(closing_names, queued),
        **dict.fromkeys(gone_names, StockTerms(issuer="i", total=1, retire_after_ms=1)),
    }
    await decided(
        gate, [Open(id=f"open-{name}", offer=name, terms=terms) for name, terms in of_offer.items()]
    )
    await fill_queues(gate, closing_names, waiting)
    # All closes and retirements are due when the sweeper starts. The holds end one after the other while it
    # works on them.
    now = await time_ms_of(client, keys.shard(0).state)
    changes = Changes(closes_at=now + 500)
    await decided(gate, [Amend(id=f"a-{name}", offer=name, changes=changes) for name in closing_names])
    await decided(gate, [Close(id=f"close-{name}", offer=name) for name in gone_names])
    loop, sweeper = LoopDelay(), Sweeper(client, keys.shard(0), 1, 10**9)
    tasks = [asyncio.create_task(work) for work in (loop.watch(), grab_until_cancelled(gate), sweeper.run())]
    for number in range(seconds * 4):
        await decided(gate, [Grab(id=f"h{number}-{n}", offer="h", user=f"u{n}") for n in range(held)])
        await asyncio.sleep(0.25)
    async with asyncio.timeout(120):
        while (
            await client.zcount(keys.shard(0).holds, 0, now + 10**7)
            or await client.scard(keys.shard(0).retired) < retiring
        ):
            await asyncio.sleep(SWEEP_EVERY_SECONDS)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    deadlines: dict[str, int] = {}
    late: list[int] = []
    busy = 0
    for event in map(json.loads, await event_lines(client, keys, 0)):
        if event["type"] == "grab.held" and event["offer"] == "h":
            deadlines[event["grab"]] = event["deadline_at"]
        elif event["type"] == "grab.released" and event.get("reason") == "expired":
            late.append(event["at"] - deadlines.pop(event["grab"]))
        elif event["type"] in ("offer.closed", "offer.retired") or event.get("reason") == "left_queue":
            busy += 1
    assert (len(late), deadlines) == (seconds * 4 * held, {})
    assert busy == 2 * retiring + closing * (1 + waiting)
    print(
        f"\n{len(late):,} holds ended at most {max(late)} ms late, on average {sum(late) / len(late):.0f}; "
        f"the loop {loop.late_ms:.0f} ms"
    )
    assert min(late) >= 0
    assert max(late) < LATE_MS_MAX + loop.late_ms
