"""Grabs: the refusals in order of precedence, and how units are granted, held or put on the waiting list."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from grabstream.models.answers import Answer
from grabstream.models.beacon import mixed
from grabstream.models.bounds import BASKET_GRABS_MAX, CODES_PER_GRAB_MAX
from grabstream.models.calendar import opens_next
from grabstream.models.commands import Grab, carried_by
from grabstream.models.events import AnyEvent, GrabGranted, GrabHeld, GrabQueued, GrabReleased
from grabstream.models.money import AMOUNT_MAX
from grabstream.models.offers import WITH_CODES, CouponTerms, EnvelopeTerms
from grabstream.models.outcomes import Outcome
from grabstream.models.rules import limits
from grabstream.models.rules.state import (
    CountedUnits,
    Decided,
    Drawn,
    Offer,
    Part,
    PieceGrab,
    ShardState,
    Status,
    answered,
    due_when_closed,
    head_of,
    refused,
)
from grabstream.models.splitting import next_part

#: How many queued grabs one command or one sweep of an offer serves, or removes after the close.
SERVED_AT_ONCE_MAX = 25
#: How many grabs at the front of the queue are considered when units are left.
CONSIDERED_MAX = 100
#: How many used tickets of a campaign that have ended are forgotten when another ticket is used.
TICKETS_FORGOTTEN = 2

Refusal = Callable[[ShardState, Grab, Offer, int, Drawn], Answer | None]


def unfit(offer: Offer, command: Grab) -> str | None:
    """Why this offer can never grant this grab, or None."""
    if isinstance(offer.terms, EnvelopeTerms):
        if command.basket is not None:
            return "basket: an envelope cannot be in a basket"
        return None if command.quantity == 1 else "quantity: an envelope has one part per user"
    if command.quantity > offer.terms.max_per_grab:
        return f"quantity: above max_per_grab, which is {offer.terms.max_per_grab}"
    if command.quantity > CODES_PER_GRAB_MAX and "codes" in offer.chunks:
        return f"quantity: {WITH_CODES}"
    if offer.terms.take == "all" and command.quantity > offer.terms.total:
        return f"quantity: above the total of the offer, {offer.terms.total}"
    if command.quantity * (offer.terms.price or 0) > AMOUNT_MAX:
        return f"quantity: price × quantity is above {AMOUNT_MAX}"
    missing = [limit.by for limit in offer.terms.limits if limits.value_of(limit, command) is None]
    return f"attributes: a limit counts by {missing[0]}" if missing else None


def unfit_basket(offers: Mapping[str, Offer], commands: Sequence[Grab]) -> str | None:
    """Why these grabs can never be decided as one basket, or None."""
    if len(commands) > BASKET_GRABS_MAX:
        return f"basket: at most {BASKET_GRABS_MAX} grabs, this has {len(commands)}"
    codes = sum(
        command.quantity
        for command in commands
        if (offer := offers.get(command.offer)) and _gives_codes(offer)
    )
    return (
        f"basket: its grabs get at most {CODES_PER_GRAB_MAX} codes together"
        if codes > CODES_PER_GRAB_MAX
        else None
    )


def _gives_codes(offer: Offer) -> bool:
    return isinstance(offer.terms, CouponTerms) and offer.terms.hold_ms is None and "codes" in offer.chunks


def _already_taken(state: ShardState, command: Grab, offer: Offer, now: int, drawn: Drawn) -> Answer | None:
    part = offer.users.get(command.user)
    return None if part is None else with_part(refused(state, command, Outcome.already_taken, now), part)


def refusal_of_offer(offer: Offer, now: int) -> tuple[Outcome, int | None] | None:
    """Why every grab of an offer is refused now, for any sender, and until when if that is known; None if
    user, limits and units decide. Queued grabs are not served either while there is such a reason.
    """
    if now < offer.opens_at:
        return Outcome.not_open_yet, offer.opens_at
    over = offer.closed_reason or now >= offer.closes_at
    if not over:
        opens = opens_next(offer.hours, offer.offsets, now)
        if opens is not None:
            return Outcome.not_open_yet, opens
        if _is_incomplete(offer):
            return Outcome.not_open_yet, None
    if offer.paused:
        return Outcome.on_hold, None
    # A drained envelope is also closed, but its outcome is `sold_out` (docs/commands.md).
    if offer.closed_reason == "drained":
        return Outcome.sold_out, None
    return (Outcome.over, None) if over else None


def _is_incomplete(offer: Offer) -> bool:
    awaits_beacon = offer.beacon is not None and offer.randomness is None
    return (
        offer.awaits_codes
        or awaits_beacon
        or any(offer.loaded[what] < chunks for what, chunks in offer.chunks.items())
    )


def _by_offer(state: ShardState, command: Grab, offer: Offer, now: int, drawn: Drawn) -> Answer | None:
    refusal = refusal_of_offer(offer, now)
    return refusal and refused(state, command, refusal[0], now, retry_at=refusal[1])


def _not_eligible(state: ShardState, command: Grab, offer: Offer, now: int, drawn: Drawn) -> Answer | None:
    if offer.terms.audience == "list":
        eligible = command.user in offer.audience
    elif offer.terms.audience == "ticket":
        eligible = now < drawn.get("ticket_expires_at", 0) and not _is_used(state, offer, now, drawn)
    else:
        eligible = True
    return None if eligible else refused(state, command, Outcome.not_eligible, now)


def _is_used(state: ShardState, offer: Offer, now: int, drawn: Drawn) -> bool:
    """Whether a single-use ticket was used: for its offer, or in its campaign if it is good for the whole
    campaign. The campaign remembers it until it ends.
    """
    once = drawn["ticket_once"]
    if "ticket_ends_at" not in drawn:
        return f"ticket/{once}" in offer.seen
    return state.tickets.get((offer.campaign, once), 0) > now


def _limit_reached(state: ShardState, command: Grab, offer: Offer, now: int, drawn: Drawn) -> Answer | None:
    if offer.is_envelope:
        return None
    wanted = command.quantity if offer.pieces.take == "all" else 1
    counters = limits.counters_of(offer, command, now)
    for limit in limits.states_of(offer, limits.counts_of(state, offer, counters), now):
        if limit.left < wanted:
            return refused(state, command, Outcome.limit_reached, now, limit=limit, retry_at=limit.resets_at)
    return None


def _sold_out(state: ShardState, command: Grab, offer: Offer, now: int, drawn: Drawn) -> Answer | None:
    if offer.is_envelope or available(offer) or may_wait(offer, command):
        return None
    return refused(state, command, Outcome.sold_out, now)


def _not_enough_left(state: ShardState, command: Grab, offer: Offer, now: int, drawn: Drawn) -> Answer | None:
    if (
        offer.is_envelope
        or offer.pieces.take == "up_to"
        or command.quantity <= available(offer)
        or may_wait(offer, command)
    ):
        return None
    return refused(state, command, Outcome.not_enough_left, now, left=available(offer))


REFUSALS: list[Refusal] = [
    _already_taken, _by_offer, _not_eligible, _limit_reached, _sold_out, _not_enough_left,
]  # fmt: skip


def available(offer: Offer) -> int:
    """The units that a new grab can take: those left, or 0 while they suffice for one of the first
    CONSIDERED_MAX grabs in the queue.
    """
    waiting = (offer.grabs[name] for name in offer.queue[:CONSIDERED_MAX])
    return 0 if any(_units_for(offer, grab) for grab in waiting) else offer.units_left


def _units_for(offer: Offer, grab: PieceGrab) -> int:
    """The units that a waiting grab gets of those left; 0 if they do not suffice, or would cost more than
    AMOUNT_MAX.
    """
    price = offer.pieces.price or 0
    payable = AMOUNT_MAX // price if price else AMOUNT_MAX
    if offer.pieces.take == "up_to":
        return min(grab.quantity, offer.units_left, payable)
    return grab.quantity if grab.quantity <= min(offer.units_left, payable) else 0


def may_wait(offer: Offer, command: Grab) -> bool:
    """Whether the grab joins the waiting list if it cannot be served."""
    return command.wait and offer.pieces.waiting_list


def with_part(answer: Answer, part: Part) -> Answer:
    """The answer with the part that the user has."""
    return msgspec.structs.replace(answer, amount=part.amount, quantity=1, place=part.place, seq=part.seq)


# -- execution ->-------------------------------------------------------------------------------------------


def draw_part(
    state: ShardState, command: Grab, offer: Offer, digest: str, now: int, drawn: Drawn
) -> tuple[Answer, list[AnyEvent]]:  # fmt: skip
    """Grants the next part of an envelope."""
    terms, place = offer.terms, offer.places + 1
    assert isinstance(terms, EnvelopeTerms)
    assert offer.seed
    if offer.parts:
        amount = offer.parts[offer.places]
    else:
        source = mixed(offer.seed, offer.randomness)
        amount = next_part(
            terms.law, offer.amount_left, offer.units_left, terms.min, offer.max_part, source, place
        )
    offer.places, offer.units_left, offer.amount_left = (
        place,
        offer.units_left - 1,
        offer.amount_left - amount,
    )
    event = GrabGranted(
        **head_of(state, offer, command.id, now), grab=command.id, user=command.user, quantity=1,
        amount=amount, asset=terms.asset,
        place=place, left=offer.units_left, attributes=command.attributes, **carried_by(command),
        **use_ticket(state, offer, now, drawn), digest=digest,
    )  # fmt: skip
    offer.users[command.user] = Part(place, amount, event.seq)
    answer = answered(
        state,
        command,
        Outcome.granted,
        now,
        grab=command.id,
        amount=amount,
        quantity=1,
        place=place,
        left=offer.units_left,
    )
    return answer, [event]


def use_ticket(state: ShardState, offer: Offer, now: int, drawn: Drawn) -> dict[str, Any]:
    """Marks a single-use ticket as used; returns the fields of the event about it. For a ticket of a
    campaign, it also forgets up to TICKETS_FORGOTTEN tickets of the campaign that have ended.
    """
    if offer.terms.audience != "ticket" or not drawn["ticket_once"]:
        return {}
    once, ends_at = drawn["ticket_once"], drawn.get("ticket_ends_at")
    if ends_at is None:
        offer.seen.add(f"ticket/{once}")
        return {"ticket": once}
    ended = sorted(
        (ends, name)
        for (campaign, name), ends in state.tickets.items()
        if campaign == offer.campaign and ends <= now
    )
    for _, name in ended[:TICKETS_FORGOTTEN]:
        del state.tickets[offer.campaign, name]
    state.tickets[offer.campaign, once] = ends_at
    return {"ticket": once, "ticket_ends_at": ends_at}


def take_pieces(
    state: ShardState, command: Grab, offer: Offer, digest: str, now: int, drawn: Drawn
) -> Decided:
    """Grants or holds units, or puts the grab on the waiting list."""
    terms = offer.pieces
    counters = limits.counters_of(offer, command, now)
    wanted = command.quantity
    if terms.take == "up_to":
        lefts = [
            limit.left for limit in limits.states_of(offer, limits.counts_of(state, offer, counters), now)
        ]
        wanted = min([wanted, *lefts])
    waits = available(offer) < (1 if terms.take == "up_to" else wanted)
    quantity = wanted if waits else min(wanted, available(offer))
    limits.count(state, offer, counters, quantity)
    ticket = use_ticket(state, offer, now, drawn)
    grab = PieceGrab(
        command.user, 0, quantity, under=counters, counted=[CountedUnits(quantity, tuple(counters))],
        basket=command.basket,
    )  # fmt: skip
    offer.grabs[command.id] = grab
    if waits:
        return _queue(state, command, offer, grab, digest, now, ticket)
    offer.places += 1
    grab.place, grab.price = offer.places, terms.price or 0
    _move_out(offer, quantity)
    common: dict[str, Any] = {
        "grab": command.id, "user": command.user, "quantity": quantity, "amount": quantity,
        "asset": offer.asset, "place": grab.place,
        "left": offer.units_left, "asked": command.quantity if command.quantity != quantity else None,
        "attributes": command.attributes, **carried_by(command), **ticket,
        "basket": command.basket, "digest": digest,
    }  # fmt: skip
    states = limits.states_of(offer, limits.counts_of(state, offer, counters), now)
    details = {
        "grab": command.id,
        "amount": quantity,
        "quantity": quantity,
        "place": grab.place,
        "left": offer.units_left,
        "limits": states,
    }
    if terms.hold_ms is None:
        grab.taken = quantity
        codes = hand_out(offer, grab, quantity)
        event: AnyEvent = GrabGranted(**head_of(state, offer, command.id, now), **common, codes=codes)
        details |= coupon_fields(offer, grab, codes)
        return Decided(answered(state, command, Outcome.granted, now, **details), [event])
    begin_hold(offer, grab, quantity, now)
    event = GrabHeld(**head_of(state, offer, command.id, now), **common, **hold_of(offer, grab))
    return Decided(answered(state, command, Outcome.held, now, **details, **hold_of(offer, grab)), [event])


def _queue(
    state: ShardState,
    command: Grab,
    offer: Offer,
    grab: PieceGrab,
    digest: str,
    now: int,
    ticket: dict[str, Any],
) -> Decided:
    offer.queued += 1
    grab.place, grab.status, grab.carried = offer.queued, Status.waiting, carried_by(command)
    offer.queue.append(command.id)
    event = GrabQueued(
        **head_of(state, offer, command.id, now), grab=command.id, user=command.user, quantity=grab.quantity,
        amount=0,
        asset=offer.asset, place=grab.place, left=offer.units_left, attributes=command.attributes,
        **grab.carried, **ticket, digest=digest,
    )  # fmt: skip
    states = limits.states_of(offer, limits.counts_of(state, offer, grab.under), now)
    return Decided(
        answered(
            state, command, Outcome.waiting, now, grab=command.id, amount=0, quantity=grab.quantity,
            place=grab.place,
            left=offer.units_left, limits=states,
        ), [event],
    )  # fmt: skip


def _move_out(offer: Offer, quantity: int) -> None:
    offer.units_left -= quantity
    offer.amount_left -= quantity


def begin_hold(offer: Offer, grab: PieceGrab, quantity: int, now: int) -> None:
    """Holds the units for the grab until its new deadline."""
    grab.held, grab.deadline, grab.grace = quantity, now + (offer.pieces.hold_ms or 0), offer.pieces.grace_ms
    offer.held += quantity


def hold_of(offer: Offer, grab: PieceGrab) -> dict[str, Any]:
    """The fields of a hold in events and answers: its deadline, and the amount due."""
    fields: dict[str, Any] = {"deadline_at": grab.deadline}
    if offer.pieces.currency is not None:
        fields |= {"due": grab.price * grab.held, "currency": offer.pieces.currency}
    return fields


def hand_out(offer: Offer, grab: PieceGrab, quantity: int) -> tuple[str, ...]:
    """Takes the next codes of the offer for the grab, and returns them; empty if the offer has no codes."""
    if "codes" not in offer.chunks:
        return ()
    codes, offer.codes = offer.codes[:quantity], offer.codes[quantity:]
    grab.codes += codes
    return tuple(codes)


def coupon_fields(offer: Offer, grab: PieceGrab, codes: tuple[str, ...]) -> dict[str, Any]:
    """The fields of an answer about coupons: the codes, or the place of the grab instead of a code."""
    if offer.terms.__struct_config__.tag != "coupon":
        return {}
    return (
        {"coupon_code": codes[0], "coupon_codes": codes[1:] and codes}
        if codes
        else {"coupon_code": str(grab.place)}
    )


def serve(state: ShardState, offer: Offer, command: str, now: int) -> list[AnyEvent]:
    """Holds the units left for queued grabs, in order, for at most SERVED_AT_ONCE_MAX grabs; for none while
    all new grabs are refused. Afterwards, the offer is due as `due_when_open` says.

    The first CONSIDERED_MAX grabs are considered. A grab for which the units do not suffice stays in the
    queue.
    """
    terms, events, index = offer.terms, list[AnyEvent](), 0
    if isinstance(terms, EnvelopeTerms) or offer.closed_reason or now >= offer.closes_at:
        return events
    if refusal := refusal_of_offer(offer, now):
        offer.due = due_when_open(offer, now, refusal)
        return events
    while offer.units_left and index < min(len(offer.queue), CONSIDERED_MAX):
        grab = offer.grabs[offer.queue[index]]
        quantity = _units_for(offer, grab)
        if not quantity:
            index += 1
            continue
        if len(events) == SERVED_AT_ONCE_MAX:
            break
        name = offer.queue.pop(index)
        limits.give_back(state, offer, grab, grab.quantity - quantity)
        asked, carried = grab.quantity, grab.carried
        grab.carried = {}
        offer.places += 1
        grab.place, grab.quantity, grab.price, grab.status = (
            offer.places,
            quantity,
            terms.price or 0,
            Status.active,
        )
        _move_out(offer, quantity)
        begin_hold(offer, grab, quantity, now)
        events.append(
            GrabHeld(
                **head_of(state, offer, command, now),
                grab=name,
                user=grab.user,
                quantity=quantity,
                amount=quantity,
                asset=offer.asset,
                place=grab.place,
                left=offer.units_left,
                asked=asked if asked != quantity else None,
                waited=True,
                **carried,
                **hold_of(offer, grab),
            )
        )
    offer.due = due_when_open(offer, now, None)
    return events


def due_when_open(offer: Offer, now: int, refusal: tuple[Outcome, int | None] | None) -> int:
    """When the sweeper must handle an open offer. If units are left for queued grabs: now or, while all new
    grabs are refused (`refusal`), at the next opening; a paused offer serves them when it is resumed. Else
    when the offer closes.
    """
    if offer.paused or available(offer) == offer.units_left:
        return offer.closes_at
    due = now if refusal is None else refusal[1]
    return offer.closes_at if due is None else min(due, offer.closes_at)


def about(offer: Offer, name: str, grab: PieceGrab, quantity: int) -> dict[str, Any]:
    """The fields of every event about a grab in addition to those of `head_of`."""
    return {
        "grab": name, "user": grab.user, "quantity": quantity, "amount": quantity, "asset": offer.asset,
        "place": grab.place,
        "left": offer.units_left,
    }  # fmt: skip


def leave_queue(
    state: ShardState, offer: Offer, name: str, command: str, digest: str | None, now: int
) -> GrabReleased:
    """Removes a grab from the queue and gives its limits back."""
    grab = offer.grabs[name]
    offer.queue.remove(name)
    limits.give_back(state, offer, grab, grab.quantity)
    grab.status, grab.carried = Status.released, {}
    if offer.closed_reason:
        offer.due = due_when_closed(offer, now)
    event = GrabReleased(
        **head_of(state, offer, command, now),
        **about(offer, name, grab, 0),
        reason="left_queue",
        to=offer.returns_to,
        digest=digest,
    )
    grab.ended = (event.seq, now)
    return event
