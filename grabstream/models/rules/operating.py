"""The commands of operators about an offer (open, load, amend, pause, resume, close, adjust), and what is due
by time: its close and its retirement.
"""

from hashlib import sha256
from typing import Any

import msgspec
from msgspec import UNSET

from grabstream.models.answers import Answer
from grabstream.models.approvals import signers_of
from grabstream.models.beacon import beacon_of, round_of
from grabstream.models.bounds import CODES_PER_GRAB_MAX
from grabstream.models.calendar import offsets_of
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Close,
    Load,
    OfferCommand,
    Open,
    Pause,
    Resume,
)
from grabstream.models.entries import BookedEntry
from grabstream.models.events import (
    AnyEvent,
    CampaignZone,
    LedgerAdjusted,
    OfferAmended,
    OfferClosed,
    OfferLoaded,
    OfferOpened,
    OfferPaused,
    OfferResumed,
    OfferRetired,
)
from grabstream.models.identifiers import campaign_of
from grabstream.models.money import AMOUNT_MAX
from grabstream.models.offers import (
    ENVELOPE_CHANGES,
    ENVELOPE_LIFE_MS,
    TIME_MS_MAX,
    WITH_CODES,
    Changes,
    EnvelopeTerms,
    Terms,
    asset_of,
    published,
    units_of,
)
from grabstream.models.outcomes import Outcome
from grabstream.models.rules.grabbing import SERVED_AT_ONCE_MAX, leave_queue, serve
from grabstream.models.rules.state import (
    Decided,
    Drawn,
    Offer,
    Remembered,
    Retirement,
    ShardState,
    answer_to,
    answered,
    due_when_closed,
    head_of,
    refused,
)
from grabstream.models.splitting import check_split, split_ahead
from grabstream.models.transfers import source_of

RETIRE_AGAIN_MS = 60_000
BEACON_TOO_EARLY = "terms.beacon: the round is already due; name a later one"
CLOSES_TOO_EARLY = "terms.closes_at: must be after opens_at and after now"


def open_offer(state: ShardState, command: Open, digest: str, now: int, drawn: Drawn) -> Decided:
    """Creates and funds an offer. An id can be used only once."""
    terms = command.terms
    if command.offer in state.offers or command.offer in state.retired:
        return Decided(refused(state, command, Outcome.conflict, now), [])
    opens_at = terms.opens_at or now
    closes_at = terms.closes_at or (
        opens_at + ENVELOPE_LIFE_MS if isinstance(terms, EnvelopeTerms) else TIME_MS_MAX
    )
    if closes_at <= opens_at:
        return Decided(refused(state, command, Outcome.invalid, now, message=CLOSES_TOO_EARLY), [])
    if isinstance(terms, EnvelopeTerms) and terms.beacon and beacon_of(terms.beacon).at <= now:
        return Decided(refused(state, command, Outcome.invalid, now, message=BEACON_TOO_EARLY), [])
    offsets = offsets_of(terms.timezone, drawn.get("clock_ms", now))
    offer_zone = CampaignZone(terms.timezone, offsets)
    zone = state.zones.setdefault(campaign_of(command.offer), offer_zone)
    offer = Offer(
        command.offer, terms, opens_at, closes_at, terms.total, units_of(terms), closes_at, offsets=offsets,
        campaign_offsets=zone.offsets,
        offer_seq=0,
    )  # fmt: skip
    seed = _draw(offer, terms, drawn)
    state.offers[command.offer] = offer
    asset = asset_of(command.offer, terms)
    event = OfferOpened(
        **head_of(state, offer, command.id, now),
        kind=terms.__struct_config__.tag,  # type: ignore[arg-type]
        issuer=terms.issuer,
        funding=terms.funding if isinstance(terms, EnvelopeTerms) else None,
        asset=asset,
        total=terms.total,
        opens_at=opens_at,
        closes_at=closes_at,
        terms=msgspec.Raw(msgspec.json.encode(published(terms))),
        offsets=offsets,
        campaign_zone=zone if zone != offer_zone else None,
        seed_sha256=sha256(bytes.fromhex(seed)).hexdigest() if seed else None,
        sealed_seed=drawn.get("sealed_seed") if seed else None,
        **_senders(command),
        digest=digest,
    )
    answer = answered(state, command, Outcome.opened, now, amount=terms.total, left=offer.units_left)
    state.answers[offer.campaign, command.id] = Remembered(answer, state.digests.remembered(command))
    return Decided(answer, [event])


