"""The requirements of coupon promotions (C of docs/requirements.md): limits, coupons and codes, by Lua and by
the pure rules.
"""

from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from redis.crc import key_slot

from grabstream.gate.gate import Gate
from grabstream.models.answers import Answer
from grabstream.models.commands import (
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Grab,
    Load,
    Open,
    Redeem,
    Release,
    Return,
    Unredeem,
)
from grabstream.models.offers import Changes, EnvelopeTerms, Limit
from tests.lua.histories.scene import (
    BERLIN,
    DAY,
    HOUR,
    MINUTE,
    WEEK,
    Scene,
    at,
    by_user,
    coupon,
    left_by_limit,
    stock,
)
from tests.support.plain_scripts import use_plain_scripts
from tests.support.shards import NOW, SEALER

# -- total, per user, per user and day -----------------------------------------------------------------------


@pytest.mark.requirement("C1")
async def test_limits_per_user_and_per_day_and_the_total_hold_together(scene: Scene) -> None:
    await scene.open(coupon(6, by_user("day", 2), by_user("offer", 3)))
    table = [
        (0, "ann", "granted", None), (0, "ann", "granted", None), (0, "ann", "limit_reached", "day"),
        (0, "bob", "granted", None),
        (1, "ann", "granted", None), (1, "ann", "limit_reached", "offer"), (1, "bob", "granted", None),
        (1, "bob", "granted", None),
        (1, "bob", "limit_reached", "day"), (1, "eve", "sold_out", None),
        (2, "ann", "limit_reached", "offer"), (2, "eve", "sold_out", None),
    ]  # fmt: skip
    for day, rows in groupby(table, lambda row: row[0]):
        scene.now = NOW + day * DAY
        rows_of_day = list(rows)
        answers = await scene.decide_both(
            [Grab(id=scene.id(), offer="o", user=user) for _, user, _, _ in rows_of_day]
        )
        outcomes = [(answer.outcome, answer.limit and answer.limit.per) for answer in answers]
        assert outcomes == [(outcome, limit) for _, _, outcome, limit in rows_of_day]


@pytest.mark.requirement("C1")
@pytest.mark.parametrize(("terms", "by"), [(coupon, "user"), (stock, "card")])
@pytest.mark.parametrize(("per", "length"), [("offer", None), ("hour", HOUR), ("day", DAY), ("week", WEEK)])
async def test_limits_count_by_any_attribute_per_offer_hour_day_or_week(
    scene: Scene, terms: Any, by: str, per: Any, length: int | None
) -> None:
    monday = at("2027-01-18T00:00+00:00")
    scene.now = monday
    await scene.open(terms(100, Limit(by, per, 3), max_per_grab=3))
    resets_at = None if length is None else monday + length

    async def grab(value: str, quantity: int = 1) -> Answer:
        """A grab with this value of the limited attribute; all other values are new."""
        others = {name: scene.id() for name in ("card", "device")}
        return await scene.grab(
            value if by == "user" else scene.id(),
            quantity,
            attributes=others if by == "user" else others | {by: value},
        )

    assert [left_by_limit(await grab("x", 2)), left_by_limit(await grab("x"))] == [
        {f"{by}/{per}": 1},
        {f"{by}/{per}": 0},
    ]
    refused = await grab("x")
    assert refused.limit is not None
    assert (refused.outcome, refused.limit.left, refused.limit.resets_at, refused.retry_at) == (
        "limit_reached",
        0,
        resets_at,
        resets_at,
    )
    assert left_by_limit(await grab("y")) == {f"{by}/{per}": 2}
    scene.now = monday + (length or 400 * DAY) - 1
    assert (await grab("x")).outcome == "limit_reached"
    scene.now += 1
    assert (await grab("x")).outcome == ("granted" if length else "limit_reached")


@pytest.mark.requirement("C10")
async def test_each_user_has_a_separate_total(scene: Scene) -> None:
    """The script in the article counts the total of a user under the coupon's id, so one user uses up the
    total of another.
    """
    await scene.open(coupon(100, by_user("offer", 3), by_user("day", 3)))
    for user in ("ann", "bob", "o", "shop"):
        assert [left_by_limit(await scene.grab(user))["user/offer"] for _ in range(3)] == [2, 1, 0]
        assert (await scene.grab(user)).outcome == "limit_reached"


@pytest.mark.requirement("C10")
@pytest.mark.parametrize("first_day", ["2027-03-26", "2027-10-29"])
async def test_a_day_ends_at_local_midnight(scene: Scene, first_day: str) -> None:
    """In the article a day never ends. Here each day allows the same number, also the days on which the
    clocks in Berlin change.
    """
    zone = ZoneInfo(BERLIN)
    day = datetime.fromisoformat(first_day).replace(tzinfo=zone)
    scene.now = round(day.timestamp() * 1000) - DAY
    await scene.open(coupon(100, by_user("day", 2), timezone=BERLIN))
    for _ in range(5):
        midnight = round((day + timedelta(days=1)).timestamp() * 1000)
        scene.now = round(day.timestamp() * 1000)
        first = await scene.grab("ann")
        assert (left_by_limit(first), first.limits[0].resets_at) == ({"user/day": 1}, midnight)
        scene.now = midnight - 1
        assert await scene.outcomes("ann", "ann", "bob") == ["granted", "limit_reached", "granted"]
        day += timedelta(days=1)


