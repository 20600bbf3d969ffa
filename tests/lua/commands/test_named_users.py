"""Commands about a grab that name its user, and answers that name the user of their command."""

from typing import Any

import pytest

from grabstream.models.answers import Answer
from grabstream.models.commands import Close, Confirm, Extend, Grab, Redeem, Release, Return, Unredeem
from grabstream.models.offers import EnvelopeTerms
from tests.lua.histories.scene import MINUTE, Scene, coupon, stock

PRICED: dict[str, Any] = {"price": 250, "currency": "CNY", "hold_ms": MINUTE, "extensions": 9}
PAID: dict[str, Any] = {"paid": 250, "currency": "CNY"}


async def held(scene: Scene) -> str:
    """The id of a grab that holds a unit for ann."""
    await scene.open(stock(5, **PRICED))
    grab = (await scene.grab("ann")).grab
    assert grab is not None
    return grab


async def users_of_refunds(scene: Scene) -> dict[str, str | None]:
    """The users whom the refunds due name, by payment."""
    return {event.payment: event.user for event in await scene.events("payment.refund_due")}


@pytest.mark.parametrize(
    ("kind", "fields", "outcome"),
    [
        (Confirm, {"payment": "p", **PAID}, "confirmed"),
        (Release, {}, "released"),
        (Extend, {}, "extended"),
    ],
)
async def test_a_hold_is_settled_only_for_its_user(
    scene: Scene, kind: Any, fields: dict[str, Any], outcome: str
) -> None:
    grab = await held(scene)
    others = {**fields, "payment": "p-bob"} if "payment" in fields else fields
    assert (await scene.do(kind, grab=grab, user="bob", **others)).outcome == "no_such_grab"
    assert (await scene.do(kind, grab=grab, user="ann", **fields)).outcome == outcome


@pytest.mark.parametrize("kind", [Redeem, Return])
async def test_units_are_used_only_by_their_user(scene: Scene, kind: Any) -> None:
    await scene.open(coupon(5))
    grab = (await scene.grab("ann")).grab
    fields = {"order": "o1"} if kind is Redeem else {}
    assert (await scene.do(kind, grab=grab, user="bob", **fields)).outcome == "no_such_grab"
    assert (await scene.do(kind, grab=grab, user="ann", **fields)).positive
    if kind is Redeem:
        assert (await scene.do(Unredeem, grab=grab, user="bob", order="o1")).outcome == "no_such_grab"
        assert (await scene.do(Unredeem, grab=grab, user="ann", order="o1")).outcome == "unredeemed"


async def test_only_a_waiter_leaves_the_waiting_list_in_their_name(scene: Scene) -> None:
    await scene.open(stock(1, waiting_list=True, hold_ms=MINUTE))
    await scene.grab("ann")
    waiting = await scene.grab("ben", wait=True)
    assert waiting.outcome == "waiting"
    assert (await scene.do(Release, grab=waiting.grab, user="ann")).outcome == "no_such_grab"
    assert (await scene.do(Release, grab=waiting.grab, user="ben")).outcome == "released"


async def test_money_for_the_grab_of_another_user_is_paid_back_once(scene: Scene) -> None:
    grab = await held(scene)
    answers = [await scene.do(Confirm, grab=grab, user="bob", payment="p", **PAID) for _ in range(2)]
    assert [answer.outcome for answer in answers] == ["no_such_grab"] * 2
    [due] = await scene.events("payment.refund_due")
    assert (due.payment, due.amount, due.outcome) == ("p", 250, "no_such_grab")
    # The hold is as it was; its own payment confirms it.
    assert (await scene.do(Confirm, grab=grab, user="ann", payment="q", **PAID)).outcome == "confirmed"


async def test_a_refund_due_names_its_user_where_one_is_known(scene: Scene) -> None:
    """The user whom the confirmation names, else the user of the grab."""
    grab = await held(scene)
    confirmed = {"grab": grab, "payment": "named", **PAID}
    sent = [
        {"id": "c1", "grab": grab, "payment": "others", "user": "bob", **PAID},
        {"id": "c2", "grab": grab, "payment": "less", **PAID, "paid": 7},
        {"id": "c3", "grab": grab, "payment": "less-named", "user": "ann", **PAID, "paid": 7},
        {"id": "c4", "grab": "none", "payment": "unknown", **PAID},
        {"id": "c5", "grab": "none", "payment": "unknown-named", "user": "eve", **PAID},
    ]
    first = [await scene.do(Confirm, **fields) for fields in sent]
    assert [answer.outcome for answer in first] == [
        "no_such_grab", "invalid", "invalid", "no_such_grab", "no_such_grab"
    ]  # fmt: skip
    assert (await scene.do(Confirm, **confirmed)).outcome == "confirmed"
    assert (await scene.do(Confirm, **confirmed | {"payment": "twice"})).outcome == "not_held"
    assert await users_of_refunds(scene) == {
        "others": "bob", "less": "ann", "less-named": "ann", "unknown": None, "unknown-named": "eve",
        "twice": "ann",
    }  # fmt: skip
    lines = [line for line in await scene.all_lines() if b'"payment":"unknown"' in line]
    assert [b'"user"' in line for line in lines] == [False]
    again = [await scene.do(Confirm, **fields) for fields in sent]
    assert [(answer.seq, answer.repeated) for answer in again] == [(answer.seq, True) for answer in first]
    assert len(await scene.events("payment.refund_due")) == 6


