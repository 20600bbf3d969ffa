"""The publisher: writes each event as a CloudEvent to `grab.events`, for other programs.

Its cursor is stored in a header of the last record of every group. After a crash it resumes from the newest
cursor in the topic, so some records may repeat, with the same id and bytes; none is missing.

Each shard is written separately. A shard whose records the brokers refuse, or do not acknowledge, is paused:
it is retried with growing pauses, while the others continue.
"""

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, get_args

import msgspec
from aiokafka import AIOKafkaProducer
from psycopg import AsyncConnection

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.calendar import utc_text
from grabstream.models.events import CURRENT_VERSIONS, AnyEvent
from grabstream.models.journal import Cursor, Headers, named
from grabstream.models.schema_ids import event_name, schema_id
from grabstream.projections.cursors import Fact, single_facts
from grabstream.projections.database import locks
from grabstream.projections.tables import set_aside
from grabstream.runtime.ending import end
from grabstream.runtime.trouble import is_trouble, suppressed_trouble
from grabstream.streams import brokers
from grabstream.streams.clients import Trouble, close, error_text
from grabstream.streams.follower import GROUP_EVENTS_MAX, Chunk, Group
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.projecting.projector import RETRY_SECONDS, RETRY_SECONDS_MAX, CatchUp, Projector
from grabstream.streams.topics import record_time_ms

log = logging.getLogger(__name__)

CURSOR_HEADER: Final = "cursor"
LOOK_BACK_RECORDS: Final = 2_000
#: The number of records at the end of the topic that show, without other writers, who has written last.
LAST_RECORDS: Final = 16
#: The number of cursors of a shard that are compared with the journal, newest first.
COMPARED_CURSORS_MAX: Final = 32
#: How long the other shards of a group wait for one that is not acknowledged. Then it is paused.
ACKNOWLEDGED_SECONDS_MAX: Final = 2.0
#: Offsets in Kafka have 64 bits, with a sign.
OFFSET_MAX: Final = 2**63 - 1
_CURSOR: Final = re.compile(rb"([0-9]{1,19}),([0-9a-f]{64}),([0-9]{1,19}),([0-9]{1,19}),(.{1,255})")


