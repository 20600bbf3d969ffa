"""Requests of a crowd to a gateway: prompt, slow, and abandoned ones.

A grab is sent until it is decided, always under its id, so that a lost answer changes nothing.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import aiohttp
import msgspec

from grabstream.models.answers import Answer, decode_answer
from grabstream.models.commands import Grab
from grabstream.models.outcomes import NOT_DECIDED
from grabstream.models.retry_after import retry_after_seconds
from grabstream.workshop.rehearsal.stage import CannotGoOn

#: How long one attempt waits for its answer.
ATTEMPT_SECONDS: Final = 30.0
#: The wait before a repeat, at most, unless the gateway asks for more: it doubles from FIRST to MAX.
PAUSE_SECONDS_FIRST: Final = 0.05
PAUSE_SECONDS_MAX: Final = 2.0
#: The longest wait that the gateway may ask for.
RETRY_AFTER_SECONDS_MAX: Final = 60.0
#: Statuses that say: send the same again.
REPEATABLE: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
#: A slow client sends its request, and reads the answer, in this many drips.
DRIPS: Final = 20
DRIP_BYTES: Final = 64
ANSWER_BYTES_MAX: Final = 64 * 1024
#: In what is counted of attempts: no answer came, or the client closed the connection before it.
NO_ANSWER: Final = "no answer"
ABANDONED: Final = "abandoned"


class _AnswerBody(msgspec.Struct):
    """The fields that distinguish an answer of the gate from a problem of the gateway."""

    id: str | None = None
    code: int | None = None
    type: str = ""


_decode_body = msgspec.json.Decoder(_AnswerBody).decode


class Received(NamedTuple):
    """One reply: its status, the answer if the command was decided, and when to try again if not."""

    status: int
    answer: Answer | None
    retry_after_seconds: float = 0.0


class HttpDoor:
    """A gateway, as a crowd uses it. `attempts` counts replies by status, and what got none."""

    def __init__(self, session: aiohttp.ClientSession, port: int, connections_max: int) -> None:
        self._session = session
        self._port = port
        self._room = asyncio.Semaphore(connections_max)
        self.attempts: Counter[str] = Counter()

    async def grab(self, grab: Grab) -> Answer:
        """Sends a grab until it is decided. Raises CannotGoOn for a reply that no repeat changes."""
        pause = PAUSE_SECONDS_FIRST
        while True:
            received = await self._attempt(grab)
            if received is not None and received.answer is not None:
                return received.answer
            least = 0.0 if received is None else received.retry_after_seconds
            await asyncio.sleep(least + random.uniform(0, pause))
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def grab_slowly(self, grab: Grab, seconds: float) -> Answer:
        """Sends a grab in drips, and reads the answer in drips. If it is not decided then, sends it as others
        do.
        """
        request = self._bytes_of(grab)
        step = -(-len(request) // DRIPS)
        received = None
        try:
            async with self._room, self._connected() as (reader, writer):
                for start in range(0, len(request), step):
                    writer.write(request[start : start + step])
                    await writer.drain()
                    await asyncio.sleep(seconds / DRIPS)
                received = _received_of(await _read_slowly(reader, seconds))
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            self.attempts[NO_ANSWER] += 1
        else:
            self._count(grab, received)
            if received.answer is not None:
                return received.answer
        return await self.grab(grab)

    async def abandon(self, grab: Grab, random_: random.Random) -> None:
        """Sends a grab, or a part of it, and closes the connection before the answer."""
        request = self._bytes_of(grab)
        is_whole = random_.random() < 0.75
        async with self._room:
            with contextlib.suppress(OSError, TimeoutError):
                async with self._connected() as (_, writer):
                    writer.write(request if is_whole else request[: random_.randrange(len(request))])
                    await writer.drain()
                    await asyncio.sleep(random_.choice((0.0, 0.002, 0.02)))
                    if random_.random() < 0.5:
                        writer.transport.abort()
        self.attempts[ABANDONED] += 1

    async def _attempt(self, grab: Grab) -> Received | None:
        """Sends a grab once; None without a reply."""
        url = f"http://127.0.0.1:{self._port}{_path_of(grab)}"
        try:
            async with (
                self._room,
                self._session.post(url, data=_body_of(grab), headers=_headers_of(grab)) as reply,
            ):
                body = await reply.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.attempts[NO_ANSWER] += 1
            return None
        received = _received(reply.status, body, reply.headers.get("Retry-After", ""))
        self._count(grab, received)
        return received

    def _count(self, grab: Grab, received: Received) -> None:
        self.attempts[str(received.status)] += 1
        if received.answer is None and received.status not in REPEATABLE:
            raise CannotGoOn(f"the gateway answered {grab.id} with status {received.status}")

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        async with asyncio.timeout(ATTEMPT_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=ANSWER_BYTES_MAX)
        try:
            yield reader, writer
        finally:
            writer.close()

    def _bytes_of(self, grab: Grab) -> bytes:
        body = _body_of(grab)
        lines = [f"POST {_path_of(grab)} HTTP/1.1", f"Host: 127.0.0.1:{self._port}"]
        lines += [f"{name}: {value}" for name, value in _headers_of(grab).items()]
        lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def open_door(port: int, connections_max: int) -> AsyncIterator[HttpDoor]:
    """A crowd's connections to the gateway at a port of this machine."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(ATTEMPT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        yield HttpDoor(session, port, connections_max)


def _path_of(grab: Grab) -> str:
    return f"/v1/offers/{grab.offer}/grabs"


def _body_of(grab: Grab) -> bytes:
    return msgspec.json.encode({"user": grab.user})


def _headers_of(grab: Grab) -> dict[str, str]:
    return {"Content-Type": "application/json", "Idempotency-Key": grab.id}


async def _read_slowly(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """All that is sent until the connection ends, in drips."""
    received = bytearray()
    while len(received) < ANSWER_BYTES_MAX:
        async with asyncio.timeout(ATTEMPT_SECONDS):
            piece = await reader.read(DRIP_BYTES)
        if not piece:
            break
        received += piece
        await asyncio.sleep(seconds / DRIPS)
    return bytes(received)


def _received_of(raw: bytes) -> Received:
    """The reply in the bytes of a connection; raises IncompleteReadError when it is not complete."""
    head, found, body = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    length = int(headers.get("content-length", "0"))
    if not found or len(body) < length:
        raise asyncio.IncompleteReadError(raw, None)
    return _received(int(lines[0].split(" ")[1]), body[:length], headers.get("retry-after", ""))


def _received(status: int, body: bytes, retry_after: str) -> Received:
    seconds = retry_after_seconds(retry_after, time.time(), RETRY_AFTER_SECONDS_MAX)
    try:
        described = _decode_body(body)
    except msgspec.DecodeError:
        return Received(status, None, seconds)
    is_decided = described.id is not None and described.code is not None and described.code not in NOT_DECIDED
    return Received(status, decode_answer(body) if is_decided else None, seconds)
