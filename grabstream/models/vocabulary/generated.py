"""Commands, terms, answers and events as pydantic models.

Made from the structs of `models/` by `python -m scripts.generated`: change those.
"""

from typing import Annotated, Any, Final, Literal, get_args, overload

from pydantic import Field

from grabstream.models import answers, commands, entries, events, offers
from grabstream.models.vocabulary.base import (
    Absent,
    AnswerModel,
    ChangesModel,
    CommandModel,
    Exact,
    Flag,
    JsonObject,
    Model,
    Text,
    Whole,
    Wired,
    omitted,
)

__all__ = [
    "Adjust",
    "Amend",
    "Answer",
    "AnyCommand",
    "AnyEvent",
    "BookedEntry",
    "CampaignZone",
    "Changes",
    "Close",
    "Command",
    "CommonTerms",
    "Confirm",
    "CouponTerms",
    "Entry",
    "EnvelopeTerms",
    "Event",
    "Extend",
    "Grab",
    "GrabCommand",
    "GrabConfirmed",
    "GrabEvent",
    "GrabExtended",
    "GrabGranted",
    "GrabHeld",
    "GrabQueued",
    "GrabRedeemed",
    "GrabReleased",
    "GrabReturned",
    "GrabUnredeemed",
    "Hours",
    "LedgerAdjusted",
    "Limit",
    "LimitState",
    "Load",
    "Model",
    "OfferAmended",
    "OfferClosed",
    "OfferCommand",
    "OfferLoaded",
    "OfferOpened",
    "OfferPaused",
    "OfferResumed",
    "OfferRetired",
    "Open",
    "Pause",
    "PaymentRefundDue",
    "PieceTerms",
    "Redeem",
    "Release",
    "Resume",
    "Return",
    "StockTerms",
    "Terms",
    "Unredeem",
    "Wired",
    "from_wire",
]


class Hours(Model, Wired[offers.Hours], extra="forbid", validate_by_name=True, frozen=True):
    """Hours of the week in which an offer takes grabs, by the offer's local clock: from `from` up to, not
    including, `until`; both as `HH:MM`, at most 24:00.
    """

    weekdays: tuple[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"], ...] = omitted(
        ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
    )
    from_: Text = omitted("00:00", alias="from")
    until: Text = omitted("24:00")


class CommonTerms(Model, extra="forbid", frozen=True):
    """What all kinds of offers have."""

    kind: str
    issuer: Text
    title: Text = omitted("")
    total: Whole
    opens_at: Whole | None = omitted(None)
    closes_at: Whole | None = omitted(None)
    timezone: Text = omitted("UTC")
    hours: tuple[Hours, ...] = omitted(())
    audience: Literal["everyone", "list", "ticket"] = omitted("everyone")
    retire_after_ms: Whole = omitted(604_800_000)


class EnvelopeTerms(CommonTerms, Wired[offers.EnvelopeTerms], frozen=True):
    """A sum of money in random parts, one for each user."""

    kind: Literal["envelope"] = "envelope"
    funding: Text
    asset: Text
    parts: Whole
    law: Literal["double_mean", "bounded", "equal"] = omitted("double_mean")
    min: Whole = omitted(1)
    max: Whole | None = omitted(None)
    draw: Literal["ahead", "at_grab"] = omitted("ahead")
    seed: Text | None = omitted(None)
    beacon: Text | None = omitted(None)


class Limit(Model, Wired[offers.Limit], extra="forbid", frozen=True):
    """At most `max` units by one user (or by one value of the attribute `by`) in each hour, day or week, or
    in the whole offer.

    With `scope` campaign, grabs of all offers of the campaign count that have the same limit.
    """

    by: Text
    per: Literal["offer", "hour", "day", "week"]
    max: Whole
    scope: Literal["offer", "campaign"] = omitted("offer")


