"""The ledger: every transfer, those of a run of grabs in one row, and the sum of every account. A CHECK of
PostgreSQL refuses an overdraft.
"""

from collections.abc import Iterator, Sequence
from itertools import count, repeat
from typing import Any

from psycopg import AsyncConnection
from psycopg.errors import CheckViolation

from grabstream.models.runs import RUN_GRABS_MAX, HeldRun
from grabstream.models.transfers import GUARDED_ACCOUNTS, RunTransfers, Transfer, Transfers
from grabstream.projections.accounts import Changes, changes_of
from grabstream.projections.cursors import Fact
from grabstream.projections.database.arrays import copy_rows, in_order, integer_array, text_array

NAME = "ledger"


async def apply(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds the transfers of the events, in the caller's transaction; raises psycopg.errors.CheckViolation at
    an overdraft.
    """
    if changes := changes_of(facts):
        await load(connection, facts)
        await _post(connection, changes)


async def load(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds only the transfers, for a build: `finish` computes the accounts."""
    rows: list[str] = []
    runs: list[str] = []
    for _, _, event, transfers in facts:
        # Those of grabs that have waited are rows by themselves, which an index by user has.
        if isinstance(transfers, RunTransfers) and not (isinstance(event, HeldRun) and event.waited):
            # No field needs escaping: names have no backslash, so the literals of arrays have none.
            runs.append(
                f"{event.shard}\t{event.seq}\t{event.offer}\t{transfers.asset}\t{transfers.kind}"
                f"{transfers.name}\t{transfers.user_kind}\t{text_array(transfers.users)}\t"
                f"{integer_array(transfers.amounts)}\t{event.at}\n"
            )
        else:
            rows += [
                f"{event.shard}\t{seq}\t{leg}\t{event.offer}\t{asset}\t{debit}\t{credit}\t{amount}\t"
                f"{event.at}\n"
                for seq, leg, (asset, debit, credit, amount) in _numbered(event.seq, transfers)
            ]
    await copy_rows(
        connection, "transfers_1 (shard, seq, leg, offer, asset, debit, credit, amount, at)", rows
    )
    await copy_rows(
        connection,
        "transfer_runs_1 (shard, seq, offer, asset, debit, credit_kind, users, amounts, at)",
        runs,
    )


async def finish(connection: AsyncConnection[Any]) -> None:
    """Computes the sum of every account, after all transfers were loaded."""
    await connection.execute(
        "INSERT INTO accounts_1 (account, asset, posted) SELECT account, asset, sum(change) FROM ("
        "SELECT debit AS account, asset, -amount AS change FROM transfers_1 "
        "UNION ALL SELECT credit, asset, amount FROM transfers_1 "
        "UNION ALL SELECT debit, asset, -(SELECT sum(amount) FROM unnest(amounts) AS one(amount))::bigint "
        "FROM transfer_runs_1 "
        'UNION ALL SELECT credit_kind || "user", asset, amount FROM ('
        'SELECT credit_kind, asset, unnest(users) AS "user", unnest(amounts) AS amount FROM transfer_runs_1'
        ") AS one"
        ") AS legs GROUP BY account, asset"
    )


async def in_lines(connection: AsyncConnection[Any], after: str, to: str | None = None) -> str:
    """A condition on the view `transfers`, so that rows with a seq above `after`, and up to `to` if it is
    given, are found by the index of their lines; both are expressions. Versions of former definitions have an
    index of the seqs themselves.
    """
    rows = await connection.execute(
        "SELECT FROM pg_attribute WHERE attrelid = 'transfers'::regclass AND attname = 'line_seq'"
    )
    if not rows.rowcount:
        return "true"
    until = "" if to is None else f" AND transfers.line_seq <= {to}"
    return f"transfers.line_seq > {after} - {RUN_GRABS_MAX}{until}"


def _numbered(seq: int, transfers: Transfers) -> Iterator[tuple[int, int, Transfer]]:
    """Each transfer of a line with its seq and leg: those of an event have one seq, those of a run leg 0."""
    if isinstance(transfers, RunTransfers):
        return zip(count(seq), repeat(0), transfers)
    return zip(repeat(seq), count(), transfers)


async def _post(connection: AsyncConnection[Any], changes: Changes) -> None:
    """Adds changes to accounts in sorted order, so that two transactions rarely deadlock.

    A loss of a guarded account is an UPDATE: an upsert would check the row to insert, which has only the
    loss, against the CHECK before it finds the existing row.
    """
    losses: Changes = {}
    for (kind, asset), of_kind in changes.items():
        if kind in GUARDED_ACCOUNTS and (lost := [name for name in of_kind if of_kind[name] < 0]):
            losses[kind, asset] = {name: of_kind.pop(name) for name in lost}
    await connection.execute(
        "INSERT INTO accounts_1 AS a (account, asset, posted) SELECT * FROM unnest(%s::text[], %s::text[], "
        "%s::numeric[]) "
        "ON CONFLICT (account, asset) DO UPDATE SET posted = a.posted + excluded.posted",
        _columns(changes),
    )
    if not losses:
        return
    done = await connection.execute(
        "UPDATE accounts_1 AS a SET posted = a.posted + c.amount "
        "FROM unnest(%s::text[], %s::text[], %s::numeric[]) AS c (account, asset, amount) "
        "WHERE a.account = c.account AND a.asset = c.asset",
        _columns(losses),
    )
    if done.rowcount != sum(map(len, losses.values())):
        examples = [(kind + name, asset) for (kind, asset), lost in sorted(losses.items()) for name in lost]
        raise CheckViolation(f"a missing account would fall below 0, one of {examples[:5]}")


def _columns(changes: Changes) -> tuple[str, str, str]:
    accounts: list[str] = []
    assets: list[str] = []
    amounts: list[int] = []
    for kind, asset in sorted(changes):
        of_kind = changes[kind, asset]
        accounts += [kind + name for name in of_kind]
        assets += repeat(asset, len(of_kind))
        amounts += of_kind.values()
    accounts, assets, amounts = in_order(accounts, assets, amounts)
    return text_array(accounts), text_array(assets), integer_array(amounts)
