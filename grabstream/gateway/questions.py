"""Questions over HTTP: offers, their grabs, and holdings of users, from the views in PostgreSQL.

Pages are cut by the values of the last row, not by a number of rows, so a page stays right while rows are
added. The read models lag a moment after answers; `after` waits for them. Answers to a crowd are kept for 2 s
(`caching.py`); answers about one user are not.
"""

import logging
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.types import Scope

from grabstream.gate.personal import KeysUnavailable, UserKey, is_sealed, open_metadata
from grabstream.gateway.bounds import (
    AFTER_SECONDS_MAX,
    AFTER_WAITERS_CALLER_MAX,
    AFTER_WAITERS_MAX,
    CURSOR_LENGTH_MAX,
    PAGE_ROWS,
    PAGE_ROWS_MAX,
    PARSED_BYTES_MAX,
    PARSED_MAX,
    SHUFFLED_LISTS_MAX,
    SHUFFLED_NAMES_MAX,
    SHUFFLED_OFFERS_MAX,
    WAITING_POSITIONS_MAX,
)
from grabstream.gateway.caching import Cache, KeptDocument, digest_of, tag_of
from grabstream.gateway.last_decided import LastSeqs
from grabstream.gateway.operations import KINDS, OFFER_ORDERS, OFFER_STATES, OPERATIONS, TAKEN_ORDERS
from grabstream.gateway.payment_tokens import PaymentTokens
from grabstream.gateway.positions import WAITING_PLACES, position_in
from grabstream.gateway.problems import JSON, SECURE_HEADERS, Header, Problem, Reply, invalid, retry_soon
from grabstream.gateway.requests import Request, chosen, fields_of, query_of
from grabstream.gateway.shuffling import Shuffled
from grabstream.gateway.slots import Slots
from grabstream.gateway.tokens import add_bounded
from grabstream.gateway.view_reader import Row, ViewReader
from grabstream.models.bounds import quoted
from grabstream.models.identifiers import ID_PATTERN, is_id
from grabstream.models.money import AMOUNT_MAX
from grabstream.models.offers import TIME_MS_MAX
from grabstream.models.vocabulary.documents import (
    Balance,
    Document,
    OfferDetail,
    OfferSummary,
    Taken,
    UserGrab,
)

log = logging.getLogger(__name__)

_position = re.compile(r"([0-9]{1,4})-([0-9]{1,16})\Z").match
_is_limit = re.compile(r"[0-9]{1,4}").fullmatch
_encode = msgspec.json.Encoder().encode
#: How long clients and proxies may keep what a crowd asks for, and show it while they ask again.
FOR_ALL: Final = (b"cache-control", b"max-age=2, stale-while-revalidate=8")
_FOR_ONE: Final = (b"cache-control", b"private, no-store")
#: Headers of a request with a body, or whose answer depends on more than its target.
_NOT_PLAIN: Final = frozenset({b"if-none-match", b"content-length", b"transfer-encoding", b"expect"})
_BALANCES: Final = ("balances",)
_FLOW: Final = ("balances", "ledger")


def _select(document: type[Document], *but: str, **instead: str) -> str:
    """Begins a query for the fields of a document: all `but` these, some by an expression `instead`."""
    return "SELECT " + ", ".join(instead.get(name, name) for name in document.model_fields if name not in but)


_CLOSES_AT: Final = "nullif(closes_at, %s) AS closes_at"
_OFFERS: Final = _select(OfferSummary, closes_at=_CLOSES_AT)
#: The first parameter of these queries: the closing time of offers that have none.
_NEVER: Final = TIME_MS_MAX
_ONE_OFFER: Final = _select(OfferDetail, closes_at=_CLOSES_AT) + " FROM offers WHERE offer = %s"
_NEWEST: Final = _OFFERS + " FROM offers WHERE true"
#: The names of the newest offers that match, in one text.
_NAMES: Final = "SELECT string_agg(offer, ' ') AS names FROM (SELECT offer FROM offers WHERE true"
_OFFERS_BY_NAME: Final = _OFFERS + " FROM offers WHERE offer = ANY(%s)"
_NEWEST_FIRST: Final = " ORDER BY opened_at DESC, offer DESC LIMIT %s"
_FILTERS: Final = {"state": " AND state = %s", "kind": " AND kind = %s", "issuer": " AND issuer = %s"}
_TAKEN: Final = _select(Taken, user='user_id AS "user"') + " FROM grabs WHERE offer = %s AND NOT is_waiting"
_BY_PLACE: Final = " AND place > %s ORDER BY place LIMIT %s"
#: Grabs of envelopes, and of more than one piece, are in an index by amount; grabs of one piece are not.
_IS_MONEY: Final = " AND strpos(asset, ':') = 0"
_IS_MORE: Final = " AND amount > 1"
_IS_ONE: Final = " AND amount <= 1"
_BY_AMOUNT: Final = " AND (-amount, place) > (%s, %s) ORDER BY -amount, place LIMIT %s"
_USER_BALANCES: Final = _select(Balance) + " FROM balances WHERE user_id = %s"
_USER_GRABS: Final = _select(UserGrab, "position", "payment_token") + " FROM grabs WHERE user_id = %s"
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


