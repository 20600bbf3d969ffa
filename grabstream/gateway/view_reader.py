"""The views of the read models, asked through a pool of sessions with a time limit; changes of webhooks."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeVar

from psycopg import AsyncConnection, OperationalError, sql
from psycopg.errors import (
    InsufficientPrivilege,
    LockNotAvailable,
    QueryCanceled,
    UndefinedColumn,
    UndefinedFunction,
    UndefinedTable,
)
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool, PoolTimeout, TooManyRequests

from grabstream.gateway.bounds import (
    CACHE_SECONDS,
    CHANGE_MS_MAX,
    QUESTION_MS_MAX,
    SESSION_WAIT_SECONDS_MAX,
    SESSION_WAITERS_MAX,
)
from grabstream.gateway.problems import Problem, retry_soon
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import open_pool

log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.025
#: How many past positions of read models are kept. An earlier event counts as booked at the oldest, which
#: only has an answer read again.
SEEN_MAX: Final = 64
#: How long a question waits for a session and its rows. PostgreSQL itself ends a statement earlier, unless it
#: hangs.
ANSWER_SECONDS_MAX: Final = SESSION_WAIT_SECONDS_MAX + QUESTION_MS_MAX / 1000 + 1

#: How the sessions plan. Compiling a query that takes 1 ms took up to 2 s (`demand`), which is all the time
#: there is. A page is read from an index in its order, and ends early; where statistics are older than an
#: offer, the planner would rather read all of the offer by a bitmap, and sort it.
PLANNING: Final = "SET jit = off; SET enable_bitmapscan = off; SET enable_seqscan = off"

T = TypeVar("T")

Row = dict[str, Any]
#: The values of a query, in order or by name.
Parameters = Sequence[Any] | Mapping[str, Any]


#: The last event of each read model and shard.
Seqs = Mapping[tuple[str, int], int]


class _KnownSeqs(NamedTuple):
    """The position of read models at a time (monotonic, s), or earlier."""

    since: float
    seqs: Seqs

    @property
    def is_fresh(self) -> bool:
        """Whether it is young enough for an answer."""
        return time.monotonic() - self.since < CACHE_SECONDS


class ViewReader:
    """Asks the views of one system. Raises Problem when PostgreSQL cannot answer now."""

    def __init__(self, pool: AsyncConnectionPool[AsyncConnection[Any]]) -> None:
        self._pool = pool
        self._asking: asyncio.Task[Seqs] | None = None
        #: Positions of read models, from the oldest to the newest.
        self._seen = deque[_KnownSeqs](maxlen=SEEN_MAX)

    async def rows(self, query: str, parameters: Parameters = ()) -> list[Row]:
        """The rows of a query. Values that are absent are left out; sums are integers."""
        return await _answered(self._read(query, parameters), ANSWER_SECONDS_MAX, QUESTION_MS_MAX)

    async def change(self, make: Callable[[AsyncConnection[Any]], Awaitable[T]]) -> T:
        """Runs a change of tables in its own transaction; returns its result."""

        is_begun = False

        async def carry_out(connection: AsyncConnection[Any]) -> T:
            nonlocal is_begun
            async with connection.transaction():
                await connection.execute(
                    sql.SQL(
                        "SET TRANSACTION READ WRITE; SET LOCAL statement_timeout = {}; "
                        "SET LOCAL lock_timeout = {}"
                    ).format(CHANGE_MS_MAX, QUESTION_MS_MAX)
                )
                is_begun = True
                return await make(connection)

        return await _answered(
            self._with_session(carry_out, lambda: not is_begun),
            SESSION_WAIT_SECONDS_MAX + CHANGE_MS_MAX / 1000 + 1,
            CHANGE_MS_MAX,
        )

    async def _read(self, query: str, parameters: Parameters) -> list[Row]:
        async def read(connection: AsyncConnection[Any]) -> list[Row]:
            async with connection.cursor(row_factory=dict_row) as cursor:
                await cursor.execute(query.encode(), parameters)
                return [_plain(row) for row in await cursor.fetchall()]

        return await self._with_session(read, lambda: True)

    async def _with_session(
        self, work: Callable[[AsyncConnection[Any]], Awaitable[T]], may_repeat: Callable[[], bool]
    ) -> T:
        """What `work` returns with a session. If the session turns out to have ended, perhaps long ago while
        it rested, the work is repeated with the next one, as long as it may be.
        """
        # Every other session may have ended too. (The pool's own check waits seconds before it takes the next
        # one.)
        for _ in range(self._pool.max_size):
            session = None
            try:
                async with self._pool.connection() as session:
                    return await work(session)
            except OperationalError:
                if session is None or not session.closed or not may_repeat():
                    raise
        async with self._pool.connection() as session:
            return await work(session)

    async def booked_since(
        self, projections: Sequence[str], shard: int, seq: int, seconds: float
    ) -> float | None:
        """Waits until read models have an event; returns a time (monotonic, s) since which they have had it,
        so later reads include it. None when they do not have it in time. Raises KeyError for a shard that
        does not exist.
        """

        def has_it(seqs: Seqs) -> bool:
            return all(seqs[projection, shard] >= seq for projection in projections)

        until = time.monotonic() + seconds
        # While this waits, others may read what it waits for.
        while not (self._seen and self._seen[-1].is_fresh and has_it(self._seen[-1].seqs)):
            if has_it(await self._seqs()):
                break
            if time.monotonic() >= until:
                return None
            await asyncio.sleep(POLL_SECONDS)
        return next(seen.since for seen in self._seen if has_it(seen.seqs))

    async def last_seq(self, shard: int) -> int:
        """The last event of a shard that any read model has."""
        return max((seq for (_, of), seq in (await self._seqs()).items() if of == shard), default=0)

    async def _seqs(self) -> Seqs:
        """The last event of each read model and shard. All that wait share one query."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Seqs:
        rows = await self.rows("SELECT projection, shard, seq FROM cursors")
        seqs = {(row["projection"], row["shard"]): row["seq"] for row in rows}
        if self._seen and any(seqs.get(key, 0) < seq for key, seq in self._seen[-1].seqs.items()):
            # Another version of a read model is live now: what was seen before says nothing about it.
            self._seen.clear()
        self._seen.append(_KnownSeqs(time.monotonic(), seqs))
        return seqs