class PieceTerms(CommonTerms, frozen=True):
    """Units that are counted, limited, held until paid, and given back."""

    limits: tuple[Limit, ...] = omitted(())
    max_per_grab: Whole = omitted(1)
    take: Literal["all", "up_to"] = omitted("all")
    price: Whole | None = omitted(None)
    currency: Text | None = omitted(None)
    hold_ms: Whole | None = omitted(None)
    extensions: Whole = omitted(0)
    late: Literal["refuse", "grace", "retake"] = omitted("refuse")
    grace_ms: Whole = omitted(0)
    return_restores: Flag = omitted(False)
    valid_until: Whole | None = omitted(None)
    waiting_list: Flag = omitted(False)


class CouponTerms(PieceTerms, Wired[offers.CouponTerms], frozen=True):
    """Coupons: units with limits, used by `redeem`."""

    kind: Literal["coupon"] = "coupon"
    codes: Flag = omitted(False)


class StockTerms(PieceTerms, Wired[offers.StockTerms], frozen=True):
    """Stock: items in any quantity; with `hold_ms`, held until paid."""

    kind: Literal["stock"] = "stock"
    asset: Text | None = omitted(None)


Terms = Annotated[EnvelopeTerms | CouponTerms | StockTerms, Field(discriminator="kind")]


class Command(CommandModel, extra="forbid", frozen=True):
    """What every command has: an id (see `identity_of`), and the offer it is about."""

    type: str
    id: Text
    offer: Text


class OfferCommand(Command, frozen=True):
    """A command of an operator about an offer; `operator` says who sent it, `approvals` are the signatures of
    the operators who approve it.
    """

    operator: Text | None = omitted(None)
    approvals: tuple[Text, ...] = omitted(())


class Open(OfferCommand, Wired[commands.Open], frozen=True):
    """Creates and funds an offer."""

    type: Literal["open"] = "open"
    terms: Terms


class Grab(Command, Wired[commands.Grab], frozen=True):
    """One user's attempt to get `quantity` units.

    `attributes` are names and values that limits may count by, `ticket` is a signed token of the eligibility
    service. The grabs of one array that share a `basket` are all granted or all refused. With `wait`, the
    user joins the waiting list when the offer is sold out. `metadata` are texts by name that the answer and
    the events of the grab repeat; nothing is decided by them.
    """

    type: Literal["grab"] = "grab"
    user: Text
    quantity: Whole = omitted(1)
    attributes: dict[Text, Text] = omitted({})
    ticket: Text | None = omitted(None)
    basket: Text | None = omitted(None)
    wait: Flag = omitted(False)
    metadata: dict[Text, Text] | None = omitted(None)


class Pause(OfferCommand, Wired[commands.Pause], frozen=True):
    """Refuses grabs with `on_hold` until the offer is resumed."""

    type: Literal["pause"] = "pause"


class Resume(OfferCommand, Wired[commands.Resume], frozen=True):
    """Takes grabs again."""

    type: Literal["resume"] = "resume"


class Close(OfferCommand, Wired[commands.Close], frozen=True):
    """Closes the offer now; the rest returns to the issuer."""

    type: Literal["close"] = "close"


class Changes(ChangesModel, Wired[offers.Changes], extra="forbid", frozen=True):
    """What `amend` changes; an absent field stays as it is. An envelope's money and parts are promised and
    cannot be changed. `randomness` is `<round>/<randomness>/<signature>` of the awaited round.
    """

    title: Absent[Text] = omitted(None)
    total: Absent[Whole] = omitted(None)
    opens_at: Absent[Whole] = omitted(None)
    closes_at: Absent[Whole] = omitted(None)
    limits: Absent[tuple[Limit, ...]] = omitted(None)
    max_per_grab: Absent[Whole] = omitted(None)
    price: Absent[Whole] = omitted(None)
    hold_ms: Absent[Whole] = omitted(None)
    extensions: Absent[Whole] = omitted(None)
    late: Absent[Literal["refuse", "grace", "retake"]] = omitted(None)
    grace_ms: Absent[Whole] = omitted(None)
    return_restores: Absent[Flag] = omitted(None)
    valid_until: Absent[Whole] = omitted(None)
    randomness: Absent[Text] = omitted(None)


