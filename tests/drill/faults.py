"""The faults: what each does to servers or workers while traffic goes on, and within which time the lag must
be 0 again.

A fault returns when it has ended, that is, when what it took away is there again (or replaced for good).
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

from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.services.process import Process
from grabstream.ops.services.servers import Redis
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
from tests.drill.stage import Scene

#: Bytes that a cut takes off the AOF's tail, at most.
TAIL_BYTES_MAX: Final = 40_000
AWAY_SECONDS: Final = 2.0
STOPPED_SECONDS: Final = 45.0

Play = Callable[[Scene], Awaitable[None]]


class Fault(NamedTuple):
    """A fault by its name. `where`: single, cluster. `lag_seconds`: within which the lag is 0 after its end.
    `isolates`: shards that it does not touch may not wait (tests/drill/gaps.py).

    `fail_deciding`, `fail_projecting`: the step at which the first worker of that kind kills itself.
    `two_servers`: while it lasts, a shard may be fenced on one server and decide on another, whose events may
    even count until the new one's marker.
    """

    name: str
    play: Play
    where: frozenset[str] = frozenset({"single", "cluster"})
    lag_seconds: float = 30.0
    fail_deciding: str = ""
    fail_projecting: str = ""
    two_servers: bool = False
    isolates: bool = False


SINGLE: Final = frozenset({"single"})
CLUSTER: Final = frozenset({"cluster"})


# -- Redis, one server ---------------------------------------------------------------------------------------


def _aof(server: Redis) -> Path:
    return server.directory / "appendonlydir"


async def aof_tail(scene: Scene) -> None:
    """Redis dies, and the end of its append-only file never reached the disk."""
    server = scene.servers.single.redis
    await asyncio.to_thread(server.kill)
    newest = max(_aof(server).glob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
    size = newest.stat().st_size
    with newest.open("r+b") as file:
        file.truncate(size - min(size, scene.random.randint(1, TAIL_BYTES_MAX)))
    await asyncio.to_thread(server.start)


async def old_aof(scene: Scene) -> None:
    """Redis dies, and a copy of its append-only files of some time ago is put in their place."""
    server = scene.servers.single.redis
    copy = server.directory / "copy-of-aof"
    shutil.copytree(_aof(server), copy)
    await scene.traffic.more(scene.random.randint(50, 200))
    await asyncio.to_thread(server.kill)
    shutil.rmtree(_aof(server))
    copy.rename(_aof(server))
    await asyncio.to_thread(server.start)


async def old_rdb(scene: Scene) -> None:
    """Redis dies, and a snapshot of some time ago takes the place of everything it had."""
    server = scene.servers.single.redis
    with redis.Redis(port=server.port) as client:
        before = client.lastsave()
        # LASTSAVE counts whole seconds, so the file is what tells.
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
    """Makes an RDB file what Redis begins with: the base of its AOF, since with the AOF on it would ignore a
    dump.rdb and begin empty.
    """
    shutil.rmtree(_aof(server), ignore_errors=True)
    _aof(server).mkdir()
    snapshot.rename(_aof(server) / "appendonly.aof.1.base.rdb")
    (_aof(server) / "appendonly.aof.manifest").write_text("file appendonly.aof.1.base.rdb seq 1 type b\n")


async def flushall(scene: Scene) -> None:
    """Somebody empties Redis."""
    if not scene.servers.cluster:
        await scene.redis.flushall()
        return
    with redis.Redis(port=(await chosen_master(scene)).port) as client:
        client.flushall()


async def stale_replica(scene: Scene) -> None:
    """The server dies, and clients are moved to a replica that had stopped following it some time ago."""
    spare = await _synchronised_spare(scene)
    with redis.Redis(port=spare.port) as client:
        client.replicaof("NO", "ONE")
    await scene.traffic.more(scene.random.randint(50, 200))
    scene.servers.redis_switch.point_at(spare.port)
    await asyncio.to_thread(scene.servers.single.redis.kill)


async def old_primary(scene: Scene) -> None:
    """A replica is promoted; who was connected to the old server goes on there for a while, newcomers are at
    the new one.
    """
    spare = await _synchronised_spare(scene)
    with redis.Redis(port=spare.port) as client:
        client.replicaof("NO", "ONE")
    scene.servers.redis_switch.point_at(spare.port)
    scene.traffic.join(await scene.another_gate())
    scene.start_deciding()
    await scene.traffic.more(scene.random.randint(100, 200))
    await asyncio.sleep(AWAY_SECONDS)  # how long they are apart, not a wait for anything
    await asyncio.to_thread(scene.servers.single.redis.kill)


async def _synchronised_spare(scene: Scene) -> Redis:
    spare = await scene.servers.start_spare()
    with redis.Redis(port=spare.port) as client:
        client.replicaof("127.0.0.1", str(scene.servers.single.redis.port))
        await until(
            lambda: client.info("replication")["master_link_status"] == "up",
            20,
            "a replica's synchronisation",
        )
    return spare


# -- Kafka ---------------------------------------------------------------------------------------------------


def _brokers(scene: Scene) -> list[Process]:
    return list(scene.servers.many.kafka) if scene.servers.cluster else [scene.servers.single.kafka]


async def broker_killed(scene: Scene) -> None:
    """A broker dies and is started again."""
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
    """Two of three brokers die: no partition has a leader that may acknowledge, until they are back."""
    gone = scene.random.sample(_brokers(scene), 2)
    await asyncio.gather(*(asyncio.to_thread(broker.kill) for broker in gone))
    await asyncio.sleep(AWAY_SECONDS)
    await asyncio.gather(*(asyncio.to_thread(broker.start) for broker in gone))


# -- PostgreSQL ----------------------------------------------------------------------------------------------


async def postgres_killed(scene: Scene) -> None:
    """PostgreSQL dies and is started again."""
    await asyncio.to_thread(scene.servers.services.postgres.kill)
    await asyncio.to_thread(scene.servers.services.postgres.start)


async def postgres_restored(scene: Scene) -> None:
    """PostgreSQL dies, and a backup of some time ago takes the place of its data."""
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
    """A transaction is committed, and whoever asked for it never hears so; three times."""
    switch = scene.servers.postgres_switch
    before = switch.commits_lost
    switch.commits_to_lose = 3
    await until(lambda: switch.commits_lost == before + 3, 30, "three lost replies")


# -- workers -------------------------------------------------------------------------------------------------


async def worker_killed(scene: Scene) -> None:
    """The worker that relays all shards dies."""
    scene.deciding[0].kill()
    await _taken_over(scene)
    scene.start_deciding()


async def worker_stopped(scene: Scene) -> None:
    """The worker that relays hangs until another has taken its shards over, and then wakes up."""
    scene.deciding[0].signal(signal.SIGSTOP)
    await _taken_over(scene)
    await scene.traffic.more(scene.random.randint(50, 150))
    scene.deciding[0].signal(signal.SIGCONT)


async def _taken_over(scene: Scene) -> None:
    await scene.relayed_by(scene.deciding[1])


def _ended(worker: Worker) -> bool:
    return worker.process.poll() is not None


async def deciding_ended(scene: Scene) -> None:
    """The worker that relays kills itself at a step; the other takes over."""
    await until(lambda: _ended(scene.deciding[0]), 60, "the step")
    await _taken_over(scene)


async def taking_over_ended(scene: Scene) -> None:
    """The worker that relays dies, and the one that takes its shards over dies in the middle of that; a third
    one goes on.
    """
    scene.deciding[1].kill()
    second = scene.start_deciding(fail_at=f"relay.took_over:{scene.random.randint(1, scene.keys.shards)}")
    scene.deciding[0].kill()
    await until(lambda: _ended(second), 60, "the step")
    await scene.relayed_by(scene.start_deciding())


async def projecting_ended(scene: Scene) -> None:
    """The worker that projects kills itself between its commit and Faust's; another is started."""
    await until(lambda: _ended(scene.projecting[0]), 60, "the step")
    scene.start_projecting()


