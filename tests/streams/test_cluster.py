"""More than one machine: a Redis Cluster of three masters with replicas, three brokers, and workers that join
and leave under traffic.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from click.testing import CliRunner

from grabstream.ops import cli
from grabstream.ops.connections.opening import key_space, open_redis, require_core
from grabstream.ops.connections.redis_cluster import slot_of
from grabstream.ops.connections.redis_servers import information
from grabstream.ops.services import ClusterServices, free_ports
from grabstream.ops.services.cluster import ports_from
from grabstream.ops.settings import BadSettings, Settings, child_environment, cluster_address, load_settings
from grabstream.streams.topics import Topics
from tests.conftest import make_system, until
from tests.lua.conftest import grabs, opening
from tests.streams.state import assert_state_is_the_journal_s
from tests.streams.traffic import traffic


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServices]:
    """Ten servers of this module's own, to be killed."""
    services = ClusterServices(tmp_path_factory.mktemp("cluster"), ports_from(free_ports(19)))
    services.up()
    yield services
    services.remove()


@pytest.fixture
async def clustered(cluster: ClusterServices, settings: Settings) -> Settings:
    """A system on the cluster."""
    own = settings.model_copy(update=cluster.environment())
    await make_system(own)
    return own


@contextlib.asynccontextmanager
async def client_of(settings: Settings) -> Any:
    client = open_redis(settings)
    try:
        yield client
    finally:
        await client.aclose()


def test_an_address_of_a_cluster() -> None:
    address = cluster_address("rediss-cluster://me:p%40ss@a:1,b.example:2/")
    assert address == ([("a", 1), ("b.example", 2)], "me", "p@ss", True)
    for wrong in (
        "redis-cluster://",
        "redis-cluster://a",
        "redis-cluster://a:1/3",
        "redis-cluster://a:x",
        "redis-cluster://a:1,,b:2",
    ):
        with pytest.raises(ValueError, match="redis-cluster://host:port,host:port"):
            cluster_address(wrong)


def test_a_wrong_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_REDIS_URL", "redis-cluster://localhost")
    with pytest.raises(BadSettings, match=r"GRAB_REDIS_URL: .*redis-cluster://host:port"):
        load_settings()


def test_servers_come_back_as_one_cluster(cluster: ClusterServices) -> None:
    """A second start changes nothing; one that was killed takes its place again."""
    before = cluster.status()
    cluster.up()
    assert cluster.status() == before
    victims = (cluster.redis[4], cluster.kafka[2])
    for server in victims:
        assert server.kill() is True
    cluster.up()
    after = cluster.status()
    assert {name for name in after if after[name] != before[name]} == {server.name for server in victims}
    with redis.Redis(port=cluster.redis[4].port) as client:
        assert client.info("replication")["role"] == "slave"


async def test_topics_have_three_copies_and_two_that_must_have_a_record(clustered: Settings) -> None:
    client = AIOKafkaAdminClient(bootstrap_servers=clustered.kafka)
    await client.start()
    try:
        journal = Topics(clustered.prefix).journal
        [described] = await client.describe_topics([journal])
        assert {len(partition["replicas"]) for partition in described["partitions"]} == {3}
        [answer] = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, journal)])
        configured = {entry[0]: entry[1] for entry in answer.resources[0][4]}
        assert configured["min.insync.replicas"] == "2"
    finally:
        await client.close()


async def test_a_server_of_the_cluster_that_may_evict_is_refused(
    clustered: Settings, cluster: ClusterServices
) -> None:
    async with client_of(clustered) as client:
        await require_core(client)
        with redis.Redis(port=cluster.redis[2].port) as one:
            one.config_set("maxmemory-policy", "allkeys-lru")
            try:
                with pytest.raises(
                    BadSettings, match=rf"127\.0\.0\.1:{cluster.redis[2].port} is allkeys-lru"
                ):
                    await require_core(client)
            finally:
                one.config_set("maxmemory-policy", "noeviction")


async def test_first_calls_at_once_find_their_servers(clustered: Settings) -> None:
    """redis-py itself sends what comes while it asks who has which slots to servers by chance, and then
    closes everybody's connections.
    """
    for _ in range(5):
        async with client_of(clustered) as client:
            shards = [key_space(clustered).shard(number % clustered.shards).state for number in range(40)]
            assert await asyncio.gather(
                *(client.execute_command("EVAL", "return KEYS[1]", 1, key) for key in shards)
            ) == [key.encode() for key in shards]
            with contextlib.ExitStack() as stack:
                ones = [stack.enter_context(redis.Redis(port=int(node.port))) for node in client.masters()]
                assert not any(one.info("errorstats").get("errorstat_MOVED") for one in ones)


