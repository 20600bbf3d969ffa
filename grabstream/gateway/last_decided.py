"""The last decided events of shards, by Redis: a question that waits for an event (`after`) is refused at
once when its shard has not decided it.

Redis knows it only for a shard that decides. A shard that has lost events has answered beyond what Redis
knows: its relay restores what the journal has of them.
"""

import asyncio
from typing import Any, Final

from grabstream.lua.keys import KeySpace
from grabstream.lua.server import has_server_epoch
from grabstream.runtime.trouble import suppressed_trouble

#: How long to wait for Redis; then the question waits for the read model as if Redis had not been asked.
ANSWER_SECONDS_MAX: Final = 1.0


class LastSeqs:
    """The last events of shards. Concurrent requests about a shard share one query."""

    def __init__(self, redis: Any, keys: KeySpace) -> None:
        self._redis = redis
        self._keys = keys
        self._asking: dict[int, asyncio.Task[int | None]] = {}

    async def last_seq(self, shard: int) -> int | None:
        """The last event that a shard has decided; None when unknown."""
        task = self._asking.get(shard)
        if task is not None:
            # It may have been read before the event was decided that a caller has got since.
            await asyncio.wait({task})
            task = self._asking.get(shard)
        if task is None:
            task = self._asking[shard] = asyncio.create_task(self._ask(shard))
            task.add_done_callback(lambda _: self._asking.pop(shard, None))
        return await asyncio.shield(task)

    async def _ask(self, shard: int) -> int | None:
        state = self._keys.shard(shard).state
        with suppressed_trouble():
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                seq, epoch, partial, fault = await self._redis.hmget(
                    state, ["seq", "server_epoch", "partial", "fault"]
                )
                may_know = partial is None and fault is None and (seq or b"").isdigit()
                # Asked last: the epoch does not come back, so the server had it when it gave the seq.
                if may_know and await has_server_epoch(self._redis, state, epoch):
                    return int(seq)
        return None
