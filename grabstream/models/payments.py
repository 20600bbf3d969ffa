"""Messages about a payment between the system and the payment side, as claims of signed texts
(`crypto/signing.py`), and the commands that follow from it.

A payment token names what is due for a hold, a receipt the result of a payment, a query the holds that end
soon, and its answer what is known about them. Names and units are those of answers: amounts in minor units,
times in milliseconds since 1970 UTC.
"""

from collections.abc import Callable, Container, Sequence
from hashlib import sha256
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from grabstream.models.bounds import quoted, shortened
from grabstream.models.commands import Confirm, Release, check
from grabstream.models.identifiers import (
    ID_PATTERN,
    PAYMENT_WORDS,
    SYSTEM_IDS,
    Count,
    Id,
    PaymentId,
    in_schema,
    is_id,
    is_payment_id,
)
from grabstream.models.money import Currency, Invalid, Sum, check_amount
from grabstream.models.offers import TIME_MS_MAX
from grabstream.models.surrogates import at_places, without_surrogates
from grabstream.models.unique_names import check_names_once, check_outer_names_once

#: The longest address that a payment token names, and the longest signed token and receipt.
CALLBACK_LENGTH_MAX: Final = 500
TOKEN_LENGTH_MAX: Final = 4_096
#: Holds that one query names, and the longest signed query.
QUERY_HOLDS_MAX: Final = 100
QUERY_LENGTH_MAX: Final = 64 * 1024
#: The longest signed answer: it may name a payment for each hold, with an escape for each of its characters.
ANSWER_LENGTH_MAX: Final = 256 * 1024
#: The longest name of a system.
AUDIENCE_LENGTH_MAX: Final = 200
#: Hexadecimal digits of a digest in a command id.
_DIGITS: Final = 40


class _WrittenClaims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Claims that the system writes. Readers ignore claims that they do not know."""


class _ReadClaims(_WrittenClaims, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Claims that the system reads. A claim that it does not know could change the meaning of the others."""


#: Names a system: the prefix of its keys and topics, and the id of the Kafka cluster that has its journal.
Audience = Annotated[str, in_schema(minLength=1, maxLength=AUDIENCE_LENGTH_MAX)]


def audience_of(prefix: str, cluster: str) -> str:
    """The claim `aud` of texts signed for a system. No prefix contains '@'."""
    return f"{prefix}@{cluster}"


def check_audience(given: str, expected: str) -> None:
    """Raises Invalid when a signed text is for another system than `expected`."""
    if given != expected:
        raise Invalid(f"aud: must be {expected}, which names this system, got {shortened(given)}")


class PaymentToken(_WrittenClaims, frozen=True, kw_only=True):
    """What a buyer takes to the payment side: `due` minor units of `currency` are to be paid for a grab
    before `deadline_at`. The receipt goes to the address `callback`, for the system `aud`. `issued_at` is
    when the hold was decided, so that a repeat has the same claims.
    """

    aud: Audience
    offer: Id
    grab: Id
    user: Id
    due: Sum
    currency: Currency
    deadline_at: Count
    issued_at: Count
    callback: Annotated[str, in_schema(maxLength=CALLBACK_LENGTH_MAX)] | None = None


class Receipt(_ReadClaims, frozen=True, kw_only=True):
    """The result of a payment: `paid` minor units of `currency` were paid, or it `failed` and nothing was
    paid: then the hold stays, for another attempt before its end. `payment` is the id that the payment side
    gave it; another payment has another id. `quantity` are the units of the grab that were paid for: all, if
    absent. `aud` is that of the payment token: another system refuses the receipt. A receipt does not expire.
    """

    aud: Audience
    payment: PaymentId
    offer: Id
    grab: Id
    user: Id
    status: Literal["paid", "failed"]
    at: Count
    paid: Sum = 0
    currency: Currency | None = None
    quantity: Count | None = None


