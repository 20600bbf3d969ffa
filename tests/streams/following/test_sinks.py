"""`follow` into sinks: the one that comes with it, which writes a file, and the one of
docs/user-projections.md, live, through `kill -9`, and with two processes.
"""

import asyncio
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from grabstream import (
    CursorMoved,
    EventCursor,
    EventSink,
    Fact,
    FileSink,
    SinkDamaged,
    follow_into,
    read_events,
)
from grabstream.models.calendar import DAY_MS
from grabstream.models.journal import Gap
from grabstream.models.runs import decode_line
from grabstream.models.transfers import transfers_of
from grabstream.projections.cursors import facts_of, single_facts
from grabstream.settings import Settings, child_environment
from tests.conftest import until
from tests.streams.replaying.histories import MixedHistory, journal
from tests.support.command_line import env_of
from tests.support.projecting import EVENTS, LINES, SHARD
from tests.support.random_history import NOW, project, random_history
from tests.support.runs import as_runs

ROOT = Path(__file__).parents[3]
CUT = random.Random(5)


def facts(first: int, last: int) -> list[Fact]:
    """The facts of these lines, without their hashes."""
    lines = LINES[first - 1 : last]
    return list(single_facts(facts_of(lines, [b""] * len(lines), [decode_line(line) for line in lines])))


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


