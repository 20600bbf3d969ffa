"""PostgreSQL in the simulation: a private real server, called statement by statement in virtual time.

`Session` replaces psycopg's connection: each statement is a request that takes virtual time, and is executed
at once when it arrives. A statement that waits for a lock waits in virtual time, until the session that has
it continues; lock timeouts and the timeout of idle transactions are virtual too. What the clocks of
PostgreSQL say is in no trace, and nothing in a run depends on it.
"""

import asyncio
import contextlib
import os
import random
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, waiting
from psycopg.errors import LockNotAvailable, QueryCanceled
from psycopg.pq import ConnStatus, Escaping, PGconn, TransactionStatus

from grabstream.workshop.services.servers import Postgres
from tests.simulation.loop import PROCESS, Process, SimulatedLoop
from tests.simulation.machine import Trace
from tests.simulation.redis_server import Weather, end_with_parent

SERVER_OPTIONS: Final = {
    "listen_addresses": "",
    # What a crash loses is for the simulator to say, and a trace must not depend on when VACUUM comes.
    "fsync": "off",
    "full_page_writes": "off",
    "wal_level": "minimal",
    "max_wal_senders": 0,
    "autovacuum": "off",
    "jit": "off",
    "max_parallel_workers_per_gather": 0,
    "max_connections": 200,
}
MEMORY: Final = "/dev/shm"
MEMORY_BYTES_MIN: Final = 2 * 1024**3
#: How long to wait for a statement before checking whether it waits for a lock.
POLL_MS: Final = 2
#: Why PostgreSQL gives a transaction up: it is to be tried again.
GIVEN_UP: Final = (
    psycopg.errors.DeadlockDetected("deadlock detected"),
    psycopg.errors.SerializationFailure("could not serialize access due to concurrent update"),
)
_WAITS: Final = "SELECT count(*) > 0 FROM pg_locks WHERE pid = %s AND NOT granted"
_IS_THERE: Final = "SELECT count(*) > 0 FROM pg_stat_activity WHERE pid = %s"
_SETTING: Final = b"SELECT setting FROM pg_settings WHERE name = "
#: Each table, and whether it has rows; each view, with a digest of its text, has none.
_TABLES: Final = (
    "SELECT quote_ident(nspname) || '.' || quote_ident(relname), pg_relation_size(c.oid) > 0 "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
    "WHERE relkind = 'r' AND nspname !~ '^(pg_|information_schema)' "
    "UNION ALL SELECT 'view ' || schemaname || '.' || viewname || ' ' || md5(definition), false "
    "FROM pg_views WHERE schemaname !~ '^(pg_|information_schema)' ORDER BY 1"
)


class _Files(Postgres):
    """The files of the private server, all in its folder."""

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.directory / "postgres"


