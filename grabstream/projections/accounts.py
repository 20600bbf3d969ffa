"""The changes of accounts by events, in columns by kind and asset."""

from collections import defaultdict
from collections.abc import Iterable

from grabstream.models.transfers import RunTransfers
from grabstream.projections.cursors import Fact

#: (kind, asset) → name → change, where the account is kind + name, such as `wallet:` + user.
Changes = dict[tuple[str, str], dict[str, int]]


def changes_of(facts: Iterable[Fact]) -> Changes:
    """The change of every account by the transfers of some events, also if it is 0."""
    changes: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for _, _, _, transfers in facts:
        if isinstance(transfers, RunTransfers):
            kind_changes, name = changes[transfers.kind, transfers.asset], transfers.name
            kind_changes[name] = kind_changes.get(name, 0) - sum(transfers.amounts)
            user_changes = changes[transfers.user_kind, transfers.asset]
            so_far = user_changes.get
            for user, amount in zip(transfers.users, transfers.amounts, strict=True):
                user_changes[user] = so_far(user, 0) + amount
        else:
            for asset, debit, credit, amount in transfers:
                _add(changes, debit, asset, -amount)
                _add(changes, credit, asset, amount)
    return changes


def _add(
    changes: defaultdict[tuple[str, str], dict[str, int]], account: str, asset: str, change: int
) -> None:
    kind, colon, name = account.partition(":")
    kind_changes = changes[kind + colon, asset]
    kind_changes[name] = kind_changes.get(name, 0) + change
