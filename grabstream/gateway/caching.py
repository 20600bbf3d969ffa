"""Caches answers to the questions of a crowd for 2 s: in the memory of the gateway and, where there is one,
in the cache Redis, for all gateways.

While an answer is being made, all requests for it wait: PostgreSQL is queried once, not once for each.
Failures are not kept.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import NamedTuple

import msgspec

from grabstream.gateway.bounds import CACHE_BYTES_MAX, CACHE_SECONDS
from grabstream.gateway.shared_answers import LookUpResult, SharedAnswers
from grabstream.gateway.slots import Room

_encode = msgspec.json.Encoder().encode
#: Overhead of an entry in addition to its body, in bytes.
ENTRY_BYTES = 400
#: How long an answer that another gateway is renewing is used without looking again.
RENEWED_SECONDS = 0.05


class KeptDocument(NamedTuple):
    """A document with its tag, a time (monotonic, s) not after its reading, and the time until which it is
    fresh. For the document of another gateway (not `is_own`), the first is approximate.
    """

    body: bytes
    tag: bytes
    since: float
    until: float
    is_own: bool = True


class _Making(NamedTuple):
    """A document that is being made since a time (monotonic, s). Unless it `is_own`, another gateway may have
    it.
    """

    since: float
    is_own: bool
    task: asyncio.Task[KeptDocument]


def _is_read_since(document: KeptDocument | _Making, since: float | None) -> bool:
    """Whether this gateway has certainly read a document after a time; None: at any time, by any gateway."""
    return since is None or (document.is_own and document.since >= since)


class Cache:
    """Documents by the digest of what was asked, the least recently used dropped first. `shared` are those of
    all gateways.
    """

    def __init__(
        self,
        seconds: float = CACHE_SECONDS,
        bytes_max: int = CACHE_BYTES_MAX,
        shared: SharedAnswers | None = None,
    ) -> None:
        self._seconds = seconds
        self._bytes_max = bytes_max
        self._shared = shared
        self._bytes = 0
        #: Questions that a kept answer, or one that was being made, has answered; and the others.
        self.hits = 0
        self.misses = 0
        self._kept: OrderedDict[bytes, KeptDocument] = OrderedDict()
        self._making: dict[bytes, _Making] = {}

    def kept(self, key: bytes, read_since: float | None = None) -> KeptDocument | None:
        """The document of a digest, if it is kept and fresh, and was read since a time."""
        kept = self._kept.get(key)
        if kept is None or time.monotonic() >= kept.until or not _is_read_since(kept, read_since):
            return None
        self._kept.move_to_end(key)
        self.hits += 1
        return kept

    async def document(
        self,
        name: str,
        asked: Mapping[str, str],
        make: Callable[[], Awaitable[bytes]],
        read_since: float | None = None,
        room: Room | None = None,
    ) -> KeptDocument:
        """The document that answers a question: a kept one, or what `make` returns. With `read_since`, one
        that this gateway has read since then (monotonic, s); it is kept for others. Takes `room`
        to make one, or to wait for one that is being made already. Raises the errors of `make` and `room`.
        """
        key = digest_of(name, asked)
        if (kept := self.kept(key, read_since)) is not None:
            return kept
        making = self._making.get(key)
        if making is None or not _is_read_since(making, read_since):
            if room is not None:
                room.ask()
            self.misses += 1
            making = self._begin(key, make, is_own=read_since is not None)
        else:
            if room is not None:
                room.join()
            self.hits += 1
        return await asyncio.shield(making.task)

    def _begin(self, key: bytes, make: Callable[[], Awaitable[bytes]], is_own: bool) -> _Making:
        """Starts to make a document for all later requests."""
        finding = self._make(key, make, LookUpResult()) if is_own else self._find(key, make)
        making = self._making[key] = _Making(time.monotonic(), is_own, asyncio.create_task(finding))

        def made(task: asyncio.Task[KeptDocument]) -> None:
            # One that was begun later may have taken its place.
            if self._making.get(key) is making:
                del self._making[key]

        making.task.add_done_callback(made)
        return making

    def derived(
        self, name: str, asked: Mapping[str, str], source: KeptDocument, make: Callable[[], bytes]
    ) -> KeptDocument:
        """A document that is derived from another one, which was requested before: as old as that one, and
        kept in this gateway alone.
        """
        key = digest_of(name, asked)
        before = self._kept.get(key)
        if before is not None and before.since == source.since:
            self._kept.move_to_end(key)
            return before
        body = make()
        return self._keep_newest(key, source._replace(body=body, tag=tag_of(body)))

    async def _find(self, key: bytes, make: Callable[[], Awaitable[bytes]]) -> KeptDocument:
        """The document of another gateway, or a new one."""
        if self._shared is None or not self._shared.is_up:
            return await self._make(key, make, LookUpResult())
        found = await self._shared.find(key)
        if found.body is None:
            return await self._make(key, make, found)
        now = time.monotonic()
        since = now - found.age
        until = max(since + self._seconds, now + RENEWED_SECONDS)
        return self._keep_newest(
            key, KeptDocument(found.body, tag_of(found.body), since, until, is_own=False)
        )

    async def _make(
        self, key: bytes, make: Callable[[], Awaitable[bytes]], found: LookUpResult
    ) -> KeptDocument:
        # The age of an answer counts from before it was read.
        since = time.monotonic()
        try:
            body = await make()
        except Exception:
            if self._shared is not None and found.maker:
                await self._shared.give_up(key, found)
            raise
        kept = KeptDocument(body, tag_of(body), since, since + self._seconds)
        self._keep_newest(key, kept)
        if self._shared is not None and self._shared.is_up:
            await self._shared.store(key, body, time.monotonic() - since, found)
        return kept

    def _keep_newest(self, key: bytes, kept: KeptDocument) -> KeptDocument:
        """Keeps a document unless a newer one is kept; returns the newer one of both."""
        before = self._kept.get(key)
        if before is not None and before.since > kept.since:
            return before
        self._keep(key, kept)
        return kept

    def _keep(self, key: bytes, kept: KeptDocument) -> None:
        before = self._kept.pop(key, None)
        self._bytes += len(kept.body) - (len(before.body) if before else -ENTRY_BYTES)
        self._kept[key] = kept
        while self._bytes > self._bytes_max:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= len(dropped.body) + ENTRY_BYTES


def digest_of(name: str, asked: Mapping[str, str]) -> bytes:
    """A short digest of a question: its name, and its arguments in a fixed order, whatever they contain."""
    return sha256(_encode([name, sorted(asked.items())])).digest()[:16]


def tag_of(body: bytes) -> bytes:
    """The ETag of a document."""
    return f'"{sha256(body).hexdigest()[:32]}"'.encode()
