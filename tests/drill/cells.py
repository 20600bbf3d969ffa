"""The cells of the matrix: a fault × a shape of traffic, played once, with a verdict."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from fnmatch import fnmatchcase
from random import Random
from typing import Any, Final, NamedTuple

from grabstream.lua.gate.calls import now_ms
from grabstream.ops.services.servers import PROJECT
from tests.conftest import until
from tests.drill.checks import PROBLEMS_MAX, at_rest, level, problems_of
from tests.drill.faults import FAULTS, Fault
from tests.drill.gaps import BASELINE_SECONDS, waited
from tests.drill.stage import Scene, Servers, scene
from tests.drill.traffic import SHAPES

#: Within which deciding goes on after a fault's end, all shards taken over.
DECIDING_SECONDS_MAX: Final = 30.0
REST_SECONDS_MAX: Final = 60.0
LOGS: Final = PROJECT / ".services" / "drill"
#: Played on every run of the tests: one fault of every server and of a worker, and every shape.
SHORT: Final = (
    "redis.aof_tail×amendments",
    "redis.flushall×holds",
    "postgres.commit_reply_lost×grabs",
    "worker.stopped×baskets",
)


class Cell(NamedTuple):
    """A fault and a shape of traffic, by their names."""

    fault: str
    shape: str

    @property
    def name(self) -> str:
        """How it is asked for."""
        return f"{self.fault}×{self.shape}"


class Verdict(NamedTuple):
    """What came of a cell: `problems` by check (none: it passed), seconds, answers, the lag's seconds after
    the fault's end, the largest time without an answer by shard, before the fault and from it on, which
    shards it touched, and where the workers' logs are kept.
    """

    cell: str
    problems: dict[str, list[str]]
    seconds: float
    answers: int
    unknown: int
    lag_seconds: float | None
    gaps_before_seconds: dict[int, float]
    gap_seconds: dict[int, float]
    touched: list[int]
    logs: str | None

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


def cells(where: str, patterns: Sequence[str] = ()) -> list[Cell]:
    """All cells that servers of a kind can play (`single`, `cluster`), or those whose names fit one of the
    patterns.
    """
    found = [Cell(name, shape) for name, fault in FAULTS.items() if where in fault.where for shape in SHAPES]
    return [
        cell for cell in found if not patterns or any(fnmatchcase(cell.name, pattern) for pattern in patterns)
    ]


async def play_all(servers: Servers, chosen: Sequence[Cell], seed: int) -> AsyncIterator[Verdict]:
    """Plays cells one after the other."""
    for cell in chosen:
        yield await play(servers, cell, seed)


async def play(servers: Servers, cell: Cell, seed: int) -> Verdict:
    """Plays a cell; what goes wrong is in the verdict, also when it is the program that failed."""
    fault = FAULTS[cell.fault]
    began = time.monotonic()
    seen: dict[str, Any] = {
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
                problems = await _played(played, fault, seen, Random(f"{seed}:{cell.name}:moment"))
            except Exception as error:  # a cell that breaks is a verdict too, and the next one is played
                problems = {"played to its end": [f"{type(error).__name__}: {error}"]}
            seen |= {"answers": len(played.traffic.answered), "unknown": played.traffic.unknown}
            if problems:
                seen["logs"] = _keep_logs(played, cell)
    except Exception as error:
        problems = {"set up and taken away": [f"{type(error).__name__}: {error}"]}
    return Verdict(cell.name, problems, time.monotonic() - began, **seen)


def _keep_logs(played: Scene, cell: Cell) -> str:
    """Copies what the workers said to where it outlives the drill."""
    kept = LOGS / cell.name
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(played.logs, kept)
    return str(kept)


async def _played(played: Scene, fault: Fault, seen: dict[str, Any], moment: Random) -> dict[str, list[str]]:
    traffic = played.traffic
    await traffic.begin()
    await played.gaps.start()
    await asyncio.sleep(BASELINE_SECONDS if fault.isolates else 0)
    await traffic.more(moment.randint(40, 200))
    seen["gaps_before_seconds"] = played.gaps.seconds()
    played.gaps.forget()
    await fault.play(played)
    ended, played.mended_at_ms = time.monotonic(), now_ms()
    await traffic.more(100, DECIDING_SECONDS_MAX, "deciding after the fault")
    await played.gaps.all_answer(DECIDING_SECONDS_MAX)
    seen |= {"gap_seconds": played.gaps.seconds(), "touched": sorted(played.touched)}
    await played.gaps.stop()
    await traffic.stop()
    await until(
        lambda: level(played.settings, played.redis),
        fault.lag_seconds - (time.monotonic() - ended),
        "a lag of 0",
    )
    seen["lag_seconds"] = round(time.monotonic() - ended, 1)
    await until(lambda: at_rest(played), REST_SECONDS_MAX, "the end of all holds")
    found = await problems_of(played, fault.two_servers)
    if fault.isolates:
        found["no other shard waits"] = waited(
            seen["gaps_before_seconds"], seen["gap_seconds"], played.touched
        )
    return {name: problems[:PROBLEMS_MAX] for name, problems in found.items() if problems}
