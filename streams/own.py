"""A projection of one's own: a function of events, with tables and cursor in a schema of its own, that the system's rebuilds leave alone.

`follow` carries new events into it, each exactly once: rows and cursor move in one transaction. `rebuild` makes it anew from the first
event, beside the one in use, and puts it in its place in one transaction. docs/projection.md is a complete example.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import AsyncConnection, sql

from lua.trouble import is_trouble
from models.journal import Cursor
from projections import cursors
from projections.definitions import cursor_tables
from projections.migrate import use_schema
from projections.versions import may_be_version
from streams.clients import Trouble, in_words
from streams.history import JournalSource
from streams.journal import JournalReader, open_reader
from streams.projector import Apply, CatchUp, Projector
from streams.replay import Done, Report, Stretch, plan, replay
from streams.replay_schema import is_schema
from streams.selection import Selection, Wanted
from streams.sinks import RowSink
from streams.topics import Topics

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS: Final = 0.2
#: How often who follows looks whether the projection is still the version it has.
STILL_OURS_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 1.0
#: How the schema is named in which a new version is made.
_BUILDING: Final = "_rebuild"
#: With so few records left, a rebuilt version is as good as caught up: following does the rest.
LEFT_RECORDS_MAX: Final = 100


class Projection(NamedTuple):
    """`apply(connection, facts)` writes rows in the caller's transaction; `tables` is the SQL that makes them.

    Unqualified names, in both, are those of `schema`, which is the projection's alone. Whoever changes `apply` or `tables` raises the
    `version` and rebuilds: what still runs with the old one ends then, and never writes into the new one.
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
    """The system whose journal is followed: servers, prefix of its topics, number of shards, schema of its own read models."""

    kafka: str
    postgres: str
    prefix: str
    shards: int
    schema: str


class NotOurs(Exception):
    """The projection cannot be run: its schema holds something else, or its tables cannot be made; the text names the way out."""


