"""Transfers: every event as movements of an integer amount of one asset from one account to another (DESIGN
4.10).
"""

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from grabstream.models.bounds import quoted
from grabstream.models.identifiers import in_schema, is_id
from grabstream.models.money import Account, Asset, Invalid, Quantity, check_amount

if TYPE_CHECKING:
    from grabstream.models.events import AnyEvent

#: Accounts that may never be below 0; the rest (`external:`, `issuer:` …) stand for the world outside.
GUARDED_ACCOUNTS: Final = ("offer:", "hold:", "wallet:", "redeemed:")
#: What a correcting entry may touch. It takes from the world outside only: an operator cannot know from
#: another shard what a wallet has at this moment, and a ledger that had to refuse an event would stop. What a
#: user owes stands in `receivable:<user>`.
ADJUSTABLE_DEBITS: Final = ("external:", "issuer:", "refund:", "receivable:")
ADJUSTABLE_CREDITS: Final = (*ADJUSTABLE_DEBITS, "wallet:")

_is_money = re.compile(r"[A-Z]{3}\Z").match
_is_asset = re.compile(r"(?:[A-Z]{3}|(?:coupon|sku):[A-Za-z0-9._:-]{1,64})\Z").match


class Transfer(NamedTuple):
    """`amount` of `asset` from `debit` (the account that gives) to `credit` (the one that receives)."""

    asset: str
    debit: str
    credit: str
    amount: int


#: Makes a Transfer of a tuple, in half the time that its constructor takes.
_transfer = partial(tuple.__new__, Transfer)


def _starts_with(kinds: tuple[str, ...]) -> str:
    return f"^({'|'.join(kinds)})[A-Za-z0-9._:-]{{1,64}}$"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transfer as it stands in a command."""

    asset: Asset
    debit: Annotated[str, in_schema(pattern=_starts_with(ADJUSTABLE_DEBITS))]
    credit: Annotated[str, in_schema(pattern=_starts_with(ADJUSTABLE_CREDITS))]
    amount: Quantity


class BookedEntry(msgspec.Struct, frozen=True):
    """The same in an event, whose readers ignore fields that they do not know."""

    asset: Asset
    debit: Account
    credit: Account
    amount: Quantity


def check_adjustment(transfer: Entry) -> None:
    """Raises Invalid, naming the field, when an operator may not book this."""
    if not _is_asset(transfer.asset):
        raise Invalid(
            f"transfers.asset: must be a currency, coupon:<offer> or sku:<name>, got {quoted(transfer.asset)}"
        )
    for field, account, allowed in (
        ("debit", transfer.debit, ADJUSTABLE_DEBITS),
        ("credit", transfer.credit, ADJUSTABLE_CREDITS),
    ):
        kind, _, name = account.partition(":")
        if f"{kind}:" not in allowed or not is_id(name):
            raise Invalid(
                f"transfers.{field}: must be one of {', '.join(f'{start}<id>' for start in allowed)}; got "
                f"{quoted(account)}"
            )
    if transfer.debit == transfer.credit:
        raise Invalid(f"transfers.credit: must not be the account that gives, {quoted(transfer.debit)}")
    check_amount("transfers.amount", transfer.amount, least=1)


def source_of(asset: str, funding: str | None, issuer: str) -> str:
    """The account an offer is funded from: money from outside, pieces from their issuer."""
    return f"external:{funding}" if _is_money(asset) else f"issuer:{issuer}"


def transfers_of(event: "AnyEvent") -> tuple[Transfer, ...]:
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
