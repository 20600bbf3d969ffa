"""The sink that writes an archive (`streams/history/archive.py`): `grabstream export`.

1. A file is built in memory, and stored: it appears whole (`streams/history/stores.py`). The manifest does
   not name it yet, so it does not count.
2. The manifest that names it, with the cursor after its last line, replaces the old one.

A process may end after any step. The next export continues from the cursor in the manifest, and removes files
not in the manifest.
"""

from asyncio import wrap_future
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, NamedTuple, Self

import msgspec

from grabstream.models.bounds import shortened
from grabstream.models.calendar import DAY_MS
from grabstream.models.journal import Corrupt, Cursor
from grabstream.projections.tables.set_aside import SetAsideRecord
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
from grabstream.streams.history.sources import Lines
from grabstream.streams.history.stores import (
    MANIFEST,
    ArchiveInUse,
    ArchiveLease,
    CannotRead,
    Store,
    in_thread,
)
from grabstream.streams.replaying.archive_columns import ONCE_SET_ASIDE, EventPart
from grabstream.streams.replaying.archive_encoder import Encoder

#: A file ends with the record of the journal that reaches this many bytes of text, and part of a file (a row
#: group) with the one that reaches this many.
FILE_TEXT_BYTES: Final = 32 << 20
PART_TEXT_BYTES: Final = 4 << 20
#: Parts and files that may wait to be encoded and stored: how far the reader may be ahead.
QUEUE_MAX: Final = 3


class Export(NamedTuple):
    """An archive into which this process may write. `left_over` are files of a killed export, by shard and
    first seq.
    """

    archive: Archive
    writing: ArchiveLease
    left_over: dict[tuple[int, int], list[str]]


@asynccontextmanager
async def exporting(store: Store, system: ArchiveSystem) -> AsyncIterator[Export]:
    """The archive in a store, made if it does not exist; no other process exports into it meanwhile.

    Raises ArchiveInUse, BadArchive for other content, a damaged archive, or one of another system,
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
            # A killed export leaves one file, which follows the last one.
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


def _take(store: Store, system: ArchiveSystem, writing: ArchiveLease) -> tuple[Manifest, dict[str, int]]:
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


@dataclass
class _WaitingLines:
    """The lines of a part that is not complete, the seq before them, and their bytes."""

    before_seq: int = 0
    text_bytes: int = 0
    lines: list[bytes] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    last_seqs: list[int] = field(default_factory=list)
    set_aside: list[int] = field(default_factory=list)


@dataclass
class _OpenFile:
    """A file that is being made: its day, the cursor before its first line, and what it has."""

    day: int
    before: Cursor
    lines: int = 0
    text_bytes: int = 0


class ArchiveSink:
    """Takes the lines of one shard after the other, and writes them into an archive. They are encoded by
    `encoder`, and stored in another thread, in order, while the caller reads on.

    `step` is called after each step that a crash may follow. Lines of records that operators have `set_aside`
    need not be readable.
    """

    def __init__(
        self, export: Export, encoder: Encoder, step: Callable[[str], None] = lambda name: None,
        set_aside: Sequence[SetAsideRecord] = (),
    ) -> None:  # fmt: skip
        self._writing = export.writing
        self._manifest = export.archive.manifest
        self._left_over = export.left_over
        self._step = step
        self._encoder = encoder
        self._background = _Background()
        self._shard = -1
        self._cursor = Cursor()
        #: The file that is being made, and its last part.
        self._file: _OpenFile | None = None
        self._part = _WaitingLines()
        #: The last line that has a time.
        self._last_line = b""
        self._set_aside = set_aside
        #: The records of the shard that were set aside.
        self._aside: list[SetAsideRecord] = []
        #: The files, bytes and lines written.
        self.files = self.bytes = self.lines = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends the thread, after what it does now. The next export reads again what was not flushed."""
        await self._background.stop()

    async def write(self, shard: int, read: Lines) -> None:
        """Takes lines, which follow those before. If they are not JSON, or contradict their place, this
        or a later call raises Corrupt.
        """
        if shard != self._shard:
            await self._end_shard()
            self._shard = shard
            self._cursor = self._manifest.end(shard)
            self._aside = [record for record in self._set_aside if record.shard == shard]
            ended = (file.last_at for file in reversed(self._manifest.files) if file.shard == shard)
            self._last_line = msgspec.json.encode(_Timed(next(ended, 0)))
        begin, lines = 0, self._timed(read)
        # Times never go back within a shard. Mostly, a record is of one day.
        last_day = _day(lines[-1]) if lines else 0
        while begin < len(lines):
            file = self._file
            day = last_day if file is not None and file.day == last_day else _day(lines[begin])
            if file is not None and (file.day != day or file.text_bytes >= FILE_TEXT_BYTES):
                await self._end_file(file)
            end_of_day = len(lines) if day == last_day else bisect_right(lines, day, key=_day)
            self._last_line = lines[end_of_day - 1]
            await self._take(day, read, begin, end_of_day)
            begin = end_of_day
        self._cursor = read.after

    async def flush(self) -> None:
        """Completes the file, and stores the cursor of the shard."""
        await self._end_shard()
        await self._background.drain()

    def _timed(self, read: Lines) -> Sequence[bytes]:
        """The lines that were read; in place of one that was set aside and has no time, the line before."""
        if not self._aside:
            return read.lines
        timed, before = [], self._last_line
        for line, first_seq in zip(read.lines, self._first_seqs(read), strict=True):
            try:
                _time(line)
            except Corrupt:
                if not self._is_set_aside(first_seq):
                    raise
            else:
                before = line
            timed.append(before)
        return timed

    def _first_seqs(self, read: Lines) -> list[int]:
        """The first seqs of lines that follow the cursor."""
        return [self._cursor.seq + 1, *(seq + 1 for seq in read.last_seqs)][: len(read.lines)]

    def _is_set_aside(self, seq: int) -> bool:
        return any(record.has(self._shard, seq) for record in self._aside)

    async def _take(self, day: int, read: Lines, begin: int, end: int) -> None:
        """Takes some of the lines that were read, which are of one day."""
        if self._file is None:
            self._file = _OpenFile(day, self._cursor)
        part, lines = self._part, read.lines[begin:end]
        if not part.lines:
            part.before_seq = self._cursor.seq
        part.lines.extend(lines)
        part.hashes.extend(read.hashes[begin:end])
        part.last_seqs.extend(read.last_seqs[begin:end])
        if self._aside:
            taken = Lines(read.after, lines, read.hashes[begin:end], read.last_seqs[begin:end])
            part.set_aside.extend(filter(self._is_set_aside, self._first_seqs(taken)))
        size = sum(map(len, lines))
        part.text_bytes += size
        self._file.text_bytes += size
        self._file.lines += len(lines)
        # The offset stays at the record: a reader that resumes here needs the rest of it.
        self._cursor = self._cursor._replace(seq=part.last_seqs[-1], head=part.hashes[-1])
        if part.text_bytes >= PART_TEXT_BYTES:
            await self._end_part()

    async def _end_part(self) -> None:
        waiting, self._part = self._part, _WaitingLines()
        part = EventPart.of(
            self._shard, waiting.before_seq, waiting.lines, waiting.hashes, waiting.last_seqs,
            waiting.set_aside,
        )  # fmt: skip
        await self._background.do(self._encoder.add, part)

    async def _end_file(self, file: _OpenFile) -> None:
        if self._part.lines:
            await self._end_part()
        self._file = None
        await self._background.do(self._store, self._shard, file, self._cursor, _time(self._last_line))

    async def _end_shard(self) -> None:
        if self._file is not None:
            await self._end_file(self._file)
        if self._shard >= 0:
            await self._background.do(self._save, self._shard, self._cursor, [])

    # -- in the other thread -------------------------------------------------------------------------------

    def _store(self, shard: int, file: _OpenFile, after: Cursor, last_at: int) -> None:
        """Stores a file that ends at a cursor, and the manifest that names it."""
        content = self._encoder.complete()
        before = file.before
        archived = ArchivedFile(
            shard,
            day_of(file.day * DAY_MS),
            before.seq + 1,
            after.seq,
            file.lines,
            last_at,
            before.head.hex(),
            after.head.hex(),
            len(content),
            sha256(content).hexdigest(),
            self._writing.writer,
        )

        def ready() -> None:
            """Removes what an export left that was killed here: its lines are read again."""
            self._step("export.written")
            for name in self._left_over.pop((shard, before.seq + 1), ()):
                self._writing.remove(name)

        self._writing.put(archived.path, content, ready)
        self._step("export.renamed")
        self._background.check()
        try:
            self._save(shard, after, [archived])
        except ArchiveInUse:
            # It would be in the way of whoever reads all files.
            self._writing.remove(archived.path)
            raise
        self._step("export.committed")
        self.files, self.bytes, self.lines = (
            self.files + 1, self.bytes + archived.bytes, self.lines + archived.lines,
        )  # fmt: skip

    def _save(self, shard: int, cursor: Cursor, files: list[ArchivedFile]) -> None:
        """Replaces the manifest, if the end of the shard has moved."""
        old = self._manifest
        if cursor == old.end(shard):
            return
        ends = old.ends | {str(shard): ArchiveEnd.of(cursor)}
        manifest = msgspec.structs.replace(old, ends=ends, files=old.files + files)
        self._writing.put_manifest(msgspec.json.encode(manifest))
        self._manifest = manifest


