"""Redis in the simulation: the real Lua on a private real server, called step by step in virtual time.

Each simulated server is a database of it. Only what the world decides is replaced in the scripts: TIME and
the two INFO of includes/shard.lua read a hash that is written before each call. Keys with a time to live
expire in virtual time. What a server had on disk is a further database.
"""

import asyncio
import contextlib
import ctypes
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import hiredis
import msgspec
import redis
from redis._parsers.base import BaseParser
from redis.commands import AsyncCoreCommands
from redis.exceptions import ConnectionError, NoScriptError, ReadOnlyError, ResponseError, TimeoutError

from grabstream.models.outcomes import OUTCOME_NAMES
from tests.simulation import smaller
from tests.simulation.loop import SimulatedLoop
from tests.simulation.machine import Clock, Trace
from tests.simulation.releases import RELEASES

SOCKET_TIMEOUT_SECONDS: Final = 5.0
#: How long the private server may take for a reply.
REPLY_SECONDS_MAX: Final = 60
_NOTHING: Final = object()
#: A late reply arrives within the time that a caller of the gate waits.
LATE_SECONDS_MAX: Final = 1.3
#: Fields of hashes keep the order in which they were written, so that a run is the same on every server.
SERVER_OPTIONS: Final = (
    *("--port", "0", "--save", "", "--appendonly", "no", "--databases", "16", "--hz", "1"),
    *("--activerehashing", "no"),
    *("--hash-max-listpack-entries", "100000", "--hash-max-listpack-value", "100000"),
)
#: Where the scripts read what the world decides.
WORLD_KEY: Final = "sim"
_REPLACED: Final = {
    "redis.call('TIME')": "redis.call('HMGET', 'sim', 'seconds', 'micros')",
    "redis.call('INFO', 'server')": "redis.call('HGET', 'sim', 'server')",
    "redis.call('INFO', 'replication')": "redis.call('HGET', 'sim', 'replication')",
    # The simulation knows when its leases end.
    "redis.call('PTTL', KEYS[1])": "0",
}
_COPY: Final = """
redis.call('SELECT', ARGV[2])
redis.call('FLUSHDB')
redis.call('SELECT', ARGV[1])
for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('COPY', key, key, 'DB', ARGV[2]) end
return 1
"""
#: Entries of the outbox that one call may write.
ENTRIES_OF_CALL_MAX: Final = 30
#: What a client says of a connection that is gone; the second are the words of uvloop.
GONE: Final[tuple[Callable[[], Exception], ...]] = (
    lambda: ConnectionError("connection reset"),
    lambda: RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"),
)
#: Scripts that make events, by their include.
_DECIDES = re.compile(r"append_events\(call\)")
_WRITING_COMMANDS: Final = {"SET", "HSET", "HDEL", "UNLINK", "DEL", "PEXPIRE"}


def end_with_parent(number: signal.Signals) -> None:
    """Called in a private server before it starts: it gets this signal when we end, however we end."""
    with contextlib.suppress(OSError, AttributeError):  # elsewhere than on Linux
        ctypes.CDLL(None).prctl(1, number)


class SimulatedScript:
    """A script as the private server has it."""

    def __init__(self, name: str, loader: Any, run: Callable[..., Any]) -> None:
        script = loader.load(name)
        text = script.text
        for original, replacement in {**_REPLACED, **smaller.IN_SCRIPTS}.items():
            text = text.replace(original, replacement)
        self.name = name
        room = loader.script_path(name).parent.name
        self.decides = room in ("commands", "sweeping") and _DECIDES.search(text) is not None
        self.announces = "'PUBLISH'" in text
        self.expires = name in ("lease", "pass_lease", "stage")
        self.writes = "flags=no-writes" not in text.partition("\n")[0]
        self.sha: str = run("SCRIPT", "LOAD", text).decode()


