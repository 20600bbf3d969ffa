"""Kafka clients, opened and closed. A client whose broker went away may take for ever to close, raise the
cancellation of a task of its own as if it were ours, or swallow ours; nothing of that may end, or keep, who
merely wanted to be rid of it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

log = logging.getLogger(__name__)

CLOSE_SECONDS_MAX: Final = 5.0

Client = TypeVar("Client", AIOKafkaConsumer, AIOKafkaProducer, AIOKafkaAdminClient)


@asynccontextmanager
async def started(client: Client) -> AsyncIterator[Client]:
    """Starts a client, and closes it, also when starting it fails or is cancelled; raises the client's errors
    of starting.
    """
    try:
        await client.start()
        yield client
    finally:
        await close(client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop())


async def close(closing: Coroutine[Any, Any, Any]) -> None:
    """Awaits the closing of a client, for a time; what goes wrong with it is logged. Only our own
    cancellation is raised.
    """
    task = asyncio.create_task(closing)
    try:
        await asyncio.wait({task}, timeout=CLOSE_SECONDS_MAX)
    finally:
        if not task.done():
            task.cancel()
    if not task.done() or task.cancelled():
        log.warning("closing a Kafka client: it was given up")
    elif error := task.exception():
        log.warning("closing a Kafka client: %r", error)


def in_words(error: BaseException) -> str:
    """The kind of an error and what it says; those of Kafka begin with their kind by themselves."""
    kind, said = type(error).__name__, str(error).strip()
    return said if kind in said else f"{kind}: {said}"


class Trouble:
    """What goes wrong again and again: said in the log once until it changes, and once that it is over."""

    def __init__(self, log: logging.Logger, where: str) -> None:
        self._log, self._where = log, where
        self._said = ""

    @property
    def is_said(self) -> bool:
        """Whether it went wrong the last time."""
        return bool(self._said)

    def say(self, words: str) -> None:
        """It went wrong, and is tried again."""
        if words != self._said:
            self._log.warning("%s: %s; trying again", self._where, words)
            self._said = words

    def over(self) -> None:
        """It went right."""
        if self._said:
            self._log.warning("%s: goes on", self._where)
            self._said = ""
