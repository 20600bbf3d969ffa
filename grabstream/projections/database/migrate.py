"""Migrations: numbered SQL files, each applied once, in one transaction, in the schema of this system."""

import logging
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final

from psycopg import AsyncConnection, sql

from grabstream.models.outcomes import OUTCOME_NAMES
from grabstream.projections import versions
from grabstream.projections.definitions import PROJECTIONS

__all__ = ["PROJECTIONS", "migrate", "use_schema"]

log = logging.getLogger(__name__)

_is_migration: Final = re.compile(r"[0-9]{4}_\w+\.sql").fullmatch

#: How long a process waits for another process that applies migrations.
FIRST_SECONDS_MAX: Final = 60


class EarlierForm(Exception):
    """A schema has the tables of a state of this program before its first release; the text says which."""


async def require_form(connection: AsyncConnection[Any], schema: str) -> None:
    """Raises EarlierForm for a schema that has migrations of this program, but not the first one: the others
    could not be applied to its tables.
    """
    applied = {name for name in await _applied(connection, schema) if _is_migration(name)}
    if applied and _migrations()[0].name not in applied:
        raise EarlierForm(
            f"schema {schema} has the tables of a state before the first release ({min(applied)}), which no "
            "migration changes"
        )


async def migrate(connection: AsyncConnection[Any], schema: str, shards: int) -> list[str]:
    """Applies missing migrations and returns their names. It is safe to call it again, and from several
    processes at once. Raises EarlierForm.

    In a system without events, the read models get the definitions of this code. In a system with events,
    only `grabstream rebuild` changes them.
    """
    async with connection.transaction():
        # A second process waits here, and then has nothing to do. Migrations may take longer than the usual
        # lock timeout.
        lock_timeout = await (await connection.execute("SELECT current_setting('lock_timeout')")).fetchone()
        await connection.execute("SELECT set_config('lock_timeout', %s, true)", (f"{FIRST_SECONDS_MAX}s",))
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"grabstream-{schema}",))
        await connection.execute("SELECT set_config('lock_timeout', %s, true)", lock_timeout)
        await require_form(connection, schema)
        await connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        await use_schema(connection, schema)
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (name text PRIMARY KEY, at timestamptz DEFAULT now())"
        )
        known, applied = await _applied(connection, schema), []
        for path in _migrations():
            if path.name not in known:
                await connection.execute(path.read_text().encode())
                await connection.execute("INSERT INTO migrations (name) VALUES (%s)", (path.name,))
                applied.append(path.name)
        await connection.execute(
            "INSERT INTO outcomes SELECT * FROM unnest(%s::integer[], %s::text[]) ON CONFLICT DO NOTHING",
            (list(OUTCOME_NAMES), list(OUTCOME_NAMES.values())),
        )
        await _renew_read_models(connection, schema, shards, bool(applied))
        await use_schema(connection, schema)
    return applied


async def _renew_read_models(
    connection: AsyncConnection[Any], schema: str, shards: int, migrated: bool
) -> None:
    """Makes missing read models, views and cursors, and renews views whose text has changed."""
    if await versions.create_missing(connection, schema, shards) or migrated:
        await versions.show_cursors(connection, schema)
    await versions.mend_cursors(connection, schema)
    await versions.renew_empty(connection, schema, shards)
    await versions.renew_views(connection, schema)
    kept = [
        version
        for version in await versions.versions(connection, schema)
        if version.projection in PROJECTIONS and version.state != "discarded"
    ]
    lost = await versions.lost(connection, kept)
    for version in lost:
        if version.state == "live":
            log.warning("%s", versions.lost_message(version))
    for version in kept:
        if version not in lost:
            await versions.use_version(connection, schema, version)
            await versions.add_cursors(connection, version.projection, shards)


def _migrations() -> list[Traversable]:
    paths = [
        path for path in files("grabstream.projections.migrations").iterdir() if path.name.endswith(".sql")
    ]
    return sorted(paths, key=lambda path: path.name)


async def _applied(connection: AsyncConnection[Any], schema: str) -> set[str]:
    """The names of the migrations that were applied in a schema; none if it has no such table. Another
    program's table has other columns.
    """
    table = sql.Identifier(schema, "migrations")
    row = await connection.execute(
        "SELECT count(*) FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid WHERE pg_class.oid = "
        "to_regclass(%s) AND relkind = 'r' AND attname IN ('name', 'at')",
        (table.as_string(connection),),
    )
    if (await row.fetchone() or (0,))[0] < 2:
        return set()
    rows = await connection.execute(sql.SQL("SELECT name FROM {}").format(table))
    return {name for (name,) in await rows.fetchall()}


async def missing_migrations(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """The names of migrations that are not applied in a schema."""
    known = await _applied(connection, schema)
    return [path.name for path in _migrations() if path.name not in known]


def drop_statement(schema: str) -> str:
    """The statement that removes a schema, for people to copy."""
    return sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)).as_string()


async def use_schema(connection: AsyncConnection[Any], schema: str) -> None:
    """Sets the search path of the connection to the main schema, whose views show the live versions."""
    await connection.execute("SELECT set_config('search_path', %s, false)", (schema,))
