"""The source of a rebuild: the events between two known cursors of a shard, from the journal or, when that is
gone, from the audit trail. Records set aside by operators for the live version are skipped, or read again.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Final, NamedTuple

from grabstream.models.journal import Corrupt, Cursor, Gap
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.tables import set_aside
from grabstream.projections.tables.set_aside import SetAsideRecord
from grabstream.streams.follower import Chunk
from grabstream.streams.history.archive import BadArchive
from grabstream.streams.history.archive_source import ArchiveSource, archived_chunks, open_archive_source
from grabstream.streams.history.chunks import Point, up_to
from grabstream.streams.history.sources import Source, open_source
from grabstream.streams.history.stores import Store

#: How long the audit trail may lag behind the live version of the read model that is rebuilt from it.
AUDIT_LAG_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.05


class RebuildStopped(Exception):
    """A rebuild cannot or should not be done; the text states the reason and the fix."""


class UnreadableSource(RebuildStopped):
    """The source contradicts itself, or lacks events that the rebuild needs; the text states where."""


class Servers(NamedTuple):
    """The system whose read models are rebuilt: `kafka` bootstrap servers, `journal` topic, `postgres` DSN,
    main schema, number of shards, prefix.
    """

    kafka: str
    journal: str
    postgres: str
    schema: str
    shards: int
    prefix: str = ""


class RebuildSource:
    """A source, and a function that loads the records set aside for the live version, if these are
    skipped.
    """

    def __init__(
        self, source: Source, load_set_aside: Callable[[], Awaitable[list[SetAsideRecord]]] | None
    ) -> None:
        self._source = source
        self._load_set_aside = load_set_aside

    @property
    def name(self) -> str:
        """`journal` or `audit`. An archive is the older part of the journal, and a build may continue from
        either.
        """
        return "audit" if self._source.name == "audit" else "journal"

    @property
    def archive(self) -> Store | None:
        """The place of the archive that is read before the journal, if any."""
        return self._source.archive.store if isinstance(self._source, ArchiveSource) else None

    @property
    def skips_set_aside(self) -> bool:
        """Whether records that were set aside are skipped."""
        return self._load_set_aside is not None

    async def set_aside(self) -> list[SetAsideRecord]:
        """The records to skip, of all shards."""
        return await self._load_set_aside() if self._load_set_aside else []

    async def end(self, shard: int) -> Cursor | None:
        """The source's present end as a target; None for the audit trail, which has no offsets."""
        return Cursor(next_offset=await self._source.end(shard)) if self.name == "journal" else None

    def chunks(
        self, shard: int, cursor: Cursor, target: Cursor, skipped: Sequence[SetAsideRecord] = ()
    ) -> AsyncGenerator[Chunk, None]:
        """The events between two cursors, in order, without those of `skipped`.

        Raises UnreadableSource when they do not lead from one to the other.
        """
        if isinstance(self._source, ArchiveSource):
            return self._read_archive(self._source, shard, cursor, target, skipped)
        read = self._read_journal if self.name == "journal" else self._read_audit_trail
        return read(shard, cursor, target, skipped)

    async def _read_archive(
        self,
        source: ArchiveSource,
        shard: int,
        cursor: Cursor,
        target: Cursor,
        skipped: Sequence[SetAsideRecord],
    ) -> AsyncGenerator[Chunk, None]:
        """The archive up to the target, or all of it and then the journal. Where the archive reaches the
        target's seq and hash, the target's offset is taken over.
        """
        end = source.archive.end(shard)
        if target.seq == 0 < target.term and target.next_offset <= end.next_offset:
            # A live read model without events: before it are markers only, which no archive has.
            yield Chunk(shard, cursor, target, [], 0)
            return
        if not 0 < target.seq <= end.seq:
            async with aclosing(self._read_journal(shard, cursor, target, skipped)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        try:
            read = up_to(archived_chunks(source.archive, shard, cursor, skipped), Point(seq=target.seq))
            async with aclosing(read) as chunks:
                async for chunk in chunks:
                    cursor = chunk.after
                    if cursor.seq < target.seq:
                        yield chunk
                    elif cursor[:2] == target[:2]:
                        yield chunk._replace(after=target)
        except Corrupt as error:
            raise UnreadableSource(str(error)) from None
        if cursor[:2] != target[:2]:
            raise UnreadableSource(
                f"archive {source.archive.store}, shard {shard}: it has another history at seq "
                f"{target.seq} than the live read model"
            )
        yield Chunk(shard, target, target, [], 0)

    async def _read_journal(
        self, shard: int, cursor: Cursor, target: Cursor, skipped: Sequence[SetAsideRecord]
    ) -> AsyncGenerator[Chunk, None]:
        end = await self._source.end(shard)
        if target.next_offset > end:
            raise UnreadableSource(
                f"journal, shard {shard}: it ends at offset {end}, the live read model is at "
                f"{target.next_offset}: records were lost, or "
                "it is another journal; read the audit trail instead (--from audit)"
            )
        try:
            start = self._source.between(cursor, target)
            async with aclosing(self._source.chunks(shard, start, skipped)) as chunks:
                async for chunk in chunks:
                    cursor = chunk.after
                    yield chunk
        except BadArchive as error:
            raise UnreadableSource(str(error)) from None
        except (Corrupt, Gap) as error:
            raise UnreadableSource(
                f"journal, shard {shard}, after seq {cursor.seq}, offset {cursor.next_offset}: {error}"
            ) from None

    async def _read_audit_trail(
        self, shard: int, cursor: Cursor, target: Cursor, skipped: Sequence[SetAsideRecord]
    ) -> AsyncGenerator[Chunk, None]:
        """The trail has no offsets: where it reaches the target's seq and hash, the target's are taken over.
        The offset of a cursor before that is only the progress of this build.
        """
        deadline = time.monotonic() + AUDIT_LAG_SECONDS
        while True:
            start = self._source.between(cursor, target)
            start = start._replace(end=min(start.end, await self._source.end(shard)))
            try:
                async with aclosing(self._source.chunks(shard, start, skipped)) as chunks:
                    async for chunk in chunks:
                        cursor = chunk.after
                        if cursor.seq < target.seq:
                            yield chunk
                        elif cursor.head == target.head:
                            yield chunk._replace(after=target)
            except (Corrupt, Gap) as error:
                raise UnreadableSource(str(error)) from None
            # While events arrive, the audit trail may lag behind the target for a moment.
            if cursor.seq >= target.seq or time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_SECONDS)
        if (cursor.seq, cursor.head) != (target.seq, target.head):
            raise UnreadableSource(
                f"audit trail, shard {shard}: its seq {cursor.seq} does not lead to seq {target.seq} of the "
                "live read model" + ("" if cursor.seq < target.seq else ": another history")
            )
        yield Chunk(shard, target, target, [], 0)


