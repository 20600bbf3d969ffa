"""Webhooks end to end: a journal, the role that delivers, and receivers that take events, refuse them, or do
not answer. Real Kafka, PostgreSQL and HTTP; short pauses in place of long ones.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web
from standardwebhooks.webhooks import Webhook as Verifier

from grabstream.crypto.sealing import Sealer
from grabstream.models.events import PaymentRefundDue, encode_event
from grabstream.models.journal import Cursor
from grabstream.models.runs import decode_line
from grabstream.projections.cursors import CursorMoved, facts_of
from grabstream.projections.database.sessions import session_name
from grabstream.projections.tables import webhooks as stored
from grabstream.projections.tables.webhooks import Webhook
from grabstream.settings import Settings
from grabstream.streams import follower
from grabstream.streams.follower import Chunk
from grabstream.streams.topics import Topics, create_topics
from grabstream.streams.webhooks import reading, role, sending
from grabstream.streams.webhooks.messages import SEALED_FOR, new_secret
from grabstream.streams.webhooks.reading import chunks_after
from grabstream.streams.webhooks.role import Webhooks
from grabstream.streams.webhooks.sending import DeliveryOutcome, SendBounds
from tests.conftest import until
from tests.streams.webhooks.receiver import Got, Receiver, never, ok, receiving
from tests.support.command_line import env_of, grabstream
from tests.support.flooding import flooding
from tests.support.losses import delete_topics
from tests.support.projecting import (
    SHARD,
    JournalWriter,
    catching_up,
    granted,
    journal,  # noqa: F401 - a fixture
    open_books,
    opened,
    until_at_seq,
)
from tests.support.runs import as_runs, as_singles

LIMITS = SendBounds(http=True, private=True, timeout_seconds=2.0, attempts_max=3)


def lines_of(*offers: str) -> list[bytes]:
    """An event of each offer in turn, from seq 1 on; its time is its seq, in ms."""
    known: set[str] = set()
    lines = []
    for seq, offer in enumerate(offers, 1):
        lines.append(granted(offer, seq) if offer in known else opened(offer, seq))
        known.add(offer)
    return lines


class Hooks:
    """Webhooks of a system, and the role that delivers them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sealer = Sealer.from_text(settings.seal_keys.get_secret_value())
        self.secrets: dict[str, str] = {}

    async def add(
        self, name: str, url: str, types: Sequence[str] = (), offers: Sequence[str] = (), from_ms: int = 0
    ) -> None:
        secret = self.secrets[name] = new_secret()
        async with await open_books(self.settings) as books:
            sealed = self.sealer.seal(0, name, SEALED_FOR, secret)
            await stored.add(books, name, url, types, offers, sealed, from_ms)

    @asynccontextmanager
    async def delivering(self, limits: SendBounds = LIMITS) -> AsyncIterator[None]:
        stop = asyncio.Event()
        worker = Webhooks(
            self.settings.postgres, self.settings.schema_, self.settings.kafka, self.settings.prefix,
            self.settings.shards, self.sealer, limits,
        )  # fmt: skip
        task = asyncio.create_task(worker.run(stop))
        try:
            yield
            assert not task.done(), task
        finally:
            stop.set()
            await task

    async def ask(self, what: Any, *arguments: Any) -> Any:
        async with await open_books(self.settings) as books:
            return await what(books, *arguments)

    async def found(self, name: str) -> Webhook:
        return next(one for one in await self.ask(stored.find_all) if one.webhook == name)

    async def left(self, name: str | None = None, state: str | None = None) -> list[str]:
        return [one.event for one in await self.ask(stored.undelivered, name, state, 1_000)]

    async def is_idle(self) -> bool:
        """Whether nothing is left to deliver."""
        return await self.left() == []

    async def cursors(self) -> dict[str, Cursor]:
        found: dict[str, Cursor] = await self.ask(stored.cursors_of, SHARD)
        return found


@pytest.fixture
async def hooks(system: Settings, monkeypatch: pytest.MonkeyPatch) -> Hooks:
    for module in (follower, sending):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(reading, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(reading, "COUNT_SECONDS", 0.0)
    # A topic that was just made may look empty for a moment, which contradicts a cursor.
    monkeypatch.setattr(reading, "REST_SECONDS", 0.5)
    for name in ("AGAIN_SECONDS_MIN", "PROBE_SECONDS_MIN", "PROBE_SECONDS_MAX"):
        monkeypatch.setattr(sending, name, 0.05)
    monkeypatch.setattr(sending, "AGAIN_SECONDS_MAX", 0.2)
    return Hooks(system)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as one:
        yield one


async def got(receiver: Receiver, count: int) -> None:
    await until(lambda: len(receiver.requests) >= count, 20, f"{count} requests")


def seqs(receiver: Receiver, offer: str | None = None) -> list[int]:
    return [int(one.id.partition("-")[2]) for one in receiver.requests if offer in (None, one.offer)]


async def slowly(one: Got) -> web.StreamResponse:
    await asyncio.sleep(0.01)
    return web.Response(status=200, text="x" * 100)


def answering(status: int, *ids: str, **headers: str) -> Any:
    """Answers a status to some events, and takes the others."""

    async def answer(one: Got) -> web.StreamResponse:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, headers=given) if one.id in ids else await ok(one)

    return answer


