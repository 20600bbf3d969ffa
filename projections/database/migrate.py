"""Migrations: numbered SQL files, each applied once, in one transaction, in the schema of this system."""

import logging
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final

from psycopg import AsyncConnection, sql
from psycopg.errors import UndefinedTable

from grabstream.models.outcomes import OUTCOME_NAMES
from grabstream.projections import versions
from grabstream.projections.definitions import PROJECTIONS

__all__ = ["PROJECTIONS", "migrate", "use_schema"]

log = logging.getLogger(__name__)

#: How long migrations may take, for another who is about the same.
FIRST_SECONDS_MAX: Final = 60


async def migrate(connection: AsyncConnection[Any], schema: str, shards: int) -> list[str]:
    """Applies what is missing and returns the names of the migrations; safe to call again, and by several at
    once.

    A schema made anew has the read models that this code defines; in one with events they change by
    `grabstream rebuild` only.
    """
    applied = []
    async with connection.transaction():
        # Whoever comes second waits here, and then finds nothing to do. The first may take longer than others
        # are waited for.
        waits = await (await connection.execute("SELECT current_setting('lock_timeout')")).fetchone()
        await connection.execute("SELECT set_config('lock_timeout', %s, true)", (f"{FIRST_SECONDS_MAX}s",))
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"grabstream-{schema}",))
        await connection.execute("SELECT set_config('lock_timeout', %s, true)", waits)
        await connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        await use_schema(connection, schema)
        await connection.execute(
            "CREATE TABLE IF NOT EXISTS migrations (name text PRIMARY KEY, at timestamptz DEFAULT now())"
        )
        rows = await (await connection.execute("SELECT name FROM migrations")).fetchall()
        known = {name for (name,) in rows}
        for path in _migrations():
            if path.name in known:
                continue
            await connection.execute(path.read_text().encode())
            await connection.execute("INSERT INTO migrations (name) VALUES (%s)", (path.name,))
            applied.append(path.name)
        await connection.execute(
            "INSERT INTO outcomes SELECT * FROM unnest(%s::integer[], %s::text[]) ON CONFLICT DO NOTHING",
            (list(OUTCOME_NAMES), list(OUTCOME_NAMES.values())),
        )
        if applied:
            await versions.show_cursors(connection, schema)
        await versions.mend_cursors(connection, schema)
        await versions.renew_empty(connection, schema, shards)
        written = [
            one for one in await versions.versions(connection, schema) if one.projection in PROJECTIONS
        ]
        written = [one for one in written if one.state != "discarded"]
        gone = await versions.lost(connection, written)
        for one in gone:
            if one.state == "live":
                log.warning("%s", versions.in_words(one))
        for one in written:
            if one not in gone:
                await versions.use_version(connection, schema, one)
                await versions.add_cursors(connection, one.projection, shards)
        await use_schema(connection, schema)
    return applied


def _migrations() -> list[Traversable]:
    found = [
        path for path in files("grabstream.projections.migrations").iterdir() if path.name.endswith(".sql")
    ]
    return sorted(found, key=lambda path: path.name)


async def missing_migrations(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """The names of migrations that were not applied in a schema."""
    await use_schema(connection, schema)
    try:
        rows = await (await connection.execute("SELECT name FROM migrations")).fetchall()
    except UndefinedTable:
        rows = []
    known = {name for (name,) in rows}
    return [path.name for path in _migrations() if path.name not in known]


async def use_schema(connection: AsyncConnection[Any], schema: str) -> None:
    """Makes unqualified names of this connection mean those of the schema: the views of what is live."""
    await connection.execute("SELECT set_config('search_path', %s, false)", (schema,))
