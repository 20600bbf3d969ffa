"""Connections of hostile and unlucky clients, byte by byte: what is not HTTP, too much of it, or too slow."""

import asyncio
import json
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from grabstream.gateway import protocol, serving
from grabstream.gateway.addresses import ConnectionsByAddress
from grabstream.gateway.app import send_reply
from grabstream.gateway.bounds import (
    ANSWERED_AT_ONCE,
    GRAB_BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    MESSAGE_BYTES_MAX,
    PIPELINE_MAX,
    READ_SECONDS_MAX,
)
from grabstream.gateway.measures import GatewayMeasures
from grabstream.gateway.problems import Reply
from grabstream.gateway.protocol import WAITED
from grabstream.runtime.ending import running
from grabstream.settings import Settings
from tests.conftest import Worker, until
from tests.gateway.conftest import Door, until_all_decide
from tests.support.gateways import Caller, GatewayProcess, calling

GRAB = b"POST /v1/offers/%s/grabs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class Answered(NamedTuple):
    """An answer as bytes came: status, headers in small letters, document."""

    status: int
    headers: dict[str, str]
    body: dict[str, object]


class Connection:
    """A connection on which a test writes what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, seconds: float = 30.0) -> Answered:
        """The next answer."""
        async with asyncio.timeout(seconds):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.split("\r\n")[:-2]
            headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines}
            raw = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answered(int(status.split()[1]), headers, json.loads(raw) if raw else {})

    async def is_closed(self, seconds: float = 30.0) -> bool:
        """Whether nothing more comes, and the connection is closed, within a time."""
        try:
            async with asyncio.timeout(seconds):
                return await self.reader.read(1) == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


class Served(NamedTuple):
    """A server of this process; it ends when `stop` is set."""

    port: int
    stop: asyncio.Event


@asynccontextmanager
async def served(
    application: ASGIApp,
    by_address: ConnectionsByAddress | None = None,
    measures: GatewayMeasures | None = None,
) -> AsyncIterator[Served]:
    """Serves an application as a gateway does, at most 100 connections, until the block has ended."""
    stop, ready = asyncio.Event(), asyncio.Event()
    bound = serving.bind("127.0.0.1", 0)
    by_address = by_address or ConnectionsByAddress(100)
    async with running(serving.serve(application, bound, 100, by_address, stop, ready.set, measures)) as [
        server
    ]:
        await ready.wait()
        yield Served(bound.getsockname()[1], stop)
        stop.set()
        await server


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /he alth HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\x00c\r\n\r\n",
        GRAB % b"x" + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        GRAB % b"x" + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        GRAB % b"x" + b"Content-Length: -5\r\n\r\n",
        GRAB % b"x" + b"Content-Length: 99999999999999999999999\r\n\r\n",
        GRAB % b"x" + b"Content-Length: 5 \x0b\r\n\r\nabcde",
        GRAB % b"x" + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        GRAB % b"x" + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        GRAB % b"x" + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        GRAB % b"x" + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        GRAB % b"x" + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        # What two programs read in two ways.
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\rX: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: y\r\n folded\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: y\r\n\tfolded\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /health#/v1/offers HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health\tHTTP/1.1\r\nHost: localhost\r\n\r\n",
        GRAB % b"x" + b"Content-Length: 2, 2\r\n\r\n{}",
        GRAB % b"x" + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        GRAB % b"x" + b"Content-Length: +2\r\n\r\n{}",
        GRAB % b"x" + b"Content-Length: 0x2\r\n\r\n{}",
        GRAB % b"x" + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
        GRAB % b"x" + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        GRAB % b"x" + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        GRAB % b"x" + b"Transfer-Encoding: chunked\r\n\r\n1\n{\r\n0\r\n\r\n",
        GRAB % b"x" + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\n{\r\n0\r\n\r\n",
        (GRAB % b"x").replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_no_safe_request_is_refused(door: Door, data: bytes) -> None:
    """And the connection ends, so what follows is not a request."""
    async with connected(door.gateway.port) as one:
        await one.send(data)
        got = await one.answer()
        assert (got.status, got.body["type"]) == (400, "/problems/malformed_request")
        assert got.headers["content-type"] == "application/problem+json"
        assert await one.is_closed()


async def test_headers_above_their_bound_are_refused(door: Door) -> None:
    room = HEAD_BYTES_MAX - 200
    for head, status in (
        (b"X: " + b"a" * room + b"\r\n", 200), (b"X: " + b"a" * HEAD_BYTES_MAX + b"\r\n", 431),
        (b"X: a\r\n" * (HEAD_BYTES_MAX // 6), 431), (b"X: a\r\n" * (HEADERS_MAX - 1), 200),
        (b"X: a\r\n" * HEADERS_MAX, 431), (b"X" * HEAD_BYTES_MAX + b": a\r\n", 431),
    ):  # fmt: skip
        async with connected(door.gateway.port) as one:
            await one.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n")
            got = await one.answer()
            assert got.status == status, head[:20]
            if status == 431:
                assert got.body["type"] == "/problems/head_too_large"
                assert await one.is_closed()
    async with connected(door.gateway.port) as one:
        await one.send(b"GET /" + b"a" * HEAD_BYTES_MAX + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await one.answer()).status == 431


async def test_header_without_end_is_not_collected(door: Door) -> None:
    async with connected(door.gateway.port) as one:
        await one.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 64 * 1024 * 1024:
                await one.send(b"a" * 65_536)
                sent += 65_536
        assert sent < 8 * 1024 * 1024


async def test_body_without_its_length_is_refused_as_soon_as_it_is_above_its_bound(door: Door) -> None:
    async with connected(door.gateway.port) as one:
        await one.send(GRAB % b"x" + b"Idempotency-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(GRAB_BODY_BYTES_MAX // 1_000 + 1):
            await one.send(b"3e8\r\n" + b" " * 1_000 + b"\r\n")
        assert (await one.answer()).status == 413
        # What follows is read and dropped up to a bound; then the connection ends.
        with pytest.raises(ConnectionError):
            for _ in range(200 * MESSAGE_BYTES_MAX // 1_000):
                await one.send(b"3e8\r\n" + b" " * 1_000 + b"\r\n")


async def test_body_above_its_bound_is_refused_before_it_is_read_and_the_next_request_served(
    door: Door,
) -> None:
    async with connected(door.gateway.port) as one:
        size = GRAB_BODY_BYTES_MAX + 1
        await one.send(GRAB % b"x" + b"Content-Length: %d\r\n\r\n" % size)
        got = await one.answer()
        assert (got.status, got.body["type"]) == (413, "/problems/content_too_large")
        await one.send(b" " * size + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await one.answer()).status == 200


async def test_tiny_chunks_with_long_extensions_are_bounded(door: Door) -> None:
    async with connected(door.gateway.port) as one:
        await one.send(GRAB % b"x" + b"Idempotency-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(64 * 1024):
                await one.send(b"1;" + b"x" * 1_000 + b"\r\n \r\n")
    async with connected(door.gateway.port) as one:
        await one.send(GRAB % b"x" + b"Idempotency-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n")
        await one.send(b" \r\n0\r\n" + b"X: y\r\n" * 200)
        with pytest.raises(ConnectionError):
            for _ in range(64 * 1024):
                await one.send(b"X: y\r\n" * 200)


async def test_trailer_is_no_header(caller: Caller, door: Door, offer: str) -> None:
    body = b'{"user": "ann"}'
    async with connected(door.gateway.port) as one:
        await one.send(
            GRAB % offer.encode() + b"Transfer-Encoding: chunked\r\nTrailer: Idempotency-Key\r\n\r\n"
            b"%x\r\n%s\r\n0\r\nIdempotency-Key: smuggled\r\n\r\n" % (len(body), body)
        )
        got = await one.answer()
        assert (got.status, got.body["field"]) == (400, "Idempotency-Key")


async def test_header_that_is_there_twice_is_refused(door: Door) -> None:
    for name in (b"Idempotency-Key", b"Content-Type"):
        async with connected(door.gateway.port) as one:
            await one.send(
                GRAB % b"x"
                + b"Idempotency-Key: a\r\n"
                + name
                + b": application/json\r\nContent-Length: 2\r\n\r\n{}"
            )
            got = await one.answer()
            assert (got.status, got.body["outcome"]) == (400, "invalid")


async def test_pipelined_requests_are_answered_in_order(caller: Caller, door: Door, offer: str) -> None:
    await caller.open(offer, total=50)
    requests, count = b"", PIPELINE_MAX + 1
    for number in range(count):
        body = b'{"user": "u%d"}' % number
        requests += GRAB % offer.encode() + b"Idempotency-Key: k%d\r\nContent-Length: %d\r\n\r\n" % (
            number,
            len(body),
        )
        requests += body
    async with connected(door.gateway.port) as one:
        await one.send(requests)
        answers = [(await one.answer()).body["id"] for _ in range(count)]
    assert answers == [f"k{number}" for number in range(count)]


async def test_body_of_a_request_is_not_counted_as_the_head_of_the_next(
    caller: Caller, door: Door, offer: str
) -> None:
    await caller.open(offer, total=5)
    whole = GRAB % offer.encode() + b"Idempotency-Key: k%d\r\nContent-Length: %d\r\n\r\n%b"
    bodies = [b'{"user": "u1"' + b" " * (HEAD_BYTES_MAX - 14) + b"}", b'{"user": "u2"}']
    first, second = (whole % (number, len(body), body) for number, body in enumerate(bodies))
    async with connected(door.gateway.port) as one:
        await one.send(first + second[:60])
        assert (await one.answer()).body["user"] == "u1"
        await one.send(second[60:])
        assert (await one.answer()).body["user"] == "u2"


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("is_coded", [False, True])
async def test_head_behind_a_body_is_bounded(is_coded: bool, is_early: bool) -> None:
    """By its own bytes alone, in whatever way the body ends, also when its answer was sent before it came."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        while not is_early and (await receive()).get("more_body"):
            """The body is not complete."""
        await send_reply(scope, send, Reply(200, b"{}", ()))

    size = HEAD_BYTES_MAX + 1
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, b" " * size) if is_coded else b" " * size
    length = b"Transfer-Encoding: chunked" if is_coded else b"Content-Length: %d" % size
    post = b"POST / HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % length
    get = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
    async with served(answer) as server:
        for value in (b"", b"y" * HEAD_BYTES_MAX):
            async with connected(server.port) as one:
                await one.send(post)
                if is_early:
                    assert (await one.answer()).status == 200
                await one.send(body + get + value)
                if not is_early:
                    assert (await one.answer()).status == 200
                if not value:
                    await asyncio.sleep(0.1)  # the head comes in two pieces
                    await one.send(b"y\r\n\r\n")
                    assert (await one.answer()).status == 200
                    continue
                async with asyncio.timeout(READ_SECONDS_MAX / 2):
                    with suppress(ConnectionError):
                        await one.reader.read()


