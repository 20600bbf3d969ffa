"""Ends tasks within a bounded time. A client whose server hangs may swallow a cancellation, or never finish
its cleanup; the caller does not wait for that.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

log = logging.getLogger(__name__)

END_SECONDS_MAX: Final = 5.0


@asynccontextmanager
async def running(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Runs coroutines as tasks inside the block, and ends the tasks after it."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        await end(tasks)


async def first_to_end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Returns when one of the tasks has ended; raises the error of a task that failed."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def end(
    tasks: Iterable[asyncio.Task[Any]], seconds: float = END_SECONDS_MAX, again_seconds: float | None = None
) -> set[asyncio.Task[Any]]:
    """Cancels tasks and waits until they have ended, at most `seconds`; returns the tasks that still run.

    The errors of the tasks stay with the tasks, and asyncio does not log them as never retrieved. Tasks that
    still run after `again_seconds` (by default half of the time) are cancelled again, since a cancellation
    may be swallowed.
    """
    loop = asyncio.get_running_loop()
    ending = set(tasks)
    pending = {task for task in ending if not task.done()}
    until, pause = loop.time() + seconds, again_seconds or seconds / 2
    while pending and loop.time() < until:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=min(pause, max(0.0, until - loop.time())))
    for task in pending:
        log.warning("%s does not end and is abandoned: %s", task.get_name(), task.get_coro())
    for task in ending - pending:
        if not task.cancelled():
            task.exception()
    return pending
