"""Waits until events are journaled: a caller with the promise `journaled` gets its answers then.

"Journaled up to n" is true within one history only (docs/protocol.md). A waiter names the history in which
its answer was decided; if the shard gets another history, the waiter gets HistoryChanged and sends its
command again. Announcements arrive by pub/sub. Since one can be missed, each shard with waiters is also
polled, in a separate task, so that no shard waits for the server of another.
"""

import asyncio
import heapq
import itertools
import re
from typing import Any

from grabstream.lua.ending import end
from grabstream.lua.keys import KeySpace
from grabstream.lua.trouble import is_trouble, suppressed_trouble

POLL_EVERY_SECONDS = 0.1
#: The time-out of one poll: a shard whose server hangs is polled again, on a new connection.
POLL_SECONDS_MAX = 1.0
_is_number = re.compile(rb"[0-9]{1,16}").fullmatch


class HistoryChanged(Exception):
    """The shard was recovered, and has another `history` now: earlier decisions may be lost; send the command
    again under the same id.
    """

    def __init__(self, message: str, history: int) -> None:
        super().__init__(message)
        self.history = history


class Journaled:
    """Follows (history, seq) of every shard and releases waiters; each gate has one."""

    def __init__(self, redis: Any, keys: KeySpace) -> None:
        self._redis = redis
        self._keys = keys
        self._known: dict[int, tuple[int, int]] = {}
        self._waiting: dict[int, list[tuple[int, int, int, asyncio.Future[None]]]] = {}
        self._order = itertools.count()
        self._listening: asyncio.Task[None] | None = None
        self._polling: dict[int, asyncio.Task[None]] = {}

    @property
    def is_following(self) -> bool:
        """Whether `start` was called."""
        return self._listening is not None

    def start(self) -> None:
        """Starts to listen to announcements."""
        self._listening = asyncio.create_task(self._listen())

    async def close(self) -> None:
        """Stops; waiters are cancelled."""
        if self._listening is not None:
            # A cancellation may be swallowed while the client connects; then the task would never end.
            await end([self._listening, *self._polling.values()], again_seconds=POLL_EVERY_SECONDS)
        for heap in self._waiting.values():
            for *_, future in heap:
                future.cancel()

    async def wait(self, shard: int, history: int, seq: int) -> None:
        """Returns when the shard's journal has `seq` in this history; raises HistoryChanged when the shard
        has another history.
        """
        known_history, known_seq = self._known.get(shard, (-1, 0))
        if known_history == history and known_seq >= seq:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting.setdefault(shard, []), (seq, next(self._order), history, future))
        if shard not in self._polling and self.is_following:
            self._polling[shard] = asyncio.create_task(self._poll(shard))
        await future

    def _announce(self, shard: int, history: int, seq: int) -> None:
        self._known[shard] = (history, seq)
        heap = self._waiting.get(shard)
        if not heap:
            return
        if any(waiting_history != history for _, _, waiting_history, _ in heap):
            for _, _, waiting_history, future in heap:
                if waiting_history != history and not future.done():
                    text = f"shard {shard}: history {history} instead of {waiting_history}"
                    future.set_exception(HistoryChanged(text, history))
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
                        shard = channels[message["channel"].decode()]
                        self._take(shard, *message["data"].rpartition(b" ")[::2])
            except BaseException as error:
                if not is_trouble(error):
                    raise
                await asyncio.sleep(POLL_EVERY_SECONDS)

    async def _poll(self, shard: int) -> None:
        """Polls a shard while it has waiters."""
        try:
            while self._waiting.get(shard):
                await asyncio.sleep(POLL_EVERY_SECONDS)
                with suppressed_trouble():
                    async with asyncio.timeout(POLL_SECONDS_MAX):
                        await self.refresh(shard)
        finally:
            del self._polling[shard]

    async def refresh(self, shard: int) -> None:
        """Reads (history, seq) of a shard from its hash and releases the waiters that this concerns."""
        fields = await self._redis.hmget(self._keys.shard(shard).state, ["history", "journaled_seq"])
        if fields[0] is not None:
            self._take(shard, fields[0], fields[1] or b"0")

    def _take(self, shard: int, history: bytes, seq: bytes) -> None:
        """Takes what the shard says of itself. If that is damaged, waiters wait until the shard is rebuilt;
        they are released by what it says then.
        """
        if _is_number(history or b"0") and _is_number(seq):
            self._announce(shard, int(history or 0), int(seq))
