"""`grants`: the rights of each role on the three servers."""

import asyncio
from typing import Final

import click

from grabstream.connections.opening import check_system, checked_database, open_redis
from grabstream.ops import grants as roles
from grabstream.ops.console.output import json_option, print_json
from grabstream.settings import Settings, load_settings, without_password

_FORGETFUL: Final = (
    "grabstream: Redis at {} has no file of users (`aclfile`), and forgets them when it is restarted: set "
    "one, and run this again"
)


@click.command()
@click.option("--apply", "applies", is_flag=True, help="Grant these rights, as the administrators.")
@click.option("--dry-run", is_flag=True, help="With --apply: show what would be done, and change nothing.")
@click.option(
    "--group",
    "groups",
    metavar="NAME",
    multiple=True,
    help="A consumer group in which readers may read; any number. Readers without a group need none.",
)
@json_option
def grants(applies: bool, dry_run: bool, groups: tuple[str, ...], as_json: bool) -> None:
    """Print the least rights of each role on Redis, Kafka and PostgreSQL, or grant them. Running it again
    changes nothing. Passwords are set by the administrator of each server.
    """
    settings = load_settings()
    for group in groups:
        try:
            roles.require_group(settings.prefix, group)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--group") from None
    redis = roles.redis_commands(settings.prefix)
    acls = roles.kafka_acls(settings.prefix, groups)
    statements = asyncio.run(_statements(settings))
    given, forgetful = applies and not dry_run, list[str]()
    if given:
        forgetful = asyncio.run(_apply(settings, redis, acls, statements))
    if forgetful:
        click.echo(
            _FORGETFUL.format(", ".join(filter(None, forgetful)) or without_password(settings.redis_url)),
            err=True,
        )
    kafka = [acl.command(settings.kafka) for acl in acls]
    if as_json:
        print_json(
            {
                "applied": given,
                "redis": [" ".join(words) for words in redis],
                "kafka": kafka,
                "postgresql": statements,
            }
        )
        return
    for name, lines in (
        ("Redis", [" ".join(words) for words in redis]),
        ("Kafka", kafka),
        ("PostgreSQL", [f"{statement};" for statement in statements]),
    ):
        click.echo(f"# {name}\n" + "\n".join(lines) + "\n")
    if given:
        click.echo("These rights were given. Set a password for each role at its server.")


async def _statements(settings: Settings) -> list[str]:
    await check_system(settings)
    async with checked_database(settings) as connection:
        return await roles.postgres_statements(connection, settings.schema_, settings.prefix)


async def _apply(
    settings: Settings,
    redis: list[list[str]],
    acls: list[roles.Acl],
    statements: list[str],
) -> list[str]:
    client = open_redis(settings)
    try:
        forgetful = await roles.apply_redis(client, redis)
    finally:
        await client.aclose()
    await roles.apply_kafka(settings.brokers, acls)
    async with checked_database(settings, autocommit=False) as connection:
        for statement in statements:
            await connection.execute(statement.encode())
    return forgetful
