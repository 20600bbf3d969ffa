"""A server of HTTP that answers a request with bytes without end, until its client has gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

_CHUNKED: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
#: What comes once, and what comes again and again, by name.
FLOODS: Final[dict[str, tuple[bytes, bytes]]] = {
    "interim": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "hints": (b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 64),
    "chunks": (_CHUNKED, b"1\r\na\r\n"),
    "extensions": (_CHUNKED, b"1;" + b"x" * 2_000 + b"\r\na\r\n"),
    "trailers": (_CHUNKED + b"0\r\n", b"a: b\r\n"),
}
#: A flood that is not stopped ends at this size, so that a test fails in place of filling the memory.
_BYTES_MAX: Final = 64 * 1024 * 1024


class Flood:
    """How many bytes were sent in all, and how many answers ended because their client had gone."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.port = 0
        self.sent = 0
        self.ended_by_client = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request."""
        once, again = FLOODS[self.kind]
        piece = again * (65_536 // len(again))
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(once)
            while self.sent < _BYTES_MAX:
                writer.write(piece)
                await writer.drain()
                self.sent += len(piece)
        except ConnectionError:
            self.ended_by_client += 1
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def flooding(kind: str) -> AsyncIterator[Flood]:
    """A server on a free port of this machine."""
    flood = Flood(kind)
    server = await asyncio.start_server(flood.answer, "127.0.0.1", 0)
    async with server:
        flood.port = server.sockets[0].getsockname()[1]
        yield flood
