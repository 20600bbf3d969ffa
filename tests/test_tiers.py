"""Tiers of tests: what each plays, how durations are recorded, and that `make test` has a test of everything
that others rely on, none of them long without a reason. And the verdict of `.ci/run` over failed tests.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from grabstream.models.outcomes import OUTCOME_NAMES
from grabstream.ops.cli import grabstream
from tests import requirements
from tests.explore import searches
from tests.repeat import REPEATED_MAX, verdict
from tests.tiers import (
    DAY,
    EXPLORE,
    KEPT,
    LONG,
    NIGHTLY,
    PROJECT,
    SECONDS_MAX,
    TEST,
    Durations,
    Failure,
    is_played,
    longest_first,
    read_failures,
    tier_of,
)  # fmt: skip

# -- what each tier plays ------------------------------------------------------------------------------------


class Item:
    """A test as pytest collects it."""

    def __init__(self, nodeid: str, *marks: str, is_property: bool = False) -> None:
        self.nodeid = nodeid
        self._marks = marks
        self.obj = type("Test", (), {"is_hypothesis_test": is_property})

    def get_closest_marker(self, name: str) -> object:
        return name if name in self._marks else None


@pytest.mark.parametrize(
    ("item", "tiers"),
    [
        (Item("a"), {TEST, DAY, NIGHTLY}),
        (Item("a", is_property=True), {TEST, LONG, DAY, EXPLORE, NIGHTLY}),
        (Item("a", "long"), {LONG, DAY, NIGHTLY}),
        (Item("a", "long", "draws_cases"), {LONG, DAY, EXPLORE, NIGHTLY}),
        (Item("a", "nightly", is_property=True), {NIGHTLY}),
    ],
)
def test_each_tier_plays(item: Item, tiers: set[str]) -> None:
    assert {tier for tier in (TEST, LONG, DAY, EXPLORE, NIGHTLY) if is_played(item, tier)} == tiers


# -- what every change plays ---------------------------------------------------------------------------------


def test_no_test_of_every_change_is_long_without_a_reason(request: pytest.FixtureRequest) -> None:
    """A test that took too long each time, on a quiet machine: mark it `long`, make it shorter, or say by
    `every_change` why all have to wait for it.
    """
    durations = Durations()
    too_long = [
        f"{item.nodeid}: {durations.of_test(item.nodeid, TEST)} s"
        for item in request.session.items
        if tier_of(item) == TEST
        and durations.is_too_long(item.nodeid)
        and not item.get_closest_marker("every_change")
    ]
    assert too_long == []


def test_a_test_is_too_long_only_if_it_was_each_time(tmp_path: Path) -> None:
    durations = Durations(tmp_path / "durations.json")
    long, short = SECONDS_MAX + 1, SECONDS_MAX - 1
    for runs, expected in (
        ([long, long], False),
        ([long, short, long], False),
        ([short, *[long] * KEPT], True),
    ):
        (tmp_path / "durations.json").unlink(missing_ok=True)
        durations = Durations(tmp_path / "durations.json")
        for seconds in runs:
            durations.record(TEST, {"tests/a.py::b": seconds}, {})
        assert Durations(tmp_path / "durations.json").is_too_long("tests/a.py::b") is expected


#: Marks of the tiers that are played later.
_LATER = re.compile(r"^(?:@|pytestmark = .*)pytest\.mark\.(?:long|nightly)\b", re.MULTILINE)


@pytest.fixture(scope="module")
def source() -> str:
    """The tests that `make test` plays, and what they need, as one text."""
    pieces = []
    for path in sorted((PROJECT / "tests").rglob("test_*.py")):
        # Two empty lines are between definitions, and nowhere else.
        blocks = path.read_text(encoding="utf-8").split("\n\n\n")
        if not _LATER.search(blocks[0]):
            pieces += [block for block in blocks if not _LATER.search(block)]
    return "\n\n\n".join(pieces)


def verbs(group: click.Command, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every verb of the command line, with the groups that it is in."""
    if not isinstance(group, click.Group):
        yield before
        return
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield from verbs(command, (*before, name))


