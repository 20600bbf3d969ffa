"""What every story stands on.

A story is a rehearsal with a clock of its own: days pass in seconds. It has a system of its own too, whose
shards never see another clock (no `decide`, no `sweep` in its workers: the story decides and sweeps itself).
What people were told (answers) and what stands in the journal are kept apart, and the verdict compares the
two.
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

from grabstream.lua.gate.gate import Gate
from grabstream.lua.gate.queue import OutcomeUnknown
from grabstream.lua.gate.tickets import TicketKeys
from grabstream.models.answers import Answer
from grabstream.models.commands import ITEMS_MAX, AnyCommand, Confirm, Grab, Load
from grabstream.models.events import AnyEvent, decode_event
from grabstream.models.identifiers import NO_OFFER
from grabstream.models.journal import Cursor, parse_block
from grabstream.models.outcomes import Outcome
from grabstream.ops.connections.opening import gate_limits, key_space, open_redis, sealer
from grabstream.ops.console.output import console
from grabstream.ops.console.progress import bar
from grabstream.ops.rehearsal.clock import Clock, moment, shown
from grabstream.ops.rehearsal.run import Patience, open_books, until_in_books
from grabstream.ops.rehearsal.stage import Stage, set_up
from grabstream.ops.rehearsal.tally import Tally
from grabstream.ops.settings import Settings
from grabstream.ops.verification.checks import Check
from grabstream.ops.verification.verifying import verify
from grabstream.streams.deciding.sweeper import Sweeper
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.topics import Topics

#: No `decide` and no `sweep`: they would go by the real clock.
WORKERS: Final = ("relay", "project,publish")
CALL_COMMANDS_MAX: Final = 48
PATIENCE_MS: Final = 30_000

#: The event that a positive answer stands for; a refusal with a seq stands for a refund.
_EVENT_OF: Final = {
    "granted": "grab.granted", "held": "grab.held", "waiting": "grab.queued", "confirmed": "grab.confirmed",
    "released": "grab.released",
    "extended": "grab.extended", "returned": "grab.returned", "redeemed": "grab.redeemed",
    "unredeemed": "grab.unredeemed",
    "opened": "offer.opened", "loaded": "offer.loaded", "amended": "offer.amended",
}  # fmt: skip
#: Refusals that are not counted as demand: the command was wrong, or was never decided.
_NO_DEMAND: Final = frozenset({Outcome.invalid, Outcome.fenced, Outcome.busy, Outcome.conflict})


class Display:
    """The simulated time and the stage of the story: a live line in a terminal, else a line a stage; `quiet`
    shows nothing.
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

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, name: str, until_ms: int | None = None) -> None:
        """Another stage begins; its bar is full at a time."""
        self._began = self._clock.now_ms
        self._progress.update(
            self._task, description=name, completed=0, total=max((until_ms or self._began) - self._began, 1)
        )
        if not self._quiet:
            self._progress.console.print(f"{shown(self._began)}  {name}", highlight=False)

    def note(self, line: str) -> None:
        """Something to read, above the line."""
        if not self._quiet:
            self._progress.console.print(f"  [dim]{line}[/]", highlight=False, soft_wrap=True)

    def tick(self, news: str) -> None:
        """The clock moved."""
        now = self._clock.now_ms
        self._progress.update(self._task, completed=now - self._began, clock=shown(now), news=news)


