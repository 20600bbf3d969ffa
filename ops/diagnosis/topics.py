"""What Kafka says: are the topics there and led, is the journal kept for ever, and does anybody read the
commands.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import GroupCoordinatorNotAvailableError, NotCoordinatorForGroupError

from grabstream.ops.diagnosis.findings import Finding, of_shards, spans
from grabstream.ops.settings import Settings
from grabstream.streams.clients import started
from grabstream.streams.deciding.understanding import SET_ASIDE_HEADER
from grabstream.streams.topics import COMPRESSION, DAY_MS, Topics, keeps_compressed, retention_ms

TIMEOUT_MS: Final = 5_000
COORDINATOR_TRIES: Final = 20
COORDINATOR_PAUSE_SECONDS: Final = 0.1
#: What waits longer than this is not just on its way.
LATE_MS: Final = 10_000
UNKNOWN_TOPIC: Final = 3
#: Of the topic `rejected`, so many of the newest records are looked at; a command that was set aside is named
#: for so long.
REJECTED_LOOK_BACK: Final = 1_000
SET_ASIDE_NAMED_MS: Final = 7 * DAY_MS
ALIVE: Final = ("Stable", "PreparingRebalance", "CompletingRebalance")


class Partition(NamedTuple):
    """A partition: its leader (-1: none), who has copies, and who of them is in sync."""

    number: int
    leader: int
    replicas: Sequence[int]
    in_sync: Sequence[int]


class Lag(NamedTuple):
    """A reader that is behind in a partition: its next offset, the partition's end, and when the record there
    was written, ms.
    """

    partition: int
    next_offset: int
    end: int
    since: int | None


class SetAside(NamedTuple):
    """A command that was set aside: where it is in `rejected`, why, and when, ms."""

    offset: int
    reason: str
    at: int


class TopicReadings(NamedTuple):
    """Partitions of every topic (none: the topic is missing), the journal's settings, the readers of the
    commands, and the newest commands that no script could decide.
    """

    partitions: dict[str, list[Partition]]
    journal_config: dict[str, str]
    #: what the topic of commands does with compressed batches (`compression.type`); None: what it should
    commands_compression: str | None
    deciders: int
    commands_lag: list[Lag]
    set_aside: Sequence[SetAside] = ()


async def read_topics(settings: Settings, consumer: AIOKafkaConsumer) -> TopicReadings:
    """Reads everything once; raises the client's own errors."""
    topics = Topics(settings.prefix)
    names = list(retention_ms(topics))
    async with started(
        AIOKafkaAdminClient(bootstrap_servers=settings.kafka, request_timeout_ms=TIMEOUT_MS)
    ) as client:
        described = await client.describe_topics(names)
        partitions = {
            one["topic"]: sorted(
                Partition(p["partition"], p["leader"], p["replicas"], p["isr"]) for p in one["partitions"]
            )
            for one in described
        }
        config = await _config_of(client, topics.journal) if partitions.get(topics.journal) else {}
        compression = (
            await _compression_of(client, topics.commands) if partitions.get(topics.commands) else None
        )
        deciders, committed = await _group(client, f"{settings.prefix}.decider")
    at = {
        TopicPartition(topics.commands, p.number): committed.get((topics.commands, p.number), 0)
        for p in partitions[topics.commands]
    }
    behind = await lags(consumer, at)
    aside = await _set_aside(consumer, topics.rejected) if partitions.get(topics.rejected) else []
    return TopicReadings(partitions, config, compression, deciders, behind, aside)


async def _set_aside(consumer: AIOKafkaConsumer, rejected: str) -> list[SetAside]:
    """Commands among the newest records of `rejected` that were understood, and that no script could
    decide.
    """
    partition = TopicPartition(rejected, 0)
    end = (await consumer.end_offsets([partition]))[partition]
    begin = (await consumer.beginning_offsets([partition]))[partition]
    first = max(begin, end - REJECTED_LOOK_BACK)
    if first >= end:
        return []
    consumer.assign([partition])
    consumer.seek(partition, first)
    found: list[SetAside] = []
    while first < end:
        records = (await consumer.getmany(partition, timeout_ms=TIMEOUT_MS // 5)).get(partition, [])
        if not records:
            break
        for record in records:
            headers = dict(record.headers)
            if SET_ASIDE_HEADER in headers:
                found.append(
                    SetAside(
                        record.offset,
                        headers.get("reason", b"").decode(errors="replace"),
                        int(record.timestamp),
                    )
                )
        first = records[-1].offset + 1
    return found


async def _config_of(client: AIOKafkaAdminClient, topic: str) -> dict[str, str]:
    wanted = {"retention.ms": None, "retention.bytes": None, "cleanup.policy": None}
    [response] = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic, wanted)])
    return {entry[0]: entry[1] for *_, entries in response.resources for entry in entries}


