"""Questions over HTTP: what the read models say, page by page, and when they cannot answer."""

import asyncio
import json
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from psycopg import AsyncConnection

from grabstream.connections.opening import key_space, open_redis
from grabstream.gateway.bounds import AFTER_SECONDS_MAX, CACHE_SECONDS
from grabstream.gateway.caching import Cache
from grabstream.gateway.last_decided import LastSeqs
from grabstream.gateway.problems import Problem
from grabstream.gateway.questions import QueryHandlers
from grabstream.gateway.requests import Request
from grabstream.gateway.view_reader import open_view_reader
from grabstream.lua.server import server_epoch_of
from grabstream.models.outcomes import Outcome
from grabstream.models.vocabulary.documents import DOCUMENTS
from grabstream.settings import Settings
from grabstream.workshop.services import free_ports
from tests.conftest import until
from tests.gateway.conftest import Door
from tests.gateway.test_commands import SALE, is_problem, refused
from tests.support.gateways import Caller, GatewayProcess, Got, calling, new_key
from tests.support.projecting import rows
from tests.support.receipts import receipt_for, signed


def position(got: Got) -> str:
    """The `after` of an answer."""
    return f"after={got.body['shard']}-{got.body['seq']}"


async def ask(caller: Caller, path: str, name: str) -> Any:
    """A document, which must be one of its kind."""
    got = await caller.send("GET", path)
    assert got.status == 200, got
    DOCUMENTS[name].model_validate_json(got.raw, strict=False)
    assert b"null" not in got.raw
    return got.body


async def all_pages(caller: Caller, path: str, name: str, of: str) -> list[dict[str, Any]]:
    """The rows of all pages of a list."""
    found: list[dict[str, Any]] = []
    sign, cursor = "&" if "?" in path else "?", ""
    for _ in range(100):
        page = await ask(caller, path + cursor, name)
        found += page[of]
        if "next" not in page:
            return found
        cursor = f"{sign}cursor={page['next']}"
    raise AssertionError("the list has no end")


async def test_own_grab_is_seen_after_its_position(caller: Caller, offer: str) -> None:
    """Each question asks at once, and always sees what its answer names."""
    await caller.open(offer, **{**SALE, "total": 50})
    for number in range(10):
        got = await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, f"k{number}")
        after = position(got)
        grabs = await ask(caller, f"/v1/users/ann-{offer}/grabs?{after}", "user_grabs")
        assert grabs == {"grabs": []}
        taken = await ask(caller, f"/v1/offers/{offer}/grabs?limit=100&{after}", "offer_grabs")
        assert [row["grab"] for row in taken["grabs"]] == [f"k{n}" for n in range(number + 1)]
        assert taken["grabs"][-1] | {"at": 0} == {
            "place": number + 1, "user": "ann", "grab": f"k{number}", "state": "held", "quantity": 1,
            "amount": 1, "asset": f"sku:{offer}", "held": 1, "taken": 0, "redeemed": 0, "at": 0,
        }  # fmt: skip
        detail = await ask(caller, f"/v1/offers/{offer}?{after}", "offer")
        assert (detail["held"], detail["units_left"], detail["state"]) == (number + 1, 49 - number, "open")
    assert detail["terms"]["price"] == 100
    assert "closes_at" not in detail


async def test_offers_by_filters_and_pages(caller: Caller, offer: str) -> None:
    shop, opened = f"shop-{offer}", []
    for number in range(7):
        kind = {"kind": "coupon"} if number % 2 else SALE
        opened.append(await caller.open(f"{offer}:{number}", **{**kind, "issuer": shop}))
    await caller.post(f"/v1/offers/{offer}:3/pause")
    last = await caller.post(f"/v1/offers/{offer}:5/close")
    await ask(caller, f"/v1/offers?{position(last)}", "offers")
    found = await all_pages(caller, f"/v1/offers?issuer={shop}&limit=2", "offers", "offers")
    assert [row["offer"] for row in found] == [f"{offer}:{number}" for number in range(6, -1, -1)]
    for query, numbers in (
        ("kind=coupon", [5, 3, 1]), ("state=paused", [3]), ("state=closed", [5]),
        ("state=open&kind=coupon", [1]), ("kind=envelope", []),
    ):  # fmt: skip
        found = await all_pages(caller, f"/v1/offers?issuer={shop}&{query}", "offers", "offers")
        assert [row["offer"] for row in found] == [f"{offer}:{number}" for number in numbers], query
    assert (found or [{"terms": 0}])[0].keys() & {"terms", "funding"} <= {"terms"}


