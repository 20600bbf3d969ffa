"""The client of a Redis Cluster: a plain client for each server, so that what concerns one server waits for
no other.

redis-py's own cluster client does not isolate servers: every command waits at one lock while servers are
asked, one after another, who has which slots; a server of its choice is asked for the keys of some commands;
an error of one server may close the connections of all; and `ASKING` may go by another connection than the
command that it is for.

Here a command goes straight to the server that has its key. Who has which slots is asked of all servers at
once, in the background, whenever a server does not answer or redirects; the first whole answer counts. Only
the first command of a client waits for that.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from redis.asyncio import Redis
from redis.commands.core import AsyncCoreCommands
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    TimeoutError,
    TryAgainError,
)

from grabstream.lua.ending import end
from grabstream.lua.trouble import is_trouble

SLOTS: Final = 16_384
#: How long a server may take to say who has which slots …
LEARN_SECONDS_MAX: Final = 2.0
#: … and how long it is at least until all are asked again.
LEARN_EVERY_SECONDS: Final = 0.2
#: A command is redirected so often, then its caller has to try again.
REDIRECTIONS_MAX: Final = 8
#: A slot whose keys are on the way: the pause before the command is sent again.
TRY_AGAIN_SECONDS: Final = 0.05
#: A subscription that hears nothing for so long asks its server whether it is there, and waits as long for
#: that.
SILENT_SECONDS_MAX: Final = 1.0
RETRY_SECONDS: Final = 0.2

#: What redis-py calls on the streams of a connection, which are None when it is closed.
_STREAM_METHODS: Final = frozenset(
    {"writelines", "write", "drain", "read", "readline", "readexactly", "close", "wait_closed"}
)
#: Commands without a key: they are for one server, which has to be named.
_KEYLESS: Final = frozenset(
    {"CONFIG GET", "CONFIG SET", "DBSIZE", "FLUSHALL", "FLUSHDB", "INFO", "PING", "SCAN", "TIME"}
)
#: The part of a pattern that all matching keys have as hash tag.
_tag = re.compile(r"\{[^{}*?\[\]\\]+\}").search

T = TypeVar("T")
OpenServer = Callable[[str, int], Redis]


class Server(NamedTuple):
    """A server of the cluster and its client."""

    host: str
    port: int
    client: Redis

    @property
    def name(self) -> str:
        """Its address."""
        return f"{self.host}:{self.port}"


class _Slots(NamedTuple):
    """Who has which slots: the name of a server by slot (None: nobody), masters and replicas."""

    owners: list[str | None]
    masters: list[str]
    replicas: list[str]

    @property
    def covered(self) -> int:
        """How many slots a server has."""
        return SLOTS - self.owners.count(None)


class _Redirected(ConnectionError):  # type: ignore[misc]
    """A server has not (all of) the keys of a command; nothing was carried out. To whom nobody follows it:
    try again.
    """

    def __init__(self, error: AskError | TryAgainError) -> None:
        super().__init__(f"the slot is being moved: {error}")
        self.error = error


class ClusterClient(AsyncCoreCommands):  # type: ignore[misc]
    """A client of a Redis Cluster that says `ConnectionError` whenever a server cannot be found.

    `addresses` (host, port) are asked first who has which slots; `open_server` makes the client of a server.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], open_server: OpenServer) -> None:
        self._open_server = open_server
        self._servers: dict[str, Server] = {}
        self._first = [self._server(host, port).name for host, port in addresses]
        self._slots: _Slots | None = None
        self._learning: asyncio.Task[None] | None = None
        self._learned_at = -LEARN_EVERY_SECONDS
        self._closing: set[asyncio.Future[None]] = set()
        self._closed = False
        #: Another number whenever a slot has another server.
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
        """Runs a command on the server that has its keys; a redirection is followed, since nothing was
        carried out where it came from.
        """
        slot = slot_of(key_of(args))
        await self.know()
        asked: Server | None = None
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
                asked = self._server(error.host or server.host, error.port)
            else:
                await asyncio.sleep(TRY_AGAIN_SECONDS)
        raise ConnectionError("the slot is being moved")

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> "ClusterCommands":
        """Commands to be sent together."""
        return ClusterCommands(self, transaction)

    def pubsub(self, **options: Any) -> "ClusterSubscription":
        """A subscription; each channel is heard at the server that has its slot."""
        return ClusterSubscription(self)

    async def scan_iter(
        self, match: str | None = None, count: int | None = None, **options: Any
    ) -> AsyncIterator[bytes]:
        """The keys that match a pattern: of one server where the pattern has a hash tag, else of all
        masters.
        """
        await self.know()
        tag = _tag(match or "")
        for server in [self.server_of(slot_of(tag[0]))] if tag else self.masters():
            async for key in server.client.scan_iter(match, count, **options):
                yield key

    async def unlink(self, *names: Any) -> int:
        """Deletes keys of any slots."""
        by_slot: dict[int, list[Any]] = {}
        for name in names:
            by_slot.setdefault(slot_of(name), []).append(name)
        return sum([int(await self.execute_command("UNLINK", *of_slot)) for of_slot in by_slot.values()])

    # -- servers ---------------------------------------------------------------------------------------------

    async def know(self) -> None:
        """Returns when it is known who has which slots; raises ConnectionError when no server says so."""
        if self._slots is None:
            await asyncio.shield(self._learn())

    def server_of(self, slot: int) -> Server:
        """The server that has a slot; raises ConnectionError when none has."""
        name = self._slots.owners[slot] if self._slots else None
        if name is None:
            self.look_again()
            raise ConnectionError(f"no server has slot {slot}")
        return self._servers[name]

    def masters(self) -> list[Server]:
        """The servers that decide."""
        return [self._servers[name] for name in self._slots.masters] if self._slots else []

    def servers(self) -> list[Server]:
        """The servers that decide, and their replicas."""
        return (
            [self._servers[name] for name in (*self._slots.masters, *self._slots.replicas)]
            if self._slots
            else []
        )

    def look_again(self) -> None:
        """Asks in the background who has which slots."""
        if self._slots is not None and not self._closed:
            self._learn()

    async def guarded(self, asking: Awaitable[T]) -> T:
        """Awaits what one server is asked; after an error that may say that it is another one now, all are
        asked who has which slots.
        """
        try:
            return await asking
        except (AskError, TryAgainError) as error:
            self.look_again()
            raise _Redirected(error) from error
        except BaseException as error:
            # A command that was given up may have waited for a server that hangs.
            if isinstance(
                error,
                asyncio.CancelledError
                | OSError
                | ConnectionError
                | TimeoutError
                | ClusterDownError
                | AttributeError,
            ):
                self.look_again()
            if _is_of_closed_stream(error):
                raise ConnectionError("the connection was closed while it was used") from error
            raise

    def _server(self, host: str, port: int) -> Server:
        name = f"{host}:{port}"
        if name not in self._servers:
            self._servers[name] = Server(host, port, self._open_server(host, port))
        return self._servers[name]

    def _moved(self, error: MovedError, server: Server) -> None:
        """Believes a server that says who has a slot."""
        owner = self._server(error.host or server.host, error.port).name
        if self._slots is not None and self._slots.owners[error.slot_id] != owner:
            self._slots.owners[error.slot_id] = owner
            self.version += 1
        self.look_again()

    # -- who has which slots ---------------------------------------------------------------------------------

    def _learn(self) -> asyncio.Task[None]:
        if self._learning is None or self._learning.done():
            self._learning = asyncio.create_task(self._ask_all())
            self._learning.add_done_callback(_taken_note_of)
        return self._learning

    async def _ask_all(self) -> None:
        """Asks all servers at once; the first whole answer counts, or the one that covers most when none is
        whole.
        """
        await asyncio.sleep(max(0.0, self._learned_at + LEARN_EVERY_SECONDS - time.monotonic()))
        asked = {asyncio.create_task(self._ask(server)) for server in self._servers.values()}
        best: _Slots | None = None
        reason: object = "it has none"
        try:
            while asked and (best is None or best.covered < SLOTS):
                done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    found = task.result()
                    if isinstance(found, BaseException):
                        reason = found
                    elif best is None or found.covered > best.covered:
                        best = found
        finally:
            self._learned_at = time.monotonic()
            for task in asked:
                task.cancel()
        if best is None:
            raise ConnectionError(f"no server of the Redis Cluster answers: {reason}")
        self._adopt(best)

    async def _ask(self, server: Server) -> _Slots | BaseException:
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
            # A server that does not know its own address leaves it out.
            names = [
                self._server((node[0] or b"").decode() or server.host, int(node[1])).name for node in nodes
            ]
            owners[first : last + 1] = [names[0]] * (last + 1 - first)
            masters[names[0]] = None
            replicas |= dict.fromkeys(names[1:])
        return _Slots(owners, list(masters), list(replicas))

    def _adopt(self, slots: _Slots) -> None:
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
        # Who waits for a master that hangs and was replaced need not wait any longer.
        for closing in [server.client.aclose() for server in gone] + [
            server.client.connection_pool.disconnect() for server in demoted
        ]:
            task = asyncio.ensure_future(closing)
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            task.add_done_callback(_taken_note_of)


