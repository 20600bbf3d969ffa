"""The sweeper serves a waiting list at the next opening automatically: no command comes, and the clock is
that of Redis.
"""

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest

from grabstream.gate import encoding
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.calendar import DAY_MS, MINUTE_MS
from grabstream.models.commands import AnyCommand, Grab, Open, Release
from grabstream.models.events import GrabHeld, decode_event
from grabstream.models.offers import Hours, StockTerms
from grabstream.streams.deciding.sweeper import Sweeper
from tests.conftest import until
from tests.support.shards import SEALER, event_lines, take_over

#: The offer opens again this long after the start of the test.
AHEAD_MS = 500


async def test_who_waits_is_served_when_the_offer_opens(
    client: Any, keys: KeySpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offer was open for a minute a day ago. Then all units were held, and users began to wait; the units
    came back after that minute. More users wait than one call serves.
    """
    await take_over(client, keys)
    opens_at = time.time_ns() // 1_000_000 + AHEAD_MS
    # The offset of the zone is such that a minute of its clock begins at `opens_at`.
    monkeypatch.setattr(encoding, "offsets_of", lambda zone, at_ms: ((0, -opens_at % MINUTE_MS),))
    minute = (opens_at + -opens_at % MINUTE_MS) // MINUTE_MS
    begins, ends = (f"{at % 1440 // 60:02}:{at % 60:02}" for at in (minute, minute + 1))
    hours = Hours(from_=begins, until="24:00" if ends == "00:00" else ends)
    now = [opens_at - DAY_MS]
    gate = Gate(client, keys, SEALER, clock=lambda: now[0])
    shard = keys.shard(keys.shard_of_offer("o"))
    names = [f"g{number}" for number in range(31)]
    terms = StockTerms(
        issuer="i", total=30, hold_ms=3 * DAY_MS, max_per_grab=30, hours=(hours,), waiting_list=True
    )
    commands: list[AnyCommand] = [
        Open(id="o", offer="o", terms=terms), Grab(id="all", offer="o", user="u", quantity=30),
        *(Grab(id=name, offer="o", user=name, wait=True) for name in names),
    ]  # fmt: skip

    async def served() -> list[GrabHeld]:
        events = [decode_event(line) for line in await event_lines(client, keys, shard.shard)]
        return [event for event in events if isinstance(event, GrabHeld) and event.waited]

    async def all_are_served() -> bool:
        return len(await served()) == 30

    try:
        answers = await gate.decide(commands, "decided")
        assert [answer.outcome for answer in answers] == ["opened", "held", *["waiting"] * 31]
        now[0] += MINUTE_MS
        [answer] = await gate.decide([Release(id="r", offer="o", grab="all")], "decided")
        assert (answer.outcome, answer.left) == ("released", 30)
        assert await client.zscore(shard.due, "o") == opens_at
        sweeping = asyncio.create_task(Sweeper(client, shard, keys.shards, 10**9).run())
        try:
            await until(all_are_served, 30, "the opening")
        finally:
            sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await sweeping
    finally:
        await gate.close()
    events = await served()
    assert [event.grab for event in events] == names[:30]
    assert min(event.at for event in events) >= opens_at
