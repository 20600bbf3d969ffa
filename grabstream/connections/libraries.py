"""The function libraries of all releases on the servers of a system: loads the one of this release where it
is missing, names the others, and deletes those on request.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.exceptions import NoPermissionError, ResponseError

from grabstream.connections.redis_servers import masters, within
from grabstream.lua.library import PREFIX, library, load, why_unusable


class ServerLibraries(NamedTuple):
    """A server (its address, '' without a cluster): why it cannot have the library of this release, in words,
    or ''; and the names of the libraries of other releases.
    """

    server: str
    plain: str
    others: list[str]


async def load_everywhere(redis: Any) -> list[ServerLibraries]:
    """Loads the library of this release on every master where it is missing; raises the client's errors."""
    name, servers = library().name, []
    for server, client in await masters(redis):
        names = await within(_names(client))
        plain = "" if name in names else await within(load(client))
        servers.append(ServerLibraries(server, plain, [other for other in names if other != name]))
    return servers


async def delete_others(redis: Any, servers: Sequence[ServerLibraries]) -> None:
    """Deletes the libraries of other releases that `load_everywhere` named; raises the client's errors."""
    others = {server.server: server.others for server in servers}
    for server, client in await masters(redis):
        for name in others.get(server, ()):
            await within(_delete(client, name))


async def _names(client: Any) -> list[str]:
    """The libraries of all releases on a server; none if this user may not list them."""
    try:
        listed = await client.execute_command("FUNCTION", "LIST", "LIBRARYNAME", f"{PREFIX}*")
    except NoPermissionError:
        return []
    except ResponseError as error:
        if why_unusable(error):
            return []
        raise
    return sorted(_text(field_of(entry, "library_name")) for entry in listed)


async def _delete(client: Any, name: str) -> None:
    try:
        await client.execute_command("FUNCTION", "DELETE", name)
    except ResponseError as error:
        if "not found" not in str(error).lower():  # another process was faster
            raise


def field_of(entry: Any, name: str) -> Any:
    """A field of an entry of FUNCTION LIST, which is a map, or a list of names and values."""
    if not isinstance(entry, dict):
        entry = dict(zip(entry[::2], entry[1::2], strict=True))
    return next(value for key, value in entry.items() if _text(key) == name)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
