"""Refusals that are kept: a bounded sample, the newest. They are no events: nothing is rebuilt from them, and
the oldest go.
"""

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from grabstream.projections.database.migrate import use_schema

_COLUMNS = (
    "at, type, command, offer, user_id, grab, quantity, code, retry_at, limit_name, limit_left, "
    "units_left, message"
)


async def record(
    connection: AsyncConnection[Any], schema: str, rows: Sequence[tuple[Any, ...]], rows_max: int,
    oldest_at: int
) -> None:  # fmt: skip
    """Adds rows in the order of `Refusal` in `lua/gate/refusals.py`; forgets all but the newest `rows_max`,
    and those before `oldest_at` (ms).
    """
    async with connection.transaction():
        await use_schema(connection, schema)
        async with (
            connection.cursor() as cursor,
            cursor.copy(f"COPY refusals_1 ({_COLUMNS}) FROM STDIN".encode()) as copy,
        ):
            for row in rows:
                await copy.write_row(row)
        # Ids are given out in order: this many back from the newest is the bound, without counting.
        await connection.execute(
            "DELETE FROM refusals_1 WHERE id <= (SELECT max(id) FROM refusals_1) - %s", (rows_max,)
        )
        # They come nearly in the order of their times: a few of the oldest are looked at.
        await connection.execute(
            "DELETE FROM refusals_1 WHERE id IN (SELECT id FROM refusals_1 ORDER BY id LIMIT 10000) AND at < "
            "%s",
            (oldest_at,),
        )
