"""The payment side is asked before holds end: what it knows is executed, and what it does not answer holds up
nothing.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import redis.asyncio
from aiohttp import web

from grabstream import KafkaClient
from grabstream.connections.identity import find_audience
from grabstream.connections.opening import cancellable, key_space, open_gate, open_redis
from grabstream.crypto.signing import Purpose
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models import vocabulary
from grabstream.models.answers import Answer
from grabstream.models.commands import Confirm, Extend, Grab, Open, Release
from grabstream.models.offers import StockTerms
from grabstream.models.payments import (
    AskedHold,
    PaymentQuery,
    PaymentState,
    Receipt,
    command_of,
    decode_query,
    encode_claims,
)
from grabstream.settings import Settings
from grabstream.streams.deciding import payments
from grabstream.streams.deciding.payment_side import (
    FAILURES_MAX,
    OPEN_SECONDS,
    Breaker,
    PaymentQueries,
    open_session,
)
from grabstream.streams.deciding.payments import HoldQueries, PaymentSide, lead_ms
from grabstream.streams.deciding.sweeper import Sweeper
from tests.conftest import Worker, until
from tests.support.flooding import flooding
from tests.support.providers import ProviderProcess, silent
from tests.support.receipts import AUDIENCE, FOREIGN_KEYS, KEYS, KEYS_TEXT, receipt_for, signed
from tests.support.receipts import OLD_KEYS as OTHER_KNOWN_KEYS
from tests.support.shards import SEALER, private_server, take_over
from tests.support.web_servers import serving

__all__ = ["private_server"]

HOLD_MS, LEAD_MS = 60_000, 100_000
TERMS = StockTerms(
    issuer="shop", total=500, price=100, currency="CNY", hold_ms=HOLD_MS, max_per_grab=5, extensions=2
)


class Shard:
    """A shard with one offer, and a payment side that is a function."""

    def __init__(self, client: Any, keys: KeySpace, gate: Gate) -> None:
        self.client, self.keys, self.gate = client, keys.shard(0), gate
        self.asked: list[str] = []
        self.states: dict[str, dict[str, Any]] = {}
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def ask(self, holds: Sequence[AskedHold]) -> list[PaymentState]:
        self.asked += [hold.grab for hold in holds]
        if self.meanwhile:
            await self.meanwhile()
        known = [hold for hold in holds if hold.grab in self.states]
        return [PaymentState(offer=hold.offer, grab=hold.grab, **self.states[hold.grab]) for hold in known]

    def queries(self, lead: int = LEAD_MS, hold_ms_min: int = 0) -> HoldQueries:
        return HoldQueries(self.client, self.keys, self.gate, self.ask, lead, hold_ms_min)

    async def hold(self, *grabs: str) -> list[Answer]:
        commands = [Grab(id=grab, offer="s", user="ann") for grab in grabs]
        answers = await self.gate.decide(commands, "decided")
        assert {answer.outcome for answer in answers} == {"held"}
        return answers

    async def ended_as(self, grab: str) -> tuple[str, int | None]:
        """What a release says about a grab: how its hold has ended, and with which event."""
        answer = (await self.gate.decide([Release(id=f"r-{grab}", offer="s", grab=grab)], "decided"))[0]
        return answer.outcome, answer.seq if answer.repeated else None


@pytest.fixture
async def shard(private_server: Any) -> AsyncIterator[Shard]:
    client, keys = cancellable(redis.asyncio.Redis(port=private_server[1])), KeySpace("own", 1)
    await client.flushall()
    await take_over(client, keys)
    gate = Gate(client, keys, SEALER)
    await gate.decide([Open(id="o", offer="s", terms=TERMS)], "decided")
    yield Shard(client, keys, gate)
    await gate.close()
    await client.aclose()


#: Nothing was paid for a hold, and the payment side takes no payment for it any more.
NEVER_PAID = {"status": "unpaid", "final": True}


def paid(payment: str = "p", **changes: Any) -> dict[str, Any]:
    return {
        "status": "paid", "user": "ann", "payment": payment, "paid": 100, "currency": "CNY", "at": 1,
        **changes,
    }  # fmt: skip


@pytest.mark.requirement("E3")
async def test_what_the_payment_side_knows_is_carried_out_before_the_end(shard: Shard) -> None:
    await shard.hold("a", "b", "c", "d", "e", "f")
    shard.states = {
        "a": paid("p-a"), "b": NEVER_PAID, "c": {"status": "unknown"}, "e": paid("p-e", paid=1),
        "f": {"status": "unpaid"},
    }  # fmt: skip
    queries = shard.queries()
    assert await queries.ask_all() == 6
    assert sorted(shard.asked) == ["a", "b", "c", "d", "e", "f"]
    assert await queries.ask_all() == 0, "each is asked for once"
    assert (await shard.ended_as("a"))[0] == "not_held"
    # After the opening, six holds, a confirmation, and a payment that is to be paid back.
    assert await shard.ended_as("b") == ("released", 10)
    # Unknown, not answered, paid with a wrong amount, and not paid until now: their holds continue.
    for grab in ("c", "d", "e", "f"):
        assert await shard.ended_as(grab) == ("released", None)
    [again] = await shard.gate.decide(
        [Confirm(id="x", offer="s", grab="e", user="ann", payment="p-e", paid=1, currency="CNY")], "decided"
    )
    assert (again.outcome, again.repeated) == ("invalid", True), "it is recorded as to be paid back"


@pytest.mark.requirement("E3")
async def test_who_pays_in_time_after_the_payment_side_said_unpaid_gets_it(shard: Shard) -> None:
    await shard.hold("a")
    shard.states = {"a": {"status": "unpaid"}}
    assert await shard.queries().ask_all() == 1
    pays = Confirm(id="x", offer="s", grab="a", user="ann", payment="p", paid=100, currency="CNY")
    assert (await shard.gate.decide([pays], "decided"))[0].outcome == "confirmed"


async def test_hold_with_grace_is_asked_for_before_its_grace_ends(shard: Shard) -> None:
    terms = msgspec.structs.replace(TERMS, late="grace", grace_ms=30_000)
    await shard.gate.decide([Open(id="o2", offer="s:grace", terms=terms)], "decided")
    [held] = await shard.gate.decide([Grab(id="a", offer="s:grace", user="ann")], "decided")
    assert held.deadline_at is not None
    queries = shard.queries(1_000)
    assert await queries.next_ms(held.deadline_at - HOLD_MS) == held.deadline_at + 30_000 - 1_000


async def test_receipt_and_answer_about_a_payment_are_one_command(shard: Shard) -> None:
    await shard.hold("a")
    shard.states = {"a": paid()}
    await shard.queries().ask_all()
    receipt = Receipt(
        aud="", payment="p", offer="s", grab="a", user="ann", status="paid", at=9, paid=100, currency="CNY"
    )
    command = command_of(receipt)
    [answer] = await shard.gate.decide([command], "decided", from_system=True)
    assert (answer.outcome, answer.repeated) == ("confirmed", True)


async def test_two_workers_that_ask_at_the_same_time_do_what_one_does(shard: Shard) -> None:
    await shard.hold("a", "b")
    shard.states = {"a": paid(), "b": NEVER_PAID}
    # Each has asked before one of them gets an answer.
    shard.meanwhile = asyncio.Barrier(4).wait
    await asyncio.gather(*(shard.queries().ask_all() for _ in range(4)))
    assert sorted(shard.asked) == sorted(["a", "b"] * 4)
    # After the opening and two holds there are two more events.
    assert (await shard.ended_as("b"))[1] in (4, 5)
    last = (await shard.client.xinfo_stream(shard.keys.outbox))["last-generated-id"]
    assert last == b"5-0"


async def test_extended_hold_is_asked_for_again_and_not_released(shard: Shard) -> None:
    """The payment side says that it will not be paid, while its buyer extends the hold."""
    await shard.hold("a", "b")
    shard.states = {"a": NEVER_PAID, "b": NEVER_PAID}

    async def extend() -> None:
        shard.meanwhile = None
        await shard.gate.decide([Extend(id="x", offer="s", grab="a")], "decided")

    shard.meanwhile = extend
    queries = shard.queries(HOLD_MS + 30_000)
    assert await queries.ask_all() == 2
    assert (await shard.ended_as("b"))[1] is not None
    assert await shard.client.zscore(shard.keys.holds, "s/a") is not None
    # It has a new end, so it is asked for again when that is near.
    shard.asked = []
    queries._lead_ms = 2 * HOLD_MS + 30_000
    assert await queries.ask_all() == 1
    assert shard.asked == ["a"]
    assert (await shard.ended_as("a"))[1] is not None


async def test_many_holds_with_one_end_are_each_asked_for_once(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payments, "QUERY_HOLDS_MAX", 10)
    monkeypatch.setattr(payments, "QUERIES_AT_ONCE_MAX", 2)
    names = [f"g{number}" for number in range(57)]
    await shard.hold(*names)
    queries = shard.queries()
    # Some end meanwhile, and others come.
    assert await queries.ask_some() == 20
    gone = [name for name in names if name not in shard.asked][:3]
    await shard.gate.decide([Release(id=f"x{name}", offer="s", grab=name) for name in gone], "decided")
    await shard.hold("late")
    assert await queries.ask_all() == 57 - 20 - 3 + 1
    assert sorted(shard.asked) == sorted({*names, "late"} - set(gone))


async def test_nothing_is_read_until_a_hold_is_near_its_end(shard: Shard) -> None:
    """And no hold that has ended is asked for."""
    queries = shard.queries(5_000)
    now = int(time.time() * 1000)
    assert await queries.next_ms(now) is None
    [held] = await shard.hold("a")
    assert held.deadline_at is not None
    assert await queries.next_ms(now) == held.deadline_at - 5_000
    assert await queries.ask_all() == 0
    assert await queries.next_ms(held.deadline_at) is None
    sweeper = Sweeper(shard.client, shard.keys, 1, 10**9, queries=queries)
    due = await sweeper.read_due()
    assert (due.holds_ms, due.queries_ms) == (held.deadline_at, held.deadline_at - 5_000)
    assert (await Sweeper(shard.client, shard.keys, 1, 10**9).read_due()).queries_ms is None


# -- the client ----------------------------------------------------------------------------------------------

HOLDS = [AskedHold(offer="o", grab=grab, ends_at=9) for grab in ("a", "b")]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def asking(handler: Handler, timeout_seconds: float = 2.0) -> AsyncIterator[PaymentQueries]:
    """A client that asks a payment side which answers with a function."""
    application = web.Application()
    application.router.add_post("/query", handler)
    # A handler ends when its client has gone.
    async with serving(application, handler_cancellation=True) as port:
        side = PaymentSide(f"http://127.0.0.1:{port}/query", KEYS, timeout_seconds, AUDIENCE)
        async with open_session(side) as session:
            yield PaymentQueries(side, session)


async def query_of(request: web.Request) -> PaymentQuery:
    text = (await request.json())["query"]
    return decode_query(KEYS.read(Purpose.payment_query, text, 65_536))


def answering(query: PaymentQuery, **changes: Any) -> dict[str, Any]:
    return {
        "aud": query.aud,
        "query": query.id,
        "payments": [{"offer": "o", "grab": "b", "status": "unpaid"}],
        **changes,
    }


async def test_question_and_answer_are_signed() -> None:
    async def handler(request: web.Request) -> web.Response:
        query = await query_of(request)
        assert (list(query.holds), query.aud) == (HOLDS, AUDIENCE)
        text = signed(answering(query), purpose=Purpose.payment_answer, keys=OTHER_KNOWN_KEYS)
        return web.json_response({"answer": text})

    async with asking(handler) as questions:
        [state] = await questions.ask(HOLDS)
    assert (state.grab, state.status) == ("b", "unpaid")


@pytest.mark.parametrize(
    "wrong",
    [
        "status", "redirect", "no JSON", "no answer", "not signed", "foreign key", "another purpose",
        "another query", "another system", "no system", "too long",
    ],
)  # fmt: skip
async def test_answer_that_does_not_count_is_none(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: web.Request) -> web.Response:
        query = await query_of(request)
        claims = answering(query)
        if wrong == "another query":
            claims["query"] = "another"
        if wrong == "another system":
            claims["aud"] = "shop@elsewhere"
        if wrong == "no system":
            del claims["aud"]
        keys = FOREIGN_KEYS if wrong == "foreign key" else KEYS
        purpose = Purpose.receipt if wrong == "another purpose" else Purpose.payment_answer
        text = signed(claims, purpose=purpose, keys=keys)
        if wrong == "not signed":
            text = text[:-3]
        if wrong == "no JSON":
            return web.Response(text="hello")
        if wrong == "redirect":
            raise web.HTTPTemporaryRedirect("/query")
        document = {"answer": text, **({"x": "y" * 270_000} if wrong == "too long" else {})}
        if wrong == "no answer":
            document = {}
        return web.json_response(document, status=500 if wrong == "status" else 200)

    async with asking(handler) as questions:
        assert await questions.ask(HOLDS) == []
    [said] = [record for record in caplog.records if "asking the payment side" in record.getMessage()]
    assert "trying again" in said.getMessage()


@pytest.mark.parametrize("kind", ["interim", "chunks"])
async def test_answer_without_end_is_none(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with flooding(kind) as flood:
        side = PaymentSide(f"http://127.0.0.1:{flood.port}/query", KEYS, 60.0, AUDIENCE)
        async with open_session(side) as session:
            assert await PaymentQueries(side, session).ask(HOLDS) == []
    [said] = [record.getMessage() for record in caplog.records if "payment side" in record.getMessage()]
    assert "the answer has more than" in said


async def test_state_that_is_wrong_voids_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Or one malformed id in an answer would end each paid hold that it names."""
    receipt = {"offer": "o", "status": "paid", "user": "ann", "paid": 100, "currency": "CNY", "at": 1}
    holds = [AskedHold(offer="o", grab=f"g{number}", ends_at=9) for number in range(6)]
    payments = [{**receipt, "grab": hold.grab, "payment": f"p-{hold.grab}"} for hold in holds]
    payments[1]["user"] = "ann and bob"

    async def handler(request: web.Request) -> web.Response:
        claims = answering(await query_of(request), payments=payments)
        return web.json_response({"answer": signed(claims, purpose=Purpose.payment_answer)})

    async with asking(handler) as questions:
        states = await questions.ask(holds)
    assert [state.grab for state in states] == ["g0", "g2", "g3", "g4", "g5"]
    [said] = [record.getMessage() for record in caplog.records]
    assert "1 states that cannot be used, the first: payments: number 2: user: must match" in said