@asynccontextmanager
async def open_rebuild_source(
    name: str, where: Servers, skip_set_aside_of: str | None = None, archive: Store | None = None
) -> AsyncIterator[RebuildSource]:
    """The source `journal` or `audit`, with connections that are closed at the end. With `archive`,
    its lines are read before the journal; raises UnreadableSource if it is damaged or of another system.

    `skip_set_aside_of` names the projection whose set-aside records are skipped.
    """
    async with AsyncExitStack() as stack:
        books = None
        if name == "audit" or skip_set_aside_of:
            books = await stack.enter_async_context(await connect(where.postgres, where.schema))
            await use_schema(books, where.schema)
        # Both ends are known cursors, so the journal proves itself. A rebuild waits for Kafka without bound.
        source: Source
        if archive is None:
            opened = open_source(name, where.kafka, where.journal, books, patience_seconds=None)
            source = await stack.enter_async_context(opened)
        else:
            try:
                source = await stack.enter_async_context(
                    open_archive_source(
                        archive, where.prefix, where.shards, where.kafka, where.journal, patience_seconds=None
                    )
                )
            except BadArchive as error:
                raise UnreadableSource(str(error)) from None
        load = partial(set_aside.load, books, skip_set_aside_of) if books and skip_set_aside_of else None
        yield RebuildSource(source, load)
