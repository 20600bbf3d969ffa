"""Commands: what somebody wants done. Imperative names, an id chosen by the sender, no history.

`decode_commands` is the door for bytes, `check` the door for objects made in Python; both say which field is wrong.
"""

import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal

import msgspec

from models.identifiers import Id, in_schema, is_id
from models.money import Currency, Invalid, Quantity, Sum, check_amount
from models.offers import LINE_LENGTH_MAX, LINE_PATTERN, Changes, EnvelopeTerms, Terms, check_changes, check_line, check_terms
from models.transfers import Entry, check_adjustment

ATTRIBUTES_MAX: Final = 8
ITEMS_MAX: Final = 1_000
CHUNKS_MAX: Final = 100_000
CODE_LENGTH_MAX: Final = 200
TICKET_LENGTH_MAX: Final = 4_096
BASKET_GRABS_MAX: Final = 64
TRANSFERS_MAX: Final = 16


class Command(msgspec.Struct, tag_field="type", tag=str.lower, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What every command has: an id unique within its campaign, and the offer it is about."""

    id: Id
    offer: Id


class Steer(Command, frozen=True, kw_only=True):
    """What an operator does to an offer; `operator` says who, for the list of what operators did."""

    operator: Id | None = None


class Open(Steer, frozen=True, kw_only=True):
    """Create and fund an offer."""

    terms: Terms


class Grab(Command, frozen=True, kw_only=True):
    """One user's attempt; `attributes` are names and values that limits may count by.

    `ticket` is what the eligibility service signed; `basket` is shared by the grabs of one array that stand or fall together;
    `wait` joins the waiting list when it is sold out.
    """

    user: Id
    quantity: Quantity = 1
    attributes: Annotated[dict[Id, Id], in_schema(maxProperties=ATTRIBUTES_MAX)] = {}
    ticket: Annotated[str, in_schema(minLength=1, maxLength=TICKET_LENGTH_MAX, pattern=r"^[\u0000-\u007f]*$")] | None = None
    basket: Id | None = None
    wait: bool = False


class Pause(Steer, frozen=True, kw_only=True):
    """Refuse grabs with `on_hold` until resumed."""


class Resume(Steer, frozen=True, kw_only=True):
    """Take grabs again."""


class Close(Steer, frozen=True, kw_only=True):
    """End the offer now; what is left goes back to where the terms say."""


class Amend(Steer, frozen=True, kw_only=True):
    """Change terms while the offer runs, in order with the grabs."""

    changes: Annotated[Changes, in_schema(minProperties=1)]


class Load(Steer, frozen=True, kw_only=True):
    """One chunk of a list that an offer needs before it opens: coupon codes, or the ids of who may grab. `chunk` counts from 1."""

    what: Literal["codes", "audience"]
    chunk: Annotated[int, in_schema(minimum=1, maximum=CHUNKS_MAX)]
    chunks: Annotated[int, in_schema(minimum=1, maximum=CHUNKS_MAX)]
    items: Annotated[
        tuple[Annotated[str, in_schema(minLength=1, maxLength=CODE_LENGTH_MAX)], ...], in_schema(minItems=1, maxItems=ITEMS_MAX)
    ]


class Adjust(Steer, frozen=True, kw_only=True):
    """A correcting entry in the ledger, with its reason and who approved it."""

    transfers: Annotated[tuple[Entry, ...], in_schema(minItems=1, maxItems=TRANSFERS_MAX)]
    reason: Annotated[str, in_schema(minLength=1, maxLength=LINE_LENGTH_MAX, pattern=LINE_PATTERN)]
    approved_by: Id


class Settle(Command, frozen=True, kw_only=True):
    """A command about one grab: `grab` is the id of the command that made it."""

    grab: Id


class Confirm(Settle, frozen=True, kw_only=True):
    """A hold was paid: `paid` minor units of `currency` by `payment`, for `quantity` of its units (absent: all that are held)."""

    payment: Id | None = None
    paid: Sum = 0
    currency: Currency | None = None
    quantity: Quantity | None = None


class Release(Settle, frozen=True, kw_only=True):
    """Give a hold back, or leave the waiting list."""


class Extend(Settle, frozen=True, kw_only=True):
    """Move a hold's deadline by `hold_ms`, as often as the offer allows."""


class Return(Settle, frozen=True, kw_only=True):
    """Give back what was taken for good, after the fact; money that was paid for it goes back."""

    quantity: Quantity | None = None
    reason: Annotated[str, in_schema(maxLength=LINE_LENGTH_MAX, pattern=LINE_PATTERN)] = ""


class Redeem(Settle, frozen=True, kw_only=True):
    """Use units, once for an order."""

    order: Id
    quantity: Quantity = 1


class Unredeem(Settle, frozen=True, kw_only=True):
    """Take the use for an order back."""

    order: Id


AnyCommand = Open | Grab | Pause | Resume | Close | Amend | Load | Adjust | Confirm | Release | Extend | Return | Redeem | Unredeem

_is_currency = re.compile(r"[A-Z]{3}\Z").match
_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(AnyCommand).decode
_decode_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _Addressed(msgspec.Struct):
    """As much of a broken command as is needed to answer it."""

    id: str
    offer: str | None = None


_decode_addressed = msgspec.json.Decoder(_Addressed).decode


class Undecodable(Exception):
    """One command that could not be understood: `raw` are its bytes, `id` and `offer` are set when they are readable."""

    def __init__(self, reason: str, raw: bytes, id: str | None = None, offer: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.raw = raw
        self.id = id
        self.offer = offer


def check(command: AnyCommand) -> None:
    """Raises Invalid, naming the field and the fix, when the command must not reach a script."""
    if not is_id(command.id):
        raise Invalid(f"id: must match [A-Za-z0-9._:-]{{1,64}}, got {command.id!r}")
    if not is_id(command.offer):
        raise Invalid(f"offer: must match [A-Za-z0-9._:-]{{1,64}}, got {command.offer!r}")
    check_of = _CHECKS.get(type(command))
    if check_of is not None:
        check_of(command)
    elif isinstance(command, Settle):
        _check_named("grab", command.grab)
    if isinstance(command, Steer) and command.operator is not None:
        _check_named("operator", command.operator)


def _check_named(field: str, value: str) -> None:
    if not is_id(value):
        raise Invalid(f"{field}: must match [A-Za-z0-9._:-]{{1,64}}, got {value!r}")


def _check_open(command: Open) -> None:
    check_terms(command.terms)


def _check_grab(command: Grab) -> None:
    _check_named("user", command.user)
    check_amount("quantity", command.quantity, least=1)
    if command.attributes:
        _check_attributes(command.attributes)
    if command.basket is not None:
        _check_named("basket", command.basket)
    if command.ticket is not None and not (0 < len(command.ticket) <= TICKET_LENGTH_MAX and command.ticket.isascii()):
        raise Invalid(f"ticket: must be a signed token of at most {TICKET_LENGTH_MAX} characters")
    if command.basket is not None and command.wait:
        raise Invalid("wait: a basket stands or falls at once, it cannot wait; leave one of the two out")


def _check_amend(command: Amend) -> None:
    check_changes(command.changes)


def _check_load(command: Load) -> None:
    check_amount("chunks", command.chunks, least=1, most=CHUNKS_MAX)
    check_amount("chunk", command.chunk, least=1, most=command.chunks)
    if not 1 <= len(command.items) <= ITEMS_MAX:
        raise Invalid(f"items: must be 1 to {ITEMS_MAX}, got {len(command.items)}")
    if command.what == "audience":
        for item in command.items:
            _check_named("items", item)
        return
    if len(set(command.items)) < len(command.items):
        raise Invalid("items: a code stands there twice; each is given once")
    if command.what != "codes":
        raise Invalid(f"what: must be codes or audience, got {command.what!r}")
    for item in command.items:
        if not 0 < len(item) <= CODE_LENGTH_MAX:
            raise Invalid(f"items: a code has 1 to {CODE_LENGTH_MAX} characters, got {len(item)}")
        check_line("items", item)


def _check_adjust(command: Adjust) -> None:
    if not 1 <= len(command.transfers) <= TRANSFERS_MAX:
        raise Invalid(f"transfers: must be 1 to {TRANSFERS_MAX}, got {len(command.transfers)}")
    for transfer in command.transfers:
        check_adjustment(transfer)
    if not command.reason:
        raise Invalid("reason: must say why the books are corrected")
    check_line("reason", command.reason)
    _check_named("approved_by", command.approved_by)


def _check_confirm(command: Confirm) -> None:
    _check_named("grab", command.grab)
    if command.payment is not None:
        _check_named("payment", command.payment)
    check_amount("paid", command.paid)
    if command.currency is not None and not _is_currency(command.currency):
        raise Invalid(f"currency: must be three capitals such as CNY, got {command.currency!r}")
    if (command.paid > 0) and (command.payment is None or command.currency is None):
        raise Invalid("paid: a payment has an id (payment) and a currency")
    if command.quantity is not None:
        check_amount("quantity", command.quantity, least=1)


def _check_return(command: Return) -> None:
    _check_named("grab", command.grab)
    if command.quantity is not None:
        check_amount("quantity", command.quantity, least=1)
    check_line("reason", command.reason)


def _check_redeem(command: Redeem) -> None:
    _check_named("grab", command.grab)
    _check_named("order", command.order)
    check_amount("quantity", command.quantity, least=1)


def _check_unredeem(command: Unredeem) -> None:
    _check_named("grab", command.grab)
    _check_named("order", command.order)


def _check_attributes(attributes: dict[str, str]) -> None:
    if len(attributes) > ATTRIBUTES_MAX:
        raise Invalid(f"attributes: at most {ATTRIBUTES_MAX}, got {len(attributes)}")
    for name, value in attributes.items():
        if not is_id(name) or not is_id(value):
            raise Invalid(f"attributes.{name}: name and value must match [A-Za-z0-9._:-]{{1,64}}, got {value!r}")


_CHECKS: Final[dict[type, Callable[[Any], None]]] = {
    Open: _check_open,
    Grab: _check_grab,
    Amend: _check_amend,
    Load: _check_load,
    Adjust: _check_adjust,
    Confirm: _check_confirm,
    Return: _check_return,
    Redeem: _check_redeem,
    Unredeem: _check_unredeem,
}


def decode_command(raw: bytes) -> AnyCommand:
    """One command from JSON; raises Undecodable with the reason, and with id and offer when they can be read."""
    try:
        command: AnyCommand = _decode(raw)
        check(command)
    except (msgspec.DecodeError, Invalid, UnicodeDecodeError, RecursionError) as error:
        raise _undecodable(str(error), raw) from None
    return command


def _undecodable(reason: str, raw: bytes) -> Undecodable:
    try:
        addressed = _decode_addressed(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Undecodable(reason, raw)
    if not is_id(addressed.id):
        return Undecodable(reason, raw)
    offer = addressed.offer if addressed.offer is not None and is_id(addressed.offer) else None
    return Undecodable(reason, raw, addressed.id, offer)


def decode_commands(value: bytes) -> list[AnyCommand | Undecodable]:
    """The commands of one record, an object or an array of objects, in order; a bad one does not stop the others.

    A record that is no JSON at all is one Undecodable with all its bytes.
    """
    if not value.lstrip().startswith(b"["):
        return [_decode_or_reason(value)]
    try:
        raws = _decode_raw_list(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return [Undecodable(str(error), value)]
    return [_decode_or_reason(bytes(raw)) for raw in raws]


def _decode_or_reason(raw: bytes) -> AnyCommand | Undecodable:
    try:
        return decode_command(raw)
    except Undecodable as error:
        return error


def basket_of(command: AnyCommand) -> str | None:
    """The basket a command stands or falls with; None for what is no grab, or a grab by itself."""
    return command.basket if isinstance(command, Grab) else None


def secret_of(command: AnyCommand) -> str | None:
    """The field of a command that must not stand in a topic in clear, if it has one: only a gate takes it."""
    if isinstance(command, Open) and isinstance(command.terms, EnvelopeTerms) and command.terms.seed is not None:
        return "terms.seed"
    return "items" if isinstance(command, Load) and command.what == "codes" else None


def encode_command(command: AnyCommand) -> bytes:
    """The command as canonical JSON: defaults left out, so that equal commands have equal bytes."""
    return _encode(command)


def digest_of(command: AnyCommand) -> str:
    """What tells two bodies under one id apart: 48 bits of BLAKE2b over the canonical JSON, 8 characters of base64.

    It guards against mistakes, not against forgery: the worst a collision can do is to repeat the first answer. Who sends a command
    does not change what it asks for, so the operator is left out.
    """
    if isinstance(command, Steer) and command.operator is not None:
        command = msgspec.structs.replace(command, operator=None)
    return b64encode(blake2b(_encode(command), digest_size=6).digest()).decode()
