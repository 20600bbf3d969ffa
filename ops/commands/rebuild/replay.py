"""`replay`: reads past events again, into lines, a topic or a schema, for other programs."""

import gc
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import click
import psycopg
from psycopg import OperationalError

from grabstream.models.journal import Corrupt, Gap
from grabstream.ops.connections.event_sources import NoTrail, open_history
from grabstream.ops.connections.identity import OtherSystem
from grabstream.ops.connections.opening import check_system, checked_books
from grabstream.ops.console.output import WholeNumber, counted, json_option, print_json
from grabstream.ops.console.progress import Reading
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.formats.replay_request import Request, request
from grabstream.ops.settings import Settings, load_settings
from grabstream.projections.database.locks import Held, hold
from grabstream.projections.database.sessions import connect
from grabstream.streams.clients import started
from grabstream.streams.projecting.publisher import event_source, make_producer
from grabstream.streams.replaying import replay as replaying
from grabstream.streams.replaying.replay import Done, Planned
from grabstream.streams.replaying.replay_schema import (
    SchemaSink,
    check_schema,
    is_schema,
    open_schema,
    partial_views,
)
from grabstream.streams.replaying.selection import Selection
from grabstream.streams.replaying.sinks import LineSink, ReplayRefused, Sink, TopicSink, check_topic
from grabstream.streams.topics import Topics, create_topic_like

EXIT_BROKEN_PIPE = 128 + 13
_is_topic = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}\Z").match


class NoSuchOffer(Exception):
    """An offer of --offer has no event."""


class Into(NamedTuple):
    """A destination: `lines`, `topic` or `schema`, and its name."""

    kind: str
    name: str


class _Into(click.ParamType):
    name = "DESTINATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Into:
        if isinstance(value, Into):
            return value
        kind, colon, name = str(value).partition(":")
        if value == "-":
            return Into("lines", "-")
        if kind == "topic" and _is_topic(name):
            return Into(kind, name)
        if kind == "schema" and is_schema(name):
            return Into(kind, name)
        wrong = {
            "topic": "cannot name a topic",
            "schema": "cannot name a schema (at most 48 of the characters a-z 0-9 _)",
        }.get(kind if colon else "")
        return self.fail(
            f"{value!r} {wrong or 'is not a destination'}: write -, topic:NAME or schema:NAME", param, ctx
        )


