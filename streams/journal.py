"""Reading one partition of the journal between two offsets, without a consumer group."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.journal import Cursor, Headers
from grabstream.streams.clients import started

FETCH_WAIT_MS: Final = 500
LOOK_BACK_RECORDS: Final = 16


class Record(NamedTuple):
    """A journal record as Kafka has it."""

    shard: int
    offset: int
    headers: Headers
    value: bytes


class JournalReader:
    """Reads partitions of a journal without a consumer group; the caller keeps the positions."""

    def __init__(self, consumer: AIOKafkaConsumer, topic: str) -> None:
        self._consumer = consumer
        self._topic = topic

    async def end(self, shard: int) -> int:
        """The offset after the last record."""
        partition = TopicPartition(self._topic, shard)
        return int((await self._consumer.end_offsets([partition]))[partition])

    async def beginning(self, shard: int) -> int:
        """The offset of the first record that still exists."""
        partition = TopicPartition(self._topic, shard)
        return int((await self._consumer.beginning_offsets([partition]))[partition])

    async def last_seq(self, shard: int) -> int:
        """The highest seq among the newest blocks; 0 if the partition has markers only. Includes blocks that
        do not count.
        """
        beginning, start = await self.beginning(shard), await self.end(shard)
        last, look_back = 0, LOOK_BACK_RECORDS
        while not last and start > beginning:
            end, start = start, max(start - look_back, beginning)
            async for records in self.read(shard, start, end):
                last = max(last, *(last_seq_of(record.headers) for record in records))
            look_back *= 4
        return last

    async def seq_before(self, shard: int, cursor: Cursor) -> int | None:
        """The last seq that the cursor's owner wrote before the cursor; 0 if that is its marker only. All
        these blocks count.

        None if there is no record of that owner: because owner ids are random, the cursor is of another
        journal, or beyond the end.
        """
        beginning, start = await self.beginning(shard), cursor.next_offset
        if start > await self.end(shard):
            return None
        owner, look_back = cursor.owner.encode(), LOOK_BACK_RECORDS
        while start > beginning:
            end, start = start, max(start - look_back, beginning)
            seqs = [
                last_seq_of(record.headers)
                async for records in self.read(shard, start, end)
                for record in records
                if dict(record.headers).get("owner") == owner
            ]
            if seqs:
                return max(seqs)
            look_back *= 4
        return None

    async def read(self, shard: int, from_offset: int, to_offset: int) -> AsyncGenerator[list[Record], None]:
        """The records with from_offset ≤ offset < to_offset, in lists as they arrive; raises if they no
        longer exist.
        """
        partition = TopicPartition(self._topic, shard)
        if from_offset >= to_offset:
            return
        self._consumer.assign([partition])
        self._consumer.seek(partition, from_offset)
        while from_offset < to_offset:
            fetched = await self._consumer.getmany(partition, timeout_ms=FETCH_WAIT_MS)
            records = [
                Record(shard, record.offset, record.headers, record.value or b"")
                for record in fetched.get(partition, [])
                if record.offset < to_offset
            ]
            if records:
                from_offset = records[-1].offset + 1
                yield records


def last_seq_of(headers: Headers) -> int:
    """The last seq in a record's headers; 0 for a marker, and for a record that is not a block."""
    named = dict(headers)
    try:
        count = int(named["count"])
        return int(named["first_seq"]) + count - 1 if count else 0
    except (KeyError, ValueError):
        return 0


@asynccontextmanager
async def open_reader(bootstrap: str, topic: str) -> AsyncIterator[JournalReader]:
    """A reader; its consumer is closed at the end."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        auto_offset_reset="none",
        enable_auto_commit=False,
        max_partition_fetch_bytes=RECORD_BYTES_MAX,
        # Reads have a known end; a fetch that waited there for more would delay the fetch of the next
        # partition.
        fetch_max_wait_ms=10,
        # A broker that dies in the middle of an answer is noticed after this time, not after the client's 40
        # s.
        request_timeout_ms=8_000,
    )
    async with started(consumer):
        yield JournalReader(consumer, topic)
