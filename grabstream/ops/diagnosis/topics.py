"""Checks of Kafka: whether the topics exist and have leaders, and whether deciders read the commands. The
settings of topics are among the conditions (`connections/preconditions.py`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import GroupCoordinatorNotAvailableError, NotCoordinatorForGroupError

from grabstream.models.bounds import counted
from grabstream.models.journal import named
from grabstream.ops.diagnosis.findings import Finding, shard_list, spans
from grabstream.settings import Settings
from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.deciding.decider import decider_group
from grabstream.streams.deciding.decoding import SET_ASIDE_HEADER
from grabstream.streams.topics import (
    COMPRESSION,
    DAY_MS,
    Topics,
    TopicState,
    describe,
    keeps_compressed,
    retention_ms,
    states_of,
)

TIMEOUT_MS: Final = 5_000
COORDINATOR_TRIES: Final = 20
COORDINATOR_PAUSE_SECONDS: Final = 0.1
#: A reader is late when a record has waited this long.
LATE_MS: Final = 10_000
#: An open transaction hangs when its first record is this old: Kafka's producers end theirs within a minute.
TRANSACTION_MS_MAX: Final = 60_000
#: How many of the newest records of the topic `rejected` are searched for undecidable commands.
REJECTED_SEARCHED_MAX: Final = 1_000
#: How long an undecidable command is reported.
UNDECIDABLE_REPORTED_MS: Final = 7 * DAY_MS
#: States of a consumer group that has members.
ALIVE: Final = ("Stable", "PreparingRebalance", "CompletingRebalance")


class Partition(NamedTuple):
    """A partition: the broker that leads it (-1: none), the brokers with replicas, and those in sync."""

    number: int
    leader: int
    replicas: Sequence[int]
    in_sync: Sequence[int]


class Lag(NamedTuple):
    """The lag of a reader in a partition: its next offset, the partition's end, and the time of the record at
    its next offset (ms since 1970 UTC; None when it could not be read).
    """

    partition: int
    next_offset: int
    end: int
    since: int | None


class SetAsideCommand(NamedTuple):
    """A command that was set aside because no script can decide it: its offset in `rejected`, why, and when
    (ms since 1970 UTC).
    """

    offset: int
    reason: str
    at: int


class CommandTopic(NamedTuple):
    """A topic of commands: the number of its deciders, and their lags; its `compression.type` when it keeps
    batches compressed, else None; and its open transactions: for each partition, the offset of the first
    record of the oldest one as `next_offset`, and the time of that record. `jumps` are the partitions that do
    not have the offset that the group has committed.
    """

    deciders: int
    lag: list[Lag]
    compression: str | None
    transactions: Sequence[Lag] = ()
    jumps: Sequence["CommittedJump"] = ()


class CommittedJump(NamedTuple):
    """A partition, the offset that a group has committed, and the first and the next offset there."""

    partition: int
    committed: int
    beginning: int
    end: int


class TopicReadings(NamedTuple):
    """Partitions of every topic (an empty list: the topic is missing), the topics that exist, those of
    commands among them, and the newest undecidable commands.
    """

    partitions: dict[str, list[Partition]]
    states: dict[str, TopicState]
    command_topics: dict[str, CommandTopic]
    set_aside: Sequence[SetAsideCommand] = ()


async def read_topics(settings: Settings, consumer: AIOKafkaConsumer) -> TopicReadings:
    """Reads the topics once; raises the client's errors."""
    topics = Topics(settings.prefix)
    names = list(retention_ms(topics, settings.refusals_topic))
    at = brokers.at(settings.brokers, timeout_ms_max=TIMEOUT_MS)
    # Deciders read what transactions have committed, so their partitions end where an open one begins.
    committed = AIOKafkaConsumer(
        **brokers.at(settings.brokers, timeout_ms_max=TIMEOUT_MS), isolation_level="read_committed",
        enable_auto_commit=False,
    )  # fmt: skip
    async with started(AIOKafkaAdminClient(**at)) as client, started(committed):
        described = await describe(client, names)
        partitions = {
            topic["topic"]: sorted(
                Partition(p["partition"], p["leader"], p["replicas"], p["isr"]) for p in topic["partitions"]
            )
            for topic in described
        }
        states = await states_of(client, described)
        command_topics = {
            name: await _reading(client, consumer, committed, topics, name, partitions[name])
            for name in (topics.commands, topics.operations)
            if partitions.get(name)
        }
    aside = await _set_aside(consumer, topics.rejected) if partitions.get(topics.rejected) else []
    return TopicReadings(partitions, states, command_topics, aside)


