"""Offers and payments in the projection `balances`: the given, held and left units of each offer, and the
result of each payment.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
from psycopg import AsyncConnection

from grabstream.models.calendar import hour_shift_ms
from grabstream.models.events import (
    AnyEvent,
    GrabConfirmed,
    GrabQueued,
    GrabReleased,
    GrabReturned,
    OfferAmended,
    OfferClosed,
    OfferOpened,
    OfferPaused,
    OfferResumed,
    OfferRetired,
    PaymentRefundDue,
)
from grabstream.models.identifiers import campaign_of
from grabstream.models.offers import changes_of
from grabstream.models.runs import AnyRun, GrantedRun
from grabstream.projections.database.arrays import update_by
from grabstream.projections.database.zones import unknown_zones

log = logging.getLogger(__name__)


class _OfferChange(msgspec.Struct):
    """What some events change of one offer: sums to add, and the newest value of replaced columns (None:
    unchanged).
    """

    grabs: int = 0
    given: int = 0
    held: int = 0
    waiting: int = 0
    refunded: int = 0
    total: int = 0
    units_left: int | None = None
    state: str | None = None
    closed_at: int | None = None
    retired_at: int | None = None
    retired_seq: int | None = None
    reason: str | None = None
    seed: str | None = None
    title: str | None = None
    opens_at: int | None = None
    closes_at: int | None = None
    terms: str | None = None


class _OfferTermsRow(msgspec.Struct):
    """The terms that have their own columns."""

    title: str = ""
    parts: int = 0
    timezone: str = "UTC"


_SUMS = ("grabs", "given", "held", "waiting", "refunded", "total")
# `limits_since`: the limits at opening and after each amendment, in order.
_LIMITS_SINCE = (
    "CASE WHEN jsonb_exists(c.terms::jsonb, 'limits_since') THEN jsonb_build_object('limits_since', "
    "coalesce(t.terms->'limits_since', "
    "jsonb_build_array(jsonb_build_object('seq', 0, 'limits', coalesce(t.terms->'limits', '[]')))) || "
    "(c.terms::jsonb->'limits_since')) "
    "ELSE '{}' END"
)
_REPLACED = tuple(name for name in _OfferChange.__struct_fields__ if name not in _SUMS)
# The units of pieces change with the total. The total of an envelope cannot change.
_MORE = {
    "units": "t.units + c.total",
    "terms": f"t.terms || coalesce(c.terms::jsonb, '{{}}') || {_LIMITS_SINCE}",
}
_UPDATE = update_by(
    "offers_1", ("offer",), _SUMS, _REPLACED, ("state", "reason", "seed", "title", "terms"), _MORE
)
_OPENED = (
    "COPY offers_1 (offer, shard, kind, issuer, funding, asset, total, units, title, state, opened_at, "
    "opens_at, closes_at, units_left, "
    "seed_sha256, terms, hour_shift_ms, opened_seq) FROM STDIN"
)
_PAID = (
    "INSERT INTO payments_1 (campaign, payment, offer, grab, amount, currency, state, outcome, shard, seq, "
    "at) "
    "SELECT * FROM unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::bigint[], %s::text[], "
    "%s::text[], %s::text[], %s::integer[], "
    "%s::bigint[], %s::bigint[])"
)
_PAID_BACK = (
    "UPDATE payments_1 AS p SET refunded = p.refunded + c.amount "
    "FROM (SELECT campaign, payment, offer, grab, sum(amount) AS amount "
    "FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::text[]) AS b (amount, campaign, "
    "payment, offer, grab) "
    "GROUP BY campaign, payment, offer, grab) AS c WHERE p.campaign = c.campaign AND p.payment = c.payment "
    # A payment serves a grab at most once, because payments are known longer than the grab.
    "AND p.offer = c.offer AND p.grab = c.grab AND p.state = 'served'"
)

_terms = msgspec.json.Decoder(_OfferTermsRow).decode


class OfferRows:
    """Collects rows of some events: opened offers, changes of offers, payments, and refunds."""

    def __init__(self) -> None:
        self._opened: list[OfferOpened] = []
        self._changes: defaultdict[str, _OfferChange] = defaultdict(_OfferChange)
        self._paid: list[tuple[Any, ...]] = []
        self._paid_back: list[tuple[int, str, str, str, str]] = []

    def run(self, event: AnyRun) -> None:
        """Adds a run of grants, or of holds."""
        offer, count = self._changes[event.offer], len(event.grabs)
        offer.grabs += count
        offer.units_left = event.left
        if isinstance(event, GrantedRun):
            offer.given += sum(event.moved)
        else:
            offer.held += sum(event.given)
            offer.waiting -= count if event.waited else 0

    def add(self, event: AnyEvent) -> None:
        """Adds an event that is not a run. Events of one offer must be added in order."""
        if isinstance(event, OfferOpened):
            self._opened.append(event)
        elif isinstance(event, PaymentRefundDue):
            self._pay(event, event.amount, event.asset, "refund_due", event.outcome)
        else:
            self._alter(self._changes[event.offer], event)

    def _alter(self, offer: _OfferChange, event: AnyEvent) -> None:
        if isinstance(event, GrabQueued):
            offer.waiting += 1
        elif isinstance(event, GrabConfirmed):
            offer.held -= 0 if event.retaken else event.quantity
            offer.given += event.quantity
            if event.payment is not None and event.paid:
                self._pay(event, event.paid, event.currency or "", "served", "confirmed")
        elif isinstance(event, GrabReleased | GrabReturned):
            self._return(offer, event)
        elif isinstance(event, OfferAmended):
            _amend(offer, event)
        else:
            _set_state(offer, event)
        if isinstance(event, GrabConfirmed | GrabReleased | GrabReturned | OfferAmended):
            offer.units_left = event.left

    def _return(self, offer: _OfferChange, event: GrabReleased | GrabReturned) -> None:
        if isinstance(event, GrabReturned):
            offer.given -= event.quantity
            campaign = campaign_of(event.offer)
            self._paid_back += [
                (amount, campaign, payment, event.offer, event.grab) for payment, amount in event.refunds
            ]
        elif event.reason == "left_queue":
            offer.waiting -= 1
        else:
            offer.held -= event.quantity
        if not event.to.startswith("offer:"):
            offer.refunded += event.quantity

    def _pay(
        self, event: GrabConfirmed | PaymentRefundDue, amount: int, currency: str, state: str, outcome: str
    ) -> None:
        self._paid.append(
            (
                campaign_of(event.offer), event.payment, event.offer, event.grab, amount, currency, state,
                outcome,
                event.shard, event.seq, event.at,
            )
        )  # fmt: skip

    async def write(self, connection: AsyncConnection[Any]) -> None:
        """Writes new rows first, then changes, in the caller's transaction."""
        if self._opened:
            await _insert(connection, self._opened)
        if self._changes:
            names = sorted(self._changes)
            changes = [self._changes[name] for name in names]
            columns = ([getattr(change, name) for change in changes] for name in (*_SUMS, *_REPLACED))
            await connection.execute(_UPDATE, (names, *columns))
        for statement, rows in ((_PAID, self._paid), (_PAID_BACK, self._paid_back)):
            if rows:
                await connection.execute(statement, [list(column) for column in zip(*rows, strict=True)])


