"""Advisory locks of PostgreSQL: work that only one may do at a time, held for as long as the work's connection lives."""

import os
import socket
from typing import Any

from psycopg import AsyncConnection

from projections.sessions import rename


class Held(Exception):
    """Somebody else does this work now; the text says who."""


async def hold(connection: AsyncConnection[Any], name: str, work: str) -> None:
    """Takes the lock `name` until the connection ends, which is named by its `work` from then on; raises Held when somebody has it."""
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
        "SELECT format('%%s (role %%s, pid %%s of PostgreSQL)', application_name, usename, pid) "
        "FROM pg_locks JOIN pg_stat_activity USING (pid) "
        "WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND datname = current_database() "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        "AND (classid::bigint << 32 | objid::bigint) = hashtext(%s)",
        (name,),
    )
    row = await found.fetchone()
    return row[0] if row else "by a process that has just ended: try again"
