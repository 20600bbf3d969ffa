"""Pauses of several tasks that end together. One wake-up for ten tasks costs a fraction of ten."""

import asyncio
from typing import Final

#: A tick that is nearer than this part of the time between two is left out: timers may end that much early.
NEAR_PART: Final = 0.01


def seconds_to_tick(seconds: float) -> float:
    """The seconds until the next multiple of `seconds` on the clock of the event loop: at most `seconds`, and
    a hundredth.
    """
    left = seconds - asyncio.get_running_loop().time() % seconds
    return left if left > NEAR_PART * seconds else left + seconds
