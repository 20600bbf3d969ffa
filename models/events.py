"""Events: facts, in the past tense, as they stand in the journal.

The Lua script that decides writes an event's text; Python only reads it. `encode_event` makes the same text from the pure
rules, so that the two can be compared byte for byte. Unknown fields are ignored, so that old readers survive new writers.
"""

from typing import Literal

import msgspec

from models.identifiers import Id
from models.transfers import Entry


class Event(msgspec.Struct, tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    """What every event has.

    `v` version of the type · `shard`, `seq` its place in the shard, without gaps · `offer_seq` its place in the offer, without
    gaps · `at` milliseconds since 1970 UTC by the shard's clock · `command` the id of the command that caused it, or `sweep`.
    """

    v: int
    shard: int
    seq: int
    offer_seq: int
    offer: Id
    at: int
    command: Id


class OfferOpened(Event, tag="offer.opened", frozen=True, kw_only=True):
    """An offer was created and funded with `total` (minor units or pieces). `terms` is what was asked, as JSON.

    `offsets` are those of its time zone (from a time on, ms ahead of UTC). `seed_sha256` commits to the seed, `sealed_seed` is for
    recovery only (authenticated encryption).
    """

    kind: str
    issuer: Id
    funding: Id | None = None
    asset: str
    total: int
    opens_at: int
    closes_at: int
    terms: msgspec.Raw
    offsets: tuple[tuple[int, int], ...] = ()
    seed_sha256: str | None = None
    sealed_seed: str | None = None
    operator: Id | None = None
    digest: str


class OfferLoaded(Event, tag="offer.loaded", frozen=True, kw_only=True):
    """A chunk of a list was loaded: `items` are sealed codes, or ids of users; `count` how many of the list are there now."""

    what: Literal["codes", "audience"]
    chunk: int
    chunks: int
    count: int
    items: tuple[str, ...]
    operator: Id | None = None
    digest: str


class OfferAmended(Event, tag="offer.amended", frozen=True, kw_only=True):
    """Terms changed; `changes` as they were asked. `added` or `removed` pieces came from, or went to, the account `source`."""

    changes: msgspec.Raw
    asset: str
    source: str
    added: int = 0
    removed: int = 0
    left: int
    operator: Id | None = None
    digest: str


class OfferPaused(Event, tag="offer.paused", frozen=True, kw_only=True):
    """Grabs are refused with `on_hold` from here on."""

    operator: Id | None = None
    digest: str


class OfferResumed(Event, tag="offer.resumed", frozen=True, kw_only=True):
    """Grabs are taken again."""

    operator: Id | None = None
    digest: str


class OfferClosed(Event, tag="offer.closed", frozen=True, kw_only=True):
    """The offer ended; `amount` (minor units or pieces) is what nobody took, `left` the parts or pieces it was in.

    `reason` says why; `refund_to` is the account that gets what is left; `seed` reveals what `seed_sha256` promised.
    """

    reason: Literal["command", "deadline", "drained"]
    asset: str
    amount: int
    left: int
    refund_to: str
    seed: str | None = None
    operator: Id | None = None
    digest: str | None = None


class OfferRetired(Event, tag="offer.retired", frozen=True, kw_only=True):
    """The offer left Redis; from here on questions about it are answered from SQL."""


class _GrabEvent(Event, frozen=True, kw_only=True):
    """What every event about a grab has.

    `grab` is the id of the command that made the grab, `quantity` the units this event moves, `amount` the same in the offer's asset
    (an envelope's part is one unit of many minor units), `place` the how-manieth grab of the offer it is, `left` what is left after.
    """

    grab: Id
    user: Id
    quantity: int
    amount: int
    asset: str
    place: int
    left: int


class GrabGranted(_GrabEvent, tag="grab.granted", frozen=True, kw_only=True):
    """A user got `amount` for good. `asked` is there when it was more than `quantity`; `codes` are sealed."""

    asked: int | None = None
    attributes: dict[Id, Id] = {}
    ticket: Id | None = None
    basket: Id | None = None
    codes: tuple[str, ...] = ()
    digest: str


class GrabHeld(_GrabEvent, tag="grab.held", frozen=True, kw_only=True):
    """Units are held for a user until `deadline_at`, to be paid with `due` minor units of `currency`.

    `waited` when they come from the waiting list: `command` is then what brought the units back.
    """

    asked: int | None = None
    deadline_at: int
    due: int | None = None
    currency: str | None = None
    waited: bool = False
    attributes: dict[Id, Id] = {}
    ticket: Id | None = None
    basket: Id | None = None
    digest: str | None = None


class GrabQueued(_GrabEvent, tag="grab.queued", frozen=True, kw_only=True):
    """A user waits for `quantity` units; `place` is the number on the waiting list, `amount` is 0."""

    attributes: dict[Id, Id] = {}
    ticket: Id | None = None
    digest: str


class GrabExtended(_GrabEvent, tag="grab.extended", frozen=True, kw_only=True):
    """A hold's deadline moved to `deadline_at`."""

    deadline_at: int
    digest: str


class GrabConfirmed(_GrabEvent, tag="grab.confirmed", frozen=True, kw_only=True):
    """Held units are the user's for good; `held` stay held. `paid` minor units of `currency` went to `issuer` by `payment`.

    `retaken` when the hold was over and the units were taken anew. `codes` are sealed.
    """

    held: int
    payment: Id | None = None
    paid: int = 0
    currency: str | None = None
    issuer: Id
    retaken: bool = False
    codes: tuple[str, ...] = ()
    digest: str


class GrabReleased(_GrabEvent, tag="grab.released", frozen=True, kw_only=True):
    """Held units went back to the account `to`; `reason` left_queue: a place on the waiting list was given up."""

    reason: Literal["command", "expired", "left_queue"]
    to: str
    digest: str | None = None


class GrabReturned(_GrabEvent, tag="grab.returned", frozen=True, kw_only=True):
    """Units came back after the fact, to the account `to`; `refunds` are (payment, minor units of `currency`) that go back for them.

    `restored` says whether the user's limits were given back.
    """

    reason: str = ""
    to: str
    refunds: tuple[tuple[Id, int], ...] = ()
    currency: str | None = None
    issuer: Id
    restored: bool = False
    digest: str


class GrabRedeemed(_GrabEvent, tag="grab.redeemed", frozen=True, kw_only=True):
    """Units were used for an order."""

    order: Id
    digest: str


class GrabUnredeemed(_GrabEvent, tag="grab.unredeemed", frozen=True, kw_only=True):
    """The use for an order was taken back."""

    order: Id
    digest: str


class PaymentRefundDue(Event, tag="payment.refund_due", frozen=True, kw_only=True):
    """`amount` minor units of `asset` came by `payment` and could not be served; `outcome` says why. Once per payment."""

    grab: Id
    payment: Id
    amount: int
    asset: str
    outcome: str
    digest: str


class LedgerAdjusted(Event, tag="ledger.adjusted", frozen=True, kw_only=True):
    """A correcting entry by an operator."""

    transfers: tuple[Entry, ...]
    reason: str
    approved_by: Id
    operator: Id | None = None
    digest: str


AnyEvent = (
    OfferOpened | OfferLoaded | OfferAmended | OfferPaused | OfferResumed | OfferClosed | OfferRetired
    | GrabGranted | GrabHeld | GrabQueued | GrabExtended | GrabConfirmed | GrabReleased | GrabReturned | GrabRedeemed | GrabUnredeemed
    | PaymentRefundDue | LedgerAdjusted
)  # fmt: skip
AnyGrabEvent = (
    GrabGranted | GrabHeld | GrabQueued | GrabExtended | GrabConfirmed | GrabReleased | GrabReturned | GrabRedeemed | GrabUnredeemed
)

decode_event = msgspec.json.Decoder(AnyEvent).decode
#: Decodes `[line,line,…]` in one call, for whole blocks.
decode_event_list = msgspec.json.Decoder(list[AnyEvent]).decode
encode_event = msgspec.json.Encoder().encode
