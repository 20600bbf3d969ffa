"""The checker of promises, tested by damage."""

import json
from typing import Any

import pytest

from tests.lua.histories.promises import PAYMENTS_KNOWN_MS, check_promises
from tests.support.shards import NOW

LIMITS = [{"by": "user", "per": "day", "max": 1, "scope": "campaign"}]


def event(seq: int, type_: str, offer: str, **rest: Any) -> bytes:
    """The line of an event, as far as limits depend on it."""
    head = {"type": type_, "v": 1, "shard": 0, "seq": seq, "offer_seq": seq, "offer": offer, "at": NOW + seq}
    return json.dumps({**head, "command": f"c{seq}", **rest}).encode()


def paid(seq: int, grab: str, **rest: Any) -> bytes:
    """The line of a confirmation: by the payment `p`, unless `rest` says otherwise."""
    about = {"grab": grab, "user": "ann", "quantity": 1, "amount": 1, "payment": "p", "paid": 7}
    return event(seq, "grab.confirmed", "sale:b", **about | rest)


def due(seq: int, grab: str, **rest: Any) -> bytes:
    """The line of a refund that is due: of the payment `p`, unless `rest` says otherwise."""
    about = {"grab": grab, "payment": "p", "amount": 1, "asset": "CNY", "outcome": "not_held"}
    return event(seq, "payment.refund_due", "sale:b", **about | rest)


def check(*lines: bytes, broken: str = "") -> None:
    """Checks that the promise `broken` is found broken by the last line, and by none before it."""
    check_promises(lines[:-1] if broken else lines)
    if broken:
        with pytest.raises(AssertionError, match=broken):
            check_promises(lines)


def opened(seq: int, offer: str) -> bytes:
    """The line of an opening with a limit of its campaign."""
    return event(seq, "offer.opened", offer, kind="coupon", terms={"limits": LIMITS, "total": 5})


def granted(seq: int, user: str) -> bytes:
    """The line of a grab of the second offer."""
    return event(seq, "grab.granted", "sale:b", grab=f"g{seq}", user=user, quantity=1, amount=1)


#: The campaign ends with its only offer; a payment comes late; then the campaign restarts.
BEFORE = [
    opened(1, "sale:a"),
    event(2, "offer.retired", "sale:a"),
    event(
        3, "payment.refund_due", "sale:a", payment="p", amount=1, asset="CNY", grab="g",
        outcome="no_such_offer",
    ),
    opened(4, "sale:b"),
]  # fmt: skip


def test_a_late_payment_before_the_first_offer_of_a_campaign_is_no_offer() -> None:
    check(*BEFORE, granted(5, "ann"), granted(6, "ben"))


def test_a_limit_that_is_exceeded_is_named() -> None:
    check(*BEFORE, granted(5, "ann"), granted(6, "ann"), broken="ann has 2 of 1 by user per day in sale")


def test_a_refund_due_to_another_user_is_found() -> None:
    for user in ({}, {"user": "ann"}):
        check(*BEFORE, granted(5, "ann"), due(6, "g5", payment="q", **user))
    of_ben = due(6, "g5", payment="q", user="ben")
    check(*BEFORE, granted(5, "ann"), of_ben, broken="a refund due to another user than ann")


IN_BASKET: dict[str, Any] = {"basket": "b"}


def test_a_payment_settles_each_grab_of_one_basket_once() -> None:
    parts = [
        granted(2, "ann"),
        paid(5, "g1", **IN_BASKET),
        due(6, "g2", **IN_BASKET),
        paid(7, "g3", **IN_BASKET),
    ]
    check(*parts)
    for again in (
        paid(8, "g1", **IN_BASKET),
        due(8, "g2", **IN_BASKET),
        paid(8, "g4"),
        paid(8, "g4", basket="other"),
        due(8, "g4", outcome="no_such_grab"),
    ):
        check(*parts, again, broken="a payment was used twice")
    check(paid(5, "g1"), paid(6, "g2", **IN_BASKET), broken="a payment was used twice")
    # A payment that is not known any more is another one.
    check(*parts, paid(8, "g1", **IN_BASKET, at=NOW + PAYMENTS_KNOWN_MS + 9))


def test_refunds_of_a_payment_are_bounded_by_grab() -> None:
    def returned(seq: int, grab: str, amount: int) -> bytes:
        about = {"grab": grab, "user": "ann", "quantity": 1, "amount": 1, "refunds": [["p", amount]]}
        return event(seq, "grab.returned", "sale:b", **about)

    parts = [paid(5, "g1", **IN_BASKET), paid(6, "g2", **IN_BASKET), returned(7, "g1", 7)]
    check(*parts, returned(8, "g2", 6))
    for grab in ("g1", "g2"):
        check(*parts, returned(8, "g2", 6), returned(9, grab, 2), broken="the refunds exceed the payment")


def test_a_conflict_is_about_more_money_of_a_known_payment() -> None:
    def conflict(seq: int, grab: str, **rest: Any) -> bytes:
        return due(seq, grab, outcome="conflict", user="ben", **rest)

    check(paid(5, "g1"), conflict(6, "g1"), conflict(7, "g1", amount=2), conflict(8, "none", asset="EUR"))
    check(paid(5, "g1"), conflict(6, "g1", payment="q"), broken="a conflict with a payment that is not known")
    check(paid(5, "g1"), conflict(6, "g1", amount=0), broken="a conflict about no money")
    # It settles nothing: the payment stays known for its grab.
    check(paid(5, "g1"), conflict(6, "g2"), paid(7, "g2"), broken="a payment was used twice")


@pytest.mark.parametrize("type_", ["grab.held", "grab.granted"])
def test_who_is_served_while_new_grabs_are_refused_is_named(type_: str) -> None:
    def served(seq: int, **rest: Any) -> bytes:
        about = {"grab": f"g{seq}", "user": f"u{seq}", "quantity": 1, "amount": 1, "waited": True}
        return event(seq, type_, "sale:b", **about | rest)

    def hours(*spans: dict[str, Any], zone: str) -> bytes:
        return event(1, "offer.opened", "sale:b", kind="coupon", terms={"hours": spans, "timezone": zone})

    pause, resume = event(2, "offer.paused", "sale:b"), event(3, "offer.resumed", "sale:b")
    check(opened(1, "sale:b"), pause, resume, served(4))
    check(opened(1, "sale:b"), pause, served(4), broken="was served by a paused offer")
    # It is Friday, 08:00 in UTC, and 09:00 in Berlin.
    for span in ({"from": "09:00", "until": "10:00"}, {"weekdays": ["fri"]}):
        check(hours({"weekdays": ["mon"]}, span, zone="Europe/Berlin"), served(2))
    for span in ({"from": "08:00", "until": "09:00"}, {"weekdays": ["thu", "sat"]}):
        check(hours(span, zone="Europe/Berlin"), served(2), broken="was served outside hours")
