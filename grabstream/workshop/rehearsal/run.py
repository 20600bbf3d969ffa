"""The run of a rehearsal: the crowd grabs through the topic, the gate, and over HTTP, and every answer is
kept.

The crowd comes in two phases. In the steady one, users arrive in their time, at half of what the machine
serves, which a short calibration has found: some callers of which each sends the next attempt when the last
one is answered. Then all others come at once, the rush: what is measured then is a queue.

Nothing depends on how fast the machine is. The crowd starts when the workers answer, deadlines count from
then, and waiting ends with an error only after long without progress (`Patience`).
"""

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.partitioner import DefaultPartitioner
from psycopg import AsyncConnection

from grabstream.connections.opening import key_space, open_redis
from grabstream.gate.calls import now_ms
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer, decode_answer
from grabstream.models.commands import Close, Grab, Open, encode_command
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.projections.database.migrate import PROJECTIONS, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.runtime.ending import first_to_end, running
from grabstream.settings import Settings
from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.crowd import Envelope, person_of
from grabstream.workshop.rehearsal.over_http.door import HttpDoor
from grabstream.workshop.rehearsal.phases import CALIBRATION, RUSH, STEADY, Phase
from grabstream.workshop.rehearsal.stage import PATIENCE_MS, CannotGoOn, Patience, decide_all

#: The callers of the calibration, all doors together, and how long it takes at most.
CALIBRATION_CALLERS = 200
CALIBRATION_SECONDS = 3.0
#: How long users arrive steadily, at most, and at which part of what the calibration has found.
STEADY_SECONDS = 6.0
STEADY_LOAD = 0.5
#: Maximum shares of the attempts for the calibration and for the steady phase; the others rush.
CALIBRATION_SHARE = 0.1
STEADY_SHARE = 0.25
GATE_CALLERS = 200
HTTP_CALLERS = 20
#: Of the grabs, if there is a gateway: it takes one a request, where topic and gate take lists.
HTTP_SHARE = 0.04
GATE_LIST_MAX = 100
TOPIC_CHUNK = 2_000
BATCH_BYTES_MAX = 256 * 1024
DOORS = ("topic", "gate", "http")
#: Ids of the grabs that test whether the workers are ready start with this.
READY = "ready"
LOOK_EVERY_SECONDS = 0.25
#: How many commands in the topic may be unanswered.
UNANSWERED_MAX = 20_000


#: A door, and what is sent through it.
Attempt = tuple[str, Grab]


class Doors(msgspec.Struct):
    """What was sent and answered through each door, with outcomes, the numbers of each phase, and all answers
    `granted`.
    """

    total: int = 0
    sent: Counter[str] = msgspec.field(default_factory=Counter)
    answered: Counter[str] = msgspec.field(default_factory=Counter)
    #: id → how many answers on the topic are missing; an answer that a rebalance repeats is not counted again
    awaited: Counter[str] = msgspec.field(default_factory=Counter)
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    phases: list[Phase] = msgspec.field(default_factory=list)
    #: offer → grab → amount that was answered
    granted: dict[str, dict[str, int]] = msgspec.field(default_factory=lambda: defaultdict(dict))
    #: offer → first attempts of the users who were answered `over`
    late: dict[str, set[str]] = msgspec.field(default_factory=lambda: defaultdict(set))
    contradictions: list[str] = msgspec.field(default_factory=list)

    @property
    def phase(self) -> Phase:
        """The phase that runs, or the last one."""
        return self.phases[-1]

    def begin(self, name: str, offered_per_second: float = 0.0) -> None:
        """Begins a phase."""
        self.phases.append(Phase(name, offered_per_second=offered_per_second))

    def end(self) -> None:
        """Ends the phase."""
        self.phase.ended = time.monotonic()
        self.phase.load = os.getloadavg()[0]

    def take(self, door: str, answer: Answer, answered_at: float | None = None) -> None:
        """Counts an answer and keeps a grant. A second answer must equal the first. `answered_at` is when it
        was given, on the monotonic clock; None: now.
        """
        is_awaited = door != "topic" or self.awaited[answer.id] > 0
        if is_awaited:
            if door == "topic":
                self.awaited[answer.id] -= 1
            self.answered[door] += 1
            self.outcomes[answer.outcome] += 1
            self.phase.count(time.monotonic() if answered_at is None else answered_at)
        if answer.outcome == "granted" and answer.offer and answer.grab and answer.amount is not None:
            before = self.granted[answer.offer].setdefault(answer.grab, answer.amount)
            if before != answer.amount:
                self.contradictions.append(f"{answer.grab}: {before} and then {answer.amount}")
        elif answer.outcome == "over" and answer.offer:
            self.late[answer.offer].add(person_of(answer.id))