def _in_memory() -> str | None:
    """A folder whose files are in memory, if it has room: each run replaces some hundred files."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(MEMORY).free > MEMORY_BYTES_MIN:
            return MEMORY
    return None


class PrivatePostgres:
    """The private server: started once, for many runs. It ends with us, however we end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="grabstream-simulation-", dir=_in_memory())
        # The server does not run as root, and has its files in it.
        os.chmod(self._folder.name, 0o711)
        self._files = _Files(Path(self._folder.name), 0)
        try:
            self._files.prepare(lambda line: None)
        except BaseException:
            # A signal to the whole group has ended initdb.
            self._files.remove()
            raise
        options = {**SERVER_OPTIONS, "unix_socket_directories": self._files.data}
        self._process = subprocess.Popen(
            [
                *self._files.command()[:3],
                *(word for name, value in options.items() for word in ("-c", f"{name}={value}")),
            ],
            user=self._files.user(),
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=partial(end_with_parent, signal.SIGQUIT),
        )
        self._admin = self._connected("postgres")
        self._admin.execute("CREATE DATABASE pristine")
        self._monitor: psycopg.Connection[Any] | None = None
        self._idle: list[PGconn] = []
        #: What a session has instead when its connection has ended.
        self.ended = PGconn.connect(self.dsn("postgres").encode())
        self.ended.finish()
        self._pristine: Mapping[str, bytes] = {}
        #: The schemas of the read models in it, by projection.
        self.names: Mapping[str, str] = {}

    def _connected(self, database: str) -> "psycopg.Connection[Any]":
        deadline = time.monotonic() + 20
        while True:
            try:
                return psycopg.connect(self.dsn(database), autocommit=True)
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def dsn(self, database: str) -> str:
        """Where a database is."""
        return f"host={self._files.data} user=grabstream dbname={database}"

    def prepare(self, make_schema: Callable[[str], object]) -> None:
        """Lets `make_schema`, called with a DSN, make what each run begins with."""
        make_schema(self.dsn("pristine"))
        self._renew()
        self._pristine = self.contents()

    @property
    def monitor(self) -> "psycopg.Connection[Any]":
        """A session of the simulator itself."""
        assert self._monitor is not None
        return self._monitor

    def _renew(self) -> None:
        if self._monitor is not None:
            self._monitor.close()
        while self._idle:
            self._idle.pop().finish()
        self._admin.execute("DROP DATABASE IF EXISTS simulation WITH (FORCE)")
        self._admin.execute("CREATE DATABASE simulation TEMPLATE pristine STRATEGY FILE_COPY")
        self._monitor = self._connected("simulation")
        # The holder of a lock releases it in virtual time: the simulator must not wait for that.
        self._monitor.execute("SET lock_timeout = '20ms'")

    def reset(self) -> None:
        """Makes the database what it is at the beginning of each run."""
        if {name for name, _ in self.monitor.execute(_TABLES)} != self._pristine.keys():
            self._renew()
        else:
            self.restore(self._pristine)

    def contents(self) -> dict[str, bytes]:
        """The rows of all tables, at one moment."""
        found: dict[str, bytes] = {}
        with self.monitor.transaction():
            self.monitor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            for name, has_rows in self.monitor.execute(_TABLES).fetchall():
                found[name] = b""
                if has_rows:
                    with self.monitor.cursor().copy(f"COPY {name} TO STDOUT".encode()) as copy:
                        found[name] = b"".join(map(bytes, copy))
        return found

    def restore(self, contents: Mapping[str, bytes]) -> bool:
        """Puts rows back; returns False where they belong to other tables. No session may be connected."""
        tables = dict(self.monitor.execute(_TABLES).fetchall())
        if tables.keys() != contents.keys():
            return False
        filled = [name for name, has_rows in tables.items() if has_rows]
        with self.monitor.transaction():
            self.monitor.execute("SET LOCAL session_replication_role = replica")
            if filled:
                self.monitor.execute(f"TRUNCATE {', '.join(filled)} RESTART IDENTITY".encode())
            for name, rows in contents.items():
                if rows:
                    with self.monitor.cursor().copy(f"COPY {name} FROM STDIN".encode()) as copy:
                        copy.write(rows)
        return True

    def backend(self) -> PGconn:
        """A connection to a backend, which may have served another session before."""
        if self._idle:
            return self._idle.pop()
        connection = PGconn.connect(self.dsn("simulation").encode())
        if connection.status != ConnStatus.OK:
            raise psycopg.OperationalError(connection.get_error_message())
        connection.nonblocking = 1
        return connection

    def give_back(self, connection: PGconn, is_used_no_more: bool) -> None:
        """A session has ended. If no code will use it, its backend serves another one, which costs less than
        a new one.
        """
        if is_used_no_more and connection.transaction_status == TransactionStatus.IDLE:
            connection.exec_(b"DISCARD ALL")
            self._idle.append(connection)
        else:
            pid = connection.backend_pid
            connection.finish()
            self.wait_until_gone(pid)

    def asks(self, question: str, pid: int) -> bool:
        """The answer about a backend."""
        row = self.monitor.execute(question, (pid,)).fetchone()
        return bool(row and row[0])

    def wait_until_gone(self, pid: int) -> None:
        """A closed session has let go of its locks when its backend has ended."""
        while self.asks(_IS_THERE, pid):
            pass

    def close(self) -> None:
        """Ends the server, and removes its files."""
        for connection in (self._monitor, self._admin):
            if connection is not None:
                connection.close()
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()
        self._files.remove()
        self._folder.cleanup()


class Conditions(Weather):
    """How the server, and the way to it, are at the moment."""

    def __init__(self) -> None:
        super().__init__()
        self.available = True
        #: The share of statements at which PostgreSQL gives a transaction up.
        self.given_up = 0.0


