"""Plans of weeks: files of offers whose ids contain `{week}`, and whose times name a day of the week.

Nothing is guessed: a local time that is skipped or repeated by a change of summer time is refused.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo

from grabstream.models.bounds import quoted
from grabstream.models.calendar import check_timezone
from grabstream.models.identifiers import ID_LENGTH_MAX
from grabstream.models.money import Invalid
from grabstream.models.offers import WEEKDAYS

#: Stands for the ISO week, such as 2026-W49, in ids and texts of a plan.
PLACEHOLDER: Final = "{week}"

_is_week = re.compile(r"(\d{4})-W(\d{2})\Z", re.ASCII).match
_is_week_time = re.compile(
    rf"(next )?({'|'.join(WEEKDAYS)}) ([01]\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?\Z", re.ASCII
).match
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
#: The weeks whose times, and those of the week after, offers may have in every zone (`TIME_MS_MAX`).
FIRST_MONDAY: Final = date.fromisocalendar(1970, 2, 1)
LAST_MONDAY: Final = date.fromisocalendar(2099, 51, 1)


class WeekTime(NamedTuple):
    """A local time of a week: `days` after its Monday, at `clock`. `text` is its original form."""

    text: str
    days: int
    clock: time


def read_week_time(text: str) -> WeekTime | None:
    """The time of a week written as `fri 10:00`, or, for the week after it, as `next mon 02:00`; None for
    another text.
    """
    form = _is_week_time(text.lower())
    if form is None:
        return None
    clock = time(int(form[3]), int(form[4]), int(form[5] or 0))
    return WeekTime(text, WEEKDAYS.index(form[2]) + (7 if form[1] else 0), clock)


def monday_of(week: str) -> date:
    """The Monday of an ISO week such as 2026-W49; raises Invalid when there is no such week, or offers cannot
    have its times.
    """
    form = _is_week(week)
    try:
        if form is None:
            raise ValueError
        monday = date.fromisocalendar(int(form[1]), int(form[2]), 1)
    except ValueError:
        raise Invalid(f"{week!r} is not a week: write year and ISO week, such as 2026-W47") from None
    if not FIRST_MONDAY <= monday <= LAST_MONDAY:
        raise Invalid(f"{week!r} is not a week from {FIRST_MONDAY:%G-W%V} to {LAST_MONDAY:%G-W%V}")
    return monday


def week_after(at_ms: int, timezone: str) -> str:
    """The ISO week after that of a time (ms since 1970 UTC) in a zone."""
    local = (_EPOCH + timedelta(milliseconds=at_ms)).astimezone(ZoneInfo(timezone)).date()
    return f"{local + timedelta(weeks=1):%G-W%V}"


def moment_in(week: str, wanted: WeekTime, timezone: str) -> int:
    """A time of a week in a zone, in ms since 1970 UTC; raises Invalid when the zone's clocks skip or repeat
    it.
    """
    local = datetime.combine(monday_of(week) + timedelta(days=wanted.days), wanted.clock)
    zone = ZoneInfo(timezone)
    moments = {local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1)}
    fix = "give this week a time with its offset, under `weeks`"
    if all(moment.astimezone(zone).replace(tzinfo=None) != local for moment in moments):
        raise Invalid(f"{wanted.text}: the clocks of {timezone} leave out {local}; {fix}")
    if len(moments) > 1:
        raise Invalid(f"{wanted.text}: the clocks of {timezone} show {local} twice; {fix}")
    return (moments.pop() - _EPOCH) // timedelta(milliseconds=1)


class WeeklyPlan:
    """The week for which a file is read, and the file's content for weeks. `chosen` is None for the week
    after the one at `now_ms` (ms since 1970 UTC), in the zone of each offer.
    """

    def __init__(self, chosen: str | None, now_ms: int) -> None:
        """Raises Invalid when there is no such week."""
        if chosen is not None:
            monday_of(chosen)
        self._chosen = chosen
        self._now_ms = now_ms
        self._weeks_by_zone: dict[str, str] = {}
        #: Terms that offers have in some weeks only, by week and id as written.
        self.exceptions: dict[str, dict[str, dict[str, Any]]] = {}
        #: The ids, as written, of repeated offers, and one of the others.
        self._repeated: set[str] = set()
        self._single: str | None = None

    @property
    def week(self) -> str | None:
        """The week of the offers read; None if none is weekly."""
        return next(iter(self._weeks_by_zone.values()), None)

    def in_week(
        self, document: dict[str, Any], terms: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """The content of an offer and its terms for its week, and the reasons why they are wrong. An offer
        whose id does not contain the placeholder has no week.
        """
        offer = document.get("offer")
        if not isinstance(offer, str) or PLACEHOLDER not in offer:
            self._single = self._single or str(offer)[:ID_LENGTH_MAX]
            fix = f"only a plan of weeks has such times, with {PLACEHOLDER} in the ids of its offers"
            reasons = [f"terms.{name}: {value.text}: {fix}" for name, value in _week_times(terms)]
            return document, _without_week_times(terms), reasons
        self._repeated.add(offer)
        try:
            week = self._week_in(terms.get("timezone", "UTC"))
        except Invalid as error:
            return document, _without_week_times(terms), [str(error)]
        reasons = [
            f"terms.{name}: would be the same in all weeks; give a day and a time, such as fri 10:00"
            for name in ("opens_at", "closes_at")
            if isinstance(terms.get(name), int)
        ]
        if isinstance(document.get("id"), str) and PLACEHOLDER not in document["id"]:
            fix = f"write {PLACEHOLDER} into it, or leave it out"
            reasons.append(f"id: would be the same in all weeks; {fix}")
        terms = {**terms, **self.exceptions.get(week, {}).get(offer, {})}
        timezone = terms.get("timezone", "UTC")
        try:
            # The zone of this week, where it has its own.
            self._week_in(timezone)
        except Invalid as error:
            return document, _without_week_times(terms), [*reasons, str(error)]
        for name, value in _week_times(terms):
            try:
                terms[name] = moment_in(week, value, timezone)
            except Invalid as error:
                reasons.append(f"terms.{name}: {error}")
        return _texts_of(document, week), _texts_of(_without_week_times(terms), week), reasons

    def _week_in(self, timezone: Any) -> str:
        """The week for which offers in a zone are read; raises Invalid for what is not a zone."""
        check_timezone(timezone if isinstance(timezone, str) else "")
        return self._weeks_by_zone.setdefault(timezone, self._chosen or week_after(self._now_ms, timezone))

    def problems(self) -> Iterator[str]:
        """The problems of the file as a whole, after its offers are read."""
        if len(set(self._weeks_by_zone.values())) > 1:
            shown = ", ".join(f"{week} in {zone}" for zone, week in sorted(self._weeks_by_zone.items())[:3])
            yield f"the next week is {shown}; choose one with --week"
        if self._repeated and self._single:
            repeated = min(self._repeated)
            yield f"{self._single}: has no {PLACEHOLDER} in its id, as {repeated} has; use two files"
        elif self._chosen and not self._repeated:
            yield f"is not a plan of weeks, so it takes no --week: no id of an offer contains {PLACEHOLDER}"
        for week, offers in self.exceptions.items():
            for offer in sorted(offers.keys() - self._repeated):
                yield f"weeks.{week}: no offer of the file is written as {quoted(offer)}"


def _week_times(terms: Mapping[str, Any]) -> list[tuple[str, WeekTime]]:
    return [(name, value) for name, value in terms.items() if isinstance(value, WeekTime)]


def _without_week_times(terms: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in terms.items() if not isinstance(value, WeekTime)}


def _texts_of(fields: Mapping[str, Any], week: str) -> dict[str, Any]:
    """Fields whose texts name the week in place of the placeholder."""
    return {
        name: value.replace(PLACEHOLDER, week) if isinstance(value, str) else value
        for name, value in fields.items()
    }
