"""What servers must be like: the one list of conditions that `init` checks before it makes anything, every
process before it does anything, and `doctor` as findings.

Whether settings name one system is checked apart (`identity.py`), and so is whether a Redis that decides may
evict keys (`opening.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection

from grabstream.ops.settings import BadSettings, Settings
from grabstream.projections.database.sessions import connect

#: How long a second session is waited for. A pooler that keeps sessions may have none left.
SECOND_SESSION_SECONDS_MAX: Final = 5.0
#: How often two sessions are compared: a pooler may by chance give each of them the same one again.
COMPARED_TIMES: Final = 3


class Unmet(NamedTuple):
    """A condition that a server does not meet: what it is and what it must be, what that means for users, and
    the command or change that mends it.
    """

    what: str
    means: str
    mend: str


class ConditionNotMet(BadSettings):
    """A server is not what this program needs."""

    def __init__(self, unmet: Sequence[Unmet]) -> None:
        super().__init__(" · ".join(f"{one.what}: {one.means}. Mend it: {one.mend}" for one in unmet))
        self.unmet = unmet


# -- PostgreSQL ----------------------------------------------------------------------------------------------


async def keeps_every_character(connection: AsyncConnection[Any], settings: Settings) -> Unmet | None:
    """The encoding of the database must be UTF8."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding == "UTF8":
        return None
    name = connection.info.dbname
    return Unmet(
        f"GRAB_POSTGRES: the encoding of database {name} is {encoding}, and must be UTF8",
        "a title with a character that it lacks stops the read models of its shard",
        f"CREATE DATABASE {name}_utf8 ENCODING 'UTF8' TEMPLATE template0; and name it in GRAB_POSTGRES. What "
        f"{name} has of a system comes along with pg_dump and psql",
    )


async def keeps_sessions(connection: AsyncConnection[Any], settings: Settings) -> Unmet | None:
    """A connection must be a session of its own: a pooler in transaction mode gives each transaction any
    session, whose search path, locks and prepared statements are those of others.
    """
    if not await _shares_sessions(connection, settings):
        return None
    return Unmet(
        "GRAB_POSTGRES names a pooler that gives each transaction another session (pool_mode = transaction)",
        "settings, locks and prepared statements of a session are lost or meet those of others: rows are "
        "looked for in the schema of another system",
        "name PostgreSQL itself in GRAB_POSTGRES, or a pooler whose pool_mode is session",
    )


async def _shares_sessions(connection: AsyncConnection[Any], settings: Settings) -> bool:
    """Whether a transaction of another connection gets the session that this connection had, or this one
    another.
    """
    first = await _process_of(connection)
    if first == connection.info.backend_pid:
        return False  # no pooler, which would have named a process of its own
    try:
        async with (
            asyncio.timeout(SECOND_SESSION_SECONDS_MAX),
            await connect(settings.postgres, settings.schema_, "preconditions") as other,
        ):
            for _ in range(COMPARED_TIMES):
                async with other.transaction():
                    if await _process_of(other) == first or await _process_of(connection) != first:
                        return True
                if await _process_of(connection) != first:
                    return True
    except TimeoutError:
        pass
    return False


async def _process_of(connection: AsyncConnection[Any]) -> int:
    """The process of the server that carries out what the connection sends now."""
    # Not prepared: another session would know the statement already.
    rows = await connection.execute("SELECT pg_backend_pid()", prepare=False)
    [process] = await rows.fetchone() or [0]
    return int(process)


#: The conditions of PostgreSQL. The first one that is not met is told: the others could not be read then.
OF_POSTGRES: Final[tuple[Callable[[AsyncConnection[Any], Settings], Awaitable[Unmet | None]], ...]] = (
    keeps_every_character,
    keeps_sessions,
)


async def unmet_by_postgres(connection: AsyncConnection[Any], settings: Settings) -> Unmet | None:
    """The first condition that PostgreSQL does not meet; raises psycopg's errors."""
    for condition in OF_POSTGRES:
        if (unmet := await condition(connection, settings)) is not None:
            return unmet
    return None


async def require_postgres(connection: AsyncConnection[Any], settings: Settings) -> None:
    """Raises ConditionNotMet when PostgreSQL is not what this program needs."""
    if (unmet := await unmet_by_postgres(connection, settings)) is not None:
        raise ConditionNotMet([unmet])
