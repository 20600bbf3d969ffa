"""`rehearse`: a made-up crowd grabs through topic, gate and gateway, shown live, with a verdict; or a crowd
in a shape comes over HTTP; or a story of several days is played with a faster clock.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
import uvloop
from click.core import ParameterSource
from pydantic import SecretStr

from grabstream.connections.opening import gate_limits, key_space, open_redis, sealer
from grabstream.crypto.sealing import new_seal_key
from grabstream.gate.calls import now_ms
from grabstream.gate.gate import Gate
from grabstream.models.money import Invalid
from grabstream.ops.commands.operate.verify import print_checks
from grabstream.ops.console.output import WholeNumber, console, json_option, print_json, table
from grabstream.ops.verification.checks import VerificationCheck
from grabstream.ops.verification.verifying import verify
from grabstream.settings import Settings, load_settings
from grabstream.workshop.rehearsal.crowd import Envelope, attempts, envelopes
from grabstream.workshop.rehearsal.display import Display
from grabstream.workshop.rehearsal.over_http.crowd import crowd_of
from grabstream.workshop.rehearsal.over_http.door import open_door
from grabstream.workshop.rehearsal.over_http.report import report_of
from grabstream.workshop.rehearsal.over_http.run import ShapedRehearsal
from grabstream.workshop.rehearsal.over_http.shape import Shape, read_shape
from grabstream.workshop.rehearsal.over_http.verdict import http_verdict
from grabstream.workshop.rehearsal.phases import CALIBRATION
from grabstream.workshop.rehearsal.promotion import Promotion
from grabstream.workshop.rehearsal.published import published_check
from grabstream.workshop.rehearsal.run import (
    HTTP_CALLERS,
    LOOK_EVERY_SECONDS,
    Rehearsal,
    closed,
    open_books,
    read_progress,
)
from grabstream.workshop.rehearsal.stage import GATEWAY, WORKERS, CannotGoOn, Patience, Stage, set_up
from grabstream.workshop.rehearsal.story import Story, play_story
from grabstream.workshop.rehearsal.verdict import verdict
from grabstream.workshop.rehearsal.week import Week, publish

STORIES: Final[dict[str, type[Story]]] = {"week": Week, "promotion": Promotion}
#: Options that only one kind of rehearsal has.
ENVELOPE_OPTIONS: Final = ("parts", "small", "small_parts", "deadline")
STORY_OPTIONS: Final = ("people", "result")
SHAPE_OPTIONS: Final = ("shape", "report")
#: What the p99 of every door should stay below while users arrive steadily.
STEADY_P99_MS_WANTED: Final = 100
#: The columns of a story's result that are money.
MONEY: Final = ("revenue", "refunded", "refund_due")


@click.command()
@click.option(
    "--story",
    type=click.Choice(["envelopes", *STORIES]),
    default="envelopes",
    show_default=True,
    help="A crowd at envelopes; or, with a faster clock, the week of a flash sale or the days of a coupon "
    "promotion.",
)
@click.option(
    "--people",
    type=WholeNumber(min=100),
    default=2_000,
    show_default=True,
    help="How many users the stories week and promotion have.",
)
@click.option(
    "--result",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".services"),
    show_default=True,
    help="Folder for the result of the stories week and promotion, as JSON and CSV.",
)
@click.option(
    "--parts",
    type=WholeNumber(1, 1_000_000),
    default=100_000,
    show_default=True,
    help="Parts of the big envelope.",
)
@click.option(
    "--envelopes",
    "small",
    type=WholeNumber(min=0),
    default=24,
    show_default=True,
    help="How many small envelopes there are in addition.",
)
@click.option(
    "--small-parts",
    type=WholeNumber(1, 1_000_000),
    default=500,
    show_default=True,
    help="Parts of each small envelope.",
)
@click.option(
    "--deadline",
    type=WholeNumber(1, 3_600),
    default=15,
    show_default=True,
    help="Seconds from the start of the rush after which two of the envelopes close automatically.",
)
@click.option(
    "--seed", type=WholeNumber(0, 10**9), help="Seed of the crowd; repeats a run. Default: random, printed."
)
@click.option(
    "--door",
    type=click.Choice(["all", "http"]),
    default="all",
    show_default=True,
    help="How the envelopes' crowd arrives: by topic, gate and gateway; or over HTTP only, in a shape.",
)
@click.option(
    "--shape",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the shape of a crowd over HTTP (docs/rehearsing.md). Default: a short rush.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write a report of a rehearsal over HTTP to this file: one page of HTML, with charts.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Keep the topics, tables and keys of the rehearsal, and print the settings that show them.",
)
@json_option
@click.pass_context
def rehearse(
    context: click.Context,
    story: str,
    people: int,
    result: Path,
    parts: int,
    small: int,
    small_parts: int,
    deadline: int,
    seed: int | None,
    door: str,
    shape: Path | None,
    report: Path | None,
    keep: bool,
    as_json: bool,
) -> None:
    """Simulate a crowd of thousands that grabs through topic, gate and gateway at once, first steadily, then
    in a rush, and print a verdict. Exit code 1: a check of the verdict failed.

    The rehearsal creates a separate system (topics, schema and keys under a new prefix) with two workers and
    a gateway, on the servers of the settings, and removes it at the end.
    """
    _refuse_foreign_options(context, story, door)
    try:
        shaped = Shape() if shape is None else read_shape(shape)
    except Invalid as error:
        raise click.BadParameter(str(error), param_hint="--shape") from None
    seed = secrets.randbelow(10**6) if seed is None else seed
    name = f"rehearsal{seed}x{secrets.token_hex(2)}"
    settings = load_settings()
    keys = settings.seal_keys if settings.seal_keys.get_secret_value() else SecretStr(new_seal_key())
    settings = settings.model_copy(update={"prefix": name, "schema_": name, "seal_keys": keys})
    try:
        if story in STORIES:
            outcome = uvloop.run(_tell(STORIES[story], settings, seed, people, keep, as_json))
            outcome["files"] = publish(outcome, result)
        elif door == "http":
            outcome = uvloop.run(_rush(settings, shaped, seed, keep, as_json))
            if report is not None:
                report.write_text(report_of(outcome, seed))
        else:
            chosen = envelopes(seed, parts, small, small_parts, deadline * 1_000)
            outcome = uvloop.run(_rehearse(settings, chosen, seed, keep, as_json))
    except CannotGoOn as error:
        click.echo(f"grabstream: {error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        # Not 1, which says that a check has failed.
        click.echo("grabstream: stopped", err=True)
        sys.exit(128 + (signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM))
    outcome["kept"] = name if keep else None
    if story in STORIES and not as_json:
        _print_story(outcome)
    else:
        _print(outcome, as_json)
    if keep and not as_json:
        console.print(
            f"The rehearsal is kept. To look at it: GRAB_PREFIX={name} GRAB_SCHEMA={name} grabstream offers",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    sys.exit(0 if all(check.passed for check in outcome["checks"]) else 1)


def _refuse_foreign_options(context: click.Context, story: str, door: str) -> None:
    """Raises UsageError for an option that has no effect in this rehearsal."""
    foreign: tuple[str, ...]
    if story in STORIES:
        chosen, foreign = f"--story {story}", (*ENVELOPE_OPTIONS, *SHAPE_OPTIONS, "door")
    elif door == "http":
        chosen, foreign = "--door http", (*STORY_OPTIONS, *ENVELOPE_OPTIONS)
    else:
        chosen, foreign = f"--story {story} and --door all", (*STORY_OPTIONS, *SHAPE_OPTIONS)
    for name in foreign:
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            option = next(param.opts[0] for param in context.command.params if param.name == name)
            raise click.UsageError(f"{option} has no effect with {chosen}; leave it out")


def _stop_on_sigterm() -> None:
    """Makes SIGTERM act like Ctrl-C: workers end, and the rehearsal's system is removed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _tell(
    story: type[Story], settings: Settings, seed: int, people: int, keep: bool, quiet: bool
) -> dict[str, Any]:
    _stop_on_sigterm()
    if not quiet:
        console.print(f"{people:,} people [dim](seed {seed}, prefix {settings.prefix})[/]", highlight=False)
    return await play_story(story, settings, seed, people, keep, quiet)