class AskedHold(_WrittenClaims, frozen=True, kw_only=True):
    """A hold that ends at `ends_at`."""

    offer: Id
    grab: Id
    ends_at: Count


class PaymentQuery(_WrittenClaims, frozen=True, kw_only=True):
    """Asks which of some holds of the system `aud` were paid. `id` is random; the answer names both."""

    aud: Audience
    id: Id
    at: Count
    holds: tuple[AskedHold, ...]


class PaymentState(_ReadClaims, frozen=True, kw_only=True):
    """What the payment side knows of a hold. `paid`: as in a receipt. `unpaid`: nothing has been paid, and
    the hold stays until its end. If that is `final`, nothing will be paid, because the payment side accepts
    no payment for this grab any more: the hold is released at once. `unknown`: neither, as where the payment
    token of the grab was never shown. `final` counts with `unpaid` only.
    """

    offer: Id
    grab: Id
    status: Literal["paid", "unpaid", "unknown"]
    final: bool = False
    user: Id | None = None
    payment: PaymentId | None = None
    paid: Sum = 0
    currency: Currency | None = None
    quantity: Count | None = None
    at: Count | None = None


class PaymentAnswer(_ReadClaims, frozen=True, kw_only=True):
    """The answer to the query with the id `query` of the system `aud`. Holds that it does not name count as
    `unknown`.
    """

    aud: Audience
    query: Id
    payments: tuple[PaymentState, ...]


class _UndecodedAnswer(_ReadClaims, frozen=True, kw_only=True):
    """An answer whose states are not decoded yet, so that one that is wrong voids no other."""

    aud: Audience
    query: Id
    payments: tuple[msgspec.Raw, ...]


_Claims = TypeVar("_Claims", bound=msgspec.Struct)

encode_claims = msgspec.json.Encoder().encode
_decode_token = msgspec.json.Decoder(PaymentToken).decode
_decode_receipt = msgspec.json.Decoder(Receipt).decode
_decode_query = msgspec.json.Decoder(PaymentQuery).decode
_decode_answer = msgspec.json.Decoder(_UndecodedAnswer).decode
_decode_state = msgspec.json.Decoder(PaymentState).decode


def _decoded(
    decode: Callable[[bytes], _Claims],
    payload: bytes,
    check_once: Callable[[bytes, bytes], None] = check_names_once,
) -> _Claims:
    """The claims; raises Invalid when they cannot be decoded, or name a claim twice (`check_once`)."""
    try:
        claims = decode(payload)
        check_once(payload, encode_claims(claims))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(str(error)) from None
    return claims


def decode_token(payload: bytes) -> PaymentToken:
    """The claims of a payment token; raises Invalid that names the claim."""
    token = _decoded(_decode_token, payload)
    _check_ids(token, ("offer", "grab", "user"))
    check_amount("due", token.due, least=1)
    for name in ("deadline_at", "issued_at"):
        check_amount(name, getattr(token, name), most=TIME_MS_MAX)
    return token


def decode_receipt(payload: bytes) -> Receipt:
    """The claims of a receipt; raises Invalid that names the claim."""
    receipt = _decoded(_decode_receipt, payload)
    check_receipt(receipt)
    return receipt


def check_receipt(receipt: Receipt) -> None:
    """Raises Invalid, naming the claim, when no command can follow from a receipt."""
    if not is_payment_id(receipt.payment):
        raise Invalid(f"payment: {PAYMENT_WORDS}, got {quoted(receipt.payment)}")
    _check_ids(receipt, ("offer", "grab", "user"))
    check_amount("at", receipt.at, most=TIME_MS_MAX)
    if receipt.status == "failed":
        if receipt.paid:
            raise Invalid("paid: a payment that failed paid nothing; leave it out")
        if receipt.quantity is not None:
            raise Invalid("quantity: a payment that failed paid for nothing; leave it out")
        return
    check_amount("paid", receipt.paid, least=1)
    if receipt.currency is None:
        raise Invalid("currency: is required where something was paid")
    # The rules of the command, such as that of a currency.
    check(command_of(receipt), from_system=True)


