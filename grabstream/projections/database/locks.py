"""Advisory locks of PostgreSQL for work that only one process may do at a time, held until the connection
ends; and the names of sessions that hold a lock.
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

_POLL_SECONDS: Final = 0.1
#: The rows of pg_locks about a lock that a session has.
_IS_LOCK: Final = (
    "locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND (classid::bigint << 32 | objid::bigint) = hashtext(%s)"
)


class LockTaken(Exception):
    """Another session does this work, or holds a lock that it needs; the text names the session."""


async def lock_or_raise(connection: AsyncConnection[Any], name: str, work: str) -> None:
    """Takes the lock `name` until the connection ends, and names the session by its `work`; raises
    LockTaken when another session has the lock.
    """
    # A process that is refused the lock reports this name. PostgreSQL cuts a long name, so the process comes
    # first.
    await rename(connection, f"process {os.getpid()} on {socket.gethostname()}, {work}")
    if not await take(connection, name):
        raise LockTaken(await _holder(connection, name))


async def take(connection: AsyncConnection[Any], name: str) -> bool:
    """Takes a lock until the connection ends, unless another session has it; returns whether it did."""
    result = await connection.execute("SELECT pg_try_advisory_lock(hashtext(%s))", (name,))
    return bool((await result.fetchone() or (False,))[0])


async def release(connection: AsyncConnection[Any], name: str) -> None:
    """Releases a lock before the connection ends."""
    await connection.execute("SELECT pg_advisory_unlock(hashtext(%s))", (name,))


async def is_held(connection: AsyncConnection[Any], name: str) -> bool:
    """Whether a session of this database has the lock. Every role may ask this."""
    result = await connection.execute(f"SELECT EXISTS (SELECT FROM pg_locks WHERE {_IS_LOCK})", (name,))  # noqa: S608 - no input
    return bool((await result.fetchone() or (False,))[0])


async def _holder(connection: AsyncConnection[Any], name: str) -> str:
    """Names the session that has the lock. Every role may read this."""
    result = await connection.execute(
        "SELECT application_name, usename, pid FROM pg_locks JOIN pg_stat_activity USING (pid) "  # noqa: S608
        f"WHERE datname = current_database() AND {_IS_LOCK}",
        (name,),
    )
    row = await result.fetchone()
    return _session_name(*row) if row else "a session that has just ended: try again"


def _session_name(name: str, role: str, pid: int) -> str:
    return f"{name or 'a session'} (role {role}, pid {pid} of PostgreSQL)"


@asynccontextmanager
async def waiting_at_most(
    connection: AsyncConnection[Any], watching: AsyncConnection[Any], seconds: float
) -> AsyncIterator[None]:
    """In this context, the connection waits at most `seconds` for a lock; raises LockTaken, which names the
    holders as the connection `watching` sees them.
    """
    holders: list[str] = []

    async def watch() -> None:
        query = (
            "SELECT application_name, usename, pid FROM pg_stat_activity WHERE pid = ANY "
            "(pg_blocking_pids(%s)) ORDER BY pid"
        )
        while True:
            rows = await (await watching.execute(query, (connection.info.backend_pid,))).fetchall()
            holders[:] = [_session_name(*row) for row in rows] or holders
            await asyncio.sleep(_POLL_SECONDS)

    await connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{seconds * 1000:.0f}ms",))
    task = asyncio.create_task(watch())
    try:
        yield
    except LockNotAvailable:
        raise LockTaken(", ".join(holders) or "a session that has just ended") from None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
