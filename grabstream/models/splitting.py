"""Splitting a sum into random parts: integer arithmetic, exact, and with the same mean for every place.

With R left for n parts, q = floor(R/n) and r = R mod n, a part is uniform on q-w … q+w, plus 1 with
probability r/n. Its mean is exactly R/n, so every place has the same mean. The law only chooses w:

- `bounded`     the widest w that min, max and the later parts allow
- `double_mean` q - min, which is `bounded` without a maximum: min … twice the mean
- `equal`       0: the remainder is spread at random, at most 1 to each part

Draw k is the first 13 hex digits of SHA-1(seed hex ‖ ":" ‖ k ‖ ":" ‖ attempt), brought into a range by
rejection. Place k uses draw k over the range (2w+1)·n: the quotient by n is the uniform part; if the
remainder by n is below r, the part gets the extra 1. `ahead` then shuffles (Fisher-Yates, from the last place
down) with draws n+1 …, so the spread is the same for every place too. `lua/includes/splitting.lua` has the
same arithmetic; golden vectors check that both agree.
"""

from collections.abc import Generator
from hashlib import sha1
from struct import pack
from typing import Final, Literal, TypeVar

from grabstream.models.bounds import quoted
from grabstream.models.money import AMOUNT_MAX, PARTS_MAX, Invalid

Law = Literal["double_mean", "bounded", "equal"]
LAWS: Final[tuple[Law, ...]] = ("double_mean", "bounded", "equal")
DRAW_RANGE: Final = 16**13
#: Draws of one step, which takes some tenths of a millisecond.
SLICE_PARTS: Final = 256

_T = TypeVar("_T")


def draw(seed: str, k: int, range_size: int) -> int:
    """Draw k of a seed (lower-case hex), uniform on 0 … range_size-1 (1 ≤ range_size ≤ 2^52)."""
    limit = DRAW_RANGE - DRAW_RANGE % range_size
    attempt = 0
    while True:
        digest = sha1(f"{seed}:{k}:{attempt}".encode(), usedforsecurity=False).hexdigest()
        number = int(digest[:13], 16)
        if number < limit:
            return number % range_size
        attempt += 1


def half_width(law: Law, left: int, parts: int, least: int, most: int) -> int:
    """w: the maximum distance of a part from the mean of what is left (in minor units) without making a later
    part break `least` or `most`.
    """
    if law == "equal":
        return 0
    mean, rest = divmod(left, parts)
    if law == "double_mean":
        return mean - least
    lowest = max(least, left - (parts - 1) * most)
    highest = min(most, left - (parts - 1) * least)
    return min(mean - lowest, highest - mean - (1 if rest else 0))


def next_part(law: Law, left: int, parts: int, least: int, most: int, seed: str, k: int) -> int:
    """The part at place k, in minor units, when `left` remain for `parts` parts. The last part takes the
    rest.
    """
    if parts == 1:
        return left
    mean, rest = divmod(left, parts)
    width = half_width(law, left, parts, least, most)
    uniform, extra = divmod(draw(seed, k, (2 * width + 1) * parts), parts)
    return mean - width + uniform + (1 if extra < rest else 0)


def split_ahead(law: Law, total: int, parts: int, least: int, most: int, seed: str) -> list[int]:
    """All parts of a legal envelope in the order of places, shuffled (see the module's docstring)."""
    return at_once(splitting_ahead(law, total, parts, least, most, seed))


def at_once(steps: Generator[None, None, _T]) -> _T:
    """Runs all steps of a generator; returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: _T = ended.value
            return result


def splitting_ahead(
    law: Law, total: int, parts: int, least: int, most: int, seed: str
) -> Generator[None, None, list[int]]:
    """What `split_ahead` does, in steps of SLICE_PARTS draws: a caller can do other work in between."""
    amounts = []
    left = total
    for place in range(1, parts + 1):
        amount = next_part(law, left, parts - place + 1, least, most, seed, place)
        amounts.append(amount)
        left -= amount
        if place % SLICE_PARTS == 0:
            yield
    k = parts
    for last in range(parts, 1, -1):
        k += 1
        other = draw(seed, k, last)
        amounts[last - 1], amounts[other] = amounts[other], amounts[last - 1]
        if k % SLICE_PARTS == 0:
            yield
    return amounts


def packing_parts(amounts: list[int]) -> Generator[None, None, bytes]:
    """Parts as one string, 6 bytes each, big-endian, in steps. A script reads one part by its place, without
    a list of all of them.
    """
    packed = bytearray()
    size = SLICE_PARTS * 8
    for start in range(0, len(amounts), size):
        packed += b"".join(pack(">Q", amount)[2:] for amount in amounts[start : start + size])
        yield
    return bytes(packed)


def check_split(law: Law, total: int, parts: int, least: int, most: int | None) -> int:
    """Checks a split (all amounts in minor units) and returns the maximum that applies; raises Invalid with
    the field and what is allowed.
    """
    if not 1 <= parts <= PARTS_MAX:
        raise Invalid(f"parts: must be from 1 to {PARTS_MAX}, got {quoted(parts)}")
    if least < 1:
        raise Invalid(f"min: must be at least 1, so that every part has an amount, got {quoted(least)}")
    if not 1 <= total <= AMOUNT_MAX:
        raise Invalid(f"total: must be from 1 to {AMOUNT_MAX}, got {quoted(total)}")
    if total < parts * least:
        raise Invalid(f"total: {parts} parts of at least {least} need {parts * least}, got {total}")
    if most is None:
        return total
    if law != "bounded":
        raise Invalid(f"max: only law bounded takes a maximum, this offer has law {law}")
    if most < least:
        raise Invalid(f"max: must be at least min ({least}), got {most}")
    if total > parts * most:
        raise Invalid(f"total: {parts} parts of at most {most} hold {parts * most}, got {total}")
    return most
