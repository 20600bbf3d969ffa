"""The cost of a call includes the bytes it handles: of arguments, event lines, answers, records and lists.

The Lua of Redis hashes every string it makes. So a long text costs in proportion to its length each time it
is made, read or joined. These tests send legal lists of few commands with many bytes. For each call the
shortest repetition counts, in ms of the Redis thread, since other processes use this machine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha1
from typing import Any

import msgspec
import pytest

from grabstream.gate import calls
from grabstream.gate.sizes import CALL_BYTES_MAX, total_size
from grabstream.lua.loader import Script, assemble, script_names
from grabstream.models.bounds import CODES_PER_GRAB_MAX
from grabstream.models.commands import Adjust, AnyCommand, Close, Confirm, Grab, Load, Open, Release, Return
from grabstream.models.journal import Cursor
from grabstream.models.offers import CouponTerms, Limit, StockTerms, Terms
from grabstream.streams.relaying.ownership import OwnedShard
from tests.lua.costs.longest_texts import ATTRIBUTES, ENTRIES, METADATA, codes, loads
from tests.lua.costs.measured_shard import CALL_COST_MAX, COMMAND_COST_MAX, Call, MeasuredShard, changed
from tests.lua.histories.recovered import fold
from tests.lua.histories.scene import Scene
from tests.support.plain_scripts import use_plain_scripts
from tests.support.shards import SEALER, event_lines


def coupons(total: int, **more: Any) -> Terms:
    return CouponTerms(issuer="i", total=total, codes=True, max_per_grab=100, **more)


def adjusts(count: int, offer: str) -> list[AnyCommand]:
    return [
        Adjust(id=f"a{n}", offer=offer, transfers=ENTRIES, reason="r" * 200, approved_by="b" * 64)
        for n in range(count)
    ]


async def decided(system: MeasuredShard, commands: Sequence[AnyCommand], *outcomes: str) -> None:
    answers = await system.decide(commands)
    assert {answer.outcome for answer in answers} <= set(outcomes), {
        (answer.outcome, answer.message) for answer in answers
    }


async def with_coupons(system: MeasuredShard, count: int, **more: Any) -> None:
    await decided(system, [Open(id="open", offer="o", terms=coupons(count, **more))], "opened")
    await decided(system, loads("o", "codes", codes(count)), "loaded")


async def shortest_of(
    system: MeasuredShard,
    prepare: Callable[[], Awaitable[object]],
    act: Callable[[], Awaitable[object]],
    repetitions: int = 3,
) -> list[Call]:
    """Each call that `act` makes after `prepare`: its shortest time and greatest cost of the repetitions."""
    for name in script_names():
        await system.redis.script_load(changed(name, counted=True).text)
    repeated: list[list[Call]] = []
    for _ in range(repetitions):
        await system.redis.flushall()
        await system.gate.close()
        await system.begin()
        await prepare()
        with system.measuring(counted=True) as calls:
            await act()
        repeated.append(list(calls))
    return [
        Call(
            same_call[0].script, min(call.cpu_ms for call in same_call), max(call.cost for call in same_call)
        )
        for same_call in zip(*repeated, strict=True)
    ]


def check_bounded(calls: Sequence[Call]) -> None:
    assert any(call.cost for call in calls), "the cost is not counted"
    for call in calls:
        assert call.cost < CALL_COST_MAX + COMMAND_COST_MAX, call
    assert max(call.cpu_ms for call in calls) < 10, sorted(calls, key=lambda call: -call.cpu_ms)[:5]


# -- lists of many bytes -------------------------------------------------------------------------------------


@pytest.mark.long
async def test_calls_for_grabs_of_the_longest_codes_and_their_repeats_are_bounded(
    system: MeasuredShard,
) -> None:
    grabs = [Grab(id=f"g{n}", offer="o", user=f"u{n}", quantity=100) for n in range(12)]

    async def act() -> None:
        await decided(system, grabs, "granted")
        await decided(system, grabs, "granted")

    check_bounded(await shortest_of(system, lambda: with_coupons(system, 1_200), act))


@pytest.mark.long
async def test_calls_for_known_ids_of_a_sold_out_offer_with_the_longest_codes_are_bounded(
    system: MeasuredShard,
) -> None:
    """Plain grabs under the ids of grabs whose answers have codes: the answers are read one by one."""
    ids = [f"g{n}" for n in range(40)]

    async def prepare() -> None:
        await with_coupons(system, 4_000)
        await decided(system, [Grab(id=id, offer="o", user=id, quantity=100) for id in ids], "granted")

    async def act() -> None:
        await decided(system, [Grab(id=id, offer="o", user=f"x{id}") for id in ids], "conflict")

    check_bounded(await shortest_of(system, prepare, act))


@pytest.mark.long
async def test_calls_for_known_ids_are_bounded_whether_or_not_terms_say_that_there_are_codes(
    system: MeasuredShard,
) -> None:
    """`codes: false` takes codes, too, if they are loaded before the offer opens."""
    ids = [f"g{n}" for n in range(100)]

    async def prepare() -> None:
        began = system.now
        terms = CouponTerms(issuer="i", total=10_000, max_per_grab=100, opens_at=began + 1_000)
        await decided(system, [Open(id="open", offer="o", terms=terms)], "opened")
        await decided(system, loads("o", "codes", codes(10_000)), "loaded")
        system.now = began + 1_000
        await decided(system, [Grab(id=id, offer="o", user=id, quantity=100) for id in ids], "granted")
        await decided(system, [Close(id="close", offer="o")], "closed")

    async def act() -> None:
        await decided(system, [Grab(id=id, offer="o", user=f"x{id}") for id in ids], "conflict")

    check_bounded(await shortest_of(system, prepare, act))


@pytest.mark.long
async def test_calls_for_returns_of_the_longest_codes_and_their_repeats_are_bounded(
    system: MeasuredShard,
) -> None:
    ids = [f"g{n}" for n in range(12)]
    returns = [Return(id=f"r{id}", offer="o", grab=id) for id in ids]

    async def prepare() -> None:
        await with_coupons(system, 1_200)
        await decided(system, [Grab(id=id, offer="o", user=id, quantity=100) for id in ids], "granted")

    async def act() -> None:
        await decided(system, returns, "returned")
        await decided(system, returns, "returned")

    check_bounded(await shortest_of(system, prepare, act))


@pytest.mark.long
async def test_calls_for_adjusts_with_the_longest_names_are_bounded(system: MeasuredShard) -> None:
    offer = "q" * 57 + ":" + "r" * 6

    async def prepare() -> None:
        await decided(
            system, [Open(id="open", offer=offer, terms=StockTerms(issuer="i", total=10**6))], "opened"
        )

    calls = await shortest_of(system, prepare, lambda: decided(system, adjusts(512, offer), "adjusted"))
    check_bounded(calls)
    assert len(calls) > 10


async def test_calls_for_grabs_with_the_longest_attributes_are_bounded(system: MeasuredShard) -> None:
    async def prepare() -> None:
        await decided(
            system, [Open(id="open", offer="o", terms=StockTerms(issuer="i", total=10**6))], "opened"
        )

    grabs = [
        Grab(id=f"g{n}", offer="o", user=f"u{n}", attributes=ATTRIBUTES, metadata=METADATA)
        for n in range(512)
    ]
    check_bounded(await shortest_of(system, prepare, lambda: decided(system, grabs, "granted")))


async def test_calls_that_serve_queued_grabs_with_the_longest_metadata_are_bounded(
    system: MeasuredShard,
) -> None:
    async def prepare() -> None:
        terms = StockTerms(issuer="i", total=25, hold_ms=10**6, waiting_list=True, max_per_grab=25)
        await decided(system, [Open(id="open", offer="o", terms=terms)], "opened")
        await decided(system, [Grab(id="g", offer="o", user="u", quantity=25)], "held")
        queued = [Grab(id=f"w{n}", offer="o", user=f"w{n}", wait=True, metadata=METADATA) for n in range(200)]
        await decided(system, queued, "waiting")

    releases = [Release(id="r", offer="o", grab="g")]
    check_bounded(await shortest_of(system, prepare, lambda: decided(system, releases, "released")))


@pytest.mark.long
async def test_an_outbox_of_long_lines_is_read_and_applied_in_bounded_calls(system: MeasuredShard) -> None:
    async def prepare() -> None:
        await with_coupons(system, 1_000)
        await decided(
            system, [Grab(id=f"g{n}", offer="o", user=f"u{n}", quantity=100) for n in range(10)], "granted"
        )
        await decided(system, adjusts(256, "o"), "adjusted")

    async def act() -> None:
        shard = OwnedShard(system.redis, system.keys)
        ownership = (await shard.raise_term(0)).ownership
        seq = 0
        while lines := (await shard.read_outbox(ownership, seq)).lines:
            assert sum(len(text) for text, _ in lines) < 3 * 131_072
            seq += sum(seqs for _, seqs in lines)
        await fold(
            system.redis,
            type(system.space)("fold", 1).shard(0),
            await event_lines(system.redis, system.space, 0),
            SEALER,
            1,
        )
        seq = 0
        while True:
            cursor = Cursor(seq, bytes(32), 1, ownership.term, ownership.owner)
            if not (lines := (await shard.trim_and_read(ownership, cursor)).lines):
                break
            seq += sum(seqs for _, seqs in lines)

    calls = await shortest_of(system, prepare, act)
    assert {"read_outbox", "trim", "apply"} <= {call.script for call in calls}
    check_bounded(calls)


@pytest.mark.long
async def test_long_answers_of_retired_offers_are_deleted_in_bounded_calls(system: MeasuredShard) -> None:
    async def prepare() -> None:
        await system.decide([Open(id="stays", offer="c:stays", terms=StockTerms(issuer="i", total=1))])
        await decided(
            system, [Open(id="open", offer="c:o", terms=coupons(1_200, retire_after_ms=1))], "opened"
        )
        await decided(system, loads("c:o", "codes", codes(1_200)), "loaded")
        await decided(
            system, [Grab(id=f"g{n}", offer="c:o", user=f"u{n}", quantity=100) for n in range(12)], "granted"
        )
        await system.decide([Close(id="close", offer="c:o")])
        system.now += 10
        await system.sweeper.sweep(system.now)

    async def act() -> None:
        await system.sweeper.clean(system.now)
        assert await system.redis.hkeys(system.keys.answers("c")) == [b"stays"]

    check_bounded(await shortest_of(system, prepare, act))


@pytest.mark.long
async def test_calls_for_plain_grabs_whose_ids_have_long_answers_are_bounded(system: MeasuredShard) -> None:
    """The ids have stored answers with codes. The script asks whether they exist, without reading them, and
    refuses the others together, since nothing is left.
    """
    with_codes = [Grab(id=f"g{n}", offer="c:o", user=f"u{n}", quantity=100) for n in range(12)]
    again = [Grab(id=grab.id, offer="c:o", user=f"v{n}") for n, grab in enumerate(with_codes)]
    new = [Grab(id=f"n{n}", offer="c:o", user=f"w{n}") for n in range(100)]

    async def prepare() -> None:
        await decided(system, [Open(id="open", offer="c:o", terms=coupons(1_200))], "opened")
        await decided(system, loads("c:o", "codes", codes(1_200)), "loaded")
        await decided(system, with_codes, "granted")

    async def act() -> None:
        answers = await system.decide([*new, *again])
        assert [answer.outcome for answer in answers] == 100 * ["sold_out"] + 12 * ["conflict"]

    check_bounded(await shortest_of(system, prepare, act))


# -- baskets -------------------------------------------------------------------------------------------------


def basket(quantities: Sequence[int], name: str = "b") -> list[Grab]:
    return [
        Grab(id=f"{name}{n}", offer="o", user=f"u{n}", quantity=quantity, basket=name, attributes=ATTRIBUTES)
        for n, quantity in enumerate(quantities)
    ]


async def test_calls_for_a_basket_at_its_bounds_are_bounded(system: MeasuredShard) -> None:
    """Ten grabs under eight limits get 100 of the longest codes. Baskets that ask for more are refused before
    anything is read.
    """
    limits = tuple(
        Limit(by, per, 10**6)
        for by in ("user", next(iter(ATTRIBUTES)))
        for per in ("offer", "hour", "day", "week")
    )

    async def act() -> None:
        await decided(system, basket([10] * 10), "granted")
        await decided(system, basket([10] * 10), "granted")
        await decided(system, basket([10] * 9 + [11], "c"), "invalid")
        await decided(system, basket([100] * 10, "d"), "invalid")

    check_bounded(await shortest_of(system, lambda: with_coupons(system, 300, limits=limits), act))


async def test_codes_that_a_basket_gets_at_once_are_bounded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lua and the rules agree. Holds do not count, since they get their codes later. Earlier larger baskets
    are repeated.
    """
    for offer, hold_ms in (("c:now", None), ("c:held", 60_000)):
        await scene.open(
            CouponTerms(issuer="i", total=400, codes=True, max_per_grab=100, hold_ms=hold_ms), offer
        )
        await scene.do(Load, what="codes", chunk=1, chunks=1, items=tuple(f"code{n}" for n in range(400)))

    async def decide_basket(name: str, *asked: tuple[str, int]) -> list[tuple[str, str | None]]:
        grabs = [
            Grab(id=f"{name}{n}", offer=offer, user="ann", quantity=quantity, basket=name)
            for n, (offer, quantity) in enumerate(asked)
        ]
        return [(answer.outcome, answer.message) for answer in await scene.decide_both(grabs)]

    refused = ("invalid", f"basket: its grabs get at most {CODES_PER_GRAB_MAX} codes together")
    assert await decide_basket("a", ("c:now", 60), ("c:now", 41)) == [refused, refused]
    assert await decide_basket("a", ("c:now", 60), ("c:now", 40)) == 2 * [("granted", None)]
    assert await decide_basket("b", ("c:held", 100), ("c:held", 100), ("c:now", 100)) == [
        ("held", None),
        ("held", None),
        ("granted", None),
    ]
    assert await decide_basket("a", ("c:now", 60), ("c:now", 40)) == 2 * [("granted", None)]
    assert [outcome for outcome, _ in await decide_basket("d", ("c:now", 101), ("c:none", 1))] == [
        "invalid",
        "invalid",
    ]
    with monkeypatch.context() as patch:
        patch.setattr("grabstream.models.rules.grabbing.CODES_PER_GRAB_MAX", 1_000)
        patch.setattr("grabstream.lua.loader.load", _with_more_codes)
        use_plain_scripts(patch)
        assert await decide_basket("e", ("c:now", 60), ("c:now", 40), ("c:now", 1)) == 3 * [("granted", None)]
    assert await decide_basket("e", ("c:now", 60), ("c:now", 40), ("c:now", 1)) == 3 * [("granted", None)]


