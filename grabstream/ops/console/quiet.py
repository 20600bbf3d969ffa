"""Keeps the log readable while a server is down: its clients retry several times a second, and log each
attempt. The same line of a library is written a few times a minute; lines of this program always.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

#: Lines of one kind (one place in a library) within PERIOD_SECONDS.
LINES_MAX: Final = 2
PERIOD_SECONDS: Final = 60.0
#: Kinds that are remembered; beyond, all are forgotten.
KINDS_MAX: Final = 1_000
_OURS: Final = "grabstream"


class Repeats(logging.Filter):
    """Drops repeated lines of libraries, and adds to the next one how many were dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: By place: when its period began, and the lines in it.
        self._seen: dict[tuple[str, str, int, type[BaseException] | None], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record."""
        if record.name.partition(".")[0] == _OURS:
            return True
        # An error of another type is another line, wherever asyncio reports it.
        error = record.exc_info[0] if record.exc_info else None
        place, now = (record.name, record.pathname, record.lineno, error), self._clock()
        began, lines = self._seen.get(place, (now, 0))
        is_over = now - began >= PERIOD_SECONDS
        dropped = lines - LINES_MAX
        if is_over:
            began, lines = now, 0
        if len(self._seen) >= KINDS_MAX and place not in self._seen:
            self._seen.clear()
        self._seen[place] = began, lines + 1
        if is_over and dropped > 0:
            record.msg = f"{record.getMessage()} ({dropped:,} more in the {PERIOD_SECONDS:.0f} s before)"
            record.args = None
        return lines < LINES_MAX


def quiet_libraries() -> None:
    """Drops repeated lines of libraries from the log of this process."""
    repeats = Repeats()
    for handler in logging.getLogger().handlers:
        handler.addFilter(repeats)
