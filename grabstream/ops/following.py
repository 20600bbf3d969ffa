"""`follow_into`: hands the events of a system on to a sink, from the cursor that the sink has stored."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from grabstream.connections.opening import check_system
from grabstream.models.journal import Cursor
from grabstream.ops.event_cursor import EventCursor
from grabstream.projections.cursors import single_facts
from grabstream.settings import Settings
from grabstream.streams.clients import Trouble
from grabstream.streams.follower import Follower, Group, poll_journal
from grabstream.streams.following.sinks import EventSink, SinkDamaged
from grabstream.streams.history.sources import JournalSource, Start, require_journal_end
from grabstream.streams.journal import JournalReader
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

#: How many events are handed on at once: at least this many if there are, in whole records.
BATCH_SEQS: Final = 4_000


async def follow_into(
    settings: Settings, sink: EventSink, *, step: Callable[[str], None] = lambda name: None,
    report: Callable[[int, int], None] = lambda events, records_left: None,
) -> None:  # fmt: skip
    """Hands all events on to a sink, from the cursor that it has stored, and then new ones, until cancelled.

    The events are read from the journal and verified by the chain of hashes. While a server is down, or the
    sink raises OSError, it waits, and resumes from what the sink has stored. `step` is called after each
    batch, and `report` with the count of the events that the batch handed on, and of the remaining records of
    the journal. Raises BadSettings when the servers belong to another system, SinkDamaged for a cursor that
    is not one of this system, Corrupt or Gap when the journal contradicts itself, ends before the cursor, or
    its old records were deleted, and all other errors of the sink.
    """
    identity = await check_system(settings)
    stored, cursor, loaded_for = None, EventCursor(), None

    async def look(reader: JournalReader) -> None:
        nonlocal stored, cursor, loaded_for
        if loaded_for is not reader:
            stored = await sink.load()
            cursor = _cursor(stored, settings, identity.journal if identity else None)
            loaded_for = reader
        stored = await _hand_on(settings, sink, reader, stored, cursor, step, report)

    await poll_journal(settings.brokers, Topics(settings.prefix).journal, look, Trouble(log, "follow"))


def _cursor(stored: str | None, settings: Settings, journal: str | None) -> EventCursor:
    try:
        cursor = EventCursor() if stored is None else EventCursor.decode(stored)
        cursor.require_system(settings.prefix, settings.shards, journal)
    except ValueError as error:
        raise SinkDamaged(
            f"the sink has stored a text that is not a cursor of this system: {error}"
        ) from None
    return cursor


async def _hand_on(
    settings: Settings, sink: EventSink, reader: JournalReader, stored: str | None, cursor: EventCursor,
    step: Callable[[str], None], report: Callable[[int, int], None],
) -> str | None:  # fmt: skip
    """Hands on what is new in each shard; returns the cursor that the sink has stored."""
    ends = await reader.ends(range(settings.shards))

    async def save(group: Group) -> None:
        nonlocal stored
        [(shard, (_, position))] = group.moves.items()
        # The cursor of a program may stand within a run of grabs.
        taken = cursor.seq(shard)
        facts = [fact for fact in single_facts(group.facts) if fact.event.seq > taken]
        cursor.move(shard, position.seq, position)
        if facts:
            after = cursor.encode()
            await sink.apply(facts, stored, after)
            stored = after
            step("sink.applied")
        report(len(facts), _records_left(ends, cursor))

    source, follower = JournalSource(reader, None), Follower(save, BATCH_SEQS)
    for shard, end in ends.items():
        position = cursor.positions().get(shard, Cursor())
        require_journal_end(shard, position, end)
        if end > position.next_offset:
            await follower.follow(source.chunks(shard, Start(position, end)))
    return stored


def _records_left(ends: Mapping[int, int], cursor: EventCursor) -> int:
    positions = cursor.positions()
    return sum(end - positions.get(shard, Cursor()).next_offset for shard, end in ends.items())
