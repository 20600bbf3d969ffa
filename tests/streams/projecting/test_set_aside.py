"""A projection that stopped at a record: it continues after the record was set aside, or with it once the
cause is fixed; the record set aside stays in the books.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grabstream.models.journal import GENESIS, Cursor, Gap, chain
from grabstream.projections.checking.snapshots import newest, trail_of
from grabstream.settings import Settings
from grabstream.streams.history.sources import AuditSource
from grabstream.streams.journal import open_reader
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.command_line import env_of, grabstream
from tests.support.projecting import (
    EVENTS,
    LINES,
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
from tests.support.raw_batches import RawRecord, produce_batch, raw_batch
from tests.support.stopped_shards import (
    WHY,
    as_if_set_aside,
    call_json,
    until_stopped,
)


async def test_a_refused_record_is_set_aside_and_later_events_are_applied(
    system: Settings, journal: JournalWriter
) -> None:
    """Three records in one transaction: the projector stops exactly before the record that overdraws, and
    only its events are missing afterwards.
    """
    lines = [opened("e", 1, total=25), granted("e", 2), granted("e", 3, amount=99), granted("e", 4)]
    await journal.marker(1, "a")
    for seq in range(1, 5):
        await journal.block(lines, seq, seq)
    async with running(system) as [ledger, _, audit]:
        for record in journal.records:
            await ledger.put(record)
            await audit.put(record)
        await until_stopped(system, "ledger")
        await until_at_seq(system, 2, "ledger")
        await until_at_seq(system, 4, "audit")

        code, shown = await call_json(system, "set-aside", "ledger", str(SHARD), "--dry-run")
        assert (code, shown["done"], shown["first_seq"], shown["event_count"]) == (0, False, 3, 1)
        assert shown["lines"] == [lines[2].decode()]
        assert {"account": "offer:e", "asset": "CNY", "amount": -99} in shown["missing"]
        assert await rows(system, "SELECT count(*) FROM set_aside") == [(0,)]
        assert await rows(system, "SELECT count(*) FROM stopped_shards") == [(1,)]

        code, done = await call_json(system, "set-aside", "ledger", str(SHARD), *WHY, "--yes")
        assert (code, done["done"], done["moved"], done["stopped"]) == (0, True, True, None)
        await until_at_seq(system, 4, "ledger")
        assert (await call_json(system, "set-aside", "ledger", str(SHARD), *WHY, "--yes"))[0] == 1
    assert await rows(system, "SELECT posted FROM accounts WHERE account = 'offer:e'") == [(5,)]
    assert await rows(system, "SELECT seq FROM transfers ORDER BY seq") == [(1,), (2,), (4,)]
    [(count, offers, readable, reason, operator)] = await rows(
        system, "SELECT count, offers, readable, reason, operator FROM set_aside"
    )
    assert (count, offers, readable, reason, operator) == (1, ["e"], True, WHY[1], "olga")
    assert await rows(system, "SELECT convert_from(value, 'UTF8') FROM set_aside_records") == [
        (lines[2].decode(),)
    ]
    head = chain(GENESIS, lines)[-1]
    assert [
        bytes(stored)
        for (stored,) in await rows(
            system, "SELECT head FROM cursors WHERE projection = 'ledger' AND seq = 4"
        )
    ] == [head]


@pytest.mark.long
async def test_a_corrupt_record_is_set_aside_once_a_later_block_exists(
    system: Settings, journal: JournalWriter
) -> None:
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 5)
    await journal.block(LINES, 6, 9, head=b"00" * 32)
    names = ("ledger", "balances", "audit", "events")
    async with catching_up(system, *names):
        for name in names:
            await until_stopped(system, name)
        code, said = await call_json(system, "set-aside", "ledger", str(SHARD), *WHY, "--yes")
        assert code == 1
        assert "no later block of the shard's owner shows yet" in said
        await journal.block(LINES, 10, 20)
        for words, missing in ((("--yes",), "--reason and --operator"), (WHY, "--yes is required")):
            refused = await asyncio.to_thread(
                grabstream, "set-aside", "ledger", str(SHARD), *words, **env_of(system)
            )
            assert (refused.returncode, missing in refused.stderr) == (2, True), refused.stderr
        assert await rows(system, "SELECT count(*) FROM set_aside") == [(0,)]
        for name in names:
            code, done = await call_json(system, "set-aside", name, str(SHARD), *WHY, "--yes")
            assert (code, done["first_seq"], done["event_count"], done["moved"]) == (0, 6, 4, True), done
        await until_at_seq(system, 20)
    # The test wrote this journal: Redis has no state of it.
    code, checks = await call_json(system, "verify", "--quick", "--wait", "0")
    assert code == 0, [check for check in checks if check["problems"]]
    published = []
    async with open_reader(system.kafka, Topics(system.prefix).events) as reader:
        async for records in reader.read(SHARD, 0, await reader.end(SHARD)):
            published += [record.value for record in records]
    assert published == [*EVENTS[:5], *EVENTS[9:20]]
    # A restarted publisher continues after the record too, although its topic has no cursor of it.
    async with running(system, "events") as [events]:
        await journal.block(LINES, 21, 30)
        await events.put(CatchUp(SHARD))

        async def all_published() -> bool:
            async with open_reader(system.kafka, Topics(system.prefix).events) as reader:
                return await reader.end(SHARD) >= len(published) + 10

        await until(all_published, 30, "the rest")
    assert await rows(system, "SELECT count(*) FROM stopped_shards") == [(0,)]


@pytest.mark.long
async def test_setting_aside_a_corrupt_repeat_loses_no_event(
    system: Settings, journal: JournalWriter
) -> None:
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 5)
    await journal.block(LINES, 1, 5, head=b"00" * 32)
    await journal.block(LINES, 6, 30)
    async with catching_up(system, "ledger"):
        await until_stopped(system, "ledger")
        code, done = await call_json(system, "set-aside", "ledger", str(SHARD), *WHY, "--yes")
        assert (code, done["event_count"], done["offers"]) == (0, 0, [])
        await until_at_seq(system, 30, "ledger")
    assert await rows(system, "SELECT posted FROM accounts WHERE account = 'offer:e'") == [(1000 - 290,)]


@pytest.mark.long
async def test_a_record_of_any_headers_is_set_aside(system: Settings, journal: JournalWriter) -> None:
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 5)
    odd = RawRecord(b"\0", [(b"", None), (b"a\0b", b"\0"), (b"\xff\xfe", b"\xff")], offset_delta=10**6)
    batch = raw_batch([odd], round(time.time() * 1_000))
    await produce_batch(system.kafka, Topics(system.prefix).journal, SHARD, batch)
    await journal.block(LINES, 6, 30)
    async with catching_up(system, "ledger"):
        await until_stopped(system, "ledger")
        code, shown = await call_json(system, "set-aside", "ledger", str(SHARD), "--dry-run")
        assert (code, shown["headers"]) == (0, {"": "", "a\0b": "\0", "\\xff\\xfe": "\ufffd"}), shown
        code, done = await call_json(system, "set-aside", "ledger", str(SHARD), *WHY, "--yes")
        assert (code, done["event_count"], done["offers"]) == (0, 0, []), done
        await until_at_seq(system, 30, "ledger")
    [(headers,)] = await rows(system, "SELECT headers FROM set_aside_records")
    assert headers == [["", ""], ["a\\x00b", "00"], ["\\xff\\xfe", "ff"]]


async def test_missing_events_cannot_be_set_aside(system: Settings, journal: JournalWriter) -> None:
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 5)
    await journal.block(LINES, 9, 12)
    async with catching_up(system, "ledger"):
        await until_stopped(system, "ledger")
    code, said = await call_json(system, "set-aside", "ledger", str(SHARD), *WHY, "--yes")
    assert code == 1
    assert "events are missing from the journal" in said


@pytest.mark.long
async def test_retry_applies_the_record_once_its_cause_is_mended(
    system: Settings, journal: JournalWriter
) -> None:
    """A row was changed by hand; when it is restored, the same record can be applied."""
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 2)
    async with catching_up(system, "ledger") as [ledger]:
        await until_at_seq(system, 2, "ledger")
        async with await open_tables(system) as connection:
            await connection.execute("UPDATE accounts_1 SET posted = 5 WHERE account = 'offer:e'")
            await journal.block(LINES, 3, 30)
            await ledger.put(journal.records[-1])
            await until_stopped(system, "ledger")
            code, said = await call_json(system, "retry", "ledger", str(SHARD))
            assert code == 1
            assert "never_below_zero" in said["stopped"]
            await connection.execute("UPDATE accounts_1 SET posted = 990 WHERE account = 'offer:e'")
        code, said = await call_json(system, "retry", "ledger", str(SHARD))
        assert (code, said["moved"], said["seq"]) == (0, True, 30)
        assert (await call_json(system, "retry", "ledger", str(SHARD)))[0] == 1
    assert await rows(system, "SELECT posted FROM accounts WHERE account = 'offer:e'") == [(1000 - 290,)]


@pytest.mark.long
async def test_an_audit_trail_that_lacks_events_is_not_a_snapshot(
    system: Settings, journal: JournalWriter
) -> None:
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 5, head=b"00" * 32)
    await journal.block(LINES, 6, 30)
    async with catching_up(system, "audit"):
        await until_stopped(system, "audit")
        assert (await call_json(system, "set-aside", "audit", str(SHARD), *WHY, "--yes"))[0] == 0
        await until_at_seq(system, 30, "audit")
    async with await open_books(system) as connection:
        assert await newest(connection, SHARD) == Cursor()
        assert await trail_of(connection, SHARD) is None


@pytest.mark.long
async def test_a_rebuild_applies_the_record_set_aside_and_undo_removes_it(
    system: Settings, journal: JournalWriter
) -> None:  # fmt: skip
    """The record was set aside because a row was changed by hand; the rebuild reads the same record again."""
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 2)
    async with catching_up(system) as projectors:
        await until_at_seq(system, 2)
        async with await open_tables(system) as connection:
            await connection.execute("UPDATE accounts_1 SET posted = 5 WHERE account = 'offer:e'")
            await journal.block(LINES, 3, 3)
            await journal.block(LINES, 4, 30)
            for projector in projectors:
                await projector.put(CatchUp(SHARD))
            await until_stopped(system, "ledger")
            await connection.execute("UPDATE accounts_1 SET posted = 990 WHERE account = 'offer:e'")
        assert (await call_json(system, "set-aside", "ledger", str(SHARD), *WHY, "--yes"))[0] == 0
        await until_at_seq(system, 30)
    [listed] = (await call_json(system, "set-aside", "list"))[1]
    assert (listed["projection"], listed["first_seq"], listed["event_count"], listed["offers"]) == (
        "ledger",
        3,
        1,
        ["e"],
    )
    refused = await asyncio.to_thread(grabstream, "rebuild", "ledger", **env_of(system))
    assert refused.returncode == 1
    words_printed = refused.stdout.replace("\n", " ")
    assert "may be from a record that was set aside; then use --accept: 1 event (3)" in words_printed
    for words, posted, lacking in ((("ledger",), 1000 - 290, 0), (("undo", "ledger"), 1000 - 280, 1)):
        done = await asyncio.to_thread(grabstream, "rebuild", *words, "--accept", **env_of(system))
        assert done.returncode == 0, done.stderr
        assert await rows(system, "SELECT posted FROM accounts WHERE account = 'offer:e'") == [(posted,)]
        assert len((await call_json(system, "set-aside", "list"))[1]) == lacking


@pytest.mark.long
async def test_a_rebuild_skips_records_set_aside_on_request(system: Settings, journal: JournalWriter) -> None:
    """Seq 3 overdraws, 5 and 6 are corrupt. Without the option, the rebuild reads both records again, stops,
    and names the option.
    """
    names = ("ledger", "balances", "audit")
    lines = [opened("e", 1), *(granted("e", seq, amount=9_999 if seq == 3 else 10) for seq in range(2, 12))]
    await journal.marker(1, "a")
    for first_seq, last_seq in ((1, 2), (3, 3), (4, 4)):
        await journal.block(lines, first_seq, last_seq)
    await journal.block(lines, 5, 6, head=b"00" * 32)
    await journal.block(lines, 7, 9)
    async with catching_up(system, *names) as projectors:
        for name, times in zip(names, (2, 2, 1), strict=True):
            for _ in range(times):
                await until_stopped(system, name)
                code, done = await call_json(system, "set-aside", name, str(SHARD), *WHY, "--yes")
                assert (code, done["moved"]) == (0, True), done
        await until_at_seq(system, 9)
        listed = sorted(of_list(await call_json(system, "set-aside", "list")))
        assert [first for first, _, _ in listed] == [3, 3, 5, 5, 5]
        shown = await contents(system)
        for name in names:
            code, said = await call_json(system, "rebuild", name)
            assert code == 1
            assert "--skip-set-aside" in said, (name, said)
            code, done = await call_json(system, "rebuild", name, "--skip-set-aside")
            assert (code, done["refused"]) == (0, False), done
        assert await contents(system) == shown
        assert sorted(of_list(await call_json(system, "set-aside", "list"))) == listed
        await journal.block(lines, 10, 10)
        for projector in projectors:
            await projector.put(CatchUp(SHARD))
        await until_at_seq(system, 10)
    code, done = await call_json(system, "rebuild", "ledger", "--from", "audit", "--skip-set-aside")
    assert code == 1
    assert "seq 5 is missing" in done
    # Redis has no state of this journal.
    code, checks = await call_json(system, "verify", "--quick", "--wait", "0")
    assert code == 0, [check for check in checks if check["problems"]]


@pytest.mark.long
async def test_a_rebuild_from_the_audit_trail_keeps_set_aside_records_under_a_new_version_number(
    system: Settings, journal: JournalWriter
) -> None:
    """The books name records set aside by version. A discarded version's number is not used again, or the new
    version would seem to lack the same records.
    """
    lines = [opened("e", 1), *(granted("e", seq, amount=9_999 if seq == 3 else 10) for seq in range(2, 6))]
    await journal.marker(1, "a")
    for seq in range(1, 6):
        await journal.block(lines, seq, seq)
    async with catching_up(system, "ledger", "audit"):
        await until_stopped(system, "ledger")
        assert (await call_json(system, "set-aside", "ledger", str(SHARD), *WHY, "--yes"))[0] == 0
        for name in ("ledger", "audit"):
            await until_at_seq(system, 5, name)
    before = await rows(system, "SELECT * FROM transfers ORDER BY seq")
    from_audit = ("ledger", "--from", "audit", "--skip-set-aside")
    for words in (
        ("build", *from_audit),
        ("compare", "ledger"),
        ("drop", "ledger", "unfinished"),
        from_audit,
    ):
        code, done = await call_json(system, "rebuild", *words)
        assert code == 0, done
    assert done["new"]["version"] == 3
    assert await rows(system, "SELECT * FROM transfers ORDER BY seq") == before
    assert of_list(await call_json(system, "set-aside", "list")) == [(3, 1, "ledger")]


def of_list(listed: tuple[int, list[dict[str, Any]]]) -> list[tuple[int, int, str]]:
    """The output of `set-aside list`, without the fields that differ between versions."""
    return [(row["first_seq"], row["event_count"], row["projection"]) for row in listed[1]]


async def contents(settings: Settings) -> list[Any]:
    """The rows of the views."""
    tables = ("transfers", "accounts", "balances", "grabs", "offers", "audit")
    return [sorted(await rows(settings, f"SELECT t::text FROM {table} AS t")) for table in tables]


@pytest.mark.long
async def test_a_running_worker_continues_after_a_record_is_set_aside(
    system: Settings, journal: JournalWriter, worker: Callable[..., Any]
) -> None:
    """The worker needs no restart, and its other shards never stop."""
    lines = [opened("e", 1, total=25), granted("e", 2, amount=99), granted("e", 3)]
    other = JournalWriter(system, journal._producer, SHARD + 1)
    for writer in (journal, other):
        await writer.marker(1, "a")
    await journal.block(lines, 1, 1)
    await journal.block(lines, 2, 2)
    worker(system, "project")
    await until_stopped(system, "ledger")
    await journal.block(lines, 3, 3)
    await other.block([opened("f", 1).replace(b'"shard":3', b'"shard":4')], 1, 1)

    async def other_continued() -> bool:
        return bool(await rows(system, "SELECT 1 FROM offers WHERE offer = 'f'"))

    await until(other_continued, 30, "the other shard")
    for name in ("ledger", "balances"):
        code, done = await call_json(system, "set-aside", name, str(SHARD), *WHY, "--yes")
        assert (code, done["moved"], done["stopped"]) == (0, True, None)
    await until_at_seq(system, 3)


@pytest.mark.parametrize("words", [("ledger",), ("ledger", "3", "--dry-run")])
async def test_set_aside_before_init_fails_without_a_traceback(
    settings: Settings, words: tuple[str, ...]
) -> None:
    done = grabstream("set-aside", *words, **env_of(settings))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr


async def test_the_audit_trail_names_who_set_aside_what_it_lacks_and_the_way_out(
    system: Settings, journal: JournalWriter, tmp_path: Path
) -> None:
    """For everything that is read from it: exports, replays and rebuilds."""
    lines = [opened("e", 1), granted("e", 2), granted("e", 3), granted("e", 4)]
    await journal.marker(1, "a")
    for seq in range(1, 5):
        await journal.block(lines, seq, seq)
    async with running(system) as projectors:
        for projector in projectors:
            await projector.put(CatchUp(SHARD))
        await until_at_seq(system, 4)
    async with await open_tables(system) as tables:
        await as_if_set_aside(tables, lines, 3)
    folder = str(tmp_path / "archive")
    way_out = "seq 3 is missing: olga has set it aside (a test). Read the journal instead, which has it"
    for verb in (
        ("export", folder, "--source", "audit"),
        ("replay", "--into", "-", "--source", "audit"),
        ("rebuild", "build", "ledger", "--from", "audit"),
    ):
        done = await asyncio.to_thread(grabstream, *verb, **env_of(system))
        assert (done.returncode, way_out in done.stderr) == (1, True), (verb, done.stderr)
    code, report = await call_json(system, "export", folder)
    # The first export has stored nothing: it ended before its first file was whole.
    assert (code, report["lines"]) == (0, 4)
    # A gap that nobody made has no such words.
    async with await open_tables(system) as tables:
        await tables.execute("DELETE FROM set_aside_records")
        source = AuditSource(tables)
        with pytest.raises(Gap, match=r"seq 3 is missing\Z"):
            [_ async for _ in source.chunks(SHARD, await source.start(SHARD, None))]