async def test_a_refund_due_for_an_expired_hold_names_the_user_of_the_grab(scene: Scene) -> None:
    """The same call ends the hold."""
    grab = await held(scene)
    scene.now += 2 * MINUTE
    assert (await scene.do(Confirm, grab=grab, payment="late", **PAID)).outcome == "expired"
    assert await users_of_refunds(scene) == {"late": "ann"}


async def test_a_refund_due_of_a_retired_offer_names_the_user_of_its_command_only(scene: Scene) -> None:
    await scene.open(stock(5, **PRICED, retire_after_ms=1))
    grab = (await scene.grab("ann")).grab
    await scene.do(Close)
    scene.now += 10 * MINUTE
    await scene.sweep_both()
    for payment, named in (("unnamed", {}), ("named", {"user": "bob"})):
        answer = await scene.do(Confirm, grab=grab, payment=payment, **named, **PAID)
        assert answer.outcome == "no_such_offer"
    assert await users_of_refunds(scene) == {"unnamed": None, "named": "bob"}


async def test_a_refund_due_of_an_envelope_names_the_user_of_its_command_only(scene: Scene) -> None:
    """Users of one envelope may have grabs of one id."""
    await scene.open(EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=10, parts=2, seed="00" * 16))
    pair = [Grab(id="g", offer=scene.offer, user=user) for user in ("ann", "bob")]
    assert [answer.outcome for answer in await scene.decide_both(pair)] == ["granted"] * 2
    for payment, named in (("unnamed", {}), ("named", {"user": "ann"})):
        answer = await scene.do(Confirm, grab="g", payment=payment, **named, **PAID)
        assert answer.outcome == "no_such_grab"
    assert await users_of_refunds(scene) == {"unnamed": None, "named": "ann"}


async def test_a_recorded_payment_is_not_told_to_another_user(scene: Scene) -> None:
    grab = await held(scene)
    first = await scene.do(Confirm, grab=grab, user="ann", payment="p", **PAID)
    assert first.outcome == "confirmed"
    late = await scene.do(Confirm, grab=grab, user="ann", payment="late", **PAID)
    assert late.outcome == "not_held"
    for payment in ("p", "late"):
        for other in (PAID, {"paid": 7, "currency": "CNY"}, {**PAID, "quantity": 3}):
            told = await scene.do(Confirm, grab=grab, user="bob", payment=payment, **other)
            assert (told.outcome, told.seq, told.quantity) == ("no_such_grab", None, None)
            assert "was not booked" in (told.message or "")
            assert "250" not in (told.message or "")
    assert (await scene.do(Confirm, grab=grab, payment="p", **PAID)).outcome == "confirmed"
    assert len(await scene.events("payment.refund_due")) == 1


async def test_a_payment_of_a_retired_offer_is_told_to_nobody_by_name(scene: Scene) -> None:
    await scene.open(stock(5, **PRICED, retire_after_ms=1))
    grab = (await scene.grab("ann")).grab
    assert (await scene.do(Confirm, grab=grab, user="ann", payment="p", **PAID)).positive
    await scene.do(Close)
    scene.now += 10 * MINUTE
    await scene.sweep_both()
    for user in ("ann", "bob"):
        told = await scene.do(Confirm, id=f"c-{user}", grab=grab, user=user, payment="p", **PAID)
        assert (told.outcome, told.repeated) == ("no_such_offer", False)
    assert (await scene.do(Confirm, grab=grab, payment="p", **PAID)).outcome == "confirmed"
    # Money that was not reported before is due for a refund, once, for any named user.
    answers = [await scene.do(Confirm, grab=grab, user="bob", payment="q", **PAID) for _ in range(2)]
    assert [answer.outcome for answer in answers] == ["no_such_offer"] * 2
    assert len({answer.seq for answer in answers}) == 1
    assert [event.payment for event in await scene.events("payment.refund_due")] == ["q"]


async def test_the_user_is_part_of_the_body(scene: Scene) -> None:
    grab = await held(scene)
    assert (await scene.do(Release, id="r", grab=grab, user="ann")).outcome == "released"
    repeated = await scene.do(Release, id="r", grab=grab, user="ann")
    assert (repeated.outcome, repeated.repeated, repeated.user) == ("released", True, "ann")
    assert (await scene.do(Release, id="r", grab=grab)).outcome == "conflict"
    assert (await scene.do(Release, id="r", grab=grab, user="bob")).outcome == "conflict"


async def test_answers_name_the_user_of_their_command(scene: Scene) -> None:
    await scene.open(EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=10, parts=1, seed="00" * 16))

    async def answers(**fields: Any) -> list[Answer]:
        commands = [
            Grab(id=scene.id(), offer=scene.offer, user=user, **fields) for user in ("ann", "ann", "bob")
        ]
        return await scene.decide_both([*commands, commands[0]])

    for fields in ({}, {"quantity": 2}):
        assert [answer.user for answer in await answers(**fields)] == ["ann", "ann", "bob", "ann"]
    assert (await scene.do(Release, grab="none", user="ann")).user == "ann"
    assert (await scene.do(Release, grab="none")).user is None
