"""Replay: reads a stretch of history into a sink. It writes no data of the system."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from grabstream.models.journal import Cursor
from grabstream.streams.history.chunks import Point, up_to
from grabstream.streams.history.sources import Source, Start, require_journal_end
from grabstream.streams.replaying.selection import Selection
from grabstream.streams.replaying.sinks import Sink

#: Called with the numbers of source units and events done since the last call.
ReportReplay = Callable[[int, int], None]


class Stretch(NamedTuple):
    """The part of a shard to read, both ends included."""

    shard: int
    first: Point | None = None
    last: Point | None = None


class Planned(NamedTuple):
    """A stretch, the start of its reading, and the number of source units from there to the end."""

    stretch: Stretch
    start: Start
    units: int


class Done(NamedTuple):
    """The progress of a shard: the cursor after the last event read, and the number of events that the
    destination lacked.
    """

    shard: int
    cursor: Cursor
    events: int


async def plan(
    source: Source,
    stretches: Sequence[Stretch],
    whole: bool,
    positions: Mapping[int, Cursor] = {},
) -> list[Planned]:
    """The start in each shard: at its cursor in `positions`, if any; else at the beginning, if `whole`; else
    near its first point.
    """
    planned = []
    for stretch in stretches:
        position = positions.get(stretch.shard)
        if position is not None and position != Cursor():
            start = await source.resume(stretch.shard, position)
        else:
            start = await source.start(stretch.shard, None if whole else stretch.first)
        planned.append(Planned(stretch, start, source.units(stretch.shard, start)))
    return planned


async def replay(
    source: Source,
    planned: Sequence[Planned],
    selection: Selection,
    sink: Sink,
    report: ReportReplay,
    done: dict[int, Done],
) -> None:
    """Writes the events of each shard to the sink, one shard after the other. `done` has the progress of each
    shard, also when the replay is stopped.

    Raises Corrupt or Gap if the source contradicts itself, and the errors of source and sink.
    """
    for stretch, start, units in planned:
        if source.name == "journal":
            require_journal_end(stretch.shard, start.cursor, start.end)
        done[stretch.shard] = Done(stretch.shard, start.cursor, 0)
        left = units
        # The selection also reads events before the first point, because it needs the grabs of users made
        # there.
        async with aclosing(up_to(source.chunks(stretch.shard, start), stretch.last)) as chunks:
            async for chunk in chunks:
                facts = selection.of(chunk.facts)
                if stretch.first is not None:
                    facts = [
                        fact for fact in facts if stretch.first.end_number(fact.event) >= stretch.first.value
                    ]
                if stretch.last is not None and selection.singles:
                    # The last line may be a run that continues after the last point. The cursor is after it.
                    facts = [fact for fact in facts if stretch.last.fact_number(fact) <= stretch.last.value]
                events = await sink.write(chunk, facts)
                done[stretch.shard] = Done(stretch.shard, chunk.after, done[stretch.shard].events + events)
                left -= chunk.read
                report(chunk.read, events)
        report(left, 0)
    await sink.flush()
