"""The process that makes the Parquet files of an archive (`archive_sink.py`), so that an export reads and
verifies the journal on one core, and encodes on another. Threads of one process would wait for each other's
turn of the interpreter at each of the many calls of Arrow.

`python -m grabstream.streams.replaying.archive_encoder` reads frames from standard input: a part to add to
the file, or nothing, to complete it. It answers each on standard output. A frame is its length in 8 bytes,
and MessagePack. It ends when standard input does, so also when its parent was killed.
"""

import fcntl
import subprocess
import sys
from contextlib import suppress
from typing import Any, BinaryIO, Final, Self

import msgspec

from grabstream.models.journal import Corrupt
from grabstream.streams.replaying.archive_columns import EventPart, schema, table_of

ZSTD_LEVEL: Final = 3
PIPE_BYTES: Final = 1 << 20


class EncoderEnded(Exception):
    """The process has ended before its work was done."""


class EncoderReply(msgspec.Struct, array_like=True):
    """The answer to a part, or to the end of a file. `corrupt` is why the lines of a part are refused."""

    content: bytes = b""
    corrupt: str = ""


_decode_part: Final = msgspec.msgpack.Decoder(EventPart | None).decode
_decode_reply: Final = msgspec.msgpack.Decoder(EncoderReply).decode


class Encoder:
    """The process, as its parent sees it. Its methods block, and one thread at a time may call them. They
    raise EncoderEnded if the process has ended, and Corrupt if a part is refused (`table_of`).
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            # -P: a module of that name in the working directory is another one.
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C is for the parent, which ends this process when it has done what cannot be divided.
            start_new_session=True,
        )
        self._waiting = 0
        _widen(self.process.stdin, self.process.stdout)

    def add(self, part: EventPart) -> None:
        """Sends a part of the file, and returns when the part before it was added."""
        self._send(part)

    def complete(self) -> bytes:
        """The bytes of the file. The next part begins another one."""
        self._send(None)
        return self._receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, part: EventPart | None) -> None:
        """Sends a frame, and waits for the reply to the one before."""
        assert self.process.stdin is not None
        try:
            _write(self.process.stdin, part)
        except OSError:
            raise self._ended() from None
        self._waiting += 1
        if self._waiting > 1:
            self._receive()

    def _receive(self) -> bytes:
        assert self.process.stdout is not None
        frame = _read(self.process.stdout)
        if frame is None:
            raise self._ended()
        self._waiting -= 1
        reply = _decode_reply(frame)
        if reply.corrupt:
            raise Corrupt(reply.corrupt)
        return reply.content

    def _ended(self) -> EncoderEnded:
        code = self.process.wait()
        return EncoderEnded(
            f"the process that encodes Parquet has ended with {code}; repeat the command to continue"
        )


def _widen(*pipes: Any) -> None:
    """Lets pipes hold a megabyte, where the system can: with 64 kB, a part of 4 MB would wake each process
    sixty times.
    """
    for pipe in pipes:
        with suppress(AttributeError, OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _write(stream: Any, frame: object) -> None:
    content = msgspec.msgpack.encode(frame)
    for some in (len(content).to_bytes(8), content):
        left = memoryview(some)
        while left:
            left = left[stream.write(left) :]


def _read(stream: Any) -> bytearray | None:
    """The next frame; None at the end."""
    length = _exactly(stream, 8)
    return None if length is None else _exactly(stream, int.from_bytes(length))


def _exactly(stream: Any, size: int) -> bytearray | None:
    content, done = bytearray(size), 0
    while done < size:
        read = stream.readinto(memoryview(content)[done:])
        if not read:
            return None
        done += read
    return content


class _ParquetFile:
    """A Parquet file in memory, made part by part."""

    def __init__(self) -> None:
        import pyarrow as arrow
        from pyarrow import parquet

        self._stream = arrow.BufferOutputStream()
        self._writer = parquet.ParquetWriter(
            self._stream,
            schema(),
            compression="zstd",
            compression_level=ZSTD_LEVEL,
            # Ids and texts hardly repeat: a dictionary would be built for nothing.
            use_dictionary=["type", "offer", "asset", "currency"],
            # Nobody looks for a range of hashes.
            write_statistics=["seq", "type", "offer", "offer_seq", "at", "at_time", "command", "payment"],
        )

    def add(self, part: EventPart) -> None:
        """Adds lines; raises Corrupt like `table_of`."""
        self._writer.write_table(table_of(part))

    def complete(self) -> bytes:
        """The bytes of the file."""
        self._writer.close()
        content: bytes = self._stream.getvalue().to_pybytes()
        return content


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Encodes what is asked for, until there are no more requests."""
    file = _ParquetFile()
    while (frame := _read(requests)) is not None:
        part, reply = _decode_part(frame), EncoderReply()
        try:
            if part is None:
                reply.content = file.complete()
                file = _ParquetFile()
            else:
                file.add(part)
        except Corrupt as error:
            reply.corrupt = str(error)
        _write(replies, reply)


if __name__ == "__main__":
    # Arrow imports NumPy and pandas where they are installed, which takes longer than to encode a part. It
    # works without them, and nothing here needs them.
    sys.modules["numpy"] = None  # type: ignore[assignment]
    with open(0, "rb", buffering=0) as requests, open(1, "wb", buffering=0) as replies:
        try:
            serve(requests, replies)
        except BrokenPipeError:
            # The parent has ended.
            sys.exit(1)
