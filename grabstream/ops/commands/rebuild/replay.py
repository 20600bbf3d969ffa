"""`replay`: replays past events into lines, a topic or a schema, for other programs."""

import fcntl
import os
import re
import stat
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import psycopg
from msgspec import structs
from psycopg import OperationalError

from grabstream.connections.event_sources import NoTrail, open_history
from grabstream.connections.identity import OtherSystem, find_journal
from grabstream.connections.opening import check_system, checked_database
from grabstream.models.bounds import counted
from grabstream.models.journal import Corrupt, Gap
from grabstream.ops.console.output import WholeNumber, complain, json_option, print_json, refuse
from grabstream.ops.console.progress import ReadingBar
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.formats.replay_request import (
    ReplayRequest,
    archive_option,
    request,
    require_archive,
    source_option,
)
from grabstream.projections.database.locks import LockTaken, lock_or_raise
from grabstream.projections.database.sessions import connect
from grabstream.runtime.collecting import collect_rarely
from grabstream.settings import Settings, load_settings
from grabstream.streams.clients import started
from grabstream.streams.history.chunks import Point
from grabstream.streams.projecting.publisher import event_source, make_producer
from grabstream.streams.replaying import replay as replaying
from grabstream.streams.replaying.filters import (
    Filters,
    difference,
    filters_file,
    read_filters,
    write_filters,
)
from grabstream.streams.replaying.replay import Done, Planned, Stretch
from grabstream.streams.replaying.replay_schema import (
    SchemaSink,
    check_schema,
    is_schema,
    open_schema,
    partial_views,
    what_users_get,
)
from grabstream.streams.replaying.selection import Selection
from grabstream.streams.replaying.sinks import (
    LineSink,
    PacedSink,
    ReplayRefused,
    Sink,
    TopicSink,
    begun_shards,
    check_topic,
    written_lines,
    written_topic,
)
from grabstream.streams.topics import Topics, create_topic_like

EXIT_BROKEN_PIPE = 128 + 13
_is_topic = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}\Z").match


class NoSuchOffer(Exception):
    """An offer of --offer has no event."""


class Into(NamedTuple):
    """A destination: `lines`, `file`, `topic` or `schema`, and its name."""

    kind: str
    name: str


class WriteMode(NamedTuple):
    """How a destination is written: with `append`, also if it has records; with `resumes`, only missing
    events; at most `rate` events a second.
    """

    into: Into
    append: bool
    resumes: bool
    rate: int | None


class _DestinationType(click.ParamType):
    name = "DESTINATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Into:
        if isinstance(value, Into):
            return value
        kind, colon, name = str(value).partition(":")
        if value == "-":
            return Into("lines", "-")
        if kind == "file" and name:
            return Into(kind, name)
        if kind == "topic" and _is_topic(name):
            return Into(kind, name)
        if kind == "schema" and is_schema(name):
            return Into(kind, name)
        wrong = {
            "topic": "cannot name a topic",
            "schema": "cannot name a schema (at most 48 of the characters a-z 0-9 _)",
        }.get(kind if colon else "")
        return self.fail(
            f"{value!r} {wrong or 'is not a destination'}: write -, file:PATH, topic:NAME or schema:NAME",
            param,
            ctx,
        )


