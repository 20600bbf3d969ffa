"""An archive as a source of history: its lines, and after them the rest of the journal. The journal may lack
what the archive has.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final, NamedTuple

from grabstream.models.journal import Corrupt, Cursor
from grabstream.projections.cursors import Fact
from grabstream.projections.tables.set_aside import SetAsideRecord
from grabstream.streams.follower import Chunk
from grabstream.streams.history.archive import Archive, ArchivedFile, ArchiveSystem, BadArchive, open_archive
from grabstream.streams.history.chunks import Point
from grabstream.streams.history.sources import (
    PATIENCE_SECONDS,
    JournalSource,
    Start,
    decode_verified,
    without,
)
from grabstream.streams.history.stores import Store, in_thread
from grabstream.streams.journal import open_reader
from grabstream.streams.topic_ids import find_topic

#: Lines that are decoded at once.
CHUNK_LINES: Final = 500


class ArchiveSource:
    """An archive, and the journal after it.

    A cursor within the archive has the offset where reading began: only its seq and hash are valid there. The
    cursor after the archive's last line is the one that was exported.
    """

    name = "archive"
    unit = "lines and records"

    def __init__(self, archive: Archive, journal: JournalSource) -> None:
        self.archive = archive
        self._journal = journal

    async def end(self, shard: int) -> int:
        """The end of the journal; see Source."""
        return await self._journal.end(shard)

    async def resume(self, shard: int, cursor: Cursor) -> Start:
        """See Source."""
        return Start(cursor, await self.end(shard))

    def between(self, cursor: Cursor, target: Cursor) -> Start:
        """See Source; for a target after the archive."""
        return Start(cursor, target.next_offset)

    def units(self, shard: int, start: Start) -> int:
        """The number of lines in files to be read, and of records after them."""
        lines = sum(file.lines for file in self.archive.files(shard, start.cursor.seq))
        offset = max(start.cursor.next_offset, self.archive.end(shard).next_offset)
        return lines + max(start.end - offset, 0)

    async def start(self, shard: int, first: Point | None) -> Start:
        """The beginning, or the beginning of a file with the first event of the stretch."""
        end = await self.end(shard)
        if first is None:
            return Start(Cursor(), end)
        for file in self.archive.files(shard):
            if (file.last_at if first.seq is None else file.last_seq) >= first.value:
                return Start(Cursor(file.first_seq - 1, bytes.fromhex(file.prev)), end)
        return Start(self.archive.end(shard), end)

    async def chunks(
        self, shard: int, start: Start, set_aside: Sequence[SetAsideRecord] = ()
    ) -> AsyncGenerator[Chunk, None]:
        """See Source."""
        cursor = start.cursor
        async with aclosing(archived_chunks(self.archive, shard, cursor, set_aside)) as chunks:
            async for chunk in chunks:
                cursor = chunk.after
                yield chunk
        end = self.archive.end(shard)
        if cursor.next_offset < end.next_offset:
            # No line led to the end: the cursor is from the audit trail, or the shard had no events. The
            # journal need not have what is before the archive's end.
            before = cursor
            cursor = before._replace(next_offset=end.next_offset, term=end.term, owner=end.owner)
            yield Chunk(shard, before, cursor, [], 0)
        rest = self._journal.chunks(shard, start._replace(cursor=cursor, proved=None), set_aside)
        async with aclosing(rest) as chunks:
            async for chunk in chunks:
                yield chunk


async def archived_chunks(
    archive: Archive, shard: int, cursor: Cursor, set_aside: Sequence[SetAsideRecord] = (),
    undecodable: Sequence[SetAsideRecord] | None = None,
) -> AsyncGenerator[Chunk, None]:  # fmt: skip
    """The events of an archive after a cursor, without those of `set_aside`. Raises BadArchive, or Corrupt if
    the cursor is of another history, before it yields anything of the file.

    A line that cannot be decoded is a chunk without facts, if it is in one of the records `undecodable` (as a
    rule those of `set_aside`).
    """
    skipped = set_aside if undecodable is None else undecodable
    set_aside = [record for record in set_aside if record.shard == shard]
    end = archive.end(shard)

    def may_skip(seq: int, exported_as_text: bool) -> bool:
        return any(record.has(shard, seq) for record in skipped)

    for file in archive.files(shard, cursor.seq):
        content = await in_thread(archive.content_of, file)
        at = Cursor(file.first_seq - 1, bytes.fromhex(file.prev), *cursor[2:])
        # Parsed here: threads of Arrow abort a process that ends while they work.
        for facts, seq, head in parts_in(archive, file, content, may_skip):
            before, at = at, at._replace(seq=seq, head=head)
            if seq <= cursor.seq:
                continue
            known = sum(fact.event.last_seq <= cursor.seq for fact in facts)
            if known:
                before = before._replace(seq=facts[known - 1].event.last_seq, head=facts[known - 1].hash)
            if before[:2] != cursor[:2]:
                where = archive.store.where(file.path)
                raise Corrupt(f"archive, {where}: another history at seq {cursor.seq}, where the reader is")
            facts = facts[known:]
            is_end = at.seq == end.seq and end.next_offset >= at.next_offset
            after = end if is_end else at
            yield Chunk(shard, cursor, after, without(facts, set_aside), len(facts) or 1)
            cursor = after


class ArchivedPart(NamedTuple):
    """Consecutive lines of a file, and the seq and hash after them. Without facts: one line that cannot be
    decoded, and was set aside.
    """

    facts: list[Fact]
    seq: int
    head: bytes


def parts_in(
    archive: Archive, file: ArchivedFile, content: bytes, may_skip: Callable[[int, bool], bool]
) -> Iterator[ArchivedPart]:
    """The lines in the bytes of a file, up to CHUNK_LINES at a time; raises BadArchive if they differ from
    the manifest, or at a line that cannot be decoded, unless `may_skip` says so of its seq, and of whether it
    was exported as text only.
    """
    where = f"archive, {archive.store.where(file.path)}"
    lines, hashes = archive.lines_of(file, content)
    places: dict[int, tuple[int, bool]] = {}
    seq, done = file.first_seq, 0
    while done < len(lines):
        part = slice(done, done + CHUNK_LINES)
        facts, error = decode_verified(where, file.shard, seq, lines[part], hashes[part])
        if facts:
            done += len(facts)
            yield ArchivedPart(facts, facts[-1].event.last_seq, facts[-1].hash)
            seq = facts[-1].event.last_seq + 1
        if error is not None:
            places = places or archive.places_of(content)
            last_seq, as_text = places.get(seq, (seq, False))
            if not may_skip(seq, as_text):
                raise BadArchive(str(error))
            yield ArchivedPart([], last_seq, hashes[done])
            seq, done = last_seq + 1, done + 1


@asynccontextmanager
async def open_archive_source(
    store: Store, prefix: str, shards: int, kafka: str, journal: str,
    patience_seconds: float | None = PATIENCE_SECONDS,
) -> AsyncIterator[ArchiveSource]:  # fmt: skip
    """The archive in a store, and the journal after it; raises BadArchive like `open_archive_of_journal`."""
    archive = await open_archive_of_journal(store, prefix, shards, kafka, journal)
    async with open_reader(kafka, journal) as reader:
        yield ArchiveSource(archive, JournalSource(reader, None, patience_seconds))


async def open_archive_of_journal(
    store: Store, prefix: str, shards: int, kafka: str, journal: str
) -> Archive:
    """The archive in a store; raises BadArchive if it is damaged, or not of the system that has this
    journal.
    """
    topic = await find_topic(kafka, journal)
    system = ArchiveSystem(prefix, "" if topic is None else topic.id, shards)
    return await in_thread(open_archive, store, system)
