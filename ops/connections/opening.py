"""Connections: the only file that opens those of a process to Redis and PostgreSQL. Nothing connects at
import.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import redis.asyncio
from aiokafka.errors import KafkaError
from psycopg import AsyncConnection, IsolationLevel
from psycopg.rows import tuple_row
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from grabstream.lua.gate.calls import GateLimits, now_ms
from grabstream.lua.gate.decided import LostDecision
from grabstream.lua.gate.door import Gate
from grabstream.lua.gate.refusals import Refusal, RefusalLog, RefusalSample, writing
from grabstream.lua.gate.sealing import Sealer
from grabstream.lua.gate.tickets import TicketKeys
from grabstream.lua.keys import KeySpace
from grabstream.lua.trouble import is_trouble
from grabstream.models.calendar import DAY_MS
from grabstream.models.events import decode_event
from grabstream.models.journal import Cursor
from grabstream.ops.connections.identity import (
    OtherSystem,
    compare_journal,
    find_journal,
    require_prefix,
    require_schema,
)
from grabstream.ops.connections.redis_cluster import ClusterClient
from grabstream.ops.connections.redis_servers import information
from grabstream.ops.settings import BadSettings, Settings, cluster_address, is_cluster
from grabstream.projections.checking.snapshots import events_of, newest, payments_of, trail_of
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.database.system import Identity
from grabstream.projections.records import refusals
from grabstream.projections.records.recoveries import record_lost, record_recovery
from grabstream.streams.clients import in_words
from grabstream.streams.following.user_projection import System
from grabstream.streams.relaying.recovery import Recovered, Snapshot, Snapshots
from grabstream.streams.topics import Topics
from grabstream.streams.worker import WorkerSettings

log = logging.getLogger(__name__)

SOCKET_TIMEOUT_SECONDS = 5.0
LOOK_AGAIN_SECONDS = 2.0


class _Cancellable:
    """A connection that passes a cancellation on. redis-py sends by `asyncio.wait_for`, which until Python
    3.12 may swallow one, and a worker that was told to stop would go on for ever.
    """

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        await super().send_packed_command(command, check_health)  # type: ignore[misc]
        if task and task.cancelling() > before:
            # The answer is on its way, and nobody will read it.
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise asyncio.CancelledError


class PlainConnection(_Cancellable, redis.asyncio.Connection):  # type: ignore[misc]
    """A connection over TCP."""


class EncryptedConnection(_Cancellable, redis.asyncio.SSLConnection):  # type: ignore[misc]
    """A connection over TLS."""


def open_redis(settings: Settings) -> Any:
    """A client of the core Redis; it repeats nothing by itself, since what an argument says of the server may
    be old by then.

    `redis-cluster://host:port,host:port` is a Redis Cluster, of which the hosts named are those asked first.
    """
    options: dict[str, Any] = {
        "socket_timeout": SOCKET_TIMEOUT_SECONDS,
        "socket_connect_timeout": SOCKET_TIMEOUT_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": 256,
    }
    if not is_cluster(settings.redis_url):
        return _cancellable(redis.asyncio.Redis.from_url(settings.redis_url, **options))
    address = cluster_address(settings.redis_url)
    login = {"username": address.username, "password": address.password, "ssl": address.encrypted}

    def open_server(host: str, port: int) -> Any:
        return _cancellable(redis.asyncio.Redis(host=host, port=port, **login, **options))

    return ClusterClient(address.nodes, open_server)


def _cancellable(client: Any) -> Any:
    pool = client.connection_pool
    if pool.connection_class is redis.asyncio.Connection:
        pool.connection_class = PlainConnection
    elif pool.connection_class is redis.asyncio.SSLConnection:
        pool.connection_class = EncryptedConnection
    return client


async def require_core(client: Any) -> None:
    """Raises BadSettings when a server may forget by itself: what was decided would be gone without a
    word.
    """
    for server, memory in (await information(client, "memory")).items():
        policy = memory["maxmemory_policy"]
        if policy != "noeviction":
            raise BadSettings(
                f"GRAB_REDIS_URL: the maxmemory-policy of {server or 'the server'} is {policy}, but the core "
                "must never evict: "
                "`CONFIG SET maxmemory-policy noeviction`, or give the core a server of its own"
            )


@asynccontextmanager
async def checked_books(settings: Settings, **options: Any) -> AsyncIterator[AsyncConnection[Any]]:
    """A connection whose unqualified names are those of the system's schema; raises OtherSystem when that
    belongs to another system.

    `options` are psycopg's; it commits by itself if they do not say otherwise.
    """
    row_factory = options.pop("row_factory", tuple_row)
    async with await connect(settings.postgres, settings.schema_, **options) as connection:
        await require_schema(connection, settings)
        await use_schema(connection, settings.schema_)
        connection.row_factory = row_factory
        yield connection


async def check_system(
    settings: Settings,
    redis: Any = None,
    journal: bool = True,
    say: Callable[[str, str], object] = log.warning,
) -> Identity | None:
    """Raises BadSettings when the settings are not those of one system: what schema, journal and prefix say
    of each other.

    Every process asks before anything else; without `journal` it does so without Kafka. Of the others one
    that is away is only logged, by `say`: whoever needs it meets that by itself. Returns the system, None as
    long as the schema does not say that it is.
    """
    topic = await find_journal(settings) if journal else None
    identity = None
    try:
        async with await connect(settings.postgres, settings.schema_) as connection:
            identity = await require_schema(connection, settings)
    except psycopg.OperationalError as error:
        say("PostgreSQL cannot be reached yet: %s", str(error).strip())
    if identity is not None and journal:
        compare_journal(settings, identity, topic)
    elif journal and topic is None:
        raise BadSettings(f"topic {Topics(settings.prefix).journal} is not there: `grabstream init` makes it")
    client = redis or open_redis(settings)
    try:
        expected = topic and Identity(settings.prefix, topic.id, settings.shards)
        await require_prefix(client, key_space(settings).system, settings, expected)
    except BaseException as error:
        if not is_trouble(error):
            raise
        say("Redis cannot be reached yet: %s", in_words(error))
    finally:
        if redis is None:
            await client.aclose()
    return identity


async def what_is_mixed_up(settings: Settings, seconds: float = 8.0) -> OtherSystem | None:
    """What the settings mix up, as far as servers say so within so many seconds; for verbs that tell instead
    of refusing.
    """
    for journal in (True, False):
        try:
            async with asyncio.timeout(seconds):
                await check_system(settings, journal=journal)
        except OtherSystem as error:
            return error
        except (KafkaError, OSError, BadSettings):
            continue  # Kafka is away, or there is no topic yet: the others are asked all the same
        else:
            break
    return None


async def until_known(settings: Settings) -> None:
    """Returns when the settings are known to be those of one system; raises BadSettings when they are not."""
    while True:
        if await check_system(settings) is not None:
            return
        await asyncio.sleep(LOOK_AGAIN_SECONDS)


def key_space(settings: Settings) -> KeySpace:
    """The keys of this system."""
    return KeySpace(settings.prefix, settings.shards, redis_database(settings))


def redis_database(settings: Settings) -> int:
    """The number of Redis' database; a cluster has one only."""
    return 0 if is_cluster(settings.redis_url) else int(parse_url(settings.redis_url).get("db") or 0)


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
    """What tickets are checked with; raises ValueError that names GRAB_TICKET_KEYS when they cannot be
    read.
    """
    return TicketKeys.from_text(settings.ticket_keys.get_secret_value())


