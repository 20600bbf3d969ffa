"""The largest calls: Lua passes at most 8000 values to a function, and units that one command frees are
granted to waiting grabs in the same call.
"""

from collections.abc import Callable
from typing import Any

from grabstream.models.commands import Close, Grab, Load, Open, Release
from grabstream.models.offers import CouponTerms, Limit, StockTerms
from grabstream.streams.deciding.sweeper import Sweeper
from tests.support.shards import NOW, event_lines


async def test_lists_are_loaded_in_the_largest_chunks(
    make_gate: Callable[..., Any], client: Any, keys: Any
) -> None:
    gate = make_gate([NOW])
    for kind in ("codes", "audience"):
        terms = CouponTerms(
            issuer="i", total=12_000, opens_at=NOW + 1, audience="list" if kind == "audience" else "everyone"
        )
        loads: list[Any] = [
            Load(
                id=f"{kind}-{n}",
                offer=kind,
                what=kind,
                chunk=n,
                chunks=12,
                items=tuple(f"u{n}x{i}" for i in range(1_000)),
            )  # type: ignore[arg-type]
            for n in range(1, 13)
        ]
        answers = await gate.decide(
            [Open(id=f"o-{kind}", offer=kind, terms=terms), *loads], "decided", timeout_ms=20_000
        )
        assert [answer.outcome for answer in answers] == ["opened"] + 12 * ["loaded"]
        repeats = await gate.decide(loads, "decided", timeout_ms=20_000)
        assert all(answer.repeated for answer in repeats)
        shard = keys.shard(keys.shard_of_offer(kind))
        *_, codes, audience, _, _, _, _ = shard.offer_keys(kind)
        assert (await client.llen(codes), await client.scard(audience)) == (
            (12_000, 0) if kind == "codes" else (0, 12_000)
        )


async def test_a_full_call_of_grabs_under_eight_limits_is_granted(
    make_gate: Callable[..., Any], client: Any, keys: Any
) -> None:
    limits = tuple(Limit(by, per, 2) for by in ("user", "card") for per in ("offer", "hour", "day", "week"))
    gate = make_gate([NOW])
    await gate.decide(
        [Open(id="o", offer="s", terms=StockTerms(issuer="i", total=1_000, limits=limits))], "decided"
    )
    grabs = [Grab(id=f"g{n}", offer="s", user=f"u{n}", attributes={"card": f"c{n}"}) for n in range(512)]
    answers = await gate.decide(grabs, "decided", timeout_ms=20_000)
    assert {answer.outcome for answer in answers} == {"granted"}
    assert {tuple(limit.left for limit in answer.limits) for answer in answers} == {(1,) * 8}


async def test_a_list_of_releases_serves_as_many_waiting_grabs(
    make_gate: Callable[..., Any], client: Any, keys: Any
) -> None:
    """One list of 512 releases, each of which serves a waiting grab. The grabs that still wait at the close
    are released in steps.
    """
    gate = make_gate([NOW])
    terms = StockTerms(
        issuer="i", total=512, hold_ms=10**6, waiting_list=True, limits=(Limit("user", "offer", 1),)
    )
    await gate.decide([Open(id="o", offer="s", terms=terms)], "decided")
    crowd = [Grab(id=f"g{n}", offer="s", user=f"u{n}", wait=True) for n in range(1_280)]
    outcomes = [answer.outcome for answer in await gate.decide(crowd, "decided", timeout_ms=20_000)]
    assert outcomes == ["held"] * 512 + ["waiting"] * 768
    released = await gate.decide(
        [Release(id=f"r{n}", offer="s", grab=f"g{n}") for n in range(512)], "decided", timeout_ms=20_000
    )
    assert {answer.outcome for answer in released} == {"released"}
    shard = keys.shard(keys.shard_of_offer("s"))
    state, *_, queue, _, _ = shard.offer_keys("s")
    assert (await client.hmget(state, ["held", "units_left"]), await client.zcard(queue)) == (
        [b"512", b"0"],
        256,
    )
    await gate.decide([Close(id="c", offer="s")], "decided")
    await Sweeper(client, shard, keys.shards, 10**9).sweep(NOW)
    assert await client.zcard(queue) == 0
    lines = await event_lines(client, keys, shard.shard)
    assert sum(b'"left_queue"' in line for line in lines) == 256
    assert len(lines) == 1 + 512 + 768 + 2 * 512 + 1 + 256
