"""`eval "$(python -m scripts.ports)"`: settings with free ports for the local servers, if others have theirs.

Prints nothing if the usual ports are free, or if a setting already chooses where a server is. Demo and tests
also pass next to another user's server, or a project of the same kind in another folder.
"""

import socket

import click

from grabstream.settings import (
    CONTROLLER_PORT,
    KAFKA_PORT,
    POSTGRES_PORT,
    REDIS_PORT,
    Settings,
    load_settings,
)
from grabstream.workshop.commands.services import docker_answers
from grabstream.workshop.services import LocalServices, free_ports
from grabstream.workshop.services.servers import PROJECT


def is_taken(port: int) -> bool:
    """Whether a process of this machine listens at a port."""
    with socket.socket() as one:
        # As servers do: a port whose connections were just closed is free.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def ports_of_run() -> tuple[int, int, int]:
    """Free ports for Redis, Kafka and PostgreSQL; the one after Kafka's, for its controller, is free too."""
    redis, kafka, postgres = free_ports(3)
    while is_taken(kafka + 1) or {kafka, kafka + 1} & {redis, postgres}:
        [kafka] = free_ports(1)
    return redis, kafka, postgres


def main() -> None:
    """Prints the settings, and says on stderr what was taken."""
    settings = load_settings()
    is_chosen = any(
        getattr(settings, name) != Settings.model_fields[name].default
        for name in ("redis_url", "kafka", "postgres")
    )
    if is_chosen or docker_answers():
        return
    usual = (REDIS_PORT, KAFKA_PORT, CONTROLLER_PORT, POSTGRES_PORT)
    taken = [str(port) for port in usual if is_taken(port)]
    if not taken:
        return
    redis, kafka, postgres = ports_of_run()
    chosen = LocalServices(PROJECT / ".services", redis, kafka, kafka + 1, postgres)
    for name, value in chosen.environment().items():
        click.echo(f"export GRAB_{name.upper()}={value}")
    click.echo(
        f"other programs listen at {', '.join(taken)}: the servers of this run get other ports",
        err=True,
    )


if __name__ == "__main__":
    main()
