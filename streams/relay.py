"""The relay: from a shard's outbox to the journal, exactly once, fenced by the log itself (DESIGN 4.6).

Taking a shard over: 1. raise the term · 2. append a marker · 3. read the partition up to it: what counts there is the truth ·
4. compare Redis with it by hash · then relay: one send in flight, a block counts when its offset directly follows the owner's
last one. The order of these steps is the protocol; change it only together with shared/model/protocol_model.py.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from redis.exceptions import RedisError, ResponseError

from lua.gate import run_script
from lua.keys import ShardKeys
from models.journal import (
    Corrupt,
    Cursor,
    Gap,
    block_headers,
    chain,
    marker_headers,
    parse_block,
)
from streams.topics import RECORD_BYTES_MAX

log = logging.getLogger(__name__)

READ_ENTRIES_MAX: Final = 16
BLOCK_BYTES_MAX: Final = RECORD_BYTES_MAX // 4
IDLE_WAIT_MS: Final = 500
RETRY_SECONDS: Final = 0.2
FENCED_RETRY_SECONDS: Final = 10.0

#: Called with the name of every step that a crash test may want to end the process at.
Step = Callable[[str], None]


class SteppedDown(Exception):
    """Another owner has the shard now; nothing was harmed."""


class NotReconciled(Exception):
    """Redis is behind the journal or of another history: the shard stays fenced until it is rebuilt."""


class Ownership(NamedTuple):
    """What binds every script of an owner: its term, its random id, and the server's life it took over under."""

    term: int
    owner: str
    life: str

    @property
    def arguments(self) -> tuple[str, str, str]:
        """The first arguments of the owner's scripts."""
        return (str(self.term), self.owner, self.life)


class Raised(NamedTuple):
    """The reply of raise_term: the new ownership, and how the shard was reconciled before."""

    ownership: Ownership
    reconciled_life: str


class Truth(NamedTuple):
    """What the journal says up to the own marker: the cursor there, and the hash at every seq since the checkpoint."""

    cursor: Cursor
    hashes: dict[int, bytes]
    checkpoint: Cursor


