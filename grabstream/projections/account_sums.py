"""The sum of every account from loaded transfers, computed by this process in less time than by PostgreSQL,
and sorted by key, as its index is built fastest.

Changes are lines of text from COPY to COPY. Once they are sorted, those of one account are neighbors. So
changes of accounts that have only one, as most wallets have, are neither looked up nor made numbers.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from sys import getsizeof
from typing import Any, Final

import msgspec
from psycopg import AsyncConnection

#: The most bytes of lines in memory: changes of accounts, and sums of accounts in half of it.
BYTES_MAX: Final = 300_000_000
#: What Python needs for a line in addition to its characters: the object, and its place in the list.
_LINE_BYTES: Final = 80
#: What it needs for an account that runs debit: the key of two texts, and the sum.
_DEBIT_BYTES: Final = 4 * _LINE_BYTES
#: Lines that are added up at once, while PostgreSQL writes those before.
PIECE_LINES: Final = 5_000

# A row of a run has the account that it debits, and all of its users. Other rows have one account as a whole,
# and an empty name. The separator is in no name, and COPY writes it as it is.
_CHANGES = (
    b"COPY (SELECT debit, credit_kind, asset, array_to_string(users, chr(31)), array_to_string(amounts, ',') "
    b"FROM transfer_runs_1 "
    b"UNION ALL SELECT '', debit, asset, '', (-amount)::text FROM transfers_1 "
    b"UNION ALL SELECT '', credit, asset, '', amount::text FROM transfers_1) TO STDOUT"
)
_integers = msgspec.json.Decoder(list[int]).decode
#: Lines of one account and asset, one after the other. The quantifiers are possessive: each character is read
#: once.
_repeated = re.compile(r"\n([^\t]*+\t[^\t]*+\t)[^\n]*+(?:\n\1[^\n]*+)++")


class TooManyAccounts(Exception):
    """There are more accounts than this process keeps in memory."""


async def write_sums(connection: AsyncConnection[Any], bytes_max: int = BYTES_MAX) -> None:
    """Copies the sum of every account into the empty `accounts_1`, in the caller's transaction.

    Blocks the event loop for as long as sorting takes. Raises TooManyAccounts before it writes anything, if
    the changes cannot be added up in memory; the caller's savepoint must then be rolled back.
    """
    lines = await _changes(connection, bytes_max)
    async with (
        connection.cursor() as cursor,
        cursor.copy(b"COPY accounts_1 (account, asset, posted) FROM STDIN") as copy,
    ):
        for piece in added_up(lines):
            await copy.write(piece)


async def _changes(connection: AsyncConnection[Any], bytes_max: int) -> list[str]:
    """A line for each change of an account, or for the sum of some of its changes."""
    lines: list[str] = []
    size = 0
    debits: defaultdict[tuple[str, str], int] = defaultdict(int)
    async with connection.cursor() as cursor, cursor.copy(_CHANGES) as copy:
        async for row in copy:
            debit, account, asset, names, amounts = str(row, "utf-8")[:-1].split("\t")
            if debit:
                debits[debit, asset] -= sum(_integers(f"[{amounts}]"))
            users = names.split("\x1f")
            lines += [
                f"{account}{name}\t{asset}\t{amount}"
                for name, amount in zip(users, amounts.split(","), strict=True)
            ]
            size += _size(len(users), account, asset, names)
            if size + len(debits) * _DEBIT_BYTES > bytes_max:
                lines = [line for piece in added_up(lines) for line in piece.split("\n")[:-1]]
                size = sum(map(getsizeof, lines)) + 8 * len(lines)
                if size + len(debits) * _DEBIT_BYTES > bytes_max // 2:
                    raise TooManyAccounts
    lines += [f"{debit}\t{asset}\t{change}" for (debit, asset), change in debits.items()]
    return lines


def _size(count: int, account: str, asset: str, names: str) -> int:
    """About how many bytes the lines of a row need, at most. One character beyond U+FFFF in a text makes all
    of its characters take 4 bytes.
    """
    width = 1 if names.isascii() and account.isascii() else 4
    rest = 16  # two tabs and an amount
    return count * (_LINE_BYTES + width * (len(account) + len(asset) + rest)) + width * len(names)


def added_up(lines: list[str]) -> Iterator[str]:
    """Lines `<account>\\t<asset>\\t<change>` as text with one line for each account and asset, sorted, in
    pieces. Sorts `lines` in place, and empties those that it has added up.
    """
    lines.sort()
    end = 0
    while end < len(lines):
        start, end = end, end + PIECE_LINES
        while end < len(lines) and _key(lines[end]) == _key(lines[end - 1]):
            end += 1
        text = "\n".join(["", *lines[start:end], ""])
        lines[start:end] = [""] * (end - start)
        yield _repeated.sub(_sum, text)[1:]


def _key(line: str) -> str:
    return line.rpartition("\t")[0]


def _sum(repeated: re.Match[str]) -> str:
    start = "\n" + repeated[1]
    return f"{start}{sum(map(int, repeated[0].split(start)[1:]))}"
