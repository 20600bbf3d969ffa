"""Queries by key are answered from indexes alone, and what is written is found by them: no plan scans a table
that grows with grabs.

The tables have enough rows that the planner scans a table whose index is missing.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from psycopg import AsyncConnection

from grabstream.projections.database.merging import plan_by_keys
from grabstream.projections.read_models import READ_MODELS
from grabstream.projections.versions import create_flat
from grabstream.settings import Settings
from tests.projections.test_columns import facts, in_groups
from tests.support.random_history import random_history
from tests.support.runs import as_runs

GRABS = 60_000
#: Grabs of one run, of one user, and offers.
RUN, OF_USER, OFFERS = 20, 10, 100

#: Grabs number 1 to GRABS, each of another seq, in runs; every offer has its grabs one after the other, and
#: every user has one in each tenth of them. Each grab is paid: a row of `transfers_1`, and a line.
_ROWS = f"""
CREATE TEMPORARY TABLE made ON COMMIT DROP AS
    SELECT n AS seq, 'offer-' || (n - 1) * {OFFERS} / {GRABS} AS offer, 'grab-' || md5(n::text) AS grab,
           'user-' || n % ({GRABS} / {OF_USER}) AS user_id,
           1 + (n - 1) % ({GRABS} / {OFFERS}) AS place, 1800000000000 + n AS at
    FROM generate_series(1, {GRABS}) AS n;
INSERT INTO grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at)
    SELECT offer, grab, user_id, 'granted', 1, 1, 'sku:pen', place, 0, seq, at FROM made;
INSERT INTO offers_1 (offer, shard, kind, issuer, asset, total, units, title, state, opened_at, opens_at,
        closes_at, units_left, terms, opened_seq)
    SELECT DISTINCT offer, 0, 'stock', 'i', 'sku:pen', 600, 600, '', 'open', 1, 1, 2, 0, '{{}}'::jsonb, 1
    FROM made;
INSERT INTO payments_1
    SELECT offer, 'pay-' || seq, offer, grab, 5, 'CNY', 'served', 'confirmed', 0, 0, {GRABS} + seq, at
    FROM made;
INSERT INTO balances_1 (user_id, asset, available) SELECT user_id, 'sku:pen', count(*) FROM made GROUP BY 1;
INSERT INTO accounts_1 SELECT 'wallet:' || user_id, 'sku:pen', count(*) FROM made GROUP BY 1;
INSERT INTO accounts_1 SELECT 'hold:' || user_id, 'sku:pen', 0 FROM made GROUP BY 1;
INSERT INTO transfer_runs_1
    SELECT 0, min(seq), offer, 'sku:pen', 'offer:' || offer, 'hold:', array_agg(user_id ORDER BY seq),
           array_agg(1::bigint), min(at)
    FROM made GROUP BY offer, (seq - 1) / {RUN};
INSERT INTO transfers_1
    SELECT 0, {GRABS} + seq, 0, offer, 'sku:pen', 'hold:' || user_id, 'wallet:' || user_id, 1, at FROM made;
INSERT INTO audit_1
    SELECT 0, min(seq), offer, 'grab.held', min(at), translate(json_build_object(
               'type', 'grab.held', 'v', 2, 'shard', 0, 'seq', min(seq), 'offer', offer,
               'grabs', array_agg(grab ORDER BY seq), 'users', array_agg(user_id ORDER BY seq)
           )::text, ' ', ''), '\\x00', count(*)
    FROM made GROUP BY offer, (seq - 1) / {RUN};
INSERT INTO audit_1
    SELECT 0, {GRABS} + seq, offer, 'grab.confirmed', at, '{{"type":"grab.confirmed","v":1}}', '\\x00', 1
    FROM made
