"""A pooler of PostgreSQL in transaction mode, as PgBouncer is one with `pool_mode = transaction`: what a
client sends outside of a transaction goes to any session of the server.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Final

from psycopg.conninfo import conninfo_to_dict, make_conninfo

_SSL, _GSS, _CANCEL = 80877103, 80877104, 80877102
#: What PgBouncer takes in the message that starts a session; it refuses all others, `options` too.
_TAKEN: Final = frozenset(
    {"user", "database", "client_encoding", "datestyle", "timezone", "standard_conforming_strings",
     "application_name"}
)  # fmt: skip

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def transaction_pooler(postgres: str) -> AsyncIterator[str]:
    """The DSN of a pooler before the server of a DSN, which must let its user in without a password."""
    target = conninfo_to_dict(postgres)
    pooler = _Pooler(str(target["host"]), int(target["port"]))
    server = await asyncio.start_server(pooler.serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield make_conninfo(postgres, host="127.0.0.1", port=port)
    finally:
        server.close()
        for _, writer in pooler.idle:
            writer.close()


class _Pooler:
    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        #: Sessions of the server in which no transaction is open; the one used last is used next.
        self.idle: list[Stream] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one client until it goes."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._serve((reader, writer))
        writer.close()

    async def _serve(self, client: Stream) -> None:
        reader, writer = client
        while True:
            (length,) = struct.unpack("!i", await reader.readexactly(4))
            body = await reader.readexactly(length - 4)
            (code,) = struct.unpack("!i", body[:4])
            if code == _CANCEL:
                return
            if code not in (_SSL, _GSS):
                break
            writer.write(b"N")
        words = body[4:].rstrip(b"\0").split(b"\0")
        if unknown := {word.decode() for word in words[::2]} - _TAKEN:
            text = f"unsupported startup parameter: {min(unknown)}"
            writer.write(_message(b"E", b"SFATAL\0C08P01\0M" + text.encode() + b"\0\0"))
            return
        first, said = await self._opened(body)
        self.idle.append(first)
        # The key that cancels is the pooler's own.
        writer.write(b"".join([*said, _message(b"K", struct.pack("!ii", 1, 1)), _message(b"Z", b"I")]))
        session: Stream | None = None
        while True:
            asked = b""
            while True:
                kind, message = await _read(reader)
                if kind == b"X":
                    return
                asked += message
                if kind in b"QS":
                    break
            if session is None:
                session = self.idle.pop() if self.idle else (await self._opened(body))[0]
            session[1].write(asked)
            kind = b""
            while kind != b"Z":
                kind, message = await _read(session[0])
                writer.write(message)
            if message[-1:] == b"I":
                self.idle.append(session)
                session = None

    async def _opened(self, startup: bytes) -> tuple[Stream, list[bytes]]:
        """A new session of the server, and what it says about itself."""
        session = await asyncio.open_connection(self._host, self._port)
        session[1].write(struct.pack("!i", len(startup) + 4) + startup)
        said, kind = [], b""
        while kind != b"Z":
            kind, message = await _read(session[0])
            if kind in b"RSE":
                said.append(message)
        return session, said


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


async def _read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The type of the next message, and the whole message."""
    head = await reader.readexactly(5)
    (length,) = struct.unpack("!i", head[1:])
    return head[:1], head + await reader.readexactly(length - 4)
