"""Changes of sums are merged into rows: existing rows are updated, others inserted, also when another
transaction inserts them at the same moment.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation, UniqueViolation

from grabstream.projections.database.arrays import integer_array, text_array
from grabstream.projections.database.merging import merge, merge_of
from grabstream.settings import Settings
from tests.conftest import until

ADD = merge_of("sums", ("name", "asset"), ("posted",))


@pytest.fixture
async def books(settings: Settings) -> AsyncIterator[Settings]:
    schema = settings.schema_
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as connection:
        await connection.execute(
            f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.sums (name text, asset text, posted numeric "
            "CHECK (posted >= 0), PRIMARY KEY (name, asset))".encode()
        )
        yield settings
        await connection.execute(f"DROP SCHEMA {schema} CASCADE".encode())


async def session(books: Settings) -> AsyncConnection[Any]:
    connection = await AsyncConnection.connect(books.postgres, autocommit=True)
    await connection.execute("SELECT set_config('search_path', %s, false)", (books.schema_,))
    return connection


async def add(connection: AsyncConnection[Any], **changes: int) -> None:
    names, assets = text_array(list(changes)), text_array(["CNY"] * len(changes))
    async with connection.transaction():
        await merge(connection, ADD, (names, assets, integer_array(list(changes.values()))))


async def sums(connection: AsyncConnection[Any]) -> dict[str, int]:
    rows = await connection.execute("SELECT name, posted::bigint FROM sums WHERE asset = 'CNY'")
    return dict(await rows.fetchall())


async def test_changes_are_added_to_rows_or_inserted(books: Settings) -> None:
    async with await session(books) as connection:
        await add(connection, a=5, c=10**15)
        # A loss is tested with what the row has, not alone.
        await add(connection, a=-5, b=0, c=10**15)
        rows = await connection.execute("SELECT name, posted FROM sums ORDER BY name")
        assert await rows.fetchall() == [("a", 0), ("b", 0), ("c", 2 * 10**15)]
        for loss in ({"a": -1}, {"d": -1}):
            with pytest.raises(CheckViolation):
                await add(connection, **loss)
        assert set(await sums(connection)) == {"a", "b", "c"}


async def test_rows_that_another_transaction_inserts_meanwhile_are_updated(books: Settings) -> None:
    async with await session(books) as one, await session(books) as other, await session(books) as watch:
        async with one.transaction():
            await merge(one, ADD, ("{a,c}", "{CNY,CNY}", "{1,1}"))
            adding = asyncio.create_task(add(other, a=10, b=10, c=10, d=10))

            async def other_waits() -> bool:
                waiting = await watch.execute(
                    "SELECT count(*) = 1 FROM pg_locks WHERE pid = %s AND NOT granted",
                    (other.info.backend_pid,),
                )
                return bool((await waiting.fetchone() or [False])[0])

            await until(other_waits, 10, "the other transaction to wait for the row")
        await adding
        assert await sums(watch) == {"a": 11, "b": 10, "c": 11, "d": 10}


async def test_a_statement_that_can_never_succeed_ends(books: Settings) -> None:
    """In a snapshot, the row of another transaction is never seen."""
    async with await session(books) as one, await session(books) as other:
        await other.execute("SET default_transaction_isolation = 'repeatable read'")
        with pytest.raises(UniqueViolation):
            async with other.transaction():
                await other.execute("SELECT count(*) FROM sums")
                await add(one, a=1)
                await add(other, a=1)
        assert await sums(one) == {"a": 1}
