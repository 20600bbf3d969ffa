"""A receiver of webhooks: keeps what it is sent, and answers as a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiohttp import web

from tests.support.web_servers import serving


class Got(NamedTuple):
    """A request: its headers, its body, and the event in it."""

    headers: dict[str, str]
    body: str
    request: web.Request

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def message(self) -> Any:
        return json.loads(self.body)

    @property
    def offer(self) -> str:
        return str(self.message["data"]["offer"])


Answer = Callable[[Got], Awaitable[web.StreamResponse]]


async def ok(got: Got) -> web.StreamResponse:
    """Takes everything."""
    return web.Response(status=204)


class Receiver:
    """A server of HTTP on a free port. `answer` may be replaced."""

    def __init__(self) -> None:
        self.requests: list[Got] = []
        self.answer: Answer = ok
        self.port = 0
        #: Requests in progress, by offer, and the most at a time, of one offer and of all.
        self.in_work: dict[str, int] = {}
        self.most_of_offer = 0
        self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def ids(self) -> list[str]:
        return [got.id for got in self.requests]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        got = Got(
            {name.lower(): value for name, value in request.headers.items()}, await request.text(), request
        )
        self.requests.append(got)
        offer = got.offer
        self.in_work[offer] = self.in_work.get(offer, 0) + 1
        self.most_of_offer = max(self.most_of_offer, self.in_work[offer])
        self.most = max(self.most, sum(self.in_work.values()))
        try:
            return await self.answer(got)
        finally:
            self.in_work[offer] -= 1


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """A receiver that listens on this machine."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", receiver.handle)
    async with serving(app, access_log=None, shutdown_timeout=0.1) as receiver.port:
        yield receiver


async def never(got: Got) -> web.StreamResponse:
    """Does not answer."""
    await asyncio.Event().wait()
    raise AssertionError
