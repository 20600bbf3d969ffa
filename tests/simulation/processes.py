"""Plays seeds in several processes, each with its private server; results come in order of seeds.

Import it after guards were taken out: the processes are forks, and have the code that was imported.
"""

import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NamedTuple

from tests.simulation.plan import plan_of
from tests.simulation.world import Servers, play

#: Bound before anything is simulated.
_now = time.perf_counter
PROGRESS_EVERY_SECONDS: Final = 10.0
#: How long a process may take to end its servers; a signal that comes while one starts waits for that.
END_SECONDS_MAX: Final = 60.0
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


class Played(NamedTuple):
    """What a process reports of a seed."""

    seed: int
    digest: str
    problems: Sequence[str]
    seconds: float
    events: int
    met: "Counter[tuple[str, str]]"
    awaited: "Counter[str]"
    begun: "Counter[str]"


class ProcessEnded(Exception):
    """A process has ended unasked; it has written why."""


def processes_by_default() -> int:
    """As many as there are cores for us, and not more than four."""
    return min(len(_cores()), 4)


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def stay_on_one_core(number: int) -> None:
    """Keeps this process and the servers that it starts on one core, on Linux.

    A process and its server work in turn, some hundred times a seed: when they are on two cores, both spend
    more time on waking each other than on all else.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = _cores()
        os.sched_setaffinity(0, {cores[number % len(cores)]})


@contextmanager
def cleaned_up() -> Iterator[str]:
    """A folder for everything that the block writes, removed in the end, also after SIGTERM and SIGHUP."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in _ENDING}
    # Short, since the path of a socket must be.
    folder = tempfile.mkdtemp(prefix="grabstream-")
    former, tempfile.tempdir = tempfile.tempdir, folder
    try:
        # A server that does not run as root may have its folder in it.
        os.chmod(folder, 0o711)
        yield folder
    finally:
        tempfile.tempdir = former
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def play_seeds(
    seeds: Iterable[int],
    length: int | None,
    processes: int,
    report: Callable[[Played], None],
    seconds: float | None = None,
    keep_going: bool = False,
) -> Played | None:
    """Plays seeds (ascending) until one fails or `seconds` have passed. Calls `report` with each, in order;
    returns the first of them that failed. With `keep_going`, no failure ends it, and the result is None.

    Raises ProcessEnded.
    """
    waiting = iter(seeds)
    began = told = _now()
    under_way: deque[int] = deque()
    results: dict[int, Played] = {}
    count, last, failed = 0, 0, False
    with _players(processes, length) as connections:
        idle, busy = list(connections), dict[Any, int]()
        while True:
            is_over = failed or (seconds is not None and _now() - began >= seconds)
            while idle and not is_over and (seed := next(waiting, None)) is not None:
                busy[connection := idle.pop()] = seed
                connection.send(seed)
                under_way.append(seed)
            if not under_way:
                return None
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                seed = busy.pop(connection)
                try:
                    results[seed] = connection.recv()
                except (EOFError, OSError):
                    raise ProcessEnded(f"the process that played seed {seed} has ended by itself") from None
                idle.append(connection)
                failed = failed or bool(results[seed].problems and not keep_going)
            while under_way and under_way[0] in results:
                played = results.pop(under_way.popleft())
                report(played)
                count, last = count + 1, played.seed
                if played.problems and not keep_going:
                    return played
            if _now() - told > PROGRESS_EVERY_SECONDS:
                told = _now()
                rate = count / (told - began)
                print(f"{count} seeds, {rate:.1f} a second, up to seed {last}", file=sys.stderr, flush=True)


@contextmanager
def _players(count: int, length: int | None) -> Iterator[Sequence[Connection]]:
    """Starts processes that play seeds, and ends them after the block; yields the ways to them."""
    fork = multiprocessing.get_context("fork")
    connections: list[Connection] = []
    processes = []
    gc.collect()
    gc.freeze()
    try:
        for number in range(count):
            ours, theirs = fork.Pipe()
            others, core = [*connections, ours], os.getpid() + number
            process = fork.Process(target=_serve, args=(theirs, others, core, length))
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        yield connections
    finally:
        with _uninterrupted():
            deadline = _now() + END_SECONDS_MAX
            while _now() < deadline and any(process.is_alive() for process in processes):
                for process in processes:
                    # Again and again: an exception of a signal's handler is lost in what frees objects.
                    process.terminate()
                for process in processes:
                    process.join(0.5)
            for process in processes:
                process.kill()
                process.join()
            for connection in connections:
                connection.close()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignores a second Ctrl-C."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *_ENDING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(connection: Connection, others: Sequence[Connection], core: int, length: int | None) -> None:
    """Plays the seeds that arrive, until the process is terminated or there is no sender of more."""
    # Ctrl-C goes to every process of the terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:
        other.close()
    stay_on_one_core(core)
    servers = Servers()
    try:
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                verdict = play(plan_of(connection.recv(), length), servers)
                connection.send(
                    Played(
                        verdict.plan.seed, verdict.digest, verdict.problems, verdict.seconds, verdict.events,
                        verdict.met, verdict.awaited, verdict.begun,
                    )
                )  # fmt: skip
    finally:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        servers.close()
