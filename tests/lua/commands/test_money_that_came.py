"""Every outcome of a `confirm` with a valid receipt, and where the money then stands in the books: with the
issuer, to be paid back, or nowhere (docs/http.md, "Where the money stands"). By Lua and by the rules.
"""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from grabstream.gate.authority import Authority
from grabstream.gate.calls import GateLimits
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import Close, Confirm, Extend, Grab, Pause, Release, Return
from grabstream.models.events import GrabConfirmed, PaymentRefundDue, decode_event
from grabstream.models.offers import PAYMENTS_KNOWN_MS
from grabstream.models.payments import command_of, decode_receipt
from grabstream.models.transfers import transfers_of
from grabstream.projections.checking.snapshots import RetiredOffer, _known_payment
from grabstream.settings import Settings
from grabstream.streams.relaying.ownership import OwnedShard
from grabstream.streams.relaying.recovery import Recovery
from tests.conftest import examples
from tests.lua.histories.scene import DAY, HOUR, Scene, coupon, stock
from tests.support.receipts import AUDIENCE, KEYS, signed
from tests.support.shards import SEALER

ISSUER, REFUND = "issuer:shop", "refund:p"
PRICE = 7


class Paying(Scene):
    """A scene whose gate needs receipts: `ann` holds three units for 7 CNY each."""

    async def begin(self, client: Any, keys: KeySpace) -> None:
        self.offer, self._ids = "c:o", 0
        authority = Authority("shop", KEYS, audience=AUDIENCE)
        await self.begin_twins(client, keys, GateLimits(timeout_ms=30_000, authority=authority))

    async def hold(self, **terms: Any) -> str:
        sale = {"hold_ms": HOUR, "price": PRICE, "currency": "CNY", "max_per_grab": 200}
        await self.open(stock(300, **sale | terms))
        return await self.held("ann", 3)

    async def held(self, user: str, quantity: int = 1, **more: Any) -> str:
        answer = await self.grab(user, quantity, **more)
        assert (answer.outcome, answer.grab is not None) == ("held", True)
        return answer.grab or ""

    async def receipt(self, grab: str, paid: int = 3 * PRICE, id: str | None = None, **claims: Any) -> Answer:
        """Confirms with a receipt of the payment `p`, in CNY by `ann`, unless `claims` say otherwise."""
        named = {
            "aud": AUDIENCE, "payment": "p", "offer": self.offer, "grab": grab, "user": "ann",
            "status": "paid", "at": 1, "paid": paid, "currency": "CNY",
        } | claims  # fmt: skip
        command = command_of(decode_receipt(json.dumps(named).encode()))
        [answer] = await self.decide_both(
            [msgspec.structs.replace(command, id=id or self.id(), receipt=signed(named))]
        )
        return answer

    async def money(self) -> dict[tuple[str, str], int]:
        """What has moved from `external:p` to each account, by account and currency."""
        moved: Counter[tuple[str, str]] = Counter()
        for event in map(decode_event, await self.all_lines()):
            for asset, debit, credit, amount in transfers_of(event):
                if debit == "external:p":
                    moved[credit, asset] += amount
        return dict(moved)


@pytest.fixture
async def paying(client: Any, keys: KeySpace) -> AsyncIterator[Paying]:
    """When the test ends, its state, events and books are compared with the rules and with a recovery."""
    scene = Paying()
    await scene.begin(client, keys)
    yield scene
    await scene.end_twins()


async def in_time(scene: Paying) -> Answer:
    return await scene.receipt(await scene.hold())


async def for_a_part(scene: Paying) -> Answer:
    return await scene.receipt(await scene.hold(), PRICE, quantity=1)


async def at_an_offer_that_is_paused(scene: Paying) -> Answer:
    grab = await scene.hold()
    await scene.do(Pause)
    return await scene.receipt(grab)


async def after_the_close(scene: Paying) -> Answer:
    grab = await scene.hold()
    await scene.do(Close)
    return await scene.receipt(grab)


async def late(scene: Paying) -> Answer:
    grab = await scene.hold()
    scene.now += HOUR
    return await scene.receipt(grab)


async def late_in_the_grace_time(scene: Paying) -> Answer:
    grab = await scene.hold(late="grace", grace_ms=HOUR)
    scene.now += HOUR + 1
    return await scene.receipt(grab)


