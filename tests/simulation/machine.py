"""What a process sees of its machine, replaced for the time of a run: clocks, random numbers, process ids."""

import asyncio
import gc
import logging
import os
import random
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from tests.simulation.loop import PROCESS, SimulatedLoop
from tests.simulation.releases import RELEASES

#: The time (ms since 1970 UTC) at which every run begins.
BEGINNING_MS: Final = 1_800_000_000_000


class Clock:
    """The time of day. `shift_ms` is what passed at once, for all machines."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.shift_ms = 0

    def micros(self) -> int:
        """Microseconds since 1970."""
        return (BEGINNING_MS + self.shift_ms) * 1_000 + int(self._loop.now * 1_000_000)

    def ms(self) -> int:
        """Milliseconds since 1970."""
        return self.micros() // 1_000


class Trace:
    """What happened, a line each: time, party, words."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.lines: list[str] = []

    def add(self, party: str, words: str) -> None:
        """Adds a line."""
        self.lines.append(f"{self._loop.now:10.4f}  {party:<10} {words}")


class _Logged(logging.Handler):
    """Puts the log of the simulated processes into the trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        words = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            words += f": {record.exc_info[1]!r}"
        self._trace.add(process.name if process else "-", f"log {record.levelname.lower()}: {words}")


@contextmanager
def simulated_machine(
    loop: SimulatedLoop, clock: Clock, trace: Trace, entropy: random.Random
) -> Iterator[None]:
    """Replaces clocks and random numbers inside the block."""

    def draw(count: int) -> bytes:
        return entropy.randbytes(count)

    def process_id() -> int:
        process = PROCESS.get()
        return 1 if process is None else 100 + sum(process.name.encode())

    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "time", lambda: clock.micros() / 1e6),
        (time, "time_ns", lambda: clock.micros() * 1_000),
        (os, "urandom", draw),
        (random, "_urandom", draw),
        (os, "getpid", process_id),
        (os, "uname", lambda: SimpleNamespace(nodename="simulated")),
        (socket, "gethostname", lambda: "simulated"),
    ]
    handler = _Logged(trace)
    # What a process that ends, or loses its server, leaves behind is not a message for people.
    of_libraries = [logging.getLogger(name) for name in ("asyncio", "psycopg")]
    with ExitStack() as stack:
        for module, name, replacement in replaced:
            stack.enter_context(mock.patch.object(module, name, replacement))
        for log in of_libraries:
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL + 1)
        for log in (logging.getLogger(release.package) for release in RELEASES):
            log.addHandler(handler)
            stack.callback(log.removeHandler, handler)
            stack.callback(log.setLevel, log.level)
            stack.enter_context(mock.patch.object(log, "propagate", False))
            log.setLevel(logging.INFO)
        yield


def _but_for_coroutines(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """The hook, for all but coroutines. One that is freed in the `__new__` of a named tuple, which has no
    builtins, cannot warn that it is not awaited, and ends in a KeyError.
    """
    if hook in _HOOKS:
        return hook

    def told(error: Any) -> None:
        if not asyncio.iscoroutine(error.object):
            hook(error)

    _HOOKS.add(told)
    return told


#: Hooks that know nothing of coroutines already.
_HOOKS: Final = set[Callable[[Any], object]]()


@contextmanager
def quietly_freed() -> Iterator[None]:
    """Frees, in the end, what the block left suspended; the clean-up code that this starts has nothing to act
    on.
    """
    # Some are freed only with the results of the run: then, too, without a warning.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    hook, sys.unraisablehook = _but_for_coroutines(sys.unraisablehook), lambda error: None
    collects = gc.isenabled()
    gc.disable()
    try:
        # What ends a process leaves coroutines that are not awaited.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
            logging.disable(logging.CRITICAL)
            gc.collect()
    finally:
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook
        if collects:
            gc.enable()


@contextmanager
def signals_wait() -> Iterator[None]:
    """Signals that end us are delivered after the block: what it has started is known then, and can be ended.
    Its child processes do not get them either.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
