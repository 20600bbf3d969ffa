"""The faults: what each does to servers or workers under traffic, and the time within which the lag must be 0
again.

A fault returns when it has ended: when the servers and workers that it stopped run again or are replaced.
"""

import asyncio
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import redis

from grabstream.workshop.rehearsal.run import open_books
from grabstream.workshop.services.process import Process
from grabstream.workshop.services.servers import Redis
from tests.conftest import Worker, until
from tests.drill.cluster_faults import (
    FAILOVER_SECONDS,
    ROUNDS,
    chosen_master,
    failover,
    forced_failover,
    found_master,
    has_replica,
    hung_pair,
    manual_failover,
    moved_slots,
    paused_primary,
    promoted,
    replica_of,
    resharded,
    stale_failover,
)
from tests.drill.over_http import SHAPE
from tests.drill.stage import Scene

#: At most so many bytes are cut from the end of the append-only file (AOF).
TAIL_BYTES_MAX: Final = 40_000
AWAY_SECONDS: Final = 2.0
STOPPED_SECONDS: Final = 45.0

Play = Callable[[Scene], Awaitable[None]]


class Fault(NamedTuple):
    """A fault."""

    name: str
    play: Play
    #: The servers on which it can be played.
    where: frozenset[str] = frozenset({"single", "cluster"})
    #: The time after its end within which the lag must be 0.
    lag_seconds: float = 30.0
    #: The steps at which the first worker that decides, or that projects, kills itself or stops.
    fail_deciding: str = ""
    fail_projecting: str = ""
    #: Whether, during the fault, a shard may be fenced on one server and decide on another. Events of the old
    #: server may be valid until the marker of the new owner.
    two_servers: bool = False
    #: Whether shards that the fault does not touch must not be delayed (tests/drill/gaps.py).
    isolates: bool = False
    #: The shapes of traffic under which it can be played; empty: all.
    shapes: frozenset[str] = frozenset()


SINGLE: Final = frozenset({"single"})
CLUSTER: Final = frozenset({"cluster"})
HTTP: Final = frozenset({SHAPE})


# -- Redis, one server ---------------------------------------------------------------------------------------


def _aof(server: Redis) -> Path:
    return server.directory / "appendonlydir"