class Amend(OfferCommand, Wired[commands.Amend], frozen=True):
    """Changes terms while the offer runs, in order with the grabs."""

    type: Literal["amend"] = "amend"
    changes: Changes


class Load(OfferCommand, Wired[commands.Load], frozen=True):
    """Loads one chunk of a list that an offer needs before it opens: coupon codes, or the ids of users who
    may grab. `chunk` counts from 1 to `chunks`.
    """

    type: Literal["load"] = "load"
    what: Literal["codes", "audience"]
    chunk: Whole
    chunks: Whole
    items: tuple[Text, ...]


class Entry(Model, Wired[entries.Entry], extra="forbid", frozen=True):
    """A transfer in a command `adjust`: `amount` (minor units or pieces) of `asset` from the account `debit`
    to the account `credit`.
    """

    asset: Text
    debit: Text
    credit: Text
    amount: Whole


class Adjust(OfferCommand, Wired[commands.Adjust], frozen=True):
    """Corrects the ledger with `transfers`, with a reason and who approved it."""

    type: Literal["adjust"] = "adjust"
    transfers: tuple[Entry, ...]
    reason: Text
    approved_by: Text


class GrabCommand(Command, frozen=True):
    """A command about one grab: `grab` is the id of the command that made it. If `user` is given, the grab
    must be theirs; another user's grab does not exist for this command.
    """

    grab: Text
    user: Text | None = omitted(None)


class Confirm(GrabCommand, Wired[commands.Confirm], frozen=True):
    """Reports that a hold was paid: `paid` minor units of `currency` by `payment`, for `quantity` of its
    units (absent: all that are held). `receipt` is the signature of the payment side.
    """

    type: Literal["confirm"] = "confirm"
    payment: Text | None = omitted(None)
    paid: Whole = omitted(0)
    currency: Text | None = omitted(None)
    quantity: Whole | None = omitted(None)
    receipt: Text | None = omitted(None)


class Release(GrabCommand, Wired[commands.Release], frozen=True):
    """Gives a hold back, or leaves the waiting list."""

    type: Literal["release"] = "release"


class Extend(GrabCommand, Wired[commands.Extend], frozen=True):
    """Moves the deadline of a hold by the offer's `hold_ms`, as often as the offer allows."""

    type: Literal["extend"] = "extend"


class Return(GrabCommand, Wired[commands.Return], frozen=True):
    """Gives back `quantity` units (absent: all) that were granted or confirmed; money paid for them goes
    back.
    """

    type: Literal["return"] = "return"
    quantity: Whole | None = omitted(None)
    reason: Text = omitted("")


class Redeem(GrabCommand, Wired[commands.Redeem], frozen=True):
    """Uses `quantity` units of a coupon, once for each order."""

    type: Literal["redeem"] = "redeem"
    order: Text
    quantity: Whole = omitted(1)


class Unredeem(GrabCommand, Wired[commands.Unredeem], frozen=True):
    """Undoes the use for an order."""

    type: Literal["unredeem"] = "unredeem"
    order: Text


AnyCommand = Annotated[
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
    | Unredeem,
    Field(discriminator="type"),
]


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


class CampaignZone(Model, Wired[events.CampaignZone], extra="ignore", frozen=True):
    """The time zone of a campaign: its name, and its offsets (from a time in milliseconds since 1970 UTC,
    milliseconds ahead of UTC).
    """

    timezone: Text
    offsets: tuple[tuple[Whole, Whole], ...]