class Publisher(Projector):
    """A projector whose read model is a topic."""

    #: A cursor is in the last record of a group, and is searched for at the end of the topic.
    group_events_max = GROUP_EVENTS_MAX

    def __init__(self, kafka: str, events: str, shards: int, source: str, **rest: Any) -> None:
        super().__init__(name="events", apply=_no_rows, kafka=kafka, **rest)
        self._events = events
        self._shards = shards
        self._source = source.encode()
        self._producer: AIOKafkaProducer | None = None
        #: Producers of single shards: after an error, the old one may refuse all records of a shard, or send
        #: records again that we send again as well.
        self._own_producers: dict[int, AIOKafkaProducer] = {}
        #: By shard that is paused: the task that returns the cursor from which it continues.
        self._paused: dict[int, asyncio.Task[Cursor]] = {}
        #: Shards whose hold ended with their producers, to be caught up.
        self._released: set[int] = set()
        #: By shard whose records were once not written: the trouble, and the pause before the next attempt.
        self._troubles: dict[int, _ShardTrouble] = {}

    async def _open(self, connection: AsyncConnection[Any]) -> dict[int, Cursor]:
        await self._start_producer()
        records = await set_aside.load(connection, self.name)
        newest = await self._newest_cursors(range(self._shards))
        return {shard: set_aside.past(records, shard, cursor) for shard, cursor in newest.items()}

    async def _newest_cursors(self, shards: Iterable[int]) -> dict[int, Cursor]:
        async with (
            open_reader(self._kafka, self._events) as reader,
            open_reader(self._kafka, self._journal) as journal,
        ):
            return {
                shard: await newest_cursor(reader, shard, self._source.decode(), journal) for shard in shards
            }

    async def _start_producer(self) -> None:
        await self._stop_producers()
        self._producer = await self._started()

    async def _started(self) -> AIOKafkaProducer:
        producer = make_producer(self._kafka)
        try:
            await producer.start()
            await producer.partitions_for(self._events)
        except BaseException:
            await close(producer.stop())
            raise
        return producer

    async def repeat(self, last: Mapping[int, tuple[Fact, Cursor]]) -> None:
        """Publishes the last event of each shard again, with the same id and bytes, and with another cursor
        to resume from.
        """
        await self._start_producer()
        try:
            for shard, (fact, after) in last.items():
                await self._send(shard, [fact], after)
        finally:
            await self._stop_producers()

    async def _disconnect(self) -> None:
        try:
            await self._stop_producers()
        finally:
            await super()._disconnect()

    async def _stop_producers(self) -> None:
        paused, self._paused = self._paused, {}
        self._released |= paused.keys()
        await end(paused.values())
        producers = [*self._own_producers.values(), *([self._producer] if self._producer else [])]
        self._producer, self._own_producers = None, {}
        await asyncio.gather(*(close(producer.stop()) for producer in producers))

    async def _in_transaction(self, group: Group) -> Group:
        """Writes the events of each shard; returns the group without the shards that are paused now."""
        connection = await self._connected()
        sending = {
            shard: asyncio.create_task(self._send(shard, facts, _after_last_event(chunks)))
            for shard, chunks in group.chunks.items()
            if (facts := Group(chunks).facts)
        }
        # Shards that failed the last time are not awaited.
        awaited = [task for shard, task in sending.items() if not self._is_in_trouble(shard)]
        try:
            if awaited:
                await asyncio.wait(awaited, timeout=ACKNOWLEDGED_SECONDS_MAX)
            moves = group.moves
            for shard, task in sending.items():
                if _is_written(task):
                    self._end_trouble(shard)
                    continue
                _, after = moves[shard]
                # Publishing needs no PostgreSQL: without the lock, a watchdog may start Faust again.
                with suppressed_trouble():
                    await locks.take(connection, held_lock(self._schema, shard))
                self._paused[shard] = asyncio.create_task(self._until_writable(shard, task, after))
                self._paused[shard].add_done_callback(partial(self._wake, shard))
        except BaseException:
            await end([task for shard, task in sending.items() if shard not in self._paused])
            raise
        return Group(
            chunk for shard, chunks in group.chunks.items() if shard not in self._paused for chunk in chunks
        )

    async def _send(self, shard: int, facts: Sequence[Fact], after: Cursor) -> None:
        """Writes events to a shard's partition; raises the client's errors."""
        producer = self._own_producers.get(shard) or self._producer
        assert producer is not None
        # A partition's next batch is sent after the previous one is acknowledged. A broker that does not know
        # the producer accepts any batch first. So an earlier batch that expired on the way would leave a gap
        # before the cursor in a later one.
        for batch in event_batches(producer, facts, self._source, after):
            sent = await producer.send_batch(batch, self._events, partition=shard)
            await sent

    # -- shards that are paused ------------------------------------------------------------------------------

    def _is_paused(self, shard: int) -> bool:
        return super()._is_paused(shard) or shard in self._paused

    async def _until_writable(self, shard: int, sending: "asyncio.Task[None]", after: Cursor) -> Cursor:
        """Returns the cursor from which a shard continues: `after` when its records are acknowledged late;
        after an error the newest one in the topic, when the next attempt is due.
        """
        try:
            await sending
            self._end_trouble(shard)
            return after
        except BaseException as error:
            if not is_trouble(error):
                raise
            if shard not in self._troubles:
                self._troubles[shard] = _ShardTrouble(shard)
            failed = error
        finally:
            sending.cancel()
        while True:
            self.measures.failures += 1
            await self._troubles[shard].pause(failed)
            try:
                return await self._try_again(shard)
            except BaseException as error:
                if not is_trouble(error):
                    raise
                failed = error

    async def _try_again(self, shard: int) -> Cursor:
        """Gives a shard its own producer; returns where it continues. Raises the client's errors."""
        if (before := self._own_producers.pop(shard, None)) is not None:
            await close(before.stop())
        newest = (await self._newest_cursors([shard]))[shard]
        self._own_producers[shard] = await self._started()
        # Records that an operator has set aside are behind our cursor, and may be before the newest one.
        return max(newest, self._cursors.get(shard, newest), key=lambda cursor: cursor.next_offset)

    def _is_in_trouble(self, shard: int) -> bool:
        return shard in self._troubles and self._troubles[shard].is_present

    def _end_trouble(self, shard: int) -> None:
        if self._is_in_trouble(shard):
            self._troubles[shard].over()

    def _wake(self, shard: int, _: object) -> None:
        """Makes `run` look for shards that can be written again."""
        if not self._queue.full():
            self._queue.put_nowait(CatchUp(shard))

    async def _resumed(self) -> list[CatchUp]:
        resumed = await super()._resumed()
        if not (self._paused or self._released):
            return resumed
        ended = {shard: task for shard, task in self._paused.items() if task.done()}
        for shard, task in ended.items():
            del self._paused[shard]
            self._released.add(shard)
            if not task.cancelled():
                self._moved(shard, self._cursors[shard], task.result())
        if (connection := self._connection) is not None:
            for shard in ended:
                with suppressed_trouble():
                    await locks.release(connection, held_lock(self._schema, shard))
        resumed += [CatchUp(shard) for shard in sorted(self._released)]
        self._released.clear()
        return resumed