def decode_query(payload: bytes) -> PaymentQuery:
    """The claims of a query; raises Invalid that names the claim."""
    query = _decoded(_decode_query, payload)
    _check_ids(query, ("id",))
    for hold in query.holds:
        _check_ids(hold, ("offer", "grab"))
    return query


def decode_answer(payload: bytes, query: PaymentQuery) -> tuple[list[PaymentState], list[str]]:
    """The states of holds in the answer to a query, at most one for each, and the reasons why others do not
    count. Each is judged separately: an invalid one counts as left out, and so do those that contradict each
    other. Raises Invalid for the answer to another query.
    """
    plain = without_surrogates(payload)
    answer = _decoded(_decode_answer, plain, check_outer_names_once)
    check_audience(answer.aud, query.aud)
    if answer.query != query.id:
        raise Invalid("query: this is the answer to another query")
    asked = {(hold.offer, hold.grab) for hold in query.holds}
    known: dict[tuple[str, str], PaymentState] = {}
    contradicted: set[tuple[str, str]] = set()
    wrong = []
    for number, raw in enumerate(at_places(payload, plain, answer.payments), 1):
        try:
            state = _state_of(raw, asked)
            hold = state.offer, state.grab
            if known.setdefault(hold, state) != state:
                contradicted.add(hold)
                raise Invalid("contradicts another state of the same grab")
        except Invalid as error:
            wrong.append(f"payments: number {number}: {error}")
    return [state for hold, state in known.items() if hold not in contradicted], wrong


def _state_of(raw: bytes, asked: Container[tuple[str, str]]) -> PaymentState:
    """A state; raises Invalid that names the claim."""
    state = _decoded(_decode_state, raw)
    if (state.offer, state.grab) not in asked:
        raise Invalid("grab: was not asked for")
    if state.status == "paid":
        check_receipt(receipt_of(state))
    return state


def receipt_of(state: PaymentState) -> Receipt:
    """The receipt of a payment that the answer to a query reports; its claims are not checked."""
    return Receipt(
        aud="", payment=state.payment or "", offer=state.offer, grab=state.grab, user=state.user or "",
        status="paid", at=state.at or 0, paid=state.paid, currency=state.currency, quantity=state.quantity,
    )  # fmt: skip


def _check_ids(claims: msgspec.Struct, names: Sequence[str]) -> None:
    for name in names:
        if not is_id(value := getattr(claims, name)):
            raise Invalid(f"{name}: must match {ID_PATTERN.strip('^$')}, got {quoted(value)}")


# -- commands ------------------------------------------------------------------------------------------------


def command_of(receipt: Receipt) -> Confirm:
    """The command that follows from the receipt of a successful payment; a failed one has none. All receipts
    with the same contents have one command id, wherever they come from, so a repeat gets the first answer.
    One with other contents is another command, with a known payment.
    """
    money = (str(receipt.paid), receipt.currency or "", str(receipt.quantity or ""))
    return Confirm(
        id=_id_of("paid", receipt.offer, receipt.grab, receipt.user, *money, receipt.payment),
        offer=receipt.offer, grab=receipt.grab, user=receipt.user,
        payment=receipt.payment, paid=receipt.paid, currency=receipt.currency, quantity=receipt.quantity,
    )  # fmt: skip


def release_for_unpaid(hold: AskedHold) -> Release:
    """The command that ends a hold that will not be paid, by the payment side's answer."""
    id_ = _id_of("unpaid", hold.offer, hold.grab, str(hold.ends_at))
    return Release(id=id_, offer=hold.offer, grab=hold.grab)


def _id_of(what: str, *names: str) -> str:
    """The id of a command of the system. Payments may have longer ids, so they are there as digests."""
    # No id contains '/', and a payment is the last name.
    return f"{SYSTEM_IDS}{what}:{sha256('/'.join(names).encode()).hexdigest()[:_DIGITS]}"
