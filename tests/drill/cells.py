"""The cells of the matrix: each plays a fault under a shape of traffic and has a verdict."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from fnmatch import fnmatchcase
from random import Random
from typing import Any, Final, NamedTuple

from grabstream.gate.calls import now_ms
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import until
from tests.drill.checks import PROBLEMS_MAX, at_rest, level, problems_of
from tests.drill.faults import FAULTS, Fault
from tests.drill.gaps import BASELINE_SECONDS, waited
from tests.drill.pace import until_paced
from tests.drill.stage import Scene, Servers, scene
from tests.drill.traffic import SHAPES

#: The time after the end of a fault within which all shards must decide again.
DECIDING_SECONDS_MAX: Final = 30.0
REST_SECONDS_MAX: Final = 60.0
LOGS: Final = PROJECT / ".services" / "drill"
#: The cells of `make test`: a fault of each kind, and every shape; a run plays three of them.
SHORT: Final = (
    "redis.aof_tail×amendments",
    "redis.flushall×holds",
    "postgres.commit_reply_lost×grabs",
    "worker.stopped×baskets",
    "gateway.killed×http",
)


class Cell(NamedTuple):
    """The names of a fault and of a shape of traffic."""

    fault: str
    shape: str

    @property
    def name(self) -> str:
        """The name for `--cell`."""
        return f"{self.fault}×{self.shape}"


class Verdict(NamedTuple):
    """The result of a cell."""

    cell: str
    #: By name of the check; empty if the cell passed.
    problems: dict[str, list[str]]
    seconds: float
    #: Answered commands, and calls whose outcome was unknown.
    answers: int
    unknown: int
    #: From the end of the fault until the lag was 0.
    lag_seconds: float | None
    #: The longest time without an answer by shard, before the fault and after its begin.
    gaps_before_seconds: dict[int, float]
    gap_seconds: dict[int, float]
    #: The shards to which the fault did something.
    touched: list[int]
    #: The folder with the workers' logs, if the cell failed.
    logs: str | None

    @property
    def passed(self) -> bool:
        """Whether no check has a problem."""
        return not self.problems


def cells(where: str, patterns: Sequence[str] = ()) -> list[Cell]:
    """The cells that can be played on `single` servers or on a `cluster`; with patterns, those whose names
    match one of them.
    """
    playable = [
        Cell(name, shape)
        for name, fault in FAULTS.items()
        if where in fault.where
        for shape in SHAPES
        if not fault.shapes or shape in fault.shapes
    ]
    return [
        cell
        for cell in playable
        if not patterns or any(fnmatchcase(cell.name, pattern) for pattern in patterns)
    ]


async def play_all(servers: Servers, chosen: Sequence[Cell], seed: int) -> AsyncIterator[Verdict]:
    """Plays cells one after another; yields their verdicts."""
    for cell in chosen:
        yield await play(servers, cell, seed)


async def play(servers: Servers, cell: Cell, seed: int) -> Verdict:
    """Plays a cell. Every problem is in the verdict, also an exception of the drill itself."""
    fault = FAULTS[cell.fault]
    began = time.monotonic()
    measured: dict[str, Any] = {
        "answers": 0,
        "unknown": 0,
        "lag_seconds": None,
        "gaps_before_seconds": {},
        "gap_seconds": {},
        "touched": [],
        "logs": None,
    }
    try:
        async with scene(
            servers, cell.shape, f"{seed}:{cell.name}", fault.fail_deciding, fault.fail_projecting
        ) as played:
            try:
                problems = await _played(played, fault, measured, Random(f"{seed}:{cell.name}:moment"))
            except Exception as error:  # the cell has failed; the next one is played all the same
                problems = {"played to its end": [f"{type(error).__name__}: {error}"]}
            measured |= {"answers": len(played.traffic.answered), "unknown": played.traffic.unknown}
            if problems:
                measured["logs"] = _keep_logs(played, cell)
    except Exception as error:
        problems = {"set up and removed": [f"{type(error).__name__}: {error}"]}
    return Verdict(cell.name, problems, time.monotonic() - began, **measured)


def _keep_logs(played: Scene, cell: Cell) -> str:
    """Copies the workers' logs to a folder that stays after the drill; returns its path."""
    kept = LOGS / cell.name
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(played.logs, kept)
    return str(kept)


async def _played(
    played: Scene, fault: Fault, measured: dict[str, Any], moment: Random
) -> dict[str, list[str]]:
    """Plays a fault under traffic and runs all checks; adds to `measured`, returns the problems by check."""
    traffic = played.traffic
    await traffic.begin()
    await played.gaps.start()
    await asyncio.sleep(BASELINE_SECONDS if fault.isolates else 0)
    await traffic.more(moment.randint(40, 200))
    measured["gaps_before_seconds"] = played.gaps.seconds()
    played.gaps.forget()
    await fault.play(played)
    ended, played.mended_at_ms = time.monotonic(), now_ms()
    await traffic.more(100, DECIDING_SECONDS_MAX, "deciding after the fault")
    await played.gaps.all_answer(DECIDING_SECONDS_MAX)
    measured |= {"gap_seconds": played.gaps.seconds(), "touched": sorted(played.touched)}
    await played.gaps.stop()
    await traffic.stop()
    await until_paced(lambda: level(played.settings, played.redis), fault.lag_seconds, "a lag of 0", ended)
    measured["lag_seconds"] = round(time.monotonic() - ended, 1)
    await until(lambda: at_rest(played), REST_SECONDS_MAX, "the end of all holds")
    by_check = await problems_of(played, fault.two_servers)
    if fault.isolates:
        by_check["no other shard waits"] = waited(
            measured["gaps_before_seconds"], measured["gap_seconds"], played.touched
        )
    return {name: problems[:PROBLEMS_MAX] for name, problems in by_check.items() if problems}
