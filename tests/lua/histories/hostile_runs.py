"""What tests share of `tests/lua/histories/test_hostile.py`."""

import random
import secrets
from collections.abc import Sequence
from typing import Any

from grabstream.lua.gate.calls import GateLimits
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand
from grabstream.models.money import AMOUNT_MAX
from grabstream.models.rules import Offer, sweep
from grabstream.models.rules.operating import fall_due
from grabstream.models.rules.settling import lapse
from grabstream.streams.deciding.sweeper import Sweeper
from tests.lua.conftest import NOW
from tests.lua.histories.books import check_books
from tests.lua.histories.hostile import Hostile, Pass, Sweep
from tests.lua.histories.promises import check_promises
from tests.lua.histories.twins import SHARDS, Twins

#: Steps between two looks at everything that Redis has, and at what a recovery makes of the events.
LOOK_STEPS, RECOVERY_STEPS = 20, 60


class TornSweeper(Sweeper):
    """Sees only some of what is due, and stops there."""

    some: int | None = None
    last_first = False
    broken_off = False

    async def _run(self, script: str, keys: list[str], at_ms: int | None, packed: bytes) -> int:
        if self.broken_off and script == "sweep":
            return 0
        return await super()._run(script, keys, at_ms, packed)

    async def _due(
        self, key: str, at_ms: int | None, most: int, *rest: int, last_first: bool = False
    ) -> list[str]:
        return torn(
            await super()._due(key, at_ms, most, *rest, last_first=last_first), self.some, self.last_first
        )


def torn(found: list[Any], some: int | None, last_first: bool) -> list[Any]:
    """As many as this of them, from one of the ends."""
    if some is None:
        return found
    return found[len(found) - min(some, len(found)) :] if last_first else found[:some]


class HostileTwins(Twins):
    """Twins that are seen to in part."""

    async def sweep_some(self, how: Sweep) -> None:
        for number, state in enumerate(self.states):
            sweeper = TornSweeper(self.client, self.keys.shard(number), self.keys.shards, 10**12)
            if how == Sweep():
                await sweeper.sweep(self.now)
                events = sweep(state, self.now)
                while any(self.now >= offer.due for offer in state.offers.values()):
                    events += sweep(state, self.now)
                await self._compare(number, events)
                continue
            sweeper.last_first = how.last_first
            now, events = max(self.now, state.time), []
            holds = [
                (grab.lapses_at, f"{offer.name}/{name}", offer, name)
                for offer in state.offers.values()
                for name, grab in offer.grabs.items()
                if grab.held and self.now >= grab.lapses_at
            ]
            sweeper.some = how.holds
            await sweeper.expire_holds(self.now)
            for _, _, offer, name in torn(
                sorted(holds, key=lambda hold: hold[:2]), how.holds, how.last_first
            ):
                events += lapse(state, offer, name, now)
            due = sorted(
                [offer for offer in state.offers.values() if self.now >= offer.due],
                key=lambda one: (one.due, one.name),
            )
            sweeper.some, sweeper.broken_off = how.offers, how.broken_off
            await sweeper.close_due(self.now)
            for offer in [] if how.broken_off else torn(due, how.offers, how.last_first):
                events += fall_due(state, offer, now)
            await self._compare(number, events)

    async def look(self, recover: bool) -> None:
        """Everything that there is, by the rules, by the lines alone, and by a recovery."""
        for number, state in enumerate(self.states):
            sweeper = Sweeper(self.client, self.keys.shard(number), self.keys.shards, 10**12)
            await sweeper.clean(self.now)  # what has retired may lie there until then
            await self._compare_state(number, state)
            check_books(self.lines[number])
            check_promises(self.lines[number])
            if recover:
                await self.compare_recovered(number)

    def check_waiting(self) -> None:
        """Units that somebody waits for go to the first of the first hundred they suffice for; nobody freezes
        an offer for the others.
        """
        for offer in self.offers.values():
            if offer.closed_reason or not offer.queue or self.now >= min(offer.due, offer.closes_at):
                continue
            payable = AMOUNT_MAX // (offer.pieces.price or 1)
            most = min(offer.units_left, payable)
            fits = [
                name
                for name in offer.queue[:100]
                if offer.grabs[name].quantity <= most or (most and offer.pieces.take == "up_to")
            ]
            assert not (offer.units_left and fits), (
                f"{fits[0]} waits for {offer.units_left} units of {offer.name} that are left"
            )

    async def decide_both(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """As twins do; one grab alone is never told that nothing is left where something is."""
        offer = self.offers.get(commands[0].offer) if len(commands) == 1 else None
        left = 0 if offer is None or offer.is_envelope else offer.units_left
        answers = await super().decide_both(commands)
        assert not (left and answers[0].outcome == "sold_out" and not answers[0].repeated), (
            f"{left} units are left: {answers[0]}"
        )
        return answers

    @property
    def offers(self) -> dict[str, Offer]:
        return {name: offer for state in self.states for name, offer in state.offers.items()}


async def play(
    client: Any, draw: random.Random, steps: int, twins: HostileTwins | None = None
) -> HostileTwins:
    """A history of so many steps, compared all along."""
    twins, hostile = twins or HostileTwins(), Hostile(draw, NOW)
    limits = GateLimits(batch_commands_max=draw.choice((1, 3, 512)), timeout_ms=30_000)
    await twins.begin_twins(client, KeySpace(f"hostile{secrets.token_hex(5)}", SHARDS), limits)
    try:
        for step in range(steps):
            found = hostile.next(twins.offers)
            if isinstance(found, Pass):
                twins.now = hostile.now = max(twins.now + found.ms, NOW - 10_000)
            elif isinstance(found, Sweep):
                await twins.sweep_some(found)
            elif found:
                await twins.decide_both(found)
            twins.check_conservation()
            twins.check_waiting()
            if step % LOOK_STEPS == LOOK_STEPS - 1:
                await twins.look(step % RECOVERY_STEPS == RECOVERY_STEPS - 1)
    except BaseException as error:
        error.add_note(f"at step {step}: {found}")
        raise
    else:
        await twins.look(True)
    finally:
        names = [name async for name in client.scan_iter(match=f"{twins.keys.prefix}*", count=1_000)]
        if names:
            await client.unlink(*names)
        await twins.gate.close()
    return twins
