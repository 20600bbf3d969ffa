"""The two sources of history: the journal in Kafka and the audit trail in PostgreSQL.

Both return the events of a shard that count, in order, with the chain verified, between any two points or
cursors. Rebuilds, replays and `read_events` read through them.

When read from its beginning, the journal is proved by its chain. A reader that starts in the middle cannot
tell whether a block there counts: a relay that was paused may have written it. So events read from the middle
are compared with the audit trail's hashes before they are handed on. If the two differ, or there is no trail,
the journal is read from its beginning.

A time is searched by the events' own times, which never go back within a shard. Kafka's timestamps are those
of the append, and are not used.
"""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from aiokafka.errors import KafkaTimeoutError, OffsetOutOfRangeError
from psycopg import AsyncConnection
from psycopg.errors import InsufficientPrivilege, UndefinedTable

from grabstream.models.journal import Block, Corrupt, Cursor, Gap, chain, is_signed_owner
from grabstream.models.runs import decode_line, decode_lines
from grabstream.models.transfers import transfers_of
from grabstream.projections import cursors
from grabstream.projections.checking import trail
from grabstream.projections.cursors import Fact, are_consecutive, facts_of
from grabstream.projections.tables import set_aside as aside_records
from grabstream.projections.tables.set_aside import SetAsideRecord
from grabstream.streams.follower import Chunk, Decoded, FactsOf, next_chunk
from grabstream.streams.history.chunks import Point
from grabstream.streams.journal import JournalReader, JournalRecord, open_reader

#: The search for a point ends within this many records: reading them is as quick as one more step.
NEAR_RECORDS: Final = 32
AUDIT_SEQS: Final = 2_000
#: How long the broker may return nothing while there are more records.
PATIENCE_SECONDS: Final = 60.0


class Start(NamedTuple):
    """The start and end of a read; `end` is an offset of the journal, or a seq of the audit trail.

    From `proved`, the journal proves itself; before it, the audit trail must vouch. None: it proves itself
    from `cursor`.
    """

    cursor: Cursor
    end: int
    proved: Cursor | None = None


class Source(Protocol):
    """A source of events."""

    #: `journal` or `audit`.
    name: str
    #: What `Chunk.read` and `units` count.
    unit: str

    async def end(self, shard: int) -> int:
        """The present end of a shard, as in `Start.end`."""

    async def start(self, shard: int, first: Point | None) -> Start:
        """Starts at or before the first event of the stretch; at the beginning if `first` is None."""

    async def resume(self, shard: int, cursor: Cursor) -> Start:
        """Starts at a cursor that was verified, and ends at the present end."""

    def between(self, cursor: Cursor, target: Cursor) -> Start:
        """Starts at a cursor that was verified, and ends at another such cursor."""

    def units(self, shard: int, start: Start) -> int:
        """The number of units between start and end."""

    def chunks(
        self, shard: int, start: Start, set_aside: Sequence[SetAsideRecord] = ()
    ) -> AsyncGenerator[Chunk, None]:
        """The events between start and end, without those of `set_aside`. Raises Corrupt or Gap after it has
        yielded the events before the error.
        """


class Lines(NamedTuple):
    """Consecutive lines of a shard with their hashes and last seqs, and the cursor after them."""

    after: Cursor
    lines: Sequence[bytes]
    hashes: Sequence[bytes]
    last_seqs: Sequence[int]


@asynccontextmanager
async def open_source(
    name: str,
    kafka: str,
    journal: str,
    books: AsyncConnection[Any] | None,
    patience_seconds: float | None = PATIENCE_SECONDS,
) -> AsyncIterator[Source]:
    """The source of a name, `journal` or `audit`. `books` is a connection whose unqualified names are the
    system's views: the audit trail is read by it, and the journal is compared with it (None: not compared).
    """
    if name == "audit":
        assert books is not None
        yield AuditSource(books)
    else:
        async with open_reader(kafka, journal) as reader:
            yield JournalSource(reader, books, patience_seconds)


# -- the journal ---------------------------------------------------------------------------------------------


