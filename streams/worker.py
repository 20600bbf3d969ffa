"""A worker: the roles one process plays, started together and stopped together.

`decide` answers commands of the topic · `relay` moves outboxes to the journal · `sweep` closes what is due and carries counts of
refusals to SQL (it runs where the shard is relayed) · `project` builds the read models in PostgreSQL · `publish` puts single events on
`grab.events` · `verify` walks behind the read models and compares them with Redis. One failing ends all: a process that
plays half its roles looks alive and is not.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple

from lua.gate import Gate, GateLimits
from lua.keys import KeySpace
from lua.refusals import RefusalLog, writing
from lua.sealing import Sealer
from lua.tickets import TicketKeys
from streams.decider import Decider
from streams.keeper import Keeper
from streams.recovery import Recovered, Snapshots
from streams.relay import ShardRelay, Step
from streams.sweeper import RecordDemand, Sweeper
from streams.topics import Topics

log = logging.getLogger(__name__)

ROLES: Final = ("decide", "relay", "sweep", "project", "publish", "verify")


class WorkerSettings(NamedTuple):
    """What a worker is told; see `ops/settings.py` for meanings and units."""

    kafka: str
    prefix: str
    shards: int
    gate: GateLimits
    block_events_max: int
    lease_ms: int


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
) -> dict[str, Role]:
    """The roles to play as functions of a stop event; raises ValueError for a role that does not exist."""
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"role {role!r}: must be one of {', '.join(ROLES)}")
    keys, topics = KeySpace(settings.prefix, settings.shards), Topics(settings.prefix)
    running: dict[str, Role] = {}

    if "decide" in roles:

        async def decide(stop: asyncio.Event) -> None:
            gate = Gate(redis, keys, sealer, settings.gate, tickets=tickets, refusals=refusals)
            gate.start()
            try:
                async with writing(refusals):
                    await Decider(gate, settings.kafka, topics, settings.shards).run(stop)
            finally:
                await gate.close()

        running["decide"] = decide

    if "relay" in roles or "sweep" in roles:

        def tasks_of(shard: int) -> list[Any]:
            of_shard = keys.shard(shard)
            tasks: list[Any] = []
            if "relay" in roles:
                relay = ShardRelay(
                    redis, of_shard, settings.shards, settings.kafka, topics.journal, sealer, settings.block_events_max, step,
                    snapshots, report_recovery,
                )  # fmt: skip
                tasks.append(relay.run())
            if "sweep" in roles:
                tasks.append(Sweeper(redis, of_shard, settings.shards, settings.gate.clock_skew_ms_max, record_demand).run())
            return tasks

        running["relay"] = Keeper(redis, keys, settings.lease_ms, tasks_of).run

    running.update((role, of_books[role]) for role in ("project", "publish", "verify") if role in roles and role in of_books)
    return running


async def run_worker(roles: dict[str, Role], stop: asyncio.Event) -> None:
    """Plays the roles until `stop` is set or one ends; then stops the others and raises what went wrong, if anything did."""
    tasks = {asyncio.create_task(role(stop), name=name): name for name, role in roles.items()}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = {tasks[task] for task in done}
        if not stop.is_set():
            log.error("role %s ended: stopping the others", ", ".join(sorted(ended)))
        stop.set()
        await asyncio.wait(tasks, timeout=15)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
