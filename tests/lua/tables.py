"""Whether SQL says of a history what the rules say: its events projected into tables of their own, and every live offer compared."""

import random
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection, sql

from models.events import decode_event
from models.journal import GENESIS, chain
from models.rules import Offer, ShardState
from models.rules.state import Status
from models.transfers import transfers_of
from projections.cursors import Fact, facts_of
from projections.read_models import READ_MODELS
from projections.versions import create_flat


async def check_tables(postgres: str, lines: Sequence[Sequence[bytes]], states: Sequence[ShardState]) -> None:
    """Applies the events of all shards, cut at random places; no constraint may stop a projection, and every row is what the rules say."""
    cut = random.Random(sum(map(len, lines)))
    schema = f"hostile_{secrets.token_hex(5)}"
    async with await AsyncConnection.connect(postgres, autocommit=True) as connection, connection.transaction(force_rollback=True):
        await connection.execute("SET LOCAL synchronous_commit = off")
        await create_flat(connection, schema, len(lines))
        for of_shard in lines:
            await _apply(connection, of_shard, cut)
        await _compare_offers(connection, states)
        await _compare_grabs(connection, states)
        await _compare_limits(connection, states)
        await _compare_accounts(connection, lines)


async def _apply(connection: AsyncConnection[Any], lines: Sequence[bytes], cut: random.Random) -> None:
    facts: list[Fact] = facts_of(lines, chain(GENESIS, lines), [decode_event(line) for line in lines])
    at = 0
    while at < len(facts):
        size = cut.choice((1, 5, 100))
        for model in READ_MODELS.values():
            await model.apply(connection, facts[at : at + size])
        at += size


async def _rows(connection: AsyncConnection[Any], query: str) -> list[Any]:
    return await (await connection.execute(sql.SQL(query))).fetchall()  # type: ignore[arg-type]


def _offers(states: Sequence[ShardState]) -> dict[str, Offer]:
    return {name: offer for state in states for name, offer in state.offers.items()}


async def _compare_offers(connection: AsyncConnection[Any], states: Sequence[ShardState]) -> None:
    found = await _rows(connection, "SELECT offer, units_left, held, state, grabs FROM offers WHERE retired_at IS NULL")
    said = {name: (left, held, state in ("closed", "drained"), grabs) for name, left, held, state, grabs in found}
    assert said == {
        name: (offer.units_left, offer.held, offer.closed_reason is not None, offer.places) for name, offer in _offers(states).items()
    }
    retired = {name for (name,) in await _rows(connection, "SELECT offer FROM offers WHERE retired_at IS NOT NULL")}
    assert retired == {name for state in states for name in state.retired}


async def _compare_grabs(connection: AsyncConnection[Any], states: Sequence[ShardState]) -> None:
    columns = "g.offer, grab, user_id, g.held, taken, redeemed, g.amount, g.state = 'waiting'"
    found = await _rows(connection, f"SELECT {columns} FROM grabs AS g JOIN offers USING (offer) WHERE retired_at IS NULL")
    expected: dict[tuple[str, str], tuple[Any, ...]] = {}
    parts: Counter[tuple[str, str, int]] = Counter()
    for offer in _offers(states).values():
        parts.update((offer.name, user, part.amount) for user, part in offer.users.items())
        for name, grab in offer.grabs.items():
            expected[offer.name, name] = grab.user, grab.held, grab.taken, grab.redeemed, grab.status == Status.waiting
    offers = _offers(states)
    said = {
        (offer, grab): (user, held, 0 if waits else taken, redeemed, waits)
        for offer, grab, user, held, taken, redeemed, _, waits in found
        if not offers[offer].is_envelope
    }
    assert said == expected
    assert Counter((offer, user, amount) for offer, _, user, _, _, _, amount, _ in found if offers[offer].is_envelope) == parts


async def _compare_limits(connection: AsyncConnection[Any], states: Sequence[ShardState]) -> None:
    """Limits for the whole offer; others count in the windows of PostgreSQL's own clock."""
    found = await _rows(connection, "SELECT offer, by, value, counted FROM limits WHERE per = 'offer' AND scope = 'offer' AND counted > 0")
    expected = {
        (offer.name, limit.by, name.removeprefix(f"{limit.name}/"), count)
        for offer in _offers(states).values()
        if not offer.is_envelope
        for limit in offer.pieces.limits
        if (limit.per, limit.scope) == ("offer", "offer")
        for name, (_, count) in offer.counters.items()
        if count and name.startswith(f"{limit.name}/")
    }
    said = {tuple(row) for row in found}
    assert said == expected, f"only in SQL: {said - expected}; only in the rules: {expected - said}"


async def _compare_accounts(connection: AsyncConnection[Any], lines: Sequence[Sequence[bytes]]) -> None:
    posted: Counter[tuple[str, str]] = Counter()
    for of_shard in lines:
        for line in of_shard:
            for transfer in transfers_of(decode_event(line)):
                posted[transfer.debit, transfer.asset] -= transfer.amount
                posted[transfer.credit, transfer.asset] += transfer.amount
    found = {(account, asset): amount for account, asset, amount in await _rows(connection, "SELECT account, asset, posted FROM accounts")}
    assert {key: amount for key, amount in found.items() if amount} == {key: amount for key, amount in posted.items() if amount}
