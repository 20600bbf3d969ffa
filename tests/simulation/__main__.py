"""`python -m tests.simulation`: plays simulated histories of the pipeline (docs/simulation.md)."""

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.simulation.bugs import BUGS
from tests.simulation.damages import DAMAGES, damages_of
from tests.simulation.guards import GUARDS, take_out

#: Bound before anything is simulated.
now = time.perf_counter


def at_least(least: float) -> Callable[[str], float]:
    """A number from the command line that may not be less; it is whole if `least` is."""

    def number(text: str) -> float:
        found = type(least)(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"{text} is too small, the least is {least:g}")
        return found

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description=__doc__,
        epilog="Exit code: 0 no invariant broken, 1 some broken, 2 used wrongly, 130 or 143 stopped.",
    )
    count = at_least(1)
    parser.add_argument("--seconds", type=at_least(0.1), help="how long seeds are played (default: 60)")
    parser.add_argument("--seeds", type=count, help="how many seeds are played")
    parser.add_argument("--first", type=count, help="the first of them (default: 1)")
    parser.add_argument("--only", type=count, nargs="+", metavar="SEED", help="play these seeds, ascending")
    parser.add_argument("--processes", type=count, help="in how many processes (default: cores, at most 4)")
    parser.add_argument("--seed", type=count, help="play this one and print its timeline")
    parser.add_argument(
        "--shorten", action="store_true", help="with --seed: print the shortest history that still fails"
    )
    parser.add_argument("--lines", type=count, help="print so many lines of a timeline (default: 400)")
    parser.add_argument("--length", type=count, help="commands of a history (default: by seed, 40 to 80)")
    parser.add_argument(
        "--without", help="take a guard out, or put a bug or a damage in: some seed fails then"
    )
    parser.add_argument("--beside", metavar="COMMIT", help="one worker has the code of a commit, or folder")
    parser.add_argument("--guards", action="store_true", help="list the guards")
    parser.add_argument("--bugs", action="store_true", help="list the bugs that can be put back")
    parser.add_argument("--damages", action="store_true", help="list the damages that can be put in")
    parser.add_argument("--digests", action="store_true", help="print the digest of every trace")
    parser.add_argument(
        "--whole", action="store_true", help="do not shorten a history that fails: it takes up to 80 runs"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="play on after a seed that fails; print only what broke"
    )
    return parser


def _parsed() -> argparse.Namespace:
    """The options; ends the process where they make no sense."""
    parser = _parser()
    asked = parser.parse_args()
    if asked.seed is None:
        if asked.shorten:
            parser.error("--shorten is for one --seed: a run of many seeds shortens the one that fails")
        if asked.only and (asked.seeds or asked.first):
            parser.error("--only names the seeds: leave out --seeds and --first")
    elif of_many := [
        f"--{name.replace('_', '-')}"
        for name in ("seconds", "seeds", "first", "only", "processes", "digests", "keep_going")
        if getattr(asked, name)
    ]:
        parser.error(f"--seed plays one seed: leave out {', '.join(of_many)}")
    if asked.without:
        try:
            damages_of(asked.without)
        except ValueError as error:
            parser.error(f"--without: {error}")
    asked.first = asked.first or 1
    return asked


def main() -> int:
    """Plays seeds; exit code 1 when an invariant broke."""
    asked = _parsed()
    if asked.guards:
        print("\n".join(guard.name for guard in GUARDS))
        return 0
    if asked.bugs:
        print("\n".join(f"{bug.name}: {bug.what}" for bug in BUGS))
        return 0
    if asked.damages:
        print("\n".join(f"{damage.name}: {damage.what}" for damage in DAMAGES))
        return 0
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings have the same order in every run.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], environment)
    if asked.without:
        for damage in damages_of(asked.without):
            take_out(damage)
    from tests.simulation.processes import cleaned_up
    from tests.simulation.releases import play_beside, unpack

    with cleaned_up() as folder:
        if asked.beside:
            tree = Path(asked.beside)
            try:
                play_beside(tree if tree.is_dir() else unpack(asked.beside, Path(folder) / "beside"))
            except ValueError as error:
                print(f"--beside: neither a folder nor a commit: {error}", file=sys.stderr)
                return 2
            print(f"worker-1 has the code of {asked.beside}", flush=True)
        try:
            if asked.seed is not None:
                return play_one(asked.seed, asked.length, asked.shorten, asked.lines)
            return play_many(asked)
        except KeyboardInterrupt:
            return 130


