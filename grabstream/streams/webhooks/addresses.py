"""Which URLs and addresses webhooks may be sent to.

A URL is checked when it is added, and the address when it is connected to: the socket is made for a checked
address, so a name that later resolves to another address reaches nothing else.
"""

import ipaddress
import re
import socket
from typing import Any, Final
from urllib.parse import urlsplit

URL_LENGTH_MAX: Final = 2_048
#: Networks that are global by their registration, or that `ipaddress` takes for global, but are refused.
_REFUSED: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            # They lead to addresses that may not be public: IPv4 in IPv6 (IPv4-compatible, IPv4-translated,
            # 6to4 and its relays, Teredo, NAT64).
            "::/96", "::ffff:0:0:0/96", "2002::/16", "192.88.99.0/24", "2001::/32", "64:ff9b::/96",
            "64:ff9b:1::/48",
            # Fixed addresses at which clouds offer their infrastructure to machines: Azure, Oracle (RFC 6890:
            # for protocols, not for hosts).
            "168.63.129.16/32", "192.0.0.0/24",
            # Documentation (RFC 9637), and segment routing within a network (RFC 9602).
            "3fff::/20", "5f00::/16",
        ),
    )
)  # fmt: skip
_is_written = re.compile(r"https?://[!-~]+\Z").match
_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class BadUrl(ValueError):
    """A URL not allowed for webhooks; the text says why."""


class RefusedAddress(OSError):
    """An address not allowed for webhooks."""


def check_url(url: str, http: bool, private: bool) -> None:
    """Raises BadUrl unless a webhook may be sent to the URL: `http` allows it without TLS, `private` allows
    addresses that are not public.
    """
    if len(url) > URL_LENGTH_MAX:
        raise BadUrl(f"has at most {URL_LENGTH_MAX} characters, got {len(url)}")
    if not _is_written(url):
        raise BadUrl("must be https://host/path, in ASCII: write other characters as %XX, and hosts as xn--…")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise BadUrl(f"cannot be read: {error}") from None
    if not host:
        raise BadUrl("has no host")
    if parts.username is not None or parts.password is not None:
        raise BadUrl("must not have a user or password: the receiver verifies the signature")
    if parts.fragment:
        raise BadUrl("must not have a fragment")
    if parts.scheme != "https" and not http:
        raise BadUrl("must be https://…; GRAB_WEBHOOK_HTTP=true allows http://")
    # A host that looks like an address is connected to unchanged, so it must be one in its usual form.
    if ":" in host or host.replace(".", "").isdigit():
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise BadUrl(f"{host} is not an address") from None
        if not private and not is_public(address):
            raise BadUrl(why_refused(host))


def is_public(address: _IPAddress) -> bool:
    """Whether an address is of the public Internet: not private, local, link-local, shared, reserved, or a
    multicast, in any form.
    """
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.is_site_local:
            return False
    if any(address in network for network in _REFUSED):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def why_refused(address: str) -> str:
    """Why webhooks are not sent to an address."""
    return f"{address} is not a public address; GRAB_WEBHOOK_PRIVATE_ADDRESSES=true allows it"


def checked_socket(address_info: tuple[Any, ...]) -> socket.socket:
    """A socket that will be connected to the address of a result of `getaddrinfo`; raises RefusedAddress
    unless it is public.
    """
    family, kind, protocol, _, address = address_info
    # A zone (`%eth0`) belongs to a link-local address.
    text = str(address[0])
    try:
        allowed = is_public(ipaddress.ip_address(text))
    except ValueError:
        allowed = False
    if not allowed:
        raise RefusedAddress(why_refused(text))
    return socket.socket(family, kind, protocol)
