"""The run of a rehearsal over HTTP: the visitors of a crowd arrive in their time, whether those before them
are answered or not, and each behaves after its kind.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from grabstream.gate.gate import Gate
from grabstream.models.commands import Grab
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.over_http.crowd import Crowd, Visitor, requests_of
from grabstream.workshop.rehearsal.over_http.door import HttpDoor
from grabstream.workshop.rehearsal.over_http.measured import Answered, Measured, timeline
from grabstream.workshop.rehearsal.over_http.shape import Shape
from grabstream.workshop.rehearsal.phases import RUSH
from grabstream.workshop.rehearsal.run import Rehearsal, first_reason

DOOR: Final = "http"


class ShapedRehearsal(Rehearsal):
    """A rehearsal in which a crowd in a shape sends all of its grabs over HTTP; `measured` has what came of
    it.
    """

    def __init__(
        self, settings: Settings, gate: Gate, door: HttpDoor, shape: Shape, crowd: Crowd, seed: int
    ) -> None:
        super().__init__(settings, gate, crowd.envelopes, (), seed, door)
        self.shape = shape
        self.visitors: Sequence[Visitor] = crowd.visitors
        self.measured = Measured()
        #: How late this process let a user come, at most. Latencies have the delay, too.
        self.own_delay_seconds_max = 0.0
        self.doors.total = requests_of(shape, crowd.visitors)
        self._door = door
        self._random = random.Random(seed)

    async def crowd(self) -> float:
        """Lets all visitors come, and returns the seconds until all were answered."""
        self.doors.begin(RUSH)
        self.began = self.doors.phase.began
        with first_reason():
            await self._let_all_come()
        self.doors.end()
        return time.monotonic() - self.began

    async def _let_all_come(self) -> None:
        async with asyncio.TaskGroup() as visits:
            for visitor in self.visitors:
                await asyncio.sleep(self.began + visitor.at_seconds - time.monotonic())
                arrived = time.monotonic() - self.began
                self.measured.arrivals.append(arrived)
                self.own_delay_seconds_max = max(self.own_delay_seconds_max, arrived - visitor.at_seconds)
                visits.create_task(self._visit(visitor))

    def details(self) -> dict[str, Any]:
        """What is special about a rehearsal over HTTP, as JSON."""
        return {
            "shape": self.shape.title,
            "arrivals": [msgspec.structs.asdict(point) for point in self.shape.arrivals],
            "visitors": len(self.visitors),
            "kinds": dict(Counter(visitor.kind for visitor in self.visitors).most_common()),
            "own_delay_ms_max": round(self.own_delay_seconds_max * 1_000, 1),
            "attempts": dict(self._door.attempts.most_common()),
            "timeline": timeline(self.measured),
        }

    async def _visit(self, visitor: Visitor) -> None:
        due = self.began + visitor.at_seconds
        [first, *_] = visitor.grabs
        if visitor.kind == "bots":
            async with asyncio.TaskGroup() as attempts:
                for grab in visitor.grabs:
                    attempts.create_task(self._send(visitor, grab, time.monotonic()))
                    await asyncio.sleep(self.shape.bots.pause_ms / 1_000)
        elif visitor.kind == "double_clicks":
            async with asyncio.TaskGroup() as clicks:
                for _ in range(self.shape.double_clicks.connections):
                    clicks.create_task(self._send(visitor, first, due))
        elif visitor.kind == "vanishing":
            await self._door.abandon(first, self._random)
            await asyncio.sleep(self.shape.vanishing.back_after_ms / 1_000)
            for _ in range(self.shape.vanishing.repeats):
                await self._send(visitor, first, time.monotonic())
        else:
            await self._send(visitor, first, due)

    async def _send(self, visitor: Visitor, grab: Grab, due: float) -> None:
        """Sends a grab that is due at a time of the monotonic clock, and keeps its answer."""
        self.doors.sent[DOOR] += 1
        if visitor.kind == "slow":
            answer = await self._door.grab_slowly(grab, self.shape.slow.send_ms / 1_000)
        else:
            answer = await self._door.grab(grab)
        now = time.monotonic()
        self.doors.take(DOOR, answer)
        self.measured.take(Answered(visitor.kind, now - self.began, now - due, answer))
        if visitor.kind != "slow":
            self.doors.phase.latencies[DOOR].append(now - due)
