"""Verbs for people show money in major units, and pieces as they are."""

from typing import Any

from grabstream.ops.commands.read import at, show

ENVELOPE: dict[str, Any] = {
    "offer": "lunch", "kind": "envelope", "state": "open", "asset": "CNY", "units": 5, "grabs": 2,
    "total": 1_000, "given": 202, "held": 0, "amount_left": 798, "units_left": 3, "refunded": 0, "waiting": 0,
}  # fmt: skip
GRAB: dict[str, Any] = {
    "offer": "phone", "grab": "g", "place": 1, "user_id": "ann", "state": "confirmed", "held": 0, "taken": 1,
    "redeemed": 0, "paid": 9_900, "currency": "CNY", "deadline_at": 1, "amount": 1, "part_amount": None,
    "asset": "sku:phone",
}  # fmt: skip


def test_show_has_parts_and_payments_in_major_units() -> None:
    assert show._stock_of(ENVELOPE) == (
        "2 of 5 parts taken: 2.02 CNY of 10.00 CNY; left 3 parts, 7.98 CNY; refunded 0.00 CNY"
    )
    assert "99.00 CNY" in show._grab_row(GRAB)
    assert "9,900 minor units of XTS" in show._grab_row(GRAB | {"currency": "XTS"})


def test_at_has_envelopes_parts_and_balances_in_major_units() -> None:
    assert at._offer_row(ENVELOPE)[3:] == ("10.00 CNY", "2.02 CNY", "0.00 CNY", "7.98 CNY", 0)
    stock = ENVELOPE | {"kind": "stock", "asset": "sku:phone"}
    assert at._offer_row(stock)[3:] == (1_000, 202, 0, 3, 0)
    assert at._grab_row(GRAB)[4] == 1
    part = GRAB | {"amount": 202, "part_amount": 202, "asset": "CNY"}
    assert at._grab_row(part)[4] == "2.02 CNY"
    _, row_of = at._TABLES["balances"]
    money = {"user_id": "ann", "asset": "CNY", "available": 202, "held": 0}
    assert row_of(money) == ("ann", "CNY", "2.02", "0.00")
    assert row_of(money | {"asset": "sku:phone"}) == ("ann", "sku:phone", "202", "0")


def test_show_has_units_without_codes() -> None:
    coupon = ENVELOPE | {"kind": "coupon", "asset": "coupon:lunch", "amount_left": 4, "units_left": 3}
    assert "0 held, 3 left and 1 without code, 0 returned" in show._stock_of(coupon)
    assert "0 held, 3 left, 0 returned" in show._stock_of(coupon | {"amount_left": 3})
