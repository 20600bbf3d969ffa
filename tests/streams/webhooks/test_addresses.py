"""Nothing is sent to addresses that are not public, however they are written, and wherever a name leads."""

import ipaddress
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from grabstream.streams.webhooks.addresses import (
    BadUrl,
    RefusedAddress,
    check_url,
    checked_socket,
    is_public,
)
from tests.streams.webhooks.receiver import Receiver, receiving

PRIVATE = (
    "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "0.0.0.0", "255.255.255.255", "224.0.0.1", "192.0.2.1", "198.18.0.1", "240.0.0.1",
    "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::", "2001:0:7f00:1::", "64:ff9b::7f00:1",
    "64:ff9b:1::a00:1", "168.63.129.16", "::168.63.129.16", "::ffff:168.63.129.16", "2002:a83f:8110::",
    "192.0.0.1", "192.0.0.9", "192.0.0.192", "192.88.99.1", "100.100.100.200", "::ffff:0:a9fe:a9fe",
    "3fff::1", "5f00::1",
)  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_address_that_is_not_public_is_refused(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    url = f"https://[{address}]/" if ":" in address else f"https://{address}/"
    with pytest.raises(BadUrl, match="is not a public address"):
        check_url(url, False, False)
    check_url(url, False, True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with pytest.raises(RefusedAddress, match="GRAB_WEBHOOK_PRIVATE_ADDRESSES"):
        checked_socket((family, socket.SOCK_STREAM, 6, "", (address, 443)))


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c"])
def test_public_address_is_taken(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
    checked_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443))).close()


def test_address_with_a_zone_is_refused() -> None:
    with pytest.raises(RefusedAddress):
        checked_socket((socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1%lo", 443, 0, 1)))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.com/", "GRAB_WEBHOOK_HTTP"), ("ftp://example.com/", "must be https"),
        ("https:///path", "has no host"), ("https://user@example.com/", "user or password"),
        ("https://u:p@example.com/", "user or password"), ("https://example.com/#x", "fragment"),
        ("https://example.com/\r\nx: y", "in ASCII"), ("https://exämple.com/", "in ASCII"),
        ("https://example.com/a b", "in ASCII"), ("https://example.com:99999/", "cannot be read"),
        ("https://2130706433/", "is not an address"), ("https://127.1/", "is not an address"),
        ("https://127.0.0.01/", "is not an address"), ("https://[::1", "cannot be read"),
        ("https://" + "x" * 2_048, "at most 2048"), ("", "must be https"),
    ],
)  # fmt: skip
def test_url_is_refused_with_the_reason(url: str, words: str) -> None:
    with pytest.raises(BadUrl, match=words):
        check_url(url, False, False)


class Leading(AbstractResolver):
    """A resolver that lets every name lead to addresses."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            {
                "hostname": host, "host": address, "port": port, "proto": 6, "flags": 0,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
            }
            for address in self._addresses
        ]  # fmt: skip

    async def close(self) -> None:
        """Has nothing to close."""


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as one:
        yield one


@pytest.mark.parametrize(
    ("host", "addresses"),
    [
        ("localhost", None), ("0x7f000001", None), ("127.0.0.1", None), ("2130706433", None),
        ("[::ffff:127.0.0.1]", None), ("public.example", ["127.0.0.1"]),
        ("public.example", ["::ffff:127.0.0.1", "127.0.0.1"]),
    ],
)  # fmt: skip
async def test_nothing_is_sent_where_a_name_leads_to_this_machine(
    receiver: Receiver, host: str, addresses: list[str] | None
) -> None:
    """Also where the name is not checked before: the socket is made for a checked address."""
    resolver = Leading(*addresses) if addresses else None
    connector = aiohttp.TCPConnector(socket_factory=checked_socket, resolver=resolver)
    async with aiohttp.ClientSession(connector=connector) as session:
        with pytest.raises((aiohttp.ClientError, OSError, ValueError)):
            await session.post(f"http://{host}:{receiver.port}/", data=b"x")
    assert receiver.requests == []
