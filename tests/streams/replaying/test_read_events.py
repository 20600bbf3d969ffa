"""`read_events`: programs read the events between any two points, from the journal or the audit trail."""

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest

from grabstream import AnyEvent, NoTrail, Point, Settings, read_events
from tests.streams.replaying.histories import RecordedSystem

SOURCES: tuple[Literal["journal", "audit"], ...] = ("journal", "audit")
#: Addresses where no server listens, by the source that does not need that server.
AWAY = {"journal": {"postgres": "postgresql://127.0.0.1:1/x"}, "audit": {"kafka": "127.0.0.1:1"}}


async def read(settings: Settings, **words: Any) -> list[AnyEvent]:
    return [event async for event in read_events(settings, **words)]


def time_of(at_ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)


@pytest.mark.parametrize("source", SOURCES)
async def test_read_events_returns_all_events_in_order_of_shards(
    recorded: RecordedSystem, source: str
) -> None:
    """Without the server of the other source."""
    settings = recorded.settings.model_copy(update=AWAY[source])
    expected = [event for shard in sorted(recorded.histories) for event in recorded.histories[shard].events]
    assert await read(settings, source=source) == expected
    assert await read(settings, source=source, shard=5) == recorded.histories[5].events
    assert await read(settings, source=source, shard=0) == []


@pytest.mark.parametrize("source", SOURCES)
async def test_read_events_includes_both_bounds(recorded: RecordedSystem, source: str) -> None:
    events = recorded.histories[2].events
    begin, end = len(events) // 3, 2 * len(events) // 3
    first, last = events[begin], events[end]
    by_seq = {"first": Point(seq=first.seq), "until": Point(seq=last.seq)}
    assert await read(recorded.settings, source=source, shard=2, **by_seq) == events[begin : end + 1]
    in_time = [
        event
        for shard in sorted(recorded.histories)
        for event in recorded.histories[shard].events
        if first.at <= event.at <= last.at
    ]
    by_time: dict[str, Any] = {"first": time_of(first.at), "until": time_of(last.at)}
    assert await read(recorded.settings, source=source, **by_time) == in_time
    by_ms = {"first": Point(at=first.at), "until": Point(at=last.at)}
    assert await read(recorded.settings, source=source, **by_ms) == in_time
    # Times between two milliseconds: `first` begins after the earlier one, `until` ends before the later one.
    later = timedelta(microseconds=1)
    inside = {"first": by_time["first"] + later, "until": by_time["until"] - later}
    assert await read(recorded.settings, source=source, **inside) == [
        event for event in in_time if first.at < event.at < last.at
    ]


@pytest.mark.parametrize("source", SOURCES)
async def test_read_events_reads_one_offer(recorded: RecordedSystem, source: str) -> None:
    history = recorded.histories[2]
    of_offer = [event for event in history.events if event.offer == history.envelope]
    assert await read(recorded.settings, source=source, offer=history.envelope) == of_offer
    middle = Point(seq=of_offer[len(of_offer) // 2].seq)
    assert await read(recorded.settings, source=source, offer=history.envelope, first=middle) == [
        event for event in of_offer if event.seq >= (middle.seq or 0)
    ]
    assert await read(recorded.settings, source=source, offer="nosuch") == []


async def test_read_events_reads_the_journal_from_its_beginning_without_postgresql(
    recorded: RecordedSystem, caplog: pytest.LogCaptureFixture
) -> None:
    settings = recorded.settings.model_copy(update=AWAY["journal"])
    events = recorded.histories[2].events
    middle = events[len(events) // 2]
    assert await read(settings, shard=2, first=Point(seq=middle.seq)) == events[len(events) // 2 :]
    assert "reading the journal from its beginning" in caplog.text


async def test_read_events_of_a_system_without_tables_raises_no_trail(settings: Settings) -> None:
    with pytest.raises(NoTrail, match="has no audit trail"):
        await read(settings, source="audit")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"first": Point(seq=1)}, "a seq counts within one shard"),
        ({"shard": 8}, "the system has 8 shards"),
        ({"offer": "a/b"}, "an id has"),
        ({"offer": "lunch", "shard": 0}, "leave out `shard`"),
        ({"until": datetime(2026, 11, 11)}, "until: a time needs a zone"),
        ({"first": Point()}, "first: give a Point either a seq or a time"),
        ({"first": Point(1, 2)}, "first: give a Point either a seq or a time"),
    ],
)
async def test_read_events_refuses_bounds_without_meaning(
    settings: Settings, words: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        await read(settings, **words)
