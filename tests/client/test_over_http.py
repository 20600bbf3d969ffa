"""`Client` and `AsyncClient`: every command and question through a real gateway, and what they do when
replies are lost.
"""

import asyncio
import inspect
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, get_args

import pytest
from pydantic import ValidationError

from grabstream import AsyncClient, Client, OutcomeUnknown, RequestProblem
from grabstream.client.commands import CommandMethods
from grabstream.client.in_thread import InThread
from grabstream.models.error_words import error_in_words
from grabstream.models.vocabulary import (
    Adjust,
    AnyCommand,
    Changes,
    CouponTerms,
    Entry,
    EnvelopeTerms,
    Grab,
    Load,
    StockTerms,
)
from grabstream.workshop.services import free_ports
from tests.client.scripted import DROP, HANG, dripping, losing_replies, reply, scripted
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.support.receipts import receipt_for, signed

COUPON: Final = CouponTerms(issuer="shop", total=9)
SALE: Final = StockTerms(
    issuer="shop", total=9, price=100, currency="CNY", hold_ms=600_000, max_per_grab=3, extensions=1
)
GRANTED: Final = reply(201, '{"id":"g","outcome":"granted","code":0,"offer":"o","user":"u","grab":"g"}')
BUSY_BODY: Final = (
    '{"type":"/problems/busy","title":"t","status":503,"detail":"no room","outcome":"busy","code":22}'
)
BUSY: Final = reply(503, BUSY_BODY, "retry-after: 0")
PAST: Final = "Sun, 06 Nov 1994 08:49:37 GMT"
FUTURE: Final = "Sun, 06 Nov 2095 08:49:37 GMT"
#: Problem details that are not those of a gateway (RFC 9457), and those of another command.
OF_OTHERS: Final = '{"type":"about:blank","title":"Conflict","outcome":"sold_out","code":32}'
OF_H: Final = '{"type":"/problems/sold_out","detail":"…","id":"h","outcome":"sold_out","code":32}'
BUSY_LONG: Final = BUSY.replace(b"retry-after: 0", b"retry-after: 60")
SOLD_OUT: Final = reply(
    409,
    '{"type":"/problems/sold_out","status":409,"detail":"Nothing is left","outcome":"sold_out","code":32}',
)
INVALID: Final = reply(
    400, '{"type":"/problems/invalid","status":400,"detail":"user: …","outcome":"invalid","code":20}'
)
TOO_MANY: Final = '{"type":"/problems/too_many_requests","status":429,"detail":"slower"}'
LIMITED: Final = reply(429, TOO_MANY, "retry-after: 0")
ODD_REFUSAL: Final = reply(409, '{"type":"/problems/x","outcome":[],"code":0}')
NO_KEY: Final = reply(401, '{"type":"/problems/unauthorized","status":401,"detail":"send a key"}')


