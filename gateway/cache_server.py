"""The cache Redis (GRAB_CACHE_URL): what gateways share, and may lose at any time.

Whoever uses it asks `is_up` first, does without it if not, and reports errors to `failed`. Then nothing uses
it until it answers again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from redis.exceptions import RedisError

log = logging.getLogger(__name__)

CHECK_EVERY_SECONDS: Final = 1.0


class IsTheCore(Exception):
    """The server of GRAB_CACHE_URL is a server that decides, or a replica of one."""


class CacheServer:
    """A client of the cache Redis, and whether it can be used. `require_other` raises IsTheCore when the
    server is one that decides; RedisError or OSError when that cannot be found out.
    """

    def __init__(self, client: Any, require_other: Callable[[], Awaitable[None]]) -> None:
        self.client = client
        self.is_up = False
        self._require_other = require_other
        self._was_logged = False

    def failed(self, error: Exception) -> None:
        """Takes the server out of use, until it answers again; logs the first error of an outage."""
        self.is_up = False
        if not self._was_logged:
            self._was_logged = True
            log.warning(
                "the cache Redis (GRAB_CACHE_URL) cannot be used, and each gateway counts by itself: %s",
                error or type(error).__name__,
            )

    async def check(self) -> None:
        """Takes the server into use if it answers, and is not a server that decides; raises IsTheCore."""
        try:
            await self._require_other()
        except (RedisError, OSError) as error:
            self.failed(error)
            return
        self.is_up = True
        if self._was_logged:
            self._was_logged = False
            log.warning("the cache Redis (GRAB_CACHE_URL) can be used again")

    async def keep_checking(self) -> None:
        """Checks the server again and again while it is not in use, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_EVERY_SECONDS)
            if not self.is_up:
                try:
                    await self.check()
                except IsTheCore as error:
                    self.failed(error)
                except Exception:
                    # The next check must come whatever this one met.
                    log.exception("the cache Redis cannot be checked")
