"""Calendars as integer arithmetic: the offsets of a time zone, windows of hours, days and weeks, and the
hours of a week.

The zone's offsets are written into an offer once, when it is opened (docs/design.md); from then on Lua
and the pure rules need no time-zone database, and agree even when two machines have different ones. All
times are milliseconds since 1970 UTC.
"""

from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from grabstream.models.bounds import quoted
from grabstream.models.money import Invalid

Period = Literal["offer", "hour", "day", "week"]
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
WEEK_MINUTES: Final = 7 * 24 * 60
TIMEZONE_LENGTH_MAX: Final = 64
MINUTE_MS: Final = 60_000
#: 1970-01-01 was a Thursday; weeks begin on Monday.
THURSDAY: Final = 3
#: How many times in a row hours may be looked for that the clock does not jump over; it jumps once in a week
#: at most.
JUMPS_MAX: Final = 4
#: How far ahead of its opening an offer knows its zone.
HORIZON_MS: Final = 10 * 366 * DAY_MS

#: (from this time on, the local clock is this much ahead of UTC), in order of time; the first also holds
#: before it.
Offsets = Sequence[tuple[int, int]]


def check_timezone(name: str) -> None:
    """Raises Invalid when there is no such zone."""
    try:
        if len(name) > TIMEZONE_LENGTH_MAX:
            raise ValueError("too long to be a name")
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise Invalid(
            f"terms.timezone: no such zone: {quoted(name)}; use a name such as UTC or Asia/Shanghai"
        ) from None


def offsets_of(timezone: str, at_ms: int) -> tuple[tuple[int, int], ...]:
    """The zone's offsets from the day (UTC) of a time on, for HORIZON_MS; every change to the millisecond.
    `()` for UTC.
    """
    return () if timezone == "UTC" else _offsets_from(timezone, at_ms - at_ms % DAY_MS)


# It takes some milliseconds: offers opened on one day share it.
@lru_cache(maxsize=256)
def _offsets_from(timezone: str, from_ms: int) -> tuple[tuple[int, int], ...]:
    zone = ZoneInfo(timezone)
    found = [(from_ms, _offset(zone, from_ms))]
    at = from_ms
    while at < from_ms + HORIZON_MS:
        after = at + DAY_MS
        if _offset(zone, after) != found[-1][1]:
            low, high = at, after
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if _offset(zone, middle) == found[-1][1] else (low, middle)
            found.append((high, _offset(zone, high)))
            at = high
        else:
            at = after
    return tuple(found)


def _offset(zone: ZoneInfo, at_ms: int) -> int:
    moment = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)).astimezone(zone)
    return (moment.utcoffset() or timedelta()) // timedelta(milliseconds=1)


def offset_at(offsets: Offsets, at_ms: int) -> int:
    """How far the local clock is ahead of UTC at a time, ms."""
    if not offsets:
        return 0
    return offsets[max(bisect_right(offsets, at_ms, key=lambda one: one[0]) - 1, 0)][1]


def utc_of(offsets: Offsets, local_ms: int, after_ms: int) -> int:
    """The first time after `after_ms` at which the local clock shows `local_ms` or, where it jumps over it,
    more.
    """
    index = max(bisect_right(offsets, after_ms, key=lambda one: one[0]) - 1, 0)
    for begins, offset in offsets[index:]:
        at = max(local_ms - offset, begins)
        following = offsets[index + 1][0] if index + 1 < len(offsets) else None
        if at > after_ms and (following is None or at < following):
            return at
        index += 1
    return local_ms


def window_of(per: Period, offsets: Offsets, at_ms: int) -> int:
    """The number of the offer's hour, day or week at a time; 0 when the whole offer is one window.

    Days and weeks are those of the local clock. Hours are 60 minutes long always, also when the clock is set
    back, and begin with the full hours of the clock that the offer was opened under.
    """
    if per == "offer":
        return 0
    if per == "hour":
        return (at_ms + _hour_shift(offsets)) // HOUR_MS
    day = (at_ms + offset_at(offsets, at_ms)) // DAY_MS
    if per == "day":
        return day
    if per == "week":
        return (day + THURSDAY) // 7
    raise ValueError(f"limits: this program has no window for the period {per!r}")


def _hour_shift(offsets: Offsets) -> int:
    return offsets[0][1] % HOUR_MS if offsets else 0


def window_ends(per: Period, offsets: Offsets, at_ms: int) -> int | None:
    """When the window of a time ends; None when it does not."""
    if per == "offer":
        return None
    window = window_of(per, offsets, at_ms)
    if per == "hour":
        return (window + 1) * HOUR_MS - _hour_shift(offsets)
    day = window + 1 if per == "day" else (window + 1) * 7 - THURSDAY
    return utc_of(offsets, day * DAY_MS, at_ms)


def opens_next(hours: Sequence[tuple[int, int]], offsets: Offsets, at_ms: int) -> int | None:
    """None when a time lies within the hours of the week, else when they begin next.

    `hours` are pairs of minutes of the local week (Monday 00:00 is 0): from the first up to, not including,
    the second.
    """
    if not hours:
        return None
    opens = None
    for _ in range(JUMPS_MAX):
        local = at_ms + offset_at(offsets, at_ms)
        week_begins = ((local // DAY_MS + THURSDAY) // 7 * 7 - THURSDAY) * DAY_MS
        minute = (local - week_begins) // MINUTE_MS
        if any(begins <= minute < ends for begins, ends in hours):
            break
        ahead = min((begins - minute - 1) % WEEK_MINUTES + 1 for begins, _ in hours)
        # The clock may jump over them: then those after.
        at_ms = opens = utc_of(offsets, week_begins + (minute + ahead) * MINUTE_MS, at_ms)
    return opens
