"""`python -m tests.simulation`: plays simulated histories of the pipeline (docs/simulation.md)."""

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from pathlib import Path

from tests.simulation.bugs import BUGS
from tests.simulation.damages import DAMAGES, damages_of
from tests.simulation.guards import GUARDS, take_out

#: Bound before anything is simulated.
now = time.perf_counter


def main() -> int:
    """Plays seeds; exit code 1 when an invariant broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, help="how long seeds are played")
    parser.add_argument("--seeds", type=int, help="how many seeds are played")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--processes", type=int, help="in how many processes (default: cores, at most 4)")
    parser.add_argument("--seed", type=int, help="play this one and print its timeline")
    parser.add_argument(
        "--shorten", action="store_true", help="with --seed: print the shortest history that still fails"
    )
    parser.add_argument("--length", type=int, help="commands of a history (default: by seed, 40 to 80)")
    parser.add_argument(
        "--without", help="take a guard out, or put a bug or a damage in: some seed fails then"
    )
    parser.add_argument("--beside", metavar="COMMIT", help="one worker has the code of a commit, or folder")
    parser.add_argument("--guards", action="store_true", help="list the guards")
    parser.add_argument("--bugs", action="store_true", help="list the bugs that can be put back")
    parser.add_argument("--damages", action="store_true", help="list the damages that can be put in")
    parser.add_argument("--digests", action="store_true", help="print the digest of every trace")
    parser.add_argument("--whole", action="store_true", help="do not shorten a history that fails")
    parser.add_argument(
        "--keep-going", action="store_true", help="play on after a seed that fails; print only what broke"
    )
    asked = parser.parse_args()
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
            play_beside(tree if tree.is_dir() else unpack(asked.beside, Path(folder) / "beside"))
        try:
            if asked.seed is not None:
                return play_one(asked.seed, asked.length, asked.shorten)
            return play_many(asked)
        except KeyboardInterrupt:
            return 130


def play_one(seed: int, length: int | None, shorten: bool = False) -> int:
    """Plays a seed here and prints its timeline, or that of the shortest history that still fails."""
    from tests.simulation.plan import plan_of
    from tests.simulation.processes import stay_on_one_core
    from tests.simulation.report import told
    from tests.simulation.shrinking import shortened
    from tests.simulation.world import Servers, play

    stay_on_one_core(os.getpid())
    servers = Servers()
    try:
        verdict = play(plan_of(seed, length), servers)
        if shorten and verdict.problems:
            verdict = shortened(verdict, lambda one: play(one, servers))
        print(told(verdict))
        return 1 if verdict.problems else 0
    finally:
        servers.close()


def play_many(asked: argparse.Namespace) -> int:
    """Plays seeds in several processes, and prints what they met."""
    from tests.simulation.processes import Played, play_seeds, processes_by_default
    from tests.simulation.report import coverage

    began, played, events = now(), 0, 0
    virtual = 0.0
    met: Counter[tuple[str, str]] = Counter()
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
        if asked.digests:
            print(f"{one.seed} {one.digest}", flush=True)

    seeds = (
        itertools.count(asked.first) if asked.seeds is None else range(asked.first, asked.first + asked.seeds)
    )
    seconds = asked.seconds or (None if asked.seeds else 60.0)
    processes = asked.processes or processes_by_default()
    failed = play_seeds(seeds, asked.length, processes, report, seconds, asked.keep_going)
    took = now() - began
    if failed is not None:
        print(f"seed {failed.seed} fails, after {played} seeds in {took:.0f} s", flush=True)
        if play_one(failed.seed, asked.length, shorten=not asked.whole) == 0:
            print("It failed in its process, and not when it was played again:", *failed.problems, sep="\n  ")
        return 1
    result = f"{len(broken)} of them fail: {', '.join(map(str, broken))}" if broken else "no invariant broken"
    print(
        f"{played} seeds in {took:.0f} s ({played / took:.1f} a second): {events:,} events, "
        f"{virtual / 60:.0f} minutes of virtual time, {result}"
    )
    if not asked.without:
        print(coverage(met))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
