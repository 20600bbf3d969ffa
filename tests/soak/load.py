"""The load of a soak: generations of offers that open, sell, close and retire, through all three doors.

A generation is an envelope, coupons under a limit, and stock that is held and paid, each in its own campaign.
Every second one begins, and it sells for SELLING_SECONDS. So at any time the same number of offers is alive,
and nothing but the journal, the read models and what is known of payments may grow.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from grabstream.client.commands import CommandMethods
from grabstream.client.exchange import RequestProblem
from grabstream.client.over_http import AsyncClient
from grabstream.gate.gate import Gate
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.models.vocabulary import AnyCommand, CouponTerms, EnvelopeTerms, Limit, StockTerms

SELLING_SECONDS: Final = 8.0
HOLD_MS: Final = 2_000
#: Longer than a command may take on a busy machine: an offer that has retired does not know it any more.
RETIRE_AFTER_MS: Final = 60_000
PRICE: Final = 7
#: A command that is not decided by then ends the soak.
DECIDED_SECONDS_MAX: Final = 300.0
AGAIN_SECONDS: Final = 0.2
#: Answers that decide nothing.
UNDECIDED: Final = ("busy", "fenced")
#: What buyers may be answered.
EXPECTED: Final = {
    "envelope": {"granted", "sold_out"},
    "coupon": {"granted", "sold_out", "limit_reached"},
    "stock": {"held", "sold_out"},
    # On a machine that is busy, a hold may end before its payment comes.
    "confirm": {"confirmed", "expired"},
    "release": {"released", "expired"},
    "open": {"opened"},
    "close": {"closed"},
}

Client = CommandMethods[Coroutine[Any, Any, Any], Any]


class GateClient(CommandMethods[Coroutine[Any, Any, Any], Any]):
    """A gate of this process, as the other clients are used."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def decide(self, command: AnyCommand) -> Any:
        """Sends a command; returns its answer."""
        [answer] = await self._gate.decide([command.to_wire()], patience_ms=5_000, timeout_ms=10_000)
        return answer


class Unexpected(Exception):
    """A command got an answer that no command of this load can get, or none."""


class Load:
    """Sends a fixed rate of grabs, whatever the answers take; `outcomes` counts the answers."""

    def __init__(self, doors: Sequence[Client], http: AsyncClient, rate: int) -> None:
        self._doors = doors
        self._http = http
        self._rate = rate
        self._commands = 0
        self.outcomes: Counter[str] = Counter()
        #: Commands that were sent again, since it was not known whether they were decided.
        self.repeated = 0
        #: Events that came in streams over HTTP.
        self.followed = 0
        self.generations = 0
        #: The longest time until a command was decided, by door.
        self.slowest = [0.0] * len(doors)

    async def run(self, seconds: float) -> None:
        """Begins a generation each second, and returns when the last one has ended. Raises Unexpected, in a
        group.
        """
        began = time.monotonic()
        async with asyncio.TaskGroup() as generations:
            while (now := time.monotonic() - began) < seconds:
                # Behind its time after a pause of the machine, it does not catch up: the load stays steady.
                generations.create_task(self._generation(f"g{self.generations}"))
                self.generations += 1
                await asyncio.sleep(1.0 - now % 1.0)

    async def _generation(self, name: str) -> None:
        units = max(3, self._rate // 3)
        retiring: dict[str, Any] = {"issuer": "shop", "retire_after_ms": RETIRE_AFTER_MS}
        terms = {
            # A tenth of the buyers come too late.
            "envelope": EnvelopeTerms(
                **retiring, funding=f"f-{name}", asset="CNY", total=100 * units, parts=units * 9 // 10
            ),
            "coupon": CouponTerms(**retiring, total=units, limits=(Limit(by="user", per="offer", max=1),)),
            "stock": StockTerms(**retiring, total=units, price=PRICE, currency="CNY", hold_ms=HOLD_MS),
        }
        for kind, one in terms.items():
            await self._sent(
                "open", lambda door, named, kind=kind, one=one: door.open(one, f"{name}-{kind}", id=named)
            )
        following = asyncio.create_task(self._follow(f"{name}-envelope"))
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as buyers:
                for number in range(units):
                    await asyncio.sleep(max(0.0, began + number * SELLING_SECONDS / units - time.monotonic()))
                    for kind in terms:
                        buyers.create_task(self._buy(kind, f"{name}-{kind}", number))
        finally:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
        for kind in terms:
            # The envelope has closed with its last part.
            if kind != "envelope":
                await self._sent(
                    "close", lambda door, named, kind=kind: door.close(f"{name}-{kind}", id=named)
                )

    async def _buy(self, kind: str, offer: str, number: int) -> None:
        # Every tenth asks for a second coupon, which the limit refuses.
        user = f"u{number - 1 if kind == 'coupon' and number % 10 == 9 else number}"
        answer = await self._sent(kind, lambda door, named: door.grab(offer, user, id=named))
        if answer.outcome != "held" or number % 4 == 0:
            return  # what is held and not paid ends at its time
        if number % 4 == 1:
            await self._sent("release", lambda door, named: door.release(offer, answer.grab, user, id=named))
            return
        await self._sent(
            "confirm",
            lambda door, named: door.confirm(
                offer, answer.grab, user, id=named, payment=f"p-{offer}-{number}", paid=PRICE, currency="CNY"
            ),
        )  # fmt: skip

    async def _sent(self, what: str, ask: Any) -> Any:
        """The answer to a command that `ask` sends by a door under an id, again until it is decided."""
        self._commands += 1
        id_ = f"c{self._commands}"
        number = self._commands % len(self._doors)
        door = self._doors[number]
        began = time.monotonic()
        while True:
            try:
                answer = await ask(door, id_)
            except (OutcomeUnknown, RequestProblem) as error:
                problem = str(error)
            else:
                if answer.outcome not in UNDECIDED:
                    break
                problem = answer.outcome
            if time.monotonic() > began + DECIDED_SECONDS_MAX:
                raise Unexpected(f"{what} {id_} is not decided after {DECIDED_SECONDS_MAX:.0f} s: {problem}")
            self.repeated += 1
            await asyncio.sleep(AGAIN_SECONDS)
        seconds = time.monotonic() - began
        if answer.outcome not in EXPECTED[what]:
            raise Unexpected(f"{what} {id_}, {seconds:.1f} s after it was sent: {answer}")
        self.slowest[number] = max(self.slowest[number], seconds)
        self.outcomes[f"{what}: {answer.outcome}"] += 1
        return answer

    async def _follow(self, offer: str) -> None:
        async for _ in self._http.offer_events(offer):
            self.followed += 1
