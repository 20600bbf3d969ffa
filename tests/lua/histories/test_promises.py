"""The checker of promises, tested by damage."""

import json
from typing import Any

import pytest

from tests.lua.histories.promises import check_promises

LIMITS = [{"by": "user", "per": "day", "max": 1, "scope": "campaign"}]
NOW = 1_800_000_000_000


def event(seq: int, type_: str, offer: str, **rest: Any) -> bytes:
    """The line of an event, as far as limits depend on it."""
    head = {"type": type_, "v": 1, "shard": 0, "seq": seq, "offer_seq": seq, "offer": offer, "at": NOW + seq}
    return json.dumps({**head, "command": f"c{seq}", **rest}).encode()


def opened(seq: int, offer: str) -> bytes:
    """The line of an opening with a limit of its campaign."""
    return event(seq, "offer.opened", offer, kind="coupon", terms={"limits": LIMITS, "total": 5})


def granted(seq: int, user: str) -> bytes:
    """The line of a grab of the second offer."""
    return event(seq, "grab.granted", "sale:b", grab=f"g{seq}", user=user, quantity=1, amount=1)


#: The campaign ends with its only offer; a payment comes late; then the campaign begins again.
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
    check_promises([*BEFORE, granted(5, "ann"), granted(6, "ben")])


def test_a_limit_that_is_exceeded_is_named() -> None:
    with pytest.raises(AssertionError, match="ann has 2 of 1 by user per day in sale"):
        check_promises([*BEFORE, granted(5, "ann"), granted(6, "ann")])


def test_a_refund_due_to_another_user_is_found() -> None:
    def due(**user: str) -> bytes:
        return event(
            6, "payment.refund_due", "sale:b", payment="q", amount=1, asset="CNY", grab="g5",
            outcome="not_held", **user,
        )  # fmt: skip

    for user in ({}, {"user": "ann"}):
        check_promises([*BEFORE, granted(5, "ann"), due(**user)])
    with pytest.raises(AssertionError, match="a refund due to another user than ann"):
        check_promises([*BEFORE, granted(5, "ann"), due(user="ben")])
