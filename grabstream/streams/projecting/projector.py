"""A projector: writes journal records into one read model, in groups, with cursor and rows in one
transaction.

Its records are hints, because Faust may skip or repeat some; the cursor in PostgreSQL decides. A record below
the cursor is dropped. A record above it makes the projector itself read the journal from the cursor. A shard
whose journal contradicts itself, or whose events the database refuses, stops alone; the stop is recorded, and
the other shards continue.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import psycopg
from psycopg import AsyncConnection

from grabstream.models.journal import Corrupt, Cursor, Gap
from grabstream.projections import cursors
from grabstream.projections.checking import verified
from grabstream.projections.checking.verified import RecordedProblem
from grabstream.projections.cursors import Apply, CursorMoved
from grabstream.projections.database.merging import plan_by_keys
from grabstream.projections.database.sessions import connect, session_name
from grabstream.projections.versions import NoReadModel, use_read_model
from grabstream.runtime.traces import traces
from grabstream.runtime.trouble import is_trouble
from grabstream.streams.clients import Trouble, error_text
from grabstream.streams.follower import Decoder, Follower, Group, next_chunk
from grabstream.streams.journal import JournalReader, JournalRecord, open_reader
from grabstream.streams.measures import ProjectionMeasures

log = logging.getLogger(__name__)

QUEUE_RECORDS_MAX: Final = 256
#: A transaction costs as much as some hundred rows. So records that arrive soon join a group: those within
#: the time that the last transaction took, between these bounds. Where processor time is short, transactions
#: take longer, so there are fewer of them. If FEW_RECORDS_MAX wait already, the group is written at once.
GATHER_SECONDS_MIN: Final = 0.005
GATHER_SECONDS_MAX: Final = 0.03
FEW_RECORDS_MAX: Final = 32
RETRY_SECONDS: Final = 0.5
#: How often a projector polls for a version of its definition while there is none.
POLL_VERSION_SECONDS: Final = 1.0
RETRY_SECONDS_MAX: Final = 10.0
#: The longest pause after unknown errors.
FAILED_SECONDS_MAX: Final = 30.0
#: How often a projector polls whether an operator has resumed shards at which it has stopped.
POLL_STOPPED_SECONDS: Final = 1.0
EXIT_UNKNOWN_ERROR: Final = 70
#: The projection that reports records which no known relay signed: one of them is enough.
REPORTS_IGNORED: Final = "audit"
NOT_SIGNED_SUBJECT: Final = "records that no known relay signed"
#: PostgreSQL rolls back a transaction that is idle for this long.
HANGS_MS_MAX: Final = 5_000


class CatchUp(NamedTuple):
    """Asks to read a shard's journal from the cursor to its end, whether or not a new record comes."""

    shard: int


_decoder = Decoder()


