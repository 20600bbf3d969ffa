"""The sweeper: closes offers whose time is over, and carries counted refusals to SQL. One a shard, beside its relay."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
from redis.exceptions import RedisError

from lua.batches import decode_reply
from lua.gate import now_ms, run_script
from lua.keys import ShardKeys

log = logging.getLogger(__name__)

SWEEP_EVERY_SECONDS: Final = 0.25
CLOSED_AT_ONCE_MAX: Final = 64
DEMAND_FIELDS_MAX: Final = 2_000

#: Writes (second, outcome code, offer, refusals) of a shard to SQL; the numbers are absolute, so writing them twice is harmless.
RecordDemand = Callable[[int, Sequence[tuple[int, int, str, int]]], Awaitable[None]]

_pack = msgspec.msgpack.Encoder().encode


class Sweeper:
    """Does what time brings in one shard. `record_demand` is None where no SQL is at hand: counts then stay in Redis."""

    def __init__(self, redis: Any, keys: ShardKeys, shards: int, clock_skew_ms_max: int, record_demand: RecordDemand | None = None) -> None:
        self._redis = redis
        self._keys = keys
        self._shards = shards
        self._clock_skew_ms_max = clock_skew_ms_max
        self._record_demand = record_demand

    async def run(self) -> None:
        """Sweeps until cancelled; errors of a server are logged and tried again."""
        while True:
            try:
                while await self.close_due() == CLOSED_AT_ONCE_MAX:
                    pass
                await self.flush_demand()
            except (RedisError, OSError) as error:
                log.warning("sweeping shard %d: %s: %s", self._keys.shard, type(error).__name__, error)
            await asyncio.sleep(SWEEP_EVERY_SECONDS)

    async def close_due(self, at_ms: int | None = None) -> int:
        """Closes offers that are due by Redis' own clock (or at the time given, for simulation); returns how many."""
        now = at_ms if at_ms is not None else await self._redis_time_ms()
        due = await self._redis.zrangebyscore(self._keys.due, "-inf", now, start=0, num=CLOSED_AT_ONCE_MAX)
        if not due:
            return 0
        offers = [name.decode() for name in due]
        keys = [*self._keys.deciding(), *(key for offer in offers for key in self._keys.of_offer(offer))]
        simulated: int | str = "" if at_ms is None else at_ms
        arguments = (f"{self._keys.shard}/{self._shards}", now_ms(), simulated, self._clock_skew_ms_max, "", _pack(offers))
        reply = decode_reply(await run_script(self._redis, "sweep", keys, arguments))
        if reply.code != 0:
            return 0  # fenced: tried again when the shard decides again
        return int(reply.rows_or_message[0])

    async def flush_demand(self) -> None:
        """Writes the counts of seconds that are over to SQL, then forgets them in Redis, in this order."""
        if self._record_demand is None:
            return
        # A second is over when no clock that is still believed can fall back into it.
        second = (await self._redis_time_ms() - self._clock_skew_ms_max) // 1000
        _, fields = await self._redis.hscan(self._keys.demand, count=DEMAND_FIELDS_MAX)
        rows, written = [], []
        for field, count in fields.items():
            counted_in, code, offer = field.decode().split(":", 2)
            if int(counted_in) < second:
                rows.append((int(counted_in), int(code), offer, int(count)))
                written.append(field)
        if rows:
            await self._record_demand(self._keys.shard, rows)
            await self._redis.hdel(self._keys.demand, *written)

    async def _redis_time_ms(self) -> int:
        seconds, microseconds = await self._redis.time()
        return int(seconds) * 1000 + int(microseconds) // 1000