class Story:
    """One story against a running system: an agenda of commands, a clock that moves on, and everything that
    was answered.
    """

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
        self.display = Display(self.clock, quiet)
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
        self._stock_checks: list[Check] = []
        # One campaign, so one shard.
        self._shard = self._keys.shard(self._keys.shard_of_offer(self.campaign))
        self._sweeper = Sweeper(redis, self._shard, settings.shards, settings.clock_skew_ms_max)
        self._cursor = Cursor()
        self._agenda: list[tuple[int, int, AnyCommand]] = []
        self._numbers = itertools.count(1)
        self._expected: dict[str, frozenset[str]] = {}
        self.first: dict[str, tuple[AnyCommand, Answer]] = {}
        self.answers: list[Answer] = []

    # -- to be told by each story

    async def play(self) -> None:
        """Plays it from beginning to end."""
        raise NotImplementedError

    def heard(self, command: AnyCommand, answer: Answer) -> None:
        """People hear the first answer to a command of theirs."""

    def happened(self, event: AnyEvent) -> None:
        """People hear of an event that nobody was answered for, by `grab.events` in the world outside."""

    def result(self) -> list[dict[str, Any]]:
        """What is published in the end, a row an offer."""
        raise NotImplementedError

    def own_checks(self) -> list[Check]:
        """What only this story promises."""
        return []

    # -- commands

    def new_id(self, what: str) -> str:
        """An id for a command."""
        return f"{what}-{next(self._numbers)}"

    def expect(self, command: AnyCommand, *outcomes: str) -> AnyCommand:
        """The command, with the outcomes that the story allows it."""
        self._expected[command.id] = frozenset(outcomes)
        return command

    def told(self, holds: bool, problem: str) -> None:
        """Something that must be so at this point of the story."""
        self.tally.check("the story goes as it is told", holds, problem)

    def plan(self, at_ms: float, command: AnyCommand) -> None:
        """Puts a command on the agenda."""
        heapq.heappush(self._agenda, (int(at_ms), next(self._numbers), command))

    async def send(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """Sends commands now, many callers at once, those of a type together; returns the answers in the
        order of the commands.
        """
        by_type: defaultdict[type, list[int]] = defaultdict(list)
        for place, command in enumerate(commands):
            by_type[type(command)].append(place)
        calls = [
            places[i : i + CALL_COMMANDS_MAX]
            for places in by_type.values()
            for i in range(0, len(places), CALL_COMMANDS_MAX)
        ]
        answered = await asyncio.gather(
            *(self._ask([commands[place] for place in places]) for places in calls)
        )
        found = {
            place: answer
            for places, answers in zip(calls, answered, strict=True)
            for place, answer in zip(places, answers, strict=True)
        }
        for place, command in enumerate(commands):
            self._take(command, found[place])
        return [found[place] for place in range(len(commands))]

    async def _ask(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        """Asks until everything is decided; what was decided already is only said again."""
        while True:
            self._stage.check()
            try:
                answers = await self._gate.decide(commands, patience_ms=PATIENCE_MS)
            except OutcomeUnknown:
                continue
            if all(answer.decided for answer in answers):
                return answers

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
                "everybody was answered, always the same", same, f"{command.id}: {before} and then {answer}"
            )
            return
        self.tally.check("everybody was answered, always the same", True, "")
        self.first[command.id] = (command, answer)
        expected = self._expected.get(command.id)
        if expected is not None:
            said = (
                f"{shown(self.clock.now_ms)} {command}: {answer.outcome} {answer.message or ''}, not "
                f"{' or '.join(sorted(expected))}"
            )
            self.told(answer.outcome in expected, said)
        self.heard(command, answer)

    # -- time

    async def run_until(self, until_ms: int, step_ms: int) -> None:
        """Lets time pass in steps; at each one holds end, and what is on the agenda until then is sent."""
        while self.clock.now_ms < until_ms:
            await self.step(min(self.clock.now_ms + step_ms, until_ms))

    async def step(self, to_ms: int) -> None:
        """Moves the clock on; the sweeper or the commands come first, since a hold that is over may be met by
        either.
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
        """Reads the journal as far as Redis has decided."""
        seq = int(await self._redis.hget(self._shard.state, "seq") or 0)
        patience = Patience()
        while self._cursor.seq < seq:
            self._stage.check()
            end = await self._reader.end(self._shard.shard)
            if end <= self._cursor.next_offset:
                patience.look(self._cursor.seq, f"the journal has only {self._cursor.seq} of {seq} events")
                await asyncio.sleep(0.005)
                continue
            async with aclosing(self._reader.read(self._shard.shard, self._cursor.next_offset, end)) as lists:
                async for records in lists:
                    for record in records:
                        self._cursor, accepted = self._cursor.feed(
                            record.offset, parse_block(record.headers, record.value)
                        )
                        for one in accepted:
                            event = decode_event(one.line)
                            self.tally.take(event)
                            self.happened(event)

    async def take_stock(self) -> None:
        """Verifies everything in the midst of the story, while there are holds, and offers that are still in
        Redis.
        """
        when = shown(self.clock.now_ms)[:-3]
        self._stock_checks += [check._replace(name=f"{check.name}, {when}") for check in await self.verify()]

    async def verify(self) -> list[Check]:
        """Verifies everything when the read models are level: their consumers join their groups while the
        story is told.
        """
        async with await open_books(self._settings) as books:
            await until_in_books(self._redis, self._keys, books, self._stage.check)
        return await verify(self._settings, share=1)

    # -- from beginning to end

    async def tell(self) -> None:
        """Plays the story and reads all that it left in the journal."""
        self._gate.start()
        try:
            with self.display:
                await self.play()
                self.display.stage("verdict")
                await self.catch_up()
        finally:
            await self._gate.close()

    async def checks(self) -> list[Check]:
        """The verdict, but for what `verify` says of every system."""
        self._compare_payments()
        self._compare_promises()
        for name, grab in self.tally.grabs.items():
            held = self.tally.accounts[f"hold:{grab.user}", self.tally.offers[grab.offer].asset]
            self.tally.check(
                "all holds have ended",
                grab.held == 0 and held == 0,
                f"{name}: {grab.held} held, {held} on the account",
            )
        return [*self._found(), self._money(), await self._demand(), *self.own_checks(), *self._stock_checks]

    def _found(self) -> list[Check]:
        tally = self.tally
        return [Check(name, count, "times", tally.problems[name]) for name, count in tally.checked.items()]

    def _compare_payments(self) -> None:
        name = "each payment confirmed or refunded, once"
        sent = {
            command.payment: command
            for command, _ in self.first.values()
            if isinstance(command, Confirm) and command.payment
        }
        for payment, command in sent.items():
            found = self.tally.payments[payment]
            self.tally.check(
                name,
                len(found) == 1 and found[0][1] == command.paid,
                f"{payment}, {command.paid} paid: {found}",
            )
        for payment in self.tally.payments.keys() - sent.keys():
            self.tally.check(name, False, f"{payment}: nobody made this payment")

    def _compare_promises(self) -> None:
        """Every answer that names an event says what the event says."""
        for command, answer in self.first.values():
            if answer.seq is None or answer.shard is None:
                continue
            event = self.tally.events.get((answer.shard, answer.seq))
            tag = event and event.__struct_config__.tag
            wanted = _EVENT_OF.get(answer.outcome, "payment.refund_due")
            units = (
                getattr(event, "quantity", None)
                if answer.quantity is not None and wanted != "offer.loaded"
                else answer.quantity
            )
            same = event is not None and (tag, event.offer, units) == (wanted, command.offer, answer.quantity)
            self.tally.check(
                "every promise is in the journal",
                same,
                f"{command.id}: told {answer}, the journal has {event}",
            )

    def _money(self) -> Check:
        """What came for confirmed grabs is what issuers have and what went back; what came too much waits to
        be refunded.
        """
        tally, problems = self.tally, []
        paid = {
            payment: sum(amount for how, amount in found if how == "grab.confirmed")
            for payment, found in tally.payments.items()
        }
        due = {
            payment: sum(amount for how, amount in found if how != "grab.confirmed")
            for payment, found in tally.payments.items()
        }
        currencies = {offer.terms.currency for offer in tally.offers.values() if offer.terms.currency}
        issuers = {f"issuer:{offer.terms.issuer}" for offer in tally.offers.values()}
        have = sum(tally.accounts[issuer, currency] for issuer in issuers for currency in currencies)
        back = sum(tally.refunds.values())
        if sum(paid.values()) - back != have:
            problems.append(
                f"{sum(paid.values())} confirmed − {back} given back ≠ {have} that the issuers have"
            )
        for payment in tally.payments:
            for currency in currencies:
                waits = tally.accounts[f"refund:{payment}", currency]
                if waits != due[payment] + tally.refunds[payment] or tally.refunds[payment] > paid[payment]:
                    problems.append(
                        f"{payment}: {paid[payment]} confirmed, {due[payment]} due, {tally.refunds[payment]} "
                        f"back, {waits} waits"
                    )
        return Check("money confirmed = issuer's + refunds", sum(paid.values()), "minor units", problems)

    async def _demand(self) -> Check:
        """What Redis counted as refused is what people were told."""
        told: Counter[tuple[int, str]] = Counter()
        for command, answer in self.first.values():
            if not answer.positive and answer.seq is None and answer.code not in _NO_DEMAND:
                told[answer.code, NO_OFFER if answer.code == Outcome.no_such_offer else command.offer] += 1
        counted: Counter[tuple[int, str]] = Counter()
        for name, count in (await self._redis.hgetall(self._shard.demand)).items():
            _, code, offer = name.decode().split(":", 2)
            counted[int(code), offer] += int(count)
        problems = [
            f"{key}: {counted[key]} counted, {told[key]} told"
            for key in sorted(counted.keys() | told.keys())
            if counted[key] != told[key]
        ]
        return Check("refusals counted = refusals told", told.total(), "refusals", problems)


async def tell(
    story: type[Story], settings: Settings, seed: int, people: int, keep: bool, quiet: bool
) -> dict[str, Any]:
    """Tells a story in a system of its own, and returns what came out, with the verdict."""
    began = time.monotonic()
    redis = open_redis(settings)
    try:
        async with (
            set_up(settings, Path(".services") / f"rehearsal-{story.name}.log", keep, WORKERS) as stage,
            open_reader(settings.kafka, Topics(settings.prefix).journal) as reader,
        ):
            told = story(settings, redis, reader, stage, seed, people, quiet)
            await told.tell()
            checks = await told.checks()
            checks += await told.verify()
    finally:
        await redis.aclose()
    return {
        "story": story.name,
        "seed": seed,
        "people": people,
        "from": shown(told.begins_ms),
        "until": shown(told.clock.now_ms),
        "seconds": round(time.monotonic() - began, 1),
        "answers": len(told.answers),
        "outcomes": dict(Counter(answer.outcome for _, answer in told.first.values()).most_common()),
        "result": told.result(),
        "checks": checks,
    }


def chunks(offer: str, what: Any, items: Sequence[str], least: int = 1) -> list[Load]:
    """The commands that load a list, in chunks as large as they may be, at least so many."""
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
