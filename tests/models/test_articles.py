"""Errors of published methods of splitting an envelope, as checks that fail for these methods and pass for
ours.

The published methods are implemented here as the articles describe them, to show that the checks can fail.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grabstream.models.splitting import LAWS, next_part, split_ahead

Split = Callable[[int, int, int, int], list[int]]


def ours(law: Any, drawn: str) -> Split:
    """A function from (total, parts, min, number of the run) to the parts by place."""

    def split(total: int, parts: int, least: int, number: int) -> list[int]:
        seed = f"{number:032x}"
        if drawn == "ahead":
            return split_ahead(law, total, parts, least, total, seed)
        amounts: list[int] = []
        for place in range(1, parts + 1):
            amounts.append(next_part(law, total - sum(amounts), parts - place + 1, least, total, seed, place))
        return amounts

    return split


OURS = {f"{law}, {drawn}": ours(law, drawn) for law in LAWS for drawn in ("ahead", "at_grab")}


def double_mean_of_003(total: int, parts: int, least: int, number: int) -> list[int]:
    """Uniform from one cent to twice the mean of the rest; the last part is the rest, whatever it is."""
    chance, amounts, left = random.Random(number), list[int](), total
    for others in range(parts - 1, 0, -1):
        amounts.append(chance.randint(1, max(2 * left // (others + 1), 1)) if left > 0 else 0)
        left -= amounts[-1]
    return [*amounts, left]


def bounded_of_001(total: int, parts: int, least: int, number: int) -> list[int]:
    """Uniform from the minimum to the mean of what the minimums of the other parts leave; the last part is
    the rest. For one part, it returns no part.
    """
    chance, amounts, left = random.Random(number), list[int](), total
    for others in range(parts - 1, 0, -1):
        amounts.append(chance.randint(least, max((left - others * least) // others, least)))
        left -= amounts[-1]
    return [*amounts, left] if amounts else []


# -- 003 -----------------------------------------------------------------------------------------------------

RUNS = 2_000


def runs_with_nothing(split: Split, total: int, parts: int) -> int:
    """The number of runs with a part of 0 or less."""
    return sum(min(split(total, parts, 1, number)) < 1 for number in range(RUNS))


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("total", "parts"), [(20, 10), (10, 10), (11, 10), (3, 2)])
def test_003_every_part_has_an_amount(name: str, total: int, parts: int) -> None:
    """Twenty cents in ten parts, and less."""
    assert runs_with_nothing(OURS[name], total, parts) == 0


def test_003_published_form_makes_empty_parts() -> None:
    assert runs_with_nothing(double_mean_of_003, 20, 10) > RUNS / 10


def test_003_part_is_between_one_cent_and_twice_the_mean_of_the_rest() -> None:
    """Parts drawn at the grab use the whole range, and exceed it at most by one cent of a remainder."""
    split = ours("double_mean", "at_grab")
    seen = {split(200, 10, 1, number)[0] for number in range(RUNS)}
    assert seen == set(range(1, 40))
    for number in range(300):
        left = 1_000
        for place, amount in enumerate(split(1_000, 10, 1, number)[:-1]):
            mean, rest = divmod(left, 10 - place)
            assert 1 <= amount <= 2 * mean - 1 + (rest > 0)
            left -= amount


# -- 001 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("total", [1, 10**13])
def test_001_one_part_is_the_sum(name: str, total: int) -> None:
    assert {tuple(OURS[name](total, 1, 1, number)) for number in range(100)} == {(total,)}


def test_001_published_form_loses_a_single_part() -> None:
    assert bounded_of_001(77, 1, 1, 0) == []


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("total", "parts", "least"), [(1_000, 10, 100), (1_003, 10, 100), (1_000, 3, 50)])
def test_001_no_part_is_below_the_minimum(name: str, total: int, parts: int, least: int) -> None:
    for number in range(300):
        amounts = OURS[name](total, parts, least, number)
        assert (len(amounts), sum(amounts)) == (parts, total)
        assert min(amounts) >= least


def means_by_place(split: Split, total: int, parts: int, least: int) -> tuple[list[float], float]:
    """The mean of each place, and the greatest distance from total/parts in standard errors."""
    columns: Sequence[Sequence[int]] = list(
        zip(*(split(total, parts, least, number) for number in range(RUNS)), strict=True)
    )
    means = [sum(column) / RUNS for column in columns]
    errors = []
    for column, mean in zip(columns, means, strict=True):
        variance = sum((amount - mean) ** 2 for amount in column) / (RUNS - 1)
        distance = abs(mean - total / parts)
        errors.append(distance / math.sqrt(variance / RUNS) if variance else math.inf if distance else 0.0)
    return means, max(errors)


# Standard errors. By chance, less than 1 run in 10 000 exceeds this; the seeds are the same on every run.
FAIR = 4.5


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("total", "parts", "least"), [(600, 6, 1), (1_003, 10, 20), (20, 10, 1)])
def test_001_and_003_every_place_has_the_same_mean(name: str, total: int, parts: int, least: int) -> None:
    means, worst = means_by_place(OURS[name], total, parts, least)
    assert worst < FAIR, means


def test_001_published_form_favours_the_last_place() -> None:
    """Instead of 100 for each: far less for the first place, far more for the last."""
    means, worst = means_by_place(bounded_of_001, 600, 6, 1)
    assert worst > 10 * FAIR
    assert means[0] < 65
    assert means[-1] > 140


def test_003_published_form_favours_places_too() -> None:
    """With twenty cents: each draw rounds in favour of its place, at the cost of the last place."""
    _, worst = means_by_place(double_mean_of_003, 20, 10, 1)
    assert worst > 3 * FAIR
