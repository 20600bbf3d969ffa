"""Trouble: the errors that the loss of a server can cause, from any library. The caller retries after
trouble; any other error is a bug of this program, and ends the process.

This is the only file that decides which errors are trouble. Libraries raise most of them as their own
exceptions. Others are exceptions of Python, because a client uses a closed connection: uvloop's RuntimeError
about a closed handler, an AttributeError of a stream that is None, a cancellation that no task requested.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

#: The libraries that talk to servers, by the first part of their modules' names.
_LIBRARIES: Final = frozenset(
    {"redis", "hiredis", "aiokafka", "kafka", "psycopg", "psycopg_pool", "mode", "faust"}
)
#: The modules below such a library, in which a transport fails.
_BELOW: Final = frozenset({"asyncio", "uvloop", "ssl", "selectors", "socket", "async_timeout"})
#: What a client raises when a connection is closed while the client uses it; from code of this program it
#: would be a bug.
_BY_ACCIDENT: Final = (RuntimeError, AttributeError, AssertionError, LookupError, asyncio.InvalidStateError)
#: Messages of uvloop and asyncio about a closed connection; their errors are raised in C code, so a traceback
#: does not show where.
_GONE: Final = (
    "handler is closed",
    "the transport is closed",
    "transport is closing",
    "unable to perform operation on",
    "socket is closed",
)
#: Exceptions of the PostgreSQL client that the loss of a server never raises: the statement is wrong, or the
#: database refuses it.
_REFUSED_BY_SQL: Final = frozenset({"ProgrammingError", "IntegrityError", "DataError", "NotSupportedError"})


def is_trouble(error: BaseException) -> bool:
    """Whether an error was caused by a server or the connection to it, so that a retry may succeed. Call it
    where the error was caught.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_trouble, error.exceptions))
    if isinstance(error, asyncio.CancelledError):
        return not _is_task_cancelled()
    if isinstance(error, OSError | EOFError):  # TimeoutError and all errors of ssl are subclasses of OSError
        return True
    if isinstance(error, Exception) and _is_of_library(error):
        return not any(kind.__name__ in _REFUSED_BY_SQL for kind in type(error).__mro__)
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE):
        return True
    return isinstance(error, _BY_ACCIDENT) and _came_from_library(error.__traceback__)


@contextmanager
def suppressed_trouble() -> Iterator[None]:
    """Ignores trouble inside the block: the caller retries the work later."""
    try:
        yield
    except BaseException as error:
        if not is_trouble(error):
            raise


def _is_of_library(error: BaseException) -> bool:
    return any(_root(kind.__module__) in _LIBRARIES for kind in type(error).__mro__)


def _came_from_library(traceback: TracebackType | None) -> bool:
    """Whether an error was raised in a library that talks to servers, or in a module below one."""
    inside = False
    while traceback is not None:
        root = _root(traceback.tb_frame.f_globals.get("__name__", ""))
        inside = root in _LIBRARIES or (inside and root in _BELOW)
        traceback = traceback.tb_next
    return inside


def _root(module: str) -> str:
    return module.partition(".")[0]


def _is_task_cancelled() -> bool:
    """Whether the running task was cancelled. A client may raise the cancellation of one of its own tasks,
    which looks the same.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
