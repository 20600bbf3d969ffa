"""Events: facts, in the past tense, as the journal contains them.

The Lua script that decides writes the text of an event; Python only reads it. `encode_event` makes the same
text from an event of the pure rules, so that tests can compare both byte for byte. Unknown fields are
ignored, so that readers survive newer writers.

The class line of a type names its current version (`V1`). Events of older versions are raised to it while
they are decoded (`models/upcasting.py`); events of newer versions are refused.
"""

from collections.abc import Iterable
from typing import Annotated, Final, Generic, Literal, TypeVar, get_args

import msgspec

from grabstream.models.commands import APPROVALS_MAX
from grabstream.models.entries import BookedEntry
from grabstream.models.identifiers import Count, Id, PaymentId, in_schema
from grabstream.models.money import Account, Asset, Currency, Quantity, Sum
from grabstream.models.offers import Seed, Terms
from grabstream.models.outcomes import OutcomeName
from grabstream.models.upcasters import UPCASTERS
from grabstream.models.upcasting import Upcaster, Upcasters, VersionedDecoder

V = TypeVar("V", bound=int)
V1 = Literal[1]
Number = Annotated[int, in_schema(minimum=1)]
#: The ids of the keys that approved a command (`models/approvals.py`).
Signers = Annotated[tuple[Id, ...], in_schema(maxItems=APPROVALS_MAX)]
#: What a grab was sent with (`models/commands.py`), by name.
Metadata = dict[Id, str]
JsonObject = Annotated[msgspec.Raw, in_schema(type="object")]
KINDS: Final = [str(terms.__struct_config__.tag) for terms in get_args(Terms)]


class Event(msgspec.Struct, Generic[V], tag_field="type", frozen=True, kw_only=True, omit_defaults=True):
    """What every event has. Unknown fields are ignored, so that readers survive newer writers.

    `v` is the version of the type, `seq` the event's number in `shard`, `offer_seq` its number in `offer`;
    both count without gaps from 1. `at` is in milliseconds since 1970 UTC by the shard's clock. `command` is
    the id of the command that caused it, or `sweep`.
    """

    v: V
    shard: Count
    seq: Number
    offer_seq: Number
    offer: Id
    at: Count
    command: Id

    @property
    def seqs(self) -> int:
        """The number of seqs that the event takes; a run takes more than one (`models/runs.py`)."""
        return 1

    @property
    def last_seq(self) -> int:
        """The last seq that the event takes."""
        return self.seq


class CampaignZone(msgspec.Struct, frozen=True):
    """The time zone of a campaign: its name, and its offsets (from a time in milliseconds since 1970 UTC,
    milliseconds ahead of UTC).
    """

    timezone: str
    offsets: tuple[tuple[int, int], ...]


class OfferOpened(Event[V1], tag="offer.opened", frozen=True, kw_only=True):
    """An offer was created and funded with `total` (minor units or pieces). `terms` are those requested.

    `opens_at` and `closes_at` are milliseconds since 1970 UTC, `offsets` are those of the offer's time zone
    (from a time, milliseconds ahead of UTC). `campaign_zone` is present when the campaign's first offer has
    another zone, in which limits of the campaign count. `seed_sha256` commits to the seed; `sealed_seed` is
    encrypted and serves recovery.
    """

    kind: Annotated[str, in_schema(enum=KINDS)]
    issuer: Id
    funding: Id | None = None
    asset: Asset
    total: Quantity
    opens_at: Count
    closes_at: Count
    terms: JsonObject
    offsets: tuple[tuple[int, int], ...] = ()
    campaign_zone: CampaignZone | None = None
    seed_sha256: Annotated[str, in_schema(pattern="^[0-9a-f]{64}$")] | None = None
    sealed_seed: str | None = None
    operator: Id | None = None
    signers: Signers = ()
    digest: str


class OfferLoaded(Event[V1], tag="offer.loaded", frozen=True, kw_only=True):
    """A chunk of a list was loaded: `items` are sealed codes or ids of users, `count` items of the list are
    loaded now.
    """

    what: Literal["codes", "audience"]
    chunk: Number
    chunks: Number
    count: Count
    items: tuple[str, ...]
    operator: Id | None = None
    signers: Signers = ()
    digest: str


