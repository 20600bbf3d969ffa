"""The three servers: how each is prepared, started, and asked whether it is ready."""

import base64
import hashlib
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psycopg
import yaml

from grabstream.ops.services.process import Process, ServiceError, install

OPS: Final = Path(__file__).resolve().parent.parent
PROJECT: Final = OPS.parent

#: A master of the local Redis Cluster that is silent for so long is replaced by its replica; 15 s is the
#: server's own default.
NODE_TIMEOUT_MS: Final = 2_000

Say = Callable[[str], None]


class Redis(Process):
    """Redis with AOF every second, and no eviction: the core must never forget by itself."""

    kind = "redis"

    def __init__(
        self, directory: Path, port: int, name: str | None = None, bus_port: int | None = None
    ) -> None:
        """With a `bus_port` it is a node of a Redis Cluster."""
        super().__init__(directory, port, name)
        self.bus_port = bus_port

    def prepare(self, report: Say) -> None:
        """Installs Debian's redis-server when there is none."""
        if shutil.which("redis-server") is None:
            install(report, "redis-server", ["redis-server"])

    def command(self) -> list[str]:
        """redis-server with everything said on the command line."""
        options: dict[str, object] = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.directory,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            # Without replicas the replication id would change by itself, and with it the server's life.
            "repl-backlog-ttl": 0,
            "repl-diskless-sync-delay": 0,
        }
        if self.bus_port is not None:
            options |= {
                "cluster-enabled": "yes",
                "cluster-port": self.bus_port,
                "cluster-node-timeout": NODE_TIMEOUT_MS,
                # A shard whose server is away stops alone; the others go on.
                "cluster-require-full-coverage": "no",
                "cluster-allow-replica-migration": "no",
            }
        return [
            "redis-server",
            *(word for key, value in options.items() for word in (f"--{key}", str(value))),
        ]

    def ready(self) -> bool:
        """Whether it answers PING; while it loads its AOF it does not."""
        return _ask(self.port, b"PING\r\n").startswith(b"+PONG")


class Kafka(Process):
    """A Kafka broker and controller (KRaft); its jars come from Maven and are shared by all sets of servers.

    `controller_ports` are those of all brokers of its cluster, its own at `place`; `cluster_id` is the same
    for all of them.
    """

    kind = "kafka"

    def __init__(
        self,
        directory: Path,
        port: int,
        controller_ports: Sequence[int],
        heap_mb: int = 768,
        name: str | None = None,
        place: int = 0,
        cluster_id: str | None = None,
    ) -> None:
        super().__init__(directory, port, name)
        self.controller_ports = controller_ports
        self.heap_mb = heap_mb
        self.place = place
        self.cluster_id = cluster_id or new_cluster_id()

    @property
    def jars(self) -> Path:
        """Where the broker's jars are kept, by version."""
        return PROJECT / ".services" / f"kafka-{kafka_version()}"

    def prepare(self, report: Say) -> None:
        """Fetches the jars and formats the storage, each once."""
        if shutil.which("java") is None:
            install(report, "Java 17", ["openjdk-17-jre-headless"])
        self._fetch(report)
        properties = self.directory / "kafka.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in self._properties().items()))
        if not (self.directory / "kafka" / "meta.properties").exists():
            # As one word: one id in 64 begins with a dash, and would be taken for an option.
            format_ = [
                *self._java("kafka.tools.StorageTool"),
                "format",
                f"--cluster-id={self.cluster_id}",
                "-c",
                str(properties),
            ]
            done = subprocess.run(format_, capture_output=True, text=True)
            if done.returncode != 0:
                raise ServiceError(f"Kafka's storage could not be formatted: {done.stdout}{done.stderr}")

    def _fetch(self, report: Say) -> None:
        if (self.jars / "complete").exists():
            return
        if shutil.which("mvn") is None:
            install(report, "Maven", ["maven"])
        report(f"fetching Kafka {kafka_version()} with Maven")
        fetch = [
            "mvn",
            "-q",
            "-B",
            "-f",
            str(OPS / "services" / "kafka.pom.xml"),
            f"-Dkafka.version={kafka_version()}",
        ]
        fetch += ["dependency:copy-dependencies", f"-DoutputDirectory={self.jars}"]
        done = subprocess.run(fetch, capture_output=True, text=True)
        if done.returncode != 0:
            raise ServiceError(f"Maven could not fetch Kafka: {(done.stdout + done.stderr).strip()[-800:]}")
        (self.jars / "complete").touch()

    def _properties(self) -> dict[str, object]:
        brokers = len(self.controller_ports)
        controller_port = self.controller_ports[self.place]
        voters = ",".join(f"{place + 1}@127.0.0.1:{port}" for place, port in enumerate(self.controller_ports))
        properties: dict[str, object] = {
            "process.roles": "broker,controller",
            "node.id": self.place + 1,
            "controller.quorum.voters": voters,
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": self.directory / "kafka",
            "offsets.topic.replication.factor": min(brokers, 3),
            "transaction.state.log.replication.factor": min(brokers, 3),
            "transaction.state.log.min.isr": min(brokers, 2),
            "group.initial.rebalance.delay.ms": 0,
            "auto.create.topics.enable": "false",
            "message.max.bytes": 8 * 1024 * 1024,
            "offsets.topic.num.partitions": 8,
        }
        if brokers > 1:
            # A broker that is gone is noticed after 6 s, not 9, and leaves the replicas in sync as soon; few
            # threads, since three share a small machine.
            properties |= {
                "min.insync.replicas": 2,
                "broker.session.timeout.ms": 6_000,
                "broker.heartbeat.interval.ms": 1_000,
                "replica.lag.time.max.ms": 6_000,
                "num.network.threads": 2,
                "num.io.threads": 2,
            }
        return properties

    def _java(self, main_class: str) -> list[str]:
        return [
            "java",
            f"-Xmx{self.heap_mb}m",
            "-XX:TieredStopAtLevel=1",
            "-cp",
            f"{self.jars}/*",
            main_class,
        ]

    def command(self) -> list[str]:
        """The broker; a heap of its own size, since several sets may run beside each other."""
        java = ["java", f"-Xms{self.heap_mb // 2}m", f"-Xmx{self.heap_mb}m", "-cp", f"{self.jars}/*"]
        return [*java, "kafka.Kafka", str(self.directory / "kafka.properties")]

    def ready(self) -> bool:
        """Whether it answers an ApiVersions request (key 18, version 0), which it does once it serves
        clients.
        """
        request = b"\x00\x12\x00\x00\x00\x00\x00\x01\xff\xff"
        return len(_ask(self.port, len(request).to_bytes(4, "big") + request)) > 8


