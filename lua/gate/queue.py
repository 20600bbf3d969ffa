"""What waits at the gate: the commands of each caller and shard, in the order they have to be carried out."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from grabstream.lua.gate.sizes import size_of_all
from grabstream.lua.keys import ShardKeys
from grabstream.models.answers import Answer, refusal
from grabstream.models.commands import AnyCommand, basket_of
from grabstream.models.outcomes import Outcome

#: Entries in one call: no bound but that of its commands, as long as none of them raises.
IN_COMPANY_MAX: Final = 1_000_000
#: Offers that the commands of one call name: each is read and written back.
OFFERS_IN_CALL_MAX: Final = 64


class OutcomeUnknown(Exception):
    """Time ran out after the commands were sent: they may or may not be decided. Send them again under the
    same ids.
    """


class Order:
    """Calls that share one are carried out in the order they were made, in every shard."""

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}

    def lane(self, shard: int) -> "Lane":
        """The commands of this order in a shard."""
        lane = self._lanes.get(shard)
        if lane is None:
            lane = self._lanes[shard] = Lane()
        return lane


class Lane:
    """The commands of one order in one shard: one call at a time carries them.

    `decided` are those whose answers are not given yet, in their order, all decided in `history`; `stale`
    once that has gone.
    """

    __slots__ = ("decided", "flying", "history", "stale")

    def __init__(self) -> None:
        self.decided: deque[QueueEntry] = deque()
        self.history = 0
        self.flying = False
        self.stale = False

    def take_back(self) -> "list[QueueEntry]":
        """What has to be decided again, in its order."""
        entries = list(self.decided)
        self.decided.clear()
        self.stale = False
        for entry in entries:
            entry.ask_again()
        return entries


class QueueEntry:
    """Consecutive commands of one caller, shard and type. `done` has a result once they are decided or
    refused; then `answers` and `history` say how. Later ones of the same call and shard hang on `next`: what
    was not decided must not be overtaken by them.

    `unsure` once they may be decided although nobody knows (no reply came, or a history was lost): then they
    are not refused any more. `given` once the caller has its answer, or has gone. `company` is how many
    entries may share a call with it: fewer after an error. `parts` are the entries that it was cut into: to
    find the command that raises, or because a call had no room for all of it. `fault` says of a single one
    what it raised.
    """

    __slots__ = (
        "answers", "breaks", "bytes", "commands", "company", "deadline", "done", "fault", "given",
        "has_baskets", "history", "lane", "next",
        "parts", "patience_seconds", "patient_until", "script", "unsure",
    )  # fmt: skip

    def __init__(
        self,
        lane: Lane,
        script: str,
        commands: Sequence[AnyCommand],
        deadline: float,
        patience_seconds: float,
    ) -> None:
        self.lane = lane
        self.script = script
        self.commands = commands
        self.bytes = size_of_all(commands)
        self.deadline = deadline
        self.patience_seconds = patience_seconds
        self.patient_until: float | None = None
        self.unsure = False
        self.given = False
        self.company = IN_COMPANY_MAX
        self.breaks = 0
        self.fault: str | None = None
        self.next: QueueEntry | None = None
        self.parts: tuple[QueueEntry, ...] = ()
        self.answers: list[Answer] = []
        self.history = 0
        # Two callers may have given their baskets the same name, so their entries never share a call.
        self.has_baskets = script == "grab" and any(map(basket_of, commands))
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def last_seq(self) -> int:
        """The seq that must be journaled before the answers are given; 0 when none."""
        return max((answer.seq for answer in self.answers if answer.seq is not None), default=0)

    def is_patient(self, now: float) -> bool:
        """Whether it goes on waiting; patience begins with the first refusal, not while the server is
        away.
        """
        if self.unsure:
            return now < self.deadline
        if self.patient_until is None:
            self.patient_until = now + self.patience_seconds
        return now < self.patient_until

    def answer(self, answers: list[Answer], history: int = 0) -> None:
        """They are decided, in a history, or refused, in none."""
        if not self.done.done():
            self.answers, self.history = answers, history
            if history and not self.given:
                self.lane.decided.append(self)
                self.lane.history = history
            self.done.set_result(None)

    def ask_again(self) -> None:
        """Its answers were decided in a history that is gone."""
        self.unsure = True
        if self.done.done():
            self.done = asyncio.get_running_loop().create_future()

    def refuse(self, outcome: Outcome, message: str, retry_at: int) -> None:
        """Refuses it and all that follow it in its call: a confirmation must not overtake the grab it is
        for.
        """
        entry: QueueEntry | None = self
        while entry is not None:
            if entry.unsure:
                said = (
                    f"decided or not, nobody knows yet ({message}): send the commands again under their ids"
                )
                entry.fail(OutcomeUnknown(said))
            else:
                entry.answer([refusal(c.id, outcome, c.offer, message, retry_at) for c in entry.commands])
            entry = entry.next

    def fail(self, error: BaseException) -> None:
        """The caller gets an error instead of answers."""
        if not self.done.done():
            self.done.set_exception(error)
            # A caller of several shards hears of the first failure only; the others need no line in the log.
            self.done.exception()

    @property
    def offers(self) -> set[str]:
        """The offers that its commands name."""
        return {command.offer for command in self.commands}

    def halves(self) -> "tuple[QueueEntry, ...]":
        """Two halves of it, each alone in its call; nothing when it is one command, or one basket."""
        end = whole_baskets(range(len(self.commands)), self.commands, len(self.commands) // 2)
        if end == len(self.commands):
            end = next(
                (
                    i
                    for i, c in enumerate(self.commands)
                    if basket_of(c) is None or basket_of(c) == basket_of(self.commands[-1])
                ),
                0,
            )
        if not 0 < end < len(self.commands):
            return ()
        halves = self.cut(end)
        for half in halves:
            half.company = 1
        return halves

    def cut(self, end: int) -> "tuple[QueueEntry, QueueEntry]":
        """Its commands before a place, and those from there on."""
        first, second = (
            QueueEntry(self.lane, self.script, part, self.deadline, self.patience_seconds)
            for part in (self.commands[:end], self.commands[end:])
        )
        first.next, second.next = second, self.next
        for part in (first, second):
            part.patient_until, part.unsure, part.company = self.patient_until, self.unsure, self.company
        self.parts = (first, second)
        # Those of a history that is gone, if any: nobody waits until that is journaled.
        self.answers, self.history = [], 0
        self.next = first
        self.done.set_result(None)
        return first, second

    def give(self) -> None:
        """The caller has its answer, or has gone; what was not sent yet never is."""
        self.given = True
        with suppress(ValueError):
            self.lane.decided.remove(self)
        self.done.cancel()
        for part in self.parts:
            part.give()


class ShardQueue:
    """The queue of one shard and what is in flight for it."""

    def __init__(self, keys: ShardKeys) -> None:
        self.keys = keys
        self.queue: deque[QueueEntry] = deque()
        self.queued = 0
        self.in_flight: list[list[QueueEntry]] = []
        self.held = False
        self.refuses = ""
        self.waking = False
        self.watch: asyncio.TimerHandle | None = None


async def all_decided(entries: Sequence[QueueEntry]) -> None:
    """Returns when all are decided at the same time: a recovery may take back what was decided first."""
    while waiting := [part for entry in entries for part in _leaves(entry) if not part.done.done()]:
        await waiting[0].done


def _leaves(entry: QueueEntry) -> list[QueueEntry]:
    return [leaf for part in entry.parts for leaf in _leaves(part)] if entry.parts else [entry]


def few_offers(places: Sequence[int], commands: Sequence[AnyCommand], start: int, end: int) -> int:
    """The end of a cut that names no more than OFFERS_IN_CALL_MAX offers."""
    if end - start <= OFFERS_IN_CALL_MAX:
        return end
    offers: set[str] = set()
    for index in range(start, end):
        offers.add(commands[places[index]].offer)
        if len(offers) > OFFERS_IN_CALL_MAX:
            return index
    return end


def whole_baskets(places: Sequence[int], commands: Sequence[AnyCommand], end: int) -> int:
    """The end of a cut, moved behind the basket it would go through."""
    while end < len(places):
        basket = basket_of(commands[places[end]])
        if basket is None or basket != basket_of(commands[places[end - 1]]):
            break
        end += 1
    return end
