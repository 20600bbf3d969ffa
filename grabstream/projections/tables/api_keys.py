"""API keys of the services that call the gateway: their names, scopes, times, and the SHA-256 of their
secrets.

A key has one secret, and for a time after a rotation the one before it, too.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import class_row

#: Keys that a system may have, also those that are revoked: every gateway keeps them in memory.
API_KEYS_MAX: Final = 1_000

_COLUMNS: Final = "name, scopes, sha256, previous_until, created_at, rotated_at, expires_at, revoked_at"


class ApiKeyRefused(Exception):
    """A key cannot be created or changed; the text says why, and what to do."""


class ApiKey(NamedTuple):
    """A row of the table. A time that does not apply is None."""

    name: str
    scopes: Sequence[str]
    sha256: bytes
    previous_until: datetime | None
    created_at: datetime
    rotated_at: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None

    def state(self, now: datetime) -> str:
        """`valid`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "valid"


async def load(connection: AsyncConnection[Any]) -> list[ApiKey]:
    """All keys, by name."""
    return await _rows(connection, f"SELECT {_COLUMNS} FROM api_keys ORDER BY name")  # noqa: S608 - the columns are those above


async def create(
    connection: AsyncConnection[Any],
    name: str,
    scopes: Sequence[str],
    sha256: bytes,
    expires_at: datetime | None,
) -> ApiKey:
    """Creates a key; raises ApiKeyRefused when the name was used before, or when there are too many keys."""
    async with connection.transaction():
        # The number of keys is counted, and names are compared, one creation after the other.
        await connection.execute("LOCK TABLE api_keys IN SHARE ROW EXCLUSIVE MODE")
        known = await load(connection)
        if any(key.name == name for key in known):
            raise ApiKeyRefused(
                f"there is a key {name} already, and a name is never used twice; choose another name, or "
                f"`grabstream keys rotate {name}` for a new secret"
            )
        if len(known) >= API_KEYS_MAX:
            raise ApiKeyRefused(f"there are {len(known):,} keys, the maximum of a system")
        [created] = await _rows(
            connection,
            "INSERT INTO api_keys (name, scopes, sha256, expires_at) VALUES (%s, %s, %s, %s) "  # noqa: S608
            f"RETURNING {_COLUMNS}",
            (name, sorted(scopes), sha256, expires_at),
        )
    return created


async def rotate(
    connection: AsyncConnection[Any], name: str, sha256: bytes, grace_ms: int, expires_at: datetime | None
) -> ApiKey:
    """Gives a key a new secret; the previous one is valid for `grace_ms` more, and an earlier one is revoked
    at once. With `expires_at`, the key expires then. Raises ApiKeyRefused for a key that is not valid.
    """
    async with connection.transaction():
        await _require_valid(connection, name)
        [rotated] = await _rows(
            connection,
            "UPDATE api_keys SET sha256 = %s, previous_sha256 = sha256, "  # noqa: S608
            "previous_until = now() + %s * interval '1 millisecond', rotated_at = now(), "
            f"expires_at = coalesce(%s, expires_at) WHERE name = %s RETURNING {_COLUMNS}",
            (sha256, grace_ms, expires_at, name),
        )
    return rotated


async def revoke(connection: AsyncConnection[Any], name: str) -> ApiKey:
    """Revokes a key permanently, with all of its secrets; a revoked key stays as it is. Raises ApiKeyRefused
    for a name that no key has.
    """
    revoked = await _rows(
        connection,
        f"UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE name = %s RETURNING {_COLUMNS}",  # noqa: S608 - the columns are those above
        (name,),
    )
    if not revoked:
        raise _unknown(name)
    return revoked[0]


async def _require_valid(connection: AsyncConnection[Any], name: str) -> None:
    """Locks the row of a key; raises ApiKeyRefused when there is none, or when it is not valid."""
    found = await _rows(connection, f"SELECT {_COLUMNS} FROM api_keys WHERE name = %s FOR UPDATE", (name,))  # noqa: S608 - the columns are those above
    if not found:
        raise _unknown(name)
    [(now,)] = await (await connection.execute("SELECT now()")).fetchall()
    if (state := found[0].state(now)) != "valid":
        raise ApiKeyRefused(f"the key {name} is {state}; create a new one, under another name")


def _unknown(name: str) -> ApiKeyRefused:
    return ApiKeyRefused(f"there is no key {name}; `grabstream keys list` shows the names")


async def _rows(connection: AsyncConnection[Any], query: str, parameters: Sequence[Any] = ()) -> list[ApiKey]:
    async with connection.cursor(row_factory=class_row(ApiKey)) as cursor:
        await cursor.execute(query.encode(), parameters)
        return await cursor.fetchall()
