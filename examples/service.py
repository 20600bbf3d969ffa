"""A service that sends commands by Kafka and finds its own answers.

    python service.py OFFER USER [--id ID]

The rules of the results topic:

- The key of an answer is the id of its command. Every instance of the service reads the whole topic, without
  a consumer group, picks the ids it waits for, and skips the rest.
- An answer may arrive twice. The second answer is skipped.
- A missing answer says nothing about the decision. Send the same command with the same id again: it gets its
  first answer.
- A command whose id cannot be read gets no answer; it is in the topic of rejected records.
"""

import argparse
import asyncio
import uuid
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer  # type: ignore[import-untyped]

from grabstream import Answer, AnyCommand, Grab, Settings, decode_answer, encode_command, load_settings

ATTEMPTS = 3
SECONDS_PER_ATTEMPT = 10.0


class Commands:
    """Sends commands and returns their answers. One object serves all requests of a process."""

    def __init__(self, settings: Settings) -> None:
        self._topic = f"{settings.prefix}.commands"
        self._producer = AIOKafkaProducer(bootstrap_servers=settings.kafka, acks="all")
        self._consumer = AIOKafkaConsumer(
            f"{settings.prefix}.results",
            bootstrap_servers=settings.kafka,
            auto_offset_reset="latest",
            enable_auto_commit=False,
        )
        self._waiting: dict[str, asyncio.Future[Answer]] = {}

    async def __aenter__(self) -> Self:
        await self._consumer.start()
        await self._producer.start()
        # Fixes the positions to read from before the first command is sent; otherwise its answer could be
        # missed.
        for partition in self._consumer.assignment():
            await self._consumer.position(partition)
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        await self._producer.stop()
        await self._consumer.stop()

    async def _read(self) -> None:
        async for record in self._consumer:
            waiting = self._waiting.get(record.key.decode())
            if waiting is not None and not waiting.done():
                waiting.set_result(decode_answer(record.value))

    async def answer_to(self, command: AnyCommand) -> Answer:
        """Sends a command and waits for its answer; raises TimeoutError when no answer arrives."""
        if command.id in self._waiting:
            raise ValueError(f"command {command.id} already waits for its answer")
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[command.id] = waiting
        try:
            for _ in range(ATTEMPTS):
                # The offer is the key, which keeps the commands of an offer in order.
                await self._producer.send_and_wait(
                    self._topic, encode_command(command), key=command.offer.encode()
                )
                either: set[asyncio.Future[Any]] = {waiting, self._reading}
                await asyncio.wait(either, timeout=SECONDS_PER_ATTEMPT, return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    return waiting.result()
                if self._reading.done():
                    self._reading.result()
        finally:
            del self._waiting[command.id]
        raise TimeoutError(f"no answer to command {command.id}")


async def main() -> None:
    """Grabs once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("offer")
    parser.add_argument("user")
    # A web service uses the id of the request, so that a repeated request is a repeated command.
    parser.add_argument("--id", default=str(uuid.uuid4()))
    words = parser.parse_args()
    async with Commands(load_settings()) as commands:
        answer = await commands.answer_to(Grab(id=words.id, offer=words.offer, user=words.user))
    print(answer.id, answer.outcome, answer.amount)


if __name__ == "__main__":
    asyncio.run(main())
