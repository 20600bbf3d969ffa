"""Sends waiting deliveries: the events of an offer one after the other, many offers at a time.

A subscription has its own requests, so one that does not answer delays no other. After some failures in a
row, only one request at a time probes it, after ever longer pauses. A probe does not wait until an event is
due, and when one succeeds, the events that failed are sent: an event's own pause may be hours long, and says
nothing about a receiver that has recovered.
"""

import asyncio
import logging
import math
import random
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Final, NamedTuple

import aiohttp
from psycopg_pool import AsyncConnectionPool

from grabstream.crypto.sealing import CannotOpen, Sealer
from grabstream.models.bounds import shortened
from grabstream.models.retry_after import retry_after_seconds
from grabstream.projections.tables import webhooks as stored
from grabstream.projections.tables.webhooks import Delivery, Webhook
from grabstream.runtime.bounded_http import AnswerTooLong, bounded_session
from grabstream.runtime.ending import end
from grabstream.runtime.trouble import is_trouble
from grabstream.streams.clients import Trouble, error_text
from grabstream.streams.webhooks.addresses import BadUrl, RefusedAddress, check_url, checked_socket
from grabstream.streams.webhooks.messages import SEALED_FOR, body_of, headers_of

log = logging.getLogger(__name__)

#: Requests of one subscription at a time, each for another offer.
PARALLEL_MAX: Final = 16
#: After this many failures in a row, a subscription gets one request at a time.
FAILURES_MAX: Final = 3
#: The pause before the next request then: doubled from the first to the longest. After a success, what failed
#: is sent early at most once in the longest.
PROBE_SECONDS_MIN: Final = 1.0
PROBE_SECONDS_MAX: Final = 60.0
#: The pause before an event is sent again: doubled from the first to the longest, and shortened by up to half
#: at random.
AGAIN_SECONDS_MIN: Final = 2.0
AGAIN_SECONDS_MAX: Final = 6 * 3600.0
#: The longest pause that a receiver may ask for (Retry-After).
RETRY_AFTER_SECONDS_MAX: Final = 24 * 3600.0
#: Bytes of an answer that are read, with its head, so that the connection can be reused. Its contents are
#: ignored.
ANSWER_BYTES_MAX: Final = 64 * 1024
PROBLEM_BYTES_MAX: Final = 300
POLL_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 1.0
#: A receiver says that it wants no more (Standard Webhooks).
GONE: Final = 410


class SendBounds(NamedTuple):
    """How webhooks are sent: whether without TLS (`http`), or to addresses that are not public (`private`);
    the time of a request, and the attempts until an event is parked.
    """

    http: bool = False
    private: bool = False
    timeout_seconds: float = 15.0
    attempts_max: int = 18


class DeliveryOutcome(NamedTuple):
    """The result of an attempt: delivered or not, the status of the answer, the problem, and the seconds
    after which the receiver wants the next attempt.
    """

    delivered: bool
    status: int | None = None
    problem: str = ""
    after_seconds: float = 0.0

    @property
    def is_away(self) -> bool:
        """Whether the receiver did not answer, or accepts nothing now."""
        return not self.delivered and (
            self.status is None or self.status >= 500 or self.status in stored.TAKES_NOTHING
        )


def again_seconds(attempts: int) -> float:
    """The pause after a number of failed attempts (from 1), in s."""
    longest = min(AGAIN_SECONDS_MIN * float(2 ** min(attempts - 1, 32)), AGAIN_SECONDS_MAX)
    return longest * (1 - random.random() / 2)


