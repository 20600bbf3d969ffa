"""Bounds the commands in progress by how long they take.

When more commands come than can be served, the time of each grows with their number, until all of them end at
their time limit. So the bound falls while commands take longer than COMMAND_SECONDS_TARGET, and rises while
they do not and the bound is used: additive increase, multiplicative decrease, as in TCP.
"""

import time
from typing import Final

from grabstream.gateway.bounds import COMMAND_SECONDS_TARGET, COMMANDS_FIRST, COMMANDS_MIN

#: The bound falls to this fraction of itself, at most once in this many seconds.
FALL: Final = 0.8
FALL_EVERY_SECONDS: Final = 0.1


class Pressure:
    """Commands in progress, and their bound between COMMANDS_MIN and `maximum`."""

    def __init__(self, maximum: int) -> None:
        self.in_work = 0
        self.bound = float(min(COMMANDS_FIRST, maximum))
        self._maximum = maximum
        self._minimum = min(COMMANDS_MIN, maximum)
        self._fell_at = 0.0

    @property
    def is_full(self) -> bool:
        """Whether no further command may begin."""
        return self.in_work >= self.bound

    def begin(self) -> float:
        """A command begins; returns what `end` needs."""
        self.in_work += 1
        return time.monotonic()

    def end(self, began: float) -> None:
        """A command has ended: the bound rises or falls."""
        now = time.monotonic()
        if now - began <= COMMAND_SECONDS_TARGET:
            # Few commands are fast whatever the bound is: they must not raise it.
            if self.in_work > self.bound / 2:
                self.bound = min(self.bound + 1, self._maximum)
        # One that began before the last fall says nothing about the bound since then; and a few slow ones, as
        # when Kafka pauses, would be slow with any bound.
        elif (
            began > self._fell_at
            and now - self._fell_at > FALL_EVERY_SECONDS
            and self.in_work > self.bound / 4
        ):
            self.bound = max(self.bound * FALL, self._minimum)
            self._fell_at = now
        self.in_work -= 1
