"""Checks of webhooks: deliveries that are parked, fail, are near a bound, or have no worker to send them."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import class_row

from grabstream.models.bounds import counted
from grabstream.ops.diagnosis.findings import Finding, shard_list
from grabstream.ops.diagnosis.topics import LATE_MS
from grabstream.projections.tables.webhooks import (
    OFFER_PLACES_MAX,
    PARKED_MAX,
    WAITING_EVENTS_MAX,
    WAITING_MAX,
    queues,
)

#: The command that shows why a webhook fails.
_SHOW: Final = "grabstream webhooks deliveries"


class HookReading(NamedTuple):
    """A subscription: deliveries that wait and that are parked, the attempts and the problem of the one that
    failed most often, and times in ms since 1970 UTC: the start of its failures, of an untried due delivery,
    and of an unread event of the audit trail (None: not the case). `places` are the taken places of its
    queue. `misplaced` are the shards in which its cursor names another history than the audit trail has.
    """

    webhook: str
    state: str
    reason: str | None
    waiting: int
    parked: int
    parked_offers: int
    parked_since: int | None
    attempts: int
    problem: str | None
    failing_since: int | None
    due_since: int | None
    unread_since: int | None
    misplaced: Sequence[int] | None = None
    places: int = 0


# An event that a subscription does not want moves its cursor, too: a cursor before the end of the audit trail
# has not been read on. A subscription that has not been read for yet has none.
_READ: Final = """
SELECT w.webhook, w.state, w.reason,
       coalesce(d.waiting, 0) AS waiting, coalesce(d.parked, 0) AS parked,
       coalesce(d.parked_offers, 0) AS parked_offers, d.parked_since,
       coalesce(d.attempts, 0) AS attempts, d.problem, d.failing_since, d.due_since,
       CASE WHEN u.cursors > 0 THEN u.unread_since
            WHEN EXISTS (SELECT 1 FROM audit)
            THEN (extract(epoch FROM greatest(least(w.created_at, now()), to_timestamp(0))) * 1000)::bigint
       END AS unread_since, u.misplaced
