"""Plans of weeks: the offers of a week from a file that is written once."""

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.models.commands import Open
from grabstream.models.money import Invalid
from grabstream.models.offers import WEEKDAYS, EnvelopeTerms, StockTerms
from grabstream.ops.formats.offer_files import BadOfferFile, Form, read_changes, read_offers
from grabstream.ops.formats.weekly_plan import WeeklyPlan, monday_of

PLAN = """
defaults: {kind: stock, issuer: shop, currency: EUR, hold_ms: 15m, timezone: Europe/Berlin,
           opens_at: fri 10:00, closes_at: next mon 02:00}
offers:
  - {offer: "friday-{week}:phone", terms: {total: 2, price: 9900, title: "Phones of {week}"}}
  - {offer: "friday-{week}:case", terms: {total: 500, price: 1900}}
weeks:
  2026-W49: {"friday-{week}:phone": {price: 8900, opens_at: fri 11:30}}
"""


def ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def opened(text: str, week: str | None, form: Form = "yaml", now: str = "2026-11-20T12:00:00Z") -> list[Open]:
    return read_offers(text, form, WeeklyPlan(week, ms(now)))


def problems(text: str, week: str | None = None, form: Form = "yaml", **more: str) -> str:
    with pytest.raises(BadOfferFile) as caught:
        opened(text, week, form, **more)
    return str(caught.value)


def one(**terms: Any) -> str:
    written = ", ".join(f"{name}: {value}" for name, value in terms.items())
    return f'[{{offer: "sale-{{week}}", terms: {{kind: stock, issuer: shop, total: 1, {written}}}}}]'


def terms_in(week: str, **terms: Any) -> Any:
    [command] = opened(one(**terms), week)
    return command.terms


@pytest.mark.requirement("F7")
def test_offers_of_a_week_have_its_ids_its_times_and_its_prices() -> None:
    phone, case = opened(PLAN, "2026-W48")
    assert (phone.offer, phone.id) == ("friday-2026-W48:phone", "open-friday-2026-W48:phone")
    assert (case.offer, case.id) == ("friday-2026-W48:case", "open-friday-2026-W48:case")
    assert isinstance(phone.terms, StockTerms)
    assert (phone.terms.price, phone.terms.title) == (9900, "Phones of 2026-W48")
    assert phone.terms.opens_at == ms("2026-11-27T10:00:00+01:00")
    assert phone.terms.closes_at == ms("2026-11-30T02:00:00+01:00")
    # The week with its own terms.
    phone, case = opened(PLAN, "2026-W49")
    assert isinstance(phone.terms, StockTerms)
    assert isinstance(case.terms, StockTerms)
    assert (phone.terms.price, case.terms.price) == (8900, 1900)
    assert phone.terms.opens_at == ms("2026-12-04T11:30:00+01:00")
    assert case.terms.opens_at == ms("2026-12-04T10:00:00+01:00")


def test_csv_is_a_plan_too() -> None:
    text = "offer,kind,issuer,total,timezone,opens_at\nsale-{week}:a,coupon,shop,5,Asia/Tokyo,sat 09:00:30\n"
    [command] = opened(text, "2026-W49", "csv")
    assert command.offer == "sale-2026-W49:a"
    assert command.terms.opens_at == ms("2026-12-05T09:00:30+09:00")


def test_each_week_of_an_envelope_has_funding_of_its_own() -> None:
    text = (
        '[{offer: "gift-{week}", id: "make-{week}", terms: {kind: envelope, issuer: shop, asset: CNY, '
        'total: 100, parts: 5, funding: "bank-{week}"}}]'
    )
    [command] = opened(text, "2027-W01")
    assert isinstance(command.terms, EnvelopeTerms)
    assert (command.id, command.terms.funding) == ("make-2027-W01", "bank-2027-W01")


