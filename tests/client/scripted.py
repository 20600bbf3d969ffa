"""Servers that misbehave: one that says what a test wants, and one between a client and a gateway that loses
replies.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

#: What a scripted server does with a request, other than sending bytes.
HANG = "hang"
DROP = "drop"


def reply(status: int, body: str, *headers: str) -> bytes:
    """A reply of HTTP/1.1."""
    head = [f"HTTP/1.1 {status} Words", f"content-length: {len(body.encode())}", *headers]
    return ("\r\n".join(head) + "\r\n\r\n" + body).encode()


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    """A request with its body, as bytes; empty when the connection has ended."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head + await reader.readexactly(int(line.partition(b":")[2]))
    return head


@contextlib.asynccontextmanager
async def _serving(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], "asyncio.Future[None]"],
) -> AsyncIterator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)  # type: ignore[arg-type]
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def scripted(
    steps: Iterable[bytes | str], closes: bool = False
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that takes one step for each request, and repeats the last one: its address, and the requests
    that it got. With `closes`, each connection ends after its reply.
    """
    left = list(steps)
    requests: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await _read_request(reader):
            requests.append(request)
            step = left.pop(0) if len(left) > 1 else left[0]
            if step == HANG:
                await reader.read()
            if isinstance(step, str):
                break
            writer.write(step)
            await writer.drain()
            if closes:
                break
        writer.close()

    async with _serving(handle) as port:  # type: ignore[arg-type]
        yield f"http://127.0.0.1:{port}", requests


@contextlib.asynccontextmanager
async def losing_replies(port: int, count: int) -> AsyncIterator[str]:
    """The address of a server that hands requests to a gateway, and closes the connection instead of handing
    over the first `count` replies.
    """
    left = [count]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours, theirs = await asyncio.open_connection("127.0.0.1", port)
        while request := await _read_request(reader):
            theirs.write(request)
            answer = await _read_request(ours)
            if left[0]:
                left[0] -= 1
                break
            writer.write(answer)
            await writer.drain()
        theirs.close()
        writer.close()

    async with _serving(handle) as open_port:  # type: ignore[arg-type]
        yield f"http://127.0.0.1:{open_port}"


@contextlib.asynccontextmanager
async def dripping(head: bytes, pause_seconds: float) -> AsyncIterator[str]:
    """The address of a server that sends a head, and then a byte at a time until its client leaves."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _read_request(reader)
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            while not writer.is_closing():
                writer.write(b"{")
                await writer.drain()
                await asyncio.sleep(pause_seconds)

    async with _serving(handle) as port:  # type: ignore[arg-type]
        yield f"http://127.0.0.1:{port}"
