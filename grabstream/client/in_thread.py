"""An async client for threads: it works in an event loop of its own."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

T = TypeVar("T")
#: How long calls may take to end with their client.
END_SECONDS_MAX: Final = 10.0
_clients: Final = weakref.WeakSet["InThread[Any]"]()


def _renew_locks() -> None:
    """In a forked process, a lock may be held by a thread of the parent, which is not there to release it."""
    for client in _clients:
        client._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_locks)


class Ending(Protocol):
    """What works in the thread."""

    async def end(self) -> None:
        """Ends all that it does."""


C = TypeVar("C", bound=Ending)


class InThread(Generic[C]):
    """What `make` makes, in an event loop of its own, in a thread that the first call starts."""

    def __init__(self, make: Callable[[], C]) -> None:
        self._make = make
        # A signal handler may end the client while its thread is in a call.
        self._lock = threading.RLock()
        _clients.add(self)
        self._running: _Running[C] | None = None
        self._is_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Closes the connections, and ends the streams of events. Calls of other threads end at once, too."""
        with self._lock:
            is_first, self._is_ended = not self._is_ended, True
        running = self._running
        if is_first and running is not None and running.process == os.getpid():
            asyncio.run_coroutine_threadsafe(_end(running.client), running.loop).result()
            running.loop.call_soon_threadsafe(running.loop.stop)
            running.thread.join()

    def _client(self) -> C:
        with self._lock:
            return self._ensure_running().client

    def _ensure_running(self) -> "_Running[C]":
        """The event loop of this process: a process that was forked has none of the threads of its parent."""
        if self._is_ended:
            raise RuntimeError("the client is closed")
        if self._running is None or self._running.process != os.getpid():
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run_loop, args=(loop,), name="grabstream client", daemon=True)
            thread.start()
            self._running = _Running(os.getpid(), loop, thread, self._make())
        return self._running

    def _submit(self, call: Coroutine[Any, Any, T]) -> "Future[T] | None":
        """Begins a coroutine in the event loop; None if the client is closed."""
        # What begins before the end is known to `end`.
        with self._lock:
            if self._is_ended:
                call.close()
                return None
            return asyncio.run_coroutine_threadsafe(call, self._ensure_running().loop)

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        waiting = self._submit(call)
        if waiting is None:
            raise RuntimeError("the client is closed")
        return result_of(waiting)


def result_of(waiting: "Future[T]") -> T:
    """Waits for what was begun. It is cancelled when this thread is interrupted."""
    try:
        return waiting.result()
    except BaseException:
        waiting.cancel()
        raise


class _Running(NamedTuple, Generic[C]):
    """The event loop of a client in a thread of its own, with the client that works there."""

    process: int
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    client: C


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _end(client: Ending) -> None:
    """Ends a client, and waits for the calls that it ends; cancels what takes too long."""
    calls = asyncio.all_tasks() - {asyncio.current_task()}
    await client.end()
    with suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS_MAX):
            await asyncio.gather(*calls, return_exceptions=True)
