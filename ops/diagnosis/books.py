"""What PostgreSQL says: are the tables there, which read models have stopped or are behind, what was set
aside, what was found.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from psycopg import AsyncConnection

from grabstream.models.journal import Cursor
from grabstream.ops.diagnosis.findings import RESTORE, Finding, address, of_shards
from grabstream.ops.diagnosis.topics import LATE_MS, Lag, lags
from grabstream.ops.settings import Settings
from grabstream.projections import cursors
from grabstream.projections.checking import verified
from grabstream.projections.checking.verified import Found, VerifiedTo
from grabstream.projections.cursors import Stop
from grabstream.projections.database.migrate import PROJECTIONS, missing_migrations
from grabstream.projections.records import set_aside
from grabstream.projections.records.set_aside import SetAside
from grabstream.projections.versions import Version, lost, versions, written_by_us
from grabstream.streams.journal import JournalReader
from grabstream.streams.projecting.publisher import newest_cursor
from grabstream.streams.topics import Topics, delete_command

EVENTS: Final = "events"
#: Lost decisions are told of for so long.
LOST_DAYS: Final = 7


class Lost(NamedTuple):
    """Decisions of the last days that recoveries of Redis took back: how many, of how many users, and since
    when (ms).
    """

    decisions: int
    users: int
    first_at: int | None


class BookReadings(NamedTuple):
    """The tables; `missing` migrations, and `gone` versions, leave the rest empty.

    `clock_ahead_ms`: the server's clock against this machine's.
    """

    clock_ahead_ms: int
    data_directory: str | None
    fsync: bool
    missing: list[str]
    positions: dict[str, dict[int, Cursor]]
    stops: list[Stop]
    aside: list[SetAside]
    found: list[Found]
    progress: dict[int, VerifiedTo]
    lost: Lost
    without_version: list[str]
    gone: Sequence[Version] = ()
    #: when each cursor was moved last, ms, by projection and shard
    moved_at: Mapping[tuple[str, int], int] = {}


async def read_books(connection: AsyncConnection[Any], schema: str, clock: Any) -> BookReadings:
    """Reads everything once; raises psycopg's errors when the server cannot be reached."""
    before = clock()
    [now, fsync, may_read] = await _one(
        connection,
        "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint, current_setting('fsync') = 'on', "
        "pg_has_role('pg_read_all_settings', 'member')",
    )
    ahead = now - (before + clock()) // 2
    [directory] = await _one(connection, "SELECT current_setting('data_directory')") if may_read else [None]
    lacking = await missing_migrations(connection, schema)
    if lacking:
        return BookReadings(ahead, directory, fsync, lacking, {}, [], [], [], {}, Lost(0, 0, None), [])
    live = [
        one
        for one in await versions(connection, schema)
        if one.state == "live" and one.projection in PROJECTIONS
    ]
    if gone := await lost(connection, live):
        # Views over all read models went with one of them; what they say is asked for when it is back.
        return BookReadings(ahead, directory, fsync, [], {}, [], [], [], {}, Lost(0, 0, None), [], gone)
    return BookReadings(
        ahead, directory, fsync, [],
        {name: await cursors.load(connection, name) for name in PROJECTIONS},
        await cursors.stops(connection), await set_aside.load(connection),
        await verified.open_findings(connection),
        await verified.progress(connection), Lost(*await _one(connection, _LOST, LOST_DAYS)),
        await _without_version(connection, schema), moved_at=await _moved_at(connection),
    )  # fmt: skip


async def _moved_at(connection: AsyncConnection[Any]) -> dict[tuple[str, int], int]:
    found = await connection.execute(
        "SELECT projection, shard, (extract(epoch FROM moved_at) * 1000)::bigint FROM projection_cursors"
    )
    return {(projection, shard): at for projection, shard, at in await found.fetchall()}


async def _without_version(connection: AsyncConnection[Any], schema: str) -> list[str]:
    """Projections of which no version is the one that this code writes."""
    known = await versions(connection, schema)
    return [
        name
        for name in PROJECTIONS
        if written_by_us([one for one in known if one.projection == name], name) is None
    ]


