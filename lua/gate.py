"""The gate: commands in, answers out. It gathers what arrives together for a shard and decides it in one script call.

A lone caller does not wait for company: the next batch is whatever arrived while the last one was in flight. When a good half of
a batch waits already, it goes out behind the one in flight, unless they hold commands of the same caller, whose order counts.
"""

import asyncio
import builtins
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)

from lua import batches, loader
from lua.decided import DecidedAnswers, ReportLost
from lua.journaled import HistoryChanged, Journaled
from lua.keys import KeySpace, ShardKeys
from lua.refusals import RefusalLog
from lua.sealing import Sealer
from lua.tickets import TicketKeys
from models.answers import Answer, refusal
from models.commands import BASKET_GRABS_MAX, AnyCommand, Grab, Open, basket_of, check
from models.identifiers import are_ids, campaign_of
from models.money import Invalid
from models.offers import EnvelopeTerms
from models.outcomes import Outcome

Promise = Literal["journaled", "decided"]
IN_FLIGHT_MAX: Final = 2
RETRY_SECONDS: Final = 0.05
WATCH_EVERY_SECONDS: Final = 0.1
BUSY_RETRY_MS: Final = 200
#: Commands of these scripts in one call, fewer than of others: each carries much.
AT_ONCE_MAX: Final = {"open": 16, "load": 8}
SHARDS_KNOWN_MAX: Final = 100_000

#: Scripts that must work when the outbox is full: what they do gives room, or ends what fills it.
_ALWAYS_ADMITTED: Final = frozenset(
    {"pause", "resume", "close", "amend", "adjust", "confirm", "release", "extend", "return", "redeem", "unredeem"}
)
_UNREACHABLE: Final = (ConnectionError, TimeoutError, ReadOnlyError, ClusterDownError, OSError)
#: Errors with which Redis refuses a script before it begins, so that nothing was decided: too few replicas, a disk that cannot be
#: written, another script that runs for seconds.
_NOT_BEGUN: Final = ("NOREPLICAS", "MISCONF", "BUSY ")


class OutcomeUnknown(Exception):
    """Time ran out after the commands were sent: they may or may not be decided. Send them again under the same ids."""


class GateLimits(NamedTuple):
    """Bounds of a gate: commands a call, commands queued a shard, events an outbox, milliseconds of time-out and clock skew."""

    batch_commands_max: int = 512
    queue_commands_max: int = 20_000
    outbox_events_max: int = 200_000
    timeout_ms: int = 2_000
    clock_skew_ms_max: int = 5_000


def now_ms() -> int:
    """Milliseconds since 1970 by this machine's clock."""
    return time.time_ns() // 1_000_000


class _Ticket:
    """Consecutive commands of one caller, shard and type; `done` gets their answers and the history they were decided under.

    `unsure` once they may be decided although nobody knows (no reply came, or a history was lost): then they are not refused any more.
    """

    __slots__ = ("commands", "deadline", "done", "group", "has_baskets", "patience_seconds", "patient_until", "script", "unsure")

    def __init__(self, group: object, script: str, commands: Sequence[AnyCommand], deadline: float, patience_seconds: float) -> None:
        self.group = group
        self.script = script
        self.commands = commands
        self.deadline = deadline
        self.patience_seconds = patience_seconds
        self.patient_until: float | None = None
        self.unsure = False
        # Two callers may have given their baskets the same name, so their tickets never share a call.
        self.has_baskets = script == "grab" and any(map(basket_of, commands))
        self.done: asyncio.Future[tuple[list[Answer], int]] = asyncio.get_running_loop().create_future()

    def is_patient(self, now: float) -> bool:
        """Whether it goes on waiting; patience begins with the first refusal, not while the server is away."""
        if self.unsure:
            return now < self.deadline
        if self.patient_until is None:
            self.patient_until = now + self.patience_seconds
        return now < self.patient_until

    def answer(self, answers: list[Answer], history: int = 0) -> None:
        if not self.done.done():
            self.done.set_result((answers, history))

    def refuse(self, outcome: Outcome, message: str, retry_at: int) -> None:
        if self.unsure:
            self.fail(OutcomeUnknown(f"decided or not, nobody knows yet ({message}): send the commands again under their ids"))
            return
        self.answer([refusal(c.id, outcome, c.offer, message, retry_at) for c in self.commands])

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # a caller of several shards hears of the first failure only; the others are no news for the log


