"""Waiting for a condition, never for a time."""

import asyncio
from collections.abc import Callable
from typing import Any

POLL_SECONDS = 0.05


class TookTooLong(Exception):
    """Something did not happen within its time; the text says what."""


async def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Asks again and again until the condition (sync or async) gives something true, and returns that; raises TookTooLong."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        if loop.time() > deadline:
            raise TookTooLong(f"{what} did not happen within {seconds:.0f} s")
        await asyncio.sleep(POLL_SECONDS)
