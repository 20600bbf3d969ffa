"""Makes a system: its topics, its tables, and the record that they belong together. All checks come before
anything is created.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

import click
from psycopg import AsyncConnection, sql
from pydantic import SecretStr

from grabstream.connections.identity import (
    NEW_JOURNAL,
    IdentityNotRecorded,
    OtherJournal,
    OtherSystem,
    claim_prefix,
    compare_journal,
    find_journal,
    replace_claim,
    require_prefix,
    require_schema,
    unknown_cursors,
)
from grabstream.connections.journal_keys import record_own
from grabstream.connections.libraries import ServerLibraries, delete_others, load_everywhere
from grabstream.connections.opening import key_space, open_redis
from grabstream.connections.preconditions import require_new_topics, require_postgres
from grabstream.connections.seal_keys import compare, record_seal_keys
from grabstream.crypto.sealing import Sealer
from grabstream.projections.database.locks import waiting_at_most
from grabstream.projections.database.migrate import EarlierForm, migrate, require_form, use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.database.system import (
    Identity,
    is_system,
    others_on,
    why_not_for_a_system,
    write_identity,
)
from grabstream.projections.tables import journal_keys, seal_keys
from grabstream.runtime.trouble import is_trouble
from grabstream.settings import BadSettings, Settings, variable_of
from grabstream.streams.clients import error_text
from grabstream.streams.replaying.replay_schema import read_definition
from grabstream.streams.topic_ids import Topic
from grabstream.streams.topics import Topics, create_topics, known_in_time

log = logging.getLogger(__name__)

#: How long to wait for a session that holds a lock: other readers have to wait behind this one meanwhile.
LOCK_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.1


class Initialized(NamedTuple):
    """The topics that were created, the migrations that were applied, the function libraries of each master
    (None: Redis cannot be reached), and the ids of seal keys that were recorded.
    """

    topics: list[str]
    migrations: list[str]
    libraries: list[ServerLibraries] | None
    seal_keys: list[str]


async def make_system(
    settings: Settings,
    replication: int | None = None,
    new_journal: bool = False,
    drop_libraries: bool = False,
) -> Initialized:
    """Creates the missing parts of a system and records that they belong together; a second call does
    nothing.

    `new_journal` accepts the existing topic as the journal: a copy of the journal that the schema belonged
    to. `drop_libraries` deletes the function libraries of other releases. Raises BadSettings, and Held when
    another session holds a lock for longer than LOCK_SECONDS.
    """
    async with _books(settings) as connection:
        topic = await find_journal(settings)
        await require_new_topics(settings)
        known = await _check_schema(connection, settings, topic, new_journal)
        await _check_seal_keys(connection, settings)
        await _check_redis(settings, topic, new_journal)
        created = await create_topics(
            settings.brokers, Topics(settings.prefix), settings.shards, replication, settings.refusals_topic
        )
        topic = topic or await _new_journal(settings)
        applied = await migrate(connection, settings.schema_, settings.shards)
        identity = Identity(settings.prefix, topic.id, settings.shards, topic.cluster)
        if known is None or known[:3] != identity[:3]:
            await write_identity(connection, settings.schema_, identity)
            if known is not None:
                # A copy of the journal has the same signatures.
                await journal_keys.take_over(connection, identity.journal, known.journal)
        recorded = await record_seal_keys(connection, settings)
    libraries = await _claim(settings, identity, new_journal, drop_libraries)
    return Initialized(created, applied, libraries, recorded)


#: Settings with keys whose signatures name a system by its prefix, which a copy of the system has too.
_SIGNING: Final = ("operator_keys", "payment_keys", "ticket_keys", "journal_keys", "journal_public_keys")


def keys_that_a_copy_shares(settings: Settings) -> list[str]:
    """The variables of this process that must differ between a copied system and its copy."""
    values = {name: getattr(settings, name) for name in _SIGNING}
    return [
        variable_of(name)
        for name, value in values.items()
        if (value.get_secret_value() if isinstance(value, SecretStr) else value)
    ]


def copy_in_words(names: Sequence[str]) -> str:
    """What an operator must do after copying a system that still runs; '' without such keys."""
    if not names:
        return ""
    return (
        f"If the system that this one was restored from still runs, change {', '.join(names)} here: what is "
        "signed for one of the two systems is valid for both (docs/backup.md, Running a copy and the "
        "original)."
    )


async def take_new_journal(settings: Settings, redis: Any) -> None:
    """Records the existing topic as the journal that schema and prefix belong to."""
    topic = await _new_journal(settings)
    identity = Identity(settings.prefix, topic.id, settings.shards, topic.cluster)
    async with await connect(settings.postgres, settings.schema_) as connection:
        await write_identity(connection, settings.schema_, identity)
        await use_schema(connection, settings.schema_)
        await record_own(connection, settings)
    await replace_claim(redis, key_space(settings).system, settings, identity)


async def require_all_but_the_journal(settings: Settings, redis: Any) -> None:
    """Raises BadSettings when schema, prefix and number of shards do not belong to one system. The journal is
    not compared.

    Tables of an older release, such as those of a backup, are migrated. Raises LockTaken when another session
    holds a lock for longer than LOCK_SECONDS.
    """
    await find_journal(settings)
    async with _books(settings) as connection:
        with contextlib.suppress(IdentityNotRecorded):
            await require_schema(connection, settings)
        await require_prefix(redis, key_space(settings).system, settings)
        if await is_system(connection, settings.schema_):
            await migrate(connection, settings.schema_, settings.shards)


@contextlib.asynccontextmanager
async def _books(settings: Settings) -> AsyncIterator[AsyncConnection[Any]]:
    """A connection that waits at most LOCK_SECONDS for a lock, then raises LockTaken, which names the holder.
    Raises ConditionNotMet, and BadSettings for a schema that cannot be migrated.
    """
    async with await connect(settings.postgres, settings.schema_, "init") as connection:
        await require_postgres(connection, settings)
        async with (
            await connect(settings.postgres, settings.schema_, "init") as watching,
            waiting_at_most(connection, watching, LOCK_SECONDS),
        ):
            try:
                await require_form(connection, settings.schema_)
            except EarlierForm as error:
                raise BadSettings(f"GRAB_SCHEMA: {error}. {_to_a_new_schema(settings)}") from None
            yield connection


def _to_a_new_schema(settings: Settings) -> str:
    """How the journal of a schema is given to a new one: only the operator knows that no process needs the
    old one any more.
    """
    table = sql.Identifier(settings.schema_, "system").as_string()
    return (
        "Rebuild the read models in a new schema, from the journal: when no event waits for the journal, "
        f"stop all processes; in PostgreSQL, run `COMMENT ON TABLE {table} IS NULL`; run "
        f"`redis-cli DEL {key_space(settings).system}`, and delete all other keys `{settings.prefix}:*` in "
        "Redis, whose layout this program cannot read; set GRAB_SCHEMA to a new name, and run `grabstream "
        "init`. docs/operating.md (A schema from before 0.1.0) lists what else the old schema contains"
    )


async def _check_schema(
    connection: AsyncConnection[Any], settings: Settings, topic: Topic | None, new_journal: bool
) -> Identity | None:
    """The identity that the schema records, if any; raises BadSettings when the schema cannot be this
    system's.
    """
    await refuse_replay(connection, settings)
    if why := await why_not_for_a_system(connection, settings.schema_):
        raise BadSettings(
            f"GRAB_SCHEMA: schema {settings.schema_} cannot hold a system: {why}. Set another schema"
        )
    try:
        identity = await require_schema(connection, settings)
    except IdentityNotRecorded:
        identity = None
    if identity is not None and not new_journal:
        compare_journal(settings, identity, topic)
    elif await is_system(connection, settings.schema_):
        await _require_its_journal(connection, settings, topic)
    if topic is not None and (others := await others_on(connection, settings.schema_, topic.id)):
        raise OtherSystem(
            f"GRAB_PREFIX={settings.prefix} and its journal belong to schema {others[0]}, but GRAB_SCHEMA is "
            f"{settings.schema_}",
            f"set GRAB_SCHEMA={others[0]}, or, for another system, another GRAB_PREFIX",
        )
    return identity


async def _check_seal_keys(connection: AsyncConnection[Any], settings: Settings) -> None:
    """Raises WrongSealKeys unless the settings have the keys that the schema has recorded."""
    await use_schema(connection, settings.schema_)
    text, known = settings.seal_keys.get_secret_value(), await seal_keys.find_all(connection)
    if text and known:
        compare(Sealer.from_text(text).fingerprints, known)


async def _require_its_journal(
    connection: AsyncConnection[Any], settings: Settings, topic: Topic | None
) -> None:
    """Raises OtherJournal unless the existing journal contains every cursor of the schema."""
    if unknown := await unknown_cursors(connection, settings, topic is not None):
        name = Topics(settings.prefix).journal
        raise OtherJournal(
            f"schema {settings.schema_} has read another journal than {name} at GRAB_KAFKA={settings.kafka}: "
            f"{unknown[0]} is not in it",
            "set GRAB_PREFIX and GRAB_KAFKA to those of the system in that schema. If its journal is lost "
            f"for good, run `{NEW_JOURNAL}`",
        )


async def _check_redis(settings: Settings, topic: Topic | None, new_journal: bool) -> None:
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
        log.warning(
            "Redis cannot be reached, so the first worker will claim the prefix there: %s", error_text(error)
        )
    finally:
        await redis.aclose()


async def _claim(
    settings: Settings, identity: Identity, new_journal: bool, drop_libraries: bool
) -> list[ServerLibraries] | None:
    """Records in Redis what belongs together, and loads the library on every master; returns the libraries,
    None if Redis cannot be reached.
    """
    redis, write = open_redis(settings), replace_claim if new_journal else claim_prefix
    try:
        await write(redis, key_space(settings).system, settings, identity)
        libraries = await load_everywhere(redis)
        if drop_libraries:
            await delete_others(redis, libraries)
        return libraries
    except BaseException as error:
        # With --new-journal the claim must be replaced here; a missing claim is written by the first worker,
        # a missing library is loaded by the first takeover.
        if new_journal or drop_libraries or not is_trouble(error):
            raise
        return None
    finally:
        await redis.aclose()


async def _new_journal(settings: Settings) -> Topic:
    """The journal's topic, which was just created. Polls, because not every broker knows it at once."""
    async with known_in_time("the topic of the journal"):
        while True:
            if topic := await find_journal(settings):
                return topic
            await asyncio.sleep(_POLL_SECONDS)


async def refuse_replay(connection: AsyncConnection[Any], settings: Settings) -> None:
    """Raises UsageError when the schema holds a bounded replay: more events would make it neither that replay
    nor the system's schema.
    """
    if await read_definition(connection, settings.schema_) is not None:
        raise click.UsageError(
            f"GRAB_SCHEMA: schema {settings.schema_} holds a bounded replay: set it to the system's schema"
        )
