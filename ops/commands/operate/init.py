"""`init`: creates topics and tables, and records that they belong together."""

import asyncio

import click

from grabstream.ops.console.output import WholeNumber, console, json_option, print_json
from grabstream.ops.initialization import make_system
from grabstream.ops.settings import load_settings


@click.command()
@click.option(
    "--replication",
    type=WholeNumber(1),
    help="Copies of every topic.  [default: GRAB_REPLICATION, or one on each broker, at most 3]",
)
@click.option(
    "--new-journal",
    is_flag=True,
    help="Accept the existing topic as the journal: a copy, with the same offsets, of the schema's journal.",
)
@json_option
def init(replication: int | None, new_journal: bool, as_json: bool) -> None:
    """Create the topics and tables that are missing; a second call does nothing. The number of shards cannot
    be changed later.

    Prefix, journal, schema and number of shards belong together from then on: every process refuses other
    combinations. Exit code 2: one of them belongs to another system; nothing was created.
    """
    settings = load_settings()
    made = asyncio.run(make_system(settings, replication or settings.replication, new_journal))
    if as_json:
        print_json({"topics_created": made.topics, "migrations_applied": made.migrations})
        return
    console.print(f"Topics created: {', '.join(made.topics) or 'none, all exist'}.")
    console.print(
        f"Migrations applied in schema {settings.schema_}: "
        f"{', '.join(made.migrations) or 'none, all were applied before'}."
    )
