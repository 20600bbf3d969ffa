"""Clients of Kafka and Redis: errors while they close or start do not reach their users, and trouble is
logged once.
"""

import asyncio
import logging
import os
import time
from contextlib import aclosing
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.cluster import ClusterMetadata
from aiokafka.errors import KafkaConnectionError

from grabstream.connections.opening import key_space, open_redis, sealer
from grabstream.settings import Settings
from grabstream.streams import clients
from grabstream.streams.journal import open_reader
from grabstream.streams.relaying.relay import RETRY_SECONDS_MAX, ShardRelay
from grabstream.streams.topics import Topics
from tests.conftest import until


async def _raises_its_own_cancellation() -> None:
    """Raises CancelledError as aiokafka does after a process was stopped for longer than its session: it
    awaits a task that it has just cancelled.
    """
    inside = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    inside.cancel()
    await inside


async def _fails() -> None:
    raise OSError("no broker")


async def _hangs() -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize("client", [_raises_its_own_cancellation, _fails, _hangs])
async def test_close_ignores_errors_of_the_client(client: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "CLOSE_SECONDS_MAX", 0.1)
    began = time.monotonic()
    await clients.close(client())  # type: ignore[operator]
    assert time.monotonic() - began < 5


async def test_close_raises_the_cancellation_of_its_caller() -> None:
    waiting = asyncio.create_task(clients.close(_hangs()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()


class _LateController(ClusterMetadata):
    """What a client knows of brokers that name no controller at first, as after a standstill."""

    late = 0

    def update_metadata(self, metadata: Any) -> None:
        super().update_metadata(metadata)
        if self.late > 0:
            self.late -= 1
            self.controller = None


def _late_client(kafka: str, late: int, **options: Any) -> AIOKafkaAdminClient:
    """A client to which the brokers name no controller in `late` replies."""
    client = AIOKafkaAdminClient(bootstrap_servers=kafka, **options)
    client._client.cluster = _LateController(metadata_max_age_ms=60_000)
    client._client.cluster.late = late
    return client


async def test_an_admin_client_is_started_when_the_brokers_name_their_controller(servers: Settings) -> None:
    """Before, its requests end with an AttributeError."""
    async with clients.started(_late_client(servers.kafka, 3)) as administrator:
        response = await administrator.create_topics(
            [NewTopic(f"test{os.urandom(5).hex()}", 1, 1)], validate_only=True
        )
    assert [code for _, code, *_ in response.topic_errors] == [0]


async def test_an_admin_client_whose_brokers_name_no_controller_is_closed_with_an_error(
    servers: Settings,
) -> None:
    client = _late_client(servers.kafka, 10_000, request_timeout_ms=1_000)
    with pytest.raises(KafkaConnectionError, match="name no controller"):
        async with clients.started(client):
            pytest.fail("it was started")


async def test_a_client_that_is_cancelled_while_it_starts_is_closed() -> None:
    """Otherwise its connections would stay open: a relay may lose its shard at any moment."""
    connected = asyncio.Event()
    silent = await asyncio.start_server(lambda reader, writer: connected.set(), "127.0.0.1", 0)
    producer = AIOKafkaProducer(bootstrap_servers=f"127.0.0.1:{silent.sockets[0].getsockname()[1]}")

    async def use() -> None:
        async with clients.started(producer):
            pytest.fail("the silent server has answered")

    using = asyncio.create_task(use())
    await connected.wait()
    using.cancel()
    await asyncio.wait({using})
    assert using.cancelled()
    assert producer._closed
    silent.close()


async def test_a_missing_server_is_logged_once(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """A relay tries again, with growing pauses, and its log has one line until something changes."""
    nowhere = settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0"})
    relay = ShardRelay(
        open_redis(nowhere),
        key_space(nowhere).shard(3),
        nowhere.shards,
        "127.0.0.1:1",
        "journal",
        sealer(nowhere),
    )
    relaying = asyncio.create_task(relay.run())
    await until(lambda: relay._pause_seconds == RETRY_SECONDS_MAX, 30, "a longer pause")
    relaying.cancel()
    await asyncio.wait({relaying})
    assert (
        len([record for record in caplog.records if record.name == "grabstream.streams.relaying.relay"]) == 1
    )


def test_an_error_without_a_text_is_its_type_in_words() -> None:
    errors = [TimeoutError(), OSError("no broker"), OSError("OSError: no broker")]
    assert [clients.error_text(error) for error in errors] == [
        "TimeoutError", "OSError: no broker", "OSError: no broker"
    ]  # fmt: skip


def test_trouble_is_logged_only_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    trouble = clients.Trouble(logging.getLogger("test"), "shard 3")
    trouble.over()
    for words in ("away", "away", "full", "full"):
        trouble.say(words)
    trouble.over()
    trouble.over()
    trouble.say("full")
    assert caplog.messages == [
        "shard 3: away; trying again", "shard 3: full; trying again", "shard 3: continues",
        "shard 3: full; "
        "trying again"
    ]  # fmt: skip


def watched_outages(monkeypatch: pytest.MonkeyPatch) -> clients.Outages:
    """The outages of a process that watches its servers, and of no other."""
    outages = clients.Outages()
    outages.is_watched = True
    monkeypatch.setattr(clients, "OUTAGES", outages)
    return outages


def test_trouble_that_comes_back_soon_is_logged_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the work may succeed between two failures. In a worker that watches its servers, each failure
    would then look like one that an outage may explain, and none would ever be logged.
    """
    now = 1_000.0
    watched_outages(monkeypatch)
    monkeypatch.setattr(clients.time, "monotonic", lambda: now)
    trouble = clients.Trouble(logging.getLogger("test"), "shard 3")
    for _ in range(100):
        trouble.say("full")
        trouble.over()
        now += 0.7
    said = ["shard 3: full; trying again", "shard 3: continues"]
    lasts = ["shard 3: has failed for 60 s, despite retries: full", "shard 3: continues"]
    assert caplog.messages == [*said, *said, *lasts]
    caplog.clear()
    now += clients.STEADY_SECONDS
    trouble.say("full")
    assert caplog.messages == [], "trouble after a steady time may be explained by an outage again"


class VirtualTime:
    """The clock of the module, and troubles of a process that has no others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        self.troubles = clients.Troubles()
        monkeypatch.setattr(clients, "TROUBLES", self.troubles)
        monkeypatch.setattr(clients.time, "monotonic", lambda: self.now)


@pytest.mark.parametrize("succeeds_beside", [False, True])
def test_the_same_trouble_for_a_minute_is_a_warning_at_a_bounded_rate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, succeeds_beside: bool
) -> None:
    """As of a decider that may read, but not write answers: each poll still succeeds."""
    time = VirtualTime(monkeypatch)
    trouble = clients.Trouble(logging.getLogger("test"), "deciding")
    lasts = []
    for _ in range(int(2 * clients.LASTING_LOGGED_SECONDS / 5)):
        trouble.say("TopicAuthorizationFailedError: results")
        if succeeds_beside:
            trouble.over()
        lasts += [text for text in caplog.messages if "for " in text]
        caplog.clear()
        time.now += 5.0
    assert lasts == [
        f"deciding: has failed for {seconds} s, despite retries: TopicAuthorizationFailedError: results"
        for seconds in (60, 660)
    ]
    [present] = time.troubles.present()
    assert (present.where, present.words) == ("deciding", "TopicAuthorizationFailedError: results")
    assert (present.seconds, present.began_seconds_ago) == (1_195.0, 1_200.0)
    trouble.over()
    time.now += clients.STEADY_SECONDS
    assert time.troubles.present() == []
    trouble.say("another one")
    time.now += 1.0
    assert [one.began_seconds_ago for one in time.troubles.present()] == [1.0], "a new trouble begins anew"
    time.now += clients.FORGOTTEN_SECONDS - 2.0
    assert [one.seconds for one in time.troubles.present()] == [0.0], "one failure lasts for no time"
    time.now += 1.0
    assert time.troubles.present() == [], "nobody has tried for so long"


def test_trouble_of_what_is_gone_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    time = VirtualTime(monkeypatch)
    trouble = clients.Trouble(logging.getLogger("test"), "a shard that another worker relays now")
    trouble.note("away")
    time.now += 1.0
    assert len(time.troubles.present()) == 1
    del trouble
    assert time.troubles.present() == []


def test_trouble_that_an_outage_explained_has_ended_with_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch logs each outage, however soon the next one comes."""
    now = 1_000.0
    outages = watched_outages(monkeypatch)
    monkeypatch.setattr(clients.time, "monotonic", lambda: now)
    trouble = clients.Trouble(logging.getLogger("test"), "shard 3")
    for _ in range(3):
        trouble.say("away")
        outages.began("Kafka")
        now += 12.0
        outages.ended("Kafka")
        trouble.say("away")
        trouble.over()
        now += 12.0
    assert caplog.messages == []


def test_an_outage_soon_after_other_trouble_is_an_outage(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal that came too late a while ago does not make the next outage a row of warnings: the watch
    notices an outage only after seconds.
    """
    time = VirtualTime(monkeypatch)
    outages = watched_outages(monkeypatch)
    trouble = clients.Trouble(logging.getLogger("test"), "lease of shard 3")
    trouble.say("TimeoutError")
    trouble.over()
    time.now += 20.0
    trouble.say("refused")
    time.now += 4.0
    outages.began("Redis")
    trouble.say("refused")
    time.now += 30.0
    outages.ended("Redis")
    trouble.over()
    assert caplog.messages == []


async def test_a_reader_fetches_nothing_while_nobody_reads(system: Settings) -> None:
    """Its consumer would ask for what comes next, a hundred times a second, also after a read that was broken
    off.
    """
    topic = Topics(system.prefix).journal
    producer = AIOKafkaProducer(bootstrap_servers=system.kafka)
    async with clients.started(producer), open_reader(system.kafka, topic) as reader:
        for number in range(3):
            await producer.send_and_wait(topic, b"%d" % number, partition=number % 2)
        for _ in range(2):
            read = [record.value async for records in reader.read(0, 0, 2) for record in records]
            assert read == [b"0", b"2"]
            assert reader._consumer.paused() == reader._consumer.assignment()
        async with aclosing(reader.read(1, 0, 9)) as broken_off:
            assert [record.value for record in await anext(broken_off)] == [b"1"]
        assert reader._consumer.paused() == reader._consumer.assignment()
