"""`worker`: plays roles until a signal stops it."""

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import click
import psycopg
import uvloop

import grabstream.models.events  # noqa: F401 - reports a gap in the upcasters here, not at a role's first event
from grabstream.lua.ending import first_to_end, running
from grabstream.lua.ticks import seconds_to_tick
from grabstream.lua.trouble import is_trouble
from grabstream.ops.connections.identity import IdentityNotRecorded, OtherSystem, claim_prefix
from grabstream.ops.connections.opening import (
    CHECK_AGAIN_SECONDS,
    check_system,
    checked_books,
    key_space,
    open_redis,
    payment_side,
    refusal_log,
    report_recovery,
    require_core,
    sealer,
    snapshots,
    ticket_keys,
    worker_settings,
)  # fmt: skip
from grabstream.ops.connections.watching import Readiness, watch_servers
from grabstream.ops.connections.watching import log as worker_log
from grabstream.ops.console.output import counted
from grabstream.ops.console.stopping import (
    END_SECONDS_MAX,
    EXIT_INTERRUPTED,
    end_within,
    stop_on_signals,
)
from grabstream.ops.initialization import refuse_replay
from grabstream.ops.settings import Settings, load_settings
from grabstream.ops.verification.redis_keys import compares_keys
from grabstream.projections.database.migrate import PROJECTIONS as READ_MODELS
from grabstream.projections.database.sessions import connect
from grabstream.projections.database.system import Identity
from grabstream.projections.records.demand import record
from grabstream.streams.clients import Trouble, in_words
from grabstream.streams.projecting.projector import EXIT_UNKNOWN_ERROR
from grabstream.streams.projecting.verifier import Verifier
from grabstream.streams.relaying.relay import Step
from grabstream.streams.worker import ROLES, SWEEPS_WITHOUT_RELAY, Role, restarting, roles_of, run_worker

log = logging.getLogger(__name__)

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
    settings.require_seal_keys()
    worker_log.setLevel(logging.INFO)
    # Garbage collection would search thousands of short-lived events for cycles, which is a tenth of the
    # work.
    gc.set_threshold(50_000, 20, 50)
    chosen = [role.strip() for role in roles.split(",") if role.strip()]
    unknown = sorted(set(chosen) - set(ROLES))
    if unknown or not chosen:
        raise click.BadParameter(
            f"{', '.join(unknown) or 'no role given'}: choose from {', '.join(ROLES)}", param_hint="--roles"
        )
    if "sweep" in chosen and "relay" not in chosen:
        raise click.BadParameter(SWEEPS_WITHOUT_RELAY, param_hint="--roles")
    if signal.SIGINT in uvloop.run(_run(settings, chosen)):
        sys.exit(EXIT_INTERRUPTED)


async def _run(settings: Settings, chosen: Sequence[str]) -> list[int]:
    """Plays the roles; returns the signals that stopped them."""
    stop, signals = stop_on_signals(EXIT_UNKNOWN_ERROR)
    relayed: list[int] = []
    parts = {"relay" if role == "sweep" else role for role in chosen}
    ready = Readiness(parts, lambda: _ready_words(settings, chosen, relayed))
    known = Known(settings, ready)
    if not await _reached(settings, known, stop):
        return signals
    if "project" in chosen:
        await _refuse_replay(settings)
    redis = open_redis(settings)
    try:
        roles = roles_of(
            worker_settings(settings), chosen, redis, sealer(settings), ticket_keys(settings),
            functools.partial(_record_demand, settings),
            refusal_log(settings),
            {
                "project": known.before("project", _faust(settings, READ_MODELS)),
                "publish": known.before("publish", _faust(settings, ("events",))),
                "verify": known.before("verify", Verifier(
                    redis, key_space(settings), settings.postgres, settings.schema_,
                    settings.verify_percent / 100,
                    compares_keys(settings, redis),
                ).run),
                "webhooks": known.before("webhooks", _webhooks(settings)),
            },
            step_of(settings), snapshots(settings), functools.partial(report_recovery, settings),
            ready, relayed.extend, payment_side(settings),
        )  # fmt: skip
        roles["identity"] = functools.partial(known.keep, redis)
        roles["servers"] = restarting("servers", functools.partial(watch_servers, settings, redis))
        log.info("playing %s", ", ".join(chosen))
        left = await run_worker(roles, stop)
        if left:
            # The event loop would wait for these roles before it ends.
            log.critical("role %s does not end: ending the process", ", ".join(sorted(left)))
            logging.shutdown()
            os._exit(EXIT_UNKNOWN_ERROR)
    finally:
        end_within(END_SECONDS_MAX, EXIT_UNKNOWN_ERROR)
        await redis.aclose()
    return signals


