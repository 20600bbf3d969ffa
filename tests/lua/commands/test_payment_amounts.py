"""A payment id names one payment: the same id with another amount is a conflict and books nothing."""

from typing import Any

import pytest

from grabstream.models.answers import Answer
from grabstream.models.commands import Close, Confirm
from tests.lua.histories.scene import DAY, HOUR, Scene, stock

KNOWN = "payment: this id is recorded with {}; this payment was not booked: another payment needs another id"


async def begin(scene: Scene, **rest: Any) -> str:
    """Opens an offer of units for 7 (minor units of CNY) each, and holds three; returns the grab's id."""
    await scene.open(stock(10, max_per_grab=3, hold_ms=HOUR, **{"price": 7, "currency": "CNY"} | rest))
    grab = await scene.grab("ann", 3)
    assert grab.outcome == "held"
    assert grab.grab is not None
    return grab.grab


async def pay(
    scene: Scene, grab: str, paid: int, currency: str | None = "CNY", quantity: int | None = None
) -> Answer:
    return await scene.do(
        Confirm, grab=grab, payment="p", paid=paid, currency=currency if paid else None, quantity=quantity
    )


@pytest.mark.parametrize(
    ("paid", "currency", "quantity"),
    [
        (21, "CNY", None),
        (7, "CNY", 1),
        (14, "CNY", None),
        (14, "CNY", 1),
        (14, "EUR", 2),
        (14, "CNY", 3),
        (0, None, 2),
        (0, None, None),
    ],
)
async def test_a_served_payment_with_another_amount_is_a_conflict(
    scene: Scene, paid: int, currency: str | None, quantity: int | None
) -> None:  # fmt: skip
    grab = await begin(scene)
    first = await pay(scene, grab, 14, quantity=2)
    assert first.outcome == "confirmed"
    same = paid == 14 and currency == "CNY" and quantity in (None, 2)
    for _ in range(2):
        again = await pay(scene, grab, paid, currency, quantity)
        if same:
            assert (again.outcome, again.repeated, again.seq) == ("confirmed", True, first.seq)
        else:
            assert (again.outcome, again.seq, again.message) == (
                "conflict",
                None,
                KNOWN.format("14 CNY for 2 units"),
            )
    # The unchanged payment gets its first answer. No refund is due, and the third unit is still held.
    assert (await pay(scene, grab, 14, quantity=2)).outcome == "confirmed"
    assert await scene.events("payment.refund_due") == []
    assert [state.offers["o"].held for state in scene.states if "o" in state.offers] == [1]


async def test_a_refund_is_due_once_and_for_the_amount_of_its_payment(scene: Scene) -> None:
    grab = await begin(scene)
    assert (await pay(scene, grab, 20)).outcome == "invalid"  # 21 are due
    assert (await pay(scene, grab, 20)).repeated
    again = await pay(scene, grab, 21)
    assert (again.outcome, again.message) == ("conflict", KNOWN.format("20 CNY"))
    [event] = await scene.events("payment.refund_due")
    assert event.amount == 20
    # Another payment id may pay the whole sum.
    assert (await scene.do(Confirm, grab=grab, payment="q", paid=21, currency="CNY")).outcome == "confirmed"


async def test_free_confirmations_are_compared_by_their_units(scene: Scene) -> None:
    grab = await begin(scene, price=0)
    assert (await pay(scene, grab, 0, quantity=2)).outcome == "confirmed"
    assert (await pay(scene, grab, 0)).repeated
    again = await pay(scene, grab, 0, quantity=1)
    assert (again.outcome, again.message) == ("conflict", KNOWN.format("nothing paid for 2 units"))
    assert (await pay(scene, grab, 7, quantity=2)).outcome == "conflict"


async def test_a_payment_id_with_another_amount_is_a_conflict_after_retirement(scene: Scene) -> None:
    grab = await begin(scene, retire_after_ms=1)
    first = await pay(scene, grab, 21)
    await scene.do(Close)
    scene.now += DAY
    await scene.sweep_both()
    assert all("o" not in state.offers for state in scene.states)
    again = await pay(scene, grab, 22)
    assert (again.outcome, again.message) == ("conflict", KNOWN.format("21 CNY for 3 units"))
    assert (await pay(scene, grab, 21)).seq == first.seq
    # A payment after retirement is also booked once, with its amount.
    late = await scene.do(Confirm, grab=grab, payment="late", paid=5, currency="CNY")
    assert late.outcome == "no_such_offer"
    assert late.seq is not None
    other = await scene.do(Confirm, grab=grab, payment="late", paid=6, currency="CNY")
    assert (other.outcome, other.message) == ("conflict", KNOWN.format("5 CNY"))
