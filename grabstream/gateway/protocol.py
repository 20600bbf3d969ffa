"""HTTP/1.1 on one connection, with bounds of bytes and time.

uvicorn's protocol parses with httptools and calls the application. This subclass adds what it lacks: a bound
of the request's head and of the whole request, time limits for reading a request and for taking an answer,
bounds of connections, and problem details for what is not HTTP. It also drops trailer fields, which uvicorn
would add to the headers. No other file uses what uvicorn does not document, and pyproject.toml pins the
version with which this one was tested.

An answer that is complete goes out in one piece (`REPLY`). What the application answers from its memory
(`answer_now`) goes out without a task; so does the answer to a request whose head and body it takes together
(`takes_whole`, `answer_soon`).

A turn of the event loop reads from a bounded number of connections (`Turns`). A command needs several turns,
one for each answer of Redis or Kafka; so a refused crowd must not make a turn long.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from grabstream.gateway.addresses import ConnectionsByAddress
from grabstream.gateway.bounds import (
    ANSWERED_AT_ONCE,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    HEADS_KEPT_MAX,
    MESSAGE_BYTES_MAX,
    PIPELINE_MAX,
    READ_AT_ONCE,
    READ_SECONDS_MAX,
    WRITE_SECONDS_MAX,
)
from grabstream.gateway.measures import GatewayMeasures
from grabstream.gateway.problems import Header, Problem, Reply, retry_soon
from grabstream.gateway.requests import FIELDS, count_of

log = logging.getLogger(__name__)

CHECK_EVERY_SECONDS: Final = 1.0
#: Keys of the scope of a request: a function that ends its connection at once; one that sends a complete
#: answer, or returns False if the client has yet to take those before; how long it waited for a turn of the
#: event loop (s), if it did; and, set by the application, that its answer is a stream, which ends itself when
#: the client is too slow.
ABORT: Final = "grabstream.abort"
REPLY: Final = "grabstream.reply"
WAITED: Final = "grabstream.waited"
STREAMS: Final = "grabstream.streams"


class _Unread:
    """In place of the event that notifies an application of more of a body, while no application waits."""

    def set(self) -> None:
        """More of the body, or its end, has come."""


_UNREAD: Final = _Unread()


class _Cycle(RequestResponseCycle):
    """A request and its answer. What uvicorn sets in each of them, this class has once: most requests change
    little of it.
    """

    logger = logging.getLogger("uvicorn.error")
    access_log = False
    disconnected = response_started = response_complete = False
    chunked_encoding = None
    expected_content_length = 0
    more_body = True
    #: In one piece, as it has come, unless there is more of it.
    body: bytes | bytearray = b""  # type: ignore[assignment]
    message_event: Any = _UNREAD

    def __init__(self, protocol: "BoundedProtocol", scope: Any, keep_alive: bool) -> None:
        self.scope = scope
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.default_headers = protocol.server_state.default_headers
        self.on_response = protocol.on_response_complete
        self.waiting_for_100_continue = protocol.expect_100_continue
        self.keep_alive = keep_alive

    def add(self, body: bytes) -> None:
        """A piece of the body has come."""
        if not self.body:
            self.body = body
        else:
            if isinstance(self.body, bytes):
                # Many small pieces must not be copied again and again.
                self.body = bytearray(self.body)
            self.body += body
        self.message_event.set()

    def begin_reading(self) -> None:
        """From now on an application may wait for the body."""
        self.message_event = asyncio.Event()
        if self.body or not self.more_body:
            self.message_event.set()

    def reply(self, reply: Reply) -> bool:
        """Sends a complete answer in one piece. Returns False, and sends nothing, while the client has yet to
        take the answers before.
        """
        if self.disconnected:
            return True
        if self.flow.write_paused or self.response_started:
            return False
        status, body, headers = reply
        pieces = [_head_of(status, headers)]
        for name, value in self.default_headers:
            pieces += (name, b": ", value, b"\r\n")
        if status not in (204, 304):
            pieces.append(b"content-length: %d\r\n" % len(body))
        if not self.keep_alive:
            pieces.append(b"connection: close\r\n")
        pieces.append(b"\r\n")
        if self.scope["method"] != "HEAD":
            pieces.append(body)
        self.response_started = self.response_complete = True
        self.waiting_for_100_continue = False
        self.transport.write(b"".join(pieces))
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
        return True


@lru_cache(HEADS_KEPT_MAX)
def _head_of(status: int, headers: tuple[Header, ...]) -> bytes:
    """The status line and headers of an answer; most answers have the same. Raises RuntimeError for a header
    that HTTP does not allow.
    """
    pieces = [STATUS_LINE[status]]
    for name, value in headers:
        if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
            raise RuntimeError(f"not a header: {name!r}: {value!r}")
        pieces += (name.lower(), b": ", value, b"\r\n")
    return b"".join(pieces)


async def _send(reply: Reply, scope: Any, receive: Any, send: Any) -> None:
    """Sends a reply to a client that has yet to take those before."""
    headers = (*reply.headers, (b"content-length", b"%d" % len(reply.body)))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


def _nothing() -> None:
    """What is left to do after an answer that is complete."""


class Turns:
    """The connections that may still be read in this turn of the event loop, and those that wait."""

    def __init__(self) -> None:
        self._left = READ_AT_ONCE
        self._waiting: deque[BoundedProtocol] = deque()
        self._is_counting = False

    def has_room(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether one more connection may be read in this turn; if so, it is counted."""
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next, loop)
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    def wait(self, connection: "BoundedProtocol") -> None:
        """Defers the connection to a later turn, after those that already wait."""
        self._waiting.append(connection)

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """A new turn has begun. Those that wait are read first, so that none waits without limit."""
        self._left = READ_AT_ONCE
        self._is_counting = bool(self._waiting)
        if self._is_counting:
            loop.call_soon(self._next, loop)
        while self._waiting and self._left > 0:
            self._left -= 1
            connection = self._waiting.popleft()
            try:
                connection.read_deferred()
            except Exception:
                # One connection must not keep the others from being read.
                log.exception("a connection cannot be read; it is aborted")
                connection.transport.abort()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `connections_max`, `by_address`, `measures` and `turns` are set by `bounded`."""

    #: Not in the dict of the attributes of uvicorn's class. With these in it, each would take longer to find.
    __slots__ = (
        "_answer_now", "_answered_now", "_began", "_body_tail", "_bytes", "_counted", "_deferred",
        "_deferred_at", "_head_bytes", "_idle_since", "_is_ending", "_is_head", "_reading_since",
        "_receiving", "_scope", "_takes_whole", "_waited", "_whole", "_working", "_writing_since",
    )  # fmt: skip

    connections_max = 10_000
    by_address: ConnectionsByAddress
    measures: GatewayMeasures | None = None
    turns: Turns

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses the connection when there are too many, in all or of its address."""
        super().connection_made(transport)
        #: What has arrived and waits for a later turn of the event loop.
        self._deferred = b""
        self._deferred_at = 0.0
        #: How long the bytes that are parsed now have waited; the requests in them that were answered from
        #: memory. Those after the first ANSWERED_AT_ONCE wait for their turn, as others do.
        self._waited = 0.0
        self._answered_now = 0
        #: Bytes of the request since its head began, or since its head was complete.
        self._bytes = 0
        #: Bytes of its complete headers; of the body that was parsed last, after the last empty line.
        self._head_bytes = 0
        self._body_tail = 0
        self._is_head = True
        #: What the scopes of all requests of this connection have.
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            # Of the request. They are here so that a copy has room for them.
            "method": "", "path": "", "raw_path": b"", "query_string": b"", "headers": [], FIELDS: {},
        }  # fmt: skip
        #: Whether a request began in the data that is being parsed, and its head is not complete.
        self._began = False
        #: Nothing is parsed any more: the connection ends after the answers that are still to be sent.
        self._is_ending = False
        #: The request whose body arrives, and the request whose answer is being made.
        self._receiving: RequestResponseCycle | None = None
        self._working: RequestResponseCycle | None = None
        #: When the first byte of the request came that is not complete yet; at first, when the connection was
        #: made.
        self._reading_since: float | None = self.loop.time()
        #: Since when the client has not taken all of its answers; since when all requests whose heads have
        #: come are answered.
        self._writing_since: float | None = None
        self._idle_since: float | None = None
        #: Answers a request from memory, or returns None.
        self._answer_now: Callable[[Any], Reply | None] | None = getattr(self.app, "answer_now", None)
        #: Whether the application takes a request without a task, when its body has come.
        self._takes_whole: Callable[[Any], bool] | None = getattr(self.app, "takes_whole", None)
        #: Such a request, whose body arrives.
        self._whole: _Cycle | None = None
        #: The name under which the connection is counted.
        self._counted: str | None = None
        if len(self.connections) > self.connections_max:
            problem = f"The gateway has {self.connections_max} connections, its maximum."
            self._shed("connections", retry_soon("busy", problem))
            return
        self._counted = self.by_address.add(self.client[0] if self.client else "")
        if self._counted is None:
            most = self.by_address.most
            problem = f"This address has {most} connections to the gateway, the maximum of one address."
            self._shed("connections_of_address", retry_soon("too_many_requests", problem))

    def _shed(self, what: str, problem: Problem) -> None:
        if self.measures is not None:
            self.measures.shed[what] += 1
        self._end(problem)

    def data_received(self, data: bytes) -> None:
        """Parses what has arrived, unless it is too much, or not the turn of this connection."""
        if self._is_ending:
            return
        if self._reading_since is None:
            self._reading_since = self.loop.time()
        if self.turns.has_room(self.loop):
            self._read(data)
        else:
            # Until it is read, nothing more comes, not even the end: nothing is parsed, so nothing that is
            # parsed can make the connection readable.
            self._deferred = data
            self._deferred_at = self.loop.time()
            self.transport.pause_reading()
            self.turns.wait(self)

    def read_deferred(self) -> None:
        """Parses what has waited for its turn."""
        data, self._deferred = self._deferred, b""
        if self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        if data and not self._is_ending:
            self._waited = self.loop.time() - self._deferred_at
            self._read(data)
            self._waited = 0.0

    def connection_lost(self, exc: Exception | None) -> None:
        """Frees what waited for its turn. The connection and its last request name each other, so only the
        garbage collector would free them, long after the connections of an attack have ended.
        """
        super().connection_lost(exc)
        if self._counted is not None:
            self.by_address.remove(self._counted)
            self._counted = None
        while self.pipeline:
            cycle, _ = self.pipeline.pop()
            cast(Any, cycle.scope).clear()
            cycle.body = bytearray()
        self.headers = []
        self._deferred = b""
        self._receiving = self._whole = None

    def shutdown(self) -> None:
        """Ends the connection after the requests that have come."""
        if self._deferred:
            self.read_deferred()
        super().shutdown()

    def _read(self, data: bytes) -> None:
        self._bytes += len(data)
        self._answered_now = self._body_tail = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse("This is not a valid and safe HTTP/1.1 request.")
        except httptools.HttpParserUpgrade:
            log.debug("a request asked for another protocol, and was refused")
        if self._began:
            self._began = False
            # The request before it ended at the last empty line, or with the body after that.
            self._bytes = max(0, _bytes_after_empty_line(data) - self._body_tail)
        if self._bytes > (HEAD_BYTES_MAX if self._is_head else MESSAGE_BYTES_MAX):
            self._end(_too_much(self._is_head))

    def on_message_begin(self) -> None:
        """A request begins."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_head = self._began = True
        self._head_bytes = 0
        self._reading_since = self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; a trailer field, after the body, is dropped."""
        # One more than the bound says that there are too many.
        if self._is_head and len(self.headers) <= HEADERS_MAX:
            self._head_bytes += len(name) + len(value) + 4
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete: the application is called, if the head is within its bound."""
        self._is_head = self._began = False
        self._bytes = self._body_tail = 0
        if self._is_ending:
            return
        if self.transport.is_closing():
            # The answer before was the last one of this connection.
            self._is_ending = True
            return
        headers = self.headers
        if self._head_bytes + len(self.url) > HEAD_BYTES_MAX or len(headers) > HEADERS_MAX:
            self._end(_too_much(is_head=True))
            return
        version, fields = self.parser.get_http_version(), dict(headers)
        if problem := self._why_unsafe(version, fields):
            self._refuse(problem)
            return
        if len(self.pipeline) >= PIPELINE_MAX:
            # Those before it get their answers; then the connection is closed.
            self._is_ending = True
            self.pipeline[0][0].keep_alive = False
            return
        before, cycle = self.cycle, self._begin(version, fields)
        self._receiving = self.cycle = cycle
        self._idle_since = None
        if before is not None and not before.response_complete:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))
        elif not self._is_answered_now(cycle):
            if self._takes_whole is not None and self._takes_whole(cycle.scope):
                self._working = self._whole = cycle
            else:
                self._start_asgi_task(cycle, self.app)

    def _begin(self, version: str, fields: dict[bytes, bytes]) -> _Cycle:
        """The request whose head is complete."""
        path, _, query = self.url.partition(b"?")
        text = path.decode("ascii")
        scope = self._scope.copy()
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["path"] = unquote(text) if "%" in text else text
        scope["raw_path"] = path
        scope["query_string"] = query
        scope["headers"] = self.headers
        scope[FIELDS] = fields
        if version != "1.1":
            scope["http_version"] = version
        if b"expect" in fields:
            self.expect_100_continue = b"100-continue" in map(bytes.lower, self._values_of(b"expect"))
        if self._waited:
            scope[WAITED] = self._waited
        # With Expect, the answer may precede the body, and then it is unknown whether the body follows.
        keep_alive = version != "1.0" and not self.expect_100_continue and self.parser.should_keep_alive()
        return _Cycle(self, scope, keep_alive)

    def _values_of(self, name: bytes) -> list[bytes]:
        """The values of a header, which may be there several times."""
        return [value for known, value in self.headers if known == name]

    def _is_answered_now(self, cycle: _Cycle) -> bool:
        """Sends the answer to a request that the application answers from its memory, if it does."""
        if self._answer_now is None or self.flow.write_paused or self._answered_now >= ANSWERED_AT_ONCE:
            return False
        reply = self._answer_now(cycle.scope)
        if reply is None:
            return False
        self._working = cycle
        self._answered_now += 1
        cycle.reply(reply)
        cycle.on_response = _nothing
        return True

    def _answer_whole(self, cycle: _Cycle) -> None:
        """Has the application answer a request whose body has come."""
        body, cycle.body = bytes(cycle.body), b""
        self.app.answer_soon(cycle.scope, body, partial(self._answered, cycle))

    def _answered(self, cycle: _Cycle, reply: Reply) -> None:
        try:
            is_sent = cycle.reply(reply)
        except RuntimeError:
            # uvloop has closed the connection, and notifies the protocol a moment later.
            if not self.transport.is_closing():
                log.exception("an answer cannot be sent")
                self.transport.abort()
            cycle.disconnected = is_sent = True
        if is_sent:
            cycle.on_response = _nothing
        else:
            self._start_asgi_task(cycle, partial(_send, reply))

    def on_response_complete(self) -> None:
        """An answer is complete: the next request gets its turn. `check` ends a connection that is idle, so
        that no timer is needed for each answer.
        """
        self.server_state.total_requests += 1
        working: Any = self._working
        if working is not None and REPLY in working.scope:
            # The request and its scope name each other, so only the collector would free them, and until then
            # each request would use new memory, which is in no cache of the processor.
            del working.scope[REPLY]
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        else:
            self._idle_since = self.loop.time()

    def _why_unsafe(self, version: str, fields: dict[bytes, bytes]) -> str:
        """Why a request may be read in another way by a proxy before this server, in words; '' if not."""
        if self.parser.should_upgrade():
            # The parser takes what follows for another protocol, also the body.
            return "The gateway speaks HTTP/1.1 only: send the request without Upgrade (and not as h2c)."
        if version not in ("1.0", "1.1"):
            return "The version must be HTTP/1.1 or HTTP/1.0."
        is_coded = b"transfer-encoding" in fields
        if version == "1.0" and is_coded:
            # A proxy that speaks HTTP/1.0 ignores the header, and takes the chunks for the next request.
            return "A request of HTTP/1.0 must not have Transfer-Encoding."
        hosts = count_of(b"host", fields, self.headers)
        if hosts > 1 or (version == "1.1" and not hosts):
            return "A request must have the header Host, once."
        if not self.url.startswith(b"/") or b"#" in self.url:
            return "The target of a request must be a path, which begins with / and has no fragment (#)."
        if is_coded and any(
            value.strip().lower() != b"chunked" for value in self._values_of(b"transfer-encoding")
        ):
            return "Transfer-Encoding must be chunked, if it is present."
        return ""

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends nothing more: complete requests get their answers."""
        if self.pipeline and self.pipeline[0][0] is self._receiving:
            self.pipeline.popleft()
            self._receiving = None
        last = self.pipeline[0][0] if self.pipeline else self._working
        if self._is_ending or self._receiving is not None or last is None or last.response_complete:
            return None
        self._is_ending = True
        last.keep_alive = False
        return True

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._working = cycle
        cycle.begin_reading()
        cycle.scope[ABORT] = self.transport.abort
        cycle.scope[REPLY] = cycle.reply

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            except RuntimeError:
                # uvloop has closed the connection, and notifies the protocol a moment later.
                if not self.transport.is_closing():
                    raise
                cycle.disconnected = True

        super()._start_asgi_task(cycle, answer)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._is_ending:
            return
        self._body_tail = _bytes_after_empty_line(body)
        cycle: Any = self.cycle
        if cycle.response_complete:
            return
        cycle.add(body)
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._is_ending:
            return
        self._is_head = True
        self._bytes = 0
        self._reading_since = self._receiving = None
        cycle: Any = self.cycle
        if b"transfer-encoding" in cycle.scope[FIELDS]:
            # An empty line ends the chunks.
            self._body_tail = 0
        if cycle.response_complete:
            return
        cycle.more_body = False
        cycle.message_event.set()
        whole, self._whole = self._whole, None
        if whole is cycle:
            self._answer_whole(whole)

    def _refuse(self, words: str) -> None:
        """Refuses what is not HTTP, or not safe."""
        if not self._is_ending:
            self._end(Problem("malformed_request", words))

    def check(self, now: float) -> None:
        """Closes the connection when its client is too slow. Called every second."""
        if self._deferred:
            return  # it is the gateway that is slow
        try:
            is_waiting = self.transport.get_write_buffer_size() > 0
        except RuntimeError:
            return  # uvloop has closed the connection, and notifies the protocol in a moment
        if not is_waiting:
            self._writing_since = None
        elif self._is_streaming():
            pass  # it bounds the time of each piece itself
        elif self._writing_since is None:
            self._writing_since = now
        elif now - self._writing_since > WRITE_SECONDS_MAX:
            self.transport.abort()
            return
        if self._reading_since is None:
            if self._idle_since is not None and now - self._idle_since > self.timeout_keep_alive:
                self.timeout_keep_alive_handler()
        elif not self._is_ending and now - self._reading_since > READ_SECONDS_MAX:
            self._end(Problem("request_timeout", f"A request must arrive within {READ_SECONDS_MAX:.0f} s."))

    def _is_streaming(self) -> bool:
        working = self._working
        return working is not None and not working.response_complete and STREAMS in working.scope

    def _end(self, problem: Problem) -> None:
        """Sends a problem, and closes the connection. Requests that were complete before get their answers;
        then nothing follows them.
        """
        self._is_ending = True
        receiving, self._receiving = self._receiving, None
        if self.pipeline and self.pipeline[0][0] is receiving:
            self.pipeline.popleft()
            receiving = None
        if receiving is not None:
            if not receiving.response_started:
                self._write(problem)
            receiving.disconnected = True
            receiving.message_event.set()
            self.transport.close()
            return
        last = self.pipeline[0][0] if self.pipeline else self._working
        if last is None or last.response_complete:
            self._write(problem)
            self.transport.close()
        else:
            last.keep_alive = False

    def _write(self, problem: Problem) -> None:
        status, body, headers = problem.reply()
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()]
        lines += [name + b": " + value for name, value in headers]
        lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
        self.transport.write(b"\r\n".join(lines))


