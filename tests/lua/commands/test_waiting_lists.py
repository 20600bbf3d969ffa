"""Waiting lists are served only while a new grab would be: not while the offer is paused, and not outside its
hours. Units that come back meanwhile wait for the resume, or for the next opening.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from grabstream.models.commands import Close, Confirm, Grab, Pause, Release, Resume, Return
from grabstream.models.offers import TIME_MS_MAX, Hours
from grabstream.models.rules.operating import fall_due
from tests.lua.histories.scene import BERLIN, DAY, HOUR, MINUTE, Scene, at, stock
from tests.support.shards import NOW

#: NOW is a Friday, 08:00 UTC: these hours end an hour later, and start again on Saturday at seven.
MORNING = (Hours(from_="07:00", until="09:00"),)
CLOSING, OPENING = NOW + HOUR, NOW + 23 * HOUR
PRICED = {"price": 250, "currency": "CNY"}

Returning = Callable[[Scene], Awaitable[Any]]


async def waited(scene: Scene) -> list[tuple[str, int]]:
    """The users served from the queue, and when."""
    return [(event.user, event.at) for event in await scene.events("grab.held", waited=True)]


async def due_of(scene: Scene) -> int:
    """When the sweeper next handles the scene's offer; recoveries in different steps must say the same."""
    for seed in range(3):
        await scene.compare_recovered(scene.keys.shard_of_offer(scene.offer), seed)
    shard = scene.keys.shard(scene.keys.shard_of_offer(scene.offer))
    return int(await scene.client.zscore(shard.due, scene.offer))


async def released(scene: Scene) -> None:
    assert (await scene.do(Release, grab="hold")).outcome == "released"


async def returned(scene: Scene) -> None:
    assert (await scene.do(Return, grab="paid")).outcome == "returned"


async def amended(scene: Scene) -> None:
    assert (await scene.amend(total=3)).outcome == "amended"


async def expired(scene: Scene) -> None:
    scene.now += 3 * HOUR
    await scene.sweep_both()
    assert len(await scene.events("grab.released", reason="expired")) == 1


async def paid_too_late(scene: Scene) -> None:
    scene.now += 3 * HOUR
    answer = await scene.do(Confirm, grab="hold", payment="late", paid=250, currency="CNY")
    assert answer.outcome == "expired"


RETURNING = [released, returned, amended, expired, paid_too_late]


async def one_waits(scene: Scene, **terms: Any) -> None:
    """Opens an offer of two units: one is paid, one is held for three hours, and bob waits."""
    await scene.open(stock(2, **PRICED, hold_ms=3 * HOUR, waiting_list=True, **terms))
    for name, user in (("paid", "ann"), ("hold", "eve"), ("wait", "bob")):
        [answer] = await scene.decide_both([Grab(id=name, offer="o", user=user, wait=True)])
    assert answer.outcome == "waiting"
    assert (
        await scene.do(Confirm, grab="paid", payment="p", paid=250, currency="CNY")
    ).outcome == "confirmed"


@pytest.mark.requirement("E3")
@pytest.mark.parametrize("come_back", RETURNING)
async def test_nobody_is_served_while_the_offer_is_paused(scene: Scene, come_back: Returning) -> None:
    """The resume serves; the sweeper comes for nothing before it."""
    await one_waits(scene)
    await scene.do(Pause)
    await come_back(scene)
    await scene.sweep_both()
    assert await waited(scene) == []
    assert await due_of(scene) == TIME_MS_MAX
    assert await scene.outcomes("new") == ["on_hold"]
    resumed = await scene.do(Resume)
    assert (resumed.outcome, resumed.left) == ("resumed", 0)
    [event] = await scene.events("grab.held", waited=True)
    assert (event.user, event.at, event.command) == ("bob", scene.now, resumed.id)


@pytest.mark.requirement("E3")
@pytest.mark.parametrize("come_back", RETURNING)
async def test_nobody_is_served_outside_hours(scene: Scene, come_back: Returning) -> None:
    """The sweeper serves at the next opening, and comes for nothing before it."""
    await one_waits(scene, hours=MORNING)
    scene.now = CLOSING
    await come_back(scene)
    assert await scene.outcomes("new") == ["not_open_yet"]
    assert await due_of(scene) == OPENING
    scene.now = OPENING - 1
    await scene.sweep_both()
    assert await waited(scene) == []
    scene.now = OPENING
    # Units that suffice for a queued grab are not for new ones, before the sweeper has come too.
    assert await scene.outcomes("new") == ["sold_out"]
    await scene.sweep_both()
    assert await waited(scene) == [("bob", OPENING)]


async def test_units_that_come_back_within_hours_are_given_at_once(scene: Scene) -> None:
    """In the last millisecond of the hours, in the first one, and after a resume within them."""
    await one_waits(scene, hours=MORNING)
    scene.now = CLOSING - 1
    await returned(scene)
    assert await waited(scene) == [("bob", CLOSING - 1)]
    await scene.do(Grab, user="joe", wait=True, id="joe")
    scene.now = OPENING
    await scene.do(Release, grab="wait")
    assert await waited(scene) == [("bob", CLOSING - 1), ("joe", OPENING)]


async def test_a_resume_outside_hours_serves_nobody(scene: Scene) -> None:
    """The sweeper does, at the next opening, unless the offer is paused then."""
    await one_waits(scene, hours=MORNING)
    await scene.do(Pause)
    await released(scene)
    scene.now = CLOSING
    assert (await scene.do(Resume)).left == 1
    assert await due_of(scene) == OPENING
    await scene.do(Pause)
    assert await due_of(scene) == TIME_MS_MAX
    scene.now = OPENING
    await scene.sweep_both()
    scene.now = OPENING + 2 * HOUR
    await scene.do(Resume)
    assert await waited(scene) == []
    assert await due_of(scene) == OPENING + DAY
    scene.now = OPENING + DAY
    await scene.sweep_both()
    assert await waited(scene) == [("bob", scene.now)]


