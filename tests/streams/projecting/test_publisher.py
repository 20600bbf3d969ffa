"""The cursor of the publisher is in a topic to which others may write, and from which records may be
deleted.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from psycopg import AsyncConnection

from grabstream.models.calendar import utc_text
from grabstream.models.events import EventDecoder
from grabstream.models.journal import GENESIS, Cursor, chain
from grabstream.projections.cursors import Fact
from grabstream.projections.database.locks import is_held
from grabstream.settings import Settings
from grabstream.streams import journal as journal_module
from grabstream.streams.clients import started
from grabstream.streams.journal import JournalReader, JournalRecord, open_reader
from grabstream.streams.projecting import publisher
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.projecting.publisher import (
    CURSOR_HEADER,
    PublishedOffsets,
    encode_cursor,
    event_headers,
    event_source,
    held_lock,
    newest_cursor,
)
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.contract import SCHEMAS, problems
from tests.models.old_events import UPCASTERS, as_it_was
from tests.streams.deciding.topic_records import read_all
from tests.support.projecting import (
    EVENTS,
    LINES,
    SHARD,
    JournalWriter,
    catching_up,
    granted,
    journal,  # noqa: F401 - a fixture
    opened,
    rows,
)
from tests.support.runs import as_singles

HASHES = [GENESIS, *chain(GENESIS, LINES)]


class Events:
    """The topic of events, with readers of it and of the journal."""

    def __init__(self, system: Settings, producer: AIOKafkaProducer, reader: JournalReader) -> None:
        self.topic, self.source = Topics(system.prefix).events, event_source(system.prefix)
        self.journal, self.reader = reader, reader.for_topic(self.topic)
        self._system, self._producer = system, producer

    async def write(self, value: bytes, source: str = "", event_id: str = "") -> None:
        """Writes a record with a cursor; as the publisher does, unless source or id are given."""
        headers = [
            (CURSOR_HEADER, value),
            ("ce_source", (source or self.source).encode()),
            ("ce_id", (event_id or f"{SHARD}-").encode() + (b"" if event_id else value.partition(b",")[0])),
        ]
        await self._producer.send_and_wait(self.topic, b"{}", partition=SHARD, headers=headers)

    async def write_transaction(self) -> None:
        """Another program's transaction: its end is an offset without a record."""
        name = secrets.token_hex(4)
        other = AIOKafkaProducer(bootstrap_servers=self._system.kafka, transactional_id=name)
        async with started(other), other.transaction():
            await other.send_and_wait(self.topic, b"of another program", partition=SHARD)

    async def delete(self, before_offset: int) -> None:
        """Deletes the first records, as retention does."""
        async with started(AIOKafkaAdminClient(bootstrap_servers=self._system.kafka)) as client:
            await client.delete_records({TopicPartition(self.topic, SHARD): RecordsToDelete(before_offset)})

    async def publish(self, end: int) -> None:
        """Runs a publisher until the topic has `end` offsets."""
        async with catching_up(self._system, "events"):

            async def is_published() -> bool:
                return await self.reader.end(SHARD) >= end

            await until(is_published, 60, f"{end} records")

    async def newest(self) -> Cursor:
        """The cursor from which the publisher resumes."""
        async with asyncio.timeout(90):
            return await newest_cursor(self.reader, SHARD, self.source, self.journal)


@pytest.fixture
async def events(system: Settings, journal: JournalWriter) -> AsyncIterator[Events]:
    async with open_reader(system.kafka, Topics(system.prefix).journal) as reader:
        yield Events(system, journal._producer, reader)


async def _ten(journal: JournalWriter) -> Cursor:
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 10)
    return Cursor(10, HASHES[10], 2, 1, "a")


