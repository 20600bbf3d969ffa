"""The commands about one grab of pieces (confirm, release, extend, return, redeem, unredeem), and the end of
holds.

An expired hold is ended by the sweeper or by the next command about the grab, whichever is first, in the same
way.
"""

from typing import Any

from grabstream.models.answers import Answer, LimitState
from grabstream.models.commands import (
    AnyCommand,
    Confirm,
    Extend,
    GrabCommand,
    Redeem,
    Release,
    Return,
    Unredeem,
    is_signed,
)
from grabstream.models.events import (
    AnyEvent,
    GrabConfirmed,
    GrabExtended,
    GrabRedeemed,
    GrabReleased,
    GrabReturned,
    GrabUnredeemed,
    PaymentRefundDue,
)
from grabstream.models.identifiers import campaign_of
from grabstream.models.outcomes import Outcome
from grabstream.models.rules import limits
from grabstream.models.rules.grabbing import (
    about,
    available,
    coupon_fields,
    hand_out,
    leave_queue,
    serve,
)
from grabstream.models.rules.state import (
    CountedUnits,
    Decided,
    Offer,
    OrderUse,
    PieceGrab,
    SettledPayment,
    ShardState,
    Status,
    answer_to,
    answered,
    head_of,
    refused,
)

#: The payments of a grab that were not returned, and the entries of its counted units, at most.
PAYMENTS_MAX = 100
COUNTED_MAX = 100
TOO_MANY_PAYMENTS = f"payment: a grab has at most {PAYMENTS_MAX} payments that were not returned"
TOO_LATE = (
    "the offer retired too long ago, so this payment was not booked: see the view payments, and adjust "
    "what is missing"
)
NEVER_OPENED = (
    "no offer was ever opened under this id, so this payment was not booked: pay it back to its sender"
)
CONFLICT_BOOKED = "payment: this id is recorded with other contents; what exceeds it is to be paid back"
NOT_THEIRS = "this payment was not booked: it is recorded, but not known to be for a grab of this user"
#: The outcomes of payments for which there was no grab, for any sender.
_UNKNOWN = frozenset({Outcome.no_such_grab, Outcome.no_such_offer})


def decide_grab_command(
    state: ShardState, command: GrabCommand, offer: Offer, digest: str, now: int
) -> Decided:
    """Executes a command about a grab, or refuses it."""
    grab = offer.grabs.get(command.grab)
    events = lapse(state, offer, command.grab, now) if grab is not None else []
    if grab is not None and command.user not in (None, grab.user):
        grab = None
    decided = _DECIDE[type(command)](state, command, offer, grab, digest, now)
    return Decided(decided.answer, [*events, *decided.events], bool(decided.events))


def lapse(state: ShardState, offer: Offer, name: str, now: int) -> list[AnyEvent]:
    """Ends an expired hold. Its units return to the offer, and from there to queued grabs."""
    grab = offer.grabs[name]
    if not grab.held or now < grab.lapses_at:
        return []
    grab.lapsed = grab.held
    return _give_up(state, offer, name, Status.expired, "expired", "sweep", None, now)


def _give_up(
    state: ShardState,
    offer: Offer,
    name: str,
    status: Status,
    reason: Any,
    command: str,
    digest: str | None,
    now: int,
) -> list[AnyEvent]:
    grab = offer.grabs[name]
    quantity, grab.held, grab.status = grab.held, 0, status
    offer.held -= quantity
    _drop_codes(offer)
    limits.give_back(state, offer, grab, quantity)
    to = _take_back(offer, quantity)
    event = GrabReleased(
        **head_of(state, offer, command, now),
        **about(offer, name, grab, quantity),
        reason=reason,
        to=to,
        digest=digest,
    )
    grab.ended = (event.seq, now)
    return [event, *serve(state, offer, command, now)]


def _take_back(offer: Offer, quantity: int, without_codes: bool = False) -> str:
    """Returns units to the offer while it is open. Units that come back without their codes, since a user has
    seen them, are in its account until it closes, but they cannot be taken. Returns the account that gets the
    units.
    """
    if not offer.closed_reason:
        offer.amount_left += quantity
        offer.units_left += 0 if without_codes else quantity
    return offer.returns_to


