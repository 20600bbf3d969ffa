"""The sweeper: ends holds whose time is over, closes and retires offers, and carries counted refusals to SQL. One a shard, beside its
relay."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
from redis.exceptions import RedisError

from lua.batches import Table, decode_reply
from lua.gate import now_ms, run_script
from lua.keys import ShardKeys
from models.identifiers import campaign_of
from streams.clients import Trouble, in_words

log = logging.getLogger(__name__)

SWEEP_EVERY_SECONDS: Final = 0.25
OFFERS_AT_ONCE_MAX: Final = 64
HOLDS_AT_ONCE_MAX: Final = 256
FORGET_FIELDS_A_STEP: Final = 1_000
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
        """Sweeps until cancelled; errors of a server are logged and tried again. Holds do not wait for SQL to take the counts."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._again_and_again(self.sweep))
            tasks.create_task(self._again_and_again(self.flush_demand))

    async def _again_and_again(self, task: Callable[[], Awaitable[object]]) -> None:
        trouble = Trouble(log, f"sweeping shard {self._keys.shard}")
        while True:
            try:
                await task()
                trouble.over()
            except (RedisError, OSError) as error:
                trouble.say(in_words(error))
            await asyncio.sleep(SWEEP_EVERY_SECONDS)

    async def sweep(self, at_ms: int | None = None) -> int:
        """Everything that is due by Redis' own clock (or at the time given, for simulation); returns how many holds and offers."""
        done = 0
        while found := await self.expire_holds(at_ms):
            done += found
            if found < HOLDS_AT_ONCE_MAX:
                break
        while found := await self.close_due(at_ms):
            done += found
            if found < OFFERS_AT_ONCE_MAX and not await self._due(self._keys.due, at_ms, 1):
                break
        return done

    async def expire_holds(self, at_ms: int | None = None) -> int:
        """Ends holds that are over, a bounded number; returns how many it found."""
        members = [member.split("/") for member in await self._due(self._keys.holds, at_ms, HOLDS_AT_ONCE_MAX)]
        if not members:
            return 0
        table = Table([offer for offer, _ in members])
        columns = (table.offers, table.campaign_of, table.campaigns, [grab for _, grab in members], table.offer_of)
        return await self._run("expire", table.keys(self._keys), at_ms, _pack(columns))

    async def close_due(self, at_ms: int | None = None) -> int:
        """Closes, serves on or retires offers that are due, a bounded number; returns how many it saw to."""
        offers = await self._due(self._keys.due, at_ms, OFFERS_AT_ONCE_MAX)
        if not offers:
            return 0
        for offer in offers:
            await self._forget(offer, at_ms)
        table = Table(offers)
        return await self._run("sweep", table.keys(self._keys), at_ms, _pack((table.offers, table.campaign_of, table.campaigns)))

    async def _forget(self, offer: str, at_ms: int | None) -> None:
        """Before an offer is retired, in steps: what its campaign remembers of it. A campaign's last offer takes all along at once."""
        state, *_, queue = self._keys.of_offer(offer)
        campaign = campaign_of(offer)
        closed = await self._redis.hmget(state, ["state", "held"])
        if closed[0] != b"closed" or closed[1] not in (None, b"0") or await self._redis.zcard(queue):
            return
        if int(await self._redis.hget(self._keys.campaigns, campaign) or 0) < 2:
            return
        cursor = "0"
        while True:
            keys = [state, self._keys.answers(campaign)]
            reply = await self._reply("forget", keys, at_ms, offer, cursor, FORGET_FIELDS_A_STEP)
            if reply.code != 0:
                return
            cursor = str(reply.rows_or_message[0])
            if cursor == "0":
                return

    async def _due(self, key: str, at_ms: int | None, most: int) -> list[str]:
        now = at_ms if at_ms is not None else await self._redis_time_ms()
        return [member.decode() for member in await self._redis.zrangebyscore(key, "-inf", now, start=0, num=most)]

    async def _run(self, script: str, keys: list[str], at_ms: int | None, packed: bytes) -> int:
        reply = await self._reply(script, keys, at_ms, packed)
        # Fenced: tried again when the shard decides again.
        return int(reply.rows_or_message[0]) if reply.code == 0 else 0

    async def _reply(self, script: str, keys: list[str], at_ms: int | None, *rest: object) -> Any:
        simulated: int | str = "" if at_ms is None else at_ms
        arguments = (f"{self._keys.shard}/{self._shards}", now_ms(), simulated, self._clock_skew_ms_max, "", *rest)
        return decode_reply(await run_script(self._redis, script, [*self._keys.deciding(), *keys], arguments))

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
