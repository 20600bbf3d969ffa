"""The gate: commands in, answers out. It gathers what arrives together for a shard and decides it in one
script call.

A lone caller does not wait for company: the next batch is whatever arrived while the last one was in flight.
When a good half of a batch waits already, it goes out after the one in flight, unless they hold commands of
the same caller, whose order counts.

The order of a caller holds through retries and recoveries. What was decided and is not known to be journaled
stays in the caller's `_Lane`, and every later call of the lane names the history it was decided under: in
another one the script decides nothing, and the lane's commands are sent again, in their order, before those
that were refused.

A call does a bounded sum of work (lua/includes/cost.lua): commands that it had no room for get no row, and go
into the next call, in their order, before everything else.

A call that raises an error costs one command its answer, not all: it is cut in halves until the one that
raises is found.
"""

import asyncio
import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

from redis.exceptions import ClusterError, NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError

from grabstream.lua import loader
from grabstream.lua.ending import end
from grabstream.lua.gate import batches
from grabstream.lua.gate.decided import DecidedAnswers, ReportLost
from grabstream.lua.gate.journaled import HistoryChanged, Journaled
from grabstream.lua.gate.refusals import RefusalLog
from grabstream.lua.gate.sealing import Sealer
from grabstream.lua.gate.sizes import CALL_BYTES_MAX, fitting, size_of_all
from grabstream.lua.gate.staging import Batch, discard, stage
from grabstream.lua.gate.tickets import TicketKeys
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.lua.trouble import is_trouble
from grabstream.models.answers import Answer, refusal
from grabstream.models.commands import AnyCommand, Grab, Open, basket_of, check, torn_baskets
from grabstream.models.identifiers import RESERVED_IDS, are_ids
from grabstream.models.money import Invalid
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.outcomes import OUTCOME_NAMES, Outcome

log = logging.getLogger(__name__)

Promise = Literal["journaled", "decided"]
IN_FLIGHT_MAX: Final = 2
#: Tickets in one call: no bound but that of its commands, as long as none of them raises.
IN_COMPANY_MAX: Final = 1_000_000
RETRY_SECONDS: Final = 0.05
WATCH_EVERY_SECONDS: Final = 0.1
BUSY_RETRY_MS: Final = 200
#: Commands of these scripts in one call, fewer than of others: each carries much.
AT_ONCE_MAX: Final = {"open": 16, "load": 8}
#: Offers that the commands of one call name: each is read and written back.
OFFERS_IN_CALL_MAX: Final = 64
SHARDS_KNOWN_MAX: Final = 100_000

#: Scripts that must work when the outbox is full: what they do gives room, or ends what fills it.
_ALWAYS_ADMITTED: Final = frozenset(
    {
        "pause",
        "resume",
        "close",
        "amend",
        "adjust",
        "confirm",
        "release",
        "extend",
        "return",
        "redeem",
        "unredeem",
    }
)
#: A command that broke the shard so many times, alone in its call, is given up.
BREAKS_MAX: Final = 3
#: What a script replies in place of an outcome when the shard has another history than the call names
#: (includes/decide.lua).
_ANOTHER_HISTORY: Final = -1
#: With these words a script says that a write failed after another: its shard is fenced until it was rebuilt
#: (includes/decide.lua).
_BROKE: Final = "BROKEN OFF "
#: With these words Redis refuses a script before it begins: too few replicas, a disk that cannot be written,
#: another script that runs for seconds; and a script, when not even its first write could be done.
_NOT_WRITTEN: Final = ("NOREPLICAS", "MISCONF", "BUSY ", "UNWRITTEN ")
#: Where an error was raised: at the end of whatever a script says that fails. What has no such end was said
#: by the server itself.
_in_script = re.compile(r"\bon @user_(script|function)\b|\buser_(script|function):\d+:").search


def is_raised_by_script(error: ResponseError) -> bool:
    """Whether a script itself raised before its first write: what it was called for is at fault, not the
    server.
    """
    said = str(error)
    return _in_script(said) is not None and not said.startswith((*_NOT_WRITTEN, _BROKE))


class OutcomeUnknown(Exception):
    """Time ran out after the commands were sent: they may or may not be decided. Send them again under the
    same ids.
    """


