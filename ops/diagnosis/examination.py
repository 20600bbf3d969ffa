"""The examination: every server asked once, every check made that its answers allow."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError
from psycopg import OperationalError
from redis.exceptions import RedisError

from grabstream.lua.gate.calls import now_ms
from grabstream.ops.connections.identity import NotWrittenDown, OtherJournal, OtherSystem
from grabstream.ops.connections.opening import key_space, open_redis, what_is_mixed_up
from grabstream.ops.diagnosis import books, core, machine, topics
from grabstream.ops.diagnosis.books import BookReadings, Jump
from grabstream.ops.diagnosis.core import CoreReadings
from grabstream.ops.diagnosis.findings import Finding
from grabstream.ops.diagnosis.topics import Lag, TopicReadings
from grabstream.ops.settings import Settings
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.streams.clients import started

#: A server that has not answered by then does not answer.
SERVER_SECONDS_MAX: Final = 15.0
_AWAY: Final = (RedisError, KafkaError, OperationalError, OSError, TimeoutError)

Clock = Callable[[], int]


class Readings(NamedTuple):
    """What was read; None of a server that does not answer."""

    settings: Settings
    now_ms: int
    core: CoreReadings | None
    topics: TopicReadings | None
    books: BookReadings | None
    behind: dict[str, list[Lag]] | None
    #: the last seq in the journal, by shard; empty when there is no such topic
    last_seqs: dict[int, int] | None
    jumps: list[Jump] | None = None
    #: what the settings mix up, if anything
    mixed_up: OtherSystem | None = None


class Check(NamedTuple):
    """One check: what it is called, which servers' answers it needs, and the function that looks."""

    name: str
    needs: tuple[str, ...]
    look: Callable[[Readings], list[Finding]]


class Examination(NamedTuple):
    """Servers with what is wrong with them (None: they answer), findings by the check that made them, and
    what could not be checked.
    """

    at: int
    servers: dict[str, str | None]
    findings: list[tuple[str, Finding]]
    passed: list[str]
    not_checked: list[str]

    @property
    def exit_code(self) -> int:
        """3: a server does not answer; 1: something is stuck or at risk; 0: nothing is."""
        if any(self.servers.values()):
            return 3
        return int(any(finding.severity != "note" for _, finding in self.findings))


def _core(check: Callable[[CoreReadings, Settings], list[Finding]]) -> Callable[[Readings], list[Finding]]:
    return lambda readings: check(readings.core, readings.settings) if readings.core else []


def _topics(check: Callable[[TopicReadings, Settings], list[Finding]]) -> Callable[[Readings], list[Finding]]:
    return lambda readings: check(readings.topics, readings.settings) if readings.topics else []


def _books(check: Callable[[BookReadings, Settings], list[Finding]]) -> Callable[[Readings], list[Finding]]:
    return lambda readings: check(readings.books, readings.settings) if readings.books else []


