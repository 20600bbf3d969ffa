"""The requirements of flash sales (E of docs/requirements.md) on deciding, by Lua and by the pure rules."""

import asyncio
import random
from collections import Counter
from itertools import permutations, product
from typing import Any

import pytest

from grabstream.crypto.tickets import sign
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import (
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
    identity_of,
)
from grabstream.models.offers import EnvelopeTerms, Hours, Limit
from grabstream.models.rules import settling
from grabstream.streams.deciding.sweeper import Sweeper
from tests.lua.histories.books import check_books
from tests.lua.histories.scene import (
    BERLIN,
    DAY,
    HOUR,
    MINUTE,
    WEEK,
    Scene,
    at,
    by_user,
    coupon,
    left_by_limit,
    stock,
)
from tests.lua.histories.strategies import TICKET_SECRET, ticket_for
from tests.support.shards import NOW, SEALER, event_lines, take_over

PRICED: dict[str, Any] = {"price": 250, "currency": "CNY", "hold_ms": MINUTE, "max_per_grab": 10}


async def pay(
    scene: Scene, grab: str | None, payment: str | None = None, paid: int = 250, **rest: Any
) -> Answer:
    return await scene.do(
        Confirm,
        grab=grab,
        payment=payment or scene.id(),
        paid=paid,
        currency=rest.pop("currency", "CNY"),
        **rest,
    )


async def left_of(scene: Scene) -> int | None:
    """The units left of the open offer, from the answer to an amendment."""
    return (await scene.amend(title="x")).left


# -- quantities ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("E1")
@pytest.mark.parametrize("hold_ms", [None, HOUR])
@pytest.mark.parametrize(
    ("take", "total", "rows"),
    [
        ("all", 10, [(1, "ok", 1, 9), (8, "ok", 8, 1), (2, "not_enough_left", None, 1), (1, "ok", 1, 0), (1,
        "sold_out", None, None)]),
        ("all", 10, [(10, "ok", 10, 0), (1, "sold_out", None, None), (10, "sold_out", None, None)]),
        ("all", 10, [(11, "invalid", None, None), (10, "ok", 10, 0)]),
        ("all", 9, [(10, "invalid", None, None), (9, "ok", 9, 0)]),
        ("up_to", 10, [(1, "ok", 1, 9), (8, "ok", 8, 1), (2, "ok", 1, 0), (1, "sold_out", None, None)]),
        ("up_to", 3, [(10, "ok", 3, 0), (10, "sold_out", None, None)]),
        ("up_to", 10, [(11, "invalid", None, None), (10, "ok", 10, 0)]),
    ],
)  # fmt: skip
async def test_a_grab_gets_a_quantity_from_one_to_what_is_left(
    scene: Scene, take: Any, total: int, rows: list[Any], hold_ms: int | None
) -> None:
    await scene.open(stock(total, max_per_grab=10, take=take, hold_ms=hold_ms))
    for quantity, outcome, got, left in rows:
        answer = await scene.grab("ann", quantity)
        expected = outcome if outcome != "ok" else ("held" if hold_ms else "granted")
        assert (answer.outcome, answer.quantity, answer.left) == (expected, got, left)


@pytest.mark.requirement("E1")
@pytest.mark.parametrize("take", ["all", "up_to"])
async def test_random_quantities_never_oversell_an_offer(scene: Scene, take: Any) -> None:
    """Grabs of random quantities in one list; half of the holds are released, and a second list is sent."""
    chance = random.Random(4)
    await scene.open(stock(200, max_per_grab=9, take=take, hold_ms=HOUR))

    def crowd(number: int) -> list[Grab]:
        return [
            Grab(id=f"{number}-{n}", offer="o", user=f"u{n}", quantity=chance.randint(1, 9))
            for n in range(150)
        ]

    answers = await scene.decide_both(crowd(1))
    held = {answer.grab: answer.quantity or 0 for answer in answers if answer.outcome == "held"}
    assert sum(held.values()) == 200  # small quantities take the last units with both values of `take`
    released = list(held)[::2]
    await scene.decide_both([Release(id=f"r{name}", offer="o", grab=name or "") for name in released])
    second = await scene.decide_both(crowd(2))
    still_held = sum(held[name] for name in held if name not in released)
    assert still_held + sum(answer.quantity or 0 for answer in second if answer.outcome == "held") == 200
    assert {answer.outcome for answer in second} <= {"held", "sold_out", "not_enough_left"}


# -- audiences and tickets -----------------------------------------------------------------------------------


@pytest.mark.requirement("E2", "E7")
async def test_everyone_a_list_or_holders_of_tickets_may_grab(scene: Scene) -> None:
    """Lists are loaded and tickets signed seven days before the opening; grabs then need no other service."""
    opens_at = NOW + 7 * DAY
    signed = {user: ticket_for(user, "o:ticket", opens_at + HOUR, "") for user in ("ann", "bob")}
    for audience in ("everyone", "list", "ticket"):
        await scene.open(stock(10, audience=audience, opens_at=opens_at), f"o:{audience}")
    load = {"offer": "o:list", "what": "audience", "chunks": 2}
    assert (await scene.do(Load, chunk=1, items=("ann",), **load)).outcome == "loaded"
    scene.now = opens_at
    assert (
        await scene.grab("ann", offer="o:list")
    ).outcome == "not_open_yet"  # half a list would refuse eligible users
    assert (await scene.do(Load, chunk=2, items=("bob", "ann"), **load)).outcome == "loaded"
    assert (await scene.do(Load, chunk=1, items=("eve",), **load)).outcome == "conflict"
    for audience, user, outcome in [
        ("everyone", "ann", "granted"), ("everyone", "eve", "granted"), ("list", "ann", "granted"),
        ("list", "bob", "granted"),
        ("list", "eve", "not_eligible"), ("ticket", "ann", "granted"), ("ticket", "bob", "granted"),
        ("ticket", "eve", "not_eligible"),
    ]:  # fmt: skip
        ticket = signed.get(user) if audience == "ticket" else None
        assert (await scene.grab(user, offer=f"o:{audience}", ticket=ticket)).outcome == outcome, (
            audience,
            user,
        )


async def test_the_id_of_an_expired_campaign_ticket_can_be_used_by_a_later_ticket(
    scene: Scene,
) -> None:
    """Expired ticket ids are deleted in small steps; answers do not depend on what is deleted yet."""
    for name in ("o:1", "o:2"):
        await scene.open(stock(10, audience="ticket", max_per_grab=3), name)

    def grab(once: str, offer: str, lasts: int) -> Grab:
        ticket = sign(
            "t",
            TICKET_SECRET,
            user="ann",
            offer="o",
            expires_at_ms=(scene.now + lasts) // 1000 * 1000,
            once_id=once,
        )
        return Grab(id=scene.id(), offer=offer, user="ann", ticket=ticket)

    first = [grab(f"t{number}", "o:1", 10_000) for number in range(5)]
    assert {answer.outcome for answer in await scene.decide_both(first)} == {"granted"}
    scene.now += 20_000
    later = [grab(once, "o:2", HOUR) for once in ("t4", "t0", "new", "t2", "t4", "t0", "new")]
    assert [answer.outcome for answer in await scene.decide_both(later)] == ["granted"] * 4 + [
        "not_eligible"
    ] * 3


async def test_a_ticket_is_valid_for_its_user_and_offer_until_it_expires(scene: Scene) -> None:
    good_until = NOW + HOUR
    await scene.open(stock(10, audience="ticket"), "o:1")
    tickets = {
        "of another user": ticket_for("bob", "o:1", good_until, ""),
        "for another offer": ticket_for("ann", "o:2", good_until, ""),
        "for another campaign": ticket_for("ann", "p", good_until, ""),
        "changed": ticket_for("ann", "o:1", good_until, "")[:-4] + "AAAA",
        "none": None,
    }
    for why, ticket in tickets.items():
        assert (await scene.grab("ann", ticket=ticket)).outcome == "not_eligible", why
    valid = [ticket_for("ann", name, good_until, "") for name in ("o:1", "o")]
    scene.now = good_until - 1
    assert [(await scene.grab("ann", ticket=ticket)).outcome for ticket in valid] == ["granted"] * 2
    scene.now = good_until
    assert [(await scene.grab("ann", ticket=ticket)).outcome for ticket in valid] == ["not_eligible"] * 2


