"""Past events for programs, in order, from the journal, the audit trail or an archive, with a cursor that the
program keeps.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from grabstream.connections.event_sources import open_history
from grabstream.connections.opening import check_system
from grabstream.models.bounds import counted
from grabstream.models.events import AnyEvent
from grabstream.models.identifiers import campaign_of, is_id, shard_of
from grabstream.models.journal import Cursor
from grabstream.models.runs import AnyLine, singles
from grabstream.ops.event_cursor import EventCursor
from grabstream.projections.cursors import Fact
from grabstream.settings import Settings
from grabstream.streams.follower import Chunk
from grabstream.streams.history.chunks import Point, up_to
from grabstream.streams.history.sources import require_journal_end
from grabstream.streams.replaying.replay import Stretch, plan
from grabstream.streams.replaying.selection import Selection, Wanted

log = logging.getLogger(__name__)
T = TypeVar("T")

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)

Bound: TypeAlias = Point | datetime | None
SourceName: TypeAlias = Literal["journal", "audit", "archive"]


class JournalLine(NamedTuple):
    """A line of the journal: its bytes, the hash of the chain after it, and its event, which is a run if the
    line grants or holds. The line takes the seqs from `seq` to `last_seq` of its shard.
    """

    shard: int
    seq: int
    last_seq: int
    text: bytes
    hash: bytes
    event: AnyLine


class _Asked(NamedTuple):
    """What a program wants to read, checked."""

    shards: list[int]
    wanted: Wanted
    first: Point | None
    until: Point | None
    source: str
    archive: Path | str | None
    cursor: EventCursor


async def read_events(
    settings: Settings,
    *,
    shard: int | None = None,
    offer: str | None = None,
    user: str | None = None,
    first: Bound = None,
    until: Bound = None,
    source: SourceName = "journal",
    archive: Path | str | None = None,
    cursor: EventCursor | None = None,
) -> AsyncGenerator[AnyEvent, None]:
    """The events of all shards, of one `shard`, or of one `offer`, from `first` to `until` inclusive; those
    about one `user`.

    Yields each event exactly once: one shard after the other, within a shard in order. A run of grabs is
    yielded grab by grab, each as on `grab.events`. Events of older versions are raised to the current
    version. Ends at the last event that existed when reading began. Every line is verified by the chain of
    hashes before it is handed on. Changes nothing in the system.

    `first` and `until` are times with a zone, or a `Point`. `Point(at=…)` is a time in milliseconds since
    1970 UTC; it is compared with the times of the events. `Point(seq=…)` is an event, and needs a `shard` or
    an `offer`.

    Reading begins at `cursor`, which is moved before each event is handed on: a program that stores
    `cursor.encode()` with its results reads from there with `EventCursor.decode`, without a gap or a repeat.

    `source` is the journal in Kafka, or the audit trail in PostgreSQL, or `archive`: the directory or the
    address (`s3://bucket/prefix`) `archive` that `grabstream export` has written, and the journal after it.
    The audit trail needs no Kafka, and lags by some milliseconds. If the journal is not read from its
    beginning or from a cursor, it is compared with the audit trail; without PostgreSQL it is read from its
    beginning, and events before `first` are skipped. With `user`, every shard is read from its beginning: a
    refund names a grab, not always its user.

    A caller that stops early must close the generator, which closes the connections: `async with
    aclosing(read_events(settings)) as events: …`.

    Raises ValueError for arguments that do not fit together and for a cursor of another system, BadSettings
    when the servers belong to another system, NoTrail when the schema has no audit trail, Corrupt or Gap when
    the source contradicts itself or ends before the cursor, and the errors of the Kafka and PostgreSQL
    clients.
    """
    asked = _asked(settings, shard, offer, user, first, until, source, archive, cursor)
    async with aclosing(_read(settings, asked, _events)) as lists:
        async for found in lists:
            for number, event, seq, after in found:
                asked.cursor.move(number, seq, after)
                yield event


async def read_lines(
    settings: Settings,
    *,
    shard: int | None = None,
    offer: str | None = None,
    first: Bound = None,
    until: Bound = None,
    source: SourceName = "journal",
    archive: Path | str | None = None,
    cursor: EventCursor | None = None,
) -> AsyncGenerator[JournalLine, None]:
    """The same history as `read_events`, by whole lines, byte for byte as journaled. A line at a bound is
    read whole. `cursor` is moved after each line.
    """
    asked = _asked(settings, shard, offer, None, first, until, source, archive, cursor)
    async with aclosing(_read(settings, asked, _lines)) as lists:
        async for found in lists:
            for number, line, seq, after in found:
                asked.cursor.move(number, seq, after)
                yield line


def read_events_sync(
    settings: Settings,
    *,
    shard: int | None = None,
    offer: str | None = None,
    user: str | None = None,
    first: Bound = None,
    until: Bound = None,
    source: SourceName = "journal",
    archive: Path | str | None = None,
    cursor: EventCursor | None = None,
) -> Generator[AnyEvent, None, None]:
    """`read_events` for programs without asyncio: the same arguments, events, cursor and errors.

    Raises RuntimeError in a running event loop, such as that of a notebook: use `read_events` there.
    """
    asked = _asked(settings, shard, offer, user, first, until, source, archive, cursor)
    yield from _sync(settings, asked, _events)


def read_lines_sync(
    settings: Settings,
    *,
    shard: int | None = None,
    offer: str | None = None,
    first: Bound = None,
    until: Bound = None,
    source: SourceName = "journal",
    archive: Path | str | None = None,
    cursor: EventCursor | None = None,
) -> Generator[JournalLine, None, None]:
    """`read_lines` for programs without asyncio; see `read_events_sync`."""
    asked = _asked(settings, shard, offer, None, first, until, source, archive, cursor)
    yield from _sync(settings, asked, _lines)


def _sync(settings: Settings, asked: _Asked, items: "_Items[T]") -> Generator[T, None, None]:
    with _loop() as run, _closing(run, _read(settings, asked, items)) as lists:
        # One step of the event loop reads a list, so the loop costs little for each event.
        while (found := run(anext(lists, None))) is not None:
            for number, item, seq, after in found:
                asked.cursor.move(number, seq, after)
                yield item


@contextmanager
def _loop() -> Iterator[Callable[[Any], Any]]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError("an event loop is running here: use read_events or read_lines, which are async")
    with asyncio.Runner() as runner:

        async def awaited(work: Any) -> Any:
            return await work

        yield lambda work: runner.run(awaited(work))


@contextmanager
def _closing(run: Callable[[Any], Any], lists: AsyncGenerator[T, None]) -> Iterator[AsyncGenerator[T, None]]:
    """Closes an asynchronous generator at the end, by `run`."""
    try:
        yield lists
    finally:
        run(lists.aclose())


# -- reading -------------------------------------------------------------------------------------------------

_Items: TypeAlias = Callable[[Fact, Selection], "list[tuple[T, int]]"]


def _events(fact: Fact, selection: Selection) -> list[tuple[AnyEvent, int]]:
    """The wanted events of a line, each with its seq."""
    return [(event, event.seq) for wanted in selection.of([fact]) for event in singles(wanted.event)]


def _lines(fact: Fact, selection: Selection) -> list[tuple[JournalLine, int]]:
    """The line, if it is wanted, with its last seq."""
    event: Any = fact.event  # of a line, not of a single grab
    line = JournalLine(event.shard, event.seq, event.last_seq, fact.line, fact.hash, event)
    return [(line, event.last_seq)] if selection.of([fact]) else []


async def _read(
    settings: Settings, asked: _Asked, items: "_Items[T]"
) -> AsyncGenerator[list[tuple[int, T, int, Cursor]], None]:
    """The items in lists, as read: shard, item, and the position after it."""
    identity = await check_system(settings, journal=asked.source != "audit")
    asked.cursor.require_system(settings.prefix, settings.shards, identity.journal if identity else None)
    # To select by user, a shard is read from its beginning: see Selection.
    known = {} if asked.wanted.users else asked.cursor.positions()
    seeks = asked.first is not None and not asked.wanted.users
    stretches = [Stretch(number, asked.first, asked.until) for number in asked.shards]
    async with open_history(settings, asked.source, seeks, log.warning, asked.archive) as source:
        for planned in await plan(source, stretches, not seeks, known):
            shard = planned.stretch.shard
            if asked.source == "journal":
                require_journal_end(shard, planned.start.cursor, planned.start.end)
            selection = Selection(asked.wanted, offer_events=False)
            async with aclosing(up_to(source.chunks(shard, planned.start), asked.until)) as chunks:
                async for chunk in chunks:
                    yield _chunk_items(chunk, asked, selection, items)
                    seq, line = _after_chunk(chunk, asked.until if items is _events else None)
                    if seq >= asked.cursor.seq(shard):
                        asked.cursor.move(shard, seq, line)


def _chunk_items(
    chunk: Chunk, asked: _Asked, selection: Selection, items: "_Items[T]"
) -> list[tuple[int, T, int, Cursor]]:
    taken = asked.cursor.seq(chunk.shard)
    whole_lines = items is _lines
    found: list[tuple[int, T, int, Cursor]] = []
    before = chunk.before
    for fact in chunk.facts:
        # The offset stays at the record: a reader that resumes here needs the rest of it.
        after = chunk.before._replace(seq=fact.event.last_seq, head=fact.hash)
        for item, seq in items(fact, selection):
            if seq > taken and (whole_lines or _is_within(item, asked.first, asked.until)):
                found.append((chunk.shard, item, seq, after if seq == fact.event.last_seq else before))
        before = after
    if whole_lines and asked.first is not None:
        start = asked.first
        found = [one for one in found if start.end_number(one[1].event) >= start.value]  # type: ignore[attr-defined]
    return found


def _after_chunk(chunk: Chunk, until: Point | None) -> tuple[int, Cursor]:
    """The position after a chunk: of its last run, events after `until` are not handed on."""
    if until is None or until.seq is None or chunk.after.seq <= until.seq:
        return chunk.after.seq, chunk.after
    before = chunk.before
    if len(chunk.facts) > 1:
        last_but_one = chunk.facts[-2]
        before = before._replace(seq=last_but_one.event.last_seq, head=last_but_one.hash)
    return max(until.seq, before.seq), before


def _is_within(event: Any, first: Point | None, until: Point | None) -> bool:
    if first is not None and first.event_number(event) < first.value:
        return False
    return until is None or until.event_number(event) <= until.value


# -- the request ->-----------------------------------------------------------------------------------------


def _asked(
    settings: Settings, shard: int | None, offer: str | None, user: str | None, first: Bound, until: Bound,
    source: str, archive: Path | str | None, cursor: EventCursor | None,
) -> _Asked:  # fmt: skip
    start, end = _point("first", first), _point("until", until)
    shards = _shards(settings, shard, offer)
    if user is not None and not is_id(user):
        raise ValueError(f"user {user!r}: an id has 1 to 64 of the characters A-Z a-z 0-9 . _ : -")
    if len(shards) > 1 and any(point is not None and point.seq is not None for point in (start, end)):
        raise ValueError("a seq counts within one shard: give a `shard` or an `offer`, or use times")
    if (source == "archive") != (archive is not None):
        raise ValueError('archive: give a directory or an address together with source="archive"')
    wanted = Wanted(() if offer is None else (offer,), () if user is None else (user,))
    return _Asked(shards, wanted, start, end, source, archive, EventCursor() if cursor is None else cursor)


def _shards(settings: Settings, shard: int | None, offer: str | None) -> list[int]:
    if shard is not None and not 0 <= shard < settings.shards:
        raise ValueError(
            f"shard {shard}: the system has {counted(settings.shards, 'shards')}, numbered from 0"
        )
    if offer is None:
        return list(range(settings.shards)) if shard is None else [shard]
    if not is_id(offer):
        raise ValueError(f"offer {offer!r}: an id has 1 to 64 of the characters A-Z a-z 0-9 . _ : -")
    offer_shard = shard_of(campaign_of(offer), settings.shards)
    if shard not in (None, offer_shard):
        raise ValueError(f"offer {offer} is in shard {offer_shard}, not {shard}: leave out `shard`")
    return [offer_shard]


def _point(name: str, bound: Bound) -> Point | None:
    """A bound as a point. Events have whole milliseconds: a `first` is rounded up, an `until` down."""
    if bound is None:
        return None
    if isinstance(bound, datetime):
        if bound.utcoffset() is None:
            raise ValueError(f"{name}: a time needs a zone, such as datetime.now(UTC)")
        elapsed = bound - _EPOCH
        return Point(at=-(-elapsed // _MS) if name == "first" else elapsed // _MS)
    if (bound.seq is None) == (bound.at is None):
        raise ValueError(f"{name}: give a Point either a seq or a time, not both or none")
    return bound
