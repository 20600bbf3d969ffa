"""`KafkaClient`: commands by Kafka and their answers, with other services on the same topics."""

import asyncio
import re
import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
from aiokafka import (  # type: ignore[import-untyped]
    AIOKafkaConsumer,
    AIOKafkaProducer,
    TopicPartition,
)
from aiokafka.errors import (  # type: ignore[import-untyped]
    CorruptRecordException,
    KafkaConnectionError,
)

from grabstream import KafkaClient, OutcomeUnknown, RequestProblem, SyncKafkaClient
from grabstream.client.exchange import pause_seconds
from grabstream.models.vocabulary import CouponTerms, EnvelopeTerms, Grab
from grabstream.settings import Settings
from grabstream.streams.clients import started
from grabstream.streams.journal import open_reader
from grabstream.workshop.rehearsal.stage import take_down
from grabstream.workshop.services import free_ports
from tests.conftest import Worker, make_system, until

COUPON: Final = CouponTerms(issuer="shop", total=9)


@pytest.fixture(scope="module")
def system(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A system with a worker that decides."""
    name = f"test{secrets.token_hex(5)}"
    settings = servers.model_copy(update={"prefix": name, "schema_": name, "shards": 2})
    asyncio.run(make_system(settings))
    worker = Worker(settings, "decide,relay", tmp_path_factory.mktemp("kafka") / "worker.log")
    try:
        yield settings
    finally:
        worker.stop()
        asyncio.run(take_down(settings))


async def test_a_system_that_does_not_exist_is_reported_at_once(
    servers: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    words = rf"no topic nosuch\.results at {re.escape(servers.kafka)}: run `grabstream init`"
    async with asyncio.timeout(10):
        with pytest.raises(RequestProblem, match=words):
            async with KafkaClient(servers.kafka, "nosuch"):
                pass
    assert len(caplog.messages) <= 5


async def test_commands_have_their_answers(system: Settings) -> None:
    async with KafkaClient(system.kafka, system.prefix) as client:
        opened = await client.open(COUPON, "tea", id="open-tea")
        assert (opened.outcome, opened.left) == ("opened", 9)
        granted = await client.grab("tea", "ann", id="g-1")
        assert (granted.outcome, granted.left, granted.user) == ("granted", 8, "ann")
        again = await client.grab("tea", "ann", id="g-1")
        assert again == granted.model_copy(update={"repeated": True})
        assert (await client.grab("none", "ann")).outcome == "no_such_offer"
        assert (await client.redeem("tea", "g-1", "ann", "order-1")).outcome == "redeemed"
        await client.open(COUPON, "july:a")
        await client.open(COUPON, "july:b")
        basket = [Grab(id="x", offer=f"july:{name}", user="ann") for name in "ab"]
        answers = await client.take_basket(basket, "both")
        assert [(one.outcome, one.offer, one.grab) for one in answers] == [
            ("granted", "july:a", "both.1"), ("granted", "july:b", "both.2"),
        ]  # fmt: skip
        again = await client.take_basket(basket[::-1], "both")
        assert [(one.repeated, one.grab) for one in again] == [(True, "both.2"), (True, "both.1")]


async def test_refusals_say_why(system: Settings) -> None:
    """In the words of a gateway, except that the id of a command is not a header here."""
    async with KafkaClient(system.kafka, system.prefix) as client:
        none = await client.grab("none", "ann")
        assert (none.message or "").startswith("There is no offer none: it was never opened, or")
        assert "/v1" not in (none.message or "")
        await client.open(COUPON, "august:a")
        await client.open(COUPON.model_copy(update={"total": 1}), "august:b")
        await client.grab("august:b", "ann", id="g")
        assert "request fewer" in ((await client.return_("august:b", "g", "ann", quantity=2)).message or "")
        basket = [Grab(id="x", offer=f"august:{name}", user="bob") for name in "ba"]
        b, a = await client.take_basket(basket, "both-2")
        assert (a.outcome, b.outcome) == ("sold_out", "sold_out")
        assert (b.message or "").startswith("Nothing is left of offer august:b (the basket was refused")
        assert a.message == "basket: refused at offer august:b, with grab both-2.2"
        for again in await client.take_basket(basket, "both-2"):
            assert again.repeated
            assert (again.message or "").startswith("The basket both-2 was refused before, as sold_out:")


async def test_a_crowd_of_one_id_and_other_services(system: Settings) -> None:
    """Users may have grabs with the same id. Records that are not answers are skipped."""
    envelope = EnvelopeTerms(issuer="alice", funding="p", asset="CNY", total=900, parts=90)
    producer = AIOKafkaProducer(bootstrap_servers=system.kafka)
    await producer.start()
    async with (
        KafkaClient(system.kafka, system.prefix) as client,
        KafkaClient(system.kafka, system.prefix) as other,
    ):
        await client.open(envelope, "crowd")
        for value in (b"rubbish", b"[]", b'{"id":"same"}', b'{"id":"same","outcome":1,"code":"x"}', None):
            await producer.send_and_wait(f"{system.prefix}.results", value, key=b"same", partition=0)
        await producer.send_and_wait(f"{system.prefix}.results", b"x", key=b"\xff", partition=1)
        answers = await asyncio.gather(
            *(client.grab("crowd", f"u{n}", id="same") for n in range(50)),
            *(other.grab("crowd", f"v{n}", id="same") for n in range(50)),
        )
    await producer.stop()
    users = [f"u{n}" for n in range(50)] + [f"v{n}" for n in range(50)]
    assert [answer.user for answer in answers] == users
    outcomes = [answer.outcome for answer in answers]
    assert (outcomes.count("granted"), outcomes.count("sold_out")) == (90, 10)
    assert sum(one.amount or 0 for one in answers if one.positive) == 900


async def test_an_answer_that_is_lost_is_asked_for_again(
    system: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grabstream.client.over_kafka.REPEAT_SECONDS", 0.5)
    async with KafkaClient(system.kafka, system.prefix) as client:
        await client.open(COUPON, "lost")
        assert client._reading is not None
        seen: list[bytes] = []
        real = client._consumer.__class__.__anext__

        async def losing(consumer: object) -> object:
            record = await real(consumer)
            while record.key == b"g-lost" and record.value not in seen:
                seen.append(record.value)
                record = await real(consumer)
            return record

        monkeypatch.setattr(client._consumer.__class__, "__anext__", losing)
        # The read in progress began before the change: its record comes through.
        assert (await client.grab("lost", "ann", id="g-1")).left == 8
        answer = await client.grab("lost", "bob", id="g-lost")
        assert (answer.outcome, answer.left, answer.repeated) == ("granted", 7, True)
        assert len(seen) == 2  # the first answer, and the one that says `repeated`, once


async def test_calls_that_are_closed_are_unknown_and_one_identity_waits_once(system: Settings) -> None:
    async with KafkaClient(system.kafka, system.prefix) as client:
        await client.open(COUPON, "closing")
        client._consumer.pause(*client._consumer.assignment())
        waiting = asyncio.create_task(client.grab("closing", "ann", id="g"))
        await until(lambda: client._waiting)
        with pytest.raises(ValueError, match="waiting for its answer"):
            await client.grab("closing", "ann", id="g", quantity=2)
    with pytest.raises(OutcomeUnknown, match="send it again with the id g"):
        await waiting
    with pytest.raises(RuntimeError, match="async with"):
        await client.grab("closing", "ann")


async def test_a_reader_that_ends_begins_again_where_it_was(
    system: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer that came meanwhile is read, without that its command is sent again."""
    monkeypatch.setattr("grabstream.client.over_kafka.REPEAT_SECONDS", 3_600.0)
    async with KafkaClient(system.kafka, system.prefix) as client:
        await client.open(COUPON, "reader")
        kind, first = client._consumer.__class__, client._consumer
        real, start, may_start = kind.__anext__, kind.start, asyncio.Event()

        async def failing(consumer: object) -> object:
            record = await real(consumer)
            if consumer is first:
                raise CorruptRecordException("the batch cannot be read")
            return record

        async def starting(consumer: object) -> None:
            if not may_start.is_set():
                raise KafkaConnectionError("no broker")
            await start(consumer)

        monkeypatch.setattr(kind, "__anext__", failing)
        monkeypatch.setattr(kind, "start", starting)
        # The read in progress began before the change: its record comes through.
        assert (await client.grab("reader", "ann")).left == 8
        waiting = asyncio.create_task(client.grab("reader", "bob", id="g-bob"))
        await until(lambda: "no broker" in caplog.text)
        assert not client._is_reading.is_set()
        # What is asked now is sent when answers are read again.
        later = asyncio.create_task(client.grab("reader", "eve", id="g-eve"))
        await until(lambda: caplog.text.count("no broker") >= 3)
        assert (waiting.done(), later.done()) == (False, False)
        may_start.set()
        answers = await waiting, await later
        assert [(one.left, one.repeated) for one in answers] == [(7, False), (6, False)]


async def test_what_is_not_sent_is_not_unknown(system: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no answers can be read, nothing is sent. Calls end in time, and when the client closes."""
    topic = TopicPartition(f"{system.prefix}.commands", 0)
    async with KafkaClient(system.kafka, system.prefix, timeout_seconds=1.0) as client:
        await client.open(COUPON, "silent")
        before = await client._consumer.end_offsets([topic._replace(partition=one) for one in (0, 1)])

        async def ending(consumer: object) -> object:
            raise CorruptRecordException("the batch cannot be read")

        monkeypatch.setattr(client._consumer.__class__, "__anext__", ending)
        monkeypatch.setattr(
            client, "_new_consumer", lambda: AIOKafkaConsumer(bootstrap_servers="127.0.0.1:1")
        )
        producer = AIOKafkaProducer(bootstrap_servers=system.kafka)
        async with started(producer):
            await producer.send_and_wait(
                f"{system.prefix}.results", b"ends the read in progress", partition=0
            )
        await until(lambda: not client._is_reading.is_set())
        with pytest.raises(RequestProblem, match="answers cannot be read within 1 s"):
            await client.grab("silent", "ann")
        client._timeout_seconds = 3_600.0
        waiting = asyncio.create_task(client.grab("silent", "ann"))
        await asyncio.sleep(0)  # it waits until answers are read
    with pytest.raises(RequestProblem, match="the client was closed"):
        await waiting
    async with open_reader(system.kafka, topic.topic) as reader:
        assert {topic._replace(partition=one): await reader.end(one) for one in (0, 1)} == before


def test_pauses_grow_and_are_random() -> None:
    longest = [max(pause_seconds(attempt) for _ in range(400)) for attempt in (0, 1, 4, 6, 10_000)]
    for found, bound in zip(longest, (0.1, 0.2, 1.6, 5.0, 5.0), strict=True):
        assert bound / 2 < found <= bound


async def answers_to_others_are_skipped(settings: Settings) -> None:
    """An answer that lacks the offer or the user is to a command that lacked it, of another service."""
    text = '{"id":"of-two","outcome":"invalid","code":20,"message":"not a command"%s}'
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka)
    await producer.start()
    async with KafkaClient(settings.kafka, settings.prefix, timeout_seconds=0.5) as client:
        for named in ("", ',"user":"ann"', ',"offer":"later"', ',"offer":"later","user":"bob"'):
            call = asyncio.create_task(client.grab("later", "ann", id="of-two"))
            while not call.done():
                value = (text % named).encode()
                await producer.send_and_wait(f"{settings.prefix}.results", value, key=b"of-two")
            with pytest.raises(OutcomeUnknown):
                await call
    await producer.stop()


@pytest.mark.long
async def test_without_a_worker_the_outcome_is_unknown_and_a_repeat_is_safe(
    servers: Settings, tmp_path: Path
) -> None:
    name = f"test{secrets.token_hex(5)}"
    settings = servers.model_copy(update={"prefix": name, "schema_": name, "shards": 1})
    await make_system(settings)
    try:
        async with KafkaClient(settings.kafka, settings.prefix, timeout_seconds=1.0) as client:
            with pytest.raises(OutcomeUnknown, match="send it again with the id open-1"):
                await client.open(COUPON, "later", id="open-1")
        await answers_to_others_are_skipped(settings)
        worker = await asyncio.to_thread(Worker, settings, "decide,relay", tmp_path / "log")
        try:
            async with KafkaClient(settings.kafka, settings.prefix) as client:
                answer = await client.open(COUPON, "later", id="open-1")
                assert (answer.outcome, answer.left) == ("opened", 9)
                # The one that was sent again and again was granted once, or came before the offer: the
                # order holds within a topic.
                assert (await client.grab("later", "ann")).left in (7, 8)
        finally:
            await asyncio.to_thread(worker.stop)
    finally:
        await take_down(settings)


async def test_a_client_that_cannot_start_says_so(servers: Settings) -> None:
    [port] = free_ports(1)
    with pytest.raises(KafkaConnectionError):
        async with KafkaClient(f"127.0.0.1:{port}", "x"):
            pass
    client = KafkaClient(servers.kafka, "x")
    with pytest.raises(RuntimeError, match="async with"):
        await client.grab("o", "u")
    await client.__aexit__(None, None, None)


# -- for threads ---------------------------------------------------------------------------------------------


def test_threads_share_a_client(system: Settings) -> None:
    """It connects once, with the first call, also without `with`."""
    client = SyncKafkaClient(system.kafka, system.prefix)
    assert client.open(COUPON, "threads").outcome == "opened"
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda number: client.grab("threads", f"u{number}"), range(20)))
    assert [one.user for one in answers] == [f"u{number}" for number in range(20)]
    assert sorted(one.outcome for one in answers) == ["granted"] * 9 + ["sold_out"] * 11
    client.open(COUPON, "september:a")
    grabs = [Grab(id="x", offer="september:a", user="ann")]
    assert [one.grab for one in client.take_basket(grabs, "all")] == ["all.1"]
    client.end()
    with pytest.raises(RuntimeError, match="is closed"):
        client.grab("threads", "ann")
    client.end()


def test_a_client_of_threads_says_why_it_cannot_connect_and_tries_again(system: Settings) -> None:
    [port] = free_ports(1)
    with (
        pytest.raises(RequestProblem, match="no_brokers: KafkaConnectionError"),
        SyncKafkaClient(f"127.0.0.1:{port}", "x"),
    ):
        pass
    client = SyncKafkaClient(system.kafka, "nosuch", timeout_seconds=20.0)
    for _ in range(2):
        with pytest.raises(RequestProblem, match=r"no topic nosuch\.results"):
            client.grab("o", "u")
    client.end()


def test_calls_of_threads_end_with_their_client(system: Settings) -> None:
    client = SyncKafkaClient(system.kafka, system.prefix, timeout_seconds=3_600.0)
    client.open(COUPON, "ending")
    reading = client._client().client
    assert reading is not None

    async def pause() -> None:
        reading._consumer.pause(*reading._consumer.assignment())

    client._wait(pause())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.grab, "ending", "ann", id="g")
        while not reading._waiting:
            assert not waiting.done()
            time.sleep(0.01)
        client.end()
        with pytest.raises(OutcomeUnknown, match="send it again with the id g"):
            waiting.result(60)


def test_a_client_that_ends_while_it_connects(system: Settings) -> None:
    """The server accepts connections, and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        client = SyncKafkaClient(f"127.0.0.1:{silent.getsockname()[1]}", "x", timeout_seconds=3_600.0)
        waiting = pool.submit(client.grab, "o", "u")
        silent.accept()
        client.end()
        with pytest.raises(RequestProblem, match="no_brokers: the client has ended"):
            waiting.result(60)
        late = SyncKafkaClient(f"127.0.0.1:{silent.getsockname()[1]}", "x", timeout_seconds=0.2)
        with pytest.raises(RequestProblem, match=r"no_brokers: no connection within 0\.2 s"):
            late.grab("o", "u")
        late.end()
