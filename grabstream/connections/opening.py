"""Opens the connections of a process to Redis and PostgreSQL; no other file does. Nothing connects at
import.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from aiokafka.errors import KafkaError
from psycopg import AsyncConnection, IsolationLevel
from psycopg.rows import tuple_row
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from grabstream.connections.identity import (
    OtherSystem,
    compare_journal,
    find_audience,
    find_journal,
    require_prefix,
    require_schema,
)
from grabstream.connections.journal_keys import compare, record_own
from grabstream.connections.key_files import keys_of
from grabstream.connections.logins import raise_refusal, tls_options
from grabstream.connections.preconditions import require_postgres, require_topics
from grabstream.connections.redis_cluster import ClusterClient
from grabstream.connections.redis_servers import information
from grabstream.connections.seal_keys import require_seal_keys
from grabstream.connections.user_keys import KeysOfUsers
from grabstream.crypto.encryption import EncryptionKey
from grabstream.crypto.sealing import Sealer
from grabstream.crypto.signing import SigningKeys
from grabstream.crypto.tickets import TicketKeys
from grabstream.gate.authority import Authority
from grabstream.gate.calls import GateLimits, now_ms
from grabstream.gate.decided import LostDecision
from grabstream.gate.gate import Gate
from grabstream.gate.refusals import Refusal, RefusalLog, RefusalSample, Write, writing
from grabstream.lua.keys import KeySpace
from grabstream.lua.script_client import ScriptClient, cancellable
from grabstream.models.calendar import DAY_MS
from grabstream.models.events import encode_event
from grabstream.models.journal import Cursor
from grabstream.models.runs import decode_line, singles
from grabstream.projections.checking.snapshots import events_of, newest, payments_of, trail_of
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import bound_locks, connect
from grabstream.projections.database.system import Identity
from grabstream.projections.tables import refusals
from grabstream.projections.tables.recoveries import record_lost, record_recovery
from grabstream.runtime.trouble import is_trouble
from grabstream.settings import BadSettings, Settings, cluster_address, is_cluster
from grabstream.streams.clients import error_text
from grabstream.streams.deciding.payments import PaymentSide
from grabstream.streams.deciding.refusal_topic import RefusalTopic
from grabstream.streams.journal_keys import journal_keys
from grabstream.streams.relaying.recovery import Recovered, Snapshot, Snapshots
from grabstream.streams.topics import Topics

if TYPE_CHECKING:
    from grabstream.streams.following.user_projection import System
    from grabstream.streams.rebuilding.reading import Servers
    from grabstream.streams.worker import WorkerSettings

log = logging.getLogger(__name__)

CHECK_AGAIN_SECONDS = 2.0
MIXED_SECONDS_MAX = 8.0


def open_redis(settings: Settings) -> Any:
    """A client of the core Redis. It never repeats a command automatically, because an argument may describe
    a state of the server that is outdated by then.

    `redis-cluster://host:port,host:port` is a Redis Cluster; the client connects to these hosts first.
    """
    seconds = settings.redis_timeout_ms / 1000
    options: dict[str, Any] = {
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": settings.redis_connections_max,
        **tls_options(settings.redis_url, settings.redis_ca, settings.redis_certificate, settings.redis_key),
    }
    if not is_cluster(settings.redis_url):
        return cancellable(ScriptClient.from_url(settings.redis_url, **options))
    address = cluster_address(settings.redis_url)
    login = {"username": address.username, "password": address.password, "ssl": address.encrypted}

    def open_server(host: str, port: int) -> Any:
        return cancellable(ScriptClient(host=host, port=port, **login, **options))

    return ClusterClient(address.nodes, open_server)


async def require_core(client: Any) -> None:
    """Raises BadSettings when a server may evict keys: decisions would be lost without an error."""
    for server, memory in (await information(client, "memory")).items():
        policy = memory["maxmemory_policy"]
        if policy != "noeviction":
            raise BadSettings(
                f"GRAB_REDIS_URL: the maxmemory-policy of {server or 'the server'} is {policy}, but a Redis "
                "that decides must never evict keys: run `CONFIG SET maxmemory-policy noeviction` there, or "
                "use a separate server"
            )


@asynccontextmanager
async def checked_database(
    settings: Settings, bounded: bool = False, **options: Any
) -> AsyncIterator[AsyncConnection[Any]]:
    """A connection whose unqualified names are in the system's schema; raises OtherSystem when the schema
    belongs to another system, and ConditionNotMet.

    `bounded` is for what a shard waits for (`bound_locks`). `options` are those of psycopg; by default the
    connection commits each statement.
    """
    row_factory = options.pop("row_factory", tuple_row)
    async with await connect(settings.postgres, settings.schema_, **options) as connection:
        if bounded:
            await bound_locks(connection)
        await require_postgres(connection, settings)
        await require_schema(connection, settings)
        await use_schema(connection, settings.schema_)
        connection.row_factory = row_factory
        yield connection


async def check_system(
    settings: Settings,
    redis: Any = None,
    journal: bool = True,
    say: Callable[[str, str], object] = log.warning,
    seals: bool = False,
    relays: bool = False,
) -> Identity | None:
    """Compares schema, journal and prefix; raises BadSettings when they do not belong to one system, or a
    server does not meet a condition.

    Every process does this before anything else. Without `journal`, Kafka is not asked. With `seals`, the
    seal keys must be those of the system; for a process that `relays`, also the keys of the journal, and its
    own is recorded. An unreachable Redis or PostgreSQL is only logged, with `say`: code that needs the server
    raises its own error. Returns the system, or None while the schema does not name one.
    """
    topic = await find_journal(settings) if journal else None
    if topic is not None:
        await require_topics(settings)
    identity = None
    try:
        async with await connect(settings.postgres, settings.schema_) as connection:
            await bound_locks(connection)
            await require_postgres(connection, settings)
            identity = await require_schema(connection, settings)
            if seals:
                await use_schema(connection, settings.schema_)
                await require_seal_keys(connection, settings)
            if relays and journal_keys().public:
                await use_schema(connection, settings.schema_)
                compare(journal_keys(), await record_own(connection, settings))
    except psycopg.OperationalError as error:
        await raise_refusal(settings, error)
        say("PostgreSQL cannot be reached yet: %s", str(error).strip())
    if identity is not None and journal:
        compare_journal(settings, identity, topic)
        identity = identity._replace(cluster=topic.cluster) if topic is not None else identity
    elif journal and topic is None:
        raise BadSettings(
            f"topic {Topics(settings.prefix).journal} does not exist: run `grabstream init` to create it"
        )
    client = redis or open_redis(settings)
    try:
        expected = topic and Identity(settings.prefix, topic.id, settings.shards, topic.cluster)
        await require_prefix(client, key_space(settings).system, settings, expected)
    except BaseException as error:
        if not is_trouble(error):
            raise
        if isinstance(error, RedisError):
            await raise_refusal(settings, error)
        say("Redis cannot be reached yet: %s", error_text(error))
    finally:
        if redis is None:
            await client.aclose()
    return identity


async def mixed_systems(settings: Settings) -> OtherSystem | None:
    """The error when the settings mix two systems, or None when no server reports that within
    MIXED_SECONDS_MAX, or this login may not read to which system the schema belongs.

    For verbs that show the problem instead of ending with it.
    """
    for journal in (True, False):
        try:
            async with asyncio.timeout(MIXED_SECONDS_MAX):
                await check_system(settings, journal=journal)
        except OtherSystem as error:
            return error
        except psycopg.errors.InsufficientPrivilege:
            break
        except (KafkaError, OSError, BadSettings):
            continue  # Kafka is down, or has no such topic yet: ask the other servers without it
        else:
            break
    return None


async def wait_until_known(settings: Settings) -> None:
    """Waits until the schema names the system of the settings; raises BadSettings when it names another
    one.
    """
    while True:
        if await check_system(settings) is not None:
            return
        await asyncio.sleep(CHECK_AGAIN_SECONDS)


def key_space(settings: Settings) -> KeySpace:
    """The keys of this system."""
    return KeySpace(settings.prefix, settings.shards, redis_database(settings))


def redis_database(settings: Settings) -> int:
    """The number of the Redis database; a cluster has only database 0."""
    return 0 if is_cluster(settings.redis_url) else int(parse_url(settings.redis_url).get("db") or 0)


async def audience(settings: Settings, redis: Any) -> str:
    """The audience that receipts for this system name; '' without keys of the payment side."""
    if payment_keys(settings) is None:
        return ""
    return await find_audience(redis, key_space(settings).system, settings)


def gate_limits(settings: Settings, audience: str = "") -> GateLimits:
    """The gate's bounds from the settings; `audience` is the one that receipts for this system name."""
    return GateLimits(
        batch_commands_max=settings.batch_commands_max,
        queue_commands_max=settings.gate_queue_max,
        outbox_events_max=settings.outbox_events_max,
        timeout_ms=settings.gate_timeout_ms,
        clock_skew_ms_max=settings.clock_skew_ms_max,
        issuer_seeds=settings.issuer_seeds,
        beacon_required=settings.beacon_required,
        seals_metadata=settings.seal_metadata,
        authority=Authority(
            settings.prefix,
            payment_keys(settings),
            keys_of(settings, "operator_keys"),
            settings.adjust_two_signatures_above,
            audience,
        ),
    )


