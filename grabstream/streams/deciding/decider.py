"""The decider: reads commands from a topic, has the gate decide them, and writes answers to the topic of
answers (`grab.results`) when they are journaled.

A worker has two, one for `grab.commands` and one for `grab.operations`, with a consumer and a backlog each:
so no crowd of grabs delays a `pause`.

For each shard separately:

1. commands are decided;
2. their events are journaled;
3. Kafka acknowledges answers and rejected bytes.

Then, for each partition:

4. the offset up to which everything is complete is committed.

After a crash between two steps, Kafka delivers commands again, and a repeated command gets its first answer.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError

from grabstream.gate.gate import Gate
from grabstream.gate.queue import CallOrder
from grabstream.models.answers import Answer, encode_answer, without_codes
from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.commands import AnyCommand, Grab, basket_of
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.runtime.ending import end, first_to_end, running
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.runtime.traces import traceparent_of, traces
from grabstream.runtime.trouble import is_trouble
from grabstream.streams import brokers
from grabstream.streams.clients import FETCHER_IDLE_MS, Trouble, error_text, started
from grabstream.streams.deciding.backlog import (
    OpenPartition,
    OpenRecords,
    ShardBacklog,
    WaitingCommands,
)
from grabstream.streams.deciding.decoding import (
    Pace,
    Rejected,
    TopicAuthority,
    decode_record,
    plain_groups,
    reject_undecidable,
)
from grabstream.streams.measures import WorkerMeasures
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

POLL_RECORDS_MAX: Final = 2_000
#: How long a poll waits for records while partitions are paused, which may have room again. Other polls end
#: when there are records, or the decider is stopped.
POLL_WAIT_MS: Final = 200
IDLE_POLL_WAIT_MS: Final = 60_000
#: How long Kafka holds a fetch while there is nothing. The first fetch after partitions were assigned waits
#: for the one before it.
FETCH_WAIT_MS: Final = 1_000
#: Bytes that one poll may return, of all partitions and of one. A broker sends a larger record alone.
POLL_BYTES_MAX: Final = 8 * 1024 * 1024
PARTITION_BYTES_MAX: Final = 1024 * 1024
#: For one shard: commands in one call of the gate, and calls that are being decided or journaled.
CALL_COMMANDS_MAX: Final = 512
CALLS_IN_FLIGHT_MAX: Final = 8
COMMIT_EVERY_SECONDS: Final = 0.1
#: How often to check whether the positions of partitions have moved without a record, past the end of a
#: transaction.
POSITION_EVERY_SECONDS: Final = 5.0
#: How long a revoked partition, or a decider that stops, waits for commands that are still being decided.
DRAIN_SECONDS_MAX: Final = 5.0
#: It no longer waits when none of them was decided for this time: a shard may decide nothing.
STANDS_STILL_SECONDS: Final = 1.0
#: Offers whose deciding shard is remembered.
SHARDS_KNOWN_MAX: Final = 100_000
RETRY_SECONDS: Final = 0.2
RETRY_SECONDS_MAX: Final = 5.0


class Decider:
    """Reads a topic of commands in a consumer group until stopped; any number of deciders share its
    partitions.

    Waits for a server that is unreachable, and for a shard that decides nothing: commands in the topic are
    answered when they are decided, never with `fenced` or `busy`.
    """

    def __init__(
        self,
        gate: Gate,
        bootstrap: str,
        topics: Topics,
        shards: int,
        ready: Callable[[], None] = lambda: None,
        measures: WorkerMeasures | None = None,
        *,
        topic: str | None = None,
        authority: TopicAuthority | None = None,
    ) -> None:
        """Decides the commands of `topic`, by default `commands`, that `authority` lets it carry."""
        self.topic = topic or topics.commands
        self.takes_grabs = self.topic == topics.commands
        self.authority = authority or TopicAuthority(topics)
        self.measures = measures or WorkerMeasures()
        self.gate = gate
        self.shards = shards
        # One order for all sessions: commands in flight from an earlier session are executed before commands
        # that are delivered again.
        self.order = CallOrder()
        self.decided = 0
        self._bootstrap = bootstrap
        self._topics = topics
        self._ready = ready

    async def run(self, stop: asyncio.Event) -> None:
        """Decides until `stop`, then answers and commits the commands it has read, except those of shards
        that decide nothing. Raises errors that are not trouble.
        """
        trouble = Trouble(log, f"deciding commands of {self.topic}")
        pause = RETRY_SECONDS
        while not stop.is_set():
            try:
                await self._session(stop, trouble)
            except BaseException as error:
                if not is_trouble(error):
                    raise
                # Commands that were read and not committed are delivered again.
                pause = RETRY_SECONDS if not trouble.is_present else min(2 * pause, RETRY_SECONDS_MAX)
                trouble.say(error_text(error))
                await asyncio.wait({stopping := asyncio.create_task(stop.wait())}, timeout=pause)
                stopping.cancel()

    async def _session(self, stop: asyncio.Event, trouble: Trouble) -> None:
        consumer = AIOKafkaConsumer(
            **brokers.at(self._bootstrap),
            group_id=decider_group(self._topics, self.topic),
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            # A record rolled back by its sender is not a command.
            isolation_level="read_committed",
            fetch_max_bytes=POLL_BYTES_MAX,
            max_partition_fetch_bytes=PARTITION_BYTES_MAX,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            consumer_timeout_ms=FETCHER_IDLE_MS,
            session_timeout_ms=6_000,
            heartbeat_interval_ms=1_000,
        )
        producer = AIOKafkaProducer(
            **brokers.at(self._bootstrap),
            enable_idempotence=True,
            acks="all",
            max_batch_size=256 * 1024,
            max_request_size=RECORD_BYTES_MAX,
        )
        answers = _Answers(producer, self._topics, self.measures)
        session = _Session(self, consumer, answers, trouble)
        self.measures.records_waiting[self.topic] = session.records_waiting
        consumer.subscribe([self.topic], listener=session)
        async with started(producer):
            answers.partitions = len(await producer.partitions_for(self._topics.results))
            async with started(consumer):
                self._ready()
                await session.run(stop)


def decider_group(topics: Topics, topic: str) -> str:
    """The consumer group of the deciders of a topic. Operations have their own, so that deciders of the
    release before, which do not read them, get none of their partitions.
    """
    group = f"{topics.prefix}.decider"
    return group if topic == topics.commands else f"{group}.operations"


class _DecidedCommands(NamedTuple):
    """Commands and their answers. `answers` is empty if the outcome is unknown. `undecidable` maps the index
    of a rejected command to the reason.
    """

    held: WaitingCommands
    answers: Sequence[Answer]
    undecidable: dict[int, str]


class _Session(ConsumerRebalanceListener):  # type: ignore[misc]
    """The work of one consumer: reads, has each shard decide separately, and commits complete offsets."""

    def __init__(
        self, decider: Decider, consumer: AIOKafkaConsumer, answers: "_Answers", trouble: Trouble
    ) -> None:
        self._decider = decider
        self._consumer = consumer
        self._answers = answers
        self._trouble = trouble
        self._partitions: dict[TopicPartition, OpenPartition] = {}
        self._shards: dict[int, _ShardDecider] = {}
        self._shard_of: dict[str, int] = {}
        self._progress = asyncio.Event()
        #: The poll that waits for records, if any.
        self._polling: asyncio.Timeout | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop`; raises the errors of reading, deciding and answering."""
        shards = [
            _ShardDecider(shard, self._decider, self._answers, self._progress)
            for shard in range(self._decider.shards)
        ]
        self._shards = {decider.shard: decider for decider in shards}
        work = [self._read(stop), self._keep_committing(), *(decider.run() for decider in shards)]
        async with running(*work) as tasks, running(self._end_poll(stop)):
            await first_to_end(tasks)
            await self._drain(list(self._partitions.values()))
            await self._commit()

    def records_waiting(self) -> int:
        """Records of this consumer's partitions that are not answered yet, as of its last fetches."""
        waiting = 0
        for source, partition in self._partitions.items():
            waiting += partition.records
            if partition.read_to is not None and source in self._consumer.assignment():
                waiting += max(0, (self._consumer.highwater(source) or 0) - partition.read_to)
        return waiting

    # -- reading ---------------------------------------------------------------------------------------------

    async def _read(self, stop: asyncio.Event) -> None:
        pace = Pace()
        while not stop.is_set():
            self._pause()
            # Polls even while all partitions are paused, or the group would remove this consumer.
            wait_ms = POLL_WAIT_MS if self._consumer.paused() else IDLE_POLL_WAIT_MS
            fetched = await self._poll(wait_ms)
            self._trouble.over()
            # Looks up the partitions before any wait: a partition that is revoked and assigned again gets a
            # new object, and its records are delivered again.
            taken = [(self._partitions.get(source), records) for source, records in fetched.items()]
            await self._say_jumps(taken)
            await self._take(taken, pace)

    async def _poll(self, wait_ms: int) -> dict[TopicPartition, list[Any]]:
        """The records that there are, at the latest after `wait_ms`; none when the decider is stopped."""
        fetched: dict[TopicPartition, list[Any]] = {}
        polling = self._polling = asyncio.timeout(None)
        try:
            async with polling:
                # If the timeout cancels this, no record is taken.
                fetched = await self._consumer.getmany(timeout_ms=wait_ms, max_records=POLL_RECORDS_MAX)
        except TimeoutError:
            if not polling.expired():
                raise
        finally:
            self._polling = None
        return fetched

    async def _say_jumps(self, fetched: Sequence[tuple[OpenPartition | None, Sequence[Any]]]) -> None:
        """Logs where the topic no longer has the offset at which reading was to continue: the client begins
        again at the first record that there is.
        """
        for partition, records in fetched:
            if partition is None:
                continue
            source, first, expected = partition.source, records[0].offset, partition.read_to
            is_first = expected is None
            if expected is None:
                expected = await self._consumer.committed(source)
            if expected is None or first == expected:
                continue
            if first < expected:
                # Another decider, which has got the partition meanwhile, may have committed more.
                if not is_first or expected > (await self._consumer.end_offsets([source]))[source]:
                    log.error(
                        "%s, partition %d: offset %d, where reading was to continue, is beyond its end: it "
                        "has lost its end, or was created again. It is read from its beginning; commands "
                        "that were decided get their first answers",
                        source.topic, source.partition, expected,
                    )  # fmt: skip
            # Within a session, a gap is the end of a transaction; the lag before is reported for days.
            elif is_first and expected < (
                beginning := (await self._consumer.beginning_offsets([source]))[source]
            ):
                log.error(
                    "%s, partition %d: records from offset %d to %d were deleted before a decider read them: "
                    "their commands are not decided, and their senders get no answer",
                    source.topic, source.partition, expected, beginning - 1,
                )  # fmt: skip

    async def _end_poll(self, stop: asyncio.Event) -> None:
        """Ends the poll that waits when the decider is stopped."""
        await stop.wait()
        if self._polling is not None:
            self._polling.reschedule(0)

    def _pause(self) -> None:
        """Pauses full partitions, and resumes those that have room again."""
        assigned = self._consumer.assignment()
        paused = self._consumer.paused()
        full = {
            source
            for source, partition in self._partitions.items()
            if source in assigned and partition.is_full
        }
        if full - paused:
            self._consumer.pause(*full - paused)
        if with_room := (paused & assigned) - full:
            self._consumer.resume(*with_room)

    async def _take(self, fetched: Sequence[tuple[OpenPartition | None, Sequence[Any]]], pace: Pace) -> None:
        """Gives every shard its commands, and answers elements that are refused at once."""
        refused: dict[int, list[Answer]] = {}
        rejected: list[Rejected] = []
        with_refusals: list[OpenRecords] = []
        for partition, records in fetched:
            for run_records, grabs in self._plain_groups(records):
                if partition is None or partition.gone:
                    break
                if grabs:
                    self._take_plain_group(partition, run_records, grabs)
                    await pace.step()
                    continue
                for record in run_records:
                    if partition.gone:
                        break
                    opened = partition.add([record.offset], [record.key], _traceparents([record]))
                    opened.open += 1  # until its refusals are sent
                    with_refusals.append(opened)
                    understood = await decode_record(record, pace, self._decider.authority)
                    refused.setdefault(partition.source.partition, []).extend(understood.refused)
                    rejected += understood.rejected
                    self._distribute(
                        opened,
                        understood.commands,
                        [0] * len(understood.commands),
                        understood.indexes,
                        _bytes_of(record),
                    )
        if any(refused.values()) or rejected:
            await self._answers.send(refused, rejected)
        for opened in with_refusals:
            opened.open -= 1
        if fetched:
            self._progress.set()

    def _plain_groups(self, records: Sequence[Any]) -> Iterable[tuple[Sequence[Any], Sequence[Grab]]]:
        """Groups the records; a group either consists of plain grabs, which only one topic takes, or not."""
        return plain_groups(records) if self._decider.takes_grabs else [(records, ())]

    def _take_plain_group(
        self, partition: OpenPartition, records: Sequence[Any], grabs: Sequence[Grab]
    ) -> None:
        """Takes records that each have one plain grab."""
        opened = partition.add(
            [record.offset for record in records],
            [record.key for record in records],
            _traceparents(records),
        )
        self._distribute(opened, grabs, range(len(grabs)), None, sum(map(_bytes_of, records)))

    def _distribute(
        self,
        records: OpenRecords,
        commands: Sequence[AnyCommand],
        rows: Sequence[int],
        indexes: Sequence[int] | None,
        size_bytes: int,
    ) -> None:
        """Gives the commands of records to their shards; `indexes` is None if each is the plain grab of a
        record. `size_bytes` is that of the records.
        """
        records.open += len(commands)
        are_plain = indexes is None
        has_baskets = not are_plain and any(map(basket_of, commands))
        by_shard: dict[int, list[int]] = {}
        for at, command in enumerate(commands):
            by_shard.setdefault(self._shard(command.offer), []).append(at)
        for shard, chosen in by_shard.items():
            held = WaitingCommands(
                [commands[at] for at in chosen],
                records,
                [rows[at] for at in chosen],
                [0 if indexes is None else indexes[at] for at in chosen],
                size_bytes // len(commands),
                has_baskets and any(basket_of(commands[at]) for at in chosen),
                are_plain,
            )
            self._shards[shard].add(held)

    def _shard(self, offer: str) -> int:
        shard = self._shard_of.get(offer)
        if shard is None:
            if len(self._shard_of) >= SHARDS_KNOWN_MAX:
                self._shard_of.clear()
            shard = self._shard_of[offer] = shard_of(campaign_of(offer), self._decider.shards)
        return shard

    # -- committing ------------------------------------------------------------------------------------------

    async def _keep_committing(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_to_tick(POSITION_EVERY_SECONDS)):
                    await self._progress.wait()
            self._progress.clear()
            await self._commit()
            await asyncio.sleep(COMMIT_EVERY_SECONDS)

    async def _commit(self) -> None:
        assigned = self._consumer.assignment()
        partitions = [partition for source, partition in self._partitions.items() if source in assigned]
        try:
            complete = [
                (partition, offset)
                for partition in partitions
                if (offset := partition.complete(await self._position(partition))) is not None
            ]
            if not complete:
                return
            await self._consumer.commit({partition.source: offset for partition, offset in complete})
        except (CommitFailedError, IllegalStateError) as error:
            # Another decider has the partitions: it gets these commands again, and they get the same answers.
            log.info("offsets not committed, the group has changed: %s", error)
            return
        for partition, offset in complete:
            partition.committed(offset)

    async def _position(self, partition: OpenPartition) -> int | None:
        """The consumer's position in a partition; None while records before it may not be added yet, or
        before the first fetch. Raises IllegalStateError when the partition is no longer assigned.
        """
        polling, source = self._polling, partition.source
        if polling is None or source not in self._consumer.assignment():
            return None
        if self._consumer.highwater(source) is None:
            return None
        position: int = await self._consumer.position(source)
        # During one poll, the position moves only over offsets without a record.
        return position if self._polling is polling else None

    # -- the group -------------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Before partitions go to another decider, answers and commits the commands that were read from them,
        except those of shards that decide nothing.
        """
        partitions = [self._partitions[source] for source in revoked if source in self._partitions]
        try:
            await self._drain(partitions)
            await self._commit()
        except Exception as error:
            if not is_trouble(error):
                raise
            log.info("before partitions were revoked: %s", error_text(error))
        for partition in partitions:
            partition.gone = True
            del self._partitions[partition.source]

    async def on_partitions_assigned(self, assigned: Any) -> None:
        """Begins to read these partitions, from their committed offsets."""
        self._partitions |= {source: OpenPartition(source) for source in assigned}
        log.info("deciding commands of %d partitions of %s", len(assigned), self._decider.topic)
        beyond = sorted(one.partition for one in assigned if one.partition >= self._answers.partitions)
        if beyond:
            log.warning(
                "%s has partitions (%s) that the topic of answers, with %d, does not have: answers go to the "
                "partition of that number modulo %d",
                self._decider.topic, ", ".join(map(str, beyond)), self._answers.partitions,
                self._answers.partitions,
            )  # fmt: skip

    async def _drain(self, partitions: Sequence[OpenPartition]) -> None:
        """Returns when all records read from partitions are complete, or the rest makes no progress."""
        until = asyncio.get_running_loop().time() + DRAIN_SECONDS_MAX
        left, unchanged_since = -1, 0.0
        while True:
            for partition in partitions:
                partition.complete()
            now = asyncio.get_running_loop().time()
            before, left = left, sum(decider.backlog.commands for decider in self._shards.values())
            if left != before:
                unchanged_since = now
            if not any(partition.records for partition in partitions):
                return
            if now > until or now - unchanged_since > STANDS_STILL_SECONDS:
                log.warning(
                    "%d commands that were read are still being decided: they will be delivered again", left
                )
                return
            await asyncio.sleep(0.02)


def _bytes_of(record: Any) -> int:
    """The bytes of a record toward the bound: its key is kept too, until its commands are answered."""
    return len(record.value or b"") + len(record.key or b"")


def _traceparents(records: Sequence[Any]) -> Sequence[str]:
    """The `traceparent` of each record, if this process traces."""
    if traces() is None:
        return ()
    return [traceparent_of((name.encode(), value) for name, value in record.headers) for record in records]


class _ShardDecider:
    """Decides the commands of one shard: sends calls to the gate in order, several of which may wait for the
    journal.
    """

    def __init__(self, shard: int, decider: Decider, answers: "_Answers", progress: asyncio.Event) -> None:
        self.shard = shard
        self.backlog = ShardBacklog(shard)
        self._decider = decider
        self._answers = answers
        self._progress = progress
        self._added = asyncio.Event()

    def add(self, held: WaitingCommands) -> None:
        """Adds commands of the shard."""
        self.backlog.add(held)
        self._added.set()

    async def run(self) -> None:
        """Decides until cancelled; raises the errors of answering."""
        calls: set[asyncio.Task[None]] = set()
        try:
            while True:
                held = self.backlog.take(CALL_COMMANDS_MAX) if len(calls) < CALLS_IN_FLIGHT_MAX else []
                if held:
                    # The task is started here, so that calls reach the gate in the order of their records.
                    calls.add(asyncio.create_task(self._decide(held)))
                    await asyncio.sleep(0)
                    continue
                added = asyncio.create_task(self._added.wait())
                has_room = len(calls) < CALLS_IN_FLIGHT_MAX
                try:
                    done, _ = await asyncio.wait(
                        {*calls, added} if has_room else calls, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    added.cancel()
                self._added.clear()
                for task in done & calls:
                    task.result()
                calls -= done
        finally:
            await end(calls)

    async def _decide(self, held: list[WaitingCommands]) -> None:
        began = time.perf_counter()
        try:
            decided = await self._call_gate(held)
        except Exception as error:
            if is_trouble(error):
                raise
            log.exception(
                "shard %d: a call with %d commands failed, they are sent again one by one",
                self.shard,
                sum(map(len, held)),
            )
            units = [unit for held_commands in held for unit in held_commands.units()]
            decided = [await self._call_gate_alone(unit) for unit in units]
        answers: dict[int, list[Answer]] = {}
        aside: list[Rejected] = []
        for done in decided:
            partition = done.held.records.partition.source.partition
            answers.setdefault(partition, []).extend(done.answers)
            for index, reason in done.undecidable.items():
                aside += reject_undecidable(*done.held.position(index), done.held.commands[index], reason)
        await self._answers.send(answers, aside)
        if (traced := traces()) is not None:
            seconds = time.perf_counter() - began
            for done in decided:
                # A command that is rejected as undecidable has no answer.
                for answer, cause in zip(done.answers, done.held.traceparents(), strict=False):
                    traced.answered("answer", (answer,), seconds, cause)
        for held_commands in held:
            held_commands.records.open -= len(held_commands)
        self.backlog.done(held)
        self._decider.decided += sum(map(len, held))
        self._progress.set()

    async def _call_gate(self, held: Sequence[WaitingCommands]) -> list[_DecidedCommands]:
        undecidable: dict[int, str] = {}
        commands = [command for held_commands in held for command in held_commands.commands]
        answers = await self._decider.gate.decide(
            commands,
            topic_order=self._decider.order,
            report_undecidable=undecidable.__setitem__,
            are_plain=all(held_commands.are_plain for held_commands in held),
        )
        decided, start = [], 0
        for held_commands in held:
            end = start + len(held_commands)
            aside = {index - start: why for index, why in undecidable.items() if start <= index < end}
            decided.append(_DecidedCommands(held_commands, answers[start:end], aside))
            start = end
        return decided

    async def _call_gate_alone(self, unit: WaitingCommands) -> _DecidedCommands:
        """Decides one command or basket. After an error it is unknown whether its commands are decided: then
        they get no answer and are rejected, so that the other commands continue.
        """
        try:
            [decided] = await self._call_gate([unit])
        except Exception as error:
            if is_trouble(error):
                raise
            reason = f"it is unknown whether this command is decided: {error_text(error)}"
            return _DecidedCommands(unit, (), dict.fromkeys(range(len(unit)), reason))
        return decided


class _Answers:
    """Writes to the topics of answers and of rejected bytes."""

    def __init__(self, producer: AIOKafkaProducer, topics: Topics, measures: WorkerMeasures) -> None:
        self._measures = measures
        self._producer = producer
        self._topics = topics
        #: Of the topic of answers.
        self.partitions = 1

    async def send(self, answers: dict[int, list[Answer]], rejected: Sequence[Rejected]) -> None:
        """Sends answers, each to the partition of its command, and rejected bytes; returns when Kafka has
        acknowledged them. The topic of commands may have been given more partitions than that of answers.
        """
        self._measures.rejected += len(rejected)
        sent = [
            await self._producer.send(
                self._topics.rejected, record.raw, record.key, partition=0, headers=record.headers
            )
            for record in rejected
        ]
        for partition, partition_answers in answers.items():
            sent += await self._send_answers(partition % self.partitions, partition_answers)
        await asyncio.gather(*sent)

    async def _send_answers(self, partition: int, answers: Sequence[Answer]) -> list[Any]:
        sent = []
        batch = self._producer.create_batch()
        for answer in answers:
            # Topics must not hold codes unencrypted: the user's client gets them from a gate, with the same
            # command.
            key, value = answer.id.encode(), encode_answer(without_codes(answer))
            if batch.append(key=key, value=value, timestamp=None) is None:
                sent.append(await self._producer.send_batch(batch, self._topics.results, partition=partition))
                batch = self._producer.create_batch()
                batch.append(key=key, value=value, timestamp=None)
        if batch.record_count():
            sent.append(await self._producer.send_batch(batch, self._topics.results, partition=partition))
        return sent
