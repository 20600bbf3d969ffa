"""History: the events that count, of one shard, in order, from any point up to another, out of the journal or
the audit trail.

From its beginning the journal proves itself by its chain. Who begins in the middle cannot know whether the
block found there counts (a relay that was paused may have written it), so what is read there is compared with
the audit trail's hashes before it is handed on; where the two differ, or without a trail, the journal is read
from its beginning.

A time is looked for among the events' own times, which never go back within a shard; Kafka's times are those
of the append, and are not asked.
"""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from aiokafka.errors import KafkaTimeoutError
from psycopg import AsyncConnection

from grabstream.models.events import AnyEvent, decode_event
from grabstream.models.journal import Block, Corrupt, Cursor, Gap, chain, parse_block
from grabstream.models.transfers import transfers_of
from grabstream.projections import cursors
from grabstream.projections.checking import trail
from grabstream.projections.cursors import Fact
from grabstream.streams.journal import JournalReader, Record
from grabstream.streams.projecting.projector import Decoded

#: How near the search for a point comes, in records: reading so many is as quick as asking once more.
NEAR_RECORDS: Final = 32
TRAIL_LINES: Final = 1_000
#: How long the broker may be silent while there is more to read.
PATIENCE_SECONDS: Final = 60.0


class Point(NamedTuple):
    """An end of a stretch of history that belongs to it: an event by its seq, or a time (ms since 1970 UTC).
    One of the two is given.
    """

    seq: int | None = None
    at: int | None = None

    @property
    def value(self) -> int:
        """The seq, or the time."""
        value = self.at if self.seq is None else self.seq
        assert value is not None
        return value

    def of(self, fact: Fact) -> int:
        """What of an event is compared with `value`."""
        return self.of_event(fact.event)

    def of_event(self, event: AnyEvent) -> int:
        """What of an event is compared with `value`."""
        return event.at if self.seq is None else event.seq


class Chunk(NamedTuple):
    """Consecutive events of a shard, the cursor before them and the one behind them; `read` is how many of
    the source's units it took.
    """

    shard: int
    before: Cursor
    after: Cursor
    facts: Sequence[Fact]
    read: int


class Start(NamedTuple):
    """Where reading begins and where it ends (offset of the journal, seq of the trail).

    `proved` is the first cursor from which on the journal proves itself; without one, `cursor` is that.
    """

    cursor: Cursor
    end: int
    proved: Cursor | None = None


class Source(Protocol):
    """Where events are read from."""

    #: What `Chunk.read` and `units` count.
    unit: str

    async def start(self, shard: int, first: Point | None) -> Start:
        """A place to begin at that no event from `first` on is before; None: the beginning."""

    def units(self, start: Start) -> int:
        """How much there is to read from there."""

    def chunks(self, shard: int, start: Start) -> AsyncGenerator[Chunk, None]:
        """The events from there to the end, as it was when `start` was called. Raises Corrupt or Gap."""


async def up_to(chunks: AsyncGenerator[Chunk, None], last: Point | None) -> AsyncGenerator[Chunk, None]:
    """The chunks up to a point, which is included. The cursor behind the last one is exactly there."""
    async with aclosing(chunks):
        async for chunk in chunks:
            facts = chunk.facts
            end = bisect_right(facts, last.value, key=last.of) if last else len(facts)
            if end == len(facts):
                yield chunk
                continue
            # The offset stays in front of the record: whoever goes on from here needs the rest of it.
            after = (
                chunk.before._replace(seq=facts[end - 1].event.seq, head=facts[end - 1].hash)
                if end
                else chunk.before
            )
            yield chunk._replace(facts=facts[:end], after=after)
            return


