"""Books, audit trail and published events of a journal with runs of grabs: they are those of the same grabs
journaled one by one.
"""

import random
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from grabstream import Point, read_events
from grabstream.models.calendar import DAY_MS
from grabstream.models.events import decode_event
from grabstream.models.journal import GENESIS, chain
from grabstream.models.runs import GrantedRun, HeldRun, decode_line, singles
from grabstream.settings import Settings
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.stage import take_down
from tests.conftest import make_system, until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import SHARD, catching_up, rows
from tests.support.random_history import NOW, History, journal_history, project, random_history
from tests.support.runs import as_runs

#: Each with the columns by which its rows are ordered.
TABLES = {
    "offers": "offer", "grabs": "offer, grab", "accounts": "account, asset", "transfers": "shard, seq, leg",
    "balances": "user_id, asset", "payments": "payment", "operations": "shard, seq",
    "waiting": "offer, position", "limits": "offer, by, per, scope, value", "events": "shard, seq",
}  # fmt: skip
STEPS = 1_500


class Both(NamedTuple):
    """A history, its lines with runs, and two systems: one has its events one by one, one has runs."""

    history: History
    lines: list[bytes]
    single: Settings
    runs: Settings


@pytest.fixture
async def both(system: Settings, prefix: str) -> AsyncIterator[Both]:
    # Kafka takes no record of the future.
    history = random_history(7, STEPS, NOW - 1_000 * DAY_MS)
    lines = as_runs(history.lines)
    other = system.model_copy(update={"prefix": prefix + "x", "schema_": prefix + "x"})
    await make_system(other)
    yield Both(history, lines, system, other)
    await take_down(other)


@pytest.mark.long
async def test_read_models_of_runs_are_those_of_single_events(both: Both) -> None:
    found = {type(decode_line(line)) for line in both.lines if len(singles(decode_line(line))) > 1}
    assert found == {GrantedRun, HeldRun}, "the history has no runs of several grabs"
    await project(both.single, both.history, random.Random(1))
    await project(both.runs, both.history, random.Random(2), both.lines)
    await _same_tables(both)
    # Built from the journal in bulk, not block by block.
    for name in ("ledger", "balances", "audit"):
        done = grabstream("rebuild", name, **env_of(both.runs))
        assert done.returncode == 0, done.stdout + done.stderr
    await _same_tables(both)


async def _same_tables(both: Both) -> None:
    for table, order in TABLES.items():
        columns = "*" if table != "transfers" else "shard, seq, leg, offer, asset, debit, credit, amount, at"
        query = f"SELECT {columns} FROM {table} ORDER BY {order}"
        assert await rows(both.runs, query) == await rows(both.single, query), table
    of_users = (
        "SELECT of_user.* FROM (SELECT DISTINCT user_id FROM grabs) AS users, user_transfers(user_id) AS "
        "of_user ORDER BY shard, seq, leg, user_id"
    )
    transfers = await rows(both.runs, of_users)
    assert len(transfers) > STEPS // 10
    assert transfers == await rows(both.single, of_users)
    events = await rows(both.runs, "SELECT body FROM events ORDER BY seq")
    assert [body.encode() for [body] in events] == both.history.lines
    trail = await rows(both.runs, "SELECT seq, seqs, body, hash FROM audit ORDER BY seq")
    assert [body.encode() for *_, body, _ in trail] == both.lines
    assert [bytes(hash_) for *_, hash_ in trail] == chain(GENESIS, both.lines)
    assert [seq + seqs - 1 for seq, seqs, *_ in trail] == [decode_line(line).last_seq for line in both.lines]


async def test_events_of_runs_are_published_and_read_as_single_events(both: Both) -> None:
    await journal_history(both.runs, both.lines, random.Random(3))
    topic = Topics(both.runs.prefix).events
    async with catching_up(both.runs, "events", "audit"), open_reader(both.runs.kafka, topic) as reader:
        await until(lambda: _has_all(reader, len(both.history.lines)), 60, "all events")
        records = [record async for read in reader.read(SHARD, 0, await reader.end(SHARD)) for record in read]
    assert [record.value for record in records] == both.history.lines
    assert [dict(record.headers)["ce_id"] for record in records] == [
        b"%d-%d" % (SHARD, seq) for seq in range(1, len(records) + 1)
    ]
    events = list(map(decode_event, both.history.lines))
    seq = _within_a_run(both.lines)
    middle = Point(seq=seq)
    for source in ("journal", "audit"):
        read = [event async for event in read_events(both.runs, shard=SHARD, source=source)]
        assert read == events
        later = [event async for event in read_events(both.runs, shard=SHARD, source=source, first=middle)]
        assert later == events[seq - 1 :]
        earlier = [event async for event in read_events(both.runs, shard=SHARD, source=source, until=middle)]
        assert earlier == events[:seq]


async def _has_all(reader: JournalReader, count: int) -> bool:
    return await reader.end(SHARD) >= count


def _within_a_run(lines: list[bytes]) -> int:
    """A seq in the middle of the longest run."""
    run = max(map(decode_line, lines), key=lambda line: line.last_seq - line.seq)
    assert run.last_seq - run.seq >= 2
    return run.seq + 1