@contextmanager
def following(
    settings: Settings, folder: Path, what: str, **more: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """`grabstream follow` in a folder."""
    environment = child_environment(**env_of(settings), **more) | {"PYTHONPATH": str(ROOT)}
    with (folder / "log").open("ab") as log:
        running = subprocess.Popen(
            [sys.executable, "-m", "grabstream.ops.cli", "follow", what],
            cwd=folder, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.mark.long
async def test_a_file_has_each_event_once_through_a_kill(system: Settings, tmp_path: Path) -> None:
    history, file = MixedHistory(21, 4, 200), tmp_path / "events.ndjson"
    half = len(history.lines) // 2
    await journal(system, history, CUT, 1, half)
    with following(system, tmp_path, "file:events.ndjson", fail_at="sink.applied") as killed:
        assert await asyncio.to_thread(killed.wait, 90) == -signal.SIGKILL
    assert lines_of(file) == history.lines[:half]
    # Killed between the lines and the cursor: the lines are removed, and written again.
    with file.open("ab") as cut_off:
        cut_off.write(b"\n".join(history.lines[half : half + 3])[:-7])
    with following(system, tmp_path, "file:events.ndjson") as running:
        await journal(system, history, CUT, half + 1)
        await until(lambda: lines_of(file) == history.lines, 90, "all lines")
        running.terminate()
        assert await asyncio.to_thread(running.wait, 30) == 128 + signal.SIGTERM


@pytest.mark.long
async def test_the_sink_of_the_page_counts_each_event_once(system: Settings, tmp_path: Path) -> None:
    """Through a kill, and with a second process on the same store."""
    page = (ROOT / "docs" / "user-projections.md").read_text()
    [code] = [
        code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Spending" in code
    ]
    (tmp_path / "spending.py").write_text(code)
    history = MixedHistory(22, 4, 200)
    half = len(history.lines) // 2
    expected: Counter[tuple[str, str]] = Counter()
    for event in history.events:
        for transfer in transfers_of(event):
            kind, _, user = transfer.credit.partition(":")
            if kind == "wallet":
                expected[user, transfer.asset] += transfer.amount
    assert len(expected) > 5

    def stored() -> dict[tuple[str, str], int]:
        books = sqlite3.connect(tmp_path / "spending.db")
        try:
            return {(user, asset): amount for user, asset, amount in books.execute("SELECT * FROM got")}
        finally:
            books.close()

    await journal(system, history, CUT, 1, half)
    with following(system, tmp_path, "spending:SINK", fail_at="sink.applied") as killed:
        assert await asyncio.to_thread(killed.wait, 90) == -signal.SIGKILL
    with following(system, tmp_path, "spending:SINK"), following(system, tmp_path, "spending:SINK"):
        await journal(system, history, CUT, half + 1)
        await until(lambda: stored() == expected, 90, "all transfers")


class Flaky:
    """A sink whose store is away now and then, also after it has stored a batch."""

    def __init__(self, share: float = 0.3, cursor: str | None = None) -> None:
        self.share, self.cursor = share, cursor
        self.lines: list[bytes] = []
        self.draw = random.Random(3)
        self.failed = 0

    async def load(self) -> str | None:
        self._fail()
        return self.cursor

    async def apply(self, facts: Sequence[Fact], before: str | None, after: str) -> None:
        self._fail()
        if self.draw.random() < self.share:
            raise CursorMoved("as if another process was faster")
        assert before == self.cursor
        self.cursor = after
        self.lines += [fact.line for fact in facts]
        self._fail()

    def _fail(self) -> None:
        if self.draw.random() < self.share:
            self.failed += 1
            raise ConnectionError("away")


async def test_a_store_that_is_away_gets_each_event_once(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two shards, in order within each, also when it stored a batch and its answer was lost."""
    monkeypatch.setattr("grabstream.streams.follower.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("grabstream.streams.follower.POLL_SECONDS", 0.01)
    monkeypatch.setattr("grabstream.ops.following.BATCH_SEQS", 10)
    histories = {shard: MixedHistory(23, shard, 60) for shard in (2, 6)}
    for history in histories.values():
        await journal(system, history, CUT)
    sink = Flaky()
    assert isinstance(sink, EventSink)
    await follow_until(system, sink, sum(len(history.lines) for history in histories.values()))
    assert sink.failed > 5
    for shard, history in histories.items():
        assert [line for line in sink.lines if json.loads(line)["shard"] == shard] == history.lines
    assert sink.cursor is not None
    cursor = EventCursor.decode(sink.cursor)
    assert {shard: cursor.seq(shard) for shard in histories} == {
        shard: len(history.lines) for shard, history in histories.items()
    }


async def follow_until(settings: Settings, sink: Flaky, count: int) -> None:
    """Follows until the sink has `count` lines."""
    following = asyncio.create_task(follow_into(settings, sink))
    try:
        await until(lambda: following.done() or len(sink.lines) >= count, 90, f"{count} events")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.mark.long
async def test_a_cursor_within_a_run_is_continued_from(system: Settings) -> None:
    """A sink may be given the cursor of a program that has read events before."""
    history = random_history(7, 200, NOW - 1_000 * DAY_MS)
    lines = as_runs(history.lines)
    await project(system, history, random.Random(1), lines)
    run = max(map(decode_line, lines), key=lambda event: event.seqs)
    assert run.seqs > 2
    cursor = EventCursor()
    async with aclosing(read_events(system, shard=SHARD, cursor=cursor)) as events:
        async for event in events:
            if event.seq == run.seq:
                break
    sink = Flaky(0.0, cursor.encode())
    await follow_until(system, sink, len(history.lines) - run.seq)
    assert sink.lines == history.lines[run.seq :]


async def test_it_tells_how_much_is_left(system: Settings) -> None:
    histories = [MixedHistory(24, shard, 10) for shard in (4, 5)]
    for history in histories:
        await journal(system, history, CUT)
    told: list[tuple[int, int]] = []
    sink = Flaky(0.0)

    class CaughtUp(Exception):
        pass

    def report(events: int, records_left: int) -> None:
        told.append((events, records_left))
        if not records_left:
            raise CaughtUp

    async with asyncio.timeout(120):
        with pytest.raises(CaughtUp):
            await follow_into(system, sink, report=report)
    lines = sum(len(history.lines) for history in histories)
    assert sum(events for events, _ in told) == lines == len(sink.lines)
    first, *_, last = [records_left for _, records_left in told]
    assert first > last == 0


async def test_a_journal_that_ends_before_the_cursor_is_named(system: Settings) -> None:
    """It has lost its end. To wait would be silent until it has grown beyond the cursor again."""
    await journal(system, MixedHistory(24, 4, 10), CUT)
    cursor = EventCursor()
    async with aclosing(read_events(system, shard=4, cursor=cursor)) as events:
        assert [event async for event in events]
    line = cursor.positions()[4]
    cursor.move(4, line.seq, line._replace(next_offset=line.next_offset + 5))
    says = rf"lost its end: shard 4 ends at offset {line.next_offset}, and the cursor is at offset"
    async with asyncio.timeout(60):
        with pytest.raises(Gap, match=says):
            await follow_into(system, Flaky(0.0, cursor.encode()))
        with pytest.raises(Gap, match=says):
            async with aclosing(read_events(system, shard=4, cursor=cursor)) as events:
                assert [event async for event in events] == []


async def test_an_error_of_the_sink_ends_it(system: Settings) -> None:
    class Broken(Flaky):
        async def load(self) -> str | None:
            return self.cursor

        async def apply(self, facts: Sequence[Fact], before: str | None, after: str) -> None:
            raise ZeroDivisionError

    await journal(system, MixedHistory(24, 4, 10), CUT)
    async with asyncio.timeout(120):
        with pytest.raises(ZeroDivisionError):
            await follow_into(system, Broken())
        foreign = Broken()
        foreign.cursor = '{"v":1,"prefix":"other","shards":8}'
        with pytest.raises(SinkDamaged, match="it belongs to another system"):
            await follow_into(system, foreign)


# -- the file ------------------------------------------------------------------------------------------------


async def test_a_file_is_cut_to_what_its_cursor_knows(tmp_path: Path) -> None:
    file = tmp_path / "f"
    sink = FileSink(file)
    assert await sink.load() is None
    await sink.apply(facts(1, 3), None, "three")
    await sink.apply(facts(4, 5), "three", "five")
    with pytest.raises(CursorMoved):
        await sink.apply(facts(4, 5), "three", "five")
    sink.close()
    with file.open("ab") as more:
        more.write(b"half a li")
    again = FileSink(file)
    assert await again.load() == "five"
    assert lines_of(file) == EVENTS[:5]
    await again.apply(facts(6, 6), "five", "six")
    assert lines_of(file) == EVENTS[:6]
    again.close()


async def test_a_function_makes_the_lines(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "f", lambda fact: b"%d" % fact.event.seq if fact.event.seq % 2 else None)
    await sink.load()
    await sink.apply(facts(1, 5), None, "five")
    sink.close()
    assert lines_of(tmp_path / "f") == [b"1", b"3", b"5"]


async def test_a_second_writer_waits(tmp_path: Path) -> None:
    first, second = FileSink(tmp_path / "f"), FileSink(tmp_path / "f")
    await first.load()
    await first.apply(facts(1, 1), None, "one")
    with pytest.raises(BlockingIOError, match="another process writes"):
        await second.load()
    first.close()
    assert await second.load() == "one"
    second.close()


def _foreign(file: Path) -> None:
    file.write_bytes(b"mine")


def _shortened(file: Path) -> None:
    file.write_bytes(b"1\n")
    file.with_name("f.cursor").write_text('{"size":9,"cursor":"nine"}')


def _garbage(file: Path) -> None:
    file.with_name("f.cursor").write_bytes(b"\xff\xfe not a cursor")


def _huge(file: Path) -> None:
    file.with_name("f.cursor").write_bytes(b" " * 2_097_153)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_foreign, "is not empty, but has no file with its cursor: name another file"),
        (_shortened, "has 2 bytes, but 9 were written: restore it, or remove it and f.cursor"),
        (_garbage, "is not a cursor"),
        (_huge, "it has more than 2,097,152 bytes"),
    ],
)
async def test_a_file_that_is_not_a_sink_s_is_left_alone(
    damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "f"
    damage(file)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    sink = FileSink(file)
    with pytest.raises(SinkDamaged, match=re.escape(words)):
        await sink.load()
    sink.close()
    after: dict[str, Any] = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before


async def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of a batch was written when it failed."""
    sink, file = FileSink(tmp_path / "f"), tmp_path / "f"
    await sink.load()
    await sink.apply(facts(1, 3), None, "three")
    write = os.pwrite
    with monkeypatch.context() as full:

        def fail(descriptor: int, data: Any, offset: int) -> int:
            if offset > len(b"\n".join(EVENTS[:3])) + 40:
                raise OSError(28, "No space left on device")
            return write(descriptor, bytes(data[:20]), offset)

        full.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="No space left"):
            await sink.apply(facts(4, 6), "three", "six")
    assert len(file.read_bytes()) > len(b"\n".join(EVENTS[:3])) + 1
    assert await sink.load() == "three"
    await sink.apply(facts(4, 6), "three", "six")
    sink.close()
    assert lines_of(file) == EVENTS[:6]


@pytest.mark.long
@pytest.mark.parametrize("path", ["", "nosuch/f", "."])
def test_a_file_that_cannot_be_is_refused(path: str, tmp_path: Path, settings: Settings) -> None:
    with following(settings, tmp_path, f"file:{path}") as refused:
        assert refused.wait(60) == 2
    assert f"file:{path} must name a file in a folder that exists" in (tmp_path / "log").read_text()