def _drop_codes(offer: Offer) -> None:
    """Drops the codes of a closed offer once it has no holds that can still be paid."""
    if offer.closed_reason and not offer.held:
        offer.codes = []


def _details(command: GrabCommand, offer: Offer, grab: PieceGrab, quantity: int) -> dict[str, Any]:
    return {
        "grab": command.grab,
        "amount": quantity,
        "quantity": quantity,
        "place": grab.place,
        "left": offer.units_left,
    }


def _again(
    state: ShardState, command: GrabCommand, outcome: Outcome, seq_at: tuple[int, int], **rest: Any
) -> Decided:
    """The answer to a command whose effect already holds: it names the event that had this effect."""
    seq, at = seq_at
    answer = answer_to(state, command, outcome, at, grab=command.grab, repeated=True, seq=seq, **rest)
    return Decided(answer, [], False)


def _refuse(state: ShardState, command: GrabCommand, outcome: Outcome, now: int, **rest: Any) -> Decided:
    return Decided(refused(state, command, outcome, now, **rest), [], False)


def decide_without_offer(state: ShardState, command: AnyCommand, digest: str, now: int) -> Decided:
    """Decides a command whose offer does not exist or has retired. Payments of a retired offer are known for
    a time; another payment in this time must be refunded.
    """
    if isinstance(command, Confirm):
        # It is not known any more whose grab it was: a receipt vouches for its user.
        is_doubtful = command.user is not None and not is_signed(command)
        refused_as = Outcome.no_such_offer if is_doubtful else None
        if known := _repeated_payment(state, command, None, None, digest, now, refused_as):
            return known
        if _is_known_past(state, command.offer, now):
            return _unserved(state, command, None, None, Outcome.no_such_offer, digest, now)
        if command.paid:
            return _refuse(
                state,
                command,
                Outcome.no_such_offer,
                now,
                message=TOO_LATE if command.offer in state.past else NEVER_OPENED,
            )
    return Decided(refused(state, command, Outcome.no_such_offer, now), [], False)


# -- confirm -------------------------------------------------------------------------------------------------


def _confirm(
    state: ShardState, command: Confirm, offer: Offer, grab: PieceGrab | None, digest: str, now: int
) -> Decided:
    refused_as = Outcome.no_such_grab if command.user is not None and grab is None else None
    if known := _repeated_payment(state, command, offer, grab, digest, now, refused_as):
        return known
    if grab is None:
        return _unserved(state, command, offer, None, Outcome.no_such_grab, digest, now)
    base = grab.held or grab.lapsed
    if not base:
        if command.payment is None and grab.taken and grab.confirmed[0]:
            return _again(state, command, Outcome.confirmed, grab.confirmed)
        return _unserved(state, command, offer, grab, Outcome.not_held, digest, now)
    quantity = command.quantity or base
    currency = offer.pieces.currency
    if command.paid != grab.price * quantity or (command.paid and command.currency != currency):
        return _unserved(
            state, command, offer, grab, Outcome.invalid, digest, now, message="paid: is not the amount due"
        )
    if command.payment is not None and len(grab.payments) >= PAYMENTS_MAX:
        limit = LimitState("payment", "offer", PAYMENTS_MAX, 0)
        return _unserved(
            state,
            command,
            offer,
            grab,
            Outcome.limit_reached,
            digest,
            now,
            message=TOO_MANY_PAYMENTS,
            limit=limit,
        )
    if quantity > base:
        return _unserved(state, command, offer, grab, Outcome.not_enough_left, digest, now, left=base)
    if not grab.held and not _retake(state, offer, grab, quantity, now):
        return _unserved(state, command, offer, grab, Outcome.expired, digest, now)
    return _confirmed(state, command, offer, grab, quantity, digest, now)


