"""Projects the events of a history into new tables, and compares the tables with the state of the rules."""

import random
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection, sql

from grabstream.models.calendar import window_ends, window_of
from grabstream.models.events import decode_event
from grabstream.models.journal import GENESIS, chain
from grabstream.models.offers import Limit
from grabstream.models.rules import Offer, ShardState
from grabstream.models.rules.state import Status
from grabstream.models.runs import decode_line
from grabstream.models.transfers import transfers_of
from grabstream.projections.cursors import Fact, facts_of
from grabstream.projections.definitions import definition_of
from grabstream.projections.read_models import READ_MODELS
from grabstream.projections.versions import create_flat
from tests.support.runs import as_lines


async def check_tables(
    postgres: str, lines: Sequence[Sequence[bytes]], states: Sequence[ShardState], now_ms: int
) -> None:
    """Applies the events of all shards in pieces of random size. Checks that no constraint stops a projection
    and that every row matches the rules.
    """
    cut = random.Random(sum(map(len, lines)))
    schema = f"hostile_{secrets.token_hex(5)}"
    async with (
        await AsyncConnection.connect(postgres, autocommit=True) as connection,
        connection.transaction(force_rollback=True),
    ):
        await connection.execute("SET LOCAL synchronous_commit = off")
        await create_flat(connection, schema, len(lines))
        for of_shard in lines:
            await _apply(connection, of_shard, cut)
        await _compare_offers(connection, states)
        await _compare_grabs(connection, states)
        await _compare_limits(connection, states, now_ms)
        await _compare_accounts(connection, lines)
        await _compare_built(connection, schema, lines)


def _facts(events: Sequence[bytes]) -> list[Fact]:
    lines = as_lines(events)
    return facts_of(lines, chain(GENESIS, lines), [decode_line(line) for line in lines])


async def _apply(connection: AsyncConnection[Any], lines: Sequence[bytes], cut: random.Random) -> None:
    facts, at = _facts(lines), 0
    while at < len(facts):
        size = cut.choice((1, 5, 100))
        for model in READ_MODELS.values():
            await model.apply(connection, facts[at : at + size])
        at += size


async def _compare_built(
    connection: AsyncConnection[Any], schema: str, lines: Sequence[Sequence[bytes]]
) -> None:
    """Checks that a bulk load makes the same rows as applying the events in pieces."""
    built = f"{schema}_built"
    definition = definition_of("balances")
    await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(built)))
    await connection.execute("SELECT set_config('search_path', %s, true)", (built,))
    for part in ("tables", "staging"):
        await connection.execute(definition.parts[part].encode())
    model = READ_MODELS["balances"]
    for of_shard in lines:
        await model.load(connection, _facts(of_shard))
    await model.finish(connection)
    for table in definition.tables:
        for schema_a, schema_b in ((schema, built), (built, schema)):
            differing = "SELECT * FROM {} EXCEPT SELECT * FROM {}"
            names = (sql.Identifier(schema_a, table), sql.Identifier(schema_b, table))
            rows = await (await connection.execute(sql.SQL(differing).format(*names))).fetchall()
            assert not rows, f"{table}: only {'applied' if schema_a == schema else 'built'}: {rows[:3]}"


async def _rows(connection: AsyncConnection[Any], query: str) -> list[Any]:
    return await (await connection.execute(sql.SQL(query))).fetchall()  # type: ignore[arg-type]


def _offers(states: Sequence[ShardState]) -> dict[str, Offer]:
    return {name: offer for state in states for name, offer in state.offers.items()}


async def _compare_offers(connection: AsyncConnection[Any], states: Sequence[ShardState]) -> None:
    rows = await _rows(
        connection, "SELECT offer, units_left, held, state, grabs FROM offers WHERE retired_at IS NULL"
    )
    in_sql = {
        name: (left, held, state in ("closed", "drained"), grabs) for name, left, held, state, grabs in rows
    }
    assert in_sql == {
        name: (offer.units_left, offer.held, offer.closed_reason is not None, offer.places)
        for name, offer in _offers(states).items()
    }
    retired = {
        name for (name,) in await _rows(connection, "SELECT offer FROM offers WHERE retired_at IS NOT NULL")
    }
    assert retired == {name for state in states for name in state.retired}


