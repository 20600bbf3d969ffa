"""The client of a Redis Cluster of three masters: a server that hangs delays no other, and keys that are
being moved are found.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import redis
from redis.exceptions import ConnectionError, TimeoutError

from grabstream.connections.opening import open_redis
from grabstream.connections.redis_cluster import ClusterClient, key_of, slot_of
from grabstream.connections.redis_servers import information
from grabstream.gate.journaled import Journaled
from grabstream.lua.keys import KeySpace
from grabstream.lua.running import run_script
from grabstream.settings import Settings, load_settings
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.cluster import join_redis
from grabstream.workshop.services.servers import Redis
from tests.conftest import until

KEYS = KeySpace("isolated", 12)
ONE = "return redis.call('GET', KEYS[1])"
BOTH = "return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])}"


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Redis]]:
    """Three masters that only this module uses."""
    ports, folder = free_ports(6), tmp_path_factory.mktemp("masters")
    servers = [Redis(folder / f"redis-{n}", ports[n], f"redis-{n}", ports[n + 3]) for n in range(3)]
    for server in servers:
        server.start()
    join_redis(servers, 3)
    yield servers
    for server in servers:
        server.kill()


@pytest.fixture
def settings(masters: Sequence[Redis]) -> Settings:
    addresses = ",".join(f"127.0.0.1:{server.port}" for server in masters)
    return load_settings().model_copy(update={"redis_url": f"redis-cluster://{addresses}"})


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[ClusterClient]:
    cluster = open_redis(settings)
    yield cluster
    await cluster.aclose()


@contextlib.contextmanager
def hanging(server: Redis) -> Iterator[None]:
    server.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send_signal(signal.SIGCONT)


async def shards_by_master(client: ClusterClient) -> dict[int, list[int]]:
    """The shards on each master, by its port."""
    await client.load_slots()
    by_port: dict[int, list[int]] = {}
    for shard in range(KEYS.shards):
        by_port.setdefault(client.server_of(slot_of(KEYS.shard(shard).state)).port, []).append(shard)
    assert len(by_port) == 3
    return by_port


@pytest.mark.long
async def test_commands_do_not_wait_for_another_server_that_hangs(
    settings: Settings, client: ClusterClient, masters: Sequence[Redis]
) -> None:
    """Neither in a client that does not know the slots yet, nor in one that asks for them again after a
    timeout.
    """
    shards = await shards_by_master(client)
    hung, *others = masters
    healthy = [shard for server in others for shard in shards[server.port]]

    async def ask_the_others(one: Any) -> None:
        for shard in healthy:
            keys = KEYS.shard(shard)
            await run_script(one, "time", [keys.state], [])
            await one.hmget(keys.state, ["seq"])
            await one.xread({keys.outbox: "0-0"}, count=1)
            async with one.pipeline(transaction=True) as pipe:
                pipe.get(keys.lease)
                assert await pipe.execute() == [None]
            assert [key async for key in one.scan_iter(match=f"{keys.tag}:*")] == []
            assert list(await information(one, "server", keys.state)) != [f"127.0.0.1:{hung.port}"]

    async def ask_them_while_one_hangs(one: Any) -> None:
        waiting = asyncio.create_task(one.hget(KEYS.shard(shards[hung.port][0]).state, "seq"))
        await ask_the_others(one)
        assert not waiting.done(), "the server did not hang"
        with pytest.raises((TimeoutError, ConnectionError)):
            await waiting
        # The client now asks all servers for the slots, and one of them does not answer.
        again = asyncio.create_task(one.hget(KEYS.shard(shards[hung.port][0]).state, "seq"))
        await ask_the_others(one)
        assert not again.done()
        again.cancel()

    async def run_a_script_in_each(one: Any) -> None:
        async def ask(shard: int) -> None:
            await run_script(one, "time", [KEYS.shard(shard).state], [])

        tasks = {shard: asyncio.create_task(ask(shard)) for shard in range(KEYS.shards)}
        await asyncio.wait([tasks[shard] for shard in healthy])
        for shard, task in tasks.items():
            assert task.done() == (shard in healthy)
        await asyncio.gather(*(tasks[shard] for shard in healthy))
        for shard in shards[hung.port]:
            with pytest.raises((TimeoutError, ConnectionError)):
                await tasks[shard]

    with hanging(hung):
        await run_a_script_in_each(client)
        newcomer = open_redis(settings)
        try:
            await asyncio.gather(ask_them_while_one_hangs(client), ask_them_while_one_hangs(newcomer))
            assert len(await information(newcomer, "server")) == 2
        finally:
            await newcomer.aclose()
    assert await client.hget(KEYS.shard(shards[hung.port][0]).state, "seq") is None


@pytest.mark.long
async def test_subscription_receives_messages_of_other_servers_while_one_hangs(
    client: ClusterClient, masters: Sequence[Redis]
) -> None:
    """The gate does not poll here, so only the messages can end its wait."""
    shards = await shards_by_master(client)
    hung, *others = masters
    journaled = Journaled(client, KEYS)
    journaled.look = lambda shard: asyncio.sleep(0)  # type: ignore[method-assign,assignment]
    journaled.start()
    try:
        with hanging(hung):
            for history in (1, 2):
                for server in others:
                    keys = KEYS.shard(shards[server.port][0])
                    with redis.Redis(port=server.port) as one:
                        await until(
                            lambda one=one, keys=keys: one.pubsub_numsub(keys.channel)[0][1],
                            10,
                            "a subscription",
                        )
                        waiting = asyncio.create_task(journaled.wait(keys.shard, history, 5))
                        await asyncio.sleep(0)
                        one.publish(keys.channel, f"{history} 5")
                        await asyncio.wait_for(waiting, 10)
        # Messages of the server that hung arrive again.
        keys = KEYS.shard(shards[hung.port][0])
        with redis.Redis(port=hung.port) as one:
            waiting = asyncio.create_task(journaled.wait(keys.shard, 1, 5))
            await until(
                lambda: one.publish(keys.channel, "1 5") and waiting.done(), 10, "the server that hung"
            )
    finally:
        await journaled.close()


@pytest.mark.long
async def test_commands_follow_keys_that_are_being_moved(
    client: ClusterClient, masters: Sequence[Redis]
) -> None:
    """Scripts with two keys while their slot moves: both keys at the source, apart (no script runs), both at
    the target, and moved.
    """
    first, second = (f"way:{{isolated-way}}:{name}" for name in "ab")
    slot = slot_of(first)
    await client.load_slots()
    source = next(server for server in masters if server.port == client.server_of(slot).port)
    target = next(server for server in masters if server is not source)

    async def both() -> Any:
        replies = await asyncio.gather(
            *(client.execute_command("EVAL", BOTH, 2, first, second) for _ in range(40))
        )
        assert all(reply == replies[0] for reply in replies)
        return replies[0]

    await client.set(first, "1")
    await client.set(second, "2")
    with redis.Redis(port=source.port) as here, redis.Redis(port=target.port) as there:
        ids = [server.execute_command("CLUSTER", "MYID").decode() for server in (here, there)]
        there.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        here.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        assert await both() == [b"1", b"2"]
        here.execute_command("MIGRATE", "127.0.0.1", target.port, first, 0, 5_000)
        with pytest.raises(
            ConnectionError, match="the slot is being moved: TRYAGAIN|the slot is being moved"
        ):
            await client.execute_command("EVAL", BOTH, 2, first, second)
        assert [await client.get(key) for key in (first, second)] == [b"1", b"2"]
        with pytest.raises(ConnectionError, match="being moved"):
            async with client.pipeline(transaction=False) as pipe:
                pipe.get(first)
                await pipe.execute()
        # Scripts that are called at the same time are redirected separately.
        calls = [client.execute_command("EVAL", ONE, 1, key) for key in (first, second, "elsewhere")]
        assert await asyncio.gather(*calls) == [b"1", b"2", None]
        here.execute_command("MIGRATE", "127.0.0.1", target.port, second, 0, 5_000)
        before = there.info("errorstats").get("errorstat_MOVED")
        assert await both() == [b"1", b"2"]
        # If ASKING and its command used different connections, the target would redirect.
        assert there.info("errorstats").get("errorstat_MOVED") == before
        for one in (there, here):
            one.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        assert await both() == [b"1", b"2"]
        assert client.server_of(slot).port == target.port
        async with client.pipeline(transaction=True) as pipe:
            pipe.get(first)
            pipe.get(second)
            assert await pipe.execute() == [b"1", b"2"]
    assert await client.unlink(first, second, "another") == 2


def test_key_of_returns_a_key_of_the_command() -> None:
    assert key_of(("GET", "k")) == "k"
    assert key_of(("EVALSHA", "sha", 2, "a", "b", "argument")) == "a"
    assert key_of(("XREAD", b"COUNT", 1, b"STREAMS", "outbox", "0-0")) == "outbox"
    for keyless in (("TIME",), ("INFO", "server"), ("EVAL", "return 1", 0), ("PING",), ("CONFIG GET", "dir")):
        with pytest.raises(ValueError, match="has no key"):
            key_of(keyless)


@pytest.mark.long
async def test_servers_that_prefer_names_and_have_none_are_reached(
    masters: Sequence[Redis], settings: Settings, client: ClusterClient
) -> None:
    """They answer `?` as host, also in MOVED."""
    servers = [redis.asyncio.Redis(port=server.port) for server in masters]
    try:
        for server in servers:
            await server.config_set("cluster-preferred-endpoint-type", "hostname")
        [[_, _, node, *_], *_] = await servers[0].execute_command("CLUSTER SLOTS")
        assert node[0] == b"?", "the server names a host, so this test proves nothing"
        await shards_by_master(client)
        for shard in range(KEYS.shards):
            await client.hset(KEYS.shard(shard).state, "x", "1")
        moved = client.server_of(slot_of(KEYS.shard(0).state))
        other = next(server for server in masters if server.port != moved.port)
        assert client._slots is not None
        client._slots.owners[slot_of(KEYS.shard(0).state)] = f"127.0.0.1:{other.port}"
        assert await client.hget(KEYS.shard(0).state, "x") == b"1", "after MOVED"
    finally:
        for server in servers:
            await server.config_set("cluster-preferred-endpoint-type", "ip")
            await server.aclose()


async def test_commands_fail_when_no_server_of_the_cluster_answers() -> None:
    nobody = {"redis_url": f"redis-cluster://127.0.0.1:{free_ports(1)[0]}"}
    client = open_redis(load_settings().model_copy(update=nobody))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="no server of the Redis Cluster answers"):
            await client.get("a")
    await client.aclose()
