"""`init`: creates topics and tables, and records that they belong together."""

import asyncio

import click

from grabstream.connections.libraries import ServerLibraries
from grabstream.lua.library import library
from grabstream.ops.console.output import WholeNumber, console, json_option, print_json
from grabstream.ops.initialization import copy_in_words, keys_that_a_copy_shares, make_system
from grabstream.settings import load_settings


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
@click.option(
    "--drop-libraries",
    is_flag=True,
    help="Delete the function libraries of other releases in Redis: only when no process of them runs.",
)
@json_option
def init(replication: int | None, new_journal: bool, drop_libraries: bool, as_json: bool) -> None:
    """Create missing topics and tables, and load the function library into Redis; a second call changes
    nothing. The number of shards cannot be changed later.

    After that, prefix, journal, schema and number of shards belong together: every process refuses other
    combinations. Exit code 2: one of them belongs to another system; nothing was created.
    """
    settings = load_settings()
    made = asyncio.run(
        make_system(settings, replication or settings.replication, new_journal, drop_libraries)
    )
    shared = keys_that_a_copy_shares(settings) if new_journal else []
    if as_json:
        servers = None if made.libraries is None else [server._asdict() for server in made.libraries]
        print_json(
            {
                "topics_created": made.topics,
                "migrations_applied": made.migrations,
                "library": library().name,
                "libraries": servers,
                "seal_keys_recorded": made.seal_keys,
                "keys_that_a_copy_shares": shared,
            }
        )
        return
    console.print(f"Topics created: {', '.join(made.topics) or 'none, all exist'}.")
    console.print(
        f"Migrations applied in schema {settings.schema_}: "
        f"{', '.join(made.migrations) or 'none, all were applied before'}."
    )
    if made.seal_keys:
        console.print(f"Seal keys recorded: {', '.join(made.seal_keys)}.", highlight=False)
    if shared:
        console.print(copy_in_words(shared), highlight=False)
    if made.libraries is None:
        console.print("Redis cannot be reached: the first worker loads the function library.")
    for server in made.libraries or ():
        console.print(f"{_of(server)}: {_libraries_text(server, drop_libraries)}.")


def _of(server: ServerLibraries) -> str:
    return f"Redis {server.server}" if server.server else "Redis"


def _libraries_text(server: ServerLibraries, dropped: bool) -> str:
    words = (
        f"scripts run as plain scripts, because {server.plain}"
        if server.plain
        else f"the function library {library().name} is loaded"
    )
    if not server.others:
        return words
    others = f"libraries of other releases: {', '.join(server.others)}"
    drop = "`grabstream init --drop-libraries` drops them; run it when no process uses them"
    hint = "dropped" if dropped else drop
    return f"{words}; {others} ({hint})"