@click.command()
@click.option(
    "--into",
    required=True,
    type=_DestinationType(),
    help="The destination: - or file:PATH (lines), topic:NAME (CloudEvents) or schema:NAME (read models).",
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
@source_option("The source of the events.", "audit", "archive")
@archive_option
@click.option("--append", is_flag=True, help="Write to a topic even if it has records already.")
@click.option(
    "--continue",
    "resumes",
    is_flag=True,
    help="Write to a file or topic only what it lacks: the events after the last one of each shard in it.",
)
@click.option(
    "--rate",
    type=WholeNumber(min=1),
    metavar="EVENTS",
    help="Write at most so many events a second, on average.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, show what would be read, write nothing.")
@json_option
def replay(
    into: Into, first: Sequence[str], last: Sequence[str], offers: Sequence[str], users: Sequence[str],
    shards: Sequence[int], source: str, archive: Path | str | None,
    append: bool, resumes: bool, rate: int | None, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Read past events again, from any point to any other, into lines, a topic, or read models in a separate
    schema.

    TIME is ISO 8601 (UTC when it has no zone) or milliseconds since 1970; numbers below 100000000000 are a
    SEQ. --from and --until may be repeated: SHARD:SEQ for one shard, TIME for all others. Events are written
    one shard after the other, within a shard in order. Lines stay whole if SHARD:SEQ is within a run of
    grabs; a topic, and --user, have only the events between the points. The system's topics, tables and keys
    do not change, and nothing is published again.

    An interrupted replay into a file or a topic continues with the same command and --continue. It is refused
    with another --offer, --user, --from or system than before.

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
    if resumes and into.kind not in ("file", "topic"):
        raise click.UsageError(
            "--continue is for --into file:PATH and topic:NAME: a stream of lines does not say what it has, "
            "and a schema continues without it"
        )
    if resumes and append:
        raise click.UsageError("--continue and --append exclude each other")
    collect_rarely()
    require_archive("--source", source, archive)
    asked = request(settings, source, first, last, shards, offers, users)._replace(archive=archive)
    done: dict[int, Done] = {}
    try:
        planned = run_until_stopped(
            _run(settings, asked, WriteMode(into, append, resumes, rate), dry_run, done)
        )
    except (ReplayRefused, NoTrail, NoSuchOffer, Corrupt, Gap) as error:
        refuse(error)
    except BrokenPipeError:
        # The reader of our lines has closed the pipe. Python's last write at exit goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_BROKEN_PIPE)
    _report(settings, asked, into, planned, done, dry_run, as_json)


async def _run(
    settings: Settings, asked: ReplayRequest, writing: WriteMode, dry_run: bool, done: dict[int, Done]
) -> list[Planned]:
    asked = asked._replace(journal=await _journal_of(settings, asked.source != "audit"))
    written = await _check(settings, asked, writing)
    stretches = [_after(stretch, written.get(stretch.shard, 0)) for stretch in asked.stretches]
    seeks = any(one.first for one in stretches) and not asked.wanted.users
    async with open_history(settings, asked.source, seeks, archive=asked.archive) as source:
        if dry_run:
            return await replaying.plan(source, stretches, not seeks)
        async with _open_sink(settings, asked, writing) as sink:
            known: Any = []
            if isinstance(sink, SchemaSink):
                known = await sink.grabs(asked.wanted.users)
            planned = await replaying.plan(
                source, stretches, not seeks, sink.positions if isinstance(sink, SchemaSink) else {}
            )
            to_rows = writing.into.kind == "schema"
            # Rows have the whole run in which the history ends: their cursor is after it.
            singles = writing.into.kind == "topic" or (bool(asked.wanted.users) and not to_rows)
            selection = Selection(asked.wanted, to_rows, known, singles)
            paced = sink if writing.rate is None else PacedSink(sink, writing.rate)
            try:
                with ReadingBar("replay", sum(one.units for one in planned)) as report:
                    await replaying.replay(source, planned, selection, paced, report, done)
            except BaseException:
                _say_how_to_go_on(sink, writing)
                raise
    await _require_offers(settings, set(asked.wanted.offers) - selection.offers_met, planned)
    return planned


async def _journal_of(settings: Settings, asks_kafka: bool) -> str:
    """Checks the system, and returns Kafka's id of its journal; '' where no asked server knows it."""
    identity = await check_system(settings, journal=asks_kafka)
    if identity is not None:
        return identity.journal
    topic = await find_journal(settings) if asks_kafka else None
    return topic.id if topic else ""


def _after(stretch: Stretch, written: int) -> Stretch:
    """The stretch without what is already written, if its beginning is not a time. The sink leaves out the
    rest.
    """
    if not written or (stretch.first is not None and stretch.first.seq is None):
        return stretch
    return stretch._replace(first=Point(seq=max(written + 1, stretch.first.value if stretch.first else 0)))


async def _require_offers(settings: Settings, not_met: set[str], planned: Sequence[Planned]) -> None:
    """Raises NoSuchOffer for offers that do not exist. If not all events were read, the books are asked;
    without PostgreSQL the check is skipped.
    """
    is_whole = not any(part.stretch.first or part.stretch.last or part.start.cursor.seq for part in planned)
    if not_met and not is_whole:
        try:
            async with checked_database(settings) as connection:
                rows = await connection.execute(
                    "SELECT offer FROM offers WHERE offer = ANY(%s)", (sorted(not_met),)
                )
                not_met = not_met - {offer for (offer,) in await rows.fetchall()}
        except (psycopg.Error, OtherSystem):
            return
    if not_met:
        raise NoSuchOffer(", ".join(f"offer {offer} does not exist" for offer in sorted(not_met)))


async def _check(settings: Settings, asked: ReplayRequest, writing: WriteMode) -> dict[int, int]:
    """The last seq of each shard that the destination has already, if the replay continues. Raises
    ReplayRefused when the destination cannot be written.
    """
    into, append, resumes, _ = writing
    if into.kind == "topic":
        topics = Topics(settings.prefix)
        exists = await check_topic(settings.brokers, topics, into.name, settings.shards, append or resumes)
        if exists and resumes:
            return await _written_in_topic(settings, asked, into.name, says=True)
    elif into.kind == "file":
        return _check_file(settings, asked, Path(into.name), resumes)
    elif into.kind == "schema":
        async with await connect(settings.postgres, settings.schema_) as connection:
            await check_schema(connection, into.name, settings.schema_, asked.definition(settings))
    return {}


def _check_file(settings: Settings, asked: ReplayRequest, file: Path, resumes: bool) -> dict[int, int]:
    written: dict[int, int] = {}
    try:
        if file.exists() and file.stat().st_size:
            if not resumes:
                raise ReplayRefused(f"{file} has lines already: name another, remove it, or add --continue")
            written = written_lines(file)
        recorded = _recorded_for(settings, asked, file, written)
        if written:
            _warn_of_unknown(str(file), [recorded])
        return written
    except OSError as error:
        raise ReplayRefused(f"{file}: {error.strerror}") from None


def _recorded_for(
    settings: Settings, asked: ReplayRequest, file: Path, written: Collection[int]
) -> Filters | None:
    """The filters with which the lines of a file were written, if they are recorded; raises ReplayRefused
    when they differ from those requested now. `written` are the shards that have lines. A record next to a
    file without lines belongs to a removed file, but what is not a record is refused there, too.
    """
    try:
        recorded = read_filters(file)
    except ValueError as error:
        raise ReplayRefused(
            f"{filters_file(file)} is not a record of a replay ({error}): restore it, or name another file"
        ) from None
    except OSError as error:
        raise ReplayRefused(f"{filters_file(file)}: {error.strerror}") from None
    if recorded is None or not written:
        return None
    _require_same(str(file), "another file", recorded, asked.filters(settings), _both(written, asked))
    return recorded


async def _written_in_topic(
    settings: Settings, asked: ReplayRequest, topic: str, says: bool
) -> dict[int, int]:
    """The last seq of each shard in a topic; raises ReplayRefused when it was written with other filters."""
    written = await written_topic(settings.brokers, topic, settings.shards)
    filters = asked.filters(settings)
    for shard, all_recorded in written.filters.items():
        for recorded in all_recorded:
            if recorded is not None:
                _require_same(f"topic {topic}", "another topic", recorded, filters, _both([shard], asked))
    if says:
        _warn_of_unknown(f"topic {topic}", [one for some in written.filters.values() for one in some])
    return written.seqs


def _both(written: Collection[int], asked: ReplayRequest) -> list[int]:
    """The shards that are written already and asked for now: others may begin elsewhere, or be added."""
    return [stretch.shard for stretch in asked.stretches if stretch.shard in written]


def _require_same(where: str, another: str, recorded: Filters, now: Filters, shards: Sequence[int]) -> None:
    if differs := difference(recorded, now, shards):
        raise ReplayRefused(
            f"{where} {differs}: continue with the options and the system that it was written with, or name "
            f"{another}"
        )


def _warn_of_unknown(where: str, recorded: Sequence[Filters | None]) -> None:
    """Warns of what is not recorded with a file or a topic that has events."""
    if None in recorded:
        what = "the --offer, --user and --from that it was written with"
        same = "use the same ones now, otherwise it will lack events"
    elif any(one is not None and not one.journal for one in recorded):
        what = "the journal that it was written from"
        same = "use the same journal now, otherwise it will mix events of two systems"
    else:
        return
    complain(f"{where} does not record {what}: {same}")


@asynccontextmanager
async def _open_sink(settings: Settings, asked: ReplayRequest, writing: WriteMode) -> AsyncIterator[Sink]:
    into, append, resumes, _ = writing
    if into.kind == "lines":
        yield LineSink(sys.stdout.buffer)
        return
    if into.kind == "file":
        async with _open_file(settings, asked, Path(into.name), resumes) as sink:
            yield sink
        return
    if into.kind == "schema":
        async with open_schema(
            settings.postgres, into.name, settings.schema_, settings.shards, asked.definition(settings)
        ) as schema_sink:
            yield schema_sink
        return
    topics = Topics(settings.prefix)
    async with _alone(settings, into.name):
        # Checked while holding the lock, so that records of an earlier replay are seen.
        written: dict[int, int] = {}
        appended: set[int] = set()
        if not await check_topic(settings.brokers, topics, into.name, settings.shards, append or resumes):
            await create_topic_like(settings.brokers, topics.journal, into.name, settings.shards)
        elif resumes:
            written = await _written_in_topic(settings, asked, into.name, says=False)
        elif append:
            appended = await begun_shards(settings.brokers, into.name, settings.shards)
        async with started(make_producer(settings.brokers)) as producer:
            await producer.partitions_for(into.name)
            source, filters = event_source(settings.prefix), asked.filters(settings)
            yield TopicSink(producer, into.name, source, filters, written, appended)


@asynccontextmanager
async def _open_file(
    settings: Settings, asked: ReplayRequest, file: Path, resumes: bool
) -> AsyncIterator[LineSink]:
    """The sink of a file, for one process at a time; raises ReplayRefused."""
    try:
        with file.open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Read while holding the lock, so that lines of an earlier replay are seen.
            written = written_lines(file, fix=True)
            if written and not resumes:
                raise ReplayRefused(f"{file} has lines already: name another, remove it, or add --continue")
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                _record_filters(settings, asked, file, written)
            yield LineSink(stream, written)
            stream.flush()
            os.fsync(stream.fileno())
    except BlockingIOError:
        raise ReplayRefused(f"{file} is being written by another replay") from None
    except OSError as error:
        raise ReplayRefused(f"{file}: {error.strerror}") from None


def _record_filters(settings: Settings, asked: ReplayRequest, file: Path, written: Collection[int]) -> None:
    """Records with which filters a file is written, before its first line is."""
    filters = asked.filters(settings)
    recorded = _recorded_for(settings, asked, file, written)
    if recorded is not None:
        before = {shard: first for shard, first in recorded.first.items() if shard in written}
        journal = filters.journal or recorded.journal
        filters = structs.replace(filters, journal=journal, first=before | filters.first)
    if recorded != filters:
        write_filters(file, filters)


@asynccontextmanager
async def _alone(settings: Settings, topic: str) -> AsyncIterator[None]:
    """Holds a lock on the topic; raises ReplayRefused when another replay holds it. Without PostgreSQL it
    warns that no lock is held.
    """
    try:
        connection = await connect(settings.postgres, settings.schema_)
    except OperationalError as error:
        complain(
            "this replay holds no lock, because PostgreSQL cannot be reached: make sure that no "
            f"other replay writes to topic {topic} meanwhile, or records are duplicated "
            f"({str(error).strip()})"
        )
        yield
        return
    async with connection:
        try:
            await lock_or_raise(connection, f"grabstream-replay-topic-{topic}", f"replay into {topic}")
        except LockTaken as held:
            raise ReplayRefused(f"topic {topic} is being written by another replay: {held}") from None
        yield


def _say_how_to_go_on(sink: Sink, writing: WriteMode) -> None:
    if isinstance(sink, SchemaSink):
        complain("committed events are kept: repeat the same command to continue after them")
    elif writing.append:
        complain("what was appended stays: repeat the command, with --from where it ends, to append the rest")
    elif writing.into.kind in ("file", "topic"):
        complain("to continue, repeat the command with --continue")


def _report(
    settings: Settings,
    asked: ReplayRequest,
    into: Into,
    planned: Sequence[Planned],
    done: dict[int, Done],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Prints the result on standard output, or on standard error when standard output has the lines."""
    to_errors = into.kind == "lines" and not dry_run
    unit = {"journal": "records", "audit": "events", "archive": "lines and records"}[asked.source]
    partial, users_note = [], None
    if into.kind == "schema":
        definition = asked.definition(settings)
        partial = partial_views(definition, settings.shards)
        users_note = what_users_get(definition, settings.shards)
    shards = [_shard_report(part, done.get(part.stretch.shard), unit) for part in planned]
    if as_json:
        value = {
            "into": f"{into.kind}:{into.name}",
            "dry_run": dry_run,
            "shards": shards,
            "partial_views": partial,
            "of_users": users_note,
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
        if users_note:
            click.echo(users_note)
        return
    total = sum(shard.events for shard in done.values())
    if not to_errors:
        click.echo(f"{counted(total, 'events')} into {into.kind} {into.name}; read to {_last_events(done)}.")
    elif not total:
        complain("0 events: no event between the bounds matches these shards, offers and users")
    for line in _short_of(planned, done):
        complain(line)
    if partial:
        names = ", ".join(f"{name}_partial" for name in partial)
        click.echo(f"Not exact, and therefore named differently: {names}.")
    if users_note:
        click.echo(users_note)


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