class OfferOpened(Event, Wired[events.OfferOpened], frozen=True):
    """An offer was created and funded with `total` (minor units or pieces). `terms` are those requested.

    `opens_at` and `closes_at` are milliseconds since 1970 UTC, `offsets` are those of the offer's time zone
    (from a time, milliseconds ahead of UTC). `campaign_zone` is present when the campaign's first offer has
    another zone, in which limits of the campaign count. `seed_sha256` commits to the seed; `sealed_seed` is
    encrypted and serves recovery.
    """

    type: Literal["offer.opened"] = "offer.opened"
    v: Annotated[Literal[1], Exact]
    kind: Text
    issuer: Text
    funding: Text | None = omitted(None)
    asset: Text
    total: Whole
    opens_at: Whole
    closes_at: Whole
    terms: JsonObject
    offsets: tuple[tuple[Whole, Whole], ...] = omitted(())
    campaign_zone: CampaignZone | None = omitted(None)
    seed_sha256: Text | None = omitted(None)
    sealed_seed: Text | None = omitted(None)
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


class OfferLoaded(Event, Wired[events.OfferLoaded], frozen=True):
    """A chunk of a list was loaded: `items` are sealed codes or ids of users, `count` items of the list are
    loaded now.
    """

    type: Literal["offer.loaded"] = "offer.loaded"
    v: Annotated[Literal[1], Exact]
    what: Literal["codes", "audience"]
    chunk: Whole
    chunks: Whole
    count: Whole
    items: tuple[Text, ...]
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


class OfferAmended(Event, Wired[events.OfferAmended], frozen=True):
    """Terms changed; `changes` are those requested. `added` pieces came from the account `source`, `removed`
    pieces went to it, `left` pieces are left.
    """

    type: Literal["offer.amended"] = "offer.amended"
    v: Annotated[Literal[1], Exact]
    changes: JsonObject
    asset: Text
    source: Text
    added: Whole = omitted(0)
    removed: Whole = omitted(0)
    left: Whole
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


class OfferPaused(Event, Wired[events.OfferPaused], frozen=True):
    """From here, grabs are refused with `on_hold`."""

    type: Literal["offer.paused"] = "offer.paused"
    v: Annotated[Literal[1], Exact]
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


class OfferResumed(Event, Wired[events.OfferResumed], frozen=True):
    """Grabs are accepted again."""

    type: Literal["offer.resumed"] = "offer.resumed"
    v: Annotated[Literal[1], Exact]
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text


class OfferClosed(Event, Wired[events.OfferClosed], frozen=True):
    """The offer ended for `reason`; the rest, `amount` minor units or pieces, goes to the account
    `refund_to`. `left` parts or pieces could still be taken; the other pieces had lost their codes. `seed`
    reveals the seed that `seed_sha256` committed to.
    """

    type: Literal["offer.closed"] = "offer.closed"
    v: Annotated[Literal[1], Exact]
    reason: Literal["command", "deadline", "drained"]
    asset: Text
    amount: Whole
    left: Whole
    refund_to: Text
    seed: Text | None = omitted(None)
    operator: Text | None = omitted(None)
    signers: tuple[Text, ...] = omitted(())
    digest: Text | None = omitted(None)


class OfferRetired(Event, Wired[events.OfferRetired], frozen=True):
    """The offer left Redis; from here, SQL answers queries about it."""

    type: Literal["offer.retired"] = "offer.retired"
    v: Annotated[Literal[1], Exact]


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


class GrabGranted(GrabEvent, Wired[events.GrabGranted], frozen=True):
    """A user got `amount` permanently. `asked` is present when it was more than `quantity`; `codes` are
    sealed.

    `ticket` is the id of a single-use ticket that was used; `ticket_ends_at` (milliseconds since 1970 UTC) is
    present when the ticket was good for the whole campaign.
    """

    type: Literal["grab.granted"] = "grab.granted"
    v: Annotated[Literal[1], Exact]
    asked: Whole | None = omitted(None)
    attributes: dict[Text, Text] = omitted({})
    metadata: dict[Text, Text] | None = omitted(None)
    ticket: Text | None = omitted(None)
    ticket_ends_at: Whole | None = omitted(None)
    basket: Text | None = omitted(None)
    codes: tuple[Text, ...] = omitted(())
    digest: Text


