"""The archive: the lines of the journal as Parquet files, and a manifest that lists the valid files.

    manifest.json
    day=2026-11-25/shard=3/000000000000001-000000000040960.parquet

A file has consecutive lines of a shard and of one UTC day, as text byte for byte and in typed columns. In a
bucket, its name also has the id of the export that wrote it (`stores.py`). The manifest has, for each file,
its seqs, its SHA-256, and the hash of the chain before and after its lines; and for each shard the cursor
after its last line, from which the journal continues. It is replaced atomically after its files are complete,
so a file that it does not name is ignored.

A reader checks the digest of a file before it parses it, and the chain of its lines before it hands them on.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Final, NamedTuple

import msgspec

from grabstream.models.bounds import counted
from grabstream.models.calendar import DAY_MS
from grabstream.models.journal import GENESIS, Corrupt, Cursor, chain
from grabstream.streams.history.stores import MANIFEST, MANIFEST_BYTES_MAX, CannotRead, Store

FORMAT: Final = 1
#: Bytes of a file that a reader takes into memory.
FILE_BYTES_MAX: Final = 256 << 20

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Hash = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Writer = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")]
_name_of = re.compile(
    r"day=(\d{4}-\d\d-\d\d)/shard=(\d{1,9})/(\d{15})-(\d{15})(-[0-9a-f]{16})?\.parquet\Z"
).match


class BadArchive(Corrupt):
    """An archive is damaged, incomplete, or from another system; the text names the file and the fix."""


class ArchivedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A file: its `lines` take the seqs from `first_seq` to `last_seq`; `prev` and `head` are the hashes of
    the chain before and after them. `last_at` is the time of the last line (ms since 1970 UTC), `writer` the
    id of the export that wrote it into a bucket.
    """

    shard: _Count
    day: str
    first_seq: _Count
    last_seq: _Count
    lines: _Count
    last_at: _Count
    prev: _Hash
    head: _Hash
    bytes: _Count
    sha256: _Hash
    writer: _Writer = ""

    @property
    def path(self) -> str:
        """The path within the archive."""
        seqs = f"{self.first_seq:015d}-{self.last_seq:015d}"
        writer = f"-{self.writer}" if self.writer else ""
        return f"day={self.day}/shard={self.shard}/{seqs}{writer}.parquet"


class ArchiveEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cursor after the last line of a shard: where the journal continues."""

    seq: _Count
    head: _Hash
    next_offset: _Count
    term: _Count
    owner: str

    @classmethod
    def of(cls, cursor: Cursor) -> "ArchiveEnd":
        """The stored form of a cursor."""
        return cls(cursor.seq, cursor.head.hex(), cursor.next_offset, cursor.term, cursor.owner)

    @property
    def cursor(self) -> Cursor:
        """The cursor."""
        return Cursor(self.seq, bytes.fromhex(self.head), self.next_offset, self.term, self.owner)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an archive contains. `journal` is Kafka's id of the topic, `shards` the number of shards, `writer`
    the id of the last export into a bucket.
    """

    format: int
    prefix: str
    journal: str
    shards: _Count
    ends: dict[str, ArchiveEnd] = {}
    files: list[ArchivedFile] = []
    writer: _Writer = ""

    def end(self, shard: int) -> Cursor:
        """The cursor after the last line of a shard."""
        end = self.ends.get(str(shard))
        return Cursor() if end is None else end.cursor


class ArchiveSystem(NamedTuple):
    """The system whose lines an archive has."""

    prefix: str
    journal: str
    shards: int


