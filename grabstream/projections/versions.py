"""Versions of read models: functions that list, create, show and drop them, and choose the version that a
worker writes.

A version is a PostgreSQL schema, `<main schema>_<projection>_<number>`, with the tables and views of its
definition and its own cursors. The views of the main schema show those of the live version; a switch to
another version replaces them in one transaction. A worker writes the version that has the definition of its
code: the live version, else the previous version. So the previous version stays current as long as old
workers run, unless both have the same definition: then it is frozen.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection, sql
from psycopg.errors import (
    DependentObjectsStillExist,
    InvalidTableDefinition,
    LockNotAvailable,
    UndefinedColumn,
    UndefinedTable,
)
from psycopg.rows import class_row

from grabstream.projections import reports
from grabstream.projections.database.grants import give, grants_of, pass_on
from grabstream.projections.definitions import PROJECTIONS, cursor_tables, definition_of

log = logging.getLogger(__name__)

#: How long dropping a version waits for sessions that read it.
DROP_LOCK_MS: Final = 2_000
#: Views of the main schema over all live versions: the name of the view, the table in a version, and the
#: columns.
_SHARED: Final = (
    (
        "projection_cursors",
        "projection_cursors",
        "projection, shard, seq, head, next_offset, term, owner, moved_at",
    ),
    ("cursors", "projection_cursors", "projection, shard, seq, head, next_offset, term, owner"),
    ("stopped_shards", "stopped_shards", "projection, shard, seq, journal_offset, reason, stopped_at"),
)


class NoReadModel(Exception):
    """There is no version that this code may write; the text gives the fix."""


class ViewsInUse(Exception):
    """The columns of a view change, and views of other programs depend on it; the text names them."""


class Version(NamedTuple):
    """A row of `read_models`: state `building`, `live`, `previous` or `discarded`; phase `loading`,
    `following` or `agreed` (its differences were accepted, or it was shown).

    `skips_set_aside`: it was built without the records that operators had set aside.
    """

    projection: str
    version: int
    schema: str
    definition: int
    state: str
    source: str
    phase: str
    skips_set_aside: bool = False


async def versions(
    connection: AsyncConnection[Any], schema: str, projection: str | None = None
) -> list[Version]:
    """All versions, in order of projection and number; raises NoReadModel if the system has no tables yet."""
    query = sql.SQL(
        "SELECT projection, version, schema, definition, state, source, phase, skips_set_aside FROM {} "
        "WHERE %(projection)s::text IS NULL OR projection = %(projection)s ORDER BY projection, version"
    ).format(sql.Identifier(schema, "read_models"))
    try:
        async with connection.cursor(row_factory=class_row(Version)) as cursor:
            return await (await cursor.execute(query, {"projection": projection})).fetchall()
    except (UndefinedTable, UndefinedColumn):
        raise NoReadModel(
            f"schema {schema} has no read models, or read models of an older release: run `grabstream init`"
        ) from None


async def lost(connection: AsyncConnection[Any], candidates: Sequence[Version]) -> list[Version]:
    """The versions that lack some or all of their tables, because they were dropped by hand."""
    query = (
        "SELECT nspname, array_agg(relname::text) FROM pg_namespace JOIN pg_class ON relnamespace = "
        "pg_namespace.oid AND relkind = 'r' "
        "WHERE nspname = ANY(%s) GROUP BY nspname"
    )
    schemas = [version.schema for version in candidates]
    rows = await (await connection.execute(query, (schemas,))).fetchall()
    present = {schema: set(tables) for schema, tables in rows}
    return [
        version for version in candidates if not _tables_of(version) <= present.get(version.schema, set())
    ]


def _tables_of(version: Version) -> set[str]:
    """The tables that a version must have, as far as this code knows its definition."""
    definition = definition_of(version.projection)
    return {
        "projection_cursors",
        "stopped_shards",
        *(definition.tables if definition.number == version.definition else ()),
    }


def lost_message(version: Version) -> str:
    """The message about a version whose tables are lost, with the command that recreates them."""
    return (
        f"the tables of {version.projection}, in schema {version.schema}, are gone: run "
        f"`{command_that_makes(version)}`"
    )


def command_that_makes(version: Version) -> str:
    """The command that recreates the lost tables of a version."""
    return (
        f"grabstream rebuild {version.projection}" if version.projection in PROJECTIONS else "grabstream init"
    )


async def in_state(
    connection: AsyncConnection[Any], schema: str, projection: str, state: str
) -> Version | None:
    """The version of a projection that is in a state, or None. Each state has at most one version."""
    projection_versions = await versions(connection, schema, projection)
    return next((version for version in projection_versions if version.state == state), None)


def writable_version(projection_versions: Sequence[Version], projection: str) -> Version | None:
    """The version of a projection that workers with this code write: of the versions with this code's
    definition the live version, else the previous version.
    """
    number = definition_of(projection).number
    by_state = {version.state: version for version in projection_versions if version.definition == number}
    return by_state.get("live") or by_state.get("previous")


async def writable_versions(
    connection: AsyncConnection[Any], schema: str, projections: Sequence[str]
) -> dict[str, Version]:
    """By projection: the version that workers with this code write, where there is one that has its tables.
    Raises NoReadModel if the system has no tables yet.
    """
    all_versions = await versions(connection, schema)
    writable = (
        writable_version([version for version in all_versions if version.projection == name], name)
        for name in projections
    )
    chosen = [version for version in writable if version is not None]
    gone = await lost(connection, chosen)
    return {version.projection: version for version in chosen if version not in gone}


async def use_read_model(connection: AsyncConnection[Any], schema: str, projection: str) -> str:
    """Sets the search path of the connection to the version that this code writes, and returns the schema of
    that version.

    Raises NoReadModel if no version has the definition of this code, or its tables are lost.
    """
    chosen = writable_version(await versions(connection, schema, projection), projection)
    if chosen is None:
        raise NoReadModel(
            f"no version of {projection} has definition {definition_of(projection).number}, which this code "
            "writes: "
            f"run `grabstream rebuild {projection}`"
        )
    if await lost(connection, [chosen]):
        raise NoReadModel(lost_message(chosen))
    await use_version(connection, schema, chosen)
    return chosen.schema


async def use_version(connection: AsyncConnection[Any], schema: str, version: Version) -> None:
    """Sets the search path of the connection to a version, and then the main schema."""
    path = sql.SQL(", ").join(map(sql.Identifier, (version.schema, schema))).as_string(connection)
    await connection.execute("SELECT set_config('search_path', %s, false)", (path,))


async def create(
    connection: AsyncConnection[Any],
    schema: str,
    projection: str,
    shards: int,
    source: str = "journal",
    skips_set_aside: bool = False,
) -> Version:
    """Creates an empty version with this code's definition, as a build loads it, in the caller's transaction.
    The connection uses it afterwards.
    """
    definition = definition_of(projection)
    number = await _unused_number(connection, schema, projection)
    made = Version(
        projection,
        number,
        f"{schema}_{projection}_{number}",
        definition.number,
        "building",
        source,
        "loading",
        skips_set_aside,
    )
    await connection.execute(
        sql.SQL(
            "INSERT INTO {} (projection, version, schema, definition, state, source, phase, skips_set_aside) "
            "VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
        ).format(sql.Identifier(schema, "read_models")),
        made,
    )
    await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(made.schema)))
    await use_version(connection, schema, made)
    for part in (cursor_tables(), definition.parts["tables"], definition.parts["staging"]):
        if part.strip():
            await connection.execute(part.encode())
    await add_cursors(connection, projection, shards)
    return made


async def _unused_number(connection: AsyncConnection[Any], schema: str, projection: str) -> int:
    """A number that no version has, no schema has in its name, and no record set aside names for an earlier
    version.
    """
    query = sql.SQL(
        "SELECT coalesce(max(number), 0) + 1 FROM (SELECT version AS number FROM {} WHERE projection = "
        "%(projection)s UNION ALL "
        "SELECT substring(name FROM %(number)s)::integer FROM (SELECT read_model FROM {} UNION ALL SELECT "
        "nspname FROM pg_namespace) "
        "AS names (name) WHERE starts_with(name, %(start)s) AND name ~ %(number)s) AS numbers"
    ).format(sql.Identifier(schema, "read_models"), sql.Identifier(schema, "set_aside_records"))
    start = f"{schema}_{projection}_"
    values = {"projection": projection, "start": start, "number": f"^.{{{len(start)}}}([0-9]{{1,9}})$"}
    [number] = await (await connection.execute(query, values)).fetchone() or [1]
    return int(number)


def may_be_version(schema: str, name: str) -> bool:
    """Whether the name of a schema is one that versions of the system's read models may have."""
    return (
        re.fullmatch(rf"{re.escape(schema)}_({'|'.join((*PROJECTIONS, 'events'))})_[0-9]+", name) is not None
    )


