"""Following a journal: what is gathered is saved with its cursors, and a loop outlives absent servers."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from grabstream.models.journal import Cursor, Gap
from grabstream.models.runs import decode_line
from grabstream.projections.cursors import CursorMoved, facts_of
from grabstream.streams import follower
from grabstream.streams.clients import Trouble
from grabstream.streams.follower import Chunk, Follower, Group, poll_journal
from tests.support.projecting import opened


def chunk(shard: int, first: int, last: int) -> Chunk:
    """The events of a shard from one seq to another."""
    return Chunk(shard, Cursor(first - 1, next_offset=first - 1), Cursor(last, next_offset=last), [], 1)


class Store:
    """What was saved, with cursors that move with it."""

    def __init__(self) -> None:
        self.cursors = {0: Cursor(), 1: Cursor()}
        self.saved: list[dict[int, tuple[int, int]]] = []
        self.error: Exception | None = None

    async def save(self, group: Group) -> None:
        if self.error is not None:
            raise self.error
        self.saved.append({shard: (old.seq, new.seq) for shard, (old, new) in group.moves.items()})
        self.cursors.update((shard, after) for shard, (_, after) in group.moves.items())


async def test_a_group_is_saved_when_it_is_full_and_at_a_flush() -> None:
    store = Store()
    following = Follower(store.save, 10)
    for part in (chunk(0, 1, 4), chunk(1, 1, 5), chunk(0, 5, 5), chunk(0, 6, 6)):
        assert (following.cursor(part.shard) or store.cursors[part.shard]) == part.before
        await following.take(part)
        assert (following.cursor(part.shard) or store.cursors[part.shard]) == part.after
    assert store.saved == [{0: (0, 5), 1: (0, 5)}]
    await following.flush()
    await following.flush()
    assert store.saved[1:] == [{0: (5, 6)}]


async def test_a_group_that_was_not_saved_is_read_again_from_the_stored_cursors() -> None:
    store = Store()
    following = Follower(store.save)
    await following.take(chunk(0, 1, 4))
    store.error = ValueError("of the store")
    with pytest.raises(ValueError, match="of the store"):
        await following.flush()
    assert following.cursor(0) is None
    store.error = None
    await following.flush()
    assert store.saved == []


async def source_of(*items: Chunk | Exception) -> AsyncGenerator[Chunk, None]:
    """A source with these chunks, up to an error."""
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


async def test_a_group_of_a_source_has_a_number_of_events_or_of_lines() -> None:
    """A transaction of a load has many events of runs, but only so many lines: these need the memory."""
    facts = facts_of([b""], [b""], [decode_line(opened("e", 1))])
    lines_to = {9: 1, 18: 1, 20: 2, 21: 1, 22: 1, 26: 4, 56: 9, 57: 1}
    chunks = [
        chunk(0, before + 1, last)._replace(facts=facts * lines_to[last])
        for before, last in pairwise([0, *lines_to])
    ]
    for events, ends in ((math.inf, [18, 22, 26, 56, 57]), (21, [18, 21])):
        store = Store()
        await Follower(store.save, 18, 4).follow(source_of(*chunks), events)
        assert store.saved == [{0: move} for move in pairwise([0, *ends])]


async def test_a_group_that_does_not_take_a_shard_is_saved_before_it() -> None:
    class OfOneShard(Group):
        def takes(self, shard: int) -> bool:
            return not self.chunks or shard in self.chunks

    chunks = (chunk(0, 1, 4), chunk(0, 5, 5), chunk(1, 1, 6), chunk(0, 6, 9))
    expected = [{0: (0, 5)}, {1: (0, 6)}, {0: (5, 9)}]
    store = Store()
    await Follower(store.save, 10, new_group=OfOneShard).follow(source_of(*chunks))
    assert store.saved == expected
    store = Store()
    following = Follower(store.save, 10, new_group=OfOneShard)
    for part in chunks:
        await following.take(part)
    await following.flush()
    assert store.saved == expected


async def test_the_next_group_of_a_source_is_read_while_one_is_saved() -> None:
    """If the one is not saved, the next one is not either, and the source is closed."""
    saved, steps, is_read = list[Group](), list[str](), asyncio.Event()

    async def chunks() -> AsyncGenerator[Chunk, None]:
        try:
            yield chunk(0, 1, 4)
            is_read.set()
            yield chunk(0, 5, 8)
        finally:
            steps.append("closed")

    async def save(group: Group) -> None:
        saved.append(group)
        await is_read.wait()
        raise ValueError("of the store")

    async with asyncio.timeout(10):
        with pytest.raises(ValueError, match="of the store"):
            await Follower(save, 4).follow(chunks())
    assert (len(saved), steps) == (1, ["closed"])


async def test_chunks_before_a_contradiction_are_saved() -> None:
    store = Store()
    with pytest.raises(Gap, match="of the source"):
        await Follower(store.save).follow(source_of(chunk(0, 1, 4), Gap("of the source")))
    assert store.saved == [{0: (0, 4)}]


class Away:
    """In place of a reader: counts how often the journal was opened."""

    def __init__(self) -> None:
        self.opened = 0

    def __call__(self, kafka: str, journal: str) -> "Away":
        return self

    async def __aenter__(self) -> "Away":
        self.opened += 1
        return self

    async def __aexit__(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("error", [CursorMoved("by another"), KafkaConnectionError(), OSError("of a sink")])
async def test_a_loop_begins_again_after_trouble(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with any other error, and lasts as long as there is none."""
    reader, looks = Away(), list[int]()
    monkeypatch.setattr(follower, "open_reader", reader)
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(follower, "RETRY_SECONDS", 0.0)

    errors = iter([None, error, None, None, LookupError("unknown")])

    async def look(_: Any) -> None:
        looks.append(reader.opened)
        if (raised := next(errors)) is not None:
            raise raised

    trouble = Trouble(logging.getLogger(__name__), "a loop")
    async with asyncio.timeout(10):
        with pytest.raises(LookupError, match="unknown"):
            await poll_journal("", "", look, trouble)
    assert looks == [1, 1, 2, 2, 2]
    assert not trouble.is_present


async def test_a_polling_loop_connects_only_while_it_has_something_to_look_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, looks = Away(), list[int]()
    monkeypatch.setattr(follower, "open_reader", reader)
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(follower, "RETRY_SECONDS", 0.0)
    wanted = iter([False, False, True, True, False, True, True])

    async def is_wanted() -> bool:
        return next(wanted)

    async def look(_: Any) -> None:
        looks.append(reader.opened)
        if len(looks) == 2:
            raise LookupError("unknown")

    trouble = Trouble(logging.getLogger(__name__), "a loop")
    async with asyncio.timeout(10):
        with pytest.raises(LookupError, match="unknown"):
            await poll_journal("", "", look, trouble, is_wanted)
    # Before a reader is opened, and before each look.
    assert (looks, list(wanted)) == ([1, 2], [])
