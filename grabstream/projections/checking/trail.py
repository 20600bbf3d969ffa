"""Reading the audit trail: rows from any seq on, and the hash of the chain at any seq."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection

from grabstream.models.events import AnyEvent
from grabstream.models.journal import GENESIS
from grabstream.models.runs import AnyRun


class TrailRow(NamedTuple):
    """A row of the audit trail: the text of a line, the hash of the chain after it, and the copies of its
    fields in the other columns.
    """

    seq: int
    offer: str
    type: str
    at: int
    body: str
    hash: bytes
    seqs: int

    @property
    def last_seq(self) -> int:
        """The last seq that it takes."""
        return self.seq + self.seqs - 1

    @property
    def text(self) -> bytes:
        """The hashed text."""
        return self.body.encode()


#: The columns in SQL, in the order of `TrailRow`.
COLUMNS: Final = ", ".join(TrailRow._fields)
#: More than any seq.
_NO_END: Final = 2**63 - 1


def row_of(event: AnyEvent | AnyRun, body: str, hash: bytes) -> TrailRow:
    """The row that a line must have."""
    return TrailRow(
        event.seq, event.offer, str(event.__struct_config__.tag), event.at, body, hash, event.seqs
    )


def row_read(values: Sequence[Any]) -> TrailRow:
    """A row from the values of COLUMNS."""
    seq, offer, type_, at, body, hash_, seqs = values
    return TrailRow(seq, offer, type_, at, body, bytes(hash_), seqs)


async def hash_at(connection: AsyncConnection[Any], shard: int, seq: int) -> bytes | None:
    """The hash of the chain after the line that ends with a seq; None if the trail has no such line."""
    if seq == 0:
        return GENESIS
    line = await line_at(connection, shard, seq)
    return line.hash if line is not None and line.last_seq == seq else None


async def line_at(connection: AsyncConnection[Any], shard: int, seq: int) -> TrailRow | None:
    """The row of the line that has a seq; None if the trail does not have it."""
    rows = await connection.execute(
        f"SELECT {COLUMNS} FROM audit WHERE shard = %s AND seq <= %s ORDER BY seq DESC LIMIT 1",  # noqa: S608
        (shard, seq),
    )
    found = list(map(row_read, await rows.fetchall()))
    return found[0] if found and found[0].last_seq >= seq else None


async def lines(
    connection: AsyncConnection[Any], shard: int, after_seq: int, limit: int, to_seq: int = _NO_END
) -> list[TrailRow]:
    """The rows of the lines after a seq, up to `to_seq`, in order, until they take `limit` seqs."""
    rows = await connection.execute(
        f"SELECT {COLUMNS} FROM (SELECT *, sum(seqs) OVER (ORDER BY seq) - seqs AS before FROM ("  # noqa: S608
        f"SELECT {COLUMNS} FROM audit WHERE shard = %s AND seq > %s AND seq <= %s ORDER BY seq LIMIT %s"
        ") AS page) AS counted WHERE before < %s ORDER BY seq",
        (shard, after_seq, to_seq, limit, limit),
    )
    return list(map(row_read, await rows.fetchall()))


async def ends(connection: AsyncConnection[Any], shard: int) -> tuple[int, int]:
    """The first and the last seq of a shard in the trail; (0, 0) if it has none."""
    rows = await connection.execute(
        "SELECT coalesce(min(seq), 0), coalesce((SELECT seq + seqs - 1 FROM audit WHERE shard = %(shard)s "
        "ORDER BY seq DESC LIMIT 1), 0) FROM audit WHERE shard = %(shard)s",
        {"shard": shard},
    )
    first, last = await rows.fetchone() or (0, 0)
    return int(first), int(last)


async def last_seq_before(connection: AsyncConnection[Any], shard: int, at: int) -> int:
    """The last seq whose event is before a time (ms since 1970 UTC); if there is none, the first seq minus 1.

    The clock of a shard never goes back, so this is a binary search by seq. There is no index by time.
    """
    low, high = await ends(connection, shard)
    low -= 1
    while low < high:
        middle = (low + high + 1) // 2
        # If the trail lacks this event, the next one decides; a reader from this seq on then reports the gap.
        query = "SELECT at FROM audit WHERE shard = %s AND seq >= %s ORDER BY seq LIMIT 1"
        row = await (await connection.execute(query, (shard, middle))).fetchone()
        if row is not None and row[0] < at:
            low = middle
        else:
            high = middle - 1
    # This is the first seq of its line.
    line = await line_at(connection, shard, max(low, 0))
    return max(low, 0) if line is None else line.last_seq