async def test_a_single_use_ticket_is_used_by_its_first_grant(scene: Scene) -> None:
    """A granted or held grab uses the ticket, a refused grab does not. A release does not restore it."""
    await scene.open(stock(10, by_user("offer", 2), audience="ticket", hold_ms=HOUR, max_per_grab=3))
    once, other = (ticket_for("ann", "o", NOW + DAY, name) for name in ("t1", "t2"))
    command = Grab(id="g", offer="o", user="ann", ticket=once)
    assert (await scene.grab("ann", 3, ticket=once)).outcome == "limit_reached"
    await scene.do(Pause)
    assert (await scene.grab("ann", ticket=once)).outcome == "on_hold"
    await scene.do(Resume)
    held, repeated, again = await scene.decide_both(
        [command, command, Grab(id="h", offer="o", user="ann", ticket=once)]
    )
    assert (held.outcome, repeated.outcome, repeated.repeated, again.outcome) == (
        "held",
        "held",
        True,
        "not_eligible",
    )
    assert (await scene.grab("ann", ticket=once)).outcome == "not_eligible"
    await scene.do(Release, grab="g")
    assert (await scene.grab("ann", ticket=once)).outcome == "not_eligible"
    assert (await scene.grab("ann", ticket=other)).outcome == "held"
    # A ticket of another campaign may have the same id.
    await scene.open(stock(10, audience="ticket"), "p")
    assert (
        await scene.grab("ann", offer="p", ticket=ticket_for("ann", "p", NOW + DAY, "t1"))
    ).outcome == "granted"


async def test_a_single_use_ticket_of_a_campaign_is_used_once_in_all_its_offers(scene: Scene) -> None:
    """In offers of every kind, also by a waiting grab, and also after the offer in which it was used has
    retired.
    """
    five = [f"w:{number}" for number in range(5)]
    for offer in five:
        await scene.open(
            stock(1, audience="ticket", hold_ms=HOUR, waiting_list=True, retire_after_ms=1), offer
        )
    envelope = EnvelopeTerms(
        issuer="shop", funding="pay", asset="CNY", total=10, parts=2, audience="ticket", seed="0" * 32
    )
    await scene.open(envelope, "w:envelope")

    async def outcomes(*offers: str, ticket: str, **rest: Any) -> list[str]:
        return [(await scene.grab("ann", offer=offer, ticket=ticket, **rest)).outcome for offer in offers]

    for name, audience in (("t1", "w"), ("t2", [five[0], five[1], "w:envelope"])):
        ticket = sign("t", TICKET_SECRET, user="ann", offer=audience, expires_at_ms=NOW + DAY, once_id=name)
        assert await outcomes("w:none", ticket=ticket) == ["no_such_offer"]
        used_for = five[0] if name == "t1" else five[1]
        assert await outcomes(used_for, *five[:2], "w:envelope", ticket=ticket) == [
            "held",
            *["not_eligible"] * 3,
        ]
    for name, wait in (("t3", True), ("t4", False)):
        ticket = ticket_for("ann", "w", NOW + DAY, name)
        rest = {"wait": True} if wait else {}
        assert await outcomes(five[0], ticket=ticket, **rest) == ["waiting" if wait else "sold_out"]
        assert await outcomes(*five[2:4], ticket=ticket) == (
            ["not_eligible"] * 2 if wait else ["held", "not_eligible"]
        )
    ticket = ticket_for("ann", "w", NOW + DAY, "t5")
    assert await outcomes("w:envelope", five[4], ticket=ticket) == ["granted", "not_eligible"]
    # A ticket for one offer is another ticket than the campaign's ticket with the same id.
    assert await outcomes(five[4], ticket=ticket_for("ann", five[4], NOW + DAY, "t5")) == ["held"]
    for offer in (five[0], "w:envelope"):
        await scene.do(Close, offer=offer)
    scene.now += HOUR
    await scene.sweep_both()
    scene.now += 1
    await scene.sweep_both()
    assert {event.offer for event in await scene.events("offer.retired")} == {five[0]}
    assert await outcomes(five[3], ticket=ticket_for("ann", "w", NOW + DAY, "t1")) == ["not_eligible"]
    for offer in five[1:]:
        await scene.do(Close, offer=offer)
    scene.now += 8 * DAY
    await scene.sweep_both()
    assert [name for name in await scene.names() if "/tickets" in name] == []


async def test_a_ticket_of_a_refused_basket_is_not_used(scene: Scene) -> None:
    for offer, total in (("w:1", 5), ("w:2", 1)):
        await scene.open(stock(total, audience="ticket", max_per_grab=3), offer)
    first, second = (ticket_for("ann", "w", NOW + DAY, name) for name in ("t1", "t2"))

    def pair(name: str, *tickets: str) -> list[Grab]:
        return [
            Grab(id=f"{name}{n}", offer=f"w:{n + 1}", user="ann", basket=name, ticket=ticket) for n,
            ticket in enumerate(tickets)
        ]  # fmt: skip

    assert [answer.outcome for answer in await scene.decide_both(pair("a", first, first))] == [
        "not_eligible"
    ] * 2
    await scene.grab("ann", offer="w:1", ticket=first, quantity=4)
    assert [answer.outcome for answer in await scene.decide_both(pair("b", first, second))] == ["granted"] * 2
    assert [answer.outcome for answer in await scene.decide_both(pair("c", first, second))] == [
        "not_eligible"
    ] * 2


async def test_expired_used_tickets_are_deleted(scene: Scene) -> None:
    """An expired ticket is refused by its time, so its use need not be stored."""
    await scene.open(stock(99, audience="ticket"), "w:1")
    for number in range(6):
        assert (
            await scene.grab("ann", ticket=ticket_for("ann", "w", NOW + MINUTE, f"t{number}"))
        ).outcome == "granted"
    scene.now += MINUTE
    tickets = scene.keys.shard(scene.keys.shard_of_offer("w")).campaign_keys("w")[-1]
    for number, stored in ((6, 5), (7, 4), (8, 3), (9, 4)):
        assert (
            await scene.grab("ann", ticket=ticket_for("ann", "w", NOW + DAY, f"t{number}"))
        ).outcome == "granted"
        assert await scene.client.zcard(tickets) == stored
    assert (
        await scene.grab("ann", ticket=ticket_for("ann", "w", NOW + MINUTE, "t0"))
    ).outcome == "not_eligible"


# -- hold, confirm, release, expire --------------------------------------------------------------------------


@pytest.mark.requirement("E9")
async def test_a_hold_says_what_is_due_until_when(scene: Scene) -> None:
    await scene.open(stock(10, **PRICED))
    answer = await scene.grab("ann", 3)
    assert (answer.outcome, answer.due, answer.currency, answer.deadline_at) == (
        "held",
        750,
        "CNY",
        NOW + MINUTE,
    )
    # A hold keeps the price at which it was made.
    await scene.amend(price=100)
    assert (await scene.grab("bob", 2)).due == 200
    assert (await pay(scene, answer.grab, paid=300)).outcome == "invalid"
    assert (await pay(scene, answer.grab, paid=750)).outcome == "confirmed"


@pytest.mark.requirement("E3")
async def test_a_hold_ends_once_in_any_order_of_confirm_release_and_expiry(scene: Scene) -> None:
    """In every sequence of four steps the first step decides; later steps answer with the state."""
    total = 10_000
    await scene.open(stock(total, **PRICED))
    left = total
    first_outcomes = {"confirm": "confirmed", "release": "released", "expire": None}
    later_outcomes = {
        ("confirm", "confirm"): "confirmed", ("confirm", "release"): "not_held",
        ("release", "confirm"): "not_held",
        ("release", "release"): "released", ("expire", "confirm"): "expired",
        ("expire", "release"): "expired",
    }  # fmt: skip
    for number, steps in enumerate(product(("confirm", "release", "expire"), repeat=4)):
        grab = (await scene.grab("ann", 2)).grab
        for index, step in enumerate(steps):
            if step == "expire":
                scene.now += MINUTE
                await scene.sweep_both()
                continue
            answer = await (
                pay(scene, grab, f"pay{number}", 500) if step == "confirm" else scene.do(Release, grab=grab)
            )
            assert answer.outcome == (later_outcomes[steps[0], step] if index else first_outcomes[step]), (
                steps,
                index,
            )
            already_holds = answer.outcome in ("confirmed", "released") and index > 0
            assert answer.repeated == (already_holds or (step == "confirm" and step in steps[:index])), (
                steps,
                index,
            )
        left -= 2 if steps[0] == "confirm" else 0
        assert (await left_of(scene)) == left, steps
        ended = [len(await scene.events(kind, grab=grab)) for kind in ("grab.confirmed", "grab.released")]
        assert ended == ([1, 0] if steps[0] == "confirm" else [0, 1]), steps
        refunds = len(await scene.events("payment.refund_due", payment=f"pay{number}"))
        assert refunds == (1 if "confirm" in steps and steps[0] != "confirm" else 0), steps


