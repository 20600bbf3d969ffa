"""What costs nothing while nothing happens: requests to servers and wake-ups are counted, against others that
are known to come, and never against the time.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from psycopg import IsolationLevel

from grabstream.connections.opening import key_space, open_redis, sealer
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.projections.checking import verified
from grabstream.projections.database.migrate import PROJECTIONS
from grabstream.runtime import ticks
from grabstream.runtime.ending import end
from grabstream.settings import Settings
from grabstream.streams.clients import started
from grabstream.streams.deciding.decider import Decider
from grabstream.streams.journal import open_reader
from grabstream.streams.projecting import agents, watchdog
from grabstream.streams.projecting import verifier as verifier_module
from grabstream.streams.projecting.verifier import COMPLETE_SECONDS_MIN, Verifier
from grabstream.streams.relaying import relay
from grabstream.streams.relaying.ownership import SteppedDown
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.support.projecting import (
    LINES,
    SHARD,
    JournalWriter,
    journal,  # noqa: F401 - a fixture
)

FETCHES = 3


def counted(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, counts: Counter[str]) -> None:
    """Counts the calls of a method."""
    method = getattr(target, name)

    def call(*arguments: Any, **options: Any) -> Any:
        counts[name] += 1
        return method(*arguments, **options)

    monkeypatch.setattr(target, name, call)


# -- Kafka ---------------------------------------------------------------------------------------------------


async def test_a_reader_does_not_fetch_behind_the_end_of_a_read(
    system: Settings, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its caller takes with the last records."""
    await journal.marker(1, "a")
    await journal.block(LINES, 1, 10)
    counts: Counter[str] = Counter()
    async with open_reader(system.kafka, Topics(system.prefix).journal) as reader:
        counted(monkeypatch, reader._consumer._fetcher, "_proc_fetch_request", counts)
        reading = reader.read(SHARD, 0, 2)
        read = 0
        while read < 2:
            read += len(await anext(reading))
        before = counts["_proc_fetch_request"]
        # A fetch and these requests share a connection: each of them waits for the fetch before it.
        for _ in range(20):
            await reader.end(SHARD)
        assert counts["_proc_fetch_request"] <= before + 1
        await reading.aclose()


