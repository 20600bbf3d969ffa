"""Migrations of the schema of a system, and versions of read models: they are made, shown, written, kept and
dropped.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection
from psycopg.errors import DivisionByZero

from grabstream.projections import versions
from grabstream.projections.database import migrate as migrate_module
from grabstream.projections.database.grants import Grant, give, grants_of
from grabstream.projections.database.migrate import (
    EarlierForm,
    drop_statement,
    migrate,
    missing_migrations,
    use_schema,
)
from grabstream.projections.definitions import PROJECTIONS, BadDefinition, definition_of, parse
from grabstream.settings import Settings

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


async def test_the_statement_that_removes_a_schema_holds_for_reserved_words(settings: Settings) -> None:
    async with await AsyncConnection.connect(settings.postgres) as connection:
        await connection.execute('CREATE SCHEMA "analyse"')
        await connection.execute(drop_statement("analyse").encode())
        known = await connection.execute("SELECT FROM pg_namespace WHERE nspname = 'analyse'")
        assert known.rowcount == 0
        await connection.rollback()


async def test_a_version_that_is_shown_gets_the_grants_of_the_one_before(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """Otherwise workers with the least rights could not write it, until somebody grants them again."""
    main = settings.schema_
    await connection.execute(f'ALTER TABLE {main}_ledger_1.accounts_1 ADD COLUMN "their own" text'.encode())
    for what in (
        "USAGE ON SCHEMA {}", "SELECT, INSERT ON {}.transfers_1", "SELECT ON {}.projection_cursors",
        'SELECT (asset, "their own"), UPDATE (asset) ON {}.accounts_1',
    ):  # fmt: skip
        await connection.execute(f"GRANT {what.format(f'{main}_ledger_1')} TO PUBLIC".encode())
    async with connection.transaction():
        made = await versions.create(connection, main, "ledger", settings.shards)
        await versions.complete(connection, "ledger")
        await versions.switch_views(connection, main, made)
    rights = [
        f"has_schema_privilege('public', '{made.schema}', 'USAGE')",
        *(f"has_table_privilege('public', '{made.schema}.{table}', '{right}')"
          for table, right in (("transfers_1", "SELECT"), ("transfers_1", "INSERT"),
                               ("projection_cursors", "SELECT"), ("transfers_1", "UPDATE"),
                               ("accounts_1", "SELECT"))),
        *(f"has_column_privilege('public', '{made.schema}.accounts_1', '{column}', '{right}')"
          for column, right in (("asset", "SELECT"), ("asset", "UPDATE"), ("posted", "SELECT"))),
    ]  # fmt: skip
    found = await connection.execute(f"SELECT {', '.join(rights)}".encode())
    assert await found.fetchone() == (True, True, True, True, False, False, True, True, False)


async def test_grants_on_columns_of_a_view_are_given_to_its_successor(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """Except for columns that it no longer has."""
    main = settings.schema_
    await use_schema(connection, main)
    for statement in (
        'CREATE VIEW mine AS SELECT 1 AS "The sum", 2 AS gone, 3 AS secret',
        'GRANT SELECT ("The sum", gone) ON mine TO pg_monitor WITH GRANT OPTION',
        "GRANT INSERT ON mine TO PUBLIC",
    ):
        await connection.execute(statement.encode())
    granted = await grants_of(connection, main, "mine")
    for statement in ("DROP VIEW mine", 'CREATE VIEW mine AS SELECT 3 AS secret, 1 AS "The sum"'):
        await connection.execute(statement.encode())
    await give(connection, main, "mine", granted)
    assert await grants_of(connection, main, "mine") == [
        Grant("PUBLIC", "INSERT", False),
        Grant("pg_monitor", "SELECT", True, "The sum"),
    ]


async def test_new_system_has_the_definitions_of_the_code_and_no_migration_writes_them_again(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """A version that a rebuild makes later has the same form."""
    for projection in PROJECTIONS:
        live = await versions.in_state(connection, settings.schema_, projection, "live")
        assert live is not None
        assert (live.version, live.definition) == (1, definition_of(projection).number)
        async with connection.transaction():
            made = await versions.create(connection, settings.schema_, projection, settings.shards)
            await versions.complete(connection, projection)
        first, rebuilt = await form(connection, live.schema), await form(connection, made.schema)
        assert len(rebuilt["columns"]) > 10
        tables = {*definition_of(projection).tables, "projection_cursors", "stopped_shards"}
        assert {row[0] for row in rebuilt["columns"]} >= tables
        assert first == rebuilt, projection
    compression = (
        "SELECT attcompression FROM pg_attribute WHERE attname = 'body' AND attrelid = "
        f"'{settings.schema_}_audit_1.audit_1'::regclass"
    )
    assert await fetch(connection, compression) == [("l",)]
    # The publisher's cursors are in its topic.
    shown = "SELECT DISTINCT projection FROM cursors ORDER BY 1"
    await connection.execute("SELECT set_config('search_path', %s, false)", (settings.schema_,))
    assert await fetch(connection, shown) == [(name,) for name in sorted(PROJECTIONS)]


#: What a later release might add to the schema of a system.
SECOND = """
CREATE TABLE notes (note text);
ALTER TABLE recoveries ADD COLUMN note text;
CREATE OR REPLACE VIEW demand AS
    SELECT offer, outcomes.name AS outcome, code, second, sum(refusals)::bigint AS refusals,
           to_timestamp(second) AS second_time, count(*) AS shards
    FROM demand_1 JOIN outcomes USING (code)
    GROUP BY offer, outcomes.name, code, second;
