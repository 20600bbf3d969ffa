"""`python -m bench`: measures the rows of the performance table, and prints ratios with their range and where
the time was spent.
"""

import json
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
import uvloop

from bench import (
    checkouts,
    clients,
    crowds,
    deciding,
    exporting,
    growth,
    masters,
    peers,
    pieces,
    recovering,
    replaying,
    replica,
    serving,
    stalls,
    streaming,
    tls,
)
from grabstream.ops.console.output import console, table

#: By row: what is measured, which ratio is printed, and the ratio wanted.
ROWS = {
    "1": ("decisions, 100 callers × lists of 32", "ours/theirs", ">= 3"),
    "2": ("single grabs, 20 callers", "ours/theirs", ">= 3"),
    "200": ("single grabs, 200 callers", "ours/theirs", ">= 3"),
    "11": ("refusals (sold out) of single grabs, 200 callers", "ours/theirs", ">= 3"),
    "3": ("command in Kafka → books committed", "ours/theirs", ">= 1"),
    "4": ("replay journal → ledger in runs of 20, against COPY of a row a grab", "ours/theirs", ">= 0.7"),
    "export": (
        "journal → Parquet, a grab in a line, against replay --into -",
        "ours/theirs",
        ">= 1",
    ),
    "export-runs": ("the same with 20 grabs in a line", "ours/theirs", ""),
    "5": ("journaled answer at 2 thousand/s", "ours/theirs", "<= 3"),
    "6": ("decision → ledger row at 2 thousand/s", "ours/theirs", "<= 5"),
    "7": ("memory a grab kept", "ours/theirs", "<= 0.75"),
    "12": ("an idle worker with all roles, against two percent of a core", "ours/theirs", "<= 1"),
    "8": ("cost beside 10 million grabs, against 1 thousand", "ours/theirs", "<= 1.1"),
    "9": ("over HTTP, three lists and two grabs of five, against constants", "ours/theirs", ">= 0.5"),
    "grabs": ("journaled grabs over HTTP, against a constant", "ours/theirs", ">= 0.5"),
    "uvicorn": (
        "a journaled grab over HTTP, against a constant of a bare uvicorn, by processor time",
        "ours/theirs",
        "<= 1.3",
    ),
    "uvicorn-mix": (
        "three lists and two journaled grabs of five, against a constant of a bare uvicorn, by processor "
        "time",
        "ours/theirs",
        "<= 1.3",
    ),
    "processes": (
        "journaled grabs over HTTP by the gateway's processor time, in two processes against one",
        "ours/theirs",
        ">= 0.9",
    ),
    "lists": ("lists over HTTP, against a constant", "ours/theirs", ">= 0.8"),
    "items": ("lists over HTTP, against one call of Redis for each item", "ours/theirs", ">= 1"),
    "waits": ("journaled grab over HTTP at half load, p99", "ours/theirs", "<= 3"),
    "lone": ("journaled grab of a lone caller over HTTP, p50", "ours/theirs", "<= 2"),
    "machine": (
        "processor time of all processes of a journaled grab over HTTP at 2 thousand/s, against 400 µs",
        "ours/theirs",
        "<= 1",
    ),
    "overload": (
        "journaled grab over HTTP, 3 × what is served, p99 of what is accepted, against half load",
        "ours/theirs",
        "<= 3",
    ),
    "overload-memory": ("the gateway's memory at its end, against its middle", "ours/theirs", "<= 1.05"),
    "overload-recovery": ("time to recover after it, against 2 s", "ours/theirs", "<= 1"),
    "stall": (
        "longest request of 400 connections in 60 s, grabs over HTTP, against 0.5 s",
        "ours/theirs",
        "<= 1",
    ),
    "client": ("call of AsyncClient, against aiohttp alone, by processor time", "ours/theirs", "<= 2"),
    "tigerfans": ("reserve and pay over HTTP, against TigerFans (needs --tigerfans)", "ours/theirs", ">= 10"),
    "parts": ("grab of an envelope of a million parts, against a thousand", "ours/theirs", "<= 1.1"),
    "held": (
        "hold, confirm, release or expiry beside a million holds of an offer, against a thousand",
        "ours/theirs",
        "<= 1.1",
    ),
    "offers": (
        "a command in a campaign of 10 thousand open offers and as many retired ones, against one of two",
        "ours/theirs",
        "<= 1.1",
    ),
    "replica": (
        "decisions in lists with a replica and min-replicas-to-write 1, against none, by processor time",
        "ours/theirs",
        ">= 0.9",
    ),
    "file": (
        "decisions in lists with a replica, which alone writes a file, against both servers writing one",
        "ours/theirs",
        "",
    ),
    "tls": ("decisions in lists over TLS, against none, by processor time", "ours/theirs", ""),
    "tls-singles": ("single grabs over TLS, 20 callers, against none, by processor time", "ours/theirs", ""),
    "secured": (
        "command in Kafka → books committed, servers with TLS and logins, against none",
        "ours/theirs",
        "",
    ),
    "limits": ("grab under three limits, against a hand-written script", "ours/theirs", ">= 1"),
    "coupon": ("grab under three limits, against the script of an article", "ours/theirs", ">= 1"),
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
    "hot-row-20": ("journaled grabs, 20 callers, against a hot row of PostgreSQL", "ours/theirs", ""),
    "hot-row-200": ("journaled grabs, 200 callers, against a hot row of PostgreSQL", "ours/theirs", ""),
    "bullmq": ("hold and confirm, against a job added and finished by BullMQ", "ours/theirs", ""),
    "eventsourcing": (
        "stored events → a new read model, against ProjectionRunner of eventsourcing",
        "ours/theirs",
        "",
    ),
}

