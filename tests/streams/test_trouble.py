"""What the loss of a server can raise, in whatever library's words, is tried again by every role; an error of
our own ends the process.
"""

import asyncio
import http.client
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import aiokafka.errors
import hiredis
import psycopg
import pytest
import redis.asyncio
import redis.exceptions
import uvloop

from grabstream.lua.gate.calls import GateLimits
from grabstream.lua.gate.decided import DecidedAnswers
from grabstream.lua.gate.door import Gate
from grabstream.lua.gate.journaled import Journaled
from grabstream.lua.gate.queue import OutcomeUnknown
from grabstream.lua.gate.refusals import RefusalLog
from grabstream.lua.keys import KeySpace
from grabstream.lua.trouble import is_trouble
from grabstream.models.answers import Answer
from grabstream.ops.services import free_ports
from grabstream.ops.settings import Settings, is_cluster
from grabstream.streams.deciding import decider, sweeper
from grabstream.streams.deciding.decider import Decider
from grabstream.streams.deciding.sweeper import Sweeper
from grabstream.streams.projecting import verifier
from grabstream.streams.projecting.verifier import Verifier
from grabstream.streams.relaying import leases as keeper
from grabstream.streams.relaying import relay
from grabstream.streams.relaying.leases import LeaseKeeper
from grabstream.streams.relaying.relay import ShardRelay
from grabstream.streams.topics import Topics
from tests.conftest import Worker, until
from tests.drill.switch import Switch
from tests.lua.conftest import SEALER, grabs

HANDLER_CLOSED = (
    "unable to perform operation on <TCPTransport closed=True reading=False 0x55d0c8>; the handler is closed"
)

TROUBLE: dict[str, Callable[[], BaseException]] = {
    "uvloop's closed handler": lambda: RuntimeError(HANDLER_CLOSED),
    "asyncio's closed transport": lambda: RuntimeError("Cannot write: the transport is closed"),
    "Redis is away": lambda: redis.exceptions.ConnectionError("Connection closed by server."),
    "Redis is slow": lambda: redis.exceptions.TimeoutError("Timeout reading from socket"),
    "Redis loads": lambda: redis.exceptions.BusyLoadingError("LOADING"),
    "a master that is none": lambda: redis.exceptions.ReadOnlyError("READONLY"),
    "a cluster that is down": lambda: redis.exceptions.ClusterDownError("CLUSTERDOWN The cluster is down"),
    "a cluster without a server": lambda: redis.exceptions.RedisClusterException("cannot be connected"),
    "a slot without a server": lambda: redis.exceptions.SlotNotCoveredError("slot 1"),
    "half a reply": lambda: redis.exceptions.InvalidResponse("Protocol Error"),
    "hiredis": lambda: hiredis.ProtocolError("bad byte"),
    "Kafka is away": lambda: aiokafka.errors.KafkaConnectionError("no broker"),
    "a stopped consumer": lambda: aiokafka.errors.ConsumerStoppedError(),
    "no leader": lambda: aiokafka.errors.NotLeaderForPartitionError(),
    "a fenced producer": lambda: aiokafka.errors.OutOfOrderSequenceNumber(),
    "PostgreSQL is away": lambda: psycopg.OperationalError("server closed the connection unexpectedly"),
    "a closed connection": lambda: psycopg.InterfaceError("the connection is closed"),
    "PostgreSQL gave us up": lambda: psycopg.errors.IdleInTransactionSessionTimeout("terminated"),
    "PostgreSQL stops": lambda: psycopg.errors.AdminShutdown("terminating connection"),
    "reset": lambda: ConnectionResetError(104, "Connection reset by peer"),
    "a broken pipe": lambda: BrokenPipeError(32, "Broken pipe"),
    "no route": lambda: OSError(113, "No route to host"),
    "a name that is not found": lambda: socket.gaierror(-2, "Name or service not known"),
    "a time-out": lambda: TimeoutError(),
    "half a read": lambda: asyncio.IncompleteReadError(b"", 4),
    "TLS": lambda: ssl.SSLError(1, "record layer failure"),
    "a cancellation of the client's own": lambda: asyncio.CancelledError(),
    "several at once": lambda: ExceptionGroup("tasks",
    [ConnectionResetError(), RuntimeError(HANDLER_CLOSED)]),
}  # fmt: skip

