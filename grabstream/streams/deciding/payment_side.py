"""The HTTP client with which a worker asks the payment side about holds. Questions and answers are signed;
the time to wait is bounded, and a payment side that does not answer gets a pause.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from grabstream.crypto.sealing import Sealer
from grabstream.crypto.signing import NotSigned, Purpose
from grabstream.gate.calls import GateLimits, now_ms
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.models.money import Invalid
from grabstream.models.payments import (
    ANSWER_LENGTH_MAX,
    AskedHold,
    PaymentQuery,
    PaymentState,
    decode_answer,
    encode_claims,
)
from grabstream.models.unique_names import check_names_once
from grabstream.runtime.bounded_http import HEAD_BYTES_MAX, body_of, bounded_session
from grabstream.streams.clients import Trouble, error_text
from grabstream.streams.deciding.payments import HoldQueries, PaymentSide, hold_ms_min, lead_ms

log = logging.getLogger(__name__)

#: After this many questions in a row without an answer, none is asked for some time; then one question is a
#: probe.
FAILURES_MAX: Final = 3
OPEN_SECONDS: Final = 10.0
#: The body of an answer: the signed text, as JSON.
BODY_BYTES_MAX: Final = ANSWER_LENGTH_MAX + 1_024


class NoAnswer(Exception):
    """The payment side gave no valid answer."""


class Breaker:
    """Stops questions to a payment side that does not answer: it gets a pause, and later ones do not wait
    behind failing ones.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._closed_from = 0.0

    def lets_through(self) -> bool:
        """Whether to ask now. While the breaker is open, one question in OPEN_SECONDS passes, as a probe."""
        if self._failures < FAILURES_MAX:
            return True
        if self._clock() < self._closed_from:
            return False
        self._closed_from = self._clock() + OPEN_SECONDS
        return True

    def succeeded(self) -> None:
        """An answer came."""
        self._failures = 0

    def failed(self) -> None:
        """No answer came."""
        self._failures += 1
        self._closed_from = self._clock() + OPEN_SECONDS


class PaymentQueries:
    """Asks the payment side, for all shards of a process."""

    def __init__(self, side: PaymentSide, session: aiohttp.ClientSession) -> None:
        self._side = side
        self._session = session
        self._trouble = Trouble(log, "asking the payment side about holds")
        self.breaker = Breaker()

    async def ask(self, holds: Sequence[AskedHold]) -> list[PaymentState]:
        """What the payment side knows of some holds, at most QUERY_HOLDS_MAX; nothing without a valid answer.
        Takes the time limit at most.
        """
        if not self.breaker.lets_through():
            return []
        try:
            states = await self._answer(holds)
        except NoAnswer as error:
            self.breaker.failed()
            self._trouble.say(str(error))
            return []
        self.breaker.succeeded()
        self._trouble.over()
        return states

    async def _answer(self, holds: Sequence[AskedHold]) -> list[PaymentState]:
        query = PaymentQuery(
            aud=self._side.audience, id=secrets.token_hex(16), at=now_ms(), holds=tuple(holds)
        )
        signed = self._side.keys.sign(Purpose.payment_query, encode_claims(query))
        try:
            async with (
                asyncio.timeout(self._side.timeout_seconds),
                self._session.post(self._side.url, json={"query": signed}, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise NoAnswer(f"status {response.status}")
                body = await body_of(response, BODY_BYTES_MAX)
        except TimeoutError:
            raise NoAnswer(f"no answer within {self._side.timeout_seconds:g} s") from None
        # A host that is not a DNS name raises ValueError.
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswer(error_text(error)) from None
        try:
            text = _decode_body(body).answer
            check_names_once(body)
            payload = self._side.keys.read(Purpose.payment_answer, text, ANSWER_LENGTH_MAX)
            states, wrong = decode_answer(payload, query)
        except NotSigned:
            raise NoAnswer("the answer is not signed by a key of GRAB_PAYMENT_KEYS") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Invalid) as error:
            raise NoAnswer(f"the answer cannot be used: {error}") from None
        if wrong:
            log.warning(
                "the payment side: an answer has %d states that cannot be used, the first: %s",
                len(wrong), wrong[0],
            )  # fmt: skip
        return states


class _PaymentSideBody(msgspec.Struct):
    answer: str


_decode_body = msgspec.json.Decoder(_PaymentSideBody).decode


def open_session(side: PaymentSide) -> aiohttp.ClientSession:
    """The client for questions: it bounds the time and the bytes of each answer."""
    return bounded_session(BODY_BYTES_MAX + HEAD_BYTES_MAX, side.timeout_seconds)


@contextlib.asynccontextmanager
async def open_queries(
    side: PaymentSide, redis: Any, keys: KeySpace, sealer: Sealer, limits: GateLimits
) -> AsyncIterator[Callable[[ShardKeys], HoldQueries]]:
    """The queries about holds of each shard of a process."""
    # No caller waits for these decisions: like those of the sweeper, they count when they are decided.
    gate = Gate(redis, keys, sealer, limits)
    session = open_session(side)
    questions = PaymentQueries(side, session)
    try:
        yield lambda shard: HoldQueries(redis, shard, gate, questions.ask, lead_ms(side), hold_ms_min(side))
    finally:
        await gate.close()
        await session.close()
