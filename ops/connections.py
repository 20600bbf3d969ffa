"""Connections: the only file that opens those of a process to Redis and PostgreSQL. Nothing connects at import."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis.asyncio
from psycopg import AsyncConnection, OperationalError
from psycopg.errors import UndefinedTable
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from lua.gate import Gate, GateLimits, now_ms
from lua.keys import KeySpace
from lua.refusals import Refusal, RefusalLog, RefusalSample, writing
from lua.sealing import Sealer
from lua.tickets import TicketKeys
from models.calendar import DAY_MS
from ops.settings import BadSettings, Settings
from projections import refusals
from streams.worker import WorkerSettings

SOCKET_TIMEOUT_SECONDS = 5.0


def open_redis(settings: Settings) -> Any:
    """A client of the core Redis; it repeats nothing by itself, since what an argument says of the server may be old by then."""
    return redis.asyncio.Redis.from_url(
        settings.redis_url,
        socket_timeout=SOCKET_TIMEOUT_SECONDS,
        socket_connect_timeout=SOCKET_TIMEOUT_SECONDS,
        retry=Retry(NoBackoff(), 0),
        max_connections=256,
    )


async def require_core(redis: Any) -> None:
    """Raises BadSettings when the server may forget by itself: what was decided would be gone without a word."""
    policy = (await redis.info("memory"))["maxmemory_policy"]
    if policy != "noeviction":
        raise BadSettings(
            f"GRAB_REDIS_URL: the server's maxmemory-policy is {policy}, but the core must never evict: "
            "`CONFIG SET maxmemory-policy noeviction`, or give the core a server of its own"
        )


def key_space(settings: Settings) -> KeySpace:
    """The keys of this system."""
    return KeySpace(settings.prefix, settings.shards)


def gate_limits(settings: Settings) -> GateLimits:
    """The gate's bounds from the settings."""
    return GateLimits(
        batch_commands_max=settings.batch_commands_max,
        queue_commands_max=settings.gate_queue_max,
        outbox_events_max=settings.outbox_events_max,
        timeout_ms=settings.gate_timeout_ms,
        clock_skew_ms_max=settings.clock_skew_ms_max,
    )


def sealer(settings: Settings) -> Sealer:
    """What seals seeds; raises ValueError that names GRAB_SEAL_KEYS when they cannot be read."""
    return Sealer.from_text(settings.seal_keys.get_secret_value())


def ticket_keys(settings: Settings) -> TicketKeys:
    """What tickets are checked with; raises ValueError that names GRAB_TICKET_KEYS when they cannot be read."""
    return TicketKeys.from_text(settings.ticket_keys.get_secret_value())


def worker_settings(settings: Settings) -> WorkerSettings:
    """What a worker is told."""
    return WorkerSettings(
        kafka=settings.kafka,
        prefix=settings.prefix,
        shards=settings.shards,
        gate=gate_limits(settings),
        block_events_max=settings.block_events_max,
        lease_ms=settings.lease_ms,
        patience_ms=settings.patience_ms,
    )


def refusal_log(settings: Settings) -> RefusalLog | None:
    """Keeps a sample of refusals in PostgreSQL; None where none are to be kept."""
    if not settings.refusals_one_in or not settings.refusals_kept_max:
        return None

    async def write(rows: Sequence[Refusal]) -> None:
        oldest_at = now_ms() - settings.refusals_days * DAY_MS
        try:
            async with await AsyncConnection.connect(settings.postgres, connect_timeout=2) as connection:
                await refusals.record(connection, settings.schema_, rows, settings.refusals_kept_max, oldest_at)
        except (OperationalError, UndefinedTable) as error:
            raise OSError(f"PostgreSQL: {str(error).strip()}") from None

    return RefusalLog(write, RefusalSample(settings.refusals_one_in, settings.refusals_per_second_max))


@asynccontextmanager
async def open_gate(settings: Settings) -> AsyncIterator[Gate]:
    """A started gate with a Redis client of its own."""
    client = open_redis(settings)
    kept = refusal_log(settings)
    gate = Gate(client, key_space(settings), sealer(settings), gate_limits(settings), tickets=ticket_keys(settings), refusals=kept)
    try:
        await require_core(client)
        gate.start()
        async with writing(kept):
            yield gate
    finally:
        await gate.close()
        await client.aclose()
