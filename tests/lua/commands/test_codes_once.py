"""Each coupon code is given once, even if its list is loaded in many chunks, by gates with different seal
keys, or with a recovery in between, and whatever users return.
"""

import random
from typing import Any

import pytest

from grabstream.crypto.sealing import NAME_LENGTH, Sealer
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import (
    AnyCommand,
    Close,
    Confirm,
    Grab,
    Load,
    Open,
    Redeem,
    Release,
    Return,
    Unredeem,
)
from tests.lua.histories.scene import HOUR, Scene, coupon
from tests.support.shards import NOW, SEALER, take_over

OLD, NEW = {"old": bytes(range(32))}, {"new": bytes(range(1, 33))}


async def load(scene: Scene, chunk: int, *codes: str, of: int = 3) -> Answer:
    return await scene.do(Load, what="codes", chunk=chunk, chunks=of, items=codes)


async def count_of_code_names(scene: Scene) -> int:
    """The number of names of codes that Redis stores for the scene's offer."""
    of_shard = scene.keys.shard(scene.keys.shard_of_offer(scene.offer))
    return int(await scene.client.scard(of_shard.offer_keys(scene.offer)[-1]))


async def test_a_chunk_with_a_code_of_an_earlier_chunk_is_refused(scene: Scene) -> None:
    await scene.open(coupon(6, opens_at=NOW + 1))
    assert (await load(scene, 1, "a", "b")).outcome == "loaded"
    again = await load(scene, 2, "c", "b")
    assert (again.outcome, again.message) == (
        "invalid",
        "items: code 2 of this chunk is in the list already; each is given once",
    )
    # Nothing of a refused chunk is stored: its codes may be in a later valid chunk.
    assert (await load(scene, 2, "c", "d")).outcome == "loaded"
    assert await count_of_code_names(scene) == 4
    assert (await load(scene, 3, "a", "e")).outcome == "invalid"
    assert (await load(scene, 3, "e", "f")).outcome == "loaded"
    scene.now = NOW + 1
    answers = [await scene.grab(f"u{number}") for number in range(6)]
    assert [answer.coupon_code for answer in answers] == ["a", "b", "c", "d", "e", "f"]


async def test_codes_of_chunks_in_one_call_are_compared(scene: Scene) -> None:
    await scene.open(coupon(6, opens_at=NOW + 1))
    chunks = [("a", "b"), ("b", "c"), ("c", "d")]
    commands = [
        Load(id=f"l{chunk}", offer="o", what="codes", chunk=chunk, chunks=3, items=items)
        for chunk, items in enumerate(chunks, 1)
    ]
    assert [answer.outcome for answer in await scene.decide_both(commands)] == ["loaded", "invalid", "loaded"]


async def test_a_repeated_chunk_gets_its_first_answer(scene: Scene) -> None:
    await scene.open(coupon(4, opens_at=NOW + 1))
    chunk = Load(id="l1", offer="o", what="codes", chunk=1, chunks=2, items=("a", "b"))
    [first] = await scene.decide_both([chunk])
    assert [answer.repeated for answer in await scene.decide_both([chunk, chunk])] == [True, True]
    assert (await load(scene, 2, "c", "d", of=2)).outcome == "loaded"
    [again] = await scene.decide_both([chunk])
    assert (again.outcome, again.repeated, again.quantity) == ("loaded", True, first.quantity)


async def test_names_of_codes_are_stored_while_codes_can_be_loaded(scene: Scene) -> None:
    await scene.open(coupon(4, opens_at=NOW + 1))
    await load(scene, 1, "a", "b", of=2)
    assert await count_of_code_names(scene) == 2
    await load(scene, 2, "c", "d", of=2)
    assert await count_of_code_names(scene) == 0
    await scene.open(coupon(4, opens_at=NOW + 1), "closed-early")
    await load(scene, 1, "a", "b", of=2)
    await scene.do(Close)
    assert await count_of_code_names(scene) == 0
    assert (await load(scene, 2, "a", "c", of=2)).outcome == "over"


async def test_a_recovered_shard_refuses_the_same_codes(scene: Scene) -> None:
    """Twins compare every key with a recovery at the end of a test; here a list is half loaded then."""
    await scene.open(coupon(6, opens_at=NOW + 1))
    await load(scene, 1, "a", "b")
    await load(scene, 2, "c", "d")
    assert await count_of_code_names(scene) == 4
    for number in range(scene.keys.shards):
        await scene.compare_recovered(number)


# -- seal keys -----------------------------------------------------------------------------------------------


class Gates:
    """Gates with different seal keys over one offer, not compared with the rules, which have no keys."""

    def __init__(self, client: Any, keys: KeySpace) -> None:
        self.client, self.keys = client, keys

    async def chunk(self, seal_keys: dict[str, bytes], chunk: int, *codes: str) -> tuple[str, str | None]:
        """Loads one of three chunks by a gate with these keys; returns outcome and message."""
        gate = Gate(self.client, self.keys, Sealer(seal_keys), clock=lambda: NOW)
        command = Load(
            id=f"{chunk}-{'-'.join(codes)}", offer="o", what="codes", chunk=chunk, chunks=3, items=codes
        )
        [answer] = await gate.decide([command], "decided")
        await gate.close()
        return answer.outcome, answer.message


