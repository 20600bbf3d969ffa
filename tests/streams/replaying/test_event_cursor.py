"""The cursor of `read_events`: a program that keeps it reads every event once, wherever it was stopped."""

import inspect
import random
from contextlib import aclosing
from typing import Any, NamedTuple

import pytest

from grabstream import (
    EventCursor,
    Point,
    Settings,
    read_events,
    read_events_sync,
    read_lines,
    read_lines_sync,
)
from grabstream.models.calendar import DAY_MS
from grabstream.models.events import decode_event
from grabstream.models.journal import GENESIS, chain
from tests.streams.replaying.histories import RecordedSystem
from tests.support.projecting import SHARD
from tests.support.random_history import NOW, History, project, random_history
from tests.support.runs import as_runs

SOURCES = ("journal", "audit")


class Runs(NamedTuple):
    """A system whose journal has runs, its lines, and their events one by one."""

    settings: Settings
    history: History
    lines: list[bytes]

    @property
    def events(self) -> list[Any]:
        return list(map(decode_event, self.history.lines))


@pytest.fixture
async def runs(system: Settings) -> Runs:
    history = random_history(7, 500, NOW - 1_000 * DAY_MS)
    lines = as_runs(history.lines)
    await project(system, history, random.Random(1), lines)
    return Runs(system, history, lines)


async def read(settings: Settings, count: int, **words: Any) -> list[Any]:
    """At most `count` events."""
    found: list[Any] = []
    async with aclosing(read_events(settings, **words)) as events:
        async for event in events:
            found.append(event)
            if len(found) == count:
                break
    return found


async def test_a_program_stopped_after_any_event_continues_after_it(runs: Runs) -> None:
    """Also within a run of grabs; and from one source to the other, and to a later `until`."""
    cut = random.Random(5)
    text, found = EventCursor().encode(), []
    within_runs = 0
    while len(found) < len(runs.events):
        cursor = EventCursor.decode(text)
        bound = len(found) + cut.choice((1, 2, 7, 60))
        words = {"until": Point(seq=bound)} if cut.random() < 0.3 else {}
        more = await read(
            runs.settings, bound - len(found), shard=SHARD, source=cut.choice(SOURCES), cursor=cursor, **words
        )
        assert more, (len(found), words, text)
        found.extend(more)
        text = cursor.encode()
        within_runs += cursor.seq(SHARD) != cursor.positions()[SHARD].seq
        assert len(text) < 400
    assert found == runs.events
    assert within_runs
    assert await read(runs.settings, 9, cursor=EventCursor.decode(text)) == []


@pytest.mark.long
async def test_a_cursor_of_all_shards_continues_in_each(recorded: RecordedSystem) -> None:
    expected = [event for shard in sorted(recorded.histories) for event in recorded.histories[shard].events]
    for cut in (1, len(recorded.histories[2].events), len(expected) - 1, len(expected)):
        cursor = EventCursor()
        begun = await read(recorded.settings, cut, cursor=cursor)
        rest = await read(recorded.settings, 0, cursor=EventCursor.decode(cursor.encode()))
        assert begun + rest == expected


async def test_lines_are_those_of_the_journal(runs: Runs) -> None:
    """Byte for byte, with hashes that any reader can check; a run is one line, also at a bound."""
    cursor = EventCursor()
    lines = [line async for line in read_lines(runs.settings, cursor=cursor)]
    assert [line.text for line in lines] == runs.lines
    assert [line.hash for line in lines] == chain(GENESIS, runs.lines)
    assert [line async for line in read_lines(runs.settings, cursor=cursor)] == []
    run = max(lines, key=lambda line: line.last_seq - line.seq)
    middle = Point(seq=run.seq + 1)
    words: dict[str, Any] = {"shard": SHARD, "first": middle, "until": middle}
    assert [line async for line in read_lines(runs.settings, **words)] == [run]
    # A line of which events were read is read whole.
    cursor = EventCursor()
    await read(runs.settings, run.seq, cursor=cursor)
    async with aclosing(read_lines(runs.settings, cursor=cursor)) as rest:
        assert await anext(rest) == run


@pytest.mark.long
@pytest.mark.parametrize("source", SOURCES)
async def test_events_of_a_user_are_those_of_a_replay(recorded: RecordedSystem, source: str) -> None:
    expected = recorded.replay("--into", "-", "--user", "u3").stdout.splitlines()
    assert expected
    found = await read(recorded.settings, 0, user="u3", source=source)
    assert [event.seq for event in found] == [decode_event(line.encode()).seq for line in expected]
    # A cursor in the middle forgets no refund of a grab before it.
    cursor = EventCursor()
    begun = await read(recorded.settings, len(found) // 2, user="u3", cursor=cursor)
    assert begun + await read(recorded.settings, 0, user="u3", cursor=cursor) == found


def test_programs_without_asyncio_read_the_same(shared: RecordedSystem) -> None:
    """Also when they stop early, and continue."""
    expected = [event for shard in sorted(shared.histories) for event in shared.histories[shard].events]
    cursor = EventCursor()
    begun = []
    for event in read_events_sync(shared.settings, cursor=cursor):
        begun.append(event)
        if len(begun) == 100:
            break
    assert begun + list(read_events_sync(shared.settings, cursor=cursor)) == expected
    texts = [line.text for line in read_lines_sync(shared.settings, shard=2)]
    assert texts == shared.histories[2].journaled


def test_both_kinds_of_readers_have_the_same_arguments() -> None:
    """By name, so that an editor shows them, and a type checker compares them."""
    for reader, other in ((read_events, read_events_sync), (read_lines, read_lines_sync)):
        found = [list(inspect.signature(each).parameters.values()) for each in (reader, other)]
        assert found[0] == found[1]


async def test_programs_with_asyncio_are_told_to_use_it(settings: Settings) -> None:
    with pytest.raises(RuntimeError, match="an event loop is running here: use read_events"):
        next(read_events_sync(settings))


async def test_a_cursor_of_another_system_is_refused(recorded: RecordedSystem, system: Settings) -> None:
    cursor = EventCursor()
    await read(recorded.settings, 1, cursor=cursor)
    with pytest.raises(ValueError, match="cursor: it belongs to another system"):
        await read(system, 1, cursor=EventCursor.decode(cursor.encode()))


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "{}", '{"v":2}', "[" * 100_000, "x" * 2_000_000,
        '{"v":1,"positions":{"0":{"seq":1,"line_seq":2,"head":"' + "0" * 64 + '"}}}',
        '{"v":1,"positions":{"x":{"seq":1,"line_seq":1,"head":"' + "0" * 64 + '"}}}',
        '{"v":1,"positions":{"0":{"seq":1,"line_seq":1,"head":"zz"}}}',
        '{"v":1,"positions":{"0":{"seq":-1,"line_seq":-1,"head":"' + "0" * 64 + '"}}}',
    ],
)  # fmt: skip
def test_a_text_that_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cursor: .*encode"):
        EventCursor.decode(text)
