"""What identifies a command: campaign and id; of a grab, offer, user and id."""

from msgspec.structs import replace

from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Close, Confirm, Grab, Open, Pause, Release, Resume
from grabstream.models.offers import EnvelopeTerms
from tests.lua.histories.scene import DAY, Scene, coupon, stock

ENVELOPE = EnvelopeTerms(
    issuer="alice", funding="pay", asset="CNY", total=1_000, parts=10, seed="5e" * 16, retire_after_ms=DAY
)


async def decided(scene: Scene, *commands: AnyCommand) -> list[str]:
    return [answer.outcome for answer in await scene.decide_both(commands)]


async def assert_repeated(scene: Scene, *firsts: tuple[AnyCommand, Answer]) -> None:
    answers = await scene.decide_both([command for command, _ in firsts])
    assert answers == [replace(first, repeated=True) for _, first in firsts]


async def test_nobody_can_use_up_an_id_of_an_envelope(scene: Scene) -> None:
    await scene.decide_both([Open(id="open", offer="c", terms=ENVELOPE)])
    mallory, ann = (Grab(id="g", offer="c", user=user) for user in ("mallory", "ann"))
    answers = await scene.decide_both([mallory, ann])
    assert [(answer.outcome, answer.user, answer.place) for answer in answers] == [
        ("granted", "mallory", 1), ("granted", "ann", 2)
    ]  # fmt: skip
    # Alone, in a list, and with others between: these take different paths through the script.
    await assert_repeated(scene, (ann, answers[1]))
    await assert_repeated(scene, (ann, answers[1]), (mallory, answers[0]))
    assert await decided(scene, Grab(id="g", offer="c", user="bob"), replace(ann, id="h"), ann) == [
        "granted", "already_taken", "granted"
    ]  # fmt: skip
    assert await decided(scene, replace(ann, attributes={"card": "7"}), replace(ann, quantity=2)) == [
        "conflict", "invalid"
    ]  # fmt: skip
    await scene.decide_both([Close(id="close", offer="c")])
    await assert_repeated(scene, (ann, answers[1]), (mallory, answers[0]))


async def test_a_grab_of_pieces_has_its_id_alone_in_its_offer(scene: Scene) -> None:
    first, second = "c:1", "c:2"
    for offer in (first, second):
        await scene.open(stock(5, hold_ms=DAY), offer)
    ann = Grab(id="g", offer=first, user="ann")
    [held] = await scene.decide_both([ann])
    assert await decided(scene, replace(ann, user="mallory"), replace(ann, quantity=2)) == [
        "conflict",
        "invalid",
    ]
    # The same id, of another offer: another grab, also of another user.
    other = Grab(id="g", offer=second, user="mallory")
    [of_other] = await scene.decide_both([other])
    assert (held.outcome, of_other.outcome, of_other.repeated) == ("held", "held", False)
    await assert_repeated(scene, (ann, held), (other, of_other))
    assert await decided(
        scene, Confirm(id="c", offer=first, grab="g"), Release(id="r", offer=second, grab="g", user="ann")
    ) == ["confirmed", "no_such_grab"]


async def test_grabs_and_other_commands_may_have_one_id(scene: Scene) -> None:
    await scene.decide_both([Open(id="x", offer="c", terms=ENVELOPE)])
    await scene.open(coupon(5), "c:c")
    commands: list[AnyCommand] = [
        Grab(id="x", offer="c", user="x"),
        Pause(id="p", offer="c:c"),
        Resume(id="g", offer="c:c"),
        Grab(id="g", offer="c:c", user="ann"),
        Grab(id="p", offer="c:c", user="p"),
        Pause(id="s", offer="c"),
    ]
    firsts = await scene.decide_both(commands)
    assert [first.outcome for first in firsts] == [
        "granted", "paused", "resumed", "granted", "granted", "paused"
    ]  # fmt: skip
    await assert_repeated(scene, *zip(commands, firsts, strict=True))
    # Other commands have their id for themselves in the whole campaign.
    assert await decided(scene, Pause(id="g", offer="c")) == ["conflict"]


async def test_a_refusal_is_that_of_its_user_and_offer(scene: Scene) -> None:
    await scene.open(coupon(1), "c:c")
    await scene.open(coupon(9), "c:d")
    grabs = [Grab(id="g", offer=f"c:{offer}", user=user) for offer in "cd" for user in ("ann", "bob")]
    taker = Grab(id="taker", offer="c:c", user="eve")
    assert await decided(scene, taker, grabs[0], grabs[1]) == ["granted", "sold_out", "sold_out"]
    assert await decided(scene, grabs[2]) == ["granted"]
    refused = await scene.decide_both(grabs[:2])
    assert [(answer.outcome, answer.user, answer.repeated) for answer in refused] == [
        ("sold_out", "ann", True), ("sold_out", "bob", True)
    ]  # fmt: skip


async def test_a_basket_may_have_one_id_for_grabs_of_two_offers(scene: Scene) -> None:
    offers = ["c:a", "c:b"]
    for offer in offers:
        await scene.open(stock(5, hold_ms=DAY), offer)
    basket = [Grab(id="g", offer=offer, user="ann", basket="B") for offer in offers]
    firsts = await scene.decide_both(basket)
    assert [answer.outcome for answer in firsts] == ["held"] * 2
    await assert_repeated(scene, *zip(basket, firsts, strict=True))
    of_bob = [replace(grab, user="bob", basket="C") for grab in basket]
    assert await decided(scene, *of_bob) == ["conflict"] * 2
