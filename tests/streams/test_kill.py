"""kill -9 with traffic on, each at a moment of the test's choosing: then everything adds up, and every
acknowledged answer is booked.
"""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from grabstream.ops.services import LocalServices
from grabstream.ops.settings import Settings
from tests.conftest import make_system
from tests.streams.traffic import traffic
from tests.support.leases import until_relayed_by

TAKE_OVER_SECONDS_MAX = 5.0


async def test_the_worker(system: Settings, worker: Callable[..., Any]) -> None:
    first = worker(system, "decide,relay,sweep")
    worker(system, "project,publish")
    await until_relayed_by(system, first)
    second = worker(system, "decide,relay,sweep")
    async with traffic(system) as crowd:
        await crowd.begin()
        await crowd.until_answered(0.3)
        first.kill()
        began = asyncio.get_running_loop().time()
        await until_relayed_by(system, second)
        await crowd.seconds_to_next_answer()
        assert asyncio.get_running_loop().time() - began < TAKE_OVER_SECONDS_MAX
        await crowd.adds_up()


@pytest.mark.parametrize(
    "step",
    [pytest.param("relay.took_over", marks=pytest.mark.nightly), "relay.acknowledged:20", "relay.trimmed:20"],
)
async def test_the_relay_at_a_step(system: Settings, worker: Callable[..., Any], step: str) -> None:
    """Between Kafka's acknowledgement and the trim, and beside it."""
    doomed = worker(system, "decide,relay,sweep", fail_at=step)
    worker(system, "project,publish")
    async with traffic(system) as crowd:
        if step == "relay.took_over":
            assert await asyncio.to_thread(doomed.process.wait, 30) == -signal.SIGKILL
            worker(system, "decide,relay,sweep")
            await crowd.begin()
        else:
            await crowd.begin()
            assert await asyncio.to_thread(doomed.process.wait, 60) == -signal.SIGKILL
            worker(system, "decide,relay,sweep")
        await crowd.adds_up()


# What has its cursor in PostgreSQL goes the same way in all three; `make drill` plays every one.
@pytest.mark.parametrize(
    "step", ["ledger.committed:2", pytest.param("events.committed:2", marks=pytest.mark.nightly)]
)
async def test_a_projection_between_its_commit_and_faust_s(
    system: Settings, worker: Callable[..., Any], step: str
) -> None:
    worker(system, "decide,relay,sweep")
    doomed = worker(system, "project,publish", fail_at=step)
    async with traffic(system) as crowd:
        await crowd.begin()
        assert await asyncio.to_thread(doomed.process.wait, 60) == -signal.SIGKILL
        worker(system, "project,publish")
        await crowd.adds_up()


async def test_a_relay_that_was_stopped_and_continued_does_no_harm(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """SIGSTOP, replaced, SIGCONT, with traffic on: its late blocks do not count, its late trims are
    refused.
    """
    first = worker(system, "decide,relay,sweep")
    worker(system, "project,publish")
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


@pytest.fixture
async def private(private_services: LocalServices, settings: Settings) -> Any:
    """A system on servers that may be killed."""
    own = settings.model_copy(update=private_services.environment())
    await make_system(own)
    return own


@pytest.mark.timeout(400)
@pytest.mark.parametrize("server", ["postgres", "kafka", "redis"])
async def test_a_server(
    private: Settings, private_services: LocalServices, worker: Callable[..., Any], server: str
) -> None:
    """PostgreSQL, the broker, and Redis with its AOF intact."""
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
