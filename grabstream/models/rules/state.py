"""The state of a shard for the rules: its offers, their grabs, the counters of limits, and the remembered
answers.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from grabstream.models.answers import Answer
from grabstream.models.beacon import Beacon, beacon_of
from grabstream.models.calendar import Offsets
from grabstream.models.commands import Command, Grab, identity_of, metadata_of, user_of
from grabstream.models.digests import Digests
from grabstream.models.events import AnyEvent, CampaignZone
from grabstream.models.identifiers import campaign_of
from grabstream.models.offers import (
    PAYMENTS_KNOWN_MS,
    CouponTerms,
    EnvelopeTerms,
    PieceTerms,
    Terms,
    asset_of,
    week_minutes,
)
from grabstream.models.outcomes import Outcome

REFUSALS_MAX = 100_000

#: What a gate adds to a command. For `open`: seed, sealed_seed and clock_ms (the clock of the gate). For a
#: grab: ticket_expires_at, ticket_once, and ticket_ends_at if a single use counts in the whole campaign.
Drawn = Mapping[str, Any]


class Remembered(NamedTuple):
    """What is remembered under the id of a command: its first answer, the digest of its body, and for
    `adjust` the text of its entries.
    """

    answer: Answer
    digest: str
    whole: str | None = None


class Part(NamedTuple):
    """A user's part of an envelope."""

    place: int
    amount: int
    seq: int


class LimitCounter(NamedTuple):
    """A counter under which a grab was counted: its name, the window at that time, and whether it belongs to
    the campaign.
    """

    name: str
    window: int
    is_campaign_wide: bool


class CountedUnits(NamedTuple):
    """Units of a grab that were counted together. A payment that takes units again may add another entry."""

    units: int
    under: tuple[LimitCounter, ...]


class SettledPayment(NamedTuple):
    """The result of a payment: the outcome's code for its grab, the event that records it, and the money.

    `quantity` is 0 if the payment was not served. `basket` is that of the grab, or ''.
    """

    offer: str
    grab: str
    code: int
    seq: int
    at: int
    quantity: int
    paid: int
    currency: str
    basket: str = ""


class OrderUse(NamedTuple):
    """Units of a grab used for an order (0: the use was undone), and the event that records it."""

    quantity: int
    seq: int
    at: int


class Retirement(NamedTuple):
    """The remains of a retired offer: its last `offer_seq`, and when it retired (ms since 1970 UTC)."""

    offer_seq: int
    at: int


class Status(IntEnum):
    """The status of a grab of pieces."""

    active = 0
    released = 1
    expired = 2
    waiting = 3


@dataclass
class PieceGrab:
    """One grab of pieces: `held` units wait to be confirmed, `taken` units are the user's permanently, and
    `redeemed` of these are used.

    `under` are the counters under which it was first counted, `counted` the units that are counted now, and
    under which counters. `grace` is the time (ms) after the deadline in which a payment is still served;
    `lapsed` units expired. `ended` and `confirmed` are (seq, at) of the last event of their kind. A queued
    grab has what its events carry (`carried_by`) until it is served or leaves the queue. A payment may settle
    each grab of one `basket`.
    """

    user: str
    place: int
    quantity: int
    held: int = 0
    taken: int = 0
    redeemed: int = 0
    lapsed: int = 0
    deadline: int = 0
    grace: int = 0
    extensions: int = 0
    price: int = 0
    status: Status = Status.active
    ended: tuple[int, int] = (0, 0)
    confirmed: tuple[int, int] = (0, 0)
    under: list[LimitCounter] = field(default_factory=list)
    counted: list[CountedUnits] = field(default_factory=list)
    payments: list[tuple[str, int]] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)
    carried: dict[str, Any] = field(default_factory=dict)
    basket: str | None = None

    @property
    def lapses_at(self) -> int:
        """When a hold expires: its deadline plus the grace time."""
        return self.deadline + self.grace


