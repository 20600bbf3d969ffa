"""Payment ids are opaque texts of the payment side: 1 to 255 bytes of UTF-8 without control characters, which
arrive, are kept, compared and written byte for byte, on real Lua and by the rules.
"""

import asyncio
import secrets

import msgspec
import pytest
import redis.asyncio
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Adjust, AnyCommand, Close, Confirm, Grab, Return, check, decode_command
from grabstream.models.entries import Entry
from grabstream.models.identifiers import PAYMENT_BYTES_MAX, encoded_payment, is_payment_id
from grabstream.models.money import Invalid
from grabstream.settings import Settings
from tests.conftest import examples
from tests.lua.histories.scene import HOUR, Scene, stock

#: Legal ids. Pairs of them look alike, or differ by what an encoding adds.
ODD = (
    "/", "#", " ", "p", "p ", " p", "P", "a/b#c d", '"', '\\"', '","', "\\", "\\\\", "\\u0061", "a",
    '],["x",1',
    "é", "e\u0301", "中", "🧧", "\u2028", "\u202e", "\ufeffp", "p:1", "o/g", "null", "0",
    "x" * 255, "x" * 254 + "y",
    '"' * 255, "\\" * 255, "🧧" * 63 + "abc", "é" * 127 + "/", "pi_3OqT/…?a=b&c=%2F#", "tr-1.2:3_4",
)  # fmt: skip
WRONG = ("", "x" * 256, "é" * 128, "🧧" * 64, "a\n", "\0", "\x7f", "a\x85b", "\ud800")
opaque = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=60).filter(is_payment_id),
    st.text(st.sampled_from('"\\/ #é🧧x'), min_size=1, max_size=255).filter(is_payment_id),
)


@pytest.mark.parametrize("payment", WRONG, ids=ascii)
def test_an_id_out_of_bounds_is_invalid_and_the_message_names_the_bound(payment: str) -> None:
    command = Confirm(id="c", offer="o", grab="g", payment=payment, paid=1, currency="CNY")
    with pytest.raises(Invalid, match=r"^payment: must be 1 to 255 bytes of UTF-8 without control char"):
        check(command)


@pytest.mark.parametrize("payment", ODD, ids=ascii)
def test_a_legal_id_passes_the_doors_and_has_one_encoding(payment: str) -> None:
    command = Confirm(id="c", offer="o", grab="g", payment=payment, paid=1, currency="CNY")
    for escaped in (False, True):
        raw = msgspec.json.encode({"type": "confirm", **msgspec.to_builtins(command)})
        if escaped:
            # As senders may write it: every character with an escape.
            units = payment.encode("utf-16-be").hex()
            text = "".join(f"\\u{units[n : n + 4]}" for n in range(0, len(units), 4))
            raw = raw.replace(msgspec.json.encode(payment), f'"{text}"'.encode())
        assert decode_command(raw) == command
    assert msgspec.json.encode(payment).decode() == f'"{encoded_payment(payment)}"'
    assert len(encoded_payment(payment).encode()) <= 2 * PAYMENT_BYTES_MAX
    check(Adjust(
        id="a", offer="o", reason="r", approved_by="b",
        transfers=(Entry("CNY", f"refund:{payment}", f"external:{payment}", 1),),
    ))  # fmt: skip


@pytest.mark.parametrize("account", ["issuer:a/b", "wallet:a b", "receivable:é", "refund:", "external:a\n"])
def test_only_accounts_of_payments_have_such_names(account: str) -> None:
    with pytest.raises(Invalid, match="transfers.credit"):
        check(Adjust(
            id="a", offer="o", reason="r", approved_by="b", transfers=(Entry("CNY", "issuer:i", account, 1),),
        ))  # fmt: skip


async def held(scene: Scene, user: str, quantity: int = 1) -> str:
    answer = await scene.grab(user, quantity)
    assert answer.outcome == "held"
    assert answer.grab is not None
    return answer.grab


async def test_each_id_is_another_payment_and_only_the_same_bytes_are_a_repeat(scene: Scene) -> None:
    await scene.open(stock(99, hold_ms=HOUR, price=7, currency="CNY", max_per_grab=9))
    names = {payment: await held(scene, f"u{n}") for n, payment in enumerate(ODD)}
    pays: list[AnyCommand] = [
        Confirm(id=scene.id(), offer="o", grab=grab, payment=payment, paid=7, currency="CNY")
        for payment, grab in names.items()
    ]
    # In one list, and thus read ahead and joined; then one by one, as repeats.
    answers = await scene.decide_both(pays)
    assert {answer.outcome for answer in answers} == {"confirmed"}
    for (payment, grab), first in zip(names.items(), answers, strict=True):
        again = await scene.do(Confirm, grab=grab, payment=payment, paid=7, currency="CNY")
        assert (again.outcome, again.repeated, again.seq) == ("confirmed", True, first.seq)
        assert (
            await scene.do(Confirm, grab=grab, payment=payment, paid=8, currency="CNY")
        ).outcome == "conflict"
        [event] = await scene.events("grab.confirmed", payment=payment)
        assert (event.grab, event.seq) == (grab, first.seq)
        assert (await scene.do(Return, grab=grab)).outcome == "returned"
        [event] = await scene.events("grab.returned", grab=grab)
        assert event.refunds == ((payment, 7),)


