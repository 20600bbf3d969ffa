"""A table of commands, situations and expected answers, in order of precedence, for rules and Lua."""

from typing import Any, NamedTuple

import msgspec

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Close, Grab, Open, Pause, Resume
from grabstream.models.offers import EnvelopeTerms
from grabstream.models.rules import ShardState, decide
from tests.support.shards import NOW

SEED = "5eed" * 16
OPENS, CLOSES = NOW + 1_000, NOW + 10_000


def terms(**changes: Any) -> EnvelopeTerms:
    asked = {
        "issuer": "alice",
        "funding": "pay-1",
        "asset": "CNY",
        "total": 1000,
        "parts": 3,
        "seed": SEED,
        "law": "equal",
    }
    return EnvelopeTerms(**{**asked, "opens_at": OPENS, "closes_at": CLOSES, **changes})


def grab(id: str, user: str, offer: str = "e", **rest: Any) -> Grab:
    return Grab(id=id, offer=offer, user=user, **rest)


class Case(NamedTuple):
    """A command sent `at` ms after NOW, the outcome, and fields that its answer must have."""

    at: int
    command: AnyCommand
    outcome: str
    fields: dict[str, Any] = {}


OPEN = Open(id="open", offer="e", terms=terms())
TABLE = [
    # before the offer is opened
    Case(0, grab("g0", "u0"), "no_such_offer"),
    Case(0, grab("g0", "u0"), "no_such_offer", {"repeated": True}),
    Case(0, grab("g0", "u0", attributes={"card": "7"}), "conflict"),
    # the id belongs to the user
    Case(0, grab("g0", "u1"), "no_such_offer"),
    Case(0, Pause(id="p0", offer="e"), "no_such_offer"),
    Case(0, Close(id="c0", offer="e"), "no_such_offer"),
    # opening
    Case(0, OPEN, "opened", {"amount": 1000, "left": 3, "seq": 1}),
    Case(1, OPEN, "opened", {"amount": 1000, "left": 3, "seq": 1, "repeated": True, "at": NOW}),
    Case(1, Open(id="open", offer="e", terms=terms(total=999)), "conflict"),
    Case(1, Open(id="open-2", offer="e", terms=terms()), "conflict"),
    Case(1, Open(id="open-3", offer="late", terms=terms(opens_at=None, closes_at=NOW)), "invalid"),
    Case(1, grab("open", "u1"), "not_open_yet", {"retry_at": OPENS}),
    # before its opening time
    Case(2, grab("g1", "u1"), "not_open_yet", {"retry_at": OPENS}),
    Case(2, grab("q", "u1", quantity=2), "invalid"),
    Case(2, Pause(id="p1", offer="e"), "paused", {"seq": 2}),
    Case(3, grab("g2", "u1"), "not_open_yet", {"retry_at": OPENS}),
    Case(1_000, grab("g1", "u1"), "not_open_yet", {"repeated": True}),
    # paused, after its opening time
    Case(1_000, grab("g3", "u1"), "on_hold"),
    Case(1_001, Resume(id="r1", offer="e"), "resumed", {"seq": 3}),
    Case(1_001, Resume(id="r1", offer="e"), "resumed", {"seq": 3, "repeated": True}),
    # open
    Case(1_002, grab("g4", "u1"), "granted", {"place": 1, "left": 2, "quantity": 1, "seq": 4, "grab": "g4"}),
    Case(
        1_003,
        grab("g4", "u1"),
        "granted",
        {"place": 1, "left": 2, "seq": 4, "repeated": True, "at": NOW + 1_002},
    ),
    Case(1_003, grab("g4", "u1", attributes={"card": "7"}), "conflict"),
    Case(1_003, grab("g5", "u1"), "already_taken", {"place": 1, "seq": 4}),
    Case(1_003, grab("g5", "u1"), "already_taken", {"place": 1, "seq": 4, "repeated": True}),
    Case(1_004, Pause(id="p2", offer="e"), "paused"),
    Case(1_004, grab("g6", "u1"), "already_taken", {"place": 1}),
    Case(1_004, grab("g7", "u2"), "on_hold"),
    Case(1_005, Resume(id="r2", offer="e"), "resumed"),
    Case(1_006, grab("g4", "u2", attributes={"card": "7"}), "granted", {"place": 2, "left": 1}),
    Case(1_006, grab("g4", "u1"), "granted", {"place": 1, "seq": 4, "repeated": True}),
    Case(1_006, grab("g4", "u2"), "conflict"),
    Case(1_007, grab("g9", "u3"), "granted", {"place": 3, "left": 0}),
    # drained, and closed in the same call
    Case(1_008, grab("g10", "u4"), "sold_out"),
    Case(1_008, grab("g11", "u3"), "already_taken", {"place": 3}),
    Case(1_008, Pause(id="p3", offer="e"), "over"),
    Case(1_008, Close(id="c1", offer="e"), "over"),
    Case(10_001, grab("g12", "u5"), "sold_out"),
    # closed by command
    Case(
        20_000,
        Open(id="open-f", offer="f", terms=terms(opens_at=None, closes_at=None, draw="at_grab")),
        "opened",
    ),
    Case(20_001, grab("f1", "u1", "f"), "granted", {"place": 1}),
    Case(20_002, Close(id="c-f", offer="f"), "closed", {"left": 2}),
    Case(20_003, Close(id="c-f", offer="f"), "closed", {"left": 2, "repeated": True}),
    Case(20_003, Close(id="c-f2", offer="f"), "over"),
    Case(20_003, Resume(id="r-f", offer="f"), "over"),
    Case(20_003, grab("f2", "u2", "f"), "over"),
    Case(20_003, grab("f3", "u1", "f"), "already_taken", {"place": 1}),
    Case(20_003, grab("f1", "u1", "f"), "granted", {"repeated": True}),
    # past its closing time: the scripts answer `over` at once, the sweeper writes the event
    Case(30_000, Open(id="open-g", offer="h", terms=terms(opens_at=None, closes_at=NOW + 30_500)), "opened"),
    Case(30_499, grab("h1", "u1", "h"), "granted"),
    Case(30_500, grab("h2", "u2", "h"), "over"),
    Case(30_500, grab("h3", "u1", "h"), "already_taken"),
    # a clock that went back: the time of the shard does not
    Case(29_000, grab("h4", "u3", "h"), "on_hold", {}),
]
TABLE[-1] = Case(29_000, Pause(id="p-h", offer="h"), "paused", {"at": NOW + 30_499})


def check(case: Case, answer: Answer) -> None:
    answered = msgspec.structs.asdict(answer)
    assert answered["outcome"] == case.outcome, case
    for name, value in case.fields.items():
        assert answered[name] == value, (case, name)
    for name in ("repeated",):
        if name not in case.fields:
            assert not answered[name], case


def test_the_pure_rules_give_the_answers_of_the_table() -> None:
    # One shard is enough for the rules.
    state = ShardState(0)
    for case in TABLE:
        check(case, decide(state, case.command, NOW + case.at, {"sealed_seed": "x"}).answer)


async def test_lua_gives_the_answers_of_the_table(make_gate: Any, client: Any, keys: Any) -> None:
    now = [NOW]
    gate = make_gate(now)
    states = {number: ShardState(number) for number in range(keys.shards)}
    for case in TABLE:
        now[0] = NOW + case.at
        [answer] = await gate.decide([case.command], "decided")
        # In the table all offers share one shard and its time; here `h` may be in another shard.
        if case.command.offer in ("e", "f") or case.at <= 30_000:
            check(case, answer)
        shard = keys.shard_of_offer(case.command.offer)
        decided = decide(states[shard], case.command, now[0], {"sealed_seed": "x"})
        assert answer == decided.answer, case