async def test_complete_requests_are_answered_though_another_one_breaks_off(
    caller: Caller, door: Door, offer: str
) -> None:
    await caller.open(offer, total=5)
    whole = GRAB % offer.encode() + b'Idempotency-Key: k%d\r\nContent-Length: 14\r\n\r\n{"user": "u%d"}'
    first, second, third = (whole % (number, number) for number in (1, 2, 3))
    async with connected(door.gateway.port) as one:
        await one.send(first + second + third[:-2])
        one.writer.write_eof()
        assert [(await one.answer()).body["user"] for _ in range(2)] == ["u1", "u2"]
        assert await one.is_closed()


async def test_garbage_after_a_request_does_not_take_its_answer(
    caller: Caller, door: Door, offer: str
) -> None:
    await caller.open(offer, total=5)
    whole = GRAB % offer.encode() + b'Idempotency-Key: k%d\r\nContent-Length: 14\r\n\r\n{"user": "a%d"}'
    for number, garbage in enumerate(
        (b"garbage\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 2 * HEAD_BYTES_MAX,
         GRAB % b"x" + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"), 1,
    ):  # fmt: skip
        async with connected(door.gateway.port) as one:
            await one.send(whole % (number, number) + garbage)
            got = await one.answer()
            assert (got.status, got.body["user"]) == (201, f"a{number}")
            assert await one.is_closed()


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/offers/%s/grabs HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: x",
        b"POST /v1/offers/%s/grabs HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c",
        b"POST /v1/offers/%s/grabs HTTP/2.0",
        b"POST http://127.0.0.1/v1/offers/%s/grabs HTTP/1.1",
        b"POST /v1/offers/%s/grabs HTTP/1.1\r\nTransfer-Encoding: gzip, chunked",
    ],
)
async def test_what_others_may_read_in_another_way_is_refused(
    caller: Caller, door: Door, offer: str, head: bytes
) -> None:
    """Above all, the body of such a request is not read as a separate request."""
    await caller.open(offer, total=5)
    smuggled = (
        GRAB % offer.encode()
        + b"Idempotency-Key: smuggled\r\nContent-Length: 18\r\n\r\n"
        + b'{"user": "victim"}'
    )
    length = b"" if b"Transfer-Encoding" in head else b"\r\nContent-Length: %d" % len(smuggled)
    async with connected(door.gateway.port) as one:
        await one.send(
            head % offer.encode()
            + b"\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nIdempotency-Key: front"
            + length
            + b"\r\n\r\n"
        )
        await one.send(smuggled)
        got = await one.answer()
        assert (got.status, got.body["type"]) == (400, "/problems/malformed_request")
        assert await one.is_closed()
    left = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"})
    assert left.body["left"] == 4, "nothing was granted to the victim"


