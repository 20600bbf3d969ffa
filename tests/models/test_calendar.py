"""Calendars compared with the time-zone database: windows of hours, days and weeks, and hours of the week."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.models.calendar import (
    DAY_MS,
    HOUR_MS,
    check_timezone,
    offset_at,
    offsets_of,
    opens_next,
    utc_of,
    window_ends,
    window_of,
)
from grabstream.models.money import Invalid
from grabstream.models.offers import Hours, week_minutes

ZONES = (
    "UTC", "Asia/Shanghai", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/St_Johns",
    "Africa/Cairo",
    "America/Havana", "Asia/Beirut", "Pacific/Chatham", "Asia/Kathmandu",
)  # fmt: skip
FROM = 1_767_225_600_000  # 2026-01-01
BERLIN = offsets_of("Europe/Berlin", FROM)

zones = st.sampled_from(ZONES)
#: Any time within nine years. `moments` adds times around changes of the clock.
times = st.integers(FROM, FROM + 9 * 365 * DAY_MS)


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def local(zone: str, at_ms: int) -> datetime:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)).astimezone(ZoneInfo(zone))


@st.composite
def moments(draw: st.DrawFn) -> tuple[str, int]:
    zone = draw(zones)
    changes = [begins for begins, _ in offsets_of(zone, FROM)][1:19]
    if changes and draw(st.booleans()):
        near = st.sampled_from((-DAY_MS, -HOUR_MS, -1, 0, 1, HOUR_MS // 2, HOUR_MS, DAY_MS))
        return zone, draw(st.sampled_from(changes)) + draw(near)
    return zone, draw(times)


@given(moments())
def test_day_window_is_the_local_day(moment: tuple[str, int]) -> None:
    zone, at_ms = moment
    offsets = offsets_of(zone, FROM)
    assert offset_at(offsets, at_ms) == local(zone, at_ms).utcoffset() // timedelta(milliseconds=1)  # type: ignore[operator]
    assert (
        window_of("day", offsets, at_ms)
        == local(zone, at_ms).date().toordinal() - datetime(1970, 1, 1).toordinal()
    )


@given(moments(), st.sampled_from(("hour", "day", "week")))
def test_window_ends_where_the_next_begins(moment: tuple[str, int], per: str) -> None:
    zone, at_ms = moment
    offsets = offsets_of(zone, FROM)
    window, ends = window_of(per, offsets, at_ms), window_ends(per, offsets, at_ms)  # type: ignore[arg-type]
    assert ends is not None
    assert ends > at_ms
    assert window_of(per, offsets, ends - 1) == window  # type: ignore[arg-type]
    assert window_of(per, offsets, ends) == window + 1  # type: ignore[arg-type]
    if per == "hour":
        assert ends - at_ms <= HOUR_MS
    if per == "week":
        assert local(zone, ends).weekday() == 0
        assert (local(zone, ends) - timedelta(milliseconds=1)).isocalendar()[:2] == local(
            zone, at_ms
        ).isocalendar()[:2]


@pytest.mark.parametrize(
    ("moment", "ends"),
    [
        ("2027-03-28T00:30:00+01:00", "2027-03-29T00:00:00+02:00"),  # a day of 23 hours
        ("2027-10-31T00:30:00+02:00", "2027-11-01T00:00:00+01:00"),  # a day of 25 hours
        ("2027-10-31T02:30:00+02:00", "2027-11-01T00:00:00+01:00"),
        ("2027-10-31T02:30:00+01:00", "2027-11-01T00:00:00+01:00"),
    ],
)
def test_day_window_ends_at_local_midnight_when_the_clock_changes(moment: str, ends: str) -> None:
    assert window_ends("day", BERLIN, at(moment)) == at(ends)


def test_local_time_that_the_clock_skips_is_the_time_of_the_change() -> None:
    jump = at("2027-03-28T03:00:00+02:00")
    wall = jump + HOUR_MS + HOUR_MS // 2  # 02:30, which does not exist on that day
    assert utc_of(BERLIN, wall, jump - DAY_MS // 2) == jump


FRIDAY_TEN = (Hours(("fri",), "10:00", "12:00"), Hours(("sat", "sun"), "00:00", "24:00"))


@pytest.mark.parametrize(
    ("moment", "opens"),
    [
        ("2027-10-29T10:00:00+02:00", None),  # Friday
        ("2027-10-29T11:59:59.999+02:00", None),
        ("2027-10-29T12:00:00+02:00", "2027-10-30T00:00:00+02:00"),
        ("2027-10-29T09:59:59.999+02:00", "2027-10-29T10:00:00+02:00"),
        ("2027-10-31T23:59:59.999+01:00", None),
        ("2027-11-01T00:00:00+01:00", "2027-11-05T10:00:00+01:00"),
        ("2027-03-22T08:00:00+01:00", "2027-03-26T10:00:00+01:00"),
    ],
)
def test_opens_next_returns_the_next_opening(moment: str, opens: str | None) -> None:
    assert opens_next(week_minutes(FRIDAY_TEN), BERLIN, at(moment)) == (at(opens) if opens else None)


@given(moments())
def test_offer_is_open_at_the_time_that_opens_next_returns(moment: tuple[str, int]) -> None:
    """`opens_next` returns None exactly when the offer is open; at the time that it returns, the offer is
    open.
    """
    zone, at_ms = moment
    offsets, hours = offsets_of(zone, FROM), week_minutes(FRIDAY_TEN)
    opens = opens_next(hours, offsets, at_ms)
    clock = local(zone, at_ms)
    is_open = clock.weekday() >= 5 or (clock.weekday() == 4 and 10 <= clock.hour < 12)
    assert (opens is None) == is_open
    if opens is not None:
        assert opens > at_ms
        assert opens_next(hours, offsets, opens) is None


@pytest.mark.parametrize("name", ["localtime", "Factory", "posixrules", "posix/UTC", "right/UTC", "utc", ""])
def test_a_name_that_depends_on_the_machine_is_no_zone(name: str) -> None:
    with pytest.raises(Invalid, match="no such zone"):
        check_timezone(name)


@pytest.mark.parametrize("name", ["UTC", "Asia/Shanghai", "Europe/Berlin", "Etc/GMT+3"])
def test_names_of_the_database_are_zones(name: str) -> None:
    check_timezone(name)
