"""The stage: servers that belong to the drill, and for each cell a system with workers, traffic and an
observer on them.
"""

import asyncio
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

import redis
from pydantic import SecretStr

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.connections.redis_cluster import slot_of
from grabstream.crypto.sealing import new_seal_key
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.ops.initialization import make_system
from grabstream.settings import Settings, load_settings
from grabstream.workshop.rehearsal.stage import take_down
from grabstream.workshop.services import ClusterServices, LocalServices, ServerSet, free_ports
from grabstream.workshop.services.cluster import ports_from
from grabstream.workshop.services.servers import Redis
from tests.conftest import Worker, until
from tests.drill.gaps import Gaps
from tests.drill.observer import Observer
from tests.drill.over_http import SHAPE, HttpGate
from tests.drill.switch import Switch
from tests.drill.traffic import Traffic

SHARDS: Final = 3
DECIDING: Final = "decide,relay,sweep"
PROJECTING: Final = "project,publish"
START_SECONDS: Final = 120.0


class Servers:
    """Servers that faults may kill: one of each kind, with switches before Redis and PostgreSQL; or a
    cluster, reached directly.
    """

    def __init__(self, folder: Path, cluster: bool) -> None:
        self.folder = folder
        self.cluster = cluster
        self.services: ServerSet = (
            ClusterServices(folder, ports_from(free_ports(19)))
            if cluster
            else LocalServices(folder, *free_ports(4), kafka_heap_mb=384)
        )
        self.redis_switch = Switch(0)
        self.postgres_switch = Switch(0)
        self.spare: Redis | None = None

    @property
    def single(self) -> LocalServices:
        """The servers, if there is one of each kind."""
        assert isinstance(self.services, LocalServices)
        return self.services

    @property
    def many(self) -> ClusterServices:
        """The servers, if they are a cluster."""
        assert isinstance(self.services, ClusterServices)
        return self.services

    async def start(self) -> None:
        """Starts the servers and points the switches at them."""
        await asyncio.to_thread(self.services.up, temporary=True)
        if not self.cluster:
            [redis_port, postgres_port] = free_ports(2)
            await self.redis_switch.start(redis_port)
            await self.postgres_switch.start(postgres_port)
            self.redis_switch.point_at(self.single.redis.port)
            self.postgres_switch.point_at(self.single.postgres.port)

    async def mend(self) -> None:
        """Restores the servers after a cell: all run and continue, and the spare Redis is removed."""
        for server in self.services.all:
            if server.pid is not None:
                server.send_signal(signal.SIGCONT)
        if self.spare is not None:
            await asyncio.to_thread(self.spare.kill)
            shutil.rmtree(self.spare.directory, ignore_errors=True)
            self.spare = None
        await asyncio.to_thread(self.services.up, temporary=True)
        if not self.cluster:
            self.redis_switch.point_at(self.single.redis.port)
            self.postgres_switch.commits_to_lose = 0

    async def end(self) -> None:
        """Ends all servers and deletes their data."""
        await self.redis_switch.close()
        await self.postgres_switch.close()
        if self.spare is not None:
            await asyncio.to_thread(self.spare.kill)
        await asyncio.to_thread(self.services.remove)

    async def start_spare(self) -> Redis:
        """Starts a second Redis."""
        directory = self.folder / "spare"
        self.spare = Redis(directory, free_ports(1)[0], "redis-spare")
        await asyncio.to_thread(self.spare.start)
        return self.spare

    def environment(self) -> dict[str, str]:
        """The settings that point at these servers."""
        environment = self.services.environment()
        if not self.cluster:
            postgres = f"postgresql://grabstream@127.0.0.1:{self.postgres_switch.port}/grabstream"
            environment["redis_url"] = f"redis://127.0.0.1:{self.redis_switch.port}/0"
            environment["postgres"] = postgres
        return environment


@asynccontextmanager
async def servers(cluster: bool) -> AsyncIterator[Servers]:
    """Runs servers for this drill only."""
    with tempfile.TemporaryDirectory(prefix="grabstream-drill-") as folder:
        Path(folder).chmod(0o755)  # PostgreSQL may run as another user
        running = Servers(Path(folder) / "servers", cluster)
        try:
            await running.start()
            yield running
        finally:
            await running.end()