class Server:
    """The server of one run: its sessions, and what is wrong with it."""

    def __init__(
        self, database: PrivatePostgres, loop: SimulatedLoop, draw: random.Random, trace: Trace
    ) -> None:
        self.database = database
        self.loop = loop
        self.draw = draw
        self.trace = trace
        self.conditions = Conditions()
        self.sessions: list[Session] = []
        self._foreign: list[psycopg.Connection[Any]] = []
        self._disk: Mapping[str, bytes] | None = None
        self.dsn = database.dsn("simulation")

    def delay(self) -> float:
        """Seconds that a message is on its way."""
        return self.conditions.delay(self.draw)

    # -- what happens to it ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """It ends, or cannot be reached: all sessions break."""
        self.conditions.available = False
        self.close(is_used_no_more=False)

    def start(self, from_disk: bool = False) -> None:
        """It is there again, with all that was committed, or with what was on disk."""
        if from_disk and self._disk is not None and not self.database.restore(self._disk):
            self.trace.add("world", "postgresql has other tables than its disk: nothing is lost")
        self.conditions.available = True

    def backup(self) -> None:
        """What is committed now survives a restart that loses something; not while tables are locked."""
        with contextlib.suppress(LockNotAvailable):
            self._disk = self.database.contents()

    def lock_cursors(self) -> None:
        """Another program locks the cursors of all read models."""
        foreign = psycopg.connect(self.dsn)
        self._foreign.append(foreign)
        foreign.execute("SET lock_timeout = '20ms'")
        with contextlib.suppress(LockNotAvailable):
            for name, _ in self.database.monitor.execute(_TABLES).fetchall():
                if name.endswith(".projection_cursors"):
                    foreign.execute(f"LOCK TABLE {name} IN SHARE MODE".encode())

    def end_locks(self) -> None:
        """The other program lets go."""
        for foreign in self._foreign:
            pid = foreign.info.backend_pid
            foreign.close()
            self.database.wait_until_gone(pid)
        self._foreign.clear()
        self.settle()

    def close(self, is_used_no_more: bool = True) -> None:
        """Ends all sessions."""
        self.end_locks()
        for session in list(self.sessions):
            session.break_off(is_used_no_more)

    def end_sessions(self, process: Process) -> None:
        """The process has died: its machine closes its connections."""
        for session in [session for session in self.sessions if session.process is process]:
            session.break_off(is_used_no_more=True)

    def settle(self) -> None:
        """After a statement that may have released locks: each waiting session either has its result now, or
        still waits.
        """
        for session in list(self.sessions):
            session.settle()