async def create_flat(connection: AsyncConnection[Any], schema: str, shards: int) -> None:
    """Creates all read models in one schema, for a set that is never rebuilt, in the caller's transaction.
    The connection uses it afterwards.
    """
    await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    await connection.execute("SELECT set_config('search_path', %s, false)", (schema,))
    await connection.execute(cursor_tables().encode())
    for projection in PROJECTIONS:
        for part in ("tables", "checks", "constraints", "views"):
            await connection.execute(definition_of(projection).parts[part].encode())
        await add_cursors(connection, projection, shards)
    for view, table, columns in _SHARED:
        if view != table:
            statement = sql.SQL("CREATE VIEW {} AS SELECT {} FROM {}").format(
                sql.Identifier(view), sql.SQL(columns), sql.Identifier(table)
            )
            await connection.execute(statement)
    await connection.execute(reports.reports()[reports.RESULTS_BY_WEEK].encode())
    await connection.execute(reports.user_transfers().encode())


async def create_missing(connection: AsyncConnection[Any], schema: str, shards: int) -> bool:
    """Creates and shows an empty version of each projection that has none, in the caller's transaction; the
    caller then calls `renew_views` and, if this returns True, `show_cursors`.
    """
    # The cursors of `events` are in its topic; its tables have only the shards at which it stopped. So they
    # can be recreated, where other read models need a rebuild.
    gone = await lost(connection, await versions(connection, schema, "events"))
    if gone:
        # Views that still read the rest would be dropped with it, and with them their grants.
        await show_cursors(connection, schema)
    for version in gone:
        await _forget(connection, schema, version)
    present = {version.projection for version in await versions(connection, schema)}
    missing = [projection for projection in (*PROJECTIONS, "events") if projection not in present]
    for projection in missing:
        made = await create(connection, schema, projection, shards if projection in PROJECTIONS else 0)
        await complete(connection, projection)
        await _set_live(connection, schema, made)
        await _show_views(connection, schema, made)
    return bool(missing)


