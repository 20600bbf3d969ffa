"""Locks of PostgreSQL: work that only one may do at a time, held for as long as the work's connection lives;
and who has a lock that somebody waits for, in words.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from psycopg import AsyncConnection
from psycopg.errors import LockNotAvailable

from grabstream.projections.database.sessions import rename

_LOOK_SECONDS: Final = 0.1


class Held(Exception):
    """Somebody else does this work now, or has what it needs; the text says who."""


async def hold(connection: AsyncConnection[Any], name: str, work: str) -> None:
    """Takes the lock `name` until the connection ends, which is named by its `work` from then on; raises Held
    when somebody has it.
    """
    # Whoever meets the lock is told the process; the work is cut off where there is no room, they know that.
    await rename(connection, f"process {os.getpid()} on {socket.gethostname()}, {work}")
    found = await connection.execute("SELECT pg_try_advisory_lock(hashtext(%s))", (name,))
    if not (await found.fetchone() or (False,))[0]:
        raise Held(await _holder(connection, name))


async def let_go(connection: AsyncConnection[Any], name: str) -> None:
    """Gives a lock back before the connection ends."""
    await connection.execute("SELECT pg_advisory_unlock(hashtext(%s))", (name,))


async def _holder(connection: AsyncConnection[Any], name: str) -> str:
    """Who has the lock, in words. Any role is shown this."""
    found = await connection.execute(
        "SELECT application_name, usename, pid FROM pg_locks JOIN pg_stat_activity USING (pid) "
        "WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND datname = current_database() "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        "AND (classid::bigint << 32 | objid::bigint) = hashtext(%s)",
        (name,),
    )
    row = await found.fetchone()
    return _in_words(*row) if row else "a session that has just ended: try again"


def _in_words(name: str, role: str, pid: int) -> str:
    return f"{name or 'a session'} (role {role}, pid {pid} of PostgreSQL)"


@asynccontextmanager
async def waiting_at_most(
    connection: AsyncConnection[Any], watching: AsyncConnection[Any], seconds: float
) -> AsyncIterator[None]:
    """While it lasts, the connection waits no longer for any one lock; raises Held, which says who has it, as
    `watching` sees it.
    """
    holders: list[str] = []

    async def watch() -> None:
        query = (
            "SELECT application_name, usename, pid FROM pg_stat_activity WHERE pid = ANY "
            "(pg_blocking_pids(%s)) ORDER BY pid"
        )
        while True:
            found = await (await watching.execute(query, (connection.info.backend_pid,))).fetchall()
            holders[:] = [_in_words(*row) for row in found] or holders
            await asyncio.sleep(_LOOK_SECONDS)

    await connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{seconds * 1000:.0f}ms",))
    task = asyncio.create_task(watch())
    try:
        yield
    except LockNotAvailable:
        raise Held(", ".join(holders) or "a session that has just ended") from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