class Scene:
    """What a fault may use and change: the servers, a system, its workers and its traffic."""

    def __init__(
        self,
        servers: Servers,
        settings: Settings,
        gate: Gate,
        client: Any,
        traffic: Traffic,
        random: Random,
        logs: Path,
        http: HttpGate | None = None,
    ) -> None:
        self.servers = servers
        self.settings = settings
        self.gate = gate
        #: A client for the fault and the checks, which no worker uses.
        self.redis = client
        self.traffic = traffic
        self.random = random
        self.keys = key_space(settings)
        self.observer = Observer(settings)
        self.gaps = Gaps(gate, self.keys)
        #: Shards to which the fault does something; the others must not be delayed.
        self.touched: set[int] = set()
        self.deciding: list[Worker] = []
        self.projecting: list[Worker] = []
        #: The folder of the workers' logs.
        self.logs = logs
        #: The gateway process, if the traffic goes over HTTP.
        self.http = http
        #: When the fault ended, in ms since 1970; None before.
        self.mended_at_ms: int | None = None
        self._stack = AsyncExitStack()

    def start_deciding(self, fail_at: str = "") -> Worker:
        """Starts one more worker that decides, relays and sweeps."""
        self.deciding.append(
            Worker(self.settings, DECIDING, self.logs / f"deciding-{len(self.deciding)}.log", fail_at=fail_at)
        )
        return self.deciding[-1]

    def start_projecting(self, fail_at: str = "") -> Worker:
        """Starts one more worker that builds read models."""
        self.projecting.append(
            Worker(
                self.settings,
                PROJECTING,
                self.logs / f"projecting-{len(self.projecting)}.log",
                fail_at=fail_at,
            )
        )
        return self.projecting[-1]

    async def relayed_by(self, worker: Worker) -> None:
        """Returns when a worker has all leases."""

        async def has_all() -> bool:
            holders = [await self.redis.get(self.keys.shard(shard).lease) for shard in range(SHARDS)]
            return all(
                holder is not None and f"-{worker.process.pid}-".encode() in holder for holder in holders
            )

        await until(has_all, START_SECONDS, "the lease of every shard")

    async def playing(self, *workers: Worker) -> None:
        """Returns when workers have reached all servers. A worker that starts while a server is missing may
        end with code 3, which is not a failure of the cell.
        """
        await until(
            lambda: all(" playing " in worker.log.read_text() for worker in workers),
            START_SECONDS,
            "the start of the workers",
        )

    async def another_gate(self) -> Gate:
        """Opens a second gate with its own connections, for the traffic."""
        return await self._stack.enter_async_context(open_gate(self.settings))

    async def close(self) -> None:
        """Ends workers, traffic and gates."""
        await self.gaps.stop()
        await self.traffic.end()
        await self.observer.stop()
        for worker in (*self.deciding, *self.projecting):
            worker.kill()
        if self.http is not None:
            await self.http.close()
        await self._stack.aclose()


def _name(servers: Servers) -> str:
    """A random name for a system; in a cluster, one whose shards are on several masters."""
    while True:
        name = f"drill{secrets.token_hex(4)}"
        if not servers.cluster:
            return name
        with redis.Redis(port=servers.many.redis[0].port) as client:
            ranges = client.execute_command("CLUSTER SLOTS")
        slots = [slot_of(KeySpace(name, SHARDS).shard(shard).state) for shard in range(SHARDS)]
        if len({node[1] for first, last, node, *_ in ranges for slot in slots if first <= slot <= last}) > 1:
            return name


@asynccontextmanager
async def scene(
    servers: Servers, shape: str, seed: str, fail_deciding: str = "", fail_projecting: str = ""
) -> AsyncIterator[Scene]:
    """Makes a system on the servers, with two workers that decide and one that projects; all are removed
    afterwards.
    """
    name = _name(servers)
    settings = load_settings().model_copy(
        update={
            "prefix": name,
            "schema_": name,
            "shards": SHARDS,
            "seal_keys": SecretStr(new_seal_key()),
            "issuer_seeds": True,
            **servers.environment(),
        }
    )
    await make_system(settings)
    client = open_redis(settings)
    logs = servers.folder.parent / name
    logs.mkdir()
    try:
        async with open_gate(settings) as gate:
            http = HttpGate(settings, logs) if shape == SHAPE else None
            new = Scene(
                servers,
                settings,
                gate,
                client,
                Traffic(shape, http or gate, key_space(settings), seed),
                Random(seed),
                logs,
                http,
            )
            try:
                first = new.start_deciding(fail_deciding)
                projecting = new.start_projecting(fail_projecting)
                await new.relayed_by(first)
                await new.playing(projecting, new.start_deciding())
                if http is not None:
                    await http.start()
                new.observer.start()
                yield new
            finally:
                await new.close()
    finally:
        await client.aclose()
        await servers.mend()
        await take_down(settings)
