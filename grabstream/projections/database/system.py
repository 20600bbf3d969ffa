"""The system of a schema, and the schemas of a system. Both are read from tables and comments, never guessed
from the start of names.
"""

import re
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection, sql

from grabstream.projections.definitions import PROJECTIONS
from grabstream.projections.versions import may_be_version

#: Schemas that PostgreSQL or other programs use.
_RESERVED: Final = re.compile(r"public|information_schema|pg_.*")
#: Names of versions of read models (`versions.py`), and of the read models of a past time (`at`).
_DERIVED: Final = re.compile(rf"(.+)_(?:(?:{'|'.join((*PROJECTIONS, 'events'))})_[0-9]+|_at_[0-9a-f]{{8}})")


class Identity(NamedTuple):
    """The system of a schema: the prefix of keys and topics, Kafka's id of the journal topic (hex), and the
    number of shards. `cluster` is the id of the Kafka cluster that has the journal, where Kafka was asked.
    """

    prefix: str
    journal: str
    shards: int
    cluster: str = ""


async def read_identity(connection: AsyncConnection[Any], schema: str) -> Identity | None:
    """The system of a schema; None if none is recorded: `init` did not end, or there is no such schema."""
    if not await _is_there(connection, schema, "system"):
        return None
    query = sql.SQL("SELECT prefix, journal, shards FROM {}").format(sql.Identifier(schema, "system"))
    row = await (await connection.execute(query)).fetchone()
    return Identity(*row) if row else None


async def write_identity(connection: AsyncConnection[Any], schema: str, identity: Identity) -> None:
    """Records the system of a schema. A comment records it too, for other systems, which may not be allowed
    to read its tables.
    """
    table = sql.Identifier(schema, "system")
    async with connection.transaction():
        await connection.execute(
            sql.SQL(
                "INSERT INTO {} (prefix, journal, shards) VALUES (%s, %s, %s) ON CONFLICT (one) DO UPDATE "
                "SET prefix = excluded.prefix, journal = excluded.journal, shards = excluded.shards, "
                "written_at = now()"
            ).format(table),
            identity[:3],
        )
        await connection.execute(
            sql.SQL("COMMENT ON TABLE {} IS {}").format(table, sql.Literal(_comment(identity.journal)))
        )


def _comment(journal: str) -> str:
    return f"grabstream: of the journal {journal}"


async def is_system(connection: AsyncConnection[Any], schema: str) -> bool:
    """Whether a schema has the tables of a system, in any form."""
    return await _is_there(connection, schema, "migrations") and await _is_there(
        connection, schema, "outcomes"
    )


async def schemas_of(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """The main schema of a system, and then the existing schemas that `read_models` names.

    If the main schema is gone, the remaining schemas of the system: their names are reserved for it, and they
    have cursors of a read model.
    """
    if await _is_there(connection, schema, "read_models"):
        query = sql.SQL(
            "SELECT nspname FROM pg_namespace WHERE nspname IN (SELECT schema FROM {}) ORDER BY nspname"
        )
        rows = await connection.execute(query.format(sql.Identifier(schema, "read_models")))
        return [schema, *(name for (name,) in await rows.fetchall())]
    if await is_system(connection, schema):
        return [schema]
    rows = await connection.execute(
        "SELECT nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace "
        "WHERE relname = 'projection_cursors' AND relkind = 'r' ORDER BY nspname"
    )
    return [
        name
        for (name,) in await rows.fetchall()
        if may_be_version(schema, name) and not await is_system(connection, name)
    ]


async def why_not_for_a_system(connection: AsyncConnection[Any], schema: str) -> str | None:
    """Why a system cannot be made in a schema; None if it can, or if the schema already has a system."""
    if _RESERVED.fullmatch(schema):
        return "PostgreSQL and other programs use it"
    if await is_system(connection, schema):
        return None
    if derived := _DERIVED.fullmatch(schema):
        return f"a system in schema {derived[1]} would use this name for its read models"
    query = (
        "SELECT relname FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = "
        "%s) ORDER BY relname LIMIT 1"
    )
    row = await (await connection.execute(query, (schema,))).fetchone()
    return f"it has other tables ({row[0]})" if row else None


async def others_on(connection: AsyncConnection[Any], schema: str, journal: str) -> list[str]:
    """Other schemas of this database that belong to the same journal."""
    return [name for name, comment in await _others(connection, schema) if comment == _comment(journal)]


async def other_systems(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """Other schemas of this database that belong to a system, if their system is recorded."""
    return [name for name, _ in await _others(connection, schema)]


async def _others(connection: AsyncConnection[Any], schema: str) -> list[tuple[str, str]]:
    """Other schemas with a comment that names their journal, and this comment, which every role may read."""
    rows = await connection.execute(
        "SELECT nspname, obj_description(c.oid, 'pg_class') FROM pg_class AS c JOIN pg_namespace AS n ON "
        "n.oid = relnamespace "
        "WHERE relname = 'system' AND relkind = 'r' AND nspname <> %s "
        "AND starts_with(obj_description(c.oid, 'pg_class'), %s) ORDER BY nspname",
        (schema, _comment("")),
    )
    return await rows.fetchall()


async def _is_there(connection: AsyncConnection[Any], schema: str, table: str) -> bool:
    row = await (
        await connection.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{schema}.{table}",))
    ).fetchone()
    return bool(row and row[0])
