"""Making a system: topics, tables, and what they belong to. Nothing is created before everything that can be
refused was looked at.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

import click
from psycopg import AsyncConnection

from grabstream.lua.trouble import is_trouble
from grabstream.ops.connections.identity import (
    NEW_JOURNAL,
    NotWrittenDown,
    OtherJournal,
    OtherSystem,
    claim_prefix,
    compare_journal,
    find_journal,
    replace_claim,
    require_prefix,
    require_schema,
    strangers,
)
from grabstream.ops.connections.opening import key_space, open_redis
from grabstream.ops.settings import BadSettings, Settings
from grabstream.projections.database.locks import waiting_at_most
from grabstream.projections.database.migrate import migrate
from grabstream.projections.database.sessions import connect
from grabstream.projections.database.system import (
    Identity,
    is_system,
    others_on,
    why_not_for_a_system,
    write_identity,
)
from grabstream.streams.clients import in_words
from grabstream.streams.replaying.replay_schema import read_definition
from grabstream.streams.topic_ids import Topic
from grabstream.streams.topics import Topics, create_topics

log = logging.getLogger(__name__)

#: For so long a session is waited for that has locked what is needed: readers who come meanwhile wait, too.
LOCK_SECONDS: Final = 5.0
#: A topic that was made just now is known to every broker after this long.
TOPIC_SECONDS_MAX: Final = 15.0
_POLL_SECONDS: Final = 0.1


class Made(NamedTuple):
    """What was missing, and is there now: topics, and migrations."""

    topics: list[str]
    migrations: list[str]


async def make_system(settings: Settings, replication: int | None = None, new_journal: bool = False) -> Made:
    """Makes what is missing of a system and writes down what belongs together; a second call does nothing.

    `new_journal` takes the topic that is there for the journal, a copy of the one that the schema belonged
    to. Raises BadSettings, and Held when another session has locked what is needed, for too long.
    """
    async with _books(settings) as connection:
        topic = await find_journal(settings)
        known = await _look(connection, settings, topic, new_journal)
        await _look_into_redis(settings, topic, new_journal)
        created = await create_topics(settings.kafka, Topics(settings.prefix), settings.shards, replication)
        topic = topic or await _new_journal(settings)
        applied = await migrate(connection, settings.schema_, settings.shards)
        identity = Identity(settings.prefix, topic.id, settings.shards)
        if known != identity:
            await write_identity(connection, settings.schema_, identity)
    await _claim(settings, identity, new_journal)
    return Made(created, applied)


async def take_new_journal(settings: Settings, redis: Any) -> None:
    """Writes down that the journal's topic that is there now is the one that schema and prefix belong to."""
    identity = Identity(settings.prefix, (await _new_journal(settings)).id, settings.shards)
    async with await connect(settings.postgres, settings.schema_) as connection:
        await write_identity(connection, settings.schema_, identity)
    await replace_claim(redis, key_space(settings).system, settings, identity)


async def require_all_but_the_journal(settings: Settings, redis: Any) -> None:
    """Raises BadSettings when schema, prefix and number of shards are not those of one system, whatever its
    journal is; and Held.

    Tables of an older release, such as those of a backup, are brought up to date.
    """
    await find_journal(settings)
    async with _books(settings) as connection:
        with contextlib.suppress(NotWrittenDown):
            await require_schema(connection, settings)
        await require_prefix(redis, key_space(settings).system, settings)
        if await is_system(connection, settings.schema_):
            await migrate(connection, settings.schema_, settings.shards)


@contextlib.asynccontextmanager
async def _books(settings: Settings) -> AsyncIterator[AsyncConnection[Any]]:
    """A connection that waits a while for what others have locked, and then says who they are."""
    async with (
        await connect(settings.postgres, settings.schema_, "init") as connection,
        await connect(settings.postgres, settings.schema_, "init") as watching,
        waiting_at_most(connection, watching, LOCK_SECONDS),
    ):
        yield connection


async def _look(
    connection: AsyncConnection[Any], settings: Settings, topic: Topic | None, new_journal: bool
) -> Identity | None:
    """What the schema says that it belongs to; raises BadSettings when it cannot be this system's."""
    await refuse_replay(connection, settings)
    if why := await why_not_for_a_system(connection, settings.schema_):
        raise BadSettings(
            f"GRAB_SCHEMA: schema {settings.schema_} cannot hold a system: {why}. Set another one"
        )
    try:
        identity = await require_schema(connection, settings)
    except NotWrittenDown:
        identity = None
    if identity is not None and not new_journal:
        compare_journal(settings, identity, topic)
    elif await is_system(connection, settings.schema_):
        await _require_its_journal(connection, settings, topic)
    if topic is not None and (others := await others_on(connection, settings.schema_, topic.id)):
        raise OtherSystem(
            f"GRAB_PREFIX={settings.prefix} and its journal belong to schema {others[0]}, and are asked for "
            f"with {settings.schema_}",
            f"set GRAB_SCHEMA={others[0]}, or for another system another GRAB_PREFIX",
        )
    return identity


async def _require_its_journal(
    connection: AsyncConnection[Any], settings: Settings, topic: Topic | None
) -> None:
    """Raises OtherJournal unless every cursor of the schema is in the journal that is there."""
    if unknown := await strangers(connection, settings, topic is not None):
        name = Topics(settings.prefix).journal
        raise OtherJournal(
            f"schema {settings.schema_} has read another journal than {name} at GRAB_KAFKA={settings.kafka}: "
            f"{unknown[0]} is not in it",
            "set GRAB_PREFIX and GRAB_KAFKA to those of the system in that schema; or, when its journal is "
            f"lost for good, `{NEW_JOURNAL}`",
        )


async def _look_into_redis(settings: Settings, topic: Topic | None, new_journal: bool) -> None:
    expected = (
        None
        if new_journal
        else Identity(settings.prefix, topic.id if topic else "(none yet)", settings.shards)
    )
    redis = open_redis(settings)
    try:
        await require_prefix(redis, key_space(settings).system, settings, expected)
    except BaseException as error:
        if not is_trouble(error):
            raise
        log.warning("Redis cannot be reached: the first worker claims the prefix there (%s)", in_words(error))
    finally:
        await redis.aclose()


async def _claim(settings: Settings, identity: Identity, new_journal: bool) -> None:
    redis, write = open_redis(settings), replace_claim if new_journal else claim_prefix
    try:
        await write(redis, key_space(settings).system, settings, identity)
    except BaseException as error:
        # A claim of another journal has to be replaced; one that is missing is made by the first worker.
        if new_journal or not is_trouble(error):
            raise
    finally:
        await redis.aclose()


async def _new_journal(settings: Settings) -> Topic:
    """The journal's topic, which was made just now: not every broker knows it at once."""
    async with asyncio.timeout(TOPIC_SECONDS_MAX):
        while True:
            if topic := await find_journal(settings):
                return topic
            await asyncio.sleep(_POLL_SECONDS)


async def refuse_replay(connection: AsyncConnection[Any], settings: Settings) -> None:
    """Raises UsageError when the schema holds a bounded replay: going on with it would make it neither that
    nor the system's.
    """
    if await read_definition(connection, settings.schema_) is not None:
        raise click.UsageError(
            f"GRAB_SCHEMA: schema {settings.schema_} holds a bounded replay: set it to the system's own"
        )
