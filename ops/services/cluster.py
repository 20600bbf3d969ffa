"""A set as it runs in production, on one machine: a Redis Cluster of three masters with a replica each, three
Kafka brokers, PostgreSQL.
"""

import base64
import hashlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import redis

from grabstream.ops.services.local import Say, ServerSet
from grabstream.ops.services.process import POLL_SECONDS, ServiceError
from grabstream.ops.services.servers import Kafka, Postgres, Redis

MASTERS: Final = 3
BROKERS: Final = 3
SLOTS: Final = 16_384
JOIN_SECONDS: Final = 30.0


class ClusterPorts(NamedTuple):
    """Ports of a set: six of Redis (masters first) and their buses, three of Kafka and their controllers,
    PostgreSQL's.
    """

    redis: Sequence[int]
    bus: Sequence[int]
    kafka: Sequence[int]
    controller: Sequence[int]
    postgres: int


def ports_from(free: Sequence[int]) -> ClusterPorts:
    """Deals nineteen ports out."""
    return ClusterPorts(free[:6], free[6:12], free[12:15], free[15:18], free[18])


class ClusterServices(ServerSet):
    """Ten servers: small heaps, since all of them share one machine."""

    def __init__(self, directory: Path, ports: ClusterPorts, kafka_heap_mb: int = 320) -> None:
        directory = directory.resolve()
        self.redis = tuple(
            Redis(directory / f"redis-{number}", port, f"redis-{number}", bus)
            for number, (port, bus) in enumerate(zip(ports.redis, ports.bus, strict=True), 1)
        )
        # The three are formatted one by one, and have to agree on the name of their cluster.
        cluster_id = (
            base64.urlsafe_b64encode(hashlib.sha256(str(directory).encode()).digest()[:16])
            .decode()
            .rstrip("=")
        )
        self.kafka = tuple(
            Kafka(
                directory / f"kafka-{place + 1}",
                port,
                ports.controller,
                kafka_heap_mb,
                f"kafka-{place + 1}",
                place,
                cluster_id,
            )
            for place, port in enumerate(ports.kafka)
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
        """Makes six Redis servers one cluster, once; raises ServiceError when they do not agree within
        JOIN_SECONDS.
        """
        join_redis(self.redis, MASTERS, report)


def join_redis(servers: Sequence[Redis], masters: int, report: Say = lambda line: None) -> None:
    """Makes running servers one cluster, unless they are: the first are masters, the others follow them in
    turn.

    Raises ServiceError when they do not agree within JOIN_SECONDS.
    """
    clients = [redis.Redis(port=server.port, socket_timeout=5) for server in servers]
    try:
        if int(_info(clients[0])["cluster_slots_assigned"]) == 0:
            _form(servers, clients, masters)
            report(f"Redis Cluster of {masters} masters, {len(servers) - masters} replicas")
        _until(
            lambda: all(_agrees(client, masters) for client in clients), "the Redis Cluster is not complete"
        )
    finally:
        for client in clients:
            client.close()


def _form(servers: Sequence[Redis], clients: Sequence[Any], masters: int) -> None:
    """Slots to the masters, an acquaintance of all, and replicas to the masters."""
    bounds = [SLOTS * place // masters for place in range(masters + 1)]
    for place, client in enumerate(clients[:masters]):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", bounds[place], bounds[place + 1] - 1)
        client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", place + 1)
    for server in servers[1:]:
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, server.bus_port)
    _until(
        lambda: all(int(_info(client)["cluster_known_nodes"]) == len(clients) for client in clients),
        "Redis servers do not meet",
    )
    for place, replica in enumerate(clients[masters:]):
        follow = partial(_replicates, replica, clients[place % masters])
        _until(follow, "a replica does not know its master")


def _info(client: Any) -> dict[str, str]:
    found = client.execute_command("CLUSTER INFO")
    return found if isinstance(found, dict) else dict(line.split(":", 1) for line in found.decode().split())


def _replicates(replica: Any, master: Any) -> bool:
    """Tells a server whose replica it is; false while it has not heard of its master."""
    try:
        replica.execute_command("CLUSTER", "REPLICATE", master.execute_command("CLUSTER", "MYID").decode())
    except redis.ResponseError:
        return False
    return True


def _agrees(client: Any, masters: int) -> bool:
    try:
        state, replication = _info(client), client.info("replication")
    except redis.RedisError:
        return False
    whole = (
        state["cluster_state"] == "ok"
        and int(state["cluster_slots_ok"]) == SLOTS
        and int(state["cluster_size"]) == masters
    )
    return whole and (replication["role"] == "master" or replication["master_link_status"] == "up")


def _until(condition: Any, problem: str) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise ServiceError(
                f"{problem} after {JOIN_SECONDS:.0f} s: end the set with `grabstream down --remove` and "
                "start it anew"
            )
        time.sleep(POLL_SECONDS)
