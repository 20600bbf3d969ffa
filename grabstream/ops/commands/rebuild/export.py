"""`export` and `verify-archive`: the lines of the journal as Parquet files, partitioned by day and shard."""

from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import click
from psycopg import OperationalError
from psycopg.errors import UndefinedTable

from grabstream.connections.event_sources import NoTrail, open_history
from grabstream.connections.identity import find_journal
from grabstream.connections.opening import check_system
from grabstream.extras import INSTALL_ANALYSTS, installed
from grabstream.models.bounds import counted
from grabstream.models.journal import Corrupt, Cursor, Gap
from grabstream.ops.commands.operate.worker import step_of
from grabstream.ops.console.output import WholeNumber, json_option, print_json, refuse
from grabstream.ops.console.progress import ReadingBar
from grabstream.ops.console.stopping import run_until_stopped
from grabstream.ops.formats.replay_request import ArchiveAddress, chosen_shards, source_option
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.tables import set_aside
from grabstream.projections.tables.set_aside import SetAsideRecord
from grabstream.runtime.collecting import collect_rarely
from grabstream.settings import BadSettings, Settings, load_settings
from grabstream.streams.history.archive import Archive, ArchiveSystem, open_archive
from grabstream.streams.history.archive_source import parts_in
from grabstream.streams.history.sources import AuditSource, JournalSource, Source
from grabstream.streams.history.stores import ArchiveInUse, CannotWrite, Store, in_thread
from grabstream.streams.replaying.archive_encoder import Encoder, EncoderEnded
from grabstream.streams.replaying.archive_sink import ArchiveSink, exporting
from grabstream.streams.replaying.replay import Planned, ReportReplay, Stretch, plan


@click.command()
@click.argument("archive", type=ArchiveAddress(exists=False))
@source_option("The source of the lines.", "audit")
@click.option(
    "--shard", "shards", multiple=True, type=WholeNumber(min=0), help="Only this shard. Repeatable."
)
@click.option("--dry-run", is_flag=True, help="Show what would be exported, and write nothing.")
@json_option
def export(archive: Path | str, source: str, shards: Sequence[int], dry_run: bool, as_json: bool) -> None:
    """Export the journal to ARCHIVE as Parquet files, partitioned by day and shard, for DuckDB, pandas and
    other tools. ARCHIVE is a directory, or s3://bucket/prefix in an S3-compatible store. Continues where the
    last export into ARCHIVE stopped, also after Ctrl-C or a crash.

    Every line is verified by the chain of hashes, and stored byte for byte, with its fields as columns.
    docs/archive.md describes the files. Needs the extra `analysts`, and for s3:// the extra `s3`.

    Exit code 1: ARCHIVE is damaged, or of another system, or the source contradicts itself, or the store
    refuses (no such bucket, access denied); 2: wrong usage; 3: a server or the store cannot be reached, or
    refuses the credentials.
    """
    _require_analysts("export")
    settings = load_settings()
    collect_rarely()
    chosen = chosen_shards(settings, shards)
    with _refusing():
        work = _export(settings, settings.store(archive), source, chosen, dry_run)
        report = run_until_stopped(work, "repeat the command to continue")
    if as_json:
        print_json(report)
    else:
        click.echo(_report_text(report))


@click.command()
@click.argument("archive", type=ArchiveAddress(exists=False))
@json_option
def verify_archive(archive: Path | str, as_json: bool) -> None:
    """Verify every file of ARCHIVE, which `export` has written. Needs no server of the system.

    Exit code 1: ARCHIVE is damaged, or the store refuses; 2: wrong usage; 3: the store cannot be reached, or
    refuses the credentials.
    """
    _require_analysts("verify-archive")
    with _refusing():
        report = _check(open_archive(load_settings().store(archive), None))
    if as_json:
        print_json(report)
    else:
        files, lines, events = (counted(report[name], name) for name in ("files", "lines", "events"))
        click.echo(f"{report['directory']} is complete: {files} with {lines} ({events}).")
        if report["set_aside"]:
            unreadable = counted(report["set_aside"], "lines")
            click.echo(f"Set aside by operators when exported, and not readable: {unreadable}.")


def _require_analysts(verb: str) -> None:
    if not installed("pyarrow"):
        raise click.UsageError(f"{verb} needs the extra `analysts`: {INSTALL_ANALYSTS}")


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (Corrupt, Gap, NoTrail, ArchiveInUse, CannotWrite, EncoderEnded) as error:
        refuse(error)


def _check(archive: Archive) -> dict[str, Any]:
    files = archive.manifest.files
    lines = as_text = 0
    with ReadingBar("check", len(files)) as show:
        for file in files:
            # An export compares the places of lines only; whoever reads an archive decodes them.
            for part in parts_in(archive, file, archive.content_of(file), lambda seq, is_text: is_text):
                lines += len(part.facts) or 1
                as_text += not part.facts
            show(1, file.last_seq - file.first_seq + 1)
    return {
        "directory": str(archive.store), "checked": True, "files": len(files), "lines": lines,
        "set_aside": as_text,
        "events": sum(file.last_seq - file.first_seq + 1 for file in files),
    }  # fmt: skip