@pytest.mark.long
async def test_a_cursor_that_the_publisher_did_not_write_is_skipped(
    events: Events,
    journal: JournalWriter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publisher, "LOOK_BACK_RECORDS", 4)
    ten = await _ten(journal)
    five = ten._replace(seq=5, head=HASHES[5])  # no block ends with this event
    await events.write(encode_cursor(ten))
    assert await events.newest() == ten
    zeros = b"00" * 32
    for value in (
        b"", b"1", b"\xff", b"1,xyz,1,1,a", b"9" * 5_000 + b",%b,1,1,a" % zeros, b"10,%b,-5,1,a" % zeros,
        b"-1,%b,1,1,a" % zeros, b"0,%b,1,1,a" % zeros, b"0,%b,99999999999999999999,1,a" % zeros,
        b"10,,2,1,a", b"10,%b,2,1,a" % (b"00" * 31), b"10,%b,2,0,a" % HASHES[10].hex().encode(),
        b"10,%b,2,1," % HASHES[10].hex().encode(), b" 10,%b,2,1,a" % HASHES[10].hex().encode(),
        b"5,%b,1,1,a" % (b"11" * 32),
        *map(encode_cursor, (
            five, ten._replace(next_offset=1), ten._replace(next_offset=3),
            ten._replace(next_offset=2**63 - 1), ten._replace(term=2), ten._replace(owner="b"),
            ten._replace(head=HASHES[9]), ten._replace(seq=9),
        )),
    ):  # fmt: skip
        await events.write(value)
    await events.write(encode_cursor(ten), source="grabstream/other")
    await events.write(encode_cursor(ten), event_id=f"{SHARD}-9")
    await events.write(encode_cursor(ten), event_id=f"{SHARD + 1}-10")
    assert await events.newest() == ten


@pytest.mark.long
async def test_a_cursor_after_markers_is_found(events: Events, journal: JournalWriter) -> None:
    ten = await _ten(journal)
    await journal.block(LINES, 11, 12, owner="zombie")  # does not count
    for term, owner in ((3, "c"), (3, "late"), (2, "b")):
        await journal.marker(term, owner)
    for number in range(20):
        await journal.marker(1, f"old-{number}")
    after = ten._replace(next_offset=26, term=3, owner="c")
    await events.write(encode_cursor(after))
    await events.write(encode_cursor(after._replace(owner="late")))
    await events.write(encode_cursor(after._replace(term=2, owner="b")))
    assert await events.newest() == after


async def test_a_journal_of_another_history_is_not_published_from_its_beginning(
    events: Events,
    journal: JournalWriter,
) -> None:
    """The newest cursor is taken, and the journal's records contradict it."""
    ten = await _ten(journal)
    for seq in (5, 10):
        await events.write(encode_cursor(ten._replace(seq=seq, head=b"\x11" * 32)))
    assert await events.newest() == ten._replace(head=b"\x11" * 32)


@pytest.mark.long
@pytest.mark.parametrize("what", ["transaction", "some deleted", "all deleted"])
async def test_offsets_without_records_hide_no_unpublished_event(
    what: str,
    system: Settings,
    events: Events,
    journal: JournalWriter,
) -> None:
    ten = await _ten(journal)
    for _ in range(4):
        await events.write(encode_cursor(ten))
    if what == "transaction":
        await events.write_transaction()
    else:
        await events.delete({"some deleted": 3, "all deleted": 4}[what])
    # Without any cursor the publisher starts over: events may be repeated, none is missing.
    assert await events.newest() == (Cursor() if what == "all deleted" else ten)
    await journal.block(LINES, 11, 20)
    ends = {SHARD: 3}
    published = PublishedOffsets(events.journal, events.reader, events.source)
    async with await open_books(system) as connection, asyncio.timeout(90):
        assert await published.load(connection, ends) == ends  # it may grow
        # It is unknown what was published: that is no reason to restart anything.
        assert await published.load(connection, ends) == {SHARD: 3 if what == "all deleted" else 2}


