"""Sums beyond 64 bits: amounts are bounded, their sums over all events are not. No read model stops, and sums
are printed as integers.

The test writes events with amounts that no command may have, so that a few events reach such sums.
"""

import asyncio
import json
import time
from typing import Any

import pytest

from grabstream.projections import versions
from grabstream.projections.reports import reports
from grabstream.settings import Settings
from grabstream.streams.projecting.projector import CatchUp
from grabstream.workshop.rehearsal.run import open_books
from tests.streams.projecting.sums import LARGE, adjusted
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    catching_up,
    granted,
    journal,  # noqa: F401 - a fixture
    open_tables,
    opened,
    rows,
    running,
    until_at_seq,
)
from tests.support.verifier_passes import verifying

SUM = 3 * LARGE


def in_major_units(minor_units: int) -> str:
    """An amount as people read it, without the rounding of a float."""
    return f"{minor_units // 100:,}.{minor_units % 100:02}"


NUMERIC = "numeric(38,0)"


def refund_due(seq: int) -> bytes:
    return json.dumps(
        {"type": "payment.refund_due", "v": 1, "shard": SHARD, "seq": seq, "offer_seq": seq, "offer": "e",
        "at": seq, "command": f"p{seq}",
         "grab": "g2", "payment": f"p{seq}", "amount": LARGE, "asset": "CNY", "outcome": "not_held",
         "digest": "d"},
        separators=(",", ":"),
    ).encode()  # fmt: skip


LINES = [
    opened("e", 1),
    granted("e", 2),
    *map(adjusted, (3, 4, 5)),
    granted("e", 6),
    refund_due(7),
    refund_due(8),
]


@pytest.fixture
async def large(system: Settings, journal: JournalWriter) -> Settings:
    """A system whose books have sums beyond 64 bits: some events change existing rows, some are applied in
    one batch.
    """
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 3)
    await journal.block(LINES, 4, 4)
    await journal.block(LINES, 5, len(LINES))
    async with running(system) as projectors:
        for projector in projectors:
            await projector.put(journal.records[1])
        await until_at_seq(system, 3)
        for projector in projectors:
            await projector.put(CatchUp(SHARD))
        await until_at_seq(system, len(LINES))
    return system


async def test_read_models_hold_sums_beyond_64_bits(large: Settings) -> None:
    assert await rows(large, "SELECT posted FROM accounts WHERE account = 'wallet:u1'") == [(SUM,)]
    assert await rows(large, "SELECT posted FROM accounts WHERE account = 'external:bank'") == [(-SUM,)]
    assert await rows(large, "SELECT available, held FROM balances WHERE user_id = 'u1'") == [(SUM, 0)]
    # The grab of another user after it was applied too.
    assert await rows(large, "SELECT available, held FROM balances WHERE user_id = 'u6'") == [(10, 0)]
    assert not await rows(large, "SELECT * FROM stopped_shards")


async def test_one_batch_may_sum_beyond_64_bits(system: Settings, journal: JournalWriter) -> None:
    """The sum of one batch is beyond 64 bits, positive and negative."""
    await journal.marker(1, "a")
    await journal.block(LINES, 1, len(LINES))
    async with catching_up(system):
        await until_at_seq(system, len(LINES))
    assert await rows(
        system, "SELECT sum(posted) FROM accounts WHERE account IN ('wallet:u1', 'external:bank')"
    ) == [(0,)]


