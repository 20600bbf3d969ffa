"""Correcting entries of operators: transfers in commands and events, and the check that they are allowed."""

import re
from typing import Annotated, Final

import msgspec

from grabstream.models.bounds import quoted
from grabstream.models.identifiers import (
    ID_PATTERN,
    PAYMENT_BYTES_MAX,
    PAYMENT_CHARACTERS,
    in_schema,
    is_id,
    is_payment_id,
)
from grabstream.models.money import Asset, Invalid, Quantity, check_amount

#: The accounts that a correcting entry may debit and credit. It debits only accounts of the outside world: an
#: operator cannot know the current balance of a wallet, and a ledger that had to refuse an event would stop.
#: What a user owes is booked in `receivable:<user>`.
ADJUSTABLE_DEBITS: Final = ("external:", "issuer:", "refund:", "receivable:")
ADJUSTABLE_CREDITS: Final = (*ADJUSTABLE_DEBITS, "wallet:")
#: Those of them that are named by a payment.
_PAYMENT_KINDS: Final = ("external:", "refund:")

_is_asset = re.compile(r"(?:[A-Z]{3}|(?:coupon|sku):[A-Za-z0-9._:-]{1,64})\Z").match


def _starts_with(kinds: tuple[str, ...]) -> str:
    return _pattern(f"({'|'.join(kind for kind in kinds if kind not in _PAYMENT_KINDS)})")


def _pattern(others: str) -> str:
    payment_account = f"({'|'.join(_PAYMENT_KINDS)}){PAYMENT_CHARACTERS}{{1,{PAYMENT_BYTES_MAX}}}"
    return f"^({others}{ID_PATTERN[1:-1]}|{payment_account})$"


BookedAccount = Annotated[str, in_schema(pattern=_pattern("[a-z]+:"))]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transfer in a command `adjust`: `amount` (minor units or pieces) of `asset` from the account `debit`
    to the account `credit`.
    """

    asset: Asset
    debit: Annotated[str, in_schema(pattern=_starts_with(ADJUSTABLE_DEBITS))]
    credit: Annotated[str, in_schema(pattern=_starts_with(ADJUSTABLE_CREDITS))]
    amount: Quantity


class BookedEntry(msgspec.Struct, frozen=True):
    """A transfer in an event `ledger.adjusted`: `amount` (minor units or pieces) of `asset` from `debit` to
    `credit`. Readers ignore unknown fields.
    """

    asset: Asset
    debit: BookedAccount
    credit: BookedAccount
    amount: Quantity


def check_adjustment(transfer: Entry) -> None:
    """Raises Invalid, naming the field, when an operator may not book this transfer."""
    if not _is_asset(transfer.asset):
        raise Invalid(
            f"transfers.asset: must be a currency, coupon:<offer> or sku:<name>, got {quoted(transfer.asset)}"
        )
    for field, account, allowed in (
        ("debit", transfer.debit, ADJUSTABLE_DEBITS),
        ("credit", transfer.credit, ADJUSTABLE_CREDITS),
    ):
        kind, colon, name = account.partition(":")
        is_named = is_payment_id if kind + colon in _PAYMENT_KINDS else is_id
        if kind + colon not in allowed or not is_named(name):
            raise Invalid(
                f"transfers.{field}: must be one of {', '.join(f'{start}<id>' for start in allowed)}; got "
                f"{quoted(account)}"
            )
    if transfer.debit == transfer.credit:
        raise Invalid(f"transfers.credit: must differ from the debited account, {quoted(transfer.debit)}")
    check_amount("transfers.amount", transfer.amount, least=1)
