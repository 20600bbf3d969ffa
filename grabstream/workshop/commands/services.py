"""`up` and `down`: start and stop the local servers, with compose.yaml if a Docker engine answers, otherwise
as plain processes.
"""

import contextlib
import os
import shlex
import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import click
from psycopg.conninfo import conninfo_to_dict

from grabstream.crypto.sealing import new_seal_key
from grabstream.ops.console.output import console, json_option, print_json
from grabstream.settings import GATEWAY_PORT, Settings, child_environment, is_cluster, load_settings
from grabstream.workshop.services import (
    ClusterPorts,
    ClusterServices,
    LocalServices,
    SecureServices,
    ServerSet,
    ServiceError,
)
from grabstream.workshop.services.servers import PROJECT

SERVERS = ("redis", "kafka", "postgres")
CLUSTER_SERVERS = (
    *(f"redis-{number}" for number in range(1, 7)),
    *(f"kafka-{number}" for number in range(1, 4)),
    "postgres",
)
#: The first ports of the cluster's servers, relative to the port of the single Redis.
OFFSETS = {"redis": 20, "bus": 30, "kafka": 40, "controller": 50, "postgres": 60, "secure": 70}
#: The folder of the secured servers, and the file that points a shell at them.
SECURE = PROJECT / ".services" / "secure"
SECURE_ENVIRONMENT = SECURE / "env"
#: The file that points a shell at the cluster.
CLUSTER_ENVIRONMENT = PROJECT / ".services" / "cluster.env"


def local_services() -> LocalServices:
    """The servers that `up` starts: in the project's folder .services, on the ports of the settings."""
    settings = load_settings()
    books = conninfo_to_dict(settings.postgres)  # a URL, or host=… port=…
    redis, kafka, postgres = (
        _local_port(url)
        for url in (
            settings.redis_url,
            f"kafka://{settings.kafka}",
            f"postgresql://{books.get('host', '')}:{books.get('port', '')}",
        )
    )
    return LocalServices(PROJECT / ".services", redis, kafka, kafka + 1, postgres)


def local_cluster() -> ClusterServices:
    """The servers that `up --cluster` starts: in the folder .services/cluster, on ports after those of the
    settings.
    """
    settings = load_settings()
    if is_cluster(settings.redis_url):
        # The settings point at such a cluster already: its first port gives the others.
        first = (
            _local_port(f"redis://{settings.redis_url.partition('://')[2].split(',')[0]}") - OFFSETS["redis"]
        )
    else:
        first = _local_port(settings.redis_url)

    def ports(of: str, count: int) -> list[int]:
        return [first + OFFSETS[of] + number for number in range(count)]

    dealt = ClusterPorts(
        ports("redis", 6),
        ports("bus", 6),
        ports("kafka", 3),
        ports("controller", 3),
        first + OFFSETS["postgres"],
    )
    return ClusterServices(PROJECT / ".services" / "cluster", dealt)


def local_secured() -> SecureServices:
    """The servers that `up --secure` starts: in the folder .services/secure, on ports after those of the
    settings.
    """
    settings = load_settings()
    first = _local_port(settings.redis_url.split(",")[0].replace("-cluster", ""))
    if not points_at_secured(settings):
        first += OFFSETS["secure"]
    return SecureServices(SECURE, first, first + 1, first + 2, first + 3)


def points_at_secured(settings: Settings) -> bool:
    """Whether the settings point at the servers that `up --secure` starts."""
    return settings.redis_ca == str(SECURE / "certificates" / "ca.pem")


def _sets(which: str | None = None) -> list[ServerSet]:
    """The sets of servers that `which` names; without, only the cluster, or the secured ones, if the settings
    point there.
    """
    settings = load_settings()
    if which == "secure" or points_at_secured(settings):
        return [local_secured()]
    if which == "cluster" or is_cluster(settings.redis_url):
        return [local_cluster()]
    if which == "single":
        return [local_services()]
    secured = [local_secured()] if SECURE.exists() else []
    return [local_services(), local_cluster(), *secured]


def _local_port(url: str) -> int:
    """The port of a local server; raises ServiceError when the settings point at another machine."""
    server = urlsplit(url.split(",")[0])
    if server.hostname not in ("127.0.0.1", "localhost") or server.port is None or "," in url:
        raise ServiceError(
            f"the settings point at {server.netloc.rpartition('@')[2]}, but `up` starts servers on this "
            "machine only: unset the settings, or start the server there"
        )
    return server.port


