"""The verdict of a soak: what leaks is named, and what is noise, or has grown once, is not."""

import asyncio
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import until
from tests.soak.__main__ import Sampler, Values, judged
from tests.soak.verdict import MEMORY_BYTES_ALLOWED, MIB, TooShort, of_memory, trend
from tests.support.processes import resident_bytes

SECONDS = 3_600.0
BASE = 120 * MIB


def series(value: Callable[[float], float], seconds: float = SECONDS, count: int = 360) -> Values:
    """A series whose value is a function of the share of the time that has passed."""
    return [(seconds * number / count, value(number / count)) for number in range(count)]


def noise(share: float) -> float:
    return BASE + random.Random(share).gauss(0, 5 * MIB)


FLAT = {
    "noise": noise,
    "a fall": lambda share: BASE - 60 * MIB * share,
    "caches that fill in the first quarter": lambda share: BASE + 100 * MIB * min(share / 0.2, 1),
    "a table that is doubled once": lambda share: BASE + (64 * MIB if share > 0.4 else 0),
    "a sawtooth": lambda share: BASE + 30 * MIB * (share * 50 % 1),
    "a wave": lambda share: BASE + 12 * MIB * math.sin(share * 40),
}
GROWING = {
    "a leak": lambda share: BASE + 60 * MIB * share,
    "a leak in noise": lambda share: noise(share) + 60 * MIB * share,
    "a leak under a sawtooth": lambda share: BASE + 30 * MIB * (share * 50 % 1) + 60 * MIB * share,
    "a leak that begins late": lambda share: BASE + 100 * MIB * max(0, share - 0.5),
    "a leak of a small process": lambda share: 20 * MIB + 40 * MIB * share,
}


@pytest.mark.parametrize("name", FLAT)
def test_what_is_flat_is_not_named(name: str) -> None:
    assert not of_memory(series(FLAT[name]), SECONDS).grows


@pytest.mark.parametrize("name", GROWING)
def test_what_grows_is_named(name: str) -> None:
    memory = {"flat": series(noise), name: series(GROWING[name])}
    _, _, problems = judged(memory, series(lambda share: 5), SECONDS, {}, 100)
    [problem] = problems
    assert problem.startswith(f"the memory of {name} grows: ")


def test_what_is_kept_by_design_may_be_kept() -> None:
    grown = series(lambda share: BASE + 60 * MIB * share)
    memory, _, problems = judged({"Redis": grown}, series(lambda share: 0), SECONDS, {"Redis": 60 * MIB}, 100)
    assert problems == []
    assert memory["Redis"].allowed == MEMORY_BYTES_ALLOWED + 60 * MIB


def test_read_models_that_fall_behind_are_named() -> None:
    memory = {"a worker": series(noise)}
    _, _, problems = judged(memory, series(lambda share: 3_000 * share), SECONDS, {}, 100)
    [problem] = problems
    assert "more and more behind" in problem
    once = series(lambda share: 6_500 if 0.49 < share < 0.5 else 0)
    _, _, problems = judged(memory, once, SECONDS, {}, 100)
    assert problems == ["read models were 6,500 events behind, which is more than 60 s of load"]
    assert judged(memory, series(lambda share: 50 + share), SECONDS, {}, 100)[2] == []


def test_too_few_values_are_no_verdict() -> None:
    with pytest.raises(TooShort, match="take more time"):
        trend(series(noise, count=8), SECONDS, 1)


@pytest.mark.long
async def test_a_process_that_leaks_is_named() -> None:
    """A real process, which takes a megabyte for each line that it gets, next to one that does not."""
    code = "import sys\nkept = []\nfor line in sys.stdin:\n    kept.append(bytearray(b'x' * 2**20))"
    leaking = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    try:
        assert leaking.stdin is not None
        processes = {"leaks": leaking.pid, "this": os.getpid()}
        sampler = Sampler(
            {name: (lambda pid=pid: resident_bytes(pid)) for name, pid in processes.items()},  # type: ignore[misc]
            0.02,
        )
        ending = asyncio.Event()
        sampling = asyncio.create_task(sampler.run(ending))
        size = resident_bytes(leaking.pid)
        for line in range(60):
            leaking.stdin.write("more\n")
            leaking.stdin.flush()
            await until(
                lambda line=line: resident_bytes(leaking.pid) > size + line * MIB, 60, "a larger process"
            )
            # However busy the machine is, the sampler sees each step.
            seen = len(sampler.series["this"])
            await until(lambda seen=seen: len(sampler.series["this"]) > seen, 60, "another value")
        ending.set()
        await sampling
    finally:
        leaking.kill()
        leaking.wait()
    seconds = sampler.series["leaks"][-1][0]
    _, _, problems = judged(sampler.series, series(lambda share: 0, seconds), seconds, {}, 100)
    assert [problem.partition(" grows")[0] for problem in problems] == ["the memory of leaks"]


@pytest.mark.nightly
@pytest.mark.timeout(1_200)
def test_a_short_soak_passes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--seconds", "60", "--rate", "9"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "flat" in done.stdout
