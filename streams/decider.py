"""The decider: commands from the topic, decided in batches, answered on the results topic when they are journaled.

The commit order: 1. decided · 2. journaled · 3. answers and rejected bytes acknowledged by Kafka · 4. offsets committed. Ending
anywhere in between delivers commands again, and a repeated command gets its first answer again.
"""

import asyncio
import logging
from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.errors import CommitFailedError, IllegalStateError

from lua.gate import Gate
from models.answers import Answer, encode_answer, refusal
from models.commands import AnyCommand, Undecodable, basket_of, decode_commands, encode_command, secret_of
from models.outcomes import Outcome
from streams.clients import started
from streams.topics import RECORD_BYTES_MAX, Topics

log = logging.getLogger(__name__)

POLL_RECORDS_MAX: Final = 2_000
POLL_WAIT_MS: Final = 200
POLLS_IN_FLIGHT_MAX: Final = 4
#: A command from the topic is not given up while Redis is away; after this long the process ends, and another tries.
DECIDE_TIMEOUT_MS: Final = 600_000


class _Rejected(NamedTuple):
    """What could not be understood, with where it stood."""

    key: bytes | None
    raw: bytes
    headers: list[tuple[str, bytes]]


class _Poll(NamedTuple):
    """What one poll brought: commands and the partition of each, answers known already, and the offsets behind it."""

    commands: list[AnyCommand]
    arrays: list[int]
    partitions: list[int]
    refused: list[tuple[int, Answer]]
    rejected: list[_Rejected]
    offsets: dict[TopicPartition, int]


