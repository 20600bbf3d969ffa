"""`whatif`: past commands decided again. Without changed terms, everything is decided as recorded; for each
kind of change, the result is known.
"""

import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pytest

from grabstream.models.calendar import DAY_MS, HOUR_MS
from grabstream.models.commands import (
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Extend,
    Grab,
    Load,
    Open,
    Pause,
    Redeem,
    Release,
    Resume,
    Return,
)
from grabstream.models.events import AnyEvent, GrabHeld, OfferClosed, decode_event, encode_event
from grabstream.models.identifiers import campaign_of
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms, Hours, Limit, StockTerms, Terms
from grabstream.models.rules import ShardState, decide, decide_basket, sweep
from grabstream.models.runs import decode_line, singles
from grabstream.models.whatif.twins import CannotChange, Differs, TermChange, Twins, decided_basket
from tests.conftest import NIGHTLY
from tests.streams.replaying.histories import MixedHistory
from tests.support.random_history import random_history
from tests.support.runs import as_lines, as_runs

START: Final = 1_800_000_000_000
SEED: Final = "00" * 16


class Recording:
    """A history of offer `a:x`, decided by the rules: each step is a command, or the time at which the
    sweeper does what is due.
    """

    def __init__(self, *terms: Terms) -> None:
        self.state, self.events, self.now = ShardState(0), list[AnyEvent](), START
        for number, one in enumerate(terms):
            self.send(Open(id=f"open{number}", offer=f"a:{'xyz'[number]}", terms=one))

    def send(self, *commands: AnyCommand) -> None:
        for command in commands:
            self.now += 1
            drawn = {"seed": SEED, "clock_ms": self.now, "ticket_once": "", "ticket_expires_at": 10**15}
            self.events += decide(self.state, command, self.now, drawn).events

    def grabs(self, first: int, last: int, **rest: Any) -> None:
        for number in range(first, last + 1):
            self.send(Grab(id=f"g{number}", offer="a:x", user=f"u{number}", **rest))

    def pay(self, *numbers: int, paid: int = 5) -> None:
        for number in numbers:
            self.send(
                Confirm(
                    id=f"c{number}", offer="a:x", grab=f"g{number}", payment=f"p{number}", paid=paid,
                    currency="CNY",
                )
            )  # fmt: skip

    def sweep(self, ms: int) -> None:
        self.now += ms
        self.events += sweep(self.state, self.now)

    def again(self, since: int | None = None, until: int | None = None, **terms: Any) -> Twins:
        return again(self.events, "a", TermChange(terms, since=since), until or self.now)


def again(events: Sequence[AnyEvent], campaign: str, change: TermChange, until: int) -> Twins:
    seeds = {event.offer: event.seed for event in events if isinstance(event, OfferClosed) and event.seed}
    twins = Twins(events[0].shard, change, seeds)
    for event in events:
        if campaign_of(event.offer) == campaign:
            twins.feed(event)
    twins.end(until)
    return twins


def stock(**terms: Any) -> StockTerms:
    return StockTerms(**{"issuer": "i", "total": 10, **terms})


def held(**terms: Any) -> StockTerms:
    return stock(hold_ms=60_000, price=5, currency="CNY", **terms)


def outcomes(twins: Twins) -> list[tuple[str, str, str]]:
    return [
        (one.command.id, one.recorded["outcome"], one.changed["outcome"]) for one in twins.differences
    ]  # fmt: skip


def numbers(twins: Twins, *names: str, offer: str = "a:x") -> tuple[Any, ...]:
    """Pairs (recorded, changed) of numbers."""
    return tuple(
        (getattr(twins.recorded[offer], name), getattr(twins.changed[offer], name)) for name in names
    )


def assert_as_recorded(twins: Twins) -> None:
    assert twins.differences == []
    assert twins.recorded == twins.changed
    assert not twins.users.by_user
    assert twins.not_sent == 0


