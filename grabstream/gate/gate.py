"""The gate: takes commands and returns answers. It collects the commands that arrive for a shard at the same
time, and decides them in one script call.

A single caller does not wait for other callers: a call takes the commands that arrived while the last call
was in flight. A second call may be in flight at the same time, so that the server decides one while the gate
handles the answers to the other; not if both have commands of one caller, whose order counts. A call has a
fixed cost, so small calls go side by side only while the server answers fast, that is, is not busy.

The order of a caller's commands holds through retries and recoveries. Decided commands that are not known to
be journaled stay in the caller's `Lane`, and every later call of the lane names the history in which they
were decided. In another history the script decides nothing; then the lane's commands are sent again, in their
order, before those that were refused.

A call does a bounded amount of work (lua/includes/cost.lua). Commands that did not fit get no row, and are
sent with the next call, in their order, before all others.

If a call causes an error, one command loses its answer, not all: the call is split in halves until the
command that causes the error is alone.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import groupby, repeat
from operator import attrgetter
from typing import Any, Final

from grabstream.crypto.sealing import Sealer
from grabstream.crypto.tickets import TicketKeys
from grabstream.gate import encoding, personal
from grabstream.gate.authority import Authority
from grabstream.gate.batches import Batch, PlainBatch, batch_of, checked_batch, joined, plain_batch
from grabstream.gate.calls import (
    BUSY_RETRY_MS,
    AnotherHistory,
    BrokenOff,
    CallRefused,
    Calls,
    GateLimits,
    Undecidable,
    now_ms,
)
from grabstream.gate.decided import DecidedAnswers, ReportLost
from grabstream.gate.drawing import NotWanted, turn
from grabstream.gate.journaled import HistoryChanged, Journaled, set_result
from grabstream.gate.personal import KeysUnavailable, UserKeys
from grabstream.gate.queue import (
    OFFERS_IN_CALL_MAX,
    CallOrder,
    Lane,
    QueueEntry,
    ShardQueue,
    all_decided,
    few_offers,
    whole_baskets,
)
from grabstream.gate.refusals import RefusalLog
from grabstream.gate.single import Promise, SingleCommand, Then, not_journaled
from grabstream.gate.sizes import CALL_BYTES_MAX, fitting
from grabstream.gate.staging import ScriptCall
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer, refusal
from grabstream.models.commands import (
    AnyCommand,
    Grab,
    Open,
    are_right_confirmations,
    basket_of,
    check,
    offers_of_right_grabs,
    secret_of,
    torn_baskets,
    user_of,
)
from grabstream.models.money import AMOUNT_MAX, Invalid
from grabstream.models.offers import EnvelopeTerms, Terms
from grabstream.models.outcomes import OUTCOME_NAMES, Outcome, OutcomeUnknown
from grabstream.runtime.ending import end
from grabstream.runtime.measures import GateMeasures
from grabstream.runtime.traces import traces
from grabstream.runtime.trouble import is_trouble

log = logging.getLogger(__name__)

#: Calls of a shard that are in flight at the same time.
IN_FLIGHT_MAX: Final = 2
#: Minimum commands of a second call while the server is not fast.
SECOND_CALL_COMMANDS_MIN: Final = 64
#: Minimum commands of a second call while the server is fast.
SECOND_CALL_FAST_COMMANDS_MIN: Final = 8
#: A server is fast if it answered the last call of the shard in less time. A call of a few commands takes
#: 0.2 ms of a server that is otherwise idle.
FAST_SECONDS: Final = 0.002
RETRY_SECONDS: Final = 0.05
WATCH_EVERY_SECONDS: Final = 0.1
#: Maximum entries of other types that a call skips while it takes those of its type.
LEFT_OUT_MAX: Final = 512
#: Commands per call of these scripts, fewer than of others: each is large, or no more fit into a call by
#: their cost (lua/includes/cost.lua), and those that do not fit are sent again.
AT_ONCE_MAX: Final = {"open": 16, "load": 8, "confirm": 192}
SHARDS_KNOWN_MAX: Final = 100_000

#: A command, alone in its call, whose script has failed this many times after its first write is not sent
#: again.
BREAKS_MAX: Final = 3

#: The outcome's code in a row of a reply.
_code_of = attrgetter("code")

#: Called for a command that no script can decide, with its index in the caller's list and the error.
ReportUndecidable = Callable[[int, str], None]

#: The answer to an `open` with a seed, unless the gate accepts them.
SEED_REFUSED: Final = (
    "terms.seed: is refused, because a caller who chooses the seed can choose who gets which part. Leave "
    "it out: the gate draws it. (GRAB_ISSUER_SEEDS=true accepts it, for tests and reproductions.)"
)


#: The answer to an `open` of an envelope without a beacon, where the gate requires one.
BEACON_REQUIRED: Final = (
    "terms.beacon: GRAB_BEACON_REQUIRED is set: name <chain>/<round> of a public randomness beacon, a "
    "round that is not due yet, and draw at_grab"
)


class Gate:
    """Decides commands through the Lua scripts. Make one per process and event loop; call `start` before use
    and `close` after.

    `redis` is a client of redis.asyncio (one server or cluster) that does not decode replies. `clock` returns
    a time in ms that replaces the server's, for tests and simulation; without it the scripts use the server's
    clock. `tickets` checks signed tickets. `report_lost` receives answers that were given as decided and that
    a recovery lost. `refusals` keeps a sample of the refusals. `measures` counts what the gate does.
    `user_keys` has the keys under which the metadata of grabs are sealed; without it, they are not.
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
        measures: GateMeasures | None = None,
        user_keys: UserKeys | None = None,
    ) -> None:
        self.measures = measures or GateMeasures()
        if refusals is not None:
            self.measures.refusals_dropped = refusals.dropped
        self._user_keys = user_keys
        self._redis = redis
        self._refusals = refusals
        self._keys = keys
        self._sealer = sealer
        self._limits = limits or GateLimits()
        secrets = encoding.Secrets(sealer, tickets or TicketKeys({}))
        self._calls = Calls(redis, keys, secrets, self._limits, clock)
        self._shards = [ShardQueue(keys.shard(number)) for number in range(keys.shards)]
        self._shard_of: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.journaled = Journaled(redis, keys)
        self._decided = DecidedAnswers(redis, keys, self.journaled, report_lost, self.measures)

    def start(self) -> None:
        """Starts to follow which events are journaled."""
        self.journaled.start()

    @property
    def queued(self) -> int:
        """Commands that wait in the queues of all shards."""
        return sum(shard.queued for shard in self._shards)

    @property
    def authority(self) -> Authority:
        """The signatures that commands must carry."""
        return self._limits.authority

    @property
    def calls_in_flight(self) -> int:
        """Script calls that have no reply yet."""
        return sum(len(shard.in_flight) for shard in self._shards)

    async def close(self) -> None:
        """Ends all calls in flight. Callers that still wait get no answers."""
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
        topic_order: CallOrder | None = None,
        report_undecidable: ReportUndecidable = lambda index, reason: None,
        from_system: bool = False,
        are_plain: bool = False,
    ) -> list[Answer]:
        """Returns answers in the order of the commands. Commands of one campaign are executed in that order,
        also across a recovery.

        With `journaled`, returns when Kafka has the events of the answers. `patience_ms` is how long commands
        wait for a fenced or busy shard before they get that answer; later commands of this list in the same
        shard then get the same answer. Raises OutcomeUnknown when `timeout_ms` (by default that of the gate)
        ran out after commands were sent.

        `topic_order` is for a program that reads commands from a topic. Such a program bounds its commands in
        flight, and cannot return a command to the topic, so its calls are executed in the order in which they
        were made, are queued even if the queue is full, and wait as long as their shard decides nothing; they
        never get `fenced` or `busy`. `report_undecidable` is called with the index and the error of each
        command that no script can decide; the answer to it is `invalid`. `from_system` is for commands that
        the system sends itself, whose ids are reserved (`models/payments.py`). `are_plain` says that the
        caller has checked that all are plain grabs (`plain_grabs`), and valid.
        """
        fixed = (promise, patience_ms, timeout_ms, topic_order, report_undecidable, from_system, are_plain)
        if self._user_keys is None:
            return await self._decide(commands, *fixed)
        # The caller may change its list meanwhile.
        commands = list(commands)
        if topic_order is not None:
            async with AsyncExitStack() as held:
                for number in sorted({self._shard(command.offer) for command in commands}):
                    await held.enter_async_context(topic_order.sealing(number))
                sealed = await personal.sealed_when_possible(commands, self._user_keys)
        else:
            try:
                sealed = await personal.sealed(commands, self._user_keys)
            except KeysUnavailable as error:
                return [_busy(command, f"the keys of users: {error}") for command in commands]
        if sealed is None:
            return await self._decide(commands, *fixed)
        # Nothing may be awaited between the end of `sealing` and the queue.
        answers = await self._decide(sealed, *fixed)
        return encoding.as_sent(commands, answers)

    async def _decide(
        self,
        commands: Sequence[AnyCommand],
        promise: Promise,
        patience_ms: int,
        timeout_ms: int | None,
        topic_order: CallOrder | None,
        report_undecidable: ReportUndecidable,
        from_system: bool,
        are_plain: bool,
    ) -> list[Answer]:
        timeout_seconds = ((timeout_ms or self._limits.timeout_ms) + patience_ms) / 1000
        deadline = math.inf if topic_order else time.monotonic() + timeout_seconds
        if len(commands) == 1 and topic_order is None and basket_of(commands[0]) is None:
            return [
                await self._decide_one(
                    commands[0], promise, deadline, patience_ms / 1000, report_undecidable, from_system
                )
            ]
        answers: list[Answer | None] = [None] * len(commands)
        plain = checked_batch(commands) if are_plain else plain_batch(commands)
        batches = list(self._batches(commands, answers, from_system, plain))
        order = topic_order or CallOrder()
        waits: deque[tuple[int, Sequence[int], QueueEntry]] = deque()
        last_of: dict[int, QueueEntry] = {}
        for shard, indexes, batch in batches:
            patience = math.inf if topic_order else patience_ms / 1000
            entry = QueueEntry(order.lane(shard), batch, deadline, patience)
            before = last_of.get(shard)
            if topic_order is None:
                last_of[shard] = entry
                if before is not None:
                    before.next = entry
            self._submit(shard, entry, bounded=topic_order is None, before=before)
            waits.append((shard, indexes, entry))
        entries = [entry for *_, entry in waits]
        try:
            if promise == "decided":
                await all_decided(entries)
            while waits:
                shard, indexes, entry = waits.popleft()
                await self._answers_ready(shard, entry, promise)
                if entry.successors:
                    first, second = entry.successors
                    middle = len(first.batch.commands)
                    waits.extendleft([(shard, indexes[middle:], second), (shard, indexes[:middle], first)])
                    continue
                if entry.fault is not None:
                    for index in indexes:
                        report_undecidable(index, entry.fault)
                self._remember(shard, entry, promise)
                if promise != "decided":
                    entry.give()
                if len(indexes) == len(commands):
                    return entry.answers
                for index, answer in zip(indexes, entry.answers, strict=True):
                    answers[index] = answer
            return answers  # type: ignore[return-value]
        except OutcomeUnknown:
            self.measures.unknown += 1
            raise
        finally:
            for entry in entries:
                entry.give()

    def decide_soon(
        self,
        command: AnyCommand,
        then: Then,
        promise: Promise = "journaled",
        timeout_ms: int | None = None,
        from_system: bool = False,
        batch: PlainBatch | None = None,
    ) -> None:
        """Decides a single command as `decide` does, and calls `then` with its answer, or with what `decide`
        would raise; at once if the command must not reach a script, or if the queue is full. `batch` is that
        of the command, if the caller has made it.
        """
        if self._user_keys is not None and type(command) is Grab and command.metadata:
            task = asyncio.create_task(self._decide_sealed(command, then, promise, timeout_ms, from_system))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        deadline = time.monotonic() + (timeout_ms or self._limits.timeout_ms) / 1000
        self._begin(command, promise, deadline, 0.0, then, from_system, batch)

    async def _decide_sealed(
        self, command: AnyCommand, then: Then, promise: Promise, timeout_ms: int | None, from_system: bool
    ) -> None:
        """Decides a command whose metadata must be sealed before, for `decide_soon`."""
        result: Answer | BaseException
        try:
            [result] = await self.decide([command], promise, timeout_ms=timeout_ms, from_system=from_system)
        except asyncio.CancelledError as error:
            then(error)
            raise
        except Exception as error:
            result = error
        then(result)

    async def _decide_one(
        self,
        command: AnyCommand,
        promise: Promise,
        deadline: float,
        patience_seconds: float,
        report_undecidable: ReportUndecidable,
        from_system: bool,
    ) -> Answer:
        """Decides a command that comes alone, as most commands of a crowd do, like `decide`."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        then = partial(set_result, answered)
        single = self._begin(command, promise, deadline, patience_seconds, then, from_system)
        try:
            return await answered
        finally:
            if single is not None:
                single.give()
                if single.fault is not None:
                    report_undecidable(0, single.fault)

    def _begin(
        self,
        command: AnyCommand,
        promise: Promise,
        deadline: float,
        patience_seconds: float,
        then: Then,
        from_system: bool,
        plain: PlainBatch | None = None,
    ) -> SingleCommand | None:
        """Sends a command that comes alone on its way; returns None if it is answered already."""
        batch: Batch | None = plain or plain_batch((command,))
        if batch is None:
            refused = _refused(command, from_system, self._limits)
            if refused is not None:
                self.measures.answers[type(command).__name__.lower()][refused.code] += 1
                then(refused)
                return None
            batch = batch_of((command,))
        number = self._shard(command.offer)
        single = SingleCommand(
            Lane(), batch, deadline, patience_seconds, gate=self, shard=number, promise=promise, then=then
        )
        self._submit(number, single, bounded=True, before=None)
        return single

    def ended(self, number: int, entry: QueueEntry, promise: Promise, error: BaseException | None) -> None:
        """A single command has its answer, or an error."""
        if error is None:
            self._remember(number, entry, promise)
        elif isinstance(error, OutcomeUnknown):
            self.measures.unknown += 1

    def _remember(self, number: int, entry: QueueEntry, promise: Promise) -> None:
        """Counts answers that no script gave; keeps `decided` answers until they are journaled; samples
        refusals."""
        if not entry.history:
            # Decisions of a script are counted when its reply is read.
            self.measures.answers[entry.batch.script].update(answer.code for answer in entry.answers)
        if promise == "decided":
            self._decided.keep(number, entry.history, entry.batch.commands, entry.answers)
        if self._refusals is not None:
            self._refusals.take(entry.batch.commands, entry.answers)

    async def grab(self, command: Grab, promise: Promise = "journaled", patience_ms: int = 0) -> Answer:
        """Decides one grab; see `decide`."""
        return (await self.decide([command], promise, patience_ms))[0]

    def _batches(
        self,
        commands: Sequence[AnyCommand],
        answers: list[Answer | None],
        from_system: bool,
        plain: PlainBatch | None,
    ) -> Iterator[tuple[int, Sequence[int], Batch]]:
        """Yields shard, indexes and batch of the valid commands: those of each shard in order, divided where
        the type changes and where a call would be too large. Answers the others `invalid`. A batch has its
        own list: the caller may change its list, also before the answers are known to be journaled. `plain`
        is the batch of all, if they are plain and valid.
        """
        indexes: Sequence[int] = range(len(commands))
        # For most lists, a check by column proves that all commands are valid, and is faster than the rules.
        if plain is None and not (
            offers_of_right_grabs(commands, AMOUNT_MAX)
            or (not self._limits.authority.needs_receipts and are_right_confirmations(commands))
        ):
            indexes = self._check_each(commands, answers, from_system)
        for shard, script, left in self._by_shard_and_type(indexes, commands, plain):
            size = self._most_at_once(script, self._limits.batch_commands_max)
            while left:
                end = min(size, len(left))
                if plain is None or len(plain.offers) > OFFERS_IN_CALL_MAX:
                    end = whole_baskets(left, commands, few_offers(left, commands, end))
                batch = batch_of([commands[index] for index in left[:end]], plain)
                if batch.bytes > CALL_BYTES_MAX:
                    end = whole_baskets(left, commands, fitting(batch.commands))
                    batch = batch_of(batch.commands[:end], plain)
                yield shard, left[:end], batch
                left = left[end:]

    def _by_shard_and_type(
        self, indexes: Sequence[int], commands: Sequence[AnyCommand], plain: PlainBatch | None
    ) -> Iterator[tuple[int, str, Sequence[int]]]:
        """Yields shard, script and indexes of consecutive commands of one shard and type."""
        if plain is not None and len(plain.offers) == 1:
            yield self._shard(commands[0].offer), "grab", indexes
            return
        by_shard: dict[int, list[int]] = {}
        for index in indexes:
            by_shard.setdefault(self._shard(commands[index].offer), []).append(index)
        for shard, in_shard in by_shard.items():
            for kind, run in groupby(in_shard, lambda index: type(commands[index])):
                yield shard, kind.__name__.lower(), list(run)

    def _check_each(
        self, commands: Sequence[AnyCommand], answers: list[Answer | None], from_system: bool
    ) -> Sequence[int]:
        valid = []
        for index, command in enumerate(commands):
            if (refused := _refused(command, from_system, self._limits)) is None:
                valid.append(index)
            else:
                answers[index] = refused
        if any(map(basket_of, commands)):
            _check_baskets(commands, answers)
            valid = [index for index in valid if answers[index] is None]
        for command, answer in zip(commands, answers, strict=True):
            if answer is not None:
                self.measures.answers[type(command).__name__.lower()][answer.code] += 1
        return valid

    @staticmethod
    def _most_at_once(script: str, most: int) -> int:
        return min(AT_ONCE_MAX.get(script, most), most)

    def _shard(self, offer: str) -> int:
        shard = self._shard_of.get(offer)
        if shard is None:
            if len(self._shard_of) > SHARDS_KNOWN_MAX:
                self._shard_of.clear()
            shard = self._shard_of[offer] = self._keys.shard_of_offer(offer)
        return shard

    def _submit(self, number: int, entry: QueueEntry, bounded: bool, before: QueueEntry | None) -> None:
        """Queues an entry; refuses it if the queue is full, or if the entry before it was refused."""
        shard = self._shards[number]
        wanted = len(entry.batch.commands)
        is_full = bounded and shard.queued + wanted > self._limits.queue_commands_max
        if is_full or (before is not None and before.is_done):
            entry.refuse(Outcome.busy, "the gate's queue is full", self._calls.now() + BUSY_RETRY_MS)
            return
        shard.queue.append(entry)
        shard.queued += wanted
        self._wake(shard)

    async def _answers_ready(self, number: int, entry: QueueEntry, promise: Promise) -> None:
        """Returns when the answers of an entry may be given, or when it was split into parts; raises
        OutcomeUnknown.
        """
        while True:
            await entry.wait()
            if promise == "decided" or (last := entry.last_seq) == 0:
                return
            try:
                left = entry.deadline - time.monotonic()
                # Not wait_for: before Python 3.12 it may swallow a cancellation, and with it Ctrl-C.
                async with asyncio.timeout(None if left == math.inf else max(left, 0.001)):
                    await self.journaled.wait(number, entry.history, last)
                # The lane of a topic_order, whose entries have no deadline, may outlive a journal that is
                # restored to an older state.
                if entry.deadline < math.inf:
                    entry.lane.journaled_seq = max(entry.lane.journaled_seq, last)
                return
            except HistoryChanged:
                # The decisions may be lost with their history: all entries of the lane are decided again, and
                # only the new answers count.
                self.ask_again(number, entry)
            except TimeoutError:
                raise not_journaled(number, last) from None

    def ask_again(self, number: int, entry: QueueEntry) -> None:
        """Has those entries of a lane decided again whose history is lost."""
        shard, lane = self._shards[number], entry.lane
        if entry not in lane.decided:
            return  # an earlier entry of the lane has already caused this
        if lane.in_flight:
            lane.stale = True  # entries in flight are sent again after these, whatever their outcome
        else:
            self._requeue(shard, lane.take_decided())
            self._wake(shard)

    # -- sender ----------------------------------------------------------------------------------------------

    def _wake(self, shard: ShardQueue) -> None:
        """Sends after all tasks that are ready have run: callers that just got answers can add commands to
        the call.
        """
        if not shard.waking:
            shard.waking = True
            asyncio.get_running_loop().call_soon(self._pump, shard)

    def _pump(self, shard: ShardQueue) -> None:
        """Sends as many calls as may be in flight; after a refused call, the shard pauses before a retry."""
        shard.waking = False
        while shard.queue and not shard.is_paused and self._may_send(shard):
            entries, offers, history, journaled_seq = self._next_call(shard)
            if not entries:
                return
            if entries[0].batch.draws:
                shard.drawing = entries
            else:
                shard.in_flight.append(entries)
            if not shard.watch:
                shard.watch = asyncio.get_running_loop().call_later(WATCH_EVERY_SECONDS, self._watch, shard)
            task = asyncio.create_task(self._send(shard, entries, offers, history, journaled_seq))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _may_send(self, shard: ShardQueue) -> bool:
        in_flight = len(shard.in_flight)
        return in_flight == 0 or (in_flight < IN_FLIGHT_MAX and shard.queued >= _second_call_min(shard))

    def _next_call(self, shard: ShardQueue) -> tuple[list[QueueEntry], set[str], int, int]:
        """Takes the entries for one call from the head of the queue; returns them, their offers, the history
        in which the call must be decided (0: any), and the last event that their callers know to be
        journaled.

        The entries have one type, none of their lanes is in flight, and the decided entries of their lanes
        were decided in one history. Entries of other types between them keep their place: only the order of
        one lane counts, and the lane of an entry that is left out has no other entry in the call.
        """
        entries: list[QueueEntry] = []
        offers: set[str] = set()
        left: list[QueueEntry] = []
        # While parts are drawn, only later commands of the same callers wait.
        lanes_left = {entry.lane for entry in shard.drawing}
        count = history = size_bytes = 0
        queue = shard.queue
        most = self._limits.batch_commands_max
        is_divided = not shard.in_flight and 2 * _second_call_min(shard) <= shard.queued < 2 * most
        if is_divided and queue[0].lane is not queue[-1].lane:
            # The other half goes into the second call.
            most = (shard.queued + 1) // 2
        while queue:
            entry = queue[0]
            lane, batch = entry.lane, entry.batch
            wanted = len(batch.commands)
            if entry.is_done:  # refused with an entry before it, or its caller no longer waits
                shard.queued -= wanted
                queue.popleft()
                continue
            if (
                (lanes_left and lane in lanes_left)
                or (batch.draws and (entries or shard.drawing))
                or (entries and batch.script != entries[0].batch.script)
            ):
                if len(left) == LEFT_OUT_MAX:
                    break
                left.append(queue.popleft())
                lanes_left.add(lane)
                continue
            if entries:
                if count + wanted > most:
                    break
                if size_bytes + batch.bytes > CALL_BYTES_MAX:
                    break
                if len(entries) >= entry.entries_max or len(entries) >= entries[0].entries_max:
                    break
                if batch.has_baskets and any(other.batch.has_baskets for other in entries):
                    break
                if len(offers) >= OFFERS_IN_CALL_MAX and not offers.issuperset(batch.offers):
                    break
            if lane.in_flight or (lane.decided and history and lane.history != history):
                break
            if not entries:
                # An entry whose envelopes are drawn here is sent in a separate call.
                most = 0 if batch.draws else self._most_at_once(batch.script, most)
            offers.update(batch.offers)
            if lane.decided:
                history = lane.history
            entries.append(queue.popleft())
            count += wanted
            size_bytes += batch.bytes
        queue.extendleft(reversed(left))
        shard.queued -= count
        journaled_seq = 0
        for entry in entries:
            lane = entry.lane
            lane.in_flight = True
            if lane.journaled_seq > journaled_seq:
                journaled_seq = lane.journaled_seq
        return entries, offers, history, journaled_seq

    async def _send(
        self, shard: ShardQueue, entries: list[QueueEntry], offers: set[str], history: int, journaled_seq: int
    ) -> None:
        """Sends one call and handles its result; entries to be sent again go to the head of the queue, in
        order.
        """
        batch = joined([entry.batch for entry in entries], offers)
        again: list[QueueEntry] = []
        pause = True
        not_decided = self.measures.not_decided
        built = None
        try:
            if entries is shard.drawing:
                built = await self._drawn(shard, entries)
            began = time.monotonic()
            reply = await self._calls.call(shard.keys, batch, history, journaled_seq, built)
            seconds = time.monotonic() - began
            shard.is_fast = seconds < FAST_SECONDS
            again, pause = self._answer(shard, entries, batch, reply, seconds), False
            if shard.refuses:
                log.warning("shard %d decides again", shard.keys.shard)
                shard.refuses = ""
        except CallRefused as error:
            not_decided["refused"] += 1
            again = self._on_refused(shard, entries, error)
        except NotWanted:
            pause = False
        except AnotherHistory as error:
            not_decided["history"] += 1
            for entry in entries:
                entry.lane.stale |= entry.lane.history != error.history
            again, pause = entries, False
        except Undecidable as error:
            not_decided["undecidable"] += 1
            again, pause = self._on_undecidable(entries, error), False
        except BrokenOff as error:
            not_decided["broken_off"] += 1
            again = self._on_broken_off(entries, error)
        except BaseException as error:
            if is_trouble(error):
                not_decided["trouble"] += 1
                again = self._on_trouble(shard, entries, error)
            else:
                for entry in entries:
                    entry.fail(error if isinstance(error, Exception) else asyncio.CancelledError())
                if not isinstance(error, Exception):
                    raise
        finally:
            shard.in_flight = [other for other in shard.in_flight if other is not entries]
            again = [entry for entry in again if not entry.is_done]
            for entry in entries:
                # One lane may have several entries.
                lane = entry.lane
                lane.in_flight = False
                if lane.stale:
                    again = lane.take_decided() + again
            self._requeue(shard, again)
            if again and pause:
                self._pause(shard)
            self._wake(shard)

    async def _drawn(self, shard: ShardQueue, entries: list[QueueEntry]) -> ScriptCall:
        """Draws the parts of an entry that waits for a separate call. Raises NotWanted when its caller has an
        answer, or has gone, and Undecidable.
        """
        [entry] = entries
        try:
            async with turn():
                return await self._calls.draw(shard.keys, entry.batch.commands, lambda: not entry.is_done)
        finally:
            shard.drawing = []
            shard.in_flight.append(entries)

    def _answer(
        self,
        shard: ShardQueue,
        entries: list[QueueEntry],
        batch: Batch,
        reply: encoding.ScriptReply,
        seconds: float,
    ) -> list[QueueEntry]:
        """Answers the commands that a call of `seconds` decided; returns entries of the commands that did not
        fit, in order.
        """
        number, history = shard.keys.shard, reply.history_or_retry_at
        script, commands = batch.script, batch.commands
        answers = encoding.granted_answers(number, commands, reply.run) if reply.run else []
        rows: Any = reply.rows_or_message
        counts = self.measures.answers[script]
        counts[Outcome.granted] += len(answers)
        if script == "confirm" and encoding.are_confirmed(rows):
            answers = encoding.confirmed_answers(number, commands, rows)
            counts[Outcome.confirmed] += len(answers)
        else:
            counts.update(map(_code_of, rows))
            answers += self._answers_of(number, commands[len(answers) :], rows)
            if script == "grab" and not isinstance(batch, PlainBatch):
                answers = encoding.with_metadata(commands, answers)
        if (traced := traces()) is not None:
            traced.answered("decide", answers, seconds, function=script, commands=len(commands))
        index = 0
        rest: list[QueueEntry] = []
        for entry in entries:
            wanted, decided = len(entry.batch.commands), len(answers) - index
            if decided > wanted:
                decided = wanted
            if decided == 0 or (decided < wanted and entry.is_done):
                index += decided
                rest.append(entry)
                continue
            if decided < wanted:
                entry, undecided = entry.split(decided)
                rest.append(undecided)
            entry.answer(answers[index : index + decided], history)
            index += decided
        return rest

    def _answers_of(
        self, shard: int, commands: Sequence[AnyCommand], rows: Sequence[encoding.AnswerRow]
    ) -> list[Answer]:
        """The answers to the first of these commands, of which there are such rows."""
        try:
            return list(map(encoding.answer_of, repeat(shard), commands, rows, repeat(self._sealer)))
        except Exception:
            # One of them causes the error: the others get their answers.
            return list(map(self._answer_of, repeat(shard), commands, rows))

    def _answer_of(self, shard: int, command: AnyCommand, row: encoding.AnswerRow) -> Answer:
        try:
            return encoding.answer_of(shard, command, row, self._sealer)
        except Exception as error:
            # The command is decided all the same; the answer has what can be read.
            log.exception(
                "shard %d: the row of command %s cannot be read completely: %r", shard, command.id, row
            )
            return _partial_answer(shard, command, row, error)

    def _on_refused(
        self, shard: ShardQueue, entries: list[QueueEntry], error: "CallRefused"
    ) -> list[QueueEntry]:
        """The whole call was refused: entries with patience are sent again, the others refused. If the shard
        is fenced, this applies to all queued entries.
        """
        now = time.monotonic()
        if error.message != shard.refuses and any(entry.patience_seconds == math.inf for entry in entries):
            # These callers get no answer that says so.
            log.warning("shard %d decides nothing, commands wait: %s", shard.keys.shard, error.message)
            shard.refuses = error.message
        for entry in (*entries, *(shard.queue if error.outcome == Outcome.fenced else ())):
            if not entry.is_done and not entry.is_patient(now):
                entry.refuse(error.outcome, error.message, error.retry_at)
        return entries

    def _on_undecidable(self, entries: list[QueueEntry], error: "Undecidable") -> list[QueueEntry]:
        """Nothing was decided because a command causes an error: halves are sent until that command is alone;
        it is answered `invalid`.
        """
        if len(entries) > 1:
            for entry in entries:
                entry.entries_max = len(entries) // 2
            return entries
        [entry] = entries
        if entry.is_done:
            return []
        if halves := entry.halves():
            return list(halves)
        reason = f"this command cannot be decided: {error}"
        log.error(
            "command %s of offer %s cannot be decided: %s",
            entry.batch.commands[0].id,
            entry.batch.commands[0].offer,
            error,
        )
        if entry.unsure:
            entry.fail(OutcomeUnknown(reason))
        else:
            entry.fault = str(error)
            entry.answer(entry.batch.refused(Outcome.invalid, reason))
        return []

    def _on_broken_off(self, entries: list[QueueEntry], error: "BrokenOff") -> list[QueueEntry]:
        """A script failed after its first write, and its shard will be rebuilt from the journal: then the
        entries are sent again, fewer per call.
        """
        log.critical("a script failed after its first write: %s", error)
        again: list[QueueEntry] = []
        for entry in entries:
            entry.unsure = True
            entry.entries_max = max(1, len(entries) // 2)
        if len(entries) > 1:
            return entries
        [entry] = entries
        entry.breaks += 1
        if not entry.is_done and (halves := entry.halves()):
            again = list(halves)
        elif entry.breaks < BREAKS_MAX:
            again = entries
        else:
            entry.fault = f"it is unknown whether this command is decided: {error}"
            entry.fail(OutcomeUnknown(f"each call with this command fails after its first write: {error}"))
        return again

    def _on_trouble(
        self, shard: ShardQueue, entries: list[QueueEntry], error: BaseException
    ) -> list[QueueEntry]:
        """The call was sent and may be decided. Only the same commands can show it, so they are sent again
        until their timeout.
        """
        now = time.monotonic()
        for entry in entries:
            entry.unsure = True
            if entry.deadline <= now:
                entry.refuse(Outcome.busy, f"Redis does not answer: {error}", 0)
        self._refuse_late(shard, now)
        return entries

    def _watch(self, shard: ShardQueue) -> None:
        """Enforces the timeouts of callers while a call is in flight, independently of the Redis client's
        timeouts.
        """
        now = time.monotonic()
        for entries in shard.in_flight:
            for entry in entries:
                if entry.deadline <= now:
                    entry.unsure = True
                    entry.refuse(Outcome.busy, "Redis did not answer within the timeout", 0)
        for entry in shard.drawing:
            if entry.deadline <= now:
                entry.refuse(
                    Outcome.busy,
                    "the parts were not drawn within the timeout; large envelopes are drawn one by one",
                    self._calls.now() + BUSY_RETRY_MS,
                )
        self._refuse_late(shard, now)
        shard.watch = None
        if shard.in_flight or shard.queue or shard.drawing:
            shard.watch = asyncio.get_running_loop().call_later(WATCH_EVERY_SECONDS, self._watch, shard)

    def _refuse_late(self, shard: ShardQueue, now: float) -> None:
        """Ends queued entries whose time is over: commands never sent are `busy`, others unknown."""
        late = [entry for entry in shard.queue if entry.deadline <= now]
        if not late:
            return
        shard.queue = deque(entry for entry in shard.queue if entry.deadline > now)
        shard.queued -= sum(len(entry.batch.commands) for entry in late)
        for entry in late:
            entry.refuse(
                Outcome.busy,
                "the command waited for others of its shard until its timeout",
                self._calls.now() + BUSY_RETRY_MS,
            )

    def _requeue(self, shard: ShardQueue, entries: list[QueueEntry]) -> None:
        """Puts entries at the head of the queue, in order."""
        shard.queue.extendleft(reversed(entries))
        shard.queued += sum(len(entry.batch.commands) for entry in entries)

    def _pause(self, shard: ShardQueue) -> None:
        if not shard.is_paused:
            shard.is_paused = True
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._end_pause, shard)

    def _end_pause(self, shard: ShardQueue) -> None:
        shard.is_paused = False
        self._pump(shard)


def _second_call_min(shard: ShardQueue) -> int:
    """The minimum number of commands in a second concurrent call."""
    return SECOND_CALL_FAST_COMMANDS_MIN if shard.is_fast else SECOND_CALL_COMMANDS_MIN


def _partial_answer(shard: int, command: AnyCommand, row: encoding.AnswerRow, error: Exception) -> Answer:
    """Returns the answer to a decided command whose row cannot be read completely: only outcome and event."""
    message = f"decided, but the rest of the answer cannot be read: {type(error).__name__}: {error}"
    return Answer(
        command.id, OUTCOME_NAMES[row.code], row.code, command.offer, user_of(command),
        shard=shard, seq=row.seq or None, at=row.at, message=message,
    )  # fmt: skip


def _refused(command: AnyCommand, from_system: bool, limits: GateLimits) -> Answer | None:
    """The answer `invalid` to a command that must not reach a script; None for others."""
    try:
        check(command, from_system)
        if not limits.issuer_seeds and secret_of(command) == "terms.seed":
            raise Invalid(SEED_REFUSED)
        if limits.beacon_required and isinstance(command, Open) and _lacks_beacon(command.terms):
            raise Invalid(BEACON_REQUIRED)
        if limits.seals_metadata:
            personal.must_be_sealed(command)
        limits.authority.check(command, from_system)
    except Exception as error:
        # Any error: no other command of the list may be affected.
        if not isinstance(error, Invalid | TypeError):
            log.exception("a command of type %s cannot be checked", type(command).__name__)
        return refusal(
            command.id,
            Outcome.invalid,
            command.offer,
            str(error) or type(error).__name__,
            user=user_of(command),
        )
    return None


def _busy(command: AnyCommand, message: str) -> Answer:
    """The answer to a command that cannot be decided now, and was not sent."""
    return refusal(
        command.id, Outcome.busy, command.offer, message, user=user_of(command),
        retry_at=now_ms() + BUSY_RETRY_MS,
    )  # fmt: skip


def _lacks_beacon(terms: Terms) -> bool:
    return isinstance(terms, EnvelopeTerms) and terms.beacon is None


def _check_baskets(commands: Sequence[AnyCommand], answers: list[Answer | None]) -> None:
    """Answers `invalid` to all grabs of a basket that cannot be decided together."""
    refused = {index for index, answer in enumerate(answers) if answer is not None}
    for index, reason in torn_baskets(commands, refused).items():
        command = commands[index]
        answers[index] = answers[index] or refusal(
            command.id, Outcome.invalid, command.offer, reason, user=user_of(command)
        )