#: The present key of a user, or None.
KeyOf = Callable[[str], Awaitable[UserKey | None]]


class _OfferName(msgspec.Struct):
    offer: str


_decode_listed = msgspec.json.Decoder(list[_OfferName] | str).decode
_decode_places = msgspec.json.Decoder(list[int]).decode
_decode_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _Listed:
    """The offers of a list, in the orders of visitors, and each as JSON; None: there are too many to keep."""

    def __init__(self, body: bytes) -> None:
        listed = _decode_listed(body)
        self.offers: Mapping[str, msgspec.Raw] | None = None
        if isinstance(listed, str):
            self.order = Shuffled(listed.split())
            return
        names = [named.offer for named in listed]
        self.order = Shuffled(names)
        self.offers = dict(zip(names, _decode_raws(body), strict=True))


class QueryHandlers:
    """The handlers of questions. `tokens` adds payment tokens to the holds of a user. `key_of` has the key
    under which events have sealed the metadata of a user, or None; without it, they are shown sealed.
    `reached` gives the positions of shards; without it, questions wait for any event.
    """

    def __init__(
        self,
        books: ViewReader,
        cache: Cache,
        tokens: PaymentTokens | None = None,
        key_of: KeyOf | None = None,
        reached: LastSeqs | None = None,
    ) -> None:
        self._key_of = key_of
        self._reached = reached
        self._books = books
        self._tokens = tokens or PaymentTokens()
        self._cache = cache
        self._waiting = Slots(AFTER_WAITERS_MAX, "queries that wait for events (`after`)")
        #: Offers for a random order, by the tag of the document that has them.
        self._listed: dict[bytes, _Listed] = {}
        #: Waiting lists, by the tag of the document that has them.
        self._places: dict[bytes, list[int]] = {}
        #: Targets of requests that were answered a moment ago: the operation, and the digest of the question.
        self._known: dict[tuple[bytes, bytes], tuple[str, bytes]] = {}

    async def offers(self, request: Request, body: bytes) -> Reply:
        """GET /v1/offers"""
        asked = await self._asked(request, "offers", _BALANCES)
        if asked.get("order") == "random":
            return await self._in_random_order(request, asked)
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
        """The answer to a question that a crowd asks."""
        arguments = {**request.path, **_but_after(asked)}
        kept = await self._cache.document(name, arguments, make, request.read_since, request.room)
        return self._reply(request, name, asked, arguments, kept)

    def _reply(
        self,
        request: Request,
        name: str,
        asked: Mapping[str, str],
        arguments: Mapping[str, str],
        kept: KeptDocument,
    ) -> Reply:
        target = request.scope["raw_path"], request.scope["query_string"]
        if "after" not in asked and len(target[0]) + len(target[1]) <= PARSED_BYTES_MAX:
            add_bounded(self._known, target, (name, digest_of(name, arguments)), PARSED_MAX)
        return tagged_reply(request, kept.body, kept.tag, FOR_ALL)

    def kept(self, scope: Scope) -> tuple[str, Reply] | None:
        """The operation and the answer of a GET without a body, if the answer is kept from a moment ago; None
        for anything else, and for a client that may have the document.
        """
        known = self._known.get((scope["raw_path"], scope["query_string"]))
        if known is None or not _NOT_PLAIN.isdisjoint(fields_of(scope)):
            return None
        kept = self._cache.kept(known[1])
        return None if kept is None else (known[0], _document(kept.body, kept.tag, FOR_ALL))

    async def _offers(self, asked: Mapping[str, str]) -> bytes:
        chosen(asked, "order", OFFER_ORDERS, "newest")
        filters, values = _filters_of(asked)
        if "visitor" in asked:
            raise invalid("visitor: is only for order=random")
        page = Page(asked, (int, str))
        query = (
            _NEWEST + filters + (" AND (opened_at, offer) < (%s, %s)" if page.last else "") + _NEWEST_FIRST
        )
        rows = await self._books.rows(query, [_NEVER, *values, *page.last, page.rows + 1])
        return page.document("offers", rows, ("opened_at", "offer"))

    async def _in_random_order(self, request: Request, asked: Mapping[str, str]) -> Reply:
        """A page of offers in the order of one visitor. All visitors share what is read: PostgreSQL is asked
        for a list once, not once for each of them, and for the offers of a page if there are too many to keep
        them all.
        """
        filters, values = _filters_of(asked)
        if "visitor" not in asked:
            raise invalid("visitor: is required with order=random; each visitor has an order")
        visitor = _id(asked, "visitor")
        page = Page(asked, (str,))
        after = page.last[0] if page.last else None
        if after is not None and not is_id(after):
            raise _no_cursor()
        shared = {name: asked[name] for name in _FILTERS if name in asked}
        source = await self._cache.document(
            "shuffled_offers", shared, lambda: self._to_shuffle(filters, values), request.read_since,
            request.room,
        )  # fmt: skip
        listed = self._listed_in(source)
        offers = listed.offers

        def names() -> list[str]:
            return listed.order.page(visitor, after, page.rows + 1)

        if offers is None:
            return await self._cached(
                request, "offers", asked, lambda: self._named(page, names(), filters, values)
            )
        arguments = _but_after(asked)
        kept = self._cache.derived("offers", arguments, source, lambda: page.offers_named(names(), offers))
        return self._reply(request, "offers", asked, arguments, kept)

    async def _to_shuffle(self, filters: str, values: Sequence[str]) -> bytes:
        """All offers that match, in any order; of too many, the names of the newest ones, in one text."""
        query = _NEWEST + filters + " LIMIT %s"
        rows = await self._books.rows(query, [_NEVER, *values, SHUFFLED_OFFERS_MAX + 1])
        if len(rows) <= SHUFFLED_OFFERS_MAX:
            return _encode(rows)
        query = _NAMES + filters + _NEWEST_FIRST + ") AS newest"
        [row] = await self._books.rows(query, [*values, SHUFFLED_NAMES_MAX])
        return _encode(row.get("names", ""))

    def _listed_in(self, source: KeptDocument) -> _Listed:
        """The offers of a document of `_to_shuffle`."""
        if source.tag not in self._listed:
            add_bounded(self._listed, source.tag, _Listed(source.body), SHUFFLED_LISTS_MAX)
        return self._listed[source.tag]

    async def _named(self, page: "Page", names: Sequence[str], filters: str, values: Sequence[str]) -> bytes:
        """A page of offers by their names. One that has come to match no more is left out."""
        rows = await self._books.rows(_OFFERS_BY_NAME + filters, [_NEVER, list(names), *values])
        return page.offers_named(names, {row["offer"]: row for row in rows})

    async def _offer(self, offer: str) -> bytes:
        rows = await self._books.rows(_ONE_OFFER, [_NEVER, offer])
        if not rows:
            raise no_such_offer(offer)
        return _encode(rows[0])

    async def _offer_grabs(self, offer: str, asked: Mapping[str, str]) -> bytes:
        found = await self._books.rows("SELECT kind FROM offers WHERE offer = %s", [offer])
        if not found:
            raise no_such_offer(offer)
        if chosen(asked, "order", TAKEN_ORDERS, "place") == "place":
            page = Page(asked, (int,))
            rows = await self._books.rows(_TAKEN + _BY_PLACE, [offer, *(page.last or [0]), page.rows + 1])
            return page.document("grabs", rows, ("place",))
        page = Page(asked, (int, int))
        amount, place = page.last or [AMOUNT_MAX, 0]
        is_money = found[0]["kind"] == "envelope"
        rows = []
        if is_money or amount > 1:
            query = _TAKEN + (_IS_MONEY if is_money else _IS_MORE) + _BY_AMOUNT
            rows = await self._books.rows(query, [offer, -amount, place, page.rows + 1])
        if not is_money and len(rows) <= page.rows:
            after = place if amount <= 1 else 0
            rows += await self._books.rows(
                _TAKEN + _IS_ONE + _BY_PLACE, [offer, after, page.rows + 1 - len(rows)]
            )
        return page.document("grabs", rows, ("amount", "place"))

    async def user_balances(self, request: Request, body: bytes) -> Reply:
        """GET /v1/users/{user}/balances"""
        asked = await self._asked(request, "user_balances", _BALANCES)
        page = Page(asked, (str,))
        query = _USER_BALANCES + (" AND asset > %s" if page.last else "") + " ORDER BY asset LIMIT %s"
        rows = await self._books.rows(query, [request.path["user"], *page.last, page.rows + 1])
        return reply_about_one(request, page.document("balances", rows, ("asset",)))

    async def user_grabs(self, request: Request, body: bytes) -> Reply:
        """GET /v1/users/{user}/grabs"""
        asked = await self._asked(request, "user_grabs", _BALANCES)
        page = Page(asked, (int, int, int))
        offer_filter = [_id(asked, "offer")] if "offer" in asked else []
        query = (
            _USER_GRABS
            + (" AND offer = %s" if offer_filter else "")
            + (" AND (at, shard, seq) < (%s, %s, %s)" if page.last else "")
            + " ORDER BY at DESC, shard DESC, seq DESC LIMIT %s"
        )
        rows = await self._books.rows(query, [request.path["user"], *offer_filter, *page.last, page.rows + 1])
        await self._open_metadata(rows, request.path["user"])
        for row in rows:
            self._tokens.add_to(row, request.path["user"])
        if offer_filter:
            await self._add_positions(offer_filter[0], rows)
        return reply_about_one(request, page.document("grabs", rows, ("at", "shard", "seq")))

    async def _open_metadata(self, rows: Sequence[Row], user: str) -> None:
        """Opens the metadata of a user's grabs."""
        if self._key_of is None or not any(is_sealed(row["metadata"]) for row in rows):
            return
        try:
            key = await self._key_of(user)
        except KeysUnavailable as error:
            raise retry_soon("unavailable", f"The keys of users cannot be read: {error}") from None
        for row in rows:
            row["metadata"] = open_metadata(row["metadata"], row["offer"], user, row["grab"], key)

    async def _add_positions(self, offer: str, rows: Sequence[Row]) -> None:
        """Adds its position to each waiting grab, unless it is too far back. The waiting list of an offer is
        read once for all waiting users, and cached like other answers to a crowd.
        """
        waiting = [row for row in rows if row["state"] == "waiting"]
        if not waiting:
            return
        try:
            kept = await self._cache.document(
                "waiting_places", {"offer": offer}, lambda: self._waiting_places(offer)
            )
        except Problem as problem:
            # What the user has matters more than the position.
            log.info("the waiting list of %s cannot be read: %s", offer, problem)
            return
        places = self._places.get(kept.tag)
        if places is None:
            places = _decode_places(kept.body)
            add_bounded(self._places, kept.tag, places, SHUFFLED_LISTS_MAX)
        for row in waiting:
            # A user who joined a moment ago may not be in the cached list.
            if (position := position_in(places, row["place"])) is not None:
                row["position"] = position

    async def _waiting_places(self, offer: str) -> bytes:
        """The numbers of the first grabs of a waiting list, in order."""
        rows = await self._books.rows(WAITING_PLACES, [offer, WAITING_POSITIONS_MAX])
        return _encode([row["place"] for row in rows])

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
        return reply_about_one(
            request, page.document("transfers", rows, ("at", "shard", "seq", "leg", "direction"))
        )

    async def _asked(self, request: Request, name: str, projections: Sequence[str]) -> dict[str, str]:
        """The parameters of a question, after waiting as long as `after` wants. The request is marked with
        the time from which on an answer has the event.
        """
        asked = query_of(request, PARAMETERS[name])
        if "after" not in asked:
            return asked
        position = _position(asked["after"])
        if position is None:
            raise invalid(f"after: must be <shard>-<seq>, such as 3-17, got {quoted(asked['after'])}")
        shard, seq = map(int, position.groups())
        booked_since = self._books.booked_since
        try:
            since = await booked_since(projections, shard, seq, 0)
            if since is None:
                with self._waiting.taken(request.caller, AFTER_WAITERS_CALLER_MAX):
                    await self._refuse_future(shard, seq)
                    since = await booked_since(projections, shard, seq, AFTER_SECONDS_MAX)
        except KeyError:
            raise invalid(f"after: there is no shard {shard}") from None
        request.read_since = since
        if since is None:
            raise retry_soon(
                "read_model_behind",
                f"The read model does not have event {seq} of shard {shard} after {AFTER_SECONDS_MAX:.0f} s. "
                "Ask again.",
                "after",
            )
        return asked

    async def _refuse_future(self, shard: int, seq: int) -> None:
        """Raises Problem when a shard has not decided an event. One that any read model has was decided,
        whatever Redis knows of it.
        """
        last = None if self._reached is None else await self._reached.last_seq(shard)
        if last is None or seq <= last or seq <= await self._books.last_seq(shard):
            return
        raise Problem(
            "position_not_reached",
            f"Shard {shard} has no event {seq}: its last one is {last}. Take `after` from the `shard` and "
            "`seq` of an answer, or leave it out. If an answer with `promise=decided` had it, Redis has lost "
            "that decision: send the command again.",
            "after",
        )


