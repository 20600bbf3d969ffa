"""Transfers: each event as movements of an integer amount of one asset from one account to another."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from grabstream.models.events import AnyEvent
from grabstream.models.runs import AnyRun, GrantedRun, HeldRun

#: Prefixes of accounts that are never below 0. Other accounts (`external:`, `issuer:` …) represent the
#: outside world.
GUARDED_ACCOUNTS: Final = ("offer:", "hold:", "wallet:", "redeemed:")
#: The kinds of accounts between which grants and holds move.
_OFFER, _WALLET, _HOLD = "offer:", "wallet:", "hold:"
_is_money = re.compile(r"[A-Z]{3}\Z").match


class Transfer(NamedTuple):
    """A movement of `amount` of `asset` from the account `debit` to the account `credit`."""

    asset: str
    debit: str
    credit: str
    amount: int


#: Makes a Transfer from a tuple, in half the time of its constructor.
_transfer = partial(tuple.__new__, Transfer)


class RunTransfers(msgspec.Struct, frozen=True, gc=False):
    """The transfers of a run in columns, one for each grab. An account is its kind and its name: the debit of
    all is `kind` + `name`, the credits are `user_kind` + user. Iterating makes Transfers.
    """

    asset: str
    kind: str
    name: str
    user_kind: str
    users: Sequence[str]
    amounts: Sequence[int]

    def __len__(self) -> int:
        return len(self.users)

    def __iter__(self) -> Iterator[Transfer]:
        debit, credits_ = self.kind + self.name, [self.user_kind + user for user in self.users]
        return map(_transfer, zip(repeat(self.asset), repeat(debit), credits_, self.amounts, strict=False))


#: The transfers of a line of the journal.
Transfers: TypeAlias = tuple[Transfer, ...] | RunTransfers


def source_of(asset: str, funding: str | None, issuer: str) -> str:
    """The account from which an offer is funded: the payment (money) or the issuer (pieces)."""
    return f"external:{funding}" if _is_money(asset) else f"issuer:{issuer}"


def transfers_of(event: AnyEvent | AnyRun) -> Transfers:
    """The transfers of an event, in order of their legs; empty for an event that moves nothing. For a run,
    one for each grab, in columns.
    """
    kind = type(event)
    make = _transfers_by_class.get(kind)
    if make is None:
        make = _transfers_by_class[kind] = _TRANSFERS.get(str(event.__struct_config__.tag), _nothing)
    return make(event)


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
    return (Transfer(event.asset, _OFFER + event.offer, _WALLET + event.user, event.amount),)


def _held(event: Any) -> tuple[Transfer, ...]:
    return (Transfer(event.asset, _OFFER + event.offer, _HOLD + event.user, event.amount),)


def _granted_run(event: GrantedRun) -> RunTransfers:
    return RunTransfers(event.asset, _OFFER, event.offer, _WALLET, event.users, event.moved)


def _held_run(event: HeldRun) -> RunTransfers:
    return RunTransfers(event.asset, _OFFER, event.offer, _HOLD, event.users, event.moved)


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
    return tuple(Transfer(entry.asset, entry.debit, entry.credit, entry.amount) for entry in event.transfers)


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
#: The same by class: that of runs, and a cache of the others, because reading the tag of a class costs as
#: much as the rest of `transfers_of`.
_transfers_by_class: Final[dict[type, Callable[[Any], Transfers]]] = {
    GrantedRun: _granted_run,
    HeldRun: _held_run,
}
