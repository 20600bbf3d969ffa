"""The Faust app: one agent for each read model, all on the journal.

An agent passes each record to its projector and raises nothing, because Faust acknowledges a record whose
agent failed. Faust's committed offsets are hints: the position of a read model is its cursor. So Faust
decides which process reads which partition, and after every assignment the projectors catch up by themselves.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final

import faust
from faust.sensors import Monitor
from faust.transport.drivers import aiokafka as faust_kafka
from faust.utils.urls import urllist
from mode import Service
from mode.utils.futures import maybe_async

from grabstream.lua.ending import end
from grabstream.lua.trouble import is_trouble
from grabstream.projections.definitions import definition_of
from grabstream.projections.read_models import READ_MODELS
from grabstream.streams.brokers import Brokers, faust_credentials
from grabstream.streams.clients import FETCHER_IDLE_MS, close
from grabstream.streams.journal import Record
from grabstream.streams.measures import WorkerMeasures
from grabstream.streams.projecting.projector import CatchUp, Projector
from grabstream.streams.projecting.publisher import Publisher, event_source
from grabstream.streams.projecting.watchdog import Assignment, until_stalled
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

PROJECTIONS: Final = ("ledger", "balances", "audit", "events")
_APPLY: Final = {name: model.apply for name, model in READ_MODELS.items()}
STOP_SECONDS: Final = 8.0
STEADY_SECONDS: Final = 30.0
ENDS_IN_A_ROW_MAX: Final = 60
PAUSE_SECONDS_MAX: Final = 5.0
LEFT_APP_PAUSE_SECONDS: Final = 5.0
#: How often Faust looks whether there are offsets to commit, and after 2.5 times this whether partitions
#: move, which it only logs. After a crash, records of this time are read again and ignored.
COMMIT_SECONDS: Final = 5.0
#: How long Faust waits for records before it asks again.
POLL_SECONDS: Final = 30.0
#: How long Faust's client waits for a request: longer than the 60 s that it allows a rebalance.
REQUEST_SECONDS: Final = 90.0
#: The number of apps of this process that did not stop when asked.
_apps_left = 0

Step = Callable[[str], None]


def make_projectors(
    kafka: str, prefix: str, shards: int, postgres: str, schema: str, names: Sequence[str] = PROJECTIONS,
    step: Step = lambda name: None, measures: WorkerMeasures | None = None,
) -> list[Projector]:  # fmt: skip
    """The projectors of these read models; not connected yet."""
    topics, measured = Topics(prefix), (measures or WorkerMeasures()).projections
    where: dict[str, Any] = {"postgres": postgres, "schema": schema, "journal": topics.journal, "step": step}
    return [
        Publisher(
            kafka=kafka, events=topics.events, shards=shards, source=event_source(prefix),
            measures=measured[name], **where,
        )
        if name == "events"
        else Projector(name=name, apply=_APPLY[name], kafka=kafka, measures=measured[name], **where)
        for name in names
    ]  # fmt: skip


def group_of(prefix: str, names: Sequence[str]) -> str:
    """The consumer group for a set of read models; its members share the partitions.

    Workers that write other versions are in another group. Otherwise each version would get the events of
    some partitions only.
    """
    names = [f"{name}:{definition_of(name).number}" if name in READ_MODELS else name for name in names]
    return f"{prefix}.{'-'.join(names)}"


async def _at_once() -> None:
    """Returns at once: there is nothing to wait for."""


class _ConsumerService(faust_kafka.AIOKafkaConsumerThread):  # type: ignore[misc]
    """Faust's client of Kafka in the event loop of the app. Faust would run it in a thread of its own, which
    wakes up several times a second to pass on calls, and competes with this one for the interpreter.
    """

    wait_for_shutdown = False

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, thread_loop=consumer.loop, **options)
        #: The poll that waits for records, if any.
        self._polling: asyncio.Timeout | None = None

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        # Faust has no setting for `consumer_timeout_ms`.
        consumer._consumer_timeout = FETCHER_IDLE_MS / 1000
        return consumer

    async def getmany(self, active_partitions: Any, timeout: float) -> Any:
        """Returns records as soon as there are any: at the latest after POLL_SECONDS, or when Faust stops or
        continues to take records. (Faust would ask every second.)
        """
        records: Any = {}
        polling = self._polling = asyncio.timeout(None)
        try:
            async with polling:
                # Cancelled, it takes no records.
                records = await super().getmany(active_partitions, POLL_SECONDS)
        except TimeoutError:
            if not polling.expired():
                raise
        finally:
            self._polling = None
        return records

    def end_poll(self) -> None:
        """Ends the poll that waits for records, if any."""
        if self._polling is not None and not self._polling.expired():
            self._polling.reschedule(0)

    async def call_thread(self, call: Any, *arguments: Any, **options: Any) -> Any:
        """Calls a method of the client: there is no thread to pass it to."""
        return await maybe_async(call(*arguments, **options))

    async def start(self) -> None:
        """Starts the client; raises its errors."""
        self._thread_started.set()
        await self._default_start()

    async def on_stop(self) -> None:
        """Stops the client, whose broker may never answer."""
        if self._consumer is not None:
            await close(self._consumer.stop())

    async def crash(self, reason: BaseException) -> None:
        """Ends the app."""
        await Service.crash(self, reason)

    def _stopped_set(self) -> None:
        self._stopped.set()

    def set_shutdown(self) -> None:
        """The service has stopped."""
        self._shutdown.set()

    async def _stop_children(self) -> None:
        await self._default_stop_children()

    async def _stop_futures(self) -> None:
        await self._default_stop_futures()

    async def _stop_exit_stacks(self) -> None:
        await self._default_stop_exit_stacks()

    @Service.task  # type: ignore[untyped-decorator]
    async def _thread_keepalive(self) -> None:
        """Returns at once: the loop has other work."""


class _Consumer(faust_kafka.Consumer):  # type: ignore[misc]
    def _new_consumer_thread(self) -> Any:
        return _ConsumerService(self, loop=self.loop, beacon=self.beacon)

    def stop_flow(self) -> None:
        """Takes no more records: at the beginning of a rebalance, which waits for the poll."""
        super().stop_flow()
        self._thread.end_poll()

    def resume_flow(self) -> None:
        """Takes records again."""
        super().resume_flow()
        self._thread.end_poll()

    def resume_partitions(self, partitions: Any) -> None:
        """Takes records of these partitions, too."""
        super().resume_partitions(partitions)
        self._thread.end_poll()


class _Monitor(Monitor):  # type: ignore[misc]
    """Faust's statistics without rates, which nobody reads and which wake the process every second."""

    @Service.task  # type: ignore[untyped-decorator]
    async def _sampler(self) -> None:
        """Returns at once."""