#: The parameters that each operation takes.
PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    operation.name: tuple(parameter.name for parameter in operation.parameters) for operation in OPERATIONS
}


class Page:
    """The part of a list that a request wants: `rows` rows after the one with the values `last`. `kinds` are
    the types of these values.
    """

    def __init__(self, asked: Mapping[str, str], kinds: tuple[type, ...]) -> None:
        text = asked.get("limit", str(PAGE_ROWS))
        if not (_is_limit(text) and 1 <= int(text) <= PAGE_ROWS_MAX):
            raise invalid(f"limit: must be 1 to {PAGE_ROWS_MAX}, got {quoted(text)}")
        self.rows = int(text)
        self.last = _read_cursor(asked["cursor"], kinds) if "cursor" in asked else []

    def document(self, name: str, rows: list[Row], keys: Sequence[str]) -> bytes:
        """The page. `rows` has one more row if there is a next page."""
        document: dict[str, Any] = {name: rows[: self.rows]}
        if len(rows) > self.rows:
            document["next"] = _cursor([rows[self.rows - 1][key] for key in keys])
        return _encode(document)

    def offers_named(self, names: Sequence[str], offers: Mapping[str, Any]) -> bytes:
        """The page of offers with these names. `names` has one more if there is a next page."""
        document: dict[str, Any] = {"offers": [offers[one] for one in names[: self.rows] if one in offers]}
        if len(names) > self.rows:
            document["next"] = _cursor([names[self.rows - 1]])
        return _encode(document)


