"""Loading in several processes: decoding is what takes the time, and one Python decodes on one core only.

Shards are dealt out; each process carries its own ones, with connections of its own, into the same version.
Cursor and rows are committed together there too, so it does not matter when a process ends.
"""

import asyncio
import gc
import os
import pickle
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from grabstream.models.journal import Cursor
from grabstream.streams.clients import in_words
from grabstream.streams.rebuilding.reading import RebuildRefused

POLL_SECONDS: Final = 0.2

#: Carries some shards to their targets; a function of a module, since another process looks it up by its
#: name.
Carry = Callable[..., Coroutine[Any, Any, None]]


def deal(work: Mapping[int, int], jobs: int) -> list[list[int]]:
    """Deals shards with so many events out to so many processes, the largest first, each to whoever has
    least.
    """
    hands: list[list[int]] = [[] for _ in range(min(jobs, len(work)))]
    for shard in sorted(work, key=lambda shard: -work[shard]):
        min(hands, key=lambda hand: sum(work[one] for one in hand)).append(shard)
    return hands


async def in_processes(
    carry: Carry,
    arguments: Sequence[Any],
    targets: Mapping[int, Cursor],
    hands: Sequence[Sequence[int]],
    look: Callable[[], Any],
) -> None:
    """Runs `carry(*arguments, targets)` in a process for each hand of shards, and `look` now and then, until
    all have ended.

    Raises Refused with what one of them said when it could not go on; the others are ended then, as at a
    cancellation.
    """
    tasks: dict[asyncio.Task[None], Process] = {}
    try:
        for hand in hands:
            process = await _start(carry, (*arguments, {shard: targets[shard] for shard in hand}))
            tasks[asyncio.create_task(_done(process))] = process
        working = set(tasks)
        while working:
            ended, working = await asyncio.wait(
                working, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            await look()
            for task in ended:
                task.result()
    finally:
        for process in tasks.values():
            if process.returncode is None:
                process.kill()  # cursors and rows are committed together: it does not matter when it ends
        # What the others say is no news any more, but has to be taken.
        await asyncio.gather(*tasks, return_exceptions=True)


async def _start(carry: Carry, arguments: Sequence[Any]) -> Process:
    # Not multiprocessing: a process that was forked would share our connections, and one that it spawns
    # imports our main module first, which for the command line is most of this program. In a session of its
    # own: Ctrl-C goes to all of a terminal's processes, but who started us ends us.
    words = (sys.executable, "-m", "grabstream.streams.rebuilding.loading")
    process = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((os.getpid(), carry, arguments)))
    process.stdin.close()
    return process


async def _done(process: Process) -> None:
    """Waits for its end; raises Refused with what it said if it could not go on."""
    said, _ = await process.communicate()
    if process.returncode:
        raise RebuildRefused(
            said.decode()
            or f"a loading process ended with code {process.returncode}; the same command goes on"
        )


def _main() -> None:
    gc.set_threshold(50_000, 20, 50)
    parent, carry, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started us
    try:
        asyncio.run(carry(*arguments, require_parent(parent)))
    except Exception as error:
        sys.stdout.write(str(error) if isinstance(error, RebuildRefused) else in_words(error))
        sys.exit(1)


def require_parent(parent: int) -> Callable[..., None]:
    """A step that ends this process when the one that started it is gone, by kill -9: another rebuild may go
    on instead.
    """

    def step(*_: Any) -> None:
        if os.getppid() != parent:
            os._exit(1)

    return step


if __name__ == "__main__":
    _main()
