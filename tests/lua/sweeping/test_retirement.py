"""Offers that retire while their campaign has other offers: from the retiring call on their stored answers do
not count, late payments are booked once, and their data is deleted in small steps.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from grabstream.gate.gate import Gate
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
from grabstream.models.offers import (
    PAYMENTS_KEPT_MS,
    PAYMENTS_KNOWN_MS,
    Changes,
    CouponTerms,
    EnvelopeTerms,
)
from grabstream.streams.deciding.sweeper import Sweeper
from tests.lua.histories.scene import DAY, MINUTE, Scene, by_user, coupon, stock
from tests.support.shards import NOW, SEALER, grabs, opening

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


def of_pieces(offer: str, total: int = 10, **rest: Any) -> Open:
    """The opening of an offer whose grabs have their own answers."""
    return Open(id=f"open-{offer}", offer=offer, terms=CouponTerms(issuer="shop", total=total, **rest))


def answer_fields(commands: Sequence[Grab]) -> set[str]:
    """The fields of the answers to grabs of pieces."""
    return {f"{grab.offer}/{grab.id}" for grab in commands}


def of_offer(scene: Scene, offer: str) -> ShardKeys:
    return scene.keys.shard(scene.keys.shard_of_offer(offer))


async def retire(scene: Scene, *offers: str) -> None:
    """Closes offers and retires them, without cleaning."""
    for offer in offers:
        await scene.do(Close, offer=offer)
    scene.now += 3 * DAY
    await scene.sweep_without_cleaning()
    assert {event.offer for event in await scene.events("offer.retired")} >= set(offers)


async def clean(scene: Scene, offer: str, steps_max: int | None = None) -> int:
    return await scene.sweeper(scene.keys.shard_of_offer(offer)).clean(scene.now, steps_max)


async def pay(scene: Scene, grab: str | None, payment: str, paid: int = 250, **rest: Any) -> Answer:
    return await scene.do(Confirm, grab=grab, payment=payment, paid=paid, currency="CNY", **rest)


# -- stored answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offer", ["m", "m:a"])
@pytest.mark.parametrize("terms", [envelope(), coupon(9, retire_after_ms=DAY), stock(9, **PRICED)])
@pytest.mark.parametrize("cleaned", [False, True])
async def test_a_repeat_after_its_offer_retired_is_no_such_offer(
    scene: Scene, offer: str, terms: Any, cleaned: bool
) -> None:
    """The repeat is sent alone and in one call with a grab of a living offer of the campaign. The offer may
    have the campaign's name or a longer one, and may be cleaned or not.
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
    other, repeat = await scene.decide_both([Grab(id="other", offer="m:living", user="bob"), grab])
    assert (other.outcome, repeat.outcome) == ("granted", "no_such_offer")


@pytest.mark.parametrize("cleaned", [False, True])
@pytest.mark.parametrize("retired", ["m:a", "m:b"])
async def test_a_basket_is_repeated_after_one_of_its_offers_retired(
    scene: Scene, retired: str, cleaned: bool
) -> None:
    for offer in ("m:a", "m:b"):
        await scene.open(stock(9, retire_after_ms=DAY), offer)
    basket = [Grab(id=f"g-{offer}", offer=offer, user="ann", basket="both") for offer in ("m:a", "m:b")]
    assert [answer.outcome for answer in await scene.decide_both(basket)] == ["granted", "granted"]
    await retire(scene, retired)
    if cleaned:
        await clean(scene, retired)
    answers = {answer.offer: (answer.outcome, answer.repeated) for answer in await scene.decide_both(basket)}
    assert answers == {"m:a": ("granted", True), "m:b": ("granted", True)} | {
        retired: ("no_such_offer", False)
    }


@pytest.mark.parametrize("cleaned", [False, True])
async def test_every_command_repeated_after_retirement_is_no_such_offer(scene: Scene, cleaned: bool) -> None:
    """Commands that were executed, commands that were refused, and commands whose effect already held."""
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


async def test_a_return_repeated_while_its_offer_retires_is_refunded_once(scene: Scene) -> None:
    await scene.open(stock(9), "m:living")
    await scene.open(stock(9, **PRICED), "m:a")
    grab = (await scene.grab("ann")).grab
    await pay(scene, grab, "p1")
    return_ = Return(id="back", offer="m:a", grab=grab or "")
    await scene.decide_both([return_])
    await scene.do(Close)
    for steps in range(4):
        scene.now += DAY // 2
        if steps == 2:
            await scene.sweep_both()
        answers = await scene.decide_both([return_, return_])
        assert {answer.outcome for answer in answers} <= {"returned", "no_such_offer"}
        await clean(scene, "m:a", 1)
    assert len(await scene.events("grab.returned")) == 1


