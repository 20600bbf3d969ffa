"""The keeper: holds the leases of shards, and runs relay and sweeper of those it holds.

A lease only says who should try; two relays of a shard at once are harmless (the log fences them), merely wasteful.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from typing import Any, Final

from lua.gate import run_script
from lua.keys import KeySpace
from lua.trouble import is_trouble
from streams.clients import Trouble, in_words

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE: Final = 4


class Keeper:
    """One a worker. `tasks_of(shard)` gives the coroutines to run while the shard's lease is held; they run until cancelled."""

    def __init__(self, redis: Any, keys: KeySpace, lease_ms: int, tasks_of: Callable[[int], list[Any]]) -> None:
        self._redis = redis
        self._keys = keys
        self._lease_ms = lease_ms
        self._tasks_of = tasks_of
        self._running: dict[int, asyncio.Task[None]] = {}
        self._troubles = [Trouble(log, f"lease of shard {shard}") for shard in range(keys.shards)]
        self.worker = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"

    @property
    def held(self) -> list[int]:
        """The shards whose lease this worker holds."""
        return sorted(self._running)

    async def run(self, stop: asyncio.Event) -> None:
        """Takes free leases and renews its own until `stop`, then gives them back; raises what a task of a shard raised."""
        try:
            while not stop.is_set():
                for shard in range(self._keys.shards):
                    await self._renew(shard)
                    task = self._running.get(shard)
                    if task is not None and task.done():
                        task.result()
                        raise RuntimeError(f"the tasks of shard {shard} ended")
                try:
                    async with asyncio.timeout(self._lease_ms / 1000 / RENEWALS_PER_LEASE):
                        await stop.wait()
                except TimeoutError:
                    continue
        finally:
            await self._give_back()

    async def _renew(self, shard: int) -> None:
        try:
            holder = await run_script(self._redis, "lease", self._lease_keys(shard), [self.worker, self._lease_ms])
        except BaseException as error:
            if not is_trouble(error):
                raise
            # Relays of shards we hold see for themselves whether their server is there.
            self._troubles[shard].say(in_words(error))
            return
        self._troubles[shard].over()
        if holder.decode() == self.worker:
            if shard not in self._running:
                self._running[shard] = asyncio.create_task(self._keep(shard))
        elif shard in self._running:
            log.warning("shard %d: the lease went to %s", shard, holder.decode())
            await self._drop(shard)

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
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drop(self, shard: int) -> None:
        task = self._running.pop(shard)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _give_back(self) -> None:
        shards = list(self._running)
        await asyncio.gather(*(self._drop(shard) for shard in shards))
        for shard in shards:
            try:
                await run_script(self._redis, "lease", self._lease_keys(shard), [self.worker, 0])
            except BaseException as error:
                if not is_trouble(error):
                    raise
                log.warning("giving back the lease of shard %d: %s", shard, error)
                return
