"""Sinks of a replay: lines on a stream, or CloudEvents on a user's topic. `replay_schema.py` has that of rows
in PostgreSQL.
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

import msgspec
from aiokafka import AIOKafkaProducer

from grabstream.models.bounds import counted
from grabstream.models.events import decode_event
from grabstream.models.journal import LINE_BEGINS
from grabstream.models.runs import decode_line, is_run
from grabstream.projections.cursors import Fact, single_facts
from grabstream.streams.follower import Chunk
from grabstream.streams.journal import open_reader
from grabstream.streams.projecting.publisher import event_batches
from grabstream.streams.replaying.filters import FILTERS_HEADER, Filters, decode_filters
from grabstream.streams.topics import Topics, partitions_of, retention_ms

#: The number of events sent to a topic before the sink waits for acknowledgements.
SEND_EVENTS_MAX: Final = 4_000

#: The longest line of a file that is read: no record of Kafka is longer.
FILE_LINE_BYTES_MAX: Final = 16 * 1024 * 1024
#: How many of a topic's last offsets are read to find its last event.
LAST_RECORDS: Final = 10


class ReplayRefused(Exception):
    """The destination cannot take these events; the text states the reason and the fix."""


def events_in(facts: Sequence[Fact]) -> int:
    """How many events there are in lines."""
    return sum(fact.event.seqs for fact in facts)


class Sink(Protocol):
    """Takes events. After `flush`, they are stored durably."""

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> int:
        """Takes the wanted events of a chunk, whose cursors are the progress; returns how many of them the
        destination lacked.
        """
        ...

    async def flush(self) -> None:
        """Returns when all events taken are stored."""


class LineSink:
    """One line per event, byte for byte as journaled. `written_seqs` are the seqs, by shard, up to which the
    stream has the events already.
    """

    def __init__(self, stream: BinaryIO, written_seqs: Mapping[int, int] = {}) -> None:
        self._stream = stream
        self._written_seqs = written_seqs

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> int:
        """Writes the lines, and returns how many events they have; raises BrokenPipeError if the reader has
        closed the stream.
        """
        written = self._written_seqs.get(chunk.shard, 0)
        if written >= chunk.before.seq:
            facts = [fact for fact in facts if fact.event.seq > written]
        if facts:
            self._stream.write(b"\n".join(fact.line for fact in facts) + b"\n")
        return events_in(facts)

    async def flush(self) -> None:
        """Empties the stream's buffer."""
        self._stream.flush()


class TopicSink:
    """One record per event, as on the events topic; partition = shard. The first record that it writes into
    an empty partition has the `filters` in a header, and so has each record that it appends to others.
    """

    def __init__(
        self, producer: AIOKafkaProducer, topic: str, source: str, filters: Filters,
        written_seqs: Mapping[int, int] = {}, appended: Collection[int] = (),
    ) -> None:  # fmt: skip
        """`written_seqs` are the seqs, by shard, up to which the topic has the events already: they may end
        within a run. `appended` are the shards that have records, to which all events are appended.
        """
        self._filters = filters
        self._begun = set(written_seqs)
        self._written_seqs = written_seqs
        self._appended = frozenset(appended)
        self._producer = producer
        self._topic = topic
        self._source = source.encode()
        self._waiting: list[Fact] = []
        self._shard = 0

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> int:
        """Sends when enough events are waiting, or when another shard begins; returns how many it took."""
        if chunk.shard != self._shard:
            await self.flush()
            self._shard = chunk.shard
        written = self._written_seqs.get(chunk.shard, 0)
        lacked = [fact for fact in single_facts(facts) if fact.event.seq > written]
        self._waiting.extend(lacked)
        if len(self._waiting) >= SEND_EVENTS_MAX:
            await self.flush()
        return len(lacked)

    async def flush(self) -> None:
        """Sends the waiting events, one batch after the other to keep the order; raises aiokafka's errors."""
        facts, self._waiting = self._waiting, []
        if not facts:
            return
        shard = self._shard
        header = [(FILTERS_HEADER, self._filters.shard_record(shard))]
        each_headers = header if shard in self._appended else []
        first_headers = [] if each_headers or shard in self._begun else header
        for batch in event_batches(
            self._producer, facts, self._source, first_headers=first_headers, each_headers=each_headers
        ):
            await (await self._producer.send_batch(batch, self._topic, partition=shard))
        self._begun.add(shard)


class PacedSink:
    """Hands events on to another sink, on average at most `rate` a second. Memory does not grow: the writer
    waits.
    """

    def __init__(self, sink: Sink, rate: int) -> None:
        self._sink = sink
        self._rate = rate
        self._begun = 0.0
        self._events = 0

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> int:
        """Hands the events on, and waits until the next ones are due; returns how many the destination
        lacked.
        """
        if not self._begun:
            self._begun = time.monotonic()
        events = await self._sink.write(chunk, facts)
        if not events:
            return 0
        self._events += events
        ahead = self._begun + self._events / self._rate - time.monotonic()
        if ahead > 0:
            # Events handed on are stored before the wait, so that a reader is not kept waiting, too.
            await self._sink.flush()
            await asyncio.sleep(ahead)
        return events

    async def flush(self) -> None:
        """Returns when all events taken are stored."""
        await self._sink.flush()