async def test_kept_lists_are_answered_as_new_ones_are(caller: Caller, door: Door, offer: str) -> None:
    """A list that is kept is answered without a task: the same bytes, the same checks, the same order."""
    await caller.open(offer)
    get = b"GET /v1/offers?issuer=%s HTTP/1.1\r\nHost: %s\r\n%s\r\n"
    issuer = offer.encode()

    async def once(one: Connection, host: bytes = b"localhost", more: bytes = b"") -> Answered:
        await one.send(get % (issuer, host, more))
        return await one.answer()

    async with connected(door.gateway.port) as one:
        new = await once(one)
        kept = await once(one)
        assert (new.status, kept.status) == (200, 200)
        assert (kept.body, kept.headers["etag"]) == (new.body, new.headers["etag"])
        assert new.headers.keys() == kept.headers.keys()
        assert (await once(one, b"evil.example.com")).status == 421
        assert (
            await once(one, more=b"If-None-Match: " + kept.headers["etag"].encode() + b"\r\n")
        ).status == 304
        # The body of a GET is not the next request.
        await one.send(get % (issuer, b"localhost", b"Content-Length: 5\r\n") + b"GET /")
        assert (await one.answer()).status == 200
        assert (await once(one)).status == 200
    grab = GRAB + b"Idempotency-Key: k\r\nContent-Length: 15\r\n\r\n" + b'{"user": "ann"}'
    async with connected(door.gateway.port) as one:
        plain = get % (issuer, b"localhost", b"")
        await one.send(
            plain + grab % offer.encode() + plain + get % (issuer, b"localhost", b"Connection: close\r\n")
        )
        assert [(await one.answer()).status for _ in range(4)] == [200, 201, 200, 200]
        assert await one.is_closed()
    async with connected(door.gateway.port) as one:
        await one.send(get % (issuer, b"localhost", b"Connection: close\r\n") + grab % offer.encode())
        assert (await one.answer()).headers["connection"] == "close"
        assert await one.is_closed(), "what follows the last request is not read"
    async with connected(door.gateway.port) as one:
        await one.send(plain.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert (await one.answer()).status == 200
        assert await one.is_closed()


@pytest.mark.long
async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "IDLE_SECONDS_MAX", 1)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send_reply(scope, send, Reply(200, b"{}", ()))

    async with served(answer) as server, connected(server.port) as one:
        began = time.monotonic()
        for _ in range(2):
            await one.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await one.answer()).status == 200
        assert await one.is_closed(seconds=READ_SECONDS_MAX - 2)
        assert time.monotonic() - began >= 1
    # The rest of a request that was answered before all of it had come.
    async with served(answer) as server, connected(server.port) as one:
        await one.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{")
        assert (await one.answer()).status == 200
        await one.send(b"}")
        assert await one.is_closed(seconds=READ_SECONDS_MAX - 2)


@pytest.mark.long
async def test_request_after_one_that_is_answered_at_once_is_not_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "IDLE_SECONDS_MAX", 1)

    class Answering:
        def answer_now(self, scope: Scope) -> Reply | None:
            return Reply(200, b"{}", ()) if scope["path"] == "/now" else None

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.sleep(4)  # longer than a connection may be idle
            await send_reply(scope, send, Reply(201, b"{}", ()))

    async with served(Answering()) as server, connected(server.port) as one:
        get = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
        await one.send(get % b"now" + get % b"slow")
        assert [(await one.answer()).status for _ in range(2)] == [200, 201]


