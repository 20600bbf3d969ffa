"""Keys of users, sealed, under which events have sealed their metadata; and the users forgotten."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import class_row


class SealedUserKey(NamedTuple):
    """The key of a user; `sealed_key` is sealed with a seal key."""

    user_id: str
    key_name: str
    sealed_key: str


class Forgetting(NamedTuple):
    """The deletions of `forget`: the name of the user's key (None: there was none), and the number of kept
    refusals.
    """

    key_name: str | None
    refusals: int


async def find(connection: AsyncConnection[Any], users: Collection[str]) -> list[SealedUserKey]:
    """The keys of these users that exist."""
    async with connection.cursor(row_factory=class_row(SealedUserKey)) as cursor:
        await cursor.execute(
            "SELECT user_id, key_name, sealed_key FROM user_keys WHERE user_id = ANY(%s)", (list(users),)
        )
        return await cursor.fetchall()


async def add(connection: AsyncConnection[Any], keys: Sequence[SealedUserKey]) -> None:
    """Adds keys of users that have none; a user who has one keeps it."""
    # In the order of the users: two gates that add the same ones do not deadlock.
    columns = [list(column) for column in zip(*sorted(keys), strict=True)]
    await connection.execute(
        "INSERT INTO user_keys (user_id, key_name, sealed_key) "
        "SELECT * FROM unnest(%s::text[], %s::text[], %s::text[]) ON CONFLICT (user_id) DO NOTHING",
        columns,
    )


async def sealed_by_others(
    connection: AsyncConnection[Any], key_id: str, after: str, most: int
) -> list[SealedUserKey]:
    """The keys sealed by another seal key, or by this one in another form, by user, after one user."""
    async with connection.cursor(row_factory=class_row(SealedUserKey)) as cursor:
        await cursor.execute(
            "SELECT user_id, key_name, sealed_key FROM user_keys "
            "WHERE user_id > %s AND NOT starts_with(sealed_key, %s) ORDER BY user_id LIMIT %s",
            (after, f"{key_id}:", most),
        )
        return await cursor.fetchall()


async def reseal(connection: AsyncConnection[Any], old: SealedUserKey, sealed_key: str) -> bool:
    """Replaces the sealed text of a key; False if the key was changed or deleted meanwhile."""
    done = await connection.execute(
        "UPDATE user_keys SET sealed_key = %s WHERE user_id = %s AND sealed_key = %s",
        (sealed_key, old.user_id, old.sealed_key),
    )
    return done.rowcount == 1


async def would_forget(connection: AsyncConnection[Any], user: str) -> Forgetting:
    """What `forget` would delete."""
    keys = await find(connection, [user])
    counted = await connection.execute("SELECT count(*) FROM refusals_1 WHERE user_id = %s", (user,))
    [refusals] = await counted.fetchone() or (0,)
    return Forgetting(keys[0].key_name if keys else None, refusals)


async def forget(connection: AsyncConnection[Any], user: str, digest: str, by_name: str) -> Forgetting:
    """Deletes the key and the kept refusals of a user, and records it, in the caller's transaction."""
    deleted = await connection.execute("DELETE FROM user_keys WHERE user_id = %s RETURNING key_name", (user,))
    row = await deleted.fetchone()
    refusals = (await connection.execute("DELETE FROM refusals_1 WHERE user_id = %s", (user,))).rowcount
    done = Forgetting(row[0] if row else None, refusals)
    await connection.execute(
        "INSERT INTO forgotten (by_name, user_digest, had_key, refusals) VALUES (%s, %s, %s, %s)",
        (by_name, digest, done.key_name is not None, refusals),
    )
    return done


async def times_forgotten(
    connection: AsyncConnection[Any], digests: Sequence[str]
) -> list[Mapping[str, Any]]:
    """When the user with one of these digests was forgotten, and by whom, the first time first."""
    rows = await connection.execute(
        "SELECT at, by_name FROM forgotten WHERE user_digest = ANY(%s) ORDER BY id", (list(digests),)
    )
    return [{"at": at, "by": by_name} for at, by_name in await rows.fetchall()]
