"""Receipts of payments over HTTP: the callback of the payment side.

A receipt is signed, which is its authority: the route needs no other. It becomes the command `confirm`, under
an id that follows from the payment, so it may come any number of times and in any order. The answer is 200
exactly when the outcome of the payment is journaled. The payment side repeats until then. The receipt of a
payment that failed moves no money and ends no hold, since the buyer may try again: it is only acknowledged.
"""

import asyncio
from typing import Final

import msgspec
from starlette.types import Scope

from grabstream.crypto.signing import NotSigned, Purpose, SigningKeys
from grabstream.gate.calls import now_ms
from grabstream.gate.gate import Gate
from grabstream.gateway.address_rates import AddressRates
from grabstream.gateway.problems import (
    JSON,
    NOT_KEPT,
    REFUSALS,
    SECURE_HEADERS,
    Problem,
    Reply,
    invalid,
    members_of,
    problem_reply,
    refusal_reply,
    retry_soon,
)
from grabstream.gateway.requests import Request, Then, awaited, check_body_names, query_of
from grabstream.models.answers import Answer, encode_answer
from grabstream.models.commands import Confirm
from grabstream.models.money import Invalid
from grabstream.models.outcomes import Outcome, OutcomeUnknown
from grabstream.models.payments import (
    TOKEN_LENGTH_MAX,
    Receipt,
    check_audience,
    command_of,
    decode_receipt,
)

_HEADERS: Final = ((b"content-type", JSON), NOT_KEPT, *SECURE_HEADERS)
_encode = msgspec.json.Encoder().encode


class _ReceiptBody(msgspec.Struct, forbid_unknown_fields=True):
    receipt: str


_decode_body = msgspec.json.Decoder(_ReceiptBody).decode


class Receipts:
    """The handler of receipts of the system `audience`. Without keys, every receipt is refused. `timeout_ms`
    is how long a receipt waits for its answer. `forged` counts receipts without a valid signature, by
    address, with or without authentication of callers. A signed one is never refused for them: the payment
    side may share an address, such as that of a proxy, with one who forges receipts.
    """

    def __init__(
        self,
        gate: Gate,
        timeout_ms: int,
        keys: SigningKeys | None = None,
        forged: AddressRates | None = None,
        audience: str = "",
    ) -> None:
        self._gate = gate
        self._timeout_ms = timeout_ms
        self._keys = keys
        self._audience = audience
        self._forged = forged if forged is not None and forged.are_counted else None
        self._counting: set[asyncio.Task[None]] = set()

    async def payment_callback(self, request: Request, body: bytes) -> Reply:
        """POST /v1/payments/callback"""
        return await awaited(self.payment_callback_soon, request, body)

    def payment_callback_soon(self, request: Request, body: bytes, then: Then) -> None:
        """The same without a task."""
        query_of(request, ())
        try:
            text, receipt = self._receipt(body)
        except Problem as problem:
            if self._forged is None or problem.name != "not_signed":
                raise
            self._forged.check(request.scope)
            self._refuse_counted(self._forged, problem, request.scope, then)
            return
        if receipt.status == "failed":
            then(_reply_of(receipt, "unchanged"))
            return
        # Its authority travels with it: the gate verifies it, too, and that it is for this system.
        command = msgspec.structs.replace(command_of(receipt), receipt=text)

        def answered(found: Answer | BaseException) -> None:
            then(_reply_to(receipt, command, found))

        self._gate.decide_soon(command, answered, timeout_ms=self._timeout_ms, from_system=True)

    def _refuse_counted(self, forged: AddressRates, refusal: Problem, scope: Scope, then: Then) -> None:
        """Refuses a forged receipt when it is counted: the counters may be in a server."""

        async def count() -> None:
            try:
                await forged.count(scope)
            except Exception as error:
                then(error)
            else:
                then(refusal)

        task = asyncio.create_task(count())
        self._counting.add(task)
        task.add_done_callback(self._counting.discard)

    def _receipt(self, body: bytes) -> tuple[str, Receipt]:
        try:
            text = _decode_body(body).receipt
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise invalid(str(error), "receipt") from None
        check_body_names(body)
        if len(text) > TOKEN_LENGTH_MAX:
            raise invalid(f"receipt: has at most {TOKEN_LENGTH_MAX} characters, got {len(text)}")
        try:
            if self._keys is None:
                raise NotSigned
            payload = self._keys.read(Purpose.receipt, text, TOKEN_LENGTH_MAX)
        except NotSigned:
            raise Problem(
                "not_signed",
                "The receipt is not signed with a key of GRAB_PAYMENT_KEYS, or is signed for another "
                "purpose.",
                "receipt",
                [(b"www-authenticate", b"JWS")],
            ) from None
        try:
            receipt = decode_receipt(payload)
            # Also of a payment that failed, which no gate sees.
            check_audience(receipt.aud, self._audience)
            return text, receipt
        except Invalid as error:
            raise invalid(f"receipt: {error}", "receipt") from None


def _reply_to(receipt: Receipt, command: Confirm, found: Answer | BaseException) -> Reply | BaseException:
    """What a receipt gets for what its command got."""
    if isinstance(found, OutcomeUnknown):
        return retry_soon(
            "outcome_unknown",
            f"It is unknown whether payment {receipt.payment} was recorded: {found}. Send the same receipt "
            "again until it is answered.",
        )
    if not isinstance(found, Answer):
        return found
    try:
        return _reply(receipt, command, found)
    except Exception as error:
        return error


def _reply(receipt: Receipt, command: Confirm, answer: Answer) -> Reply:
    result = _result(answer)
    if result is None:
        return _refused(receipt, command, answer)
    return _reply_of(receipt, result, answer=msgspec.Raw(encode_answer(answer)))


def _reply_of(receipt: Receipt, result: str, **more: msgspec.Raw) -> Reply:
    return Reply(200, _encode({"payment": receipt.payment, "result": result, **more}), _HEADERS)


def _result(answer: Answer) -> str | None:
    """What has become of a payment, when that is journaled; None otherwise."""
    if answer.positive:
        return "confirmed"
    # The event of a refused payment says that it is to be paid back.
    return "refund_due" if answer.seq is not None else None


def _refused(receipt: Receipt, command: Confirm, answer: Answer) -> Reply:
    outcome = Outcome(answer.code)
    if outcome in (Outcome.fenced, Outcome.busy):
        return refusal_reply(answer, command, now_ms())
    if outcome is Outcome.conflict:
        words = (
            f"Payment {receipt.payment} is already recorded with other contents, and all of this money is "
            "in the books. The receipt changed nothing. Another payment needs another id; this does not "
            "change with time."
        )
    else:
        words = f"Payment {receipt.payment} was not booked: {answer.message or outcome.name}"
    refusal = REFUSALS[outcome]
    return problem_reply(outcome.name, refusal.status, refusal.title, words, members_of(answer))