OUR_OWN: dict[str, Callable[[], BaseException]] = {
    "a wrong type": lambda: TypeError("unsupported operand"),
    "a wrong value": lambda: ValueError("invalid literal"),
    "a missing key": lambda: KeyError(0),
    "a RuntimeError of ours": lambda: RuntimeError("the tasks of shard 3 ended"),
    "a missing attribute": lambda: AttributeError("'NoneType' object has no attribute 'seq'"),
    "SQL that is wrong": lambda: psycopg.errors.UndefinedColumn("column x does not exist"),
    "SQL that is refused": lambda: psycopg.errors.UniqueViolation("duplicate key"),
    "an argument that Redis' client refuses": lambda: redis.exceptions.DataError(
        "Invalid input of type: 'dict'"
    ),
    "one of several": lambda: ExceptionGroup("tasks", [ConnectionResetError(), KeyError(0)]),
    "HTTP": lambda: http.client.InvalidURL("no URL"),
}


@pytest.mark.parametrize("words", TROUBLE)
async def test_what_a_server_s_loss_raises_is_trouble(words: str) -> None:
    assert is_trouble(TROUBLE[words]())


@pytest.mark.parametrize("words", OUR_OWN)
async def test_an_error_of_ours_is_none(words: str) -> None:
    assert not is_trouble(OUR_OWN[words]())


async def test_our_own_cancellation_is_no_trouble() -> None:
    said: list[bool] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            said.append(is_trouble(error))
            raise

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert said == [False]


async def test_an_accident_inside_a_client_is_trouble_and_one_of_ours_is_not() -> None:
    """A client that meets a connection which another task closed raises what Python raises; where it was
    raised tells them apart.
    """
    connection = redis.asyncio.Connection(port=1)
    with pytest.raises(Exception) as inside:
        connection._writer = object()  # type: ignore[assignment]
        await connection.send_packed_command([b"PING"], check_health=False)
    assert is_trouble(inside.value)
    with pytest.raises(AttributeError) as ours:
        connection._writer.drain  # type: ignore[union-attr]  # noqa: B018
    assert not is_trouble(ours.value)


def test_uvloop_says_it_in_these_words() -> None:
    """Its word for a connection that is gone, as it really comes."""

    async def use_after_closing() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.transport.abort()
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="handler is closed") as gone:
            writer.transport.set_write_buffer_limits(high=1)
            writer.transport.pause_reading()
            writer.transport.get_extra_info("socket")
            writer.transport._ensure_alive()
        assert is_trouble(gone.value)
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(use_after_closing())


# -- each role -----------------------------------------------------------------------------------------------


class Failing:
    """A client of Redis of which everything raises the same, until it is well."""

    def __init__(self, make: Callable[[], BaseException], well: Any = None) -> None:
        self._make = make
        self.well = well
        self.raised = 0

    def _raise(self) -> None:
        self.raised += 1
        raise self._make()

    async def execute_command(self, *words: Any, **rest: Any) -> Any:
        self._raise()

    def pubsub(self) -> Any:
        self._raise()

    def __getattr__(self, name: str) -> Any:
        async def command(*words: Any, **rest: Any) -> Any:
            self._raise()

        return command


