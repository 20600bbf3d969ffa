"""The rules, pure: what the Lua scripts must decide, said once more without any server, so that the two can be compared.

`decide` takes a shard's state, one command and a time, and gives the answer and the events; `sweep` does what time brings. The
state is changed in place. Refusals are small functions in order of precedence, so that a new kind of offer adds to the list.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec

from models.answers import Answer
from models.commands import AnyCommand, Close, Grab, Open, Pause, Resume, digest_of
from models.events import AnyEvent, GrabGranted, OfferClosed, OfferOpened, OfferPaused, OfferResumed
from models.identifiers import campaign_of
from models.offers import ENVELOPE_LIFE_MS, EnvelopeTerms
from models.outcomes import Outcome
from models.splitting import check_split, next_part, split_ahead

REFUSALS_MAX = 100_000


class Remembered(NamedTuple):
    """What is kept under a command's id: its first answer and its body's digest."""

    answer: Answer
    digest: str


class Part(NamedTuple):
    """A user's part of an envelope."""

    place: int
    amount: int
    seq: int


@dataclass
class Offer:
    """One offer. `parts` are those drawn ahead, by place; empty when they are drawn at the grab."""

    name: str
    terms: EnvelopeTerms
    seed: str
    opens_at: int
    closes_at: int
    amount_left: int
    units_left: int
    max_part: int
    parts: list[int]
    paused: bool = False
    closed_reason: str | None = None
    places: int = 0
    offer_seq: int = 1
    users: dict[str, Part] = field(default_factory=dict)


@dataclass
class ShardState:
    """One shard: its clock, its offers, what it remembers of commands, and how often it refused what."""

    shard: int
    seq: int = 0
    time: int = 0
    offers: dict[str, Offer] = field(default_factory=dict)
    answers: dict[tuple[str, str], Remembered] = field(default_factory=dict)
    refusals: OrderedDict[tuple[str, str], Remembered] = field(default_factory=OrderedDict)
    demand: Counter[tuple[int, int, str]] = field(default_factory=Counter)


class Decided(NamedTuple):
    """The answer to a command, and the events it made."""

    answer: Answer
    events: list[AnyEvent]


#: What an offer was opened with beyond its terms: the seed, and its sealed form (which only a server can make).
Drawn = Mapping[str, str]


