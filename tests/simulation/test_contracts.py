"""The same cases on the simulated and on the real servers: they must be indistinguishable."""

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest import mock
from uuid import uuid4

import psycopg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from grabstream.lua.keys import KeySpace
from grabstream.lua.running import run_script
from grabstream.projections.database import sessions
from grabstream.runtime.trouble import is_trouble
from grabstream.settings import Settings
from grabstream.streams.projecting import agents
from grabstream.streams.relaying.leases import Lease, pass_lease, request_lease
from grabstream.streams.relaying.shares import Worker
from grabstream.streams.topics import Topics, make_topics
from tests.simulation import faust_app
from tests.simulation.kafka_broker import Broker, Consumer, Producer
from tests.simulation.loop import SimulatedLoop
from tests.simulation.machine import Clock, Trace
from tests.simulation.postgresql_server import PrivatePostgres, Session
from tests.simulation.postgresql_server import Server as PostgresServer
from tests.simulation.redis_server import Client, Server, Store, Weather

# -- Kafka ---------------------------------------------------------------------------------------------------


async def offsets_follow_each_other(producer: Any, consumer: Any, topic: str) -> Any:
    sent = [
        await producer.send_and_wait(topic, b"%d" % number, partition=0, headers=[("n", b"%d" % number)])
        for number in range(3)
    ]
    batch = producer.create_batch()
    for number in (3, 4):
        batch.append(key=b"k", value=b"%d" % number, timestamp=None)
    acknowledged = await producer.send_batch(batch, topic, partition=0)
    place = TopicPartition(topic, 0)
    return [one.offset for one in sent], (await acknowledged).offset, await consumer.end_offsets([place])


async def a_consumer_reads_from_where_it_seeks(producer: Any, consumer: Any, topic: str) -> Any:
    place = TopicPartition(topic, 0)
    for number in range(4):
        await producer.send_and_wait(topic, b"%d" % number, partition=0, headers=[("n", b"%d" % number)])
    consumer.assign([place])
    consumer.seek(place, 1)
    read: list[Any] = []
    while len(read) < 3:
        found = await consumer.getmany(place, timeout_ms=500)
        read += [(one.offset, one.key, one.value, tuple(one.headers)) for one in found.get(place, [])]
    return read, await consumer.getmany(place, timeout_ms=50), await consumer.beginning_offsets([place])


async def a_pending_read_gets_a_new_record(producer: Any, consumer: Any, topic: str) -> Any:
    place = TopicPartition(topic, 1)
    consumer.assign([place])
    consumer.seek(place, 0)
    reading = asyncio.create_task(consumer.getmany(place, timeout_ms=5_000))
    await asyncio.sleep(0.05)
    await producer.send_and_wait(topic, b"late", partition=1)
    return [one.value for one in (await reading)[place]]


async def a_paused_partition_is_read_when_it_is_assigned_again(
    producer: Any, consumer: Any, topic: str
) -> Any:
    place = TopicPartition(topic, 0)
    await producer.send_and_wait(topic, b"paused", partition=0)
    consumer.assign([place])
    consumer.seek(place, 0)
    consumer.pause(place)
    paused = consumer.paused(), await consumer.getmany(place, timeout_ms=100)
    consumer.assign([place])
    consumer.seek(place, 0)
    found = await consumer.getmany(place, timeout_ms=5_000)
    return paused, consumer.paused(), [one.value for one in found[place]]


KAFKA_CASES = (
    offsets_follow_each_other,
    a_consumer_reads_from_where_it_seeks,
    a_pending_read_gets_a_new_record,
    a_paused_partition_is_read_when_it_is_assigned_again,
)
TOPIC = "contract"