class Both:
    """A client whose calls are awaited, whichever it is."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        async def call(*words: Any, **fields: Any) -> Any:
            if isinstance(self.client, Client):
                return await asyncio.to_thread(method, *words, **fields)
            return await method(*words, **fields)

        return call

    async def end(self) -> None:
        ended = self.client.end()
        if inspect.isawaitable(ended):
            await ended


@pytest.fixture(params=[Client, AsyncClient])
def kind(request: pytest.FixtureRequest) -> type[Client | AsyncClient]:
    kind: type[Client | AsyncClient] = request.param
    return kind


@pytest.fixture
async def client(door: Door, kind: type[Client | AsyncClient]) -> AsyncIterator[Both]:
    both = Both(kind(f"http://127.0.0.1:{door.gateway.port}"))
    yield both
    await both.end()


async def test_every_command_has_its_answer(client: Both, offer: str) -> None:
    sale, tea, cake = f"{offer}:sale", f"{offer}:tea", f"{offer}:cake"
    opened = await client.open(SALE, sale, id="open-1", operator="olga")
    assert (opened.outcome, opened.positive, opened.id, opened.left) == ("opened", True, "open-1", 9)
    assert (await client.open(COUPON, tea)).outcome == (await client.open(COUPON, cake)).outcome == "opened"
    assert (await client.amend(sale, Changes(max_per_grab=4))).outcome == "amended"
    assert (await client.pause(sale)).outcome == "paused"
    assert (await client.grab(sale, "ann")).outcome == "on_hold"
    assert (await client.resume(sale, operator="olga")).outcome == "resumed"
    held = await client.grab(sale, "ann", quantity=4, attributes={"device": "d1"}, metadata={"form": "f-1"})
    assert (held.outcome, held.quantity, held.due, held.currency) == ("held", 4, 400, "CNY")
    assert (held.metadata, held.payment_token.count(".")) == ({"form": "f-1"}, 2)
    assert (await client.extend(sale, held.grab, "ann")).outcome == "extended"
    paid = {"payment": "p", "paid": 400, "currency": "CNY"}
    due = {"offer": sale, "grab": held.grab, "due": held.due, "currency": "CNY"}
    due["payment_token"] = held.payment_token
    of_bob, of_ann = (
        signed(receipt_for({**due, "user": user}, name)) for user, name in (("bob", "q"), ("ann", "p"))
    )
    refused = await client.confirm(sale, held.grab, "bob", **{**paid, "payment": "q"}, receipt=of_bob)
    assert refused.outcome == "no_such_grab"
    assert (await client.confirm(sale, held.grab, "ann", **paid, receipt=of_ann)).outcome == "confirmed"
    assert (await client.return_(sale, held.grab, "ann", quantity=1, reason="broken")).outcome == "returned"
    other = await client.grab(sale, "bob")
    assert (await client.release(sale, other.grab, "bob")).outcome == "released"
    grabs = [Grab(id="x", offer=tea, user="ann"), Grab(id="x", offer=cake, user="ann", quantity=1)]
    basket = await client.take_basket(grabs, "both")
    assert [answer.outcome for answer in basket] == ["granted", "granted"]
    assert {answer.grab for answer in basket} == {"both.1", "both.2"}
    again = await client.take_basket(grabs[::-1], "both")
    assert [(one.grab, one.repeated) for one in again] == [(one.grab, True) for one in basket[::-1]]
    assert (await client.redeem(tea, basket[0].grab, "ann", "order-1")).outcome == "redeemed"
    assert (await client.unredeem(tea, basket[0].grab, "ann", "order-1")).outcome == "unredeemed"
    closed = await client.close(sale)
    assert closed.outcome == "closed"
    full = await client.take_basket([Grab(id="x", offer=sale, user="c"), grabs[0]])
    assert [answer.outcome for answer in full] == ["over", "over"]

    # The questions, after the last answer.
    assert (await client.offer(sale, after=closed)).state == "closed"
    taken = await client.offer_grabs(sale, order="place", limit=1, after=closed)
    assert (taken.grabs[0].user, taken.next is not None) == ("ann", True)
    mine = await client.user_grabs("ann", limit=100, after=closed)
    assert {row.grab for row in mine.grabs} >= {held.grab, "both.1", "both.2"}
    assert [row.metadata for row in mine.grabs if row.grab == held.grab] == [{"form": "f-1"}]
    balances = {row.asset: row.available for row in (await client.user_balances("ann", limit=100)).balances}
    assert (balances[f"sku:{sale}"], balances[f"coupon:{tea}"]) == (3, 1)
    assert len((await client.user_transfers("ann", limit=5)).transfers) == 5


def test_every_command_of_a_gateway_has_its_method() -> None:
    """Except `load` and `adjust`, which operators send with `decide`."""
    methods = {name.rstrip("_") for name in vars(CommandMethods) if not name.startswith("_")}
    types = {kind.model_fields["type"].default for kind in get_args(get_args(AnyCommand)[0])}
    assert methods - {"decide", "take_basket"} == types - {"load", "adjust"}
    public = {name for kind in (Client, InThread) for name in vars(kind) if not name.startswith("_")}
    assert {name for name in vars(AsyncClient) if not name.startswith("_")} == public


async def test_list_and_correction_are_sent_with_decide(client: Both, offer: str) -> None:
    await client.open(CouponTerms(issuer="shop", total=1, audience="list", opens_at=1_999_999_999_000), offer)
    load = Load(id="l", offer=offer, what="audience", chunk=1, chunks=1, items=("ann",))
    assert (await client.decide(load)).outcome == "loaded"
    entry = Entry(asset="CNY", debit="external:bank", credit="wallet:ann", amount=5)
    fix = Adjust(id="a", offer=offer, transfers=(entry,), reason="a complaint", approved_by="olga")
    assert (await client.decide(fix)).outcome == "adjusted"


async def test_refusals_are_answers_with_words(client: Both, offer: str) -> None:
    await client.open(CouponTerms(issuer="shop", total=1), offer)
    first = await client.grab(offer, "ann", id="g-1")
    repeat = await client.grab(offer, "ann", id="g-1")
    assert repeat == first.model_copy(update={"repeated": True})
    refused = await client.grab(offer, "bob")
    assert (refused.outcome, refused.positive, refused.decided) == ("sold_out", False, True)
    assert "Nothing is left" in refused.message
    assert (refused.offer, refused.user) == (offer, "bob")
    # What only the gateway finds out.
    away = await client.grab(offer, "bob", quantity=10**13)
    assert (away.outcome, away.id != "") == ("invalid", True)
    with pytest.raises(RequestProblem, match="not_found|no_such_offer") as error:
        await client.offer(f"{offer}-x")
    assert error.value.status == 404
    with pytest.raises(RequestProblem) as error:
        await client.offers(limit=0)
    assert (error.value.type, error.value.field) == ("invalid", "limit")


async def test_what_a_client_refuses_itself(client: Both) -> None:
    with pytest.raises(ValidationError, match="quantity"):
        await client.grab("o", "ann", quantity=0)
    with pytest.raises(ValidationError, match="user"):
        await client.grab("o", "a/b")
    # A new id in its place would make each repeat of a service another command.
    with pytest.raises(ValidationError, match="id"):
        await client.grab("o", "ann", id="")
    for offer in (".", ".."):
        with pytest.raises(ValueError, match="cannot be part of a path"):
            await client.grab(offer, "ann")
        with pytest.raises(ValueError, match="cannot be part of a path"):
            await client.open(COUPON, offer)
    with pytest.raises(ValueError, match="use take_basket"):
        await client.decide(Grab(id="l", offer="o", user="u", basket="b"))


async def test_pages(door: Door, offer: str) -> None:
    url = f"http://127.0.0.1:{door.gateway.port}"
    async with AsyncClient(url) as client:
        issuer = f"shop-{offer}"
        last = [await client.open(CouponTerms(issuer=issuer, total=1), f"{offer}:{n}") for n in range(5)][-1]
        await client.offers(after=last)
        found = [
            row.offer
            async for page in client.pages(client.offers, issuer=issuer, limit=2)
            for row in page.offers
        ]
        assert found == [f"{offer}:{n}" for n in range(4, -1, -1)]
        taken = [page async for page in client.pages(client.offer_grabs, f"{offer}:0")]
        assert [len(page.grabs) for page in taken] == [0]

    def in_a_thread() -> Iterator[str]:
        with Client(url) as one:
            for page in one.pages(one.offers, issuer=issuer, limit=2):
                yield from (row.offer for row in page.offers)

    assert await asyncio.to_thread(lambda: list(in_a_thread())) == found


async def test_one_client_serves_a_crowd(door: Door, offer: str) -> None:
    """More callers than connections; each part is given once."""
    url = f"http://127.0.0.1:{door.gateway.port}"
    async with AsyncClient(url, connections_max=20) as client:
        await client.open(
            EnvelopeTerms(issuer="alice", funding="p", asset="CNY", total=10_000, parts=100), offer
        )
        answers = await asyncio.gather(*(client.grab(offer, f"u{n}") for n in range(150)))
    outcomes = [answer.outcome for answer in answers]
    assert (outcomes.count("granted"), outcomes.count("sold_out")) == (100, 50)
    assert sum(answer.amount or 0 for answer in answers if answer.positive) == 10_000


async def test_lost_replies_are_asked_for_again(
    door: Door, kind: type[Client | AsyncClient], offer: str
) -> None:
    async with losing_replies(door.gateway.port, 0) as url:
        both = Both(kind(url))
        await both.open(COUPON, offer)
        await both.end()
    async with losing_replies(door.gateway.port, 3) as url:
        both = Both(kind(url))
        answer = await both.grab(offer, "ann")
        assert (answer.outcome, answer.repeated, answer.left) == ("granted", True, 8)
        await both.end()


async def test_a_command_whose_replies_are_all_lost_is_unknown_and_may_be_repeated(
    door: Door, kind: type[Client | AsyncClient], offer: str
) -> None:
    url = f"http://127.0.0.1:{door.gateway.port}"
    direct = Both(kind(url))
    await direct.open(COUPON, offer)
    async with losing_replies(door.gateway.port, 10**6) as broken:
        both = Both(kind(broken, timeout_seconds=1.5))
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown, match="send it again with the id g-9"):
            await both.grab(offer, "ann", id="g-9")
        assert time.monotonic() - began < 15
        await both.end()
    answer = await direct.grab(offer, "ann", id="g-9")
    assert (answer.outcome, answer.repeated, answer.left) == ("granted", True, 8)
    await direct.end()


CASES: Final[list[tuple[str, list[bytes | str], str]]] = [
    ("busy, then an answer", [BUSY, BUSY, GRANTED], "granted after 3"),
    ("dropped, then an answer", [DROP, GRANTED], "granted after 2"),
    ("refused for good", [SOLD_OUT], "sold_out after 1"),
    ("busy for longer than it may wait", [BUSY_LONG], "RequestProblem busy"),
    ("dropped for ever", [DROP], "OutcomeUnknown"),
    ("no reply", [HANG], "OutcomeUnknown"),
    ("a proxy that cannot reach it", [reply(502, "<h1>Bad gateway</h1>")], "OutcomeUnknown"),
    ("unknown, then busy for ever", [reply(504, "{}"), BUSY], "OutcomeUnknown"),
    ("unknown, then the key is revoked", [DROP, NO_KEY], "OutcomeUnknown"),
    ("unknown, then refused", [DROP, SOLD_OUT], "sold_out after 2"),
    ("without a key", [NO_KEY], "RequestProblem unauthorized"),
    ("too many requests", [LIMITED, GRANTED], "granted after 2"),
    ("too many requests, says a proxy", [reply(429, "", "retry-after: 0"), GRANTED], "granted after 2"),
    ("a proxy whose connection was reset", [reply(503, "upstream connect error")], "OutcomeUnknown"),
    ("a proxy that was not answered in time", [reply(524, "<h1>"), GRANTED], "granted after 2"),
    ("a page of another server", [reply(200, "<html>hello</html>")], "OutcomeUnknown"),
    ("an answer without outcome", [reply(200, "{}")], "OutcomeUnknown"),
    ("unknown, then invalid to another release", [DROP, INVALID], "OutcomeUnknown"),
    ("invalid", [INVALID], "invalid after 1"),
    ("unknown, then a refusal without its parts", [DROP, ODD_REFUSAL], "OutcomeUnknown"),
    ("a redirect", [reply(302, "", "location: http://127.0.0.1:1/")], "OutcomeUnknown"),
    ("a proxy that refuses what comes back", [reply(403, "<h1>Blocked</h1>")], "OutcomeUnknown"),
    ("a proxy that does not find it", [reply(404, "nothing here")], "OutcomeUnknown"),
    ("a conflict of another server", [reply(409, OF_OTHERS)], "OutcomeUnknown"),
    ("busy, says another server", [reply(503, OF_OTHERS, "retry-after: 0")], "OutcomeUnknown"),
    ("the answer to another command", [GRANTED.replace(b'"id":"g"', b'"id":"h"')], "OutcomeUnknown"),
    ("a refusal of another command", [reply(409, OF_H)], "OutcomeUnknown"),
    (
        "Retry-After is a date of the past",
        [reply(503, BUSY_BODY, f"retry-after: {PAST}"), GRANTED],
        "granted",
    ),
    ("Retry-After is a date", [reply(503, BUSY_BODY, f"retry-after: {FUTURE}")], "RequestProblem busy"),
    ("strange Retry-After", [reply(503, "", "retry-after: -1e9"), GRANTED], "granted after 2"),
    ("a refusal without its parts", [ODD_REFUSAL], "OutcomeUnknown"),
]


@pytest.mark.parametrize(("steps", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_replies(kind: type[Client | AsyncClient], steps: list[bytes | str], expected: str) -> None:
    """One line is what a server does, and what a caller gets."""
    # Where no reply decides, the time must run out; elsewhere it must not, however busy the machine.
    timeout_seconds = 0.7 if expected == "OutcomeUnknown" else 30.0
    async with scripted(steps) as (url, requests):
        both = Both(kind(url, timeout_seconds=timeout_seconds))
        try:
            answer = await both.grab("o", "u", id="g")
        except (RequestProblem, OutcomeUnknown) as error:
            found = f"{type(error).__name__} {getattr(error, 'type', '')}".strip()
        else:
            found = f"{answer.outcome} after {len(requests)}"
        assert found.startswith(expected), found
        await both.end()
    assert {line for request in requests for line in request.lower().split(b"\r\n") if b"idem" in line} == {
        b"idempotency-key: g"
    }
    assert len(requests) < 20  # it waits between attempts


async def test_calls_end_with_their_client(kind: type[Client | AsyncClient]) -> None:
    """What was sent may be decided, so it is unknown; the timeout has not passed."""
    async with scripted([HANG]) as (url, requests):
        both = Both(kind(url, timeout_seconds=3_600))
        calls = [asyncio.create_task(both.grab("o", "u", id=f"g{number}")) for number in range(3)]

        async def are_sent() -> bool:
            return len(requests) == len(calls)

        await until(are_sent, 20, "the requests")
        await both.end()
        async with asyncio.timeout(60):
            found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) for each in found] == [OutcomeUnknown] * 3
    with pytest.raises(RuntimeError):
        await both.offers()


async def test_a_call_that_rests_between_attempts_ends_with_its_client(
    kind: type[Client | AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was decided, and nothing more is sent."""
    rests, rest = threading.Event(), AsyncClient._rest

    async def resting(client: AsyncClient, seconds: float) -> None:
        rests.set()
        await rest(client, seconds)

    monkeypatch.setattr(AsyncClient, "_rest", resting)
    async with scripted([BUSY_LONG]) as (url, requests):
        both = Both(kind(url, timeout_seconds=3_600))
        call = asyncio.create_task(both.grab("o", "u", id="g"))

        async def does_rest() -> bool:
            return rests.is_set()

        await until(does_rest, 20, "the rest that the gateway asks for")
        await both.end()
        async with asyncio.timeout(60):
            with pytest.raises(RequestProblem, match="busy"):
                await call
    assert len(requests) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
