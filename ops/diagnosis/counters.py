"""Counters of limits, replayed from events: what each one had before and after, as the scripts counted it."""

from collections.abc import Sequence
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


class Counter(NamedTuple):
    """Which counter: of an offer, or of a campaign; of one limit, for one user or value."""

    owner: str
    limit: str
    value: str


class Counted(NamedTuple):
    """A counter at a moment: how much of its limit is used in the window then."""

    by: str
    per: str
    scope: str
    value: str
    max: int
    used: int


class _Rules(NamedTuple):
    """`campaign_offsets` are those of the campaign's first offer."""

    offsets: Offsets
    campaign_offsets: Offsets
    limits: tuple[Limit, ...]

    def window(self, limit: str, per: str, at_ms: int) -> int:
        """The window of a time for a limit, which is named by its scope too."""
        offsets = self.campaign_offsets if limit.startswith("campaign:") else self.offsets
        return window_of(per, offsets, at_ms)  # type: ignore[arg-type]


class _Campaign(msgspec.Struct):
    """A campaign as long as it has an offer: the zone of its first one, and those that have not retired."""

    offsets: Offsets
    offers: set[str] = msgspec.field(default_factory=set)


class _Terms(msgspec.Struct):
    limits: tuple[Limit, ...] = ()


class _Changes(msgspec.Struct):
    limits: tuple[Limit, ...] | msgspec.UnsetType = msgspec.UNSET


_terms = msgspec.json.Decoder(_Terms).decode
_changes = msgspec.json.Decoder(_Changes).decode

#: Units of a grab that were counted together, and under what: counters with their windows.
_Batch = tuple[int, tuple[tuple[Counter, str, int], ...]]


class Counters:
    """All counters that the events fed so far have touched. Events come in the order of the shard."""

    def __init__(self) -> None:
        self._rules: dict[str, _Rules] = {}
        self._campaigns: dict[str, _Campaign] = {}
        self._values: dict[Counter, tuple[int, int]] = {}
        self._batches: dict[tuple[str, str], list[_Batch]] = {}
        self._first: dict[tuple[str, str], tuple[tuple[Counter, str, int], ...]] = {}

    def used(self, counter: Counter, window: int) -> int:
        """How much a counter has in a window."""
        counted_in, number = self._values.get(counter, (0, 0))
        return number if counted_in == window else 0

    def at(self, offer: str, user: str, attributes: dict[str, str], at_ms: int) -> list[Counted]:
        """The counters that a grab of this user would be counted under at a time, one a limit of the
        offer.
        """
        rules = self._rules.get(offer)
        if rules is None:
            return []
        found = []
        for limit, (counter, _, window) in zip(
            rules.limits, self._under(offer, user, attributes, at_ms), strict=True
        ):
            found.append(
                Counted(
                    limit.by, limit.per, limit.scope, counter.value, limit.max, self.used(counter, window)
                )
            )
        return found

    def feed(self, event: AnyEvent) -> None:
        """Takes an event in."""
        if isinstance(event, OfferOpened):
            zone = event.offsets if event.campaign_zone is None else event.campaign_zone.offsets
            campaign = self._campaigns.setdefault(campaign_of(event.offer), _Campaign(zone))
            campaign.offers.add(event.offer)
            self._rules[event.offer] = _Rules(event.offsets, campaign.offsets, _terms(event.terms).limits)
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
            self._give_back(event.offer, event.grab, (event.asked or event.quantity) - event.quantity)
        elif isinstance(event, GrabReleased) and event.reason == "left_queue":
            # Its quantity is that of units that move: none. All that was waited for is not counted any more.
            self._give_back(
                event.offer,
                event.grab,
                sum(units for units, _ in self._batches.get((event.offer, event.grab), ())),
            )
        elif isinstance(event, GrabReleased) or (isinstance(event, GrabReturned) and event.restored):
            self._give_back(event.offer, event.grab, event.quantity)
        elif isinstance(event, GrabConfirmed) and event.retaken:
            self._retake(event)

    def _under(
        self, offer: str, user: str, attributes: dict[str, str], at_ms: int
    ) -> tuple[tuple[Counter, str, int], ...]:
        rules = self._rules.get(offer)
        if rules is None:
            return ()
        found = []
        for limit in rules.limits:
            owner = campaign_of(offer) if limit.scope == "campaign" else offer
            value = user if limit.by == "user" else attributes.get(limit.by, "")
            kind = f"{limit.scope}:{limit.by}/{limit.per}"
            found.append((Counter(owner, kind, value), limit.per, rules.window(kind, limit.per, at_ms)))
        return tuple(found)

    def _count(self, offer: str, grab: str, units: int, under: tuple[tuple[Counter, str, int], ...]) -> None:
        for counter, _, window in under:
            self._values[counter] = (window, self.used(counter, window) + units)
        self._batches.setdefault((offer, grab), []).append((units, under))
        self._first.setdefault((offer, grab), under)

    def _give_back(self, offer: str, grab: str, units: int) -> None:
        """Off the counters they were counted under, the newest first; nothing of a window that is over."""
        batches = self._batches.get((offer, grab), [])
        while units > 0 and batches:
            counted, under = batches.pop()
            back = min(counted, units)
            units -= back
            for counter, _, window in under:
                in_window, number = self._values.get(counter, (0, 0))
                if in_window == window:
                    self._values[counter] = (window, number - back)
            if counted > back:
                batches.append((counted - back, under))

    def _retire(self, offer: str) -> None:
        """With its last offer a campaign ends, and what was counted in it."""
        name = campaign_of(offer)
        campaign = self._campaigns.get(name)
        if campaign is None:
            return
        campaign.offers.discard(offer)
        if not campaign.offers:
            del self._campaigns[name]
            for counter in [
                one for one in self._values if one.owner == name and one.limit.startswith("campaign:")
            ]:
                del self._values[counter]

    def _retake(self, event: GrabConfirmed) -> None:
        """Units that had lapsed are counted anew, in the windows of now, under what the grab was counted
        under first.
        """
        first = self._first.get((event.offer, event.grab), ())
        rules = self._rules[event.offer]
        under = tuple((counter, per, rules.window(counter.limit, per, event.at)) for counter, per, _ in first)
        self._count(event.offer, event.grab, event.quantity, under)


def fed(events: Sequence[AnyEvent]) -> Counters:
    """Counters behind these events."""
    counters = Counters()
    for event in events:
        counters.feed(event)
    return counters