async def test_single_confirmations_and_refunds_due_keep_every_byte(scene: Scene) -> None:
    await scene.open(stock(99, hold_ms=HOUR, price=7, currency="CNY", max_per_grab=99))
    grab = await held(scene, "ann", len(ODD))
    for payment in ODD:
        answer = await scene.do(Confirm, grab=grab, payment=payment, paid=7, currency="CNY", quantity=1)
        assert answer.outcome == "confirmed"
    assert (await scene.do(Return, grab=grab)).outcome == "returned"
    [event] = await scene.events("grab.returned")
    assert event.refunds == tuple((payment, 7) for payment in ODD)
    others = list(dict.fromkeys(payment[:60] + "~" for payment in ODD))
    for payment in others:
        answer = await scene.do(Confirm, grab=grab, payment=payment, paid=7, currency="CNY")
        assert (answer.outcome, answer.seq is None) == ("not_held", False)
    due = await scene.events("payment.refund_due")
    assert [event.payment for event in due] == others


async def test_a_grab_with_a_hundred_of_the_longest_ids_is_returned_in_one_event(scene: Scene) -> None:
    await scene.open(stock(200, hold_ms=HOUR, price=10**10, currency="CNY", max_per_grab=200))
    grab = await held(scene, "ann", 101)
    ids = [f"{n:03}" + '"' * 252 for n in range(101)]
    pays: list[AnyCommand] = [
        Confirm(id=scene.id(), offer="o", grab=grab, payment=payment, paid=10**10, currency="CNY", quantity=1)
        for payment in ids
    ]
    answers = await scene.decide_both(pays)
    assert [answer.outcome for answer in answers] == ["confirmed"] * 100 + ["limit_reached"]
    assert (await scene.do(Return, grab=grab)).outcome == "returned"
    [event] = await scene.events("grab.returned")
    assert event.refunds == tuple((payment, 10**10) for payment in ids[:100])


@given(ids=st.lists(opaque, min_size=1, max_size=12, unique=True), closes=st.booleans())
@example(ids=[*ODD], closes=True)
@hypothesis_settings(max_examples=examples(15), deadline=None)
def test_any_ids_are_decided_alike_by_lua_and_rules(servers: Settings, ids: list[str], closes: bool) -> None:
    async def run() -> None:
        client = redis.asyncio.Redis.from_url(servers.redis_url)
        scene = Scene()
        await scene.begin(client, KeySpace(f"paid{secrets.token_hex(5)}", 2))
        try:
            await scene.open(stock(99, hold_ms=HOUR, price=7, currency="CNY"))
            grabs = [await held(scene, f"u{n}") for n in range(len(ids))]
            pays: list[AnyCommand] = [
                Confirm(id=scene.id(), offer="o", grab=grab, payment=payment, paid=paid, currency="CNY")
                for payment, grab in zip(ids, grabs, strict=True)
                for paid in (7, 8)
            ]
            await scene.decide_both(pays)
            if closes:
                await scene.do(Close)
            await scene.decide_both(pays[::-1])
        finally:
            # Compares state, events and books with the rules, and with a recovery.
            await scene.end_twins()
            await client.aclose()

    asyncio.run(run())


async def test_a_grab_of_the_longest_ids_passes_too(scene: Scene) -> None:
    """With other columns of the longest texts, single and in a list."""
    long = "x" * 60
    await scene.open(stock(9, hold_ms=HOUR, price=7, currency="CNY"), offer="o" * 64)
    grabs = [await scene.do(Grab, id=f"{long}{n}", user=f"{long}{n}") for n in range(3)]
    pays: list[AnyCommand] = [
        Confirm(
            id=f"c{long}{n}", offer=grab.offer or "", grab=grab.grab or "", user=grab.user,
            payment="é" * 127 + str(n), paid=7, currency="CNY",
        )
        for n, grab in enumerate(grabs)
    ]  # fmt: skip
    assert {answer.outcome for answer in await scene.decide_both(pays)} == {"confirmed"}
