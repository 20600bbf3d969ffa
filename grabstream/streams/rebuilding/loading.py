"""Loading in several processes, because decoding takes most of the time, and a Python process decodes on one
core.

The shards are distributed. Each process loads its shards into the same version, through its own connections.
Cursor and rows are committed together, so a process may end at any time.
"""

import asyncio
import os
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from grabstream.models.journal import Cursor
from grabstream.runtime.collecting import collect_rarely
from grabstream.streams.clients import error_text
from grabstream.streams.rebuilding.reading import RebuildStopped

POLL_SECONDS: Final = 0.2

#: Loads some shards up to their targets; a function of a module, because another process imports it by its
#: name.
Load = Callable[..., Coroutine[Any, Any, None]]


def distribute(work: Mapping[int, int], jobs: int) -> list[list[int]]:
    """Distributes shards, given their numbers of events, to `jobs` processes: the largest first, each to the
    process with the fewest events.
    """
    shard_groups: list[list[int]] = [[] for _ in range(min(jobs, len(work)))]
    for shard in sorted(work, key=lambda shard: -work[shard]):
        min(shard_groups, key=lambda group: sum(work[dealt] for dealt in group)).append(shard)
    return shard_groups


async def in_processes(
    load: Load,
    arguments: Sequence[Any],
    targets: Mapping[int, Cursor],
    shard_groups: Sequence[Sequence[int]],
    update_progress: Callable[[], Any],
) -> None:
    """Runs `load(*arguments, targets)` in one process for each group of shards, and `update_progress` from
    time to time, until all have ended.

    Raises RebuildStopped with the error of a process that failed. Then, and when cancelled, it ends the other
    processes.
    """
    tasks: dict[asyncio.Task[None], Process] = {}
    try:
        for group in shard_groups:
            process = await _start(load, (*arguments, {shard: targets[shard] for shard in group}))
            tasks[asyncio.create_task(_done(process))] = process
        working = set(tasks)
        while working:
            ended, working = await asyncio.wait(
                working, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            await update_progress()
            for task in ended:
                task.result()
    finally:
        for process in tasks.values():
            if process.returncode is None:
                process.kill()  # cursors and rows are committed together, so it may end at any time
        # Errors of the other processes are ignored, but must be retrieved.
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start(load: Load, arguments: Sequence[Any]) -> Process:
    # Not multiprocessing: a forked process would share our connections, and a spawned one imports our main
    # module first, which for the command line is most of this program. In a new session, because Ctrl-C is
    # sent to all processes of a terminal, but only the parent ends this process.
    # -P: modules in the working directory are not imported.
    command = (sys.executable, "-P", "-m", "grabstream.streams.rebuilding.loading")
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((os.getpid(), load, arguments)))
    process.stdin.close()
    return process


async def _done(process: Process) -> None:
    """Waits for the end of a process; raises RebuildStopped with its error if it failed."""
    output, _ = await process.communicate()
    if process.returncode:
        raise RebuildStopped(
            output.decode()
            or f"a loading process ended with code {process.returncode}; the same command resumes"
        )


def _main() -> None:
    collect_rarely()
    parent, load, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started us
    try:
        asyncio.run(load(*arguments, require_parent(parent)))
    except Exception as error:
        sys.stdout.write(str(error) if isinstance(error, RebuildStopped) else error_text(error))
        sys.exit(1)


def require_parent(parent: int) -> Callable[..., None]:
    """A step that ends this process if its parent is gone (kill -9): another rebuild may continue instead."""

    def step(*_: Any) -> None:
        if os.getppid() != parent:
            os._exit(1)

    return step


if __name__ == "__main__":
    _main()
