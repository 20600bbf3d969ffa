"""Plays a hostile history by Lua and by the rules, with sweeps that may stop early, and compares both."""

import random
import secrets
from collections.abc import Sequence
from typing import Any

from grabstream.gate.calls import GateLimits
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand
from grabstream.models.rules import sweep
from grabstream.models.rules.operating import fall_due
from grabstream.models.rules.settling import lapse
from grabstream.streams.deciding.sweeper import Sweeper
from tests.lua.histories.books import check_books
from tests.lua.histories.hostile_history import HostileHistory, Sweep, TimePasses
from tests.lua.histories.promises import check_promises
from tests.lua.histories.twins import SHARDS, Twins
from tests.support.shards import NOW

#: Steps between two comparisons of everything in Redis with the rules, and with a recovery from the events.
CHECK_STEPS, RECOVERY_STEPS = 20, 60


class PartialSweeper(Sweeper):
    """A sweeper that reads only `some` of what is due, and with `broken_off` sweeps no offers."""

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
        return only_some(
            await super()._due(key, at_ms, most, *rest, last_first=last_first), self.some, self.last_first
        )


def only_some(due: list[Any], some: int | None, last_first: bool) -> list[Any]:
    """The first `some` items, or the last ones; None: all."""
    if some is None:
        return due
    return due[len(due) - min(some, len(due)) :] if last_first else due[:some]


class HostileTwins(Twins):
    """Twins whose sweeps may handle only a part of what is due."""

    async def sweep_some(self, how: Sweep) -> None:
        """Makes this sweep by Lua and by the rules, and compares the events."""
        for number, state in enumerate(self.states):
            sweeper = PartialSweeper(self.client, self.keys.shard(number), self.keys.shards, 10**12)
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
            for _, _, offer, name in only_some(
                sorted(holds, key=lambda hold: hold[:2]), how.holds, how.last_first
            ):
                events += lapse(state, offer, name, now)
            due = sorted(
                [offer for offer in state.offers.values() if self.now >= offer.due],
                key=lambda offer: (offer.due, offer.name),
            )
            sweeper.some, sweeper.broken_off = how.offers, how.broken_off
            await sweeper.close_due(self.now)
            for offer in [] if how.broken_off else only_some(due, how.offers, how.last_first):
                events += fall_due(state, offer, now)
            await self._compare(number, events)

    async def check_all(self, recover: bool) -> None:
        """Compares Redis with the rules and, if `recover`, with a recovery; checks books and promises."""
        for number, state in enumerate(self.states):
            sweeper = Sweeper(self.client, self.keys.shard(number), self.keys.shards, 10**12)
            await sweeper.clean(self.now)  # data of retired offers may stay until it is cleaned
            await self._compare_state(number, state)
            check_books(self.lines[number])
            check_promises(self.lines[number])
            if recover:
                await self.compare_recovered(number)

    async def decide_both(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """As twins do; also checks that a single grab is not `sold_out` while units are left."""
        offer = self.offers.get(commands[0].offer) if len(commands) == 1 else None
        left = 0 if offer is None or offer.is_envelope else offer.units_left
        answers = await super().decide_both(commands)
        assert not (left and answers[0].outcome == "sold_out" and not answers[0].repeated), (
            f"{left} units are left: {answers[0]}"
        )
        return answers


async def play(
    client: Any, draw: random.Random, steps: int, twins: HostileTwins | None = None
) -> HostileTwins:
    """Plays a history of `steps` steps, with comparisons after every step; returns its twins."""
    twins, history = twins or HostileTwins(), HostileHistory(draw, NOW)
    limits = GateLimits(batch_commands_max=draw.choice((1, 3, 512)), timeout_ms=30_000)
    await twins.begin_twins(client, KeySpace(f"hostile{secrets.token_hex(5)}", SHARDS), limits)
    try:
        for step in range(steps):
            next_step = history.next(twins.offers)
            if isinstance(next_step, TimePasses):
                twins.now = history.now = max(twins.now + next_step.ms, NOW - 10_000)
            elif isinstance(next_step, Sweep):
                await twins.sweep_some(next_step)
            elif next_step:
                await twins.decide_both(next_step)
            twins.check_conservation()
            twins.check_waiting()
            if step % CHECK_STEPS == CHECK_STEPS - 1:
                await twins.check_all(step % RECOVERY_STEPS == RECOVERY_STEPS - 1)
    except BaseException as error:
        error.add_note(f"at step {step}: {next_step}")
        raise
    else:
        await twins.check_all(True)
    finally:
        names = [name async for name in client.scan_iter(match=f"{twins.keys.prefix}*", count=1_000)]
        if names:
            await client.unlink(*names)
        await twins.gate.close()
    return twins
