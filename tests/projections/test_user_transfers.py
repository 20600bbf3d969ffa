"""The transfers of a user (`user_transfers`) are those of the view `transfers` that name an account of the
user: for every kind of event, in runs and one by one.
"""

import asyncio
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from psycopg import AsyncConnection

from grabstream.models.entries import BookedEntry
from grabstream.models.events import LedgerAdjusted, encode_event
from grabstream.models.runs import AnyRun, HeldRun
from grabstream.projections.cursors import Fact
from grabstream.projections.database.migrate import migrate, use_schema
from grabstream.projections.read_models import READ_MODELS
from grabstream.settings import Settings
from tests.conftest import examples
from tests.projections.test_columns import MODELS, books, facts, groups, in_groups, mixtures
from tests.support.projecting import SHARD, granted, opened
from tests.support.random_history import random_history
from tests.support.runs import as_lines, as_runs

__all__ = ["books"]

_COLUMNS = "shard, seq, leg, offer, asset, debit, credit, amount, at, at_time"
#: Users who have an account or a grab, and one who has none.
_USERS = """
SELECT user_id FROM grabs UNION SELECT 'nobody'
UNION SELECT substring(account FROM '^(?:wallet|hold):(.*)') FROM accounts WHERE account ~ '^(wallet|hold):'
"""
_FOUND = f"SELECT {_COLUMNS} FROM user_transfers(%s) ORDER BY {_COLUMNS}"
_FILTERED = f"""
SELECT {_COLUMNS} FROM transfers
WHERE debit IN ('wallet:' || %s, 'hold:' || %s) OR credit IN ('wallet:' || %s, 'hold:' || %s)
ORDER BY {_COLUMNS}
"""


async def found(settings: Settings, events: list[Fact], sizes: list[int]) -> dict[str, list[Any]]:
    """The transfers of each user, after it is checked that they are those of the view."""
    async with (
        await AsyncConnection.connect(settings.postgres, autocommit=True) as connection,
        connection.transaction(force_rollback=True),
    ):
        await connection.execute("SELECT set_config('search_path', %s, true)", (settings.schema_,))
        for group in in_groups(events, sizes):
            for model in MODELS:
                await READ_MODELS[model].apply(connection, group)
        users = await (await connection.execute(_USERS.encode())).fetchall()
        by_user = {}
        for [user] in users:
            by_user[user] = await (await connection.execute(_FOUND.encode(), (user,))).fetchall()
            filtered = await connection.execute(_FILTERED.encode(), (user,) * 4)
            assert by_user[user] == await filtered.fetchall(), user
        return by_user


@hypothesis_settings(max_examples=examples(30))
@given(pieces=mixtures(), grabs_max=st.integers(1, 5), sizes=groups)
def test_transfers_of_users_of_random_runs(
    books: Settings, pieces: list[list[bytes]], grabs_max: int, sizes: list[int]
) -> None:
    lines = [run for piece in pieces for run in as_runs(piece, grabs_max)]
    asyncio.run(found(books, facts(lines), sizes))


async def test_transfers_of_users_of_a_shop(books: Settings) -> None:
    """The history has runs of grabs that have waited, and of others, and every event that moves something."""
    lines = random_history(2, 1_500).lines
    runs = facts(as_runs(lines))
    several = [fact.event for fact in runs if isinstance(fact.event, AnyRun) and fact.event.seqs > 1]
    assert {getattr(event, "waited", False) for event in several} == {True, False}
    assert any(isinstance(event, HeldRun) and not event.waited for event in several)
    moving = {fact.event.__struct_config__.tag for fact in runs if fact.transfers}
    assert moving >= {
        "grab.granted", "grab.held", "grab.confirmed", "grab.released", "grab.returned", "grab.redeemed",
        "grab.unredeemed", "ledger.adjusted",
    }  # fmt: skip
    assert any(
        len(fact.transfers) > 1 for fact in runs if fact.event.__struct_config__.tag == "grab.returned"
    )
    by_user = await found(books, runs, [50])
    assert by_user == await found(books, facts(as_lines(lines)), [50])
    assert by_user["nobody"] == []


async def test_corrections_between_users_are_transfers_of_both(books: Settings) -> None:
    moves = [
        ("issuer:shop", "wallet:a", 100), ("wallet:a", "wallet:b", 10), ("wallet:a", "hold:a", 10),
        ("hold:a", "hold:b", 3), ("hold:b", "wallet:b", 1), ("wallet:b", "issuer:shop", 2),
        ("wallet:a", "wallet:c:d", 5), ("issuer:a", "refund:a", 7), ("wallet:c:d", "hold:c", 1),
    ]  # fmt: skip
    adjusted = LedgerAdjusted(
        v=1, shard=SHARD, seq=2, offer_seq=2, offer="e", at=5, command="c", reason="wrong", approved_by="ann",
        digest="d", transfers=tuple(BookedEntry("CNY", *move) for move in moves),
    )  # fmt: skip
    by_user = await found(books, facts([opened("e", 1), encode_event(adjusted)]), [1])
    assert {user: [leg for _, _, leg, *_ in rows] for user, rows in by_user.items()} == {
        "a": [0, 1, 2, 3, 6], "b": [1, 3, 4, 5], "c:d": [6, 8], "c": [8], "nobody": [],
    }  # fmt: skip


async def test_users_with_grabs_of_the_same_id_have_their_own_transfers(books: Settings) -> None:
    grabs = [granted("e", seq, amount=seq).replace(b'"g%d"' % seq, b'"same"') for seq in range(2, 9)]
    # One run needs one time.
    same_time = [line.replace(b'"at":%d' % seq, b'"at":9') for seq, line in enumerate(grabs, 2)]
    runs = as_runs([opened("e", 1), *same_time])
    assert len(runs) == 2
    by_user = await found(books, facts(runs), [2])
    assert Counter(map(len, by_user.values())) == {1: 7, 0: 1}


async def test_the_function_is_renewed_when_its_text_changes(system: Settings) -> None:
    async with (
        await AsyncConnection.connect(system.postgres, autocommit=True) as connection,
        connection.transaction(force_rollback=True),
    ):
        await use_schema(connection, system.schema_)
        present = "SELECT pg_get_functiondef('user_transfers(text)'::regprocedure)"
        [current] = await (await connection.execute(present.encode())).fetchone() or [""]
        former = current.replace("WHERE user_id = $1", "WHERE false AND user_id = $1")
        await connection.execute("SET LOCAL check_function_bodies = off")
        await connection.execute(former.encode())
        await connection.execute("UPDATE view_texts SET sha256 = '' WHERE schema = %s", (system.schema_,))
        assert await (await connection.execute(present.encode())).fetchone() != (current,)
        assert await migrate(connection, system.schema_, system.shards) == []
        assert await (await connection.execute(present.encode())).fetchone() == (current,)
