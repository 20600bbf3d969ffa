"""The decider: commands from the topic, decided in batches, answered on the results topic when they are
journaled.

For each shard, by itself: 1. decided · 2. journaled · 3. answers and rejected bytes acknowledged by Kafka.
Then, for each partition: 4. the offset up to which everything is complete is committed.

Ending anywhere in between delivers commands again, and a repeated command gets its first answer again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError

from grabstream.lua.ending import end, first_to_end, running
from grabstream.lua.gate.door import Gate
from grabstream.lua.gate.queue import Order
from grabstream.lua.trouble import is_trouble
from grabstream.models.answers import Answer, encode_answer
from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.commands import basket_of
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.streams.clients import Trouble, in_words, started
from grabstream.streams.deciding.backlog import (
    HeldCommand,
    OpenPartition,
    OpenRecord,
    ShardBacklog,
    by_partition,
)
from grabstream.streams.deciding.understanding import Pace, Place, Rejected, Understood, set_aside, understand
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

POLL_RECORDS_MAX: Final = 2_000
POLL_WAIT_MS: Final = 200
#: What one poll may bring, of all partitions and of one. A broker sends a larger record all the same, alone.
POLL_BYTES_MAX: Final = 8 * 1024 * 1024
PARTITION_BYTES_MAX: Final = 1024 * 1024
#: Of one shard: commands in one call of the gate, and calls that are decided or wait for the journal.
CALL_COMMANDS_MAX: Final = 512
CALLS_IN_FLIGHT_MAX: Final = 8
COMMIT_EVERY_SECONDS: Final = 0.1
#: How long partitions that are taken away, or a decider that is to end, wait for what is still being decided
#: …
DRAIN_SECONDS_MAX: Final = 5.0
#: … as long as something of it goes on within this time: a shard that stands still is not waited for.
STANDS_STILL_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.2
RETRY_SECONDS_MAX: Final = 5.0


class Decider:
    """Reads the commands topic in a consumer group until stopped; any number of them share the partitions.

    A server that is away is waited for, and so is a shard that decides nothing: what stands in the topic is
    answered once it can be decided, never `fenced` or `busy`.
    """

    def __init__(
        self,
        gate: Gate,
        bootstrap: str,
        topics: Topics,
        shards: int,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.gate = gate
        self.shards = shards
        # One for all sessions: what an earlier one has in flight is carried out before what is delivered
        # again.
        self.order = Order()
        self.decided = 0
        self._bootstrap = bootstrap
        self._topics = topics
        self._ready = ready

    async def run(self, stop: asyncio.Event) -> None:
        """Decides until `stop`, then answers and commits what it has read, as far as its shards go on; raises
        errors of our own.
        """
        trouble = Trouble(log, "deciding commands of the topic")
        pause = RETRY_SECONDS
        while not stop.is_set():
            try:
                await self._session(stop, trouble)
            except BaseException as error:
                if not is_trouble(error):
                    raise
                # What was read and not committed is delivered again.
                pause = RETRY_SECONDS if not trouble.is_said else min(2 * pause, RETRY_SECONDS_MAX)
                trouble.say(in_words(error))
                await asyncio.wait({stopping := asyncio.create_task(stop.wait())}, timeout=pause)
                stopping.cancel()

    async def _session(self, stop: asyncio.Event, trouble: Trouble) -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            group_id=f"{self._topics.prefix}.decider",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_max_bytes=POLL_BYTES_MAX,
            max_partition_fetch_bytes=PARTITION_BYTES_MAX,
            session_timeout_ms=6_000,
            heartbeat_interval_ms=1_000,
        )
        producer = AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            enable_idempotence=True,
            acks="all",
            max_batch_size=256 * 1024,
            max_request_size=RECORD_BYTES_MAX,
        )
        session = _Session(self, consumer, _Answers(producer, self._topics), trouble)
        consumer.subscribe([self._topics.commands], listener=session)
        async with started(producer):
            await producer.partitions_for(self._topics.results)
            async with started(consumer):
                self._ready()
                await session.run(stop)


class _Done(NamedTuple):
    """A command's answer (None: nothing is known of it), and why it was set aside, if it was."""

    held: HeldCommand
    answer: Answer | None
    undecidable: str | None = None


