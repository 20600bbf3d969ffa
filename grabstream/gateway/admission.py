"""Admission: identifies the sender of a request by its credentials, what they may do, and how often.

Requests whose credentials are missing or wrong are counted by the address of the client. An address with too
many of them gets an answer without any work on its credentials, except for credentials that were valid a
moment ago: a caller who shares an address with an attacker can continue.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from grabstream.gateway.address_rates import AddressRates, rates_text, too_many
from grabstream.gateway.addresses import Network
from grabstream.gateway.api_keys import KeyRing, is_secret
from grabstream.gateway.bounds import TOKENS_REMEMBERED_MAX
from grabstream.gateway.callers import Caller, authorize, unauthenticated
from grabstream.gateway.operations import Operation
from grabstream.gateway.problems import Problem
from grabstream.gateway.rates import Rates, RequestCounters
from grabstream.gateway.requests import Request
from grabstream.gateway.tokens import BadToken, TokenVerifier, UnusableToken, add_bounded, is_token

#: The key of the scope that has what `RequestCounters` returned for a request.
_COUNTED: Final = "grabstream.counted"
_bearer = re.compile(rb"bearer +([A-Za-z0-9._~+/-]+=*) *", re.IGNORECASE).fullmatch
_MISSING: Final = "Send credentials in the header Authorization: Bearer, followed by an API key or a token."
_WRONG: Final = "The credentials in the header Authorization are not valid."


class CallerRates(NamedTuple):
    """How often a service and an end user may ask, how often an address without valid credentials, and how
    often all end users of an address together.
    """

    key: Rates = ()
    user: Rates = ()
    failures: Rates = ()
    address: Rates = ()


class Admission:
    """Checks the credentials of requests. `proxies` are the networks of proxies that are believed when they
    name the address of their client (X-Forwarded-For).
    """

    def __init__(
        self,
        keys: KeyRing,
        tokens: TokenVerifier | None,
        counters: RequestCounters,
        rates: CallerRates,
        proxies: Sequence[Network] = (),
    ) -> None:
        self._keys = keys
        self._tokens = tokens
        self._counters = counters
        self._rates = rates
        self._failures = AddressRates(
            counters, rates.failures, proxies, "address", "without valid credentials"
        )
        self._users = AddressRates(counters, rates.address, proxies, "users", "with tokens of end users")
        #: Credentials that were valid a moment ago, by the hash of a dict (seeded, not cryptographic): these
        #: are let through to the check, which is that of all others.
        self._recent: dict[int, None] = {}

    async def admit(self, operation: Operation, request: Request) -> None:
        """Raises Problem unless the caller of a request is known, has the right, and is within the rate."""
        if operation.scope == "none":
            return
        credentials = _credentials_of(request)
        credentials_hash = hash(credentials)
        if credentials_hash not in self._recent:
            self._failures.check(request.scope)
        try:
            caller = await self._caller_of(credentials)
        except BadToken as error:
            self._recent.pop(credentials_hash, None)
            if not isinstance(error, UnusableToken):
                await self._failures.count(request.scope)
            raise unauthenticated(str(error), None if credentials is None else "invalid_token") from None
        if credentials_hash not in self._recent:
            add_bounded(self._recent, credentials_hash, None, TOKENS_REMEMBERED_MAX)
        rates = self._rates.key if caller.user is None else self._rates.user
        seconds = request.scope.pop(_COUNTED, None)
        if seconds is None:
            seconds = await self._counters.hit(rates, _kind_of(caller), caller.name)
        if seconds:
            whose = "This API key" if caller.user is None else "This user"
            raise too_many(f"{whose} may send {rates_text(rates)}.", seconds)
        if caller.user is not None:
            await self._users.count(request.scope)
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
        counted by a server. `admit` decides about every other one, and says why.
        """
        if operation.scope == "none":
            return True
        try:
            credentials = _credentials_of(request)
            if credentials is None or hash(credentials) not in self._recent:
                return False
            caller = self._keys.caller_of(credentials) if is_secret(credentials) else None
            if caller is None:
                return False
            authorize(caller, operation, request)
        except Problem:
            return False
        seconds = self._counters.hit_now(self._rates.key, _kind_of(caller), caller.name)
        if seconds:
            # It was counted, and must not be counted again.
            request.scope[_COUNTED] = seconds
        return seconds == 0

    async def _caller_of(self, credentials: bytes | None) -> Caller:
        """The caller; raises BadToken, whose text reveals nothing about keys."""
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
    """What follows `Bearer`; None without it. Raises Problem when the header occurs more than once."""
    raw = request.header(b"authorization")
    found = None if raw is None else _bearer(raw)
    return None if found is None else found[1]


def _kind_of(caller: Caller) -> str:
    return "key" if caller.user is None else "user"
