"""`checkpoint`: signed heads of all shards."""

import asyncio
from pathlib import Path
from typing import Any

import click

from grabstream.connections.opening import check_system, checked_database
from grabstream.models.bounds import counted
from grabstream.ops.console.output import WholeNumber, complain, console, json_option, print_json, refuse, say
from grabstream.ops.formats.replay_request import ObjectAddress
from grabstream.ops.verification.checkpoints import NewCheckpoint, make_checkpoint
from grabstream.ops.verification.checks import Say
from grabstream.ops.verification.evidence import (
    BadCheckpoint,
    WrittenFile,
    lock_of,
    lock_text,
    require_new,
    sealed_json,
    second_of,
    write_new,
)
from grabstream.settings import Settings, load_settings
from grabstream.streams.buckets import BucketAddress

LOCK_DAYS_MAX = 36_500


@click.command()
@click.option(
    "--output",
    type=ObjectAddress(is_written=True),
    metavar="FILE",
    help="Write it to a new file instead of standard output, or to a new object: s3://bucket/key.",
)
@click.option(
    "--lock-days",
    type=WholeNumber(min=1, max=LOCK_DAYS_MAX),
    metavar="N",
    help="Lock the object for N days, in a bucket with object lock.",
)
@click.option(
    "--lock-mode",
    type=click.Choice(["compliance", "governance"]),
    help="Who can remove it: no one, or holders of s3:BypassGovernanceRetention.  [default: compliance]",
)
@json_option
def checkpoint(
    output: Path | BucketAddress | None, lock_days: int | None, lock_mode: str | None, as_json: bool
) -> None:
    """Write a signed checkpoint: for each shard the seq and hash of its last event in the audit trail, and
    the root of a tree of all events. Kept elsewhere, it proves later that this history was not rewritten
    (`verify --against`), and that a grab is part of it (`prove`).

    Reads every event. Exit code 1: the trail contradicts itself or the journal, the file exists, or the store
    refuses; 3: a server or the store cannot be reached.
    """
    if lock_days is not None and not isinstance(output, BucketAddress):
        raise click.UsageError("--lock-days is for --output s3://bucket/key")
    if lock_mode is not None and lock_days is None:
        raise click.UsageError("--lock-mode needs --lock-days")
    report: Say = lambda line: None if output is None or as_json else console.print(f"[dim]{line} …[/]")  # noqa: E731
    settings = load_settings()
    try:
        if output is not None:
            require_new(output, settings.store_login, lock_days is not None)
        made = asyncio.run(_make(settings, report))
        text = sealed_json(made.checkpoint)
        if output is None:
            click.echo(text, nl=False)
            for line in made.ignored.in_words():
                complain(line)
            return
        lock = None if lock_days is None else lock_of(lock_days, lock_mode or "compliance")
        written = write_new(output, text, settings.store_login, lock)
    except BadCheckpoint as error:
        refuse(error)
    if as_json:
        print_json(_report(written, made))
    else:
        _print(written, made, isinstance(output, BucketAddress))


def _report(written: WrittenFile, made: NewCheckpoint) -> dict[str, Any]:
    lock = written.lock
    return {
        "file": written.name, "at": made.checkpoint.at,
        "events": sum(one.seq for one in made.checkpoint.shards), "key": made.checkpoint.key,
        "lock": None if lock is None else {"mode": lock.mode, "until": second_of(lock.until)},
        "ignored_records": sum(made.ignored.counts.values()),
        "notes": made.ignored.in_words(),
    }  # fmt: skip


def _print(written: WrittenFile, made: NewCheckpoint, is_object: bool) -> None:
    seqs = sum(one.seq for one in made.checkpoint.shards)
    words = f"{written.name}: {counted(seqs, 'events')}, signed by the key {made.checkpoint.key}."
    if written.lock is not None:
        words += f" Locked until {lock_text(written.lock)}."
    elif is_object:
        words += " Not locked: anyone with write access can replace it (--lock-days)."
    say(words)
    for line in made.ignored.in_words():
        say(line)


async def _make(settings: Settings, report: Say) -> NewCheckpoint:
    await check_system(settings)
    async with checked_database(settings) as books:
        return await make_checkpoint(settings, books, report)
