"""The sink that writes an archive (`streams/history/archive.py`): `grabstream export`.

1. A file is built in memory, and stored: it appears whole (`streams/history/stores.py`). The manifest does
   not name it yet, so it does not count.
2. The manifest that names it, with the cursor after its last line, replaces the old one.

A process may end after any step. The next export continues from the cursor in the manifest, and removes the
file that the manifest does not name.
"""

from asyncio import Future, get_running_loop
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from grabstream.models.calendar import DAY_MS
from grabstream.models.journal import Corrupt, Cursor
from grabstream.projections.cursors import Fact
from grabstream.streams.history.archive import (
    FORMAT,
    Archive,
    ArchivedFile,
    ArchiveEnd,
    ArchiveSystem,
    BadArchive,
    Manifest,
    check_files,
    day_of,
    manifest_of,
    unlisted,
)
from grabstream.streams.history.stores import (
    MANIFEST,
    ArchiveInUse,
    CannotRead,
    Store,
    Writing,
    in_thread,
)
from grabstream.streams.projecting.follower import Chunk
from grabstream.streams.replaying.archive_columns import schema, table_of
from grabstream.streams.replaying.sinks import events_in

#: A file ends with the record of the journal that reaches so many bytes of text, and part of a file (a row
#: group) with the one that reaches so many.
FILE_TEXT_BYTES: Final = 32 << 20
PART_TEXT_BYTES: Final = 4 << 20
ZSTD_LEVEL: Final = 3


class Export(NamedTuple):
    """An archive into which this process may write. `left_over` are files of an export that was killed, by
    shard and first seq.
    """

    archive: Archive
    writing: Writing
    left_over: dict[tuple[int, int], list[str]]


@asynccontextmanager
async def exporting(store: Store, system: ArchiveSystem) -> AsyncIterator[Export]:
    """The archive in a store, made if it does not exist; no other process exports into it meanwhile.

    Raises ArchiveInUse, BadArchive if there is other content, or a damaged archive, or one of another system,
    CannotWrite, and StoreError.
    """
    export = await in_thread(_begin, store, system)
    try:
        yield export
    finally:
        export.writing.close()


def _begin(store: Store, system: ArchiveSystem) -> Export:
    writing = store.write()
    try:
        manifest, sizes = _take(store, system, writing)
        archive = Archive(store, manifest)
        check_files(archive, sizes)
        left_over: dict[tuple[int, int], list[str]] = {}
        for left in unlisted(manifest, sizes):
            # An export that was killed leaves one file, which follows the last one.
            if left.first_seq != archive.end(left.shard).seq + 1:
                raise BadArchive(
                    f"archive, {store.where(left.name)}: {MANIFEST} does not name this file, and ends at seq "
                    f"{archive.end(left.shard).seq} of shard {left.shard}: restore the newest {MANIFEST}, or "
                    "move the file away"
                )
            left_over.setdefault((left.shard, left.first_seq), []).append(left.name)
        return Export(archive, writing, left_over)
    except BaseException:
        writing.close()
        raise


def _take(store: Store, system: ArchiveSystem, writing: Writing) -> tuple[Manifest, dict[str, int]]:
    """Makes the first manifest, or takes an archive in a bucket from the export before, and removes the files
    that it left. Returns the manifest, and the bytes of every file. Raises BadArchive, ArchiveInUse and
    CannotWrite.
    """
    try:
        content = writing.manifest()
    except CannotRead as error:
        raise BadArchive(f"archive, {store.where(MANIFEST)}: it cannot be read: {error}") from None
    if content is None:
        if other := writing.other():
            raise BadArchive(
                f"{store} has files ({other}), but no {MANIFEST}: restore it, or name a new archive"
            )
        manifest = Manifest(FORMAT, *system, writer=writing.writer)
        writing.put_manifest(msgspec.json.encode(manifest))
        return manifest, {}
    manifest = manifest_of(store, content, system)
    if not writing.writer:
        return manifest, store.sizes()
    manifest = msgspec.structs.replace(manifest, writer=writing.writer)
    writing.put_manifest(msgspec.json.encode(manifest))
    sizes = store.sizes()
    left = [file.name for file in unlisted(manifest, sizes) if file.writer]
    # While the manifest is ours, no later export has begun: these are of exports that can commit no more.
    if left and manifest_of(store, writing.manifest() or b"", system).writer != writing.writer:
        raise ArchiveInUse(f"another process exports into {store}: wait until it has ended")
    for name in left:
        writing.remove(name)
        del sizes[name]
    return manifest, sizes


