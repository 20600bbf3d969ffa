"""Faust in the simulation: what `streams/projecting/agents.py` uses of it, with what Faust promises and no
more. The records of assigned partitions come to every agent in the order of their partition, at least once;
offsets are committed whether or not an agent has done anything; an app may deliver nothing any more, without
an error, until it is stopped.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, Final

from grabstream.runtime.ending import end
from grabstream.runtime.trouble import is_trouble
from tests.simulation.kafka_broker import Broker, Consumer
from tests.simulation.redis_server import Weather

COMMIT_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.5
BUFFER_RECORDS_MAX: Final = 64


class Conditions(Weather):
    """How Faust behaves at the moment."""

    def __init__(self) -> None:
        super().__init__()
        #: Shares of records that are not delivered, and that are delivered again.
        self.skipped = 0.0
        self.repeated = 0.0
        #: Whether apps that are to deliver something never deliver anything from now on.
        self.stalled = False


class Signal:
    """A signal of an app, and who is connected to it."""

    def __init__(self) -> None:
        self.receivers: list[Callable[..., Any]] = []

    def connect(self, **options: Any) -> Callable[[Any], Any]:
        """Connects a function."""
        del options

        def connected(receiver: Any) -> Any:
            self.receivers.append(receiver)
            return receiver

        return connected

    async def send(self, app: "App", *arguments: Any) -> None:
        """Calls the functions."""
        for receiver in self.receivers:
            await receiver(app, *arguments)


class App:
    """An app: agents on one topic, as members of one group."""

    broker: Broker
    conditions: Conditions
    #: The groups of all apps that were started.
    started: list[str]

    def __init__(self, group: str, *, broker_session_timeout: float, **options: Any) -> None:
        del options
        self.crash_reason: BaseException | None = None
        self.on_partitions_assigned = Signal()
        self.on_partitions_revoked = Signal()
        self.on_before_shutdown = Signal()
        self._group = group
        self._session_seconds = broker_session_timeout
        self._topic = ""
        self._tasks: list[Callable[[], Any]] = []
        self._agents: list[tuple[Callable[[Any], Any], asyncio.Queue[Any]]] = []
        self._running: list[asyncio.Task[Any]] = []
        self._stopped = asyncio.Event()

    def topic(self, name: str, **options: Any) -> str:
        """A topic."""
        del options
        return name

    def agent(self, topic: str, name: str) -> Callable[[Any], Any]:
        """Adds an agent that reads the topic."""
        del name
        self._topic = topic

        def added(agent: Any) -> Any:
            self._agents.append((agent, asyncio.Queue(BUFFER_RECORDS_MAX)))
            return agent

        return added

    def task(self) -> Callable[[Any], Any]:
        """Adds a task that begins with the app."""

        def added(task: Any) -> Any:
            self._tasks.append(task)
            return task

        return added

    def finalize(self) -> None:
        """Nothing to finalize."""

    async def start(self) -> None:
        """Starts the agents, and begins to read."""
        self.started.append(self._group)
        for task in self._tasks:
            await task()
        for agent, queue in self._agents:
            self._running.append(asyncio.create_task(agent(Stream(queue))))
        self._running.append(asyncio.create_task(self._read()))

    async def wait_first(self) -> None:
        """Waits until it has stopped, or an agent has failed."""
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({*self._running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        for task in self._running:
            if task.done() and not task.cancelled() and task.exception() is not None:
                self.crash_reason = task.exception()

    async def stop(self) -> None:
        """Stops."""
        await self.on_before_shutdown.send(self)
        self._stopped.set()
        await end(self._running)

    async def _revoked(self, revoked: Any) -> None:
        """Records that agents have not taken yet may come again, or not."""
        await self.on_partitions_revoked.send(self, revoked)
        for _, queue in self._agents:
            if self.broker.draw.random() < 0.5:
                while not queue.empty():
                    queue.get_nowait()

    async def _assigned(self, assigned: Any) -> None:
        await self.on_partitions_assigned.send(self, assigned)

    async def _read(self) -> None:
        listener = SimpleNamespace(on_partitions_revoked=self._revoked, on_partitions_assigned=self._assigned)
        consumer = type("Member", (Consumer,), {"broker": self.broker})(
            group_id=self._group, session_timeout_ms=int(self._session_seconds * 1_000)
        )
        consumer.subscribe([self._topic], listener)
        while True:
            try:
                await consumer.start()
                break
            except Exception as error:
                if not is_trouble(error):
                    raise
                await asyncio.sleep(RETRY_SECONDS)
        committing = asyncio.create_task(self._commit(consumer))
        try:
            while True:
                found = await consumer.getmany(timeout_ms=500)
                for record in (record for records in found.values() for record in records):
                    await self._deliver(record)
        finally:
            committing.cancel()
            await consumer.stop()

    async def _deliver(self, record: Any) -> None:
        draw, conditions = self.broker.draw, self.conditions
        if conditions.stalled:
            # Nothing but another app helps.
            await self._stopped.wait()
        if conditions.skipped and draw.random() < conditions.skipped:
            return
        times = 2 if conditions.repeated and draw.random() < conditions.repeated else 1
        for _, queue in self._agents:
            for _ in range(times):
                await queue.put(SimpleNamespace(message=record))

    async def _commit(self, consumer: Consumer) -> None:
        while True:
            await asyncio.sleep(COMMIT_SECONDS)
            try:
                await consumer.commit(consumer.positions())
            except Exception as error:
                if not is_trouble(error):
                    raise


class Stream:
    """The records for one agent."""

    def __init__(self, queue: "asyncio.Queue[Any]") -> None:
        self._queue = queue

    async def events(self) -> AsyncIterator[Any]:
        """The records, each as an event."""
        while True:
            yield await self._queue.get()
