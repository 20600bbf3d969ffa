"""Where a rebuild reads events from: the journal in Kafka, or, when that is gone, the audit trail in
PostgreSQL.

Both give the same: for a shard, from a cursor up to another one that is known, what follows with the chain
verified. Both go past what operators had set aside for the live version, when they are told to; else it is
read again.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from psycopg import AsyncConnection

from grabstream.lua.ending import end
from grabstream.models.events import decode_event_list
from grabstream.models.journal import Corrupt, Cursor, Gap, chain
from grabstream.projections.cursors import Fact, facts_of
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.records import set_aside
from grabstream.projections.records.set_aside import SetAside
from grabstream.streams.journal import JournalReader, Record, open_reader
from grabstream.streams.projecting.projector import Decoded

AUDIT_ROWS: Final = 2_000
#: How long the audit trail may be behind the live version of what is rebuilt from it.
AUDIT_LAG_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.05


class RebuildRefused(Exception):
    """What was asked cannot be done, or should not be; the text says why and the way out."""


class Unreadable(RebuildRefused):
    """The source contradicts itself, or has not what was asked of it; the text says where."""


class Piece(NamedTuple):
    """Events of a shard that follow each other, and the cursor behind them."""

    shard: int
    after: Cursor
    facts: Sequence[Fact]


#: Asks what the live version was let past, in all shards.
Aside = Callable[[], Awaitable[list[SetAside]]]


class Source(Protocol):
    """What a rebuild reads. `aside` is None when it reads what was set aside again."""

    name: str
    aside: Aside | None

    def pieces(
        self, shard: int, cursor: Cursor, target: Cursor, aside: Sequence[SetAside] = ()
    ) -> AsyncGenerator[Piece, None]:
        """What lies between two cursors, in order, without what is set aside.

        Raises Unreadable when it does not lead from the one to the other.
        """
        ...

    async def end(self, shard: int) -> Cursor | None:
        """A target as far as the source goes, or None when it cannot tell offsets."""
        ...


class JournalSource:
    """The journal; a target is reached at its offset."""

    name = "journal"

    def __init__(self, reader: JournalReader, aside: Aside | None = None) -> None:
        self._reader = reader
        self.aside = aside

    async def end(self, shard: int) -> Cursor | None:
        """The journal's end: only its offset is known beforehand."""
        return Cursor(next_offset=await self._reader.end(shard))

    async def pieces(
        self, shard: int, cursor: Cursor, target: Cursor, aside: Sequence[SetAside] = ()
    ) -> AsyncGenerator[Piece, None]:
        """See Source."""
        aside = [one for one in aside if one.shard == shard]
        end = await self._reader.end(shard)
        if target.next_offset > end:
            raise Unreadable(
                f"journal, shard {shard}: it ends at offset {end}, the live read model is at "
                f"{target.next_offset}: records were lost, or "
                "it is another journal; read the audit trail instead (--from audit)"
            )
        try:
            async with aclosing(self._reader.read(shard, cursor.next_offset, target.next_offset)) as lists:
                async for records in lists:
                    for record in records:
                        cursor, facts = _taken(cursor, record, aside)
                        yield Piece(shard, cursor, _without(facts, aside))
        except (Corrupt, Gap) as error:
            raise Unreadable(
                f"journal, shard {shard}, behind seq {cursor.seq}, offset {cursor.next_offset}: {error}"
            ) from None


def _taken(cursor: Cursor, record: Record, aside: Sequence[SetAside]) -> tuple[Cursor, list[Fact]]:
    """The cursor behind a record and the record's news; when it cannot be taken but is set aside, the cursor
    behind it all the same.
    """
    try:
        decoded = Decoded(record)
        after, accepted = cursor.feed(record.offset, decoded.block)
        return after, decoded.facts[-len(accepted) :] if accepted else []
    except (Corrupt, Gap):
        for one in aside:
            if (one.journal_offset, one.first_seq) == (record.offset, cursor.seq + 1):
                return one.after, []
        raise


def _without(facts: list[Fact], aside: Sequence[SetAside]) -> list[Fact]:
    for one in aside:
        facts = [fact for fact in facts if not one.first_seq <= fact.event.seq <= one.last_seq]
    return facts


