"""Faust's agents deliver records, and what they leave out is found."""

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import OffsetOutOfRangeError
from mode.threads import WorkerThread

from grabstream.ops.console.endings import ending_of
from grabstream.settings import Settings
from grabstream.streams.clients import DoesNotStop
from grabstream.streams.journal import JournalRecord, open_reader
from grabstream.streams.projecting import agents, watchdog
from grabstream.streams.projecting.publisher import (
    CURSOR_HEADER,
    PublishedOffsets,
    Publisher,
    event_source,
    newest_cursor,
)
from grabstream.streams.topics import Topics
from grabstream.streams.worker import RestartingRole, Service, run_worker
from tests.conftest import until
from tests.support.projecting import (
    LINES,
    SHARD,
    JournalWriter,
    journal,  # noqa: F401 - a fixture
    until_at_seq,
)


async def test_the_agents_deliver_records(system: Settings, journal: JournalWriter) -> None:
    """No watchdog restarts Faust here, and no projector is made to catch up a second time: after the
    partitions were assigned and caught up, only the agents can deliver new records.
    """
    names = ("ledger", "balances", "audit")
    projectors = agents.make_projectors(
        system.kafka, system.prefix, system.shards, system.postgres, system.schema_, names
    )
    app = agents.build_app(system.kafka, system.prefix, system.shards, projectors)
    app.finalize()
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 10)
    running = asyncio.create_task(agents._run(app))
    try:
        await until_at_seq(system, 10)
        assignment = app.assignment
        for last in (11, 20, 30):
            await journal.block(LINES, {11: 11, 20: 12, 30: 21}[last], last)
            await until_at_seq(system, last)
        assert app.assignment == assignment, "partitions were assigned again, so this test proves nothing"
    finally:
        await agents._stop(app)
        running.cancel()
        await asyncio.wait({running}, timeout=10)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ledger", "events"])
