"""The base of all stories.

A story is a rehearsal with a simulated clock, on which days pass in seconds. It runs on a separate system
that never uses the real clock: its workers have no roles `decide` and `sweep`, since the story decides and
sweeps itself. Answers and the events of the journal are kept separately, and the verdict compares them.
"""

import asyncio
import heapq
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress, SpinnerColumn, TextColumn

from grabstream.connections.opening import gate_limits, key_space, open_redis, sealer
from grabstream.crypto.tickets import TicketKeys
from grabstream.gate.gate import Gate
from grabstream.lua.packed_values import demand_row
from grabstream.lua.server import let_callers_set_time
from grabstream.models.answers import Answer
from grabstream.models.commands import ITEMS_MAX, AnyCommand, Confirm, Grab, Load
from grabstream.models.events import AnyEvent
from grabstream.models.identifiers import NO_OFFER
from grabstream.models.journal import Cursor
from grabstream.models.outcomes import Outcome
from grabstream.models.runs import decode_line, singles
from grabstream.ops.console.output import console
from grabstream.ops.console.progress import bar
from grabstream.ops.verification.checks import VerificationCheck
from grabstream.ops.verification.verifying import verify
from grabstream.projections.tables import demand
from grabstream.settings import Settings
from grabstream.streams.deciding.sweeper import Sweeper
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.clock import Clock, moment, shown
from grabstream.workshop.rehearsal.published import published_check
from grabstream.workshop.rehearsal.run import open_books, until_in_books
from grabstream.workshop.rehearsal.stage import Patience, Stage, decide_all, set_up
from grabstream.workshop.rehearsal.tally import Tally

#: Without `decide` and `sweep`, which use the real clock.
WORKERS: Final = ("relay", "project,publish")
CALL_COMMANDS_MAX: Final = 48

#: Outcome → the type of the event that the answer's seq names. With any other outcome it is a refund.
_EVENT_OF: Final = {
    "granted": "grab.granted", "held": "grab.held", "waiting": "grab.queued", "confirmed": "grab.confirmed",
    "released": "grab.released",
    "extended": "grab.extended", "returned": "grab.returned", "redeemed": "grab.redeemed",
    "unredeemed": "grab.unredeemed",
    "opened": "offer.opened", "loaded": "offer.loaded", "amended": "offer.amended",
}  # fmt: skip
#: Refusals that are not counted as demand: the command was invalid, or was not decided.
_NO_DEMAND: Final = frozenset({Outcome.invalid, Outcome.fenced, Outcome.busy, Outcome.conflict})


class StoryDisplay:
    """Shows the simulated time and the stage of the story: a live line in a terminal, else a line per stage;
    with `quiet` nothing.
    """

    def __init__(self, clock: Clock, quiet: bool) -> None:
        self._clock = clock
        self._quiet = quiet
        columns = ("{task.fields[clock]}", "[bold]{task.description}[/]")
        self._progress = Progress(
            SpinnerColumn(), *map(TextColumn, columns), bar(), TextColumn("[dim]{task.fields[news]}"),
            console=console, disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("", clock=shown(clock.now_ms), news="", total=1.0)
        self._began = clock.now_ms

    def __enter__(self) -> "StoryDisplay":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, name: str, until_ms: int | None = None) -> None:
        """Starts the next stage. Its bar is full at `until_ms`."""
        self._began = self._clock.now_ms
        self._progress.update(
            self._task, description=name, completed=0, total=max((until_ms or self._began) - self._began, 1)
        )
        if not self._quiet:
            self._progress.console.print(f"{shown(self._began)}  {name}", highlight=False)

    def note(self, line: str) -> None:
        """Prints a line above the live line."""
        if not self._quiet:
            self._progress.console.print(f"  [dim]{line}[/]", highlight=False, soft_wrap=True)

    def tick(self, news: str) -> None:
        """Shows the new time of the clock, and the news."""
        now = self._clock.now_ms
        self._progress.update(self._task, completed=now - self._began, clock=shown(now), news=news)


