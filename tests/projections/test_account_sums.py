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

from grabstream.models.transfers import RunTransfers, Transfer
from grabstream.projections import account_sums, ledger
from grabstream.projections.account_sums import AccountSums, TooManyAccounts, added_up
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
                    sums = AccountSums(bytes_max)
                    await sums.read(connection)
                    await sums.write(connection)
                    assert await _accounts(connection) == expected
                assert (added_up_times > 2) is is_often
            with pytest.raises(TooManyAccounts):
                async with connection.transaction():
                    await AccountSums(needed).read(connection)
            monkeypatch.setattr(ledger, "AccountSums", partial(AccountSums, needed))
            await ledger.finish_here(connection)
            assert await _accounts(connection) == expected


async def _accounts(connection: AsyncConnection[Any]) -> list[Any]:
    rows = await connection.execute("SELECT account, asset, posted FROM accounts_1 ORDER BY 1, 2")
    return await rows.fetchall()


def test_long_names_of_wide_characters_count_for_what_they_take() -> None:
    name = "付" * 80 + "😀"
    transfers = [(Transfer("CNY", f"external:{name}{n}", f"issuer:{name}{n}", n),) for n in range(100)]
    lines = [
        f"{account}\tCNY\t{amount}"
        for ((_, debit, credit, n),) in transfers
        for account, amount in ((debit, -n), (credit, n))
    ]
    taken = sum(map(getsizeof, lines)) + 8 * len(lines)
    sums = AccountSums(2 * taken)
    sums.add(transfers)
    assert taken <= sums._bytes


@pytest.mark.parametrize("amounts", [(100,) * 20, tuple(range(100, 120))])
def test_lines_of_a_run_count_for_what_they_take(amounts: tuple[int, ...]) -> None:
    users = tuple(f"user-{n}" for n in range(20))
    sums = AccountSums()
    sums.add([RunTransfers("CNY", "offer:", "e", "wallet:", users, amounts)])
    lines = [f"wallet:{user}\tCNY\t{amount}" for user, amount in zip(users, amounts, strict=True)]
    counted, made = sums._bytes, sums._lines()
    assert made == lines
    assert sum(map(getsizeof, lines)) + 8 * len(lines) <= counted


@pytest.mark.parametrize("amounts", [(5,), (5, 5, 5), (5, 6, 7)])
def test_a_run_has_an_amount_for_each_user(amounts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="argument 2 is"):
        AccountSums().add([RunTransfers("CNY", "offer:", "e", "wallet:", ("u1", "u2"), amounts)])


async def test_sums_of_too_many_accounts_are_made_by_postgresql(books: Settings) -> None:
    """Once they are too many, all are forgotten, also those that are added later."""
    sums = AccountSums(2_000)
    for n in range(20):
        sums.add([RunTransfers("CNY", "offer:", "e", "wallet:", (f"user-{n}",), (1,))])
    assert (sums._texts, dict(sums._debits)) == ([], {})
    async with await AsyncConnection.connect(books.postgres, autocommit=True) as connection:
        await connection.execute("SELECT set_config('search_path', %s, false)", (f"{books.schema_}_built",))
        async with connection.transaction(force_rollback=True):
            await connection.execute(_TRANSFERS.encode())
            await ledger.finish(connection)
            expected = await _accounts(connection)
            await connection.execute("TRUNCATE accounts_1")
            await ledger.finish_here(connection, sums)
            assert await _accounts(connection) == expected