async def test_payment_side_that_hangs_is_left_alone_and_tried_again() -> None:
    now, times = 0.0, 0
    hangs = True

    async def handler(request: web.Request) -> web.Response:
        nonlocal times
        times += 1
        query = await query_of(request)
        if hangs:
            await asyncio.Event().wait()
        return web.json_response({"answer": signed(answering(query), purpose=Purpose.payment_answer)})

    async with asking(handler, 0.5) as questions:
        questions.breaker = Breaker(lambda: now)
        for _ in range(FAILURES_MAX):
            assert await questions.ask(HOLDS) == []
        # The breaker is open.
        for _ in range(5):
            assert await questions.ask(HOLDS) == []
        assert times == FAILURES_MAX
        # One probe, which fails: it stays open.
        now += OPEN_SECONDS
        for _ in range(3):
            assert await questions.ask(HOLDS) == []
        assert times == FAILURES_MAX + 1
        # The next probe is answered: it is closed.
        now += OPEN_SECONDS
        hangs = False
        questions._side = questions._side._replace(timeout_seconds=5.0)
        for _ in range(3):
            assert len(await questions.ask(HOLDS)) == 1
        assert times == FAILURES_MAX + 4


async def test_payment_side_that_is_away_is_no_error() -> None:
    async with aiohttp.ClientSession() as session:
        questions = PaymentQueries(PaymentSide("http://127.0.0.1:1/query", KEYS, 1.0), session)
        assert await questions.ask(HOLDS) == []


