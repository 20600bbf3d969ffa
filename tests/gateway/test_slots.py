"""One caller's questions leave room for those of others: each caller gets a share of the queries in progress,
and of those that wait for an event. A caller is an end user, an API key or, without authentication, an
address.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from typing import Any, Final, cast

import pytest

from grabstream.gateway.app import Application, Bounds
from grabstream.gateway.bounds import (
    AFTER_WAITERS_CALLER_MAX,
    AFTER_WAITERS_MAX,
    JOINED_CALLER_MAX,
    QUESTIONS_CALLER_MAX,
    QUESTIONS_MAX,
    QUESTIONS_USER_MAX,
    SHUFFLED_OFFERS_MAX,
)
from grabstream.gateway.caching import Cache
from grabstream.gateway.changing_webhooks import ChangesOfWebhooks
from grabstream.gateway.deciding import CommandHandlers
from grabstream.gateway.event_streams import EventStreams
from grabstream.gateway.operations import Operation
from grabstream.gateway.operator_questions import Watching
from grabstream.gateway.questions import QueryHandlers
from grabstream.gateway.receipts import Receipts
from grabstream.gateway.requests import Request
from tests.conftest import until

BALANCES: Final = "/v1/users/ann/balances"


class SlowBooks:
    """Books that answer on demand, and never get an event. `asked` counts what waits."""

    def __init__(self) -> None:
        self.asked = Counter[str]()
        self.go_on = asyncio.Event()

    async def rows(self, query: str, parameters: Any = ()) -> list[Any]:
        self.asked["rows"] += 1
        await self.go_on.wait()
        return []

    async def booked_since(self, projections: Any, shard: int, seq: int, seconds: float) -> float | None:
        if seconds:
            self.asked["events"] += 1
            await self.go_on.wait()
        return None

    async def last_seq(self, shard: int) -> int:
        return 0


class ByHeader:
    """Stands for the checks of credentials: a header says who asks."""

    async def admit(self, operation: Operation, request: Request) -> None:
        kind, name = (request.header(b"x-caller") or b"").decode().split("/")
        request.user = name if kind == "user" else None
        request.service = name if kind == "key" else None


class Door:
    """An application of which callers ask questions, with the statuses and words of the answers."""

    def __init__(self, kind: str) -> None:
        self.cache = Cache()
        self.books = SlowBooks()
        books = cast(Any, self.books)
        self._kind = kind
        self.application = Application(
            CommandHandlers(books, 1_000), QueryHandlers(books, self.cache), Receipts(books, 1_000),
            EventStreams(books, 1), Watching(books, Cache(), books), ChangesOfWebhooks(books), dict, Bounds(),
            admission=None if kind == "address" else cast(Any, ByHeader()),
            proxies=[ip_network("127.0.0.1")],
        )  # fmt: skip

    async def ask(self, caller: str, query: str = "", path: str = BALANCES) -> tuple[int, str]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        # Addresses are named by a proxy.
        header = (
            (b"x-forwarded-for", caller.encode())
            if self._kind == "address"
            else (b"x-caller", f"{self._kind}/{caller}".encode())
        )
        scope = {
            "type": "http", "method": "GET", "raw_path": path.encode(), "query_string": query.encode(),
            "headers": [header], "client": ("127.0.0.1", 1),
        }  # fmt: skip
        await self.application(scope, cast(Any, None), send)
        return sent[0]["status"], json.loads(sent[1]["body"]).get("detail", "")

    @asynccontextmanager
    async def asking(self, what: str, caller: str, count: int, query: str = "") -> AsyncIterator[None]:
        """Has a caller ask `count` questions, which are all in progress when this begins."""
        wanted = self.books.asked[what] + count
        tasks = [asyncio.create_task(self.ask(caller, query)) for _ in range(count)]
        try:
            await until(lambda: self.books.asked[what] == wanted, 10, "queries being answered")
            yield
        finally:
            self.books.go_on.set()
            await asyncio.gather(*tasks)


#: A kind of callers, two of them, the words for the first, and its share of the queries in progress.
CALLERS: Final = [
    ("user", "ann", "bob", "ann", QUESTIONS_USER_MAX),
    ("key", "shop", "till", "The API key shop", QUESTIONS_CALLER_MAX),
    ("address", "192.0.2.1", "192.0.2.2", "The address 192.0.2.1", QUESTIONS_CALLER_MAX),
]


@pytest.mark.parametrize(("kind", "one", "other", "words", "most"), CALLERS, ids=[row[0] for row in CALLERS])
async def test_one_caller_gets_a_part_of_the_questions_in_work(
    kind: str, one: str, other: str, words: str, most: int
) -> None:
    door = Door(kind)
    assert most <= QUESTIONS_MAX // 2
    async with door.asking("rows", one, most):
        status, detail = await door.ask(one)
        assert (status, f"{words} has {most} queries being answered at this gateway" in detail) == (
            503,
            True,
        ), detail
        async with door.asking("rows", other, most):
            pass
    assert (await door.ask(one))[0] == 200


@pytest.mark.parametrize(("kind", "one", "other", "words", "most"), CALLERS[1:], ids=["key", "address"])
async def test_one_caller_gets_a_part_of_the_questions_that_wait_for_events(
    kind: str, one: str, other: str, words: str, most: int
) -> None:
    """Its other questions, and those of others, are answered meanwhile."""
    door, never = Door(kind), "after=0-99"
    most = min(most, AFTER_WAITERS_CALLER_MAX)
    assert most <= AFTER_WAITERS_MAX // 4
    async with door.asking("events", one, most, never):
        status, detail = await door.ask(one, never)
        assert (status, f"{words} has {most} queries that wait for events" in detail) == (503, True), detail
        async with door.asking("rows", one, 1), door.asking("events", other, most, never):
            pass


async def test_all_together_get_what_the_gateway_has() -> None:
    door = Door("address")
    async with (
        door.asking("rows", "192.0.2.1", QUESTIONS_CALLER_MAX),
        door.asking("rows", "192.0.2.2", QUESTIONS_MAX - QUESTIONS_CALLER_MAX),
    ):
        status, detail = await door.ask("192.0.2.3")
        assert (status, f"The gateway has {QUESTIONS_MAX} queries being answered" in detail) == (503, True), (
            detail
        )


async def test_who_waits_for_an_answer_that_is_being_made_takes_no_room_of_questions() -> None:
    """PostgreSQL is asked once for a crowd, however many of it one service sends. They have a bound of their
    own, so that it leaves room for others.
    """
    door = Door("key")
    async with door.asking("rows", "till", 1):
        crowd = [
            asyncio.create_task(door.ask("shop", path="/v1/offers")) for _ in range(JOINED_CALLER_MAX + 1)
        ]
        await until(lambda: door.cache.hits == JOINED_CALLER_MAX, 10, "all of the crowd that have room")
        assert door.books.asked["rows"] == 2
        status, detail = await door.ask("shop", path="/v1/offers")
        assert (status, f"{JOINED_CALLER_MAX} queries that wait for an answer being made" in detail) == (
            503,
            True,
        ), detail
        other = asyncio.create_task(door.ask("till", path="/v1/offers"))
        await until(lambda: door.cache.hits == JOINED_CALLER_MAX + 1, 10, "one of another service")
        async with door.asking("rows", "shop", QUESTIONS_CALLER_MAX - 1):
            assert door.application.in_work == QUESTIONS_CALLER_MAX + 1
    assert {status for status, _ in await asyncio.gather(*crowd, other)} == {200}
    assert door.application.in_work == 0


class _ManyOffers(SlowBooks):
    """More offers than are kept: PostgreSQL is asked for the page of each visitor."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = self.pages_most = 0
        self.pages_continue = asyncio.Event()

    async def rows(self, query: str, parameters: Any = ()) -> list[Any]:
        if "string_agg" in query:
            return [{"names": " ".join(f"o{number}" for number in range(SHUFFLED_OFFERS_MAX + 1))}]
        if "ANY(%s)" not in query:
            self.asked["rows"] += 1
            await self.go_on.wait()
            return [{"offer": f"o{number}"} for number in range(SHUFFLED_OFFERS_MAX + 1)]
        self.pages += 1
        self.pages_most = max(self.pages_most, self.pages)
        await self.pages_continue.wait()
        self.pages -= 1
        return []


async def test_visitors_who_have_waited_for_a_list_take_the_room_of_questions_again() -> None:
    door = Door("key")
    books = door.books = _ManyOffers()
    door.application._questions._books = books
    crowd = [
        asyncio.create_task(door.ask("shop", f"order=random&visitor=v{number}", "/v1/offers"))
        for number in range(JOINED_CALLER_MAX + 1)
    ]
    await until(lambda: door.cache.hits == JOINED_CALLER_MAX, 10, "the crowd waits")
    books.go_on.set()
    await until(
        lambda: books.pages + sum(task.done() for task in crowd) == len(crowd), 10, "all ask, or are refused"
    )
    assert books.pages == books.pages_most == door.application.in_work == QUESTIONS_CALLER_MAX
    books.pages_continue.set()
    statuses = Counter(status for status, _ in await asyncio.gather(*crowd))
    assert statuses == {200: QUESTIONS_CALLER_MAX, 503: len(crowd) - QUESTIONS_CALLER_MAX}
    assert door.application.in_work == 0