class Projector:
    """Builds one read model. `put` queues records; `run` writes them until cancelled. No error makes it skip
    a record.

    `_open`, `_in_transaction` and `_disconnect` determine where cursor and rows are stored: here in
    PostgreSQL, in one transaction.
    """

    #: The number of events after which a transaction is written, if more wait.
    group_events_max: int = 16_000

    #: Errors that are caused by a record. They would happen again, so its shard stops before the record.
    record_errors: tuple[type[Exception], ...] = (
        psycopg.IntegrityError, psycopg.DataError,
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError, msgspec.MsgspecError,
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        apply: Apply,
        postgres: str,
        schema: str,
        kafka: str,
        journal: str,
        step: Callable[[str], None] = lambda step_name: None,
        decoder: Decoder = _decoder,
        measures: ProjectionMeasures | None = None,
    ) -> None:
        self.measures = measures or ProjectionMeasures()
        self.name = name
        self._apply = apply
        self._postgres = postgres
        self._schema = schema
        self._kafka = kafka
        self._journal = journal
        self._step = step
        self._decoder = decoder
        self._queue: asyncio.Queue[JournalRecord | CatchUp] = asyncio.Queue(QUEUE_RECORDS_MAX)
        self._cursors: dict[int, Cursor] = {}
        self._stopped: set[int] = set()
        self._poll_stopped_at = 0.0
        self._connection: AsyncConnection[Any] | None = None
        self._version_schema = ""  # the schema of the version that is written
        self._writing_since: float | None = None
        #: The shards to catch up before anything else.
        self._to_catch_up: list[JournalRecord | CatchUp] = []
        self._pause_seconds = RETRY_SECONDS
        self._trouble = Trouble(log, f"projection {name}")
        #: How long to wait for records that join a group.
        self._gather_seconds = GATHER_SECONDS_MIN
        #: Why nothing can be written, in words, while no version of the read model has the definition of this
        #: code.
        self.waits_for = ""

    def seconds_writing(self) -> float:
        """Seconds since it began to write the present group; 0 if there is nothing to write."""
        return 0.0 if self._writing_since is None else time.monotonic() - self._writing_since

    async def put(self, item: JournalRecord | CatchUp) -> None:
        """Queues a record; waits while the queue is full."""
        await self._queue.put(item)

    async def run(self) -> None:
        """Writes the queued records until cancelled, and retries after every error."""
        try:
            while True:
                try:
                    async with open_reader(self._kafka, self._journal) as reader:
                        await self._write_queue(reader)
                except (Exception, asyncio.CancelledError) as error:
                    if is_trouble(error):
                        self._trouble.say(error_text(error))
                        await self._pause(RETRY_SECONDS)
                    elif isinstance(error, asyncio.CancelledError):
                        raise
                    else:
                        await self._failed()
        finally:
            await self._disconnect()

    async def _write_queue(self, reader: JournalReader) -> None:
        while True:
            items = self._to_catch_up or await self._next_items()
            if items and self._gathers(items[0]):
                await asyncio.sleep(self._gather_seconds)
            while not self._queue.empty() and len(items) < QUEUE_RECORDS_MAX:
                items.append(self._queue.get_nowait())
            # Faust acknowledges queued records, also those not written yet: the cursor says where to resume.
            self._to_catch_up = _catch_up(items)
            self._writing_since = time.monotonic()
            await self._write_with_retries(items, reader)
            self._gather_seconds = min(max(self.seconds_writing(), GATHER_SECONDS_MIN), GATHER_SECONDS_MAX)
            self._to_catch_up, self._writing_since, self._pause_seconds = [], None, RETRY_SECONDS

    def _gathers(self, item: JournalRecord | CatchUp) -> bool:
        return isinstance(item, JournalRecord) and self._queue.qsize() < FEW_RECORDS_MAX

    async def _failed(self) -> None:
        """Logs the unknown error that is being handled, and pauses, longer each time. Other read models
        continue.
        """
        self.measures.failures += 1
        if (error := sys.exception()) is not None:
            self._trouble.note(error_text(error))
        log.critical(
            "projection %s: unknown error; trying again in %.1f s",
            self.name,
            self._pause_seconds,
            exc_info=True,
        )
        await self._disconnect()
        await self._pause(self._pause_seconds)
        self._pause_seconds = min(self._pause_seconds * 2, FAILED_SECONDS_MAX)

    async def _pause(self, seconds: float) -> None:
        """Waits. Drops records that arrive, because a full queue would block Faust; their shards catch up
        later.
        """
        # The watchdog sees that this projector waits, and does not restart Faust.
        self._writing_since = time.monotonic()
        while (left := self._writing_since + seconds - time.monotonic()) > 0:
            await asyncio.sleep(min(POLL_VERSION_SECONDS, left))
            self._drop_queue()

    def _drop_queue(self) -> None:
        dropped = list(self._to_catch_up)
        while not self._queue.empty():
            dropped.append(self._queue.get_nowait())
        self._to_catch_up = _catch_up(dropped)

    async def _next_items(self) -> list[JournalRecord | CatchUp]:
        """The next item of the queue. While shards have stopped, it returns without one from time to time."""
        if not self._stopped:
            return [await self._queue.get()]
        try:
            async with asyncio.timeout(POLL_STOPPED_SECONDS):
                return [await self._queue.get()]
        except TimeoutError:
            return []

    async def _write_with_retries(self, items: list[JournalRecord | CatchUp], reader: JournalReader) -> None:
        """Writes the items; retries for as long as PostgreSQL or Kafka is down."""
        pause = RETRY_SECONDS
        while True:
            try:
                await self._connected()
                # Resumed shards are added to the items, so that a retry includes them.
                items = [*items, *await self._resumed()]
                await self._group_records(items, reader)
                self._trouble.over()
                self.waits_for = ""
                return
            except CursorMoved as moved:
                # Another process was faster, or another version is live now.
                log.info("%s; reading it again", moved)
                self._cursors.clear()
                items = _catch_up(items)
            except NoReadModel as reason:
                items = await self._wait_for_version(items, reason)
            except psycopg.errors.UndefinedTable as error:
                # The version we wrote was dropped. If our version lacks a table, it waits until that is
                # repaired.
                items = await self._wait_for_version(items, NoReadModel(str(error)))
            except psycopg.errors.LockNotAvailable as error:
                log.warning(
                    "projection %s: %s; ended %d hanging sessions",
                    self.name,
                    error,
                    await self._end_hanging(),
                )
                await self._disconnect()
            except psycopg.ProgrammingError:
                # Without the schema of the version, the same names mean the public views, which cannot be
                # written.
                if not await self._version_dropped():
                    raise
                items = await self._wait_for_version(
                    items, NoReadModel("the version that it wrote was dropped")
                )
            except BaseException as error:
                self._trouble.met(error)
                self.measures.failures += 1
                await self._disconnect()
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_SECONDS_MAX)

    async def _wait_for_version(
        self, items: Sequence[JournalRecord | CatchUp], reason: NoReadModel
    ) -> list[JournalRecord | CatchUp]:
        """Pauses until the next attempt, and drops queued records, because a full queue would block Faust.
        Returns the shards to catch up.
        """
        if str(reason) != self.waits_for:
            log.warning("projection %s waits: %s", self.name, reason)
            self.waits_for = str(reason)
        await self._disconnect()
        await self._pause(POLL_VERSION_SECONDS)
        return _catch_up([*items, *self._to_catch_up])

    async def _connected(self) -> AsyncConnection[Any]:
        if self._connection is None:
            self._connection = await connect(self._postgres, self._schema, self.name)
            # If PostgreSQL loses a commit in a crash, it loses the cursor as well, and the events are read
            # from the journal again.
            await self._connection.execute("SET synchronous_commit = off")
            await plan_by_keys(self._connection)
            # A process that hangs in a transaction would keep its row locks, and the process that takes its
            # partitions over would wait for them. PostgreSQL ends such a session between two statements; we
            # end it in the middle of one, such as a COPY.
            for setting in ("idle_in_transaction_session_timeout", "lock_timeout"):
                await self._connection.execute(
                    "SELECT set_config(%s, %s, false)", (setting, str(HANGS_MS_MAX))
                )
            self._cursors.clear()
        if not self._cursors:
            await self._use(self._connection)
            async with self._connection.transaction():
                await cursors.retry_newer(self._connection, self.name)
            self._cursors = await self._open(self._connection)
            self.measures.seqs = {shard: cursor.seq for shard, cursor in self._cursors.items()}
            self._stopped = await cursors.stopped(self._connection, self.name)
        return self._connection

    async def _end_hanging(self) -> int:
        """Ends other sessions that write this read model and hang in a statement or a transaction; returns
        their number.
        """
        async with await connect(self._postgres, self._schema) as connection:
            ended = await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s AND "
                "datname = current_database() "
                "AND state <> 'idle' AND wait_event_type = 'Client' AND clock_timestamp() - state_change > "
                "%s * interval '1 ms'",
                (session_name(self._schema, self.name), HANGS_MS_MAX // 2),
            )
            return ended.rowcount

    async def _use(self, connection: AsyncConnection[Any]) -> None:
        """Makes unqualified names mean the tables to write; raises NoReadModel."""
        self._version_schema = await use_read_model(connection, self._schema, self.name)

    async def _version_dropped(self) -> bool:
        """Whether the schema of the version that this writes was dropped."""
        if self._connection is None or not self._version_schema:
            return False
        dropped = await self._connection.execute(
            "SELECT to_regnamespace(quote_ident(%s)) IS NULL", (self._version_schema,)
        )
        return bool((await dropped.fetchone() or [False])[0])

    async def _resumed(self) -> list[CatchUp]:
        """The shards that an operator has resumed, to be caught up. Their cursors may have been moved past
        the record that stopped them.
        """
        if not self._stopped or time.monotonic() < self._poll_stopped_at:
            return []
        self._poll_stopped_at = time.monotonic() + POLL_STOPPED_SECONDS
        resumed = self._stopped - await cursors.stopped(await self._connected(), self.name)
        if resumed:
            log.info("projection %s: resuming at shards %s", self.name, sorted(resumed))
            self._cursors.clear()
            await self._connected()
        return [CatchUp(shard) for shard in sorted(resumed)]

    async def _open(self, connection: AsyncConnection[Any]) -> dict[int, Cursor]:
        return await cursors.load(connection, self.name)

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._cursors.clear()
        if connection is not None:
            await connection.close()

    # -- records ---------------------------------------------------------------------------------------------

    async def _group_records(self, items: Sequence[JournalRecord | CatchUp], reader: JournalReader) -> None:
        follower = Follower(self._write_group, self.group_events_max)
        waits: NoReadModel | None = None
        placed: set[int] = set()
        for item in items:
            if self._is_paused(item.shard):
                continue
            to_offset = item.offset if isinstance(item, JournalRecord) else await reader.end(item.shard)
            try:
                cursor = follower.cursor(item.shard) or self._position(item.shard)
            except NoReadModel as reason:
                waits = reason  # the other shards do not
                continue
            if not 0 <= cursor.next_offset <= to_offset and item.shard not in placed:
                if misplaced := await self._misplaced(cursor, item.shard, reader):
                    await follower.flush()
                    await self._stop(item.shard, cursor, misplaced)
                    continue
                placed.add(item.shard)
            await self._read_journal(follower, item.shard, to_offset, reader)
            if isinstance(item, JournalRecord):
                await self._add_record(follower, item)
        await follower.flush()
        if waits is not None:
            raise waits

    async def _misplaced(self, cursor: Cursor, shard: int, reader: JournalReader) -> str:
        """Why a cursor belongs to no place of the journal, in words; '' if it does. It would not move, and
        nothing else would show that.
        """
        if cursor.next_offset < 0:
            return f"its cursor is at journal offset {cursor.next_offset}"
        if (end := await reader.end(shard)) < cursor.next_offset:
            return f"its cursor is at journal offset {cursor.next_offset}, but the journal ends at {end}"
        return ""

    async def _read_journal(
        self, follower: Follower, shard: int, to_offset: int, reader: JournalReader
    ) -> None:
        """Reads the records between the cursor and an offset from the journal."""
        cursor = follower.cursor(shard) or self._position(shard)
        async for records in reader.read(shard, cursor.next_offset, to_offset):
            for record in records:
                await self._add_record(follower, record)

    async def _add_record(self, follower: Follower, record: JournalRecord) -> None:
        """Takes the events of a record; stops its shard if the record contradicts the cursor."""
        if self._is_paused(record.shard):
            return
        cursor = follower.cursor(record.shard) or self._position(record.shard)
        if record.offset < cursor.next_offset:
            return
        try:
            chunk = next_chunk(cursor, record, self._decoder.decode(self._journal, record))
        except (Corrupt, Gap) as error:
            await follower.flush()
            await self._stop(record.shard, cursor, str(error))
        else:
            await follower.take(chunk)

    def _is_paused(self, shard: int) -> bool:
        """Whether records of a shard are passed over now: it catches up later."""
        return shard in self._stopped

    def _position(self, shard: int) -> Cursor:
        if shard not in self._cursors:
            raise NoReadModel(
                f"{self._version_schema or self._schema} has no cursor of shard {shard}: run "
                f"`grabstream init`, or rebuild {self.name}"
            )
        return self._cursors[shard]

    # -- transactions ----------------------------------------------------------------------------------------

    async def _write_group(self, group: Group) -> None:
        try:
            await self._commit_group(group)
        except self.record_errors:
            await self._write_record_by_record(group)

    async def _write_record_by_record(self, group: Group) -> None:
        """Finds the record that cannot be written. Only its shard stops, before that record."""
        for shard, chunks in group.chunks.items():
            for chunk in chunks:
                if self._is_paused(shard):
                    break
                try:
                    await self._commit_group(Group([chunk]))
                except psycopg.Error as error:
                    if not isinstance(error, self.record_errors):
                        raise
                    await self._stop(shard, chunk.before, f"PostgreSQL refuses its events: {error}")
                    break
                except self.record_errors as error:
                    log.critical("projection %s: shard %d", self.name, shard, exc_info=True)
                    await self._stop(
                        shard,
                        chunk.before,
                        f"its events cannot be turned into rows: {type(error).__name__}: {error}",
                    )
                    break

    async def _commit_group(self, group: Group) -> None:
        began = time.perf_counter()
        group = await self._in_transaction(group)
        seconds = time.perf_counter() - began
        self.measures.transaction_seconds.observe(seconds)
        if (traced := traces()) is not None:
            for shard, (before, after) in group.moves.items():
                seqs = traced.range_of(before.seq + 1, after.seq)
                traced.add("project", shard, seqs, seconds, projection=self.name)
        self._step(f"{self.name}.committed")
        for shard, (before, after) in group.moves.items():
            self.measures.ignored += sum(bool(chunk.fault) for chunk in group.chunks[shard])
            self._moved(shard, before, after)

    def _moved(self, shard: int, before: Cursor, after: Cursor) -> None:
        self._cursors[shard] = after
        self.measures.events += after.seq - before.seq
        self.measures.seqs[shard] = after.seq

    async def _in_transaction(self, group: Group) -> Group:
        """Writes the group; returns what of it is written."""
        connection = await self._connected()
        async with connection.transaction():
            await cursors.write(connection, self.name, group.moves, group.facts, self._apply)
            if self.name == REPORTS_IGNORED:
                await self._report_ignored(connection, group)
        return group

    async def _report_ignored(self, connection: AsyncConnection[Any], group: Group) -> None:
        """Records a finding for each shard: the last record that no known relay signed."""
        last = {shard: chunk for shard, chunks in group.chunks.items() for chunk in chunks if chunk.fault}
        for shard, chunk in last.items():
            offset = chunk.after.next_offset - 1
            what = f"the record at journal offset {offset} does not count: {chunk.fault}"
            log.warning("shard %d: %s", shard, what)
            await verified.record_finding(
                connection, "journal", shard, RecordedProblem(NOT_SIGNED_SUBJECT, what, chunk.before.seq)
            )

    async def _stop(self, shard: int, cursor: Cursor, reason: str) -> None:
        log.critical("projection %s stops at shard %d, seq %d: %s", self.name, shard, cursor.seq, reason)
        connection = await self._connected()
        async with connection.transaction():
            await cursors.stop(connection, self.name, shard, cursor, reason)
        self._stopped.add(shard)


def _catch_up(items: Sequence[JournalRecord | CatchUp]) -> list[JournalRecord | CatchUp]:
    """The shards of the items, to be read from the journal instead."""
    return [CatchUp(shard) for shard in sorted({item.shard for item in items})]
