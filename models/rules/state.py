"""What a shard consists of, as the rules see it: its offers, their grabs, what is counted, and what is
remembered of commands.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from grabstream.models.answers import Answer
from grabstream.models.calendar import Offsets
from grabstream.models.commands import Command
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

#: What a server adds to a command: for `open` seed, sealed_seed and clock_ms (the gate's); for a grab
#: ticket_expires_at, ticket_once, and ticket_ends_at where a single use counts in the campaign.
Drawn = Mapping[str, Any]


class Remembered(NamedTuple):
    """What is kept under a command's id: its first answer, its body's digest, and the body itself where that
    is compared.
    """

    answer: Answer
    digest: str
    whole: str | None = None


class Part(NamedTuple):
    """A user's part of an envelope."""

    place: int
    amount: int
    seq: int


class Counted(NamedTuple):
    """What one grab was counted under: a counter, the window it was in, and whether the counter is the
    campaign's.
    """

    counter: str
    window: int
    of_campaign: bool


class CountedUnits(NamedTuple):
    """Units of a grab that were counted together; a payment that retook some made another batch of these."""

    units: int
    under: tuple[Counted, ...]


class Payment(NamedTuple):
    """What became of a payment: the outcome's code for this grab, the event that says so, and how much it
    was.

    `quantity` is 0 where it was not served.
    """

    offer: str
    grab: str
    code: int
    seq: int
    at: int
    quantity: int
    paid: int
    currency: str


class Order(NamedTuple):
    """Units of a grab used for an order (0: taken back), and the event that says so."""

    quantity: int
    seq: int
    at: int


class Past(NamedTuple):
    """What is kept of an offer that has retired: its last `offer_seq`, and when it retired (ms)."""

    offer_seq: int
    at: int


class Status(IntEnum):
    """How a grab of pieces stands."""

    active = 0
    released = 1
    expired = 2
    waiting = 3


@dataclass
class Taken:
    """One grab of pieces: `held` units wait to be confirmed, `taken` are the user's for good, `redeemed` of
    these are used.

    `under` are the counters it was first counted under, `counted` what stands under which now. `grace`
    is the time behind the deadline in which a payment is still served; `lapsed` units expired;
    `ended` and `confirmed` are (seq, at) of the last event of their kind.
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
    under: list[Counted] = field(default_factory=list)
    counted: list[CountedUnits] = field(default_factory=list)
    payments: list[tuple[str, int]] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)

    @property
    def lapses_at(self) -> int:
        """When a hold is over: its deadline, and the time of grace behind it."""
        return self.deadline + self.grace


@dataclass
class Offer:
    """One offer. `parts` are those drawn ahead, by place; empty when they are drawn at the grab."""

    name: str
    terms: Terms
    opens_at: int
    closes_at: int
    amount_left: int
    units_left: int
    due: int
    seed: str | None = None
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
    grabs: dict[str, Taken] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)
    queued: int = 0
    held: int = 0
    #: Units used by (grab, order).
    orders: dict[tuple[str, str], Order] = field(default_factory=dict)
    codes: list[str] = field(default_factory=list)
    #: How many codes were loaded, whatever became of them.
    codes_listed: int = 0
    audience: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    chunks: dict[str, int] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)

    @property
    def campaign(self) -> str:
        """The offers that are decided together with this one share its name."""
        return campaign_of(self.name)

    @property
    def asset(self) -> str:
        """What is counted."""
        return asset_of(self.name, self.terms)

    @property
    def pieces(self) -> PieceTerms:
        """The terms of an offer of pieces."""
        assert not isinstance(self.terms, EnvelopeTerms)
        return self.terms

    @property
    def is_envelope(self) -> bool:
        """Whether it is money in parts."""
        return isinstance(self.terms, EnvelopeTerms)

    @property
    def hours(self) -> list[tuple[int, int]]:
        """The minutes of the week in which it takes grabs."""
        return week_minutes(self.terms.hours)

    @property
    def awaits_codes(self) -> bool:
        """Whether it hands out codes and has none yet."""
        return isinstance(self.terms, CouponTerms) and self.terms.codes and "codes" not in self.chunks

    @property
    def returns_to(self) -> str:
        """The account that gets units which come back: the offer's own, after its close where the close sent
        the rest.
        """
        if not self.closed_reason:
            return f"offer:{self.name}"
        return f"wallet:{self.terms.issuer}" if self.is_envelope else f"issuer:{self.terms.issuer}"


@dataclass
class ShardState:
    """One shard: its clock, its offers, what it remembers of commands, and how often it refused what."""

    shard: int
    digests: Digests = field(default_factory=Digests)
    seq: int = 0
    time: int = 0
    offers: dict[str, Offer] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    past: dict[str, Past] = field(default_factory=dict)
    answers: dict[tuple[str, str], Remembered] = field(default_factory=dict)
    refusals: OrderedDict[tuple[str, str], Remembered] = field(default_factory=OrderedDict)
    demand: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    payments: dict[tuple[str, str], Payment] = field(default_factory=dict)
    counters: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    #: Single-use tickets of campaigns that were used, and when they end; the time zones that limits of
    #: campaigns count in.
    tickets: dict[tuple[str, str], int] = field(default_factory=dict)
    zones: dict[str, CampaignZone] = field(default_factory=dict)

    def knows_payments_of(self, offer: str, now: int) -> bool:
        """Whether what became of an offer's payments counts: while the offer is there, and for a time after
        it has retired.
        """
        past = self.past.get(offer)
        return past is None or now < past.at + PAYMENTS_KNOWN_MS


class Decided(NamedTuple):
    """The answer to a command, and the events it made. `own` says whether one of these is the command's
    own.
    """

    answer: Answer
    events: list[AnyEvent]
    own: bool = True


def head_of(state: ShardState, offer: Offer, command: str, now: int) -> dict[str, Any]:
    """The fields every event has; takes the next number of the shard and of the offer."""
    state.seq += 1
    state.time = now
    offer.offer_seq += 1
    return {
        "v": 1, "shard": state.shard, "seq": state.seq, "offer_seq": offer.offer_seq, "offer": offer.name,
        "at": now,
        "command": command,
    }  # fmt: skip


def refused(state: ShardState, command: Command, outcome: Outcome, now: int, **rest: Any) -> Answer:
    """The answer of a refusal."""
    return Answer(command.id, outcome.name, int(outcome), command.offer, shard=state.shard, at=now, **rest)


def answered(state: ShardState, command: Command, outcome: Outcome, now: int, **rest: Any) -> Answer:
    """The answer to what was just carried out: it carries the newest event."""
    return Answer(
        command.id,
        outcome.name,
        int(outcome),
        command.offer,
        shard=state.shard,
        seq=state.seq,
        at=now,
        **rest,
    )


def as_remembered(answer: Answer) -> Answer:
    """Of a refusal without an event only outcome and time are kept; a part or an opening time is looked up
    again.
    """
    return Answer(answer.id, answer.outcome, answer.code, answer.offer, shard=answer.shard, at=answer.at)


def due_when_closed(offer: Offer, now: int) -> int:
    """When a closed offer is seen to: at once to send home who waits, else to retire it, not before its units
    can no longer be redeemed.
    """
    if offer.queue:
        return now
    return max(now + offer.terms.retire_after_ms, getattr(offer.terms, "valid_until", None) or 0)
