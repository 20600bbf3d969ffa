"""Commands over HTTP: each goes through the gate of this process, and its answer becomes a status and a
document.
"""

import time
from collections.abc import Sequence
from typing import Final

import msgspec

from grabstream.gate.calls import now_ms
from grabstream.gate.gate import Gate
from grabstream.gate.single import Promise
from grabstream.gateway.payment_tokens import PaymentTokens
from grabstream.gateway.problems import (
    JSON,
    NOT_KEPT,
    POSITIVE,
    SECURE_HEADERS,
    Problem,
    Reply,
    refusal_reply,
    retry_soon,
)
from grabstream.gateway.requests import (
    IDEMPOTENCY_KEY,
    Request,
    Then,
    awaited,
    basket_of,
    grab_of,
    key_of,
    opening_of,
    operating_of,
    plain_grab_of,
    prefers_async,
    promise_of,
    settling_of,
)
from grabstream.models.answers import Answer, without_codes
from grabstream.models.commands import AnyCommand, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.models.refusal_words import refusal_of_basket
from grabstream.runtime.traces import traceparent_of, traces

#: How many parts of an envelope a gate draws and writes per millisecond at least, next to other work.
PARTS_A_MILLISECOND: Final = 50
_HEADERS: Final = ((b"content-type", JSON), NOT_KEPT, *SECURE_HEADERS)
_APPLIED: Final = (b"preference-applied", b"respond-async")


