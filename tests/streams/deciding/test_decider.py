"""The decider on real servers: shards do not delay each other, no command of the topic is answered `busy`,
one bad command affects only its own answer, and the order of the topic holds through recoveries.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from grabstream.connections.opening import key_space, open_gate, open_redis, sealer
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.bounds import RECORD_BYTES_MAX
from grabstream.models.commands import AnyCommand, Grab, Load, Open, Return, encode_command
from grabstream.models.offers import CouponTerms
from grabstream.ops.diagnosis.examination import examine
from grabstream.settings import Settings
from grabstream.streams import clients
from grabstream.streams.clients import started
from grabstream.streams.deciding import backlog
from grabstream.streams.deciding.decider import Decider
from grabstream.streams.deciding.decoding import SET_ASIDE_HEADER
from grabstream.streams.relaying.relay import ShardRelay
from grabstream.streams.topics import Topics
from tests.conftest import until
from tests.lua.changed_scripts import inject
from tests.streams.deciding.topic_records import read_all
from tests.streams.state import assert_state_is_the_journal_s
from tests.support.command_line import env_of, grabstream
from tests.support.fake_relay import CARRIED_OUT, TERMS, InterruptedClient, steps_of
from tests.support.raw_batches import RawRecord, produce_batch, raw_batch
from tests.support.redis_keys import delete_keys


def stock_in(keys: KeySpace, shard: int) -> Open:
    """A coupon offer in a shard."""
    name = next(f"s{number}" for number in range(1_000) if keys.shard_of_offer(f"s{number}") == shard)
    return Open(id=f"open-{name}", offer=name, terms=TERMS)


class Stage:
    """A decider and relays in the test's process, so that a test can stop a relay and change the decider's
    keys in Redis.
    """

    def __init__(self, settings: Settings, redis: Any) -> None:
        self.settings = settings
        self.keys = key_space(settings)
        self.topics = Topics(settings.prefix)
        self.redis = redis
        self.relays: dict[int, asyncio.Task[None]] = {}

    def relay(self, *shards: int) -> None:
        """Starts relays."""
        for shard in shards:
            relay = ShardRelay(
                self.redis,
                self.keys.shard(shard),
                self.settings.shards,
                self.settings.kafka,
                self.topics.journal,
                sealer(self.settings),
            )
            self.relays[shard] = asyncio.create_task(relay.run())

    async def stop_relay(self, *shards: int) -> None:
        for shard in shards:
            self.relays[shard].cancel()
            await asyncio.wait({self.relays.pop(shard)})

    async def open(self, *offers: Open) -> None:
        async with open_gate(self.settings) as gate:
            answers = await gate.decide(offers, patience_ms=20_000, timeout_ms=20_000)
            assert {answer.outcome for answer in answers} == {"opened"}

    @asynccontextmanager
    async def decider(self, redis: Any = None, **limits: int) -> AsyncIterator[Decider]:
        """Runs a decider within the context."""
        gate = Gate(
            redis or self.redis,
            self.keys,
            sealer(self.settings),
            GateLimits(**{"timeout_ms": 20_000} | limits),
        )
        gate.start()
        decider, stop = Decider(gate, self.settings.kafka, self.topics, self.settings.shards), asyncio.Event()
        running = asyncio.create_task(decider.run(stop))
        try:
            yield decider
        finally:
            stop.set()
            await running
            await gate.close()

    async def send(self, records: Sequence[Sequence[AnyCommand]], partition: int = 0) -> None:
        """Sends each list of commands as one record."""
        async with started(AIOKafkaProducer(bootstrap_servers=self.settings.kafka)) as producer:
            values = [b"[" + b",".join(map(encode_command, commands)) + b"]" for commands in records]
            await asyncio.gather(
                *[await producer.send(self.topics.commands, value, partition=partition) for value in values]
            )

    async def answers(self) -> dict[str, str]:
        """The last outcome of every command id."""
        records = await read_all(self.settings, self.topics.results)
        return {
            answer["id"]: answer["outcome"] for answer in (json.loads(record.value) for record in records)
        }

    async def until_answered(self, count: int, seconds: float = 180) -> dict[str, str]:
        async def enough() -> Any:
            answers = await self.answers()
            return answers if len(answers) >= count else None

        answered: dict[str, str] = await until(enough, seconds, f"{count} answers")  # type: ignore[assignment]
        return answered

    async def committed(self, partition: int = 0) -> int | None:
        """The offset that the decider's group has committed in a partition of the commands topic."""
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.settings.kafka,
            group_id=f"{self.settings.prefix}.decider",
            enable_auto_commit=False,
        )
        async with started(consumer):
            source = TopicPartition(self.topics.commands, partition)
            consumer.assign([source])
            offset: int | None = await consumer.committed(source)
            return offset


