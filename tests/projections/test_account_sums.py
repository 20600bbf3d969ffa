"""Sums of accounts made by the rebuilding process are those that PostgreSQL makes: for any names, whether
changes are added up once, several times, or are too many for memory.
"""

from collections.abc import Iterator
from functools import partial
from sys import getsizeof
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg import AsyncConnection

from grabstream.projections import account_sums, ledger
from grabstream.projections.account_sums import TooManyAccounts, added_up, write_sums
from grabstream.settings import Settings
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
            needed = sum(
                getsizeof(f"{account}\t{asset}\t{posted}") + 8 for account, asset, posted in expected
            )
            added_up_times = 0

            def counted(lines: list[str]) -> Iterator[str]:
                nonlocal added_up_times
                added_up_times += 1
                return added_up(lines)

            monkeypatch.setattr(account_sums, "added_up", counted)
            for bytes_max, is_often in ((100 * needed, False), (2 * needed + 2_000, True)):
                added_up_times = 0
                async with connection.transaction(force_rollback=True):
                    await write_sums(connection, bytes_max)
                    assert await _accounts(connection) == expected
                assert (added_up_times > 2) is is_often
            with pytest.raises(TooManyAccounts):
                async with connection.transaction():
                    await write_sums(connection, needed)
            monkeypatch.setattr(ledger, "write_sums", partial(write_sums, bytes_max=needed))
            await ledger.finish_here(connection)
            assert await _accounts(connection) == expected


async def _accounts(connection: AsyncConnection[Any]) -> list[Any]:
    rows = await connection.execute("SELECT account, asset, posted FROM accounts_1 ORDER BY 1, 2")
    return await rows.fetchall()


def test_long_names_of_wide_characters_count_for_what_they_take() -> None:
    name = "付" * 80 + "😀"
    lines = [f"external:{name}{n}\tCNY\t{n}" for n in range(100)]
    taken = sum(map(getsizeof, lines)) + 8 * len(lines)
    assert taken <= account_sums._size(100, "external:", "CNY", "\x1f".join(f"{name}{n}" for n in range(100)))
