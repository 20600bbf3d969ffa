"""The client of a Redis Cluster: what redis-py's own does not do as this system needs it. It opens nothing by itself."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio.cluster import ClusterNode, ClusterPipeline, ClusterPubSub, RedisCluster
from redis.exceptions import (
    ClusterError,
    ConnectionError,
    MovedError,
    RedisClusterException,
    ResponseError,
    SlotNotCoveredError,
    TimeoutError,
)

#: What redis-py calls on the streams of a connection, which are None when it is closed.
STREAM_METHODS: Final = frozenset({"writelines", "write", "drain", "read", "close", "wait_closed"})


class ClusterClient(RedisCluster):  # type: ignore[misc]
    """A client of a Redis Cluster that says `ConnectionError` whenever a server cannot be found.

    redis-py raises exceptions for it that are no RedisErrors, although the next moment may be good again: a failover takes seconds.
    """

    def __init__(self, nodes: Sequence[tuple[str, int]], connection_class: type, **options: Any) -> None:
        """`nodes` (host, port) are asked first; `connection_class` is what every connection is made of."""
        super().__init__(
            startup_nodes=[ClusterNode(host, port) for host, port in nodes],
            require_full_coverage=False,  # a shard whose server is away stops alone
            reinitialize_steps=0,  # a redirection concerns its slot: it is no reason to close the connections of all others
            **options,
        )
        self.connection_kwargs["connection_class"] = connection_class
        for node in self.nodes_manager.startup_nodes.values():
            node.connection_class = connection_class

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

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> "ClusterCommands":
        """Commands to be sent together."""
        return ClusterCommands(self, transaction)

    def forget(self) -> None:
        """Who has which slots is asked anew before the next command."""
        self._initialize = True

    def pubsub(self, **options: Any) -> "ClusterSubscription":
        """A subscription at one of the servers: each of them hears what is announced at any."""
        return ClusterSubscription(self, **options)


class ClusterCommands(ClusterPipeline):  # type: ignore[misc]
    """Commands sent together; after a failure it is asked anew who has which slots, which redis-py does only when it retries."""

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Sends them and returns the replies; raises what a single command raises."""
        await self.cluster_client.initialize()
        try:
            return await super().execute(*args, **kwargs)
        except (ConnectionError, TimeoutError, ClusterError, MovedError) as error:
            self.cluster_client.forget()
            raise ConnectionError(f"commands sent together: {error}") from error
        except RedisClusterException as error:
            raise ConnectionError(f"no server has the slot: {error}") from error


class ClusterSubscription(ClusterPubSub):  # type: ignore[misc]
    """A subscription that asks who has which slots before it chooses a server."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        """Subscribes; raises ConnectionError while no server can be found."""
        await self.cluster.initialize()
        try:
            return await super().execute_command(*args, **kwargs)
        except RedisClusterException as error:
            raise ConnectionError(f"no server to subscribe at: {error}") from error


async def masters(client: Any) -> list[tuple[str, dict[str, Any]]]:
    """The servers that decide: of each its address ('' for one without a cluster), and what a command is given to be asked there."""
    if not isinstance(client, RedisCluster):
        return [("", {})]
    await client.initialize()
    return [(node.name, {"target_nodes": node}) for node in client.get_primaries()]


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