def _with_more_codes(name: str) -> Script:
    """The script of an earlier release, without this bound: the answers to its baskets are still repeated."""
    text = assemble(name).replace(f"codes_per_grab = {CODES_PER_GRAB_MAX}", "codes_per_grab = 1000")
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


async def test_a_basket_whose_earlier_answers_are_too_long_together_is_invalid(system: MeasuredShard) -> None:
    """The grabs were granted one by one before. Each still gets its answer if it is sent alone."""
    await with_coupons(system, 1_200)
    grabs = [Grab(id=f"g{n}", offer="o", user=f"u{n}", quantity=100, basket=f"b{n}") for n in range(12)]
    first = [(await system.decide([grab]))[0] for grab in grabs]
    assert {answer.outcome for answer in first} == {"granted"}
    together = await system.decide(
        [Grab(id=grab.id, offer="o", user=grab.user, basket="all") for grab in grabs]
    )
    assert {answer.outcome for answer in together} == {"invalid"}
    assert all("send each grab by itself" in (answer.message or "") for answer in together)
    again = [(await system.decide([grab]))[0] for grab in grabs]
    assert [(answer.seq, answer.coupon_codes) for answer in again] == [
        (answer.seq, answer.coupon_codes) for answer in first
    ]


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_arguments_of_a_call_are_bounded_and_rarely_sent_twice(
    system: MeasuredShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one list, and for many callers at once."""
    sent: list[int] = []
    real = calls.run_script

    async def run(client: Any, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
        sent.append(sum(len(argument) for argument in arguments if isinstance(argument, bytes)))
        return await real(client, name, keys, arguments)

    monkeypatch.setattr(calls, "run_script", run)
    await decided(system, [Open(id="open", offer="o", terms=StockTerms(issuer="i", total=10**6))], "opened")
    grabs = [Grab(id=f"g{n}", offer="o", user=f"u{n}", attributes=ATTRIBUTES) for n in range(512)]
    with_metadata = [Grab(id=f"m{n}", offer="o", user=f"u{n}", metadata=METADATA) for n in range(512)]
    paid = [
        Confirm(id=f"c{n}", offer="o", grab=f"g{n}", payment=f"{n:03}" + '"' * 252, paid=1, currency="CNY")
        for n in range(512)
    ]
    for commands in (adjusts(512, "o"), grabs, with_metadata, paid):
        for at_once in (512, 4):
            sent.clear()
            named = [msgspec.structs.replace(command, id=f"{command.id}-{at_once}") for command in commands]
            await asyncio.gather(
                *(
                    system.gate.decide(named[start : start + at_once], "decided")
                    for start in range(0, 512, at_once)
                )
            )
            assert max(sent) < 1.1 * CALL_BYTES_MAX
            assert CALL_BYTES_MAX < sum(sent) < 1.5 * total_size(commands)