def play_one(seed: int, length: int | None, shorten: bool = False, lines: int | None = None) -> int:
    """Plays a seed here and prints its timeline, or that of the shortest history that still fails."""
    from tests.simulation.plan import plan_of
    from tests.simulation.processes import stay_on_one_core
    from tests.simulation.report import LINES_MAX, told
    from tests.simulation.shrinking import shortened
    from tests.simulation.world import Servers, play

    stay_on_one_core(os.getpid())
    servers = Servers()
    try:
        verdict = play(plan_of(seed, length), servers)
        if shorten and verdict.problems:
            verdict = shortened(verdict, lambda one: play(one, servers))
        print(told(verdict, lines or LINES_MAX))
        return 1 if verdict.problems else 0
    finally:
        servers.close()


def play_many(asked: argparse.Namespace) -> int:
    """Plays seeds in several processes, and prints what they met."""
    from tests.simulation.processes import Played, play_seeds, processes_by_default
    from tests.simulation.report import awaited_steps, coverage, never_reached

    began, played, events = now(), 0, 0
    virtual = 0.0
    met: Counter[tuple[str, str]] = Counter()
    awaited: Counter[str] = Counter()
    begun: Counter[str] = Counter()
    broken: list[int] = []

    def report(one: Played) -> None:
        nonlocal played, events, virtual
        played += 1
        if one.problems and asked.keep_going:
            broken.append(one.seed)
            print(f"seed {one.seed} fails:", *one.problems, sep="\n  ", flush=True)
        events += one.events
        virtual += one.seconds
        met.update(one.met)
        awaited.update(one.awaited)
        begun.update(one.begun)
        if asked.digests:
            print(f"{one.seed} {one.digest}", flush=True)

    seeds: Iterable[int]
    if asked.only:
        seeds = sorted(set(asked.only))
    elif asked.seeds:
        seeds = range(asked.first, asked.first + asked.seeds)
    else:
        seeds = itertools.count(asked.first)
    seconds = asked.seconds or (None if asked.seeds or asked.only else 60.0)
    processes = asked.processes or processes_by_default()
    try:
        failed = play_seeds(seeds, asked.length, processes, report, seconds, asked.keep_going)
    except (KeyboardInterrupt, SystemExit):
        broke = f", {len(broken)} of them fail: {', '.join(map(str, broken))}" if broken else ""
        print(f"stopped after {played} seeds in {now() - began:.0f} s{broke}", flush=True)
        raise
    took = now() - began
    if failed is not None:
        print(f"seed {failed.seed} fails, after {played} seeds in {took:.0f} s", flush=True)
        if play_one(failed.seed, asked.length, not asked.whole, asked.lines) == 0:
            print("It failed in its process, and not when it was played again:", *failed.problems, sep="\n  ")
        return 1
    result = f"{len(broken)} of them fail: {', '.join(map(str, broken))}" if broken else "no invariant broken"
    print(
        f"{played} seeds in {took:.0f} s ({played / took:.1f} a second): {events:,} events, "
        f"{virtual / 60:.0f} minutes of virtual time, {result}"
    )
    if not asked.without:
        print(coverage(met))
        print(awaited_steps(awaited, begun))
        for step in (holes := never_reached(awaited, begun)):
            print(f"{awaited[step]} faults waited for the step {step!r}, which no process has reached")
        return 1 if broken or holes else 0
    return 1 if broken else 0


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)
