"""Processes that only seal: a gate with the sealing part of a key opens nothing, and everything that it seals
is opened, compared and listed as if it had the key.
"""

from base64 import b64decode, b64encode
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grabstream.crypto.sealing import BOX, NAME_LENGTH, CannotOpen, Sealer
from grabstream.gate.calls import now_ms
from grabstream.gate.encoding import CODES_ELSEWHERE
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import Amend, Grab, Load, Open, Return
from grabstream.models.offers import Changes, CouponTerms
from tests.lua.histories.recovered import contents, fold
from tests.support.shards import event_lines, grabs, opening, take_over

WHOLE = Sealer({"k": bytes(range(32))})
PART = Sealer.from_text(WHOLE.sealing_text())


@given(
    shard=st.integers(0, 1_000), offer=st.from_regex(r"[A-Za-z0-9._:-]{1,64}", fullmatch=True), text=st.text()
)
def test_what_the_part_seals_the_key_opens_and_nobody_else(shard: int, offer: str, text: str) -> None:
    sealed = PART.seal(shard, offer, "seed", text)
    assert sealed.startswith(f"k{BOX}:")
    assert WHOLE.open(shard, offer, "seed", sealed) == text
    for sealer in (PART, Sealer({"k": bytes(range(1, 33))}), Sealer({"l": bytes(range(32))})):
        with pytest.raises(CannotOpen):
            sealer.open(shard, offer, "seed", sealed)
    for moved in ((shard + 1, offer, "seed"), (shard, offer, "code")):
        with pytest.raises(CannotOpen, match="moved here"):
            WHOLE.open(*moved, sealed)


def test_the_part_does_not_open_what_the_key_has_sealed() -> None:
    with pytest.raises(CannotOpen, match="is a sealing part, which cannot open anything"):
        PART.open(0, "e", "seed", WHOLE.seal(0, "e", "seed", "5eed"))


@given(index=st.integers(0, 200), bit=st.integers(0, 7))
def test_a_box_with_a_changed_bit_does_not_open(index: int, bit: int) -> None:
    key_id, _, body = PART.seal(0, "e", "seed", "5eed" * 16).partition(":")
    raw = bytearray(b64decode(body))
    raw[index % len(raw)] ^= 1 << bit
    with pytest.raises(CannotOpen):
        WHOLE.open(0, "e", "seed", f"{key_id}:{b64encode(raw).decode()}")


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31)])
def test_a_box_of_a_sender_with_whom_everybody_agrees_does_not_open(point: bytes) -> None:
    with pytest.raises(CannotOpen):
        WHOLE.open(0, "e", "seed", f"k{BOX}:{b64encode(bytes(12) + point + bytes(32)).decode()}")


def test_a_code_has_one_text_in_each_form_and_one_name_in_both() -> None:
    part, whole = PART.seal_code(3, "c", "CODE-1"), WHOLE.seal_code(3, "c", "CODE-1")
    assert part == PART.seal_code(3, "c", "CODE-1")
    assert part != PART.seal_code(3, "c", "CODE-2") != PART.seal_code(3, "d", "CODE-2")
    assert WHOLE.open(3, "c", "code", part) == WHOLE.open(3, "c", "code", whole) == "CODE-1"
    assert part.partition(":")[2][:NAME_LENGTH] == whole.partition(":")[2][:NAME_LENGTH]


def test_the_part_is_of_its_key() -> None:
    assert (PART.fingerprints, PART.only_sealing) == (WHOLE.fingerprints, ["k"])
    assert PART.sealing_text() == WHOLE.sealing_text()
    command = Load(id="l", offer="c", what="codes", chunk=1, chunks=1, items=("A",))
    assert WHOLE.digests.matches(PART.digests.digest(command), command)
    assert WHOLE.digests.names("x") == PART.digests.names("x")


@pytest.mark.parametrize("change", [lambda t: t[:-8], lambda t: t[:60] + "A" + t[61:], lambda t: t[:8]])
def test_a_part_that_was_changed_is_refused(change: Any) -> None:
    text = WHOLE.sealing_text()
    assert change(text) != text
    with pytest.raises(ValueError, match="GRAB_SEAL_KEYS: key 1 .*(sealing part|base64url)"):
        Sealer.from_text(change(text))


async def test_a_gate_that_only_seals(client: Any, keys: KeySpace) -> None:
    """It makes offers and loads codes, in one list with gates that open; takers ask those for the code."""
    await take_over(client, keys)
    only, whole = Gate(client, keys, PART), Gate(client, keys, WHOLE)

    def load(chunk: int, *codes: str) -> Load:
        return Load(id=f"l{chunk}{codes[0]}", offer="c", what="codes", chunk=chunk, chunks=2, items=codes)

    try:
        answers = await only.decide([opening("e", 5), *grabs(2, "e")], "decided")
        assert [answer.outcome for answer in answers] == ["opened", "granted", "granted"]
        terms = CouponTerms(issuer="i", total=4, opens_at=now_ms() + 3_600_000)
        [opened] = await whole.decide([Open(id="o", offer="c", terms=terms)], "decided")
        assert opened.outcome == "opened"
        outcomes = [
            (await gate.decide([command], "decided"))[0].outcome
            for gate, command in (
                (only, load(1, "A", "B")), (whole, load(1, "A", "B")), (whole, load(2, "B", "C")),
                (only, load(2, "D", "A")), (whole, load(2, "C", "D")),
                (only, Amend(id="a", offer="c", changes=Changes(opens_at=1))),
            )
        ]  # fmt: skip
        assert outcomes == ["loaded", "loaded", "invalid", "invalid", "loaded", "amended"]
        for number, code in enumerate("ABCD"):
            grab = Grab(id=f"g{number}", offer="c", user=f"u{number}")
            [here] = await only.decide([grab], "decided")
            assert (here.outcome, here.coupon_code, here.message) == ("granted", None, CODES_ELSEWHERE)
            [there] = await whole.decide([grab], "decided")
            assert (there.coupon_code, there.repeated, there.message) == (code, True, None)
        back = Return(id="r", offer="c", grab="g0")
        [here] = await only.decide([back], "decided")
        assert (here.outcome, here.voided_codes, here.message) == ("returned", (), CODES_ELSEWHERE)
        [there] = await whole.decide([back], "decided")
        assert (there.voided_codes, there.repeated, there.message) == (("A",), True, None)
    finally:
        await only.close()
        await whole.close()

    # A recovery needs the whole key: the seed of the open envelope was sealed to it.
    number = keys.shard_of_offer("e")
    lines = await event_lines(client, keys, number)
    space = KeySpace(f"{keys.prefix}-again", keys.shards)
    try:
        with pytest.raises(CannotOpen, match="sealing part"):
            await fold(client, space.shard(number), lines, PART, keys.shards)
        await fold(client, space.shard(number), lines, WHOLE, keys.shards)
        assert await contents(client, space.shard(number)) == await contents(client, keys.shard(number))
    finally:
        async for key in client.scan_iter(match=f"{space.prefix}:*"):
            await client.delete(key)
