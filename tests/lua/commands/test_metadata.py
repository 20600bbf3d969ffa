"""Metadata of grabs: the answer and the events of a grab have what it was sent with; nothing is decided by
them. When a test ends, the scene compares state, events, and what recoveries make of them.
"""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from grabstream.models.bounds import EVENT_LINE_BYTES_MAX
from grabstream.models.commands import Close, Grab, Release
from grabstream.models.offers import EnvelopeTerms
from tests.lua.costs.longest_texts import METADATA as LONGEST
from tests.lua.histories.scene import HOUR, Scene, coupon, stock
from tests.support.shards import outbox_lines

FORM = {"form_id": "f-1", "app:id": 'a "b" \\ 你好 🧧'}
OTHER = {"form_id": "f-2"}
ENVELOPE = EnvelopeTerms(issuer="i", funding="f", asset="CNY", total=1_000, parts=5, seed="5e" * 16)


@pytest.fixture
def offer() -> str:
    """The name of an offer."""
    return "c:o"


def metadata_in(line: bytes) -> Any:
    """The names and values of the metadata of an event, in their order; None without any."""
    event = json.loads(line, object_pairs_hook=list)
    return next((value for name, value in event if name == "metadata"), None)


@pytest.mark.parametrize("terms", [coupon(9), stock(9, hold_ms=HOUR, price=5, currency="CNY"), ENVELOPE])
async def test_answer_and_event_have_it_in_the_order_of_names(scene: Scene, offer: str, terms: Any) -> None:
    await scene.open(terms, offer)
    ann = Grab(id="g1", offer=offer, user="ann", metadata=FORM)
    plain = Grab(id="g2", offer=offer, user="bob")
    answers = await scene.decide_both([ann, plain, replace(plain, id="g3", user="eve", metadata=OTHER)])
    assert [answer.metadata for answer in answers] == [FORM, None, OTHER]
    assert list(answers[0].metadata or ()) == ["app:id", "form_id"]
    lines = (await scene.all_lines())[-3:]
    assert [metadata_in(line) for line in lines] == [
        [(name, FORM[name]) for name in ("app:id", "form_id")], None, [("form_id", "f-2")]
    ]  # fmt: skip
    assert b"metadata" not in lines[1]


@pytest.mark.parametrize("terms", [coupon(9), stock(9, hold_ms=HOUR), ENVELOPE])
async def test_it_is_part_of_the_body(scene: Scene, offer: str, terms: Any) -> None:
    await scene.open(terms, offer)
    ann = Grab(id="g", offer=offer, user="ann", metadata=FORM)
    [first] = await scene.decide_both([ann])
    in_another_order = replace(ann, metadata=dict(reversed(FORM.items())))
    others = [replace(ann, metadata=metadata) for metadata in (OTHER, {**FORM, "more": ""}, None, {})]
    answers = await scene.decide_both([ann, in_another_order, *others])
    assert answers[:2] == [replace(first, repeated=True)] * 2
    assert [(answer.outcome, answer.metadata) for answer in answers[2:]] == [("conflict", None)] * 4


async def test_an_empty_map_is_the_same_as_none(scene: Scene, offer: str) -> None:
    await scene.open(stock(9, hold_ms=HOUR), offer)
    for number, more in enumerate(({}, {"quantity": 1, "attributes": {"card": "c"}})):
        without = Grab(id=f"g{number}", offer=offer, user="ann", **more)  # type: ignore[arg-type]
        [first] = await scene.decide_both([replace(without, metadata={})])
        assert first.metadata is None
        assert await scene.decide_both([without]) == [replace(first, repeated=True)]


async def test_a_refusal_has_none_and_remembers_the_body(scene: Scene, offer: str) -> None:
    await scene.open(coupon(1), offer)
    await scene.grab("bob")
    ann = Grab(id="g", offer=offer, user="ann", metadata=FORM)
    answers = await scene.decide_both([ann, ann, replace(ann, metadata=OTHER)])
    assert [(answer.outcome, answer.repeated, answer.metadata) for answer in answers] == [
        ("sold_out", False, None), ("sold_out", True, None), ("conflict", False, None)
    ]  # fmt: skip


async def test_a_basket_has_that_of_each_grab(scene: Scene, offer: str) -> None:
    await scene.open(coupon(9), offer)
    await scene.open(coupon(9), f"{offer}2")
    basket = [
        Grab(id="b1", offer=offer, user="ann", basket="b", metadata=FORM),
        Grab(id="b2", offer=f"{offer}2", user="ann", basket="b"),
        Grab(id="b3", offer=f"{offer}2", user="bob", basket="b", metadata=OTHER),
    ]
    answers = await scene.decide_both(basket)
    assert [answer.metadata for answer in answers] == [FORM, None, OTHER]
    again = [*basket[:2], replace(basket[2], metadata=FORM)]
    assert [answer.outcome for answer in await scene.decide_both(again)] == ["granted", "granted", "conflict"]


async def test_a_queued_grab_has_it_again_when_it_is_served(scene: Scene, offer: str) -> None:
    await scene.open(stock(2, hold_ms=HOUR, waiting_list=True, take="up_to", max_per_grab=2), offer)
    first = [await scene.grab("holder") for _ in range(2)]
    queued = [
        Grab(id=f"w{number}", offer=offer, user=f"u{number}", wait=True, quantity=quantity, metadata=metadata)
        for number, (quantity, metadata) in enumerate([(1, FORM), (1, None), (2, OTHER), (1, LONGEST)])
    ]
    answers = await scene.decide_both(queued)
    assert [answer.outcome for answer in answers] == ["waiting"] * 4
    assert [answer.metadata for answer in answers] == [FORM, None, OTHER, LONGEST]
    assert [metadata_in(line) is not None for line in (await scene.all_lines())[-4:]] == [1, 0, 1, 1]
    # The last one leaves the queue; the others are served one after the other, the third in part.
    await scene.do(Release, grab="w3")
    for grab in [*first, await scene.grab("late", wait=True)]:
        await scene.do(Release, grab=grab.grab)
    await scene.do(Release, grab="w1")
    served = {event.grab: event.metadata for event in await scene.events("grab.held", waited=True)}
    assert served == {"w0": FORM, "w1": None, "w2": OTHER}
    # Its first answer stays that of the queue.
    assert await scene.decide_both(queued) == [replace(answer, repeated=True) for answer in answers]
    await scene.do(Close)


async def test_many_grabs_with_the_longest_ones_stay_within_a_line(scene: Scene, offer: str) -> None:
    await scene.open(stock(2_000, hold_ms=HOUR, waiting_list=True), offer)
    grabs = [
        Grab(id=f"g{n}", offer=offer, user=f"u{n}", metadata=LONGEST if n % 3 else None) for n in range(600)
    ]
    assert {answer.outcome for answer in await scene.decide_both(grabs)} == {"held"}
    shard = scene.keys.shard_of_offer(offer)
    lines = await outbox_lines(scene.client, scene.keys, shard)
    assert max(map(len, lines)) <= EVENT_LINE_BYTES_MAX
    assert len(lines) < 20, "the grabs are in runs"
    assert max(map(len, lines)) > 50_000
