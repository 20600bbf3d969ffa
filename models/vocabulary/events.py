"""Events: facts, in the past tense, as the journal and `grab.events` contain them.

A model reads events of the current version. `from_wire(decode_event(line))` also reads older ones. The hash
chain is over the text of an event, so hash the line that was read, not the JSON of a model.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from grabstream.models import entries
from grabstream.models import events as wire
from grabstream.models.vocabulary.base import Flag, JsonObject, Model, Text, Whole, Wired, omitted


def _exact(value: object) -> object:
    """Raises ValueError for True and 1.0, which equal the version 1."""
    if type(value) is not int:
        raise ValueError("must be an integer")
    return value


V1 = Annotated[Literal[1], BeforeValidator(_exact)]
Offsets = tuple[tuple[Whole, Whole], ...]


class Event(Model, extra="ignore", frozen=True):
    """What every event has. Unknown fields are ignored, so that readers survive newer writers.

    `v` is the version of the type, `seq` the event's number in `shard`, `offer_seq` its number in `offer`;
    both count without gaps from 1. `at` is in milliseconds since 1970 UTC by the shard's clock. `command` is
    the id of the command that caused it, or `sweep`.
    """

    type: str
    v: int
    shard: Whole
    seq: Whole
    offer_seq: Whole
    offer: Text
    at: Whole
    command: Text


class CampaignZone(Model, Wired[wire.CampaignZone], extra="ignore", frozen=True):
    """The time zone of a campaign: its name, and its offsets (from a time in milliseconds since 1970 UTC on,
    milliseconds ahead of UTC).
    """

    timezone: Text
    offsets: Offsets


class BookedEntry(Model, Wired[entries.BookedEntry], extra="ignore", frozen=True):
    """A transfer of a correcting entry: `amount` (minor units or pieces) of `asset` from `debit` to
    `credit`.
    """

    asset: Text
    debit: Text
    credit: Text
    amount: Whole


class OfferOpened(Event, Wired[wire.OfferOpened], frozen=True):
    """An offer was created and funded with `total` (minor units or pieces). `terms` is what was asked.

    `opens_at` and `closes_at` are milliseconds since 1970 UTC, `offsets` are those of the offer's time zone
    (from a time on, milliseconds ahead of UTC). `campaign_zone` is present when the campaign counts its
    limits in another zone. `seed_sha256` commits to the seed; `sealed_seed` is encrypted and serves recovery.
    """

    type: Literal["offer.opened"] = "offer.opened"
    v: V1
    kind: Text
    issuer: Text
    funding: Text | None = omitted(None)
    asset: Text
    total: Whole
    opens_at: Whole
    closes_at: Whole
    terms: JsonObject
    offsets: Offsets = omitted(())
    campaign_zone: CampaignZone | None = omitted(None)
    seed_sha256: Text | None = omitted(None)
    sealed_seed: Text | None = omitted(None)
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


class OfferLoaded(Event, Wired[wire.OfferLoaded], frozen=True):
    """A chunk of a list was loaded: `items` are sealed codes or ids of users, `count` items of the list are
    loaded now.
    """

    type: Literal["offer.loaded"] = "offer.loaded"
    v: V1
    what: Literal["codes", "audience"]
    chunk: Whole
    chunks: Whole
    count: Whole
    items: tuple[Text, ...]
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


class OfferAmended(Event, Wired[wire.OfferAmended], frozen=True):
    """Terms changed; `changes` is what was asked. `added` pieces came from the account `source`, `removed`
    pieces went to it, `left` pieces are left.
    """

    type: Literal["offer.amended"] = "offer.amended"
    v: V1
    changes: JsonObject
    asset: Text
    source: Text
    added: Whole = omitted(0)
    removed: Whole = omitted(0)
    left: Whole
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


class OfferPaused(Event, Wired[wire.OfferPaused], frozen=True):
    """From here on, grabs are refused with `on_hold`."""

    type: Literal["offer.paused"] = "offer.paused"
    v: V1
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


class OfferResumed(Event, Wired[wire.OfferResumed], frozen=True):
    """Grabs are taken again."""

    type: Literal["offer.resumed"] = "offer.resumed"
    v: V1
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


class OfferClosed(Event, Wired[wire.OfferClosed], frozen=True):
    """The offer ended for `reason`; the rest, `amount` minor units or pieces, goes to the account
    `refund_to`. `left` parts or pieces could still be taken; the other pieces had lost their codes. `seed`
    reveals the seed that `seed_sha256` committed to.
    """

    type: Literal["offer.closed"] = "offer.closed"
    v: V1
    reason: Literal["command", "deadline", "drained"]
    asset: Text
    amount: Whole
    left: Whole
    refund_to: Text
    seed: Text | None = omitted(None)
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text | None = omitted(None)


class OfferRetired(Event, Wired[wire.OfferRetired], frozen=True):
    """The offer left Redis; from here on, SQL answers questions about it."""

    type: Literal["offer.retired"] = "offer.retired"
    v: V1


class GrabEvent(Event, frozen=True):
    """What every event about a grab has.

    `grab` is the id of the command that made the grab, `quantity` the units that this event moves, `amount`
    the same in the offer's asset (minor units or pieces), `place` the ordinal of the grab within the offer,
    from 1, `left` the units that can be taken after it.
    """

    grab: Text
    user: Text
    quantity: Whole
    amount: Whole
    asset: Text
    place: Whole
    left: Whole


class GrabGranted(GrabEvent, Wired[wire.GrabGranted], frozen=True):
    """A user got `amount` for good. `asked` is present when it was more than `quantity`; `codes` are sealed.

    `ticket` is the id of a single-use ticket that was used; `ticket_ends_at` (milliseconds since 1970 UTC) is
    present when the ticket was good for the whole campaign.
    """

    type: Literal["grab.granted"] = "grab.granted"
    v: V1
    asked: Whole | None = omitted(None)
    attributes: dict[Text, Text] = omitted({})
    metadata: dict[Text, Text] | None = omitted(None)
    ticket: Text | None = omitted(None)
    ticket_ends_at: Whole | None = omitted(None)
    basket: Text | None = omitted(None)
    codes: tuple[Text, ...] = omitted(())
    digest: Text


class GrabHeld(GrabEvent, Wired[wire.GrabHeld], frozen=True):
    """Units are held for a user until `deadline_at` (milliseconds since 1970 UTC), to be paid with `due`
    minor units of `currency`. With `waited` they come from the waiting list, and `command` brought the units
    back, or resumed the offer.
    """

    type: Literal["grab.held"] = "grab.held"
    v: V1
    asked: Whole | None = omitted(None)
    deadline_at: Whole
    due: Whole | None = omitted(None)
    currency: Text | None = omitted(None)
    waited: Flag = omitted(False)
    attributes: dict[Text, Text] = omitted({})
    metadata: dict[Text, Text] | None = omitted(None)
    ticket: Text | None = omitted(None)
    ticket_ends_at: Whole | None = omitted(None)
    basket: Text | None = omitted(None)
    digest: Text | None = omitted(None)


class GrabQueued(GrabEvent, Wired[wire.GrabQueued], frozen=True):
    """A user waits for `quantity` units; `place` is the number on the waiting list, `amount` is 0. The event
    that serves the grab has its `metadata` again.
    """

    type: Literal["grab.queued"] = "grab.queued"
    v: V1
    attributes: dict[Text, Text] = omitted({})
    metadata: dict[Text, Text] | None = omitted(None)
    ticket: Text | None = omitted(None)
    ticket_ends_at: Whole | None = omitted(None)
    digest: Text


class GrabExtended(GrabEvent, Wired[wire.GrabExtended], frozen=True):
    """The deadline of a hold moved to `deadline_at` (milliseconds since 1970 UTC)."""

    type: Literal["grab.extended"] = "grab.extended"
    v: V1
    deadline_at: Whole
    digest: Text


class GrabConfirmed(GrabEvent, Wired[wire.GrabConfirmed], frozen=True):
    """Held units are the user's for good; `held` units stay held. `paid` minor units of `currency` went to
    `issuer` by `payment`, which may settle each grab of one `basket`. With `retaken`, the hold was over and
    the units were taken again. `codes` are sealed.
    """

    type: Literal["grab.confirmed"] = "grab.confirmed"
    v: V1
    held: Whole
    payment: Text | None = omitted(None)
    paid: Whole = omitted(0)
    currency: Text | None = omitted(None)
    basket: Text | None = omitted(None)
    issuer: Text
    retaken: Flag = omitted(False)
    codes: tuple[Text, ...] = omitted(())
    digest: Text


class GrabReleased(GrabEvent, Wired[wire.GrabReleased], frozen=True):
    """Held units went back to the account `to`. With the reason `left_queue`, a place on the waiting list was
    given up.
    """

    type: Literal["grab.released"] = "grab.released"
    v: V1
    reason: Literal["command", "expired", "left_queue"]
    to: Text
    digest: Text | None = omitted(None)


class GrabReturned(GrabEvent, Wired[wire.GrabReturned], frozen=True):
    """Granted or confirmed units went back to the account `to`; `refunds` are pairs of a payment and the
    minor units of `currency` that go back for it. `restored` says whether the user's limits were given back.
    `voided_codes` are the codes of the units, sealed: the user has seen them, so the units went back without.
    """

    type: Literal["grab.returned"] = "grab.returned"
    v: V1
    reason: Text = omitted("")
    to: Text
    refunds: tuple[tuple[Text, Whole], ...] = omitted(())
    currency: Text | None = omitted(None)
    issuer: Text
    restored: Flag = omitted(False)
    voided_codes: tuple[Text, ...] = omitted(())
    digest: Text


class GrabRedeemed(GrabEvent, Wired[wire.GrabRedeemed], frozen=True):
    """Units were used for an order."""

    type: Literal["grab.redeemed"] = "grab.redeemed"
    v: V1
    order: Text
    digest: Text


class GrabUnredeemed(GrabEvent, Wired[wire.GrabUnredeemed], frozen=True):
    """The use for an order was taken back."""

    type: Literal["grab.unredeemed"] = "grab.unredeemed"
    v: V1
    order: Text
    digest: Text


class PaymentRefundDue(Event, Wired[wire.PaymentRefundDue], frozen=True):
    """`amount` minor units of `asset` came by `payment` and could not be served; `outcome` says why. Once for
    each payment and grab; `basket` is that of the grab. `user` is the user whom the confirmation named, else
    the user of the grab; absent where neither is known, and in events of older programs.
    """

    type: Literal["payment.refund_due"] = "payment.refund_due"
    v: V1
    grab: Text
    user: Text | None = omitted(None)
    payment: Text
    amount: Whole
    asset: Text
    basket: Text | None = omitted(None)
    outcome: Text
    digest: Text


class LedgerAdjusted(Event, Wired[wire.LedgerAdjusted], frozen=True):
    """An operator corrected the ledger."""

    type: Literal["ledger.adjusted"] = "ledger.adjusted"
    v: V1
    transfers: tuple[BookedEntry, ...]
    reason: Text
    approved_by: Text
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


AnyEvent = Annotated[
    OfferOpened
    | OfferLoaded
    | OfferAmended
    | OfferPaused
    | OfferResumed
    | OfferClosed
    | OfferRetired
    | GrabGranted
    | GrabHeld
    | GrabQueued
    | GrabExtended
    | GrabConfirmed
    | GrabReleased
    | GrabReturned
    | GrabRedeemed
    | GrabUnredeemed
    | PaymentRefundDue
    | LedgerAdjusted,
    Field(discriminator="type"),
]
