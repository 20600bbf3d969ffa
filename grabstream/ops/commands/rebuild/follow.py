"""`follow`: runs or rebuilds a user projection, or hands events on to a sink."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import click

from grabstream.connections.opening import check_system, system_of
from grabstream.models.bounds import counted
from grabstream.models.journal import Corrupt, Gap
from grabstream.ops.commands.operate.worker import step_of
from grabstream.ops.console.output import json_option, print_json, refuse
from grabstream.ops.console.progress import ProgressLine, ReadingBar
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.following import follow_into
from grabstream.runtime.collecting import collect_rarely
from grabstream.settings import Settings, load_settings
from grabstream.streams.following.sinks import EventSink, FileSink, SinkDamaged
from grabstream.streams.following.user_projection import CannotRun, Projection
from grabstream.streams.following.user_projection import follow as follow_journal
from grabstream.streams.following.user_projection import rebuild as rebuild_projection

#: What a destination that is a file begins with.
FILE: Final = "file:"


@click.command()
@click.argument("projection", metavar="MODULE:NAME|file:PATH")
@click.option(
    "--rebuild",
    is_flag=True,
    help="Rebuild it from the first event, next to the tables in use, then replace them and exit.",
)
@json_option
def follow(projection: str, rebuild: bool, as_json: bool) -> None:
    """Run a projection of your own until Ctrl-C: MODULE:NAME names a grabstream.Projection, or a sink with
    the methods of grabstream.EventSink; file:PATH appends each event to a file as a line, with its cursor in
    PATH.cursor (docs/user-projections.md).

    The working directory is searched for the module too. Exit code 1: the projection's schema or the file has
    other content, or the journal contradicts itself.
    """
    settings = load_settings()
    found = _load(projection)
    collect_rarely()
    try:
        if isinstance(found, Projection):
            _run(settings, found, rebuild, as_json)
        elif rebuild:
            raise click.UsageError(
                "--rebuild is not for a sink: to rebuild it, remove what it has stored, with its cursor"
            )
        else:
            run_until_stopped(
                follow_into(settings, found, step=step_of(settings), report=_catching_up(projection))
            )
    except (CannotRun, SinkDamaged, Corrupt, Gap) as error:
        refuse(error)


def _catching_up(what: str) -> Callable[[int, int], None]:
    """Shows the progress of a sink until it has caught up."""
    line, done, is_behind = ProgressLine(), 0, False

    def report(events: int, records_left: int) -> None:
        nonlocal done, is_behind
        done += events
        if records_left:
            is_behind = True
            line(what, "handed on", done, more=f"{counted(records_left, 'records')} of the journal left")
        elif is_behind:
            is_behind = False
            line(what, "has caught up,", done)

    return report


def _run(settings: Settings, projection: Projection, rebuild: bool, as_json: bool) -> None:
    if not rebuild:
        run_until_stopped(_follow(settings, projection))
    name, schema = projection.cursor_name, projection.schema
    events = run_until_stopped(_rebuild(settings, projection))
    if as_json:
        print_json(
            {"projection": projection.name, "version": projection.version, "schema": schema, "events": events}
        )
    else:
        click.echo(f"{name} was rebuilt from {counted(events, 'events')}, in schema {schema}.")


async def _follow(settings: Settings, projection: Projection) -> None:
    await check_system(settings)
    await follow_journal(projection, system_of(settings), step_of(settings))


async def _rebuild(settings: Settings, projection: Projection) -> int:
    await check_system(settings)
    with ReadingBar(f"rebuild {projection.name}") as report:
        return await rebuild_projection(projection, system_of(settings), report, report.expect)


def _load(name: str) -> Projection | EventSink:
    if name.startswith(FILE):
        return _file(name.removeprefix(FILE))
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.UsageError(
            f"{name}: {error}; write MODULE:NAME, such as grabs_per_minute:PROJECTION"
        ) from None
    if isinstance(found, type) or not isinstance(found, Projection | EventSink):
        raise click.UsageError(
            f"{name} must be a grabstream.Projection, or an object with `load` and `apply` "
            f"(grabstream.EventSink), but is a {type(found).__name__}"
        )
    return found


def _file(path: str) -> FileSink:
    if not path or Path(path).is_dir() or not Path(path).parent.is_dir():
        raise click.UsageError(f"{FILE}{path} must name a file in a folder that exists")
    return FileSink(path)
