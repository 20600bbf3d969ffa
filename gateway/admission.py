"""Who may come in: finds out who sends a request, by its credentials, what they may do, and how often.

Requests whose credentials are missing or wrong are counted by the address of the client. An address with too
many of them gets an answer without any work on its credentials, except for credentials that were valid a
moment ago: whoever shares an address with an attacker can continue.
"""

import math
import re
import time
from collections.abc import Sequence
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, NamedTuple

from starlette.types import Scope

from grabstream.gateway.api_keys import KeyRing, is_secret
from grabstream.gateway.bounds import CALLERS_COUNTED_MAX, TOKENS_REMEMBERED_MAX
from grabstream.gateway.callers import Caller, authorize, unauthenticated
from grabstream.gateway.operations import Operation
from grabstream.gateway.problems import Problem, retry_after
from grabstream.gateway.rates import Counters, Rates
from grabstream.gateway.requests import Request
from grabstream.gateway.tokens import BadToken, Tokens, UnusableToken, add_bounded, is_token

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

_bearer = re.compile(rb"bearer +([A-Za-z0-9._~+/-]+=*) *", re.IGNORECASE).fullmatch
_MISSING: Final = "Send credentials in the header Authorization: Bearer, followed by an API key or a token."
_WRONG: Final = "The credentials in the header Authorization are not valid."


class CallerRates(NamedTuple):
    """How often a service and an end user may ask, and how often an address without valid credentials."""

    key: Rates = ()
    user: Rates = ()
    failures: Rates = ()


class Failures:
    """Counts by address what fails a check, and tells an address when it has had too many. `kind` begins the
    names of the counters, `words` say in a refusal what failed. `proxies` are the networks of proxies that
    are believed when they name the address of their client (X-Forwarded-For).
    """

    def __init__(
        self, counters: Counters, rates: Rates, proxies: Sequence[Network], kind: str, words: str
    ) -> None:
        self._counters = counters
        self._rates = rates
        self._proxies = tuple(proxies)
        self._kind = kind
        self._words = words
        #: Addresses with too many failures, and until when (monotonic, s).
        self.blocked: dict[str, float] = {}

    @property
    def are_counted(self) -> bool:
        """Whether there is a rate."""
        return bool(self._rates)

    async def count(self, scope: Scope) -> None:
        """Counts a failure; raises Problem when its address has had too many."""
        address = self.address_of(scope)
        seconds = await self._counters.hit(self._rates, self._kind, address)
        if seconds:
            add_bounded(self.blocked, address, time.monotonic() + seconds, CALLERS_COUNTED_MAX)
            self._check(address)

    def check(self, scope: Scope) -> None:
        """Raises Problem while an address has had too many failures."""
        if self.blocked:
            self._check(self.address_of(scope))

    def _check(self, address: str) -> None:
        until = self.blocked.get(address)
        if until is None:
            return
        seconds = until - time.monotonic()
        if seconds <= 0:
            del self.blocked[address]
            return
        raise _too_many(f"This address may send {_in_words(self._rates)} {self._words}.", math.ceil(seconds))

    def address_of(self, scope: Scope) -> str:
        """The address of the client: that of the connection or, if it is a proxy that is believed, the last
        one in X-Forwarded-For that is no such proxy. Of IPv6, the network of the client.
        """
        address = scope["client"][0] if scope.get("client") else ""
        if self._proxies and self._is_proxy(address):
            forwarded = b",".join(value for name, value in scope["headers"] if name == b"x-forwarded-for")
            for text in reversed(forwarded.decode("latin-1").split(",")):
                one = _without_port(text.strip())
                if _read(one) is None:
                    break
                address = one
                if not self._is_proxy(address):
                    break
        return _network_of(address)

    def _is_proxy(self, address: str) -> bool:
        found = _read(address)
        return found is not None and any(found in network for network in self._proxies)


