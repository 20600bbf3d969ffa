"""Keeps answers with the promise `decided` until their events are journaled, and reports those that were
lost.

The promise `decided` holds unless Redis is lost before Kafka has the event. When a shard was recovered in
between, its state shows which of the answers are in the journal. The others are reported, with user and
amount, so that an operator can tell the users.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from grabstream.lua.ending import end
from grabstream.lua.gate.journaled import HistoryChanged, Journaled
from grabstream.lua.keys import KeySpace
from grabstream.lua.records import read_answer
from grabstream.lua.trouble import suppressed_trouble
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand
from grabstream.models.identifiers import campaign_of

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2


class LostDecision(NamedTuple):
    """A command that was answered as decided, but is not in the journal, or is there with another event."""

    shard: int
    command: AnyCommand
    answer: Answer


ReportLost = Callable[[Sequence[LostDecision]], Awaitable[None]]


class _Kept(NamedTuple):
    history: int
    seq: int
    commands: Sequence[AnyCommand]
    answers: Sequence[Answer]


class DecidedAnswers:
    """The answers that a gate gave as decided. `report` receives the lost ones, which are also logged."""

    def __init__(
        self, redis: Any, keys: KeySpace, journaled: Journaled, report: ReportLost | None = None
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._journaled = journaled
        self._report = report
        self._kept: dict[int, deque[_Kept]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def kept(self) -> int:
        """The number of answers that are not known to be journaled yet."""
        return sum(len(kept.answers) for of_shard in self._kept.values() for kept in of_shard)

    def keep(
        self, shard: int, history: int, commands: Sequence[AnyCommand], answers: Sequence[Answer]
    ) -> None:
        """Keeps answers of one call until their events are journaled."""
        if not self._journaled.is_following:
            return
        seq = max((answer.seq for answer in answers if answer.seq is not None and answer.positive), default=0)
        if not seq:
            return
        self._kept.setdefault(shard, deque()).append(_Kept(history, seq, commands, answers))
        if shard not in self._tasks or self._tasks[shard].done():
            self._tasks[shard] = asyncio.create_task(self._follow(shard))

    async def close(self) -> None:
        """Stops; logs the number of answers that are not known to be journaled."""
        if self.kept:
            log.warning(
                "%d answers were given as decided, and it is unknown whether they are journaled",
                self.kept,
            )
        await end(self._tasks.values())

    async def _follow(self, shard: int) -> None:
        kept = self._kept[shard]
        while kept:
            try:
                await self._journaled.wait(shard, kept[0].history, kept[0].seq)
                kept.popleft()
            except HistoryChanged:
                history = kept[0].history
                while kept and kept[0].history == history:
                    await self._check(shard, kept[0])
                    kept.popleft()

    async def _check(self, shard: int, kept: _Kept) -> None:
        """After a recovery: an answer that is still stored under its id is in the journal; the others are
        lost.
        """
        lost = []
        for command, answer in zip(kept.commands, kept.answers, strict=True):
            # A repeated answer is about an earlier event; the first answer with that event is checked.
            if (
                answer.positive
                and not answer.repeated
                and await self._kept_of(shard, command) != (answer.seq, answer.at)
            ):
                lost.append(LostDecision(shard, command, answer))
        for decision in lost:
            log.error(
                "lost: command %s of offer %s (user %s) was answered %s with amount %s as decided, and a "
                "recovery lost the decision",
                decision.command.id, decision.command.offer, getattr(decision.command, "user", "-"),
                decision.answer.outcome, decision.answer.amount,
            )  # fmt: skip
        if lost and self._report is not None:
            try:
                await self._report(lost)
            except OSError as error:
                log.warning("%d lost decisions could not be reported: %s", len(lost), error)

    async def _kept_of(self, shard: int, command: AnyCommand) -> tuple[int, int] | None:
        """Returns seq and time (ms) of the event that the shard stores under a command's id, or None."""
        while True:
            with suppressed_trouble():
                record = await self._redis.hget(
                    self._keys.shard(shard).answers(campaign_of(command.offer)), command.id
                )
                return read_answer(record) if record else None
            await asyncio.sleep(RETRY_SECONDS)
