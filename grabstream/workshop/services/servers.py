"""The three servers: how each is prepared and started, and when it is ready."""

import base64
import hashlib
import os
import shutil
import socket
import ssl
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import psycopg
import redis

from grabstream.workshop.services.process import Process, ServiceError, install

PROJECT: Final = Path(__file__).resolve().parents[3]

#: A master of the local Redis Cluster that does not answer for this long is replaced by its replica. The
#: default of Redis is 15 s.
NODE_TIMEOUT_MS: Final = 2_000

Say = Callable[[str], None]


class Redis(Process):
    """Redis with an append-only file, synced every second, and without eviction, which would lose
    decisions.
    """

    kind = "redis"

    def __init__(
        self, directory: Path, port: int, name: str | None = None, bus_port: int | None = None
    ) -> None:
        """With a `bus_port` the server is a node of a Redis Cluster."""
        super().__init__(directory, port, name)
        self.bus_port = bus_port

    def prepare(self, report: Say) -> None:
        """Installs Debian's redis-server when it is missing."""
        if shutil.which("redis-server") is None:
            install(report, "redis-server", ["redis-server"])

    def options(self) -> dict[str, object]:
        """The configuration of the server."""
        options: dict[str, object] = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.directory,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            # By default, a master without replicas changes its replication id after a while, and with it its
            # server epoch.
            "repl-backlog-ttl": 0,
            "repl-diskless-sync-delay": 0,
        }
        if self.bus_port is not None:
            options |= {
                "cluster-enabled": "yes",
                "cluster-port": self.bus_port,
                "cluster-node-timeout": NODE_TIMEOUT_MS,
                # When a server does not answer, only its own shards stop.
                "cluster-require-full-coverage": "no",
                "cluster-allow-replica-migration": "no",
            }
        return options

    def command(self) -> list[str]:
        """redis-server with all settings as options, so that it needs no configuration file."""
        return [
            "redis-server",
            *(word for key, value in self.options().items() for word in (f"--{key}", str(value))),
        ]

    def client(self) -> Any:
        """A client that may do everything."""
        return redis.Redis(port=self.port, socket_timeout=5)

    def ready(self) -> bool:
        """Whether the server answers PING, which it does not while it loads its append-only file."""
        return _ask(self.port, b"PING\r\n").startswith(b"+PONG")


