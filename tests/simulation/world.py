"""One run: the servers, the processes, the callers, what goes wrong, and the verdict."""

import asyncio
import hashlib
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, NamedTuple
from unittest import mock

from aiokafka import TopicPartition

from grabstream.lua.gate.calls import GateLimits
from grabstream.lua.gate.decided import LostDecision
from grabstream.lua.gate.gate import Gate
from grabstream.lua.gate.queue import OutcomeUnknown
from grabstream.lua.keys import KeySpace
from grabstream.models.answers import decode_answer
from grabstream.models.commands import AnyCommand, Open, encode_command
from grabstream.models.identifiers import campaign_of
from grabstream.streams import journal as journal_module
from grabstream.streams.deciding import decider as decider_module
from grabstream.streams.deciding import sweeper as sweeper_module
from grabstream.streams.relaying import relay as relay_module
from grabstream.streams.topics import Topics
from grabstream.streams.worker import WorkerSettings, roles_of, run_worker
from tests.lua.conftest import SEALER
from tests.lua.histories.recovered import align_postponed_due_times, contents, differences, fold
from tests.lua.histories.strategies import TICKETS
from tests.simulation.kafka_broker import Broker, Consumer, Producer
from tests.simulation.loop import Endless, Process, SimulatedLoop
from tests.simulation.machine import Clock, Trace, quietly_freed, simulated_machine
from tests.simulation.oracle import Given, Oracle
from tests.simulation.plan import CALLERS, SHARDS, Fault, Plan, Step
from tests.simulation.redis_server import Client, Server, Store, Weather

PREFIX: Final = "sim"
WORKERS: Final = 2
ROLES: Final = ("decide", "relay", "sweep")
LEASE_MS: Final = 1_600
GATE: Final = GateLimits(timeout_ms=1_500, outbox_events_max=500, batch_commands_max=64)
#: Less often than in earnest: a sweep that finds nothing costs as much as one that does.
SWEEP_EVERY_SECONDS: Final = 0.9
#: Virtual seconds within which everything must be at rest once faults have ended.
REST_SECONDS_MAX: Final = 90.0
REPEATED_MAX: Final = 12
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
    met: "Counter[tuple[str, str]]"


