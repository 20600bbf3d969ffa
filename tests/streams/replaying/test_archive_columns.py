"""The columns of an archive: read from the texts of lines, and from decoded events, they are the same."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from grabstream.models.calendar import DAY_MS
from grabstream.models.journal import GENESIS, Corrupt, chain
from grabstream.models.runs import decode_line
from grabstream.streams.history import sources
from grabstream.streams.replaying.archive_columns import (
    COLUMN_NAMES,
    EventPart,
    from_events,
    from_texts,
    table_of,
)
from tests.models import test_golden_events as golden
from tests.support.random_history import NOW, random_history
from tests.support.runs import as_lines, as_runs


def part(lines: Sequence[bytes]) -> EventPart:
    """Lines that follow each other, with what the journal says of them."""
    events = [decode_line(line) for line in lines]
    last_seqs = [event.last_seq for event in events]
    return EventPart.of(events[0].shard, events[0].seq - 1, lines, chain(GENESIS, lines), last_seqs)


def text(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


def following(lines: Sequence[bytes]) -> list[bytes]:
    """The lines, numbered as if each followed the one before."""
    numbered, seq = [], 1
    for line in lines:
        numbered.append(text(json.loads(line) | {"seq": seq}))
        seq = decode_line(numbered[-1]).last_seq + 1
    return numbered


def assert_same(lines: Sequence[bytes]) -> Any:
    """Lines that follow each other give the same table in both ways."""
    given = part(lines)
    read, made = from_texts(given), from_events(given)
    assert read is not None
    assert read.schema == made.schema
    assert tuple(read.column_names) == COLUMN_NAMES
    for name in COLUMN_NAMES:
        assert read.column(name).to_pylist() == made.column(name).to_pylist(), name
    return read


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_of_a_random_history(seed: int) -> None:
    lines = random_history(seed, 400, NOW - 1_000 * DAY_MS).lines
    assert_same(as_lines(lines))
    assert_same(as_runs(lines))
    assert table_of(part(as_runs(lines))).num_rows == len(as_runs(lines))


def golden_lines() -> list[bytes]:
    paths = sorted(golden.FOLDER.glob("*.json"))
    return as_lines(json.loads(path.read_text())["line"].encode() for path in paths)


def test_of_every_golden_event() -> None:
    lines = golden_lines()
    assert len(lines) >= len(golden.VERSIONS)
    assert_same(following(lines))
    for line in lines:
        assert_same([line])


RUN = {
    "type": "grab.held", "v": 2, "shard": 3, "seq": 41, "offer_seq": 7, "offer": "e", "at": 1_800_000_000_123,
    "grabs": ["g-1", "g-2"], "users": ["ann", "bob"], "asset": "CNY", "place": 5, "left": 9,
    "deadline_at": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"quantities": [2, 3]},
        {"amounts": [120, 10**13]},
        {"quantities": [2, 3], "amounts": [4, 5], "currency": "CNY", "price": 7, "command": "c"},
        {"metadata": [{"a": 'ü " \\ \u2028'}, None], "attributes": [{"type": "x"}, None], "unknown": [[{}]]},
    ],
)
def test_of_runs(more: dict[str, Any]) -> None:
    lines = following([text(RUN | more), text(RUN), *golden_lines()])
    assert_same(lines)
    assert_same(lines[:1])
    assert_same(lines[:2])
    assert_same(following([lines[2], lines[0]]))


def test_absent_values_are_those_of_the_decoded_event() -> None:
    """`paid` is 0 where the text leaves it out."""
    line = next(line for line in golden_lines() if b'"grab.confirmed"' in line)
    event = json.loads(line)
    del event["paid"]
    assert assert_same([text(event)]).column("paid").to_pylist() == [0]


def test_other_versions_are_made_from_decoded_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upcaster may rename a field: the text does not say what the event has."""
    line = next(line for line in golden_lines() if b'"grab.redeemed"' in line)
    older = line.replace(b'"v":1', b'"v":7').replace(b'"grab"', b'"got"')
    assert older != line
    given = part([line])._replace(text=older)
    assert from_texts(given) is None
    monkeypatch.setattr(sources, "decode_lines", lambda _: [decode_line(line)])
    assert table_of(given).column("grabs").to_pylist() == [["g-1"]]


RUN_LINE = text(RUN)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([RUN_LINE.replace(b'"shard":3', b'"shard":4')], "has other numbers"),
        ([RUN_LINE.replace(b'"seq":41', b'"seq":42')], "has other numbers"),
        ([RUN_LINE.replace(b'"ann","bob"', b'"ann"')], "1 values for 2 grabs"),
        ([RUN_LINE.replace(b'"ann"', b"null")], "Expected `str`, got `null`"),
        ([text(RUN | {"grabs": ["g"], "users": ["ann"]})], "carry other numbers"),
        ([RUN_LINE.replace(b'"offer":"e",', b"")], "missing required field `offer`"),
        ([RUN_LINE.replace(b'"v":2', b'"v":9')], "newer"),
        ([RUN_LINE.replace(b'"ann"', b'"\xff"')], "cannot be decoded"),
        ([RUN_LINE.replace(b'"place":5', b'"place":%d' % 2**63)], "a line of those from seq 41 on: "),
        ([RUN_LINE + RUN_LINE, b""], "cannot be decoded"),
        ([b"", RUN_LINE], "cannot be decoded"),
        ([RUN_LINE.replace(b'"seq"', b'\n"seq"')], "is two lines"),
    ],
)
def test_a_line_that_contradicts_its_place_is_refused(lines: list[bytes], why: str) -> None:
    """Though the chain of hashes takes it."""
    with pytest.raises(Corrupt, match=why):
        table_of(EventPart.of(3, 40, lines, chain(GENESIS, lines), [42, 43][: len(lines)]))


@pytest.mark.parametrize("line", [b"{", RUN_LINE.replace(b'"offer":"e",', b""), b"null"])
def test_a_line_that_was_set_aside_has_its_place_hash_and_text_only(line: bytes) -> None:
    """The others have all columns."""
    lines = [RUN_LINE.replace(b'"seq":41', b'"seq":%d' % seq) for seq in (41, 43, 45)]
    lines[1] = line
    given = EventPart.of(3, 40, lines, chain(GENESIS, lines), [42, 44, 46], [43])
    rows = table_of(given).to_pylist()
    assert [row["seq"] for row in rows] == [41, 43, 45]
    assert [row["body"].encode() for row in rows] == lines
    assert [row["hash"] for row in rows] == chain(GENESIS, lines)
    assert {name for name, value in rows[1].items() if value is not None} == {"seq", "seqs", "hash", "body"}
    assert [rows[0][name] for name in ("seqs", "type", "users")] == [
        rows[2][name] for name in ("seqs", "type", "users")
    ]
    assert rows[1]["seqs"] == rows[0]["seqs"] == 2
    with pytest.raises(Corrupt, match="Once it is set aside"):
        table_of(given._replace(set_aside=(45,)))


def test_a_missing_line_is_noticed() -> None:
    lines = as_runs(random_history(5, 50, NOW).lines)
    given = part(lines)
    assert table_of(given).num_rows == len(lines)
    without = [*lines[:4], *lines[5:]]
    with pytest.raises(Corrupt, match="the text of seq 5 has other numbers"):
        table_of(part(without))