def in_simulation(work: Callable[[SimulatedLoop], Awaitable[Any]]) -> Any:
    loop = SimulatedLoop(random.Random(0))
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(loop.create_task(work(loop)))  # type: ignore[arg-type]
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def on_real_kafka(settings: Settings, case: Any) -> Any:
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka)
    name = f"{settings.prefix}.contract"
    await admin.start()
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka, enable_idempotence=True, acks="all")
    consumer = AIOKafkaConsumer(
        bootstrap_servers=settings.kafka, auto_offset_reset="none", enable_auto_commit=False
    )
    try:
        await make_topics(settings.kafka, [NewTopic(name, 2, 1)])
        await producer.start()
        await consumer.start()
        return await case(producer, consumer, name), name
    finally:
        await consumer.stop()
        await producer.stop()
        await admin.delete_topics([name])
        await admin.close()


@pytest.mark.parametrize("case", KAFKA_CASES)
def test_kafka(settings: Settings, case: Any) -> None:
    async def simulated(loop: SimulatedLoop) -> Any:
        broker = Broker(loop, random.Random(1), Trace(loop))
        broker.create(TOPIC, 2)
        members = {"broker": broker}
        producer, consumer = type("P", (Producer,), members)(), type("C", (Consumer,), members)()
        await producer.start()
        await consumer.start()
        return await case(producer, consumer, TOPIC)

    found, name = asyncio.run(on_real_kafka(settings, case))
    assert repr(in_simulation(simulated)) == repr(found).replace(name, TOPIC)


# -- PostgreSQL ----------------------------------------------------------------------------------------------


async def _two(connect: Any, table: str) -> Any:
    first, second = await connect(), await connect()
    await first.execute(f"CREATE SCHEMA {table.partition('.')[0]}")
    await first.execute(f"CREATE TABLE {table} (id integer PRIMARY KEY, amount integer)")
    await first.execute(f"INSERT INTO {table} VALUES (1, 10)")
    return first, second


async def a_row_lock_is_waited_for(connect: Any, table: str) -> Any:
    first, second = await _two(connect, table)
    said: list[str] = []

    async def add() -> None:
        await second.execute(f"UPDATE {table} SET amount = amount + 1")
        said.append("second")

    async with first.transaction():
        await first.execute(f"UPDATE {table} SET amount = amount * 2")
        adding = asyncio.create_task(add())
        await asyncio.sleep(0.3)
        said.append("first")
    await adding
    return said, await (await first.execute(f"SELECT amount FROM {table}")).fetchall()


async def a_wait_for_a_lock_ends(connect: Any, table: str) -> Any:
    first, second = await _two(connect, table)
    await second.execute("SELECT set_config('lock_timeout', %s, false)", ("200",))
    async with first.transaction():
        await first.execute(f"LOCK TABLE {table}")
        with pytest.raises(psycopg.errors.LockNotAvailable) as refused:
            async with second.transaction():
                await second.execute(f"SELECT amount FROM {table}")
    rows = await (await second.execute(f"SELECT amount FROM {table}")).fetchall()
    return str(refused.value).partition("\n")[0], second.info.transaction_status.name, rows


async def an_idle_transaction_is_ended(connect: Any, table: str) -> Any:
    first, second = await _two(connect, table)
    await first.execute("SELECT set_config('idle_in_transaction_session_timeout', %s, false)", ("200",))
    said = ""
    try:
        async with first.transaction():
            await first.execute(f"UPDATE {table} SET amount = 0")
            waiting = asyncio.create_task(second.execute(f"UPDATE {table} SET amount = amount + 1"))
            await asyncio.sleep(0.6)
            await first.execute("SELECT 1")
    except BaseException as error:
        said = f"trouble: {is_trouble(error)}"
    await waiting
    return said, first.closed, await (await second.execute(f"SELECT amount FROM {table}")).fetchall()


async def a_closed_session_releases_what_it_held(connect: Any, table: str) -> Any:
    first, second = await _two(connect, table)
    await first.execute("BEGIN")
    await first.execute(f"UPDATE {table} SET amount = 0")
    await first.execute("SELECT pg_advisory_lock(4711)")
    waiting = asyncio.create_task(second.execute(f"UPDATE {table} SET amount = amount + 1"))
    await asyncio.sleep(0.2)
    await first.close()
    await waiting
    taken = await (await second.execute("SELECT pg_try_advisory_lock(4711)")).fetchall()
    return taken, await (await second.execute(f"SELECT amount FROM {table}")).fetchall()


