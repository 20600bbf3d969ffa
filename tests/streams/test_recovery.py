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


def envelope(offer: str = "e", parts: int = 100) -> Open:
    return Open(
        id=f"open-{offer}", offer=offer, terms=EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=parts * 9, parts=parts)
    )


def by(*users: str, offer: str = "e") -> list[Grab]:
    return [Grab(id=f"{offer}-{user}", offer=offer, user=user) for user in users]


async def copied(services: LocalServices, to: Path) -> Path:
    """A copy of the log as it is now; what was answered is in it."""
    await asyncio.to_thread(shutil.copytree, aof(services), to)
    return to


@pytest.mark.timeout(200)
async def test_another_history_is_replaced_and_what_it_decided_is_told(
    private: Settings, private_services: LocalServices, worker: Callable[..., Any], tmp_path: Path
) -> None:
    one = worker(private, "decide,relay,sweep")
    projecting = worker(private, "project")
    async with open_gate(private) as gate:
        asked = {"patience_ms": 20_000}
        assert (await gate.decide([envelope()], **asked))[0].outcome == "opened"
        assert {answer.outcome for answer in await gate.decide(by("ann", "bob"), **asked)} == {"granted"}
        assert one.stop() == 0
        before = await copied(private_services, tmp_path / "before")
        decided = await gate.decide(by("eve", "joe", "kim"), "decided")
        assert {answer.outcome for answer in decided} == {"granted"}
        other = await copied(private_services, tmp_path / "other")
        # Redis loses what Kafka never had: the shard goes on from there, and the gate tells whose answer is gone.
        await asyncio.to_thread(put_back, private_services, before)
        one = worker(private, "decide,relay,sweep")
        assert {answer.outcome for answer in await gate.decide(by("lea", "max"), **asked)} == {"granted"}
        told = "SELECT command, user_id, amount FROM lost_decisions WHERE told_by = 'gate' ORDER BY seq"
        expected = [(f"e-{user}", user, answer.amount) for user, answer in zip(("eve", "joe", "kim"), decided, strict=True)]
        await until(lambda: rows(private, told), 10, "the gate's report")
        assert await rows(private, told) == expected
        # The lost second comes back, as another history: what it decided is listed, and is not so.
        assert one.stop() == 0
        await asyncio.to_thread(put_back, private_services, other)
        one = worker(private, "decide,relay,sweep")
        [again] = await gate.decide(by("lea"), **asked)
        assert (again.outcome, again.repeated) == ("granted", True)
        told = told.replace("gate", "relay")
        assert await rows(private, told) == expected
        shard = key_space(private).shard_of_offer("e")
        assert await rows(private, "SELECT shard, kind, redis_seq, journal_seq FROM recoveries") == [(shard, "other", 6, 5)]
        # Their ids are free again.
        assert {(answer.outcome, answer.repeated) for answer in await gate.decide(by("eve", "joe", "kim"), **asked)} == {("granted", False)}
    await assert_state_is_the_journal_s(private)
    assert one.stop() == 0
    assert projecting.stop() == 0