class ClusterCommands(AsyncCoreCommands):  # type: ignore[misc]
    """Commands sent together, to each server those that are for it. They are not repeated: a redirection is a
    ConnectionError.
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
        """Notes a command."""
        self._commands.append((args, options))
        return self

    async def execute(self) -> list[Any]:
        """Sends them and returns the replies in order; raises what a single command raises."""
        commands, self._commands = self._commands, []
        await self._client.know()
        places: dict[Server, list[int]] = {}
        for place, (args, _) in enumerate(commands):
            places.setdefault(self._client.server_of(slot_of(key_of(args))), []).append(place)
        replies: list[Any] = [None] * len(commands)

        async def send(server: Server, of_server: Sequence[int]) -> None:
            async with server.client.pipeline(transaction=self._transaction) as pipe:
                for place in of_server:
                    args, options = commands[place]
                    pipe.execute_command(*args, **options)
                for place, reply in zip(of_server, await pipe.execute(), strict=True):
                    replies[place] = reply

        sent = await asyncio.gather(
            *(self._client.guarded(send(*one)) for one in places.items()), return_exceptions=True
        )
        for result in sent:
            if isinstance(result, BaseException):
                raise result
        return replies


class ClusterSubscription:
    """A subscription to channels; each is heard at the server that has its slot. A server that hangs or is
    away keeps back its own.
    """

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._channels: tuple[str, ...] = ()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._hearing: dict[Server, asyncio.Task[None]] = {}
        self._version = -1

    async def __aenter__(self) -> "ClusterSubscription":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the subscription."""
        await end(self._hearing.values(), SILENT_SECONDS_MAX)
        self._hearing = {}

    async def subscribe(self, *channels: str) -> None:
        """From `listen` on these are heard."""
        self._channels = channels

    async def listen(self) -> AsyncIterator[dict[str, Any]]:
        """What is announced, until cancelled."""
        while True:
            if self._version != self._client.version:
                await self._hear_all()
            try:
                async with asyncio.timeout(SILENT_SECONDS_MAX):
                    message = await self._messages.get()
            except TimeoutError:
                for task in self._hearing.values():
                    if task.done():
                        task.result()
                continue
            yield message

    async def _hear_all(self) -> None:
        """Subscribes where the channels' slots are now."""
        await self._client.know()
        self._version = self._client.version
        places: dict[Server, list[str]] = {}
        for channel in self._channels:
            with suppress(ConnectionError):  # a slot that nobody has now: another version will tell
                places.setdefault(self._client.server_of(slot_of(channel)), []).append(channel)
        before, self._hearing = (
            self._hearing,
            {
                server: asyncio.create_task(self._hear(server, channels))
                for server, channels in places.items()
            },
        )
        for task in before.values():
            task.cancel()

    async def _hear(self, server: Server, channels: Sequence[str]) -> None:
        while True:
            try:
                async with server.client.pubsub() as pubsub:
                    await pubsub.subscribe(*channels)
                    is_asked = False
                    while True:
                        message = await pubsub.get_message(timeout=SILENT_SECONDS_MAX)
                        if message is not None:
                            is_asked = False
                            self._messages.put_nowait(message)
                        elif is_asked:
                            raise ConnectionError(f"{server.name} is silent")
                        else:
                            is_asked = True
                            await pubsub.ping()
            except BaseException as error:
                if not is_trouble(error):
                    raise
                self._client.look_again()
                await asyncio.sleep(RETRY_SECONDS)