def _senders(command: OfferCommand) -> dict[str, Any]:
    """The sender and the signers of a command, as fields of its event."""
    return {"operator": command.operator, "signers": signers_of(command)}


def _draw(offer: Offer, terms: Terms, drawn: Drawn) -> str | None:
    if not isinstance(terms, EnvelopeTerms):
        return None
    offer.seed = seed = terms.seed or drawn["seed"]
    offer.max_part = check_split(terms.law, terms.total, terms.parts, terms.min, terms.max)
    if terms.draw == "ahead":
        offer.parts = split_ahead(terms.law, terms.total, terms.parts, terms.min, offer.max_part, seed)
    return seed


def closed(state: ShardState, command: AnyCommand, offer: Offer, now: int) -> Answer | None:
    """The refusal of a command about a closed offer; None if the offer is open."""
    return refused(state, command, Outcome.over, now) if offer.closed_reason else None


def decide_offer_command(state: ShardState, command: Any, offer: Offer, digest: str, now: int) -> Decided:
    """Executes a command of an operator about an offer, or refuses it."""
    return _DECIDE[type(command)](state, command, offer, digest, now)  # type: ignore[no-any-return]


def _pause(state: ShardState, command: Pause, offer: Offer, digest: str, now: int) -> Decided:
    if refusal := closed(state, command, offer, now):
        return Decided(refusal, [], False)
    offer.paused = True
    event = OfferPaused(
        **head_of(state, offer, command.id, now),
        **_senders(command),
        digest=digest,
    )
    answer = answered(state, command, Outcome.paused, now, left=offer.units_left)
    # Serves no queued grab: the sweeper leaves them to the resume.
    return Decided(answer, [event, *serve(state, offer, command.id, now)])


def _resume(state: ShardState, command: Resume, offer: Offer, digest: str, now: int) -> Decided:
    if refusal := closed(state, command, offer, now):
        return Decided(refusal, [], False)
    offer.paused = False
    event = OfferResumed(
        **head_of(state, offer, command.id, now),
        **_senders(command),
        digest=digest,
    )
    events = [event, *serve(state, offer, command.id, now)]
    answer = answer_to(state, command, Outcome.resumed, now, left=offer.units_left, seq=event.seq)
    return Decided(answer, events)


def _close(state: ShardState, command: Close, offer: Offer, digest: str, now: int) -> Decided:
    if refusal := closed(state, command, offer, now):
        return Decided(refusal, [], False)
    amount, left = offer.amount_left, offer.units_left
    event = close_offer(
        state, offer, "command", command.id, digest, now, command.operator, signers_of(command)
    )
    return Decided(answered(state, command, Outcome.closed, now, amount=amount or None, left=left), [event])


def close_offer(
    state: ShardState,
    offer: Offer,
    reason: Any,
    command: str,
    digest: str | None,
    now: int,
    operator: str | None = None,
    signers: tuple[str, ...] = (),
) -> OfferClosed:
    """Closes an offer: the rest goes back to its issuer and the seed is revealed. Holds can still be paid.
    The sweeper removes queued grabs later.
    """
    head = head_of(state, offer, command, now)
    amount, left = offer.amount_left, offer.units_left
    offer.closed_reason, offer.paused, offer.amount_left, offer.units_left = reason, False, 0, 0
    offer.parts = []
    if not offer.held:
        offer.codes = []
    offer.due = due_when_closed(offer, now)
    return OfferClosed(
        **head, reason=reason, asset=offer.asset, amount=amount, left=left, refund_to=offer.returns_to,
        seed=offer.seed,
        operator=operator, signers=signers, digest=digest,
    )  # fmt: skip


# -- amend ---------------------------------------------------------------------------------------------------


