"""Offers that retire while their campaign lives: from the retiring call on nothing is answered from what they
left, money that still comes is booked once, and what they left is deleted in small steps.
"""

import re
import time
from typing import Any

import msgspec
import pytest

from grabstream.lua.gate.door import Gate
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.lua.loader import SCRIPTS
from grabstream.models.answers import Answer
from grabstream.models.commands import (
    Adjust,
    Amend,
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
    Undecodable,
    Unredeem,
    decode_command,
)  # fmt: skip
from grabstream.models.entries import Entry
from grabstream.models.offers import PAYMENTS_KEPT_MS, PAYMENTS_KNOWN_MS, Changes, EnvelopeTerms
from grabstream.streams.deciding.sweeper import Sweeper
from tests.lua.conftest import NOW, SEALER, grabs, opening
from tests.lua.histories.scene import DAY, MINUTE, Scene, by_user, coupon, stock

PRICED: dict[str, Any] = {
    "price": 250,
    "currency": "CNY",
    "hold_ms": MINUTE,
    "max_per_grab": 1_000,
    "retire_after_ms": DAY,
}


def envelope(parts: int = 10, **rest: Any) -> EnvelopeTerms:
    return EnvelopeTerms(
        seed="5e" * 16,
        issuer="alice",
        funding="pay",
        asset="CNY",
        total=parts * 100,
        parts=parts,
        retire_after_ms=DAY,
        **rest,
    )


def of_offer(scene: Scene, offer: str) -> ShardKeys:
    return scene.keys.shard(scene.keys.shard_of_offer(offer))


async def retire(scene: Scene, *offers: str) -> None:
    """Closes offers and retires them; what they left is not cleaned."""
    for offer in offers:
        await scene.do(Close, offer=offer)
    scene.now += 3 * DAY
    await scene.sweep_without_cleaning()
    assert {event.offer for event in await scene.events("offer.retired")} >= set(offers)


async def clean(scene: Scene, offer: str, steps_max: int | None = None) -> int:
    return await scene.sweeper(scene.keys.shard_of_offer(offer)).clean(scene.now, steps_max)


async def pay(scene: Scene, grab: str | None, payment: str, paid: int = 250, **rest: Any) -> Answer:
    return await scene.do(Confirm, grab=grab, payment=payment, paid=paid, currency="CNY", **rest)


# -- what is remembered --------------------------------------------------------------------------------------


@pytest.mark.parametrize("offer", ["m", "m:a"])
@pytest.mark.parametrize(
    "terms", [envelope(), envelope(draw="at_grab"), coupon(9, retire_after_ms=DAY), stock(9, **PRICED)]
)
@pytest.mark.parametrize("cleaned", [False, True])
async def test_a_repeat_after_its_offer_retired_is_no_such_offer_and_harms_nobody(
    scene: Scene, offer: str, terms: Any, cleaned: bool
) -> None:
    """Alone and in one call with a grab of a living offer of the campaign; whatever the offer's name, cleaned
    or not.
    """
    await scene.open(stock(9), "m:living")
    await scene.open(terms, offer)
    grab = Grab(id="g", offer=offer, user="ann")
    [first] = await scene.decide_both([grab])
    assert first.positive
    refused = (
        Grab(id="again", offer=offer, user="ann", quantity=1_000)
        if isinstance(terms, EnvelopeTerms)
        else None
    )
    await scene.decide_both([refused or grab])
    if first.outcome == "held":
        scene.now += 2 * MINUTE
    await retire(scene, offer)
    if cleaned:
        await clean(scene, offer)
    [alone] = await scene.decide_both([grab])
    assert (alone.outcome, alone.repeated) == ("no_such_offer", False)
    there, gone = await scene.decide_both([Grab(id="other", offer="m:living", user="bob"), grab])
    assert (there.outcome, gone.outcome) == ("granted", "no_such_offer")