def _ready_words(settings: Settings, chosen: Sequence[str], relayed: Sequence[int]) -> str:
    words = f"roles {', '.join(chosen)}; {counted(settings.shards, 'shards')}"
    if "relay" in chosen:
        words += f", of which this worker relays {', '.join(map(str, relayed)) or 'none yet'}"
    return f"{words}; prefix {settings.prefix}, schema {settings.schema_}"


class Known:
    """Whether the settings are known to name one system. A server that was away at the start is asked
    later.
    """

    def __init__(self, settings: Settings, ready: Callable[[str], None]) -> None:
        self._settings = settings
        self._ready = ready
        self._trouble = Trouble(log, "which system this is")
        self._identity: Identity | None = None
        self._is_known = asyncio.Event()

    async def check(self) -> None:
        """Compares the servers; raises BadSettings when they do not belong to one system."""
        try:
            self._identity = await check_system(self._settings, say=log.info)
        except IdentityNotRecorded as error:
            self._trouble.say(str(error))
            return
        if self._identity is None:
            self._trouble.say(
                f"schema {self._settings.schema_} cannot be asked: PostgreSQL is away, or `grabstream init` "
                "was not run"
            )
            return
        self._trouble.over()
        self._is_known.set()

    def before(self, name: str, role: Role) -> Role:
        """The role, which writes the schema, with a start that waits until the schema is known to be ours."""

        async def wait(stop: asyncio.Event) -> None:
            async with running(self._is_known.wait(), stop.wait()) as waiting:
                await first_to_end(waiting)
            if not stop.is_set():
                self._ready(name)
                await role(stop)

        return wait

    async def keep(self, redis: Any, stop: asyncio.Event) -> None:
        """Claims the prefix again whenever Redis has lost the claim, until `stop`; raises BadSettings when
        the prefix belongs to another system.
        """
        while not stop.is_set():
            try:
                if self._identity is None:
                    await self.check()
                else:
                    await claim_prefix(
                        redis, key_space(self._settings).system, self._settings, self._identity
                    )
            except BaseException as error:
                if not is_trouble(error):
                    raise
                log.info("which system this is: %s", in_words(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_to_tick(CHECK_AGAIN_SECONDS)):
                    await stop.wait()


async def _reached(settings: Settings, known: Known, stop: asyncio.Event) -> bool:
    """Waits until Kafka and Redis answer, and checks that they suit a worker; returns False when `stop` is
    set before.

    Waits for a server that is starting, or for a broker that has just failed; after START_SECONDS it raises
    the server's error.
    """
    trouble, give_up_at = Trouble(log, "starting"), time.monotonic() + START_SECONDS
    while not stop.is_set():
        try:
            await known.check()
            redis = open_redis(settings)
            try:
                await require_core(redis)
            finally:
                await redis.aclose()
        except Exception as error:
            if not is_trouble(error) or time.monotonic() > give_up_at:
                raise
            trouble.say(in_words(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await stop.wait()
        else:
            trouble.over()
            return True
    return False


async def _refuse_replay(settings: Settings) -> None:
    try:
        async with await connect(settings.postgres, settings.schema_) as connection:
            await refuse_replay(connection, settings)
    except psycopg.OperationalError as error:
        # The read models wait for PostgreSQL; the other roles work without it. A schema of a replay refuses
        # the read models later.
        log.warning("PostgreSQL cannot be reached yet: %s", error)


def _faust(settings: Settings, names: Sequence[str]) -> Role:
    async def run(stop: asyncio.Event) -> None:
        # Faust takes a second to import, and most roles do not need it.
        from grabstream.streams.projecting.agents import run_projections

        await run_projections(
            kafka=settings.kafka,
            prefix=settings.prefix,
            shards=settings.shards,
            postgres=settings.postgres,
            schema=settings.schema_,
            stop=stop,
            names=names,
            step=step_of(settings),
        )

    return run


def _webhooks(settings: Settings) -> Role:
    async def run(stop: asyncio.Event) -> None:
        # Its HTTP client takes a third of a second to import.
        from grabstream.streams.webhooks.role import Webhooks
        from grabstream.streams.webhooks.sending import Limits

        limits = Limits(
            settings.webhook_http,
            settings.webhook_private_addresses,
            settings.webhook_timeout_ms / 1000,
            settings.webhook_attempts_max,
        )
        await Webhooks(
            settings.postgres, settings.schema_, settings.kafka, settings.prefix, settings.shards,
            sealer(settings), limits,
        ).run(stop)  # fmt: skip

    return run


def step_of(settings: Settings) -> Step:
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
        async with checked_books(settings) as connection:
            await record(connection, settings.schema_, shard, rows)
    except (psycopg.Error, OtherSystem) as error:
        # The counts stay in Redis until PostgreSQL, or its tables, are back: a restore drops the tables
        # first.
        raise OSError(f"PostgreSQL: {error}") from None