def _repeated_payment(
    state: ShardState,
    command: Confirm,
    offer: Offer | None,
    grab: PieceGrab | None,
    digest: str,
    now: int,
    refused_as: Outcome | None,
) -> Decided | None:
    """The answer to a payment that is already known, or None: its first result for the same grab and money,
    else a conflict. It is not known for other grabs of the basket that it settles. Where the command names a
    user, and the grab is not known to be theirs (`refused_as`), it reveals nothing about the payment, apart
    from that it found no grab before; a receipt that names another user is a conflict.
    """
    if command.payment is None:
        return None
    known, basket = _known_payment(state, command.offer, command.payment, now), grab and grab.basket
    if known is not None and (known.offer, known.grab) == (command.offer, command.grab):
        here: SettledPayment | None = known
    else:
        is_looked_up = known is not None or basket is not None
        here = _known_payment(state, command.offer, _part_field(command), now) if is_looked_up else None
    if here is None and (known is None or (known.basket and known.basket == basket)):
        return None
    is_same = here is not None and _is_same(command, here)
    is_foreign = refused_as is not None and not (is_same and here is not None and here.code in _UNKNOWN)
    if refused_as is not None and is_foreign and not is_signed(command):
        return _refuse(state, command, refused_as, now, message=NOT_THEIRS)
    if here is None or is_foreign or not is_same:
        return _refuse_known(state, command, offer, here, digest, now)
    return _again(state, command, Outcome(here.code), (here.seq, here.at), quantity=here.quantity or None)


def _is_same(command: Confirm, known: SettledPayment) -> bool:
    other_quantity = command.quantity is not None and known.quantity and command.quantity != known.quantity
    return _money_of(command) == (known.paid, known.currency) and not other_quantity


def _known_payment(state: ShardState, offer: str, field: str, now: int) -> SettledPayment | None:
    known = state.payments.get((campaign_of(offer), field))
    return known if known is not None and state.knows_payments_of(known.offer, now) else None


def _refuse_known(
    state: ShardState,
    command: Confirm,
    offer: Offer | None,
    here: SettledPayment | None,
    digest: str,
    now: int,
) -> Decided:
    """Refuses a payment whose id is recorded for something else; `here` is its record for this grab. What a
    receipt says that came beyond what is recorded for the grab is to be paid back. Without a receipt, nothing
    is booked: the caller may be wrong. Nor is it for an offer that is not known (any more).
    """
    rest = {} if here is None else {"message": _conflict_message(here)}
    if not command.paid:
        return _refuse(state, command, Outcome.conflict, now, **rest)
    booked = _known_payment(state, command.offer, _conflict_field(command), now)
    total = recorded_sum(state, command, now)
    if booked is not None and command.paid == total:
        return _again(state, command, Outcome.conflict, (booked.seq, booked.at))
    can_be_booked = offer is not None or _is_known_past(state, command.offer, now)
    if not is_signed(command) or not can_be_booked or command.paid <= total:
        return _refuse(state, command, Outcome.conflict, now, **rest)
    event = _refund_due(state, command, offer, None, Outcome.conflict, command.paid - total, digest, now)
    state.payments[campaign_of(command.offer), _conflict_field(command)] = SettledPayment(
        command.offer, command.grab, int(Outcome.conflict), event.seq, now, 0,
        event.amount + (booked.paid if booked is not None else 0), event.asset,
    )  # fmt: skip
    answer = refused(state, command, Outcome.conflict, now, seq=event.seq, message=CONFLICT_BOOKED)
    return Decided(answer, [event])


def recorded_sum(state: ShardState, command: Confirm, now: int) -> int:
    """The recorded sum of a payment for the grab of a command, in its currency (minor units)."""
    fields = (command.payment or "", _part_field(command), _conflict_field(command))
    known = {_known_payment(state, command.offer, field, now) for field in fields}
    # The newest part of a basket occurs twice.
    return sum(
        one.paid
        for one in known
        if one is not None
        and (one.offer, one.grab, one.currency) == (command.offer, command.grab, command.currency)
    )


def _keep_payment(state: ShardState, command: Confirm, payment: SettledPayment) -> None:
    """Records a payment; of a grab of a basket also as that of the grab, since others may follow."""
    campaign = campaign_of(command.offer)
    state.payments[campaign, command.payment or ""] = payment
    if payment.basket:
        state.payments[campaign, _part_field(command)] = payment


def _part_field(command: Confirm) -> str:
    """The key in `payments` of a payment for one grab of a basket. No payment has a newline."""
    return f"{command.payment}\n{command.offer}/{command.grab}"


