"""Demand: the counts of refusals by offer, outcome and second. Refusals are not events; Redis counts them,
and the counts are absolute numbers.
"""

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from grabstream.projections.database.migrate import use_schema


async def record(
    connection: AsyncConnection[Any], schema: str, shard: int, rows: Sequence[tuple[int, int, str, int]]
) -> None:
    """Writes rows (second, outcome code, offer, refusals). Writing the same rows again changes nothing."""
    async with connection.transaction():
        await use_schema(connection, schema)
        await connection.execute(
            "INSERT INTO demand_1 AS d (shard, second, code, offer, refusals) "
            "SELECT %s, * FROM unnest(%s::bigint[], %s::integer[], %s::text[], %s::bigint[]) "
            "ON CONFLICT (shard, second, code, offer) DO UPDATE SET refusals = greatest(d.refusals, "
            "excluded.refusals)",
            (shard, *([row[column] for row in rows] for column in range(4))),
        )