def _times_of(kafka: str) -> dict[str, float]:
    """Settings of Faust from the brokers' times."""
    if not isinstance(kafka, Brokers):
        return {}
    times = kafka.times
    return {
        "broker_request_timeout": max(REQUEST_SECONDS, (times.request_timeout_ms or 0) / 1000),
        "consumer_connections_max_idle_ms": times.connections_max_idle_ms,
    }


class _Transport(faust_kafka.Transport):  # type: ignore[misc]
    """Faust's way to Kafka, with consumers that do nothing while nothing happens."""

    Consumer = _Consumer


def build_app(
    kafka: str, prefix: str, shards: int, projectors: Sequence[Projector],
    ready: Callable[[], Awaitable[None]] = _at_once
) -> faust.App:  # fmt: skip
    """The app with an agent for each projector, not connected yet. The projectors start with the app, after
    `ready` has returned.
    """
    brokers = urllist([f"kafka://{server}" for server in kafka.split(",")])
    app = faust.App(
        group_of(prefix, [projector.name for projector in projectors]),
        broker=brokers,
        broker_credentials=faust_credentials(kafka),
        store="memory://",
        value_serializer="raw",
        key_serializer="raw",
        web_enabled=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        topic_partitions=shards,
        consumer_auto_offset_reset="earliest",
        broker_session_timeout=10.0,
        **_times_of(kafka),
        broker_heartbeat_interval=2.0,
        broker_commit_interval=COMMIT_SECONDS,
        Monitor=_Monitor,
        # An agent may wait for a projector that waits for PostgreSQL. Neither a rebalance nor our end may
        # wait for that, and need not, because our cursors say what is written.
        stream_wait_empty=False,
        datadir=tempfile.gettempdir(),
    )
    app.transport = _Transport(brokers, app)
    journal = app.topic(Topics(prefix).journal, key_serializer="raw", value_serializer="raw")
    for projector in projectors:
        app.agent(journal, name=f"{prefix}.{projector.name}")(_agent_of(projector))
    running: list[asyncio.Task[None]] = []
    app.projector_tasks = running
    app.assignment = Assignment(time.monotonic())

    @app.task()  # type: ignore[untyped-decorator]
    async def run_projectors() -> None:
        await ready()
        running.extend(asyncio.create_task(projector.run()) for projector in projectors)

    @app.on_partitions_assigned.connect(weak=False)  # type: ignore[untyped-decorator]
    async def catch_up(app: faust.App, assigned: Any, **_: Any) -> None:
        shards = sorted(each.partition for each in assigned if each.topic == Topics(prefix).journal)
        app.assignment = Assignment(time.monotonic(), frozenset(shards))
        for shard in shards:
            for projector in projectors:
                await projector.put(CatchUp(shard))

    @app.on_partitions_revoked.connect(weak=False)  # type: ignore[untyped-decorator]
    async def forget(app: faust.App, revoked: Any, **_: Any) -> None:
        app.assignment = app.assignment._replace(shards=None)

    @app.on_before_shutdown.connect(weak=False)  # type: ignore[untyped-decorator]
    async def stop_projectors(app: faust.App, **_: Any) -> None:
        await end(running)

    return app


def _agent_of(projector: Projector) -> Callable[[Any], Any]:
    async def pass_on(stream: Any) -> None:
        async for event in stream.events():
            message = event.message
            headers = message.headers.items() if isinstance(message.headers, dict) else message.headers or ()
            record = Record(message.partition, message.offset, tuple(headers), message.value or b"")
            await projector.put(record)

    return pass_on


