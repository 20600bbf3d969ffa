"""A projection of one's own: a function of events, with tables and cursor in a schema of its own, that the
system's rebuilds leave alone.

`follow` carries new events into it, each exactly once: rows and cursor move in one transaction. `rebuild`
makes it anew from the first event, beside the one in use, and puts it in its place in one transaction.
docs/projection.md is a complete example.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import psycopg
from psycopg import AsyncConnection, sql

from grabstream.lua.ending import first_to_end, running
from grabstream.lua.trouble import is_trouble
from grabstream.models.journal import Cursor
from grabstream.projections import cursors
from grabstream.projections.cursors import Fact
from grabstream.projections.database.locks import Held, hold
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.definitions import cursor_tables
from grabstream.projections.versions import may_be_version
from grabstream.streams.clients import Trouble, in_words
from grabstream.streams.following.user_transaction import Misbehaves, guard, only_read, write
from grabstream.streams.history.sources import JournalSource
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.projecting.projector import EXIT_UNKNOWN_ERROR, Apply, CatchUp, Group, Projector
from grabstream.streams.rebuilding.switching import Busy, older_snapshots_gone
from grabstream.streams.replaying.replay import Done, ReportReplay, Stretch, plan, replay
from grabstream.streams.replaying.replay_schema import is_schema
from grabstream.streams.replaying.selection import Selection, Wanted
from grabstream.streams.replaying.sinks import RowSink
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS: Final = 0.2
#: How often who follows looks whether the projection is still the version it has.
STILL_OURS_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 1.0
#: How the schema is named in which a new version is made, and, until it is removed, the one whose place it
#: takes.
_BUILDING: Final = "_rebuild"
_REPLACED: Final = "_replaced"
#: How long a rebuild waits for those whose snapshot is from before, and, at a time, for a lock.
PATIENCE_SECONDS: Final = 60.0
LOCK_MS: Final = 2_000
#: With so few records left, a rebuilt version is as good as caught up: following does the rest.
LEFT_RECORDS_MAX: Final = 100


class Projection(NamedTuple):
    """`apply(connection, facts)` writes rows in the caller's transaction; `tables` is the SQL that makes
    them.

    Unqualified names, in both, are those of `schema`, which is the projection's alone. Whoever changes
    `apply` or `tables` raises the `version` and rebuilds: what still runs with the old one ends then, and
    never writes into the new one.
    """

    name: str
    schema: str
    tables: str
    apply: Apply
    version: int = 1

    @property
    def cursor_name(self) -> str:
        """What its cursors are named by."""
        return f"{self.name}.{self.version}"


class System(NamedTuple):
    """The system whose journal is followed: servers, prefix of its topics, number of shards, schema of its
    own read models.
    """

    kafka: str
    postgres: str
    prefix: str
    shards: int
    schema: str


class NotOurs(Exception):
    """The projection cannot be run: its schema holds something else, or its tables cannot be made; the text
    names the way out.
    """


class _Own(Projector):
    """Waits to be cancelled when it cannot go on, and says so by `over` and `reason`: another version was put
    in the place of this one, or its `apply` misbehaves.
    """

    #: What its code raises ends the process: it is somebody else's to mend.
    refusals = (psycopg.IntegrityError, psycopg.DataError)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.over = asyncio.Event()
        self.reason = ""

    async def _use(self, connection: AsyncConnection[Any]) -> None:
        await use_schema(connection, self._schema)
        await only_read(connection)

    async def _open(self, connection: AsyncConnection[Any]) -> dict[int, Cursor]:
        found = await super()._open(connection)
        if not found:
            await self._end("")
        return found

    async def _save(self, group: Group) -> None:
        facts = [fact for of_shard in group.facts.values() for fact in of_shard]
        try:
            await write(await self._connected(), self.name, self._schema, group.moves, facts, self._apply)
        except Misbehaves as error:
            await self._disconnect()
            await self._end(str(error))

    async def _failed(self) -> None:
        # It is somebody else's code: begun again it would do the same. What was not written is not behind the
        # cursor.
        log.critical("projection %s: unknown error, ending the process", self.name, exc_info=True)
        logging.shutdown()
        os._exit(EXIT_UNKNOWN_ERROR)

    async def _end(self, reason: str) -> NoReturn:
        # An error would be an unknown one to the projector, which ends the process.
        self.reason = reason
        self.over.set()
        while True:
            await asyncio.Event().wait()


class _OwnSink(RowSink):
    """Writes a projection that is made anew, as it is written later: with its cursor, or not at all."""

    def __init__(
        self, connection: AsyncConnection[Any], projection: Projection, positions: dict[int, Cursor]
    ) -> None:
        async def use(name: str) -> None:
            """The connection is where the projection's tables are, and stays there."""

        super().__init__(connection, {}, use, positions)
        self._projection = projection

    async def _save(self, moves: Mapping[int, tuple[Cursor, Cursor]], facts: Sequence[Fact]) -> None:
        one = self._projection
        try:
            await write(self._connection, one.cursor_name, one.schema, moves, facts, one.apply)
        except Misbehaves as error:
            raise NotOurs(f"{one.cursor_name}: {error}; nothing of it was written") from None


