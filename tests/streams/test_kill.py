"""kill -9 of workers and servers under traffic, at chosen steps: afterwards all checks pass, and every answer
that was given is in the read models.
"""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from grabstream.settings import Settings
from grabstream.workshop.services import LocalServices
from tests.streams.traffic import traffic
from tests.support.leases import until_relayed_by

DECIDES, PROJECTS = "decide,relay,sweep", "project,publish"

#: A lease of three seconds ends, and a takeover follows: less than four seconds on a quiet machine. A busy
#: one has to pass, too (`make bench`, row `takeover`, measures); waiting for anything else has not.


@pytest.mark.every_change("one crash of a worker")
async def test_another_worker_takes_over_after_kill_9(system: Settings, worker: Callable[..., Any]) -> None:
    first = worker(system, DECIDES)
    worker(system, PROJECTS)
    await until_relayed_by(system, first)
    second = worker(system, DECIDES)
    async with traffic(system) as crowd:
        await crowd.begin()
        await crowd.until_answered(0.3)
        first.kill()
        await until_relayed_by(system, second)
        await crowd.seconds_to_next_answer()
        await crowd.adds_up()


# `make drill` kills workers at every step, and every server.
@pytest.mark.long
@pytest.mark.parametrize(
    ("doomed", "other", "step"),
    [
        pytest.param(DECIDES, PROJECTS, "relay.acknowledged:20", id="a relay, before it trims"),
        pytest.param(PROJECTS, DECIDES, "ledger.committed:2", id="a projection, after its commit"),
    ],
)
async def test_no_event_is_lost_when_a_worker_is_killed(
    system: Settings, worker: Callable[..., Any], doomed: str, other: str, step: str
) -> None:
    worker(system, other)
    killed = worker(system, doomed, fail_at=step)
    async with traffic(system) as crowd:
        await crowd.begin()
        assert await asyncio.to_thread(killed.process.wait, 60) == -signal.SIGKILL
        worker(system, doomed)
        await crowd.adds_up()


@pytest.mark.long
async def test_a_relay_that_continues_after_its_replacement_changes_nothing(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """A relay gets SIGSTOP, is replaced, and gets SIGCONT, under traffic: its late blocks do not count, and
    its late trims are refused.
    """
    first = worker(system, DECIDES)
    worker(system, PROJECTS)
    await until_relayed_by(system, first)
    second = worker(system, "relay,sweep,decide")
    async with traffic(system) as crowd:
        await crowd.begin()
        await crowd.until_answered(0.2)
        first.signal(signal.SIGSTOP)
        await until_relayed_by(system, second)
        await crowd.until_answered(0.6)
        first.signal(signal.SIGCONT)
        await crowd.adds_up()
        assert first.process.poll() is None


@pytest.mark.long
@pytest.mark.parametrize("server", ["kafka", "redis"])
async def test_no_event_is_lost_when_a_server_is_killed(
    private: Settings, private_services: LocalServices, worker: Callable[..., Any], server: str
) -> None:
    """The Kafka broker, and Redis with an intact append-only file."""
    deciding, projecting = worker(private, "decide,relay,sweep"), worker(private, "project,publish")
    process = getattr(private_services, server)
    async with traffic(private) as crowd:
        await crowd.begin()
        await crowd.until_answered(0.3)
        await asyncio.to_thread(process.kill)
        await asyncio.to_thread(process.start)
        await crowd.adds_up()
    assert deciding.stop() == 0
    assert projecting.stop() == 0
