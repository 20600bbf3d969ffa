"""What servers must be like, one entry for each condition: `init` refuses before it makes anything, every
process before it does anything, and `doctor` tells it.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import AsyncConnection, sql
from psycopg.conninfo import make_conninfo
from psycopg.errors import QueryCanceled
from psycopg.rows import dict_row

from grabstream.gateway.books import Books, open_books
from grabstream.ops.connections.opening import check_system, checked_books, sealer
from grabstream.ops.connections.preconditions import ConditionNotMet
from grabstream.ops.connections.user_keys import KeysOfUsers
from grabstream.ops.console.endings import ending_of
from grabstream.ops.diagnosis.examination import Examination, examine
from grabstream.ops.initialization import make_system
from grabstream.ops.settings import Settings, load_settings
from grabstream.projections.database.sessions import connect
from grabstream.streams.topic_ids import find_topic
from grabstream.streams.topics import Topics
from tests.support.transaction_pooler import transaction_pooler

CHECK = "servers are what the system needs"


def administrator(database: str | None = None) -> psycopg.Connection[Any]:
    """A session of the administrator of the tests' server."""
    postgres = load_settings().postgres
    named = make_conninfo(postgres, dbname=database) if database else postgres
    return psycopg.connect(named, autocommit=True)


def database_encoded(encoding: str) -> Callable[[Settings], AbstractAsyncContextManager[Settings]]:
    """The settings of a database of its own, in another encoding."""

    @asynccontextmanager
    async def spoilt(settings: Settings) -> AsyncIterator[Settings]:
        name = sql.Identifier(settings.prefix)
        with administrator() as opened:
            opened.execute(
                sql.SQL(
                    "CREATE DATABASE {} ENCODING {} LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
                ).format(name, encoding)
            )
            opened.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO PUBLIC").format(name))
            try:
                postgres = make_conninfo(settings.postgres, dbname=settings.prefix)
                yield settings.model_copy(update={"postgres": postgres})
            finally:
                opened.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))

    return spoilt


@asynccontextmanager
async def pooled(settings: Settings) -> AsyncIterator[Settings]:
    """The settings of a pooler in transaction mode."""
    async with transaction_pooler(settings.postgres) as postgres:
        yield settings.model_copy(update={"postgres": postgres})


class Entry(NamedTuple):
    """A condition of servers, how a server is made that does not meet it, and words of the message: what is
    so, and the way out.
    """

    spoilt: Callable[[Settings], AbstractAsyncContextManager[Settings]]
    words: tuple[str, ...]


ENTRIES = {
    "a database in LATIN1": Entry(
        database_encoded("LATIN1"), ("is LATIN1, and must be UTF8", "ENCODING 'UTF8' TEMPLATE template0")
    ),
    "a database without encoding": Entry(
        database_encoded("SQL_ASCII"), ("is SQL_ASCII, and must be UTF8", "ENCODING 'UTF8'")
    ),
    "a pooler in transaction mode": Entry(
        pooled, ("pool_mode = transaction", "PostgreSQL itself in GRAB_POSTGRES")
    ),
}  # fmt: skip


def told(examination: Examination) -> str:
    """What `doctor` says of conditions."""
    found = [finding for check, finding in examination.findings if check == CHECK]
    assert all(finding.severity == "stuck" for finding in found), found
    return " ".join(f"{finding.what}: {finding.means}. {finding.command}" for finding in found)


@pytest.mark.parametrize("name", ENTRIES)
async def test_a_condition_that_is_not_met_is_refused_by_all(settings: Settings, name: str) -> None:
    entry = ENTRIES[name]
    async with entry.spoilt(settings) as wrong:
        with pytest.raises(ConditionNotMet) as refused:
            await make_system(wrong)
        assert await find_topic(wrong.kafka, Topics(wrong.prefix).journal) is None, "topics were made"
        async with await connect(wrong.postgres, wrong.schema_) as connection:
            found = await connection.execute(
                "SELECT count(*) FROM pg_namespace WHERE nspname = %s", (wrong.schema_,), prepare=False
            )
            assert await found.fetchone() == (0,), "a schema was made"
        with pytest.raises(ConditionNotMet) as by_process:
            await check_system(wrong, journal=False)
        with pytest.raises(ConditionNotMet) as by_verb:
            async with checked_books(wrong):
                pass
        finding = told(await examine(wrong))
    for words in entry.words:
        for message in (str(refused.value), str(by_process.value), str(by_verb.value), finding):
            assert words in message


