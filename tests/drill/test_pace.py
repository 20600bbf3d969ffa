"""A bound of the drill lasts as long as the machine is slow, and ends."""

import time

import pytest

from tests.drill.pace import SLOWNESS_MAX, slowness, until_paced


async def _never() -> bool:
    return False


async def _always() -> bool:
    return True


async def test_a_bound_is_as_many_times_longer_as_the_machine_is_slower() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"it did not happen within 0\.3 s of an idle machine"):
        await until_paced(_never, 0.3, "it", began, lambda: 4.0)
    assert time.monotonic() - began >= 0.3 * 4.0


async def test_time_before_the_wait_counts() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError):
        await until_paced(_never, 100, "it", began - 101, lambda: 1.0)
    await until_paced(_always, 100, "it", began - 101, lambda: 1.0)


def test_the_slowness_of_a_machine_has_bounds() -> None:
    assert 1 <= slowness() <= SLOWNESS_MAX