async def test_columns_of_unbounded_sums_are_numeric(system: Settings) -> None:
    """The columns of the ledger, the balances and the verifier. Amounts of one event, grab, offer or payment
    are bounded, and stay bigint. Reports add up on request, without a bound.
    """
    query = (
        "SELECT DISTINCT c.relname, a.attname FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = "
        "c.oid "
        f"WHERE starts_with(c.relnamespace::regnamespace::text, '{system.schema_}') AND a.attnum > 0 "
        "AND format_type(a.atttypid, a.atttypmod) = '{}' AND c.relkind IN ('r', 'v')"
    )
    # There is no previous version: a system without events has only the current definitions.
    assert set(await rows(system, query.format(NUMERIC))) == {
        ("accounts_1", "posted"), ("accounts", "posted"), ("verified_accounts", "posted"),
        ("balances_1", "available"), ("balances_1", "held"), ("balances", "available"), ("balances", "held"),
    }  # fmt: skip
    unbounded = {relation for relation, _ in await rows(system, query.format("numeric"))}
    assert unbounded == {"flows", "revenue", "fairness", *reports()} - {"refusals_by_reason"}


@pytest.mark.long
async def test_a_rebuild_computes_the_same_sums_and_reports_them_as_integers(large: Settings) -> None:
    for name in ("ledger", "balances"):
        done = await asyncio.to_thread(grabstream, "rebuild", name, "--json", **env_of(large))
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(not table["rows_changed"] for table in json.loads(done.stdout)["difference"])
    async with await open_tables(large) as books:
        await books.execute("UPDATE accounts_1 SET posted = posted + 1 WHERE account = 'wallet:u1'")
    refused = await asyncio.to_thread(grabstream, "rebuild", "ledger", "--json", **env_of(large))
    assert refused.returncode == 1, refused.stderr
    [difference] = [table for table in json.loads(refused.stdout)["difference"] if table["rows_changed"]]
    assert difference["examples"] == [
        {"key": {"account": "wallet:u1", "asset": "CNY"}, "changed": {"posted": [SUM + 1, SUM]}}
    ]


@pytest.mark.long
async def test_commands_show_large_sums_as_integers_and_verify_compares_them(large: Settings) -> None:
    """`--json` has integers, and the tables show all digits."""
    words = ("at", str(int(time.time() * 1000)), "--source", "audit")
    shown_at = json.loads((await asyncio.to_thread(grabstream, *words, "--json", **env_of(large))).stdout)
    balances = shown_at["balances"]
    assert {row["user_id"]: row["available"] for row in balances} == {"u1": SUM, "u2": 10, "u6": 10}
    assert all(type(row[name]) is int for row in balances for name in ("available", "held"))
    assert in_major_units(SUM) in (await asyncio.to_thread(grabstream, *words, **env_of(large))).stdout
    shown = await asyncio.to_thread(grabstream, "show", "e", "--json", **env_of(large))
    [due] = json.loads(shown.stdout)["payments"]
    assert (due["amount"], type(due["amount"]), type(due["refunded"])) == (2 * LARGE, int, int)
    told = await asyncio.to_thread(grabstream, "show", "e", **env_of(large))
    assert f"{in_major_units(2 * LARGE)} CNY due for a refund" in told.stdout

    async def checks() -> dict[str, Any]:
        done = await asyncio.to_thread(grabstream, "verify", "--quick", "--json", **env_of(large))
        return {check["name"]: check for check in json.loads(done.stdout)}

    names = (
        "ledger = fold of the journal",
        "balances = fold of the journal",
        "no account below 0",
        "ledger and balances agree",
    )
    sound = await checks()
    assert all(sound[name]["passed"] and not sound[name]["notes"] for name in names), sound
    async with await open_tables(large) as books:
        await books.execute("UPDATE balances_1 SET available = available - 1 WHERE user_id = 'u1'")
    wrong = await checks()
    problems = " ".join(wrong["balances = fold of the journal"]["problems"])
    assert f"available is {SUM - 1}, the journal makes it {SUM}" in problems


@pytest.mark.long
async def test_the_verifier_compares_large_sums(large: Settings) -> None:
    async with verifying(large) as passes:
        assert await passes() == []
        assert await rows(large, "SELECT posted FROM verified_accounts WHERE account = 'wallet:u1'") == [
            (SUM,)
        ]
        async with await open_tables(large) as books:
            await books.execute("UPDATE accounts_1 SET posted = posted + 1 WHERE account = 'wallet:u1'")
        [finding] = await passes()
        assert f"has {SUM + 1}, its events lead to {SUM}" in finding.what