"""


async def test_a_second_migration_is_applied_once_and_keeps_rows_grants_and_dependent_views(
    connection: AsyncConnection[Any], settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    main = settings.schema_
    await use_schema(connection, main)
    await connection.execute("INSERT INTO demand_1 SELECT 3, 7, min(code), 'o', 5 FROM outcomes")
    await connection.execute(
        f"UPDATE {main}_ledger_1.projection_cursors SET seq = 17, next_offset = 4 WHERE shard = 3".encode()
    )
    await connection.execute(b"CREATE VIEW wanted AS SELECT offer, refusals FROM demand")
    await connection.execute(b"GRANT SELECT ON demand TO PUBLIC")
    [first] = migrate_module._migrations()
    second = tmp_path / "0002_notes.sql"
    second.write_text(SECOND)
    monkeypatch.setattr(migrate_module, "_migrations", lambda: [first, second])
    assert await missing_migrations(connection, main) == ["0002_notes.sql"]
    for applied in (["0002_notes.sql"], []):
        assert await migrate(connection, main, settings.shards) == applied
        assert await fetch(connection, "SELECT name FROM migrations ORDER BY name") == [
            ("0001_system.sql",), ("0002_notes.sql",),
        ]  # fmt: skip
    assert await missing_migrations(connection, main) == []
    assert await fetch(connection, "SELECT note FROM notes UNION SELECT note FROM recoveries") == []
    assert await fetch(connection, "SELECT refusals, shards FROM demand JOIN wanted USING (refusals)") == [
        (5, 1)
    ]
    assert await fetch(connection, "SELECT has_table_privilege('public', 'demand', 'SELECT')") == [(True,)]
    cursors = "SELECT projection, seq FROM cursors WHERE shard = 3 ORDER BY 1"
    assert await fetch(connection, cursors) == [("audit", 0), ("balances", 0), ("ledger", 17)]


async def test_a_migration_that_fails_changes_nothing(
    connection: AsyncConnection[Any], settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    second = tmp_path / "0002_wrong.sql"
    second.write_text("CREATE TABLE notes (note text); SELECT 1 / 0;")
    [first] = migrate_module._migrations()
    monkeypatch.setattr(migrate_module, "_migrations", lambda: [first, second])
    with pytest.raises(DivisionByZero):
        await migrate(connection, settings.schema_, settings.shards)
    monkeypatch.undo()
    assert await fetch(connection, f"SELECT to_regclass('{settings.schema_}.notes')::text") == [(None,)]
    assert await migrate(connection, settings.schema_, settings.shards) == []


async def test_tables_from_before_the_first_release_are_refused_and_left_as_they_are(
    settings: Settings,
) -> None:
    main = settings.schema_
    async with await AsyncConnection.connect(settings.postgres, autocommit=True) as connection:
        await connection.execute(
            f"CREATE SCHEMA {main} CREATE TABLE migrations (name text PRIMARY KEY, at timestamptz) "
            "CREATE TABLE outcomes (code integer PRIMARY KEY, name text)".encode()
        )
        names = "('0001_books.sql'), ('0002_pieces.sql')"
        await connection.execute(f"INSERT INTO {main}.migrations (name) VALUES {names}".encode())
        try:
            with pytest.raises(EarlierForm, match=rf"{main} has the tables .* \(0001_books.sql\)"):
                await migrate(connection, main, settings.shards)
            tables = "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relnamespace = {} ORDER BY 1"
            of_main = tables.format(f"'{main}'::regnamespace")
            assert await fetch(connection, of_main) == [("migrations",), ("outcomes",)]
            starting = f"SELECT count(*) FROM pg_namespace WHERE starts_with(nspname, '{main}')"
            assert await fetch(connection, starting) == [(1,)]
        finally:
            await connection.execute(f"DROP SCHEMA {main} CASCADE".encode())


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
            await versions.switch_views(connection, main, made)
    assert (await versions.in_state(connection, main, "ledger", "live")).version == 1  # type: ignore[union-attr]
    await connection.execute(b"DROP VIEW rich")
    async with connection.transaction():
        await versions.switch_views(connection, main, made)
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
    assert await versions.use_read_model(connection, main, "ledger") == f"{main}_ledger_1"
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
                await versions.switch_views(other, main, made["ledger"], keep=False)

        async with connection.transaction():
            await versions.switch_views(connection, main, made["audit"], keep=False)
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


async def test_init_keeps_a_view_with_dependent_views_and_logs_it(
    connection: AsyncConnection[Any],
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also without events. `init` succeeds, and a later `init` renews the version after the views are
    dropped.
    """
    main, ledger = settings.schema_, definition_of("ledger")
    views = ledger.parts["views"].replace("account, asset, posted FROM", "asset, account, posted FROM")
    later = ledger._replace(number=9, parts={**ledger.parts, "views": views})
    monkeypatch.setattr(
        versions,
        "definition_of",
        lambda projection: later if projection == "ledger" else definition_of(projection),
    )
    await use_schema(connection, main)
    await connection.execute(b"CREATE VIEW has AS SELECT * FROM accounts")
    for number in (1, 2):
        await migrate(connection, main, settings.shards)
        live = await versions.in_state(connection, main, "ledger", "live")
        assert live is not None
        assert live.definition == (ledger.number if number == 1 else 9)
        assert ("view has depends on view" in caplog.text) is (number == 1)
        await connection.execute(b"DROP VIEW IF EXISTS has")
        caplog.clear()


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
    await connection.execute(f"ALTER TABLE {table} DROP COLUMN skips_set_aside".encode())
    with pytest.raises(
        versions.NoReadModel, match="or read models of an older release: run `grabstream init`"
    ):
        await versions.use_read_model(connection, settings.schema_, "ledger")
    await connection.execute(
        f"ALTER TABLE {table} ADD COLUMN skips_set_aside boolean NOT NULL DEFAULT false".encode()
    )
