"""Times and events of the past as people write and read them."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from grabstream.models.bounds import counted
from grabstream.models.calendar import utc_text
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.models.offers import TIME_MS_MAX
from grabstream.streams.history.chunks import Point

#: A number from this one up is a time in ms (from 1973); a smaller number is a seq.
TIME_MS_MIN = 100_000_000_000
_is_shard_and_seq = re.compile(r"(\d{1,4}):(\d{1,18})\Z", re.ASCII).match
#: What may be a time of the day. With a leading zero it is not a shard and seq.
_is_clock = re.compile(r"\d{1,2}:\d\d\Z", re.ASCII).match
_has_leading_zero = re.compile(r"0\d|\d+:0", re.ASCII).match
_is_number = re.compile(r"\d{1,18}\Z", re.ASCII).match


class BadMoment(ValueError):
    """The text is not a time or an event; the error shows the forms."""


def parse_time(text: str) -> int:
    """Milliseconds since 1970 UTC, from ISO 8601 (UTC when it has no zone) or from milliseconds; raises
    BadMoment.
    """
    text = text.strip()
    if _is_number(text):
        moment = int(text)
    else:
        try:
            parsed = datetime.fromisoformat(text)
        except ValueError:
            raise BadMoment(
                f"{text!r} is not a time: write 2026-11-11T10:00:03.250 (UTC), with a zone such as +08:00, "
                "or milliseconds since 1970"
            ) from None
        moment = round((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000)
    if not TIME_MS_MIN <= moment <= TIME_MS_MAX:
        raise BadMoment(f"{text!r} is before 1973 or after 2099: offers have no such times")
    return moment


def parse_points(
    option: str, texts: Sequence[str], shards: Sequence[int], total: int, offers: Sequence[str]
) -> dict[int, Point]:
    """The point of each shard that the texts of an option name; raises BadMoment.

    A text is TIME (for all `shards`), SHARD:SEQ (for one shard, where it replaces TIME), or SEQ (with exactly
    one offer). `total` is the number of shards of the system.
    """
    points: dict[int, Point] = {}
    everywhere: Point | None = None
    for text in texts:
        if _is_clock(text) and (_has_leading_zero(text) or int(text.partition(":")[0]) >= total):
            raise BadMoment(
                f"{option} {text}: a time needs its date, such as 2026-11-11T{text:0>5}; for an event, write "
                f"SHARD:SEQ: the system has {counted(total, 'shards')}, 0 to {total - 1}, and the "
                "first seq is 1"
            )
        event = _is_shard_and_seq(text)
        if event is None and not (_is_number(text) and int(text) < TIME_MS_MIN):
            if everywhere is not None:
                raise BadMoment(f"{option} is given two times: give one, it counts for all shards")
            everywhere = Point(at=parse_time(text))
            continue
        if event is None and len(offers) != 1:
            raise BadMoment(
                f"{option} {text}: a seq counts within one shard: write SHARD:{text}, or name exactly one "
                "--offer"
            )
        shard, seq = (
            (int(event[1]), int(event[2])) if event else (shard_of(campaign_of(offers[0]), total), int(text))
        )
        if shard >= total:
            raise BadMoment(f"{option} {text}: the system has {counted(total, 'shards')}, 0 to {total - 1}")
        if shard not in shards:
            raise BadMoment(
                f"{option} {text}: shard {shard} is not read; the shards read are "
                f"{', '.join(map(str, shards))}"
            )
        if shard in points:
            raise BadMoment(f"{option} names two events of shard {shard}: give one")
        if seq < 1:
            raise BadMoment(f"{option} {text}: the first event of a shard has the seq 1")
        points[shard] = Point(seq=seq)
    if everywhere is not None:
        points = dict.fromkeys(shards, everywhere) | points
    return points


def show_time(at_ms: int) -> str:
    """A time for people: UTC, with milliseconds."""
    return utc_text(at_ms, " ")
