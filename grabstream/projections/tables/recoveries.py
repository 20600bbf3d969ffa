"""Recoveries of shards, and the decisions that were lost by them, for `status`, `doctor`, and operators who
must inform users.
"""

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from grabstream.projections.database.migrate import use_schema

#: shard, seq, told_by, command, offer, user, outcome, amount, event text
Lost = tuple[int, int, str, str, str, str | None, str, int | None, str | None]


async def record_recovery(
    connection: AsyncConnection[Any], schema: str, row: Sequence[Any], lost: Sequence[Lost]
) -> None:
    """Writes a recovery (shard, term, kind, problem, redis_seq, journal_seq, snapshot_seq, applied, seconds)
    and the decisions that were lost by it.
    """
    async with connection.transaction():
        await use_schema(connection, schema)
        await connection.execute(
            "INSERT INTO recoveries (shard, term, kind, problem, redis_seq, journal_seq, snapshot_seq, "
            "applied, seconds) "
            "VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
            row,
        )
        await _insert_lost(connection, lost)


async def record_lost(connection: AsyncConnection[Any], schema: str, lost: Sequence[Lost]) -> None:
    """Writes decisions that were lost by a recovery."""
    async with connection.transaction():
        await use_schema(connection, schema)
        await _insert_lost(connection, lost)


async def _insert_lost(connection: AsyncConnection[Any], lost: Sequence[Lost]) -> None:
    if lost:
        async with (
            connection.cursor() as cursor,
            cursor.copy(
                "COPY lost_decisions (shard, seq, told_by, command, offer, user_id, outcome, amount, body) "
                "FROM STDIN"
            ) as copy,
        ):
            for row in lost:
                await copy.write_row(row)