# The relay and a gate may tell of the same one.
_LOST: Final = (
    "SELECT count(DISTINCT (shard, seq, command)), count(DISTINCT user_id), (extract(epoch FROM min(at)) * "
    "1000)::bigint "
    "FROM lost_decisions WHERE at > now() - make_interval(days => %s)"
)


async def _one(connection: AsyncConnection[Any], query: str, *values: Any) -> Any:
    return await (await connection.execute(query.encode(), values)).fetchone()


async def read_lags(
    settings: Settings, books: BookReadings, consumer: AIOKafkaConsumer
) -> dict[str, list[Lag]]:
    """How far each read model is behind the events of the journal; that of the events topic by the cursor in
    the topic itself.
    """
    topics = Topics(settings.prefix)
    positions = {
        name: {shard: cursor.next_offset for shard, cursor in of.items()}
        for name, of in books.positions.items()
    }
    if books.positions:
        reader = JournalReader(consumer, topics.events)
        aside = [one for one in books.aside if one.projection == EVENTS]
        newest = {
            shard: set_aside.past(aside, shard, await newest_cursor(reader, shard))
            for shard in range(settings.shards)
        }
        positions[EVENTS] = {shard: cursor.next_offset for shard, cursor in newest.items()}
    found = {}
    # Read models stand at few places, mostly at the end: each is looked at once.
    known: dict[tuple[TopicPartition, int], int] = {}
    for name, of_model in positions.items():
        at = {
            TopicPartition(topics.journal, shard): offset
            for shard, offset in of_model.items()
            if shard < settings.shards
        }
        found[name] = await lags(consumer, await _behind_markers(consumer, at, known))
    return found


async def _behind_markers(
    consumer: AIOKafkaConsumer, at: dict[TopicPartition, int], known: dict[tuple[TopicPartition, int], int]
) -> dict[TopicPartition, int]:
    """The offsets of the first records with events from these offsets on: nobody misses anything for a
    marker.

    `known` has what was found before, and gets what is found.
    """
    if not at:
        return {}
    beginnings, ends = await consumer.beginning_offsets(list(at)), await consumer.end_offsets(list(at))
    for partition, offset in at.items():
        if (partition, offset) in known:
            continue
        reader, first = JournalReader(consumer, partition.topic), max(offset, beginnings[partition])
        async for records in reader.read(partition.partition, first, ends[partition]):
            with_events = [record.offset for record in records if dict(record.headers).get("count") != b"0"]
            first = with_events[0] if with_events else records[-1].offset + 1
            if with_events:
                break
        known[partition, offset] = first
    return {partition: known[partition, offset] for partition, offset in at.items()}


class Jump(NamedTuple):
    """A cursor that is not where its rows are: `passed` is the last seq that stands before it, None when it
    is not in this journal.
    """

    projection: str
    shard: int
    cursor: Cursor
    passed: int | None
    end: int


async def read_jumps(settings: Settings, books: BookReadings, consumer: AIOKafkaConsumer) -> list[Jump]:
    """Read models whose cursor is not where their rows are: by its offset each has nothing to read, however
    much there is.
    """
    reader = JournalReader(consumer, Topics(settings.prefix).journal)
    at_rest = {(stop.projection, stop.shard) for stop in books.stops}
    known: dict[tuple[int, int, str], int | None] = {}
    found = []
    for name, of_model in books.positions.items():
        for shard, cursor in of_model.items():
            if not cursor.owner or shard >= settings.shards or (name, shard) in at_rest:
                continue
            place = (shard, cursor.next_offset, cursor.owner)
            if place not in known:
                known[place] = await reader.seq_before(shard, cursor)
            passed = known[place]
            if passed is None or passed > cursor.seq:
                found.append(Jump(name, shard, cursor, passed, await reader.end(shard)))
    return found


async def read_last_seqs(settings: Settings, consumer: AIOKafkaConsumer) -> dict[int, int]:
    """The seq of the last event that the journal has, by shard."""
    reader = JournalReader(consumer, Topics(settings.prefix).journal)
    return {shard: await reader.last_seq(shard) for shard in range(settings.shards)}


# -- checks --------------------------------------------------------------------------------------------------


