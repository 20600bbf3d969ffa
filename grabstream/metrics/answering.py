"""Whether the servers of a gateway answer, checked on request."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from grabstream.connections.opening import open_redis
from grabstream.connections.redis_servers import masters
from grabstream.gateway.problems import Problem
from grabstream.gateway.view_reader import ViewReader
from grabstream.runtime.ending import running
from grabstream.runtime.trouble import is_trouble
from grabstream.settings import Settings

#: How long a server may take to answer, and how long its answer counts.
ANSWER_SECONDS_MAX: Final = 2.0
KEPT_SECONDS: Final = 1.0


class Answering:
    """Whether servers answer, checked on request, at most once a second."""

    def __init__(self, asks: dict[str, Callable[[], Awaitable[Any]]]) -> None:
        self._asks = asks
        self._asking: asyncio.Task[dict[str, bool]] | None = None
        self._asked_at = 0.0

    async def servers(self) -> dict[str, bool]:
        """Whether each server answers."""
        if self._asking is None or (self._asking.done() and time.monotonic() > self._asked_at + KEPT_SECONDS):
            self._asking = asyncio.create_task(self._ask_all())
        return await asyncio.shield(self._asking)

    async def redis(self) -> bool:
        """Whether a server of Redis that decides answers."""
        return (await self.servers())["redis"]

    async def _ask_all(self) -> dict[str, bool]:
        answers = await asyncio.gather(*map(_answers, self._asks.values()))
        self._asked_at = time.monotonic()
        return dict(zip(self._asks, answers, strict=True))


@asynccontextmanager
async def open_answering(settings: Settings, books: ViewReader) -> AsyncIterator[Answering]:
    """Asks Redis on a separate connection, and PostgreSQL in a session for questions."""
    client = open_redis(settings)

    async def ask_redis() -> None:
        """Returns when a server that decides answers: while one of a cluster is down, the others decide."""
        pings = [server.ping() for _, server in await masters(client)]
        async with running(*pings) as tasks:
            problem: BaseException | None = None
            for answer in asyncio.as_completed(tasks):
                try:
                    await answer
                except BaseException as error:
                    if not is_trouble(error):
                        raise
                    problem = error
                else:
                    return
            raise problem or ConnectionError("no server of the Redis Cluster is known")

    async def ask_books() -> None:
        try:
            await books.rows("SELECT 1")
        except Problem as problem:
            raise OSError(str(problem)) from None

    try:
        yield Answering({"redis": ask_redis, "postgresql": ask_books})
    finally:
        await client.aclose()


async def _answers(ask: Callable[[], Awaitable[Any]]) -> bool:
    try:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            await ask()
    except BaseException as error:
        if not is_trouble(error):
            raise
        return False
    return True
