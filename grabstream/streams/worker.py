"""A worker: the roles of one process, started and stopped together.

- `decide` answers commands of the two topics.
- `relay` copies outboxes to the journal.
- `sweep` ends due holds and offers, and copies counts of refusals to SQL. It runs where the shard is relayed.
- `project` builds the read models in PostgreSQL.
- `publish` writes single events to `grab.events`.
- `verify` compares the read models and Redis with the audit trail.
- `webhooks` sends events to the URLs that subscribed to them.

If one of the first three fails, all end: a process with half of its roles looks alive but is not. The others
only concern the books: they are restarted, and deciding continues. If one of them leaves a client of Kafka
that does not stop, all end, too: only the end of the process ends the client's group membership.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from grabstream.crypto.sealing import Sealer
from grabstream.crypto.tickets import TicketKeys
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.gate.personal import UserKeys
from grabstream.gate.refusals import RefusalLog, writing
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.runtime.ending import end, running
from grabstream.runtime.trouble import is_trouble
from grabstream.streams.clients import DoesNotStop, Trouble, error_text
from grabstream.streams.deciding.decider import Decider
from grabstream.streams.deciding.decoding import TopicAuthority
from grabstream.streams.deciding.payments import HoldQueries, PaymentSide
from grabstream.streams.deciding.sweeper import RecordDemand, Sweeper
from grabstream.streams.measures import WorkerMeasures
from grabstream.streams.relaying.announcing import RelayedShards
from grabstream.streams.relaying.leases import Leases
from grabstream.streams.relaying.recovery import Recovered, Snapshots
from grabstream.streams.relaying.relay import CrashStep, Duty, ShardRelay
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

#: How long roles may take to stop before they are cancelled.
STOP_SECONDS: Final = 12.0
#: The pause before a failed role of the books is restarted.
RESTART_SECONDS_MIN: Final = 1.0
RESTART_SECONDS_MAX: Final = 60.0

ROLES: Final = ("decide", "relay", "sweep", "project", "publish", "verify", "webhooks")
#: A worker has the leases of its share of the shards; if it did not relay them, no worker would.
SWEEPS_WITHOUT_RELAY: Final = (
    "role sweep: needs the role relay in the same worker, since a shard is swept where it is relayed"
)


class WorkerSettings(NamedTuple):
    """The settings of a worker; `settings.py` describes them."""

    kafka: str
    prefix: str
    shards: int
    redis_database: int
    gate: GateLimits
    block_events_max: int
    lease_ms: int
    operations_on_commands: bool = False


class Role(Protocol):
    """A role that a worker runs until `stop`. It may run again after it has ended."""

    async def run(self, stop: asyncio.Event) -> None:
        """Runs the role until `stop`; raises an error that ends it earlier."""


class Service(NamedTuple):
    """A function of a stop event, run alongside the roles."""

    work: Callable[[asyncio.Event], Awaitable[None]]

    async def run(self, stop: asyncio.Event) -> None:
        """Calls the function."""
        await self.work(stop)


class WorkerParts(NamedTuple):
    """Shared parts of the deciding roles. `ready` is called with the name of a role once it has started, also
    when it starts again; `measures` counts what the roles do.
    """

    settings: WorkerSettings
    redis: Any
    sealer: Sealer
    measures: WorkerMeasures
    ready: Callable[[str], None] = lambda role: None

    @property
    def keys(self) -> KeySpace:
        """The keys of the system in Redis."""
        return KeySpace(self.settings.prefix, self.settings.shards, self.settings.redis_database)

    @property
    def topics(self) -> Topics:
        """The topics of the system."""
        return Topics(self.settings.prefix)


class DecideRole:
    """Answers the commands of both topics. `user_keys` has the keys under which the metadata of grabs are
    sealed, if they are.
    """

    def __init__(
        self, parts: WorkerParts, tickets: TicketKeys, refusals: RefusalLog | None = None,
        user_keys: UserKeys | None = None,
    ) -> None:  # fmt: skip
        self._parts = parts
        self._tickets = tickets
        self._refusals = refusals
        self._user_keys = user_keys

    async def run(self, stop: asyncio.Event) -> None:
        """Decides until `stop`; raises the first error of a decider."""
        parts = self._parts
        gate = Gate(
            parts.redis, parts.keys, parts.sealer, parts.settings.gate, tickets=self._tickets,
            refusals=self._refusals, measures=parts.measures.gate, user_keys=self._user_keys,
        )  # fmt: skip
        parts.measures.gate_load = lambda: (gate.queued, gate.calls_in_flight)
        gate.start()
        try:
            async with writing(self._refusals):
                await self._decide(gate, stop)
        finally:
            await gate.close()

    async def _decide(self, gate: Gate, stop: asyncio.Event) -> None:
        settings, topics = self._parts.settings, self._parts.topics
        authority = TopicAuthority(topics, settings.operations_on_commands)
        reading: set[str] = set()

        def reads(topic: str) -> None:
            reading.add(topic)
            if len(reading) == len(deciders):
                self._parts.ready("decide")

        deciders = [
            Decider(
                gate, settings.kafka, topics, settings.shards, functools.partial(reads, topic),
                self._parts.measures, topic=topic, authority=authority,
            )
            for topic in (topics.operations, topics.commands)
        ]  # fmt: skip
        async with running(*(decider.run(stop) for decider in deciders)) as tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()


class RelayOptions(NamedTuple):
    """How shards are recovered, and who is notified. `relays` is called with the shards that this worker
    relays and sweeps once it has started, before it is ready; `relays_change` when they change.
    """

    step: CrashStep = lambda name: None
    snapshots: Snapshots | None = None
    report_recovery: Callable[[Recovered], Any] | None = None
    relays: Callable[[Sequence[int]], None] = lambda shards: None
    relays_change: Callable[[RelayedShards], None] = lambda change: None


class Sweeping(NamedTuple):
    """How relayed shards are swept. `payment_side` is asked about holds that end soon."""

    record_demand: RecordDemand | None = None
    payment_side: PaymentSide | None = None


QueriesOf = Callable[[ShardKeys], HoldQueries]


class RelayRole:
    """Relays the shards whose leases this worker has. With `sweeping`, also sweeps them."""

    def __init__(self, parts: WorkerParts, options: RelayOptions, sweeping: Sweeping | None) -> None:
        self._parts = parts
        self._options = options
        self._sweeping = sweeping

    async def run(self, stop: asyncio.Event) -> None:
        """Relays until `stop`."""
        parts, measures = self._parts, self._parts.measures
        async with contextlib.AsyncExitStack() as stack:
            tasks_of = functools.partial(self._tasks_of, await self._open_queries(stack))
            leases = Leases(
                parts.redis, parts.keys, parts.settings.lease_ms, tasks_of, self._requested,
                self._options.relays_change,
            )  # fmt: skip
            measures.leases_held, measures.shards_relayed = lambda: leases.held, lambda: leases.relayed
            await leases.run(stop)

    async def _open_queries(self, stack: contextlib.AsyncExitStack) -> QueriesOf | None:
        if self._sweeping is None or self._sweeping.payment_side is None:
            return None
        # An HTTP client takes a while to import, and only this needs one.
        from grabstream.streams.deciding.payment_side import open_queries

        parts = self._parts
        return await stack.enter_async_context(
            open_queries(
                self._sweeping.payment_side, parts.redis, parts.keys, parts.sealer, parts.settings.gate
            )
        )

    def _tasks_of(self, queries_of: QueriesOf | None, shard: int, duty: Duty) -> list[Any]:
        parts, options, settings = self._parts, self._options, self._parts.settings
        shard_keys = parts.keys.shard(shard)
        relay = ShardRelay(
            parts.redis, shard_keys, settings.shards, settings.kafka, parts.topics.journal, parts.sealer,
            settings.block_events_max, options.step, options.snapshots, options.report_recovery, duty=duty,
            measures=parts.measures.relay,
        )  # fmt: skip
        if self._sweeping is None:
            return [relay.run()]
        sweeper = Sweeper(
            parts.redis, shard_keys, settings.shards, settings.gate.clock_skew_ms_max,
            self._sweeping.record_demand, duty.decided, lambda: duty.is_waiting,
            queries_of(shard_keys) if queries_of else None, parts.measures.swept,
        )  # fmt: skip
        return [relay.run(), sweeper.run()]

    def _requested(self, shards: Sequence[int]) -> None:
        self._options.relays(shards)
        self._parts.ready("relay")


class RestartingRole:
    """A role, restarted whenever it fails or ends before `stop`: after a second, then after ever longer
    pauses. `restarts` counts them, by name. It raises DoesNotStop: another start would not help.
    """

    def __init__(self, name: str, role: Role, restarts: dict[str, int] | None = None) -> None:
        self._name = name
        self._role = role
        self._restarts: dict[str, int] = {} if restarts is None else restarts
        # From the start, so that the first restart is an increase of the metric.
        self._restarts.setdefault(name, 0)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs the role repeatedly until `stop`."""
        pause_seconds, trouble = RESTART_SECONDS_MIN, Trouble(log, f"role {self._name}")
        while not stop.is_set():
            began = time.monotonic()
            try:
                await self._role.run(stop)
                if not stop.is_set():
                    trouble.note("it stopped unexpectedly")
                    log.critical(
                        "role %s stopped unexpectedly: restarting it in %.0f s, other roles continue",
                        self._name,
                        pause_seconds,
                    )
            except DoesNotStop:
                raise
            except BaseException as error:
                if not isinstance(error, Exception) and not is_trouble(error):
                    raise
                trouble.note(error_text(error))
                log.critical(
                    "role %s: unknown error, restarting it in %.0f s, other roles continue",
                    self._name,
                    pause_seconds,
                    exc_info=True,
                )
            if not stop.is_set():
                self._restarts[self._name] += 1
            if time.monotonic() - began > RESTART_SECONDS_MAX:
                pause_seconds = RESTART_SECONDS_MIN
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await stop.wait()
            pause_seconds = min(pause_seconds * 2, RESTART_SECONDS_MAX)


async def run_worker(roles: Mapping[str, Role], stop: asyncio.Event) -> list[str]:
    """Runs the roles until `stop` is set or one of them ends. Then stops the others, and raises the error of
    a role that failed.

    The stop takes at most STOP_SECONDS and END_SECONDS_MAX. Returns the names of roles that do not end.
    """
    tasks = {asyncio.create_task(role.run(stop), name=f"role {name}"): name for name, role in roles.items()}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            log.error("role %s ended: stopping the others", ", ".join(sorted(tasks[task] for task in done)))
        stop.set()
        await asyncio.wait(tasks, timeout=STOP_SECONDS)
    finally:
        left = await end(tasks)
    for task in tasks.keys() - left:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return [tasks[task] for task in left]
