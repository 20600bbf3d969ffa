"""Batches of records that another client may have made, read from a real broker and byte by byte."""

import re
import secrets
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest
from aiokafka import ConsumerRecord, TopicPartition
from aiokafka.admin import NewTopic
from aiokafka.consumer import fetcher
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

import grabstream
from grabstream.settings import Settings
from grabstream.streams.journal import JournalRecord, open_reader
from grabstream.streams.kafka_internals import ConsumedRecord, Records
from grabstream.streams.record_batches import read_records
from grabstream.streams.topics import make_topics
from tests.support.raw_batches import RawRecord, produce_batch, raw_batch

NOW_MS: Final = 1_800_000_000_000

#: By name: the records of a batch, and what a reader gets: (headers, value) of each.
ODD: Final[dict[str, tuple[list[RawRecord], list[Any]]]] = {
    "a name that is not UTF-8": (
        [RawRecord(b"one", [(b"\xff\xfe", b"x"), (b"term", b"1")]), RawRecord(b"two")],
        [((("\\xff\\xfe", b"x"), ("term", b"1")), b"one"), ((), b"two")],
    ),
    "a name without letters, and one with a zero byte": (
        [RawRecord(b"one", [(b"", None), (b"a\0b", b"x")])],
        [((("", None), ("a\0b", b"x")), b"one")],
    ),
    "attributes": ([RawRecord(b"one", key=b"k", attributes=0xFF)], [((), b"one")]),
    "an offset far ahead": ([RawRecord(b"one", offset_delta=10**6)], [((), b"one")]),
    "an offset before": ([RawRecord(b"one", offset_delta=-5)], [((), b"one")]),
    "one offset twice": (
        [RawRecord(b"one", offset_delta=0), RawRecord(b"two", offset_delta=0)],
        [((), b"one"), ((), b"two")],
    ),
    "offsets in another order": (
        [RawRecord(b"one", offset_delta=1), RawRecord(b"two", offset_delta=0)],
        [((), b"one"), ((), b"two")],
    ),
    "a time before all times": ([RawRecord(b"one", timestamp_delta=-(2**62))], [((), b"one")]),
    "no value": ([RawRecord(None)], [((), b"")]),
}


async def test_no_batch_that_a_broker_stores_stops_a_reader_or_moves_it_away(servers: Settings) -> None:
    topic = f"odd-{secrets.token_hex(6)}"
    await make_topics(servers.kafka, [NewTopic(topic, 1, 1)])
    now_ms = round(time.time() * 1_000)
    for records, _ in ODD.values():
        await produce_batch(servers.kafka, topic, 0, raw_batch(records, now_ms))
    await produce_batch(servers.kafka, topic, 0, raw_batch([RawRecord(b"last")], now_ms))
    async with open_reader(servers.kafka, topic) as reader:
        end = await reader.end(0)
        read: list[JournalRecord] = [record async for records in reader.read(0, 0, end) for record in records]
    wanted = [one for _, wanted in ODD.values() for one in wanted]
    assert [(record.headers, record.value) for record in read] == [*wanted, ((), b"last")]
    assert [record.offset for record in read] == list(range(end))


def _read(data: bytes) -> list[Any]:
    records, batches = [], Records(data)
    while batches.has_next():
        batch = batches.next_batch()
        assert batch.validate_crc()
        records += list(batch)
    return records


def _batch(body: bytes, count: int, attributes: int = 0) -> bytes:
    """A batch with these bytes where its records should be."""
    return raw_batch([RawRecord(b"")] * count, NOW_MS, 40, attributes, data=body)


@pytest.mark.parametrize("attributes", [0, 1, 2, 3, 4, 7])
@given(body=st.binary(min_size=1, max_size=64), count=st.integers(1, 3))
def test_a_batch_that_cannot_be_read_is_one_record_with_its_bytes(
    attributes: int, body: bytes, count: int
) -> None:
    """Also one that is compressed: by a codec that is not there, or of other bytes than it writes."""
    data = _batch(body, count, attributes)
    read = _read(data + raw_batch([RawRecord(b"next")], NOW_MS, 40 + count))
    assert read[-1].value == b"next"
    assert read[-1].offset == 40 + count
    if len(read) == 2 and read[0].value == data:
        assert (read[0].offset, read[0].key, list(read[0].headers)) == (40, None, [])
    else:
        assert [record.offset for record in read[:-1]] == sorted({record.offset for record in read[:-1]})
        assert all(40 <= record.offset < 40 + count for record in read[:-1])


optional_bytes = st.none() | st.binary(max_size=200)


@given(
    st.lists(
        st.tuples(
            optional_bytes,
            optional_bytes,
            st.lists(st.tuples(st.text(max_size=5), optional_bytes), max_size=3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_a_library_writes_is_read_the_same(given_: list[Any]) -> None:
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, 0, 2**20)
    for offset, (key, value, headers) in enumerate(given_):
        assert builder.append(offset, NOW_MS + offset, key, value, headers)
    data = bytes(builder.build())
    wanted = [
        (offset, NOW_MS + offset, 0, key, value, headers)
        for offset, (key, value, headers) in enumerate(given_)
    ]
    for records in (read_records(data), _read(data)):
        assert [
            (one.offset, one.timestamp, one.timestamp_type, one.key, one.value, list(one.headers))
            for one in records
        ] == wanted


def test_every_consumer_reads_so() -> None:
    """Every consumer takes its options from `brokers`, and so gets the reading. A service's client does not:
    the aiokafka of that process is not ours to change.
    """
    root = Path(grabstream.__file__).parent
    makers = {
        path.relative_to(root).as_posix(): options
        for folder in root.iterdir()
        if folder.is_dir()
        for path in folder.rglob("*.py")
        for options in re.findall(r"AIOKafkaConsumer\(((?:.|\n){0,100})", path.read_text())
    }
    assert len(makers) >= 7
    assert [path for path, options in makers.items() if "**brokers.at(" not in options] == [
        "client/over_kafka.py"
    ]


def test_records_have_the_fields_of_the_library_in_its_order() -> None:
    assert [field.name for field in fields(ConsumerRecord)] == list(ConsumedRecord.__struct_fields__)
    part = raw_batch([RawRecord(b"value", ((b"name", b"text"),), b"key")], 1)
    [record] = fetcher.PartitionRecords(
        TopicPartition("topic", 3), fetcher.MemoryRecords(part), [], 0, None, None, True, 1
    )
    assert isinstance(record, ConsumedRecord)
    assert (record.topic, record.partition, record.offset, record.key, record.value, record.headers) == (
        "topic", 3, 0, b"key", b"value", (("name", b"text"),),
    )  # fmt: skip
