"""Watches Redis, Kafka and PostgreSQL for a worker, Redis and PostgreSQL for a gateway: logs one line when a
server stops answering, and one line when it answers again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient

from grabstream.connections.redis_servers import masters
from grabstream.projections.database.sessions import connect
from grabstream.runtime.ending import first_to_end, running
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.runtime.trouble import is_trouble
from grabstream.settings import Settings, without_password
from grabstream.streams import brokers
from grabstream.streams.clients import OUTAGES, error_text, started

#: The worker's log of its state, at level INFO even when other loggers are set higher.
log: Final = logging.getLogger("grabstream.worker")

ASK_EVERY_SECONDS: Final = 2.0
ANSWER_SECONDS_MAX: Final = 5.0

Ask = Callable[[], Awaitable[Any]]


async def watch_servers(
    settings: Settings, redis: Any, stop: asyncio.Event, has_kafka: bool = True, log: logging.Logger = log
) -> None:
    """Pings every server until `stop`, independently of the others, and logs changes. A gateway has no Kafka,
    and its own log.
    """

    @asynccontextmanager
    async def open_redis_servers() -> AsyncIterator[Ask]:
        async def ask() -> None:
            await asyncio.gather(*(client.ping() for _, client in await masters(redis)))

        yield ask

    @asynccontextmanager
    async def open_kafka() -> AsyncIterator[Ask]:
        client = AIOKafkaAdminClient(
            **brokers.at(settings.brokers, timeout_ms_max=int(ANSWER_SECONDS_MAX * 1000))
        )
        async with started(client):
            # For no topics: the metadata of all topics cost milliseconds of this process.
            yield partial(client.describe_topics, [])

    @asynccontextmanager
    async def open_postgres() -> AsyncIterator[Ask]:
        async with await connect(settings.postgres, settings.schema_) as connection:

            async def ask() -> None:
                await connection.execute("SELECT 1")

            yield ask

    servers = [
        ("Redis", settings.redis_url, open_redis_servers),
        ("PostgreSQL", settings.postgres, open_postgres),
    ]
    if has_kafka:
        servers.append(("Kafka", settings.kafka, open_kafka))
    OUTAGES.is_watched = True
    async with running(
        *(_watch(f"{name} ({without_password(address)})", opened, log) for name, address, opened in servers),
        stop.wait(),
    ) as tasks:
        await first_to_end(tasks)


async def _watch(
    server: str, opened: Callable[[], AbstractAsyncContextManager[Ask]], log: logging.Logger = log
) -> None:
    away_since: float | None = None
    ask: Ask | None = None
    was_answered = True
    async with AsyncExitStack() as stack:
        while True:
            was_open = ask is not None
            try:
                async with asyncio.timeout(ANSWER_SECONDS_MAX):
                    if ask is None:
                        ask = await stack.enter_async_context(opened())
                    assert ask is not None
                    await ask()
            except BaseException as error:
                if not is_trouble(error):
                    raise
                # A client of several servers may have pinged only the one that is down: a new client tries
                # all.
                ask = None
                with contextlib.suppress(Exception):
                    await stack.aclose()
                # A process that stands still, as when it imports on a busy machine, hears nothing in time
                # either.
                is_sure = not was_answered or not (was_open or isinstance(error, TimeoutError))
                was_answered = False
                if not is_sure:
                    continue
                if away_since is None:
                    away_since = time.monotonic()
                    OUTAGES.began(server)
                    log.error(
                        "%s does not answer: %s; trying again", server, " ".join(error_text(error).split())
                    )
            else:
                was_answered = True
                if away_since is not None:
                    log.warning("%s answers again, after %.0f s", server, time.monotonic() - away_since)
                    OUTAGES.ended(server)
                    away_since = None
            await asyncio.sleep(seconds_to_tick(ASK_EVERY_SECONDS))


class Readiness:
    """Logs one line when every part of a worker has started."""

    def __init__(self, parts: set[str], words: Callable[[], str]) -> None:
        self._missing = set(parts)
        self._words = words

    @property
    def missing(self) -> frozenset[str]:
        """The parts that have not started yet."""
        return frozenset(self._missing)

    def __call__(self, part: str) -> None:
        """Notes that a part has started. A part may report this more than once."""
        if part in self._missing:
            self._missing.remove(part)
            if not self._missing:
                log.info("ready: %s", self._words())
