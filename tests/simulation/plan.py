"""A plan: all that is drawn before a run. The senders, commands and faults, with their times.

The rules in `models/rules` predict what each command does, so that the hostile generator finds grabs to
settle and offers to amend. The prediction is not an oracle: in the run, faults and latencies lead elsewhere.
What is taken out of a plan leaves the rest of it as it is, so that a failing one can be shortened.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from msgspec.structs import replace

from grabstream.models.calendar import DAY_MS
from grabstream.models.commands import (
    AnyCommand,
    Confirm,
    Grab,
    GrabCommand,
    Open,
    basket_of,
    check,
    torn_baskets,
)
from grabstream.models.identifiers import campaign_of, shard_of
from grabstream.models.money import Invalid
from grabstream.models.offers import Terms
from grabstream.models.rules import Offer, ShardState, decide, decide_basket, sweep
from tests.lua.histories.hostile_history import HostileHistory, Sweep, TimePasses
from tests.simulation.machine import BEGINNING_MS
from tests.simulation.releases import RELEASES
from tests.simulation.scenes import Moment, of_neighbours, of_one_id, scene_of
from tests.support.shards import SEALER

PREFIX: Final = "sim"
SHARDS: Final = 2
#: How many workers a run may have: a third one waits for leases, and takes them over.
WORKERS: Final = (2, 2, 2, 3)
#: On average, one in this many callbacks of processes finds the machine busy, in plans with faults (0: none).
BUSY_EVERY: Final = (0, 0, 3_000, 400)
GATES: Final = 2
CALLERS: Final = 4
#: One in this many steps whose commands are refused with a whole call is not sent again.
GIVES_UP_EVERY: Final = 3
#: How many commands, or lists of commands, a history has.
LENGTHS: Final = (40, 60, 80)
#: Shares of plans in which the books are written, and of these in which they are verified.
BOOKS_SHARE: Final = 0.2
VERIFIED_SHARE: Final = 0.3
#: Share of plans in which a caller plays a scene.
SCENES_SHARE: Final = 0.25
#: Share of plans in which the journal of one shard stands still while commands for all are in the topic, and
#: nothing else goes wrong.
NEIGHBOURS_SHARE: Final = 0.03
#: Share of plans in which programs of others write to the topics.
STRANGERS_SHARE: Final = 0.2
#: Share of plans in which relays sign, and a writer without a key writes to the journal.
FORGER_SHARE: Final = 0.1
#: Share of the plans with a verifier, and of those with books, that have three meetings more, which only they
#: can have.
RARE_MEETING_SHARE: Final = 0.6
#: Share of the plans in which shards are found in an older layout, and pairs of users grab under one id.
OUTDATED_SHARE: Final = 0.13
#: Share of these in which Redis loses a part of what it has soon after.
OUTDATED_LOST_SHARE: Final = 0.5
#: Commands in one step; a storm of more costs time and shows nothing else.
COMMANDS_MAX: Final = 12
#: The chance that each way of sending commands has a caller.
ALL_WAYS: Final = 0.6
#: The chance that a step follows the one before it at once.
BURST: Final = 0.3
#: The chance that a list continues with the next commands of the history.
LONGER: Final = 0.3

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

    def __str__(self) -> str:
        head = f"step {self.number}: caller {self.caller} after {self.gap_seconds:.3f} s"
        if not self.commands:
            return f"{head}: {self.pass_ms} ms pass"
        return f"{head} ({self.way}{', vanishes' if self.vanishes else ''}): " + "; ".join(
            map(str, self.commands)
        )


class Fault(NamedTuple):
    """Something that goes wrong, from a time on, for a time; `share` is how much, where that varies.

    With `step`, it begins when a process next reaches this step of its code. If a worker, or a gate, crashes
    or stops then, it is the one that has reached the step.
    """

    at: float
    kind: str
    target: int
    seconds: float
    share: float
    step: str = ""

    def __str__(self) -> str:
        where = f", at the step {self.step}" if self.step else ""
        return f"{self.kind} (target {self.target}) at {self.at:.2f} s{where} for {self.seconds:.2f} s"


class Plan(NamedTuple):
    """A run before it begins."""

    seed: int
    steps: Sequence[Step]
    faults: Sequence[Fault]
    #: Events in a record of the journal; an entry of the outbox may have more.
    block_events_max: int = 7
    #: Whether workers also write the read models and events; whether one verifies them.
    has_books: bool = False
    is_verified: bool = False
    workers: int = 2
    #: One in this many callbacks finds the machine busy; 0: none does.
    busy_every: int = 0
    #: Whether deciders read few records beyond those that wait.
    has_small_backlogs: bool = True

    @property
    def signs(self) -> bool:
        """Whether relays sign the journal."""
        return any(fault.kind == "journal forged" for fault in self.faults)


#: Each fault, and how often it is drawn.
FAULTS: Final = {
    "worker crash": 4,
    "worker pause": 4,
    "worker stop": 3,
    "gate crash": 1,
    "gate pause": 1,
    "redis restart": 2,
    "redis tail lost": 4,
    "redis emptied": 1,
    "redis failover": 3,
    "redis split": 4,
    "redis divided": 2,
    "redis there and back": 2,
    "redis slow": 1,
    "redis late": 2,
    "redis lossy": 3,
    "redis full": 1,
    "redis clock": 1,
    "redis poisoned": 2,
    "redis breaks off": 2,
    "announcements lost": 1,
    "kafka away": 2,
    "kafka leaderless": 2,
    "kafka slow": 1,
    "kafka lagging": 1,
    "kafka unacknowledged": 4,
    "kafka late": 4,
    "kafka twice": 3,
    "group rebalance": 1,
}

#: Faults of what writes the books, in plans that have them.
FAULTS_OF_BOOKS: Final = {
    "postgresql away": 3,
    "postgresql tail lost": 3,
    "postgresql slow": 1,
    "postgresql lossy": 4,
    "postgresql gives up": 2,
    "postgresql locked": 2,
    "faust stalls": 1,
    "faust skips": 2,
    "faust repeats": 2,
    "read model rebuilt": 4,
}

#: What other programs do; the last one in plans with books.
FAULTS_OF_STRANGERS: Final = ("commands malformed", "events of others")

#: The step at which a process sends commands that follow others of the same callers.
DECISION: Final = "before a decision that follows another"
#: The step at which a recovery applies more events, after its own checkpoint.
NEXT_APPLY: Final = "before the next apply"


class Part(NamedTuple):
    """A fault of a meeting: one of these kinds, at one of these steps, up to a number of seconds after the
    beginning of the meeting, for a time within these seconds.
    """

    kinds: Sequence[str]
    seconds: tuple[float, float]
    after: float = 0.0
    share: float = 0.6
    steps: Sequence[str] = ("",)


_LOSSES: Final = (
    *("redis tail lost", "redis tail lost", "redis failover", "redis split", "redis divided"),
    *("redis there and back", "redis emptied"),
)
_OWNER_STEPS: Final = ("relay.took_over", "relay.acknowledged", "relay.trimmed", "before trim")
_RECOVERY_STEPS: Final = (
    *("recovery.applied", "recovery.wiped", "before wipe", "before fence", "before apply"),
    *("before reconcile", "before trim", "before raise_term", NEXT_APPLY),
)
#: Faults that do harm together, within a short time, and that seldom meet by chance.
MEETINGS: Final[Sequence[Sequence[Part]]] = (
    # An owner stops between two of its steps, and another takes over before it continues.
    (Part(("worker pause", "worker pause", "worker crash"), (1.5, 4.0), steps=_OWNER_STEPS),),
    # A recovery stops between two of its steps, and another owner ends it.
    (
        Part(_LOSSES, (0.02, 1.0)),
        Part(("worker pause", "worker pause", "worker crash"), (1.5, 4.0), steps=_RECOVERY_STEPS),
    ),
    # A record is appended after its sender has given up, and Redis has lost what it says.
    (
        Part(("kafka late",), (0.05, 0.4), share=1.0, steps=("", "relay.took_over", "relay.trimmed")),
        Part(_LOSSES, (0.02, 0.2), after=0.1, steps=("", "relay.took_over")),
    ),
    # Two masters live, and the readers of the journal lag.
    (Part(("redis divided",), (2.0, 4.0)), Part(("kafka lagging",), (4.0, 7.0))),
    # A reply arrives when its decision is lost.
    (Part(("redis late",), (0.3, 1.5)), Part(_LOSSES, (0.02, 0.2), after=0.5)),
    # Redis loses what it has just decided, and nothing of it was journaled.
    (
        Part(("kafka away", "kafka away", "worker pause"), (0.2, 0.8), steps=("", "relay.trimmed")),
        Part(_LOSSES, (0.02, 0.2), after=0.3, steps=(DECISION,)),
    ),
    # The same, and callers are not notified of the recovery.
    (
        Part(("announcements lost",), (2.0, 4.0)),
        Part(("kafka away",), (0.1, 0.3), steps=(DECISION,)),
        Part(_LOSSES, (0.02, 0.1), after=0.01, steps=(DECISION,)),
    ),
    # A recovery is interrupted after its own checkpoint, in the middle of the journal.
    *(
        (
            Part((lost, "redis failover"), (0.02, 0.2)),
            Part(("worker crash", "worker pause"), (0.3, 4.0), steps=(NEXT_APPLY,)),
        )
        for lost in ("redis tail lost", "redis emptied")
    ),
    # Two masters live, and what is acknowledged has no offset.
    (
        Part(("redis divided",), (2.0, 4.0)),
        Part(("kafka lagging",), (4.0, 7.0)),
        Part(("kafka twice",), (4.0, 7.0), share=0.8),
    ),
    # The journal of one shard stands still, and nothing else is wrong.
    (Part(("kafka leaderless",), (0.5, 3.0)),),
    # A reply is lost, and then Redis refuses for longer than a caller waits.
    (
        Part(("redis lossy",), (0.05, 0.4), share=1.0, steps=("", DECISION)),
        Part(("redis full",), (0.5, 3.0), after=0.2),
    ),
)
_COMMITTED: Final = ("ledger.committed", "balances.committed", "audit.committed", "events.committed")
_LOST_BOOKS: Final = ("postgresql away", "postgresql tail lost", "postgresql tail lost")
#: Many events are published at once, and some are not taken.
MEETING_OF_PUBLISHER: Final[Sequence[Part]] = (
    Part(("kafka away", "postgresql away", "worker pause"), (0.5, 2.0)),
    Part(("kafka late",), (1.0, 3.0), after=0.5, steps=("", "events.committed")),
)
#: Redis loses decisions that the verifier has seen, and that were not journaled.
MEETING_OF_VERIFIER: Final[Sequence[Part]] = (
    Part(("kafka away",), (1.0, 2.5)),
    Part(_LOSSES, (0.02, 0.2), after=2.0),
)
#: Faults that do harm together to what writes the books.
MEETINGS_OF_BOOKS: Final[Sequence[Sequence[Part]]] = (
    # A process that has written some read models stops, and others get its partitions before it continues.
    (Part(("worker pause", "worker pause", "worker crash"), (4.0, 14.0), steps=_COMMITTED),),
    # Read models go back while they are read or followed.
    (
        Part(("read model rebuilt",), (0.3, 1.0)),
        Part((*_LOST_BOOKS, "worker crash"), (0.1, 1.0), steps=("rebuild.committed", "rebuild.finished")),
    ),
    # A snapshot that a recovery needs is of an earlier time than the journal, or goes away.
    (
        Part(_LOST_BOOKS, (0.1, 0.5), steps=_COMMITTED),
        Part(_LOSSES, (0.02, 0.5), after=0.8, steps=("", *_COMMITTED)),
    ),
    # What was published is not known to have been.
    (
        Part(("kafka unacknowledged", "kafka twice", "kafka late"), (0.3, 1.0), steps=("", *_COMMITTED)),
        Part(("worker crash", "worker pause", "group rebalance", "postgresql away"), (0.3, 12.0), after=0.5),
    ),
    MEETING_OF_PUBLISHER,
    MEETING_OF_VERIFIER,
)


def plan_of(seed: int, length: int | None = None) -> Plan:
    """The plan of a seed; with `length`, another one of this seed."""
    length = length or random.Random(f"{seed} length").choice(LENGTHS)
    made = _traffic(random.Random(f"{seed} traffic"), length)
    seconds = sum(step.gap_seconds for step in made) / CALLERS + 0.5
    draw = random.Random(f"{seed} faults")
    faults = _faults(draw, seconds, FAULTS, MEETINGS)
    block_events_max = draw.choice((2, 3, 7))
    draw = random.Random(f"{seed} books")
    has_books = draw.random() < BOOKS_SHARE
    if has_books:
        faults = sorted([*faults, *_faults(draw, seconds, FAULTS_OF_BOOKS, MEETINGS_OF_BOOKS)])
    is_verified = has_books and draw.random() < VERIFIED_SHARE
    draw = random.Random(f"{seed} strangers")
    if draw.random() < STRANGERS_SHARE:
        kinds = FAULTS_OF_STRANGERS if has_books else FAULTS_OF_STRANGERS[:1]
        faults += [
            Fault(round(draw.uniform(0.1, seconds), 4), kind, 0, round(draw.uniform(0.1, 2.0), 4), 1.0)
            for kind in kinds
        ]
        faults.sort()
    draw = random.Random(f"{seed} scenes")
    if draw.random() < SCENES_SHARE:
        made = _with_scene(made, draw, scene_of(draw))
    draw = random.Random(f"{seed} neighbours")
    has_neighbours = draw.random() < NEIGHBOURS_SHARE
    if has_neighbours:
        made = _with_neighbours(made, draw)
        faults = [Fault(0.6, "kafka leaderless", draw.randrange(SHARDS), 2.0, 1.0)]
    draw = random.Random(f"{seed} machine")
    workers, busy_every = draw.choice(WORKERS), draw.choice(BUSY_EVERY) if faults else 0
    draw = random.Random(f"{seed} rare meeting")
    rare: Sequence[Part] = ()
    if is_verified:
        rare = MEETING_OF_VERIFIER
    elif has_books:
        rare = MEETING_OF_PUBLISHER
    if rare and not has_neighbours and draw.random() < RARE_MEETING_SHARE:
        faults = sorted([*faults, *(fault for _ in range(3) for fault in _meeting(draw, seconds, rare))])
    draw = random.Random(f"{seed} layout outdated")
    if draw.random() < OUTDATED_SHARE and not has_neighbours and len(RELEASES) == 1:
        at = round(draw.uniform(0.1, seconds), 4)
        outdated = [Fault(at, "layout outdated", 0, 0.3, 1.0)]
        if draw.random() < OUTDATED_LOST_SHARE:
            lost_at = round(at + draw.uniform(0.2, 2.0), 4)
            outdated.append(Fault(lost_at, draw.choice(_LOSSES), draw.randrange(4), 0.2, 0.6))
        faults = sorted([*faults, *outdated])
        made = _with_scene(made, draw, of_one_id(draw))
    draw = random.Random(f"{seed} forger")
    if draw.random() < FORGER_SHARE and not has_neighbours and len(RELEASES) == 1:
        forged = [
            Fault(round(draw.uniform(0.1, seconds), 4), "journal forged", draw.randrange(SHARDS), 0.5, 1.0)
            for _ in range(4)
        ]
        faults = sorted([*faults, *forged])
    return Plan(
        seed,
        made,
        faults,
        block_events_max,
        has_books,
        is_verified,
        workers,
        busy_every,
        has_small_backlogs=not has_neighbours,
    )


def _faults(
    draw: random.Random, seconds: float, of: Mapping[str, int], meeting: Sequence[Sequence[Part]]
) -> list[Fault]:
    kinds, weights = list(of), list(of.values())
    # Few kinds in one run, so that some are met without all the others.
    chosen = draw.choices(kinds, weights, k=draw.choice((1, 2, 3, 4)))
    meetings = draw.choice((0, 0, 1, 2, 3))
    count = draw.choice((0, 0, 2, 4) if meetings else (0, 2, 4, 6, 8, 12))
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
    parts = draw.choice(meeting)
    for _ in range(meetings):
        found += _meeting(draw, seconds, parts)
    return sorted(found)


def _meeting(draw: random.Random, seconds: float, parts: Sequence[Part]) -> list[Fault]:
    at = draw.uniform(0.1, seconds)
    return [
        Fault(
            round(at + draw.uniform(0.0, part.after), 4),
            draw.choice(part.kinds),
            draw.randrange(4),
            round(draw.uniform(*part.seconds), 4),
            part.share,
            draw.choice(part.steps),
        )
        for part in parts
    ]


def _ends_soon(terms: Terms, now: int) -> bool:
    return terms.closes_at is not None and terms.closes_at < now + 60_000


#: What most offers of a history have in common: rare terms meet each other only where they are wanted. Some
#: histories have no such theme.
THEMES: Final[tuple[Callable[[Any, int], bool] | None, ...]] = (
    None,
    None,
    None,
    lambda terms, now: getattr(terms, "waiting_list", False) and terms.total <= 5,
    lambda terms, now: getattr(terms, "waiting_list", False) and _ends_soon(terms, now),
    lambda terms, now: getattr(terms, "codes", False) and terms.hold_ms,
    lambda terms, now: getattr(terms, "codes", False) and terms.hold_ms and _ends_soon(terms, now),
    lambda terms, now: getattr(terms, "late", "") == "retake" and terms.limits and terms.hold_ms <= 6_000,
    lambda terms, now: terms.audience == "ticket",
    lambda terms, now: _ends_soon(terms, now) and terms.retire_after_ms <= DAY_MS,
    lambda terms, now: getattr(terms, "valid_until", None) is not None and _ends_soon(terms, now),
)
#: How many terms are drawn to find some of the theme.
TRIES: Final = 40


class Traffic(HostileHistory):
    """A hostile history that can be told to open offers. Most of its offers follow a theme, and payments come
    again, with the same or another amount.
    """

    def __init__(self, draw: random.Random, now: int) -> None:
        super().__init__(draw, now)
        self._theme = self.one_of(*THEMES)

    def terms(self, name: str) -> Terms:
        terms = super().terms(name)
        if self._theme is None or self.rarely(5):
            return terms
        for _ in range(TRIES):
            if self._theme(terms, self.now):
                break
            terms = super().terms(name)
        return terms

    def _repeat(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        paid = [one for sent in self.sent for one in sent if isinstance(one, Confirm) and one.payment]
        if not paid or not self.rarely(5):
            return super()._repeat(offers)
        first = self.one_of(*paid[-6:])
        paid_now = first.paid + self.one_of(0, 1)
        return [
            replace(
                first, id=self.id(), paid=paid_now, currency=(first.currency or "CNY") if paid_now else None
            )
        ]

    def opening(self, offers: Mapping[str, Offer]) -> list[AnyCommand]:
        """Commands that open offers."""
        commands: list[AnyCommand] = []
        for command in self._open(offers):
            with suppress(Invalid):
                check(command)
                commands.append(command)
        return commands


def _traffic(draw: random.Random, steps: int) -> list[Step]:
    """Steps of hostile histories, given to several callers."""
    hostile = Traffic(draw, BEGINNING_MS)
    states = [ShardState(number, SEALER.digests) for number in range(SHARDS)]
    ways: list[Way] = [draw.choice(("journaled", "journaled", "decided", "topic")) for _ in range(CALLERS)]
    if draw.random() < ALL_WAYS:
        ways[1:] = draw.sample(("journaled", "decided", "topic"), 3)
    ways[0] = "journaled"
    pace = draw.choice((0.01, 0.05, 0.15))
    made: list[Step] = []
    shift = 0
    for number in range(steps):
        there = {name: offer for state in states for name, offer in state.offers.items()}
        # Without offers there is nothing to do.
        found = hostile.opening(there) if number < OPENINGS else hostile.next(there)
        caller = draw.randrange(CALLERS) if number > 3 else 0
        # Some follow each other at once.
        gap = 0.0 if draw.random() < BURST else round(draw.expovariate(1 / pace) * CALLERS, 4)
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
            commands = _list(found)
            _predict(states, commands, hostile.now)
            # A list may continue with what follows from its beginning.
            while draw.random() < LONGER and len(commands) < COMMANDS_MAX // 2:
                there = {name: offer for state in states for name, offer in state.offers.items()}
                more = hostile.next(there)
                if not more or isinstance(more, TimePasses | Sweep):
                    break
                added = _list(more)
                if torn_baskets([*commands, *added]):
                    break
                _predict(states, added, hostile.now)
                commands += added
            if not commands:
                continue
            if ways[caller] == "topic" and any(_has_secret(one) for one in commands):
                caller = 0
            made.append(Step(number, caller, ways[caller], gap, commands, vanishes=draw.random() < 0.06))
    return made


def _with_scene(steps: Sequence[Step], draw: random.Random, scene: Sequence[Moment]) -> list[Step]:
    """The steps, and those of a scene between them, which the first caller plays."""
    places = sorted(draw.randrange(len(steps) + 1) for _ in scene)
    joined = list(steps)
    for index, (place, moment) in reversed(list(enumerate(zip(places, scene, strict=True)))):
        # Above all other numbers; who gives up goes by the number.
        number = GIVES_UP_EVERY * (max(LENGTHS) + index) + 1
        joined.insert(
            place, Step(number, 0, "journaled", moment.gap_seconds, moment.commands, moment.pass_ms)
        )
    return joined


def _with_neighbours(steps: Sequence[Step], draw: random.Random) -> list[Step]:
    """The steps, where the last caller only grabs in all shards, by the topic."""
    others = [step for step in steps if step.caller != CALLERS - 1]
    number = GIVES_UP_EVERY * (max(LENGTHS) + 100)
    return others + [
        Step(number + index, CALLERS - 1, "topic", moment.gap_seconds, moment.commands)
        for index, moment in enumerate(of_neighbours(draw, SHARDS))
    ]


def _list(drawn: Sequence[AnyCommand]) -> list[AnyCommand]:
    commands = list(drawn)[:COMMANDS_MAX]
    if len(RELEASES) > 1:
        # The release before may refuse commands about grabs that name a user.
        commands = [replace(one, user=None) if isinstance(one, GrabCommand) else one for one in commands]
    return [] if torn_baskets(commands) else commands


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
