"""A worker: the roles of one process, started and stopped together.

- `decide` answers commands of the two topics.
- `relay` copies outboxes to the journal.
- `sweep` ends holds and offers that are due, and copies counts of refusals to SQL. It runs where the shard is
  relayed.
- `project` builds the read models in PostgreSQL.
- `publish` writes single events to `grab.events`.
- `verify` compares the read models and Redis with the audit trail.
- `webhooks` sends events to the URLs that subscribed to them.

If one of the first three fails, all end: a process that plays half of its roles looks alive but is not. The
others only concern the books: they are restarted, and deciding continues. If one of them leaves a client of
Kafka that does not stop, all end, too: only the end of the process ends the client's membership of its group.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

from grabstream.lua.ending import end, running
from grabstream.lua.gate.calls import GateLimits
from grabstream.lua.gate.gate import Gate
from grabstream.lua.gate.personal import UserKeys
from grabstream.lua.gate.refusals import RefusalLog, writing
from grabstream.lua.gate.sealing import Sealer
from grabstream.lua.gate.tickets import TicketKeys
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.lua.trouble import is_trouble
from grabstream.streams.clients import DoesNotStop, Trouble, in_words
from grabstream.streams.deciding.decider import Decider
from grabstream.streams.deciding.payments import HoldQueries, PaymentSide
from grabstream.streams.deciding.sweeper import RecordDemand, Sweeper
from grabstream.streams.deciding.understanding import Authority
from grabstream.streams.measures import WorkerMeasures
from grabstream.streams.relaying.announcing import Change
from grabstream.streams.relaying.leases import Leases
from grabstream.streams.relaying.recovery import Recovered, Snapshots
from grabstream.streams.relaying.relay import Duty, ShardRelay, Step
from grabstream.streams.topics import Topics

log = logging.getLogger(__name__)

#: How long roles may take to stop before they are cancelled.
STOP_SECONDS: Final = 12.0
#: The pause before a failed role of the books is restarted.
RESTART_SECONDS_MIN: Final = 1.0
RESTART_SECONDS_MAX: Final = 60.0

ROLES: Final = ("decide", "relay", "sweep", "project", "publish", "verify", "webhooks")
#: A worker has the leases of its share of the shards; if it did not relay them, nobody would.
SWEEPS_WITHOUT_RELAY: Final = (
    "role sweep: needs the role relay in the same worker, since a shard is swept where it is relayed"
)


class WorkerSettings(NamedTuple):
    """The settings of a worker; `ops/settings.py` describes them."""

    kafka: str
    prefix: str
    shards: int
    redis_database: int
    gate: GateLimits
    block_events_max: int
    lease_ms: int
    operations_on_commands: bool = False


Role = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


def roles_of(
    settings: WorkerSettings,
    roles: Sequence[str],
    redis: Any,
    sealer: Sealer,
    tickets: TicketKeys,
    record_demand: RecordDemand | None,
    refusals: RefusalLog | None,
    of_books: Mapping[str, Role],
    step: Step = lambda name: None,
    snapshots: Snapshots | None = None,
    report_recovery: Callable[[Recovered], Any] | None = None,
    ready: Callable[[str], None] = lambda role: None,
    relays: Callable[[Sequence[int]], None] = lambda shards: None,
    payment_side: PaymentSide | None = None,
    measures: WorkerMeasures | None = None,
    user_keys: UserKeys | None = None,
    relays_change: Callable[[Change], None] = lambda change: None,
) -> dict[str, Role]:
    """The roles to play as functions of a stop event; raises ValueError for a role that does not exist.

    `ready` is called with each of the roles returned once it has started, also when it starts again; before
    it, `relays` is called with the shards that this worker relays and sweeps then, and `relays_change` when
    these are others. `payment_side` is asked
    about holds that end soon. `measures` counts what the roles do. `user_keys` has the keys under which the
    decider seals the metadata of grabs, if it does.
    """
    counted = measures or WorkerMeasures()
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"role {role!r}: must be one of {', '.join(ROLES)}")
    if "sweep" in roles and "relay" not in roles:
        raise ValueError(SWEEPS_WITHOUT_RELAY)
    keys, topics = (
        KeySpace(settings.prefix, settings.shards, settings.redis_database),
        Topics(settings.prefix),
    )
    played: dict[str, Role] = {}

    if "decide" in roles:

        async def decide(stop: asyncio.Event) -> None:
            gate = Gate(
                redis, keys, sealer, settings.gate, tickets=tickets, refusals=refusals,
                measures=counted.gate,
                user_keys=user_keys,
            )  # fmt: skip
            counted.gate_load = lambda: (gate.queued, gate.calls_in_flight)
            gate.start()
            try:
                async with writing(refusals):
                    await decide_topics(
                        gate, settings, topics, functools.partial(ready, "decide"), counted, stop
                    )
            finally:
                await gate.close()

        played["decide"] = decide

    if "relay" in roles:
        queries_of: Callable[[ShardKeys], HoldQueries] | None = None

        def tasks_of(shard: int, duty: Duty) -> list[Any]:
            of_shard = keys.shard(shard)
            relay = ShardRelay(
                redis, of_shard, settings.shards, settings.kafka, topics.journal, sealer,
                settings.block_events_max, step,
                snapshots, report_recovery, duty=duty, measures=counted.relay,
            )  # fmt: skip
            tasks: list[Any] = [relay.run()]
            if "sweep" in roles:
                skew_ms_max = settings.gate.clock_skew_ms_max
                sweeper = Sweeper(
                    redis, of_shard, settings.shards, skew_ms_max, record_demand, duty.decided,
                    lambda: duty.is_waiting, queries_of(of_shard) if queries_of else None, counted.swept,
                )  # fmt: skip
                tasks.append(sweeper.run())
            return tasks

        def requested(shards: Sequence[int]) -> None:
            relays(shards)
            ready("relay")

        async def relay(stop: asyncio.Event) -> None:
            nonlocal queries_of
            async with contextlib.AsyncExitStack() as stack:
                if payment_side is not None and "sweep" in roles:
                    # An HTTP client takes a while to import, and only this needs one.
                    from grabstream.streams.deciding.payment_side import open_queries

                    queries_of = await stack.enter_async_context(
                        open_queries(payment_side, redis, keys, sealer, settings.gate)
                    )
                leases = Leases(redis, keys, settings.lease_ms, tasks_of, requested, relays_change)
                counted.leases_held, counted.shards_relayed = lambda: leases.held, lambda: leases.relayed
                await leases.run(stop)

        played["relay"] = relay

    played.update(
        (role, restarting(role, of_books[role], counted.restarts))
        for role in ("project", "publish", "verify", "webhooks")
        if role in roles and role in of_books
    )
    return played


async def decide_topics(
    gate: Gate,
    settings: WorkerSettings,
    topics: Topics,
    ready: Callable[[], None],
    measures: WorkerMeasures,
    stop: asyncio.Event,
) -> None:
    """Decides the commands of both topics until `stop`; calls `ready` when both are read. Raises the first
    error of a decider.
    """
    authority = Authority(topics, settings.operations_on_commands)
    reading: set[str] = set()

    def reads(topic: str) -> None:
        reading.add(topic)
        if len(reading) == len(deciders):
            ready()

    deciders = [
        Decider(
            gate, settings.kafka, topics, settings.shards, functools.partial(reads, topic), measures,
            topic=topic, authority=authority,
        )
        for topic in (topics.operations, topics.commands)
    ]  # fmt: skip
    async with running(*(decider.run(stop) for decider in deciders)) as tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done():
                task.result()


def restarting(name: str, role: Role, restarts: dict[str, int] | None = None) -> Role:
    """The role, restarted whenever it fails or ends before `stop`: after a second, then after ever longer
    pauses. `restarts` counts them, by name. It raises DoesNotStop: another start would not help.
    """

    if restarts is not None:
        # From the start, so that the first restart is an increase of the metric.
        restarts[name] += 0

    async def run(stop: asyncio.Event) -> None:
        pause_seconds, trouble = RESTART_SECONDS_MIN, Trouble(log, f"role {name}")
        while not stop.is_set():
            began = time.monotonic()
            try:
                await role(stop)
                if not stop.is_set():
                    trouble.note("it ended by itself")
                    log.critical(
                        "role %s ended by itself: restarting it in %.0f s, other roles continue",
                        name,
                        pause_seconds,
                    )
            except DoesNotStop:
                raise
            except BaseException as error:
                if not isinstance(error, Exception) and not is_trouble(error):
                    raise
                trouble.note(in_words(error))
                log.critical(
                    "role %s: unknown error, restarting it in %.0f s, other roles continue",
                    name,
                    pause_seconds,
                    exc_info=True,
                )
            if restarts is not None and not stop.is_set():
                restarts[name] += 1
            if time.monotonic() - began > RESTART_SECONDS_MAX:
                pause_seconds = RESTART_SECONDS_MIN
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_seconds):
                    await stop.wait()
            pause_seconds = min(pause_seconds * 2, RESTART_SECONDS_MAX)

    return run


async def run_worker(roles: dict[str, Role], stop: asyncio.Event) -> list[str]:
    """Plays the roles until `stop` is set or one of them ends. Then stops the others, and raises the error of
    a role that failed.

    From then on it takes at most STOP_SECONDS and END_SECONDS_MAX. Returns the names of roles that do not
    end.
    """
    tasks = {asyncio.create_task(role(stop), name=f"role {name}"): name for name, role in roles.items()}
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