class Rehearsal:
    """A rehearsal against a running system; `doors` has its current numbers. With `http`, a part of the crowd
    comes to the gateway.
    """

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        chosen: Sequence[Envelope],
        grabs: Sequence[Grab],
        seed: int,
        http: HttpDoor | None = None,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._chosen = chosen
        self._topics = Topics(settings.prefix)
        self.doors = Doors(total=len(grabs))
        split = random.Random(seed)
        self._http = http
        share_of_http = HTTP_SHARE if http is not None else 0.0
        weights = ((1 - share_of_http) / 2, (1 - share_of_http) / 2, share_of_http)
        self._attempts = list(zip(split.choices(DOORS, weights, k=len(grabs)), grabs, strict=True))
        self._arrivals = random.Random(seed)
        #: id → when its command was sent to the topic, or was due
        self._sent_at: dict[str, float] = {}
        self._partitions: dict[str, int] = {}
        #: id → its answer on the topic has come
        self._told: dict[str, asyncio.Future[None]] = {}
        self._room = asyncio.Condition()
        self.envelopes = len(chosen)
        self.partitions_ready = 0
        #: When the crowd started, on the monotonic clock; 0 before.
        self.began = 0.0
        #: When the last envelope with a deadline closes; 0 before these envelopes are open.
        self.deadline_at_ms = 0

    async def until_ready(self) -> None:
        """Returns when the workers answer in every partition of the topic; raises CannotGoOn when no further
        partition answers for long.
        """
        partitions = set(range(self._settings.shards))
        producer = AIOKafkaProducer(**brokers.at(self._settings.brokers), acks="all", enable_idempotence=True)
        async with started(self._listener()) as consumer, started(producer):
            patience, tries = Patience(), 0
            while partitions:
                # The offer does not exist. An answer that says so was decided by Redis, so the shard decides.
                asked = {f"{READY}-{tries}-{partition}": partition for partition in partitions}
                for id_, partition in asked.items():
                    grab = Grab(id=id_, offer=f"{READY}-{partition}", user=READY)
                    await producer.send(self._topics.commands, encode_command(grab), partition=partition)
                await producer.flush()
                while asked:
                    for records in (await consumer.getmany(timeout_ms=200)).values():
                        for record in records:
                            answer = decode_answer(record.value)
                            partition = asked.pop(answer.id, -1)
                            if answer.decided and partition >= 0:
                                partitions.discard(partition)
                                self.partitions_ready += 1
                    waiting = f"no answer from partitions {sorted(partitions)} of {self._topics.commands}"
                    patience.observe(self.partitions_ready, waiting)
                tries += 1

    async def open(self) -> None:
        """Opens the envelopes without a deadline; raises CannotGoOn when one is refused."""
        _require_opened(
            await self._refused([envelope.open for envelope in self._chosen if envelope.deadline_ms is None])
        )

    async def open_until_deadline(self) -> None:
        """Opens the envelopes with a deadline, which counts from now. Where opening took longer than the
        deadline, opens them again with twice the time.
        """
        unopened = [envelope for envelope in self._chosen if envelope.deadline_ms is not None]
        factor = 1
        while unopened:
            began = now_ms()
            closing = {envelope.offer: began + factor * (envelope.deadline_ms or 0) for envelope in unopened}
            opens = []
            for envelope in unopened:
                terms = msgspec.structs.replace(envelope.terms, closes_at=closing[envelope.offer])
                opens.append(Open(id=f"{envelope.open.id}-{factor}", offer=envelope.offer, terms=terms))
            refused = await self._refused(opens)
            if now_ms() < min(closing.values()):
                _require_opened(refused)
            again = {answer.offer for answer in refused}
            self.deadline_at_ms = max(
                [self.deadline_at_ms, *(closing[offer] for offer in closing.keys() - again)]
            )
            unopened = [envelope for envelope in unopened if envelope.offer in again]
            factor *= 2

    async def _refused(self, opens: Sequence[Open]) -> list[Answer]:
        return [answer for answer in await decide_all(self._gate, opens) if answer.outcome != "opened"]

    async def crowd(self) -> float:
        """Sends all attempts through their doors, and returns the seconds until all were answered."""
        producer = AIOKafkaProducer(
            **brokers.at(self._settings.brokers),
            linger_ms=2,
            acks="all",
            enable_idempotence=True,
            max_batch_size=BATCH_BYTES_MAX,
        )
        async with started(self._listener()) as consumer, started(producer):
            self.began = time.monotonic()
            async with running(self._phases(producer), self._listen(consumer)) as tasks:
                with first_reason():
                    await first_to_end(tasks)
            return time.monotonic() - self.began

    async def _phases(self, producer: AIOKafkaProducer) -> None:
        early, rush = self._split()
        served_per_second = await self._calibrate(early, producer)
        if served_per_second > 0:
            await self._steady(early, served_per_second * STEADY_LOAD, producer)
        await self.open_until_deadline()
        await self._rush([*early, *rush], producer)

    def _split(self) -> tuple[deque[Attempt], list[Attempt]]:
        """The attempts that may come before the rush, and the others: the envelopes with a deadline are not
        open before.
        """
        until_deadline = {one.offer for one in self._chosen if one.deadline_ms is not None}
        early_max = int(len(self._attempts) * (CALIBRATION_SHARE + STEADY_SHARE))
        early: deque[Attempt] = deque()
        rush: list[Attempt] = []
        for attempt in self._attempts:
            is_early = len(early) < early_max and attempt[1].offer not in until_deadline
            (early if is_early else rush).append(attempt)
        return early, rush

    async def _calibrate(self, early: deque[Attempt], producer: AIOKafkaProducer) -> float:
        """Lets callers send, each the next attempt when its last one is answered; returns how many attempts
        a second the machine serves, which includes that they are in the books.
        """
        self.doors.begin(CALIBRATION)
        until = time.monotonic() + CALIBRATION_SECONDS
        left = int(len(self._attempts) * CALIBRATION_SHARE)

        async def caller() -> None:
            nonlocal left
            while early and left > 0 and time.monotonic() < until:
                left -= 1
                door, grab = early.popleft()
                await self._attempt(door, grab, time.monotonic(), producer)

        await asyncio.gather(*(caller() for _ in range(CALIBRATION_CALLERS)))
        await self._until_answered()
        self.doors.end()
        await self._until_booked()
        return self.doors.phase.answers.total() / (time.monotonic() - self.doors.phase.began)

    async def _until_booked(self) -> None:
        redis = open_redis(self._settings)
        try:
            async with await open_books(self._settings) as books:
                await until_in_books(redis, key_space(self._settings), books, lambda: None)
        finally:
            await redis.aclose()

    async def _steady(self, early: deque[Attempt], per_second: float, producer: AIOKafkaProducer) -> None:
        """Lets users come one by one, whether those before them are answered or not. A latency counts from
        the moment at which the user was due.
        """
        self.doors.begin(STEADY, per_second)
        due = self.doors.phase.began
        until = due + STEADY_SECONDS
        left = int(len(self._attempts) * STEADY_SHARE)
        async with asyncio.TaskGroup() as arrivals:
            while early and left > 0:
                left -= 1
                due += self._arrivals.expovariate(per_second)
                if due > until:
                    break
                await asyncio.sleep(due - time.monotonic())
                door, grab = early.popleft()
                arrivals.create_task(self._attempt(door, grab, due, producer))
        await self._until_answered()
        self.doors.end()

    async def _rush(self, attempts: Sequence[Attempt], producer: AIOKafkaProducer) -> None:
        """Lets all come at once."""
        by_door: dict[str, list[Grab]] = {door: [] for door in DOORS}
        for door, grab in attempts:
            by_door[door].append(grab)
        self.doors.begin(RUSH)
        await asyncio.gather(
            self._at_the_gate(by_door["gate"]),
            self._at_the_topic(by_door["topic"], producer),
            self._over_http(by_door["http"]),
        )
        await self._until_answered()
        self.doors.end()

    async def _until_answered(self) -> None:
        """Returns when the topic has all answers."""
        async with self._room:
            await self._room.wait_for(lambda: self.doors.answered["topic"] >= self.doors.sent["topic"])

    async def _attempt(self, door: str, grab: Grab, due: float, producer: AIOKafkaProducer) -> None:
        """Sends one attempt, and returns when it is answered."""
        if door == "gate":
            await self._ask([grab], due)
        elif door == "http":
            await self._post(grab, due)
        else:
            told = self._told.setdefault(grab.id, asyncio.get_running_loop().create_future())
            self._sent_at.setdefault(grab.id, due)
            self.doors.sent["topic"] += 1
            self.doors.awaited[grab.id] += 1
            await producer.send(self._topics.commands, encode_command(grab), key=grab.offer.encode())
            await told

    async def close_leftovers(self) -> None:
        """Closes the envelopes without a deadline that have parts left."""
        for envelope in self._chosen:
            if envelope.deadline_ms is None and envelope.people < envelope.terms.parts:
                await decide_all(self._gate, [Close(id=f"close-{envelope.offer}", offer=envelope.offer)])

    # -- the doors -------------------------------------------------------------------------------------------

    def _listener(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            self._topics.results,
            **brokers.at(self._settings.brokers),
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )

    async def _at_the_gate(self, grabs: Sequence[Grab]) -> None:
        sizes = random.Random(len(grabs))
        waiting = iter(grabs)

        async def caller() -> None:
            while chunk := list(itertools.islice(waiting, sizes.randint(1, GATE_LIST_MAX))):
                await self._ask(chunk, time.monotonic())

        await asyncio.gather(*(caller() for _ in range(GATE_CALLERS)))

    async def _ask(self, chunk: list[Grab], due: float) -> None:
        """Sends grabs through the gate until all are decided: those with an unknown outcome, `busy` or
        `fenced` again with the same ids.
        """
        self.doors.sent["gate"] += len(chunk)
        while chunk:
            try:
                answers = await self._gate.decide(chunk, patience_ms=PATIENCE_MS)
            except OutcomeUnknown:
                continue
            again = []
            for grab, answer in zip(chunk, answers, strict=True):
                if answer.decided:
                    self.doors.take("gate", answer)
                else:
                    again.append(grab)
            chunk = again
        self.doors.phase.latencies["gate"].append(time.monotonic() - due)

    async def _over_http(self, grabs: Sequence[Grab]) -> None:
        waiting = iter(grabs)

        async def caller() -> None:
            for grab in waiting:
                await self._post(grab, time.monotonic())

        await asyncio.gather(*(caller() for _ in range(HTTP_CALLERS)))

    async def _post(self, grab: Grab, due: float) -> None:
        assert self._http is not None
        self.doors.sent["http"] += 1
        self.doors.take("http", await self._http.grab(grab))
        self.doors.phase.latencies["http"].append(time.monotonic() - due)

    async def _at_the_topic(self, grabs: Sequence[Grab], producer: AIOKafkaProducer) -> None:
        for start in range(0, len(grabs), TOPIC_CHUNK):
            async with self._room:
                await self._room.wait_for(
                    lambda: self.doors.sent["topic"] - self.doors.answered["topic"] < UNANSWERED_MAX
                )
            chunk = grabs[start : start + TOPIC_CHUNK]
            now = time.monotonic()
            for grab in chunk[::20]:
                self._sent_at.setdefault(grab.id, now)
            self.doors.sent["topic"] += len(chunk)
            self.doors.awaited.update(grab.id for grab in chunk)
            await self._send_batches(chunk, producer)
        await producer.flush()

    async def _send_batches(self, grabs: Sequence[Grab], producer: AIOKafkaProducer) -> None:
        """Sends grabs in batches of records. They take a fraction of the time of single sends, and the crowd
        has the cores together with the system that it tests.
        """
        by_partition: dict[int, list[Grab]] = defaultdict(list)
        for grab in grabs:
            by_partition[self._partition(grab.offer)].append(grab)
        for partition, partition_grabs in by_partition.items():
            batch = producer.create_batch()
            for grab in partition_grabs:
                record = {"key": grab.offer.encode(), "value": encode_command(grab), "timestamp": None}
                if batch.append(**record) is None:
                    await producer.send_batch(batch, self._topics.commands, partition=partition)
                    batch = producer.create_batch()
                    batch.append(**record)
            await producer.send_batch(batch, self._topics.commands, partition=partition)

    def _partition(self, offer: str) -> int:
        """The partition of commands of an offer, as a producer finds it by the key."""
        if offer not in self._partitions:
            everyone = list(range(self._settings.shards))
            self._partitions[offer] = DefaultPartitioner()(offer.encode(), everyone, everyone)
        return self._partitions[offer]

    async def _listen(self, consumer: AIOKafkaConsumer) -> None:
        while True:
            fetched = await consumer.getmany(timeout_ms=200, max_records=5_000)
            now = time.monotonic()
            # Since this process reads answers late while it sends, they count when their worker sent them.
            clock_seconds = time.time() - now
            for records in fetched.values():
                for record in records:
                    answer = decode_answer(record.value)
                    if answer.id.startswith(f"{READY}-"):
                        continue
                    self.doors.take("topic", answer, record.timestamp / 1_000 - clock_seconds)
                    began = self._sent_at.pop(answer.id, None)
                    if began is not None:
                        self.doors.phase.latencies["topic"].append(now - began)
                    if (told := self._told.pop(answer.id, None)) is not None:
                        told.set_result(None)
            async with self._room:
                self._room.notify_all()


