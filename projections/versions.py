"""Versions of read models: which there are, which is shown, which a worker writes, and what makes, shows and
drops one.

A version is a PostgreSQL schema, `<main schema>_<projection>_<number>`, with the tables and views of its
definition and cursors of its own. The main schema's views show those of the live version; showing another one
is a matter of replacing views in one transaction. A worker writes the version whose definition is the one its
code has: the live one, else the previous one, which so stays current for as long as old workers run.
"""

import logging
import re
from collections.abc import Sequence
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

from grabstream.projections.definitions import PROJECTIONS, cursor_tables, definition_of

log = logging.getLogger(__name__)

#: How long the removal of a version waits for those who look at it.
DROP_LOCK_MS: Final = 2_000
#: What is shown of cursors and stops, over all live versions: the view's name, the version's table, the
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
    """No version that this code may write; the text names the way out."""


class ViewsInUse(Exception):
    """A view's columns change and somebody else's view stands on it; the text names them."""


class Version(NamedTuple):
    """A row of `read_models`: state `building`, `live`, `previous` or `discarded`; phase `loading`,
    `following` or `agreed`.

    `keeps_set_aside`: it was built past what operators had set aside.
    """

    projection: str
    version: int
    schema: str
    definition: int
    state: str
    source: str
    phase: str
    keeps_set_aside: bool = False


async def versions(
    connection: AsyncConnection[Any], schema: str, projection: str | None = None
) -> list[Version]:
    """The versions there are, in order; raises NoReadModel when the system has no tables yet."""
    query = sql.SQL(
        "SELECT projection, version, schema, definition, state, source, phase, keeps_set_aside FROM {} "
        "WHERE %(projection)s::text IS NULL OR projection = %(projection)s ORDER BY projection, version"
    ).format(sql.Identifier(schema, "read_models"))
    try:
        async with connection.cursor(row_factory=class_row(Version)) as cursor:
            return await (await cursor.execute(query, {"projection": projection})).fetchall()
    except (UndefinedTable, UndefinedColumn):
        raise NoReadModel(
            f"schema {schema} has no read models, or those of an older release: run `grabstream init`"
        ) from None


async def lost(connection: AsyncConnection[Any], found: Sequence[Version]) -> list[Version]:
    """Those of the versions whose tables are not there, or not all of them: somebody has dropped them by
    hand.
    """
    query = (
        "SELECT nspname, array_agg(relname::text) FROM pg_namespace JOIN pg_class ON relnamespace = "
        "pg_namespace.oid AND relkind = 'r' "
        "WHERE nspname = ANY(%s) GROUP BY nspname"
    )
    rows = await (await connection.execute(query, ([one.schema for one in found],))).fetchall()
    there = {schema: set(tables) for schema, tables in rows}
    return [one for one in found if not _tables_of(one) <= there.get(one.schema, set())]


def _tables_of(version: Version) -> set[str]:
    """What a version has, as far as this code knows its definition."""
    definition = definition_of(version.projection)
    return {
        "projection_cursors",
        "stopped_shards",
        *(definition.tables if definition.number == version.definition else ()),
    }


def in_words(gone: Version) -> str:
    """What is to be done about a version that is lost."""
    return (
        f"the tables of {gone.projection}, in schema {gone.schema}, are gone: run `grabstream rebuild "
        f"{gone.projection}`"
    )


async def in_state(
    connection: AsyncConnection[Any], schema: str, projection: str, state: str
) -> Version | None:
    """The one version of a projection that is in a state."""
    return next((one for one in await versions(connection, schema, projection) if one.state == state), None)


def written_by_us(found: Sequence[Version], projection: str) -> Version | None:
    """Of a projection's versions the one that workers with this code write: the live one, else the previous
    one.
    """
    number = definition_of(projection).number
    ours = {one.state: one for one in found if one.definition == number}
    return ours.get("live") or ours.get("previous")


