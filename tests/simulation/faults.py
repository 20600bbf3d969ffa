"""The faults of a run, a function each: named as the kind of fault, with `_` for spaces. Each returns when
the fault is over.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from aiokafka import TopicPartition
from msgspec.msgpack import encode as encode_msgpack

from grabstream.lua.keys import LAYOUT
from grabstream.lua.server import raise_term
from grabstream.models.journal import (
    SIGNED_OWNER,
    block_headers,
    chain,
    is_signed_owner,
    marker_headers,
)
from grabstream.runtime.trouble import is_trouble, suppressed_trouble
from grabstream.streams.deciding.decider import decider_group
from grabstream.streams.rebuilding.rebuild import Busy, RebuildStopped
from tests.simulation.loop import Process
from tests.simulation.plan import GATES, SHARDS, Fault
from tests.simulation.redis_server import Server, Weather

if TYPE_CHECKING:
    from tests.simulation.world import World

#: How long a worker may take to stop: STOP_SECONDS and END_SECONDS_MAX, and a little.
STOPPED_SECONDS_MAX: Final = 18.0
#: What an operator may rebuild.
REBUILT: Final = ("ledger", "balances", "audit")

#: Lines that were never decided.
FORGED_LINES: Final = (
    b'{"type":"grab.granted","v":2,"shard":%d,"seq":%d,"offer_seq":2,"offer":"forged","at":1,'
    b'"grabs":["f"],"users":["forger"],"asset":"CNY","place":1,"left":1}',
    b'{"type":"nothing","v":1,"shard":%d,"seq":%d,',
)
#: Values of records that hold no command, and a list with no command in it.
MALFORMED: Final = (
    *(None, b"", b"\xff\xfe", b"null", b"7", b"[" * 3_000, b'{"type":"grab"', b"[[]]", b"[{}]"),
    b'{"type":"grab","id":"unknown-field","offer":"o","user":"u","sum":1}',
    b'{"type":"steal","id":"unknown-type","offer":"o"}',
    b'{"type":"grab","id":"\\ud800","offer":"o","user":"u"}',
    b'{"type":"grab","id":"no\\u0000name","offer":"o","user":"u"}',
    b'{"type":"grab","id":"too-many","offer":"o","user":"u","quantity":1e400}',
)


async def _kill(world: "World", name: str, seconds: float, start: Callable[[], None]) -> None:
    process = world.processes[name]
    if not process.alive:
        return
    world.loop.kill(process)
    await asyncio.sleep(seconds)
    start()


async def _pause(world: "World", name: str, seconds: float) -> None:
    process = world.processes[name]
    if not process.alive or process.paused:
        return
    process.paused = True
    await asyncio.sleep(seconds)
    if process.alive:
        world.loop.wake(process)


async def worker_crash(world: "World", fault: Fault) -> None:
    number = fault.target % world.plan.workers
    await _kill(world, f"worker-{number}", fault.seconds, lambda: world.start_worker(number))


async def worker_pause(world: "World", fault: Fault) -> None:
    await _pause(world, f"worker-{fault.target % world.plan.workers}", fault.seconds)


async def worker_stop(world: "World", fault: Fault) -> None:
    """A worker is asked to stop, while its client of Redis takes cancellations for lost connections; it ends
    within a bound, unless it is killed or stands still meanwhile.
    """
    number = fault.target % world.plan.workers
    name = f"worker-{number}"
    process = world.processes[name]
    if not process.alive or process.paused or process in world.stopping:
        return
    world.stopping.add(process)
    world.weather.swallowed = fault.share
    world.stops[name].set()
    seconds = 0.0
    while process.alive and seconds < STOPPED_SECONDS_MAX:
        await asyncio.sleep(0.1)
        seconds += 0.0 if process.paused else 0.1
    world.weather.swallowed = 0.0
    if process.alive:
        world.oracle.violations.append(f"{name} was told to stop, and has not ended after {seconds:.0f} s")
    elif process in world.stopped:
        await asyncio.sleep(fault.seconds)
        world.start_worker(number)


async def gate_crash(world: "World", fault: Fault) -> None:
    number = fault.target % GATES
    await _kill(world, f"gate-{number}", fault.seconds, lambda: world.start_gate(number))


async def gate_pause(world: "World", fault: Fault) -> None:
    await _pause(world, f"gate-{fault.target % GATES}", fault.seconds)


async def _restart(world: "World", fault: Fault, keeps: str) -> None:
    server = world.master
    if not server.up:
        return
    server.stop()
    await asyncio.sleep(fault.seconds)
    if server is world.master:
        world.oracle.loses |= keeps != "all"
        server.start(keeps)


async def redis_restart(world: "World", fault: Fault) -> None:
    await _restart(world, fault, "all")


async def redis_tail_lost(world: "World", fault: Fault) -> None:
    await _restart(world, fault, "disk")


async def redis_emptied(world: "World", fault: Fault) -> None:
    await _restart(world, fault, "nothing")


async def redis_failover(world: "World", fault: Fault) -> None:
    """The master dies, and its replica, which lags, is promoted."""
    former = world.master
    if not former.up or not world.replicates:
        return
    former.stop()
    await asyncio.sleep(min(fault.seconds, 1.0))
    world.promote()
    for client in world.clients.values():
        world.route(client)
    await asyncio.sleep(fault.seconds)
    former.up = True
    former.known.clear()
    former.run_id = former.new_id()
    world.follow(former)


async def redis_split(world: "World", fault: Fault) -> None:
    """The replica is promoted while the master lives, and some clients still talk to that one."""
    former = world.master
    if not former.up or not world.replicates:
        return
    world.promote()
    clients = sorted(world.clients)
    world.draw.shuffle(clients)
    for name in clients:
        await asyncio.sleep(world.draw.uniform(0, 2 * fault.seconds / len(clients)))
        world.route(world.clients[name])
    await asyncio.sleep(world.draw.uniform(0, 0.2))
    _reunite(world, former)


async def redis_divided(world: "World", fault: Fault) -> None:
    """The network is divided: one process is with the promoted replica, all others stay with the former
    master.
    """
    former = world.master
    if not former.up or not world.replicates:
        return
    world.promote()
    clients = sorted(world.clients)
    world.route(world.clients[clients[fault.target % len(clients)]])
    await asyncio.sleep(fault.seconds)
    _reunite(world, former)


async def redis_there_and_back(world: "World", fault: Fault) -> None:
    """A replica that lags is promoted, the former master follows it, and is then promoted again: the same
    process, with fewer writes.
    """
    if not world.master.up or not world.replicates:
        return
    former = world.master
    world.promote()
    world.follow(former)
    world.promote()
    world.follow(world.replica)


def _reunite(world: "World", former: Server) -> None:
    former.stop()
    former.up = True
    world.follow(former)
    for client in world.clients.values():
        world.route(client)


async def _during(world: "World", fault: Fault, target: Any, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(target, name, value)
    await asyncio.sleep(fault.seconds)
    plain = type(target)() if isinstance(target, Weather) else None
    for name in changes:
        setattr(target, name, getattr(plain, name) if plain else type(changes[name])(0))


async def redis_slow(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.weather, slow=60.0 * fault.share)


async def redis_lossy(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.weather, request_lost=fault.share / 4, reply_lost=fault.share / 2)


async def redis_late(world: "World", fault: Fault) -> None:
    """Replies to one process are late."""
    names = sorted(world.clients)
    client = world.clients[names[fault.target % len(names)]]
    client.late = fault.share
    await asyncio.sleep(fault.seconds)
    client.late = 0.0


async def redis_poisoned(world: "World", fault: Fault) -> None:
    """From now on, scripts raise for some commands."""
    ids = {command.id for step in world.plan.steps for command in step.commands}
    poisoned = [one for one in sorted(ids) if one.startswith("n") and crc32(one.encode()) % 4 == fault.target]
    world.poisoned.update(poisoned)
    for server in world.servers:
        server.poisoned = tuple(encode_msgpack(one) for one in poisoned)
    await asyncio.sleep(fault.seconds)


async def redis_breaks_off(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.master, breaks=fault.share / 4)


async def redis_full(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.master, is_full=True)


async def redis_clock(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.master, skew_ms=(9_000, -9_000, 3_000, -3_000)[fault.target])


async def announcements_lost(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.weather, announcement_lost=1.0)


async def kafka_away(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.broker.conditions, available=False)


async def kafka_leaderless(world: "World", fault: Fault) -> None:
    """One shard's partition of the journal has no leader, for long enough that others are noticed."""
    stuck = TopicPartition(world.topics.journal, fault.target % SHARDS)
    await _during(
        world,
        fault._replace(seconds=4.0 + fault.seconds),
        world.broker.conditions,
        leaderless=frozenset((stuck,)),
    )