class Admission:
    """Checks the credentials of requests. `proxies` are the networks of proxies that are believed when they
    name the address of their client (X-Forwarded-For).
    """

    def __init__(
        self,
        keys: KeyRing,
        tokens: Tokens | None,
        counters: Counters,
        rates: CallerRates,
        proxies: Sequence[Network] = (),
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self._counters = counters
        self._rates = rates
        self._failures = Failures(counters, rates.failures, proxies, "address", "without valid credentials")
        #: Credentials that were valid a moment ago, by the hash of a dict (seeded, not cryptographic): these
        #: are let through to the check, which is that of all others.
        self._recent: dict[int, None] = {}

    async def admit(self, operation: Operation, request: Request) -> None:
        """Raises Problem unless the caller of a request is known, may do this, and does not ask too often."""
        if operation.scope == "none":
            return
        credentials = _credentials_of(request)
        mark = hash(credentials)
        if mark not in self._recent:
            self._failures.check(request.scope)
        try:
            caller = await self._caller_of(credentials)
        except BadToken as error:
            self._recent.pop(mark, None)
            if not isinstance(error, UnusableToken):
                await self._failures.count(request.scope)
            raise unauthenticated(str(error), None if credentials is None else "invalid_token") from None
        if mark not in self._recent:
            add_bounded(self._recent, mark, None, TOKENS_REMEMBERED_MAX)
        rates = self._rates.key if caller.user is None else self._rates.user
        if rates and (seconds := await self._counters.hit(rates, _kind_of(caller), caller.name)):
            whose = "This API key" if caller.user is None else "This user"
            raise _too_many(f"{whose} may send {_in_words(rates)}.", seconds)
        authorize(caller, operation, request)
        if operation.kind == "stream":
            request.is_admitted = partial(self._is_admitted, credentials, operation, request)

    async def _is_admitted(self, credentials: bytes | None, operation: Operation, request: Request) -> bool:
        """Whether a request that was admitted would be admitted now, too, by its credentials."""
        try:
            authorize(await self._caller_of(credentials), operation, request)
        except (BadToken, Problem):
            return False
        return True

    def admits_now(self, operation: Operation, request: Request) -> bool:
        """Whether a request may come in without waiting for anything: nobody is asked, or it is of a service
        whose key was valid a moment ago and is valid now, that may do this, and whose requests are not
        counted. `admit` decides about every other one, and says why.
        """
        if operation.scope == "none":
            return True
        try:
            credentials = _credentials_of(request)
            if self._rates.key or credentials is None or hash(credentials) not in self._recent:
                return False
            caller = self._keys.caller_of(credentials) if is_secret(credentials) else None
            if caller is None:
                return False
            authorize(caller, operation, request)
        except Problem:
            return False
        return True

    async def _caller_of(self, credentials: bytes | None) -> Caller:
        """The caller; raises BadToken, whose text tells nothing about keys."""
        if credentials is None:
            raise BadToken(_MISSING)
        if is_secret(credentials):
            caller = self._keys.caller_of(credentials)
            if caller is not None:
                return caller
        elif self._tokens is not None and is_token(credentials):
            return await self._tokens.caller_of(credentials)
        raise BadToken(_WRONG)


def _credentials_of(request: Request) -> bytes | None:
    """What follows `Bearer`; None without it. Raises Problem when the header is there more than once."""
    raw = request.header(b"authorization")
    found = None if raw is None else _bearer(raw)
    return None if found is None else found[1]


def _kind_of(caller: Caller) -> str:
    return "key" if caller.user is None else "user"


def _in_words(rates: Rates) -> str:
    return " and ".join(
        f"{rate.amount} requests per {rate.multiples} {rate.GRANULARITY.name}" for rate in rates
    )


def _too_many(detail: str, seconds: int) -> Problem:
    return Problem(
        "too_many_requests", f"{detail} Try again after {seconds} s.", None, [retry_after(seconds)]
    )


def _without_port(text: str) -> str:
    """An address in X-Forwarded-For without the port that some proxies add."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def _read(text: str) -> Address | None:
    """An address, of IPv4 also where it is written as one of IPv6; None for any other text."""
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def _network_of(address: str) -> str:
    """The address, or the /64 of an IPv6 address: a client has a whole network of them."""
    found = _read(address)
    if found is None:
        return address
    return str(found) if found.version == 4 else str(ip_network((found.packed, 64), strict=False))
