"""The views of a system explain themselves, have times as timestamptz, and refuse writes: in a new system, in
one of an older release, and after a switch.
"""

from typing import Any

import pytest
from psycopg import AsyncConnection, sql
from psycopg.errors import InsufficientPrivilege, ObjectNotInPrerequisiteState

from grabstream.projections import reports, versions
from grabstream.projections.database.migrate import migrate, use_schema
from grabstream.projections.definitions.dictionary import VIEWS, integer_of
from grabstream.settings import Settings, load_settings
from tests.conftest import as_role

_COLUMNS = (
    "SELECT c.relname, a.attname, replace(format_type(a.atttypid, NULL), 'timestamp with time zone', "
    "'timestamptz'), col_description(c.oid, a.attnum), "
    "obj_description(c.oid, 'pg_class') FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid "
    "WHERE c.relnamespace = %s::regnamespace AND c.relkind = 'v' AND a.attnum > 0 ORDER BY 1, a.attnum"
)


async def described(connection: AsyncConnection[Any], schema: str) -> dict[str, list[tuple[Any, ...]]]:
    """By view: its columns as (name, type, comment, comment of the view)."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for view, *column in await (await connection.execute(_COLUMNS, (schema,))).fetchall():
        found.setdefault(view, []).append(tuple(column))
    return found


def dictionary() -> dict[str, list[tuple[Any, ...]]]:
    return {
        name: [(column, text.type, text.comment, view.comment) for column, text in view.columns.items()]
        for name, view in VIEWS.items()
    }


async def test_every_view_and_column_is_commented_as_the_dictionary_says(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """Also after a read model is switched."""
    assert await described(connection, settings.schema_) == dictionary()
    async with connection.transaction():
        made = await versions.create(connection, settings.schema_, "ledger", settings.shards)
        await versions.complete(connection, "ledger")
        await versions.switch_views(connection, settings.schema_, made)
    assert await described(connection, settings.schema_) == dictionary()


def test_every_integer_time_has_a_timestamptz_beside_it() -> None:
    for name, view in VIEWS.items():
        integers = {
            column for column, text in view.columns.items()
            if text.type == "bigint" and (column in ("at", "second") or column.endswith("_at"))
        }  # fmt: skip
        times = {
            integer_of(column) for column in view.columns
            if column.endswith("_time") and view.source != "report"
        }  # fmt: skip
        assert integers == times, name


async def test_times_are_those_of_the_integers_and_never_is_null(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    live = await versions.in_state(connection, settings.schema_, "balances", "live")
    assert live is not None
    await connection.execute(
        f"INSERT INTO {live.schema}.offers_1 (offer, shard, kind, issuer, asset, total, "
        "units, title, state, opened_at, opens_at, closes_at, units_left, terms, opened_seq) VALUES ('c:o', "
        "0, "
        "'stock', 'i', 'sku:o', 9, 9, '', 'open', 1795344321779, 1795344321000, 4102444800000, 9, "
        """'{"timezone": "Asia/Shanghai"}', 1)""".encode()
    )
    await use_schema(connection, settings.schema_)
    shown = await connection.execute(
        "SELECT opened_time = '2026-11-22T10:45:21.779Z', opens_time = '2026-11-22T18:45:21+08', "
        "closes_time, closed_time, campaign, campaign_timezone, given_amount, given_units FROM offers"
    )
    assert await shown.fetchall() == [(True, True, None, None, "c", "Asia/Shanghai", None, 0)]


async def test_views_of_an_older_release_are_renewed_in_place(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """Without a rebuild; rows, grants and views of other programs stay. A second call changes nothing."""
    main = settings.schema_
    live = await versions.in_state(connection, main, "balances", "live")
    assert live is not None
    columns = "payment, offer, grab, amount, currency, state, outcome, refunded, shard, seq, at"
    await connection.execute(
        f"DROP VIEW {live.schema}.payments CASCADE; "
        f"CREATE VIEW {live.schema}.payments AS SELECT {columns} FROM {live.schema}.payments_1; "
        f"CREATE VIEW {main}.payments AS SELECT {columns} FROM {live.schema}.payments; "
        f"CREATE VIEW {main}.mine AS SELECT payment, amount FROM {main}.payments; "
        f"GRANT SELECT ON {main}.payments TO PUBLIC; DELETE FROM {main}.view_texts; "
        f"INSERT INTO {live.schema}.payments_1 VALUES ('c', 'p', 'c:o', 'g', 5, 'CNY', 'served', "
        "'confirmed', 0, 0, 7, 1795344321779)".encode()
    )
    for _ in range(2):
        assert await migrate(connection, main, settings.shards) == []
        found = await described(connection, main)
        assert found.pop("mine")
        assert found == dictionary()
        rows = await connection.execute(
            "SELECT payment, amount, at_time = '2026-11-22T10:45:21.779Z', has_table_privilege('public', "
            "'payments', 'SELECT') FROM payments JOIN mine USING (payment, amount)"
        )
        assert await rows.fetchall() == [("p", 5, True, True)]
    [again] = await (await connection.execute("SELECT xmin::text FROM view_texts WHERE schema = %s", (main,))
    ).fetchone() or [None]  # fmt: skip
    await migrate(connection, main, settings.shards)
    assert await (
        await connection.execute("SELECT xmin::text FROM view_texts WHERE schema = %s", (main,))
    ).fetchone() == (again,)


async def test_grants_on_reports_stay_when_a_view_that_they_read_gets_other_columns(
    connection: AsyncConnection[Any], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, ledger = settings.schema_, versions.definition_of("ledger")
    changed = ledger.parts["views"].replace(
        "SELECT offer, asset, debit_kind, credit_kind, sum(transfers)",
        "SELECT asset, offer, debit_kind, credit_kind, sum(transfers)",
    )
    other = ledger._replace(number=9, parts={**ledger.parts, "views": changed})
    assert changed != ledger.parts["views"]
    monkeypatch.setattr(
        versions, "definition_of", lambda name: other if name == "ledger" else versions_definition(name)
    )
    await use_schema(connection, main)
    await connection.execute(b"GRANT SELECT ON funnel TO PUBLIC")
    async with connection.transaction():
        made = await versions.create(connection, main, "ledger", settings.shards)
        await versions.complete(connection, "ledger")
        await versions.switch_views(connection, main, made)
    await use_schema(connection, main)
    assert await (
        await connection.execute(
            "SELECT has_table_privilege('public', 'funnel', 'SELECT'), has_table_privilege('public', "
            "'results_by_week', 'SELECT')"
        )
    ).fetchone() == (True, False)
    await connection.execute(b"SELECT * FROM funnel")


versions_definition = versions.definition_of


def writes_of(name: sql.Identifier, view: str) -> list[sql.Composed]:
    column = sql.Identifier(next(iter(VIEWS[view].columns)))
    return [
        sql.SQL("INSERT INTO {} DEFAULT VALUES").format(name),
        sql.SQL("UPDATE {} SET {} = {}").format(name, column, column),
        sql.SQL("DELETE FROM {}").format(name),
    ]


async def test_no_view_can_be_written_through(connection: AsyncConnection[Any], settings: Settings) -> None:
    """By its owner; also if no row matches."""
    for view in VIEWS:
        for write in writes_of(sql.Identifier(settings.schema_, view), view):
            with pytest.raises(ObjectNotInPrerequisiteState, match="read-only"):
                await connection.execute(write)
                pytest.fail(f"{view} was written")


async def test_a_reader_reads_every_view_and_writes_none(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    """The role of docs/operating.md. A right to write, given by mistake, does not help."""
    admin, role = load_settings().postgres, f"{settings.schema_}_reader"
    postgres = await as_role(admin, "reader", role, settings.schema_)
    try:
        async with await AsyncConnection.connect(postgres, autocommit=True) as reader:
            await use_schema(reader, settings.schema_)
            for view in VIEWS:
                await reader.execute(sql.SQL("SELECT * FROM {}").format(sql.Identifier(view)))
                for write in writes_of(sql.Identifier(view), view):
                    with pytest.raises(InsufficientPrivilege):
                        await reader.execute(write)
            await reader.execute("SELECT * FROM user_transfers('ann')")
            await reader.execute("SELECT * FROM seqs_between(NULL, now())")
            await connection.execute(
                f"GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {settings.schema_} TO {role}".encode()
            )
            for view in VIEWS:
                for write in writes_of(sql.Identifier(view), view):
                    with pytest.raises(ObjectNotInPrerequisiteState):
                        await reader.execute(write)
    finally:
        async with await AsyncConnection.connect(admin, autocommit=True) as connection:
            await connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
            await connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


async def test_reports_with_other_columns_are_created_again_unless_views_depend_on_them(
    connection: AsyncConnection[Any],
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    main, present = settings.schema_, reports.reports()
    other = present | {
        "refusals_by_reason": present["refusals_by_reason"].replace(
            "SELECT offer, outcome,", "SELECT outcome, offer,"
        )
    }
    monkeypatch.setattr(reports, "reports", lambda: other)
    await use_schema(connection, main)
    await connection.execute(b"GRANT SELECT ON refusals_by_reason TO PUBLIC")
    await migrate(connection, main, settings.shards)
    first = "SELECT attname FROM pg_attribute WHERE attrelid = 'refusals_by_reason'::regclass AND attnum = 1"
    assert await (await connection.execute(first)).fetchone() == ("outcome",)
    await connection.execute(b"CREATE VIEW mine AS SELECT outcome FROM refusals_by_reason")
    monkeypatch.undo()
    for name in ("outcome", "offer"):
        caplog.clear()
        assert await migrate(connection, main, settings.shards) == []
        assert ("view mine depends on view refusals_by_reason" in caplog.text) is (name == "outcome")
        assert await (await connection.execute(first)).fetchone() == (name,)
        await connection.execute(b"DROP VIEW IF EXISTS mine")
    assert await described(connection, main) == dictionary()
    granted = "SELECT has_table_privilege('public', 'refusals_by_reason', 'SELECT')"
    assert await (await connection.execute(granted)).fetchone() == (True,)