async def test_a_record_that_faust_leaves_out_is_found(
    name: str, system: Settings, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last record of the shard: no later one shows that it is missing."""
    left_out: list[int] = []

    def leaving_out(projector: Any) -> Any:
        pass_on = agent_of(projector)

        async def events(stream: Any) -> AsyncIterator[Any]:
            async for event in stream.events():
                if event.message.offset == offset and not left_out:
                    left_out.append(offset)
                    continue
                yield event

        return lambda stream: pass_on(SimpleNamespace(events=lambda: events(stream)))

    agent_of, offset = agents._agent_of, 2
    monkeypatch.setattr(agents, "_agent_of", leaving_out)
    monkeypatch.setattr(watchdog, "STALLED_SECONDS", 2.0)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.2)
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 10)
    stop = asyncio.Event()
    running = asyncio.create_task(
        agents.run_projections(
            system.kafka, system.prefix, system.shards, system.postgres, system.schema_, stop, [name]
        )
    )

    async def is_at(seq: int) -> None:
        if name != "events":
            await until_at_seq(system, seq, name)
            return
        async with open_reader(system.kafka, Topics(system.prefix).events) as reader:

            async def is_published() -> bool:
                return (await newest_cursor(reader, SHARD, event_source(system.prefix))).seq == seq

            await until(is_published, 30, f"event {seq}")

    try:
        await is_at(10)
        await journal.block(LINES, 11, 20)
        await is_at(20)
    finally:
        stop.set()
        await running
    assert left_out == [offset]


def _threads() -> int:
    """The number of threads without those of the loop's executor, which stay for its next calls."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


def _run(system: Settings, stop: asyncio.Event, names: list[str]) -> "asyncio.Task[None]":
    return asyncio.create_task(
        agents.run_projections(
            system.kafka, system.prefix, system.shards, system.postgres, system.schema_, stop, names
        )
    )


@pytest.mark.long
async def test_a_foreign_cursor_restarts_nothing(
    system: Settings, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog reads the topic of events, to which other programs may write anything."""
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(watchdog, "CURSORS_SECONDS", 0.0)  # it reads the topic at each look
    looks, find_stalled = [0], watchdog._find_stalled

    async def looking(*arguments: Any) -> str | None:
        found = await find_stalled(*arguments)
        looks[0] += any(isinstance(projector, Publisher) for projector in arguments[4])
        return found

    monkeypatch.setattr(watchdog, "_find_stalled", looking)
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 10)
    stop, apps = asyncio.Event(), []
    build_app = agents.build_app

    def counting(*arguments: Any) -> Any:
        apps.append(build_app(*arguments))
        return apps[-1]

    monkeypatch.setattr(agents, "build_app", counting)
    running = _run(system, stop, ["ledger", "events"])
    try:
        await until_at_seq(system, 10, "ledger")
        async with open_reader(system.kafka, Topics(system.prefix).events) as reader:

            async def is_published() -> bool:
                return await reader.end(SHARD) == 10

            await until(is_published, 20, "10 events")
        for value in (b"0,,99999999999999999999,1,a", b"10," + b"00" * 32 + b",-5,1,a"):
            await journal._producer.send_and_wait(
                Topics(system.prefix).events, b"", partition=SHARD, headers=[(CURSOR_HEADER, value)]
            )
        # The first of them may have begun before the records were there.
        before = looks[0]
        await until(lambda: looks[0] >= before + 3, 30, "a look at the records")
        await journal.block(LINES, 11, 20)
        await until_at_seq(system, 20, "ledger")
        assert (running.done(), len(apps)) == (False, 1)
    finally:
        stop.set()
        await asyncio.wait({running}, timeout=30)


@pytest.mark.long
async def test_an_app_is_stopped_whatever_the_watchdog_raises(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, raised, stopped = asyncio.Event(), [], []
    stop_app = agents._stop

    def no_more_than_at_first() -> bool:
        return _threads() <= raised[0][0] and len(asyncio.all_tasks()) <= raised[0][1]

    async def failing(*arguments: Any) -> str:
        assignment = arguments[-1]
        if raised:
            # What the app before and earlier tests have left behind may take a moment to end.
            await until(no_more_than_at_first, what="the end of threads and tasks of apps that were stopped")
        raised.append((_threads(), len(asyncio.all_tasks())))
        await until(lambda: assignment().shards)  # the app has started by then
        if len(raised) == 3:
            stop.set()
        raise ValueError("of the watchdog")

    async def stopping(app: Any) -> None:
        await stop_app(app)
        stopped.append(app)

    monkeypatch.setattr(agents, "until_stalled", failing)
    monkeypatch.setattr(agents, "_stop", stopping)
    monkeypatch.setattr(agents, "PAUSE_SECONDS_MAX", 0.1)
    async with asyncio.timeout(300):
        await _run(system, stop, ["ledger"])
    assert len(stopped) == 3


async def test_an_app_that_is_stopped_while_it_starts_leaves_no_threads(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, before, run = asyncio.Event(), _threads(), WorkerThread.run
    loop = asyncio.get_running_loop()

    def starting(thread: WorkerThread) -> None:
        loop.call_soon_threadsafe(stop.set)
        threading.Event().wait(0.5)  # as on a busy machine: the app is told to stop before its thread starts
        run(thread)

    monkeypatch.setattr(WorkerThread, "run", starting)
    async with asyncio.timeout(60):
        await _run(system, stop, ["ledger"])
    await until(lambda: _threads() <= before, 20, "the end of the app's threads")


class _Hangs:
    """An app of Faust that ends unasked, and does not stop."""

    def __init__(self, error: BaseException | None) -> None:
        self.projector_tasks: list[Any] = []
        self.assignment = watchdog.Assignment(0.0)
        self.crash_reason = self.start_task = None
        self._error = error

    def finalize(self) -> None:
        pass

    async def start(self) -> None:
        pass

    async def wait_first(self) -> None:
        pass

    async def stop(self) -> None:
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()


@pytest.mark.parametrize("error", [None, ValueError("of the consumer")])
async def test_an_app_that_does_not_stop_ends_all_roles_of_the_process(
    error: BaseException | None, servers: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its consumer would keep partitions that are not read. The other roles are asked to stop, and may take
    their time for it; the error then ends the process.
    """
    monkeypatch.setattr(agents, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(agents, "build_app", lambda *_: _Hangs(error))
    stop, stopped = asyncio.Event(), []

    async def project(stop: asyncio.Event) -> None:
        await agents.run_projections(servers.kafka, "none", 2, servers.postgres, "none", stop, ["ledger"])

    async def decide(stop: asyncio.Event) -> None:
        await stop.wait()
        await asyncio.sleep(0)
        stopped.append("decide")

    restarts = {"project": 0}
    roles = {
        "decide": Service(decide), "project": RestartingRole("project", Service(project), restarts)
    }  # fmt: skip
    async with asyncio.timeout(20):
        with pytest.raises(DoesNotStop, match="of the consumer" if error else "within 0 s") as failed:
            await run_worker(roles, stop)
    assert (stopped, restarts) == (["decide"], {"project": 0})
    code, words = ending_of(failed.value) or (0, "")
    assert (code, "start it again" in words) == (70, True)


@pytest.mark.long
async def test_an_agent_that_fails_at_a_shard_does_not_end_the_others(
    system: Settings, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faust has acknowledged the record by then. It starts the agent again, and the next record of the shard
    shows that one is missing.
    """
    failed = []

    class Failing(agents.Projector):
        async def put(self, item: Any) -> None:
            if isinstance(item, JournalRecord) and not failed:
                failed.append(item.offset)
                raise ValueError("of an agent")
            await super().put(item)

    monkeypatch.setattr(agents, "Projector", Failing)
    monkeypatch.setattr(watchdog, "STALLED_SECONDS", 3600.0)
    apps, build_app = [], agents.build_app

    def counting(*arguments: Any) -> Any:
        apps.append(build_app(*arguments))
        return apps[-1]

    monkeypatch.setattr(agents, "build_app", counting)
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 10)
    stop = asyncio.Event()
    running = _run(system, stop, ["ledger"])
    try:
        await until_at_seq(system, 10, "ledger")
        await until(lambda: apps[0].assignment.shards)
        await journal.block(LINES, 11, 20)
        await until(lambda: failed, 30, "the failure")
        await journal.block(LINES, 21, 30)
        await until_at_seq(system, 30, "ledger")
        assert len(apps) == 1
    finally:
        stop.set()
        await running


@pytest.mark.long
@pytest.mark.parametrize("how", ["trouble", "unknown", "hangs"])
async def test_trouble_with_the_topic_of_events_hides_no_stalled_projector(
    how: str, system: Settings, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    async def load(*_: Any) -> dict[int, int]:
        calls.append(how)
        if how == "hangs":
            await asyncio.Event().wait()
        raise OffsetOutOfRangeError({}) if how == "trouble" else ValueError("of the events")

    monkeypatch.setattr(PublishedOffsets, "load", load)
    monkeypatch.setattr(watchdog, "STALLED_SECONDS", 1.0)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.1)
    await journal.marker(1, "a")
    projectors = agents.make_projectors(
        system.kafka, system.prefix, system.shards, system.postgres, system.schema_, ["events", "ledger"]
    )
    async with asyncio.timeout(90):
        stalled = await watchdog.until_stalled(
            system.kafka, Topics(system.prefix), system.shards, system.postgres, system.schema_, projectors,
            lambda: watchdog.Assignment(0.0, frozenset([SHARD])),
        )  # fmt: skip
    assert stalled.startswith(f"ledger has been at offset 0 of shard {SHARD} for ")
    assert calls


@pytest.mark.parametrize(
    ("shards", "elsewhere"),
    [
        (frozenset([1, 2]), False),
        (frozenset([2]), True),  # another process may have just ended
        (None, True),  # the group moves partitions
        (frozenset(), False),  # the assignor may have met a broker that did not know the topic
    ],
)
def test_a_shard_of_another_process_may_stand_longer(shards: frozenset[int] | None, elsewhere: bool) -> None:
    assert watchdog.Assignment(0.0, shards).is_elsewhere(1) is elsewhere
