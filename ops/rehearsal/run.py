"""The run of a rehearsal: the crowd grabs through the topic, the gate, and over HTTP, and every answer is
kept.

Nothing depends on how fast the machine is. The crowd starts when the workers answer, deadlines count from
then, and waiting ends with an error only after long without progress (`Patience`).
"""

import asyncio
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from psycopg import AsyncConnection

from grabstream.lua.gate.calls import now_ms
from grabstream.lua.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer, decode_answer
from grabstream.models.commands import AnyCommand, Close, Grab, Open, encode_command
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.ops.rehearsal.crowd import Envelope, person_of
from grabstream.ops.rehearsal.over_http.door import HttpDoor
from grabstream.ops.rehearsal.stage import CannotGoOn, Patience
from grabstream.ops.settings import Settings
from grabstream.projections.database.migrate import PROJECTIONS, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.topics import Topics

GATE_CALLERS = 40
HTTP_CALLERS = 20
#: Of the grabs, if there is a gateway: it takes one a request, where topic and gate take lists.
HTTP_SHARE = 0.04
GATE_LIST_MAX = 32
TOPIC_CHUNK = 500
PATIENCE_MS = 30_000
#: Ids of the grabs that test whether the workers are ready start with this.
READY = "ready"
LOOK_EVERY_SECONDS = 0.25
#: How many commands in the topic may be unanswered.
UNANSWERED_MAX = 20_000


class Doors(msgspec.Struct):
    """What was sent and answered so far through each door, with outcomes, latencies in seconds, and all
    answers `granted`.
    """

    total: int = 0
    sent: Counter[str] = msgspec.field(default_factory=Counter)
    answered: Counter[str] = msgspec.field(default_factory=Counter)
    #: id → how many answers on the topic are missing; an answer that a rebalance repeats is not counted again
    awaited: Counter[str] = msgspec.field(default_factory=Counter)
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    latencies: dict[str, list[float]] = msgspec.field(default_factory=lambda: defaultdict(list))
    #: offer → grab → amount that was answered
    granted: dict[str, dict[str, int]] = msgspec.field(default_factory=lambda: defaultdict(dict))
    #: offer → first attempts of the users who were answered `over`
    late: dict[str, set[str]] = msgspec.field(default_factory=lambda: defaultdict(set))
    contradictions: list[str] = msgspec.field(default_factory=list)

    def take(self, door: str, answer: Answer) -> None:
        """Counts an answer and keeps a grant. A second answer must equal the first."""
        is_awaited = door != "topic" or self.awaited[answer.id] > 0
        if is_awaited:
            if door == "topic":
                self.awaited[answer.id] -= 1
            self.answered[door] += 1
            self.outcomes[answer.outcome] += 1
        if answer.outcome == "granted" and answer.offer and answer.grab and answer.amount is not None:
            before = self.granted[answer.offer].setdefault(answer.grab, answer.amount)
            if before != answer.amount:
                self.contradictions.append(f"{answer.grab}: {before} and then {answer.amount}")
        elif answer.outcome == "over" and answer.offer:
            self.late[answer.offer].add(person_of(answer.id))


