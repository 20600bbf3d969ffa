"""The client of a Redis Cluster: a plain client for each server, so that a slow server delays no other.

redis-py's own cluster client does not isolate servers. It asks one server after another for the slots, and
every command waits at one lock meanwhile. For some commands it asks an arbitrary server which keys they use.
An error of one server may close the connections of all. `ASKING` may be sent on another connection than its
command.

Here a command is sent directly to the server that has its key. Whenever a server does not answer or
redirects, the client asks all servers at once, in the background, which server has which slots, and uses the
first complete answer. Only the first command of a client waits for that.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from redis.asyncio import Redis
from redis.commands import AsyncCoreCommands
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    TimeoutError,
    TryAgainError,
)

from grabstream.lua.script_client import ScriptClient, means_closed
from grabstream.runtime.ending import end
from grabstream.runtime.trouble import is_trouble

SLOTS: Final = 16_384
#: How long a server may take to answer which server has which slots.
LEARN_SECONDS_MAX: Final = 2.0
#: The shortest time between two such questions to all servers.
LEARN_EVERY_SECONDS: Final = 0.2
#: After this many redirections a command fails; its caller has to try again.
REDIRECTIONS_MAX: Final = 8
#: The pause before a command is sent again whose keys are being moved.
TRY_AGAIN_SECONDS: Final = 0.05
#: A subscription that receives nothing for this long pings its server, and waits as long for the answer.
SILENT_SECONDS_MAX: Final = 1.0
RETRY_SECONDS: Final = 0.2

#: Commands without a key. The caller has to send them to a server of its choice.
_KEYLESS: Final = frozenset(
    {"CONFIG GET", "CONFIG SET", "DBSIZE", "FLUSHALL", "FLUSHDB", "INFO", "PING", "SCAN", "TIME"}
)
#: The part of a pattern that is the hash tag of all matching keys.
_tag = re.compile(r"\{[^{}*?\[\]\\]+\}").search

T = TypeVar("T")
OpenServer = Callable[[str, int], Redis]


class ClusterServer(NamedTuple):
    """A server of the cluster and its client."""

    host: str
    port: int
    client: Redis

    @property
    def name(self) -> str:
        """The address, `host:port`."""
        return f"{self.host}:{self.port}"


class _SlotMap(NamedTuple):
    """Which server has which slots: the name of the server by slot (None: none), masters and replicas."""

    owners: list[str | None]
    masters: list[str]
    replicas: list[str]

    @property
    def covered(self) -> int:
        """How many slots have a server."""
        return SLOTS - self.owners.count(None)


class _Redirected(ConnectionError):  # type: ignore[misc]
    """A server does not have all keys of a command, and did not run it. A caller that does not follow the
    redirection sees a ConnectionError, and tries again.
    """

    def __init__(self, error: AskError | TryAgainError) -> None:
        super().__init__(f"the slot is being moved: {error}")
        self.error = error


class ClusterClient(AsyncCoreCommands):  # type: ignore[misc]
    """A client of a Redis Cluster. It raises `ConnectionError` whenever a server cannot be found.

    It asks the servers at `addresses` (host, port) first for the slots. `open_server` makes the client of one
    server.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], open_server: OpenServer) -> None:
        self._open_server = open_server
        self._servers: dict[str, ClusterServer] = {}
        self._first = [self._server(host, port).name for host, port in addresses]
        self._slots: _SlotMap | None = None
        self._learning: asyncio.Task[None] | None = None
        self._learned_at = -LEARN_EVERY_SECONDS
        self._closing: set[asyncio.Future[None]] = set()
        self._closed = False
        #: Raised whenever a slot has another server.
        self.version = 0

    async def aclose(self) -> None:
        """Closes all connections."""
        self._closed = True
        if self._learning is not None:
            self._learning.cancel()
        await asyncio.gather(
            *(server.client.aclose() for server in self._servers.values()), return_exceptions=True
        )

    # -- commands --------------------------------------------------------------------------------------------

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Runs a command on the server that has its keys. Redirections are followed, because a server that
        redirects a command has not run it.
        """
        slot = slot_of(key_of(args))
        await self.load_slots()
        asked: ClusterServer | None = None
        for _ in range(REDIRECTIONS_MAX):
            server = asked or self.server_of(slot)
            sent = (
                _asking(server, args, options) if asked else server.client.execute_command(*args, **options)
            )
            asked = None
            try:
                return await self.guarded(sent)
            except _Redirected as redirected:
                error = redirected.error
            if isinstance(error, MovedError):
                self._moved(error, server)
            elif isinstance(error, AskError):
                asked = self._server(_host(error.host, server), error.port)
            else:
                await asyncio.sleep(TRY_AGAIN_SECONDS)
        raise ConnectionError("the slot is being moved")

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> "ClusterCommands":
        """Collects commands that are sent together."""
        return ClusterCommands(self, transaction)

    def pubsub(self, **options: Any) -> "ClusterSubscription":
        """A subscription. It listens to each channel at the server that has the channel's slot."""
        return ClusterSubscription(self)

    async def scan_iter(
        self, match: str | None = None, count: int | None = None, **options: Any
    ) -> AsyncIterator[bytes]:
        """The keys that match a pattern: of one server when the pattern has a hash tag, otherwise of all
        masters.
        """
        await self.load_slots()
        tag = _tag(match or "")
        for server in [self.server_of(slot_of(tag[0]))] if tag else self.masters():
            async for key in server.client.scan_iter(match, count, **options):
                yield key

    async def unlink(self, *names: Any) -> int:
        """Deletes keys, which may have different slots; returns how many existed."""
        by_slot: dict[int, list[Any]] = {}
        for name in names:
            by_slot.setdefault(slot_of(name), []).append(name)
        return sum([int(await self.execute_command("UNLINK", *slot_keys)) for slot_keys in by_slot.values()])

    # -- servers ---------------------------------------------------------------------------------------------

    async def load_slots(self) -> None:
        """Asks which server has which slots, unless that is known; raises ConnectionError when no server
        answers.
        """
        if self._slots is None:
            await asyncio.shield(self._learn())

    def server_of(self, slot: int) -> ClusterServer:
        """The server that has a slot; raises ConnectionError when no server has it."""
        name = self._slots.owners[slot] if self._slots else None
        if name is None:
            self.refresh_slots()
            raise ConnectionError(f"no server has slot {slot}")
        return self._servers[name]

    async def client_of(self, key: str) -> Redis:
        """The client of the server that has a key, for commands without a key."""
        await self.execute_command("EXISTS", key)  # follows a redirection
        return self.server_of(slot_of(key)).client

    def masters(self) -> list[ClusterServer]:
        """The masters."""
        return [self._servers[name] for name in self._slots.masters] if self._slots else []

    def servers(self) -> list[ClusterServer]:
        """The masters and their replicas."""
        return (
            [self._servers[name] for name in (*self._slots.masters, *self._slots.replicas)]
            if self._slots
            else []
        )

    def refresh_slots(self) -> None:
        """Asks in the background which server has which slots."""
        if self._slots is not None and not self._closed:
            self._learn()

    async def guarded(self, asking: Awaitable[T]) -> T:
        """Awaits the answer of one server. After an error that may mean that another server has the slot now,
        it asks all servers again which server has which slots.
        """
        try:
            return await asking
        except (AskError, TryAgainError) as error:
            self.refresh_slots()
            raise _Redirected(error) from error
        except BaseException as error:
            # A cancelled command may have waited for a server that hangs.
            if isinstance(
                error,
                asyncio.CancelledError
                | OSError
                | ConnectionError
                | TimeoutError
                | ClusterDownError
                | AttributeError,
            ):
                self.refresh_slots()
            if means_closed(error):
                raise ConnectionError("the connection was closed while it was used") from error
            raise

    def _server(self, host: str, port: int) -> ClusterServer:
        name = f"{host}:{port}"
        if name not in self._servers:
            self._servers[name] = ClusterServer(host, port, self._open_server(host, port))
        return self._servers[name]

    def _moved(self, error: MovedError, server: ClusterServer) -> None:
        """Takes over which server has a slot, as a redirection names it."""
        owner = self._server(_host(error.host, server), error.port).name
        if self._slots is not None and self._slots.owners[error.slot_id] != owner:
            self._slots.owners[error.slot_id] = owner
            self.version += 1
        self.refresh_slots()

    # -- which server has which slots ------------------------------------------------------------------------

    def _learn(self) -> asyncio.Task[None]:
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._ask_all())
            self._learning.add_done_callback(_ignore_failure)
        return self._learning

    async def _ask_all(self) -> None:
        """Asks all servers at once and uses the first answer that covers all slots, or else the one that
        covers most of them.
        """
        await asyncio.sleep(max(0.0, self._learned_at + LEARN_EVERY_SECONDS - time.monotonic()))
        asked = {asyncio.create_task(self._ask(server)) for server in self._servers.values()}
        best: _SlotMap | None = None
        reason: object = "it has no servers"
        try:
            while asked and (best is None or best.covered < SLOTS):
                done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    answer = task.result()
                    if isinstance(answer, BaseException):
                        reason = answer
                    elif best is None or answer.covered > best.covered:
                        best = answer
        finally:
            self._learned_at = time.monotonic()
            for task in asked:
                task.cancel()
        if best is None:
            raise ConnectionError(f"no server of the Redis Cluster answers: {reason}")
        self._adopt(best)

    async def _ask(self, server: ClusterServer) -> _SlotMap | BaseException:
        try:
            async with asyncio.timeout(LEARN_SECONDS_MAX):
                reply = await server.client.execute_command("CLUSTER SLOTS")
        except BaseException as error:
            if not is_trouble(error):
                raise
            return error
        owners: list[str | None] = [None] * SLOTS
        masters: dict[str, None] = {}
        replicas: dict[str, None] = {}
        for first, last, *nodes in reply:
            names = [
                self._server(_host((node[0] or b"").decode(), server), int(node[1])).name for node in nodes
            ]
            owners[first : last + 1] = [names[0]] * (last + 1 - first)
            masters[names[0]] = None
            replicas |= dict.fromkeys(names[1:])
        return _SlotMap(owners, list(masters), list(replicas))

    def _adopt(self, slots: _SlotMap) -> None:
        before, self._slots = self._slots, slots
        if before is None or before.owners != slots.owners:
            self.version += 1
        known = {*slots.masters, *slots.replicas, *self._first}
        gone = [self._servers.pop(name) for name in list(self._servers) if name not in known]
        demoted = [
            self._servers[name]
            for name in (before.masters if before else ())
            if name in known and name not in slots.masters
        ]
        # Ends the commands that wait for a master that hangs and has been replaced.
        for server in demoted:
            if isinstance(server.client, ScriptClient):
                server.client.lose_lines()
        for closing in [server.client.aclose() for server in gone] + [
            server.client.connection_pool.disconnect() for server in demoted
        ]:
            task = asyncio.ensure_future(closing)
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            task.add_done_callback(_ignore_failure)


