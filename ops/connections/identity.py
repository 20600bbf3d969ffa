"""Which prefix, journal, schema and number of shards are one system: the only place that says so, and refuses
what is mixed up.

It is written down twice: in the schema (table `system`), since that is what outlives everything else, and in
Redis under the prefix, where a gate looks that knows nobody else. The schema's row is written by `init`, and
changed by whoever says with --new-journal that the journal is lost for good. The key in Redis goes with
Redis, and whoever finds it gone writes it again.
"""

from typing import Any, Final

import msgspec
from psycopg import AsyncConnection

from grabstream.models.journal import Cursor
from grabstream.ops.settings import BadSettings, Settings
from grabstream.projections import cursors
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.system import Identity, is_system, read_identity
from grabstream.projections.definitions import PROJECTIONS
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.topic_ids import Topic, find_topic
from grabstream.streams.topics import Topics

#: The way out when the journal that a schema belongs to is lost for good.
NEW_JOURNAL: Final = "grabstream rebuild journal --from audit --new-journal"


class OtherSystem(BadSettings):
    """The settings mix two systems up: `what` names both sides, `mend` the way out."""

    def __init__(self, what: str, mend: str) -> None:
        super().__init__(f"{what}. {mend[0].upper()}{mend[1:]}")
        self.what = what
        self.mend = mend


class OtherJournal(OtherSystem):
    """The journal's topic is not the one that the schema belongs to: it was lost, or is on other brokers."""


class NotWrittenDown(OtherSystem):
    """The schema's tables are of a release that did not write down what they belong to: `init` does."""


class _Claim(msgspec.Struct, frozen=True):
    """What stands in Redis under a prefix."""

    schema: str
    journal: str
    shards: int


# -- the schema ----------------------------------------------------------------------------------------------


async def require_schema(connection: AsyncConnection[Any], settings: Settings) -> Identity | None:
    """Raises OtherSystem when the schema belongs to another prefix or number of shards, NotWrittenDown when
    it does not say to which.

    Returns what it belongs to; None where there is no system in it: the tables that are missing say so
    themselves.
    """
    identity = await read_identity(connection, settings.schema_)
    if identity is None:
        if await is_system(connection, settings.schema_):
            raise NotWrittenDown(
                f"schema {settings.schema_} does not say yet which system it belongs to",
                "run `grabstream init`",
            )
        return None
    if (identity.prefix, identity.shards) != (settings.prefix, settings.shards):
        raise OtherSystem(
            f"schema {settings.schema_} belongs to GRAB_PREFIX={identity.prefix} with "
            f"GRAB_SHARDS={identity.shards}, and is asked for "
            f"with GRAB_PREFIX={settings.prefix} and GRAB_SHARDS={settings.shards}",
            f"set GRAB_PREFIX={identity.prefix} and GRAB_SHARDS={identity.shards}, or for another system "
            "another GRAB_SCHEMA",
        )
    return identity


def compare_journal(settings: Settings, identity: Identity, topic: Topic | None) -> None:
    """Raises OtherJournal when the topic is not the journal that the schema belongs to, or is not there."""
    if topic is not None and topic.id == identity.journal:
        return
    name = Topics(settings.prefix).journal
    there = f"there is another topic of that name, {topic.id}" if topic else "there is none"
    raise OtherJournal(
        f"schema {settings.schema_} belongs to the topic {name} with Kafka's id {identity.journal}; at "
        f"GRAB_KAFKA={settings.kafka} {there}",
        f"set GRAB_KAFKA to the brokers that have it; or, when it is lost for good, `{NEW_JOURNAL}` puts a "
        "new one in its place "
        "(a copy of it with the same offsets is taken by `grabstream init --new-journal`)",
    )


# -- Redis ---------------------------------------------------------------------------------------------------


async def require_prefix(redis: Any, key: str, settings: Settings, identity: Identity | None = None) -> None:
    """Raises OtherSystem when the prefix in Redis belongs to another schema, number of shards or, where it is
    known here, journal.
    """
    found = await redis.get(key)
    if found is None:
        return
    try:
        claim = msgspec.json.decode(found, type=_Claim)
    except msgspec.MsgspecError:
        what = f"key {key} in Redis does not say what prefix {settings.prefix} belongs to, but {found[:80]!r}"
        raise OtherSystem(
            what, f"another GRAB_PREFIX; or, when nobody needs it, `redis-cli DEL {key}`"
        ) from None
    wanted = _Claim(settings.schema_, identity.journal if identity else claim.journal, settings.shards)
    if claim != wanted:
        raise OtherSystem(
            f"prefix {settings.prefix} in Redis belongs to {_in_words(claim)}, and is asked for with "
            f"{_in_words(wanted)}",
            "set them so, or for another system another GRAB_PREFIX; when the system that had it is gone "
            f"for good, `redis-cli DEL {key}` "
            "frees the prefix",
        )


def _in_words(claim: _Claim) -> str:
    return (
        f"GRAB_SCHEMA={claim.schema}, GRAB_SHARDS={claim.shards} and the journal with Kafka's id "
        f"{claim.journal}"
    )


async def claim_prefix(redis: Any, key: str, settings: Settings, identity: Identity) -> None:
    """Writes into Redis what the prefix belongs to, unless it stands there; raises OtherSystem when it
    belongs to another.
    """
    await redis.set(key, _encoded(settings, identity), nx=True)
    await require_prefix(redis, key, settings, identity)


async def replace_claim(redis: Any, key: str, settings: Settings, identity: Identity) -> None:
    """Writes into Redis what the prefix belongs to from here on."""
    await redis.set(key, _encoded(settings, identity))


def _encoded(settings: Settings, identity: Identity) -> bytes:
    return msgspec.json.encode(_Claim(settings.schema_, identity.journal, identity.shards))


# -- Kafka ---------------------------------------------------------------------------------------------------


async def find_journal(settings: Settings) -> Topic | None:
    """The journal's topic; raises OtherSystem when it was made with another number of shards."""
    name = Topics(settings.prefix).journal
    topic = await find_topic(settings.kafka, name)
    if topic is not None and topic.partitions != settings.shards:
        raise OtherSystem(
            f"GRAB_SHARDS is {settings.shards}, but {name} has {topic.partitions} partitions: the number of "
            "shards is fixed once a "
            "system exists",
            f"set GRAB_SHARDS={topic.partitions}, or another GRAB_PREFIX and GRAB_SCHEMA for a new system",
        )
    return topic


async def strangers(connection: AsyncConnection[Any], settings: Settings, is_there: bool) -> list[str]:
    """Cursors of the live read models that the journal, if it `is_there`, does not know, in words: it is not
    the one that they read.
    """
    await use_schema(connection, settings.schema_)
    positions = [
        (name, shard, cursor)
        for name in PROJECTIONS
        for shard, cursor in sorted((await cursors.load(connection, name)).items())
        if cursor.next_offset
    ]
    if is_there and positions:
        # After the cursors: what they know of the journal was in it before.
        async with open_reader(settings.kafka, Topics(settings.prefix).journal) as reader:
            positions = [
                one for one in positions if one[1] >= settings.shards or not await _knows(reader, *one[1:])
            ]
    return [
        f"{name}, shard {shard}: seq {cursor.seq} at offset {cursor.next_offset}"
        for name, shard, cursor in positions
    ]


async def _knows(reader: JournalReader, shard: int, cursor: Cursor) -> bool:
    return cursor.seq == 0 if not cursor.owner else await reader.seq_before(shard, cursor) is not None