class ShardRelay:
    """Relays one shard until cancelled or another owner comes. One task, one producer, one consumer.

    `redis` must not decode replies. `block_events_max` bounds the events of a journal record.
    """

    def __init__(
        self,
        redis: Any,
        keys: ShardKeys,
        shards: int,
        bootstrap: str,
        journal: str,
        block_events_max: int = 1000,
        step: Step = lambda name: None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._shards = shards
        self._bootstrap = bootstrap
        self._partition = TopicPartition(journal, keys.shard)
        self._block_events_max = block_events_max
        self._step = step
        self._floor = 0
        self.state = "waiting"

    async def run(self) -> None:
        """Takes the shard over and relays it, again after every error, until cancelled."""
        while True:
            try:
                async with self._producer() as producer, self._consumer() as consumer:
                    await self._tenure(producer, consumer)
            except SteppedDown as reason:
                self.state = "stepped down"
                log.info("shard %d: stepped down: %s", self._keys.shard, reason)
                await asyncio.sleep(RETRY_SECONDS)
            except NotReconciled as reason:
                self.state = f"fenced: {reason}"
                log.error("shard %d stays fenced: %s", self._keys.shard, reason)
                await asyncio.sleep(FENCED_RETRY_SECONDS)
            except (KafkaError, RedisError, OSError) as error:
                self.state = f"retrying: {type(error).__name__}: {error}"
                log.warning("shard %d: %s: %s; taking it over again", self._keys.shard, type(error).__name__, error)
                await asyncio.sleep(RETRY_SECONDS)

    # -- taking over --------------------------------------------------------------------------------------------------

    async def _tenure(self, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer) -> None:
        self.state = "taking over"
        raised = await self._raise_term()
        own = raised.ownership
        marker = await self._send(producer, b"", marker_headers(self._keys.shard, own.term, own.owner))
        truth = await self._read_truth(consumer, marker)
        if (truth.cursor.term, truth.cursor.owner) != (own.term, own.owner):
            self._floor = max(self._floor, truth.cursor.term)
            raise SteppedDown(f"the marker of term {own.term} does not count, term {truth.cursor.term} is in the journal")
        await self._reconcile(raised, truth)
        await self._trim(own, truth.cursor)
        self._step("relay.took_over")
        log.info("shard %d: owner of term %d from seq %d", self._keys.shard, own.term, truth.cursor.seq)
        self.state = "relaying"
        tail = _Tail(consumer, self._partition, own.term, truth.cursor.next_offset)
        watching = asyncio.create_task(tail.watch())
        relaying = asyncio.create_task(self._relay(producer, own, truth.cursor, tail))
        try:
            done, _ = await asyncio.wait({watching, relaying}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (watching, relaying):
                task.cancel()
            await asyncio.gather(watching, relaying, return_exceptions=True)

    async def _raise_term(self) -> Raised:
        owner = secrets.token_hex(8)
        reply = await run_script(self._redis, "raise_term", [self._keys.state], [self._floor, owner])
        term, life, reconciled_life, *_ = (value.decode() for value in reply)
        return Raised(Ownership(int(term), owner, life), reconciled_life)

    async def _checkpoint(self) -> Cursor:
        """Where the last trim was, as a cursor; the journal's beginning when there was none."""
        fields = await self._redis.hmget(
            self._keys.state,
            ["journaled_seq", "journaled_head", "journaled_offset", "journaled_term", "journaled_owner"],
        )
        if fields[0] is None:
            return Cursor()
        seq, head, offset, term, owner = (value.decode() for value in fields)
        return Cursor(int(seq), bytes.fromhex(head), int(offset), int(term), owner)

    async def _read_truth(self, consumer: AIOKafkaConsumer, marker: int) -> Truth:
        """Reads the partition from the checkpoint up to the own marker."""
        checkpoint = await self._checkpoint()
        # The record before the checkpoint is read too: it must be the one that Redis was told of.
        start = max(checkpoint.next_offset - 1, 0)
        if start > marker:
            raise NotReconciled(f"Redis knows journal offset {start}, the journal ends at {marker}: another journal")
        consumer.seek(self._partition, start)
        cursor, hashes = checkpoint, {checkpoint.seq: checkpoint.head}
        try:
            while cursor.next_offset <= marker:
                for record in await self._fetch(consumer):
                    block = parse_block(record.headers, record.value)
                    if record.offset == checkpoint.next_offset - 1:
                        known = (block.term, block.owner) == (checkpoint.term, checkpoint.owner)
                        if not known or (block.count and block.head != checkpoint.head):
                            raise NotReconciled(f"journal offset {record.offset} is not what Redis was told of: another history")
                    if record.offset <= marker:
                        cursor, accepted = cursor.feed(record.offset, block)
                        hashes.update((event.seq, event.hash) for event in accepted)
        except (Corrupt, Gap) as error:
            raise NotReconciled(f"the journal contradicts the checkpoint of Redis at seq {checkpoint.seq}: {error}") from None
        return Truth(cursor, hashes, checkpoint)

    async def _fetch(self, consumer: AIOKafkaConsumer) -> list[Any]:
        fetched = await consumer.getmany(self._partition, timeout_ms=IDLE_WAIT_MS)
        return fetched.get(self._partition, [])  # type: ignore[no-any-return]

    async def _reconcile(self, raised: Raised, truth: Truth) -> None:
        """Step 4: Redis equal to the truth or ahead of it goes on; otherwise the shard is fenced, with the reason."""
        own = raised.ownership
        problem, _ = await self._compare(own, truth)
        if problem is None and raised.reconciled_life == own.life:
            return
        await self._owner_script("fence", [self._keys.state], own, "the shard is being reconciled with the journal")
        problem, seq = await self._compare(own, truth)
        if problem is not None:
            reason = f"{problem}; rebuild the shard's state from the journal"
            await self._owner_script("fence", [self._keys.state], own, reason)
            raise NotReconciled(reason)
        await self._owner_script("reconcile", [self._keys.state], own, seq, self._shards)
        self._floor = own.term

    async def _compare(self, own: Ownership, truth: Truth) -> tuple[str | None, int]:
        """What is wrong with Redis against the truth, or None, and the shard's seq. Chains the outbox from the checkpoint."""
        seq, head = truth.checkpoint.seq, truth.checkpoint.head
        tail = truth.cursor.seq
        while True:
            shard_seq, lines = await self._read_outbox(own, seq)
            for hash_ in chain(head, lines):
                seq, head = seq + 1, hash_
                if seq <= tail and truth.hashes[seq] != head:
                    return f"Redis has another history than the journal at seq {seq}", shard_seq
            if not lines:
                break
        if seq != shard_seq:
            return f"Redis is at seq {shard_seq}, its outbox ends at {seq}: a hole", shard_seq
        if seq < tail:
            return f"Redis is behind the journal: seq {seq} of {tail}", shard_seq
        return None, shard_seq

    # -- relaying -----------------------------------------------------------------------------------------------------

    async def _relay(self, producer: AIOKafkaProducer, own: Ownership, cursor: Cursor, tail: "_Tail") -> None:
        read = await self._read_outbox(own, cursor.seq)
        while True:
            shard_seq, lines = read
            if not lines and shard_seq > cursor.seq:
                raise SteppedDown(f"the outbox has a hole behind seq {cursor.seq}")  # taking over again names it and fences
            if not lines:
                await self._wait_for_more(cursor.seq)
                read = await self._read_outbox(own, cursor.seq)
                continue
            last = cursor.seq + len(lines)
            for block in _blocks(lines, self._block_events_max):
                hashes = chain(cursor.head, block)
                headers = block_headers(self._keys.shard, own.term, own.owner, cursor.seq + 1, len(block), cursor.head, hashes[-1])
                offset = await self._send(producer, b"\n".join(block), headers)
                if offset != cursor.next_offset:
                    # Something stands between: it counts only if it is not a newer owner's.
                    await tail.reached(offset)
                self._step("relay.acknowledged")
                cursor = Cursor(cursor.seq + len(block), hashes[-1], offset + 1, own.term, own.owner)
                if cursor.seq == last:
                    # What comes next is read while what was acknowledged is trimmed: one way to Redis less a block.
                    _, read = await asyncio.gather(self._trim(own, cursor), self._read_outbox(own, cursor.seq))
                else:
                    await self._trim(own, cursor)
                self._step("relay.trimmed")

    async def _read_outbox(self, own: Ownership, behind_seq: int) -> tuple[int, list[bytes]]:
        """The shard's seq and the lines that follow `behind_seq`, a bounded number; raises SteppedDown at a hole."""
        reply = await self._owner_script("read_outbox", [self._keys.state, self._keys.outbox], own, behind_seq + 1, READ_ENTRIES_MAX)
        lines: list[bytes] = []
        for entry_id, fields in reply[1]:
            first = int(entry_id.partition(b"-")[0])
            entry = fields[1::2]
            known = behind_seq + len(lines) - first + 1
            if known < 0:
                break  # a hole: `_compare` names it, and a relay never gets here with one
            lines.extend(entry[known:])
        return int(reply[0]), lines

    async def _wait_for_more(self, seq: int) -> None:
        """Returns when the outbox may hold something behind seq; only a hint, the bound script reads."""
        await self._redis.xread({self._keys.outbox: f"{seq}-0"}, count=1, block=IDLE_WAIT_MS)

    async def _trim(self, own: Ownership, cursor: Cursor) -> None:
        await self._owner_script(
            "trim",
            [self._keys.state, self._keys.outbox],
            own,
            cursor.seq,
            cursor.head.hex(),
            cursor.next_offset,
            self._keys.channel,
        )

    async def _owner_script(self, name: str, keys: list[str], own: Ownership, *arguments: object) -> Any:
        try:
            return await run_script(self._redis, name, keys, (*own.arguments, *arguments))
        except ResponseError as error:
            if str(error).startswith("LOST"):
                raise SteppedDown(str(error)) from None
            raise

    # -- Kafka --------------------------------------------------------------------------------------------------------

    async def _send(self, producer: AIOKafkaProducer, value: bytes, headers: list[tuple[str, bytes]]) -> int:
        """The offset of the acknowledged record; an unknown one is an error, and the journal's tail has to be read again."""
        metadata = await producer.send_and_wait(self._partition.topic, value, partition=self._partition.partition, headers=headers)
        if metadata is None or metadata.offset < 0:
            raise KafkaError("acknowledged without an offset")
        return int(metadata.offset)

    @asynccontextmanager
    async def _producer(self) -> AsyncIterator[AIOKafkaProducer]:
        # Idempotent: a batch that is retried inside the client must not be appended twice. A new one after every error.
        producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            enable_idempotence=True,
            acks="all",
            max_request_size=RECORD_BYTES_MAX,
            request_timeout_ms=10_000,
        )
        await producer.start()
        try:
            await producer.partitions_for(self._partition.topic)
            yield producer
        finally:
            await _close(producer.stop())

    @asynccontextmanager
    async def _consumer(self) -> AsyncIterator[AIOKafkaConsumer]:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            auto_offset_reset="none",
            enable_auto_commit=False,
            max_partition_fetch_bytes=RECORD_BYTES_MAX,
        )
        consumer.assign([self._partition])
        await consumer.start()
        try:
            yield consumer
        finally:
            await _close(consumer.stop())


