"""Sinks of `follow`: a user's program stores its results of events there, with the cursor after them.

A sink is an object with two methods (`EventSink`). Rows in PostgreSQL are written by `user_projection.py`;
`FileSink` writes lines to a file. docs/user-projections.md has a complete example.
"""

import asyncio
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, Protocol, runtime_checkable

import msgspec

from grabstream.models.bounds import quoted
from grabstream.projections.cursors import CursorMoved, Fact
from grabstream.streams.durable_files import replace_durably

#: A cursor has 200 bytes a shard, and JSON escapes its quotes.
CURSOR_FILE_BYTES_MAX: Final = 2_097_152


class SinkDamaged(Exception):
    """The stored data of a sink contradict themselves, or are not those of a sink. The text states the fix,
    too.
    """


@runtime_checkable
class EventSink(Protocol):
    """Takes all events of a system, each exactly once, if it stores its results together with the cursor.

    `follow` calls `load`, and then `apply` repeatedly. After an OSError, or another connection error, it
    waits, and starts over with `load`. Any other error ends it.
    """

    async def load(self) -> str | None:
        """The cursor that the last `apply` stored; None if there was none."""
        ...

    async def apply(self, facts: Sequence[Fact], before: str | None, after: str) -> None:
        """Stores the results of these events, and the cursor `after` (a text of some hundred bytes), both or
        neither. `facts` are events of one shard, in order.

        `before` is the cursor that must be stored at present. Otherwise, another process was faster: raise
        CursorMoved, and store nothing.
        """
        ...


def line_of(fact: Fact) -> bytes | None:
    """The line of an event, as on `grab.events`."""
    return fact.line


class _StoredSize(msgspec.Struct, forbid_unknown_fields=True):
    """How many bytes of the file are whole, and the cursor after them."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    cursor: str | None


class FileSink:
    """Appends a line for each event to a file, without gaps or repeats, also after `kill -9` and a loss of
    power. The cursor is in a file next to it, with `.cursor` after its name.

    `line` makes the line of an event, without a newline (None: none), by default its text as on
    `grab.events`. While one process writes a file, others wait, and one of them continues when it ends.
    """

    def __init__(self, path: str | Path, line: Callable[[Fact], bytes | None] = line_of) -> None:
        self._path = Path(path)
        self._cursor_path = self._path.with_name(self._path.name + ".cursor")
        self._line = line
        self._file: int | None = None
        self._stored = _StoredSize(0, None)

    async def load(self) -> str | None:
        """The cursor after the last whole batch; bytes after it, of a batch that was cut off, are removed.
        Raises OSError, also while another process writes the file, and SinkDamaged.
        """
        return await asyncio.to_thread(self._load)

    async def apply(self, facts: Sequence[Fact], before: str | None, after: str) -> None:
        """Appends the lines, and then replaces the cursor; both are on the disk when it returns. Raises
        CursorMoved and OSError.
        """
        if before != self._stored.cursor:
            raise CursorMoved(f"{self._path}: the cursor is no longer the one before these events")
        lines = b"".join(line + b"\n" for line in map(self._line, facts) if line is not None)
        await asyncio.to_thread(self._apply, lines, after)

    def close(self) -> None:
        """Lets another process write the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _load(self) -> str | None:
        if self._file is None:
            self._file = self._opened()
        size = os.fstat(self._file).st_size
        if (stored := self._read_cursor()) is None:
            if size:
                raise SinkDamaged(
                    f"{self._path} is not empty, but has no file with its cursor: name another file"
                )
            stored = _StoredSize(0, None)
            self._write_cursor(stored)
        if size < stored.size:
            raise SinkDamaged(
                f"{self._path} has {size:,} bytes, but {stored.size:,} were written: restore it, or remove "
                f"it and {self._cursor_path.name} to begin at the first event"
            )
        os.ftruncate(self._file, stored.size)
        self._stored = stored
        return stored.cursor

    def _opened(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                raise BlockingIOError(f"another process writes {self._path}") from None
            raise
        return file

    def _apply(self, lines: bytes, after: str) -> None:
        assert self._file is not None
        size = self._stored.size
        for_disk = memoryview(lines)
        while for_disk:
            written = os.pwrite(self._file, for_disk, size)
            for_disk, size = for_disk[written:], size + written
        os.fsync(self._file)
        stored = _StoredSize(size, after)
        self._write_cursor(stored)
        self._stored = stored

    def _read_cursor(self) -> _StoredSize | None:
        try:
            with self._cursor_path.open("rb") as file:
                text = file.read(CURSOR_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return None
        try:
            if len(text) > CURSOR_FILE_BYTES_MAX:
                raise ValueError(f"it has more than {CURSOR_FILE_BYTES_MAX:,} bytes")
            return msgspec.json.decode(text, type=_StoredSize)
        except (msgspec.MsgspecError, ValueError) as error:
            begins = quoted(text[:40].decode(errors="replace"))
            raise SinkDamaged(
                f"{self._cursor_path} is not a cursor ({error}; it begins with {begins}): remove it and "
                f"{self._path.name} to begin at the first event"
            ) from None

    def _write_cursor(self, stored: _StoredSize) -> None:
        part = self._cursor_path.with_name(self._cursor_path.name + ".new")
        replace_durably(self._cursor_path, msgspec.json.encode(stored), part)