def _amend(state: ShardState, command: Amend, offer: Offer, digest: str, now: int) -> Decided:
    changes = command.changes
    if message := unfit(offer, changes, now):
        return Decided(refused(state, command, Outcome.invalid, now, message=message), [], False)
    if refusal := closed(state, command, offer, now):
        return Decided(refusal, [], False)
    total = offer.terms.total if changes.total is UNSET else changes.total
    added = total - offer.terms.total
    if offer.units_left + added < 0:
        return Decided(
            refused(state, command, Outcome.not_enough_left, now, left=offer.units_left), [], False
        )
    offer.units_left, offer.amount_left = (
        offer.units_left + added,
        offer.amount_left + (0 if offer.is_envelope else added),
    )
    fields = changes.fields()
    if randomness := fields.pop("randomness", None):
        offer.randomness = round_of(randomness).randomness
    offer.terms = msgspec.structs.replace(offer.terms, **fields)
    if changes.opens_at is not UNSET:
        offer.opens_at = changes.opens_at
    if changes.closes_at is not UNSET:
        offer.closes_at = offer.due = changes.closes_at
    event = OfferAmended(
        **head_of(state, offer, command.id, now), changes=msgspec.Raw(msgspec.json.encode(changes)),
        asset=offer.asset,
        source=source_of(offer.asset, getattr(offer.terms, "funding", None), offer.terms.issuer),
        added=max(added, 0),
        removed=max(-added, 0), left=offer.units_left, **_senders(command), digest=digest,
    )  # fmt: skip
    events = [event, *serve(state, offer, command.id, now)]
    answer = answer_to(state, command, Outcome.amended, now, left=offer.units_left, seq=event.seq)
    return Decided(answer, events)


def unfit(offer: Offer, changes: Changes, now: int) -> str | None:
    """Why this offer can never take these changes at this time, or None."""
    fields = changes.fields()
    if offer.is_envelope and not fields.keys() <= ENVELOPE_CHANGES:
        return "changes: the money, parts and law of an envelope cannot change"
    if message := _unfit_randomness(offer, changes, now):
        return message
    if changes.opens_at is not UNSET and now >= offer.opens_at:
        return "changes.opens_at: the offer is already open"
    opens_at, closes_at = fields.get("opens_at", offer.opens_at), fields.get("closes_at", offer.closes_at)
    if closes_at <= max(opens_at, now) and fields.keys() & {"opens_at", "closes_at"}:
        return "changes.closes_at: must be after opens_at and after now"
    if offer.is_envelope:
        return None
    terms = offer.pieces
    if changes.total is not UNSET and "codes" in offer.chunks:
        return "changes.total: the total of an offer with codes cannot change"
    gets_codes = "codes" in offer.chunks or getattr(terms, "codes", False)
    if gets_codes and fields.get("max_per_grab", 0) > CODES_PER_GRAB_MAX:
        return f"changes.max_per_grab: {WITH_CODES}"
    if changes.price is not UNSET and terms.currency is None:
        return "changes.price: the offer has no currency"
    if terms.hold_ms is None and fields.keys() & {"hold_ms", "extensions", "late", "grace_ms"}:
        return "changes.hold_ms: an offer that grants at once cannot get holds"
    if (fields.get("late", terms.late) == "grace") != (fields.get("grace_ms", terms.grace_ms) > 0):
        return "changes.grace_ms: is required with late: grace, and only with it"
    if (fields.get("price", terms.price) or 0) * fields.get("max_per_grab", terms.max_per_grab) > AMOUNT_MAX:
        return "changes.price: price × max_per_grab is too large"
    return None


def _unfit_randomness(offer: Offer, changes: Changes, now: int) -> str | None:
    if changes.randomness is UNSET:
        return None
    if offer.beacon is None:
        return "changes.randomness: the offer does not await a beacon"
    if offer.randomness is not None:
        return "changes.randomness: was already given"
    if now < offer.beacon.at:
        return "changes.randomness: the round is not due yet"
    if round_of(changes.randomness).number != offer.beacon.number:
        return f"changes.randomness: the offer awaits round {offer.beacon.number}"
    return None


# -- load, adjust --------------------------------------------------------------------------------------------


def _load(state: ShardState, command: Load, offer: Offer, digest: str, now: int) -> Decided:
    what, known = command.what, offer.chunks.get(command.what)
    if message := _unloadable(offer, command):
        return Decided(refused(state, command, Outcome.invalid, now, message=message), [], False)
    if f"{what}/{command.chunk}" in offer.seen:
        return Decided(refused(state, command, Outcome.conflict, now), [], False)
    complete = known is not None and offer.loaded[what] == known
    awaited = what == "codes" and offer.awaits_codes
    if offer.closed_reason or (now >= offer.opens_at and (complete or (known is None and not awaited))):
        return Decided(refused(state, command, Outcome.over, now), [], False)
    offer.seen.add(f"{what}/{command.chunk}")
    offer.chunks[what] = command.chunks
    offer.loaded[what] = offer.loaded.get(what, 0) + 1
    if what == "codes":
        offer.codes += command.items
        offer.codes_listed += len(command.items)
    else:
        offer.audience.update(command.items)
    count = offer.codes_listed if what == "codes" else len(offer.audience)
    event = OfferLoaded(
        **head_of(state, offer, command.id, now), what=what, chunk=command.chunk, chunks=command.chunks,
        count=count,
        items=command.items, **_senders(command), digest=digest,
    )  # fmt: skip
    return Decided(
        answered(state, command, Outcome.loaded, now, quantity=count, left=offer.units_left), [event]
    )