@pytest.mark.parametrize("seed", range(40 if NIGHTLY else 2))
def test_without_changed_terms_a_history_is_decided_as_recorded(seed: int) -> None:
    for history in (
        MixedHistory(seed, 2, 600 if NIGHTLY else 200),
        random_history(seed, 1500 if NIGHTLY else 200),
    ):
        lines = as_runs(history.lines) if seed % 2 else as_lines(history.lines)
        events = [one for line in lines for one in singles(decode_line(line))]
        campaigns = {campaign_of(event.offer) for event in events}
        commands = 0
        for campaign in campaigns:
            twins = again(events, campaign, TermChange({}), events[-1].at)
            assert_as_recorded(twins)
            commands += twins.commands
            # The terms that it had already are not a change, whenever they begin.
            middle = events[len(events) // 2].at
            assert_as_recorded(again(events, campaign, TermChange({}, since=middle), events[-1].at))
        assert commands > 50


@pytest.mark.parametrize("seed", range(20 if NIGHTLY else 1))
def test_a_history_ends_anywhere(seed: int) -> None:
    history = MixedHistory(seed, 2, 150)
    events = list(map(decode_event, history.lines))
    seeds = {event.offer: event.seed for event in events if isinstance(event, OfferClosed) and event.seed}
    for until in sorted({event.at for event in random.Random(seed).sample(events, 5)}):
        for campaign in {campaign_of(event.offer) for event in events}:
            twins = Twins(2, TermChange({}), seeds)
            for event in events:
                if event.at <= until and campaign_of(event.offer) == campaign:
                    twins.feed(event)
            twins.end(until)
            assert_as_recorded(twins)


def test_fewer_units() -> None:
    recording = Recording(stock())
    recording.grabs(1, 10)
    twins = recording.again(total=4)
    assert outcomes(twins) == [(f"g{number}", "granted", "sold_out") for number in range(5, 11)]
    assert numbers(twins, "units", "grabs", "given", "left") == ((10, 4), (10, 4), (10, 4), (0, 0))
    assert numbers(twins, "sold_out_at") == ((START + 11, START + 5),)
    assert twins.users.document(2) == {
        "more": 0, "less": 6, "largest": [
            {"offer": "a:x", "user": "u10", "difference": -1},
            {"offer": "a:x", "user": "u5", "difference": -1},
        ],
    }  # fmt: skip


def test_more_units() -> None:
    recording = Recording(stock(total=3))
    recording.grabs(1, 5)  # two are refused, and not in the journal
    twins = recording.again(total=7)
    assert outcomes(twins) == []
    assert numbers(twins, "given", "left") == ((3, 3), (0, 4))
    assert numbers(twins, "sold_out_at") == ((START + 4, None),)


def test_limits() -> None:
    recording = Recording(stock())
    for number in range(1, 5):
        recording.send(Grab(id=f"g{number}", offer="a:x", user=f"u{number % 2}", attributes={"card": "c"}))
    twins = recording.again(limits=(Limit("user", "offer", 1),))
    assert outcomes(twins) == [("g3", "granted", "limit_reached"), ("g4", "granted", "limit_reached")]
    twins = recording.again(limits=(Limit("card", "day", 3),))
    assert outcomes(twins) == [("g4", "granted", "limit_reached")]
    # The grabs do not say by what this limit counts.
    twins = recording.again(limits=(Limit("device", "day", 3),))
    assert {after for _, _, after in outcomes(twins)} == {"invalid"}


def test_limits_of_a_campaign_count_all_its_offers() -> None:
    recording = Recording(stock(), stock())
    recording.send(Grab(id="g1", offer="a:y", user="u"), Grab(id="g2", offer="a:x", user="u"))
    limits = (Limit("user", "offer", 1, "campaign"),)
    assert outcomes(recording.again(limits=limits)) == [("g2", "granted", "limit_reached")]
    change = TermChange({"limits": limits}, frozenset({"a:x"}))
    assert outcomes(again(recording.events, "a", change, recording.now)) == []


def test_price() -> None:
    recording = Recording(held())
    recording.grabs(1, 3)
    recording.pay(1, 2)
    recording.send(Return(id="r1", offer="a:x", grab="g1"))
    twins = recording.again(price=8)
    # Everyone pays what is due under the changed terms.
    assert numbers(twins, "confirmed", "paid", "refunded") == ((2, 2), (10, 16), (5, 8))
    assert [one.changed for one in twins.differences if one.command.id == "g3"] == [
        {"outcome": "held", "quantity": 1, "amount": 1, "due": 8}
    ]
    # A wrong sum stays wrong.
    recording.pay(3, paid=4)
    assert numbers(recording.again(price=4), "confirmed", "refund_due") == ((2, 3), (4, 0))
    assert numbers(recording.again(price=9), "confirmed", "refund_due") == ((2, 2), (4, 4))


def test_shorter_holds_expire_at_their_own_time_and_payments_come_late() -> None:
    recording = Recording(held(total=2))
    recording.grabs(1, 2)
    recording.now += 30_000
    recording.pay(1)
    recording.send(Release(id="r2", offer="a:x", grab="g2"))
    recording.grabs(3, 3)
    twins = recording.again(hold_ms=10_000)
    assert outcomes(twins) == [("c1", "confirmed", "expired"), ("r2", "released", "expired")]
    assert numbers(twins, "expired", "refund_due", "paid", "left") == ((0, 2), (0, 5), (5, 0), (0, 1))


def test_longer_holds_serve_late_payments() -> None:
    recording = Recording(held(total=2))
    recording.grabs(1, 2)
    recording.sweep(60_001)
    recording.pay(1)
    twins = recording.again(hold_ms=120_000)
    assert outcomes(twins) == [("c1", "expired", "confirmed")]
    assert numbers(twins, "expired", "paid", "refund_due") == ((2, 0), (0, 5), (5, 0))
    later = recording.again(hold_ms=120_000, until=recording.now + 120_000)
    assert numbers(later, "expired") == ((2, 1),)


@pytest.mark.parametrize(
    ("terms", "outcome"),
    [({"late": "grace", "grace_ms": 5_000}, "confirmed"), ({"late": "retake"}, "confirmed"), ({}, "expired")],
)
def test_late_payments(terms: dict[str, Any], outcome: str) -> None:
    recording = Recording(held())
    recording.grabs(1, 1)
    recording.sweep(61_000)
    recording.pay(1)
    twins = recording.again(**terms)
    assert [one.changed["outcome"] for one in twins.differences] == [outcome] * bool(terms)
    assert twins.changed["a:x"].paid == (5 if terms else 0)


def test_no_hold_grants_at_once_and_nobody_pays() -> None:
    recording = Recording(held())
    recording.grabs(1, 2)
    recording.pay(1)
    twins = recording.again(hold_ms=None, price=None, currency=None)
    assert outcomes(twins) == [
        ("g1", "held", "granted"), ("c1", "confirmed", "not_sent"), ("g2", "held", "granted")
    ] or outcomes(twins) == [
        ("g1", "held", "granted"), ("g2", "held", "granted"), ("c1", "confirmed", "not_sent")
    ]  # fmt: skip
    assert numbers(twins, "given", "paid") == ((2, 2), (5, 0))


def test_what_follows_a_refused_grab_is_not_sent() -> None:
    recording = Recording(held(extensions=1))
    recording.grabs(1, 3)
    recording.send(Extend(id="e3", offer="a:x", grab="g3"))
    recording.pay(3)
    recording.send(Return(id="r3", offer="a:x", grab="g3"))
    twins = recording.again(total=2)
    assert outcomes(twins) == [
        ("g3", "held", "sold_out"), ("e3", "extended", "not_sent"), ("c3", "confirmed", "not_sent"),
        ("r3", "returned", "not_sent"),
    ]  # fmt: skip
    assert twins.not_sent == 3
    twins = recording.again(extensions=0)
    assert outcomes(twins) == [("e3", "extended", "limit_reached")]


def test_quantity_of_a_grab() -> None:
    recording = Recording(stock(max_per_grab=3))
    recording.grabs(1, 1, quantity=3)
    assert outcomes(recording.again(max_per_grab=2)) == [("g1", "granted", "invalid")]
    recording = Recording(stock(max_per_grab=9, total=10))
    recording.grabs(1, 1, quantity=9)
    recording.send(Return(id="r", offer="a:x", grab="g1"))
    twins = recording.again(total=4, take="up_to")
    assert [one.changed for one in twins.differences] == [
        {"outcome": "granted", "quantity": 4, "amount": 4},
        {"outcome": "returned", "quantity": 4, "amount": 4},
    ]  # fmt: skip


def test_times_of_an_offer() -> None:
    recording = Recording(stock())
    recording.grabs(1, 4)  # at START + 2 to 5
    twins = recording.again(opens_at=START + 3)
    assert outcomes(twins) == [("g1", "granted", "not_open_yet")]
    twins = recording.again(closes_at=START + 4)
    assert outcomes(twins) == [("g3", "granted", "over"), ("g4", "granted", "over")]
    assert numbers(twins, "closed_at", "left") == ((None, START + 4), (6, 8))


def test_audience_list() -> None:
    recording = Recording(stock(audience="list", opens_at=START + 10))
    recording.send(Load(id="l", offer="a:x", what="audience", chunk=1, chunks=1, items=("u1",)))
    recording.now = START + 20
    recording.grabs(1, 2)
    assert outcomes(recording.again(audience="everyone"))[0][1:] == ("loaded", "invalid")
    recording = Recording(stock())
    recording.grabs(1, 1)
    assert outcomes(recording.again(audience="ticket")) == [("g1", "granted", "not_eligible")]


def test_waiting_list() -> None:
    recording = Recording(held(total=1, waiting_list=True))
    recording.grabs(1, 2, wait=True)
    recording.send(Release(id="r1", offer="a:x", grab="g1"))
    recording.pay(2)
    twins = recording.again(total=2)
    assert outcomes(twins) == [("g2", "waiting", "held")]
    assert numbers(twins, "queued", "paid", "left") == ((1, 0), (5, 5), (0, 1))
    twins = recording.again(waiting_list=False)
    assert outcomes(twins) == [("g2", "waiting", "sold_out"), ("c2", "confirmed", "not_sent")]


@pytest.mark.parametrize("late_ms", [0, 40, 3 * HOUR_MS])
def test_a_waiting_list_that_is_served_at_an_opening_or_a_resume(late_ms: int) -> None:
    """Also if the sweeper comes late, or only after the hours. Under other hours, users are served then."""
    opens_at = START // HOUR_MS * HOUR_MS + 25 * HOUR_MS
    opens, closes = (f"{at // HOUR_MS % 24:02}:00" for at in (opens_at, opens_at + 2 * HOUR_MS))
    recording = Recording(
        held(total=1, waiting_list=True, late="refuse", hours=(Hours(from_=opens, until=closes),))
    )
    recording.now = opens_at
    recording.grabs(1, 3, wait=True)
    recording.now = opens_at + 2 * HOUR_MS
    recording.send(Release(id="r1", offer="a:x", grab="g1"))
    recording.now = opens_at + DAY_MS
    recording.sweep(late_ms)
    recording.now = opens_at + 2 * DAY_MS
    recording.sweep(0)
    served = [event for event in recording.events if isinstance(event, GrabHeld) and event.waited]
    assert served[0].at == opens_at + DAY_MS + (late_ms if late_ms < HOUR_MS else DAY_MS)
    recording.send(Pause(id="p", offer="a:x"))
    recording.sweep(HOUR_MS)
    recording.send(Resume(id="q", offer="a:x"))
    assert_as_recorded(recording.again())
    twins = recording.again(total=2)
    assert outcomes(twins) == [("g2", "waiting", "held")]
    twins = recording.again(hours=())
    assert numbers(twins, "queued") == ((2, 2),)


def test_returns_and_validity() -> None:
    limits = (Limit("user", "offer", 1),)
    recording = Recording(
        CouponTerms(issuer="i", total=5, limits=limits, return_restores=True, valid_until=START + DAY_MS)
    )
    recording.grabs(1, 1)
    recording.send(
        Redeem(id="d", offer="a:x", grab="g1", order="o"), Grab(id="g2", offer="a:x", user="u2"),
        Return(id="r", offer="a:x", grab="g2"), Grab(id="g3", offer="a:x", user="u2"),
    )  # fmt: skip
    assert outcomes(recording.again(return_restores=False)) == [("g3", "granted", "limit_reached")]
    assert outcomes(recording.again(valid_until=START + 1)) == [("d", "redeemed", "expired")]


def envelope(**terms: Any) -> EnvelopeTerms:
    return EnvelopeTerms(issuer="i", funding="f", asset="CNY", **{"total": 100, "parts": 4, **terms})


def test_law_and_parts_of_an_envelope() -> None:
    recording = Recording(envelope())
    recording.grabs(1, 4)
    twins = recording.again(law="equal")
    assert numbers(twins, "amount", "smallest_part", "largest_part")[0] == (100, 100)
    assert (twins.changed["a:x"].smallest_part, twins.changed["a:x"].largest_part) == (25, 25)
    assert sum(one.changed["amount"] for one in twins.differences) + 25 * (4 - len(twins.differences)) == 100
    assert sum(twins.users.by_user.values()) == 0
    twins = recording.again(parts=5, law="equal", draw="at_grab")
    assert numbers(twins, "units", "given", "amount", "left") == ((4, 5), (4, 4), (100, 80), (0, 1))
    assert numbers(twins, "closed_at") == ((START + 5, None),)
    twins = recording.again(parts=2, law="equal", total=60)
    assert outcomes(twins)[2:] == [("g3", "granted", "sold_out"), ("g4", "granted", "sold_out")]
    assert numbers(twins, "amount") == ((100, 60),)


def test_an_amendment_of_the_same_term_does_not_count() -> None:
    recording = Recording(held(total=2))
    recording.grabs(1, 1)
    recording.send(Amend(id="m", offer="a:x", changes=Changes(price=7, total=3)))
    recording.grabs(2, 3)
    recording.pay(2, paid=7)
    twins = recording.again(price=6)
    assert numbers(twins, "units", "paid") == ((3, 3), (7, 6))
    twins = recording.again(price=6, total=2)
    assert ("m", "amended", "not_sent") in outcomes(twins)
    assert numbers(twins, "units", "given") == ((3, 2), (3, 2))


def test_terms_that_change_within_the_history() -> None:
    recording = Recording(held(total=5))
    recording.grabs(1, 4)  # at START + 2 to 5
    recording.pay(1, 4)
    twins = recording.again(since=START + 4, price=6)
    assert numbers(twins, "paid") == ((10, 11),)
    twins = recording.again(since=START + 4, total=3)
    assert outcomes(twins) == [("g4", "held", "sold_out"), ("c4", "confirmed", "not_sent")]
    with pytest.raises(CannotChange, match="not_enough_left"):
        recording.again(since=START + 5, total=2)
    with pytest.raises(CannotChange, match="leave out `from`"):
        recording.again(since=START + 4, waiting_list=True)
    # An offer that is opened later has any of the terms from its opening on.
    assert numbers(recording.again(since=START, waiting_list=True), "given") == ((4, 4),)


def test_a_basket_stands_or_falls_together() -> None:
    recording = Recording(stock(), stock())
    for number in (1, 2):
        recording.now += 1
        grabs = [
            Grab(id=f"{offer}{number}", offer=f"a:{offer}", user=f"u{number}", basket=f"b{number}")
            for offer in "xy"
        ]
        for decided in decide_basket(recording.state, grabs, recording.now, [{}, {}]):
            recording.events += decided.events
    recording.grabs(3, 3)
    assert_as_recorded(recording.again())
    change = TermChange({"total": 1}, frozenset({"a:y"}))
    twins = again(recording.events, "a", change, recording.now)
    assert outcomes(twins) == [("x2", "granted", "sold_out"), ("y2", "granted", "sold_out")]
    assert numbers(twins, "given", "left") == ((3, 2), (7, 8))
    assert numbers(twins, "given", offer="a:y") == ((2, 1),)


@pytest.mark.parametrize("limit", [1, 2, 9])
def test_baskets_are_decided_as_the_rules_decide_them(limit: int) -> None:
    limits = (Limit("user", "day", limit, "campaign"), Limit("user", "offer", 2))
    ours, rules = (Recording(held(total=3, limits=limits), held(total=9, limits=limits)) for _ in range(2))
    draw = random.Random(limit)
    for number in range(12):
        offers = draw.choice(("xy", "yx", "xyx", "y"))
        grabs = [
            Grab(
                id=f"g{number}{index}", offer=f"a:{offer}", user=f"u{draw.randrange(3)}", basket=f"b{number}"
            )
            for index, offer in enumerate(offers)
        ]
        expected = decide_basket(rules.state, grabs, START + 100, [{} for _ in grabs])
        bare = [msgspec.structs.replace(grab, basket=None) for grab in grabs]
        decided = decided_basket(ours.state, bare, [{} for _ in grabs], START + 100, f"b{number}")
        assert [one.answer.outcome for one in decided] == [one.answer.outcome for one in expected]
        for state in (ours.state, rules.state):
            state.answers, state.refusals = {}, type(state.refusals)()
            state.demand.clear()
            state.digests = ours.state.digests
        assert ours.state == rules.state


def test_a_history_that_the_rules_do_not_make_has_no_result() -> None:
    recording = Recording(held())
    recording.grabs(1, 3)
    recording.pay(1)
    wrong = msgspec.structs.replace(recording.events[2], left=3)
    for index, event, words in (
        (2, wrong, "the rules make"),
        (4, msgspec.structs.replace(recording.events[4], grab="g9"), "the rules make"),
    ):
        events = [*recording.events[:index], event, *recording.events[index + 1 :]]  # type: ignore[list-item]
        with pytest.raises(Differs, match=f"event 0:{index + 1}: {words}"):
            again(events, "a", TermChange({}), recording.now)
    with pytest.raises(Differs, match="0:2"):
        again(recording.events[1:], "a", TermChange({}), recording.now)
    drained = Recording(envelope())
    drained.grabs(1, 4)
    with pytest.raises(Differs, match="the rules make an event"):
        twins = Twins(0, TermChange({}), {"a:x": SEED})
        for event in drained.events[:-1]:
            twins.feed(event)
        twins.end(drained.now)


def test_an_envelope_must_be_closed() -> None:
    recording = Recording(envelope())
    recording.grabs(1, 2)
    with pytest.raises(Differs, match="not closed, so its seed is still secret"):
        recording.again(law="equal")
    recording.send(Close(id="c", offer="a:x"))
    assert numbers(recording.again(law="equal"), "rest_amount") == (
        (100 - (recording.again().recorded["a:x"].amount or 0), 50),
    )


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"law": "equal"}, "law: offer a:x is of kind stock, which has no such term"),
        ({"price": 5, "currency": "CNY"}, "needs"),
        ({"closes_at": 5}, "closes_at"),
    ],
)
def test_terms_that_an_offer_cannot_have(terms: dict[str, Any], words: str) -> None:
    recording = Recording(stock())
    with pytest.raises(CannotChange, match=words):
        recording.again(**terms)


def test_codes_fix_the_total() -> None:
    recording = Recording(CouponTerms(issuer="i", total=2, codes=True))
    recording.send(Load(id="l", offer="a:x", what="codes", chunk=1, chunks=1, items=("sealed:1", "sealed:2")))
    recording.grabs(1, 2)
    assert_as_recorded(recording.again())
    with pytest.raises(CannotChange, match="its total cannot change"):
        recording.again(total=3)


def test_differences_are_json() -> None:
    recording = Recording(stock())
    recording.grabs(1, 2)
    [difference] = recording.again(total=1).differences
    assert msgspec.json.decode(msgspec.json.encode(difference.document())) == {
        "at": START + 3, "seq": 3, "type": "grab", "offer": "a:x", "command": "g2", "grab": None,
        "user": "u2", "recorded": {"outcome": "granted", "quantity": 1, "amount": 1},
        "changed": {"outcome": "sold_out"},
    }  # fmt: skip
    assert encode_event(recording.events[0])
