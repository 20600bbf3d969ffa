"""Commands: what a sender wants done. Names are imperative; the sender chooses the id.

`decode_commands` decodes and checks bytes, `check` checks objects made in Python. Both name the field that is
wrong.
"""

import json
import re
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from grabstream.models.bounds import (
    ARRAY_COMMANDS_MAX,
    ARRAY_COMMAS_MAX,
    BASKET_GRABS_KNOWN_MAX,
    BASKET_GRABS_MAX,
    COMMAND_BYTES_MAX,
    RECORD_BYTES_MAX,
    quoted,
    shortened,
)
from grabstream.models.decoding_words import with_what_may_be
from grabstream.models.entries import Entry, check_adjustment
from grabstream.models.identifiers import (
    ID_LENGTH_MAX,
    PAYMENT_WORDS,
    RESERVED_IDS,
    SYSTEM_IDS,
    Id,
    PaymentId,
    are_ids,
    are_payment_ids,
    are_three_ids,
    campaign_of,
    in_schema,
    is_id,
    is_payment_id,
    is_reserved,
    may_be_reserved,
)
from grabstream.models.money import AMOUNT_MAX, Currency, Invalid, Quantity, Sum, check_amount
from grabstream.models.offers import (
    LINE_LENGTH_MAX,
    LINE_PATTERN,
    Changes,
    EnvelopeTerms,
    Terms,
    check_changes,
    check_line,
    check_terms,
)
from grabstream.models.surrogates import at_places, without_surrogates
from grabstream.models.unique_names import check_names_once

ATTRIBUTES_MAX: Final = 8
METADATA_PAIRS_MAX: Final = 16
#: The fields of a grab that its events repeat, and by which nothing is decided.
CARRIED: Final = ("metadata",)
#: Metadata as canonical JSON (`encode_metadata`), in bytes of UTF-8.
METADATA_BYTES_MAX: Final = 1_024
ITEMS_MAX: Final = 1_000
CHUNKS_MAX: Final = 100_000
#: The items of a `load` as its event contains them. The rest of the event line, and the command, still fit
#: their bounds.
ITEMS_BYTES_MAX: Final = 200_000
CODE_LENGTH_MAX: Final = 200
TICKET_LENGTH_MAX: Final = 4_096
#: The signatures of a command, and the characters of each.
APPROVALS_MAX: Final = 4
APPROVAL_LENGTH_MAX: Final = 1_024
RECEIPT_LENGTH_MAX: Final = 4_096
TRANSFERS_MAX: Final = 16
#: Maximum bytes of a `load` without its items.
COMMAND_REST_BYTES: Final = 1_024
#: Quotes of a grab without optional fields: four names and four texts.
PLAIN_GRAB_QUOTES: Final = 16
#: A record with a plain grab that is decoded together with others: more than one with the longest ids has.
PLAIN_GRAB_BYTES_MAX: Final = 400