def sealer(settings: Settings) -> Sealer:
    """Encrypts seeds and codes; raises ValueError that names GRAB_SEAL_KEYS when the keys cannot be read."""
    return Sealer.from_text(settings.seal_keys.get_secret_value())


def user_keys(settings: Settings) -> KeysOfUsers | None:
    """The keys under which the metadata of grabs are sealed; None where they are not. Raises BadSettings when
    a seal key only seals: such a process cannot read the keys.
    """
    if not settings.seal_metadata:
        return None
    settings.require_opening_keys("a process that seals metadata (GRAB_SEAL_METADATA)")
    return KeysOfUsers(settings.postgres, settings.schema_, sealer(settings))


def ticket_keys(settings: Settings) -> TicketKeys:
    """The keys that verify tickets; raises ValueError that names GRAB_TICKET_KEYS when they cannot be
    read.
    """
    keys: TicketKeys = keys_of(settings, "ticket_keys")
    return keys


def payment_keys(settings: Settings) -> SigningKeys | None:
    """The keys shared with the payment side; None without any. Raises ValueError that names
    GRAB_PAYMENT_KEYS when they cannot be read.
    """
    keys: SigningKeys | None = keys_of(settings, "payment_keys")
    return keys


def payment_encryption_key(settings: Settings) -> EncryptionKey | None:
    """The key that payment tokens are encrypted with; None where they are signed only. Raises ValueError that
    names GRAB_PAYMENT_ENCRYPTION_KEY when it cannot be read.
    """
    key: EncryptionKey | None = keys_of(settings, "payment_encryption_key")
    return key


