"""Opens the cache Redis (GRAB_CACHE_URL), which must not be a server that decides: a cache may evict keys at
any time, and its work must not delay decisions.

Servers are compared by what they say about themselves, because one server may have several addresses.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from grabstream.connections.logins import tls_options
from grabstream.connections.opening import open_redis
from grabstream.connections.redis_servers import information
from grabstream.gateway.bounds import CACHE_SERVER_CONNECTIONS_MAX, CACHE_SERVER_SECONDS_MAX
from grabstream.gateway.cache_server import CacheServer, IsTheCore
from grabstream.lua.script_client import cancellable
from grabstream.settings import BadSettings, Settings


@asynccontextmanager
async def open_cache(settings: Settings) -> AsyncIterator[CacheServer | None]:
    """The cache Redis; None when the settings have none. It may be down, also at the start. Raises
    BadSettings when it is a server that decides.
    """
    if settings.cache_url is None:
        yield None
        return
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        settings.cache_url,
        max_connections=CACHE_SERVER_CONNECTIONS_MAX,
        timeout=CACHE_SERVER_SECONDS_MAX,
        socket_timeout=CACHE_SERVER_SECONDS_MAX,
        socket_connect_timeout=CACHE_SERVER_SECONDS_MAX,
        retry=Retry(NoBackoff(), 0),
        **tls_options(settings.cache_url, settings.cache_ca, settings.cache_certificate, settings.cache_key),
    )
    client = cancellable(redis.asyncio.Redis.from_pool(pool))
    core = open_redis(settings)

    async def require_other() -> None:
        """Raises IsTheCore when the server has the run id of a server that decides, or replicates one."""
        [here] = (await information(client, "all")).values()
        for there in (await information(core, "all")).values():
            if here["run_id"] == there["run_id"] or here["master_replid"] == there["master_replid"]:
                raise IsTheCore(
                    "it is a server of GRAB_REDIS_URL, or its replica: use another one for the cache"
                )

    cache = CacheServer(client, require_other)
    try:
        await cache.check()
        yield cache
    except IsTheCore as error:
        raise BadSettings(f"GRAB_CACHE_URL: {error}") from None
    finally:
        await client.aclose()
        await core.aclose()
