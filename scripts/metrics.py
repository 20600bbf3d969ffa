"""The table of all metrics in docs/metrics.md, generated from metrics/catalogue.py.

`--check docs/metrics.md` compares the table in that file, `--write docs/metrics.md` writes it there.
"""

import argparse
import sys
from pathlib import Path

from grabstream.metrics.catalogue import METRICS, Metric

BEGINS, ENDS = "<!-- metrics -->", "<!-- /metrics -->"
HEAD = ("metric", "kind", "labels", "of", "meaning")


def table() -> str:
    """The table in Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *map(_row, METRICS)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(metric: Metric) -> tuple[str, ...]:
    of = "the system" if metric.scope == "system" else " and ".join(metric.processes)
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
    return f"`{metric.name}`", metric.kind, labels, of, metric.meaning


def main() -> int:
    """Checks or writes the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", metavar="FILE", type=Path)
    action.add_argument("--write", metavar="FILE", type=Path)
    asked = parser.parse_args()
    file: Path = asked.check or asked.write
    before, begins, rest = file.read_text(encoding="utf-8").partition(BEGINS)
    between, ends, after = rest.partition(ENDS)
    if not ends:
        sys.stderr.write(f"{file}: must contain {BEGINS} and after it {ENDS}\n")
        return 1
    wanted = f"\n\n{table()}\n"
    if asked.write:
        file.write_text(before + begins + wanted + ends + after, encoding="utf-8")
    elif between != wanted:
        sys.stderr.write(f"{file} differs from the code: run `python scripts/metrics.py --write {file}`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
