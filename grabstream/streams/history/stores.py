"""The store of an archive: a local folder, or a prefix in a bucket of an S3-compatible store.

A file is whole or absent in both. They differ in how one export at a time is ensured, and in the remains of a
killed one:

- In a folder, an export holds a lock of the operating system. A file is written under another name, made
  durable, and renamed.
- A bucket has no locks and no renames, but a PUT is atomic, and may require that the object is still the one
  that was read. So an export first replaces the manifest by one with its own random id (`writer`), and
  replaces it only while that id is there. Another export that is still at work can then commit nothing. Its
  files have its id in their names, so they are never taken for those of the later export.
"""

import fcntl
import os
import secrets
from asyncio import CancelledError, create_task, shield, to_thread, wait
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from grabstream.streams.buckets import (
    Bucket,
    ObjectChanged,
    StoreLogin,
    TooLarge,
    is_address,
    parse,
)
from grabstream.streams.durable_files import replace_durably, sync_names

T = TypeVar("T")

MANIFEST: Final = "manifest.json"
#: The folders of days, and all files in them.
DAYS: Final = "day="
FILES: Final = "day=*/shard=*/*.parquet"
LOCK: Final = ".lock"
PART: Final = ".part"
#: Bytes of a manifest that is read.
MANIFEST_BYTES_MAX: Final = 256 << 20


class CannotRead(Exception):
    """A file cannot be read; the text is the reason."""


class CannotWrite(Exception):
    """A file cannot be written; the text names the file and the reason."""


class ArchiveInUse(Exception):
    """Another process exports into the archive."""


class ArchiveLease(Protocol):
    """The right to write into an archive, of one export at a time."""

    #: The id of this export in the names of its files; '' where a lock makes that needless.
    writer: str

    def manifest(self) -> bytes | None:
        """The manifest, None if there is none; raises CannotRead."""
        ...

    def other(self) -> str:
        """The name of anything present other than the files of a first export; '' if there is none."""
        ...

    def put(self, name: str, content: bytes, ready: Callable[[], None]) -> None:
        """Stores a file, durably; `ready` is called just before it appears. Raises CannotWrite."""
        ...

    def put_manifest(self, content: bytes) -> None:
        """Replaces the manifest, durably; raises CannotWrite, or ArchiveInUse if another export has replaced
        it since.
        """
        ...

    def remove(self, name: str) -> None:
        """Removes a file; raises CannotWrite."""
        ...

    def close(self) -> None:
        """Returns the right."""
        ...


# -- a local folder ------------------------------------------------------------------------------------------


class FolderStore(NamedTuple):
    """An archive in a local folder."""

    folder: Path

    def __str__(self) -> str:
        return str(self.folder)

    def where(self, name: str) -> str:
        """The path of a file, for messages."""
        return str(self.folder / name)

    def read(self, name: str, bytes_max: int) -> bytes:
        """A file; raises CannotRead."""
        path = self.folder / name
        try:
            if (size := path.stat().st_size) > bytes_max:
                raise CannotRead(f"it has {size:,} bytes, at most {bytes_max:,} are read")
            return path.read_bytes()
        except OSError as error:
            raise CannotRead(error.strerror or str(error)) from None

    def sizes(self) -> dict[str, int]:
        """The bytes of every file, by its name."""
        found = {}
        for path in self.folder.glob(FILES):
            try:
                found[path.relative_to(self.folder).as_posix()] = path.stat().st_size
            except FileNotFoundError:
                continue  # an export removed it just now
        return found

    def has_manifest(self) -> bool:
        """Whether there is a manifest."""
        return (self.folder / MANIFEST).exists()

    def write(self) -> "ArchiveLease":
        """The right to write, in a folder that is made if it does not exist; raises ArchiveInUse and
        CannotWrite.
        """
        return _FolderWriting(self.folder)


