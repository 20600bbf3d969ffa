"""The verdict on `grab.events`: what the publisher wrote has no problem, and each damage is named, alone."""

from collections.abc import Callable
from functools import partial

import pytest

from grabstream.settings import Settings
from grabstream.streams.journal import open_reader
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal import published, stage
from grabstream.workshop.rehearsal.published import (
    NAME,
    PublishedRecord,
    compare_published,
    journal_events,
    published_check,
    published_records,
)
from tests.conftest import until
from tests.support.projecting import (
    LINES,
    SHARD,
    JournalWriter,
    catching_up,
    journal,  # noqa: F401 - a fixture
)

Records = list[PublishedRecord]


async def publish(system: Settings, journal: JournalWriter, *reach: int) -> None:
    """Writes events up to each of these seqs to the journal, and publishes them with one cursor each."""
    first = 1
    await journal.marker(1, "a")
    async with open_reader(system.kafka, Topics(system.prefix).events) as reader:
        for last in reach:
            await journal.block(LINES, first, last)
            async with catching_up(system, "events"):

                async def is_published(last: int = last) -> bool:
                    return await reader.end(SHARD) >= last

                await until(is_published, 20, f"event {last}")
            first = last + 1


def no_stage() -> None:
    """No process of a rehearsal can have ended."""


@pytest.mark.long
async def test_what_was_published_is_compared_with_the_journal(
    system: Settings, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(system, journal, 4, 10)
    check = await published_check(system, no_stage)
    assert (check.name, check.checked, check.of_what) == (NAME, 10, "events")
    assert (check.problems, check.notes) == ([], [])

    # Nothing is published any more: what is missing is named when nothing has moved for long.
    await journal.block(LINES, 11, 12)
    topic = Topics(system.prefix).events
    await journal._producer.send_and_wait(topic, b"{}", partition=SHARD, headers=[("ce_id", b"other")])
    monkeypatch.setattr(stage, "STILL_SECONDS", 0.01)
    monkeypatch.setattr(published, "POLL_SECONDS", 0.01)
    assert (await published_check(system, no_stage)).problems == [
        f"shard {SHARD}: other, at offset 10 of grab.events, is not in the journal",
        f"shard {SHARD}: {SHARD}-11 is in the journal, and not on grab.events",
        f"shard {SHARD}: {SHARD}-12 is in the journal, and not on grab.events",
    ]


def without(seq: int, records: Records) -> Records:
    return [record for record in records if record.id != f"{SHARD}-{seq}"]


def again(first: int, last: int, at: int, records: Records) -> Records:
    """Repeats events after `at` records."""
    return [*records[:at], *records[first - 1 : last], *records[at:]]


def late(seq: int, records: Records) -> Records:
    return [*without(seq, records), records[seq - 1]]


def changed(seq: int, records: Records, **fields: object) -> Records:
    return [record._replace(**fields) if record.id == f"{SHARD}-{seq}" else record for record in records]


DAMAGES: dict[str, tuple[Callable[[Records], Records], list[str]]] = {
    "an event is missing": (
        partial(without, 5), [f"{SHARD}-5 is in the journal, and not on grab.events"],
    ),
    "the last event is missing": (
        partial(without, 10), [f"{SHARD}-10 is in the journal, and not on grab.events"],
    ),
    "an event is there twice": (partial(again, 7, 7, 10), [f"{SHARD}-7 is on grab.events more than once"]),
    "an event is there twice in a row": (
        partial(again, 2, 2, 2), [f"{SHARD}-2 is on grab.events more than once"],
    ),
    "who repeats from a cursor does not come to the end": (
        partial(again, 5, 6, 10),
        [f"{SHARD}-5 is on grab.events more than once", f"{SHARD}-6 is on grab.events more than once"],
    ),
    "an event is there after later ones": (
        partial(late, 3), [f"{SHARD}-3 is on grab.events after later events"],
    ),
    "an event has another text": (
        partial(changed, 8, line=b"{}"), [f"{SHARD}-8 has another text on grab.events than in the journal"],
    ),
    "an event is of another shard": (
        partial(changed, 9, id="0-9"),
        [
            "0-9, at offset 8 of grab.events, is not in the journal",
            f"{SHARD}-9 is in the journal, and not on grab.events",
        ],
    ),
}  # fmt: skip


async def test_each_damage_is_named(system: Settings, journal: JournalWriter) -> None:
    await publish(system, journal, 4, 10)
    async with open_reader(system.kafka, Topics(system.prefix).journal) as reader:
        lines = {SHARD: await journal_events(reader, SHARD)}
        records = await published_records(reader.for_topic(Topics(system.prefix).events), SHARD)
    assert [record.has_cursor for record in records] == [number in (4, 10) for number in range(1, 11)]
    assert compare_published(lines, {SHARD: records}).passed
    for name, (damage, says) in DAMAGES.items():
        problems = compare_published(lines, {SHARD: damage(records)}).problems
        assert problems == [f"shard {SHARD}: {what}" for what in says], name

    # A publisher that starts again continues after a cursor, or at the beginning.
    for first in (1, 5):
        check = compare_published(lines, {SHARD: again(first, 10, 10, records)})
        repeated = f"{11 - first} repeated by a publisher that started again"
        assert (check.passed, check.notes) == (True, [repeated])
