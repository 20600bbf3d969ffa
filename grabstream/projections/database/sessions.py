"""Sessions of PostgreSQL. Only this module opens and names them.

`application_name` is `grabstream <schema>: <work>`. Every role may read it, so other systems of the database
can see that a session is not theirs (`streams/rebuilding/switching.py`), and a process that waits for a lock
can name its holder (`locks.py`). The schema is that of the system. For a user projection it is the schema of
the projection, because its code may read anything.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

from psycopg import AsyncConnection, DataError, ProgrammingError, adapters
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format
from psycopg_pool import AsyncConnectionPool

#: PostgreSQL cuts longer names.
_NAME_BYTES_MAX: Final = 63
#: The bytes of a name that identify the system; the rest is for the work.
_SYSTEM_BYTES_MAX: Final = 40
_DIGEST_DIGITS: Final = 8
#: libpq's parameters of a session, where the DSN does not have them. A server that vanishes silently is
#: noticed within a minute: the operating system would wait a quarter of an hour for a reply, and two hours on
#: a connection that waits for one.
DEFAULTS: Final = {
    "connect_timeout": 5,  # s
    "keepalives_idle": 30,  # s
    "keepalives_interval": 10,  # s
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # ms
}
RECONNECT_SECONDS_MAX: Final = 2.0
#: How long the work of a worker waits for a lock. A session of an operator may hold one for hours, as
#: `VACUUM FULL` does.
LOCK_SECONDS: Final = 5
#: Time limits that a role or a database may have for people: they would end a rebuild, a snapshot that is
#: read for hours, and idle sessions. Our sessions have only those of the DSN's `options`, and those that they
#: set themselves. The value is the first version of PostgreSQL that knows the limit.
_LIMITS: Final = {
    "statement_timeout": 0,
    "idle_session_timeout": 0,
    "idle_in_transaction_session_timeout": 0,
    "transaction_timeout": 170_000,
}
#: What stands for times that Python does not have: 'infinity', and years after 9999 or before 1. Both can be
#: shown in every time zone.
TIME_MIN: Final = datetime(1, 1, 2, tzinfo=UTC)
TIME_MAX: Final = datetime(9999, 12, 30, tzinfo=UTC)


class _AnyTime(Loader):
    """Loads every `timestamptz`. An operator may write 'infinity' for *never*; the loader of psycopg raises
    at it, and one such row would end each process that reads it.
    """

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._inner = _TIME_LOADER(oid, context)

    def load(self, data: Buffer) -> datetime:
        """The time, or TIME_MIN or TIME_MAX instead of one before or after it."""
        try:
            time: datetime = self._inner.load(data)
        except DataError:
            text = bytes(data)
            return TIME_MIN if text.startswith(b"-") or text.endswith(b"BC") else TIME_MAX
        return time


_TIME_OID: Final = adapters.types["timestamptz"].oid
_TIME_LOADER: Final[Any] = adapters.get_loader(_TIME_OID, Format.TEXT)


async def connect(postgres: str, schema: str, work: str = "", **options: Any) -> AsyncConnection[Any]:
    """Opens a session of the system in `schema`, in autocommit mode. Its name replaces a name in the DSN.
    `options` are those of psycopg.
    """
    autocommit = options.pop("autocommit", True)
    # Rows are copied as UTF-8, whatever PGCLIENTENCODING says.
    chosen: dict[str, Any] = {
        **_defaults(postgres), "client_encoding": "UTF8", **options, "autocommit": True
    }  # fmt: skip
    name = session_name(schema, work)
    connect: Any = AsyncConnection.connect  # noqa: TID251 - here only
    connection: AsyncConnection[Any] = await connect(postgres, **chosen, application_name=name)
    try:
        connection.adapters.register_loader(_TIME_OID, _AnyTime)
        await _lift_limits(connection)
        if not autocommit:
            await connection.set_autocommit(False)
    except BaseException:
        await connection.close()
        raise
    return connection


async def bound_locks(connection: AsyncConnection[Any]) -> None:
    """Lets statements of a session wait LOCK_SECONDS for a lock at most; then they raise LockNotAvailable, so
    that the wait is reported.
    """
    await connection.execute(f"SET lock_timeout = '{LOCK_SECONDS}s'".encode(), prepare=False)


async def _lift_limits(connection: AsyncConnection[Any]) -> None:
    """Ends the time limits that the session has got from its role or database. A statement and not a
    parameter of the start: poolers refuse `options`.
    """
    said, version = connection.info.options, connection.info.server_version
    lifted = [
        f"set_config('{name}', '0', false)"
        for name, since in _LIMITS.items()
        if name not in said and version >= since
    ]
    if lifted:
        await connection.execute(f"SELECT {', '.join(lifted)}".encode(), prepare=False)


def open_pool(
    postgres: str,
    schema: str,
    work: str,
    sessions_max: int,
    waiting_max: int,
    wait_seconds: float,
    prepare: Callable[[AsyncConnection[Any]], Awaitable[None]],
) -> AsyncConnectionPool[AsyncConnection[Any]]:
    """A pool of at most `sessions_max` sessions in autocommit mode, which is not open yet. At most
    `waiting_max` callers wait for a session, each at most `wait_seconds`. `prepare` prepares a new session.
    """
    # Statements are not prepared on the server: a switch to a rebuilt read model would make them fail.
    options = {
        "autocommit": True,
        **_defaults(postgres),
        "prepare_threshold": None,
        "application_name": session_name(schema, work),
    }

    async def configure(connection: AsyncConnection[Any]) -> None:
        connection.adapters.register_loader(_TIME_OID, _AnyTime)
        await _lift_limits(connection)
        await prepare(connection)

    return AsyncConnectionPool(
        postgres,
        kwargs=options,
        min_size=1,
        max_size=sessions_max,
        max_waiting=waiting_max,
        timeout=wait_seconds,
        # The pool pauses longer after each attempt that fails, and starts over after this time: so there is a
        # session soon after a long outage, too.
        reconnect_timeout=RECONNECT_SECONDS_MAX,
        configure=configure,
        name=work,
        open=False,
    )


def _defaults(postgres: str) -> dict[str, Any]:
    """DEFAULTS without what the DSN says."""
    said: dict[str, Any] = {}
    # A DSN that cannot be read is an error for the code that connects with it.
    with suppress(ProgrammingError):
        said = conninfo_to_dict(postgres)
    return {name: value for name, value in DEFAULTS.items() if name not in said}


def session_name(schema: str, work: str = "") -> str:
    """The name of a session. It differs between systems, and between the works of a system."""
    name = system_name(schema)
    return f"{name}: {_fitting(work, _NAME_BYTES_MAX - len(name) - 2)}" if work else name


def system_name(schema: str) -> str:
    """The start of the names of all sessions of a system, up to a colon or the end."""
    return f"grabstream {_fitting(schema, _SYSTEM_BYTES_MAX - len('grabstream '))}"


async def rename(connection: AsyncConnection[Any], work: str) -> None:
    """Replaces the work in the name of a session, cut to the room there is. The system in the name stays."""
    system = (connection.info.parameter_status("application_name") or "").partition(":")[0]
    name = f"{system}: {work}" if system else work
    await connection.execute("SELECT set_config('application_name', %s, false)", (name[:_NAME_BYTES_MAX],))


def _fitting(text: str, bytes_max: int) -> str:
    """The text, or its start and a digest if it is too long or has characters that PostgreSQL replaces in
    names.
    """
    if len(text) <= bytes_max and text.isascii() and text.isprintable():
        return text
    start = "".join(
        letter if letter.isascii() and letter.isprintable() else "?"
        for letter in text[: bytes_max - _DIGEST_DIGITS - 1]
    )
    return f"{start}~{sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]}"
