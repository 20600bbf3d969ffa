"""The projection `balances`: balances of users, and the current state of offers, grabs and payments."""

from collections.abc import Collection, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from psycopg import AsyncConnection
from psycopg.errors import CheckViolation

from grabstream.models.events import AnyGrabEvent, GrabGranted
from grabstream.models.runs import AnyRun
from grabstream.projections.accounts import Changes, changes_of
from grabstream.projections.balances.grabs import GrabRows, LoadedGrabRows, finish_grabs
from grabstream.projections.balances.offers import OfferRows
from grabstream.projections.cursors import Fact
from grabstream.projections.database.arrays import copy_rows, in_order, integer_array, text_array

NAME = "balances"

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
    await _write_rows(connection, facts, GrabRows())
    await _upsert_users(connection, changes_of(facts))


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


def _by_asset(changes: Changes) -> Iterator[tuple[str, dict[str, int], dict[str, int]]]:
    """The changes of users' balances: each asset, what is available by user, and what is held."""
    for asset in sorted({asset for kind, asset in changes if kind in (_WALLET, _HOLD)}):
        yield asset, changes.get((_WALLET, asset), {}), changes.get((_HOLD, asset), {})


class _Rows(NamedTuple):
    """Changes of balances, in columns."""

    users: list[str]
    assets: list[str]
    available: list[int]
    held: list[int]

    def add(
        self, asset: str, users: Collection[str], available: dict[str, int], held: dict[str, int]
    ) -> None:
        """Adds a row for each user."""
        self.users.extend(users)
        self.assets.extend(repeat(asset, len(users)))
        self.available.extend(map(available.get, users, repeat(0)))
        self.held.extend(map(held.get, users, repeat(0)))


async def _upsert_users(connection: AsyncConnection[Any], changes: Changes) -> None:
    """Adds changes to balances in sorted order, so that two transactions rarely deadlock. Losses are an
    UPDATE, because an upsert would check the loss alone against the CHECK (see ledger).
    """
    gains, losses = _Rows([], [], [], []), _Rows([], [], [], [])
    for asset, available, held in _by_asset(changes):
        lost = {user for of_user in (available, held) for user in of_user if of_user[user] < 0}
        gains.add(asset, [user for user in available | held if user not in lost], available, held)
        losses.add(asset, lost, available, held)
    for rows, statement in ((gains, _GAIN), (losses, _LOSE)):
        if not rows.users:
            continue
        users, assets, *sums = in_order(*rows)
        done = await connection.execute(
            statement, (text_array(users), text_array(assets), *map(integer_array, sums))
        )
        if done.rowcount != len(users):
            examples = list(zip(users, assets, strict=True))[:5]
            raise CheckViolation(f"a missing balance would fall below 0, one of {examples}")
