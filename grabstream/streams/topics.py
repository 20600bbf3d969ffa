"""Topics: the only module that names them, and the functions that create them.

Partition = shard, so every topic except `rejected` has one partition per shard.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    KafkaTimeoutError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    for_code,
)

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.commands import AnyCommand, OfferCommand
from grabstream.streams import brokers
from grabstream.streams.clients import started

#: How long the brokers may need to learn of a new topic.
TOPIC_SECONDS_MAX: Final = 120.0
_POLL_SECONDS: Final = 0.05
DAY_MS: Final = 24 * 3600 * 1000
#: How long each topic keeps its records; -1 is without limit.
RETENTION_MS: Final = {
    "commands": 7 * DAY_MS,
    "operations": 7 * DAY_MS,
    "results": 7 * DAY_MS,
    "journal": -1,
    "events": -1,
    "rejected": 90 * DAY_MS,
    "refusals": 7 * DAY_MS,
}
#: Brokers refuse records whose time is more than an hour ahead of their clocks, which may differ from ours.
AHEAD_MS_MAX: Final = 1_800_000
REPLICATION_MAX: Final = 3
#: The broker unpacks compressed batches, so `max.message.bytes` bounds the unpacked size.
COMPRESSION: Final = "uncompressed"
#: How topics are emptied: by age. Compaction would keep one record of those without a key.
CLEANUP: Final = "delete"
#: Kafka's largest number: a bound that nothing reaches.
UNBOUNDED: Final = 2**63 - 1
#: The brokers' number for a setting that was made for the topic itself.
CONFIGURED_FOR_TOPIC: Final = 1


class Topics(NamedTuple):
    """The names of one system's topics; `prefix` lets several systems share the servers."""

    prefix: str

    @property
    def commands(self) -> str:
        """Commands that users cause: one JSON object per record, or an array of them."""
        return f"{self.prefix}.commands"

    @property
    def operations(self) -> str:
        """Commands of operators about offers, in the same form."""
        return f"{self.prefix}.operations"

    def of(self, command: AnyCommand) -> str:
        """The topic of a command: separate topics allow separate rights to write."""
        return self.operations if isinstance(command, OfferCommand) else self.commands

    @property
    def results(self) -> str:
        """Answers to commands from both topics of commands."""
        return f"{self.prefix}.results"

    @property
    def journal(self) -> str:
        """Blocks of events: the truth."""
        return f"{self.prefix}.journal"

    @property
    def events(self) -> str:
        """Single events as CloudEvents, for other programs."""
        return f"{self.prefix}.events"

    @property
    def rejected(self) -> str:
        """The original bytes of records that could not be decoded."""
        return f"{self.prefix}.rejected"

    @property
    def refusals(self) -> str:
        """A sample of refusals, if the settings enable it."""
        return f"{self.prefix}.refusals"


def retention_ms(topics: Topics, refusals: bool = True) -> dict[str, int]:
    """How long each topic keeps its records, in milliseconds; -1 is without limit. Without `refusals`, only
    the topics that every system has.
    """
    wanted = (name for name in RETENTION_MS if refusals or name != "refusals")
    return {getattr(topics, name): RETENTION_MS[name] for name in wanted}


async def create_topics(
    bootstrap: str,
    topics: Topics,
    shards: int,
    replication: int | None = None,
    refusals: bool = False,
) -> list[str]:
    """Creates the missing topics and returns their names. Existing topics are not changed, except by
    `bound_batches`.

    `replication` is the number of copies; by default one per broker, three at most. With three copies or
    more, a record is acknowledged by at least two brokers. With `refusals`, the topic of refusals is created
    too. Raises aiokafka's errors if the brokers cannot be
    reached or refuse.
    """
    if replication is None:
        async with started(AIOKafkaAdminClient(**brokers.at(bootstrap))) as client:
            replication = min(len((await client.describe_cluster())["brokers"]), REPLICATION_MAX)
    created = await make_topics(bootstrap, _wanted(topics, shards, replication, refusals))
    for name in (topics.commands, topics.operations):
        if name not in created:
            await bound_batches(bootstrap, name)
    return created