class Story:
    """A story against a running system: its clock, an agenda of commands, and all answers."""

    name = ""
    begins_ms = moment(0, "09:00")

    def __init__(
        self,
        settings: Settings,
        redis: Any,
        reader: JournalReader,
        stage: Stage,
        seed: int,
        people: int,
        quiet: bool,
    ) -> None:
        self.clock = Clock(self.begins_ms)
        self.tally = Tally(self.clock)
        self.display = StoryDisplay(self.clock, quiet)
        self.random = random.Random(seed)
        self.people = people
        self.campaign = f"{self.name}-{seed}"
        self._ticket_key = self.random.randbytes(32)
        tickets = TicketKeys({"story": self._ticket_key})
        self._keys = key_space(settings)
        self._gate = Gate(
            redis,
            self._keys,
            sealer(settings),
            gate_limits(settings),
            clock=lambda: self.clock.now_ms,
            tickets=tickets,
        )
        self._settings, self._redis, self._reader, self._stage = settings, redis, reader, stage
        self._interim_checks: list[VerificationCheck] = []
        # All offers are of one campaign, so in one shard.
        self._shard = self._keys.shard(self._keys.shard_of_offer(self.campaign))
        self._sweeper = Sweeper(redis, self._shard, settings.shards, settings.clock_skew_ms_max)
        self._cursor = Cursor()
        self._agenda: list[tuple[int, int, AnyCommand]] = []
        self._numbers = itertools.count(1)
        self._expected: dict[str, frozenset[str]] = {}
        #: id → command, and its first answer
        self.first: dict[str, tuple[AnyCommand, Answer]] = {}
        self.answers: list[Answer] = []

    # -- defined by each story

    async def play(self) -> None:
        """Plays the story from beginning to end."""
        raise NotImplementedError

    def on_answer(self, command: AnyCommand, answer: Answer) -> None:
        """Called with the first answer to each command."""

    def on_event(self, event: AnyEvent) -> None:
        """Called with each event of the journal, as a reader of `grab.events` would get it."""

    def result(self) -> list[dict[str, Any]]:
        """The published result, a row per offer."""
        raise NotImplementedError

    def story_checks(self) -> list[VerificationCheck]:
        """The checks of this story alone."""
        return []

    # -- commands

    def new_id(self, what: str) -> str:
        """A new id for a command."""
        return f"{what}-{next(self._numbers)}"

    def expect(self, command: AnyCommand, *outcomes: str) -> AnyCommand:
        """Returns the command, and records the outcomes that its answer may have."""
        self._expected[command.id] = frozenset(outcomes)
        return command

    def require(self, holds: bool, problem: str) -> None:
        """Checks a condition that must hold at this point of the story."""
        self.tally.check("the story goes as planned", holds, problem)

    def plan(self, at_ms: float, command: AnyCommand) -> None:
        """Plans a command for a time (ms since 1970 UTC)."""
        heapq.heappush(self._agenda, (int(at_ms), next(self._numbers), command))

    async def send(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """Sends commands now by concurrent callers, each with commands of one type; returns the answers in
        the order of the commands.
        """
        by_type: defaultdict[type, list[int]] = defaultdict(list)
        for index, command in enumerate(commands):
            by_type[type(command)].append(index)
        calls = [
            indexes[start : start + CALL_COMMANDS_MAX]
            for indexes in by_type.values()
            for start in range(0, len(indexes), CALL_COMMANDS_MAX)
        ]
        answered = await asyncio.gather(
            *(
                decide_all(self._gate, [commands[index] for index in indexes], self._stage.check)
                for indexes in calls
            )
        )
        by_index = {
            index: answer
            for indexes, answers in zip(calls, answered, strict=True)
            for index, answer in zip(indexes, answers, strict=True)
        }
        for index, command in enumerate(commands):
            self._take(command, by_index[index])
        return [by_index[index] for index in range(len(commands))]

    def _take(self, command: AnyCommand, answer: Answer) -> None:
        self.answers.append(answer)
        if command.id in self.first:
            before = self.first[command.id][1]
            same = (before.outcome, before.grab, before.quantity, before.seq) == (
                answer.outcome,
                answer.grab,
                answer.quantity,
                answer.seq,
            )
            self.tally.check(
                "every command was answered, repeats identically",
                same,
                f"{command.id}: {before} and then {answer}",
            )
            return
        self.tally.check("every command was answered, repeats identically", True, "")
        self.first[command.id] = (command, answer)
        expected = self._expected.get(command.id)
        if expected is not None:
            problem = (
                f"{shown(self.clock.now_ms)} {command}: {answer.outcome} {answer.message or ''}, expected "
                f"{' or '.join(sorted(expected))}"
            )
            self.require(answer.outcome in expected, problem)
        self.on_answer(command, answer)

    # -- time

    async def run_until(self, until_ms: int, step_ms: int) -> None:
        """Moves the clock in steps. At each step expired holds end, and the commands planned until then are
        sent.
        """
        while self.clock.now_ms < until_ms:
            await self.step(min(self.clock.now_ms + step_ms, until_ms))

    async def step(self, to_ms: int) -> None:
        """Moves the clock forward. Either the sweeper or the commands are first, at random, since a real
        command may meet an expired hold before the sweeper does.
        """
        self._stage.check()
        self.clock.forward(to_ms)
        sweep_first = self.random.random() < 0.5
        if sweep_first:
            await self._sweeper.sweep(to_ms)
        due = []
        while self._agenda and self._agenda[0][0] <= to_ms:
            due.append(heapq.heappop(self._agenda)[2])
        if due:
            await self.send(due)
        if not sweep_first:
            await self._sweeper.sweep(to_ms)
        self.display.tick(f"{len(self.answers):,} answers")

    async def catch_up(self) -> None:
        """Reads the journal up to the last event in Redis."""
        seq = int(await self._redis.hget(self._shard.state, "seq") or 0)
        patience = Patience()
        passed = 0  # the last offsets before it may be without records
        while self._cursor.seq < seq:
            self._stage.check()
            end = await self._reader.end(self._shard.shard)
            if end <= max(self._cursor.next_offset, passed):
                patience.observe(self._cursor.seq, f"the journal has {self._cursor.seq} of {seq} events")
                await asyncio.sleep(0.005)
                continue
            async with aclosing(self._reader.read(self._shard.shard, self._cursor.next_offset, end)) as lists:
                async for records in lists:
                    for record in records:
                        self._cursor, accepted = self._cursor.feed(record.offset, self._reader.block(record))
                        for event in (one for line in accepted for one in singles(decode_line(line.line))):
                            self.tally.take(event)
                            self.on_event(event)
            passed = end

    async def verify_now(self) -> None:
        """Runs `verify` in the middle of the story, while there are holds and open offers. The verdict
        contains its checks.
        """
        when = shown(self.clock.now_ms)[:-3]
        self._interim_checks += [
            check._replace(name=f"{check.name}, {when}") for check in await self.verify()
        ]

    async def verify(self) -> list[VerificationCheck]:
        """Runs `verify` after the read models have caught up, which may have started later than the story."""
        async with await open_books(self._settings) as books:
            await until_in_books(self._redis, self._keys, books, self._stage.check)
        return await verify(self._settings, share=1)

    # -- from beginning to end

    async def play_to_end(self) -> None:
        """Plays the story and reads its journal to the end."""
        if not await self._redis.hexists(self._shard.state, "clock"):
            await let_callers_set_time(self._redis, self._shard.state)
        self._gate.start()
        try:
            with self.display:
                await self.play()
                self.display.stage("verdict")
                await self.catch_up()
        finally:
            await self._gate.close()

    async def checks(self) -> list[VerificationCheck]:
        """The checks of the verdict, without those of `verify`."""
        self._compare_payments()
        self._compare_answers()
        for name, grab in self.tally.grabs.items():
            held = self.tally.accounts[f"hold:{grab.user}", self.tally.offers[grab.offer].asset]
            self.tally.check(
                "all holds have ended",
                grab.held == 0 and held == 0,
                f"{name}: {grab.held} held, {held} on the account",
            )
        tally = [
            VerificationCheck(name, count, "times", self.tally.problems[name])
            for name, count in self.tally.checked.items()
        ]
        return [*tally, self._money(), await self._demand(), *self.story_checks(), *self._interim_checks]

    def _compare_payments(self) -> None:
        name = "each payment confirmed or refunded, once"
        sent = {
            command.payment: command
            for command, _ in self.first.values()
            if isinstance(command, Confirm) and command.payment
        }
        for payment, command in sent.items():
            events = self.tally.payments[payment]
            self.tally.check(
                name,
                len(events) == 1 and events[0][1] == command.paid,
                f"{payment}, {command.paid} paid: its events are {events}",
            )
        for payment in self.tally.payments.keys() - sent.keys():
            self.tally.check(name, False, f"{payment}: no user made this payment")

    def _compare_answers(self) -> None:
        """Checks that every answer with a seq agrees with the event of this seq."""
        for command, answer in self.first.values():
            if answer.seq is None or answer.shard is None:
                continue
            event = self.tally.events.get((answer.shard, answer.seq))
            tag = event and event.__struct_config__.tag
            expected = _EVENT_OF.get(answer.outcome, "payment.refund_due")
            units = (
                getattr(event, "quantity", None)
                if answer.quantity is not None and expected != "offer.loaded"
                else answer.quantity
            )
            same = event is not None and (tag, event.offer, units) == (
                expected,
                command.offer,
                answer.quantity,
            )
            self.tally.check(
                "every promise is in the journal",
                same,
                f"{command.id}: answered {answer}, the journal has {event}",
            )

    def _money(self) -> VerificationCheck:
        """Checks that the money paid for confirmed grabs is what the issuers have plus what was refunded, and
        that each payment that could not be served waits for its refund.
        """
        tally, problems = self.tally, []
        paid = {
            payment: sum(amount for type_, amount in events if type_ == "grab.confirmed")
            for payment, events in tally.payments.items()
        }
        due = {
            payment: sum(amount for type_, amount in events if type_ != "grab.confirmed")
            for payment, events in tally.payments.items()
        }
        currencies = {offer.terms.currency for offer in tally.offers.values() if offer.terms.currency}
        issuers = {f"issuer:{offer.terms.issuer}" for offer in tally.offers.values()}
        issuer_total = sum(tally.accounts[issuer, currency] for issuer in issuers for currency in currencies)
        refunded = sum(tally.refunds.values())
        if sum(paid.values()) - refunded != issuer_total:
            problems.append(
                f"{sum(paid.values())} confirmed − {refunded} refunded ≠ {issuer_total} that the issuers have"
            )
        for payment in tally.payments:
            for currency in currencies:
                to_refund = tally.accounts[f"refund:{payment}", currency]
                expected = due[payment] + tally.refunds[payment]
                if to_refund != expected or tally.refunds[payment] > paid[payment]:
                    problems.append(
                        f"{payment}: {paid[payment]} confirmed, {due[payment]} could not be served, "
                        f"{tally.refunds[payment]} returned, but {to_refund} on its refund account"
                    )
        return VerificationCheck(
            "money confirmed = issuer's + refunds", sum(paid.values()), "minor units", problems
        )

    async def _demand(self) -> VerificationCheck:
        """Checks that the refusals that were counted, in Redis and then in PostgreSQL, are those that were
        answered.
        """
        answered: Counter[tuple[int, str]] = Counter()
        for command, answer in self.first.values():
            if not answer.positive and answer.seq is None and answer.code not in _NO_DEMAND:
                offer = NO_OFFER if answer.code == Outcome.no_such_offer else command.offer
                answered[answer.code, offer] += 1
        counts = await self._redis.hgetall(self._shard.demand)
        rows = [row for row in itertools.starmap(demand_row, counts.items()) if row is not None]
        async with await open_books(self._settings) as books:
            # No worker does it, since the seconds are those of the story.
            await demand.store(books, self._settings.schema_, self._shard.shard, rows)
            stored = await books.execute(
                "SELECT code, offer, sum(refusals)::bigint FROM demand GROUP BY code, offer"
            )
            counted = Counter({(code, offer): count for code, offer, count in await stored.fetchall()})
        problems = [
            f"outcome {key[0]} of {key[1]}: {counted[key]} counted, {answered[key]} answered"
            for key in sorted(counted.keys() | answered.keys())
            if counted[key] != answered[key]
        ]
        return VerificationCheck(
            "refusals counted = refusals answered", answered.total(), "refusals", problems
        )


async def play_story(
    kind: type[Story], settings: Settings, seed: int, people: int, keep: bool, quiet: bool
) -> dict[str, Any]:
    """Plays a story on its own system, and returns its result and verdict."""
    began = time.monotonic()
    redis = open_redis(settings)
    try:
        async with (
            set_up(settings, Path(".services") / f"rehearsal-{kind.name}.log", keep, WORKERS) as stage,
            open_reader(settings.brokers, Topics(settings.prefix).journal) as reader,
        ):
            story = kind(settings, redis, reader, stage, seed, people, quiet)
            await story.play_to_end()
            checks = await story.checks()
            checks += [*await story.verify(), await published_check(settings, stage.check)]
    finally:
        await redis.aclose()
    return {
        "story": story.name,
        "seed": seed,
        "people": people,
        "from": shown(story.begins_ms),
        "until": shown(story.clock.now_ms),
        "seconds": round(time.monotonic() - began, 1),
        "answers": len(story.answers),
        "outcomes": dict(Counter(answer.outcome for _, answer in story.first.values()).most_common()),
        "result": story.result(),
        "checks": checks,
    }


def chunks(offer: str, what: Any, items: Sequence[str], least: int = 1) -> list[Load]:
    """The commands that load a list, in the largest allowed chunks, but in `least` chunks or more."""
    size = min(-(-len(items) // least), ITEMS_MAX)
    parts = [tuple(items[start : start + size]) for start in range(0, len(items), size)]
    return [
        Load(id=f"load-{what}-{number}", offer=offer, what=what, chunk=number, chunks=len(parts), items=part)
        for number, part in enumerate(parts, 1)
    ]


def refused_by_outcome(story: Story, offer: str) -> dict[str, int]:
    """How many grabs of an offer were refused, by outcome."""
    refusals: Iterable[str] = (
        answer.outcome
        for command, answer in story.first.values()
        if isinstance(command, Grab) and command.offer == offer and not answer.positive
    )
    return dict(Counter(refusals).most_common())