@pytest.mark.parametrize("cleaned", [False, True])
@pytest.mark.parametrize("gone", ["m:a", "m:b"])
async def test_a_basket_is_repeated_after_one_of_its_offers_retired(
    scene: Scene, gone: str, cleaned: bool
) -> None:
    for offer in ("m:a", "m:b"):
        await scene.open(stock(9, retire_after_ms=DAY), offer)
    basket = [Grab(id=f"g-{offer}", offer=offer, user="ann", basket="both") for offer in ("m:a", "m:b")]
    assert [answer.outcome for answer in await scene.decide_both(basket)] == ["granted", "granted"]
    await retire(scene, gone)
    if cleaned:
        await clean(scene, gone)
    answers = {answer.offer: (answer.outcome, answer.repeated) for answer in await scene.decide_both(basket)}
    assert answers == {"m:a": ("granted", True), "m:b": ("granted", True)} | {gone: ("no_such_offer", False)}


@pytest.mark.parametrize("cleaned", [False, True])
async def test_every_repeat_of_every_command_after_retirement(scene: Scene, cleaned: bool) -> None:
    """Those that were carried out, those that were refused, and those whose effect already held."""
    await scene.open(coupon(9), "m:living")
    terms = coupon(6, by_user("offer", 5), opens_at=NOW + 1, retire_after_ms=DAY, codes=True)
    commands: list[Any] = [
        Open(id="o", offer="m:a", terms=terms),
        Load(id="l", offer="m:a", what="codes", chunk=1, chunks=1, items=tuple(f"k{n}" for n in range(6))),
    ]
    await scene.decide_both(commands)
    scene.now += 1
    more = [
        Pause(id="p", offer="m:a"), Grab(id="on-hold", offer="m:a", user="ann"), Resume(id="r", offer="m:a"),
        Amend(id="am", offer="m:a", changes=Changes(title="t")),
        Adjust(id="ad", offer="m:a", transfers=(Entry("CNY", "issuer:a", "wallet:b", 5),), reason="r",
        approved_by="boss"),
        Grab(id="g", offer="m:a", user="ann"), Redeem(id="re", offer="m:a", grab="g", order="o1"),
        Redeem(id="re2", offer="m:a", grab="g", order="o1"),
        Unredeem(id="un", offer="m:a", grab="g", order="o1"),
        Return(id="ret", offer="m:a", grab="g"), Release(id="rel", offer="m:a", grab="g"),
        Extend(id="ex", offer="m:a", grab="g"),
        Confirm(id="co", offer="m:a", grab="g"), Close(id="cl", offer="m:a"),
        Grab(id="over", offer="m:a", user="bob"),
    ]  # fmt: skip
    for command in more:
        await scene.decide_both([command])
    await retire(scene, "m:a")
    if cleaned:
        await clean(scene, "m:a")
    for command in [*commands[1:], *more]:
        [answer] = await scene.decide_both([command])
        assert (answer.outcome, answer.repeated) == ("no_such_offer", False), command
    [reopened] = await scene.decide_both(commands[:1])
    assert reopened.outcome == "conflict"


async def test_a_return_that_is_repeated_while_its_offer_retires_refunds_once(scene: Scene) -> None:
    await scene.open(stock(9), "m:living")
    await scene.open(stock(9, **PRICED), "m:a")
    grab = (await scene.grab("ann")).grab
    await pay(scene, grab, "p1")
    back = Return(id="back", offer="m:a", grab=grab or "")
    await scene.decide_both([back])
    await scene.do(Close)
    for steps in range(4):
        scene.now += DAY // 2
        if steps == 2:
            await scene.sweep_both()
        answers = await scene.decide_both([back, back])
        assert {answer.outcome for answer in answers} <= {"returned", "no_such_offer"}
        await clean(scene, "m:a", 1)
    assert len(await scene.events("grab.returned")) == 1


async def test_ids_of_a_retired_offer_are_used_again_and_cleaning_leaves_what_is_new(scene: Scene) -> None:
    await scene.open(coupon(9), "m:living")
    await scene.open(coupon(3, retire_after_ms=DAY), "m")
    old = [Grab(id=f"g{n}", offer="m", user=f"u{n}") for n in range(6)]
    assert [answer.outcome for answer in await scene.decide_both(old)] == 3 * ["granted"] + 3 * ["sold_out"]
    await retire(scene, "m")
    new = [msgspec.structs.replace(grab, offer="m:living") for grab in old]
    firsts = await scene.decide_both(new)
    assert {answer.outcome for answer in firsts} == {"granted"}
    await clean(scene, "m")
    again = await scene.decide_both(new)
    assert again == [msgspec.structs.replace(first, repeated=True) for first in firsts]
    kept = await scene.client.hkeys(of_offer(scene, "m").answers("m"))
    assert {name.decode() for name in kept} >= {grab.id for grab in new}