async def test_a_client_works_in_a_forked_process_too() -> None:
    """The thread of the parent does not exist there."""
    async with scripted([GRANTED]) as (url, _):
        client = Client(url)
        await asyncio.to_thread(client.grab, "o", "u", id="g")
        context = multiprocessing.get_context("fork")
        process = context.Process(target=client.grab, args=("o", "u"), kwargs={"id": "g"}, daemon=True)
        process.start()
        await asyncio.to_thread(process.join, 60)
        assert process.exitcode == 0
        client.end()


async def test_a_slow_reply_ends_with_the_time_out(kind: type[Client | AsyncClient]) -> None:
    async with scripted([HANG]) as (url, requests):
        both = Both(kind(url, timeout_seconds=0.5))
        began = time.monotonic()
        with pytest.raises(RequestProblem, match="no answer within 0.5 s"):
            await both.offers()
        assert time.monotonic() - began < 15
        await both.end()
    assert 1 <= len(requests) <= 3


def test_an_error_without_text_is_named_by_its_type() -> None:
    assert error_in_words(TimeoutError()) == "TimeoutError"
    assert error_in_words(OSError("refused")) == "OSError: refused"


async def test_nothing_was_decided_when_nothing_listens(kind: type[Client | AsyncClient]) -> None:
    [port] = free_ports(1)
    both = Both(kind(f"http://127.0.0.1:{port}", timeout_seconds=0.5))
    with pytest.raises(RequestProblem, match="no_reply"):
        await both.grab("o", "u")
    await both.end()