@pytest.mark.requirement("E3")
@pytest.mark.parametrize("order", list(permutations(("confirm", "sweep", "release"))))
@pytest.mark.parametrize("ms", [-1, 0])
async def test_a_hold_has_expired_from_the_millisecond_of_its_deadline(
    scene: Scene, order: tuple[str, ...], ms: int
) -> None:
    """Before the deadline the first command decides; from the millisecond of the deadline on the hold has
    expired, swept or not. A refused payment is due for refund once.
    """
    await scene.open(stock(5, **PRICED))
    grab = (await scene.grab("ann", 2)).grab
    scene.now = NOW + MINUTE + ms
    outcomes = {}
    for step in order:
        if step == "sweep":
            await scene.sweep_both()
        else:
            outcomes[step] = (
                await (pay(scene, grab, "pay", 500) if step == "confirm" else scene.do(Release, grab=grab))
            ).outcome
    if ms >= 0:
        expected = {"confirm": "expired", "release": "expired"}
    elif order.index("confirm") < order.index("release"):
        expected = {"confirm": "confirmed", "release": "not_held"}
    else:
        expected = {"confirm": "not_held", "release": "released"}
    assert outcomes == expected
    confirmed = expected["confirm"] == "confirmed"
    assert await left_of(scene) == (3 if confirmed else 5)
    assert len(await scene.events("payment.refund_due")) == (0 if confirmed else 1)
    released = await scene.events("grab.released")
    assert [event.reason for event in released] == (
        [] if confirmed else ["expired" if ms >= 0 else "command"]
    )


@pytest.mark.requirement("E3")
async def test_confirm_and_expiry_at_once_end_each_hold_once(client: Any, keys: KeySpace) -> None:
    """Payments in the last millisecond while the sweeper has the time of the deadline: each hold ends once,
    and each refused payment is due for refund.
    """
    holds, deadline = 150, NOW + MINUTE
    await take_over(client, keys)
    now = [NOW]
    gate = Gate(
        client, keys, SEALER, GateLimits(batch_commands_max=1, timeout_ms=30_000), clock=lambda: now[0]
    )
    grabs = [Grab(id=f"g{number}", offer="o", user="ann") for number in range(holds)]
    await gate.decide([Open(id="open", offer="o", terms=stock(holds, **PRICED)), *grabs], "decided")
    now[0] = deadline - 1
    shard = keys.shard_of_offer("o")
    sweeper = Sweeper(client, keys.shard(shard), keys.shards, 10**12)
    payments = [
        Confirm(id=f"c{number}", offer="o", grab=f"g{number}", payment=f"p{number}", paid=250, currency="CNY")
        for number in range(holds)
    ]
    answers, _ = await asyncio.gather(gate.decide(payments, "decided"), sweeper.sweep(deadline))
    await sweeper.sweep(deadline)
    await gate.close()
    lines = await event_lines(client, keys, shard)
    check_books(lines)
    outcomes = Counter(answer.outcome for answer in answers)
    ended = Counter(
        kind
        for line in lines
        for kind in ("grab.confirmed", "grab.released", "payment.refund_due")
        if kind.encode() in line
    )
    assert set(outcomes) <= {"confirmed", "expired"}
    assert ended["grab.confirmed"] == outcomes["confirmed"]
    assert (
        ended["grab.released"]
        == ended["payment.refund_due"]
        == outcomes["expired"]
        == holds - outcomes["confirmed"]
    )
    async for name in client.scan_iter(match=f"{keys.prefix}:*", count=1_000):
        await client.unlink(name)


@pytest.mark.requirement("E3")
@pytest.mark.parametrize("extensions", [0, 3])
async def test_extend_moves_the_deadline_up_to_the_allowed_number_of_times(
    scene: Scene, extensions: int
) -> None:
    await scene.open(stock(5, **PRICED, extensions=extensions))
    grab = (await scene.grab("ann")).grab
    for number in range(1, extensions + 1):
        scene.now += 1_000
        answer = await scene.do(Extend, grab=grab)
        assert (answer.outcome, answer.deadline_at) == ("extended", NOW + (number + 1) * MINUTE)
    refused = await scene.do(Extend, grab=grab)
    assert refused.limit is not None
    assert (refused.outcome, refused.limit.max, refused.limit.left) == ("limit_reached", extensions, 0)
    deadline = NOW + (extensions + 1) * MINUTE
    scene.now = deadline - 1
    await scene.sweep_both()
    assert await left_of(scene) == 4
    scene.now = deadline
    assert (await scene.do(Extend, grab=grab)).outcome == "expired"
    assert await left_of(scene) == 5
    assert (await scene.do(Extend, grab="none")).outcome == "no_such_grab"


@pytest.mark.requirement("E3")
async def test_only_a_hold_is_extended(scene: Scene) -> None:
    await scene.open(stock(5, **PRICED, extensions=9))
    paid, released = (await scene.grab("ann")).grab, (await scene.grab("ann")).grab
    await pay(scene, paid)
    await scene.do(Release, grab=released)
    assert [(await scene.do(Extend, grab=grab)).outcome for grab in (paid, released)] == ["not_held"] * 2


@pytest.mark.requirement("E3")
async def test_a_command_wrong_in_two_ways_gets_the_refusal_of_higher_precedence(scene: Scene) -> None:
    """Quantities and extensions are checked only after the state of the grab."""
    await scene.open(stock(200, **PRICED | {"max_per_grab": 200}, extensions=1))
    grab = (await scene.grab("ann", settling.PAYMENTS_MAX + 1)).grab
    for number in range(settling.PAYMENTS_MAX):
        assert (await pay(scene, grab, f"p{number}", 250, quantity=1)).outcome == "confirmed"
    assert (await pay(scene, grab, "one-more", 500, quantity=2)).outcome == "limit_reached"
    assert (await scene.do(Extend, grab=grab)).outcome == "extended"
    assert (await scene.do(Extend, grab=grab)).outcome == "limit_reached"
    other = (await scene.grab("bob", 1)).grab
    assert (await scene.do(Return, grab=other, quantity=2)).outcome == "not_held"
    scene.now += 3 * MINUTE
    assert [(await scene.do(Extend, grab=name)).outcome for name in (grab, other)] == ["expired"] * 2
    assert (await pay(scene, other, "late", 1, quantity=9)).outcome == "invalid"


@pytest.mark.requirement("E3")
@pytest.mark.parametrize("end", ["release", "expire", "confirm"])
async def test_a_partial_confirm_keeps_the_rest_held(scene: Scene, end: str) -> None:
    await scene.open(stock(5, by_user("offer", 5), **PRICED))
    grab = (await scene.grab("ann", 5)).grab
    assert (await pay(scene, grab, "p1", 500, quantity=2)).quantity == 2
    assert (await pay(scene, grab, "p2", 250, quantity=1)).quantity == 1
    too_many = await pay(scene, grab, "p3", 750, quantity=3)
    assert (too_many.outcome, too_many.left) == ("not_enough_left", 2)
    assert [event.held for event in await scene.events("grab.confirmed")] == [3, 2]
    if end == "release":
        assert (await scene.do(Release, grab=grab)).quantity == 2
    elif end == "expire":
        scene.now += MINUTE
        await scene.sweep_both()
        assert (await pay(scene, grab, "p4", 500)).outcome == "expired"
    else:
        assert (await pay(scene, grab, "p4", 500)).quantity == 2
    taken = 5 if end == "confirm" else 3
    assert await left_of(scene) == 5 - taken
    answer = await scene.do(Return, grab=grab)
    assert answer.quantity == taken
    [returned] = await scene.events("grab.returned")
    assert returned.refunds == (("p1", 500), ("p2", 250), *([("p4", 500)] if end == "confirm" else []))