async def _compression_of(client: AIOKafkaAdminClient, topic: str) -> str | None:
    if await keeps_compressed(client, topic) is None:
        return None
    [response] = await client.describe_configs(
        [ConfigResource(ConfigResourceType.TOPIC, topic, {"compression.type": None})]
    )
    return next(
        (
            str(entry[1])
            for *_, entries in response.resources
            for entry in entries
            if entry[0] == "compression.type"
        ),
        None,
    )


async def _group(client: AIOKafkaAdminClient, group: str) -> tuple[int, dict[tuple[str, int], int]]:
    """How many members a consumer group has, and the offsets it has committed."""
    for left in reversed(range(COORDINATOR_TRIES)):
        try:
            [response] = await client.describe_consumer_groups([group])
            offsets = await client.list_consumer_group_offsets(group)
            break
        except (GroupCoordinatorNotAvailableError, NotCoordinatorForGroupError):
            # A cluster that never had a group makes the place for them at the first question.
            if not left:
                raise
            await asyncio.sleep(COORDINATOR_PAUSE_SECONDS)
    members = sum(len(described[5]) for described in response.groups if described[2] in ALIVE)
    return members, {
        (partition.topic, partition.partition): found.offset
        for partition, found in offsets.items()
        if found.offset >= 0
    }


async def lags(consumer: AIOKafkaConsumer, at: dict[TopicPartition, int]) -> list[Lag]:
    """Where a reader at these offsets is behind, with the time of the first record that it has not read."""
    if not at:
        return []
    ends = await consumer.end_offsets(list(at))
    beginnings = await consumer.beginning_offsets(list(at))
    behind = {}
    for partition, offset in at.items():
        # What retention has removed is read by nobody any more.
        offset = max(offset, beginnings[partition])
        if offset < ends[partition]:
            behind[partition] = offset
    return [
        Lag(p.partition, offset, ends[p], await _written_at(consumer, p, offset))
        for p, offset in behind.items()
    ]


async def _written_at(consumer: AIOKafkaConsumer, partition: TopicPartition, offset: int) -> int | None:
    consumer.assign([partition])
    consumer.seek(partition, offset)
    fetched: dict[Any, list[Any]] = await consumer.getmany(
        partition, timeout_ms=TIMEOUT_MS // 5, max_records=1
    )
    records = fetched.get(partition)
    return int(records[0].timestamp) if records else None


# -- checks --------------------------------------------------------------------------------------------------


def missing(readings: TopicReadings, settings: Settings) -> list[Finding]:
    """Topics that are not there, or have another number of partitions."""
    topics = Topics(settings.prefix)
    found = []
    absent = [name for name in retention_ms(topics) if not readings.partitions.get(name)]
    if absent:
        means = "nothing that goes by them goes on: commands, answers, the journal itself"
        found.append(Finding("stuck", f"topics are missing: {', '.join(absent)}", means, "grabstream init"))
    wrong = {
        name: len(partitions) for name, partitions in readings.partitions.items()
        if partitions and name != topics.rejected and len(partitions) != settings.shards
    }  # fmt: skip
    if wrong:
        counts = ", ".join(f"{name} has {count}" for name, count in wrong.items())
        number = wrong.get(topics.journal)
        mend = (
            f"export GRAB_SHARDS={number}"
            if number
            else f"make those topics anew with {settings.shards} partitions"
        )
        means = "partition = shard: workers refuse to start, or write where nobody reads"
        found.append(
            Finding("stuck", f"GRAB_SHARDS is {settings.shards}, but {counts} partitions", means, mend)
        )
    return found


