"""Keeps a bounded sample of refusals, so that support can later see why a user was refused.

Refusals are not events, and deciding does not wait for them. The gate passes its answers here without
waiting. Refusals above the bounds are counted and dropped; the others are written, many at once, by the
functions that the caller gives, one for each place. A place that is down holds up no other.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from zlib import crc32

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab, GrabCommand
from grabstream.models.outcomes import Outcome
from grabstream.runtime.ending import end
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.runtime.trouble import is_trouble

log = logging.getLogger(__name__)

FLUSH_EVERY_SECONDS: Final = 1.0
CLOSE_SECONDS_MAX: Final = 2.0
#: Refusals that are not written yet to a place.
WAITING_MAX: Final = 50_000
BATCH_MAX: Final = 5_000
#: A write usually takes 0.1 s. A write that takes this long is retried, since its server may never answer.
WRITE_SECONDS_MAX: Final = 30.0


class Refusal(NamedTuple):
    """A refused command: its time (ms since 1970 UTC), what it requested, and its answer. `limit_left`
    belongs to `limit_name`.
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
    second, and at most `waiting_max` that are not written yet to a place.
    """

    one_in: int = 1
    per_second_max: int = 2_000
    waiting_max: int = WAITING_MAX


class RefusalLog:
    """Keeps a sample of refusals until they are written to each of the places. `take` returns at once; `run`
    writes until it is cancelled; call `close` after it.

    All refusals of a sampled user are kept, so that the user's history is complete. A function of `writes`
    raises OSError when it cannot write now; what it has not written within WRITE_SECONDS_MAX is written
    again, and may then exist twice. `end` is called by `close`, after the last write. `dropped` counts, by
    place, refusals of the sample that are not written there.
    """

    def __init__(
        self,
        writes: Mapping[str, Write],
        sample: RefusalSample | None = None,
        end: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self._sample = sample or RefusalSample()
        self._places = {name: _RefusalSink(name, write) for name, write in writes.items()}
        self._end = end
        self._second = 0
        self._taken = 0
        self.dropped = dict.fromkeys(writes, 0)

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
        is_too_much = self._taken >= sample.per_second_max
        open_places = []
        for place in self._places.values():
            if is_too_much or len(place.waiting) >= sample.waiting_max:
                self.dropped[place.name] += 1
            else:
                open_places.append(place)
        if not open_places:
            return
        self._taken += 1
        limit = answer.limit
        refusal = Refusal(
            answer.at or now, str(command.__struct_config__.tag), command.id, command.offer, user, grab,
            getattr(command, "quantity", None), answer.code, answer.retry_at,
            f"{limit.by}/{limit.per}" if limit else None,
            limit.left if limit else None, answer.left, answer.message,
        )  # fmt: skip
        for place in open_places:
            place.waiting.append(refusal)

    async def run(self) -> None:
        """Writes kept refusals until cancelled; those that cannot be written now are kept, as far as there is
        room.
        """
        tasks = [asyncio.create_task(self._run(place)) for place in self._places.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end(tasks)

    async def _run(self, place: "_RefusalSink") -> None:
        logged = 0
        while True:
            await asyncio.sleep(seconds_to_tick(FLUSH_EVERY_SECONDS))
            if (dropped := self.dropped[place.name]) > logged:
                log.info(
                    "%d refusals were too many for %s; `demand` counts them", dropped - logged, place.name
                )
                logged = dropped
            try:
                await place.flush()
            except BaseException as error:
                if not is_trouble(error):
                    raise
                log.warning("refusals wait to be written to %s: %s", place.name, error)

    async def flush(self) -> None:
        """Writes kept refusals to all places; raises OSError when one cannot be written to now."""
        done = await asyncio.gather(
            *(place.flush() for place in self._places.values()), return_exceptions=True
        )
        for error in done:
            if isinstance(error, BaseException):
                raise error

    async def close(self) -> None:
        """Writes kept refusals within CLOSE_SECONDS_MAX; the process does not wait longer for them."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await self.flush()
        except OSError as error:  # a TimeoutError is one
            waiting = {name: len(place.waiting) for name, place in self._places.items() if place.waiting}
            log.info("refusals that were not written: %s (%r)", waiting, error)
        finally:
            if self._end is not None:
                await self._end()


class _RefusalSink:
    """Where refusals are written: `waiting` are those that are not there yet."""

    def __init__(self, name: str, write: Write) -> None:
        self.name = name
        self.waiting: list[Refusal] = []
        self._write = write

    async def flush(self) -> None:
        """Writes what waits; raises OSError when it cannot be written now."""
        while self.waiting:
            refusals = self.waiting[:BATCH_MAX]
            await self._write_within(refusals)
            # Deletes by count, since more refusals may have been added after these.
            del self.waiting[: len(refusals)]

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
