"""Kafka in the simulation: partitions in memory, and clients with the part of aiokafka's interface that
`streams/` uses.

A producer's record is appended when its request arrives; what can go wrong is the way there (late), the way
back (not acknowledged), and the broker's memory of what it has already (twice). A group has one generation
after another, each with a range of the partitions for every member, as Kafka's range assignor gives them.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaConnectionError,
    KafkaTimeoutError,
    OffsetOutOfRangeError,
)

from tests.simulation.loop import SimulatedLoop
from tests.simulation.machine import Trace
from tests.simulation.redis_server import Weather

HEARTBEAT_SECONDS: Final = 1.0
REQUEST_SECONDS: Final = 10.0
#: How late a record may be, and from when on it expires on its way instead, if its broker does not know its
#: producer: a broker that does refuses what the producer sends next.
LATE_SECONDS: Final = (0.05, 4.0)
EXPIRED_SECONDS: Final = 2.5
#: How many records a batch has room for.
BATCH_RECORDS_MAX: Final = 3


class Record(NamedTuple):
    """A record as a consumer gets it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]


class Metadata(NamedTuple):
    """What an acknowledgement says."""

    topic: str
    partition: int
    offset: int


class Conditions(Weather):
    """How the brokers, and the way to them, are at the moment."""

    def __init__(self) -> None:
        super().__init__()
        self.available = True
        self.unacknowledged = 0.0
        self.late = 0.0
        self.twice = 0.0
        self.lagging = 0.0
        #: Partitions without a leader.
        self.leaderless: frozenset[TopicPartition] = frozenset()


