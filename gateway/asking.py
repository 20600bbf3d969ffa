"""Questions over HTTP: offers, who got what, and what users have, from the views in PostgreSQL.

Pages are cut by the values of the last row, not by a number of rows, so a page stays right while rows are
added. The read models lag a moment after answers; `after` waits for them. What a crowd asks for is kept for
2 s (`caching.py`); what one user asks about is not.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from grabstream.gateway.books import Books, Row
from grabstream.gateway.bounds import (
    AFTER_SECONDS_MAX,
    AFTER_WAITERS_MAX,
    CURSOR_LENGTH_MAX,
    PAGE_ROWS,
    PAGE_ROWS_MAX,
)
from grabstream.gateway.caching import Cache, tag_of
from grabstream.gateway.operations import KINDS, OFFER_ORDERS, OFFER_STATES, OPERATIONS, TAKEN_ORDERS
from grabstream.gateway.payment_tokens import PaymentTokens
from grabstream.gateway.problems import JSON, SECURE_HEADERS, Header, Problem, Reply, invalid, retry_soon
from grabstream.gateway.requests import Request, chosen, query_of
from grabstream.models.bounds import quoted
from grabstream.models.identifiers import ID_PATTERN, is_id
from grabstream.models.offers import TIME_MS_MAX

_position = re.compile(r"([0-9]{1,4})-([0-9]{1,16})\Z").match
_is_limit = re.compile(r"[0-9]{1,4}").fullmatch
_encode = msgspec.json.Encoder().encode
#: How long clients and proxies may keep what a crowd asks for, and show it while they ask again.
_FOR_ALL: Final = (b"cache-control", b"max-age=2, stale-while-revalidate=8")
_FOR_ONE: Final = (b"cache-control", b"private, no-store")
_BALANCES: Final = ("balances",)
_FLOW: Final = ("balances", "ledger")

_OFFERS: Final = (
    "SELECT offer, kind, issuer, title, asset, state, total, units, units_left, amount_left, grabs, given, "
    "held, waiting, refunded, opened_at, opens_at, nullif(closes_at, %s) AS closes_at, closed_at, "
    "retired_at, reason"
)
#: The first parameter of these queries: the time at which offers close that do not close by themselves.
_NEVER: Final = TIME_MS_MAX
_ONE_OFFER: Final = _OFFERS + ", shard, terms, seed_sha256, seed FROM offers WHERE offer = %s"
_NEWEST: Final = _OFFERS + " FROM offers WHERE true"
#: The place of an offer in the list of one visitor: random, and always the same.
_SPOT: Final = "md5(offer || '/' || %s)"
_RANDOM: Final = _OFFERS + ", " + _SPOT + " AS spot FROM offers WHERE true"
_FILTERS: Final = {"state": " AND state = %s", "kind": " AND kind = %s", "issuer": " AND issuer = %s"}
_TAKEN: Final = (
    'SELECT place, user_id AS "user", grab, state, quantity, amount, asset, held, taken, redeemed, at '
    "FROM grabs WHERE offer = %s AND state <> 'waiting'"
)
_OF_ASSETS: Final = "SELECT asset, available, held FROM balances WHERE user_id = %s"
_OF_USER: Final = (
    "SELECT offer, grab, state, quantity, amount, asset, place, held, taken, redeemed, back, due, currency, "
    "paid, refunded, deadline_at, basket, metadata, shard, seq, at FROM grabs WHERE user_id = %s"
)
#: A transfer between two accounts of the user is both out and in.
_TRANSFERS: Final = """
    WITH mine AS (SELECT * FROM user_transfers(%s))
    SELECT shard, seq, leg, offer, asset, amount, direction, account, other, at FROM (
        SELECT shard, seq, leg, offer, asset, amount, 'in' AS direction,
               split_part(credit, ':', 1) AS account, debit AS other, at
        FROM mine WHERE credit = ANY(%s)
        UNION ALL
        SELECT shard, seq, leg, offer, asset, amount, 'out', split_part(debit, ':', 1), credit, at
        FROM mine WHERE debit = ANY(%s)
    ) AS found
