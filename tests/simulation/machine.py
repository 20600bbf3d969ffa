"""What a process sees of its machine, replaced for the time of a run: clocks, random numbers, process ids."""

import gc
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from tests.simulation.loop import PROCESS, SimulatedLoop

#: The time (ms since 1970 UTC) at which every run begins.
BEGINNING_MS: Final = 1_800_000_000_000


class Clock:
    """The time of day. `shift_ms` is what passed at once, for everybody."""

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
    ]
    log = logging.getLogger("grabstream")
    handler = _Logged(trace)
    level, propagate = log.level, log.propagate
    asyncio_log = logging.getLogger("asyncio")
    with ExitStack() as stack:
        for module, name, replacement in replaced:
            stack.enter_context(mock.patch.object(module, name, replacement))
        stack.callback(asyncio_log.setLevel, asyncio_log.level)
        asyncio_log.setLevel(logging.CRITICAL + 1)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        try:
            yield
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
            log.propagate = propagate


@contextmanager
def quietly_freed() -> Iterator[None]:
    """Frees, in the end, what the block left suspended; the clean-up code that this starts has nothing to act
    on.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda error: None
    log = logging.getLogger("grabstream")
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        log.disabled = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
    finally:
        log.disabled = False
        sys.unraisablehook = hook
        if collects:
            gc.enable()