@pytest.mark.requirement("F7")
@pytest.mark.parametrize(
    ("week", "opens"),
    [
        # Clocks change on Sunday 2026-10-25 and on Sunday 2027-03-28: the local time stays.
        ("2026-W43", "2026-10-23T10:00:00+02:00"), ("2026-W44", "2026-10-30T10:00:00+01:00"),
        ("2027-W12", "2027-03-26T10:00:00+01:00"), ("2027-W13", "2027-04-02T10:00:00+02:00"),
        # The years of weeks.
        ("2026-W53", "2027-01-01T10:00:00+01:00"), ("2027-W01", "2027-01-08T10:00:00+01:00"),
    ],
)  # fmt: skip
def test_local_time_stays_when_clocks_change(week: str, opens: str) -> None:
    assert terms_in(week, timezone="Europe/Berlin", opens_at="fri 10:00").opens_at == ms(opens)


def test_time_that_clocks_leave_out_or_show_twice_is_refused_unless_the_week_has_another() -> None:
    text = one(timezone="Europe/Berlin", opens_at="sun 02:30")
    assert terms_in("2026-W42", timezone="Europe/Berlin", opens_at="sun 02:30").opens_at
    assert "show 2026-10-25 02:30:00 twice" in problems(text, "2026-W43")
    assert "leave out 2027-03-28 02:30:00" in problems(text, "2027-W12")
    weeks = 'weeks: {2026-W43: {"sale-{week}": {opens_at: "2026-10-25T02:30:00+01:00"}}}'
    [command] = opened(f"offers: {text}\n{weeks}", "2026-W43")
    assert command.terms.opens_at == ms("2026-10-25T02:30:00+01:00")


@pytest.mark.parametrize(
    ("now", "zone", "week"),
    [
        ("2026-11-27T12:00:00Z", "UTC", "2026-W49"), ("2026-12-27T12:00:00Z", "UTC", "2026-W53"),
        ("2027-01-01T12:00:00Z", "UTC", "2027-W01"),
        # Sunday in UTC is Monday in Tokyo already.
        ("2026-11-29T16:00:00Z", "UTC", "2026-W49"), ("2026-11-29T16:00:00Z", "Asia/Tokyo", "2026-W50"),
    ],
)  # fmt: skip
def test_the_next_week_is_taken_in_the_zone_of_the_offers(now: str, zone: str, week: str) -> None:
    [command] = opened(one(timezone=zone, opens_at="fri 10:00"), None, now=now)
    assert command.offer == f"sale-{week}"


def test_zones_with_different_next_weeks_need_a_chosen_week() -> None:
    text = (
        one(timezone="UTC")[:-1]
        + ', {offer: "b-{week}", terms: {kind: coupon, issuer: s, total: 1, timezone: Asia/Tokyo}}]'
    )
    said = problems(text, now="2026-11-29T16:00:00Z")
    assert said == "file: the next week is 2026-W50 in Asia/Tokyo, 2026-W49 in UTC; choose one with --week"
    assert len(opened(text, "2026-W49", now="2026-11-29T16:00:00Z")) == 2


