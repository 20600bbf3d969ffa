"""What addresses may send that fails a check: wrong credentials, and receipts that are not signed."""

import math
import time
from collections.abc import Sequence

from starlette.types import Scope

from grabstream.gateway.addresses import Network, address_of
from grabstream.gateway.bounds import CALLERS_COUNTED_MAX
from grabstream.gateway.problems import Problem, retry_after
from grabstream.gateway.rates import Counters, Rates
from grabstream.gateway.tokens import add_bounded


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
        address = address_of(scope, self._proxies)
        seconds = await self._counters.hit(self._rates, self._kind, address)
        if seconds:
            add_bounded(self.blocked, address, time.monotonic() + seconds, CALLERS_COUNTED_MAX)
            self._check(address)

    def check(self, scope: Scope) -> None:
        """Raises Problem while an address has had too many failures."""
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
        raise too_many(f"This address may send {in_words(self._rates)} {self._words}.", math.ceil(seconds))


def in_words(rates: Rates) -> str:
    """Rates as a refusal states them."""
    return " and ".join(
        f"{rate.amount} requests per {rate.multiples} {rate.GRANULARITY.name}" for rate in rates
    )


def too_many(detail: str, seconds: int) -> Problem:
    """The refusal of who asks too often."""
    return Problem(
        "too_many_requests", f"{detail} Try again after {seconds} s.", None, [retry_after(seconds)]
    )
