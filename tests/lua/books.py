"""What must be true of a shard's events, said without the rules and without Lua: from the lines alone, as a stranger reads them."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from models.events import decode_event
from models.transfers import GUARDED_ACCOUNTS, transfers_of
from tests.models.recompute import recompute


def check_books(lines: Sequence[bytes]) -> None:
    """Numbers without gaps, time that never goes back, money that is neither made nor lost, and parts as the seed promised."""
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
    granted = [event for event in events if event["type"] == "grab.granted"]
    assert opened["type"] == "offer.opened"
    assert [event["offer_seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["place"] for event in granted] == list(range(1, len(granted) + 1))
    assert [event["left"] for event in granted] == [opened["terms"]["parts"] - event["place"] for event in granted]
    assert len({event["user"] for event in granted}) == len(granted)
    assert all(opened["opens_at"] <= event["at"] < opened["closes_at"] for event in granted)
    assert not any("seed" in event or "seed" in event.get("terms", ()) for event in events if event not in closed)
    paused = False
    for event in events:
        assert not (paused and event["type"] == "grab.granted")
        paused = {"offer.paused": True, "offer.resumed": False}.get(event["type"], paused)
    if closed:
        assert closed == events[-1:]
        assert closed[0]["amount"] == opened["total"] - sum(event["amount"] for event in granted)
        assert (closed[0]["reason"] == "drained") == (len(granted) == opened["terms"]["parts"])
        assert recompute(opened, closed[0])[: len(granted)] == [event["amount"] for event in granted]


def _check_accounts(lines: Sequence[bytes]) -> None:
    posted: Counter[tuple[str, str]] = Counter()
    for line in lines:
        for transfer in transfers_of(decode_event(line)):
            posted[transfer.asset, transfer.debit] -= transfer.amount
            posted[transfer.asset, transfer.credit] += transfer.amount
        assert not [account for account, amount in posted.items() if amount < 0 and account[1].startswith(GUARDED_ACCOUNTS)]
    closed = {event["offer"] for event in map(json.loads, lines) if event["type"] == "offer.closed"}
    assert not [account for account, amount in posted.items() if amount and account[1] in {f"offer:{offer}" for offer in closed}]