async def test_journaled_is_announced_on_a_cluster(clustered: Settings, worker: Callable[..., Any]) -> None:
    """Announcements reach the gate from every master: nobody waits until the gate looks by itself."""
    worker(clustered, "relay,sweep")
    async with traffic(clustered, 100) as crowd:
        gate = crowd.rehearsal._gate
        offers = [f"o{number}" for number in range(12)]
        await gate.decide([opening(offer, 40) for offer in offers], patience_ms=30_000, timeout_ms=30_000)
        heard: set[int] = set()
        announce = gate.journaled._announce
        looks: list[int] = []

        def announced(shard: int, history: int, seq: int) -> None:
            heard.add(shard)
            announce(shard, history, seq)

        async def looked(shard: int) -> None:
            looks.append(shard)

        gate.journaled._announce = announced  # type: ignore[method-assign]
        gate.journaled.look = looked  # type: ignore[method-assign]
        shards = {key_space(clustered).shard_of_offer(offer) for offer in offers}
        async with client_of(clustered) as client:
            servers = {
                next(iter(await information(client, "server", key_space(clustered).shard(shard).state)))
                for shard in shards
            }
        assert len(servers) > 1
        for round_ in range(3):
            answers = await gate.decide([grabs(1, offer, round_)[0] for offer in offers], timeout_ms=10_000)
            assert {answer.outcome for answer in answers} == {"granted"}
        assert heard >= shards


async def test_workers_join_and_leave_and_a_master_dies_under_traffic(
    clustered: Settings, cluster: ClusterServices, worker: Callable[..., Any]
) -> None:
    """Three workers of all roles; one leaves gently, one is killed, others join; then the master of a shard
    dies for good.
    """
    workers = [worker(clustered) for _ in range(3)]
    async with traffic(clustered, 3_000) as crowd, client_of(clustered) as client:
        await crowd.begin()
        await crowd.until_answered(0.2)
        assert await asyncio.to_thread(workers[0].stop) == 0
        workers.append(worker(clustered))
        await crowd.until_answered(0.35)
        workers[1].kill()
        workers.append(worker(clustered))
        await crowd.until_answered(0.5)
        # Who comes while a master is away goes again, and leaves it to whoever starts workers.
        await until(
            lambda: all("playing" in one.log.read_text() for one in workers), 60, "all workers at work"
        )
        [address] = await information(client, "server", key_space(clustered).shard(0).state)
        master = next(server for server in cluster.redis if address.endswith(f":{server.port}"))
        await asyncio.to_thread(master.kill)
        await crowd.adds_up()
    assert [one.process.poll() for one in workers[2:]] == [None] * 3
    await asyncio.to_thread(master.start)
    await until(partial(_is_replica, master.port), 30, "the old master's return as a replica")


async def test_a_shard_moves_to_another_master_under_traffic(
    clustered: Settings, cluster: ClusterServices, worker: Callable[..., Any]
) -> None:
    """Its callers wait while its keys are on the way; then the new server is another life, is reconciled, and
    goes on.
    """
    worker(clustered, "decide,relay,sweep")
    worker(clustered, "project,publish")
    async with traffic(clustered, 1_500) as crowd, client_of(clustered) as client:
        await crowd.begin()
        await crowd.until_answered(0.2)
        shard = key_space(clustered).shard(
            key_space(clustered).shard_of_offer(crowd.rehearsal._chosen[0].offer)
        )
        [before] = await information(client, "server", shard.state)
        target = next(node for node in client.masters() if node.name != before)
        await asyncio.to_thread(
            _move_slot, cluster, slot_of(shard.state), int(before.rpartition(":")[2]), int(target.port)
        )
        await crowd.adds_up()
    async with client_of(clustered) as client:
        assert list(await information(client, "server", shard.state)) == [target.name]
    await assert_state_is_the_journal_s(clustered)


def _move_slot(cluster: ClusterServices, slot: int, source_port: int, target_port: int) -> None:
    """What `redis-cli --cluster reshard` does for one slot."""
    with redis.Redis(port=source_port) as source, redis.Redis(port=target_port) as target:
        source_id, target_id = (one.execute_command("CLUSTER", "MYID").decode() for one in (source, target))
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        while keys := source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10):
            source.execute_command("MIGRATE", "127.0.0.1", target_port, "", 0, 5_000, "KEYS", *keys)
        for one in (target, source):
            one.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)


def _is_replica(port: int) -> bool:
    with redis.Redis(port=port) as client:
        found = client.info("replication")
        return bool(found["role"] == "slave" and found["master_link_status"] == "up")


async def test_status_names_the_server_of_every_shard(clustered: Settings, cluster: ClusterServices) -> None:
    environment = child_environment(
        prefix=clustered.prefix, schema=clustered.schema_, **cluster.environment()
    )
    asked = await asyncio.to_thread(CliRunner().invoke, cli.grabstream, ["status", "--json"], env=environment)
    assert asked.exit_code == 1, asked.output  # no relay has taken the shards over
    ports = {str(server.port) for server in cluster.redis}
    found = json.loads(asked.output)
    assert {shard["server"].rpartition(":")[2] for shard in found["shards"]} <= ports
    assert found["servers"] == {"redis": None, "kafka": None, "postgres": None}
