"""`python -m bench`: the rows of the performance table as ratios with their spread, and where the time
goes.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import click
import uvloop

from bench import deciding, masters, pieces, recovering, replaying, streaming
from grabstream.ops.console.output import console, table

#: What each row is, what is divided by what, and the ratio it has to reach.
ROWS = {
    "1": ("decisions, 100 callers × lists of 32", "ours/theirs", ">= 2"),
    "2": ("single grabs, 20 callers", "ours/theirs", ">= 3"),
    "3": ("command in Kafka → books committed", "ours/theirs", ">= 0.5"),
    "4": ("replay journal → ledger, against COPY of its rows", "ours/theirs", ">= 0.5"),
    "5": ("journaled answer at 2 thousand/s", "ours/theirs", "<= 3"),
    "6": ("decision → ledger row at 2 thousand/s", "ours/theirs", "<= 5"),
    "7": ("memory a grab kept", "ours/theirs", "<= 1"),
    "8": ("cost beside 10 million grabs, against 1 thousand", "ours/theirs", "<= 1.1"),
    "limits": ("grab under three limits, against a hand-written script", "ours/theirs", ""),
    "holds": ("hold and confirm, against envelope grabs", "ours/theirs", ""),
    "masters": ("work of a decision on three Redis masters, against one", "ours/theirs", ""),
    "rebuild": ("events a rebuild of Redis applies, against decisions that made them", "ours/theirs", ""),
    "takeover": ("a shard taken over, against connections and one send", "ours/theirs", ""),
    "past": ("emptied Redis → next decision beside 10 million past grabs, of 10 s", "ours/theirs", "<= 1"),
    "expiry": ("100 thousand holds end at once, against holds made", "ours/theirs", ""),
}


async def _measure(rows: set[str], runs: int, quick: bool) -> dict[str, dict[str, Any]]:
    small = 10 if quick else 1
    found: dict[str, dict[str, Any]] = {}
    if "1" in rows:
        found["1"] = await deciding.decisions(runs, 400_000 // small)
    if "2" in rows:
        found["2"] = await deciding.singles(runs, 100_000 // small)
    if "3" in rows:
        found["3"] = await streaming.pipeline(runs, 160_000 // small)
    if "4" in rows:
        found["4"] = await replaying.replay(runs, 1_000_000 // small)
    if rows & {"5", "6"}:
        found |= {
            row: value
            for row, value in (await streaming.latency(runs, 20_000 // small)).items()
            if row in rows
        }
    if "7" in rows:
        found["7"] = await deciding.memory(1, 1_000_000 // small)
    if "8" in rows:
        found["8"] = await pieces.beside_many(runs, 10_000_000 // small)
    if "masters" in rows:
        found["masters"] = await masters.work_per_decision(runs, 240_000 // small)
    for row, measure in (
        ("limits", pieces.limits),
        ("holds", pieces.holds),
        ("expiry", pieces.expiry),
        ("rebuild", recovering.rebuild),
    ):
        if row in rows:
            found[row] = await measure(runs, 100_000 // small)
    if "takeover" in rows:
        found["takeover"] = await recovering.takeover(runs, 8)
    if "past" in rows:
        found["past"] = await recovering.beside_the_past(runs, 10_000_000 // small)
    return found


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
@click.option("--runs", default=3, show_default=True, help="How often each, ours and theirs in turn.")
@click.option("--quick", is_flag=True, help="A tenth of the size, to see that it runs.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    default=Path(".services/bench.json"),
    show_default=True,
)
def main(rows: str, runs: int, quick: bool, json_file: Path) -> None:
    """Measure against the classic way, both in one run. Nothing here is a test: read the ratios."""
    found = uvloop.run(_measure(set(rows.split(",")), runs, quick))
    lines = []
    for row, values in found.items():
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
    for row, values in found.items():
        for name, profile in values.get("profile", {}).items():
            console.print(
                f"row {row}, {name}: " + ", ".join(f"{part} {spent}" for part, spent in profile.items()),
                highlight=False,
            )
    json_file.parent.mkdir(parents=True, exist_ok=True)
    json_file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
