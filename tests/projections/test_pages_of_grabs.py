"""Pages of who got what, and of the luckiest, are read from an index in its order, wherever they begin: no
plan sorts the grabs of an offer, and none reads those that wait.
"""

import json
import re
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any, Final

import pytest
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import dict_row
from psycopg.sql import Literal

from grabstream.gateway import offer_film
from grabstream.gateway.bounds import SHUFFLED_OFFERS_MAX
from grabstream.gateway.caching import Cache
from grabstream.gateway.positions import WAITING_PLACES
from grabstream.gateway.questions import QueryHandlers
from grabstream.gateway.requests import Request
from grabstream.gateway.view_reader import PLANNING, Row
from grabstream.ops.commands.read.show import read_offer
from grabstream.projections.versions import create_flat
from grabstream.settings import Settings
from tests.projections.test_plans import steps_of

#: Grabs of each offer; of pieces, as many wait.
GRABS: Final = 2_000
#: An envelope, pieces of which a user takes one, and pieces of which a user takes one to three: kind, asset,
#: and amount of the grab number n.
OFFERS: Final = {
    "envelope": ("envelope", "CNY", "1 + n * 7919 % 400"),
    "coupons": ("coupon", "coupon:coupons", "1"),
    "stock": ("stock", "sku:pen", "1 + n % 3"),
}
_ROWS: Final = """
INSERT INTO offers_1 (offer, shard, kind, issuer, asset, total, units, title, state, opened_at, opens_at,
        closes_at, units_left, terms, opened_seq, grabs)
    VALUES ('{offer}', 0, '{kind}', 'i', '{asset}', 100, 100, '', 'open', 1, 1, 2, 0, '{{}}', 1, {grabs});
INSERT INTO grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at)
    SELECT '{offer}', 'grab-' || md5(n::text), 'user-' || n, 'granted', 1, {amount}, '{asset}', n, 0, n, n
    FROM generate_series(1, {grabs}) AS n;
INSERT INTO grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at, back)
    SELECT '{offer}', 'wait-' || md5(n::text), 'user-' || n, 'waiting', 3, 3, '{asset}', n, 0, n, n, 3
    FROM generate_series(1, CASE '{kind}' WHEN 'envelope' THEN 0 ELSE {grabs} END) AS n;
"""
#: Other offers, with few grabs each.
_SMALL: Final = """
INSERT INTO grabs_1 (offer, grab, user_id, state, quantity, amount, asset, place, shard, seq, at)
    SELECT 'other-' || n / 5, 'grab-' || n, 'user-' || n, 'granted', 1, n % 3, 'CNY', n % 5, 0, n, n
    FROM generate_series(1, 2000) AS n;
"""
_POSITION: Final = 'waiting."position"'
_names = (f"asked_{number}" for number in count())


#: Offers that are newer than the others: too many to keep them all for a random order.
MANY: Final = SHUFFLED_OFFERS_MAX + 100
_MANY: Final = f"""
INSERT INTO offers_1 (offer, shard, kind, issuer, asset, total, units, title, state, opened_at, opens_at,
        closes_at, units_left, terms, opened_seq)
    SELECT 'offer-' || lpad(n::text, 4, '0'), 0, 'coupon', 'i', 'coupon:x', 1, 1, '', 'open', 1 + n, 1, 2, 0,
           '{{}}', 1
    FROM generate_series(1, {MANY}) AS n;
"""


class Explained:
    """Stands for a connection, and for books, that keep the plans of each query: that for its values, and
    that for any values, which a session makes of a query that it has answered a few times.
    """

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        self._connection = connection
        self.plans: list[Any] = []

    async def execute(self, query: str, parameters: Sequence[Any] = ()) -> AsyncCursor[Row]:
        name, numbers = next(_names), count(1)
        prepared = re.sub("%s", lambda _: f"${next(numbers)}", query)
        values = ", ".join(Literal(one).as_string(self._connection) for one in parameters)
        cursor = self._connection.cursor(row_factory=dict_row)
        await cursor.execute(f"PREPARE {name} AS {prepared}".encode())
        await cursor.execute(f"EXPLAIN (FORMAT JSON) EXECUTE {name} ({values})".encode())
        plans = await cursor.fetchall()
        await cursor.execute(b"EXPLAIN (FORMAT JSON) " + query.encode(), parameters)
        plans += await cursor.fetchall()
        self.plans += [plan for row in plans for plan in row["QUERY PLAN"]]
        await cursor.execute(query.encode(), parameters)
        return cursor

    async def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[Row]:
        cursor = await self.execute(query, parameters)
        return [{k: v for k, v in row.items() if v is not None} for row in await cursor.fetchall()]

    def indexes(self) -> set[str]:
        """The indexes from which the plans read grabs. Raises AssertionError for one that sorts them, or
        reads them in another way.
        """
        used = set()
        for plan in self.plans:
            steps = list(steps_of(plan["Plan"]))
            of_grabs = [step for step in steps if step.get("Relation Name") == "grabs_1"]
            for step in of_grabs:
                assert step["Node Type"] in ("Index Scan", "Index Only Scan"), json.dumps(plan, indent=1)
                used.add(step["Index Name"])
            # The positions of a waiting list are numbers of its rows, which are known when all are read.
            keys = {key for step in steps for key in step.get("Sort Key", ())} - {_POSITION}
            assert not of_grabs or not keys, json.dumps(plan, indent=1)
        return used


