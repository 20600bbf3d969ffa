"""Redis is disposable: emptied, robbed of its last second or put back from an old copy, with traffic on, it is made anew by itself.

Then everything adds up, every answer that was promised as journaled is booked, and Redis equals a fold of the journal key by key.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.commands import Grab, Open
from models.offers import EnvelopeTerms
from ops.connections import key_space, open_gate, open_redis
from ops.services import LocalServices
from ops.settings import Settings
from tests.conftest import make_system, until
from tests.streams.state import assert_state_is_the_journal_s
from tests.streams.test_kill import relayed_by
from tests.streams.test_projections import rows
from tests.streams.traffic import traffic


@pytest.fixture
async def private(private_services: LocalServices, settings: Settings) -> Any:
    """A system on servers that may be robbed."""
    own = settings.model_copy(update=private_services.environment())
    await make_system(own)
    return own


def aof(services: LocalServices) -> Path:
    return services.redis.directory / "appendonlydir"


def cut_the_tail(services: LocalServices, count: int) -> None:
    """What a power cut does: the last bytes of the log are gone, the last command in it is half there."""
    services.redis.kill()
    [newest] = sorted(aof(services).glob("*.incr.aof"))[-1:]
    with newest.open("r+b") as log:
        log.truncate(max(newest.stat().st_size - count, 0))
    services.redis.start()


def put_back(services: LocalServices, copy: Path) -> None:
    services.redis.kill()
    shutil.rmtree(aof(services))
    shutil.copytree(copy, aof(services))
    services.redis.start()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["emptied", "tail cut by 200000 bytes", "tail cut by 1 byte", "an old copy"])
async def test_a_redis_that_lost_something(
    private: Settings, private_services: LocalServices, worker: Callable[..., Any], tmp_path: Path, fault: str
) -> None:
    deciding, projecting = worker(private, "decide,relay,sweep"), worker(private, "project,publish")
    async with traffic(private) as crowd:
        await crowd.begin()
        await crowd.until_answered(0.2)
        copy = tmp_path / "copy"
        await asyncio.to_thread(shutil.copytree, aof(private_services), copy)
        await crowd.until_answered(0.5)
        if fault == "emptied":
            redis = open_redis(private)
            await redis.flushall()
            await redis.aclose()
        elif fault == "an old copy":
            await asyncio.to_thread(put_back, private_services, copy)
        else:
            await asyncio.to_thread(cut_the_tail, private_services, int(fault.split()[-2]))
        await crowd.adds_up()
        await assert_state_is_the_journal_s(private)
    found = await rows(private, "SELECT shard, kind, redis_seq, journal_seq, snapshot_seq, applied FROM recoveries")
    if fault != "tail cut by 1 byte":  # which Kafka may not have had yet
        assert found
    assert await rows(private, "SELECT * FROM lost_decisions") == []
    assert deciding.stop() == 0
    assert projecting.stop() == 0
