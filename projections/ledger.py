"""The ledger: every transfer as a row, and the sum of every account. A CHECK of PostgreSQL refuses an
overdraft.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count, repeat
from typing import Any

from psycopg import AsyncConnection
from psycopg.errors import CheckViolation

from grabstream.models.runs import AnyRun
from grabstream.models.transfers import GUARDED_ACCOUNTS
from grabstream.projections.cursors import Fact
from grabstream.projections.database.arrays import copy_rows, integer_array, text_array

NAME = "ledger"


async def apply(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds the transfers of the events, in the caller's transaction; raises psycopg.errors.CheckViolation at
    an overdraft.
    """
    changes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for _, _, _, transfers in facts:
        for asset, debit, credit, amount in transfers:
            changes[debit, asset] -= amount
            changes[credit, asset] += amount
    if changes:
        await load(connection, facts)
        await _post(connection, changes)


async def load(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds only the transfers, for a build: `finish` computes the accounts."""
    rows = []
    for _, _, event, transfers in facts:
        # Each transfer of a run is the only one of its seq.
        numbers: Iterable[tuple[int, int]] = zip(repeat(event.seq), count(), strict=False)
        if isinstance(event, AnyRun):
            numbers = zip(count(event.seq), repeat(0), strict=False)
        rows += [
            f"{event.shard}\t{seq}\t{leg}\t{event.offer}\t{asset}\t{debit}\t{credit}\t{amount}\t{event.at}\n"
            for (asset, debit, credit, amount), (seq, leg) in zip(transfers, numbers, strict=False)
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


async def _post(connection: AsyncConnection[Any], changes: dict[tuple[str, str], int]) -> None:
    """Adds changes to accounts in sorted order, so that two transactions rarely deadlock.

    A loss of a guarded account is an UPDATE: an upsert would check the row to insert, which has only the
    loss, against the CHECK before it finds the existing row.
    """
    losses = sorted(
        key for key, amount in changes.items() if amount < 0 and key[0].startswith(GUARDED_ACCOUNTS)
    )
    gains = sorted(changes.keys() - set(losses))
    await connection.execute(
        "INSERT INTO accounts_1 AS a (account, asset, posted) SELECT * FROM unnest(%s::text[], %s::text[], "
        "%s::numeric[]) "
        "ON CONFLICT (account, asset) DO UPDATE SET posted = a.posted + excluded.posted",
        _columns(gains, changes),
    )
    if not losses:
        return
    done = await connection.execute(
        "UPDATE accounts_1 AS a SET posted = a.posted + c.amount "
        "FROM unnest(%s::text[], %s::text[], %s::numeric[]) AS c (account, asset, amount) "
        "WHERE a.account = c.account AND a.asset = c.asset",
        _columns(losses, changes),
    )
    if done.rowcount != len(losses):
        raise CheckViolation(f"a missing account would fall below 0, one of {losses[:5]}")


def _columns(keys: Sequence[tuple[str, str]], changes: dict[tuple[str, str], int]) -> tuple[str, str, str]:
    accounts, assets = [key[0] for key in keys], [key[1] for key in keys]
    return text_array(accounts), text_array(assets), integer_array(changes[key] for key in keys)