class CommandHandlers:
    """The handlers of commands: a request and its body in, a reply out. `timeout_ms` is how long a command
    waits for its answer; longer for an envelope, by its parts. `tokens` adds payment tokens to holds.
    """

    def __init__(self, gate: Gate, timeout_ms: int, tokens: PaymentTokens | None = None) -> None:
        self._gate = gate
        self._timeout_ms = timeout_ms
        self._encode = (tokens or PaymentTokens()).encode

    async def grab(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/grabs"""
        return await awaited(self.grab_soon, request, body)

    def grab_soon(self, request: Request, body: bytes, then: Then) -> None:
        """The same without a task."""
        batch = plain_grab_of(request, body)
        command = grab_of(request, body) if batch is None else batch.commands[0]
        promise, began = promise_of(request), time.perf_counter()

        def answered(found: Answer | BaseException) -> None:
            if traces() is not None:
                _trace(request, [found], began)
            then(self._found(request, command, found, promise))

        self._gate.decide_soon(command, answered, promise, self._timeout_ms, batch=batch)

    async def open(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers"""
        return await self._decide(request, opening_of(request, body))

    async def amend(self, request: Request, body: bytes) -> Reply:
        """PATCH /v1/offers/{offer}"""
        return await self._operate(request, "amend", body)

    async def load(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/loads"""
        return await self._operate(request, "load", body)

    async def adjust(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/adjustments"""
        return await self._operate(request, "adjust", body)

    async def pause(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/pause"""
        return await self._operate(request, "pause", body)

    async def resume(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/resume"""
        return await self._operate(request, "resume", body)

    async def close(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/close"""
        return await self._operate(request, "close", body)

    async def confirm(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/grabs/{grab}/confirm"""
        return await self._decide(request, settling_of(request, "confirm", body))

    async def release(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/grabs/{grab}/release"""
        return await self._decide(request, settling_of(request, "release", body))

    async def extend(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/grabs/{grab}/extend"""
        return await self._decide(request, settling_of(request, "extend", body))

    async def return_(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/grabs/{grab}/return"""
        return await self._decide(request, settling_of(request, "return", body))

    async def redeem(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/grabs/{grab}/redeem"""
        return await self._decide(request, settling_of(request, "redeem", body))

    async def unredeem(self, request: Request, body: bytes) -> Reply:
        """POST /v1/offers/{offer}/grabs/{grab}/unredeem"""
        return await self._decide(request, settling_of(request, "unredeem", body))

    async def take_basket(self, request: Request, body: bytes) -> Reply:
        """POST /v1/baskets"""
        promise = promise_of(request)
        commands = basket_of(request, body)
        answers = await self._answers(request, commands, promise)
        if all(answer.positive for answer in answers):
            status = max(status_of(answer, promise) for answer in answers)
            shown = [_as_shown(answer, promise) for answer in answers]
            return Reply(status, self._basket(shown), _headers(request, promise))
        answer, command = refusal_of_basket(answers, commands)
        members = {"answers": msgspec.json.decode(self._basket(answers))["answers"]}
        return refusal_reply(answer, command, now_ms(), members)

    async def _operate(self, request: Request, type_: str, body: bytes) -> Reply:
        return await self._decide(request, operating_of(request, type_, body))

    async def _decide(self, request: Request, command: AnyCommand) -> Reply:
        promise = promise_of(request)
        [answer] = await self._answers(request, [command], promise)
        return self._reply(request, command, answer, promise)

    def _found(
        self, request: Request, command: AnyCommand, found: Answer | BaseException, promise: Promise
    ) -> Reply | BaseException:
        """The reply, or error, for the result of a command."""
        if not isinstance(found, Answer):
            if isinstance(found, OutcomeUnknown):
                return self._unknown(request, command, found)
            return found
        try:
            return self._reply(request, command, found, promise)
        except Exception as error:
            return error

    def _reply(self, request: Request, command: AnyCommand, answer: Answer, promise: Promise) -> Reply:
        if not answer.positive:
            return refusal_reply(answer, command, now_ms())
        if promise == "journaled" and not isinstance(command, Open):
            # What most get.
            return Reply(POSITIVE[answer.code], self._encode(answer), _HEADERS)
        headers = _headers(request, promise)
        if isinstance(command, Open):
            headers = (
                *headers,
                (b"location", f"/v1/offers/{command.offer}".encode()),
                (IDEMPOTENCY_KEY.lower().encode(), command.id.encode()),
            )
        return Reply(status_of(answer, promise), self._encode(_as_shown(answer, promise)), headers)

    def _basket(self, answers: Sequence[Answer]) -> bytes:
        return b'{"answers":[' + b",".join(map(self._encode, answers)) + b"]}"

    async def _answers(
        self, request: Request, commands: Sequence[AnyCommand], promise: Promise
    ) -> list[Answer]:
        timeout_ms = self._timeout_ms + sum(map(_parts_of, commands)) // PARTS_A_MILLISECOND
        began = time.perf_counter()
        try:
            answers = await self._gate.decide(commands, promise, timeout_ms=timeout_ms)
            _trace(request, answers, began)
            return answers
        except OutcomeUnknown as error:
            raise self._unknown(request, commands[0], error) from None

    @staticmethod
    def _unknown(request: Request, command: AnyCommand, error: OutcomeUnknown) -> Problem:
        key = key_of(request) or command.id
        return retry_soon(
            "outcome_unknown",
            f"It is unknown whether the command was decided: {error.cause}. Send the same request again "
            f"with {IDEMPOTENCY_KEY}: {key} (offer {command.offer}) until it is answered.",
            None,
            (IDEMPOTENCY_KEY.lower().encode(), key.encode()),
        )


def status_of(answer: Answer, promise: Promise) -> int:
    """The status of a positive answer: 202 while its event may not be in the journal yet."""
    return 202 if promise == "decided" else POSITIVE[answer.code]


def _as_shown(answer: Answer, promise: Promise) -> Answer:
    """The answer without its codes, while its event may not be in the journal yet: if Redis loses the
    decision, other users get these codes.
    """
    return without_codes(answer) if promise == "decided" else answer


def _trace(request: Request, found: Sequence[Answer | BaseException], began: float) -> None:
    """Adds a span for a request whose event is traced, which began at a time of `time.perf_counter`."""
    if (traced := traces()) is not None:
        answers = [answer for answer in found if isinstance(answer, Answer)]
        cause = traceparent_of(request.scope["headers"])
        traced.answered("request", answers, time.perf_counter() - began, cause)


def _parts_of(command: AnyCommand) -> int:
    is_envelope = isinstance(command, Open) and isinstance(command.terms, EnvelopeTerms)
    return command.terms.parts if is_envelope else 0  # type: ignore[union-attr]


def _headers(request: Request, promise: Promise) -> tuple[tuple[bytes, bytes], ...]:
    if promise == "decided" and prefers_async(request):
        return (*_HEADERS, _APPLIED)
    return _HEADERS