FROM webhooks AS w
LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE state = 'waiting') AS waiting,
           count(*) FILTER (WHERE state = 'parked') AS parked,
           count(DISTINCT offer) FILTER (WHERE state = 'parked') AS parked_offers,
           min(at) FILTER (WHERE state = 'parked') AS parked_since,
           max(attempts) FILTER (WHERE state = 'waiting') AS attempts,
           (array_agg(problem ORDER BY attempts DESC) FILTER (WHERE problem IS NOT NULL))[1] AS problem,
           min(at) FILTER (WHERE state = 'waiting' AND attempts > 0) AS failing_since,
           (extract(epoch FROM min(due_at)
                    FILTER (WHERE state = 'waiting' AND attempts = 0 AND isfinite(due_at))) * 1000)::bigint
               AS due_since
    FROM webhook_deliveries WHERE webhook = w.webhook
) AS d ON true
LEFT JOIN LATERAL (
    SELECT count(*) AS cursors, min(first.at) AS unread_since,
           array_agg(c.shard ORDER BY c.shard) FILTER (
               WHERE here.last_seq = c.seq AND here.hash <> c.head OR here.last_seq > c.seq
               OR read_to.seq < c.seq AND read_to.next_offset >= c.next_offset
           ) AS misplaced
    FROM webhook_cursors AS c LEFT JOIN LATERAL (
        SELECT at FROM audit WHERE shard = c.shard AND seq > c.seq ORDER BY seq LIMIT 1
    ) AS first ON true
    LEFT JOIN LATERAL (
        SELECT seq + seqs - 1 AS last_seq, hash FROM audit
        WHERE shard = c.shard AND seq <= c.seq ORDER BY seq DESC LIMIT 1
    ) AS here ON true
    LEFT JOIN cursors AS read_to ON read_to.projection = 'audit' AND read_to.shard = c.shard
    WHERE c.webhook = w.webhook
) AS u ON true
ORDER BY w.created_at, w.webhook
"""


async def read_hooks(connection: AsyncConnection[Any]) -> list[HookReading]:
    """Reads all subscriptions, the oldest first."""
    async with connection.cursor(row_factory=class_row(HookReading)) as cursor:
        await cursor.execute(_READ)
        hooks = await cursor.fetchall()
    waiting = await queues(connection)
    return [
        hook._replace(places=waiting[hook.webhook].places) if hook.webhook in waiting else hook
        for hook in hooks
    ]


def not_delivered(hooks: Sequence[HookReading], now_ms: int) -> list[Finding]:
    """Subscriptions that were paused by the system, have parked deliveries, have half of the allowed parked
    or waiting deliveries, fail, or lag for LATE_MS.
    """
    return [finding for hook in hooks for finding in _of(hook, now_ms)]


def _of(hook: HookReading, now_ms: int) -> Iterator[Finding]:
    if hook.parked:
        yield _parked(hook)
    if hook.state != "paused":
        yield from _nearly_full(hook)
        yield from _misplaced(hook)
        yield from _late(hook, now_ms)
    elif hook.reason:
        yield Finding(
            "stuck",
            f"webhook {hook.webhook} was paused: {hook.reason}",
            "its receiver gets no events; after a resume, it gets all events since the pause",
            f"grabstream webhooks resume {hook.webhook}   # or, if it is no longer wanted: "
            f"grabstream webhooks remove {hook.webhook}",
        )


def _why(hook: HookReading) -> str:
    return f": {hook.problem}" if hook.problem else ""


def _parked(hook: HookReading) -> Finding:
    events, offers = counted(hook.parked, "events"), counted(hook.parked_offers, "offers")
    return Finding(
        "stuck",
        f"webhook {hook.webhook}: {events} of {offers} are parked{_why(hook)}",
        "its receiver gets no events of these offers until they are sent again",
        f"grabstream webhooks resend {hook.webhook}   # once the receiver accepts them; {_SHOW} "
        f"{hook.webhook} --state parked shows them",
        hook.parked_since,
    )


def _nearly_full(hook: HookReading) -> Iterator[Finding]:
    """Half of what may be parked, or may wait, is."""
    name, show = f"webhook {hook.webhook}", f"{_SHOW} {hook.webhook}"
    if hook.parked >= PARKED_MAX / 2:
        yield Finding(
            "risk",
            f"{name}: {hook.parked:,} events are parked; with {PARKED_MAX:,} it is paused",
            "its receiver then gets no events of any offer until it is resumed",
            f"{show} --state parked   # give up what the receiver cannot accept: grabstream webhooks "
            f"discard {hook.webhook} EVENT; then grabstream webhooks resend {hook.webhook}",
            hook.parked_since,
        )
    if hook.places >= WAITING_MAX / 2 or hook.waiting >= WAITING_EVENTS_MAX / 2:
        yield Finding(
            "risk",
            f"{name}: {hook.waiting:,} events wait, of at most {WAITING_EVENTS_MAX:,}, and take "
            f"{hook.places:,} of {WAITING_MAX:,} places, of which an offer takes at most {OFFER_PLACES_MAX}",
            "when it is full, its receiver gets new events of all offers only as fast as it accepts those "
            "that wait; no event is lost",
            f"{show} --state waiting   # which offers they are of, and what its receiver answered",
        )


def _misplaced(hook: HookReading) -> Iterator[Finding]:
    """A cursor that the reader refuses, because the journal has another history there."""
    if hook.misplaced:
        shards = shard_list(hook.misplaced)
        yield Finding(
            "stuck",
            f"webhook {hook.webhook}, {shards}: the journal contradicts its cursor",
            "its receiver gets no newer events of these shards",
            f"grabstream webhooks remove {hook.webhook}   # then add it again, with --from a time before "
            "the first event that its receiver lacks",
        )


def _late(hook: HookReading, now_ms: int) -> Iterator[Finding]:
    """The receiver fails, or events wait, for LATE_MS."""
    if hook.failing_since is not None and now_ms - hook.failing_since > LATE_MS:
        yield Finding(
            "risk",
            f"webhook {hook.webhook} fails, after {counted(hook.attempts, 'attempts')}{_why(hook)}",
            "its receiver gets events late; after the last attempt they are parked",
            f"{_SHOW} {hook.webhook}   # repair the receiver: the events are then sent again, or at once "
            f"with grabstream webhooks resend {hook.webhook}",
            hook.failing_since,
        )
    # While the receiver fails, few requests are sent to it, and the other deliveries wait for that.
    elif late := [at for at in (hook.due_since, hook.unread_since) if at and now_ms - at > LATE_MS]:
        yield Finding(
            "stuck",
            f"webhook {hook.webhook} lags: {counted(hook.waiting, 'events')} waiting, newer events are not "
            "read",
            "its receiver gets events late; no event is lost",
            "grabstream worker --roles webhooks",
            min(late),
        )
