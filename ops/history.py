"""The history for programs: events of the journal or of the audit trail, read again in order."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from grabstream.models.events import AnyEvent
from grabstream.models.identifiers import campaign_of, is_id, shard_of
from grabstream.ops.connections.event_sources import open_source
from grabstream.ops.connections.opening import check_system
from grabstream.ops.settings import Settings
from grabstream.streams.replaying.history import Point, up_to
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
    """The events of all shards, of one `shard`, or of one `offer`, from `first` to `until`, both included.

    Events come in the order of their shard, one shard after the other, and each exactly once. Events of older
    versions are raised to the current form. Reading ends at the last event that was there when it began; it
    changes nothing in the system.

    `first` and `until` are times with a zone, or a `Point`: `Point(at=…)` is a time in milliseconds since
    1970 UTC, `Point(seq=…)` an event, which needs a `shard` or an `offer`. A time means the events' own
    times.

    `source` is Kafka's journal, or the audit trail in PostgreSQL, which is read without Kafka and is some
    milliseconds older. A journal that is not read from its beginning is compared with the audit trail;
    without PostgreSQL it is read from its beginning, and what is before `first` is skipped.

    Who leaves early closes the generator, and with it the connections:
    `async with aclosing(read_events(settings)) as events: …`.

    Raises ValueError for bounds that mean nothing, BadSettings when the servers are those of another system,
    NoTrail when there is no audit trail to read, Corrupt or Gap when the source contradicts itself, and what
    the clients of Kafka and PostgreSQL raise.
    """
    start, end = _point("first", first), _point("until", until)
    shards = _shards(settings, shard, offer)
    if len(shards) > 1 and any(point is not None and point.seq is not None for point in (start, end)):
        raise ValueError("a seq counts within one shard: name a `shard` or an `offer`, or use times")
    await check_system(settings, journal=source == "journal")
    stretches = [Stretch(number, start, end) for number in shards]
    async with open_source(settings, source, seeks=start is not None, warn=log.warning) as opened:
        for planned in await plan(opened, stretches, whole=start is None):
            async with aclosing(up_to(opened.chunks(planned.stretch.shard, planned.start), end)) as chunks:
                async for chunk in chunks:
                    for fact in chunk.facts:
                        if start is not None and start.of(fact) < start.value:
                            continue
                        if offer is None or fact.event.offer == offer:
                            yield fact.event


def _shards(settings: Settings, shard: int | None, offer: str | None) -> list[int]:
    if shard is not None and not 0 <= shard < settings.shards:
        raise ValueError(f"shard {shard}: there are {settings.shards} shards, 0 to {settings.shards - 1}")
    if offer is None:
        return list(range(settings.shards)) if shard is None else [shard]
    if not is_id(offer):
        raise ValueError(f"offer {offer!r}: an id is 1 to 64 of A-Z a-z 0-9 . _ : -")
    of_offer = shard_of(campaign_of(offer), settings.shards)
    if shard not in (None, of_offer):
        raise ValueError(f"offer {offer} is in shard {of_offer}, not in {shard}: an `offer` alone is enough")
    return [of_offer]


def _point(name: str, bound: Point | datetime | None) -> Point | None:
    """A bound as a point. The events' times are whole milliseconds: a `first` between two means the later."""
    if bound is None:
        return None
    if isinstance(bound, datetime):
        if bound.utcoffset() is None:
            raise ValueError(f"{name}: a time needs a zone, as in datetime.now(UTC)")
        elapsed = bound - _EPOCH
        return Point(at=-(-elapsed // _MS) if name == "first" else elapsed // _MS)
    if (bound.seq is None) == (bound.at is None):
        raise ValueError(f"{name}: a Point has either a seq or a time")
    return bound