def test_every_verb_and_outcome_is_named_by_a_test_of_every_change(source: str) -> None:
    """Routes, views and commands have tests over all of them: `test_route_lets_in_who_may_and_nobody_else`,
    `test_every_view_and_column_is_commented_as_the_dictionary_says`, the vocabulary.
    """
    words = set(re.findall(r"[\"' ]([a-z][a-z_-]*)(?=[\"' ])", source))
    every = list(verbs(grabstream))
    assert len(every) > 60
    assert [verb for verb in every if not words.issuperset(verb)] == []
    assert set(OUTCOME_NAMES.values()) - words == set()


def test_every_requirement_has_a_test_of_every_change(source: str) -> None:
    marks = re.findall(r"^@pytest\.mark\.requirement\((.*)\)$", source, re.MULTILINE)
    tested = set(re.findall(r"[A-F][0-9]+", " ".join(marks)))
    # An example, boards, which `make lint` checks, and the loss of a master: their tests are long.
    assert requirements.rows().keys() - tested == {"F2", "F8", "F12"}
    assert tested


# -- durations -----------------------------------------------------------------------------------------------


def test_durations_are_those_of_the_last_runs(tmp_path: Path) -> None:
    """Short tests are counted together; tests that are not played any more are forgotten."""
    file = tmp_path / "durations.json"
    for seconds in (1.0, 2.0, 3.0, 4.0):
        played = {"tests/a.py::long": seconds, "tests/a.py::short": 0.2, "tests/b.py::moved": 9.0}
        Durations(file).record(TEST, played, {})
    Durations(file).record(TEST, {"tests/a.py::long": 5.0, "tests/a.py::short": 0.2}, {"tests/a.py": 0.1})
    Durations(file).record(LONG, {"tests/b.py::moved": 9.0}, {})
    durations = Durations(file)
    assert durations.of_test("tests/a.py::long", TEST) == [3.0, 4.0, 5.0]
    assert durations.of_test("tests/a.py::short", TEST) == []
    assert list(durations.files(TEST)) == [("tests/a.py", 2, 5.3)]
    assert list(durations.files(LONG)) == [("tests/b.py", 1, 9.0)]
    assert durations.slowest(TEST, 5) == [("tests/a.py::long", 5.0)]
    assert ' "long": [3.0, 4.0, 5.0]' in file.read_text(), "one test a line"


def test_a_test_that_became_short_is_counted_with_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "durations.json"
    for seconds in (2.0, 0.1, 0.1, 0.1):
        Durations(file).record(TEST, {"tests/a.py::one": seconds, "tests/a.py::other": 0.1}, {})
    assert Durations(file).of_test("tests/a.py::one", TEST) == []
    assert list(Durations(file).files(TEST)) == [("tests/a.py", 2, 0.2)]


def test_groups_that_take_longest_begin_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.tiers.DURATIONS", tmp_path / "durations.json")
    recorded = {"tests/a.py::1": 1.0, "tests/a.py::2": 1.0, "tests/b.py::1": 9.0, "tests/c.py::1": 0.7}
    Durations(tmp_path / "durations.json").record(TEST, recorded, {})
    items = [Item(f"tests/{name}") for name in ("a.py::1", "c.py::1", "new.py::1", "b.py::1", "a.py::2")]
    longest_first(items, lambda nodeid: nodeid.partition("::")[0], TEST)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == [
        f"tests/{name}" for name in ("new.py::1", "b.py::1", "a.py::1", "a.py::2", "c.py::1")
    ]


