"""Refusals that are kept, so that somebody can later be told why: a bounded sample, written off the deciding
path.

Refusals are no events. The gate hands over what it answered, without waiting; what is too much is counted and
dropped, and what is kept goes in batches to where the caller says.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from zlib import crc32

from grabstream.lua.ending import end
from grabstream.lua.trouble import is_trouble
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab, GrabCommand
from grabstream.models.outcomes import Outcome

log = logging.getLogger(__name__)

FLUSH_EVERY_SECONDS: Final = 1.0
CLOSE_SECONDS_MAX: Final = 2.0
BATCH_MAX: Final = 5_000
#: A batch takes a tenth of a second; one that takes so long is tried again, since its server may never answer
#: any more.
WRITE_SECONDS_MAX: Final = 30.0


class Refusal(NamedTuple):
    """A refused command: when (ms since 1970 UTC), what it asked for, and what it was told. `limit_left` is
    of `limit_name`.
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
    """What is kept: one user in `one_in` (0: nobody), at most so many refusals a second, and so many that
    wait to be written.
    """

    one_in: int = 1
    per_second_max: int = 2_000
    waiting_max: int = 50_000


class RefusalLog:
    """Keeps a sample of refusals until they are written. `take` is quick and never waits; `run` writes until
    cancelled, then `close`.

    A user is sampled or not, so that the story of one who is has no holes. `write` raises OSError when it
    cannot write now; what it has not written within WRITE_SECONDS_MAX is written again, and so may be there
    twice.
    """

    def __init__(self, write: Write, sample: RefusalSample | None = None) -> None:
        self._write = write
        self._sample = sample or RefusalSample()
        self._waiting: list[Refusal] = []
        self._second = 0
        self._taken = 0
        self.dropped = 0

    def take(self, commands: Sequence[AnyCommand], answers: Sequence[Answer]) -> None:
        """Keeps what of these was refused, as far as there is room; a repeated answer was kept the first
        time.
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
        """Writes what waits, again and again, until cancelled; what cannot be written now is kept, as far as
        there is room.
        """
        told = 0
        while True:
            await asyncio.sleep(FLUSH_EVERY_SECONDS)
            if self.dropped > told:
                log.info("%d refusals were too many to be kept; `demand` counts them", self.dropped - told)
                told = self.dropped
            try:
                await self.flush()
            except BaseException as error:
                if not is_trouble(error):
                    raise
                log.warning("refusals wait to be written: %s", error)

    async def flush(self) -> None:
        """Writes what waits; raises OSError when it cannot be written now."""
        while self._waiting:
            batch = self._waiting[:BATCH_MAX]
            await self._write_within(batch)
            # By count: more may have come meanwhile, behind these.
            del self._waiting[: len(batch)]

    async def _write_within(self, batch: Sequence[Refusal]) -> None:
        """Writes a batch; raises TimeoutError when that takes too long, whatever the client does about its
        cancellation.
        """
        writing = asyncio.create_task(self._write(batch))
        try:
            await asyncio.wait({writing}, timeout=WRITE_SECONDS_MAX)
            if not writing.done():
                await end([writing])
                raise TimeoutError(f"not written within {WRITE_SECONDS_MAX:.0f} s")
            writing.result()
        finally:
            writing.cancel()

    async def close(self) -> None:
        """Writes what waits, if that is quick: a refusal is not worth waiting for."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await self.flush()
        except OSError as error:  # a TimeoutError is one
            log.info("%d refusals were not written: %r", len(self._waiting), error)


@asynccontextmanager
async def writing(refusals: RefusalLog | None) -> AsyncIterator[None]:
    """Writes what is kept while it lasts, and what is left at the end."""
    if refusals is None:
        yield
        return
    task = asyncio.create_task(refusals.run())
    try:
        yield
    finally:
        await end([task])
        await refusals.close()