async def test_one_pass_cleans_for_all_offers_that_retired_and_goes_on_after_it_was_broken_off(
    client: Any, gate: Any, keys: KeySpace
) -> None:
    now = [NOW]
    one: Gate = gate(now)
    await one.decide(
        [opening("m:living", 9_000), *(opening(f"m:{n}", 1_000, retire_after_ms=DAY) for n in range(3))],
        "decided",
    )
    await one.decide(grabs(2_500, "m:living"), "decided", timeout_ms=20_000)
    for n in range(3):
        await one.decide(grabs(700, f"m:{n}"), "decided", timeout_ms=20_000)
    shard = keys.shard(keys.shard_of_offer("m:0"))
    sweeper = Sweeper(client, shard, keys.shards, 10**12)
    await one.decide([Close(id=f"close{n}", offer=f"m:{n}") for n in range(2)], "decided")
    now[0] += DAY
    await sweeper.sweep(now[0])
    assert await sweeper.clean(now[0], steps_max=2) == 2
    # One more retires while a pass is under way, and the sweeper that made it is gone.
    await one.decide([Close(id="close2", offer="m:2")], "decided")
    now[0] += DAY
    sweeper = Sweeper(client, shard, keys.shards, 10**12)
    await sweeper.sweep(now[0])
    steps = await sweeper.clean(now[0])
    assert await client.hgetall(shard.cleaning) == {}
    kept = {name.decode() for name in await client.hkeys(shard.answers("m"))}
    assert kept == {"open-m:living", *(grab.id for grab in grabs(2_500, "m:living"))}
    assert steps <= 2 * (2_500 + 3 * 702) / 500 + 2


async def test_a_cursor_of_another_history_begins_anew(client: Any, gate: Any, keys: KeySpace) -> None:
    """Another server orders its fields otherwise."""
    now = [NOW]
    one: Gate = gate(now)
    await one.decide(
        [opening("m:living"), opening("m:a", 1_500, retire_after_ms=0), *grabs(900, "m:a")],
        "decided",
        timeout_ms=20_000,
    )
    await one.decide([Close(id="close", offer="m:a")], "decided")
    shard = keys.shard(keys.shard_of_offer("m:a"))
    sweeper = Sweeper(client, shard, keys.shards, 10**12)
    await sweeper.sweep(now[0] + 1)
    await client.hset(shard.cleaning, "m/answers", f"999999:{2**40}:0")
    await sweeper.clean(now[0] + 1)
    assert await client.hkeys(shard.answers("m")) == [b"open-m:living"]


async def test_holds_end_in_time_while_many_offers_retire_beside_one_with_many_grabs(own: Any) -> None:
    """200 empty offers retire beside 100,000 grabs: expiry, closing and lines do not wait, and cleaning looks
    at all of it once.
    """
    client, keys = own
    now = [int(time.time() * 1000)]
    gate = Gate(client, keys, SEALER, clock=lambda: now[0])
    count = 100_000
    await gate.decide([opening("m:big", count)], "decided", timeout_ms=60_000)
    crowd = grabs(count, "m:big")
    for start in range(0, count, 10_000):
        await gate.decide(crowd[start : start + 10_000], "decided", timeout_ms=60_000)
    await gate.decide(
        [opening(f"m:{n}", retire_after_ms=0) for n in range(200)], "decided", timeout_ms=60_000
    )
    await gate.decide(
        [Close(id=f"close{n}", offer=f"m:{n}") for n in range(200)], "decided", timeout_ms=60_000
    )
    shard = keys.shard(0)
    sweeper = Sweeper(client, shard, 1, 10**12)
    now[0] += 1_000
    began = time.monotonic()
    await sweeper.sweep(now[0])
    swept = time.monotonic() - began
    assert await client.scard(shard.retired) == 200
    assert swept < 2
    await client.config_set("slowlog-log-slower-than", 0)
    await client.slowlog_reset()
    steps = await sweeper.clean(now[0])
    assert 100 < steps < 2 * (count + 400) / 500
    slowest = max(entry["duration"] for entry in await client.slowlog_get(128))
    assert slowest < 50_000, f"a step of cleaning took {slowest} µs"
    assert await client.hlen(shard.answers("m")) == count + 1
    await gate.close()


