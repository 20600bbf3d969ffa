"""Connections: the only file that opens those of a process to Redis and PostgreSQL. Nothing connects at import."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, ClusterPubSub, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterError, ConnectionError, RedisClusterException, ResponseError, SlotNotCoveredError

from lua.gate import Gate, GateLimits
from lua.keys import KeySpace
from lua.sealing import Sealer
from lua.tickets import TicketKeys
from ops.settings import BadSettings, Settings, cluster_address, is_cluster
from streams.worker import WorkerSettings

SOCKET_TIMEOUT_SECONDS = 5.0
#: What redis-py calls on the streams of a connection, which are None when it is closed.
STREAM_METHODS = frozenset({"writelines", "write", "drain", "read", "close", "wait_closed"})


def open_redis(settings: Settings) -> Any:
    """A client of the core Redis; it repeats nothing by itself, since what an argument says of the server may be old by then.

    `redis-cluster://host:port,host:port` is a Redis Cluster, of which the hosts named are those asked first.
    """
    options: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT_SECONDS,
        "socket_connect_timeout": SOCKET_TIMEOUT_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": 256,
    }
    if not is_cluster(settings.redis_url):
        return redis.asyncio.Redis.from_url(settings.redis_url, **options)
    address = cluster_address(settings.redis_url)
    nodes = [ClusterNode(host, port) for host, port in address.nodes]
    return ClusterClient(
        startup_nodes=nodes,
        username=address.username,
        password=address.password,
        ssl=address.encrypted,
        require_full_coverage=False,  # a shard whose server is away stops alone
        reinitialize_steps=0,  # a redirection concerns its slot: it is no reason to close the connections of all others
        **options,
    )


class ClusterClient(RedisCluster):  # type: ignore[misc]
    """A client of a Redis Cluster that says `ConnectionError` whenever a server cannot be found.

    redis-py raises exceptions for it that are no RedisErrors, although the next moment may be good again: a failover takes seconds.
    """

    async def initialize(self, *args: Any, **kwargs: Any) -> "ClusterClient":
        """Asks the servers who has which slots, if that is not known."""
        try:
            await super().initialize(*args, **kwargs)
        except RedisClusterException as error:
            raise ConnectionError(f"the Redis Cluster does not answer: {error}") from error
        return self

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a command on the server that has its keys; a redirection is followed, since nothing was carried out where it came from."""
        # Otherwise redis-py sends what comes while it asks who has which slots to servers by chance.
        await self.initialize()
        try:
            return await super().execute_command(*args, **kwargs)
        except SlotNotCoveredError as error:
            raise ConnectionError(f"no server has the slot: {error}") from error
        except ClusterError as error:
            if isinstance(error, ResponseError):
                raise
            # It was sent from one server to the other as often as it may be: the slot is being moved.
            raise ConnectionError(f"the slot is being moved: {error}") from error
        except AttributeError as error:
            # A connection that redis-py closes for one caller after an error may be just being opened by another.
            if error.obj is not None or error.name not in STREAM_METHODS:
                raise
            raise ConnectionError("the connection was closed while it was opened") from error

    def pubsub(self, **options: Any) -> "ClusterSubscription":
        """A subscription at one of the servers: each of them hears what is announced at any."""
        return ClusterSubscription(self, **options)


class ClusterSubscription(ClusterPubSub):  # type: ignore[misc]
    """A subscription that asks who has which slots before it chooses a server."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Subscribes; raises ConnectionError while no server can be found."""
        await self.cluster.initialize()
        try:
            return await super().execute_command(*args, **kwargs)
        except RedisClusterException as error:
            raise ConnectionError(f"no server to subscribe at: {error}") from error


async def information(client: Any, section: str, key: str | None = None) -> dict[str, dict[str, Any]]:
    """INFO of each server by its address, or of the one that has a key; raises ConnectionError when none answers.

    Of all servers of a cluster those are left out that do not answer: a replica that is away is no reason not to start.
    """
    if not isinstance(client, RedisCluster):
        return {"": await client.info(section)}
    await client.initialize()
    if key is not None:
        node = client.get_node_from_key(key)
        if node is None:
            raise ConnectionError(f"no server has the slot of {key}")
        return {node.name: await client.info(section, target_nodes=node)}
    nodes = client.get_nodes()
    replies = await asyncio.gather(*(client.info(section, target_nodes=node) for node in nodes), return_exceptions=True)
    found = {node.name: reply for node, reply in zip(nodes, replies, strict=True) if not isinstance(reply, BaseException)}
    if not found:
        raise ConnectionError(f"no server of the Redis Cluster answers: {replies[0] if replies else 'it has none'}")
    return found


async def require_core(client: Any) -> None:
    """Raises BadSettings when a server may forget by itself: what was decided would be gone without a word."""
    for server, memory in (await information(client, "memory")).items():
        policy = memory["maxmemory_policy"]
        if policy != "noeviction":
            raise BadSettings(
                f"GRAB_REDIS_URL: the maxmemory-policy of {server or 'the server'} is {policy}, but the core must never evict: "
                "`CONFIG SET maxmemory-policy noeviction`, or give the core a server of its own"
            )


def key_space(settings: Settings) -> KeySpace:
    """The keys of this system."""
    return KeySpace(settings.prefix, settings.shards)


def gate_limits(settings: Settings) -> GateLimits:
    """The gate's bounds from the settings."""
    return GateLimits(
        batch_commands_max=settings.batch_commands_max,
        queue_commands_max=settings.gate_queue_max,
        outbox_events_max=settings.outbox_events_max,
        timeout_ms=settings.gate_timeout_ms,
        clock_skew_ms_max=settings.clock_skew_ms_max,
    )


def sealer(settings: Settings) -> Sealer:
    """What seals seeds; raises ValueError that names GRAB_SEAL_KEYS when they cannot be read."""
    return Sealer.from_text(settings.seal_keys.get_secret_value())


def ticket_keys(settings: Settings) -> TicketKeys:
    """What tickets are checked with; raises ValueError that names GRAB_TICKET_KEYS when they cannot be read."""
    return TicketKeys.from_text(settings.ticket_keys.get_secret_value())


def worker_settings(settings: Settings) -> WorkerSettings:
    """What a worker is told."""
    return WorkerSettings(
        kafka=settings.kafka,
        prefix=settings.prefix,
        shards=settings.shards,
        gate=gate_limits(settings),
        block_events_max=settings.block_events_max,
        lease_ms=settings.lease_ms,
        patience_ms=settings.patience_ms,
    )


@asynccontextmanager
async def open_gate(settings: Settings) -> AsyncIterator[Gate]:
    """A started gate with a Redis client of its own."""
    client = open_redis(settings)
    gate = Gate(client, key_space(settings), sealer(settings), gate_limits(settings), tickets=ticket_keys(settings))
    try:
        await require_core(client)
        gate.start()
        yield gate
    finally:
        await gate.close()
        await client.aclose()
