"""Scenes: what a requirement tells, played on a real Redis through a gate and by the pure rules at once,
which must answer the same.
"""

import json
from datetime import datetime
from typing import Any

from grabstream.lua.gate.calls import GateLimits
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import Amend, Grab, Open
from grabstream.models.events import decode_event
from grabstream.models.offers import Changes, CouponTerms, Limit, StockTerms, Terms
from tests.lua.conftest import event_lines
from tests.lua.histories.twins import Twins

MINUTE, HOUR = 60_000, 3_600_000
DAY, WEEK = 24 * HOUR, 7 * 24 * HOUR
BERLIN = "Europe/Berlin"


def at(text: str) -> int:
    """Milliseconds of a time written with its offset."""
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def coupon(total: int = 10, *limits: Limit, **rest: Any) -> CouponTerms:
    return CouponTerms(issuer="shop", total=total, limits=limits, **rest)


def stock(total: int = 10, *limits: Limit, **rest: Any) -> StockTerms:
    return StockTerms(issuer="shop", total=total, limits=limits, **rest)


def by_user(per: Any, most: int, **rest: Any) -> Limit:
    return Limit("user", per, most, **rest)


def lefts(answer: Answer) -> dict[str, int]:
    return {f"{limit.by}/{limit.per}": limit.left for limit in answer.limits}


class Scene(Twins):
    """Commands under ids of their own, about one offer where nothing else is said."""

    async def begin(self, client: Any, keys: KeySpace) -> None:
        self.offer = "o"
        self._ids = 0
        await self.begin_twins(client, keys, GateLimits(timeout_ms=30_000))

    def id(self) -> str:
        """One that nobody has used."""
        self._ids += 1
        return f"id{self._ids}"

    async def do(self, kind: Any, **fields: Any) -> Answer:
        """One command under an id of its own."""
        [answer] = await self.decide_both([kind(**{"id": self.id(), "offer": self.offer, **fields})])
        return answer

    async def open(self, terms: Terms, offer: str | None = None) -> None:
        self.offer = offer or self.offer
        assert (await self.do(Open, terms=terms)).outcome == "opened"

    async def grab(self, user: str, quantity: int = 1, **rest: Any) -> Answer:
        return await self.do(Grab, user=user, quantity=quantity, **rest)

    async def amend(self, **changes: Any) -> Answer:
        return await self.do(Amend, changes=Changes(**changes))

    async def outcomes(self, *users: str) -> list[str]:
        """Of one grab by each, in one call."""
        return [
            answer.outcome
            for answer in await self.decide_both(
                [Grab(id=self.id(), offer=self.offer, user=user) for user in users]
            )
        ]

    async def all_lines(self) -> list[bytes]:
        return [
            line
            for number in range(self.keys.shards)
            for line in await event_lines(self.client, self.keys, number)
        ]

    async def events(self, kind: str, **fields: Any) -> list[Any]:
        """The events of a type that say this."""
        found = [decode_event(line) for line in await self.all_lines() if json.loads(line)["type"] == kind]
        return [
            event for event in found if all(getattr(event, name) == value for name, value in fields.items())
        ]

    async def names(self) -> list[str]:
        return [
            key.decode() async for key in self.client.scan_iter(match=f"{self.keys.prefix}:*", count=1_000)
        ]
