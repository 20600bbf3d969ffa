"""Asks Redis servers about themselves and about the shards on them: the single server, or each server of a
Redis Cluster separately.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from redis.exceptions import ConnectionError

from grabstream.connections.redis_cluster import ClusterClient, ClusterServer, slot_of
from grabstream.runtime.trouble import is_trouble

#: How long to wait for one server, so that it does not delay what the others answer.
ANSWER_SECONDS_MAX: Final = 5.0

T = TypeVar("T")


async def within(asking: Awaitable[T], seconds: float = ANSWER_SECONDS_MAX) -> T:
    """A server's answer; raises TimeoutError when it takes longer than `seconds`."""
    async with asyncio.timeout(seconds):
        return await asking


async def ask_each(client: Any, keys: Mapping[int, str], ask: Callable[[int], Awaitable[T]]) -> dict[int, T]:
    """Asks for each number the server that has its key, and returns the answers by number. The servers are
    asked concurrently, each server one number after the other.

    A server that does not answer in ANSWER_SECONDS_MAX is not asked again; its numbers are left out. Raises
    the first error when no server answers.
    """
    numbers_by_server: dict[str, list[int]] = {}
    if isinstance(client, ClusterClient):
        await client.load_slots()
    answers: dict[int, T] = {}
    problems: list[BaseException] = []
    for number, key in keys.items():
        try:
            server = client.server_of(slot_of(key)).name if isinstance(client, ClusterClient) else ""
        except ConnectionError as error:
            problems.append(error)
        else:
            numbers_by_server.setdefault(server, []).append(number)

    async def ask_server(numbers: Sequence[int]) -> None:
        try:
            for number in numbers:
                answers[number] = await within(ask(number))
        except BaseException as error:
            if not is_trouble(error):
                raise
            problems.append(error)

    await asyncio.gather(*map(ask_server, numbers_by_server.values()))
    if problems and not answers:
        raise problems[0]
    return {number: answers[number] for number in keys if number in answers}


async def masters(client: Any) -> list[tuple[str, Any]]:
    """The address ('' without a cluster) and the client of each server that decides."""
    return await _listed(client, ClusterClient.masters)


async def servers_of(client: Any) -> list[tuple[str, Any]]:
    """The address ('' without a cluster) and the client of each server, replicas of a cluster too."""
    return await _listed(client, ClusterClient.servers)


async def _listed(
    client: Any, servers: Callable[[ClusterClient], list[ClusterServer]]
) -> list[tuple[str, Any]]:
    if not isinstance(client, ClusterClient):
        return [("", client)]
    await client.load_slots()
    return [(server.name, server.client) for server in servers(client)]


async def information(client: Any, section: str, key: str | None = None) -> dict[str, dict[str, Any]]:
    """INFO of each server by its address ('' without a cluster), or only of the server that has `key`.

    Servers of a cluster that do not answer are left out, because a process may start while a replica is down.
    Raises ConnectionError when no server answers.
    """
    if not isinstance(client, ClusterClient):
        return {"": await client.info(section)}
    await client.load_slots()
    if key is not None:
        await client.execute_command("EXISTS", key)  # follows a redirection, which INFO would not
        server = client.server_of(slot_of(key))
        return {server.name: await client.guarded(server.client.info(section))}
    servers = client.servers()
    replies = await asyncio.gather(
        *(within(server.client.info(section)) for server in servers), return_exceptions=True
    )
    answers = {
        server.name: reply
        for server, reply in zip(servers, replies, strict=True)
        if not isinstance(reply, BaseException)
    }
    if not answers:
        raise ConnectionError(
            f"no server of the Redis Cluster answers: {replies[0] if replies else 'it has no servers'}"
        )
    return answers
