"""`python -m tests.protocol`: plays random histories of the takeover protocol (docs/protocol.md)."""

import argparse
import sys
import time
from collections import Counter

from tests.protocol.model import RULES, SCENARIOS, play


def main() -> int:
    """Plays histories and prints broken invariants; the exit code is 1 if an invariant broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.protocol", description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, default="all", help="which faults happen")
    parser.add_argument("--without", choices=RULES, action="append", default=[], help="leave a rule out")
    parser.add_argument("--seconds", type=float, default=60, help="how long to play histories")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first history")
    parser.add_argument("--trace", action="store_true", help="print only the history of the seed")
    asked = parser.parse_args()
    rules = set(RULES) - set(asked.without)
    if asked.trace:
        broken, world = play(asked.seed, rules, asked.scenario)
        print("\n".join([*world.trace, *broken]))
        return 1 if broken else 0
    first: dict[str, tuple[int, str]] = {}
    broke: Counter[str] = Counter()
    histories, events, until = 0, 0, time.monotonic() + asked.seconds
    while time.monotonic() < until:
        seed = asked.seed + histories
        broken, world = play(seed, rules, asked.scenario)
        histories += 1
        events += sum(len(record.events) for record in world.log)
        for problem in broken:
            broke[problem[:2]] += 1
            first.setdefault(problem[:2], (seed, problem))
    print(f"{histories:,} histories of scenario {asked.scenario}, {events:,} events journaled")
    for invariant, (seed, problem) in sorted(first.items()):
        print(f"{invariant} broke in {broke[invariant]}, first with --seed {seed} --trace: {problem}")
    return 1 if broke else 0


if __name__ == "__main__":
    sys.exit(main())