class _ShardTrouble:
    """Why the records of a shard are not written, and the pauses between attempts. It is kept when it is
    over: recurring trouble counts as lasting.
    """

    def __init__(self, shard: int) -> None:
        self._trouble = Trouble(log, f"events, shard {shard}")
        self._seconds = RETRY_SECONDS

    async def pause(self, error: BaseException) -> None:
        """Reports a failed attempt, and waits until the next one is due."""
        self._trouble.say(error_text(error))
        await asyncio.sleep(self._seconds)
        self._seconds = min(self._seconds * 2, RETRY_SECONDS_MAX)

    @property
    def is_present(self) -> bool:
        """Whether the last attempt failed."""
        return self._trouble.is_present

    def over(self) -> None:
        """Reports that writes of the shard succeed again."""
        self._trouble.over()
        self._seconds = RETRY_SECONDS


def held_lock(schema: str, shard: int) -> str:
    """The lock that a publisher has while a shard is paused, for the watchdogs of other processes."""
    return f"grabstream-held-{schema}-{shard}"


def _is_written(sending: "asyncio.Task[None]") -> bool:
    """Whether the records were acknowledged; raises errors that are not trouble with a server."""
    if not sending.done():
        return False
    try:
        sending.result()
    except BaseException as error:
        if not is_trouble(error):
            raise
        return False
    return True


class PublishedOffsets:
    """The published part of the journal, for the watchdog. Reads what the publisher reads when it starts, but
    only for shards in which nothing is published, and once until something is. Records of other programs do
    not count: a program that writes all the time must not hide that the publisher does not.
    """

    def __init__(self, journal: JournalReader, events: JournalReader, source: str) -> None:
        self._journal = journal
        self._events = events
        self._source = source
        #: By shard: the end of the topic of events when it was read last.
        self._events_ends: dict[int, int] = {}
        #: By shard, while nothing is published: the cursor before the first event that is not, or at
        #: the journal's end. None if the cursors were deleted from the topic.
        self._reached: dict[int, Cursor | None] = {}

    async def load(self, connection: AsyncConnection[Any], journal_ends: Mapping[int, int]) -> dict[int, int]:
        """For each shard the offset of the first journal record with an event that is not published; the
        journal's end if there is none, if something was published since the last call, or if the records
        that could show it were deleted from the topic.
        """
        offsets, resting = dict(journal_ends), []
        events_ends = await self._events.ends(journal_ends)
        for shard, journal_end in journal_ends.items():
            before, events_end = self._events_ends.get(shard), events_ends[shard]
            self._events_ends[shard] = events_end
            if before is None or await self._has_published(shard, before, events_end):
                self._reached.pop(shard, None)
                continue
            reached = self._reached.get(shard, Cursor())
            if reached is not None and (shard not in self._reached or reached.next_offset < journal_end):
                resting.append(shard)
        records = await set_aside.load(connection, "events") if resting else []
        for shard in resting:
            if shard not in self._reached:
                self._reached[shard] = await self._published(shard)
            cursor = self._reached[shard]
            if cursor is not None:
                # Records without news are read once, not again for each new end of the journal.
                cursor = set_aside.past(records, shard, cursor)
                cursor = self._reached[shard] = await self._journal.next_event(shard, cursor, offsets[shard])
                offsets[shard] = cursor.next_offset
        return offsets

    async def _has_published(self, shard: int, start: int, end: int) -> bool:
        """Whether a record between two ends of the topic is the publisher's, or the topic was recreated."""
        if end < start:
            return True
        start = max(start, await self._events.beginning(shard)) if start < end else end
        last = max(start, end - LAST_RECORDS)
        for first, to_offset in ((last, end), (start, last)):
            async with aclosing(self._events.read(shard, first, to_offset)) as lists:
                async for records in lists:
                    if any(_is_of_publisher(record.headers, shard, self._source) for record in records):
                        return True
        return False

    async def _published(self, shard: int) -> Cursor | None:
        cursor = await _find_cursor(self._events, shard, self._source, self._journal)
        if cursor is None and await self._events.beginning(shard):
            return None
        return cursor or Cursor()


