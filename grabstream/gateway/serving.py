"""Runs the server of the gateway in the event loop of its gate, until it is stopped."""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from grabstream.gateway.addresses import ConnectionsByAddress
from grabstream.gateway.bounds import ACCEPTED_AT_ONCE, BACKLOG, DRAIN_SECONDS_MAX, IDLE_SECONDS_MAX
from grabstream.gateway.measures import GatewayMeasures
from grabstream.gateway.protocol import Server, bounded, keep_checking
from grabstream.runtime.ending import first_to_end, running

#: Open files of the process other than connections of clients.
OTHER_FILES: Final = 512


def bind(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """A bound socket; raises OSError. It accepts no connection before `serve`. A port that is shared may be
    bound by further processes of this user; the kernel gives each connection to one that listens.
    """
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


def connections_possible(wanted: int) -> int:
    """Raises the bound of open files of this process for `wanted` connections; returns how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - OTHER_FILES))


async def serve(
    application: ASGIApp, bound: socket.socket, connections_max: int, by_address: ConnectionsByAddress,
    stop: asyncio.Event, ready: Callable[[], None], measures: GatewayMeasures | None = None,
) -> None:  # fmt: skip
    """Serves until `stop`; then accepts nothing more, and returns when the requests in progress have their
    answers, at the latest after DRAIN_SECONDS_MAX.
    """
    config = uvicorn.Config(
        application,
        loop="none",
        http=bounded(connections_max, by_address, measures),
        ws="none",
        lifespan="off",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS_MAX,
        timeout_graceful_shutdown=DRAIN_SECONDS_MAX,
    )
    # What clients do wrong is answered, not logged.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    server = Server(config, ready)
    if measures is not None:
        measures.connections = lambda: len(server.connections)

    async def end() -> None:
        await stop.wait()
        server.should_exit = True

    # uvloop accepts one connection of a socket in each turn of its loop. Under load, a turn takes long, and
    # new clients would wait for seconds while those that are connected are served.
    serving: Any = server.serve(sockets=[bound, *(bound.dup() for _ in range(ACCEPTED_AT_ONCE - 1))])
    async with running(serving) as tasks, running(end(), keep_checking(server.connections)):
        await first_to_end(tasks)