def _conflict_field(command: Confirm) -> str:
    """The key in `payments` of money of a known payment that came beyond what is recorded."""
    return f"{_part_field(command)}\n{command.currency}"


def _is_known_past(state: ShardState, offer: str, now: int) -> bool:
    """Whether the offer retired recently enough that its payments are known."""
    return offer in state.past and state.knows_payments_of(offer, now)


def _money_of(command: Confirm) -> tuple[int, str]:
    return command.paid, (command.currency or "") if command.paid else ""


def _conflict_message(known: SettledPayment) -> str:
    money = f"{known.paid} {known.currency}" if known.paid else "nothing paid"
    units = f" for {known.quantity} unit{'s' * (known.quantity > 1)}" if known.quantity else ""
    return (
        f"payment: this id is recorded with {money}{units}; this payment was not booked: another payment "
        "needs another id"
    )


def _retake(state: ShardState, offer: Offer, grab: PieceGrab, quantity: int, now: int) -> bool:
    """Takes units again for a payment after the deadline, if the offer allows it. Returns whether it did."""
    if (
        offer.pieces.late != "retake"
        or offer.closed_reason
        or now >= offer.closes_at
        or quantity > available(offer)
    ):
        return False
    counters = limits.counters_now(offer, grab, now)
    if any(left < quantity for left in limits.lefts_under(state, offer, counters)):
        return False
    newest = grab.counted[-1] if grab.counted else None
    if newest is not None and newest.under == tuple(counters):
        grab.counted[-1] = CountedUnits(newest.units + quantity, newest.under)
    elif len(grab.counted) >= COUNTED_MAX:
        return False
    else:
        grab.counted.append(CountedUnits(quantity, tuple(counters)))
    offer.units_left -= quantity
    offer.amount_left -= quantity
    limits.count(state, offer, counters, quantity)
    return True


def _confirmed(
    state: ShardState, command: Confirm, offer: Offer, grab: PieceGrab, quantity: int, digest: str, now: int
) -> Decided:
    retaken = not grab.held
    if retaken:
        grab.lapsed -= quantity
    else:
        grab.held -= quantity
        offer.held -= quantity
    grab.taken += quantity
    codes = hand_out(offer, grab, quantity)
    _drop_codes(offer)
    event = GrabConfirmed(
        **head_of(state, offer, command.id, now), **about(offer, command.grab, grab, quantity),
        held=grab.held,
        payment=command.payment, paid=command.paid, currency=command.currency if command.paid else None,
        basket=grab.basket, issuer=offer.terms.issuer,
        retaken=retaken, codes=codes, digest=digest,
    )  # fmt: skip
    grab.confirmed = (event.seq, now)
    if command.payment is not None:
        grab.payments.append((command.payment, quantity))
        payment = SettledPayment(
            offer.name, command.grab, int(Outcome.confirmed), event.seq, now, quantity, *_money_of(command),
            grab.basket or "",
        )  # fmt: skip
        _keep_payment(state, command, payment)
    details = _details(command, offer, grab, quantity) | coupon_fields(offer, grab, codes)
    return Decided(answered(state, command, Outcome.confirmed, now, **details), [event])


def _unserved(
    state: ShardState,
    command: Confirm,
    offer: Offer | None,
    grab: PieceGrab | None,
    outcome: Outcome,
    digest: str,
    now: int,
    **rest: Any,
) -> Decided:
    """Refuses a payment that cannot be served. If money was paid, an event records once that it is to be paid
    back.
    """
    if command.payment is None or not command.paid:
        return _refuse(state, command, outcome, now, **rest)
    event = _refund_due(state, command, offer, grab, outcome, command.paid, digest, now)
    payment = SettledPayment(
        command.offer, command.grab, int(outcome), event.seq, now, 0, *_money_of(command), event.basket or ""
    )
    _keep_payment(state, command, payment)
    message = "; ".join(filter(None, (rest.pop("message", None), "the payment is to be paid back")))
    return Decided(refused(state, command, outcome, now, seq=event.seq, message=message, **rest), [event])