async def test_each_turn_of_the_loop_reads_a_bounded_number_of_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "READ_AT_ONCE", 2)
    clients, requests = 20, 3
    turns = 0
    began_in: list[int] = []
    waited: list[float] = []

    def turn(stop: asyncio.Event) -> None:
        nonlocal turns
        turns += 1
        if not stop.is_set():
            asyncio.get_running_loop().call_soon(turn, stop)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        began_in.append(turns)
        if WAITED in scope:
            waited.append(scope[WAITED])
        await send_reply(scope, send, Reply(200, b'"%s"' % scope["raw_path"], ()))

    async def client(port: int, number: int) -> None:
        """Sends its requests in two pieces, says that nothing follows, and reads all answers."""
        async with connected(port) as one:
            paths = [f"/{number}/{request}" for request in range(requests)]
            data = "".join(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in paths).encode()
            cut = 5 + number % (len(data) - 10)
            await one.send(data[:cut])
            is_connected.release()
            await may_end.wait()
            await one.send(data[cut:])
            one.writer.write_eof()
            for path in paths:
                got = await one.answer()
                assert (got.status, got.body) == (200, path)
            assert await one.is_closed()

    may_end, is_connected = asyncio.Event(), asyncio.Semaphore(0)
    async with served(answer) as server, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(server.port, number))
        for _ in range(clients):
            await is_connected.acquire()
        turn(server.stop)
        may_end.set()
    assert len(began_in) == clients * requests
    # The first request of each client begins when its connection is read.
    assert max(Counter(began_in).values()) <= 2 * requests
    assert waited
    assert max(waited) < 30


