"""The keeper: holds the leases of shards, and runs relay and sweeper of those it holds.

Each shard's lease is kept by itself, and asked for with a time-out well below its length: a server that hangs
costs no lease but those of its own shards.

A lease only says who should try; two relays of a shard at once are harmless (the log fences them), merely
wasteful.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from grabstream.lua.ending import END_SECONDS_MAX, end
from grabstream.lua.gate.calls import run_script
from grabstream.lua.keys import KeySpace
from grabstream.lua.trouble import is_trouble
from grabstream.streams.clients import Trouble, in_words

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE: Final = 4
#: How long a lease that is given back may take: who comes after waits no longer than for a lease that ends.
GIVE_BACK_SECONDS_MAX: Final = 1.0


class LeaseKeeper:
    """One a worker. `tasks_of(shard)` gives the coroutines to run while the shard's lease is held; they run
    until cancelled.
    """

    def __init__(
        self,
        redis: Any,
        keys: KeySpace,
        lease_ms: int,
        tasks_of: Callable[[int], list[Any]],
        asked: Callable[[Sequence[int]], None] = lambda held: None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._lease_ms = lease_ms
        self._tasks_of = tasks_of
        #: Called once, with the shards held, when every lease has been asked for.
        self._asked = asked
        self._answered: set[int] = set()
        self._is_asked = False
        self._running: dict[int, asyncio.Task[None]] = {}
        self._troubles = [Trouble(log, f"lease of shard {shard}") for shard in range(keys.shards)]
        self.worker = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"

    @property
    def held(self) -> list[int]:
        """The shards whose lease this worker holds."""
        return sorted(self._running)

    @property
    def _renew_seconds(self) -> float:
        """How long from one renewal to the next, and how long one may take."""
        return self._lease_ms / 1000 / RENEWALS_PER_LEASE

    async def run(self, stop: asyncio.Event) -> None:
        """Takes free leases and renews its own until `stop`, then gives them back; raises what a task of a
        shard raised.
        """
        holding = [asyncio.create_task(self._hold(shard, stop)) for shard in range(self._keys.shards)]
        try:
            await asyncio.wait(holding, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await end(holding, 2 * END_SECONDS_MAX)
        for task in holding:
            if task.done() and not task.cancelled():
                task.result()

    async def _hold(self, shard: int, stop: asyncio.Event) -> None:
        try:
            while not stop.is_set():
                next_renewal = asyncio.get_running_loop().time() + self._renew_seconds
                await self._renew(shard)
                self._count_asked()
                task = self._running.get(shard)
                if task is not None and task.done():
                    task.result()
                    raise RuntimeError(f"the tasks of shard {shard} ended")
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_renewal):
                        await stop.wait()
        finally:
            await self._give_back(shard)

    async def _renew(self, shard: int) -> None:
        try:
            async with asyncio.timeout(self._renew_seconds):
                holder = await run_script(
                    self._redis, "lease", self._lease_keys(shard), [self.worker, self._lease_ms]
                )
        except BaseException as error:
            if not is_trouble(error):
                raise
            # Relays of shards we hold see for themselves whether their server is there.
            self._troubles[shard].say(in_words(error))
            return
        self._troubles[shard].over()
        self._answered.add(shard)
        if holder.decode() == self.worker:
            if shard not in self._running:
                self._running[shard] = asyncio.create_task(self._keep(shard))
        elif shard in self._running:
            log.warning("shard %d: the lease went to %s", shard, holder.decode())
            await self._drop(shard)

    def _count_asked(self) -> None:
        if not self._is_asked and len(self._answered) == self._keys.shards:
            self._is_asked = True
            self._asked(self.held)

    def _lease_keys(self, shard: int) -> list[str]:
        keys = self._keys.shard(shard)
        return [keys.lease, keys.state]

    async def _keep(self, shard: int) -> None:
        tasks = [asyncio.create_task(coroutine) for coroutine in self._tasks_of(shard)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end(tasks)

    async def _drop(self, shard: int) -> None:
        await end([self._running.pop(shard)], END_SECONDS_MAX + 1)

    async def _give_back(self, shard: int) -> None:
        if shard not in self._running:
            return
        await self._drop(shard)
        try:
            async with asyncio.timeout(GIVE_BACK_SECONDS_MAX):
                await run_script(self._redis, "lease", self._lease_keys(shard), [self.worker, 0])
        except BaseException as error:
            if not is_trouble(error):
                raise
            log.warning("giving back the lease of shard %d: %s", shard, in_words(error))