class OfferAmended(Event[V1], tag="offer.amended", frozen=True, kw_only=True):
    """Terms changed; `changes` are those requested. `added` pieces came from the account `source`, `removed`
    pieces went to it, `left` pieces are left.
    """

    changes: JsonObject
    asset: Asset
    source: Account
    added: Sum = 0
    removed: Sum = 0
    left: Sum
    operator: Id | None = None
    signers: Signers = ()
    digest: str


class OfferPaused(Event[V1], tag="offer.paused", frozen=True, kw_only=True):
    """From here, grabs are refused with `on_hold`."""

    operator: Id | None = None
    signers: Signers = ()
    digest: str


class OfferResumed(Event[V1], tag="offer.resumed", frozen=True, kw_only=True):
    """Grabs are accepted again."""

    operator: Id | None = None
    signers: Signers = ()
    digest: str


class OfferClosed(Event[V1], tag="offer.closed", frozen=True, kw_only=True):
    """The offer ended for `reason`; the rest, `amount` minor units or pieces, goes to the account
    `refund_to`. `left` parts or pieces could still be taken; the other pieces had lost their codes. `seed`
    reveals the seed that `seed_sha256` committed to.
    """

    reason: Literal["command", "deadline", "drained"]
    asset: Asset
    amount: Sum
    left: Sum
    refund_to: Account
    seed: Seed | None = None
    operator: Id | None = None
    signers: Signers = ()
    digest: str | None = None


class OfferRetired(Event[V1], tag="offer.retired", frozen=True, kw_only=True):
    """The offer left Redis; from here, SQL answers queries about it."""


class _GrabEvent(Event[V], Generic[V], frozen=True, kw_only=True):
    """What every event about a grab has.

    `grab` is the id of the command that made the grab, `quantity` the units that this event moves, `amount`
    the same in the offer's asset (minor units or pieces), `place` the ordinal of the grab within the offer,
    from 1, `left` the units that can be taken after it.
    """

    grab: Id
    user: Id
    quantity: Sum
    amount: Sum
    asset: Asset
    place: Count
    left: Sum


class GrabGranted(_GrabEvent[V1], tag="grab.granted", frozen=True, kw_only=True):
    """A user got `amount` permanently. `asked` is present when it was more than `quantity`; `codes` are
    sealed.

    `ticket` is the id of a single-use ticket that was used; `ticket_ends_at` (milliseconds since 1970 UTC) is
    present when the ticket was good for the whole campaign.
    """

    asked: Quantity | None = None
    attributes: dict[Id, Id] = {}
    metadata: Metadata | None = None
    ticket: Id | None = None
    ticket_ends_at: Count | None = None
    basket: Id | None = None
    codes: tuple[str, ...] = ()
    digest: str


class GrabHeld(_GrabEvent[V1], tag="grab.held", frozen=True, kw_only=True):
    """Units are held for a user until `deadline_at` (milliseconds since 1970 UTC), to be paid with `due`
    minor units of `currency`. With `waited`, the grab was on the waiting list, and `command` returned the
    units to the offer, or resumed it.
    """

    asked: Quantity | None = None
    deadline_at: Count
    due: Sum | None = None
    currency: Currency | None = None
    waited: bool = False
    attributes: dict[Id, Id] = {}
    metadata: Metadata | None = None
    ticket: Id | None = None
    ticket_ends_at: Count | None = None
    basket: Id | None = None
    digest: str | None = None


class GrabQueued(_GrabEvent[V1], tag="grab.queued", frozen=True, kw_only=True):
    """A user waits for `quantity` units; `place` is the number on the waiting list, `amount` is 0. The event
    that serves the grab repeats its `metadata`.
    """

    attributes: dict[Id, Id] = {}
    metadata: Metadata | None = None
    ticket: Id | None = None
    ticket_ends_at: Count | None = None
    digest: str


class GrabExtended(_GrabEvent[V1], tag="grab.extended", frozen=True, kw_only=True):
    """The deadline of a hold moved to `deadline_at` (milliseconds since 1970 UTC)."""

    deadline_at: Count
    digest: str


