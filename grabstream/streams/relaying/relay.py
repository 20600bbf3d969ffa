"""The relay: copies a shard's outbox to the journal, each event exactly once, fenced by the journal itself
(docs/protocol.md).

It takes the shard over (`takeover`), then relays: one send is in flight, and a block counts if its offset
directly follows the owner's previous one, or if only records that do not count lie between. The order of
these steps is the protocol; change it only together with tests/protocol/model.py.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from grabstream.crypto.sealing import Sealer
from grabstream.lua.keys import ShardKeys
from grabstream.lua.library import provide
from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.journal import Cursor, Headers, anchor_headers, block_headers, chain, named
from grabstream.runtime.ending import end
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.runtime.traces import traces
from grabstream.runtime.trouble import is_trouble
from grabstream.streams import brokers
from grabstream.streams.clients import FETCHER_IDLE_MS, Trouble, error_text, started
from grabstream.streams.journal import JournalReader, term_of
from grabstream.streams.journal_keys import Signer, journal_keys
from grabstream.streams.measures import RelayMeasures
from grabstream.streams.relaying.blocks import blocks_of
from grabstream.streams.relaying.ownership import (
    NewerProgram,
    NotReconciled,
    OutboxLine,
    OwnedShard,
    Ownership,
    SteppedDown,
)
from grabstream.streams.relaying.recovery import Recovered, Recovery, Snapshots
from grabstream.streams.relaying.takeover import Takeover

log = logging.getLogger(__name__)

#: How often the owner of an idle shard asks whether it still owns it; less than the timeout of a connection.
#: New events, newer owners, and a server that closes its connections, are noticed at once.
IDLE_WAIT_MS: Final = 4_000
#: How long Kafka holds a fetch at the end of a partition: of a takeover, whose next request on the same
#: connection waits for that, and of a tail, which has its connection for itself (less than the client's
#: request timeout, 40 s). A record ends the wait.
TAKEOVER_FETCH_MS: Final = 500
TAIL_FETCH_MS: Final = 30_000
#: How long a tail waits between two fetches that return records. Without it, Kafka would send each block of a
#: busy shard back at once, alone.
TAIL_PAUSE_SECONDS: Final = 0.1
RETRY_SECONDS: Final = 0.2
#: A server that answers again is noticed within this time.
RETRY_SECONDS_MAX: Final = 1.0
FENCED_RETRY_SECONDS: Final = 10.0
#: How often the owner of a shard that runs plain scripts tries whether the library can be loaded now.
LIBRARY_RETRY_SECONDS: Final = 60.0

#: Called with the name of each step; crash tests end the process there.
CrashStep = Callable[[str], None]
#: Opens a consumer of the shard's partition, given the ms that Kafka holds a fetch at its end.
OpenConsumer = Callable[[int], AbstractAsyncContextManager[AIOKafkaConsumer]]


class Duty:
    """What the holder of a shard's lease and the shard's relay share."""

    def __init__(self) -> None:
        #: Set by the relay while it owns the shard and relays it.
        self.is_relaying = False
        #: The term in which the relay has taken the shard over last; 0 before it has.
        self.term = 0
        #: Set by the holder of the lease when the shard is passed to another worker: the relay continues
        #: until the other has taken the shard over, and then returns instead of taking it over again.
        self.is_leaving = False
        #: Set by the relay for the shard's sweeper when it has read new events, and when its tenure ends.
        self.decided = asyncio.Event()
        #: Set by the relay while it waits for new events.
        self.is_waiting = False


class ShardRelay:
    """Relays one shard until cancelled or until another owner takes it. One task, one producer, one consumer.

    `redis` must not decode replies. `block_events_max` bounds the events of a journal record
    that has more than one entry of the outbox (`blocks_of`).
    """

    def __init__(
        self,
        redis: Any,
        keys: ShardKeys,
        shards: int,
        bootstrap: str,
        journal: str,
        sealer: Sealer,
        block_events_max: int = 1000,
        step: CrashStep = lambda name: None,
        snapshots: Snapshots | None = None,
        report: Callable[[Recovered], Any] | None = None,
        progress: Callable[[int], None] = lambda applied: None,
        duty: Duty | None = None,
        measures: RelayMeasures | None = None,
    ) -> None:
        self._measures = measures or RelayMeasures()
        self._duty = duty or Duty()
        self._shard = OwnedShard(redis, keys)
        self._shards = shards
        self._bootstrap = bootstrap
        self._partition = TopicPartition(journal, keys.shard)
        self._block_events_max = block_events_max
        self._step = step
        self._recovery = Recovery(self._shard, sealer, snapshots, report, progress, step)
        self._trouble = Trouble(log, f"shard {keys.shard}")
        self._pause_seconds = RETRY_SECONDS
        self.state = "waiting"
        #: The key of this tenure. A takeover has recorded it, so a tenure signs only with it.
        self._signer: Signer | None = None
        #: Whether the takeover could not read which keys relays sign with.
        self._keys_unread = False

    async def run(self) -> None:
        """Takes the shard over and relays it, again after every error, until cancelled; or until it has lost
        the shard to another worker that is to have it.
        """
        while not self._duty.is_leaving:
            try:
                async with self._producer() as producer:
                    await self._tenure(producer, *await self._take_over(producer))
            except SteppedDown as reason:
                self.state = "stepped down"
                self._measures.ended["stepped_down"] += 1
                log.info("shard %d: stepped down: %s", self._shard.keys.shard, reason)
                if not self._duty.is_leaving:
                    await asyncio.sleep(RETRY_SECONDS)
            except (NotReconciled, NewerProgram) as reason:
                self.state = f"fenced: {reason}"
                self._measures.ended["fenced"] += 1
                log.error("shard %d stays fenced: %s", self._shard.keys.shard, reason)
                await asyncio.sleep(FENCED_RETRY_SECONDS)
            except BaseException as error:
                if not is_trouble(error):
                    raise
                self.state = f"retrying: {error_text(error)}"
                self._measures.ended["trouble"] += 1
                self._trouble.say(error_text(error))
                await asyncio.sleep(self._pause_seconds)
                self._pause_seconds = min(self._pause_seconds * 2, RETRY_SECONDS_MAX)

    async def rebuild(self, reason: str) -> None:
        """Takes the shard over and rebuilds its state in Redis from the journal, whatever that state is;
        raises the errors after which `run` retries.
        """
        async with self._producer() as producer, self._consumer(TAKEOVER_FETCH_MS) as consumer:
            takeover = self._takeover(producer, consumer)
            ownership, cursor = await takeover.run()
            await takeover.rebuild(ownership, cursor, reason)

    def _takeover(self, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer) -> Takeover:
        async def send(value: bytes, headers: list[tuple[str, bytes]]) -> int:
            return await self._send(producer, value, headers)

        async def drain(ownership: Ownership, cursor: Cursor) -> Cursor:
            return await self._drain(producer, ownership, cursor)

        self._signer = journal_keys().signer
        reader = JournalReader(consumer, self._partition.topic)
        return Takeover(self._shard, self._shards, reader, send, drain, self._recovery)

    async def _take_over(self, producer: AIOKafkaProducer) -> tuple[Ownership, Cursor]:
        async with self._consumer(TAKEOVER_FETCH_MS) as consumer:
            self.state = "taking over"
            takeover = self._takeover(producer, consumer)
            taken_over = await takeover.run()
            self._keys_unread = takeover.keys_unread
            self._step("relay.took_over")
            return taken_over

    async def _tenure(self, producer: AIOKafkaProducer, ownership: Ownership, cursor: Cursor) -> None:
        log.info("shard %d: owner of term %d from seq %d", self._shard.keys.shard, ownership.term, cursor.seq)
        self.state = "relaying"
        self._duty.term = ownership.term
        self._measures.takeovers += 1
        tail = _Tail(self._consumer, self._partition, ownership.term, cursor.next_offset)
        watching = asyncio.create_task(tail.watch())
        relaying = asyncio.create_task(self._relay(producer, ownership, cursor, tail))
        tasks = {watching, relaying}
        if self._shard.plain:
            tasks.add(asyncio.create_task(self._functions_again()))
        if self._keys_unread:
            tasks.add(asyncio.create_task(self._keys_again()))
        self._duty.is_relaying = True
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._duty.is_relaying = self._duty.is_waiting = False
            self._duty.decided.set()
            await end(tasks)

    async def _functions_again(self) -> None:
        """Tries from time to time to load the library; raises SteppedDown when it is loaded, because a
        takeover changes what the shard says. Deciding continues meanwhile.
        """
        log.warning("shard %d: runs plain scripts: %s", self._shard.keys.shard, self._shard.plain)
        while True:
            await asyncio.sleep(LIBRARY_RETRY_SECONDS)
            if not await provide(self._shard.redis, self._shard.keys.state):
                raise SteppedDown("functions can be used now")

    async def _keys_again(self) -> None:
        """Tries from time to time to read which keys relays sign with; raises SteppedDown when that is
        possible, because a takeover compares and records them. Relaying continues meanwhile.
        """
        while True:
            await asyncio.sleep(FENCED_RETRY_SECONDS)
            with suppress(OSError):
                await self._recovery.recorded_keys()
                raise SteppedDown("the keys of relays can be read again")

    # -- relaying --------------------------------------------------------------------------------------------

    async def _relay(
        self, producer: AIOKafkaProducer, ownership: Ownership, cursor: Cursor, tail: "_Tail"
    ) -> None:
        if self._signer:
            cursor = await self._anchor(producer, cursor, tail)
        outbox = await self._shard.read_outbox(ownership, cursor.seq)
        while True:
            entries = outbox.entries
            if not entries and (outbox.seq > cursor.seq or outbox.has_hole):
                # The next takeover reports it.
                raise SteppedDown(f"the outbox has a hole after seq {cursor.seq}")
            if not entries and outbox.fault:
                # All its events are journaled: the next takeover rebuilds it, or lets it decide.
                raise SteppedDown(f"the shard is {outbox.fault}")
            if not entries:
                self._succeeded()
                self._duty.is_waiting = True
                await self._wait_for_more(cursor.seq)
                outbox = await self._shard.read_outbox(ownership, cursor.seq)
                continue
            self._duty.is_waiting = False
            self._duty.decided.set()
            last = cursor.seq + sum(seqs for entry in entries for _, seqs in entry)
            if _key_id(journal_keys().signer) != _key_id(self._signer):
                # A takeover records the key, so that relays which lack it take no shard.
                raise SteppedDown("another key signs now")
            for block in blocks_of(entries, self._block_events_max):
                began = time.perf_counter()
                after = await self._append(producer, ownership, cursor, block)
                if after.next_offset != cursor.next_offset + 1:
                    # Other records lie between: the block counts only if no newer owner wrote one.
                    await tail.reached(after.next_offset - 1)
                if (traced := traces()) is not None:
                    traced.add(
                        "relay", self._shard.keys.shard, traced.range_of(cursor.seq + 1, after.seq),
                        time.perf_counter() - began, events=after.seq - cursor.seq,
                        offset=after.next_offset - 1,
                    )  # fmt: skip
                self._step("relay.acknowledged")
                self._measures.events += after.seq - cursor.seq
                self._succeeded()
                cursor = after
                if cursor.seq == last:
                    outbox = await self._shard.trim_and_read(ownership, cursor)
                else:
                    await self._shard.trim(ownership, cursor)
                self._measures.cycle_seconds.observe(time.perf_counter() - began)
                self._step("relay.trimmed")

    def _succeeded(self) -> None:
        """Called when a block was relayed, or there is nothing to relay. A takeover alone does not reset the
        pause, because each takeover appends a marker.
        """
        self._trouble.over()
        self._pause_seconds = RETRY_SECONDS

    async def _anchor(self, producer: AIOKafkaProducer, cursor: Cursor, tail: "_Tail") -> Cursor:
        """Signs the history that the takeover has found, which may be unsigned. Returns the cursor after."""
        offset = await self._send(producer, b"", anchor_headers(cursor, self._shard.keys.shard))
        _require_after(cursor, offset)
        if offset != cursor.next_offset:
            await tail.reached(offset)
        self._step("relay.anchored")
        return cursor._replace(next_offset=offset + 1)

    async def _drain(self, producer: AIOKafkaProducer, ownership: Ownership, cursor: Cursor) -> Cursor:
        """Journals the rest of the outbox of a shard that decides nothing."""
        while True:
            entries = (await self._shard.read_outbox(ownership, cursor.seq)).entries
            if not entries:
                return cursor
            for block in blocks_of(entries, self._block_events_max):
                after = await self._append(producer, ownership, cursor, block)
                if after.next_offset != cursor.next_offset + 1:
                    await self._require_none_newer(cursor, after.next_offset - 1)
                cursor = after
            await self._shard.trim(ownership, cursor)

    async def _require_none_newer(self, cursor: Cursor, offset: int) -> None:
        """Raises SteppedDown if a record between a cursor and an offset may be one of another owner that
        counts. Where keys are known, what no relay signed does not count.
        """
        newer = SteppedDown(f"another record is in the journal before offset {offset}")
        if not journal_keys().public:
            raise newer
        async with self._consumer(TAKEOVER_FETCH_MS) as consumer:
            reader = JournalReader(consumer, self._partition.topic)
            async with aclosing(reader.read(self._shard.keys.shard, cursor.next_offset, offset)) as lists:
                async for records in lists:
                    if not all(cursor.ignores(reader.block(record)) for record in records):
                        raise newer

    async def _append(
        self, producer: AIOKafkaProducer, ownership: Ownership, cursor: Cursor, block: list[OutboxLine]
    ) -> Cursor:
        """Sends a block; returns the cursor after it. The block counts only if no record that counts lies
        between.
        """
        lines = [text for text, _ in block]
        seqs = sum(seqs for _, seqs in block)
        head = chain(cursor.head, lines)[-1]
        headers = block_headers(
            self._shard.keys.shard,
            ownership.term,
            ownership.owner,
            cursor.seq + 1,
            len(lines),
            cursor.head,
            head,
            seqs,
        )
        offset = await self._send(producer, b"\n".join(lines), headers)
        _require_after(cursor, offset)
        return Cursor(cursor.seq + seqs, head, offset + 1, ownership.term, ownership.owner)

    async def _wait_for_more(self, seq: int) -> None:
        """Returns when the outbox may have entries after a seq. A hint: the owner's script reads them."""
        block = math.ceil(seconds_to_tick(IDLE_WAIT_MS / 1000) * 1000)
        await self._shard.redis.xread({self._shard.keys.outbox: f"{seq}-0"}, count=1, block=block)

    # -- Kafka -----------------------------------------------------------------------------------------------

    async def _send(self, producer: AIOKafkaProducer, value: bytes, headers: list[tuple[str, bytes]]) -> int:
        """Returns the offset of the acknowledged record. An unknown offset is an error: the end of the
        journal has to be read again.
        """
        if self._signer:
            headers = self._signer.signed(self._partition.topic, self._shard.keys.shard, headers)
        metadata = await producer.send_and_wait(
            self._partition.topic, value, partition=self._partition.partition, headers=headers
        )
        if metadata is None or metadata.offset < 0:
            raise KafkaError("acknowledged without an offset")
        return int(metadata.offset)

    @asynccontextmanager
    async def _producer(self) -> AsyncIterator[AIOKafkaProducer]:
        # Idempotent: a batch that the client sends again must not be appended twice. After an error, a new
        # producer is made.
        producer = AIOKafkaProducer(
            **brokers.at(self._bootstrap, timeout_ms=10_000),
            enable_idempotence=True,
            acks="all",
            max_request_size=RECORD_BYTES_MAX,
        )
        async with started(producer):
            await producer.partitions_for(self._partition.topic)
            yield producer

    @asynccontextmanager
    async def _consumer(self, fetch_max_wait_ms: int) -> AsyncIterator[AIOKafkaConsumer]:
        consumer = AIOKafkaConsumer(
            **brokers.at(self._bootstrap),
            auto_offset_reset="none",
            enable_auto_commit=False,
            max_partition_fetch_bytes=RECORD_BYTES_MAX,
            fetch_max_wait_ms=fetch_max_wait_ms,
            consumer_timeout_ms=FETCHER_IDLE_MS,
        )
        consumer.assign([self._partition])
        async with started(consumer):
            yield consumer