class Command(
    msgspec.Struct,
    tag_field="type",
    tag=str.lower,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """What every command has: an id (see `identity_of`), and the offer it is about."""

    id: Id
    offer: Id


class OfferCommand(Command, frozen=True, kw_only=True):
    """A command of an operator about an offer; `operator` says who sent it, `approvals` are the signatures of
    the operators who approve it.
    """

    operator: Id | None = None
    approvals: Annotated[
        tuple[Annotated[str, in_schema(minLength=1, maxLength=APPROVAL_LENGTH_MAX)], ...],
        in_schema(maxItems=APPROVALS_MAX),
    ] = ()


class Open(OfferCommand, frozen=True, kw_only=True):
    """Creates and funds an offer."""

    terms: Terms


# As with answers, Python's collector need not look at grabs and confirmations.
class Grab(Command, frozen=True, kw_only=True, gc=False):
    """One user's attempt to get `quantity` units.

    `attributes` are names and values that limits may count by, `ticket` is a signed token of the eligibility
    service. The grabs of one array that share a `basket` are all granted or all refused. With `wait`, the
    user joins the waiting list when the offer is sold out. `metadata` are texts by name that the answer and
    the events of the grab repeat; nothing is decided by them.
    """

    user: Id
    quantity: Annotated[Quantity, Meta(description="how many units")] = 1
    attributes: Annotated[
        dict[Id, Id],
        in_schema(maxProperties=ATTRIBUTES_MAX),
        Meta(description="names and values that limits may count by, such as card=c1"),
    ] = {}
    ticket: Annotated[
        Annotated[str, in_schema(minLength=1, maxLength=TICKET_LENGTH_MAX, pattern=r"^[\u0000-\u007f]*$")]
        | None,
        Meta(description="the ticket that the eligibility service signed"),
    ] = None
    basket: Annotated[Id | None, Meta(description="shared by grabs that are all granted or all refused")] = (
        None
    )
    wait: Annotated[bool, Meta(description="join the waiting list when the offer is sold out")] = False
    # None by default: a new map would cost every plain grab that is decoded.
    metadata: Annotated[
        Annotated[
            dict[Id, Annotated[str, in_schema(pattern=LINE_PATTERN)]],
            in_schema(maxProperties=METADATA_PAIRS_MAX),
        ]
        | None,
        Meta(
            description="texts by name that the answer and the events of the grab repeat, such as form_id=f1"
        ),
    ] = None


class Pause(OfferCommand, frozen=True, kw_only=True):
    """Refuses grabs with `on_hold` until the offer is resumed."""


class Resume(OfferCommand, frozen=True, kw_only=True):
    """Takes grabs again."""


class Close(OfferCommand, frozen=True, kw_only=True):
    """Closes the offer now; the rest returns to the issuer."""


class Amend(OfferCommand, frozen=True, kw_only=True):
    """Changes terms while the offer runs, in order with the grabs."""

    changes: Annotated[Changes, in_schema(minProperties=1)]


class Load(OfferCommand, frozen=True, kw_only=True):
    """Loads one chunk of a list that an offer needs before it opens: coupon codes, or the ids of users who
    may grab. `chunk` counts from 1 to `chunks`.
    """

    what: Literal["codes", "audience"]
    chunk: Annotated[int, in_schema(minimum=1, maximum=CHUNKS_MAX)]
    chunks: Annotated[int, in_schema(minimum=1, maximum=CHUNKS_MAX)]
    items: Annotated[
        tuple[Annotated[str, in_schema(minLength=1, maxLength=CODE_LENGTH_MAX)], ...],
        in_schema(minItems=1, maxItems=ITEMS_MAX),
    ]


class Adjust(OfferCommand, frozen=True, kw_only=True):
    """Corrects the ledger with `transfers`, with a reason and who approved it."""

    transfers: Annotated[tuple[Entry, ...], in_schema(minItems=1, maxItems=TRANSFERS_MAX)]
    reason: Annotated[str, in_schema(minLength=1, maxLength=LINE_LENGTH_MAX, pattern=LINE_PATTERN)]
    approved_by: Id


class GrabCommand(Command, frozen=True, kw_only=True):
    """A command about one grab: `grab` is the id of the command that made it. If `user` is given, the grab
    must be theirs; another user's grab does not exist for this command.
    """

    grab: Id
    user: Annotated[Id | None, Meta(description="whose grab it must be; absent: any user's")] = None


class Confirm(GrabCommand, frozen=True, kw_only=True, gc=False):
    """Reports that a hold was paid: `paid` minor units of `currency` by `payment`, for `quantity` of its
    units (absent: all that are held). `receipt` is the signature of the payment side.
    """

    payment: Annotated[
        PaymentId | None, Meta(description="the payment's id; a payment is booked only once")
    ] = None
    paid: Annotated[Sum, Meta(description="the amount paid, in minor units of the currency")] = 0
    currency: Annotated[Currency | None, Meta(description="the currency of the payment, such as CNY")] = None
    quantity: Annotated[
        Quantity | None, Meta(description="how many of the held units to confirm; absent: all")
    ] = None
    receipt: Annotated[
        Annotated[str, in_schema(minLength=1, maxLength=RECEIPT_LENGTH_MAX)] | None,
        Meta(description="the receipt that the payment side signed"),
    ] = None


class Release(GrabCommand, frozen=True, kw_only=True):
    """Gives a hold back, or leaves the waiting list."""


class Extend(GrabCommand, frozen=True, kw_only=True):
    """Moves the deadline of a hold by the offer's `hold_ms`, as often as the offer allows."""


class Return(GrabCommand, frozen=True, kw_only=True):
    """Gives back `quantity` units (absent: all) that were granted or confirmed; money paid for them goes
    back.
    """

    quantity: Annotated[
        Quantity | None, Meta(description="how many units; absent: all that are not redeemed")
    ] = None
    reason: Annotated[
        str,
        in_schema(maxLength=LINE_LENGTH_MAX, pattern=LINE_PATTERN),
        Meta(description="the reason, in one line"),
    ] = ""


class Redeem(GrabCommand, frozen=True, kw_only=True):
    """Uses `quantity` units of a coupon, once for each order."""

    order: Annotated[Id, Meta(description="the order's id; each order uses units only once")]
    quantity: Annotated[Quantity, Meta(description="how many units")] = 1


class Unredeem(GrabCommand, frozen=True, kw_only=True):
    """Undoes the use for an order."""

    order: Annotated[Id, Meta(description="the order's id")]


AnyCommand = (
    Open
    | Grab
    | Pause
    | Resume
    | Close
    | Amend
    | Load
    | Adjust
    | Confirm
    | Release
    | Extend
    | Return
    | Redeem
    | Unredeem
)

_is_currency = re.compile(r"[A-Z]{3}\Z").match
_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(AnyCommand).decode
_decode_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_list = msgspec.json.Decoder(list[AnyCommand]).decode


class _AnswerFields(msgspec.Struct):
    """The fields of an undecodable command that an answer needs, each undecoded."""

    id: msgspec.Raw = msgspec.Raw(b"null")
    offer: msgspec.Raw = msgspec.Raw(b"null")
    user: msgspec.Raw = msgspec.Raw(b"null")


class _Pairs(list[tuple[str, object]]):
    """The names and values of a JSON object, in order; a name may occur twice."""


def _not_json(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_decode_addressed = msgspec.json.Decoder(_AnswerFields).decode
_LOOKS_LIKE_A_BASKET: Final = re.compile(rb'"basket"\s*:\s*"([^"\\]{1,64})"')
_decode_text = msgspec.json.Decoder(str).decode
#: No number is read: some would be refused, or take long.
_decode_pairs = json.JSONDecoder(
    object_pairs_hook=_Pairs, parse_int=lambda _: 0, parse_float=lambda _: 0.0, parse_constant=_not_json
).decode


class Undecodable(Exception):
    """A command that could not be decoded: `raw` are its bytes; `id`, `offer` and `user` are set if they are
    readable.

    A long reason is cut (`models/bounds.py`).
    """

    def __init__(
        self,
        reason: str,
        raw: bytes,
        id: str | None = None,
        offer: str | None = None,
        user: str | None = None,
    ) -> None:
        self.reason = shortened(reason)
        super().__init__(self.reason)
        self.raw = raw
        self.id = id
        self.offer = offer
        self.user = user
        #: Whether it was decoded, and is refused for another reason; the refusal uses `raw`.
        self.is_decoded = False


def check(command: AnyCommand, from_system: bool = False) -> None:
    """Raises Invalid, naming the field and what is allowed, when the command must not reach a script. This
    includes a command made in Python with a value of a wrong type: no reader could decode its event.
    `from_system`: the system itself sends it, and may use an id that is reserved for that.
    """
    try:
        _check_rules(command, from_system)
        # Of the most frequent commands, the rules check all fields one by one, which is faster.
        if not isinstance(command, Grab | Confirm):
            _check_types(command)
    except (AttributeError, TypeError) as error:
        _check_types(command)
        raise Invalid(
            f"{type(command).__name__.lower()}: a field has a value of another type ({error})"
        ) from None


def is_plain(command: Grab) -> bool:
    """Whether a grab asks for one unit for one user of one offer, without further fields."""
    return command.quantity == 1 and not (
        command.attributes
        or command.ticket is not None
        or command.basket is not None
        or command.wait
        or command.metadata
    )


def is_right_and_plain(command: AnyCommand) -> bool:
    """Whether a command is a plain grab, and valid: most are, and this takes less time than the rules."""
    try:
        return (
            type(command) is Grab
            and is_plain(command)
            # A command made in Python may have 1.0, or None.
            and type(command.quantity) is int
            and command.wait is False
            and are_three_ids(command.id, command.offer, command.user)
            and not is_reserved(command.id)
        )
    except TypeError:
        # A name is not a string.
        return False


def offers_of_right_grabs(commands: Sequence[AnyCommand], quantity_max: int = 1) -> Collection[str]:
    """The offers of these commands, if all are valid grabs of up to so many units, without further fields;
    else none. Most are, and this takes less time than the rules.
    """
    if set(map(type, commands)) != {Grab}:
        return ()
    columns = zip(*map(_fields_of_grab, commands), strict=True)
    ids, offers, users, quantities, waits, attributes, *absent = columns
    count = len(ids)
    try:
        names = set(offers)
        is_right = (
            waits.count(False) == count
            and all(column.count(None) == count for column in absent)
            and not any(attributes)
            # A command made in Python may have 1.0, or 0 in place of False.
            and set(map(type, quantities)) == {int}
            and set(map(type, waits)) == {bool}
            and (quantities.count(1) == count or (min(quantities) >= 1 and max(quantities) <= quantity_max))
            and not may_be_reserved(ids)
            and are_ids((*ids, *names, *users))
        )
    except TypeError:
        # A name is not a string.
        return ()
    return names if is_right else ()


_fields_of_grab = attrgetter(
    "id", "offer", "user", "quantity", "wait", "attributes", "ticket", "basket", "metadata"
)


def are_right_confirmations(commands: Sequence[AnyCommand]) -> bool:
    """Whether all are valid confirmations: most are, and this takes less time than the rules."""
    if set(map(type, commands)) != {Confirm} or any(map(_receipt_of, commands)):
        return False
    columns = zip(*map(_fields_of_confirm, commands), strict=True)
    ids, offers, grabs, payments, users, paid, currencies, quantities = columns
    try:
        names = (*ids, *set(offers), *grabs, *_given(users))
        if (
            not are_ids(names)
            or not are_payment_ids(_given(payments))
            or not all(map(_is_currency, set(_given(currencies))))
        ):
            return False
    except TypeError:
        # A name is not a string.
        return False
    asked = _given(quantities)
    return (
        not may_be_reserved(ids)
        # A command made in Python may have 1.0, or True.
        and {*map(type, paid), *map(type, asked)} == {int}
        and min(paid) >= 0
        and min(asked, default=1) >= 1
        and max(*paid, *asked, 0) <= AMOUNT_MAX
        and all(
            payment is not None and currency is not None
            for payment, currency, sum_paid in zip(payments, currencies, paid, strict=True)
            if sum_paid
        )
    )


def is_signed(command: Confirm) -> bool:
    """Whether the payment side has signed the contents of a confirmation, in a receipt or in the answer that
    the command follows from. (A gate refuses receipts that it cannot verify.)
    """
    return command.receipt is not None or command.id.startswith(SYSTEM_IDS)


_receipt_of = attrgetter("receipt")
_fields_of_confirm = attrgetter("id", "offer", "grab", "payment", "user", "paid", "currency", "quantity")


def _given(values: Sequence[Any]) -> Sequence[Any]:
    return [value for value in values if value is not None] if None in values else values


def _check_types(command: AnyCommand) -> None:
    try:
        msgspec.convert(msgspec.to_builtins(command), type(command))
    except (TypeError, msgspec.ValidationError) as error:
        raise Invalid(f"{type(command).__name__.lower()}: {error}") from None


def _check_rules(command: AnyCommand, from_system: bool = False) -> None:
    if is_right_and_plain(command):
        return
    if not is_id(command.id):
        raise Invalid(f"id: must match [A-Za-z0-9._:-]{{1,64}}, got {quoted(command.id)}")
    if is_reserved(command.id) and not (from_system and command.id not in RESERVED_IDS):
        raise Invalid(
            f"id: {command.id} is reserved for events that the system makes itself; choose another id"
        )
    if not is_id(command.offer):
        raise Invalid(f"offer: must match [A-Za-z0-9._:-]{{1,64}}, got {quoted(command.offer)}")
    check_of = _CHECKS.get(type(command))
    if check_of is not None:
        check_of(command)
    elif isinstance(command, GrabCommand):
        _check_named("grab", command.grab)
    if isinstance(command, GrabCommand) and command.user is not None:
        _check_named("user", command.user)
    if isinstance(command, OfferCommand) and command.operator is not None:
        _check_named("operator", command.operator)
    if isinstance(command, OfferCommand) and command.approvals:
        _check_approvals(command.approvals)


def _check_named(field: str, value: str) -> None:
    if not is_id(value):
        raise Invalid(f"{field}: must match [A-Za-z0-9._:-]{{1,64}}, got {quoted(value)}")


def _check_approvals(approvals: Sequence[str]) -> None:
    if len(approvals) > APPROVALS_MAX:
        raise Invalid(f"approvals: must be at most {APPROVALS_MAX}, got {len(approvals)}")
    if not all(0 < len(text) <= APPROVAL_LENGTH_MAX and text.isascii() for text in approvals):
        raise Invalid(f"approvals: each is a signed text of at most {APPROVAL_LENGTH_MAX} characters")


def _check_open(command: Open) -> None:
    check_terms(command.terms)


def _check_grab(command: Grab) -> None:
    _check_named("user", command.user)
    check_amount("quantity", command.quantity, least=1)
    if command.attributes:
        _check_attributes(command.attributes)
    if command.basket is not None:
        _check_named("basket", command.basket)
    if command.ticket is not None and not (
        0 < len(command.ticket) <= TICKET_LENGTH_MAX and command.ticket.isascii()
    ):
        raise Invalid(f"ticket: must be a signed token of at most {TICKET_LENGTH_MAX} characters")
    if command.metadata is not None:
        _check_metadata(command.metadata)
    if not isinstance(command.wait, bool):
        raise Invalid(f"wait: must be true or false, got {quoted(command.wait)}")
    if command.basket is not None and command.wait:
        raise Invalid(
            "wait: a basket is granted or refused at once, it cannot wait; leave out wait or basket"
        )


def _check_amend(command: Amend) -> None:
    check_changes(command.changes)


def _check_load(command: Load) -> None:
    check_amount("chunks", command.chunks, least=1, most=CHUNKS_MAX)
    check_amount("chunk", command.chunk, least=1, most=command.chunks)
    if not 1 <= len(command.items) <= ITEMS_MAX:
        raise Invalid(f"items: must be 1 to {ITEMS_MAX}, got {len(command.items)}")
    if command.what == "audience":
        for number, item in enumerate(command.items, 1):
            # Codes that were called an audience by mistake are not repeated in a message.
            if not is_id(item):
                which = (
                    f"; number {number} of {len(command.items)} does not" if len(command.items) > 1 else ""
                )
                raise Invalid(f"items: must match [A-Za-z0-9._:-]{{1,64}}{which}")
        return
    if len(set(command.items)) < len(command.items):
        raise Invalid("items: a code occurs twice; each code is given to one grab")
    if command.what != "codes":
        raise Invalid(f"what: must be codes or audience, got {quoted(command.what)}")
    for item in command.items:
        if not 0 < len(item) <= CODE_LENGTH_MAX:
            raise Invalid(f"items: a code has 1 to {CODE_LENGTH_MAX} characters, got {len(item)}")
        if item != item.strip():
            raise Invalid(
                "items: a code begins or ends with a blank: a reader could not distinguish it from another"
            )
        check_line("items", item)
    if (size := sum(map(bytes_of_code, command.items))) > ITEMS_BYTES_MAX:
        raise Invalid(
            f"items: codes have at most {ITEMS_BYTES_MAX} bytes when they are sealed, these may have {size}; "
            "load fewer at once"
        )
    if (size := len(_encode(command))) > COMMAND_BYTES_MAX:
        raise Invalid(
            f"items: a command has at most {COMMAND_BYTES_MAX} bytes, this has {size}; load fewer at once"
        )


def bytes_of_code(code: str) -> int:
    """The bytes of a code in an event, at most: sealed (nonce, tag, base64), with the longest key id, in
    quotes.
    """
    return 4 * -(-(len(code.encode(errors="surrogatepass")) + 28) // 3) + ID_LENGTH_MAX + len(':"",')


def in_chunks(what: str, items: Sequence[str]) -> list[tuple[str, ...]]:
    """The list cut into chunks that fit the bounds of a `load`."""
    chunks: list[list[str]] = []
    in_event = in_command = 0
    for item in items:
        written = len(json.dumps(item)) + 1
        sealed = bytes_of_code(item) if what == "codes" else written
        full = (
            in_event + sealed > ITEMS_BYTES_MAX
            or in_command + written > COMMAND_BYTES_MAX - COMMAND_REST_BYTES
        )
        if not chunks or len(chunks[-1]) == ITEMS_MAX or full:
            chunks.append([])
            in_event = in_command = 0
        chunks[-1].append(item)
        in_event, in_command = in_event + sealed, in_command + written
    return [tuple(chunk) for chunk in chunks]


def _check_adjust(command: Adjust) -> None:
    if not 1 <= len(command.transfers) <= TRANSFERS_MAX:
        raise Invalid(f"transfers: must be 1 to {TRANSFERS_MAX}, got {len(command.transfers)}")
    for transfer in command.transfers:
        check_adjustment(transfer)
    if not command.reason:
        raise Invalid("reason: must say why the ledger is corrected")
    check_line("reason", command.reason)
    _check_named("approved_by", command.approved_by)


def _check_confirm(command: Confirm) -> None:
    _check_named("grab", command.grab)
    if command.payment is not None and not is_payment_id(command.payment):
        raise Invalid(f"payment: {PAYMENT_WORDS}, got {quoted(command.payment)}")
    check_amount("paid", command.paid)
    if command.currency is not None and not _is_currency(command.currency):
        raise Invalid(f"currency: must be three capital letters such as CNY, got {quoted(command.currency)}")
    if (command.paid > 0) and (command.payment is None or command.currency is None):
        raise Invalid("paid: a payment has an id (payment) and a currency")
    if command.quantity is not None:
        check_amount("quantity", command.quantity, least=1)
    if command.receipt is not None and not (
        0 < len(command.receipt) <= RECEIPT_LENGTH_MAX and command.receipt.isascii()
    ):
        raise Invalid(f"receipt: must be a signed text of at most {RECEIPT_LENGTH_MAX} characters")


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
            raise Invalid(
                f"attributes: names and values must match [A-Za-z0-9._:-]{{1,64}}, got {quoted(name)}: "
                f"{quoted(value)}"
            )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > METADATA_PAIRS_MAX:
        raise Invalid(f"metadata: at most {METADATA_PAIRS_MAX} pairs, got {len(metadata)}")
    for name, value in metadata.items():
        if not is_id(name):
            raise Invalid(f"metadata: names must match [A-Za-z0-9._:-]{{1,64}}, got {quoted(name)}")
        check_line(f"metadata: {name}", value, METADATA_BYTES_MAX)
    if (size := len(encode_metadata(metadata))) > METADATA_BYTES_MAX:
        raise Invalid(
            f"metadata: has at most {METADATA_BYTES_MAX} bytes as JSON without spaces, this has {size}; "
            "send a reference to longer data"
        )


def metadata_of(command: Command) -> dict[str, str] | None:
    """The metadata of a grab in its canonical order, by name; None without any, and for other commands."""
    if not isinstance(command, Grab) or not command.metadata:
        return None
    return dict(sorted(command.metadata.items()))


def carried_by(grab: Any) -> dict[str, Any]:
    """The fields CARRIED of a grab, or of its event, as events contain them: maps in order, by name."""
    found = ((name, getattr(grab, name)) for name in CARRIED)
    return {
        name: dict(sorted(value.items())) if isinstance(value, dict) else value
        for name, value in found
        if value
    }


def carried_texts(carried: dict[str, Any]) -> list[tuple[str, str]]:
    """The result of `carried_by` as names and JSON texts, which scripts pass on to events."""
    return [(name, _encode(value).decode()) for name, value in carried.items()]


def encode_metadata(metadata: dict[str, str]) -> bytes:
    """Metadata as canonical JSON, as in events: by name, without spaces, in UTF-8."""
    return _encode(metadata)


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


def check_size(raw: bytes) -> None:
    """Raises Invalid when a text is longer than a command may be. Called before the text is parsed."""
    if len(raw) > COMMAND_BYTES_MAX:
        raise Invalid(f"a command has at most {COMMAND_BYTES_MAX} bytes, this has {len(raw)}")


def decode_command(raw: bytes) -> AnyCommand:
    """Decodes and checks one command; raises Undecodable with the reason, and with id and offer if they are
    readable.
    """
    try:
        check_size(raw)
        command: AnyCommand = _decode(raw)
        _check_rules(command)
        _check_names_once(command, raw)
    except msgspec.DecodeError as error:
        raise _undecodable(with_what_may_be(str(error), raw, AnyCommand), raw) from None
    except (Invalid, UnicodeDecodeError) as error:
        raise _undecodable(str(error), raw) from None
    except RecursionError:
        raise _undecodable("nested too deep to be a command", raw) from None
    return command


def _check_names_once(command: AnyCommand, raw: bytes) -> None:
    """Raises Invalid when an object of the JSON names a field twice. The decoder would silently use the last
    value.
    """
    if type(command) is not Grab or raw.count(b'"') != PLAIN_GRAB_QUOTES:
        check_names_once(raw, _encode(command))


def _undecodable(reason: str, raw: bytes) -> Undecodable:
    fields = _addressed(raw)
    return Undecodable(reason, raw, *fields) if fields[0] is not None else Undecodable(reason, raw)


def _addressed(raw: bytes) -> list[str | None]:
    """The id, offer and user of an undecodable command, each None unless it can be read. The last value of a
    name counts.
    """
    if (pairs := _pairs_of(raw)) is not None:
        fields: dict[str, object] = dict(pairs)
    else:
        try:
            addressed = _decode_addressed(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return [None, None, None]
        fields = {name: _text_of(getattr(addressed, name)) for name in ("id", "offer", "user")}
    return [
        value if isinstance(value := fields.get(name), str) and is_id(value) else None
        for name in ("id", "offer", "user")
    ]


def _text_of(raw: msgspec.Raw) -> str | None:
    try:
        return _decode_text(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _pairs_of(raw: bytes) -> _Pairs | None:
    """The fields of an undecodable command, where wrong values and bytes that are not UTF-8 spoil no other.
    Empty for what is not an object; None where they cannot be read, or are longer than a command may be.
    """
    if len(raw) > COMMAND_BYTES_MAX:
        return None
    try:
        found = _decode_pairs(raw.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, _Pairs) else _Pairs()


def commands_of(value: bytes) -> Iterator[AnyCommand | Undecodable]:
    """The commands of one record (an object or an array of objects), in order. An undecodable command does
    not affect the others.

    A record that is not JSON or is above a bound is one Undecodable with all its bytes. Bounds are checked
    before decoding. Each command is decoded when the iterator reaches it, so a reader of a long array can
    pause in between.
    """
    if value[:1] != b"[" and not value.lstrip().startswith(b"["):
        yield _decode_or_reason(value)
        return
    if grabs := _plain_grabs(value):
        yield from grabs
        return
    try:
        raws = _split(value)
    except (msgspec.DecodeError, Invalid, UnicodeDecodeError) as error:
        yield Undecodable(str(error), value)
    except RecursionError:
        yield Undecodable("nested too deep to be an array of commands", value)
    else:
        for raw in raws:
            yield _decode_or_reason(raw)


def raws_of(value: bytes) -> list[bytes]:
    """The bytes of each command of a record whose commands `commands_of` could separate."""
    if value[:1] != b"[" and not value.lstrip().startswith(b"["):
        return [value]
    return list(_split(value))


def _plain_grabs(value: bytes) -> list[Grab]:
    """The commands of an array of plain grabs, decoded together, which takes less than half of the time; none
    if any command is another or invalid: then each is decoded separately.
    """
    # A grab has at least this many quotes, since the union of all commands requires `type`; one that names a
    # field twice, or has another field, has more. No command of such an array is above the bound of one.
    quotes = value.count(b'"')
    if len(value) > COMMAND_BYTES_MAX or not quotes or quotes % PLAIN_GRAB_QUOTES:
        return []
    try:
        grabs: list[Any] = _decode_list(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    if len(grabs) * PLAIN_GRAB_QUOTES != quotes or len(grabs) > ARRAY_COMMANDS_MAX:
        return []
    # So grabs have no other fields, and only their names are left to check.
    if set(map(type, grabs)) != {Grab}:
        return []
    ids, offers, users = zip(*map(_names_of_grab, grabs), strict=True)
    is_right = are_ids((*ids, *set(offers), *users)) and not may_be_reserved(ids)
    return grabs if is_right else []


_names_of_grab = attrgetter("id", "offer", "user")


def may_be_plain_grab(value: bytes | None) -> bool:
    """Whether a record may have one plain grab; `plain_grabs` decodes such records together."""
    return (
        value is not None
        and len(value) <= PLAIN_GRAB_BYTES_MAX
        and value.count(b'"') == PLAIN_GRAB_QUOTES
        and (b'"type":"grab"' in value or b'"type": "grab"' in value)
        and value.startswith(b"{")
        and value.endswith(b"}")
    )


def plain_grabs(values: Sequence[bytes]) -> list[Grab]:
    """The commands of records that each have one plain grab, decoded together, which takes a third of the
    time; none if any record has another command, or a wrong one.
    """
    joined = b",\r".join(values)
    others = len(values) - 1
    # Texts of JSON cannot have the byte \r. So where records meet, and nowhere else, an object ends and
    # another begins; it is a whole command, since a plain grab has no object within it.
    if (
        joined.count(b"\r") != others
        or joined.count(b"},\r{") != others
        or not (joined.startswith(b"{") and joined.endswith(b"}"))
    ):
        return []
    grabs = _plain_grabs(b"[" + joined + b"]")
    return grabs if len(grabs) == len(values) else []


def _split(value: bytes) -> Iterator[bytes]:
    """The undecoded elements of an array; raises Invalid when the array is above a bound. The bound of commas
    limits the cost of splitting.
    """
    if len(value) > RECORD_BYTES_MAX:
        raise Invalid(f"an array has at most {RECORD_BYTES_MAX} bytes, this has {len(value)}")
    commas = value.count(b",")
    if commas > ARRAY_COMMAS_MAX:
        raise Invalid(
            f"an array has at most {ARRAY_COMMAS_MAX} commas, this has {commas}; send commands in several "
            "arrays"
        )
    plain = without_surrogates(value)
    raws: list[msgspec.Raw] = _decode_raw_list(plain)
    if len(raws) > ARRAY_COMMANDS_MAX:
        raise Invalid(
            f"an array has at most {ARRAY_COMMANDS_MAX} commands, this has {len(raws)}; send several arrays"
        )
    return map(bytes, raws) if plain == value else at_places(value, plain, raws)


def decode_commands(value: bytes) -> list[AnyCommand | Undecodable]:
    """The commands of one record as a list (see `commands_of`)."""
    return list(commands_of(value))


def _decode_or_reason(raw: bytes) -> AnyCommand | Undecodable:
    try:
        return decode_command(raw)
    except Undecodable as error:
        return error


def user_of(command: Command) -> str | None:
    """The user that a command names, or None."""
    return command.user if isinstance(command, Grab | GrabCommand) else None


def identity_of(command: Command) -> tuple[str, ...]:
    """What distinguishes a command from all others: campaign and id; of a grab, offer, user and id."""
    if isinstance(command, Grab):
        return command.offer, command.user, command.id
    return campaign_of(command.offer), command.id


def named_in_basket(grabs: Sequence[Grab], basket: str) -> list[Grab]:
    """Grabs as those of a basket, in the same order. They have the ids `<basket>.1`, `<basket>.2` … in the
    order of offers, users and bodies. So the same grabs in another order are the same basket.
    """
    alike = [msgspec.structs.replace(grab, id=basket, basket=basket) for grab in grabs]
    places = sorted(
        range(len(alike)), key=lambda i: (alike[i].offer, alike[i].user, encode_command(alike[i]))
    )
    ids = {place: f"{basket}.{number}" for number, place in enumerate(places, 1)}
    return [msgspec.structs.replace(grab, id=ids[place]) for place, grab in enumerate(alike)]


def basket_of(command: AnyCommand) -> str | None:
    """The basket of a grab; None for other commands and for a grab without a basket."""
    return command.basket if isinstance(command, Grab) else None


def _baskets_named(command: AnyCommand | Undecodable) -> set[str]:
    """The baskets that a command names. An undecodable one may name several: each of them is refused."""
    if not isinstance(command, Undecodable):
        basket = basket_of(command)
        return {basket} if isinstance(basket, str) else set()
    raw = command.raw
    if b"basket" not in raw and b"\\" not in raw:
        return set()
    if (pairs := _pairs_of(raw)) is not None:
        return {value for name, value in pairs if name == "basket" and isinstance(value, str)}
    # Too long, or nested too deep: whatever looks like a basket at any depth counts.
    return {found.decode(errors="replace") for found in _LOOKS_LIKE_A_BASKET.findall(raw)}


def torn_baskets(
    commands: Sequence[AnyCommand | Undecodable], refused: Container[int] = ()
) -> dict[int, str]:
    """The grabs whose basket cannot be decided as one: index in `commands` → reason. It contains all grabs of
    a basket or none. `refused` are the indexes of commands that are already refused.
    """
    members: dict[str, list[int]] = {}
    for index, command in enumerate(commands):
        for basket in _baskets_named(command):
            members.setdefault(basket, []).append(index)
    return {
        index: reason
        for basket, indexes in members.items()
        if (reason := _why_torn(basket, indexes, commands, refused)) is not None
        for index in indexes
    }


def _why_torn(
    basket: str, indexes: Sequence[int], commands: Sequence[AnyCommand | Undecodable], refused: Container[int]
) -> str | None:
    grabs = [grab for index in indexes if not isinstance(grab := commands[index], Undecodable)]
    if len(grabs) < len(indexes) or any(index in refused for index in indexes):
        return f"basket: another grab of {shortened(basket, ID_LENGTH_MAX)} is invalid"
    if len(indexes) > BASKET_GRABS_KNOWN_MAX:
        return f"basket: at most {BASKET_GRABS_MAX} grabs, {basket} has {len(indexes)}"
    if indexes[-1] - indexes[0] != len(indexes) - 1:
        return f"basket: the grabs of {basket} must follow each other without other commands in between"
    if len({campaign_of(grab.offer) for grab in grabs}) > 1:
        return f"basket: the offers of {basket} must be of one campaign (the part of their ids before ':')"
    if len({identity_of(grab) for grab in grabs}) < len(grabs):
        return f"basket: a grab occurs twice in {basket}"
    return None


def secret_of(command: AnyCommand) -> str | None:
    """The secret field of a command, or None. A command with a secret must not be sent through a topic; only
    a gate accepts it.
    """
    if (
        isinstance(command, Open)
        and isinstance(command.terms, EnvelopeTerms)
        and command.terms.seed is not None
    ):
        return "terms.seed"
    return "items" if isinstance(command, Load) and command.what == "codes" else None


_ESCAPED_LETTER: Final = re.compile(rb"\\u00([67][0-9a-fA-F])")


def may_have_secret(raw: bytes) -> bool:
    """Whether refused bytes may be a command with a secret: they contain the name of a field of `secret_of`,
    also as escapes of JSON, or in UTF-16. Lists of users are such a field too.
    """
    letters = _ESCAPED_LETTER.sub(lambda escape: bytes([int(escape[1], 16)]), raw.replace(b"\0", b""))
    return b"seed" in letters or b"items" in letters


def encode_command(command: Command) -> bytes:
    """The command as canonical JSON: without defaults, so that equal commands have equal bytes."""
    return _encode(command)
