"""Webhooks in PostgreSQL: subscriptions, their positions in the journal, and undelivered events.

These tables are not a read model. A subscription's cursor is moved in the transaction that adds the
deliveries of the events before it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import class_row

from grabstream.models.journal import Cursor
from grabstream.projections.cursors import CursorMoved

#: Places for waiting deliveries of one subscription: it stops reading until fewer are taken.
WAITING_MAX: Final = 10_000
#: The maximum of places for one offer, however many of its deliveries wait: others have the rest.
OFFER_PLACES_MAX: Final = 100
#: All deliveries of one subscription that wait, also those without a place.
WAITING_EVENTS_MAX: Final = 100_000
#: Those that are parked: the subscription is then paused.
PARKED_MAX: Final = 100_000
WEBHOOKS_MAX: Final = 100
#: Statuses of a receiver that accepts nothing now: Request Timeout, Too Many Requests.
TAKES_NOTHING: Final = (408, 429)
#: Whether an event may be sent. No attempt makes it due later than this: PostgreSQL's clock jumped then, or
#: an operator wrote the time.
_IS_DUE: Final = "(due_at <= now() OR due_at > now() + interval '25 hours')"
#: An event of a shard, as SHARD-SEQ.
EVENT_PATTERN: Final = "^[0-9]{1,4}-[0-9]{1,15}$"
_is_event: Final = re.compile(EVENT_PATTERN.strip("^$")).fullmatch


class Webhook(NamedTuple):
    """A subscription. `types` and `offers` are empty where all are wanted; `from_ms` (ms since 1970 UTC) is
    the time of the first. `reason` says why the system has paused it. After a rotation of the secret, the
    previous one signs too, until `previous_until`.
    """

    webhook: str
    url: str
    types: Sequence[str]
    offers: Sequence[str]
    sealed_secret: str
    state: str
    reason: str | None
    from_ms: int
    created_at: datetime
    delivered: int
    delivered_at: datetime | None
    previous_sealed_secret: str | None
    previous_until: datetime | None

    def wants(self, type_: str, offer: str) -> bool:
        """Whether it is subscribed to events of a type about an offer."""
        return (not self.types or type_ in self.types) and (not self.offers or offer in self.offers)


class Delivery(NamedTuple):
    """An event that a subscription has not been delivered. `body` is its text; `status` and `problem` are
    those of the last attempt.
    """

    webhook: str
    shard: int
    seq: int
    offer: str
    type: str
    at: int
    body: str
    state: str
    attempts: int
    due_at: datetime
    status: int | None
    problem: str | None

    @property
    def event(self) -> str:
        """The id of the event, as in CloudEvents."""
        return f"{self.shard}-{self.seq}"


class NewEvent(NamedTuple):
    """A single event to deliver, with its text as on `grab.events`."""

    seq: int
    offer: str
    type: str
    at: int
    body: str


class TooMany(Exception):
    """The maximum number of subscriptions is reached."""


_WEBHOOK: Final = ", ".join(Webhook._fields)
_DELIVERY: Final = ", ".join(Delivery._fields)


# -- subscriptions -------------------------------------------------------------------------------------------


async def add(
    connection: AsyncConnection[Any],
    webhook: str,
    url: str,
    types: Sequence[str],
    offers: Sequence[str],
    sealed_secret: str,
    from_ms: int | None,
) -> Webhook:
    """Adds a subscription to events from a time (None: from now); raises TooMany."""
    async with connection.transaction():
        await connection.execute("LOCK TABLE webhooks IN SHARE ROW EXCLUSIVE MODE")
        [count] = await (await connection.execute("SELECT count(*) FROM webhooks")).fetchone() or [0]
        if count >= WEBHOOKS_MAX:
            raise TooMany(f"there are {WEBHOOKS_MAX} webhooks, the maximum of a system: remove one")
        async with connection.cursor(row_factory=class_row(Webhook)) as cursor:
            await cursor.execute(
                "INSERT INTO webhooks (webhook, url, types, offers, sealed_secret, from_ms) VALUES (%s, %s, "  # noqa: S608
                "%s, %s, %s, coalesce(%s::bigint, (extract(epoch FROM now()) * 1000)::bigint)) RETURNING "
                + _WEBHOOK,
                (webhook, url, list(types), list(offers), sealed_secret, from_ms),
            )
            added: Webhook = await _single_row(cursor)
            return added


async def reseal(
    connection: AsyncConnection[Any], webhook: Webhook, sealed: str, previous: str | None
) -> bool:
    """Replaces the sealed secrets of a subscription, and returns whether it did: not if they have changed, or
    it was removed.
    """
    updated = await connection.execute(
        "UPDATE webhooks SET sealed_secret = %s, previous_sealed_secret = %s WHERE webhook = %s "
        "AND sealed_secret = %s AND previous_sealed_secret IS NOT DISTINCT FROM %s",
        (sealed, previous, webhook.webhook, webhook.sealed_secret, webhook.previous_sealed_secret),
    )
    return updated.rowcount == 1


async def _single_row(cursor: AsyncCursor[Any]) -> Any:
    row = await cursor.fetchone()
    assert row is not None
    return row


async def find_all(connection: AsyncConnection[Any]) -> list[Webhook]:
    """All subscriptions, the oldest first."""
    async with connection.cursor(row_factory=class_row(Webhook)) as cursor:
        await cursor.execute(f"SELECT {_WEBHOOK} FROM webhooks ORDER BY created_at, webhook".encode())  # noqa: S608
        return await cursor.fetchall()


async def has_any(connection: AsyncConnection[Any]) -> bool:
    """Whether there are subscriptions, in any state."""
    return await (await connection.execute("SELECT 1 FROM webhooks LIMIT 1")).fetchone() is not None


async def set_state(
    connection: AsyncConnection[Any], webhook: str, state: str, reason: str | None = None
) -> bool:
    """Pauses a subscription, with a reason if the system does so, or resumes it; returns whether there is
    one. Failed events of a resumed one are sent at once.
    """
    async with connection.transaction():
        done = await connection.execute(
            "UPDATE webhooks SET state = %s, reason = %s WHERE webhook = %s", (state, reason, webhook)
        )
        if state == "active":
            await _send_again(connection, webhook, None, ["waiting"])
    return done.rowcount == 1


async def rotate(
    connection: AsyncConnection[Any], webhook: str, sealed_secret: str, grace_ms: int
) -> Webhook | None:
    """Gives a subscription a new secret; the previous one also signs for a time, an earlier one no longer.
    Returns None when there is no such subscription.
    """
    async with connection.cursor(row_factory=class_row(Webhook)) as cursor:
        await cursor.execute(
            "UPDATE webhooks SET sealed_secret = %s, "  # noqa: S608
            "previous_sealed_secret = CASE WHEN %s > 0 THEN sealed_secret END, "
            "previous_until = CASE WHEN %s > 0 THEN now() + %s * interval '1 millisecond' END "
            "WHERE webhook = %s RETURNING " + _WEBHOOK,
            (sealed_secret, grace_ms, grace_ms, grace_ms, webhook),
        )
        return await cursor.fetchone()


async def remove(connection: AsyncConnection[Any], webhook: str) -> bool:
    """Removes a subscription, with its undelivered events; returns whether there was one."""
    return (await connection.execute("DELETE FROM webhooks WHERE webhook = %s", (webhook,))).rowcount == 1


# -- reading the journal -------------------------------------------------------------------------------------


async def cursors_of(connection: AsyncConnection[Any], shard: int) -> dict[str, Cursor]:
    """The cursors in a shard, by subscription."""
    rows = await connection.execute(
        "SELECT webhook, seq, head, next_offset, term, owner FROM webhook_cursors WHERE shard = %s", (shard,)
    )
    return {
        webhook: Cursor(seq, bytes(head), offset, term, owner)
        for webhook, seq, head, offset, term, owner in await rows.fetchall()
    }


async def move(
    connection: AsyncConnection[Any],
    shard: int,
    before: Cursor | None,
    after: Cursor,
    wanted: Mapping[str, Sequence[NewEvent]],
) -> None:
    """Moves the cursors of subscriptions, which are all at `before` (None: they have none), and adds the
    deliveries that each wants. Those of an offer that is parked are parked, too.

    Raises CursorMoved when a cursor is not there any more; a subscription that was removed is left out.
    """
    names = sorted(wanted)
    async with connection.transaction():
        rows = await connection.execute(
            # So no other process parks an offer, or sends it again, meanwhile (`_lock`).
            "SELECT webhook FROM webhooks WHERE webhook = ANY(%s) ORDER BY webhook FOR SHARE",
            (names,),
        )
        names = [name for (name,) in await rows.fetchall()]
        if not names:
            raise CursorMoved(f"webhooks, shard {shard}: these were removed")
        values = (after.seq, after.head, after.next_offset, after.term, after.owner)
        if before is None:
            done = await connection.execute(
                "INSERT INTO webhook_cursors SELECT name, %s, %s, %s, %s, %s, %s FROM unnest(%s::text[]) AS "
                "name ON CONFLICT DO NOTHING",
                (shard, *values, names),
            )
        else:
            done = await connection.execute(
                "UPDATE webhook_cursors SET seq = %s, head = %s, next_offset = %s, term = %s, owner = %s "
                "WHERE webhook = ANY(%s) AND shard = %s AND seq = %s AND next_offset = %s",
                (*values, names, shard, before.seq, before.next_offset),
            )
        if done.rowcount != len(names):
            raise CursorMoved(f"webhooks, shard {shard}: a cursor is no longer at {before}")
        for name in names:
            events = wanted[name]
            if not events:
                continue
            columns = [list(column) for column in zip(*events, strict=True)]
            await connection.execute(
                "INSERT INTO webhook_deliveries (webhook, shard, seq, offer, type, at, body, state) "
                "SELECT %(webhook)s, %(shard)s, e.*, CASE WHEN EXISTS (SELECT 1 FROM webhook_deliveries AS d "
                "WHERE d.webhook = %(webhook)s AND d.offer = e.offer AND d.state = 'parked') "
                "THEN 'parked' ELSE 'waiting' END FROM unnest(%(seqs)s::bigint[], %(offers)s::text[], "
                "%(types)s::text[], %(times)s::bigint[], %(bodies)s::text[]) AS e (seq, offer, type, at, "
                "body) ON CONFLICT DO NOTHING",
                {
                    "webhook": name,
                    "shard": shard,
                    **dict(zip(("seqs", "offers", "types", "times", "bodies"), columns, strict=True)),
                },
            )


class Queue(NamedTuple):
    """The deliveries of a subscription that wait: the places that they take, and their number."""

    places: int
    events: int

    def plus(self, events: int) -> "Queue":
        """The queue with more events, each of which may take a place."""
        return Queue(self.places + events, self.events + events)

    @property
    def is_full(self) -> bool:
        """Whether no more may be added."""
        return self.places >= WAITING_MAX or self.events >= WAITING_EVENTS_MAX


async def queues(connection: AsyncConnection[Any]) -> dict[str, Queue]:
    """The queue of each subscription that has one."""
    rows = await connection.execute(
        "SELECT webhook, sum(least(events, %s))::bigint, sum(events)::bigint FROM (SELECT webhook, count(*) "
        "AS events FROM webhook_deliveries WHERE state = 'waiting' GROUP BY webhook, offer) AS offers "
        "GROUP BY webhook",
        (OFFER_PLACES_MAX,),
    )
    return {webhook: Queue(places, events) for webhook, places, events in await rows.fetchall()}


async def backlogs(connection: AsyncConnection[Any], state: str) -> dict[str, int]:
    """How many deliveries each subscription has in a state, where it has any."""
    rows = await connection.execute(
        "SELECT webhook, count(*) FROM webhook_deliveries WHERE state = %s GROUP BY webhook", (state,)
    )
    return dict(await rows.fetchall())


async def _lock(connection: AsyncConnection[Any], webhook: str) -> None:
    """Keeps new deliveries of a subscription away until the end of the transaction."""
    await connection.execute("SELECT 1 FROM webhooks WHERE webhook = %s FOR UPDATE", (webhook,))


# -- delivering ----------------------------------------------------------------------------------------------


# The first waiting delivery of each offer, from one offer to the next in the index: WAITING_EVENTS_MAX of one
# offer may wait for its first one.
_FIRST: Final = """
WITH RECURSIVE first AS (
    (SELECT * FROM webhook_deliveries WHERE webhook = %(webhook)s AND state = 'waiting'
     ORDER BY offer, seq LIMIT 1)
    UNION ALL
    SELECT next.* FROM first CROSS JOIN LATERAL (
        SELECT d.* FROM webhook_deliveries AS d
        WHERE d.webhook = %(webhook)s AND d.state = 'waiting' AND d.offer > first.offer
        ORDER BY d.offer, d.seq LIMIT 1
    ) AS next
)
"""


async def due(
    connection: AsyncConnection[Any], webhook: str, busy: Collection[str], most: int,
    tried: Collection[str] | None = None,
) -> list[Delivery]:  # fmt: skip
    """Deliveries that may be sent now: the first of each offer, except offers that are `busy`; at most
    `most`, the longest due first. With `tried`, also those that failed since the receiver was down, before
    they are due, except of these offers.
    """
    async with connection.cursor(row_factory=class_row(Delivery)) as cursor:
        await cursor.execute(
            f"{_FIRST} SELECT {_DELIVERY} FROM first "  # noqa: S608
            f"WHERE offer <> ALL(%(busy)s) AND ({_IS_DUE} OR %(early)s AND offer <> ALL(%(tried)s) "
            "AND (status IS NULL OR status >= 500 OR status = ANY(%(takes_nothing)s))) "
            "ORDER BY due_at, seq LIMIT %(most)s".encode(),
            {
                "webhook": webhook,
                "busy": list(busy),
                "early": tried is not None,
                "tried": list(tried or ()),
                "takes_nothing": list(TAKES_NOTHING),
                "most": most,
            },
        )
        return await cursor.fetchall()


async def sent_again_at(connection: AsyncConnection[Any], webhook: str) -> datetime | None:
    """The time of an operator's last request to resend failed events not retried since; None if there is
    none.
    """
    rows = await connection.execute(
        f"{_FIRST} SELECT max(due_at) FROM first WHERE attempts = 0 AND problem IS NOT NULL".encode(),  # noqa: S608
        {"webhook": webhook},
    )
    [asked_at] = await rows.fetchone() or (None,)
    return asked_at


async def delivered(connection: AsyncConnection[Any], delivery: Delivery) -> Delivery | None:
    """Records that an event was delivered; returns the next one of its offer that is due, unless the
    subscription was paused or removed.
    """
    async with connection.transaction():
        # `resend`, `set_state` and `remove` lock the subscription first, too: no two wait for each other.
        await _lock(connection, delivery.webhook)
        done = await connection.execute(
            "DELETE FROM webhook_deliveries WHERE webhook = %s AND shard = %s AND seq = %s",
            (delivery.webhook, delivery.shard, delivery.seq),
        )
        if not done.rowcount:
            return None
        await connection.execute(
            "UPDATE webhooks SET delivered = delivered + 1, delivered_at = now() WHERE webhook = %s",
            (delivery.webhook,),
        )
        async with connection.cursor(row_factory=class_row(Delivery)) as cursor:
            await cursor.execute(
                f"SELECT {_DELIVERY} FROM webhook_deliveries AS d WHERE webhook = %s AND offer = %s "  # noqa: S608
                "AND state = 'waiting' AND EXISTS (SELECT 1 FROM webhooks AS w WHERE w.webhook = d.webhook "
                "AND w.state = 'active') ORDER BY seq LIMIT 1".encode(),
                (delivery.webhook, delivery.offer),
            )
            return await cursor.fetchone()


async def failed(
    connection: AsyncConnection[Any],
    delivery: Delivery,
    status: int | None,
    problem: str,
    again_seconds: float,
    after_seconds: float,
    attempts_max: int,
) -> bool:
    """Records a failed attempt. The event is sent again after a time, `after_seconds` at the earliest; after
    the maximum of attempts, it is parked, with all later ones of its offer. Returns whether it is.

    An attempt before the event was due does not count, so an outage with many of them parks nothing sooner.
    Neither does one from before an operator sent the event again.
    """
    async with connection.transaction():
        if delivery.attempts + 1 >= attempts_max:
            await _lock(connection, delivery.webhook)
        done = await connection.execute(
            f"UPDATE webhook_deliveries SET attempts = attempts + {_IS_DUE}::integer, status = %s, "  # noqa: S608
            f"problem = %s, due_at = greatest(CASE WHEN {_IS_DUE} THEN now() + make_interval(secs => "
            "%s) ELSE due_at END, now() + make_interval(secs => %s)) WHERE webhook = %s AND shard = %s "
            "AND seq = %s AND state = 'waiting' AND attempts = %s RETURNING attempts".encode(),
            (
                status, problem, again_seconds, after_seconds, delivery.webhook, delivery.shard, delivery.seq,
                delivery.attempts,
            ),
        )  # fmt: skip
        row = await done.fetchone()
        if row is None or row[0] < attempts_max:
            return False
        await connection.execute(
            "UPDATE webhook_deliveries SET state = 'parked' WHERE webhook = %s AND offer = %s AND seq >= %s",
            (delivery.webhook, delivery.offer, delivery.seq),
        )
        return True


# -- operators -----------------------------------------------------------------------------------------------


async def undelivered(
    connection: AsyncConnection[Any], webhook: str | None, state: str | None, most: int
) -> list[Delivery]:
    """The undelivered events of a subscription or of all, in the order of their offers."""
    async with connection.cursor(row_factory=class_row(Delivery)) as cursor:
        await cursor.execute(
            f"SELECT {_DELIVERY} FROM webhook_deliveries "  # noqa: S608
            "WHERE (%(webhook)s::text IS NULL OR webhook = %(webhook)s) "
            "AND (%(state)s::text IS NULL OR state = %(state)s) "
            "ORDER BY webhook, offer, seq LIMIT %(most)s".encode(),
            {"webhook": webhook, "state": state, "most": most},
        )
        return await cursor.fetchall()


async def resend(connection: AsyncConnection[Any], webhook: str, offer: str | None) -> int:
    """Resends at once parked events and those that failed, of an offer or of all offers, in the order of
    events; returns their number.
    """
    async with connection.transaction():
        await _lock(connection, webhook)
        return await _send_again(connection, webhook, offer, ["parked", "waiting"])


async def _send_again(
    connection: AsyncConnection[Any], webhook: str, offer: str | None, states: list[str]
) -> int:
    """Makes due what is parked or has failed, with all attempts before it. An event that waits and has not
    failed is due. The problem stays: by it, `sent_again_at` distinguishes these events from new ones.
    """
    done = await connection.execute(
        "UPDATE webhook_deliveries SET state = 'waiting', attempts = 0, due_at = now() WHERE webhook = "
        "%(webhook)s AND (%(offer)s::text IS NULL OR offer = %(offer)s) AND state = ANY(%(states)s) "
        "AND (state = 'parked' OR attempts > 0)",
        {"webhook": webhook, "offer": offer, "states": states},
    )
    return done.rowcount


def event_of(text: str) -> tuple[int, int] | None:
    """The shard and the seq of an event that is written as SHARD-SEQ; None if it is not."""
    if _is_event(text) is None:
        return None
    shard, _, seq = text.partition("-")
    return int(shard), int(seq)


async def discard(connection: AsyncConnection[Any], webhook: str, shard: int, seq: int) -> bool:
    """Discards a delivery; returns whether there was one."""
    done = await connection.execute(
        "DELETE FROM webhook_deliveries WHERE webhook = %s AND shard = %s AND seq = %s", (webhook, shard, seq)
    )
    return done.rowcount == 1