class Connection:
    """A connection to a database of the private server. The way of redis-py there takes as long as the
    server takes for its answer, so this one is as short as can be.
    """

    def __init__(self, path: Path, database: int) -> None:
        """Raises OSError when the server cannot be reached."""
        self._socket = socket.socket(socket.AF_UNIX)
        # The system takes about 100 bytes, and a folder's path may be longer than that.
        with contextlib.chdir(path.parent):
            self._socket.connect(path.name)
        # With a timeout of Python's, each call would also be a poll.
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", REPLY_SECONDS_MAX, 0)
        )
        self._reader = hiredis.Reader(replyError=BaseParser.parse_error, notEnoughData=_NOTHING)
        self.run([("HELLO", 3), ("SELECT", database)])

    def run(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Executes commands; an error is a result."""
        self._socket.sendall(b"".join([hiredis.pack_command(tuple(command)) for command in commands]))
        return [self.read() for _ in commands]

    def read(self) -> Any:
        """The next reply or message. Raises OSError when none comes."""
        while (reply := self._reader.gets()) is _NOTHING:
            received = self._socket.recv(65_536)
            if not received:
                raise OSError("the private server has ended")
            self._reader.feed(received)
        return reply


class Store:
    """The private server: started once, for many runs."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="redis-"))
        path = self._directory / "redis.sock"
        title = f"{{title}} {self._directory}"
        self._process = subprocess.Popen(
            ["redis-server", "--unixsocket", path.name, "--proc-title-template", title, *SERVER_OPTIONS],
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),
            # Ctrl-C in a terminal is not for it.
            start_new_session=True,
        )
        deadline = time.monotonic() + 10
        while True:
            try:
                self._announcements = Connection(path, 0)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        self._connections = [Connection(path, number) for number in range(8)]
        self._announcements.run([("PSUBSCRIBE", "*")])
        self._callbacks = redis.Redis(protocol=3).response_callbacks
        self.calls = 0
        #: By the SHA-1 that the code under test names them by.
        self.scripts: dict[str, SimulatedScript] = {}
        self.by_text: dict[str, SimulatedScript] = {}
        for loader in (release.module("lua.loader") for release in RELEASES):
            for name in loader.script_names():
                script = loader.load(name)
                made = SimulatedScript(name, loader, lambda *args: self.run(0, [args])[0])
                self.scripts[script.sha] = self.by_text[script.text] = made
        self._copy_sha = self.run(0, [("SCRIPT", "LOAD", _COPY)])[0]

    def run(self, database: int, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Executes commands in a database; an error is a result."""
        self.calls += len(commands)
        return self._connections[database].run(commands)

    def parsed(self, command: str, reply: Any, options: dict[str, Any]) -> Any:
        """A reply as the client gives it."""
        callback = self._callbacks.get(command)
        return callback(reply, **options) if callback else reply

    def announcement(self) -> tuple[bytes, bytes]:
        """The next message that a script has published: channel and data."""
        _, _, channel, data = self._announcements.read()
        return channel, data

    def copy(self, source: int, target: int) -> None:
        """Makes a database equal to another."""
        [reply] = self.run(source, [("EVALSHA", self._copy_sha, 0, source, target)])
        if isinstance(reply, Exception):
            raise reply

    def flush(self) -> None:
        """Empties all databases."""
        self.run(0, [("FLUSHALL",)])

    def close(self) -> None:
        """Ends the server."""
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


class Weather:
    """How the way to the servers of one kind is at the moment."""

    def __init__(self) -> None:
        self.slow = 1.0
        self.request_lost = 0.0
        self.reply_lost = 0.0
        self.announcement_lost = 0.0
        #: The share of cancellations that the client takes for a lost connection.
        self.swallowed = 0.0

    def delay(self, draw: random.Random) -> float:
        """Seconds that a message is on its way."""
        base = draw.uniform(0.0001, 0.0015)
        if draw.random() < 0.04:
            base += draw.uniform(0.0, 0.03)
        return base * self.slow


class Server:
    """A simulated server. `epoch_parts` are its run id and its replication id."""

    def __init__(self, name: str, store: Store, database: int, disk: int, clock: Clock, loop: SimulatedLoop,
                 draw: random.Random) -> None:  # fmt: skip
        self.name = name
        self.store = store
        self.database = database
        self._disk = disk
        self._clock = clock
        self._loop = loop
        self._draw = draw
        self.up = True
        self.is_master = True
        self.is_full = False
        self.skew_ms = 0
        self.call_max = 2_500
        #: Packed ids: a script that decides one of these commands raises.
        self.poisoned: tuple[bytes, ...] = ()
        #: The share of deciding calls in which a write fails.
        self.breaks = 0.0
        self.known: set[str] = set()
        self.expiries: dict[Any, float] = {}
        self._disk_expiries: dict[Any, float] = {}
        self.blocked: list[tuple[Any, asyncio.Future[None]]] = []
        self.subscriptions: list[Subscription] = []
        self.run_id = self.new_id()
        self.replication_id = self.new_id()

    def new_id(self) -> str:
        """A run id or replication id."""
        return f"{self._draw.getrandbits(160):040x}"

    @property
    def epoch(self) -> str:
        """The server epoch, as the scripts compute it."""
        return self.run_id + self.replication_id

    # -- what happens to it ----------------------------------------------------------------------------------

    def fsync(self) -> None:
        """What it has now survives a restart."""
        self.store.copy(self.database, self._disk)
        self._disk_expiries = dict(self.expiries)

    def stop(self) -> None:
        """It ends: its clients see the connection break."""
        self.up = False
        for _, waiter in self.blocked:
            if not waiter.done():
                waiter.set_exception(ConnectionError(f"{self.name}: connection closed"))
        self.blocked.clear()
        for subscription in self.subscriptions:
            subscription.fail()
        self.subscriptions.clear()

    def start(self, keeps: str) -> None:
        """It starts again with `all` it had, with what was on `disk`, or with `nothing`."""
        if keeps == "disk":
            self.store.copy(self._disk, self.database)
            self.expiries = dict(self._disk_expiries)
        elif keeps == "nothing":
            self.store.run(self.database, [("FLUSHDB",)])
            self.expiries.clear()
        self.known.clear()
        self.run_id, self.replication_id = self.new_id(), self.new_id()
        self.up = True

    def replicate_to(self, replica: "Server") -> None:
        """The replica has now what this server has."""
        self.store.copy(self.database, replica.database)
        replica.expiries = dict(self.expiries)
        replica.replication_id = self.replication_id

    # -- calls -----------------------------------------------------------------------------------------------

    def time_ms(self) -> int:
        """Its clock."""
        return self._clock.ms() + self.skew_ms

    def _break_at(self, script: SimulatedScript) -> int:
        """Which write of a call fails; 0: none."""
        if not self.breaks or not script.decides or self._draw.random() >= self.breaks:
            return 0
        return self._draw.choice((1, 2, 3, 5, 8, 13))

    def _raises(self, script: SimulatedScript, args: Sequence[Any]) -> bool:
        """Whether a script is to decide a poisoned command."""
        if not self.poisoned or not script.decides:
            return False
        packed = b"".join(one for one in args if isinstance(one, bytes))
        return any(name in packed for name in self.poisoned)

    def _expired(self) -> list[tuple[str, Any]]:
        if not self.expiries:
            return []
        due = [key for key, at in self.expiries.items() if at <= self._loop.now]
        for key in due:
            del self.expiries[key]
        return [("UNLINK", key) for key in due]

    def _script_of(self, args: Sequence[Any]) -> SimulatedScript | None:
        """The script that a command runs; None for another command."""
        if args[0] == "EVAL":
            return self.store.by_text[args[1]]
        return self.store.scripts[args[1]] if args[0] == "EVALSHA" else None

    def _refusal(self, args: Sequence[Any]) -> Exception | None:
        """The error with which this server refuses a command; None if it runs it."""
        if args[0] in ("FCALL", "FUNCTION"):
            # Servers here have no functions, so plain scripts run, whose texts this world changes.
            return ResponseError(f"unknown command '{args[0]}', with args beginning with: ")
        script = self._script_of(args)
        if script is None:
            is_refused = args[0] in _WRITING_COMMANDS and not self.is_master
            return ReadOnlyError("You can't write against a read only replica.") if is_refused else None
        if args[0] == "EVAL":
            self.known.add(script.sha)
        elif script.sha not in self.known:
            return NoScriptError("No matching script.")
        if script.writes and not self.is_master:
            return ReadOnlyError("You can't write against a read only replica.")
        if self._raises(script, args):
            return ResponseError("it is poisoned script: simulated, on @user_script:1.")
        return None

    def _in_order(self, name: str, reply: Any) -> Any:
        """The reply to a command, where a server's order is drawn or made the same on every server."""
        if name == "HRANDFIELD" and not isinstance(reply, Exception):
            return self._draw.choice(sorted(reply)) if reply else None
        if name == "SCAN" and not isinstance(reply, Exception):
            # A server has its keys in another order each time it starts.
            return [reply[0], sorted(reply[1])]
        return reply

    def carry_out(self, args: Sequence[Any], look: Sequence[tuple[Any, ...]] = ()) -> tuple[Any, Any, Any]:
        """Carries a command out; returns its reply (or error), what the first command of `look` reads before
        it, and what all read after it.
        """
        if (refusal := self._refusal(args)) is not None:
            return refusal, None, None
        script = self._script_of(args)
        command = list(args)
        if script is not None:
            command[:2] = ["EVALSHA", script.sha]
        if args[0] == "HRANDFIELD":
            command[0] = "HKEYS"
        micros = self._clock.micros() + self.skew_ms * 1_000
        batch: list[Sequence[Any]] = [*self._expired()]
        if script is not None:
            batch.append(
                (
                    "HSET", WORLD_KEY, "seconds", micros // 1_000_000, "micros", micros % 1_000_000,
                    "server", f"run_id:{self.run_id}", "replication", f"master_replid:{self.replication_id}",
                    "call_max", self.call_max, "break_at", self._break_at(script),
                )
            )  # fmt: skip
        first = len(batch)
        batch += look[:1]
        if self.is_full:
            batch.append(("CONFIG", "SET", "maxmemory", "1"))
        place = len(batch)
        batch.append(command)
        if self.is_full:
            batch.append(("CONFIG", "SET", "maxmemory", "0"))
        after = len(batch)
        batch += look
        expiring = None
        if (script is not None and script.expires) or args[0] in ("SET", "PEXPIRE"):
            expiring = args[3] if script is not None else args[1]
            batch += [("PTTL", expiring), ("PERSIST", expiring)]
        replies = self.store.run(self.database, batch)
        reply = replies[place]
        if expiring is not None:
            left_ms = replies[-2]
            if left_ms > 0:
                # Only a key that was just written has one; how much of it is left, real time would say.
                self.expiries[expiring] = self._loop.now + _lifetime_ms(script, args) / 1_000
            elif left_ms == -2:
                self.expiries.pop(expiring, None)
        reply = self._in_order(args[0], reply)
        if script is not None:
            if script.announces and not isinstance(reply, Exception):
                channel, data = self.store.announcement()
                for subscription in list(self.subscriptions):
                    subscription.announce(channel, data)
            if script.decides or script.name == "apply":
                self._wake_readers(args[4])
        return reply, replies[first : first + len(look[:1])], replies[after : after + len(look)]

    def _wake_readers(self, stream: Any) -> None:
        for entry in [one for one in self.blocked if one[0] == stream]:
            self.blocked.remove(entry)
            if not entry[1].done():
                entry[1].set_result(None)


class Subscription:
    """A connection that listens to channels of a server."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._server: Server | None = None
        self._channels: set[bytes] = set()
        self._messages: list[dict[str, Any]] = []
        self._failed = False
        self._more: asyncio.Future[None] | None = None

    async def __aenter__(self) -> "Subscription":
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._server is not None and self in self._server.subscriptions:
            self._server.subscriptions.remove(self)

    async def subscribe(self, *channels: str) -> None:
        """Subscribes to channels of the server that the client is connected to."""
        with self._client.swallowed_cancellations():
            await asyncio.sleep(self._client.delay())
        server = self._client.server
        if not server.up:
            raise ConnectionError(f"{server.name}: connection refused")
        self._server = server
        self._channels = {channel.encode() for channel in channels}
        server.subscriptions.append(self)

    def is_of(self, client: "Client") -> bool:
        """Whether it is a connection of this client."""
        return self._client is client

    def announce(self, channel: bytes, data: bytes) -> None:
        """A message was published at the server."""
        if channel in self._channels and not self._client.loses_announcement():
            message = {"type": "message", "channel": channel, "data": data}
            self._client.loop.call_at_world(self._client.delay(), self._arrive, message)

    def _arrive(self, message: dict[str, Any]) -> None:
        self._messages.append(message)
        self._wake()

    def fail(self) -> None:
        """The connection breaks."""
        self._failed = True
        self._wake()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)

    async def listen(self) -> AsyncIterator[dict[str, Any]]:
        """The messages, until the connection breaks."""
        while True:
            while self._messages:
                yield self._messages.pop(0)
            if self._failed:
                raise ConnectionError("connection closed")
            self._more = asyncio.get_running_loop().create_future()
            with self._client.swallowed_cancellations():
                await self._more


#: Called with each call that was executed: server, script, arguments, reply, what was read before it and
#: after it.
Observe = Callable[[Server, SimulatedScript, Sequence[Any], Any, Any, Any], None]


class Client(AsyncCoreCommands):  # type: ignore[misc]
    """What the code under test uses as its Redis client."""

    def __init__(
        self,
        name: str,
        server: Server,
        weather: Weather,
        loop: SimulatedLoop,
        draw: random.Random,
        trace: Trace,
        observe: Observe | None = None,
        before: Callable[[SimulatedScript, Sequence[Any]], bool] = lambda script, args: False,
    ) -> None:
        self.name = name
        self.server = server
        self.loop = loop
        #: How many of the replies to it are late.
        self.late = 0.0
        self._weather = weather
        self._draw = draw
        self._trace = trace
        self._observe = observe
        #: Called with each script and its command before it is sent; says whether something may happen first.
        self._before = before

    def delay(self) -> float:
        """Seconds that a message is on its way."""
        return self._weather.delay(self._draw)

    def loses_announcement(self) -> bool:
        """Whether a message to a subscriber is lost."""
        return self._draw.random() < self._weather.announcement_lost

    def pubsub(self) -> Subscription:
        """A connection to listen on."""
        return Subscription(self)

    def pipeline(self, transaction: bool = True) -> "Pipeline":
        """Several commands in one request."""
        del transaction
        return Pipeline(self)

    async def aclose(self) -> None:
        """Nothing to close."""

    async def initialize(self) -> "Client":
        """Nothing to initialise."""
        return self

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Sends a command, and returns its reply."""
        options.pop("keys", None)
        block_seconds = 0.0
        if args[0] == "XREAD" and b"BLOCK" in args:
            place = args.index(b"BLOCK")
            block_seconds = int(args[place + 1]) / 1_000
            args = (*args[:place], *args[place + 2 :])
        server = self.server
        until = self.loop.now + block_seconds
        if not block_seconds:
            return self._parsed(args, await self._call(server, args), options)
        while True:
            # It counts as blocked from the beginning, so that nothing is missed on the way of an empty reply.
            waiter = self.loop.create_future()
            waiter.add_done_callback(lambda future: future.cancelled() or future.exception())
            entry = (args[-2], waiter)
            server.blocked.append(entry)
            try:
                reply = await self._call(server, args)
                if reply or self.loop.now >= until:
                    return self._parsed(args, reply, options)
                with self.swallowed_cancellations(), contextlib.suppress(asyncio.TimeoutError):
                    async with asyncio.timeout_at(until):
                        await waiter
            finally:
                if entry in server.blocked:
                    server.blocked.remove(entry)

    def _parsed(self, args: Sequence[Any], reply: Any, options: dict[str, Any]) -> Any:
        name = args[0]
        return self.server.store.parsed(name, reply, options)

    async def _call(self, server: Server, args: Sequence[Any]) -> Any:
        if args[0] == "EVALSHA" and self._before(server.store.scripts[args[1]], args):
            # The fault begins in the next round; what is paused or killed by it sends nothing.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        replied = self.loop.create_future()
        # What was sent arrives, whatever becomes of its sender.
        self.loop.call_at_world(self.delay(), self._arrive, server, args, replied)
        with self.swallowed_cancellations():
            return await replied

    async def call_each(self, commands: Sequence[tuple[Sequence[Any], dict[str, Any]]]) -> list[Any]:
        """Sends commands in one request, which is on its way, and may be lost, as a whole; returns the reply
        or the error of each.
        """
        replied = self.loop.create_future()
        self.loop.call_at_world(self.delay(), self._arrive_together, self.server, commands, replied)
        with self.swallowed_cancellations():
            replies = await replied
        return [
            reply if isinstance(reply, Exception) else self._parsed(args, reply, options)
            for (args, options), reply in zip(commands, replies, strict=True)
        ]

    @contextlib.contextmanager
    def swallowed_cancellations(self) -> Iterator[None]:
        """Inside the block, a cancellation may look like a lost connection, as in redis-py."""
        try:
            yield
        except asyncio.CancelledError:
            if self._draw.random() >= self._weather.swallowed:
                raise
            self._trace.add(self.name, "the client of Redis swallows a cancellation")
            raise ConnectionError("cancelled while it was sending") from None

    def _arrive_together(
        self,
        server: Server,
        commands: Sequence[tuple[Sequence[Any], dict[str, Any]]],
        replied: "asyncio.Future[Any]",
    ) -> None:
        weather, draw, count = self._weather, self._draw, len(commands)
        if not server.up:
            return self._reply(replied, ConnectionError(f"{server.name}: connection refused"))
        if weather.request_lost and draw.random() < weather.request_lost:
            self._trace.add("redis", f"{server.name}: {count} commands of {self.name} are lost")
            return self._lose(replied)
        replies = [server.carry_out(args)[0] for args, _ in commands]
        for (args, _), reply in zip(commands, replies, strict=True):
            said = repr(reply) if isinstance(reply, Exception) else _short(reply)
            self._trace.add("redis", f"{server.name}: {self.name}: {_words(server, args)} -> {said}")
        if weather.reply_lost and draw.random() < weather.reply_lost:
            self._trace.add("redis", f"{server.name}: {count} replies to {self.name} are lost")
            return self._lose(replied)
        return self._reply(replied, replies)

    def _arrive(self, server: Server, args: Sequence[Any], replied: "asyncio.Future[Any]") -> None:
        weather, draw, words = self._weather, self._draw, _words(server, args)
        if not server.up:
            return self._reply(replied, ConnectionError(f"{server.name}: connection refused"))
        if weather.request_lost and draw.random() < weather.request_lost:
            self._trace.add("redis", f"{server.name}: a request of {self.name} is lost ({words})")
            return self._lose(replied)
        script = server.store.scripts.get(args[1]) if args[0] == "EVALSHA" else None
        if args[0] == "EVAL":
            # The first call of a script at a server.
            script = server.store.by_text[args[1]]
        look: tuple[tuple[Any, ...], ...] = ()
        if script is not None and script.decides and self._observe:
            look = (
                ("HMGET", args[3], "seq", "server_epoch"),
                ("XREVRANGE", args[4], "+", "-", "COUNT", ENTRIES_OF_CALL_MAX),
            )
        reply, before, after = server.carry_out(args, look)
        if script is not None and self._observe is not None and before:
            self._observe(server, script, args, reply, before, after)
        if args[0] not in ("HMGET", "XREAD") and (script is None or script.writes):
            decides = script is not None and script.decides
            said = repr(reply) if isinstance(reply, Exception) else _short(reply, decides)
            self._trace.add("redis", f"{server.name}: {self.name}: {words} -> {said}")
        if weather.reply_lost and draw.random() < weather.reply_lost:
            self._trace.add("redis", f"{server.name}: the reply to {self.name} is lost ({words})")
            return self._lose(replied)
        return self._reply(replied, reply)

    def _lose(self, replied: "asyncio.Future[Any]") -> None:
        if self._draw.random() < 0.7:
            self._reply(replied, self._draw.choice(GONE)())
        else:
            error = TimeoutError("timeout reading from the server")
            self.loop.call_at_world(SOCKET_TIMEOUT_SECONDS, _set, replied, error)

    def _reply(self, replied: "asyncio.Future[Any]", reply: Any) -> None:
        delay = self.delay()
        if self.late and self._draw.random() < self.late:
            late = self._draw.uniform(0.05, LATE_SECONDS_MAX)
            self._trace.add("redis", f"a reply to {self.name} is late by {late:.2f} s")
            delay += late
        self.loop.call_at_world(delay, _set, replied, reply)


class Pipeline(AsyncCoreCommands):  # type: ignore[misc]
    """Commands that are sent together, and executed one after the other, with nothing in between."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._commands: list[tuple[Sequence[Any], dict[str, Any]]] = []

    async def __aenter__(self) -> "Pipeline":
        return self

    async def __aexit__(self, *error: object) -> None:
        self._commands.clear()

    def execute_command(self, *args: Any, **options: Any) -> "Pipeline":
        """Adds a command."""
        options.pop("keys", None)
        self._commands.append((args, options))
        return self

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Sends the commands, and returns their replies; raises the first error among them, or returns each
        in the place of its reply.
        """
        client, commands = self._client, self._commands
        self._commands = []
        if not raise_on_error:
            return await client.call_each(commands)
        await asyncio.sleep(client.delay())
        server = client.server
        if not server.up:
            raise ConnectionError(f"{server.name}: connection refused")
        replies = [server.carry_out(args)[0] for args, _ in commands]
        await asyncio.sleep(client.delay())
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return [
            server.store.parsed(args[0], reply, options)
            for (args, options), reply in zip(commands, replies, strict=True)
        ]


def _lifetime_ms(script: SimulatedScript | None, args: Sequence[Any]) -> int:
    """The time to live that a command gives its key."""
    if script is not None:
        arguments = args[3 + int(args[2]) :]
        return int(arguments[{"lease": 1, "pass_lease": 2, "stage": 3}[script.name]])
    return int(args[2] if args[0] == "PEXPIRE" else args[list(args).index("PX") + 1])


def _set(future: "asyncio.Future[Any]", reply: Any) -> None:
    if future.done():
        return
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


def _words(server: Server, args: Sequence[Any]) -> str:
    if args[0] in ("EVALSHA", "EVAL"):
        script = server.store.scripts.get(args[1]) or server.store.by_text.get(args[1])
        tag = str(args[3]).rpartition("}")[0].rpartition("-")[2]
        return f"{script.name if script else '?'} {tag}"
    return " ".join(str(one) for one in args[:2])[:70]


def _short(reply: Any, decides: bool = False) -> str:
    text = (_decided(reply) if decides and isinstance(reply, bytes) else None) or repr(reply)
    return text if len(text) <= 70 else f"{text[:67]}..."


def _decided(reply: bytes) -> str | None:
    """The reply of a script that decides commands, in words: outcomes with the seqs of their events. None
    for replies without outcomes, such as those of a sweep.
    """
    decoded = msgspec.msgpack.decode(reply)
    match decoded:
        case [0, _, [[int(), *_], *_] as rows]:
            pass
        case [int(code), _, str(message)] if code in OUTCOME_NAMES:
            return f"{OUTCOME_NAMES[code]}: {message}"
        case _:
            return None
    return ", ".join(f"{OUTCOME_NAMES[row[0]]}@{row[1]}" if row[1] else OUTCOME_NAMES[row[0]] for row in rows)
