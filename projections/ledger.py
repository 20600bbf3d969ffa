"""The ledger: every transfer as a row, and the sum of every account. A CHECK of PostgreSQL refuses an
overdraft.
"""

from collections.abc import Sequence
from itertools import count, repeat
from typing import Any

from psycopg import AsyncConnection
from psycopg.errors import CheckViolation

from grabstream.models.transfers import GUARDED_ACCOUNTS, RunTransfers
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
    for _, _, event, transfers in facts:
        shard, seq, offer, at = f"{event.shard}\t", event.seq, f"\t{event.offer}\t", f"\t{event.at}\n"
        if isinstance(transfers, RunTransfers):
            # Each transfer of a run is the only one of its seq.
            between = f"\t0{offer}{transfers.asset}\t{transfers.kind}{transfers.name}\t{transfers.user_kind}"
            columns = zip(count(seq), transfers.users, transfers.amounts, strict=False)
            rows += [f"{shard}{seq}{between}{user}\t{amount}{at}" for seq, user, amount in columns]
        else:
            rows += [
                f"{shard}{seq}\t{leg}{offer}{asset}\t{debit}\t{credit}\t{amount}{at}"
                for leg, (asset, debit, credit, amount) in enumerate(transfers)
            ]
    await copy_rows(
        connection, "transfers_1 (shard, seq, leg, offer, asset, debit, credit, amount, at)", rows
    )


async def finish(connection: AsyncConnection[Any]) -> None:
    """Computes the sum of every account, after all transfers were loaded."""
    await connection.execute(
        "INSERT INTO accounts_1 (account, asset, posted) SELECT account, asset, sum(change) FROM ("
        "SELECT debit AS account, asset, -amount AS change FROM transfers_1 UNION ALL SELECT credit, asset, "
        "amount FROM transfers_1"
        ") AS legs GROUP BY account, asset"
    )


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
