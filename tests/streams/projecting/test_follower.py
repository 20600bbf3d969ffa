"""Following a journal: what is gathered is saved with its cursors, and a loop outlives absent servers."""

import asyncio
import logging
from typing import Any

import pytest
from aiokafka.errors import KafkaConnectionError

from grabstream.models.journal import Cursor
from grabstream.projections.cursors import CursorMoved
from grabstream.streams.clients import Trouble
from grabstream.streams.projecting import follower
from grabstream.streams.projecting.follower import Chunk, Follower, Group, poll_journal


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


async def test_a_group_is_saved_when_it_is_full_and_at_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "GROUP_EVENTS_MAX", 10)
    store = Store()
    following = Follower(store.save, store.cursors.__getitem__)
    for part in (chunk(0, 1, 4), chunk(1, 1, 5), chunk(0, 5, 5), chunk(0, 6, 6)):
        assert following.cursor(part.shard) == part.before
        await following.take(part)
        assert following.cursor(part.shard) == part.after
    assert store.saved == [{0: (0, 5), 1: (0, 5)}]
    await following.flush()
    await following.flush()
    assert store.saved[1:] == [{0: (5, 6)}]


async def test_a_group_that_was_not_saved_is_read_again_from_the_stored_cursors() -> None:
    store = Store()
    following = Follower(store.save, store.cursors.__getitem__)
    await following.take(chunk(0, 1, 4))
    store.error = ValueError("of the store")
    with pytest.raises(ValueError, match="of the store"):
        await following.flush()
    assert following.cursor(0) == Cursor()
    store.error = None
    await following.flush()
    assert store.saved == []


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
