"""The rows that the views `offers` and `grabs` must have, by the state of the rules."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from grabstream.models.events import GrabReleased, GrabReturned, decode_event
from grabstream.models.rules import Offer, ShardState
from grabstream.models.rules.state import PieceGrab, Status

Rows = Sequence[tuple[Any, ...]]

#: What is read of each offer, and of each grab.
OFFER_COLUMNS: Final = "offer, total, units_left, amount_left, held, grabs, waiting, given, state"
GRAB_COLUMNS: Final = (
    "offer, grab, user_id, quantity, amount, held, taken, redeemed, place, state, deadline_at"
)


def differences(state: ShardState, lines: Iterable[bytes], offers: Rows, grabs: Rows) -> list[str]:
    """What differs between the state to which single events lead, and the rows of its offers and grabs."""
    expected = _offer_rows(state)
    found = {row[0]: tuple(row[1:]) for row in offers if row[0] in state.offers}
    problems = _of_two("offers", expected, found)
    pieces = {name for name, offer in state.offers.items() if not offer.is_envelope}
    found_grabs = {tuple(row[:2]): tuple(row[2:]) for row in grabs if row[0] in pieces}
    problems += _of_two("grabs", _grab_rows(state, _endings(lines)), found_grabs)
    # The rules keep no ids of grabs of envelopes.
    parts = {
        (row[0], row[2]): (row[4], row[8]) for row in grabs if row[0] in state.offers and row[0] not in pieces
    }
    return problems + _of_two("parts of envelopes", _part_rows(state), parts)


def _endings(lines: Iterable[bytes]) -> dict[tuple[str, str], str]:
    """By offer and grab, how units of it went back last."""
    endings = {}
    for event in map(decode_event, lines):
        if isinstance(event, GrabReturned):
            endings[event.offer, event.grab] = "returned"
        elif isinstance(event, GrabReleased):
            endings[event.offer, event.grab] = "expired" if event.reason == "expired" else "released"
    return endings


def _of_two(what: str, expected: dict[Any, Any], found: dict[Any, Any]) -> list[str]:
    return [
        f"{what}: {key} is {found.get(key)}, by the rules {expected.get(key)}"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]


def _offer_rows(state: ShardState) -> dict[str, tuple[Any, ...]]:
    """By offer, the other columns; offers that have retired are not there."""
    return {
        offer.name: (
            offer.terms.total, offer.units_left, offer.amount_left, offer.held, offer.places,
            sum(grab.status == Status.waiting for grab in offer.grabs.values()), _given_of(offer),
            "closed" if offer.closed_reason else "paused" if offer.paused else "open",
        )
        for offer in state.offers.values()
    }  # fmt: skip


def _grab_rows(
    state: ShardState, endings: dict[tuple[str, str], str]
) -> dict[tuple[str, str], tuple[Any, ...]]:
    """By offer and grab, the other columns."""
    return {
        (offer.name, name): (
            grab.user, grab.quantity, grab.quantity, grab.held, grab.taken, grab.redeemed, grab.place,
            _state_of(offer, grab, endings.get((offer.name, name), "")), grab.deadline or None,
        )
        for offer in state.offers.values()
        for name, grab in offer.grabs.items()
    }  # fmt: skip


def _part_rows(state: ShardState) -> dict[tuple[str, str], tuple[int, int]]:
    """By envelope and user, amount and place of the part."""
    return {
        (offer.name, user): (part.amount, part.place)
        for offer in state.offers.values()
        for user, part in offer.users.items()
    }


def _given_of(offer: Offer) -> int:
    if offer.is_envelope:
        return sum(part.amount for part in offer.users.values())
    return sum(grab.taken for grab in offer.grabs.values())


def _state_of(offer: Offer, grab: PieceGrab, ending: str) -> str:
    """The column `state` of a grab."""
    if grab.status == Status.waiting:
        return "waiting"
    if grab.held:
        return "held"
    if grab.taken:
        return "granted" if offer.pieces.hold_ms is None else "confirmed"
    if grab.lapsed and grab.status == Status.expired and not grab.confirmed[0]:
        return "expired"
    if grab.status == Status.released and not grab.confirmed[0]:
        return "released"
    if grab.confirmed[0] and grab.status != Status.active:
        # Some units were returned, and others released: the state is the last of both.
        return ending
    return "returned" if grab.confirmed[0] or offer.pieces.hold_ms is None else grab.status.name
