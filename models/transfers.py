"""Transfers: every event as movements of an integer amount of one asset from one account to another (DESIGN 4.10)."""

import re
from typing import Final, NamedTuple

from models.events import AnyEvent, GrabGranted, OfferClosed, OfferOpened

#: Accounts that may never be below 0; the rest (`external:`, `issuer:` …) stand for the world outside.
GUARDED_ACCOUNTS: Final = ("offer:", "hold:", "wallet:", "redeemed:")

_is_money = re.compile(r"[A-Z]{3}\Z").match


class Transfer(NamedTuple):
    """`amount` of `asset` from `debit` (the account that gives) to `credit` (the one that receives)."""

    asset: str
    debit: str
    credit: str
    amount: int


def transfers_of(event: AnyEvent) -> tuple[Transfer, ...]:
    """The transfers an event is, in order of their legs; an event that moves nothing has none."""
    if isinstance(event, GrabGranted):
        return (Transfer(event.asset, "offer:" + event.offer, "wallet:" + event.user, event.amount),)
    if isinstance(event, OfferOpened):
        source = f"external:{event.funding}" if _is_money(event.asset) else f"issuer:{event.issuer}"
        return (Transfer(event.asset, source, "offer:" + event.offer, event.total),)
    if isinstance(event, OfferClosed) and event.amount:
        return (Transfer(event.asset, "offer:" + event.offer, event.refund_to, event.amount),)
    return ()