class _Tail:
    """The owner's eye on its partition: sees a newer marker, with or without work of its own."""

    def __init__(self, consumer: AIOKafkaConsumer, partition: TopicPartition, term: int, next_offset: int) -> None:
        self._consumer = consumer
        self._partition = partition
        self._term = term
        self._next_offset = next_offset
        self._moved = asyncio.Condition()

    async def watch(self) -> None:
        """Reads until cancelled; raises SteppedDown at a marker of a newer term."""
        self._consumer.seek(self._partition, self._next_offset)
        while True:
            fetched = await self._consumer.getmany(self._partition, timeout_ms=IDLE_WAIT_MS)
            records = fetched.get(self._partition, [])
            for record in records:
                headers = dict(record.headers)
                if headers.get("count") == b"0" and int(headers["term"]) > self._term:
                    raise SteppedDown(f"term {int(headers['term'])} was raised")
            if records:
                async with self._moved:
                    self._next_offset = records[-1].offset + 1
                    self._moved.notify_all()

    async def reached(self, offset: int) -> None:
        """Returns when everything up to the offset was read, and no newer owner was there."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._next_offset > offset)


def _blocks(lines: list[bytes], events_max: int) -> list[list[bytes]]:
    """The lines in blocks of bounded count and size."""
    blocks: list[list[bytes]] = []
    size = 0
    for line in lines:
        if not blocks or len(blocks[-1]) == events_max or size + len(line) > BLOCK_BYTES_MAX:
            blocks.append([])
            size = 0
        blocks[-1].append(line)
        size += len(line) + 1
    return blocks


async def _close(closing: Any) -> None:
    """Closes a client that may have lost its broker, without hiding why we are closing."""
    try:
        await asyncio.wait_for(closing, 5)  # noqa: TID251 - in a task of its own, since the client may swallow our cancellation
    except (TimeoutError, KafkaError, OSError) as error:
        log.warning("closing a Kafka client: %r", error)