def decide(state: ShardState, command: AnyCommand, clock_ms: int, drawn: Drawn | None = None) -> Decided:
    """Decides one command at a time in ms (the shard's clock never goes back); `drawn` is needed to open: seed and sealed_seed."""
    now = max(clock_ms, state.time)
    offer = state.offers.get(command.offer)
    if isinstance(command, Grab) and offer is not None and command.quantity != 1:
        return Decided(_refused(state, command, Outcome.invalid, now), [])
    key, digest = (campaign_of(command.offer), command.id), digest_of(command)
    known = state.answers.get(key) or state.refusals.get(key)
    if known is not None:
        return Decided(_repeated(state, command, known, digest, now), [])
    if isinstance(command, Open):
        return _open(state, command, digest, now, drawn or {})
    for refusal_of in _REFUSALS[type(command)]:
        refused = refusal_of(state, command, offer, now)
        if refused is not None:
            state.refusals[key] = Remembered(_as_remembered(refused), digest)
            state.demand[now // 1000, refused.code, command.offer] += 1
            if len(state.refusals) > REFUSALS_MAX:
                state.refusals.popitem(last=False)
            return Decided(refused, [])
    assert offer is not None
    decided = _CARRY_OUT[type(command)](state, command, offer, digest, now)
    state.answers[key] = Remembered(decided.answer, digest)
    return decided


def sweep(state: ShardState, clock_ms: int) -> list[AnyEvent]:
    """Closes the offers whose time is over, the longest due first."""
    now = max(clock_ms, state.time)
    due = [offer for offer in state.offers.values() if offer.closed_reason is None and clock_ms >= offer.closes_at]
    return [_close(state, offer, "deadline", "sweep", None, now) for offer in sorted(due, key=lambda one: (one.closes_at, one.name))]


# -- refusals, in order of precedence ---------------------------------------------------------------------------------

_Refusal = Callable[[ShardState, Any, Offer | None, int], Answer | None]


def _no_such_offer(state: ShardState, command: AnyCommand, offer: Offer | None, now: int) -> Answer | None:
    return _refused(state, command, Outcome.no_such_offer, now) if offer is None else None


def _already_taken(state: ShardState, command: Grab, offer: Offer, now: int) -> Answer | None:
    part = offer.users.get(command.user)
    return None if part is None else _with_part(_refused(state, command, Outcome.already_taken, now), part)


def _not_open_yet(state: ShardState, command: Grab, offer: Offer, now: int) -> Answer | None:
    if now >= offer.opens_at:
        return None
    return msgspec.structs.replace(_refused(state, command, Outcome.not_open_yet, now), retry_at=offer.opens_at)


def _on_hold(state: ShardState, command: Grab, offer: Offer, now: int) -> Answer | None:
    return _refused(state, command, Outcome.on_hold, now) if offer.paused else None


def _sold_out(state: ShardState, command: Grab, offer: Offer, now: int) -> Answer | None:
    return _refused(state, command, Outcome.sold_out, now) if offer.closed_reason == "drained" else None


def _over(state: ShardState, command: Grab, offer: Offer, now: int) -> Answer | None:
    return _refused(state, command, Outcome.over, now) if offer.closed_reason or now >= offer.closes_at else None


def _closed(state: ShardState, command: AnyCommand, offer: Offer, now: int) -> Answer | None:
    return _refused(state, command, Outcome.over, now) if offer.closed_reason else None


# A drained envelope is `sold_out` although it is closed too (CONTRACT), so that test comes before `over`.
_REFUSALS: dict[type, list[_Refusal]] = {
    Grab: [_no_such_offer, _already_taken, _not_open_yet, _on_hold, _sold_out, _over],  # type: ignore[list-item]
    Pause: [_no_such_offer, _closed],  # type: ignore[list-item]
    Resume: [_no_such_offer, _closed],  # type: ignore[list-item]
    Close: [_no_such_offer, _closed],  # type: ignore[list-item]
}


def _refused(state: ShardState, command: AnyCommand, outcome: Outcome, now: int) -> Answer:
    return Answer(command.id, outcome.name, int(outcome), command.offer, shard=state.shard, at=now)


def _with_part(answer: Answer, part: Part) -> Answer:
    return msgspec.structs.replace(answer, amount=part.amount, quantity=1, place=part.place, seq=part.seq)


def _as_remembered(answer: Answer) -> Answer:
    """Of a refusal only outcome and time are kept; a part or an opening time is looked up again."""
    return msgspec.structs.replace(answer, amount=None, quantity=None, place=None, seq=None, retry_at=None)


def _repeated(state: ShardState, command: AnyCommand, known: Remembered, digest: str, now: int) -> Answer:
    if known.digest != digest:
        return _refused(state, command, Outcome.conflict, now)
    answer = msgspec.structs.replace(known.answer, repeated=True)
    offer = state.offers.get(command.offer)
    if answer.code == Outcome.already_taken and isinstance(command, Grab) and offer is not None:
        return _with_part(answer, offer.users[command.user])
    return answer


# -- carrying out -----------------------------------------------------------------------------------------------------


def _head(state: ShardState, offer: Offer, command: str, now: int) -> dict[str, Any]:
    """The fields every event has; takes the next number of the shard and of the offer."""
    state.seq += 1
    state.time = now
    return {
        "v": 1, "shard": state.shard, "seq": state.seq, "offer_seq": offer.offer_seq, "offer": offer.name, "at": now,
        "command": command,
    }  # fmt: skip


def _open(state: ShardState, command: Open, digest: str, now: int, drawn: Drawn) -> Decided:
    terms = command.terms
    if command.offer in state.offers:
        return Decided(_refused(state, command, Outcome.conflict, now), [])
    opens_at = terms.opens_at or now
    closes_at = terms.closes_at or opens_at + ENVELOPE_LIFE_MS
    if closes_at <= opens_at:
        return Decided(_refused(state, command, Outcome.invalid, now), [])
    seed = terms.seed or drawn["seed"]
    most = check_split(terms.law, terms.total, terms.parts, terms.min, terms.max)
    ahead = terms.draw == "ahead"
    parts = split_ahead(terms.law, terms.total, terms.parts, terms.min, most, seed) if ahead else []
    offer = Offer(command.offer, terms, seed, opens_at, closes_at, terms.total, terms.parts, most, parts)
    state.offers[command.offer] = offer
    event = OfferOpened(
        **_head(state, offer, command.id, now),
        kind="envelope",
        issuer=terms.issuer,
        funding=terms.funding,
        asset=terms.asset,
        total=terms.total,
        opens_at=opens_at,
        closes_at=closes_at,
        terms=msgspec.Raw(msgspec.json.encode(msgspec.structs.replace(terms, seed=None))),
        seed_sha256=sha256(bytes.fromhex(seed)).hexdigest(),
        sealed_seed=drawn.get("sealed_seed"),
        digest=digest,
    )
    answer = _done(state, command, Outcome.opened, now, terms.total, terms.parts)
    state.answers[campaign_of(command.offer), command.id] = Remembered(answer, digest)
    return Decided(answer, [event])


def _grab(state: ShardState, command: Grab, offer: Offer, digest: str, now: int) -> Decided:
    terms, place = offer.terms, offer.places + 1
    if offer.parts:
        amount = offer.parts[offer.places]
    else:
        amount = next_part(
            terms.law, offer.amount_left, offer.units_left, terms.min, offer.max_part, offer.seed, place
        )  # fmt: skip
    offer.places, offer.units_left, offer.amount_left = place, offer.units_left - 1, offer.amount_left - amount
    offer.offer_seq += 1
    event = GrabGranted(
        **_head(state, offer, command.id, now),
        grab=command.id,
        user=command.user,
        quantity=1,
        amount=amount,
        asset=terms.asset,
        place=place,
        left=offer.units_left,
        attributes=command.attributes,
        digest=digest,
    )
    offer.users[command.user] = Part(place, amount, event.seq)
    answer = Answer(
        command.id, "granted", 0, command.offer, command.id, amount, 1, place, offer.units_left,
        shard=state.shard, seq=event.seq, at=now,
    )  # fmt: skip
    events: list[AnyEvent] = [event]
    if offer.units_left == 0:
        events.append(_close(state, offer, "drained", command.id, None, now))
    return Decided(answer, events)


def _pause(state: ShardState, command: Pause, offer: Offer, digest: str, now: int) -> Decided:
    offer.paused = True
    offer.offer_seq += 1
    event = OfferPaused(**_head(state, offer, command.id, now), digest=digest)
    return Decided(_done(state, command, Outcome.paused, now, None, offer.units_left), [event])


def _resume(state: ShardState, command: Resume, offer: Offer, digest: str, now: int) -> Decided:
    offer.paused = False
    offer.offer_seq += 1
    event = OfferResumed(**_head(state, offer, command.id, now), digest=digest)
    return Decided(_done(state, command, Outcome.resumed, now, None, offer.units_left), [event])


def _close_by_command(state: ShardState, command: Close, offer: Offer, digest: str, now: int) -> Decided:
    amount, left = offer.amount_left, offer.units_left
    event = _close(state, offer, "command", command.id, digest, now)
    return Decided(_done(state, command, Outcome.closed, now, amount, left), [event])


def _close(state: ShardState, offer: Offer, reason: str, command: str, digest: str | None, now: int) -> OfferClosed:
    offer.offer_seq += 1
    event = OfferClosed(
        **_head(state, offer, command, now),
        reason=reason,  # type: ignore[arg-type]
        asset=offer.terms.asset,
        amount=offer.amount_left,
        left=offer.units_left,
        refund_to=f"wallet:{offer.terms.issuer}",
        seed=offer.seed,
        digest=digest,
    )
    offer.closed_reason, offer.paused, offer.amount_left, offer.units_left = reason, False, 0, 0
    return event


def _done(state: ShardState, command: AnyCommand, outcome: Outcome, now: int, amount: int | None, left: int) -> Answer:
    return Answer(
        command.id, outcome.name, int(outcome), command.offer, amount=amount or None, left=left,
        shard=state.shard, seq=state.seq, at=now,
    )  # fmt: skip


_CARRY_OUT: dict[type, Callable[[ShardState, Any, Offer, str, int], Decided]] = {
    Grab: _grab,
    Pause: _pause,
    Resume: _resume,
    Close: _close_by_command,
}
