"""What tests share of `tests/streams/test_kill.py`."""

from typing import Any

from grabstream.ops.connections.opening import key_space, open_redis
from grabstream.ops.settings import Settings
from tests.conftest import until


async def leases(settings: Settings) -> set[str | None]:
    """Who relays the shards."""
    redis = open_redis(settings)
    try:
        keys = key_space(settings)
        held = [await redis.get(keys.shard(number).lease) for number in range(settings.shards)]
        return {holder and holder.decode() for holder in held}
    finally:
        await redis.aclose()


async def relayed_by(settings: Settings, worker: Any) -> None:
    """Returns when a worker has the leases of all shards."""

    async def all_his() -> bool:
        holders = await leases(settings)
        return len(holders) == 1 and f"-{worker.process.pid}-" in str(holders)

    await until(all_his, 30, "the leases")
