"""Long work that is told to stop: Ctrl-C and SIGTERM cancel it, so that it cleans up behind itself."""

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import click
import uvloop

T = TypeVar("T")


def run_until_stopped(work: Coroutine[Any, Any, T], word: str = "") -> T:
    """Runs the work. Ctrl-C and SIGTERM cancel it, wait for its cleaning up, and end the process with 130 and 143; `word` says then how
    to go on."""
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
        return uvloop.run(run())
    except asyncio.CancelledError:
        if not terminated:
            raise
        _end(128 + signal.SIGTERM, word)
    except KeyboardInterrupt:
        # Not left to click, which would call it an error.
        _end(128 + signal.SIGINT, word)


def _end(code: int, word: str) -> NoReturn:
    click.echo(f"grabstream: stopped{word and '; '}{word}", err=True)
    sys.exit(code)
