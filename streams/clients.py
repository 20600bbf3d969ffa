"""Kafka clients, opened and closed. A client whose broker went away may take for ever to close, raise the
cancellation of a task of its own as if it were ours, or swallow ours; nothing of that may end, or keep, who
merely wanted to be rid of it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

log = logging.getLogger(__name__)

CLOSE_SECONDS_MAX: Final = 5.0
#: How long it may take until the log says that a server does not answer.
UNEXPLAINED_SECONDS: Final = 10.0

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


class Outages:
    """Which servers do not answer, as the log of this process says. Every role meets an outage in each shard:
    what it explains is not said again by each of them.
    """

    def __init__(self) -> None:
        self._away: set[str] = set()
        self._ended_at = 0.0
        self.is_watched = False

    def began(self, server: str) -> None:
        """The log says that a server does not answer."""
        self._away.add(server)

    def ended(self, server: str) -> None:
        """The log says that it answers again."""
        self._away.discard(server)
        self._ended_at = time.monotonic()

    def may_explain(self, since: float) -> bool:
        """Whether an outage is the cause, or may turn out to be the cause, of what goes wrong since then."""
        if not self.is_watched:
            return False
        return bool(self._away) or time.monotonic() - max(since, self._ended_at) < UNEXPLAINED_SECONDS


#: One a process, as its log is.
OUTAGES: Final = Outages()


class Trouble:
    """What goes wrong again and again: said in the log once until it changes, and once that it is over. What
    an outage explains is said at level INFO only.
    """

    def __init__(self, log: logging.Logger, where: str) -> None:
        self._log, self._where = log, where
        self._words = ""
        self._since = 0.0
        #: The words that were said as a warning, and those that were said at all.
        self._warned, self._said = "", ""

    @property
    def is_said(self) -> bool:
        """Whether it went wrong the last time."""
        return bool(self._words)

    def say(self, words: str) -> None:
        """It went wrong, and is tried again."""
        if not self._words:
            self._since = time.monotonic()
        self._words = words
        if OUTAGES.may_explain(self._since):
            if words != self._said:
                self._log.info("%s: %s; trying again", self._where, words)
        elif words != self._warned:
            self._log.warning("%s: %s; trying again", self._where, words)
            self._warned = words
        self._said = words

    def over(self) -> None:
        """It went right."""
        if self._words:
            self._log.log(logging.WARNING if self._warned else logging.INFO, "%s: continues", self._where)
        self._words = self._warned = self._said = ""
