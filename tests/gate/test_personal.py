"""Sealed metadata: what opens them, and that the order of a reader's commands holds while keys are read."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.gate.personal import (
    FORGOTTEN,
    KeysUnavailable,
    UserKey,
    is_sealed,
    must_be_sealed,
    open_metadata,
    seal_metadata,
    sealed,
)
from grabstream.gate.queue import CallOrder
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Grab, Open
from grabstream.models.money import Invalid
from grabstream.models.offers import StockTerms
from tests.support.shards import SEALER, event_lines, take_over

KEY, OTHER = UserKey("0000abcd", bytes(64)), UserKey("0000abce", b"\x01" * 64)
MAIL = {"mail": "anna@example.org"}


def taking(grab: str, user: str = "anna", **metadata: str) -> Grab:
    return Grab(id=grab, offer="o", user=user, metadata=metadata or MAIL)


def opened(of: Grab, key: UserKey | None, **named: str) -> Any:
    names = {"offer": of.offer, "user": of.user, "grab": of.id, **named}
    return open_metadata(of.metadata, key=key, **names)


@given(
    metadata=st.dictionaries(
        st.from_regex(r"[A-Za-z0-9._:-]{1,64}", fullmatch=True), st.text(max_size=40), min_size=1, max_size=4
    )
)
def test_sealed_metadata_open_for_their_grab_alone(metadata: dict[str, str]) -> None:
    grab = msgspec.structs.replace(taking("g"), metadata=metadata)
    closed = seal_metadata(grab, KEY)
    assert closed == seal_metadata(grab, KEY)
    assert is_sealed(closed.metadata)
    assert opened(closed, KEY) == metadata
    assert opened(closed, None) == opened(closed, OTHER) == FORGOTTEN
    for named in ({"offer": "p"}, {"user": "ben"}, {"grab": "h"}):
        assert opened(closed, KEY, **named) == closed.metadata
    assert opened(grab, KEY) == metadata or is_sealed(metadata)


@pytest.mark.parametrize(
    "text",
    ["1.", "1.0000abcd", "1.0000abcd.", "1.0000abcd.é", "1.0000abcd.AAAA", "1.0000abcd.A", "2.x", "1.."],
)
def test_what_a_caller_made_up_stays_or_is_forgotten(text: str) -> None:
    grab = msgspec.structs.replace(taking("g"), metadata={"sealed": text})
    assert opened(grab, KEY) in ({"sealed": text}, FORGOTTEN)


@pytest.mark.parametrize("length", [10, 700, 900])
async def test_what_looks_sealed_is_not_taken_for_it(length: int) -> None:
    """Clear text that a caller sends in the form of sealed text is sealed, or refused."""

    class Keys:
        async def keys_of(self, users: Collection[str]) -> Mapping[str, UserKey]:
            return dict.fromkeys(users, KEY)

    sent = msgspec.structs.replace(taking("g"), metadata={"sealed": f"1.{'x' * length}"})
    [grab] = await sealed([sent], Keys()) or [sent]
    assert isinstance(grab, Grab)
    if length < 700:
        must_be_sealed(grab)
        assert opened(grab, KEY) == sent.metadata
    else:
        with pytest.raises(Invalid, match="at most 700 bytes"):
            must_be_sealed(grab)


async def test_a_key_that_cannot_be_opened_concerns_its_user_alone() -> None:
    class Keys:
        async def keys_of(self, users: Collection[str]) -> Mapping[str, UserKey]:
            return {user: KEY for user in users if user != "anna"}

    [of_anna, of_ben] = await sealed([taking("g"), taking("h", "ben")], Keys()) or []
    must_be_sealed(of_ben)
    with pytest.raises(Invalid, match="the key of this user cannot be opened"):
        must_be_sealed(of_anna)


class SlowKeys:
    """Keys of users that come when they are let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.fails = 0
        self.asked: list[list[str]] = []

    async def keys_of(self, users: Collection[str]) -> Mapping[str, UserKey]:
        self.asked.append(sorted(users))
        if self.fails:
            self.fails -= 1
            raise KeysUnavailable("PostgreSQL is away")
        await self.let_go.wait()
        return dict.fromkeys(users, KEY)


async def test_order_and_outage(client: Any, keys: KeySpace) -> None:
    await take_over(client, keys)
    slow = SlowKeys()
    gate = Gate(client, keys, SEALER, GateLimits(timeout_ms=20_000, seals_metadata=True), user_keys=slow)
    try:
        terms = StockTerms(issuer="shop", total=1)
        await gate.decide([Open(id="op", offer="o", terms=terms)], "decided")
        # The one unit belongs to the call that came first, although its key comes late.
        order = CallOrder()
        slow.fails = 1
        first = asyncio.create_task(gate.decide([taking("g1")], "decided", topic_order=order))
        while not slow.asked:
            await asyncio.sleep(0)
        second = asyncio.create_task(
            gate.decide([Grab(id="g2", offer="o", user="ben")], "decided", topic_order=order)
        )
        # While a reader waits, others are refused, or decided: their order is another one.
        slow.fails += 1
        [busy] = await gate.decide([taking("g3", "carl")], "decided")
        assert (busy.outcome, busy.message) == ("busy", "the keys of users: PostgreSQL is away")
        [unknown] = await gate.decide([Grab(id="g4", offer="p", user="carl")], "decided")
        assert unknown.outcome == "no_such_offer"
        assert not first.done() and not second.done()  # noqa: PT018
        slow.let_go.set()
        assert [one.outcome for one in await first] == ["granted"]
        assert [one.outcome for one in await second] == ["sold_out"]

        # Without a separate task.
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        gate.decide_soon(taking("g1"), answered.set_result, "decided")
        again = await answered
        assert (again.outcome, again.repeated, again.metadata) == ("granted", True, MAIL)
        too_long = taking("g5", x="y" * 800)
        [refused] = await gate.decide([too_long], "decided")
        assert (refused.outcome, "at most 700 bytes" in (refused.message or "")) == ("invalid", True)
        lines = b"\n".join(await event_lines(client, keys, keys.shard_of_offer("o")))
        assert b"anna@example.org" not in lines
    finally:
        await gate.close()
