"""Versions of read models: migrations and definitions make the same tables; versions are shown, written, kept
and dropped.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

import pytest
from psycopg import AsyncConnection

from grabstream.ops.settings import Settings
from grabstream.projections import versions
from grabstream.projections.checking.difference import compare
from grabstream.projections.database.migrate import migrate
from grabstream.projections.definitions import PROJECTIONS, BadDefinition, definition_of, parse
from tests.support.systems import make_tables

FORM = {
    "columns": "SELECT c.relname, c.relkind, a.attnum - (SELECT count(*) FROM pg_attribute WHERE attrelid = "
               "c.oid AND attisdropped "
    "AND attnum > 0 AND attnum < a.attnum), a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, "
    "a.attcompression, "
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
        await make_tables(opened, settings)
        yield opened
        await versions.drop_all(opened, settings.schema_)


async def form(connection: AsyncConnection[Any], schema: str) -> dict[str, list[Any]]:
    await connection.execute("SELECT set_config('search_path', %s, false)", (schema,))
    parts = {
        name: await (await connection.execute(query.encode(), (schema,))).fetchall()
        for name, query in FORM.items()
    }
    # A view that was created from the text of another view may have other parentheses.
    parts["views"] = [(view, re.sub(r"[()\s]+", " ", text)) for view, text in parts["views"]]
    return {
        name: [tuple(str(value).replace(schema, "home") for value in row) for row in rows]
        for name, rows in parts.items()
    }


async def test_new_system_has_the_tables_of_the_definition(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """Migrations make definition 1. A system without events then gets the current definition."""
    for projection in PROJECTIONS:
        live = await versions.in_state(connection, settings.schema_, projection, "live")
        assert live is not None
        assert live.definition == definition_of(projection).number
        async with connection.transaction():
            made = await versions.create(connection, settings.schema_, projection, settings.shards)
            await versions.complete(connection, projection)
        migrated, defined = await form(connection, live.schema), await form(connection, made.schema)
        assert len(defined["columns"]) > 10
        tables = {*definition_of(projection).tables, "projection_cursors", "stopped_shards"}
        assert {row[0] for row in defined["columns"]} >= tables
        for name in FORM:
            assert migrated[name] == defined[name], (projection, name)


async def test_migration_of_an_older_release_keeps_rows_and_dependent_views(
    settings: Settings,
) -> None:
    """Rows, cursors, stops and grants survive the migration, and a user's view reads the live version from
    then on.
    """
    main, folder = settings.schema_, files("grabstream.projections.migrations")
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as connection:
        await connection.execute(f"CREATE SCHEMA {main}; SET search_path TO {main}".encode())
        await connection.execute(
            b"CREATE TABLE migrations (name text PRIMARY KEY, at timestamptz DEFAULT now())"
        )
        for name in ("0001_books.sql", "0002_pieces.sql"):
            await connection.execute((folder / name).read_text().encode())
            await connection.execute("INSERT INTO migrations (name) VALUES (%s)", (name,))
        await connection.execute("INSERT INTO accounts_1 VALUES ('wallet:u', 'CNY', 5)")
        await connection.execute(
            "INSERT INTO transfers_1 VALUES (3, 17, 0, 'e', 'CNY', 'external:p', 'wallet:u', 5, 1)"
        )
        columns = "(projection, shard, seq, next_offset)"
        await connection.execute(
            f"INSERT INTO projection_cursors {columns} VALUES ('ledger', 3, 17, 4), ('audit', 3, 19, "
            "4)".encode()
        )
        await connection.execute(
            "INSERT INTO stopped_shards VALUES ('ledger', 3, 17, 4, 'why'), ('events', 2, 1, 1, 'because')"
        )
        await connection.execute(b"CREATE VIEW rich AS SELECT credit, amount FROM transfers WHERE amount > 1")
        await connection.execute(b"CREATE VIEW has AS SELECT * FROM accounts")
        await connection.execute(b"GRANT SELECT ON accounts TO PUBLIC")
        try:
            await migrate(connection, main, settings.shards)
            cursors = "SELECT projection, seq FROM cursors WHERE shard = 3 ORDER BY 1"
            assert await fetch(connection, cursors) == [("audit", 19), ("balances", 0), ("ledger", 17)]
            assert await fetch(connection,
                "SELECT projection, shard, reason FROM stopped_shards ORDER BY 1") == [
                ("events", 2, "because"), ("ledger", 3, "why"),
            ]  # fmt: skip
            compression = (
                "SELECT attcompression FROM pg_attribute WHERE attname = 'body' AND attrelid = "
                f"'{main}_audit_1.audit_1'::regclass"
            )
            assert await fetch(connection, compression) == [("l",)]
            assert await fetch(connection, "SELECT * FROM rich") == [("wallet:u", 5)]
            assert await fetch(connection, "SELECT * FROM has") == [("wallet:u", "CNY", 5)]
            async with connection.transaction():
                made = await versions.create(connection, main, "ledger", settings.shards)
                await versions.complete(connection, "ledger")
                await connection.execute("INSERT INTO accounts_1 VALUES ('wallet:v', 'CNY', 6)")
                await connection.execute(
                    "INSERT INTO transfers_1 VALUES (3, 17, 0, 'e', 'CNY', 'external:p', 'wallet:v', 6, 1)"
                )
            # Definition 2 changes a type of the view accounts, so the dependent view is named and nothing
            # changes.
            with pytest.raises(versions.ViewsInUse, match="view has depends on view"):
                async with connection.transaction():
                    await versions.show(connection, main, made)
            await connection.execute("SELECT set_config('search_path', %s, false)", (main,))
            assert await fetch(connection, "SELECT * FROM has") == [("wallet:u", "CNY", 5)]
            await connection.execute(b"DROP VIEW has")
            async with connection.transaction():
                await versions.show(connection, main, made)
            await connection.execute("SELECT set_config('search_path', %s, false)", (main,))
            assert await fetch(connection, "SELECT * FROM rich") == [("wallet:v", 6)]
            assert await fetch(connection, "SELECT * FROM accounts") == [("wallet:v", "CNY", 6)]
            assert await fetch(connection, "SELECT has_table_privilege('public', 'accounts', 'SELECT')") == [
                (True,)
            ]
        finally:
            await versions.drop_all(connection, main)


async def test_columns_that_a_rebuild_adds_to_a_version_of_the_first_definition_are_declared(
    settings: Settings,
) -> None:
    """Otherwise the rebuild of an older system is refused, though both versions are right."""
    main, folder = settings.schema_, files("grabstream.projections.migrations")
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as connection:
        await connection.execute(f"CREATE SCHEMA {main}; SET search_path TO {main}".encode())
        await connection.execute(
            b"CREATE TABLE migrations (name text PRIMARY KEY, at timestamptz DEFAULT now())"
        )
        await connection.execute((folder / "0001_books.sql").read_text().encode())
        await connection.execute("INSERT INTO migrations (name) VALUES ('0001_books.sql')")
        for projection in PROJECTIONS:
            # With an event, no version is replaced by an empty one of the current definition.
            await connection.execute(
                "INSERT INTO projection_cursors (projection, shard, seq, next_offset) VALUES (%s, 0, 1, 1)",
                (projection,),
            )
        try:
            await migrate(connection, main, settings.shards)
            for projection in PROJECTIONS:
                old = await versions.in_state(connection, main, projection, "live")
                assert old is not None
                assert old.definition == 1
                async with connection.transaction():
                    made = await versions.create(connection, main, projection, settings.shards)
                    await versions.complete(connection, projection)
                differences = await compare(connection, definition_of(projection), old, made)
                assert {one.table for one in differences} == set(definition_of(projection).compared)
                assert {one.table: one.columns for one in differences if one.undeclared} == {}
        finally:
            await versions.drop_all(connection, main)


async def fetch(connection: AsyncConnection[Any], query: str) -> list[Any]:
    return await (await connection.execute(query.encode())).fetchall()


async def test_view_with_other_columns_is_created_again_with_its_grants_unless_views_depend_on_it(
    connection: AsyncConnection[Any], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = settings.schema_
    changed = (
        definition_of("ledger")
        .parts["views"]
        .replace("account, asset, posted FROM", "asset, account, posted FROM")
    )
    other = definition_of("ledger")._replace(
        number=9, parts={**definition_of("ledger").parts, "views": changed}
    )
    monkeypatch.setattr(
        versions,
        "definition_of",
        lambda projection: other if projection == "ledger" else definition_of(projection),
    )
    async with connection.transaction():
        made = await versions.create(connection, main, "ledger", settings.shards)
        await versions.complete(connection, "ledger")
    await connection.execute("SELECT set_config('search_path', %s, false)", (main,))
    await connection.execute(b"GRANT SELECT ON accounts TO PUBLIC")
    await connection.execute(b"CREATE VIEW rich AS SELECT * FROM accounts WHERE posted > 1")
    with pytest.raises(versions.ViewsInUse, match="rich"):
        async with connection.transaction():
            await versions.show(connection, main, made)
    assert (await versions.in_state(connection, main, "ledger", "live")).version == 2  # type: ignore[union-attr]
    await connection.execute(b"DROP VIEW rich")
    async with connection.transaction():
        await versions.show(connection, main, made)
    await connection.execute("SELECT set_config('search_path', %s, false)", (main,))
    columns = (
        "SELECT array_agg(attname::text ORDER BY attnum) FROM pg_attribute WHERE attrelid = "
        "'accounts'::regclass AND attnum > 0"
    )
    assert await fetch(connection, columns) == [(["asset", "account", "posted"],)]
    assert await fetch(connection, "SELECT has_table_privilege('public', 'accounts', 'SELECT')") == [(True,)]
    # Workers write the version that has their definition.
    assert await versions.use_read_model(connection, main, "ledger") == made.schema
    monkeypatch.undo()
    assert await versions.use_read_model(connection, main, "ledger") == f"{main}_ledger_2"
    await versions.discard(connection, main, (await versions.versions(connection, main, "ledger"))[0])
    with pytest.raises(versions.NoReadModel, match="grabstream rebuild ledger"):
        await versions.use_read_model(connection, main, "ledger")


async def test_two_read_models_that_are_switched_at_once_are_both_shown(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """The views over all read models show what the other switch has shown, and so outlive what it drops."""
    main = settings.schema_
    made = {}
    for projection in ("audit", "ledger"):
        async with connection.transaction():
            made[projection] = await versions.create(connection, main, projection, settings.shards)
            await versions.complete(connection, projection)
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as other:

        async def switch_ledger() -> None:
            async with other.transaction():
                await versions.show(other, main, made["ledger"], keep=False)

        async with connection.transaction():
            await versions.show(connection, main, made["audit"], keep=False)
            switching = asyncio.create_task(switch_ledger())
            while not await fetch(connection, f"SELECT unnest(pg_blocking_pids({other.info.backend_pid}))"):
                assert not switching.done()
                await asyncio.sleep(0.01)
        await switching
    for projection in ("audit", "ledger"):
        assert await versions.sweep(connection, main, projection)
    await connection.execute("SELECT set_config('search_path', %s, false)", (main,))
    moved = f"UPDATE {made['audit'].schema}.projection_cursors SET seq = 7"
    await connection.execute(moved.encode())
    shown = await fetch(connection, "SELECT DISTINCT projection, seq FROM cursors ORDER BY 1")
    assert shown == [("audit", 7), ("balances", 0), ("ledger", 0)]


async def test_system_without_events_gets_the_definitions_of_the_code(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without events, `init` itself installs the new definition. With events, it does not change a read
    model.
    """
    later = definition_of("audit")._replace(number=7)
    monkeypatch.setattr(
        versions,
        "definition_of",
        lambda projection: later if projection == "audit" else definition_of(projection),
    )
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as connection:
        await migrate(connection, settings.schema_, settings.shards)
        try:
            audit = await versions.versions(connection, settings.schema_, "audit")
            assert [(version.definition, version.state) for version in audit] == [(7, "live")]
            assert await fetch(connection, "SELECT count(*) FROM cursors WHERE projection = 'audit'") == [
                (settings.shards,)
            ]
            await connection.execute(
                f"UPDATE {audit[0].schema}.projection_cursors SET next_offset = 1".encode()
            )
            later = later._replace(number=8)
            await migrate(connection, settings.schema_, settings.shards)
            assert await versions.versions(connection, settings.schema_, "audit") == audit
        finally:
            await versions.drop_all(connection, settings.schema_)