def test_lead_leaves_time_for_two_questions_and_a_decision() -> None:
    assert lead_ms(PaymentSide("http://x/", KEYS, 0.2)) == 1_400


# -- a worker ------------------------------------------------------------------------------------------------

TIMEOUT_MS, WORKER_HOLD_MS = 300, 3_400


async def held(gate: Gate, offer: str, *grabs: str) -> list[Answer]:
    terms = StockTerms(issuer="shop", total=50, price=100, currency="CNY", hold_ms=WORKER_HOLD_MS)
    [opened] = await gate.decide([Open(id=f"o-{offer}", offer=offer, terms=terms)], patience_ms=30_000)
    assert opened.outcome == "opened"
    answers = await gate.decide([Grab(id=grab, offer=offer, user="ann") for grab in grabs], patience_ms=9_000)
    assert {answer.outcome for answer in answers} == {"held"}
    return answers


async def until_ended(settings: Settings, offer: str, *grabs: str) -> float:
    """Returns the time (s since 1970) at which some grabs of an offer, or all, are not held any more."""
    keys = key_space(settings)
    client = open_redis(settings)

    async def is_over() -> bool:
        members = await client.zrange(keys.shard(keys.shard_of_offer(offer)).holds, 0, -1)
        there = [member.decode().split("/") for member in members]
        return not any(of == offer and grab in (grabs or (grab,)) for of, grab in there)

    try:
        await until(is_over, 30, "the end of the holds")
        return time.time()
    finally:
        await client.aclose()


