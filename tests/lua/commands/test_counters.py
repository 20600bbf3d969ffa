"""Counters of limits: all of a user, or of a value of an attribute, are one field of a hash. By the gate and
by the rules.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from grabstream.models.answers import Answer
from grabstream.models.commands import Amend, Grab, Open, Release, Return
from grabstream.models.offers import Changes, Limit, Terms
from tests.lua.histories.scene import DAY, Scene, by_user, coupon, left_by_limit, stock
from tests.support.shards import NOW

#: A grab with attributes is decided alone, one without them with others.
ATTRIBUTES: tuple[dict[str, str], ...] = ({}, {"card": "7"})


async def opened(scene: Scene, terms: Terms) -> str:
    """Opens an offer; returns its name."""
    await scene.decide_both([Open(id="open", offer="c", terms=terms)])
    return "c"


async def grabbed(scene: Scene, offer: str, ids: Sequence[str], **rest: Any) -> list[Answer]:
    return await scene.decide_both([Grab(id=id, offer=offer, user="ann", **rest) for id in ids])


async def counters(scene: Scene, offer: str) -> dict[bytes, bytes]:
    shard = scene.keys.shard(scene.keys.shard_of_offer(offer))
    found: dict[bytes, bytes] = await scene.client.hgetall(shard.users(offer))
    return found


async def test_the_counters_of_a_user_are_one_field(scene: Scene) -> None:
    """As docs/storage.md describes it. The record of a grab does not repeat its user."""
    window = NOW // DAY
    offer = await opened(scene, stock(9, by_user("offer", 5), by_user("day", 4), Limit("card", "week", 3)))
    await grabbed(scene, offer, ["g1", "g2"], attributes={"card": "ann"})
    found = await counters(scene, offer)
    assert found.keys() == {b"user/ann", b"card/ann"}
    assert found[b"user/ann"] == b"d%d:2o0:2" % window
    record = await scene.client.hget(
        scene.keys.shard(scene.keys.shard_of_offer(offer)).offer_keys(offer)[3], "g1"
    )
    assert record.count(b"ann") == 1


@pytest.mark.parametrize("attributes", ATTRIBUTES)
async def test_limits_that_end_and_come_again_keep_their_counts(
    scene: Scene, attributes: dict[str, str]
) -> None:
    both = (by_user("offer", 9), by_user("day", 2))
    offer = await opened(scene, coupon(20, *both))
    await grabbed(scene, offer, ["g1"], attributes=attributes)
    for id, limits in (("amend1", both[:1]), ("amend2", both)):
        await scene.decide_both([Amend(id=id, offer=offer, changes=Changes(limits=limits))])
        [answer] = await grabbed(scene, offer, [f"after-{id}"], attributes=attributes)
    assert left_by_limit(answer) == {"user/offer": 6, "user/day": 0}
    scene.now += DAY
    [answer] = await grabbed(scene, offer, ["next-day"], attributes=attributes)
    assert left_by_limit(answer) == {"user/offer": 5, "user/day": 1}


@pytest.mark.parametrize("attributes", ATTRIBUTES)
async def test_a_release_gives_back_to_all_counters_of_a_grab(
    scene: Scene, attributes: dict[str, str]
) -> None:
    limits = (by_user("offer", 1), by_user("hour", 2), by_user("week", 2, scope="campaign"))
    offer = await opened(scene, stock(9, *limits, hold_ms=DAY))
    for number in range(3):
        [held] = await grabbed(scene, offer, [f"g{number}"], attributes=attributes)
        assert (held.outcome, left_by_limit(held)) == (
            "held", {"user/offer": 0, "user/hour": 1, "user/week": 1}
        )  # fmt: skip
        [refused] = await grabbed(scene, offer, [f"r{number}"], attributes=attributes)
        assert refused.outcome == "limit_reached"
        await scene.decide_both([Release(id=f"release{number}", offer=offer, grab=f"g{number}")])


async def test_a_value_may_be_the_id_of_the_user(scene: Scene) -> None:
    terms = stock(
        9, by_user("offer", 2), Limit("card", "offer", 3), Limit("user.2", "offer", 2), return_restores=True
    )
    offer = await opened(scene, terms)
    cards = {"card": "ann", "user.2": "an"}
    [first] = await grabbed(scene, offer, ["g1"], attributes=cards, quantity=1)
    assert left_by_limit(first) == {"user/offer": 1, "card/offer": 2, "user.2/offer": 1}
    await scene.decide_both([Return(id="back", offer=offer, grab="g1", reason="r")])
    [second] = await grabbed(scene, offer, ["g2"], attributes=cards)
    assert left_by_limit(second) == {"user/offer": 1, "card/offer": 2, "user.2/offer": 1}


@pytest.mark.parametrize("text", ["", "d", "d1", "x1:2", "d1:2,", "1:2", "d-1:2", "d1:2o", "\xff"])
async def test_damaged_counters_are_named(scene: Scene, text: str) -> None:
    """Grabs that need them are refused alone, and change nothing."""
    offer = await opened(scene, coupon(20, by_user("day", 2)))
    await grabbed(scene, offer, ["g1"])
    shard = scene.keys.shard(scene.keys.shard_of_offer(offer))
    [sound] = (await counters(scene, offer)).values()
    await scene.client.hset(shard.users(offer), "user/ann", text)
    seq = await scene.client.hget(shard.state, "seq")
    for number, attributes in enumerate(ATTRIBUTES):
        grab = Grab(id=f"again{number}", offer=offer, user="ann", attributes=attributes)
        [answer] = await scene.gate.decide([grab], "decided")
        assert (answer.outcome, "damaged" in (answer.message or "")) == ("invalid", True)
    assert await scene.client.hget(shard.state, "seq") == seq
    await scene.client.hset(shard.users(offer), "user/ann", sound)