class Session(AsyncConnection[Any]):
    """A connection of the code under test."""

    server: Server
    process: Process | None = None
    _uses = 0
    _waiting: "asyncio.Future[None] | None" = None
    _lock_seconds = 0.0
    _idle_seconds = 0.0
    _pid = 0

    @classmethod
    async def connect(  # type: ignore[override]
        cls, conninfo: str, *, autocommit: bool, application_name: str, **parameters: int
    ) -> "Session":
        """Connects to the simulated server."""
        server = cls.server
        await asyncio.sleep(2 * server.delay())
        if not server.conditions.available:
            raise psycopg.OperationalError("connection refused")
        session = cls(server.database.backend())
        session._autocommit = autocommit
        name = Escaping(session.pgconn).escape_literal(application_name.encode())
        session.pgconn.exec_(b"SET application_name = " + name)
        session.process = PROCESS.get()
        session._pid = session.pgconn.backend_pid
        server.sessions.append(session)
        return session

    async def wait(self, gen: Any, interval: float = 0.0, timeout: float | None = None) -> Any:
        """Executes what the generator of a statement does, when its request has arrived."""
        server = self.server
        self._uses += 1
        await asyncio.sleep(server.delay())
        conditions, draw = server.conditions, server.draw
        if conditions.request_lost and draw.random() < conditions.request_lost:
            # The statement is executed on a broken connection: psycopg raises what it would raise.
            self._lose("a request")
        try:
            result, error = await self._served(gen), None
            if conditions.given_up and draw.random() < conditions.given_up:
                self._give_up()
        except psycopg.Error as raised:
            result, error = None, raised
        server.settle()
        self._watch_idle()
        if conditions.reply_lost and draw.random() < conditions.reply_lost:
            self._lose("a reply")
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        await asyncio.sleep(server.delay())
        if self.pgconn is server.database.ended:
            # Otherwise psycopg would leave a transaction without a COMMIT and without an error: on a
            # connection that it knows to be broken, it sends none. With a real one, it only learns that by an
            # error.
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        if error is not None:
            raise error
        return result

    async def execute(self, query: Any, params: Any = None, **options: Any) -> Any:  # type: ignore[override]
        """Executes a statement; timeouts that it sets are those of the simulation."""
        cursor = await super().execute(query, params, **options)
        if _sets_timeout(f"{query!r} {params!r}"):
            self._lock_seconds = self._setting("lock_timeout")
            self._idle_seconds = self._setting("idle_in_transaction_session_timeout")
        return cursor

    def _setting(self, name: str) -> float:
        value = self.pgconn.exec_(_SETTING + f"'{name}'".encode()).get_value(0, 0)
        return int(value or b"0") / 1_000

    async def close(self) -> None:
        """Closes the connection; its locks are released when this returns."""
        if not self.closed:
            self._end(True)
        await super().close()

    # -- what happens to it ----------------------------------------------------------------------------------

    def break_off(self, is_used_no_more: bool = False) -> None:
        """The connection breaks; what was not committed is rolled back."""
        self._end(is_used_no_more)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _end(self, is_used_no_more: bool) -> None:
        if self in self.server.sessions:
            self.server.sessions.remove(self)
            if self._waiting is not None:
                self.pgconn.get_cancel().cancel()
            connection, self.pgconn = self.pgconn, self.server.database.ended
            self.server.database.give_back(connection, is_used_no_more)
            self.server.settle()

    def _lose(self, what: str) -> None:
        owner = self.process.name if self.process else "-"
        self.server.trace.add("postgresql", f"{what} of {owner} is lost")
        self.break_off()

    def _give_up(self) -> None:
        """PostgreSQL gives up the transaction that is open; raises what the last statement of it gets."""
        if self.pgconn.transaction_status != TransactionStatus.INTRANS:
            return
        raised = self.server.draw.choice(GIVEN_UP)
        self.server.trace.add("postgresql", f"a transaction is given up: {raised}")
        self.pgconn.exec_(
            f"DO $$ BEGIN RAISE EXCEPTION '{raised}' USING ERRCODE = '{raised.sqlstate}'; END $$".encode()
        )
        raise raised

    def _watch_idle(self) -> None:
        open_ = (TransactionStatus.INTRANS, TransactionStatus.INERROR)
        if self._idle_seconds and self.pgconn.transaction_status in open_:
            self.server.loop.call_at_world(self._idle_seconds, self._end_if_idle, self._uses)

    def _end_if_idle(self, uses: int) -> None:
        if self._uses == uses and self.pgconn.status == ConnStatus.OK:
            self.server.trace.add("postgresql", "a session is ended: its transaction was idle for too long")
            self.break_off()

    # -- statements ------------------------------------------------------------------------------------------

    async def _served(self, gen: Any) -> Any:
        try:
            state = next(gen)
            poll, socket = select.poll(), self.pgconn.socket
            poll.register(socket, 0)
            while True:
                if self.pgconn.status != ConnStatus.OK:
                    raise psycopg.OperationalError("server closed the connection unexpectedly")
                poll.modify(socket, _EVENTS[state])
                if events := poll.poll(POLL_MS):
                    state = gen.send(_ready(events[0][1]))
                elif self.server.database.asks(_WAITS, self._pid):
                    await self._wait_for_lock(gen)
        except StopIteration as stop:
            return stop.value

    async def _wait_for_lock(self, gen: Any) -> None:
        self._waiting = self.server.loop.create_future()
        try:
            async with asyncio.timeout(self._lock_seconds or None):
                await self._waiting
        except TimeoutError:
            self._cancel(gen)
            raise LockNotAvailable("canceling statement due to lock timeout") from None
        except asyncio.CancelledError:
            self._cancel(gen)
            raise
        finally:
            self._waiting = None

    def _cancel(self, gen: Any) -> None:
        if self.pgconn.status == ConnStatus.OK:
            self.pgconn.get_cancel().cancel()
            with contextlib.suppress(QueryCanceled):
                waiting.wait(gen, self.pgconn.socket, 0.1)

    def settle(self) -> None:
        """Waits until the statement has its locks and its result, or is known to wait for another lock."""
        if self._waiting is None or self._waiting.done():
            return
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN)
        while not self.server.database.asks(_WAITS, self._pid):
            if poll.poll(POLL_MS):
                self._waiting.set_result(None)
                return


_EVENTS: Final = {
    waiting.Wait.R: select.POLLIN,
    waiting.Wait.W: select.POLLOUT,
    waiting.Wait.RW: select.POLLIN | select.POLLOUT,
}


_sets_timeout: Final = re.compile("lock_timeout|idle_in_transaction").search


def _ready(events: int) -> Any:
    readable, writable = events & ~select.POLLOUT, events & select.POLLOUT
    if readable and writable:
        return waiting.Ready.RW
    return waiting.Ready.W if writable else waiting.Ready.R
