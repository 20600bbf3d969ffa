"""The Faust app: one agent for each read model, all on the journal.

An agent passes each record to its projector and raises nothing, because Faust acknowledges a record whose
agent failed. Faust's committed offsets are hints: the position of a read model is its cursor. So Faust
decides which process reads which partition, and after every assignment the projectors catch up on their own.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import faust

from grabstream.projections.definitions import definition_of
from grabstream.projections.read_models import READ_MODELS
from grabstream.runtime.ending import end
from grabstream.runtime.trouble import is_trouble
from grabstream.streams.brokers import Brokers, faust_credentials
from grabstream.streams.clients import DoesNotStop
from grabstream.streams.journal import JournalRecord
from grabstream.streams.measures import WorkerMeasures
from grabstream.streams.projecting.projector import CatchUp, Projector
from grabstream.streams.projecting.publisher import Publisher, event_source
from grabstream.streams.projecting.watchdog import Assignment, until_stalled
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

JOURNAL_READERS: Final = ("ledger", "balances", "audit", "events")
#: How long an app may take to stop while its process continues; a worker that ends waits less (`worker.py`).
#: After a minute, Faust treats a service that has not stopped as stopped, so this must be less.
STOP_SECONDS: Final = 30.0
#: How long an app that is to stop may take to finish its start first.
START_SECONDS: Final = 5.0
STEADY_SECONDS: Final = 30.0
ENDS_IN_A_ROW_MAX: Final = 60
PAUSE_SECONDS_MAX: Final = 5.0
#: How often Faust checks for offsets to commit and, after 2.5 times this, for partitions that do not move,
#: which it only logs. After a crash, records of this time are read again and ignored.
COMMIT_SECONDS: Final = 5.0
#: How long Faust's client waits for a request: longer than the 60 s that it allows a rebalance.
REQUEST_SECONDS: Final = 90.0

CrashStep = Callable[[str], None]


def make_projectors(
    kafka: str, prefix: str, shards: int, postgres: str, schema: str, names: Sequence[str] = JOURNAL_READERS,
    step: CrashStep = lambda name: None, measures: WorkerMeasures | None = None,
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
        else Projector(
            name=name, apply=READ_MODELS[name].apply, kafka=kafka, measures=measured[name], **where
        )
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


def _times_of(kafka: str) -> dict[str, float]:
    """Settings of Faust from the brokers' times."""
    if not isinstance(kafka, Brokers):
        return {}
    times = kafka.times
    return {
        "broker_request_timeout": max(REQUEST_SECONDS, (times.request_timeout_ms or 0) / 1000),
        "consumer_connections_max_idle_ms": times.connections_max_idle_ms,
    }


def build_app(
    kafka: str, prefix: str, shards: int, projectors: Sequence[Projector],
    ready: Callable[[], Awaitable[None]] = _at_once
) -> faust.App:  # fmt: skip
    """The app with an agent for each projector, not connected yet. The projectors start with the app, after
    `ready` has returned.
    """
    app = faust.App(
        group_of(prefix, [projector.name for projector in projectors]),
        broker=[f"kafka://{server}" for server in kafka.split(",")],
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
        # An agent may wait for a projector that waits for PostgreSQL. Neither a rebalance nor our end may
        # wait for that, and need not, because our cursors record what is written.
        stream_wait_empty=False,
        datadir=tempfile.gettempdir(),
    )
    journal = app.topic(Topics(prefix).journal, key_serializer="raw", value_serializer="raw")
    for projector in projectors:
        app.agent(journal, name=f"{prefix}.{projector.name}")(_agent_of(projector))
    running: list[asyncio.Task[None]] = []
    app.projector_tasks = running
    app.start_task = None
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
            record = JournalRecord(message.partition, message.offset, tuple(headers), message.value or b"")
            await projector.put(record)

    return pass_on


async def run_projections(
    kafka: str,
    prefix: str,
    shards: int,
    postgres: str,
    schema: str,
    stop: asyncio.Event,
    names: Sequence[str] = JOURNAL_READERS,
    step: CrashStep = lambda name: None,
    measures: WorkerMeasures | None = None,
) -> None:
    """Runs the app in this event loop until `stop` is set. When the app stalls or ends, a new one is started.

    Raises RuntimeError if apps keep ending, and DoesNotStop if one does not stop: it keeps its place in the
    group, and the partitions that it was assigned, for as long as this process runs.
    """
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
            # threads, its sessions and its place in the group.
            for task in (watching, stopping, running):
                task.cancel()
            await _stop(app)
            await end((watching, stopping, running))
        if not stop.is_set():
            ends_in_a_row = ends_in_a_row + 1 if time.monotonic() - began < STEADY_SECONDS else 1
            if ends_in_a_row > ENDS_IN_A_ROW_MAX and not _is_servers_fault(app, running):
                raise RuntimeError(f"Faust ended {ends_in_a_row} times in a row: {why}") from app.crash_reason
            log.error("starting Faust again: %s", why)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(ends_in_a_row, PAUSE_SECONDS_MAX)):
                    await stop.wait()


def _why_it_ended(app: faust.App, watching: "asyncio.Task[str]", running: "asyncio.Task[None]") -> str:
    """Which of them ended first and why, in words. Raises nothing."""
    if watching.done() and not watching.cancelled():
        if error := watching.exception():
            log.critical("the watchdog failed", exc_info=error)
            return f"the watchdog failed ({error!r})"
        return watching.result()
    if running.done() and not running.cancelled() and running.exception() is not None:
        return f"the app did not start ({running.exception()!r})"
    return f"the app stopped unexpectedly ({app.crash_reason!r})"


def _is_servers_fault(app: faust.App, running: "asyncio.Task[None]") -> bool:
    """Whether the app ended because a server is down, however long that lasts."""
    failed = running.exception() if running.done() and not running.cancelled() else None
    reason = failed or app.crash_reason
    return reason is not None and is_trouble(reason)


async def _run(app: faust.App) -> None:
    app.start_task = asyncio.create_task(app.start())
    # What cancels this stops the app, and `_stop` waits for the start first.
    await asyncio.shield(app.start_task)
    # Unlike `wait_until_stopped`, it leaves no tasks when it is cancelled.
    await app.wait_first()


async def _stop(app: faust.App) -> None:
    """Stops the app and its projectors, after its start. Raises DoesNotStop if Faust, which may wait for a
    broker without end, has not stopped after STOP_SECONDS, or fails; none of the app's other errors.
    """
    for task in app.projector_tasks:
        task.cancel()
    if app.start_task is not None:
        # A stop leaves out a thread that has not started yet, and that thread would keep the process.
        await asyncio.wait({app.start_task}, timeout=START_SECONDS)
        app.start_task.cancel()
    # Not wait_for: it waits for the task that it has cancelled. Faust may swallow the cancellation, and the
    # read models would stop without a message.
    stopping = asyncio.create_task(app.stop())
    await asyncio.wait({stopping}, timeout=STOP_SECONDS)
    failed = stopping.exception() if stopping.done() and not stopping.cancelled() else None
    if stopping.done() and not stopping.cancelled() and failed is None:
        return
    stopping.cancel()
    raise DoesNotStop(f"Faust ({failed!r})" if failed else f"Faust, within {STOP_SECONDS:.0f} s") from failed
