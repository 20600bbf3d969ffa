"""Worker processes share the shards: who joins gets a share and who is stopped passes its own on, while
callers of `journaled` answers notice nothing; who is killed or hangs is replaced when its leases end; who is
overloaded gives some away.
"""

import asyncio
import contextlib
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import CouponTerms
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.settings import Settings
from tests.conftest import Worker, until
from tests.drill.traffic import a_campaign_of_each_shard
from tests.support.leases import leases_by_process, until_spread_over

ROLES = "decide,relay,sweep"
#: The longest pause of a shard that is passed on, beyond the longest of all other shards at that moment.
PAUSE_SECONDS_MAX = 0.2
#: A worker that is passed a lease takes the shard over within this time.
SETTLED_SECONDS = 2.0
#: Time of a test in which nothing may move; several leases.
REST_SECONDS = 5.0


class Spread:
    """How often shards were taken over, and how long each shard gave no `journaled` answer around each
    takeover.
    """

    def __init__(self, keys: KeySpace, redis: Any, gate: Gate) -> None:
        self.keys = keys
        self.redis = redis
        self._gate = gate
        self._answered_at: list[list[float]] = [[] for _ in range(keys.shards)]
        #: (time, shard) of each raised term.
        self.takeovers: list[tuple[float, int]] = []

    async def rests(self) -> None:
        """Checks that no shard is taken over, after the last ones that were passed on have been."""
        began = time.monotonic()

        def is_settled() -> bool:
            last = max([began, *(at for at, _ in self.takeovers)])
            return time.monotonic() - last > SETTLED_SECONDS

        await until(is_settled, 30, "rest")
        takeovers = list(self.takeovers)
        await asyncio.sleep(REST_SECONDS)
        assert self.takeovers == takeovers

    async def ask(self, shard: int, offer: str) -> None:
        """Sends grabs to a shard all the time, one after the other."""
        number = 0
        while True:
            number += 1
            grab = Grab(id=f"g{number}", offer=offer, user=f"u{number}")
            with contextlib.suppress(OutcomeUnknown):
                [answer] = await self._gate.decide([grab], "journaled", patience_ms=500, timeout_ms=3_000)
                if answer.decided:
                    self._answered_at[shard].append(time.monotonic())
            await asyncio.sleep(0.01)

    async def watch(self) -> None:
        """Notes each takeover."""
        terms: dict[int, Any] = {}
        while True:
            for shard in range(self.keys.shards):
                term = await self.redis.hget(self.keys.shard(shard).state, "term")
                if terms.setdefault(shard, term) != term:
                    self.takeovers.append((time.monotonic(), shard))
                    terms[shard] = term
            await asyncio.sleep(0.02)

    def pauses(self, first: int) -> list[tuple[float, float]]:
        """For each takeover from a number on: the longest time around it without an answer of that shard, and
        that of all other shards.
        """
        found = []
        for at, shard in self.takeovers[first:]:
            longest = [self._longest(times, at) for times in self._answered_at]
            found.append((longest.pop(shard), max(longest)))
        return found

    def _longest(self, times: list[float], at: float) -> float:
        """The longest time between two answers of which at least a part is near a time."""
        gaps = [after - before for before, after in pairwise(times) if before - 0.3 <= at <= after + 0.1]
        return max(gaps, default=time.monotonic() - at)


@asynccontextmanager
async def spread_of(system: Settings) -> AsyncIterator[Spread]:
    """Opens an offer in every shard, and sends grabs to all until the end."""
    redis, keys = open_redis(system), key_space(system)
    offers = [f"{campaign}:o" for campaign in a_campaign_of_each_shard(keys, "spread")]
    tasks = []
    async with open_gate(system) as gate:
        try:
            await gate.decide(
                [Open(id="o", offer=offer, terms=CouponTerms(issuer="i", total=10**6)) for offer in offers],
                patience_ms=60_000,
                timeout_ms=60_000,
            )
            spread = Spread(keys, redis, gate)
            tasks = [asyncio.create_task(spread.ask(shard, offer)) for shard, offer in enumerate(offers)]
            tasks.append(asyncio.create_task(spread.watch()))
            yield spread
            assert not [task for task in tasks if task.done()]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await redis.aclose()


@pytest.mark.nightly
async def test_callers_do_not_notice_that_workers_join_and_are_stopped(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    crew = [worker(system, ROLES)]
    async with spread_of(system) as spread:
        await until_spread_over(system, *crew)
        for _ in range(3):
            crew.append(worker(system, ROLES))
            await until_spread_over(system, *crew)
        await spread.rests()
        # 4, 2 and 2 shards were passed on, each once.
        assert len(spread.takeovers) == 8
        for place in (1, 0, 1):
            leaving = crew.pop(place)
            assert await asyncio.to_thread(leaving.stop) == 0
            await until_spread_over(system, *crew, seconds=10)
        await spread.rests()
        pauses = spread.pauses(0)
    print([(round(moved * 1000), round(other * 1000)) for moved, other in pauses])
    assert statistics.median(moved - other for moved, other in pauses) < PAUSE_SECONDS_MAX, pauses


@pytest.mark.nightly
async def test_shards_are_even_again_after_kill_9_and_after_a_pause(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    crew = [worker(system, ROLES) for _ in range(3)]
    async with spread_of(system) as spread:
        await until_spread_over(system, *crew)
        await spread.rests()
        crew.pop().kill()
        await until_spread_over(system, *crew)
        await spread.rests()
        crew[0].signal(signal.SIGSTOP)
        await until_spread_over(system, crew[1])
        crew[0].signal(signal.SIGCONT)
        await until_spread_over(system, *crew)
        await spread.rests()
        assert crew[0].process.poll() is None


@pytest.mark.nightly
async def test_an_overloaded_worker_gives_shards_away(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    """A worker that gets the processor only now and then: its event loop lags."""
    slow, other = worker(system, ROLES), worker(system, ROLES)
    async with spread_of(system) as spread:
        await until_spread_over(system, slow, other)

        async def starve() -> None:
            while True:
                slow.signal(signal.SIGSTOP)
                await asyncio.sleep(0.35)
                slow.signal(signal.SIGCONT)
                await asyncio.sleep(0.1)

        starving = asyncio.create_task(starve())
        try:
            await until(lambda: spread_has(spread, slow, 2), 60, "two shards that are given away")
        finally:
            starving.cancel()
            await asyncio.wait({starving})
            slow.signal(signal.SIGCONT)
        # It has recovered, and for some minutes gets nothing back.
        takeovers = len(spread.takeovers)
        await asyncio.sleep(REST_SECONDS)
        assert len(spread.takeovers) - takeovers <= 1
        assert await spread_has(spread, slow, 2)
        assert "relays at most" in slow.log.read_text()
        assert "relays at most" not in other.log.read_text()


async def spread_has(spread: Spread, worker: Worker, at_most: int) -> bool:
    """Whether a worker has at most `at_most` shards, and all shards have a worker."""
    held = await leases_by_process(spread.redis, spread.keys)
    return held[str(worker.process.pid)] <= at_most and not held[""]