def test_the_table_of_tiers_can_be_read_by_programs() -> None:
    words = [sys.executable, "-m", "tests.tiers", "--json", "--slowest", "2"]
    printed = json.loads(subprocess.run(words, cwd=PROJECT, check=True, capture_output=True).stdout)
    totals = {row["tier"]: row for row in printed["tiers"] if row["folder"] == "all"}
    assert totals[TEST]["tests"] > 4_000
    assert [len(slowest) for slowest in printed["slowest"].values()] == [
        2 if tier in totals else 0 for tier in (TEST, LONG, NIGHTLY)
    ]


# -- failures are repeated once ------------------------------------------------------------------------------


def failures(count: int) -> list[Failure]:
    return [
        Failure(f"tests/a.py::test_{number}", f"assert {number}", [f"line {number}"])
        for number in range(count)
    ]


def test_a_test_that_passes_when_repeated_lands_and_is_named() -> None:
    code, lines = verdict(failures(2), lambda: 0, list)
    assert code == 0
    assert lines[0].startswith("passed only when repeated")
    assert lines[1:] == [
        "REPEATED tests/a.py::test_0 - assert 0", "    line 0",
        "REPEATED tests/a.py::test_1 - assert 1", "    line 1",
    ]  # fmt: skip


def test_a_test_that_fails_twice_fails_the_run_and_its_assertion_is_said() -> None:
    again = failures(1)
    code, lines = verdict(failures(2), lambda: 1, lambda: again)
    assert code == 1
    assert lines == ["failed twice:", "FAILED tests/a.py::test_0 - assert 0"]


def test_too_many_failures_fail_the_run_without_a_repetition() -> None:
    code, lines = verdict(failures(REPEATED_MAX + 1), lambda: pytest.fail("repeated"), list)
    assert code == 1
    assert lines[1:] == [f"FAILED {one.nodeid} - {one.assertion}" for one in failures(REPEATED_MAX + 1)]


@pytest.mark.parametrize("code", [2, 3, 5, 130])
def test_a_repetition_that_does_not_end_well_fails_the_run(code: int) -> None:
    assert verdict(failures(1), lambda: code, list)[0] == 1


def test_a_run_that_failed_without_a_failed_test_fails() -> None:
    assert verdict([], lambda: pytest.fail("repeated"), list)[0] == 1


@pytest.mark.every_change("the gate relies on it")
def test_a_run_leaves_its_failed_tests_and_they_can_be_repeated(tmp_path: Path) -> None:
    """With an id that shells and make would change."""
    cases = PROJECT / "tests" / "support" / "failing_cases.py"
    words = [sys.executable, "-m", "pytest", "-n0", "-q", "-o", f"cache_dir={tmp_path}"]

    # Not as a process of the run that plays this test.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}

    def play(*more: str) -> int:
        return subprocess.run(
            [*words, *more], cwd=PROJECT, env=environment, capture_output=True, timeout=240
        ).returncode

    assert play(str(cases)) == 1
    folder = tmp_path / "d" / "failed"
    [first, second] = read_failures(folder / "failed.json")
    assert (first.nodeid, first.assertion) == (
        "tests/support/failing_cases.py::test_fails[a 'b' $(c)]", "AssertionError: it fails by design",
    )  # fmt: skip
    assert any("it fails by design" in line for line in first.lines)
    assert (second.nodeid, "no such fixture" in second.assertion) == (
        "tests/support/failing_cases.py::test_whose_fixture_fails", True,
    )  # fmt: skip
    (folder / "ids.txt").write_text(f"{first.nodeid}\ntests/support/failing_cases.py::test_passes\n")
    assert play(f"@{folder / 'ids.txt'}") == 1
    assert [one.nodeid for one in read_failures(folder / "failed.json")] == [first.nodeid]


# -- exploring -----------------------------------------------------------------------------------------------


def test_exploring_shares_its_time_and_draws_other_seeds_each_time() -> None:
    one, other = searches(600), searches(600)
    assert sum(search.share for search in one) == pytest.approx(1)
    assert [search.name for search in one] == ["simulation", "protocol", "tests"]
    assert [search.words for search in one[:2]] != [search.words for search in other[:2]]
