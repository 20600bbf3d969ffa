"""The role `webhooks` of a worker. One worker of a system delivers; another one takes its place when it ends,
or loses its session of PostgreSQL.
"""

import asyncio
import logging
from typing import Any, Final

from psycopg import AsyncConnection

from grabstream.crypto.sealing import Sealer
from grabstream.projections.database.locks import LockTaken, lock_or_raise
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import bound_locks, connect, open_pool
from grabstream.projections.tables import webhooks as stored
from grabstream.runtime.ending import first_to_end, running
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.streams.clients import Trouble
from grabstream.streams.topics import Topics
from grabstream.streams.webhooks.reading import Reader
from grabstream.streams.webhooks.sending import SendBounds, Sender

log = logging.getLogger(__name__)

#: How often a worker looks for the first subscription. Without any, it does nothing else.
IDLE_SECONDS: Final = 2.0
#: How often a worker that does not deliver checks whether it may, and one that delivers, whether it still
#: may.
POLL_SECONDS: Final = 1.0
#: A session that does not answer for this long is lost.
LOST_SECONDS: Final = 5.0
SESSIONS_MAX: Final = 8
WAIT_SECONDS: Final = 30.0


class Webhooks:
    """Delivers webhooks of one system."""

    def __init__(
        self, postgres: str, schema: str, kafka: str, prefix: str, shards: int, sealer: Sealer,
        limits: SendBounds, sent: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._sent = sent
        self._postgres = postgres
        self._schema = schema
        self._kafka = kafka
        self._journal = Topics(prefix).journal
        self._shards = shards
        self._sealer = sealer
        self._limits = limits

    async def run(self, stop: asyncio.Event) -> None:
        """Delivers, or waits for its turn, until `stop`."""
        async with running(stop.wait(), self._take_turns()) as tasks:
            await first_to_end(tasks)

    async def _take_turns(self) -> None:
        trouble = Trouble(log, "webhooks")
        while True:
            try:
                async with await connect(self._postgres, self._schema, "webhooks") as connection:
                    await use_schema(connection, self._schema)
                    await bound_locks(connection)
                    trouble.over()
                    await self._await_subscriptions(connection)
                    await self._await_turn(connection)
                    await self._deliver(connection)
            except BaseException as error:
                trouble.met(error)
                await asyncio.sleep(POLL_SECONDS)

    async def _await_subscriptions(self, connection: AsyncConnection[Any]) -> None:
        """Returns when there are subscriptions."""
        while True:
            if await stored.has_any(connection):
                return
            await asyncio.sleep(seconds_to_tick(IDLE_SECONDS))

    async def _await_turn(self, connection: AsyncConnection[Any]) -> None:
        """Returns when the session holds the lock of the worker that delivers."""
        while True:
            try:
                await lock_or_raise(connection, f"grabstream-webhooks-{self._schema}", "webhooks")
            except LockTaken:
                await asyncio.sleep(seconds_to_tick(POLL_SECONDS))
            else:
                return

    async def _deliver(self, connection: AsyncConnection[Any]) -> None:
        """Delivers as long as there are subscriptions and the session holds its lock; raises the error that
        ended it.
        """

        async def prepare(opened: AsyncConnection[Any]) -> None:
            await use_schema(opened, self._schema)
            await bound_locks(opened)

        added = asyncio.Event()
        pool = open_pool(
            self._postgres, self._schema, "webhooks", SESSIONS_MAX, 10_000, WAIT_SECONDS, prepare
        )
        async with pool:
            reader = Reader(pool, self._kafka, self._journal, self._shards, added)
            sender = Sender(pool, self._sealer, self._limits, added, self._sent)
            async with running(reader.run(), sender.run(), self._keep(connection)) as tasks:
                await first_to_end(tasks)

    async def _keep(self, connection: AsyncConnection[Any]) -> None:
        """Ends when the last subscription was removed, or with an error when the session is lost, and with it
        the lock.
        """
        while True:
            await asyncio.sleep(seconds_to_tick(POLL_SECONDS))
            async with asyncio.timeout(LOST_SECONDS):
                if not await stored.has_any(connection):
                    return