async def use_read_model(connection: AsyncConnection[Any], schema: str, projection: str) -> str:
    """Makes unqualified names of this connection mean the version that this code writes, and returns that
    version's schema.

    Raises NoReadModel when there is none: its tables are of another definition.
    """
    chosen = written_by_us(await versions(connection, schema, projection), projection)
    if chosen is None:
        raise NoReadModel(
            f"no version of {projection} has definition {definition_of(projection).number}, which this code "
            "writes: "
            f"run `grabstream rebuild {projection}`"
        )
    if await lost(connection, [chosen]):
        raise NoReadModel(in_words(chosen))
    await use_version(connection, schema, chosen)
    return chosen.schema


async def use_version(connection: AsyncConnection[Any], schema: str, version: Version) -> None:
    """Makes unqualified names of this connection mean those of a version, and then of the main schema."""
    path = sql.SQL(", ").join(map(sql.Identifier, (version.schema, schema))).as_string(connection)
    await connection.execute("SELECT set_config('search_path', %s, false)", (path,))


async def create(
    connection: AsyncConnection[Any],
    schema: str,
    projection: str,
    shards: int,
    source: str = "journal",
    keeps_set_aside: bool = False,
) -> Version:
    """Makes an empty version of the definition this code has, its tables bare, in the caller's
    transaction.
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
        keeps_set_aside,
    )
    await connection.execute(
        sql.SQL(
            "INSERT INTO {} (projection, version, schema, definition, state, source, phase, keeps_set_aside) "
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
    """A number that no version has, and whose name no schema has; nor one that is gone but stands in the
    books for what it lacked.
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
    """Whether a schema's name is one that a version of a read model has, or may have one day."""
    return (
        re.fullmatch(rf"{re.escape(schema)}_({'|'.join((*PROJECTIONS, 'events'))})_[0-9]+", name) is not None
    )


async def create_flat(connection: AsyncConnection[Any], schema: str, shards: int) -> None:
    """Makes all read models in one schema, for a set of them that is never rebuilt, in the caller's
    transaction; uses it afterwards.
    """
    await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    await connection.execute("SELECT set_config('search_path', %s, false)", (schema,))
    await connection.execute(cursor_tables().encode())
    for projection in PROJECTIONS:
        for part in ("tables", "constraints", "views"):
            await connection.execute(definition_of(projection).parts[part].encode())
        await add_cursors(connection, projection, shards)
    for view, table, columns in _SHARED:
        if view != table:
            statement = sql.SQL("CREATE VIEW {} AS SELECT {} FROM {}").format(
                sql.Identifier(view), sql.SQL(columns), sql.Identifier(table)
            )
            await connection.execute(statement)


async def add_cursors(connection: AsyncConnection[Any], projection: str, shards: int) -> None:
    """Gives every shard its cursor in the version that the connection uses; those that are there stay."""
    await connection.execute(
        "INSERT INTO projection_cursors (projection, shard) SELECT %s, generate_series(0, %s - 1) ON "
        "CONFLICT DO NOTHING",
        (projection, shards),
    )


async def complete(connection: AsyncConnection[Any], projection: str) -> None:
    """Adds constraints, indexes and views to the version that the connection uses, drops its staging, in the
    caller's transaction.
    """
    definition = definition_of(projection)
    for table in definition.staging:
        await connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(table)))
    for part in ("constraints", "views"):
        await connection.execute(definition.parts[part].encode())


async def set_phase(connection: AsyncConnection[Any], schema: str, version: Version, phase: str) -> Version:
    """Writes down how far a build is."""
    await connection.execute(
        sql.SQL("UPDATE {} SET phase = %s WHERE projection = %s AND version = %s").format(
            sql.Identifier(schema, "read_models")
        ),
        (phase, version.projection, version.version),
    )
    return version._replace(phase=phase)


# -- what is shown -------------------------------------------------------------------------------------------


