"""Correcting entries of operators: transfers as they stand in commands and events, and which are allowed."""

import re
from typing import Annotated, Final

import msgspec

from grabstream.models.bounds import quoted
from grabstream.models.identifiers import in_schema, is_id
from grabstream.models.money import Account, Asset, Invalid, Quantity, check_amount

#: What a correcting entry may touch. It takes from the world outside only: an operator cannot know from
#: another shard what a wallet has at this moment, and a ledger that had to refuse an event would stop. What a
#: user owes stands in `receivable:<user>`.
ADJUSTABLE_DEBITS: Final = ("external:", "issuer:", "refund:", "receivable:")
ADJUSTABLE_CREDITS: Final = (*ADJUSTABLE_DEBITS, "wallet:")

_is_asset = re.compile(r"(?:[A-Z]{3}|(?:coupon|sku):[A-Za-z0-9._:-]{1,64})\Z").match


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