async def a_wait_that_is_cancelled_leaves_a_session(connect: Any, table: str) -> Any:
    first, second = await _two(connect, table)
    async with first.transaction():
        await first.execute(f"LOCK TABLE {table}")
        waiting = asyncio.create_task(second.execute(f"SELECT amount FROM {table}"))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await asyncio.wait({waiting})
    return waiting.cancelled(), await (await second.execute("SELECT 1")).fetchall()


POSTGRESQL_CASES = (
    a_row_lock_is_waited_for,
    a_wait_for_a_lock_ends,
    an_idle_transaction_is_ended,
    a_closed_session_releases_what_it_held,
    a_wait_that_is_cancelled_leaves_a_session,
)


@pytest.fixture(scope="module")
def database() -> Iterator[PrivatePostgres]:
    database = PrivatePostgres()
    database.prepare(lambda dsn: None)
    yield database
    database.close()


@pytest.mark.parametrize("case", POSTGRESQL_CASES)
async def test_postgresql(settings: Settings, database: PrivatePostgres, case: Any) -> None:
    name = f"contract_{uuid4().hex[:8]}"
    opened: list[Any] = []

    async def connect() -> Any:
        opened.append(await sessions.connect(settings.postgres, name))
        return opened[-1]

    try:
        found = await case(connect, f"{name}.amounts")
    finally:
        for connection in opened:
            await connection.close()
        async with await sessions.connect(settings.postgres, name) as connection:
            await connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE".encode())

    async def simulated(loop: SimulatedLoop) -> Any:
        server = PostgresServer(database, loop, random.Random(1), Trace(loop))
        session = type("S", (Session,), {"server": server})
        with mock.patch.object(sessions, "AsyncConnection", session):
            try:
                return await case(lambda: sessions.connect("-", name), f"{name}.amounts")
            finally:
                server.close()

    assert await asyncio.to_thread(in_simulation, simulated) == found


# -- Faust ---------------------------------------------------------------------------------------------------


