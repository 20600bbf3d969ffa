"""An answer given as decided, about an effect that already held: it names the event of another command, and
is lost only if a recovery loses that event.
"""

import json
from typing import Any

import msgspec
import pytest

from grabstream.gate.authority import Authority
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Confirm, Grab, Open, Redeem, Release, Unredeem
from grabstream.models.offers import CouponTerms, StockTerms
from grabstream.models.payments import command_of, decode_receipt
from tests.conftest import until
from tests.gate.test_journaled import Lost
from tests.support.receipts import AUDIENCE, KEYS, signed
from tests.support.shards import SEALER

OFFERS = [
    Open(id="o1", offer="free", terms=StockTerms(issuer="shop", total=9, hold_ms=60_000)),
    Open(
        id="o2",
        offer="sold",
        terms=StockTerms(issuer="shop", total=9, price=5, currency="CNY", hold_ms=60_000),
    ),
    Open(id="o3", offer="coupon", terms=CouponTerms(issuer="shop", total=9)),
]
GRABS = [
    Grab(id="free", offer="free", user="u"),
    Grab(id="sold", offer="sold", user="u"),
    *(Grab(id=f"basket-{n}", offer="sold", user="v", basket="b") for n in range(2)),
    Grab(id="coupon", offer="coupon", user="u"),
]


def release() -> AnyCommand:
    return Release(id="", offer="free", grab="free")


def confirm() -> AnyCommand:
    return Confirm(id="", offer="free", grab="free")


def pay(grab: str = "sold", **changes: Any) -> AnyCommand:
    """A receipt for a payment whose id has characters that JSON escapes."""
    claims = {
        "aud": AUDIENCE, "payment": 'p "1\\', "offer": "sold", "grab": grab, "user": "u",
        "status": "paid", "at": 1, "paid": 5, "currency": "CNY",
    } | changes  # fmt: skip
    command = command_of(decode_receipt(json.dumps(claims).encode()))
    return msgspec.structs.replace(command, id="", receipt=signed(claims))


def redeem(order: str = "order") -> AnyCommand:
    return Redeem(id="", offer="coupon", grab="coupon", order=order)


def unredeem() -> AnyCommand:
    return Unredeem(id="", offer="coupon", grab="coupon", order="order")


#: What is decided before; the command whose effect then holds; its outcome; what changes the same later.
CASES: dict[str, tuple[list[AnyCommand], AnyCommand, str, list[AnyCommand]]] = {
    "released": ([], release(), "released", []),
    "confirmed": ([], confirm(), "confirmed", []),
    "paid": ([], pay(), "confirmed", []),
    "paid for the first of a basket": (
        [], pay("basket-0", user="v"), "confirmed", [pay("basket-1", user="v")],
    ),
    "paid too late": ([Release(id="", offer="sold", grab="sold")], pay(), "not_held", []),
    "paid for an unknown grab": ([], pay("none"), "no_such_grab", []),
    "paid beyond what is recorded": ([pay()], pay(paid=7), "conflict", [pay(paid=9)]),
    "redeemed": ([], redeem(), "redeemed", [unredeem()]),
    "unredeemed": ([redeem()], unredeem(), "unredeemed", [redeem()]),
}  # fmt: skip


class Deciding:
    """A gate that answers as decided, and numbers its commands."""

    def __init__(self, client: Any, keys: KeySpace, lost: Lost) -> None:
        limits = GateLimits(authority=Authority("shop", KEYS, audience=AUDIENCE))
        self.gate = Gate(client, keys, SEALER, limits, report_lost=lost.report)
        self._number = 0

    async def decide(self, *commands: AnyCommand) -> list[Answer]:
        named = []
        for command in commands:
            self._number += 1
            named.append(msgspec.structs.replace(command, id=command.id or f"{id(self)}-{self._number}"))
        return list(await self.gate.decide(named, "decided"))

    def is_checked(self, history: int) -> bool:
        """Whether all that the gate keeps was found in a history; the rest is reported by then."""
        reports = self.gate.measures.lost_answers
        return reports["found"] == reports["written"] and all(
            kept.history == history for kept in self.gate._decided._kept[0]
        )