async def prepare(projection: Projection, system: System) -> bool:
    """Makes schema, tables and cursors when they are not there; whether it did. Raises NotOurs."""
    name, schema = projection.cursor_name, projection.schema
    if not is_schema(schema.removesuffix(_BUILDING)):
        raise NotOurs(
            f"schema {schema!r} is no name that can be written without quotes (a-z 0-9 _, at most 48): give "
            "it another"
        )
    if schema in (system.schema, "public") or may_be_version(system.schema, schema):
        raise NotOurs(f"schema {schema} is not for this projection alone: give it another")
    async with await connect(system.postgres, projection.schema) as connection, connection.transaction():
        try:
            await connection.execute("SELECT set_config('lock_timeout', %s, true)", (f"{LOCK_MS}ms",))
            await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"grabstream-{schema}",))
        except psycopg.errors.LockNotAvailable:
            raise NotOurs(f"another process is making schema {schema}: try again") from None
        found = await connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,))
        if await found.fetchone():
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
            raise NotOurs(f"{name}: PostgreSQL refuses its `tables`: {str(error).strip()}") from None
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
        raise NotOurs(f"schema {schema} holds {', '.join(names)}: rebuild it as {projection.cursor_name}")
    held = ", ".join(names) or "no projection"
    raise NotOurs(
        f"schema {schema} holds {held}: give {projection.name} another, or remove it with `DROP SCHEMA "
        f"{schema} CASCADE`"
    )


