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
    told: list[int] = []

    async def run() -> T:
        working = asyncio.current_task()
        assert working is not None

        def stop(number: int) -> None:
            told.append(number)
            working.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await work

    try:
        return uvloop.run(run())
    except asyncio.CancelledError:
        if not told:
            raise
        # Not left to click, which would call it an error.
        _end(128 + told[0], word)


def _end(code: int, word: str) -> NoReturn:
    click.echo(f"grabstream: stopped{word and '; '}{word}", err=True)
    sys.exit(code)