class JournalSource:
    """The journal. `books` reads the views of the system (None: always from the beginning)."""

    unit = "records"

    def __init__(self, reader: JournalReader, books: AsyncConnection[Any] | None) -> None:
        self._reader = reader
        self._books = books

    async def resume(self, shard: int, cursor: Cursor) -> Start:
        """Goes on from a cursor that is known to be true."""
        return Start(cursor, await self._reader.end(shard))

    async def start(self, shard: int, first: Point | None) -> Start:
        """The beginning, or a block nearby for which the trail can vouch."""
        end = await self._reader.end(shard)
        if first is None or self._books is None:
            return Start(Cursor(), end)
        proved = (await cursors.load(self._books, "audit")).get(shard)
        if proved is None or proved.seq == 0 or proved.next_offset > end:
            return Start(Cursor(), end)
        newest = await trail.lines(self._books, shard, proved.seq - 1, 1)
        if not newest or newest[0][2] != proved.head:
            return Start(Cursor(), end)
        if first.of_event(decode_event(newest[0][1])) < first.value:
            return Start(proved, end)
        found = await self._before(shard, first, proved.next_offset)
        if found is None or await trail.hash_at(self._books, shard, found[1].first_seq - 1) != found[1].prev:
            return Start(Cursor(), end)
        offset, block = found
        return Start(Cursor(block.first_seq - 1, block.prev, offset, block.term, block.owner), end, proved)

    async def _before(self, shard: int, first: Point, end: int) -> tuple[int, Block] | None:
        """The offset and block of some record near a point whose first event lies before it."""
        low, high, found = 0, end, None
        while high - low > NEAR_RECORDS:
            middle = (low + high) // 2
            probe = await self._next_block(shard, middle, high)
            if probe is None or first.of_event(decode_event(probe[1].lines[0])) >= first.value:
                high = middle
            else:
                found, low = probe, probe[0] + 1
        return found

    async def _next_block(self, shard: int, from_offset: int, to_offset: int) -> tuple[int, Block] | None:
        async with aclosing(self._reader.read(shard, from_offset, to_offset)) as lists:
            async for records in lists:
                for record in records:
                    block = parse_block(record.headers, record.value)
                    if block.count:
                        return record.offset, block
        return None

    def units(self, start: Start) -> int:
        """Records of the partition."""
        return max(start.end - start.cursor.next_offset, 0)

    async def chunks(self, shard: int, start: Start) -> AsyncGenerator[Chunk, None]:
        """A chunk a record."""
        cursor, told = start.cursor, start.cursor.seq
        if start.proved is not None:
            try:
                async with aclosing(self._vouched(shard, cursor, start.proved)) as vouched:
                    async for chunk in vouched:
                        cursor, told = chunk.after, chunk.after.seq
                        yield chunk
                cursor = start.proved
            except (Corrupt, Gap):
                cursor = Cursor()
        async with aclosing(self._lists(shard, cursor, start.end)) as lists:
            async for chunks in lists:
                for chunk in chunks:
                    known = bisect_right(chunk.facts, told, key=_seq)
                    yield chunk._replace(facts=chunk.facts[known:])

    async def _vouched(self, shard: int, cursor: Cursor, proved: Cursor) -> AsyncGenerator[Chunk, None]:
        """What lies before a proved cursor; raises Corrupt or Gap before anything is handed on that the trail
        does not vouch for.
        """
        assert self._books is not None
        async with aclosing(self._lists(shard, cursor, proved.next_offset)) as lists:
            async for chunks in lists:
                after = chunks[-1].after
                if await trail.hash_at(self._books, shard, after.seq) != after.head:
                    raise Corrupt(f"the audit trail has another history at seq {after.seq}")
                for chunk in chunks:
                    cursor = chunk.after
                    yield chunk
        if cursor.seq != proved.seq:
            raise Gap(f"the events behind seq {cursor.seq} were not found")

    async def _lists(self, shard: int, cursor: Cursor, end: int) -> AsyncGenerator[list[Chunk], None]:
        """A list of chunks for each list of records that arrives."""
        async with aclosing(self._reader.read(shard, cursor.next_offset, end)) as lists:
            while (records := await _soon(lists, shard)) is not None:
                chunks = []
                for record in records:
                    chunk = _chunk(cursor, record)
                    cursor = chunk.after
                    chunks.append(chunk)
                yield chunks


