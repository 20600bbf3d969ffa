"""Questions of operators over HTTP: the demand of the last moments, shards and read models, the books, and
the history of one user.

They come from the views in PostgreSQL, except what only the servers know (`Examiners`). Common answers are
kept for 2 s (`caching.py`).
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple

import msgspec

from grabstream.gate.calls import now_ms
from grabstream.gateway.bounds import (
    BOOK_SUMS_MAX,
    DEMAND_EVENTS_MAX,
    DEMAND_SECONDS,
    DEMAND_SECONDS_MAX,
    EXAMINATION_SECONDS_MAX,
    EXAMINATIONS_MAX,
    FAIRNESS_GRABS_MAX,
    FILM_FRAMES,
    FILM_GRABS,
    RETRY_SOON_SECONDS,
    SYSTEM_ROWS_MAX,
    WEBHOOK_OFFERS_MAX,
)
from grabstream.gateway.caching import Cache
from grabstream.gateway.changing_webhooks import no_such_webhook
from grabstream.gateway.offer_film import FILM, NEWEST, PARTS, fairness_of, frames_of, grabs_of
from grabstream.gateway.problems import Reply, invalid, retry_soon
from grabstream.gateway.questions import (
    FOR_ALL,
    PARAMETERS,
    Page,
    no_such_offer,
    reply_about_one,
    tagged_reply,
)
from grabstream.gateway.requests import Request, query_of
from grabstream.gateway.view_reader import Row, ViewReader
from grabstream.models.bounds import quoted
from grabstream.models.identifiers import ID_PATTERN, is_id
from grabstream.models.offers import TIME_MS_MAX

_is_number = re.compile(r"[0-9]{1,16}").fullmatch
_encode = msgspec.json.Encoder().encode


class Examiners(NamedTuple):
    """Functions that connect to the servers. `shards` returns a row for each shard as Redis has it, or why
    there is none if Redis does not answer. `doctor` returns the result of an examination, `why` the story of
    a user and an offer, or None for an offer that the read models do not have.
    """

    shards: Callable[[], Awaitable[tuple[list[Row], str | None]]]
    doctor: Callable[[], Awaitable[Row]]
    why: Callable[[str, str], Awaitable[Row | None]]


#: The outcome of a grab by the type of its event.
_OUTCOMES: Final = {"grab.granted": "granted", "grab.held": "held", "grab.queued": "waiting"}
_HEADS: Final = "SELECT shard, seq FROM cursors WHERE projection = 'audit'"
_NEW_GRABS: Final = """
    SELECT s.shard, a.at / 1000 AS second, a.type, sum(a.seqs)::bigint AS grabs
    FROM unnest(%s::integer[], %s::bigint[], %s::bigint[]) AS s (shard, after, until), LATERAL (
        SELECT at, type, seqs FROM audit
        WHERE shard = s.shard AND seq > s.after AND seq <= s.until AND type = ANY(%s)
    ) AS a GROUP BY 1, 2, 3
"""
#: One index condition for each shard: the table has no index by second alone.
_NEW_REFUSALS: Final = """
    SELECT d.second, o.name AS outcome, sum(d.refusals)::bigint AS refusals
    FROM system AS y, generate_series(0, y.shards - 1) AS s (shard), LATERAL (
        SELECT second, code, sum(refusals) AS refusals FROM demand_1
        WHERE shard = s.shard AND second >= %s GROUP BY second, code
    ) AS d JOIN outcomes AS o USING (code) GROUP BY 1, 2
"""
#: For each read model and shard: its last event, and its time if the audit trail has it.
_READ_MODELS: Final = """
    SELECT c.projection, c.shard, c.seq, a.at
    FROM cursors AS c LEFT JOIN LATERAL (
        SELECT at FROM audit WHERE shard = c.shard AND seq <= c.seq ORDER BY seq DESC LIMIT 1
    ) AS a ON true ORDER BY c.projection, c.shard