def _commands_wait(readings: Readings) -> list[Finding]:
    return (
        topics.commands_wait(readings.topics, readings.settings, readings.now_ms) if readings.topics else []
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
    return books.journal_lost(readings.last_seqs, acknowledged, readings.books, readings.settings)


def _lagging(readings: Readings) -> list[Finding]:
    return (
        books.lagging(readings.behind, readings.books, readings.settings, readings.now_ms)
        if readings.behind and readings.books
        else []
    )


def _jumped(readings: Readings) -> list[Finding]:
    # Of a journal that lost events the restore knows every cursor.
    if (
        not readings.jumps
        or not readings.books
        or _journal_lost(readings)
        or isinstance(readings.mixed_up, OtherJournal)
    ):
        return []
    return books.jumped(readings.jumps, readings.books, readings.settings)


def _mixed_up(readings: Readings) -> list[Finding]:
    error = readings.mixed_up
    if error is None or (isinstance(error, NotWrittenDown) and readings.books and readings.books.missing):
        return []
    means = "every process refuses these settings, or what is done by them would be done to another system"
    return [Finding("stuck", error.what, means, error.mend)]


def _not_verified(readings: Readings) -> list[Finding]:
    return books.not_verified(readings.books, readings.settings, readings.now_ms) if readings.books else []


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


_AFTER_THE_JOURNAL: Final = ("grabstream init", "grabstream worker", "grabstream rebuild")
SYSTEM_CHECK: Final = "the settings are those of one system"
JOURNAL_CHECK: Final = "the journal has what is known of it"
#: What stops everything stands first.
CHECKS: Final = (
    Check("seal keys are set", (), lambda readings: machine.seal_keys_missing(readings.settings)),
    Check(SYSTEM_CHECK, (), _mixed_up),
    Check("topics are there", ("kafka",), _topics(topics.missing)),
    Check(JOURNAL_CHECK, ("kafka", "postgres"), _journal_lost),
    Check("tables are there", ("postgres",), _books(books.tables_missing)),
    Check("the number of shards is that of the system", ("redis",), _core(core.other_shards)),
    Check("clocks agree", (), _clocks_apart),
    Check("Redis never evicts", ("redis",), _core(core.may_evict)),
    Check("Redis keeps what it has", ("redis",), _core(core.may_lose)),
    Check("Redis has memory", ("redis",), _core(core.memory_is_short)),
    Check("partitions have leaders and copies", ("kafka",), _topics(topics.not_led)),
    Check("the journal is kept for ever", ("kafka",), _topics(topics.journal_forgets)),
    Check("commands are bounded", ("kafka",), _topics(topics.keeps_batches_compressed)),
    Check("PostgreSQL waits for its disk", ("postgres",), _books(books.may_forget)),
    Check("disks have room", (), _disks),
    Check("servers of the Redis Cluster answer", ("redis",), _core(core.silent)),
    Check("shards decide", ("redis",), _core(core.fenced)),
    Check("shards are relayed", ("redis",), _core(core.not_relayed)),
    Check("outboxes have room", ("redis",), _core(core.outbox_is_full)),
    Check("holds and offers end in time", ("redis",), _core(core.not_swept)),
    Check("commands are read", ("kafka",), _commands_wait),
    Check("commands can be decided", ("kafka",), _commands_set_aside),
    Check("read models are of this release", ("postgres",), _books(books.of_another_release)),
    Check("read models go on", ("postgres",), _books(books.stopped)),
    Check("read models keep up", ("kafka", "postgres"), _lagging),
    Check("cursors are where their rows are", ("kafka", "postgres"), _jumped),
    Check("somebody verifies", ("postgres",), _not_verified),
    Check("the books agree", ("postgres",), _books(books.differs)),
    Check("no decision was lost", ("postgres",), _books(books.lost_decisions)),
    Check("nothing is set aside", ("postgres",), _books(books.put_aside)),
)


async def examine(settings: Settings, clock: Clock = now_ms) -> Examination:
    """Asks all servers at once and makes every check; `clock` gives this machine's time in ms. Raises nothing
    for a server that is away.
    """
    read: tuple[tuple[str, Callable[[Settings, Clock], Awaitable[Any]]], ...] = (
        ("redis", _read_core),
        ("kafka", _read_topics),
        ("postgres", _read_books),
    )
    mixed_up, *answers = await asyncio.gather(
        what_is_mixed_up(settings), *(_ask(name, function(settings, clock)) for name, function in read)
    )
    of_core, of_topics, of_books = (readings for readings, _ in answers)
    servers = {name: problem for (name, _), (_, problem) in zip(read, answers, strict=True)}
    # After the others: what somebody knows of the journal was in it before.
    behind: dict[str, list[Lag]] | None = None
    last_seqs: dict[int, int] | None = {} if of_topics else None
    jumps: list[Jump] | None = None
    if of_topics and of_books and of_topics.partitions.get(f"{settings.prefix}.journal"):
        found, problem = await _ask("kafka", _read_journal(settings, of_books))
        behind, jumps, last_seqs = found or (None, None, None)
        servers["kafka"] = servers["kafka"] or problem
    return _make_checks(
        Readings(settings, clock(), of_core, of_topics, of_books, behind, last_seqs, jumps, mixed_up), servers
    )


def _make_checks(readings: Readings, servers: dict[str, str | None]) -> Examination:
    findings: list[tuple[str, Finding]] = []
    passed, not_checked = [], []
    # What the others say is said of two systems, and what they advise would be done to the wrong one.
    is_other = readings.mixed_up is not None and not isinstance(
        readings.mixed_up, OtherJournal | NotWrittenDown
    )
    for check in CHECKS:
        if any(servers[server] for server in check.needs) or (is_other and check.name != SYSTEM_CHECK):
            not_checked.append(check.name)
            continue
        found = check.look(readings)
        findings += [(check.name, one) for one in found]
        if not found:
            passed.append(check.name)
    restore = next((finding.command for name, finding in findings if name == JOURNAL_CHECK), None)
    if restore:
        # A worker, a rebuild or empty topics do not help while the journal lacks events: its own way out goes
        # before theirs.
        findings = [
            (
                name,
                one._replace(command=restore)
                if one.severity != "note" and one.command.startswith(_AFTER_THE_JOURNAL)
                else one,
            )
            for name, one in findings
        ]
    return Examination(readings.now_ms, servers, findings, passed, not_checked)


async def _ask(server: str, asking: Awaitable[Any]) -> tuple[Any, str | None]:
    """What a server said, or why there is nothing."""
    try:
        async with asyncio.timeout(SERVER_SECONDS_MAX):
            return await asking, None
    except _AWAY as error:
        return (
            None,
            f"{type(error).__name__}: {str(error).strip() or f'no answer within {SERVER_SECONDS_MAX:.0f} s'}",
        )


async def _read_core(settings: Settings, clock: Clock) -> CoreReadings:
    redis = open_redis(settings)
    try:
        return await core.read_core(redis, key_space(settings), clock)
    finally:
        await redis.aclose()


async def _read_topics(settings: Settings, clock: Clock) -> TopicReadings:
    async with started(_consumer(settings)) as consumer:
        return await topics.read_topics(settings, consumer)


async def _read_books(settings: Settings, clock: Clock) -> BookReadings:
    async with await connect(settings.postgres, settings.schema_) as connection:
        await use_schema(connection, settings.schema_)
        return await books.read_books(connection, settings.schema_, clock)


async def _read_journal(
    settings: Settings, of_books: BookReadings
) -> tuple[dict[str, list[Lag]], list[Jump], dict[int, int]]:
    """Who is behind the journal, whose cursor is not where its rows are, and the last seq of every shard in
    it.
    """
    async with started(_consumer(settings)) as consumer:
        jumps = await books.read_jumps(settings, of_books, consumer)
        return (
            await books.read_lags(settings, of_books, consumer),
            jumps,
            await books.read_last_seqs(settings, consumer),
        )


def _consumer(settings: Settings) -> AIOKafkaConsumer:
    return AIOKafkaConsumer(
        bootstrap_servers=settings.kafka, auto_offset_reset="earliest", enable_auto_commit=False,
        request_timeout_ms=topics.TIMEOUT_MS,
        fetch_max_wait_ms=10,
    )  # fmt: skip


def since_in_words(since: int, now: int) -> str:
    """How long ago, for people."""
    seconds = max(now - since, 0) // 1000
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def by_severity(findings: Sequence[tuple[str, Finding]]) -> list[tuple[str, Finding]]:
    """What is stuck first, notes last."""
    order = ("stuck", "risk", "note")
    return sorted(findings, key=lambda pair: order.index(pair[1].severity))
