"""Tests that fail by design, played by `tests/test_tiers.py`. The name of this file keeps them out of other
runs.
"""

import pytest


@pytest.fixture
def failing() -> None:
    raise LookupError("no such fixture")


@pytest.mark.parametrize("case", ["a 'b' $(c)"])
def test_fails(case: str) -> None:
    raise AssertionError("it fails by design")


def test_whose_fixture_fails(failing: None) -> None:
    pass


def test_passes() -> None:
    pass
