"""What must be true of a shard's events whatever the histories: promises that the rules and Lua could break
together.

Said without either of them, from the lines alone and in the order of the journal, as a stranger reads them.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from grabstream.models.calendar import DAY_MS, HOUR_MS, THURSDAY
from grabstream.models.identifiers import campaign_of
from grabstream.models.money import AMOUNT_MAX

#: How long a payment is known after its offer has retired.
PAYMENTS_KNOWN_MS = 180 * DAY_MS
NUMBER_MAX = 2**53
#: What the system writes as a command by itself.
OWN_COMMANDS = ("sweep",)


def check_promises(lines: Sequence[bytes]) -> None:
    """Raises AssertionError with the promise that is broken and the event that breaks it."""
    events = [_exact(line) for line in lines]
    _check_ids_and_orders(events)
    _check_payments(events)
    _check_campaign_limits(events)


def _exact(line: bytes) -> Any:
    """The event, when all of its numbers are exact integers."""

    def refused(text: str) -> Any:
        raise AssertionError(f"{text} is no exact integer: {line.decode()}")

    def integer(text: str) -> int:
        assert text == str(int(text)), f"{text} is not written as an integer: {line.decode()}"
        assert abs(int(text)) <= NUMBER_MAX, f"{text} is not exact in a double: {line.decode()}"
        return int(text)

    event = json.loads(line, parse_float=refused, parse_constant=refused, parse_int=integer)
    for field in ("amount", "due", "quantity", "paid", "left", "total"):
        assert 0 <= event.get(field, 0) <= AMOUNT_MAX, f"{field} is out of bounds: {line.decode()}"
    return event


def _check_ids_and_orders(events: Sequence[Any]) -> None:
    """An id is carried out once as long as its offer lives; a ticket for one grab is good for one grab, of
    its offer or of its campaign.
    """
    own: dict[tuple[str, str], str] = {}
    tickets: dict[tuple[str, str, str], Any] = {}
    offers: dict[str, set[str]] = defaultdict(set)
    for event in events:
        offer, command = event["offer"], event["command"]
        campaign = campaign_of(offer)
        if event["type"] == "offer.opened":
            offers[campaign].add(offer)
        if "digest" in event:
            assert command not in OWN_COMMANDS, (
                f"a command has the name of what the system does by itself: {event}"
            )
            assert (campaign, command) not in own, f"{command} was carried out twice: {event}"
            own[campaign, command] = offer
        if "ticket" in event:
            ends_at = event.get("ticket_ends_at")
            key = (campaign, "" if ends_at else offer, event["ticket"])
            used = tickets.get(key)
            # The same name may come again in a ticket of later, when nobody could use the first one any more.
            assert used is None or event["at"] >= (used["ticket_ends_at"] if ends_at else 2**60), (
                f"a ticket was used twice: {used}, {event}"
            )
            tickets[key] = event
        if event["type"] == "offer.retired":
            offers[campaign].discard(offer)
            own = {key: of for key, of in own.items() if of != offer}
            if not offers[campaign]:
                tickets = {key: of for key, of in tickets.items() if key[0] != campaign}


def _check_payments(events: Sequence[Any]) -> None:
    """A payment is served once or refunded once, and what goes back to it is never more than it paid."""
    known: dict[tuple[str, str], Any] = {}
    paid: Counter[tuple[str, str]] = Counter()
    for event in events:
        campaign = campaign_of(event["offer"])
        if "payment" in event:
            key = campaign, event["payment"]
            first = known.get(key)
            assert first is None or event["at"] > first["at"] + PAYMENTS_KNOWN_MS, (
                f"a payment was used twice, by {first} and by {event}"
            )
            known[key] = event
            paid[key] = event.get("paid", 0)
        for payment, amount in event.get("refunds", ()):
            paid[campaign, payment] -= amount
            assert paid[campaign, payment] >= 0, f"more goes back than was paid: {event}"


def _check_campaign_limits(events: Sequence[Any]) -> None:
    """Nobody has more in a window than a limit across a campaign allows; the campaign's first offer says in
    which zone windows are.
    """
    for campaign, of_campaign in _by_life(events):
        opened = [
            event for event in of_campaign if event["type"] == "offer.opened" and event["kind"] != "envelope"
        ]
        if not opened or any("limits" in event.get("changes", ()) for event in of_campaign):
            continue
        limits = [
            {_limit(one) for one in event["terms"].get("limits", ()) if one.get("scope") == "campaign"}
            for event in opened
        ]
        for by, per, most in set.union(*limits):
            if all((by, per, most) in of_offer for of_offer in limits):
                counted = {event["offer"] for event in opened}
                _check_one_limit(
                    campaign,
                    of_campaign[0],
                    [one for one in of_campaign if one["offer"] in counted],
                    by,
                    per,
                    most,
                )


def _limit(one: Any) -> tuple[str, str, int]:
    return one["by"], one["per"], one["max"]


def _by_life(events: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """The events of each campaign, from the opening of its first offer until its last one has retired."""
    living: dict[str, set[str]] = defaultdict(set)
    found: dict[str, list[Any]] = defaultdict(list)
    for event in events:
        campaign = campaign_of(event["offer"])
        found[campaign].append(event)
        if event["type"] == "offer.opened":
            living[campaign].add(event["offer"])
        elif event["type"] == "offer.retired":
            living[campaign].discard(event["offer"])
            if not living[campaign]:
                yield campaign, found.pop(campaign)
    yield from found.items()


def _check_one_limit(campaign: str, first: Any, events: Sequence[Any], by: str, per: str, most: int) -> None:
    """Counts what is taken in each window; what comes back in whatever way and at whatever time makes room,
    so this never asks too much.
    """
    window_of = _windows(first, per)
    has: Counter[tuple[str, int]] = Counter()
    grabs: dict[tuple[str, str], tuple[tuple[str, int], int]] = {}
    for event in events:
        name = event["offer"], event.get("grab", "")
        if event["type"] in ("grab.granted", "grab.held", "grab.queued") and not event.get("waited"):
            value = event["user"] if by == "user" else event.get("attributes", {}).get(by)
            if value is None:
                continue
            where = value, window_of(event["at"])
            grabs[name] = where, event["quantity"]
            has[where] += event["quantity"]
            assert has[where] <= most, (
                f"{value} has {has[where]} of {most} by {by} per {per} in {campaign}: {event}"
            )
        elif name in grabs and (event["type"] in ("grab.released", "grab.returned") or event.get("waited")):
            where, units = grabs[name]
            back = (
                units
                if event.get("reason") == "left_queue"
                else units - event["quantity"]
                if event.get("waited")
                else event["quantity"]
            )
            grabs[name] = where, units - back
            has[where] -= back


def _windows(first: Any, per: str) -> Callable[[int], int]:
    """Which window a time is in, by the zone of the campaign's first offer; hours begin where they did on the
    day it opened.
    """
    zone = ZoneInfo(first["terms"].get("timezone", "UTC"))

    def ahead_ms(at_ms: int) -> int:
        moment = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)).astimezone(zone)
        return (moment.utcoffset() or timedelta()) // timedelta(milliseconds=1)

    def window_of(at_ms: int) -> int:
        if per == "offer":
            return 0
        if per == "hour":
            return (at_ms + shift_ms) // HOUR_MS
        day = (at_ms + ahead_ms(at_ms)) // DAY_MS
        return {"day": day, "week": (day + THURSDAY) // 7}[per]

    shift_ms = ahead_ms(first["at"] - first["at"] % DAY_MS) % HOUR_MS
    return window_of