def worker_settings(settings: Settings) -> WorkerSettings:
    """What a worker is told."""
    return WorkerSettings(
        kafka=settings.kafka,
        prefix=settings.prefix,
        shards=settings.shards,
        redis_database=redis_database(settings),
        gate=gate_limits(settings),
        block_events_max=settings.block_events_max,
        lease_ms=settings.lease_ms,
    )


def refusal_log(settings: Settings) -> RefusalLog | None:
    """Keeps a sample of refusals in PostgreSQL; None where none are to be kept."""
    if not settings.refusals_one_in or not settings.refusals_kept_max:
        return None

    async def write(rows: Sequence[Refusal]) -> None:
        oldest_at = now_ms() - settings.refusals_days * DAY_MS
        try:
            async with checked_books(settings) as connection:
                await refusals.record(
                    connection, settings.schema_, rows, settings.refusals_kept_max, oldest_at
                )
        except (psycopg.Error, OtherSystem) as error:
            raise OSError(f"PostgreSQL: {str(error).strip()}") from None

    return RefusalLog(write, RefusalSample(settings.refusals_one_in, settings.refusals_per_second_max))


def snapshots(settings: Settings, slowly: bool = False) -> Snapshots:
    """The audit trail as snapshots for recovery; where PostgreSQL is away they raise OSError, and the journal
    is read instead.

    `slowly` is for who rests while they read: no transaction stays open, which rebuilds and VACUUM would have
    to wait for. A trail that is replaced meanwhile by another one is not noticed then: so it is not for
    recovery.
    """

    @asynccontextmanager
    async def connected() -> AsyncIterator[AsyncConnection[Any]]:
        try:
            async with checked_books(settings) as connection:
                await connection.set_autocommit(False)
                await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
                await connection.set_read_only(True)
                yield connection
        except (psycopg.Error, OtherSystem) as error:
            raise OSError(f"PostgreSQL: {error}") from None

    @asynccontextmanager
    async def open_snapshot(shard: int) -> AsyncIterator[Snapshot | None]:
        async with connected() as connection:
            trail = await trail_of(connection, shard)
            if slowly:
                await connection.commit()
                await connection.set_autocommit(True)
            yield trail and Snapshot(
                trail.cursor,
                trail.at,
                trail.retired,
                trail.past,
                payments_of(connection, shard, trail, slowly),
                events_of(connection, shard, trail, slowly),
            )

    async def newest_cursor(shard: int) -> Cursor:
        async with connected() as connection:
            return await newest(connection, shard)

    return Snapshots(open_snapshot, newest_cursor)


