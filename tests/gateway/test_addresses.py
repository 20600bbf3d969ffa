"""Addresses of clients, and bounds of the connections of one address."""

import asyncio
from contextlib import AsyncExitStack
from ipaddress import ip_network
from typing import Any

import pytest

from grabstream.gateway.addresses import ConnectionsByAddress, address_of
from grabstream.gateway.measures import GatewayMeasures
from tests.conftest import until
from tests.gateway.test_connections import served

#: Of this machine too, and not 127.0.0.1.
NEIGHBOUR = "127.0.0.2"


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.7", [], "192.0.2.7"),
        ("192.0.2.7", [b"198.51.100.1"], "192.0.2.7"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [b"198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", [b"203.0.113.9, 198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", [b"203.0.113.9", b"198.51.100.1 , 10.0.0.2"], "198.51.100.1"),
        ("10.0.0.1", [b"10.0.0.3,10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", [b"198.51.100.1, rubbish"], "10.0.0.1"),
        ("10.0.0.1", [b"\xff\x00"], "10.0.0.1"),
        ("10.0.0.1", [b"198.51.100.1:4711"], "198.51.100.1"),
        ("10.0.0.1", [b"[2001:db8:1:2:3::1]:4711, ::ffff:10.0.0.2"], "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.1", [b"198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", [b"2001:db8:1:2:3:4:5:6"], "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", [], "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.7", [], "192.0.2.7"),
        ("", [], ""),
    ],
)
def test_address_of_a_client(peer: str, forwarded: list[bytes], address: str) -> None:
    scope = {
        "client": (peer, 1) if peer else None,
        "headers": [(b"x-forwarded-for", one) for one in forwarded],
    }
    assert address_of(scope, [ip_network("10.0.0.0/8")]) == address


@pytest.mark.parametrize(
    ("addresses", "counted"),
    [
        (["10.0.0.1", "10.0.0.1", "10.0.0.2"], 2),
        (["10.0.0.1", "::ffff:10.0.0.1"], 1),
        (["2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:0:9::"], 1),
        (["2001:db8::1", "2001:db8:0:1::1"], 2),
        (["", ""], 2),
    ],
)
def test_which_addresses_count_as_one(addresses: list[str], counted: int) -> None:
    by_address = ConnectionsByAddress(1)
    names = [by_address.add(address) for address in addresses]
    assert sum(name is not None for name in names) == counted
    for name in names:
        if name is not None:
            by_address.remove(name)
    assert not by_address._counts, "nothing is kept of who has gone"


def test_connections_of_proxies_are_not_counted() -> None:
    by_address = ConnectionsByAddress(1, [ip_network("10.0.0.0/8"), ip_network("fd00::/8")])
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1"):
        names = [by_address.add(address) for _ in range(3)]
        assert None not in names
    assert by_address.add("11.0.0.1") is not None
    assert by_address.add("11.0.0.1") is None


async def _no_content(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers every request."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def ask(port: int, address: str) -> bytes:
    """What one request from an address gets."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return await reader.read()
    except ConnectionResetError:
        return b""  # it was refused before the request was read
    finally:
        writer.close()


async def test_a_silent_address_leaves_room_for_others() -> None:
    by_address, measures = ConnectionsByAddress(3), GatewayMeasures()
    async with served(_no_content, by_address, measures) as (port, _), AsyncExitStack() as stack:
        held = []
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(NEIGHBOUR, 0))
            stack.callback(writer.close)
            held.append(writer)
        await until(lambda: measures.connections() == 3)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(NEIGHBOUR, 0))
        stack.callback(writer.close)
        refusal = await reader.read()  # to its end: the connection is closed
        assert refusal.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"retry-after: 1\r\n" in refusal.lower()
        assert b"/problems/too_many_requests" in refusal
        assert b"This address has 3 connections" in refusal
        assert (measures.shed["connections_of_address"], measures.shed["connections"]) == (1, 0)
        for _ in range(5):
            assert (await ask(port, "127.0.0.1")).startswith(b"HTTP/1.1 204")
        held[0].close()

        async def has_room() -> bool:
            return (await ask(port, NEIGHBOUR)).startswith(b"HTTP/1.1 204")

        await until(has_room, 10, "room for one more")
    assert not by_address._counts, "what was refused or has ended is not counted"


async def test_a_connection_above_the_bound_of_all_is_not_counted() -> None:
    """It would be taken away twice, or never."""
    by_address, measures = ConnectionsByAddress(1_000), GatewayMeasures()
    async with served(_no_content, by_address, measures) as (port, _), AsyncExitStack() as stack:
        for _ in range(100):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
        await until(lambda: measures.connections() == 100)
        assert not (await ask(port, NEIGHBOUR)).startswith(b"HTTP/1.1 204")
        assert dict(by_address._counts) == {"127.0.0.1": 100}
        assert (measures.shed["connections"], measures.shed["connections_of_address"]) == (1, 0)
    assert not by_address._counts