def payment_side(settings: Settings, audience: str) -> PaymentSide | None:
    """What a worker needs to ask the payment side; None if it does not ask. `audience` names this system."""
    keys = payment_keys(settings)
    if settings.payment_query_url is None or keys is None:
        return None
    return PaymentSide(settings.payment_query_url, keys, settings.payment_query_timeout_ms / 1000, audience)


def worker_settings(settings: Settings, audience: str) -> "WorkerSettings":
    """The part of the settings that a worker uses; `audience` is the one that receipts for this system
    name.
    """
    # Imported here: all roles of a worker come with it, and other processes connect too.
    from grabstream.streams.worker import WorkerSettings

    return WorkerSettings(
        kafka=settings.brokers,
        prefix=settings.prefix,
        shards=settings.shards,
        redis_database=redis_database(settings),
        gate=gate_limits(settings, audience),
        block_events_max=settings.block_events_max,
        lease_ms=settings.lease_ms,
        operations_on_commands=settings.operations_on_commands,
    )


def where_of(settings: Settings) -> "Servers":
    """The servers of the settings, in the form that a rebuild uses."""
    # Imported here: readers of all sources come with it, and other processes connect too.
    from grabstream.streams.rebuilding.reading import Servers

    return Servers(
        settings.brokers, Topics(settings.prefix).journal, settings.postgres, settings.schema_,
        settings.shards, settings.prefix,
    )  # fmt: skip


def refusal_log(settings: Settings) -> RefusalLog | None:
    """The log that keeps a sample of refusals in PostgreSQL and, if the settings want it, in a topic; None
    when they keep no refusals.
    """
    if not settings.refusals_one_in:
        return None

    async def write(rows: Sequence[Refusal]) -> None:
        oldest_at = now_ms() - settings.refusals_days * DAY_MS
        try:
            async with checked_database(settings) as connection:
                await refusals.store(
                    connection, settings.schema_, rows, settings.refusals_kept_max, oldest_at
                )
        except (psycopg.Error, BadSettings) as error:
            raise OSError(f"PostgreSQL: {str(error).strip()}") from None

    writes: dict[str, Write] = {"books": write} if settings.refusals_kept_max else {}
    end = None
    if settings.refusals_topic:
        topic = RefusalTopic(settings.brokers, Topics(settings.prefix).refusals, settings.shards)
        writes["topic"], end = topic.write, topic.close
    if not writes:
        return None
    return RefusalLog(writes, RefusalSample(settings.refusals_one_in, settings.refusals_per_second_max), end)


