"""Journaled up to n: who was promised a journaled answer waits here until the journal has its event.

The number is true within one history only (docs/protocol.md): a waiter names the history its answer was
decided under, and at another one it is told so, to send its command again. Announcements come by pub/sub;
since one can be missed, each shard with waiters is also looked at, by itself: no shard waits for another's
server.
"""

import asyncio
import heapq
import itertools
from typing import Any

from grabstream.lua.ending import end
from grabstream.lua.keys import KeySpace
from grabstream.lua.trouble import is_trouble, suppressed_trouble

LOOK_EVERY_SECONDS = 0.1
#: How long a look may take: a shard whose server hangs is looked at again, by a new connection.
LOOK_SECONDS_MAX = 1.0


class HistoryChanged(Exception):
    """The shard was recovered meanwhile: what was decided before may be gone; ask again under the same id."""


class Journaled:
    """Follows (history, seq) of every shard and releases waiters; one a gate."""

    def __init__(self, redis: Any, keys: KeySpace) -> None:
        self._redis = redis
        self._keys = keys
        self._known: dict[int, tuple[int, int]] = {}
        self._waiting: dict[int, list[tuple[int, int, int, asyncio.Future[None]]]] = {}
        self._order = itertools.count()
        self._listening: asyncio.Task[None] | None = None
        self._looking: dict[int, asyncio.Task[None]] = {}

    @property
    def is_following(self) -> bool:
        """Whether it was started."""
        return self._listening is not None

    def start(self) -> None:
        """Begins to listen."""
        self._listening = asyncio.create_task(self._listen())

    async def close(self) -> None:
        """Stops; waiters are cancelled."""
        if self._listening is not None:
            # One cancellation may be swallowed, where the client is just connecting: then the task would
            # listen for ever.
            await end([self._listening, *self._looking.values()], again_seconds=LOOK_EVERY_SECONDS)
        for heap in self._waiting.values():
            for *_, future in heap:
                future.cancel()

    async def wait(self, shard: int, history: int, seq: int) -> None:
        """Returns when the shard's journal has `seq` in this history; raises HistoryChanged when another one
        came.
        """
        known_history, known_seq = self._known.get(shard, (-1, 0))
        if known_history == history and known_seq >= seq:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting.setdefault(shard, []), (seq, next(self._order), history, future))
        if shard not in self._looking and self.is_following:
            self._looking[shard] = asyncio.create_task(self._look_again_and_again(shard))
        await future

    def _announce(self, shard: int, history: int, seq: int) -> None:
        self._known[shard] = (history, seq)
        heap = self._waiting.get(shard)
        if not heap:
            return
        if any(waiting_history != history for _, _, waiting_history, _ in heap):
            for _, _, waiting_history, future in heap:
                if waiting_history != history and not future.done():
                    future.set_exception(
                        HistoryChanged(f"shard {shard}: history {history} instead of {waiting_history}")
                    )
            heap[:] = [entry for entry in heap if not entry[3].done()]
            heapq.heapify(heap)
        while heap and heap[0][0] <= seq:
            future = heapq.heappop(heap)[3]
            if not future.done():
                future.set_result(None)

    async def _listen(self) -> None:
        channels = {self._keys.shard(shard).channel: shard for shard in range(self._keys.shards)}
        while True:
            try:
                async with self._redis.pubsub() as pubsub:
                    await pubsub.subscribe(*channels)
                    async for message in pubsub.listen():
                        if message["type"] != "message":
                            continue
                        history, seq = message["data"].decode().rsplit(" ", 1)
                        self._announce(channels[message["channel"].decode()], int(history or 0), int(seq))
            except BaseException as error:
                if not is_trouble(error):
                    raise
                await asyncio.sleep(LOOK_EVERY_SECONDS)

    async def _look_again_and_again(self, shard: int) -> None:
        """Looks at a shard as long as somebody waits for it."""
        try:
            while self._waiting.get(shard):
                await asyncio.sleep(LOOK_EVERY_SECONDS)
                with suppressed_trouble():
                    async with asyncio.timeout(LOOK_SECONDS_MAX):
                        await self.look(shard)
        finally:
            del self._looking[shard]

    async def look(self, shard: int) -> None:
        """Reads (history, seq) of a shard from its hash and releases whom it concerns."""
        fields = await self._redis.hmget(self._keys.shard(shard).state, ["history", "journaled_seq"])
        if fields[0] is not None:
            self._announce(shard, int(fields[0]), int(fields[1] or 0))
