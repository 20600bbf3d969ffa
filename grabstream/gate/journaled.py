"""Waits until events are journaled: a caller with the promise `journaled` gets its answers then.

"Journaled up to n" is true within one history only (docs/protocol.md). A waiter names the history in which
its answer was decided; if the shard gets another history, the waiter gets HistoryChanged and sends its
command again. Announcements arrive by pub/sub. Since one can be missed, each shard with waiters that
announces nothing is polled, in a separate task, so that no shard waits for the server of another.
"""

import asyncio
import heapq
import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from grabstream.lua.keys import KeySpace
from grabstream.lua.script_client import ScriptClient
from grabstream.runtime.ending import end
from grabstream.runtime.trouble import is_trouble, suppressed_trouble

POLL_EVERY_SECONDS = 0.1
#: The timeout of one poll: a shard whose server hangs is polled again, on a new connection.
POLL_SECONDS_MAX = 1.0
#: How often the deadlines of waiters are compared with the time.
DEADLINES_EVERY_SECONDS: Final = 0.1
_is_number = re.compile(rb"[0-9]{1,16}").fullmatch


class HistoryChanged(Exception):
    """The shard was recovered, and has another `history` now: earlier decisions may be lost; send the command
    again under the same id.
    """

    def __init__(self, message: str, history: int) -> None:
        super().__init__(message)
        self.history = history


#: The result of a waiter: None when its event is journaled, or why it stops waiting.
Release = Callable[[HistoryChanged | TimeoutError | asyncio.CancelledError | None], None]
#: A waiter: its seq, its place among those of this seq, its history, its deadline, and what releases it.
_Waiter = tuple[int, int, int, float, Release]


class Journaled:
    """Follows (history, seq) of every shard and releases waiters; each gate has one."""

    def __init__(self, redis: Any, keys: KeySpace) -> None:
        self._redis = redis
        self._keys = keys
        self._known: dict[int, tuple[int, int]] = {}
        #: When each shard has announced something (monotonic, s).
        self._heard_at: dict[int, float] = {}
        self._waiting: dict[int, list[_Waiter]] = {}
        self._deadlines: asyncio.TimerHandle | None = None
        self._order = itertools.count()
        self._listening: asyncio.Task[None] | None = None
        self._polling: dict[int, asyncio.Task[None]] = {}

    @property
    def is_listening(self) -> bool:
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
        if self._deadlines is not None:
            self._deadlines.cancel()
        waiting, self._waiting = self._waiting, {}
        for heap in waiting.values():
            for *_, release in heap:
                release(asyncio.CancelledError())

    async def wait(self, shard: int, history: int, seq: int) -> None:
        """Returns when the shard's journal has `seq` in this history; raises HistoryChanged when the shard
        has another history.
        """
        if not self.is_known(shard, history, seq):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.call(shard, history, seq, math.inf, partial(set_result, future))
            await future

    def is_known(self, shard: int, history: int, seq: int) -> bool:
        """Whether the shard's journal has `seq` in this history, by its announcements."""
        known_history, known_seq = self._known.get(shard, (-1, 0))
        return known_history == history and known_seq >= seq

    def call(self, shard: int, history: int, seq: int, deadline: float, release: Release) -> None:
        """Calls `release` once, as soon as the shard announces that its journal has `seq` in this history, or
        that it has another one; or after the deadline (monotonic, s), a moment later; or when this is
        closed. `release` raises nothing.
        """
        waiter = (seq, next(self._order), history, deadline, release)
        heapq.heappush(self._waiting.setdefault(shard, []), waiter)
        if shard not in self._polling and self.is_listening:
            self._polling[shard] = asyncio.create_task(self._poll(shard))
        if self._deadlines is None and deadline < math.inf:
            self._look_at_deadlines_later()

    def _look_at_deadlines_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._deadlines = loop.call_later(DEADLINES_EVERY_SECONDS, self._look_at_deadlines)

    def _look_at_deadlines(self) -> None:
        self._deadlines = None
        now = time.monotonic()
        for shard, heap in list(self._waiting.items()):
            late = [waiter for waiter in heap if waiter[3] <= now]
            _remove(heap, late)
            for *_, release in late:
                release(TimeoutError(f"shard {shard} has not announced the event in time"))
        if any(waiter[3] < math.inf for heap in self._waiting.values() for waiter in heap):
            self._look_at_deadlines_later()

    def _announce(self, shard: int, history: int, seq: int) -> None:
        self._known[shard] = (history, seq)
        self._heard_at[shard] = time.monotonic()
        heap = self._waiting.get(shard)
        if not heap:
            return
        # A released waiter may wait again at once, so it is removed from the heap first.
        others = [waiter for waiter in heap if waiter[2] != history]
        _remove(heap, others)
        ready = []
        while heap and heap[0][0] <= seq:
            ready.append(heapq.heappop(heap))
        for _, _, waiting_history, _, release in others:
            text = f"shard {shard}: history {history} instead of {waiting_history}"
            release(HistoryChanged(text, history))
        for *_, release in ready:
            release(None)

    async def _listen(self) -> None:
        channels = {self._keys.shard(shard).channel: shard for shard in range(self._keys.shards)}

        def take(channel: bytes, data: bytes) -> None:
            self._take(channels[channel.decode()], *data.rpartition(b" ")[::2])

        while True:
            try:
                await listen_to(self._redis, list(channels), take)
            except BaseException as error:
                if not is_trouble(error):
                    raise
                await asyncio.sleep(POLL_EVERY_SECONDS)

    async def _poll(self, shard: int) -> None:
        """Polls a shard while it has waiters, and announces nothing."""
        try:
            while self._waiting.get(shard):
                await asyncio.sleep(POLL_EVERY_SECONDS)
                if time.monotonic() - self._heard_at.get(shard, 0.0) < POLL_EVERY_SECONDS:
                    continue
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
        """Takes what the shard reports. If that is damaged, waiters wait until the shard is rebuilt and
        reports again.
        """
        if _is_number(history or b"0") and _is_number(seq):
            self._announce(shard, int(history or 0), int(seq))


async def listen_to(redis: Any, channels: Sequence[str], take: Callable[[bytes, bytes], None]) -> None:
    """Calls `take` with the channel and the data of each message, until cancelled; raises what ends that."""
    if isinstance(redis, ScriptClient):
        await redis.listen_to(channels, take)
        return
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(*channels)
        async for message in pubsub.listen():
            if message["type"] == "message":
                take(message["channel"], message["data"])


def _remove(heap: list[_Waiter], waiters: list[_Waiter]) -> None:
    if waiters:
        gone = {order for _, order, *_ in waiters}
        heap[:] = [waiter for waiter in heap if waiter[1] not in gone]
        heapq.heapify(heap)


def set_result(future: "asyncio.Future[Any]", result: object) -> None:
    """Sets the result or error of a future, unless its waiter has gone."""
    if future.done():
        return
    if isinstance(result, asyncio.CancelledError):
        future.cancel()
    elif isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