def not_led(readings: TopicReadings, settings: Settings) -> list[Finding]:
    """Partitions without a leader, or with copies that are behind."""
    found = []
    for name, partitions in readings.partitions.items():
        leaderless = [one.number for one in partitions if one.leader < 0]
        behind = [
            one.number for one in partitions if one.leader >= 0 and len(one.in_sync) < len(one.replicas)
        ]
        if leaderless:
            means = "nothing can be written or read there: the shards of these partitions wait"
            mend = (
                "start the brokers that are down: kafka-topics.sh --describe --unavailable-partitions "
                "names them"
            )
            found.append(
                Finding("stuck", f"{name}: no leader for partition {spans(leaderless)}", means, mend)
            )
        if behind:
            brokers = sorted(
                {
                    b
                    for one in partitions
                    if one.number in behind
                    for b in set(one.replicas) - set(one.in_sync)
                }
            )
            means = "one broker more may be lost before writing stops, or none"
            mend = f"start broker {spans(brokers)}, or see why it is behind"
            found.append(
                Finding("risk", f"{name}: partition {spans(behind)} has copies that are behind", means, mend)
            )
    return found


def journal_forgets(readings: TopicReadings, settings: Settings) -> list[Finding]:
    """A journal that is not kept for ever."""
    config, journal = readings.journal_config, Topics(settings.prefix).journal
    kept = {"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": "delete"}
    wrong = {name: config[name] for name, value in kept.items() if name in config and config[name] != value}
    if not wrong:
        return []
    changes = ",".join(f"{name}={kept[name]}" for name in wrong)
    return [
        Finding(
            "risk", f"{journal} is not kept for ever: "
                    f"{', '.join(f'{name} is {value}' for name, value in wrong.items())}",
            "the truth that everything is rebuilt from is being deleted",
            f"kafka-configs.sh --bootstrap-server {settings.kafka} --alter --topic {journal} --add-config "
            f"{changes}",
        )
    ]  # fmt: skip


def keeps_batches_compressed(readings: TopicReadings, settings: Settings) -> list[Finding]:
    """Commands in batches that are as large as somebody likes when a reader unpacks them."""
    if readings.commands_compression is None:
        return []
    commands = Topics(settings.prefix).commands
    return [
        Finding(
            "risk", f"{commands} keeps compressed batches: its compression.type is "
                    f"{readings.commands_compression}",
            "max.message.bytes bounds a batch as it is sent, and a decider unpacks it whole: it may need "
            "more memory than there is",
            f"grabstream init   # or: kafka-configs.sh --bootstrap-server {settings.kafka} --alter --topic "
            f"{commands} "
            f"--add-config compression.type={COMPRESSION}",
        )
    ]  # fmt: skip


def commands_wait(readings: TopicReadings, settings: Settings, now_ms: int) -> list[Finding]:
    """Commands that nobody reads, or not fast enough."""
    waiting = sum(lag.end - lag.next_offset for lag in readings.commands_lag)
    oldest = min((lag.since for lag in readings.commands_lag if lag.since), default=None)
    commands = Topics(settings.prefix).commands
    if not readings.deciders and readings.partitions.get(commands):
        what = f"nobody reads {commands}: {waiting:,} records wait" if waiting else f"nobody reads {commands}"
        means = "commands that come by the topic are not decided, their senders get no answer"
        return [
            Finding("stuck" if waiting else "risk", what, means, "grabstream worker --roles decide", oldest)
        ]
    if oldest is None or now_ms - oldest < LATE_MS:
        return []
    shards = of_shards(lag.partition for lag in readings.commands_lag).replace("shard", "partition")
    what = f"{commands}, {shards}: {waiting:,} records wait, though {readings.deciders} deciders read"
    means = "senders wait for their answers"
    return [
        Finding(
            "stuck",
            what,
            means,
            "grabstream worker --roles decide   # one more; see also what is fenced or full",
            oldest,
        )
    ]


def commands_set_aside(readings: TopicReadings, settings: Settings, now_ms: int) -> list[Finding]:
    """Commands that no script could decide: an error of the program, or of what Redis holds for them."""
    aside = [one for one in readings.set_aside if now_ms - one.at < SET_ASIDE_NAMED_MS]
    if not aside:
        return []
    last, rejected = aside[-1], Topics(settings.prefix).rejected
    others = f", and {len(aside) - 1} before it" if len(aside) > 1 else ""
    return [
        Finding(
            "risk", f"a command was set aside, since no script can decide it{others}: {last.reason}",
            "its sender was answered `invalid`, or nothing where nobody knows whether it is decided; report "
            "the reason, and send the "
            "command again under its id after an upgrade",
            f"kafka-console-consumer.sh --bootstrap-server {settings.kafka} --topic {rejected} --partition 0 "
            f"--offset {last.offset} "
            "--max-messages 1 --property print.headers=true",
            last.at,
        )
    ]  # fmt: skip
