"""The verdict on `grab.events`: it has every event of the journal, with the same bytes, once."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

from grabstream.models.journal import named
from grabstream.ops.verification.checks import Problems, VerificationCheck
from grabstream.projections.cursors import facts_without_transfers, single_facts
from grabstream.settings import Settings
from grabstream.streams.history.sources import JournalSource
from grabstream.streams.journal import JournalReader, JournalRecord, open_reader
from grabstream.streams.projecting.publisher import CURSOR_HEADER
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.stage import CannotGoOn, Patience

NAME: Final = "every event is on grab.events, once"
POLL_SECONDS: Final = 0.25


class PublishedRecord(NamedTuple):
    """A record of `grab.events`: where it is, the id and the text of its event, and whether the publisher may
    resume after it.
    """

    offset: int
    id: str
    line: bytes
    has_cursor: bool


async def published_check(settings: Settings, check: Callable[[], None]) -> VerificationCheck:
    """Waits until the publisher has come to the end of the journal, or has not moved for long, and compares.
    Raises what `check` raises.
    """
    topics, patience = Topics(settings.prefix), Patience()
    async with open_reader(settings.brokers, topics.journal) as journal:
        events = journal.for_topic(topics.events)
        lines = {shard: await journal_events(journal, shard) for shard in range(settings.shards)}
        records = {shard: await published_records(events, shard) for shard in lines}
        while any(not _is_complete(lines[shard], records[shard], shard) for shard in lines):
            check()
            try:
                patience.observe(sum(map(len, records.values())), "")
            except CannotGoOn:
                break  # what is missing is named below
            await asyncio.sleep(POLL_SECONDS)
            for shard, read in records.items():
                read += await published_records(events, shard, read[-1].offset + 1 if read else 0)
    return compare_published(lines, records)


async def journal_events(journal: JournalReader, shard: int) -> list[bytes]:
    """The texts of the single events of a shard, from seq 1 on."""
    source = JournalSource(journal, None, patience_seconds=None, facts_of=facts_without_transfers)
    async with aclosing(source.chunks(shard, await source.start(shard, None))) as chunks:
        return [single.line async for chunk in chunks for single in single_facts(chunk.facts)]


async def published_records(events: JournalReader, shard: int, from_offset: int = 0) -> list[PublishedRecord]:
    """The records of a partition of `grab.events`."""
    async with aclosing(events.read(shard, from_offset, await events.end(shard))) as lists:
        return [_published(record) async for records in lists for record in records]


def _published(record: JournalRecord) -> PublishedRecord:
    headers = named(record.headers)
    id_ = headers.get("ce_id", b"").decode(errors="replace")
    return PublishedRecord(record.offset, id_, record.value, CURSOR_HEADER in headers)


def _is_complete(lines: Sequence[bytes], records: Sequence[PublishedRecord], shard: int) -> bool:
    return {f"{shard}-{seq}" for seq in range(1, len(lines) + 1)} <= {record.id for record in records}


def compare_published(
    lines: Mapping[int, Sequence[bytes]], records: Mapping[int, Sequence[PublishedRecord]]
) -> VerificationCheck:
    """Compares, by shard, the events of the journal with the records of `grab.events`.

    A publisher that starts again repeats what follows a cursor in the topic, up to its end. Such repeats are
    allowed, and noted; every other duplicate event is a problem.
    """
    problems, repeated = Problems(), 0
    for shard, expected in lines.items():
        repeated += _compare_shard(shard, expected, records[shard], problems)
    notes = [f"{repeated:,} repeated by a publisher that started again"] if repeated else []
    return VerificationCheck(NAME, sum(map(len, lines.values())), "events", problems.lines, notes)


def _compare_shard(
    shard: int, expected: Sequence[bytes], records: Sequence[PublishedRecord], problems: Problems
) -> int:
    """Adds the problems of a shard; returns how many events are repeated as they may be."""
    seq_of = {f"{shard}-{seq}": seq for seq in range(1, len(expected) + 1)}
    order = _Order()
    for record in records:
        seq = seq_of.get(record.id)
        if seq is None:
            problems.add(
                f"shard {shard}: {record.id or 'a record without id'}, at offset {record.offset} of "
                "grab.events, is not in the journal"
            )
            continue
        if record.line != expected[seq - 1]:
            problems.add(f"shard {shard}: {record.id} has another text on grab.events than in the journal")
        order.take(seq, record.has_cursor)
    order.end()
    for seq in range(1, len(expected) + 1):
        if seq not in order.seen:
            problems.add(f"shard {shard}: {shard}-{seq} is in the journal, and not on grab.events")
    for seq in sorted(order.doubles):
        problems.add(f"shard {shard}: {shard}-{seq} is on grab.events more than once")
    for seq in sorted(order.early):
        problems.add(f"shard {shard}: {shard}-{seq} is on grab.events after later events")
    return order.repeated


class _Order:
    """In which order the events of a shard were published."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        #: Published again although no publisher that starts again would have done so.
        self.doubles: set[int] = set()
        #: Published for the first time after later ones.
        self.early: set[int] = set()
        self.repeated = 0
        self._cursors = {0}
        self._highest = self._at = 0
        #: What a publisher has repeated that has not come to the end of the topic yet.
        self._repeating: list[int] = []

    def take(self, seq: int, has_cursor: bool) -> None:
        """Takes the next record."""
        if seq != self._at + 1:
            self._jump(seq)
        else:
            self._at = seq
            self._repeating += [seq] if seq <= self._highest else []
        if self._at >= self._highest:
            self.repeated += len(self._repeating)
            self._repeating = []
        self._highest = max(self._highest, self._at)
        self.seen.add(seq)
        if has_cursor:
            self._cursors.add(seq)

    def _jump(self, seq: int) -> None:
        self.end()
        if seq > self._highest:
            self._at = seq
        elif seq not in self.seen:
            self.early.add(seq)
        elif seq - 1 in self._cursors:
            self._at, self._repeating = seq, [seq]
        else:
            self.doubles.add(seq)

    def end(self) -> None:
        """No more records: who repeats does not stop before the end of the topic."""
        self.doubles.update(self._repeating)
        self._at, self._repeating = self._highest, []