class GrabHeld(GrabEvent, Wired[events.GrabHeld], frozen=True):
    """Units are held for a user until `deadline_at` (milliseconds since 1970 UTC), to be paid with `due`
    minor units of `currency`. With `waited`, the grab was on the waiting list, and `command` returned the
    units to the offer, or resumed it.
    """

    type: Literal["grab.held"] = "grab.held"
    v: Annotated[Literal[1], Exact]
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


class GrabQueued(GrabEvent, Wired[events.GrabQueued], frozen=True):
    """A user waits for `quantity` units; `place` is the number on the waiting list, `amount` is 0. The event
    that serves the grab repeats its `metadata`.
    """

    type: Literal["grab.queued"] = "grab.queued"
    v: Annotated[Literal[1], Exact]
    attributes: dict[Text, Text] = omitted({})
    metadata: dict[Text, Text] | None = omitted(None)
    ticket: Text | None = omitted(None)
    ticket_ends_at: Whole | None = omitted(None)
    digest: Text


class GrabExtended(GrabEvent, Wired[events.GrabExtended], frozen=True):
    """The deadline of a hold moved to `deadline_at` (milliseconds since 1970 UTC)."""

    type: Literal["grab.extended"] = "grab.extended"
    v: Annotated[Literal[1], Exact]
    deadline_at: Whole
    digest: Text


class GrabConfirmed(GrabEvent, Wired[events.GrabConfirmed], frozen=True):
    """Held units are now the user's; `held` units stay held. `paid` minor units of `currency` went to
    `issuer` by `payment`, which may settle each grab of one `basket`. With `retaken`, the hold was over and
    the units were taken again. `codes` are sealed.
    """

    type: Literal["grab.confirmed"] = "grab.confirmed"
    v: Annotated[Literal[1], Exact]
    held: Whole
    payment: Text | None = omitted(None)
    paid: Whole = omitted(0)
    currency: Text | None = omitted(None)
    basket: Text | None = omitted(None)
    issuer: Text
    retaken: Flag = omitted(False)
    codes: tuple[Text, ...] = omitted(())
    digest: Text


class GrabReleased(GrabEvent, Wired[events.GrabReleased], frozen=True):
    """Held units went back to the account `to`. With the reason `left_queue`, a place on the waiting list was
    given up.
    """

    type: Literal["grab.released"] = "grab.released"
    v: Annotated[Literal[1], Exact]
    reason: Literal["command", "expired", "left_queue"]
    to: Text
    digest: Text | None = omitted(None)


class GrabReturned(GrabEvent, Wired[events.GrabReturned], frozen=True):
    """Granted or confirmed units went back to the account `to`; `refunds` are pairs of a payment and the
    minor units of `currency` that go back for it. `restored` says whether the user's limits were given back.
    `voided_codes` are the codes of the units, sealed: the user has seen them, so the units went back without.
    """

    type: Literal["grab.returned"] = "grab.returned"
    v: Annotated[Literal[1], Exact]
    reason: Text = omitted("")
    to: Text
    refunds: tuple[tuple[Text, Whole], ...] = omitted(())
    currency: Text | None = omitted(None)
    issuer: Text
    restored: Flag = omitted(False)
    voided_codes: tuple[Text, ...] = omitted(())
    digest: Text


class GrabRedeemed(GrabEvent, Wired[events.GrabRedeemed], frozen=True):
    """Units were used for an order."""

    type: Literal["grab.redeemed"] = "grab.redeemed"
    v: Annotated[Literal[1], Exact]
    order: Text
    digest: Text


class GrabUnredeemed(GrabEvent, Wired[events.GrabUnredeemed], frozen=True):
    """The use for an order was undone."""

    type: Literal["grab.unredeemed"] = "grab.unredeemed"
    v: Annotated[Literal[1], Exact]
    order: Text
    digest: Text


