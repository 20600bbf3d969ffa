"""Counters of limits, computed from events as the scripts counted them: the value of each counter before and
after an event.
"""

from typing import NamedTuple

import msgspec

from grabstream.models.calendar import Offsets, window_of
from grabstream.models.events import (
    AnyEvent,
    GrabConfirmed,
    GrabGranted,
    GrabHeld,
    GrabQueued,
    GrabReleased,
    GrabReturned,
    OfferAmended,
    OfferOpened,
    OfferRetired,
)
from grabstream.models.identifiers import campaign_of
from grabstream.models.offers import Limit


class CounterName(NamedTuple):
    """Identifies a counter: its owner (an offer or a campaign), its limit, and the user or value it
    counts.
    """

    owner: str
    limit: str
    value: str


class Counted(NamedTuple):
    """A counter at a time: how much of its limit is used in the window of that time."""

    by: str
    per: str
    scope: str
    value: str
    max: int
    used: int


class _CounterRules(NamedTuple):
    """The limits of an offer; `campaign_offsets` are the time zone offsets of the campaign's first offer."""

    offsets: Offsets
    campaign_offsets: Offsets
    limits: tuple[Limit, ...]

    def window(self, limit: str, per: str, at_ms: int) -> int:
        """The number of the window that a time is in. `limit` starts with its scope."""
        offsets = self.campaign_offsets if limit.startswith("campaign:") else self.offsets
        return window_of(per, offsets, at_ms)  # type: ignore[arg-type]


class _Campaign(msgspec.Struct):
    """A campaign while it has offers: the time zone offsets of its first offer, and its offers that are not
    retired.
    """

    offsets: Offsets
    offers: set[str] = msgspec.field(default_factory=set)


class _LimitTerms(msgspec.Struct):
    limits: tuple[Limit, ...] = ()


class _LimitChanges(msgspec.Struct):
    limits: tuple[Limit, ...] | msgspec.UnsetType = msgspec.UNSET


_terms = msgspec.json.Decoder(_LimitTerms).decode
_changes = msgspec.json.Decoder(_LimitChanges).decode

#: The counters that units are counted under: (counter, period of its limit, window).
_Under = tuple[tuple[CounterName, str, int], ...]


class LimitCounters:
    """All counters changed by the events fed. Events are fed in the order of the shard."""

    def __init__(self) -> None:
        self._rules: dict[str, _CounterRules] = {}
        self._campaigns: dict[str, _Campaign] = {}
        self._values: dict[CounterName, tuple[int, int]] = {}
        #: (offer, grab) → its counted units, oldest first
        self._counted_units: dict[tuple[str, str], list[tuple[int, _Under]]] = {}
        #: (offer, grab) → the counters that the grab was first counted under
        self._first: dict[tuple[str, str], _Under] = {}

    def used(self, counter: CounterName, window: int) -> int:
        """How many units a counter has in a window."""
        counted_in, units = self._values.get(counter, (0, 0))
        return units if counted_in == window else 0

    def at(self, offer: str, user: str, attributes: dict[str, str], at_ms: int) -> list[Counted]:
        """The counters that a grab of this user is counted under at a time, one per limit of the offer."""
        rules = self._rules.get(offer)
        if rules is None:
            return []
        return [
            Counted(limit.by, limit.per, limit.scope, counter.value, limit.max, self.used(counter, window))
            for limit, (counter, _, window) in zip(
                rules.limits, self._under(offer, user, attributes, at_ms), strict=True
            )
        ]

    def feed(self, event: AnyEvent) -> None:
        """Applies the next event."""
        if isinstance(event, OfferOpened):
            zone = event.offsets if event.campaign_zone is None else event.campaign_zone.offsets
            campaign = self._campaigns.setdefault(campaign_of(event.offer), _Campaign(zone))
            campaign.offers.add(event.offer)
            self._rules[event.offer] = _CounterRules(
                event.offsets, campaign.offsets, _terms(event.terms).limits
            )
        elif isinstance(event, OfferRetired):
            self._retire(event.offer)
        elif isinstance(event, OfferAmended):
            limits = _changes(event.changes).limits
            if not isinstance(limits, msgspec.UnsetType) and event.offer in self._rules:
                self._rules[event.offer] = self._rules[event.offer]._replace(limits=limits)
        elif isinstance(event, GrabGranted | GrabQueued) or (
            isinstance(event, GrabHeld) and not event.waited
        ):
            under = self._under(event.offer, event.user, event.attributes, event.at)
            self._count(event.offer, event.grab, event.quantity, under)
        elif isinstance(event, GrabHeld):
            self._uncount(event.offer, event.grab, (event.asked or event.quantity) - event.quantity)
        elif isinstance(event, GrabReleased) and event.reason == "left_queue":
            # The event's quantity is 0, since no units move. All units that the grab waited for are
            # uncounted.
            self._uncount(
                event.offer,
                event.grab,
                sum(units for units, _ in self._counted_units.get((event.offer, event.grab), ())),
            )
        elif isinstance(event, GrabReleased) or (isinstance(event, GrabReturned) and event.restored):
            self._uncount(event.offer, event.grab, event.quantity)
        elif isinstance(event, GrabConfirmed) and event.retaken:
            self._retake(event)

    def _under(self, offer: str, user: str, attributes: dict[str, str], at_ms: int) -> _Under:
        rules = self._rules.get(offer)
        if rules is None:
            return ()
        under = []
        for limit in rules.limits:
            owner = campaign_of(offer) if limit.scope == "campaign" else offer
            value = user if limit.by == "user" else attributes.get(limit.by, "")
            name = f"{limit.scope}:{limit.by}/{limit.per}"
            under.append((CounterName(owner, name, value), limit.per, rules.window(name, limit.per, at_ms)))
        return tuple(under)

    def _count(self, offer: str, grab: str, units: int, under: _Under) -> None:
        for counter, _, window in under:
            self._values[counter] = (window, self.used(counter, window) + units)
        self._counted_units.setdefault((offer, grab), []).append((units, under))
        self._first.setdefault((offer, grab), under)

    def _uncount(self, offer: str, grab: str, units: int) -> None:
        """Subtracts units from the counters they were counted under, the newest first. Counters in a later
        window do not change.
        """
        counted_units = self._counted_units.get((offer, grab), [])
        while units > 0 and counted_units:
            counted, under = counted_units.pop()
            uncounted = min(counted, units)
            units -= uncounted
            for counter, _, window in under:
                in_window, number = self._values.get(counter, (0, 0))
                if in_window == window:
                    self._values[counter] = (window, number - uncounted)
            if counted > uncounted:
                counted_units.append((counted - uncounted, under))

    def _retire(self, offer: str) -> None:
        """Removes the offer from its campaign. A campaign ends with its last offer, and its counters with
        it.
        """
        name = campaign_of(offer)
        campaign = self._campaigns.get(name)
        if campaign is None:
            return
        campaign.offers.discard(offer)
        if not campaign.offers:
            del self._campaigns[name]
            for counter in list(self._values):
                if counter.owner == name and counter.limit.startswith("campaign:"):
                    del self._values[counter]

    def _retake(self, event: GrabConfirmed) -> None:
        """Counts units of an expired hold again: in the windows of the event's time, under the counters that
        the grab was first counted under.
        """
        first = self._first.get((event.offer, event.grab), ())
        rules = self._rules[event.offer]
        under = tuple((counter, per, rules.window(counter.limit, per, event.at)) for counter, per, _ in first)
        self._count(event.offer, event.grab, event.quantity, under)
