"""Several processes of a gateway on one port: starts them, restarts those that die, and stops them all."""

import asyncio
import logging
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Final

from grabstream.runtime.ending import first_to_end, running

#: The pause before a process is started again doubles from the first to the longest one, unless the process
#: ran for STEADY_SECONDS.
PAUSE_SECONDS_FIRST: Final = 0.2
PAUSE_SECONDS_MAX: Final = 10.0
STEADY_SECONDS: Final = 30.0
#: Exit codes that say that a process will not run: it was used wrongly, a server cannot be reached.
CODES_OF_START: Final = frozenset({2, 3})


class Supervisor:
    """Runs `count` processes until `stop`; `command_of` gives the command of a process by its number, from 1.
    `log` is that of this process.

    The standard input of each process is a pipe that ends with this process, also when it is killed.
    """

    def __init__(
        self,
        count: int,
        command_of: Callable[[int], Sequence[str]],
        stop: asyncio.Event,
        log: logging.Logger,
    ) -> None:
        self._count = count
        self._command_of = command_of
        self._stop = stop
        self._log = log
        #: The first exit code that was not 0.
        self._code = 0

    async def run(self) -> int:
        """Returns the exit code when all processes have ended: 0, or that of a process that failed to stop,
        or could not start when this process did.
        """
        async with asyncio.TaskGroup() as keeping:
            for number in range(1, self._count + 1):
                keeping.create_task(self._keep(number))
        return self._code

    async def _keep(self, number: int) -> None:
        pause = PAUSE_SECONDS_FIRST
        is_first = True
        while not self._stop.is_set():
            began = time.monotonic()
            code = await self._run_one(number)
            if self._stop.is_set() or (is_first and code in CODES_OF_START):
                # One that has just been started does not catch the signal yet.
                self._code = self._code or (0 if code == -signal.SIGTERM else code)
                self._stop.set()
                return
            is_first = False
            if time.monotonic() - began > STEADY_SECONDS:
                pause = PAUSE_SECONDS_FIRST
            self._log.error(
                "process %d of %d ended with code %d; it is started again in %.1f s",
                number, self._count, code, pause,
            )  # fmt: skip
            async with running(self._stop.wait(), asyncio.sleep(pause)) as tasks:
                await first_to_end(tasks)
            pause = min(2 * pause, PAUSE_SECONDS_MAX)

    async def _run_one(self, number: int) -> int:
        """Runs a process until it ends, which `stop` asks it to; returns its exit code.

        It has its own session, so that Ctrl-C reaches it through this process only. It bounds the time of its
        own stop.
        """
        process = await asyncio.create_subprocess_exec(
            *self._command_of(number), stdin=subprocess.PIPE, start_new_session=True
        )
        self._log.info("process %d of %d is %d", number, self._count, process.pid)
        async with running(self._stop.wait(), process.wait()) as tasks:
            await first_to_end(tasks)
        if process.returncode is None:
            process.terminate()
        return await process.wait()
