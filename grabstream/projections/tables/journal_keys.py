"""The public keys with which relays have signed records of a journal."""

from collections.abc import Mapping
from typing import Any

from psycopg import AsyncConnection


async def find_all(connection: AsyncConnection[Any], journal: str) -> dict[str, str]:
    """The keys of a journal by id, in base64, the oldest first."""
    rows = await connection.execute(
        "SELECT key_id, public_key FROM journal_keys WHERE journal = %s ORDER BY recorded_at, key_id",
        (journal,),
    )
    return dict(await rows.fetchall())


async def store(connection: AsyncConnection[Any], journal: str, keys: Mapping[str, str]) -> None:
    """Records keys by id, unless they are recorded."""
    await connection.execute(
        "INSERT INTO journal_keys (journal, key_id, public_key) "
        "SELECT %s, * FROM unnest(%s::text[], %s::text[]) ON CONFLICT (journal, key_id) DO NOTHING",
        (journal, list(keys), list(keys.values())),
    )


async def take_over(connection: AsyncConnection[Any], journal: str, earlier: str) -> None:
    """Records for a copied journal the keys of the original."""
    await store(connection, journal, await find_all(connection, earlier))
