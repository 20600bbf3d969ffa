"""Forked processes of the command line (tests/support/forks.py) are like those that are started."""

import asyncio
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grabstream.settings import Settings, child_environment
from tests.conftest import until
from tests.support import forks
from tests.support.command_line import grabstream


def test_processes_draw_different_random_numbers() -> None:
    assert len({grabstream("config", "--new-seal-key").stdout for _ in range(3)}) == 3


async def test_calls_at_the_same_time_get_their_own_answers() -> None:
    verbs = ("open", "close", "grab", "verify", "rebuild", "statsu")
    answers = await asyncio.gather(*(asyncio.to_thread(grabstream, verb, "--help") for verb in verbs))
    assert [done.returncode for done in answers] == [0, 0, 0, 0, 0, 2]
    for verb, done in zip(verbs[:-1], answers, strict=False):
        assert done.stdout.startswith(f"Usage: grabstream {verb} ")


async def test_a_signal_ends_it_and_is_its_exit_code(system: Settings, worker: Callable[..., Any]) -> None:
    running = worker(system, "relay")
    await until(lambda: "owner of term" in running.log.read_text(), 60, "a relay")
    assert running.process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(0.1)
    running.signal(signal.SIGKILL)
    assert await asyncio.to_thread(running.process.wait, 30) == -signal.SIGKILL
    assert running.process.poll() == running.process.returncode == -signal.SIGKILL
    running.signal(signal.SIGTERM)  # the process is gone


def test_one_that_is_stopped_holds_up_no_other(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as output:
        first = forks.start(("config", "--json"), child_environment(), None, output, output)
        first.send_signal(signal.SIGSTOP)
        assert grabstream("config", "--json").returncode == 0
        first.send_signal(signal.SIGCONT)
        assert first.wait(60) == 0
