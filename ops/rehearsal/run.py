"""The run: the crowd at both doors, every answer kept, and what the servers say meanwhile.

Nothing here goes by how fast the machine is. The crowd begins when both doors answer, deadlines count from
then, and whoever waits gives up only when nothing has moved for long.
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
from grabstream.lua.gate.queue import OutcomeUnknown
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer, decode_answer
from grabstream.models.commands import AnyCommand, Close, Grab, Open, encode_command
from grabstream.ops.rehearsal.crowd import Envelope, person_of
from grabstream.ops.rehearsal.stage import CannotGoOn
from grabstream.ops.settings import Settings
from grabstream.projections.database.migrate import PROJECTIONS, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.streams.clients import started
from grabstream.streams.topics import Topics

GATE_CALLERS = 40
GATE_LIST_MAX = 32
TOPIC_CHUNK = 500
PATIENCE_MS = 30_000
#: For so long nobody has to answer while workers start: on a busy machine they take their time.
READY_SECONDS = 120.0
#: What asks whether the workers are ready begins so.
READY = "ready"
#: For so long nothing may move: no event, no answer.
STILL_SECONDS = 120.0
LOOK_EVERY_SECONDS = 0.25
#: How far the topic's crowd may run ahead of its answers.
UNANSWERED_MAX = 20_000


class Doors(msgspec.Struct):
    """What has happened so far: sent and answered at each door, outcomes, latencies in seconds, and all
    grants told to anyone.
    """

    total: int = 0
    sent: Counter[str] = msgspec.field(default_factory=Counter)
    answered: Counter[str] = msgspec.field(default_factory=Counter)
    #: id → how many answers on the topic are still to come; one that comes again after a rebalance answers
    #: nobody a second time
    awaited: Counter[str] = msgspec.field(default_factory=Counter)
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    latencies: dict[str, list[float]] = msgspec.field(default_factory=lambda: {"topic": [], "gate": []})
    #: offer → grab → (user unknown here) amount: what was promised to the crowd
    granted: dict[str, dict[str, int]] = msgspec.field(default_factory=lambda: defaultdict(dict))
    #: offer → who was told that it is over: people, not attempts
    late: dict[str, set[str]] = msgspec.field(default_factory=lambda: defaultdict(set))
    contradictions: list[str] = msgspec.field(default_factory=list)

    def take(self, door: str, answer: Answer) -> None:
        """Counts an answer and keeps a grant; a second answer must say the same as the first."""
        is_awaited = door == "gate" or self.awaited[answer.id] > 0
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
    """One rehearsal against a running system; `doors` is what a display may look at."""

    def __init__(
        self, settings: Settings, gate: Gate, chosen: Sequence[Envelope], grabs: Sequence[Grab], seed: int
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._chosen = chosen
        self._topics = Topics(settings.prefix)
        self.doors = Doors(total=len(grabs))
        split = random.Random(seed)
        self._by_door: dict[str, list[Grab]] = {"topic": [], "gate": []}
        for grab in grabs:
            self._by_door["topic" if split.random() < 0.5 else "gate"].append(grab)
        self._sent_at: dict[str, float] = {}
        self._room = asyncio.Condition()
        self.envelopes = len(chosen)
        self.partitions_ready = 0
        #: When the crowd was let in, on the monotonic clock; 0 before.
        self.began = 0.0
        #: When the last envelope that is left to its deadline closes; 0 before these are open.
        self.deadline_at_ms = 0

    async def until_ready(self) -> None:
        """Returns when the workers answer in every partition of the topic; raises CannotGoOn when none does
        for READY_SECONDS.
        """
        partitions = set(range(self._settings.shards))
        producer = AIOKafkaProducer(
            bootstrap_servers=self._settings.kafka, acks="all", enable_idempotence=True
        )
        async with started(self._listener()) as consumer, started(producer):
            patient_until, tries = time.monotonic() + READY_SECONDS, 0
            while partitions:
                # Nobody has this envelope: whoever answers so has asked Redis, in a shard that is open for
                # decisions.
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
                                patient_until = time.monotonic() + READY_SECONDS
                    if time.monotonic() > patient_until:
                        raise CannotGoOn(
                            f"no answer from partitions {sorted(partitions)} of {self._topics.commands} in "
                            f"{READY_SECONDS:.0f} s"
                        )
                tries += 1

    async def open(self) -> None:
        """Opens the envelopes that close with their last part; raises CannotGoOn when one is refused."""
        _require(await self._refused([one.open for one in self._chosen if one.deadline_ms is None]))

    async def open_until_deadline(self) -> None:
        """Opens the others, whose time begins now: for longer, when opening alone took longer than that."""
        left = [one for one in self._chosen if one.deadline_ms is not None]
        longer = 1
        while left:
            began = now_ms()
            closing = {one.offer: began + longer * (one.deadline_ms or 0) for one in left}
            opens = []
            for one in left:
                terms = msgspec.structs.replace(one.terms, closes_at=closing[one.offer])
                opens.append(Open(id=f"{one.open.id}-{longer}", offer=one.offer, terms=terms))
            refused = await self._refused(opens)
            if now_ms() < min(closing.values()):
                _require(refused)
            again = {answer.offer for answer in refused}
            self.deadline_at_ms = max(
                [self.deadline_at_ms, *(closing[offer] for offer in closing.keys() - again)]
            )
            left, longer = [one for one in left if one.offer in again], longer * 2

    async def _refused(self, opens: Sequence[Open]) -> list[Answer]:
        return [answer for answer in await self._decide(opens) if answer.outcome != "opened"]

    async def _decide(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """Asks the gate until all is decided: an unknown outcome, `busy` and `fenced` are asked again under
        the same ids.
        """
        while True:
            try:
                answers = await self._gate.decide(commands, patience_ms=PATIENCE_MS)
            except OutcomeUnknown:
                continue
            if all(answer.decided for answer in answers):
                return answers

    async def crowd(self) -> float:
        """Lets the crowd grab at both doors and returns the seconds until everybody had an answer."""
        async with started(self._listener()) as consumer:
            listening = asyncio.create_task(self._listen(consumer))
            await self.open_until_deadline()
            began = self.began = time.monotonic()
            try:
                await asyncio.gather(self._at_the_gate(), self._at_the_topic())
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
        """Ends by command what is still open and not left to its deadline."""
        for one in self._chosen:
            if one.deadline_ms is None and one.people < one.terms.parts:
                await self._decide([Close(id=f"close-{one.offer}", offer=one.offer)])

    # -- the doors -------------------------------------------------------------------------------------------

    def _listener(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            self._topics.results,
            bootstrap_servers=self._settings.kafka,
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
        """Asks until it is answered: an unknown outcome, `busy` and `fenced` are asked again under the same
        ids.
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

    async def _at_the_topic(self) -> None:
        grabs = self._by_door["topic"]
        producer = AIOKafkaProducer(
            bootstrap_servers=self._settings.kafka, linger_ms=5, acks="all", enable_idempotence=True
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


def _require(refused: Sequence[Answer]) -> None:
    for answer in refused:
        raise CannotGoOn(f"{answer.offer} was not opened: {answer.outcome} {answer.message or ''}")


class Progress(msgspec.Struct):
    """How many events each stage has, all shards together; and whether nothing is on its way any more, in any
    of them.
    """

    decided: int = 0
    journaled: int = 0
    read_models: dict[str, int] = msgspec.field(default_factory=dict)
    complete: bool = False


async def look(redis: Any, keys: KeySpace, connection: AsyncConnection[Any]) -> Progress:
    """Asks Redis and PostgreSQL how far everything is.

    It is complete when every shard is open for decisions and each of its stages is at the same event: a Redis
    that has just lost its data has decided less than the journal and the books have, or nothing.
    """
    shards = range(keys.shards)
    async with redis.pipeline(transaction=False) as pipe:
        for shard in shards:
            pipe.hmget(keys.shard(shard).state, ["seq", "journaled_seq", "life"])
        states = await pipe.execute()
    rows = await (await connection.execute("SELECT projection, shard, seq FROM cursors")).fetchall()
    cursors = {(projection, shard): seq for projection, shard, seq in rows}
    decided, journaled = ([int(state[place] or 0) for state in states] for place in (0, 1))
    return Progress(
        sum(decided),
        sum(journaled),
        {name: sum(cursors.get((name, shard), 0) for shard in shards) for name in PROJECTIONS},
        all(server_epoch for *_, server_epoch in states)
        and decided == journaled
        and all(cursors.get((name, shard), 0) == decided[shard] for name in PROJECTIONS for shard in shards),
    )


async def closed(connection: AsyncConnection[Any]) -> int:
    """How many offers are closed in the books."""
    [count] = await (
        await connection.execute("SELECT count(*) FROM offers WHERE state = 'closed'")
    ).fetchone() or (0,)
    return int(count)


class Patience:
    """Waits as long as something moves; then STILL_SECONDS more."""

    def __init__(self) -> None:
        self._seen: object = None
        self._until = 0.0

    def look(self, seen: object, said: str, busy: bool = False) -> None:
        """Looks at what should move; raises CannotGoOn with what is said when it is the same for too long,
        and nothing else is awaited.
        """
        now = time.monotonic()
        if seen != self._seen or busy or not self._until:
            self._seen, self._until = seen, now + STILL_SECONDS
        elif now > self._until:
            raise CannotGoOn(f"nothing moved for {STILL_SECONDS:.0f} s: {said}")


async def until_in_books(
    redis: Any, keys: KeySpace, connection: AsyncConnection[Any], check: Callable[[], None]
) -> None:
    """Returns when journal and read models have all that is decided; raises what `check` raises, and
    CannotGoOn when nothing moves.
    """
    patience = Patience()
    while not (progress := await look(redis, keys, connection)).complete:
        check()
        patience.look(
            progress,
            f"{progress.decided} events decided, {progress.journaled} journaled, read models at "
            f"{progress.read_models}",
        )
        await asyncio.sleep(LOOK_EVERY_SECONDS)


async def open_books(settings: Settings) -> AsyncConnection[Any]:
    """A connection that reads the views of this system."""
    connection = await connect(settings.postgres, settings.schema_)
    await use_schema(connection, settings.schema_)
    return connection