def _bytes_after_empty_line(data: bytes) -> int:
    """How many bytes follow the last empty line; all if there is none."""
    return len(data.rpartition(b"\r\n\r\n")[2])


def _too_much(is_head: bool) -> Problem:
    if is_head:
        return Problem(
            "head_too_large",
            f"A request has at most {HEADERS_MAX} headers, and the request line and all headers have at most "
            f"{HEAD_BYTES_MAX} bytes together.",
        )
    return Problem("content_too_large", f"A request has at most {MESSAGE_BYTES_MAX} bytes.")


def bounded(
    connections: int, by_address: ConnectionsByAddress, measures: GatewayMeasures | None = None
) -> type[BoundedProtocol]:
    """The protocol with bounds of connections. `measures` counts what it refuses."""
    own = {
        "connections_max": connections, "by_address": by_address, "measures": measures, "turns": Turns(),
        "__slots__": (),
    }  # fmt: skip
    return type("Bounded", (BoundedProtocol,), own)


async def keep_checking(connections: Iterable[Any]) -> None:
    """Ends slow connections until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(CHECK_EVERY_SECONDS)
        now = loop.time()
        for connection in list(connections):
            try:
                cast(BoundedProtocol, connection).check(now)
            except Exception:
                # One connection must not keep the others from being checked.
                log.exception("a connection cannot be checked; it is aborted")
                connection.transport.abort()


class Server(uvicorn.Server):
    """A server that leaves signals to its process, and calls `ready` when it accepts connections."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @property
    def connections(self) -> Collection[Any]:
        """The open connections; the same object while the server runs."""
        return self.server_state.connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to accept connections."""
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures nothing."""
        yield
