"""Cursors whose rows another program has damaged: only their shard waits, and the reason is recorded."""

import pytest
from psycopg import sql

from grabstream.models.journal import Cursor
from grabstream.projections import cursors
from grabstream.projections.versions import use_read_model
from grabstream.settings import Settings
from grabstream.streams.projecting.projector import CatchUp
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    journal,  # noqa: F401 - a fixture
    open_tables,
    opened,
    running,
    until_at_seq,
)


async def _stop_of(settings: Settings, name: str) -> str:
    async with await open_books(settings) as books:
        return next((stop.reason for stop in await cursors.stops(books) if stop.projection == name), "")


@pytest.mark.parametrize(
    ("next_offset", "reason"),
    [(9_999_999, "9999999, but the journal ends at 2"), (-5, "its cursor is at journal offset -5")],
)
async def test_a_cursor_outside_of_the_journal_stops_its_shard(
    system: Settings,
    journal: JournalWriter,
    next_offset: int,
    reason: str,
) -> None:
    await journal.marker(1, "a")
    await journal.block([opened("o", 1)], 1, 1)
    async with await open_tables(system) as tables:
        await use_read_model(tables, system.schema_, "ledger")
        await tables.execute(
            "UPDATE projection_cursors SET next_offset = %s WHERE projection = 'ledger' AND shard = %s",
            (next_offset, SHARD),
        )
    async with running(system, "ledger") as [projector]:
        for record in journal.records:
            await projector.put(record)
        await until(lambda: _stop_of(system, "ledger"), 20, "the stop")
        assert reason in await _stop_of(system, "ledger")


async def test_records_that_come_again_do_not_stop_a_shard(
    system: Settings,
    journal: JournalWriter,
) -> None:
    await journal.marker(1, "a")
    await journal.block([opened("o", 1)], 1, 1)
    async with running(system, "ledger") as [projector]:
        for record in [*journal.records, *journal.records, *journal.records]:
            await projector.put(record)
        await until_at_seq(system, 1, "ledger")
        for item in (*journal.records, CatchUp(SHARD)):
            await projector.put(item)
        lines = [opened("o", 1), opened("p", 2)]
        await journal.block(lines, 2, 2)
        await projector.put(journal.records[-1])
        await until_at_seq(system, 2, "ledger")
        assert await _stop_of(system, "ledger") == ""


async def test_a_shard_without_a_cursor_stops_no_other_shard(
    system: Settings,
    journal: JournalWriter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await journal.marker(1, "a")
    await journal.block([opened("o", 1)], 1, 1)
    lost = SHARD - 1
    async with await open_tables(system) as tables:
        await use_read_model(tables, system.schema_, "ledger")
        await tables.execute(
            "DELETE FROM projection_cursors WHERE projection = 'ledger' AND shard = %s", (lost,)
        )
        async with running(system, "ledger") as [projector]:
            for shard in (lost, SHARD):
                await projector.put(CatchUp(shard))
            await until_at_seq(system, 1, "ledger")
            await until(lambda: projector.waits_for, 20, "the reason")
            assert f"no cursor of shard {lost}" in projector.waits_for
            waits = [record for record in caplog.records if "waits: " in record.message]
            assert len(waits) == 1
            columns = sql.SQL("projection, shard, seq, head, next_offset, term, owner, frozen")
            await tables.execute(
                sql.SQL(
                    "INSERT INTO projection_cursors ({0}) SELECT projection, %s, 0, %s, 0, 0, '', frozen "
                    "FROM projection_cursors WHERE projection = 'ledger' LIMIT 1"
                ).format(columns),
                (lost, Cursor().head),
            )
            await until(lambda: not projector.waits_for, 20, "the end of the wait")