async def _reading(
    client: AIOKafkaAdminClient,
    consumer: AIOKafkaConsumer,
    committed: AIOKafkaConsumer,
    topics: Topics,
    topic: str,
    partitions: Sequence[Partition],
) -> CommandTopic:
    deciders, offsets = await _group(client, decider_group(topics, topic))
    at = {TopicPartition(topic, p.number): offsets.get((topic, p.number), 0) for p in partitions}
    ends = await committed.end_offsets(list(at))
    open_ones = await lags(consumer, ends)
    # Records may have been added since, outside of transactions.
    still = await committed.end_offsets([TopicPartition(topic, one.partition) for one in open_ones])
    beginnings, last = await consumer.beginning_offsets(list(at)), await consumer.end_offsets(list(at))
    jumps = [
        CommittedJump(p.partition, offset, beginnings[p], last[p])
        for p, offset in at.items()
        if (topic, p.partition) in offsets and not beginnings[p] <= offset <= last[p]
    ]
    return CommandTopic(
        deciders, await lags(consumer, at, ends), await _compression_of(client, topic),
        [one for one in open_ones if still[TopicPartition(topic, one.partition)] == one.next_offset],
        jumps,
    )  # fmt: skip


async def _set_aside(consumer: AIOKafkaConsumer, rejected: str) -> list[SetAsideCommand]:
    """The undecidable commands among the newest records of `rejected`."""
    partition = TopicPartition(rejected, 0)
    end = (await consumer.end_offsets([partition]))[partition]
    begin = (await consumer.beginning_offsets([partition]))[partition]
    first = max(begin, end - REJECTED_SEARCHED_MAX)
    if first >= end:
        return []
    consumer.assign([partition])
    consumer.seek(partition, first)
    commands: list[SetAsideCommand] = []
    while first < end:
        records = (await consumer.getmany(partition, timeout_ms=TIMEOUT_MS // 5)).get(partition, [])
        if not records:
            break
        for record in records:
            headers = named(record.headers)
            if SET_ASIDE_HEADER in headers:
                commands.append(
                    SetAsideCommand(
                        record.offset,
                        headers.get("reason", b"").decode(errors="replace"),
                        int(record.timestamp),
                    )
                )
        first = records[-1].offset + 1
    return commands


async def _compression_of(client: AIOKafkaAdminClient, topic: str) -> str | None:
    """The topic's `compression.type` when it keeps batches compressed, else None."""
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
            # A cluster creates its topic for groups when it is first asked about one.
            if not left:
                raise
            await asyncio.sleep(COORDINATOR_PAUSE_SECONDS)
    members = sum(len(described[5]) for described in response.groups if described[2] in ALIVE)
    return members, {
        (partition.topic, partition.partition): committed.offset
        for partition, committed in offsets.items()
        if committed.offset >= 0
    }


async def lags(
    consumer: AIOKafkaConsumer,
    at: dict[TopicPartition, int],
    ends: Mapping[TopicPartition, int] | None = None,
) -> list[Lag]:
    """The partitions in which a reader at these offsets lags, with the time of its first unread record.
    `ends` are the ends of the partitions, if they are known.
    """
    if not at:
        return []
    if ends is None:
        ends = await consumer.end_offsets(list(at))
    beginnings = await consumer.beginning_offsets(list(at))
    lagging = {}
    for partition, offset in at.items():
        # Records that retention has removed cannot be read any more.
        offset = max(offset, beginnings[partition])
        if offset < ends[partition]:
            lagging[partition] = offset
    return [
        Lag(p.partition, offset, ends[p], await _written_at(consumer, p, offset))
        for p, offset in lagging.items()
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
    """Topics that do not exist, a journal with another number of partitions, and topics that have more than
    they need. Fewer partitions are among the conditions (`connections/preconditions.py`).
    """
    topics = Topics(settings.prefix)
    findings = []
    absent = [
        name for name in retention_ms(topics, settings.refusals_topic) if not readings.partitions.get(name)
    ]
    if absent:
        means = "commands, answers or events of these topics can be neither written nor read"
        what = f"topics are missing: {', '.join(absent)}"
        findings.append(Finding("stuck", what, means, "grabstream init"))
    counts = {name: len(partitions) for name, partitions in readings.partitions.items() if partitions}
    counts.pop(topics.rejected, None)
    journal_partitions = counts.pop(topics.journal, settings.shards)
    if journal_partitions != settings.shards:
        what = (
            f"GRAB_SHARDS is {settings.shards}, but {topics.journal} has "
            f"{counted(journal_partitions, 'partitions')}"
        )
        means = "a partition is a shard: workers refuse to start, or write where no worker reads"
        findings.append(Finding("stuck", what, means, f"export GRAB_SHARDS={journal_partitions}"))
    more = {name: count for name, count in counts.items() if count > settings.shards}
    if more:
        has = ", ".join(f"{name} has {count}" for name, count in more.items())
        means = (
            "commands in the added partitions are decided; each answer is in the partition of `results` "
            "with that partition's number modulo the number of partitions of `results`. Added partitions "
            "of other topics stay empty"
        )
        what = f"{has} partitions, GRAB_SHARDS is {settings.shards}"
        findings.append(Finding("risk", what, means, "let senders use the first partitions only"))
    return findings


def not_led(readings: TopicReadings, settings: Settings) -> list[Finding]:
    """Partitions without a leader, or with replicas that are not in sync."""
    findings = []
    for name, partitions in readings.partitions.items():
        leaderless = [partition.number for partition in partitions if partition.leader < 0]
        degraded = [
            partition
            for partition in partitions
            if partition.leader >= 0 and len(partition.in_sync) < len(partition.replicas)
        ]
        if leaderless:
            means = "these partitions can be neither written nor read: their shards wait"
            command = (
                "start the brokers that are down: kafka-topics.sh --describe --unavailable-partitions "
                "names them"
            )
            findings.append(
                Finding("stuck", f"{name}: no leader for partition {spans(leaderless)}", means, command)
            )
        if degraded:
            brokers = sorted(
                {
                    broker
                    for partition in degraded
                    for broker in set(partition.replicas) - set(partition.in_sync)
                }
            )
            numbers = spans(partition.number for partition in degraded)
            means = "writes may stop when one more broker fails"
            command = f"start broker {spans(brokers)}; if it runs, its log says why its replicas lag"
            findings.append(
                Finding("risk", f"{name}: partition {numbers} has replicas out of sync", means, command)
            )
    return findings


def keeps_batches_compressed(readings: TopicReadings, settings: Settings) -> list[Finding]:
    """Topics of commands that keep batches compressed, so that their unpacked size has no bound."""
    return [
        Finding(
            "risk", f"{commands} keeps compressed batches: its compression.type is {reading.compression}",
            "max.message.bytes bounds only the compressed size of a batch; a decider unpacks the whole batch "
            "and may run out of memory",
            f"grabstream init   # or: kafka-configs.sh --bootstrap-server {settings.kafka} --alter --topic "
            f"{commands} "
            f"--add-config compression.type={COMPRESSION}",
        )
        for commands, reading in readings.command_topics.items()
        if reading.compression is not None
    ]  # fmt: skip


def commands_wait(readings: TopicReadings, settings: Settings, now_ms: int) -> list[Finding]:
    """Commands that no decider reads, or that deciders read too slowly."""
    return [
        finding
        for commands, reading in readings.command_topics.items()
        for finding in _commands_wait(commands, reading, now_ms)
    ]


def offsets_lost(readings: TopicReadings) -> list[Finding]:
    """Partitions of commands whose committed offset no longer exists. A decider that runs has begun again at
    the first record, and has logged that.
    """
    findings = []
    for commands, reading in readings.command_topics.items():
        for partition, offset, beginning, end in reading.jumps:
            where = f"{commands}, partition {partition}"
            if offset < beginning:
                records = counted(beginning - offset, "records")
                what = f"{where}: {records} were deleted before a decider read them"
                means = "their commands are not decided, and their senders get no answer"
                command = "have their senders send them again, with the same ids"
            else:
                what = f"{where}: the deciders have committed offset {offset}, but it ends at {end}"
                means = (
                    "it has lost its end, or was created again: commands that only the lost records had are "
                    "not decided; if it grows beyond that offset first, those before it are skipped, too"
                )
                command = "grabstream worker --roles decide   # reads it from its beginning, nothing twice"
            findings.append(Finding("stuck", what, means, command))
    return findings


def operations_on_commands(readings: TopicReadings, settings: Settings) -> list[Finding]:
    """A topic of commands that takes commands of operators, as before they had their own topic."""
    if not settings.operations_on_commands:
        return []
    topics = Topics(settings.prefix)
    return [
        Finding(
            "risk", f"{topics.commands} accepts commands of operators: GRAB_OPERATIONS_ON_COMMANDS is set",
            "anyone who may send grabs may also open and close offers and adjust the books",
            f"send open, load, amend, pause, resume, close and adjust to {topics.operations}, then unset "
            "GRAB_OPERATIONS_ON_COMMANDS for all workers",
        )
    ]  # fmt: skip


def transactions_hang(readings: TopicReadings, settings: Settings, now_ms: int) -> list[Finding]:
    """Transactions in topics of commands that are open for too long."""
    return [
        Finding(
            "stuck", f"{commands}, partition {one.partition}: a transaction is open since offset "
                     f"{one.next_offset}; {counted(one.end - one.next_offset, 'records')} from there on wait "
                     "for its end",
            "no decider reads them before it is committed or aborted, and their senders get no answer",
            f"kafka-transactions.sh --bootstrap-server {settings.kafka} abort --topic {commands} "
            f"--partition {one.partition} --start-offset {one.next_offset}   # if its sender is gone or "
            "hangs; this discards its commands",
            one.since,
        )
        for commands, reading in readings.command_topics.items()
        for one in reading.transactions
        if one.since is not None and now_ms - one.since > TRANSACTION_MS_MAX
    ]  # fmt: skip


def _commands_wait(commands: str, reading: CommandTopic, now_ms: int) -> list[Finding]:
    waiting = sum(lag.end - lag.next_offset for lag in reading.lag)
    oldest = min((lag.since for lag in reading.lag if lag.since), default=None)
    if not reading.deciders:
        what = f"no decider reads {commands}" + (
            f": {counted(waiting, 'records')} waiting" if waiting else ""
        )
        means = "commands of this topic are not decided, and their senders get no answer"
        return [
            Finding("stuck" if waiting else "risk", what, means, "grabstream worker --roles decide", oldest)
        ]
    if oldest is None or now_ms - oldest < LATE_MS:
        return []
    partitions = shard_list(lag.partition for lag in reading.lag).replace("shard", "partition")
    what = (
        f"{commands}, {partitions}: {counted(waiting, 'records')} waiting, with "
        f"{counted(reading.deciders, 'deciders')} reading"
    )
    means = "senders wait for their answers"
    return [
        Finding(
            "stuck",
            what,
            means,
            "grabstream worker --roles decide   # adds a decider; first repair fenced shards and full "
            "outboxes",
            oldest,
        )
    ]


def commands_set_aside(readings: TopicReadings, settings: Settings, now_ms: int) -> list[Finding]:
    """Undecidable commands: caused by an error of the program, or of data in Redis."""
    aside = [command for command in readings.set_aside if now_ms - command.at < UNDECIDABLE_REPORTED_MS]
    if not aside:
        return []
    last, rejected = aside[-1], Topics(settings.prefix).rejected
    others = f" (and {len(aside) - 1:,} before it)" if len(aside) > 1 else ""
    after = (
        "a key of its offer in Redis is damaged: after `grabstream rebuild redis`, send the command again "
        "with the same id"
        if "WRONGTYPE" in last.reason
        else "report the reason, and send the command again with the same id after an upgrade"
    )
    return [
        Finding(
            "risk", f"a command was set aside because no script can decide it{others}: {last.reason}",
            f"its sender was answered `invalid`, or got no answer if it may have been decided; {after}",
            f"kafka-console-consumer.sh --bootstrap-server {settings.kafka} --topic {rejected} --partition 0 "
            f"--offset {last.offset} "
            "--max-messages 1 --property print.headers=true",
            last.at,
        )
    ]  # fmt: skip
