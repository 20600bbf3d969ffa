"""Every role tries again after any exception that the loss of a server can raise, from any library; a program
error ends the process.
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

from grabstream.gate.calls import GateLimits
from grabstream.gate.decided import DecidedAnswers
from grabstream.gate.gate import Gate
from grabstream.gate.journaled import Journaled
from grabstream.gate.refusals import RefusalLog
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.runtime.trouble import is_trouble
from grabstream.settings import Settings, is_cluster
from grabstream.streams.deciding import decider, sweeper
from grabstream.streams.deciding.decider import Decider
from grabstream.streams.deciding.sweeper import Sweeper
from grabstream.streams.projecting import verifier
from grabstream.streams.projecting.verifier import Verifier
from grabstream.streams.relaying import leases as keeper
from grabstream.streams.relaying import relay
from grabstream.streams.relaying.leases import Leases
from grabstream.streams.relaying.relay import ShardRelay
from grabstream.streams.topics import Topics
from grabstream.workshop.services import free_ports
from tests.conftest import Worker, until
from tests.drill.switch import Switch
from tests.support.shards import SEALER, grabs

HANDLER_CLOSED = (
    "unable to perform operation on <TCPTransport closed=True reading=False 0x55d0c8>; the handler is closed"
)

TROUBLE: dict[str, Callable[[], BaseException]] = {
    "uvloop's closed handler": lambda: RuntimeError(HANDLER_CLOSED),
    "asyncio's closed transport": lambda: RuntimeError("Cannot write: the transport is closed"),
    "Redis is away": lambda: redis.exceptions.ConnectionError("Connection closed by server."),
    "Redis is slow": lambda: redis.exceptions.TimeoutError("Timeout reading from socket"),
    "Redis loads": lambda: redis.exceptions.BusyLoadingError("LOADING"),
    "a master that became a replica": lambda: redis.exceptions.ReadOnlyError("READONLY"),
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
    "PostgreSQL ended an idle session": lambda: psycopg.errors.IdleInTransactionSessionTimeout("terminated"),
    "PostgreSQL stops": lambda: psycopg.errors.AdminShutdown("terminating connection"),
    "reset": lambda: ConnectionResetError(104, "Connection reset by peer"),
    "a broken pipe": lambda: BrokenPipeError(32, "Broken pipe"),
    "no route": lambda: OSError(113, "No route to host"),
    "a name that is not found": lambda: socket.gaierror(-2, "Name or service not known"),
    "a time-out": lambda: TimeoutError(),
    "half a read": lambda: asyncio.IncompleteReadError(b"", 4),
    "TLS": lambda: ssl.SSLError(1, "record layer failure"),
    "a cancellation inside the client": lambda: asyncio.CancelledError(),
    "several at once": lambda: ExceptionGroup("tasks",
    [ConnectionResetError(), RuntimeError(HANDLER_CLOSED)]),
}  # fmt: skip

#: One of each kind that some code on the way to `is_trouble` catches itself.
KINDS = (
    "uvloop's closed handler", "Redis is away", "Redis is slow", "a master that became a replica",
    "a cluster that is down", "a cluster without a server", "Kafka is away", "PostgreSQL is away", "reset",
    "a time-out", "a cancellation inside the client", "several at once",
)  # fmt: skip

PROGRAM_ERRORS: dict[str, Callable[[], BaseException]] = {
    "a wrong type": lambda: TypeError("unsupported operand"),
    "a wrong value": lambda: ValueError("invalid literal"),
    "a missing key": lambda: KeyError(0),
    "a RuntimeError of this program": lambda: RuntimeError("the tasks of shard 3 ended"),
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
async def test_errors_of_a_lost_server_are_trouble(words: str) -> None:
    assert is_trouble(TROUBLE[words]())


@pytest.mark.parametrize("words", PROGRAM_ERRORS)
async def test_program_errors_are_not_trouble(words: str) -> None:
    assert not is_trouble(PROGRAM_ERRORS[words]())


async def test_a_cancellation_of_the_task_is_not_trouble() -> None:
    verdicts: list[bool] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            verdicts.append(is_trouble(error))
            raise

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert verdicts == [False]


async def test_an_error_raised_inside_a_client_is_trouble() -> None:
    """A client whose connection was closed by another task may raise any Python exception. The module that
    raised it distinguishes it from a program error.
    """
    connection = redis.asyncio.Connection(port=1)
    with pytest.raises(Exception) as inside:
        connection._writer = object()  # type: ignore[assignment]
        await connection.send_packed_command([b"PING"], check_health=False)
    assert is_trouble(inside.value)
    with pytest.raises(AttributeError) as in_program:
        connection._writer.drain  # type: ignore[union-attr]  # noqa: B018
    assert not is_trouble(in_program.value)
    connection._writer = None  # its destructor would close the object


def test_uvloop_raises_its_error_of_a_closed_handler() -> None:
    """The real exception of uvloop for a closed connection."""

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
    """A Redis client whose commands all raise the same exception."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self._make = make
        self.raised = 0

    def _raise(self) -> None:
        self.raised += 1
        raise self._make()

    async def execute_command(self, *words: Any, **rest: Any) -> Any:
        self._raise()

    def pubsub(self) -> Any:
        self._raise()

    def pipeline(self, **rest: Any) -> Any:
        self._raise()

    def __getattr__(self, name: str) -> Any:
        async def command(*words: Any, **rest: Any) -> Any:
            self._raise()

        return command