@pytest.mark.requirement("E3")
@pytest.mark.parametrize(
    ("terms", "after_ms", "meanwhile", "outcome"),
    [
        ({}, -1, None, "confirmed"),
        ({}, 0, None, "expired"),
        ({"late": "grace", "grace_ms": 500}, 0, None, "confirmed"),
        ({"late": "grace", "grace_ms": 500}, 499, None, "confirmed"),
        # during the grace time the units are not free
        ({"late": "grace", "grace_ms": 500}, 499, "others grab", "confirmed"),
        ({"late": "grace", "grace_ms": 500}, 500, None, "expired"),
        ({"late": "retake"}, 0, None, "confirmed"),
        ({"late": "retake"}, DAY, None, "confirmed"),
        ({"late": "retake"}, DAY, "others grab", "expired"),
        ({"late": "retake"}, DAY, "others wait", "expired"),
        ({"late": "retake"}, DAY, "closed", "expired"),
        ({"late": "retake", "closes_at": NOW + MINUTE + 9}, 8, None, "confirmed"),
        # the offer is closed, swept or not
        ({"late": "retake", "closes_at": NOW + MINUTE + 9}, 9, None, "expired"),
        ({"late": "retake"}, DAY, "limit used up", "expired"),
        ({"late": "refuse"}, DAY, None, "expired"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("swept", [False, True])
async def test_a_late_payment_is_served_as_the_terms_allow(
    scene: Scene, terms: Any, after_ms: int, meanwhile: str | None, outcome: str, swept: bool
) -> None:
    await scene.open(stock(3, by_user("offer", 3), **PRICED, waiting_list=True, **terms))
    grab = (await scene.grab("ann", 3)).grab
    if meanwhile == "others wait":
        await scene.grab("bob", 3, wait=True)
    scene.now = NOW + MINUTE + after_ms
    if swept or meanwhile in ("others grab", "others wait", "limit used up"):
        await scene.sweep_both()
    if meanwhile == "others grab":
        assert (await scene.grab("bob")).outcome == ("sold_out" if outcome == "confirmed" else "held")
    elif meanwhile == "limit used up":
        await scene.amend(total=9)
        await scene.grab("ann", 1)
    elif meanwhile == "closed":
        await scene.do(Close)
    for _ in range(2):
        assert (await pay(scene, grab, "late", 750)).outcome == outcome
    assert len(await scene.events("payment.refund_due")) == (0 if outcome == "confirmed" else 1)
    confirmed = await scene.events("grab.confirmed")
    retaken = terms.get("late") == "retake" and outcome == "confirmed"
    assert [(event.quantity, event.retaken) for event in confirmed] == (
        [(3, retaken)] if outcome == "confirmed" else []
    )


async def test_a_late_payment_takes_units_that_suffice_for_no_waiting_grab(scene: Scene) -> None:
    """Three units are left, too few for the first waiting grab, so the late payment may take one of them."""
    await scene.open(stock(4, **PRICED, waiting_list=True, late="retake"))
    await pay(scene, (await scene.grab("joe")).grab)
    late = (await scene.grab("ann", 3)).grab
    await scene.grab("bob", 4, wait=True)
    scene.now += MINUTE
    await scene.sweep_both()
    assert await left_of(scene) == 3
    assert (await pay(scene, late, "p1", 250, quantity=1)).outcome == "confirmed"
    await scene.grab("eve", 3, wait=True)
    assert await left_of(scene) == 2
    assert (await pay(scene, late, "p2", 500, quantity=2)).outcome == "confirmed"
    assert await left_of(scene) == 0


# -- payments that cannot be served --------------------------------------------------------------------------


async def unserved(scene: Scene, situation: str) -> tuple[str, dict[str, Any], str]:
    """A grab in this situation, the fields of a payment for it, and the expected outcome."""
    grab = (await scene.grab("ann", 1)).grab or ""
    paid: dict[str, Any] = {"paid": 250}
    match situation:
        case "unknown grab":
            return "unknown", paid, "no_such_grab"
        case "released":
            await scene.do(Release, grab=grab)
            return grab, paid, "not_held"
        case "expired":
            scene.now += MINUTE
            return grab, paid, "expired"
        case "expired and swept":
            scene.now += MINUTE
            await scene.sweep_both()
            return grab, paid, "expired"
        case "expired and closed":
            scene.now += MINUTE
            await scene.do(Close)
            return grab, paid, "expired"
        case "confirmed by another payment":
            await pay(scene, grab)
            return grab, paid, "not_held"
        case "returned":
            await pay(scene, grab)
            await scene.do(Return, grab=grab)
            return grab, paid, "not_held"
        case "waiting":
            await scene.amend(total=1)
            return (await scene.grab("bob", wait=True)).grab or "", paid, "not_held"
        case "too little" | "too much":
            return grab, {"paid": 249 if situation == "too little" else 251}, "invalid"
        case "wrong currency":
            return grab, {"paid": 250, "currency": "EUR"}, "invalid"
        case "more units than held":
            return grab, {"paid": 500, "quantity": 2}, "not_enough_left"
        case "right for other units":
            return grab, {"paid": 250, "quantity": 2}, "invalid"
    raise AssertionError(situation)


SITUATIONS = (
    "unknown grab", "released", "expired and closed", "confirmed by another payment", "returned", "waiting",
    "too little", "too much",
    "wrong currency", "more units than held", "right for other units",
)  # fmt: skip


@pytest.mark.requirement("E3")
@pytest.mark.parametrize(
    ("situation", "late"),
    [
        *((situation, "refuse") for situation in (*SITUATIONS, "expired", "expired and swept")),
        # A grab that has nothing on hold any more: its units are not taken again.
        *((situation, "retake") for situation in SITUATIONS[1:5]),
    ],
)
async def test_every_unserved_payment_is_due_for_refund_once(scene: Scene, situation: str, late: Any) -> None:
    """The payment is sent under one command id, under others, in one list, and later. The same payment id
    with the right sum is a conflict: a payment that is due for refund is not served.
    """
    await scene.open(stock(5, **PRICED, waiting_list=True, late=late))
    grab, paid, outcome = await unserved(scene, situation)

    def confirm(id: str, **other: Any) -> Confirm:
        return Confirm(
            **{"id": id, "offer": "o", "grab": grab, "payment": "p", "currency": "CNY", **paid, **other}
        )

    answers = await scene.decide_both([confirm("c1"), confirm("c1"), confirm("c2")])
    scene.now += 1
    answers += await scene.decide_both([confirm("c1"), confirm("c3")])
    [right] = await scene.decide_both([confirm("c4", paid=250, currency="CNY", quantity=1)])
    if (paid["paid"], paid.get("currency", "CNY")) == (250, "CNY"):
        answers.append(right)
    else:
        assert (right.outcome, right.seq) == ("conflict", None)
    assert {answer.outcome for answer in answers} == {outcome}
    assert {answer.seq for answer in answers} == {answers[0].seq}
    [refund] = await scene.events("payment.refund_due")
    assert (refund.payment, refund.grab, refund.amount, refund.asset, refund.outcome, refund.seq) == (
        "p", grab, paid["paid"], paid.get("currency", "CNY"), outcome, answers[0].seq,
    )  # fmt: skip
    # The same payment for another grab is a conflict, and not due for refund a second time.
    other = (await scene.grab("kim")).grab or "none"
    assert [(await pay(scene, other, "p")).outcome, (await pay(scene, "unknown-2", "p")).outcome] == [
        "conflict"
    ] * 2
    assert len(await scene.events("payment.refund_due")) == 1


async def test_wrong_payments_do_not_end_a_hold(scene: Scene) -> None:
    await scene.open(stock(5, **PRICED))
    grab = (await scene.grab("ann", 2)).grab
    wrong = [
        await pay(scene, grab, "p1", 499),
        await pay(scene, grab, "p2", 500, currency="EUR"),
        await pay(scene, grab, "p3", 250),
    ]
    assert {answer.outcome for answer in wrong} == {"invalid"}
    assert (await pay(scene, grab, "p4", 500)).outcome == "confirmed"
    assert {(event.payment, event.amount,
        event.asset) for event in await scene.events("payment.refund_due")} == {
        ("p1", 499, "CNY"), ("p2", 500, "EUR"), ("p3", 250, "CNY"),
    }  # fmt: skip


@pytest.mark.parametrize(("terms", "outcome"), [({"hold_ms": MINUTE}, "invalid"), ({}, "not_held")])
async def test_a_payment_for_a_free_grab_is_due_for_refund(scene: Scene, terms: Any, outcome: str) -> None:
    await scene.open(coupon(5, **terms))
    grab = (await scene.grab("ann")).grab
    assert [(await pay(scene, grab, "p")).outcome for _ in range(2)] == [outcome] * 2
    assert [event.amount for event in await scene.events("payment.refund_due")] == [250]
    # A payment of nothing needs no refund.
    assert (await scene.do(Confirm, grab="none", payment="q")).outcome == "no_such_grab"
    assert len(await scene.events("payment.refund_due")) == 1


# -- return --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("E4")
@pytest.mark.parametrize("restores", [False, True])
async def test_returned_units_can_be_grabbed_again(scene: Scene, restores: bool) -> None:
    """In parts and whole; with `return_restores` the user may grab as many units again."""
    await scene.open(stock(4, by_user("offer", 4), by_user("day", 4), **PRICED, return_restores=restores))
    grab = (await scene.grab("ann", 4)).grab
    assert (await scene.do(Return, grab=grab)).outcome == "not_held"  # a hold is released, not returned
    await pay(scene, grab, "p1", 1000)
    assert await scene.outcomes("bob") == ["sold_out"]
    for quantity, outcome, returned_units, left in (
        (5, "not_enough_left", None, 4),
        (1, "returned", 1, 1),
        (2, "returned", 2, 3),
    ):
        answer = await scene.do(Return, grab=grab, quantity=quantity, reason="too small")
        assert (answer.outcome, answer.quantity, answer.left) == (outcome, returned_units, left)
    again = await scene.grab("ann", 3)
    assert again.outcome == ("held" if restores else "limit_reached")
    assert await scene.outcomes("bob") == (["sold_out"] if restores else ["held"])
    whole = await scene.do(Return, grab=grab)
    assert (whole.outcome, whole.quantity) == ("returned", 1)
    assert (await scene.do(Return, grab=grab)).outcome == "not_held"
    returned = await scene.events("grab.returned")
    assert [(event.refunds, event.currency, event.to, event.restored) for event in returned] == [
        ((("p1", quantity * 250),), "CNY", "offer:o", restores) for quantity in (1, 2, 1)
    ]


@pytest.mark.requirement("E4")
async def test_a_return_is_carried_out_once(scene: Scene) -> None:
    await scene.open(stock(4, max_per_grab=4))
    grab = (await scene.grab("ann", 4)).grab or ""
    command = Return(id="r", offer="o", grab=grab, quantity=1)
    answers = await scene.decide_both([command] * 3)
    assert [(answer.outcome, answer.left, answer.repeated) for answer in answers] == [
        ("returned", 1, n > 0) for n in range(3)
    ]


@pytest.mark.parametrize("restores", [False, True])
async def test_a_return_on_another_day_restores_no_window_that_has_ended(
    scene: Scene, restores: bool
) -> None:
    await scene.open(
        stock(100, by_user("day", 3), by_user("offer", 9), max_per_grab=3, return_restores=restores)
    )
    first = (await scene.grab("ann", 3)).grab
    scene.now += DAY
    await scene.grab("ann", 2)
    await scene.do(Return, grab=first)
    assert left_by_limit(await scene.grab("ann", 1)) == {"user/day": 0, "user/offer": 6 if restores else 3}


@pytest.mark.parametrize("more_today", [0, 1])
async def test_a_return_restores_retaken_units_on_the_day_they_were_counted(
    scene: Scene, more_today: int
) -> None:
    """One unit counts on Monday, a retaken unit on Tuesday: their return restores one unit of Tuesday."""
    await scene.open(stock(100, by_user("day", 2), **PRICED, late="retake", return_restores=True))
    grab = (await scene.grab("ann", 2)).grab
    assert (await pay(scene, grab, "p1", 250, quantity=1)).outcome == "confirmed"
    scene.now += DAY
    assert (await pay(scene, grab, "p2", 250)).outcome == "confirmed"
    today = [await scene.grab("ann") for _ in range(more_today)]
    assert [left_by_limit(answer) for answer in today] == [{"user/day": 0}] * more_today
    assert (await scene.do(Return, grab=grab)).quantity == 2
    assert left_by_limit(await scene.grab("ann")) == {"user/day": 1 - more_today}


# -- close, amend, waves -------------------------------------------------------------------------------------


@pytest.mark.requirement("E3")
@pytest.mark.parametrize("closed_by", ["command", "deadline"])
async def test_holds_can_be_paid_after_the_close(scene: Scene, closed_by: str) -> None:
    """Holds can be paid until their deadline. Released and returned units go to the issuer."""
    await scene.open(stock(10, **PRICED, closes_at=NOW + 1_000))
    paid, released, expires, taken = [
        (await scene.grab(user, 2)).grab for user in ("ann", "bob", "eve", "joe")
    ]
    await pay(scene, taken, "p1", 500)
    if closed_by == "command":
        assert (await scene.do(Close)).left == 2
    else:
        scene.now = NOW + 1_000
        assert await scene.outcomes("kim") == ["over"]  # before the sweep
        await scene.sweep_both()
    [closed] = await scene.events("offer.closed")
    assert (closed.reason, closed.amount, closed.left, closed.refund_to) == (closed_by, 2, 2, "issuer:shop")
    scene.now = NOW + MINUTE - 1
    assert (await pay(scene, paid, "p2", 500)).outcome == "confirmed"
    assert (await scene.do(Release, grab=released)).outcome == "released"
    scene.now = NOW + MINUTE
    await scene.sweep_both()
    assert (await pay(scene, expires, "p3", 500)).outcome == "expired"
    assert (await scene.do(Return, grab=taken)).outcome == "returned"
    ends = [*await scene.events("grab.released"), *await scene.events("grab.returned")]
    assert [(event.to, event.quantity, event.left) for event in ends] == [("issuer:shop", 2, 0)] * 3
    assert await scene.outcomes("kim") == ["over"]
    assert (await scene.amend(total=20)).outcome == "over"


@pytest.mark.requirement("E5")
async def test_the_total_is_never_below_what_is_taken_or_held(scene: Scene) -> None:
    await scene.open(stock(10, **PRICED))
    taken, held = (await scene.grab("ann", 2)).grab, (await scene.grab("bob", 3)).grab
    await pay(scene, taken, paid=500)
    for total, outcome, left in (
        (1, "not_enough_left", 5), (4, "not_enough_left", 5), (5, "amended", 0), (4, "not_enough_left", 0),
        (7, "amended", 2),
    ):  # fmt: skip
        answer = await scene.amend(total=total)
        assert (answer.outcome, answer.left) == (outcome, left), total
    await scene.do(Release, grab=held)
    assert await left_of(scene) == 5
    assert [(await scene.amend(total=total)).outcome for total in (1, 2)] == ["not_enough_left", "amended"]
    assert await scene.outcomes("eve") == ["sold_out"]
    await scene.do(Return, grab=taken)
    assert (await scene.amend(total=1)).left == 1


@pytest.mark.requirement("E5")
async def test_a_raised_total_sells_another_wave(scene: Scene) -> None:
    """Each wave raises the total: the sold-out offer has units again, and is never oversold."""
    await scene.open(stock(3))
    for wave in range(1, 5):
        assert await scene.outcomes(*[f"u{wave}-{n}" for n in range(5)]) == ["granted"] * 3 + ["sold_out"] * 2
        assert (await scene.amend(total=3 * (wave + 1))).left == 3
    places = [event.place for event in await scene.events("grab.granted")]
    assert places == list(range(1, 13))
    amended = await scene.events("offer.amended")
    assert {(event.added, event.removed, event.source) for event in amended} == {(3, 0, "issuer:shop")}


@pytest.mark.requirement("E5")
async def test_an_offer_is_amended_before_it_opens_and_closes_at_its_times(scene: Scene) -> None:
    """Opened on Monday, price and total amended until Friday, sold on Friday from 10:00 to 12:00."""
    scene.now = at("2027-01-18T09:00+08:00")
    opens_at, closes_at = at("2027-01-22T10:00+08:00"), at("2027-01-22T12:00+08:00")
    await scene.open(stock(2, **PRICED, opens_at=opens_at, closes_at=closes_at, timezone="Asia/Shanghai"))
    early = await scene.grab("ann")
    assert (early.outcome, early.retry_at) == ("not_open_yet", opens_at)
    [in_basket] = await scene.decide_both([Grab(id="b.1", offer=scene.offer, user="bob", basket="b")])
    assert (in_basket.outcome, in_basket.retry_at) == ("not_open_yet", opens_at)
    scene.now = opens_at - HOUR
    assert (await scene.amend(price=199, total=1)).outcome == "amended"
    assert (await scene.amend(opens_at=opens_at + HOUR)).outcome == "amended"
    assert (await scene.amend(closes_at=opens_at)).outcome == "invalid"
    assert (await scene.amend(opens_at=opens_at)).outcome == "amended"
    scene.now = opens_at - 1
    assert await scene.outcomes("ann") == ["not_open_yet"]
    scene.now = opens_at
    assert (await scene.amend(opens_at=opens_at + HOUR)).outcome == "invalid"
    assert (await scene.grab("ann")).due == 199
    assert await scene.outcomes("bob") == ["sold_out"]
    scene.now = closes_at - 1
    await scene.sweep_both()
    assert await scene.outcomes("bob") == ["held"]
    scene.now = closes_at
    assert await scene.outcomes("eve") == ["over"]


@pytest.mark.requirement("E5")
@pytest.mark.parametrize(
    ("moment", "retry_at"),
    [
        ("2027-03-27T12:00:00.000+01:00", "2027-03-28T10:00+02:00"),  # the night has one hour less
        ("2027-03-28T09:59:59.999+02:00", "2027-03-28T10:00+02:00"),
        ("2027-03-28T10:00:00.000+02:00", None),
        ("2027-03-28T11:59:59.999+02:00", None),
        ("2027-03-28T12:00:00.000+02:00", "2027-03-30T23:00+02:00"),
        ("2027-03-30T22:59:59.999+02:00", "2027-03-30T23:00+02:00"),
        ("2027-03-30T23:59:59.999+02:00", None),
        ("2027-03-31T00:00:00.000+02:00", "2027-04-04T10:00+02:00"),
        ("2027-10-30T12:00:00.000+02:00", "2027-10-31T10:00+01:00"),  # the night has one hour more
        ("2027-10-31T09:59:59.999+01:00", "2027-10-31T10:00+01:00"),
        ("2027-10-31T10:00:00.000+01:00", None),
        ("2027-10-31T12:00:00.000+01:00", "2027-11-02T23:00+01:00"),
    ],
)  # fmt: skip
async def test_an_offer_is_open_in_its_weekly_hours(scene: Scene, moment: str, retry_at: str | None) -> None:
    """Sundays from 10:00 to 12:00 and Tuesdays from 23:00 to 24:00 in Berlin, also when its clocks change."""
    scene.now = at(moment) - WEEK
    hours = Hours(("sun",), "10:00", "12:00"), Hours(("tue",), "23:00", "24:00")
    await scene.open(stock(10, hours=hours, timezone=BERLIN))
    scene.now = at(moment)
    answer = await scene.grab("ann")
    assert (answer.outcome, answer.retry_at) == (
        ("granted", None) if retry_at is None else ("not_open_yet", at(retry_at))
    )
    if retry_at is not None:
        scene.now = at(retry_at) - 1
        assert await scene.outcomes("ann") == ["not_open_yet"]
        scene.now += 1
        assert await scene.outcomes("ann") == ["granted"]


async def test_retry_at_is_a_time_at_which_the_offer_is_open(scene: Scene) -> None:
    """On the last Sunday of March Berlin has no time from 2:00 to 3:00: the offer opens a week later."""
    scene.now = at("2027-03-28T01:30+01:00")
    await scene.open(stock(10, hours=(Hours(("sun",), "02:00", "03:00"),), timezone=BERLIN))
    answer = await scene.grab("ann")
    assert answer.outcome == "not_open_yet"
    assert answer.retry_at is not None
    scene.now = answer.retry_at
    assert await scene.outcomes("ann") == ["granted"]


# -- campaigns -----------------------------------------------------------------------------------------------


@pytest.mark.requirement("E1")
async def test_a_campaign_limit_allows_one_of_five_offers(scene: Scene) -> None:
    """A limit of the campaign counts over all its offers; a released unit may be grabbed in another offer."""
    limit = by_user("offer", 1, scope="campaign")
    five = [f"week:{number}" for number in range(5)]
    for offer in five:
        await scene.open(stock(10, limit, hold_ms=HOUR), offer)
    await scene.open(stock(10, limit), "else:0")
    held = await scene.grab("ann", offer=five[2])
    answers = [await scene.grab("ann", offer=offer) for offer in five]
    assert {(answer.outcome, answer.limit and answer.limit.scope) for answer in answers} == {
        ("limit_reached", "campaign")
    }
    assert (await scene.grab("ann", offer="else:0")).outcome == "granted"
    assert [(await scene.grab("bob", offer=offer)).outcome for offer in five[:2]] == ["held", "limit_reached"]
    await scene.do(Release, offer=five[2], grab=held.grab)
    assert [(await scene.grab("ann", offer=offer)).outcome for offer in five[3:]] == ["held", "limit_reached"]
    await scene.do(Close, offer=five[3])
    assert (await scene.grab("ann", offer=five[4])).outcome == "limit_reached"


async def test_limits_of_offer_and_campaign_count_separately(scene: Scene) -> None:
    limits = by_user("day", 2), by_user("day", 3, scope="campaign")
    for offer in ("w:1", "w:2"):
        await scene.open(stock(10, *limits), offer)
    table = [("w:1", 1, 2), ("w:1", 0, 1), ("w:1", None, None), ("w:2", 1, 0), ("w:2", None, None)]
    for offer, of_offer, of_campaign in table:
        answer = await scene.grab("ann", offer=offer)
        if of_offer is None:
            assert answer.limit is not None
            assert (answer.outcome, answer.limit.scope) == (
                "limit_reached",
                "offer" if offer == "w:1" else "campaign",
            )
        else:
            assert [limit.left for limit in answer.limits] == [of_offer, of_campaign]
    scene.now += DAY
    assert [limit.left for limit in (await scene.grab("ann", offer="w:2")).limits] == [1, 2]


def basket(name: str, *wanted: tuple[str, int], user: str = "ann") -> list[Grab]:
    return [
        Grab(id=f"{name}-{n}", offer=offer, user=user, quantity=quantity, basket=name)
        for n, (offer, quantity) in enumerate(wanted)
    ]


@pytest.mark.requirement("E1")
async def test_a_basket_is_granted_or_refused_whole(scene: Scene) -> None:
    four = by_user("offer", 4, scope="campaign")
    for offer, total in (("w:1", 3), ("w:2", 1), ("w:3", 9)):
        await scene.open(stock(total, four, hold_ms=HOUR, max_per_grab=3), offer)

    async def left_of_each() -> list[int | None]:
        return [(await scene.do(Pause, offer=offer)).left for offer in ("w:1", "w:2", "w:3")]

    async def resume() -> None:
        for offer in ("w:1", "w:2", "w:3"):
            await scene.do(Resume, offer=offer)

    refused = [
        (basket("b0", ("w:1", 2), ("w:2", 2)), "invalid"),  # more than the total of w:2
        (basket("b1", ("w:1", 2), ("w:1", 2)), "not_enough_left"),
        # Each grab alone is within the limit of four, both together are not.
        (basket("b2", ("w:1", 2), ("w:3", 3)), "limit_reached"),
        (basket("b3", ("w:3", 1), ("w:9", 1)), "no_such_offer"),
        (basket("b4", ("w:3", 1), ("w:1", 4)), "invalid"),
    ]
    for grabs, outcome in refused:
        assert [answer.outcome for answer in await scene.decide_both(grabs)] == [outcome] * 2
    assert await left_of_each() == [3, 1, 9]
    await resume()
    assert await scene.events("grab.held") == []
    good = basket("b5", ("w:1", 2), ("w:2", 1), ("w:3", 1))
    assert [answer.outcome for answer in await scene.decide_both(good)] == ["held"] * 3
    assert [(answer.outcome, answer.repeated) for answer in await scene.decide_both(good)] == [
        ("held", True)
    ] * 3
    sold_out = basket("b6", ("w:1", 1), ("w:2", 1), user="bob")
    assert [answer.outcome for answer in await scene.decide_both(sold_out)] == ["sold_out"] * 2
    assert await left_of_each() == [1, 0, 8]
    await resume()
    # After the grant each grab is independent.
    await scene.do(Release, offer="w:2", grab="b5-1")
    again = basket("b7", ("w:1", 1), ("w:2", 1), user="bob")
    assert [answer.outcome for answer in await scene.decide_both(again)] == ["held"] * 2


@pytest.mark.requirement("E1")
@pytest.mark.parametrize("forgotten", [0, 1])
async def test_a_refused_basket_is_decided_again_if_a_part_of_its_answers_is_forgotten(
    scene: Scene, forgotten: int
) -> None:
    """The oldest of the 100,000 stored refusals may be those of a part of a basket."""
    for offer, total in (("w:1", 1), ("w:2", 9)):
        await scene.open(stock(total), offer)
    await scene.do(Grab, offer="w:1", user="bob")
    refused = basket("b", ("w:1", 1), ("w:2", 1))
    assert [answer.outcome for answer in await scene.decide_both(refused)] == ["sold_out"] * 2
    scene.offer = "w:1"
    await scene.amend(total=2)
    assert [(answer.outcome, answer.repeated) for answer in await scene.decide_both(refused)] == [
        ("sold_out", True)
    ] * 2
    number = scene.keys.shard_of_offer("w:1")
    del scene.states[number].refusals[identity_of(refused[forgotten])]
    fields = await scene.client.hkeys(scene.keys.shard(number).refusals)
    dropped = [field for field in fields if field.decode().endswith(f"b-{forgotten}")]
    assert await scene.client.hdel(scene.keys.shard(number).refusals, *dropped) == 1
    assert [(answer.outcome, answer.repeated) for answer in await scene.decide_both(refused)] == [
        ("granted", False)
    ] * 2


@pytest.mark.requirement("E1")
async def test_a_basket_that_is_refused_again_stands_once_in_the_order_of_refusals(scene: Scene) -> None:
    """Else the refusals that are stored again are deleted when their first places in the order are."""
    for offer, total in (("w:1", 1), ("w:2", 9)):
        await scene.open(stock(total), offer)
    await scene.do(Grab, offer="w:1", user="bob")
    refused = basket("b", ("w:1", 1), ("w:2", 1))
    await scene.decide_both(refused)
    number = scene.keys.shard_of_offer("w:1")
    keys = scene.keys.shard(number)
    oldest = await scene.client.lpop(keys.refusal_order)
    assert await scene.client.hdel(keys.refusals, oldest) == 1
    del scene.states[number].refusals[tuple(oldest.decode().split("/"))]
    answers = await scene.decide_both(refused)
    assert [(answer.outcome, answer.repeated) for answer in answers] == [("sold_out", False)] * 2
    order = await scene.client.lrange(keys.refusal_order, 0, -1)
    assert sorted(order) == sorted(await scene.client.hkeys(keys.refusals))


# -- waiting list --------------------------------------------------------------------------------------------


@pytest.mark.requirement("E3")
async def test_the_waiting_list_is_served_in_order(scene: Scene) -> None:
    """Units of a release, an expiry, a return and a raised total go to the waiting grabs in order. A released
    waiting grab is skipped, and new grabs are refused.
    """
    await scene.open(stock(3, **PRICED, waiting_list=True))
    released, expires, returned = [(await scene.grab(user)).grab for user in ("a", "b", "c")]
    await pay(scene, returned)
    waiting = [await scene.grab(f"w{number}", wait=True) for number in range(1, 7)]
    assert [(answer.outcome, answer.place, answer.amount) for answer in waiting] == [
        ("waiting", n, 0) for n in range(1, 7)
    ]
    assert await scene.outcomes("x") == ["sold_out"]
    assert (await scene.do(Release, grab=waiting[1].grab)).outcome == "released"

    async def served() -> list[str]:
        return [event.user for event in await scene.events("grab.held", waited=True)]

    await scene.do(Release, grab=released)
    assert await served() == ["w1"]
    await scene.do(Return, grab=returned)
    assert await served() == ["w1", "w3"]
    scene.now += MINUTE - 1
    await scene.amend(total=4)
    assert await served() == ["w1", "w3", "w4"]
    scene.now += 1
    await scene.sweep_both()  # the holds of b, w1 and w3 expire
    assert await served() == ["w1", "w3", "w4", "w5", "w6"]
    events = await scene.events("grab.held", waited=True)
    assert [event.place for event in events] == [4, 5, 6, 7, 8]
    assert [event.deadline_at - event.at for event in events] == [MINUTE] * 5
    assert {(event.due, event.currency) for event in events} == {(250, "CNY")}
    assert (await pay(scene, expires)).outcome == "expired"
    assert (await pay(scene, waiting[4].grab)).outcome == "confirmed"
    assert await scene.outcomes("x") == ["held"]


async def served(scene: Scene) -> list[tuple[str, int]]:
    """The users served from the queue with their units, in order."""
    return [(event.user, event.quantity) for event in await scene.events("grab.held", waited=True)]


@pytest.mark.parametrize("take", ["all", "up_to"])
async def test_units_go_to_the_first_waiting_grab_they_suffice_for(scene: Scene, take: Any) -> None:
    """The first grab waits for two units, the second for one. A single unit goes to the second with `all`, to
    the first with `up_to`.
    """
    await scene.open(stock(3, by_user("offer", 3), **PRICED, waiting_list=True, take=take))
    holds = [(await scene.grab("ann")).grab for _ in range(3)]
    first, second = await scene.grab("bob", 2, wait=True), await scene.grab("eve", wait=True)
    assert (first.place, second.place) == (1, 2)
    await scene.do(Release, grab=holds[0])
    assert await served(scene) == [("eve", 1) if take == "all" else ("bob", 1)]
    assert await scene.outcomes("joe") == ["sold_out"]
    await scene.do(Release, grab=holds[1])
    assert await served(scene) == ([("eve", 1)] if take == "all" else [("bob", 1), ("eve", 1)])
    # Units that suffice for no waiting grab go to new grabs.
    assert await scene.outcomes("joe") == ["held" if take == "all" else "sold_out"]
    # Units that were asked for and not granted are not counted.
    await scene.amend(total=20)
    assert left_by_limit(await scene.grab("bob")) == {"user/offer": 0 if take == "all" else 1}


async def test_a_grab_that_waits_for_many_units_blocks_no_other_grab(scene: Scene) -> None:
    await scene.open(stock(101, **(PRICED | {"max_per_grab": 101}), waiting_list=True))
    taken = await scene.grab("ann")
    assert (await scene.grab("big", 101, wait=True)).outcome == "waiting"
    assert [(await scene.grab(f"u{n}", n)).outcome for n in (50, 49, 1)] == ["held"] * 3
    refused = await scene.grab("late", 2)
    assert (refused.outcome, refused.left) == ("sold_out", None)
    await scene.do(Release, grab=taken.grab)
    refused = await scene.grab("late", 2)
    assert (refused.outcome, refused.left) == ("not_enough_left", 1)
    # When all units are released, they go to the grab that waits for them.
    for event in await scene.events("grab.held", waited=False):
        if event.user != "ann":
            await scene.do(Release, grab=event.grab)
    assert await served(scene) == [("big", 101)]


async def test_the_first_hundred_in_the_queue_are_considered(scene: Scene) -> None:
    """New grabs overtake the 101st waiting grab until a grab before it is released."""
    await scene.open(stock(3, **PRICED, waiting_list=True))
    holds = [(await scene.grab("ann")).grab for _ in range(3)]
    waiting = [await scene.grab(f"w{number}", 2, wait=True) for number in range(100)]
    await scene.grab("last", wait=True)
    await scene.do(Release, grab=holds[0])
    assert await served(scene) == []
    new = await scene.grab("new")
    assert new.outcome == "held"
    await scene.do(Release, grab=new.grab)
    assert await served(scene) == []
    await scene.do(Release, grab=waiting[50].grab)
    assert await served(scene) == [("last", 1)]
    await scene.do(Release, grab=holds[1])
    await scene.do(Release, grab=holds[2])
    assert await served(scene) == [("last", 1), ("w0", 2)]


async def test_new_grabs_do_not_get_units_that_the_queue_gets_in_later_calls(scene: Scene) -> None:
    """A call serves twenty-five waiting grabs; until the sweeper continues, the other units are reserved for
    the queue.
    """
    await scene.open(stock(1, **(PRICED | {"max_per_grab": 300}), waiting_list=True))
    assert (await scene.grab("ann")).outcome == "held"
    await scene.decide_both([Grab(id=f"w{n}", offer="o", user=f"w{n}", wait=True) for n in range(250)])
    await scene.amend(total=300)
    events = await scene.events("grab.held", waited=True)
    assert (len(events), events[-1].left) == (25, 274)
    assert (await scene.grab("new")).outcome == "sold_out"
    assert (await scene.grab("new", wait=True)).outcome == "waiting"
    await scene.sweep_both()
    assert [user for user, _ in await served(scene)] == [*(f"w{n}" for n in range(250)), "new"]
    assert (await scene.grab("new", 48)).outcome == "held"


async def test_a_quantity_above_the_total_is_invalid(scene: Scene) -> None:
    """A grab that waits for more than an amended total keeps its place, and is skipped."""
    terms = PRICED | {"max_per_grab": 99}
    await scene.open(stock(4, **terms, waiting_list=True))
    answer = await scene.grab("ann", 5, wait=True)
    assert (answer.outcome, answer.message) == ("invalid", "quantity: above the total of the offer, 4")
    held = await scene.grab("ann", 4)
    [waits] = await scene.decide_both([Grab(id="w", offer="o", user="bob", quantity=4, wait=True)])
    await scene.do(Release, grab=(await scene.grab("joe", 4, wait=True)).grab)
    assert waits.outcome == "waiting"
    assert (await scene.amend(total=3)).outcome == "not_enough_left"
    await scene.amend(total=5)
    assert (await scene.grab("eve", 5, wait=True)).outcome == "waiting"
    assert (await scene.amend(total=4)).outcome == "amended"
    assert [
        answer.outcome
        for answer in await scene.decide_both([Grab(id="w", offer="o", user="bob", quantity=4, wait=True)])
    ] == ["waiting"]
    await scene.do(Release, grab=held.grab)
    assert await served(scene) == [("bob", 4)]
    assert (await scene.amend(total=9)).outcome == "amended"
    assert await served(scene) == [("bob", 4), ("eve", 5)]
    await scene.open(stock(4, **terms, take="up_to"), "up_to")
    assert (await scene.grab("ann", 5)).quantity == 4


async def test_the_due_sum_of_a_waiting_grab_stays_within_the_greatest_amount(scene: Scene) -> None:
    """After an amended price, the due sum of a waiting grab may exceed the greatest amount: it is skipped, or
    with `up_to` gets the units that the greatest amount pays for.
    """
    for take, expected in (("all", [("eve", 1)]), ("up_to", [("bob", 10), ("eve", 1)])):
        terms = PRICED | {"max_per_grab": 15, "price": 1}
        await scene.open(stock(15, **terms, waiting_list=True, take=take), f"take:{take}")
        before = len(await served(scene))
        held = await scene.grab("ann", 15)
        await scene.grab("bob", 15, wait=True)
        assert (await scene.grab("eve", wait=True)).outcome == "waiting"
        assert (await scene.amend(price=10**12)).outcome == "invalid"
        assert (await scene.amend(max_per_grab=10)).outcome == "amended"
        assert (await scene.amend(price=10**12)).outcome == "amended"
        await scene.do(Release, grab=held.grab)
        assert (await served(scene))[before:] == expected
        assert {event.due for event in (await scene.events("grab.held", waited=True))[before:]} == {
            n * 10**12 for _, n in expected
        }
        assert (await scene.amend(price=1)).outcome == "amended"
        assert (await served(scene))[before:] == [*expected, *([("bob", 14)] if take == "all" else [])][
            : 1 if take == "all" else 2
        ]


@pytest.mark.parametrize("swept", [False, True])
async def test_a_close_releases_waiting_grabs(scene: Scene, swept: bool) -> None:
    """No waiting grab is served after the close, and its units no longer count against campaign limits."""
    limit = by_user("offer", 1, scope="campaign")
    for offer in ("w:2", "w:1"):
        await scene.open(stock(1, limit, **PRICED, waiting_list=True), offer)
    held = await scene.grab("ann")
    waits = await scene.grab("bob", wait=True)
    assert (await scene.grab("bob", offer="w:2")).outcome == "limit_reached"
    await scene.do(Close)
    await scene.do(Release, grab=held.grab)
    if swept:
        await scene.sweep_both()
    assert (await scene.do(Release, grab=waits.grab)).outcome == "released"
    assert [event.user for event in await scene.events("grab.released", reason="left_queue")] == ["bob"]
    assert await scene.events("grab.held", waited=True) == []
    assert (await scene.grab("eve", wait=True)).outcome == "over"
    assert (await scene.grab("bob", offer="w:2")).outcome == "held"


async def test_waiting_grabs_count_against_limits_until_released(scene: Scene) -> None:
    await scene.open(stock(1, by_user("offer", 2), **PRICED, waiting_list=True))
    await scene.grab("ann")
    waits = await scene.grab("bob", wait=True), await scene.grab("bob", wait=True)
    assert (await scene.grab("bob", wait=True)).outcome == "limit_reached"
    await scene.do(Release, grab=waits[0].grab)
    again = await scene.grab("bob", wait=True)
    assert (again.outcome, again.place, left_by_limit(again)) == ("waiting", 3, {"user/offer": 0})


# -- retirement ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("E8")
async def test_an_offer_retires_after_its_close_and_its_last_hold(scene: Scene) -> None:
    """An offer retires some time after its close and its last hold; its id can never be used again."""
    limit = by_user("offer", 5, scope="campaign")
    terms = stock(
        9, limit, by_user("day", 5), **(PRICED | {"hold_ms": 3 * DAY}), waiting_list=True, retire_after_ms=DAY
    )
    for offer in ("w:1", "w:2"):
        await scene.open(terms, offer)
    first = await scene.grab("ann", 3, offer="w:1")
    second = await scene.grab("bob", 2, offer="w:2")
    await scene.do(Confirm, offer="w:1", grab=first.grab, payment="p1", paid=750, currency="CNY")
    await scene.do(Close, offer="w:1")
    await scene.do(Close, offer="w:2")

    async def names_with(text: str) -> list[str]:
        return [name for name in await scene.names() if text in name]

    scene.now = NOW + DAY - 1
    await scene.sweep_both()
    assert await names_with(":offer:w:1") != []
    scene.now = NOW + DAY
    await scene.sweep_both()
    assert await names_with(":offer:w:1") == []
    assert [event.offer for event in await scene.events("offer.retired")] == ["w:1"]
    # The other offer has a hold, so it stays, and the hold can be paid.
    paid = {"offer": "w:2", "grab": second.grab, "payment": "p2", "paid": 500, "currency": "CNY"}
    scene.now = NOW + 2 * DAY
    await scene.sweep_both()
    assert (await scene.do(Confirm, **paid)).outcome == "confirmed"
    scene.now += MINUTE
    await scene.sweep_both()
    assert [event.offer for event in await scene.events("offer.retired")] == ["w:1", "w:2"]
    assert await names_with(":offer:") == []
    # Payments are known for some time after retirement.
    assert sorted(name.rsplit("/")[-1] for name in await names_with(":campaign:")) == ["payments", "state"]
    for offer in ("w:1", "w:2"):
        assert (await scene.do(Open, offer=offer, terms=terms)).outcome == "conflict"
        assert (await scene.grab("ann", offer=offer)).outcome == "no_such_offer"
        assert (await scene.do(Redeem, offer=offer, grab=second.grab, order="x")).outcome == "no_such_offer"
    await scene.open(terms, "w:3")
    assert [limit.left for limit in (await scene.grab("ann", 3, offer="w:3")).limits] == [2, 2]


async def test_an_envelope_and_a_coupon_retire_too(scene: Scene) -> None:
    await scene.open(coupon(3, Limit("card", "week", 2), opens_at=NOW + 1, retire_after_ms=0), "c")
    await scene.do(Load, what="codes", chunk=1, chunks=1, items=("k1", "k2", "k3"))
    scene.now += 1
    grab = (await scene.grab("ann", attributes={"card": "x"})).grab
    await scene.do(Redeem, grab=grab, order="o")
    await scene.do(Close)
    await scene.sweep_both()
    assert [
        name
        for name in await scene.names()
        if ":offer:" in name or (":campaign:" in name and not name.endswith("/state"))
    ] == []


async def test_a_grab_above_max_per_grab_is_told_the_bound(scene: Scene) -> None:
    await scene.open(stock(9, max_per_grab=2))
    [answer] = await scene.decide_both([Grab(id="g", offer=scene.offer, user="ann", quantity=3)])
    assert (answer.outcome, answer.message) == ("invalid", "quantity: above max_per_grab, which is 2")
