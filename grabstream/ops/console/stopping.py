"""Stopping long work: Ctrl-C and SIGTERM cancel it, so that it can clean up."""

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

#: A process ends within this time after a signal, even if something in it hangs.
END_SECONDS_MAX: Final = 19.0
#: The exit code of a process that ran until Ctrl-C.
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT


def end_in_time(code: int) -> None:
    """Ends this process after END_SECONDS_MAX with this exit code, unless it ends earlier: a server that
    hangs may block a client's cleanup, a thread, or the end of the event loop. Nothing is lost by that,
    because this process may be killed at any moment.
    """
    timer = threading.Timer(END_SECONDS_MAX, _leave, (code,))
    timer.daemon = True
    timer.start()


def _leave(code: int) -> None:
    log.critical("the process hangs and does not end: killing it; the stacks of its threads:")
    faulthandler.dump_traceback(sys.stderr)
    logging.shutdown()
    os._exit(code)


def stop_on_signals(exit_code: int) -> tuple[asyncio.Event, list[int]]:
    """Returns an event that Ctrl-C and SIGTERM set, and the signals received. After the first one, a process
    that hangs ends with `exit_code`. Called in the event loop of the process.
    """
    stop = asyncio.Event()
    signals: list[int] = []

    def end(number: int) -> None:
        end_in_time(exit_code)
        signals.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    return stop, signals


def run_until_stopped(work: Coroutine[Any, Any, T], word: str = "") -> T:
    """Runs the work and returns its result. Ctrl-C and SIGTERM cancel it, wait for its cleanup, and end the
    process with 130 and 143; `word` is then printed and says how to continue.
    """
    signals: list[int] = []

    async def run() -> T:
        working = asyncio.current_task()
        assert working is not None

        def stop(number: int) -> None:
            signals.append(number)
            end_in_time(128 + number)
            working.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        return await work

    try:
        return uvloop.run(run())
    except asyncio.CancelledError:
        if not signals:
            raise
        # Click would report it as an error.
        _end(128 + signals[0], word)


def _end(code: int, word: str) -> NoReturn:
    click.echo(f"grabstream: stopped{word and '; '}{word}", err=True)
    sys.exit(code)
