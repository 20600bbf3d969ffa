"""A gate over shards that were taken over without Kafka: what is tested here is deciding, not relaying."""

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

from grabstream.lua.gate.calls import GateLimits, run_script
from grabstream.lua.gate.door import Gate
from grabstream.lua.gate.sealing import Sealer
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.ops.services import free_ports
from grabstream.ops.settings import Settings
from tests.conftest import wait_until

SEALER = Sealer({"test": bytes(32)})
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
    """What a relay does to a new shard, as far as deciding is concerned."""
    for number in range(keys.shards):
        state = keys.shard(number).state
        term, server_epoch, *_ = await run_script(client, "raise_term", [state], [0, "test"])
        await run_script(client, "reconcile", [state], [term, "test", server_epoch, "0", keys.shards])


@pytest.fixture
def keys(prefix: str) -> KeySpace:
    """Three shards, so that offers share some."""
    return KeySpace(prefix, 3)


@pytest.fixture(params=["server", "cluster"])
async def client(request: pytest.FixtureRequest, servers: Settings) -> AsyncIterator[Any]:
    """A client of one Redis, and of a Redis Cluster of three."""
    if request.param == "server":
        one = redis.asyncio.Redis.from_url(servers.redis_url)
    else:
        port = request.getfixturevalue("cluster_port")
        one = RedisCluster(host="127.0.0.1", port=port)
        await one.initialize()
    yield one
    await one.aclose()


@pytest.fixture
async def gate(client: Any, keys: KeySpace) -> AsyncIterator[Callable[..., Gate]]:
    """Makes gates over shards that have been taken over; `now` (a list with one time) replaces the clock."""
    await take_over(client, keys)
    made = []

    def make(now: list[int] | None = None, **limits: int) -> Gate:
        one = Gate(client, keys, SEALER, GateLimits(**limits), clock=(lambda: now[0]) if now else None)
        made.append(one)
        return one

    yield make
    for one in made:
        await one.close()


@pytest.fixture
async def scene(client: Any, keys: KeySpace) -> AsyncIterator[Any]:
    """A scene whose end is compared with the rules: state, events, books, and what a recovery makes of
    them.
    """
    from tests.lua.histories.scene import Scene  # which needs this file

    one = Scene()
    await one.begin(client, keys)
    yield one
    await one.end_twins()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A small Redis of this test's own, to be filled and to be stopped."""
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

    wait_until(answers, what="a Redis of one's own")
    yield server, port
    os.kill(server.pid, signal.SIGCONT)
    server.kill()
    server.wait()


@pytest.fixture
async def own(own_server: Any) -> AsyncIterator[tuple[Any, KeySpace]]:
    client = redis.asyncio.Redis(port=own_server[1])
    keys = KeySpace("own", 1)
    await take_over(client, keys)
    yield client, keys
    await client.aclose()


@pytest.fixture(scope="session")
def cluster_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of one of three plain processes that are a Redis Cluster."""
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not there")
    *ports, bus_1, bus_2, bus_3 = free_ports(6)
    folder = tmp_path_factory.mktemp("cluster")
    buses = (bus_1, bus_2, bus_3)
    nodes = [_node(folder / str(port), port, bus) for port, bus in zip(ports, buses, strict=True)]
    try:
        addresses = [f"127.0.0.1:{port}" for port in ports]
        wait_until(lambda: all(_answers(port) for port in ports), what="a cluster node's answer")
        made = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(made, check=True, capture_output=True, timeout=60)
        wait_until(
            lambda: all(b"cluster_state:ok" in _ask(port, "CLUSTER", "INFO") for port in ports),
            what="the cluster",
        )
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


async def event_lines(client: Any, keys: KeySpace, shard: int, behind_seq: int = 0) -> list[bytes]:
    """All event lines in a shard's outbox that follow a seq, in order; by a script, since redis-py makes a
    dict of fields of one name.
    """
    outbox = keys.shard(shard).outbox
    script = (
        "local r={} for _,e in ipairs(redis.call('XRANGE',KEYS[1],ARGV[1],'+')) do for i=2,#e[2],2 do "
        "r[#r+1]=e[2][i] end end return r"
    )
    return list(await client.eval(script, 1, outbox, f"{behind_seq + 1}-0"))
