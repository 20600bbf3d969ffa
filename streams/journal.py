"""Reading one partition of the journal between two offsets, without a consumer group."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.journal import Cursor, Headers
from grabstream.streams.clients import FETCHER_IDLE_MS, started

FETCH_WAIT_MS: Final = 500
LOOK_BACK_RECORDS: Final = 16
#: The most records that `confirms` reads at once; it reads as many in ever larger pieces up to this size.
CONFIRM_RECORDS_MAX: Final = 1_024
#: How long a read waits while nothing arrives.
SILENT_SECONDS_MAX: Final = 60.0


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

    def of_topic(self, topic: str) -> "JournalReader":
        """A reader of another topic with the same consumer; only one of them can read at a time."""
        return JournalReader(self._consumer, topic)

    async def end(self, shard: int) -> int:
        """The offset after the last record."""
        return (await self.ends([shard]))[shard]

    async def ends(self, shards: Iterable[int]) -> dict[int, int]:
        """The offset after the last record of each shard, in one request to each broker."""
        found = await self._consumer.end_offsets([TopicPartition(self._topic, shard) for shard in shards])
        return {partition.partition: int(offset) for partition, offset in found.items()}

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

    async def confirms(self, shard: int, cursor: Cursor) -> bool:
        """Whether the journal contains the event of the cursor's seq with the cursor's hash, and whether the
        cursor's term and owner are in force at its offset.

        Looks for the event's block among the records directly before the offset, not in the whole journal.
        """
        beginning, start = await self.beginning(shard), cursor.next_offset
        if start > await self.end(shard):
            return False
        look_back, newest = LOOK_BACK_RECORDS, (0, b"")
        while start > beginning and look_back <= CONFIRM_RECORDS_MAX:
            end, start = start, max(start - look_back, beginning)
            read = [record.headers async for records in self.read(shard, start, end) for record in records]
            for headers in reversed(read):
                named = dict(headers)
                term = _term_of(headers)
                if named.get("count") == b"0":
                    # The first marker of the highest term counts: it is the last one on the way back.
                    newest = max((term, named.get("owner", b"")), newest, key=lambda marker: marker[0])
                elif last_seq_of(headers) == cursor.seq and named.get("head") == cursor.head.hex().encode():
                    in_force = newest if newest[0] > term else (term, named.get("owner"))
                    if in_force == (cursor.term, cursor.owner.encode()):
                        return True
            look_back *= 4
        return False

    async def read(self, shard: int, from_offset: int, to_offset: int) -> AsyncGenerator[list[Record], None]:
        """The records with from_offset ≤ offset < to_offset, in lists as they arrive; raises if they no
        longer exist, or TimeoutError if nothing arrives for SILENT_SECONDS_MAX.

        Offsets may be without a record: those of a transaction's end, and of records that were compacted. So
        the read ends when the consumer has passed the last offset, not with the last record.
        """
        partition = TopicPartition(self._topic, shard)
        if from_offset >= to_offset:
            return
        self._consumer.assign([partition])
        self._consumer.seek(partition, from_offset)
        clock = asyncio.get_running_loop().time
        position, moved_at = from_offset, clock()
        try:
            while position < to_offset:
                fetched = await self._consumer.getmany(partition, timeout_ms=FETCH_WAIT_MS)
                records = [
                    Record(shard, record.offset, record.headers, record.value or b"")
                    for record in fetched.get(partition, [])
                    if record.offset < to_offset
                ]
                before, position = position, await self._consumer.position(partition)
                if position >= to_offset:
                    # The consumer would go on to fetch what comes next, a hundred times a second, for as long
                    # as the caller takes with the last records.
                    self._consumer.pause(partition)
                if records:
                    yield records
                if position != before:
                    moved_at = clock()
                elif clock() - moved_at > SILENT_SECONDS_MAX:
                    raise TimeoutError(
                        f"{self._topic}, shard {shard}: nothing arrives from offset {position} on, before "
                        f"offset {to_offset}"
                    )
        finally:
            if partition in self._consumer.assignment():
                self._consumer.pause(partition)


def last_seq_of(headers: Headers) -> int:
    """The last seq in a record's headers; 0 for a marker, and for a record that is not a block."""
    named = dict(headers)
    try:
        count = int(named["count"])
        return int(named["first_seq"]) + int(named.get("seqs", count)) - 1 if count else 0
    except (KeyError, ValueError):
        return 0


def _term_of(headers: Headers) -> int:
    """The term in a record's headers; 0 for a record that has none."""
    try:
        return int(dict(headers)["term"])
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
        consumer_timeout_ms=FETCHER_IDLE_MS,
        # A broker that dies in the middle of an answer is noticed after this time, not after the client's 40
        # s.
        request_timeout_ms=8_000,
    )
    async with started(consumer):
        yield JournalReader(consumer, topic)