class PaymentRefundDue(Event, Wired[events.PaymentRefundDue], frozen=True):
    """`amount` minor units of `asset` came by `payment` and could not be served; `outcome` says why. Once for
    each payment and grab, except with `conflict`: once for each sum that came beyond what was recorded
    before. `basket` is that of the grab. `user` is the user whom the confirmation named, else the user of the
    grab; absent where neither is known.
    """

    type: Literal["payment.refund_due"] = "payment.refund_due"
    v: Annotated[Literal[1], Exact]
    grab: Text
    user: Text | None = omitted(None)
    payment: Text
    amount: Whole
    asset: Text
    basket: Text | None = omitted(None)
    outcome: Text
    digest: Text


class BookedEntry(Model, Wired[entries.BookedEntry], extra="ignore", frozen=True):
    """A transfer in an event `ledger.adjusted`: `amount` (minor units or pieces) of `asset` from `debit` to
    `credit`. Readers ignore unknown fields.
    """

    asset: Text
    debit: Text
    credit: Text
    amount: Whole


class LedgerAdjusted(Event, Wired[events.LedgerAdjusted], frozen=True):
    """An operator corrected the ledger."""

    type: Literal["ledger.adjusted"] = "ledger.adjusted"
    v: Annotated[Literal[1], Exact]
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


class LimitState(Model, Wired[answers.LimitState], extra="ignore", frozen=True):
    """What a limit leaves to a user: `left` of `max` units until `resets_at` (milliseconds since 1970 UTC;
    absent: the limit never resets).
    """

    by: Text
    per: Text
    max: Whole
    left: Whole
    resets_at: Whole | None = omitted(None)
    scope: Text = omitted("offer")


class Answer(AnswerModel, Wired[answers.Answer], extra="ignore", frozen=True):
    """The answer to one command. `user` is the user that the command names, always for a grab: it is
    identified by `offer`, `user` and `id`.

    `code` is the number of `outcome`. `amount` counts the offer's asset (minor units or pieces), `place` is
    the ordinal of the grab within the offer, from 1, `left` the parts or pieces that can be taken after it.
    `seq` is the event's number in `shard`. `due` minor units of `currency` are to be paid until
    `deadline_at`. `limit` is the limit that refused the command, `limits` what all limits leave. `retry_at`,
    `deadline_at` and `at` are milliseconds since 1970 UTC. `voided_codes` are the codes of returned units,
    which are void. `metadata` is that of a grab that was granted, held or queued.
    """

    id: Text
    outcome: Text
    code: Whole
    offer: Text | None = omitted(None)
    user: Text | None = omitted(None)
    grab: Text | None = omitted(None)
    amount: Whole | None = omitted(None)
    quantity: Whole | None = omitted(None)
    place: Whole | None = omitted(None)
    left: Whole | None = omitted(None)
    repeated: Flag = omitted(False)
    retry_at: Whole | None = omitted(None)
    shard: Whole | None = omitted(None)
    seq: Whole | None = omitted(None)
    at: Whole | None = omitted(None)
    message: Text | None = omitted(None)
    deadline_at: Whole | None = omitted(None)
    due: Whole | None = omitted(None)
    currency: Text | None = omitted(None)
    limit: LimitState | None = omitted(None)
    limits: tuple[LimitState, ...] = omitted(())
    coupon_code: Text | None = omitted(None)
    coupon_codes: tuple[Text, ...] = omitted(())
    voided_codes: tuple[Text, ...] = omitted(())
    metadata: dict[Text, Text] | None = omitted(None)


_MODELS: Final[dict[type[Any], Any]] = {
    model.struct: model for union in (AnyCommand, AnyEvent) for model in get_args(get_args(union)[0])
}


@overload
def from_wire(struct: commands.AnyCommand) -> AnyCommand: ...
@overload
def from_wire(struct: events.AnyEvent) -> AnyEvent: ...
def from_wire(struct: Any) -> Any:
    """The model of any command or event; raises pydantic's ValidationError when it breaks a rule."""
    return _MODELS[type(struct)].from_wire(struct)
