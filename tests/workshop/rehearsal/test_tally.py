"""The tally of a story counts limits independently of the rules: in the campaign's zone, and each unit in the
window of its grab.
"""

from typing import Any

from grabstream.models.calendar import DAY_MS, HOUR_MS
from grabstream.models.commands import AnyCommand, Close, Confirm, Grab, Load, Open, Return
from grabstream.models.offers import CouponTerms, Limit, StockTerms
from grabstream.models.rules import ShardState, decide, sweep
from grabstream.workshop.rehearsal.clock import Clock
from grabstream.workshop.rehearsal.tally import Tally

#: Midnight, UTC.
DAY = 1_800_057_600_000


class History:
    """Commands decided by the rules, and a tally of their events."""

    def __init__(self) -> None:
        self.now = DAY
        self.clock = Clock(DAY)
        self.tally = Tally(self.clock)
        self.state = ShardState(0)
        self.commands = 0

    def send(self, make: Any, offer: str, **rest: Any) -> str:
        """Sends a command, which must succeed; returns its id."""
        self.commands += 1
        command: AnyCommand = make(id=f"c{self.commands}", offer=offer, **rest)
        answer, events, _ = decide(self.state, command, self.now)
        assert answer.positive, answer
        for event in events:
            self.tally.take(event)
        return command.id

    def forward(self, by_ms: int) -> None:
        self.now += by_ms
        self.clock.forward(self.now)
        for event in sweep(self.state, self.now):
            self.tally.take(event)


def test_limits_of_a_campaign_count_in_the_zone_of_its_first_offer() -> None:
    history = History()
    for offer, zone in (("m:first", "Asia/Tokyo"), ("m:second", "UTC")):
        limit = Limit("user", "day", 2, "campaign")
        history.send(Open, offer, terms=StockTerms(issuer="shop", total=90, limits=(limit,), timezone=zone))
    # In Tokyo the next day starts at 15:00 UTC.
    for _ in range(2):
        history.send(Grab, "m:second", user="ann")
        history.send(Grab, "m:second", user="ann")
        history.forward(16 * HOUR_MS)
    assert history.tally.checked["no user above a limit"] == 4
    assert not history.tally.problems


def test_returned_units_leave_the_window_in_which_they_were_retaken() -> None:
    history = History()
    terms = StockTerms(issuer="shop", total=9, limits=(Limit("user", "day", 9),), max_per_grab=9,
        hold_ms=1_000, late="retake",
                       return_restores=True)  # fmt: skip
    history.send(Open, "o", terms=terms)
    grab = history.send(Grab, "o", user="ann", quantity=5)
    history.send(Confirm, "o", grab=grab, quantity=2)
    for day in (1, 2):
        history.forward(DAY_MS)
        history.send(Confirm, "o", grab=grab, quantity=1)
        assert sorted(history.tally.used.values()) == [1] * day + [2]
    history.send(Return, "o", grab=grab, quantity=3)
    assert sorted(history.tally.used.values()) == [0, 0, 1]
    history.send(Return, "o", grab=grab, quantity=1)
    assert set(history.tally.used.values()) == {0}
    assert not history.tally.problems


def test_units_that_come_back_without_codes_are_left_to_nobody() -> None:
    history = History()
    history.send(Open, "o", terms=CouponTerms(issuer="shop", total=3, codes=True, max_per_grab=2))
    history.send(Load, "o", what="codes", chunk=1, chunks=1, items=("k1", "k2", "k3"))
    grab = history.send(Grab, "o", user="ann", quantity=2)
    history.send(Return, "o", grab=grab, quantity=1)
    offer = history.tally.offers["o"]
    assert (offer.left, offer.uncoded, offer.taken) == (1, 1, 1)
    history.send(Close, "o")
    assert (offer.left, offer.uncoded, offer.given_back) == (0, 0, 2)
    history.send(Return, "o", grab=grab)
    assert (offer.left, offer.uncoded, offer.given_back) == (0, 0, 3)
    assert not history.tally.problems
