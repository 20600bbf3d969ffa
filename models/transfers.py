"""Transfers: every event as movements of an integer amount of one asset from one account to another."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from grabstream.models.events import AnyEvent

#: Accounts that may never be below 0; the rest (`external:`, `issuer:` …) stand for the world outside.
GUARDED_ACCOUNTS: Final = ("offer:", "hold:", "wallet:", "redeemed:")
_is_money = re.compile(r"[A-Z]{3}\Z").match


class Transfer(NamedTuple):
    """`amount` of `asset` from `debit` (the account that gives) to `credit` (the one that receives)."""

    asset: str
    debit: str
    credit: str
    amount: int


#: Makes a Transfer of a tuple, in half the time that its constructor takes.
_transfer = partial(tuple.__new__, Transfer)


def source_of(asset: str, funding: str | None, issuer: str) -> str:
    """The account an offer is funded from: money from outside, pieces from their issuer."""
    return f"external:{funding}" if _is_money(asset) else f"issuer:{issuer}"


def transfers_of(event: AnyEvent) -> tuple[Transfer, ...]:
    """The transfers an event is, in order of their legs; an event that moves nothing has none."""
    kind = type(event)
    of_type = _of_type.get(kind)
    if of_type is None:
        of_type = _of_type[kind] = _TRANSFERS.get(str(event.__struct_config__.tag), _nothing)
    return of_type(event)


def _nothing(event: Any) -> tuple[Transfer, ...]:
    return ()


def _opened(event: Any) -> tuple[Transfer, ...]:
    return (
        Transfer(
            event.asset,
            source_of(event.asset, event.funding, event.issuer),
            "offer:" + event.offer,
            event.total,
        ),
    )


def _amended(event: Any) -> tuple[Transfer, ...]:
    offer = "offer:" + event.offer
    if event.added:
        return (Transfer(event.asset, event.source, offer, event.added),)
    return (Transfer(event.asset, offer, event.source, event.removed),) if event.removed else ()


def _closed(event: Any) -> tuple[Transfer, ...]:
    return (
        (Transfer(event.asset, "offer:" + event.offer, event.refund_to, event.amount),)
        if event.amount
        else ()
    )


def _granted(event: Any) -> tuple[Transfer, ...]:
    # The event that comes by the thousand.
    return (_transfer((event.asset, "offer:" + event.offer, "wallet:" + event.user, event.amount)),)


def _held(event: Any) -> tuple[Transfer, ...]:
    return (Transfer(event.asset, "offer:" + event.offer, "hold:" + event.user, event.amount),)


def _confirmed(event: Any) -> tuple[Transfer, ...]:
    source = "offer:" + event.offer if event.retaken else "hold:" + event.user
    units = Transfer(event.asset, source, "wallet:" + event.user, event.amount)
    if not event.paid:
        return (units,)
    return (
        units,
        Transfer(event.currency, f"external:{event.payment}", "issuer:" + event.issuer, event.paid),
    )


def _released(event: Any) -> tuple[Transfer, ...]:
    return (Transfer(event.asset, "hold:" + event.user, event.to, event.amount),) if event.amount else ()


def _returned(event: Any) -> tuple[Transfer, ...]:
    units = Transfer(event.asset, "wallet:" + event.user, event.to, event.amount)
    refunds = (
        Transfer(event.currency, "issuer:" + event.issuer, f"refund:{payment}", amount)
        for payment, amount in event.refunds
    )
    return (units, *refunds)


def _redeemed(event: Any) -> tuple[Transfer, ...]:
    return (Transfer(event.asset, "wallet:" + event.user, "redeemed:" + event.offer, event.amount),)


def _unredeemed(event: Any) -> tuple[Transfer, ...]:
    return (Transfer(event.asset, "redeemed:" + event.offer, "wallet:" + event.user, event.amount),)


def _refund_due(event: Any) -> tuple[Transfer, ...]:
    return (Transfer(event.asset, f"external:{event.payment}", f"refund:{event.payment}", event.amount),)


def _adjusted(event: Any) -> tuple[Transfer, ...]:
    return tuple(Transfer(one.asset, one.debit, one.credit, one.amount) for one in event.transfers)


_TRANSFERS: Final[dict[str, Callable[[Any], tuple[Transfer, ...]]]] = {
    "offer.opened": _opened,
    "offer.amended": _amended,
    "offer.closed": _closed,
    "grab.granted": _granted,
    "grab.held": _held,
    "grab.confirmed": _confirmed,
    "grab.released": _released,
    "grab.returned": _returned,
    "grab.redeemed": _redeemed,
    "grab.unredeemed": _unredeemed,
    "payment.refund_due": _refund_due,
    "ledger.adjusted": _adjusted,
}
#: The same by class, filled as they come: to ask a class for its tag costs as much as the rest.
_of_type: Final[dict[type, Callable[[Any], tuple[Transfer, ...]]]] = {}
