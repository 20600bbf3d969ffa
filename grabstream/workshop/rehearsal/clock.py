"""The simulated clock of a story, on which days pass in seconds."""

from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from grabstream.models.calendar import DAY_MS

TIMEZONE: Final = "Asia/Shanghai"
MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
#: The Monday of every story, 00:00 in TIMEZONE. Always the same, so that a seed repeats a story to the
#: millisecond.
MONDAY_MS: Final = int(datetime(2026, 11, 23, tzinfo=ZoneInfo(TIMEZONE)).timestamp() * 1000)


def moment(day: int, clock: str) -> int:
    """The time (ms) at which the local clock shows `clock` (HH:MM or HH:MM:SS) `day` days after Monday."""
    hours, minutes, seconds = [*map(int, clock.split(":")), 0][:3]
    return MONDAY_MS + day * DAY_MS + ((hours * 60 + minutes) * 60 + seconds) * 1000


def shown(at_ms: int) -> str:
    """A time as text, in TIMEZONE."""
    return (
        (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms))
        .astimezone(ZoneInfo(TIMEZONE))
        .strftime("%a %d %b %H:%M:%S")
    )


class Clock:
    """The simulated time. It only moves forward; `moments` are all times it has shown, in ms since 1970
    UTC.
    """

    def __init__(self, now_ms: int) -> None:
        self.moments = [now_ms]

    @property
    def now_ms(self) -> int:
        """The simulated time, ms since 1970 UTC."""
        return self.moments[-1]

    def forward(self, to_ms: int) -> None:
        """Sets the clock to a later time."""
        assert to_ms >= self.now_ms
        if to_ms > self.now_ms:
            self.moments.append(to_ms)

    def in_time(self, due_ms: int, done_ms: int) -> bool:
        """Whether `done_ms` is not before `due_ms`, and at most one step of the clock after it."""
        step = bisect_left(self.moments, due_ms)
        return due_ms <= done_ms <= self.moments[min(step + 1, len(self.moments) - 1)]