async def _compare_grabs(connection: AsyncConnection[Any], states: Sequence[ShardState]) -> None:
    columns = "g.offer, grab, user_id, g.held, taken, redeemed, g.amount, g.state = 'waiting'"
    rows = await _rows(
        connection, f"SELECT {columns} FROM grabs AS g JOIN offers USING (offer) WHERE retired_at IS NULL"
    )
    expected: dict[tuple[str, str], tuple[Any, ...]] = {}
    parts: Counter[tuple[str, str, int]] = Counter()
    for offer in _offers(states).values():
        parts.update((offer.name, user, part.amount) for user, part in offer.users.items())
        for name, grab in offer.grabs.items():
            expected[offer.name, name] = (
                grab.user,
                grab.held,
                grab.taken,
                grab.redeemed,
                grab.status == Status.waiting,
            )
    offers = _offers(states)
    in_sql = {
        (offer, grab): (user, held, 0 if waits else taken, redeemed, waits)
        for offer, grab, user, held, taken, redeemed, _, waits in rows
        if not offers[offer].is_envelope
    }
    assert in_sql == expected
    assert (
        Counter(
            (offer, user, amount) for offer, _, user, _, _, _, amount, _ in rows if offers[offer].is_envelope
        )
        == parts
    )


def limits_at(now_ms: int) -> str:
    """The statement that creates the view `limits_then`: the view `limits` at a given time."""
    view = re.search(
        r"CREATE OR REPLACE VIEW limits AS.*?;", definition_of("balances").parts["views"], re.DOTALL
    )
    assert view is not None
    return (
        view[0]
        .replace("CREATE OR REPLACE VIEW limits", "CREATE TEMPORARY VIEW limits_then")
        .replace("now()", f"to_timestamp({now_ms} / 1000.0)")
    )


async def _compare_limits(
    connection: AsyncConnection[Any], states: Sequence[ShardState], now_ms: int
) -> None:
    """Checks that the view `limits`, read at a given time, matches the counters of the rules."""
    view_then = limits_at(now_ms)
    await connection.execute(view_then.encode())
    expected = set()
    for state in states:
        for offer in state.offers.values():
            for limit in () if offer.is_envelope else offer.pieces.limits:
                offsets = offer.campaign_offsets if limit.scope == "campaign" else offer.offsets
                current, ends = (take(limit.per, offsets, now_ms) for take in (window_of, window_ends))
                expected |= {
                    (
                        offer.name, limit.by, limit.per, limit.scope, name.removeprefix(f"{limit.name}/"),
                        count, ends,
                    )
                    for name, (window, count) in _counters_of(state, offer, limit)
                    if count and window == current
                }  # fmt: skip
    in_sql = {
        tuple(row)
        for row in await _rows(
            connection,
            "SELECT offer, by, per, scope, value, counted, resets_at FROM limits_then WHERE counted > 0",
        )
    }
    assert in_sql == expected, f"only in SQL: {in_sql - expected}; only in the rules: {expected - in_sql}"


def _counters_of(state: ShardState, offer: Offer, limit: Limit) -> list[tuple[str, tuple[int, int]]]:
    """The counters of a limit as (name, (window, count))."""
    counters = offer.counters
    if limit.scope == "campaign":
        counters = {
            name: value for (campaign, name), value in state.counters.items() if campaign == offer.campaign
        }
    return [(name, value) for name, value in counters.items() if name.startswith(f"{limit.name}/")]


async def _compare_accounts(connection: AsyncConnection[Any], lines: Sequence[Sequence[bytes]]) -> None:
    posted: Counter[tuple[str, str]] = Counter()
    for of_shard in lines:
        for line in of_shard:
            for transfer in transfers_of(decode_event(line)):
                posted[transfer.debit, transfer.asset] -= transfer.amount
                posted[transfer.credit, transfer.asset] += transfer.amount
    in_sql = {
        (account, asset): amount
        for account, asset, amount in await _rows(connection, "SELECT account, asset, posted FROM accounts")
    }
    assert {key: amount for key, amount in in_sql.items() if amount} == {
        key: amount for key, amount in posted.items() if amount
    }