# -- late money ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("living", [False, True])
@pytest.mark.parametrize("cleaned", [False, True])
async def test_a_payment_that_was_served_is_never_refunded_after_its_offer_retired(
    scene: Scene, living: bool, cleaned: bool
) -> None:
    if living:
        await scene.open(stock(9), "m:living")
    await scene.open(stock(9, **PRICED), "m:a")
    grab = (await scene.grab("ann")).grab or ""
    command = Confirm(id="paid", offer="m:a", grab=grab, payment="p1", paid=250, currency="CNY")
    [first] = await scene.decide_both([command])
    late = await pay(scene, grab, "p2")
    assert late.outcome == "not_held"
    await retire(scene, "m:a")
    if cleaned:
        await clean(scene, "m:a")
    for again in (command, msgspec.structs.replace(command, id="callback")):
        [answer] = await scene.decide_both([again])
        assert (answer.outcome, answer.repeated, answer.seq, answer.quantity) == (
            "confirmed",
            True,
            first.seq,
            1,
        )
    answer = await pay(scene, grab, "p2")
    assert (answer.outcome, answer.repeated, answer.seq) == ("not_held", True, late.seq)
    assert len(await scene.events("payment.refund_due")) == 1


@pytest.mark.parametrize("living", [False, True])
async def test_money_that_comes_after_retirement_is_to_be_paid_back_once(scene: Scene, living: bool) -> None:
    if living:
        await scene.open(stock(9), "m:living")
    await scene.open(stock(9, **PRICED), "m:a")
    grab = (await scene.grab("ann")).grab or ""
    scene.now += 2 * MINUTE
    await retire(scene, "m:a")
    [retired] = await scene.events("offer.retired")
    command = Confirm(id="late", offer="m:a", grab=grab, payment="p1", paid=250, currency="CNY")
    [first, twice] = await scene.decide_both([command, command])
    assert (first.outcome, first.repeated, first.message) == (
        "no_such_offer",
        False,
        "the payment is to be paid back",
    )
    assert (twice.outcome, twice.repeated, twice.seq) == ("no_such_offer", True, first.seq)
    second = await pay(scene, grab, "p2", 7)
    for number in range(scene.keys.shards):
        await scene.compare_recovered(number)
    await clean(scene, "m:a")
    [again] = await scene.decide_both([msgspec.structs.replace(command, id="callback")])
    assert (again.outcome, again.repeated, again.seq) == ("no_such_offer", True, first.seq)
    due = await scene.events("payment.refund_due")
    assert [(one.payment, one.amount, one.outcome, one.seq) for one in due] == [
        ("p1", 250, "no_such_offer", first.seq), ("p2", 7, "no_such_offer", second.seq),
    ]  # fmt: skip
    assert [one.offer_seq for one in due] == [retired.offer_seq + 1, retired.offer_seq + 2]
    other = await pay(scene, "another", "p1")
    assert other.outcome == "conflict"


async def test_money_for_an_envelope_that_has_retired_is_to_be_paid_back(scene: Scene) -> None:
    await scene.open(envelope(), "e")
    await retire(scene, "e")
    assert (await pay(scene, "nobody-s", "p1", offer="e")).message == "the payment is to be paid back"
    assert len(await scene.events("payment.refund_due", outcome="no_such_offer")) == 1


async def test_money_for_an_offer_that_never_was_makes_no_event_and_is_not_answered_by_the_outcome_alone(
    scene: Scene,
) -> None:
    command = Confirm(id="c", offer="never", grab="g", payment="p", paid=250, currency="CNY")
    for answer in [*(await scene.decide_both([command])), *(await scene.decide_both([command, command]))]:
        assert answer.outcome == "no_such_offer"
        assert "nothing was booked" in (answer.message or "")
    free = await scene.do(Confirm, offer="never", grab="g")
    assert (free.outcome, free.message) == ("no_such_offer", None)
    assert not await scene.all_lines()