@pytest.mark.long
async def test_a_decider_polls_once_and_ends_at_once(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    consumers: list[AIOKafkaConsumer] = []
    getmany = AIOKafkaConsumer.getmany

    async def poll(consumer: AIOKafkaConsumer, *arguments: Any, **options: Any) -> Any:
        counts["polls"] += 1
        if consumer not in consumers:
            consumers.append(consumer)
            counted(monkeypatch, consumer._fetcher, "_proc_fetch_request", counts)
        return await getmany(consumer, *arguments, **options)

    monkeypatch.setattr(AIOKafkaConsumer, "getmany", poll)
    redis, stop = open_redis(system), asyncio.Event()
    gate = Gate(redis, key_space(system), sealer(system), GateLimits(timeout_ms=20_000))
    gate.start()
    decider = Decider(gate, system.kafka, Topics(system.prefix), system.shards)
    running = asyncio.create_task(decider.run(stop))
    await until(lambda: counts["_proc_fetch_request"])
    before, first = counts["polls"], counts["_proc_fetch_request"]
    await until(lambda: counts["_proc_fetch_request"] >= first + FETCHES)
    assert counts["polls"] == before
    stop.set()
    # The client leaves its group, which takes a moment.
    async with asyncio.timeout(90):
        await running
    await gate.close()
    await redis.aclose()


async def test_a_tail_fetches_at_intervals_and_at_once_when_it_is_awaited(
    system: Settings, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise Kafka sends each block of a busy shard back to its relay alone."""
    place, counts = TopicPartition(Topics(system.prefix).journal, SHARD), Counter[str]()

    @asynccontextmanager
    async def opened(wait_ms: int) -> AsyncIterator[AIOKafkaConsumer]:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=system.kafka,
            auto_offset_reset="none",
            enable_auto_commit=False,
            fetch_max_wait_ms=wait_ms,
        )
        consumer.assign([place])
        async with started(consumer):
            counted(monkeypatch, consumer._fetcher, "_proc_fetch_request", counts)
            yield consumer

    monkeypatch.setattr(relay, "TAIL_PAUSE_SECONDS", 3_600.0)
    await journal.marker(1, "a")
    tail = relay._Tail(opened, place, 1, 0)
    watching = asyncio.create_task(tail.watch())
    await until(lambda: tail._next_offset == 1)
    fetches = counts["_proc_fetch_request"]
    for seq in range(1, 11):
        await journal.block(LINES, seq, seq)
    assert counts["_proc_fetch_request"] == fetches
    async with asyncio.timeout(90):
        await tail.reached(10)
    await journal.marker(2, "b")
    awaiting = asyncio.create_task(tail.reached(11))
    with pytest.raises(SteppedDown):
        async with asyncio.timeout(90):
            await watching
    await end([awaiting])


# -- the watchdog --------------------------------------------------------------------------------------------


async def test_a_watchdog_reads_the_positions_of_all_read_models_in_three_statements(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    projectors = agents.make_projectors(
        system.kafka, system.prefix, system.shards, system.postgres, system.schema_, PROJECTIONS
    )
    counts: Counter[str] = Counter()
    async with await open_books(system) as connection:
        counted(monkeypatch, connection, "cursor", counts)
        ends = dict.fromkeys(range(system.shards), 1)
        lagging: dict[tuple[str, int], tuple[int, float]] = {}
        found = await watchdog._find_stalled(
            ends, None, connection, system.schema_, projectors, lagging, watchdog.Assignment(0.0)
        )  # type: ignore[arg-type]
    assert (found, len(lagging)) == (None, len(PROJECTIONS) * system.shards)
    assert counts["cursor"] == 3


# -- the verifier --------------------------------------------------------------------------------------------


async def test_a_verifier_that_has_compared_everything_rests(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over an empty system takes milliseconds: by its share alone, the next one would begin soon."""
    redis, stop, share = open_redis(system), asyncio.Event(), 0.01
    verifier = Verifier(redis, key_space(system), system.postgres, system.schema_, share)
    pauses: list[float] = []

    async def pause(stop: asyncio.Event, seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 3:
            stop.set()
        return stop.is_set()

    monkeypatch.setattr(verifier_module, "_pause", pause)
    # Passes that take no time.
    monkeypatch.setattr(verifier_module, "time", SimpleNamespace(monotonic=lambda: 1.0))
    await verifier.run(stop)
    assert pauses == [pytest.approx(COMPLETE_SECONDS_MIN * (1 / share - 1))] * 3
    await redis.aclose()


async def test_a_pass_of_the_verifier_at_rest_costs_the_same_for_any_number_of_shards(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its statements are counted with the shards at rest, and with the walks that they would cost."""
    redis = open_redis(system)
    verifier = Verifier(redis, key_space(system), system.postgres, system.schema_, 1.0)
    counts: Counter[str] = Counter()
    async with await open_books(system) as connection:
        await verified.begin(connection, system.shards)
        await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
        await verifier.verify_once(connection)
        counted(monkeypatch, connection, "execute", counts)
        await verifier.verify_once(connection)
        at_rest = counts.pop("execute")

        monkeypatch.setattr(verifier, "_at_rest", lambda seen: set())
        await verifier.verify_once(connection)
    assert at_rest <= 8
    assert counts["execute"] >= at_rest + system.shards
    await redis.aclose()


async def test_keys_that_agree_as_before_cost_no_session(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings are cleared once. Every difference is recorded, and cleared when it is gone."""
    redis = open_redis(system)
    verifier = Verifier(redis, key_space(system), system.postgres, system.schema_, 1.0)
    counts: Counter[str] = Counter()
    counted(monkeypatch, verifier_module, "connect", counts)

    async def findings(shard: int, *differences: str) -> int:
        await verifier._judge_keys(shard, differences)
        async with await open_books(system) as connection:
            return len(await verified.open_findings(connection))

    assert [await findings(0), await findings(0), await findings(1)] == [0, 0, 0]
    assert counts["connect"] == 2
    different = "shard 0: key: is in Redis, and should not be there"
    assert [await findings(0, different), await findings(0), await findings(0)] == [1, 0, 0]
    assert counts["connect"] == 4
    await redis.aclose()


# -- ticks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.5, 0.75, 2.0, 5.0])
def test_pauses_that_begin_at_any_time_end_together(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(
        ticks, "asyncio", SimpleNamespace(get_running_loop=lambda: SimpleNamespace(time=lambda: now))
    )
    ends = set()
    for step in range(100):
        # From shortly before the tick at 1000 × seconds until shortly before the next one.
        now = seconds * (1_000 + (step - 0.5) / 100)
        pause = ticks.seconds_to_tick(seconds)
        assert 0 < pause <= seconds * (1 + ticks.NEAR_PART)
        ends.add(round(now + pause, 6))
    assert ends == {seconds * 1_001}
