"""Every requirement has a test or states what it waits for, and every mark names a requirement."""

import pytest

from tests import requirements


@pytest.mark.long
def test_every_requirement_has_a_test() -> None:
    tested = {requirement for requirement, _ in requirements.marked()}
    rows = requirements.rows()
    assert len(rows) == 44
    assert tested <= set(rows)
    assert {name for name in rows.keys() - tested if requirements.WAITS not in rows[name]} == set()


def test_a_requirement_without_a_test_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "rows", lambda: {"A1": "asked | here", "A2": "asked | waits for more"})
    monkeypatch.setattr(requirements, "marked", lambda: iter([("A2", "a test")]))
    with pytest.raises(AssertionError):
        test_every_requirement_has_a_test()