async def _forget(connection: AsyncConnection[Any], schema: str, version: Version) -> None:
    """Drops the rest of a version, and its row."""
    await connection.execute(
        sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(version.schema))
    )
    await connection.execute(
        sql.SQL("DELETE FROM {} WHERE projection = %s AND version = %s").format(
            sql.Identifier(schema, "read_models")
        ),
        (version.projection, version.version),
    )


async def add_cursors(connection: AsyncConnection[Any], projection: str, shards: int) -> None:
    """Adds missing cursors, one for each shard, to the version that the connection uses."""
    await connection.execute(
        "INSERT INTO projection_cursors (projection, shard) SELECT %s, generate_series(0, %s - 1) ON "
        "CONFLICT DO NOTHING",
        (projection, shards),
    )


async def complete(
    connection: AsyncConnection[Any],
    projection: str,
    write_sums: Callable[[AsyncConnection[Any]], Awaitable[None]] | None = None,
) -> None:
    """Adds constraints, indexes and views to the version that the connection uses, and drops its staging
    tables, in the caller's transaction. `write_sums` computes the sums of loaded rows, which are checked as
    they are written: that takes a third of the time of a check afterwards.
    """
    definition = definition_of(projection)
    await connection.execute(definition.parts["checks"].encode())
    if write_sums is not None:
        await write_sums(connection)
    for table in definition.staging:
        await connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(table)))
    for part in ("constraints", "views"):
        await connection.execute(definition.parts[part].encode())
    [home, main] = await (
        await connection.execute("SELECT current_schema(), (current_schemas(false))[2]")
    ).fetchone() or ["", ""]
    await reports.record_text(connection, main, home, definition.parts["views"])