class AuditSource:
    """The audit trail; it knows no offsets, so a target's are taken over where its seq and hash are
    reached.
    """

    name = "audit"

    def __init__(self, connection: AsyncConnection[Any], aside: Aside | None = None) -> None:
        self._connection = connection
        self.aside = aside

    async def end(self, shard: int) -> Cursor | None:
        """Unknown: the audit trail has no offsets."""
        return None

    async def pieces(
        self, shard: int, cursor: Cursor, target: Cursor, aside: Sequence[SetAside] = ()
    ) -> AsyncGenerator[Piece, None]:
        """See Source."""
        aside = [one for one in aside if one.shard == shard]
        deadline = time.monotonic() + AUDIT_LAG_SECONDS
        while True:
            async with aclosing(audit_lines(self._connection, shard, cursor, target.seq)) as lists:
                async for after, lines, hashes in lists:
                    facts = _without(_facts(shard, after.seq - len(lines) + 1, lines, hashes), aside)
                    cursor = after
                    # Only the last cursor has an offset, the target's: one in between only says how far this
                    # build is.
                    if cursor.seq < target.seq:
                        yield Piece(shard, cursor, facts)
                    elif cursor.head == target.head:
                        yield Piece(shard, target, facts)
            # While events come, the audit trail may be a moment behind the target.
            if cursor.seq >= target.seq or time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_SECONDS)
        if (cursor.seq, cursor.head) != (target.seq, target.head):
            raise Unreadable(
                f"audit trail, shard {shard}: its seq {cursor.seq} does not lead to seq {target.seq} of the "
                "live read model" + ("" if cursor.seq < target.seq else ": another history")
            )
        yield Piece(shard, target, [])


async def audit_lines(
    connection: AsyncConnection[Any], shard: int, cursor: Cursor, to_seq: int
) -> AsyncGenerator[tuple[Cursor, list[bytes], list[bytes]], None]:
    """The audit trail's events behind a cursor in lists of bounded size, with their hashes and the cursor
    behind each list.

    The chain is verified; raises Unreadable at a gap or a wrong hash.
    """
    while cursor.seq < to_seq:
        found = await connection.execute(
            "SELECT seq, body, hash FROM audit WHERE shard = %s AND seq > %s AND seq <= %s ORDER BY seq "
            "LIMIT %s",
            (shard, cursor.seq, to_seq, AUDIT_ROWS),
        )
        rows = await found.fetchall()
        if not rows:
            return
        lines = [body.encode() for _, body, _ in rows]
        hashes = chain(cursor.head, lines)
        for place, (seq, _, hash_) in enumerate(rows):
            if seq != cursor.seq + place + 1:
                raise Unreadable(f"audit trail, shard {shard}: seq {cursor.seq + place + 1} is missing")
            if bytes(hash_) != hashes[place]:
                raise Unreadable(f"audit trail, shard {shard}: the hash of seq {seq} is not that of its text")
        cursor = cursor._replace(seq=rows[-1][0], head=hashes[-1])
        yield cursor, lines, hashes


def _facts(shard: int, first_seq: int, lines: Sequence[bytes], hashes: Sequence[bytes]) -> list[Fact]:
    try:
        events = decode_event_list(b"[" + b",".join(lines) + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Unreadable(
            f"audit trail, shard {shard}: an event from seq {first_seq} on cannot be decoded: {error}"
        ) from None
    if [(event.seq, event.shard) for event in events] != [
        (first_seq + place, shard) for place in range(len(lines))
    ]:
        raise Unreadable(
            f"audit trail, shard {shard}: the events from seq {first_seq} on carry other numbers in their "
            "text"
        )
    return facts_of(lines, hashes, events)


@asynccontextmanager
async def open_source(
    name: str, kafka: str, journal: str, postgres: str, schema: str, past_set_aside_of: str | None = None
) -> AsyncIterator[Source]:
    """The source of a name, `journal` or `audit`, with a connection of its own.

    `past_set_aside_of` names the projection whose set-aside records are gone past.
    """
    async with AsyncExitStack() as stack:
        aside: Aside | None = None
        if name == "audit" or past_set_aside_of:
            connection = await stack.enter_async_context(await connect(postgres, schema))
            await use_schema(connection, schema)
            aside = partial(set_aside.load, connection, past_set_aside_of) if past_set_aside_of else None
        if name == "audit":
            yield AuditSource(connection, aside)
        else:
            yield JournalSource(await stack.enter_async_context(open_reader(kafka, journal)), aside)


async def chunks_of(
    pieces: AsyncGenerator[Piece, None], events: int
) -> AsyncGenerator[tuple[Cursor, list[Fact]], None]:
    """The pieces gathered to chunks of about so many events."""
    facts: list[Fact] = []
    after: Cursor | None = None
    async with aclosing(pieces):
        async for piece in pieces:
            after = piece.after
            facts.extend(piece.facts)
            if len(facts) >= events:
                yield after, facts
                facts, after = [], None
    if after is not None:
        yield after, facts


async def ahead(
    chunks: AsyncGenerator[tuple[Cursor, list[Fact]], None], depth: int
) -> AsyncGenerator[tuple[Cursor, list[Fact]], None]:
    """The chunks, the next ones read and decoded while PostgreSQL takes this one."""
    queue: asyncio.Queue[tuple[Cursor, list[Fact]] | Exception | None] = asyncio.Queue(depth)

    async def fill() -> None:
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    await queue.put(chunk)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    filling = asyncio.create_task(fill())
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        await end([filling])
