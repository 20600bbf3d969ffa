"""The projection `balances`: balances of users, and the current state of offers, grabs and payments."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

from psycopg import AsyncConnection

from grabstream.models.events import AnyGrabEvent
from grabstream.models.runs import AnyRun
from grabstream.projections.accounts import Changes, changes_of
from grabstream.projections.balances.grabs import GrabRows, LoadedGrabRows, finish_grabs
from grabstream.projections.balances.offers import OfferRows
from grabstream.projections.cursors import Fact
from grabstream.projections.database.arrays import copy_rows, in_order, integer_array, text_array
from grabstream.projections.database.merging import merge, merge_of

NAME = "balances"

_WALLET, _HOLD = "wallet:", "hold:"
_POST = merge_of("balances_1", ("user_id", "asset"), ("available", "held"))


async def apply(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds the events to balances, grabs, offers and payments, in the caller's transaction."""
    await _write_rows(connection, facts, GrabRows())
    await _post(connection, changes_of(facts))


async def load(connection: AsyncConnection[Any], facts: Sequence[Fact]) -> None:
    """Adds the events for a build, in the caller's transaction. Changes of balances and grabs go to staging
    tables until `finish`.
    """
    await _write_rows(connection, facts, LoadedGrabRows())
    rows = [
        f"{user}\t{asset}\t{available.get(user, 0)}\t{held.get(user, 0)}\n"
        for asset, available, held in _by_asset(changes_of(facts))
        for user in available | held
    ]
    await copy_rows(connection, "balance_changes (user_id, asset, available, held)", rows)


async def finish(connection: AsyncConnection[Any]) -> None:
    """Computes balances and grabs from the staging tables, after all events were loaded."""
    await connection.execute(
        "INSERT INTO balances_1 (user_id, asset, available, held) "
        "SELECT user_id, asset, sum(available), sum(held) FROM balance_changes GROUP BY user_id, asset"
    )
    await finish_grabs(connection)


async def _write_rows(connection: AsyncConnection[Any], facts: Sequence[Fact], grabs: GrabRows) -> None:
    """Writes offers, payments and grabs."""
    offers = OfferRows()
    for _, _, event, _ in facts:
        if isinstance(event, AnyRun):
            offers.run(event)
            grabs.run(event)
        else:
            offers.add(event)
            if isinstance(event, AnyGrabEvent):
                grabs.add(event)
    await offers.write(connection)
    await grabs.write(connection)


def _by_asset(changes: Changes) -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
    """The changes of users' balances: each asset, what is available by user, and what is held."""
    for asset in sorted({asset for kind, asset in changes if kind in (_WALLET, _HOLD)}):
        yield asset, changes.get((_WALLET, asset), {}), changes.get((_HOLD, asset), {})


async def _post(connection: AsyncConnection[Any], changes: Changes) -> None:
    """Adds changes to balances, sorted by user."""
    users: list[str] = []
    assets: list[str] = []
    sums: tuple[list[int], list[int]] = [], []
    for asset, available, held in _by_asset(changes):
        asset_users = available | held
        users.extend(asset_users)
        assets.extend(repeat(asset, len(asset_users)))
        for column, by_user in zip(sums, (available, held), strict=True):
            column.extend(map(by_user.get, asset_users, repeat(0)))
    if users:
        users, assets, *columns = in_order(users, assets, *sums)
        arrays = text_array(users), text_array(assets), *map(integer_array, columns)
        await merge(connection, _POST, arrays)
