"""One run: the servers, the processes, the callers, what goes wrong, and the verdict."""

import asyncio
import hashlib
import json
import os
import random
import traceback
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple
from unittest import mock

from aiokafka import TopicPartition
from msgspec.structs import replace

from grabstream.gate.calls import GateLimits
from grabstream.gate.decided import LostDecision
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import Answer, decode_answer
from grabstream.models.commands import (
    AnyCommand,
    Confirm,
    Grab,
    Open,
    decode_command,
    encode_command,
    identity_of,
    secret_of,
)
from grabstream.models.identifiers import campaign_of
from grabstream.models.offers import PAYMENTS_KEPT_MS
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.streams.deciding.decider import decider_group
from grabstream.streams.deciding.decoding import SET_ASIDE_HEADER
from grabstream.streams.journal_keys import JournalKeys, use_keys
from grabstream.streams.topics import Topics
from tests.lua.histories.recovered import align_postponed_due_times, contents, differences, fold
from tests.lua.histories.strategies import TICKET_KEYS, TICKETS
from tests.simulation import faults, postgresql_server, smaller
from tests.simulation.books import Books, prepare
from tests.simulation.kafka_broker import Broker, Consumer, Producer
from tests.simulation.loop import PROCESS, Endless, Process, SimulatedLoop
from tests.simulation.machine import Clock, Trace, quietly_freed, signals_wait, simulated_machine
from tests.simulation.oracle import Given, Identity, Oracle
from tests.simulation.plan import (
    CALLERS,
    DECISION,
    GATES,
    GIVES_UP_EVERY,
    NEXT_APPLY,
    PREFIX,
    SHARDS,
    Fault,
    Plan,
    Step,
)
from tests.simulation.postgresql_server import PrivatePostgres
from tests.simulation.redis_server import Client, Server, SimulatedScript, Store, Weather
from tests.simulation.releases import RELEASES
from tests.simulation.smaller import CALL_COSTS, smaller_bounds
from tests.support.shards import SEAL_KEYS, SEALER

LEASE_MS: Final = 1_600
#: The modules that open Kafka clients.
KAFKA_MODULES: Final = ("streams.relaying.relay", "streams.journal", "streams.deciding.decider")
GATE: Final = GateLimits(timeout_ms=1_500, outbox_events_max=500, batch_commands_max=64)
#: Less often than in earnest: a sweep that finds nothing costs as much as one that does.
SWEEP_EVERY_SECONDS: Final = 0.9
#: Virtual seconds within which everything must be at rest once faults have ended.
REST_SECONDS_MAX: Final = 90.0
REST_POLL_SECONDS: Final = 0.1
REPEATED_MAX: Final = 12
#: How long an answer may take while another shard stands still.
NEIGHBOUR_SECONDS_MAX: Final = 2.5
#: A quarter of the callers that wait for the journal wait less than this, where nothing goes wrong.
UNTOLD_SECONDS: Final = 0.09
#: Faults that last less together hinder Faust for less than its watchdog waits.
HINDERED_SECONDS_MAX: Final = 5.0
#: How long a fault waits for its step.
STEP_SECONDS_MAX: Final = 8.0
#: Within what time the verifier finds what differs, and clears it.
FOUND_SECONDS_MAX: Final = 60.0
#: Faults in which a former master lives on, and some clients still talk to it.
DIVIDED: Final = {"redis split", "redis divided"}
#: Faults that need a replica.
REPLICATED: Final = {"redis failover", "redis split", "redis divided", "redis there and back"}
#: How far the disk of Redis may lag, of which each run draws one; a replica lags half of it. What is far back
#: is caught up in several calls.
LAG_SECONDS_MAX: Final = (1.0, 1.0, 5.0)
#: Scripts of a recovery that mark its progress. The private key of the relays, where they sign.
RELAYS_KEY: Final = b64encode(bytes(range(32))).decode()
RECOVERING: Final = ("raise_term", "wipe", "apply", "trim")
#: Databases of the private server: two servers, their disks, and one for comparisons.
SERVER_DATABASES: Final = ((0, 2), (1, 3))
FOLD_DATABASE: Final = 4


class Verdict(NamedTuple):
    """What became of a run."""

    plan: Plan
    problems: Sequence[str]
    trace: Sequence[str]
    digest: str
    seconds: float
    events: int
    #: How often each fault was there at each named step.
    met: "Counter[tuple[str, str]]"
    #: By step, how many faults waited for it, and how many of them have begun.
    awaited: "Counter[str]"
    begun: "Counter[str]"


