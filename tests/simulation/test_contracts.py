"""The same cases on the simulated and on the real servers: they must not be told apart."""

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from grabstream.lua.gate.calls import run_script
from grabstream.lua.keys import KeySpace
from grabstream.ops.settings import Settings
from tests.simulation.kafka_broker import Broker, Consumer, Producer
from tests.simulation.loop import SimulatedLoop
from tests.simulation.machine import Clock, Trace
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


KAFKA_CASES = (
    offsets_follow_each_other,
    a_consumer_reads_from_where_it_seeks,
    a_pending_read_gets_a_new_record,
)
TOPIC = "contract"


def in_simulation(work: Callable[[SimulatedLoop], Awaitable[Any]]) -> Any:
    loop = SimulatedLoop()
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
        await admin.create_topics([NewTopic(name, 2, 1)])
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


# -- Redis ---------------------------------------------------------------------------------------------------


async def a_lease_ends(client: Any, keys: KeySpace) -> Any:
    of_shard = keys.shard(0)
    names = [of_shard.lease, of_shard.state]
    first = await run_script(client, "lease", names, ["a", 120])
    second = await run_script(client, "lease", names, ["b", 120])
    await asyncio.sleep(0.2)
    return first, second, await run_script(client, "lease", names, ["b", 120])


async def a_term_is_raised_and_announced(client: Any, keys: KeySpace) -> Any:
    of_shard = keys.shard(0)
    async with client.pubsub() as pubsub:
        await pubsub.subscribe(of_shard.channel)
        term, epoch, *rest = await run_script(client, "raise_term", [of_shard.state], [4, "me"])
        arguments = (term, "me", epoch)
        await run_script(client, "reconcile", [of_shard.state], (*arguments, "0", 1))
        trimmed = await run_script(
            client, "trim", [of_shard.state, of_shard.outbox], (*arguments, 0, "00", 1, of_shard.channel)
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
    "a_lease_ends": repr((b"a", b"a", b"b")),
    "a_term_is_raised_and_announced": repr(
        (b"5", 80, [b"", b"0", b"complete"], [b"5", b"0", b""], b"5 0", True)
    ),
    "a_stream_is_waited_for": "nothing",
}