async def test_cleaning_keeps_new_answers_under_ids_of_a_retired_offer(scene: Scene) -> None:
    await scene.open(coupon(9), "m:living")
    await scene.open(coupon(3, retire_after_ms=DAY), "m")
    old = [Grab(id=f"g{n}", offer="m", user=f"u{n}") for n in range(6)]
    assert [answer.outcome for answer in await scene.decide_both(old)] == 3 * ["granted"] + 3 * ["sold_out"]
    await retire(scene, "m")
    new = [msgspec.structs.replace(grab, offer="m:living") for grab in old]
    firsts = await scene.decide_both(new)
    assert {answer.outcome for answer in firsts} == {"granted"}
    await clean(scene, "m")
    repeats = await scene.decide_both(new)
    assert repeats == [msgspec.structs.replace(first, repeated=True) for first in firsts]
    answered_ids = await scene.client.hkeys(of_offer(scene, "m").answers("m"))
    assert {name.decode() for name in answered_ids} >= answer_fields(new)


async def test_one_pass_cleans_all_retired_offers_and_continues_after_an_interruption(
    client: Any, make_gate: Any, keys: KeySpace
) -> None:
    now = [NOW]
    gate: Gate = make_gate(now)
    await gate.decide(
        [of_pieces("m:living", 9_000), *(of_pieces(f"m:{n}", 1_000, retire_after_ms=DAY) for n in range(3))],
        "decided",
    )
    await gate.decide(grabs(2_500, "m:living"), "decided", timeout_ms=20_000)
    for n in range(3):
        await gate.decide(grabs(700, f"m:{n}"), "decided", timeout_ms=20_000)
    shard = keys.shard(keys.shard_of_offer("m:0"))
    sweeper = Sweeper(client, shard, keys.shards, 10**12)
    await gate.decide([Close(id=f"close{n}", offer=f"m:{n}") for n in range(2)], "decided")
    now[0] += DAY
    await sweeper.sweep(now[0])
    assert await sweeper.clean(now[0], steps_max=2) == 2
    # Another offer retires during a pass, and another sweeper continues it.
    await gate.decide([Close(id="close2", offer="m:2")], "decided")
    now[0] += DAY
    sweeper = Sweeper(client, shard, keys.shards, 10**12)
    await sweeper.sweep(now[0])
    steps = await sweeper.clean(now[0])
    assert await client.hgetall(shard.cleaning) == {}
    answered_ids = {name.decode() for name in await client.hkeys(shard.answers("m"))}
    assert answered_ids == {"open-m:living"} | answer_fields(grabs(2_500, "m:living"))
    assert steps <= 2 * (2_500 + 3 * 702) / 500 + 2


async def test_cleaning_with_a_cursor_of_another_history_starts_over(
    client: Any, make_gate: Any, keys: KeySpace
) -> None:
    """Another server returns the fields of a hash in another order."""
    now = [NOW]
    gate: Gate = make_gate(now)
    await gate.decide(
        [of_pieces("m:living"), of_pieces("m:a", 1_500, retire_after_ms=0), *grabs(900, "m:a")],
        "decided",
        timeout_ms=20_000,
    )
    await gate.decide([Close(id="close", offer="m:a")], "decided")
    shard = keys.shard(keys.shard_of_offer("m:a"))
    sweeper = Sweeper(client, shard, keys.shards, 10**12)
    await sweeper.sweep(now[0] + 1)
    await client.hset(shard.cleaning, "m/answers", f"999999:{2**40}:0")
    await sweeper.clean(now[0] + 1)
    assert await client.hkeys(shard.answers("m")) == [b"open-m:living"]