@pytest.mark.parametrize(
    ("zone", "per", "begins", "ends"),
    [
        (BERLIN, "week", "2027-03-22T00:00+01:00", "2027-03-29T00:00+02:00"),
        (BERLIN, "week", "2027-03-29T00:00+02:00", "2027-04-05T00:00+02:00"),
        (BERLIN, "week", "2027-10-25T00:00+02:00", "2027-11-01T00:00+01:00"),
        (BERLIN, "hour", "2027-03-28T01:00+01:00", "2027-03-28T03:00+02:00"),
        (BERLIN, "hour", "2027-03-28T03:00+02:00", "2027-03-28T04:00+02:00"),
        # the hour from two to three occurs twice, as two hours
        (BERLIN, "hour", "2027-10-31T02:00+02:00", "2027-10-31T02:00+01:00"),
        (BERLIN, "hour", "2027-10-31T02:00+01:00", "2027-10-31T03:00+01:00"),
        ("Asia/Kolkata", "hour", "2027-01-18T10:00+05:30", "2027-01-18T11:00+05:30"),
        ("Asia/Kolkata", "day", "2027-01-18T00:00+05:30", "2027-01-19T00:00+05:30"),
        ("Asia/Shanghai", "week", "2027-01-18T00:00+08:00", "2027-01-25T00:00+08:00"),
        ("America/New_York", "day", "2027-03-14T00:00-05:00", "2027-03-15T00:00-04:00"),
        ("Africa/Cairo", "day", "2027-04-29T00:00+02:00", "2027-04-30T01:00+03:00"),  # there is no midnight
        ("Africa/Cairo", "day", "2027-04-30T01:00+03:00", "2027-05-01T00:00+03:00"),
        # the hour before midnight occurs twice
        ("Africa/Cairo", "day", "2027-10-28T00:00+03:00", "2027-10-29T00:00+02:00"),
        # the hour after midnight occurs twice
        ("America/Havana", "day", "2027-11-07T00:00-04:00", "2027-11-08T00:00-05:00"),
        ("America/Havana", "week", "2027-03-08T00:00-05:00", "2027-03-15T00:00-04:00"),
    ],
)  # fmt: skip
async def test_a_window_starts_and_ends_by_the_clock_of_the_offer_s_zone(
    scene: Scene, zone: str, per: Any, begins: str, ends: str
) -> None:
    """Grabs in the last ms before the window, in its first ms, in its last ms, and in the ms after it."""
    scene.now = at(begins) - 10 * DAY
    await scene.open(coupon(100, by_user(per, 1), timezone=zone))
    for moment, outcome in (
        (at(begins) - 1, "granted"),
        (at(begins), "granted"),
        (at(ends) - 1, "limit_reached"),
        (at(ends), "granted"),
    ):
        scene.now = moment
        answer = await scene.grab("ann")
        limit = answer.limit or answer.limits[0]
        assert answer.outcome == outcome, moment
        if at(begins) <= moment < at(ends):
            assert limit.resets_at == at(ends)


# -- limits of a campaign ------------------------------------------------------------------------------------

LORD_HOWE, KATHMANDU, ST_JOHNS = "Australia/Lord_Howe", "Asia/Kathmandu", "America/St_Johns"


def window_of_zone(zone: str, per: str, opened_at: int, moment: int) -> Any:
    """The window of a time by the calendar of the standard library; hours start at the minute at which they
    started at the opening.
    """
    local = datetime.fromtimestamp(moment / 1000, ZoneInfo(zone))
    if per != "hour":
        return local.strftime("%F" if per == "day" else "%G-%V")
    shift = datetime.fromtimestamp(opened_at / 1000, ZoneInfo(zone)).utcoffset() or timedelta()
    return (moment + round(shift.total_seconds() * 1000) % HOUR) // HOUR


# One period is for every change: two days of grabs take a second.
@pytest.mark.parametrize(
    "per", ["day", *(pytest.param(per, marks=pytest.mark.long) for per in ("hour", "week"))]
)
@pytest.mark.parametrize(
    ("zones", "first_opens", "second_opens"),
    [
        # The clock changes by half an hour between the openings, or while both offers are open.
        ((LORD_HOWE, LORD_HOWE), "2027-01-10T00:00+11:00", "2027-04-10T00:00+10:30"),
        ((LORD_HOWE, LORD_HOWE), "2027-03-30T12:00+11:00", "2027-04-03T23:30+11:00"),
        ((KATHMANDU, ST_JOHNS), "2027-03-13T23:00+05:45", "2027-03-13T23:30-03:30"),
        ((ST_JOHNS, KATHMANDU), "2027-03-13T22:00-03:30", "2027-03-13T23:50-03:30"),
        (("UTC", LORD_HOWE), "2027-10-01T00:00+00:00", "2027-10-02T14:00+00:00"),
        ((LORD_HOWE, "UTC"), "2027-10-01T00:00+10:30", "2027-10-02T23:00+10:30"),
        ((ST_JOHNS, "Asia/Shanghai"), "2027-11-05T00:00-02:30", "2027-11-06T23:40-02:30"),
    ],
)  # fmt: skip
async def test_limits_of_a_campaign_count_in_the_zone_of_its_first_offer(
    scene: Scene, zones: tuple[str, str], first_opens: str, second_opens: str, per: Any
) -> None:  # fmt: skip
    """Grabs of two offers in turn, every twenty minutes for two days, get one unit in each window of the
    first offer's zone.
    """
    limit = by_user(per, 1, scope="campaign")
    for name, zone, opens in (("w:1", zones[0], first_opens), ("w:2", zones[1], second_opens)):
        scene.now = at(opens)
        await scene.open(coupon(1_000, limit, timezone=zone), name)
    windows = set()
    for step in range(144):
        answer = await scene.grab("ann", offer=f"w:{1 + step % 2}")
        window = window_of_zone(zones[0], per, at(first_opens), scene.now)
        assert answer.outcome == ("limit_reached" if window in windows else "granted"), (step, scene.now)
        windows.add(window)
        [state] = answer.limits or [answer.limit]
        assert state is not None
        assert state.resets_at is not None
        ends = [window_of_zone(zones[0], per, at(first_opens), state.resets_at + ms) for ms in (-1, 0)]
        assert (ends[0], ends[1] != window) == (window, True)
        scene.now += 20 * MINUTE