def _refund_due(
    state: ShardState,
    command: Confirm,
    offer: Offer | None,
    grab: PieceGrab | None,
    outcome: Outcome,
    amount: int,
    digest: str,
    now: int,
) -> PaymentRefundDue:
    """The event that money is to be paid back. It names the user of the command or, where the command names
    none, of the grab: several users of an envelope may have grabs of one id.
    """
    assert command.payment is not None
    assert command.currency is not None
    return PaymentRefundDue(
        **(head_of(state, offer, command.id, now) if offer else _head_of_retired(state, command, now)),
        grab=command.grab,
        user=command.user if command.user is not None or grab is None else grab.user,
        payment=command.payment,
        amount=amount,
        asset=command.currency,
        basket=None if grab is None else grab.basket,
        outcome=outcome.name,
        digest=digest,
    )


def _head_of_retired(state: ShardState, command: Confirm, now: int) -> dict[str, Any]:
    """The fields that every event has, for a retired offer: its `offer_seq` continues after the last one."""
    retired = state.past[command.offer]
    state.seq += 1
    state.time = now
    state.past[command.offer] = retired._replace(offer_seq=retired.offer_seq + 1)
    return {
        "v": 1, "shard": state.shard, "seq": state.seq, "offer_seq": retired.offer_seq + 1,
        "offer": command.offer, "at": now,
        "command": command.id,
    }  # fmt: skip


# -- release, extend, return ---------------------------------------------------------------------------------


def _release(
    state: ShardState, command: Release, offer: Offer, grab: PieceGrab | None, digest: str, now: int
) -> Decided:
    if grab is None:
        return _refuse(state, command, Outcome.no_such_grab, now)
    if grab.status == Status.waiting:
        event = leave_queue(state, offer, command.grab, command.id, digest, now)
        events = [event, *serve(state, offer, command.id, now)]
        return Decided(
            _answer_with(state, command, Outcome.released, event, _details(command, offer, grab, 0)), events
        )
    if grab.held:
        quantity = grab.held
        events = _give_up(state, offer, command.grab, Status.released, "command", command.id, digest, now)
        details = _details(command, offer, grab, quantity)
        answer = _answer_with(state, command, Outcome.released, events[0], details)
        return Decided(answer, events)
    if grab.status == Status.released:
        return _again(state, command, Outcome.released, grab.ended)
    return _refuse(
        state, command, Outcome.expired if grab.status == Status.expired else Outcome.not_held, now
    )


def _extend(
    state: ShardState, command: Extend, offer: Offer, grab: PieceGrab | None, digest: str, now: int
) -> Decided:
    if grab is None:
        return _refuse(state, command, Outcome.no_such_grab, now)
    terms = offer.pieces
    if not grab.held:
        return _refuse(
            state, command, Outcome.expired if grab.status == Status.expired else Outcome.not_held, now
        )
    if grab.extensions >= terms.extensions:
        limit = LimitState("grab", "offer", terms.extensions, 0)
        return _refuse(state, command, Outcome.limit_reached, now, limit=limit)
    grab.extensions += 1
    grab.deadline += terms.hold_ms or 0
    event = GrabExtended(
        **head_of(state, offer, command.id, now),
        **about(offer, command.grab, grab, grab.held),
        deadline_at=grab.deadline,
        digest=digest,
    )
    details = _details(command, offer, grab, grab.held) | {"deadline_at": grab.deadline}
    return Decided(answered(state, command, Outcome.extended, now, **details), [event])