@pytest.mark.parametrize("cleaned", [False, True])
async def test_payments_are_known_for_180_days_to_the_millisecond(scene: Scene, cleaned: bool) -> None:
    """After that nobody here can tell a served payment's callback from new money: nothing is booked, and the
    answer says so.
    """
    await scene.open(stock(9, **PRICED), "m:a")
    grab = (await scene.grab("ann")).grab or ""
    first = await pay(scene, grab, "p1")
    await retire(scene, "m:a")
    [retired] = await scene.events("offer.retired")
    scene.now = retired.at + PAYMENTS_KNOWN_MS - 1
    known = await pay(scene, grab, "p1")
    assert (known.outcome, known.seq) == ("confirmed", first.seq)
    assert (await pay(scene, grab, "p2")).message == "the payment is to be paid back"
    scene.now += 1
    if cleaned:
        scene.now = retired.at + PAYMENTS_KEPT_MS
        shard = of_offer(scene, "m:a")
        assert await clean(scene, "m:a") > 0
        _, payments, _, state, _ = shard.of_campaign("m")
        assert await scene.client.exists(payments, state, shard.past) == 0
    for payment in ("p1", "p2", "p3"):
        answer = await pay(scene, grab, payment)
        assert (answer.outcome, answer.seq) == ("no_such_offer", None)
        assert "view payments" in (answer.message or "")
    assert len(await scene.events("payment.refund_due")) == 1


async def test_cleaning_does_not_forget_payments_before_their_time(scene: Scene) -> None:
    """A campaign's older offer is forgotten; what is known of its younger one, and of a living one, stays."""
    grab = {}
    for offer in ("m:a", "m:b", "m:living"):
        await scene.open(stock(9, **PRICED), offer)
        grab[offer] = (await scene.grab("ann")).grab
        assert (await pay(scene, grab[offer], f"p-{offer}")).outcome == "confirmed"
    await retire(scene, "m:a")
    scene.now += 100 * DAY
    await retire(scene, "m:b")
    scene.now += 90 * DAY
    await clean(scene, "m:a")
    _, payments, _, state, _ = of_offer(scene, "m:a").of_campaign("m")
    assert {name.decode() for name in await scene.client.hkeys(payments)} == {"p-m:b", "p-m:living"}
    assert set(await scene.client.hkeys(state)) == {b"retired/m:b", b"zone"}
    for offer in ("m:b", "m:living"):
        answer = await pay(scene, grab[offer], f"p-{offer}", offer=offer)
        assert (answer.outcome, answer.repeated) == ("confirmed", True)


async def test_a_payment_id_in_a_later_life_of_its_campaign(scene: Scene) -> None:
    """Known, it is a conflict; when it has long been forgotten, it is another payment."""
    await scene.open(stock(9, **PRICED), "m:a")
    first = (await scene.grab("ann")).grab
    await pay(scene, first, "p1")
    await retire(scene, "m:a")
    await scene.open(stock(9, **PRICED | {"hold_ms": 300 * DAY}), "m:b")
    second = (await scene.grab("ann", offer="m:b")).grab
    assert (await pay(scene, second, "p1", offer="m:b")).outcome == "conflict"
    scene.now += PAYMENTS_KNOWN_MS
    assert (await pay(scene, second, "p1", offer="m:b")).outcome == "confirmed"
    assert [event.offer for event in await scene.events("grab.confirmed", payment="p1")] == ["m:a", "m:b"]
    await clean(scene, "m:a")
    scene.now += DAY
    await clean(scene, "m:a")
    assert (await pay(scene, second, "p1", offer="m:b")).repeated


