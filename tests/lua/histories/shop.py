"""A shop with a crowd: a long random history of coupon and stock offers, weighted so that rare events happen
often.

Everything is drawn from `random.Random(seed)`, so the seed alone repeats a history.
"""

import random
from collections.abc import Mapping
from typing import Any

from grabstream.models.calendar import DAY_MS
from grabstream.models.commands import (
    Adjust,
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Extend,
    Grab,
    Load,
    Open,
    Pause,
    Redeem,
    Release,
    Resume,
    Return,
    Unredeem,
)
from grabstream.models.entries import Entry
from grabstream.models.offers import Changes, CouponTerms, Limit, StockTerms
from grabstream.models.rules import Offer

LIMITS = (Limit("user", "offer", 30), Limit("user", "day", 9), Limit("card", "week", 25, "campaign"))
ZONES = ("Europe/Berlin", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC")
OTHER_LIMITS = (
    (Limit("user", "hour", 4), Limit("card", "week", 30, "campaign")),
    (Limit("user", "offer", 20), Limit("user", "day", 7), Limit("user", "day", 12, "campaign")),
    (Limit("card", "hour", 9, "campaign"), Limit("user", "week", 20)),
)
PASSES_MS = (1, 1_000, 30_000, 61_000, DAY_MS // 3)


class Shop:
    """Draws the next commands, or the time until them, from the offers that are open now."""

    def __init__(
        self, seed: int, now: int, names: tuple[str, ...] = ("m:a", "m:b", "s", "t"), total: int = 40
    ) -> None:
        self.total = total
        self.random = random.Random(seed)
        self.names = list(names)
        self.commands = 0
        self.now = now

    def command(self, make: Any, offer: str, **rest: Any) -> AnyCommand:
        """A command under a new id."""
        self.commands += 1
        command: AnyCommand = make(id=f"c{self.commands}", offer=offer, **rest)
        return command

    def opening(self, index: int, codes: bool = True) -> list[AnyCommand]:
        """Commands that open the offer with this index: the first hands out codes, the second retakes units
        for late payments, the third has a grace time, the fourth grants at once.
        """
        offer = self.names[index]
        kind = CouponTerms if index in (0, 3) else StockTerms
        held: dict[str, Any] = {
            "hold_ms": 60_000,
            "extensions": 2,
            "price": 7,
            "currency": "CNY",
            "waiting_list": True,
        }
        late: dict[str, Any] = ({}, {"late": "retake"}, {"late": "grace", "grace_ms": 5_000}, {})[index]
        terms = kind(
            issuer="shop", total=self.total, limits=LIMITS, max_per_grab=3,
            timezone=self.random.choice(ZONES), return_restores=index != 2,
            opens_at=self.now + 10, take="up_to" if index == 1 else "all", retire_after_ms=DAY_MS,
            **((held if index < 3 else {}) | late),
        )  # fmt: skip
        commands = [self.command(Open, offer, terms=terms)]
        if index == 0 and codes:
            items = tuple(f"sealed:{number}" for number in range(self.total))
            commands.append(
                self.command(Load, offer, what="codes", chunk=1, chunks=1, items=items, operator="olga")
            )
        return commands

    def next(self, offers: Mapping[str, Offer]) -> list[AnyCommand] | int:
        """The next commands, or the ms that pass before the next ones."""
        draw = self.random
        index = draw.randrange(len(self.names))
        name = self.names[index]
        kind = draw.choices(
            ("grab", "confirm", "release", "extend", "return", "redeem", "unredeem", "offer_command", "time"),
            (40, 22, 6, 4, 8, 8, 3, 2, 14),
        )[0]
        if kind == "time":
            return draw.choice(PASSES_MS)
        if kind == "grab":
            rest = {
                "quantity": draw.randint(1, 3),
                "attributes": {"card": f"card{draw.randrange(6)}"},
                "wait": draw.random() < 0.5,
            }
            if self.commands % 3 == 0:
                rest["metadata"] = {"form_id": f"f{self.commands}", "a": 'a "b" é'}
            return [self.command(Grab, name, user=f"u{draw.randrange(8)}", **rest)]
        if kind == "offer_command":
            return self.offer_command(index, name)
        offer = offers.get(name)
        grab = draw.choice((list(offer.grabs) if offer else [])[-30:] or ["none"])
        taken = offer.grabs.get(grab) if offer else None
        if kind == "confirm":
            units = draw.choice((None, None, None, 1, 1, 9))
            due = (taken.price * (units or taken.held or taken.lapsed)) if taken else 7
            paid = draw.choice((due, due, due, due, 5))
            money: dict[str, Any] = {}
            if paid:
                number = draw.randrange(100_000)
                # Every fourth is as odd as a payment side may choose.
                odd = f'p /#"{name[:1]}\\{number}é'
                money = {"payment": f"p-{name[:1]}-{number}" if number % 4 else odd, "currency": "CNY"}
            return [self.command(Confirm, name, grab=grab, paid=paid, quantity=units, **money)]
        if kind == "return":
            return [
                self.command(
                    Return,
                    name,
                    grab=grab,
                    quantity=draw.choice((None, 1)),
                    reason='back\\slash and "quotes"',
                )
            ]
        if kind in ("redeem", "unredeem"):
            return [
                self.command(
                    Redeem if kind == "redeem" else Unredeem, name, grab=grab, order=f"o{draw.randrange(3)}"
                )
            ]
        return [self.command(Release if kind == "release" else Extend, name, grab=grab)]

    def offer_command(self, index: int, name: str) -> list[AnyCommand]:
        """A command of an operator about the offer."""
        make, rest = self.random.choice(
            [
                (Pause, {}), (Resume, {}), (Resume, {}), (Resume, {}),
                (Amend, {"changes": Changes(total=self.random.randint(self.total * 3 // 4,
                self.total * 3 // 2)), "operator": "olga"}),
                (Amend, {"changes": Changes(title='new \\ "title"', price=9)}),
                (Amend, {"changes": Changes(limits=self.random.choice((LIMITS, *OTHER_LIMITS)))}),
                (Adjust, {"transfers": (Entry("CNY", "issuer:shop", "wallet:u1", 5),
                Entry("CNY", "receivable:u1", 'external:p "\\', 1)), "reason": "too late",
                "approved_by": "boss"}),
            ]
        )  # fmt: skip
        return [self.command(make, name, **rest)]

    def replace(self, index: int) -> list[AnyCommand]:
        """Commands that close the offer with this index and open its successor, in the same campaign."""
        old = self.names[index]
        close = self.command(Close, old, operator="olga")
        base, _, generation = old.partition(".")
        self.names[index] = f"{base}.{int(generation or 0) + 1}"
        return [close, *self.opening(index, codes=False)]
