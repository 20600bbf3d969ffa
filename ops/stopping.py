"""Long work that is told to stop: Ctrl-C and SIGTERM cancel it, so that it cleans up behind itself."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import click

T = TypeVar("T")


def run_until_stopped(work: Coroutine[Any, Any, T]) -> T:
    """Runs the work. Ctrl-C and SIGTERM cancel it, wait for its cleaning up, and end the process with 130 and 143."""
    terminated = False

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        return await work

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if not terminated:
            raise
        _end(128 + signal.SIGTERM)
    except KeyboardInterrupt:
        # Not left to click, which would call it an error.
        _end(128 + signal.SIGINT)


def _end(code: int) -> NoReturn:
    click.echo("grabstream: stopped", err=True)
    sys.exit(code)
