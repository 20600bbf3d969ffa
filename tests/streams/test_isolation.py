"""Shards do not delay each other: a master of a Redis Cluster hangs, with or without its replica, and no
shard of another master waits.

Time bounds are relative to a measurement in the same run before the hang (tests/drill/gaps.py), since other
processes may load the machine.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import redis
from redis.crc import key_slot

from grabstream.connections.opening import key_space, open_gate
from grabstream.lua.keys import KeySpace
from grabstream.ops.commands.read.status import read as status
from grabstream.ops.diagnosis.examination import examine
from grabstream.ops.diagnosis.findings import shard_list
from grabstream.settings import Settings
from grabstream.workshop.rehearsal.stage import take_down
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.cluster import join_redis
from grabstream.workshop.services.servers import Redis
from tests.conftest import make_system, until
from tests.drill.gaps import Gaps, bound_seconds
from tests.support.leases import until_spread_over

pytestmark = pytest.mark.long

MASTERS = 3
BASELINE_SECONDS = 4.0
#: Longer than a lease.
HANG_SECONDS = 6.0
LONG_HANG_SECONDS = 25.0
#: A shard without an answer for this long has caught the hang of another.
SPREAD_SECONDS = 2.0


class Pair(NamedTuple):
    """A master, its replica, and the shards it has."""

    master: Redis
    replica: Redis
    shards: frozenset[int]


@pytest.fixture(scope="module")
def servers_of_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Redis]]:
    """Three masters with a replica each, which tests may stop."""
    ports = free_ports(4 * MASTERS)
    folder = tmp_path_factory.mktemp("masters")
    servers = [
        Redis(folder / f"redis-{n}", ports[n], f"redis-{n}", ports[2 * MASTERS + n])
        for n in range(2 * MASTERS)
    ]
    for server in servers:
        server.start()
    join_redis(servers, MASTERS)
    yield servers
    for server in servers:
        with contextlib.suppress(ProcessLookupError):
            server.send_signal(signal.SIGCONT)
        server.kill()


@pytest.fixture
async def clustered(servers_of_cluster: Sequence[Redis], settings: Settings) -> AsyncIterator[Settings]:
    """A system on the cluster; Kafka and PostgreSQL are shared with other tests."""
    addresses = ",".join(f"127.0.0.1:{server.port}" for server in servers_of_cluster)
    on_cluster = settings.model_copy(update={"redis_url": f"redis-cluster://{addresses}"})
    await make_system(on_cluster)
    yield on_cluster
    for server in servers_of_cluster:
        server.send_signal(signal.SIGCONT)
    await until(lambda: is_whole(servers_of_cluster), 30, "the recovery of the cluster")
    await take_down(on_cluster)


def is_whole(servers: Sequence[Redis]) -> bool:
    """Whether every server sees all other servers as healthy."""
    try:
        for server in servers:
            with redis.Redis(port=server.port, socket_timeout=2) as client:
                if "fail" in str(client.execute_command("CLUSTER NODES")):
                    return False
    except redis.RedisError:
        return False
    return True


def pair_of(servers: Sequence[Redis], keys: KeySpace, shard: int) -> Pair:
    """The servers that have a shard."""
    for master in servers:
        with redis.Redis(port=master.port) as client:
            replication = client.info("replication")
            if replication["role"] != "master" or "slave0" not in replication:
                continue
            slots = client.execute_command("CLUSTER SLOTS")
            of_master = [range(row[0], row[1] + 1) for row in slots if row[2][1] == master.port]
            slot_of = {number: key_slot(keys.shard(number).state.encode()) for number in range(keys.shards)}
        shards = frozenset(
            number for number, slot in slot_of.items() if any(slot in slots for slots in of_master)
        )
        if shard in shards:
            replica_port = int(replication["slave0"]["port"])
            replica = next(server for server in servers if server.port == replica_port)
            return Pair(master, replica, shards)
    raise AssertionError(f"no master has shard {shard}")


class Leases:
    """Polls the leases of shards and collects their holders."""

    def __init__(self, servers: Sequence[Redis], keys: KeySpace, shards: Sequence[int]) -> None:
        self.seen: dict[int, set[str | None]] = {shard: set() for shard in shards}
        self._clients = {
            shard: redis.Redis(port=pair_of(servers, keys, shard).master.port, socket_timeout=1)
            for shard in shards
        }
        self._keys = keys

    async def poll(self) -> None:
        """Polls until cancelled."""
        while True:
            for shard, client in self._clients.items():
                with contextlib.suppress(redis.TimeoutError):
                    holder = await asyncio.to_thread(client.get, self._keys.shard(shard).lease)
                    self.seen[shard].add(holder and holder.decode())
            await asyncio.sleep(0.1)


async def hung(
    clustered: Settings,
    servers: Sequence[Redis],
    worker: Callable[..., Any],
    seconds: float,
    with_replica: bool,
) -> None:
    """Hangs a master, or a master and its replica, and asserts that the shards of other masters are not
    delayed.
    """
    keys = key_space(clustered)
    first = worker(clustered, "decide,relay,sweep")
    async with open_gate(clustered) as gate:
        gaps = Gaps(gate, keys)
        await gaps.start()
        second = worker(clustered, "decide,relay,sweep")
        await until_spread_over(clustered, first, second, seconds=60)
        pair = pair_of(servers, keys, 0)
        healthy = [shard for shard in range(keys.shards) if shard not in pair.shards]
        assert healthy
        leases = Leases(servers, keys, healthy)
        polling = asyncio.create_task(leases.poll())
        try:
            gaps.forget()
            await asyncio.sleep(BASELINE_SECONDS)
            baseline = gaps.seconds()
            gaps.forget()
            pair.master.send_signal(signal.SIGSTOP)
            if with_replica:
                pair.replica.send_signal(signal.SIGSTOP)
            newcomer = worker(clustered, "decide,relay,sweep") if seconds == LONG_HANG_SECONDS else second
            [examined, shown, _] = await asyncio.gather(
                examine(clustered), status(clustered), asyncio.sleep(seconds)
            )
            during = gaps.seconds()
            polling.cancel()
            # A worker that is asked to stop ends, although a server hangs.
            assert await asyncio.to_thread(first.stop) == 0
            for server in pair[:2]:
                server.send_signal(signal.SIGCONT)
            await gaps.all_answer(60)
        finally:
            polling.cancel()
            await gaps.stop()
    print({"baseline": baseline, "hang": during, "hung": sorted(pair.shards), "leases": leases.seen})
    if with_replica:
        assert all(during[shard] > seconds - 1 for shard in pair.shards), "nothing hung"
    # Other tests of a parallel run take both cores for moments. A hang that spread would last as long as it.
    bound = max(SPREAD_SECONDS, bound_seconds(max(baseline.values())))
    bounds = dict.fromkeys(healthy, bound)
    assert {shard: during[shard] for shard in healthy if during[shard] > bounds[shard]} == {}, baseline
    # A worker that joins meanwhile may get a share of these shards; none of them is ever without a lease.
    holders_max = 1 if newcomer is second else 2
    assert {
        shard: holders
        for shard, holders in leases.seen.items()
        if None in holders or len(holders) > holders_max
    } == {}
    assert second.process.poll() is None
    assert "playing" in newcomer.log.read_text(), "a worker that starts during the hang waits for it"
    if with_replica:
        assert [
            finding.what
            for name, finding in examined.findings
            if name == "servers of the Redis Cluster answer"
        ] == [
            f"Redis 127.0.0.1:{pair.master.port} does not answer within 5 s: the state of "
            f"{shard_list(pair.shards)} is unknown"
        ]
        assert {shard["shard"] for shard in shown["shards"] if shard["seq"] is None} == pair.shards


async def test_other_shards_continue_while_a_master_and_its_replica_hang(
    clustered: Settings, servers_of_cluster: Sequence[Redis], worker: Callable[..., Any]
) -> None:
    await hung(clustered, servers_of_cluster, worker, HANG_SECONDS, with_replica=True)


@pytest.mark.nightly
async def test_other_shards_continue_while_a_master_and_its_replica_hang_for_long(
    clustered: Settings, servers_of_cluster: Sequence[Redis], worker: Callable[..., Any]
) -> None:
    await hung(clustered, servers_of_cluster, worker, LONG_HANG_SECONDS, with_replica=True)


@pytest.mark.nightly
async def test_other_shards_continue_while_a_hanging_master_is_replaced(
    clustered: Settings, servers_of_cluster: Sequence[Redis], worker: Callable[..., Any]
) -> None:  # fmt: skip
    await hung(clustered, servers_of_cluster, worker, LONG_HANG_SECONDS, with_replica=False)
