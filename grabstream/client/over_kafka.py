"""`KafkaClient` and `SyncKafkaClient`: commands by Kafka, for services that have it. Queries go over
HTTP or SQL.

The rules of the results topic, which this follows (docs/commands.md, "Finding your answers"):

- The key of an answer is the id of its command. A client reads all partitions, without a consumer group,
  picks the answers to its own commands, and skips the rest.
- An answer may arrive twice. The second one is skipped.
- A missing answer says nothing about the decision. The same command, sent again with the same id, gets its
  first answer.

After an error, reading resumes automatically where it was. Commands are sent only while answers are read.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError
from pydantic import ValidationError

from grabstream.client.commands import CommandMethods, given
from grabstream.client.exchange import (
    RequestProblem,
    pause_seconds,
)
from grabstream.client.in_thread import InThread
from grabstream.models import commands as sent
from grabstream.models.commands import encode_command, named_in_basket
from grabstream.models.error_words import error_in_words
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.models.refusal_words import refusal_of_basket, refused_with, words_of
from grabstream.models.vocabulary import Answer, AnyCommand, Grab, GrabCommand, OfferCommand

log = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 30.0
#: After this time without an answer, a command is sent again.
REPEAT_SECONDS: Final = 8.0
#: How often brokers are asked for the topic of answers, which may just have been made, and the pause before
#: the second time.
TOPIC_ATTEMPTS: Final = 3
TOPIC_PAUSE_SECONDS: Final = 0.3
#: How long a client of aiokafka may take to stop.
STOP_SECONDS_MAX: Final = 5.0
#: The type of the problem that there is no connection.
_NO_BROKERS: Final = "no_brokers"


class _WaitingCommand(NamedTuple):
    offer: str
    user: str | None
    answer: asyncio.Future[Answer]


class KafkaClient(CommandMethods[Coroutine[Any, Any, Answer], Coroutine[Any, Any, tuple[Answer, ...]]]):
    """Sends commands to `<prefix>.commands`, those of operators to `<prefix>.operations`, and finds their
    answers in `<prefix>.results`. One object serves all requests of a process; it needs the right to write
    to the topics that its calls use.

        async with KafkaClient("127.0.0.1:9092") as client:
            answer = await client.grab("dinner", "bob")

    `kafka` are the brokers to connect to first; `options` are those of aiokafka's clients, such as
    `security_protocol`. Each call ends within `timeout_seconds`: it raises OutcomeUnknown when it is unknown
    whether a command was decided, and RequestProblem when it cannot be decided now. So does the `async with`
    when there is no topic of answers. Coupon codes are not in answers that come by Kafka.
    """

    def __init__(
        self, kafka: str, prefix: str = "grab", *, timeout_seconds: float = TIMEOUT_SECONDS, **options: Any
    ) -> None:
        self._commands, self._operations = f"{prefix}.commands", f"{prefix}.operations"
        # Not idempotent: a repeat is harmless here, and an idempotent producer cannot send after some errors
        # (aiokafka 1017).
        self._producer = AIOKafkaProducer(bootstrap_servers=kafka, acks="all", **options)
        self._results, self._options = f"{prefix}.results", {"bootstrap_servers": kafka, **options}
        self._consumer = self._new_consumer()
        self._timeout_seconds = timeout_seconds
        self._waiting: dict[str, list[_WaitingCommand]] = {}
        self._reading: asyncio.Task[None] | None = None
        #: Set while answers are read.
        self._is_reading = asyncio.Event()
        #: The offset of the next answer, by partition.
        self._positions: dict[TopicPartition, int] = {}

    def _new_consumer(self) -> AIOKafkaConsumer:
        return AIOKafkaConsumer(
            self._results, auto_offset_reset="latest", enable_auto_commit=False, **self._options
        )

    async def __aenter__(self) -> Self:
        try:
            await self._producer.start()
            await self._require_results()
            await self._consumer.start()
            await self._fix_positions()
        except BaseException:
            await self._stop()
            raise
        self._reading = asyncio.create_task(self._read())
        return self

    async def _require_results(self) -> None:
        """Raises RequestProblem when the brokers have no topic of answers. A consumer would wait for it, for
        a long time and with a line in the log at each attempt.
        """
        client = self._producer.client
        client.add_topic(self._results)
        for attempt in range(TOPIC_ATTEMPTS):
            await asyncio.sleep(attempt * TOPIC_PAUSE_SECONDS)
            await client.force_metadata_update()
            if client.cluster.partitions_for_topic(self._results) is not None:
                return
            if self._results in client.cluster.unauthorized_topics:
                return  # the consumer says so
        raise RequestProblem(
            0,
            "no_topic",
            f"no topic {self._results} at {self._options['bootstrap_servers']}: run `grabstream init`, or "
            "set GRAB_KAFKA and GRAB_PREFIX to those of a system",
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        await self._stop()

    async def decide(self, command: AnyCommand) -> Answer:
        """Sends a command, and returns its answer."""
        wire = command.to_wire()
        [answer] = await self._answers([command], encode_command(wire))
        return answer if answer.positive else _with_message(answer, wire)

    async def take_basket(self, grabs: Sequence[Grab], id: str | None = None) -> tuple[Answer, ...]:
        """Sends the grabs of a basket. They get the ids `<id>.1`, `<id>.2` …"""
        wires = named_in_basket([grab.to_wire() for grab in grabs], given(id))
        commands = [Grab.from_wire(wire) for wire in wires]
        answers = await self._answers(commands, b"[" + b",".join(map(encode_command, wires)) + b"]")
        if all(answer.positive for answer in answers):
            return answers
        refusal, refused = refusal_of_basket([answer.to_wire() for answer in answers], wires)
        found = []
        for answer, wire in zip(answers, wires, strict=True):
            if answer.id == refusal.id:
                found.append(_with_message(Answer.from_wire(refusal), refused))
            elif answer.positive or refused_with(answer.to_wire()):
                # The message says at which offer and with which grab the basket was refused.
                found.append(answer)
            else:
                found.append(_with_message(answer, wire))
        return tuple(found)

    async def _answers(self, commands: Sequence[AnyCommand], record: bytes) -> tuple[Answer, ...]:
        topic = self._operations if isinstance(commands[0], OfferCommand) else self._commands
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout_seconds
        reading = self._reading
        if reading is None or reading.done():
            raise RuntimeError("the client does not read answers: use it in `async with`")
        if any(self._is_known(command) for command in commands):
            raise ValueError(f"a command with the id {commands[0].id} is already waiting for its answer")
        last = "no answer"
        is_unknown = False
        attempt = 0
        while True:
            is_sent = False
            waiting = [_WaitingCommand(one.offer, _user_of(one), loop.create_future()) for one in commands]
            for command, one in zip(commands, waiting, strict=True):
                self._waiting.setdefault(command.id, []).append(one)
            try:
                seconds = max(0.0, until - loop.time())
                async with asyncio.timeout(min(seconds, REPEAT_SECONDS)):
                    last = "no_answers: answers cannot be read"
                    await self._is_reading.wait()
                    _require_open(reading)
                    last = "no answer"
                    # Before the metadata is known, aiokafka may send in another order.
                    await self._producer.partitions_for(topic)
                    is_sent = True
                    # The offer is the key, which keeps the commands of an offer in one topic in order.
                    await self._producer.send_and_wait(topic, record, key=commands[0].offer.encode())
                    answers = await self._all_of(waiting, reading)
                if all(answer.decided for answer in answers):
                    return answers
                [first, *_] = (answer for answer in answers if not answer.decided)
                last = f"{first.outcome}: {first.message or 'the command was not decided'}"
            except TimeoutError:
                is_unknown |= is_sent
            except KafkaError as error:
                is_unknown |= is_sent
                last = error_in_words(error)
            finally:
                for command, one in zip(commands, waiting, strict=True):
                    self._forget(command.id, one)
            pause = pause_seconds(attempt)
            if loop.time() + pause >= until or reading.done():
                words = f"{last} within {self._timeout_seconds:g} s"
                if is_unknown:
                    raise OutcomeUnknown(
                        f"{words}. It is unknown whether the command was decided: send it again with the id "
                        f"{commands[0].id}"
                    )
                raise RequestProblem(0, last.partition(":")[0], words)
            await asyncio.sleep(pause)
            attempt += 1

    async def _all_of(
        self, waiting: Sequence[_WaitingCommand], reading: "asyncio.Task[None]"
    ) -> tuple[Answer, ...]:
        pending: set[asyncio.Future[Any]] = {one.answer for one in waiting}
        while pending:
            done, _ = await asyncio.wait({*pending, reading}, return_when=asyncio.FIRST_COMPLETED)
            _require_open(reading)
            pending -= done
        return tuple(one.answer.result() for one in waiting)

    def _is_known(self, command: AnyCommand) -> bool:
        """Whether a command with the same identity waits: its answer could be taken for that of this one."""
        ours = command.offer, _user_of(command)
        return any((one.offer, one.user) == ours for one in self._waiting.get(command.id, ()))

    def _forget(self, id: str, one: _WaitingCommand) -> None:
        left = [other for other in self._waiting[id] if other is not one]
        if left:
            self._waiting[id] = left
        else:
            del self._waiting[id]

    async def _read(self) -> None:
        """Reads answers until cancelled; after each error, with a new consumer."""
        attempt = 0
        while True:
            positions = dict(self._positions)
            try:
                self._is_reading.set()
                await self._read_on()
                error: Exception = KafkaError("the consumer has ended")
            except Exception as failed:
                error = failed
            self._is_reading.clear()
            if self._positions == positions:
                # Nothing was read: perhaps what comes next cannot be.
                self._positions.clear()
            else:
                attempt = 0
            while True:
                pause = pause_seconds(attempt)
                attempt += 1
                log.warning("%s: %r; reading again in %.1f s", self._results, error, pause)
                await asyncio.sleep(pause)
                try:
                    await self._restart()
                    break
                except Exception as failed:
                    error = failed

    async def _restart(self) -> None:
        """Begins to read where the last consumer was, or at the end if that is unknown or gone."""
        await _stopped(self._consumer)
        await self._require_results()
        self._consumer = self._new_consumer()
        await self._consumer.start()
        for partition, offset in self._positions.items():
            if partition in self._consumer.assignment():
                self._consumer.seek(partition, offset)
        await self._fix_positions()

    async def _fix_positions(self) -> None:
        """Fixes the positions to read from before a command is sent; otherwise its answer could be missed."""
        for partition in self._consumer.assignment():
            self._positions[partition] = await self._consumer.position(partition)

    async def _read_on(self) -> None:
        async for record in self._consumer:
            self._positions[TopicPartition(record.topic, record.partition)] = record.offset + 1
            for waiting in self._waiting.get((record.key or b"").decode(errors="replace"), ()):
                # What is not an answer is another service's.
                with suppress(ValidationError):
                    answer = Answer.model_validate_json(record.value or b"")
                    if not waiting.answer.done() and _is_to(answer, waiting):
                        waiting.answer.set_result(answer)

    async def _stop(self) -> None:
        self._is_reading.set()  # calls that wait for it see that the client was closed
        await asyncio.gather(_stopped(self._producer), _stopped(self._consumer))


class SyncKafkaClient(InThread["_Connecting"], CommandMethods[Answer, tuple[Answer, ...]]):
    """`KafkaClient` for threads. It may be used by several at once.

        with SyncKafkaClient("127.0.0.1:9092") as client:
            answer = client.grab("dinner", "bob")

    It connects with its first call, or at the beginning of `with`; RequestProblem says why it cannot.
    Connecting may take up to `timeout_seconds`, which are not subtracted from those of a call.
    """

    def __init__(
        self, kafka: str, prefix: str = "grab", *, timeout_seconds: float = TIMEOUT_SECONDS, **options: Any
    ) -> None:
        make = partial(KafkaClient, kafka, prefix, timeout_seconds=timeout_seconds, **options)
        super().__init__(partial(_Connecting, make, timeout_seconds))

    def __enter__(self) -> Self:
        try:
            self._wait(self._client().connected())
        except BaseException:
            self.end()
            raise
        return self

    def decide(self, command: AnyCommand) -> Answer:
        """Sends a command, and returns its answer."""
        return self._wait(self._client().decide(command))

    def take_basket(self, grabs: Sequence[Grab], id: str | None = None) -> tuple[Answer, ...]:
        """Sends the grabs of a basket. They get the ids `<id>.1`, `<id>.2` …"""
        return self._wait(self._client().take_basket(grabs, id))


class _Connecting:
    """A KafkaClient that connects when it is first used; after an error, with the next use."""

    def __init__(self, make: Callable[[], KafkaClient], timeout_seconds: float) -> None:
        self._make, self._timeout_seconds = make, timeout_seconds
        self._connecting: asyncio.Task[KafkaClient] | None = None
        self.client: KafkaClient | None = None

    async def connected(self) -> KafkaClient:
        """The client; raises RequestProblem."""
        if self.client is not None:
            return self.client
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        # Another caller may try again before this one sees the error.
        connecting = self._connecting
        done, _ = await asyncio.wait({connecting}, timeout=self._timeout_seconds)
        if not done:
            raise RequestProblem(0, _NO_BROKERS, f"no connection within {self._timeout_seconds:g} s")
        if connecting.cancelled():
            raise RequestProblem(0, _NO_BROKERS, "the client has ended")
        return connecting.result()

    async def _connect(self) -> KafkaClient:
        try:
            self.client = await self._make().__aenter__()
        except KafkaError as error:
            raise RequestProblem(0, _NO_BROKERS, error_in_words(error)) from error
        return self.client

    async def decide(self, command: AnyCommand) -> Answer:
        return await (await self.connected()).decide(command)

    async def take_basket(self, grabs: Sequence[Grab], id: str | None) -> tuple[Answer, ...]:
        return await (await self.connected()).take_basket(grabs, id)

    async def end(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self.client is not None:
            await self.client.__aexit__(None, None, None)


def _require_open(reading: "asyncio.Task[None]") -> None:
    """Raises KafkaError when the client was closed."""
    if reading.done():
        why = "the client was closed" if reading.cancelled() else repr(reading.exception())
        raise KafkaError(f"answers are no longer read: {why}")


async def _stopped(client: AIOKafkaConsumer | AIOKafkaProducer) -> None:
    """Stops a client whose broker may never answer."""
    stopping = asyncio.create_task(client.stop())
    await asyncio.wait({stopping}, timeout=STOP_SECONDS_MAX)
    if not stopping.done():
        stopping.cancel()
    elif not stopping.cancelled() and (error := stopping.exception()):
        log.warning("closing a client of Kafka: %r", error)


def _with_message(answer: Answer, command: sent.AnyCommand) -> Answer:
    """A refusal with the words that a gateway would use."""
    return answer.model_copy(update={"message": words_of(answer.to_wire(), command)})


def _user_of(command: AnyCommand) -> str | None:
    return command.user if isinstance(command, Grab | GrabCommand) else None


def _is_to(answer: Answer, waiting: _WaitingCommand) -> bool:
    """Whether an answer with the id of a command is that command's. An `invalid` one names less if its
    command did: that is not one of a client.
    """
    return (answer.offer, answer.user) == (waiting.offer, waiting.user)
