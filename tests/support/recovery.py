"""What tests share of `tests/streams/relaying/test_recovery.py`."""

from grabstream.ops.connections.opening import (
    open_redis,
)
from grabstream.ops.settings import Settings


async def emptied(settings: Settings) -> None:
    """All keys of the system are deleted, as FLUSHALL does on a server of its own."""
    redis = open_redis(settings)
    names = [key async for key in redis.scan_iter(match=f"{settings.prefix}:*", count=1_000)]
    await redis.unlink(*names)
    await redis.aclose()
