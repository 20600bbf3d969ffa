"""Sums of accounts made by the rebuilding process are those that PostgreSQL makes: for any names, whether
changes are added up once, several times, or are too many for memory.
"""

from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg import AsyncConnection

from grabstream.ops.settings import Settings
from grabstream.projections import account_sums, ledger
from grabstream.projections.account_sums import TooManyAccounts, added_up, write_sums
from tests.projections.test_columns import books  # noqa: F401 - a fixture

#: Users have several runs, and transfers of their own; names are as odd as they may be.
_TRANSFERS = r"""
INSERT INTO transfer_runs_1
    SELECT 0, n * 10, 'offer-' || n % 3, 'CNY', 'offer:offer-' || n % 3, 'wallet:',
           ARRAY['NULL', 'user-' || n, 'user', 'user.' || n % 5, '-', 'user'],
           ARRAY[1, 2, 3, n, 5, 10000000000000], 1
    FROM generate_series(1, 40) AS n;
INSERT INTO transfers_1
    SELECT 1, n, 0, 'o', (ARRAY['CNY', 'CN', 'CNYX'])[1 + n % 3], debit || n % 7, 'wallet:user-' || n % 9,
           n, 1
    FROM generate_series(1, 40) AS n,
         unnest(ARRAY[
             'external:p\', 'external:\n', 'external:"p,,', U&'external:\4ED8\2028', 'hold:user'
         ]) AS debit
"""

changes = st.lists(
    st.tuples(st.sampled_from(("a", "a.", "a\\\\", "-", "付")), st.sampled_from(("A", "AB")), st.integers())
)


@given(changes, st.integers(1, 6))
@example([("a", "A", 1), ("a", "A", -1)], 1)
@example([("a", "A", 10), ("a.", "A", 1), ("a", "AB", 1), ("a", "A", 9)], 5)
def test_changes_are_added_up_by_account_and_asset(
    some: list[tuple[str, str, int]], piece_lines: int
) -> None:
    expected: dict[tuple[str, str], int] = {}
    for account, asset, change in some:
        expected[account, asset] = expected.get((account, asset), 0) + change
    lines = [f"{account}\t{asset}\t{change}" for account, asset, change in some]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(account_sums, "PIECE_LINES", piece_lines)
        text = "".join(added_up(lines))
    sums = sorted(expected.items())
    assert text == "".join(f"{account}\t{asset}\t{posted}\n" for (account, asset), posted in sums)


async def test_sums_of_this_process_are_those_of_postgresql(
    books: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await AsyncConnection.connect(books.postgres, autocommit=True) as connection:
        await connection.execute("SELECT set_config('search_path', %s, false)", (f"{books.schema_}_built",))
        async with connection.transaction(force_rollback=True):
            await ledger.finish_here(connection)
            assert await _accounts(connection) == []
            await connection.execute(_TRANSFERS.encode())
            async with connection.transaction(force_rollback=True):
                await ledger.finish(connection)
                expected = await _accounts(connection)
            assert len(expected) > 100
            few = 2 * len(expected) - 20
            for lines_max in (1_000, 2 * len(expected)):
                async with connection.transaction(force_rollback=True):
                    await write_sums(connection, lines_max)
                    assert await _accounts(connection) == expected
            with pytest.raises(TooManyAccounts):
                async with connection.transaction():
                    await write_sums(connection, few)
            monkeypatch.setattr(ledger, "write_sums", partial(write_sums, lines_max=few))
            await ledger.finish_here(connection)
            assert await _accounts(connection) == expected


async def _accounts(connection: AsyncConnection[Any]) -> list[Any]:
    rows = await connection.execute("SELECT account, asset, posted FROM accounts_1 ORDER BY 1, 2")
    return await rows.fetchall()