async def _rehearse(
    settings: Settings, chosen: list[Envelope], seed: int, keep: bool, quiet: bool
) -> dict[str, Any]:
    _stop_on_sigterm()
    grabs = attempts(seed, chosen)
    if not quiet:
        people = sum(one.people for one in chosen)
        console.print(
            f"{len(chosen)} envelopes, {sum(one.terms.parts for one in chosen):,} parts, {people:,} people, "
            f"{len(grabs):,} attempts "
            f"[dim](seed {seed}, prefix {settings.prefix})[/]",
            highlight=False,
        )
    async with (
        _system(settings, keep) as (stage, gate, redis),
        open_door(await _shown_port(stage, chosen, quiet), HTTP_CALLERS) as door,
    ):
        rehearsal = Rehearsal(settings, gate, chosen, grabs, seed, door)
        return await _play(settings, stage, redis, chosen, rehearsal, quiet)


async def _rush(settings: Settings, shape: Shape, seed: int, keep: bool, quiet: bool) -> dict[str, Any]:
    _stop_on_sigterm()
    crowd = crowd_of(shape, seed)
    if not quiet:
        console.print(
            f"{shape.title}: {len(crowd.visitors):,} people over HTTP in {shape.seconds} s, "
            f"{len(crowd.envelopes)} envelopes, {sum(one.terms.parts for one in crowd.envelopes):,} parts "
            f"[dim](seed {seed}, prefix {settings.prefix})[/]",
            highlight=False,
        )
    async with (
        _system(settings, keep) as (stage, gate, redis),
        open_door(await _shown_port(stage, crowd.envelopes, quiet), shape.connections_max) as door,
    ):
        rehearsal = ShapedRehearsal(settings, gate, door, shape, crowd, seed)
        return await _play(settings, stage, redis, crowd.envelopes, rehearsal, quiet)


