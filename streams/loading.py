"""Loading in several processes: decoding is what takes the time, and one Python decodes on one core only.

Shards are dealt out; each process carries its own ones, with connections of its own, into the same version. Cursor and rows are
committed together there too, so it does not matter when a process ends.
"""

import asyncio
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from models.journal import Cursor
from streams.sources import Refused

POLL_SECONDS: Final = 0.2
JOIN_SECONDS: Final = 5.0

#: Carries some shards to their targets; a function of a module, since another process looks it up by its name.
Carry = Callable[..., Coroutine[Any, Any, None]]


def deal(work: Mapping[int, int], jobs: int) -> list[list[int]]:
    """Deals shards with so many events out to so many processes, the largest first, each to whoever has least."""
    hands: list[list[int]] = [[] for _ in range(min(jobs, len(work)))]
    for shard in sorted(work, key=lambda shard: -work[shard]):
        min(hands, key=lambda hand: sum(work[one] for one in hand)).append(shard)
    return hands


async def in_processes(
    carry: Carry, arguments: Sequence[Any], targets: Mapping[int, Cursor], hands: Sequence[Sequence[int]], look: Callable[[], Any]
) -> None:
    """Runs `carry(*arguments, targets)` in a process for each hand of shards, and `look` now and then, until all have ended.

    Raises Refused with what one of them said when it could not go on; the others are ended then, as at a cancellation.
    """
    # A process that was forked would share our connections.
    context = multiprocessing.get_context("spawn")
    running = {}
    try:
        for hand in hands:
            ours, theirs = context.Pipe(duplex=False)
            part = {shard: targets[shard] for shard in hand}
            process = context.Process(target=_run, args=(theirs, os.getpid(), carry, (*arguments, part)), daemon=True)
            process.start()
            theirs.close()
            running[process] = ours
        while running:
            await asyncio.sleep(POLL_SECONDS)
            await look()
            for process in [one for one in running if not one.is_alive()]:
                _require_done(running.pop(process), process.exitcode)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            await asyncio.to_thread(process.join, JOIN_SECONDS)


def _require_done(said: Connection, code: int | None) -> None:
    try:
        reason = said.recv()
    except EOFError:
        reason = f"a loading process ended with code {code}; the same command goes on"
    if reason is not None:
        raise Refused(reason)


def _run(pipe: Connection, parent: int, carry: Carry, arguments: Sequence[Any]) -> None:
    # Ctrl-C goes to all of a terminal's processes: who started us ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(50_000, 20, 50)
    try:
        asyncio.run(carry(*arguments, require_parent(parent)))
    except Refused as error:
        pipe.send(str(error))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    else:
        pipe.send(None)


def require_parent(parent: int) -> Callable[..., None]:
    """A step that ends this process when the one that started it is gone, by kill -9: another rebuild may go on instead."""

    def step(*_: Any) -> None:
        if os.getppid() != parent:
            os._exit(1)

    return step
