"""Promises that must hold in every history, including those that the rules and Lua could break together.

They are checked from the event lines alone, in the order of the journal, without the rules and without Lua.
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

#: Time in which a payment is known after its offer has retired.
PAYMENTS_KNOWN_MS = 180 * DAY_MS
NUMBER_MAX = 2**53
#: The outcomes of payments for which no grab was found.
NOT_FOUND = ("no_such_grab", "no_such_offer")
#: The outcome of money that came beyond what is recorded of a known payment.
CONFLICT = "conflict"
#: Command ids in events that no command caused.
SYSTEM_COMMANDS = ("sweep",)


def check_promises(lines: Sequence[bytes]) -> None:
    """Raises AssertionError with the broken promise and the event that breaks it."""
    events = [_exact(line) for line in lines]
    _check_ids_and_tickets(events)
    _check_payments(events)
    _check_campaign_limits(events)
    Servings().see(lines)


class Servings:
    """Follows events, and checks that no user is served from a waiting list while new grabs are refused:
    while the offer is paused, or outside its hours by the calendar of the standard library.
    """

    def __init__(self) -> None:
        self._terms: dict[str, Any] = {}
        self._paused: set[str] = set()
        self._seen = 0

    def see(self, lines: Sequence[bytes]) -> None:
        """Follows the events after those seen before, of all events of a shard."""
        new, self._seen = lines[self._seen :], len(lines)
        for event in map(json.loads, new):
            offer = event["offer"]
            if event["type"] == "offer.opened":
                self._terms[offer] = event["terms"]
            elif event["type"] == "offer.paused":
                self._paused.add(offer)
            elif event["type"] in ("offer.resumed", "offer.closed"):
                self._paused.discard(offer)
            elif event.get("waited"):
                assert offer not in self._paused, f"who waited was served by a paused offer: {event}"
                assert self.is_in_hours(offer, event["at"]), f"who waited was served outside hours: {event}"

    def is_paused(self, offer: str) -> bool:
        return offer in self._paused

    def is_in_hours(self, offer: str, at_ms: int) -> bool:
        """Whether the offer's terms have no hours, or these contain a time."""
        terms = self._terms[offer]
        zone = ZoneInfo(terms.get("timezone", "UTC"))
        local = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)).astimezone(zone)
        weekday, clock = f"{local:%a}".lower(), f"{local:%H:%M}"
        return not terms.get("hours") or any(
            weekday in span.get("weekdays", (weekday,))
            and span.get("from", "00:00") <= clock < span.get("until", "24:00")
            for span in terms["hours"]
        )


def _exact(line: bytes) -> Any:
    """The decoded event; raises AssertionError unless all its numbers are exact integers."""

    def refused(text: str) -> Any:
        raise AssertionError(f"{text} is not an exact integer: {line.decode()}")

    def integer(text: str) -> int:
        assert text == str(int(text)), f"{text} is not written as an integer: {line.decode()}"
        assert abs(int(text)) <= NUMBER_MAX, f"{text} is not exact in a double: {line.decode()}"
        return int(text)

    event = json.loads(line, parse_float=refused, parse_constant=refused, parse_int=integer)
    for field in ("amount", "due", "quantity", "paid", "left", "total"):
        assert 0 <= event.get(field, 0) <= AMOUNT_MAX, f"{field} is out of bounds: {line.decode()}"
    return event


def _check_ids_and_tickets(events: Sequence[Any]) -> None:
    """Checks that a command is executed once until its offer retires, that the id of a grab of pieces is used
    by one user, and that a single-use ticket is used for one grab of its offer or campaign.
    """
    carried_out: dict[tuple[str, ...], str] = {}
    envelopes = {event["offer"] for event in events if event.get("kind") == "envelope"}
    tickets: dict[tuple[str, str, str], Any] = {}
    offers: dict[str, set[str]] = defaultdict(set)
    for event in events:
        offer, command = event["offer"], event["command"]
        campaign = campaign_of(offer)
        if event["type"] == "offer.opened":
            offers[campaign].add(offer)
        if "digest" in event:
            assert command not in SYSTEM_COMMANDS, f"a command has a reserved id: {event}"
            identity: tuple[str, ...] = (campaign, command)
            if event["type"] in ("grab.granted", "grab.held", "grab.queued"):
                identity = (offer, event["user"] if offer in envelopes else "", command)
            assert identity not in carried_out, f"{command} was carried out twice: {event}"
            carried_out[identity] = offer
        if "ticket" in event:
            ends_at = event.get("ticket_ends_at")
            key = (campaign, "" if ends_at else offer, event["ticket"])
            used = tickets.get(key)
            # A later ticket may have the same id once the first ticket has expired for good.
            assert used is None or event["at"] >= (used["ticket_ends_at"] if ends_at else 2**60), (
                f"a ticket was used twice: {used}, {event}"
            )
            tickets[key] = event
        if event["type"] == "offer.retired":
            offers[campaign].discard(offer)
            carried_out = {key: of_id for key, of_id in carried_out.items() if of_id != offer}
            if not offers[campaign]:
                tickets = {key: of_id for key, of_id in tickets.items() if key[0] != campaign}