def docker_answers() -> bool:
    """Whether a Docker engine with compose answers, unless GRAB_SERVICES asks for plain processes."""
    if child_environment().get("GRAB_SERVICES") == "processes":
        return False
    try:
        asked = subprocess.run(["docker", "info"], capture_output=True, timeout=3)
        return (
            asked.returncode == 0
            and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def _compose(*words: str) -> None:
    done = subprocess.run(["docker", "compose", "-f", str(PROJECT / "compose.yaml"), *words])
    if done.returncode != 0:
        raise ServiceError(
            f"`docker compose {' '.join(words)}` failed; set GRAB_SERVICES=processes to use plain processes"
        )


def _compose_running() -> list[str]:
    asked = subprocess.run(
        ["docker", "compose", "-f", str(PROJECT / "compose.yaml"), "ps", "--services", "--status", "running"],
        capture_output=True, text=True,
    )  # fmt: skip
    return asked.stdout.split()


def _write_seal_key() -> bool:
    """Writes a new seal key to .env, unless one is set; returns whether it did."""
    if load_settings().seal_keys.get_secret_value():
        return False
    env_file = Path(".env")
    before = env_file.read_text() if env_file.exists() else ""
    env_file.write_text(before + f"GRAB_SEAL_KEYS={new_seal_key()}\n")
    env_file.chmod(0o600)
    return True


@click.command()
@click.option(
    "--temporary",
    is_flag=True,
    help="When the servers stop, remove everything that they created outside of the project.",
)
@click.option(
    "--cluster",
    is_flag=True,
    help="Start a Redis Cluster of three masters with replicas, and three Kafka brokers.",
)
@click.option(
    "--secure",
    is_flag=True,
    help="Start servers with TLS and logins, in addition to the others, with new certificates and users.",
)
@json_option
def up(temporary: bool, cluster: bool, secure: bool, as_json: bool) -> None:
    """Start Redis, Kafka and PostgreSQL, unless they are running.

    If a Docker engine answers, compose.yaml is used, unless GRAB_SERVICES=processes asks for plain processes.
    These keep their data in the folder .services (PostgreSQL in /var/tmp, if root starts it). A cluster has
    its own ports, and may run in addition to the single servers.
    """
    if not (PROJECT / "compose.yaml").exists():
        raise ServiceError(
            "`grabstream up` needs a checkout of the project, where compose.yaml names the versions of the "
            "servers: run it there, or set GRAB_REDIS_URL, GRAB_KAFKA and GRAB_POSTGRES to other servers"
        )
    report = (lambda line: None) if as_json else (lambda line: console.print(f"[dim]{line}[/]"))
    made_key = _write_seal_key()
    secure = secure or points_at_secured(load_settings())
    cluster = cluster or is_cluster(load_settings().redis_url)
    if secure and cluster:
        raise click.UsageError("--secure and --cluster are two sets of servers: start one after the other")
    environment = ""
    if docker_answers() and not secure:
        servers = CLUSTER_SERVERS if cluster else SERVERS
        _compose("--profile", "cluster", "up", "-d", "--wait", *servers)
        if cluster:
            _compose("--profile", "cluster", "run", "--rm", "redis-cluster")
        running: dict[str, int | None] = dict.fromkeys(servers)
        by = "docker compose"
    else:
        services = local_secured() if secure else local_cluster() if cluster else local_services()
        services.up(report, temporary)
        running, by = services.status(), "processes"
        if secure or cluster:
            environment = _write_environment(services, SECURE_ENVIRONMENT if secure else CLUSTER_ENVIRONMENT)
    if as_json:
        print_json(
            {"by": by, "servers": running, "seal_key_written": made_key, "environment": environment or None}
        )
        return
    if made_key:
        console.print("[dim]GRAB_SEAL_KEYS written to .env: keep it in every backup[/]")
    console.print(f"Redis, Kafka and PostgreSQL are up ([dim]{by}[/]).")
    if not temporary:
        console.print(where_the_page_is(), highlight=False, soft_wrap=True)
    if environment:
        console.print(f"Run `. {environment}` to point this shell at them.", highlight=False)


def where_the_page_is() -> str:
    """Where the live page is, or how to start the gateway that serves it."""
    at = f"http://127.0.0.1:{GATEWAY_PORT}/"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", GATEWAY_PORT), timeout=1):
        return f"The live page: {at}"
    return (
        "Start the gateway for the live page: `grabstream init`, then `grabstream worker` and `grabstream "
        f"gateway`; it is at {at}"
    )


def _write_environment(services: ServerSet, file: Path) -> str:
    """Writes the file that points a shell at a set of servers, and that only its owner can read; returns its
    relative path.
    """
    lines = (
        f"export GRAB_{name.upper()}={shlex.quote(value)}\n" for name, value in services.environment().items()
    )
    file.touch(mode=0o600)
    file.write_text("".join(lines))
    return os.path.relpath(file)


@click.command()
@click.argument("which", type=click.Choice(["single", "cluster", "secure"]), required=False)
@click.option("--dry-run", is_flag=True, help="Print which servers would be stopped, and stop none.")
@click.option("--remove", is_flag=True, help="Delete the servers' data too.")
@json_option
def down(which: str | None, dry_run: bool, remove: bool, as_json: bool) -> None:
    """Stop the servers that `up` started, and no others: the single servers, the cluster, the secured ones,
    or all. Their data are kept.
    """
    if dry_run:
        running = [name for set_ in _sets(which) for name, pid in set_.status().items() if pid is not None]
        running += _compose_running() if docker_answers() else []
        if as_json:
            print_json({"running": running})
        elif running:
            click.echo(" ".join(running))
        return
    if docker_answers():
        stopped = [name for name in _compose_running() if name in {*SERVERS, *CLUSTER_SERVERS}]
        _compose(
            "--profile",
            "cluster",
            *(("down", "--volumes") if remove else ("stop", *SERVERS, *CLUSTER_SERVERS)),
        )
        deleted = ["containers and volumes of compose.yaml"] if remove else []
    else:
        stopped = [name for set_ in _sets(which) for name in set_.down()]
        deleted = [str(path) for set_ in reversed(_sets(which)) if remove for path in set_.remove()]
    if as_json:
        print_json({"stopped": stopped, "deleted": deleted})
        return
    console.print(f"Stopped: {', '.join(stopped)}." if stopped else "No server that `up` started is running.")
    if remove:
        console.print(
            f"Deleted: {', '.join(deleted)}." if deleted else "There was no data to delete.", highlight=False
        )