@pytest.mark.requirement("B7")
async def test_events_are_sent_signed_in_the_order_of_their_offers(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    lines = lines_of(*["a", "b", "c"] * 20)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 30)
    receiver.answer = slowly
    await hooks.add("all", receiver.url)
    async with hooks.delivering():
        await got(receiver, 30)
        await journal.block(lines, 31, 60)
        await got(receiver, 60)
        await until(hooks.is_idle, 10, "an empty queue")
    for offer, first in (("a", 1), ("b", 2), ("c", 3)):
        assert seqs(receiver, offer) == list(range(first, 61, 3))
    assert receiver.most_of_offer == 1
    assert receiver.most > 1
    events = as_singles(lines)
    for one in receiver.requests:
        message = Verifier(hooks.secrets["all"]).verify(one.body, one.headers)
        line = events[message["data"]["seq"] - 1].decode()
        assert one.body.endswith(f'"data":{line}}}')
        assert one.id == f"{SHARD}-{message['data']['seq']}"
        assert message["type"] == message["data"]["type"]
        assert one.headers["content-type"] == "application/json"
    assert (await hooks.found("all")).delivered == 60


@pytest.mark.long
async def test_runs_are_sent_grab_by_grab_as_on_the_topic(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    # Those of one time and offer become one run.
    lines = [opened("e", 1), *(granted("e", seq).replace(b'"at":%d' % seq, b'"at":9') for seq in range(2, 9))]
    lines = [line.replace(b'"left":3', b'"left":%d' % (11 - seq)) for seq, line in enumerate(lines, 1)]
    runs = as_runs(lines)
    assert len(runs) == 2
    await journal.marker(1, "a")
    await journal.block(runs, 1, 2, last_seqs=[1, 8])
    await hooks.add("one", receiver.url, types=["grab.granted"])
    async with hooks.delivering():
        await got(receiver, 7)
        await until(hooks.is_idle, 10, "an empty queue")
    assert [one.body.partition('"data":')[2][:-1].encode() for one in receiver.requests] == as_singles(
        lines[1:]
    )


@pytest.mark.long
async def test_a_subscription_gets_its_types_and_offers_from_its_time_on(
    hooks: Hooks,
    journal: JournalWriter,
) -> None:
    # Money that cannot be served is reported by its own type.
    due = PaymentRefundDue(
        v=1, shard=SHARD, seq=21, offer_seq=1, offer="c", at=21, command="p", grab="g", payment="p", amount=5,
        asset="CNY", outcome="expired", digest="d",
    )  # fmt: skip
    lines = [*lines_of(*["a", "b"] * 10), encode_event(due)]
    await journal.marker(1, "a")
    await journal.block(lines, 1, 21)
    wanted = {
        "refunds": ({"types": ["payment.refund_due"]}, [21]),
        "types": ({"types": ["offer.opened"]}, [1, 2]),
        "offers": ({"offers": ["b"]}, list(range(2, 21, 2))),
        "both": ({"types": ["grab.granted"], "offers": ["a", "nobody"]}, list(range(3, 21, 2))),
        "late": ({"from_ms": 15}, list(range(15, 22))),
    }
    async with AsyncExitStack() as stack:
        receivers = {name: await stack.enter_async_context(receiving()) for name in wanted}
        for name, (more, _) in wanted.items():
            await hooks.add(name, receivers[name].url, **more)
        async with hooks.delivering():
            for name, (_, expected) in wanted.items():
                await got(receivers[name], len(expected))
            await until(hooks.is_idle, 10, "an empty queue")
        assert {name: sorted(seqs(one)) for name, one in receivers.items()} == {
            name: expected for name, (_, expected) in wanted.items()
        }


@pytest.mark.long
async def test_a_new_subscription_begins_now_beside_a_journal_that_is_vouched_for(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    lines = lines_of(*["e"] * 40)
    await journal.marker(1, "a")
    for first in range(1, 31, 3):
        await journal.block(lines, first, first + 2)
    async with catching_up(hooks.settings):
        await until_at_seq(hooks.settings, 30)
    # From now on; and from a time that the audit trail has.
    async with receiving() as past:
        await hooks.add("now", receiver.url, from_ms=31)
        await hooks.add("past", past.url, from_ms=20)
        async with hooks.delivering():
            await got(past, 11)
            await journal.block(lines, 31, 40)
            await got(receiver, 10)
            await got(past, 21)
        assert seqs(receiver) == list(range(31, 41))
        assert seqs(past) == list(range(20, 41))


@pytest.mark.long
async def test_a_receiver_that_does_not_answer_delays_no_other(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    lines = lines_of(*["a", "b", "c", "d"] * 10)
    await journal.marker(1, "a")
    async with receiving() as dead, receiving() as closed:
        dead.answer = never
        gone = closed.url
        for name, url in (("dead", dead.url), ("gone", gone), ("good", receiver.url)):
            await hooks.add(name, url)
        async with hooks.delivering(LIMITS._replace(timeout_seconds=30.0)):
            await journal.block(lines, 1, 20)
            await got(dead, 4)
            began = time.monotonic()
            await journal.block(lines, 21, 40)
            await got(receiver, 40)
            assert time.monotonic() - began < 10
            assert dead.in_work == dict.fromkeys("abcd", 1)
        assert len(seqs(dead)) == 4
    assert seqs(receiver, "a") == list(range(1, 41, 4))


@pytest.mark.long
async def test_failed_events_are_sent_again_then_parked_with_those_after_them(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    lines = lines_of(*["a", "b"] * 10)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 10)
    bad = f"{SHARD}-5"
    receiver.answer = answering(400, bad)
    await hooks.add("one", receiver.url)
    async with hooks.delivering():

        async def is_parked() -> bool:
            return await hooks.left("one", "parked") == [f"{SHARD}-{seq}" for seq in (5, 7, 9)]

        await until(is_parked, 10, "an event is parked")
        assert seqs(receiver, "a") == [1, 3, 5, 5, 5]
        # The other offer, and what comes later, are not concerned; of this one, all is parked.
        await journal.block(lines, 11, 20)
        await got(receiver, 5 + 10)
        assert seqs(receiver, "b") == list(range(2, 21, 2))
        expected = [f"{SHARD}-{seq}" for seq in range(5, 20, 2)]

        async def all_parked() -> bool:
            return await hooks.left("one", "parked") == expected

        await until(all_parked, 10, "later events are parked")
        [first, *_] = await hooks.ask(stored.undelivered, "one", "parked", 10)
        assert (first.attempts, first.status) == (3, 400)
        assert first.problem == "the receiver answered 400: not a success"
        # Sent again, in order; the bad one is parked again, until it is given up.
        receiver.requests.clear()
        assert await hooks.ask(stored.resend, "one", "a") == 8
        await until(all_parked, 10, "it is parked again")
        assert seqs(receiver) == [5, 5, 5]
        assert await hooks.ask(stored.discard, "one", SHARD, 5)
        assert await hooks.ask(stored.resend, "one", None) == 7
        await until(hooks.is_idle, 10, "an empty queue")
    assert seqs(receiver) == [5, 5, 5, *range(7, 20, 2)]
    assert not await hooks.ask(stored.discard, "one", SHARD, 5)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (answering(302, f"{SHARD}-1", location="http://127.0.0.1:1/"), "a redirect, which is not followed"),
        (answering(500, f"{SHARD}-1"), "the receiver answered 500"),
    ],
)
async def test_redirects_are_not_followed(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
    answer: Any,
    problem: str,
) -> None:
    await journal.marker(1, "a")
    await journal.block(lines_of("a"), 1, 1)
    receiver.answer = answer
    await hooks.add("one", receiver.url)
    async with hooks.delivering():
        await got(receiver, 3)

        async def is_over() -> bool:
            return await hooks.left("one", "waiting") == []

        await until(is_over, 10, "it is over")
    [found] = await hooks.ask(stored.undelivered, "one", "parked", 10)
    assert problem in (found.problem or "")


async def test_an_answer_without_an_end_is_not_read(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    """Its status counts; what it says is read up to a bound, and within the time limit."""
    sent = 0

    async def endless(one: Got) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(status=200)
        await response.prepare(one.request)
        with suppress(ConnectionError):
            while sent < 100_000_000:
                await response.write(b"x" * 65_536)
                sent += 65_536
        return response

    receiver.answer = endless
    await journal.marker(1, "a")
    await journal.block(lines_of("a"), 1, 1)
    await hooks.add("one", receiver.url)
    async with hooks.delivering():
        await got(receiver, 1)
        await until(hooks.is_idle, 10, "it is delivered")
    assert len(receiver.requests) == 1
    assert sent < 50_000_000


async def test_interim_responses_without_an_end_are_a_failure_and_delay_no_other(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    """The client would queue them in memory for as long as they come."""
    await journal.marker(1, "a")
    await journal.block(lines_of("a", "a", "a"), 1, 3)
    async with flooding("interim") as flood:
        await hooks.add("one", f"http://127.0.0.1:{flood.port}/")
        await hooks.add("two", receiver.url)
        async with hooks.delivering(LIMITS._replace(timeout_seconds=60.0)):
            await got(receiver, 3)

            async def is_parked() -> bool:
                return await hooks.left("one", "parked") != []

            await until(is_parked, 20, "it is parked")
    assert seqs(receiver) == [1, 2, 3]
    [first, *_] = await hooks.ask(stored.undelivered, "one", "parked", 10)
    assert first.problem == "AnswerTooLong: the answer has more than 65536 bytes"


async def test_a_receiver_that_is_gone_for_good_is_paused(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    lines = lines_of(*["a"] * 6)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 3)
    receiver.answer = answering(410, f"{SHARD}-2")
    await hooks.add("one", receiver.url)
    async with hooks.delivering():

        async def is_paused() -> bool:
            return (await hooks.found("one")).state == "paused"

        await until(is_paused, 10, "it is paused")
        assert "answered 410" in str((await hooks.found("one")).reason)
        await journal.block(lines, 4, 6)
        # Once it is resumed, it gets all that it missed.
        receiver.answer = ok
        assert await hooks.ask(stored.set_state, "one", "active")
        await got(receiver, 7)
        await until(hooks.is_idle, 10, "an empty queue")
    assert seqs(receiver) == [1, 2, 2, 3, 4, 5, 6]


async def away(one: Got) -> web.StreamResponse:
    """Answers that it takes nothing now."""
    return web.Response(status=503)


def with_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one failure, an event's own pause is longer than any test."""
    monkeypatch.setattr(sending, "AGAIN_SECONDS_MIN", 3_600.0)
    monkeypatch.setattr(sending, "AGAIN_SECONDS_MAX", 3_600.0)


async def attempts(hooks: Hooks) -> dict[int, int]:
    """The attempts that count, by seq, of the events that were tried without success."""
    found = await hooks.ask(stored.undelivered, None, None, 100)
    return {one.seq: one.attempts for one in found if one.attempts}


async def test_a_receiver_that_is_back_gets_what_waits_before_its_own_pause_is_over(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_long_pauses(monkeypatch)
    lines = lines_of(*["a", "b", "c", "d", "e"], *["a", "b", "c", "d", "e"])
    await journal.marker(1, "a")
    await journal.block(lines, 1, 10)
    receiver.answer = away
    await hooks.add("one", receiver.url)
    async with hooks.delivering():
        # Each offer has failed once. Then one request at a time tries again; these do not count as attempts.
        await got(receiver, 5 + 12)
        assert await attempts(hooks) == dict.fromkeys(range(1, 6), 1)
        # All offers have their turn.
        assert {one.offer for one in receiver.requests[5:]} == set("abcde")
        receiver.answer = ok
        await until(hooks.is_idle, 10, "an empty queue")
    assert list(dict.fromkeys(seqs(receiver, "a"))) == [1, 6]
    assert receiver.most_of_offer == 1


async def test_a_new_worker_tries_what_failed_before_its_own_pause_is_over(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_long_pauses(monkeypatch)
    await journal.marker(1, "a")
    await journal.block(lines_of("a"), 1, 1)
    receiver.answer = away
    await hooks.add("one", receiver.url)
    for _ in range(2):
        async with hooks.delivering():
            await got(receiver, len(receiver.requests) + 3)
    async with hooks.delivering():
        await got(receiver, len(receiver.requests) + 3)
        assert await attempts(hooks) == {1: 1}
        receiver.answer = ok
        await until(hooks.is_idle, 10, "an empty queue")


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (400, {}),
        (503, {"retry-after": "3600"}),
        (503, {"retry-after": formatdate(time.time() + 3_600, usegmt=True)}),
    ],
    ids=["refused", "seconds", "date"],
)
async def test_what_a_receiver_refuses_or_asks_to_wait_for_is_not_sent_early(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, monkeypatch: pytest.MonkeyPatch,
    status: int, headers: dict[str, str],
) -> None:  # fmt: skip
    with_long_pauses(monkeypatch)
    lines = lines_of("a", *["b"] * 9)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 1)

    async def answer(one: Got) -> web.StreamResponse:
        if one.offer == "a":
            return web.Response(status=status, headers=headers)
        return web.Response(status=204)

    receiver.answer = answer
    await hooks.add("one", receiver.url)
    async with hooks.delivering():
        await got(receiver, 1)
        for seq in range(2, 11):
            await journal.block(lines, seq, seq)
            await got(receiver, seq)
    assert seqs(receiver) == list(range(1, 11))
    assert await attempts(hooks) == {1: 1}


def test_after_a_success_what_failed_is_sent_early_once_in_the_longest_pause() -> None:
    """An event that alone fails would otherwise be sent again after each success of another one."""
    now = datetime(2027, 1, 1, tzinfo=UTC)
    one = sending.Receiver(Webhook("wh", "u", (), (), "s", "active", None, 0, now, 0, None, None, None))
    failed, delivered, longest = (
        DeliveryOutcome(False, 503),
        DeliveryOutcome(True, 204),
        sending.PROBE_SECONDS_MAX,
    )
    # What failed before this process began, until all was tried.
    assert one.is_early(1.0)
    one.all_tried(1.0)
    assert (one.is_early(1.0), one.room(1.0)) == (False, sending.PARALLEL_MAX)
    one.note("bad", failed, 1.0)
    assert (one.is_early(1.5), one.is_early(2.0), one.room(2.0)) == (False, True, 1)
    one.note("good", delivered, 3.0)
    assert (one.is_early(3.0), one.tried) == (True, set())
    one.note("bad", failed, 3.0)
    assert one.tried == {"bad"}
    one.all_tried(3.0)
    for second in range(4, 60, 2):
        one.note("good", delivered, float(second))
        assert not one.is_early(second + 0.5)
        one.note("bad", failed, float(second + 1))
    one.note("good", delivered, 61.0)
    assert (one.is_early(2.9 + longest), one.is_early(3.0 + longest)) == (False, True)
    # One that takes nothing is tried ever more rarely, but once a minute.
    for second in range(100, 120):
        one.note("bad", failed, float(second))
    assert (one.room(119.0), one.room(118.0 + longest), one.room(119.0 + longest)) == (0, 0, 1)
    # One that asks for a pause gets it.
    one.note("bad", failed._replace(after_seconds=1_000.0), 200.0)
    assert (one.room(200.0 + longest), one.is_early(200.0 + longest), one.is_early(1_200.0)) == (
        1,
        False,
        True,
    )
    one.note_operator(now, 201.0)
    assert (one.room(201.0), one.is_early(201.0)) == (sending.PARALLEL_MAX, True)


@pytest.mark.parametrize("asks", ["resend", "resend of the offer", "pause and resume"])
async def test_what_waits_is_sent_at_once_when_an_operator_asks(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    with_long_pauses(monkeypatch)
    # Nothing is retried automatically, either.
    for name in ("PROBE_SECONDS_MIN", "PROBE_SECONDS_MAX"):
        monkeypatch.setattr(sending, name, 3_600.0)
    await journal.marker(1, "a")
    await journal.block(lines_of("a", "b", "c", "a"), 1, 4)
    receiver.answer = away
    await hooks.add("one", receiver.url)
    async with hooks.delivering():

        async def have_failed() -> bool:
            return await attempts(hooks) == {1: 1, 2: 1, 3: 1}

        await until(have_failed, 10, "each offer has failed")
        receiver.answer = ok
        if asks == "resend":
            assert await hooks.ask(stored.resend, "one", None) == 3
            assert await hooks.ask(stored.resend, "none", None) == 0
        elif asks == "resend of the offer":
            # Since that succeeds, the others are sent, too.
            assert await hooks.ask(stored.resend, "one", "a") == 1
        else:
            for state in ("paused", "active"):
                assert await hooks.ask(stored.set_state, "one", state)
        await until(hooks.is_idle, 10, "an empty queue")
    assert set(seqs(receiver)) == {1, 2, 3, 4}
    assert len(receiver.requests) == 3 + 4


async def test_an_operator_and_an_answer_at_the_same_time_wait_for_each_other(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver
) -> None:
    """Each change of a subscription and its deliveries locks the subscription first."""
    await journal.marker(1, "a")
    await journal.block(lines_of("a", "a"), 1, 2)
    receiver.answer = away
    await hooks.add("one", receiver.url)
    async with hooks.delivering():
        await got(receiver, 2)
    [delivery, _] = await hooks.ask(stored.undelivered, "one", None, 10)
    async with await open_books(hooks.settings) as books, await open_books(hooks.settings) as others:
        async with books.transaction():
            # As `resend` and `remove` begin.
            await books.execute("SELECT 1 FROM webhooks FOR UPDATE")
            answered = asyncio.create_task(stored.delivered(others, delivery))

            async def waits() -> bool:
                rows = await books.execute(
                    "SELECT 1 FROM pg_locks WHERE pid = %s AND NOT granted", (others.info.backend_pid,)
                )
                return await rows.fetchone() is not None

            await until(waits, 10, "it waits for the subscription")
            done = await books.execute("UPDATE webhook_deliveries SET due_at = now()")
            assert done.rowcount == 2
        following = await answered
    assert following is not None
    assert following.seq == 2


async def test_a_failure_from_before_a_resend_does_not_count(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver
) -> None:
    await journal.marker(1, "a")
    await journal.block(lines_of("a"), 1, 1)
    receiver.answer = away
    await hooks.add("one", receiver.url)
    async with hooks.delivering():
        await got(receiver, 2)
    [delivery] = await hooks.ask(stored.undelivered, "one", None, 10)
    assert delivery.attempts > 0
    assert await hooks.ask(stored.resend, "one", None) == 1
    assert not await hooks.ask(stored.failed, delivery, 503, "late", 3_600.0, 0.0, 3)
    [after] = await hooks.ask(stored.undelivered, "one", None, 10)
    assert (after.attempts, after.problem) == (0, delivery.problem)


@pytest.mark.long
async def test_what_is_left_when_a_worker_dies_is_sent_by_the_next_one(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    lines = lines_of(*["a", "b", "c"] * 20)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 60)
    receiver.answer = slowly
    await hooks.add("one", receiver.url)
    for count in (5, 20, 40):
        # Its tasks are cancelled wherever they are. Two workers at a time: only one of them delivers.
        async with hooks.delivering(), hooks.delivering():
            await got(receiver, count)
    async with hooks.delivering():
        await until(hooks.is_idle, 20, "an empty queue")
    for offer, first in (("a", 1), ("b", 2), ("c", 3)):
        found = seqs(receiver, offer)
        # A repeat has the id of its event; without repeats, the order is that of the offer.
        assert list(dict.fromkeys(found)) == list(range(first, 61, 3))
        assert len(found) - len(set(found)) <= 3
    assert receiver.most_of_offer == 1


@pytest.mark.long
async def test_rebuilds_and_replays_send_nothing(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    lines = lines_of(*["e"] * 20)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 20)
    await hooks.add("one", receiver.url)
    async with catching_up(hooks.settings), hooks.delivering():
        await until_at_seq(hooks.settings, 20)
        await got(receiver, 20)
        await until(hooks.is_idle, 10, "an empty queue")
        environment = env_of(hooks.settings)
        for words in (
            ("rebuild", "all"),
            ("replay", "--into", f"topic:{hooks.settings.prefix}.again"),
            ("replay", "--into", "-"),
        ):
            done = await asyncio.to_thread(grabstream, *words, folder=None, **environment)
            assert done.returncode == 0, done.stderr
        # What comes after them is sent, so the role has seen them.
        await journal.block([*lines, granted("e", 21)], 21, 21)
        await got(receiver, 21)
    assert seqs(receiver) == list(range(1, 22))
    assert [one.seq for one in (await hooks.cursors()).values()] == [21]


@pytest.mark.long
async def test_another_journal_with_the_same_events_is_read_on(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    """As after `rebuild journal`: other offsets and blocks, the same hashes."""
    lines = lines_of(*["e"] * 9)
    await journal.marker(1, "a")
    await journal.marker(2, "b")
    for seq in range(1, 7):
        await journal.block(lines, seq, seq, term=2, owner="b")
    await hooks.add("one", receiver.url)
    async with hooks.delivering():
        await got(receiver, 6)
        await until(hooks.is_idle, 10, "an empty queue")
    topics = Topics(hooks.settings.prefix)
    # Gone before the next is made: until the broker knows, it takes records for the old one.
    await delete_topics(hooks.settings, topics.journal)
    assert await create_topics(hooks.settings.kafka, topics, hooks.settings.shards) == [topics.journal]
    await journal.marker(7, "restore")
    await journal.block(lines, 1, 9, term=7, owner="restore")
    async with hooks.delivering():
        await got(receiver, 9)
        await until(hooks.is_idle, 10, "an empty queue")
    assert seqs(receiver) == list(range(1, 10))


async def test_another_history_is_never_sent(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = lines_of(*["e"] * 6)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 4)
    await hooks.add("one", receiver.url)
    async with hooks.delivering():
        await got(receiver, 4)
        await until(hooks.is_idle, 10, "an empty queue")
    async with await open_books(hooks.settings) as books:
        await books.execute("UPDATE webhook_cursors SET head = %s WHERE shard = %s", (bytes(32), SHARD))
    await journal.block(lines, 5, 6)
    async with hooks.delivering():
        await until(lambda: "contradicts the cursor" in caplog.text, 10, "it is logged")
    assert seqs(receiver) == [1, 2, 3, 4]


async def test_a_journal_that_has_lost_its_end_is_named_while_it_is_read(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """The same process had read it up to there."""
    lines = lines_of(*["e"] * 4)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 4)
    await hooks.add("one", receiver.url)
    async with hooks.delivering():
        await got(receiver, 4)
        topics = Topics(hooks.settings.prefix)
        await delete_topics(hooks.settings, topics.journal)
        await create_topics(hooks.settings.kafka, topics, hooks.settings.shards)
        await journal.marker(1, "a")
        await until(lambda: "the journal contradicts the cursor at seq 4" in caplog.text, 30, "it is logged")
    assert seqs(receiver) == [1, 2, 3, 4]


@pytest.mark.parametrize("is_new", [True, False])
async def test_what_is_read_before_a_contradiction_is_sent(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, caplog: pytest.LogCaptureFixture, is_new: bool
) -> None:
    """It is read together with the record that contradicts it."""
    lines = lines_of(*["e"] * 6)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 2)
    await hooks.add("one", receiver.url)
    if not is_new:
        async with hooks.delivering():
            await got(receiver, 2)
            await until(hooks.is_idle, 10, "an empty queue")
    await journal.block(lines, 3, 4)
    await journal.block(lines, 6, 6)
    async with hooks.delivering():
        await got(receiver, 4)
        await until(lambda: "contradicts the cursor at seq 4" in caplog.text, 10, "it is logged")
    assert seqs(receiver) == [1, 2, 3, 4]


async def test_a_new_subscription_gets_no_event_twice_when_its_source_starts_again() -> None:
    """The source reads from the beginning when the audit trail does not vouch for its next records."""

    async def chunks() -> AsyncGenerator[Chunk, None]:
        for first, last in ((5, 6), (1, 4), (5, 6), (7, 8)):
            yield Chunk(SHARD, Cursor(first - 1), Cursor(last), facts[first - 1 : last], 1)

    lines = lines_of(*["e"] * 8)
    facts = facts_of(lines, [b""] * 8, [decode_line(line) for line in lines])
    new = [chunk async for chunk in chunks_after(None, chunks())]
    assert [fact.event.seq for chunk in new for fact in chunk.facts] == [5, 6, 7, 8]
    assert [chunk.before for chunk in new[1:]] == [chunk.after for chunk in new[:-1]]


async def test_a_cursor_that_another_process_moved_at_a_contradiction_is_read_again(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The reader of the journal stays, and other shards are read in the same round."""
    opened, moved = [], iter([CursorMoved("shard 0 has moved")])
    open_reader, move = follower.open_reader, stored.move

    def opening(*arguments: Any) -> Any:
        opened.append(arguments)
        return open_reader(*arguments)

    async def move_once(*arguments: Any) -> None:
        for error in moved:
            raise error
        await move(*arguments)

    lines = lines_of(*["e"] * 6)
    await journal.marker(1, "a")
    await journal.block(lines, 1, 2)
    await hooks.add("one", receiver.url)
    async with hooks.delivering():
        await got(receiver, 2)
        await until(hooks.is_idle, 10, "an empty queue")
    await journal.block(lines, 3, 4)
    await journal.block(lines, 6, 6)
    monkeypatch.setattr(follower, "open_reader", opening)
    monkeypatch.setattr(stored, "move", move_once)
    async with hooks.delivering():
        await got(receiver, 4)
        await until(lambda: "contradicts the cursor at seq 4" in caplog.text, 10, "it is logged")
    assert (seqs(receiver), len(opened)) == ([1, 2, 3, 4], 1)


@pytest.mark.long
async def test_a_full_queue_stops_its_subscription_alone_and_loses_nothing(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "WAITING_MAX", 10)
    lines = lines_of(*["a", "b"] * 30)
    await journal.marker(1, "a")
    async with receiving() as dead:
        dead.answer = never
        await hooks.add("dead", dead.url)
        await hooks.add("good", receiver.url)
        async with hooks.delivering(LIMITS._replace(timeout_seconds=60.0)):
            for first in range(1, 61, 5):
                await journal.block(lines, first, first + 4)
                await got(receiver, first + 4)
            assert 10 <= len(await hooks.left("dead")) <= 20
            dead.answer = ok
        async with hooks.delivering():
            await until(lambda: len(set(dead.ids)) == 60, 20, "all events")
            await until(hooks.is_idle, 10, "an empty queue")


@pytest.mark.long
async def test_an_offer_whose_events_are_refused_holds_up_no_other_offer(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_long_pauses(monkeypatch)
    monkeypatch.setattr(stored, "WAITING_MAX", 10)
    monkeypatch.setattr(stored, "OFFER_PLACES_MAX", 3)
    monkeypatch.setattr(stored, "WAITING_EVENTS_MAX", 50)
    lines = lines_of(*["bad"] * 30, *["a", "b"] * 10, *["bad"] * 30)
    await journal.marker(1, "a")
    receiver.answer = answering(400, f"{SHARD}-1")
    await hooks.add("one", receiver.url)

    async def are_waiting(count: int) -> None:
        async def are() -> bool:
            return await hooks.ask(stored.backlogs, "waiting") == {"one": count}

        await until(are, 10, f"{count} events wait")

    async with receiving() as other, hooks.delivering():
        await hooks.add("other", other.url)
        for first in range(1, 51, 5):
            await journal.block(lines, first, first + 4)
        await got(receiver, 1 + 20)
        await are_waiting(30)
        # Its own events have a bound, too: with 50, no more are read, while another subscription gets them.
        for first in range(51, 71, 5):
            await journal.block(lines, first, first + 4)
            await are_waiting(first + 4 - 20)
        await journal.block(lines, 71, 80)
        await got(other, 80)
        await are_waiting(50)
        receiver.answer = ok
        assert await hooks.ask(stored.resend, "one", "bad") == 1
        await until(lambda: len(set(receiver.ids)) == 80, 20, "all events")
        await until(hooks.is_idle, 10, "an empty queue")
    assert list(dict.fromkeys(seqs(receiver, "bad"))) == [*range(1, 31), *range(51, 81)]
    assert seqs(receiver, "a") == list(range(31, 51, 2))


@pytest.mark.long
async def test_who_begins_with_too_much_does_not_keep_others_from_beginning(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "WAITING_MAX", 10)
    lines = lines_of(*["a", "b"] * 30)
    await journal.marker(1, "a")
    for first in range(1, 61, 5):
        await journal.block(lines, first, first + 4)
    names = [f"dead{number}" for number in range(reading.BEGINNING_MAX)]
    async with receiving() as dead:
        dead.answer = never
        for name in names:
            await hooks.add(name, dead.url)

        async def are_full() -> bool:
            return all([len(await hooks.left(name)) >= 10 for name in names])

        async with hooks.delivering(LIMITS._replace(timeout_seconds=60.0)):
            await until(are_full, 20, "full queues")
            await hooks.add("good", receiver.url)
            await got(receiver, 60)
            dead.answer = ok
        async with hooks.delivering():
            await until(lambda: len(set(dead.ids)) == 60, 20, "all events")
            await until(hooks.is_idle, 20, "empty queues")
    assert seqs(receiver, "a") == list(range(1, 61, 2))


@pytest.mark.long
async def test_a_url_that_is_not_allowed_gets_nothing(
    hooks: Hooks,
    journal: JournalWriter,
    receiver: Receiver,
) -> None:
    """The settings of the worker count, not those with which it was added."""
    await journal.marker(1, "a")
    await journal.block(lines_of("a"), 1, 1)
    await hooks.add("private", receiver.url)
    await hooks.add("named", f"http://localhost:{receiver.port}/")
    async with hooks.delivering(LIMITS._replace(private=False)):

        async def are_parked() -> bool:
            return len(await hooks.left(None, "parked")) == 2

        await until(are_parked, 10, "both are parked")
    found = {one.webhook: one.problem for one in await hooks.ask(stored.undelivered, None, None, 10)}
    assert all("is not a public address" in str(problem) for problem in found.values()), found
    assert receiver.requests == []


@pytest.mark.long
async def test_without_subscriptions_it_only_looks_for_the_first_one(
    hooks: Hooks, journal: JournalWriter, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(role, "POLL_SECONDS", 0.1)

    async def sessions() -> int:
        async with await open_books(hooks.settings) as books:
            rows = await books.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s",
                (session_name(hooks.settings.schema_, "webhooks"),),
            )
            return int((await rows.fetchone() or (0,))[0])

    async def is_idle() -> bool:
        return await sessions() == 1

    await journal.marker(1, "a")
    await journal.block(lines_of("a", "a", "b"), 1, 3)
    async with hooks.delivering():
        await until(is_idle, 10, "a session")
        for name in ("first", "second"):
            await hooks.add(name, receiver.url)
            await got(receiver, 3)
            assert await sessions() > 1
            assert await hooks.ask(stored.remove, name)
            await until(is_idle, 10, "one session")
            receiver.requests.clear()
