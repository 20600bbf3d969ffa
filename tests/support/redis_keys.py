"""Deletes the keys of a test's system from Redis."""

from grabstream.connections.opening import (
    open_redis,
)
from grabstream.settings import Settings


async def delete_keys(settings: Settings) -> None:
    """Deletes all keys of a system, as FLUSHALL does on a server that has only this system."""
    redis = open_redis(settings)
    names = [key async for key in redis.scan_iter(match=f"{settings.prefix}:*", count=1_000)]
    await redis.unlink(*names)
    await redis.aclose()