class _Session(ConsumerRebalanceListener):  # type: ignore[misc]
    """One consumer's life: reads, lets every shard decide by itself, and commits after what is complete."""

    def __init__(
        self, decider: Decider, consumer: AIOKafkaConsumer, answers: "_Answers", trouble: Trouble
    ) -> None:
        self._decider = decider
        self._consumer = consumer
        self._answers = answers
        self._trouble = trouble
        self._partitions: dict[TopicPartition, OpenPartition] = {}
        self._lanes: dict[int, _Lane] = {}
        self._progress = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`; raises what reading, deciding or answering raises."""
        lanes = [
            _Lane(shard, self._decider, self._answers, self._progress)
            for shard in range(self._decider.shards)
        ]
        self._lanes = {lane.shard: lane for lane in lanes}
        work = [self._read(stop), self._commit_again_and_again(), *(lane.run() for lane in lanes)]
        async with running(*work) as tasks:
            await first_to_end(tasks)
            await self._drain(list(self._partitions.values()))
            await self._commit()

    # -- reading ---------------------------------------------------------------------------------------------

    async def _read(self, stop: asyncio.Event) -> None:
        pace = Pace()
        while not stop.is_set():
            self._pause()
            # Asked also while nothing may be read, or the group would take us for dead.
            fetched = await self._consumer.getmany(timeout_ms=POLL_WAIT_MS, max_records=POLL_RECORDS_MAX)
            self._trouble.over()
            # Found at once: a partition that comes back after it was taken away begins anew, with records
            # that are delivered again.
            await self._take(
                [(self._partitions.get(source), records) for source, records in fetched.items()], pace
            )

    def _pause(self) -> None:
        """What is full is not read, until there is room again."""
        assigned = self._consumer.assignment()
        paused = self._consumer.paused()
        full = {
            source
            for source, partition in self._partitions.items()
            if source in assigned and partition.is_full
        }
        if full - paused:
            self._consumer.pause(*full - paused)
        if again := (paused & assigned) - full:
            self._consumer.resume(*again)

    async def _take(self, fetched: Sequence[tuple[OpenPartition | None, Sequence[Any]]], pace: Pace) -> None:
        """Gives every shard its commands, and answers what is refused at once."""
        refused: dict[int, list[Answer]] = {}
        rejected: list[Rejected] = []
        taken: list[OpenRecord] = []
        for partition, records in fetched:
            for record in records:
                if partition is None or partition.gone:
                    break
                opened = partition.add(Place.of(record))
                opened.open += 1  # until all of it is on its way
                taken.append(opened)
                understood = await understand(record, pace)
                if understood.refused:
                    refused.setdefault(partition.source.partition, []).extend(understood.refused)
                rejected.extend(understood.rejected)
                self._share_out(opened, understood, len(record.value or b""))
        if refused or rejected:
            await self._answers.send(refused, rejected)
        for opened in taken:
            opened.open -= 1
        if taken:
            self._progress.set()

    def _share_out(self, opened: OpenRecord, understood: Understood, size: int) -> None:
        of_shards: dict[int, list[HeldCommand]] = {}
        of_one = size // max(1, len(understood.commands))
        for command, index in zip(understood.commands, understood.places, strict=True):
            shard = shard_of(campaign_of(command.offer), self._decider.shards)
            of_shards.setdefault(shard, []).append(HeldCommand(command, opened, index, of_one))
        for shard, held in of_shards.items():
            self._lanes[shard].add(held)

    # -- committing ------------------------------------------------------------------------------------------

    async def _commit_again_and_again(self) -> None:
        while True:
            await self._progress.wait()
            self._progress.clear()
            await self._commit()
            await asyncio.sleep(COMMIT_EVERY_SECONDS)

    async def _commit(self) -> None:
        assigned = self._consumer.assignment()
        partitions = [partition for source, partition in self._partitions.items() if source in assigned]
        complete = [
            (partition, offset) for partition in partitions if (offset := partition.complete()) is not None
        ]
        if not complete:
            return
        try:
            await self._consumer.commit({partition.source: offset for partition, offset in complete})
        except (CommitFailedError, IllegalStateError) as error:
            # The partitions went to another decider: it gets these commands again and gives the same answers.
            log.info("offsets not committed, the group has changed: %s", error)
            return
        for partition, offset in complete:
            partition.committed(offset)

    # -- the group -------------------------------------------------------------------------------------------

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Before partitions go to another decider, what was read from them is answered and committed, as far
        as shards go on.
        """
        taken = [self._partitions[source] for source in revoked if source in self._partitions]
        try:
            await self._drain(taken)
            await self._commit()
        except Exception as error:
            if not is_trouble(error):
                raise
            log.info("before partitions were taken away: %s", in_words(error))
        for partition in taken:
            partition.gone = True
            del self._partitions[partition.source]

    async def on_partitions_assigned(self, assigned: Any) -> None:
        """Begins anew with these, from what was committed."""
        self._partitions |= {source: OpenPartition(source) for source in assigned}
        log.info("deciding commands of %d partitions", len(assigned))

    async def _drain(self, partitions: Sequence[OpenPartition]) -> None:
        """Returns when everything read from partitions is complete, or what is left stands still."""
        until = asyncio.get_running_loop().time() + DRAIN_SECONDS_MAX
        left, since = -1, 0.0
        while True:
            for partition in partitions:
                partition.complete()
            now = asyncio.get_running_loop().time()
            was, left = left, sum(lane.backlog.commands for lane in self._lanes.values())
            if left != was:
                since = now
            if not any(partition.records for partition in partitions):
                return
            if now > until or now - since > STANDS_STILL_SECONDS:
                log.warning(
                    "%d commands that were read are still being decided: they will be delivered again", left
                )
                return
            await asyncio.sleep(0.02)


class _Lane:
    """What decides the commands of one shard: one call after the other goes to the gate, and several wait
    there for the journal.
    """

    def __init__(self, shard: int, decider: Decider, answers: "_Answers", progress: asyncio.Event) -> None:
        self.shard = shard
        self.backlog = ShardBacklog(shard)
        self._decider = decider
        self._answers = answers
        self._progress = progress
        self._more = asyncio.Event()

    def add(self, held: list[HeldCommand]) -> None:
        """What a record brings for the shard."""
        self.backlog.add(held)
        self._more.set()

    async def run(self) -> None:
        """Decides until cancelled; raises what answering raises."""
        calls: set[asyncio.Task[None]] = set()
        try:
            while True:
                held = self.backlog.take(CALL_COMMANDS_MAX) if len(calls) < CALLS_IN_FLIGHT_MAX else []
                if held:
                    # The task is made here, so that calls reach the gate in the order they were read.
                    calls.add(asyncio.create_task(self._decide(held)))
                    await asyncio.sleep(0)
                    continue
                more = asyncio.create_task(self._more.wait())
                room = len(calls) < CALLS_IN_FLIGHT_MAX
                done, _ = await asyncio.wait(
                    {*calls, more} if room else calls, return_when=asyncio.FIRST_COMPLETED
                )
                more.cancel()
                self._more.clear()
                for task in done & calls:
                    task.result()
                calls -= done
        finally:
            await end(calls)

    async def _decide(self, held: list[HeldCommand]) -> None:
        try:
            decided = await self._ask(held)
        except Exception as error:
            if is_trouble(error):
                raise
            log.exception(
                "shard %d: a call for %d commands failed, they are asked for one by one",
                self.shard,
                len(held),
            )
            decided = [one for unit in _units(held) for one in await self._ask_alone(unit)]
        answers = by_partition((one.held, one.answer) for one in decided if one.answer is not None)
        aside = [
            rejected for one in decided if one.undecidable
            for rejected in set_aside(
                one.held.record.place, one.held.index, one.held.command, one.undecidable
            )
        ]  # fmt: skip
        await self._answers.send(answers, aside)
        for one in held:
            one.record.open -= 1
        self.backlog.done(held)
        self._decider.decided += len(held)
        self._progress.set()

    async def _ask(self, held: Sequence[HeldCommand]) -> list[_Done]:
        undecidable: dict[int, str] = {}
        commands = [one.command for one in held]
        answers = await self._decider.gate.decide(
            commands, reader=self._decider.order, report_undecidable=undecidable.__setitem__
        )
        return [
            _Done(one, answer, undecidable.get(place))
            for place, (one, answer) in enumerate(zip(held, answers, strict=True))
        ]

    async def _ask_alone(self, unit: Sequence[HeldCommand]) -> list[_Done]:
        """Commands that no answer may be given to, since nobody knows whether they are decided, are set
        aside, and the others go on.
        """
        try:
            return await self._ask(unit)
        except Exception as error:
            if is_trouble(error):
                raise
            return [_Done(one, None, f"decided or not, nobody knows: {in_words(error)}") for one in unit]


def _units(held: Sequence[HeldCommand]) -> list[list[HeldCommand]]:
    """Commands one by one, those of a basket together."""
    units: list[list[HeldCommand]] = []
    for one in held:
        basket = basket_of(one.command)
        if units and basket is not None and basket_of(units[-1][0].command) == basket:
            units[-1].append(one)
        else:
            units.append([one])
    return units


class _Answers:
    """What goes to the topics of answers and of rejected bytes."""

    def __init__(self, producer: AIOKafkaProducer, topics: Topics) -> None:
        self._producer = producer
        self._topics = topics

    async def send(self, answers: dict[int, list[Answer]], rejected: Sequence[Rejected]) -> None:
        """Sends answers, each to the partition its command came from, and rejected bytes; returns when Kafka
        has them.
        """
        sent = [
            await self._producer.send(self._topics.rejected, one.raw, one.key, partition=0,
            headers=one.headers) for one in rejected
        ]  # fmt: skip
        for partition, of_partition in answers.items():
            sent += await self._send_answers(partition, of_partition)
        await asyncio.gather(*sent)

    async def _send_answers(self, partition: int, answers: Sequence[Answer]) -> list[Any]:
        sent = []
        batch = self._producer.create_batch()
        for answer in answers:
            key, value = answer.id.encode(), encode_answer(_without_codes(answer))
            if batch.append(key=key, value=value, timestamp=None) is None:
                sent.append(await self._producer.send_batch(batch, self._topics.results, partition=partition))
                batch = self._producer.create_batch()
                batch.append(key=key, value=value, timestamp=None)
        if batch.record_count():
            sent.append(await self._producer.send_batch(batch, self._topics.results, partition=partition))
        return sent


def _without_codes(answer: Answer) -> Answer:
    """A code that was handed out stands in no topic in clear: its taker asks a gate, with the same command. A
    number is `place`.
    """
    if answer.coupon_code is None:
        return answer
    return msgspec.structs.replace(answer, coupon_code=None, coupon_codes=())