class Archive:
    """An archive that was opened and whose manifest was checked."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest
        self._files: dict[int, list[ArchivedFile]] = {}
        for file in manifest.files:
            self._files.setdefault(file.shard, []).append(file)

    def end(self, shard: int) -> Cursor:
        """The cursor after the last line of a shard."""
        return self.manifest.end(shard)

    def files(self, shard: int, after_seq: int = 0) -> list[ArchivedFile]:
        """The files of a shard with lines after a seq, in order."""
        return [file for file in self._files.get(shard, ()) if file.last_seq > after_seq]

    def content_of(self, file: ArchivedFile) -> bytes:
        """The raw bytes of a file; raises BadArchive if they cannot be read."""
        try:
            return self.store.read(file.path, FILE_BYTES_MAX)
        except CannotRead as error:
            raise self._bad(file, f"cannot be read: {error}") from None

    def lines_of(self, file: ArchivedFile, content: bytes) -> tuple[list[bytes], list[bytes]]:
        """The lines in the bytes of a file, and the hash after each; raises BadArchive if they differ from
        the manifest.
        """
        # Imported here, because it takes a tenth of a second and only archives need it.
        import pyarrow
        from pyarrow import parquet

        if sha256(content).hexdigest() != file.sha256:
            raise self._bad(file, f"has other bytes than were exported ({len(content):,} of {file.bytes:,})")
        try:
            # Without threads of Arrow: they abort a process that ends while they do (arrow 34314).
            stored = parquet.ParquetFile(pyarrow.BufferReader(content), pre_buffer=False)
            table = stored.read(columns=["body"], use_threads=False)
            bodies = table.column("body").cast(pyarrow.binary())
        except (pyarrow.ArrowException, KeyError, OSError) as error:
            raise self._bad(file, f"is not a file of an archive: {error}") from None
        if bodies.null_count:
            raise self._bad(file, f"has {counted(bodies.null_count, 'lines')} without a text")
        lines: list[bytes] = bodies.to_pylist()
        hashes = chain(bytes.fromhex(file.prev), lines)
        if len(lines) != file.lines or not lines or hashes[-1].hex() != file.head:
            raise self._bad(file, "has lines that do not lead to its hash in the manifest")
        return lines, hashes

    def places_of(self, content: bytes) -> dict[int, tuple[int, bool]]:
        """By the first seq of each line in the checked bytes of a file: its last seq, and whether it was set
        aside when it was exported, and could not be decoded.
        """
        import pyarrow
        from pyarrow import parquet

        stored = parquet.ParquetFile(pyarrow.BufferReader(content), pre_buffer=False)
        table = stored.read(columns=["seq", "seqs", "type"], use_threads=False)
        rows = zip(*(table.column(name).to_pylist() for name in ("seq", "seqs", "type")), strict=True)
        return {seq: (seq + seqs - 1, type_ is None) for seq, seqs, type_ in rows}

    def _bad(self, file: ArchivedFile, what: str) -> BadArchive:
        return BadArchive(
            f"archive, {self.store.where(file.path)}: it {what}; shard {file.shard}, seq {file.first_seq} to "
            f"{file.last_seq}. Restore the file, or export into a new archive"
        )


def day_of(at: int) -> str:
    """The UTC day of a time (ms since 1970), as partitions name it."""
    return datetime.fromtimestamp(at // DAY_MS * (DAY_MS // 1_000), UTC).date().isoformat()


# -- opening -------------------------------------------------------------------------------------------------


def open_archive(store: Store, system: ArchiveSystem | None) -> Archive:
    """The archive in a store; raises BadArchive if it is damaged, incomplete, or not of `system`.

    The content of the files is checked when they are read.
    """
    try:
        content = store.read(MANIFEST, MANIFEST_BYTES_MAX)
    except CannotRead as error:
        raise BadArchive(
            f"archive, {store.where(MANIFEST)}: it cannot be read: {error}; name a directory or address into "
            "which `grabstream export` has written"
        ) from None
    archive = Archive(store, manifest_of(store, content, system))
    check_files(archive, store.sizes())
    return archive


def check_files(archive: Archive, sizes: Mapping[str, int]) -> None:
    """Raises BadArchive unless all files are there, by the bytes of each name, and no others with their
    seqs.
    """
    for file in archive.manifest.files:
        _check_present(archive.store, file, sizes.get(file.path))
    for left in unlisted(archive.manifest, sizes):
        if left.first_seq <= archive.end(left.shard).seq:
            raise BadArchive(
                f"archive, {archive.store.where(left.name)}: the manifest does not name this file, and "
                f"other files have its seqs too (shard {left.shard}, from seq {left.first_seq}): a reader "
                "of all files would count its lines twice. "
                + ("Export again, which removes it" if left.writer else "Move it away")
            )


def manifest_of(store: Store, content: bytes, system: ArchiveSystem | None) -> Manifest:
    """The manifest in these bytes; raises BadArchive if it contradicts itself, or is not of `system`."""
    where = store.where(MANIFEST)
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadArchive(
            f"archive, {where}: it is not a manifest: {error}. Restore it, or export into a new archive"
        ) from None
    if manifest.format != FORMAT:
        raise BadArchive(f"archive, {where}: format {manifest.format}; this program reads format {FORMAT}")
    for file in manifest.files:
        match = _name_of(file.path)
        if match is None or file.shard >= manifest.shards:
            raise BadArchive(f"archive, {where}: {file.path[:200]!r} cannot be a file of this archive")
    found = ArchiveSystem(manifest.prefix, manifest.journal, manifest.shards)
    if system is not None and found != system:
        raise BadArchive(
            f"archive {store} belongs to another system: prefix {found.prefix}, journal {found.journal}, "
            f"{counted(found.shards, 'shards')}; the settings name prefix {system.prefix}, journal "
            f"{system.journal}, {counted(system.shards, 'shards')}. Name its archive, or "
            "export into a new one"
        )
    archive = Archive(store, manifest)
    for shard in range(manifest.shards):
        _check_chain(archive, shard)
    return manifest


def _check_chain(archive: Archive, shard: int) -> None:
    """Raises BadArchive unless the files of a shard follow each other up to its end."""
    seq, head = 0, GENESIS.hex()
    for file in archive.files(shard):
        if file.first_seq != seq + 1 or file.last_seq < file.first_seq or file.prev != head:
            raise BadArchive(
                f"archive, {archive.store.where(file.path)}: it does not follow the file before it, which "
                f"ends at seq {seq} of shard {shard}: files overlap, or one is missing in the manifest"
            )
        seq, head = file.last_seq, file.head
    end = archive.end(shard)
    if (end.seq, end.head.hex()) != (seq, head):
        raise BadArchive(
            f"archive, {archive.store.where(MANIFEST)}: shard {shard} ends at seq {end.seq}, its files at "
            f"seq {seq}, or with another hash"
        )


def _check_present(store: Store, file: ArchivedFile, size: int | None) -> None:
    if size != file.bytes or size > FILE_BYTES_MAX:
        why = "there is no such file" if size is None else f"it has {size:,} bytes"
        raise BadArchive(
            f"archive, {store.where(file.path)}: {file.bytes:,} bytes were exported, but {why}; shard "
            f"{file.shard}, seq {file.first_seq} to {file.last_seq}. Restore the file, or export into a new "
            "archive"
        )


class Unlisted(NamedTuple):
    """A file that the manifest does not name; `writer`: whether an export into a bucket left it."""

    name: str
    shard: int
    first_seq: int
    writer: bool


def unlisted(manifest: Manifest, names: Iterable[str]) -> list[Unlisted]:
    """Those of the names of an archive's files that the manifest does not name."""
    listed = {file.path for file in manifest.files}
    matches = ((name, _name_of(name)) for name in sorted(names) if name not in listed)
    return [
        Unlisted(name, int(match[2]), int(match[3]), bool(match[5]))
        for name, match in matches
        if match is not None
    ]