async def run_projections(
    kafka: str,
    prefix: str,
    shards: int,
    postgres: str,
    schema: str,
    stop: asyncio.Event,
    names: Sequence[str] = PROJECTIONS,
    step: Step = lambda name: None,
    measures: WorkerMeasures | None = None,
) -> None:
    """Runs the app in this event loop until `stop` is set. When the app stalls or ends, a new one is started.

    Raises RuntimeError if apps keep ending.
    """
    global _apps_left
    ends_in_a_row = 0
    while not stop.is_set():
        began = time.monotonic()
        projectors = make_projectors(kafka, prefix, shards, postgres, schema, names, step, measures)
        app = build_app(kafka, prefix, shards, projectors)
        app.finalize()
        watching = asyncio.create_task(
            until_stalled(
                kafka,
                Topics(prefix),
                shards,
                postgres,
                schema,
                projectors,
                partial(getattr, app, "assignment"),
            )
        )
        stopping = asyncio.create_task(stop.wait())
        running = asyncio.create_task(_run(app))
        try:
            await asyncio.wait({watching, stopping, running}, return_when=asyncio.FIRST_COMPLETED)
            why = _why_it_ended(app, watching, running)
        finally:
            # Nothing that a task or the app raises may prevent this: an app that is not stopped keeps its
            # sessions and place in the group.
            for task in (watching, stopping, running):
                task.cancel()
            if not await _stop(app):
                _apps_left += 1
                log.error(
                    "Faust does not stop and is abandoned; the group reassigns its partitions when its "
                    "session ends"
                )
            # They are cancelled, but waited for only so long.
            await asyncio.wait({watching, stopping, running}, timeout=STOP_SECONDS)
        if not stop.is_set():
            ends_in_a_row = ends_in_a_row + 1 if time.monotonic() - began < STEADY_SECONDS else 1
            if ends_in_a_row > ENDS_IN_A_ROW_MAX and not _is_servers_fault(app, running):
                raise RuntimeError(f"Faust ended {ends_in_a_row} times in a row: {why}") from app.crash_reason
            log.error("starting Faust again: %s", why)
            # An abandoned app keeps its tasks, so the pause grows: a few such apps an hour at most.
            pause_seconds = min(ends_in_a_row, PAUSE_SECONDS_MAX) + LEFT_APP_PAUSE_SECONDS * _apps_left**2
            await _wait_for(stop, pause_seconds)


async def _wait_for(stop: asyncio.Event, seconds: float) -> None:
    """Returns when `stop` is set, after `seconds` at the latest."""
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({stopping}, timeout=seconds)
    finally:
        stopping.cancel()


def _why_it_ended(app: faust.App, watching: "asyncio.Task[str]", running: "asyncio.Task[None]") -> str:
    """Which of them ended first and why, in words. Raises nothing."""
    if watching.done() and not watching.cancelled():
        if error := watching.exception():
            log.critical("the watchdog failed", exc_info=error)
            return f"the watchdog failed ({error!r})"
        return watching.result()
    if running.done() and not running.cancelled() and running.exception() is not None:
        return f"the app did not start ({running.exception()!r})"
    return f"the app ended by itself ({app.crash_reason!r})"


def _is_servers_fault(app: faust.App, running: "asyncio.Task[None]") -> bool:
    """Whether the app ended because a server is down, however long that lasts."""
    failed = running.exception() if running.done() and not running.cancelled() else None
    reason = failed or app.crash_reason
    return reason is not None and is_trouble(reason)


async def _run(app: faust.App) -> None:
    await app.start()
    # Unlike `wait_until_stopped`, it leaves no tasks when it is cancelled.
    await app.wait_first()


async def _stop(app: faust.App) -> bool:
    """Stops the app and its projectors; returns whether Faust stopped. It may wait for a broker for ever.
    Raises none of the app's errors.
    """
    for task in app.projector_tasks:
        task.cancel()
    # Not wait_for: it waits for the task that it has cancelled. Faust may swallow the cancellation, and the
    # read models would stop without a message.
    stopping = asyncio.create_task(app.stop())
    await asyncio.wait({stopping}, timeout=STOP_SECONDS)
    if not stopping.done():
        stopping.cancel()
        _end_heartbeats(app)
        return False
    if not stopping.cancelled() and (error := stopping.exception()):
        log.error("Faust failed while it stopped", exc_info=error)
        _end_heartbeats(app)
        return False
    return not stopping.cancelled()


def _end_heartbeats(app: faust.App) -> None:
    """Ends the membership of an app in its group.

    Otherwise the group would keep assigning partitions to it, which nothing reads. Now the group reassigns
    them when the session of this member ends.
    """
    service = getattr(app.consumer, "_thread", None)  # none if the app did not come that far
    coordinator = getattr(getattr(service, "_consumer", None), "_coordinator", None)
    for name in ("_coordination_task", "_heartbeat_task"):
        task = getattr(coordinator, name, None)
        if task is not None:
            task.cancel()