class GateLimits(NamedTuple):
    """Bounds of a gate: commands a call, commands queued a shard, events an outbox, milliseconds of time-out
    and clock skew.
    """

    batch_commands_max: int = 512
    queue_commands_max: int = 20_000
    outbox_events_max: int = 200_000
    timeout_ms: int = 2_000
    clock_skew_ms_max: int = 5_000


def now_ms() -> int:
    """Milliseconds since 1970 by this machine's clock."""
    return time.time_ns() // 1_000_000


#: Told of a command that no script can decide: its place in the call, and why.
ReportPoison = Callable[[int, str], None]


class Order:
    """Calls that share one are carried out in the order they were made, in every shard."""

    def __init__(self) -> None:
        self._lanes: dict[int, _Lane] = {}

    def lane(self, shard: int) -> "_Lane":
        """The commands of this order in a shard."""
        lane = self._lanes.get(shard)
        if lane is None:
            lane = self._lanes[shard] = _Lane()
        return lane


class _Lane:
    """The commands of one order in one shard: one call at a time carries them.

    `decided` are those whose answers are not given yet, in their order, all decided in `history`; `stale`
    once that has gone.
    """

    __slots__ = ("decided", "flying", "history", "stale")

    def __init__(self) -> None:
        self.decided: deque[_Ticket] = deque()
        self.history = 0
        self.flying = False
        self.stale = False

    def take_back(self) -> "list[_Ticket]":
        """What has to be decided again, in its order."""
        tickets = list(self.decided)
        self.decided.clear()
        self.stale = False
        for ticket in tickets:
            ticket.ask_again()
        return tickets


