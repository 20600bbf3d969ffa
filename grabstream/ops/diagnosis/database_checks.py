"""Checks of PostgreSQL: whether the tables exist, which read models have stopped or lag, which records were
set aside, and what the verifier found.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from psycopg import AsyncConnection, sql

from grabstream.models.bounds import counted
from grabstream.models.journal import Cursor, is_signed_owner
from grabstream.ops.diagnosis.findings import RESTORE, Finding, address, shard_list
from grabstream.ops.diagnosis.hooks import HookReading, read_hooks
from grabstream.ops.diagnosis.seal_keys import SealKeyReadings, read_seal_keys
from grabstream.ops.diagnosis.topics import LATE_MS, Lag, lags
from grabstream.projections import cursors
from grabstream.projections.checking import verified
from grabstream.projections.checking.verified import OpenFinding, VerifiedTo
from grabstream.projections.cursors import Stop
from grabstream.projections.database.locks import is_held
from grabstream.projections.database.migrate import PROJECTIONS, missing_migrations
from grabstream.projections.database.system import read_identity
from grabstream.projections.database.zones import unknown_zones
from grabstream.projections.tables import journal_keys as recorded_keys
from grabstream.projections.tables import set_aside
from grabstream.projections.tables.set_aside import SetAsideRecord
from grabstream.projections.versions import (
    Version,
    command_that_makes,
    lost,
    versions,
    writable_version,
)
from grabstream.settings import Settings
from grabstream.streams.history.archive_source import open_archive_of_journal
from grabstream.streams.history.stores import Store
from grabstream.streams.journal import JournalReader
from grabstream.streams.journal_keys import journal_keys, lacking
from grabstream.streams.projecting.publisher import event_source, newest_cursor
from grabstream.streams.topics import Topics, delete_command

EVENTS: Final = "events"
#: Lost decisions are reported for this long.
LOST_DAYS: Final = 7


class LostDecisions(NamedTuple):
    """The number of decisions undone by recoveries of Redis in the last LOST_DAYS, of their users, and the
    time of the first record (ms since 1970 UTC).
    """

    decisions: int
    users: int
    first_at: int | None


class BookReadings(NamedTuple):
    """The contents of the tables. Where migrations are `missing` or the tables of live versions are `gone`,
    the other fields are empty.

    `clock_ahead_ms` is the server's clock minus this machine's. `without_version` are projections that this
    release cannot write.
    """

    clock_ahead_ms: int
    data_directory: str | None
    fsync: bool
    missing: list[str]
    positions: dict[str, dict[int, Cursor]]
    stops: list[Stop]
    aside: list[SetAsideRecord]
    findings: list[OpenFinding]
    verified_to: dict[int, VerifiedTo]
    lost: LostDecisions
    without_version: list[str]
    gone: Sequence[Version] = ()
    #: (projection, shard) → when its cursor was last moved, ms since 1970 UTC
    moved_at: Mapping[tuple[str, int], int] = {}
    hooks: Sequence[HookReading] = ()
    seal_keys: SealKeyReadings = SealKeyReadings()
    #: The public keys with which relays sign, by id.
    journal_keys: Mapping[str, str] = {}
    #: Time zones of present offers that PostgreSQL does not know: how many offers, and one of them.
    unknown_zones: Mapping[str, tuple[int, str]] = {}
    #: Whether a verifier has the lock that it has while it works.
    has_verifier: bool = False


async def read_books(connection: AsyncConnection[Any], schema: str, clock: Any) -> BookReadings:
    """Reads the tables once; raises psycopg's errors when the server cannot be reached."""
    before = clock()
    [now, fsync, may_read] = await _row(
        connection,
        "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint, current_setting('fsync') = 'on', "
        "pg_has_role('pg_read_all_settings', 'member')",
    )
    ahead = now - (before + clock()) // 2
    [directory] = await _row(connection, "SELECT current_setting('data_directory')") if may_read else [None]
    lacking = await missing_migrations(connection, schema)
    if lacking:
        return BookReadings(
            ahead, directory, fsync, lacking, {}, [], [], [], {}, LostDecisions(0, 0, None), []
        )
    live = [version for version in await versions(connection, schema) if version.state == "live"]
    if gone := await lost(connection, live):
        # The views over all read models were dropped with the tables of one, so they cannot be read.
        return BookReadings(
            ahead, directory, fsync, [], {}, [], [], [], {}, LostDecisions(0, 0, None), [], gone
        )
    return BookReadings(
        ahead, directory, fsync, [],
        {name: await cursors.load(connection, name) for name in PROJECTIONS},
        await cursors.stops(connection), await set_aside.load(connection),
        await verified.open_findings(connection),
        await verified.progress(connection),
        LostDecisions(*await _row(connection, _LOST_DECISIONS, LOST_DAYS)),
        await _without_version(connection, schema), moved_at=await _moved_at(connection),
        hooks=await read_hooks(connection),
        seal_keys=await read_seal_keys(connection),
        journal_keys=await _journal_keys(connection, schema),
        unknown_zones=await _unknown_zones(connection),
        has_verifier=await is_held(connection, verified.lock_of(schema)),
    )  # fmt: skip


