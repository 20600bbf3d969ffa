"""Following a journal: records are verified by a cursor, and the results of their events are written in the
transaction that moves the cursor.

`Follower` does that for its driver: projectors with records of Faust; replays, rebuilds, webhooks and sinks
with what a source has read.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple, NoReturn

import msgspec

from grabstream.models.journal import Block, Corrupt, Cursor, Gap, Headers
from grabstream.models.runs import LINES, AnyLine, LineDecoder
from grabstream.projections.cursors import CursorMoved, Fact, are_consecutive, facts_of
from grabstream.runtime.ending import end
from grabstream.streams.clients import Trouble
from grabstream.streams.journal import JournalReader, JournalRecord, open_reader
from grabstream.streams.journal_keys import NOT_SIGNED, journal_keys

log = logging.getLogger(__name__)

#: How often a journal is polled, and the pause before it is reopened.
POLL_SECONDS: Final = 0.2
RETRY_SECONDS: Final = 1.0
#: The number of events after which a group is written.
GROUP_EVENTS_MAX: Final = 4_000
#: Bytes of journal text whose decoded form a process keeps; the decoded form is several times as large.
DECODED_BYTES_MAX: Final = 16 * 1024 * 1024

FactsOf = Callable[[Sequence[bytes], Sequence[bytes], Sequence[AnyLine]], list[Fact]]


class Decoded:
    """A decoded record: its block immediately, the facts of its events on demand, if the block counts."""

    def __init__(self, record: JournalRecord, block: Block, lines: LineDecoder = LINES) -> None:
        """Takes the block in the record; raises Corrupt if it is of another partition."""
        self.block = block
        self._lines = lines
        self.size = len(record.value) or 1_000  # a marker has no text, but takes memory
        self._facts: list[Fact] = []
        if self.block.shard != record.shard and self.block.authority == "unchecked":
            raise Corrupt(
                f"offset {record.offset}: a block of shard {self.block.shard} in partition {record.shard}"
            )

    @property
    def facts(self) -> list[Fact]:
        """A fact for each line; raises Corrupt if an event cannot be decoded, or has other seqs or another
        shard than its block says.
        """
        return self.facts_by(facts_of)

    def facts_by(self, facts_of: FactsOf) -> list[Fact]:
        """The facts as `facts_of` makes them, at the first call."""
        block = self.block
        if block.count and not self._facts:
            try:
                events = self._lines.decode_list(b"[" + b",".join(block.lines) + b"]")
            except msgspec.DecodeError as error:
                raise Corrupt(f"an event from seq {block.first_seq} on cannot be decoded: {error}") from None
            # Rows are written under the numbers in the text, and the chain counts by the header: both must
            # agree.
            reach = [event.last_seq for event in events]
            if reach != list(block.last_seqs) or not are_consecutive(
                block.shard, block.first_seq - 1, events
            ):
                raise Corrupt(f"the events from seq {block.first_seq} on have other numbers in their text")
            self._facts = facts_of(block.lines, block.hashes, events)
        return self._facts


class Decoder:
    """Decodes records. All projections of a process read the same records, so each is decoded once, and the
    newest are kept.
    """

    def __init__(self, bytes_max: int = DECODED_BYTES_MAX, lines: LineDecoder = LINES) -> None:
        self._bytes_max = bytes_max
        self._lines = lines
        self._bytes = 0
        self._newest: OrderedDict[tuple[str, int, int, Headers], Decoded] = OrderedDict()

    def decode(self, topic: str, record: JournalRecord) -> Decoded:
        """The decoded record; raises Corrupt if it contradicts itself."""
        # The headers contain the hash that the text was checked against, so they replace the text in the key.
        key = (topic, record.shard, record.offset, tuple(record.headers))
        decoded = self._newest.get(key)
        if decoded is None:
            block = journal_keys().block(topic, record.shard, record.headers, record.value)
            decoded = self._newest[key] = Decoded(record, block, self._lines)
            self._bytes += decoded.size
            while self._bytes > self._bytes_max:
                self._bytes -= self._newest.popitem(last=False)[1].size
        return decoded


class Chunk(NamedTuple):
    """Consecutive events of a shard, with the cursors before and after them.

    `read` is the number of units of the source that the chunk was made from. Events that operators had set
    aside may be missing. `fault` is why a record adds none, if no known relay signed it.
    """

    shard: int
    before: Cursor
    after: Cursor
    facts: Sequence[Fact]
    read: int
    fault: str = ""


def next_chunk(
    cursor: Cursor, record: JournalRecord, decoded: Decoded, facts_of: FactsOf = facts_of
) -> Chunk:
    """The events that a record adds after a cursor; raises Corrupt or Gap if it contradicts the cursor or
    itself.
    """
    block = decoded.block
    after, accepted = cursor.feed(record.offset, block)
    # The accepted events are always the end of the block.
    facts = decoded.facts_by(facts_of)[-len(accepted) :] if accepted else []
    fault = block.fault or NOT_SIGNED if cursor.ignores(block) else ""
    return Chunk(record.shard, cursor, after, facts, 1, fault)


class Group:
    """Consecutive chunks of each of some shards: the contents of one transaction."""

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self.chunks: dict[int, list[Chunk]] = {}
        self.seqs = self.lines = self.read = 0
        for chunk in chunks:
            self.add(chunk)

    def takes(self, shard: int) -> bool:
        """Whether chunks of a shard may be added."""
        return True

    def add(self, chunk: Chunk) -> None:
        """Adds a chunk, which follows those of its shard."""
        self.chunks.setdefault(chunk.shard, []).append(chunk)
        self.seqs += chunk.after.seq - chunk.before.seq
        self.lines += len(chunk.facts)
        self.read += chunk.read

    @property
    def moves(self) -> dict[int, tuple[Cursor, Cursor]]:
        """By shard: the cursors before and after its chunks."""
        return {shard: (chunks[0].before, chunks[-1].after) for shard, chunks in self.chunks.items()}

    @property
    def facts(self) -> list[Fact]:
        """The facts of all shards."""
        return [fact for chunks in self.chunks.values() for chunk in chunks for fact in chunk.facts]


class Follower:
    """Gathers chunks, and hands groups of them on to `save`, which writes them and their cursors, all or
    nothing. A group is full with `events_max` events, or with `lines_max` lines; `new_group` makes one.

    An error of `save` loses the chunks taken: they are read again from the cursors that are stored.
    """

    def __init__(
        self,
        save: Callable[[Group], Awaitable[None]],
        events_max: int = GROUP_EVENTS_MAX,
        lines_max: float = math.inf,
        new_group: Callable[[], Group] = Group,
    ) -> None:
        self._new_group = new_group
        self._save = save
        self._events_max = events_max
        self._lines_max = lines_max
        self._group = new_group()

    def cursor(self, shard: int) -> Cursor | None:
        """The cursor after the waiting chunks of a shard; None if none are waiting."""
        chunks = self._group.chunks.get(shard)
        return chunks[-1].after if chunks else None

    async def take(self, chunk: Chunk) -> None:
        """Takes a chunk that follows the cursor; saves when the group is full, or does not take it."""
        if not self._group.takes(chunk.shard):
            await self.flush()
        self._group.add(chunk)
        if self._is_full(self._group):
            await self.flush()

    async def flush(self) -> None:
        """Saves the chunks taken."""
        group, self._group = self._group, self._new_group()
        if group.chunks:
            await self._save(group)

    async def follow(self, chunks: AsyncGenerator[Chunk, None], events: float = math.inf) -> None:
        """Saves the chunks of a source up to its end, or until they have `events` events or somewhat more.
        The next group is read while one is saved. If the journal contradicts itself, the chunks before are
        saved, and then Corrupt or Gap is raised.
        """
        async with aclosing(self._groups(chunks, events)) as groups:
            reading = asyncio.ensure_future(anext(groups, None))
            try:
                while (group := await reading) is not None:
                    reading = asyncio.ensure_future(anext(groups, None))
                    await self._save(group)
            finally:
                await end([reading])

    async def _groups(
        self, chunks: AsyncGenerator[Chunk, None], events: float
    ) -> AsyncGenerator[Group, None]:
        group, contradiction = self._new_group(), None
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if not group.takes(chunk.shard):
                        yield group
                        group = self._new_group()
                    group.add(chunk)
                    events -= chunk.after.seq - chunk.before.seq
                    if events <= 0:
                        break
                    if self._is_full(group):
                        yield group
                        group = self._new_group()
        except (Corrupt, Gap) as error:
            contradiction = error
        if group.chunks:
            yield group
        if contradiction is not None:
            raise contradiction

    def _is_full(self, group: Group) -> bool:
        return group.seqs >= self._events_max or group.lines >= self._lines_max


async def _always() -> bool:
    return True


async def poll_journal(
    kafka: str,
    journal: str,
    look: Callable[[JournalReader], Awaitable[None]],
    trouble: Trouble,
    is_wanted: Callable[[], Awaitable[bool]] = _always,
) -> NoReturn:
    """Calls `look` with a reader repeatedly, until cancelled. After trouble with a server, and when another
    process has moved a cursor, it waits, and continues with another reader. While `is_wanted` returns False,
    there is no connection to Kafka.
    """
    while True:
        try:
            if not await is_wanted():
                await asyncio.sleep(RETRY_SECONDS)
                continue
            async with open_reader(kafka, journal) as reader:
                while await is_wanted():
                    await look(reader)
                    trouble.over()
                    await asyncio.sleep(POLL_SECONDS)
        except CursorMoved as moved:
            log.info("%s; reading it again", moved)
            await asyncio.sleep(POLL_SECONDS)
        except BaseException as error:
            trouble.met(error)
            await asyncio.sleep(RETRY_SECONDS)