class _Ticket:
    """Consecutive commands of one caller, shard and type. `done` has a result once they are decided or
    refused; then `answers` and `history` say how. Later ones of the same call and shard hang on `next`: what
    was not decided must not be overtaken by them.

    `unsure` once they may be decided although nobody knows (no reply came, or a history was lost): then they
    are not refused any more. `given` once the caller has its answer, or has gone. `company` is how many
    tickets may share a call with it: fewer after an error. `parts` are the tickets that it was cut into: to
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
        lane: _Lane,
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
        self.next: _Ticket | None = None
        self.parts: tuple[_Ticket, ...] = ()
        self.answers: list[Answer] = []
        self.history = 0
        # Two callers may have given their baskets the same name, so their tickets never share a call.
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
        ticket: _Ticket | None = self
        while ticket is not None:
            if ticket.unsure:
                said = (
                    f"decided or not, nobody knows yet ({message}): send the commands again under their ids"
                )
                ticket.fail(OutcomeUnknown(said))
            else:
                ticket.answer([refusal(c.id, outcome, c.offer, message, retry_at) for c in ticket.commands])
            ticket = ticket.next

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            # A caller of several shards hears of the first failure only; the others need no line in the log.
            self.done.exception()

    @property
    def offers(self) -> set[str]:
        """The offers that its commands name."""
        return {command.offer for command in self.commands}

    def halves(self) -> "tuple[_Ticket, ...]":
        """Two halves of it, each alone in its call; nothing when it is one command, or one basket."""
        end = _whole_baskets(range(len(self.commands)), self.commands, len(self.commands) // 2)
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

    def cut(self, end: int) -> "tuple[_Ticket, _Ticket]":
        """Its commands before a place, and those from there on."""
        first, second = (
            _Ticket(self.lane, self.script, part, self.deadline, self.patience_seconds)
            for part in (self.commands[:end], self.commands[end:])
        )
        first.next, second.next = second, self.next
        for part in (first, second):
            part.patient_until, part.unsure, part.company = self.patient_until, self.unsure, self.company
        self.parts = (first, second)
        self.answers, self.history = (
            [],
            0,
        )  # of a history that is gone, if any: nobody waits until that is journaled
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


class _Shard:
    """The queue of one shard and what is in flight for it."""

    def __init__(self, keys: ShardKeys) -> None:
        self.keys = keys
        self.queue: deque[_Ticket] = deque()
        self.queued = 0
        self.in_flight: list[list[_Ticket]] = []
        self.held = False
        self.refuses = ""
        self.waking = False
        self.watch: asyncio.TimerHandle | None = None


class Gate:
    """Decides commands through the Lua scripts. One a process and event loop; `start` before use, `close`
    after.

    `redis` is a client of redis.asyncio (one server or cluster) that does not decode replies. `clock` gives a
    time in ms that replaces the server's, for tests and simulation; without it the scripts use the server's
    own. `tickets` checks signed tickets. `report_lost` is told of answers given as decided that a recovery
    took back. `refusals` keeps a sample of what was refused.
    """

    def __init__(
        self,
        redis: Any,
        keys: KeySpace,
        sealer: Sealer,
        limits: GateLimits | None = None,
        clock: Callable[[], int] | None = None,
        tickets: TicketKeys | None = None,
        report_lost: ReportLost | None = None,
        refusals: RefusalLog | None = None,
    ) -> None:
        self._redis = redis
        self._refusals = refusals
        self._keys = keys
        self._secrets = batches.Secrets(sealer, tickets or TicketKeys({}))
        self._limits = limits or GateLimits()
        self._clock = clock
        self._shards = [_Shard(keys.shard(number)) for number in range(keys.shards)]
        self._shard_of: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.journaled = Journaled(redis, keys)
        self._decided = DecidedAnswers(redis, keys, self.journaled, report_lost)

    def start(self) -> None:
        """Begins to follow what is journaled."""
        self.journaled.start()

    async def close(self) -> None:
        """Ends what is in flight and answers nobody any more."""
        await self._decided.close()
        await self.journaled.close()
        for shard in self._shards:
            if shard.watch:
                shard.watch.cancel()
        await end(self._tasks)

    # -- callers ---------------------------------------------------------------------------------------------

    async def decide(
        self,
        commands: Sequence[AnyCommand],
        promise: Promise = "journaled",
        patience_ms: int = 0,
        timeout_ms: int | None = None,
        reader: Order | None = None,
        report_poison: ReportPoison = lambda place, reason: None,
    ) -> list[Answer]:
        """Answers in the order of the commands; commands of one campaign are carried out in that order, also
        through a recovery.

        `journaled` waits until Kafka has the events of the answers. `patience_ms` is how long commands that
        meet a fenced or busy shard wait before they are answered so; those that follow them in the same shard
        are answered the same. Raises OutcomeUnknown when `timeout_ms` (the gate's own when absent) ran out
        after they were sent.

        A `reader` of a topic bounds by itself what it has in flight, and what it read has nowhere to go back
        to: its calls are carried out in the order they were made, find room whatever is queued, and wait as
        long as their shard decides nothing; they are never answered `fenced` or `busy`. `report_poison` is
        told of commands that no script can decide; they are answered `invalid`.
        """
        answers: list[Answer | None] = [None] * len(commands)
        sound = self._at_the_door(commands, answers)
        runs = list(self._runs(sound, commands))
        timeout_seconds = ((timeout_ms or self._limits.timeout_ms) + patience_ms) / 1000
        deadline = math.inf if reader else time.monotonic() + timeout_seconds
        order = reader or Order()
        waits: deque[tuple[int, Sequence[int], _Ticket]] = deque()
        last_of: dict[int, _Ticket] = {}
        for shard, script, places in runs:
            patience = math.inf if reader else patience_ms / 1000
            ticket = _Ticket(
                order.lane(shard), script, [commands[place] for place in places], deadline, patience
            )
            before = last_of.get(shard)
            if reader is None:
                last_of[shard] = ticket
                if before is not None:
                    before.next = ticket
            self._submit(shard, ticket, bounded=reader is None, behind=before)
            waits.append((shard, places, ticket))
        tickets = [ticket for *_, ticket in waits]
        try:
            if promise == "decided":
                await _all_decided(tickets)
            while waits:
                shard, places, ticket = waits.popleft()
                await self._decided_for(shard, ticket, promise)
                if ticket.parts:
                    first, second = ticket.parts
                    middle = len(first.commands)
                    waits.extendleft([(shard, places[middle:], second), (shard, places[:middle], first)])
                    continue
                if ticket.fault is not None:
                    for place in places:
                        report_poison(place, ticket.fault)
                if promise == "decided":
                    self._decided.keep(shard, ticket.history, ticket.commands, ticket.answers)
                else:
                    ticket.give()
                if self._refusals is not None:
                    self._refusals.take(ticket.commands, ticket.answers)
                if len(places) == len(commands):
                    return ticket.answers
                for place, answer in zip(places, ticket.answers, strict=True):
                    answers[place] = answer
            return answers  # type: ignore[return-value]
        finally:
            for ticket in tickets:
                ticket.give()

    async def grab(self, command: Grab, promise: Promise = "journaled", patience_ms: int = 0) -> Answer:
        """One grab; see `decide`."""
        return (await self.decide([command], promise, patience_ms))[0]

    def _at_the_door(self, commands: Sequence[AnyCommand], answers: list[Answer | None]) -> Sequence[int]:
        """Places of the commands that may go on; the others are answered `invalid`."""
        if len(commands) == 1:
            return self._check_each(commands, answers)
        names: list[str] = []
        ids: list[str] = []
        for command in commands:
            if type(command) is not Grab or command.attributes or type(command.quantity) is not int:
                break
            if command.basket is not None or command.ticket is not None or command.wait:
                break
            names += (command.offer, command.user)
            ids.append(command.id)
        else:
            quantities = [command.quantity for command in commands]  # type: ignore[union-attr]
            if (
                RESERVED_IDS.isdisjoint(ids)
                and are_ids(names + ids)
                and min(quantities, default=1) > 0  # type: ignore[type-var, operator]
                and max(quantities, default=1) < 10**13  # type: ignore[type-var, operator]
            ):
                return range(len(commands))
        return self._check_each(commands, answers)

    def _check_each(self, commands: Sequence[AnyCommand], answers: list[Answer | None]) -> Sequence[int]:
        sound = []
        for place, command in enumerate(commands):
            try:
                check(command)
                sound.append(place)
            except Exception as error:
                # Whatever it raises: no other command of the list is to suffer from it.
                if not isinstance(error, Invalid | TypeError):
                    log.exception("a command of type %s cannot be checked", type(command).__name__)
                answers[place] = refusal(
                    command.id, Outcome.invalid, command.offer, str(error) or type(error).__name__
                )
        if any(map(basket_of, commands)):
            _check_baskets(commands, answers)
            return [place for place in sound if answers[place] is None]
        return sound

    def _runs(
        self, places: Sequence[int], commands: Sequence[AnyCommand]
    ) -> Iterable[tuple[int, str, Sequence[int]]]:
        """(shard, script, places): the commands of each shard in order, cut where the type changes."""
        if len(places) == 1:
            command = commands[places[0]]
            return [(self._shard(command.offer), type(command).__name__.lower(), places)]
        return self._cut(places, commands)

    def _cut(
        self, places: Iterable[int], commands: Sequence[AnyCommand]
    ) -> Iterable[tuple[int, str, Sequence[int]]]:
        by_shard: dict[int, list[int]] = {}
        for place in places:
            by_shard.setdefault(self._shard(commands[place].offer), []).append(place)
        for shard, in_shard in by_shard.items():
            for kind, run in groupby(in_shard, lambda place: type(commands[place])):
                run_places = list(run)
                size = AT_ONCE_MAX.get(kind.__name__.lower(), self._limits.batch_commands_max)
                start = 0
                while start < len(run_places):
                    end = _few_offers(run_places, commands, start, min(start + size, len(run_places)))
                    end = start + fitting([commands[place] for place in run_places[start:end]])
                    end = _whole_baskets(run_places, commands, end)
                    yield shard, kind.__name__.lower(), run_places[start:end]
                    start = end

    def _shard(self, offer: str) -> int:
        shard = self._shard_of.get(offer)
        if shard is None:
            if len(self._shard_of) > SHARDS_KNOWN_MAX:
                self._shard_of.clear()
            shard = self._shard_of[offer] = self._keys.shard_of_offer(offer)
        return shard

    def _submit(self, number: int, ticket: _Ticket, bounded: bool, behind: _Ticket | None) -> None:
        """Queues a ticket; a caller finds no room when too much is queued, or when its ticket before found
        none.
        """
        shard = self._shards[number]
        is_full = bounded and shard.queued + len(ticket.commands) > self._limits.queue_commands_max
        if is_full or (behind is not None and behind.done.done()):
            ticket.refuse(Outcome.busy, "the gate's queue is full", self._now() + BUSY_RETRY_MS)
            return
        shard.queue.append(ticket)
        shard.queued += len(ticket.commands)
        self._wake(shard)

    async def _decided_for(self, number: int, ticket: _Ticket, promise: Promise) -> None:
        """Returns when the answers of a ticket may be given, or when it was cut into parts; raises
        OutcomeUnknown.
        """
        while True:
            await ticket.done
            if not ticket.done.done():
                continue
            last = ticket.last_seq
            if promise == "decided" or last == 0:
                return
            try:
                left = ticket.deadline - time.monotonic()
                # Not wait_for: until Python 3.12 it may swallow a cancellation, and with it Ctrl-C.
                async with asyncio.timeout(None if left == math.inf else max(left, 0.001)):
                    await self.journaled.wait(number, ticket.history, last)
                return
            except HistoryChanged:
                # What was decided may be gone with its history: all of the lane is asked again, and only the
                # new answers count.
                self._ask_again(self._shards[number], ticket)
            except TimeoutError:
                raise OutcomeUnknown(
                    f"decided, but not in the journal in time (shard {number}, seq {last}; is a relay "
                    "running?): "
                    "send the commands again under their ids"
                ) from None

    def _ask_again(self, shard: _Shard, ticket: _Ticket) -> None:
        lane = ticket.lane
        if ticket not in lane.decided:
            return  # another caller of the lane was told first
        if lane.flying:
            lane.stale = True  # what is in flight comes behind these, whatever becomes of it
        else:
            self._put_back(shard, lane.take_back())
            self._wake(shard)

    def _now(self) -> int:
        return self._clock() if self._clock else now_ms()

    # -- sender ----------------------------------------------------------------------------------------------

    def _wake(self, shard: _Shard) -> None:
        """Sends after everyone who can run now has run: callers who were just answered ask again, and go
        along.
        """
        if not shard.waking:
            shard.waking = True
            asyncio.get_running_loop().call_soon(self._pump, shard)

    def _pump(self, shard: _Shard) -> None:
        """Sends as much as may be in flight; a shard that refused whole calls is tried again only after a
        pause.
        """
        shard.waking = False
        while shard.queue and not shard.held and self._may_send(shard):
            batch, history = self._next_batch(shard)
            if not batch:
                return
            shard.in_flight.append(batch)
            if not shard.watch:
                shard.watch = asyncio.get_running_loop().call_later(WATCH_EVERY_SECONDS, self._watch, shard)
            task = asyncio.create_task(self._send(shard, batch, history))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _may_send(self, shard: _Shard) -> bool:
        # Small batches side by side would only cost more calls, each as dear as a batch.
        flying = len(shard.in_flight)
        return flying == 0 or (flying < IN_FLIGHT_MAX and 2 * shard.queued >= self._limits.batch_commands_max)

    def _next_batch(self, shard: _Shard) -> tuple[list[_Ticket], int]:
        """The tickets at the head of the queue that one call can carry, and the history it must be decided in
        (0: any).

        They have one type, no lane of theirs is in flight, and what was decided of their lanes was decided in
        one history.
        """
        batch: list[_Ticket] = []
        offers: set[str] = set()
        count = history = size_bytes = 0
        queue = shard.queue
        while queue:
            ticket = queue[0]
            lane = ticket.lane
            if ticket.done.done():  # refused with one before it, or its caller has gone
                shard.queued -= len(queue.popleft().commands)
                continue
            if batch:
                size = AT_ONCE_MAX.get(ticket.script, self._limits.batch_commands_max)
                if ticket.script != batch[0].script or count + len(ticket.commands) > size:
                    break
                if size_bytes + ticket.bytes > CALL_BYTES_MAX:
                    break
                if len(batch) >= ticket.company or len(batch) >= batch[0].company:
                    break
                if ticket.has_baskets and any(other.has_baskets for other in batch):
                    break
                if len(offers) >= OFFERS_IN_CALL_MAX and not ticket.offers <= offers:
                    break
            offers |= ticket.offers
            if lane.flying or (lane.decided and history and lane.history != history):
                break
            if lane.decided:
                history = lane.history
            batch.append(queue.popleft())
            count += len(ticket.commands)
            size_bytes += ticket.bytes
        shard.queued -= count
        for ticket in batch:
            ticket.lane.flying = True
        return batch, history

    async def _send(self, shard: _Shard, batch: list[_Ticket], history: int) -> None:
        """One call, and what becomes of its tickets: those that are to be sent again go to the head of the
        queue, in order.
        """
        commands = batch[0].commands if len(batch) == 1 else [c for ticket in batch for c in ticket.commands]
        again: list[_Ticket] = []
        pause = True
        try:
            rows, history = await self._call(shard.keys, batch[0].script, commands, history)
            again, pause = self._answer(shard, batch, rows, history), False
            if shard.refuses:
                log.warning("shard %d decides again", shard.keys.shard)
                shard.refuses = ""
        except _Refused as error:
            again = self._refused(shard, batch, error)
        except _AnotherHistory as error:
            for ticket in batch:
                ticket.lane.stale |= ticket.lane.history != error.history
            again, pause = batch, False
        except _Poison as error:
            again, pause = self._apart(batch, error), False
        except _Broken as error:
            again = self._broken(batch, error)
        except BaseException as error:
            if is_trouble(error):
                again = self._unreachable(shard, batch, error)
            else:
                for ticket in batch:
                    ticket.fail(error if isinstance(error, Exception) else asyncio.CancelledError())
                if not isinstance(error, Exception):
                    raise
        finally:
            shard.in_flight = [other for other in shard.in_flight if other is not batch]
            again = [ticket for ticket in again if not ticket.done.done()]
            for lane in dict.fromkeys(ticket.lane for ticket in batch):
                lane.flying = False
                if lane.stale:
                    again = lane.take_back() + again
            self._put_back(shard, again)
            if again and pause:
                self._hold(shard)
            self._wake(shard)

    def _answer(self, shard: _Shard, batch: list[_Ticket], rows: list[Any], history: int) -> list[_Ticket]:
        """Answers what was decided; returns what the call had no room for, in its order."""
        number, sealer = shard.keys.shard, self._secrets.sealer
        place = 0
        rest: list[_Ticket] = []
        for ticket in batch:
            decided = min(len(rows) - place, len(ticket.commands))
            if decided == 0 or (decided < len(ticket.commands) and ticket.done.done()):
                place += decided
                rest.append(ticket)
                continue
            if decided < len(ticket.commands):
                ticket, behind = ticket.cut(decided)
                rest.append(behind)
            answers = []
            for command in ticket.commands:
                try:
                    answers.append(batches.answer_of(number, command, rows[place], sealer))
                except Exception as error:
                    # It is decided, and stays so; what can be said of it is said.
                    log.exception(
                        "shard %d: no whole answer can be made of the row of command %s: %r",
                        number,
                        command.id,
                        rows[place],
                    )
                    answers.append(_what_is_known(number, command, rows[place], error))
                place += 1
            ticket.answer(answers, history)
        return rest

    def _refused(self, shard: _Shard, batch: list[_Ticket], error: "_Refused") -> list[_Ticket]:
        """The whole call was refused: who has patience is sent again. A fence concerns whoever is queued as
        well.
        """
        now = time.monotonic()
        if error.message != shard.refuses and any(ticket.patience_seconds == math.inf for ticket in batch):
            # Nobody is told so by an answer.
            log.warning("shard %d decides nothing, commands wait: %s", shard.keys.shard, error.message)
            shard.refuses = error.message
        for ticket in (*batch, *(shard.queue if error.outcome == Outcome.fenced else ())):
            if not ticket.done.done() and not ticket.is_patient(now):
                ticket.refuse(error.outcome, error.message, error.retry_at)
        return batch

    def _apart(self, batch: list[_Ticket], error: "_Poison") -> list[_Ticket]:
        """Nothing was decided because one command raises: halves are sent, until it is alone; it is answered
        `invalid`.
        """
        if len(batch) > 1:
            for ticket in batch:
                ticket.company = len(batch) // 2
            return batch
        [ticket] = batch
        if ticket.done.done():
            return []
        if parts := ticket.halves():
            return list(parts)
        said = f"no answer can be given to this command, it was set aside: {error}"
        log.error(
            "command %s of offer %s cannot be decided: %s",
            ticket.commands[0].id,
            ticket.commands[0].offer,
            error,
        )
        if ticket.unsure:
            ticket.fail(OutcomeUnknown(said))
        else:
            ticket.fault = str(error)
            ticket.answer([refusal(c.id, Outcome.invalid, c.offer, said) for c in ticket.commands])
        return []

    def _broken(self, batch: list[_Ticket], error: "_Broken") -> list[_Ticket]:
        """A script failed after its first write, and the shard is rebuilt from the journal: then they are
        asked again, fewer at once.
        """
        log.critical("a script failed after its first write: %s", error)
        again: list[_Ticket] = []
        for ticket in batch:
            ticket.unsure = True
            ticket.company = max(1, len(batch) // 2)
        if len(batch) > 1:
            return batch
        [ticket] = batch
        ticket.breaks += 1
        if not ticket.done.done() and (parts := ticket.halves()):
            again = list(parts)
        elif ticket.breaks < BREAKS_MAX:
            again = batch
        else:
            ticket.fault = f"decided or not, nobody knows: {error}"
            ticket.fail(OutcomeUnknown(f"it breaks its shard each time: {error}"))
        return again

    def _unreachable(self, shard: _Shard, batch: list[_Ticket], error: BaseException) -> list[_Ticket]:
        """Sent, perhaps decided: only the same command can find out, so it is sent again until its time is
        over.
        """
        now = time.monotonic()
        for ticket in batch:
            ticket.unsure = True
            if ticket.deadline <= now:
                ticket.refuse(Outcome.busy, f"Redis does not answer: {error}", 0)
        self._give_up_late(shard, now)
        return batch

    def _watch(self, shard: _Shard) -> None:
        """Keeps the time-outs of callers while something is in flight, whatever time-out the client of Redis
        has.
        """
        now = time.monotonic()
        for batch in shard.in_flight:
            for ticket in batch:
                if ticket.deadline <= now:
                    ticket.unsure = True
                    ticket.refuse(Outcome.busy, "Redis did not answer in time", 0)
        self._give_up_late(shard, now)
        shard.watch = None
        if shard.in_flight or shard.queue:
            shard.watch = asyncio.get_running_loop().call_later(WATCH_EVERY_SECONDS, self._watch, shard)

    def _give_up_late(self, shard: _Shard, now: float) -> None:
        """Those in the queue whose time is over: what was never sent is `busy`, the rest unknown."""
        late = [ticket for ticket in shard.queue if ticket.deadline <= now]
        if not late:
            return
        shard.queue = deque(ticket for ticket in shard.queue if ticket.deadline > now)
        shard.queued -= sum(len(ticket.commands) for ticket in late)
        for ticket in late:
            ticket.refuse(Outcome.busy, "Redis did not take it in time", self._now() + BUSY_RETRY_MS)

    def _put_back(self, shard: _Shard, tickets: list[_Ticket]) -> None:
        """To the head of the queue, in order."""
        shard.queue.extendleft(reversed(tickets))
        shard.queued += sum(len(ticket.commands) for ticket in tickets)

    def _hold(self, shard: _Shard) -> None:
        if not shard.held:
            shard.held = True
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._release, shard)

    def _release(self, shard: _Shard) -> None:
        shard.held = False
        self._pump(shard)

    async def _call(
        self, keys: ShardKeys, script: str, commands: Sequence[AnyCommand], history: int
    ) -> tuple[list[list[int]], int]:
        """Rows and history; raises _Refused, _AnotherHistory, _Poison, _Broken, and what a client raises that
        cannot reach its server.
        """
        batch = await self._built(keys, script, commands)
        try:
            packed = await stage(partial(run_script, self._redis), batch) if batch.staged else batch.arguments
            raw = await run_script(
                self._redis, script, [*keys.deciding(), *batch.keys],
                (*self._about_call(keys, script, history), *packed)
            )  # fmt: skip
        except OutOfMemoryError:
            raise _Refused(Outcome.busy, "Redis memory is full", self._now() + BUSY_RETRY_MS) from None
        except ReadOnlyError:
            raise  # a master that is one no more: the client looks for the new one, and it is sent again
        except ResponseError as error:
            said = str(error)
            if said.startswith(_BROKE):
                raise _Broken(said.removeprefix(_BROKE)) from None
            if is_raised_by_script(error):
                # It failed before its first write, so nothing has changed.
                raise _Poison(said) from None
            if isinstance(error, ClusterError):
                raise
            raise _Refused(
                Outcome.busy, f"Redis refuses: {type(error).__name__} {said}", self._now() + BUSY_RETRY_MS
            ) from None
        finally:
            if batch.staged:
                await discard(self._redis, batch)
        reply = batches.decode_reply(raw)
        if reply.code == _ANOTHER_HISTORY:
            raise _AnotherHistory(reply.history_or_retry_at)
        if reply.code != 0:
            raise _Refused(Outcome(reply.code), str(reply.rows_or_message), reply.history_or_retry_at)
        return reply.rows(), reply.history_or_retry_at

    async def _built(self, keys: ShardKeys, script: str, commands: Sequence[AnyCommand]) -> Batch:
        try:
            if script == "open" and sum(map(_parts_of, commands)) > 2_000:
                return await asyncio.to_thread(
                    batches.build, keys, script, commands, self._secrets, self._now()
                )
            return batches.build(keys, script, commands, self._secrets, self._now())
        except Exception as error:
            raise _Poison(f"{type(error).__name__}: {error}") from error

    def _about_call(self, keys: ShardKeys, script: str, history: int) -> tuple[object, ...]:
        """The first arguments of every deciding script."""
        place = (
            f"{keys.shard}/{self._keys.shards}/{history}" if history else f"{keys.shard}/{self._keys.shards}"
        )
        outbox_max: int | str = "" if script in _ALWAYS_ADMITTED else self._limits.outbox_events_max
        return (
            place,
            now_ms(),
            self._clock() if self._clock else "",
            self._limits.clock_skew_ms_max,
            outbox_max,
        )


async def _all_decided(tickets: Sequence[_Ticket]) -> None:
    """Returns when all are decided at the same time: a recovery may take back what was decided first."""
    while waiting := [part for ticket in tickets for part in _leaves(ticket) if not part.done.done()]:
        await waiting[0].done


def _leaves(ticket: _Ticket) -> list[_Ticket]:
    return [leaf for part in ticket.parts for leaf in _leaves(part)] if ticket.parts else [ticket]


def _what_is_known(shard: int, command: AnyCommand, row: Sequence[Any], error: Exception) -> Answer:
    """The answer to a command that is decided, with no more than outcome and event: the rest of its row
    cannot be read.
    """
    message = f"decided, but the rest of the answer cannot be read: {type(error).__name__}: {error}"
    return Answer(
        command.id,
        OUTCOME_NAMES[row[0]],
        row[0],
        command.offer,
        shard=shard,
        seq=row[1] or None,
        at=row[2],
        message=message,
    )


def _parts_of(command: AnyCommand) -> int:
    return (
        command.terms.parts if isinstance(command, Open) and isinstance(command.terms, EnvelopeTerms) else 0
    )


def _check_baskets(commands: Sequence[AnyCommand], answers: list[Answer | None]) -> None:
    """Answers `invalid` to the grabs of a basket that cannot be decided as one: all of them, or it would be
    torn apart.
    """
    refused = {place for place, answer in enumerate(answers) if answer is not None}
    for place, reason in torn_baskets(commands, refused).items():
        command = commands[place]
        answers[place] = answers[place] or refusal(command.id, Outcome.invalid, command.offer, reason)


def _few_offers(places: Sequence[int], commands: Sequence[AnyCommand], start: int, end: int) -> int:
    """The end of a cut that names no more than OFFERS_IN_CALL_MAX offers."""
    if end - start <= OFFERS_IN_CALL_MAX:
        return end
    offers: set[str] = set()
    for index in range(start, end):
        offers.add(commands[places[index]].offer)
        if len(offers) > OFFERS_IN_CALL_MAX:
            return index
    return end


def _whole_baskets(places: Sequence[int], commands: Sequence[AnyCommand], end: int) -> int:
    """The end of a cut, moved behind the basket it would go through."""
    while end < len(places):
        basket = basket_of(commands[places[end]])
        if basket is None or basket != basket_of(commands[places[end - 1]]):
            break
        end += 1
    return end


class _Refused(Exception):
    """The script refused the whole call: nothing was decided."""

    def __init__(self, outcome: Outcome, message: str, retry_at: int) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.retry_at = retry_at


class _AnotherHistory(Exception):
    """The shard was recovered since the callers' last commands were decided: nothing was decided now."""

    def __init__(self, history: int) -> None:
        super().__init__(history)
        self.history = history


class _Poison(Exception):
    """A command raises where it is built or decided: nothing was decided."""


class _Broken(Exception):
    """A script failed after its first write; the shard is fenced."""


async def run_script(redis: Any, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
    """Runs a script by its SHA-1; a server that does not know it (new, restarted, failed over) is given its
    text.
    """
    script = loader.load(name)
    try:
        return await redis.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
    except NoScriptError:
        return await redis.execute_command("EVAL", script.text, len(keys), *keys, *arguments)
