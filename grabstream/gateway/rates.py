"""Rates of requests of callers: counted in the cache Redis, for all gateways, or in the memory of this
gateway.

Both count in the same way: the requests of this window, and of the window before in proportion (a sliding
window, with two numbers for each caller).
"""

import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from limits import RateLimitItem, parse_many  # rates in words, and their counters in Redis as a script
from limits.aio.storage import RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from redis.exceptions import RedisError, ResponseError

from grabstream.gateway.bounds import CALLERS_COUNTED_MAX
from grabstream.gateway.cache_server import CacheServer

Rates = Sequence[RateLimitItem]
RATES_LENGTH_MAX: Final = 100


def read_rates(text: str) -> Rates:
    """Rates from `100/second; 2000/minute`; raises ValueError."""
    try:
        rates = parse_many(text) if len(text) <= RATES_LENGTH_MAX else []
    except ValueError:
        rates = []
    if not rates or not all(rate.amount > 0 and rate.multiples > 0 for rate in rates):
        raise ValueError("must be rates such as 100/second, or 100/second; 2000/minute")
    return rates


class RequestCounters:
    """Counts requests of callers. `prefix` begins the keys in the cache Redis."""

    def __init__(self, cache: CacheServer | None = None, prefix: str = "") -> None:
        self._cache = cache
        self._memory = MemoryCounters()
        self._shared = None
        if cache is not None:
            storage = RedisStorage(
                "redis://", implementation="redispy", key_prefix=f"{prefix}:rates",
                connection_pool=cache.client.connection_pool,
            )  # fmt: skip
            self._shared = SlidingWindowCounterRateLimiter(storage)

    async def hit(self, rates: Rates, kind: str, name: str) -> int:
        """Counts a request; returns 0 if it is within all rates, otherwise the seconds until it may be
        retried.
        """
        if not rates:
            return 0
        if self._cache is not None and self._shared is not None and self._cache.is_up:
            try:
                return await _hit_shared(self._shared, rates, kind, name)
            except ResponseError as error:
                self._cache.refused(error)
            except (RedisError, OSError) as error:
                self._cache.failed(error)
        return self._hit_in_memory(rates, kind, name)

    def hit_now(self, rates: Rates, kind: str, name: str) -> int | None:
        """What `hit` does, without waiting; None, and nothing is counted, if a server has the counters."""
        if not rates:
            return 0
        return self._hit_in_memory(rates, kind, name) if self._cache is None else None

    def _hit_in_memory(self, rates: Rates, kind: str, name: str) -> int:
        now, caller = time.time(), f"{kind}/{name}"
        return max([self._memory.hit(rate, caller, now) for rate in rates])


async def _hit_shared(limiter: SlidingWindowCounterRateLimiter, rates: Rates, kind: str, name: str) -> int:
    wait = 0
    for rate in rates:
        if not await limiter.hit(rate, kind, name):
            stats = await limiter.get_window_stats(rate, kind, name)
            wait = max(wait, math.ceil(stats.reset_time - time.time()), 1)
    return wait


class MemoryCounters:
    """Counters in memory, of a bounded number of callers: the least recently counted one is dropped first.
    (Those of the library remember all callers, and look at each of them on every request.)
    """

    def __init__(self, callers_max: int = CALLERS_COUNTED_MAX) -> None:
        self._callers_max = callers_max
        #: By rate and caller: the number of the window, requests in the window before it, and in it.
        self._counted: OrderedDict[tuple[RateLimitItem, str], tuple[int, int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counted)

    def hit(self, rate: RateLimitItem, caller: str, now: float) -> int:
        """Counts a request at a time (s since 1970 UTC) if it is within the rate, and returns 0; otherwise
        the seconds until it may be retried.
        """
        seconds = rate.get_expiry()
        window, past = divmod(now, seconds)
        known, before, current = self._counted.pop((rate, caller), (int(window), 0, 0))
        if known != window:
            before, current = (current, 0) if known == window - 1 else (0, 0)
        rest = (seconds - past) / seconds
        is_within = math.floor(before * rest + current) < rate.amount
        self._counted[rate, caller] = (int(window), before, current + is_within)
        if len(self._counted) > self._callers_max:
            self._counted.popitem(last=False)
        if is_within:
            return 0
        if current < rate.amount:
            # Enough of the window before has passed when its share has shrunk to what is free.
            return math.floor(rest * seconds - (rate.amount - current) * seconds / before) + 1
        return math.floor(seconds - past) + 1
