"""Past events for programs, in order, from the journal or the audit trail."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from grabstream.models.events import AnyEvent
from grabstream.models.identifiers import campaign_of, is_id, shard_of
from grabstream.models.runs import singles
from grabstream.ops.connections.event_sources import open_history
from grabstream.ops.connections.opening import check_system
from grabstream.ops.settings import Settings
from grabstream.streams.history.chunks import Point, up_to
from grabstream.streams.replaying.replay import Stretch, plan

log = logging.getLogger(__name__)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


async def read_events(
    settings: Settings,
    *,
    shard: int | None = None,
    offer: str | None = None,
    first: Point | datetime | None = None,
    until: Point | datetime | None = None,
    source: Literal["journal", "audit"] = "journal",
) -> AsyncGenerator[AnyEvent, None]:
    """The events of all shards, of one `shard`, or of one `offer`, from `first` to `until` inclusive.

    Yields each event exactly once: one shard after the other, within a shard in order. Events of older
    versions are raised to the current version. Ends at the last event that existed when reading began.
    Changes nothing in the system.

    `first` and `until` are times with a zone, or a `Point`. `Point(at=…)` is a time in milliseconds since
    1970 UTC; it is compared with the times of the events. `Point(seq=…)` is an event, and needs a `shard` or
    an `offer`.

    `source` is the journal in Kafka, or the audit trail in PostgreSQL. The audit trail needs no Kafka, and
    lags by some milliseconds. If the journal is not read from its beginning, it is compared with the audit
    trail; without PostgreSQL it is read from its beginning, and events before `first` are skipped.

    A caller that stops early must close the generator, which closes the connections: `async with
    aclosing(read_events(settings)) as events: …`.

    Raises ValueError for bounds that do not fit together, BadSettings when the servers belong to another
    system, NoTrail when the schema has no audit trail, Corrupt or Gap when the source contradicts itself, and
    the errors of the Kafka and PostgreSQL clients.
    """
    start, end = _point("first", first), _point("until", until)
    shards = _shards(settings, shard, offer)
    if len(shards) > 1 and any(point is not None and point.seq is not None for point in (start, end)):
        raise ValueError("a seq counts within one shard: give a `shard` or an `offer`, or use times")
    await check_system(settings, journal=source == "journal")
    stretches = [Stretch(number, start, end) for number in shards]
    async with open_history(settings, source, seeks=start is not None, warn=log.warning) as opened:
        for planned in await plan(opened, stretches, whole=start is None):
            async with aclosing(up_to(opened.chunks(planned.stretch.shard, planned.start), end)) as chunks:
                async for chunk in chunks:
                    for event in (one for fact in chunk.facts for one in singles(fact.event)):
                        if start is not None and start.of_event(event) < start.value:
                            continue
                        if end is not None and end.of_event(event) > end.value:
                            continue
                        if offer is None or event.offer == offer:
                            yield event


def _shards(settings: Settings, shard: int | None, offer: str | None) -> list[int]:
    if shard is not None and not 0 <= shard < settings.shards:
        raise ValueError(f"shard {shard}: the system has {settings.shards} shards, numbered from 0")
    if offer is None:
        return list(range(settings.shards)) if shard is None else [shard]
    if not is_id(offer):
        raise ValueError(f"offer {offer!r}: an id has 1 to 64 of the characters A-Z a-z 0-9 . _ : -")
    of_offer = shard_of(campaign_of(offer), settings.shards)
    if shard not in (None, of_offer):
        raise ValueError(f"offer {offer} is in shard {of_offer}, not {shard}: leave out `shard`")
    return [of_offer]


def _point(name: str, bound: Point | datetime | None) -> Point | None:
    """A bound as a point. Events have whole milliseconds: a `first` is rounded up, an `until` down."""
    if bound is None:
        return None
    if isinstance(bound, datetime):
        if bound.utcoffset() is None:
            raise ValueError(f"{name}: a time needs a zone, such as datetime.now(UTC)")
        elapsed = bound - _EPOCH
        return Point(at=-(-elapsed // _MS) if name == "first" else elapsed // _MS)
    if (bound.seq is None) == (bound.at is None):
        raise ValueError(f"{name}: give a Point either a seq or a time, not both or none")
    return bound