class JournalSource:
    """The journal. Without `books` every read starts at the beginning or at a cursor.

    When the broker returns no records for `patience_seconds` although there are more, reading raises
    KafkaTimeoutError; None waits without bound.
    """

    name = "journal"
    unit = "records"

    def __init__(
        self,
        reader: JournalReader,
        books: AsyncConnection[Any] | None,
        patience_seconds: float | None = PATIENCE_SECONDS,
        facts_of: FactsOf = facts_of,
    ) -> None:
        self._reader = reader
        self._books = books
        self._facts_of = facts_of
        self._patience_seconds = patience_seconds

    async def end(self, shard: int) -> int:
        """The offset after the last record."""
        return await self._reader.end(shard)

    async def resume(self, shard: int, cursor: Cursor) -> Start:
        """See Source."""
        return Start(cursor, await self.end(shard))

    def between(self, cursor: Cursor, target: Cursor) -> Start:
        """See Source; the target is reached at its offset."""
        return Start(cursor, target.next_offset)

    def units(self, shard: int, start: Start) -> int:
        """The number of records."""
        return max(start.end - start.cursor.next_offset, 0)

    async def start(self, shard: int, first: Point | None) -> Start:
        """The beginning, or a block near `first` that the audit trail can prove."""
        end = await self.end(shard)
        if first is None or self._books is None:
            return Start(Cursor(), end)
        proved = (await cursors.load(self._books, "audit")).get(shard)
        if proved is None or proved.seq == 0 or proved.next_offset > end:
            return Start(Cursor(), end)
        newest = await trail.line_at(self._books, shard, proved.seq)
        if newest is None or (newest.last_seq, newest.hash) != proved[:2]:
            return Start(Cursor(), end)
        if first.end_number(decode_line(newest.text)) < first.value:
            return Start(proved, end)
        nearest = await self._block_before(shard, first, proved)
        if nearest is None:
            return Start(Cursor(), end)
        offset, block = nearest
        if await trail.hash_at(self._books, shard, block.first_seq - 1) != block.prev:
            return Start(Cursor(), end)
        return Start(Cursor(block.first_seq - 1, block.prev, offset, block.term, block.owner), end, proved)

    async def _block_before(self, shard: int, first: Point, proved: Cursor) -> tuple[int, Block] | None:
        """The offset and block of a record near a point whose first event lies before it; a binary search."""
        low, high, nearest = 0, proved.next_offset, None
        while high - low > NEAR_RECORDS:
            middle = (low + high) // 2
            probe = await self._next_block(shard, middle, high, is_signed_owner(proved.owner))
            if probe is None or first.event_number(decode_line(probe[1].lines[0])) >= first.value:
                high = middle
            else:
                nearest, low = probe, probe[0] + 1
        return nearest

    async def _next_block(
        self, shard: int, from_offset: int, to_offset: int, is_signed: bool
    ) -> tuple[int, Block] | None:
        """The first block from an offset; where the journal is signed, the first one of a relay."""
        async with aclosing(self._reader.read(shard, from_offset, to_offset)) as lists:
            async for records in lists:
                for record in records:
                    block = self._reader.block(record)
                    is_ignored = block.authority == "forged" or (is_signed and block.authority == "unsigned")
                    if block.count and not is_ignored:
                        return record.offset, block
        return None

    async def chunks(
        self, shard: int, start: Start, set_aside: Sequence[SetAsideRecord] = ()
    ) -> AsyncGenerator[Chunk, None]:
        """See Source. Each record is a chunk."""
        set_aside = [record for record in set_aside if record.shard == shard]
        cursor, handed_on_seq = start.cursor, start.cursor.seq
        if start.proved is not None:
            try:
                async with aclosing(self._vouched(shard, cursor, start.proved, set_aside)) as vouched:
                    async for chunk in vouched:
                        handed_on_seq = chunk.after.seq
                        yield chunk
                cursor = start.proved
            except (Corrupt, Gap):
                cursor = Cursor()
        async with aclosing(self._lists(shard, cursor.next_offset, start.end)) as lists:
            async for records in lists:
                for chunk in _follow(self._reader, cursor, records, set_aside, self._facts_of):
                    cursor = chunk.after
                    repeated = bisect_right(chunk.facts, handed_on_seq, key=_seq)
                    yield chunk._replace(facts=chunk.facts[repeated:]) if repeated else chunk

    async def lines(self, shard: int, cursor: Cursor, end: int) -> AsyncGenerator[Lines, None]:
        """The lines from a cursor that was verified to offset `end`, chained but not decoded. Raises Gap or
        Corrupt after it has yielded the lines before the error.
        """
        async with aclosing(self._lists(shard, cursor.next_offset, end)) as lists:
            async for records in lists:
                for record in records:
                    block = Decoded(record, self._reader.block(record)).block
                    cursor, accepted = cursor.feed(record.offset, block)
                    # The accepted lines are always the end of the block.
                    known = len(block.lines) - len(accepted)
                    yield Lines(cursor, block.lines[known:], block.hashes[known:], block.last_seqs[known:])

    async def _vouched(
        self, shard: int, cursor: Cursor, proved: Cursor, set_aside: Sequence[SetAsideRecord]
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks between a cursor and a proved one. Raises Corrupt or Gap before it yields anything that
        the audit trail does not have.
        """
        assert self._books is not None
        async with aclosing(self._lists(shard, cursor.next_offset, proved.next_offset)) as lists:
            async for records in lists:
                chunks = list(_follow(self._reader, cursor, records, set_aside, self._facts_of))
                after = chunks[-1].after
                if await trail.hash_at(self._books, shard, after.seq) != after.head:
                    raise Corrupt(f"the audit trail has another history at seq {after.seq}")
                for chunk in chunks:
                    cursor = chunk.after
                    yield chunk
        if cursor.seq != proved.seq:
            raise Gap(f"the events after seq {cursor.seq} are missing")

    async def _lists(self, shard: int, offset: int, end: int) -> AsyncGenerator[list[JournalRecord], None]:
        """The records between two offsets, in lists as they arrive."""
        async with aclosing(self._reader.read(shard, offset, end)) as lists:
            while True:
                try:
                    # The reader itself would wait longer.
                    async with asyncio.timeout(self._patience_seconds):
                        records = await anext(lists, None)
                except TimeoutError:
                    raise KafkaTimeoutError(
                        f"no records of shard {shard} within {self._patience_seconds:.0f} s, although the "
                        "journal has more"
                    ) from None
                except OffsetOutOfRangeError:
                    beginning = await self._reader.beginning(shard)
                    raise Gap(
                        f"the journal begins at offset {beginning}, after offset {offset}: older records "
                        "were deleted; read them from an archive, or from the audit trail"
                    ) from None
                if records is None:
                    return
                offset = records[-1].offset + 1
                yield records


def _follow(
    reader: JournalReader,
    cursor: Cursor,
    records: Sequence[JournalRecord],
    set_aside: Sequence[SetAsideRecord],
    facts_of: FactsOf,
) -> Iterator[Chunk]:
    """A chunk for each record that follows a cursor; raises Corrupt or Gap."""
    for record in records:
        try:
            chunk = next_chunk(cursor, record, Decoded(record, reader.block(record)), facts_of)
        except (Corrupt, Gap):
            skipped = _after_set_aside(cursor, record, set_aside)
            if skipped is None:
                raise
            chunk = Chunk(record.shard, cursor, skipped, [], 1)
        yield chunk._replace(facts=without(chunk.facts, set_aside)) if set_aside else chunk
        cursor = chunk.after


def _after_set_aside(
    cursor: Cursor, record: JournalRecord, set_aside: Sequence[SetAsideRecord]
) -> Cursor | None:
    """The cursor after a record that was set aside; None if it was not."""
    for skipped in set_aside:
        if (skipped.journal_offset, skipped.first_seq) == (record.offset, cursor.seq + 1):
            return skipped.after
    return None


def without(facts: Sequence[Fact], set_aside: Sequence[SetAsideRecord]) -> Sequence[Fact]:
    """The facts whose events were not set aside."""
    for skipped in set_aside:
        facts = [fact for fact in facts if not skipped.first_seq <= fact.event.seq <= skipped.last_seq]
    return facts


def _seq(fact: Fact) -> int:
    return fact.event.seq


def require_journal_end(shard: int, cursor: Cursor, end: int) -> None:
    """Raises Gap if the journal of a shard ends before a cursor: to wait for more would be silent."""
    if end < cursor.next_offset:
        raise Gap(
            f"the journal has lost its end: shard {shard} ends at offset {end}, and the cursor is at offset "
            f"{cursor.next_offset}. `grabstream doctor` names what repairs it"
        )


# -- the audit trail -----------------------------------------------------------------------------------------


class AuditSource:
    """The audit trail in PostgreSQL: the same lines, readable without Kafka. `books` reads the views of the
    system.

    Its cursors have no offsets, so reading cannot resume from them in the journal.
    """

    name = "audit"
    unit = "events"

    def __init__(self, books: AsyncConnection[Any]) -> None:
        self._books = books

    async def end(self, shard: int) -> int:
        """The last seq."""
        return (await trail.ends(self._books, shard))[1]

    async def resume(self, shard: int, cursor: Cursor) -> Start:
        """See Source."""
        return Start(cursor, await self.end(shard))

    def between(self, cursor: Cursor, target: Cursor) -> Start:
        """See Source; the target is reached at its seq."""
        return Start(cursor, target.seq)

    def units(self, shard: int, start: Start) -> int:
        """The number of events."""
        return max(start.end - start.cursor.seq, 0)

    async def start(self, shard: int, first: Point | None) -> Start:
        """The event before `first`; raises Gap when the trail does not have it."""
        end = await self.end(shard)
        seq = 0
        if first is not None:
            if first.seq is None:
                seq = await trail.last_seq_before(self._books, shard, first.value)
            else:
                line = await trail.line_at(self._books, shard, first.seq)
                seq = (first.seq if line is None else line.seq) - 1
            seq = max(min(seq, end), 0)
        head = await trail.hash_at(self._books, shard, seq)
        if head is None:
            raise await self._missing(shard, seq)
        return Start(Cursor(seq, head), end)

    async def chunks(
        self, shard: int, start: Start, set_aside: Sequence[SetAsideRecord] = ()
    ) -> AsyncGenerator[Chunk, None]:
        """See Source. A chunk has up to 2,000 events."""
        set_aside = [record for record in set_aside if record.shard == shard]
        cursor = start.cursor
        async with aclosing(self.lines(shard, cursor, start.end)) as lists:
            async for after, lines, hashes, _ in lists:
                facts, error = decode_verified(
                    f"audit trail, shard {shard}", shard, cursor.seq + 1, lines, hashes
                )
                if error is not None:
                    if facts:
                        before_error = cursor._replace(seq=facts[-1].event.last_seq, head=facts[-1].hash)
                        yield Chunk(shard, cursor, before_error, without(facts, set_aside), len(facts))
                    raise error
                yield Chunk(shard, cursor, after, without(facts, set_aside), len(lines))
                cursor = after

    async def lines(self, shard: int, cursor: Cursor, end: int) -> AsyncGenerator[Lines, None]:
        """The lines from a cursor to seq `end`, chained but not decoded. Raises Gap or Corrupt after it has
        yielded the lines before the error.
        """
        while cursor.seq < end:
            rows = await trail.lines(self._books, shard, cursor.seq, min(AUDIT_SEQS, end - cursor.seq))
            lines = [row.text for row in rows]
            hashes = chain(cursor.head, lines)
            good, seq = 0, cursor.seq
            for row, hash_ in zip(rows, hashes, strict=True):
                if (row.seq, row.hash) != (seq + 1, hash_):
                    break
                good, seq = good + 1, row.last_seq
            if good:
                cursor = cursor._replace(seq=seq, head=hashes[good - 1])
                yield Lines(cursor, lines[:good], hashes[:good], [row.last_seq for row in rows[:good]])
            if good == len(rows) > 0:
                continue
            if good == len(rows) or rows[good].seq != cursor.seq + 1:
                raise await self._missing(shard, cursor.seq + 1)
            raise Corrupt(
                f"audit trail, shard {shard}: the hash of seq {cursor.seq + 1} is not that of its text"
            )

    async def _missing(self, shard: int, seq: int) -> Gap:
        """What is raised at an event that the trail lacks; it names the way out if operators set it aside."""
        words = f"audit trail, shard {shard}: seq {seq} is missing"
        with suppress(InsufficientPrivilege, UndefinedTable):
            for record in await aside_records.load(self._books, "audit"):
                if record.has(shard, seq):
                    words += (
                        f": {record.operator} has set it aside ({record.reason}). Read the journal instead, "
                        "which has it, or run `grabstream rebuild audit` once the cause is removed"
                    )
        return Gap(words)


def decode_verified(
    where: str, shard: int, first_seq: int, lines: Sequence[bytes], hashes: Sequence[bytes]
) -> tuple[list[Fact], Corrupt | None]:
    """Lines as facts, up to the first that cannot be decoded, and the error there, which names `where`."""
    try:
        events = decode_lines(b"[" + b",".join(lines) + b"]")
        if are_consecutive(shard, first_seq - 1, events):
            return facts_of(lines, hashes, events), None
    except msgspec.DecodeError:
        pass  # the loop below finds the line
    facts: list[Fact] = []
    seq = first_seq
    for line, hash_ in zip(lines, hashes, strict=True):
        try:
            event = decode_line(line)
        except msgspec.DecodeError as error:
            return facts, Corrupt(f"{where}: the event of seq {seq} cannot be decoded: {error}")
        if (event.shard, event.seq) != (shard, seq):
            return facts, Corrupt(
                f"{where}: the text of seq {seq} has other numbers: shard {event.shard}, seq {event.seq}"
            )
        facts.append(Fact(line, hash_, event, transfers_of(event)))
        seq = event.last_seq + 1
    return facts, None
