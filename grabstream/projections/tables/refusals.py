"""A bounded sample of single refusals. Refusals are not events: no rebuild restores them, and the oldest are
deleted.
"""

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from grabstream.projections.database.migrate import use_schema

_COLUMNS = (
    "at, type, command, offer, user_id, grab, quantity, code, retry_at, limit_name, limit_left, "
    "units_left, message"
)


async def store(
    connection: AsyncConnection[Any], schema: str, rows: Sequence[tuple[Any, ...]], rows_max: int,
    oldest_at: int
) -> None:  # fmt: skip
    """Adds rows, with columns in the order of `Refusal` in `gate/refusals.py`. Deletes all but the newest
    `rows_max` rows, and rows before `oldest_at` (ms since 1970 UTC).
    """
    async with connection.transaction():
        await use_schema(connection, schema)
        async with (
            connection.cursor() as cursor,
            cursor.copy(f"COPY refusals_1 ({_COLUMNS}) FROM STDIN".encode()) as copy,
        ):
            for row in rows:
                await copy.write_row(row)
        # Ids increase by one, so the bound follows from the newest id, without counting rows.
        await connection.execute(
            "DELETE FROM refusals_1 WHERE id <= (SELECT max(id) FROM refusals_1) - %s", (rows_max,)
        )
        # Ids are nearly in the order of the times, so checking the oldest rows suffices.
        await connection.execute(
            "DELETE FROM refusals_1 WHERE id IN (SELECT id FROM refusals_1 ORDER BY id LIMIT 10000) AND at < "
            "%s",
            (oldest_at,),
        )