"""


class Questions:
    """The handlers of questions. `tokens` adds payment tokens to the holds of a user."""

    def __init__(self, books: Books, cache: Cache, tokens: PaymentTokens | None = None) -> None:
        self._books = books
        self._tokens = tokens or PaymentTokens()
        self._cache = cache
        #: Questions that wait until the read model has an event.
        self._waiting = 0

    async def offers(self, request: Request, body: bytes) -> Reply:
        """GET /v1/offers"""
        asked = await self._asked(request, "offers", _BALANCES)
        return await self._cached(request, "offers", asked, lambda: self._offers(asked))

    async def offer(self, request: Request, body: bytes) -> Reply:
        """GET /v1/offers/{offer}"""
        asked = await self._asked(request, "offer", _BALANCES)
        return await self._cached(request, "offer", asked, lambda: self._offer(request.path["offer"]))

    async def offer_grabs(self, request: Request, body: bytes) -> Reply:
        """GET /v1/offers/{offer}/grabs"""
        asked = await self._asked(request, "offer_grabs", _BALANCES)
        return await self._cached(
            request, "offer_grabs", asked, lambda: self._offer_grabs(request.path["offer"], asked)
        )

    async def _cached(
        self, request: Request, name: str, asked: Mapping[str, str], make: Callable[[], Awaitable[bytes]]
    ) -> Reply:
        """The answer to a question that a crowd asks. A question with `after` is answered anew."""
        arguments = {**request.path, **{word: value for word, value in asked.items() if word != "after"}}
        kept = await self._cache.document(name, arguments, make, fresh="after" in asked)
        return _reply(request, kept.body, kept.tag, _FOR_ALL)

    async def _offers(self, asked: Mapping[str, str]) -> bytes:
        order = chosen(asked, "order", OFFER_ORDERS, "newest")
        filters, values = "", []
        for name, choices in (("state", OFFER_STATES), ("kind", KINDS), ("issuer", ())):
            if name in asked:
                filters += _FILTERS[name]
                values.append(chosen(asked, name, choices, "") if choices else _id(asked, name))
        if order == "random":
            return await self._in_random_order(asked, filters, values)
        if "visitor" in asked:
            raise invalid("visitor: belongs to order=random")
        page = Page(asked, (int, str))
        query = (
            _NEWEST
            + filters
            + (" AND (opened_at, offer) < (%s, %s)" if page.last else "")
            + " ORDER BY opened_at DESC, offer DESC LIMIT %s"
        )
        rows = await self._books.rows(query, [_NEVER, *values, *page.last, page.rows + 1])
        return page.document("offers", rows, ("opened_at", "offer"))

    async def _in_random_order(self, asked: Mapping[str, str], filters: str, values: Sequence[str]) -> bytes:
        if "visitor" not in asked:
            raise invalid("visitor: is required with order=random; the order is that of the visitor")
        visitor = _id(asked, "visitor")
        page = Page(asked, (str, str))
        query = (
            _RANDOM
            + filters
            + (" AND (" + _SPOT + ", offer) > (%s, %s)" if page.last else "")
            + " ORDER BY spot, offer LIMIT %s"
        )
        last = [visitor, *page.last] if page.last else []
        rows = await self._books.rows(query, [_NEVER, visitor, *values, *last, page.rows + 1])
        return page.document("offers", rows, ("spot", "offer"), ("spot",))

    async def _offer(self, offer: str) -> bytes:
        rows = await self._books.rows(_ONE_OFFER, [_NEVER, offer])
        if not rows:
            raise _no_such_offer(offer)
        return _encode(rows[0])

    async def _offer_grabs(self, offer: str, asked: Mapping[str, str]) -> bytes:
        if not await self._books.rows("SELECT 1 FROM offers WHERE offer = %s", [offer]):
            raise _no_such_offer(offer)
        if chosen(asked, "order", TAKEN_ORDERS, "place") == "place":
            page = Page(asked, (int, str))
            query = (
                _TAKEN
                + (" AND (place, user_id) > (%s, %s)" if page.last else "")
                + " ORDER BY place, user_id LIMIT %s"
            )
            rows = await self._books.rows(query, [offer, *page.last, page.rows + 1])
            return page.document("grabs", rows, ("place", "user"))
        page = Page(asked, (int, int, str))
        last = [-page.last[0], *page.last[1:]] if page.last else []
        query = (
            _TAKEN
            + (" AND (-amount, place, user_id) > (%s, %s, %s)" if page.last else "")
            + " ORDER BY -amount, place, user_id LIMIT %s"
        )
        rows = await self._books.rows(query, [offer, *last, page.rows + 1])
        return page.document("grabs", rows, ("amount", "place", "user"))

    async def user_balances(self, request: Request, body: bytes) -> Reply:
        """GET /v1/users/{user}/balances"""
        asked = await self._asked(request, "user_balances", _BALANCES)
        page = Page(asked, (str,))
        query = _OF_ASSETS + (" AND asset > %s" if page.last else "") + " ORDER BY asset LIMIT %s"
        rows = await self._books.rows(query, [request.path["user"], *page.last, page.rows + 1])
        return _new(request, page.document("balances", rows, ("asset",)))

    async def user_grabs(self, request: Request, body: bytes) -> Reply:
        """GET /v1/users/{user}/grabs"""
        asked = await self._asked(request, "user_grabs", _BALANCES)
        page = Page(asked, (int, int, int))
        query = (
            _OF_USER
            + (" AND (at, shard, seq) < (%s, %s, %s)" if page.last else "")
            + " ORDER BY at DESC, shard DESC, seq DESC LIMIT %s"
        )
        rows = await self._books.rows(query, [request.path["user"], *page.last, page.rows + 1])
        for row in rows:
            self._tokens.add_to(row, request.path["user"])
        return _new(request, page.document("grabs", rows, ("at", "shard", "seq")))

    async def user_transfers(self, request: Request, body: bytes) -> Reply:
        """GET /v1/users/{user}/transfers"""
        asked = await self._asked(request, "user_transfers", _FLOW)
        page = Page(asked, (int, int, int, int, str))
        user = request.path["user"]
        accounts = [f"wallet:{user}", f"hold:{user}"]
        query = (
            _TRANSFERS
            + (" WHERE (at, shard, seq, leg, direction) < (%s, %s, %s, %s, %s)" if page.last else "")
            + " ORDER BY at DESC, shard DESC, seq DESC, leg DESC, direction DESC LIMIT %s"
        )
        given = [user, accounts, accounts, *page.last, page.rows + 1]
        rows = await self._books.rows(query, given)
        return _new(request, page.document("transfers", rows, ("at", "shard", "seq", "leg", "direction")))

    async def _asked(self, request: Request, name: str, projections: Sequence[str]) -> dict[str, str]:
        """The parameters of a question, after waiting as long as `after` wants."""
        asked = query_of(request, _PARAMETERS[name])
        if "after" not in asked:
            return asked
        position = _position(asked["after"])
        if position is None:
            raise invalid(f"after: must be <shard>-<seq>, such as 3-17, got {quoted(asked['after'])}")
        shard, seq = map(int, position.groups())
        if self._waiting >= AFTER_WAITERS_MAX:
            raise retry_soon(
                "busy",
                f"{AFTER_WAITERS_MAX} questions wait for events (`after`), as many as the gateway takes.",
            )
        self._waiting += 1
        try:
            is_there = await self._books.has(projections, shard, seq, AFTER_SECONDS_MAX)
        except KeyError:
            raise invalid(f"after: there is no shard {shard}") from None
        finally:
            self._waiting -= 1
        if not is_there:
            raise retry_soon(
                "read_model_behind",
                f"The read model does not have event {seq} of shard {shard} after {AFTER_SECONDS_MAX:.0f} s. "
                "Ask again.",
                "after",
            )
        return asked


_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    operation.name: tuple(parameter.name for parameter in operation.parameters) for operation in OPERATIONS
}


class Page:
    """The part of a list that a request wants: `rows` rows after the one that has the values `last`. `kinds`
    are the types of these values.
    """

    def __init__(self, asked: Mapping[str, str], kinds: tuple[type, ...]) -> None:
        text = asked.get("limit", str(PAGE_ROWS))
        if not (_is_limit(text) and 1 <= int(text) <= PAGE_ROWS_MAX):
            raise invalid(f"limit: must be 1 to {PAGE_ROWS_MAX}, got {quoted(text)}")
        self.rows = int(text)
        self.last = _read_cursor(asked["cursor"], kinds) if "cursor" in asked else []

    def document(self, name: str, rows: list[Row], keys: Sequence[str], hidden: Sequence[str] = ()) -> bytes:
        """The page. `rows` has one more row if there is a next page."""
        document: dict[str, Any] = {name: rows[: self.rows]}
        if len(rows) > self.rows:
            document["next"] = _cursor([rows[self.rows - 1][key] for key in keys])
        for row in rows:
            for column in hidden:
                del row[column]
        return _encode(document)


def _cursor(values: Sequence[Any]) -> str:
    return urlsafe_b64encode(_encode(values)).decode().rstrip("=")


def _read_cursor(text: str, kinds: tuple[type, ...]) -> list[Any]:
    problem = invalid("cursor: is not the `next` of a page of this list")
    if len(text) > CURSOR_LENGTH_MAX or not text.isascii():
        raise problem
    try:
        values = msgspec.json.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, msgspec.DecodeError, RecursionError):
        raise problem from None
    if not isinstance(values, list) or [type(value) for value in values] != list(kinds):
        raise problem
    if any(type(value) is int and abs(value) >= 2**63 for value in values) or "\x00" in "".join(
        value for value in values if isinstance(value, str)
    ):
        raise problem
    return values


def _new(request: Request, body: bytes) -> Reply:
    """A document about one user, which browsers and proxies must not store. A program that has it in memory
    may ask by its tag.
    """
    return _reply(request, body, tag_of(body), _FOR_ONE)


def _reply(request: Request, body: bytes, tag: bytes, keep: Header) -> Reply:
    """A document with its tag; nothing but the tag if the client has the document already."""
    headers = ((b"content-type", JSON), keep, (b"etag", tag), *SECURE_HEADERS)
    known = request.header(b"if-none-match") or b""
    if known.strip() == b"*" or tag in (one.strip().removeprefix(b"W/") for one in known.split(b",")):
        return Reply(304, b"", headers[1:])
    return Reply(200, body, headers)


def _id(asked: Mapping[str, str], name: str) -> str:
    if not is_id(asked[name]):
        raise invalid(f"{name}: must match {ID_PATTERN.strip('^$')}, got {quoted(asked[name])}")
    return asked[name]


def _no_such_offer(offer: str) -> Problem:
    return Problem(
        "no_such_offer",
        f"The read model has no offer {offer}. A new offer appears there within moments; the parameter "
        "`after` waits for it.",
    )
