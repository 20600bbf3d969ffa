"""`init`: topics and tables."""

import asyncio
from typing import Any

import click
from psycopg import AsyncConnection

from ops.output import WholeNumber, console, json_option, print_json
from ops.settings import Settings, load_settings
from projections.migrate import migrate
from streams.replay_schema import read_definition
from streams.topics import Topics, create_topics, partitions_of


@click.command()
@click.option("--replication", type=WholeNumber(1), help="Copies of every topic.  [default: GRAB_REPLICATION, else one a broker, up to 3]")
@json_option
def init(replication: int | None, as_json: bool) -> None:
    """Create what is missing of topics and tables; a second call does nothing. The number of shards cannot be changed later."""
    settings = load_settings()
    created, applied = asyncio.run(_init(settings, replication or settings.replication))
    if as_json:
        print_json({"topics_created": created, "migrations_applied": applied})
        return
    console.print(f"Topics created: {', '.join(created) or 'none, all exist'}.")
    console.print(f"Migrations applied in schema {settings.schema_}: {', '.join(applied) or 'none, all are there'}.")


async def _init(settings: Settings, replication: int | None) -> tuple[list[str], list[str]]:
    topics = Topics(settings.prefix)
    created = await create_topics(settings.kafka, topics, settings.shards, replication)
    await check_shards(settings)
    async with await AsyncConnection.connect(settings.postgres, autocommit=True, connect_timeout=5) as connection:
        await refuse_replay(connection, settings)
        applied = await migrate(connection, settings.schema_, settings.shards)
    return created, applied


async def refuse_replay(connection: AsyncConnection[Any], settings: Settings) -> None:
    """Raises UsageError when the schema holds a bounded replay: going on with it would make it neither that nor the system's."""
    if await read_definition(connection, settings.schema_) is not None:
        raise click.UsageError(f"GRAB_SCHEMA: schema {settings.schema_} holds a bounded replay: set it to the system's own")


async def check_shards(settings: Settings) -> None:
    """Raises UsageError when the system was made with another number of shards, or not at all."""
    journal = Topics(settings.prefix).journal
    partitions = len(await partitions_of(settings.kafka, journal))
    if partitions == 0:
        raise click.UsageError(f"topic {journal} is not there: `grabstream init` makes it")
    if partitions != settings.shards:
        raise click.UsageError(
            f"GRAB_SHARDS is {settings.shards}, but {journal} has {partitions} partitions: the number of shards is fixed once a "
            f"system exists. Set GRAB_SHARDS={partitions}, or another GRAB_PREFIX and GRAB_SCHEMA for a new system"
        )
