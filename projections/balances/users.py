"""The projection `balances`: balances of users, and the current state of offers, grabs and payments."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection
from psycopg.errors import CheckViolation

from grabstream.models.events import AnyGrabEvent, GrabGranted
from grabstream.models.runs import AnyRun
from grabstream.projections.balances.grabs import GrabRows, LoadedGrabRows, finish_grabs
from grabstream.projections.balances.offers import OfferRows
from grabstream.projections.cursors import Fact
from grabstream.projections.database.arrays import copy_rows, integer_array, text_array

NAME = "balances"

_Changes = dict[tuple[str, str], int]

_WALLET, _HOLD = "wallet:", "hold:"


_GAIN = (
    "INSERT INTO balances_1 AS b (user_id, asset, available, held) "
    "SELECT * FROM unnest(%s::text[], %s::text[], %s::numeric[], %s::numeric[]) "
    "ON CONFLICT (user_id, asset) DO UPDATE SET available = b.available + excluded.available, held = b.held "
    "+ excluded.held"
)
_LOSE = (
    "UPDATE balances_1 AS b SET available = b.available + c.available, held = b.held + c.held "
    "FROM unnest(%s::text[], %s::text[], %s::numeric[], %s::numeric[]) AS c (user_id, asset, available, "
    "held) "
    "WHERE b.user_id = c.user_id AND b.asset = c.asset"
)


async def apply(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds the events to balances, grabs, offers and payments, in the caller's transaction."""
    accounts = await _write_rows(connection, facts, GrabRows())
    await _upsert_users(connection, *_by_user(accounts))


async def load(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds the events for a build, in the caller's transaction. Changes of balances and grabs go to staging
    tables until `finish`.
    """
    accounts = await _write_rows(connection, facts, LoadedGrabRows())
    available, held = _by_user(accounts)
    rows = [
        f"{user}\t{asset}\t{available.get((user, asset), 0)}\t{held.get((user, asset), 0)}\n"
        for user, asset in available | held
    ]
    await copy_rows(connection, "balance_changes (user_id, asset, available, held)", rows)


async def finish(connection: AsyncConnection[Any]) -> None:
    """Computes balances and grabs from the staging tables, after all events were loaded."""
    await connection.execute(
        "INSERT INTO balances_1 (user_id, asset, available, held) "
        "SELECT user_id, asset, sum(available), sum(held) FROM balance_changes GROUP BY user_id, asset"
    )
    await finish_grabs(connection)


async def _write_rows(connection: AsyncConnection[Any], facts: Sequence[Fact], grabs: GrabRows) -> _Changes:
    """Writes offers, payments and grabs; returns the change of every (account, asset)."""
    accounts: defaultdict[tuple[str, str], int] = defaultdict(int)
    offers = OfferRows()
    for _, _, event, transfers in facts:
        for asset, debit, credit, amount in transfers:
            accounts[debit, asset] -= amount
            accounts[credit, asset] += amount
        if isinstance(event, GrabGranted):
            offers.granted(event)
            grabs.add(event)
        elif isinstance(event, AnyRun):
            offers.run(event)
            grabs.run(event)
        else:
            offers.add(event)
            if isinstance(event, AnyGrabEvent):
                grabs.add(event)
    await offers.write(connection)
    await grabs.write(connection)
    return accounts


def _by_user(accounts: _Changes) -> tuple[_Changes, _Changes]:
    """The changes of users' balances, available and held, by (user, asset)."""
    available: _Changes = {}
    held: _Changes = {}
    for (account, asset), change in accounts.items():
        if account.startswith(_WALLET):
            available[account[7:], asset] = change
        elif account.startswith(_HOLD):
            held[account[5:], asset] = change
    return available, held


async def _upsert_users(connection: AsyncConnection[Any], available: _Changes, held: _Changes) -> None:
    """Adds changes to balances. Losses are an UPDATE, because an upsert would check the loss alone against
    the CHECK (see ledger).
    """
    users = available.keys() | held.keys() if held else available.keys()
    losses = sorted(user for user in users if available.get(user, 0) < 0 or held.get(user, 0) < 0)
    for keys, statement in (
        (sorted(users - set(losses)) if losses else sorted(users), _GAIN),
        (losses, _LOSE),
    ):
        if not keys:
            continue
        done = await connection.execute(
            statement,
            (
                text_array([key[0] for key in keys]),
                text_array([key[1] for key in keys]),
                integer_array(available.get(key, 0) for key in keys),
                integer_array(held.get(key, 0) for key in keys),
            ),
        )
        if done.rowcount != len(keys):
            raise CheckViolation(f"a missing balance would fall below 0, one of {keys[:5]}")
