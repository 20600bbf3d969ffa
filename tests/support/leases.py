"""Which worker process has the relay leases of a system."""

import re
from collections import Counter
from typing import Any

from grabstream.connections.opening import key_space, open_redis
from grabstream.lua.keys import KeySpace
from grabstream.settings import Settings
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


async def leases_by_process(redis: Any, keys: KeySpace) -> Counter[str]:
    """The number of leases by process id; of free ones by ''."""
    leases = [await redis.get(keys.shard(shard).lease) for shard in range(keys.shards)]
    return Counter((re.findall(rb"-(\d+)-", lease or b"") or [b""])[0].decode() for lease in leases)


async def until_spread_over(settings: Settings, *workers: Any, seconds: float = 30.0) -> None:
    """Returns when these workers, and no others, have as many leases as each other, or one more."""
    redis, keys = open_redis(settings), key_space(settings)
    expected = {str(worker.process.pid) for worker in workers}

    async def is_even() -> bool:
        held = await leases_by_process(redis, keys)
        return held.keys() == expected and max(held.values()) - min(held.values()) <= 1

    try:
        await until(is_even, seconds, f"an even spread over {len(workers)} workers")
    finally:
        await redis.aclose()


async def until_relayed_by(settings: Settings, worker: Any) -> None:
    """Returns when a worker has the leases of all shards."""

    async def holds_all() -> bool:
        holders = await lease_holders(settings)
        return len(holders) == 1 and f"-{worker.process.pid}-" in str(holders)

    await until(holds_all, 60, "the leases")
