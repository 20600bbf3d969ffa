"""Traffic for fault tests: a crowd that sends grabs through a gate and through Kafka, while the test causes
faults; afterwards all checks must pass.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from redis.exceptions import ConnectionError

from grabstream.connections.opening import gate_limits, key_space, open_redis, sealer
from grabstream.gate.gate import Gate
from grabstream.ops.verification.verifying import verify
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.crowd import attempts, envelopes
from grabstream.workshop.rehearsal.run import Rehearsal, open_books, read_progress
from grabstream.workshop.rehearsal.verdict import verdict
from tests.conftest import until


class Traffic:
    """A crowd of about `people` users, and its progress."""

    def __init__(self, settings: Settings, gate: Gate, people: int, seed: int = 11) -> None:
        self.settings = settings
        self._envelopes = [
            envelope
            for envelope in envelopes(seed, people, 6, people // 20, 1_000)
            if envelope.deadline_ms is None
        ]
        grabs = attempts(seed, self._envelopes)
        self.rehearsal = Rehearsal(settings, gate, self._envelopes, grabs, seed)
        self._crowd: asyncio.Task[float] | None = None

    @property
    def answered(self) -> int:
        """The number of answers, through the gate and through Kafka."""
        return sum(self.rehearsal.doors.answered.values())

    async def begin(self) -> None:
        """Opens the envelopes and starts the crowd."""
        await self.rehearsal.open()
        self.let_in()

    def let_in(self) -> None:
        """Starts the crowd; the envelopes must be open."""
        self._crowd = asyncio.create_task(self.rehearsal.crowd())

    async def until_answered(self, share: float) -> None:
        """Returns when this share of all attempts is answered."""
        await self._until(lambda: self.answered >= share * self.rehearsal.doors.total, 60, "traffic")

    async def seconds_to_next_answer(self) -> float:
        """The time from now to the next answer, in seconds, or to the end of the crowd, which may have all of
        its answers already.
        """
        before, began = self.answered, time.monotonic()
        await self._until(lambda: self.answered > before, 30, "an answer")
        return time.monotonic() - began

    async def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Returns when the condition holds or the crowd has ended; raises the crowd's error."""
        crowd = self._crowd
        assert crowd is not None
        await until(lambda: condition() or crowd.done(), seconds, what)
        if crowd.done():
            crowd.result()

    async def adds_up(self) -> None:
        """Waits for the crowd and the read models, then runs all checks of the verdict and of `verify`.
        Raises AssertionError with the problems.
        """
        assert self._crowd is not None
        await asyncio.wait_for(self._crowd, 120)
        redis = open_redis(self.settings)
        try:
            async with await open_books(self.settings) as books:

                async def complete() -> bool:
                    try:
                        progress = await read_progress(redis, key_space(self.settings), books)
                        # A Redis that has just been emptied has decided nothing, so all of it is complete.
                        promised = sum(map(len, self.rehearsal.doors.granted.values()))
                        return progress.complete and progress.decided >= promised
                    except ConnectionError:
                        return False  # a master has just ended, and its replica has not replaced it yet

                await until(complete, 150, "all events in the read models")
                checks = await verdict(books, self._envelopes, self.rehearsal.doors)
            # The crowd has gone: no user waits while Redis is compared.
            checks += await verify(self.settings, share=1)
        finally:
            await redis.aclose()
        wrong = {check.name: check.problems for check in checks if not check.passed}
        assert not wrong, wrong


@asynccontextmanager
async def traffic(settings: Settings, people: int = 8_000) -> AsyncIterator[Traffic]:
    """Yields traffic with its own gate; the traffic has not started."""
    client = open_redis(settings)
    gate = Gate(client, key_space(settings), sealer(settings), gate_limits(settings))
    gate.start()
    try:
        yield Traffic(settings, gate, people)
    finally:
        await gate.close()
        await client.aclose()
