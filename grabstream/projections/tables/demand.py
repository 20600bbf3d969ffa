"""Demand: the counts of refusals by offer, outcome and second. Refusals are not events; Redis counts them,
and the counts are absolute numbers.
"""

from collections.abc import Sequence
from typing import Any, Final

from psycopg import AsyncConnection

from grabstream.projections.database.migrate import use_schema

#: Old counts that are deleted when new ones are written: more than are written at once, so that they get
#: fewer, and few enough that the write stays short.
DELETED_AT_ONCE_MAX: Final = 5_000
#: By their places in the table: a join by the key could read all of it.
DELETE_OLD: Final = (
    "DELETE FROM demand_1 WHERE ctid = ANY (ARRAY(SELECT ctid FROM demand_1 WHERE shard = %s AND second < %s "
    "ORDER BY second LIMIT %s))"
)
_DAY_SECONDS: Final = 86_400


async def store(
    connection: AsyncConnection[Any],
    schema: str,
    shard: int,
    rows: Sequence[tuple[int, int, str, int]],
    days: int = 0,
) -> None:
    """Writes rows (second, outcome code, offer, refusals). Writing the same rows again changes nothing.

    With `days`, counts of the shard that are older than the newest by more than this of the rows are deleted,
    the oldest first, a few with each call. That is the clock of the shard, not that of a worker, which may be
    wrong.
    """
    async with connection.transaction():
        await use_schema(connection, schema)
        await connection.execute(
            "INSERT INTO demand_1 AS d (shard, second, code, offer, refusals) "
            "SELECT %s, * FROM unnest(%s::bigint[], %s::integer[], %s::text[], %s::bigint[]) "
            "ON CONFLICT (shard, second, code, offer) DO UPDATE SET refusals = greatest(d.refusals, "
            "excluded.refusals)",
            (shard, *([row[column] for row in rows] for column in range(4))),
        )
        if days and rows:
            oldest = max(row[0] for row in rows) - days * _DAY_SECONDS
            await connection.execute(DELETE_OLD, (shard, oldest, DELETED_AT_ONCE_MAX))