"""
_MS: Final = "(extract(epoch FROM {}) * 1000)::bigint"
_VERIFIED: Final = (
    f"SELECT shard, seq, rounds, {_MS.format('compared_at')} AS at FROM verification ORDER BY shard"  # noqa: S608
)
_STOPPED: Final = (
    f"SELECT projection, shard, seq, reason, {_MS.format('stopped_at')} AS at FROM stopped_shards "  # noqa: S608
    "ORDER BY projection, shard LIMIT %s"
)
_RECOVERIES: Final = (
    f"SELECT shard, term, kind, problem, redis_seq, journal_seq, applied, seconds, {_MS.format('at')} AS at "  # noqa: S608
    "FROM recoveries ORDER BY recoveries.at DESC, shard LIMIT %s"
)
_DIFFERENCES: Final = (
    f"SELECT id, kind, shard, subject, seq, what, {_MS.format('found_at')} AS at FROM findings "  # noqa: S608
    "WHERE cleared_at IS NULL AND dismissed_by IS NULL ORDER BY id DESC LIMIT %s"
)
_SUMS: Final = (
    "SELECT asset, split_part(account, ':', 1) AS kind, count(*) AS accounts, sum(posted) AS sum "
    "FROM accounts GROUP BY 1, 2 ORDER BY 1, 2 LIMIT %s"
)
_ONE_OFFER: Final = "SELECT kind, shard, asset, total, units, opened_at, terms FROM offers WHERE offer = %s"
_WAITING: Final = (
    'SELECT position, user_id AS "user", grab, quantity, at FROM waiting WHERE offer = %s AND position > %s '
    "ORDER BY position LIMIT %s"
)
_REFUSED: Final = (
    "SELECT outcome, sum(refusals)::bigint AS refusals FROM demand WHERE offer = %s GROUP BY outcome "
    "ORDER BY 2 DESC, 1"
)


_WEBHOOKS: Final = f"""
    SELECT w.webhook, w.url, w.types, w.offers, w.state, w.reason, w.from_ms, w.delivered,
           {_MS.format("w.delivered_at")} AS delivered_at,
           coalesce(d.waiting, 0) AS waiting, coalesce(d.parked, 0) AS parked
    FROM webhooks AS w LEFT JOIN (
        SELECT webhook, count(*) FILTER (WHERE state = 'waiting') AS waiting,
               count(*) FILTER (WHERE state = 'parked') AS parked
        FROM webhook_deliveries GROUP BY webhook
    ) AS d USING (webhook) ORDER BY w.created_at, w.webhook
"""  # noqa: S608
_WEBHOOK: Final = "SELECT 1 FROM webhooks WHERE webhook = %s"
#: For each offer, how many events are not delivered, and the first one, which blocks the others.
_DELIVERIES: Final = f"""
    SELECT * FROM (
        SELECT DISTINCT ON (state, offer) state, offer, concat(shard, '-', seq) AS event, type, at, attempts,
               status, problem, {_MS.format("due_at")} AS due_at,
               count(*) OVER (PARTITION BY state, offer) AS events
        FROM webhook_deliveries WHERE webhook = %s ORDER BY state, offer, seq
    ) AS first ORDER BY state, at, offer LIMIT %s