def _require_after(cursor: Cursor, offset: int) -> None:
    """Raises SteppedDown if a record got an offset that an earlier one had: the journal has lost that one, as
    when its topic was deleted and created again. The checkpoint stays, so the next takeover fences the shard.
    """
    if offset < cursor.next_offset:
        raise SteppedDown(
            f"a record got journal offset {offset}, but there were records up to {cursor.next_offset - 1} "
            "already: the journal has lost some"
        )


def _key_id(signer: Signer | None) -> str:
    return signer.key_id if signer else ""


class _Tail:
    """Watches the owner's partition for a newer marker, whether or not there is anything to relay."""

    def __init__(self, opened: OpenConsumer, partition: TopicPartition, term: int, next_offset: int) -> None:
        self._opened = opened
        self._partition = partition
        self._term = term
        self._next_offset = next_offset
        self._moved = asyncio.Condition()
        #: Set while a reader waits for records.
        self._is_awaited = asyncio.Event()

    async def watch(self) -> None:
        """Reads until cancelled; raises SteppedDown at a marker of a newer term."""
        async with self._opened(TAIL_FETCH_MS) as consumer:
            consumer.seek(self._partition, self._next_offset)
            await self._read(consumer)

    async def _read(self, consumer: AIOKafkaConsumer) -> None:
        while True:
            fetched = await consumer.getmany(self._partition, timeout_ms=TAIL_FETCH_MS)
            records = fetched.get(self._partition, [])
            for record in records:
                term = self._raised_by(record.headers)
                if term > self._term:
                    raise SteppedDown(f"term {term} was raised")
            if records:
                # Before anything else runs, so that the client does not fetch what comes next.
                consumer.pause(self._partition)
                async with self._moved:
                    self._next_offset = records[-1].offset + 1
                    self._moved.notify_all()
                with suppress(TimeoutError):
                    async with asyncio.timeout(TAIL_PAUSE_SECONDS):
                        await self._is_awaited.wait()
                consumer.resume(self._partition)

    def _raised_by(self, headers: Headers) -> int:
        """The term of a marker; 0 for any other record, and for one that readers ignore, so that only a
        process that can take its shard makes the owner step down.
        """
        given = named(headers)
        if given.get("count") != b"0":
            return 0
        authority, _ = journal_keys().authority(self._partition.topic, self._partition.partition, headers)
        must_be_signed = journal_keys().signer is not None
        is_ignored = authority == "forged" or (must_be_signed and authority != "signed")
        return 0 if is_ignored else term_of(headers)

    async def reached(self, offset: int) -> None:
        """Returns when everything up to the offset was read and contained no newer marker."""
        self._is_awaited.set()
        try:
            async with self._moved:
                await self._moved.wait_for(lambda: self._next_offset > offset)
        finally:
            self._is_awaited.clear()
