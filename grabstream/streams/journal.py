"""Reading one partition of the journal between two offsets, without a consumer group."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.journal import Authority, Block, Corrupt, Cursor, Gap, Headers, is_signed_owner, named
from grabstream.streams import brokers
from grabstream.streams.clients import FETCHER_IDLE_MS, started
from grabstream.streams.journal_keys import journal_keys

FETCH_WAIT_MS: Final = 500
LOOK_BACK_RECORDS: Final = 16
#: The most records that `confirms` reads at once; it reads as many in ever larger pieces up to this size.
CONFIRM_RECORDS_MAX: Final = 1_024
#: How long a read waits while nothing arrives.
SILENT_SECONDS_MAX: Final = 60.0


class JournalRecord(NamedTuple):
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
        #: By shard: the offset up to which no relay has signed a record, and whether one has there.
        self._unsigned_to: dict[int, tuple[int, bool]] = {}

    def block(self, record: JournalRecord) -> Block:
        """The block in a record of this topic; raises Corrupt like `JournalKeys.block`."""
        return journal_keys().block(self._topic, record.shard, record.headers, record.value)

    def authority(self, record: JournalRecord) -> tuple[Authority, str]:
        """Whether a known relay signed the headers of a record, and why it did not."""
        return journal_keys().authority(self._topic, record.shard, record.headers)

    def is_signed(self, record: JournalRecord) -> bool:
        """Whether a known relay signed the headers of a record."""
        return self.authority(record)[0] == "signed"

    def for_topic(self, topic: str) -> "JournalReader":
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

    async def last_seq(self, shard: int, owner: str = "") -> int:
        """The highest seq among the newest blocks; 0 if the partition has markers only. Includes blocks that
        do not count.

        `owner` is the last owner that is known: if it signs, and keys are known, only records that relays
        signed count, if there are any.
        """
        beginning, start = await self.beginning(shard), await self.end(shard)
        must_be_signed = is_signed_owner(owner) and bool(journal_keys().public)
        last, last_unsigned, look_back = 0, 0, LOOK_BACK_RECORDS
        while not last and start > beginning:
            end, start = start, max(start - look_back, beginning)
            async for records in self.read(shard, start, end):
                for record in records:
                    if must_be_signed and not self.is_signed(record):
                        last_unsigned = max(last_unsigned, last_seq_of(record.headers))
                    else:
                        last = max(last, last_seq_of(record.headers))
            look_back *= 4
        return last or last_unsigned

    async def seq_before(self, shard: int, cursor: Cursor) -> int | None:
        """The last seq that the cursor's owner wrote before the cursor; 0 if that is its marker only. All
        these blocks count.

        None if there is no record of that owner: because owner ids are random, the cursor belongs to another
        journal, or is beyond the end.
        """
        beginning, start = await self.beginning(shard), cursor.next_offset
        if start > await self.end(shard):
            return None
        owner, look_back = cursor.owner.encode(), LOOK_BACK_RECORDS
        must_be_signed = is_signed_owner(cursor.owner) and bool(journal_keys().public)
        while start > beginning:
            end, start = start, max(start - look_back, beginning)
            seqs = [
                last_seq_of(record.headers)
                async for records in self.read(shard, start, end)
                for record in records
                if named(record.headers).get("owner") == owner
                and (not must_be_signed or self.is_signed(record))
            ]
            if seqs:
                return max(seqs)
            look_back *= 4
        return None

    async def has_head(self, shard: int, cursor: Cursor) -> bool:
        """Whether a record before a cursor's offset ends at its seq with its hash: a block, or an anchor.
        Where its owner signs, and keys are known, the record must be signed. Reads back as far as needed.
        """
        must_be_signed = is_signed_owner(cursor.owner) and bool(journal_keys().public)
        beginning, start = await self.beginning(shard), cursor.next_offset
        look_back, head = LOOK_BACK_RECORDS, cursor.head.hex().encode()
        while start > beginning:
            end, start = start, max(start - look_back, beginning)
            async with aclosing(self.read(shard, start, end)) as lists:
                async for records in lists:
                    for record in records:
                        is_there = named(record.headers).get("head") == head and (
                            reached_by(record.headers) == cursor.seq
                        )
                        if is_there and (not must_be_signed or self.is_signed(record)):
                            return True
            look_back *= 4
        return False

    async def confirms(self, shard: int, cursor: Cursor, is_published: bool = False) -> bool:
        """Whether the journal contains the event of the cursor's seq with the cursor's hash, and whether the
        cursor's term and owner are in force at its offset.

        Looks for the event's block among the records directly before the offset, not in the whole journal. A
        cursor that `is_published` was found in a topic: if keys are known, a relay must have signed the block
        as well, or nothing before the offset may be signed.
        """
        if not journal_keys().public:
            return await self._confirms(shard, cursor, False, False)
        is_signed = is_signed_owner(cursor.owner)
        found = await self._confirms(shard, cursor, is_signed, is_signed and is_published)
        if found and is_published and not is_signed:
            return not await self._is_signed_before(shard, cursor.next_offset)
        return found

    async def _is_signed_before(self, shard: int, offset: int) -> bool:
        """Whether a relay signed a record before an offset. Reads from the beginning, once."""
        start, is_signed = self._unsigned_to.get(shard, (await self.beginning(shard), False))
        if start >= offset or is_signed:
            return is_signed and start < offset
        async with aclosing(self.read(shard, start, offset)) as lists:
            async for records in lists:
                for record in records:
                    if self.is_signed(record):
                        self._unsigned_to[shard] = record.offset, True
                        return True
        self._unsigned_to[shard] = offset, False
        return False

    async def _confirms(
        self, shard: int, cursor: Cursor, is_marker_signed: bool, is_block_signed: bool
    ) -> bool:
        beginning, start = await self.beginning(shard), cursor.next_offset
        if start > await self.end(shard):
            return False
        look_back, newest = LOOK_BACK_RECORDS, (0, b"")
        while start > beginning and look_back <= CONFIRM_RECORDS_MAX:
            end, start = start, max(start - look_back, beginning)
            read = [record async for records in self.read(shard, start, end) for record in records]
            for record in reversed(read):
                headers, given = record.headers, named(record.headers)
                term = term_of(headers)
                is_marker = given.get("count") == b"0"
                if (is_marker_signed if is_marker else is_block_signed) and not self.is_signed(record):
                    continue
                if is_marker:
                    # The first marker of the highest term counts: it is the last one on the way back.
                    newest = max((term, given.get("owner", b"")), newest, key=lambda marker: marker[0])
                elif last_seq_of(headers) == cursor.seq and given.get("head") == cursor.head.hex().encode():
                    in_force = newest if newest[0] > term else (term, given.get("owner"))
                    if in_force == (cursor.term, cursor.owner.encode()):
                        return True
            look_back *= 4
        return False

    async def next_event(self, shard: int, cursor: Cursor, to_offset: int) -> Cursor:
        """The cursor at the first record that adds events to it; at `to_offset` if none before that does.
        Markers, and blocks that do not count, add none. A record at which readers stop counts as one that
        adds events.
        """
        if cursor.next_offset >= to_offset:
            return cursor
        first = max(cursor.next_offset, await self.beginning(shard))
        async with aclosing(self.read(shard, first, to_offset)) as lists:
            async for records in lists:
                for record in records:
                    try:
                        after, accepted = cursor.feed(record.offset, self.block(record))
                    except (Corrupt, Gap):
                        return cursor._replace(next_offset=record.offset)
                    if accepted:
                        return cursor._replace(next_offset=record.offset)
                    cursor = after
        return cursor._replace(next_offset=max(first, to_offset))

    async def read(
        self, shard: int, from_offset: int, to_offset: int
    ) -> AsyncGenerator[list[JournalRecord], None]:
        """The records with from_offset ≤ offset < to_offset, in lists as they arrive; raises if they no
        longer exist, or TimeoutError if nothing arrives for SILENT_SECONDS_MAX.

        Offsets may lack a record: those of a transaction's end, and of compacted records. So the read ends
        when the consumer has passed the last offset, not with the last record.
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
                    JournalRecord(shard, record.offset, record.headers, record.value or b"")
                    for record in fetched.get(partition, [])
                    if record.offset < to_offset
                ]
                before, position = position, await self._consumer.position(partition)
                if position >= to_offset:
                    # The consumer would continue to fetch, a hundred times a second, while the caller handles
                    # the last records.
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
    given = named(headers)
    try:
        count = int(given["count"])
        return int(given["first_seq"]) + int(given.get("seqs", count)) - 1 if count else 0
    except (KeyError, ValueError):
        return 0


