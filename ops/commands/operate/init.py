"""`init`: topics and tables, and what they belong to."""

import asyncio

import click

from grabstream.ops.console.output import WholeNumber, console, json_option, print_json
from grabstream.ops.initialization import make_system
from grabstream.ops.settings import load_settings


@click.command()
@click.option(
    "--replication",
    type=WholeNumber(1),
    help="Copies of every topic.  [default: GRAB_REPLICATION, else one a broker, up to 3]",
)
@click.option(
    "--new-journal",
    is_flag=True,
    help="The journal's topic is a copy, with the same offsets, of the one the schema belongs to.",
)
@json_option
def init(replication: int | None, new_journal: bool, as_json: bool) -> None:
    """Create what is missing of topics and tables; a second call does nothing. The number of shards cannot be
    changed later.

    Prefix, journal, schema and number of shards belong together from here on: every process refuses other
    ones. Exit 2: one of them belongs to another system, and nothing was created.
    """
    settings = load_settings()
    made = asyncio.run(make_system(settings, replication or settings.replication, new_journal))
    if as_json:
        print_json({"topics_created": made.topics, "migrations_applied": made.migrations})
        return
    console.print(f"Topics created: {', '.join(made.topics) or 'none, all exist'}.")
    console.print(
        f"Migrations applied in schema {settings.schema_}: "
        f"{', '.join(made.migrations) or 'none, all are there'}."
    )
