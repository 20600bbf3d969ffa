"""A sale through the whole system, with kill -9 of a worker in the middle: holds end at their deadline, and
each payment is served or refunded exactly once.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from grabstream.connections.opening import gate_limits, key_space, open_redis, sealer
from grabstream.gate.gate import Gate
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Confirm, Grab, Open, Release, Return
from grabstream.models.offers import Limit, StockTerms
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.ops.verification.verifying import verify
from grabstream.settings import Settings
from tests.conftest import until
from tests.support.leases import until_relayed_by
from tests.support.projecting import rows

pytestmark = pytest.mark.long

PEOPLE, TOTAL, PRICE, HOLD_MS = 600, 200, 990, 2_500
TERMS = StockTerms(
    issuer="shop", total=TOTAL, price=PRICE, currency="CNY", hold_ms=HOLD_MS, max_per_grab=2,
    waiting_list=True, late="retake",
    limits=(Limit("user", "offer", 2), Limit("user", "day", 2)), return_restores=True,
)  # fmt: skip


class Crowd:
    """Buyers: each grabs one or two pieces, and then pays, returns, releases, or does nothing."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.random = random.Random(5)
        self.answers: list[tuple[AnyCommand, Answer]] = []

    async def send(self, command: AnyCommand) -> Answer:
        """Sends a command, again under the same id if needed, until it is decided; returns the answer."""
        while True:
            try:
                [answer] = await self._gate.decide([command], patience_ms=20_000, timeout_ms=20_000)
            except OutcomeUnknown:
                continue
            if answer.decided:
                self.answers.append((command, answer))
                return answer

    async def buyer(self, number: int) -> None:
        quantity, mood = self.random.randint(1, 2), self.random.random()
        grab = Grab(id=f"g{number}", offer="sale", user=f"u{number}", quantity=quantity, wait=mood < 0.2)
        answer = await self.send(grab)
        if answer.outcome not in ("held", "waiting"):
            return
        if mood < 0.55:
            paid = Confirm(
                id=f"c{number}",
                offer="sale",
                grab=grab.id,
                payment=f"pay{number}",
                paid=PRICE * quantity,
                currency="CNY",
            )
            first, again = await asyncio.gather(self.send(paid), self.send(paid))
            assert (first.outcome, first.seq) == (again.outcome, again.seq)
            if mood < 0.1 and first.outcome == "confirmed":
                await self.send(Return(id=f"b{number}", offer="sale", grab=grab.id))
        elif mood < 0.7:
            await self.send(Release(id=f"r{number}", offer="sale", grab=grab.id))


async def test_a_sale_is_correct_when_its_worker_is_killed(
    system: Settings, worker: Callable[..., Any]
) -> None:
    first = worker(system, "decide,relay,sweep")
    worker(system, "project,publish")
    await until_relayed_by(system, first)
    client = open_redis(system)
    gate = Gate(client, key_space(system), sealer(system), gate_limits(system))
    gate.start()
    crowd = Crowd(gate)
    try:
        assert (await crowd.send(Open(id="open", offer="sale", terms=TERMS))).outcome == "opened"
        buying = asyncio.gather(*map(crowd.buyer, range(PEOPLE)))
        await until(lambda: len(crowd.answers) > PEOPLE // 2 or buying.done(), 30, "half of the crowd")
        first.kill()
        killed_at = time.monotonic()
        second = worker(system, "decide,relay,sweep")
        await until_relayed_by(system, second)
        takeover_ms = (time.monotonic() - killed_at) * 1_000
        await buying
        state = key_space(system).shard(key_space(system).shard_of_offer("sale")).offer("sale")

        async def nothing_is_held() -> bool:
            return await client.hget(state, "held") == b"0"  # type: ignore[no-any-return]

        await until(nothing_is_held, 30, "the end of all holds")
        checks = await verify(system)
    finally:
        await gate.close()
        await client.aclose()
    assert not {check.name: check.problems for check in checks if not check.passed}
    await _check_books(system, crowd, takeover_ms)


async def _check_books(settings: Settings, crowd: Crowd, takeover_ms: float) -> None:
    [(left, given, total)] = await rows(settings, "SELECT units_left, given, total FROM offers")
    assert (left + given, total) == (TOTAL, TOTAL)
    taken = {
        grab: (taken, state)
        for grab, taken, state in await rows(settings, "SELECT grab, taken, state FROM grabs")
    }
    assert sum(units for units, _ in taken.values()) == given
    assert max(Counter(user for (user,) in await rows(settings, "SELECT user_id FROM grabs")).values()) == 1
    payments = {
        payment: (state, amount)
        for payment, state, amount in await rows(settings, "SELECT payment, state, amount FROM payments")
    }
    outcomes = Counter(answer.outcome for _, answer in crowd.answers)
    assert outcomes["confirmed"]
    # On a busy machine, all holds may end before their buyers release them.
    assert any(isinstance(command, Release) for command, _ in crowd.answers)
    for command, answer in crowd.answers:
        if isinstance(command, Confirm):
            served = "served" if answer.outcome == "confirmed" else "refund_due"
            assert payments[command.payment or ""] == (served, command.paid), answer
    # No hold ended before its deadline; each ended within a second after it, or after the takeover from the
    # killed worker.
    late = await rows(
        settings,
        "SELECT max(e.at - (h.body::jsonb->>'deadline_at')::bigint) FROM events AS e JOIN events AS h "
        "ON h.type = 'grab.held' AND h.body::jsonb->>'grab' = e.body::jsonb->>'grab' "
        "WHERE e.type = 'grab.released' AND e.body::jsonb->>'reason' = 'expired'",
    )
    assert 0 <= late[0][0] < 1_000 + takeover_ms + 30_000
