"""Which prefix, journal, schema and number of shards are one system; refuses settings that mix two systems.

The identity is recorded twice: in the schema (table `system`), because the schema outlives everything else,
and in Redis under the prefix, where a gate that connects to Redis only reads it. `init` writes the row in the
schema; an operator changes it with --new-journal when the journal is permanently lost. The key in Redis is
lost with Redis; the next process that misses it rewrites it.
"""

from typing import Any, Final

import msgspec
from psycopg import AsyncConnection
from redis.exceptions import ResponseError

from grabstream.models.bounds import counted
from grabstream.models.journal import Cursor
from grabstream.models.payments import audience_of
from grabstream.projections import cursors
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.system import Identity, is_system, read_identity
from grabstream.projections.definitions import PROJECTIONS
from grabstream.settings import BadSettings, Settings
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.topic_ids import Topic, find_topic
from grabstream.streams.topics import Topics

#: The fix when the journal of a schema is permanently lost.
NEW_JOURNAL: Final = "grabstream rebuild journal --from audit --new-journal"


class OtherSystem(BadSettings):
    """The settings mix two systems: `what` names both, `fix` says what to do."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}. {fix[0].upper()}{fix[1:]}")
        self.what = what
        self.fix = fix


class OtherJournal(OtherSystem):
    """The topic is not the journal that the schema belongs to: that journal was lost, or is on other
    brokers.
    """


class IdentityNotRecorded(OtherSystem):
    """The schema has tables, but no identity, since an `init` did not finish; `init` records it."""


class ClaimDamaged(OtherSystem):
    """The key in Redis that records the identity holds what no program writes: it names no other system."""


class _Claim(msgspec.Struct, frozen=True):
    """The identity that is recorded in Redis under a prefix; `cluster` is that of the journal, which receipts
    name.
    """

    schema: str
    journal: str
    shards: int
    cluster: str = ""


# -- the schema ----------------------------------------------------------------------------------------------


async def require_schema(connection: AsyncConnection[Any], settings: Settings) -> Identity | None:
    """Raises OtherSystem when the schema belongs to another prefix or number of shards, IdentityNotRecorded
    when it has no identity.

    Returns the identity, or None when the schema holds no system: queries then fail on the missing tables.
    """
    identity = await read_identity(connection, settings.schema_)
    if identity is None:
        if await is_system(connection, settings.schema_):
            raise IdentityNotRecorded(
                f"schema {settings.schema_} does not record yet which system it belongs to",
                "run `grabstream init`",
            )
        return None
    if (identity.prefix, identity.shards) != (settings.prefix, settings.shards):
        raise OtherSystem(
            f"schema {settings.schema_} belongs to GRAB_PREFIX={identity.prefix} with "
            f"GRAB_SHARDS={identity.shards}, but the settings are GRAB_PREFIX={settings.prefix} and "
            f"GRAB_SHARDS={settings.shards}",
            f"set GRAB_PREFIX={identity.prefix} and GRAB_SHARDS={identity.shards}, or, for another system, "
            "another GRAB_SCHEMA",
        )
    return identity


def compare_journal(settings: Settings, identity: Identity, topic: Topic | None) -> None:
    """Raises OtherJournal when the topic is not the journal that the schema belongs to, or does not exist."""
    if topic is not None and topic.id == identity.journal:
        return
    name = Topics(settings.prefix).journal
    actual = f"the topic of that name has the id {topic.id}" if topic else "no such topic exists"
    raise OtherJournal(
        f"schema {settings.schema_} belongs to the topic {name} with Kafka's id {identity.journal}, but at "
        f"GRAB_KAFKA={settings.kafka} {actual}",
        f"set GRAB_KAFKA to the brokers that have it. If it is lost for good, `{NEW_JOURNAL}` writes a new "
        "journal; `grabstream init --new-journal` accepts a copy of it with the same offsets",
    )


# -- Redis ---------------------------------------------------------------------------------------------------


async def _claim_in(redis: Any, key: str, settings: Settings) -> _Claim | None:
    """What is recorded in Redis; None if nothing is. Raises ClaimDamaged."""
    try:
        value = await redis.get(key)
        return None if value is None else msgspec.json.decode(value, type=_Claim)
    except ResponseError as error:
        if "WRONGTYPE" not in str(error):
            raise
        holds = f"is a {(await redis.type(key)).decode()}"
    except msgspec.MsgspecError:
        holds = f"holds {value[:80]!r}"
    raise ClaimDamaged(
        f"key {key} in Redis should record which system prefix {settings.prefix} belongs to, but {holds}",
        f"set another GRAB_PREFIX; or, if no program needs that key, delete it: `redis-cli DEL {key}`. A "
        "worker then writes it again",
    )


async def require_prefix(redis: Any, key: str, settings: Settings, identity: Identity | None = None) -> None:
    """Raises OtherSystem when the prefix in Redis belongs to another schema, another number of shards or, if
    `identity` is given, another journal; ClaimDamaged when its record cannot be read.
    """
    claim = await _claim_in(redis, key, settings)
    if claim is None:
        return
    journal = identity.journal if identity else claim.journal
    wanted = _Claim(settings.schema_, journal, settings.shards, claim.cluster)
    if claim != wanted:
        raise OtherSystem(
            f"prefix {settings.prefix} in Redis belongs to {_claim_text(claim)}, but the settings are "
            f"{_claim_text(wanted)}",
            "set them to the same values, or, for another system, set another GRAB_PREFIX. If the system "
            f"that had the prefix is gone for good, `redis-cli DEL {key}` frees it",
        )


def _claim_text(claim: _Claim) -> str:
    return (
        f"GRAB_SCHEMA={claim.schema}, GRAB_SHARDS={claim.shards} and the journal with Kafka's id "
        f"{claim.journal}"
    )


async def claim_prefix(redis: Any, key: str, settings: Settings, identity: Identity) -> None:
    """Records in Redis which system the prefix belongs to, unless recorded; raises OtherSystem when the
    prefix belongs to another system.
    """
    await redis.set(key, _encoded(settings, identity), nx=True)
    await require_prefix(redis, key, settings, identity)


async def replace_claim(redis: Any, key: str, settings: Settings, identity: Identity) -> None:
    """Records in Redis which system the prefix belongs to, and replaces an earlier record."""
    await redis.set(key, _encoded(settings, identity))


def _encoded(settings: Settings, identity: Identity) -> bytes:
    return msgspec.json.encode(_Claim(settings.schema_, identity.journal, identity.shards, identity.cluster))


async def find_audience(redis: Any, key: str, settings: Settings) -> str:
    """The audience that receipts for this system name (`models/payments.py`): from the record in Redis or,
    where that is lost, from Kafka. Raises BadSettings without a journal, and the errors of a server that does
    not answer.
    """
    claim = await _claim_in(redis, key, settings)
    cluster = claim.cluster if claim is not None else ""
    if not cluster:
        topic = await find_journal(settings)
        if topic is None:
            raise BadSettings(
                f"topic {Topics(settings.prefix).journal} does not exist: run `grabstream init` to create it"
            )
        cluster = topic.cluster
    return audience_of(settings.prefix, cluster)


# -- Kafka ---------------------------------------------------------------------------------------------------


async def find_journal(settings: Settings) -> Topic | None:
    """The journal's topic, or None; raises OtherSystem when it was created for another number of shards."""
    name = Topics(settings.prefix).journal
    topic = await find_topic(settings.brokers, name)
    if topic is not None and topic.partitions != settings.shards:
        raise OtherSystem(
            f"GRAB_SHARDS is {settings.shards}, but {name} has "
            f"{counted(topic.partitions, 'partitions')}: the number of shards is fixed once a system exists",
            f"set GRAB_SHARDS={topic.partitions}, or another GRAB_PREFIX and GRAB_SCHEMA for a new system"
            f"{_more_partitions(settings, topic)}",
        )
    return topic