def snapshots(settings: Settings, slowly: bool = False) -> Snapshots:
    """The audit trail as snapshots for recovery. They raise OSError when PostgreSQL is down; a recovery then
    reads the journal instead.

    `slowly` is for readers that pause between reads: it keeps no transaction open, which would delay rebuilds
    and VACUUM. It does not notice when the trail is replaced in between, so a recovery must not use it.
    """

    @asynccontextmanager
    async def connected() -> AsyncIterator[AsyncConnection[Any]]:
        try:
            async with checked_database(settings, bounded=True) as connection:
                await connection.set_autocommit(False)
                await connection.set_isolation_level(IsolationLevel.REPEATABLE_READ)
                await connection.set_read_only(True)
                yield connection
        except (psycopg.Error, BadSettings) as error:
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

    async def recorded_keys() -> Mapping[str, str]:
        try:
            async with checked_database(settings, bounded=True) as connection:
                return await record_own(connection, settings)
        except (psycopg.Error, BadSettings) as error:
            raise OSError(f"PostgreSQL: {str(error).strip()}") from None

    return Snapshots(open_snapshot, newest_cursor, recorded_keys)


async def report_recovery(settings: Settings, recovered: Recovered) -> None:
    """Records a recovery; raises OSError when PostgreSQL is down."""
    lost = []
    for event in (one for line in recovered.lost for one in singles(decode_line(line))):
        user, amount = getattr(event, "user", None), getattr(event, "amount", None)
        type_, text = str(event.__struct_config__.tag), encode_event(event).decode()
        lost.append((event.shard, event.seq, "relay", event.command, event.offer, user, type_, amount, text))
    row = (
        recovered.shard, recovered.term, recovered.kind, recovered.problem, recovered.redis_seq,
        recovered.journal_seq,
        recovered.snapshot_seq, recovered.applied, recovered.seconds,
    )  # fmt: skip
    try:
        async with checked_database(settings, bounded=True) as connection:
            await record_recovery(connection, settings.schema_, row, lost)
    except (psycopg.Error, BadSettings) as error:
        raise OSError(f"PostgreSQL: {error}") from None


async def report_lost(settings: Settings, lost: Sequence[LostDecision]) -> None:
    """Records answers that a recovery has undone; raises OSError when PostgreSQL is down."""
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
        async with checked_database(settings, bounded=True) as connection:
            await record_lost(connection, settings.schema_, rows)
    except (psycopg.Error, BadSettings) as error:
        raise OSError(f"PostgreSQL: {error}") from None


def system_of(settings: Settings) -> "System":
    """The part of the settings that a user projection gets."""
    # Imported here: rebuilding and replaying come with it, and other processes connect too.
    from grabstream.streams.following.user_projection import System

    return System(settings.brokers, settings.postgres, settings.prefix, settings.shards, settings.schema_)


@asynccontextmanager
async def open_gate(settings: Settings) -> AsyncIterator[Gate]:
    """A started gate. It has its own Redis client, which is closed with it."""
    client = open_redis(settings)
    try:
        await require_core(client)
        await check_system(settings, client, journal=False, seals=True)
        limits = gate_limits(settings, await audience(settings, client))
        async with _open_gate(settings, client, limits) as gate:
            yield gate
    finally:
        await client.aclose()


@asynccontextmanager
async def _open_gate(settings: Settings, client: Any, limits: GateLimits) -> AsyncIterator[Gate]:
    refusals_kept = refusal_log(settings)
    keys_of_users = user_keys(settings)
    gate = Gate(
        client, key_space(settings), sealer(settings), limits, tickets=ticket_keys(settings),
        refusals=refusals_kept, user_keys=keys_of_users,
        report_lost=functools.partial(report_lost, settings),
    )  # fmt: skip
    try:
        gate.start()
        async with writing(refusals_kept):
            yield gate
    finally:
        await gate.close()
        if keys_of_users is not None:
            await keys_of_users.close()