# -- late money ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("living", [False, True])
@pytest.mark.parametrize("cleaned", [False, True])
async def test_a_served_payment_is_never_refunded_after_its_offer_retired(
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
async def test_a_payment_after_retirement_is_due_for_refund_once(scene: Scene, living: bool) -> None:
    if living:
        await scene.open(stock(9), "m:living")
    await scene.open(stock(9, **PRICED), "m:a")
    grab = (await scene.grab("ann")).grab or ""
    scene.now += 2 * MINUTE
    await retire(scene, "m:a")
    [retired] = await scene.events("offer.retired")
    command = Confirm(id="late", offer="m:a", grab=grab, payment="p1", paid=250, currency="CNY")
    [first, repeat] = await scene.decide_both([command, command])
    assert (first.outcome, first.repeated, first.message) == (
        "no_such_offer",
        False,
        "the payment is to be paid back",
    )
    assert (repeat.outcome, repeat.repeated, repeat.seq) == ("no_such_offer", True, first.seq)
    second = await pay(scene, grab, "p2", 7)
    for number in range(scene.keys.shards):
        await scene.compare_recovered(number)
    await clean(scene, "m:a")
    [callback] = await scene.decide_both([msgspec.structs.replace(command, id="callback")])
    assert (callback.outcome, callback.repeated, callback.seq) == ("no_such_offer", True, first.seq)
    due = await scene.events("payment.refund_due")
    assert [(event.payment, event.amount, event.outcome, event.seq) for event in due] == [
        ("p1", 250, "no_such_offer", first.seq), ("p2", 7, "no_such_offer", second.seq),
    ]  # fmt: skip
    assert [event.offer_seq for event in due] == [retired.offer_seq + 1, retired.offer_seq + 2]
    other = await pay(scene, "another", "p1")
    assert other.outcome == "conflict"


async def test_a_payment_for_a_retired_envelope_is_due_for_refund(scene: Scene) -> None:
    await scene.open(envelope(), "e")
    await retire(scene, "e")
    assert (await pay(scene, "nobody-s", "p1", offer="e")).message == "the payment is to be paid back"
    assert len(await scene.events("payment.refund_due", outcome="no_such_offer")) == 1


async def test_a_payment_for_an_unknown_offer_makes_no_event_and_the_answer_says_so(
    scene: Scene,
) -> None:
    command = Confirm(id="c", offer="never", grab="g", payment="p", paid=250, currency="CNY")
    for answer in [*(await scene.decide_both([command])), *(await scene.decide_both([command, command]))]:
        assert answer.outcome == "no_such_offer"
        assert "was not booked" in (answer.message or "")
    free = await scene.do(Confirm, offer="never", grab="g")
    assert (free.outcome, free.message) == ("no_such_offer", None)
    assert not await scene.all_lines()


@pytest.mark.parametrize("cleaned", [False, True])
async def test_payments_are_known_for_180_days_to_the_millisecond(scene: Scene, cleaned: bool) -> None:
    """After that a repeated callback of a served payment cannot be distinguished from a new payment: nothing
    is booked, and the answer says so.
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
        _, payments, _, state, _ = shard.campaign_keys("m")
        assert await scene.client.exists(payments, state, shard.past) == 0
    for payment in ("p1", "p2", "p3"):
        answer = await pay(scene, grab, payment)
        assert (answer.outcome, answer.seq) == ("no_such_offer", None)
        assert "view payments" in (answer.message or "")
    assert len(await scene.events("payment.refund_due")) == 1


async def test_cleaning_keeps_the_payments_of_younger_offers(scene: Scene) -> None:
    """The payments of the campaign's oldest offer are forgotten, those of its other offers stay."""
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
    _, payments, _, state, _ = of_offer(scene, "m:a").campaign_keys("m")
    assert {name.decode() for name in await scene.client.hkeys(payments)} == {"p-m:b", "p-m:living"}
    assert set(await scene.client.hkeys(state)) == {b"retired/m:b", b"zone"}
    for offer in ("m:b", "m:living"):
        answer = await pay(scene, grab[offer], f"p-{offer}", offer=offer)
        assert (answer.outcome, answer.repeated) == ("confirmed", True)


async def test_a_payment_id_is_a_conflict_until_it_is_forgotten(scene: Scene) -> None:
    """While the id is known it is a conflict; after it is forgotten it names another payment."""
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


def test_lua_and_python_keep_payments_for_the_same_time() -> None:
    of_scripts = {
        name: re.search(rf"local {name} = (.+)", (SCRIPTS / file).read_text())
        for name, file in (
            ("PAYMENTS_KNOWN_MS", "includes/past.lua"),
            ("PAYMENTS_KEPT_MS", "sweeping/forget.lua"),
        )
    }
    assert {name: definition and definition[1] for name, definition in of_scripts.items()} == {
        "PAYMENTS_KNOWN_MS": "180 * 86400000", "PAYMENTS_KEPT_MS": "PAYMENTS_KNOWN_MS + 86400000",
    }  # fmt: skip
    assert (PAYMENTS_KNOWN_MS, PAYMENTS_KEPT_MS - PAYMENTS_KNOWN_MS) == (180 * DAY, DAY)


# -- bounded grabs -------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_the_record_of_a_grab_does_not_grow_with_redemptions(private_redis: Any) -> None:
    client, keys = private_redis
    gate = Gate(client, keys, SEALER, clock=lambda: NOW)
    await gate.decide(
        [
            Open(id="o", offer="c", terms=coupon(10, max_per_grab=5)),
            Grab(id="g", offer="c", user="u", quantity=5),
        ],
        "decided",
    )
    record = keys.shard(0).offer_keys("c")[3]
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


async def test_a_hundred_and_first_payment_of_a_grab_is_due_for_refund(scene: Scene) -> None:
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


async def test_units_retaken_in_one_window_are_counted_together(scene: Scene) -> None:
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


async def test_a_command_with_a_reserved_id_is_invalid(make_gate: Any) -> None:
    gate: Gate = make_gate([NOW])
    await gate.decide([opening("o")], "decided")
    [alone] = await gate.decide([Grab(id="sweep", offer="o", user="ann")], "decided")
    together = await gate.decide(
        [Grab(id="g", offer="o", user="sweep"), Grab(id="sweep", offer="o", user="ann")], "decided"
    )
    for answer in (alone, together[1]):
        assert answer.outcome == "invalid"
        assert "reserved" in (answer.message or "")
    assert together[0].outcome == "granted"


def test_a_reserved_id_cannot_be_decoded() -> None:
    with pytest.raises(Undecodable, match="id: sweep is reserved"):
        decode_command(b'{"type":"grab","id":"sweep","offer":"o","user":"ann"}')
