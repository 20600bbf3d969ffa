"""The faults of a Redis Cluster: servers are killed or hang, replicas are promoted by the cluster or by an
operator, slots move.
"""

import asyncio
import signal
import subprocess
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import redis
from redis.exceptions import RedisError

from grabstream.connections.redis_cluster import slot_of
from grabstream.connections.redis_servers import information
from grabstream.workshop.services.servers import Redis
from tests.conftest import until
from tests.drill.stage import Scene

FAILOVER_SECONDS: Final = 30.0
#: How long a master and its replica hang: longer than every timeout of this program, and much longer than a
#: lease.
HUNG_SECONDS: Final = 25.0
#: How long the keys of a slot are on two servers, some on each.
HALFWAY_SECONDS: Final = 2.0
TOOL_SECONDS: Final = 120.0
ROUNDS: Final = 3


async def chosen_master(scene: Scene) -> Redis:
    """The master of shard 0: always the same shard, so that a fault that asks twice has one master."""
    [address] = await information(scene.redis, "server", scene.keys.shard(0).state)
    port = int(address.rpartition(":")[2])
    return next(server for server in scene.servers.many.redis if server.port == port)


def replica_of(scene: Scene, master: Redis) -> Redis:
    with redis.Redis(port=master.port) as client:
        port = int(client.info("replication")["slave0"]["port"])
    return next(server for server in scene.servers.many.redis if server.port == port)


async def promoted(server: Redis) -> None:
    """Returns when a server is a master."""

    def is_master() -> bool:
        with redis.Redis(port=server.port, socket_timeout=2) as client:
            try:
                return bool(client.info("replication")["role"] == "master")
            except RedisError:
                return False

    await until(is_master, FAILOVER_SECONDS, f"the promotion of {server.name}")


async def failover(scene: Scene) -> None:
    """A master is killed, its replica is promoted; the old master returns as a replica."""
    master = await chosen_master(scene)
    scene.touched |= await shards_of(scene, master)
    replica = replica_of(scene, master)
    await asyncio.to_thread(master.kill)
    await promoted(replica)
    await asyncio.to_thread(master.start)


async def stale_failover(scene: Scene) -> None:
    """A master is killed whose replica could not follow it for some time."""
    master = await chosen_master(scene)
    scene.touched |= await shards_of(scene, master)
    replica = replica_of(scene, master)
    with redis.Redis(port=master.port) as client:
        client.execute_command("ACL", "SETUSER", "default", "-psync", "-sync")
        client.execute_command("CLIENT", "KILL", "TYPE", "replica")
    await scene.traffic.more(scene.random.randint(100, 200))
    await asyncio.to_thread(master.kill)
    await promoted(replica)
    await asyncio.to_thread(master.start)


async def paused_primary(scene: Scene) -> None:
    """A master hangs, with clients connected, until its replica is promoted; then it continues."""
    master = await chosen_master(scene)
    scene.touched |= await shards_of(scene, master)
    replica = replica_of(scene, master)
    master.send_signal(signal.SIGSTOP)
    await promoted(replica)
    master.send_signal(signal.SIGCONT)


async def found_master(scene: Scene) -> Redis:
    """Returns `chosen_master`, and tries again while connections are still being closed after the previous
    round.
    """
    masters_found: list[Redis] = []

    async def is_found() -> bool:
        try:
            masters_found.append(await chosen_master(scene))
        except (RedisError, OSError):
            return False
        return True

    await until(is_found, FAILOVER_SECONDS, "the master of shard 0")
    return masters_found[-1]


def has_replica(server: Redis) -> bool:
    with redis.Redis(port=server.port, socket_timeout=2) as client:
        try:
            return bool(client.info("replication").get("slave0", {}).get("state") == "online")
        except RedisError:
            return False


# -- a pair hangs --------------------------------------------------------------------------------------------


async def hung_pair(scene: Scene) -> None:
    """A master and its replica hang together: no server takes over their shards, and no other shard may be
    delayed.
    """
    hanging = await chosen_master(scene)
    pair = (hanging, replica_of(scene, hanging))
    scene.touched |= await shards_of(scene, hanging)
    for server in pair:
        server.send_signal(signal.SIGSTOP)
    await asyncio.sleep(HUNG_SECONDS)
    for server in pair:
        server.send_signal(signal.SIGCONT)


# -- a failover that an operator orders ----------------------------------------------------------------------


async def manual_failover(scene: Scene, *how: str) -> None:
    """An operator orders failovers between a master and its replica, several times under traffic."""
    for _ in range(ROUNDS):
        old = await found_master(scene)
        await until(partial(has_replica, old), FAILOVER_SECONDS, "a replica")
        new = replica_of(scene, old)
        scene.touched |= await shards_of(scene, old)
        with redis.Redis(port=new.port, socket_timeout=5) as client:
            client.execute_command("CLUSTER", "FAILOVER", *how)
        await promoted(new)
        await scene.traffic.more(100, FAILOVER_SECONDS * 2, "deciding after a failover")


