"""The sweeper: ends holds whose time is over, closes and retires offers, deletes what retired offers left,
and carries counted refusals to SQL. One a shard, beside its relay.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
from redis.exceptions import ResponseError

from grabstream.lua.gate.batches import Table, decode_reply
from grabstream.lua.gate.calls import is_raised_by_script, now_ms, run_script
from grabstream.lua.keys import ShardKeys
from grabstream.lua.server import time_ms_of
from grabstream.lua.trouble import is_trouble
from grabstream.models.offers import PAYMENTS_KEPT_MS
from grabstream.streams.clients import Trouble, in_words

log = logging.getLogger(__name__)

SWEEP_EVERY_SECONDS: Final = 0.25
OFFERS_AT_ONCE_MAX: Final = 64
HOLDS_AT_ONCE_MAX: Final = 256
#: Records that a step of cleaning looks at, about a millisecond, and the pause after it in which everybody
#: else is served.
CLEAN_FIELDS_A_STEP: Final = 500
CLEAN_PAUSE_SECONDS: Final = 0.01
DEMAND_FIELDS_MAX: Final = 2_000
#: How long a hold or offer that makes its script fail is left out, so that the others of its shard go on.
LEFT_OUT_SECONDS: Final = 60.0

#: Writes (second, outcome code, offer, refusals) of a shard to SQL; the numbers are absolute, so writing them
#: twice is harmless.
RecordDemand = Callable[[int, Sequence[tuple[int, int, str, int]]], Awaitable[None]]

_pack = msgspec.msgpack.Encoder().encode


class Sweeper:
    """Does what time brings in one shard. `record_demand` is None where no SQL is at hand: counts then stay
    in Redis.
    """

    def __init__(
        self,
        redis: Any,
        keys: ShardKeys,
        shards: int,
        clock_skew_ms_max: int,
        record_demand: RecordDemand | None = None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._shards = shards
        self._clock_skew_ms_max = clock_skew_ms_max
        self._record_demand = record_demand
        self._demand_cursor = 0
        self._last_first = False
        #: (sorted set, member) that made a script fail, until when it is left out.
        self._left_out: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Sweeps until cancelled; errors of a server are logged and tried again. Holds wait neither for SQL
        nor for cleaning.
        """
        async with asyncio.TaskGroup() as tasks:
            # Side by side, a call of each in turn: neither waits until the other has nothing left to do.
            tasks.create_task(self._again_and_again(self.expire_all))
            tasks.create_task(self._again_and_again(self.see_to_offers))
            tasks.create_task(self._again_and_again(self.clean))
            tasks.create_task(self._again_and_again(self.flush_demand))

    async def _again_and_again(self, task: Callable[[], Awaitable[object]]) -> None:
        trouble = Trouble(log, f"sweeping shard {self._keys.shard}")
        while True:
            try:
                await task()
                trouble.over()
            except BaseException as error:
                if not is_trouble(error):
                    raise
                trouble.say(in_words(error))
            await asyncio.sleep(SWEEP_EVERY_SECONDS)

    async def sweep(self, at_ms: int | None = None) -> int:
        """Everything that is due by Redis' own clock (or at the time given, for simulation); returns how many
        holds and offers.
        """
        return await self.expire_all(at_ms) + await self.see_to_offers(at_ms)

    async def expire_all(self, at_ms: int | None = None) -> int:
        """Ends all holds that are over; returns how many it found."""
        done = 0
        while found := await self.expire_holds(at_ms):
            done += found
        return done

    async def see_to_offers(self, at_ms: int | None = None) -> int:
        """Sees to all offers that are due; returns how many it found, one that is served on in steps as often
        as that.
        """
        done = 0
        while found := await self.close_due(at_ms):
            done += found
        return done

    async def expire_holds(self, at_ms: int | None = None) -> int:
        """Ends holds that are over, a bounded number; returns how many it found."""
        return await self._for_each(
            "expire", self._keys.holds, await self._due(self._keys.holds, at_ms, HOLDS_AT_ONCE_MAX), at_ms
        )

    async def close_due(self, at_ms: int | None = None) -> int:
        """Closes, serves on or retires offers that are due, a bounded number; returns how many it saw to.

        Of more than a call can see to, those that fell due last come first in every other call: an offer
        whose units wait for the next in its queue, or that closes now, does not stand behind thousands that
        retire.
        """
        due = await self._due(self._keys.due, at_ms, OFFERS_AT_ONCE_MAX, last_first=self._last_first)
        self._last_first = not self._last_first and len(due) == OFFERS_AT_ONCE_MAX
        return await self._for_each("sweep", self._keys.due, due, at_ms)

    async def clean(self, at_ms: int | None = None, steps_max: int | None = None) -> int:
        """Deletes what counts as forgotten, in bounded steps, until nothing is left of it; returns the number
        of steps.
        """
        steps = 0
        while steps_max is None or steps < steps_max:
            if not (await self.forget_payments(at_ms) or await self._clean_step(at_ms)):
                break
            steps += 1
            await asyncio.sleep(CLEAN_PAUSE_SECONDS if at_ms is None else 0)
        return steps

    async def forget_payments(self, at_ms: int | None = None) -> int:
        """Forgets offers that retired so long ago that their payments are known no more, a bounded number;
        returns how many.
        """
        offers = await self._due(self._keys.past, at_ms, OFFERS_AT_ONCE_MAX, PAYMENTS_KEPT_MS)
        return await self._for_each("forget", self._keys.past, offers, at_ms)

    async def _clean_step(self, at_ms: int | None) -> bool:
        """One step in one campaign; False when there is nothing to clean, or the shard is fenced."""
        mark = await self._redis.hrandfield(self._keys.cleaning)
        if mark is None:
            return False
        campaign, what = mark.decode().split("/")
        answers, payments, _, state, _ = self._keys.of_campaign(campaign)
        keys = [answers if what == "answers" else payments, state]
        return bool((await self._reply("clean", keys, at_ms, campaign, what, CLEAN_FIELDS_A_STEP)).code == 0)

    async def _due(
        self, key: str, at_ms: int | None, most: int, after_ms: int = 0, last_first: bool = False
    ) -> list[str]:
        """Members of a sorted set whose time, or so long after it, has come; a bounded number."""
        now = (at_ms if at_ms is not None else await self._redis_time_ms()) - after_ms
        self._left_out = {one: until for one, until in self._left_out.items() if until > time.monotonic()}
        bounds = {"start": 0, "num": most + len(self._left_out)}
        if last_first:
            found = await self._redis.zrevrangebyscore(key, now, "-inf", **bounds)
        else:
            found = await self._redis.zrangebyscore(key, "-inf", now, **bounds)
        members = [member.decode() for member in found]
        return [member for member in members if (key, member) not in self._left_out][:most]

    async def _for_each(self, script: str, key: str, members: list[str], at_ms: int | None) -> int:
        """Runs a script for members of a sorted set (offers, or `<offer>/<grab>`) in one call; returns how
        many it saw to.

        Where it raises, halves of them are tried, until the one that it cannot handle is alone; that one is
        left out for a while.
        """
        if not members:
            return 0
        pairs = [member.split("/") for member in members]
        table = Table([offer for offer, *_ in pairs])
        columns: list[Any] = [table.offers, table.campaign_of, table.campaigns]
        if script == "expire":
            columns += [[grab for _, grab in pairs], table.offer_of]
        try:
            return await self._run(script, table.keys(self._keys), at_ms, _pack(columns))
        except ResponseError as error:
            if not is_raised_by_script(error):
                raise
            reason = str(error)
        middle = len(members) // 2
        if middle:
            first = await self._for_each(script, key, members[:middle], at_ms)
            return first + await self._for_each(script, key, members[middle:], at_ms)
        self._left_out[key, members[0]] = time.monotonic() + LEFT_OUT_SECONDS
        log.error(
            "shard %d: the script %s fails for %s; the others are seen to, it is tried again in %d s: %s",
            self._keys.shard, script, members[0], LEFT_OUT_SECONDS, reason,
        )  # fmt: skip
        return 1

    async def _run(self, script: str, keys: list[str], at_ms: int | None, packed: bytes) -> int:
        reply = await self._reply(script, keys, at_ms, packed)
        # Fenced: tried again when the shard decides again.
        return int(reply.rows_or_message[0]) if reply.code == 0 else 0

    async def _reply(self, script: str, keys: list[str], at_ms: int | None, *rest: object) -> Any:
        simulated: int | str = "" if at_ms is None else at_ms
        arguments = (
            f"{self._keys.shard}/{self._shards}",
            now_ms(),
            simulated,
            self._clock_skew_ms_max,
            "",
            *rest,
        )
        return decode_reply(await run_script(self._redis, script, [*self._keys.deciding(), *keys], arguments))

    async def flush_demand(self) -> None:
        """Writes the counts of seconds that are over to SQL, then forgets them in Redis, in this order."""
        if self._record_demand is None:
            return
        # A second is over when no clock that is still believed can fall back into it.
        second = (await self._redis_time_ms() - self._clock_skew_ms_max) // 1000
        # From where the last call ended, so that every field is met, however many come meanwhile.
        self._demand_cursor, fields = await self._redis.hscan(
            self._keys.demand, self._demand_cursor, count=DEMAND_FIELDS_MAX
        )
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
        return await time_ms_of(self._redis, self._keys.state)
