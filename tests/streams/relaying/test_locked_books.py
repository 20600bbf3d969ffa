"""Sessions of PostgreSQL that hold locks for long: no shard waits for them, and workers start and stop."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from psycopg import AsyncConnection, sql

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import StockTerms
from grabstream.settings import Settings
from tests.conftest import until

pytestmark = pytest.mark.long

ASKED: dict[str, Any] = {"patience_ms": 120_000, "timeout_ms": 120_000}


@pytest.fixture
async def lock(system: Settings, servers: Settings) -> AsyncIterator[Callable[[], Any]]:
    """Returns a function that locks all tables of the system, as maintenance does."""
    async with await AsyncConnection.connect(system.postgres) as holder:

        async def lock_all() -> None:
            found = await holder.execute(
                "SELECT schemaname, tablename FROM pg_tables "
                "WHERE schemaname = %s OR starts_with(schemaname, %s)",
                (system.schema_, f"{system.schema_}_"),
            )
            for schema, table in await found.fetchall():
                await holder.execute(
                    sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(sql.Identifier(schema, table))
                )

        yield lock_all
        await holder.rollback()


async def test_no_shard_waits_for_a_lock_in_postgresql(
    system: Settings, worker: Callable[..., Any], lock: Callable[[], Any]
) -> None:
    """Neither after its server has restarted, nor while it is rebuilt, nor for a worker that starts."""
    redis, keys = open_redis(system), key_space(system)
    shard = keys.shard(keys.shard_of_offer("o"))
    try:
        async with open_gate(system) as gate:
            running = worker(system, "decide,relay,sweep")
            terms = StockTerms(issuer="i", total=99, closes_at=4_000_000_000_000)
            [opened] = await gate.decide([Open(id="open", offer="o", terms=terms)], **ASKED)
            assert opened.outcome == "opened"
            await lock()
            for number in range(3):
                if number == 0:
                    await redis.hset(shard.state, "server_epoch", "of another server")
                elif number == 1:
                    await redis.delete(shard.state)
                else:
                    assert await asyncio.to_thread(running.stop) == 0
                    running = worker(system, "decide,relay,sweep")
                async with asyncio.timeout(120):
                    [answer] = await gate.decide(
                        [Grab(id=f"g{number}", offer="o", user=f"u{number}")], **ASKED
                    )
                assert (answer.outcome, answer.place) == ("granted", number + 1)
            assert await asyncio.to_thread(running.stop) == 0
    finally:
        await redis.aclose()


async def test_a_worker_that_waits_for_a_server_at_its_start_can_be_stopped(
    system: Settings, worker: Callable[..., Any], lock: Callable[[], Any]
) -> None:
    await lock()
    running = worker(system)

    async def waits() -> bool:
        async with await AsyncConnection.connect(system.postgres, autocommit=True) as connection:
            found = await connection.execute(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                "AND starts_with(application_name, %s)",
                (f"grabstream {system.schema_}",),
            )
            return await found.fetchone() is not None

    await until(waits, 30, "the wait")
    began = asyncio.get_running_loop().time()
    running.signal(signal.SIGTERM)
    assert await asyncio.to_thread(running.process.wait, 60) == 0
    assert asyncio.get_running_loop().time() - began < 15


async def test_work_that_waits_for_a_lock_is_reported(
    system: Settings, worker: Callable[..., Any], lock: Callable[[], Any]
) -> None:
    """The counts of refusals, the verifier, and webhooks: they wait, and the log names it."""
    running = worker(system, "decide,relay,sweep,verify,webhooks")
    async with open_gate(system) as gate:
        [refused] = await gate.decide([Grab(id="g", offer="none", user="u")], **ASKED)
        assert refused.outcome == "no_such_offer"
        await until(lambda: "verify" in running.log.read_text(), 60, "the verifier")
        await lock()
        for number in range(20):
            await gate.decide([Grab(id=f"g{number}", offer="none", user="u")], **ASKED)

        def reported(where: str) -> bool:
            lines = running.log.read_text().splitlines()
            return any(where in line and "lock timeout" in line for line in lines)

        for where in ("sweeping shard", "verifier:", "webhooks:"):
            await until(lambda: reported(where), 60, f"the report of {where}")  # noqa: B023 - called at once
    assert await asyncio.to_thread(running.stop) == 0