async def _versions(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """The projections that have cursors in a schema."""
    found = await (
        await connection.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{schema}.projection_cursors",))
    ).fetchone()
    if not found or not found[0]:
        return []
    query = sql.SQL("SELECT DISTINCT projection FROM {} ORDER BY 1").format(
        sql.Identifier(schema, "projection_cursors")
    )
    return [name for (name,) in await (await connection.execute(query)).fetchall()]


async def follow(
    projection: Projection, system: System, step: Callable[[str], None] = lambda step_name: None
) -> None:
    """Carries events into the projection until cancelled, and waits for servers that are away meanwhile;
    raises NotOurs.
    """
    await prepare(projection, system)
    journal = Topics(system.prefix).journal
    committed = f"{projection.name}.committed"
    projector = _Own(
        projection.cursor_name,
        projection.apply,
        system.postgres,
        projection.schema,
        system.kafka,
        journal,
        lambda _: step(committed),
    )
    async with running(
        projector.run(), _tell_all(projector, system, journal), _still_ours(projector, projection, system)
    ) as tasks:
        await first_to_end(tasks)


async def _still_ours(projector: _Own, projection: Projection, system: System) -> None:
    """Raises NotOurs once another version is in the place of this one, whether or not an event comes."""
    name, schema = projection.cursor_name, projection.schema
    while not projector.over.is_set():
        try:
            async with asyncio.timeout(STILL_OURS_SECONDS):
                await projector.over.wait()
        except TimeoutError:
            try:
                async with await connect(system.postgres, projection.schema) as connection:
                    if name not in await _versions(connection, schema):
                        break
            except psycopg.Error as error:
                # PostgreSQL is away, or the schema is being replaced right now.
                log.info("projection %s: %s; looking again", name, error)
    if projector.reason:
        raise NotOurs(f"{name}: {projector.reason}; nothing of it was written")
    raise NotOurs(
        f"{name} is not in schema {schema} any more: another version has taken its place; start that one"
    )


async def _tell_all(projector: Projector, system: System, journal: str) -> None:
    """Tells the projector of what is new in the journal, until cancelled."""
    seen = dict.fromkeys(range(system.shards), -1)
    trouble = Trouble(log, f"projection {projector.name}")
    while True:
        try:
            async with open_reader(system.kafka, journal) as reader:
                while True:
                    await _tell(projector, reader, seen)
                    trouble.over()
                    await asyncio.sleep(LOOK_EVERY_SECONDS)
        except BaseException as error:
            if not is_trouble(error):
                raise
            trouble.say(in_words(error))
            await asyncio.sleep(RETRY_SECONDS)


async def _tell(projector: Projector, reader: JournalReader, seen: dict[int, int]) -> None:
    """Tells the projector of shards whose journal has grown; it reads by itself from its cursor on."""
    for shard, end in seen.items():
        now = await reader.end(shard)
        if now > end:
            seen[shard] = now
            await projector.put(CatchUp(shard))


async def rebuild(
    projection: Projection,
    system: System,
    report: ReportReplay = lambda records, events: None,
    expect: Callable[[int], None] = lambda records: None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> int:
    """Makes the projection anew from the first event and puts it in its place; returns the number of events.

    `report` is told of records read and events, `expect` of records to read. Readers, and who follows the
    same version, notice nothing; who holds a snapshot from before is waited for so long. Stopped and begun
    again, it begins at the first event. Raises NotOurs, and Corrupt or Gap when the journal contradicts
    itself.
    """
    building, replaced = (
        projection._replace(schema=projection.schema + end) for end in (_BUILDING, _REPLACED)
    )
    async with (
        await connect(system.postgres, projection.schema) as control,
        await connect(system.postgres, projection.schema) as writer,
    ):
        try:
            await hold(control, f"grabstream-{building.schema}-building", f"rebuild of {projection.name}")
        except Held as held:
            raise NotOurs(f"{projection.name} is being rebuilt already: {held}") from None
        await control.execute("SELECT set_config('lock_timeout', %s, false)", (f"{LOCK_MS}ms",))
        for one in (projection, building, replaced):
            names = await _versions(control, one.schema)
            found = await control.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (one.schema,))
            if await found.fetchone() and not (
                names and all(name.rpartition(".")[0] == projection.name for name in names)
            ):
                raise NotOurs(
                    f"schema {one.schema} holds {', '.join(names) or 'no projection'}: a rebuild of "
                    f"{projection.name} would remove it"
                )
        for one in (building, replaced):
            if not await _drop(control, one.schema):
                raise NotOurs(
                    f"schema {one.schema}, which is left of an earlier rebuild, is looked at by another "
                    "session"
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
                raise NotOurs(
                    f"not put in its place within {patience_seconds:.0f} s: {reason}. It is as it was before"
                )
            await asyncio.sleep(RETRY_SECONDS)
        if not await _drop(control, replaced.schema):
            log.warning(
                "schema %s, which was replaced, is looked at by another session; the next rebuild removes it",
                replaced.schema,
            )
    return events


async def _replace(connection: AsyncConnection[Any], live: str, building: str, replaced: str) -> str | None:
    """Gives the schema that was built the name of the live one; returns why that has to be tried again, or
    None.

    Names are all that changes, so no reader is waited for, nor waits, but for those whose snapshot is older
    than the new rows.
    """
    try:
        async with connection.transaction():
            if await _versions(connection, live):
                # Who follows holds its cursor before it writes: it is waited for, and finds another one
                # afterwards.
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
    """Removes a schema; False when somebody looks at it."""
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
    """Reads the journal again and again, until next to nothing came in meanwhile; returns the number of
    events.
    """
    sink = _OwnSink(connection, building, await cursors.load(connection, building.cursor_name))
    events = 0
    async with open_reader(system.kafka, Topics(system.prefix).journal) as reader:
        source = JournalSource(reader, None)
        while True:
            planned = await plan(
                source, [Stretch(shard) for shard in range(system.shards)], True, sink.positions
            )
            records = sum(one.units for one in planned)
            expect(records)
            done: dict[int, Done] = {}
            await replay(source, planned, Selection(Wanted(), True), sink, report, done)
            events += sum(one.events for one in done.values())
            if records <= LEFT_RECORDS_MAX:
                return events