class Broker:
    """All topics, and the groups that read them."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random, trace: Trace) -> None:
        self.loop = loop
        self.draw = draw
        self.trace = trace
        self.conditions = Conditions()
        self.topics: dict[str, list[list[Record]]] = {}
        self.groups: dict[str, Group] = {}
        self._waiting: dict[TopicPartition, list[asyncio.Future[None]]] = defaultdict(list)
        #: Called with each record, in the order of its partition.
        self.appended: Callable[[Record], None] = lambda record: None

    def create(self, topic: str, partitions: int) -> None:
        """Creates a topic."""
        self.topics[topic] = [[] for _ in range(partitions)]

    def append(self, topic: str, partition: int, key: Any, value: Any, headers: Any) -> int:
        """Appends a record; returns its offset."""
        log = self.topics[topic][partition]
        record = Record(topic, partition, len(log), key, value, tuple(headers or ()))
        log.append(record)
        for waiter in self._waiting.pop(TopicPartition(topic, partition), ()):
            if not waiter.done():
                waiter.set_result(None)
        self.appended(record)
        return record.offset

    def wait(self, partitions: Sequence[TopicPartition]) -> asyncio.Future[None]:
        """Done when one of the partitions gets a record."""
        waiter = self.loop.create_future()
        for partition in partitions:
            self._waiting[partition].append(waiter)
        return waiter

    def group(self, name: str) -> "Group":
        """The group of a name."""
        return self.groups.setdefault(name, Group(name, self))

    async def request(self) -> None:
        """A way to the broker, which may be away."""
        await asyncio.sleep(self.conditions.delay(self.draw))
        if not self.conditions.available:
            await asyncio.sleep(self.draw.uniform(0.05, 0.4))
            raise KafkaConnectionError("no broker answers")


class Group:
    """A consumer group: its members, its generation, its committed offsets."""

    def __init__(self, name: str, broker: Broker) -> None:
        self.name = name
        self.broker = broker
        self.generation = 0
        self.members: dict[int, float] = {}
        self.joined: set[int] = set()
        self.committed: dict[TopicPartition, int] = {}
        self._numbers = 0

    def join(self) -> int:
        """A new member; all have to join again."""
        self._numbers += 1
        self.members[self._numbers] = self.broker.loop.now
        self.rebalance()
        return self._numbers

    def leave(self, member: int) -> None:
        """A member leaves."""
        if self.members.pop(member, None) is not None:
            self.rebalance()

    def rebalance(self) -> None:
        """Begins the next generation."""
        self.generation += 1
        self.joined.clear()

    def beat(self, member: int, session_seconds: float) -> int:
        """A heartbeat; returns the generation, or -1 for who is not a member any more."""
        now = self.broker.loop.now
        if member in self.members:
            self.members[member] = now
        for silent in [one for one, at in self.members.items() if now - at > session_seconds]:
            self.broker.trace.add("kafka", f"group {self.name}: member {silent} was silent for too long")
            self.leave(silent)
        return self.generation if member in self.members else -1

    def share(self, member: int, topic: str) -> list[TopicPartition]:
        """The partitions of a member in this generation."""
        members = sorted(self.members)
        partitions = len(self.broker.topics[topic])
        return [
            TopicPartition(topic, number)
            for number in range(partitions)
            if members[number * len(members) // partitions] == member
        ]


class Batch:
    """Records that are sent as one request."""

    def __init__(self) -> None:
        self.records: list[tuple[Any, Any, Any]] = []

    def append(self, *, key: Any, value: Any, timestamp: Any, headers: Any = None) -> object:
        """Adds a record; returns None if there is no room."""
        del timestamp
        if len(self.records) == BATCH_RECORDS_MAX:
            return None
        self.records.append((key, value, headers))
        return len(self.records)

    def record_count(self) -> int:
        """How many there are."""
        return len(self.records)


class Producer:
    """An idempotent producer: what it sends to a partition is appended in that order, or given up."""

    broker: Broker

    def __init__(self, **options: Any) -> None:
        del options
        self._last: dict[TopicPartition, asyncio.Future[Any]] = {}
        #: Partitions whose broker has a record of this producer.
        self._known: set[TopicPartition] = set()

    async def start(self) -> None:
        """Connects."""
        await self.broker.request()

    async def stop(self) -> None:
        """Waits for what is on its way, as aiokafka's does."""
        for last in list(self._last.values()):
            await asyncio.wait({last})

    async def partitions_for(self, topic: str) -> set[int]:
        """The partitions of a topic."""
        await self.broker.request()
        return set(range(len(self.broker.topics[topic])))

    def create_batch(self) -> Batch:
        """An empty batch."""
        return Batch()

    async def send(
        self, topic: str, value: Any = None, key: Any = None, partition: int = 0, headers: Any = None
    ) -> "asyncio.Future[Any]":
        """Sends a record; the future is its acknowledgement."""
        return self._send(topic, partition, [(key, value, headers)])

    async def send_batch(self, batch: Batch, topic: str, *, partition: int) -> "asyncio.Future[Any]":
        """Sends a batch; the future is its acknowledgement."""
        return self._send(topic, partition, batch.records)

    async def send_and_wait(
        self, topic: str, value: Any = None, key: Any = None, partition: int = 0, headers: Any = None
    ) -> Any:
        """Sends a record and waits for its acknowledgement."""
        return await self._send(topic, partition, [(key, value, headers)])

    def _send(self, topic: str, partition: int, records: list[Any]) -> "asyncio.Future[Any]":
        place = TopicPartition(topic, partition)
        acknowledged = self.broker.loop.create_future()
        acknowledged.add_done_callback(lambda future: future.cancelled() or future.exception())
        before = self._last.get(place)
        self._last[place] = acknowledged
        if before is None or before.done():
            self._depart(place, records, acknowledged)
        else:
            before.add_done_callback(lambda _: self._depart(place, records, acknowledged))
        return acknowledged

    def _depart(self, place: TopicPartition, records: list[Any], acknowledged: "asyncio.Future[Any]") -> None:
        broker = self.broker
        broker.loop.call_at_world(
            broker.conditions.delay(broker.draw), self._arrive, place, records, acknowledged, REQUEST_SECONDS
        )

    def _arrive(
        self, place: TopicPartition, records: list[Any], acknowledged: "asyncio.Future[Any]", patience: float
    ) -> None:
        """The request is at the broker. aiokafka retries automatically while the broker is away."""
        broker, conditions, draw = self.broker, self.broker.conditions, self.broker.draw
        if not conditions.available or place in conditions.leaderless:
            pause = draw.uniform(0.1, 0.5)
            if patience > pause:
                broker.loop.call_at_world(pause, self._arrive, place, records, acknowledged, patience - pause)
            else:
                _fail(acknowledged, KafkaTimeoutError("the record was not sent in time"))
            return
        if conditions.late and draw.random() < conditions.late:
            delay = draw.uniform(*LATE_SECONDS)
            if delay > EXPIRED_SECONDS and place not in self._known:
                broker.trace.add("kafka", f"{place.topic}/{place.partition}: a record expires on its way")
            else:
                broker.trace.add(
                    "kafka", f"{place.topic}/{place.partition}: a record is late by {delay:.2f} s"
                )
                broker.loop.call_at_world(delay, self._append, place, records)
            broker.loop.call_at_world(
                draw.uniform(0.0, 0.5), _fail, acknowledged, KafkaTimeoutError("given up")
            )
            return
        offset = self._append(place, records)
        if conditions.twice and draw.random() < conditions.twice:
            delay = draw.choice((0.0, draw.uniform(0.0, 2.0)))
            if draw.random() < 0.3:
                # The client had sent it again: the broker has it already, and does not say where.
                broker.trace.add("kafka", f"{place.topic}/{place.partition}: offset {offset} is not named")
                broker.loop.call_at_world(
                    conditions.delay(draw), _succeed, acknowledged, Metadata(place.topic, place.partition, -1)
                )
                return
            broker.trace.add("kafka", f"{place.topic}/{place.partition}: offset {offset} is appended again")
            if delay:
                broker.loop.call_at_world(delay, self._append, place, records)
            else:
                offset = self._append(place, records)
        if conditions.unacknowledged and draw.random() < conditions.unacknowledged:
            broker.trace.add("kafka", f"{place.topic}/{place.partition}: offset {offset} is not acknowledged")
            error = KafkaTimeoutError("no acknowledgement")
            broker.loop.call_at_world(draw.uniform(0.01, 0.5), _fail, acknowledged, error)
            return
        broker.loop.call_at_world(
            conditions.delay(draw), _succeed, acknowledged, Metadata(place.topic, place.partition, offset)
        )

    def _append(self, place: TopicPartition, records: list[Any]) -> int:
        self._known.add(place)
        offsets = [self.broker.append(place.topic, place.partition, *record) for record in records]
        return offsets[0]


