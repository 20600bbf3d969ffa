"""The audit trail as a snapshot of a shard: its cursor, and the events of campaigns that are present in
Redis.

When the last offer of a campaign retires, Redis keeps only the names of its offers and, for a time, the
results of their payments. So of ten million past events, a recovery reads only those of present campaigns (by
the index on the offer) and those about payments (by another index).
"""

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection

from grabstream.models.events import GrabConfirmed, PaymentRefundDue
from grabstream.models.identifiers import campaign_of
from grabstream.models.journal import Cursor
from grabstream.models.offers import PAYMENTS_KEPT_MS
from grabstream.models.outcomes import Outcome
from grabstream.models.runs import AnyLine, decode_lines
from grabstream.projections.checking import trail

ROWS_AT_ONCE: Final = 2_000


class RetiredOffer(NamedTuple):
    """What Redis keeps of a retired offer: its last `offer_seq`, and when it retired (ms since 1970 UTC)."""

    offer: str
    offer_seq: int
    at: int


class KnownPayment(NamedTuple):
    """The result and the money of a payment, as Redis keeps them; `basket` is that of the grab, or ''."""

    payment: str
    offer: str
    grab: str
    code: int
    seq: int
    at: int
    quantity: int
    paid: int
    currency: str
    basket: str


class Trail(NamedTuple):
    """The trail of a shard up to a cursor: the time there (ms since 1970 UTC), all retired offers, and the
    offers whose events are needed.

    `past` are offers whose payments are still known, although their events are not needed.
    """

    cursor: Cursor
    at: int
    retired: Sequence[str]
    needed: Sequence[str]
    past: Sequence[RetiredOffer]


async def newest(connection: AsyncConnection[Any], shard: int) -> Cursor:
    """The cursor of the trail of a shard; the beginning if events were set aside for the trail, because the
    others do not lead to the decided state.
    """
    if await _has_gap(connection, shard):
        return Cursor()
    found = await connection.execute(
        "SELECT seq, head, next_offset, term, owner FROM cursors WHERE projection = 'audit' AND shard = %s",
        (shard,),
    )
    row = await found.fetchone()
    return Cursor(row[0], bytes(row[1]), *row[2:]) if row else Cursor()


async def _has_gap(connection: AsyncConnection[Any], shard: int) -> bool:
    found = await connection.execute(
        "SELECT EXISTS (SELECT FROM set_aside WHERE projection = 'audit' AND shard = %s AND count > 0 AND "
        "in_force)",
        (shard,),
    )
    [has_gap] = await found.fetchone() or [False]
    return bool(has_gap)


async def trail_of(connection: AsyncConnection[Any], shard: int) -> Trail | None:
    """The trail in the connection's transaction, which must be REPEATABLE READ; None if the trail is empty or
    has gaps.
    """
    cursor = await newest(connection, shard)
    last = await trail.line_at(connection, shard, cursor.seq)
    if last is None or last.last_seq != cursor.seq:
        return None
    at = decode_lines(b"[" + last.text + b"]")[0].at
    found = await connection.execute(
        "SELECT offer, bool_or(type = 'offer.retired') FROM audit "
        "WHERE shard = %s AND seq <= %s AND type IN ('offer.opened', 'offer.retired') GROUP BY offer",
        (shard, cursor.seq),
    )
    has_retired = dict(await found.fetchall())
    present = {campaign_of(offer) for offer, retired in has_retired.items() if not retired}
    retired = [offer for offer, is_retired in has_retired.items() if is_retired]
    needed = [offer for offer in has_retired if campaign_of(offer) in present]
    return Trail(cursor, at, retired, needed, await _past(connection, shard, cursor.seq, at, present))


async def _past(
    connection: AsyncConnection[Any], shard: int, seq: int, at: int, present: Collection[str]
) -> list[RetiredOffer]:
    """Retired offers of campaigns that are no longer present, with their last `offer_seq`, which may be that
    of a late payment.
    """
    found = await connection.execute(
        "SELECT r.offer, greatest((r.body::jsonb->>'offer_seq')::bigint, "
        "(SELECT (p.body::jsonb->>'offer_seq')::bigint FROM audit AS p "
        "WHERE p.offer = r.offer AND p.type = 'payment.refund_due' AND p.shard = r.shard "
        "AND p.seq <= %(seq)s ORDER BY p.seq DESC LIMIT 1)), r.at FROM audit AS r "
        "WHERE r.shard = %(shard)s AND r.type = 'offer.retired' AND r.seq <= %(seq)s AND r.at > %(after)s",
        {"shard": shard, "seq": seq, "after": at - PAYMENTS_KEPT_MS},
    )
    return [RetiredOffer(*row) for row in await found.fetchall() if campaign_of(row[0]) not in present]


async def payments_of(
    connection: AsyncConnection[Any], shard: int, trail: Trail, held: bool = False
) -> AsyncIterator[Sequence[KnownPayment]]:  # fmt: skip
    """The results of payments of `trail.past`, in the order of their events; `held` as in `events_of`."""
    if not trail.past:
        return
    async with connection.cursor("payments", withhold=held) as rows:
        await rows.execute(
            "SELECT body FROM audit WHERE offer = ANY(%s) "
            "AND type IN ('grab.confirmed', 'payment.refund_due') AND shard = %s AND seq <= %s ORDER BY seq",
            ([retired.offer for retired in trail.past], shard, trail.cursor.seq),
        )
        while found := await rows.fetchmany(ROWS_AT_ONCE):
            yield [payment for payment in map(_known_payment, _events(found)) if payment is not None]


def _known_payment(event: AnyLine) -> KnownPayment | None:
    if isinstance(event, PaymentRefundDue):
        code = int(Outcome[event.outcome])
        return KnownPayment(
            event.payment, event.offer, event.grab, code, event.seq, event.at, 0, event.amount, event.asset,
            event.basket or "",
        )  # fmt: skip
    if isinstance(event, GrabConfirmed) and event.payment is not None:
        money = (event.paid, event.currency or "", event.basket or "")
        return KnownPayment(
            event.payment, event.offer, event.grab, int(Outcome.confirmed), event.seq, event.at,
            event.quantity, *money,
        )  # fmt: skip
    return None


async def events_of(
    connection: AsyncConnection[Any], shard: int, trail: Trail, held: bool = False
) -> AsyncIterator[Sequence[AnyLine]]:
    """The lines of the needed offers, in order.

    Use `held` with a connection in autocommit mode: PostgreSQL keeps the rows in a temporary file, and no
    transaction stays open.
    """
    async with connection.cursor("trail", withhold=held) as rows:
        await rows.execute(
            "SELECT body FROM audit WHERE shard = %s AND offer = ANY(%s) AND seq <= %s ORDER BY seq",
            (shard, list(trail.needed), trail.cursor.seq),
        )
        while found := await rows.fetchmany(ROWS_AT_ONCE):
            yield _events(found)


def _events(rows: Sequence[tuple[str]]) -> list[AnyLine]:
    return decode_lines(b"[" + b",".join(body.encode() for (body,) in rows) + b"]")
