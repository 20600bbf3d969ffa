"""Leases of shards: a worker runs relay and sweeper of the shards whose leases it holds.

Each lease is requested and renewed by a separate call, with a timeout well below its length, so a server that
hangs costs only the leases of its own shards. The calls of all shards begin at the same tick, and those of a
server follow each other on one connection. The same call reports to the other workers that this one is
present.

Leases are spread evenly (`shares.py`). A worker takes every free lease, so that no shard waits. A worker with
more than its share passes leases on, one after the other:

1. It makes another worker the holder of the lease, and continues to relay the shard.
2. The other worker learns at its next renewal that it has the lease, and takes the shard over as usual. That
   ends the tenure of the first relay, which does not take the shard over again. Callers wait only for this
   takeover.
3. If it does not, the first worker takes the lease back. A leaving worker then tries the next one, or returns
   the lease, so that no shard waits until the lease of a stopped worker expires.

A lease only decides which worker tries. Two relays of a shard at once do no harm, because the journal fences
them; they only waste work.
"""

import asyncio
import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.lua.running import run_script
from grabstream.runtime.ending import END_SECONDS_MAX, end
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.runtime.trouble import is_trouble
from grabstream.streams.clients import Trouble, error_text
from grabstream.streams.relaying.announcing import Announcing, RelayedShards
from grabstream.streams.relaying.relay import Duty
from grabstream.streams.relaying.shares import Overload, Worker, takers

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE: Final = 4
#: How long returning a lease may take. The next holder waits no longer than for a lease that expires.
RETURN_SECONDS_MAX: Final = 1.0
#: The name of a command that rebuilds a shard by hand, as the holder of its lease, begins so …
BY_HAND: Final = "rebuild-"
#: … and the name of a worker so, whatever the name of its host is.
WORKER_PREFIX: Final = "worker@"
#: A worker that was given a shard and has not taken it over after this many times the length of a lease
#: loses the lease again …
TAKEOVER_LEASES_MAX: Final = 2
#: … and is given none for this time.
UNFIT_SECONDS: Final = 60.0
#: How long a worker that is stopped waits until others have taken its shards over, and how often it checks
#: that they still want to. With the ends of relays, and RETURN_SECONDS_MAX, this is less than STOP_SECONDS of
#: streams/worker.py.
LEAVE_SECONDS_MAX: Final = 4.0
LEAVE_POLL_SECONDS: Final = 0.1
#: It tries another one when the taker has not renewed the lease within this many renewal intervals plus this
#: time.
ABSENT_RENEWALS: Final = 1.5
ABSENT_SECONDS: Final = 0.25
#: The lag of the event loop is measured this often (with the default settings, when leases are renewed), and
#: averaged over about LAG_SECONDS. A single pause counts as LAG_MS_MAX at most, so that it does not look like
#: overload.
LAG_EVERY_SECONDS: Final = 0.75
LAG_SECONDS: Final = 5.0
LAG_MS_MAX: Final = 1_000.0


class Lease(NamedTuple):
    """The lease of a shard when it was requested: its holder, and the other workers that may be given the
    shard.
    """

    holder: str
    present: Mapping[str, Worker]


async def request_lease(
    redis: Any, keys: ShardKeys, worker: str, lease_ms: int, seize: bool = False, about: Worker | None = None
) -> Lease:
    """Takes or renews the lease of a shard if it is free; with `seize`, from any holder; with 0 ms, returns
    it. With `about`, other workers may pass shards to this one.
    """
    reply = await run_script(
        redis,
        "lease",
        [keys.lease, keys.state, keys.present],
        [worker, lease_ms, "1" if seize else "", about.encode() if about else ""],
    )
    present = {
        name.decode(): Worker.decode(text_of(said))
        for name, said in zip(reply[1::2], reply[2::2], strict=True)
        if name.isascii()  # no worker has another name
    }
    return Lease(text_of(reply[0]), present)


def by_hand(holder: str) -> bool:
    """Whether a command that rebuilds a shard by hand holds its lease."""
    return holder.startswith(BY_HAND)


def text_of(holder: bytes | None) -> str:
    """The holder of a lease, which may be anything; '' for none."""
    return (holder or b"").decode(errors="replace")


async def pass_lease(
    redis: Any, keys: ShardKeys, holder: str, taker: str, lease_ms: int, back: bool = False
) -> bool:
    """Makes another worker the holder of a lease; returns False if `holder` is not the holder, or the other
    is not present. With `back`, the other had the lease before, and need not be present.
    """
    arguments = [holder, taker, lease_ms, "1" if back else ""]
    return bool(await run_script(redis, "pass_lease", [keys.lease, keys.present], arguments))


