"""Seal keys: their fingerprints, which of them are retired, and the places of texts that a key has sealed."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import class_row


class SealKey(NamedTuple):
    """A seal key of the system. `retired_at` is set once processes no longer need the key."""

    key_id: str
    fingerprint: str
    retired_at: datetime | None


class Uses(NamedTuple):
    """Texts sealed by a key that are still needed: seeds of open envelopes, coupon codes of offers that have
    not retired (counted in offers), secrets of webhooks, and keys of users.
    """

    envelopes: int
    code_lists: int
    webhooks: int
    user_keys: int = 0

    @property
    def is_any(self) -> bool:
        """Whether the key is needed."""
        return any(self)


async def find_all(connection: AsyncConnection[Any]) -> list[SealKey] | None:
    """All keys, the oldest first; None if the table is missing: `init` has not made the schema."""
    row = await (await connection.execute("SELECT to_regclass('seal_keys') IS NOT NULL")).fetchone()
    if not row or not row[0]:
        return None
    async with connection.cursor(row_factory=class_row(SealKey)) as cursor:
        await cursor.execute(
            "SELECT key_id, fingerprint, retired_at FROM seal_keys ORDER BY recorded_at, key_id"
        )
        return await cursor.fetchall()


async def store(connection: AsyncConnection[Any], fingerprints: Mapping[str, str]) -> list[str]:
    """Records keys by id. Returns the ids that were new."""
    rows = await connection.execute(
        "INSERT INTO seal_keys (key_id, fingerprint) SELECT * FROM unnest(%s::text[], %s::text[]) "
        "ON CONFLICT (key_id) DO NOTHING RETURNING key_id",
        (list(fingerprints), list(fingerprints.values())),
    )
    return [key_id for (key_id,) in await rows.fetchall()]


async def retire(connection: AsyncConnection[Any], key_id: str) -> None:
    """Records that processes no longer need a key."""
    await connection.execute(
        "UPDATE seal_keys SET retired_at = coalesce(retired_at, now()) WHERE key_id = %s", (key_id,)
    )


# The id of the key is the text before the first colon or `~` of a sealed text. The events of an offer are
# found by their index. Codes are at the end of an event of up to 200 kB, and only their beginning is needed.
_USES: Final = r"""
    WITH present AS (
        SELECT shard, offer, max(body) FILTER (WHERE type = 'offer.opened') AS opened
        FROM audit WHERE type IN ('offer.opened', 'offer.retired')
        GROUP BY shard, offer HAVING NOT bool_or(type = 'offer.retired')
    ), sealed AS (
        SELECT substring(opened FROM '"sealed_seed":"([A-Za-z0-9._-]+)') AS key_id, 'envelope' AS what, offer
        FROM present WHERE opened LIKE '%"sealed_seed":"%' AND NOT EXISTS (
            SELECT FROM audit AS closed WHERE closed.offer = present.offer
                AND closed.shard = present.shard AND closed.type = 'offer.closed'
        )
        UNION
        SELECT substring(left(body, 2000) FROM '"items":\["([A-Za-z0-9._-]+)'), 'codes', offer
        FROM audit WHERE type = 'offer.loaded' AND left(body, 1000) LIKE '%"what":"codes"%'
            AND offer IN (SELECT offer FROM present WHERE opened LIKE '%"kind":"coupon"%')
        UNION
        SELECT substring(sealed_secret FROM '^[A-Za-z0-9._-]+'), 'webhook', webhook FROM webhooks
        UNION
        SELECT substring(previous_sealed_secret FROM '^[A-Za-z0-9._-]+'), 'webhook', webhook FROM webhooks
        WHERE previous_until > now()
        UNION
        SELECT substring(sealed_key FROM '^[A-Za-z0-9._-]+'), 'user_key', user_id FROM user_keys
    )
    SELECT key_id, count(*) FILTER (WHERE what = 'envelope'), count(*) FILTER (WHERE what = 'codes'),
           count(*) FILTER (WHERE what = 'webhook'), count(*) FILTER (WHERE what = 'user_key')
    FROM sealed WHERE key_id IS NOT NULL GROUP BY key_id ORDER BY key_id
"""


async def uses(connection: AsyncConnection[Any]) -> dict[str, Uses]:
    """The uses of each key, by its id, from the audit trail and the webhooks. It reads the events of all
    present offers with codes.
    """
    rows = await connection.execute(_USES.encode())
    return {key_id: Uses(*counts) for key_id, *counts in await rows.fetchall()}