def _amend(offer: _OfferChange, event: OfferAmended) -> None:
    offer.total += event.added - event.removed
    for name, value in changes_of(event.changes).fields().items():
        if name in ("title", "opens_at", "closes_at"):
            setattr(offer, name, value)
    merged, changes = (
        msgspec.json.decode(offer.terms) if offer.terms else {},
        msgspec.json.decode(event.changes),
    )
    if "limits" in changes:
        changes["limits_since"] = [
            *merged.get("limits_since", ()),
            {"seq": event.seq, "limits": changes["limits"]},
        ]
    offer.terms = msgspec.json.encode(merged | changes).decode()


def _set_state(offer: _OfferChange, event: AnyEvent) -> None:
    if isinstance(event, OfferClosed):
        offer.state, offer.closed_at, offer.reason, offer.seed = "closed", event.at, event.reason, event.seed
        offer.refunded += event.amount
        offer.units_left = 0
    elif isinstance(event, OfferRetired):
        offer.state, offer.retired_at, offer.retired_seq = "retired", event.at, event.seq
    elif isinstance(event, OfferPaused | OfferResumed):
        offer.state = "paused" if isinstance(event, OfferPaused) else "open"


async def _insert(connection: AsyncConnection[Any], opened: Sequence[OfferOpened]) -> None:
    by_zone: defaultdict[str, list[str]] = defaultdict(list)
    async with connection.cursor() as cursor, cursor.copy(_OPENED) as copy:
        for event in opened:
            terms = _terms(event.terms)
            zone = event.campaign_zone.timezone if event.campaign_zone else terms.timezone
            by_zone[zone].append(event.offer)
            units = terms.parts or event.total
            # Titles are free text, so psycopg escapes them for COPY.
            await copy.write_row(
                (
                    event.offer, event.shard, event.kind, event.issuer, event.funding, event.asset,
                    event.total, units, terms.title,
                    "open", event.at, event.opens_at, event.closes_at, units, event.seed_sha256,
                    _opened_terms(event),
                    hour_shift_ms(event.offsets), event.seq,
                )
            )  # fmt: skip
    # Openers of offers by HTTP or by a topic do not learn it otherwise.
    for zone in await unknown_zones(connection, by_zone.keys() - {"UTC"}):
        log.warning(
            "PostgreSQL does not know the time zone %s (offers: %d, the first: %s): the views use UTC for "
            "it until PostgreSQL is updated; decisions are not affected",
            zone, len(by_zone[zone]), by_zone[zone][0],
        )  # fmt: skip


def _opened_terms(event: OfferOpened) -> str:
    """The terms, with the zone of the campaign's limits if it is another zone."""
    if event.campaign_zone is None:
        return bytes(event.terms).decode()
    zone = {
        "timezone": event.campaign_zone.timezone,
        "hour_shift_ms": hour_shift_ms(event.campaign_zone.offsets),
    }
    return msgspec.json.encode(msgspec.json.decode(event.terms) | {"campaign_zone": zone}).decode()