def test_lua_keeps_payments_as_long_as_python_says() -> None:
    of_scripts = {
        name: re.search(rf"local {name} = (.+)", (SCRIPTS / file).read_text())
        for name, file in (
            ("PAYMENTS_KNOWN_MS", "includes/past.lua"),
            ("PAYMENTS_KEPT_MS", "sweeping/forget.lua"),
        )
    }
    assert {name: found and found[1] for name, found in of_scripts.items()} == {
        "PAYMENTS_KNOWN_MS": "180 * 86400000", "PAYMENTS_KEPT_MS": "PAYMENTS_KNOWN_MS + 86400000",
    }  # fmt: skip
    assert (PAYMENTS_KNOWN_MS, PAYMENTS_KEPT_MS - PAYMENTS_KNOWN_MS) == (180 * DAY, DAY)


# -- bounded grabs -------------------------------------------------------------------------------------------


async def test_a_redemption_costs_the_same_whatever_was_redeemed_before(own: Any) -> None:
    client, keys = own
    gate = Gate(client, keys, SEALER, clock=lambda: NOW)
    await gate.decide(
        [
            Open(id="o", offer="c", terms=coupon(10, max_per_grab=5)),
            Grab(id="g", offer="c", user="u", quantity=5),
        ],
        "decided",
    )
    record = keys.shard(0).of_offer("c")[3]
    size = await client.hstrlen(record, "g")
    for n in range(3_000):
        pair = [
            Redeem(id=f"r{n}", offer="c", grab="g", order=f"o{n}"),
            Unredeem(id=f"u{n}", offer="c", grab="g", order=f"o{n}"),
        ]
        answers = await gate.decide(pair, "decided")
        assert [answer.outcome for answer in answers] == ["redeemed", "unredeemed"]
    assert await client.hstrlen(record, "g") <= size
    again = await gate.decide(
        [
            Unredeem(id="new", offer="c", grab="g", order="o0"),
            Redeem(id="new2", offer="c", grab="g", order="o0"),
        ],
        "decided",
    )
    assert [(answer.outcome, answer.repeated) for answer in again] == [
        ("unredeemed", True),
        ("redeemed", False),
    ]
    await gate.close()


async def test_a_grab_has_a_hundred_payments_at_once_and_one_more_is_to_be_paid_back(scene: Scene) -> None:
    await scene.open(stock(500, **PRICED), "m:a")
    grab = (await scene.grab("ann", 200)).grab
    for number in range(100):
        assert (await pay(scene, grab, f"p{number}", quantity=1)).outcome == "confirmed"
    over = await pay(scene, grab, "p100", quantity=1)
    assert over.outcome == "limit_reached"
    assert "the payment is to be paid back" in (over.message or "")
    assert (await pay(scene, grab, "p100", quantity=1)).repeated
    await scene.do(Return, grab=grab, quantity=1)
    assert (await pay(scene, grab, "p101", quantity=1)).outcome == "confirmed"
    assert max(map(len, await scene.all_lines())) < 16_384


async def test_units_that_are_retaken_in_one_window_are_counted_together(scene: Scene) -> None:
    terms = PRICED | {"late": "retake"}
    await scene.open(stock(500, by_user("day", 400), **terms), "m:a")
    grab = (await scene.grab("ann", 150)).grab
    scene.now += 2 * MINUTE
    for number in range(90):
        assert (await pay(scene, grab, f"p{number}", quantity=1)).outcome == "confirmed"
    state = scene.states[scene.keys.shard_of_offer("m:a")].offers["m:a"]
    assert len(state.grabs[grab or ""].counted) == 1
    await scene.do(Return, grab=grab)


# -- reserved ids --------------------------------------------------------------------------------------------


async def test_nobody_sends_a_command_under_an_id_that_the_system_writes_itself(gate: Any) -> None:
    one: Gate = gate([NOW])
    await one.decide([opening("o")], "decided")
    [alone] = await one.decide([Grab(id="sweep", offer="o", user="ann")], "decided")
    together = await one.decide(
        [Grab(id="g", offer="o", user="sweep"), Grab(id="sweep", offer="o", user="ann")], "decided"
    )
    for answer in (alone, together[1]):
        assert answer.outcome == "invalid"
        assert "reserved" in (answer.message or "")
    assert together[0].outcome == "granted"


def test_a_reserved_id_is_refused_at_the_door_of_the_topic() -> None:
    with pytest.raises(Undecodable, match="id: sweep is reserved"):
        decode_command(b'{"type":"grab","id":"sweep","offer":"o","user":"ann"}')
