"""Opens the source of past events: the journal or the audit trail."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import click
from psycopg import AsyncConnection, OperationalError

from grabstream.connections.opening import checked_database
from grabstream.settings import Settings
from grabstream.streams.history.archive_source import open_archive_source
from grabstream.streams.history.sources import Source, open_source
from grabstream.streams.topics import Topics


class NoTrail(Exception):
    """The schema has no audit trail to read."""


def _warn(text: str) -> None:
    click.echo(f"grabstream: {text}", err=True)


@asynccontextmanager
async def open_history(
    settings: Settings,
    name: str,
    seeks: bool = False,
    warn: Callable[[str], None] = _warn,
    archive: Path | str | None = None,
) -> AsyncIterator[Source]:
    """The source of this name, `journal`, `audit`, or `archive`: the directory or address `archive`, then the
    journal after it.

    A reader that starts in the middle of the journal (`seeks`) asks the audit trail whether the blocks there
    count; without PostgreSQL, or without a trail, it calls `warn` and starts at the beginning. Raises NoTrail
    when the source is the trail and the schema has none.
    """
    async with AsyncExitStack() as stack:
        books = None
        if name == "archive":
            assert archive is not None
            journal = Topics(settings.prefix).journal
            yield await stack.enter_async_context(
                open_archive_source(
                    settings.store(archive), settings.prefix, settings.shards, settings.brokers, journal
                )
            )
            return
        if name == "audit" or seeks:
            try:
                books = await stack.enter_async_context(_open_books(settings))
            except (OperationalError, NoTrail) as error:
                if name == "audit":
                    raise
                reason = str(error).strip()
                warn(f"reading the journal from its beginning, because PostgreSQL cannot be read: {reason}")
        journal = Topics(settings.prefix).journal
        yield await stack.enter_async_context(open_source(name, settings.brokers, journal, books))


@asynccontextmanager
async def _open_books(settings: Settings) -> AsyncIterator[AsyncConnection[Any]]:
    async with checked_database(settings) as connection:
        tables = await connection.execute(
            "SELECT to_regclass('audit') IS NOT NULL AND to_regclass('projection_cursors') IS NOT NULL"
        )
        if not (await tables.fetchone() or (False,))[0]:
            raise NoTrail(f"schema {settings.schema_} has no audit trail (GRAB_SCHEMA)")
        yield connection
