"""A waiting list through the whole system: who waits gets what has come back at the resume, and when the
offer opens again, without a command; the books say so.
"""

import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from grabstream.connections.opening import key_space, open_gate, open_redis
from grabstream.gate import encoding
from grabstream.models.calendar import MINUTE_MS
from grabstream.models.commands import Grab, Open, Pause, Release, Resume
from grabstream.models.offers import Hours, StockTerms
from grabstream.ops.verification.verifying import verify
from grabstream.settings import Settings
from grabstream.streams.deciding.sweeper import Sweeper
from tests.conftest import until
from tests.support.leases import until_relayed_by
from tests.support.projecting import rows

pytestmark = pytest.mark.long

#: How long the offer is open before its hours end, and how long it is not open then.
OPEN_MS, CLOSED_MS = 8_000, 4_000


def clock_of(opens_at: int) -> tuple[tuple[int, int], ...]:
    """A zone whose clock shows 10:00 at one time, and which is set ahead, from 10:01 to 10:02, such that an
    offer that is open in these two minutes opens twice.
    """
    at_ten = 10 * 60 * MINUTE_MS - opens_at % (24 * 60 * MINUTE_MS)
    ends_at = opens_at + OPEN_MS
    return (
        (0, at_ten + MINUTE_MS - OPEN_MS),
        (ends_at + CLOSED_MS, at_ten + 2 * MINUTE_MS - OPEN_MS - CLOSED_MS),
    )


async def test_who_waits_is_served_at_the_resume_and_at_the_next_opening(
    system: Settings, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await until_relayed_by(system, worker(system, "decide,relay,sweep"))
    worker(system, "project,publish")
    hours = (Hours(from_="10:00", until="10:01"), Hours(from_="10:02", until="11:00"))
    terms = StockTerms(issuer="shop", total=1, hold_ms=3_600_000, waiting_list=True)

    async def do(kind: Any, offer: str, **fields: Any) -> str:
        command = kind(id=f"{offer}-{kind.__name__}-{fields.get('user', '')}", offer=offer, **fields)
        [answer] = await gate.decide([command], patience_ms=20_000, timeout_ms=20_000)
        return answer.outcome

    async def held_by(offer: str) -> list[str]:
        sql = f"SELECT user_id FROM grabs WHERE offer = '{offer}' AND held > 0"
        return [user for (user,) in await rows(system, sql)]

    async with open_gate(system) as gate:
        opens_at = time.time_ns() // 1_000_000
        offsets = clock_of(opens_at)
        monkeypatch.setattr(encoding, "offsets_of", lambda zone, at_ms: offsets)
        for offer in ("paused", "opening"):
            of_offer = (
                terms
                if offer == "paused"
                else StockTerms(issuer="shop", total=1, hold_ms=3_600_000, waiting_list=True, hours=hours)
            )
            assert await do(Open, offer, terms=of_offer) == "opened"
            assert await do(Grab, offer, user="ann") == "held"
            assert await do(Grab, offer, user="bob", wait=True) == "waiting"

        assert await do(Pause, "paused") == "paused"
        assert await do(Release, "paused", grab="paused-Grab-ann") == "released"
        await until(lambda: time.time_ns() // 1_000_000 > opens_at + OPEN_MS, 30, "the end of the hours")
        assert await do(Release, "opening", grab="opening-Grab-ann") == "released"

        async def bob_is_served() -> bool:
            return await held_by("opening") == ["bob"]

        await until(bob_is_served, 60, "the opening")
        sql = "SELECT at FROM audit WHERE offer = 'opening' AND type = 'grab.held' ORDER BY seq"
        [_, (at,)] = await rows(system, sql)
        assert at >= offsets[1][0]

        assert await held_by("paused") == []
        assert await do(Resume, "paused") == "resumed"

        async def bob_is_served_too() -> bool:
            return await held_by("paused") == ["bob"]

        await until(bob_is_served_too, 60, "the resume")
        checks = await verify(system)
    assert not {check.name: check.problems for check in checks if not check.passed}


async def test_an_opening_that_the_sweeper_missed_is_no_damage(
    system: Settings, worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after the hours, and postpones the offer to the next ones, which is not an event. `verify`
    takes another time for damage.
    """
    await until_relayed_by(system, worker(system, "decide,relay,project"))
    space = key_space(system)
    shard = space.shard(space.shard_of_offer("o"))
    # The clock is set to the end of the first hours, then to the beginning of the next, then to their end.
    opens_at = time.time_ns() // 1_000_000
    midnight = -opens_at % (24 * 60 * MINUTE_MS)
    offsets = [
        (opens_at + after, midnight - after + minutes * MINUTE_MS)
        for after, minutes in ((0, 600), (OPEN_MS, 601), (2 * OPEN_MS, 602), (2 * OPEN_MS + 1_000, 603))
    ]
    monkeypatch.setattr(encoding, "offsets_of", lambda zone, at_ms: offsets)
    hours = (Hours(from_="10:00", until="10:01"), Hours(from_="10:02", until="10:03"))
    terms = StockTerms(issuer="shop", total=1, hold_ms=3_600_000, waiting_list=True, hours=hours)

    async def do(kind: Any, outcome: str, id: str, **fields: Any) -> None:
        [answer] = await gate.decide(
            [kind(id=id, offer="o", **fields)], patience_ms=20_000, timeout_ms=20_000
        )
        assert answer.outcome == outcome

    async with open_gate(system) as gate, aclosing(open_redis(system)) as client:
        await do(Open, "opened", "open", terms=terms)
        await do(Grab, "held", "first", user="ann")
        await do(Grab, "waiting", "second", user="bob", wait=True)
        await until(lambda: time.time_ns() // 1_000_000 > offsets[1][0], 30, "the end of the hours")
        await do(Release, "released", "release", grab="first")
        opening = await client.zscore(shard.due, "o")
        await until(lambda: time.time_ns() // 1_000_000 > offsets[3][0], 30, "the end of the next hours")
        assert opening == offsets[2][0]
        assert await Sweeper(client, shard, space.shards, 1_000).sweep() == 1
        postponed = await client.zscore(shard.due, "o")
        assert postponed > offsets[3][0]
        assert {check.name: check.problems for check in await verify(system, 10) if not check.passed} == {}
        for other in (postponed - 1, postponed + 24 * 60 * MINUTE_MS):
            await client.zadd(shard.due, {"o": other})
            [damaged] = [check for check in await verify(system, 10) if not check.passed]
            assert "due, o: is" in damaged.problems[0]