#: What `--peers` measures; with --tigerfans, row `tigerfans` too.
PEERS = ("hot-row-20", "hot-row-200", "bullmq", "eventsourcing")

#: Rows that are measured only where --rows or --peers names them: they need what is not in this repository,
#: or start two sets of servers.
ON_DEMAND = frozenset({"tigerfans", "secured", "file", *PEERS})


def _measurements(
    runs: int, quick: bool, tigerfans: Path | None
) -> dict[tuple[str, ...], Callable[[], Awaitable[Any]]]:
    """What measures which rows: one row, or several by name."""
    divisor = 10 if quick else 1
    return {
        ("1",): lambda: deciding.decisions(runs, 400_000 // divisor),
        ("2",): lambda: deciding.singles(runs, 100_000 // divisor, 20),
        ("200",): lambda: deciding.singles(runs, 200_000 // divisor, 200),
        ("11",): lambda: deciding.singles(runs, 200_000 // divisor, 200, is_sold_out=True),
        ("3",): lambda: streaming.pipeline(runs, 160_000 // divisor),
        ("4",): lambda: replaying.replay(runs, 1_000_000 // divisor),
        ("export",): lambda: exporting.export(runs, 1_000_000 // divisor, 1),
        ("export-runs",): lambda: exporting.export(runs, 1_000_000 // divisor, 20),
        ("5", "6"): lambda: streaming.latency(runs, 20_000 // divisor),
        ("12",): lambda: streaming.idle(runs, 40 // divisor),
        ("7",): lambda: deciding.memory(1, 1_000_000 // divisor),
        ("8",): lambda: pieces.beside_many(runs, 10_000_000 // divisor),
        ("9",): lambda: serving.mix(runs, 10 / divisor),
        ("grabs",): lambda: serving.grabs(runs, 10 / divisor),
        ("uvicorn",): lambda: serving.against_uvicorn(runs, 10 / divisor, serving.GRABS),
        ("uvicorn-mix",): lambda: serving.against_uvicorn(runs, 10 / divisor, serving.MIX),
        ("processes",): lambda: serving.processes(runs, 10 / divisor),
        ("lists",): lambda: serving.lists(runs, 10 / divisor),
        ("items",): lambda: serving.items(runs, 10 / divisor),
        ("waits",): lambda: serving.latency(runs, 10 / divisor),
        ("lone",): lambda: serving.lone(runs, 10 / divisor),
        ("machine",): lambda: crowds.machine(runs, 10 / divisor),
        ("overload", "overload-memory", "overload-recovery"): lambda: crowds.overload(runs, 10 / divisor),
        ("stall",): lambda: stalls.longest(runs, 60 / divisor),
        ("client",): lambda: clients.call(runs, 5_000 // divisor),
        ("tigerfans",): lambda: checkouts.checkouts(_needed(tigerfans), runs, divisor),
        ("parts",): lambda: growth.parts(runs, 1_000_000 // divisor),
        ("held",): lambda: growth.held(runs, 1_000_000 // divisor),
        ("offers",): lambda: growth.offers(runs, 10_000 // divisor),
        ("replica",): lambda: replica.decisions(runs, 400_000 // divisor),
        ("file",): lambda: replica.file_of_replica(runs, 400_000 // divisor),
        ("tls", "tls-singles"): lambda: tls.decisions(runs, 400_000 // divisor),
        ("secured",): lambda: tls.pipeline(runs, 160_000 // divisor),
        ("masters",): lambda: masters.work_per_decision(runs, 240_000 // divisor),
        ("limits",): lambda: pieces.limits(runs, 100_000 // divisor),
        ("coupon",): lambda: pieces.coupon(runs, 100_000 // divisor),
        ("holds",): lambda: pieces.holds(runs, 100_000 // divisor),
        ("expiry",): lambda: pieces.expiry(runs, 100_000 // divisor),
        ("hot-row-20",): lambda: peers.hot_row(runs, 20_000 // divisor, 20),
        ("hot-row-200",): lambda: peers.hot_row(runs, 20_000 // divisor, 200),
        ("bullmq",): lambda: peers.jobs(runs, 20_000 // divisor),
        ("eventsourcing",): lambda: peers.rebuilt(runs, 100_000 // divisor),
        ("rebuild",): lambda: recovering.rebuild(runs, 100_000 // divisor),
        ("takeover",): lambda: recovering.takeover(runs, 8),
        ("past",): lambda: recovering.beside_the_past(runs, 10_000_000 // divisor),
    }


def _needed(folder: Path | None) -> Path:
    assert folder is not None
    return folder


async def _measure(
    rows: set[str],
    measurements: dict[tuple[str, ...], Callable[[], Awaitable[Any]]],
    measured: Callable[[str, dict[str, Any]], None],
) -> list[str]:
    """Measures rows, and calls `measured` when each has ended; returns those that failed."""
    failed = []
    for row_names, measure in measurements.items():
        if not (wanted := [row for row in row_names if row in rows]):
            continue
        console.print(f"row {', '.join(wanted)}: {ROWS[wanted[0]][0]} …", highlight=False)
        try:
            values = await measure()
        except Exception:
            console.print_exception()
            failed += wanted
            continue
        for row in wanted:
            measured(row, values if len(row_names) == 1 else values[row])
    return failed


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
@click.option(
    "--rows",
    default=",".join(row for row in ROWS if row not in ON_DEMAND),
    show_default=True,
    help="Which rows to measure.",
)
@click.option(
    "--peers",
    "with_peers",
    is_flag=True,
    help=f"Measure against what people use instead, and not --rows: {', '.join(PEERS)}, and with --tigerfans "
    "that row. Each is installed from its registry into a temporary folder (needs npm for bullmq).",
)
@click.option("--runs", default=3, show_default=True, help="How often to measure each side of a row.")
@click.option("--quick", is_flag=True, help="A tenth of the size, to check that it runs.")
@click.option(
    "--tigerfans",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="For row tigerfans: a checkout of github.com/renerocksai/tigerfans with its requirements in venv/. "
    "It is started there as ACCT_BACKEND=pg PAYSESSION_BACKEND=pg DATABASE_URL=… DB_POOL_SIZE=10 "
    "MOCK_WEBHOOK_URL=… uvicorn tigerfans.server:app --workers=1 --no-access-log, on a new database.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path),
    default=Path(".services/bench.json"),
    show_default=True,
)
def main(
    rows: str, with_peers: bool, runs: int, quick: bool, tigerfans: Path | None, json_file: Path
) -> None:
    """Measure this system against the classic way in one run. This is not a test: read the ratios."""
    if with_peers:
        rows = ",".join((*PEERS, "tigerfans") if tigerfans else PEERS)
    unknown = set(rows.split(",")) - ROWS.keys()
    if unknown:
        raise click.UsageError(
            f"--rows: no such row: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}"
        )
    if "tigerfans" in rows.split(",") and tigerfans is None:
        raise click.UsageError("--tigerfans: row tigerfans needs the path of a checkout of TigerFans")
    results: dict[str, dict[str, Any]] = {}

    def measured(row: str, values: dict[str, Any]) -> None:
        values["ratios"] = [
            ours / theirs for ours, theirs in zip(values["ours"], values["theirs"], strict=True)
        ]
        results[row] = values
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(results, indent=1))
        console.print(f"row {row}: {_spread(values['ratios'])}", highlight=False)

    failed = uvloop.run(_measure(set(rows.split(",")), _measurements(runs, quick, tigerfans), measured))
    _print(results)
    if failed:
        console.print(f"not measured, see above: row {', '.join(failed)}", highlight=False)
        sys.exit(1)


def _print(results: dict[str, dict[str, Any]]) -> None:
    """Prints a table of the rows, and where their time was spent."""
    lines = []
    for row, values in results.items():
        what, _, wanted = ROWS[row]
        ratios = values["ratios"]
        lines.append(
            (
                row,
                what,
                _spread(ratios),
                wanted,
                _reached(statistics.median(ratios), wanted),
                _spread(values["ours"]),
                _spread(values["theirs"]),
                values["unit"],
            )
        )
    columns = ("row", "what", "ratio: median (min – max)", "wanted", "reached", "ours", "classic", "unit")
    console.print(table("Ours against the classic way", columns, lines))
    for row, values in results.items():
        for name, profile in values.get("profile", {}).items():
            console.print(
                f"row {row}, {name}: " + ", ".join(f"{part} {spent}" for part, spent in profile.items()),
                highlight=False,
            )


if __name__ == "__main__":
    main()
