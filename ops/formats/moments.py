"""Moments and places in history as people write them, and times as people read them."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.models.offers import TIME_MS_MAX
from grabstream.streams.replaying.history import Point

#: Numbers from here on are times in ms (1973), below they are a seq.
TIME_MS_MIN = 100_000_000_000
_is_place = re.compile(r"(\d{1,4}):(\d{1,18})\Z", re.ASCII).match
_is_number = re.compile(r"\d{1,18}\Z", re.ASCII).match


class BadMoment(ValueError):
    """What was written is no moment; the text says what is."""


def parse_time(text: str) -> int:
    """ISO 8601, UTC where it names no zone, or ms since 1970 UTC, as the latter; raises BadMoment."""
    text = text.strip()
    if _is_number(text):
        moment = int(text)
    else:
        try:
            parsed = datetime.fromisoformat(text)
        except ValueError:
            raise BadMoment(
                f"{text!r} is no time: write 2026-11-11T10:00:03.250 (UTC), with +08:00 for another zone, or "
                "ms"
            ) from None
        moment = round((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000)
    if not TIME_MS_MIN <= moment <= TIME_MS_MAX:
        raise BadMoment(f"{text!r} is no time that offers can have: it lies before 1973 or after 2099")
    return moment


def parse_points(
    option: str, texts: Sequence[str], shards: Sequence[int], total: int, offers: Sequence[str]
) -> dict[int, Point]:
    """TIME (for all `shards`), SHARD:SEQ (for one, before a TIME), or SEQ (with exactly one offer) as a point
    by shard; raises BadMoment.

    `total` is the number of shards there are.
    """
    points: dict[int, Point] = {}
    everywhere: Point | None = None
    for text in texts:
        place = _is_place(text)
        if place is None and not (_is_number(text) and int(text) < TIME_MS_MIN):
            if everywhere is not None:
                raise BadMoment(f"{option} names two times: one is enough for all shards")
            everywhere = Point(at=parse_time(text))
            continue
        if place is None and len(offers) != 1:
            raise BadMoment(
                f"{option} {text}: a seq counts within a shard: write SHARD:{text}, or name exactly one "
                "--offer"
            )
        shard, seq = (
            (int(place[1]), int(place[2])) if place else (shard_of(campaign_of(offers[0]), total), int(text))
        )
        if shard >= total:
            raise BadMoment(f"{option} {text}: there are {total} shards, 0 to {total - 1}")
        if shard not in shards:
            raise BadMoment(
                f"{option} {text}: shard {shard} is not among those that are read: "
                f"{', '.join(map(str, shards))}"
            )
        if shard in points:
            raise BadMoment(f"{option} names two places in shard {shard}")
        if seq < 1:
            raise BadMoment(f"{option} {text}: the first event of a shard has the seq 1")
        points[shard] = Point(seq=seq)
    if everywhere is not None:
        points = dict.fromkeys(shards, everywhere) | points
    return points


def show_time(at_ms: int) -> str:
    """A time for people: UTC, to the millisecond."""
    return (
        datetime.fromtimestamp(at_ms / 1000, UTC)
        .isoformat(sep=" ", timespec="milliseconds")
        .replace("+00:00", "Z")
    )
