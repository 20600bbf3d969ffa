"""Keeps answers with the promise `decided` until their events are journaled, and reports those that were
lost.

The promise `decided` holds unless Redis is lost before Kafka has the event. When a shard was recovered in
between, its state shows which of the decisions are lost. These are reported, with user and amount, so that an
operator can tell the users. The others may still be only in Redis: they are kept until their events are
journaled in the new history, or a further recovery loses them.

Every answer that a caller got counts, also one that names an earlier event: a repeat may be the first that
the caller gets, after a broken connection, and a command whose effect already held is answered with the event
of another command. A report is kept until it is written. Both are bounded: answers
beyond KEPT_ANSWERS_MAX are not followed, and reports beyond WAITING_REPORTS_MAX are in the log only; both are
counted.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple

from grabstream.gate.journaled import HistoryChanged, Journaled
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.lua.packed_values import (
    Damaged,
    event_of_grab,
    event_of_payment,
    payment_fields,
    read_answer,
    read_grab_of_part,
    read_order,
)
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Confirm, Grab, Redeem, Release, Unredeem
from grabstream.models.identifiers import campaign_of
from grabstream.runtime.ending import end
from grabstream.runtime.measures import GateMeasures
from grabstream.runtime.trouble import suppressed_trouble

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
#: Answers that wait until their events are journaled, of all shards; each takes about a kilobyte.
KEPT_ANSWERS_MAX: Final = 200_000
#: Lost answers that wait until they are written, and how many are written at once.
WAITING_REPORTS_MAX: Final = 20_000
REPORTED_AT_ONCE_MAX: Final = 1_000
#: The pauses between attempts to write, and how long the last attempt may take, at the end.
REPORT_PAUSE_SECONDS: Final = 0.5
REPORT_PAUSE_SECONDS_MAX: Final = 30.0
LAST_REPORT_SECONDS: Final = 2.0


class LostDecision(NamedTuple):
    """A command that was answered as decided, but is not in the journal, or is in it with another event."""

    shard: int
    command: AnyCommand
    answer: Answer


ReportLost = Callable[[Sequence[LostDecision]], Awaitable[None]]


class _DecidedList(NamedTuple):
    history: int
    seq: int
    commands: Sequence[AnyCommand]
    answers: Sequence[Answer]


class _Reports:
    """Lost answers on their way to `report`, which is tried again until it has them."""

    def __init__(self, report: ReportLost | None, measures: GateMeasures) -> None:
        self._report = report
        self._measures = measures
        self._waiting: deque[LostDecision] = deque()
        self._writing: asyncio.Task[None] | None = None

    def add(self, lost: LostDecision) -> None:
        """Logs and counts a lost answer, and has it written."""
        self._measures.lost_answers["found"] += 1
        log.error(
            "lost: command %s of offer %s (user %s) was answered %s with amount %s as decided, and a "
            "recovery lost the decision",
            lost.command.id, lost.command.offer, getattr(lost.command, "user", "-"),
            lost.answer.outcome, lost.answer.amount,
        )  # fmt: skip
        if self._report is None:
            return
        if len(self._waiting) >= WAITING_REPORTS_MAX:
            self._measures.lost_answers["dropped"] += 1
            return
        self._waiting.append(lost)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        pause = REPORT_PAUSE_SECONDS
        while self._waiting:
            try:
                await self._write_some()
                pause = REPORT_PAUSE_SECONDS
            except Exception as error:
                log.warning(
                    "%d lost answers are not reported yet, trying again in %.1f s: %s",
                    len(self._waiting), pause, error,
                )  # fmt: skip
                await asyncio.sleep(pause)
                pause = min(2 * pause, REPORT_PAUSE_SECONDS_MAX)

    async def _write_some(self) -> None:
        assert self._report is not None
        some = list(islice(self._waiting, REPORTED_AT_ONCE_MAX))
        await self._report(some)
        for _ in some:
            self._waiting.popleft()
        self._measures.lost_answers["written"] += len(some)

    async def close(self) -> None:
        """Tries once more to write what waits, and logs how many answers are in the log only."""
        if self._writing is not None:
            await end([self._writing])
        try:
            async with asyncio.timeout(LAST_REPORT_SECONDS):
                while self._waiting:
                    await self._write_some()
        except Exception as error:
            self._measures.lost_answers["dropped"] += len(self._waiting)
            log.error("%d lost answers are in the log only: %s", len(self._waiting), error)


class DecidedAnswers:
    """The answers that a gate gave as decided. `report` receives the lost ones, which are also logged and
    counted in `measures`.
    """

    def __init__(
        self,
        redis: Any,
        keys: KeySpace,
        journaled: Journaled,
        report: ReportLost | None = None,
        measures: GateMeasures | None = None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._journaled = journaled
        self._measures = measures or GateMeasures()
        self._reports = _Reports(report, self._measures)
        self._kept: dict[int, deque[_DecidedList]] = {}
        #: The number of answers that are not known to be journaled yet.
        self.kept = 0
        self._is_full = False
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def keep(
        self, shard: int, history: int, commands: Sequence[AnyCommand], answers: Sequence[Answer]
    ) -> None:
        """Keeps answers of one call until their events are journaled."""
        if not self._journaled.is_listening:
            return
        seq = max((answer.seq for answer in answers if answer.seq is not None), default=0)
        if not seq or self._journaled.is_known(shard, history, seq) or not self._has_room(len(answers)):
            return
        self.kept += len(answers)
        self._kept.setdefault(shard, deque()).append(_DecidedList(history, seq, commands, answers))
        if shard not in self._tasks or self._tasks[shard].done():
            self._tasks[shard] = asyncio.create_task(self._follow(shard))

    def _has_room(self, count: int) -> bool:
        """Whether `count` more answers may be kept; otherwise counts them, and logs it once."""
        if self.kept + count <= KEPT_ANSWERS_MAX:
            self._is_full = False
            return True
        self._measures.lost_answers["not_followed"] += count
        if not self._is_full:
            log.error(
                "%d answers were given as decided, and are not journaled yet: a loss of further ones would "
                "not be noticed",
                self.kept,
            )
        self._is_full = True
        return False

    async def close(self) -> None:
        """Stops; logs the number of answers that are not known to be journaled."""
        if self.kept:
            log.warning(
                "%d answers were given as decided, and it is unknown whether they are journaled",
                self.kept,
            )
        await end(self._tasks.values())
        await self._reports.close()

    async def _follow(self, shard: int) -> None:
        kept = self._kept[shard]
        while kept:
            try:
                await self._journaled.wait(shard, kept[0].history, kept[0].seq)
                self.kept -= len(kept.popleft().answers)
            except HistoryChanged as changed:
                history, told = kept[0].history, set[tuple[str, int]]()
                # In place, by index: other calls may be added while this one is checked.
                for index in range(len(kept)):
                    if kept[index].history == history:
                        before = len(kept[index].answers)
                        kept[index] = await self._check(shard, kept[index], changed.history, told)
                        self.kept += len(kept[index].answers) - before
                left = [kept_call for kept_call in kept if kept_call.answers]
                kept.clear()
                kept.extend(left)

    async def _check(
        self, shard: int, kept: _DecidedList, history: int, told: set[tuple[str, int]]
    ) -> _DecidedList:
        """After a recovery that led to a history: an answer whose event is recorded neither under its id nor
        with what the command is about is lost; returns the others, for this history. If there is a further
        recovery meanwhile, `kept` as it is.

        `told` has the command and the seq of what was reported: a command may be answered several times.
        """
        lost, rest = [], []
        for command, answer in zip(kept.commands, kept.answers, strict=True):
            if answer.seq is None:
                continue
            event = answer.seq, answer.at or 0
            if event in await self._recorded(shard, command, answer) or (
                answer.repeated and await self._has_effect(shard, command, answer, event)
            ):
                rest.append((command, answer))
            else:
                lost.append(LostDecision(shard, command, answer))
        if lost and await self._read(self._keys.shard(shard).state, "history") != b"%d" % history:
            # An entry missing now may exist when the shard is rebuilt.
            return kept
        for decision in lost:
            answered = decision.command.id, decision.answer.seq or 0
            if answered not in told:
                told.add(answered)
                self._reports.add(decision)
        seq = max((answer.seq for _, answer in rest if answer.seq is not None), default=0)
        return _DecidedList(history, seq, [command for command, _ in rest], [answer for _, answer in rest])

    async def _recorded(self, shard: int, command: AnyCommand, answer: Answer) -> list[tuple[int, int]]:
        """Seq and time of the events of the answers that are stored for a command."""
        keys, offer = self._keys.shard(shard), command.offer
        field, recorded = command.id, []
        if isinstance(command, Grab):
            field = f"{offer}/{command.id}"
            part = await self._read(keys.users(offer), command.user)
            grab = read_grab_of_part(part) if part else None
            if grab is not None and grab[0] == command.id:
                recorded.append(grab[1:])
            elif grab is not None and answer.outcome == "already_taken":
                # It names the grab of another command, with that command's time.
                recorded.append((grab[1], answer.at or 0))
        if record := await self._read(keys.answers(campaign_of(offer)), field):
            recorded.append(read_answer(record))
        return recorded

    async def _has_effect(
        self, shard: int, command: AnyCommand, answer: Answer, event: tuple[int, int]
    ) -> bool:
        """Whether the effect that an answer reports is recorded with the grab, the order or the payment that
        its command is about: by the event that the answer names, or by a later one, which has replaced it
        there. The answer to a command whose effect already held names the event of another command, and is
        not stored under its id.
        """
        with suppress(Damaged):
            for recorded in await self._effects(self._keys.shard(shard), command, answer.code):
                if recorded is not None and (recorded == event or recorded[0] > event[0]):
                    return True
        return False

    async def _effects(self, keys: ShardKeys, command: AnyCommand, code: int) -> list[tuple[int, int] | None]:
        """Seq and time of the last events with this outcome of what a command is about. Raises Damaged."""
        offer = command.offer
        if isinstance(command, Redeem | Unredeem):
            order = await self._read(keys.orders(offer), f"{command.grab}/{command.order}")
            return [read_order(order)] if order else []
        if isinstance(command, Confirm) and command.payment is not None:
            fields = payment_fields(command.payment, offer, command.grab, command.currency)
            payments = [await self._read(keys.payments(campaign_of(offer)), field) for field in fields]
            return [event_of_payment(record, offer, command.grab, code) for record in payments if record]
        if isinstance(command, Confirm | Release):
            grab = await self._read(keys.grabs(offer), command.grab)
            return [event_of_grab(grab, code)] if grab else []
        return []

    async def _read(self, key: str, field: str) -> bytes | None:
        """Reads a field of a hash, as soon as its server answers."""
        while True:
            with suppressed_trouble():
                value: bytes | None = await self._redis.hget(key, field)
                return value
            await asyncio.sleep(RETRY_SECONDS)
