"""Answers of an offer are forgotten only when it retires: whatever happens between the steps of retirement,
no command is decided a second time.
"""

import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from grabstream.connections.opening import open_redis
from grabstream.crypto.sealing import Sealer, new_seal_key
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.lua.server import let_callers_set_time
from grabstream.models.answers import Answer
from grabstream.models.commands import decode_command
from grabstream.settings import load_settings
from grabstream.streams.deciding.sweeper import Sweeper
from grabstream.streams.relaying.ownership import OwnedShard

DAY_MS = 86_400_000
TERMS = {
    "kind": "stock",
    "issuer": "shop",
    "total": 2,
    "waiting_list": True,
    "hold_ms": DAY_MS,
    "retire_after_ms": 1_000,
}
ENTRY = {
    "transfers": [{"debit": "external:x", "credit": "wallet:ann", "amount": 5, "asset": "CNY"}],
    "reason": "r",
    "approved_by": "olga",
}


class OneShard:
    """One shard that decides, with a gate and a sweeper that read the clock `now` (ms)."""

    def __init__(self, redis: Any) -> None:
        self.redis = redis
        self.now = 1_800_000_000_000
        space = KeySpace(f"leaving-{secrets.token_hex(4)}", 1)
        self.keys: ShardKeys = space.shard(0)
        self.gate = Gate(redis, space, Sealer.from_text(new_seal_key()), clock=lambda: self.now)
        self.sweeper = Sweeper(redis, self.keys, 1, 10**15)

    async def begin(self) -> None:
        shard = OwnedShard(self.redis, self.keys)
        await let_callers_set_time(self.redis, self.keys.state)
        raised = await shard.raise_term(0)
        await shard.run("reconcile", [self.keys.state], raised.ownership, 0, 1)

    async def decide(self, type: str, id: str, offer: str, **fields: Any) -> Answer:
        command = decode_command(json.dumps({"type": type, "id": id, "offer": offer} | fields).encode())
        [answer] = await self.gate.decide([command], promise="decided")
        return answer

    async def sweep(self) -> int:
        return await self.sweeper.sweep(self.now)

    async def events(self, type: str) -> int:
        entries = await self.redis.xrange(self.keys.outbox)
        return sum(f'"type":"{type}"'.encode() in line for _, fields in entries for line in fields.values())


@pytest.fixture
async def system() -> AsyncIterator[OneShard]:
    redis = open_redis(load_settings())
    system = OneShard(redis)
    await system.begin()
    await system.decide("open", "open-a", "sale:a", terms=TERMS)
    await system.decide("open", "open-b", "sale:b", terms=TERMS)
    yield system
    await system.gate.close()
    names = [key async for key in redis.scan_iter(match=f"{system.keys.prefix}:*", count=1_000)]
    if names:
        await redis.unlink(*names)
    await redis.aclose()


async def test_an_offer_that_is_no_longer_due_keeps_its_answers(system: OneShard) -> None:
    await system.decide("grab", "g-1", "sale:a", user="ann", quantity=1)
    await system.decide("confirm", "c-1", "sale:a", grab="g-1")
    await system.decide("grab", "g-2", "sale:a", user="bob")
    await system.decide("confirm", "c-2", "sale:a", grab="g-2")
    await system.decide("grab", "g-3", "sale:a", user="cid", wait=True)
    first = await system.decide("adjust", "adjust-1", "sale:a", **ENTRY)
    await system.decide("close", "close-a", "sale:a")
    due = system.sweeper._due

    async def due_then_release(
        key: str, at_ms: int | None, most: int, after_ms: int = 0, last_first: bool = False
    ) -> list[str]:
        names = await due(key, at_ms, most, after_ms, last_first)
        if key == system.keys.due and "sale:a" in names:
            await system.decide("release", "r-1", "sale:a", grab="g-3")
        return names

    system.sweeper._due = due_then_release  # type: ignore[method-assign]
    await system.sweep()
    repeat = await system.decide("adjust", "adjust-1", "sale:a", **ENTRY)
    assert (repeat.outcome, repeat.seq, repeat.repeated) == ("adjusted", first.seq, True)
    assert await system.events("ledger.adjusted") == 1


async def test_an_offer_opened_before_others_of_its_campaign_are_cleaned_keeps_its_answers(
    system: OneShard,
) -> None:
    for offer in ("a", "b"):
        await system.decide("close", f"close-{offer}", f"sale:{offer}")
    system.now += 2_000
    await system.sweeper.close_due(system.now)
    await system.decide("open", "open-c", "sale:c", terms=TERMS)
    await system.sweeper.clean(system.now)
    assert await system.redis.smembers(system.keys.retired) == {b"sale:a", b"sale:b"}
    assert set(await system.redis.hkeys(system.keys.answers("sale"))) == {b"open-c"}
