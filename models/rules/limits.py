"""Limits: how many units a user, or a value of an attribute, has left in the window of now; counting, and
giving back.
"""

from collections.abc import Sequence

from grabstream.models.answers import LimitState
from grabstream.models.calendar import Offsets, window_ends, window_of
from grabstream.models.commands import Grab
from grabstream.models.offers import Limit
from grabstream.models.rules.state import Counted, CountedUnits, Offer, ShardState, Taken


def value_of(limit: Limit, command: Grab) -> str | None:
    """What a limit counts by: the user, or an attribute of the grab."""
    return command.user if limit.by == "user" else command.attributes.get(limit.by)


def counted_under(offer: Offer, command: Grab, now: int) -> list[Counted]:
    """The counters of a grab, one for each limit of the offer, in order."""
    found = []
    for limit in offer.pieces.limits:
        of_campaign = limit.scope == "campaign"
        window = window_of(limit.per, _offsets(offer, of_campaign), now)
        found.append(Counted(f"{limit.name}/{value_of(limit, command)}", window, of_campaign))
    return found


def counts_of(state: ShardState, offer: Offer, counted: Sequence[Counted]) -> list[int]:
    """How much each counter has in its window: 0 when it last counted in another one."""
    found = []
    for one in counted:
        window, count = _read(state, offer, one)
        found.append(count if window == one.window else 0)
    return found


def count(state: ShardState, offer: Offer, counted: Sequence[Counted], quantity: int) -> None:
    """Adds units to each counter, in its window."""
    for one, before in zip(counted, counts_of(state, offer, counted), strict=True):
        _write(state, offer, one, before + quantity)


def give_back(state: ShardState, offer: Offer, grab: Taken, quantity: int) -> None:
    """Takes units off the counters they were counted under, the newest first; nothing of a window that is
    over.
    """
    while quantity and grab.counted:
        units, under = grab.counted.pop()
        back = min(units, quantity)
        quantity -= back
        for one in under:
            window, before = _read(state, offer, one)
            if window == one.window:
                _write(state, offer, one, before - back)
        if units > back:
            grab.counted.append(CountedUnits(units - back, under))


def states_of(offer: Offer, counts: Sequence[int], now: int) -> tuple[LimitState, ...]:
    """What each limit leaves, and until when."""
    return tuple(
        LimitState(
            limit.by,
            limit.per,
            limit.max,
            max(limit.max - counted, 0),
            window_ends(limit.per, _offsets(offer, limit.scope == "campaign"), now),
            limit.scope,
        )
        for limit, counted in zip(offer.pieces.limits, counts, strict=True)
    )


def counted_anew(offer: Offer, grab: Taken, now: int) -> list[Counted]:
    """The counters a grab was first counted under, in their windows of now."""
    return [
        one._replace(window=window_of(one.counter.split("/")[1], _offsets(offer, one.of_campaign), now))  # type: ignore[arg-type]
        for one in grab.under
    ]


def lefts_under(state: ShardState, offer: Offer, counted: Sequence[Counted]) -> list[int]:
    """What the offer's limits, as they are now, leave under these counters."""
    most = {(limit.name, limit.scope == "campaign"): limit.max for limit in offer.pieces.limits}
    found = []
    for one, number in zip(counted, counts_of(state, offer, counted), strict=True):
        limit = most.get((one.counter.rsplit("/", 1)[0], one.of_campaign))
        if limit is not None:
            found.append(limit - number)
    return found


def _offsets(offer: Offer, of_campaign: bool) -> Offsets:
    """The time zone of a limit: the offer's, or that of its campaign's first offer."""
    return offer.campaign_offsets if of_campaign else offer.offsets


def _read(state: ShardState, offer: Offer, one: Counted) -> tuple[int, int]:
    if one.of_campaign:
        return state.counters.get((offer.campaign, one.counter), (0, 0))
    return offer.counters.get(one.counter, (0, 0))


def _write(state: ShardState, offer: Offer, one: Counted, value: int) -> None:
    if one.of_campaign:
        state.counters[offer.campaign, one.counter] = (one.window, value)
    else:
        offer.counters[one.counter] = (one.window, value)