async def kafka_slow(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.broker.conditions, slow=100.0 * fault.share)


async def kafka_lagging(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.broker.conditions, lagging=fault.share)


async def kafka_unacknowledged(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.broker.conditions, unacknowledged=fault.share)


async def kafka_late(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.broker.conditions, late=fault.share)


async def kafka_twice(world: "World", fault: Fault) -> None:
    await _during(world, fault, world.broker.conditions, twice=fault.share)


async def group_rebalance(world: "World", fault: Fault) -> None:
    for topic in (world.topics.commands, world.topics.operations):
        world.broker.group(decider_group(world.topics, topic)).rebalance()


async def commands_malformed(world: "World", fault: Fault) -> None:
    """Sends records that hold no command; their bytes are to be kept."""
    for value in world.draw.sample(MALFORMED, 3):
        partition = world.draw.randrange(SHARDS)
        offset = world.broker.append(world.topics.commands, partition, None, value, ())
        world.malformed[world.topics.commands, partition, offset] = value or b""
        await asyncio.sleep(fault.seconds / 3)


async def events_of_others(world: "World", fault: Fault) -> None:
    """Another program writes to the topic of events."""
    assert world.books is not None
    for _ in range(4):
        world.books.append_foreign(world.draw)
        await asyncio.sleep(fault.seconds / 4)