def _worker_name() -> str:
    """A name of this worker that no other has. Hosts may have any names, also names that are not text."""
    host = re.sub(r"[^A-Za-z0-9.-]", "_", os.uname().nodename)
    return f"{WORKER_PREFIX}{host}-{os.getpid()}-{secrets.token_hex(4)}"


class _LeasedShard:
    """A shard that this worker relays."""

    def __init__(self, now: float) -> None:
        self.since = now
        self.duty = Duty()
        self.task: asyncio.Task[None]
        #: The worker that the shard was passed to, and when.
        self.taker: str | None = None
        self.passed_at = 0.0
        #: Whether the taker is known to have renewed the lease since; only a worker that leaves asks.
        self.is_renewed = False

    def pass_to(self, taker: str, now: float) -> None:
        """The relay ends when the taker has taken the shard over."""
        self.taker, self.passed_at, self.is_renewed, self.duty.is_leaving = taker, now, False, True

    def keep(self) -> None:
        """The relay continues."""
        self.taker, self.duty.is_leaving = None, False


class Leases:
    """The leases of one worker. `tasks_of(shard, duty)` returns the coroutines to run while the shard's lease
    is held; they run until cancelled, or until a relay returns by its duty.
    """

    def __init__(
        self,
        redis: Any,
        keys: KeySpace,
        lease_ms: int,
        tasks_of: Callable[[int, Duty], list[Any]],
        requested: Callable[[Sequence[int]], None] = lambda held: None,
        changed: Callable[[RelayedShards], None] = lambda change: None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._lease_ms = lease_ms
        self._tasks_of = tasks_of
        #: Called once, with the shards held, when every lease has been requested.
        self._requested = requested
        self._all_requested = False
        #: Called when other shards are relayed than before, once for many.
        self._changed = changed
        self._announcing = Announcing(lease_ms / 1000)
        self._running: dict[int, _LeasedShard] = {}
        #: The last answer of each shard, with its time.
        self._seen: dict[int, tuple[float, Lease]] = {}
        self._unfit_until: dict[str, float] = {}
        self._is_leaving = False
        self._lag_ms = 0.0
        self._overload = Overload()
        self._troubles = [Trouble(log, f"lease of shard {shard}") for shard in range(keys.shards)]
        self.worker = _worker_name()

    @property
    def held(self) -> list[int]:
        """The shards that this worker relays."""
        return sorted(self._running)

    @property
    def relayed(self) -> dict[int, bool]:
        """For each of them, whether it has taken the shard over and relays it now."""
        return {shard: held.duty.is_relaying for shard, held in self._running.items()}

    @property
    def _renew_seconds(self) -> float:
        """The time between two renewals, and the longest time that one may take."""
        return self._lease_ms / 1000 / RENEWALS_PER_LEASE

    async def run(self, stop: asyncio.Event) -> None:
        """Takes free leases, renews those held and passes on leases above its share, until `stop`; then
        passes all on, or returns them. Raises the error of a task of a shard.
        """
        holding = [asyncio.create_task(self._hold(shard, stop)) for shard in range(self._keys.shards)]
        holding.append(asyncio.create_task(self._measure(stop)))
        try:
            await asyncio.wait(holding, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await end(holding, 2 * END_SECONDS_MAX)
            self._announce(at_once=True)
        for task in holding:
            if task.done() and not task.cancelled():
                task.result()

    async def _hold(self, shard: int, stop: asyncio.Event) -> None:
        try:
            while not stop.is_set():
                # All shards at the same time, so that they share a wake-up.
                next_renewal = self._now() + seconds_to_tick(self._renew_seconds)
                await self._renew(shard)
                self._report_requested()
                await self._pass_on_surplus(shard)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_renewal):
                        await stop.wait()
            self._is_leaving = True
            try:
                async with asyncio.timeout(LEAVE_SECONDS_MAX) as leaving:
                    await self._leave(shard)
            except TimeoutError:
                if not leaving.expired():
                    raise
        finally:
            await self._return_lease(shard)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # -- requesting ------------------------------------------------------------------------------------------

    async def _renew(self, shard: int) -> None:
        self._end_of_tasks(shard)
        try:
            async with asyncio.timeout(self._renew_seconds):
                about = Worker(round(self._lag_ms), self._overload.shards_max)
                lease = await request_lease(
                    self._redis,
                    self._keys.shard(shard),
                    self.worker,
                    self._lease_ms,
                    about=None if self._is_leaving else about,
                )
        except BaseException as error:
            # Relays of shards we hold notice themselves whether their server answers.
            self._troubles[shard].met(error)
            return
        self._troubles[shard].over()
        self._seen[shard] = self._now(), lease
        self._end_of_tasks(shard)
        held = self._running.get(shard)
        if lease.holder == self.worker:
            if held is None and not self._is_leaving:
                self._start(shard)
            elif held is not None:
                # If it was passed on, the taker let the lease expire.
                held.keep()
        elif held is not None and lease.holder == held.taker:
            await self._check_taker(shard, held)
        elif held is not None and held.taker is not None and self._is_leaving and not by_hand(lease.holder):
            # The taker returned the lease or let it expire, and another one has taken it.
            held.pass_to(lease.holder, self._now())
        elif held is not None:
            # An operator has taken it on purpose, as `rebuild redis` does.
            level = logging.INFO if by_hand(lease.holder) else logging.WARNING
            log.log(level, "shard %d: %s holds the lease now", shard, lease.holder)
            await self._drop(shard)

    def _start(self, shard: int) -> None:
        held = self._running[shard] = _LeasedShard(self._now())
        held.task = asyncio.create_task(self._keep(shard, held.duty))

    def _end_of_tasks(self, shard: int) -> None:
        """Forgets a shard whose relay has returned; raises what a task of the shard raised."""
        held = self._running.get(shard)
        if held is not None and held.task.done():
            held.task.result()
            log.info("shard %d: relayed by another worker now", shard)
            del self._running[shard]

    def _announce(self, at_once: bool = False) -> None:
        terms = {shard: held.duty.term for shard, held in self._running.items()}
        if (change := self._announcing.look(terms, self._now(), at_once)) is not None:
            self._changed(change)

    def _report_requested(self) -> None:
        if not self._all_requested and len(self._seen) == self._keys.shards:
            self._all_requested = True
            self._requested(self.held)

    async def _keep(self, shard: int, duty: Duty) -> None:
        tasks = [asyncio.create_task(coroutine) for coroutine in self._tasks_of(shard, duty)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end(tasks)

    async def _drop(self, shard: int) -> None:
        await end([self._running.pop(shard).task], END_SECONDS_MAX + 1)

    async def _return_lease(self, shard: int) -> None:
        """Ends the relay of a shard, then returns its lease; also for a taker that has not come for it."""
        absent = None
        if (held := self._running.get(shard)) is not None:
            if not held.task.done() and not held.is_renewed:
                absent = held.taker
            await self._drop(shard)
        elif shard not in self._seen:
            return
        keys = self._keys.shard(shard)
        try:
            async with asyncio.timeout(RETURN_SECONDS_MAX):
                if absent:
                    await pass_lease(self._redis, keys, absent, self.worker, self._lease_ms, back=True)
                await request_lease(self._redis, keys, self.worker, 0)
        except BaseException as error:
            if not is_trouble(error):
                raise
            log.warning("returning the lease of shard %d: %s", shard, error_text(error))

    # -- passing on ------------------------------------------------------------------------------------------

    async def _pass_on_surplus(self, shard: int) -> None:
        """Passes the shard on if this worker has more than its share, is not passing on another one, and has
        not taken over any for some time: what others say about themselves may be older than that.
        """
        settled = self._now() - self._lease_ms / 1000
        if all(held.taker is None and held.since <= settled for held in self._running.values()):
            await self._pass_on(shard)

    async def _pass_on(self, shard: int) -> None:
        """Passes the shard to a worker that has less than its share, if there is one."""
        held = self._running.get(shard)
        # A shard that is being recovered is not relayed: another worker would restart it.
        if held is None or held.taker is not None or not held.duty.is_relaying:
            return
        now, (seen_at, lease) = self._now(), self._seen[shard]
        if not lease.present:
            return
        fit = [
            worker
            for worker in self._takers(now)
            if worker in lease.present and self._unfit_until.get(worker, now) <= now
        ]
        if not fit:
            return
        held.pass_to(fit[0], now)
        try:
            async with asyncio.timeout(self._renew_seconds):
                passed = await pass_lease(
                    self._redis, self._keys.shard(shard), self.worker, fit[0], self._lease_ms
                )
        except BaseException as error:
            # The next renewal shows who has the lease.
            self._troubles[shard].met(error)
            return
        if passed:
            # It now counts as the other's, also when the relay has ended before the next renewal.
            self._seen[shard] = seen_at, lease._replace(holder=fit[0])
            log.info("shard %d: passed to %s", shard, fit[0])
        else:
            held.keep()

    async def _check_taker(self, shard: int, held: _LeasedShard) -> None:
        """Takes the lease back from a worker that has not taken the shard over in time."""
        assert held.taker is not None
        now = self._now()
        if now - held.passed_at < TAKEOVER_LEASES_MAX * self._lease_ms / 1000:
            return
        if not held.duty.is_relaying:
            await self._drop(shard)
            return
        log.warning("shard %d: %s did not take it over: keeping it", shard, held.taker)
        await self._take_back(shard, held)

    async def _take_back(self, shard: int, held: _LeasedShard) -> None:
        """Takes the lease back from a taker, which gets none for some time. The next renewal shows whether
        this worker has it.
        """
        assert held.taker is not None
        now = self._now()
        self._unfit_until = {worker: until for worker, until in self._unfit_until.items() if until > now} | {
            held.taker: now + UNFIT_SECONDS
        }
        try:
            async with asyncio.timeout(self._renew_seconds):
                await pass_lease(
                    self._redis, self._keys.shard(shard), held.taker, self.worker, self._lease_ms, back=True
                )
        except BaseException as error:
            self._troubles[shard].met(error)

    # -- leaving ---------------------------------------------------------------------------------------------

    async def _leave(self, shard: int) -> None:
        """Passes the shard on, and returns when it has been taken over, or no worker can take it."""
        while True:
            # No longer present: of several workers that are stopped together, none should pass shards to
            # another.
            await self._renew(shard)
            await self._pass_on(shard)
            held = self._running.get(shard)
            if held is None or held.taker is None:
                return
            if await self._is_absent(shard, held):
                log.warning("shard %d: %s does not take it over", shard, held.taker)
                await self._take_back(shard, held)
            elif held.task.done():
                return

    async def _is_absent(self, shard: int, held: _LeasedShard) -> bool:
        """Waits until the shard has been taken over. Returns True if the taker has not renewed the lease in
        time; False also if it no longer has it.
        """
        keys = self._keys.shard(shard)
        until = self._now() + ABSENT_RENEWALS * self._renew_seconds + ABSENT_SECONDS
        left_ms = math.inf
        while not held.task.done():
            await asyncio.wait({held.task}, timeout=LEAVE_POLL_SECONDS)
            try:
                async with asyncio.timeout(RETURN_SECONDS_MAX):
                    holder, before_ms = text_of(await self._redis.get(keys.lease)), left_ms
                    left_ms = await self._redis.pttl(keys.lease)
            except BaseException as error:
                self._troubles[shard].met(error)
                continue
            if holder != held.taker:
                return False
            held.is_renewed = held.is_renewed or left_ms > before_ms
            if not held.is_renewed and self._now() > until:
                return True
        return False

    # -- what the others have --------------------------------------------------------------------------------

    def _recent(self, now: float) -> dict[int, Lease]:
        """The leases of the shards whose servers answer, the latest answer last. Others count as free: their
        holders may have changed.
        """
        oldest = now - self._lease_ms / 1000
        latest_last = sorted(self._seen.items(), key=lambda item: item[1][0])
        return {shard: lease for shard, (seen_at, lease) in latest_last if seen_at > oldest}

    def _takers(self, now: float) -> list[str]:
        """The workers that should get a shard of this one, best first."""
        recent = self._recent(now)
        workers = self._others(recent)
        holders = []
        for shard, lease in recent.items():
            held = self._running.get(shard)
            holder = lease.holder if held is None else held.taker or self.worker
            if holder and not by_hand(holder):
                holders.append(holder)
        shards_max = {name: about.shards_max for name, about in workers.items()}
        shards_max[self.worker] = self._overload.shards_max
        if self._is_leaving:
            # Its shards are divided among the workers that take them.
            unfit = [name for name in workers if self._unfit_until.get(name, now) > now]
            shards_max |= dict.fromkeys((self.worker, *unfit), 0)
        bounds = {name: bound for name, bound in shards_max.items() if bound is not None}
        return takers(self.worker, self._keys.shards, holders, [self.worker, *workers], bounds)

    def _others(self, recent: Mapping[int, Lease]) -> dict[str, Worker]:
        """What the other workers said last about themselves."""
        return {name: about for lease in recent.values() for name, about in lease.present.items()}

    async def _measure(self, stop: asyncio.Event) -> None:
        """Measures how late this event loop runs its timers, and decides what that means for the shards;
        until `stop`. Announces which shards are relayed at the same wake-ups.
        """
        weight = LAG_EVERY_SECONDS / LAG_SECONDS
        while not stop.is_set():
            expected = self._now() + (pause_seconds := seconds_to_tick(LAG_EVERY_SECONDS))
            await asyncio.sleep(pause_seconds)
            now = self._now()
            self._announce()
            self._lag_ms += weight * (min((now - expected) * 1000, LAG_MS_MAX) - self._lag_ms)
            others = self._others(self._recent(now))
            share = math.ceil(self._keys.shards / (1 + len(others)))
            before = self._overload.shards_max
            self._overload.update(
                now, self._lag_ms, [other.lag_ms for other in others.values()], len(self._running), share
            )
            if self._overload.shards_max not in (before, None):
                log.warning(
                    "the event loop lags by %.0f ms: this worker relays at most %d shards",
                    self._lag_ms,
                    self._overload.shards_max,
                )