async def _shown_port(stage: Stage, chosen: Sequence[Envelope], quiet: bool) -> int:
    """The port of the gateway when it listens; says where its pages are."""
    port = await stage.gateway_port()
    if not quiet:
        at = f"http://127.0.0.1:{port}/"
        console.print(
            f"watch it in a browser, until the verdict: {at} [dim](the public page: "
            f"{at}o/{chosen[0].offer})[/]",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    return port


@contextlib.asynccontextmanager
async def _system(settings: Settings, keep: bool) -> AsyncIterator[tuple[Stage, Gate, Any]]:
    """The stage with workers and a gateway, and a gate and a client of Redis of this process."""
    redis = open_redis(settings)
    log = Path(".services") / "rehearsal.log"
    try:
        async with set_up(settings, log, keep, (*WORKERS, GATEWAY)) as stage:
            gate = Gate(redis, key_space(settings), sealer(settings), gate_limits(settings))
            gate.start()
            try:
                yield stage, gate, redis
            finally:
                await gate.close()
    finally:
        await redis.aclose()


async def _play(
    settings: Settings,
    stage: Stage,
    redis: Any,
    chosen: Sequence[Envelope],
    rehearsal: Rehearsal,
    quiet: bool,
) -> dict[str, Any]:
    # For the bars only: every part is an event, and every envelope is opened and closed. A user who comes
    # after a deadline gets no part.
    display = Display(sum(one.parts_wanted for one in chosen) + 2 * len(chosen))
    async with await open_books(settings) as connection:
        with display if not quiet else contextlib.nullcontext():
            playing = asyncio.create_task(_crowd(rehearsal))
            watching = asyncio.create_task(
                _watch(settings, stage, redis, connection, rehearsal, display, playing, quiet)
            )
            try:
                await asyncio.wait({watching, playing}, return_when=asyncio.FIRST_EXCEPTION)
                seconds = playing.result() if playing.done() else watching.result()
                finished = await watching
            finally:
                for task in (watching, playing):
                    task.cancel()
                await asyncio.gather(watching, playing, return_exceptions=True)
        checks = await verdict(connection, chosen, rehearsal.doors)
        details = {}
        if isinstance(rehearsal, ShapedRehearsal):
            checks += await http_verdict(connection, rehearsal)
            details["http"] = rehearsal.details()
    checks += [await published_check(settings, stage.check), *await verify(settings, share=1)]
    return {
        "attempts": rehearsal.doors.total,
        "seconds": seconds,
        "seconds_to_books": finished,
        "outcomes": dict(rehearsal.doors.outcomes.most_common()),
        "phases": {phase.name: phase.numbers() for phase in rehearsal.doors.phases},
        **details,
        "checks": checks,
    }


async def _crowd(rehearsal: Rehearsal) -> float:
    await rehearsal.until_ready()
    await rehearsal.open()
    seconds = await rehearsal.crowd()
    await rehearsal.close_leftovers()
    return seconds


async def _watch(
    settings: Settings,
    stage: Stage,
    redis: Any,
    connection: Any,
    rehearsal: Rehearsal,
    display: Display,
    playing: "asyncio.Task[float]",
    quiet: bool,
) -> float:
    """Shows progress until the crowd has gone, every envelope is closed, and all that was decided is in every
    read model.

    Returns the seconds it took from the first grab; raises CannotGoOn when nothing moves any more.
    """
    patience = Patience()
    while True:
        # Before anything else is checked: its last decisions are then seen below.
        gone = playing.done()
        stage.check()
        progress = await read_progress(redis, key_space(settings), connection)
        if not quiet:
            display.show(rehearsal.doors, progress)
        closed_now = await closed(connection)
        if gone and progress.complete and closed_now == rehearsal.envelopes:
            return time.monotonic() - rehearsal.began
        doors = rehearsal.doors
        answered = sum(doors.answered.values())
        said = (
            f"{answered} of {doors.total} attempts answered, {progress.decided} events decided, "
            f"{progress.journaled} journaled, "
        )
        said += (
            f"read models at {progress.read_models}, {closed_now} of {rehearsal.envelopes} envelopes closed"
        )
        patience.observe(
            (rehearsal.partitions_ready, progress, answered, closed_now),
            said,
            busy=now_ms() < rehearsal.deadline_at_ms,
        )
        await asyncio.sleep(LOOK_EVERY_SECONDS)


def _print(result: dict[str, Any], as_json: bool) -> None:
    checks: list[VerificationCheck] = result["checks"]
    passed = all(check.passed for check in checks)
    if as_json:
        print_json(
            {
                **result,
                "passed": passed,
                "checks": [{**check._asdict(), "passed": check.passed} for check in checks],
            }
        )
        return
    console.print()
    console.print(table("Outcomes", ("outcome", "answers, with repeats"), result["outcomes"].items()))
    if "http" in result:
        sent = result["http"]["attempts"].items()
        console.print(table("Replies over HTTP, by status", ("status", "replies"), sent))
    for name, phase in result["phases"].items():
        if name != CALIBRATION:
            _print_phase(name, phase)
    console.print(
        f"{result['attempts']:,} attempts answered in {result['seconds']:.1f} s "
        f"({result['attempts'] / result['seconds']:,.0f} a second); "
        f"all in the books after {result['seconds_to_books']:.1f} s, deadlines included.\n",
        highlight=False,
    )
    _print_verdict(checks)


def _print_phase(name: str, phase: dict[str, Any]) -> None:
    """Prints the latencies of a phase, and what they are."""
    rows = [(door, *values.values()) for door, values in phase["latency_ms"].items()]
    console.print(table(f"{name.capitalize()}, ms", ("door", "p50", "p99", "p99.9"), rows))
    if phase["offered_per_second"] is not None:
        slow = [door for door, values in phase["latency_ms"].items() if values["p99"] >= STEADY_P99_MS_WANTED]
        said = (
            f"{STEADY_P99_MS_WANTED} ms or more by {', '.join(slow)} "
            f"(load {phase['load']:.1f} on {os.cpu_count()} cores)"
            if slow
            else f"below {STEADY_P99_MS_WANTED} ms by every door"
        )
        note = (
            f"{phase['offered_per_second']:,.0f} attempts a second, half of what the machine serves one by "
            f"one;\np99 {said}.\n"
        )
    else:
        best = phase["best_second"]
        peak = "" if best is None else f"{best:,} answers in the best second, "
        note = (
            f"{peak}{phase['per_second']:,.0f} a second in all ({phase['seconds']:.1f} s).\n"
            "Latencies are waits in a queue.\n"
        )
    console.print(note, highlight=False)


def _print_story(result: dict[str, Any]) -> None:
    console.print()
    console.print(table("Outcomes", ("outcome", "commands"), result["outcomes"].items()))
    # All are of one campaign, and its name would push the numbers out of the window.
    rows = [{**row, "offer": row["offer"].partition(":")[2]} for row in result["result"]]
    units = [name for name in rows[0] if name not in (*MONEY, "refused")]
    console.print(table("Result, units", units, [[row[name] for name in units] for row in rows]))
    if MONEY[0] in rows[0]:
        console.print(
            table(
                "Result, minor units",
                ("offer", *MONEY),
                [[row["offer"], *(row[name] for name in MONEY)] for row in rows],
            )
        )
    refusals = sorted({outcome for row in rows for outcome in row["refused"]})
    refused = [[outcome, *(row["refused"].get(outcome, 0) for row in rows)] for outcome in refusals]
    console.print(table("Grabs refused", ("outcome", *(row["offer"] for row in rows)), refused))
    console.print(
        f"{result['answers']:,} answers from {result['from']} to {result['until']}, in "
        f"{result['seconds']:.1f} s; "
        f"the result is in {' and '.join(result['files'])}\n",
        highlight=False,
        soft_wrap=True,
    )
    _print_verdict(result["checks"])


def _print_verdict(checks: list[VerificationCheck]) -> None:
    passed = all(check.passed for check in checks)
    print_checks(checks)
    console.print("\n[bold green]It all adds up.[/]" if passed else "\n[bold red]It does not add up.[/]")
