"""`python -m tests.nightly` (`make nightly`): everything that is too long for `make test`, one step after
another, with a summary.

The output of each step goes to the terminal and to `.services/nightly/STEP.log`. The results are stored in
`.services/nightly/state.json` with the commit and a hash of uncommitted changes, so that `--resume` plays
only the steps that have not passed for this tree. Exit 1: a step failed, or ended without a verdict.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from grabstream.ops.console.output import console, table

PROJECT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = PROJECT / ".services" / "nightly"
#: How long a stopped step may take to clean up.
STOP_SECONDS: Final = 60.0
WITH_SERVERS: Final = "scripts/with-servers.sh"
PYTEST: Final = (WITH_SERVERS, sys.executable, "-m", "pytest")
REHEARSE: Final = (WITH_SERVERS, sys.executable, "-m", "grabstream.ops.cli", "rehearse")


class Step(NamedTuple):
    """A command whose exit code is 0 if it passed and 1 if it failed; any other code is not a verdict."""

    name: str
    what: str
    command: tuple[str, ...]
    environment: dict[str, str] = {}
    minutes_max: float = 60
    #: Whether busy processes, twice as many as cores, run at the same time.
    under_load: bool = False


class Result(NamedTuple):
    """The outcome of a step, and how long it took."""

    name: str
    outcome: str
    minutes: float


def steps() -> list[Step]:
    """All steps in their order: quick steps that find the most come first."""
    tests = {"CI": "1", "TIER": "nightly"}
    return [
        Step("demo", "the rehearsal of the envelopes", REHEARSE, minutes_max=10),
        Step("demo-under-load", "the same on a busy machine", REHEARSE, under_load=True, minutes_max=20),
        Step("week", "the week of a flash sale, 5,000 people",
        (*REHEARSE, "--story", "week", "--people", "5000"), minutes_max=30),
        Step("promotion", "five days of coupons, 5,000 people",
        (*REHEARSE, "--story", "promotion", "--people", "5000"), minutes_max=30),
        Step("upgrade", "from the last release, under traffic",
             (WITH_SERVERS, sys.executable, "-m", "tests.drill.upgrade", last_release() or "none"),
             minutes_max=15),
        Step("test-long", "the tests that are too long for every change, and new cases",
             ("make", "test-long"), {}, 60),
        Step("secured", "servers with TLS, logins, tokens and certificates of clients",
             (*PYTEST, "tests/ops/test_secured.py", "tests/streams/test_tokens_of_brokers.py"), tests, 30),
        Step("mutations", "every guard is removed", (WITH_SERVERS, sys.executable, "-m", "tests.mutations"),
        minutes_max=120),
        Step("long-histories", "the random histories, ten times as many",
             (*PYTEST, "tests/lua/histories/test_state_machine.py", "tests/models", "--timeout", "3600"),
             tests, 180),
        Step("simulation", "simulated histories, an hour of seeds that no run before has played",
             (sys.executable, "-m", "tests.simulation", "--seconds", "3600", "--first", str(new_seed())),
             minutes_max=90),
        Step("simulation-upgrade", "the same beside a worker of the day before",
             (sys.executable, "-m", "tests.simulation", "--seconds", "600", "--beside", day_before()),
             minutes_max=20),
        Step("large", "tests that are too long for every run",
        (*PYTEST, "tests", "-m", "nightly", "-s", "--timeout", "3600"), tests, 150),
        Step("soak", "an hour of steady load over all roles: flat memory, bounded lag",
             (WITH_SERVERS, sys.executable, "-m", "tests.soak"), minutes_max=90),
        Step("drill", "the kill matrix", (sys.executable, "-m", "tests.drill"), minutes_max=240),
        Step("test-cluster", "tests with servers, on a cluster",
             (*PYTEST, "tests/streams", "tests/connections", "tests/ops", "tests/workshop"),
        {"CI": "1", "CLUSTER": "1"}, 120),
        Step("drill-cluster", "the kill matrix on a cluster",
        (sys.executable, "-m", "tests.drill", "--cluster"), minutes_max=240),
    ]  # fmt: skip


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=PROJECT, check=True, capture_output=True, text=True
    ).stdout.strip()


def last_release() -> str | None:
    """The tag of the last release; None before the first one."""
    with contextlib.suppress(subprocess.CalledProcessError):
        return _git("describe", "--tags", "--abbrev=0", "HEAD^")
    return None


def new_seed() -> int:
    """The first seed of this night: a million for each day."""
    return int(time.time() // 86_400) * 1_000_000


def day_before() -> str:
    """The last commit of the day before, or the first one there is."""
    return _git("rev-list", "-1", "--before=yesterday", "HEAD") or _git("rev-list", "--max-parents=0", "HEAD")


def tree() -> str:
    """A name for the current tree: the commit, and a hash of uncommitted changes if there are any."""
    changed = _git("status", "--porcelain") and _git("diff", "HEAD") + _git(
        "ls-files", "--others", "--exclude-standard"
    )
    return _git("rev-parse", "HEAD") + (
        f"+{hashlib.sha256(changed.encode()).hexdigest()[:12]}" if changed else ""
    )


class State:
    """The results of the steps for one tree, stored in a file."""

    def __init__(self, path: Path, of_tree: str) -> None:
        self._path = path
        self._tree = of_tree
        stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.results = (
            {name: Result(*result) for name, result in stored.get("results", {}).items()}
            if stored.get("tree") == of_tree
            else {}
        )

    def keep(self, result: Result) -> None:
        """Stores a result."""
        self.results[result.name] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"tree": self._tree, "results": self.results}, indent=2))
        new.replace(self._path)


@contextlib.contextmanager
def load() -> Iterator[None]:
    """Runs busy processes, twice as many as cores, within the context. They also end when this process is
    killed.
    """
    busy = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
    processes = [
        subprocess.Popen([sys.executable, "-c", busy], start_new_session=True)
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Terminates a step; if it does not end in `STOP_SECONDS`, kills it and all processes it started."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def run(step: Step, folder: Path) -> Result:
    """Plays a step. On Ctrl-C, terminates the step, gives it time to clean up, and raises KeyboardInterrupt
    again.
    """
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as around:
        if step.under_load:
            around.enter_context(load())
        log = around.enter_context((folder / f"{step.name}.log").open("wb"))
        # A new session: otherwise the terminal would send Ctrl-C to every process of the step at once, and
        # the step would pass it on a second time.
        process = subprocess.Popen(
            step.command, cwd=PROJECT, env=os.environ | step.environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        timed_out = threading.Event()

        def time_out() -> None:
            timed_out.set()
            _end(process)

        timer = threading.Timer(step.minutes_max * 60, time_out)
        timer.start()
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            code = process.wait()
        except BaseException:
            # Its output must still be read: with a full pipe it could not end.
            reading = threading.Thread(target=process.stdout.read, daemon=True)
            reading.start()
            _end(process)
            raise
        finally:
            timer.cancel()
    if timed_out.is_set():
        outcome = f"no verdict: it took longer than {step.minutes_max:g} min"
    else:
        outcome = {0: "passed", 1: "failed"}.get(code, f"no verdict: it ended with {code}")
    return Result(step.name, outcome, round((time.monotonic() - began) / 60, 1))


def play(chosen: Sequence[Step], state: State, folder: Path, resume: bool) -> int:
    """Plays steps and prints the summary; returns the exit code."""
    stopped = False
    try:
        for number, step in enumerate(chosen, 1):
            before = state.results.get(step.name)
            if resume and before is not None and before.outcome == "passed":
                continue
            # A step has no verdict until it ends, also if this process is killed.
            state.keep(Result(step.name, "no verdict: stopped", 0.0))
            console.rule(f"{number} of {len(chosen)}: {step.name} – {step.what}", style="dim")
            state.keep(run(step, folder))
    except KeyboardInterrupt:
        stopped = True
    results = [state.results.get(step.name, Result(step.name, "not played", 0.0)) for step in chosen]
    console.print()
    console.print(table("Nightly", ("what", "result", "minutes"), results))
    if stopped:
        console.print("stopped; --resume plays the steps that have not passed", highlight=False)
        return 130
    return 0 if all(result.outcome == "passed" for result in results) else 1


@click.command()
@click.option("--only", multiple=True, help="A step by its name; may be repeated.")
@click.option("--resume", is_flag=True, help="Skip the steps that have passed for this tree.")
@click.option(
    "--list",
    "only_list",
    is_flag=True,
    help="Print the steps with their results for this tree, and play none.",
)
def main(only: tuple[str, ...], resume: bool, only_list: bool) -> None:
    """Play everything that is too long for `make test`. Exit 1: a step failed or has no verdict; 130:
    stopped.
    """
    everything = steps()
    unknown = set(only) - {step.name for step in everything}
    if unknown:
        raise click.BadParameter(
            f"no step is called {', '.join(sorted(unknown))}: --list prints them", param_hint="--only"
        )
    # Before the first release, there is nothing to upgrade from.
    chosen = [
        step
        for step in everything
        if (not only or step.name in only) and (step.name != "upgrade" or last_release())
    ]
    state = State(FOLDER / "state.json", tree())
    if only_list:
        rows = [
            (step.name, step.what, state.results[step.name].outcome if step.name in state.results else "–")
            for step in chosen
        ]
        console.print(table("Nightly", ("step", "what", "result"), rows))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(play(chosen, state, FOLDER, resume))


if __name__ == "__main__":
    main()
