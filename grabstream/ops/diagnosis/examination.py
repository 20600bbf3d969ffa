"""The examination: reads every server once and runs every check whose servers answered."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaError,
    TopicAuthorizationFailedError,
)
from psycopg import OperationalError
from psycopg.errors import InsufficientPrivilege
from redis.exceptions import NoPermissionError, RedisError

from grabstream.connections.identity import IdentityNotRecorded, OtherJournal, OtherSystem
from grabstream.connections.opening import key_space, mixed_systems, open_redis
from grabstream.connections.preconditions import (
    Unmet,
    enough_partitions,
    loses_nothing,
    unmet_by_postgres,
)
from grabstream.connections.worker_reports import WorkerReport, players
from grabstream.gate.calls import now_ms
from grabstream.ops.diagnosis import core, database_checks, hooks, machine, seal_keys, topics
from grabstream.ops.diagnosis.core import CoreReadings
from grabstream.ops.diagnosis.database_checks import ArchiveReadings, BookReadings, Jump
from grabstream.ops.diagnosis.findings import Finding
from grabstream.ops.diagnosis.seal_keys import SealKeyReadings
from grabstream.ops.diagnosis.topics import Lag, TopicReadings
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.settings import Settings
from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.history.stores import Store

#: How long the examination waits for a server.
SERVER_SECONDS_MAX: Final = 15.0
_NOT_ALLOWED: Final = (
    NoPermissionError, TopicAuthorizationFailedError, GroupAuthorizationFailedError,
    ClusterAuthorizationFailedError, InsufficientPrivilege,
)  # fmt: skip
_NO_ANSWER: Final = (RedisError, KafkaError, OperationalError, InsufficientPrivilege, OSError, TimeoutError)
#: The problem of a server that refuses the queries of this login begins so.
NOT_ALLOWED: Final = "this login may not ask: "

Clock = Callable[[], int]


class Readings(NamedTuple):
    """The readings of the servers; None for a server that does not answer."""

    settings: Settings
    now_ms: int
    core: CoreReadings | None
    topics: TopicReadings | None
    books: BookReadings | None
    #: where each read model and the events topic lag
    lags: dict[str, list[Lag]] | None
    #: the last seq in the journal, by shard; empty when the topic does not exist
    last_seqs: dict[int, int] | None
    jumps: list[Jump] | None = None
    #: the error when the settings name parts of different systems
    mixed_up: OtherSystem | None = None
    #: The condition that PostgreSQL does not meet; its tables are not read then.
    unmet: Unmet | None = None
    #: The archive that the examination was given.
    archive: ArchiveReadings | None = None


class Check(NamedTuple):
    """A check: its name, the servers whose answers it needs, and its function."""

    name: str
    needs: tuple[str, ...]
    run: Callable[[Readings], list[Finding]]


class Examination(NamedTuple):
    """The result: servers with the error of each (None: it answered), findings as (name of the check,
    finding), and the names of the checks that found nothing and of those that could not run. `at` is ms since
    1970 UTC.
    """

    at: int
    servers: dict[str, str | None]
    findings: list[tuple[str, Finding]]
    passed: list[str]
    not_checked: list[str]

    @property
    def exit_code(self) -> int:
        """3: a server was not read; 1: something is stuck or at risk; 0: neither."""
        if any(self.servers.values()):
            return 3
        return int(any(finding.severity != "note" for _, finding in self.findings))


def _core(check: Callable[[CoreReadings, Settings], list[Finding]]) -> Callable[[Readings], list[Finding]]:
    return lambda readings: check(readings.core, readings.settings) if readings.core else []


def _topics(check: Callable[[TopicReadings, Settings], list[Finding]]) -> Callable[[Readings], list[Finding]]:
    return lambda readings: check(readings.topics, readings.settings) if readings.topics else []


def _books(check: Callable[[BookReadings, Settings], list[Finding]]) -> Callable[[Readings], list[Finding]]:
    return lambda readings: check(readings.books, readings.settings) if readings.books else []


def _seal_keys(
    check: Callable[[SealKeyReadings, Settings], list[Finding]],
) -> Callable[[Readings], list[Finding]]:
    # Tables without a migration have their own finding.
    return lambda readings: (
        check(readings.books.seal_keys, readings.settings)
        if readings.books and not readings.books.missing and not readings.books.gone
        else []
    )


def _commands_wait(readings: Readings) -> list[Finding]:
    if not readings.topics:
        return []
    return [
        *topics.offsets_lost(readings.topics),
        *topics.commands_wait(readings.topics, readings.settings, readings.now_ms),
    ]


def _transactions_hang(readings: Readings) -> list[Finding]:
    return (
        topics.transactions_hang(readings.topics, readings.settings, readings.now_ms)
        if readings.topics
        else []
    )


def _commands_set_aside(readings: Readings) -> list[Finding]:
    return (
        topics.commands_set_aside(readings.topics, readings.settings, readings.now_ms)
        if readings.topics
        else []
    )


def _journal_lost(readings: Readings) -> list[Finding]:
    if readings.last_seqs is None or readings.books is None:
        return []
    shards = readings.core.shards if readings.core else ()
    acknowledged = {shard.number: int(shard.fields["journaled_seq"] or 0) for shard in shards}
    lost = database_checks.journal_lost(readings.last_seqs, acknowledged, readings.books, readings.settings)
    if readings.archive:
        lost += database_checks.archived_lost(
            readings.archive, readings.last_seqs, readings.books, readings.settings
        )
    return lost


def _lagging(readings: Readings) -> list[Finding]:
    return (
        database_checks.lagging(readings.lags, readings.books, readings.settings, readings.now_ms)
        if readings.lags and readings.books
        else []
    )


def _jumped(readings: Readings) -> list[Finding]:
    # When the journal has lost events, the restore sets every cursor.
    if (
        not readings.jumps
        or not readings.books
        or _journal_lost(readings)
        or isinstance(readings.mixed_up, OtherJournal)
    ):
        return []
    return database_checks.jumped(readings.jumps, readings.books, readings.settings)


def _mixed_up(readings: Readings) -> list[Finding]:
    error = readings.mixed_up
    if error is None or (
        isinstance(error, IdentityNotRecorded) and readings.books and readings.books.missing
    ):
        return []
    means = "every process refuses these settings, because it would change another system with them"
    return [Finding("stuck", error.what, means, error.fix)]


def _not_verified(readings: Readings) -> list[Finding]:
    return (
        database_checks.not_verified(readings.books, readings.settings, readings.now_ms)
        if readings.books
        else []
    )


def _not_delivered(readings: Readings) -> list[Finding]:
    return hooks.not_delivered(readings.books.hooks, readings.now_ms) if readings.books else []


def _clocks_apart(readings: Readings) -> list[Finding]:
    clocks = {"Redis": readings.core, "PostgreSQL": readings.books}
    return machine.clocks_apart(
        readings.settings, {name: of.clock_ahead_ms for name, of in clocks.items() if of}
    )


def _disks(readings: Readings) -> list[Finding]:
    directories = {
        "PostgreSQL": readings.books.data_directory if readings.books else None,
        **{server.name: server.config["dir"] for server in (readings.core.servers if readings.core else ())},
    }
    return machine.disks(readings.settings, directories)


def _conditions_not_met(readings: Readings) -> list[Finding]:
    stuck = [readings.unmet] if readings.unmet else []
    risks: list[Unmet] = []
    if readings.topics:
        stuck += enough_partitions(readings.topics.states, readings.settings)
        risks = loses_nothing(readings.topics.states, readings.settings)
    return [
        *(Finding("stuck", one.what, one.means, one.fix) for one in stuck),
        *(Finding("risk", one.what, one.means, one.fix) for one in risks),
    ]


_AFTER_THE_JOURNAL: Final = ("grabstream init", "grabstream worker", "grabstream rebuild")
CONDITIONS_CHECK: Final = "servers have the settings that the system needs"
SYSTEM_CHECK: Final = "the settings name one system"
JOURNAL_CHECK: Final = "the journal has all known events"
#: Checks of what stops everything come first.
CHECKS: Final = (
    Check("seal keys are set", (), lambda readings: machine.seal_keys_missing(readings.settings)),
    Check(CONDITIONS_CHECK, (), _conditions_not_met),
    Check(SYSTEM_CHECK, (), _mixed_up),
    Check("seal keys are those of the system", ("postgres",), _seal_keys(seal_keys.wrong)),
    Check("topics exist", ("kafka",), _topics(topics.missing)),
    Check(JOURNAL_CHECK, ("kafka", "postgres"), _journal_lost),
    Check("tables exist", ("postgres",), _books(database_checks.tables_missing)),
    Check("the journal's keys are known", ("postgres",), _books(database_checks.journal_keys_missing)),
    Check("signed records are checked", ("postgres",), _books(database_checks.signatures_not_checked)),
    Check("the number of shards is that of the system", ("redis",), _core(core.other_shards)),
    Check("clocks agree", (), _clocks_apart),
    Check("Redis never evicts", ("redis",), _core(core.may_evict)),
    Check("Redis writes an append-only file", ("redis",), _core(core.may_lose)),
    Check("Redis has memory", ("redis",), _core(core.memory_is_short)),
    Check("partitions have leaders and copies", ("kafka",), _topics(topics.not_led)),
    Check("batches of commands have a bounded size", ("kafka",), _topics(topics.keeps_batches_compressed)),
    Check("PostgreSQL waits for its disk to write", ("postgres",), _books(database_checks.may_forget)),
    Check("PostgreSQL knows the time zones", ("postgres",), _books(database_checks.zones_unknown)),
    Check("disks have room", (), _disks),
    Check("shards have the clock of Redis", ("redis",), _core(core.check_callers_clock)),
    Check("servers of the Redis Cluster answer", ("redis",), _core(core.silent)),
    Check("shards decide", ("redis",), _core(core.fenced)),
    Check("Redis has the functions", ("redis",), _core(core.without_functions)),
    Check("workers make progress", ("redis",), _core(core.in_trouble)),
    Check("shards are relayed", ("redis",), _core(core.not_relayed)),
    Check("outboxes have room", ("redis",), _core(core.outbox_is_full)),
    Check("holds and offers end on time", ("redis",), _core(core.not_swept)),
    Check("commands are read", ("kafka",), _commands_wait),
    Check("transactions end", ("kafka",), _transactions_hang),
    Check("operations have a topic of their own", ("kafka",), _topics(topics.operations_on_commands)),
    Check("commands can be decided", ("kafka",), _commands_set_aside),
    Check(
        "read models are of this release", ("postgres",), _books(database_checks.models_of_another_release)
    ),
    Check("read models have not stopped", ("postgres",), _books(database_checks.models_stopped)),
    Check("read models keep up", ("kafka", "postgres"), _lagging),
    Check("cursors match their rows", ("kafka", "postgres"), _jumped),
    Check("a verifier is running", ("postgres",), _not_verified),
    Check("the books agree", ("postgres",), _books(database_checks.differs)),
    Check("no decision was lost", ("postgres",), _books(database_checks.lost_decisions)),
    Check("webhooks are delivered", ("postgres",), _not_delivered),
    Check("nothing is set aside", ("postgres",), _books(database_checks.put_aside)),
    Check("old seal keys are retired", ("postgres",), _seal_keys(seal_keys.old)),
)


async def examine(settings: Settings, clock: Clock = now_ms, archive: Store | None = None) -> Examination:
    """Reads all servers at once and runs every check. `clock` returns this machine's time in ms. A server
    that does not answer is part of the result, not an error. The journal is also compared with an `archive`;
    raises BadArchive if that is damaged, or of another system.
    """
    read: tuple[tuple[str, Callable[[Settings, Clock], Awaitable[Any]]], ...] = (
        ("redis", _read_core),
        ("kafka", _read_topics),
        ("postgres", _read_books),
    )
    mixed_up, *answers = await asyncio.gather(
        mixed_systems(settings), *(_ask(function(settings, clock)) for _, function in read)
    )
    core_readings, topic_readings, postgres_readings = (readings for readings, _ in answers)
    book_readings, unmet = (
        (None, postgres_readings) if isinstance(postgres_readings, Unmet) else (postgres_readings, None)
    )
    servers = {name: problem for (name, _), (_, problem) in zip(read, answers, strict=True)}
    # The journal is read last, so that it has every event that the other servers refer to.
    lags: dict[str, list[Lag]] | None = None
    last_seqs: dict[int, int] | None = {} if topic_readings else None
    jumps: list[Jump] | None = None
    archived: ArchiveReadings | None = None
    if topic_readings and book_readings and topic_readings.partitions.get(f"{settings.prefix}.journal"):
        journal_readings, problem = await _ask(_read_journal(settings, book_readings))
        lags, jumps, last_seqs = journal_readings or (None, None, None)
        servers["kafka"] = servers["kafka"] or problem
        if archive is not None and mixed_up is None:
            archived, problem = await _ask(_read_archive(settings, archive))
            servers["kafka"] = servers["kafka"] or problem
    return _run_checks(
        Readings(
            settings, clock(), core_readings, topic_readings, book_readings, lags, last_seqs, jumps, mixed_up,
            unmet, archived,
        ),
        servers,
    )  # fmt: skip


def _run_checks(readings: Readings, servers: dict[str, str | None]) -> Examination:
    findings: list[tuple[str, Finding]] = []
    passed, not_checked = [], []
    # With settings of two systems the other checks compare one with the other, and their commands would
    # change the wrong one.
    is_other = readings.mixed_up is not None and not isinstance(
        readings.mixed_up, OtherJournal | IdentityNotRecorded
    )
    unread = {server for server, problem in servers.items() if problem}
    if readings.unmet is not None:
        unread.add("postgres")
    for check in CHECKS:
        # PostgreSQL names the system; another server may still show that the settings name a second one.
        needs = {"postgres"} if check.name == SYSTEM_CHECK and readings.mixed_up is None else check.needs
        if unread.intersection(needs) or (is_other and check.name != SYSTEM_CHECK):
            not_checked.append(check.name)
            continue
        check_findings = check.run(readings)
        findings += [(check.name, finding) for finding in check_findings]
        if not check_findings:
            passed.append(check.name)
    restore = next((finding.command for name, finding in findings if name == JOURNAL_CHECK), None)
    if restore:
        # A worker, a rebuild or empty topics do not help while the journal lacks events: the restore comes
        # first.
        findings = [
            (
                name,
                finding._replace(command=restore)
                if finding.severity != "note" and finding.command.startswith(_AFTER_THE_JOURNAL)
                else finding,
            )
            for name, finding in findings
        ]
    if readings.core:
        findings = [
            (name, _without_needless_start(finding, readings.core.workers)) for name, finding in findings
        ]
    return Examination(readings.now_ms, servers, findings, passed, not_checked)


#: A command that starts a worker only because no worker seems to have these roles.
_starts = re.compile(r"grabstream worker --roles ([a-z,]+)").fullmatch


def _without_needless_start(finding: Finding, workers: Mapping[str, WorkerReport]) -> Finding:
    """The finding, whose command names the worker that already has the roles, and its last error, instead of
    starting another one.
    """
    start = _starts(finding.command)
    playing = players(workers, start[1].split(",")) if start else []
    if not playing:
        return finding
    errors = [
        f"{worker}: {trouble.where}: {trouble.words}"
        for worker in playing
        for trouble in workers[worker].troubles[:1]
    ]
    means = f"its last error: {'; '.join(errors)}" if errors else "it reports no error: read its log"
    return finding._replace(
        command=f"do not start another worker: {', '.join(playing)} has "
        f"{finding.command.rpartition(' ')[2]}; {means}"
    )


async def _ask(reading: Awaitable[Any]) -> tuple[Any, str | None]:
    """The result and None, or None and why the server did not answer."""
    try:
        async with asyncio.timeout(SERVER_SECONDS_MAX):
            return await reading, None
    except _NO_ANSWER as error:
        words = str(error).strip() or f"no answer within {SERVER_SECONDS_MAX:.0f} s"
        refusal = NOT_ALLOWED if isinstance(error, _NOT_ALLOWED) else ""
        return None, f"{refusal}{type(error).__name__}: {words}"


async def _read_core(settings: Settings, clock: Clock) -> CoreReadings:
    redis = open_redis(settings)
    try:
        return await core.read_core(redis, key_space(settings), clock)
    finally:
        await redis.aclose()


async def _read_topics(settings: Settings, clock: Clock) -> TopicReadings:
    async with started(_consumer(settings)) as consumer:
        return await topics.read_topics(settings, consumer)


async def _read_books(settings: Settings, clock: Clock) -> BookReadings | Unmet:
    async with await connect(settings.postgres, settings.schema_) as connection:
        if (unmet := await unmet_by_postgres(connection, settings)) is not None:
            return unmet
        await use_schema(connection, settings.schema_)
        return await database_checks.read_books(connection, settings.schema_, clock)


async def _read_journal(
    settings: Settings, book_readings: BookReadings
) -> tuple[dict[str, list[Lag]], list[Jump], dict[int, int]]:
    """The lags of the read models, the cursors that are not where their rows are, and the last seq of every
    shard in the journal.
    """
    async with started(_consumer(settings)) as consumer:
        jumps = await database_checks.read_jumps(settings, book_readings, consumer)
        return (
            await database_checks.read_lags(settings, book_readings, consumer),
            jumps,
            await database_checks.read_last_seqs(
                settings, book_readings.positions.get("audit", {}), consumer
            ),
        )


async def _read_archive(settings: Settings, archive: Store) -> ArchiveReadings:
    async with started(_consumer(settings)) as consumer:
        return await database_checks.read_archive(settings, archive, consumer)


def _consumer(settings: Settings) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        **brokers.at(settings.brokers, timeout_ms_max=topics.TIMEOUT_MS), auto_offset_reset="earliest",
        enable_auto_commit=False, fetch_max_wait_ms=10,
    )  # fmt: skip


def since_in_words(since: int, now: int) -> str:
    """How long ago, as text: the largest unit of which there are at least two, else seconds."""
    seconds = max(now - since, 0) // 1000
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def by_severity(findings: Sequence[tuple[str, Finding]]) -> list[tuple[str, Finding]]:
    """The findings in the order `stuck`, `risk`, `note`."""
    order = ("stuck", "risk", "note")
    return sorted(findings, key=lambda pair: order.index(pair[1].severity))
