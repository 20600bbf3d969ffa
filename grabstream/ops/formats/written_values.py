"""Converts times, durations, limits and opening hours, as people write them, to values of commands. Nothing
is guessed.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

from grabstream.models.bounds import quoted
from grabstream.models.money import Invalid

_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 24 * 3_600_000}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_is_milliseconds = re.compile(r"[0-9]{1,18}\Z").match
_is_duration = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)\Z").match
_is_time = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?( "
    r"?(Z|z|[-+][0-9]{2}:[0-9]{2}))?\Z"
).match
_is_limit = re.compile(r"([^/\s]+)/([^/\s]+)/([0-9]{1,18})(?:/([^/\s]+))?\Z").match
_is_hours = re.compile(r"(?:([a-z]+(?:\s*,\s*[a-z]+)*)\s+)?([0-9:]+)\s*[-–]\s*([0-9:]+)\Z").match


def read_time(text: str) -> int:
    """Milliseconds since 1970 UTC, from RFC 3339 with a zone or from milliseconds; raises Invalid with the
    fix.
    """
    if _is_milliseconds(text):
        return int(text)
    wanted = "a time such as 2026-11-27T10:00:00+08:00, or milliseconds since 1970 UTC"
    form = _is_time(text)
    if form is None:
        raise Invalid(f"must be {wanted}; got {quoted(text)}")
    if form[3] is None:
        raise Invalid(f"{text} has no zone; add one: {text}+08:00, or {text}Z for UTC")
    try:
        moment = datetime.fromisoformat(text.upper().replace(" ", "T", 1).replace(" ", ""))
    except ValueError as error:
        raise Invalid(f"{text} is not a time ({error}); give {wanted}") from None
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def read_duration(text: str) -> int:
    """Milliseconds, from a text such as `15m` or from milliseconds; raises Invalid with the fix."""
    if _is_milliseconds(text):
        return int(text)
    form = _is_duration(text)
    if form is None:
        raise Invalid(f"must be a duration such as 30s, 15m, 2h or 7d, or milliseconds; got {quoted(text)}")
    return int(form[1]) * _UNITS_MS[form[2]]


def read_limits(text: str) -> list[dict[str, Any]]:
    """Limits from `user/day/2; card/offer/1/campaign`; raises Invalid with the fix."""
    limits = []
    for written in filter(None, map(str.strip, text.split(";"))):
        form = _is_limit(written)
        if form is None:
            raise Invalid(
                "must be by/per/max, with a semicolon between two limits, such as user/day/2; "
                f"device/offer/1/campaign; got {quoted(written)}"
            )
        limits.append(
            {"by": form[1], "per": form[2], "max": int(form[3])} | ({"scope": form[4]} if form[4] else {})
        )
    return limits


def read_hours(text: str) -> list[dict[str, Any]]:
    """Opening hours from `fri 10:00-12:00; sat,sun 09:00-18:00`; raises Invalid with the fix."""
    hours = []
    for written in filter(None, map(str.strip, text.lower().split(";"))):
        form = _is_hours(written)
        if form is None:
            raise Invalid(
                "must be days and hours, with a semicolon between two entries, such as fri 10:00-12:00; "
                f"sat,sun 09:00-18:00; got {quoted(written)}"
            )
        days = {"weekdays": [day.strip() for day in form[1].split(",")]} if form[1] else {}
        hours.append({**days, "from": form[2], "until": form[3]})
    return hours


def shown_time(at_ms: int, timezone: str) -> str:
    """A time, given in ms since 1970 UTC, as shown in a zone."""
    moment = (_EPOCH + timedelta(milliseconds=at_ms)).astimezone(ZoneInfo(timezone))
    exact = "milliseconds" if at_ms % 1000 else "seconds" if at_ms % 60_000 else "minutes"
    return moment.isoformat(" ", exact)


def shown_duration(duration_ms: int) -> str:
    """A duration in ms as people write it, such as `15m`."""
    unit = next(unit for unit in ("d", "h", "m", "s", "ms") if duration_ms % _UNITS_MS[unit] == 0)
    return f"{duration_ms // _UNITS_MS[unit]:,}{unit}"