async def test_migration_adds_metadata_to_the_versions_that_are_there(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """In place, with views of other programs; the result is that of the definition."""
    main, projections = settings.schema_, ("balances", "audit")
    live = [await versions.in_state(connection, main, name, "live") for name in projections]
    homes = [version.schema for version in live if version is not None]
    assert len(homes) == 2
    expected = [await form(connection, home) for home in homes]
    [balances, audit] = homes
    # As before the migration: without the column, and what shows it.
    grabs = re.search(r"VIEW grabs AS(.*?), metadata", definition_of("balances").parts["views"], re.DOTALL)
    assert grabs is not None
    before = f"CREATE VIEW {balances}.grabs AS {grabs[1]} FROM grabs_1;"
    columns = (
        "offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at, held, taken, redeemed, "
        "back, deadline_at, due, currency, paid, refunded, attributes, basket"
    )
    await connection.execute(
        f"DROP VIEW {balances}.grabs, {audit}.events CASCADE; DELETE FROM {main}.view_texts; "
        f"ALTER TABLE {balances}.grabs_1 DROP COLUMN metadata; SET search_path TO {balances}; {before} "
        f"SET search_path TO {main}; CREATE VIEW {main}.grabs AS SELECT {columns} FROM {balances}.grabs; "
        f"CREATE VIEW mine AS SELECT user_id FROM grabs; "
        f"CREATE VIEW {audit}.events AS SELECT shard, seq, offer, type, at, ''::text AS body "
        f"FROM {audit}.audit_1; CREATE VIEW {main}.events AS SELECT * FROM {audit}.events; "
        "DELETE FROM migrations WHERE name = '0015_metadata.sql'".encode()
    )
    await connection.execute(
        f"INSERT INTO {balances}.grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, "
        "shard, seq, at) VALUES ('o', 'g', 'ann', 'granted', 1, 1, 'x', 1, 0, 1, 1)".encode()
    )
    assert await migrate(connection, main, settings.shards) == ["0015_metadata.sql"]
    assert await fetch(connection, "SELECT grab, metadata FROM grabs") == [("g", None)]
    assert await fetch(connection, "SELECT * FROM mine") == [("ann",)]
    assert [await form(connection, home) for home in homes] == expected


async def test_init_keeps_a_view_with_dependent_views_and_logs_it(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Also without events. `init` succeeds, and a later `init` renews the version after the views are
    dropped.
    """
    main, folder = settings.schema_, files("grabstream.projections.migrations")
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as connection:
        await connection.execute(f"CREATE SCHEMA {main}; SET search_path TO {main}".encode())
        await connection.execute(
            b"CREATE TABLE migrations (name text PRIMARY KEY, at timestamptz DEFAULT now())"
        )
        await connection.execute((folder / "0001_books.sql").read_text().encode())
        await connection.execute("INSERT INTO migrations (name) VALUES ('0001_books.sql')")
        await connection.execute(b"CREATE VIEW has AS SELECT * FROM accounts")
        try:
            for number in (1, 2):
                await migrate(connection, main, settings.shards)
                assert {one.projection: one.definition for one in await versions.versions(connection,
                    main) if one.state == "live"} == {
                    "audit": 1, "balances": 3, "events": 1, "ledger": 1 if number == 1 else 4,
                }  # fmt: skip
                assert ("view has depends on view" in caplog.text) is (number == 1)
                await connection.execute(b"DROP VIEW IF EXISTS has")
                caplog.clear()
        finally:
            await versions.drop_all(connection, main)


def test_definition_declares_its_changes() -> None:
    text = (
        "--- definition 3\n--- changes 2: a.x a.y\n--- changes 3: b.*\n--- part tables\nCREATE TABLE a (x "
        "int);\n"
    )
    definition = parse("p", text)
    assert (definition.number, definition.tables) == (3, ["a"])
    assert definition.declared_since(1) == {"a.x", "a.y", "b.*"}
    assert definition.declared_since(2) == {"b.*"}
    for wrong, reason in (
        (text[18:], "no line"),
        (text + "--- part tabels\n", "tabels"),
        (text.replace("3: b", "4: b"), "above 3"),
    ):
        with pytest.raises(BadDefinition, match=reason):
            parse("p", wrong)


async def test_new_version_skips_names_that_are_taken(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """Names of other schemas, and of earlier versions with records that operators set aside."""
    schema = settings.schema_
    await connection.execute(
        f"CREATE SCHEMA {schema}_ledger_4; CREATE SCHEMA {schema}_ledger_9x; CREATE SCHEMA {schema}_"
        "ledger".encode()
    )
    try:
        async with connection.transaction():
            assert (await versions.create(connection, schema, "ledger", settings.shards)).version == 5
        async with connection.transaction():
            assert (await versions.create(connection, schema, "audit", settings.shards)).version == 2
    finally:
        await connection.execute(
            f"DROP SCHEMA {schema}_ledger_4; DROP SCHEMA {schema}_ledger_9x; DROP SCHEMA {schema}_"
            "ledger".encode()
        )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("g_ledger_4", True),
        ("g_events_1", True),
        ("g_ledger", False),
        ("g_ledger_4b", False),
        ("h_ledger_4", False),
        ("g_mine_4", False),
    ],
)
def test_may_be_version_recognizes_reserved_names(name: str, expected: bool) -> None:
    assert versions.may_be_version("g", name) is expected


async def test_tables_of_an_older_release_need_init(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """A worker of this release that is started before `grabstream init` waits for it, instead of ending with
    an unknown error.
    """
    table = f"{settings.schema_}.read_models"
    await connection.execute(f"ALTER TABLE {table} DROP COLUMN keeps_set_aside".encode())
    with pytest.raises(
        versions.NoReadModel, match="or read models of an older release: run `grabstream init`"
    ):
        await versions.use_read_model(connection, settings.schema_, "ledger")
    await connection.execute(
        f"ALTER TABLE {table} ADD COLUMN keeps_set_aside boolean NOT NULL DEFAULT false".encode()
    )
