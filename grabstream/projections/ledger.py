"""The ledger: every transfer, those of a run of grabs in one row, and the sum of every account. A CHECK of
PostgreSQL refuses an overdraft.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat
from typing import Any

from psycopg import AsyncConnection

from grabstream.models.runs import RUN_GRABS_MAX, HeldRun
from grabstream.models.transfers import RunTransfers, Transfer, Transfers
from grabstream.projections.account_sums import AccountSums, TooManyAccounts
from grabstream.projections.accounts import Changes, changes_of
from grabstream.projections.cursors import Fact
from grabstream.projections.database.arrays import copy_rows, copy_text, in_order, integer_array, text_array
from grabstream.projections.database.merging import merge, merge_of

NAME = "ledger"
_POST = merge_of("accounts_1", ("account", "asset"), ("posted",))
# Sums are made in the order of names: sorting a million accounts takes less time than hashing them, and their
# index takes half the time. Names differ in their first bytes, so they are sorted faster than accounts.
_SUM = (
    b"INSERT INTO accounts_1 (account, asset, posted) SELECT kind || name, asset, sum(change) FROM ("
    b"SELECT substr(account, 1, position(':' IN account)) AS kind, "
    b"substr(account, position(':' IN account) + 1) AS name, asset, change FROM ("
    b"SELECT debit AS account, asset, -amount AS change FROM transfers_1 "
    b"UNION ALL SELECT credit, asset, amount FROM transfers_1 "
    b"UNION ALL SELECT debit, asset, -(SELECT sum(amount) FROM unnest(amounts) AS one(amount))::bigint "
    b"FROM transfer_runs_1) AS singles "
    b"UNION ALL SELECT credit_kind, unnest(users), asset, unnest(amounts) FROM transfer_runs_1"
    b") AS legs GROUP BY name, kind, asset ORDER BY name, kind, asset"
)


async def apply(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds the transfers of the events, in the caller's transaction; raises psycopg.errors.CheckViolation at
    an overdraft.
    """
    if changes := changes_of(facts):
        await load(connection, facts)
        await merge(connection, _POST, _columns(changes))


class TransferRows:
    """The rows of transfers, as text for COPY."""

    def __init__(self) -> None:
        self._singles: list[str] = []
        self._runs: list[str] = []

    def add(self, facts: Iterable[Fact]) -> None:
        """Makes the rows of some events."""
        for _, _, event, transfers in facts:
            # Those of grabs that have waited are single rows, which an index by user covers.
            if isinstance(transfers, RunTransfers) and not (isinstance(event, HeldRun) and event.waited):
                # No field needs escaping: names have no backslash, so the literals of arrays have none.
                self._runs.append(
                    f"{event.shard}\t{event.seq}\t{event.offer}\t{transfers.asset}\t{transfers.kind}"
                    f"{transfers.name}\t{transfers.user_kind}\t{text_array(transfers.users)}\t"
                    f"{integer_array(transfers.amounts)}\t{event.at}\n"
                )
            else:
                self._singles += [
                    # Accounts of payments may have a backslash.
                    f"{event.shard}\t{seq}\t{leg}\t{event.offer}\t{asset}\t{copy_text(debit)}\t"
                    f"{copy_text(credit)}\t{amount}\t{event.at}\n"
                    for seq, leg, (asset, debit, credit, amount) in _numbered(event.seq, transfers)
                ]

    async def copy(self, connection: AsyncConnection[Any]) -> None:
        """Copies the rows, in the caller's transaction."""
        await copy_rows(
            connection,
            "transfers_1 (shard, seq, leg, offer, asset, debit, credit, amount, at)",
            self._singles,
        )
        await copy_rows(
            connection,
            "transfer_runs_1 (shard, seq, offer, asset, debit, credit_kind, users, amounts, at)",
            self._runs,
        )


async def load(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds only the transfers, for a build: `finish` computes the accounts."""
    rows = TransferRows()
    rows.add(facts)
    await rows.copy(connection)


async def finish(connection: AsyncConnection[Any]) -> None:
    """Computes the sum of every account, after all transfers were loaded."""
    await connection.execute(_SUM)


async def finish_here(connection: AsyncConnection[Any], sums: AccountSums | None = None) -> None:
    """The same by this process, unless there are more accounts than it keeps in memory. `sums` are those of
    all transfers, if the caller has added them up; else they are read.
    """
    try:
        async with connection.transaction():
            if sums is None:
                sums = AccountSums()
                await sums.read(connection)
            await sums.write(connection)
    except TooManyAccounts:
        await finish(connection)


def in_lines(after: str, to: str | None = None) -> str:
    """A condition on the view `transfers`, so that rows with a seq above `after`, and up to `to` if it is
    given, are found by the index of their lines; both are expressions.
    """
    until = "" if to is None else f" AND transfers.line_seq <= {to}"
    return f"transfers.line_seq > {after} - {RUN_GRABS_MAX}{until}"


def _numbered(seq: int, transfers: Transfers) -> Iterator[tuple[int, int, Transfer]]:
    """Each transfer of a line with its seq and leg: those of an event have one seq, those of a run leg 0."""
    if isinstance(transfers, RunTransfers):
        return zip(count(seq), repeat(0), transfers)
    return zip(repeat(seq), count(), transfers)


def _columns(changes: Changes) -> tuple[str, str, str]:
    """The arrays of the changes, sorted by account."""
    accounts: list[str] = []
    assets: list[str] = []
    amounts: list[int] = []
    for kind, asset in sorted(changes):
        kind_changes = changes[kind, asset]
        accounts += [kind + name for name in kind_changes]
        assets += repeat(asset, len(kind_changes))
        amounts += kind_changes.values()
    accounts, assets, amounts = in_order(accounts, assets, amounts)
    return text_array(accounts), text_array(assets), integer_array(amounts)