class Receiver:
    """The state of a subscription's receiver, and the requests to it, by offer.

    An event is sent before it is due, *early*, to probe a receiver that failed, and once when it answers
    again, or when this process does not know it yet. An event that fails although the receiver has recovered
    waits for its own time.
    """

    def __init__(self, webhook: Webhook) -> None:
        #: As last read: its secret may have changed by the next delivery.
        self.webhook = webhook
        self.failures = 0
        self.not_before = 0.0
        self.tasks: dict[str, asyncio.Task[None]] = {}
        #: Offers whose events failed since events were first sent early, so that each has its turn.
        self.tried: set[str] = set()
        #: Until then the receiver asked to be left alone (Retry-After): nothing is sent early.
        self._left_alone_until = 0.0
        #: When failed events are sent early; None: not any more.
        self._catch_up_at: float | None = 0.0
        self._caught_up_at = -math.inf
        self._sent_again_at: datetime | None = None

    def room(self, now: float) -> int:
        """How many more requests may be sent now."""
        if self._probes(now):
            return 1
        return 0 if self.failures >= FAILURES_MAX else PARALLEL_MAX - len(self.tasks)

    def is_early(self, now: float) -> bool:
        """Whether events may be sent before they are due."""
        catches_up = self._catch_up_at is not None and now >= self._catch_up_at
        return now >= self._left_alone_until and (self._probes(now) or catches_up)

    def _probes(self, now: float) -> bool:
        return self.failures > 0 and not self.tasks and now >= self.not_before

    def all_tried(self, now: float) -> None:
        """Notes that no other event can be sent early now: while the receiver fails, the failed ones are
        tried again; otherwise, none is left.
        """
        self.tried.clear()
        if not self._probes(now):
            self._catch_up_at = None

    def note(self, offer: str, outcome: DeliveryOutcome, now: float) -> None:
        """Notes how a request ended. A receiver that refuses one event may take others."""
        if outcome.delivered:
            if self.failures:
                self._catch_up(now)
            self.failures = 0
            return
        if outcome.is_away:
            self.failures += 1
            self.tried.add(offer)
            self._left_alone_until = max(self._left_alone_until, now + outcome.after_seconds)
        if self.failures:
            over = max(self.failures - FAILURES_MAX, 0)
            self.not_before = now + min(PROBE_SECONDS_MIN * 2 ** min(over, 16), PROBE_SECONDS_MAX)

    def _catch_up(self, now: float) -> None:
        # An event that alone fails would otherwise be sent early after each success of another one.
        if self._catch_up_at is None or self._catch_up_at <= now:
            self._catch_up_at = max(now, self._caught_up_at + PROBE_SECONDS_MAX)
            self._caught_up_at = self._catch_up_at
        self.tried.clear()

    def note_operator(self, sent_again_at: datetime | None, now: float) -> None:
        """Notes an operator's last request to resend failed events. They are then sent as to a new
        receiver.
        """
        known = self._sent_again_at
        if sent_again_at is None or (known is not None and sent_again_at <= known):
            return
        self._sent_again_at = sent_again_at
        self.failures = 0
        self._left_alone_until = 0.0
        self._catch_up_at = now
        self.tried.clear()