class World:
    """The world of one run. Everything in it follows from the plan."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan = plan
        self.loop = SimulatedLoop()
        self.clock = Clock(self.loop)
        self.trace = Trace(self.loop)
        self.oracle = Oracle(SHARDS, GATE.outbox_events_max)
        self.keys = KeySpace(PREFIX, SHARDS)
        self.topics = Topics(PREFIX)
        self._store = store
        self._draw = random.Random(f"{plan.seed} latency")
        self.entropy = random.Random(f"{plan.seed} entropy")
        self.weather = Weather()
        self.broker = Broker(self.loop, random.Random(f"{plan.seed} kafka"), self.trace)
        for topic in (self.topics.journal, self.topics.commands, self.topics.results):
            self.broker.create(topic, SHARDS)
        self.broker.create(self.topics.rejected, 1)
        self.broker.appended = self._appended
        store.flush()
        self.servers = [
            Server(f"redis-{number}", store, *databases, self.clock, self.loop, self._draw)
            for number, databases in enumerate(SERVER_DATABASES)
        ]
        self.master, self.replica = self.servers
        self.replica.is_master = False
        self.replica.replication_id = self.master.replication_id
        self._replicates = True
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
        self.met: Counter[tuple[str, str]] = Counter()
        self._active: list[str] = []
        self.gate: Gate | None = None

    # -- the run ---------------------------------------------------------------------------------------------

    def play(self) -> Verdict:
        """Plays the plan."""
        problems: list[str] = []
        with patched(self.broker), simulated_machine(self.loop, self.clock, self.trace, self.entropy):
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self.loop.create_task(self._drive()))
            except Endless as error:
                problems.append(f"it never ends: {error}")
            except _Failed as error:
                problems.append(str(error))
            finally:
                asyncio.set_event_loop(None)
                for process in self.processes.values():
                    process.alive = False
        if self._calm:
            self.oracle.check_journal()
            self.oracle.check_answers()
            self.oracle.check_order()
        problems = list(dict.fromkeys([*self.oracle.violations, *problems, *self.loop.failures[:3]]))
        seconds = self.loop.now
        events = sum(len(reading.lines) for reading in self.oracle.journal)
        digest = hashlib.sha256("\n".join(self.trace.lines).encode())
        for reading in self.oracle.journal:
            digest.update(reading.head)
        self.loop.close()
        return Verdict(self.plan, problems, self.trace.lines, digest.hexdigest(), seconds, events, self.met)

    async def _drive(self) -> None:
        kinds = {fault.kind for fault in self.plan.faults}
        background = [self._replicate()] if kinds & {"redis failover", "redis split"} else []
        background += [self._write_to_disk()] if "redis tail lost" in kinds else []
        tasks = [asyncio.create_task(one) for one in background]
        for number in range(WORKERS):
            self._start_worker(number)
        self._start_gate()
        faults = [asyncio.create_task(self._strike(fault)) for fault in self.plan.faults]
        await self._until(lambda: all(self._finished()), 60.0, "the callers have been answered")
        await asyncio.gather(*faults)
        for task in tasks:
            task.cancel()
        self._clear_up()
        self.trace.add("world", "faults have ended")
        await self._until(self._is_at_rest, REST_SECONDS_MAX, "everything is at rest")
        await self._ask_again()
        await self._until(self._is_at_rest, REST_SECONDS_MAX, "everything is at rest again")
        self._check_results()
        await self._compare_with_journal()
        self._calm = True

    async def _until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        deadline = self.loop.now + seconds
        while not condition():
            if self.oracle.violations or self.loop.failures:
                raise _Failed("the run was broken off")
            if self.loop.now > deadline:
                raise _Failed(f"not within {seconds:.0f} s: {what}; {self._state()}")
            await asyncio.sleep(0.05)

    def _finished(self) -> Iterator[bool]:
        return (progress == len(steps) for progress, steps in zip(self._progress, self._steps, strict=True))

    # -- processes -------------------------------------------------------------------------------------------

    def _started(self, name: str) -> tuple[Process, Client]:
        self._starts[name] += 1
        process = Process(name)
        self.processes[name] = process
        client = Client(
            name, self.master, self.weather, self.loop, self._draw, self.trace, self.oracle.called
        )
        self.clients[name] = client
        self.trace.add(name, f"starts (number {self._starts[name]})")
        return process, client

    def _start_worker(self, number: int) -> None:
        name = f"worker-{number}"
        process, client = self._started(name)

        async def work() -> None:
            settings = WorkerSettings("simulated", PREFIX, SHARDS, 0, GATE, 7, LEASE_MS)
            roles = roles_of(settings, ROLES, client, SEALER, TICKETS, None, None, {}, step=self._stepped)
            try:
                await run_worker(roles, asyncio.Event())
            except BaseException as error:
                self.oracle.violations.append(f"{name} ended by itself: {error!r}")
                raise
            self.oracle.violations.append(f"{name} ended by itself")

        self.loop.spawn(process, work())

    def _start_gate(self) -> None:
        process, client = self._started("gate")

        async def serve() -> None:
            gate = Gate(client, self.keys, SEALER, GATE, tickets=TICKETS, report_lost=self._report_lost)
            self.gate = gate
            gate.start()
            callers = [asyncio.create_task(self._call(gate, process, caller)) for caller in range(CALLERS)]
            for caller in callers:
                try:
                    await caller
                except Exception as error:
                    words = "".join(traceback.format_exception(error)[-3:])
                    self.oracle.violations.append(f"a caller of the gate got {error!r}: {words}")
                    raise

        self.loop.spawn(process, serve())

    def _stepped(self, step: str) -> None:
        """A named step of the code: what was wrong at that moment."""
        for kind in self._active or ["nothing"]:
            self.met[kind, step] += 1

    async def _report_lost(self, lost: Sequence[LostDecision]) -> None:
        self.oracle.lost |= {(campaign_of(one.command.offer), one.command.id) for one in lost}

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
        while True:
            try:
                answers = await gate.decide(commands, promise, patience_ms=300)
            except OutcomeUnknown as error:
                self.trace.add(who, f"step {step.number}: outcome unknown: {error}"[:140])
                await asyncio.sleep(0.05)
                continue
            if all(answer.decided for answer in answers):
                break
            self.trace.add(who, f"step {step.number}: {answers[-1].outcome}: {answers[-1].message}")
            await asyncio.sleep(0.1)
        self.trace.add(
            who,
            f"step {step.number}: answered "
            + ", ".join(f"{answer.outcome}@{answer.seq}" for answer in answers),
        )
        for command, answer in zip(commands, answers, strict=True):
            self.oracle.answered(Given(step.caller, order, command, answer, promise, process))

    async def _send_and_vanish(self, gate: Gate, step: Step) -> None:
        self.trace.add(f"caller-{step.caller}", f"step {step.number}: {_names(step.commands)}, and vanishes")
        asking = asyncio.create_task(gate.decide(list(step.commands)))
        await asyncio.sleep(0.001 * (step.number % 7))
        asking.cancel()
        with suppress(asyncio.CancelledError, OutcomeUnknown):
            await asking

    async def _send_by_topic(self, producer: Producer, step: Step) -> None:
        self.trace.add(f"caller-{step.caller}", f"step {step.number}: {_names(step.commands)} (topic)")
        texts = [encode_command(command) for command in step.commands]
        value = texts[0] if len(texts) == 1 else b"[" + b",".join(texts) + b"]"
        partition = self.keys.shard_of_offer(step.commands[0].offer)
        while True:
            try:
                await producer.send_and_wait(
                    self.topics.commands, value, campaign_of(step.commands[0].offer).encode(), partition
                )
                break
            except Exception as error:
                self.trace.add(f"caller-{step.caller}", f"step {step.number}: {error!r}, sends it again")
        self._sent += step.commands

    # -- what goes wrong -------------------------------------------------------------------------------------

    async def _strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        self.trace.add("FAULT", str(fault))
        self._active.append(fault.kind)
        try:
            await getattr(self, "_" + fault.kind.replace(" ", "_"))(fault)
        finally:
            self._active.remove(fault.kind)
        self.trace.add("FAULT", f"{fault.kind} is over")

    async def _kill(self, name: str, seconds: float, start: Callable[[], None]) -> None:
        process = self.processes[name]
        if not process.alive:
            return
        self.loop.kill(process)
        await asyncio.sleep(seconds)
        start()

    async def _pause(self, name: str, seconds: float) -> None:
        process = self.processes[name]
        if not process.alive or process.paused:
            return
        process.paused = True
        await asyncio.sleep(seconds)
        if process.alive:
            self.loop.wake(process)

    async def _worker_crash(self, fault: Fault) -> None:
        number = fault.target % WORKERS
        await self._kill(f"worker-{number}", fault.seconds, lambda: self._start_worker(number))

    async def _worker_pause(self, fault: Fault) -> None:
        await self._pause(f"worker-{fault.target % WORKERS}", fault.seconds)

    async def _gate_crash(self, fault: Fault) -> None:
        await self._kill("gate", fault.seconds, self._start_gate)

    async def _gate_pause(self, fault: Fault) -> None:
        await self._pause("gate", fault.seconds)

    async def _restart(self, fault: Fault, keeps: str) -> None:
        server = self.master
        if not server.up:
            return
        server.stop()
        await asyncio.sleep(fault.seconds)
        if server is self.master:
            server.start(keeps)

    async def _redis_restart(self, fault: Fault) -> None:
        await self._restart(fault, "all")

    async def _redis_tail_lost(self, fault: Fault) -> None:
        await self._restart(fault, "disk")

    async def _redis_emptied(self, fault: Fault) -> None:
        await self._restart(fault, "nothing")

    async def _redis_failover(self, fault: Fault) -> None:
        """The master dies, and its replica, which lags, is promoted."""
        former = self.master
        if not former.up or not self._replicates:
            return
        former.stop()
        await asyncio.sleep(min(fault.seconds, 1.0))
        self._promote()
        for client in self.clients.values():
            self._route(client)
        await asyncio.sleep(fault.seconds)
        former.up = True
        former.known.clear()
        former.run_id = former.new_id()
        self._follow(former)

    async def _redis_split(self, fault: Fault) -> None:
        """The replica is promoted while the master lives, and some clients still talk to that one."""
        former = self.master
        if not former.up or not self._replicates:
            return
        self._promote()
        clients = sorted(self.clients)
        self._draw.shuffle(clients)
        for name in clients:
            await asyncio.sleep(self._draw.uniform(0, 2 * fault.seconds / len(clients)))
            self._route(self.clients[name])
        await asyncio.sleep(self._draw.uniform(0, 0.2))
        former.stop()
        former.up = True
        self._follow(former)
        for client in self.clients.values():
            self._route(client)

    def _promote(self) -> None:
        self.master, self.replica = self.replica, self.master
        self._replicates = False
        self.master.is_master = True
        self.master.replication_id = self.master.new_id()
        self.trace.add("world", f"{self.master.name} is promoted")

    def _follow(self, former: Server) -> None:
        """A former master becomes a replica of the new one."""
        former.is_master = False
        self.replica = former
        self.master.replicate_to(former)
        self._replicates = True

    def _route(self, client: Client) -> None:
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
            await asyncio.sleep(self._draw.uniform(0.02, 0.5))
            if self._replicates and self.master.up:
                self.master.replicate_to(self.replica)

    async def _write_to_disk(self) -> None:
        while True:
            for server in self.servers:
                if server.up and server.is_master:
                    server.fsync()
            await asyncio.sleep(self._draw.uniform(0.2, 1.0))

    async def _during(self, fault: Fault, target: Any, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(target, name, value)
        await asyncio.sleep(fault.seconds)
        plain = type(target)() if isinstance(target, Weather) else None
        for name in changes:
            setattr(target, name, getattr(plain, name) if plain else type(changes[name])(0))

    async def _redis_slow(self, fault: Fault) -> None:
        await self._during(fault, self.weather, slow=60.0 * fault.share)

    async def _redis_lossy(self, fault: Fault) -> None:
        await self._during(fault, self.weather, request_lost=fault.share / 4, reply_lost=fault.share / 2)

    async def _redis_full(self, fault: Fault) -> None:
        await self._during(fault, self.master, is_full=True)

    async def _redis_clock(self, fault: Fault) -> None:
        await self._during(fault, self.master, skew_ms=(9_000, -9_000, 3_000, -3_000)[fault.target])

    async def _announcements_lost(self, fault: Fault) -> None:
        await self._during(fault, self.weather, announcement_lost=1.0)

    async def _kafka_away(self, fault: Fault) -> None:
        await self._during(fault, self.broker.conditions, available=False)

    async def _kafka_slow(self, fault: Fault) -> None:
        await self._during(fault, self.broker.conditions, slow=100.0 * fault.share)

    async def _kafka_unacknowledged(self, fault: Fault) -> None:
        await self._during(fault, self.broker.conditions, unacknowledged=fault.share)

    async def _kafka_late(self, fault: Fault) -> None:
        await self._during(fault, self.broker.conditions, late=fault.share)

    async def _kafka_twice(self, fault: Fault) -> None:
        await self._during(fault, self.broker.conditions, twice=fault.share)

    async def _group_rebalance(self, fault: Fault) -> None:
        self.broker.group(f"{PREFIX}.decider").rebalance()

    def _clear_up(self) -> None:
        """Whatever overlapped: in the end everything is as it should be."""
        self.weather.__init__()  # type: ignore[misc]
        self.broker.conditions.__init__()  # type: ignore[misc]
        for server in self.servers:
            server.is_full, server.skew_ms = False, 0
        for process in self.processes.values():
            if process.alive and process.paused:
                self.loop.wake(process)
        for client in self.clients.values():
            self._route(client)

    # -- at rest ---------------------------------------------------------------------------------------------

    def _shard_state(self, shard: int) -> list[Any]:
        fields = ("seq", "journaled_seq", "life", "fault")
        look = ("HMGET", self.keys.shard(shard).state, *fields)
        return list(self._store.run(self.master.database, [look])[0])

    def _is_at_rest(self) -> bool:
        for shard in range(SHARDS):
            seq, journaled, life, _ = self._shard_state(shard)
            if (seq or b"0") != (journaled or b"0") or (life or b"").decode() != self.master.epoch:
                return False
            if int(seq or 0) != len(self.oracle.journal[shard].lines):
                return False
        group = self.broker.group(f"{PREFIX}.decider")
        return all(
            group.committed.get(partition, 0) == len(log)
            for partition, log in _partitions(self.topics.commands, self.broker)
        )

    def _state(self) -> str:
        shards = [
            f"shard {shard}: seq {state[0]}, journaled {state[1]}, fault {state[3]}, "
            f"journal {len(self.oracle.journal[shard].lines)}"
            for shard in range(SHARDS)
            for state in [self._shard_state(shard)]
        ]
        return "; ".join(shards) + f"; steps {self._progress} of {list(map(len, self._steps))}"

    async def _ask_again(self) -> None:
        """The first answers again, by a gate of its own."""
        given = self.oracle.repeatable(REPEATED_MAX)
        process, client = self._started("gate-2")

        async def ask() -> None:
            gate = Gate(client, self.keys, SEALER, GATE, tickets=TICKETS)
            gate.start()
            for one in given:
                [again] = await gate.decide([one.command], patience_ms=5_000, timeout_ms=20_000)
                first = one.answer
                # It has retired meanwhile: its answers are forgotten, and its id stays used.
                if again.outcome == ("conflict" if isinstance(one.command, Open) else "no_such_offer"):
                    continue
                if (again.outcome, again.seq, again.amount) != (first.outcome, first.seq, first.amount):
                    self.oracle.violations.append(f"asked again: first {first}, then {again}")
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
        by_id = {command.id: command for command in self._sent}
        for command_id, command in by_id.items():
            found = answers.get(command_id, [])
            if not found:
                self.oracle.violations.append(f"topic: no answer to {command_id} of {command.offer}")
            if sent[command_id] > 1:
                continue
            for answer in found:
                self.oracle.answered(Given(-1, 0, command, answer, "journaled", None))
            positive = {(one.outcome, one.seq, one.amount) for one in found if one.positive}
            if len(positive) > 1:
                self.oracle.violations.append(f"topic: {command_id} has several answers: {found}")

    async def _compare_with_journal(self) -> None:
        """What Redis has is what a fold of the journal gives, key by key."""
        lines = [list(reading.lines) for reading in self.oracle.journal]
        self._store.copy(self.master.database, FOLD_DATABASE)
        server = Server("fold", self._store, FOLD_DATABASE, FOLD_DATABASE, self.clock, self.loop, self._draw)
        client = AtOnce("fold", server, self.weather, self.loop, self._draw, self.trace)
        scratch = KeySpace("fold", SHARDS)
        # The sweeper forgets by the clock, also when no event follows.
        now_ms = self.clock.ms()
        for shard in range(SHARDS):
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

    def _appended(self, record: Any) -> None:
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
    """The run cannot go on."""


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
        for module in (relay_module, journal_module, decider_module):
            for name, replacement in (("AIOKafkaProducer", producer), ("AIOKafkaConsumer", consumer)):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, replacement))
        stack.enter_context(mock.patch.object(Producer, "broker", broker, create=True))
        stack.enter_context(mock.patch.object(sweeper_module, "SWEEP_EVERY_SECONDS", SWEEP_EVERY_SECONDS))
        yield


def play(plan: Plan, store: Store) -> Verdict:
    """Plays a plan."""
    with quietly_freed():
        return World(plan, store).play()
