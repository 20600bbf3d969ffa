"""Keeps answers with the promise `decided` until their events are journaled, and reports those that were
lost.

The promise `decided` holds unless Redis is lost before Kafka has the event. When a shard was recovered in
between, its state shows which of the decisions are lost. These are reported, with user and amount, so that an
operator can tell the users. Of the others, Redis may still be the only one that has them: they are kept until
their events are journaled in the new history, or a further recovery loses them.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from grabstream.lua.ending import end
from grabstream.lua.gate.journaled import HistoryChanged, Journaled
from grabstream.lua.keys import KeySpace
from grabstream.lua.records import read_answer, read_grab_of_part
from grabstream.lua.trouble import suppressed_trouble
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab
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
            except HistoryChanged as changed:
                history = kept[0].history
                # In place, by index: other calls may be added while this one is checked.
                for index in range(len(kept)):
                    if kept[index].history == history:
                        kept[index] = await self._check(shard, kept[index], changed.history)
                left = [of_call for of_call in kept if of_call.answers]
                kept.clear()
                kept.extend(left)

    async def _check(self, shard: int, kept: _Kept, history: int) -> _Kept:
        """After a recovery that led to a history: an answer that is no longer stored under its id is lost;
        returns the others, for this history. If there is a further recovery meanwhile, `kept` as it is.
        """
        lost, rest = [], []
        for command, answer in zip(kept.commands, kept.answers, strict=True):
            # A repeated answer is about an earlier event; the first answer with that event is checked.
            if not answer.positive or answer.repeated or answer.seq is None:
                continue
            if (answer.seq, answer.at) in await self._recorded(shard, command):
                rest.append((command, answer))
            else:
                lost.append(LostDecision(shard, command, answer))
        if lost and await self._read(self._keys.shard(shard).state, "history") != b"%d" % history:
            # What is not there now may be there when the shard is rebuilt.
            return kept
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
        seq = max((answer.seq for _, answer in rest if answer.seq is not None), default=0)
        return _Kept(history, seq, [command for command, _ in rest], [answer for _, answer in rest])

    async def _recorded(self, shard: int, command: AnyCommand) -> list[tuple[int, int]]:
        """Seq and time of the events of the answers that are stored for a command, in any key layout."""
        keys, offer = self._keys.shard(shard), command.offer
        fields, recorded = [command.id], []
        if isinstance(command, Grab):
            fields.append(f"{offer}/{command.id}")
            part = await self._read(keys.users(offer), command.user)
            grab = read_grab_of_part(part) if part else None
            if grab is not None and grab[0] == command.id:
                recorded.append(grab[1:])
        for field in fields:
            if record := await self._read(keys.answers(campaign_of(offer)), field):
                recorded.append(read_answer(record))
        return recorded

    async def _read(self, key: str, field: str) -> bytes | None:
        """Reads a field of a hash, as soon as its server answers."""
        while True:
            with suppressed_trouble():
                value: bytes | None = await self._redis.hget(key, field)
                return value
            await asyncio.sleep(RETRY_SECONDS)
