"""Reading the audit trail: lines from any seq on, and the hash of the chain at any seq."""

from typing import Any

from psycopg import AsyncConnection

from grabstream.models.journal import GENESIS


async def hash_at(connection: AsyncConnection[Any], shard: int, seq: int) -> bytes | None:
    """The hash of the chain after an event; None if the trail does not have the event."""
    if seq == 0:
        return GENESIS
    row = await (
        await connection.execute("SELECT hash FROM audit WHERE shard = %s AND seq = %s", (shard, seq))
    ).fetchone()
    return bytes(row[0]) if row else None


async def lines(
    connection: AsyncConnection[Any], shard: int, after_seq: int, limit: int
) -> list[tuple[int, bytes, bytes]]:
    """At most `limit` events after a seq as (seq, line, hash), in order."""
    rows = await connection.execute(
        "SELECT seq, body, hash FROM audit WHERE shard = %s AND seq > %s ORDER BY seq LIMIT %s",
        (shard, after_seq, limit),
    )
    return [(seq, body.encode(), bytes(hash_)) for seq, body, hash_ in await rows.fetchall()]


async def ends(connection: AsyncConnection[Any], shard: int) -> tuple[int, int]:
    """The first and the last seq of a shard in the trail; (0, 0) if it has none."""
    rows = await connection.execute(
        "SELECT coalesce(min(seq), 0), coalesce(max(seq), 0) FROM audit WHERE shard = %s", (shard,)
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
    return max(low, 0)
