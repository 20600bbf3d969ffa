"""The function `seqs_between` finds the events of a range of time by the keys of the audit trail alone."""

import re
from datetime import UTC, datetime
from itertools import product
from typing import Any

from psycopg import AsyncConnection

from grabstream.models.runs import decode_line
from grabstream.settings import Settings
from grabstream.workshop.services.servers import PROJECT
from tests.projections.test_reports import fill
from tests.support.projecting import SHARD
from tests.support.random_history import NOW, random_history
from tests.support.runs import as_runs

SEQS = "SELECT * FROM seqs_between(%s, %s)"
ALL_TRANSFERS = "SELECT * FROM transfers ORDER BY at, shard, seq, leg"
#: The place of `at` among the columns of `transfers`.
AT = 8
#: The questions of docs/storage.md, for any times.
LINES, TRANSFERS = (
    re.sub(r"seqs_between\(.*?\)", "seqs_between(%s, %s)", question)
    for question in re.findall(
        r"^SELECT \w+\.\* FROM seqs_between.*?;",
        (PROJECT / "docs" / "storage.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


def time_of(at: int | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at / 1000, UTC)


async def test_events_of_a_time_are_those_that_the_texts_have(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    texts = as_runs(random_history(3, 300, NOW).lines)
    lines = list(map(decode_line, texts))
    await fill(connection, settings.schema_, texts)
    times = sorted({line.at for line in lines})
    some = [None, times[0] - 1, *times[:: len(times) // 6], times[-1], times[-1] + 1]
    transfers = await (await connection.execute(ALL_TRANSFERS)).fetchall()
    seen = set()
    for since, until in product(some, some):
        bounds = (time_of(since), time_of(until))

        def is_wanted(at: int, since: int | None = since, until: int | None = until) -> bool:
            return (since is None or at >= since) and (until is None or at < until)

        expected = [line for line in lines if is_wanted(line.at)]
        found = await (await connection.execute(LINES, bounds)).fetchall()
        assert [seq for _, seq, *_ in found] == [line.seq for line in expected], bounds
        found = await (await connection.execute(SEQS, bounds)).fetchall()
        assert found == ([(SHARD, expected[0].seq, expected[-1].last_seq)] if expected else [])
        found = await (await connection.execute(TRANSFERS, bounds)).fetchall()
        assert found == [row for row in transfers if is_wanted(row[AT])]
        seen.add(len(expected))
    assert {0, len(lines)} < seen


async def test_a_line_that_was_set_aside_is_passed_over(
    connection: AsyncConnection[Any], settings: Settings
) -> None:
    texts = as_runs(random_history(3, 60, NOW).lines)
    lines = list(map(decode_line, texts))
    await fill(connection, settings.schema_, texts)
    home = await connection.execute("SELECT schema FROM read_models WHERE projection = 'audit'")
    [(schema,)] = await home.fetchall()
    gone = len(lines) // 2
    aside = [line.seq for line in lines[gone : gone + 3]]
    await connection.execute(f"DELETE FROM {schema}.audit_1 WHERE seq = ANY(%s)".encode(), (aside,))
    for line in lines:
        rows = await connection.execute(LINES, (time_of(line.at), None))
        expected = [one.seq for one in lines if one.at >= line.at and one.seq not in aside]
        assert [seq for _, seq, *_ in await rows.fetchall()] == expected


async def test_the_search_reads_no_table(connection: AsyncConnection[Any], settings: Settings) -> None:
    """A B-tree on the time would cost each grab more than a search by seq takes."""
    await fill(connection, settings.schema_, as_runs(random_history(3, 300, NOW).lines))
    await connection.execute("ANALYZE")
    async with connection.transaction():
        # A table of this size is read as quickly as its index; here, that it can be found by its key.
        await connection.execute("SET LOCAL enable_seqscan = off")
        # Scans of earlier transactions are among these until PostgreSQL has reported them.
        before = await _scans(connection, settings)
        for question in (LINES, TRANSFERS):
            await connection.execute(question, (time_of(NOW), time_of(NOW + 1_000)))
        after = await _scans(connection, settings)
    assert before.keys() == after.keys() == {"audit_1", "transfer_runs_1", "transfers_1"}
    for table, (of_table, of_index) in after.items():
        assert (of_table - before[table][0], of_index > before[table][1]) == (0, True), table


async def _scans(connection: AsyncConnection[Any], settings: Settings) -> dict[str, tuple[int, int]]:
    rows = await connection.execute(
        "SELECT relname, seq_scan, coalesce(idx_scan, 0) FROM pg_stat_xact_user_tables "
        "WHERE relname = ANY(%s) AND schemaname LIKE %s",
        (["audit_1", "transfers_1", "transfer_runs_1"], settings.schema_ + "%"),
    )
    return {table: (of_table, of_index) for table, of_table, of_index in await rows.fetchall()}