class _FolderWriting:
    writer = ""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CannotWrite(f"{folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ArchiveInUse(f"another process exports into {folder}: wait until it has ended") from None

    def manifest(self) -> bytes | None:
        if not (self._folder / MANIFEST).exists():
            return None
        return FolderStore(self._folder).read(MANIFEST, MANIFEST_BYTES_MAX)

    def other(self) -> str:
        names = sorted(path.name for path in self._folder.iterdir())
        return next((name for name in names if name not in (LOCK, PART)), "")

    def put(self, name: str, content: bytes, ready: Callable[[], None]) -> None:
        path = self._folder / name
        self._replace(path, content, ready)
        sync_names(path.parent.parent)
        sync_names(self._folder)

    def put_manifest(self, content: bytes) -> None:
        self._replace(self._folder / MANIFEST, content, lambda: None)

    def _replace(self, path: Path, content: bytes, ready: Callable[[], None]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_durably(path, content, self._folder / PART, ready)
        except OSError as error:
            raise CannotWrite(f"{path} cannot be written: {error.strerror}") from None

    def remove(self, name: str) -> None:
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise CannotWrite(f"{self._folder / name} cannot be removed: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._lock)


# -- a bucket ------------------------------------------------------------------------------------------------


class BucketStore(NamedTuple):
    """An archive under a prefix of a bucket; '' is the whole bucket. Raises StoreError where the store cannot
    be reached, or refuses.
    """

    bucket: Bucket
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket.name}/{self.prefix}".rstrip("/")

    def key(self, name: str) -> str:
        """The key of a file."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def where(self, name: str) -> str:
        """The address of a file, for messages."""
        return f"{self}/{name}"

    def read(self, name: str, bytes_max: int) -> bytes:
        """A file; raises CannotRead."""
        try:
            found = self.bucket.get(self.key(name), bytes_max)
        except TooLarge as error:
            raise CannotRead(str(error)) from None
        if found is None:
            raise CannotRead("there is no such object")
        return found.content

    def sizes(self) -> dict[str, int]:
        """The bytes of every file, by its name."""
        first = len(self.key(""))
        return {key[first:]: size for key, size in self.bucket.sizes(self.key(DAYS)).items()}

    def has_manifest(self) -> bool:
        """Whether there is a manifest."""
        # The first key with this start, if present.
        return self.bucket.has_any(self.key(MANIFEST)) == self.key(MANIFEST)

    def write(self) -> "ArchiveLease":
        """The right to write, which the first `put_manifest` takes from any other export."""
        return _BucketWriting(self)


class _BucketWriting:
    def __init__(self, store: BucketStore) -> None:
        self.writer = secrets.token_hex(8)
        self._store = store
        #: That of the manifest which was read or written last; '' if there was none.
        self._etag = ""

    def manifest(self) -> bytes | None:
        try:
            found = self._store.bucket.get(self._store.key(MANIFEST), MANIFEST_BYTES_MAX)
        except TooLarge as error:
            raise CannotRead(str(error)) from None
        self._etag = "" if found is None else found.etag
        return None if found is None else found.content

    def other(self) -> str:
        return self._store.bucket.has_any(self._store.key(""))

    def put(self, name: str, content: bytes, ready: Callable[[], None]) -> None:
        ready()
        self._store.bucket.put(self._store.key(name), content)

    def put_manifest(self, content: bytes) -> None:
        key, bucket = self._store.key(MANIFEST), self._store.bucket
        try:
            self._etag = bucket.put(key, content, is_new=not self._etag, replaces=self._etag).etag
        except ObjectChanged:
            # Either another export, or the client repeated a PUT whose answer was lost.
            found = bucket.get(key, MANIFEST_BYTES_MAX)
            if found is None or found.content != content:
                raise ArchiveInUse(
                    f"another process exports into {self._store}, and has replaced its manifest: wait until "
                    "it has ended, then repeat the command to continue"
                ) from None
            self._etag = found.etag

    def remove(self, name: str) -> None:
        self._store.bucket.delete(self._store.key(name))

    def close(self) -> None:
        """Nothing is held: the manifest decides."""


# -- both ----------------------------------------------------------------------------------------------------

Store: TypeAlias = FolderStore | BucketStore


def open_store(address: str | Path, login: StoreLogin) -> Store:
    """The store of an address: `s3://bucket/prefix`, or a path; raises BadAddress. Asks no server."""
    if isinstance(address, str) and is_address(address):
        place = parse(address, needs_key=False)
        return BucketStore(Bucket(place.bucket, login), place.key)
    return FolderStore(Path(address))


async def in_thread(work: Callable[..., T], *arguments: Any) -> T:
    """The result of blocking work, while the event loop continues. A cancelled caller waits for the end of
    the work, so nothing of it comes later.
    """
    task = create_task(to_thread(work, *arguments))
    try:
        return await shield(task)
    except CancelledError:
        await wait([task])
        if not task.cancelled():
            task.exception()
        raise