async def test_page_stays_right_while_offers_are_opened(caller: Caller, offer: str) -> None:
    shop = f"shop-{offer}"
    for number in range(4):
        last = await caller.open(f"{offer}:{number}", issuer=shop)
    first = await ask(caller, f"/v1/offers?issuer={shop}&limit=2&{position(last)}", "offers")
    new = await caller.open(f"{offer}:9", issuer=shop)
    second = await ask(caller, f"/v1/offers?issuer={shop}&cursor={first['next']}&{position(new)}", "offers")
    names = [row["offer"] for row in (*first["offers"], *second["offers"])]
    assert names == [f"{offer}:{number}" for number in (3, 2, 1, 0)]


@pytest.mark.requirement("E6")
async def test_random_order_is_stable_for_a_visitor(caller: Caller, offer: str) -> None:
    shop = f"shop-{offer}"
    for number in range(12):
        last = await caller.open(f"{offer}:{number}", issuer=shop)
    await ask(caller, f"/v1/offers?{position(last)}", "offers")
    orders = {}
    for visitor in ("ann", "bob", "carl"):
        path = f"/v1/offers?issuer={shop}&order=random&visitor={visitor}"
        pages = await all_pages(caller, f"{path}&limit=5", "offers", "offers")
        orders[visitor] = [row["offer"] for row in pages]
        assert sorted(orders[visitor]) == sorted(f"{offer}:{number}" for number in range(12))
        assert [
            row["offer"] for row in (await ask(caller, f"{path}&limit=100", "offers"))["offers"]
        ] == orders[visitor]
    assert len({tuple(order) for order in orders.values()}) == 3
    # An offer that is added moves no other.
    new = await caller.open(f"{offer}:new", issuer=shop)
    path = f"/v1/offers?issuer={shop}&order=random&visitor=ann&limit=100&{position(new)}"
    with_new = [row["offer"] for row in (await ask(caller, path, "offers"))["offers"]]
    assert [name for name in with_new if name != f"{offer}:new"] == orders["ann"]


@asynccontextmanager
async def counted(door: Door) -> AsyncIterator[tuple[QueryHandlers, list[str]]]:
    """Questions to the read models of a door, and the queries that they make."""

    async def check(connection: Any) -> None:
        pass

    settings, queries = door.settings, []
    async with open_view_reader(settings.postgres, settings.schema_, 2, check) as books:
        read = books.rows

        async def rows(query: str, parameters: Any = ()) -> Any:
            queries.append(query)
            return await read(query, parameters)

        books.rows = rows  # type: ignore[method-assign]
        yield QueryHandlers(books, Cache()), queries


async def list_of(questions: QueryHandlers, query: str) -> Any:
    scope = {"query_string": query.encode(), "raw_path": b"/v1/offers", "headers": []}
    reply = await questions.offers(Request(scope, Any, {}), b"")
    assert reply.status == 200
    return json.loads(reply.body)


async def pages_of(questions: QueryHandlers, query: str) -> list[Any]:
    found = []
    page = await list_of(questions, query)
    while True:
        found.append(page)
        if "next" not in page:
            return found
        page = await list_of(questions, f"{query}&cursor={page['next']}")


