"""Leases of shards: a worker runs relay and sweeper of the shards whose leases it holds.

Each lease is requested and renewed separately, with a timeout well below its length, so a server that hangs
costs only the leases of its own shards.

A lease only decides which worker tries. Two relays of a shard at once do no harm, because the journal fences
them; they only waste work.
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
#: How long returning a lease may take. The next holder waits no longer than for a lease that expires.
RETURN_SECONDS_MAX: Final = 1.0


class Leases:
    """The leases of one worker. `tasks_of(shard)` returns the coroutines to run while the shard's lease is
    held; they run until cancelled.
    """

    def __init__(
        self,
        redis: Any,
        keys: KeySpace,
        lease_ms: int,
        tasks_of: Callable[[int], list[Any]],
        requested: Callable[[Sequence[int]], None] = lambda held: None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._lease_ms = lease_ms
        self._tasks_of = tasks_of
        #: Called once, with the shards held, when every lease has been requested.
        self._requested = requested
        self._answered: set[int] = set()
        self._all_requested = False
        self._running: dict[int, asyncio.Task[None]] = {}
        self._troubles = [Trouble(log, f"lease of shard {shard}") for shard in range(keys.shards)]
        self.worker = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"

    @property
    def held(self) -> list[int]:
        """The shards whose lease this worker holds."""
        return sorted(self._running)

    @property
    def _renew_seconds(self) -> float:
        """The time between two renewals, and the longest time that one may take."""
        return self._lease_ms / 1000 / RENEWALS_PER_LEASE

    async def run(self, stop: asyncio.Event) -> None:
        """Takes free leases and renews those held until `stop`, then returns them; raises what a task of a
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
                self._report_requested()
                task = self._running.get(shard)
                if task is not None and task.done():
                    task.result()
                    raise RuntimeError(f"the tasks of shard {shard} ended")
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_renewal):
                        await stop.wait()
        finally:
            await self._return_lease(shard)

    async def _renew(self, shard: int) -> None:
        try:
            async with asyncio.timeout(self._renew_seconds):
                holder = await run_script(
                    self._redis, "lease", self._lease_keys(shard), [self.worker, self._lease_ms]
                )
        except BaseException as error:
            if not is_trouble(error):
                raise
            # Relays of shards we hold notice by themselves whether their server answers.
            self._troubles[shard].say(in_words(error))
            return
        self._troubles[shard].over()
        self._answered.add(shard)
        if holder.decode() == self.worker:
            if shard not in self._running:
                self._running[shard] = asyncio.create_task(self._keep(shard))
        elif shard in self._running:
            log.warning("shard %d: %s holds the lease now", shard, holder.decode())
            await self._drop(shard)

    def _report_requested(self) -> None:
        if not self._all_requested and len(self._answered) == self._keys.shards:
            self._all_requested = True
            self._requested(self.held)

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

    async def _return_lease(self, shard: int) -> None:
        if shard not in self._running:
            return
        await self._drop(shard)
        try:
            async with asyncio.timeout(RETURN_SECONDS_MAX):
                await run_script(self._redis, "lease", self._lease_keys(shard), [self.worker, 0])
        except BaseException as error:
            if not is_trouble(error):
                raise
            log.warning("returning the lease of shard %d: %s", shard, in_words(error))
