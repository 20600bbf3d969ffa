"""HTTP/1.1 on one connection, with bounds of bytes and time.

uvicorn's protocol parses with httptools and calls the application. This subclass adds what it lacks: a bound
of the request's head and of the whole request, time limits for reading a request and for taking an answer, a
bound of connections, and problem details for what is not HTTP. It also drops trailer fields, which uvicorn
would add to the headers.
"""

import asyncio
import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from grabstream.gateway.bounds import (
    HEAD_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    PIPELINE_MAX,
    READ_SECONDS_MAX,
    WRITE_SECONDS_MAX,
)
from grabstream.gateway.problems import Problem, retry_soon

log = logging.getLogger(__name__)

CHECK_EVERY_SECONDS: Final = 1.0


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `connections_max` is set by `bounded`."""

    connections_max = 10_000

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuses the connection when there are too many."""
        super().connection_made(transport)
        #: Bytes of the request since its head began, or since its head was complete.
        self._bytes = 0
        self._head_bytes = 0
        self._is_head = True
        #: Why the request is not a safe one, by its headers.
        self._unsafe = ""
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
        #: Since when the client has not taken all of its answers.
        self._writing_since: float | None = None
        if len(self.connections) > self.connections_max:
            self._end(
                retry_soon(
                    "busy", f"The gateway has {self.connections_max} connections, as many as it takes."
                )
            )

    def data_received(self, data: bytes) -> None:
        """Parses what has arrived, unless it is too much."""
        if self._is_ending:
            return
        if self._reading_since is None:
            self._reading_since = self.loop.time()
        self._bytes += len(data)
        super().data_received(data)
        if self._began:
            self._began = False
            # The request before it ended at the last empty line, or after it.
            self._bytes = len(data) - (data.rfind(b"\r\n\r\n") + 4 if b"\r\n\r\n" in data else 0)
        if self._bytes > (HEAD_BYTES_MAX if self._is_head else MESSAGE_BYTES_MAX):
            self._end(_too_much(self._is_head))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_head = self._began = True
        self._head_bytes = 0
        self._unsafe = ""
        self._reading_since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; a trailer field, after the body, is dropped."""
        if self._is_head:
            self._head_bytes += len(name) + len(value) + 4
            if name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
                self._unsafe = "Transfer-Encoding must be chunked, if it is there."
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: the application is called, if the head is within its bound."""
        self._is_head = self._began = False
        self._bytes = 0
        if self._is_ending:
            return
        if self._head_bytes > HEAD_BYTES_MAX:
            self._end(_too_much(is_head=True))
            return
        if problem := self._why_unsafe():
            self._end(Problem("malformed_request", problem))
            return
        if len(self.pipeline) >= PIPELINE_MAX:
            self._end(
                retry_soon(
                    "busy",
                    f"At most {PIPELINE_MAX} requests of a connection wait for their turn. The requests from "
                    "this one on decided nothing.",
                )
            )
            return
        super().on_headers_complete()
        self._receiving = self.cycle
        if self.expect_100_continue:
            # The answer may come before the body, and then nobody knows whether the body comes.
            self.cycle.keep_alive = False

    def _why_unsafe(self) -> str:
        """Why a request may be read in another way by somebody before this server, in words; '' if not."""
        if self.parser.should_upgrade():
            # The parser takes what follows for another protocol, also the body.
            return "The gateway speaks HTTP/1.1 only: send the request without Upgrade (and not as h2c)."
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            return "The version must be HTTP/1.1 or HTTP/1.0."
        if not self.url.startswith(b"/"):
            return "The target of a request must be a path, which begins with /."
        return self._unsafe

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends nothing more: requests that are complete get their answers."""
        last = self.pipeline[0][0] if self.pipeline else self._working
        if self._is_ending or self._receiving is not None or last is None or last.response_complete:
            return None
        self._is_ending = True
        last.keep_alive = False
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._working = cycle

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            except RuntimeError:
                # uvloop has closed the connection, and tells the protocol a moment later.
                if not self.transport.is_closing():
                    raise
                cycle.disconnected = True

        super()._start_asgi_task(cycle, answer)

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self._is_ending:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._is_ending:
            return
        self._is_head = True
        self._bytes = 0
        self._reading_since = self._receiving = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is not HTTP."""
        if not self._is_ending:
            self._end(Problem("malformed_request", "This is not an HTTP/1.1 request, or not a safe one."))

    def _unsupported_upgrade_warning(self) -> None:
        log.debug("a request asked for another protocol, and was refused")

    def check(self, now: float) -> None:
        """Ends the connection when its client has been too slow. Called every second."""
        try:
            is_waiting = self.transport.get_write_buffer_size() > 0
        except RuntimeError:
            return  # uvloop has ended the connection, and tells the protocol in a moment
        if not is_waiting:
            self._writing_since = None
        elif self._writing_since is None:
            self._writing_since = now
        elif now - self._writing_since > WRITE_SECONDS_MAX:
            self.transport.abort()
            return
        if (
            not self._is_ending
            and self._reading_since is not None
            and now - self._reading_since > READ_SECONDS_MAX
        ):
            self._end(Problem("request_timeout", f"A request must arrive within {READ_SECONDS_MAX:.0f} s."))

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


def _too_much(is_head: bool) -> Problem:
    if is_head:
        return Problem(
            "head_too_large",
            f"The request line and the headers have at most {HEAD_BYTES_MAX} bytes together.",
        )
    return Problem("content_too_large", f"A request has at most {MESSAGE_BYTES_MAX} bytes.")


def bounded(connections: int) -> type[BoundedProtocol]:
    """The protocol with a bound of connections."""
    return type("Bounded", (BoundedProtocol,), {"connections_max": connections})


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