async def aof_tail(scene: Scene) -> None:
    """Redis is killed, and the end of its append-only file is lost, as if it had not reached the disk."""
    server = scene.servers.single.redis
    await asyncio.to_thread(server.kill)
    newest = max(_aof(server).glob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
    size = newest.stat().st_size
    with newest.open("r+b") as file:
        file.truncate(size - min(size, scene.random.randint(1, TAIL_BYTES_MAX)))
    await asyncio.to_thread(server.start)


async def old_aof(scene: Scene) -> None:
    """Redis is killed, and an older copy of its append-only files replaces them."""
    server = scene.servers.single.redis
    copy = server.directory / "copy-of-aof"
    shutil.copytree(_aof(server), copy)
    await scene.traffic.more(scene.random.randint(50, 200))
    await asyncio.to_thread(server.kill)
    shutil.rmtree(_aof(server))
    copy.rename(_aof(server))
    await asyncio.to_thread(server.start)


async def old_rdb(scene: Scene) -> None:
    """Redis is killed, and an older snapshot replaces all of its data."""
    server = scene.servers.single.redis
    with redis.Redis(port=server.port) as client:
        before = client.lastsave()
        # LASTSAVE has a resolution of one second, so wait for the file.
        dump = server.directory / "dump.rdb"
        dump.unlink(missing_ok=True)
        client.bgsave()
        await until(
            lambda: dump.exists() and client.info("persistence")["rdb_bgsave_in_progress"] == 0,
            20,
            f"a snapshot after {before}",
        )
    copy = server.directory / "copy.rdb"
    dump.rename(copy)
    await scene.traffic.more(scene.random.randint(50, 200))
    await asyncio.to_thread(server.kill)
    put_snapshot_back(server, copy)
    await asyncio.to_thread(server.start)


def put_snapshot_back(server: Redis, snapshot: Path) -> None:
    """Lets Redis start from an RDB file, as the base of its AOF: with the AOF enabled, Redis ignores a
    dump.rdb and starts empty.
    """
    shutil.rmtree(_aof(server), ignore_errors=True)
    _aof(server).mkdir()
    snapshot.rename(_aof(server) / "appendonly.aof.1.base.rdb")
    (_aof(server) / "appendonly.aof.manifest").write_text("file appendonly.aof.1.base.rdb seq 1 type b\n")


async def flushall(scene: Scene) -> None:
    """An operator empties Redis, or a master of the cluster."""
    if not scene.servers.cluster:
        await scene.redis.flushall()
        return
    with redis.Redis(port=(await chosen_master(scene)).port) as client:
        client.flushall()


async def stale_replica(scene: Scene) -> None:
    """The server is killed, and clients are moved to a replica that stopped following it some time ago."""
    spare = await _synchronised_spare(scene)
    with redis.Redis(port=spare.port) as client:
        client.replicaof("NO", "ONE")
    await scene.traffic.more(scene.random.randint(50, 200))
    scene.servers.redis_switch.point_at(spare.port)
    await asyncio.to_thread(scene.servers.single.redis.kill)


async def old_primary(scene: Scene) -> None:
    """A replica is promoted. Clients that are connected to the old server continue there for some time; new
    clients connect to the new server.
    """
    spare = await _synchronised_spare(scene)
    with redis.Redis(port=spare.port) as client:
        client.replicaof("NO", "ONE")
    scene.servers.redis_switch.point_at(spare.port)
    scene.traffic.join(await scene.another_gate())
    if scene.http is not None:
        await scene.http.start_gateway()
    scene.start_deciding()
    await scene.traffic.more(scene.random.randint(100, 200))
    await asyncio.sleep(AWAY_SECONDS)  # both servers decide for this time
    await asyncio.to_thread(scene.servers.single.redis.kill)


async def _synchronised_spare(scene: Scene) -> Redis:
    spare = await scene.servers.start_spare()
    with redis.Redis(port=spare.port) as client:
        client.replicaof("127.0.0.1", str(scene.servers.single.redis.port))
        await until(
            lambda: client.info("replication")["master_link_status"] == "up",
            20,
            "the synchronisation of a replica",
        )
    return spare


async def redis_killed(scene: Scene) -> None:
    """Redis is killed, and started again with all that it had written."""
    server = scene.servers.single.redis
    await asyncio.to_thread(server.kill)
    await asyncio.sleep(AWAY_SECONDS)
    await asyncio.to_thread(server.start)


# -- the gateway ---------------------------------------------------------------------------------------------


async def gateway_killed(scene: Scene) -> None:
    """The gateway is killed twice amid requests, and each time another one takes its place."""
    assert scene.http is not None
    for _ in range(2):
        scene.http.kill_gateway()
        await scene.http.start_gateway()
        await scene.traffic.more(scene.random.randint(20, 100))


async def cache_killed(scene: Scene) -> None:
    """The cache Redis is killed: the gateway continues without it. Later it comes again, empty."""
    assert scene.http is not None
    await asyncio.to_thread(scene.http.cache.kill)
    await scene.traffic.more(100)
    await asyncio.to_thread(shutil.rmtree, scene.http.cache.directory)
    await asyncio.to_thread(scene.http.cache.start)
    await scene.traffic.more(100)


# -- Kafka ---------------------------------------------------------------------------------------------------


def _brokers(scene: Scene) -> list[Process]:
    return list(scene.servers.many.kafka) if scene.servers.cluster else [scene.servers.single.kafka]


async def broker_killed(scene: Scene) -> None:
    """A broker is killed and started again."""
    broker = scene.random.choice(_brokers(scene))
    await asyncio.to_thread(broker.kill)
    await asyncio.sleep(AWAY_SECONDS)
    await asyncio.to_thread(broker.start)


async def broker_stopped(scene: Scene) -> None:
    """A broker hangs for 45 s."""
    broker = scene.random.choice(_brokers(scene))
    broker.send_signal(signal.SIGSTOP)
    await asyncio.sleep(STOPPED_SECONDS)
    broker.send_signal(signal.SIGCONT)


async def leaderless(scene: Scene) -> None:
    """Two of three brokers are killed: until they run again, no partition has a leader that may acknowledge
    records.
    """
    victims = scene.random.sample(_brokers(scene), 2)
    await asyncio.gather(*(asyncio.to_thread(broker.kill) for broker in victims))
    await asyncio.sleep(AWAY_SECONDS)
    await asyncio.gather(*(asyncio.to_thread(broker.start) for broker in victims))


# -- PostgreSQL ----------------------------------------------------------------------------------------------


async def postgres_killed(scene: Scene) -> None:
    """PostgreSQL is killed and started again."""
    await asyncio.to_thread(scene.servers.services.postgres.kill)
    await asyncio.to_thread(scene.servers.services.postgres.start)


async def postgres_restored(scene: Scene) -> None:
    """PostgreSQL is killed, and an older backup replaces its data."""
    server = scene.servers.services.postgres
    backup = server.data.with_name(server.data.name + "-backup")
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(subprocess.run, ["cp", "-a", str(server.data), str(backup)], check=True)
    await asyncio.to_thread(server.start)
    await scene.traffic.more(scene.random.randint(100, 300))
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(shutil.rmtree, server.data)
    backup.rename(server.data)
    await asyncio.to_thread(server.start)


async def commit_reply_lost(scene: Scene) -> None:
    """A transaction is committed, but its client does not get the reply; three times."""
    switch = scene.servers.postgres_switch
    before = switch.commits_lost
    switch.commits_to_lose = 3
    await until(lambda: switch.commits_lost == before + 3, 30, "three lost replies")


# -- workers -------------------------------------------------------------------------------------------------


async def worker_killed(scene: Scene) -> None:
    """The worker that relays all shards is killed."""
    scene.deciding[0].kill()
    await _taken_over(scene)
    scene.start_deciding()


async def worker_stopped(scene: Scene) -> None:
    """The worker that relays hangs until another has taken over its shards, and then continues."""
    scene.deciding[0].signal(signal.SIGSTOP)
    await _taken_over(scene)
    await scene.traffic.more(scene.random.randint(50, 150))
    scene.deciding[0].signal(signal.SIGCONT)


async def _taken_over(scene: Scene) -> None:
    """Returns when the second worker relays all shards."""
    await scene.relayed_by(scene.deciding[1])


def _ended(worker: Worker) -> bool:
    return worker.process.poll() is not None


async def deciding_ended(scene: Scene) -> None:
    """The worker that relays kills itself at a step; the other takes over."""
    await until(lambda: _ended(scene.deciding[0]), 60, "the step")
    await _taken_over(scene)


async def taking_over_ended(scene: Scene) -> None:
    """The worker that relays is killed, and the one that takes over its shards kills itself during a
    takeover; a third worker takes over all shards.
    """
    scene.deciding[1].kill()
    second = scene.start_deciding(fail_at=f"relay.took_over:{scene.random.randint(1, scene.keys.shards)}")
    scene.deciding[0].kill()
    await until(lambda: _ended(second), 60, "the step")
    await scene.relayed_by(scene.start_deciding())


async def projecting_ended(scene: Scene) -> None:
    """The worker that projects kills itself between its commit and that of Faust; another is started."""
    await until(lambda: _ended(scene.projecting[0]), 60, "the step")
    scene.start_projecting()


def _stopped(worker: Worker) -> bool:
    """Whether a worker hangs at its step; raises AssertionError if it ended."""
    assert not _ended(worker), f"the worker ended with code {worker.process.returncode} before its step"
    return Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def deciding_stopped(scene: Scene) -> None:
    """The worker that relays hangs at a step, another takes over its shards, and then it continues at that
    step.
    """
    await until(lambda: _stopped(scene.deciding[0]), 60, "the step")
    await _taken_over(scene)
    await scene.traffic.more(scene.random.randint(50, 150))
    scene.deciding[0].signal(signal.SIGCONT)


async def projecting_stopped(scene: Scene) -> None:
    """The worker that projects hangs after its commit, another continues with its read models, and then the
    first continues too.
    """
    await until(lambda: _stopped(scene.projecting[0]), 60, "the step")
    scene.start_projecting()
    await scene.traffic.more(scene.random.randint(50, 150))
    decided = {
        shard: int(await scene.redis.hget(scene.keys.shard(shard).state, "seq"))
        for shard in range(scene.keys.shards)
    }

    async def projected() -> bool:
        async with await open_books(scene.settings) as books:
            rows = await (
                await books.execute("SELECT shard, min(seq) FROM cursors GROUP BY shard")
            ).fetchall()
        return all(seq >= decided[shard] for shard, seq in rows)

    await until(projected, 60, "the progress of the other worker")
    scene.projecting[0].signal(signal.SIGCONT)


async def recovering_ended(scene: Scene) -> None:
    """Redis is emptied, and the worker that rebuilds it kills itself during the rebuild; the other worker,
    which was stopped until then, rebuilds it.
    """
    doomed, other = scene.deciding[:2]
    other.signal(signal.SIGSTOP)
    await flushall(scene)
    await until(lambda: _ended(doomed), 60, "the step")
    other.signal(signal.SIGCONT)
    await _taken_over(scene)


async def workers_come_and_go(scene: Scene) -> None:
    """Three workers start, and the first three are stopped with SIGTERM, one after another."""
    started = [scene.start_deciding() for _ in range(2)]
    scene.start_projecting()
    await scene.traffic.more(100)
    for leaving in (scene.deciding[0], scene.deciding[1], scene.projecting[0]):
        leaving.signal(signal.SIGTERM)
        await until(partial(_ended, leaving), 30, "the end of a worker")
        code: Any = leaving.process.returncode
        if code != 0:
            raise AssertionError(f"a worker that got SIGTERM ended with code {code}")
        await scene.traffic.more(50)
    assert not any(map(_ended, started))


async def all_at_once(scene: Scene) -> None:
    """A master, a broker and a worker are killed at the same time and replaced; several times, so that each
    meets the loss of the others.
    """
    for _ in range(ROUNDS):
        master = await found_master(scene)
        replica = replica_of(scene, master)
        broker = scene.random.choice(_brokers(scene))
        victim = next(worker for worker in scene.deciding if not _ended(worker))
        await asyncio.gather(*(asyncio.to_thread(process.kill) for process in (master, broker, victim)))
        await promoted(replica)
        await asyncio.to_thread(master.start)
        await asyncio.to_thread(broker.start)
        scene.start_deciding()
        await scene.traffic.more(50, FAILOVER_SECONDS * 2, "deciding after all three")
        await until(partial(has_replica, replica), FAILOVER_SECONDS, "the old master as a replica")


def _faults() -> list[Fault]:
    faults = [
        Fault("redis.aof_tail", aof_tail, SINGLE),
        Fault("redis.old_aof", old_aof, SINGLE),
        Fault("redis.old_rdb", old_rdb, SINGLE),
        Fault("redis.flushall", flushall),
        Fault("redis.stale_replica", stale_replica, SINGLE),
        Fault("redis.old_primary", old_primary, SINGLE, two_servers=True),
        Fault("redis.failover", failover, CLUSTER, isolates=True),
        Fault("redis.stale_failover", stale_failover, CLUSTER, isolates=True),
        Fault("redis.paused_primary", paused_primary, CLUSTER, two_servers=True, isolates=True),
        Fault("redis.hung_pair", hung_pair, CLUSTER, isolates=True),
        Fault("redis.manual_failover", manual_failover, CLUSTER, isolates=True),
        Fault("redis.forced_failover", forced_failover, CLUSTER, two_servers=True, isolates=True),
        Fault("redis.moved_slots", moved_slots, CLUSTER, isolates=True),
        Fault("redis.resharded", resharded, CLUSTER, isolates=True),
        Fault("all.at_once", all_at_once, CLUSTER, lag_seconds=90),
        Fault("redis.killed", redis_killed, SINGLE),
        Fault("gateway.killed", gateway_killed, shapes=HTTP),
        Fault("cache.killed", cache_killed, shapes=HTTP),
        Fault("kafka.killed", broker_killed, lag_seconds=45),
        Fault("kafka.stopped", broker_stopped, lag_seconds=60),
        Fault("kafka.leaderless", leaderless, CLUSTER, lag_seconds=60),
        Fault("postgres.killed", postgres_killed),
        Fault("postgres.restored", postgres_restored),
        Fault("postgres.commit_reply_lost", commit_reply_lost, SINGLE),
        Fault("worker.killed", worker_killed),
        Fault("worker.stopped", worker_stopped),
        Fault("worker.at_took_over", taking_over_ended),
        Fault("worker.come_and_go", workers_come_and_go),
    ]
    for step in ("relay.acknowledged", "relay.trimmed"):
        faults.append(Fault(f"worker.at_{step.split('.')[1]}", deciding_ended, fail_deciding=f"{step}:40"))
        faults.append(
            Fault(
                f"worker.stopped_at_{step.split('.')[1]}", deciding_stopped, fail_deciding=f"{step}:40:stop"
            )
        )
    faults.append(Fault("worker.at_applied", recovering_ended, SINGLE, fail_deciding="recovery.applied"))
    for step in ("ledger", "balances", "audit", "events"):
        faults.append(Fault(f"worker.at_{step}", projecting_ended, fail_projecting=f"{step}.committed:5"))
        faults.append(
            Fault(
                f"worker.stopped_at_{step}",
                projecting_stopped,
                lag_seconds=45,
                fail_projecting=f"{step}.committed:5:stop",
            )
        )
    return faults


FAULTS: Final = {fault.name: fault for fault in _faults()}
