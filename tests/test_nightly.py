"""`make nightly`: the exit code of a step is its result, a step that has passed is not played again, and
Ctrl-C lets the running step clean up.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nightly
from tests.conftest import wait_until
from tests.nightly import State, Step, play, run, steps


def step(name: str, code: str, **more: object) -> Step:
    return Step(name, "a step of a test", (sys.executable, "-c", code), **more)  # type: ignore[arg-type]


PASSES, FAILS = step("passes", "print('fine')"), step("fails", "raise SystemExit(1)")
FINDS_NOTHING = step("finds nothing", "raise SystemExit(5)")


def played(chosen: list[Step], folder: Path, resume: bool = False) -> tuple[int, dict[str, str]]:
    """Plays steps; returns the exit code, and the outcome of each step."""
    state = State(folder / "state.json", "this tree")
    code = play(chosen, state, folder, resume)
    return code, {name: result.outcome for name, result in state.results.items()}


def test_a_step_without_a_verdict_fails_the_run(tmp_path: Path) -> None:
    assert played([PASSES], tmp_path) == (0, {"passes": "passed"})
    assert played([PASSES, FAILS], tmp_path) == (1, {"passes": "passed", "fails": "failed"})
    code, outcomes = played([FINDS_NOTHING, PASSES], tmp_path)
    assert (code, outcomes["finds nothing"]) == (1, "no verdict: it ended with 5")


def test_the_summary_names_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played([PASSES, FAILS], tmp_path)
    summary = capsys.readouterr().out.rpartition("Nightly")[2]
    assert all(
        word in summary for word in ("what", "result", "minutes", "passes", "passed", "fails", "failed")
    )
    assert (tmp_path / "passes.log").read_text() == "fine\n"


def test_resume_plays_only_steps_that_have_not_passed_for_this_tree(tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    once = step("once", f"open({str(counted)!r}, 'a').write('x')")
    assert played([once, FAILS], tmp_path)[0] == 1
    assert played([once, PASSES], tmp_path, resume=True)[0] == 0
    assert counted.read_text() == "x"
    assert played([once], tmp_path)[0] == 0
    assert counted.read_text() == "xx", "without --resume all steps are played"
    assert State(tmp_path / "state.json", "another tree").results == {}, (
        "results of another tree do not count for this one"
    )


def test_a_step_that_takes_too_long_is_terminated(tmp_path: Path) -> None:
    slow = step("slow", "import time\nwhile True: time.sleep(1)", minutes_max=0.01)
    assert run(slow, tmp_path).outcome == "no verdict: it took longer than 0.01 min"


def busy_children(parent_pid: int) -> int:
    """The number of a process's children that are busy processes of `load`."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            is_busy = b"getppid() == parent" in (process / "cmdline").read_bytes()
            count += int(parent) == parent_pid and is_busy
    return count


@pytest.mark.long
def test_busy_processes_run_beside_a_step_under_load_and_end_with_it(tmp_path: Path) -> None:
    count = f"from tests.test_nightly import busy_children; print(busy_children({os.getpid()}))"
    assert run(step("loaded", count, under_load=True), tmp_path).outcome == "passed"
    assert int((tmp_path / "loaded.log").read_text()) == 2 * (os.cpu_count() or 1)
    assert busy_children(os.getpid()) == 0


def test_ctrl_c_lets_the_step_clean_up_and_leaves_the_others_unplayed(tmp_path: Path) -> None:
    ready, cleaned = tmp_path / "ready", tmp_path / "cleaned"
    waits = f"""
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path({str(cleaned)!r}).touch(); sys.exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path({str(ready)!r}).touch()
while True: time.sleep(1)
"""
    script = f"""
import signal, sys
from pathlib import Path
from tests.nightly import State, Step, play
signal.signal(signal.SIGINT, signal.default_int_handler)
chosen = [Step("waits", "", (sys.executable, "-c", {waits!r})), Step("later", "", (sys.executable, "-c", ""))]
sys.exit(play(chosen, State(Path({str(tmp_path)!r}) / "state.json", "t"), Path({str(tmp_path)!r}), True))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until(ready.exists, 30, "the begin of the step")
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "--resume" in output
    assert cleaned.exists(), "the step was terminated, and had the time to clean up"
    assert json.loads((tmp_path / "state.json").read_text())["results"] == {
        "waits": ["waits", "no verdict: stopped", 0.0]
    }


def test_commands_of_all_steps_can_be_started() -> None:
    """Every file and module that a step names exists, and no two steps have the same name."""
    named = [word for step in steps() for word in step.command if "/" in word]
    assert [word for word in named if not (nightly.PROJECT / word).exists()] == []
    modules = [
        word
        for step in steps()
        for before, word in zip(step.command, step.command[1:], strict=False)
        if before == "-m"
    ]
    assert set(modules) >= {
        "tests.drill", "tests.drill.upgrade", "tests.mutations", "tests.soak", "grabstream.ops.cli", "pytest"
    }  # fmt: skip
    assert len({step.name for step in steps()}) == len(steps())


def test_the_table_of_contributors_has_every_step_and_its_bound() -> None:
    text = (nightly.PROJECT / "CONTRIBUTING.md").read_text()
    lines = text.partition("| step | runs | at most |")[2].partition("\n\n")[0].splitlines()[2:]
    listed: list[tuple[str, float]] = []
    for line in lines:
        names, _, bounds = line.strip("| ").split(" | ")
        listed += zip(
            [name.strip("` ") for name in names.split(",")], map(float, bounds.split(",")), strict=True
        )
    assert listed == [(step.name, step.minutes_max) for step in steps()]