@pytest.mark.long
async def test_records_of_another_program_hide_no_unpublished_event(
    system: Settings,
    events: Events,
    journal: JournalWriter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program writes to the topic all the time, while the publisher publishes nothing."""
    monkeypatch.setattr(publisher, "LAST_RECORDS", 2)
    ten = await _ten(journal)
    await events.write(encode_cursor(ten))
    await journal.block(LINES, 11, 20)
    ends = {SHARD: 3}
    published = PublishedOffsets(events.journal, events.reader, events.source)

    async def load(connection: AsyncConnection[Any]) -> int:
        for _ in range(3):
            await events.write(b"1,2,3", source="another/program", event_id="7")
        return (await published.load(connection, ends))[SHARD]

    async with await open_books(system) as connection, asyncio.timeout(90):
        assert await load(connection) == 3  # it may grow
        assert [await load(connection) for _ in range(3)] == [2, 2, 2]
        await events.write(encode_cursor(ten._replace(seq=20, head=HASHES[20], next_offset=3)))
        assert await load(connection) == 3  # it has grown
        assert [await load(connection) for _ in range(2)] == [3, 3]


class Noting(JournalReader):
    """Notes the offsets from which it reads."""

    def __init__(self, reader: JournalReader) -> None:
        super().__init__(reader._consumer, reader._topic)
        self.read_from: list[int] = []

    async def read(
        self, shard: int, from_offset: int, to_offset: int
    ) -> AsyncGenerator[list[JournalRecord], None]:
        self.read_from.append(from_offset)
        async with aclosing(super().read(shard, from_offset, to_offset)) as lists:
            async for records in lists:
                yield records


async def test_the_watchdog_reads_a_tail_of_markers_once(
    system: Settings,
    events: Events,
    journal: JournalWriter,
) -> None:
    await events.write(encode_cursor(await _ten(journal)))
    noting = Noting(events.journal)
    published = PublishedOffsets(noting, events.reader, events.source)

    async def load(connection: AsyncConnection[Any], end: int) -> list[int]:
        noting.read_from.clear()
        offset = (await published.load(connection, {SHARD: end}))[SHARD]
        return [offset, *noting.read_from]

    async with await open_books(system) as connection:
        assert await load(connection, 2) == [2]
        assert await load(connection, 2) == [2, 0]
        for end in (3, 4, 5):
            await journal.marker(1, "old")
            assert await load(connection, end) == [end, end - 1]
            assert await load(connection, end) == [end]
        await journal.block(LINES, 11, 20)
        assert await load(connection, 6) == [5, 5]
        await journal.marker(1, "old")
        assert await load(connection, 7) == [5, 5]


@pytest.mark.long
async def test_a_read_of_what_never_comes_ends(
    events: Events,
    journal: JournalWriter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "SILENT_SECONDS_MAX", 1.0)
    await _ten(journal)
    with pytest.raises(TimeoutError, match="nothing arrives from offset 2 on"):
        async with asyncio.timeout(90):
            async for _ in events.journal.read(SHARD, 0, 3):
                pass


async def test_a_publisher_starts_after_foreign_and_deleted_records(
    system: Settings,
    events: Events,
    journal: JournalWriter,
) -> None:
    """One record of the worst kind after what was published, and the first events deleted."""
    await _ten(journal)
    await events.publish(10)
    await events.write(b"5,%b,1,1,a" % (b"11" * 32))
    await events.write_transaction()
    await events.delete(5)
    await journal.block(LINES, 11, 20)
    await events.publish(13 + 10)
    assert await events.reader.end(SHARD) == 13 + 10, "events were published again"
    assert await rows(system, "SELECT count(*) FROM stopped_shards") == [(0,)]


async def test_records_name_the_schema_of_their_values(
    system: Settings,
    events: Events,
    journal: JournalWriter,
) -> None:
    """Also after records of release 0.1, which have no such header."""
    await events.write(encode_cursor(await _ten(journal)))
    await journal.block(LINES, 11, 20)
    await events.publish(11)
    read = [record async for records in events.reader.read(SHARD, 0, 11) for record in records]
    assert [record.value for record in read[1:]] == EVENTS[10:20], "only what was not published yet"
    assert "ce_dataschema" not in dict(read[0].headers)
    for record in read[1:]:
        headers = {name: value.decode() for name, value in record.headers}
        event = json.loads(record.value)
        name = f"events/{event['type']}.v{event['v']}"
        assert headers["ce_dataschema"] == json.loads((SCHEMAS / f"{name}.json").read_text())["$id"]
        assert problems(name, event) == []


def test_an_event_of_an_older_version_names_the_schema_in_which_it_was_written() -> None:
    decoder = EventDecoder(UPCASTERS)
    old, new = as_it_was(LINES[0]), LINES[0]
    assert old != new
    named = {
        line: dict(event_headers(Fact(line, b"", decoder.decode(line), ()), b"s"))["ce_dataschema"]
        for line in (old, new, new.replace(b'"v":1', b'"v": 1'))
    }
    assert list(named.values()) == [
        b"urn:grabstream:events:offer.opened.v-1",
        b"urn:grabstream:events:offer.opened.v1",
        b"urn:grabstream:events:offer.opened.v1",
    ]


@pytest.mark.long
async def test_markers_after_the_last_event_do_not_hide_that_it_is_published(
    system: Settings,
    events: Events,
    journal: JournalWriter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A relay that took the shard over again and again, while the publisher was not there, left more markers
    than are read to find the event of a cursor.
    """
    monkeypatch.setattr(journal_module, "CONFIRM_RECORDS_MAX", 16)
    await _ten(journal)
    await events.publish(10)
    await journal.block(LINES, 11, 20)
    for number in range(40):
        await journal.marker(1, f"old-{number}")
    await events.publish(20)
    assert (await events.newest()).seq == 20
    ends = {SHARD: await events.journal.end(SHARD)}
    published = PublishedOffsets(events.journal, events.reader, events.source)
    async with await open_books(system) as connection:
        await published.load(connection, ends)
        assert await published.load(connection, ends) == ends


async def test_events_of_a_clock_that_was_ahead_are_published(
    system: Settings, events: Events, journal: JournalWriter
) -> None:
    """Brokers refuse records of a time more than an hour ahead, and a shard never goes back in time: all of
    its events, and those of the shards that are published together with it, would wait until then.
    """
    now_ms = time.time_ns() // 1_000_000
    ahead_ms = now_ms + 2 * 3_600_000
    lines = [opened("e", 1), granted("e", 2).replace(b'"at":2,', b'"at":%d,' % ahead_ms)]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 2)
    await events.publish(2)
    [before, ahead] = await read_all(system, events.topic)
    assert json.loads(ahead.value)["at"] == ahead_ms
    assert before.timestamp == json.loads(before.value)["at"]
    assert now_ms <= ahead.timestamp <= time.time_ns() // 1_000_000
    headers = {name: value.decode() for name, value in ahead.headers}
    assert headers["ce_time"] == utc_text(ahead_ms)


