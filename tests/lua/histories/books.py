"""What must be true of a shard's events, checked from the event lines alone, without rules and Lua."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from grabstream.models.events import decode_event
from grabstream.models.transfers import GUARDED_ACCOUNTS, transfers_of
from tests.models.recompute import recompute


def check_books(lines: Sequence[bytes]) -> None:
    """Checks seqs without gaps, times that never decrease, amounts that are conserved, and parts that follow
    from the seed.
    """
    events = [json.loads(line) for line in lines]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    times = [event["at"] for event in events]
    assert times == sorted(times)
    by_offer: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_offer[event["offer"]].append(event)
    for of_offer in by_offer.values():
        _check_offer(of_offer)
    _check_accounts(lines)


def _check_offer(events: list[dict[str, Any]]) -> None:
    opened, closed = events[0], [event for event in events if event["type"] == "offer.closed"]
    assert opened["type"] == "offer.opened"
    assert [event["offer_seq"] for event in events] == list(range(1, len(events) + 1))
    assert len(closed) <= 1
    paused = False
    for event in events:
        assert not (
            paused
            and (
                event["type"] in ("grab.granted", "grab.queued")
                or (event["type"] == "grab.held" and "digest" in event)
            )
        )
        paused = {"offer.paused": True, "offer.resumed": False, "offer.closed": False}.get(
            event["type"], paused
        )
    (_check_envelope if opened["kind"] == "envelope" else _check_pieces)(opened, closed, events)


def _check_envelope(
    opened: dict[str, Any], closed: list[dict[str, Any]], events: list[dict[str, Any]]
) -> None:
    granted = [event for event in events if event["type"] == "grab.granted"]
    parts = opened["terms"]["parts"]
    assert [event["place"] for event in granted] == list(range(1, len(granted) + 1))
    assert [event["left"] for event in granted] == [parts - event["place"] for event in granted]
    assert len({event["user"] for event in granted}) == len(granted)
    if not any(event["type"] == "offer.amended" for event in events):
        assert all(opened["opens_at"] <= event["at"] < opened["closes_at"] for event in granted)
    assert not any(
        "seed" in event or "seed" in event.get("terms", ()) for event in events if event not in closed
    )
    if closed:
        after = events[events.index(closed[0]) + 1 :]
        assert {event["type"] for event in after} <= {
            "payment.refund_due",
            "ledger.adjusted",
            "offer.retired",
        }
        assert closed[0]["amount"] == opened["total"] - sum(event["amount"] for event in granted)
        assert (closed[0]["reason"] == "drained") == (len(granted) == parts)
        given = [event for event in events if "randomness" in event.get("changes", ())]
        recomputed = recompute(opened, closed[0], *given)
        assert recomputed[: len(granted)] == [event["amount"] for event in granted]


#: How an event changes the units left, held and taken, as multiples of its quantity.
MOVES = {
    "grab.granted": (-1, 0, 1),
    "grab.held": (-1, 1, 0),
    "grab.confirmed": (0, -1, 1),
    "grab.released": (1, -1, 0),
    "grab.returned": (1, 0, -1),
}


def _check_pieces(opened: dict[str, Any], closed: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    """Checks left + held + taken = total and the field `left` after every event, and that no user has more
    than a limit allows. Units that came back without their codes are available to no user.
    """
    left, held, taken, total, is_closed = opened["total"], 0, 0, opened["total"], False
    uncoded = 0
    shown: Counter[str] = Counter()
    of_grab: dict[str, Counter[str]] = defaultdict(Counter)
    places = []
    for event in events:
        total += event.get("added", 0) - event.get("removed", 0)
        left += event.get("added", 0) - event.get("removed", 0)
        if event["type"] in MOVES:
            move = (-1, 0, 1) if event.get("retaken") else MOVES[event["type"]]
            quantity = event["quantity"]
            assert event["amount"] == quantity
            has_code = event["type"] != "grab.returned" or "voided_codes" not in event
            left += 0 if (is_closed and move[0] > 0) or not has_code else move[0] * quantity
            uncoded += 0 if is_closed or has_code else quantity
            held, taken = held + move[1] * quantity, taken + move[2] * quantity
            grab = of_grab[event["grab"]]
            grab["held"] += move[1] * quantity
            grab["taken"] += move[2] * quantity
            if event["type"] in ("grab.granted", "grab.held"):
                places.append(event["place"])
        if event["type"] in ("grab.redeemed", "grab.unredeemed"):
            of_grab[event["grab"]]["redeemed"] += (
                event["quantity"] if event["type"] == "grab.redeemed" else -event["quantity"]
            )
        assert all(grab["held"] >= 0 and grab["taken"] >= grab["redeemed"] >= 0 for grab in of_grab.values())
        if event["type"] == "offer.closed":
            assert (event["amount"], event["left"]) == (left + uncoded, left)
            left, is_closed = 0, True
        assert event.get("left", left) == left or event["type"] == "offer.closed"
        assert left >= 0
        assert is_closed or left + uncoded + held + taken == total
        _check_codes(event, shown)
    assert places == list(range(1, len(places) + 1))
    _check_limits(opened, events)


def _check_codes(event: dict[str, Any], shown: Counter[str]) -> None:
    """Checks that no code is given twice, and that a return voids as many codes as it returns units. `shown`
    has the codes that were given before.
    """
    shown.update(event.get("codes", ()))
    assert set(shown.values()) <= {1}
    voided_codes = event.get("voided_codes", ())
    assert set(voided_codes) <= set(shown)
    if event["type"] == "grab.returned" and shown:
        assert len(voided_codes) == event["quantity"]


def _check_limits(opened: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """Checks that no user ever has more than an unchanged limit for the whole offer allows."""
    if any("limits" in event.get("changes", ()) for event in events):
        return
    limits = [
        limit["max"]
        for limit in opened["terms"].get("limits", ())
        if (limit["by"], limit["per"]) == ("user", "offer")
    ]
    units_of_user: Counter[str] = Counter()
    for event in events:
        if event["type"] in MOVES and event["type"] != "grab.confirmed":
            units_of_user[event["user"]] += -MOVES[event["type"]][0] * event["quantity"]
        elif event.get("retaken"):
            units_of_user[event["user"]] += event["quantity"]
        assert all(units_of_user[user] <= allowed for user in units_of_user for allowed in limits)


def _check_accounts(lines: Sequence[bytes]) -> None:
    posted: Counter[tuple[str, str]] = Counter()
    for line in lines:
        for transfer in transfers_of(decode_event(line)):
            posted[transfer.asset, transfer.debit] -= transfer.amount
            posted[transfer.asset, transfer.credit] += transfer.amount
        assert not [
            account
            for account, amount in posted.items()
            if amount < 0 and account[1].startswith(GUARDED_ACCOUNTS)
        ]
    closed = {event["offer"] for event in map(json.loads, lines) if event["type"] == "offer.closed"}
    assert not [
        account
        for account, amount in posted.items()
        if amount and account[1] in {f"offer:{offer}" for offer in closed}
    ]
