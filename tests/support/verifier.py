"""What tests share of `tests/streams/projecting/test_verifier.py`."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from psycopg import IsolationLevel

from grabstream.ops.connections.opening import key_space, open_redis
from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.settings import Settings
from grabstream.projections.checking import verified
from grabstream.streams.projecting.verifier import Verifier
from tests.support.pieces import History, made
from tests.support.projections import (
    journal,  # noqa: F401 - a fixture
    open_tables,
)
from tests.support.set_aside import call  # noqa: F401 - a fixture

#: A pass walks so many events at most; a round over a history of the tests takes a few.
PASSES = 6


@asynccontextmanager
async def verifying(settings: Settings) -> AsyncIterator[Callable[..., Any]]:
    """A function that lets a verifier make some passes, and returns the open findings."""
    redis = open_redis(settings)
    async with await open_books(settings) as connection:
        await verified.begin(connection, settings.shards)
        await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        verifier = Verifier(redis, key_space(settings), settings.postgres, settings.schema_, 1.0)

        async def passes(number: int = PASSES) -> list[verified.Found]:
            for left in reversed(range(number)):
                # Rows are made once more at the last pass only, in place of every so many seconds.
                verifier._rows_at = float("inf") if left else 0.0
                await verifier.verify_once(connection)
            return await verified.open_findings(connection)

        yield passes
    await redis.aclose()


async def execute(settings: Settings, statement: str) -> None:
    async with await open_tables(settings) as connection:
        done = await connection.execute(statement.encode())
        assert done.rowcount == 1, statement


@pytest.fixture(scope="module")
def history() -> History:
    """A long random history of four offers with holds, late payments, returns, waiting lists, amendments and
    retirement.
    """
    return made(7, 700)