def _but_after(asked: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in asked.items() if name != "after"}


def _filters_of(asked: Mapping[str, str]) -> tuple[str, list[str]]:
    """The conditions of a question about offers, and their values."""
    filters, values = "", []
    for name, choices in (("state", OFFER_STATES), ("kind", KINDS), ("issuer", ())):
        if name in asked:
            filters += _FILTERS[name]
            values.append(chosen(asked, name, choices, "") if choices else _id(asked, name))
    return filters, values


def _cursor(values: Sequence[Any]) -> str:
    return urlsafe_b64encode(_encode(values)).decode().rstrip("=")


def _no_cursor() -> Problem:
    return invalid("cursor: is not the `next` of a page of this list")


def _read_cursor(text: str, kinds: tuple[type, ...]) -> list[Any]:
    problem = _no_cursor()
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


def reply_about_one(request: Request, body: bytes) -> Reply:
    """A document about one user, which browsers and proxies must not store. A program that has it in memory
    may ask by its tag.
    """
    return tagged_reply(request, body, tag_of(body), _FOR_ONE)


def tagged_reply(request: Request, body: bytes, tag: bytes, keep: Header) -> Reply:
    """A document with its tag; nothing but the tag if the client has the document already."""
    reply = _document(body, tag, keep)
    known = request.header(b"if-none-match") or b""
    if known.strip() == b"*" or tag in (one.strip().removeprefix(b"W/") for one in known.split(b",")):
        return Reply(304, b"", reply.headers[1:])
    return reply


def _document(body: bytes, tag: bytes, keep: Header) -> Reply:
    return Reply(200, body, ((b"content-type", JSON), keep, (b"etag", tag), *SECURE_HEADERS))


def _id(asked: Mapping[str, str], name: str) -> str:
    if not is_id(asked[name]):
        raise invalid(f"{name}: must match {ID_PATTERN.strip('^$')}, got {quoted(asked[name])}")
    return asked[name]


def no_such_offer(offer: str) -> Problem:
    """The problem of an offer that the read model does not have."""
    return Problem(
        "no_such_offer",
        f"The read model has no offer {offer}. A new offer appears there within moments; the parameter "
        "`after` waits for it.",
    )
