"""The cache Redis (GRAB_CACHE_URL): what gateways share, and may lose at any time.

Callers ask `is_up` first, do without it if not, and report errors to `failed`. Then nothing uses it until it
answers again. A command that the server refuses (its memory is full) is reported to `refused`, and the server
stays in use: it may still be read.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from redis.exceptions import RedisError

log = logging.getLogger(__name__)

CHECK_EVERY_SECONDS: Final = 1.0
#: A server that fails again within this time rests longer each time, so that one that answers now and then
#: neither delays requests nor fills the log.
STEADY_SECONDS: Final = 60.0
REST_SECONDS_MAX: Final = 30.0


class IsTheCore(Exception):
    """The server of GRAB_CACHE_URL is a server that decides, or a replica of one."""


class CacheServer:
    """A client of the cache Redis, and whether it can be used. `require_other` raises IsTheCore when the
    server is one that decides; RedisError or OSError when that is unknown.
    """

    def __init__(self, client: Any, require_other: Callable[[], Awaitable[None]]) -> None:
        self.client = client
        self.is_up = False
        self._require_other = require_other
        self._was_logged = False
        #: When the server came into use, when it is checked again (monotonic, s), and after how long.
        self._up_since = 0.0
        self._check_at = 0.0
        self._rest_seconds = 0.0
        #: When a command was refused last.
        self._refused_at = -math.inf

    def failed(self, error: Exception) -> None:
        """Takes the server out of use, until it answers; logs the first error of an outage."""
        if self.is_up:
            self.is_up = False
            now = time.monotonic()
            is_again = self._rest_seconds > 0 and now - self._up_since < STEADY_SECONDS
            self._rest_seconds = min(2 * self._rest_seconds, REST_SECONDS_MAX) if is_again else 1.0
            self._check_at = now + self._rest_seconds
        if not self._was_logged:
            self._was_logged = True
            log.warning(
                "the cache Redis (GRAB_CACHE_URL) cannot be used; each gateway counts requests and keeps "
                "answers separately: %s",
                error or type(error).__name__,
            )

    def refused(self, error: Exception) -> None:
        """Notes that the server refused a command; logs it, unless it refused another one a moment ago."""
        now = time.monotonic()
        if now - self._refused_at > STEADY_SECONDS:
            log.warning(
                "the cache Redis (GRAB_CACHE_URL) refuses a command; what it does not store is not shared: "
                "%s",
                error,
            )
        self._refused_at = now

    async def check(self) -> None:
        """Takes the server into use if it answers, and is not a server that decides; raises IsTheCore."""
        try:
            await self._require_other()
        except (RedisError, OSError) as error:
            self.failed(error)
            return
        if not self.is_up:
            self.is_up = True
            self._up_since = time.monotonic()
        if self._was_logged:
            self._was_logged = False
            log.warning("the cache Redis (GRAB_CACHE_URL) can be used again")

    async def keep_checking(self) -> None:
        """Checks the server periodically while it is not in use, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_SECONDS)
            if not self.is_up and time.monotonic() >= self._check_at:
                try:
                    await self.check()
                except IsTheCore as error:
                    self.failed(error)
                except Exception:
                    # The next check must come whatever this one met.
                    log.exception("the cache Redis cannot be checked")
