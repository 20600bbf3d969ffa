"""`schemas`: what of a database belongs to this system."""

import asyncio
import sys

import click

from grabstream.ops.connections.opening import checked_books
from grabstream.ops.console.output import json_option, print_json
from grabstream.ops.settings import Settings, load_settings
from grabstream.projections.database.system import schemas_of


@click.command()
@json_option
def schemas(as_json: bool) -> None:
    """Print the PostgreSQL schemas of this system, a line each: its own, and those of its read models'
    versions.

    For backups (docs/backup.md): names that only begin alike are other systems'. Exit 1: there is none.
    """
    found = asyncio.run(_read(load_settings()))
    if as_json:
        print_json(found)
    else:
        for name in found:
            click.echo(name)
    if not found:
        click.echo("grabstream: there is no schema of this system", err=True)
        sys.exit(1)


async def _read(settings: Settings) -> list[str]:
    async with checked_books(settings) as connection:
        return await schemas_of(connection, settings.schema_)