async def set_phase(connection: AsyncConnection[Any], schema: str, version: Version, phase: str) -> Version:
    """Records the phase of a build, and returns the version with it."""
    await connection.execute(
        sql.SQL("UPDATE {} SET phase = %s WHERE projection = %s AND version = %s").format(
            sql.Identifier(schema, "read_models")
        ),
        (phase, version.projection, version.version),
    )
    return version._replace(phase=phase)


# -- switching -------------------------------------------------------------------------------------------


async def switch_views(
    connection: AsyncConnection[Any], schema: str, version: Version, keep: bool = True
) -> None:
    """Makes a version live, in the caller's transaction. The version that was live becomes `previous`, or is
    discarded (`keep` false).

    If both versions have the same definition, the version that is not live is frozen: workers that write it
    get CursorMoved, and choose their version again. Raises ViewsInUse when views of other programs prevent
    it, and psycopg's LockNotAvailable after the `lock_timeout` of the connection.
    """
    by_state = {other.state: other for other in await versions(connection, schema, version.projection)}
    live = by_state.get("live")
    has_tables = live is not None and not await lost(connection, [live])
    keep = keep and has_tables
    if live is not None and live.version != version.version:
        # Each state has at most one row, so a version must leave a state before another enters it.
        if version.state == "previous":
            await _set_state(connection, schema, version, "discarded")
        elif "previous" in by_state:
            await _set_state(connection, schema, by_state["previous"], "discarded")
        await _set_state(connection, schema, live, "previous" if keep else "discarded")
    await _set_live(connection, schema, version)
    await _freeze(connection, version, False)
    if live is not None and has_tables and live.version != version.version:
        await _freeze(connection, live, live.definition == version.definition)
        await pass_on(connection, live.schema, version.schema)
    obsolete = set(await _views(connection, live.schema)) if live is not None and has_tables else set()
    granted = await reports.report_grants(connection, schema)
    obsolete -= await _show_views(connection, schema, version)
    for view in sorted(obsolete):
        await _drop_view(connection, schema, view)
    await show_cursors(connection, schema)
    await reports.renew_reports(connection, schema, granted)


async def _show_views(connection: AsyncConnection[Any], schema: str, version: Version) -> set[str]:
    """Makes the views of the main schema show those of a version; returns their names."""
    views = await _views(connection, version.schema)
    for view, columns in views.items():
        selected = sql.SQL(", ").join(map(sql.Identifier, columns))
        await _replace_view(
            connection,
            schema,
            view,
            sql.SQL("SELECT {} FROM {}").format(selected, sql.Identifier(version.schema, view)),
        )
    return set(views)


