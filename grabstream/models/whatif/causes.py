"""What caused an event of the journal: a command, or the sweeper."""

from typing import Any, Final, NamedTuple

import msgspec

from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Extend,
    Grab,
    Load,
    Open,
    Pause,
    Redeem,
    Release,
    Resume,
    Return,
    Unredeem,
    carried_by,
)
from grabstream.models.entries import Entry
from grabstream.models.events import (
    AnyEvent,
    GrabConfirmed,
    GrabExtended,
    GrabGranted,
    GrabHeld,
    GrabQueued,
    GrabRedeemed,
    GrabReleased,
    GrabReturned,
    GrabUnredeemed,
    LedgerAdjusted,
    OfferAmended,
    OfferClosed,
    OfferLoaded,
    OfferOpened,
    OfferPaused,
    OfferResumed,
    PaymentRefundDue,
)
from grabstream.models.offers import changes_of, terms_of
from grabstream.models.outcomes import Outcome
from grabstream.models.rules.settling import recorded_sum
from grabstream.models.rules.state import Drawn, PieceGrab, ShardState

SWEEP: Final = "sweep"
#: A ticket that was accepted had not ended. When it would have ended is not in the journal.
_NEVER_MS: Final = 10**15
#: In place of a receipt, which is not in the journal.
_VERIFIED: Final = "verified"


class Lapse(NamedTuple):
    """The end of an expired hold."""

    offer: str
    grab: str


class Due(NamedTuple):
    """What is due for an offer by time: served or removed users of the waiting list, its close, its
    retirement.
    """

    offer: str


_Grabbed = GrabGranted | GrabHeld | GrabQueued
Cause = AnyCommand | Lapse | Due


def cause_of(event: AnyEvent, state: ShardState) -> Cause | None:
    """The cause of an event, unless an earlier event explains it; None if only an earlier one could.

    `state` is the state before the event: a payment that was not served names no quantity, which follows from
    the price. Raises ValueError for terms that this program cannot read.
    """
    if event.command == SWEEP:
        if isinstance(event, GrabReleased) and event.reason == "expired":
            return Lapse(event.offer, event.grab)
        return Due(event.offer)
    make: dict[str, Any] = {"id": event.command, "offer": event.offer}
    match event:
        case OfferOpened():
            return Open(**make, terms=terms_of(bytes(event.terms)), operator=event.operator)
        case OfferLoaded():
            return Load(
                **make, what=event.what, chunk=event.chunk, chunks=event.chunks, items=event.items,
                operator=event.operator,
            )  # fmt: skip
        case OfferAmended():
            return Amend(**make, changes=changes_of(bytes(event.changes)), operator=event.operator)
        case OfferPaused():
            return Pause(**make, operator=event.operator)
        case OfferResumed():
            return Resume(**make, operator=event.operator)
        case OfferClosed():
            return Close(**make, operator=event.operator) if event.reason == "command" else None
        case LedgerAdjusted():
            transfers = tuple(Entry(t.asset, t.debit, t.credit, t.amount) for t in event.transfers)
            return Adjust(
                **make, transfers=transfers, reason=event.reason, approved_by=event.approved_by,
                operator=event.operator,
            )  # fmt: skip
        case GrabGranted() | GrabHeld() | GrabQueued():
            return None if isinstance(event, GrabHeld) and event.waited else _grab(event)
        case PaymentRefundDue():
            return _unserved(event, _grab_in(state, event.offer, event.grab), state)
    return _about_grab(event)


def _grab(event: GrabGranted | GrabHeld | GrabQueued) -> Grab:
    """The grab, without its basket: `Twins` decides baskets as a whole."""
    asked = None if isinstance(event, GrabQueued) else event.asked
    return Grab(
        id=event.grab, offer=event.offer, user=event.user, quantity=asked or event.quantity,
        attributes=event.attributes, wait=isinstance(event, GrabQueued), **carried_by(event),
    )  # fmt: skip


def _about_grab(event: AnyEvent) -> Cause | None:
    make: dict[str, Any] = {"id": event.command, "offer": event.offer}
    match event:
        case GrabConfirmed():
            return Confirm(
                **make, grab=event.grab, user=event.user, payment=event.payment, paid=event.paid,
                currency=event.currency, quantity=event.quantity,
            )  # fmt: skip
        case GrabExtended():
            return Extend(**make, grab=event.grab, user=event.user)
        case GrabReleased():
            return Release(**make, grab=event.grab, user=event.user)
        case GrabReturned():
            return Return(
                **make, grab=event.grab, user=event.user, quantity=event.quantity, reason=event.reason
            )
        case GrabRedeemed():
            return Redeem(
                **make, grab=event.grab, user=event.user, order=event.order, quantity=event.quantity
            )
        case GrabUnredeemed():
            return Unredeem(**make, grab=event.grab, user=event.user, order=event.order)
    return None


def _grab_in(state: ShardState, offer: str, grab: str) -> PieceGrab | None:
    found = state.offers.get(offer)
    return None if found is None else found.grabs.get(grab)


def _unserved(event: PaymentRefundDue, grab: PieceGrab | None, state: ShardState) -> Confirm:
    """A payment that was not served. Its quantity is not journaled: it is what was paid, divided by the
    price, or for a wrong sum any quantity that costs something else. For a known payment, the event has the
    amount beyond the recorded one, as in the receipt.
    """
    if event.outcome == Outcome.conflict.name:
        command = Confirm(
            id=event.command, offer=event.offer, grab=event.grab, user=event.user, payment=event.payment,
            currency=event.asset, receipt=_VERIFIED,
        )  # fmt: skip
        paid = event.amount + recorded_sum(state, command, event.at)
        return msgspec.structs.replace(command, paid=paid)
    quantity = None
    if grab is not None and event.outcome == Outcome.invalid.name:
        wrong = (count for count in (None, 1, 2) if (count or grab.held or grab.lapsed) * grab.price
                 != event.amount)  # fmt: skip
        quantity = next(wrong)
    elif grab is not None and grab.price and event.amount % grab.price == 0:
        quantity = event.amount // grab.price
    return Confirm(
        id=event.command, offer=event.offer, grab=event.grab, user=event.user, payment=event.payment,
        paid=event.amount, currency=event.asset, quantity=quantity,
    )  # fmt: skip


def drawn_for(event: AnyEvent, state: ShardState) -> Drawn:
    """The journaled part of what the gate knew of a grab's ticket; `state` is the state before."""
    offer = state.offers.get(event.offer)
    if offer is None or offer.terms.audience != "ticket" or not isinstance(event, _Grabbed):
        return {}
    drawn = {"ticket_expires_at": _NEVER_MS, "ticket_once": event.ticket or ""}
    return drawn if event.ticket_ends_at is None else drawn | {"ticket_ends_at": event.ticket_ends_at}