class Decider:
    """Reads the commands topic in a consumer group until stopped; any number of them share the partitions."""

    def __init__(self, gate: Gate, bootstrap: str, topics: Topics, patience_ms: int = 10_000) -> None:
        self._gate = gate
        self._bootstrap = bootstrap
        self._topics = topics
        self._patience_ms = patience_ms
        self._in_flight: asyncio.Queue[asyncio.Task[tuple[_Poll, list[Answer]]]] = asyncio.Queue(POLLS_IN_FLIGHT_MAX)
        self.decided = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Decides until `stop`, then answers and commits what it has read; raises what it cannot go on from."""
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap,
            group_id=f"{self._topics.prefix}.decider",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            max_partition_fetch_bytes=RECORD_BYTES_MAX,
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
        consumer.subscribe([self._topics.commands], listener=_Drain(self._in_flight))
        async with started(producer):
            await producer.partitions_for(self._topics.results)
            async with started(consumer):
                await self._run(consumer, producer, stop)

    async def _run(self, consumer: AIOKafkaConsumer, producer: AIOKafkaProducer, stop: asyncio.Event) -> None:
        reading = asyncio.create_task(self._read(consumer, stop))
        answering = asyncio.create_task(self._answer(consumer, producer))
        try:
            await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
                drained = asyncio.create_task(self._in_flight.join())
                await asyncio.wait({drained, answering}, return_when=asyncio.FIRST_COMPLETED)
                drained.cancel()
            if answering.done():
                answering.result()
        finally:
            for task in (reading, answering):
                task.cancel()
            await asyncio.gather(reading, answering, return_exceptions=True)
            while not self._in_flight.empty():
                self._in_flight.get_nowait().cancel()

    # -- reading and deciding -----------------------------------------------------------------------------------------

    async def _read(self, consumer: AIOKafkaConsumer, stop: asyncio.Event) -> None:
        while not stop.is_set():
            fetched = await consumer.getmany(timeout_ms=POLL_WAIT_MS, max_records=POLL_RECORDS_MAX)
            if not fetched:
                continue
            poll = _understand(fetched)
            # The task is made here, so that polls reach the gate in the order they were read.
            await self._in_flight.put(asyncio.create_task(self._decide(poll)))

    async def _decide(self, poll: _Poll) -> tuple[_Poll, list[Answer]]:
        if not any(map(basket_of, poll.commands)):
            return poll, await self._decide_all(poll.commands)
        # A basket is the grabs of one array: those of another record must not fall into it, whatever its name.
        arrays = [
            [command for _, command in of_array]
            for _, of_array in groupby(zip(poll.arrays, poll.commands, strict=True), lambda pair: pair[0])
        ]
        answered = await asyncio.gather(*map(self._decide_all, arrays))
        return poll, [answer for of_array in answered for answer in of_array]

    async def _decide_all(self, commands: list[AnyCommand]) -> list[Answer]:
        return await self._gate.decide(commands, "journaled", self._patience_ms, timeout_ms=DECIDE_TIMEOUT_MS, order=self)

    # -- answering ----------------------------------------------------------------------------------------------------

    async def _answer(self, consumer: AIOKafkaConsumer, producer: AIOKafkaProducer) -> None:
        while True:
            task = await self._in_flight.get()
            try:
                poll, answers = await task
                await self._publish(producer, poll, answers)
                await self._commit(consumer, poll)
                self.decided += len(answers)
            finally:
                self._in_flight.task_done()

    async def _publish(self, producer: AIOKafkaProducer, poll: _Poll, answers: list[Answer]) -> None:
        """Sends answers, each to the partition its command came from, and rejected bytes; returns when Kafka has them."""
        by_partition: dict[int, list[Answer]] = {}
        for partition, answer in zip(poll.partitions, answers, strict=True):
            by_partition.setdefault(partition, []).append(answer)
        for partition, answer in poll.refused:
            by_partition.setdefault(partition, []).append(answer)
        sent = [
            await producer.send(self._topics.rejected, rejected.raw, rejected.key, partition=0, headers=rejected.headers)
            for rejected in poll.rejected
        ]
        for partition, of_partition in by_partition.items():
            sent += await self._send_answers(producer, partition, of_partition)
        await asyncio.gather(*sent)

    async def _send_answers(self, producer: AIOKafkaProducer, partition: int, answers: Iterable[Answer]) -> list[Any]:
        sent = []
        batch = producer.create_batch()
        for answer in answers:
            key, value = answer.id.encode(), encode_answer(_without_codes(answer))
            if batch.append(key=key, value=value, timestamp=None) is None:
                sent.append(await producer.send_batch(batch, self._topics.results, partition=partition))
                batch = producer.create_batch()
                batch.append(key=key, value=value, timestamp=None)
        sent.append(await producer.send_batch(batch, self._topics.results, partition=partition))
        return sent

    async def _commit(self, consumer: AIOKafkaConsumer, poll: _Poll) -> None:
        assigned = consumer.assignment()
        offsets = {partition: offset for partition, offset in poll.offsets.items() if partition in assigned}
        if not offsets:
            return
        try:
            await consumer.commit(offsets)
        except (CommitFailedError, IllegalStateError) as error:
            # The partitions went to another decider: it gets these commands again and gives the same answers.
            log.info("offsets not committed, the group has changed: %s", error)


class _Drain(ConsumerRebalanceListener):  # type: ignore[misc]
    """Before partitions go to another decider, what was read from them is answered and committed."""

    def __init__(self, in_flight: "asyncio.Queue[Any]") -> None:
        self._in_flight = in_flight

    async def on_partitions_revoked(self, revoked: Any) -> None:
        try:
            await asyncio.wait_for(self._in_flight.join(), 5)  # noqa: TID251 - called by the client, in its own task
        except TimeoutError:
            log.warning("partitions taken away while commands were being decided: they will be delivered again")

    async def on_partitions_assigned(self, assigned: Any) -> None:
        log.info("deciding commands of %d partitions", len(assigned))


def _without_codes(answer: Answer) -> Answer:
    """A code that was handed out stands in no topic in clear: its taker asks a gate, with the same command. A number is `place`."""
    if answer.coupon_code is None:
        return answer
    return msgspec.structs.replace(answer, coupon_code=None, coupon_codes=())


def _without_secret(command: AnyCommand | Undecodable) -> AnyCommand | Undecodable:
    """A command whose secret must not stand in a topic is refused here; the gate takes it."""
    if isinstance(command, Undecodable) or (field := secret_of(command)) is None:
        return command
    reason = f"{field}: is taken by the gate only, since the topic would keep it in clear"
    return Undecodable(reason, encode_command(command), command.id, command.offer)


def _understand(fetched: dict[TopicPartition, list[Any]]) -> _Poll:
    """The records as commands; what cannot be understood keeps its bytes, and is answered when its id can be read."""
    poll = _Poll([], [], [], [], [], {})
    array = 0
    for source, records in fetched.items():
        for record in records:
            array += 1
            for index, command in enumerate(map(_without_secret, decode_commands(record.value or b""))):
                if not isinstance(command, Undecodable):
                    poll.commands.append(command)
                    poll.arrays.append(array)
                    poll.partitions.append(source.partition)
                    continue
                where = (("topic", source.topic), ("partition", source.partition), ("offset", record.offset), ("index", index))
                headers = [("reason", command.reason.encode()), *((name, str(value).encode()) for name, value in where)]
                poll.rejected.append(_Rejected(record.key, command.raw, headers))
                if command.id is not None:
                    answer = refusal(command.id, Outcome.invalid, command.offer, command.reason)
                    poll.refused.append((source.partition, answer))
        poll.offsets[source] = records[-1].offset + 1
    return poll
