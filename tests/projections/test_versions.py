"""Versions of read models: what migrations made is what a definition makes; what is shown, written, kept and dropped."""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from psycopg import AsyncConnection

from ops.settings import Settings
from projections import versions
from projections.definitions import PROJECTIONS, definition_of
from projections.migrate import migrate

FORM = {
    "columns": "SELECT c.relname, c.relkind, a.attnum - (SELECT count(*) FROM pg_attribute WHERE attrelid = c.oid AND attisdropped "
    "AND attnum > 0 AND attnum < a.attnum), a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, "
    "pg_get_expr(d.adbin, d.adrelid) FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid "
    "LEFT JOIN pg_attrdef AS d ON (d.adrelid, d.adnum) = (c.oid, a.attnum) "
    "WHERE c.relnamespace = %s::regnamespace AND a.attnum > 0 AND NOT a.attisdropped ORDER BY 1, 3",
    "constraints": "SELECT conrelid::regclass::text, contype, pg_get_constraintdef(oid) FROM pg_constraint "
    "WHERE connamespace = %s::regnamespace ORDER BY 1, 2, 3",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = %s ORDER BY 1, 2",
    "views": "SELECT viewname, definition FROM pg_views WHERE schemaname = %s ORDER BY 1",
}  # fmt: skip


@pytest.fixture
async def connection(settings: Settings) -> AsyncIterator[AsyncConnection[Any]]:
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as opened:
        await migrate(opened, settings.schema_, settings.shards)
        yield opened
        await versions.drop_all(opened, settings.schema_)


async def form(connection: AsyncConnection[Any], schema: str) -> dict[str, list[Any]]:
    await connection.execute("SELECT set_config('search_path', %s, false)", (schema,))
    found = {name: await (await connection.execute(query.encode(), (schema,))).fetchall() for name, query in FORM.items()}
    # A view that was made from another one's text has parentheses that the parser takes apart differently.
    found["views"] = [(view, re.sub(r"[()\s]+", " ", text)) for view, text in found["views"]]
    return {name: [tuple(str(value).replace(schema, "home") for value in row) for row in rows] for name, rows in found.items()}


@pytest.mark.parametrize("projection", PROJECTIONS)
async def test_what_migrations_made_is_what_the_definition_makes(
    connection: AsyncConnection[Any], settings: Settings, projection: str
) -> None:
    assert definition_of(projection).number == 1, "the migrations made definition 1: compare with what replaces it"
    async with connection.transaction():
        made = await versions.create(connection, settings.schema_, projection, settings.shards)
        await versions.complete(connection, projection)
    migrated, defined = await form(connection, f"{settings.schema_}_{projection}_1"), await form(connection, made.schema)
    assert len(defined["columns"]) > 10
    assert {row[0] for row in defined["columns"]} >= {*definition_of(projection).tables, "projection_cursors", "stopped_shards"}
    for name in FORM:
        assert migrated[name] == defined[name], name