class Sender:
    """Sends deliveries until cancelled. `wake` is set when there are new ones; `sent` counts the requests."""

    def __init__(
        self, pool: AsyncConnectionPool[Any], sealer: Sealer, limits: SendBounds, wake: asyncio.Event,
        sent: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._sent = {"delivered": 0, "failed": 0} if sent is None else sent
        self._pool = pool
        self._sealer = sealer
        self._limits = limits
        self._wake = wake
        self._receivers: dict[str, Receiver] = {}
        self._trouble = Trouble(log, "webhooks")

    async def run(self) -> None:
        """Sends until cancelled; waits while PostgreSQL is down."""
        session = bounded_session(
            ANSWER_BYTES_MAX,
            self._limits.timeout_seconds,
            {"user-agent": f"grabstream/{metadata.version('grabstream')}"},
            None if self._limits.private else checked_socket,
        )
        try:
            async with session:
                while True:
                    await self._start_all(session)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(POLL_SECONDS):
                            await self._wake.wait()
                    self._wake.clear()
        finally:
            await end(task for receiver in self._receivers.values() for task in receiver.tasks.values())

    async def _start_all(self, session: aiohttp.ClientSession) -> None:
        """Starts a request for each delivery that may be sent and has room."""
        try:
            async with self._pool.connection() as connection:
                active = [one for one in await stored.find_all(connection) if one.state == "active"]
                for name in self._receivers.keys() - {one.webhook for one in active}:
                    if not self._receivers[name].tasks:
                        del self._receivers[name]
                for webhook in active:
                    receiver = self._receivers.setdefault(webhook.webhook, Receiver(webhook))
                    receiver.webhook = webhook
                    now = time.monotonic()
                    if receiver.failures:
                        receiver.note_operator(await stored.sent_again_at(connection, webhook.webhook), now)
                    room = receiver.room(now)
                    if room <= 0:
                        continue
                    tried = receiver.tried if receiver.is_early(now) else None
                    found = await stored.due(connection, webhook.webhook, receiver.tasks, room, tried)
                    if tried is not None and len(found) < room:
                        receiver.all_tried(now)
                    for delivery in found:
                        task = asyncio.create_task(self._drain(session, receiver, delivery))
                        receiver.tasks[delivery.offer] = task
        except BaseException as error:
            self._trouble.met(error)
            await asyncio.sleep(RETRY_SECONDS)
        else:
            self._trouble.over()

    async def _drain(self, session: aiohttp.ClientSession, receiver: Receiver, first: Delivery) -> None:
        """Sends a delivery, and the next ones of its offer, until one fails or none is left."""
        delivery: Delivery | None = first
        try:
            while delivery is not None:
                outcome = await self._send(session, receiver.webhook, delivery)
                receiver.note(delivery.offer, outcome, time.monotonic())
                self._sent["delivered" if outcome.delivered else "failed"] += 1
                delivery = await self._record(receiver.webhook, delivery, outcome)
        except BaseException as error:
            # If it was sent, this is not recorded: the event is sent again, under the same id.
            if is_trouble(error):
                self._trouble.say(error_text(error))
            elif isinstance(error, Exception):
                log.critical("webhook %s: unknown error", receiver.webhook.webhook, exc_info=True)
            else:
                raise
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            del receiver.tasks[first.offer]
            self._wake.set()

    async def _record(
        self, webhook: Webhook, delivery: Delivery, outcome: DeliveryOutcome
    ) -> Delivery | None:
        """Records how an attempt ended; returns the next delivery of the offer after a success."""
        async with self._pool.connection() as connection:
            if outcome.delivered:
                return await stored.delivered(connection, delivery)
            if outcome.status == GONE:
                reason = f"{webhook.url} answered 410: it accepts no more events"
                await stored.set_state(connection, webhook.webhook, "paused", reason)
                log.warning("webhook %s is paused: %s", webhook.webhook, reason)
            is_parked = await stored.failed(
                connection, delivery, outcome.status, outcome.problem, again_seconds(delivery.attempts + 1),
                outcome.after_seconds, self._limits.attempts_max,
            )  # fmt: skip
        if is_parked:
            log.warning(
                "webhook %s: event %s of offer %s is parked after %d attempts: %s",
                webhook.webhook, delivery.event, delivery.offer, delivery.attempts + 1, outcome.problem,
            )  # fmt: skip
        return None

    async def _send(
        self, session: aiohttp.ClientSession, webhook: Webhook, delivery: Delivery
    ) -> DeliveryOutcome:
        try:
            check_url(webhook.url, self._limits.http, self._limits.private)
            sealed = secrets_now(webhook, datetime.now(UTC))
            secrets = [self._sealer.open(0, webhook.webhook, SEALED_FOR, one) for one in sealed]
        except (BadUrl, CannotOpen) as error:
            return DeliveryOutcome(
                False, problem=_cut(f"the URL: {error}" if isinstance(error, BadUrl) else str(error))
            )
        body = body_of(delivery.type, delivery.at, delivery.body)
        headers = headers_of(secrets, delivery.event, body, time.time())
        try:
            async with session.post(
                webhook.url, data=body.encode(), headers=headers, allow_redirects=False
            ) as answer:
                # The status of a longer answer counts.
                with suppress(AnswerTooLong):
                    await answer.read()
                return _outcome_of(answer.status, answer.headers.get("retry-after", ""))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            refused = next((one for one in _causes(error) if isinstance(one, RefusedAddress)), error)
            return DeliveryOutcome(False, problem=_cut(_words(refused)))


def secrets_now(webhook: Webhook, now: datetime) -> list[str]:
    """The sealed secrets that sign: that of the subscription and, for a time after a rotation, the previous
    one.
    """
    before = webhook.previous_sealed_secret
    if before is None or webhook.previous_until is None or webhook.previous_until <= now:
        return [webhook.sealed_secret]
    return [webhook.sealed_secret, before]


def _outcome_of(status: int, retry_after: str) -> DeliveryOutcome:
    if 200 <= status < 300:
        return DeliveryOutcome(True, status)
    words = "a redirect, which is not followed" if 300 <= status < 400 else "not a success"
    seconds = retry_after_seconds(retry_after, time.time(), RETRY_AFTER_SECONDS_MAX)
    return DeliveryOutcome(False, status, f"the receiver answered {status}: {words}", seconds)


def _causes(error: BaseException) -> list[BaseException]:
    """An error and what caused it, also where several addresses failed together."""
    found: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left and len(found) < 32:
        one = left.pop()
        if one is None or one in found:
            continue
        found.append(one)
        left += [one.__cause__, one.__context__, getattr(one, "os_error", None)]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
    return found


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no complete answer within the time limit"
    return error_text(error)


def _cut(text: str) -> str:
    return shortened(text, PROBLEM_BYTES_MAX)
