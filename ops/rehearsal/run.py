"""The run: the crowd at both doors, every answer kept, and what the servers say meanwhile."""

import asyncio
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from psycopg import AsyncConnection

from lua.gate import Gate, OutcomeUnknown
from lua.keys import KeySpace
from models.answers import Answer, decode_answer
from models.commands import Close, Grab, encode_command
from ops.rehearsal.crowd import Envelope
from ops.settings import Settings
from projections.migrate import PROJECTIONS, use_schema
from streams.clients import started
from streams.topics import Topics

GATE_CALLERS = 40
GATE_LIST_MAX = 32
TOPIC_CHUNK = 500
PATIENCE_MS = 30_000
#: How far the topic's crowd may run ahead of its answers.
UNANSWERED_MAX = 20_000


class Doors(msgspec.Struct):
    """What has happened so far: sent and answered at each door, outcomes, latencies in seconds, and all grants told to anyone."""

    total: int = 0
    sent: Counter[str] = msgspec.field(default_factory=Counter)
    answered: Counter[str] = msgspec.field(default_factory=Counter)
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    latencies: dict[str, list[float]] = msgspec.field(default_factory=lambda: {"topic": [], "gate": []})
    #: offer → grab → (user unknown here) amount: what was promised to the crowd
    granted: dict[str, dict[str, int]] = msgspec.field(default_factory=lambda: defaultdict(dict))
    contradictions: list[str] = msgspec.field(default_factory=list)

    def take(self, door: str, answer: Answer) -> None:
        """Counts an answer and keeps a grant; a second answer must say the same as the first."""
        self.answered[door] += 1
        self.outcomes[answer.outcome] += 1
        if answer.outcome == "granted" and answer.offer and answer.grab and answer.amount is not None:
            before = self.granted[answer.offer].setdefault(answer.grab, answer.amount)
            if before != answer.amount:
                self.contradictions.append(f"{answer.grab}: {before} and then {answer.amount}")


class Rehearsal:
    """One rehearsal against a running system; `doors` is what a display may look at."""

    def __init__(self, settings: Settings, gate: Gate, chosen: Sequence[Envelope], grabs: Sequence[Grab], seed: int) -> None:
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

    async def open(self) -> None:
        """Opens the envelopes by the gate; raises RuntimeError when one is refused."""
        answers = await self._gate.decide([one.open for one in self._chosen], patience_ms=PATIENCE_MS, timeout_ms=PATIENCE_MS)
        refused = [answer for answer in answers if answer.outcome != "opened"]
        if refused:
            raise RuntimeError(f"not opened: {refused[0]}")

    async def crowd(self) -> float:
        """Lets the crowd grab at both doors and returns the seconds until everybody had an answer."""
        consumer = AIOKafkaConsumer(
            self._topics.results, bootstrap_servers=self._settings.kafka, auto_offset_reset="earliest", enable_auto_commit=False
        )
        async with started(consumer):
            listening = asyncio.create_task(self._listen(consumer))
            began = time.monotonic()
            try:
                await asyncio.gather(self._at_the_gate(), self._at_the_topic())
                async with self._room:
                    await self._room.wait_for(lambda: self.doors.answered["topic"] >= self.doors.sent["topic"] or listening.done())
                return time.monotonic() - began
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)

    async def close_leftovers(self) -> None:
        """Ends by command what is still open and not left to its deadline."""
        for one in self._chosen:
            if not one.until_deadline and one.people < one.terms.parts:
                await self._gate.decide([Close(id=f"close-{one.offer}", offer=one.offer)], patience_ms=PATIENCE_MS)

    # -- the doors ----------------------------------------------------------------------------------------------------

    async def _at_the_gate(self) -> None:
        grabs = self._by_door["gate"]
        sizes = random.Random(len(grabs))
        waiting = iter(grabs)

        async def caller() -> None:
            while chunk := list(itertools.islice(waiting, sizes.randint(1, GATE_LIST_MAX))):
                await self._ask(chunk)

        await asyncio.gather(*(caller() for _ in range(GATE_CALLERS)))

    async def _ask(self, chunk: list[Grab]) -> None:
        """Asks until it is answered: an unknown outcome, `busy` and `fenced` are asked again under the same ids."""
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
        producer = AIOKafkaProducer(bootstrap_servers=self._settings.kafka, linger_ms=5, acks="all", enable_idempotence=True)
        async with started(producer):
            for start in range(0, len(grabs), TOPIC_CHUNK):
                async with self._room:
                    await self._room.wait_for(lambda: self.doors.sent["topic"] - self.doors.answered["topic"] < UNANSWERED_MAX)
                chunk = grabs[start : start + TOPIC_CHUNK]
                now = time.monotonic()
                for grab in chunk[::20]:
                    self._sent_at.setdefault(grab.id, now)
                self.doors.sent["topic"] += len(chunk)
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
                    self.doors.take("topic", answer)
                    began = self._sent_at.pop(answer.id, None)
                    if began is not None:
                        self.doors.latencies["topic"].append(now - began)
            async with self._room:
                self._room.notify_all()


class Progress(msgspec.Struct):
    """How many events each stage has, all shards together."""

    decided: int = 0
    journaled: int = 0
    read_models: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether nothing is on its way any more."""
        return self.journaled >= self.decided and all(seq >= self.decided for seq in self.read_models.values())


async def look(redis: Any, keys: KeySpace, connection: AsyncConnection[Any]) -> Progress:
    """Asks Redis and PostgreSQL how far everything is."""
    progress = Progress()
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(keys.shards):
            pipe.hmget(keys.shard(number).state, ["seq", "journaled_seq"])
        for seq, journaled in await pipe.execute():
            progress.decided += int(seq or 0)
            progress.journaled += int(journaled or 0)
    rows = await connection.execute("SELECT projection, sum(seq)::bigint FROM cursors GROUP BY projection")
    found = dict(await rows.fetchall())
    progress.read_models = {name: int(found.get(name, 0)) for name in PROJECTIONS}
    return progress


async def open_books(settings: Settings) -> AsyncConnection[Any]:
    """A connection that reads the views of this system."""
    connection = await AsyncConnection.connect(settings.postgres, autocommit=True, connect_timeout=5)
    await use_schema(connection, settings.schema_)
    return connection