async def report_recovery(settings: Settings, recovered: Recovered) -> None:
    """Writes down what a recovery did; raises OSError where PostgreSQL is away."""
    lost = []
    for line, event in zip(recovered.lost, map(decode_event, recovered.lost), strict=True):
        user, amount = getattr(event, "user", None), getattr(event, "amount", None)
        type_ = str(event.__struct_config__.tag)
        lost.append(
            (event.shard, event.seq, "relay", event.command, event.offer, user, type_, amount, line.decode())
        )
    row = (
        recovered.shard, recovered.term, recovered.kind, recovered.problem, recovered.redis_seq,
        recovered.journal_seq,
        recovered.snapshot_seq, recovered.applied, recovered.seconds,
    )  # fmt: skip
    try:
        async with checked_books(settings) as connection:
            await record_recovery(connection, settings.schema_, row, lost)
    except (psycopg.Error, OtherSystem) as error:
        raise OSError(f"PostgreSQL: {error}") from None


async def report_lost(settings: Settings, lost: Sequence[LostDecision]) -> None:
    """Writes down answers that a recovery took back; raises OSError where PostgreSQL is away."""
    rows = [
        (
            shard,
            answer.seq or 0,
            "gate",
            command.id,
            command.offer,
            getattr(command, "user", None),
            answer.outcome,
            answer.amount,
            None,
        )
        for shard, command, answer in lost
    ]
    try:
        async with checked_books(settings) as connection:
            await record_lost(connection, settings.schema_, rows)
    except (psycopg.Error, OtherSystem) as error:
        raise OSError(f"PostgreSQL: {error}") from None


def system_of(settings: Settings) -> System:
    """What a projection of one's own is told."""
    return System(settings.kafka, settings.postgres, settings.prefix, settings.shards, settings.schema_)


@asynccontextmanager
async def open_gate(settings: Settings) -> AsyncIterator[Gate]:
    """A started gate with a Redis client of its own."""
    client = open_redis(settings)
    kept = refusal_log(settings)
    gate = Gate(
        client, key_space(settings), sealer(settings), gate_limits(settings), tickets=ticket_keys(settings),
        refusals=kept,
        report_lost=functools.partial(report_lost, settings),
    )  # fmt: skip
    try:
        await require_core(client)
        await check_system(settings, client, journal=False)
        gate.start()
        async with writing(kept):
            yield gate
    finally:
        await gate.close()
        await client.aclose()
