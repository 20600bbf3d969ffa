"""What the `apply` of a user projection may do to the transaction in which it writes: no rows are committed
without their cursor.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest
from psycopg import AsyncConnection, IsolationLevel

from grabstream.connections.opening import system_of
from grabstream.settings import Settings, load_settings
from grabstream.streams.following import user_projection as own
from grabstream.streams.following.user_projection import CannotRun, Projection, System, follow, rebuild
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import TEST_ROLE, until
from tests.streams.replaying.histories import MixedHistory, drop, journal, schemas
from tests.support.projecting import rows

SHARD = 3
INSERT = "INSERT INTO seen SELECT unnest(%s::bigint[])"
Connection = AsyncConnection[Any]
Trick = Callable[[Connection, str], Awaitable[None]]


def tricks() -> dict[str, tuple[Trick, str]]:
    """By name: what an `apply` does after it has written its rows, and the text of the error."""

    def sql(*statements: str) -> Trick:
        async def trick(connection: Connection, schema: str) -> None:
            for statement in statements:
                await connection.execute(statement.format(schema=schema).encode())

        return trick

    async def swallowed(connection: Connection, schema: str) -> None:
        with contextlib.suppress(psycopg.Error):
            await connection.execute("COMMIT")

    async def commits(connection: Connection, schema: str) -> None:
        await connection.commit()

    async def rolls_back(connection: Connection, schema: str) -> None:
        await connection.rollback()

    async def autocommits(connection: Connection, schema: str) -> None:
        await connection.execute("ROLLBACK")
        await connection.set_autocommit(False)
        await connection.execute("INSERT INTO seen VALUES (-1)")

    async def error(connection: Connection, schema: str) -> None:
        with contextlib.suppress(psycopg.Error):
            await connection.execute("SELECT 1 / 0")

    ended, cursor = "ended the transaction", "changed or removed its own cursor of shard 3"
    return {
        "COMMIT": (sql("COMMIT"), ended),
        "END": (sql("SAVEPOINT a", "END"), ended),
        "COMMIT AND CHAIN": (sql("COMMIT AND CHAIN"), ended),
        "PREPARE": (sql("SET CONSTRAINTS ALL IMMEDIATE"), "checked constraints"),
        "COMMIT, swallowed": (swallowed, ended),
        "connection.commit()": (commits, "forbidden within a Transaction"),
        "connection.rollback()": (rolls_back, "forbidden within a Transaction"),
        "ROLLBACK": (sql("ROLLBACK"), ended),
        "ROLLBACK and rows": (sql("ROLLBACK", "INSERT INTO seen VALUES (-1)"), "wrote after it"),
        "ROLLBACK and BEGIN": (
            sql("ROLLBACK", "BEGIN READ WRITE", "INSERT INTO seen VALUES (-1)"),
            "began another one",
        ),
        "ROLLBACK AND CHAIN": (
            sql("ROLLBACK AND CHAIN", "INSERT INTO seen VALUES (-1)"),
            "began another one",
        ),
        "autocommit": (autocommits, "began another one"),
        "search_path": (sql("SET search_path = public, {schema}"), "changed search_path"),
        "search_path, local": (sql("SET LOCAL search_path = pg_temp"), "changed search_path"),
        "DELETE": (sql("DELETE FROM projection_cursors"), cursor),
        "DELETE and COMMIT": (sql("DELETE FROM projection_cursors", "COMMIT"), ended),
        "UPDATE": (sql("UPDATE projection_cursors SET seq = seq + 1"), cursor),
        "TRUNCATE": (sql("TRUNCATE projection_cursors"), "changed the table of its cursors"),
        "DROP TABLE": (sql("DROP TABLE projection_cursors"), "changed the table of its cursors"),
        "DROP SCHEMA": (sql("DROP SCHEMA {schema} CASCADE"), "changed the table of its cursors"),
        "ALTER SCHEMA": (sql("ALTER SCHEMA {schema} RENAME TO {schema}_x"), cursor),
        "an error, swallowed": (error, "continued after PostgreSQL had refused"),
    }


TRICKS = tricks()


class Scene:
    """A system with events in one shard, and a projection that plays a trick after it has written rows."""

    def __init__(self, settings: Settings, seqs: list[int]) -> None:
        self.settings, self.seqs, self.schema = settings, seqs, f"{settings.schema_}_own"

    @property
    def system(self) -> System:
        return system_of(self.settings)

    def projection(self, trick: Trick | None = None, version: int = 1) -> Projection:
        async def apply(connection: Connection, facts: Any) -> None:
            await connection.execute(INSERT, ([fact.event.seq for fact in facts],))
            if trick is not None:
                await trick(connection, self.schema)

        return Projection("seen", self.schema, "CREATE TABLE seen (seq bigint)", apply, version)

    async def seen(self, schema: str | None = None) -> list[int]:
        return [
            seq
            for (seq,) in await rows(
                self.settings, f"SELECT seq FROM {schema or self.schema}.seen ORDER BY seq"
            )
        ]

    async def cursor(self) -> int:
        [(seq,)] = await rows(
            self.settings, f"SELECT seq FROM {self.schema}.projection_cursors WHERE shard = {SHARD}"
        )
        return int(seq)


@pytest.fixture
async def scene(system: Settings) -> AsyncIterator[Scene]:
    history = MixedHistory(21, SHARD, 20)
    await journal(system, history, random.Random(1))
    scene = Scene(system, list(range(1, len(history.lines) + 1)))
    yield scene
    # With the settings that the test may have changed: the role that made a schema drops it.
    left = [name for name in await schemas(system, system.schema_) if name != system.schema_]
    await drop(scene.settings, *left)


@pytest.mark.long
async def test_no_trick_of_an_apply_writes_rows_without_their_cursor(scene: Scene) -> None:
    """`follow` and `rebuild` end with an error that names the trick, and write nothing; without the trick
    each event is written once.
    """
    for name, (trick, said) in TRICKS.items():
        with pytest.raises(CannotRun) as ended:
            async with asyncio.timeout(90):
                await follow(scene.projection(trick), scene.system)
        assert said in str(ended.value), (name, str(ended.value))
        assert (await scene.seen(), await scene.cursor()) == ([], 0), name
    for name in ("COMMIT", "ROLLBACK and rows", "search_path"):
        trick, said = TRICKS[name]
        with pytest.raises(CannotRun, match=said):
            await rebuild(scene.projection(trick), scene.system)
        assert await scene.seen() == [], name
    assert await rebuild(scene.projection(), scene.system) == len(scene.seqs)
    assert await scene.seen() == scene.seqs


async def test_an_apply_that_changes_the_role_is_refused(scene: Scene) -> None:
    scene.settings = scene.settings.model_copy(update={"postgres": load_settings().postgres})

    async def trick(connection: Connection, schema: str) -> None:
        await connection.execute(f"SET ROLE {TEST_ROLE}".encode())

    with pytest.raises(CannotRun, match=f"changed the role from .* to {TEST_ROLE}"):
        await follow(scene.projection(trick), scene.system)
    assert (await scene.seen(), await scene.cursor()) == ([], 0)


@pytest.mark.long
async def test_an_apply_may_use_savepoints_and_restore_its_settings(scene: Scene) -> None:
    """Nested transactions, savepoints, and settings that it restores are allowed. A schema of an older
    release, without the guard, gets it when it is followed.
    """

    async def inside(connection: Connection, schema: str) -> None:
        with contextlib.suppress(ZeroDivisionError):
            async with connection.transaction():
                await connection.execute("INSERT INTO seen VALUES (-1)")
                raise ZeroDivisionError
        async with connection.transaction():
            await connection.execute("SET LOCAL search_path = pg_temp")
            await connection.execute(f"SET LOCAL search_path = {schema}".encode())
        for statement in ("SAVEPOINT a", "INSERT INTO seen VALUES (-2)", "ROLLBACK TO a"):
            await connection.execute(statement.encode())

    projection = scene.projection(inside)
    await own.prepare(projection, scene.system)
    async with await open_books(scene.settings) as books:
        await books.execute(f"DROP FUNCTION {scene.schema}.only_with_its_cursor CASCADE".encode())
    with pytest.raises(CannotRun, match="ended the transaction"):
        await follow(scene.projection(TRICKS["COMMIT"][0]), scene.system)
    following = asyncio.create_task(follow(projection, scene.system))
    try:

        async def all_applied() -> bool:
            return await scene.cursor() == scene.seqs[-1]

        await until(all_applied, 30, "its cursor")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert await scene.seen() == scene.seqs


@pytest.mark.long
async def test_a_rebuild_delays_no_reader_and_waits_for_older_snapshots(scene: Scene) -> None:
    """It does not wait for a transaction that has read; it waits for one with an older snapshot, which sees
    the same rows until it ends. No session waits for the rebuild.
    """
    await rebuild(scene.projection(), scene.system)
    count = f"SELECT count(*) FROM {scene.schema}.seen".encode()
    all_there = (len(scene.seqs),)
    async with (
        await open_books(scene.settings) as reader,
        await AsyncConnection.connect(scene.settings.postgres) as snapshot,
    ):
        async with reader.transaction():
            assert await (await reader.execute(count)).fetchone() == all_there
            await rebuild(scene.projection(version=2), scene.system)
            assert await (await reader.execute(count)).fetchone() == all_there
        assert await schemas(scene.settings, f"{scene.schema}_") == [f"{scene.schema}_replaced"]
        await snapshot.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        await snapshot.execute("SELECT 1")
        with pytest.raises(CannotRun, match=f"older snapshot are open .pid {snapshot.info.backend_pid}"):
            await rebuild(scene.projection(version=3), scene.system, patience_seconds=0)
        assert await (await snapshot.execute(count)).fetchone() == all_there
        await snapshot.rollback()
    await rebuild(scene.projection(version=3), scene.system)
    assert await schemas(scene.settings, f"{scene.schema}_") == []


@pytest.mark.long
async def test_a_rebuild_waits_for_locks_at_most_its_patience(scene: Scene) -> None:
    """Another session locks the cursors: readers continue, and the rebuild ends with an error when its
    patience is over. A second rebuild is refused, with the process and pid of the first in the message.
    """
    await rebuild(scene.projection(), scene.system)
    async with (
        await open_books(scene.settings) as holding,
        await open_books(scene.settings) as reader,
        holding.transaction(),
    ):
        await holding.execute(f"SELECT 1 FROM {scene.schema}.projection_cursors FOR UPDATE".encode())
        waiting = asyncio.create_task(rebuild(scene.projection(version=2), scene.system, patience_seconds=0))
        table = f"'{scene.schema}.projection_cursors'::regclass"
        query = (
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'ExclusiveLock' AND relation = "
            f"{table}"
        )

        async def waits() -> bool:
            return await rows(scene.settings, query) == [(1,)]

        await until(waits, 30, "the wait")
        await reader.execute("SET lock_timeout = 200")
        await reader.execute(
            f"SELECT count(*) FROM {scene.schema}.projection_cursors, {scene.schema}.seen".encode()
        )
        with pytest.raises(
            CannotRun, match=r"being rebuilt already: .*process \d+ on .*pid \d+ of PostgreSQL"
        ):
            await rebuild(scene.projection(version=3), scene.system)
        with pytest.raises(CannotRun, match=r"not replaced within 0 s: its tables are in use"):
            await waiting
    assert await rows(
        scene.settings, f"SELECT DISTINCT projection FROM {scene.schema}.projection_cursors"
    ) == [("seen.1",)]
