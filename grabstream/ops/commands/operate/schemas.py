"""`schemas`: lists the schemas of a database that belong to this system."""

import asyncio
import sys

import click

from grabstream.connections.opening import checked_database
from grabstream.ops.console.output import complain, json_option, print_json
from grabstream.projections.database.system import schemas_of
from grabstream.settings import Settings, load_settings


@click.command()
@json_option
def schemas(as_json: bool) -> None:
    """Print the PostgreSQL schemas of this system, one in each line: GRAB_SCHEMA, and one for each version of
    its read models.

    For backups (docs/backup.md): schemas with a similar name may belong to other systems. Exit code 1: this
    system has no schema.
    """
    found = asyncio.run(_read(load_settings()))
    if as_json:
        print_json(found)
    else:
        for name in found:
            click.echo(name)
    if not found:
        complain("the database has no schema of this system (GRAB_SCHEMA)")
        sys.exit(1)


async def _read(settings: Settings) -> list[str]:
    async with checked_database(settings) as connection:
        return await schemas_of(connection, settings.schema_)
