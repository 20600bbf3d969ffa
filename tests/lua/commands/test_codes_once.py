"""A coupon code is handed out once: also where one list is loaded in many chunks, by gates with other seal
keys, over a recovery.
"""

from typing import Any

import pytest

from grabstream.lua.gate.door import Gate
from grabstream.lua.gate.sealing import NAME_LENGTH, Sealer
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import Close, Load, Open
from tests.lua.conftest import NOW, SEALER, take_over
from tests.lua.histories.scene import Scene, coupon

OLD, NEW = {"old": bytes(range(32))}, {"new": bytes(range(1, 33))}


async def load(scene: Scene, chunk: int, *codes: str, of: int = 3) -> Answer:
    return await scene.do(Load, what="codes", chunk=chunk, chunks=of, items=codes)


async def names_kept(scene: Scene) -> int:
    """Names of codes that Redis has of the scene's offer."""
    of_shard = scene.keys.shard(scene.keys.shard_of_offer(scene.offer))
    return int(await scene.client.scard(of_shard.of_offer(scene.offer)[-1]))


async def test_a_code_of_an_earlier_chunk_is_refused(scene: Scene) -> None:
    await scene.open(coupon(6, opens_at=NOW + 1))
    assert (await load(scene, 1, "a", "b")).outcome == "loaded"
    again = await load(scene, 2, "c", "b")
    assert (again.outcome, again.message) == (
        "invalid",
        "items: code 2 of this chunk is in the list already; each is given once",
    )
    # Nothing of a refused chunk is kept: the same codes come in a chunk that is right.
    assert (await load(scene, 2, "c", "d")).outcome == "loaded"
    assert await names_kept(scene) == 4
    assert (await load(scene, 3, "a", "e")).outcome == "invalid"
    assert (await load(scene, 3, "e", "f")).outcome == "loaded"
    scene.now = NOW + 1
    answers = [await scene.grab(f"u{number}") for number in range(6)]
    assert [answer.coupon_code for answer in answers] == ["a", "b", "c", "d", "e", "f"]


async def test_codes_of_one_call_are_compared_too(scene: Scene) -> None:
    await scene.open(coupon(6, opens_at=NOW + 1))
    chunks = [("a", "b"), ("b", "c"), ("c", "d")]
    commands = [
        Load(id=f"l{place}", offer="o", what="codes", chunk=place, chunks=3, items=items)
        for place, items in enumerate(chunks, 1)
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


async def test_names_are_kept_for_as_long_as_codes_can_be_loaded(scene: Scene) -> None:
    await scene.open(coupon(4, opens_at=NOW + 1))
    await load(scene, 1, "a", "b", of=2)
    assert await names_kept(scene) == 2
    await load(scene, 2, "c", "d", of=2)
    assert await names_kept(scene) == 0
    await scene.open(coupon(4, opens_at=NOW + 1), "closed-early")
    await load(scene, 1, "a", "b", of=2)
    await scene.do(Close)
    assert await names_kept(scene) == 0
    assert (await load(scene, 2, "a", "c", of=2)).outcome == "over"


async def test_another_offer_may_have_the_same_code(scene: Scene) -> None:
    for offer in ("c:one", "c:two"):
        await scene.open(coupon(4, opens_at=NOW + 1), offer)
        assert (await load(scene, 1, "a", "b", of=2)).outcome == "loaded"


async def test_what_a_recovery_makes_refuses_the_same_codes(scene: Scene) -> None:
    """The twins compare every key with that of a recovery at the end; here a list is half loaded then."""
    await scene.open(coupon(6, opens_at=NOW + 1))
    await load(scene, 1, "a", "b")
    await load(scene, 2, "c", "d")
    assert await names_kept(scene) == 4
    for number in range(scene.keys.shards):
        await scene.compare_recovered(number)


# -- seal keys -----------------------------------------------------------------------------------------------


class Gates:
    """Gates with other seal keys over one offer; what the rules would say is not asked, since they know no
    keys.
    """

    def __init__(self, client: Any, keys: KeySpace) -> None:
        self.client, self.keys = client, keys

    async def chunk(self, seal_keys: dict[str, bytes], chunk: int, *codes: str) -> tuple[str, str | None]:
        """Outcome and message of one chunk of three, by a gate with these keys."""
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


async def test_without_a_key_that_sealed_the_list_no_chunk_is_taken(gates: Gates) -> None:
    """Whether its codes are in the list already cannot be said then; nor can the codes before be handed
    out.
    """
    assert await gates.chunk(OLD, 1, "a", "b") == ("loaded", None)
    said = (
        "items: codes of this list were sealed with key old, which is not in GRAB_SEAL_KEYS: add it again "
        "after the new key"
    )
    assert await gates.chunk(NEW, 2, "a", "c") == ("invalid", said)
    assert await gates.chunk(NEW | OLD, 2, "c", "d") == ("loaded", None)


def test_a_sealed_code_shows_the_same_name_and_nothing_else() -> None:
    sealer = Sealer(OLD | NEW)
    first, again = (sealer.seal_code(0, "o", "482913") for _ in range(2))
    assert first == again
    assert sealer.open(0, "o", "code", first) == "482913"
    others = {
        sealer.seal_code(*place) for place in ((1, "o", "482913"), (0, "p", "482913"), (0, "o", "482914"))
    }
    assert len({one[4 : 4 + NAME_LENGTH] for one in (*others, first)}) == 4
    # By another key it is the name that a text sealed with that key shows.
    [[name]] = sealer.other_names(0, "o", ["482913"]).values()
    assert Sealer(NEW).seal_code(0, "o", "482913").startswith(f"new:{name}")