#: Time limits that an administrator may give to all sessions of a database, so that people do not stop it.
LIMITS = ("statement_timeout", "idle_session_timeout", "idle_in_transaction_session_timeout")


@asynccontextmanager
async def limited(settings: Settings) -> AsyncIterator[Settings]:
    """The settings of a database whose sessions have time limits."""
    async with database_encoded("UTF8")(settings) as own:
        with administrator() as opened:
            for limit in LIMITS:
                opened.execute(
                    sql.SQL("ALTER DATABASE {} SET {} = '30s'").format(
                        sql.Identifier(settings.prefix), sql.Identifier(limit)
                    )
                )
        yield own


async def limits_of(connection: AsyncConnection[Any]) -> list[str]:
    """The time limits of a session."""
    values = sql.SQL(", ").join(sql.SQL("current_setting({})").format(limit) for limit in LIMITS)
    row = await (await connection.execute(sql.SQL("SELECT {}").format(values))).fetchone()
    return list(row or ())


async def test_time_limits_of_people_do_not_end_sessions_or_long_work(settings: Settings) -> None:
    async with limited(settings) as own:
        async with await connect(own.postgres, own.schema_, autocommit=False) as connection:
            assert await limits_of(connection) == ["0", "0", "0"]
            await connection.rollback()
            assert await limits_of(connection) == ["0", "0", "0"], "a rollback has ended the change"
            assert connection.autocommit is False
        async with books_of(own, 1) as books:
            [row] = await books.rows(f"SELECT current_setting('{LIMITS[1]}') AS rests")
            assert row["rests"] == "0"


async def test_a_statement_that_was_cut_is_told_in_its_own_words(settings: Settings) -> None:
    """The limit is that of this process, so it holds; the server is there."""
    own = make_conninfo(settings.postgres, options="-c statement_timeout=100ms")
    async with await connect(own, settings.schema_) as connection:
        with pytest.raises(QueryCanceled) as cut:
            await connection.execute("SELECT pg_sleep(30)")
    code, words = ending_of(cut.value) or (0, "")
    assert code == 1
    assert "canceling statement due to statement timeout" in words
    assert "cannot be reached" not in words


@asynccontextmanager
async def books_of(settings: Settings, sessions_max: int) -> AsyncIterator[Books]:
    async def check(connection: AsyncConnection[Any]) -> None: ...

    async with open_books(settings.postgres, settings.schema_, sessions_max, check) as books:
        yield books


@pytest.mark.parametrize("changes", [False, True])
async def test_sessions_that_ended_while_they_rested_cost_nobody_an_answer(
    settings: Settings, changes: bool
) -> None:
    async def one(connection: AsyncConnection[Any]) -> list[Any]:
        async with connection.cursor(row_factory=dict_row) as cursor:
            return await (await cursor.execute("SELECT 1 AS one")).fetchall()

    async with books_of(settings, 3) as books:
        async with AsyncExitStack() as stack:
            taken = [await stack.enter_async_context(books._pool.connection()) for _ in range(3)]
            processes = [session.info.backend_pid for session in taken]
        with administrator() as opened:
            opened.execute("SELECT pg_terminate_backend(pid, 5000) FROM unnest(%s) AS pid", (processes,))
        for _ in processes:
            asked = books.change(one) if changes else books.rows("SELECT 1 AS one")
            assert await asked == [{"one": 1}]


async def test_a_rested_session_for_keys_of_users_costs_nobody_an_answer(system: Settings) -> None:
    keys = KeysOfUsers(system.postgres, system.schema_, sealer(system))
    try:
        first = await keys.keys_of(["ann"])
        assert keys._connection is not None
        with administrator() as opened:
            opened.execute("SELECT pg_terminate_backend(%s, 5000)", (keys._connection.info.backend_pid,))
        assert (await keys.keys_of(["ann", "bob"])).keys() == {"ann", "bob"}
        assert await keys.existing("ann") == first["ann"]
    finally:
        await keys.close()
