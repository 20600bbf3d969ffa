"""A user projection: a function of events, with tables and cursor in a separate schema, which the system's
rebuilds do not touch.

`follow` applies new events to it, each exactly once: rows and cursor move in one transaction. `rebuild`
builds it again from the first event, next to the one in use, and replaces that in one transaction.
docs/user-projections.md is a complete example.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

import psycopg
from psycopg import AsyncConnection, sql

from grabstream.models.journal import Cursor
from grabstream.projections import cursors
from grabstream.projections.cursors import Apply
from grabstream.projections.database.locks import LockTaken, lock_or_raise
from grabstream.projections.database.migrate import drop_statement, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.definitions import cursor_tables
from grabstream.projections.versions import may_be_version
from grabstream.runtime.ending import first_to_end, running
from grabstream.streams.clients import Trouble
from grabstream.streams.follower import RETRY_SECONDS, Follower, Group, poll_journal
from grabstream.streams.following.user_transaction import Misbehaves, guard, only_read, write
from grabstream.streams.history.sources import JournalSource, Start
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.projecting.projector import EXIT_UNKNOWN_ERROR, CatchUp, Projector
from grabstream.streams.rebuilding.switching import Busy, older_snapshots_gone
from grabstream.streams.replaying.replay import ReportReplay
from grabstream.streams.replaying.replay_schema import is_schema
from grabstream.streams.replaying.sinks import events_in
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

#: How often `follow` checks that its version of the projection has not been replaced.
CHECK_VERSION_SECONDS: Final = 2.0
#: Suffixes of the schema in which a new version is built, and of the replaced schema until it is removed.
_BUILDING: Final = "_rebuild"
_REPLACED: Final = "_replaced"
#: How long a rebuild waits for sessions with an older snapshot, and how long for one lock.
PATIENCE_SECONDS: Final = 60.0
LOCK_MS: Final = 2_000
#: A rebuilt version is switched to when it lags by at most this many records; `follow` reads the rest.
LEFT_RECORDS_MAX: Final = 100


class Projection(NamedTuple):
    """`apply(connection, facts)` writes rows in the caller's transaction; `tables` is the SQL that creates
    the tables.

    Unqualified names in both are those of `schema`, which belongs to the projection alone. After a change of
    `apply` or `tables`, raise the `version` and rebuild: processes that still run the old version then stop,
    and never write into the new one.
    """

    name: str
    schema: str
    tables: str
    apply: Apply
    version: int = 1

    @property
    def cursor_name(self) -> str:
        """The name of its cursors."""
        return f"{self.name}.{self.version}"


class System(NamedTuple):
    """The system whose journal is followed: servers, prefix of its topics, number of shards, schema of the
    system's read models.
    """

    kafka: str
    postgres: str
    prefix: str
    shards: int
    schema: str


class CannotRun(Exception):
    """The projection cannot run: its schema contains something else, its tables cannot be created, or its
    `apply` misbehaves. The text states the fix.
    """


class _UserProjector(Projector):
    """When it cannot continue, it sets `over` and `reason`, and waits to be cancelled: another version has
    replaced this one, or its `apply` misbehaves.
    """

    #: Other errors of `apply` end the process: only the user can repair that code.
    refusals = (psycopg.IntegrityError, psycopg.DataError)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.over = asyncio.Event()
        self.reason = ""

    async def _use(self, connection: AsyncConnection[Any]) -> None:
        await use_schema(connection, self._schema)
        await only_read(connection)

    async def _open(self, connection: AsyncConnection[Any]) -> dict[int, Cursor]:
        loaded = await super()._open(connection)
        if not loaded:
            await self._end("")
        return loaded

    async def _in_transaction(self, group: Group) -> Group:
        connection = await self._connected()
        try:
            await write(connection, self.name, self._schema, group.moves, group.facts, self._apply)
        except Misbehaves as error:
            await self._disconnect()
            await self._end(str(error))
        return group

    async def _failed(self) -> None:
        # The user's code would fail again. Events that were not written are still after the cursor.
        log.critical("projection %s: unknown error, ending the process", self.name, exc_info=True)
        logging.shutdown()
        os._exit(EXIT_UNKNOWN_ERROR)

    async def _end(self, reason: str) -> NoReturn:
        # The projector would treat an exception as an unknown error, and end the process.
        self.reason = reason
        self.over.set()
        while True:
            await asyncio.Event().wait()


async def prepare(projection: Projection, system: System) -> bool:
    """Creates schema, tables and cursors if they do not exist; returns whether it did. Raises CannotRun."""
    name, schema = projection.cursor_name, projection.schema
    if not is_schema(schema.removesuffix(_BUILDING)):
        raise CannotRun(
            f"schema {schema!r} cannot be written without quotes (a-z 0-9 _, at most 48 characters): name "
            "another"
        )
    if schema in (system.schema, "public") or may_be_version(system.schema, schema):
        raise CannotRun(f"schema {schema} is not reserved for this projection: name another")
    async with await connect(system.postgres, projection.schema) as connection, connection.transaction():
        try:
            await connection.execute("SELECT set_config('lock_timeout', %s, true)", (f"{LOCK_MS}ms",))
            await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"grabstream-{schema}",))
        except psycopg.errors.LockNotAvailable:
            raise CannotRun(f"another process is creating schema {schema}: try again") from None
        schemas = await connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,))
        if await schemas.fetchone():
            await _check(connection, projection, system.shards)
            await guard(connection, schema)
            return False
        await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        await use_schema(connection, schema)
        await connection.execute(cursor_tables().encode())
        await guard(connection, schema)
        try:
            await connection.execute(projection.tables.encode())
        except (psycopg.ProgrammingError, psycopg.NotSupportedError, psycopg.DataError) as error:
            raise CannotRun(f"{name}: PostgreSQL refuses its `tables`: {str(error).strip()}") from None
        await connection.execute(
            "INSERT INTO projection_cursors (projection, shard) SELECT %s, generate_series(0, %s - 1)",
            (name, system.shards),
        )
        return True


async def _check(connection: AsyncConnection[Any], projection: Projection, shards: int) -> None:
    schema = projection.schema
    names = await _versions(connection, schema)
    if names == [projection.cursor_name]:
        await use_schema(connection, schema)
        if set(await cursors.load(connection, projection.cursor_name)) == set(range(shards)):
            return
    if names and all(name.rpartition(".")[0] == projection.name for name in names):
        raise CannotRun(
            f"schema {schema} contains {', '.join(names)}: rebuild it as {projection.cursor_name}"
        )
    contents = ", ".join(names) or "no projection"
    raise CannotRun(
        f"schema {schema} contains {contents}: name another for {projection.name}, or remove it with "
        f"`{drop_statement(schema)}`"
    )


async def _versions(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """The cursor names of the projections in a schema."""
    has_cursors = await (
        await connection.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{schema}.projection_cursors",))
    ).fetchone()
    if not has_cursors or not has_cursors[0]:
        return []
    query = sql.SQL("SELECT DISTINCT projection FROM {} ORDER BY 1").format(
        sql.Identifier(schema, "projection_cursors")
    )
    return [name for (name,) in await (await connection.execute(query)).fetchall()]


async def follow(
    projection: Projection, system: System, step: Callable[[str], None] = lambda step_name: None
) -> None:
    """Applies events to the projection until cancelled, and waits for servers that are down; raises
    CannotRun.
    """
    await prepare(projection, system)
    journal = Topics(system.prefix).journal
    committed = f"{projection.name}.committed"
    projector = _UserProjector(
        projection.cursor_name,
        projection.apply,
        system.postgres,
        projection.schema,
        system.kafka,
        journal,
        lambda _: step(committed),
    )
    async with running(
        projector.run(),
        _watch_journal(projector, system, journal),
        _watch_version(projector, projection, system),
    ) as tasks:
        await first_to_end(tasks)


async def _watch_version(projector: _UserProjector, projection: Projection, system: System) -> None:
    """Raises CannotRun once another version has replaced this one, also if no events arrive."""
    name, schema = projection.cursor_name, projection.schema
    while not projector.over.is_set():
        try:
            async with asyncio.timeout(CHECK_VERSION_SECONDS):
                await projector.over.wait()
        except TimeoutError:
            try:
                async with await connect(system.postgres, projection.schema) as connection:
                    if name not in await _versions(connection, schema):
                        break
            except psycopg.Error as error:
                # PostgreSQL is down, or the schema is being replaced right now.
                log.info("projection %s: %s; checking again", name, error)
    if projector.reason:
        raise CannotRun(f"{name}: {projector.reason}; none of these rows were written")
    raise CannotRun(
        f"{name} is no longer in schema {schema}: another version has replaced it; start that version"
    )


async def _watch_journal(projector: Projector, system: System, journal: str) -> None:
    """Asks the projector to catch up whenever the journal has grown, until cancelled."""
    seen = dict.fromkeys(range(system.shards), -1)

    async def look(reader: JournalReader) -> None:
        for shard, end in (await reader.ends(seen)).items():
            if end > seen[shard]:
                seen[shard] = end
                await projector.put(CatchUp(shard))

    await poll_journal(system.kafka, journal, look, Trouble(log, f"projection {projector.name}"))


async def rebuild(
    projection: Projection,
    system: System,
    report: ReportReplay = lambda records, events: None,
    expect: Callable[[int], None] = lambda records: None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> int:
    """Builds the projection again from the first event, and replaces the one in use; returns the number of
    events.

    `report` is called with the records read and events applied, `expect` with the number of records to read.
    Readers, and processes that follow the same version, are not affected. It waits up to `patience_seconds`
    for sessions with an older snapshot. A stopped rebuild starts over at the first event. Raises CannotRun,
    and Corrupt or Gap if the journal contradicts itself.
    """
    building, replaced = (
        projection._replace(schema=projection.schema + end) for end in (_BUILDING, _REPLACED)
    )
    async with (
        await connect(system.postgres, projection.schema) as control,
        await connect(system.postgres, projection.schema) as writer,
    ):
        try:
            await lock_or_raise(
                control, f"grabstream-{building.schema}-building", f"rebuild of {projection.name}"
            )
        except LockTaken as held:
            raise CannotRun(f"{projection.name} is being rebuilt already: {held}") from None
        await control.execute("SELECT set_config('lock_timeout', %s, false)", (f"{LOCK_MS}ms",))
        for each in (projection, building, replaced):
            names = await _versions(control, each.schema)
            rows = await control.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (each.schema,))
            if await rows.fetchone() and not (
                names and all(name.rpartition(".")[0] == projection.name for name in names)
            ):
                raise CannotRun(
                    f"schema {each.schema} contains {', '.join(names) or 'no projection'}: a rebuild of "
                    f"{projection.name} would remove it"
                )
        for each in (building, replaced):
            if not await _drop(control, each.schema):
                raise CannotRun(
                    f"schema {each.schema}, left by an earlier rebuild, is in use by another session"
                )
        await prepare(building, system)
        await use_schema(writer, building.schema)
        await only_read(writer)
        events, deadline = 0, time.monotonic() + patience_seconds
        while True:
            events += await _catch_up(building, system, writer, report, expect)
            reason = await _replace(control, projection.schema, building.schema, replaced.schema)
            if reason is None:
                break
            if time.monotonic() > deadline:
                raise CannotRun(
                    f"not replaced within {patience_seconds:.0f} s: {reason}. The projection is unchanged"
                )
            await asyncio.sleep(RETRY_SECONDS)
        if not await _drop(control, replaced.schema):
            log.warning(
                "the replaced schema %s is in use by another session; the next rebuild removes it",
                replaced.schema,
            )
    return events


async def _replace(connection: AsyncConnection[Any], live: str, building: str, replaced: str) -> str | None:
    """Renames the built schema to the live one's name; returns why this has to be tried again, or None.

    Only names change, so it does not wait for readers, nor do readers wait, except for sessions whose
    snapshot is older than the new rows.
    """
    try:
        async with connection.transaction():
            if await _versions(connection, live):
                # `follow` locks its cursor before it writes: so this waits for it, and afterwards `follow`
                # finds another cursor.
                await connection.execute(
                    sql.SQL("LOCK TABLE {} IN EXCLUSIVE MODE").format(
                        sql.Identifier(live, "projection_cursors")
                    )
                )
                await older_snapshots_gone(connection, live)
                await connection.execute(_RENAME.format(sql.Identifier(live), sql.Identifier(replaced)))
            await connection.execute(_RENAME.format(sql.Identifier(building), sql.Identifier(live)))
    except Busy as busy:
        return str(busy)
    except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
        return f"its tables are in use ({error.diag.message_primary})"
    return None


_RENAME: Final = sql.SQL("ALTER SCHEMA {} RENAME TO {}")


async def _drop(connection: AsyncConnection[Any], schema: str) -> bool:
    """Removes a schema; returns False if another session uses it."""
    try:
        await connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
    except psycopg.errors.LockNotAvailable:
        return False
    return True


async def _catch_up(
    building: Projection,
    system: System,
    connection: AsyncConnection[Any],
    report: ReportReplay,
    expect: Callable[[int], None],
) -> int:
    """Reads the journal repeatedly, until few new records have arrived meanwhile; returns the number of
    events.
    """
    name, schema = building.cursor_name, building.schema
    positions, events = await cursors.load(connection, name), 0

    async def save(group: Group) -> None:
        nonlocal events
        try:
            await write(connection, name, schema, group.moves, group.facts, building.apply)
        except Misbehaves as error:
            raise CannotRun(f"{name}: {error}; none of these rows were written") from None
        positions.update((shard, after) for shard, (_, after) in group.moves.items())
        events += (found := events_in(group.facts))
        report(group.read, found)

    follower = Follower(save)
    async with open_reader(system.kafka, Topics(system.prefix).journal) as reader:
        source = JournalSource(reader, None)
        while True:
            ends = await reader.ends(positions)
            records = sum(end - positions[shard].next_offset for shard, end in ends.items())
            expect(records)
            for shard, end in ends.items():
                await follower.follow(source.chunks(shard, Start(positions[shard], end)))
            if records <= LEFT_RECORDS_MAX:
                return events