@pytest.fixture
async def stage(system: Settings) -> AsyncIterator[Stage]:
    redis = open_redis(system)
    stage = Stage(system, redis)
    yield stage
    await stage.stop_relay(*list(stage.relays))
    await delete_keys(system)
    await redis.aclose()


def crowd(offer: str, count: int, start: int = 0) -> list[Grab]:
    return [
        Grab(id=f"{offer}-g{number}", offer=offer, user=f"u{number}")
        for number in range(start, start + count)
    ]


def arrays(commands: Sequence[AnyCommand], size: int) -> list[Sequence[AnyCommand]]:
    return [commands[start : start + size] for start in range(0, len(commands), size)]


async def test_a_shard_without_a_relay_delays_no_other_shard(stage: Stage) -> None:
    """One shard has no relay. All commands of another shard in the same partition, and in the same arrays,
    are answered. The committed offset stays before the first command that is not answered.
    """
    stopped, running = stock_in(stage.keys, 0), stock_in(stage.keys, 1)
    stage.relay(0, 1)
    await stage.open(stopped, running)
    await stage.stop_relay(0)
    mixed: list[Sequence[AnyCommand]] = [crowd(running.offer, 50)]
    for start in range(0, 100, 10):
        mixed.append([*crowd(stopped.offer, 10, start), *crowd(running.offer, 10, 50 + start)])
    async with stage.decider() as decider:
        await stage.send(mixed)
        answered = await stage.until_answered(150)
        assert Counter(answered.values()) == {"held": 150}
        assert all(id.startswith(running.offer) for id in answered)
        await until(lambda: _is(stage.committed(), 1), 20, "the commit of the answered record")
        stage.relay(0)
        assert Counter((await stage.until_answered(250)).values()) == {"held": 250}
        await until(lambda: _is(stage.committed(), len(mixed)), 20, "the commit of all")
        assert decider.decided == 250


