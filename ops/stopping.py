"""Long work that is told to stop: Ctrl-C and SIGTERM cancel it, so that it cleans up behind itself."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import click

T = TypeVar("T")
EXIT_TERMINATED = 128 + signal.SIGTERM


def run_until_stopped(work: Coroutine[Any, Any, T]) -> T:
    """Runs the work. Ctrl-C cancels it and raises KeyboardInterrupt, SIGTERM cancels it and ends the process with its code."""
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
        click.echo("grabstream: stopped", err=True)
        sys.exit(EXIT_TERMINATED)
