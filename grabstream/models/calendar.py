"""Calendars as integer arithmetic: the offsets of a time zone, windows of hours, days and weeks, and the
hours of a week.

The offsets of the zone are written into an offer once, when it is opened (docs/design.md). From then on, Lua
and the pure rules need no time-zone database, and agree even when two machines have different databases. All
times are milliseconds since 1970 UTC.
"""

import re
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
#: How many starts of opening hours `opens_next` tries, because the clock may jump over a start. It jumps at
#: most once a week.
JUMPS_MAX: Final = 4
_MILLISECOND: Final = timedelta(milliseconds=1)
#: How long after its opening day an offer has the offsets of its zone.
HORIZON_MS: Final = 10 * 366 * DAY_MS

#: Pairs (time, offset), sorted by time: from `time` on, the local clock is `offset` ms ahead of UTC. The
#: first offset also applies before its time.
Offsets = Sequence[tuple[int, int]]


def utc_text(at_ms: int, separator: str = "T") -> str:
    """A time as text: UTC with milliseconds, as RFC 3339 has it."""
    text = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(separator, "milliseconds")
    return text.replace("+00:00", "Z")


#: Files next to the zones of a system: their contents depend on the machine, or they count leap seconds.
_depends_on_machine = re.compile(r"localtime\Z|Factory\Z|posixrules\Z|posix/|right/").match


def check_timezone(name: str) -> None:
    """Raises Invalid when the time-zone database has no such zone."""
    try:
        if len(name) > TIMEZONE_LENGTH_MAX:
            raise ValueError("too long to be a name")
        if _depends_on_machine(name):
            raise ValueError("not a zone of the database of time zones")
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise Invalid(
            f"terms.timezone: no such zone: {quoted(name)}; use a name such as UTC or Asia/Shanghai"
        ) from None


def offsets_of(timezone: str, at_ms: int) -> tuple[tuple[int, int], ...]:
    """The offsets of the zone for HORIZON_MS from the start of the UTC day of `at_ms`; each change of the
    offset is exact to the millisecond. `()` for UTC.
    """
    return () if timezone == "UTC" else _offsets_from(timezone, at_ms - at_ms % DAY_MS)


# The search takes some milliseconds; offers opened on the same day share its result.
@lru_cache(maxsize=256)
def _offsets_from(timezone: str, from_ms: int) -> tuple[tuple[int, int], ...]:
    zone = ZoneInfo(timezone)
    offsets = [(from_ms, _offset(zone, from_ms))]
    at = from_ms
    while at < from_ms + HORIZON_MS:
        after = at + DAY_MS
        if _offset(zone, after) != offsets[-1][1]:
            low, high = at, after
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if _offset(zone, middle) == offsets[-1][1] else (low, middle)
            offsets.append((high, _offset(zone, high)))
            at = high
        else:
            at = after
    return tuple(offsets)


def _offset(zone: ZoneInfo, at_ms: int) -> int:
    moment = datetime.fromtimestamp(at_ms / 1_000, zone)
    return (moment.utcoffset() or timedelta()) // _MILLISECOND


def offset_at(offsets: Offsets, at_ms: int) -> int:
    """How many ms the local clock is ahead of UTC at `at_ms`."""
    if not offsets:
        return 0
    return offsets[_index_at(offsets, at_ms)][1]


def _index_at(offsets: Offsets, at_ms: int) -> int:
    """The index of the offset that applies at `at_ms`."""
    return max(bisect_right(offsets, at_ms, key=lambda change: change[0]) - 1, 0)


def utc_of(offsets: Offsets, local_ms: int, after_ms: int) -> int:
    """The first time after `after_ms` at which the local clock shows `local_ms`, or a later local time if the
    clock skips `local_ms`.
    """
    index = _index_at(offsets, after_ms)
    for begins, offset in offsets[index:]:
        at = max(local_ms - offset, begins)
        following = offsets[index + 1][0] if index + 1 < len(offsets) else None
        if at > after_ms and (following is None or at < following):
            return at
        index += 1
    return local_ms


def window_of(per: Period, offsets: Offsets, at_ms: int) -> int:
    """The window of `at_ms`: the number of its hour, day or week; 0 when the whole offer is one window.

    Days and weeks are those of the local clock. An hour always has 60 minutes, also when the clock is set
    back; hours begin at the full hours of the local clock at the time of opening.
    """
    if per == "offer":
        return 0
    if per == "hour":
        return (at_ms + hour_shift_ms(offsets)) // HOUR_MS
    day = (at_ms + offset_at(offsets, at_ms)) // DAY_MS
    if per == "day":
        return day
    if per == "week":
        return (day + THURSDAY) // 7
    raise ValueError(f"limits: this program has no window for the period {per!r}")


def hour_shift_ms(offsets: Offsets) -> int:
    """How long before the full hours of UTC the hours of the offer begin."""
    return offsets[0][1] % HOUR_MS if offsets else 0


def window_ends(per: Period, offsets: Offsets, at_ms: int) -> int | None:
    """When the window of `at_ms` ends; None when it never ends."""
    if per == "offer":
        return None
    window = window_of(per, offsets, at_ms)
    if per == "hour":
        return (window + 1) * HOUR_MS - hour_shift_ms(offsets)
    day = window + 1 if per == "day" else (window + 1) * 7 - THURSDAY
    return utc_of(offsets, day * DAY_MS, at_ms)


def opens_next(hours: Sequence[tuple[int, int]], offsets: Offsets, at_ms: int) -> int | None:
    """None when `at_ms` lies within the opening hours, else the time at which they begin next.

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
        # When the clock jumps over these hours, the loop tries the next ones.
        at_ms = opens = utc_of(offsets, week_begins + (minute + ahead) * MINUTE_MS, at_ms)
    return opens