async def test_commands_in_a_partition_that_answers_do_not_have_are_answered(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The topic of commands was given more partitions. Without a place for their answers, the decider would
    restart without end, and other callers would wait each time.
    """
    offer, shards = stock_in(stage.keys, 1), stage.settings.shards
    async with started(AIOKafkaAdminClient(bootstrap_servers=stage.settings.kafka)) as client:
        response = await client.create_partitions({stage.topics.commands: NewPartitions(shards + 2)})
        assert [error for _, error, _ in response.topic_errors] == [0]

        async def is_led() -> bool:
            [described] = await client.describe_topics([stage.topics.commands])
            return sum(one["leader"] >= 0 for one in described["partitions"]) == shards + 2

        await until(is_led, 60, "the new partitions")
    stage.relay(1)
    await stage.open(offer)
    async with stage.decider():
        await stage.send([crowd(offer.offer, 2)], partition=shards + 1)
        await stage.send([crowd(offer.offer, 2, 2)], partition=0)
        assert Counter((await stage.until_answered(4)).values()) == {"held": 4}
        await until(lambda: _is(stage.committed(shards + 1), 1), 60, "the commit")
    found = {
        json.loads(record.value)["id"]: record.partition
        for record in await read_all(stage.settings, stage.topics.results)
    }
    name = offer.offer
    assert found == {f"{name}-g0": 1, f"{name}-g1": 1, f"{name}-g2": 0, f"{name}-g3": 0}
    assert any(f"partitions ({shards}, {shards + 1})" in message for message in caplog.messages)


async def test_commands_of_a_transaction_are_decided_when_it_is_committed_and_never_when_it_is_aborted(
    stage: Stage,
) -> None:
    offer = stock_in(stage.keys, 0)
    stage.relay(0)
    await stage.open(offer)
    [taken_back, *sent] = [encode_command(command) for command in crowd(offer.offer, 3)]
    producer = AIOKafkaProducer(
        bootstrap_servers=stage.settings.kafka, transactional_id=f"{stage.settings.prefix}-sender"
    )
    async with stage.decider():
        async with started(producer):
            await producer.begin_transaction()
            await producer.send_and_wait(stage.topics.commands, taken_back, partition=0)
            await producer.abort_transaction()
            async with producer.transaction():
                for value in sent:
                    await producer.send_and_wait(stage.topics.commands, value, partition=0)
        # What comes later in the partition is answered later.
        await stage.send([crowd(offer.offer, 1, 9)])
        assert set(await stage.until_answered(3)) == {f"{offer.offer}-g{number}" for number in (1, 2, 9)}


async def test_the_end_of_a_transaction_is_no_command_that_waits(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka marks the end of a transaction by a record that no consumer gets. Committed are the positions of
    the consumer, so nothing seems to wait: also of a partition in which there is nothing else.
    """
    monkeypatch.setattr("grabstream.streams.deciding.decider.POSITION_EVERY_SECONDS", 0.05)
    offer = stock_in(stage.keys, 0)
    stage.relay(0)
    await stage.open(offer)
    [taken_back, sent] = [encode_command(command) for command in crowd(offer.offer, 2)]
    producer = AIOKafkaProducer(
        bootstrap_servers=stage.settings.kafka, transactional_id=f"{stage.settings.prefix}-sender"
    )
    async with stage.decider() as decider:
        async with started(producer):
            await producer.begin_transaction()
            await producer.send_and_wait(stage.topics.commands, taken_back, partition=1)
            await producer.abort_transaction()
            async with producer.transaction():
                await producer.send_and_wait(stage.topics.commands, sent, partition=0)
        assert set(await stage.until_answered(1)) == {f"{offer.offer}-g1"}
        await until(lambda: _is(stage.committed(0), 2), 20, "the commit after the transaction")
        await until(lambda: _is(stage.committed(1), 2), 20, "the commit after the aborted one")
        assert decider.measures.records_waiting[stage.topics.commands]() == 0


async def test_codes_are_given_and_voided_without_being_named_in_the_topic(stage: Stage) -> None:
    offer = stock_in(stage.keys, 0).offer
    terms = CouponTerms(issuer="shop", total=2, codes=True, max_per_grab=2)
    load = Load(id="load", offer=offer, what="codes", chunk=1, chunks=1, items=("SECRET-1", "SECRET-2"))
    grab = Grab(id="grab", offer=offer, user="ann", quantity=2)
    back = Return(id="back", offer=offer, grab="grab")
    stage.relay(0)
    await stage.open(Open(id="open", offer=offer, terms=terms))
    async with stage.decider(), open_gate(stage.settings) as gate:
        [loaded] = await gate.decide([load], patience_ms=20_000, timeout_ms=20_000)
        assert loaded.outcome == "loaded"
        await stage.send([[grab], [back]])
        assert await stage.until_answered(2) == {"grab": "granted", "back": "returned"}
        again = await gate.decide([grab, back], timeout_ms=20_000)
    assert [again[0].coupon_codes, again[1].voided_codes] == [load.items, load.items]
    for topic in (stage.topics.results, stage.topics.journal):
        assert not any(b"SECRET" in record.value for record in await read_all(stage.settings, topic))


async def test_answers_that_are_refused_for_ever_are_lasting_trouble(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The topic of answers has been bounded. Each poll of commands still succeeds."""
    troubles = clients.Troubles()
    monkeypatch.setattr(clients, "TROUBLES", troubles)
    monkeypatch.setattr(clients, "LASTING_SECONDS", 0.5)
    offer, results = stock_in(stage.keys, 0), stage.topics.results
    stage.relay(0)
    await stage.open(offer)

    async def bound(size: str) -> None:
        async with started(AIOKafkaAdminClient(bootstrap_servers=stage.settings.kafka)) as client:
            change = {"max.message.bytes": size}
            await client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, results, change)])

    await bound("10")
    async with stage.decider():
        await stage.send([crowd(offer.offer, 1)])
        where = f"deciding commands of {stage.topics.commands}: has failed for "
        await until(lambda: any(text.startswith(where) for text in caplog.messages), 30, "the warning")
        [present] = [one for one in troubles.present() if one.where.startswith("deciding")]
        assert "MessageSizeTooLarge" in present.words
        await bound(str(RECORD_BYTES_MAX))
        assert await stage.until_answered(1) == {f"{offer.offer}-g0": "held"}


async def _is(finding: Any, expected: object) -> bool:
    return bool(await finding == expected)


@pytest.mark.long
async def test_commands_of_a_shard_without_a_relay_are_bounded_in_memory(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the bound, the partition with the commands of that shard is not read until the shard continues;
    other partitions are.
    """
    monkeypatch.setattr(backlog, "HELD_COMMANDS_MAX", 300)
    monkeypatch.setattr("grabstream.streams.deciding.decider.POLL_RECORDS_MAX", 20)
    monkeypatch.setattr("grabstream.streams.deciding.decider.PARTITION_BYTES_MAX", 4_000)
    stopped, running = stock_in(stage.keys, 0), stock_in(stage.keys, 1)
    stage.relay(0, 1)
    await stage.open(stopped, running)
    await stage.stop_relay(0)
    highest = 0
    add = backlog.ShardBacklog.add

    def counted(self: backlog.ShardBacklog, held: Any) -> None:
        nonlocal highest
        add(self, held)
        highest = max(highest, self.commands)

    monkeypatch.setattr(backlog.ShardBacklog, "add", counted)
    await stage.send(arrays(crowd(stopped.offer, 4_000), 5))
    await stage.send(arrays(crowd(running.offer, 1_000), 5), partition=1)
    async with stage.decider():
        answered = await stage.until_answered(1_000)
        assert all(id.startswith(running.offer) for id in answered)
        assert 300 < highest < 600
        stage.relay(0)
        assert Counter((await stage.until_answered(5_000)).values()) == {"held": 5_000}
        await until(lambda: _is(stage.committed(), 800), 20, "the commit of all")


@pytest.mark.long
async def test_keys_of_records_are_bounded_in_memory(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept until their commands are answered, and may be longer than the commands; also those of
    single grabs, which are decoded together.
    """
    monkeypatch.setattr(backlog, "HELD_BYTES_MAX", 200_000)
    monkeypatch.setattr("grabstream.streams.deciding.decider.POLL_RECORDS_MAX", 20)
    monkeypatch.setattr("grabstream.streams.deciding.decider.PARTITION_BYTES_MAX", 40_000)
    offer = stock_in(stage.keys, 0)
    stage.relay(0)
    await stage.open(offer)
    await stage.stop_relay(0)
    most = 0
    add = backlog.ShardBacklog.add

    def measured(self: backlog.ShardBacklog, held: Any) -> None:
        nonlocal most
        add(self, held)
        most = max(most, self.commands)

    monkeypatch.setattr(backlog.ShardBacklog, "add", measured)
    async with started(AIOKafkaProducer(bootstrap_servers=stage.settings.kafka)) as producer:
        for grab in crowd(offer.offer, 300):
            await producer.send(stage.topics.commands, encode_command(grab), key=b"k" * 4_000, partition=0)
    async with stage.decider():
        await until(lambda: most * 4_000 > 190_000, 20, "a full backlog")
        stage.relay(0)
        assert Counter((await stage.until_answered(300)).values()) == {"held": 300}
    # One more poll may be added.
    assert most < 100


@pytest.mark.long
async def test_commands_of_a_topic_are_never_answered_busy(stage: Stage) -> None:
    """The decider waits for room in the gate's queue, however many commands are in the topic."""
    offer = stock_in(stage.keys, 0)
    stage.relay(0)
    await stage.open(offer)
    await stage.send(arrays([step for n in range(500) for step in steps_of(f"u{n}", offer.offer)[:2]], 100))
    async with stage.decider(queue_commands_max=50, batch_commands_max=64):
        assert Counter((await stage.until_answered(1_000)).values()) == {"held": 500, "confirmed": 500}


@pytest.mark.long
async def test_commands_of_a_topic_wait_while_their_shard_is_fenced(stage: Stage) -> None:
    """A `busy` or `fenced` answer is not stored, and a command that was read cannot be returned to the topic,
    so the decider waits. Other shards continue.
    """
    offer, other = stock_in(stage.keys, 0), stock_in(stage.keys, 1)
    stage.relay(0, 1)
    await stage.open(offer, other)
    state = stage.keys.shard(0).state
    async with stage.decider():
        await stage.stop_relay(0)
        server_epoch = await stage.redis.hget(state, "server_epoch")
        await stage.redis.hdel(state, "server_epoch")
        await stage.send([steps_of("ann", offer.offer)[:3], crowd(offer.offer, 3), crowd(other.offer, 9)])
        answered = await stage.until_answered(9)
        assert all(id.startswith(other.offer) for id in answered)
        await stage.redis.hset(state, "server_epoch", server_epoch)
        stage.relay(0)
        answered = await stage.until_answered(15)
        assert Counter(answered.values()) == {"held": 13, "confirmed": 1, "redeemed": 1}


async def test_odd_records_of_a_topic_are_decided_or_kept_and_hold_up_nothing(stage: Stage) -> None:
    """Names of headers that are not UTF-8, attributes that mean nothing, and offsets that no broker gave."""
    offer = stock_in(stage.keys, 0)
    stage.relay(0)
    await stage.open(offer)
    [first, second, *rest] = crowd(offer.offer, 4)
    odd = [
        RawRecord(encode_command(first), [(b"\xff\xfe", b"x"), (b"", None)]),
        RawRecord(b"\xff{", [(b"\xff\xfe", b"x")], offset_delta=10**6),
        RawRecord(encode_command(second), key=b"\xff", attributes=0xFF, offset_delta=10**6),
        RawRecord(None, timestamp_delta=-(2**62)),
    ]
    now_ms, kafka = round(time.time() * 1_000), stage.settings.kafka
    for record in odd:
        await produce_batch(kafka, stage.topics.commands, 0, raw_batch([record], now_ms))
    # A writer there may write anything.
    forged = RawRecord(b"x", [(SET_ASIDE_HEADER.encode(), None), (b"reason", None)], timestamp_delta=-(2**62))
    await produce_batch(kafka, stage.topics.rejected, 0, raw_batch([forged], now_ms))
    assert (await examine(stage.settings)).findings
    async with stage.decider():
        await stage.send([rest])
        answered = await stage.until_answered(4)
        assert answered == {grab.id: "held" for grab in (first, second, *rest)}
        await until(lambda: _is(stage.committed(), len(odd) + 1), 20, "the commit")
    kept = await read_all(stage.settings, stage.topics.rejected)
    assert [record.value for record in kept] == [b"x", b"\xff{", b""]
    assert [dict(record.headers).get("offset") for record in kept] == [None, b"1", b"3"]


@pytest.mark.long
async def test_an_undecidable_command_of_a_topic_is_answered_invalid_and_set_aside(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process ends, no other command waits, the bytes are stored with topic, partition, offset and index,
    and `doctor` names them.
    """
    offer, other = stock_in(stage.keys, 0), stock_in(stage.keys, 1)
    stage.relay(0, 1)
    await stage.open(offer, other)
    inject(monkeypatch, "before")
    undecidable = Grab(id="undecidable", offer=offer.offer, user="eve", attributes={"card": "7"})
    async with stage.decider():
        await stage.send(
            [
                crowd(offer.offer, 20),
                [*crowd(offer.offer, 2, 20), undecidable, *crowd(offer.offer, 2, 22)],
                crowd(other.offer, 20),
            ]
        )
        answered = await stage.until_answered(45)
        assert answered.pop("undecidable") == "invalid"
        assert Counter(answered.values()) == {"held": 44}
        await until(lambda: _is(stage.committed(), 3), 20, "the commit")
    [rejected] = await read_all(stage.settings, stage.topics.rejected)
    headers = dict(rejected.headers)
    assert rejected.value == encode_command(undecidable)
    assert b"injected" in headers["reason"]
    assert (headers["topic"].decode(), headers["partition"], headers["offset"], headers["index"]) == (
        stage.topics.commands,
        b"0",
        b"1",
        b"2",
    )
    assert SET_ASIDE_HEADER in headers
    findings = [
        finding for _, finding in (await examine(stage.settings)).findings if "set aside" in finding.what
    ]
    assert len(findings) == 1
    assert stage.topics.rejected in findings[0].command


async def commit(stage: Stage, offset: int) -> None:
    """Commits an offset of partition 0 for the deciders."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=stage.settings.kafka,
        group_id=f"{stage.settings.prefix}.decider",
        enable_auto_commit=False,
    )
    async with started(consumer):
        source = TopicPartition(stage.topics.commands, 0)
        consumer.assign([source])
        await consumer.commit({source: offset})


@pytest.mark.parametrize("is_beyond", [True, False])
async def test_an_offset_that_the_topic_does_not_have_is_named_and_skips_no_command_that_is_there(
    stage: Stage, caplog: pytest.LogCaptureFixture, is_beyond: bool
) -> None:
    """The topic lost its end, or was created again; or its records were deleted before a decider ran."""
    offer = stock_in(stage.keys, 1)
    stage.relay(1)
    await stage.open(offer)
    await stage.send([crowd(offer.offer, 1, number) for number in range(3)])
    if is_beyond:
        await commit(stage, 1_000)
        says = (
            "the deciders have committed offset 1000, but it ends at 3",
            "offset 1000, where reading was to continue, is beyond its end",
        )
    else:
        await commit(stage, 0)
        source = TopicPartition(stage.topics.commands, 0)
        async with started(AIOKafkaAdminClient(bootstrap_servers=stage.settings.kafka)) as client:
            await client.delete_records({source: RecordsToDelete(before_offset=2)})
        says = ("2 records were deleted before a decider read them", "from offset 0 to 1 were deleted")
    named = [one.what for _, one in (await examine(stage.settings)).findings if one.severity == "stuck"]
    assert [one for one in named if f"{stage.topics.commands}, partition 0: {says[0]}" in one], named
    async with stage.decider():
        answered = await stage.until_answered(3 if is_beyond else 1)
        assert sorted(answered) == [f"{offer.offer}-g{number}" for number in range(0 if is_beyond else 2, 3)]
        assert set(answered.values()) == {"held"}
        await until(lambda: _is(stage.committed(), 3), 20, "the commit")
    assert says[1] in caplog.text
    named = [one.what for _, one in (await examine(stage.settings)).findings]
    assert not [one for one in named if "partition 0" in one], named


async def test_a_key_of_another_type_makes_only_its_commands_invalid_until_redis_is_rebuilt(
    stage: Stage,
) -> None:
    offer, other = stock_in(stage.keys, 0), stock_in(stage.keys, 1)
    stage.relay(0, 1)
    await stage.open(offer, other)
    await stage.redis.set(stage.keys.shard(0).offer(offer.offer), "of another program")
    async with stage.decider():
        await stage.send([[*crowd(offer.offer, 1), *crowd(other.offer, 1)]])
        answered = await stage.until_answered(2)
    assert (answered[f"{offer.offer}-g0"], answered[f"{other.offer}-g0"]) == ("invalid", "held")
    [finding] = [one for _, one in (await examine(stage.settings)).findings if "set aside" in one.what]
    assert "WRONGTYPE" in finding.what
    assert "after `grabstream rebuild redis`, send the command again" in finding.means
    await stage.stop_relay(0, 1)
    rebuilt = await asyncio.to_thread(
        grabstream, "rebuild", "redis", "--shard", "0", **env_of(stage.settings)
    )
    assert rebuilt.returncode == 0, rebuilt.stderr
    stage.relay(0)
    async with open_gate(stage.settings) as gate:
        [again] = await gate.decide(crowd(offer.offer, 1), patience_ms=20_000, timeout_ms=20_000)
    assert again.outcome == "held"


@pytest.mark.long
async def test_a_shard_is_rebuilt_when_a_script_fails_after_its_first_write(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script fences the shard in that call, the relay rebuilds it from its events, and every command gets
    an answer.
    """
    offer = stock_in(stage.keys, 0)
    stage.relay(*range(stage.settings.shards))
    await stage.open(offer)
    inject(monkeypatch, "after")
    async with stage.decider():
        await stage.send(
            [
                [
                    *crowd(offer.offer, 30),
                    Grab(id="undecidable", offer=offer.offer, user="eve"),
                    *crowd(offer.offer, 5, 30),
                ]
            ]
        )
        assert Counter((await stage.until_answered(36)).values()) == {"held": 36}
    monkeypatch.undo()
    assert await stage.redis.hget(stage.keys.shard(0).state, "partial") is None
    await assert_state_is_the_journal_s(stage.settings)


@pytest.mark.long
@pytest.mark.parametrize("as_array", [True, False], ids=["one array", "three records"])
async def test_the_order_of_the_topic_holds_when_redis_loses_its_tail(stage: Stage, as_array: bool) -> None:
    """The test deletes all keys after the grab was decided, before the grab is journaled and its confirmation
    sent.
    """
    offer = stock_in(stage.keys, 0)
    stage.relay(0)
    await stage.open(offer)
    await stage.stop_relay(0)

    async def lose() -> None:
        await delete_keys(stage.settings)
        stage.relay(0)

    steps = steps_of("ann", offer.offer)[:3]
    async with stage.decider(InterruptedClient(stage.redis, "grab", lose)):
        await stage.send([steps] if as_array else [[step] for step in steps])
        answered = await stage.until_answered(3)
    assert [answered[step.id] for step in steps] == CARRIED_OUT
    journal = await read_all(stage.settings, stage.topics.journal)
    types = [
        json.loads(line)["type"] for record in journal if record.value for line in record.value.split(b"\n")
    ]
    assert [name for name in types if name.startswith(("grab", "payment"))] == [
        "grab.held",
        "grab.confirmed",
        "grab.redeemed",
    ]