class _Timed(msgspec.Struct):
    at: int


_decode_timed: Final = msgspec.json.Decoder(_Timed).decode


def _time(line: bytes) -> int:
    """When the events of a line were decided (ms since 1970 UTC); raises Corrupt if it does not say so."""
    try:
        return _decode_timed(line).at
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"a line has no time ({error}): {shortened(repr(line))}. {ONCE_SET_ASIDE}") from None


def _day(line: bytes) -> int:
    return _time(line) // DAY_MS


class _NothingLeft(Exception):
    """Nothing more is to be done."""


class _Background:
    """Does blocking work in a thread, in order, while the caller goes on. At most QUEUE_MAX pieces of work
    wait. After one that has failed, none is done.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "archive")
        self._queue: deque[Future[None]] = deque()
        self._stopped = False

    async def do(self, work: Callable[..., None], *arguments: Any) -> None:
        """Has this done, after what waits; raises the error of earlier work."""
        while self._queue and (len(self._queue) >= QUEUE_MAX or self._queue[0].done()):
            await self._first()
        self._queue.append(self._thread.submit(self._do, work, arguments))

    async def drain(self) -> None:
        """Returns when all is done; raises the error of earlier work."""
        while self._queue:
            await self._first()

    async def stop(self) -> None:
        """Returns when nothing is being done, or will be."""
        self._stopped = True
        await in_thread(self._thread.shutdown)

    def check(self) -> None:
        """In the thread: raises if the caller has stopped."""
        if self._stopped:
            raise _NothingLeft

    async def _first(self) -> None:
        await wrap_future(self._queue.popleft())

    def _do(self, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.check()
        try:
            work(*arguments)
        except BaseException:
            self._stopped = True
            raise
