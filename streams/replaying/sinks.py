"""Sinks of a replay: lines on a stream, CloudEvents on a user's topic, or rows in PostgreSQL."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, BinaryIO, Final, Protocol

from aiokafka import AIOKafkaProducer
from psycopg import AsyncConnection

from grabstream.models.journal import Cursor
from grabstream.projections import cursors
from grabstream.projections.cursors import Fact, single_facts
from grabstream.streams.history.chunks import Chunk
from grabstream.streams.journal import open_reader
from grabstream.streams.projecting.projector import GROUP_EVENTS_MAX, Apply
from grabstream.streams.projecting.publisher import event_batches
from grabstream.streams.topics import Topics, partitions_of, retention_ms

#: The number of events sent to a topic before the sink waits for acknowledgements.
SEND_EVENTS_MAX: Final = 4_000

Use = Callable[[str], Awaitable[None]]


class ReplayRefused(Exception):
    """The destination cannot take these events; the text states why, and the way out."""


class Sink(Protocol):
    """Takes events. After `flush`, they are stored durably."""

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> None:
        """Takes the wanted events of a chunk; the chunk's cursors are the progress."""

    async def flush(self) -> None:
        """Returns when all events taken are stored."""


class LineSink:
    """One line per event, byte for byte as journaled."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> None:
        """Writes the lines; raises BrokenPipeError if the reader has closed the stream."""
        if facts:
            self._stream.write(b"\n".join(fact.line for fact in facts) + b"\n")

    async def flush(self) -> None:
        """Empties the stream's buffer."""
        self._stream.flush()


class TopicSink:
    """One record per event, as on the events topic; partition = shard."""

    def __init__(self, producer: AIOKafkaProducer, topic: str, source: str) -> None:
        self._producer = producer
        self._topic = topic
        self._source = source.encode()
        self._waiting: list[Fact] = []
        self._shard = self._seq = 0
        #: By shard, the seq up to which all wanted events are in the topic.
        self.acknowledged: dict[int, int] = {}

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> None:
        """Sends when enough events are waiting, or when another shard begins."""
        if chunk.shard != self._shard:
            await self.flush()
            self._shard, self._seq = chunk.shard, 0
        self._seq = chunk.after.seq
        self._waiting.extend(single_facts(facts))
        if len(self._waiting) >= SEND_EVENTS_MAX:
            await self.flush()

    async def flush(self) -> None:
        """Sends the waiting events, one batch after the other to keep the order; raises aiokafka's errors."""
        facts, self._waiting = self._waiting, []
        for batch in event_batches(self._producer, facts, self._source) if facts else ():
            await (await self._producer.send_batch(batch, self._topic, partition=self._shard))
        if self._seq:
            self.acknowledged[self._shard] = self._seq


class RowSink:
    """Read models in PostgreSQL: rows, and the cursors of all `projections` (name → apply), move in one
    transaction.

    `use(name)` makes unqualified names mean those of a projection. `positions` are the cursors; all
    projections have the same.
    """

    def __init__(
        self,
        connection: AsyncConnection[Any],
        projections: Mapping[str, Apply],
        use: Use,
        positions: dict[int, Cursor],
    ) -> None:
        self.positions = positions
        self._connection = connection
        self._projections = projections
        self._use = use
        self._moves: dict[int, tuple[Cursor, Cursor]] = {}
        self._facts: list[Fact] = []

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> None:
        """Takes events; commits when enough are waiting."""
        before = self._moves[chunk.shard][0] if chunk.shard in self._moves else chunk.before
        self._moves[chunk.shard] = (before, chunk.after)
        self._facts.extend(facts)
        if sum(after.seq - before.seq for before, after in self._moves.values()) >= GROUP_EVENTS_MAX:
            await self.flush()

    async def flush(self) -> None:
        """Commits; raises psycopg's errors if the database refuses."""
        moves, facts = self._moves, self._facts
        self._moves, self._facts = {}, []
        if not moves:
            return
        await self._save(moves, facts)
        self.positions.update({shard: after for shard, (_, after) in moves.items()})

    async def _save(self, moves: Mapping[int, tuple[Cursor, Cursor]], facts: Sequence[Fact]) -> None:
        async with self._connection.transaction():
            for name, apply in self._projections.items():
                await self._use(name)
                await cursors.advance(self._connection, name, moves)
                if facts:
                    await apply(self._connection, facts)


async def check_topic(kafka: str, system: Topics, name: str, shards: int, append: bool) -> bool:
    """Whether the topic exists; raises ReplayRefused if it is the system's, or cannot take the events."""
    if name in retention_ms(system):
        raise ReplayRefused(f"topic {name} belongs to the system: name another")
    partitions = await partitions_of(kafka, name)
    if not partitions:
        return False
    if len(partitions) != shards:
        raise ReplayRefused(
            f"topic {name} has {len(partitions)} partitions, but each of the {shards} shards needs one: "
            "name another"
        )
    if not append:
        async with open_reader(kafka, name) as reader:
            if any([await reader.end(shard) > await reader.beginning(shard) for shard in range(shards)]):
                raise ReplayRefused(
                    f"topic {name} contains records: name another, delete it, or add --append (readers "
                    "recognise repeats by ce_id)"
                )
    return True
