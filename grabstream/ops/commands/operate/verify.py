"""`verify`: compares everything that is stored with the journal."""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click
from rich.markup import escape

from grabstream.connections.opening import check_system
from grabstream.models.bounds import counted
from grabstream.ops.console.output import console, json_option, print_json, refuse
from grabstream.ops.console.progress import Steps
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.formats.replay_request import ArchiveAddress, ObjectAddress
from grabstream.ops.verification.checkpoints import Given, read_checkpoint
from grabstream.ops.verification.checks import (
    PROBLEMS_SHOWN_MAX,
    VerificationCheck,
    VerificationProgress,
    no_progress,
)
from grabstream.ops.verification.evidence import BadCheckpoint
from grabstream.ops.verification.verifying import verify as run_verification
from grabstream.settings import Settings, load_settings
from grabstream.streams.buckets import BucketAddress
from grabstream.streams.history.archive import BadArchive
from grabstream.streams.history.stores import Store


def print_checks(checks: list[VerificationCheck]) -> None:
    """Prints one line for each check, and its errors below it."""
    for check in checks:
        mark = "[green]✓[/]" if check.passed else "[red]✗[/]"
        number, _, things = counted(check.checked, check.of_what).partition(" ")
        console.print(f"{mark} {check.name:<34} [dim]{number:>12} {things}[/]", highlight=False)
        for problem in check.problems[:PROBLEMS_SHOWN_MAX]:
            console.print(f"    [red]{escape(problem)}[/]", highlight=False)
        for note in check.notes:
            console.print(f"    [cyan]{escape(note)}[/]", highlight=False)
        if len(check.problems) > PROBLEMS_SHOWN_MAX:
            console.print(f"    [red]… and {len(check.problems) - PROBLEMS_SHOWN_MAX} more[/]")


async def _verify(
    settings: Settings, wait_seconds: float, report: VerificationProgress, quick: bool,
    checkpoint: Given | None, archive: Store | None,
) -> list[VerificationCheck]:  # fmt: skip
    await check_system(settings, seals=True)
    return await run_verification(
        settings, wait_seconds, report, quick, checkpoint=checkpoint, archive=archive
    )


@click.command()
@click.option("--wait", default=30.0, show_default=True, help="Seconds to wait for read models that lag.")
@click.option(
    "--quick",
    is_flag=True,
    help="Do not compare keys in Redis, which needs a second copy of each shard there.",
)
@click.option(
    "--against",
    type=ObjectAddress(),
    metavar="FILE",
    help="Also compare the history with a checkpoint (`grabstream checkpoint`): a file, or "
    "s3://bucket/key, with ?versionId=ID for one version.",
)
@click.option(
    "--archive",
    type=ArchiveAddress(exists=True),
    metavar="ARCHIVE",
    help="Read the lines that this archive has there, for a journal whose old records were deleted: a "
    "directory, or s3://bucket/prefix, that `grabstream export` has written.",
)
@json_option
def verify(
    wait: float, quick: bool, against: Path | BucketAddress | None, archive: Path | str | None, as_json: bool
) -> None:
    """Check the chain of every shard in the journal, and compare everything else with it: the audit trail
    byte for byte, the rows of all read models, cursors, views, and every key in Redis. Exit code 1: a
    difference, the file of --against was altered, or --archive is damaged.
    """
    settings = load_settings()
    try:
        checkpoint = None if against is None else read_checkpoint(against, settings)
        store = None if archive is None else settings.store(archive)
        checks = _run(settings, wait, quick, checkpoint, store, as_json)
    except (BadCheckpoint, BadArchive) as error:
        refuse(error)
    if as_json:
        print_json([{**check._asdict(), "passed": check.passed} for check in checks])
    else:
        print_checks(checks)
    sys.exit(0 if all(check.passed for check in checks) else 1)


def _run(
    settings: Settings, wait: float, quick: bool, checkpoint: Given | None, archive: Store | None,
    as_json: bool,
) -> list[VerificationCheck]:  # fmt: skip
    showing: AbstractContextManager[VerificationProgress] = (
        nullcontext(no_progress) if as_json else Steps(console)
    )
    with showing as report:
        # Stopped, it deletes its copies of shards in Redis.
        return run_until_stopped(_verify(settings, wait, report, quick, checkpoint, archive))