async def test_visitors_share_what_is_read_for_a_random_order(
    caller: Caller, offer: str, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query for all of them, however many pages they turn. When offers become too many to keep them all,
    the pages are the same, each of them with a query by keys; an earlier `next` continues.
    """
    shop = f"shop-{offer}"
    for number in range(11):
        last = await caller.open(f"{offer}:{number}", issuer=shop)
    await ask(caller, f"/v1/offers?{position(last)}", "offers")
    ours: dict[str, list[Any]] = {}
    async with counted(door) as (questions, queries):
        for visitor in ("ann", "bob", "x:y", "z" * 64):
            ours[visitor] = await pages_of(questions, f"issuer={shop}&order=random&visitor={visitor}&limit=4")
            assert [len(page["offers"]) for page in ours[visitor]] == [4, 4, 3]
        assert len(queries) == 1
    monkeypatch.setattr("grabstream.gateway.questions.SHUFFLED_OFFERS_MAX", 10)
    async with counted(door) as (questions, queries):
        for visitor, pages in ours.items():
            asked = f"issuer={shop}&order=random&visitor={visitor}&limit=4"
            assert await pages_of(questions, asked) == pages
            assert await list_of(questions, f"{asked}&cursor={pages[0]['next']}") == pages[1]
        assert len(queries) == 2 + 3 * len(ours)
        # One that has closed a moment ago is not shown as open, and the page after it is the same.
        asked = f"issuer={shop}&order=random&visitor=ann&limit=4&state=open"
        pages = await pages_of(questions, asked)
        assert [len(page["offers"]) for page in pages] == [4, 4, 3]
        gone = await caller.post(f"/v1/offers/{pages[0]['offers'][3]['offer']}/close", {})
        await ask(caller, f"/v1/offers?{position(gone)}", "offers")
        questions._cache._kept = OrderedDict(
            (key, kept) for key, kept in questions._cache._kept.items() if kept.body.startswith(b'"')
        )
        again = await pages_of(questions, asked)
        assert [len(page["offers"]) for page in again] == [3, 4, 3]
        assert [page.get("next") for page in again] == [page.get("next") for page in pages]
    monkeypatch.setattr("grabstream.gateway.questions.SHUFFLED_NAMES_MAX", 5)
    async with counted(door) as (questions, queries):
        newest = [f"{offer}:{number}" for number in range(6, 11)]
        [page] = await pages_of(questions, f"issuer={shop}&order=random&visitor=ann&limit=100")
        assert sorted(row["offer"] for row in page["offers"]) == sorted(newest)


async def test_questions_about_events_that_are_booked_share_what_is_read(
    caller: Caller, offer: str, door: Door
) -> None:
    """However many ask, and whatever event they name; an event that is booked later is in the next answer."""
    opened = await caller.open(offer, total=9)
    await ask(caller, f"/v1/offers/{offer}?{position(opened)}", "offer")
    async with counted(door) as (questions, queries):

        async def given(after: Got) -> int:
            scope = {"query_string": position(after).encode(), "raw_path": b"", "headers": []}
            reply = await questions.offer(Request(scope, Any, {"offer": offer}), b"")
            return int(json.loads(reply.body)["given"])

        assert await asyncio.gather(*(given(opened) for _ in range(50))) == [0] * 50
        assert len(queries) == 2, "how far the read models are, and the offer"
        events = [opened]
        for number in range(3):
            events.append(await caller.post(f"/v1/offers/{offer}/grabs", {"user": f"u{number}"}))
            assert await given(events[-1]) == number + 1
        queries.clear()
        began = time.monotonic()
        for _ in range(5):
            assert await asyncio.gather(*map(given, events)) == [3] * len(events)
        times = 2 + (time.monotonic() - began) // CACHE_SECONDS
        assert len(queries) <= 2 * times, "once while a document is fresh"


async def test_what_was_seen_of_another_version_of_a_read_model_says_nothing(door: Door) -> None:
    async with counted(door) as (questions, _):
        books, seqs = questions._books, {"seq": 7}

        async def rows(query: str, parameters: Any = ()) -> Any:
            return [{"projection": "balances", "shard": 0, **seqs}]

        books.rows = rows  # type: ignore[method-assign]
        first = await books.booked_since(("balances",), 0, 7, 0)
        assert first is not None
        assert await books.last_seq(0) == 7
        assert await books.booked_since(("balances",), 0, 5, 0) == first
        seqs["seq"] = 5
        assert await books.last_seq(0) == 5
        assert await books.booked_since(("balances",), 0, 7, 0) is None
        later = await books.booked_since(("balances",), 0, 5, 0)
        assert later is not None
        assert later > first
        with pytest.raises(KeyError):
            await books.booked_since(("balances",), 1, 5, 0)


async def test_list_of_a_visitor_is_no_older_than_what_it_was_made_of(
    caller: Caller, offer: str, door: Door
) -> None:
    shop = f"shop-{offer}"
    first = await caller.open(f"{offer}:0", issuer=shop)
    await ask(caller, f"/v1/offers?{position(first)}", "offers")
    async with counted(door) as (questions, queries):
        asked = f"issuer={shop}&order=random&visitor="
        assert len((await list_of(questions, f"{asked}ann"))["offers"]) == 1
        [source] = [kept for kept in questions._cache._kept.values() if kept.body.startswith(b"[")]
        [made] = [kept for kept in questions._cache._kept.values() if kept.body.startswith(b"{")]
        assert (made.since, made.until) == (source.since, source.until)
        # A query that waits for an event is read again, and the others get the new list too.
        second = await caller.open(f"{offer}:1", issuer=shop)
        assert len((await list_of(questions, f"{asked}ann&{position(second)}"))["offers"]) == 2
        for visitor in ("ann", "bob"):
            assert len((await list_of(questions, f"{asked}{visitor}"))["offers"]) == 2
        assert sum("LIMIT" in query for query in queries) == 2


async def test_who_got_what_and_the_luckiest(caller: Caller, offer: str, door: Door) -> None:
    await caller.open(
        offer, kind="envelope", issuer="alice", funding="pay", asset="CNY", total=5_000, parts=25
    )
    got = await asyncio.gather(
        *(caller.post(f"/v1/offers/{offer}/grabs", {"user": f"{offer}-{n}"}) for n in range(25))
    )
    last = max(got, key=lambda answer: answer.body["seq"])
    await ask(caller, f"/v1/offers/{offer}?after={last.body['shard']}-{last.body['seq'] + 1}", "offer")
    by_place = await all_pages(caller, f"/v1/offers/{offer}/grabs?limit=10", "offer_grabs", "grabs")
    assert [(row["place"], row["user"], row["amount"]) for row in by_place] == sorted(
        (answer.body["place"], answer.body["user"], answer.body["amount"]) for answer in got
    )
    lucky = await all_pages(
        caller, f"/v1/offers/{offer}/grabs?limit=10&order=luckiest", "offer_grabs", "grabs"
    )
    assert [(row["amount"], row["place"]) for row in lucky] == sorted(
        ((answer.body["amount"], answer.body["place"]) for answer in got), key=lambda one: (-one[0], one[1])
    )
    detail = await ask(caller, f"/v1/offers/{offer}", "offer")
    assert (detail["state"], detail["reason"], detail["given"], len(detail["seed"]) >= 32) == (
        "closed", "drained", 5_000, True,
    )  # fmt: skip
    assert (await rows(door.settings, f"SELECT seed FROM offers WHERE offer = '{offer}'"))[0][0] == detail[
        "seed"
    ]


@pytest.mark.requirement("B7")
async def test_what_a_user_has_and_how_it_came(caller: Caller, offer: str) -> None:
    user, issuer = f"u-{offer}", f"i-{offer}"
    await caller.open(
        f"{offer}:e", kind="envelope", issuer=issuer, funding=f"pay-{offer}", asset="CNY", total=900, parts=3
    )
    part = await caller.post(f"/v1/offers/{offer}:e/grabs", {"user": user}, "part")
    await caller.open(offer, **SALE)
    got_held = await caller.post(f"/v1/offers/{offer}/grabs", {"user": user, "quantity": 3}, "g")
    paid = {"user": user, "payment": f"p-{offer}", "paid": 300, "currency": "CNY"}
    paid["receipt"] = signed(receipt_for(got_held.body, f"p-{offer}"))
    await caller.post(f"/v1/offers/{offer}/grabs/g/confirm", paid)
    await caller.post(f"/v1/offers/{offer}/grabs", {"user": user}, "held")
    last = await caller.post(f"/v1/offers/{offer}/grabs/g/return", {"user": user, "quantity": 1})
    closed = await caller.post(f"/v1/offers/{offer}:e/close")
    await ask(caller, f"/v1/users/{user}/transfers?{position(closed)}", "user_transfers")
    balances = await ask(caller, f"/v1/users/{user}/balances?{position(last)}", "user_balances")
    assert balances["balances"] == [
        {"asset": "CNY", "available": part.body["amount"], "held": 0},
        {"asset": f"sku:{offer}", "available": 2, "held": 1},
    ]
    grabs = await all_pages(caller, f"/v1/users/{user}/grabs?limit=2", "user_grabs", "grabs")
    assert [(row["offer"], row["grab"], row["state"], row["back"]) for row in grabs] == [
        (offer, "held", "held", 0), (offer, "g", "confirmed", 1), (f"{offer}:e", "part", "granted", 0),
    ]  # fmt: skip
    of_one = f"/v1/users/{user}/grabs?limit=1&offer={offer}"
    assert await all_pages(caller, of_one, "user_grabs", "grabs") == grabs[:2]
    assert (await caller.send("GET", f"/v1/users/{user}/grabs?offer=a%20b")).status == 400
    flow = await all_pages(
        caller, f"/v1/users/{user}/transfers?limit=2&{position(last)}", "user_transfers", "transfers"
    )
    told = [(row["direction"], row["account"], row["amount"], row["asset"]) for row in flow]
    assert told == [
        ("out", "wallet", 1, f"sku:{offer}"),  # returned
        ("in", "hold", 1, f"sku:{offer}"),
        ("out", "hold", 3, f"sku:{offer}"),  # confirmed
        ("in", "wallet", 3, f"sku:{offer}"),
        ("in", "hold", 3, f"sku:{offer}"),
        ("in", "wallet", part.body["amount"], "CNY"),
    ]
    sums: dict[tuple[str, str], int] = {}
    for row in flow:
        key = row["account"], row["asset"]
        sums[key] = sums.get(key, 0) + (row["amount"] if row["direction"] == "in" else -row["amount"])
    assert sums == {
        ("wallet", "CNY"): part.body["amount"],
        ("wallet", f"sku:{offer}"): 2,
        ("hold", f"sku:{offer}"): 1,
    }
    # What is left of an envelope goes to its issuer, who grabbed nothing.
    of_issuer = await ask(caller, f"/v1/users/{issuer}/transfers", "user_transfers")
    assert [(row["direction"], row["amount"], row["other"]) for row in of_issuer["transfers"]] == [
        ("in", 900 - part.body["amount"], f"offer:{offer}:e")
    ]
    nobody = await ask(caller, "/v1/users/nobody/balances", "user_balances")
    assert nobody == {"balances": []}


@pytest.mark.long
async def test_retired_offer_is_answered_from_sql(caller: Caller, offer: str) -> None:
    await caller.open(offer, retire_after_ms=0)
    await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, "g")
    await caller.post(f"/v1/offers/{offer}/close")

    async def is_retired() -> bool:
        got = await caller.send("GET", f"/v1/offers/{offer}")
        return got.status == 200 and got.body["state"] == "retired"

    await until(is_retired, 60, "retirement")
    words = refused(await caller.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}), Outcome.no_such_offer)
    assert f"GET /v1/offers/{offer}" in words
    taken = await ask(caller, f"/v1/offers/{offer}/grabs", "offer_grabs")
    assert [row["user"] for row in taken["grabs"]] == ["ann"]


async def test_document_has_a_tag(caller: Caller, offer: str) -> None:
    opened = await caller.open(offer, total=5)
    path = f"/v1/offers/{offer}"
    first = await caller.send("GET", f"{path}?{position(opened)}")
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"x", {tag}', "*"):
        again = await caller.send("GET", path, If_None_Match=known)
        assert (again.status, again.raw, again.headers["etag"]) == (304, b"", tag)
    got = await caller.post(f"{path}/grabs", {"user": "ann"})
    changed = await caller.send("GET", f"{path}?{position(got)}", If_None_Match=tag)
    assert (changed.status, changed.body["given"]) == (200, 1)
    assert changed.headers["etag"] != tag
    head = await caller.send("HEAD", path)
    assert (head.status, head.raw, head.headers["etag"]) == (200, b"", changed.headers["etag"])


@pytest.mark.parametrize(
    ("field", "queries"),
    [
        (
            "limit",
            ["limit=0", "limit=101", "limit=x", "limit=-1", "limit=1e1", "limit=%C2%B2", "limit=00005099999"],
        ),
        (
            "cursor",
            ["cursor=x", "cursor=W10", "cursor=WyJhIiwxXQ", "cursor=WzFlMywiYSJd", "cursor=" + "a" * 500],
        ),
        (
            "cursor",
            [f"order=random&visitor=ann&cursor={text}" for text in ("WyJcdWQ4MDAiXQ", "WyIgIl0", "WzFd")],
        ),
        ("after", ["after=1", "after=99-1", "after=1--1", "after=" + "1" * 50]),
        ("order", ["order=x"]),
        ("visitor", ["order=random", "visitor=ann", "order=random&visitor=a%20b"]),
        ("state", ["state=x", "state="]),
        ("kind", ["kind=x"]),
        ("issuer", ["issuer=%00", "issuer="]),
        ("query", ["x=1"]),
    ],
)
async def test_wrong_question_is_refused_with_its_field(
    caller: Caller, field: str, queries: list[str]
) -> None:
    for query in queries:
        got = await caller.send("GET", f"/v1/offers?{query}")
        refused(got, Outcome.invalid)
        assert got.body["field"] == field, query


async def test_unknown_offer(caller: Caller, offer: str) -> None:
    for path in (f"/v1/offers/{offer}", f"/v1/offers/{offer}/grabs"):
        got = await caller.send("GET", path)
        assert is_problem(got, "no_such_offer", 404)
        assert got.body["outcome"] == "no_such_offer"


async def test_event_that_its_shard_has_not_decided_is_refused_at_once(caller: Caller, offer: str) -> None:
    """It may never come. The refusal has the position of the shard, and that position can be waited for."""
    opened = await caller.open(offer)
    shard = opened.body["shard"]
    for path in ("/v1/offers", f"/v1/offers/{offer}", f"/v1/offers/{offer}/grabs", "/v1/users/ann/balances"):
        got = await caller.send("GET", f"{path}?after={shard}-9999999999999999")
        assert is_problem(got, "position_not_reached", 409)
        assert got.body["field"] == "after"
        assert "retry-after" not in got.headers
        [last] = re.findall(r"its last one is ([0-9]+)", got.body["detail"])
        assert int(last) >= opened.body["seq"]
        assert (await caller.send("GET", f"{path}?after={shard}-{last}")).status == 200


@pytest.mark.long
async def test_event_that_never_comes(door: Door) -> None:
    """Where the position of the shard is unknown."""
    async with counted(door) as (questions, _):
        began = time.monotonic()
        with pytest.raises(Problem, match="does not have event 9999999999999999") as raised:
            await list_of(questions, "after=0-9999999999999999")
        assert raised.value.name == "read_model_behind"
        assert (b"retry-after", b"1") in raised.value.headers
        assert 4 < time.monotonic() - began < 30


class Lagging:
    """Read models of a shard whose events come when they are asked about again; `known` is the last event of
    the one that has most.
    """

    def __init__(self, known: int) -> None:
        self.known = known
        self.asked: list[float] = []

    async def booked_since(self, projections: Any, shard: int, seq: int, seconds: float) -> float | None:
        self.asked.append(seconds)
        return time.monotonic() if len(self.asked) > 1 else None

    async def last_seq(self, shard: int) -> int:
        return self.known

    async def rows(self, query: str, parameters: Any = ()) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("in_redis", "in_books", "waits"),
    [(16, 0, False), (17, 0, True), (None, 0, True), (16, 17, True), (16, 16, False)],
)
async def test_question_waits_unless_nobody_has_the_event(
    in_redis: int | None, in_books: int, waits: bool
) -> None:
    """Redis may have lost the event, and a read model have it, while another one lags."""

    class OneShard:
        async def last_seq(self, shard: int) -> int | None:
            return in_redis

    books = Lagging(in_books)
    questions = QueryHandlers(cast(Any, books), Cache(), reached=cast(Any, OneShard()))
    if waits:
        assert await list_of(questions, "after=3-17") == {"offers": []}
        assert books.asked == [0, AFTER_SECONDS_MAX]
    else:
        with pytest.raises(Problem, match="Shard 3 has no event 17: its last one is 16"):
            await list_of(questions, "after=3-17")


async def test_a_shard_that_may_have_lost_events_does_not_say_how_far_it_is(settings: Settings) -> None:
    """Not when its server has restarted, while it is rebuilt, with a fault, and when Redis is away."""
    keys = key_space(settings)
    state = keys.shard(1).state
    redis = open_redis(settings)
    reached = LastSeqs(redis, keys)
    try:
        assert await reached.last_seq(1) is None, "there is nothing of it"
        good = {"seq": "17", "server_epoch": await server_epoch_of(redis, state)}
        for changed, last in (
            ({}, 17), ({"server_epoch": "of a server before"}, None), ({"partial": "1"}, None),
            ({"fault": "x"}, None), ({"seq": "x"}, None),
        ):  # fmt: skip
            await redis.delete(state)
            await redis.hset(state, mapping={**good, **changed})
            assert await reached.last_seq(1) == last, changed
        await redis.hset(state, mapping={**good, "seq": "18"})
        [one, *_] = found = await asyncio.gather(*(reached.last_seq(1) for _ in range(20)))
        assert set(found) == {one}
    finally:
        await redis.delete(state)
        await redis.aclose()
    [port] = free_ports(1)
    away = open_redis(settings.model_copy(update={"redis_url": f"redis://127.0.0.1:{port}/0"}))
    assert await LastSeqs(away, keys).last_seq(1) is None
    await away.aclose()


@pytest.mark.long
async def test_commands_go_on_without_postgresql(
    door: Door, caller: Caller, offer: str, tmp_path: Path
) -> None:
    """Questions are refused with a time to retry, and the server's address is not shown."""
    [port] = free_ports(1)
    away = door.settings.model_copy(update={"postgres": f"postgresql://joe:secret@127.0.0.1:{port}/books"})
    await caller.open(offer, total=5)
    with GatewayProcess(away, tmp_path / "log", gate_timeout_ms="20000") as gateway:
        async with calling(gateway.port) as alone:
            got = await alone.post(f"/v1/offers/{offer}/grabs", {"user": "ann"}, new_key())
            assert got.status == 201
            for path in (f"/v1/offers/{offer}", "/v1/system", "/v1/demand", "/v1/users/ann/why?offer=x"):
                got = await alone.send("GET", path)
                assert is_problem(got, "unavailable", 503), path
                assert got.headers["retry-after"] == "1"
                assert not {str(port), "joe", "secret"} & set(json.dumps(got.body).replace(":", " ").split())
            assert (await alone.send("GET", "/")).status == 200
        assert gateway.stop() == 0
        assert "secret" not in gateway.text()


async def test_a_view_of_an_older_release_is_named_in_the_log_only(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    """Until `grabstream init` has replaced it."""
    async with counted(door) as (questions, _):
        for query in (
            "SELECT FROM no_view",
            "SELECT no_column FROM offers",
            "SELECT no_function(offer) FROM offers",
        ):
            with pytest.raises(Problem, match="`grabstream init`") as raised:
                await questions._books.rows(query)
            assert (raised.value.name, "no_" in raised.value.detail) == ("unavailable", False)
            assert "no_" in caplog.messages[-1]


@pytest.mark.long
async def test_a_missing_right_is_named_in_the_log_only(
    system: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """A role that was made before a view, or by hand."""

    async def may_not_read(connection: AsyncConnection[Any]) -> None:
        await connection.execute(f"REVOKE SELECT ON {system.schema_}.offers FROM CURRENT_USER".encode())

    async with open_view_reader(system.postgres, system.schema_, 1, may_not_read) as books:
        with pytest.raises(Problem, match="lacks a right") as raised:
            await books.rows("SELECT offer FROM offers")
        assert (raised.value.name, "offers" in raised.value.detail) == ("unavailable", False)
        assert "permission denied" in caplog.text
        assert "grabstream grants" in caplog.text
        assert await books.rows("SELECT 1 AS one") == [{"one": 1}]