def _stopped(worker: Worker) -> bool:
    """Whether it hangs at its step; raises AssertionError when it ended."""
    assert not _ended(worker), f"the worker ended with code {worker.process.returncode} before its step"
    return Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def deciding_stopped(scene: Scene) -> None:
    """The worker that relays hangs at a step, the other takes its shards over, and then it wakes up where it
    was.
    """
    await until(lambda: _stopped(scene.deciding[0]), 60, "the step")
    await _taken_over(scene)
    await scene.traffic.more(scene.random.randint(50, 150))
    scene.deciding[0].signal(signal.SIGCONT)


async def projecting_stopped(scene: Scene) -> None:
    """The worker that projects hangs behind its commit, another one goes on with its read models, and then it
    wakes up.
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

    await until(projected, 60, "the other worker's turn")
    scene.projecting[0].signal(signal.SIGCONT)


async def recovering_ended(scene: Scene) -> None:
    """Redis is emptied, and the worker that makes it anew dies in the middle of that; the other, which slept
    until then, goes on.
    """
    doomed, other = scene.deciding[:2]
    other.signal(signal.SIGSTOP)
    await flushall(scene)
    await until(lambda: _ended(doomed), 60, "the step")
    other.signal(signal.SIGCONT)
    await _taken_over(scene)


async def workers_come_and_go(scene: Scene) -> None:
    """Three workers of all roles join, the first ones leave, one by one, gently."""
    joined = [scene.start_deciding() for _ in range(2)]
    scene.start_projecting()
    await scene.traffic.more(100)
    for leaving in (scene.deciding[0], scene.deciding[1], scene.projecting[0]):
        leaving.signal(signal.SIGTERM)
        await until(partial(_ended, leaving), 30, "a worker's end")
        code: Any = leaving.process.returncode
        if code != 0:
            raise AssertionError(f"a worker that was asked to stop ended with code {code}")
        await scene.traffic.more(50)
    assert not any(map(_ended, joined))


async def all_at_once(scene: Scene) -> None:
    """A master, a broker and a worker die at the same moment, and are replaced; several times, so that each
    meets the other's loss.
    """
    for _ in range(ROUNDS):
        master = await found_master(scene)
        replica = replica_of(scene, master)
        broker = scene.random.choice(_brokers(scene))
        victim = next(worker for worker in scene.deciding if not _ended(worker))
        await asyncio.gather(*(asyncio.to_thread(one.kill) for one in (master, broker, victim)))
        await promoted(replica)
        await asyncio.to_thread(master.start)
        await asyncio.to_thread(broker.start)
        scene.start_deciding()
        await scene.traffic.more(50, FAILOVER_SECONDS * 2, "deciding after all of them")
        await until(partial(has_replica, replica), FAILOVER_SECONDS, "the old master as a replica")


def _faults() -> list[Fault]:
    found = [
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
        found.append(Fault(f"worker.at_{step.split('.')[1]}", deciding_ended, fail_deciding=f"{step}:40"))
        found.append(
            Fault(
                f"worker.stopped_at_{step.split('.')[1]}", deciding_stopped, fail_deciding=f"{step}:40:stop"
            )
        )
    found.append(Fault("worker.at_applied", recovering_ended, SINGLE, fail_deciding="recovery.applied"))
    for step in ("ledger", "balances", "audit", "events"):
        found.append(Fault(f"worker.at_{step}", projecting_ended, fail_projecting=f"{step}.committed:5"))
        found.append(
            Fault(
                f"worker.stopped_at_{step}",
                projecting_stopped,
                lag_seconds=45,
                fail_projecting=f"{step}.committed:5:stop",
            )
        )
    return found


FAULTS: Final = {fault.name: fault for fault in _faults()}
