"""A client of one Redis server whose calls of scripts share one connection.

redis-py takes a connection from its pool for each call, packs the call in Python, and reads the reply through
a stream: about 90 µs of processor time. Here calls follow each other on one connection, without waiting for
earlier replies, which the server gives in the same order; hiredis packs and reads: about 15 µs. Everything
else is redis-py's: how a connection is opened (TLS, login, database), and all other commands.

Messages of channels are handed on without redis-py, too, which needs some 50 µs for each (`listen_to`).

No other file uses what redis-py does not document, and pyproject.toml pins the version with which this one
was tested.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import hiredis
import redis.asyncio
from redis.asyncio.connection import BaseParser
from redis.exceptions import ConnectionError, ReadOnlyError, TimeoutError

#: A call that has no reply after this time fails, where the client has no `socket_timeout`.
REPLY_SECONDS_MAX: Final = 5.0

_SCRIPTS: Final = frozenset({"FCALL", "EVALSHA", "EVAL"})
#: Methods that redis-py calls on the streams of a connection, which are None once it is closed.
_STREAM_METHODS: Final = frozenset(
    {"writelines", "write", "drain", "read", "readline", "readexactly", "close", "wait_closed"}
)
#: Returned by the reader of hiredis while there is no whole reply.
_NOTHING: Final = object()


class ScriptClient(redis.asyncio.Redis):  # type: ignore[misc]
    """A client of redis.asyncio for one server and one event loop.

    The calls of scripts raise the same errors as those of redis-py, and are never repeated. After a call that
    was cancelled, had no reply in time, or was refused because the server only reads, later calls use a new
    connection: the server may hang, or its name may now belong to another one.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._line: _Line | None = None
        self._opening: _Opening | None = None
        #: The open connections of scripts: the one that takes calls, and those with calls on their way.
        self._lines: set[_Line] = set()
        self._subscriptions: set[_Subscription] = set()
        super().__init__(*args, **options)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Runs a command; returns its reply."""
        if args[0] not in _SCRIPTS:
            return await super().execute_command(*args, **options)
        line = self._line
        while line is None or not line.takes_calls:
            line = await self._opened()
        return await line.ask(args)

    async def listen_to(self, channels: Sequence[str], take: Callable[[bytes, bytes], None]) -> None:
        """Calls `take` with the channel and the data of each message of some channels, on its own connection,
        until cancelled. Raises what ends the connection, or what `take` raises; TimeoutError when the server
        does not answer at all.
        """
        connection = self.connection_pool.make_connection()
        await connection.connect()
        subscription = _Subscription(connection, take)
        self._subscriptions.add(subscription)
        try:
            subscription.ask(channels)
            await subscription.ended
        finally:
            self._subscriptions.discard(subscription)
            subscription.close()

    def lose_lines(self) -> None:
        """Closes the connections of scripts; calls that have no reply yet fail, later ones open another."""
        opening, self._opening, self._line = self._opening, None, None
        if opening is not None:
            opening.task.cancel()
        for line in list(self._lines):
            line.lose(ConnectionError("the client has closed the connection"))

    async def aclose(self, *args: Any, **options: Any) -> None:
        """Closes all connections; calls that have no reply yet fail."""
        self.lose_lines()
        for subscription in list(self._subscriptions):
            subscription.end(ConnectionError("the client has closed the connection"))
        await super().aclose(*args, **options)

    def __del__(self, *args: Any, **options: Any) -> None:
        # The loop may be closed by then.
        with suppress(RuntimeError):
            self.lose_lines()
        super().__del__(*args, **options)

    async def _opened(self) -> "_Line":
        """A connection that takes calls. Callers that come at the same time share it."""
        opening = self._opening
        if opening is None:
            opening = self._opening = _Opening(asyncio.create_task(self._open()))
            opening.task.add_done_callback(self._forget_opening)
        opening.callers += 1
        try:
            # A caller that is cancelled does not take the connection from the others.
            return await asyncio.shield(opening.task)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if opening.task.cancelled() and not (task and task.cancelling()):
                raise ConnectionError("the client has closed the connection") from None
            # The server may hang: a later caller opens another one.
            if self._opening is opening:
                self._opening = None
            raise
        finally:
            opening.callers -= 1
            if not opening.callers:
                opening.task.cancel()

    async def _open(self) -> "_Line":
        connection = self.connection_pool.make_connection()
        await connection.connect()
        line = _Line(connection, self._lines.discard)
        self._lines.add(line)
        before, self._line = self._line, line
        if before is not None:
            before.retire()
        return line

    def _forget_opening(self, task: "asyncio.Task[_Line]") -> None:
        if self._opening is not None and self._opening.task is task:
            self._opening = None
        # All its callers may be gone.
        if not task.cancelled():
            task.exception()


class _Opening:
    """A connection that is being opened, and how many callers wait for it."""

    def __init__(self, task: "asyncio.Task[_Line]") -> None:
        self.task = task
        self.callers = 0


class _TakenOver(asyncio.Protocol):
    """Takes over an open connection of redis-py: its transport, and what reads replies."""

    def __init__(self, connection: Any) -> None:
        self._reader = hiredis.Reader(replyError=BaseParser.parse_error, notEnoughData=_NOTHING)
        self._seconds_max: float = connection.socket_timeout or REPLY_SECONDS_MAX
        #: Kept, since a writer that is freed closes its transport.
        self._writer: asyncio.StreamWriter = connection._writer
        self._transport: Any = self._writer.transport
        self._transport.set_protocol(self)
        connection._writer = connection._reader = None


class _Line(_TakenOver):
    """A connection for calls. A line that is retired takes no more calls; it is closed when those on their
    way have replies. `closed` is called when it is closed.
    """

    def __init__(self, connection: Any, closed: Callable[["_Line"], None]) -> None:
        self._closed = closed
        self._is_retired = False
        self._loop = asyncio.get_running_loop()
        #: The calls without a reply, in order, and when each was sent.
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._watch: asyncio.TimerHandle | None = None
        #: Calls, packed, that are sent at the end of this turn of the loop.
        self._unsent: list[bytes] = []
        super().__init__(connection)

    @property
    def takes_calls(self) -> bool:
        """Whether calls may be sent."""
        return not self._is_retired and not self._transport.is_closing()

    async def ask(self, words: tuple[Any, ...]) -> Any:
        """Sends a call; returns its reply, or raises its error."""
        packed = hiredis.pack_command(words)
        reply = self._loop.create_future()
        self._waiting.append((reply, self._loop.time()))
        if self._watch is None:
            self._watch = self._loop.call_later(self._seconds_max, self._check)
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(packed)
        try:
            return await reply
        except (asyncio.CancelledError, ReadOnlyError):
            self.retire()
            raise

    def _send(self) -> None:
        """Sends the calls of one turn of the loop together: as a rule, several shards have one."""
        unsent, self._unsent = self._unsent, []
        if not self._transport.is_closing():
            self._transport.write(b"".join(unsent))

    def retire(self) -> None:
        """Takes no more calls."""
        self._is_retired = True
        if not self._waiting:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Gives replies to the calls that wait for them."""
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING:
                # A message of the server that is not a reply, such as one about its maintenance.
                if not isinstance(reply, hiredis.PushNotification):
                    self._give(reply)
        except Exception as error:
            # Also if the text of an error raises: the replies that follow are unknown.
            self.lose(ConnectionError(f"the server sent bytes that are not a reply: {error!r}"))
        if self._is_retired and not self._waiting:
            self._transport.close()

    def _give(self, reply: Any) -> None:
        waiting, _ = self._waiting.popleft()
        if waiting.done():  # its caller was cancelled, or has waited too long
            return
        if isinstance(reply, Exception):
            waiting.set_exception(reply)
        else:
            waiting.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """The server, the network or this client has closed the connection."""
        self.lose(ConnectionError(f"Connection lost: {exc or 'closed by the server'}"))

    def lose(self, error: Exception) -> None:
        """Closes the connection; calls without a reply fail."""
        self._is_retired = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        while self._waiting:
            waiting, _ = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(error)
        self._closed(self)
        self._transport.abort()

    def _check(self) -> None:
        """Fails the calls that have waited too long; then later ones use another connection."""
        self._watch = None
        now, due = self._loop.time(), math.inf
        for waiting, sent_at in self._waiting:
            if waiting.done():
                continue
            if sent_at + self._seconds_max > now:
                due = sent_at + self._seconds_max
                break
            self._is_retired = True
            waiting.set_exception(TimeoutError("Timeout reading from the server"))
        if due < math.inf:
            self._watch = self._loop.call_at(due, self._check)
        elif self._waiting:
            # No caller waits for the remaining replies.
            self.lose(TimeoutError("Timeout reading from the server"))


