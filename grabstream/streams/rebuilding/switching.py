"""Switching the live version, so that no reader sees a mixture, goes back in time, or queues behind it
for more than VIEWS_LOCK_MS.

The live version's cursors are locked while the version that replaces it catches up to them. Then the switch
waits until no session has an older snapshot, and replaces the views in the transaction that holds the
cursors.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import AsyncConnection, sql

from grabstream.models.journal import Cursor
from grabstream.projections import versions
from grabstream.projections.database.sessions import system_name
from grabstream.projections.database.system import other_systems
from grabstream.projections.versions import Version
from grabstream.streams.rebuilding.reading import RebuildStopped

LOCK_SECONDS: Final = 2.0
VIEWS_LOCK_MS: Final = 100
SNAPSHOTS_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.05
RETRY_SECONDS: Final = 0.5


class Busy(Exception):
    """Readers or writers hold locks that a switch needs, for now; the text names them."""


class Switch(NamedTuple):
    """A switch of main schema `schema` from version `live` to `chosen`. With `keep`, the live version becomes
    the previous one.

    `near` brings the chosen version close while nothing is locked, `reach` brings it to the locked cursors;
    both may raise Busy. If `live` is None, because its tables are gone, nothing is locked. `lock_connection`
    is in autocommit; `wait` is called with the reason of each retry.
    """

    lock_connection: AsyncConnection[Any]
    schema: str
    live: Version | None
    chosen: Version
    near: Callable[[], Awaitable[None]]
    reach: Callable[[Mapping[int, Cursor]], Awaitable[None]]
    keep: bool
    wait: Callable[[str], None]

    async def run(self, patience_seconds: float) -> None:
        """Tries until it succeeds; raises RebuildStopped if readers or writers hold locks for longer."""
        deadline = time.monotonic() + patience_seconds
        while (reason := await self._try()) is not None:
            if time.monotonic() > deadline:
                raise RebuildStopped(
                    f"not switched within {patience_seconds:.0f} s: {reason}. No data is lost: repeat the "
                    "command to try again"
                )
            self.wait(reason)
            await asyncio.sleep(RETRY_SECONDS)
        await versions.sweep(self.lock_connection, self.schema, self.chosen.projection)

    async def _try(self) -> str | None:
        """Returns why it cannot succeed now; None if it has."""
        try:
            await self.near()
            async with self.lock_connection.transaction():
                await self._set_lock_timeout(int(LOCK_SECONDS * 1000))
                await self.reach(
                    await cursors_of(self.lock_connection, self.live, lock=True)
                    if self.live is not None
                    else {}
                )
                await older_snapshots_gone(self.lock_connection, self.schema)
                # Readers queue behind us while we wait for this lock: so we wait briefly, and try again
                # later.
                await self._set_lock_timeout(VIEWS_LOCK_MS)
                await versions.switch_views(self.lock_connection, self.schema, self.chosen, self.keep)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            return f"the views are in use by open transactions ({error.diag.message_primary})"
        except Busy as busy:
            return str(busy)
        except versions.ViewsInUse as error:
            raise RebuildStopped(str(error)) from None
        return None

    async def _set_lock_timeout(self, milliseconds: int) -> None:
        await self.lock_connection.execute(
            "SELECT set_config('lock_timeout', %s, true)", (f"{milliseconds}ms",)
        )


async def older_snapshots_gone(
    connection: AsyncConnection[Any], schema: str, seconds: float = SNAPSHOTS_SECONDS
) -> None:
    """Returns when no session that may read `schema` has a snapshot from before this call; after `seconds`,
    raises Busy, which names the sessions.

    A transaction with such a snapshot would see the tables of the new version as they were at the snapshot:
    older than the live version, or empty. Any role may call this.
    """
    older = await with_snapshot(connection, schema)
    deadline = time.monotonic() + seconds
    while older:
        if time.monotonic() > deadline:
            raise Busy(
                f"transactions with an older snapshot are open ({', '.join(sorted(older.values())[:5])})"
            )
        await asyncio.sleep(POLL_SECONDS)
        now = await with_snapshot(connection, schema)
        older = {transaction: words for transaction, words in older.items() if transaction in now}


#: Every role sees `backend_xmin` and all locks of any session. Only members of a session's role, or of
#: pg_read_all_stats, see its type, times and waits. `backend_xmin` may grow while the snapshot stays, so a
#: session is recognised by its transaction.
_WITH_SNAPSHOT: Final = """
    SELECT session.pid, own.virtualtransaction,
        format('pid %%s, %%s', session.pid, concat_ws(', ', usename, nullif(application_name, ''))),
        CASE WHEN EXISTS (
            SELECT FROM pg_locks AS wanted WHERE wanted.pid = session.pid AND NOT wanted.granted)
            THEN pg_blocking_pids(session.pid) ELSE '{}' END,
        split_part(application_name, ':', 1) = ANY (%s)
    FROM pg_stat_activity AS session JOIN pg_locks AS own
        ON own.pid = session.pid AND own.locktype = 'virtualxid' AND own.mode = 'ExclusiveLock'
    WHERE datname = current_database() AND usesysid IS NOT NULL AND session.pid <> pg_backend_pid()
        AND backend_xmin IS NOT NULL
        AND coalesce(backend_type, 'client backend') = 'client backend'
"""


async def with_snapshot(connection: AsyncConnection[Any], schema: str) -> dict[tuple[int, str], str]:
    """Transactions that have a snapshot and may read `schema`, in words, by process and virtual transaction.

    Excludes those that wait for us, as workers do, and the sessions of other systems, which never read it.
    The sessions of other systems are recognised by name. A program that uses such a name loses the guarantee
    that a switch gives.
    """
    others = {system_name(other) for other in await other_systems(connection, schema)} - {system_name(schema)}
    # Within a transaction, the statistics of sessions are cached until this call.
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    sessions = await (await connection.execute(_WITH_SNAPSHOT, (list(others),))).fetchall()
    waiting_for_us = {connection.info.backend_pid}
    while (
        newly_found := {pid for pid, _, _, blockers, _ in sessions if waiting_for_us & set(blockers)}
        - waiting_for_us
    ):
        waiting_for_us |= newly_found
    return {
        (pid, transaction): words
        for pid, transaction, words, _, other in sessions
        if pid not in waiting_for_us and not other
    }


async def cursors_of(
    connection: AsyncConnection[Any], version: Version, lock: bool = False
) -> dict[int, Cursor]:
    """The cursors of a version. With `lock`, they are locked in the caller's transaction, so that no worker
    writes that version.
    """
    query = sql.SQL(
        "SELECT shard, seq, head, next_offset, term, owner FROM {} WHERE projection = %s ORDER BY shard {}"
    ).format(sql.Identifier(version.schema, "projection_cursors"), sql.SQL("FOR UPDATE" if lock else ""))
    rows = await connection.execute(query, (version.projection,))
    return {
        shard: Cursor(seq, bytes(head), offset, term, owner)
        for shard, seq, head, offset, term, owner in await rows.fetchall()
    }
