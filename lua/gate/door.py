"""The gate: commands in, answers out. It gathers what arrives together for a shard and decides it in one
script call.

A lone caller does not wait for company: the next batch is whatever arrived while the last one was in flight.
When a good half of a batch waits already, it goes out after the one in flight, unless they hold commands of
the same caller, whose order counts.

The order of a caller holds through retries and recoveries. What was decided and is not known to be journaled
stays in the caller's `Lane`, and every later call of the lane names the history it was decided under: in
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
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Final, Literal

from grabstream.lua.ending import end
from grabstream.lua.gate import batches
from grabstream.lua.gate.calls import (
    BUSY_RETRY_MS,
    AnotherHistory,
    BrokenOff,
    CallRefused,
    Calls,
    GateLimits,
    Undecidable,
)
from grabstream.lua.gate.decided import DecidedAnswers, ReportLost
from grabstream.lua.gate.journaled import HistoryChanged, Journaled
from grabstream.lua.gate.queue import (
    OFFERS_IN_CALL_MAX,
    Order,
    OutcomeUnknown,
    QueueEntry,
    ShardQueue,
    all_decided,
    few_offers,
    whole_baskets,
)
from grabstream.lua.gate.refusals import RefusalLog
from grabstream.lua.gate.sealing import Sealer
from grabstream.lua.gate.sizes import CALL_BYTES_MAX, fitting
from grabstream.lua.gate.tickets import TicketKeys
from grabstream.lua.keys import KeySpace
from grabstream.lua.trouble import is_trouble
from grabstream.models.answers import Answer, refusal
from grabstream.models.commands import AnyCommand, Grab, basket_of, check, torn_baskets
from grabstream.models.identifiers import RESERVED_IDS, are_ids
from grabstream.models.money import Invalid
from grabstream.models.outcomes import OUTCOME_NAMES, Outcome

log = logging.getLogger(__name__)

Promise = Literal["journaled", "decided"]
IN_FLIGHT_MAX: Final = 2
RETRY_SECONDS: Final = 0.05
WATCH_EVERY_SECONDS: Final = 0.1
#: Commands of these scripts in one call, fewer than of others: each carries much.
AT_ONCE_MAX: Final = {"open": 16, "load": 8}
SHARDS_KNOWN_MAX: Final = 100_000

#: A command that broke the shard so many times, alone in its call, is given up.
BREAKS_MAX: Final = 3


#: Told of a command that no script can decide: its place in the call, and why.
ReportUndecidable = Callable[[int, str], None]


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
        self._sealer = sealer
        self._limits = limits or GateLimits()
        secrets = batches.Secrets(sealer, tickets or TicketKeys({}))
        self._calls = Calls(redis, keys, secrets, self._limits, clock)
        self._shards = [ShardQueue(keys.shard(number)) for number in range(keys.shards)]
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
        report_undecidable: ReportUndecidable = lambda place, reason: None,
    ) -> list[Answer]:
        """Answers in the order of the commands; commands of one campaign are carried out in that order, also
        through a recovery.

        `journaled` waits until Kafka has the events of the answers. `patience_ms` is how long commands that
        meet a fenced or busy shard wait before they are answered so; those that follow them in the same shard
        are answered the same. Raises OutcomeUnknown when `timeout_ms` (the gate's own when absent) ran out
        after they were sent.

        A `reader` of a topic bounds by itself what it has in flight, and what it read has nowhere to go back
        to: its calls are carried out in the order they were made, find room whatever is queued, and wait as
        long as their shard decides nothing; they are never answered `fenced` or `busy`. `report_undecidable`
        is called with the index and the error of each command that no script can decide; the answer to it is
        `invalid`.
        """
        answers: list[Answer | None] = [None] * len(commands)
        sound = self._at_the_door(commands, answers)
        runs = list(self._runs(sound, commands))
        timeout_seconds = ((timeout_ms or self._limits.timeout_ms) + patience_ms) / 1000
        deadline = math.inf if reader else time.monotonic() + timeout_seconds
        order = reader or Order()
        waits: deque[tuple[int, Sequence[int], QueueEntry]] = deque()
        last_of: dict[int, QueueEntry] = {}
        for shard, script, places in runs:
            patience = math.inf if reader else patience_ms / 1000
            entry = QueueEntry(
                order.lane(shard), script, [commands[place] for place in places], deadline, patience
            )
            before = last_of.get(shard)
            if reader is None:
                last_of[shard] = entry
                if before is not None:
                    before.next = entry
            self._submit(shard, entry, bounded=reader is None, behind=before)
            waits.append((shard, places, entry))
        entries = [entry for *_, entry in waits]
        try:
            if promise == "decided":
                await all_decided(entries)
            while waits:
                shard, places, entry = waits.popleft()
                await self._decided_for(shard, entry, promise)
                if entry.parts:
                    first, second = entry.parts
                    middle = len(first.commands)
                    waits.extendleft([(shard, places[middle:], second), (shard, places[:middle], first)])
                    continue
                if entry.fault is not None:
                    for place in places:
                        report_undecidable(place, entry.fault)
                if promise == "decided":
                    self._decided.keep(shard, entry.history, entry.commands, entry.answers)
                else:
                    entry.give()
                if self._refusals is not None:
                    self._refusals.take(entry.commands, entry.answers)
                if len(places) == len(commands):
                    return entry.answers
                for place, answer in zip(places, entry.answers, strict=True):
                    answers[place] = answer
            return answers  # type: ignore[return-value]
        finally:
            for entry in entries:
                entry.give()

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
                    end = few_offers(run_places, commands, start, min(start + size, len(run_places)))
                    end = start + fitting([commands[place] for place in run_places[start:end]])
                    end = whole_baskets(run_places, commands, end)
                    yield shard, kind.__name__.lower(), run_places[start:end]
                    start = end

    def _shard(self, offer: str) -> int:
        shard = self._shard_of.get(offer)
        if shard is None:
            if len(self._shard_of) > SHARDS_KNOWN_MAX:
                self._shard_of.clear()
            shard = self._shard_of[offer] = self._keys.shard_of_offer(offer)
        return shard

    def _submit(self, number: int, entry: QueueEntry, bounded: bool, behind: QueueEntry | None) -> None:
        """Queues an entry; a caller finds no room when too much is queued, or when its entry before found
        none.
        """
        shard = self._shards[number]
        is_full = bounded and shard.queued + len(entry.commands) > self._limits.queue_commands_max
        if is_full or (behind is not None and behind.done.done()):
            entry.refuse(Outcome.busy, "the gate's queue is full", self._calls.now() + BUSY_RETRY_MS)
            return
        shard.queue.append(entry)
        shard.queued += len(entry.commands)
        self._wake(shard)

    async def _decided_for(self, number: int, entry: QueueEntry, promise: Promise) -> None:
        """Returns when the answers of an entry may be given, or when it was cut into parts; raises
        OutcomeUnknown.
        """
        while True:
            await entry.done
            if not entry.done.done():
                continue
            last = entry.last_seq
            if promise == "decided" or last == 0:
                return
            try:
                left = entry.deadline - time.monotonic()
                # Not wait_for: until Python 3.12 it may swallow a cancellation, and with it Ctrl-C.
                async with asyncio.timeout(None if left == math.inf else max(left, 0.001)):
                    await self.journaled.wait(number, entry.history, last)
                return
            except HistoryChanged:
                # What was decided may be gone with its history: all of the lane is asked again, and only the
                # new answers count.
                self._ask_again(self._shards[number], entry)
            except TimeoutError:
                raise OutcomeUnknown(
                    f"decided, but not in the journal in time (shard {number}, seq {last}; is a relay "
                    "running?): "
                    "send the commands again under their ids"
                ) from None

    def _ask_again(self, shard: ShardQueue, entry: QueueEntry) -> None:
        lane = entry.lane
        if entry not in lane.decided:
            return  # another caller of the lane was told first
        if lane.flying:
            lane.stale = True  # what is in flight comes behind these, whatever becomes of it
        else:
            self._put_back(shard, lane.take_back())
            self._wake(shard)

    # -- sender ----------------------------------------------------------------------------------------------

    def _wake(self, shard: ShardQueue) -> None:
        """Sends after everyone who can run now has run: callers who were just answered ask again, and go
        along.
        """
        if not shard.waking:
            shard.waking = True
            asyncio.get_running_loop().call_soon(self._pump, shard)

    def _pump(self, shard: ShardQueue) -> None:
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

    def _may_send(self, shard: ShardQueue) -> bool:
        # Small batches side by side would only cost more calls, each as dear as a batch.
        flying = len(shard.in_flight)
        return flying == 0 or (flying < IN_FLIGHT_MAX and 2 * shard.queued >= self._limits.batch_commands_max)

    def _next_batch(self, shard: ShardQueue) -> tuple[list[QueueEntry], int]:
        """The entries at the head of the queue that one call can carry, and the history it must be decided in
        (0: any).

        They have one type, no lane of theirs is in flight, and what was decided of their lanes was decided in
        one history.
        """
        batch: list[QueueEntry] = []
        offers: set[str] = set()
        count = history = size_bytes = 0
        queue = shard.queue
        while queue:
            entry = queue[0]
            lane = entry.lane
            if entry.done.done():  # refused with one before it, or its caller has gone
                shard.queued -= len(queue.popleft().commands)
                continue
            if batch:
                size = AT_ONCE_MAX.get(entry.script, self._limits.batch_commands_max)
                if entry.script != batch[0].script or count + len(entry.commands) > size:
                    break
                if size_bytes + entry.bytes > CALL_BYTES_MAX:
                    break
                if len(batch) >= entry.company or len(batch) >= batch[0].company:
                    break
                if entry.has_baskets and any(other.has_baskets for other in batch):
                    break
                if len(offers) >= OFFERS_IN_CALL_MAX and not entry.offers <= offers:
                    break
            offers |= entry.offers
            if lane.flying or (lane.decided and history and lane.history != history):
                break
            if lane.decided:
                history = lane.history
            batch.append(queue.popleft())
            count += len(entry.commands)
            size_bytes += entry.bytes
        shard.queued -= count
        for entry in batch:
            entry.lane.flying = True
        return batch, history

    async def _send(self, shard: ShardQueue, batch: list[QueueEntry], history: int) -> None:
        """One call, and what becomes of its entries: those that are to be sent again go to the head of the
        queue, in order.
        """
        commands = batch[0].commands if len(batch) == 1 else [c for entry in batch for c in entry.commands]
        again: list[QueueEntry] = []
        pause = True
        try:
            rows, history = await self._calls.call(shard.keys, batch[0].script, commands, history)
            again, pause = self._answer(shard, batch, rows, history), False
            if shard.refuses:
                log.warning("shard %d decides again", shard.keys.shard)
                shard.refuses = ""
        except CallRefused as error:
            again = self._refused(shard, batch, error)
        except AnotherHistory as error:
            for entry in batch:
                entry.lane.stale |= entry.lane.history != error.history
            again, pause = batch, False
        except Undecidable as error:
            again, pause = self._apart(batch, error), False
        except BrokenOff as error:
            again = self._broken(batch, error)
        except BaseException as error:
            if is_trouble(error):
                again = self._unreachable(shard, batch, error)
            else:
                for entry in batch:
                    entry.fail(error if isinstance(error, Exception) else asyncio.CancelledError())
                if not isinstance(error, Exception):
                    raise
        finally:
            shard.in_flight = [other for other in shard.in_flight if other is not batch]
            again = [entry for entry in again if not entry.done.done()]
            for lane in dict.fromkeys(entry.lane for entry in batch):
                lane.flying = False
                if lane.stale:
                    again = lane.take_back() + again
            self._put_back(shard, again)
            if again and pause:
                self._hold(shard)
            self._wake(shard)

    def _answer(
        self, shard: ShardQueue, batch: list[QueueEntry], rows: list[Any], history: int
    ) -> list[QueueEntry]:
        """Answers what was decided; returns what the call had no room for, in its order."""
        number, sealer = shard.keys.shard, self._sealer
        place = 0
        rest: list[QueueEntry] = []
        for entry in batch:
            decided = min(len(rows) - place, len(entry.commands))
            if decided == 0 or (decided < len(entry.commands) and entry.done.done()):
                place += decided
                rest.append(entry)
                continue
            if decided < len(entry.commands):
                entry, behind = entry.cut(decided)
                rest.append(behind)
            answers = []
            for command in entry.commands:
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
            entry.answer(answers, history)
        return rest

    def _refused(self, shard: ShardQueue, batch: list[QueueEntry], error: "CallRefused") -> list[QueueEntry]:
        """The whole call was refused: who has patience is sent again. A fence concerns whoever is queued as
        well.
        """
        now = time.monotonic()
        if error.message != shard.refuses and any(entry.patience_seconds == math.inf for entry in batch):
            # Nobody is told so by an answer.
            log.warning("shard %d decides nothing, commands wait: %s", shard.keys.shard, error.message)
            shard.refuses = error.message
        for entry in (*batch, *(shard.queue if error.outcome == Outcome.fenced else ())):
            if not entry.done.done() and not entry.is_patient(now):
                entry.refuse(error.outcome, error.message, error.retry_at)
        return batch

    def _apart(self, batch: list[QueueEntry], error: "Undecidable") -> list[QueueEntry]:
        """Nothing was decided because one command raises: halves are sent, until it is alone; it is answered
        `invalid`.
        """
        if len(batch) > 1:
            for entry in batch:
                entry.company = len(batch) // 2
            return batch
        [entry] = batch
        if entry.done.done():
            return []
        if parts := entry.halves():
            return list(parts)
        said = f"no answer can be given to this command, it was set aside: {error}"
        log.error(
            "command %s of offer %s cannot be decided: %s",
            entry.commands[0].id,
            entry.commands[0].offer,
            error,
        )
        if entry.unsure:
            entry.fail(OutcomeUnknown(said))
        else:
            entry.fault = str(error)
            entry.answer([refusal(c.id, Outcome.invalid, c.offer, said) for c in entry.commands])
        return []

    def _broken(self, batch: list[QueueEntry], error: "BrokenOff") -> list[QueueEntry]:
        """A script failed after its first write, and the shard is rebuilt from the journal: then they are
        asked again, fewer at once.
        """
        log.critical("a script failed after its first write: %s", error)
        again: list[QueueEntry] = []
        for entry in batch:
            entry.unsure = True
            entry.company = max(1, len(batch) // 2)
        if len(batch) > 1:
            return batch
        [entry] = batch
        entry.breaks += 1
        if not entry.done.done() and (parts := entry.halves()):
            again = list(parts)
        elif entry.breaks < BREAKS_MAX:
            again = batch
        else:
            entry.fault = f"decided or not, nobody knows: {error}"
            entry.fail(OutcomeUnknown(f"it breaks its shard each time: {error}"))
        return again

    def _unreachable(
        self, shard: ShardQueue, batch: list[QueueEntry], error: BaseException
    ) -> list[QueueEntry]:
        """Sent, perhaps decided: only the same command can find out, so it is sent again until its time is
        over.
        """
        now = time.monotonic()
        for entry in batch:
            entry.unsure = True
            if entry.deadline <= now:
                entry.refuse(Outcome.busy, f"Redis does not answer: {error}", 0)
        self._give_up_late(shard, now)
        return batch

    def _watch(self, shard: ShardQueue) -> None:
        """Keeps the time-outs of callers while something is in flight, whatever time-out the client of Redis
        has.
        """
        now = time.monotonic()
        for batch in shard.in_flight:
            for entry in batch:
                if entry.deadline <= now:
                    entry.unsure = True
                    entry.refuse(Outcome.busy, "Redis did not answer in time", 0)
        self._give_up_late(shard, now)
        shard.watch = None
        if shard.in_flight or shard.queue:
            shard.watch = asyncio.get_running_loop().call_later(WATCH_EVERY_SECONDS, self._watch, shard)

    def _give_up_late(self, shard: ShardQueue, now: float) -> None:
        """Those in the queue whose time is over: what was never sent is `busy`, the rest unknown."""
        late = [entry for entry in shard.queue if entry.deadline <= now]
        if not late:
            return
        shard.queue = deque(entry for entry in shard.queue if entry.deadline > now)
        shard.queued -= sum(len(entry.commands) for entry in late)
        for entry in late:
            entry.refuse(Outcome.busy, "Redis did not take it in time", self._calls.now() + BUSY_RETRY_MS)

    def _put_back(self, shard: ShardQueue, entries: list[QueueEntry]) -> None:
        """To the head of the queue, in order."""
        shard.queue.extendleft(reversed(entries))
        shard.queued += sum(len(entry.commands) for entry in entries)

    def _hold(self, shard: ShardQueue) -> None:
        if not shard.held:
            shard.held = True
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._release, shard)

    def _release(self, shard: ShardQueue) -> None:
        shard.held = False
        self._pump(shard)


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


def _check_baskets(commands: Sequence[AnyCommand], answers: list[Answer | None]) -> None:
    """Answers `invalid` to the grabs of a basket that cannot be decided as one: all of them, or it would be
    torn apart.
    """
    refused = {place for place, answer in enumerate(answers) if answer is not None}
    for place, reason in torn_baskets(commands, refused).items():
        command = commands[place]
        answers[place] = answers[place] or refusal(command.id, Outcome.invalid, command.offer, reason)
