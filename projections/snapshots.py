"""The audit trail as a snapshot of a shard: how far it is, and the events of campaigns that are still there.

What has retired left nothing in Redis but its name, and a campaign whose last offer retired left nothing at all; so of ten million
past events those of few offers are read, by the index on their offer.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection

from models.events import AnyEvent, decode_event_list
from models.identifiers import campaign_of
from models.journal import Cursor

ROWS_AT_ONCE: Final = 2_000


class Trail(NamedTuple):
    """The trail of a shard up to a cursor: the time there (ms), offers that have retired, and those whose events are needed."""

    cursor: Cursor
    at: int
    retired: Sequence[str]
    needed: Sequence[str]


async def newest(connection: AsyncConnection[Any], shard: int) -> Cursor:
    """How far the trail of a shard is; its beginning, when events of it were set aside: what is folded then is not what was decided."""
    if await _has_gap(connection, shard):
        return Cursor()
    found = await connection.execute(
        "SELECT seq, head, next_offset, term, owner FROM cursors WHERE projection = 'audit' AND shard = %s", (shard,)
    )
    row = await found.fetchone()
    return Cursor(row[0], bytes(row[1]), *row[2:]) if row else Cursor()


async def _has_gap(connection: AsyncConnection[Any], shard: int) -> bool:
    found = await connection.execute(
        "SELECT EXISTS (SELECT FROM set_aside WHERE projection = 'audit' AND shard = %s AND count > 0 AND in_force)", (shard,)
    )
    [has_gap] = await found.fetchone() or [False]
    return bool(has_gap)


async def trail_of(connection: AsyncConnection[Any], shard: int) -> Trail | None:
    """The trail as the connection's transaction sees it, which must be REPEATABLE READ; None while it is empty, or has
    gaps."""
    cursor = await newest(connection, shard)
    at = await (await connection.execute("SELECT at FROM audit WHERE shard = %s AND seq = %s", (shard, cursor.seq))).fetchone()
    if at is None:
        return None
    found = await connection.execute(
        "SELECT offer, bool_or(type = 'offer.retired') FROM audit "
        "WHERE shard = %s AND seq <= %s AND type IN ('offer.opened', 'offer.retired') GROUP BY offer",
        (shard, cursor.seq),
    )
    has_retired = dict(await found.fetchall())
    present = {campaign_of(offer) for offer, retired in has_retired.items() if not retired}
    retired = [offer for offer, gone in has_retired.items() if gone]
    return Trail(cursor, at[0], retired, [offer for offer in has_retired if campaign_of(offer) in present])


async def events_of(connection: AsyncConnection[Any], shard: int, trail: Trail) -> AsyncIterator[Sequence[AnyEvent]]:
    """The events of the offers that are needed, in order."""
    async with connection.cursor("trail") as rows:
        await rows.execute(
            "SELECT body FROM audit WHERE shard = %s AND offer = ANY(%s) AND seq <= %s ORDER BY seq",
            (shard, list(trail.needed), trail.cursor.seq),
        )
        while found := await rows.fetchmany(ROWS_AT_ONCE):
            yield decode_event_list(b"[" + b",".join(body.encode() for (body,) in found) + b"]")
