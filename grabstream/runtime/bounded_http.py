"""The HTTP client for servers that are not part of the system: receivers of webhooks, issuers of tokens and
keys, the payment side.

The client of aiohttp bounds the size of single lines and the number of headers, but accepts interim responses
(`100 Continue`), chunk extensions and chunks without end, and queues interim responses faster than they are
read. So here everything that a server sends for one request is counted before it is parsed: interim
responses, head, framing, body, trailers. At the bound the connection is closed. Bytes before the bound are
parsed: 64 KiB of the costliest form take some ms.
"""

import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.helpers import set_exception

#: What an answer may have in addition to its body: interim responses, head, framing of chunks, trailers.
HEAD_BYTES_MAX: Final = 64 * 1024


class AnswerTooLong(aiohttp.ClientError):
    """A server sent more for one request than the bound."""


async def body_of(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The body of an answer; raises AnswerTooLong when it has more than `bytes_max` bytes."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > bytes_max:
            raise AnswerTooLong(f"the answer has more than {bytes_max} bytes")
    return bytes(body)


class _BoundedResponses(ResponseHandler):
    """The responses of one connection. `answer_bytes_max` bounds what arrives from the beginning of a request
    until the next one begins.
    """

    def __init__(self, answer_bytes_max: int, **options: Any) -> None:
        super().__init__(**options)
        self._answer_bytes_max = answer_bytes_max
        self._bytes_left = answer_bytes_max

    def set_response_params(self, **params: Any) -> None:
        """Called when a request begins."""
        self._bytes_left = self._answer_bytes_max
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        """Parses what arrived, up to the bound."""
        if self._bytes_left < 0:
            return
        within = data[: self._bytes_left]
        self._bytes_left -= len(data)
        # Without data, what was kept back before is parsed.
        if within or not data:
            super().data_received(within)
        if self._bytes_left < 0:
            error = AnswerTooLong(f"the answer has more than {self._answer_bytes_max} bytes")
            payload, self._payload = self._payload, None
            if self.exception() is None:
                self.set_exception(error)
            if payload is not None and not payload.is_eof():
                set_exception(payload, error)
            # The parser would replace the error of the body when the connection ends.
            self._parser = None
            if self.transport is not None:
                self.transport.abort()


class BoundedConnector(aiohttp.TCPConnector):
    """Makes connections on which no answer has more than `answer_bytes_max` bytes in all."""

    def __init__(self, answer_bytes_max: int, **options: Any) -> None:
        super().__init__(**options)
        # aiohttp has no public way to see interim responses or chunks. If it makes its protocols in another
        # way one day, tests/runtime/test_bounded_http.py fails.
        self._factory = partial(_BoundedResponses, answer_bytes_max, loop=self._loop)  # type: ignore[assignment]


def bounded_session(
    answer_bytes_max: int,
    seconds_max: float,
    headers: Mapping[str, str] | None = None,
    socket_factory: Callable[[tuple[Any, ...]], socket.socket] | None = None,
) -> aiohttp.ClientSession:
    """A session whose requests end after `seconds_max`, and with AnswerTooLong when more than
    `answer_bytes_max` bytes arrive for one of them, not only in its body.

    It keeps no cookies, has no bound of connections, and does not unpack a compressed body, whose size would
    be unknown: it asks for none. `socket_factory` makes the socket for an address (aiohttp).
    """
    return aiohttp.ClientSession(
        connector=BoundedConnector(answer_bytes_max, limit=0, socket_factory=socket_factory),
        timeout=aiohttp.ClientTimeout(total=seconds_max),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"accept-encoding": "identity", **(headers or {})},
    )