@pytest.mark.long
async def test_holds_end_in_time_while_the_payment_side_hangs(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    """In every shard, as without a payment side; and it is left alone after some questions."""
    async with silent() as side, open_gate(system) as gate:
        running = worker(
            system, "decide,relay,sweep", payment_keys=KEYS_TEXT, payment_query_url=side.query_url,
            payment_query_timeout_ms=str(TIMEOUT_MS),
        )  # fmt: skip
        offers = [f"x{number}" for number in range(6)]
        answers = [await held(gate, offer, "a", "b") for offer in offers]
        for offer, (first, _) in zip(offers, answers, strict=True):
            assert first.deadline_at is not None
            ended_at = await until_ended(system, offer)
            assert ended_at * 1000 < first.deadline_at + 3_000
            [asked] = await gate.decide([Release(id="r", offer=offer, grab="a")])
            assert asked.outcome == "expired"
        assert 0 < side.connections <= FAILURES_MAX * payments.QUERIES_AT_ONCE_MAX
        assert running.log.read_text().count("no answer within 0.3 s") == 1
        # What happens meanwhile: a hold is released by its user.
        await held(gate, "y", "a")
        assert (await gate.decide([Release(id="r", offer="y", grab="a")]))[0].outcome == "released"
    assert running.stop() == 0


@pytest.mark.every_change("the payment side is asked before a hold ends")
@pytest.mark.requirement("F6")
async def test_worker_confirms_what_was_paid_and_releases_what_nobody_will_pay(
    system: Settings, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    with ProviderProcess(tmp_path / "provider.log") as provider:
        running = worker(
            system, "decide,relay,sweep", payment_keys=KEYS_TEXT, payment_query_url=provider.query_url,
            payment_query_timeout_ms=str(TIMEOUT_MS),
        )  # fmt: skip
        redis_ = open_redis(system)
        aud = await find_audience(redis_, key_space(system).system, system)
        await redis_.aclose()
        async with open_gate(system) as gate, aiohttp.ClientSession() as session:
            paid_for, *_ = await held(gate, "x", "a", "b", "c")
            assert paid_for.deadline_at is not None
            claims = {
                "aud": aud, "offer": "x", "grab": "a", "user": "ann", "due": 100, "currency": "CNY",
                "deadline_at": paid_for.deadline_at, "issued_at": paid_for.at,
                "callback": "http://127.0.0.1:1/",
            }  # fmt: skip
            token = signed(claims, purpose=Purpose.payment_token)
            url = f"http://127.0.0.1:{provider.port}/pay"
            given_up = signed({**claims, "grab": "b"}, purpose=Purpose.payment_token)
            for pay in (
                {"token": token, "how": "lost", "payment": "p"}, {"token": given_up, "how": "abandons"}
            ):  # fmt: skip
                async with session.post(url, json=pay) as response:
                    assert response.status == 202, await response.text()
            ended_at = await until_ended(system, "x", "a", "b")
            assert ended_at * 1000 < paid_for.deadline_at, "before the deadline"
            # The provider never saw the token of the third: that hold ends at its time.
            await until_ended(system, "x")
            releases = [Release(id=f"r{grab}", offer="x", grab=grab) for grab in ("a", "b", "c")]
            outcomes = [answer.outcome for answer in await gate.decide(releases)]
            assert outcomes == ["not_held", "released", "expired"]
            # It can no longer be paid.
            async with session.post(url, json={"token": given_up}) as response:
                assert (response.status, "gave up" in await response.text()) == (409, True)
        assert running.stop() == 0


@pytest.mark.long
async def test_a_confirmation_of_money_over_kafka_needs_a_receipt_for_this_system(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    """Otherwise a sender of commands could take the id of a later payment."""
    worker(system, "decide,relay", payment_keys=KEYS_TEXT)
    redis_ = open_redis(system)
    aud = await find_audience(redis_, key_space(system).system, system)
    await redis_.aclose()
    paid: dict[str, Any] = {"payment": "a/b #1", "paid": 100, "currency": "CNY"}
    due = {"offer": "x", "grab": "g", "user": "ann", "due": 100, "currency": "CNY"}
    terms = vocabulary.StockTerms(issuer="shop", total=9, price=100, currency="CNY", hold_ms=600_000)
    async with KafkaClient(system.kafka, system.prefix) as client:
        assert (await client.open(terms, "x")).outcome == "opened"
        assert (await client.grab("x", "ann", id="g")).outcome == "held"
        refused = await client.confirm("x", "g", "ann", **paid)
        assert (refused.outcome, "receipt: is required" in (refused.message or "")) == ("invalid", True)
        elsewhere = signed(receipt_for(due, paid["payment"], aud="shop@elsewhere"))
        refused = await client.confirm("x", "g", "ann", **paid, receipt=elsewhere)
        assert (refused.outcome, f"aud: must be {aud}" in (refused.message or "")) == ("invalid", True)
        receipt = signed(receipt_for(due, paid["payment"], aud=aud))
        assert (await client.confirm("x", "g", "ann", **paid, receipt=receipt)).outcome == "confirmed"


def test_client_of_the_payment_side_is_imported_only_if_it_is_asked() -> None:
    """What every worker imports leaves the client of HTTP out."""
    code = """if True:
        import sys
        import grabstream.streams.worker
        import grabstream.streams.deciding.payments
        print("aiohttp.client" in sys.modules)
        import grabstream.streams.deciding.payment_side
        print("aiohttp.client" in sys.modules)
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]
    assert json.loads(encode_claims(HOLDS[0])) == {"offer": "o", "grab": "a", "ends_at": 9}


async def test_who_was_never_to_pay_or_has_no_time_is_not_asked_for(shard: Shard) -> None:
    """The payment side would truly answer that they will not be paid, and the holds would end early."""
    free = msgspec.structs.replace(TERMS, price=None, currency=None)
    short = msgspec.structs.replace(TERMS, hold_ms=HOLD_MS - 1)
    for offer, terms in (("free", free), ("short", short)):
        await shard.gate.decide([Open(id=f"o-{offer}", offer=offer, terms=terms)], "decided")
        answers = await shard.gate.decide([Grab(id=f"g-{offer}", offer=offer, user="ann")], "decided")
        assert answers[0].outcome == "held"
    await shard.hold("a")
    shard.states = dict.fromkeys(("a", "g-free", "g-short"), NEVER_PAID)
    queries = shard.queries(hold_ms_min=HOLD_MS)
    assert await queries.ask_all() == 3, "all are looked at, once"
    assert await queries.ask_all() == 0
    assert shard.asked == ["a"]


async def test_answers_are_carried_out_when_the_shard_decides_again(shard: Shard) -> None:
    await shard.hold("a")
    shard.states = {"a": paid("p-a")}
    epoch = await shard.client.hget(shard.keys.state, "server_epoch")
    assert epoch

    async def fence() -> None:
        await shard.client.hdel(shard.keys.state, "server_epoch")

    async def until_refused() -> bool:
        [answer] = await shard.gate.decide([Release(id="r", offer="s", grab="none")], "decided")
        return answer.outcome == "fenced"

    shard.meanwhile = fence
    asking = asyncio.create_task(shard.queries().ask_all())
    await until(until_refused, 10, "a fenced shard")
    assert not asking.done()
    await shard.client.hset(shard.keys.state, "server_epoch", epoch)
    assert await asking == 1
    assert (await shard.ended_as("a"))[0] == "not_held"
