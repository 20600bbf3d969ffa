"""The tally of a story: applies the events of the journal in memory by simple arithmetic, and checks them."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from grabstream.models.events import AnyEvent
from grabstream.models.identifiers import campaign_of
from grabstream.models.offers import Changes, EnvelopeTerms, PieceTerms, terms_of
from grabstream.models.transfers import GUARDED_ACCOUNTS, Transfer, transfers_of
from grabstream.workshop.rehearsal.clock import Clock, shown


@dataclass
class GrabTally:
    """A grab by its events, in units. `counted` are (units, the counters of limits they count under), the
    oldest first; `orders` are the orders that use it.
    """

    offer: str
    user: str
    waiting: int = 0
    held: int = 0
    taken: int = 0
    redeemed: int = 0
    deadline: int = 0
    counted: list[tuple[int, list[tuple[str, ...]]]] = field(default_factory=list)
    orders: dict[str, int] = field(default_factory=dict)


@dataclass
class OfferTally:
    """An offer by its events, in units; money in minor units of its currency. `given_back` units returned to
    the issuer; `uncoded` came back without their codes, and are available to no user.
    """

    terms: PieceTerms
    asset: str
    total: int
    left: int
    seq: int = 0
    held: int = 0
    taken: int = 0
    given_back: int = 0
    uncoded: int = 0
    closed_at: int | None = None
    retired_at: int | None = None
    sums: Counter[str] = field(default_factory=Counter)


class Tally:
    """The state after all events. `checked` counts what was checked, `problems` has the faults, by the name
    of the check.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.events: dict[tuple[int, int], AnyEvent] = {}
        self.offers: dict[str, OfferTally] = {}
        self.grabs: dict[str, GrabTally] = {}
        self.accounts: Counter[tuple[str, str]] = Counter()
        #: payment → its events, as (type, amount), in order
        self.payments: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        self.refunds: Counter[str] = Counter()
        self.used: Counter[tuple[str, ...]] = Counter()
        self.checked: Counter[str] = Counter()
        self.problems: defaultdict[str, list[str]] = defaultdict(list)
        #: campaign → the time zone of its first offer, which its limits count in
        self._zones: dict[str, str] = {}
        self._takers: dict[str, Callable[[Any, Any], None]] = {
            "offer.amended": self._amended, "offer.closed": self._closed, "offer.retired": self._retired,
            "grab.granted": self._granted, "grab.held": self._held, "grab.queued": self._queued,
            "grab.extended": self._extended,
            "grab.confirmed": self._confirmed, "grab.released": self._released,
            "grab.returned": self._returned,
            "grab.redeemed": self._redeemed, "grab.unredeemed": self._unredeemed,
            "payment.refund_due": self._refund_due,
        }  # fmt: skip

    def check(self, name: str, holds: bool, problem: str, weight: int = 1) -> None:
        """Counts a check, and keeps the problem when the check does not hold."""
        self.checked[name] += weight
        if not holds:
            self.problems[name].append(problem)

    def take(self, event: AnyEvent) -> None:
        """Applies and checks the next event."""
        self.events[event.shard, event.seq] = event
        for transfer in transfers_of(event):
            self._move(event, transfer)
        tag = str(event.__struct_config__.tag)
        if tag == "offer.opened":
            self._opened(event)
        offer = self.offers[event.offer]
        offer.seq += 1
        where = f"{event.offer}, seq {event.seq} ({tag})"
        self.check(
            "every offer's events without a gap",
            event.offer_seq == offer.seq,
            f"{where}: its offer_seq is {event.offer_seq}, expected {offer.seq}",
        )
        if tag in self._takers:
            self._takers[tag](event, offer)
        left = getattr(event, "left", None)
        if left is not None and tag != "offer.closed":
            self.check(
                "never over-sold",
                left == offer.left >= 0,
                f"{where}: says {left} left, its events lead to {offer.left}",
            )
        units = offer.left + offer.uncoded + offer.held + offer.taken + offer.given_back
        self.check(
            "left + held + taken = total",
            units == offer.total and min(offer.held, offer.taken) >= 0,
            f"{where}: {offer.left} left + {offer.uncoded} without codes + {offer.held} held + {offer.taken} "
            f"taken + {offer.given_back} returned to the issuer ≠ {offer.total}",
        )

    def _move(self, event: AnyEvent, transfer: Transfer) -> None:
        asset, debit, credit, amount = transfer
        self.accounts[debit, asset] -= amount
        self.accounts[credit, asset] += amount
        if debit.startswith(GUARDED_ACCOUNTS):
            self.check(
                "no account below 0",
                self.accounts[debit, asset] >= 0,
                f"seq {event.seq}: {debit} has {self.accounts[debit, asset]}",
            )

    # -- offers

    def _opened(self, event: Any) -> None:
        terms = terms_of(event.terms)
        assert not isinstance(terms, EnvelopeTerms)
        self._zones.setdefault(campaign_of(event.offer), terms.timezone)
        self.offers[event.offer] = OfferTally(terms, event.asset, event.total, event.total)

    def _amended(self, event: Any, offer: OfferTally) -> None:
        changes = msgspec.json.decode(event.changes, type=Changes)
        offer.terms = msgspec.structs.replace(offer.terms, **changes.fields())
        offer.total += event.added - event.removed
        offer.left += event.added - event.removed

    def _closed(self, event: Any, offer: OfferTally) -> None:
        self.check(
            "never over-sold",
            event.left == offer.left,
            f"{event.offer}: closed with {event.left} left, its events lead to {offer.left}",
        )
        self._in_time("closed and retired in time", event, offer.terms.closes_at or event.at)
        offer.given_back += offer.left + offer.uncoded
        offer.left, offer.uncoded, offer.closed_at = 0, 0, event.at

    def _retired(self, event: Any, offer: OfferTally) -> None:
        self._in_time(
            "closed and retired in time", event, (offer.closed_at or 0) + offer.terms.retire_after_ms
        )
        offer.retired_at = event.at

    def _in_time(self, name: str, event: AnyEvent, due: int) -> None:
        problem = f"{event.offer}, seq {event.seq}: at {shown(event.at)}, was due at {shown(due)}"
        self.check(name, self._clock.in_time(due, event.at), problem)

    def _return_units(self, offer: OfferTally, quantity: int) -> None:
        if offer.closed_at is None:
            offer.left += quantity
        else:
            offer.given_back += quantity

    # -- grabs

    def _granted(self, event: Any, offer: OfferTally) -> None:
        grab = self._grab(event, offer)
        offer.left, offer.taken, grab.taken = (
            offer.left - event.quantity,
            offer.taken + event.quantity,
            event.quantity,
        )
        offer.sums["sold"] += event.quantity

    def _held(self, event: Any, offer: OfferTally) -> None:
        if event.waited:
            grab = self.grabs[event.grab]
            self._uncount(grab, grab.waiting - event.quantity)
            grab.waiting = 0
        else:
            grab = self._grab(event, offer)
        grab.held, grab.deadline = event.quantity, event.deadline_at
        offer.left, offer.held = offer.left - event.quantity, offer.held + event.quantity
        due, price = event.due or 0, offer.terms.price or 0
        self.check(
            "what is due = price × units",
            due == price * event.quantity,
            f"{event.grab}: {due} due for {event.quantity} at {price}",
        )

    def _queued(self, event: Any, offer: OfferTally) -> None:
        self._grab(event, offer).waiting = event.quantity
        offer.sums["waited"] += 1

    def _extended(self, event: Any, offer: OfferTally) -> None:
        self.grabs[event.grab].deadline = event.deadline_at

    def _confirmed(self, event: Any, offer: OfferTally) -> None:
        grab = self.grabs[event.grab]
        if event.retaken:
            offer.left -= event.quantity
            self._count(grab, event.quantity, self._counters(event.offer, grab.user, offer.terms, event.at))
        else:
            offer.held, grab.held = offer.held - event.quantity, grab.held - event.quantity
        offer.taken, grab.taken = offer.taken + event.quantity, grab.taken + event.quantity
        offer.sums["sold"] += event.quantity
        offer.sums["revenue"] += event.paid
        if event.payment:
            self.payments[event.payment].append(("grab.confirmed", event.paid))

    def _released(self, event: Any, offer: OfferTally) -> None:
        grab = self.grabs[event.grab]
        if event.reason == "left_queue":
            self._uncount(grab, grab.waiting)
            grab.waiting = 0
            return
        offer.held, grab.held = offer.held - event.quantity, grab.held - event.quantity
        self._uncount(grab, event.quantity)
        self._return_units(offer, event.quantity)
        offer.sums["expired" if event.reason == "expired" else "released"] += event.quantity
        if event.reason == "expired":
            self._in_time("expiry at its deadline", event, grab.deadline + offer.terms.grace_ms)

    def _returned(self, event: Any, offer: OfferTally) -> None:
        grab = self.grabs[event.grab]
        offer.taken, grab.taken = offer.taken - event.quantity, grab.taken - event.quantity
        if event.restored:
            self._uncount(grab, event.quantity)
        if event.voided_codes and offer.closed_at is None:
            offer.uncoded += event.quantity
        else:
            self._return_units(offer, event.quantity)
        offer.sums["returned"] += event.quantity
        for payment, amount in event.refunds:
            self.refunds[payment] += amount
            offer.sums["refunded"] += amount

    def _redeemed(self, event: Any, offer: OfferTally) -> None:
        grab = self.grabs[event.grab]
        self.check(
            "an order uses a coupon once",
            event.order not in grab.orders,
            f"{event.grab}: used twice for {event.order}",
        )
        grab.orders[event.order] = event.quantity
        grab.redeemed += event.quantity
        self.check(
            "nothing used beyond what was taken",
            grab.redeemed <= grab.taken,
            f"{event.grab}: {grab.redeemed} used of {grab.taken}",
        )
        offer.sums["redeemed"] += event.quantity

    def _unredeemed(self, event: Any, offer: OfferTally) -> None:
        grab = self.grabs[event.grab]
        self.check(
            "an order uses a coupon once",
            event.order in grab.orders,
            f"{event.grab}: {event.order} did not use it",
        )
        grab.redeemed -= grab.orders.pop(event.order, 0)
        offer.sums["unredeemed"] += event.quantity

    def _refund_due(self, event: Any, offer: OfferTally) -> None:
        self.payments[event.payment].append(("payment.refund_due", event.amount))
        offer.sums["refund due"] += event.amount

    # -- limits, counted by the calendar of the standard library, independently of models.calendar

    def _grab(self, event: Any, offer: OfferTally) -> GrabTally:
        grab = self.grabs[event.grab] = GrabTally(event.offer, event.user)
        self._count(grab, event.quantity, self._counters(event.offer, grab.user, offer.terms, event.at))
        return grab

    def _counters(self, offer: str, user: str, terms: PieceTerms, at: int) -> list[tuple[str, ...]]:
        campaign = campaign_of(offer)
        offer_windows, campaign_windows = (
            _windows(at, zone) for zone in (terms.timezone, self._zones[campaign])
        )
        return [
            (campaign, limit.name, campaign_windows[limit.per], user, str(limit.max))
            if limit.scope == "campaign"
            else (offer, limit.name, offer_windows[limit.per], user, str(limit.max))
            for limit in terms.limits
        ]

    def _count(self, grab: GrabTally, units: int, counters: list[tuple[str, ...]]) -> None:
        grab.counted.append((units, counters))
        for counter in counters:
            self.used[counter] += units
            self.check(
                "no user above a limit",
                self.used[counter] <= int(counter[-1]),
                f"{' '.join(counter[:-1])}: {self.used[counter]} used, the maximum is {counter[-1]}",
            )

    def _uncount(self, grab: GrabTally, units: int) -> None:
        """Subtracts units from their counters, those that were counted last first."""
        while units > 0 and grab.counted:
            counted, counters = grab.counted.pop()
            uncounted = min(units, counted)
            units -= uncounted
            for counter in counters:
                self.used[counter] -= uncounted
            if counted > uncounted:
                grab.counted.append((counted - uncounted, counters))


def _windows(at: int, zone: str) -> dict[str, str]:
    """The windows of limits that a time is in, by period."""
    local = datetime.fromtimestamp(at / 1000, ZoneInfo(zone))
    return {
        "offer": "",
        "hour": local.strftime("%F %H"),
        "day": local.strftime("%F"),
        "week": local.strftime("%G-%V"),
    }
