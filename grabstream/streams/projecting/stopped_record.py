"""The journal record at which a projection has stopped: its contents, and where the history continues after
it.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

import msgspec

from grabstream.models.journal import Block, Corrupt, Cursor, Gap
from grabstream.models.runs import AnyLine, decode_line
from grabstream.projections.cursors import are_consecutive
from grabstream.streams.journal import JournalReader, JournalRecord


class CannotSetAside(Exception):
    """There is no record to set aside; the text states the reason and the fix."""


class StoppedRecord(NamedTuple):
    """A record that a projection could not apply: the cursors before and after it, its lines, and their
    events (None for a line that cannot be decoded).

    The events between the cursors are those that the projection will lack; none if the record does not belong
    to the history.
    """

    record: JournalRecord
    before: Cursor
    after: Cursor
    lines: tuple[bytes, ...]
    events: tuple[AnyLine | None, ...]

    @property
    def event_count(self) -> int:
        """The number of events that the projection will lack."""
        return self.after.seq - self.before.seq

    @property
    def offers(self) -> list[str]:
        """The offers of the events that can be read."""
        return sorted({event.offer for event in self.events if event is not None}) if self.event_count else []

    @property
    def readable(self) -> bool:
        """Whether every event that the projection will lack can be decoded, and is in this record."""
        events = [event for event in self.events if event is not None]
        return are_consecutive(self.record.shard, self.before.seq, events) and (
            (events[-1].last_seq if events else self.before.seq) == self.after.seq
        )


async def find_stopped_record(reader: JournalReader, shard: int, cursor: Cursor) -> StoppedRecord:
    """The first record after a cursor that adds events or cannot be applied; raises CannotSetAside."""
    end, before = await reader.end(shard), cursor
    async with aclosing(_records(reader, shard, cursor.next_offset, end)) as records:
        async for record in records:
            try:
                after, accepted = cursor.feed(record.offset, reader.block(record))
            except Gap as gap:
                raise CannotSetAside(
                    f"events are missing from the journal before this record ({gap}): nothing can be set "
                    "aside for them. "
                    "Restore the journal from the audit trail, then let the projection try again"
                ) from None
            except Corrupt as corrupt:
                after = await _after_corrupt(reader, cursor, record, end, str(corrupt))
                return _stopped_record(record, before, after, tuple(record.value.split(b"\n")))
            if accepted:
                return _stopped_record(record, before, after, tuple(event.line for event in accepted))
            cursor = after
    raise CannotSetAside("the journal has no event after the projection's cursor: let it try again")


async def _records(
    reader: JournalReader, shard: int, from_offset: int, to_offset: int
) -> AsyncGenerator[JournalRecord, None]:
    async with aclosing(reader.read(shard, from_offset, to_offset)) as fetched:
        async for records in fetched:
            for record in records:
                yield record


async def _after_corrupt(
    reader: JournalReader, cursor: Cursor, record: JournalRecord, end: int, why: str
) -> Cursor:
    """The cursor after a record that contradicts itself. The record itself is not usable, but the next block
    that counts names the hash that it follows.
    """
    probe = cursor._replace(next_offset=record.offset + 1)
    async with aclosing(_records(reader, record.shard, record.offset + 1, end)) as records:
        async for later in records:
            try:
                block = reader.block(later)
            except Corrupt:
                continue
            if probe.ignores(block):
                continue
            if block.count == 0:
                if block.term > probe.term:
                    probe = probe._replace(term=block.term, owner=block.owner)
            elif (block.term, block.owner) == (probe.term, probe.owner):
                return _follows(cursor, record, block)
    raise CannotSetAside(
        f"the record at offset {record.offset} contradicts itself ({why}), and no later block of "
        "the shard's owner shows yet how the history continues: try again after the next event of the shard"
    )


def _follows(cursor: Cursor, record: JournalRecord, block: Block) -> Cursor:
    after = cursor._replace(next_offset=record.offset + 1)
    if block.first_seq <= cursor.seq + 1:
        # No events are missing between the cursor and the next block: the record is not part of the history.
        return after
    return after._replace(seq=block.first_seq - 1, head=block.prev)


def _stopped_record(
    record: JournalRecord, before: Cursor, after: Cursor, lines: tuple[bytes, ...]
) -> StoppedRecord:
    return StoppedRecord(record, before, after, lines, tuple(map(_event_of, lines)))


def _event_of(line: bytes) -> AnyLine | None:
    try:
        return decode_line(line)
    except msgspec.DecodeError:
        return None