def _after_last_event(chunks: Sequence[Chunk]) -> Cursor:
    """The cursor directly after the record with the last event of chunks. Thousands of markers may follow it,
    and then the event of a cursor after them would not be found (`JournalReader.confirms`).
    """
    with_events = (chunk.after for chunk in reversed(chunks) if chunk.facts)
    return next(with_events, chunks[-1].after)


def event_source(prefix: str) -> str:
    """The `ce_source` of the events of a system."""
    return f"grabstream/{prefix}"


def make_producer(kafka: str) -> AIOKafkaProducer:
    """A producer for events, not started yet."""
    return AIOKafkaProducer(
        **brokers.at(kafka),
        enable_idempotence=True,
        acks="all",
        max_batch_size=512 * 1024,
        max_request_size=RECORD_BYTES_MAX,
    )


Header = tuple[str, bytes]


def event_batches(
    producer: AIOKafkaProducer, facts: Sequence[Fact], source: bytes, after: Cursor | None = None,
    first_headers: Sequence[Header] = (), each_headers: Sequence[Header] = (),
) -> list[Any]:  # fmt: skip
    """The events in as few batches as the size of a request allows, each grab of a run separately. The last
    event carries the cursor `after`, if given; the first one has the headers `first_headers`, too, and each
    one those `each_headers`.

    The time of a record is that of its event, if brokers take it (`record_time_ms`).
    """
    batches = [producer.create_batch()]
    facts = single_facts(facts)
    for fact in facts:
        headers = event_headers(fact, source)
        if after is not None and fact is facts[-1]:
            headers.append((CURSOR_HEADER, encode_cursor(after)))
        if fact is facts[0]:
            headers += first_headers
        headers += each_headers
        record = {
            "key": fact.event.offer.encode(),
            "value": fact.line,
            "timestamp": record_time_ms(fact.event.at),
            "headers": headers,
        }
        if batches[-1].append(**record) is None:
            batches.append(producer.create_batch())
            batches[-1].append(**record)
    return batches


class _TypeConstants(NamedTuple):
    """What all events of a type share: how their lines begin in the current version, and headers."""

    begins: bytes
    type: Header
    dataschema: Header


def _dataschema(type_: str, version: int) -> Header:
    return "ce_dataschema", schema_id(event_name(type_, version)).encode()


def _type_constants(type_: str) -> _TypeConstants:
    version = CURRENT_VERSIONS[type_]
    begins = f'{{"type":"{type_}","v":{version},'.encode()
    return _TypeConstants(
        begins,
        ("ce_type", type_.encode()),
        _dataschema(type_, version),
    )


_CONTENT_TYPE: Final[Header] = ("content-type", b"application/json")
_SPEC_VERSION: Final[Header] = ("ce_specversion", b"1.0")
_TYPE_CONSTANTS: Final = {
    event: _type_constants(str(event.__struct_config__.tag)) for event in get_args(AnyEvent)
}


class _LineHead(msgspec.Struct):
    type: str
    v: int


_decode_head: Final = msgspec.json.Decoder(_LineHead).decode


def event_headers(fact: Fact, source: bytes) -> list[Header]:
    """The headers of an event: CloudEvents in binary mode. `ce_dataschema` names the schema of the version in
    which the event was written.
    """
    event = fact.event
    constants = _TYPE_CONSTANTS[type(event)]
    dataschema = constants.dataschema
    if not fact.line.startswith(constants.begins):
        head = _decode_head(fact.line)
        dataschema = _dataschema(head.type, head.v)
    return [
        _CONTENT_TYPE,
        _SPEC_VERSION,
        ("ce_id", b"%d-%d" % (event.shard, event.seq)),
        constants.type,
        ("ce_source", source),
        ("ce_time", _rfc3339(event.at)),
        ("ce_subject", event.offer.encode()),
        dataschema,
    ]