def _unloadable(offer: Offer, command: Load) -> str | None:
    known = offer.chunks.get(command.what)
    if command.what == "codes" and offer.terms.__struct_config__.tag != "coupon":
        return "what: only coupons have codes"
    if command.what == "codes" and offer.pieces.max_per_grab > CODES_PER_GRAB_MAX:
        return f"what: max_per_grab must be {WITH_CODES}"
    if command.what == "audience" and offer.terms.audience != "list":
        return "what: the audience of this offer is not a list"
    if known is not None and known != command.chunks:
        return "chunks: differs from the chunks loaded before"
    if command.what == "codes":
        count = offer.codes_listed + len(command.items)
        last = offer.loaded.get("codes", 0) + 1 == command.chunks
        if f"codes/{command.chunk}" in offer.seen:
            return None
        if count > offer.terms.total or (last and count != offer.terms.total):
            return "items: there must be as many codes as units"
        # Until the list is complete, no code is handed out, so `offer.codes` is the whole list.
        known_codes = set(offer.codes)
        for number, code in enumerate(command.items, 1):
            if code in known_codes:
                return f"items: code {number} of this chunk is in the list already; each is given once"
    return None


def _adjust(state: ShardState, command: Adjust, offer: Offer, digest: str, now: int) -> Decided:
    transfers = tuple(BookedEntry(*msgspec.structs.astuple(entry)) for entry in command.transfers)
    event = LedgerAdjusted(
        **head_of(state, offer, command.id, now), transfers=transfers, reason=command.reason,
        approved_by=command.approved_by,
        **_senders(command), digest=digest,
    )  # fmt: skip
    return Decided(answered(state, command, Outcome.adjusted, now, left=offer.units_left), [event])


# -- time ----------------------------------------------------------------------------------------------------


def fall_due(state: ShardState, offer: Offer, now: int) -> list[AnyEvent]:
    """Handles what is due for an offer: serves or removes queued grabs, closes it, or retires it."""
    if not offer.closed_reason:
        if now >= offer.closes_at:
            return [close_offer(state, offer, "deadline", "sweep", None, now)]
        offer.due = offer.closes_at
        return serve(state, offer, "sweep", now)
    if offer.queue:
        events: list[AnyEvent] = [
            leave_queue(state, offer, name, "sweep", None, now) for name in offer.queue[:SERVED_AT_ONCE_MAX]
        ]
        return events
    if offer.held:
        offer.due = now + RETIRE_AGAIN_MS
        return []
    event = OfferRetired(**head_of(state, offer, "sweep", now))
    _retire(state, offer, now)
    return [event]


def _retire(state: ShardState, offer: Offer, now: int) -> None:
    """Removes an offer and the answers that name it, but not its payments. The last offer of a campaign takes
    the campaign's counters, tickets and zone with it.
    """
    del state.offers[offer.name]
    state.retired.add(offer.name)
    state.past[offer.name] = Retirement(offer.offer_seq, now)
    for key in [
        key
        for key, kept in state.answers.items()
        if key[0] == offer.campaign and kept.answer.offer == offer.name
    ]:
        del state.answers[key]
    if not any(other.campaign == offer.campaign for other in state.offers.values()):
        for counter in [counter for counter in state.counters if counter[0] == offer.campaign]:
            del state.counters[counter]
        for ticket in [ticket for ticket in state.tickets if ticket[0] == offer.campaign]:
            del state.tickets[ticket]
        del state.zones[offer.campaign]


_DECIDE: dict[type, Any] = {
    Pause: _pause,
    Resume: _resume,
    Close: _close,
    Amend: _amend,
    Load: _load,
    Adjust: _adjust,
}