class Kafka(Process):
    """A Kafka broker and controller (KRaft). Its jars are fetched with Maven and shared by all sets of
    servers.

    `controller_ports` are those of all brokers of the cluster, that of this broker at `index`. All brokers of
    a cluster have the same `cluster_id`.
    """

    kind = "kafka"

    def __init__(
        self,
        directory: Path,
        port: int,
        controller_ports: Sequence[int],
        heap_mb: int = 768,
        name: str | None = None,
        index: int = 0,
        cluster_id: str | None = None,
    ) -> None:
        super().__init__(directory, port, name)
        self.controller_ports = controller_ports
        self.heap_mb = heap_mb
        self.index = index
        self.cluster_id = cluster_id or new_cluster_id()

    @property
    def jars(self) -> Path:
        """The directory of the broker's jars of this version."""
        return PROJECT / ".services" / f"kafka-{kafka_version()}"

    def prepare(self, report: Say) -> None:
        """Fetches the jars and formats the storage, if that was not done yet."""
        if shutil.which("java") is None:
            install(report, "Java 17", ["openjdk-17-jre-headless"])
        self._fetch(report)
        properties = self.directory / "kafka.properties"
        properties.touch(mode=0o600)
        properties.write_text("".join(f"{key}={value}\n" for key, value in self.properties().items()))
        if not (self.directory / "kafka" / "meta.properties").exists():
            # As one word: an id may start with a dash, and would be read as an option.
            format_ = [
                *self._java("kafka.tools.StorageTool"),
                "format",
                f"--cluster-id={self.cluster_id}",
                "-c",
                str(properties),
                *self.format_options(),
            ]
            done = subprocess.run(format_, capture_output=True, text=True)
            if done.returncode != 0:
                raise ServiceError(f"Kafka's storage could not be formatted: {done.stdout}{done.stderr}")

    def format_options(self) -> list[str]:
        """Further options of the program that formats the storage."""
        return []

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
            str(Path(__file__).with_name("kafka.pom.xml")),
            f"-Dkafka.version={kafka_version()}",
        ]
        fetch += ["dependency:copy-dependencies", f"-DoutputDirectory={self.jars}"]
        done = subprocess.run(fetch, capture_output=True, text=True)
        if done.returncode != 0:
            raise ServiceError(f"Maven could not fetch Kafka: {(done.stdout + done.stderr).strip()[-800:]}")
        (self.jars / "complete").touch()

    def properties(self) -> dict[str, object]:
        """The configuration of the broker."""
        brokers = len(self.controller_ports)
        controller_port = self.controller_ports[self.index]
        voters = ",".join(f"{index + 1}@127.0.0.1:{port}" for index, port in enumerate(self.controller_ports))
        properties: dict[str, object] = {
            "process.roles": "broker,controller",
            "node.id": self.index + 1,
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
            # A broker that does not answer leaves the cluster and the replicas in sync after 6 s, not 9 and
            # 30 s. Few threads, since three brokers share a small machine.
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
        """The broker, with a heap of `heap_mb`, since several sets of servers may share the machine."""
        java = ["java", f"-Xms{self.heap_mb // 2}m", f"-Xmx{self.heap_mb}m", *self.system_properties()]
        return [*java, "-cp", f"{self.jars}/*", "kafka.Kafka", str(self.directory / "kafka.properties")]

    def system_properties(self) -> list[str]:
        """Further options of the virtual machine."""
        return []

    def tls(self) -> ssl.SSLContext | None:
        """How its clients make their connections safe: not at all."""
        return None

    def ready(self) -> bool:
        """Whether the broker answers an ApiVersions request (key 18, version 0), which it does once it serves
        clients.
        """
        request = b"\x00\x12\x00\x00\x00\x00\x00\x01\xff\xff"
        return len(_ask(self.port, len(request).to_bytes(4, "big") + request, self.tls())) > 8


class Postgres(Process):
    """PostgreSQL from Debian's packages. It refuses to run as root, so root runs it as the user postgres."""

    kind = "postgres"

    @property
    def data(self) -> Path:
        """The data directory: under `directory`, or for root one under /var/tmp, named by a hash of
        `directory`, which the user postgres may not be able to read.
        """
        if self.user() is None:
            return self.directory / "postgres"
        digest = hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:12]
        return Path("/var/tmp") / f"grabstream-{digest}"  # noqa: S108 - mode 700, and a name of our own

    def user(self) -> str | None:
        """`postgres` when the current user is root."""
        return "postgres" if os.geteuid() == 0 else None

    def prepare(self, report: Say) -> None:
        """Installs PostgreSQL and initializes an empty cluster, if that was not done yet."""
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
            *self.initialization(),
            "-E",
            "UTF8",
            "--no-locale",
        ]
        done = subprocess.run(make, capture_output=True, text=True, user=self.user(), cwd="/")
        if done.returncode != 0:
            raise ServiceError(f"initdb failed: {done.stderr}")

    def initialization(self) -> list[str]:
        """The options of initdb that say how users prove themselves: not at all."""
        return ["-A", "trust"]

    def target(self) -> dict[str, Any]:
        """Where and how its owner connects."""
        return {"host": "127.0.0.1", "port": self.port, "user": "grabstream", "connect_timeout": 2}

    def _binary(self, name: str) -> Path | None:
        """The program of the newest installed version; None when that is older than 15."""
        programs = sorted(
            Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4])
        )
        if programs and int(programs[-1].parts[4]) >= 15:
            return programs[-1]
        return None

    def command(self) -> list[str]:
        """postgres on the loopback interface. fsync stays on: committed rows must survive a crash."""
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
        """Whether the server answers queries. Creates the database `grabstream` when it is missing."""
        try:
            with psycopg.connect(dbname="postgres", autocommit=True, **self.target()) as connection:
                row = connection.execute("SELECT 1 FROM pg_database WHERE datname = 'grabstream'").fetchone()
                if row is None:
                    connection.execute("CREATE DATABASE grabstream OWNER grabstream")
        except psycopg.OperationalError:
            return False
        return True

    def remove(self) -> None:
        """Deletes the data directory."""
        shutil.rmtree(self.data, ignore_errors=True)


def new_cluster_id() -> str:
    """A random id for a Kafka cluster."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def kafka_version() -> str:
    """The Kafka version in compose.yaml, which is the only place that has it."""
    import yaml  # here: only preparing Kafka needs it

    compose = yaml.safe_load((PROJECT / "compose.yaml").read_text())
    return str(compose["services"]["kafka"]["image"]).rpartition(":")[2]


def _ask(port: int, request: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """The first 1,024 bytes of a server's answer to a request; empty when it does not answer."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as plain:
            connection = tls.wrap_socket(plain, server_hostname="127.0.0.1") if tls else plain
            connection.sendall(request)
            return connection.recv(1024)
    except OSError:
        return b""