def _succeed(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class Consumer:
    """A consumer, of assigned partitions or as a member of a group."""

    broker: Broker

    def __init__(
        self,
        *topics: str,
        group_id: str | None = None,
        session_timeout_ms: int = 10_000,
        auto_offset_reset: str = "latest",
        **options: Any,
    ) -> None:
        del topics, options
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._assigned: tuple[TopicPartition, ...] = ()
        self._group_id = group_id
        self._session_seconds = session_timeout_ms / 1_000
        self._reset = auto_offset_reset
        self._topic: str | None = None
        self._listener: Any = None
        self._member = 0
        self._generation = 0
        self._coordination: asyncio.Task[None] | None = None
        self._changed: asyncio.Future[None] | None = None

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Reads these partitions; none of them is paused."""
        self._paused.clear()
        if tuple(partitions) != self._assigned:
            self._assigned = tuple(partitions)
            self._positions = {
                source: at for source, at in self._positions.items() if source in self._assigned
            }

    def subscribe(self, topics: Sequence[str], listener: Any = None) -> None:
        """Reads its share of a topic."""
        [self._topic] = topics
        self._listener = listener

    async def start(self) -> None:
        """Connects, and joins its group."""
        await self.broker.request()
        if self._topic is not None:
            assert self._group_id is not None
            self._member = self.broker.group(self._group_id).join()
            self._coordination = asyncio.create_task(self._coordinate())

    async def stop(self) -> None:
        """Leaves its group."""
        if self._coordination is not None:
            self._coordination.cancel()
            await asyncio.wait({self._coordination})
            if self._assigned:
                await self._listener.on_partitions_revoked(set(self._assigned))
            self.broker.group(str(self._group_id)).leave(self._member)

    async def _coordinate(self) -> None:
        group = self.broker.group(str(self._group_id))
        while True:
            if self.broker.conditions.available:
                generation = group.beat(self._member, self._session_seconds)
                if generation == -1:
                    self._member = group.join()
                    generation = group.generation
                if generation != self._generation:
                    await self._join(group)
                    continue
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _join(self, group: Group) -> None:
        assert self._topic is not None
        revoked, self._assigned = self._assigned, ()
        await self._listener.on_partitions_revoked(set(revoked))
        generation = group.generation
        group.joined.add(self._member)
        # All members join before any gets its share; those that do not within the session are dropped.
        while group.generation == generation and group.joined < group.members.keys():
            await asyncio.sleep(0.05)
            group.beat(self._member, self._session_seconds)
        if group.generation != generation or self._member not in group.members:
            return
        self._generation = generation
        share = group.share(self._member, self._topic)
        self._positions = {source: group.committed.get(source, 0) for source in share}
        self._paused.clear()
        await self._listener.on_partitions_assigned(set(share))
        self._assigned = tuple(share)
        self.broker.trace.add("kafka", f"group {group.name}: {[one.partition for one in share]} for member "
            f"{self._member} in generation {generation}")  # fmt: skip
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions it reads."""
        return frozenset(self._assigned)

    def positions(self) -> dict[TopicPartition, int]:
        """The offsets after what it has read of its partitions."""
        return {source: at for source, at in self._positions.items() if source in self._assigned}

    def paused(self) -> set[TopicPartition]:
        """Those that are not read for now."""
        return set(self._paused)

    def pause(self, *partitions: TopicPartition) -> None:
        """Reads them no more for now."""
        self._paused.update(partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        """Reads them again."""
        self._paused.difference_update(partitions)

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """Reads a partition from an offset on."""
        if partition not in self._assigned:
            raise IllegalStateError(f"{partition} is not assigned")
        self._positions[partition] = offset

    async def position(self, partition: TopicPartition) -> int:
        """The offset of the next record that it reads of a partition."""
        if partition not in self._assigned:
            raise IllegalStateError(f"{partition} is not assigned")
        return self._positions[partition]

    def highwater(self, partition: TopicPartition) -> int | None:
        """The offset after the last record that the broker has, as of now."""
        return len(self.broker.topics[partition.topic][partition.partition])

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commits offsets, if the generation is still the one it has joined."""
        await self.broker.request()
        group = self.broker.group(str(self._group_id))
        if self._member not in group.members or self._generation != group.generation:
            raise CommitFailedError("the group has been rebalanced")
        group.committed.update(offsets)

    async def committed(self, partition: TopicPartition) -> int | None:
        """The offset that its group has committed."""
        return self.broker.group(str(self._group_id)).committed.get(partition)

    async def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record of each."""
        await self.broker.request()
        return {one: len(self.broker.topics[one.topic][one.partition]) for one in partitions}

    async def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset of the first record of each."""
        await self.broker.request()
        return dict.fromkeys(partitions, 0)

    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[Record]]:
        """The next records, of as many partitions as have some; waits for the first one."""
        loop, broker = self.broker.loop, self.broker
        until = loop.now + timeout_ms / 1_000
        while True:
            if broker.conditions.available:
                # A record may be acknowledged long before a reader gets it.
                lag = broker.draw.uniform(0.0, broker.conditions.lagging)
                await asyncio.sleep(broker.conditions.delay(broker.draw) + lag)
                if found := self._fetched(partitions or self._assigned, max_records):
                    return found
            if loop.now >= until:
                return {}
            self._changed = loop.create_future()
            sources = [one for one in partitions or self._assigned if one in self._positions]
            waiting = {broker.wait(sources), self._changed}
            await asyncio.wait(waiting, timeout=until - loop.now, return_when=asyncio.FIRST_COMPLETED)

    def _fetched(
        self, partitions: Sequence[TopicPartition], max_records: int | None
    ) -> dict[TopicPartition, list[Record]]:
        found: dict[TopicPartition, list[Record]] = {}
        left = max_records or 500
        for source in partitions:
            if source in self._paused or source not in self._assigned:
                continue
            if source in self.broker.conditions.leaderless:
                continue
            if source not in self._positions:
                raise OffsetOutOfRangeError({source: -1})
            log = self.broker.topics[source.topic][source.partition]
            start = self._positions[source]
            # What a fetch brings is for the broker to say: a random number of those that are there.
            count = min(left, len(log) - start)
            if count > 1 and self.broker.draw.random() < 0.5:
                count = self.broker.draw.randint(1, count)
            if count > 0:
                found[source] = log[start : start + count]
                self._positions[source] = start + count
                left -= count
        return found
