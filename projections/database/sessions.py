"""Sessions of PostgreSQL: the only place that opens them, and that says how they are named.

`application_name` is `grabstream <schema>: <work>`. Every role is shown it, so other systems of the database
know that a session is not theirs (`streams/rebuilding/switching.py`), and who meets a lock is told who has it
(`locks.py`). The schema is the system's; in a projection of one's own it is the projection's, since nobody
knows what its code reads.
"""

from hashlib import sha256
from typing import Any, Final

from psycopg import AsyncConnection

#: PostgreSQL cuts longer names off.
_NAME_BYTES_MAX: Final = 63
#: So much of it says which system it is; the rest is left for the work.
_SYSTEM_BYTES_MAX: Final = 40
_DIGEST_DIGITS: Final = 8
CONNECT_SECONDS: Final = 5


async def connect(postgres: str, schema: str, work: str = "", **options: Any) -> AsyncConnection[Any]:
    """A session of the system in `schema`, whatever name the DSN gives; it commits by itself. `options` are
    psycopg's.
    """
    chosen: dict[str, Any] = {"autocommit": True, "connect_timeout": CONNECT_SECONDS, **options}
    name = session_name(schema, work)
    connect: Any = AsyncConnection.connect  # noqa: TID251 - here only
    connection: AsyncConnection[Any] = await connect(postgres, **chosen, application_name=name)
    return connection


def session_name(schema: str, work: str = "") -> str:
    """The name of a session: what two systems, or two works of one, are called differs."""
    name = system_name(schema)
    return f"{name}: {_fitting(work, _NAME_BYTES_MAX - len(name) - 2)}" if work else name


def system_name(schema: str) -> str:
    """What the names of all sessions of a system begin with, up to a colon or the end."""
    return f"grabstream {_fitting(schema, _SYSTEM_BYTES_MAX - len('grabstream '))}"


async def rename(connection: AsyncConnection[Any], work: str) -> None:
    """Says in a session's name what it does from here on, as far as there is room; which system it is
    stays.
    """
    system = (connection.info.parameter_status("application_name") or "").partition(":")[0]
    name = f"{system}: {work}" if system else work
    await connection.execute("SELECT set_config('application_name', %s, false)", (name[:_NAME_BYTES_MAX],))


def _fitting(text: str, bytes_max: int) -> str:
    """The text, or its beginning and a digest when it is too long, or has what PostgreSQL replaces in such
    names.
    """
    if len(text) <= bytes_max and text.isascii() and text.isprintable():
        return text
    start = "".join(
        letter if letter.isascii() and letter.isprintable() else "?"
        for letter in text[: bytes_max - _DIGEST_DIGITS - 1]
    )
    return f"{start}~{sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]}"
