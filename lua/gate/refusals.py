"""Keeps a bounded sample of refusals, so that support can later see why a user was refused.

Refusals are not events, and deciding does not wait for them. The gate passes its answers here without
waiting. Refusals above the bounds are counted and dropped; the others are written, many at once, by the
function that the caller gives.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from zlib import crc32

from grabstream.lua.ending import end
from grabstream.lua.ticks import seconds_to_tick
from grabstream.lua.trouble import is_trouble
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab, GrabCommand
from grabstream.models.outcomes import Outcome

log = logging.getLogger(__name__)

FLUSH_EVERY_SECONDS: Final = 1.0
CLOSE_SECONDS_MAX: Final = 2.0
BATCH_MAX: Final = 5_000
#: A write usually takes 0.1 s. A write that takes this long is retried, since its server may never answer.
WRITE_SECONDS_MAX: Final = 30.0


class Refusal(NamedTuple):
    """A refused command: when (ms since 1970 UTC), what it asked for, and its answer. `limit_left` belongs to
    `limit_name`.
    """

    at: int
    type: str
    command: str
    offer: str
    user: str | None
    grab: str | None
    quantity: int | None
    code: int
    retry_at: int | None
    limit_name: str | None
    limit_left: int | None
    units_left: int | None
    message: str | None


Write = Callable[[Sequence[Refusal]], Coroutine[Any, Any, None]]


class RefusalSample(NamedTuple):
    """Which refusals are kept: those of one user in `one_in` (0: of no user), at most `per_second_max` per
    second, and at most `waiting_max` that are not written yet.
    """

    one_in: int = 1
    per_second_max: int = 2_000
    waiting_max: int = 50_000


class RefusalLog:
    """Keeps a sample of refusals until they are written. `take` returns at once; `run` writes until it is
    cancelled; call `close` after it.

    All refusals of a sampled user are kept, so that the user's history is complete. `write` raises OSError
    when it cannot write now; what it has not written within WRITE_SECONDS_MAX is written again, and may then
    exist twice.
    """

    def __init__(self, write: Write, sample: RefusalSample | None = None) -> None:
        self._write = write
        self._sample = sample or RefusalSample()
        self._waiting: list[Refusal] = []
        self._second = 0
        self._taken = 0
        self.dropped = 0

    def take(self, commands: Sequence[AnyCommand], answers: Sequence[Answer]) -> None:
        """Keeps the refusals among these answers, as far as there is room. A repeated answer was kept the
        first time.
        """
        for command, answer in zip(commands, answers, strict=True):
            if answer.code >= Outcome.invalid and not answer.repeated:
                self._keep(command, answer)

    def _keep(self, command: AnyCommand, answer: Answer) -> None:
        user = command.user if isinstance(command, Grab) else None
        grab = command.grab if isinstance(command, GrabCommand) else None
        sample = self._sample
        if sample.one_in != 1 and (
            not sample.one_in or crc32((user or grab or command.id).encode()) % sample.one_in
        ):
            return
        now = time.time_ns() // 1_000_000
        if now // 1000 != self._second:
            self._second, self._taken = now // 1000, 0
        if self._taken >= sample.per_second_max or len(self._waiting) >= sample.waiting_max:
            self.dropped += 1
            return
        self._taken += 1
        limit = answer.limit
        self._waiting.append(
            Refusal(
                answer.at or now, str(command.__struct_config__.tag), command.id, command.offer, user, grab,
                getattr(command, "quantity", None), answer.code, answer.retry_at,
                f"{limit.by}/{limit.per}" if limit else None,
                limit.left if limit else None, answer.left, answer.message,
            )
        )  # fmt: skip

    async def run(self) -> None:
        """Writes kept refusals until cancelled; those that cannot be written now are kept, as far as there is
        room.
        """
        logged = 0
        while True:
            await asyncio.sleep(seconds_to_tick(FLUSH_EVERY_SECONDS))
            if self.dropped > logged:
                log.info("%d refusals were too many to be kept; `demand` counts them", self.dropped - logged)
                logged = self.dropped
            try:
                await self.flush()
            except BaseException as error:
                if not is_trouble(error):
                    raise
                log.warning("refusals wait to be written: %s", error)

    async def flush(self) -> None:
        """Writes kept refusals; raises OSError when they cannot be written now."""
        while self._waiting:
            refusals = self._waiting[:BATCH_MAX]
            await self._write_within(refusals)
            # Deletes by count, since more refusals may have been added after these.
            del self._waiting[: len(refusals)]

    async def _write_within(self, refusals: Sequence[Refusal]) -> None:
        """Writes refusals; raises TimeoutError when that takes too long, even if the client swallows its
        cancellation.
        """
        writing = asyncio.create_task(self._write(refusals))
        try:
            await asyncio.wait({writing}, timeout=WRITE_SECONDS_MAX)
            if not writing.done():
                await end([writing])
                raise TimeoutError(f"not written within {WRITE_SECONDS_MAX:.0f} s")
            writing.result()
        finally:
            writing.cancel()

    async def close(self) -> None:
        """Writes kept refusals within CLOSE_SECONDS_MAX; the process does not wait longer for them."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await self.flush()
        except OSError as error:  # a TimeoutError is one
            log.info("%d refusals were not written: %r", len(self._waiting), error)


@asynccontextmanager
async def writing(refusals: RefusalLog | None) -> AsyncIterator[None]:
    """Writes kept refusals while the block runs, and the rest at its end."""
    if refusals is None:
        yield
        return
    task = asyncio.create_task(refusals.run())
    try:
        yield
    finally:
        await end([task])
        await refusals.close()
