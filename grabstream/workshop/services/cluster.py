"""A set of servers as in production, on one machine: a Redis Cluster of three masters with one replica each,
three Kafka brokers, and PostgreSQL.
"""

import base64
import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import redis

from grabstream.workshop.services.local import Say, ServerSet
from grabstream.workshop.services.process import POLL_SECONDS, ServiceError
from grabstream.workshop.services.servers import Kafka, Postgres, Redis

MASTERS: Final = 3
SLOTS: Final = 16_384
JOIN_SECONDS: Final = 90.0


class ClusterPorts(NamedTuple):
    """The ports of a set: six for Redis (masters first), six for their cluster buses, three for Kafka, three
    for its controllers, and one for PostgreSQL.
    """

    redis: Sequence[int]
    bus: Sequence[int]
    kafka: Sequence[int]
    controller: Sequence[int]
    postgres: int


def ports_from(free: Sequence[int]) -> ClusterPorts:
    """Divides nineteen free ports among the servers."""
    return ClusterPorts(free[:6], free[6:12], free[12:15], free[15:18], free[18])


class ClusterServices(ServerSet):
    """The ten servers of a cluster, with small heaps, since they share one machine."""

    def __init__(self, directory: Path, ports: ClusterPorts, kafka_heap_mb: int = 320) -> None:
        directory = directory.resolve()
        self.redis = tuple(
            Redis(directory / f"redis-{number}", port, f"redis-{number}", bus)
            for number, (port, bus) in enumerate(zip(ports.redis, ports.bus, strict=True), 1)
        )
        # The three brokers are formatted one by one and need the same cluster id.
        cluster_id = (
            base64.urlsafe_b64encode(hashlib.sha256(str(directory).encode()).digest()[:16])
            .decode()
            .rstrip("=")
        )
        self.kafka = tuple(
            Kafka(
                directory / f"kafka-{index + 1}",
                port,
                ports.controller,
                kafka_heap_mb,
                f"kafka-{index + 1}",
                index,
                cluster_id,
            )
            for index, port in enumerate(ports.kafka)
        )
        super().__init__(directory, (*self.redis, *self.kafka), Postgres(directory, ports.postgres))

    def environment(self) -> dict[str, str]:
        """The settings (without GRAB_) that point at this set."""
        return {
            "redis_url": "redis-cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.redis),
            "kafka": ",".join(f"127.0.0.1:{server.port}" for server in self.kafka),
            "postgres": f"postgresql://grabstream@127.0.0.1:{self.postgres.port}/grabstream",
        }

    def join(self, report: Say) -> None:
        """Joins the six Redis servers into one cluster, unless they are one; raises ServiceError when the
        cluster is not complete within JOIN_SECONDS.
        """
        join_redis(self.redis, MASTERS, report)


def join_redis(servers: Sequence[Redis], masters: int, report: Say = lambda line: None) -> None:
    """Joins running servers into one cluster, unless they are one. The first `masters` servers become
    masters, the others their replicas in turn.

    Raises ServiceError when the cluster is not complete within JOIN_SECONDS.
    """
    clients = [server.client() for server in servers]
    try:
        if int(_info(clients[0])["cluster_slots_assigned"]) == 0:
            _form(servers, clients, masters)
            report(f"Redis Cluster of {masters} masters, {len(servers) - masters} replicas")
        _until(
            lambda: all(_is_complete(client, masters) for client in clients),
            "the Redis Cluster is not complete",
        )
    finally:
        for client in clients:
            client.close()


def _form(servers: Sequence[Redis], clients: Sequence[Any], masters: int) -> None:
    """Assigns slots to the masters, makes all servers meet, and assigns replicas to the masters."""
    bounds = [SLOTS * index // masters for index in range(masters + 1)]
    for index, client in enumerate(clients[:masters]):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
    for server in servers[1:]:
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, server.bus_port)
    _until(
        lambda: all(int(_info(client)["cluster_known_nodes"]) == len(clients) for client in clients),
        "the Redis servers have not joined",
    )
    for index, replica in enumerate(clients[masters:]):
        follow = partial(_replicate, replica, clients[index % masters])
        _until(follow, "a replica has not connected to its master")


def _info(client: Any) -> dict[str, str]:
    info = client.execute_command("CLUSTER INFO")
    return info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.decode().split())


def _replicate(replica: Any, master: Any) -> bool:
    """Makes a server the replica of a master; returns False while it has not met the master."""
    try:
        replica.execute_command("CLUSTER", "REPLICATE", master.execute_command("CLUSTER", "MYID").decode())
    except redis.ResponseError:
        return False
    return True


def _is_complete(client: Any, masters: int) -> bool:
    """Whether this server sees all slots and masters, and is in sync if it is a replica."""
    try:
        state, replication = _info(client), client.info("replication")
    except redis.RedisError:
        return False
    slots_served = (
        state["cluster_state"] == "ok"
        and int(state["cluster_slots_ok"]) == SLOTS
        and int(state["cluster_size"]) == masters
    )
    return slots_served and (replication["role"] == "master" or replication["master_link_status"] == "up")


def _until(condition: Any, problem: str) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ServiceError(
                f"{problem} after {JOIN_SECONDS:.0f} s: remove the servers with `grabstream down --remove`, "
                "then start them again"
            )
        time.sleep(POLL_SECONDS)
