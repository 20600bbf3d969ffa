"""`worker`: runs roles until a signal stops it."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, NamedTuple

import click
import psycopg
import uvloop
from aiokafka.errors import KafkaError
from redis.exceptions import RedisError

import grabstream.models.events  # noqa: F401 - reports a gap in the upcasters here, not at a role's first event
from grabstream.connections.identity import ClaimDamaged, IdentityNotRecorded, claim_prefix
from grabstream.connections.key_files import KeyFiles
from grabstream.connections.logins import raise_refusal
from grabstream.connections.opening import (
    CHECK_AGAIN_SECONDS,
    audience,
    check_system,
    checked_database,
    key_space,
    open_redis,
    payment_side,
    refusal_log,
    report_recovery,
    require_core,
    sealer,
    snapshots,
    ticket_keys,
    user_keys,
    worker_settings,
)  # fmt: skip
from grabstream.connections.server_watch import Readiness, watch_servers
from grabstream.connections.server_watch import log as worker_log
from grabstream.connections.worker_reports import keep_reporting
from grabstream.metrics.state import State
from grabstream.metrics.tracing import tracing
from grabstream.models.bounds import counted
from grabstream.models.journal import is_signed_owner
from grabstream.ops.console.json_log import log_as_json
from grabstream.ops.console.stopping import (
    EXIT_INTERRUPTED,
    end_in_time,
    stop_on_signals,
)
from grabstream.ops.diagnosis.findings import shard_list, spans
from grabstream.ops.initialization import refuse_replay
from grabstream.ops.verification.redis_keys import compares_keys
from grabstream.projections import cursors
from grabstream.projections.database.sessions import bound_locks, connect
from grabstream.projections.database.system import Identity
from grabstream.projections.definitions import PROJECTIONS
from grabstream.projections.tables import demand
from grabstream.runtime.collecting import collect_rarely
from grabstream.runtime.ending import first_to_end, running
from grabstream.runtime.ticks import seconds_to_tick
from grabstream.runtime.trouble import is_trouble
from grabstream.settings import BadSettings, Settings, load_settings
from grabstream.streams.clients import OUTAGES, Trouble, error_text
from grabstream.streams.journal_keys import journal_keys
from grabstream.streams.measures import WorkerMeasures
from grabstream.streams.projecting.projector import EXIT_UNKNOWN_ERROR
from grabstream.streams.projecting.verifier import Verifier
from grabstream.streams.relaying.announcing import RelayedShards
from grabstream.streams.relaying.recovery import Recovered
from grabstream.streams.relaying.relay import CrashStep
from grabstream.streams.relaying.takeover import NO_KEY
from grabstream.streams.topic_ids import find_topic
from grabstream.streams.topics import Topics
from grabstream.streams.worker import (
    ROLES,
    SWEEPS_WITHOUT_RELAY,
    DecideRole,
    RelayOptions,
    RelayRole,
    RestartingRole,
    Role,
    Service,
    Sweeping,
    WorkerParts,
    run_worker,
)

log = logging.getLogger(__name__)

#: The servers that a role needs in addition to those of `decide`, `relay` and `sweep`.
_SERVERS_OF: Final = {
    "decide": ("kafka", "redis"),
    "project": ("kafka", "postgresql"), "publish": ("kafka", "postgresql"),
    "verify": ("postgresql", "redis"), "webhooks": ("kafka", "postgresql"),
}  # fmt: skip
#: How long a starting worker waits for Kafka and Redis.
START_SECONDS: Final = 30.0
RETRY_SECONDS: Final = 0.5


@click.command()
@click.option("--roles", default=",".join(ROLES), show_default=True, help="The roles of this process.")
def worker(roles: str) -> None:
    """Run a worker: decide commands, relay outboxes to the journal, end holds and offers that are due, and
    update the read models. Runs until SIGTERM (exit code 0) or Ctrl-C (130).
    """
    settings = load_settings()
    if settings.log == "json":
        log_as_json()
    settings.require_seal_keys()
    worker_log.setLevel(logging.INFO)
    collect_rarely()
    chosen = [role.strip() for role in roles.split(",") if role.strip()]
    unknown = sorted(set(chosen) - set(ROLES))
    if unknown or not chosen:
        raise click.BadParameter(
            f"{', '.join(unknown) or 'no role given'}: choose from {', '.join(ROLES)}", param_hint="--roles"
        )
    if opening := sorted({"relay", "verify", "webhooks"} & set(chosen)):
        settings.require_opening_keys(f"a worker with role {', '.join(opening)}")
    if "sweep" in chosen and "relay" not in chosen:
        raise click.BadParameter(SWEEPS_WITHOUT_RELAY, param_hint="--roles")
    with tracing(settings, "worker"):
        signals = uvloop.run(_run(settings, chosen))
    by = signal.Signals(signals[0]).name if signals else "a role ended"
    worker_log.info("stopped: %s; %s", by, _roles_text(settings, chosen))
    if signal.SIGINT in signals:
        sys.exit(EXIT_INTERRUPTED)


async def _run(settings: Settings, chosen: Sequence[str]) -> list[int]:
    """Runs the roles; returns the signals that stopped them."""
    stop, signals = stop_on_signals(EXIT_UNKNOWN_ERROR)
    relayed: list[int] = []
    parts = {"relay" if role == "sweep" else role for role in chosen}
    ready = Readiness(parts, lambda: _ready_words(settings, chosen, relayed))
    measures = WorkerMeasures()
    known, key_files = Known(settings, ready, "relay" in chosen), KeyFiles(settings)
    # A server that hangs does not delay the end of this process.
    async with running(_may_start(settings, known, chosen, stop), stop.wait()) as starting:
        await first_to_end(starting)
    if stop.is_set():
        return signals
    keys_of_users = user_keys(settings) if "decide" in chosen else None
    redis = open_redis(settings)

    async def state() -> State:
        return worker_state(chosen, ready.missing, stop.is_set())

    try:
        receipts_for = await audience(settings, redis)
        shared = WorkerParts(
            worker_settings(settings, receipts_for), redis, sealer(settings), measures, ready
        )  # fmt: skip
        relay_options = RelayOptions(
            step_of(settings), snapshots(settings), functools.partial(_report_recovery, settings, measures),
            relayed.extend, _say_relayed,
        )  # fmt: skip
        sweeping = Sweeping(functools.partial(_record_demand, settings), payment_side(settings, receipts_for))
        decide = DecideRole(shared, ticket_keys(settings), refusal_log(settings), keys_of_users)
        relay = RelayRole(shared, relay_options, sweeping if "sweep" in chosen else None)
        roles: dict[str, Role] = {
            name: role for name, role in (("decide", decide), ("relay", relay)) if name in chosen
        }
        for name, role in _roles_with_database(settings, redis, measures).items():
            if name in chosen:
                roles[name] = RestartingRole(name, known.before(name, role), measures.restarts)
        roles |= _services(settings, chosen, redis, known, key_files)
        log.info("playing %s", ", ".join(chosen))
        async with AsyncExitStack() as stack:
            if settings.metrics_listen is not None:
                # What serves metrics takes a while to import.
                from grabstream.metrics.listening import listening
                from grabstream.metrics.worker_metrics import WorkerMetrics

                metrics = WorkerMetrics(settings, chosen, redis, measures, state, key_files)
                await stack.enter_async_context(
                    listening(settings.metrics_listen, metrics.exposition, state, worker_log)
                )
            left = await run_worker(roles, stop)
        if left:
            # The event loop would wait for these roles before it ends.
            log.critical("role %s does not stop: ending the process", ", ".join(sorted(left)))
            logging.shutdown()
            os._exit(EXIT_UNKNOWN_ERROR)
    finally:
        end_in_time(EXIT_UNKNOWN_ERROR)
        if keys_of_users is not None:
            await keys_of_users.close()
        await redis.aclose()
    return signals


async def _may_start(settings: Settings, known: "Known", chosen: Sequence[str], stop: asyncio.Event) -> None:
    """Waits until servers answer, and raises BadSettings when they do not suit the roles."""
    if not await _reached(settings, known, "decide" in chosen, stop):
        return
    if "relay" in chosen:
        await _require_journal_key(settings)
    if "project" in chosen:
        await _refuse_replay(settings)


def _roles_with_database(settings: Settings, redis: Any, measures: WorkerMeasures) -> dict[str, Role]:
    """The roles that need PostgreSQL."""
    verifier = Verifier(
        redis, key_space(settings), settings.postgres, settings.schema_, settings.verify_percent / 100,
        compares_keys(settings, redis),
    )  # fmt: skip
    return {
        "project": ProjectionsRole(settings, PROJECTIONS, measures),
        "publish": ProjectionsRole(settings, ("events",), measures),
        "verify": verifier,
        "webhooks": WebhooksRole(settings, measures),
    }


def _services(
    settings: Settings, chosen: Sequence[str], redis: Any, known: "Known", key_files: KeyFiles
) -> dict[str, Role]:
    """What every worker does in addition to its roles."""
    reporting = functools.partial(keep_reporting, redis, key_space(settings).workers, chosen)
    watching = Service(functools.partial(watch_servers, settings, redis))
    return {
        "identity": Service(functools.partial(known.keep, redis)),
        "key files": Service(key_files.keep_fresh),
        "report": Service(reporting),
        "servers": RestartingRole("servers", watching),
    }


def _ready_words(settings: Settings, chosen: Sequence[str], relayed: Sequence[int]) -> str:
    shards = counted(settings.shards, "shards")
    if "relay" in chosen:
        shards += f", of which this worker relays {', '.join(map(str, relayed)) or 'none yet'}"
    return _roles_text(settings, chosen, f"; {shards}")


def _roles_text(settings: Settings, chosen: Sequence[str], more: str = "") -> str:
    return f"roles {', '.join(chosen)}{more}; prefix {settings.prefix}, schema {settings.schema_}"


def _say_relayed(change: RelayedShards) -> None:
    """One line for all shards that were taken over at about the same time, or passed on or lost."""
    words = [
        f"{what} {spans(shards)}"
        for what, shards in (("took over", change.taken_over), ("gave up", change.given_up))
        if shards
    ]
    relayed = shard_list(change.relayed) if change.relayed else "no shards"
    worker_log.info("relays %s: %s", relayed, "; ".join(words))


class Known:
    """Whether the settings are known to name one system. A server down at the start is asked later."""

    def __init__(self, settings: Settings, ready: Callable[[str], None], relays: bool) -> None:
        self._settings = settings
        self._ready = ready
        self._relays = relays
        self._trouble = Trouble(log, "checking which system this is")
        self._identity: Identity | None = None
        self._is_known = asyncio.Event()

    async def check(self) -> None:
        """Compares the servers; raises BadSettings when they do not belong to one system."""
        try:
            self._identity = await check_system(self._settings, say=log.info, seals=True, relays=self._relays)
        except IdentityNotRecorded as error:
            self._trouble.say(str(error))
            return
        if self._identity is None:
            self._trouble.say(
                f"schema {self._settings.schema_} cannot be read: PostgreSQL does not answer, or "
                "`grabstream init` was not run"
            )
            return
        self._trouble.over()
        self._is_known.set()

    def before(self, name: str, role: Role) -> "RoleOfSchema":
        """The role, which writes the schema, with a start that waits until the schema is known to be ours."""
        return RoleOfSchema(name, role, self._is_known, self._ready)

    async def keep(self, redis: Any, stop: asyncio.Event) -> None:
        """Renews the claim of the prefix whenever Redis has lost it, until `stop`; raises BadSettings when
        the prefix belongs to another system.
        """
        damaged = Trouble(log, "checking which system this is")
        while not stop.is_set():
            try:
                if self._identity is None:
                    await self.check()
                else:
                    await claim_prefix(
                        redis, key_space(self._settings).system, self._settings, self._identity
                    )
                    damaged.over()
            except ClaimDamaged as error:
                # It names no other system, and this worker has compared the servers: no reason to end.
                if self._identity is None:
                    raise
                damaged.say(str(error))
            except BaseException as error:
                if not is_trouble(error):
                    raise
                log.info("checking which system this is: %s", error_text(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_to_tick(CHECK_AGAIN_SECONDS)):
                    await stop.wait()


class RoleOfSchema(NamedTuple):
    """A role that starts, and then is ready, as soon as its schema is known."""

    name: str
    role: Role
    is_known: asyncio.Event
    ready: Callable[[str], None]

    async def run(self, stop: asyncio.Event) -> None:
        """Runs the role, after the wait."""
        async with running(self.is_known.wait(), stop.wait()) as waiting:
            await first_to_end(waiting)
        if not stop.is_set():
            self.ready(self.name)
            await self.role.run(stop)


async def _reached(settings: Settings, known: Known, decides: bool, stop: asyncio.Event) -> bool:
    """Waits until Kafka and Redis answer, and checks that they suit a worker; returns False when `stop` is
    set before.

    Waits for a server that is starting, or for a broker that has just failed; after START_SECONDS it raises
    the server's error.
    """
    trouble, give_up_at = Trouble(log, "starting"), time.monotonic() + START_SECONDS
    while not stop.is_set():
        try:
            await known.check()
            if decides:
                await _require_operations(settings)
            redis = open_redis(settings)
            try:
                await require_core(redis)
            finally:
                await redis.aclose()
        except Exception as error:
            if not is_trouble(error) or time.monotonic() > give_up_at:
                raise
            if isinstance(error, KafkaError | RedisError):
                await raise_refusal(settings, error)
            trouble.say(error_text(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await stop.wait()
        else:
            trouble.over()
            return True
    return False


async def _require_journal_key(settings: Settings) -> None:
    """Raises BadSettings when relays of this worker could not take shards over: they would hold the leases of
    shards that no worker relays.
    """
    if journal_keys().signer is not None:
        return
    try:
        async with checked_database(settings, bounded=True) as connection:
            audit = await cursors.load(connection, "audit")
    except (psycopg.OperationalError, psycopg.errors.UndefinedTable, IdentityNotRecorded) as error:
        # A relay looks for itself, shard by shard.
        log.warning("cannot read yet whether the journal is signed: %s", error)
        return
    if any(is_signed_owner(cursor.owner) for cursor in audit.values()):
        raise BadSettings(f"GRAB_JOURNAL_KEYS is not set: {NO_KEY}")


async def _require_operations(settings: Settings) -> None:
    """Raises BadSettings when the topic of operators is missing: a broker might create it with another number
    of partitions.
    """
    name = Topics(settings.prefix).operations
    if await find_topic(settings.brokers, name) is None:
        raise BadSettings(f"topic {name} does not exist: run `grabstream init` to create it")


async def _refuse_replay(settings: Settings) -> None:
    try:
        async with await connect(settings.postgres, settings.schema_) as connection:
            await bound_locks(connection)
            await refuse_replay(connection, settings)
    except psycopg.OperationalError as error:
        # The read models wait for PostgreSQL; the other roles work without it. A schema of a replay refuses
        # the read models later.
        log.warning("PostgreSQL cannot be reached yet: %s", error)


def worker_state(chosen: Sequence[str], missing: Collection[str], is_stopping: bool) -> State:
    """Readiness of a worker: the parts that have not started, and the servers that its roles need."""
    needed = {server for role in chosen for server in _SERVERS_OF.get(role, _SERVERS_OF["decide"])}
    away = {server.partition(" ")[0].lower() for server in OUTAGES.away}
    return State(tuple(sorted(missing)), {name: name not in away for name in sorted(needed)}, is_stopping)


async def _report_recovery(settings: Settings, measures: WorkerMeasures, recovered: Recovered) -> None:
    measures.recoveries[recovered.kind] += 1
    measures.lost_decisions += len(recovered.lost)
    await report_recovery(settings, recovered)


class ProjectionsRole(NamedTuple):
    """Builds read models, or publishes single events: the Faust agents of these projections."""

    settings: Settings
    names: Sequence[str]
    measures: WorkerMeasures

    async def run(self, stop: asyncio.Event) -> None:
        """Runs the agents until `stop`."""
        # Faust takes a second to import, and most roles do not need it.
        from grabstream.streams.projecting.agents import run_projections

        await run_projections(
            kafka=self.settings.brokers,
            prefix=self.settings.prefix,
            shards=self.settings.shards,
            postgres=self.settings.postgres,
            schema=self.settings.schema_,
            stop=stop,
            names=self.names,
            step=step_of(self.settings),
            measures=self.measures,
        )


class WebhooksRole(NamedTuple):
    """Sends events to the URLs that subscribed to them."""

    settings: Settings
    measures: WorkerMeasures

    async def run(self, stop: asyncio.Event) -> None:
        """Sends until `stop`."""
        # Its HTTP client takes a third of a second to import.
        from grabstream.streams.webhooks.role import Webhooks
        from grabstream.streams.webhooks.sending import SendBounds

        settings = self.settings
        limits = SendBounds(
            settings.webhook_http,
            settings.webhook_private_addresses,
            settings.webhook_timeout_ms / 1000,
            settings.webhook_attempts_max,
        )
        await Webhooks(
            settings.postgres, settings.schema_, settings.brokers, settings.prefix, settings.shards,
            sealer(settings), limits, self.measures.webhooks,
        ).run(stop)  # fmt: skip


def step_of(settings: Settings) -> CrashStep:
    """For crash tests: GRAB_FAIL_AT=step or step:n kills the process (with :stop, stops it) when it reaches
    the step for the n-th time.
    """
    fail_at, _, times = settings.fail_at.removesuffix(":stop").partition(":")
    number = signal.SIGSTOP if settings.fail_at.endswith(":stop") else signal.SIGKILL
    left = int(times or 1)

    def step(name: str) -> None:
        nonlocal left
        if name == fail_at:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), number)

    return step


async def _record_demand(settings: Settings, shard: int, rows: Sequence[tuple[int, int, str, int]]) -> None:
    try:
        async with checked_database(settings, bounded=True) as connection:
            await demand.store(connection, settings.schema_, shard, rows, settings.demand_days)
    except (psycopg.Error, BadSettings) as error:
        # The counts stay in Redis until PostgreSQL, or its tables, are back: a restore drops the tables
        # first.
        raise OSError(f"PostgreSQL: {error}") from None
