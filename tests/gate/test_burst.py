"""The burst attack: one user sends five hundred requests at once, each over its own connection. The user gets
exactly what the limit allows.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
import redis.asyncio

from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Confirm, Grab, Load, Open
from grabstream.models.offers import CouponTerms, EnvelopeTerms, Limit, StockTerms, Terms
from grabstream.settings import Settings
from tests.conftest import some_by_tier
from tests.lua.histories.books import check_books
from tests.lua.histories.strategies import HOUR, TICKETS, ticket_for
from tests.support.shards import NOW, SEALER, event_lines, take_over

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUESTS = 500
DAY, WEEK = 24 * HOUR, 7 * 24 * HOUR


class Burst:
    """One gate per request, each over its own connection; all read the clock `now` (ms)."""

    def __init__(self, clients: Sequence[Any], keys: KeySpace) -> None:
        self.client, self.keys, self.now = clients[0], keys, NOW
        limits = GateLimits(timeout_ms=60_000)
        self.gates = [
            Gate(client, keys, SEALER, limits, clock=lambda: self.now, tickets=TICKETS) for client in clients
        ]

    async def send(self, command: AnyCommand) -> Answer:
        [answer] = await self.gates[0].decide([command], "decided")
        return answer

    async def send_all(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """Sends all commands at once, each by its own gate."""
        answers = await asyncio.gather(
            *(gate.decide([command], "decided") for gate, command in zip(self.gates, commands, strict=True))
        )
        return [answer for [answer] in answers]

    async def lines(self) -> list[bytes]:
        return await event_lines(self.client, self.keys, 0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients(servers: Settings) -> AsyncIterator[list[Any]]:
    # Five hundred connections at once take a busy machine longer than the client's timeout.
    options = {"socket_connect_timeout": 60}
    clients = [redis.asyncio.Redis.from_url(servers.redis_url, **options) for _ in range(REQUESTS)]
    await asyncio.gather(*(client.ping() for client in clients))
    yield clients
    await asyncio.gather(*(client.aclose() for client in clients))


@pytest_asyncio.fixture(loop_scope="module")
async def burst(clients: list[Any], prefix: str) -> AsyncIterator[Burst]:
    keys = KeySpace(prefix, 1)
    await take_over(clients[0], keys)
    burst = Burst(clients, keys)
    yield burst
    check_books(await burst.lines())
    for gate in burst.gates:
        await gate.close()
    await clients[0].unlink(*[key async for key in clients[0].scan_iter(match=f"{prefix}:*", count=1_000)])


def stock(*limits: Limit, **rest: Any) -> StockTerms:
    return StockTerms(**{"issuer": "shop", "total": 10_000, "limits": limits, **rest})


def plain(n: int) -> dict[str, Any]:
    return {"offer": "o", "user": "mallory"}


class Case(NamedTuple):
    """An attack: the offer's terms, the fields of the nth grab, the units it may get, the outcome of the
    others, and the ms after which it may get as many units again (None: never).
    """

    terms: Terms
    request: Callable[[int], dict[str, Any]]
    most: int
    refusal: str = "limit_reached"
    again_after: int | None = None
    offers: tuple[str, ...] = ("o",)


CAMPAIGN = tuple(f"week:{number}" for number in range(5))
TICKET = ticket_for("mallory", "o", NOW + 10 * WEEK, "once")
CASES = {
    "limit per offer": Case(stock(Limit("user", "offer", 7)), plain, 7),
    "limit per hour": Case(stock(Limit("user", "hour", 7)), plain, 7, again_after=HOUR),
    "limit per day": Case(
        stock(Limit("user", "day", 1), Limit("user", "week", 30)), plain, 1, again_after=DAY
    ),
    "limit per week": Case(
        stock(Limit("user", "week", 7), Limit("user", "offer", 100)), plain, 7, again_after=WEEK
    ),
    "limit on holds": Case(stock(Limit("user", "offer", 3), hold_ms=HOUR), plain, 3),
    "limit with any quantity": Case(
        stock(Limit("user", "offer", 101), max_per_grab=3, take="up_to"),
        lambda n: {**plain(n), "quantity": n % 3 + 1}, 101
    ),
    "limit per campaign": Case(
        stock(Limit("user", "offer", 1, "campaign")), lambda n: {"offer": CAMPAIGN[n % 5], "user": "mallory"},
        1, offers=CAMPAIGN
    ),
    "limit per day of a campaign": Case(
        stock(Limit("user", "day", 5, "campaign"), Limit("user", "offer", 400)),
        lambda n: {"offer": CAMPAIGN[n % 5], "user": "mallory"}, 5, again_after=DAY, offers=CAMPAIGN,
    ),
    "limit per card of many users": Case(
        stock(Limit("card", "offer", 7)), lambda n: {"offer": "o", "user": f"u{n}",
        "attributes": {"card": "c:1"}}, 7
    ),
    "limit per card and day": Case(
        stock(Limit("card", "day", 4), Limit("user", "offer", 1)),
        lambda n: {"offer": "o", "user": f"u{n}", "attributes": {"card": "c:1"}}, 4,
    ),
    "envelope": Case(
        EnvelopeTerms(issuer="a", funding="f", asset="CNY", total=10_000, parts=1_000), plain, 1,
        "already_taken"
    ),
    "envelope drawn at the grab": Case(
        EnvelopeTerms(issuer="a", funding="f", asset="CNY", total=10_000, parts=1_000, draw="at_grab"), plain,
        1, "already_taken"
    ),
    "single-use ticket": Case(stock(audience="ticket"), lambda n: {**plain(n), "ticket": TICKET}, 1,
    "not_eligible"),
    "total": Case(stock(total=7), lambda n: {"offer": "o", "user": f"u{n}"}, 7, "sold_out"),
    "total with any quantity": Case(
        stock(total=101, max_per_grab=3, take="up_to"),
        lambda n: {"offer": "o", "user": f"u{n}", "quantity": n % 3 + 1}, 101, "sold_out"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some_by_tier(CASES, 2))
async def test_a_burst_gets_exactly_what_the_terms_allow(burst: Burst, name: str) -> None:
    case = CASES[name]
    for offer in case.offers:
        assert (await burst.send(Open(id=f"open-{offer}", offer=offer, terms=case.terms))).positive

    async def attack(wave: int) -> list[Answer]:
        return await burst.send_all([Grab(id=f"{wave}-{n}", **case.request(n)) for n in range(REQUESTS)])

    def got(answers: list[Answer]) -> int:
        return sum(answer.quantity or 0 for answer in answers if answer.positive)

    answers = await attack(1)
    assert got(answers) == case.most
    assert {answer.outcome for answer in answers if not answer.positive} == {case.refusal}
    if case.again_after:
        burst.now += case.again_after
    again = case.most if case.again_after else 0
    assert got(await attack(2)) == again
    # The same requests sent again get the same answers and make no events.
    assert [(answer.outcome, answer.seq, answer.at) for answer in await attack(1)] == [
        (answer.outcome, answer.seq, answer.at) for answer in answers
    ]
    events = [line for line in await burst.lines() if b'"grab.granted"' in line or b'"grab.held"' in line]
    assert sum(int(line.split(b'"quantity":')[1].split(b",")[0]) for line in events) == case.most + again


@pytest.mark.long
async def test_one_request_sent_five_hundred_times_is_one_grab(burst: Burst) -> None:
    """They are one grab, and every sender gets its answer."""
    await burst.send(Open(id="open", offer="o", terms=stock(Limit("user", "offer", 7))))
    answers = await burst.send_all([Grab(id="same", offer="o", user="mallory")] * REQUESTS)
    assert Counter((answer.outcome, answer.repeated) for answer in answers) == {
        ("granted", False): 1,
        ("granted", True): REQUESTS - 1,
    }
    assert len({(answer.amount, answer.place, answer.seq) for answer in answers}) == 1


async def test_a_burst_gets_each_code_once(burst: Burst) -> None:
    codes = tuple(f"K-{number:04}" for number in range(400))
    await burst.send(
        Open(id="open", offer="o", terms=CouponTerms(issuer="shop", total=400, opens_at=NOW + 1))
    )
    await burst.send(Load(id="load", offer="o", what="codes", chunk=1, chunks=1, items=codes))
    burst.now += 1
    answers = await burst.send_all([Grab(id=f"g{n}", offer="o", user=f"u{n}") for n in range(REQUESTS)])
    assert Counter(answer.outcome for answer in answers) == {"granted": 400, "sold_out": 100}
    assert sorted(answer.coupon_code for answer in answers if answer.coupon_code) == list(codes)


@pytest.mark.long
async def test_of_five_hundred_payments_for_a_hold_one_is_served(burst: Burst) -> None:
    """One payment is served; a refund is due for each of the others."""
    await burst.send(Open(id="open", offer="o", terms=stock(hold_ms=HOUR, price=250, currency="CNY")))
    await burst.send(Grab(id="g", offer="o", user="ann"))
    payments = [
        Confirm(id=f"c{n}", offer="o", grab="g", payment=f"p{n}", paid=250, currency="CNY")
        for n in range(REQUESTS)
    ]
    for _ in range(2):
        answers = await burst.send_all(payments)
        assert Counter(answer.outcome for answer in answers) == {"confirmed": 1, "not_held": REQUESTS - 1}
    refunds = [line for line in await burst.lines() if b"payment.refund_due" in line]
    assert (
        len(refunds) == len({line.split(b'"payment":')[1].split(b",")[0] for line in refunds}) == REQUESTS - 1
    )
