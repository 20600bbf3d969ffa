"""Traffic: callers of a gate in several shapes, which keep every answer; after a fault every answer must
still be true.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import (
    Amend,
    AnyCommand,
    Close,
    Confirm,
    Grab,
    Open,
    Pause,
    Release,
    Resume,
    Return,
)
from grabstream.models.offers import Changes, CouponTerms, EnvelopeTerms, Limit, StockTerms, Terms
from grabstream.models.outcomes import OutcomeUnknown
from tests.conftest import until
from tests.drill.over_http import SHAPE, HttpGate

CALLERS: Final = 8
PAUSE_SECONDS: Final = 0.004
HOLD_MS: Final = 900
PRICE: Final = 7
ANSWER_SECONDS_MAX: Final = 90.0


class Traffic:
    """Callers in one shape. `answered` has all decided commands with their answers, in the order of the
    answers.
    """

    def __init__(self, shape: str, gate: Gate | HttpGate, keys: KeySpace, seed: str) -> None:
        self.shape = shape
        self.random = random.Random(seed)
        self.answered: list[tuple[AnyCommand, Answer]] = []
        self.unknown = 0
        self.refused_for_now = 0
        self._gates: list[Gate | HttpGate] = [gate]
        self._names = a_campaign_of_each_shard(keys)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._opened: list[str] = []
        self._commands = 0

    # -- for the drill ---------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Opens the offers and starts the callers."""
        _, openings = SHAPES[self.shape]
        for name in self._names:
            opened = openings(name, self.random)
            await self.send([self.command(Open, offer, terms=terms) for offer, terms in opened])
            self._opened += [offer for offer, _ in opened]
        caller, _ = SHAPES[self.shape]
        self._tasks = [asyncio.create_task(self._call(caller, number)) for number in range(CALLERS)]
        if self.shape == "amendments":
            self._tasks.append(asyncio.create_task(self._call(operator, CALLERS)))

    def join(self, gate: Gate) -> None:
        """Adds a gate: each call uses one of the gates at random. Traffic over HTTP stays there."""
        if self.shape != SHAPE:
            self._gates.append(gate)

    async def more(
        self, answers: int, seconds: float = ANSWER_SECONDS_MAX, what: str = "more answers"
    ) -> None:
        """Returns when `answers` more commands are decided."""
        wanted = len(self.answered) + answers
        await until(lambda: self._failed() or len(self.answered) >= wanted, seconds, what)

    async def stop(self) -> None:
        """Lets the callers finish what they have begun, then closes the offers."""
        self._stopping.set()
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            await asyncio.gather(*self._tasks)
        # The close removes waiting grabs. A queue is long after a long fault, and would otherwise be served
        # one hold after another.
        await self.send([self.command(Close, offer) for offer in self._opened])

    async def end(self) -> None:
        """Cancels the callers without waiting for answers, after a failure."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _failed(self) -> bool:
        for task in self._tasks:
            if task.done():
                task.result()
        return False

    # -- for callers -----------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Whether callers shall not send new commands."""
        return self._stopping.is_set()

    def command(self, make: Any, offer: str, **rest: Any) -> Any:
        """A command with a new id."""
        self._commands += 1
        return make(id=f"c{self._commands}", offer=offer, **rest)

    def campaign(self) -> str:
        """A random campaign, of any shard."""
        return self.random.choice(self._names)

    async def send(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """Sends commands, again under the same ids if needed, until they are decided; returns the answers."""
        while True:
            gate = self.random.choice(self._gates)
            try:
                answers = await gate.decide(commands, patience_ms=500, timeout_ms=3_000)
            except OutcomeUnknown:
                self.unknown += 1
                continue
            if all(answer.decided for answer in answers):
                self.answered += zip(commands, answers, strict=True)
                return answers
            self.refused_for_now += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def _call(self, caller: Callable[["Traffic", str], Awaitable[None]], number: int) -> None:
        while not self.stopping:
            await caller(self, self.campaign())
            await asyncio.sleep(self.random.uniform(0, 2 * PAUSE_SECONDS))


def a_campaign_of_each_shard(keys: KeySpace, stem: str = "k") -> list[str]:
    """A campaign for every shard, by the shard's number."""
    names: dict[int, str] = {}
    number = 0
    while len(names) < keys.shards:
        names.setdefault(keys.shard_of_offer(f"{stem}{number}"), f"{stem}{number}")
        number += 1
    return [names[shard] for shard in sorted(names)]


# -- grabs ---------------------------------------------------------------------------------------------------


def _grab_openings(campaign: str, draw: random.Random) -> list[tuple[str, Terms]]:
    parts: dict[str, Any] = {
        "issuer": "ann",
        "funding": "pay",
        "asset": "CNY",
        "total": 300_000,
        "parts": 3_000,
    }
    limits = (Limit("user", "offer", 3), Limit("user", "day", 2), Limit("card", "hour", 5, "campaign"))
    return [
        (f"{campaign}:ahead", EnvelopeTerms(**parts)),
        (f"{campaign}:drawn", EnvelopeTerms(**parts, draw="at_grab", seed=f"{draw.getrandbits(128):032x}")),
        (f"{campaign}:coupon", CouponTerms(issuer="ann", total=3_000, limits=limits)),
    ]


async def grabber(traffic: Traffic, campaign: str) -> None:
    """Sends a few grabs at once, of users who may have grabbed before."""
    offer = f"{campaign}:{traffic.random.choice(('ahead', 'drawn', 'coupon'))}"
    attributes = {"card": f"card{traffic.random.randrange(30)}"} if offer.endswith("coupon") else {}
    count = traffic.random.randint(1, 4)
    await traffic.send(
        [
            traffic.command(Grab, offer, user=f"u{traffic.random.randrange(5_000)}", attributes=attributes)
            for _ in range(count)
        ]
    )


# -- holds near their deadline -------------------------------------------------------------------------------


def _hold_openings(campaign: str, draw: random.Random) -> list[tuple[str, Terms]]:
    common: dict[str, Any] = {
        "issuer": "shop", "total": 25, "price": PRICE, "currency": "CNY", "hold_ms": HOLD_MS,
        "max_per_grab": 2, "waiting_list": True,
        "limits": (Limit("user", "offer", 4),), "return_restores": True,
    }  # fmt: skip
    return [
        (f"{campaign}:retake", StockTerms(**common, late="retake")),
        (f"{campaign}:grace", StockTerms(**common, late="grace", grace_ms=300, extensions=1)),
    ]


async def buyer(traffic: Traffic, campaign: str) -> None:
    """Grabs; then pays at once, pays near the deadline, releases, or does nothing; some buyers return what
    they paid.
    """
    draw = traffic.random
    offer = f"{campaign}:{draw.choice(('retake', 'grace'))}"
    quantity = draw.randint(1, 2)
    grab = traffic.command(
        Grab, offer, user=f"u{draw.randrange(400)}", quantity=quantity, wait=draw.random() < 0.3
    )
    [held] = await traffic.send([grab])
    if held.outcome != "held":
        return
    mood = draw.random()
    if mood < 0.6:
        if mood > 0.25:
            await asyncio.sleep((HOLD_MS + draw.uniform(-60, 60)) / 1000)
        paid = {"payment": f"pay-{grab.id}", "paid": PRICE * quantity, "currency": "CNY"}
        [confirmed] = await traffic.send([traffic.command(Confirm, offer, grab=grab.id, **paid)])
        if confirmed.outcome == "confirmed" and mood < 0.2:
            await traffic.send([traffic.command(Return, offer, grab=grab.id, reason="too small")])
    elif mood < 0.8:
        await traffic.send([traffic.command(Release, offer, grab=grab.id)])


# -- amendments ----------------------------------------------------------------------------------------------


def _amendment_openings(campaign: str, draw: random.Random) -> list[tuple[str, Terms]]:
    return [(f"{campaign}:amended", CouponTerms(issuer="shop", total=400, limits=(Limit("user", "day", 3),)))]


async def amended_grabber(traffic: Traffic, campaign: str) -> None:
    """Sends a grab of an offer that is being amended."""
    await traffic.send(
        [traffic.command(Grab, f"{campaign}:amended", user=f"u{traffic.random.randrange(2_000)}")]
    )


async def operator(traffic: Traffic, campaign: str) -> None:
    """Changes the total, the limits or the title, pauses or resumes."""
    draw, offer = traffic.random, f"{campaign}:amended"
    make, rest = draw.choice(
        [
            (Amend, {"changes": Changes(total=draw.randint(400, 4_000)), "operator": "olga"}),
            (Amend, {"changes": Changes(limits=(Limit("user", "day", draw.randint(1, 5)),))}),
            (Amend, {"changes": Changes(title='another "title"')}),
            (Pause, {}), (Resume, {}), (Resume, {}), (Resume, {}),
        ]
    )  # fmt: skip
    await traffic.send([traffic.command(make, offer, **rest)])


# -- baskets -------------------------------------------------------------------------------------------------


def _basket_openings(campaign: str, draw: random.Random) -> list[tuple[str, Terms]]:
    common: dict[str, Any] = {
        "issuer": "shop",
        "price": PRICE,
        "currency": "CNY",
        "limits": (Limit("user", "day", 6, "campaign"),),
    }
    return [
        (f"{campaign}:{name}", StockTerms(**common, total=total, hold_ms=HOLD_MS * 2))
        for name, total in (("phone", 60), ("case", 400), ("cable", 800))
    ]


async def basket_buyer(traffic: Traffic, campaign: str) -> None:
    """Grabs two or three offers in one basket; then pays or releases one of them."""
    draw = traffic.random
    user, names = f"u{draw.randrange(600)}", draw.sample(("phone", "case", "cable"), draw.randint(2, 3))
    basket = f"b{traffic.command(Grab, campaign, user=user).id}"
    grabs = [traffic.command(Grab, f"{campaign}:{name}", user=user, basket=basket) for name in names]
    answers = await traffic.send(grabs)
    if answers[0].outcome != "held":
        return
    chosen = draw.choice(grabs)
    if draw.random() < 0.5:
        paid = {"payment": f"pay-{chosen.id}", "paid": PRICE, "currency": "CNY"}
        await traffic.send([traffic.command(Confirm, chosen.offer, grab=chosen.id, **paid)])
    elif draw.random() < 0.5:
        await traffic.send([traffic.command(Release, chosen.offer, grab=chosen.id)])


#: The function of a caller, and the offers that it needs, by the name of the shape.
SHAPES: Final[dict[str, tuple[Any, Any]]] = {
    "grabs": (grabber, _grab_openings),
    "holds": (buyer, _hold_openings),
    "amendments": (amended_grabber, _amendment_openings),
    "baskets": (basket_buyer, _basket_openings),
    # Over HTTP, through a gateway process (tests/drill/over_http.py).
    "http": (grabber, _grab_openings),
}