class _Own(Projector):
    """Waits to be cancelled when another version was put in the place of this one, and says so by `replaced`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.replaced = asyncio.Event()

    async def _use(self, connection: AsyncConnection[Any]) -> None:
        await use_schema(connection, self._schema)

    async def _open(self, connection: AsyncConnection[Any]) -> dict[int, Cursor]:
        found = await super()._open(connection)
        if not found:
            self.replaced.set()
            # An error would be an unknown one to the projector, which ends the process.
            await asyncio.Event().wait()
        return found


async def prepare(projection: Projection, system: System) -> bool:
    """Makes schema, tables and cursors when they are not there; whether it did. Raises NotOurs."""
    name, schema = projection.cursor_name, projection.schema
    if not is_schema(schema.removesuffix(_BUILDING)):
        raise NotOurs(f"schema {schema!r} is no name that can be written without quotes (a-z 0-9 _, at most 48): give it another")
    if schema in (system.schema, "public") or may_be_version(system.schema, schema):
        raise NotOurs(f"schema {schema} is not for this projection alone: give it another")
    async with await AsyncConnection.connect(system.postgres, autocommit=True, connect_timeout=5) as connection, connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"grabstream-{schema}",))
        found = await connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,))
        if await found.fetchone():
            await _check(connection, projection, system.shards)
            return False
        await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        await use_schema(connection, schema)
        await connection.execute(cursor_tables().encode())
        try:
            await connection.execute(projection.tables.encode())
        except (psycopg.ProgrammingError, psycopg.NotSupportedError, psycopg.DataError) as error:
            raise NotOurs(f"{name}: PostgreSQL refuses its `tables`: {str(error).strip()}") from None
        await connection.execute(
            "INSERT INTO projection_cursors (projection, shard) SELECT %s, generate_series(0, %s - 1)", (name, system.shards)
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
    raise NotOurs(f"schema {schema} holds {held}: give {projection.name} another, or remove it with `DROP SCHEMA {schema} CASCADE`")


async def _versions(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """The projections that have cursors in a schema."""
    found = await (await connection.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{schema}.projection_cursors",))).fetchone()
    if not found or not found[0]:
        return []
    query = sql.SQL("SELECT DISTINCT projection FROM {} ORDER BY 1").format(sql.Identifier(schema, "projection_cursors"))
    return [name for (name,) in await (await connection.execute(query)).fetchall()]


async def follow(projection: Projection, system: System, step: Callable[[str], None] = lambda step_name: None) -> None:
    """Carries events into the projection until cancelled, and waits for servers that are away meanwhile; raises NotOurs."""
    await prepare(projection, system)
    journal = Topics(system.prefix).journal
    committed = f"{projection.name}.committed"
    projector = _Own(
        projection.cursor_name, projection.apply, system.postgres, projection.schema, system.kafka, journal, lambda _: step(committed)
    )
    tasks = [
        asyncio.create_task(work)
        for work in (projector.run(), _tell_all(projector, system, journal), _still_ours(projector, projection, system))
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _still_ours(projector: _Own, projection: Projection, system: System) -> None:
    """Raises NotOurs once another version is in the place of this one, whether or not an event comes."""
    name, schema = projection.cursor_name, projection.schema
    while not projector.replaced.is_set():
        try:
            async with asyncio.timeout(STILL_OURS_SECONDS):
                await projector.replaced.wait()
        except TimeoutError:
            try:
                async with await AsyncConnection.connect(system.postgres, autocommit=True, connect_timeout=5) as connection:
                    if name not in await _versions(connection, schema):
                        break
            except psycopg.Error as error:
                # PostgreSQL is away, or the schema is being replaced right now.
                log.info("projection %s: %s; looking again", name, error)
    raise NotOurs(f"{name} is not in schema {schema} any more: another version has taken its place; start that one")


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
    report: Report = lambda records, events: None,
    expect: Callable[[int], None] = lambda records: None,
) -> int:
    """Makes the projection anew from the first event and puts it in its place; returns the number of events.

    `report` is told of records read and events, `expect` of records to read. Readers, and who follows the same version, notice nothing.
    Stopped and begun again, it begins at the first event.
    Raises NotOurs, and Corrupt or Gap when the journal contradicts itself.
    """
    building = projection._replace(schema=projection.schema + _BUILDING)
    async with await AsyncConnection.connect(system.postgres, autocommit=True, connect_timeout=5) as connection:
        for schema in (projection.schema, building.schema):
            names = await _versions(connection, schema)
            found = await connection.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,))
            if await found.fetchone() and not (names and all(name.rpartition(".")[0] == projection.name for name in names)):
                raise NotOurs(
                    f"schema {schema} holds {', '.join(names) or 'no projection'}: a rebuild of {projection.name} would remove it"
                )
        found = await connection.execute("SELECT pg_try_advisory_lock(hashtext(%s))", (f"grabstream-{building.schema}-building",))
        if not (await found.fetchone() or (False,))[0]:
            raise NotOurs(f"{projection.name} is being rebuilt already")
        await connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(building.schema)))
        await prepare(building, system)
        await use_schema(connection, building.schema)
        events = await _catch_up(building, system, connection, report, expect)
        async with connection.transaction():
            live = sql.Identifier(projection.schema)
            if await _versions(connection, projection.schema):
                # Who follows takes the cursor first: in the same order nobody waits for each other in a circle.
                cursor_table = sql.Identifier(projection.schema, "projection_cursors")
                await connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(cursor_table))
            await connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(live))
            await connection.execute(sql.SQL("ALTER SCHEMA {} RENAME TO {}").format(sql.Identifier(building.schema), live))
    return events


async def _catch_up(
    building: Projection, system: System, connection: AsyncConnection[Any], report: Report, expect: Callable[[int], None]
) -> int:
    """Reads the journal again and again, until next to nothing came in meanwhile; returns the number of events."""

    async def use(name: str) -> None:
        """The connection is where the projection's tables are, and stays there."""

    name = building.cursor_name
    sink = RowSink(connection, {name: building.apply}, use, await cursors.load(connection, name))
    events = 0
    async with open_reader(system.kafka, Topics(system.prefix).journal) as reader:
        source = JournalSource(reader, None)
        while True:
            planned = await plan(source, [Stretch(shard) for shard in range(system.shards)], True, sink.positions)
            records = sum(one.units for one in planned)
            expect(records)
            done: dict[int, Done] = {}
            await replay(source, planned, Selection(Wanted(), True), sink, report, done)
            events += sum(one.events for one in done.values())
            if records <= LEFT_RECORDS_MAX:
                return events
