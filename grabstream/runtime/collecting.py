"""Garbage collection of processes that handle events by the thousand."""

import gc


def collect_rarely() -> None:
    """Makes garbage collection rarer: searching thousands of short-lived events for cycles is a tenth of the
    work.
    """
    gc.set_threshold(50_000, 20, 50)