def _more_partitions(settings: Settings, topic: Topic) -> str:
    """The other way out of a topic that was created before the system."""
    if topic.partitions > settings.shards:
        return ""
    name = Topics(settings.prefix).journal
    return (
        f"; or, if nothing was ever written to {name}, `kafka-topics.sh --bootstrap-server {settings.kafka} "
        f"--alter --topic {name} --partitions {settings.shards}`"
    )


async def unknown_cursors(
    connection: AsyncConnection[Any], settings: Settings, journal_exists: bool
) -> list[str]:
    """Descriptions of the cursors of live read models that are not in the journal: the read models have read
    another journal. All cursors, when no journal exists.
    """
    await use_schema(connection, settings.schema_)
    positions = [
        (name, shard, cursor)
        for name in PROJECTIONS
        for shard, cursor in sorted((await cursors.load(connection, name)).items())
        if cursor.next_offset
    ]
    if journal_exists and positions:
        # The journal is read after the cursors, so it holds every block that they have read.
        async with open_reader(settings.brokers, Topics(settings.prefix).journal) as reader:
            positions = [
                (name, shard, cursor)
                for name, shard, cursor in positions
                if shard >= settings.shards or not await _has(reader, shard, cursor)
            ]
    return [
        f"{name}, shard {shard}: seq {cursor.seq} at offset {cursor.next_offset}"
        for name, shard, cursor in positions
    ]


async def _has(reader: JournalReader, shard: int, cursor: Cursor) -> bool:
    return cursor.seq == 0 if not cursor.owner else await reader.seq_before(shard, cursor) is not None
