"""Envelopes whose parts follow from a round of a public randomness beacon too: by the pure rules and by
Redis, and the same after a recovery.
"""

import itertools
import time
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.beacon import CHAINS, beacon_of, mixed, round_of
from grabstream.models.commands import Amend, Close, Open, check
from grabstream.models.events import decode_event
from grabstream.models.fairness import BEACON, DRAWN, PARTS, verify_fairness
from grabstream.models.money import Invalid
from grabstream.models.offers import Changes, EnvelopeTerms, check_changes
from grabstream.models.splitting import next_part
from tests.conftest import until
from tests.lua.histories.recovered import contents, fold
from tests.lua.histories.scene import Scene
from tests.support.shards import NOW, SEALER, event_lines, grabs, opening, take_over

QUICKNET = next(iter(CHAINS))
#: Round 1000 of quicknet.
OF_ROUND_1000 = (
    "fe290beca10872ef2fb164d2aa4442de4566183ec51c56ff3cd603d930e54fdd",
    "b44679b9a59af2ec876b1a6b1ad52ea9b1615fc3982b19576350f93447cb1125e342b73a8dd2bacbe47e4b6b63ed5e39",
)


def next_round(now: int) -> int:
    """The first round of quicknet after a time in ms."""
    chain = CHAINS[QUICKNET]
    return (now - chain.genesis_ms) // chain.period_ms + 2


def given(number: int, byte: int = 7) -> str:
    """A round with an invalid signature: scripts and rules look at its hash alone."""
    signature = bytes([byte]) * 48
    return f"{number}/{sha256(signature).hexdigest()}/{signature.hex()}"


def envelope(number: int, **terms: Any) -> EnvelopeTerms:
    fixed = {"issuer": "i", "funding": "p", "asset": "CNY", "total": 10_000, "parts": 8, "draw": "at_grab"}
    return EnvelopeTerms(**{**fixed, "beacon": f"{QUICKNET}/{number}", **terms})