"""
#: The tables that grow with grabs.
_TABLES = (
    "grabs_1", "balances_1", "accounts_1", "transfer_runs_1", "transfers_1", "audit_1", "payments_1"
)  # fmt: skip

_LATEST = "ORDER BY at DESC, seq DESC LIMIT 20"
#: A question, its query, and how many rows it returns.
QUERIES = {
    "balance of a user": ("SELECT * FROM balances WHERE user_id = 'user-17'", 1),
    "accounts of a user": ("SELECT * FROM accounts WHERE account IN ('wallet:user-17', 'hold:user-17')", 2),
    "grabs of a user": ("SELECT * FROM grabs WHERE user_id = 'user-17'", OF_USER),
    "latest grabs of a user": (f"SELECT * FROM grabs WHERE user_id = 'user-17' {_LATEST}", OF_USER),
    "flow of a user": ("SELECT * FROM user_transfers('user-17')", 2 * OF_USER),
    "latest flow of a user": (f"SELECT * FROM user_transfers('user-17') {_LATEST}", 2 * OF_USER),
    "one grab": ("SELECT * FROM grabs WHERE offer = 'offer-3' AND grab = 'grab-' || md5('2000')", 1),
    "first grabs of an offer": ("SELECT * FROM grabs WHERE offer = 'offer-3' ORDER BY place LIMIT 20", 20),
    "grabs of an offer by place": (
        "SELECT * FROM grabs WHERE offer = 'offer-3' AND place BETWEEN 101 AND 110 ORDER BY place", 10
    ),
    "transfers of a seq": (
        "SELECT * FROM transfers WHERE shard = 0 AND seq = 5007 AND line_seq BETWEEN 5007 - 999 AND 5007", 1
    ),
    "audit of a seq": (f"SELECT * FROM audit WHERE shard = 0 AND seq = {GRABS} + 5007", 1),
    "line of a seq within a run": (
        "SELECT * FROM audit WHERE shard = 0 AND seq <= 5007 ORDER BY seq DESC LIMIT 1", 1
    ),
    "lines of an offer": ("SELECT * FROM audit WHERE offer = 'offer-3'", GRABS // OFFERS // RUN * (1 + RUN)),
    "result of an offer": ("SELECT * FROM results_by_week WHERE offer = 'offer-3'", 1),
    "events of an offer": ("SELECT * FROM events WHERE offer = 'offer-3'", GRABS // OFFERS * 2),
}  # fmt: skip


#: An index, and the questions whose plans scan a table when the index is missing.
INDEXES = {
    "balances_1_pkey": {"balance of a user"},
    "accounts_1_pkey": {"accounts of a user"},
    "grabs_1_user": {"grabs of a user", "latest grabs of a user", "flow of a user", "latest flow of a user"},
    "grabs_1_pkey": {
        "one grab", "first grabs of an offer", "grabs of an offer by place", "result of an offer"
    },
    "payments_1_pkey": {"result of an offer"},
    "transfers_1_user": {"flow of a user", "latest flow of a user"},
    "transfers_1_other_user": {"flow of a user", "latest flow of a user"},
    "transfer_runs_1_pkey": {"flow of a user", "latest flow of a user", "transfers of a seq"},
    "transfers_1_pkey": {"transfers of a seq"},
    "audit_1_pkey": {"audit of a seq", "line of a seq within a run"},
    "audit_1_offer": {"lines of an offer", "events of an offer", "result of an offer"},
}  # fmt: skip


@pytest.fixture
async def books(settings: Settings) -> AsyncIterator[AsyncConnection[Any]]:
    async with await AsyncConnection.connect(settings.postgres) as connection:
        # Nothing is committed: the tables, and their indexes, go with the transaction.
        await create_flat(connection, settings.schema_, 1)
        await connection.execute(_ROWS.encode())
        await connection.execute(f"ANALYZE {', '.join(_TABLES)}".encode())
        yield connection
        await connection.rollback()


@pytest.mark.long
async def test_questions_are_answered_from_indexes_alone(books: AsyncConnection[Any]) -> None:
    # ANALYZE does not count the users and amounts of runs: that takes as long as loading them.
    rows = await books.execute(
        "SELECT attname FROM pg_stats WHERE (schemaname, tablename) = (current_schema(), 'transfer_runs_1')"
    )
    columns = {column for (column,) in await rows.fetchall()}
    assert "offer" in columns
    assert columns.isdisjoint({"users", "amounts"})
    for question, (query, count) in QUERIES.items():
        assert len(await (await books.execute(query.encode())).fetchall()) == count, question
        assert await scans_of(books, question) == [], question
    # Without an index, the plan of each question that needs it has a scan: so a missing index is found.
    for index, questions in INDEXES.items():
        async with books.transaction(force_rollback=True):
            is_key = index.endswith("_pkey")
            drop = f"ALTER TABLE {index[:-5]} DROP CONSTRAINT" if is_key else "DROP INDEX"
            await books.execute(f"{drop} {index}".encode())
            assert {question for question in QUERIES if await scans_of(books, question)} == questions, index
    assert set(QUERIES) == set().union(*INDEXES.values())


async def scans_of(books: AsyncConnection[Any], question: str) -> list[Any]:
    """The steps of the plan of a question that read all of a table that grows with grabs, or of its index."""
    [(plan,)] = await (
        await books.execute(b"EXPLAIN (FORMAT JSON) " + QUERIES[question][0].encode())
    ).fetchall()
    return [
        step
        for step in steps_of(plan[0]["Plan"])
        if step.get("Relation Name", step.get("Index Name", "")).startswith(_TABLES)
        and step["Node Type"] != "Bitmap Heap Scan"
        and "Index Cond" not in step
    ]


def steps_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for step in plan.get("Plans", ()):
        yield from steps_of(step)


@pytest.mark.long
async def test_writers_find_rows_by_keys_also_when_tables_were_empty_at_first(settings: Settings) -> None:
    """A plan is made while tables are empty, and kept while they grow: it must not scan them even then."""
    history = random_history(7, 300)
    groups = in_groups(facts(as_runs(history.lines)), [3])
    assert len(groups) > 50

    async def scans(connection: AsyncConnection[Any]) -> dict[str, int]:
        rows = await connection.execute(
            "SELECT relname, seq_scan FROM pg_stat_xact_user_tables WHERE schemaname = %s",
            (settings.schema_,),
        )
        return dict(await rows.fetchall())

    async def scanned(by_keys: bool) -> set[str]:
        async with await AsyncConnection.connect(settings.postgres) as connection:
            await create_flat(connection, settings.schema_, 1)
            before = await scans(connection)  # those of making the indexes
            if by_keys:
                await plan_by_keys(connection)
            for group in groups:
                for model in READ_MODELS.values():
                    await model.apply(connection, group)
            after = await scans(connection)
            await connection.rollback()
            return {table for table, count in after.items() if count > before[table]}

    assert await scanned(by_keys=True) == set()
    # Otherwise the planner scans: so a scan would be found.
    assert await scanned(by_keys=False) >= {"accounts_1", "balances_1"}
