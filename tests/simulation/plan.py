"""A plan: all that is drawn before a run. Who sends what when, and which faults happen when.

The rules in `models/rules` predict what each command does, so that the hostile generator finds grabs to
settle and offers to amend. The prediction is not an oracle: in the run, faults and latencies lead elsewhere.
What is taken out of a plan leaves the rest of it as it is, so that a failing one can be shortened.
"""

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Literal, NamedTuple

from grabstream.models.commands import AnyCommand, Grab, Open, basket_of, check, torn_baskets
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.models.money import Invalid
from grabstream.models.rules import Offer, ShardState, decide, decide_basket, sweep
from tests.lua.conftest import SEALER
from tests.lua.histories.hostile_history import HostileHistory, Sweep, TimePasses
from tests.simulation.machine import BEGINNING_MS

SHARDS: Final = 2
CALLERS: Final = 4
STEPS: Final = 90
#: Commands in one step; a storm of more costs time and shows nothing else.
COMMANDS_MAX: Final = 12

#: Steps at the beginning that open offers.
OPENINGS: Final = 3

Way = Literal["journaled", "decided", "topic"]


class Step(NamedTuple):
    """What a caller does: waits, then sends commands; or lets the time of day advance."""

    number: int
    caller: int
    way: Way
    gap_seconds: float
    commands: Sequence[AnyCommand]
    pass_ms: int = 0
    vanishes: bool = False


class Fault(NamedTuple):
    """Something that goes wrong, from a time on, for a time; `share` is how much, where that varies."""

    at: float
    kind: str
    target: int
    seconds: float
    share: float

    def __str__(self) -> str:
        return f"{self.kind} (target {self.target}) at {self.at:.2f} s for {self.seconds:.2f} s"


class Plan(NamedTuple):
    """A run before it begins."""

    seed: int
    steps: Sequence[Step]
    faults: Sequence[Fault]


#: Each fault, and how often it is drawn.
FAULTS: Final = {
    "worker crash": 4,
    "worker pause": 4,
    "gate crash": 1,
    "gate pause": 1,
    "redis restart": 2,
    "redis tail lost": 4,
    "redis emptied": 1,
    "redis failover": 3,
    "redis split": 4,
    "redis slow": 1,
    "redis lossy": 3,
    "redis full": 1,
    "redis clock": 1,
    "announcements lost": 1,
    "kafka away": 2,
    "kafka slow": 1,
    "kafka unacknowledged": 4,
    "kafka late": 4,
    "kafka twice": 3,
    "group rebalance": 1,
}


def plan_of(seed: int, steps: int = STEPS) -> Plan:
    """The plan of a seed."""
    made = _traffic(random.Random(f"{seed} traffic"), steps)
    seconds = sum(step.gap_seconds for step in made) / CALLERS + 0.5
    return Plan(seed, made, _faults(random.Random(f"{seed} faults"), seconds))


def _faults(draw: random.Random, seconds: float) -> list[Fault]:
    kinds, weights = list(FAULTS), list(FAULTS.values())
    # Few kinds in one run, so that some are met without all the others.
    chosen = draw.choices(kinds, weights, k=draw.choice((1, 2, 3, 4)))
    count = draw.choice((0, 2, 4, 6, 8, 12))
    found = [
        Fault(
            round(draw.uniform(0.1, seconds + 1.0), 4),
            draw.choice(chosen),
            draw.randrange(4),
            round(draw.choice((0.02, 0.2, 0.7, 2.0, 4.0)) * draw.uniform(0.5, 1.5), 4),
            draw.choice((0.02, 0.1, 0.3, 0.6)),
        )
        for _ in range(count)
    ]
    return sorted(found)


class Traffic(HostileHistory):
    """A hostile history that can be told to open offers."""

    def opening(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        """Commands that open offers."""
        commands: list[AnyCommand] = []
        for command in self._open(offers):
            with suppress(Invalid):
                check(command)
                commands.append(command)
        return commands


def _traffic(draw: random.Random, steps: int) -> list[Step]:
    """Steps of hostile histories, told to several callers."""
    hostile = Traffic(draw, BEGINNING_MS)
    states = [ShardState(number, SEALER.digests) for number in range(SHARDS)]
    ways: list[Way] = [draw.choice(("journaled", "journaled", "decided", "topic")) for _ in range(CALLERS)]
    ways[0] = "journaled"
    pace = draw.choice((0.01, 0.05, 0.15))
    made: list[Step] = []
    shift = 0
    for number in range(steps):
        there = {name: offer for state in states for name, offer in state.offers.items()}
        # Without offers there is nothing to do.
        found = hostile.opening(there) if number < OPENINGS else hostile.next(there)
        caller = draw.randrange(CALLERS) if number > 3 else 0
        gap = round(draw.expovariate(1 / pace) * CALLERS, 4)
        if isinstance(found, TimePasses):
            # Time of day never goes far back: all clocks of a system do so only together, by an operator.
            passed = max(found.ms, -2_000)
            hostile.now += passed
            shift += passed
            made.append(Step(number, caller, ways[caller], gap, (), passed))
        elif isinstance(found, Sweep):
            for state in states:
                sweep(state, hostile.now)
        elif found:
            commands = list(found)[:COMMANDS_MAX]
            if torn_baskets(commands):
                continue
            _predict(states, commands, hostile.now)
            if ways[caller] == "topic" and any(_has_secret(one) for one in commands):
                caller = 0
            made.append(Step(number, caller, ways[caller], gap, commands, vanishes=draw.random() < 0.06))
    return made


def _has_secret(command: AnyCommand) -> bool:
    """Whether a command is refused in a topic."""
    return isinstance(command, Open) and getattr(command.terms, "seed", None) is not None


def _predict(states: Sequence[ShardState], commands: Sequence[AnyCommand], now: int) -> None:
    place = 0
    while place < len(commands):
        command = commands[place]
        state = states[shard_of(campaign_of(command.offer), SHARDS)]
        basket = basket_of(command)
        if basket is not None:
            members: list[Grab] = []
            while place < len(commands) and basket_of(commands[place]) == basket:
                member = commands[place]
                assert isinstance(member, Grab)
                members.append(member)
                place += 1
            decide_basket(state, members, now, [{} for _ in members])
            continue
        drawn = {"sealed_seed": "sealed", "clock_ms": now} if isinstance(command, Open) else {}
        decide(state, command, now, drawn)
        place += 1