@pytest.mark.parametrize(
    ("text", "week", "said"),
    [
        (one(opens_at="2026-11-27T10:00:00Z"), None, "entry 1: terms.opens_at: would be the same in all"),
        (one(closes_at="1795744800000"), None, "terms.closes_at: would be the same in all weeks"),
        (one(timezone="Mars/Base"), None, "terms.timezone: no such zone"),
        (one(timezone="7"), None, "terms.timezone"),
        (one().replace("-{week}", ""), "2026-W49", "file: is not a plan of weeks, so it takes no --week"),
        (one(opens_at="fri 10:00").replace("-{week}", ""), None, "fri 10:00: only a plan of weeks has such"),
        (one(opens_at="fri 25:00"), None, "terms.opens_at: must be a time"),
        (one(opens_at="next next mon 10:00"), None, "terms.opens_at: must be a time"),
        (one(hold_ms="fri 10:00"), None, "terms.hold_ms: must be a duration"),
        (
            one()[:-1] + ", {offer: fixed, terms: {kind: coupon, issuer: s, total: 1}}]", None,
            "file: fixed: has no {week} in its id, as sale-{week} has; use two files",
        ),
        (f"offers: {one()}\nweeks: [1]", None, "file: weeks: must be an object"),
        (f"offers: {one()}\nweeks: {{2026-W54: {{}}}}", None, "file: weeks: '2026-W54' is not a week"),
        (f"offers: {one()}\nweeks: {{2026-W49: 7}}", None, "file: weeks.2026-W49: must be an object"),
        (
            f'offers: {one()}\nweeks: {{2026-W49: {{"sale-{{week}}": {{prise: 1}}}}}}', "2026-W40",
            "weeks.2026-W49.sale-{week}.prise: there is no such field; the nearest is price",
        ),
        (
            f"offers: {one()}\nweeks: {{2026-W49: {{sale: {{total: 1}}}}}}", "2026-W40",
            "file: weeks.2026-W49: no offer of the file is written as 'sale'",
        ),
        (one().replace("sale-", "s" * 57 + "-"), None, "offer: must match"),
        (one().replace("{week}", "{weeks}"), None, "offer: must match"),
        (
            one().replace("terms:", "id: mine, terms:"), None,
            "entry 1: id: would be the same in all weeks; write {week} into it, or leave it out",
        ),
    ],
)  # fmt: skip
def test_wrong_plan_is_refused_with_place_and_fix(text: str, week: str | None, said: str) -> None:
    assert said in problems(text, week)


def test_texts_of_other_files_stay_as_they_are() -> None:
    [command] = read_offers(
        '[{offer: a, terms: {kind: coupon, issuer: s, total: 1, title: "{week}"}}]', "yaml"
    )
    assert command.terms.title == "{week}"
    with pytest.raises(BadOfferFile, match="must be a time"):
        read_changes([("opens_at", "fri 10:00")])


@pytest.mark.parametrize("text", ["2026-W54", "2026-49", "W49", "", "2026-W1", "0000-W01", "٢٠٢٦-W49"])
def test_week_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="is not a week"):
        monday_of(text)
    with pytest.raises(Invalid):
        WeeklyPlan(text, 0)


@given(
    monday=st.dates(datetime(2024, 1, 1, tzinfo=UTC).date(), datetime(2098, 1, 1, tzinfo=UTC).date()),
    weekday=st.sampled_from(WEEKDAYS), hour=st.integers(4, 23),
    zone=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Asia/Shanghai", "Australia/Sydney"]),
)  # fmt: skip
def test_a_time_is_in_its_week_on_its_day_as_local_clocks_show_it(
    monday: Any, weekday: str, hour: int, zone: str
) -> None:
    week = f"{monday:%G-W%V}"
    at = terms_in(week, timezone=zone, opens_at=f"{weekday} {hour:02}:15").opens_at
    local = datetime.fromtimestamp(at / 1000, ZoneInfo(zone))
    assert f"{local:%G-W%V %a %H:%M}".lower() == f"{week} {weekday} {hour:02}:15".lower()


def test_a_week_may_have_a_zone_of_its_own() -> None:
    text = one(timezone="Asia/Shanghai", opens_at='"fri 10:00"')
    own = '{2026-W50: {"sale-{week}": {timezone: America/New_York}}}'
    [command] = opened(f"offers: {text}\nweeks: {own}", "2026-W50")
    assert command.terms.timezone == "America/New_York"
    assert command.terms.opens_at == ms("2026-12-11T10:00:00-05:00")
    assert "timezone" in problems(
        f"offers: {text}\nweeks: {own.replace('America/New_York', 'Mars')}", "2026-W50"
    )


@pytest.mark.parametrize("week", ["1970-W01", "2099-W52", "9999-W52", "0001-W01"])
def test_weeks_are_those_that_offers_may_have(week: str) -> None:
    with pytest.raises(Invalid, match="is not a week from 1970-W02 to 2099-W51"):
        opened(PLAN, week)
    for bound in ("1970-W02", "2099-W51"):
        assert len(opened(PLAN, bound)) == 2
