"""The monitoring listener of a process: `/metrics`, `/health/live` and `/health/ready`.

It has no authentication: it shows numbers and names of servers, and nothing about users. aiohttp serves it,
which does nothing without requests; the gateway's own server would wake up ten times a second.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web

from grabstream.gateway.serving import bind
from grabstream.metrics.exposition import Exposition
from grabstream.metrics.state import Ask
from grabstream.runtime.ending import running
from grabstream.settings import host_and_port

#: Connections beyond this are closed at once: a client keeps them open.
CONNECTIONS_MAX: Final = 32
IDLE_SECONDS_MAX: Final = 75.0
SHUTDOWN_SECONDS_MAX: Final = 1.0


@asynccontextmanager
async def listening(
    address: str, exposition: Exposition, state: Ask, log: logging.Logger
) -> AsyncIterator[int | None]:
    """Serves on an address while the block runs; gives the port. An address that cannot be used is logged,
    and the process works without it: another process of this machine may have the port. `log` is that of the
    process.
    """
    server = web.Server(
        _handler(exposition, state), access_log=None, keepalive_timeout=IDLE_SECONDS_MAX
    )  # fmt: skip

    def accept() -> asyncio.BaseProtocol:
        return server() if len(server.connections) < CONNECTIONS_MAX else _ClosedConnection()

    host, port = host_and_port(address)
    try:
        bound = bind(host, port)
        # Two processes that start together may both bind a port; only one of them can listen.
        listener = await asyncio.get_running_loop().create_server(accept, sock=bound)
    except (OSError, UnicodeError) as error:
        words = error.strerror if isinstance(error, OSError) else None
        log.warning(
            "no metrics: cannot listen on %s (GRAB_METRICS_LISTEN): %s; give each process its own port",
            address,
            words or error,
        )
        listener = None
    if listener is None:
        yield None
        return
    # What others send wrong is answered, not logged.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    port = bound.getsockname()[1]
    log.info("metrics and health on port %d of %s", port, host)
    try:
        yield port
    finally:
        listener.close()
        async with running(server.shutdown(SHUTDOWN_SECONDS_MAX)) as tasks:
            await asyncio.wait(tasks, timeout=2 * SHUTDOWN_SECONDS_MAX)


class _ClosedConnection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _handler(
    exposition: Exposition, state: Ask
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"allow": "GET, HEAD"})
        if request.path == "/metrics":
            text, content_type = await exposition.text(request.headers.get("accept", ""))
            return web.Response(body=text, headers={"content-type": content_type})
        if request.path == "/health/live":
            return _json(200, {"status": "live"})
        if request.path == "/health/ready":
            found = await state()
            return _json(200 if found.is_ready else 503, found.document())
        return _json(404, {"status": "not found", "paths": ["/metrics", "/health/live", "/health/ready"]})

    return answer


def _json(status: int, document: Mapping[str, Any]) -> web.Response:
    return web.Response(
        status=status,
        body=json.dumps(document).encode(),
        headers={"content-type": "application/json", "cache-control": "no-store"},
    )
