"""What servers of Redis say of themselves and of the shards on them: the one there is, or those of a Redis
Cluster, each for itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from redis.exceptions import ConnectionError

from grabstream.lua.trouble import is_trouble
from grabstream.ops.connections.redis_cluster import ClusterClient, slot_of

#: How long a server is given to say something where the others are not to wait for it.
ANSWER_SECONDS_MAX: Final = 5.0

T = TypeVar("T")


async def within(asking: Awaitable[T], seconds: float = ANSWER_SECONDS_MAX) -> T:
    """What a server says, if it says so in time; raises TimeoutError."""
    async with asyncio.timeout(seconds):
        return await asking


async def of_each(client: Any, keys: Mapping[int, str], ask: Callable[[int], Awaitable[T]]) -> dict[int, T]:
    """What is said of each number by the server that has its key: of all servers at once, of each server one
    after the other.

    Of a server that does not answer in time nothing more is asked, and its numbers are left out. Raises its
    error when none answers.
    """
    places: dict[str, list[int]] = {}
    if isinstance(client, ClusterClient):
        await client.know()
    said: dict[int, T] = {}
    problems: list[BaseException] = []
    for number, key in keys.items():
        try:
            server = client.server_of(slot_of(key)).name if isinstance(client, ClusterClient) else ""
        except ConnectionError as error:
            problems.append(error)
        else:
            places.setdefault(server, []).append(number)

    async def ask_server(numbers: Sequence[int]) -> None:
        try:
            for number in numbers:
                said[number] = await within(ask(number))
        except BaseException as error:
            if not is_trouble(error):
                raise
            problems.append(error)

    await asyncio.gather(*map(ask_server, places.values()))
    if problems and not said:
        raise problems[0]
    return {number: said[number] for number in keys if number in said}


async def masters(client: Any) -> list[tuple[str, Any]]:
    """The servers that decide: of each its address ('' for one without a cluster), and its client."""
    if not isinstance(client, ClusterClient):
        return [("", client)]
    await client.know()
    return [(server.name, server.client) for server in client.masters()]


async def information(client: Any, section: str, key: str | None = None) -> dict[str, dict[str, Any]]:
    """INFO of each server by its address, or of the one that has a key; raises ConnectionError when none
    answers.

    Of all servers of a cluster those are left out that do not answer: a replica that is away is no reason not
    to start.
    """
    if not isinstance(client, ClusterClient):
        return {"": await client.info(section)}
    await client.know()
    if key is not None:
        await client.execute_command("EXISTS", key)  # follows a redirection, which INFO would not
        server = client.server_of(slot_of(key))
        return {server.name: await client.guarded(server.client.info(section))}
    servers = client.servers()
    replies = await asyncio.gather(
        *(within(server.client.info(section)) for server in servers), return_exceptions=True
    )
    found = {
        server.name: reply
        for server, reply in zip(servers, replies, strict=True)
        if not isinstance(reply, BaseException)
    }
    if not found:
        raise ConnectionError(
            f"no server of the Redis Cluster answers: {replies[0] if replies else 'it has none'}"
        )
    return found
