"""Scenes: a requirement played step by step, on a real Redis through a gate and by the pure rules. Both must
give the same answers.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from grabstream.gate.calls import GateLimits
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import Amend, Grab, Open
from grabstream.models.events import decode_event
from grabstream.models.offers import Changes, CouponTerms, Limit, StockTerms, Terms
from tests.lua.histories.twins import Twins
from tests.support.shards import event_lines

MINUTE, HOUR = 60_000, 3_600_000
DAY, WEEK = 24 * HOUR, 7 * 24 * HOUR
BERLIN = "Europe/Berlin"


def at(text: str) -> int:
    """The time in ms since 1970 of an ISO text with an offset."""
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def coupon(total: int = 10, *limits: Limit, **rest: Any) -> CouponTerms:
    return CouponTerms(issuer="shop", total=total, limits=limits, **rest)


def stock(total: int = 10, *limits: Limit, **rest: Any) -> StockTerms:
    return StockTerms(issuer="shop", total=total, limits=limits, **rest)


def by_user(per: Any, most: int, **rest: Any) -> Limit:
    return Limit("user", per, most, **rest)


def left_by_limit(answer: Answer) -> dict[str, int]:
    """What each limit leaves the user, by `<by>/<per>`."""
    return {f"{limit.by}/{limit.per}": limit.left for limit in answer.limits}


class Scene(Twins):
    """Twins that send commands with new ids, about the offer opened last unless another is given."""

    async def begin(self, client: Any, keys: KeySpace) -> None:
        self.offer = "o"
        self._ids = 0
        await self.begin_twins(client, keys, GateLimits(timeout_ms=30_000))

    def id(self) -> str:
        """An id that was not used before."""
        self._ids += 1
        return f"id{self._ids}"

    async def do(self, kind: Any, **fields: Any) -> Answer:
        """Sends one command of this class under a new id; returns its answer."""
        [answer] = await self.decide_both([kind(**{"id": self.id(), "offer": self.offer, **fields})])
        return answer

    async def open(self, terms: Terms, offer: str | None = None) -> None:
        """Opens an offer, which later commands are about."""
        self.offer = offer or self.offer
        assert (await self.do(Open, terms=terms)).outcome == "opened"

    async def grab(self, user: str, quantity: int = 1, **rest: Any) -> Answer:
        return await self.do(Grab, user=user, quantity=quantity, **rest)

    async def amend(self, **changes: Any) -> Answer:
        return await self.do(Amend, changes=Changes(**changes))

    async def outcomes(self, *users: str) -> list[str]:
        """The outcomes of one grab by each user, sent in one list."""
        return [
            answer.outcome
            for answer in await self.decide_both(
                [Grab(id=self.id(), offer=self.offer, user=user) for user in users]
            )
        ]

    async def all_lines(self) -> list[bytes]:
        """The event lines of all shards, in order within each shard."""
        return [
            line
            for number in range(self.keys.shards)
            for line in await event_lines(self.client, self.keys, number)
        ]

    async def events(self, kind: str, **fields: Any) -> list[Any]:
        """The events of type `kind` whose fields have these values."""
        events = [decode_event(line) for line in await self.all_lines() if json.loads(line)["type"] == kind]
        return [
            event for event in events if all(getattr(event, name) == value for name, value in fields.items())
        ]

    async def everything(self) -> dict[str, bytes]:
        """The values of all keys of this scene, as DUMP returns them."""
        return {name: await self.client.dump(name) for name in await self.names()}

    @asynccontextmanager
    async def refusing_writes(self) -> AsyncIterator[None]:
        """Redis refuses the first write of each call, of the outbox, which is the only one it can refuse."""
        outbox = self.keys.shard(self.keys.shard_of_offer("o")).outbox
        aside = f"{outbox}:aside"
        await self.client.rename(outbox, aside)
        await self.client.set(outbox, "not a stream")
        yield
        await self.client.rename(aside, outbox)

    async def names(self) -> list[str]:
        """The names of all keys of this scene."""
        return [
            key.decode() async for key in self.client.scan_iter(match=f"{self.keys.prefix}:*", count=1_000)
        ]
