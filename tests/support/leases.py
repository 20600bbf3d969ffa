"""Which worker process has the relay leases of a system."""

from typing import Any

from grabstream.ops.connections.opening import key_space, open_redis
from grabstream.ops.settings import Settings
from tests.conftest import until


async def lease_holders(settings: Settings) -> set[str | None]:
    """The holders of all shards' leases; None for a shard without a lease."""
    redis = open_redis(settings)
    try:
        keys = key_space(settings)
        holders = [await redis.get(keys.shard(number).lease) for number in range(settings.shards)]
        return {holder and holder.decode() for holder in holders}
    finally:
        await redis.aclose()


async def until_relayed_by(settings: Settings, worker: Any) -> None:
    """Returns when a worker has the leases of all shards."""

    async def holds_all() -> bool:
        holders = await lease_holders(settings)
        return len(holders) == 1 and f"-{worker.process.pid}-" in str(holders)

    await until(holds_all, 30, "the leases")