class TopicState(NamedTuple):
    """An existing topic: its number of partitions, and its settings, including those of the brokers; empty
    where the client may not read them.
    """

    partitions: int
    settings: Mapping[str, str]


def settings_needed(topics: Topics, name: str, settings: Mapping[str, str]) -> dict[str, str]:
    """The settings with which a topic would lose or refuse records, each with the value that it needs."""
    least = {
        "retention.ms": retention_ms(topics)[name], "retention.bytes": -1,
        "max.message.bytes": RECORD_BYTES_MAX,
    }  # fmt: skip
    if name in (topics.events, topics.refusals) and settings.get("message.timestamp.type") == "CreateTime":
        # The time of their records is that of the event (`record_time_ms`), however long ago.
        least["message.timestamp.after.max.ms"] = AHEAD_MS_MAX
        least["message.timestamp.before.max.ms"] = UNBOUNDED
    needed = {
        setting: str(value)
        for setting, value in least.items()
        if setting in settings and not _is_enough(int(settings[setting]), value)
    }
    if settings.get("cleanup.policy", CLEANUP) != CLEANUP:
        needed["cleanup.policy"] = CLEANUP
    return needed


def _is_enough(value: int, least: int) -> bool:
    """Whether a bound is at least another one; -1 is none."""
    return value == -1 or (least != -1 and value >= least)


async def describe(client: AIOKafkaAdminClient, names: Sequence[str]) -> list[dict[str, Any]]:
    """Topics as the brokers describe them; those that do not exist have no partitions. Raises aiokafka's
    errors, also where the login may not describe a topic, which would seem not to exist.
    """
    described: list[dict[str, Any]] = await client.describe_topics(list(names))
    for topic in described:
        if topic["error_code"] == TopicAuthorizationFailedError.errno:
            raise TopicAuthorizationFailedError(f"topic {topic['topic']}")
    return described


async def states_of(
    client: AIOKafkaAdminClient, described: Sequence[Mapping[str, Any]]
) -> dict[str, TopicState]:
    """The states of the existing topics among those described by the client; raises aiokafka's errors."""
    found = {topic["topic"]: len(topic["partitions"]) for topic in described if topic["partitions"]}
    settings: dict[str, dict[str, str]] = {name: {} for name in found}
    if found:
        wanted = [ConfigResource(ConfigResourceType.TOPIC, name) for name in found]
        for response in await client.describe_configs(wanted):
            for _, _, _, name, entries in response.resources:
                settings[name] = {entry[0]: entry[1] for entry in entries}
    return {name: TopicState(count, settings[name]) for name, count in found.items()}


async def keeps_compressed(client: AIOKafkaAdminClient, name: str) -> dict[str, str] | None:
    """The settings made for a topic, if it keeps compressed batches; None if it does not."""
    [described] = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name)])
    code, message, _, _, entries = described.resources[0]
    if code != 0:
        raise for_code(code)(f"topic {name}: {message}")
    if any(entry[0] == "compression.type" and entry[1] == COMPRESSION for entry in entries):
        return None
    return {entry[0]: entry[1] for entry in entries if entry[3] == CONFIGURED_FOR_TOPIC}


async def bound_batches(bootstrap: str, name: str) -> None:
    """Makes a topic refuse batches that are too large when unpacked, because a reader unpacks a whole batch,
    however large.
    """
    async with started(AIOKafkaAdminClient(**brokers.at(bootstrap))) as client:
        settings = await keeps_compressed(client, name)
        if settings is None:
            return
        wanted = ConfigResource(ConfigResourceType.TOPIC, name, {**settings, "compression.type": COMPRESSION})
        [altered] = await client.alter_configs([wanted])
    code, message, *_ = altered.resources[0]
    if code != 0:
        raise for_code(code)(f"topic {name}: {message}")


