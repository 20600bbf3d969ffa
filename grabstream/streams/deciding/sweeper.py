"""The sweeper: ends expired holds, closes and retires offers, deletes the records of retired offers, and
copies the counts of refusals to SQL. Each shard has one, next to its relay. It also has the payment side
asked about holds that end soon (`payments.py`).
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec
from redis.exceptions import ResponseError

from grabstream.gate.calls import now_ms
from grabstream.gate.encoding import CallOffers
from grabstream.lua.keys import ShardKeys, ids_in
from grabstream.lua.packed_values import demand_row
from grabstream.lua.running import is_raised_by_script, run_script
from grabstream.lua.server import time_ms_of
from grabstream.models.bounds import shortened
from grabstream.models.identifiers import is_id
from grabstream.models.offers import PAYMENTS_KEPT_MS
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.streams.clients import Trouble
from grabstream.streams.deciding.payments import HoldQueries

log = logging.getLogger(__name__)

SWEEP_EVERY_SECONDS: Final = 0.25
#: How often an idle shard is polled: while its relay waits for new events, which it reports at once; and
#: otherwise.
WATCHED_POLL_SECONDS_MAX: Final = 5.0
POLL_SECONDS_MAX: Final = 1.0
OFFERS_AT_ONCE_MAX: Final = 64
HOLDS_AT_ONCE_MAX: Final = 256
#: Records that a step of cleaning reads, in about 1 ms, and the pause after it for other calls.
CLEAN_FIELDS_A_STEP: Final = 500
CLEAN_PAUSE_SECONDS: Final = 0.01
DEMAND_FIELDS_MAX: Final = 2_000
#: How long a hold or offer that causes an error of its script is skipped, so that the others of its shard are
#: still handled.
LEFT_OUT_SECONDS: Final = 60.0

#: Writes (second, outcome code, offer, refusals) of a shard to SQL. The numbers are absolute, so it may write
#: them twice.
RecordDemand = Callable[[int, Sequence[tuple[int, int, str, int]]], Awaitable[None]]


class SweepSchedule(NamedTuple):
    """What a sweeper has to do, and when (milliseconds since 1970 UTC; None for never)."""

    now_ms: int
    holds_ms: int | None
    offers_ms: int | None
    payments_ms: int | None
    has_records: bool
    has_demand: bool
    queries_ms: int | None = None

    def seconds(self, seconds_max: float) -> float:
        """The seconds until the next hold or offer is due, at most `seconds_max`."""
        all_times = (self.holds_ms, self.offers_ms, self.payments_ms, self.queries_ms)
        times = [at for at in all_times if at is not None]
        return max(0.0, min([(at - self.now_ms) / 1000 for at in times] + [seconds_max]))


_pack = msgspec.msgpack.Encoder().encode


class Sweeper:
    """Handles what is due in one shard. Without `record_demand`, counts of refusals stay in Redis.

    The reader of new events of the shard sets `decided`: they may be due earlier than known work. While
    `is_watched` returns True, a reader waits for new events; when none does any more, `decided` is set too.
    `queries` asks the payment side about holds that end soon; without it, it is not asked. `swept` counts
    what is handled, by script.
    """

    def __init__(
        self,
        redis: Any,
        keys: ShardKeys,
        shards: int,
        clock_skew_ms_max: int,
        record_demand: RecordDemand | None = None,
        decided: asyncio.Event | None = None,
        is_watched: Callable[[], bool] = lambda: False,
        queries: HoldQueries | None = None,
        swept: dict[str, int] | None = None,
    ) -> None:
        self._swept = defaultdict(int) if swept is None else swept
        self._redis = redis
        self._queries = queries
        self._keys = keys
        self._shards = shards
        self._clock_skew_ms_max = clock_skew_ms_max
        self._record_demand = record_demand
        self._decided = decided or asyncio.Event()
        self._is_watched = is_watched
        self._demand_cursor = 0
        self._last_first = False
        #: (sorted set, member) that caused an error of a script → time until which it is left out.
        self._left_out: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Sweeps until cancelled; errors of a server are logged, and the work is retried. Holds wait neither
        for SQL nor for cleaning.
        """
        async with asyncio.TaskGroup() as tasks:
            # Concurrently: no task waits until another has finished its work.
            holds, offers, records, demand, queries = (asyncio.Event() for _ in range(5))
            tasks.create_task(self._repeat(self.expire_all, holds))
            tasks.create_task(self._repeat(self.handle_offers, offers))
            tasks.create_task(self._repeat(self.clean, records))
            tasks.create_task(self._repeat(self.flush_demand, demand))
            if self._queries is not None:
                tasks.create_task(self._repeat(self._queries.ask_all, queries))
            tasks.create_task(self._poll(holds, offers, records, demand, queries))

    async def _repeat(self, work: Callable[[], Awaitable[object]], wanted: asyncio.Event) -> None:
        trouble = Trouble(log, f"sweeping shard {self._keys.shard}")
        while True:
            await wanted.wait()
            wanted.clear()
            try:
                await work()
                trouble.over()
            except BaseException as error:
                trouble.met(error)
            await asyncio.sleep(SWEEP_EVERY_SECONDS)

    async def _poll(
        self,
        holds: asyncio.Event,
        offers: asyncio.Event,
        records: asyncio.Event,
        demand: asyncio.Event,
        queries: asyncio.Event,
    ) -> None:
        """Reads what is due in one call, and wakes the tasks that handle it. An idle shard costs a call every
        WATCHED_POLL_SECONDS_MAX, and one a second while its relay waits for something else than new events.
        """
        trouble = Trouble(log, f"sweeping shard {self._keys.shard}: reading what is due")
        while True:
            seconds = 0.0
            # Before the call: events that are decided meanwhile are read by the next one.
            self._decided.clear()
            try:
                due = await self.read_due()
                trouble.over()
                seconds_max = WATCHED_POLL_SECONDS_MAX if self._is_watched() else POLL_SECONDS_MAX
                seconds = due.seconds(seconds_to_tick(seconds_max))
                for at_ms, event in (
                    (due.holds_ms, holds), (due.offers_ms, offers), (due.payments_ms, records),
                    (due.queries_ms, queries),
                ):  # fmt: skip
                    if at_ms is not None and at_ms <= due.now_ms:
                        event.set()
                if due.has_records:
                    records.set()
                if due.has_demand:
                    demand.set()
            except BaseException as error:
                trouble.met(error)
            await asyncio.sleep(SWEEP_EVERY_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds - SWEEP_EVERY_SECONDS):
                    await self._decided.wait()

    async def read_due(self) -> SweepSchedule:
        """What there is to do, and when."""
        now_ms, *first, records, demand = await run_script(self._redis, "due", self._keys.deciding(), [])
        holds_ms, offers_ms, retired_ms = map(_ms_of, first)
        payments_ms = None if retired_ms is None else retired_ms + PAYMENTS_KEPT_MS
        queries_ms = None
        if self._queries is not None and holds_ms is not None:
            queries_ms = await self._queries.next_ms(int(now_ms))
        return SweepSchedule(
            int(now_ms), holds_ms, offers_ms, payments_ms, bool(records), bool(demand), queries_ms
        )

    async def sweep(self, at_ms: int | None = None) -> int:
        """Handles everything that is due by Redis' clock (or at the given time, for simulation); returns the
        number of holds and offers.
        """
        return await self.expire_all(at_ms) + await self.handle_offers(at_ms)

    async def expire_all(self, at_ms: int | None = None) -> int:
        """Ends all expired holds; returns the number of holds handled."""
        total = 0
        while handled := await self.expire_holds(at_ms):
            total += handled
        return total

    async def handle_offers(self, at_ms: int | None = None) -> int:
        """Handles all offers that are due; returns their number. An offer whose queue is served in several
        steps counts once per step.
        """
        total = 0
        while handled := await self.close_due(at_ms):
            total += handled
        return total

    async def expire_holds(self, at_ms: int | None = None) -> int:
        """Ends expired holds, a bounded number; returns the number of holds handled."""
        return await self._for_each(
            "expire", self._keys.holds, await self._due(self._keys.holds, at_ms, HOLDS_AT_ONCE_MAX), at_ms
        )

    async def close_due(self, at_ms: int | None = None) -> int:
        """Closes offers that are due, serves their queues or retires them, a bounded number; returns the
        number handled.

        If more offers are due than a call can handle, every other call begins with those that became due
        last: an offer whose units wait for its queue, or that must close now, does not wait until thousands
        have retired.
        """
        due = await self._due(self._keys.due, at_ms, OFFERS_AT_ONCE_MAX, last_first=self._last_first)
        self._last_first = not self._last_first and len(due) == OFFERS_AT_ONCE_MAX
        return await self._for_each("sweep", self._keys.due, due, at_ms)

    async def clean(self, at_ms: int | None = None, steps_max: int | None = None) -> int:
        """Deletes records that count as forgotten, in bounded steps, until none is left; returns the number
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
        """Deletes the records of offers that retired too long ago for their payments to count, a bounded
        number; returns the number of offers.
        """
        offers = await self._due(self._keys.past, at_ms, OFFERS_AT_ONCE_MAX, PAYMENTS_KEPT_MS)
        return await self._for_each("forget", self._keys.past, offers, at_ms)

    async def _clean_step(self, at_ms: int | None) -> bool:
        """Cleans one step in one campaign; returns False when there is nothing to clean, or the shard is
        fenced.
        """
        field = await self._redis.hrandfield(self._keys.cleaning)
        if field is None:
            return False
        campaign, _, what = field.decode(errors="replace").partition("/")
        # The offer `:a` has an empty campaign.
        if not (campaign == "" or is_id(campaign)) or what not in ("answers", "payments"):
            await self._delete_damaged(self._keys.cleaning, [field])
            return True
        answers, payments, _, state, _ = self._keys.campaign_keys(campaign)
        keys = [answers if what == "answers" else payments, state]
        return bool((await self._reply("clean", keys, at_ms, campaign, what, CLEAN_FIELDS_A_STEP))[0] == 0)

    async def _due(
        self, key: str, at_ms: int | None, most: int, after_ms: int = 0, last_first: bool = False
    ) -> list[str]:
        """Returns members of a sorted set whose time, plus `after_ms`, has passed; at most `most`."""
        now = (at_ms if at_ms is not None else await self._redis_time_ms()) - after_ms
        self._left_out = {entry: until for entry, until in self._left_out.items() if until > time.monotonic()}
        bounds = {"start": 0, "num": most + len(self._left_out)}
        if last_first:
            raw = await self._redis.zrevrangebyscore(key, now, "-inf", **bounds)
        else:
            raw = await self._redis.zrangebyscore(key, "-inf", now, **bounds)
        # Without loss: two members must not look the same.
        members = [member.decode(errors="surrogateescape") for member in raw]
        members = [member for member in members if (key, member) not in self._left_out][:most]
        ids = 2 if key == self._keys.holds else 1
        damaged = {member for member in members if len(ids_in(member.encode(errors="replace"))) != ids}
        if damaged:
            self._left_out |= dict.fromkeys(
                ((key, member) for member in damaged), time.monotonic() + LEFT_OUT_SECONDS
            )
            log.error(
                "shard %d: the sorted set %s has members that no program writes, the first %s: they are left "
                "out; remove them with `ZREM`",
                self._keys.shard, key, shortened(ascii(min(damaged))),
            )  # fmt: skip
        return [member for member in members if member not in damaged]

    async def _for_each(self, script: str, key: str, members: list[str], at_ms: int | None) -> int:
        """Runs a script for members of a sorted set (offers, or `<offer>/<grab>`) in one call; returns the
        number handled.

        If the script raises an error, halves of the members are tried, until the member that causes it is
        alone; that member is left out for LEFT_OUT_SECONDS.
        """
        if not members:
            return 0
        pairs = [member.split("/") for member in members]
        call_offers = CallOffers([offer for offer, *_ in pairs])
        columns: list[Any] = [call_offers.offers, call_offers.campaign_of, call_offers.campaigns]
        if script == "expire":
            columns += [[grab for _, grab in pairs], call_offers.offer_of]
        try:
            return await self._run(script, call_offers.keys(self._keys), at_ms, _pack(columns))
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
            "shard %d: the script %s fails for %s; the others are handled, it is tried again in %d s: %s",
            self._keys.shard, script, members[0], LEFT_OUT_SECONDS, reason,
        )  # fmt: skip
        return 1

    async def _run(self, script: str, keys: list[str], at_ms: int | None, packed: bytes) -> int:
        code, _, found = await self._reply(script, keys, at_ms, packed)
        # A fenced shard handles nothing; the next sweep tries again.
        handled = int(found[0]) if code == 0 else 0
        self._swept[script] += handled
        return handled

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
        return msgspec.msgpack.decode(
            await run_script(self._redis, script, [*self._keys.deciding(), *keys], arguments)
        )

    async def flush_demand(self) -> None:
        """Writes the counts of past seconds to SQL, then deletes them in Redis, in this order."""
        if self._record_demand is None:
            return
        # A second is past when no clock within the allowed skew can still count in it.
        second = (await self._redis_time_ms() - self._clock_skew_ms_max) // 1000
        # Continues where the last call ended, so that every field is read, however many are added.
        self._demand_cursor, fields = await self._redis.hscan(
            self._keys.demand, self._demand_cursor, count=DEMAND_FIELDS_MAX
        )
        rows, written, damaged = [], [], []
        for field, count in fields.items():
            row = demand_row(field, count)
            if row is None:
                damaged.append(field)
            elif row[0] < second:
                rows.append(row)
                written.append(field)
        if damaged:
            await self._delete_damaged(self._keys.demand, damaged)
        if rows:
            await self._record_demand(self._keys.shard, rows)
            await self._redis.hdel(self._keys.demand, *written)

    async def _delete_damaged(self, key: str, fields: Sequence[bytes]) -> None:
        """Deletes fields of a hash that no program writes, so that they do not stop the work on others."""
        log.error(
            "shard %d: the hash %s has fields that no program writes, the first %s: they are deleted",
            self._keys.shard, key, shortened(ascii(fields[0])),
        )  # fmt: skip
        await self._redis.hdel(key, *fields)

    async def _redis_time_ms(self) -> int:
        return await time_ms_of(self._redis, self._keys.state)


def _ms_of(score: bytes) -> int | None:
    """The time of a score; None if there is none, or it is never."""
    ms = float(score or "inf")
    return None if ms == math.inf else int(max(ms, 0.0))
