"""Sets of local servers, each under one directory."""

import random
import shutil
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from grabstream.settings import CONTROLLER_PORT, KAFKA_PORT, POSTGRES_PORT, REDIS_PORT
from grabstream.workshop.services.process import Process
from grabstream.workshop.services.servers import Kafka, Postgres, Redis

PORT_RANGE = (20_000, 31_000)

Say = Callable[[str], None]


class ServerSet:
    """Servers under one directory, started and stopped together. A second set needs another directory and
    other ports.
    """

    def __init__(self, directory: Path, servers: Sequence[Process], postgres: Postgres) -> None:
        self.directory = directory
        self.all = (*servers, postgres)
        self.postgres = postgres

    def join(self, report: Say) -> None:
        """Joins servers that have just started into one cluster, in sets that have one."""

    def environment(self) -> dict[str, str]:
        """The settings (without GRAB_) that point at this set."""
        raise NotImplementedError

    @property
    def _temporary(self) -> Path:
        """A file that exists while `down` must delete PostgreSQL's data, which may be outside `directory`."""
        return self.directory / "temporary"

    def up(self, report: Say = lambda line: None, temporary: bool = False) -> None:
        """Starts the servers that do not run, all at once; raises ServiceError.

        With `temporary`, `down` deletes what the servers have outside their directory, unless it existed
        before.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        if not temporary:
            self._temporary.unlink(missing_ok=True)
        elif not self.postgres.data.exists():
            self._temporary.touch()
        for server in self.all:  # one after the other, since apt takes a lock
            if server.pid is None:
                server.directory.mkdir(parents=True, exist_ok=True)
                server.prepare(report)
        with ThreadPoolExecutor(len(self.all)) as pool:
            started = [pool.submit(server.start, report) for server in self.all]
        for future in started:
            future.result()
        self.join(report)

    def down(self) -> list[str]:
        """Stops the servers of this set that run; returns their names."""
        with ThreadPoolExecutor(len(self.all)) as pool:
            stopped = list(pool.map(Process.stop, self.all))
        if self._temporary.exists():
            self.postgres.remove()
            self._temporary.unlink()
        return [server.name for server, ran in zip(self.all, stopped, strict=True) if ran]

    def status(self) -> dict[str, int | None]:
        """Server → process id, None when it does not run."""
        return {server.name: server.pid for server in self.all}

    def remove(self) -> list[Path]:
        """Stops the servers and deletes their data; returns the directories that existed."""
        self.down()
        deleted = [path for path in dict.fromkeys((self.directory, self.postgres.data)) if path.exists()]
        self.postgres.remove()
        shutil.rmtree(self.directory, ignore_errors=True)
        return deleted


class LocalServices(ServerSet):
    """One Redis, one Kafka and PostgreSQL."""

    def __init__(
        self,
        directory: Path,
        redis_port: int = REDIS_PORT,
        kafka_port: int = KAFKA_PORT,
        controller_port: int = CONTROLLER_PORT,
        postgres_port: int = POSTGRES_PORT,
        kafka_heap_mb: int = 768,
    ) -> None:
        directory = directory.resolve()
        self.redis = Redis(directory, redis_port)
        self.kafka = Kafka(directory, kafka_port, (controller_port,), kafka_heap_mb)
        super().__init__(directory, (self.redis, self.kafka), Postgres(directory, postgres_port))

    def environment(self) -> dict[str, str]:
        """The settings (without GRAB_) that point at this set."""
        return {
            "redis_url": f"redis://127.0.0.1:{self.redis.port}/0",
            "kafka": f"127.0.0.1:{self.kafka.port}",
            "postgres": f"postgresql://grabstream@127.0.0.1:{self.postgres.port}/grabstream",
        }


def free_ports(count: int) -> list[int]:
    """Free ports, from below the range that systems use for outgoing connections.

    With a port from that range, a client that reconnects to a killed server could connect to itself and hold
    the port.
    """
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            try:
                sockets.append(socket.create_server(("127.0.0.1", random.randint(*PORT_RANGE))))
            except OSError:
                continue
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
