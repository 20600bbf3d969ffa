"""The sum of every account from transfers, computed by this process in less time than by PostgreSQL, and
sorted by key, as its index is built fastest.

Changes are lines of text for COPY. Once they are sorted, those of one account are neighbors. So changes of
accounts that have only one, as most wallets have, are neither looked up nor made numbers.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from sys import getsizeof
from typing import Any, Final

import msgspec
from psycopg import AsyncConnection

from grabstream.models.transfers import RunTransfers, Transfers
from grabstream.projections.database.arrays import copy_text

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


class AccountSums:
    """The sums of accounts by the transfers that are added, or read from a version. After more accounts than
    fit into `bytes_max`, it keeps nothing, and `write` raises TooManyAccounts.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        #: Texts of lines, one line for each change of an account, or for the sum of some of its changes.
        self._texts: list[str] = []
        #: What the lines will need in memory, each as a text.
        self._bytes = 0
        #: By account and asset: what runs debit.
        self._debits: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._are_too_many = False

    def add(self, transfers: Iterable[Transfers]) -> None:
        """Adds the transfers of some events. Blocks the event loop for up to a second when lines are added up
        to make room.
        """
        if self._are_too_many:
            return
        for one in transfers:
            if isinstance(one, RunTransfers):
                self._debits[one.kind + one.name, one.asset] -= sum(one.amounts)
                self._add_credits(one.user_kind, one.users, one.asset, one.amounts)
            else:
                for asset, debit, credit, amount in one:
                    self._add_change(copy_text(debit), asset, -amount)
                    self._add_change(copy_text(credit), asset, amount)
        self._make_room()

    async def read(self, connection: AsyncConnection[Any]) -> None:
        """Adds all transfers of the version that the connection uses; raises TooManyAccounts."""
        async with connection.cursor() as cursor, cursor.copy(_CHANGES) as copy:
            async for row in copy:
                debit, account, asset, names, amounts = str(row, "utf-8")[:-1].split("\t")
                if debit:
                    self._debits[debit, asset] -= sum(_integers(f"[{amounts}]"))
                    self._add_credits(account, names.split("\x1f"), asset, amounts.split(","))
                else:
                    self._add_change(account, asset, amounts)
                self._make_room()
                if self._are_too_many:
                    raise TooManyAccounts

    async def write(self, connection: AsyncConnection[Any]) -> None:
        """Copies the sum of every account into the empty `accounts_1`, in the caller's transaction. They are
        no longer kept then.

        Blocks the event loop for as long as sorting takes. Raises TooManyAccounts before it writes anything.
        """
        if self._are_too_many:
            raise TooManyAccounts
        self._texts += [f"{debit}\t{asset}\t{change}" for (debit, asset), change in self._debits.items()]
        self._debits.clear()
        async with (
            connection.cursor() as cursor,
            cursor.copy(b"COPY accounts_1 (account, asset, posted) FROM STDIN") as copy,
        ):
            for piece in added_up(self._lines()):
                await copy.write(piece)

    def _add_credits(
        self, kind: str, users: Sequence[str], asset: str, amounts: Sequence[int] | Sequence[str]
    ) -> None:
        first = amounts[0]
        # Most runs have equal amounts, but for those of envelopes. So their text is made once.
        if len(users) == len(amounts) == amounts.count(first):
            after = f"\t{asset}\t{first}"
            text = kind + f"{after}\n{kind}".join(users) + after
        else:
            after = f"\t{asset}\t"
            changes = zip(users, amounts, strict=True)
            text = "\n".join([f"{kind}{user}{after}{amount}" for user, amount in changes])
        self._texts.append(text)
        # Names of users are ASCII.
        self._bytes += len(text) + len(users) * _LINE_BYTES

    def _add_change(self, account: str, asset: str, amount: int | str) -> None:
        line = f"{account}\t{asset}\t{amount}"
        self._texts.append(line)
        # One character beyond U+FFFF in a text makes all of its characters take 4 bytes.
        self._bytes += getsizeof(line) + 8

    def _make_room(self) -> None:
        if self._bytes + len(self._debits) * _DEBIT_BYTES <= self._bytes_max:
            return
        self._texts = [line for piece in added_up(self._lines()) for line in piece.split("\n")[:-1]]
        self._bytes = sum(map(getsizeof, self._texts)) + 8 * len(self._texts)
        if self._bytes + len(self._debits) * _DEBIT_BYTES > self._bytes_max // 2:
            self._are_too_many = True
            self._texts.clear()
            self._debits.clear()

    def _lines(self) -> list[str]:
        """The lines, which are no longer kept then."""
        lines: list[str] = []
        self._texts.reverse()
        while self._texts:
            lines += self._texts.pop().split("\n")
        return lines


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