def encode_cursor(cursor: Cursor) -> bytes:
    """`seq,head,next_offset,term,owner` as a header's value."""
    return f"{cursor.seq},{cursor.head.hex()},{cursor.next_offset},{cursor.term},{cursor.owner}".encode()


def decode_cursor(value: bytes) -> Cursor:
    """The cursor in a header that `encode_cursor` wrote after an event; raises ValueError if it is none."""
    matched = _CURSOR.fullmatch(value)
    if matched is None:
        raise ValueError("not a cursor")
    head, owner = bytes.fromhex(matched[2].decode()), matched[5].decode()
    seq, next_offset, term = int(matched[1]), int(matched[3]), int(matched[4])
    if not (0 < seq <= OFFSET_MAX and 0 < next_offset <= OFFSET_MAX and 0 < term <= OFFSET_MAX):
        raise ValueError("a number is out of bounds")
    return Cursor(seq, head, next_offset, term, owner)


async def newest_cursor(
    events: JournalReader, shard: int, source: str, journal: JournalReader | None = None
) -> Cursor:
    """The newest cursor in a partition of the events topic; the journal's beginning if there is none.

    `source` is the `ce_source` of the events. With `journal`, cursors that it does not confirm are skipped,
    because another program may write to the topic; if it confirms none of them, the newest one is returned,
    and the journal's records show that it belongs to another history. Without `journal`, none is compared.
    """
    cursor = await _find_cursor(events, shard, source, journal)
    if cursor is None and (beginning := await events.beginning(shard)):
        log.warning(
            "events, shard %d: the records before offset %d were deleted, and none after it has a cursor; "
            "all events of the journal are published again",
            shard,
            beginning,
        )
    return cursor or Cursor()


async def _find_cursor(
    events: JournalReader, shard: int, source: str, journal: JournalReader | None
) -> Cursor | None:
    beginning, start = await events.beginning(shard), await events.end(shard)
    look_back, refused = LOOK_BACK_RECORDS, list[Cursor]()
    while start > beginning and len(refused) < COMPARED_CURSORS_MAX:
        end, start = start, max(start - look_back, beginning)
        for cursor, offset in reversed(await _cursors_between(events, shard, source, start, end)):
            if cursor in refused or len(refused) >= COMPARED_CURSORS_MAX:
                continue
            if journal is None or await journal.confirms(shard, cursor, is_published=True):
                return cursor
            log.warning("events, shard %d: the cursor at offset %d is not of this journal", shard, offset)
            refused.append(cursor)
        look_back *= 4
    return refused[0] if refused else None


async def _cursors_between(
    events: JournalReader, shard: int, source: str, start: int, end: int
) -> list[tuple[Cursor, int]]:
    """The cursors of the publisher between two offsets of the events topic, with their offsets."""
    cursors: list[tuple[Cursor, int]] = []
    foreign: list[int] = []
    async for records in events.read(shard, start, end):
        for record in records:
            headers = named(record.headers)
            if cursor := _cursor_of(headers, shard, source):
                cursors.append((cursor, record.offset))
            elif CURSOR_HEADER in headers:
                foreign.append(record.offset)
    if foreign:
        log.warning(
            "events, shard %d: another program wrote %d records with a header %s, the last one at offset %d; "
            "they are ignored",
            shard,
            len(foreign),
            CURSOR_HEADER,
            foreign[-1],
        )
    return cursors


def _is_of_publisher(headers: Headers, shard: int, source: str) -> bool:
    """Whether an event that the publisher of this system wrote has these headers."""
    given = named(headers)
    return given.get("ce_source") == source.encode() and given.get("ce_id", b"").startswith(b"%d-" % shard)


def _cursor_of(headers: Mapping[str, bytes], shard: int, source: str) -> Cursor | None:
    """The cursor in the headers of an event that the publisher of this system wrote."""
    try:
        cursor = decode_cursor(headers[CURSOR_HEADER])
        is_ours = (headers["ce_source"], headers["ce_id"]) == (
            source.encode(),
            b"%d-%d" % (shard, cursor.seq),
        )
    except (KeyError, ValueError):
        return None
    return cursor if is_ours else None


@lru_cache(maxsize=1024)
def _rfc3339(at_ms: int) -> bytes:
    return utc_text(at_ms).encode()


async def _no_rows(connection: AsyncConnection[Any], facts: Any) -> None:
    """Writes nothing: a publisher has no rows."""
