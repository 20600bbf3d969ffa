"""`python -m tests.drill`: plays the kill matrix and prints a verdict for every cell."""

import asyncio
import json
import logging
import secrets
import signal
import sys
import time
from typing import Any

import click

from grabstream.ops.console.output import console
from tests.drill.cells import SHORT, Cell, Verdict, cells, play_all
from tests.drill.stage import servers


@click.command()
@click.option(
    "--seed",
    type=int,
    help="Repeat the random choices of another drill, which has printed its seed.  [default: a new seed]",
)
@click.option(
    "--cell",
    "patterns",
    multiple=True,
    help="Only cells whose names match, such as 'redis.*×holds'; may be repeated.",
)
@click.option("--short", is_flag=True, help="Only the cells that `make test` plays.")
@click.option(
    "--cluster", is_flag=True, help="On a Redis Cluster and three Kafka brokers instead of one server each."
)
@click.option("--list", "only_list", is_flag=True, help="Print the cells and play none.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each cell.")
def main(
    seed: int | None, patterns: tuple[str, ...], short: bool, cluster: bool, only_list: bool, as_json: bool
) -> None:
    """Play faults × traffic on servers that the drill starts. Exit 1: a cell failed."""
    chosen = cells("cluster" if cluster else "single", [*patterns, *(SHORT if short else ())])
    if not chosen:
        raise click.BadParameter("matches no cell: --list prints them", param_hint="--cell")
    if only_list:
        for cell in chosen:
            click.echo(json.dumps(cell._asdict(), ensure_ascii=False) if as_json else cell.name)
        return
    # The comparison of state folds the journal in this process; its log would hide the verdicts.
    logging.getLogger("grabstream.streams").setLevel(logging.CRITICAL)
    # Faults lose `decided` answers, with which gaps are measured too. That is expected.
    logging.getLogger("grabstream.gate.decided").setLevel(logging.CRITICAL)
    seed = secrets.randbelow(10**6) if seed is None else seed
    try:
        failed = asyncio.run(_drill(chosen, seed, cluster, as_json))
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo(f"stopped; --seed {seed} plays the same cells again", err=True)
        sys.exit(130)
    sys.exit(1 if failed else 0)


async def _drill(chosen: list[Cell], seed: int, cluster: bool, as_json: bool) -> int:
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    if not as_json:
        console.print(f"{len(chosen)} cells, seed {seed}", highlight=False)
    failed, began, done = 0, time.monotonic(), 0
    async with servers(cluster) as running:
        async for verdict in play_all(running, chosen, seed):
            done += 1
            failed += not verdict.passed
            _print(verdict, seed, cluster, as_json, (time.monotonic() - began) / done * (len(chosen) - done))
    if not as_json:
        console.print(
            f"{len(chosen) - failed} of {len(chosen)} cells passed in {time.monotonic() - began:.0f} s",
            highlight=False,
        )
    return failed


def _print(verdict: Verdict, seed: int, cluster: bool, as_json: bool, left_seconds: float) -> None:
    repeat = f'make drill ARGS="--seed {seed}{" --cluster" if cluster else ""} --cell {verdict.cell}"'
    if as_json:
        line: dict[str, Any] = {**verdict._asdict(), "passed": verdict.passed, "repeat": repeat}
        click.echo(json.dumps(line, ensure_ascii=False))
        return
    lag = "–" if verdict.lag_seconds is None else f"{verdict.lag_seconds:.1f} s"
    mark = "[green]✓[/]" if verdict.passed else "[red]✗[/]"
    console.print(
        f"{mark} {verdict.cell:<36} {verdict.seconds:5.1f} s  {verdict.answers:>6,} answers  lag 0 after "
        f"{lag:<7}"
        f"[dim] about {left_seconds / 60:.0f} min left[/]",
        highlight=False,
        soft_wrap=True,
    )
    if verdict.gap_seconds:
        console.print(
            f"    longest time without an answer: {_gaps(verdict)}",
            style="dim",
            highlight=False,
            soft_wrap=True,
        )
    if not verdict.passed:
        for check, problems in verdict.problems.items():
            for problem in problems:
                console.print(
                    f"    {check}: {problem}", style="red", highlight=False, markup=False, soft_wrap=True
                )
        console.print(f"    logs: {verdict.logs or 'none'}", highlight=False, markup=False, soft_wrap=True)
        console.print(f"    again: {repeat}", highlight=False, markup=False, soft_wrap=True)


def _gaps(verdict: Verdict) -> str:
    """The longest time without an answer of each shard, as text."""
    return (
        ", ".join(
            f"shard {shard} {seconds:.2f} s{' (touched)' if shard in verdict.touched else ''}"
            for shard, seconds in verdict.gap_seconds.items()
        )
        + f"; before the fault {max(verdict.gaps_before_seconds.values()):.2f} s"
    )


if __name__ == "__main__":
    main()