class _Shard:
    """The queue of one shard and what is in flight for it."""

    def __init__(self, keys: ShardKeys) -> None:
        self.keys = keys
        self.queue: deque[_Ticket] = deque()
        self.queued = 0
        self.in_flight: list[list[_Ticket]] = []
        self.groups: set[object] = set()
        self.held = False
        self.waking = False
        self.watch: asyncio.TimerHandle | None = None


class Gate:
    """Decides commands through the Lua scripts. One a process and event loop; `start` before use, `close` after.

    `redis` is a client of redis.asyncio (one server or cluster) that does not decode replies. `clock` gives a time in ms that
    replaces the server's, for tests and simulation; without it the scripts use the server's own. `tickets` checks signed tickets.
    `report_lost` is told of answers given as decided that a recovery took back. `refusals` keeps a sample of what was refused.
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
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- callers ------------------------------------------------------------------------------------------------------

    async def decide(
        self,
        commands: Sequence[AnyCommand],
        promise: Promise = "journaled",
        patience_ms: int = 0,
        timeout_ms: int | None = None,
        order: object = None,
    ) -> list[Answer]:
        """Answers in the order of the commands; commands of one campaign are carried out in that order.

        `journaled` waits until Kafka has the events of the answers. `patience_ms` is how long commands that meet a fenced or
        busy shard wait before they are answered so. Calls with the same `order` are carried out in the order they were made.
        Raises OutcomeUnknown when `timeout_ms` (the gate's own when absent) ran out after they were sent.
        """
        answers: list[Answer | None] = [None] * len(commands)
        sound = self._at_the_door(commands, answers)
        runs = list(self._runs(sound, commands))
        timeout = (timeout_ms or self._limits.timeout_ms) + patience_ms
        deadline = time.monotonic() + timeout / 1000
        group = answers if order is None else order
        waits = []
        for shard, script, places in runs:
            ticket = self._submit(shard, script, [commands[place] for place in places], group, deadline, patience_ms)
            waits.append((shard, places, ticket))
        for shard, places, ticket in waits:
            answered, history = await ticket.done
            if promise == "journaled":
                answered = await self._until_journaled(shard, ticket, answered, history)
            else:
                self._decided.keep(shard, history, ticket.commands, answered)
            if self._refusals is not None:
                self._refusals.take(ticket.commands, answered)
            if len(places) == len(commands):
                return answered
            for place, answer in zip(places, answered, strict=True):
                answers[place] = answer
        return answers  # type: ignore[return-value]

    async def grab(self, command: Grab, promise: Promise = "journaled", patience_ms: int = 0) -> Answer:
        """One grab; see `decide`."""
        return (await self.decide([command], promise, patience_ms))[0]

    def _at_the_door(self, commands: Sequence[AnyCommand], answers: list[Answer | None]) -> Sequence[int]:
        """Places of the commands that may go on; the others are answered `invalid`."""
        if len(commands) == 1:
            return self._check_each(commands, answers)
        names: list[str] = []
        for command in commands:
            if type(command) is not Grab or command.attributes or type(command.quantity) is not int:
                break
            if command.basket is not None or command.ticket is not None or command.wait:
                break
            names += (command.id, command.offer, command.user)
        else:
            if are_ids(names) and all(0 < command.quantity < 10**13 for command in commands):  # type: ignore[union-attr,operator]
                return range(len(commands))
        return self._check_each(commands, answers)

    def _check_each(self, commands: Sequence[AnyCommand], answers: list[Answer | None]) -> Sequence[int]:
        sound = []
        for place, command in enumerate(commands):
            try:
                check(command)
                sound.append(place)
            except (Invalid, TypeError) as error:
                answers[place] = refusal(command.id, Outcome.invalid, command.offer, str(error))
        if any(map(basket_of, commands)):
            _check_baskets(commands, answers)
            return [place for place in sound if answers[place] is None]
        return sound

    def _runs(self, places: Sequence[int], commands: Sequence[AnyCommand]) -> Iterable[tuple[int, str, Sequence[int]]]:
        """(shard, script, places): the commands of each shard in order, cut where the type changes."""
        if len(places) == 1:
            command = commands[places[0]]
            return [(self._shard(command.offer), type(command).__name__.lower(), places)]
        return self._cut(places, commands)

    def _cut(self, places: Iterable[int], commands: Sequence[AnyCommand]) -> Iterable[tuple[int, str, Sequence[int]]]:
        by_shard: dict[int, list[int]] = {}
        for place in places:
            by_shard.setdefault(self._shard(commands[place].offer), []).append(place)
        for shard, in_shard in by_shard.items():
            for kind, run in groupby(in_shard, lambda place: type(commands[place])):
                run_places = list(run)
                size = AT_ONCE_MAX.get(kind.__name__.lower(), self._limits.batch_commands_max)
                start = 0
                while start < len(run_places):
                    end = _whole_baskets(run_places, commands, min(start + size, len(run_places)))
                    yield shard, kind.__name__.lower(), run_places[start:end]
                    start = end

    def _shard(self, offer: str) -> int:
        shard = self._shard_of.get(offer)
        if shard is None:
            if len(self._shard_of) > SHARDS_KNOWN_MAX:
                self._shard_of.clear()
            shard = self._shard_of[offer] = self._keys.shard_of_offer(offer)
        return shard

    def _submit(
        self,
        number: int,
        script: str,
        commands: Sequence[AnyCommand],
        group: object,
        deadline: float,
        patience_ms: int,
        unsure: bool = False,
    ) -> _Ticket:
        shard = self._shards[number]
        ticket = _Ticket(id(group), script, commands, deadline, patience_ms / 1000)
        ticket.unsure = unsure
        if shard.queued + len(commands) > self._limits.queue_commands_max:
            ticket.refuse(Outcome.busy, "the gate's queue is full", self._now() + BUSY_RETRY_MS)
            return ticket
        shard.queue.append(ticket)
        shard.queued += len(commands)
        self._wake(shard)
        return ticket

    async def _until_journaled(self, number: int, ticket: _Ticket, answers: list[Answer], history: int) -> list[Answer]:
        while True:
            last = max((answer.seq for answer in answers if answer.seq is not None), default=0)
            if last == 0:
                return answers
            try:
                left = ticket.deadline - time.monotonic()
                # Not wait_for: until Python 3.12 it may swallow a cancellation, and with it Ctrl-C.
                async with asyncio.timeout(max(left, 0.001)):
                    await self.journaled.wait(number, history, last)
                return answers
            except HistoryChanged:
                # What was decided may be gone with its history: ask again under the same ids, and trust only the new answer.
                again = self._submit(number, ticket.script, ticket.commands, ticket, ticket.deadline, 0, unsure=True)
                answers, history = await again.done
            except builtins.TimeoutError:
                raise OutcomeUnknown(
                    f"decided, but not in the journal in time (shard {number}, seq {last}; is a relay running?): "
                    "send the commands again under their ids"
                ) from None

    def _now(self) -> int:
        return self._clock() if self._clock else now_ms()

    # -- sender -------------------------------------------------------------------------------------------------------

    def _wake(self, shard: _Shard) -> None:
        """Sends after everyone who can run now has run: callers who were just answered ask again, and go along."""
        if not shard.waking:
            shard.waking = True
            asyncio.get_running_loop().call_soon(self._pump, shard)

    def _pump(self, shard: _Shard) -> None:
        """Sends as much as may be in flight; a shard that refused whole calls is tried again only after a pause."""
        shard.waking = False
        while shard.queue and not shard.held and self._may_send(shard):
            batch = self._next_batch(shard)
            if not batch:
                return
            shard.in_flight.append(batch)
            if not shard.watch:
                shard.watch = asyncio.get_running_loop().call_later(WATCH_EVERY_SECONDS, self._watch, shard)
            task = asyncio.create_task(self._send(shard, batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _may_send(self, shard: _Shard) -> bool:
        # Small batches side by side would only cost more calls, each as dear as a batch.
        flying = len(shard.in_flight)
        return flying == 0 or (flying < IN_FLIGHT_MAX and 2 * shard.queued >= self._limits.batch_commands_max)

    def _next_batch(self, shard: _Shard) -> list[_Ticket]:
        """The tickets at the head of the queue that one call can carry: one type, and no caller already in flight."""
        batch: list[_Ticket] = []
        count = 0
        queue = shard.queue
        size = AT_ONCE_MAX.get(queue[0].script, self._limits.batch_commands_max)
        while queue:
            ticket = queue[0]
            if batch and (ticket.script != batch[0].script or count + len(ticket.commands) > size):
                break
            if ticket.group in shard.groups or (ticket.has_baskets and any(other.has_baskets for other in batch)):
                break
            batch.append(queue.popleft())
            count += len(ticket.commands)
        shard.queued -= count
        shard.groups.update(ticket.group for ticket in batch)
        return batch

    async def _send(self, shard: _Shard, batch: list[_Ticket]) -> None:
        commands = batch[0].commands if len(batch) == 1 else [c for ticket in batch for c in ticket.commands]
        refused: tuple[Outcome, str, int] | None = None
        try:
            rows, history = await self._call(shard.keys, batch[0].script, commands)
            number, sealer = shard.keys.shard, self._secrets.sealer

            def answers_of(place: int, commands: Sequence[AnyCommand]) -> list[Answer]:
                return [batches.answer_of(number, command, rows[place + i], sealer) for i, command in enumerate(commands)]

            place = 0
            for ticket in batch:
                ticket.answer(answers_of(place, ticket.commands), history)
                place += len(ticket.commands)
        except _Refused as error:
            refused = (error.outcome, error.message, error.retry_at)
        except _UNREACHABLE as error:
            self._unreachable(shard, batch, error)
        except Exception as error:
            for ticket in batch:
                ticket.fail(error)
        except BaseException:
            for ticket in batch:
                ticket.fail(asyncio.CancelledError())
            raise
        finally:
            shard.in_flight = [other for other in shard.in_flight if other is not batch]
            shard.groups.difference_update(ticket.group for ticket in batch)
            if refused:
                self._refused(shard, batch, *refused)
            self._wake(shard)

    def _refused(self, shard: _Shard, batch: list[_Ticket], outcome: Outcome, message: str, retry_at: int) -> None:
        """The whole call was refused: who has patience goes back to the head of the queue, in order."""
        now = time.monotonic()
        patient = []
        for ticket in batch:
            if ticket.done.done():
                continue
            if ticket.is_patient(now):
                patient.append(ticket)
            else:
                ticket.refuse(outcome, message, retry_at)
        self._hold(shard, patient)

    def _unreachable(self, shard: _Shard, batch: list[_Ticket], error: Exception) -> None:
        """Sent, perhaps decided: only the same command can find out, so it is sent again until its time is over."""
        now = time.monotonic()
        for ticket in batch:
            ticket.unsure = True
            if ticket.deadline <= now:
                ticket.refuse(Outcome.busy, f"Redis does not answer: {error}", 0)
        self._hold(shard, [ticket for ticket in batch if not ticket.done.done()])
        self._give_up_late(shard, now)

    def _watch(self, shard: _Shard) -> None:
        """Keeps the time-outs of callers while something is in flight, whatever time-out the client of Redis has."""
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

    def _hold(self, shard: _Shard, tickets: list[_Ticket]) -> None:
        if not tickets:
            return
        shard.queue.extendleft(reversed(tickets))
        shard.queued += sum(len(ticket.commands) for ticket in tickets)
        if not shard.held:
            shard.held = True
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._release, shard)

    def _release(self, shard: _Shard) -> None:
        shard.held = False
        self._pump(shard)

    async def _call(self, keys: ShardKeys, script: str, commands: Sequence[AnyCommand]) -> tuple[list[list[int]], int]:
        if script == "open" and sum(map(_parts_of, commands)) > 2_000:
            names, packed_arguments = await asyncio.to_thread(batches.build, keys, script, commands, self._secrets, self._now())
        else:
            names, packed_arguments = batches.build(keys, script, commands, self._secrets, self._now())
        outbox_max: int | str = "" if script in _ALWAYS_ADMITTED else self._limits.outbox_events_max
        arguments = (
            f"{keys.shard}/{self._keys.shards}",
            now_ms(),
            self._clock() if self._clock else "",
            self._limits.clock_skew_ms_max,
            outbox_max,
            *packed_arguments,
        )
        try:
            raw = await run_script(self._redis, script, [*keys.deciding(), *names], arguments)
        except OutOfMemoryError:
            raise _Refused(Outcome.busy, "Redis memory is full", self._now() + BUSY_RETRY_MS) from None
        except ResponseError as error:
            if not str(error).startswith(_NOT_BEGUN):
                raise
            raise _Refused(Outcome.busy, f"Redis refuses to write: {error}", self._now() + BUSY_RETRY_MS) from None
        reply = batches.decode_reply(raw)
        if reply.code != 0:
            raise _Refused(Outcome(reply.code), str(reply.rows_or_message), reply.history_or_retry_at)
        return reply.rows(), reply.history_or_retry_at


def _parts_of(command: AnyCommand) -> int:
    return command.terms.parts if isinstance(command, Open) and isinstance(command.terms, EnvelopeTerms) else 0


def _check_baskets(commands: Sequence[AnyCommand], answers: list[Answer | None]) -> None:
    """Answers `invalid` to the grabs of a basket that cannot be decided as one: all of them, or it would be torn apart."""
    members: dict[str, list[int]] = {}
    for place, command in enumerate(commands):
        if (basket := basket_of(command)) is not None:
            members.setdefault(basket, []).append(place)
    for basket, places in members.items():
        grabs = [commands[place] for place in places]
        reason = None
        if any(answers[place] is not None for place in places):
            reason = f"basket: another grab of {basket} is invalid"
        elif len(places) > BASKET_GRABS_MAX:
            reason = f"basket: at most {BASKET_GRABS_MAX} grabs, {basket} has {len(places)}"
        elif places[-1] - places[0] != len(places) - 1:
            reason = f"basket: the grabs of {basket} must stand side by side"
        elif len({campaign_of(grab.offer) for grab in grabs}) > 1:
            reason = f"basket: the offers of {basket} must be of one campaign (the part of their ids before ':')"
        elif len({grab.id for grab in grabs}) < len(grabs):
            reason = f"basket: an id stands twice in {basket}"
        if reason:
            for place in places:
                answers[place] = answers[place] or refusal(commands[place].id, Outcome.invalid, commands[place].offer, reason)


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


async def run_script(redis: Any, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
    """Runs a script by its SHA-1; a server that does not know it (new, restarted, failed over) is given its text."""
    script = loader.load(name)
    try:
        return await redis.execute_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
    except NoScriptError:
        return await redis.execute_command("EVAL", script.text, len(keys), *keys, *arguments)