async def create_topic_like(bootstrap: str, like: str, name: str, shards: int) -> None:
    """Creates a user's topic if it does not exist: without expiry, one partition per shard, with as many
    copies as the topic `like`.
    """
    copies = len((await partitions_of(bootstrap, like))[0]["replicas"])
    configs = {
        "retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": CLEANUP,
        "max.message.bytes": str(RECORD_BYTES_MAX),
    }  # fmt: skip
    await make_topics(
        bootstrap, [NewTopic(name, num_partitions=shards, replication_factor=copies, topic_configs=configs)]
    )


async def partitions_of(bootstrap: str, name: str) -> list[dict[str, Any]]:
    """The partitions of a topic as the brokers describe them; empty if there is no such topic."""
    async with started(AIOKafkaAdminClient(**brokers.at(bootstrap))) as client:
        [described] = await describe(client, [name])
    return list(described["partitions"])


def change_command(bootstrap: str, name: str, settings: Mapping[str, str]) -> str:
    """The command that changes settings of a topic, with the tool that comes with Kafka."""
    changes = ",".join(f"{setting}={value}" for setting, value in settings.items())
    return f"kafka-configs.sh --bootstrap-server {bootstrap} --alter --topic {name} --add-config {changes}"


def delete_command(bootstrap: str, name: str) -> str:
    """The command that deletes a topic, with the tool that comes with Kafka."""
    return f"kafka-topics.sh --bootstrap-server {bootstrap} --delete --topic {name}"


def record_time_ms(at_ms: int) -> int:
    """The record time of a decision at `at_ms`: the same, or the present time if that is far ahead. A shard
    whose clock was ahead continues at that time, which never goes back.
    """
    now_ms = time.time_ns() // 1_000_000
    return at_ms if at_ms <= now_ms + AHEAD_MS_MAX else now_ms


@asynccontextmanager
async def known_in_time(what: str) -> AsyncIterator[None]:
    """Bounds a wait until the brokers know a topic; raises KafkaTimeoutError."""
    try:
        async with asyncio.timeout(TOPIC_SECONDS_MAX):
            yield
    except TimeoutError:
        raise KafkaTimeoutError(
            f"after {TOPIC_SECONDS_MAX:.0f} s, brokers do not know {what}; their logs say why"
        ) from None


async def make_topics(bootstrap: str, wanted: list[NewTopic]) -> list[str]:
    """Creates the missing topics, and returns their names when all can be used; raises aiokafka's errors."""
    created = []
    async with started(AIOKafkaAdminClient(**brokers.at(bootstrap))) as client:
        response = await client.create_topics(wanted)
        for name, code, message, *_ in response.topic_errors:
            if code == 0:
                created.append(name)
            elif code != TopicAlreadyExistsError.errno:
                raise for_code(code)(f"topic {name}: {message}")
        # The controller answers before the brokers know: until then a topic seems not to exist.
        async with known_in_time("a topic that was created"):
            while True:
                described = await client.describe_topics([one.name for one in wanted])
                if all(_is_usable(one, one["topic"] in created) for one in described):
                    return created
                await asyncio.sleep(_POLL_SECONDS)
    return created


def _is_usable(described: dict[str, Any], is_new: bool) -> bool:
    """Whether a broker knows a topic and, if it is new, a leader of each partition. Leaders of others may be
    away.
    """
    partitions = described["partitions"]
    is_led = all(not one["error_code"] and one["leader"] >= 0 for one in partitions)
    return not described["error_code"] and bool(partitions) and (is_led or not is_new)


def _wanted(topics: Topics, shards: int, replication: int, refusals: bool) -> list[NewTopic]:
    # Brokers may have other defaults.
    configuration = {
        "max.message.bytes": str(RECORD_BYTES_MAX), "compression.type": COMPRESSION,
        "cleanup.policy": CLEANUP, "retention.bytes": "-1",
    }  # fmt: skip
    if replication >= REPLICATION_MAX:
        configuration["min.insync.replicas"] = "2"
    return [
        NewTopic(
            name,
            num_partitions=1 if name == topics.rejected else shards,
            replication_factor=replication,
            topic_configs={"retention.ms": str(kept_ms), **configuration},
        )
        for name, kept_ms in retention_ms(topics, refusals).items()
    ]
