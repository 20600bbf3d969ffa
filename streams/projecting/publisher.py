"""The publisher: writes each event as a CloudEvent to `grab.events`, for other programs.

Its cursor is stored in a header of the last record of every group. After a crash it resumes from the newest
cursor in the topic, so some records may repeat, with the same id and bytes; none is missing.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from psycopg import AsyncConnection

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.journal import Cursor
from grabstream.projections.cursors import Fact
from grabstream.projections.records import set_aside
from grabstream.streams.clients import close
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.projecting.projector import Group, Projector

CURSOR_HEADER: Final = "cursor"
LOOK_BACK_RECORDS: Final = 2_000


class Publisher(Projector):
    """A projector whose read model is a topic."""

    def __init__(self, kafka: str, events: str, shards: int, source: str, **rest: Any) -> None:
        super().__init__(name="events", apply=_no_rows, kafka=kafka, **rest)
        self._events = events
        self._shards = shards
        self._source = source.encode()
        self._producer: AIOKafkaProducer | None = None

    async def _open(self, connection: AsyncConnection[Any]) -> dict[int, Cursor]:
        await self._start_producer()
        records = await set_aside.load(connection, self.name)
        async with open_reader(self._kafka, self._events) as reader:
            return {
                shard: set_aside.past(records, shard, await newest_cursor(reader, shard))
                for shard in range(self._shards)
            }

    async def _start_producer(self) -> None:
        # A new producer each time: after an error, the old one may refuse all records, or send records again
        # that we send again as well.
        await self._stop_producer()
        producer = self._producer = make_producer(self._kafka)
        await producer.start()
        await producer.partitions_for(self._events)

    async def repeat(self, last: Mapping[int, tuple[Fact, Cursor]]) -> None:
        """Publishes the last event of each shard again, with the same id and bytes, and with another cursor
        to resume from.
        """
        await self._start_producer()
        try:
            assert self._producer is not None
            for shard, (fact, after) in last.items():
                for batch in event_batches(self._producer, [fact], self._source, after):
                    await (await self._producer.send_batch(batch, self._events, partition=shard))
        finally:
            await self._stop_producer()

    async def _disconnect(self) -> None:
        await self._stop_producer()
        await super()._disconnect()

    async def _stop_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await close(producer.stop())

    async def _save(self, group: Group) -> None:
        await self._connected()
        assert self._producer is not None
        shards = [shard for shard, facts in group.facts.items() if facts]
        batches = [
            event_batches(self._producer, group.facts[shard], self._source, group.moves[shard][1])
            for shard in shards
        ]
        # A partition's next batch is sent after the previous one is acknowledged. A broker that does not know
        # the producer accepts any batch first. So an earlier batch that expired on the way would leave a gap
        # before the cursor in a later one.
        for abreast in zip_longest(*batches):
            sent = [
                await self._producer.send_batch(batch, self._events, partition=shard)
                for shard, batch in zip(shards, abreast, strict=True)
                if batch is not None
            ]
            for acknowledged in sent:
                await acknowledged


def event_source(prefix: str) -> str:
    """The `ce_source` of the events of a system."""
    return f"grabstream/{prefix}"


def make_producer(kafka: str) -> AIOKafkaProducer:
    """A producer for events, not started yet."""
    return AIOKafkaProducer(
        bootstrap_servers=kafka,
        enable_idempotence=True,
        acks="all",
        max_batch_size=512 * 1024,
        max_request_size=RECORD_BYTES_MAX,
    )


def event_batches(
    producer: AIOKafkaProducer, facts: Sequence[Fact], source: bytes, after: Cursor | None = None
) -> list[Any]:
    """The events in as few batches as the size of a request allows. The last event carries the cursor
    `after`, if given.
    """
    batches = [producer.create_batch()]
    for fact in facts:
        headers = event_headers(fact, source)
        if after is not None and fact is facts[-1]:
            headers.append((CURSOR_HEADER, encode_cursor(after)))
        record = {
            "key": fact.event.offer.encode(),
            "value": fact.line,
            "timestamp": fact.event.at,
            "headers": headers,
        }
        if batches[-1].append(**record) is None:
            batches.append(producer.create_batch())
            batches[-1].append(**record)
    return batches


def event_headers(fact: Fact, source: bytes) -> list[tuple[str, bytes]]:
    """The headers of an event: CloudEvents in binary mode."""
    event = fact.event
    return [
        ("content-type", b"application/json"),
        ("ce_specversion", b"1.0"),
        ("ce_id", b"%d-%d" % (event.shard, event.seq)),
        ("ce_type", str(event.__struct_config__.tag).encode()),
        ("ce_source", source),
        ("ce_time", _rfc3339(event.at)),
        ("ce_subject", event.offer.encode()),
    ]


def encode_cursor(cursor: Cursor) -> bytes:
    """`seq,head,next_offset,term,owner` as a header's value."""
    return f"{cursor.seq},{cursor.head.hex()},{cursor.next_offset},{cursor.term},{cursor.owner}".encode()


def decode_cursor(value: bytes) -> Cursor:
    """The cursor in a header that `encode_cursor` wrote."""
    seq, head, next_offset, term, owner = value.decode().split(",", 4)
    return Cursor(int(seq), bytes.fromhex(head), int(next_offset), int(term), owner)


async def newest_cursor(reader: JournalReader, shard: int) -> Cursor:
    """The newest cursor in a partition of the events topic; the journal's beginning if there is none."""
    end = await reader.end(shard)
    look_back = LOOK_BACK_RECORDS
    while end:
        newest: Cursor | None = None
        start = max(end - look_back, 0)
        async for records in reader.read(shard, start, end):
            for record in records:
                value = dict(record.headers).get(CURSOR_HEADER)
                newest = decode_cursor(value) if value else newest
        if newest or start == 0:
            return newest or Cursor()
        look_back *= 4
    return Cursor()


@lru_cache(maxsize=1024)
def _rfc3339(at_ms: int) -> bytes:
    return (
        datetime.fromtimestamp(at_ms / 1000, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
        .encode()
    )


async def _no_rows(connection: AsyncConnection[Any], facts: Any) -> None:
    """Writes nothing: a publisher has no rows."""
