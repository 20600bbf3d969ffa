"""Keeps answers to questions that a crowd asks, for 2 s, in the memory of the gateway.

While an answer is being made, all who ask the same wait for it: PostgreSQL is asked once, not once for each.
What could not be made is not kept.
"""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import NamedTuple

from grabstream.gateway.bounds import CACHE_BYTES_MAX, CACHE_SECONDS

#: What an entry costs beside its body, in bytes.
ENTRY_BYTES = 400


class Kept(NamedTuple):
    """A document with its tag, and the time (monotonic, s) until which it is fresh."""

    body: bytes
    tag: bytes
    until: float


class Cache:
    """Documents by the digest of what was asked, the least recently used dropped first."""

    def __init__(self, seconds: float = CACHE_SECONDS, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._seconds = seconds
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._making: dict[bytes, asyncio.Task[Kept]] = {}

    async def document(
        self, name: str, asked: Mapping[str, str], make: Callable[[], Awaitable[bytes]], fresh: bool = False
    ) -> Kept:
        """The document that answers a question: a kept one, or what `make` returns. With `fresh`, a new one;
        it is kept for others. Raises the error of `make`.
        """
        key = digest_of(name, asked)
        kept = self._kept.get(key)
        if kept is not None and not fresh and time.monotonic() < kept.until:
            self._kept.move_to_end(key)
            return kept
        if fresh:
            # One that is being made may be older than what this caller waits for.
            return await self._make(key, make)
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = asyncio.create_task(self._make(key, make))
            making.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(making)

    async def _make(self, key: bytes, make: Callable[[], Awaitable[bytes]]) -> Kept:
        # The age of an answer counts from before it was read.
        until = time.monotonic() + self._seconds
        body = await make()
        kept = Kept(body, tag_of(body), until)
        before = self._kept.get(key)
        if before is None or before.until <= until:
            self._keep(key, kept)
        return kept

    def _keep(self, key: bytes, kept: Kept) -> None:
        before = self._kept.pop(key, None)
        self._bytes += len(kept.body) - (len(before.body) if before else -ENTRY_BYTES)
        self._kept[key] = kept
        while self._bytes > self._bytes_max:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= len(dropped.body) + ENTRY_BYTES


def digest_of(name: str, asked: Mapping[str, str]) -> bytes:
    """A short digest of a question: its name, and its arguments in a fixed order, whatever they contain."""
    return sha256(json.dumps([name, sorted(asked.items())]).encode()).digest()[:16]


def tag_of(body: bytes) -> bytes:
    """The ETag of a document."""
    return f'"{sha256(body).hexdigest()[:32]}"'.encode()