@pytest.fixture(params=["statistics of now", "statistics of other offers"])
async def books(settings: Settings, request: pytest.FixtureRequest) -> AsyncIterator[Explained]:
    async with await AsyncConnection.connect(settings.postgres) as connection:
        # Nothing is committed: the tables, and their indexes, go with the transaction.
        await create_flat(connection, settings.schema_, 1)
        if request.param == "statistics of other offers":
            await connection.execute(_SMALL)
            await connection.execute("ANALYZE grabs_1, offers_1")
        for offer, (kind, asset, amount) in OFFERS.items():
            rows = _ROWS.format(offer=offer, kind=kind, asset=asset, amount=amount, grabs=GRABS)
            await connection.execute(rows.encode())
        await connection.execute(_MANY.encode())
        if request.param == "statistics of now":
            await connection.execute("ANALYZE grabs_1, offers_1")
        await connection.execute(PLANNING)
        await connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        yield Explained(connection)
        await connection.rollback()


async def page_of(books: Explained, offer: str, query: str) -> Any:
    scope = {"query_string": query.encode(), "raw_path": offer.encode(), "headers": []}
    questions = QueryHandlers(books, Cache())  # type: ignore[arg-type]
    return json.loads((await questions.offer_grabs(Request(scope, Any, {"offer": offer}), b"")).body)


async def all_places(books: Explained, offer: str, query: str) -> list[tuple[int, int]]:
    """The amounts and places of all pages."""
    found, cursor = [], ""
    while True:
        page = await page_of(books, offer, query + cursor)
        found += [(row["amount"], row["place"]) for row in page["grabs"]]
        if "next" not in page:
            return found
        cursor = f"&cursor={page['next']}"


@pytest.mark.parametrize("offer", OFFERS)
async def test_pages_are_read_from_indexes_without_a_sort(books: Explained, offer: str) -> None:
    by_place = await all_places(books, offer, "limit=100")
    assert [place for _, place in by_place] == list(range(1, GRABS + 1))
    assert books.indexes() == {"grabs_1_place"}
    lucky = await all_places(books, offer, "order=luckiest&limit=100")
    assert lucky == sorted(by_place, key=lambda one: (-one[0], one[1]))
    assert books.indexes() == {"grabs_1_place", "grabs_1_luckiest"}


async def test_pages_of_offers_are_read_from_an_index_without_a_sort(books: Explained) -> None:
    """Also those in a random order, of which only names are kept."""
    questions = QueryHandlers(books, Cache())  # type: ignore[arg-type]
    found: dict[str, list[str]] = {}
    for order in ("order=newest", "order=random&visitor=ann"):
        cursor, names = "", found.setdefault(order, [])
        while len(names) < MANY + len(OFFERS):
            scope = {"query_string": f"{order}&limit=100{cursor}".encode(), "raw_path": b"", "headers": []}
            page = json.loads((await questions.offers(Request(scope, Any, {}), b"")).body)
            names += [row["offer"] for row in page["offers"]]
            cursor = f"&cursor={page.get('next')}"
        assert "next" not in page
    newest = found["order=newest"]
    assert newest[:MANY] == [f"offer-{number:04}" for number in range(MANY, 0, -1)]
    assert sorted(found["order=random&visitor=ann"]) == sorted(newest)
    steps = [step for plan in books.plans for step in steps_of(plan["Plan"])]
    assert not [step for step in steps if "Sort" in step["Node Type"]]
    of_offers = [step for step in steps if step.get("Relation Name") == "offers_1"]
    used = {step.get("Index Name", step["Node Type"]) for step in of_offers}
    # Whether there are too many is checked in any order.
    assert used == {"offers_1_newest", "offers_1_pkey", "Seq Scan"}


async def test_a_film_and_what_is_shown_are_read_from_indexes_without_a_sort(books: Explained) -> None:
    rows = await books.rows(offer_film.PARTS, ["envelope", 20])
    assert [row["place"] for row in rows] == list(range(1, 21))
    found = await read_offer(books, "envelope", 20)  # type: ignore[arg-type]
    assert found is not None
    assert [row["place"] for row in found["grabs"]] == list(range(GRABS, GRABS - 20, -1))
    lucky = await all_places(books, "envelope", "order=luckiest&limit=100")
    assert (found["luckiest"]["amount"], found["luckiest"]["place"]) == lucky[0]
    assert books.indexes() == {"grabs_1_place", "grabs_1_luckiest", "grabs_1_waiting"}


async def test_a_waiting_list_is_read_without_the_other_grabs(books: Explained) -> None:
    rows = await books.rows(WAITING_PLACES, ["stock", 100])
    assert [row["place"] for row in rows] == list(range(1, 101))
    waiting = await books.rows(
        "SELECT position FROM waiting WHERE offer = %s ORDER BY position LIMIT %s", ["stock", 5]
    )
    assert [row["position"] for row in waiting] == [1, 2, 3, 4, 5]
    assert books.indexes() == {"grabs_1_waiting"}