class GrabConfirmed(_GrabEvent[V1], tag="grab.confirmed", frozen=True, kw_only=True):
    """Held units are now the user's; `held` units stay held. `paid` minor units of `currency` went to
    `issuer` by `payment`, which may settle each grab of one `basket`. With `retaken`, the hold was over and
    the units were taken again. `codes` are sealed.
    """

    held: Sum
    payment: PaymentId | None = None
    paid: Sum = 0
    currency: Currency | None = None
    basket: Id | None = None
    issuer: Id
    retaken: bool = False
    codes: tuple[str, ...] = ()
    digest: str


class GrabReleased(_GrabEvent[V1], tag="grab.released", frozen=True, kw_only=True):
    """Held units went back to the account `to`. With the reason `left_queue`, a place on the waiting list was
    given up.
    """

    reason: Literal["command", "expired", "left_queue"]
    to: Account
    digest: str | None = None


class GrabReturned(_GrabEvent[V1], tag="grab.returned", frozen=True, kw_only=True):
    """Granted or confirmed units went back to the account `to`; `refunds` are pairs of a payment and the
    minor units of `currency` that go back for it. `restored` says whether the user's limits were given back.
    `voided_codes` are the codes of the units, sealed: the user has seen them, so the units went back without.
    """

    reason: str = ""
    to: Account
    refunds: tuple[tuple[PaymentId, Sum], ...] = ()
    currency: Currency | None = None
    issuer: Id
    restored: bool = False
    voided_codes: tuple[str, ...] = ()
    digest: str


class GrabRedeemed(_GrabEvent[V1], tag="grab.redeemed", frozen=True, kw_only=True):
    """Units were used for an order."""

    order: Id
    digest: str


class GrabUnredeemed(_GrabEvent[V1], tag="grab.unredeemed", frozen=True, kw_only=True):
    """The use for an order was undone."""

    order: Id
    digest: str


class PaymentRefundDue(Event[V1], tag="payment.refund_due", frozen=True, kw_only=True):
    """`amount` minor units of `asset` came by `payment` and could not be served; `outcome` says why. Once for
    each payment and grab, except with `conflict`: once for each sum that came beyond what was recorded
    before. `basket` is that of the grab. `user` is the user whom the confirmation named, else the user of the
    grab; absent where neither is known.
    """

    grab: Id
    user: Id | None = None
    payment: PaymentId
    amount: Quantity
    asset: Currency
    basket: Id | None = None
    outcome: OutcomeName
    digest: str


class LedgerAdjusted(Event[V1], tag="ledger.adjusted", frozen=True, kw_only=True):
    """An operator corrected the ledger."""

    transfers: tuple[BookedEntry, ...]
    reason: str
    approved_by: Id
    operator: Id | None = None
    signers: Signers = ()
    digest: str


AnyOfferEvent = (
    OfferOpened | OfferLoaded | OfferAmended | OfferPaused | OfferResumed | OfferClosed | OfferRetired
)  # fmt: skip
_OtherEvent = (
    GrabQueued | GrabExtended | GrabConfirmed | GrabReleased | GrabReturned | GrabRedeemed | GrabUnredeemed
    | PaymentRefundDue | LedgerAdjusted
)  # fmt: skip
AnyEvent = AnyOfferEvent | GrabGranted | GrabHeld | _OtherEvent
#: Events that are single lines of the journal: there, grants and holds are runs (`models/runs.py`).
LineEvent = AnyOfferEvent | _OtherEvent
AnyGrabEvent = (
    GrabGranted
    | GrabHeld
    | GrabQueued
    | GrabExtended
    | GrabConfirmed
    | GrabReleased
    | GrabReturned
    | GrabRedeemed
    | GrabUnredeemed
)

#: The current version of every type.
CURRENT_VERSIONS: Final[dict[str, int]] = {
    str(event.__struct_config__.tag): get_args(
        next(field.type for field in msgspec.structs.fields(event) if field.name == "v")
    )[0]
    for event in get_args(AnyEvent)
}


class EventDecoder(VersionedDecoder[AnyEvent]):
    """Decodes single events, as `grab.events` has them."""

    def __init__(self, upcasters: Iterable[Upcaster] = UPCASTERS) -> None:
        super().__init__(AnyEvent, Upcasters(upcasters, CURRENT_VERSIONS))


#: Made at import, so that no process that reads events starts with a gap in the upcasters.
EVENTS: Final = EventDecoder()
decode_event = EVENTS.decode
encode_event = msgspec.json.Encoder().encode
