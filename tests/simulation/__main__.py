"""`python -m tests.simulation`: plays simulated histories of the pipeline (docs/simulation.md)."""

import argparse
import gc
import os
import sys
import time
from collections import Counter

from tests.simulation.guards import GUARDS, guard_of, take_out

#: Bound before anything is simulated.
now = time.perf_counter


def main() -> int:
    """Plays seeds; exit code 1 when an invariant broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, help="how long seeds are played")
    parser.add_argument("--seeds", type=int, help="how many seeds are played")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one and print its timeline")
    parser.add_argument("--without", help="take a guard out: some seed should fail then")
    parser.add_argument("--guards", action="store_true", help="list the guards")
    parser.add_argument("--digests", action="store_true", help="print the digest of every trace")
    parser.add_argument("--whole", action="store_true", help="do not shorten a history that fails")
    asked = parser.parse_args()
    if asked.guards:
        print("\n".join(guard.name for guard in GUARDS))
        return 0
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings have the same order in every run.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], environment)
    if asked.without:
        take_out(guard_of(asked.without))
    from tests.simulation.plan import plan_of
    from tests.simulation.redis_server import Store
    from tests.simulation.report import coverage, told
    from tests.simulation.shrinking import shortened
    from tests.simulation.world import play

    store = Store()
    gc.collect()
    gc.freeze()
    try:
        if asked.seed is not None:
            verdict = play(plan_of(asked.seed), store)
            print(told(verdict))
            return 1 if verdict.problems else 0
        began, played, events = now(), 0, 0
        virtual = 0.0
        met: Counter[tuple[str, str]] = Counter()
        seconds = asked.seconds or (None if asked.seeds else 60.0)
        while (asked.seeds is None or played < asked.seeds) and (seconds is None or now() - began < seconds):
            plan = plan_of(asked.first + played)
            verdict = play(plan, store)
            played += 1
            events += verdict.events
            virtual += verdict.seconds
            met += verdict.met
            if asked.digests:
                print(f"{plan.seed} {verdict.digest}")
            if verdict.problems:
                print(f"seed {plan.seed} fails, after {played} seeds in {now() - began:.0f} s")
                if not asked.whole:
                    verdict = shortened(verdict, lambda one: play(one, store))
                print(told(verdict))
                return 1
        took = now() - began
        print(
            f"{played} seeds in {took:.0f} s ({played / took:.1f} a second): {events:,} events, "
            f"{virtual / 60:.0f} minutes of virtual time, no invariant broken"
        )
        if not asked.without:
            print(coverage(met))
        return 0
    finally:
        store.close()


if __name__ == "__main__":
    sys.exit(main())