async def _soon(lists: AsyncGenerator[list[Record], None], shard: int) -> list[Record] | None:
    """The next records, None behind the last; raises KafkaTimeoutError when the broker gives none: a reader
    would wait for ever.
    """
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await anext(lists, None)
    except TimeoutError:
        raise KafkaTimeoutError(
            f"no records of shard {shard} within {PATIENCE_SECONDS:.0f} s, though there are more"
        ) from None


def _chunk(cursor: Cursor, record: Record) -> Chunk:
    decoded = Decoded(record)
    after, accepted = cursor.feed(record.offset, decoded.block)
    # What is accepted is always the end of the block.
    facts = decoded.facts[-len(accepted) :] if accepted else ()
    return Chunk(record.shard, cursor, after, facts, 1)


class AuditSource:
    """The audit trail in PostgreSQL: the same lines, for when Kafka is not there. `books` reads the views of
    the system.

    Its cursors have no offsets, so what follows it cannot go on from the journal.
    """

    unit = "events"

    def __init__(self, books: AsyncConnection[Any]) -> None:
        self._books = books

    async def resume(self, shard: int, cursor: Cursor) -> Start:
        """Goes on from a cursor that is known to be true."""
        return Start(cursor, (await trail.ends(self._books, shard))[1])

    async def start(self, shard: int, first: Point | None) -> Start:
        """The event before `first`; raises Gap when the trail does not have it."""
        end = (await trail.ends(self._books, shard))[1]
        seq = 0
        if first is not None:
            seq = (
                first.seq - 1
                if first.seq is not None
                else await trail.last_seq_before(self._books, shard, first.value)
            )
            seq = max(min(seq, end), 0)
        head = await trail.hash_at(self._books, shard, seq)
        if head is None:
            raise Gap(f"the audit trail of shard {shard} has no event {seq}")
        return Start(Cursor(seq, head), end)

    def units(self, start: Start) -> int:
        """Events of the shard."""
        return max(start.end - start.cursor.seq, 0)

    async def chunks(self, shard: int, start: Start) -> AsyncGenerator[Chunk, None]:
        """Chunks of a thousand events, chained."""
        cursor = start.cursor
        while cursor.seq < start.end:
            rows = await trail.lines(self._books, shard, cursor.seq, min(TRAIL_LINES, start.end - cursor.seq))
            facts = _facts(shard, cursor, rows)
            after = cursor._replace(seq=facts[-1].event.seq, head=facts[-1].hash)
            yield Chunk(shard, cursor, after, facts, len(facts))
            cursor = after


def _facts(shard: int, cursor: Cursor, rows: Sequence[tuple[int, bytes, bytes]]) -> list[Fact]:
    """Rows of the trail as facts, as far as they follow the cursor; raises Gap or Corrupt when the first one
    does not.
    """
    facts: list[Fact] = []
    hashes = chain(cursor.head, [line for _, line, _ in rows])
    for seq, (row, hash_) in enumerate(zip(rows, hashes, strict=True), cursor.seq + 1):
        try:
            facts.append(_fact(shard, seq, row, hash_))
        except (Corrupt, Gap):
            if not facts:
                raise
            break
    if not facts:
        raise Gap(f"the audit trail of shard {shard} has no event {cursor.seq + 1}")
    return facts


def _fact(shard: int, seq: int, row: tuple[int, bytes, bytes], hash_: bytes) -> Fact:
    if row[0] != seq:
        raise Gap(f"the audit trail of shard {shard} has no event {seq}")
    if row[2] != hash_:
        raise Corrupt(f"the audit trail of shard {shard} contradicts its own chain at seq {seq}")
    try:
        event = decode_event(row[1])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(
            f"the audit trail of shard {shard}, seq {seq}: an event that cannot be decoded: {error}"
        ) from None
    if (event.shard, event.seq) != (shard, seq):
        raise Corrupt(f"the audit trail of shard {shard} has another event's text at seq {seq}")
    return Fact(row[1], hash_, event, transfers_of(event))


def _seq(fact: Fact) -> int:
    return fact.event.seq
