"""Ending tasks within a time. A client whose server hangs may swallow a cancellation, or take for ever to
clean up; whoever wants to be rid of it does not wait for that.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final

log = logging.getLogger(__name__)

END_SECONDS_MAX: Final = 5.0


async def end(
    tasks: Iterable[asyncio.Task[Any]], seconds: float = END_SECONDS_MAX, again_seconds: float | None = None
) -> None:
    """Cancels tasks and returns when they have ended, after `seconds` at the latest; what they raise is left
    to who looks at them.

    After `again_seconds` (by default half of the time) those that go on are cancelled once more: a
    cancellation may be swallowed.
    """
    loop = asyncio.get_running_loop()
    pending = {task for task in tasks if not task.done()}
    until, pause = loop.time() + seconds, again_seconds or seconds / 2
    while pending and loop.time() < until:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=min(pause, max(0.0, until - loop.time())))
    for task in pending:
        log.warning("a task does not end and is left behind: %s", task.get_coro())
