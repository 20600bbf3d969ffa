"""Asks the payment side, shortly before holds end, which of them were paid.

A paid hold is confirmed, by the same command that follows from a receipt, and one that will not be paid is
released at once. All others end as without the question, also unpaid ones: their buyers have until then.
There are no questions about holds for which nothing is due, which the payment side does not know, nor about
short ones, whose buyer may not have started to pay. Asking is a separate task from the one that ends holds,
which never waits for it: with a payment side that hangs, holds end at their time.

A hold is asked for once, by the worker that sweeps its shard. Two workers that do so at the same time ask
twice and send the same commands, of which the second gets the first answer.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from grabstream.crypto.signing import SigningKeys
from grabstream.gate.gate import Gate
from grabstream.lua.keys import ShardKeys, ids_in
from grabstream.lua.server import time_ms_of
from grabstream.models.commands import Confirm, Release
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.models.payments import (
    QUERY_HOLDS_MAX,
    AskedHold,
    PaymentState,
    command_of,
    receipt_of,
    release_for_unpaid,
)

log = logging.getLogger(__name__)

#: Questions of a shard that wait for their answers at the same time.
QUERIES_AT_ONCE_MAX: Final = 8

#: How often commands with an unknown outcome are sent; a repeat with the same ids is safe.
ATTEMPTS_MAX: Final = 3

#: What the payment side knows of some holds, at most QUERY_HOLDS_MAX; nothing if it gives no answer in time.
Ask = Callable[[Sequence[AskedHold]], Awaitable[list[PaymentState]]]
Holds = dict[tuple[str, str], AskedHold]


class PaymentSide(NamedTuple):
    """The address of the payment side, the keys that sign questions and verify answers, the time limit of an
    answer, and the asking system.
    """

    url: str
    keys: SigningKeys
    timeout_seconds: float
    audience: str = ""


def lead_ms(side: PaymentSide) -> int:
    """How long before the end of a hold it is asked for: two time limits, and a second for deciding."""
    return round(2_000 * side.timeout_seconds) + 1_000


def hold_ms_min(side: PaymentSide) -> int:
    """Minimum length of the holds of an offer that are asked for: buyers have half of it before."""
    return 2 * lead_ms(side)


class _PaymentRules(msgspec.Struct):
    """Of the rules of an offer, as its key in Redis has them (ms, minor units)."""

    hold_ms: int = 0
    price: int = 0


_decode_rules = msgspec.msgpack.Decoder(_PaymentRules).decode


def _rules_of(packed: bytes) -> _PaymentRules:
    """Its rules; where they are damaged, those of an offer that is not asked for."""
    try:
        return _decode_rules(packed)
    except msgspec.MsgspecError:
        return _PaymentRules()


class HoldQueries:
    """Asks about the holds of one shard that end soon, in the order of their ends, once for each end; for
    offers with a price whose holds last at least `hold_ms_min`.
    """

    def __init__(
        self, redis: Any, keys: ShardKeys, gate: Gate, ask: Ask, lead_ms: int, hold_ms_min: int = 0
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._gate = gate
        self._ask = ask
        self._lead_ms = lead_ms
        self._hold_ms_min = hold_ms_min
        #: The latest end asked for, and the holds (`<offer>/<grab>`) with this end asked for.
        self._asked_until = 0
        self._asked_then: set[bytes] = set()

    async def next_ms(self, now: int) -> int | None:
        """When to ask next (ms since 1970 UTC), None if no hold is left."""
        found = await self._after(now, "+inf", 1)
        return found[0][1] - self._lead_ms if found else None

    async def ask_all(self) -> int:
        """Asks about all holds that end soon and were not examined; returns their number."""
        total = 0
        while asked := await self.ask_some():
            total += asked
        return total

    async def ask_some(self) -> int:
        """Asks about holds that end soon, a bounded number, and sends the commands that follow; returns the
        number of holds examined.
        """
        looked_at = 0
        questions: list[Holds] = []
        while len(questions) < QUERIES_AT_ONCE_MAX and (holds := await self._next_holds()):
            looked_at += len(holds)
            if asked := await self._to_ask(holds):
                questions.append(asked)
        answers = await asyncio.gather(*(self._ask(list(holds.values())) for holds in questions))
        for holds, states in zip(questions, answers, strict=True):
            await self._settle(holds, states)
        return looked_at

    async def _to_ask(self, holds: Holds) -> Holds:
        """Those of some holds that the payment side is asked about, by the rules of their offers."""
        offers = sorted({offer for offer, _ in holds})
        packed = await asyncio.gather(
            *(self._redis.hget(self._keys.offer(offer), "rules") for offer in offers)
        )
        # An offer that has retired meanwhile has no rules, and no holds.
        rules = {offer: _rules_of(one) for offer, one in zip(offers, packed, strict=True) if one}
        return {
            (offer, grab): hold
            for (offer, grab), hold in holds.items()
            if offer in rules and rules[offer].price > 0 and rules[offer].hold_ms >= self._hold_ms_min
        }

    async def _next_holds(self) -> Holds:
        """The next holds to ask for. They are not asked for again, whatever comes of it."""
        now = await time_ms_of(self._redis, self._keys.state)
        found = await self._after(now, now + self._lead_ms, QUERY_HOLDS_MAX)
        if found:
            until = found[-1][1]
            then = {member for member, end in found if end == until}
            self._asked_then = self._asked_then | then if until == self._asked_until else then
            self._asked_until = until
        holds = {}
        for member, ends_at in found:
            # The sweeper reports a member that is damaged.
            if len(ids := ids_in(member)) == 2:
                offer, grab = ids
                holds[offer, grab] = AskedHold(offer=offer, grab=grab, ends_at=ends_at)
        return holds

    async def _after(self, now: int, until: int | str, most: int) -> list[tuple[bytes, int]]:
        """Holds that were not asked for, with their ends, in this order; without those that have ended."""
        least = max(self._asked_until, now + 1)
        known = self._asked_then if least == self._asked_until else set()
        rows = await self._redis.zrangebyscore(
            self._keys.holds, least, until, start=0, num=most + len(known), withscores=True
        )
        members = [(member, int(score)) for member, score in rows if score < math.inf]
        return [
            (member, end) for member, end in members if not (end == self._asked_until and member in known)
        ][:most]

    async def _settle(self, holds: Holds, states: Sequence[PaymentState]) -> None:
        if commands := await self._commands_of(holds, states):
            await self._execute(commands)

    async def _commands_of(self, holds: Holds, states: Sequence[PaymentState]) -> "list[Confirm | Release]":
        """The commands that follow from what the payment side knows."""
        commands: list[Confirm | Release] = []
        unpaid = []
        for state in states:
            if state.status == "paid":
                commands.append(command_of(receipt_of(state)))
            elif state.status == "unpaid" and state.final:
                unpaid.append(holds[state.offer, state.grab])
        if unpaid:
            # A hold that was extended meanwhile is asked for again.
            members = [f"{hold.offer}/{hold.grab}" for hold in unpaid]
            ends = await self._redis.zmscore(self._keys.holds, members)
            commands += [
                release_for_unpaid(hold)
                for hold, end in zip(unpaid, ends, strict=True)
                if end is not None and int(end) == hold.ends_at
            ]
        return commands

    async def _execute(self, commands: "list[Confirm | Release]") -> None:
        # A shard that is fenced or busy decides again in a moment, as a rule before the holds end.
        until = time.monotonic() + self._lead_ms / 1000
        for attempt in range(1, ATTEMPTS_MAX + 1):
            patience_ms = max(0, round((until - time.monotonic()) * 1000))
            try:
                answers = await self._gate.decide(
                    commands, "decided", patience_ms=patience_ms, from_system=True
                )
                break
            except OutcomeUnknown as error:
                if attempt == ATTEMPTS_MAX:
                    # A hold that is still there ends at its time, and receipts are repeated.
                    log.warning(
                        "shard %d: it is unknown whether the commands from answers of the payment side "
                        "were decided: %s",
                        self._keys.shard, error,
                    )  # fmt: skip
                    return
        refused = [answer for answer in answers if not answer.positive]
        if refused:
            log.warning(
                "shard %d: %d of %d commands that follow from answers of the payment side were refused, the "
                "first: %s of %s: %s %s",
                self._keys.shard, len(refused), len(commands), refused[0].id, refused[0].offer,
                refused[0].outcome, refused[0].message or "",
            )  # fmt: skip