@pytest.mark.long
async def test_a_rebuild_resumes_a_ledger_that_a_former_definition_stopped(
    large: Settings, journal: JournalWriter
) -> None:
    """The state after an upgrade: a version of a former definition, whose sums were bigint, stopped, and no
    worker writes it any more.
    """
    async with await open_books(large) as books:
        live = await versions.in_state(books, large.schema_, "ledger", "live")
        assert live is not None
        table = f"{live.schema}.accounts_1"
        # Its columns and rows where it stopped: after the first large amount.
        await books.execute(f"DROP VIEW {large.schema_}.accounts, {live.schema}.accounts".encode())
        await books.execute(
            f"UPDATE {table} SET posted = sign(posted) * {LARGE} WHERE account IN ('wallet:u1', "
            "'external:bank')".encode()
        )
        for rows_of in ("transfers_1", "transfer_runs_1"):
            await books.execute(f"DELETE FROM {live.schema}.{rows_of} WHERE seq > 3".encode())
        await books.execute(
            f"DELETE FROM {table} WHERE account IN ('external:p7', 'external:p8', 'refund:p7', "
            "'refund:p8')".encode()
        )
        await books.execute(f"UPDATE {table} SET posted = 990 WHERE account = 'offer:e'".encode())
        await books.execute(f"DELETE FROM {table} WHERE account = 'wallet:u6'".encode())
        await books.execute(f"ALTER TABLE {table} ALTER COLUMN posted TYPE bigint".encode())
        for schema, source in ((live.schema, "accounts_1"), (large.schema_, f"{live.schema}.accounts")):
            await books.execute(f"SET search_path = {schema}".encode())
            await books.execute(
                f"CREATE VIEW accounts AS SELECT account, asset, posted FROM {source}".encode()
            )
        await books.execute(f"SET search_path = {large.schema_}".encode())
        await books.execute(
            "UPDATE read_models SET definition = 0 WHERE projection = 'ledger' AND state = 'live'"
        )
        first = journal.records[1]
        [head] = [bytes.fromhex(value.decode()) for name, value in first.headers if name == "head"]
        await books.execute(
            f"UPDATE {live.schema}.projection_cursors SET seq = 3, head = %s, next_offset = %s WHERE shard = "
            "%s".encode(),
            (head, first.offset + 1, SHARD),
        )
        await books.execute(
            f"INSERT INTO {live.schema}.stopped_shards VALUES ('ledger', {SHARD}, 3, {first.offset + 1}, "
            "'bigint out of range')".encode()
        )
        await books.execute(b"GRANT SELECT ON accounts TO PUBLIC")
    done = await asyncio.to_thread(grabstream, "rebuild", "ledger", "--json", **env_of(large))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["before"]["definition"], result["new"]["definition"]) == (0, 1)
    assert not any(
        table["rows_changed"] or table["missing"] or table["extra"] for table in result["difference"]
    )
    await until_at_seq(large, len(LINES), "ledger")
    assert await rows(large, "SELECT posted FROM accounts WHERE account = 'wallet:u1'") == [(SUM,)]
    assert await rows(large, "SELECT pg_typeof(posted)::text FROM accounts LIMIT 1") == [("numeric",)]
    assert await rows(large, "SELECT has_table_privilege('public', 'accounts', 'SELECT')") == [(True,)]
    assert not await rows(large, "SELECT * FROM stopped_shards")
    async with running(large, "ledger") as [ledger]:
        lines = [*LINES, adjusted(9)]
        await journal.block(lines, 9, 9)
        await ledger.put(journal.records[-1])
        await until_at_seq(large, 9, "ledger")
    assert await rows(large, "SELECT posted FROM accounts WHERE account = 'wallet:u1'") == [(SUM + LARGE,)]