@dataclass
class Offer:
    """One offer. `parts` are the parts drawn ahead, by place; empty if parts are drawn at the grab.

    `units_left` can be taken, `amount_left` is the balance of the offer's account. For pieces, these differ
    by the units that came back without their codes.
    """

    name: str
    terms: Terms
    opens_at: int
    closes_at: int
    amount_left: int
    units_left: int
    due: int
    seed: str | None = None
    #: Of the round of the beacon that the offer awaits; None until it is given.
    randomness: str | None = None
    max_part: int = 0
    parts: list[int] = field(default_factory=list)
    offsets: Offsets = ()
    campaign_offsets: Offsets = ()
    paused: bool = False
    closed_reason: str | None = None
    places: int = 0
    offer_seq: int = 1
    users: dict[str, Part] = field(default_factory=dict)
    counters: dict[str, tuple[int, int]] = field(default_factory=dict)
    grabs: dict[str, PieceGrab] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)
    queued: int = 0
    held: int = 0
    #: Units used by (grab, order).
    orders: dict[tuple[str, str], OrderUse] = field(default_factory=dict)
    codes: list[str] = field(default_factory=list)
    #: How many codes were loaded, including those already handed out.
    codes_listed: int = 0
    audience: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    chunks: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)

    @property
    def campaign(self) -> str:
        """The campaign of the offer. Offers of one campaign are decided in the same shard."""
        return campaign_of(self.name)

    @property
    def asset(self) -> str:
        """The asset that the offer counts."""
        return asset_of(self.name, self.terms)

    @property
    def pieces(self) -> PieceTerms:
        """The terms of an offer of pieces."""
        assert not isinstance(self.terms, EnvelopeTerms)
        return self.terms

    @property
    def is_envelope(self) -> bool:
        """Whether the offer is an envelope."""
        return isinstance(self.terms, EnvelopeTerms)

    @property
    def beacon(self) -> Beacon | None:
        """The round of a beacon from which the parts follow too."""
        text = self.terms.beacon if isinstance(self.terms, EnvelopeTerms) else None
        return None if text is None else beacon_of(text)

    @property
    def hours(self) -> list[tuple[int, int]]:
        """The opening hours as pairs of minutes of the week."""
        return week_minutes(self.terms.hours)

    @property
    def awaits_codes(self) -> bool:
        """Whether the offer must hand out codes and no chunk of them is loaded yet."""
        return isinstance(self.terms, CouponTerms) and self.terms.codes and "codes" not in self.chunks

    @property
    def returns_to(self) -> str:
        """The account that gets returned units: that of the offer, or after the close the account that got
        the rest.
        """
        if not self.closed_reason:
            return f"offer:{self.name}"
        return f"wallet:{self.terms.issuer}" if self.is_envelope else f"issuer:{self.terms.issuer}"


@dataclass
class ShardState:
    """One shard: its clock, its offers, the remembered answers, and the counts of refusals."""

    shard: int
    digests: Digests = field(default_factory=Digests)
    seq: int = 0
    time: int = 0
    offers: dict[str, Offer] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    past: dict[str, Retirement] = field(default_factory=dict)
    #: By `answer_key`. `refusals`: by `identity_of`.
    answers: dict[tuple[str, str], Remembered] = field(default_factory=dict)
    refusals: OrderedDict[tuple[str, ...], Remembered] = field(default_factory=OrderedDict)
    demand: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    payments: dict[tuple[str, str], SettledPayment] = field(default_factory=dict)
    counters: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    #: `tickets`: (campaign, single-use ticket that was used) → when the ticket ends. `zones`: campaign → the
    #: time zone in which its limits count.
    tickets: dict[tuple[str, str], int] = field(default_factory=dict)
    zones: dict[str, CampaignZone] = field(default_factory=dict)

    def answer_key(self, command: Command) -> tuple[str, str]:
        """The key in `answers`: that of a grab names its offer, and its user if the offer is an envelope, so
        that the id of a grab of pieces is known to all users.
        """
        campaign = campaign_of(command.offer)
        if not isinstance(command, Grab):
            return campaign, command.id
        offer = self.offers.get(command.offer)
        if offer is None or offer.is_envelope:
            return campaign, "/".join(identity_of(command))
        return campaign, f"{command.offer}/{command.id}"

    def knows_payments_of(self, offer: str, now: int) -> bool:
        """Whether the payments of an offer are known: until it retires, and PAYMENTS_KNOWN_MS after that."""
        past = self.past.get(offer)
        return past is None or now < past.at + PAYMENTS_KNOWN_MS


class Decided(NamedTuple):
    """The answer to a command, and the events of the decision. `made_event` is False if the command itself
    made none of them (a hold that lapsed makes events, too).
    """

    answer: Answer
    events: list[AnyEvent]
    made_event: bool = True


def head_of(state: ShardState, offer: Offer, command: str, now: int) -> dict[str, Any]:
    """The fields that every event has. Takes the next number of the shard and of the offer."""
    state.seq += 1
    state.time = now
    offer.offer_seq += 1
    return {
        "v": 1, "shard": state.shard, "seq": state.seq, "offer_seq": offer.offer_seq, "offer": offer.name,
        "at": now,
        "command": command,
    }  # fmt: skip


def answer_to(state: ShardState, command: Command, outcome: Outcome, at: int, **rest: Any) -> Answer:
    """The answer to a command, with what every answer of a shard has; `rest` are other fields."""
    return Answer(
        command.id,
        outcome.name,
        int(outcome),
        command.offer,
        user_of(command),
        shard=state.shard,
        at=at,
        **rest,
    )


def refused(state: ShardState, command: Command, outcome: Outcome, now: int, **rest: Any) -> Answer:
    """The answer of a refusal."""
    return answer_to(state, command, outcome, now, **rest)


def answered(state: ShardState, command: Command, outcome: Outcome, now: int, **rest: Any) -> Answer:
    """The answer to a command that was just executed, with the seq of the newest event."""
    return answer_to(state, command, outcome, now, seq=state.seq, metadata=metadata_of(command), **rest)


def as_remembered(answer: Answer) -> Answer:
    """What is remembered of a refusal without an event: outcome and time. A repeat looks up a part again."""
    return Answer(
        answer.id, answer.outcome, answer.code, answer.offer, answer.user, shard=answer.shard, at=answer.at
    )


def due_when_closed(offer: Offer, now: int) -> int:
    """When the sweeper must handle a closed offer: now if users are still queued, else when it retires, which
    is not before `valid_until`.
    """
    if offer.queue:
        return now
    return max(now + offer.terms.retire_after_ms, getattr(offer.terms, "valid_until", None) or 0)
