"""Opening and closing Kafka clients, and logging trouble with servers.

A client whose broker is gone may never finish closing, may raise the cancellation of one of its own tasks as
if it were ours, or may swallow ours. None of this may end or block the caller that closes it.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient

from grabstream.models.error_words import error_in_words
from grabstream.runtime.trouble import is_trouble
from grabstream.streams.kafka_internals import until_controller_is_known

log = logging.getLogger(__name__)

#: Under this name for all that log errors of clients.
error_text = error_in_words

CLOSE_SECONDS_MAX: Final = 5.0
#: How often the fetcher of a consumer wakes up without a cause, every 200 ms by default. It is woken whenever
#: something changes: a reply, an assignment, a partition that is resumed, records that were taken.
FETCHER_IDLE_MS: Final = 60_000
#: How long it may take until an outage of a server is logged.
UNEXPLAINED_SECONDS: Final = 10.0
#: Trouble that comes back within this time is the same one, though something has succeeded in between. If it
#: comes back more often than a few times, it is logged again only after this time.
STEADY_SECONDS: Final = 30.0
RETURNS_LOGGED_MAX: Final = 3
#: Trouble that lasts this long, or keeps coming back, does not pass without action: it is a wrong setting, a
#: missing right, or a server that stays away. It is logged as that, again after LASTING_LOGGED_SECONDS.
LASTING_SECONDS: Final = 60.0
LASTING_LOGGED_SECONDS: Final = 600.0
#: Trouble not reported for this long is over: no attempt pauses longer.
FORGOTTEN_SECONDS: Final = 150.0

Client = TypeVar("Client", AIOKafkaConsumer, AIOKafkaProducer, AIOKafkaAdminClient)


class DoesNotStop(Exception):
    """A client of Kafka has not stopped. It would keep its place in its group, and partitions that are then
    not read, until the process ends: so the process must end. The text states which client.
    """


@asynccontextmanager
async def started(client: Client) -> AsyncIterator[Client]:
    """Starts a client, and closes it at the end, also if the start fails or is cancelled; raises the errors
    of starting.
    """
    try:
        await client.start()
        if isinstance(client, AIOKafkaAdminClient):
            await until_controller_is_known(client)
        yield client
    finally:
        await close(client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop())


async def close(closing: Coroutine[Any, Any, Any]) -> None:
    """Awaits the closing of a client for a bounded time, and logs errors. Only the caller's cancellation is
    raised.
    """
    task = asyncio.create_task(closing)
    try:
        await asyncio.wait({task}, timeout=CLOSE_SECONDS_MAX)
    finally:
        if not task.done():
            task.cancel()
    if not task.done() or task.cancelled():
        log.warning("a Kafka client did not close in time and is abandoned")
    elif error := task.exception():
        log.warning("closing a Kafka client: %r", error)


class Outages:
    """The servers that do not answer, as logged by this process. Each role meets an outage in each of its
    shards; trouble explained by the outage is not logged by each of them.
    """

    def __init__(self) -> None:
        self._away: set[str] = set()
        self._ended_at = 0.0
        self.is_watched = False

    def began(self, server: str) -> None:
        """The log reports that a server does not answer."""
        self._away.add(server)

    def ended(self, server: str) -> None:
        """The log reports that it answers again."""
        self._away.discard(server)
        self._ended_at = time.monotonic()

    @property
    def away(self) -> frozenset[str]:
        """The servers that do not answer now, as reported."""
        return frozenset(self._away)

    def explains(self, since: float) -> bool:
        """Whether there is an outage, or one has ended after `since`."""
        return bool(self._away) or self._ended_at > since

    def may_explain(self, since: float) -> bool:
        """Whether an outage is, or may turn out to be, the cause of trouble that began at `since`."""
        if not self.is_watched:
            return False
        return bool(self._away) or time.monotonic() - max(since, self._ended_at) < UNEXPLAINED_SECONDS


#: One per process, like its log.
OUTAGES: Final = Outages()


class PresentTrouble(NamedTuple):
    """A trouble of this process: its place, the seconds between the first and the last failed attempt, those
    since the first, and the text of the last error.
    """

    where: str
    seconds: float
    began_seconds_ago: float
    words: str


class Troubles:
    """All trouble of this process."""

    def __init__(self) -> None:
        self._all: WeakSet[Trouble] = WeakSet()

    def add(self, trouble: "Trouble") -> None:
        """Adds a possible trouble; it is dropped when nothing else refers to it."""
        self._all.add(trouble)

    def present(self) -> list[PresentTrouble]:
        """Present trouble, the longest first."""
        found = [trouble for one in self._all if (trouble := one.present()) is not None]
        return sorted(found, key=lambda one: (-one.seconds, one.where))


#: One per process, like its log.
TROUBLES: Final = Troubles()


class Trouble:
    """Repeated trouble, logged once until its text changes, and once when it is over. Trouble that an outage
    explains is logged at level INFO only. Trouble that lasts is logged in any other case.
    """

    def __init__(self, log: logging.Logger, where: str) -> None:
        self._log, self._where = log, where
        self._words = self._last_words = ""
        #: When it began, and when its last uninterrupted row of failures began.
        self._since = self._row_since = -math.inf
        self._noted_at = self._lasting_logged_at = -math.inf
        TROUBLES.add(self)
        #: When it was over the last time, how often it has come back soon, and when it was last logged as a
        #: warning.
        self._over_at = self._warned_at = -math.inf
        self._returns = 0
        #: The text last logged as a warning, and the text last logged at any level.
        self._warned, self._logged = "", ""

    @property
    def is_present(self) -> bool:
        """Whether the last attempt failed."""
        return bool(self._words)

    def present(self) -> PresentTrouble | None:
        """The present trouble; None when it is over. A success ends it when nothing fails for STEADY_SECONDS
        afterwards.
        """
        now = time.monotonic()
        has_ended = not self._words and now - self._over_at >= STEADY_SECONDS
        if has_ended or now - self._noted_at >= FORGOTTEN_SECONDS:
            return None
        return PresentTrouble(self._where, self._noted_at - self._since, now - self._since, self._last_words)

    def note(self, words: str) -> None:
        """Records a failed attempt that the caller logs."""
        now = time.monotonic()
        if not self._words and now - self._over_at < STEADY_SECONDS:
            self._returns += 1
        elif self.present() is None:
            self._since, self._returns, self._lasting_logged_at = now, 0, -math.inf
        if not self._words:
            self._row_since = now
        self._words = self._last_words = words
        self._noted_at = now

    def met(self, error: BaseException) -> None:
        """Records a failed attempt, which will be repeated; raises an error that is no trouble."""
        if not is_trouble(error):
            raise error
        self.say(error_text(error))

    def say(self, words: str) -> None:
        """Records a failed attempt; it will be repeated."""
        self.note(words)
        now = self._noted_at
        # Recurring trouble may be an outage this time; constantly recurring trouble is not.
        since = self._since if self._returns > RETURNS_LOGGED_MAX else self._row_since
        if OUTAGES.may_explain(since):
            if words != self._logged:
                self._log.info("%s: %s; trying again", self._where, words)
        elif now - self._since >= LASTING_SECONDS and now - self._lasting_logged_at >= LASTING_LOGGED_SECONDS:
            self._log.warning(
                "%s: has failed for %.0f s, despite retries: %s", self._where, now - self._since, words
            )
            self._warned, self._warned_at, self._lasting_logged_at = words, now, now
        elif words != self._warned and (
            self._returns <= RETURNS_LOGGED_MAX or now - self._warned_at >= STEADY_SECONDS
        ):
            self._log.warning("%s: %s; trying again", self._where, words)
            self._warned, self._warned_at = words, now
        self._logged = words

    def over(self) -> None:
        """Records a successful attempt."""
        if self._words:
            self._log.log(logging.WARNING if self._warned else logging.INFO, "%s: continues", self._where)
            # What an outage explains has ended with it.
            self._over_at = -math.inf if OUTAGES.explains(self._since) else time.monotonic()
        self._words = self._warned = self._logged = ""