def reached_by(headers: Headers) -> int:
    """The seq to which the `head` in a record's headers belongs, also in those of an anchor."""
    given = named(headers)
    try:
        return last_seq_of(headers) if given.get("count") != b"0" else int(given["first_seq"]) - 1
    except (KeyError, ValueError):
        return 0


def term_of(headers: Headers) -> int:
    """The term in a record's headers; 0 for a record that has none."""
    try:
        return int(named(headers)["term"])
    except (KeyError, ValueError):
        return 0


@asynccontextmanager
async def open_reader(bootstrap: str, topic: str) -> AsyncIterator[JournalReader]:
    """A reader; its consumer is closed at the end."""
    # A broker that dies in the middle of an answer is noticed after 8 s, not after the client's 40 s.
    consumer = AIOKafkaConsumer(
        **brokers.at(bootstrap, timeout_ms=8_000),
        auto_offset_reset="none",
        enable_auto_commit=False,
        max_partition_fetch_bytes=RECORD_BYTES_MAX,
        # Reads have a known end; a fetch that waited there for more would delay the fetch of the next
        # partition.
        fetch_max_wait_ms=10,
        consumer_timeout_ms=FETCHER_IDLE_MS,
    )
    async with started(consumer):
        yield JournalReader(consumer, topic)