async def renew_views(connection: AsyncConnection[Any], schema: str) -> None:
    """Replaces the views of complete versions of this code's definitions where their text has changed, in
    place, so that their tables need no rebuild; then the reports and comments. In the caller's transaction.

    Other programs' views stay, because columns are only added at the end.
    """
    recorded = await reports.recorded_texts(connection, schema)
    granted = await reports.report_grants(connection, schema)
    candidates = [
        version
        for version in await versions(connection, schema)
        if version.projection in PROJECTIONS
        and version.state != "discarded"
        and version.definition == definition_of(version.projection).number
        and recorded.get(version.schema) != reports.digest(definition_of(version.projection).parts["views"])
    ]
    gone = await lost(connection, candidates)
    for version in candidates:
        # A version that is being loaded gets its views when it is complete.
        if version in gone or not await _views(connection, version.schema):
            continue
        text = definition_of(version.projection).parts["views"]
        await use_version(connection, schema, version)
        await connection.execute(text.encode())
        await reports.record_text(connection, schema, version.schema, text)
        if version.state == "live":
            await _show_views(connection, schema, version)
    await reports.renew_reports(connection, schema, granted)


async def mend_cursors(connection: AsyncConnection[Any], schema: str) -> None:
    """Recreates the views of cursors if one was dropped with the tables of a version."""
    for view, *_ in _SHARED:
        result = await connection.execute(
            "SELECT to_regclass(%s) IS NULL", (sql.Identifier(schema, view).as_string(connection),)
        )
        if (await result.fetchone() or (False,))[0]:
            await show_cursors(connection, schema)
            return


async def _set_state(connection: AsyncConnection[Any], schema: str, version: Version, state: str) -> None:
    await connection.execute(
        sql.SQL("UPDATE {} SET state = %s WHERE projection = %s AND version = %s").format(
            sql.Identifier(schema, "read_models")
        ),
        (state, version.projection, version.version),
    )


async def _set_live(connection: AsyncConnection[Any], schema: str, version: Version) -> None:
    await connection.execute(
        sql.SQL(
            "UPDATE {} SET state = 'live', phase = 'agreed', shown_at = now() WHERE projection = %s AND "
            "version = %s"
        ).format(sql.Identifier(schema, "read_models")),
        (version.projection, version.version),
    )


async def _freeze(connection: AsyncConnection[Any], version: Version, frozen: bool) -> None:
    table = sql.Identifier(version.schema, "projection_cursors")
    await connection.execute(
        sql.SQL("UPDATE {} SET frozen = %s WHERE frozen <> %s").format(table), (frozen, frozen)
    )


async def show_cursors(connection: AsyncConnection[Any], schema: str) -> None:
    """Makes the views of cursors and stopped shards show the live versions that have their tables, in the
    caller's transaction.

    Takes a lock first. Without it, this transaction could read the live versions before a concurrent switch
    commits, and create views on tables that are dropped later.
    """
    name = f"grabstream-views-{schema}"
    await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (name,))
    live = [version for version in await versions(connection, schema) if version.state == "live"]
    without_tables = await lost(connection, live)
    schemas = [version.schema for version in live if version not in without_tables]
    if not schemas:
        return
    for view, table, columns in _SHARED:
        parts = (
            sql.SQL("SELECT {} FROM {}").format(sql.SQL(columns), sql.Identifier(home, table))
            for home in schemas
        )
        await _replace_view(connection, schema, view, sql.SQL(" UNION ALL ").join(parts))


async def _views(connection: AsyncConnection[Any], schema: str) -> dict[str, list[str]]:
    """The views of a schema with their columns."""
    rows = await connection.execute(
        "SELECT c.relname, array_agg(a.attname::text ORDER BY a.attnum) FROM pg_class AS c JOIN pg_attribute "
        "AS a ON a.attrelid = c.oid "
        "WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'v' AND a.attnum > 0 GROUP BY c.relname "
        "ORDER BY c.relname",
        (sql.Identifier(schema).as_string(connection),),
    )
    return dict(await rows.fetchall())