async def forced_failover(scene: Scene) -> None:
    """The same without the agreement of the master, which may have decisions that its replica lacks."""
    await manual_failover(scene, "FORCE")


# -- slots move ----------------------------------------------------------------------------------------------


async def moved_slots(scene: Scene) -> None:
    """A slot moves to another master; for some time its keys are on both servers."""
    source = await chosen_master(scene)
    target = next(server for server in masters(scene) if server.port != source.port)
    slot = slot_of(scene.keys.shard(0).state)
    scene.touched.add(0)
    with redis.Redis(port=source.port) as source_client, redis.Redis(port=target.port) as target_client:
        source_id, target_id = node_id(source), node_id(target)
        target_client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source_client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        await asyncio.to_thread(_migrate, source_client, target.port, slot, 4)
        await asyncio.sleep(HALFWAY_SECONDS)
        await asyncio.to_thread(_migrate, source_client, target.port, slot)
        for client in (target_client, source_client):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)


def _migrate(source: Any, target_port: int, slot: int, keys_max: int = 1_000_000) -> None:
    """Moves a bounded number of keys of a slot, including keys that are made in the meantime."""
    moved = 0
    while moved < keys_max and (
        keys := source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, min(10, keys_max - moved))
    ):
        source.execute_command("MIGRATE", "127.0.0.1", target_port, "", 0, 5_000, "KEYS", *keys)
        moved += len(keys)


async def resharded(scene: Scene) -> None:
    """`redis-cli --cluster` moves the slot of a shard and thousands of others to another master, and then
    balances all masters again.
    """
    before = await owners(scene)
    # The tool moves the lowest slots first: choose the shard with the fewest slots below it.
    below = {
        shard: slots_of(owner).index(slot_of(scene.keys.shard(shard).state))
        for shard, owner in before.items()
    }
    shard = min(below, key=lambda number: below[number])
    source, count = before[shard], below[shard] + 1
    target = next(server for server in masters(scene) if server.port != source.port)
    ends = ("--cluster-from", node_id(source), "--cluster-to", node_id(target))
    await tool("reshard", source, *ends, "--cluster-slots", str(count), "--cluster-yes")
    moved = await owners(scene)
    if moved[shard].port != target.port:
        raise AssertionError(f"shard {shard} is at {moved[shard].name}, not at {target.name}")
    await scene.traffic.more(100, FAILOVER_SECONDS * 2, "deciding after the reshard")
    await tool("rebalance", target, "--cluster-threshold", "1", "--cluster-use-empty-masters")
    after = await owners(scene)
    scene.touched |= {
        shard for shard in before if not before[shard].port == moved[shard].port == after[shard].port
    }
    await tool("check", target)


async def tool(verb: str, server: Redis, *words: str) -> str:
    """Runs `redis-cli --cluster`; returns its output, raises AssertionError if it failed."""
    command = ["redis-cli", "--cluster", verb, f"127.0.0.1:{server.port}", *words]
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=TOOL_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise AssertionError(
            f"{' '.join(command)}: exit code {done.returncode}: …{(done.stdout + done.stderr)[-500:]}"
        )
    return done.stdout


# -- owners of slots and shards ------------------------------------------------------------------------------


def masters(scene: Scene) -> list[Redis]:
    """The servers that have slots, in the order of the server set."""
    with redis.Redis(port=scene.servers.many.redis[0].port) as client:
        ports = {int(slots[2][1]) for slots in client.execute_command("CLUSTER SLOTS")}
    return [server for server in scene.servers.many.redis if server.port in ports]


def slots_of(server: Redis) -> Sequence[int]:
    """The slots of a master, ascending."""
    with redis.Redis(port=server.port) as client:
        ranges = client.execute_command("CLUSTER SLOTS")
    return sorted(
        slot
        for first, last, node, *_ in ranges
        if int(node[1]) == server.port
        for slot in range(first, last + 1)
    )


def node_id(server: Redis) -> str:
    """The id of a server within the cluster."""
    with redis.Redis(port=server.port) as client:
        return str(client.execute_command("CLUSTER", "MYID").decode())


async def owners(scene: Scene) -> dict[int, Redis]:
    """The master of every shard, according to the servers of the cluster."""
    of_slot = {slot: server for server in masters(scene) for slot in slots_of(server)}
    return {shard: of_slot[slot_of(scene.keys.shard(shard).state)] for shard in range(scene.keys.shards)}


async def shards_of(scene: Scene, server: Redis) -> set[int]:
    """The shards of a master."""
    return {shard for shard, owner in (await owners(scene)).items() if owner.port == server.port}
