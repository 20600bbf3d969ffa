"""Rates of addresses: of what fails a check (wrong credentials, and receipts that are not signed), and of
requests with tokens of end users.
"""

import logging
import math
import time
from collections.abc import Sequence

from starlette.types import Scope

from grabstream.gateway.addresses import Network, address_of, is_within
from grabstream.gateway.bounds import CALLERS_COUNTED_MAX
from grabstream.gateway.problems import Problem, retry_after
from grabstream.gateway.rates import Rates, RequestCounters
from grabstream.gateway.requests import fields_of
from grabstream.gateway.tokens import add_bounded

log = logging.getLogger(__name__)


class AddressRates:
    """Counts requests of one sort by address, and refuses those of an address that has sent too many. `kind`
    begins the names of the counters, `words` say in a refusal which requests are meant. `proxies` are the
    networks of proxies that are believed when they name the address of their client (X-Forwarded-For).
    """

    def __init__(
        self, counters: RequestCounters, rates: Rates, proxies: Sequence[Network], kind: str, words: str
    ) -> None:
        self._counters = counters
        self._rates = rates
        self._proxies = tuple(proxies)
        self._kind = kind
        self._words = words
        self._has_warned = False
        #: Addresses that are refused, and until when (monotonic, s).
        self.blocked: dict[str, float] = {}

    @property
    def are_counted(self) -> bool:
        """Whether there is a rate."""
        return bool(self._rates)

    async def count(self, scope: Scope) -> None:
        """Counts a request; raises Problem when its address has sent too many."""
        if not self._rates:
            return
        address = address_of(scope, self._proxies)
        seconds = await self._counters.hit(self._rates, self._kind, address)
        if seconds:
            self._warn_of_proxy(scope)
            add_bounded(self.blocked, address, time.monotonic() + seconds, CALLERS_COUNTED_MAX)
            self._check(address)

    def _warn_of_proxy(self, scope: Scope) -> None:
        """Logs, once, that an address which is refused may be a proxy that the settings do not name."""
        peer = scope["client"][0] if scope.get("client") else ""
        if self._has_warned or is_within(peer, self._proxies):
            return
        if b"x-forwarded-for" in fields_of(scope):
            self._has_warned = True
            log.warning(
                "%s is refused: it sent more than %s %s. Its requests have X-Forwarded-For: if it is a proxy "
                "of yours, name it in GRAB_GATEWAY_PROXIES; otherwise its clients are refused together",
                peer, rates_text(self._rates), self._words,
            )  # fmt: skip

    def check(self, scope: Scope) -> None:
        """Raises Problem while an address is refused."""
        if self.blocked:
            self._check(address_of(scope, self._proxies))

    def _check(self, address: str) -> None:
        until = self.blocked.get(address)
        if until is None:
            return
        seconds = until - time.monotonic()
        if seconds <= 0:
            del self.blocked[address]
            return
        raise too_many(f"This address may send {rates_text(self._rates)} {self._words}.", math.ceil(seconds))


def rates_text(rates: Rates) -> str:
    """Rates as a refusal states them."""
    return " and ".join(
        f"{rate.amount} requests per {rate.multiples} {rate.GRANULARITY.name}" for rate in rates
    )


def too_many(detail: str, seconds: int) -> Problem:
    """The refusal of a caller above the rate."""
    return Problem(
        "too_many_requests", f"{detail} Try again after {seconds} s.", None, [retry_after(seconds)]
    )