async def show(connection: AsyncConnection[Any], schema: str, version: Version, keep: bool = True) -> None:
    """Makes a version the live one, in the caller's transaction; what was live becomes `previous`, or goes
    (`keep` false).

    The one of two versions of the same definition that is not live is frozen: workers that write it find
    their cursor gone, and look again which one is theirs. Raises ViewsInUse when somebody's view forbids it,
    and psycopg's LockNotAvailable as the connection's `lock_timeout` says.
    """
    of_projection = {one.state: one for one in await versions(connection, schema, version.projection)}
    live = of_projection.get("live")
    there = live is not None and not await lost(connection, [live])
    keep = keep and there
    if live is not None and live.version != version.version:
        # There is one row a state at most, so each place is left before another takes it.
        if version.state == "previous":
            await _set_state(connection, schema, version, "discarded")
        elif "previous" in of_projection:
            await _set_state(connection, schema, of_projection["previous"], "discarded")
        await _set_state(connection, schema, live, "previous" if keep else "discarded")
    await connection.execute(
        sql.SQL(
            "UPDATE {} SET state = 'live', phase = 'agreed', shown_at = now() WHERE projection = %s AND "
            "version = %s"
        ).format(sql.Identifier(schema, "read_models")),
        (version.projection, version.version),
    )
    await _freeze(connection, version, False)
    if live is not None and there and live.version != version.version:
        await _freeze(connection, live, live.definition == version.definition)
    before = set(await _views(connection, live.schema)) if live is not None and there else set()
    for view, columns in (await _views(connection, version.schema)).items():
        before.discard(view)
        selected = sql.SQL(", ").join(map(sql.Identifier, columns))
        await _replace_view(
            connection,
            schema,
            view,
            sql.SQL("SELECT {} FROM {}").format(selected, sql.Identifier(version.schema, view)),
        )
    for view in sorted(before):
        await _drop_view(connection, schema, view)
    await show_cursors(connection, schema)


async def mend_cursors(connection: AsyncConnection[Any], schema: str) -> None:
    """Makes those views again where one went with the tables of a version that somebody dropped."""
    for view, *_ in _SHARED:
        found = await connection.execute(
            "SELECT to_regclass(%s) IS NULL", (sql.Identifier(schema, view).as_string(connection),)
        )
        if (await found.fetchone() or (False,))[0]:
            await show_cursors(connection, schema)
            return


async def _set_state(connection: AsyncConnection[Any], schema: str, version: Version, state: str) -> None:
    await connection.execute(
        sql.SQL("UPDATE {} SET state = %s WHERE projection = %s AND version = %s").format(
            sql.Identifier(schema, "read_models")
        ),
        (state, version.projection, version.version),
    )


async def _freeze(connection: AsyncConnection[Any], version: Version, frozen: bool) -> None:
    table = sql.Identifier(version.schema, "projection_cursors")
    await connection.execute(
        sql.SQL("UPDATE {} SET frozen = %s WHERE frozen <> %s").format(table), (frozen, frozen)
    )


async def show_cursors(connection: AsyncConnection[Any], schema: str) -> None:
    """Makes the views of cursors and stopped shards those of the live versions, as far as these are there."""
    found = [one for one in await versions(connection, schema) if one.state == "live"]
    gone = await lost(connection, found)
    live = [one.schema for one in found if one not in gone]
    if not live:
        return
    for view, table, columns in _SHARED:
        parts = (
            sql.SQL("SELECT {} FROM {}").format(sql.SQL(columns), sql.Identifier(home, table))
            for home in live
        )
        await _replace_view(connection, schema, view, sql.SQL(" UNION ALL ").join(parts))


async def _views(connection: AsyncConnection[Any], schema: str) -> dict[str, list[str]]:
    """The views of a schema with their columns."""
    found = await connection.execute(
        "SELECT c.relname, array_agg(a.attname::text ORDER BY a.attnum) FROM pg_class AS c JOIN pg_attribute "
        "AS a ON a.attrelid = c.oid "
        "WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'v' AND a.attnum > 0 GROUP BY c.relname "
        "ORDER BY c.relname",
        (sql.Identifier(schema).as_string(connection),),
    )
    return dict(await found.fetchall())


async def _replace_view(
    connection: AsyncConnection[Any], schema: str, view: str, query: sql.Composable
) -> None:
    """Replaces a view in place, so that grants and other people's views on it stay; with other columns, makes
    it anew.
    """
    name = sql.Identifier(schema, view)
    statement = sql.SQL("VIEW {} AS {}").format(name, query)
    try:
        async with connection.transaction():
            await connection.execute(sql.SQL("CREATE OR REPLACE ") + statement)
    except InvalidTableDefinition:
        grants = await connection.execute(
            "SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, privilege_type, "
            "is_grantable "
            "FROM pg_class, aclexplode(relacl) WHERE oid = %s::regclass AND grantee <> relowner",
            (name.as_string(connection),),
        )
        granted = await grants.fetchall()
        await _drop_view(connection, schema, view)
        await connection.execute(sql.SQL("CREATE ") + statement)
        for grantee, privilege, with_option in granted:
            # Role names come quoted from regrole, privileges from PostgreSQL's own list.
            option = " WITH GRANT OPTION" if with_option else ""
            await connection.execute(sql.SQL(f"GRANT {privilege} ON {{}} TO {grantee}{option}").format(name))