class Rehearsal:
    """A rehearsal against a running system; `doors` has its numbers so far. With `http`, a part of the crowd
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
        self._by_door: dict[str, list[Grab]] = {"topic": [], "gate": [], "http": []}
        share_of_http = HTTP_SHARE if http is not None else 0.0
        weights = ((1 - share_of_http) / 2, (1 - share_of_http) / 2, share_of_http)
        for grab in grabs:
            [door] = split.choices(list(self._by_door), weights)
            self._by_door[door].append(grab)
        self._sent_at: dict[str, float] = {}
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
        return [answer for answer in await self._decide(opens) if answer.outcome != "opened"]

    async def _decide(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """Sends commands through the gate until all are decided: after an unknown outcome, `busy` or `fenced`
        it sends them again with the same ids.
        """
        while True:
            try:
                answers = await self._gate.decide(commands, patience_ms=PATIENCE_MS)
            except OutcomeUnknown:
                continue
            if all(answer.decided for answer in answers):
                return answers

    async def crowd(self) -> float:
        """Sends all attempts through their doors, and returns the seconds until all were answered."""
        async with started(self._listener()) as consumer:
            listening = asyncio.create_task(self._listen(consumer))
            await self.open_until_deadline()
            began = self.began = time.monotonic()
            try:
                await asyncio.gather(self._at_the_gate(), self._at_the_topic(), self._over_http())
                async with self._room:
                    await self._room.wait_for(
                        lambda: self.doors.answered["topic"] >= self.doors.sent["topic"] or listening.done()
                    )
                if listening.done():
                    listening.result()
                return time.monotonic() - began
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def close_leftovers(self) -> None:
        """Closes the envelopes without a deadline that have parts left."""
        for envelope in self._chosen:
            if envelope.deadline_ms is None and envelope.people < envelope.terms.parts:
                await self._decide([Close(id=f"close-{envelope.offer}", offer=envelope.offer)])

    # -- the doors -------------------------------------------------------------------------------------------

    def _listener(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            self._topics.results,
            **brokers.at(self._settings.brokers),
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )

    async def _at_the_gate(self) -> None:
        grabs = self._by_door["gate"]
        sizes = random.Random(len(grabs))
        waiting = iter(grabs)

        async def caller() -> None:
            while chunk := list(itertools.islice(waiting, sizes.randint(1, GATE_LIST_MAX))):
                await self._ask(chunk)

        await asyncio.gather(*(caller() for _ in range(GATE_CALLERS)))

    async def _ask(self, chunk: list[Grab]) -> None:
        """Sends grabs through the gate until all are decided: those with an unknown outcome, `busy` or
        `fenced` again with the same ids.
        """
        self.doors.sent["gate"] += len(chunk)
        began = time.monotonic()
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
        self.doors.latencies["gate"].append(time.monotonic() - began)

    async def _over_http(self) -> None:
        waiting = iter(self._by_door["http"])

        async def caller(door: HttpDoor) -> None:
            for grab in waiting:
                self.doors.sent["http"] += 1
                began = time.monotonic()
                self.doors.take("http", await door.grab(grab))
                self.doors.latencies["http"].append(time.monotonic() - began)

        if self._http is not None:
            await asyncio.gather(*(caller(self._http) for _ in range(HTTP_CALLERS)))

    async def _at_the_topic(self) -> None:
        grabs = self._by_door["topic"]
        producer = AIOKafkaProducer(
            **brokers.at(self._settings.brokers), linger_ms=5, acks="all", enable_idempotence=True
        )
        async with started(producer):
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
                for grab in chunk:
                    await producer.send(self._topics.commands, encode_command(grab), key=grab.offer.encode())
            await producer.flush()

    async def _listen(self, consumer: AIOKafkaConsumer) -> None:
        while True:
            fetched = await consumer.getmany(timeout_ms=200, max_records=5_000)
            now = time.monotonic()
            for records in fetched.values():
                for record in records:
                    answer = decode_answer(record.value)
                    if answer.id.startswith(f"{READY}-"):
                        continue
                    self.doors.take("topic", answer)
                    began = self._sent_at.pop(answer.id, None)
                    if began is not None:
                        self.doors.latencies["topic"].append(now - began)
            async with self._room:
                self._room.notify_all()


def _require_opened(refused: Sequence[Answer]) -> None:
    for answer in refused:
        raise CannotGoOn(f"{answer.offer} was not opened: {answer.outcome} {answer.message or ''}")


class Progress(msgspec.Struct):
    """How many events each stage has, in all shards together. `complete`: every stage of every shard has the
    same events.
    """

    decided: int = 0
    journaled: int = 0
    read_models: dict[str, int] = msgspec.field(default_factory=dict)
    complete: bool = False


async def read_progress(redis: Any, keys: KeySpace, connection: AsyncConnection[Any]) -> Progress:
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
    return Progress(
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
