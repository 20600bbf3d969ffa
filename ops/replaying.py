"""Replays for the command line: what was asked for, checked; and the sources they read, opened."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import click
from psycopg import AsyncConnection, OperationalError

from grabstream.models.identifiers import campaign_of, is_id, shard_of
from grabstream.ops.connections.opening import checked_books
from grabstream.ops.formats.moments import BadMoment, parse_points
from grabstream.ops.settings import Settings
from grabstream.streams.journal import open_reader
from grabstream.streams.replaying.history import AuditSource, JournalSource, Point
from grabstream.streams.replaying.replay import Stretch
from grabstream.streams.replaying.replay_schema import Definition
from grabstream.streams.replaying.selection import Wanted
from grabstream.streams.topics import Topics


class Request(NamedTuple):
    """What is to be replayed, from which source (`journal`, `audit`)."""

    source: str
    stretches: tuple[Stretch, ...]
    wanted: Wanted

    def definition(self, settings: Settings) -> Definition:
        """The same as what a schema is made from."""
        until = {one.shard: one.last for one in self.stretches if one.last is not None}
        return Definition(
            settings.prefix, self.source, tuple(one.shard for one in self.stretches), self.wanted, until
        )


def request(
    settings: Settings, source: str, first: Sequence[str], last: Sequence[str], shards: Sequence[int],
    offers: Sequence[str],
    users: Sequence[str],
) -> Request:  # fmt: skip
    """Options as a request; raises UsageError that names the option, and the way out."""
    for option, names in (("--offer", offers), ("--user", users)):
        for name in names:
            if not is_id(name):
                raise click.UsageError(f"{option} {name!r} is no id: 1 to 64 of A-Z a-z 0-9 . _ : -")
    for shard in shards:
        if shard >= settings.shards:
            raise click.UsageError(
                f"--shard {shard}: there are {settings.shards} shards, 0 to {settings.shards - 1}"
            )
    chosen = sorted(
        {shard_of(campaign_of(offer), settings.shards) for offer in offers}
        or set(shards)
        or set(range(settings.shards))
    )
    if offers and shards and set(chosen) != set(shards):
        raise click.UsageError(
            f"--shard: the offers are in {', '.join(map(str, chosen))}; an --offer alone is enough"
        )
    try:
        begin = parse_points("--from", first, chosen, settings.shards, offers)
        end = parse_points("--until", last, chosen, settings.shards, offers)
    except BadMoment as error:
        raise click.UsageError(str(error)) from None
    for shard in chosen:
        _check_order(shard, begin.get(shard), end.get(shard))
    stretches = tuple(Stretch(shard, begin.get(shard), end.get(shard)) for shard in chosen)
    return Request(source, stretches, Wanted(tuple(sorted(set(offers))), tuple(sorted(set(users)))))


def _check_order(shard: int, first: Point | None, last: Point | None) -> None:
    if first is None or last is None or (first.seq is None) != (last.seq is None):
        return
    if first.value > last.value:
        raise click.UsageError(f"--from lies behind --until in shard {shard}: nothing is between them")


class NoTrail(Exception):
    """There is no audit trail to read."""


def _warn(text: str) -> None:
    click.echo(f"grabstream: {text}", err=True)


@asynccontextmanager
async def open_source(
    settings: Settings, source: str, seeks: bool = False, warn: Callable[[str], None] = _warn
) -> AsyncIterator[JournalSource | AuditSource]:
    """The source by its name. One that `seeks` asks the audit trail whether what it finds in the middle of
    the journal counts; `warn` is told when PostgreSQL cannot help.

    Raises NoTrail when the trail is the source and is not there; without it the journal is read from its
    beginning.
    """
    async with AsyncExitStack() as stack:
        books = None
        if source == "audit":
            yield AuditSource(await stack.enter_async_context(_open_books(settings)))
            return
        if seeks:
            try:
                books = await stack.enter_async_context(_open_books(settings))
            except (OperationalError, NoTrail) as error:
                warn(f"the journal is read from its beginning, since PostgreSQL cannot help: {error}".strip())
        yield JournalSource(
            await stack.enter_async_context(open_reader(settings.kafka, Topics(settings.prefix).journal)),
            books,
        )


@asynccontextmanager
async def _open_books(settings: Settings) -> AsyncIterator[AsyncConnection[Any]]:
    async with checked_books(settings) as connection:
        found = await connection.execute(
            "SELECT to_regclass('audit') IS NOT NULL AND to_regclass('projection_cursors') IS NOT NULL"
        )
        if not (await found.fetchone() or (False,))[0]:
            raise NoTrail(f"schema {settings.schema_} has no audit trail (GRAB_SCHEMA)")
        yield connection
