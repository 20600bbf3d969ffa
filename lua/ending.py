"""Ending tasks within a time. A client whose server hangs may swallow a cancellation, or take for ever to
clean up; whoever wants to be rid of it does not wait for that.
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
    """Work that runs as tasks inside the block, and is ended behind it."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        await end(tasks)


async def first_to_end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Returns when one of the tasks has ended; raises what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def end(
    tasks: Iterable[asyncio.Task[Any]], seconds: float = END_SECONDS_MAX, again_seconds: float | None = None
) -> set[asyncio.Task[Any]]:
    """Cancels tasks and waits until they have ended, for `seconds` at most; returns those that have not.

    What they raise is left to who looks at them, and is not logged as never retrieved. After `again_seconds`
    (by default half of the time) those that still run are cancelled once more: a cancellation may be
    swallowed.
    """
    loop = asyncio.get_running_loop()
    told = set(tasks)
    pending = {task for task in told if not task.done()}
    until, pause = loop.time() + seconds, again_seconds or seconds / 2
    while pending and loop.time() < until:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=min(pause, max(0.0, until - loop.time())))
    for task in pending:
        log.warning("%s does not end and is left behind: %s", task.get_name(), task.get_coro())
    for task in told - pending:
        if not task.cancelled():
            task.exception()
    return pending
