"""Every requirement has a test, or its row says that it is not built; every mark names a requirement."""

import pytest

from bench.__main__ import ROWS
from tests import requirements

#: Requirements that nothing meets yet.
NOT_BUILT = {"F12"}


@pytest.mark.long
def test_every_requirement_has_a_test() -> None:
    tested = {requirement for requirement, _ in requirements.marked()}
    rows = requirements.rows()
    assert {name for name, row in rows.items() if row.endswith(f"| {requirements.NOT_BUILT}")} == NOT_BUILT
    # Those that have no test, and marks that name no requirement.
    assert rows.keys() ^ tested == NOT_BUILT


def test_every_requirement_of_performance_names_the_rows_of_the_bench_that_measure_it() -> None:
    measured = requirements.measured()
    assert list(measured) == [f"P{number}" for number in range(1, 13)]
    assert [name for name, rows in measured.items() if not rows or not ROWS.keys() >= set(rows)] == []


@pytest.mark.parametrize(
    ("rows", "marks"),
    [
        ({"A1": "asked | here", "A2": "asked | here"}, ["A2"]),
        ({"A1": "asked | waits for more", "A2": "asked | here"}, ["A2"]),
        ({"A1": "asked | not built", "A2": "asked | here"}, ["A2"]),
        ({"A2": "asked | here"}, ["A1", "A2"]),
    ],
)
def test_a_requirement_without_a_test_fails_the_check(
    rows: dict[str, str], marks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    not_built = dict.fromkeys(NOT_BUILT, f"asked | {requirements.NOT_BUILT}")
    monkeypatch.setattr(requirements, "rows", lambda: {**rows, **not_built})
    monkeypatch.setattr(requirements, "marked", lambda: iter([(mark, "a test") for mark in marks]))
    with pytest.raises(AssertionError):
        test_every_requirement_has_a_test()
