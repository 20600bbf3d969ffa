"""`python -m bench.watched FOLDER ARGUMENTS…` runs `grabstream ARGUMENTS…`, and appends to a file in FOLDER,
as one line of JSON each, [what, when it ended by the monotonic clock, seconds]: collections of garbage, and
turns of the event loop, that took longer than LONG_SECONDS.
"""

import asyncio
import gc
import json
import os
import runpy
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

LONG_SECONDS = 0.03
BEAT_SECONDS = 0.01


class Watch:
    """What writes the file."""

    def __init__(self, folder: Path) -> None:
        self._file = folder.joinpath(f"{os.getpid()}.ndjson").open("a", buffering=1)
        self._began = 0.0

    def _took(self, what: str, seconds: float) -> None:
        if seconds > LONG_SECONDS:
            self._file.write(json.dumps([what, time.perf_counter(), seconds]) + "\n")

    def collecting(self, phase: str, details: dict[str, int]) -> None:
        """A callback of the collector."""
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self._took(f"collection of generation {details['generation']}", time.perf_counter() - self._began)

    async def beside(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Runs the program, and looks how late the loop is."""
        beating = asyncio.create_task(self._beat())
        try:
            return await main
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(BEAT_SECONDS)
            self._took("turns of the event loop", time.perf_counter() - began - BEAT_SECONDS)


def main() -> None:
    """Runs the command line under a watch."""
    watch, run = Watch(Path(sys.argv[1])), uvloop.run
    gc.callbacks.append(watch.collecting)
    uvloop.run = lambda main, **arguments: run(watch.beside(main), **arguments)
    sys.argv[1:] = sys.argv[2:]
    runpy.run_module("grabstream.ops.cli", run_name="__main__")


if __name__ == "__main__":
    main()