def _return(
    state: ShardState, command: Return, offer: Offer, grab: PieceGrab | None, digest: str, now: int
) -> Decided:
    if grab is None:
        return _refuse(state, command, Outcome.no_such_grab, now)
    free = grab.taken - grab.redeemed
    quantity = command.quantity or free
    if not grab.taken:
        return _refuse(state, command, Outcome.not_held, now)
    if not 0 < quantity <= free:
        return _refuse(state, command, Outcome.not_enough_left, now, left=free)
    grab.taken -= quantity
    refunds = _refunds(grab, quantity)
    kept = len(grab.codes) - quantity if grab.codes else 0
    grab.codes, voided_codes = grab.codes[:kept], tuple(grab.codes[kept:])
    if offer.pieces.return_restores:
        limits.give_back(state, offer, grab, quantity)
    to = _take_back(offer, quantity, bool(voided_codes))
    event = GrabReturned(
        **head_of(state, offer, command.id, now), **about(offer, command.grab, grab, quantity),
        reason=command.reason, to=to,
        refunds=refunds, currency=offer.pieces.currency if refunds else None, issuer=offer.terms.issuer,
        restored=offer.pieces.return_restores, voided_codes=voided_codes, digest=digest,
    )  # fmt: skip
    events = [event, *serve(state, offer, command.id, now)]
    details = _details(command, offer, grab, quantity) | {"voided_codes": voided_codes}
    return Decided(_answer_with(state, command, Outcome.returned, event, details), events)


def _answer_with(
    state: ShardState, command: GrabCommand, outcome: Outcome, event: AnyEvent, details: dict[str, Any]
) -> Answer:
    """The answer that names the command's event, although queued grabs were served after it. `details` must
    be taken after that, so that `left` is right.
    """
    return answer_to(state, command, outcome, event.at, seq=event.seq, **details)


def _refunds(grab: PieceGrab, quantity: int) -> tuple[tuple[str, int], ...]:
    """The money that goes back for the units: pairs (payment, minor units), the oldest payment first."""
    refunds: list[tuple[str, int]] = []
    while quantity and grab.payments:
        payment, units = grab.payments[0]
        returned = min(units, quantity)
        quantity -= returned
        grab.payments[:1] = [(payment, units - returned)] if units > returned else []
        if grab.price:
            refunds.append((payment, returned * grab.price))
    return tuple(refunds)


# -- redeem --------------------------------------------------------------------------------------------------


def _redeem(
    state: ShardState, command: Redeem, offer: Offer, grab: PieceGrab | None, digest: str, now: int
) -> Decided:
    if grab is None:
        return _refuse(state, command, Outcome.no_such_grab, now)
    order = offer.orders.get((command.grab, command.order))
    if order is not None and order.quantity:
        if order.quantity != command.quantity:
            return _refuse(state, command, Outcome.conflict, now)
        return _again(state, command, Outcome.redeemed, (order.seq, order.at), quantity=order.quantity)
    until = offer.pieces.valid_until
    if until is not None and now >= until:
        return _refuse(state, command, Outcome.expired, now)
    if offer.terms.__struct_config__.tag != "coupon" or command.quantity > grab.taken - grab.redeemed:
        return _refuse(state, command, Outcome.not_redeemable, now)
    grab.redeemed += command.quantity
    event = GrabRedeemed(
        **head_of(state, offer, command.id, now), **about(offer, command.grab, grab, command.quantity),
        order=command.order,
        digest=digest,
    )  # fmt: skip
    offer.orders[command.grab, command.order] = OrderUse(command.quantity, event.seq, now)
    return Decided(
        answered(state, command, Outcome.redeemed, now, **_details(command, offer, grab, command.quantity)),
        [event],
    )


def _unredeem(
    state: ShardState, command: Unredeem, offer: Offer, grab: PieceGrab | None, digest: str, now: int
) -> Decided:
    if grab is None:
        return _refuse(state, command, Outcome.no_such_grab, now)
    order = offer.orders.get((command.grab, command.order))
    if order is None:
        return _refuse(state, command, Outcome.not_redeemable, now)
    if not order.quantity:
        return _again(state, command, Outcome.unredeemed, (order.seq, order.at))
    quantity = order.quantity
    grab.redeemed -= quantity
    event = GrabUnredeemed(
        **head_of(state, offer, command.id, now),
        **about(offer, command.grab, grab, quantity),
        order=command.order,
        digest=digest,
    )
    offer.orders[command.grab, command.order] = OrderUse(0, event.seq, now)
    return Decided(
        answered(state, command, Outcome.unredeemed, now, **_details(command, offer, grab, quantity)), [event]
    )


_DECIDE: dict[type, Any] = {
    Confirm: _confirm,
    Release: _release,
    Extend: _extend,
    Return: _return,
    Redeem: _redeem,
    Unredeem: _unredeem,
}