async def _export(
    settings: Settings, store: Store, source: str, shards: Sequence[int], dry_run: bool
) -> dict[str, Any]:
    stretches = [Stretch(shard) for shard in shards]
    if dry_run:
        system = await _system(settings, source)
        async with open_history(settings, source) as opened:
            ends = await in_thread(_known_ends, store, system, shards)
            planned = await plan(opened, stretches, True, ends)
            _require_end(source, planned, store)
            return _report(store, source, planned, {}, None)
    # Started first, because it takes some time to start.
    with Encoder() as encoder:
        system = await _system(settings, source)
        async with open_history(settings, source) as opened, exporting(store, system) as begun:
            planned = await plan(opened, stretches, True, _ends(begun.archive, shards))
            _require_end(source, planned, store)
            aside = await _set_aside(settings)
            async with ArchiveSink(begun, encoder, step_of(settings), aside) as sink:
                with ReadingBar("export", sum(part.units for part in planned)) as show:
                    ends = await _write(opened, planned, sink, show)
            return _report(store, source, planned, ends, sink)


async def _set_aside(settings: Settings) -> Sequence[SetAsideRecord]:
    """The records that operators set aside; none if PostgreSQL cannot be reached, or has no such table."""
    try:
        async with await connect(settings.postgres, settings.schema_) as connection:
            await use_schema(connection, settings.schema_)
            return await set_aside.load(connection)
    except (OperationalError, UndefinedTable):
        return ()


def _require_end(source: str, planned: Sequence[Planned], store: Store) -> None:
    """Raises Gap if the source of a shard ends before the archive."""
    for (shard, *_), (cursor, end, _), _ in planned:
        if source == "audit" and end < cursor.seq:
            raise Gap(
                f"the audit trail of shard {shard} ends at seq {end}, and {store} has its lines up to seq "
                f"{cursor.seq}: start a worker with the role `project`, which reads the rest of the journal"
            )
        if source == "journal" and end < cursor.next_offset:
            raise Gap(
                f"the journal has lost its end: shard {shard} ends at offset {end}, and {store} has its "
                f"lines up to offset {cursor.next_offset}. `grabstream doctor --archive {store}` names what "
                "repairs it; export into a new archive then, and keep this one"
            )


async def _write(
    source: Source, planned: Sequence[Planned], sink: ArchiveSink, report: ReportReplay
) -> dict[int, Cursor]:
    """Writes the lines of each shard into the archive; returns the cursors after them."""
    assert isinstance(source, JournalSource | AuditSource)
    ends = {}
    for (shard, *_), start, left in planned:
        cursor = start.cursor
        async with aclosing(source.lines(shard, cursor, start.end)) as lists:
            async for read in lists:
                await sink.write(shard, read)
                events, cursor = read.after.seq - cursor.seq, read.after
                still = source.units(shard, start._replace(cursor=cursor))
                report(left - still, events)
                left = still
        report(left, 0)
        ends[shard] = cursor
    await sink.flush()
    return ends


def _known_ends(store: Store, system: ArchiveSystem, shards: Sequence[int]) -> dict[int, Cursor]:
    return _ends(open_archive(store, system), shards) if store.has_manifest() else {}


def _ends(archive: Archive, shards: Sequence[int]) -> dict[int, Cursor]:
    return {shard: archive.end(shard) for shard in shards}


async def _system(settings: Settings, source: str) -> ArchiveSystem:
    """The system that the archive belongs to: the schema names its journal, or Kafka does."""
    identity = await check_system(settings, journal=source == "journal")
    if identity is not None:
        return ArchiveSystem(identity.prefix, identity.journal, identity.shards)
    topic = await find_journal(settings) if source == "journal" else None
    if topic is None:
        raise BadSettings(f"schema {settings.schema_} names no system: run `grabstream init`")
    return ArchiveSystem(settings.prefix, topic.id, settings.shards)


def _report(
    store: Store, source: str, planned: Sequence[Planned], ends: dict[int, Cursor], sink: ArchiveSink | None
) -> dict[str, Any]:
    begins = {part.stretch.shard: part.start.cursor for part in planned}
    ends = begins | ends
    return {
        "directory": str(store),
        "source": source,
        "dry_run": sink is None,
        "files": sink.files if sink else 0,
        "bytes": sink.bytes if sink else 0,
        "lines": sink.lines if sink else 0,
        "events": sum(ends[shard].seq - begin.seq for shard, begin in begins.items()),
        "to_read": sum(part.units for part in planned),
        "unit": "events" if source == "audit" else "records",
        "shards": [
            {"shard": shard, "from_seq": begin.seq, "seq": ends[shard].seq, "head": ends[shard].head.hex()}
            for shard, begin in begins.items()
        ],
    }


def _report_text(report: dict[str, Any]) -> str:
    files, lines, events = (counted(report[name], name) for name in ("files", "lines", "events"))
    if report["dry_run"]:
        last = ", ".join(f"{one['shard']}:{one['seq']}" for one in report["shards"] if one["seq"])
        return (
            f"Would read {counted(report['to_read'], report['unit'])} of the {report['source']}, after "
            f"{last or 'the beginning'}."
        )
    return f"Exported {events} in {lines} to {files} ({_size(report['bytes'])}) in {report['directory']}."


def _size(number: int) -> str:
    return f"{number / 1e6:,.1f} MB" if number >= 1e6 else f"{number / 1e3:,.1f} kB"
