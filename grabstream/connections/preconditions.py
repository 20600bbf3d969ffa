"""Conditions of servers: the one list that `init` checks before it creates anything, every process at its
start, and `doctor` as findings.

Checked elsewhere: that settings name one system (`identity.py`), and that a Redis that decides may not evict
keys (`opening.py`).
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from psycopg import AsyncConnection

from grabstream.models.bounds import counted
from grabstream.projections.database.sessions import connect
from grabstream.settings import BadSettings, Settings
from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.topics import (
    Topics,
    TopicState,
    change_command,
    describe,
    retention_ms,
    settings_needed,
    states_of,
)

log = logging.getLogger(__name__)

#: How long to wait for a second session. A pooler that keeps sessions may have none left.
SECOND_SESSION_SECONDS_MAX: Final = 5.0
#: How often two sessions are compared: a pooler may by chance give each of them the same one again.
COMPARED_TIMES: Final = 3


class Unmet(NamedTuple):
    """A condition that a server does not meet: what it is and what it must be, what that means for users, and
    the command or change that corrects it.
    """

    what: str
    means: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.means}. Fix: {self.fix}"


class ConditionNotMet(BadSettings):
    """A server is not what this program needs."""

    def __init__(self, unmet: Sequence[Unmet]) -> None:
        super().__init__("\n".join(map(str, unmet)))


# -- PostgreSQL ----------------------------------------------------------------------------------------------


async def keeps_every_character(connection: AsyncConnection[Any], settings: Settings) -> Unmet | None:
    """The encoding of the database must be UTF8."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding == "UTF8":
        return None
    name = connection.info.dbname
    return Unmet(
        f"GRAB_POSTGRES: the encoding of database {name} is {encoding}, but must be UTF8",
        "a title with a character that it lacks stops the read models of its shard",
        f"CREATE DATABASE {name}_utf8 ENCODING 'UTF8' TEMPLATE template0; and name it in GRAB_POSTGRES. What "
        f"{name} has of a system comes along with pg_dump and psql",
    )


async def keeps_sessions(connection: AsyncConnection[Any], settings: Settings) -> Unmet | None:
    """A connection must be its own session: a pooler in transaction mode gives each transaction any session,
    whose search path, locks and prepared statements are those of others.
    """
    if not await _shares_sessions(connection, settings):
        return None
    return Unmet(
        "GRAB_POSTGRES names a pooler that gives each transaction another session (pool_mode = transaction)",
        "settings, locks and prepared statements of a session are lost or mixed with those of others: rows "
        "may be read from the schema of another system",
        "name PostgreSQL itself in GRAB_POSTGRES, or a pooler whose pool_mode is session",
    )


async def _shares_sessions(connection: AsyncConnection[Any], settings: Settings) -> bool:
    """Whether a transaction of another connection gets the session that this connection had, or this one
    another.
    """
    first = await _process_of(connection)
    if first == connection.info.backend_pid:
        return False  # no pooler, which would have named its own process
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
    """The server process that executes what the connection sends now."""
    # Not prepared: another session would know the statement already.
    rows = await connection.execute("SELECT pg_backend_pid()", prepare=False)
    [process] = await rows.fetchone() or [0]
    return int(process)


#: The conditions of PostgreSQL. Only the first unmet one is reported: the others could not be read then.
POSTGRES_CONDITIONS: Final[
    tuple[Callable[[AsyncConnection[Any], Settings], Awaitable[Unmet | None]], ...]
] = (
    keeps_every_character,
    keeps_sessions,
)


async def unmet_by_postgres(connection: AsyncConnection[Any], settings: Settings) -> Unmet | None:
    """The first condition that PostgreSQL does not meet; raises psycopg's errors."""
    for condition in POSTGRES_CONDITIONS:
        if (unmet := await condition(connection, settings)) is not None:
            return unmet
    return None


async def require_postgres(connection: AsyncConnection[Any], settings: Settings) -> None:
    """Raises ConditionNotMet when PostgreSQL is not what this program needs."""
    if (unmet := await unmet_by_postgres(connection, settings)) is not None:
        raise ConditionNotMet([unmet])


# -- Kafka ---------------------------------------------------------------------------------------------------


def enough_partitions(topics: Mapping[str, TopicState], settings: Settings) -> list[Unmet]:
    """Every topic except `rejected` must have a partition for each shard. More of them do no harm. The
    journal is compared separately, since the number of shards is that of its partitions.
    """
    names = Topics(settings.prefix)
    return [
        Unmet(
            f"topic {name} has {counted(topic.partitions, 'partitions')}, but must have {settings.shards} "
            "(GRAB_SHARDS)",
            "a partition is a shard: records of the shards without a partition can be neither written nor "
            "read",
            f"kafka-topics.sh --bootstrap-server {settings.kafka} --alter --topic {name} --partitions "
            f"{settings.shards}",
        )
        for name, topic in topics.items()
        if name not in (names.journal, names.rejected) and topic.partitions < settings.shards
    ]


def loses_nothing(topics: Mapping[str, TopicState], settings: Settings) -> list[Unmet]:
    """Topics must keep their records as long as the system needs them, and take all that it writes."""
    unmet = []
    for name, topic in topics.items():
        needed = settings_needed(Topics(settings.prefix), name, topic.settings)
        if needed:
            has = ", ".join(
                f"its {setting} is {topic.settings[setting]}, but must be {_at_least(value)}"
                for setting, value in needed.items()
            )
            unmet.append(
                Unmet(
                    f"topic {name}: {has}", "Kafka deletes records too early, or rejects them: events "
                    "that Kafka has lost cannot be rebuilt, and commands are not answered",
                    change_command(settings.kafka, name, needed),
                )
            )  # fmt: skip
    return unmet


def _at_least(value: str) -> str:
    return f"at least {value}" if value.isdigit() else value


async def read_topics(settings: Settings) -> dict[str, TopicState]:
    """The topics of the system that exist; raises aiokafka's errors."""
    names = retention_ms(Topics(settings.prefix), settings.refusals_topic)
    async with started(AIOKafkaAdminClient(**brokers.at(settings.brokers))) as client:
        return await states_of(client, await describe(client, list(names)))


async def require_new_topics(settings: Settings) -> None:
    """Raises ConditionNotMet when existing topics differ from those of `init`."""
    topics = await read_topics(settings)
    if unmet := [*enough_partitions(topics, settings), *loses_nothing(topics, settings)]:
        raise ConditionNotMet(unmet)


async def require_topics(settings: Settings) -> None:
    """Raises ConditionNotMet when a topic has too few partitions. Topics that lose records are logged only:
    without this process, nothing would be decided either.
    """
    topics = await read_topics(settings)
    if unmet := enough_partitions(topics, settings):
        raise ConditionNotMet(unmet)
    for one in loses_nothing(topics, settings):
        _warn_once(str(one))


@functools.cache
def _warn_once(words: str) -> None:
    """Processes ask until all servers have answered."""
    log.warning("%s", words)
