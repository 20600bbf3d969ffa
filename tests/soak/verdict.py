"""What a soak says about its series: which of them grow, and by how much.

The first quarter of the time does not count: caches fill. The rest is divided into three parts of equal
length, and the median of a part stands for it. A series grows if the last part is above the first one by more
than is allowed, and above the middle one by more than a third of that: what has grown once, such as a table
that was doubled, stays flat from then on, and what leaks grows in both steps.
"""

from statistics import median
from typing import Final, NamedTuple

#: How much of the time is left out at the beginning.
WARM_SHARE: Final = 0.25
#: How many values each part needs.
VALUES_MIN: Final = 3
MIB: Final = 2**20
#: What a process may gain, in bytes, and as a share of what it had.
MEMORY_BYTES_ALLOWED: Final = 16 * MIB
MEMORY_SHARE_ALLOWED: Final = 0.1


class TooShort(Exception):
    """There are too few values for a verdict."""


class Trend(NamedTuple):
    """The medians of the three parts, and by how much the last one may be above the first one."""

    first: float
    middle: float
    last: float
    allowed: float

    @property
    def grows(self) -> bool:
        """Whether the series has grown by more than is allowed, and still does."""
        return self.last - self.first > self.allowed and self.last - self.middle > self.allowed / 3


def parts_of(values: list[tuple[float, float]], seconds: float) -> list[list[float]]:
    """The values (at, value) of the three parts; `at` is in seconds from the start. Raises TooShort."""
    begin = seconds * WARM_SHARE
    length = (seconds - begin) / 3
    parts: list[list[float]] = [[], [], []]
    for at, value in values:
        if begin <= at <= seconds:
            parts[min(int((at - begin) / length), 2)].append(value)
    if min(map(len, parts)) < VALUES_MIN:
        raise TooShort(f"a part has {min(map(len, parts))} values, and needs {VALUES_MIN}: take more time")
    return parts


def trend(values: list[tuple[float, float]], seconds: float, allowed: float) -> Trend:
    """The trend of a series; raises TooShort."""
    return Trend(*(median(part) for part in parts_of(values, seconds)), allowed)


def of_memory(values: list[tuple[float, float]], seconds: float, kept: float = 0.0) -> Trend:
    """The trend of a process's memory in bytes. `kept` is what it keeps by design of all that has come.
    Raises TooShort.
    """
    first = median(parts_of(values, seconds)[0])
    return trend(values, seconds, max(MEMORY_BYTES_ALLOWED, MEMORY_SHARE_ALLOWED * first) + kept)
