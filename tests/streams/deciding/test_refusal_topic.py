"""The topic of refusals, with Kafka: what a worker and a gate write, and what becomes of refusals while Kafka
is away.
"""

import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from grabstream import CouponTerms, Grab, Open, open_gate
from grabstream.connections.opening import refusal_log
from grabstream.gate.refusals import Refusal
from grabstream.models.identifiers import shard_of
from grabstream.settings import BadSettings, Settings, load_settings
from grabstream.streams.clients import started
from grabstream.streams.deciding.refusal_topic import RefusalTopic
from grabstream.streams.topics import Topics
from tests.conftest import make_system, take_down, until
from tests.contract import problems
from tests.streams.deciding.topic_records import read_all


@pytest.fixture
async def with_topic(settings: Settings) -> AsyncIterator[Settings]:
    """A system with the topic of refusals."""
    changed = settings.model_copy(update={"refusals_topic": True})
    await make_system(changed)
    yield changed
    await take_down(changed)


def refusal(number: int, **more: Any) -> Refusal:
    plain = Refusal(5, "grab", f"g{number}", "o", f"u{number}", None, 2, 32, None, None, None, 0, 'a "text"')
    return plain._replace(**more)


async def test_a_worker_and_a_gate_write_refusals(with_topic: Settings, worker: Callable[..., Any]) -> None:
    topic = Topics(with_topic.prefix).refusals
    worker(with_topic, "decide,relay,sweep", refusals_topic="true")
    async with open_gate(with_topic) as gate:
        [opened] = await gate.decide(
            [Open(id="open", offer="o", terms=CouponTerms(issuer="shop", total=1))],
            patience_ms=60_000, timeout_ms=60_000,
        )  # fmt: skip
        assert opened.outcome == "opened"
        grabs = [Grab(id=f"g{number}", offer="o", user=f"u{number}") for number in range(3)]
        answers = await gate.decide(grabs, patience_ms=60_000, timeout_ms=60_000)
        outcomes = [answer.outcome for answer in answers]
        assert outcomes == ["granted", "sold_out", "sold_out"]
        assert gate.measures.refusals_dropped == {"books": 0, "topic": 0}
    # Closed, the gate has written what it kept.
    records = {json.loads(record.value)["id"]: record for record in await read_all(with_topic, topic)}
    assert {"g1", "g2"} <= records.keys()
    for record in records.values():
        value = json.loads(record.value)
        assert problems("answers/refused.v1", value) == []
        assert (record.key, record.partition) == (b"o", shard_of("o", with_topic.shards))
        assert record.headers == (("content-type", b"application/json"),)
        assert record.timestamp == value["at"]
    refused = json.loads(records["g1"].value)
    assert refused == {
        "v": 1, "at": refused["at"], "type": "grab", "id": "g1", "offer": "o", "user": "u1", "quantity": 1,
        "outcome": "sold_out", "code": 32,
    }  # fmt: skip


async def test_texts_of_answers_stay_away(with_topic: Settings) -> None:
    """They may quote what was sent. What does not apply is absent."""
    topic = RefusalTopic(with_topic.kafka, Topics(with_topic.prefix).refusals, with_topic.shards)
    try:
        limited = refusal(2, code=31, retry_at=99, limit_name="user/day", limit_left=0, units_left=None)
        await topic.write([refusal(1, user=None, grab="g", quantity=None), limited])
    finally:
        await topic.close()
    read = await read_all(with_topic, Topics(with_topic.prefix).refusals)
    assert [json.loads(record.value) for record in read] == [
        {"v": 1, "at": 5, "type": "grab", "id": "g1", "offer": "o", "grab": "g", "outcome": "sold_out",
         "code": 32, "left": 0},
        {"v": 1, "at": 5, "type": "grab", "id": "g2", "offer": "o", "user": "u2", "quantity": 2,
         "outcome": "limit_reached", "code": 31, "limit": "user/day", "limit_left": 0, "retry_at": 99},
    ]  # fmt: skip


@pytest.mark.long
async def test_refusals_of_a_clock_that_was_ahead_are_written(with_topic: Settings) -> None:
    """Brokers refuse records of a time more than an hour ahead."""
    ahead_ms = time.time_ns() // 1_000_000 + 2 * 3_600_000
    topic = RefusalTopic(with_topic.kafka, Topics(with_topic.prefix).refusals, with_topic.shards)
    try:
        await topic.write([refusal(1, at=ahead_ms)])
    finally:
        await topic.close()
    [read] = await read_all(with_topic, Topics(with_topic.prefix).refusals)
    assert json.loads(read.value)["at"] == ahead_ms
    assert read.timestamp <= time.time_ns() // 1_000_000


async def test_brokers_that_are_away_are_said_to_be_away(with_topic: Settings) -> None:
    """As OSError, for which the log keeps the refusals; the next write is another client's."""
    topic = RefusalTopic("127.0.0.1:1", Topics(with_topic.prefix).refusals, with_topic.shards)
    with pytest.raises(OSError, match="Kafka: "):
        await topic.write([refusal(1)])
    topic._kafka = with_topic.kafka
    await topic.write([refusal(1)])
    await topic.close()
    assert len(await read_all(with_topic, topic._topic)) == 1


async def test_init_adds_the_topic_where_it_is_wanted(system: Settings) -> None:
    """Not by default, and to a system that exists."""
    topic = Topics(system.prefix).refusals
    async with started(AIOKafkaAdminClient(bootstrap_servers=system.kafka)) as client:
        assert topic not in await client.list_topics()
        made = await make_system(system.model_copy(update={"refusals_topic": True}))
        assert made.topics == [topic]

        async def exists() -> bool:
            return topic in await client.list_topics()

        await until(exists, 20, "the topic")


def test_the_setting_needs_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_REFUSALS_TOPIC", "true")
    monkeypatch.setenv("GRAB_REFUSALS_ONE_IN", "0")
    with pytest.raises(BadSettings, match="GRAB_REFUSALS_TOPIC needs GRAB_REFUSALS_ONE_IN above 0"):
        load_settings()


@pytest.mark.parametrize(
    ("more", "places"),
    [
        ({}, {"books"}),
        ({"refusals_topic": True}, {"books", "topic"}),
        ({"refusals_topic": True, "refusals_kept_max": 0}, {"topic"}),
        ({"refusals_kept_max": 0}, None),
        ({"refusals_one_in": 0}, None),
    ],
)
def test_places_are_those_of_the_settings(
    more: dict[str, Any], places: set[str] | None, settings: Settings
) -> None:
    log = refusal_log(settings.model_copy(update=more))
    assert (log and log.dropped.keys()) == places
