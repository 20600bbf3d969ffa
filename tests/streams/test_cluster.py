"""A cluster: a Redis Cluster of three masters with replicas, three brokers, and workers that start and end
under traffic.
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

from grabstream.connections.opening import key_space, open_redis, require_core
from grabstream.connections.redis_cluster import slot_of
from grabstream.connections.redis_servers import information
from grabstream.lua.library import library
from grabstream.ops import cli
from grabstream.settings import BadSettings, Settings, child_environment, cluster_address, load_settings
from grabstream.streams.topics import Topics
from grabstream.workshop.services import ClusterServices, free_ports
from grabstream.workshop.services.cluster import ports_from
from tests.conftest import make_system, until
from tests.streams.state import assert_state_is_the_journal_s
from tests.streams.traffic import traffic
from tests.support.shards import grabs, opening

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterServices]:
    """Ten servers that belong to this module, which may kill them."""
    services = ClusterServices(tmp_path_factory.mktemp("cluster"), ports_from(free_ports(19)))
    services.up()
    yield services
    services.remove()


@pytest.fixture
async def clustered(cluster: ClusterServices, settings: Settings) -> Settings:
    """A system on the cluster."""
    on_cluster = settings.model_copy(update=cluster.environment())
    await make_system(on_cluster)
    return on_cluster


@contextlib.asynccontextmanager
async def client_of(settings: Settings) -> Any:
    client = open_redis(settings)
    try:
        yield client
    finally:
        await client.aclose()


def test_cluster_addresses_are_parsed() -> None:
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


def test_a_wrong_cluster_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_REDIS_URL", "redis-cluster://localhost")
    with pytest.raises(BadSettings, match=r"GRAB_REDIS_URL: .*redis-cluster://host:port"):
        load_settings()


def test_up_restarts_ended_servers_of_the_cluster(cluster: ClusterServices) -> None:
    """A second `up` changes nothing; a killed server rejoins the cluster."""
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


async def test_topics_have_three_replicas_and_need_two_in_sync(clustered: Settings) -> None:
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


async def test_a_server_of_the_cluster_with_an_eviction_policy_is_refused(
    clustered: Settings, cluster: ClusterServices
) -> None:
    async with client_of(clustered) as client:
        await require_core(client)
        with redis.Redis(port=cluster.redis[2].port) as server:
            server.config_set("maxmemory-policy", "allkeys-lru")
            try:
                with pytest.raises(
                    BadSettings, match=rf"127\.0\.0\.1:{cluster.redis[2].port} is allkeys-lru"
                ):
                    await require_core(client)
            finally:
                server.config_set("maxmemory-policy", "noeviction")


async def test_concurrent_first_calls_reach_the_right_servers(clustered: Settings) -> None:
    """redis-py sends commands to random servers while it reads the map of slots, and then closes the
    connections of all callers. The client of this program prevents both.
    """
    for _ in range(5):
        async with client_of(clustered) as client:
            shards = [key_space(clustered).shard(number % clustered.shards).state for number in range(40)]
            assert await asyncio.gather(
                *(client.execute_command("EVAL", "return KEYS[1]", 1, key) for key in shards)
            ) == [key.encode() for key in shards]
            with contextlib.ExitStack() as stack:
                servers = [stack.enter_context(redis.Redis(port=int(node.port))) for node in client.masters()]
                assert not any(server.info("errorstats").get("errorstat_MOVED") for server in servers)


async def test_announcements_reach_the_gate_from_every_master(
    clustered: Settings, worker: Callable[..., Any]
) -> None:
    """Answers are released by announcements, without the gate's polling."""
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


async def test_traffic_survives_changes_of_workers_and_the_end_of_a_master(
    clustered: Settings, cluster: ClusterServices, worker: Callable[..., Any]
) -> None:
    """Three workers with all roles: one is stopped, one is killed, others start; then the master of a shard
    is killed and not restarted.
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
        # A worker that starts while a master is missing would end again, so wait until all have started.
        await until(
            lambda: all("playing" in started.log.read_text() for started in workers), 60, "all workers"
        )
        [address] = await information(client, "server", key_space(clustered).shard(0).state)
        master = next(server for server in cluster.redis if address.endswith(f":{server.port}"))
        await asyncio.to_thread(master.kill)
        await crowd.adds_up()
    assert [running.process.poll() for running in workers[2:]] == [None] * 3
    await asyncio.to_thread(master.start)
    await until(partial(_is_replica, master.port), 30, "the return of the old master as a replica")


@pytest.mark.nightly
async def test_traffic_survives_the_move_of_a_shard_to_another_master(
    clustered: Settings, cluster: ClusterServices, worker: Callable[..., Any]
) -> None:
    """Callers of the shard wait while its keys are being moved. The new server has another server epoch, so
    the relay compares the shard with the journal before it continues.
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
        # Its relay finds no function library there, and loads it.
        await target.client.execute_command("FUNCTION", "DELETE", library().name)
        await asyncio.to_thread(
            _move_slot, cluster, slot_of(shard.state), int(before.rpartition(":")[2]), int(target.port)
        )
        await crowd.adds_up()
    async with client_of(clustered) as client:
        assert list(await information(client, "server", shard.state)) == [target.name]
    await assert_state_is_the_journal_s(clustered)


def _move_slot(cluster: ClusterServices, slot: int, source_port: int, target_port: int) -> None:
    """Moves one slot, as `redis-cli --cluster reshard` does."""
    with redis.Redis(port=source_port) as source, redis.Redis(port=target_port) as target:
        source_id, target_id = (
            server.execute_command("CLUSTER", "MYID").decode() for server in (source, target)
        )
        target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        while keys := source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10):
            source.execute_command("MIGRATE", "127.0.0.1", target_port, "", 0, 5_000, "KEYS", *keys)
        for server in (target, source):
            server.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)


def _is_replica(port: int) -> bool:
    with redis.Redis(port=port) as client:
        replication = client.info("replication")
        return bool(replication["role"] == "slave" and replication["master_link_status"] == "up")


@pytest.mark.nightly
async def test_status_names_the_server_of_every_shard(clustered: Settings, cluster: ClusterServices) -> None:
    environment = child_environment(
        prefix=clustered.prefix, schema=clustered.schema_, **cluster.environment()
    )
    done = await asyncio.to_thread(CliRunner().invoke, cli.grabstream, ["status", "--json"], env=environment)
    assert done.exit_code == 1, done.output  # no relay has taken over the shards
    ports = {str(server.port) for server in cluster.redis}
    status = json.loads(done.output)
    assert {shard["server"].rpartition(":")[2] for shard in status["shards"]} <= ports
    assert status["servers"] == {"redis": None, "kafka": None, "postgres": None}
