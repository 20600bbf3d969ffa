"""Addresses of clients: parses them, groups those that count as one, and bounds the connections of each."""

from collections import Counter
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from starlette.types import Scope

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address


def read_address(text: str) -> Address | None:
    """An address; an IPv4 address also in its IPv6 form. None for any other text."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def network_of(address: str) -> str:
    """The address, or the /64 of an IPv6 address: a client has a whole such network."""
    found = read_address(address)
    if found is None:
        return address
    return str(found) if found.version == 4 else str(ip_network((found.packed, 64), strict=False))


def is_within(address: str, networks: Sequence[Network]) -> bool:
    """Whether an address is of one of the networks."""
    found = read_address(address)
    return found is not None and any(found in network for network in networks)


def address_of(scope: Scope, proxies: Sequence[Network]) -> str:
    """The address of the client: that of the connection or, if it is a proxy that is believed, the last one
    in X-Forwarded-For that is not such a proxy. For IPv6, the network of the client.
    """
    address = scope["client"][0] if scope.get("client") else ""
    if proxies and is_within(address, proxies):
        forwarded = b",".join(value for name, value in scope["headers"] if name == b"x-forwarded-for")
        for text in reversed(forwarded.decode("latin-1").split(",")):
            one = _without_port(text.strip())
            if read_address(one) is None:
                break
            address = one
            if not is_within(address, proxies):
                break
    return network_of(address)


def _without_port(text: str) -> str:
    """An address in X-Forwarded-For without the port that some proxies add."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


class ConnectionsByAddress:
    """The connections of each address, for IPv6 of each /64: `most` at most. Those of `proxies`, and those
    without an address, are not counted: they bring the requests of many clients.
    """

    def __init__(self, most: int, proxies: Sequence[Network] = ()) -> None:
        self.most = most
        self._proxies = tuple(proxies)
        self._counts: Counter[str] = Counter()

    def add(self, address: str) -> str | None:
        """Counts a connection; returns the name for `remove`, or None when its address has as many as
        allowed.
        """
        if not address or (self._proxies and is_within(address, self._proxies)):
            return ""
        name = network_of(address)
        if self._counts[name] >= self.most:
            return None
        self._counts[name] += 1
        return name

    def remove(self, name: str) -> None:
        """Uncounts a connection that has ended."""
        if name:
            self._counts[name] -= 1
            if not self._counts[name]:
                del self._counts[name]