def written_lines(file: Path, fix: bool = False) -> dict[int, int]:
    """The last seq of each shard in a file of lines, without shards that have none. A line that was cut off
    at the end, when a replay was killed, does not count, and with `fix` it is removed. Raises ReplayRefused
    when the file has other lines, and OSError.
    """
    found: dict[int, int] = {}
    with file.open("r+b" if fix else "rb") as stream:
        whole = number = 0
        while line := stream.readline(FILE_LINE_BYTES_MAX):
            if not line.endswith(b"\n") and len(line) < FILE_LINE_BYTES_MAX:
                if not (line.startswith(LINE_BEGINS) or LINE_BEGINS.startswith(line)):
                    raise ReplayRefused(
                        f"{file} ends with data that no replay has written: name another file"
                    )
                if fix:
                    stream.truncate(whole)
                break
            number, whole = number + 1, whole + len(line)
            try:
                # With --user, grabs are single events.
                event = decode_line(line) if is_run(line) else decode_event(line)
            except msgspec.DecodeError as error:
                raise ReplayRefused(
                    f"{file}, line {number}: not a line of a journal ({error}): name another file"
                ) from None
            if event.seq <= found.get(event.shard, 0):
                raise ReplayRefused(f"{file}, line {number}: the events are not in order: name another file")
            found[event.shard] = event.last_seq
    return found


class WrittenTopic(NamedTuple):
    """The contents of a topic of events: the last seq of each shard, without empty shards, and the filters
    recorded with the first record of each of them (None: not recorded), and with some of the last.
    """

    seqs: dict[int, int]
    filters: dict[int, list[Filters | None]]


async def written_topic(kafka: str, name: str, shards: int) -> WrittenTopic:
    """Reads the first and the last records of each shard in a topic of events; raises ReplayRefused when they
    are not events.
    """
    found = WrittenTopic({}, {})
    async with open_reader(kafka, name) as reader:
        for shard in range(shards):
            beginning, end = await reader.beginning(shard), await reader.end(shard)
            # A transaction's marker has an offset, too, so the last offset may have no record.
            start = max(end - LAST_RECORDS, beginning)
            if start == end:
                continue
            appended: list[Filters] = []
            async with aclosing(reader.read(shard, start, end)) as lists:
                async for records in lists:
                    for record in records:
                        found.seqs[shard] = max(found.seqs.get(shard, 0), _seq_of(name, shard, record))
                        # Also if another replay has appended it after those of the first record.
                        if (recorded := _filters_of(name, record)) is not None:
                            appended.append(recorded)
            async with aclosing(reader.read(shard, beginning, end)) as lists:
                async for records in lists:
                    if records:
                        found.filters[shard] = [_filters_of(name, records[0]), *appended]
                        break
    return found


def _seq_of(topic: str, shard: int, record: Any) -> int:
    headers = dict(record.headers)
    written_shard, dash, seq = (headers.get("ce_id") or b"").partition(b"-")
    if not (dash and written_shard == b"%d" % shard and seq.isdigit() and len(seq) <= 18):
        raise ReplayRefused(
            f"topic {topic} has a record that is not an event of shard {shard} (offset {record.offset}): "
            "name another topic"
        )
    return int(seq)


def _filters_of(topic: str, record: Any) -> Filters | None:
    recorded = dict(record.headers).get(FILTERS_HEADER)
    try:
        return None if recorded is None else decode_filters(recorded)
    except ValueError as error:
        raise ReplayRefused(
            f"topic {topic} has a header {FILTERS_HEADER} that no replay has written "
            f"(offset {record.offset}: {error}): name another topic"
        ) from None


async def check_topic(kafka: str, system: Topics, name: str, shards: int, append: bool) -> bool:
    """Whether the topic exists; raises ReplayRefused if it is the system's, or cannot take the events."""
    if name in retention_ms(system):
        raise ReplayRefused(f"topic {name} belongs to the system: name another")
    partitions = await partitions_of(kafka, name)
    if not partitions:
        return False
    if len(partitions) != shards:
        raise ReplayRefused(
            f"topic {name} has {counted(len(partitions), 'partitions')}, but each of the {shards} "
            "shards needs one: name another"
        )
    if not append and await begun_shards(kafka, name, shards):
        raise ReplayRefused(
            f"topic {name} contains records: name another, delete it, add --continue to write what it lacks, "
            "or --append (readers recognise repeats by ce_id)"
        )
    return True


async def begun_shards(kafka: str, name: str, shards: int) -> set[int]:
    """The shards that have records in a topic."""
    async with open_reader(kafka, name) as reader:
        return {shard for shard in range(shards) if await reader.end(shard) > await reader.beginning(shard)}