class ArchiveSink:
    """Takes the lines of one shard after the other, and writes them into an archive.

    `step` is called after each step that a crash may follow.
    """

    def __init__(self, export: Export, step: Callable[[str], None] = lambda name: None) -> None:
        self._writing = export.writing
        self._manifest = export.archive.manifest
        self._left_over = export.left_over
        self._step = step
        self._shard = -1
        self._cursor = Cursor()
        #: The file that is being made: its day, and the cursor before its first line.
        self._day = -1
        self._before = Cursor()
        self._waiting: list[Fact] = []
        self._part_bytes = self._file_bytes = self._lines = self._last_at = 0
        self._writer: _Writer | None = None
        #: The files, bytes and lines written.
        self.files = self.bytes = self.lines = 0

    async def write(self, chunk: Chunk, facts: Sequence[Fact]) -> int:
        """Takes the lines of a chunk; raises Corrupt if they do not follow the lines before."""
        events = events_in(facts)
        if chunk.shard != self._shard:
            await self.flush()
            self._shard = chunk.shard
            end = self._manifest.ends.get(str(chunk.shard))
            self._cursor = Cursor() if end is None else end.cursor
        if facts and facts[0].event.seq != self._cursor.seq + 1:
            raise Corrupt(f"shard {chunk.shard}: seq {self._cursor.seq + 1} is missing in what was read")
        while facts:
            day = facts[0].event.at // DAY_MS
            if self._lines and (day != self._day or self._file_bytes >= FILE_TEXT_BYTES):
                await self._end_file()
            if not self._lines:
                self._day, self._before = day, self._cursor
            # Times never go back within a shard. Mostly, a chunk is of one day.
            of_day = bisect_left(facts, (day + 1) * DAY_MS, key=_time)
            taken, facts = facts[:of_day], facts[of_day:]
            self._waiting.extend(taken)
            size = sum(len(fact.line) for fact in taken)
            self._lines += len(taken)
            self._last_at = taken[-1].event.at
            self._part_bytes += size
            self._file_bytes += size
            # The offset stays at the record: a reader that resumes here needs the rest of it.
            self._cursor = chunk.before._replace(seq=taken[-1].event.last_seq, head=taken[-1].hash)
            if self._part_bytes >= PART_TEXT_BYTES:
                await self._end_part()
        self._cursor = chunk.after
        return events

    async def flush(self) -> None:
        """Completes the file, and stores the cursor of the shard."""
        if self._lines:
            await self._end_file()
        end = ArchiveEnd.of(self._cursor)
        if self._shard >= 0 and end != self._manifest.ends.get(str(self._shard), ArchiveEnd.of(Cursor())):
            await self._save([])

    async def _end_part(self) -> None:
        facts, self._waiting, self._part_bytes = self._waiting, [], 0
        if self._writer is None:
            self._writer = _Writer()
        await self._writer.add(facts)

    async def _end_file(self) -> None:
        await self._end_part()
        assert self._writer is not None
        content, digest = await self._writer.close()
        file = ArchivedFile(
            self._shard,
            day_of(self._day * DAY_MS),
            self._before.seq + 1,
            self._cursor.seq,
            self._lines,
            self._last_at,
            self._before.head.hex(),
            self._cursor.head.hex(),
            len(content),
            digest,
            self._writing.writer,
        )
        await in_thread(self._writing.put, file.path, content, self._ready)
        self._step("export.renamed")
        try:
            await self._save([file])
        except ArchiveInUse:
            # It would be in the way of whoever reads all files.
            await in_thread(self._writing.remove, file.path)
            raise
        self._step("export.committed")
        self.files, self.bytes, self.lines = self.files + 1, self.bytes + file.bytes, self.lines + file.lines
        self._writer, self._lines, self._file_bytes = None, 0, 0

    def _ready(self) -> None:
        """Removes what an export left that was killed here: its lines are read again."""
        self._step("export.written")
        for name in self._left_over.pop((self._shard, self._before.seq + 1), ()):
            self._writing.remove(name)

    async def _save(self, files: list[ArchivedFile]) -> None:
        old = self._manifest
        manifest = msgspec.structs.replace(
            old,
            ends=old.ends | {str(self._shard): ArchiveEnd.of(self._cursor)},
            files=old.files + files,
        )
        await in_thread(self._writing.put_manifest, msgspec.json.encode(manifest))
        self._manifest = manifest


def _time(fact: Fact) -> int:
    return fact.event.at


class _Writer:
    """Makes the bytes of a Parquet file, part by part, in another thread: a part is encoded while the caller
    reads on. Arrow is imported there, too, which takes as long as reading 30 thousand events.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._file: Any = None
        self._encoding: Future[None] | None = None

    async def add(self, facts: Sequence[Fact]) -> None:
        """Adds lines; returns before they are encoded."""
        await self._ready()
        # A task would begin only when the caller waits for something, which a reader seldom does.
        self._encoding = get_running_loop().run_in_executor(None, self._encode, facts)

    async def _ready(self) -> None:
        if self._encoding is not None:
            await self._encoding

    def _encode(self, facts: Sequence[Fact]) -> None:
        if self._file is None:
            self._open()
        if facts:
            self._file.write_table(table_of(facts))

    def _open(self) -> None:
        import pyarrow as arrow
        from pyarrow import parquet

        self._stream = arrow.BufferOutputStream()
        self._file = parquet.ParquetWriter(
            self._stream,
            schema(),
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            # Ids and texts hardly repeat: a dictionary would be built for nothing.
            use_dictionary=["type", "offer", "asset", "currency"],
        )

    async def close(self) -> tuple[bytes, str]:
        """The bytes of the file, and their SHA-256 in hex; after an `add`."""
        await self._ready()
        return await in_thread(self._close)

    def _close(self) -> tuple[bytes, str]:
        self._file.close()
        content: bytes = self._stream.getvalue().to_pybytes()
        return content, sha256(content).hexdigest()
