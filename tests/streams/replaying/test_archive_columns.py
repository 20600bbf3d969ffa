"""The columns of an archive: read from the texts of lines, and from decoded events, they are the same."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from grabstream.models.calendar import DAY_MS
from grabstream.models.journal import GENESIS, Corrupt, chain
from grabstream.models.runs import decode_line
from grabstream.projections.cursors import Fact, facts_of
from grabstream.streams.replaying.archive_columns import COLUMN_NAMES, from_events, from_texts, table_of
from tests.models import test_golden_events as golden
from tests.support.random_history import NOW, random_history
from tests.support.runs import as_lines, as_runs


def facts(lines: Sequence[bytes]) -> list[Fact]:
    return facts_of(lines, chain(GENESIS, lines), [decode_line(line) for line in lines])


def assert_same(lines: Sequence[bytes]) -> Any:
    given = facts(lines)
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
    assert table_of(facts(as_runs(lines))).num_rows == len(as_runs(lines))


def golden_lines() -> list[bytes]:
    paths = sorted(golden.FOLDER.glob("*.json"))
    return as_lines(json.loads(path.read_text())["line"].encode() for path in paths)


def test_of_every_golden_event() -> None:
    lines = golden_lines()
    assert len(lines) >= len(golden.VERSIONS)
    assert_same(lines)
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
    lines = [json.dumps(RUN | more).encode(), *golden_lines()]
    assert_same(lines)
    assert_same(lines[:1])
    assert_same([lines[1], lines[0]])


def test_absent_values_are_those_of_the_decoded_event() -> None:
    """`paid` is 0 where the text leaves it out."""
    line = next(line for line in golden_lines() if b'"grab.confirmed"' in line)
    event = json.loads(line)
    del event["paid"]
    assert assert_same([json.dumps(event).encode()]).column("paid").to_pylist() == [0]


def test_other_versions_are_made_from_decoded_events() -> None:
    """An upcaster may rename a field: the text does not say what the event has."""
    [fact] = facts([next(line for line in golden_lines() if b'"grab.redeemed"' in line)])
    newer = fact._replace(line=fact.line.replace(b'"v":1', b'"v":7').replace(b'"grab"', b'"got"'))
    assert newer.line != fact.line
    assert from_texts([newer]) is None
    assert table_of([newer]).column("grabs").to_pylist() == [["g-1"]]


def test_a_missing_line_is_noticed() -> None:
    given = facts(as_runs(random_history(5, 50, NOW).lines))
    assert table_of(given).num_rows == len(given)
    with pytest.raises(Corrupt, match="lines are missing after seq 1 "):
        table_of([*given[:4], *given[5:]])