@click.command()
@click.option(
    "--into",
    required=True,
    type=_Into(),
    help="The destination: - (lines), topic:NAME (CloudEvents) or schema:NAME (read models).",
)
@click.option(
    "--from",
    "first",
    multiple=True,
    metavar="POINT",
    help="The first event: TIME, SHARD:SEQ, or SEQ with one --offer.",
)
@click.option(
    "--until",
    "last",
    multiple=True,
    metavar="POINT",
    help="The last event (inclusive): TIME, SHARD:SEQ, or SEQ with one --offer.",
)
@click.option("--offer", "offers", multiple=True, metavar="ID", help="Only events of this offer. Repeatable.")
@click.option("--user", "users", multiple=True, metavar="ID", help="Only events about this user. Repeatable.")
@click.option(
    "--shard", "shards", multiple=True, type=WholeNumber(min=0), help="Only this shard. Repeatable."
)
@click.option(
    "--source",
    type=click.Choice(["journal", "audit"]),
    default="journal",
    show_default=True,
    help="What to read the events from.",
)
@click.option("--append", is_flag=True, help="Write to a topic even if it has records already.")
@click.option("--dry-run", is_flag=True, help="Check everything, show what would be read, write nothing.")
@json_option
def replay(
    into: Into, first: Sequence[str], last: Sequence[str], offers: Sequence[str], users: Sequence[str],
    shards: Sequence[int], source: str,
    append: bool, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Read past events again, from any point to any other, into lines, a topic, or read models in a separate
    schema.

    TIME is ISO 8601 (UTC when it has no zone) or milliseconds since 1970; numbers below 100000000000 are a
    SEQ. --from and --until may be repeated: SHARD:SEQ for one shard, TIME for all others. Events are written
    one shard after the other, within a shard in order. The system's topics, tables and keys do not change,
    and nothing is published again.

    schema:NAME gets a complete set of read models; a second call with the same options continues where the
    first one stopped. With --offer or --user, views that cannot be exact are named <view>_partial.

    Exit code 1: refused, an --offer does not exist, or the source contradicts itself; 2: wrong usage; 3: a
    server cannot be reached.
    """
    settings = load_settings()
    if into.kind == "schema" and first:
        raise click.UsageError(
            "--from: read models need all events from the first event on, or their sums would be "
            "wrong; use --until or --offer"
        )
    if append and into.kind != "topic":
        raise click.UsageError("--append is only for --into topic:NAME")
    # Thousands of short-lived objects: see `worker`.
    gc.set_threshold(50_000, 20, 50)
    asked = request(settings, source, first, last, shards, offers, users)
    done: dict[int, Done] = {}
    try:
        planned = run_until_stopped(_run(settings, asked, into, append, dry_run, done))
    except (ReplayRefused, NoTrail, NoSuchOffer, Corrupt, Gap) as error:
        click.echo(f"grabstream: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of our lines has closed the pipe. Python's last write at exit goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BROKEN_PIPE)
    _report(settings, asked, into, planned, done, dry_run, as_json)


async def _run(
    settings: Settings, asked: Request, into: Into, append: bool, dry_run: bool, done: dict[int, Done]
) -> list[Planned]:
    await check_system(settings, journal=asked.source == "journal")
    seeks = any(one.first for one in asked.stretches) and not asked.wanted.users
    async with open_history(settings, asked.source, seeks) as source:
        if dry_run:
            await _check(settings, asked, into, append)
            return await replaying.plan(source, asked.stretches, not seeks)
        async with _open_sink(settings, asked, into, append) as sink:
            known: Any = []
            if isinstance(sink, SchemaSink):
                known = await sink.grabs(asked.wanted.users)
            planned = await replaying.plan(
                source, asked.stretches, not seeks, sink.positions if isinstance(sink, SchemaSink) else {}
            )
            selection = Selection(asked.wanted, into.kind == "schema", known)
            try:
                with Reading("replay", sum(one.units for one in planned)) as report:
                    await replaying.replay(source, planned, selection, sink, report, done)
            except BaseException:
                _say_how_to_go_on(sink)
                raise
    await _require_offers(settings, set(asked.wanted.offers) - selection.offers_met, planned)
    return planned


async def _require_offers(settings: Settings, not_met: set[str], planned: Sequence[Planned]) -> None:
    """Raises NoSuchOffer for offers that do not exist. If not all events were read, the books are asked;
    without PostgreSQL the check is then left out.
    """
    is_whole = not any(part.stretch.first or part.stretch.last or part.start.cursor.seq for part in planned)
    if not_met and not is_whole:
        try:
            async with checked_books(settings) as connection:
                rows = await connection.execute(
                    "SELECT offer FROM offers WHERE offer = ANY(%s)", (sorted(not_met),)
                )
                not_met = not_met - {offer for (offer,) in await rows.fetchall()}
        except (psycopg.Error, OtherSystem):
            return
    if not_met:
        raise NoSuchOffer(", ".join(f"offer {offer} does not exist" for offer in sorted(not_met)))


async def _check(settings: Settings, asked: Request, into: Into, append: bool) -> None:
    """Raises ReplayRefused when the destination cannot be written."""
    if into.kind == "topic":
        await check_topic(settings.kafka, Topics(settings.prefix), into.name, settings.shards, append)
    elif into.kind == "schema":
        async with await connect(settings.postgres, settings.schema_) as connection:
            await check_schema(connection, into.name, settings.schema_, asked.definition(settings))


@asynccontextmanager
async def _open_sink(settings: Settings, asked: Request, into: Into, append: bool) -> AsyncIterator[Sink]:
    if into.kind == "lines":
        yield LineSink(sys.stdout.buffer)
        return
    if into.kind == "schema":
        async with open_schema(
            settings.postgres, into.name, settings.schema_, settings.shards, asked.definition(settings)
        ) as sink:
            yield sink
        return
    topics = Topics(settings.prefix)
    async with _alone(settings, into.name):
        # Checked while holding the lock, so that records of an earlier replay are seen.
        if not await check_topic(settings.kafka, topics, into.name, settings.shards, append):
            await create_topic_like(settings.kafka, topics.journal, into.name, settings.shards)
        async with started(make_producer(settings.kafka)) as producer:
            await producer.partitions_for(into.name)
            yield TopicSink(producer, into.name, event_source(settings.prefix))


@asynccontextmanager
async def _alone(settings: Settings, topic: str) -> AsyncIterator[None]:
    """Holds a lock on the topic; raises ReplayRefused when another replay holds it. Without PostgreSQL it
    warns that no lock is held.
    """
    try:
        connection = await connect(settings.postgres, settings.schema_)
    except OperationalError as error:
        click.echo(
            "grabstream: this replay holds no lock, because PostgreSQL cannot be reached: make sure that no "
            f"other replay writes to topic {topic} meanwhile, or records are duplicated "
            f"({str(error).strip()})",
            err=True,
        )
        yield
        return
    async with connection:
        try:
            await hold(connection, f"grabstream-replay-topic-{topic}", f"replay into {topic}")
        except Held as held:
            raise ReplayRefused(f"topic {topic} is being written by another replay: {held}") from None
        yield


def _say_how_to_go_on(sink: Sink) -> None:
    if isinstance(sink, SchemaSink):
        click.echo(
            "grabstream: committed events are kept: repeat the same command to continue after them", err=True
        )
    elif isinstance(sink, TopicSink):
        points = "".join(f" --from {shard}:{seq + 1}" for shard, seq in sink.acknowledged.items())
        click.echo(f"grabstream: to continue, repeat the command with --append{points}", err=True)


def _report(
    settings: Settings,
    asked: Request,
    into: Into,
    planned: Sequence[Planned],
    done: dict[int, Done],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Prints the result on standard output, or on standard error when standard output has the lines."""
    to_errors = into.kind == "lines" and not dry_run
    unit = "events" if asked.source == "audit" else "records"
    partial = partial_views(asked.definition(settings), settings.shards) if into.kind == "schema" else []
    shards = [_shard_report(part, done.get(part.stretch.shard), unit) for part in planned]
    if as_json:
        value = {
            "into": f"{into.kind}:{into.name}",
            "dry_run": dry_run,
            "shards": shards,
            "partial_views": partial,
        }
        print_json(value, to_errors)
        return
    if dry_run:
        for shard in shards:
            to_read = counted(shard["to_read"], unit)
            click.echo(
                f"shard {shard['shard']}: would read {to_read}, after seq {shard['from_seq']:,}",
                err=to_errors,
            )
        return
    total = sum(shard.events for shard in done.values())
    if not to_errors:
        click.echo(f"{counted(total, 'events')} into {into.kind} {into.name}; read to {_last_events(done)}.")
    elif not total:
        click.echo(
            "grabstream: 0 events: no event between the bounds matches these shards, offers and users",
            err=True,
        )
    for line in _short_of(planned, done):
        click.echo(f"grabstream: {line}", err=True)
    if partial:
        names = ", ".join(f"{name}_partial" for name in partial)
        click.echo(f"Not exact, and therefore named differently: {names}.")


def _shard_report(planned: Planned, done: Done | None, unit: str) -> dict[str, Any]:
    report: dict[str, Any] = {
        "shard": planned.stretch.shard,
        "from_seq": planned.start.cursor.seq,
        "to_read": planned.units,
        "unit": unit,
    }
    if done is not None:
        report |= {"seq": done.cursor.seq, "head": done.cursor.head.hex(), "events": done.events}
    return report


def _last_events(done: dict[int, Done]) -> str:
    """The last event of each shard, as SHARD:SEQ."""
    return (
        ", ".join(f"{shard.shard}:{shard.cursor.seq}" for shard in done.values() if shard.cursor.seq)
        or "no event"
    )


def _short_of(planned: Sequence[Planned], done: dict[int, Done]) -> list[str]:
    """A line for each bound by seq that the source does not reach."""
    short = []
    for part in planned:
        last, reached = part.stretch.last, done[part.stretch.shard].cursor.seq
        if last is not None and last.seq is not None and reached < last.seq:
            short.append(f"shard {part.stretch.shard} ends at seq {reached:,}, before {last.seq:,}")
    return short