async def _replace_view(
    connection: AsyncConnection[Any], schema: str, view: str, query: sql.Composable
) -> None:
    """Replaces a view in place, so that grants and dependent views stay. If its columns change, drops and
    creates it with its grants.
    """
    name = sql.Identifier(schema, view)
    statement = sql.SQL("VIEW {} AS {}").format(name, query)
    try:
        async with connection.transaction():
            await connection.execute(sql.SQL("CREATE OR REPLACE ") + statement)
    except InvalidTableDefinition:
        granted = await grants_of(connection, schema, view)
        await _drop_view(connection, schema, view)
        await connection.execute(sql.SQL("CREATE ") + statement)
        await give(connection, schema, view, granted)


async def _drop_view(connection: AsyncConnection[Any], schema: str, view: str) -> None:
    try:
        async with connection.transaction():
            await reports.drop_reports(connection, schema)  # they may read it; the caller renews them
            await connection.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(sql.Identifier(schema, view)))
    except DependentObjectsStillExist as error:
        raise ViewsInUse(
            f"the columns of {schema}.{view} change, and other views depend on it: "
            f"{error.diag.message_detail}; drop them first"
        ) from None


# -- dropping --------------------------------------------------------------------------------


async def discard(connection: AsyncConnection[Any], schema: str, version: Version) -> None:
    """Discards a version that is not live, and drops all discarded versions of its projection; raises
    ValueError for a live version.
    """
    if version.state == "live":
        raise ValueError(f"{version.schema} is live")
    await _set_state(connection, schema, version, "discarded")
    await sweep(connection, schema, version.projection)


async def sweep(connection: AsyncConnection[Any], schema: str, projection: str) -> list[str]:
    """Drops discarded versions, each in its own transaction, and returns their schemas.

    A version that another session still reads, such as a dump, is left to the next call.
    """
    dropped = []
    for version in await versions(connection, schema, projection):
        if version.state == "discarded":
            try:
                async with connection.transaction():
                    await connection.execute(
                        "SELECT set_config('lock_timeout', %s, true)", (f"{DROP_LOCK_MS}ms",)
                    )
                    await _forget(connection, schema, version)
            except LockNotAvailable:
                log.warning(
                    "schema %s is no longer needed, but another session reads it: the next rebuild drops it",
                    version.schema,
                )
                continue
            dropped.append(version.schema)
    return dropped


async def drop_all(connection: AsyncConnection[Any], schema: str) -> None:
    """Drops a whole system: the main schema and every version. Only for temporary systems."""
    try:
        homes = [version.schema for version in await versions(connection, schema)]
    except NoReadModel:
        homes = []
    for name in (schema, *homes):
        await connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


async def replace_with_empty(
    connection: AsyncConnection[Any], schema: str, projection: str, shards: int
) -> None:
    """Shows an empty version and drops the live version, in the caller's transaction. Workers fill the empty
    version from the journal.

    The connection uses the new version afterwards. Raises ViewsInUse.
    """
    empty = await create(connection, schema, projection, shards)
    await complete(connection, projection)
    await switch_views(connection, schema, empty, keep=False)
    await sweep(connection, schema, projection)


async def renew_empty(connection: AsyncConnection[Any], schema: str, shards: int) -> list[str]:
    """Gives read models without events the definitions of this code, in the caller's transaction; returns the
    projections that changed.

    A read model stays unchanged if its views change and other views depend on them. `grabstream rebuild`
    names those views.
    """
    renewed = []
    for projection in PROJECTIONS:
        live = await in_state(connection, schema, projection, "live")
        if (
            live is None
            or live.definition == definition_of(projection).number
            or await lost(connection, [live])
        ):
            continue
        rows = await connection.execute(
            sql.SQL("SELECT count(*) FROM {} WHERE next_offset > 0").format(
                sql.Identifier(live.schema, "projection_cursors")
            )
        )
        if (await rows.fetchone() or [1])[0] == 0:
            try:
                async with connection.transaction():
                    await replace_with_empty(connection, schema, projection, shards)
            except ViewsInUse as error:
                log.warning(
                    "%s: no worker of this release writes it before `grabstream rebuild %s`: %s",
                    projection,
                    projection,
                    error,
                )
                continue
            renewed.append(projection)
    return renewed
