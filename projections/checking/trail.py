"""Reading the audit trail: lines as they were journaled, from any seq on, and the chain's hash at any seq."""

from typing import Any

from psycopg import AsyncConnection

from grabstream.models.journal import GENESIS


async def hash_at(connection: AsyncConnection[Any], shard: int, seq: int) -> bytes | None:
    """The chain's hash behind an event; None when the trail does not have it (any more, or yet)."""
    if seq == 0:
        return GENESIS
    found = await (
        await connection.execute("SELECT hash FROM audit WHERE shard = %s AND seq = %s", (shard, seq))
    ).fetchone()
    return bytes(found[0]) if found else None


async def lines(
    connection: AsyncConnection[Any], shard: int, behind_seq: int, limit: int
) -> list[tuple[int, bytes, bytes]]:
    """At most `limit` (seq, line, hash) that follow a seq, in order."""
    found = await connection.execute(
        "SELECT seq, body, hash FROM audit WHERE shard = %s AND seq > %s ORDER BY seq LIMIT %s",
        (shard, behind_seq, limit),
    )
    return [(seq, body.encode(), bytes(hash_)) for seq, body, hash_ in await found.fetchall()]


async def ends(connection: AsyncConnection[Any], shard: int) -> tuple[int, int]:
    """The first and the last seq of a shard that the trail has; (0, 0) when it has none."""
    found = await connection.execute(
        "SELECT coalesce(min(seq), 0), coalesce(max(seq), 0) FROM audit WHERE shard = %s", (shard,)
    )
    first, last = await found.fetchone() or (0, 0)
    return int(first), int(last)


async def last_seq_before(connection: AsyncConnection[Any], shard: int, at: int) -> int:
    """The last seq whose event is earlier than a time (ms since 1970 UTC); one less than the first when none
    is.

    A shard's clock never goes back, so the seq can be searched by halves: there is no index by time.
    """
    low, high = await ends(connection, shard)
    low -= 1
    while low < high:
        middle = (low + high + 1) // 2
        # Of a trail with holes the next event that is there answers; whoever reads on from here meets the
        # hole.
        query = "SELECT at FROM audit WHERE shard = %s AND seq >= %s ORDER BY seq LIMIT 1"
        found = await (await connection.execute(query, (shard, middle))).fetchone()
        if found is not None and found[0] < at:
            low = middle
        else:
            high = middle - 1
    return max(low, 0)
