"""The queue of the gate: the commands of each caller and shard, in the order of their execution."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from grabstream.gate.batches import Batch, batch_of
from grabstream.lua.keys import ShardKeys
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, basket_of
from grabstream.models.outcomes import SEND_AGAIN, Outcome, OutcomeUnknown

#: Entries in one call, until one of them causes an error: in effect no bound apart from that on commands.
ENTRIES_IN_CALL_MAX: Final = 1_000_000
#: Offers that the commands of one call name: each is read and written.
OFFERS_IN_CALL_MAX: Final = 64


class CallOrder:
    """Calls with the same CallOrder are executed in the order of their making, in every shard."""

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}
        self._sealing: dict[int, asyncio.Lock] = {}

    def sealing(self, shard: int) -> asyncio.Lock:
        """Held by a call whose metadata are being sealed: those after it in the shard wait."""
        return self._sealing.setdefault(shard, asyncio.Lock())

    def lane(self, shard: int) -> "Lane":
        """Returns the commands of this order in a shard."""
        lane = self._lanes.get(shard)
        if lane is None:
            lane = self._lanes[shard] = Lane()
        return lane


class Lane:
    """The commands of one call of the gate, or of one reader of a topic, in one shard. Only one script call
    at a time carries commands of a lane.

    `decided` are the entries whose answers are not given yet, in their order, all decided in `history`.
    `stale` is set when that history is lost. `journaled_seq` is the last event of the entries whose answers
    were given as journaled; the lane of a topic's order has none, since it may outlive a journal that is put
    back.
    """

    __slots__ = ("decided", "history", "in_flight", "journaled_seq", "stale")

    def __init__(self) -> None:
        self.decided: list[QueueEntry] = []
        self.history = 0
        self.in_flight = False
        self.journaled_seq = 0
        self.stale = False

    def take_decided(self) -> "list[QueueEntry]":
        """Removes and returns the entries that must be decided again, in their order."""
        entries, self.decided = self.decided, []
        self.stale = False
        for entry in entries:
            entry.ask_again()
        return entries


class QueueEntry(msgspec.Struct, eq=False):
    """A batch of consecutive commands of one caller and shard. `is_done` is set when they are decided or
    refused, and then `answers` and `history` have the outcome; or when they get no answer, because of
    `error`, or because nobody waits for it. `next` is the following entry of the same caller's call and
    shard: it must not overtake commands that were not decided.

    `unsure` is set when the commands may be decided but this is unknown (no reply arrived, or a history was
    lost): then they cannot be refused any more. `given` is set when the caller has its answers, or no longer
    waits. `entries_max` is how many entries may share a script call with this one: fewer after an error.
    `successors` are the entries that this one was split into: to find the command that causes an error, or
    because a call had no room for all commands. `fault` is the error of a single command.
    """

    lane: Lane
    batch: Batch
    deadline: float
    patience_seconds: float
    patient_until: float | None = None
    unsure: bool = False
    given: bool = False
    entries_max: int = ENTRIES_IN_CALL_MAX
    breaks: int = 0
    fault: str | None = None
    next: "QueueEntry | None" = None
    successors: "tuple[QueueEntry, ...]" = ()
    answers: list[Answer] = []
    history: int = 0
    is_done: bool = False
    error: BaseException | None = None
    #: Of the caller, while it waits.
    waiter: asyncio.Future[None] | None = None

    @property
    def last_seq(self) -> int:
        """The seq that must be journaled before the answers are given; 0 when there is none."""
        return max((answer.seq for answer in self.answers if answer.seq is not None), default=0)

    def is_patient(self, now: float) -> bool:
        """Whether the entry may wait longer. Patience begins with the first refusal, not while the server is
        unreachable.
        """
        if self.unsure:
            return now < self.deadline
        if self.patient_until is None:
            self.patient_until = now + self.patience_seconds
        return now < self.patient_until

    async def wait(self) -> None:
        """Returns when the commands are decided or refused, or were split; raises their error."""
        while not self.is_done:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """The entry is done: the caller continues."""
        self.is_done = True
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def answer(self, answers: list[Answer], history: int = 0) -> None:
        """Sets the answers: the commands were decided in a history, or refused (history 0)."""
        if not self.is_done:
            self.answers, self.history = answers, history
            if history and not self.given:
                self.lane.decided.append(self)
                self.lane.history = history
            self.settle()

    def ask_again(self) -> None:
        """Prepares the entry to be sent again: its answers were decided in a history that is lost."""
        self.unsure = True
        self.is_done, self.error = False, None

    def refuse(self, outcome: Outcome, message: str, retry_at: int) -> None:
        """Refuses the entry and all entries after it in its caller's call: a confirmation must not overtake
        its grab.
        """
        entry: QueueEntry | None = self
        while entry is not None:
            if entry.unsure:
                entry.fail(
                    OutcomeUnknown(f"it is unknown whether the commands were decided ({message}){SEND_AGAIN}")
                )
            else:
                entry.answer(entry.batch.refused(outcome, message, retry_at))
            entry = entry.next

    def fail(self, error: BaseException) -> None:
        """Makes the caller get an error in place of answers."""
        if not self.is_done:
            self.error = error
            self.settle()

    def halves(self) -> "tuple[QueueEntry, ...]":
        """Splits the entry into halves, each of which gets its own call; returns () for a single command or
        basket.
        """
        commands = self.batch.commands
        end = whole_baskets(range(len(commands)), commands, len(commands) // 2)
        if end == len(commands):
            # From the middle on, all are of one basket: the first half ends where it begins.
            last = basket_of(commands[-1])
            end -= 1
            while end and last is not None and basket_of(commands[end - 1]) == last:
                end -= 1
        if not 0 < end < len(commands):
            return ()
        halves = self.split(end)
        for half in halves:
            half.entries_max = 1
        return halves

    def split(self, end: int) -> "tuple[QueueEntry, QueueEntry]":
        """Splits the entry into its commands before an index, and the others."""
        first, second = (
            QueueEntry(self.lane, batch_of(commands, self.batch), self.deadline, self.patience_seconds)
            for commands in (self.batch.commands[:end], self.batch.commands[end:])
        )
        first.next, second.next = second, self.next
        for part in (first, second):
            part.patient_until, part.unsure = self.patient_until, self.unsure
            part.entries_max = self.entries_max
        self.successors = (first, second)
        # Drops answers of a lost history, so that no caller waits until they are journaled.
        self.answers, self.history = [], 0
        self.next = first
        self.settle()
        return first, second

    def give(self) -> None:
        """The caller has its answers, or no longer waits; commands that were not sent are dropped."""
        self.given = True
        decided = self.lane.decided
        if decided and self in decided:
            decided.remove(self)
        self.is_done = True
        if self.waiter is not None:
            self.waiter.cancel()
        for entry in self.successors:
            entry.give()


class ShardQueue:
    """The queue of one shard, and its calls in flight. `is_paused` while a retry waits; `refuses` is the last
    logged reason why the shard refuses whole calls; `is_fast` if the last decided call was answered fast.
    """

    def __init__(self, keys: ShardKeys) -> None:
        self.keys = keys
        self.queue: deque[QueueEntry] = deque()
        self.queued = 0
        self.in_flight: list[list[QueueEntry]] = []
        #: The entries of the next call whose parts are being drawn.
        self.drawing: list[QueueEntry] = []
        self.is_paused = False
        self.is_fast = False
        self.refuses = ""
        self.waking = False
        self.watch: asyncio.TimerHandle | None = None


async def all_decided(entries: Sequence[QueueEntry]) -> None:
    """Returns when all entries are decided at the same time: a recovery may undo earlier decisions."""
    while waiting := [part for entry in entries for part in _leaves(entry) if not part.is_done]:
        await waiting[0].wait()


def _leaves(entry: QueueEntry) -> list[QueueEntry]:
    return (
        [leaf for successor in entry.successors for leaf in _leaves(successor)]
        if entry.successors
        else [entry]
    )


def few_offers(indexes: Sequence[int], commands: Sequence[AnyCommand], end: int) -> int:
    """Returns the greatest end, up to `end`, at which the commands name at most OFFERS_IN_CALL_MAX offers."""
    if end <= OFFERS_IN_CALL_MAX:
        return end
    offers: set[str] = set()
    for index in range(end):
        offers.add(commands[indexes[index]].offer)
        if len(offers) > OFFERS_IN_CALL_MAX:
            return index
    return end


def whole_baskets(indexes: Sequence[int], commands: Sequence[AnyCommand], end: int) -> int:
    """Returns the end, moved after the basket that it would divide."""
    while end < len(indexes):
        basket = basket_of(commands[indexes[end]])
        if basket is None or basket != basket_of(commands[indexes[end - 1]]):
            break
        end += 1
    return end