async def test_gates_with_different_time_zone_data_agree_on_campaign_limits(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second gate has no summer time. That changes the limits of the offer it opens, but not those of the
    campaign.
    """
    scene.now = at("2027-01-18T12:00+01:00")
    both = by_user("day", 1), by_user("day", 1, scope="campaign")
    await scene.open(coupon(10, *both, timezone=BERLIN), "w:1")
    for module in ("grabstream.gate.encoding", "grabstream.models.rules.operating"):
        monkeypatch.setattr(f"{module}.offsets_of", lambda zone, at_ms: ((at_ms - at_ms % DAY, HOUR),))
    await scene.open(coupon(10, *both, timezone=BERLIN), "w:2")
    opened = await scene.events("offer.opened")
    assert [event.campaign_zone is not None for event in opened] == [False, True]
    assert (opened[1].campaign_zone.timezone, opened[1].campaign_zone.offsets) == (BERLIN, opened[0].offsets)
    # In summer the day starts at 22:00 UTC, but at 23:00 in the data of the second gate.
    scene.now = at("2027-07-19T23:30+02:00")
    assert (await scene.grab("ann", offer="w:1")).outcome == "granted"
    scene.now = at("2027-07-20T00:30+02:00")
    assert [limit.resets_at for limit in (await scene.grab("ann", offer="w:2")).limits] == [
        at("2027-07-20T01:00+02:00"), at("2027-07-21T00:00+02:00"),
    ]  # fmt: skip
    scene.now = at("2027-07-20T01:30+02:00")
    answer = await scene.grab("ann", offer="w:1")
    assert answer.limit is not None
    assert (answer.outcome, answer.limit.scope, answer.limit.resets_at) == (
        "limit_reached",
        "campaign",
        at("2027-07-21T00:00+02:00"),
    )


async def test_a_campaign_whose_offers_retired_gets_the_zone_of_its_next_first_offer(scene: Scene) -> None:
    """Zone and counters of a campaign are kept until all its offers have retired, not only the first one."""
    limit, zone, rest = by_user("day", 1, scope="campaign"), "Asia/Shanghai", {"retire_after_ms": 1}
    scene.now = at("2027-01-18T12:00+08:00")
    await scene.open(
        EnvelopeTerms(
            issuer="a", funding="f", asset="CNY", total=1, parts=1, seed="0" * 32, timezone=zone, **rest
        ),
        "w:1",
    )
    await scene.open(coupon(10, limit, **rest), "w:2")
    assert (await scene.grab("ann")).limits[0].resets_at == at("2027-01-19T00:00+08:00")

    async def end(*offers: str) -> None:
        for offer in offers:
            await scene.do(Close, offer=offer)
        scene.now += 10
        await scene.sweep_both()

    await end("w:1")
    await scene.open(coupon(10, limit, **rest), "w:3")
    assert (await scene.grab("ann")).outcome == "limit_reached"
    assert (await scene.grab("bob")).limits[0].resets_at == at("2027-01-19T00:00+08:00")
    await end("w:2", "w:3")
    await scene.open(coupon(10, limit, **rest), "w:4")
    assert (await scene.grab("ann")).limits[0].resets_at == at("2027-01-19T00:00+00:00")
    zones = [
        event.campaign_zone and event.campaign_zone.timezone for event in await scene.events("offer.opened")
    ]
    assert zones == [None, "Asia/Shanghai", "Asia/Shanghai", None]


# -- released units ------------------------------------------------------------------------------------------

FIVE_EACH = (
    by_user("hour", 5),
    by_user("day", 5),
    by_user("week", 5),
    by_user("offer", 5),
    Limit("card", "day", 5),
)


@pytest.mark.parametrize(
    ("ended_by", "after", "over"),
    [
        ("release", MINUTE, ()),
        ("release", HOUR, ("user/hour",)),
        ("release", 14 * HOUR, ("user/hour", "user/day", "card/day")),
        ("release", 7 * DAY, ("user/hour", "user/day", "card/day", "user/week")),
        ("sweep", 14 * HOUR, ("user/hour", "user/day", "card/day")),
        ("confirm too late", 14 * HOUR, ("user/hour", "user/day", "card/day")),
    ],
)
async def test_ended_holds_are_subtracted_in_the_windows_in_which_they_were_counted(
    scene: Scene, ended_by: str, after: int, over: tuple[str, ...]
) -> None:
    """Two units are held on Monday at 10:30, one more later. When the first two are released, only the
    counters of windows that have not ended are reduced.
    """
    scene.now = monday = at("2027-01-18T10:30+00:00")
    hold_ms = after + 10 if ended_by != "release" else 30 * DAY
    await scene.open(stock(100, *FIVE_EACH, hold_ms=hold_ms, max_per_grab=2))
    card = {"attributes": {"card": "c"}}
    first = await scene.grab("ann", 2, **card)
    assert set(left_by_limit(first).values()) == {3}
    scene.now = monday + after
    second = await scene.grab("ann", **card)
    assert left_by_limit(second) == {name: 4 if name in over else 2 for name in left_by_limit(first)}
    if ended_by == "release":
        assert (await scene.do(Release, grab=first.grab)).outcome == "released"
    else:
        scene.now = monday + hold_ms
        end = scene.do(Confirm, grab=first.grab) if ended_by == "confirm too late" else scene.sweep_both()
        await end
    third = await scene.grab("ann", **card)
    assert set(left_by_limit(third).values()) == {3}  # the second and the third grab count in every window
    assert third.left == 98


async def test_an_ended_hold_is_subtracted_once(scene: Scene) -> None:
    await scene.open(stock(100, by_user("offer", 5), by_user("day", 5), hold_ms=MINUTE, max_per_grab=5))
    first = await scene.grab("ann", 3)
    for _ in range(3):
        await scene.do(Release, grab=first.grab)
        await scene.sweep_both()
    scene.now += MINUTE
    await scene.sweep_both()
    assert left_by_limit(await scene.grab("ann", 1)) == {"user/offer": 4, "user/day": 4}


async def test_confirmed_units_stay_counted(scene: Scene) -> None:
    await scene.open(stock(100, by_user("offer", 5), hold_ms=MINUTE, max_per_grab=5))
    first = await scene.grab("ann", 3)
    await scene.do(Confirm, grab=first.grab, quantity=1)
    scene.now += MINUTE
    await scene.sweep_both()
    assert left_by_limit(await scene.grab("ann", 1)) == {"user/offer": 3}


# -- changed limits ------------------------------------------------------------------------------------------


@pytest.mark.requirement("C2")
async def test_limits_can_be_changed_while_the_offer_is_open(scene: Scene) -> None:
    await scene.open(coupon(100, by_user("offer", 2)))
    assert await scene.outcomes(*["ann"] * 3, "bob") == ["granted", "granted", "limit_reached", "granted"]
    await scene.amend(limits=(by_user("offer", 4),))
    assert await scene.outcomes(*["ann"] * 3) == ["granted", "granted", "limit_reached"]
    # A limit below the units taken: they stay, no more are granted, and `left` is 0.
    await scene.amend(limits=(by_user("offer", 1),))
    refused = await scene.grab("ann")
    assert refused.limit is not None
    assert (refused.outcome, refused.limit.max, refused.limit.left) == ("limit_reached", 1, 0)
    assert await scene.outcomes("bob", "eve", "eve") == ["limit_reached", "granted", "limit_reached"]
    # A second limit, then no limit.
    await scene.amend(limits=(by_user("offer", 10), by_user("day", 1)))
    named = await scene.grab("ann"), await scene.grab("ann")
    assert [(answer.outcome, answer.limit and answer.limit.per) for answer in named] == [
        ("granted", None),
        ("limit_reached", "day"),
    ]
    await scene.amend(limits=())
    assert await scene.outcomes(*["ann"] * 5) == ["granted"] * 5
    # A limit that is set again continues from its count of five: grabs without the limit were not counted.
    await scene.amend(limits=(by_user("offer", 6),))
    assert await scene.outcomes(*["ann"] * 2) == ["granted", "limit_reached"]


async def test_changed_limits_are_ordered_with_the_grabs(scene: Scene) -> None:
    """In one call, grabs before the amendment are under the old limit, grabs after it under the new limit."""
    await scene.open(coupon(100, by_user("offer", 1)))

    def grabs(count: int) -> list[Grab]:
        return [Grab(id=scene.id(), offer="o", user="ann") for _ in range(count)]

    raised, lowered = (
        Amend(id=scene.id(), offer="o", changes=Changes(limits=(by_user("offer", most),))) for most in (3, 2)
    )
    answers = await scene.decide_both([*grabs(2), raised, *grabs(1), lowered, *grabs(1)])
    outcomes = [answer.outcome for answer in answers]
    assert outcomes == ["granted", "limit_reached", "amended", "granted", "amended", "limit_reached"]


async def test_a_release_is_subtracted_from_amended_limits(scene: Scene) -> None:
    """The hold was counted under a limit that was changed, and a limit that was removed and set again."""
    await scene.open(stock(100, by_user("offer", 3), by_user("week", 3), hold_ms=HOUR, max_per_grab=3))
    held = await scene.grab("ann", 3)
    await scene.amend(limits=(by_user("offer", 1),))
    assert await scene.outcomes("ann") == ["limit_reached"]
    await scene.do(Release, grab=held.grab)
    assert await scene.outcomes("ann", "ann") == ["held", "limit_reached"]
    await scene.amend(limits=(by_user("offer", 3), by_user("week", 3)))
    assert left_by_limit(await scene.grab("ann")) == {"user/offer": 1, "user/week": 2}


async def test_a_grab_without_a_limited_attribute_is_invalid(scene: Scene) -> None:
    await scene.open(coupon(100))
    assert await scene.outcomes("ann") == ["granted"]
    await scene.amend(limits=(Limit("card", "offer", 1),))
    refused = await scene.grab("ann")
    assert refused.outcome == "invalid"
    assert "card" in (refused.message or "")
    assert (await scene.grab("ann", attributes={"card": "c"})).outcome == "granted"


# -- outcomes of limits --------------------------------------------------------------------------------------


@pytest.mark.requirement("C3")
@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (by_user("day", 2), by_user("offer", 2), "day"),
        (by_user("offer", 2), by_user("day", 2), "offer"),
        (by_user("week", 2), by_user("day", 3), "week"),
        (by_user("hour", 3), by_user("offer", 2), "offer"),
    ],
)
async def test_a_limit_takes_precedence_over_sold_out_and_the_first_limit_is_named(
    scene: Scene, first: Limit, second: Limit, named: str
) -> None:
    await scene.open(coupon(2, first, second))
    answers = [await scene.grab("ann") for _ in range(3)] + [await scene.grab("bob")]
    # The offer is sold out; ann's limit takes precedence.
    assert [(answer.outcome, answer.code) for answer in answers] == [
        ("granted", 0),
        ("granted", 0),
        ("limit_reached", 31),
        ("sold_out", 32),
    ]
    assert answers[2].limit is not None
    assert (answers[2].limit.by, answers[2].limit.per, answers[2].limit.left) == ("user", named, 0)
    await scene.do(Close)
    assert await scene.outcomes("ann", "bob") == ["over", "over"]


async def test_a_refusal_by_a_limit_says_what_is_left_and_when_it_resets(scene: Scene) -> None:
    scene.now = at("2027-01-18T10:30+00:00")
    await scene.open(coupon(100, by_user("hour", 9), by_user("day", 5), by_user("offer", 6), max_per_grab=4))
    assert (await scene.grab("ann", 3)).outcome == "granted"
    refused = await scene.grab("ann", 3)
    assert refused.limit is not None
    limit = (
        refused.limit.by,
        refused.limit.per,
        refused.limit.max,
        refused.limit.left,
        refused.limit.resets_at,
    )
    assert (refused.outcome, limit, refused.retry_at) == (
        "limit_reached",
        ("user", "day", 5, 2, at("2027-01-19T00:00+00:00")),
        at("2027-01-19T00:00+00:00"),
    )
    assert (await scene.grab("ann", 2)).outcome == "granted"
    # The next day only the limit of the whole offer refuses, and it never resets.
    scene.now += DAY
    refused = await scene.grab("ann", 2)
    assert refused.limit is not None
    assert (refused.limit.per, refused.limit.left, refused.limit.resets_at, refused.retry_at) == (
        "offer",
        1,
        None,
        None,
    )


async def test_take_up_to_grants_what_the_smallest_limit_leaves(scene: Scene) -> None:
    await scene.open(coupon(100, by_user("day", 4), by_user("offer", 6), max_per_grab=10, take="up_to"))
    answers = [await scene.grab("ann", 3), await scene.grab("ann", 10), await scene.grab("ann", 1)]
    assert [(answer.outcome, answer.quantity) for answer in answers] == [
        ("granted", 3),
        ("granted", 1),
        ("limit_reached", None),
    ]
    scene.now += DAY
    assert (await scene.grab("ann", 10)).quantity == 2


# -- the script and its server -------------------------------------------------------------------------------


@pytest.mark.requirement("C4")
async def test_the_script_s_text_is_sent_only_if_the_server_does_not_have_it(private_redis: Any) -> None:
    client, keys = private_redis
    gate = Gate(client, keys, SEALER)
    await gate.decide(
        [Open(id="open", offer="o", terms=coupon(10_000, by_user("offer", 1), by_user("day", 1)))], "decided"
    )

    async def calls(first: int, count: int) -> dict[str, int]:
        """Decides `count` lists one after the other; returns the number of calls of each Redis command."""
        await client.config_resetstat()
        for number in range(first, first + count):
            grabs = [
                Grab(id=f"g{number}-{index}", offer="o", user=f"u{number}-{index}") for index in range(80)
            ]
            assert {answer.outcome for answer in await gate.decide(grabs, "decided")} == {"granted"}
        stats = await client.info("commandstats")
        names = ("fcall", "evalsha", "eval")
        return {name: stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names}

    # Eighty grabs with two limits each are one call. Where functions cannot be used, the script's text is
    # sent only if the server does not have it.
    assert await calls(0, 5) == {"fcall": 5, "evalsha": 0, "eval": 0}
    with pytest.MonkeyPatch.context() as patch:
        use_plain_scripts(patch)
        assert await calls(5, 5) == {"fcall": 0, "evalsha": 5, "eval": 1}
        assert await calls(10, 5) == {"fcall": 0, "evalsha": 5, "eval": 0}
        await client.script_flush()
        assert await calls(15, 5) == {"fcall": 0, "evalsha": 5, "eval": 1}
    await gate.close()


@pytest.mark.requirement("C5")
async def test_keys_of_a_campaign_are_in_one_slot(scene: Scene) -> None:
    """The keys of a campaign are in one slot; different campaigns are in different slots."""
    limits = by_user("offer", 1, scope="campaign"), by_user("day", 1)
    campaigns = [f"week{number}" for number in range(12)]
    for campaign in campaigns:
        for offer in ("a", "b"):
            await scene.open(stock(5, *limits, hold_ms=HOUR), f"{campaign}:{offer}")
        held = await scene.grab("ann", offer=f"{campaign}:a")
        assert (await scene.grab("ann", offer=f"{campaign}:b")).outcome == "limit_reached"
        await scene.do(Confirm, offer=f"{campaign}:a", grab=held.grab, payment=f"pay-{campaign}")
    names = await scene.names()
    slots = {
        campaign: {key_slot(name.encode()) for name in names if f":{campaign}:" in name}
        for campaign in campaigns
    }
    assert {len(slots_of_campaign) for slots_of_campaign in slots.values()} == {1}
    assert len(set.union(*slots.values())) == scene.keys.shards


@pytest.mark.requirement("C6")
async def test_a_refused_write_of_the_outbox_changes_nothing(scene: Scene) -> None:
    """The script in the article cannot undo its writes. Here only the first write can be refused."""
    await scene.open(coupon(10, by_user("offer", 3), by_user("day", 3), hold_ms=HOUR, max_per_grab=3))
    held, taken = await scene.grab("ann", 2), await scene.grab("bob", 2)
    await scene.do(Confirm, grab=taken.grab, payment="p1")
    commands: list[AnyCommand] = [
        Grab(id="w1", offer="o", user="eve"), Grab(id="w2", offer="o", user="ann"),
        Confirm(id="w3", offer="o", grab=held.grab or ""),
        Release(id="w4", offer="o", grab=held.grab or ""),
        Redeem(id="w5", offer="o", grab=taken.grab or "", order="x"),
        Return(id="w6", offer="o", grab=taken.grab or ""),
        Amend(id="w7", offer="o", changes=Changes(limits=(by_user("offer", 9),))),
    ]  # fmt: skip
    async with scene.refusing_writes():
        before = await scene.everything()
        for command in commands:
            [answer] = await scene.gate.decide([command], "decided")
            assert (answer.outcome, "WRONGTYPE" in (answer.message or "")) == ("busy", True), answer
            assert await scene.everything() == before, command
    # With a writable outbox the same commands are decided.
    outcomes = [answer.outcome for answer in await scene.decide_both(commands)]
    assert outcomes == ["held", "held", "confirmed", "not_held", "redeemed", "returned", "amended"]


@pytest.mark.requirement("C6")
async def test_full_memory_is_busy_before_any_write(private_redis: Any) -> None:
    client, keys = private_redis
    gate = Gate(client, keys, SEALER)
    await gate.decide(
        [Open(id="open", offer="o", terms=coupon(100, by_user("offer", 1), by_user("day", 1)))], "decided"
    )

    async def everything() -> dict[bytes, bytes]:
        return {name: await client.dump(name) async for name in client.scan_iter(match="own:*")}

    before = await everything()
    grabs = [Grab(id=f"g{number}", offer="o", user=f"u{number}") for number in range(50)]
    await client.config_set("maxmemory", "1")
    assert {answer.outcome for answer in await gate.decide(grabs, "decided")} == {"busy"}
    await client.config_set("maxmemory", "0")
    assert await everything() == before
    assert [(answer.outcome, answer.left) for answer in await gate.decide(grabs, "decided")] == [
        ("granted", 99 - n) for n in range(50)
    ]
    await gate.close()


# -- one model -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("C7")
async def test_envelope_coupon_and_stock_give_the_same_outcomes(scene: Scene) -> None:
    """Two units, at most one per user: all kinds give the same outcomes, except the refusal at the limit."""
    envelope = EnvelopeTerms(issuer="shop", funding="pay", asset="CNY", total=300, parts=2, seed="5eed" * 8)
    second = {}
    for offer, terms in (
        ("e", envelope),
        ("c", coupon(2, by_user("offer", 1))),
        ("s", stock(2, by_user("offer", 1))),
    ):
        await scene.open(terms, offer)
        first, second[offer], *rest = await scene.outcomes("ann", "ann", "bob", "eve")
        assert [first, *rest] == ["granted", "granted", "sold_out"]
        granted = await scene.events("grab.granted", offer=offer)
        assert [(event.user, event.quantity, event.place, event.left) for event in granted] == [
            ("ann", 1, 1, 1),
            ("bob", 1, 2, 0),
        ]
    assert second == {"e": "already_taken", "c": "limit_reached", "s": "limit_reached"}


# -- taken and used ------------------------------------------------------------------------------------------


@pytest.mark.requirement("C8")
async def test_coupons_are_redeemed_and_unredeemed_by_order(scene: Scene) -> None:
    await scene.open(coupon(5, max_per_grab=3))
    [grab] = [(await scene.grab("ann", 3)).grab]
    table: list[tuple[Any, str, int | None, str, bool]] = [
        (Unredeem, "x", None, "not_redeemable", False), (Redeem, "x", 4, "not_redeemable", False),
        (Redeem, "x", 1, "redeemed", False), (Redeem, "x", 1, "redeemed", True),
        (Redeem, "x", 2, "conflict", False),
        (Redeem, "y", 2, "redeemed", False), (Redeem, "z", 1, "not_redeemable", False),
        (Redeem, "x", 1, "redeemed", True),
        (Unredeem, "y", None, "unredeemed", False), (Unredeem, "y", None, "unredeemed", True),
        (Redeem, "z", 1, "redeemed", False),
        (Redeem, "y", 2, "not_redeemable", False), (Redeem, "y", 1, "redeemed", False),
        (Unredeem, "y", None, "unredeemed", False),
        (Unredeem, "x", None, "unredeemed", False), (Redeem, "x", 2, "redeemed", False),
        (Redeem, "y", 1, "not_redeemable", False),
    ]  # fmt: skip
    for kind, order, quantity, outcome, repeated in table:
        answer = await scene.do(kind, grab=grab, order=order, **({"quantity": quantity} if quantity else {}))
        assert (answer.outcome, answer.repeated) == (outcome, repeated), (kind, order, quantity)
    for kind in (Redeem, Unredeem):
        assert (await scene.do(kind, grab="none", order="x")).outcome == "no_such_grab"
    used = Counter({event.order: 0 for event in await scene.events("grab.redeemed")})
    for event in await scene.events("grab.redeemed"):
        used[event.order] += event.quantity
    for event in await scene.events("grab.unredeemed"):
        used[event.order] -= event.quantity
    assert used == {"x": 2, "y": 0, "z": 1}


async def test_redeemed_units_are_not_returned(scene: Scene) -> None:
    await scene.open(coupon(5, max_per_grab=3))
    grab = (await scene.grab("ann", 3)).grab
    await scene.do(Redeem, grab=grab, order="x", quantity=2)
    refused = await scene.do(Return, grab=grab, quantity=2)
    assert (refused.outcome, refused.left) == ("not_enough_left", 1)
    assert [(await scene.do(Return, grab=grab)).quantity, (await scene.do(Return, grab=grab)).outcome] == [
        1,
        "not_enough_left",
    ]
    await scene.do(Unredeem, grab=grab, order="x")
    assert (await scene.do(Return, grab=grab)).quantity == 2
    assert [(await scene.do(kind, grab=grab, order="y")).outcome for kind in (Redeem, Unredeem)] == [
        "not_redeemable"
    ] * 2


async def test_only_confirmed_coupons_are_redeemable(scene: Scene) -> None:
    await scene.open(coupon(5, hold_ms=HOUR))
    grab = (await scene.grab("ann")).grab
    assert (await scene.do(Redeem, grab=grab, order="x")).outcome == "not_redeemable"
    await scene.do(Confirm, grab=grab)
    assert (await scene.do(Redeem, grab=grab, order="x")).outcome == "redeemed"
    await scene.open(stock(5), "s")
    assert (
        await scene.do(Redeem, grab=(await scene.grab("ann")).grab, order="x")
    ).outcome == "not_redeemable"


async def test_coupons_are_redeemable_until_valid_until(scene: Scene) -> None:
    until = NOW + DAY
    await scene.open(coupon(5, valid_until=until, max_per_grab=5))
    grab = (await scene.grab("ann", 5)).grab

    async def redeem(order: str) -> tuple[str, bool]:
        answer = await scene.do(Redeem, grab=grab, order=order)
        return answer.outcome, answer.repeated

    scene.now = until - 1
    assert await redeem("x") == ("redeemed", False)
    scene.now = until
    # A redemption before the end stays, is repeated with its answer, and can be undone.
    assert [await redeem("y"), await redeem("x")] == [("expired", False), ("redeemed", True)]
    assert (await scene.do(Unredeem, grab=grab, order="x")).outcome == "unredeemed"
    assert await redeem("x") == ("expired", False)
    await scene.amend(valid_until=until + 1)
    assert await redeem("x") == ("redeemed", False)
    scene.now = until + 1
    assert await redeem("y") == ("expired", False)
    # Granted coupons can be used after the close.
    await scene.amend(valid_until=until + DAY)
    await scene.do(Close)
    assert await redeem("y") == ("redeemed", False)


CODES = [f"CODE-{number:03}-é" for number in range(400)]


async def load_codes(scene: Scene, chunks: int = 4) -> None:
    """Loads all CODES in chunks."""
    size = len(CODES) // chunks
    for chunk in range(1, chunks + 1):
        items = tuple(CODES[(chunk - 1) * size : chunk * size])
        assert (
            await scene.do(Load, what="codes", chunk=chunk, chunks=chunks, items=items)
        ).outcome == "loaded"


@pytest.mark.parametrize("hold_ms", [None, HOUR])
async def test_codes_are_given_once_each_and_never_in_clear(scene: Scene, hold_ms: int | None) -> None:
    await scene.open(coupon(400, opens_at=NOW + 1, hold_ms=hold_ms))
    await load_codes(scene)
    scene.now = NOW + 1
    grabs = [Grab(id=f"g{number}", offer="o", user=f"u{number}") for number in range(401)]
    answers = await scene.decide_both(grabs)
    assert answers.pop().outcome == "sold_out"
    if hold_ms:
        assert {(answer.outcome, answer.coupon_code) for answer in answers} == {("held", None)}
        answers = await scene.decide_both(
            [Confirm(id=f"c{number}", offer="o", grab=f"g{number}") for number in range(400)]
        )
    assert sorted(answer.coupon_code or "" for answer in answers) == CODES
    # A repeat gets the same code; another user under the same id gets none.
    if not hold_ms:
        assert [answer.coupon_code for answer in await scene.decide_both(grabs[:400])] == [
            answer.coupon_code for answer in answers
        ]
        stolen = await scene.decide_both([Grab(id="g0", offer="o", user="thief")])
        assert (stolen[0].outcome, stolen[0].coupon_code) == ("conflict", None)
    stored = b"\n".join([*await scene.all_lines(), *[text async for text in texts_in(scene)]])
    assert b"g399" in stored
    assert [code for code in CODES if code.encode() in stored or code[:8].encode() in stored] == []


async def texts_in(scene: Scene) -> AsyncIterator[bytes]:
    """All texts in Redis except those in the outbox: in hashes, lists, sets and strings."""
    for name in await scene.names():
        kind = await scene.client.type(name)
        if kind == b"hash":
            for field, value in (await scene.client.hgetall(name)).items():
                yield field + value
        elif kind == b"list":
            for text in await scene.client.lrange(name, 0, -1):
                yield text
        elif kind == b"set":
            for text in await scene.client.smembers(name):
                yield text
        elif kind == b"string":
            yield await scene.client.get(name)


async def test_an_offer_opens_only_after_all_its_codes_are_loaded(scene: Scene) -> None:
    await scene.open(coupon(4, opens_at=NOW + 10))
    a, b, c = ("a1", "a2"), ("b1", "b2"), ("c1", "c2", "c3")
    table = [(1, a, "loaded"), (1, b, "conflict"), (2, c, "invalid")]
    for chunk, items, outcome in table:
        assert (await scene.do(Load, what="codes", chunk=chunk, chunks=2, items=items)).outcome == outcome
    scene.now = NOW + 10
    assert await scene.outcomes("ann") == ["not_open_yet"]
    assert (await scene.do(Load, what="codes", chunk=2, chunks=2, items=b)).outcome == "loaded"
    answers = [await scene.grab(user) for user in ("ann", "bob", "eve", "joe", "kim")]
    assert [answer.coupon_code for answer in answers] == ["a1", "a2", "b1", "b2", None]
    assert (await scene.do(Load, what="codes", chunk=3, chunks=3, items=a)).outcome == "invalid"


async def coupons_with_codes(scene: Scene, codes: tuple[str, ...], **terms: Any) -> None:
    """Opens an offer with these codes, and lets it take grabs."""
    await scene.open(coupon(len(codes), opens_at=NOW + 1, max_per_grab=3, **terms))
    await scene.do(Load, what="codes", chunk=1, chunks=1, items=codes)
    scene.now = NOW + 1


async def test_a_code_that_was_shown_is_never_given_again(scene: Scene) -> None:
    await coupons_with_codes(scene, ("k1", "k2", "k3"))
    first = await scene.grab("ann", 2)
    assert first.coupon_codes == ("k1", "k2")
    returned = await scene.do(Return, grab=first.grab, id="back")
    assert (returned.voided_codes, returned.left) == (("k1", "k2"), 1)
    refused = await scene.grab("bob", 2)
    assert (refused.outcome, refused.left) == ("not_enough_left", 1)
    assert (await scene.grab("bob")).coupon_code == "k3"
    assert await scene.outcomes("eve") == ["sold_out"]
    # A repeat names the codes too.
    assert (await scene.do(Return, grab=first.grab, id="back")).voided_codes == ("k1", "k2")
    [event] = await scene.events("grab.returned")
    assert [SEALER.open(event.shard, "o", "code", code) for code in event.voided_codes] == ["k1", "k2"]
    # What came back without codes goes where the rest goes.
    closed = await scene.do(Close)
    assert (closed.amount, closed.left) == (2, 0)


async def test_a_return_voids_the_codes_that_were_given_last(scene: Scene) -> None:
    """Orders count units, so those of the first codes are used first."""
    await coupons_with_codes(scene, ("k1", "k2", "k3"))
    grab = (await scene.grab("ann", 3)).grab
    await scene.do(Redeem, grab=grab, order="x", quantity=1)
    assert (await scene.do(Return, grab=grab, quantity=1)).voided_codes == ("k3",)
    assert (await scene.do(Return, grab=grab)).voided_codes == ("k2",)
    assert (await scene.grab("bob")).outcome == "sold_out"


async def test_what_no_user_has_seen_goes_back_with_its_code(scene: Scene) -> None:
    await coupons_with_codes(scene, ("k1", "k2"), hold_ms=HOUR)
    released, lapsed = await scene.grab("ann"), await scene.grab("bob")
    await scene.do(Release, grab=released.grab)
    scene.now += HOUR
    await scene.sweep_both()
    held = [await scene.grab(user) for user in ("eve", "joe")]
    assert [(await scene.do(Confirm, grab=grab.grab)).coupon_code for grab in held] == ["k1", "k2"]
    assert (await scene.do(Confirm, grab=lapsed.grab)).outcome == "expired"


async def test_units_without_codes_are_neither_held_nor_taken_again_nor_given_to_waiting_users(
    scene: Scene,
) -> None:
    await coupons_with_codes(scene, ("k1", "k2"), hold_ms=HOUR, waiting_list=True, late="retake")
    paid, lapsed = await scene.grab("ann"), await scene.grab("bob")
    await scene.do(Confirm, grab=paid.grab)
    scene.now += HOUR
    await scene.sweep_both()
    kept = await scene.grab("joe")
    waiting = await scene.grab("eve", wait=True)
    assert waiting.outcome == "waiting"
    returned = await scene.do(Return, grab=paid.grab)
    assert (returned.voided_codes, returned.left) == (("k1",), 0)
    assert await scene.events("grab.held", waited=True) == []
    assert (await scene.do(Confirm, grab=lapsed.grab)).outcome == "expired"
    # A unit that comes back with its code goes to the first who waits.
    await scene.do(Release, grab=kept.grab)
    [served] = await scene.events("grab.held", waited=True)
    assert (served.user, served.left) == ("eve", 0)
    await scene.sweep_both()
    assert (await scene.do(Confirm, grab=waiting.grab)).coupon_code == "k2"


async def test_a_return_after_the_close_voids_codes_too(scene: Scene) -> None:
    await coupons_with_codes(scene, ("k1", "k2"))
    grab = (await scene.grab("ann", 2)).grab
    assert (await scene.do(Return, grab=grab, quantity=1)).voided_codes == ("k2",)
    await scene.do(Close)
    returned = await scene.do(Return, grab=grab)
    assert (returned.voided_codes, returned.left) == (("k1",), 0)


# -- units left ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("C9")
async def test_answers_count_today_in_all_and_the_offer_separately(scene: Scene) -> None:
    """Every answer has what each limit leaves, when it resets, and the units left of the offer."""
    scene.now = begin = at("2027-01-18T12:00+00:00")
    await scene.open(coupon(20, by_user("day", 2), by_user("offer", 5)))
    table = [
        (0, "ann", 1, 4, 19), (0, "ann", 0, 3, 18), (0, "bob", 1, 4, 17),
        (1, "ann", 1, 2, 16), (1, "ann", 0, 1, 15), (1, "bob", 1, 3, 14),
        (2, "ann", 1, 0, 13), (2, "bob", 1, 2, 12),
    ]  # fmt: skip
    for day, user, today, in_all, left in table:
        scene.now = begin + day * DAY
        answer = await scene.grab(user)
        midnight = at("2027-01-19T00:00+00:00") + day * DAY
        assert [(limit.per, limit.max, limit.left, limit.resets_at) for limit in answer.limits] == [
            ("day", 2, today, midnight),
            ("offer", 5, in_all, None),
        ]
        assert (answer.left, answer.place) == (left, 20 - left)


async def test_a_repeat_has_the_counts_of_its_first_answer(scene: Scene) -> None:
    """Including the units left at that time."""
    await scene.open(coupon(20, by_user("day", 5)))
    command = Grab(id="same", offer="o", user="ann")
    [first] = await scene.decide_both([command])
    await scene.grab("ann")
    scene.now += 3 * DAY
    assert await scene.decide_both([command]) == [msgspec.structs.replace(first, repeated=True)]
    assert left_by_limit(await scene.grab("ann")) == {"user/day": 4}


async def test_holds_get_their_codes_after_the_close(scene: Scene) -> None:
    await scene.open(coupon(3, opens_at=NOW + 1, hold_ms=HOUR))
    await scene.do(Load, what="codes", chunk=1, chunks=1, items=("k1", "k2", "k3"))
    scene.now = NOW + 1
    first, second = await scene.grab("ann"), await scene.grab("bob")
    await scene.do(Close)
    assert (await scene.do(Confirm, grab=first.grab)).coupon_code == "k1"
    await scene.do(Release, grab=second.grab)
    assert await scene.client.exists(scene.keys.shard(scene.keys.shard_of_offer("o")).offer_keys("o")[4]) == 0