class Collector:
    """In place of a projector: keeps what an agent passes on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: list[Any] = []

    async def put(self, item: Any) -> None:
        self.items.append(item)

    async def run(self) -> None:
        await asyncio.Event().wait()


async def agents_get_what_is_in_the_journal(kafka: str, prefix: str, producer: Any) -> Any:
    """What two agents of an app get: of each partition a request to catch up, then its records in order."""
    topic, collectors = Topics(prefix).journal, [Collector("a"), Collector("b")]
    await producer.start()
    app = agents.build_app(kafka, prefix, 2, collectors)  # type: ignore[arg-type]
    app.finalize()
    running = asyncio.create_task(agents._run(app))
    try:
        for number in range(6):
            value = b"" if number == 3 else b"%d" % number
            await producer.send_and_wait(topic, value, partition=number % 2, headers=[("n", b"%d" % number)])
        while min(len(set(map(repr, one.items))) for one in collectors) < 8:
            await asyncio.sleep(0.05)
    finally:
        await agents._stop(app)
        running.cancel()
        await asyncio.wait({running})
        await producer.stop()
    # Ended by the stop, or cancelled; not by an error.
    assert running.cancelled() or running.exception() is None
    found = [list(dict.fromkeys(map(repr, collector.items))) for collector in collectors]
    # Kafka does not say in which order partitions come.
    return [[one for one in items if f"shard={shard}" in one] for items in found for shard in (0, 1)]


@pytest.mark.long
async def test_faust(settings: Settings) -> None:
    prefix = f"{settings.prefix}-faust"
    topic = Topics(prefix).journal
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka)
    await admin.start()
    try:
        await make_topics(settings.kafka, [NewTopic(topic, 2, 1)])
        producer = AIOKafkaProducer(bootstrap_servers=settings.kafka, enable_idempotence=True, acks="all")
        found = await agents_get_what_is_in_the_journal(settings.kafka, prefix, producer)
    finally:
        await admin.delete_topics([topic])
        await admin.close()

    async def simulated(loop: SimulatedLoop) -> Any:
        broker = Broker(loop, random.Random(1), Trace(loop))
        broker.create(topic, 2)
        members = {"broker": broker, "conditions": faust_app.Conditions(), "started": []}
        app = type("A", (faust_app.App,), members)
        with mock.patch.object(agents, "faust", mock.Mock(App=app)):
            return await agents_get_what_is_in_the_journal("-", prefix, type("P", (Producer,), members)())

    assert await asyncio.to_thread(in_simulation, simulated) == found
    assert [len(items) for items in found] == [4, 4, 4, 4]


# -- Redis ---------------------------------------------------------------------------------------------------


async def a_lease_ends(client: Any, keys: KeySpace) -> Any:
    of_shard = keys.shard(0)
    first = await request_lease(client, of_shard, "a", 120, about=Worker(1))
    second = await request_lease(client, of_shard, "b", 120)
    to_nobody = await pass_lease(client, of_shard, "a", "c", 120)
    await request_lease(client, of_shard, "c", 120, about=Worker(2))
    passed = await pass_lease(client, of_shard, "a", "c", 120)
    third = await request_lease(client, of_shard, "b", 120)
    await asyncio.sleep(0.2)
    last = await request_lease(client, of_shard, "b", 120)
    return first, second, to_nobody, passed, third, last


async def a_term_is_raised_and_announced(client: Any, keys: KeySpace) -> Any:
    of_shard = keys.shard(0)
    async with client.pubsub() as pubsub:
        await pubsub.subscribe(of_shard.channel)
        term, epoch, *rest = await run_script(client, "raise_term", [of_shard.state], [4, "me"])
        arguments = (term, "me", epoch)
        await run_script(client, "reconcile", [of_shard.state], (*arguments, "0", 1))
        checkpoint = (0, "00", 1, of_shard.channel, term, "me", 1)
        trimmed = await run_script(
            client, "trim", [of_shard.state, of_shard.outbox], (*arguments, *checkpoint)
        )
        async for message in pubsub.listen():
            if message["type"] == "message":
                break
    same = (await run_script(client, "server_epoch", [of_shard.state], [])) == epoch
    with pytest.raises(Exception, match="LOST"):
        await run_script(client, "fence", [of_shard.state], (term, "another", epoch, "why"))
    return term, len(epoch), rest, trimmed, message["data"], same


async def a_stream_is_waited_for(client: Any, keys: KeySpace) -> Any:
    """Here the wait ends with its time: what ends it earlier is a deciding script."""
    return await client.xread({keys.shard(0).outbox: "0-0"}, count=1, block=50)


REDIS_CASES = (a_lease_ends, a_term_is_raised_and_announced, a_stream_is_waited_for)


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server")
    store = Store()
    yield store
    store.close()


@pytest.mark.parametrize("case", REDIS_CASES)
async def test_real_redis(redis_client: Any, prefix: str, case: Any) -> None:
    assert _normal(await case(redis_client, KeySpace(prefix, 1))) == _EXPECTED[case.__name__]


@pytest.mark.parametrize("case", REDIS_CASES)
def test_simulated_redis(store: Store, case: Any) -> None:
    async def simulated(loop: SimulatedLoop) -> Any:
        store.flush()
        server = Server("redis", store, 0, 2, Clock(loop), loop, random.Random(1))
        client = Client("client", server, Weather(), loop, random.Random(1), Trace(loop))
        return await case(client, KeySpace("contract", 1))

    assert _normal(in_simulation(simulated)) == _EXPECTED[case.__name__]


def _normal(found: Any) -> str:
    return "nothing" if not found else repr(found)


_EXPECTED = {
    "a_lease_ends": repr(
        (
            Lease("a", {}),
            Lease("a", {"a": Worker(1)}),
            False,
            True,
            Lease("c", {"a": Worker(1), "c": Worker(2)}),
            Lease("b", {}),
        )
    ),
    "a_term_is_raised_and_announced": repr(
        (b"5", 80, [b"", b"0", b"complete"], [b"0", [], b"", b""], b"5 0", True)
    ),
    "a_stream_is_waited_for": "nothing",
}