async def assert_continues(work: Awaitable[Any], failing: Failing) -> None:
    """Asserts that a task still runs after its client has raised three times; then cancels it."""
    task = asyncio.ensure_future(work)
    await until(lambda: failing.raised >= 3 or task.done(), 20, "a third try")
    assert not task.done(), task.exception() if not task.cancelled() else "cancelled"
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    assert task.done()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens all pauses."""
    monkeypatch.setattr(sweeper, "SWEEP_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(relay, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(relay, "RETRY_SECONDS_MAX", 0.02)
    monkeypatch.setattr(decider, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(decider, "RETRY_SECONDS_MAX", 0.02)
    monkeypatch.setattr(verifier, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr("grabstream.gate.journaled.POLL_EVERY_SECONDS", 0.01)
    monkeypatch.setattr("grabstream.gate.decided.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("grabstream.gate.refusals.FLUSH_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(keeper, "RENEWALS_PER_LEASE", 100)


KEYS = KeySpace("trouble", 2)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("words", KINDS)
async def test_sweeper_leases_and_gate_continue_after_trouble(words: str) -> None:
    failing = Failing(TROUBLE[words])

    async def record(shard: int, rows: Any) -> None:
        pytest.fail("there is nothing to record")

    await assert_continues(Sweeper(failing, KEYS.shard(0), 2, 5_000, record).run(), failing)
    failing = Failing(TROUBLE[words])
    await assert_continues(Leases(failing, KEYS, 1_000, lambda shard: []).run(asyncio.Event()), failing)
    failing = Failing(TROUBLE[words])
    journaled = Journaled(failing, KEYS)
    journaled.start()
    await assert_continues(journaled.wait(0, 1, 1), failing)
    failing = Failing(TROUBLE[words])
    decided = DecidedAnswers(failing, KEYS, journaled)
    await assert_continues(decided._read(KEYS.shard(0).state, "history"), failing)
    await journaled.close()
    failing = Failing(TROUBLE[words])
    gate = Gate(failing, KEYS, SEALER, GateLimits(timeout_ms=150))
    with pytest.raises(OutcomeUnknown):
        await gate.decide(grabs(1), "decided")
    await gate.close()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("words", KINDS)
async def test_relay_decider_and_verifier_continue_after_trouble(
    words: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With clients that fail at their first contact with a server."""
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
    await assert_continues(ShardRelay(None, KEYS.shard(0), 2, "-", "journal", SEALER).run(), failing)
    failing.raised = 0
    gate = Gate(failing, KEYS, SEALER)
    await assert_continues(Decider(gate, "-", Topics("trouble"), 2).run(asyncio.Event()), failing)
    failing.raised = 0

    async def connect(*words: Any, **rest: Any) -> Any:
        failing._raise()

    monkeypatch.setattr(verifier.AsyncConnection, "connect", connect)
    await assert_continues(Verifier(failing, KEYS, "-", "trouble", 0.5).run(asyncio.Event()), failing)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("words", KINDS)
async def test_refusals_are_kept_until_they_can_be_written(words: str) -> None:
    failing = Failing(TROUBLE[words])

    async def write(rows: Any) -> None:
        failing._raise()

    refusals = RefusalLog({"books": write})
    refusals.take(grabs(1), [Answer("e-g0", "sold_out", 32, "e")])
    await assert_continues(refusals.run(), failing)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("words", ["a wrong type", "a RuntimeError of this program", "a missing attribute"])
async def test_a_program_error_is_raised_by_each_role(words: str) -> None:
    for work in (
        lambda client: Sweeper(client, KEYS.shard(0), 2, 5_000).run(),
        lambda client: Leases(client, KEYS, 1_000, lambda shard: []).run(asyncio.Event()),
        lambda client: Gate(client, KEYS, SEALER).decide(grabs(1), "decided"),
    ):
        with pytest.raises(
            (type(PROGRAM_ERRORS[words]()), ExceptionGroup)
        ):  # the sweeper's two tasks are a group
            await asyncio.wait_for(work(Failing(PROGRAM_ERRORS[words])), 60)


@pytest.mark.long
async def test_a_worker_waits_for_a_server_that_is_being_started(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    """It logs that the server is missing, continues when the server answers, and ends at once when it is
    stopped while it waits.
    """
    if is_cluster(system.redis_url):
        pytest.skip("the switch forwards to one server; a cluster names its servers by other ports")
    late, never = free_ports(2)
    redis_port = urlsplit(system.redis_url).port
    assert redis_port is not None
    switch = Switch(redis_port)
    waiting, ended = (
        worker(system.model_copy(update={"redis_url": f"redis://127.0.0.1:{port}/0"}), "relay,sweep")
        for port in (late, never)
    )
    try:
        for process in (waiting, ended):
            await until(
                lambda process=process: "trying again" in process.log.read_text(), 60, "the log of its wait"
            )
        assert ended.stop() == 0
        await switch.start(late)
        await until(lambda: " playing " in waiting.log.read_text(), 60, "the start of its roles")
        assert waiting.process.poll() is None
    finally:
        waiting.kill()
        await switch.close()
