"""The results of an offer, as numbers computed from its events."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from grabstream.models.events import (
    AnyEvent,
    GrabConfirmed,
    GrabGranted,
    GrabHeld,
    GrabQueued,
    GrabRedeemed,
    GrabReleased,
    GrabReturned,
    GrabUnredeemed,
    OfferAmended,
    OfferClosed,
    OfferOpened,
    PaymentRefundDue,
)


@dataclass
class Numbers:
    """The results of an offer. Units are pieces or parts. `amount`, `smallest_part`, `largest_part` and
    `rest_amount` are minor units of an envelope's currency; `paid`, `refunded` and `refund_due` those of a
    price. Times are ms since 1970 UTC.

    `grabs` got units, `given` units in sum (granted or held); `confirmed`, `expired`, `released` and
    `returned` of these ended so. `left` units remained at the end, or when it closed.
    """

    kind: str = ""
    units: int = 0
    grabs: int = 0
    given: int = 0
    amount: int | None = None
    smallest_part: int | None = None
    largest_part: int | None = None
    queued: int = 0
    confirmed: int = 0
    expired: int = 0
    released: int = 0
    returned: int = 0
    redeemed: int = 0
    payments: int = 0
    paid: int = 0
    refunded: int = 0
    refund_due: int = 0
    left: int = 0
    rest_amount: int | None = None
    sold_out_at: int | None = None
    closed_at: int | None = None

    def add(self, event: AnyEvent) -> None:
        """Adds an event of the offer, in the order of the journal."""
        if isinstance(event, OfferClosed):
            self.closed_at, self.left = event.at, event.left
            if self.kind == "envelope":
                self.rest_amount = event.amount
            return
        left = getattr(event, "left", None)
        if left is not None and self.closed_at is None:
            self.left = left
            if not left and self.sold_out_at is None and isinstance(event, GrabGranted | GrabHeld):
                self.sold_out_at = event.at
        match event:
            case GrabGranted() | GrabHeld():
                self.grabs, self.given = self.grabs + 1, self.given + event.quantity
                if self.kind == "envelope":
                    self.amount = (self.amount or 0) + event.amount
                    self.smallest_part = min(self.smallest_part or event.amount, event.amount)
                    self.largest_part = max(self.largest_part or 0, event.amount)
            case GrabQueued():
                self.queued += 1
            case GrabConfirmed():
                self.confirmed += event.quantity
                self.paid += event.paid
                self.payments += event.payment is not None
            case GrabReleased(reason="expired"):
                self.expired += event.quantity
            case GrabReleased():
                self.released += event.quantity
            case GrabReturned():
                self.returned += event.quantity
                self.refunded += sum(amount for _, amount in event.refunds)
            case GrabRedeemed():
                self.redeemed += event.quantity
            case GrabUnredeemed():
                self.redeemed -= event.quantity
            case PaymentRefundDue():
                self.refund_due += event.amount
            case OfferAmended():
                self.units += event.added - event.removed

    def open(self, event: OfferOpened, units: int) -> None:
        """The opening, with this many units."""
        self.kind, self.units, self.left = event.kind, units, units
        if event.kind == "envelope":
            self.amount = 0

    def document(self) -> dict[str, Any]:
        """The numbers as a JSON object."""
        return asdict(self)


@dataclass
class UserChanges:
    """Users who end up with more, or less, of an offer: the difference (changed - recorded) of units, or of
    the amount of an envelope, by user. Users without a difference take no memory.
    """

    by_user: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, event: AnyEvent, sign: int) -> None:
        """Adds an event of the changed history (sign 1), or of the recorded one (sign -1)."""
        if isinstance(event, GrabGranted | GrabConfirmed):
            amount = event.amount
        elif isinstance(event, GrabReturned):
            amount = -event.amount
        else:
            return
        key = event.offer, event.user
        self.by_user[key] += sign * amount
        if not self.by_user[key]:
            del self.by_user[key]

    def document(self, examples: int) -> dict[str, Any]:
        """The numbers of users of an offer with more and with less, and the largest differences."""
        ranked = sorted(self.by_user.items(), key=lambda item: (-abs(item[1]), item[0]))
        return {
            "more": sum(change > 0 for change in self.by_user.values()),
            "less": sum(change < 0 for change in self.by_user.values()),
            "largest": [
                {"offer": offer, "user": user, "difference": change}
                for (offer, user), change in ranked[:examples]
            ],
        }