class Deferring:
    """Lets a server read the first `read` times that something arrives; what comes then waits until the test
    has it read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, read: int) -> None:
        self._left = read
        self.connections: asyncio.Queue[protocol.BoundedProtocol] = asyncio.Queue()
        monkeypatch.setattr(protocol.Turns, "has_room", self._has_room)
        monkeypatch.setattr(protocol.Turns, "wait", lambda turns, one: self.connections.put_nowait(one))

    def _has_room(self, loop: asyncio.AbstractEventLoop) -> bool:
        self._left -= 1
        return self._left >= 0


async def test_request_that_waits_for_its_turn_is_answered_whatever_happens_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deferring = Deferring(monkeypatch, 1)
    gates = {b"/a": asyncio.Event(), b"/b": asyncio.Event()}
    began: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        began.put_nowait(scope["raw_path"])
        await gates[scope["raw_path"]].wait()
        await send_reply(scope, send, Reply(200, b"{}", ()))

    later = asyncio.get_running_loop().time() + 3_600
    async with served(answer) as server, connected(server.port) as one:
        await one.send(b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert await began.get() == b"/a"
        await one.send(b"GET /b HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection = await deferring.connections.get()
        gates[b"/a"].set()
        assert (await one.answer()).status == 200
        # Neither idle, nor too slow to send its request.
        connection.check(later)
        connection.read_deferred()
        assert await began.get() == b"/b"
        connection.check(later)
        gates[b"/b"].set()
        assert (await one.answer()).status == 200
        # Now it is idle.
        connection.check(later)
        assert await one.is_closed()


async def test_request_that_waits_for_its_turn_is_answered_before_the_server_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deferring = Deferring(monkeypatch, 0)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send_reply(scope, send, Reply(200, b"{}", ()))

    async with served(answer) as server, connected(server.port) as one:
        await one.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await deferring.connections.get()
        server.stop.set()
        assert (await one.answer()).status == 200
        assert await one.is_closed()


async def test_requests_that_are_answered_from_memory_in_one_turn_are_bounded() -> None:
    class Application:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await send_reply(scope, send, Reply(200, b'"later"', ()))

        def answer_now(self, scope: Scope) -> Reply | None:
            return Reply(200, b'"now"', ())

    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with served(Application()) as server, connected(server.port) as one:
        for _ in range(2):
            await one.send(request * (ANSWERED_AT_ONCE + 1))
            answers = [(await one.answer()).body for _ in range(ANSWERED_AT_ONCE + 1)]
            assert answers == ["now"] * ANSWERED_AT_ONCE + ["later"]
        await one.send(request * (3 * ANSWERED_AT_ONCE))
        async with asyncio.timeout(90):
            assert (await one.reader.read()).count(b"HTTP/1.1 200") == ANSWERED_AT_ONCE + 1 + PIPELINE_MAX


async def test_requests_that_wait_for_their_turn_are_bounded(caller: Caller, door: Door, offer: str) -> None:
    await caller.open(offer)
    count = 3 * PIPELINE_MAX
    whole = GRAB + b"Idempotency-Key: k%d\r\nContent-Length: 15\r\n\r\n" + b'{"user": "ann"}'
    async with connected(door.gateway.port) as one:
        await one.send(b"".join(whole % (offer.encode(), number) for number in range(count)))
        async with asyncio.timeout(90):
            answers = await one.reader.read()
    # Some are answered while the others arrive.
    assert 1 <= answers.count(b"HTTP/1.1 201") < count


async def test_grab_is_answered_alike_however_it_comes(caller: Caller, door: Door, offer: str) -> None:
    """In one piece, in pieces, in chunks, in a pipeline, and after leave to send the body."""
    await caller.open(offer, total=50)

    def grab(name: str, *headers: str) -> bytes:
        head = GRAB % offer.encode() + f"Idempotency-Key: {name}\r\n".encode()
        return head + "".join(f"{header}\r\n" for header in headers).encode() + b"\r\n"

    def body(name: str) -> bytes:
        return f'{{"user": "{name}"}}'.encode()

    async with connected(door.gateway.port) as one:
        length = f"Content-Length: {len(body('ann'))}"
        answers = {}
        await one.send(grab("ann", length) + body("ann"))
        answers["ann"] = await one.answer()
        for byte in grab("bob", length) + body("bob"):
            await one.send(bytes([byte]))
            await asyncio.sleep(0)
        answers["bob"] = await one.answer()
        chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in body("cid")) + b"0\r\n\r\n"
        await one.send(grab("cid", "Transfer-Encoding: chunked") + chunked)
        answers["cid"] = await one.answer()
        await one.send(b"".join(grab(name, length) + body(name) for name in ("dan", "eve", "fay")))
        for name in ("dan", "eve", "fay"):
            answers[name] = await one.answer()
        await one.send(grab("gus", length, "Expect: 100-continue"))
        assert (await one.answer()).status == 100
        await one.send(body("gus"))
        answers["gus"] = await one.answer()
    for place, (name, got) in enumerate(answers.items(), 1):
        assert (got.status, got.body["user"], got.body["place"]) == (201, name, place)
        assert got.headers.keys() - {"connection"} == answers["ann"].headers.keys()


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ("Content-Type: text/plain\r\n", b'{"user": "u"}', 415),
        ("", b'{"user": "u"}', 415),
        ("Content-Type: application/json\r\n", b'{"user": "u"', 400),
        ("Content-Type: application/json\r\nContent-Encoding: gzip\r\n", b'{"user": "u"}', 415),
        ("Content-Type: application/json\r\nHost: evil\r\n", b'{"user": "u"}', 400),
    ],
)
async def test_bad_grab_is_refused_alike_however_it_comes(
    door: Door, offer: str, headers: str, body: bytes, status: int
) -> None:
    head = f"POST /v1/offers/{offer}/grabs HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: k\r\n{headers}"
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    answers = []
    for data in (whole, chunked):
        async with connected(door.gateway.port) as one:
            await one.send(data)
            answers.append(await one.answer())
    assert answers[0].status == status
    assert answers[0] == answers[1]


async def test_client_that_has_gone_keeps_its_grab(caller: Caller, door: Door, offer: str) -> None:
    await caller.open(offer, total=50)
    body = b'{"user": "ann"}'
    request = GRAB % offer.encode() + b"Idempotency-Key: ann\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    for cut in range(len(request) - 3, len(request) + 1):
        async with connected(door.gateway.port) as one:
            await one.send(request[:cut])

    async def is_booked() -> bool:
        got = await caller.send("GET", f"/v1/users/ann/grabs?offer={offer}")
        return [grab["grab"] for grab in got.body["grabs"]] == ["ann"]

    await until(is_booked, 20, "the grab in the books")


async def test_grab_of_a_client_that_is_slow_to_take_answers_is_answered(
    caller: Caller, door: Door, offer: str
) -> None:
    """The grab is decided while the answers before it wait for the client."""
    await caller.open(offer, total=50)
    body = b'{"user": "ann"}'
    grab = GRAB % offer.encode() + b"Idempotency-Key: ann\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    document = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with connected(door.gateway.port) as one:
        for _ in range(PIPELINE_MAX - 1):
            await one.send(document)
        await one.send(grab)
        await asyncio.sleep(0.3)
        for _ in range(PIPELINE_MAX - 1):
            assert (await one.answer()).status == 200
        got = await one.answer()
        assert (got.status, got.body["user"]) == (201, "ann")


@pytest.mark.long
async def test_slow_clients_are_sent_away_and_others_served(caller: Caller, door: Door) -> None:
    """A request that comes byte by byte, a body that never ends, and a connection without a request."""
    async with (
        connected(door.gateway.port) as slow_head,
        connected(door.gateway.port) as slow_body,
        connected(door.gateway.port) as silent,
        connected(door.gateway.port) as empty_lines,
    ):
        loop = asyncio.get_running_loop()
        began = loop.time()
        await slow_head.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
        await slow_body.send(GRAB % b"x" + b"Idempotency-Key: k\r\nContent-Length: 100\r\n\r\n")

        async def drip(one: Connection, data: bytes) -> None:
            while True:
                await one.send(data)
                await asyncio.sleep(0.2)

        drips = [
            asyncio.create_task(drip(slow_head, b"A")),
            asyncio.create_task(drip(slow_body, b" ")),
            asyncio.create_task(drip(empty_lines, b"\r\n")),
        ]
        try:
            assert (await caller.send("GET", "/health")).status == 200
            for one in (silent, slow_head, slow_body, empty_lines):
                got = await one.answer(READ_SECONDS_MAX + 20)
                assert (got.status, got.body["type"]) == (408, "/problems/request_timeout")
                assert await one.is_closed()
            assert loop.time() - began > READ_SECONDS_MAX - 1
        finally:
            for task in drips:
                task.cancel()
            await asyncio.gather(*drips, return_exceptions=True)


@pytest.mark.long
async def test_client_that_does_not_take_its_answers_is_sent_away(door: Door) -> None:
    """Unread answers fill the buffers of both machines; then the connection is aborted."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    plain.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(plain, ("127.0.0.1", door.gateway.port))
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    try:
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(60):
                while True:
                    # The gateway stops reading while answers wait, so this stops too, until it aborts.
                    await loop.sock_sendall(plain, request * 100)
    finally:
        plain.close()


