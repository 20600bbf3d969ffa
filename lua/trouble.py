"""Trouble: what the loss of a server can raise, in the words of whatever library meets it first. It is tried
again; everything else is an error of our own, and ends the process.

The only place that says so. A library says most of it by its own exceptions; some comes as what Python itself
raises, because a client uses a connection that is gone: uvloop's RuntimeError about a closed handler, an
AttributeError of a stream that is None, a cancellation that nobody asked for.
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
#: Where such a library stands when a transport fails under it.
_BELOW: Final = frozenset({"asyncio", "uvloop", "ssl", "selectors", "socket", "async_timeout"})
#: What a client raises by itself when a connection vanishes while it is used; from our own code it would be a
#: mistake of ours.
_BY_ACCIDENT: Final = (RuntimeError, AttributeError, AssertionError, LookupError, asyncio.InvalidStateError)
#: uvloop's and asyncio's words for a connection that is gone; their errors come out of C code, so no
#: traceback tells where from.
_GONE: Final = (
    "handler is closed",
    "the transport is closed",
    "transport is closing",
    "unable to perform operation on",
    "socket is closed",
)
#: Exceptions of PostgreSQL's client that a server's loss never raises: what was asked for is wrong, or the
#: database refuses it.
_REFUSED_BY_SQL: Final = frozenset({"ProgrammingError", "IntegrityError", "DataError", "NotSupportedError"})


def is_trouble(error: BaseException) -> bool:
    """Whether a server, or the way to it, is at fault, so that it is right to try again. To be asked where
    the error was caught.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_trouble, error.exceptions))
    if isinstance(error, asyncio.CancelledError):
        return not _are_we_cancelled()
    if isinstance(error, OSError | EOFError):  # a TimeoutError and every error of ssl are an OSError
        return True
    if isinstance(error, Exception) and _is_of_library(error):
        return not any(kind.__name__ in _REFUSED_BY_SQL for kind in type(error).__mro__)
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE):
        return True
    return isinstance(error, _BY_ACCIDENT) and _came_from_library(error.__traceback__)


@contextmanager
def suppressed_trouble() -> Iterator[None]:
    """What is done inside is left undone where a server is away: whoever does it comes by again."""
    try:
        yield
    except BaseException as error:
        if not is_trouble(error):
            raise


def _is_of_library(error: BaseException) -> bool:
    return any(_root(kind.__module__) in _LIBRARIES for kind in type(error).__mro__)


def _came_from_library(traceback: TracebackType | None) -> bool:
    """Whether it was raised in a library that talks to servers, or in what stands below one."""
    inside = False
    while traceback is not None:
        root = _root(traceback.tb_frame.f_globals.get("__name__", ""))
        inside = root in _LIBRARIES or (inside and root in _BELOW)
        traceback = traceback.tb_next
    return inside


def _root(module: str) -> str:
    return module.partition(".")[0]


def _are_we_cancelled() -> bool:
    """Whether somebody wants the running task to end; a client may raise the cancellation of a task of its
    own as if it were that.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
