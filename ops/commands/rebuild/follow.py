"""`follow`: runs or rebuilds a user projection."""

import gc
import importlib
import os
import sys

import click

from grabstream.models.journal import Corrupt, Gap
from grabstream.ops.commands.operate.worker import step_of
from grabstream.ops.connections.opening import check_system, system_of
from grabstream.ops.console.output import counted, json_option, print_json
from grabstream.ops.console.progress import Reading
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.settings import Settings, load_settings
from grabstream.streams.following.user_projection import CannotRun, Projection
from grabstream.streams.following.user_projection import follow as follow_journal
from grabstream.streams.following.user_projection import rebuild as rebuild_projection


@click.command()
@click.argument("projection", metavar="MODULE:NAME")
@click.option(
    "--rebuild",
    is_flag=True,
    help="Rebuild it from the first event, beside the tables in use, then replace them and end.",
)
@json_option
def follow(projection: str, rebuild: bool, as_json: bool) -> None:
    """Run a projection of your own until Ctrl-C: MODULE:NAME names a grabstream.Projection
    (docs/projection.md).

    The working directory is searched for the module too. Exit code 1: the projection's schema holds something
    else, or the journal contradicts itself.
    """
    settings = load_settings()
    found = _load(projection)
    gc.set_threshold(50_000, 20, 50)
    try:
        if not rebuild:
            run_until_stopped(_follow(settings, found))
        events = run_until_stopped(_rebuild(settings, found))
    except (CannotRun, Corrupt, Gap) as error:
        click.echo(f"grabstream: {error}", err=True)
        sys.exit(1)
    if as_json:
        print_json(
            {"projection": found.name, "version": found.version, "schema": found.schema, "events": events}
        )
    else:
        click.echo(
            f"{found.cursor_name} was rebuilt from {counted(events, 'events')}, in schema {found.schema}."
        )


async def _follow(settings: Settings, projection: Projection) -> None:
    await check_system(settings)
    await follow_journal(projection, system_of(settings), step_of(settings))


async def _rebuild(settings: Settings, projection: Projection) -> int:
    await check_system(settings)
    with Reading(f"rebuild {projection.name}") as report:
        return await rebuild_projection(projection, system_of(settings), report, report.expect)


def _load(name: str) -> Projection:
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.UsageError(
            f"{name}: {error}; write MODULE:NAME, such as grabs_per_minute:PROJECTION"
        ) from None
    if not isinstance(found, Projection):
        raise click.UsageError(f"{name} must be a grabstream.Projection, but is a {type(found).__name__}")
    return found