def test_a_round_as_the_beacon_gives_it() -> None:
    found = round_of("/".join(("1000", *OF_ROUND_1000)))
    assert (found.number, found.randomness, found.signature) == (1000, *OF_ROUND_1000)
    assert beacon_of(f"{QUICKNET}/1000").at == 1_692_806_364_000
    assert mixed("5eed", None) == "5eed"
    assert mixed("5eed", "ab") == "5eed:ab"


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "0/" + "/".join(OF_ROUND_1000), "1000/" + OF_ROUND_1000[0] + "/00",
        "1000/" + "0" * 64 + "/" + OF_ROUND_1000[1], "1000/" + "/".join(OF_ROUND_1000).upper(),
        "1/" * 100_000, "1000/" + "/".join(OF_ROUND_1000) + "\n", 5,
    ],
)  # fmt: skip
def test_what_is_no_round_is_refused(text: Any) -> None:
    with pytest.raises(Invalid, match=r"^changes\.randomness: ") as raised:
        check_changes(Changes(randomness=text))
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ({"beacon": "x"}, "terms.beacon: must be <hash"), ({"beacon": "ab" * 32 + "/5"}, "is not known"),
        ({"beacon": f"{QUICKNET}/0"}, "must be"), ({"draw": "ahead"}, "terms.beacon: needs draw at_grab"),
        ({"beacon": 5}, "terms.beacon: must be a string"), ({"beacon": f"{QUICKNET}/{10**13}"}, "must be"),
    ],
)  # fmt: skip
def test_a_beacon_that_cannot_be_is_refused(terms: dict[str, Any], reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        check(Open(id="o", offer="e", terms=envelope(5, **terms)))


async def test_parts_follow_from_seed_and_beacon(scene: Scene, keys: KeySpace) -> None:
    number = next_round(NOW)
    early = await scene.do(Open, terms=envelope(number - 1))
    assert (early.outcome, (early.message or "")[:13]) == ("invalid", "terms.beacon:")
    # The rules draw nothing at random, so they are given the seed.
    await scene.open(envelope(number, seed="5eed" * 16))
    assert await scene.outcomes("a", "b") == ["not_open_yet", "not_open_yet"]
    due = CHAINS[QUICKNET].at(number)
    scene.now = due - 1
    assert (await scene.amend(randomness=given(number))).message == (
        "changes.randomness: the round is not due yet"
    )
    scene.now = due
    for randomness, reason in (
        (given(number + 1), f"changes.randomness: the offer awaits round {number}"),
        (given(number - 1), f"changes.randomness: the offer awaits round {number}"),
    ):
        assert (await scene.amend(randomness=randomness)).message == reason
    assert (await scene.amend(title="x")).outcome == "amended"
    assert await scene.outcomes("a") == ["not_open_yet"]
    assert (await scene.amend(randomness=given(number))).outcome == "amended"
    again = await scene.amend(randomness=given(number, 8))
    assert again.message == "changes.randomness: was already given"
    assert await scene.outcomes("a", "b", "c", "a") == ["granted", "granted", "granted", "already_taken"]
    assert (await scene.do(Close)).outcome == "closed"
    await scene.open(envelope(1, beacon=None, seed="5eed" * 16), "plain")
    assert (
        await scene.amend(randomness=given(1))
    ).message == "changes.randomness: the offer does not await a beacon"

    events = [event for event in map(decode_event, await scene.all_lines()) if event.offer == "o"]
    result = verify_fairness("o", events)
    assert [check.name for check in result.checks if check.problem] == [DRAWN]
    assert f"{QUICKNET}/public/{number}" in result.not_proved[0]
    source = f"{result.seed}:{sha256(bytes([7]) * 48).hexdigest()}"
    amounts = [event.amount for event in events if event.__struct_config__.tag == "grab.granted"]
    expected, left = [], 10_000
    for place in range(1, 4):
        expected.append(next_part("double_mean", left, 9 - place, 1, 10_000, source, place))
        left -= expected[-1]
    assert amounts == expected


def failing(events: Any) -> list[str]:
    return [one.name for one in verify_fairness("e", events).checks if one.problem is not None]


@pytest.mark.long
async def test_a_recovery_and_the_verifier(client: Any, keys: KeySpace) -> None:
    await take_over(client, keys)
    gate = Gate(client, keys, SEALER)
    round_number = next_round(time.time_ns() // 1_000_000) + 1
    terms = {"draw": "at_grab", "beacon": f"{QUICKNET}/{round_number}"}
    ids = itertools.count()

    async def amended_by_the_round() -> bool:
        changes = Changes(randomness=given(round_number))
        [answer] = await gate.decide([Amend(id=f"am{next(ids)}", offer="e", changes=changes)], "decided")
        if answer.outcome == "invalid":
            assert answer.message == "changes.randomness: the round is not due yet"
        return answer.outcome == "amended"

    try:
        answers = await gate.decide([opening("e", 8, **terms), *grabs(1, "e")], "decided")
        assert [answer.outcome for answer in answers] == ["opened", "not_open_yet"]
        await until(amended_by_the_round, 60, "the round")
        answers = await gate.decide(grabs(5, "e", 10), "decided")
        assert {answer.outcome for answer in answers} == {"granted"}
        number = keys.shard_of_offer("e")
        space = KeySpace(f"{keys.prefix}-again", keys.shards)
        try:
            lines = await event_lines(client, keys, number)
            await fold(client, space.shard(number), lines, SEALER, keys.shards)
            assert await contents(client, space.shard(number)) == await contents(client, keys.shard(number))
        finally:
            async for key in client.scan_iter(match=f"{space.prefix}:*"):
                await client.delete(key)
        assert (await gate.decide([Close(id="c", offer="e")], "decided"))[0].outcome == "closed"
        events = list(map(decode_event, await event_lines(client, keys, number)))
    finally:
        await gate.close()
    assert failing(events) == []
    by_tag = [event.__struct_config__.tag for event in events]
    amended = events[by_tag.index("offer.amended")]
    without = [event for event in events if event is not amended]
    assert failing(without) == [BEACON, PARTS]
    assert failing([without[0], without[1], amended, *without[2:]]) == [BEACON]
    assert failing([*events[:2], amended, *events[2:]]) == [BEACON]

    def altered(**fields: Any) -> list[Any]:
        return [msgspec.structs.replace(event, **fields) if event is amended else event for event in events]

    def changes(text: str) -> Any:
        return msgspec.Raw(msgspec.json.encode(Changes(randomness=text)))

    assert failing(altered(changes=changes(given(round_number, 9)))) == [PARTS]
    assert failing(altered(changes=changes(given(5)))) == [BEACON]
    assert failing(altered(changes=changes("5/x/y"))) == [BEACON, PARTS]
    due = beacon_of(f"{QUICKNET}/{round_number}").at
    late = msgspec.structs.replace(events[0], at=due)
    assert failing([late, *events[1:]]) == [BEACON]
    assert failing(altered(at=due - 1)) == [BEACON]


async def test_a_gate_may_require_a_beacon(client: Any, keys: KeySpace) -> None:
    await take_over(client, keys)
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=20_000, beacon_required=True))
    try:
        [refused] = await gate.decide([opening("e", 5)], "decided")
        assert (refused.outcome, "GRAB_BEACON_REQUIRED" in (refused.message or "")) == ("invalid", True)
        terms = {"draw": "at_grab", "beacon": f"{QUICKNET}/{10**9}"}
        [opened] = await gate.decide([opening("f", 5, **terms)], "decided")
        assert opened.outcome == "opened"
    finally:
        await gate.close()