async def late_and_retaken(scene: Paying) -> Answer:
    grab = await scene.hold(late="retake")
    scene.now += HOUR
    return await scene.receipt(grab)


async def late_after_the_close(scene: Paying) -> Answer:
    grab = await scene.hold(late="retake")
    await scene.do(Close)
    scene.now += HOUR
    return await scene.receipt(grab)


async def after_a_release(scene: Paying) -> Answer:
    grab = await scene.hold()
    await scene.do(Release, grab=grab)
    return await scene.receipt(grab)


async def after_an_extension(scene: Paying) -> Answer:
    grab = await scene.hold(extensions=1)
    await scene.do(Extend, grab=grab)
    scene.now += HOUR
    return await scene.receipt(grab)


async def a_second_time_by_another_payment(scene: Paying) -> Answer:
    grab = await scene.hold()
    assert (await scene.receipt(grab, payment="first")).outcome == "confirmed"
    return await scene.receipt(grab)


async def after_a_return(scene: Paying) -> Answer:
    grab = await scene.hold()
    assert (await scene.receipt(grab, payment="first")).outcome == "confirmed"
    assert (await scene.do(Return, grab=grab)).outcome == "returned"
    return await scene.receipt(grab)


async def too_little(scene: Paying) -> Answer:
    return await scene.receipt(await scene.hold(), 20)


async def too_much(scene: Paying) -> Answer:
    return await scene.receipt(await scene.hold(), 22)


async def in_another_currency(scene: Paying) -> Answer:
    return await scene.receipt(await scene.hold(), currency="EUR")


async def for_more_units_than_are_held(scene: Paying) -> Answer:
    return await scene.receipt(await scene.hold(), 4 * PRICE, quantity=4)


async def as_payment_101_of_a_grab(scene: Paying) -> Answer:
    await scene.hold()
    grab = await scene.held("ann", 101)
    for number in range(100):
        await scene.receipt(grab, PRICE, payment=f"p{number}", quantity=1)
    return await scene.receipt(grab, PRICE, quantity=1)


async def for_a_grab_that_is_not_known(scene: Paying) -> Answer:
    await scene.hold()
    return await scene.receipt("none")


async def for_a_grab_of_another_user(scene: Paying) -> Answer:
    return await scene.receipt(await scene.hold(), user="bob")


async def for_a_grab_without_a_price(scene: Paying) -> Answer:
    await scene.open(coupon(9))
    granted = await scene.grab("ann")
    return await scene.receipt(granted.grab or "", 5)


async def for_a_grab_that_waits(scene: Paying) -> Answer:
    await scene.hold(waiting_list=True)
    await scene.held("bob", 200)
    await scene.held("cat", 97)
    waiting = await scene.do(Grab, user="ann", wait=True)
    assert waiting.outcome == "waiting"
    return await scene.receipt(waiting.grab or "", PRICE)


async def after_the_offer_retired(scene: Paying, days: int = 0) -> Answer:
    grab = await scene.hold(retire_after_ms=1_000)
    await scene.do(Close)
    for passed in (HOUR, HOUR, days * DAY):
        scene.now += passed
        await scene.sweep_without_cleaning()
    return await scene.receipt(grab)