class ClusterCommands(AsyncCoreCommands):  # type: ignore[misc]
    """Commands that are sent together, each to the server that has its key. They are not repeated: a
    redirection raises ConnectionError, unless `execute` is to return the errors of single commands.
    """

    def __init__(self, client: ClusterClient, transaction: bool) -> None:
        self._client = client
        self._transaction = transaction
        self._commands: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    async def __aenter__(self) -> "ClusterCommands":
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._commands = []

    def execute_command(self, *args: Any, **options: Any) -> "ClusterCommands":
        """Adds a command; `execute` sends it."""
        self._commands.append((args, options))
        return self

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Sends the commands and returns their replies in order; raises the errors of a single command, or
        returns each error, also a redirection, in the place of the reply.
        """
        commands, self._commands = self._commands, []
        await self._client.load_slots()
        replies = await self._replies(commands, raise_on_error)
        if any(isinstance(reply, ClusterDownError) for reply in replies):
            self._client.refresh_slots()
        return replies

    async def _replies(
        self, commands: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], raise_on_error: bool
    ) -> list[Any]:
        indexes_by_server: dict[ClusterServer, list[int]] = {}
        replies: list[Any] = [None] * len(commands)
        for index, (args, _) in enumerate(commands):
            try:
                server = self._client.server_of(slot_of(key_of(args)))
            except ConnectionError as error:
                if raise_on_error:
                    raise
                replies[index] = error
            else:
                indexes_by_server.setdefault(server, []).append(index)

        async def send(server: ClusterServer, indexes: Sequence[int]) -> None:
            async with server.client.pipeline(transaction=self._transaction) as pipe:
                for index in indexes:
                    args, options = commands[index]
                    pipe.execute_command(*args, **options)
                for index, reply in zip(indexes, await pipe.execute(raise_on_error), strict=True):
                    replies[index] = reply

        results = await asyncio.gather(
            *(self._client.guarded(send(server, indexes)) for server, indexes in indexes_by_server.items()),
            return_exceptions=True,
        )
        for indexes, result in zip(indexes_by_server.values(), results, strict=True):
            if isinstance(result, BaseException):
                if raise_on_error or not isinstance(result, Exception):
                    raise result
                for index in indexes:
                    replies[index] = result
        return replies


class ClusterSubscription:
    """A subscription to channels. It listens to each channel at the server that has the channel's slot; a
    server that hangs or is down delays only its own channels.
    """

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._channels: tuple[str, ...] = ()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._listeners: dict[ClusterServer, asyncio.Task[None]] = {}
        self._version = -1

    async def __aenter__(self) -> "ClusterSubscription":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the subscription."""
        await end(self._listeners.values(), SILENT_SECONDS_MAX)
        self._listeners = {}

    async def subscribe(self, *channels: str) -> None:
        """Sets the channels that `listen` listens to."""
        self._channels = channels

    async def listen(self) -> AsyncIterator[dict[str, Any]]:
        """The messages of the channels, until cancelled."""
        while True:
            if self._version != self._client.version:
                await self._listen_everywhere()
            try:
                async with asyncio.timeout(SILENT_SECONDS_MAX):
                    message = await self._messages.get()
            except TimeoutError:
                for task in self._listeners.values():
                    if task.done():
                        task.result()
                continue
            yield message

    async def _listen_everywhere(self) -> None:
        """Subscribes at the servers that have the channels' slots now, and ends the former subscriptions."""
        await self._client.load_slots()
        self._version = self._client.version
        channels_by_server: dict[ClusterServer, list[str]] = {}
        for channel in self._channels:
            with suppress(ConnectionError):  # no server has the slot now: a later version will name one
                channels_by_server.setdefault(self._client.server_of(slot_of(channel)), []).append(channel)
        former = self._listeners
        self._listeners = {
            server: asyncio.create_task(self._listen_at(server, channels))
            for server, channels in channels_by_server.items()
        }
        for task in former.values():
            task.cancel()

    async def _listen_at(self, server: ClusterServer, channels: Sequence[str]) -> None:
        while True:
            try:
                async with server.client.pubsub() as pubsub:
                    await pubsub.subscribe(*channels)
                    was_pinged = False
                    while True:
                        message = await pubsub.get_message(timeout=SILENT_SECONDS_MAX)
                        if message is not None:
                            was_pinged = False
                            self._messages.put_nowait(message)
                        elif was_pinged:
                            raise ConnectionError(f"{server.name} does not answer a ping")
                        else:
                            was_pinged = True
                            await pubsub.ping()
            except BaseException as error:
                if not is_trouble(error):
                    raise
                self._client.refresh_slots()
                await asyncio.sleep(RETRY_SECONDS)