class World:
    """The world of one run. Everything in it follows from the plan."""

    def __init__(self, plan: Plan, store: Store, database: Callable[[], PrivatePostgres]) -> None:
        self.plan = plan
        self.loop = SimulatedLoop(random.Random(f"{plan.seed} order"), plan.busy_every)
        self.clock = Clock(self.loop)
        self.trace = Trace(self.loop)
        self.oracle = Oracle(SHARDS, has_whole_entries=len(RELEASES) == 1)
        self.keys = KeySpace(PREFIX, SHARDS)
        self.topics = Topics(PREFIX)
        self._store = store
        self.draw = random.Random(f"{plan.seed} latency")
        use_keys(JournalKeys.from_text(f"sim:{RELAYS_KEY}", "") if plan.signs else JournalKeys())
        self.entropy = random.Random(f"{plan.seed} entropy")
        self.weather = Weather()
        self.broker = Broker(self.loop, random.Random(f"{plan.seed} kafka"), self.trace)
        for topic in (*self._of_commands(), self.topics.journal, self.topics.results):
            self.broker.create(topic, SHARDS)
        self.broker.create(self.topics.rejected, 1)
        self.broker.appended = self._appended
        self.books: Books | None = None
        if plan.has_books:
            draw = random.Random(f"{plan.seed} postgresql")
            server = postgresql_server.Server(database(), self.loop, draw, self.trace)
            self.books = Books(server, self.broker, PREFIX, SHARDS, plan.is_verified)
            self.loop.killed = server.end_sessions
        store.flush()
        self.servers = [
            Server(f"redis-{number}", store, *databases, self.clock, self.loop, self.draw)
            for number, databases in enumerate(SERVER_DATABASES)
        ]
        self.master, self.replica = self.servers
        self._lag_seconds_max = random.Random(f"{plan.seed} lag").choice(LAG_SECONDS_MAX)
        call_max = random.Random(f"{plan.seed} bounds").choice(CALL_COSTS)
        for server in self.servers:
            server.call_max = call_max
        self.replica.is_master = False
        self.replica.replication_id = self.master.replication_id
        self.replicates = True
        self.processes: dict[str, Process] = {}
        self.clients: dict[str, Client] = {}
        self._starts: dict[str, int] = Counter()
        self._steps: list[list[Step]] = [
            [step for step in plan.steps if step.caller == caller] for caller in range(CALLERS)
        ]
        self._progress = [0] * CALLERS
        self._order = 0
        self._calm = False
        self._ending = False
        self._sent: list[AnyCommand] = []
        self._begun: set[int] = set()
        #: How long callers waited for events that were made and journaled meanwhile, seconds.
        self._waited: list[float] = []
        #: Commands for which scripts have raised for a time.
        self.poisoned: set[str] = set()
        #: What was sent that holds no command, by partition and offset.
        self.malformed: dict[tuple[str, int, int], bytes] = {}
        #: Workers that are asked to stop, those that have stopped, and what asks them.
        self.stopping: set[Process] = set()
        self.stopped: set[Process] = set()
        self.stops: dict[str, asyncio.Event] = {}
        self._times_sent = Counter(identity_of(command) for step in plan.steps for command in step.commands)
        #: How long the trace was when everything was at rest.
        self._lines_at_rest = 0
        self._planned = {fault.kind for fault in plan.faults}
        self.oracle.loses_refusals = "layout outdated" in self._planned
        self._time_goes_back = "redis clock" in self._planned or any(step.pass_ms < 0 for step in plan.steps)
        self.met: Counter[tuple[str, str]] = Counter()
        self.awaited: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()
        self._active: list[str] = []
        #: Faults with their beginning and end; when commands of the topic were sent, and answered.
        self._struck: list[tuple[str, int, float, float]] = []
        self._sent_at: list[tuple[float, Sequence[AnyCommand]]] = []
        self._answered_at: dict[bytes, float] = {}
        #: Offers that answered a repeated payment as retired offers do.
        self._retired_meanwhile: set[str] = set()
        #: By process and shard: the last script that marks the progress of a recovery.
        self._recovering: dict[tuple[Process | None, str], str] = {}
        #: Faults that wait for a step of the code, and get the name of the process that has reached it.
        self._awaited: list[tuple[str, asyncio.Future[str]]] = []

    # -- the run ---------------------------------------------------------------------------------------------

    def play(self) -> Verdict:
        """Plays the plan."""
        problems: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(patched(self.broker))
            if self.books is not None:
                stack.enter_context(self.books.patched())
            stack.enter_context(simulated_machine(self.loop, self.clock, self.trace, self.entropy))
            for release in RELEASES:
                encoding = release.module("gate.encoding")
                noted = partial(self._noted, encoding.answer_of)
                stack.enter_context(mock.patch.object(encoding, "answer_of", noted))
                if hasattr(encoding, "granted_answers"):  # an older release makes each answer separately
                    of_run = partial(self._noted_of_run, encoding.granted_answers)
                    stack.enter_context(mock.patch.object(encoding, "granted_answers", of_run))
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self.loop.create_task(self._drive()))
            except Endless as error:
                problems.append(f"it never ends: {error}")
            except _Failed as error:
                problems.append(str(error))
            except Exception:
                # What Redis, Kafka or PostgreSQL have is not what any check expects.
                problems.append(f"a check raises: {traceback.format_exc()}")
            finally:
                asyncio.set_event_loop(None)
                for process in self.processes.values():
                    process.alive = False
                if self.books is not None:
                    self.books.server.close()
        if self._calm:
            self.oracle.check_journal()
            self.oracle.check_decisions((step.commands for step in self.plan.steps), self.fails_for)
            self.oracle.check_states((self.books.offers, self.books.grabs) if self.books else None)
            self.oracle.check_decided()
            self.oracle.check_answers()
            self.oracle.check_given_up()
            self.oracle.check_order()
            self.oracle.check_lists()
            if not self._time_goes_back:
                self.oracle.check_times()
        problems = list(dict.fromkeys([*self.oracle.violations, *problems, *self.loop.failures[:3]]))
        seconds = self.loop.now
        events = sum(len(reading.lines) for reading in self.oracle.journal)
        digest = hashlib.sha256("\n".join(self.trace.lines).encode())
        for reading in self.oracle.journal:
            digest.update(reading.head)
        self.loop.close()
        return Verdict(
            self.plan, problems, self.trace.lines, digest.hexdigest(), seconds, events, self.met,
            self.awaited, self.begun,
        )  # fmt: skip

    async def _drive(self) -> None:
        kinds = {fault.kind for fault in self.plan.faults}
        background = [self._replicate()] if kinds & REPLICATED else []
        background += [self._write_to_disk()] if "redis tail lost" in kinds else []
        background += [self._back_up()] if "postgresql tail lost" in kinds else []
        tasks = [asyncio.create_task(one) for one in background]
        for number in range(self.plan.workers):
            self.start_worker(number)
        for number in range(GATES):
            self.start_gate(number)
        faults = [asyncio.create_task(self._strike(fault)) for fault in self.plan.faults]
        await self._until(lambda: all(self._finished()), 60.0, "the callers have been answered")
        self._ending = True
        for entry in list(self._awaited):
            self._does_not_happen(entry)
        await asyncio.gather(*faults)
        for task in tasks:
            task.cancel()
        self._clear_up()
        if self.poisoned:
            # Scripts still raise for some holds: they must not keep the others.
            await self._until(
                lambda: not self._held_beside(), REST_SECONDS_MAX, "holds expire beside those that raise"
            )
        for server in self.servers:
            server.poisoned = ()
        self.trace.add("world", "faults have ended")
        await self._until(self._is_at_rest, REST_SECONDS_MAX, "everything is at rest")
        await self._ask_again()
        await self._until(self._is_at_rest, REST_SECONDS_MAX, "everything is at rest again")
        for offer in self._retired_meanwhile - self.oracle.retired_offers():
            self.oracle.violations.append(f"asked again: {offer} answers as if it had retired")
        self._lines_at_rest = len(self.trace.lines)
        if self.books is not None and self.plan.is_verified:
            await self._spoil(self.books)
            # A hold may have ended meanwhile.
            await self._until(self._is_at_rest, REST_SECONDS_MAX, "everything is at rest at last")
        self.oracle.survivors = {process for process in self.processes.values() if process.alive}
        # Nothing changes while it is compared.
        for process in self.processes.values():
            self.loop.kill(process)
        self._check_results()
        self._check_refusals()
        self._check_counts()
        self._check_calm()
        self._check_neighbours()
        await self._compare_with_journal()
        if self.books is not None:
            self.oracle.violations += await self.books.check(self.oracle.journal)
        self._calm = True

    async def _spoil(self, books: Books) -> None:
        """Changes an account by hand: the verifier finds it, and clears it when the account is as it was."""
        if not books.move_an_account(1):
            return
        found = books.finds_in_accounts
        await self._until(found, FOUND_SECONDS_MAX, "an account that differs is found")
        books.move_an_account(-1)
        await self._until(lambda: not found(), FOUND_SECONDS_MAX, "the account is found to agree")

    async def _until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        deadline = self.loop.now + seconds
        while not condition():
            if self.oracle.violations or self.loop.failures:
                raise _Failed("the run was broken off")
            if self.loop.now > deadline:
                raise _Failed(f"not within {seconds:.0f} s: {what}; {self._state()}")
            await asyncio.sleep(REST_POLL_SECONDS)

    def _finished(self) -> Iterator[bool]:
        return (progress == len(steps) for progress, steps in zip(self._progress, self._steps, strict=True))

    # -- processes -------------------------------------------------------------------------------------------

    def started(self, name: str) -> tuple[Process, Client]:
        self._starts[name] += 1
        process = Process(name)
        self.processes[name] = process
        client = Client(
            name, self.master, self.weather, self.loop, self.draw, self.trace, self.oracle.called,
            self._before,
        )  # fmt: skip
        self.clients[name] = client
        self.trace.add(name, f"starts (number {self._starts[name]})")
        return process, client

    def start_worker(self, number: int) -> None:
        name = f"worker-{number}"
        process, client = self.started(name)

        async def work() -> None:
            release = RELEASES[number % len(RELEASES)]
            worker = release.module("streams.worker")
            # These look at commands, which are of the release that decodes them.
            sealer = release.module("crypto.sealing").Sealer(SEAL_KEYS)
            tickets = release.module("crypto.tickets").TicketKeys(TICKET_KEYS)
            settings = worker.WorkerSettings(
                "simulated", PREFIX, SHARDS, 0, GATE, self.plan.block_events_max, LEASE_MS
            )
            parts = worker.WorkerParts(
                settings, client, sealer, release.module("streams.measures").WorkerMeasures()
            )
            options, sweeping, of_books = worker.RelayOptions(self.stepped), worker.Sweeping(), {}
            if self.books is not None:
                books = self.books.of(release)
                options = worker.RelayOptions(self.stepped, books.snapshots, books.report_recovery)
                sweeping = worker.Sweeping(books.record_demand)
                of_books = books.roles(client, self.stepped)
            roles = {
                "decide": worker.DecideRole(parts, tickets),
                "relay": worker.RelayRole(parts, options, sweeping),
                **{name: worker.RestartingRole(name, role) for name, role in of_books.items()},
            }
            try:
                left = await worker.run_worker(roles, stop)
            except BaseException as error:
                self.oracle.violations.append(f"{name} ended by itself: {error!r}")
                raise
            if process not in self.stopping:
                self.oracle.violations.append(f"{name} ended by itself")
            elif left:
                self.oracle.violations.append(f"{name} was told to stop, and these roles do not end: {left}")
            elif not any(one.kind.startswith(("redis", "worker crash")) for one in self.plan.faults):
                # Where Redis answers, others need not wait until a lease expires. (After a crash, and at a
                # server that was the master before, an earlier process of this worker may have one.)
                for shard in range(SHARDS):
                    look = ("GET", self.keys.shard(shard).lease)
                    holder = self._store.run(self.master.database, [look])[0] or b""
                    # In any release, the name of a worker has its host and process.
                    if f"simulated-{os.getpid()}-".encode() in holder:
                        self.oracle.violations.append(
                            f"{name} has stopped, and has the lease of shard {shard}"
                        )
            self.stopped.add(process)
            self.loop.kill(process)

        stop = asyncio.Event()
        self.stops[name] = stop

        self.loop.spawn(process, work())

    def start_gate(self, number: int) -> None:
        """A gate, and the callers that use it."""
        process, client = self.started(f"gate-{number}")

        async def serve() -> None:
            gate = Gate(client, self.keys, SEALER, GATE, tickets=TICKETS, report_lost=self._report_lost)
            gate.start()
            callers = [
                asyncio.create_task(self._call(gate, process, caller))
                for caller in range(number, CALLERS, GATES)
            ]
            for caller in callers:
                try:
                    await caller
                except Exception as error:
                    words = "".join(traceback.format_exception(error)[-3:])
                    self.oracle.violations.append(f"a caller of the gate got {error!r}: {words}")
                    raise

        self.loop.spawn(process, serve())

    def stepped(self, step: str) -> None:
        """A named step of the code: what was wrong at that moment."""
        for kind in self._active or ["nothing"]:
            self.met[kind, step] += 1
        self._reached(step)

    def _before(self, script: SimulatedScript, args: Sequence[Any]) -> bool:
        """A process is about to send a script; says whether a fault begins."""
        step = f"before {script.name}"
        process, shard = PROCESS.get(), args[3]
        if script.name in RECOVERING:
            before, self._recovering[process, shard] = self._recovering.get((process, shard)), script.name
            if (before, script.name) == ("trim", "apply"):
                step = NEXT_APPLY
        # Its callers have earlier commands that are decided, and not known to be journaled.
        if script.decides and any(str(args[3 + int(args[2])]).split("/")[2:3]):
            step = DECISION
        return self._reached(step)

    def _reached(self, step: str) -> bool:
        """Lets the faults begin that wait for this step; says whether there are any. They begin before the
        process continues from its next await.
        """
        process = PROCESS.get()
        if not self._awaited or process is None:
            return False
        found = [entry for entry in self._awaited if entry[0] == step]
        for entry in found:
            self._awaited.remove(entry)
            entry[1].set_result(process.name)
        return bool(found)

    def _noted(self, answer_of: Callable[..., Answer], shard: int, command: AnyCommand, *rest: Any) -> Answer:
        """The answer that a gate reads in a reply; the oracle gets it."""
        answer = answer_of(shard, command, *rest)
        self.oracle.replied(command, answer)
        return answer

    def _noted_of_run(
        self,
        granted_answers: Callable[..., list[Answer]],
        shard: int,
        commands: Sequence[AnyCommand],
        run: Any,
    ) -> list[Answer]:
        answers = granted_answers(shard, commands, run)
        for command, answer in zip(commands, answers, strict=False):
            self.oracle.replied(command, answer)
        return answers

    async def _report_lost(self, lost: Sequence[LostDecision]) -> None:
        self.oracle.lost |= {identity_of(one.command) for one in lost}

    # -- callers ---------------------------------------------------------------------------------------------

    async def _call(self, gate: Gate, process: Process, caller: int) -> None:
        producer = Producer()
        while self._progress[caller] < len(self._steps[caller]):
            step = self._steps[caller][self._progress[caller]]
            await asyncio.sleep(step.gap_seconds)
            if not step.commands:
                self.clock.shift_ms += step.pass_ms
                self.trace.add(f"caller-{caller}", f"{step.pass_ms} ms pass")
            elif step.way == "topic":
                await self._send_by_topic(producer, step)
            elif step.vanishes:
                await self._send_and_vanish(gate, step)
            else:
                await self._send(gate, process, step)
            self._progress[caller] += 1

    async def _send(self, gate: Gate, process: Process, step: Step) -> None:
        self._order += 1
        order = self._order
        commands = list(step.commands)
        who = f"caller-{step.caller}"
        self.trace.add(who, f"step {step.number}: {_names(commands)} ({step.way})")
        promise: Any = step.way
        is_first = step.number not in self._begun
        self._begun.add(step.number)
        while True:
            began = self.loop.now
            try:
                answers = await gate.decide(commands, promise, patience_ms=300)
            except OutcomeUnknown as error:
                self.trace.add(who, f"step {step.number}: outcome unknown: {error}"[:140])
                is_first = False
                await asyncio.sleep(0.05)
                continue
            if problem := self._overtaken(answers):
                self.oracle.violations.append(f"step {step.number}: {problem}")
            if all(answer.decided for answer in answers):
                if promise == "journaled" and any(answer.seq and not answer.repeated for answer in answers):
                    self._waited.append(self.loop.now - began)
                break
            self.trace.add(who, f"step {step.number}: {answers[-1].outcome}: {answers[-1].message}")
            if is_first:
                self.oracle.violations += self._untrue(commands, answers)
            if is_first and step.number % GIVES_UP_EVERY == 0:
                self._give_up(commands, answers)
                break
            is_first = False
            await asyncio.sleep(0.1)
        self.trace.add(
            who,
            f"step {step.number}: answered "
            + ", ".join(
                f"{answer.outcome}@{answer.seq}" if answer.seq else answer.outcome for answer in answers
            ),
        )
        for place, (command, answer) in enumerate(zip(commands, answers, strict=True)):
            if answer.decided:
                is_only = is_first and self._times_sent[identity_of(command)] == 1
                self.oracle.answered(
                    Given(step.caller, (order, place), command, answer, promise, process, is_only)
                )

    def _overtaken(self, answers: Sequence[Answer]) -> str | None:
        """What was decided although an earlier command of the list, in its shard, was not."""
        waits: dict[int, str] = {}
        for answer in answers:
            shard = self.keys.shard_of_offer(answer.offer or "")
            if not answer.decided:
                waits.setdefault(shard, answer.id)
            elif shard in waits and answer.shard is not None:
                return f"{answer.id} was decided ({answer.outcome}), {waits[shard]} before it was not"
        return None

    def _untrue(self, commands: Sequence[AnyCommand], answers: Sequence[Answer]) -> Iterator[str]:
        """Answers that nothing was decided to commands that have an event, and that no other caller sends."""
        for command, answer in zip(commands, answers, strict=True):
            name = identity_of(command)
            if not answer.decided and name in self.oracle.made and self._times_sent[name] == 1:
                yield f"{command.id} of {command.offer} was decided, and answered {answer.outcome}"

    def _give_up(self, commands: Sequence[AnyCommand], answers: Sequence[Answer]) -> None:
        """The caller goes away with what it was told: nothing was decided of the commands that were refused.
        This is checked for those that no other caller sends.
        """
        for command, answer in zip(commands, answers, strict=True):
            if not answer.decided and self._times_sent[identity_of(command)] == 1:
                self.oracle.given_up.append(command)

    async def _send_and_vanish(self, gate: Gate, step: Step) -> None:
        self.trace.add(f"caller-{step.caller}", f"step {step.number}: {_names(step.commands)}, and vanishes")
        asking = asyncio.create_task(gate.decide(list(step.commands)))
        await asyncio.sleep(0.001 * (step.number % 7))
        asking.cancel()
        with suppress(asyncio.CancelledError, OutcomeUnknown):
            await asking

    async def _send_by_topic(self, producer: Producer, step: Step) -> None:
        self.trace.add(f"caller-{step.caller}", f"step {step.number}: {_names(step.commands)} (topic)")
        # The order of an array holds within a topic.
        for topic, commands in groupby(step.commands, self.topics.of):
            texts = [encode_command(command) for command in commands]
            value = texts[0] if len(texts) == 1 else b"[" + b",".join(texts) + b"]"
            partition = self.keys.shard_of_offer(step.commands[0].offer)
            key = campaign_of(step.commands[0].offer).encode()
            while True:
                try:
                    await producer.send_and_wait(topic, value, key, partition)
                    break
                except Exception as error:
                    self.trace.add(f"caller-{step.caller}", f"step {step.number}: {error!r}, sends it again")
        self._sent += step.commands
        self._sent_at.append((self.loop.now, step.commands))

    # -- what goes wrong -------------------------------------------------------------------------------------

    async def _strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        if fault.step:
            if self._ending:
                return
            reached: asyncio.Future[str] = self.loop.create_future()
            entry = fault.step, reached
            self._awaited.append(entry)
            self.awaited[fault.step] += 1
            self.loop.call_later(STEP_SECONDS_MAX, self._does_not_happen, entry)
            name = await reached
            if not name:
                return
            self.begun[fault.step] += 1
            if name.startswith(("worker-", "gate-")):
                fault = fault._replace(target=int(name.rpartition("-")[2]))
        self.trace.add("FAULT", str(fault))
        self._active.append(fault.kind)
        began = self.loop.now
        try:
            await getattr(faults, fault.kind.replace(" ", "_"))(self, fault)
        finally:
            self._active.remove(fault.kind)
            self._struck.append((fault.kind, fault.target, began, self.loop.now))
        self.trace.add("FAULT", f"{fault.kind} is over")

    def _does_not_happen(self, entry: tuple[str, "asyncio.Future[str]"]) -> None:
        """No process has reached the step of a fault."""
        if entry in self._awaited:
            self._awaited.remove(entry)
            entry[1].set_result("")

    def promote(self) -> None:
        self.oracle.loses = True
        self.master, self.replica = self.replica, self.master
        self.replicates = False
        self.master.is_master = True
        self.master.replication_id = self.master.new_id()
        self.trace.add("world", f"{self.master.name} is promoted")

    def follow(self, former: Server) -> None:
        """A former master becomes a replica of the new one."""
        former.is_master = False
        self.replica = former
        self.master.replicate_to(former)
        self.replicates = True

    def route(self, client: Client) -> None:
        if client.server is self.master:
            return
        for subscription in list(client.server.subscriptions):
            if subscription.is_of(client):
                subscription.fail()
                client.server.subscriptions.remove(subscription)
        client.server = self.master
        self.trace.add("world", f"{client.name} is connected to {self.master.name}")

    async def _replicate(self) -> None:
        while True:
            await asyncio.sleep(self.draw.uniform(0.02, self._lag_seconds_max / 2))
            if self.replicates and self.master.up:
                self.master.replicate_to(self.replica)

    async def _write_to_disk(self) -> None:
        while True:
            for server in self.servers:
                if server.up and server.is_master:
                    server.fsync()
            await asyncio.sleep(self.draw.uniform(0.2, self._lag_seconds_max))

    async def _back_up(self) -> None:
        assert self.books is not None
        while True:
            if self.books.server.conditions.available:
                self.books.server.backup()
            await asyncio.sleep(self.draw.uniform(0.5, 2.0))

    def _clear_up(self) -> None:
        """Whatever overlapped: in the end everything is as it should be, but for commands that raise."""
        self.weather.__init__()  # type: ignore[misc]
        self.broker.conditions.__init__()  # type: ignore[misc]
        if self.books is not None:
            self.books.server.conditions.__init__()  # type: ignore[misc]
            self.books.faust.__init__()  # type: ignore[misc]
        for server in self.servers:
            server.is_full, server.skew_ms, server.breaks = False, 0, 0.0
        for process in self.processes.values():
            if process.alive and process.paused:
                self.loop.wake(process)
        for client in self.clients.values():
            client.late = 0.0
            self.route(client)

    # -- at rest ---------------------------------------------------------------------------------------------

    def _shards(self) -> Iterator[list[Any]]:
        """What is read in each shard: fields of its hash; entries of its outbox; what is due: a hold, an
        offer, an offer that is forgotten, what is to be cleaned; its lease; where there is SQL, counts.
        """
        now_ms = self.master.time_ms()
        for shard in range(SHARDS):
            keys = self.keys.shard(shard)
            look: list[Sequence[Any]] = [
                ("HMGET", keys.state, "seq", "journaled_seq", "server_epoch", "fault"),
                ("XLEN", keys.outbox),
                ("ZRANGE", keys.holds, "-inf", now_ms, "BYSCORE", "LIMIT", 0, 1),
                ("ZRANGE", keys.due, "-inf", now_ms, "BYSCORE", "LIMIT", 0, 1),
                ("ZRANGE", keys.past, "-inf", now_ms - PAYMENTS_KEPT_MS, "BYSCORE", "LIMIT", 0, 1),
                ("HKEYS", keys.cleaning),
                ("GET", keys.lease),
                ("HKEYS", keys.demand),
            ]
            yield self._store.run(self.master.database, look)

    def _unsettled(self) -> Iterator[str]:
        """What remains to be done, in words. Each of these is done automatically within a few seconds, and
        nothing new falls due but by the clock: callers have ended, and the time of day passes slowly.
        """
        holders = set()
        for shard, found in enumerate(self._shards()):
            (seq, journaled, epoch, fault), entries, hold, offer, past, cleaning, lease, demand = found
            lines = len(self.oracle.journal[shard].lines)
            is_decided = (epoch or b"").decode() == self.master.epoch
            if not is_decided or {int(seq or 0), int(journaled or 0), lines} != {lines}:
                yield f"shard {shard}: seq {seq}, journaled {journaled}, journal {lines}, fault {fault}"
            # Everything is acknowledged, so the last trim leaves nothing.
            if entries:
                yield f"shard {shard}: {entries} entries in the outbox"
            for what, names in (
                ("hold", hold),
                ("offer", offer),
                ("past offer", past),
                ("cleaning", cleaning),
            ):
                if names:
                    yield f"shard {shard}: {what} due: {names}"
            if self.books is not None:
                # A count is copied when no clock can still count in its second.
                past_second = self.master.time_ms() // 1_000 - GATE.clock_skew_ms_max // 1_000
                if late := [name for name in demand if int(name.partition(b":")[0]) < past_second]:
                    yield f"shard {shard}: counts of refusals that are not in SQL: {late}"
            holders.add(lease)
        if len(holders) < min(self.plan.workers, SHARDS) or None in holders:
            yield f"the leases of all shards: {holders}"

    def _held_beside(self) -> list[bytes]:
        """Holds that are due, without those of commands for which scripts raise."""
        found = []
        for shard in range(SHARDS):
            look = ("ZRANGE", self.keys.shard(shard).holds, "-inf", self.master.time_ms(), "BYSCORE")
            due = self._store.run(self.master.database, [look])[0]
            # The name of an offer may be that of a poisoned command.
            found += [one for one in due if self.poisoned.isdisjoint(one.decode().split("/"))]
        return found

    def _is_at_rest(self) -> bool:
        if next(self._unsettled(), None) is not None:
            return False
        if not all(
            self.broker.group(decider_group(self.topics, topic)).committed.get(partition, 0) == len(log)
            for topic in self._of_commands()
            for partition, log in _partitions(topic, self.broker)
        ):
            return False
        return self.books is None or not self.books.lags(self.oracle.journal)

    def _of_commands(self) -> tuple[str, str]:
        return self.topics.commands, self.topics.operations

    def _state(self) -> str:
        shards = list(self._unsettled())
        shards += self.books.lags(self.oracle.journal) if self.books is not None else []
        return "; ".join(shards) + f"; steps {self._progress} of {list(map(len, self._steps))}"

    async def _ask_again(self) -> None:
        """The first answers again, by a separate gate."""
        given = self.oracle.repeatable(REPEATED_MAX)
        process, client = self.started("asking")

        async def ask() -> None:
            gate = Gate(client, self.keys, SEALER, GATE, tickets=TICKETS)
            gate.start()
            for one in given:
                try:
                    [again] = await gate.decide([one.command], patience_ms=5_000, timeout_ms=20_000)
                except OutcomeUnknown as error:
                    self.oracle.violations.append(f"asked again: {error}")
                    continue
                first = one.answer
                # It has retired meanwhile: its answers are forgotten, and its id stays used; of a payment,
                # outcome and event are known.
                if isinstance(one.command, Confirm) and again.repeated and again.amount is None:
                    self._retired_meanwhile.add(one.command.offer)
                    first, again = (replace(answer, amount=None) for answer in (first, again))
                if again.outcome == ("conflict" if isinstance(one.command, Open) else "no_such_offer"):
                    continue
                if (again.outcome, again.seq, again.amount) != (first.outcome, first.seq, first.amount):
                    self.oracle.violations.append(f"asked again: first {first}, then {again}")
            for command in self.oracle.of_retired(REPEATED_MAX):
                [again] = await gate.decide([command], patience_ms=5_000, timeout_ms=20_000)
                if again.outcome not in ("no_such_offer", "conflict"):
                    self.oracle.violations.append(f"its offer has retired: {command}, then {again}")
            await gate.close()

        await self.loop.spawn(process, ask())

    def _check_results(self) -> None:
        """Each command of the topic has an answer, and the answers to one say the same."""
        answers: dict[str, list[Any]] = {}
        for log in self.broker.topics[self.topics.results]:
            for record in log:
                answer = decode_answer(record.value or b"")
                answers.setdefault(answer.id, []).append(answer)
        sent = Counter(command.id for step in self.plan.steps for command in step.commands)
        self._check_kept()
        for topic in self._of_commands():
            for partition, log in enumerate(self.broker.topics[topic]):
                self.oracle.check_topic_order(self._sent_in(partition, log))
        # Of these it is unknown whether they are decided: each call with them failed after a write.
        set_aside = [
            decode_command(record.value or b"")
            for record in self.broker.topics[self.topics.rejected][0]
            if (SET_ASIDE_HEADER, b"1") in record.headers
        ]
        aside = {command.id for command in set_aside}
        self.oracle.violations += [
            f"topic: {command.id} was set aside, although no script fails for it"
            for command in set_aside
            if not self.fails_for(command)
        ]
        by_id = {command.id: command for command in self._sent}
        retired = self.oracle.retired_offers()
        for command_id, command in by_id.items():
            found = answers.get(command_id, [])
            if undecided := [answer for answer in found if not answer.decided]:
                self.oracle.violations.append(f"topic: {undecided[0]} may not be an answer")
            if not found and command_id not in aside:
                self.oracle.violations.append(f"topic: no answer to {command_id} of {command.offer}")
            if sent[command_id] > 1:
                continue
            for answer in found:
                self.oracle.answered(Given(-1, (0, 0), command, answer, "journaled", None))
            positive = [one for one in found if one.positive]
            # Of the payments of a retired offer, outcome and event are still known.
            amounts = {one.amount for one in positive if not (one.repeated and one.offer in retired)}
            if len({(one.outcome, one.seq) for one in positive}) > 1 or len(amounts) > 1:
                self.oracle.violations.append(f"topic: {command_id} has several answers: {found}")

    def _sent_in(self, partition: int, log: Sequence[Any]) -> Iterator[Identity]:
        """The commands in a partition, in order: those that were sent once, and for which scripts do not
        fail.
        """
        names = {identity_of(command) for command in self._sent if not self.fails_for(command)}
        for record in log:
            if (record.topic, partition, record.offset) in self.malformed:
                continue
            value = json.loads(record.value)
            for one in value if isinstance(value, list) else [value]:
                name: Identity = (campaign_of(one["offer"]), one["id"])
                if one["type"] == "grab":
                    name = (one["offer"], one["user"], one["id"])
                if name in names and self._times_sent[name] == 1:
                    yield name

    def _check_kept(self) -> None:
        """What holds no command is kept with its bytes. Of commands with a secret, only their length is kept;
        nothing else is, but for what was set aside.
        """
        secrets = {len(encode_command(command)) for command in self._sent if secret_of(command)}
        kept: dict[tuple[str, int, int], bytes] = {}
        kept_secrets: set[int] = set()
        for record in self.broker.topics[self.topics.rejected][0]:
            headers = dict(record.headers)
            if SET_ASIDE_HEADER in headers:
                continue
            place = headers["topic"].decode(), int(headers["partition"]), int(headers["offset"])
            if place in self.malformed:
                kept[place] = record.value or b""
            else:
                kept_secrets.add(int(headers["withheld"]))
                if record.value:
                    self.oracle.violations.append(f"topic: {record.value!r} was copied")
        if kept_secrets != secrets:
            self.oracle.violations.append(f"topic: kept {kept_secrets}, commands with secrets {secrets}")
        for place, value in sorted(self.malformed.items()):
            # An array of one element is kept as this element.
            if kept.get(place) not in (value, value[1:-1]):
                self.oracle.violations.append(f"topic: {value!r} at {place} was kept as {kept.get(place)!r}")

    def fails_for(self, command: AnyCommand) -> bool:
        """Whether a fault of this run made scripts break off, or raise for a command with a poisoned name."""
        text = encode_command(command)
        # A ticket says names that its command does not, and a basket fails as a whole.
        has_others = isinstance(command, Grab) and (command.ticket or command.basket)
        return (
            bool(self.poisoned and has_others)
            or campaign_of(command.offer) in self.poisoned
            or any(f'"{name}"'.encode() in text for name in self.poisoned)
            or "redis breaks off" in self._planned
        )

    def _has_lost_refusals(self) -> bool:
        """Whether refusals may be gone: with what Redis had, or by the rebuild of a shard."""
        return self.oracle.loses or not self._planned.isdisjoint(("redis breaks off", "layout outdated"))

    def _check_counts(self) -> None:
        """No refusal is missing in the counts of Redis and SQL together: each that callers got was counted in
        the second of its time. Others may have been counted for callers that have gone away, so there may be
        more. What Redis or PostgreSQL have lost may be counted nowhere.
        """
        kinds = {fault.kind for fault in self.plan.faults}
        if self.oracle.loses or "postgresql tail lost" in kinds:
            return
        counted: Counter[tuple[int, int, int, str]] = Counter()
        if self.books is not None:
            counted.update(self.books.demand())
        for shard in range(SHARDS):
            look = ("HGETALL", self.keys.shard(shard).demand)
            fields = self._store.run(self.master.database, [look])[0]
            for name, count in fields.items():
                second, code, offer = name.decode().split(":", 2)
                key = shard, int(second), int(code), offer
                # A count is deleted only after it was copied.
                counted[key] = max(counted[key], int(count))
        for key, least in sorted(self.oracle.refusals_counted().items()):
            if counted[key] < least:
                self.oracle.violations.append(
                    f"demand of (shard, second, code, offer) {key}: {counted[key]} are counted, callers got "
                    f"{least}"
                )
                return

    def _check_calm(self) -> None:
        """Where nothing goes wrong, no error is logged, and callers are notified at once; where nothing lasts
        as long as the watchdog waits, Faust is started once by each worker.
        """
        if not self.plan.faults:
            self.oracle.violations += [
                line
                for line in self.trace.lines[: self._lines_at_rest]
                if "log error: " in line or "log critical: " in line
            ][:3]
            waited = sorted(self._waited)
            # A waiter that is not notified polls every tenth of a second. A record is acknowledged within a
            # few ms.
            if len(waited) > 3 and waited[len(waited) // 4] > UNTOLD_SECONDS:
                self.oracle.violations.append(f"callers were not told that events are journaled: {waited}")
        if self.books is None:
            return
        # Until then, nothing is ever wrong with what the verifier compares, so no finding is right, also none
        # that is cleared later. Only a former master that lives on really differs from the books, until it is
        # reconciled.
        lives_on = any(fault.kind in DIVIDED for fault in self.plan.faults)
        lines = self.trace.lines[: self._lines_at_rest]
        findings = [line for line in lines if "log critical: verification" in line]
        self.oracle.violations += [line for line in findings if not (lives_on and " Redis" in line)][:3]
        hindered = sum(
            fault.seconds for fault in self.plan.faults if not fault.kind.startswith(("redis", "gate"))
        )
        # An app that stalls, or has left records out, is started again; so is one whose records PostgreSQL
        # has lost, if no others follow.
        started_again = {"faust stalls", "faust skips", "postgresql tail lost"}
        if any(fault.kind in started_again for fault in self.plan.faults):
            return
        workers = sum(count for name, count in self._starts.items() if name.startswith("worker-"))
        # A worker has an app for the read models, and one for events.
        if hindered < HINDERED_SECONDS_MAX and len(self.books.started) > 2 * workers:
            self.oracle.violations.append(f"Faust was started {len(self.books.started)} times")

    def _check_neighbours(self) -> None:
        """While one shard's partition of the journal has no leader, and nothing else is wrong, commands of
        other shards are answered. Lists with commands of both are left out, and what is sent after them.
        """
        for kind, target, began, ended in self._struck:
            others = [one for one in self._struck if one != (kind, target, began, ended)]
            if kind != "kafka leaderless" or any(one[2] < ended and began - 5.0 < one[3] for one in others):
                continue
            for sent_at, commands in self._sent_at:
                if not began <= sent_at < ended - NEIGHBOUR_SECONDS_MAX:
                    continue
                shards = {self.keys.shard_of_offer(command.offer) for command in commands}
                if target % SHARDS in shards:
                    if len(shards) > 1:
                        break
                    continue
                late = [
                    command.id
                    for command in commands
                    if self._answered_at.get(command.id.encode(), 1e9) > sent_at + NEIGHBOUR_SECONDS_MAX
                ]
                if late:
                    self.oracle.violations.append(
                        f"topic: {late[0]} waits for shard {target % SHARDS}, which is not its own"
                    )

    def _check_refusals(self) -> None:
        """What is remembered of refusals is in order once each. As long as Redis has lost nothing, the latest
        are remembered, as many as there is room for: at least those that callers got, of offers that have not
        retired.
        """
        given = self.oracle.refusals_remembered()
        for shard in range(SHARDS):
            keys = self.keys.shard(shard)
            look = [("HKEYS", keys.refusals), ("LRANGE", keys.refusal_order, "0", "-1")]
            remembered, order = self._store.run(self.master.database, look)
            if sorted(remembered) != sorted(order):
                self.oracle.violations.append(f"shard {shard}: refusals {remembered}, their order {order}")
            least = min(len(given[shard]), smaller.REFUSALS_MAX)
            if not self._has_lost_refusals() and len(order) < least:
                self.oracle.violations.append(
                    f"shard {shard}: {len(order)} refusals are remembered, callers got {least}"
                )

    async def _compare_with_journal(self) -> None:
        """What Redis has is what a fold of the journal gives, key by key."""
        lines = [list(reading.raw) for reading in self.oracle.journal]
        self._store.copy(self.master.database, FOLD_DATABASE)
        server = Server("fold", self._store, FOLD_DATABASE, FOLD_DATABASE, self.clock, self.loop, self.draw)
        client = AtOnce("fold", server, self.weather, self.loop, self.draw, self.trace)
        scratch = KeySpace("fold", SHARDS)
        for shard in range(SHARDS):
            # The sweeper forgets by the clock, also when no event follows; a shard's clock never goes back.
            [time_ms] = self._store.run(
                self.master.database, [("HGET", self.keys.shard(shard).state, "time")]
            )
            now_ms = max(self.clock.ms(), int(time_ms or 0))
            live = await contents(client, self.keys.shard(shard), now_ms)
            try:
                await fold(client, scratch.shard(shard), lines[shard], SEALER, SHARDS)
            except Exception as error:
                self.oracle.violations.append(f"shard {shard}: a recovery fails: {error!r}")
                continue
            folded = await contents(client, scratch.shard(shard), now_ms)
            align_postponed_due_times(live, folded, now_ms)
            found = differences(live, folded)
            if found:
                self.oracle.violations.append(f"shard {shard}: Redis / its journal: {found[:8]}")

    def forge(self, shard: int, headers: Any, value: bytes) -> None:
        """Appends a record without a relay's key to the journal."""
        self.oracle.journal[shard].forged = len(self.broker.topics[self.topics.journal][shard])
        self.broker.append(self.topics.journal, shard, None, value, headers)

    def _appended(self, record: Any) -> None:
        if record.topic == self.topics.results:
            self._answered_at.setdefault(record.key, self.loop.now)
        if record.topic == self.topics.journal:
            named = dict(record.headers)
            what = (
                "marker"
                if named["count"] == b"0"
                else f"{named['count'].decode()} events from seq {named['first_seq'].decode()}"
            )
            self.trace.add(
                "journal",
                f"{record.partition}/{record.offset}: {what}, term {named['term'].decode()} of "
                f"{named['owner'].decode()[:6]}",
            )
            self.oracle.appended(record)


class AtOnce(Client):
    """A client whose calls take no time."""

    async def _call(self, server: Server, args: Sequence[Any]) -> Any:
        reply = server.carry_out(args)[0]
        if isinstance(reply, Exception):
            raise reply
        return reply


class _Failed(Exception):
    """The run cannot continue."""


def _partitions(topic: str, broker: Broker) -> Iterable[tuple[Any, list[Any]]]:
    return ((TopicPartition(topic, number), log) for number, log in enumerate(broker.topics[topic]))


def _names(commands: Sequence[AnyCommand]) -> str:
    return ", ".join(f"{type(one).__name__.lower()} {one.id} of {one.offer}" for one in commands)[:160]


@contextmanager
def patched(broker: Broker) -> Iterator[None]:
    """Puts the simulated Kafka clients where `streams/` imports the real ones."""
    producer = type("SimulatedProducer", (Producer,), {"broker": broker})
    consumer = type("SimulatedConsumer", (Consumer,), {"broker": broker})
    with ExitStack() as stack:
        for release in RELEASES:
            for module in map(release.module, KAFKA_MODULES):
                for name, replacement in (("AIOKafkaProducer", producer), ("AIOKafkaConsumer", consumer)):
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, replacement))
            sweeper = release.module("streams.deciding.sweeper")
            stack.enter_context(mock.patch.object(sweeper, "SWEEP_EVERY_SECONDS", SWEEP_EVERY_SECONDS))
        stack.enter_context(mock.patch.object(Producer, "broker", broker, create=True))
        yield


class Servers:
    """The private servers: each starts when a run needs it."""

    def __init__(self) -> None:
        self.store = Store()
        self._database: PrivatePostgres | None = None

    def database(self) -> PrivatePostgres:
        """PostgreSQL."""
        if self._database is None:
            with signals_wait():
                self._database = PrivatePostgres()
            prepare(self._database, PREFIX, SHARDS)
        return self._database

    def close(self) -> None:
        """Ends them."""
        self.store.close()
        if self._database is not None:
            self._database.close()


def play(plan: Plan, servers: Servers) -> Verdict:
    """Plays a plan."""
    with quietly_freed(), smaller_bounds(plan.has_small_backlogs):
        return World(plan, servers.store, servers.database).play()
