"""Topics: the only module that names them, and the functions that create them.

Partition = shard, so every topic but `rejected` has as many partitions as there are shards.
"""

from typing import Any, Final, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import TopicAlreadyExistsError, for_code

from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.streams.clients import started

DAY_MS: Final = 24 * 3600 * 1000
REPLICATION_MAX: Final = 3
#: The broker unpacks compressed batches, so `max.message.bytes` bounds the unpacked size.
COMPRESSION: Final = "uncompressed"
#: The brokers' number for a setting that was made for the topic itself.
CONFIGURED_FOR_TOPIC: Final = 1


class Topics(NamedTuple):
    """The names of one system's topics; `prefix` lets several systems share the servers."""

    prefix: str

    @property
    def commands(self) -> str:
        """Commands to decide: one JSON object per record, or an array of them."""
        return f"{self.prefix}.commands"

    @property
    def results(self) -> str:
        """Answers to commands from the commands topic."""
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


def retention_ms(topics: Topics) -> dict[str, int]:
    """How long each topic keeps its records, in milliseconds; -1 is for ever."""
    return {
        topics.commands: 7 * DAY_MS,
        topics.results: 7 * DAY_MS,
        topics.journal: -1,
        topics.events: -1,
        topics.rejected: 90 * DAY_MS,
    }


async def create_topics(
    bootstrap: str, topics: Topics, shards: int, replication: int | None = None
) -> list[str]:
    """Creates the missing topics and returns their names. Existing topics are not changed, except by
    `bound_batches`.

    `replication` is the number of copies; by default one per broker, three at most. With three copies or
    more, a record is acknowledged by at least two brokers. Raises aiokafka's errors if the brokers cannot be
    reached or refuse.
    """
    if replication is None:
        async with started(AIOKafkaAdminClient(bootstrap_servers=bootstrap)) as client:
            replication = min(len((await client.describe_cluster())["brokers"]), REPLICATION_MAX)
    created = await _create(bootstrap, _wanted(topics, shards, replication))
    if topics.commands not in created:
        await bound_batches(bootstrap, topics.commands)
    return created


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
    async with started(AIOKafkaAdminClient(bootstrap_servers=bootstrap)) as client:
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
    configs = {"retention.ms": "-1", "max.message.bytes": str(RECORD_BYTES_MAX)}
    await _create(
        bootstrap, [NewTopic(name, num_partitions=shards, replication_factor=copies, topic_configs=configs)]
    )


async def partitions_of(bootstrap: str, name: str) -> list[dict[str, Any]]:
    """The partitions of a topic as the brokers describe them; empty if there is no such topic."""
    async with started(AIOKafkaAdminClient(bootstrap_servers=bootstrap)) as client:
        described = await client.describe_topics([name])
    return list(described[0]["partitions"])


def delete_command(bootstrap: str, name: str) -> str:
    """The command that deletes a topic, with the tool that comes with Kafka."""
    return f"kafka-topics.sh --bootstrap-server {bootstrap} --delete --topic {name}"


async def _create(bootstrap: str, wanted: list[NewTopic]) -> list[str]:
    """Creates the missing topics; returns their names."""
    async with started(AIOKafkaAdminClient(bootstrap_servers=bootstrap)) as client:
        response = await client.create_topics(wanted)
    created = []
    for name, code, message, *_ in response.topic_errors:
        if code == 0:
            created.append(name)
        elif code != TopicAlreadyExistsError.errno:
            raise for_code(code)(f"topic {name}: {message}")
    return created


def _wanted(topics: Topics, shards: int, replication: int) -> list[NewTopic]:
    configuration = {"max.message.bytes": str(RECORD_BYTES_MAX), "compression.type": COMPRESSION}
    if replication >= REPLICATION_MAX:
        configuration["min.insync.replicas"] = "2"
    return [
        NewTopic(
            name,
            num_partitions=1 if name == topics.rejected else shards,
            replication_factor=replication,
            topic_configs={"retention.ms": str(kept_ms), **configuration},
        )
        for name, kept_ms in retention_ms(topics).items()
    ]