async def _unknown_zones(connection: AsyncConnection[Any]) -> dict[str, tuple[int, str]]:
    rows = await connection.execute(
        "SELECT campaign_timezone, count(*), min(offer) FROM offers WHERE retired_at IS NULL GROUP BY 1"
    )
    offers = {zone: (count, offer) for zone, count, offer in await rows.fetchall()}
    return {zone: offers[zone] for zone in await unknown_zones(connection, offers)}


async def _journal_keys(connection: AsyncConnection[Any], schema: str) -> Mapping[str, str]:
    identity = await read_identity(connection, schema)
    return await recorded_keys.find_all(connection, identity.journal) if identity else {}


async def _moved_at(connection: AsyncConnection[Any]) -> dict[tuple[str, int], int]:
    rows = await connection.execute(
        "SELECT projection, shard, (extract(epoch FROM moved_at) * 1000)::bigint FROM projection_cursors"
    )
    return {(projection, shard): at for projection, shard, at in await rows.fetchall()}


async def _without_version(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """Projections without a version that this code writes."""
    all_versions = await versions(connection, schema)
    return [
        name
        for name in PROJECTIONS
        if writable_version([version for version in all_versions if version.projection == name], name) is None
    ]


# DISTINCT: the relay and a gate may both report the same decision.
_LOST_DECISIONS: Final = (
    "SELECT count(DISTINCT (shard, seq, command)), count(DISTINCT user_id), (extract(epoch FROM min(at)) * "
    "1000)::bigint "
    "FROM lost_decisions WHERE at > now() - make_interval(days => %s)"
)


async def _row(connection: AsyncConnection[Any], query: str, *values: Any) -> Any:
    return await (await connection.execute(query.encode(), values)).fetchone()


async def read_lags(
    settings: Settings, books: BookReadings, consumer: AIOKafkaConsumer
) -> dict[str, list[Lag]]:
    """The lags of each read model and of the events topic behind the events of the journal. The cursor of the
    events topic is read from the topic itself.
    """
    topics = Topics(settings.prefix)
    journal = JournalReader(consumer, topics.journal)
    positions = dict(books.positions)
    if books.positions:
        reader, source = JournalReader(consumer, topics.events), event_source(settings.prefix)
        aside = [one for one in books.aside if one.projection == EVENTS]
        positions[EVENTS] = {
            shard: set_aside.past(aside, shard, await newest_cursor(reader, shard, source, journal))
            for shard in range(settings.shards)
        }
    partitions = [TopicPartition(topics.journal, shard) for shard in range(settings.shards)]
    ends = await consumer.end_offsets(partitions) if positions else {}
    # Several read models often have the same cursor, mostly at the end: each one is searched from once.
    searched: dict[tuple[int, Cursor], int] = {}
    lags_of = {}
    for name, model_cursors in positions.items():
        at = {}
        for shard, cursor in model_cursors.items():
            partition = TopicPartition(topics.journal, shard)
            if partition not in ends:
                continue
            if (shard, cursor) not in searched:
                after = await journal.next_event(shard, cursor, ends[partition])
                searched[shard, cursor] = after.next_offset
            at[partition] = searched[shard, cursor]
        lags_of[name] = await lags(consumer, at, ends)
    return lags_of


class Jump(NamedTuple):
    """A cursor that does not match its rows. `passed` is the last seq in the journal before the cursor's
    offset, None when the offset does not belong to this journal; `end` is the journal's end offset.
    """

    projection: str
    shard: int
    cursor: Cursor
    passed: int | None
    end: int


async def read_jumps(settings: Settings, books: BookReadings, consumer: AIOKafkaConsumer) -> list[Jump]:
    """Cursors that do not match their rows. Such a read model skips the events between its rows and the
    cursor's offset without an error.
    """
    reader = JournalReader(consumer, Topics(settings.prefix).journal)
    stopped_at = {(stop.projection, stop.shard) for stop in books.stops}
    searched: dict[tuple[int, int, str], int | None] = {}
    jumps = []
    for name, model_cursors in books.positions.items():
        for shard, cursor in model_cursors.items():
            if not cursor.owner or shard >= settings.shards or (name, shard) in stopped_at:
                continue
            position = (shard, cursor.next_offset, cursor.owner)
            if position not in searched:
                searched[position] = await reader.seq_before(shard, cursor)
            passed = searched[position]
            if passed is None or passed > cursor.seq:
                jumps.append(Jump(name, shard, cursor, passed, await reader.end(shard)))
    return jumps


async def read_last_seqs(
    settings: Settings, audit: Mapping[int, Cursor], consumer: AIOKafkaConsumer
) -> dict[int, int]:
    """The seq of the last event in the journal, by shard, given the cursors of the audit trail."""
    reader = JournalReader(consumer, Topics(settings.prefix).journal)
    return {
        shard: await reader.last_seq(shard, audit.get(shard, Cursor()).owner)
        for shard in range(settings.shards)
    }


# -- checks --------------------------------------------------------------------------------------------------


def journal_keys_missing(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Public keys that relays sign with, and that these settings lack."""
    why = lacking(journal_keys(), readings.journal_keys)
    if not why:
        return []
    what, _, fix = why.partition(". ")
    return [
        Finding(
            "stuck",
            what,
            "relays with these settings refuse their shards, and read models stop where that key signed",
            f"{fix[0].lower()}{fix[1:]}   # docs/operating.md, Signing the journal",
        )
    ]


def signatures_not_checked(readings: BookReadings, settings: Settings) -> list[Finding]:
    """A signed journal that these settings read without its public keys."""
    signed = [
        shard
        for shard, cursor in readings.positions.get("audit", {}).items()
        if is_signed_owner(cursor.owner)
    ]
    if not signed or settings.journal_public_keys or settings.journal_keys.get_secret_value():
        return []
    return [
        Finding(
            "risk",
            f"{shard_list(signed)}: the journal is signed, but GRAB_JOURNAL_PUBLIC_KEYS is not set here",
            "processes with these settings accept records from anyone who can write to the journal",
            "set GRAB_JOURNAL_PUBLIC_KEYS   # docs/operating.md, Signing the journal",
        )
    ]  # fmt: skip


def tables_missing(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Migrations that were not applied, tables that are missing, and shards without cursors."""
    if readings.missing:
        means = "read models can be neither written nor read"
        return [
            Finding(
                "stuck", f"migrations are missing: {', '.join(readings.missing)}", means, "grabstream init"
            )
        ]
    if readings.gone:
        return [
            Finding(
                "stuck", f"the tables of {version.projection}, in schema {version.schema}, are gone",
                f"{version.projection} can be neither written nor read",
                command_that_makes(version),
            )
            for version in readings.gone
        ]  # fmt: skip
    incomplete = sorted(name for name, of in readings.positions.items() if len(of) < settings.shards)
    if not incomplete:
        return []
    what = f"{', '.join(incomplete)}: cursors for fewer shards than GRAB_SHARDS={settings.shards}"
    means = "events of the shards without a cursor are not applied"
    return [Finding("stuck", what, means, "grabstream init")]


def journal_lost(
    last_seqs: dict[int, int], acknowledged: dict[int, int], readings: BookReadings, settings: Settings
) -> list[Finding]:  # fmt: skip
    """Events in the read models or Redis that Kafka no longer has. `last_seqs` is the last seq of the journal
    by shard, `acknowledged` the last seq that Redis counts as journaled.
    """
    recorded = dict(acknowledged)
    for model_cursors in readings.positions.values():
        for shard, cursor in model_cursors.items():
            recorded[shard] = max(recorded.get(shard, 0), cursor.seq)
    lost = {
        shard: seq - last_seqs.get(shard, 0)
        for shard, seq in recorded.items()
        if seq > last_seqs.get(shard, 0)
    }
    if not lost:
        return []
    means = (
        "read models get no new events of these shards; a shard stops deciding as soon as its relay has "
        "compared it with the journal"
    )
    if any(last_seqs.values()):
        # The restore deletes the rest of the journal too, so the audit trail must have read it.
        audit = readings.positions.get("audit", {})
        unread = [shard for shard, seq in last_seqs.items() if shard not in audit or audit[shard].seq < seq]
        if unread:
            means += (
                f"; before the restore, let the audit trail read the rest of {shard_list(unread)} "
                "(`grabstream worker --roles project`)"
            )
    what = (
        f"{shard_list(lost)}: Kafka has lost {counted(sum(lost.values()), 'events')} that the read models or "
        f"Redis have: {Topics(settings.prefix).journal} ends before them"
    )
    return [Finding("stuck", what, means, _restore_command(last_seqs, settings))]


def _restore_command(last_seqs: Mapping[int, int], settings: Settings) -> str:
    """The command that restores the journal, whose last seqs are these."""
    if not any(last_seqs.values()):
        return RESTORE
    return f"{delete_command(settings.kafka, Topics(settings.prefix).journal)} && {RESTORE}"


class ArchiveReadings(NamedTuple):
    """The cursors after the lines of an archive, and the offsets at which the journal ends, by shard. `name`
    is how messages name the archive.
    """

    name: str
    ends: Mapping[int, Cursor]
    journal_ends: Mapping[int, int]


async def read_archive(settings: Settings, store: Store, consumer: AIOKafkaConsumer) -> ArchiveReadings:
    """Raises BadArchive like `open_archive_of_journal`."""
    journal, shards = Topics(settings.prefix).journal, range(settings.shards)
    archive = await open_archive_of_journal(
        store, settings.prefix, settings.shards, settings.brokers, journal
    )
    ends = {shard: archive.end(shard) for shard in shards}
    return ArchiveReadings(str(store), ends, await JournalReader(consumer, journal).ends(shards))


def archived_lost(
    archive: ArchiveReadings, last_seqs: Mapping[int, int], readings: BookReadings, settings: Settings
) -> list[Finding]:
    """Lines of an archive that Kafka no longer has."""
    lost = {
        shard: cursor.seq
        for shard, cursor in archive.ends.items()
        if archive.journal_ends[shard] < cursor.next_offset
    }
    if not lost:
        return []
    audit = readings.positions.get("audit", {})
    lacking = [shard for shard, seq in lost.items() if shard not in audit or audit[shard].seq < seq]
    means = "no export continues this archive; after a restore, export into a new one, and keep this one"
    if lacking:
        means += (
            f": it alone has the last events of {shard_list(lacking)}, which the audit trail lacks. The "
            "restore gives them up: recover the disks of Kafka instead, if you can"
        )
    journal = Topics(settings.prefix).journal
    what = f"{shard_list(lost)}: {journal} has lost its end: {archive.name} has further lines"
    return [Finding("stuck", what, means, _restore_command(last_seqs, settings))]


def models_of_another_release(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Read models that workers of this release cannot write: their tables have another definition."""
    return [
        Finding(
            "stuck", f"{name}: no version has the definition of this release",
            "workers of this release do not write it, so it gets no new events",
            f"grabstream rebuild {name}",
        )
        for name in readings.without_version
    ]  # fmt: skip


def models_stopped(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Read models that have stopped at a record of a shard that they cannot apply."""
    return [
        Finding(
            "stuck", f"{stop.projection} has stopped at shard {stop.shard}, after seq {stop.seq} (journal "
                     f"offset {stop.journal_offset}): "
            f"{stop.reason.splitlines()[0]}",
            f"{stop.projection} gets no new events of that shard; the other shards continue",
            "start workers of the newer release that wrote the record: they continue from there"
            if stop.newer
            else f"grabstream set-aside {stop.projection} {stop.shard} --dry-run   # shows the record; "
            f"once its cause is removed: grabstream retry {stop.projection} {stop.shard}",
            _ms(stop.stopped_at),
        )
        for stop in readings.stops
    ]  # fmt: skip


def lagging(
    lags_of: dict[str, list[Lag]], readings: BookReadings, settings: Settings, now_ms: int
) -> list[Finding]:
    """Read models, and the events topic, that have not applied events for LATE_MS. Those that have stopped
    are findings of `stopped`.
    """
    stopped_at = {(stop.projection, stop.shard) for stop in readings.stops}
    findings = []
    for name, model_lags in lags_of.items():
        late = [
            lag
            for lag in model_lags
            if lag.since and now_ms - lag.since > LATE_MS and (name, lag.partition) not in stopped_at
        ]
        if late:
            records = sum(lag.end - lag.next_offset for lag in late)
            role = "publish" if name == EVENTS else "project"
            findings.append(
                Finding(
                    "stuck",
                    f"{name} lags behind the journal: {shard_list(lag.partition for lag in late)}, "
                    f"{counted(records, 'blocks')}",
                    "its readers see old data; no data is lost", f"grabstream worker --roles {role}",
                    min(lag.since or 0 for lag in late),
                )
            )  # fmt: skip
    return findings


def jumped(jumps: Sequence[Jump], readings: BookReadings, settings: Settings) -> list[Finding]:
    """Read models that apply nothing because their cursors were moved away from their rows."""
    findings = []
    for jump in jumps:
        cursor = jump.cursor
        position = f"offset {cursor.next_offset}, after seq {jump.passed}"
        if jump.passed is None:
            position = f"offset {cursor.next_offset}, which this journal does not have: it ends at {jump.end}"
        what = (
            f"{jump.projection} has the events of shard {jump.shard} up to seq {cursor.seq}, but its cursor "
            f"was moved to {position}"
        )
        means = "its readers see old data, and it applies no new events of that shard"
        since = readings.moved_at.get((jump.projection, jump.shard))
        command = f"grabstream retry {jump.projection} {jump.shard}"
        findings.append(Finding("stuck", what, means, command, since))
    return findings


def put_aside(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Records that operators set aside."""
    return [
        Finding(
            "note", record.in_words(), f"{record.projection} lacks these events",
            f"grabstream rebuild {record.projection}   # once the cause is removed", _ms(record.at),
        )
        for record in readings.aside
    ]  # fmt: skip


def lost_decisions(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Decisions undone by a recovery of Redis. Nothing is stuck, but promises to users were broken."""
    lost = readings.lost
    if not lost.decisions:
        return []
    what = (
        f"{counted(lost.decisions, 'decisions')} of {counted(lost.users, 'users')} lost with Redis in the "
        f"last {LOST_DAYS} days"
    )
    means = (
        "these answers were given as `decided` and do not hold; answers given as `journaled` hold. Answers "
        "of gates that have died may be missing from this count"
    )
    table = sql.Identifier(settings.schema_, "lost_decisions").as_string()
    command = (
        f"psql {address('GRAB_POSTGRES', settings.postgres)} -c 'TABLE {table}'   # shows users and commands"
    )
    return [Finding("note", what, means, command, lost.first_at)]


def differs(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Differences that the verifier has found, and records of the journal that no known relay signed."""
    return [
        _not_signed(found) if found.kind == "journal" else Finding(
            "stuck", f"verification: {found.where}{found.what}",
            _DIFFERENCES.get(found.kind, "the read models contradict each other"),
            f"grabstream verify   # shows more; once it is explained: grabstream dismiss {found.id}",
            _ms(found.found_at),
        )
        for found in readings.findings
    ]  # fmt: skip


def _not_signed(found: OpenFinding) -> Finding:
    return Finding(
        "risk", f"journal: {found.where}{found.what}",
        "a client without a relay's key has written to the journal; its records are ignored, and no read "
        "model is affected",
        "grabstream verify   # shows all offsets; take that right from whoever it was, then: grabstream "
        f"dismiss {found.id}", _ms(found.found_at),
    )  # fmt: skip


def _rebuilt(projection: str) -> str:
    """What repairs a read model. A rebuild stops at rows that differ, which here are the fault."""
    rebuild = f"grabstream rebuild {projection}"
    return f"`{rebuild}` shows the rows that differ, `{rebuild} --accept` then repairs them"


_DIFFERENCES = {
    "heads": f"read models followed another history than the audit trail: {_rebuilt('all')}",
    "chain": "the audit trail differs from what was decided: restore the row from the journal",
    "ledger": f"the ledger differs from what was decided: {_rebuilt('ledger')}",
    "accounts": f"an account shows a sum that does not follow from its events: {_rebuilt('ledger')}",
    "balances": "users or offers are shown sums that do not follow from their events: "
    f"{_rebuilt('balances')}",
    "redis": "Redis decides with numbers that do not follow from the events: `grabstream rebuild redis` "
    "repairs them",
}


def not_verified(readings: BookReadings, settings: Settings, now_ms: int) -> list[Finding]:
    """No verifier runs, and none has compared anything for SILENT_MS_MAX; or the running one has not for
    UNFINISHED_MS_MAX. After a pass of a large system, a verifier rests longer than SILENT_MS_MAX.
    """
    if not readings.positions or not any(cursor.seq for cursor in readings.positions["audit"].values()):
        return []
    last = max(
        (_ms(shard.compared_at) for shard in readings.verified_to.values() if shard.compared_at),
        default=None,
    )
    means = "a difference between the journal, the read models and Redis would not be noticed"
    if readings.has_verifier:
        if last is None or now_ms - last < verified.UNFINISHED_MS_MAX:
            return []
        what = f"the verifier has compared nothing for {(now_ms - last) // 60_000:,} minutes"
        command = "grabstream verify   # checks once; the log of the worker says what the verifier waits for"
        return [Finding("risk", what, means, command, last)]
    if last is not None and now_ms - last < verified.SILENT_MS_MAX:
        return []
    return [Finding("risk", "no worker verifies", means, "grabstream worker --roles verify", last)]


def zones_unknown(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Time zones of offers that this program knows, and PostgreSQL does not."""
    return [
        Finding(
            "risk", f"PostgreSQL does not know the time zone {zone} of {counted(count, 'offers')}, such as "
                    f"{offer}",
            "`limits`, `results_by_week` and `funnel` count their days and weeks in UTC; decisions and "
            "answers are those of the zone",
            "update PostgreSQL on its machine, or the system's tzdata where PostgreSQL uses that",
        )
        for zone, (count, offer) in readings.unknown_zones.items()
    ]  # fmt: skip


def may_forget(readings: BookReadings, settings: Settings) -> list[Finding]:
    """A PostgreSQL that does not wait for its disk."""
    if readings.fsync:
        return []
    means = "a crash of its machine may corrupt the read models, which must then be rebuilt"
    command = (
        f"psql {address('GRAB_POSTGRES', settings.postgres)} -c 'ALTER SYSTEM SET fsync = on' -c 'SELECT "
        "pg_reload_conf()'"
    )
    return [Finding("risk", "PostgreSQL runs with fsync off", means, command)]


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