def slot_of(key: str | bytes) -> int:
    """The slot of a key or channel."""
    return int(key_slot(key if isinstance(key, bytes) else key.encode()))


def key_of(args: Sequence[Any]) -> str | bytes:
    """A key of a command; all keys of a command of this system have the same slot. Raises ValueError for a
    command without a key.
    """
    command = str(args[0]).upper()
    if command in ("EVAL", "EVALSHA", "FCALL"):
        index = 3 if int(args[2]) else None
    elif command == "XREAD":
        index = next((index + 1 for index, word in enumerate(args) if word in ("STREAMS", b"STREAMS")), None)
    else:
        index = None if command in _KEYLESS or len(args) < 2 else 1
    if index is None:
        raise ValueError(f"{command} has no key: send it with the client of one server of the cluster")
    key: str | bytes = args[index]
    return key


async def _asking(server: ClusterServer, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Runs a command at the server that a slot is being moved to. ASKING, which allows it there, is sent in
    the same write.
    """
    async with server.client.pipeline(transaction=False) as pipe:
        pipe.execute_command("ASKING")
        pipe.execute_command(*args, **options)
        [_, reply] = await pipe.execute(raise_on_error=False)
    if isinstance(reply, BaseException):
        raise reply
    return reply


def _host(named: str, server: ClusterServer) -> str:
    """The host that a server names. Without a name (one that does not know its own address), or with `?` (one
    that prefers names of hosts, and has none), it is the host at which that server was asked.
    """
    return server.host if named in ("", "?") else named


def _ignore_failure(task: asyncio.Future[None]) -> None:
    """Retrieves the error of a background task that no caller awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
