"""Limits: how many units a user, or a value of an attribute, has left in the current window; counts units,
and returns them.
"""

from collections.abc import Sequence

from grabstream.models.answers import LimitState
from grabstream.models.calendar import Offsets, window_ends, window_of
from grabstream.models.commands import Grab
from grabstream.models.offers import Limit
from grabstream.models.rules.state import CountedUnits, LimitCounter, Offer, PieceGrab, ShardState


def value_of(limit: Limit, command: Grab) -> str | None:
    """The value by which a limit counts a grab: the user, or an attribute; None if the grab has no such
    attribute.
    """
    return command.user if limit.by == "user" else command.attributes.get(limit.by)


def counters_of(offer: Offer, command: Grab, now: int) -> list[LimitCounter]:
    """The counters of a grab, one for each limit of the offer, in order."""
    counters = []
    for limit in offer.pieces.limits:
        is_campaign_wide = limit.scope == "campaign"
        window = window_of(limit.per, _offsets(offer, is_campaign_wide), now)
        counters.append(LimitCounter(f"{limit.name}/{value_of(limit, command)}", window, is_campaign_wide))
    return counters


def counts_of(state: ShardState, offer: Offer, counters: Sequence[LimitCounter]) -> list[int]:
    """The count of each counter in its window; 0 if it last counted in another window."""
    counts = []
    for counter in counters:
        window, count = _read(state, offer, counter)
        counts.append(count if window == counter.window else 0)
    return counts


def count(state: ShardState, offer: Offer, counters: Sequence[LimitCounter], quantity: int) -> None:
    """Adds units to each counter, in its window."""
    for counter, before in zip(counters, counts_of(state, offer, counters), strict=True):
        _write(state, offer, counter, before + quantity)


def give_back(state: ShardState, offer: Offer, grab: PieceGrab, quantity: int) -> None:
    """Subtracts units from the counters under which they were counted, the newest units first. Counters whose
    window is over do not change.
    """
    while quantity and grab.counted:
        units, under = grab.counted.pop()
        returned = min(units, quantity)
        quantity -= returned
        for counter in under:
            window, before = _read(state, offer, counter)
            if window == counter.window:
                _write(state, offer, counter, before - returned)
        if units > returned:
            grab.counted.append(CountedUnits(units - returned, under))


def states_of(offer: Offer, counts: Sequence[int], now: int) -> tuple[LimitState, ...]:
    """What each limit leaves, and when it resets."""
    return tuple(
        LimitState(
            limit.by,
            limit.per,
            limit.max,
            max(limit.max - count, 0),
            window_ends(limit.per, _offsets(offer, limit.scope == "campaign"), now),
            limit.scope,
        )
        for limit, count in zip(offer.pieces.limits, counts, strict=True)
    )


def counters_now(offer: Offer, grab: PieceGrab, now: int) -> list[LimitCounter]:
    """The counters under which a grab was first counted, with their current windows."""
    return [
        counter._replace(
            window=window_of(counter.name.split("/")[1], _offsets(offer, counter.is_campaign_wide), now)  # type: ignore[arg-type]
        )
        for counter in grab.under
    ]


def lefts_under(state: ShardState, offer: Offer, counters: Sequence[LimitCounter]) -> list[int]:
    """The units left under these counters by the offer's current limits."""
    most = {(limit.name, limit.scope == "campaign"): limit.max for limit in offer.pieces.limits}
    lefts = []
    for counter, count in zip(counters, counts_of(state, offer, counters), strict=True):
        limit = most.get((counter.name.rsplit("/", 1)[0], counter.is_campaign_wide))
        if limit is not None:
            lefts.append(limit - count)
    return lefts


def _offsets(offer: Offer, is_campaign_wide: bool) -> Offsets:
    """The time zone of a limit: the offer's, or that of its campaign's first offer."""
    return offer.campaign_offsets if is_campaign_wide else offer.offsets


def _read(state: ShardState, offer: Offer, counter: LimitCounter) -> tuple[int, int]:
    if counter.is_campaign_wide:
        return state.counters.get((offer.campaign, counter.name), (0, 0))
    return offer.counters.get(counter.name, (0, 0))


def _write(state: ShardState, offer: Offer, counter: LimitCounter, value: int) -> None:
    if counter.is_campaign_wide:
        state.counters[offer.campaign, counter.name] = (counter.window, value)
    else:
        offer.counters[counter.name] = (counter.window, value)
