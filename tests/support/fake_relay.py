"""A relay without Kafka, a client that is interrupted after a script call, and the commands of one buyer in
their order.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis.asyncio

from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua import loader
from grabstream.lua.keys import KeySpace
from grabstream.lua.library import library
from grabstream.lua.running import run_script
from grabstream.models.commands import AnyCommand, Confirm, Grab, Open, Redeem, Return
from grabstream.models.offers import CouponTerms
from tests.lua.histories.recovered import fold
from tests.support.shards import SEALER, event_lines, opening

TERMS = CouponTerms(issuer="shop", total=100_000, hold_ms=600_000, price=7, currency="CNY")


def stock(offer: str = "s") -> Open:
    return Open(id=f"open-{offer}", offer=offer, terms=TERMS)


def steps_of(user: str, offer: str = "s") -> list[AnyCommand]:
    """The commands of one buyer in their order; each is refused unless the one before it succeeded."""
    grab = f"g-{user}"
    return [
        Grab(id=grab, offer=offer, user=user),
        Confirm(id=f"c-{user}", offer=offer, grab=grab, payment=f"p-{user}", paid=7, currency="CNY"),
        Redeem(id=f"r-{user}", offer=offer, grab=grab, order="1"),
        Return(id=f"b-{user}", offer=offer, grab=grab, reason="back"),
    ]


#: Outcomes of the first three steps. The fourth is refused: redeemed units cannot be returned.
CARRIED_OUT = ["held", "confirmed", "redeemed"]


class FakeRelay:
    """Journals the events of shard 0 in a list, and recovers the shard from that list."""

    def __init__(self, client: Any, keys: KeySpace) -> None:
        self.client = client
        self.keys = keys
        self.shard = keys.shard(0)
        self.lines: list[bytes] = []
        self.busy = asyncio.Lock()

    async def journal(self) -> None:
        """Journals and announces all decided events."""
        async with self.busy:
            self.lines += await event_lines(self.client, self.keys, 0, len(self.lines))
            await self._announce()

    async def _announce(self) -> None:
        ownership = await self.client.hmget(self.shard.state, ["term", "owner", "server_epoch"])
        if None in ownership:
            return  # fenced again in the meantime: the next recovery announces
        await run_script(
            self.client,
            "trim",
            [self.shard.state, self.shard.outbox],
            [
                *[value.decode() for value in ownership],
                *[len(self.lines), "aa", 1, self.shard.channel, 1, "x", 0],
            ],
        )

    async def lose_tail(self, kept: Callable[[int], int] = lambda decided: 0) -> None:
        """Loses the events that are not journaled yet, except for the first `kept(number of them)`; the shard
        continues in a new history.
        """
        async with self.busy:
            decided = await event_lines(self.client, self.keys, 0, len(self.lines))
            self.lines += decided[: kept(len(decided))]
            await self.client.delete(self.shard.outbox)
            await fold(self.client, self.shard, self.lines, SEALER, self.keys.shards)
            await self._announce()

    async def run(self) -> None:
        """Journals until cancelled."""
        while True:
            await self.journal()
            await asyncio.sleep(0.005)


class InterruptedClient:
    """A client that calls a function once, after the first call of a script and before its reply is returned;
    the reply may be lost.
    """

    def __init__(
        self, client: Any, script: str, then: Callable[[], Awaitable[None]], loses_reply: bool = False
    ) -> None:
        self._client = client
        script_text = loader.load(script)
        self._names = (script_text.sha, script_text.text, library().functions[script])
        self._then: Callable[[], Awaitable[None]] | None = then
        self._loses_reply = loses_reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def execute_command(self, *words: Any) -> Any:
        reply = await self._client.execute_command(*words)
        if words[1] in self._names and self._then is not None:
            then, self._then = self._then, None
            await then()
            if self._loses_reply:
                raise redis.TimeoutError("Timeout reading from socket")
        return reply


@pytest.fixture
async def relay(private_redis: Any) -> FakeRelay:
    """A fake relay of a shard with a coupon offer and an envelope, both journaled."""
    client, keys = private_redis
    fake = FakeRelay(client, keys)
    gate = Gate(client, keys, SEALER)
    assert [answer.outcome for answer in await gate.decide([stock(), opening("e")], "decided")] == [
        "opened",
        "opened",
    ]
    await gate.close()
    await fake.journal()
    return fake


def gate_over(relay: FakeRelay, client: Any = None, timeout_ms: int = 20_000) -> Gate:
    """A started gate on the relay's shard, through another client if one is given."""
    gate = Gate(client or relay.client, relay.keys, SEALER, GateLimits(timeout_ms=timeout_ms))
    gate.start()
    return gate