@pytest.mark.parametrize(
    ("case", "later"),
    [
        *(pytest.param(case, False, id=case) for case in CASES),
        *(pytest.param(case, True, id=f"{case}, and changed") for case in CASES if CASES[case][3]),
    ],
)
async def test_it_is_lost_only_if_its_event_is(private_redis: Any, case: str, later: bool) -> None:
    client, keys = private_redis
    before, command, outcome, changes = CASES[case]
    shard, lost = keys.shard(0), Lost()
    others, one = Deciding(client, keys, Lost()), Deciding(client, keys, lost)
    await others.decide(*OFFERS)
    await others.decide(*GRABS)
    await others.decide(*before)
    [first] = await others.decide(command)
    assert (first.outcome, first.repeated) == (outcome, False)
    one.gate.start()
    [again] = await one.decide(command)
    assert (again.outcome, again.repeated) == (outcome, True)
    assert (again.seq, again.at) == (first.seq, first.at)
    if later:
        await others.decide(*changes)
    # A recovery that loses no event: refusals are not recovered.
    await client.delete(shard.refusals, shard.refusal_order)
    history = await client.hincrby(shard.state, "history", 1)
    await until(lambda: one.is_checked(history))
    assert (lost, one.gate._decided.kept) == ([], 1)
    # A recovery that loses all that is recorded about the grabs.
    for offer in OFFERS:
        await client.delete(shard.grabs(offer.offer), shard.orders(offer.offer), shard.payments(offer.offer))
    history = await client.hincrby(shard.state, "history", 1)
    await until(lambda: one.is_checked(history))
    assert [(found.command.id, found.answer) for found in lost] == [(again.id, again)]
    await one.gate.close()
    await others.gate.close()


async def test_it_is_lost_if_only_an_earlier_event_is_recorded(private_redis: Any) -> None:
    """The order was redeemed and taken back; a recovery loses the second event only."""
    client, keys = private_redis
    shard, lost = keys.shard(0), Lost()
    deciding = Deciding(client, keys, lost)
    await deciding.decide(*OFFERS)
    await deciding.decide(*GRABS)
    await deciding.decide(redeem())
    redeemed = await client.hget(shard.orders("coupon"), "coupon/order")
    await deciding.decide(unredeem())
    deciding.gate.start()
    [again] = await deciding.decide(unredeem())
    await client.hset(shard.orders("coupon"), "coupon/order", redeemed)
    history = await client.hincrby(shard.state, "history", 1)
    await until(lambda: deciding.is_checked(history))
    assert [found.answer for found in lost] == [again]
    await deciding.gate.close()


@pytest.mark.parametrize("record", [b"", b"\xc1", b"\x90", b"\x93\x01\x02\x03", b"x" * 15])
async def test_a_damaged_record_ends_nothing(private_redis: Any, record: bytes) -> None:
    """An answer whose record is damaged is reported: nothing shows that its event is recorded."""
    client, keys = private_redis
    shard, lost = keys.shard(0), Lost()
    deciding = Deciding(client, keys, lost)
    await deciding.decide(*OFFERS)
    await deciding.decide(*GRABS)
    commands = [release(), pay(), redeem()]
    await deciding.decide(*commands)
    deciding.gate.start()
    await deciding.decide(*commands)
    await client.hset(shard.grabs("free"), "free", record)
    await client.hset(shard.orders("coupon"), "coupon/order", record)
    for field in await client.hkeys(shard.payments("sold")):
        await client.hset(shard.payments("sold"), field, record)
    await client.hincrby(shard.state, "history", 1)
    await until(lambda: deciding.gate._decided.kept == 0)
    assert {found.answer.outcome for found in lost} == {"released", "confirmed", "redeemed"}
    await deciding.gate.close()
