"""`python -m bench`: measures the rows of the performance table, and prints ratios with their range and where
the time was spent.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import click
import uvloop

from bench import deciding, masters, pieces, recovering, replaying, streaming
from grabstream.ops.console.output import console, table

#: By row: what is measured, which ratio is printed, and the ratio wanted.
ROWS = {
    "1": ("decisions, 100 callers × lists of 32", "ours/theirs", ">= 2"),
    "2": ("single grabs, 20 callers", "ours/theirs", ">= 3"),
    "3": ("command in Kafka → books committed", "ours/theirs", ">= 0.5"),
    "4": ("replay journal → ledger, against COPY of its rows", "ours/theirs", ">= 0.5"),
    "5": ("journaled answer at 2 thousand/s", "ours/theirs", "<= 3"),
    "6": ("decision → ledger row at 2 thousand/s", "ours/theirs", "<= 5"),
    "7": ("memory a grab kept", "ours/theirs", "<= 1"),
    "12": ("an idle worker with all roles, against one percent of a core", "ours/theirs", "<= 1"),
    "8": ("cost beside 10 million grabs, against 1 thousand", "ours/theirs", "<= 1.1"),
    "limits": ("grab under three limits, against a hand-written script", "ours/theirs", ""),
    "holds": ("hold and confirm, against envelope grabs", "ours/theirs", ""),
    "masters": ("work of a decision on three Redis masters, against one", "ours/theirs", ""),
    "rebuild": ("events a rebuild of Redis applies, against decisions that made them", "ours/theirs", ""),
    "takeover": ("a shard taken over, against connections and one send", "ours/theirs", ""),
    "past": (
        "emptied Redis → next decision beside 10 million past grabs, against 10 s",
        "ours/theirs",
        "<= 1",
    ),
    "expiry": ("100 thousand holds end at the same time, against holds made", "ours/theirs", ""),
}


async def _measure(rows: set[str], runs: int, quick: bool) -> dict[str, dict[str, Any]]:
    divisor = 10 if quick else 1
    measured: dict[str, dict[str, Any]] = {}
    if "1" in rows:
        measured["1"] = await deciding.decisions(runs, 400_000 // divisor)
    if "2" in rows:
        measured["2"] = await deciding.singles(runs, 100_000 // divisor)
    if "3" in rows:
        measured["3"] = await streaming.pipeline(runs, 160_000 // divisor)
    if "4" in rows:
        measured["4"] = await replaying.replay(runs, 1_000_000 // divisor)
    if rows & {"5", "6"}:
        measured |= {
            row: value
            for row, value in (await streaming.latency(runs, 20_000 // divisor)).items()
            if row in rows
        }
    if "12" in rows:
        measured["12"] = await streaming.idle(runs, 40 // divisor)
    if "7" in rows:
        measured["7"] = await deciding.memory(1, 1_000_000 // divisor)
    if "8" in rows:
        measured["8"] = await pieces.beside_many(runs, 10_000_000 // divisor)
    if "masters" in rows:
        measured["masters"] = await masters.work_per_decision(runs, 240_000 // divisor)
    for row, measure in (
        ("limits", pieces.limits),
        ("holds", pieces.holds),
        ("expiry", pieces.expiry),
        ("rebuild", recovering.rebuild),
    ):
        if row in rows:
            measured[row] = await measure(runs, 100_000 // divisor)
    if "takeover" in rows:
        measured["takeover"] = await recovering.takeover(runs, 8)
    if "past" in rows:
        measured["past"] = await recovering.beside_the_past(runs, 10_000_000 // divisor)
    return measured


def _spread(values: list[float]) -> str:
    form = "{:,.0f}" if min(values) >= 100 else "{:,.2f}"
    low, middle, high = (
        form.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({low} – {high})"


def _reached(ratio: float, wanted: str) -> str:
    if not wanted:
        return ""
    sign, bound = wanted.split()
    return "yes" if (ratio >= float(bound) if sign == ">=" else ratio <= float(bound)) else "no"


@click.command()
@click.option("--rows", default=",".join(ROWS), show_default=True, help="Which rows to measure.")
@click.option("--runs", default=3, show_default=True, help="How often to measure each side of a row.")
@click.option("--quick", is_flag=True, help="A tenth of the size, to check that it runs.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    default=Path(".services/bench.json"),
    show_default=True,
)
def main(rows: str, runs: int, quick: bool, json_file: Path) -> None:
    """Measure this system against the classic way in one run. This is not a test: read the ratios."""
    measured = uvloop.run(_measure(set(rows.split(",")), runs, quick))
    lines = []
    for row, values in measured.items():
        what, _, wanted = ROWS[row]
        ratios = [ours / theirs for ours, theirs in zip(values["ours"], values["theirs"], strict=True)]
        values["ratios"] = ratios
        reached = _reached(statistics.median(ratios), wanted)
        lines.append(
            (
                row,
                what,
                _spread(ratios),
                wanted,
                reached,
                _spread(values["ours"]),
                _spread(values["theirs"]),
                values["unit"],
            )
        )
    columns = ("row", "what", "ratio: median (min – max)", "wanted", "reached", "ours", "classic", "unit")
    console.print(table("Ours against the classic way", columns, lines))
    for row, values in measured.items():
        for name, profile in values.get("profile", {}).items():
            console.print(
                f"row {row}, {name}: " + ", ".join(f"{part} {spent}" for part, spent in profile.items()),
                highlight=False,
            )
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