def tables_missing(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Migrations that were not applied, or shards without cursors."""
    if readings.missing:
        means = "read models cannot be built, and questions about them are not answered"
        return [
            Finding(
                "stuck", f"migrations are missing: {', '.join(readings.missing)}", means, "grabstream init"
            )
        ]
    if readings.gone:
        return [
            Finding(
                "stuck", f"the tables of {one.projection}, in schema {one.schema}, are gone",
                "nobody can "
                f"read {one.projection}",
                f"grabstream rebuild {one.projection}",
            )
            for one in readings.gone
        ]  # fmt: skip
    short = sorted(name for name, of in readings.positions.items() if len(of) < settings.shards)
    if not short:
        return []
    what = f"{', '.join(short)}: cursors for fewer shards than GRAB_SHARDS={settings.shards}"
    return [
        Finding(
            "stuck", what, "what is decided in the other shards never comes into the books", "grabstream init"
        )
    ]


def journal_lost(
    last_seqs: dict[int, int], acknowledged: dict[int, int], readings: BookReadings, settings: Settings
) -> list[Finding]:  # fmt: skip
    """Events that somebody knows and Kafka has not any more. By shard: what the journal ends at, and what
    Redis knows to be in it.
    """
    known = dict(acknowledged)
    for of_model in readings.positions.values():
        for shard, cursor in of_model.items():
            known[shard] = max(known.get(shard, 0), cursor.seq)
    lost = {
        shard: seq - last_seqs.get(shard, 0) for shard, seq in known.items() if seq > last_seqs.get(shard, 0)
    }
    if not lost:
        return []
    journal, command = Topics(settings.prefix).journal, RESTORE
    means = (
        "nothing comes into the books from there; Redis decides nothing there once it is asked what the "
        "journal has"
    )
    if any(last_seqs.values()):
        # What is left goes too, so the audit trail must have it before.
        audit = readings.positions.get("audit", {})
        unread = [shard for shard, seq in last_seqs.items() if shard not in audit or audit[shard].seq < seq]
        if unread:
            means += (
                f"; let the audit trail read what is left of {of_shards(unread)} before (`grabstream "
                "worker --roles project`)"
            )
        command = f"{delete_command(settings.kafka, journal)} && {RESTORE}"
    what = (
        f"{of_shards(lost)}: {sum(lost.values()):,} events that the books or Redis know are gone from "
        f"Kafka: {journal} ends before them"
    )
    return [Finding("stuck", what, means, command)]


def of_another_release(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Read models that workers of this release cannot write: their tables are of another definition."""
    return [
        Finding(
            "stuck", f"{name}: no version has the definition of this release",
            "workers of this release do "
            "not write it: it stands "
            "still",
            f"grabstream rebuild {name}",
        )
        for name in readings.without_version
    ]  # fmt: skip


def stopped(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Read models that have stopped at a shard: a poison block."""
    return [
        Finding(
            "stuck", f"{stop.projection} has stopped at shard {stop.shard}, behind seq {stop.seq} (journal "
                     f"offset {stop.journal_offset}): "
            f"{stop.reason.splitlines()[0]}",
            f"{stop.projection} shows that shard as it was; the other shards go on",
            "start workers of the newer release that wrote it: they go on by themselves"
            if stop.newer
            else f"grabstream set-aside {stop.projection} {stop.shard} --dry-run   # shows the record; or, "
                 "when its cause is mended: "
            f"grabstream retry {stop.projection} {stop.shard}",
            _ms(stop.stopped_at),
        )
        for stop in readings.stops
    ]  # fmt: skip


def lagging(
    behind: dict[str, list[Lag]], readings: BookReadings, settings: Settings, now_ms: int
) -> list[Finding]:
    """Read models that have not read events which stand in the journal for a while."""
    at_rest = {(stop.projection, stop.shard) for stop in readings.stops}
    found = []
    for name, of_model in behind.items():
        late = [
            lag
            for lag in of_model
            if lag.since and now_ms - lag.since > LATE_MS and (name, lag.partition) not in at_rest
        ]
        if late:
            records = sum(lag.end - lag.next_offset for lag in late)
            role = "publish" if name == EVENTS else "project"
            found.append(
                Finding(
                    "stuck",
                    f"{name} is behind the journal: {of_shards(lag.partition for lag in late)}, "
                    f"{records:,} blocks",
                    "what reads it sees the past; nothing is lost", f"grabstream worker --roles {role}",
                    min(lag.since or 0 for lag in late),
                )
            )  # fmt: skip
    return found


def jumped(jumps: Sequence[Jump], readings: BookReadings, settings: Settings) -> list[Finding]:
    """Read models that stand still while their journal goes on, and do not look behind it: their cursors were
    moved.
    """
    found = []
    for jump in jumps:
        cursor = jump.cursor
        why = f"offset {cursor.next_offset}, behind seq {jump.passed}"
        if jump.passed is None:
            why = f"offset {cursor.next_offset} of another journal; this one ends at {jump.end}"
        what = (
            f"{jump.projection} stands still in shard {jump.shard} at seq {cursor.seq}: its cursor was "
            f"moved to {why}"
        )
        means = "what reads it sees the past, and what comes there next does not come into it"
        since = readings.moved_at.get((jump.projection, jump.shard))
        found.append(Finding("stuck", what, means, f"grabstream retry {jump.projection} {jump.shard}", since))
    return found


def put_aside(readings: BookReadings, settings: Settings) -> list[Finding]:
    """What operators set aside: known, and so for ever."""
    return [
        Finding(
            "note", one.in_words(), f"{one.projection} is short by these events",
            f"grabstream rebuild {one.projection}   # when the cause is mended", _ms(one.at),
        )
        for one in readings.aside
    ]  # fmt: skip


def lost_decisions(readings: BookReadings, settings: Settings) -> list[Finding]:
    """Answers that a recovery of Redis took back: nothing is stuck, but somebody was promised something."""
    lost = readings.lost
    if not lost.decisions:
        return []
    what = (
        f"{lost.decisions:,} decisions of {lost.users:,} users were lost with Redis in the last "
        f"{LOST_DAYS} days"
    )
    means = (
        "answers given as `decided` did not hold; those given as `journaled` did. What gates gave that "
        "have died is unknown"
    )
    table = f"{settings.schema_}.lost_decisions"
    mend = f"psql {address('GRAB_POSTGRES', settings.postgres)} -c 'TABLE {table}'   # who, and what"
    return [Finding("note", what, means, mend, lost.first_at)]


def differs(readings: BookReadings, settings: Settings) -> list[Finding]:
    """What the verifier has found."""
    return [
        Finding(
            "stuck", f"verification: {found.where}{found.what}", _DIFFERENCES.get(found.kind,
            "the books "
            "contradict "
            "each other"),
            f"grabstream verify   # says more; when it is explained: grabstream dismiss {found.id}",
            _ms(found.found_at),
        )
        for found in readings.found
    ]  # fmt: skip


_DIFFERENCES = {
    "heads": "read models followed another history than the audit trail: build them anew with `grabstream "
    "rebuild all`",
    "chain": "the audit trail is not what was decided: restore the row from the journal",
    "ledger": "the ledger is not what was decided: build it anew with `grabstream rebuild ledger`",
    "accounts": "an account shows a sum that its events do not: build the ledger anew with `grabstream "
    "rebuild ledger`",
    "balances": "users or offers are shown sums that their events do not: `grabstream rebuild balances`",
    "redis": "Redis decides with numbers that the events do not lead to: `grabstream rebuild redis`",
}


def not_verified(readings: BookReadings, settings: Settings, now_ms: int) -> list[Finding]:
    """Nobody verifies: the verifier has not been there for long."""
    if not readings.positions or not any(cursor.seq for cursor in readings.positions["audit"].values()):
        return []
    last = max((_ms(one.compared_at) for one in readings.progress.values() if one.compared_at), default=None)
    if last is not None and now_ms - last < verified.SILENT_MS_MAX:
        return []
    means = "a difference between journal, books and Redis would not be noticed"
    return [Finding("risk", "nobody verifies the books", means, "grabstream worker --roles verify", last)]


def may_forget(readings: BookReadings, settings: Settings) -> list[Finding]:
    """A PostgreSQL that does not wait for its disk."""
    if readings.fsync:
        return []
    means = "a crash of its machine may leave books that contradict themselves; they would have to be rebuilt"
    mend = (
        f"psql {address('GRAB_POSTGRES', settings.postgres)} -c 'ALTER SYSTEM SET fsync = on' -c 'SELECT "
        "pg_reload_conf()'"
    )
    return [Finding("risk", "PostgreSQL runs with fsync off", means, mend)]


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)