async def goes_on(work: Awaitable[Any], failing: Failing) -> None:
    """It is still there after it has met its client's words several times."""
    task = asyncio.ensure_future(work)
    await until(lambda: failing.raised >= 3 or task.done(), 20, "a third try")
    assert not task.done(), task.exception() if not task.cancelled() else "cancelled"
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.done()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No long pauses."""
    monkeypatch.setattr(sweeper, "SWEEP_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(relay, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(relay, "RETRY_SECONDS_MAX", 0.02)
    monkeypatch.setattr(decider, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(decider, "RETRY_SECONDS_MAX", 0.02)
    monkeypatch.setattr(verifier, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr("grabstream.lua.gate.journaled.LOOK_EVERY_SECONDS", 0.01)
    monkeypatch.setattr("grabstream.lua.gate.decided.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("grabstream.lua.gate.refusals.FLUSH_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(keeper, "RENEWALS_PER_LEASE", 100)


KEYS = KeySpace("trouble", 2)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("words", TROUBLE)
async def test_sweeper_keeper_and_gate_go_on(words: str) -> None:
    failing = Failing(TROUBLE[words])

    async def record(shard: int, rows: Any) -> None:
        pytest.fail("there is nothing to record")

    await goes_on(Sweeper(failing, KEYS.shard(0), 2, 5_000, record).run(), failing)
    failing = Failing(TROUBLE[words])
    await goes_on(LeaseKeeper(failing, KEYS, 1_000, lambda shard: []).run(asyncio.Event()), failing)
    failing = Failing(TROUBLE[words])
    journaled = Journaled(failing, KEYS)
    journaled.start()
    await goes_on(journaled.wait(0, 1, 1), failing)
    failing = Failing(TROUBLE[words])
    decided = DecidedAnswers(failing, KEYS, journaled)
    [command] = grabs(1)
    await goes_on(decided._kept_of(0, command), failing)
    await journaled.close()
    failing = Failing(TROUBLE[words])
    gate = Gate(failing, KEYS, SEALER, GateLimits(timeout_ms=150))
    with pytest.raises(OutcomeUnknown):
        await gate.decide(grabs(1), "decided")
    await gate.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("words", TROUBLE)
async def test_relay_decider_and_verifier_go_on(
    words: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever meets their servers first."""
    failing = Failing(TROUBLE[words])

    class NoClient:
        def __init__(self, *words: Any, **rest: Any) -> None:
            self._closed = True

        def assign(self, partitions: Any) -> None: ...

        def subscribe(self, topics: Any, listener: Any) -> None: ...

        async def start(self) -> None:
            failing._raise()

        async def stop(self) -> None: ...

    for module in (relay, decider):
        monkeypatch.setattr(module, "AIOKafkaProducer", NoClient)
        monkeypatch.setattr(module, "AIOKafkaConsumer", NoClient)
    await goes_on(ShardRelay(None, KEYS.shard(0), 2, "-", "journal", SEALER).run(), failing)
    failing.raised = 0
    gate = Gate(failing, KEYS, SEALER)
    await goes_on(Decider(gate, "-", Topics("trouble"), 2).run(asyncio.Event()), failing)
    failing.raised = 0

    async def connect(*words: Any, **rest: Any) -> Any:
        failing._raise()

    monkeypatch.setattr(verifier.AsyncConnection, "connect", connect)
    await goes_on(Verifier(failing, KEYS, "-", "trouble", 0.5).run(asyncio.Event()), failing)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("words", TROUBLE)
async def test_refusals_wait_to_be_written(words: str) -> None:
    failing = Failing(TROUBLE[words])

    async def write(rows: Any) -> None:
        failing._raise()

    refusals = RefusalLog(write)
    refusals.take(grabs(1), [Answer("e-g0", "sold_out", 32, "e")])
    await goes_on(refusals.run(), failing)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("words", ["a wrong type", "a RuntimeError of ours", "a missing attribute"])
async def test_an_error_of_ours_is_raised_by_each_role(words: str) -> None:
    for work in (
        lambda client: Sweeper(client, KEYS.shard(0), 2, 5_000).run(),
        lambda client: LeaseKeeper(client, KEYS, 1_000, lambda shard: []).run(asyncio.Event()),
        lambda client: Gate(client, KEYS, SEALER).decide(grabs(1), "decided"),
    ):
        with pytest.raises((type(OUR_OWN[words]()), ExceptionGroup)):  # the sweeper's two tasks are a group
            await asyncio.wait_for(work(Failing(OUR_OWN[words])), 5)


async def test_a_worker_waits_for_a_server_that_is_being_started(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    """It says so, goes on when the server answers, and ends at once when it is told to while it waits."""
    if is_cluster(system.redis_url):
        pytest.skip("one server stands behind the switch; a cluster names its servers by other ports")
    late, never = free_ports(2)
    redis_port = urlsplit(system.redis_url).port
    assert redis_port is not None
    switch = Switch(redis_port)
    waiting, ended = (
        worker(system.model_copy(update={"redis_url": f"redis://127.0.0.1:{port}/0"}), "sweep")
        for port in (late, never)
    )
    try:
        for one in (waiting, ended):
            await until(
                lambda one=one: "trying again" in one.log.read_text(), 60, "its word that a server is away"
            )
        assert ended.stop() == 0
        await switch.start(late)
        await until(lambda: " playing " in waiting.log.read_text(), 60, "its start")
        assert waiting.process.poll() is None
    finally:
        waiting.kill()
        await switch.close()