@pytest.fixture
async def gates(client: Any, keys: KeySpace) -> Gates:
    await take_over(client, keys)
    gate = Gate(client, keys, SEALER, clock=lambda: NOW)
    [answer] = await gate.decide([Open(id="open", offer="o", terms=coupon(6, opens_at=NOW + 1))], "decided")
    await gate.close()
    assert answer.outcome == "opened"
    return Gates(client, keys)


@pytest.mark.parametrize(
    ("first", "second"), [(NEW | OLD, OLD | NEW), (OLD | NEW, NEW | OLD), (OLD, NEW | OLD)]
)
async def test_codes_are_compared_across_a_new_seal_key(
    gates: Gates, first: dict[str, bytes], second: dict[str, bytes]
) -> None:
    assert await gates.chunk(first, 1, "a", "b") == ("loaded", None)
    assert await gates.chunk(second, 2, "c", "a") == (
        "invalid",
        "items: code 2 of this chunk is in the list already; each is given once",
    )
    assert await gates.chunk(second, 2, "c", "d") == ("loaded", None)
    for codes in (("d", "e"), ("a", "e")):
        outcome, message = await gates.chunk(NEW | OLD, 3, *codes)
        assert (outcome, "code 1 of this chunk" in str(message)) == ("invalid", True)
    assert await gates.chunk(NEW | OLD, 3, "e", "f") == ("loaded", None)


async def test_a_chunk_is_refused_without_the_key_that_sealed_the_list(gates: Gates) -> None:
    """Such a gate can neither compare the codes with the list nor give out the earlier codes."""
    assert await gates.chunk(OLD, 1, "a", "b") == ("loaded", None)
    message = (
        "items: codes of this list were sealed with key old, which is not in GRAB_SEAL_KEYS: add it again "
        "after the new key"
    )
    assert await gates.chunk(NEW, 2, "a", "c") == ("invalid", message)
    assert await gates.chunk(NEW | OLD, 2, "c", "d") == ("loaded", None)


def test_a_sealed_code_reveals_only_its_name() -> None:
    sealer = Sealer(OLD | NEW)
    first, again = (sealer.seal_code(0, "o", "482913") for _ in range(2))
    assert first == again
    assert sealer.open(0, "o", "code", first) == "482913"
    others = {
        sealer.seal_code(*code_of_offer)
        for code_of_offer in ((1, "o", "482913"), (0, "p", "482913"), (0, "o", "482914"))
    }
    assert len({sealed[4 : 4 + NAME_LENGTH] for sealed in (*others, first)}) == 4
    # `other_names` returns the names that the other keys give the code.
    [[name]] = sealer.other_names(0, "o", ["482913"]).values()
    assert Sealer(NEW).seal_code(0, "o", "482913").startswith(f"new:{name}")


UNITS = 24


def any_command(draw: random.Random, scene: Scene, grabs: list[str]) -> AnyCommand:
    """A grab, or a command about a grab."""
    about: dict[str, Any] = {"id": scene.id(), "offer": scene.offer}
    kind = draw.choice((Grab, Grab, Confirm, Confirm, Confirm, Return, Return, Release, Redeem, Unredeem))
    if kind is Grab or not grabs:
        grabs.append(about["id"])
        wants: dict[str, Any] = {"user": draw.choice("abcd"), "quantity": draw.randint(1, 3)}
        return Grab(**about, **wants, wait=draw.random() < 0.5)
    about["grab"] = draw.choice(grabs)
    if kind in (Redeem, Unredeem):
        return kind(**about, order=draw.choice("xy"))
    if kind in (Confirm, Return) and draw.random() < 0.5:
        about["quantity"] = 1
    return kind(**about)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "terms",
    [
        {"take": "up_to", "return_restores": True},
        {"hold_ms": HOUR, "waiting_list": True},
        {"hold_ms": HOUR, "late": "retake", "take": "up_to", "waiting_list": True},
    ],
)
async def test_no_code_is_shown_to_two_users_whatever_comes_back(
    scene: Scene, terms: dict[str, Any], seed: int
) -> None:
    """Random grabs, payments, returns, uses and ends of holds, until the offer has closed. Afterwards, books
    and a recovery from the events are compared.
    """
    draw, grabs, shown, voided = random.Random(seed), list[str](), dict[str, str](), set[str]()
    await scene.open(coupon(UNITS, opens_at=NOW + 1, max_per_grab=3, **terms))
    await load(scene, 1, *(f"code{number}" for number in range(UNITS)), of=1)
    scene.now = NOW + 1
    for step in range(120):
        commands = [any_command(draw, scene, grabs) for _ in range(draw.randint(1, 4))]
        answers = await scene.decide_both(commands if step != 110 else [Close(id="close", offer="o")])
        for command, answer in zip(commands, answers, strict=False):
            if not answer.repeated:
                codes = answer.coupon_codes or (answer.coupon_code,) if answer.coupon_code else ()
                assert not set(codes) & shown.keys(), f"{codes} of {command} were shown before"
                shown |= dict.fromkeys(filter(None, codes), answer.grab or "")
                assert {shown[code] for code in answer.voided_codes} <= {answer.grab}
                assert not voided & set(answer.voided_codes)
                voided |= set(answer.voided_codes)
        scene.check_conservation()
        if draw.random() < 0.05:
            scene.now += draw.choice((1, HOUR))
            await scene.sweep_both()
    assert voided
    assert voided < shown.keys()
