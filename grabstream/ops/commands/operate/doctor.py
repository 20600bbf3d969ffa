"""`doctor` shows what is stuck, since when, and the command that repairs it; `dismiss` explains a finding of
the verifier.
"""

import asyncio
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
from rich.text import Text

from grabstream.connections.opening import checked_database
from grabstream.ops.console.output import WholeNumber, console, json_option, print_json, refuse
from grabstream.ops.diagnosis.examination import (
    NOT_ALLOWED,
    Examination,
    by_severity,
    examine,
    since_in_words,
)
from grabstream.ops.formats.replay_request import ArchiveAddress
from grabstream.projections.checking import verified
from grabstream.settings import load_settings
from grabstream.streams.history.archive import BadArchive

_STYLES: Final = {"stuck": "bold red", "risk": "yellow", "note": "cyan"}
_SERVERS: Final = {
    "redis": ("Redis", "GRAB_REDIS_URL"),
    "kafka": ("Kafka", "GRAB_KAFKA"),
    "postgres": ("PostgreSQL", "GRAB_POSTGRES"),
}
_MEANS: Final = {
    "redis": "no command is decided", "kafka": "commands that wait for the journal get no answer",
    "postgres": "the read models do not advance; commands are still decided",
}  # fmt: skip


@click.command()
@click.option(
    "--watch",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="Repeat the examination every SECONDS, until Ctrl-C.",
)
@click.option(
    "--archive",
    type=ArchiveAddress(exists=True),
    metavar="ARCHIVE",
    help="Also check that the journal has all lines of this archive: a directory, or s3://bucket/prefix, "
    "that `grabstream export` has written.",
)
@json_option
def doctor(watch: float | None, archive: Path | str | None, as_json: bool) -> None:
    """Show what is stuck, since when, what it means for users, and the command that fixes it.

    Servers are examined separately, even if one of them does not answer. Exit code 0: nothing found; 1:
    something is stuck or at risk, or --archive is damaged; 3: a server does not answer, or refuses the
    queries of this login.
    """
    settings = load_settings()
    store = None if archive is None else settings.store(archive)
    while True:
        try:
            examination = asyncio.run(examine(settings, archive=store))
        except BadArchive as error:
            refuse(error)
        if as_json:
            print_json(as_json_of(examination))
        else:
            _print(examination)
        if watch is None:
            sys.exit(examination.exit_code)
        time.sleep(watch)
        if not as_json:
            console.print("─" * min(console.width, 80))


@click.command()
@click.argument("finding", type=WholeNumber(min=1))
@click.option("--reason", required=True, help="Why the difference is not a fault, in one line.")
@click.option("--operator", required=True, help="The name of the operator who decides it.")
@json_option
def dismiss(finding: int, reason: str, operator: str, as_json: bool) -> None:
    """Dismiss FINDING, the number of a difference that `doctor` shows: it is hidden while it stays the same.

    A corrected difference need not be dismissed: it disappears when the verifier compares the same rows
    again. Exit code 1: there is no open finding with this number.
    """
    if not asyncio.run(_dismiss(finding, operator, reason)):
        refuse(f"no open finding has the number {finding}; `grabstream doctor` shows the numbers")
    if as_json:
        print_json({"finding": finding, "dismissed_by": operator, "reason": reason})
    else:
        console.print(f"Finding {finding} is dismissed.")


async def _dismiss(finding: int, operator: str, reason: str) -> bool:
    settings = load_settings()
    async with checked_database(settings) as connection:
        return await verified.dismiss(connection, finding, operator, reason)


def as_json_of(examination: Examination) -> dict[str, Any]:
    """The examination, for JSON."""
    return {
        "at": examination.at,
        "healthy": examination.exit_code == 0,
        "servers": examination.servers,
        "findings": [
            {"check": check, **finding._asdict()} for check, finding in by_severity(examination.findings)
        ],
        "passed": examination.passed,
        "not_checked": examination.not_checked,
    }


def _print(examination: Examination) -> None:
    for server, problem in examination.servers.items():
        if problem is not None:
            _print_server(server, problem, examination.at)
    for _, finding in by_severity(examination.findings):
        _say(finding.severity, finding.what, finding.since, examination.at)
        _detail("means", finding.means)
        _detail("fix", finding.command)
    if examination.not_checked:
        _line(Text(f"Not checked without these servers: {', '.join(examination.not_checked)}.", "dim"))
    if not examination.exit_code:
        _line(Text(f"✓ {len(examination.passed)} checks: nothing is stuck.", "green"))


def _print_server(server: str, problem: str, now: int) -> None:
    name, setting = _SERVERS[server]
    if problem.startswith(NOT_ALLOWED):
        _say("risk", f"{name} cannot be examined", None, now)
        _detail("says", problem)
        _detail("fix", "run doctor with the login of a worker (`grabstream grants`), or of an administrator")
    else:
        _say("stuck", f"{name} does not answer", None, now)
        _detail("means", _MEANS[server])
        _detail("says", problem)
        _detail("fix", f"start it (`grabstream up` for local servers), or correct {setting}")


def _say(severity: str, what: str, since: int | None, now: int) -> None:
    words = Text.assemble((f"{severity:<5}", _STYLES[severity]), "  ", (what, "bold"))
    if since is not None:
        began = datetime.fromtimestamp(since / 1000, UTC)
        words.append(f"; since {began:%Y-%m-%d %H:%M:%S}Z, {since_in_words(since, now)} ago")
    _line(words)


def _detail(name: str, words: str) -> None:
    _line(Text.assemble(" " * 7, (f"{name:<6}", "dim"), words))


def _line(words: Text) -> None:
    # Not wrapped at the terminal's width, so that commands can be copied.
    console.print(words, soft_wrap=True, emoji=False, highlight=False)