class _Subscription(_TakenOver):
    """A connection for messages of channels. `ended` gets the error that ends it."""

    def __init__(self, connection: Any, take: Callable[[bytes, bytes], None]) -> None:
        self._take = take
        #: Until the server answers for the first time.
        self._unanswered: asyncio.TimerHandle | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        super().__init__(connection)

    def ask(self, channels: Sequence[str]) -> None:
        """Asks for the messages of channels. The connection ends when the server does not answer in time: it
        may hang, or have closed the connection just before.
        """
        late = TimeoutError("Timeout reading from the server")
        self._unanswered = asyncio.get_running_loop().call_later(self._seconds_max, self.end, late)
        self._transport.write(hiredis.pack_command(("SUBSCRIBE", *channels)))

    def data_received(self, data: bytes) -> None:
        """Hands on messages."""
        self._stop_waiting()
        try:
            self._reader.feed(data)
            while (found := self._reader.gets()) is not _NOTHING:
                if isinstance(found, Exception):
                    raise found
                # Others say that a channel is subscribed to, or are of the server itself.
                if isinstance(found, list) and found[0] == b"message":
                    self._take(found[1], found[2])
        except Exception as error:
            self.end(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The server, the network or this client has closed the connection."""
        self.end(ConnectionError(f"Connection lost: {exc or 'closed by the server'}"))

    def _stop_waiting(self) -> None:
        if self._unanswered is not None:
            self._unanswered.cancel()
            self._unanswered = None

    def end(self, error: Exception) -> None:
        """Closes the connection; its listener gets the error."""
        if not self.ended.done():
            self.ended.set_exception(error)
        self._transport.abort()

    def close(self) -> None:
        """Closes the connection; its listener is not called any more."""
        self._stop_waiting()
        if not self.ended.cancel() and not self.ended.cancelled():
            # It may have ended before it was awaited.
            self.ended.exception()
        self._transport.abort()


class _Cancellable:
    """A connection that does not lose a cancellation. redis-py sends with `asyncio.wait_for`, which may
    swallow a cancellation before Python 3.12, whether the sending succeeds or fails: a worker that was asked
    to stop would then never end.
    """

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            await super().send_packed_command(command, check_health)  # type: ignore[misc]
        finally:
            if task and task.cancelling() > before:
                # The reply may still arrive, but no caller will read it.
                await self.disconnect(nowait=True)  # type: ignore[attr-defined]
                raise asyncio.CancelledError


class PlainConnection(_Cancellable, redis.asyncio.Connection):  # type: ignore[misc]
    """A connection over TCP."""


class EncryptedConnection(_Cancellable, redis.asyncio.SSLConnection):  # type: ignore[misc]
    """A connection over TLS."""


def cancellable(client: Any) -> Any:
    """The client, whose connections do not lose a cancellation."""
    pool = client.connection_pool
    if pool.connection_class is redis.asyncio.Connection:
        pool.connection_class = PlainConnection
    elif pool.connection_class is redis.asyncio.SSLConnection:
        pool.connection_class = EncryptedConnection
    return client


def means_closed(error: BaseException) -> bool:
    """Whether redis-py raised an error because the connection was closed during a command."""
    return isinstance(error, AttributeError) and error.obj is None and error.name in _STREAM_METHODS