class Postgres(Process):
    """PostgreSQL from Debian's packages, as the user postgres where we are root, which it refuses to be."""

    kind = "postgres"

    @property
    def data(self) -> Path:
        """Its data directory: ours, or, where its user cannot reach that, one under /var/tmp named after
        it.
        """
        if self.user() is None:
            return self.directory / "postgres"
        mark = hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:12]
        return Path("/var/tmp") / f"grabstream-{mark}"  # noqa: S108 - mode 700, and named after our directory

    def user(self) -> str | None:
        """postgres, where we are root."""
        return "postgres" if os.geteuid() == 0 else None

    def prepare(self, report: Say) -> None:
        """Installs it, and makes an empty cluster, each once."""
        if self._binary("initdb") is None:
            install(report, "PostgreSQL", ["postgresql", "postgresql-contrib"])
        self.log_file.touch()
        if (self.data / "PG_VERSION").exists():
            return
        self.data.mkdir(parents=True, exist_ok=True)
        user = self.user()
        if user is not None:
            shutil.chown(self.data, user=user)
            self.data.chmod(0o700)
        make = [
            str(self._binary("initdb")),
            "-D",
            str(self.data),
            "-U",
            "grabstream",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-locale",
        ]
        done = subprocess.run(make, capture_output=True, text=True, user=self.user(), cwd="/")
        if done.returncode != 0:
            raise ServiceError(f"initdb failed: {done.stderr}")

    def _binary(self, name: str) -> Path | None:
        found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
        if found and int(found[-1].parts[4]) >= 15:
            return found[-1]
        return None

    def command(self) -> list[str]:
        """postgres on loopback; fsync stays on, since a commit is a promise."""
        options = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "shared_buffers": "256MB",
            "max_wal_size": "4GB",
            "max_connections": 100,
        }
        settings = [word for key, value in options.items() for word in ("-c", f"{key}={value}")]
        return [str(self._binary("postgres")), "-D", str(self.data), *settings]

    def ready(self) -> bool:
        """Whether it answers SELECT 1 in our database, which is made when it is missing."""
        target = {"host": "127.0.0.1", "port": self.port, "user": "grabstream", "connect_timeout": 2}
        try:
            with psycopg.connect(dbname="postgres", autocommit=True, **target) as connection:  # type: ignore[arg-type]
                known = connection.execute(
                    "SELECT 1 FROM pg_database WHERE datname = 'grabstream'"
                ).fetchone()
                if known is None:
                    connection.execute("CREATE DATABASE grabstream OWNER grabstream")
        except psycopg.OperationalError:
            return False
        return True

    def remove(self) -> None:
        """Deletes its data, wherever they are."""
        shutil.rmtree(self.data, ignore_errors=True)


def new_cluster_id() -> str:
    """A random id of a Kafka cluster."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def kafka_version() -> str:
    """The Kafka version that compose.yaml names, which is the one place for versions."""
    compose = yaml.safe_load((PROJECT / "compose.yaml").read_text())
    return str(compose["services"]["kafka"]["image"]).rpartition(":")[2]


def _ask(port: int, request: bytes) -> bytes:
    """The beginning of a server's answer to a request, or nothing."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(request)
            return connection.recv(1024)
    except OSError:
        return b""
