"""Fixtures for tests of scripts and gate: Redis servers, and gates over shards taken over without Kafka."""

import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.cluster import RedisCluster

from grabstream.connections.opening import cancellable
from grabstream.crypto.sealing import Sealer
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.lua.library import library, load
from grabstream.lua.running import run_script
from grabstream.lua.server import let_callers_set_time, raise_term
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.settings import Settings
from grabstream.workshop.services import free_ports
from tests.conftest import GATE_TIMEOUT_MS, wait_until
from tests.support.runs import as_singles

SEAL_KEYS = {"test": bytes(32)}
SEALER = Sealer(SEAL_KEYS)
#: Friday, 2027-01-15 08:00 UTC, in ms.
NOW = 1_800_000_000_000


def opening(offer: str = "e", parts: int = 10, **rest: Any) -> Open:
    terms = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=parts * 100, parts=parts, **rest)
    return Open(id=f"open-{offer}", offer=offer, terms=terms)


def grabs(count: int, offer: str = "e", start: int = 0) -> list[Grab]:
    return [
        Grab(id=f"{offer}-g{number}", offer=offer, user=f"u{number}")
        for number in range(start, start + count)
    ]


async def take_over(client: Any, keys: KeySpace) -> None:
    """Takes over every shard as a relay does, without Kafka, so that the shards decide. Callers may name the
    time.
    """
    for number in range(keys.shards):
        state = keys.shard(number).state
        if not await client.hexists(state, "seq"):
            await let_callers_set_time(client, state)
        (term, server_epoch, *_), _ = await raise_term(client, state, 0, "test")
        await run_script(client, "reconcile", [state], [term, "test", server_epoch, "0", keys.shards])


async def announce(client: Any, shard: ShardKeys, seq: int) -> None:
    """Announces, as a relay does, that Kafka has all events of a shard up to `seq`."""
    term, owner, server_epoch = await client.hmget(shard.state, ["term", "owner", "server_epoch"])
    values = [term, owner, server_epoch, seq, "aa", 1, shard.channel, term, owner, 0]
    await run_script(client, "trim", [shard.state, shard.outbox], values)


@pytest.fixture
def keys(prefix: str) -> KeySpace:
    """Names of keys of three shards: few enough that offers share shards."""
    return KeySpace(prefix, 3)


@pytest.fixture(params=["server", pytest.param("cluster", marks=pytest.mark.nightly)])
async def client(request: pytest.FixtureRequest, servers: Settings) -> AsyncIterator[Any]:
    """A client of a single Redis; by night also of a Redis Cluster of three nodes, on which the state machine
    plays in every run.
    """
    if request.param == "server":
        client = cancellable(redis.asyncio.Redis.from_url(servers.redis_url))
        assert not await load(client)
    else:
        port = request.getfixturevalue("cluster_port")
        client = RedisCluster(host="127.0.0.1", port=port)
        await client.initialize()
    yield client
    await client.aclose()


@pytest.fixture
async def make_gate(client: Any, keys: KeySpace) -> AsyncIterator[Callable[..., Gate]]:
    """Returns a function that makes gates over the taken-over shards; `now` (a list with one time in ms)
    replaces the clock.
    """
    await take_over(client, keys)
    gates = []

    def make(now: list[int] | None = None, **limits: int) -> Gate:
        bounds = GateLimits(**{"timeout_ms": GATE_TIMEOUT_MS} | limits)
        gate = Gate(client, keys, SEALER, bounds, clock=(lambda: now[0]) if now else None)
        gates.append(gate)
        return gate

    yield make
    for gate in gates:
        await gate.close()


@pytest.fixture
async def scene(client: Any, keys: KeySpace) -> AsyncIterator[Any]:
    """A scene. When the test ends, its state, events and books are compared with the rules and with a
    recovery from the events.
    """
    from tests.lua.histories.scene import Scene  # imports this module

    scene = Scene()
    await scene.begin(client, keys)
    yield scene
    await scene.end_twins()


@pytest.fixture
def private_server(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """The process and port of a small Redis for this test only, which may be filled or stopped."""
    [port] = free_ports(1)
    server = subprocess.Popen(
        [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(tmp_path),
            "--repl-backlog-ttl",
            "0",
        ],
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis(port=port)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    wait_until(answers, what="the private Redis")
    yield server, port
    os.kill(server.pid, signal.SIGCONT)
    server.kill()
    server.wait()


@pytest.fixture
async def private_redis(private_server: Any) -> AsyncIterator[tuple[Any, KeySpace]]:
    """A client of the private Redis, and its single taken-over shard."""
    client = cancellable(redis.asyncio.Redis(port=private_server[1]))
    keys = KeySpace("own", 1)
    await take_over(client, keys)
    yield client, keys
    await client.aclose()


@pytest.fixture(scope="session")
def cluster_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of one node of a Redis Cluster of three processes."""
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not installed")
    *ports, bus_1, bus_2, bus_3 = free_ports(6)
    folder = tmp_path_factory.mktemp("cluster")
    buses = (bus_1, bus_2, bus_3)
    nodes = [_node(folder / str(port), port, bus) for port, bus in zip(ports, buses, strict=True)]
    try:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        wait_until(lambda: all(_answers(port) for port in ports), what="answers of all cluster nodes")
        create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(create, check=True, capture_output=True, timeout=240)
        wait_until(
            lambda: all(b"cluster_state:ok" in _ask(port, "CLUSTER", "INFO") for port in ports),
            what="cluster_state:ok on every node",
        )
        for port in ports:
            redis.Redis(port=port).function_load(library().text)
        yield ports[0]
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def _node(folder: Path, port: int, bus_port: int) -> "subprocess.Popen[bytes]":
    folder.mkdir()
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": folder,
        "save": "",
        "cluster-enabled": "yes",
        "cluster-port": bus_port,
        "repl-backlog-ttl": 0,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return subprocess.Popen(["redis-server", *words], stdout=subprocess.DEVNULL)


def _ask(port: int, *words: str) -> bytes:
    return subprocess.run(["redis-cli", "-p", str(port), *words], capture_output=True).stdout


def _answers(port: int) -> bool:
    return _ask(port, "PING").startswith(b"PONG")


async def event_lines(client: Any, keys: KeySpace, shard: int, after_seq: int = 0) -> list[bytes]:
    """All events in a shard's outbox after a seq, in order, as lines; those of runs one by one."""
    return as_singles(await outbox_lines(client, keys, shard, after_seq))


async def outbox_lines(client: Any, keys: KeySpace, shard: int, after_seq: int = 0) -> list[bytes]:
    """All lines in a shard's outbox after a seq, in order.

    Read by a script: redis-py returns an entry's fields as a dict, which keeps only one of several fields of
    the same name.
    """
    outbox = keys.shard(shard).outbox
    script = (
        "local r={} for _,e in ipairs(redis.call('XRANGE',KEYS[1],ARGV[1],'+')) do for i=2,#e[2],2 do "
        "r[#r+1]=e[2][i] end end return r"
    )
    return list(await client.eval(script, 1, outbox, f"{after_seq + 1}-0"))