async def long_after_the_offer_retired(scene: Paying) -> Answer:
    return await after_the_offer_retired(scene, PAYMENTS_KNOWN_MS // DAY + 1)


async def for_an_offer_that_never_was(scene: Paying) -> Answer:
    await scene.hold()
    return await scene.receipt("g", offer="c:never")


async def known_for_another_grab(scene: Paying) -> Answer:
    assert (await scene.receipt(await scene.hold())).outcome == "confirmed"
    return await scene.receipt(await scene.held("bob"), PRICE, user="bob")


async def known_and_to_be_paid_back(scene: Paying) -> Answer:
    await scene.hold()
    assert (await scene.receipt("none", PRICE)).outcome == "no_such_grab"
    return await scene.receipt(await scene.held("bob"), PRICE, user="bob")


async def known_with_less(scene: Paying) -> Answer:
    grab = await scene.hold()
    assert (await scene.receipt(grab)).outcome == "confirmed"
    return await scene.receipt(grab, 30)


async def known_with_more(scene: Paying) -> Answer:
    grab = await scene.hold()
    assert (await scene.receipt(grab)).outcome == "confirmed"
    return await scene.receipt(grab, 20)


async def known_in_another_currency(scene: Paying) -> Answer:
    grab = await scene.hold()
    assert (await scene.receipt(grab)).outcome == "confirmed"
    return await scene.receipt(grab, currency="EUR")


async def known_for_another_user(scene: Paying) -> Answer:
    grab = await scene.hold()
    assert (await scene.receipt(grab)).outcome == "confirmed"
    return await scene.receipt(grab, user="bob")


async def known_for_a_grab_of_an_offer_that_retired(scene: Paying) -> Answer:
    assert (await after_the_offer_retired(scene)).outcome == "no_such_offer"
    scene.offer = "c:other"
    return await scene.receipt(await scene.hold())


ALL, THREE = {(ISSUER, "CNY"): 21}, {(REFUND, "CNY"): 21}
#: What happens, the outcome, and where the money of the payment stands, by account and currency.
CASES: list[tuple[Callable[[Paying], Awaitable[Answer]], str, dict[tuple[str, str], int]]] = [
    (in_time, "confirmed", ALL),
    (for_a_part, "confirmed", {(ISSUER, "CNY"): 7}),
    (at_an_offer_that_is_paused, "confirmed", ALL),
    (after_the_close, "confirmed", ALL),
    (after_an_extension, "confirmed", ALL),
    (late_in_the_grace_time, "confirmed", ALL),
    (late_and_retaken, "confirmed", ALL),
    (late, "expired", THREE),
    (late_after_the_close, "expired", THREE),
    (after_a_release, "not_held", THREE),
    (a_second_time_by_another_payment, "not_held", THREE),
    (after_a_return, "not_held", THREE),
    (for_a_grab_without_a_price, "not_held", {(REFUND, "CNY"): 5}),
    (for_a_grab_that_waits, "not_held", {(REFUND, "CNY"): 7}),
    (too_little, "invalid", {(REFUND, "CNY"): 20}),
    (too_much, "invalid", {(REFUND, "CNY"): 22}),
    (in_another_currency, "invalid", {(REFUND, "EUR"): 21}),
    (for_more_units_than_are_held, "not_enough_left", {(REFUND, "CNY"): 28}),
    (as_payment_101_of_a_grab, "limit_reached", {(REFUND, "CNY"): 7}),
    (for_a_grab_that_is_not_known, "no_such_grab", THREE),
    (for_a_grab_of_another_user, "no_such_grab", THREE),
    (after_the_offer_retired, "no_such_offer", THREE),
    (known_for_another_grab, "conflict", {**ALL, (REFUND, "CNY"): 7}),
    (known_and_to_be_paid_back, "conflict", {(REFUND, "CNY"): 14}),
    (known_with_less, "conflict", {**ALL, (REFUND, "CNY"): 9}),
    (known_in_another_currency, "conflict", {**ALL, (REFUND, "EUR"): 21}),
    (known_for_a_grab_of_an_offer_that_retired, "conflict", {(REFUND, "CNY"): 42}),
    # All of it stands in the books already.
    (known_with_more, "conflict", ALL),
    (known_for_another_user, "conflict", ALL),
    # No event can be made where no offer is known: the answer says what to do.
    (long_after_the_offer_retired, "no_such_offer", {}),
    (for_an_offer_that_never_was, "no_such_offer", {}),
]


@pytest.mark.parametrize(
    ("happens", "outcome", "stands"), CASES, ids=lambda value: getattr(value, "__name__", "")
)
async def test_money_stands_in_the_books_once(
    paying: Paying,
    happens: Callable[[Paying], Awaitable[Answer]],
    outcome: str,
    stands: dict[tuple[str, str], int],
) -> None:
    answer = await happens(paying)
    assert (answer.outcome, await paying.money()) == (outcome, stands), answer
    is_booked = any(credit == REFUND for credit, _ in stands)
    assert ("paid back" in (answer.message or "")) == is_booked
    assert (answer.seq is not None) == (
        bool(stands) and happens not in (known_with_more, known_for_another_user)
    )
    command = paying.answered[-1][0]
    assert isinstance(command, Confirm)
    for id in (command.id, paying.id(), paying.id()):
        [again] = await paying.decide_both([msgspec.structs.replace(command, id=id)])
        assert (again.outcome, again.seq) == (outcome, answer.seq), "a repeat, also under another id"
    assert await paying.money() == stands


async def test_receipts_that_contradict_each_other_book_the_most_that_one_says(paying: Paying) -> None:
    grab = await paying.hold()
    assert (await paying.receipt(grab)).outcome == "confirmed"
    for paid, total in ((30, 30), (25, 30), (30, 30), (41, 41), (21, 41), (30, 41)):
        answer = await paying.receipt(grab, paid)
        assert (answer.outcome, sum((await paying.money()).values())) == (
            ("confirmed" if paid == 21 else "conflict"), total,
        )  # fmt: skip


async def test_without_a_receipt_nothing_that_contradicts_is_booked(scene: Scene) -> None:
    """Where no keys are set, a caller that names the wrong grab or amount moves no money."""
    await scene.open(stock(9, hold_ms=HOUR, price=PRICE, currency="CNY"))
    grabs = [(await scene.grab(user)).grab for user in ("ann", "bob")]
    paid = {"payment": "p", "paid": PRICE, "currency": "CNY"}
    assert (await scene.do(Confirm, grab=grabs[0], **paid)).outcome == "confirmed"
    for fields in ({"grab": grabs[1]}, {"grab": grabs[0], "paid": 9}, {"grab": "none"}):
        answer = await scene.do(Confirm, **paid | fields)
        assert (answer.outcome, answer.seq) == ("conflict", None)
    assert await scene.events("payment.refund_due") == []


# -- baskets -------------------------------------------------------------------------------------------------

BASKET = ("c:tea", "c:cup", "c:pot")


async def basket_of(scene: Paying, name: str = "b", **terms: Any) -> list[str]:
    """The grabs of a basket of ann: one unit each of three offers."""
    sale = {"hold_ms": HOUR, "price": PRICE, "currency": "CNY", "late": "retake"}
    for offer in BASKET:
        if offer not in scene.states[scene.keys.shard_of_offer(offer)].offers:
            await scene.open(stock(9, **sale | terms), offer)
    grabs = [f"{name}.{number}" for number in range(3)]
    answers = await scene.decide_both(
        [Grab(id=id, offer=offer, user="ann", basket=name) for id, offer in zip(grabs, BASKET, strict=True)]
    )
    assert {answer.outcome for answer in answers} == {"held"}
    return grabs


async def test_one_payment_settles_each_grab_of_a_basket_once(paying: Paying) -> None:
    grabs = await basket_of(paying)
    for is_repeated in (False, True):
        for grab, offer in zip(grabs, BASKET, strict=True):
            answer = await paying.receipt(grab, PRICE, offer=offer)
            assert (answer.outcome, answer.offer, answer.repeated) == ("confirmed", offer, is_repeated)
    assert await paying.money() == {(ISSUER, "CNY"): 3 * PRICE}
    # Each part is refunded separately.
    for number, (grab, offer) in enumerate(zip(grabs, BASKET, strict=True), 1):
        assert (await paying.do(Return, offer=offer, grab=grab)).outcome == "returned"
        back = await paying.events("grab.returned")
        assert [event.refunds for event in back] == [(("p", PRICE),)] * number
    # A repeat still gets its first answer, and a part that is over is paid back separately.
    assert (await paying.receipt(grabs[0], PRICE, offer=BASKET[0])).repeated


async def test_parts_of_a_basket_stand_by_themselves(paying: Paying) -> None:
    """One part is paid in time, one with another sum, one late. Other sums for them are conflicts then."""
    first, second, third = await basket_of(paying, late="refuse")
    assert (await paying.receipt(second, 9, offer=BASKET[1])).outcome == "invalid"
    assert (await paying.receipt(first, PRICE, offer=BASKET[0])).outcome == "confirmed"
    paying.now += HOUR
    assert (await paying.receipt(third, PRICE, offer=BASKET[2])).outcome == "expired"
    due = {(ISSUER, "CNY"): PRICE, (REFUND, "CNY"): 9 + PRICE}
    assert await paying.money() == due
    for grab, offer, paid, outcome in (
        (first, BASKET[0], PRICE, "confirmed"), (second, BASKET[1], 9, "invalid"),
        (third, BASKET[2], PRICE, "expired"), (second, BASKET[1], 8, "conflict"),
    ):  # fmt: skip
        answer = await paying.receipt(grab, paid, offer=offer)
        assert (answer.outcome, await paying.money()) == (outcome, due)
    assert (await paying.receipt(first, 10, offer=BASKET[0])).outcome == "conflict"
    assert await paying.money() == {**due, (REFUND, "CNY"): 9 + PRICE + 3}


async def test_a_grab_outside_of_the_basket_is_a_conflict_and_paid_back(paying: Paying) -> None:
    grabs, others = await basket_of(paying), await basket_of(paying, "other")
    alone = (await paying.do(Grab, offer=BASKET[0], user="ann")).grab or ""
    assert (await paying.receipt(grabs[0], PRICE, offer=BASKET[0])).outcome == "confirmed"
    for number, grab in enumerate((others[0], alone, "none"), 1):
        for _ in range(2):
            assert (await paying.receipt(grab, PRICE, offer=BASKET[0])).outcome == "conflict"
            assert await paying.money() == {(ISSUER, "CNY"): PRICE, (REFUND, "CNY"): number * PRICE}
    # The rest of the basket, and another payment for the others, are settled all the same.
    assert (await paying.receipt(grabs[1], PRICE, offer=BASKET[1])).outcome == "confirmed"
    assert (await paying.receipt(others[0], PRICE, offer=BASKET[0], payment="q")).outcome == "confirmed"
    # By a payment that is known for a grab alone, no grab of a basket is settled.
    assert (await paying.receipt(alone, PRICE, offer=BASKET[0], payment="r")).outcome == "confirmed"
    assert (await paying.receipt(grabs[2], PRICE, offer=BASKET[2], payment="r")).outcome == "conflict"


async def test_a_part_is_known_after_its_offer_retired(paying: Paying) -> None:
    grabs = await basket_of(paying, retire_after_ms=1_000, hold_ms=5 * HOUR)
    for grab, offer in list(zip(grabs, BASKET, strict=True))[:2]:
        assert (await paying.receipt(grab, PRICE, offer=offer)).outcome == "confirmed"
        await paying.do(Close, offer=offer)
    for _ in range(2):
        paying.now += HOUR
        await paying.sweep_without_cleaning()
    assert BASKET[0] not in paying.states[paying.keys.shard_of_offer("c:o")].offers
    for grab, offer in list(zip(grabs, BASKET, strict=True))[:2]:
        assert (await paying.receipt(grab, PRICE, offer=offer)).outcome == "confirmed"
    assert (await paying.receipt(grabs[2], PRICE, offer=BASKET[2])).outcome == "confirmed"
    assert await paying.money() == {(ISSUER, "CNY"): 3 * PRICE}


async def test_a_payment_settles_a_basket_without_a_receipt_too(scene: Scene) -> None:
    for offer in BASKET:
        await scene.open(stock(9, hold_ms=HOUR, price=PRICE, currency="CNY"), offer)
    await scene.decide_both([Grab(id=f"g{offer}", offer=offer, user="ann", basket="b") for offer in BASKET])
    pays: list[Any] = [
        Confirm(id=f"c{offer}", offer=offer, grab=f"g{offer}", payment="p", paid=PRICE, currency="CNY")
        for offer in BASKET
    ]
    assert [answer.outcome for answer in await scene.decide_both(pays)] == ["confirmed"] * 3
    assert [answer.repeated for answer in await scene.decide_both(pays)] == [True] * 3
    for pay in pays:
        again = await scene.do(
            Confirm, offer=pay.offer, grab=pay.grab, payment="p", paid=PRICE, currency="CNY"
        )
        assert (again.outcome, again.repeated) == ("confirmed", True)


async def test_payments_of_retired_offers_are_restored_as_they_were(paying: Paying) -> None:
    """From their events, as a recovery from a snapshot has them: newest parts, all parts, conflicts."""
    grabs = await basket_of(paying, retire_after_ms=1_000)
    alone = (await paying.do(Grab, offer=BASKET[0], user="ann")).grab or ""
    for grab, offer, paid, payment in (
        (grabs[0], BASKET[0], PRICE, "p"), (grabs[1], BASKET[1], 9, "p"), (grabs[2], BASKET[2], PRICE, "p"),
        (grabs[0], BASKET[0], 10, "p"), (grabs[0], BASKET[0], 15, "p"), (alone, BASKET[0], 3, "p"),
        (alone, BASKET[0], PRICE, 'q "\\'), ("none", BASKET[1], PRICE, "r"),
    ):  # fmt: skip
        await paying.receipt(grab, paid, offer=offer, payment=payment)
    for offer in BASKET:
        await paying.do(Close, offer=offer)
    for _ in range(3):
        paying.now += HOUR
        await paying.sweep_without_cleaning()
    number = paying.keys.shard_of_offer("c:tea")
    past = [RetiredOffer(name, *known) for name, known in paying.states[number].past.items()]
    events = map(decode_event, paying.lines[number])
    payments = [known for known in map(_known_payment, events) if known is not None]
    restored = KeySpace(f"{paying.keys.prefix}x", paying.keys.shards).shard(number)
    shard = OwnedShard(paying.client, restored)
    ownership = (await shard.raise_term(0)).ownership
    await Recovery(shard, SEALER)._apply_past(ownership, past, payments)
    of_both = [
        {field: msgspec.msgpack.decode(record) for field, record in found.items()}
        for keys in (paying.keys.shard(number), restored)
        if (found := await paying.client.hgetall(keys.campaign_keys("c")[1]))
    ]
    assert len(past) == 3
    assert len(of_both[0]) == 8
    assert of_both[0] == of_both[1]


# -- in any order --------------------------------------------------------------------------------------------

#: The parts of a basket of ann, a grab of two units and one of bob, and one that there is not.
GRABS = (*((f"b.{number}", offer) for number, offer in enumerate(BASKET)), ("two", BASKET[0]),
         ("of-bob", BASKET[1]), ("none", BASKET[2]))  # fmt: skip
receipts = st.tuples(
    st.sampled_from(GRABS), st.sampled_from(("p", "p", 'q/"')), st.sampled_from((7, 7, 7, 14, 9, 5)),
    st.sampled_from(("CNY", "CNY", "CNY", "EUR")), st.sampled_from(("ann", "ann", "bob")),
)  # fmt: skip
others = st.sampled_from((Return, Release, Close, HOUR // 2))


@given(
    steps=st.lists(receipts | st.tuples(others, st.sampled_from(GRABS)), max_size=24),
    late=st.sampled_from(("refuse", "retake")),
)
@hypothesis_settings(max_examples=examples(12), deadline=None)
def test_in_any_order_the_books_have_the_most_that_a_receipt_says(
    servers: Settings, steps: list[Any], late: str
) -> None:
    async def run() -> None:
        client = redis.asyncio.Redis.from_url(servers.redis_url)
        scene = Paying()
        await scene.begin(client, KeySpace(f"came{secrets.token_hex(5)}", 2))
        try:
            said = await play(scene)
            booked: Counter[tuple[str, ...]] = Counter()
            for event in map(decode_event, await scene.all_lines()):
                if isinstance(event, GrabConfirmed) and event.payment:
                    booked[event.payment, event.grab, event.currency or ""] += event.paid
                if isinstance(event, PaymentRefundDue):
                    booked[event.payment, event.grab, event.asset] += event.amount
            assert booked == said
        finally:
            await scene.end_twins()
            await client.aclose()

    async def play(scene: Paying) -> dict[tuple[str, ...], int]:
        """Returns the greatest sum that a receipt names, by payment, grab and currency."""
        await basket_of(scene, late=late, max_per_grab=2, retire_after_ms=HOUR)
        await scene.do(Grab, id="two", offer=BASKET[0], user="ann", quantity=2)
        await scene.do(Grab, id="of-bob", offer=BASKET[1], user="bob")
        said: Counter[tuple[str, ...]] = Counter()
        for what, *rest in steps:
            if what is Return or what is Release:
                await scene.do(what, offer=rest[0][1], grab=rest[0][0])
            elif what is Close:
                await scene.do(Close, offer=rest[0][1])
            elif isinstance(what, int):
                scene.now += what
                await scene.sweep_both()
            else:
                payment, paid, currency, user = rest
                about = {"payment": payment, "currency": currency, "user": user}
                await scene.receipt(what[0], paid, offer=what[1], **about)
                said[payment, what[0], currency] = max(said[payment, what[0], currency], paid)
        return said

    asyncio.run(run())
