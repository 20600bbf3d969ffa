"""Bounds of time on a machine that other processes use too: a bound counts the time in which a process of
this priority could have run, not the time in which the machine did something else.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

#: The work of one measurement, and the pause between two of them.
PROBE_SECONDS: Final = 0.02
PROBE_EVERY_SECONDS: Final = 1.0
#: However busy the machine is, a bound is at most this many times as long: what hangs is noticed.
SLOWNESS_MAX: Final = 10.0


def slowness() -> float:
    """How many times as long as on an idle machine a process of this priority takes now, 1 to
    SLOWNESS_MAX: the elapsed time of some work, divided by its processor time.
    """
    began, cpu = time.monotonic(), time.thread_time()
    while (worked := time.thread_time() - cpu) < PROBE_SECONDS:
        sum(range(1_000))
    return min(max((time.monotonic() - began) / worked, 1.0), SLOWNESS_MAX)


async def until_paced(
    condition: Callable[[], Awaitable[bool]],
    seconds: float,
    what: str,
    since: float,
    measure: Callable[[], float] = slowness,
) -> None:
    """Polls a condition until it is true. Raises AssertionError after `seconds` of a machine with nothing
    else to do, from `since` on, a time of `time.monotonic`.
    """
    left, slow, measured_at = seconds, await asyncio.to_thread(measure), since
    while not await condition():
        if (now := time.monotonic()) - measured_at >= PROBE_EVERY_SECONDS:
            left -= (now - measured_at) / slow
            slow, measured_at = await asyncio.to_thread(measure), now
        if left - (now - measured_at) / slow <= 0:
            raise AssertionError(
                f"{what} did not happen within {seconds:.1f} s of an idle machine; now it is "
                f"{slow:.1f} times as slow"
            )
        await asyncio.sleep(0.05)