#: A shard other than SHARD.
OTHER = 1


async def _refuse_ahead(system: Settings, topic: str, ahead_ms: int) -> None:
    """Makes the brokers refuse records of a topic whose time is further ahead."""
    change = ConfigResource(
        ConfigResourceType.TOPIC, topic, {"message.timestamp.after.max.ms": str(ahead_ms)}
    )
    async with started(AIOKafkaAdminClient(bootstrap_servers=system.kafka)) as client:
        await client.alter_configs([change])


async def test_a_shard_whose_records_are_refused_holds_no_other(
    system: Settings, events: Events, journal: JournalWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are written in one group. The shard that is refused is named, and continues when it is taken;
    until then no watchdog takes it for stalled.
    """
    ahead_ms = time.time_ns() // 1_000_000 + 20 * 60_000  # the publisher leaves this time as it is
    await _refuse_ahead(system, events.topic, 60_000)
    other = JournalWriter(system, journal._producer, OTHER)
    of_other = [line.replace(b'"shard":%d' % SHARD, b'"shard":%d' % OTHER) for line in LINES]
    ahead = [LINES[0], LINES[1].replace(b'"at":2,', b'"at":%d,' % ahead_ms), LINES[2]]
    await journal.marker(1, "a")
    await journal.block(ahead, 1, 3)
    await other.marker(1, "a")
    await other.block(of_other, 1, 10)
    async with catching_up(system, "events") as [projector], await open_books(system) as connection:
        await projector.put(CatchUp(OTHER))

        async def has(shard: int, seq: int) -> bool:
            return await events.reader.end(shard) >= seq

        await until(partial(has, OTHER, 10), 20, "the events of the other shard")
        await until(partial(is_held, connection, held_lock(system.schema_, SHARD)), 20, "that it is held")
        await other.block(of_other, 11, 20)
        await projector.put(other.records[-1])
        await until(partial(has, OTHER, 20), 20, "further events of the other shard")
        assert not await has(SHARD, 3)
        warnings = {record.getMessage() for record in caplog.records if record.levelname == "WARNING"}
        [refused] = [warning for warning in warnings if "InvalidTimestamp" in warning]
        assert refused.startswith(f"events, shard {SHARD}: ")
        assert projector.measures.failures

        await _refuse_ahead(system, events.topic, 24 * 3_600_000)
        await until(partial(has, SHARD, 3), 30, "the events that were refused")

        async def is_free() -> bool:
            return not await is_held(connection, held_lock(system.schema_, SHARD))

        await until(is_free, 20, "that it is no longer held")
        await journal.block([*ahead, *LINES[3:10]], 4, 10)
        await projector.put(journal.records[-1])
        await until(partial(has, SHARD, 10), 20, "what follows")
    for shard, lines in ((SHARD, [*ahead, *LINES[3:10]]), (OTHER, of_other[:20])):
        read = events.reader.read(shard, 0, await events.reader.end(shard))
        values = [record.value async for records in read for record in records]
        # A refused request may have taken the events before the refused one, and they are written again.
        assert list(dict.fromkeys(values)) == as_singles(lines)
