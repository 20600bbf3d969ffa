"""Gaps: the longest time in which a shard gave no answer, measured by callers that send grabs to each shard
all the time, independently of the other shards.

Load of the machine and pauses of the measuring process are part of the measurement. So a bound is relative
to the gaps in the same run before the fault: see `bound_seconds`.
"""

import asyncio
import time
from collections.abc import Collection
from typing import Final

from grabstream.gate.gate import Gate, Promise
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab, Open
from grabstream.models.offers import CouponTerms
from grabstream.models.outcomes import OutcomeUnknown
from tests.conftest import until
from tests.drill.traffic import a_campaign_of_each_shard

ASK_EVERY_SECONDS: Final = 0.02
PROMISES: Final[tuple[Promise, ...]] = ("journaled", "decided")
UNITS: Final = 1_000_000
#: The longest gap of an untouched shard on a quiet machine.
GAP_SECONDS_MAX: Final = 1.0
#: The longest gap on a loaded machine, as a multiple of the longest gap before the fault.
GAP_TO_BASELINE_MAX: Final = 3.0
#: How long the gaps before a fault are measured.
BASELINE_SECONDS: Final = 4.0


class Gaps:
    """Sends grabs to every shard all the time, with each promise. Needs `start` before use, `stop` after."""

    def __init__(self, gate: Gate, keys: KeySpace) -> None:
        self._gate = gate
        #: The commands with `journaled` answers.
        self.answered: list[tuple[AnyCommand, Answer]] = []
        self._offers = [f"{campaign}:o" for campaign in a_campaign_of_each_shard(keys, "gaps")]
        self._asked = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._answered_at: dict[tuple[int, Promise], float] = {}
        self._largest: dict[tuple[int, Promise], float] = {}

    async def start(self) -> None:
        """Opens an offer in every shard and starts the callers."""
        terms = CouponTerms(issuer="gaps", total=UNITS)
        await self._gate.decide(
            [Open(id="gaps", offer=offer, terms=terms) for offer in self._offers],
            patience_ms=60_000,
            timeout_ms=60_000,
        )
        both = [(shard, promise) for shard in range(len(self._offers)) for promise in PROMISES]
        self._answered_at = dict.fromkeys(both, time.monotonic())
        self.forget()
        self._tasks = [asyncio.create_task(self._ask(shard, promise)) for shard, promise in both]

    async def stop(self) -> None:
        """Ends the callers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def forget(self) -> None:
        """Measures gaps from the beginning again."""
        self._largest = dict.fromkeys(self._answered_at, 0.0)

    async def all_answer(self, within_seconds: float) -> None:
        """Returns when every shard has given a new answer with every promise."""
        now = time.monotonic()
        await until(lambda: min(self._answered_at.values()) > now, within_seconds, "an answer of every shard")

    def seconds(self) -> dict[int, float]:
        """The longest time without an answer since `forget`, by shard, over both promises."""
        return {
            shard: max(self._gap(shard, promise) for promise in PROMISES)
            for shard in range(len(self._offers))
        }

    def _gap(self, shard: int, promise: Promise) -> float:
        since_last = time.monotonic() - self._answered_at[shard, promise]
        return round(max(self._largest[shard, promise], since_last), 2)

    async def _ask(self, shard: int, promise: Promise) -> None:
        offer = self._offers[shard]
        while True:
            self._asked += 1
            command = Grab(id=f"gaps{self._asked}", offer=offer, user=f"u{self._asked}")
            await self._answer(command, promise)
            now = time.monotonic()
            self._largest[shard, promise] = max(
                self._largest[shard, promise], now - self._answered_at[shard, promise]
            )
            self._answered_at[shard, promise] = now
            await asyncio.sleep(ASK_EVERY_SECONDS)

    async def _answer(self, command: Grab, promise: Promise) -> None:
        """Sends a command until it is answered."""
        while True:
            try:
                [answer] = await self._gate.decide([command], promise, patience_ms=500, timeout_ms=3_000)
            except OutcomeUnknown:
                continue
            if answer.decided:
                if promise == "journaled":
                    self.answered.append((command, answer))
                return
            await asyncio.sleep(ASK_EVERY_SECONDS)


def waited(
    before_seconds: dict[int, float], during_seconds: dict[int, float], touched: Collection[int]
) -> list[str]:
    """Untouched shards whose gap was longer than the bound, each as a text."""
    bound = bound_seconds(max(before_seconds.values()))
    return [
        f"shard {shard}: no answer for {seconds:.2f} s, {bound:.2f} s at most (before the fault: "
        f"{before_seconds[shard]:.2f} s)"
        for shard, seconds in during_seconds.items()
        if shard not in touched and seconds > bound
    ]


def bound_seconds(baseline_seconds: float) -> float:
    """The longest gap allowed for an untouched shard, from the longest gap before the fault."""
    return max(GAP_SECONDS_MAX, GAP_TO_BASELINE_MAX * baseline_seconds)