@pytest.mark.long
async def test_connections_above_the_bound_are_refused(door: Door, tmp_path: Path) -> None:
    with GatewayProcess(door.settings, tmp_path / "log", gateway_connections_max="5") as gateway:
        held = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(5)]
        async with connected(gateway.port) as one:
            got = await one.answer()
            assert (got.status, got.body["type"]) == (503, "/problems/busy")
            assert got.headers["retry-after"] == "1"
            assert await one.is_closed()
        for _, writer in held:
            writer.close()

        async def is_served() -> bool:
            async with calling(gateway.port) as caller:
                return (await caller.send("GET", "/health")).status == 200

        await until(is_served, 20, "room again")


@pytest.mark.long
async def test_requests_above_the_bound_are_busy_at_once(
    system: Settings, tmp_path: Path, worker: Callable[..., Worker]
) -> None:
    """A relay that stands still journals nothing, so requests stay in progress until it continues."""
    running = worker(system)
    with GatewayProcess(
        system, tmp_path / "log", gateway_requests_max="10", gate_timeout_ms="60000"
    ) as gateway:
        await until_all_decide(gateway.port, system.shards)
        async with calling(gateway.port) as caller, connected(gateway.port) as slow:
            await caller.open("x", total=50)
            running.signal(signal.SIGSTOP)
            grabs = "/v1/offers/x/grabs"
            # A body that does not come takes no room.
            await slow.send(GRAB % b"x" + b"Idempotency-Key: slow\r\nContent-Length: 15\r\n\r\n")
            held = [asyncio.create_task(caller.post(grabs, {"user": f"u{n}"})) for n in range(10)]

            async def is_full() -> bool:
                got = await caller.send("GET", "/health")
                return got.status == 503

            await until(is_full, 20, "ten requests in work")
            assert not any(task.done() for task in held)
            for _ in range(50):
                got = await caller.post(grabs, {"user": "late"})
                assert (got.status, got.body["type"], got.body["outcome"]) == (503, "/problems/busy", "busy")
                assert got.headers["retry-after"] == "1"
            await slow.send(b'{"user": "ann"}')
            assert (await slow.answer()).status == 503
            running.signal(signal.SIGCONT)
            assert {task.status for task in await asyncio.gather(*held)} == {201}
            got = await caller.post(grabs, {"user": "late"})
            assert (got.status, got.body["place"]) == (201, 11)