@asynccontextmanager
async def open_view_reader(
    postgres: str, schema: str, sessions_max: int, check: Callable[[AsyncConnection[Any]], Awaitable[Any]]
) -> AsyncIterator[ViewReader]:
    """The books of the system in a schema; `check` raises an error when the schema belongs to another system.
    Opens also while PostgreSQL is down.
    """

    async def prepare(connection: AsyncConnection[Any]) -> None:
        await check(connection)
        await use_schema(connection, schema)
        await connection.execute(
            sql.SQL("SET statement_timeout = {}; SET default_transaction_read_only = on").format(
                QUESTION_MS_MAX
            )
        )
        await connection.execute(PLANNING)

    pool = open_pool(
        postgres, schema, "gateway", sessions_max, SESSION_WAITERS_MAX, SESSION_WAIT_SECONDS_MAX, prepare
    )
    await pool.open(wait=False)
    try:
        yield ViewReader(pool)
    finally:
        await pool.close()


async def _answered(asking: Coroutine[Any, Any, T], seconds: float, ms_max: int) -> T:
    """What PostgreSQL answers; raises Problem when it cannot."""
    try:
        return await _within(seconds, asking)
    except TooManyRequests:
        raise retry_soon("busy", "Too many questions wait for PostgreSQL.") from None
    except QueryCanceled:
        raise _unavailable(f"PostgreSQL did not answer within {ms_max} ms; ask for less, or later.") from None
    except (UndefinedTable, UndefinedColumn, UndefinedFunction) as error:
        log.error("a view is missing, or one of another release: %s", str(error).strip())
        raise _unavailable(
            "A view is missing in PostgreSQL, or it is a view of another release: `grabstream init` and "
            "`grabstream rebuild` create them. Commands work without it."
        ) from None
    except InsufficientPrivilege as error:
        log.error("`grabstream grants` prints the rights of a gateway: %s", str(error).strip())
        raise _unavailable(
            "The gateway lacks a right in PostgreSQL; its log names it. Commands work without it."
        ) from None
    except (PoolTimeout, TimeoutError, OperationalError, LockNotAvailable) as error:
        log.info("PostgreSQL cannot answer: %s", str(error).strip())
        raise _unavailable("PostgreSQL cannot be reached now. Commands work without it.") from None


async def _within(seconds: float, reading: Coroutine[Any, Any, T]) -> T:
    """What a question reads; raises TimeoutError after a time, without the end of a statement that hangs."""
    task = asyncio.create_task(reading)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        raise TimeoutError("PostgreSQL hangs")
    return task.result()


def _unavailable(detail: str) -> Problem:
    return retry_soon("unavailable", detail)


def _plain(row: Row) -> Row:
    return {
        name: int(value) if isinstance(value, Decimal) else value
        for name, value in row.items()
        if value is not None
    }