async def test_the_close_is_not_missed_while_nobody_is_served(scene: Scene) -> None:
    """An offer that closes before it opens again closes then, also if an amendment outside its hours says
    so; a later closing time brings the opening back.
    """
    await one_waits(scene, hours=MORNING, closes_at=OPENING - HOUR)
    scene.now = CLOSING
    await released(scene)
    assert await due_of(scene) == OPENING - HOUR
    await scene.amend(closes_at=OPENING + DAY)
    assert await due_of(scene) == OPENING
    await scene.do(Pause)
    assert await due_of(scene) == OPENING + DAY
    await scene.amend(closes_at=CLOSING + MINUTE)
    await scene.do(Resume)
    assert await due_of(scene) == CLOSING + MINUTE
    scene.now = CLOSING + MINUTE
    # The offer is not closed yet: it can still be amended.
    await scene.amend(closes_at=OPENING + 1)
    assert await due_of(scene) == OPENING
    scene.now = OPENING + 1
    await scene.sweep_both()
    assert await waited(scene) == []
    assert [event.user for event in await scene.events("grab.released", reason="left_queue")] == ["bob"]


async def many_wait(scene: Scene, waiters: int, **terms: Any) -> None:
    """Opens an offer whose only unit is held, with `waiters` grabs on its waiting list."""
    await scene.open(stock(1, hold_ms=3 * DAY, waiting_list=True, **terms))
    users = ["first", *(f"w{number}" for number in range(waiters))]
    await scene.decide_both([Grab(id=user, offer="o", user=user, wait=True) for user in users])


async def test_a_resume_serves_as_many_as_any_command(scene: Scene) -> None:
    """Twenty-five; the sweeper serves the others, unless the offer is paused before it comes."""
    await many_wait(scene, 60)
    await scene.do(Pause)
    await scene.amend(total=59)
    await scene.do(Resume)
    assert len(await waited(scene)) == 25
    assert await due_of(scene) == scene.now
    await scene.do(Pause)
    scene.now += 1
    await scene.sweep_both()
    assert (len(await waited(scene)), await due_of(scene)) == (25, TIME_MS_MAX)
    await scene.do(Resume)
    assert len(await waited(scene)) == 50
    await scene.sweep_both()
    assert len(await waited(scene)) == 58
    assert await scene.outcomes("new") == ["sold_out"]


async def test_the_sweeper_serves_all_at_the_opening(scene: Scene) -> None:
    """In steps of twenty-five. When the hours end between them, the next opening brings the others."""
    await many_wait(scene, 60, hours=MORNING)
    scene.now = CLOSING
    await scene.amend(total=59)
    number = scene.keys.shard_of_offer("o")
    scene.now = OPENING
    assert await scene.sweeper(number).close_due(scene.now) == 1
    await scene._compare(number, fall_due(scene.states[number], scene.states[number].offers["o"], scene.now))
    assert (len(await waited(scene)), await due_of(scene)) == (25, OPENING)
    scene.now = OPENING + 2 * HOUR
    assert await due_of(scene) == OPENING
    await scene.sweep_both()
    assert (len(await waited(scene)), await due_of(scene)) == (25, OPENING + DAY)
    scene.now = OPENING + DAY
    await scene.sweep_both()
    assert len(await waited(scene)) == 58


async def test_the_opening_is_that_of_the_local_clock(scene: Scene) -> None:
    """In the night from Saturday to Sunday, Berlin's clock is set ahead from two to three: the hours that
    begin at half past two begin at three.
    """
    hours = (Hours(("sat",), "10:00", "11:00"), Hours(("sun",), "02:30", "04:00"))
    scene.now = at("2027-03-27T10:00:00+01:00")
    await one_waits(scene, hours=hours, timezone=BERLIN)
    scene.now = at("2027-03-27T11:00:00+01:00")
    await released(scene)
    assert await due_of(scene) == at("2027-03-28T03:00:00+02:00")
    scene.now = at("2027-03-28T03:00:00+02:00")
    await scene.sweep_both()
    assert await waited(scene) == [("bob", scene.now)]


async def test_a_close_while_paused_sends_waiting_grabs_away(scene: Scene) -> None:
    await one_waits(scene)
    await scene.do(Pause)
    await released(scene)
    assert (await scene.do(Close)).left == 1
    await scene.sweep_both()
    assert await waited(scene) == []
    assert len(await scene.events("grab.released", reason="left_queue")) == 1


@pytest.mark.parametrize("waits", [False, True])
async def test_a_late_payment_retakes_units_of_a_paused_offer_that_nobody_waits_for(
    scene: Scene, waits: bool
) -> None:
    """It settles a hold that its user had; but who waits comes first."""
    await scene.open(stock(1, **PRICED, hold_ms=HOUR, waiting_list=True, late="retake", hours=MORNING))
    for name in ("hold", "wait") if waits else ("hold",):
        await scene.decide_both([Grab(id=name, offer="o", user=name, wait=True)])
    await scene.do(Pause)
    scene.now = CLOSING
    answer = await scene.do(Confirm, grab="hold", payment="p", paid=250, currency="CNY")
    assert answer.outcome == ("expired" if waits else "confirmed")
    scene.now = OPENING
    await scene.do(Resume)
    assert await waited(scene) == ([("wait", OPENING)] if waits else [])