"""  # noqa: S608


class Watching:
    """The handlers of the questions of operators."""

    def __init__(self, books: ViewReader, cache: Cache, examiners: Examiners) -> None:
        self._books = books
        self._cache = cache
        self._examiners = examiners
        self._recent = _Recent(books)
        #: Questions in progress that connect to servers themselves.
        self._examining = 0

    async def demand(self, request: Request, body: bytes) -> Reply:
        """GET /v1/demand"""
        asked = query_of(request, PARAMETERS["demand"])
        seconds = _number(asked, "seconds", DEMAND_SECONDS_MAX, DEMAND_SECONDS)
        return await self._cached(request, "demand", {"seconds": str(seconds)}, lambda: self._demand(seconds))

    async def _demand(self, seconds: int) -> Row:
        recent = await self._recent.read()
        first = recent.now - seconds + 1
        return {
            "since": max(first, recent.since),
            "until": recent.now,
            "seconds": [
                {"second": second, "outcomes": dict(sorted(recent.counts[second].items()))}
                for second in sorted(recent.counts)
                if second >= first
            ],
        }

    async def system(self, request: Request, body: bytes) -> Reply:
        """GET /v1/system"""
        query_of(request, PARAMETERS["system"])
        return await self._cached(request, "system", {}, self._system)

    async def _system(self) -> Row:
        # The read models are read before Redis, which continues meanwhile: one that is then ahead really is.
        models = await self._books.rows(_READ_MODELS)
        shards, problem = await self._examiners.shards()
        shard_by_number = {shard["shard"]: shard for shard in shards}
        for row in models:
            _add_lag(row, shard_by_number.get(row["shard"], {}))
        return {
            "at": now_ms(),
            "redis": problem,
            "shards": shards,
            "read_models": models,
            "verified": await self._books.rows(_VERIFIED),
            "stopped": await self._books.rows(_STOPPED, [SYSTEM_ROWS_MAX]),
            "differences": await self._books.rows(_DIFFERENCES, [SYSTEM_ROWS_MAX]),
            "recoveries": await self._books.rows(_RECOVERIES, [SYSTEM_ROWS_MAX]),
        }

    async def books(self, request: Request, body: bytes) -> Reply:
        """GET /v1/books"""
        query_of(request, PARAMETERS["books"])
        return await self._cached(request, "books", {}, self._sums)

    async def _sums(self) -> Row:
        return {"at": now_ms(), "sums": await self._books.rows(_SUMS, [BOOK_SUMS_MAX])}

    async def doctor(self, request: Request, body: bytes) -> Reply:
        """GET /v1/doctor"""
        query_of(request, PARAMETERS["doctor"])
        kept = await self._cache.document("doctor", {}, lambda: self._examine(self._examiners.doctor))
        return reply_about_one(request, kept.body)

    async def user_why(self, request: Request, body: bytes) -> Reply:
        """GET /v1/users/{user}/why"""
        asked = query_of(request, PARAMETERS["user_why"])
        if "offer" not in asked:
            raise invalid("offer: is required; the story is that of a user and an offer")
        offer = asked["offer"]
        if not is_id(offer):
            raise invalid(f"offer: must match {ID_PATTERN.strip('^$')}, got {quoted(offer)}")
        user = request.path["user"]
        return reply_about_one(request, await self._examine(lambda: self._examiners.why(user, offer), offer))

    async def webhooks(self, request: Request, body: bytes) -> Reply:
        """GET /v1/webhooks"""
        query_of(request, PARAMETERS["webhooks"])

        async def make() -> Row:
            return {"at": now_ms(), "webhooks": await self._books.rows(_WEBHOOKS)}

        return await self._cached(request, "webhooks", {}, make)

    async def webhook_deliveries(self, request: Request, body: bytes) -> Reply:
        """GET /v1/webhooks/{webhook}/deliveries"""
        query_of(request, PARAMETERS["webhook_deliveries"])
        webhook = request.path["webhook"]

        async def make() -> Row:
            if not await self._books.rows(_WEBHOOK, [webhook]):
                raise no_such_webhook(webhook)
            rows = await self._books.rows(_DELIVERIES, [webhook, WEBHOOK_OFFERS_MAX])
            return {"at": now_ms(), "webhook": webhook, "deliveries": rows}

        return await self._cached(request, "webhook_deliveries", {}, make)

    async def offer_waiting(self, request: Request, body: bytes) -> Reply:
        """GET /v1/offers/{offer}/waiting"""
        asked = query_of(request, PARAMETERS["offer_waiting"])
        return await self._cached(
            request, "offer_waiting", asked, lambda: self._waiting(request.path["offer"], asked)
        )

    async def _waiting(self, offer: str, asked: Mapping[str, str]) -> bytes:
        await self._offer(offer)
        page = Page(asked, (int,))
        rows = await self._books.rows(_WAITING, [offer, *(page.last or [0]), page.rows + 1])
        return page.document("waiting", rows, ("position",))

    async def offer_demand(self, request: Request, body: bytes) -> Reply:
        """GET /v1/offers/{offer}/demand"""
        query_of(request, PARAMETERS["offer_demand"])
        return await self._cached(
            request, "offer_demand", {}, lambda: self._offer_demand(request.path["offer"])
        )

    async def _offer_demand(self, offer: str) -> Row:
        await self._offer(offer)
        rows = await self._books.rows(_REFUSED, [offer])
        return {"offer": offer, "refusals": {row["outcome"]: row["refusals"] for row in rows}}

    async def offer_film(self, request: Request, body: bytes) -> Reply:
        """GET /v1/offers/{offer}/film"""
        asked = query_of(request, PARAMETERS["offer_film"])
        at = _number(asked, "at", TIME_MS_MAX, TIME_MS_MAX)
        return await self._cached(
            request, "offer_film", {"at": str(at)}, lambda: self._film(request.path["offer"], at)
        )

    async def _film(self, name: str, at: int) -> Row:
        offer = await self._offer(name)
        if at < offer["opened_at"]:
            raise invalid(f"at: the offer was opened at {offer['opened_at']}, got {at}")
        asked = {
            "shard": offer["shard"], "offer": name, "at": at, "frames": FILM_FRAMES, "grabs": FILM_GRABS,
        }  # fmt: skip
        frames = frames_of(await self._books.rows(FILM, asked))
        if not frames:
            raise retry_soon("read_model_behind", f"The audit trail does not have offer {name} yet.")
        return {
            "offer": name,
            "kind": offer["kind"],
            "asset": offer["asset"],
            "now": frames[-1],
            "frames": frames,
            "grabs": grabs_of(await self._books.rows(NEWEST, asked), FILM_GRABS),
        }

    async def offer_fairness(self, request: Request, body: bytes) -> Reply:
        """GET /v1/offers/{offer}/fairness"""
        query_of(request, PARAMETERS["offer_fairness"])
        return await self._cached(
            request, "offer_fairness", {}, lambda: self._fairness(request.path["offer"])
        )

    async def _fairness(self, name: str) -> Row:
        offer = await self._offer(name)
        rows = await self._books.rows(PARTS, [name, FAIRNESS_GRABS_MAX])
        # Drawing parts takes some ms: others are served meanwhile.
        found = await asyncio.to_thread(fairness_of, offer, rows)
        return {"offer": name, "kind": offer["kind"], "asset": offer["asset"], **found}

    async def _offer(self, offer: str) -> Row:
        rows = await self._books.rows(_ONE_OFFER, [offer])
        if not rows:
            raise no_such_offer(offer)
        return rows[0]

    async def _cached(
        self, request: Request, name: str, asked: Mapping[str, str],
        make: Callable[[], Awaitable[Row | bytes]],
    ) -> Reply:  # fmt: skip
        async def encoded() -> bytes:
            made = await make()
            return made if isinstance(made, bytes) else _encode(plain(made))

        kept = await self._cache.document(name, {**request.path, **asked}, encoded, room=request.room)
        return tagged_reply(request, kept.body, kept.tag, FOR_ALL)

    async def _examine(self, examine: Callable[[], Awaitable[Row | None]], offer: str = "") -> bytes:
        """What an examiner finds, in bounded time and number."""
        if self._examining >= EXAMINATIONS_MAX:
            raise retry_soon(
                "busy",
                f"The gateway is running {EXAMINATIONS_MAX} examinations, its maximum; ask again after "
                f"{RETRY_SOON_SECONDS} s.",
            )
        self._examining += 1
        try:
            async with asyncio.timeout(EXAMINATION_SECONDS_MAX):
                found = await examine()
        except TimeoutError:
            raise retry_soon(
                "unavailable", f"The servers did not answer within {EXAMINATION_SECONDS_MAX:.0f} s."
            ) from None
        finally:
            self._examining -= 1
        if found is None:
            raise no_such_offer(offer)
        return _encode(plain(found))


class _Recent:
    """Answers to grabs by second and outcome. Each reading adds the events since the one before, so that its
    cost does not grow with the window. `now` and `since` are seconds since 1970 UTC: counts are complete from
    `since` on.
    """

    def __init__(self, books: ViewReader) -> None:
        self._books = books
        self._reading = asyncio.Lock()
        #: The last event of each shard that is counted.
        self._seqs: dict[int, int] = {}
        self._grabs: dict[int, Counter[str]] = {}
        self.counts: dict[int, Counter[str]] = {}
        self.since = 0
        self.now = 0

    async def read(self) -> "_Recent":
        """Reads new rows; returns itself. Raises Problem, and counts nothing then."""
        async with self._reading:
            now = int(time.time())
            oldest = now - DEMAND_SECONDS_MAX
            heads = {row["shard"]: row["seq"] for row in await self._books.rows(_HEADS)}
            after = {
                shard: max(min(self._seqs.get(shard, 0), seq), seq - DEMAND_EVENTS_MAX)
                for shard, seq in heads.items()
            }
            grabs = await self._books.rows(
                _NEW_GRABS,
                [list(heads), list(after.values()), list(heads.values()), list(_OUTCOMES)],
            )
            refusals = await self._books.rows(_NEW_REFUSALS, [oldest])
            jumped = {shard for shard in heads if after[shard] > self._seqs.get(shard, 0)}
            self._seqs = heads
            for row in grabs:
                self._grabs.setdefault(row["second"], Counter())[_OUTCOMES[row["type"]]] += row["grabs"]
            for shard in jumped:
                # Events were left out that may be of the oldest second that was read, and of those before it.
                oldest_read = min((row["second"] for row in grabs if row["shard"] == shard), default=now)
                self.since = max(self.since, oldest_read + 1)
            self._grabs = {second: of for second, of in self._grabs.items() if second >= oldest}
            self.counts = {second: Counter(of) for second, of in self._grabs.items()}
            for row in refusals:
                self.counts.setdefault(row["second"], Counter())[row["outcome"]] += row["refusals"]
            self.now = now
            return self


def _number(asked: Mapping[str, str], name: str, maximum: int, default: int) -> int:
    """A parameter that is a whole number from 1 on; raises Problem for another text."""
    text = asked.get(name, str(default))
    if not (_is_number(text) and 1 <= int(text) <= maximum):
        raise invalid(f"{name}: must be 1 to {maximum}, got {quoted(text)}")
    return int(text)


def _add_lag(row: Row, shard: Mapping[str, Any]) -> None:
    """Adds the lag of a read model behind the journal: in events, and in ms between the last event of the
    shard and the last one that the read model has.
    """
    at = row.pop("at", None)
    if shard.get("journaled_seq") is None:
        return
    row["behind"] = max(shard["journaled_seq"] - row["seq"], 0)
    row["behind_ms"] = max(shard["time"] - at, 0) if row["behind"] and at is not None else 0


def plain(value: Any) -> Any:
    """A value for JSON: absent fields are omitted, sums are integers."""
    if isinstance(value, Mapping):
        return {name: plain(of) for name, of in value.items() if of is not None}
    if isinstance(value, list | tuple):
        return [plain(of) for of in value]
    return int(value) if isinstance(value, Decimal) else value