def slot_of(key: str | bytes) -> int:
    """The slot of a key, or of a channel."""
    return int(key_slot(key if isinstance(key, bytes) else key.encode()))


def key_of(args: Sequence[Any]) -> str | bytes:
    """A key of a command, as this system gives them; all its keys have one slot. Raises ValueError for a
    command without one.
    """
    command = str(args[0]).upper()
    if command in ("EVAL", "EVALSHA", "FCALL"):
        place = 3 if int(args[2]) else None
    elif command == "XREAD":
        place = next((place + 1 for place, word in enumerate(args) if word in ("STREAMS", b"STREAMS")), None)
    else:
        place = None if command in _KEYLESS or len(args) < 2 else 1
    if place is None:
        raise ValueError(f"{command} has no key: ask a server of the cluster by its own client")
    key: str | bytes = args[place]
    return key


async def _asking(server: Server, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """A command at the server that a slot is on the way to: in one write with the word that allows it
    there.
    """
    async with server.client.pipeline(transaction=False) as pipe:
        pipe.execute_command("ASKING")
        pipe.execute_command(*args, **options)
        [_, reply] = await pipe.execute(raise_on_error=False)
    if isinstance(reply, BaseException):
        raise reply
    return reply


def _taken_note_of(task: asyncio.Future[None]) -> None:
    """Nobody waits for what was asked in the background: its failure is no news."""
    if not task.cancelled():
        task.exception()


def _is_of_closed_stream(error: BaseException) -> bool:
    return isinstance(error, AttributeError) and error.obj is None and error.name in _STREAM_METHODS