@contextlib.contextmanager
def first_reason() -> Iterator[None]:
    """Raises the first error of a group alone: one reason is enough, and the command line handles only single
    errors.
    """
    try:
        yield
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from group


def _require_opened(refused: Sequence[Answer]) -> None:
    for answer in refused:
        raise CannotGoOn(f"{answer.offer} was not opened: {answer.outcome} {answer.message or ''}")


class RehearsalProgress(msgspec.Struct):
    """How many events each stage has, in all shards together. `complete`: every stage of every shard has the
    same events.
    """

    decided: int = 0
    journaled: int = 0
    read_models: dict[str, int] = msgspec.field(default_factory=dict)
    complete: bool = False


async def read_progress(redis: Any, keys: KeySpace, connection: AsyncConnection[Any]) -> RehearsalProgress:
    """Reads from Redis and PostgreSQL how many events each stage has.

    It is complete when every shard decides and all its stages are at the same event. A Redis that has lost
    its data has fewer events than the journal and the read models, or none, so this is not complete.
    """
    shards = range(keys.shards)
    async with redis.pipeline(transaction=False) as pipe:
        for shard in shards:
            pipe.hmget(keys.shard(shard).state, ["seq", "journaled_seq", "server_epoch"])
        states = await pipe.execute()
    rows = await (await connection.execute("SELECT projection, shard, seq FROM cursors")).fetchall()
    cursors = {(projection, shard): seq for projection, shard, seq in rows}
    decided, journaled = ([int(state[index] or 0) for state in states] for index in (0, 1))
    return RehearsalProgress(
        sum(decided),
        sum(journaled),
        {name: sum(cursors.get((name, shard), 0) for shard in shards) for name in PROJECTIONS},
        all(server_epoch for *_, server_epoch in states)
        and decided == journaled
        and all(cursors.get((name, shard), 0) == decided[shard] for name in PROJECTIONS for shard in shards),
    )


async def closed(connection: AsyncConnection[Any]) -> int:
    """How many offers are closed in the read models."""
    [count] = await (
        await connection.execute("SELECT count(*) FROM offers WHERE state = 'closed'")
    ).fetchone() or (0,)
    return int(count)


async def until_in_books(
    redis: Any, keys: KeySpace, connection: AsyncConnection[Any], check: Callable[[], None]
) -> None:
    """Returns when journal and read models have every decided event; raises what `check` raises, and
    CannotGoOn when there is no progress.
    """
    patience = Patience()
    while not (progress := await read_progress(redis, keys, connection)).complete:
        check()
        patience.observe(
            progress,
            f"{progress.decided} events decided, {progress.journaled} journaled, read models at "
            f"{progress.read_models}",
        )
        await asyncio.sleep(LOOK_EVERY_SECONDS)


async def open_books(settings: Settings) -> AsyncConnection[Any]:
    """A connection to the views of this system."""
    connection = await connect(settings.postgres, settings.schema_)
    await use_schema(connection, settings.schema_)
    return connection