async def journal_forged(world: "World", fault: Fault) -> None:
    """Writes to the journal without a relay's key: a marker of a higher term, and a block after it, or a
    block in the name of the present owner.
    """
    shard = fault.target % SHARDS
    for number in range(3):
        cursor = world.oracle.journal[shard].cursor
        if is_signed_owner(cursor.owner):
            lines = [world.draw.choice(FORGED_LINES) % (shard, cursor.seq + 1)]
            term, owner = cursor.term, cursor.owner
            if number != 1:
                term, owner = term + 3, world.draw.choice(("forger", f"forger{SIGNED_OWNER}"))
                world.forge(shard, marker_headers(shard, term, owner), b"")
            head = chain(cursor.head, lines)[-1]
            headers = block_headers(shard, term, owner, cursor.seq + 1, 1, cursor.head, head)
            world.forge(shard, headers, lines[0])
        await asyncio.sleep(fault.seconds / 3)


async def layout_outdated(world: "World", fault: Fault) -> None:
    """All shards have an older layout, as after an upgrade, and their owners take them over again. What
    cannot be reached is left out.
    """
    process, client = world.started("upgrade")

    async def upgrade() -> None:
        for shard in range(SHARDS):
            state = world.keys.shard(shard).state
            with suppressed_trouble():
                await client.hset(state, "layout", LAYOUT - 1)
                await raise_term(client, state, 0, "upgrade")

    await asyncio.wait({world.loop.spawn(process, upgrade())}, timeout=10.0)
    world.loop.kill(process)


async def postgresql_away(world: "World", fault: Fault) -> None:
    await _restart_postgresql(world, fault, False)


async def postgresql_tail_lost(world: "World", fault: Fault) -> None:
    await _restart_postgresql(world, fault, True)


async def _restart_postgresql(world: "World", fault: Fault, from_disk: bool) -> None:
    assert world.books is not None
    server = world.books.server
    if server.conditions.available:
        server.stop()
        await asyncio.sleep(fault.seconds)
        server.start(from_disk)


async def postgresql_slow(world: "World", fault: Fault) -> None:
    assert world.books is not None
    await _during(world, fault, world.books.server.conditions, slow=100.0 * fault.share)


async def postgresql_lossy(world: "World", fault: Fault) -> None:
    assert world.books is not None
    lost = {"request_lost": fault.share / 20, "reply_lost": fault.share / 10}
    await _during(world, fault, world.books.server.conditions, **lost)


async def postgresql_gives_up(world: "World", fault: Fault) -> None:
    assert world.books is not None
    await _during(world, fault, world.books.server.conditions, given_up=fault.share / 5)


async def postgresql_locked(world: "World", fault: Fault) -> None:
    """Another user's session holds locks that the projectors need."""
    assert world.books is not None
    server = world.books.server
    if not server.conditions.available:
        return
    server.lock_cursors()
    await asyncio.sleep(2 * fault.seconds)
    server.end_locks()


async def faust_stalls(world: "World", fault: Fault) -> None:
    assert world.books is not None
    await _during(world, fault, world.books.faust, stalled=True)


async def faust_skips(world: "World", fault: Fault) -> None:
    assert world.books is not None
    await _during(world, fault, world.books.faust, skipped=fault.share)


async def faust_repeats(world: "World", fault: Fault) -> None:
    assert world.books is not None
    await _during(world, fault, world.books.faust, repeated=fault.share)


async def read_model_rebuilt(world: "World", fault: Fault) -> None:
    """An operator rebuilds a read model; the process may be killed meanwhile."""
    assert world.books is not None
    books, projection = world.books, REBUILT[fault.target % len(REBUILT)]
    name = f"operator-{projection}"
    process = world.processes.get(name)
    if process is not None and process.alive:
        return
    process = world.processes[name] = Process(name)
    source = "audit" if fault.share == 0.1 and projection != "audit" else "journal"

    async def rebuild() -> None:
        try:
            await books.rebuild(projection, source, world.stepped)
        except AssertionError as error:
            world.oracle.violations.append(str(error))
        except Exception as error:
            world.trace.add(name, f"the rebuild ends: {error!r}"[:160])
            if not isinstance(error, RebuildStopped | Busy) and not is_trouble(error):
                world.oracle.violations.append(f"{name} failed: {error!r}")
        else:
            world.trace.add(name, "the new version is live")

    work = world.loop.spawn(process, rebuild())
    await asyncio.wait({work}, timeout=10 * fault.seconds)
    if not work.done():
        world.loop.kill(process)
    process.alive = False