def _check_payments(events: Sequence[Any]) -> None:
    """Checks that each payment is served or refunded once (for each grab of one basket), that money is due as
    a `conflict` only beyond a known payment, that refunds never exceed what it paid, and that a refund due
    for a grab that the command found names only its user (none: by an older release).
    """
    known: dict[tuple[str, str], Any] = {}
    paid: Counter[tuple[str, ...]] = Counter()
    settled: dict[tuple[str, ...], Any] = {}
    users: dict[tuple[str, str], str] = {}
    for event in events:
        campaign = campaign_of(event["offer"])
        if event["type"].startswith("grab."):
            users[event["offer"], event["grab"]] = event["user"]
        if event["type"] == "payment.refund_due" and event["outcome"] not in (*NOT_FOUND, CONFLICT):
            user = users[event["offer"], event["grab"]]
            assert event.get("user", user) == user, f"a refund due to another user than {user}: {event}"
        if "payment" in event:
            key = campaign, event["payment"]
            of_grab = (*key, event["offer"], event["grab"])
            first = known.get(key)
            if event.get("outcome") == CONFLICT:
                assert first is not None, f"a conflict with a payment that is not known: {event}"
                assert event["amount"] > 0, f"a conflict about no money: {event}"
                continue
            if first is not None and "basket" in event and event["basket"] == first.get("basket"):
                first = settled.get(of_grab)
            assert first is None or event["at"] > first["at"] + PAYMENTS_KNOWN_MS, (
                f"a payment was used twice, by {first} and by {event}"
            )
            known[key] = settled[of_grab] = event
            paid[of_grab] = event.get("paid", 0)
        for payment, amount in event.get("refunds", ()):
            of_grab = campaign, payment, event["offer"], event["grab"]
            paid[of_grab] -= amount
            assert paid[of_grab] >= 0, f"the refunds exceed the payment: {event}"


def _check_campaign_limits(events: Sequence[Any]) -> None:
    """Checks that no user has more in a window than a limit of the campaign allows. The time zone of the
    campaign's first offer determines the windows.
    """
    for campaign, of_campaign in _by_campaign_lifetime(events):
        opened = [
            event for event in of_campaign if event["type"] == "offer.opened" and event["kind"] != "envelope"
        ]
        if not opened or any("limits" in event.get("changes", ()) for event in of_campaign):
            continue
        limits = [
            {_limit(limit) for limit in event["terms"].get("limits", ()) if limit.get("scope") == "campaign"}
            for event in opened
        ]
        for by, per, most in set.union(*limits):
            if all((by, per, most) in of_offer for of_offer in limits):
                counted = {event["offer"] for event in opened}
                _check_one_limit(
                    campaign,
                    # Late payments for offers that have retired may come before it.
                    next(event for event in of_campaign if event["type"] == "offer.opened"),
                    [event for event in of_campaign if event["offer"] in counted],
                    by,
                    per,
                    most,
                )


def _limit(limit: Any) -> tuple[str, str, int]:
    return limit["by"], limit["per"], limit["max"]


def _by_campaign_lifetime(events: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yields each campaign with its events, from its first opening until all its offers have retired."""
    living: dict[str, set[str]] = defaultdict(set)
    by_campaign: dict[str, list[Any]] = defaultdict(list)
    for event in events:
        campaign = campaign_of(event["offer"])
        by_campaign[campaign].append(event)
        if event["type"] == "offer.opened":
            living[campaign].add(event["offer"])
        elif event["type"] == "offer.retired":
            living[campaign].discard(event["offer"])
            if not living[campaign]:
                yield campaign, by_campaign.pop(campaign)
    yield from by_campaign.items()


def _check_one_limit(campaign: str, first: Any, events: Sequence[Any], by: str, per: str, most: int) -> None:
    """Counts the units taken in each window. Every returned or released unit is subtracted, whenever it is
    returned, so the check is never stricter than the limit.
    """
    window_of = _windows(first, per)
    counted: Counter[tuple[str, int]] = Counter()
    grabs: dict[tuple[str, str], tuple[tuple[str, int], int]] = {}
    for event in events:
        name = event["offer"], event.get("grab", "")
        if event["type"] in ("grab.granted", "grab.held", "grab.queued") and not event.get("waited"):
            value = event["user"] if by == "user" else event.get("attributes", {}).get(by)
            if value is None:
                continue
            value_and_window = value, window_of(event["at"])
            grabs[name] = value_and_window, event["quantity"]
            counted[value_and_window] += event["quantity"]
            assert counted[value_and_window] <= most, (
                f"{value} has {counted[value_and_window]} of {most} by {by} per {per} in {campaign}: {event}"
            )
        elif name in grabs and (event["type"] in ("grab.released", "grab.returned") or event.get("waited")):
            value_and_window, units = grabs[name]
            returned = (
                units
                if event.get("reason") == "left_queue"
                else units - event["quantity"]
                if event.get("waited")
                else event["quantity"]
            )
            grabs[name] = value_and_window, units - returned
            counted[value_and_window] -= returned


def _windows(first: Any, per: str) -> Callable[[int], int]:
    """Returns a function that maps a time to its window, in the zone of the campaign's first offer. Hours
    keep the UTC offset of the day on which that offer opened.
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