async def test_key_is_sent_as_bearer_token(kind: type[Client | AsyncClient]) -> None:
    async with scripted([GRANTED]) as (url, requests):
        both = Both(kind(url, key="secret-1"))
        await both.grab("o", "u", id="g")
        await both.end()
    assert b"authorization: bearer secret-1" in requests[0].lower()
    assert json.loads(requests[0].partition(b"\r\n\r\n")[2]) == {"user": "u"}
    assert requests[0].startswith(b"POST /v1/offers/o/grabs HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: "],
    ids=["body", "head"],
)
async def test_a_reply_that_drips_ends_with_the_time_out(
    kind: type[Client | AsyncClient], head: bytes
) -> None:
    """Each piece comes in time; the whole never does."""
    async with dripping(head, 0.1) as url:
        both = Both(kind(url, timeout_seconds=0.6))
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            await both.grab("o", "u", id="g")
        assert time.monotonic() - began < 30  # the whole takes 100 s
        await both.end()


class _Nothing:
    async def end(self) -> None:
        """Nothing is to be closed."""

    async def process(self) -> int:
        return os.getpid()


class _Calling(InThread[_Nothing]):
    def call(self) -> int:
        return self._wait(self._client().process())


def test_a_forked_process_does_not_wait_for_a_lock_of_its_parent() -> None:
    client = _Calling(_Nothing)
    assert client.call() == os.getpid()
    locked, may_release = threading.Event(), threading.Event()

    def hold() -> None:
        with client._lock:
            locked.set()
            may_release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait()
    if not (child := os.fork()):
        signal.alarm(20)  # ends a process that hangs
        os._exit(client.call() != os.getpid())
    _, status = os.waitpid(child, 0)
    may_release.set()
    holder.join()
    client.end()
    assert status == 0


def test_a_signal_handler_may_end_a_client_whose_thread_is_in_a_call() -> None:
    client = _Calling(_Nothing)
    client.call()

    def end_within_a_call() -> None:
        with client._lock:
            client.end()

    ending = threading.Thread(target=end_within_a_call, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive()
