"""A verifier whose passes the test starts one by one, and damage to the rows that it checks."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from psycopg import IsolationLevel

from grabstream.connections.opening import key_space, open_redis
from grabstream.projections.checking import verified
from grabstream.settings import Settings
from grabstream.streams.projecting.verifier import Verifier
from grabstream.workshop.rehearsal.run import open_books
from tests.support.projecting import (
    journal,  # noqa: F401 - a fixture
    open_tables,
)
from tests.support.random_history import History, random_history
from tests.support.stopped_shards import call_json  # noqa: F401 - a fixture

#: A pass reads a bounded number of events; this many passes are a full round over a test's history.
PASSES = 6


@asynccontextmanager
async def verifying(settings: Settings) -> AsyncIterator[Callable[..., Any]]:
    """Yields a function that makes some passes and returns the open findings."""
    redis = open_redis(settings)
    async with await open_books(settings) as connection:
        await verified.begin(connection, settings.shards)
        await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        verifier = Verifier(redis, key_space(settings), settings.postgres, settings.schema_, 1.0)

        async def passes(number: int = PASSES) -> list[verified.OpenFinding]:
            for passes_left in reversed(range(number)):
                # Rows are recomputed in the last pass only, and not every few seconds.
                verifier._rows_at = float("inf") if passes_left else 0.0
                await verifier.verify_once(connection)
            return await verified.open_findings(connection)

        yield passes
    await redis.aclose()


async def execute(settings: Settings, statement: str) -> None:
    """Changes exactly one row of the live tables."""
    async with await open_tables(settings) as connection:
        done = await connection.execute(statement.encode())
        assert done.rowcount == 1, statement


@pytest.fixture(scope="module")
def history() -> History:
    """A long random history of four offers with holds, late payments, returns, waiting lists, amendments and
    retirement.
    """
    return random_history(7, 700)
