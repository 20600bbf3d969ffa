"""Which system a schema belongs to, and which schemas belong to a system: by what is written down, never by
how names begin.
"""

import re
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection, sql

from grabstream.projections.definitions import PROJECTIONS
from grabstream.projections.versions import may_be_version

#: What PostgreSQL, or everybody, has a use for.
_RESERVED: Final = re.compile(r"public|information_schema|pg_.*")
#: Names that versions of read models have (`versions.py`), and the read models of a moment (`at`).
_DERIVED: Final = re.compile(rf"(.+)_(?:(?:{'|'.join((*PROJECTIONS, 'events'))})_[0-9]+|_at_[0-9a-f]{{8}})")


class Identity(NamedTuple):
    """What a schema belongs to: prefix of keys and topics, Kafka's id of the journal's topic (hex), number of
    shards.
    """

    prefix: str
    journal: str
    shards: int


async def read_identity(connection: AsyncConnection[Any], schema: str) -> Identity | None:
    """What a schema belongs to; None when that is not written down: an older release has made it, or
    nobody.
    """
    if not await _is_there(connection, schema, "system"):
        return None
    query = sql.SQL("SELECT prefix, journal, shards FROM {}").format(sql.Identifier(schema, "system"))
    row = await (await connection.execute(query)).fetchone()
    return Identity(*row) if row else None


async def write_identity(connection: AsyncConnection[Any], schema: str, identity: Identity) -> None:
    """Writes down what a schema belongs to from here on; as a comment also for other systems, which may not
    read its tables.
    """
    table = sql.Identifier(schema, "system")
    async with connection.transaction():
        await connection.execute(
            sql.SQL(
                "INSERT INTO {} (prefix, journal, shards) VALUES (%s, %s, %s) ON CONFLICT (one) DO UPDATE "
                "SET prefix = excluded.prefix, journal = excluded.journal, shards = excluded.shards, "
                "written_at = now()"
            ).format(table),
            identity,
        )
        await connection.execute(
            sql.SQL("COMMENT ON TABLE {} IS {}").format(table, sql.Literal(_comment(identity.journal)))
        )


def _comment(journal: str) -> str:
    return f"grabstream: of the journal {journal}"


async def is_system(connection: AsyncConnection[Any], schema: str) -> bool:
    """Whether a schema has a system's tables, of whatever release."""
    return await _is_there(connection, schema, "migrations") and await _is_there(
        connection, schema, "outcomes"
    )


async def schemas_of(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """The schemas of a system, its own first: those that `read_models` names, as far as they are there.

    Where its own is gone, those that are left of it: they have names that no other system may have, and
    cursors of a read model.
    """
    if await _is_there(connection, schema, "read_models"):
        query = sql.SQL(
            "SELECT nspname FROM pg_namespace WHERE nspname IN (SELECT schema FROM {}) ORDER BY nspname"
        )
        found = await connection.execute(query.format(sql.Identifier(schema, "read_models")))
        return [schema, *(name for (name,) in await found.fetchall())]
    if await is_system(connection, schema):
        return [schema]
    found = await connection.execute(
        "SELECT nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = relnamespace "
        "WHERE relname = 'projection_cursors' AND relkind = 'r' ORDER BY nspname"
    )
    return [
        name
        for (name,) in await found.fetchall()
        if may_be_version(schema, name) and not await is_system(connection, name)
    ]


async def why_not_for_a_system(connection: AsyncConnection[Any], schema: str) -> str | None:
    """Why a system cannot be made in a schema, in words; None when it can, or when it is there already."""
    if _RESERVED.fullmatch(schema):
        return "PostgreSQL and other programs use it"
    if await is_system(connection, schema):
        return None
    if derived := _DERIVED.fullmatch(schema):
        return f"a system in schema {derived[1]} gives such names to schemas of its own"
    query = (
        "SELECT relname FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = "
        "%s) ORDER BY relname LIMIT 1"
    )
    row = await (await connection.execute(query, (schema,))).fetchone()
    return f"it holds something else ({row[0]})" if row else None


async def others_on(connection: AsyncConnection[Any], schema: str, journal: str) -> list[str]:
    """Other schemas of this database that belong to the same journal."""
    return [name for name, comment in await _others(connection, schema) if comment == _comment(journal)]


async def other_systems(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """Other schemas of this database that belong to a system, as far as that is written down."""
    return [name for name, _ in await _others(connection, schema)]


async def _others(connection: AsyncConnection[Any], schema: str) -> list[tuple[str, str]]:
    """Other schemas that say of which journal they are, in the comment that every role may read; with the
    comment.
    """
    found = await connection.execute(
        "SELECT nspname, obj_description(c.oid, 'pg_class') FROM pg_class AS c JOIN pg_namespace AS n ON "
        "n.oid = relnamespace "
        "WHERE relname = 'system' AND relkind = 'r' AND nspname <> %s "
        "AND starts_with(obj_description(c.oid, 'pg_class'), %s) ORDER BY nspname",
        (schema, _comment("")),
    )
    return await found.fetchall()


async def _is_there(connection: AsyncConnection[Any], schema: str, table: str) -> bool:
    row = await (
        await connection.execute("SELECT to_regclass(%s) IS NOT NULL", (f"{schema}.{table}",))
    ).fetchone()
    return bool(row and row[0])
