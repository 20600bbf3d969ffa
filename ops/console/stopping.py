"""Long work that is told to stop: Ctrl-C and SIGTERM cancel it, so that it cleans up behind itself."""

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, Final, NoReturn, TypeVar

import click
import uvloop

T = TypeVar("T")
log = logging.getLogger(__name__)

#: Within so many seconds after it was told to, a process ends, whatever hangs in it.
END_SECONDS_MAX: Final = 19.0


def end_within(seconds: float, code: int) -> None:
    """Ends this process after so long with an exit code, if it has not ended by itself: a server that hangs
    may keep a client's cleaning up, a thread, or the event loop's own end. Everything here may be killed at
    any moment, so nothing is lost by that.
    """
    timer = threading.Timer(seconds, _leave, (code,))
    timer.daemon = True
    timer.start()


def _leave(code: int) -> None:
    log.critical("told to end, but something hangs: ending the process; where every thread stands:")
    faulthandler.dump_traceback(sys.stderr)
    logging.shutdown()
    os._exit(code)


def run_until_stopped(work: Coroutine[Any, Any, T], word: str = "") -> T:
    """Runs the work. Ctrl-C and SIGTERM cancel it, wait for its cleaning up, and end the process with 130 and
    143; `word` says then how to go on.
    """
    told: list[int] = []

    async def run() -> T:
        working = asyncio.current_task()
        assert working is not None

        def stop(number: int) -> None:
            told.append(number)
            end_within(END_SECONDS_MAX, 128 + number)
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
