"""Switching what is shown, so that no reader sees a mixture, goes back in time, or queues behind us.

The live version's cursors are held while the one that takes its place comes to them; then nobody may have a
snapshot from before, and the views are replaced in the transaction that holds the cursors.
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
from grabstream.streams.rebuilding.reading import RebuildRefused

LOCK_SECONDS: Final = 2.0
VIEWS_LOCK_MS: Final = 100
SNAPSHOTS_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.05
RETRY_SECONDS: Final = 0.5


class Busy(Exception):
    """Readers or writers hold what a switch needs, for now; the text says who."""


class Switch(NamedTuple):
    """A switch of main schema `schema` from `live` to `chosen`; what was live is kept as the previous
    version, or not.

    `near` brings the chosen one close while nothing is held, `reach` to the cursors that are held; both may
    raise Busy. Without a `live` one, whose tables are gone, nothing is held. `control` is a connection in
    autocommit, `wait` is told why it has to be tried again.
    """

    control: AsyncConnection[Any]
    schema: str
    live: Version | None
    chosen: Version
    near: Callable[[], Awaitable[None]]
    reach: Callable[[Mapping[int, Cursor]], Awaitable[None]]
    keep: bool
    wait: Callable[[str], None]

    async def run(self, patience_seconds: float) -> None:
        """Tries until it is done; raises Refused when readers or writers have not let go for so long."""
        deadline = time.monotonic() + patience_seconds
        while (reason := await self._try()) is not None:
            if time.monotonic() > deadline:
                raise RebuildRefused(
                    f"not switched within {patience_seconds:.0f} s: {reason}. Nothing is lost: the same "
                    "command tries again"
                )
            self.wait(reason)
            await asyncio.sleep(RETRY_SECONDS)
        await versions.sweep(self.control, self.schema, self.chosen.projection)

    async def _try(self) -> str | None:
        """Why it could not be done for now; None when it is done."""
        try:
            await self.near()
            async with self.control.transaction():
                await self._set_lock_timeout(int(LOCK_SECONDS * 1000))
                await self.reach(
                    await cursors_of(self.control, self.live, lock=True) if self.live is not None else {}
                )
                await older_snapshots_gone(self.control, self.schema)
                # Readers queue behind us while we wait: not for long, and then we come again.
                await self._set_lock_timeout(VIEWS_LOCK_MS)
                await versions.show(self.control, self.schema, self.chosen, self.keep)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected) as error:
            return f"the views are in use by open transactions ({error.diag.message_primary})"
        except Busy as busy:
            return str(busy)
        except versions.ViewsInUse as error:
            raise RebuildRefused(str(error)) from None
        return None

    async def _set_lock_timeout(self, milliseconds: int) -> None:
        await self.control.execute("SELECT set_config('lock_timeout', %s, true)", (f"{milliseconds}ms",))


async def older_snapshots_gone(
    connection: AsyncConnection[Any], schema: str, seconds: float = SNAPSHOTS_SECONDS
) -> None:
    """Returns when nobody who may read `schema` has a snapshot from before this call; raises Busy, which says
    who has one, after that time.

    In such a snapshot a table that was filled since would be older, or empty, whatever view it is read
    through. Any role may ask.
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


#: Of another role's session, everybody is shown `backend_xmin` and all locks; the kind of a session, its
#: times and its waits only members of that role or of pg_read_all_stats. `backend_xmin` may grow while the
#: snapshot stays, so the transaction is what is recognised again.
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
    """Transactions that have a snapshot and may read `schema`, by process and virtual transaction, in words.

    Without those that wait for us, as workers do, and without other systems, which never read it: theirs is a
    session that has the name which a system of this database gives to its own. Who takes such a name for
    another program gives up what a switch promises, for it.
    """
    others = {system_name(other) for other in await other_systems(connection, schema)} - {system_name(schema)}
    # What a transaction was once shown of the sessions it is shown again, until this.
    await connection.execute("SELECT pg_stat_clear_snapshot()")
    found = await (await connection.execute(_WITH_SNAPSHOT, (list(others),))).fetchall()
    waiting_for_us = {connection.info.backend_pid}
    while (
        more := {pid for pid, _, _, blockers, _ in found if waiting_for_us & set(blockers)} - waiting_for_us
    ):
        waiting_for_us |= more
    return {
        (pid, transaction): words
        for pid, transaction, words, _, other in found
        if pid not in waiting_for_us and not other
    }


async def cursors_of(
    connection: AsyncConnection[Any], version: Version, lock: bool = False
) -> dict[int, Cursor]:
    """The cursors of a version; held in the caller's transaction with `lock`, so that nobody writes that
    version.
    """
    query = sql.SQL(
        "SELECT shard, seq, head, next_offset, term, owner FROM {} WHERE projection = %s ORDER BY shard {}"
    ).format(sql.Identifier(version.schema, "projection_cursors"), sql.SQL("FOR UPDATE" if lock else ""))
    found = await connection.execute(query, (version.projection,))
    return {
        shard: Cursor(seq, bytes(head), offset, term, owner)
        for shard, seq, head, offset, term, owner in await found.fetchall()
    }
