"""Every requirement has a test, and every mark names a requirement."""

import pytest

from bench.__main__ import ROWS
from tests import requirements


@pytest.mark.long
def test_every_requirement_has_a_test() -> None:
    tested = {requirement for requirement, _ in requirements.marked()}
    # Those that have no test, and marks that name no requirement.
    assert requirements.rows().keys() ^ tested == set()


def test_every_requirement_of_performance_names_the_rows_of_the_bench_that_measure_it() -> None:
    measured = requirements.measured()
    assert list(measured) == [f"P{number}" for number in range(1, 13)]
    assert [name for name, rows in measured.items() if not rows or not ROWS.keys() >= set(rows)] == []


@pytest.mark.parametrize(
    ("rows", "marks"),
    [
        ({"A1": "asked | here", "A2": "asked | here"}, ["A2"]),
        ({"A1": "asked | waits for more", "A2": "asked | here"}, ["A2"]),
        ({"A2": "asked | here"}, ["A1", "A2"]),
    ],
)
def test_a_requirement_without_a_test_fails_the_check(
    rows: dict[str, str], marks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "rows", lambda: rows)
    monkeypatch.setattr(requirements, "marked", lambda: iter([(mark, "a test") for mark in marks]))
    with pytest.raises(AssertionError):
        test_every_requirement_has_a_test()