async def _drop_view(connection: AsyncConnection[Any], schema: str, view: str) -> None:
    try:
        async with connection.transaction():
            await connection.execute(sql.SQL("DROP VIEW IF EXISTS {}").format(sql.Identifier(schema, view)))
    except DependentObjectsStillExist as error:
        raise ViewsInUse(
            f"the columns of {schema}.{view} change, and others stand on it: {error.diag.message_detail}; "
            "drop them first"
        ) from None


# -- what is no longer needed --------------------------------------------------------------------------------


async def discard(connection: AsyncConnection[Any], schema: str, version: Version) -> None:
    """Marks a version that is not live as no longer needed, and drops it and all that were marked before."""
    if version.state == "live":
        raise ValueError(f"{version.schema} is live")
    await _set_state(connection, schema, version, "discarded")
    await sweep(connection, schema, version.projection)


async def sweep(connection: AsyncConnection[Any], schema: str, projection: str) -> list[str]:
    """Drops the versions that are discarded and returns their schemas; each in a transaction of its own.

    One that somebody still looks at, such as a dump, is left to the next call.
    """
    dropped = []
    for one in await versions(connection, schema, projection):
        if one.state == "discarded":
            try:
                async with connection.transaction():
                    await connection.execute(
                        "SELECT set_config('lock_timeout', %s, true)", (f"{DROP_LOCK_MS}ms",)
                    )
                    await connection.execute(
                        sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(one.schema))
                    )
                    await connection.execute(
                        sql.SQL("DELETE FROM {} WHERE projection = %s AND version = %s").format(
                            sql.Identifier(schema, "read_models")
                        ),
                        (one.projection, one.version),
                    )
            except LockNotAvailable:
                log.warning(
                    "schema %s is no longer needed, but is looked at by another session: it goes with the "
                    "next rebuild",
                    one.schema,
                )
                continue
            dropped.append(one.schema)
    return dropped


async def drop_all(connection: AsyncConnection[Any], schema: str) -> None:
    """Drops a whole system: the main schema and every version. Only for systems that were made to be thrown
    away.
    """
    try:
        homes = [one.schema for one in await versions(connection, schema)]
    except NoReadModel:
        homes = []
    for name in (schema, *homes):
        await connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


async def begin_anew(connection: AsyncConnection[Any], schema: str, projection: str, shards: int) -> None:
    """Shows an empty version instead of the live one, which is dropped, in the caller's transaction: workers
    fill it from the journal.

    The connection uses the new version afterwards. Raises ViewsInUse.
    """
    made = await create(connection, schema, projection, shards)
    await complete(connection, projection)
    await show(connection, schema, made, keep=False)
    await sweep(connection, schema, projection)


async def renew_empty(connection: AsyncConnection[Any], schema: str, shards: int) -> list[str]:
    """Gives a system that has no events yet the definitions of this code, in the caller's transaction;
    returns the projections renewed.

    One whose views change, and that others stand on, is left as it is: `grabstream rebuild` says who they
    are, until they are gone.
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
        found = await connection.execute(
            sql.SQL("SELECT count(*) FROM {} WHERE next_offset > 0").format(
                sql.Identifier(live.schema, "projection_cursors")
            )
        )
        if (await found.fetchone() or [1])[0] == 0:
            try:
                async with connection.transaction():
                    await begin_anew(connection, schema, projection, shards)
            except ViewsInUse as error:
                log.warning(
                    "%s: no worker of this release writes it until `grabstream rebuild %s`: %s",
                    projection,
                    projection,
                    error,
                )
                continue
            renewed.append(projection)
    return renewed
