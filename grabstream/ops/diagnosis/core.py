"""Checks of Redis: whether it may lose data, whether every shard decides, is relayed and is swept, and
whether outboxes have room.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import RedisError

from grabstream.connections.redis_servers import ANSWER_SECONDS_MAX, ask_each, masters, within
from grabstream.connections.worker_reports import ReportedTrouble, WorkerReport, read_reports
from grabstream.lua.keys import LAYOUT, SHARD_FIELDS, KeySpace, ShardKeys
from grabstream.lua.library import MISSING, library, missing_or_unusable
from grabstream.lua.packed_values import first_event_at
from grabstream.lua.server import server_epoch_of
from grabstream.models.bounds import counted, quoted
from grabstream.ops.diagnosis.findings import RESTORE, Finding, address, shard_list
from grabstream.runtime.trouble import is_trouble
from grabstream.settings import Settings
from grabstream.streams.clients import LASTING_SECONDS
from grabstream.streams.relaying.takeover import CANNOT_BE_REBUILT, JOURNAL_LOST

#: How long a replica may take to answer: well below ANSWER_SECONDS_MAX, which bounds its master and it.
REPLICA_SECONDS_MAX: Final = 1.0
#: A relay is late when an event has waited this long for the journal.
RELAY_LATE_MS: Final = 10_000
#: The sweeper runs four times a second and ends holds first; offers that are due may have to wait for other
#: offers.
HOLD_LATE_MS: Final = 1_000
SWEEP_LATE_MS: Final = 10_000
FULL_SHARE: Final = 0.8
MEMORY_FULL_SHARE: Final = 0.9

_number = re.compile(r"\d+")


class ShardReadings(NamedTuple):
    """A shard in Redis, and the epoch of its server. `relay` is the worker that holds the lease, `library`
    what `missing_or_unusable` returns. Times are ms since 1970 UTC; None where the shard has no such event,
    hold or offer.
    """

    number: int
    server_epoch: str
    fields: dict[str, str | None]
    relay: str | None
    oldest_unjournaled_at: int | None
    oldest_due_at: int | None
    oldest_hold_at: int | None
    library: str = ""

    @property
    def waiting(self) -> int:
        """How many events are decided and not yet in the journal."""
        return int(self.fields["seq"] or 0) - int(self.fields["journaled_seq"] or 0)


class ServerReadings(NamedTuple):
    """A Redis server. `name` is how messages name it; `clock_ahead_ms` is its clock minus this machine's."""

    name: str
    info: dict[str, Any]
    config: dict[str, str]
    time_ms: int
    clock_ahead_ms: int
    #: Whether each replica that follows writes an append-only file, by its address; None: it was not read,
    #: or did not answer.
    replicas: Mapping[str, bool | None] = {}

    @property
    def server_epoch(self) -> str:
        """The server's epoch: run id and replication id."""
        return str(self.info["run_id"]) + str(self.info["master_replid"])

    @property
    def started_at(self) -> int:
        """When the server started, ms since 1970 UTC."""
        return self.time_ms - int(self.info["uptime_in_seconds"]) * 1000


class CoreReadings(NamedTuple):
    """The servers that answered (several in a cluster) and their shards. `silent` are the addresses of
    servers that did not answer, `unknown` the shards on them.
    """

    servers: list[ServerReadings]
    shards: list[ShardReadings]
    silent: Sequence[str] = ()
    unknown: Sequence[int] = ()
    #: The reports of workers, by their names.
    workers: Mapping[str, WorkerReport] = {}

    @property
    def time_ms(self) -> int:
        """The latest time of the servers, ms since 1970 UTC."""
        return max(server.time_ms for server in self.servers)

    @property
    def clock_ahead_ms(self) -> int:
        """The largest difference of a server's clock to this machine's; negative when it is behind."""
        return max((server.clock_ahead_ms for server in self.servers), key=abs)

    def started_at(self, server_epoch: str) -> int:
        """When the server with this epoch started, ms since 1970 UTC; 0 when no server has it."""
        return next((server.started_at for server in self.servers if server.server_epoch == server_epoch), 0)


async def read_core(redis: Any, keys: KeySpace, clock: Any) -> CoreReadings:
    """Reads servers and shards once. `clock` returns this machine's time in ms. Raises the client's errors
    when no server answers.
    """
    clients = await masters(redis)
    reads = [within(_read_server(client, name, clock)) for name, client in clients]
    states = {number: keys.shard(number).state for number in range(keys.shards)}
    # A server that hangs must not hide the others.
    servers, shards = await asyncio.gather(
        asyncio.gather(*reads, return_exceptions=True),
        ask_each(redis, states, lambda number: _read_shard(redis, keys.shard(number))),
    )
    answered = [server for server in servers if isinstance(server, ServerReadings)]
    for problem in servers:
        if isinstance(problem, BaseException) and not (answered and is_trouble(problem)):
            raise problem
    silent = [
        name
        for (name, _), server in zip(clients, servers, strict=True)
        if not isinstance(server, ServerReadings)
    ]
    return CoreReadings(
        answered, list(shards.values()), silent, [number for number in states if number not in shards],
        await read_reports(redis, keys.workers, clock()),
    )  # fmt: skip


async def _read_server(redis: Any, address: str, clock: Any) -> ServerReadings:
    info: dict[str, Any] = await redis.info()
    before = clock()
    seconds, microseconds = await redis.time()
    time_ms = int(seconds) * 1000 + int(microseconds) // 1000
    ahead = time_ms - (before + clock()) // 2
    config: dict[str, str] = {}
    for name in ("appendonly", "maxmemory-policy", "dir", "save"):
        values = await redis.config_get(name)
        config.update({_text(key): _text(value) for key, value in values.items()})
    replicas = {} if config["appendonly"] == "yes" else await _read_replicas(redis, info)
    return ServerReadings(f"Redis {address}".strip(), info, config, time_ms, ahead, replicas)


async def _read_replicas(client: Any, info: Mapping[str, Any]) -> dict[str, bool | None]:
    """Whether each replica of a server writes an append-only file, by its address. They are asked with the
    login of the client.
    """
    found: dict[str, bool | None] = {}
    for number in range(int(info["connected_slaves"])):
        replica = info.get(f"slave{number}", {})
        if replica.get("state") != "online":
            continue
        host, port = str(replica["ip"]), int(replica["port"])
        pool = client.connection_pool
        server = Redis(
            connection_pool=ConnectionPool(
                connection_class=pool.connection_class,
                **pool.connection_kwargs | {"host": host, "port": port},
            )
        )
        try:
            persistence = await within(server.info("persistence"), REPLICA_SECONDS_MAX)
            found[f"{host}:{port}"] = bool(persistence["aof_enabled"])
        except (RedisError, OSError):
            found[f"{host}:{port}"] = None
        finally:
            await server.aclose(close_connection_pool=True)
    return found


async def _read_shard(redis: Any, keys: ShardKeys) -> ShardReadings:
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hmget(keys.state, list(SHARD_FIELDS))
        pipe.get(keys.lease)
        pipe.zrange(keys.due, 0, 0, withscores=True)
        pipe.zrange(keys.holds, 0, 0, withscores=True)
        values, relay, due, holds = await pipe.execute()
    fields = {name: value and _text(value) for name, value in zip(SHARD_FIELDS, values, strict=True)}
    oldest_unjournaled_at = None
    journaled = int(fields["journaled_seq"] or 0)
    if int(fields["seq"] or 0) > journaled:
        entry = await redis.xrange(keys.outbox, min=f"{journaled + 1}-0", count=1) or await redis.xrange(
            keys.outbox, count=1
        )
        oldest_unjournaled_at = first_event_at(entry)
    first_due, first_hold = (int(first[0][1]) if first else None for first in (due, holds))
    server_epoch = await server_epoch_of(redis, keys.state)
    return ShardReadings(
        keys.shard,
        server_epoch,
        fields,
        relay and _text(relay),
        oldest_unjournaled_at,
        first_due,
        first_hold,
        await missing_or_unusable(redis, keys.state),
    )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


# -- checks --------------------------------------------------------------------------------------------------


def in_trouble(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Work of workers without success for LASTING_SECONDS of retries. The same cause in several places is one
    finding.
    """
    alike: dict[tuple[str, str], list[ReportedTrouble]] = {}
    for worker, report in readings.workers.items():
        for trouble in report.troubles:
            if trouble.seconds >= LASTING_SECONDS:
                alike.setdefault((worker, trouble.words), []).append(trouble)
    return [
        Finding(
            "stuck", f"worker {worker}: {', '.join(sorted(one.where for one in troubles))}: {words}",
            "this makes no progress, despite retries: its cause must be removed",
            "remove the cause that the text names; the worker keeps trying   # its log says more",
            min(one.since for one in troubles),
        )
        for (worker, words), troubles in alike.items()
    ]  # fmt: skip


def may_evict(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Servers that may evict keys."""
    return [
        Finding(
            "stuck", f"{server.name} may evict keys: its maxmemory-policy is "
                     f"{server.config['maxmemory-policy']}",
            "Redis may delete what it has decided, without an error; workers and gates refuse to start",
            f"{_cli(server, settings)} CONFIG SET maxmemory-policy noeviction",
        )
        for server in readings.servers
        if server.config["maxmemory-policy"] != "noeviction"
    ]  # fmt: skip


def _cli(server: ServerReadings, settings: Settings) -> str:
    """The `redis-cli` call that reaches this server."""
    host, _, port = server.name.removeprefix("Redis").strip().rpartition(":")
    return (
        f"redis-cli -h {host} -p {port}"
        if port
        else f"redis-cli -u {address('GRAB_REDIS_URL', settings.redis_url)}"
    )


def may_lose(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Servers that do not write to their disk, or cannot."""
    findings = []
    for server in readings.servers:
        if server.config["appendonly"] != "yes" and any(server.replicas.values()):
            findings.append(
                Finding(
                    "note",
                    f"{server.name} writes no append-only file; its replica "
                    f"{', '.join(name for name, appends in server.replicas.items() if appends)} does",
                    "a restart of this server alone empties both, and each shard decides again only after "
                    "a rebuild from the journal: no supervisor may restart it automatically",
                    "redis-cli -h REPLICA REPLICAOF NO ONE   # if it ends: promote the replica first",
                )
            )
        elif server.config["appendonly"] != "yes":
            findings.append(
                Finding(
                    "risk", f"{server.name} writes no append-only file: appendonly is off",
                    "a restart of Redis loses every decision that is not in the journal yet, and each shard "
                    "decides again only after a rebuild from the journal",
                    f"{_cli(server, settings)} CONFIG SET appendonly yes",
                )
            )  # fmt: skip
        elif server.info.get("aof_last_write_status") != "ok":
            findings.append(
                Finding(
                    "stuck",
                    f"{server.name} cannot write its append-only file (aof_last_write_status is not "
                    "ok)",
                    "it decides nothing until it can: grabs are answered busy",
                    f"df -h {server.config['dir']}   # free space, or repair the disk",
                )
            )  # fmt: skip
    return findings


def memory_is_short(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Servers that use nearly all of their maxmemory."""
    findings = []
    for server in readings.servers:
        used, used_max = int(server.info["used_memory"]), int(server.info["maxmemory"])
        if used_max and used >= MEMORY_FULL_SHARE * used_max:
            findings.append(
                Finding(
                    "stuck" if used >= used_max else "risk",
                    f"{server.name} uses {used / 2**20:,.0f} MiB of its maxmemory, "
                    f"{used_max / 2**20:,.0f} MiB",
                    "when it is full, grabs and new offers are answered busy; holds and offers still end",
                    f"{_cli(server, settings)} CONFIG SET maxmemory {2 * used_max}   # or close and retire "
                    "offers",
                )
            )  # fmt: skip
    return findings


def check_callers_clock(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Shards whose callers may name the time."""
    shards = [shard for shard in readings.shards if shard.fields["clock"] == "caller"]
    if not shards:
        return []
    keys = KeySpace(settings.prefix, settings.shards)
    return [
        Finding(
            "risk",
            f"{shard_list([shard.number for shard in shards])}: callers may set the time at which commands "
            "are decided, as in a test or a rehearsal",
            "a caller with a wrong time ends holds and offers, and moves the shard's clock permanently",
            "; ".join(f"redis-cli HDEL {keys.shard(shard.number).state} clock" for shard in shards),
        )
    ]


def silent(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Servers of the cluster that do not answer, and the shards on them."""
    if not readings.silent and not readings.unknown:
        return []
    shards = f": the state of {shard_list(readings.unknown)} is unknown" if readings.unknown else ""
    servers = ", ".join(f"Redis {name}" for name in readings.silent) or "Redis"
    return [
        Finding(
            "stuck", f"{servers} does not answer within {ANSWER_SECONDS_MAX:.0f} s{shards}",
            "its shards decide nothing until it answers or a replica is promoted; all other shards continue",
            "; ".join(f"redis-cli -h {name.rpartition(':')[0]} -p {name.rpartition(':')[2]} PING" for name
            in readings.silent)
            or "grabstream status",
        )
    ]  # fmt: skip


def fenced(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Shards that decide nothing. Shards whose reasons differ only in numbers share one finding, with the
    reason of the first.
    """
    alike: dict[tuple[str, str], list[tuple[int, str, int | None]]] = {}
    for shard in readings.shards:
        fenced_because = _why_fenced(readings, shard) or _wrong_layout(shard, settings)
        if fenced_because is not None:
            reason, command, since = fenced_because
            alike.setdefault((_number.sub("#", reason), command), []).append((shard.number, reason, since))
    findings = []
    for (_, command), shards in alike.items():
        first, reason, _ = shards[0]
        if any(other != reason for _, other, _ in shards):
            reason = f"in shard {first}, {reason} (the others differ only in the numbers)"
        what = f"{shard_list(number for number, _, _ in shards)}: fenced: {reason}"
        since = min((since for *_, since in shards if since), default=None)
        findings.append(
            Finding("stuck", what, "the shard decides no commands: grabs are answered fenced", command, since)
        )
    return findings


def _why_fenced(readings: CoreReadings, shard: ShardReadings) -> tuple[str, str, int | None] | None:
    """Why a shard is fenced, the command that repairs it, and since when (ms since 1970 UTC); None when it is
    not fenced.
    """
    server_epoch, fault = shard.fields["server_epoch"], shard.fields["fault"]
    # A shard that was never taken over and has no relay is a finding of not_relayed.
    if server_epoch == shard.server_epoch or (server_epoch is None and shard.relay is None):
        return None
    restarted = server_epoch is not None
    since = None
    if restarted or (shard.fields["seq"] and not shard.fields["partial"]):
        # The shard was not fenced when it decided its last event, nor before this server started. A shard
        # that is being rebuilt is left out: its time is that of old events.
        since = max(readings.started_at(shard.server_epoch), int(shard.fields["time"] or 0)) or None
    if (
        restarted
        and shard.relay is not None
        and not fault
        and shard.fields["term"] == shard.fields["history"] is not None
    ):
        # The relay that owns the shard has reconciled it under this term, and no other has taken it over
        # since.
        fault = (
            f"its server epoch is {quoted(server_epoch)}, but its server has another one: Redis was "
            "restarted a moment ago, or the field was changed by hand"
        )
        return (
            fault,
            f"restart the worker {shard.relay}: the next takeover compares the shard with the journal",
            since,
        )
    if restarted and (shard.relay is None or not fault):
        fault = "Redis was restarted, or a replica promoted, and no relay has reconciled the shard since"
    if shard.relay is None:
        command = "grabstream worker --roles relay,sweep"
    elif fault and JOURNAL_LOST in fault:
        command = RESTORE
    elif fault and fault.startswith(CANNOT_BE_REBUILT):
        command = "grabstream rebuild redis"
    else:
        command = (
            "nothing: its relay is recovering the shard   # if it stays fenced, that worker's log says why"
        )
    return fault or "its relay has not taken it over yet", command, since


def _wrong_layout(shard: ShardReadings, settings: Settings) -> tuple[str, str, int | None] | None:
    """The same as _why_fenced, for a shard whose keys have another layout than the scripts write."""
    layout = shard.fields["layout"] or ("0" if shard.fields["seq"] else str(LAYOUT))
    if shard.fields["server_epoch"] is None or layout == str(LAYOUT):
        return None
    reason = f"its keys have layout {quoted(layout)}, but this program writes layout {LAYOUT}"
    if layout.isascii() and layout.isdigit() and int(layout) < LAYOUT:
        return (
            reason,
            f"restart the worker {shard.relay or 'that relays it'}: the next takeover rebuilds the shard "
            "from the journal",
            None,
        )
    # Scripts of this program, the owner's too, do not touch the shard.
    state = ShardKeys(settings.prefix, shard.number).state
    reset = f"redis-cli -u {address('GRAB_REDIS_URL', settings.redis_url)} HSET {state} layout {LAYOUT}"
    return (
        reason,
        f"{reset}   # only if no newer release ever ran here, so that the number was set by hand; otherwise "
        "upgrade this program",
        None,
    )


def without_functions(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Shards whose server does not have the function library of this release."""
    findings = []
    missing = [
        shard.number
        for shard in readings.shards
        if shard.library == MISSING and not shard.fields["plain"] and shard.relay is not None
    ]
    if missing:
        findings.append(
            Finding(
                "stuck",
                f"{shard_list(missing)}: Redis does not have the function library {library().name} of this "
                "release",
                "commands that this release sends there are answered fenced",
                "grabstream init   # a relay of this release loads it too, when it takes the shard over",
            )
        )
    reasons: dict[str, list[int]] = {}
    for shard in readings.shards:
        if shard.fields["plain"] and shard.library:
            reasons.setdefault(shard.fields["plain"], []).append(shard.number)
    findings += [
        Finding(
            "risk",
            f"{shard_list(numbers)}: run plain scripts in place of functions: {quoted(reason)}",
            "every call costs more time of the Redis thread",
            "allow the users of workers and gateways `+fcall +function|load`, or give Redis more memory; the "
            "relays try again every minute",
        )
        for reason, numbers in reasons.items()
    ]
    return findings


def not_relayed(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Shards without a relay, and shards whose relay does not copy events to the journal."""
    findings = []
    without = [shard for shard in readings.shards if shard.relay is None]
    if without:
        waiting = sum(shard.waiting for shard in without)
        decides = all(shard.fields["server_epoch"] == shard.server_epoch for shard in without)
        findings.append(
            Finding(
                "stuck",
                f"{shard_list(shard.number for shard in without)}: no relay"
                + (f"; {counted(waiting, 'events')} not in the journal" if waiting else ""),
                ("" if decides else "a shard that no relay has taken over decides nothing; ")
                + "callers that wait for the journal get no answer; holds and offers do not end",
                "grabstream worker --roles relay,sweep",
                min((shard.oldest_unjournaled_at for shard in without if shard.oldest_unjournaled_at),
                default=None),
            )
        )  # fmt: skip
    late = [
        shard for shard in readings.shards
        if shard.relay and shard.oldest_unjournaled_at
        and readings.time_ms - shard.oldest_unjournaled_at > RELAY_LATE_MS
    ]  # fmt: skip
    if late:
        holders = ", ".join(sorted({str(shard.relay) for shard in late}))
        findings.append(
            Finding(
                "stuck",
                f"{shard_list(shard.number for shard in late)}: the relay ({holders}) has not copied "
                f"{counted(sum(shard.waiting for shard in late), 'events')} to the journal",
                "callers that wait for the journal get no answer",
                "read that worker's log and the findings about Kafka; if neither explains the lag, restart "
                "the worker",
                min(shard.oldest_unjournaled_at or 0 for shard in late),
            )
        )  # fmt: skip
    return findings


def outbox_is_full(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Shards whose outbox is full, so that grabs are answered busy, or nearly full."""
    events_max = settings.outbox_events_max
    fullest = [shard for shard in readings.shards if shard.waiting >= FULL_SHARE * events_max]
    if not fullest:
        return []
    is_full = any(shard.waiting >= events_max for shard in fullest)
    return [
        Finding(
            "stuck" if is_full else "risk",
            f"{shard_list(shard.number for shard in fullest)}: the outbox holds "
            f"{max(shard.waiting for shard in fullest):,} of {events_max:,} events",
            "grabs are answered busy until the relay has caught up" if is_full
            else "grabs will be answered busy when it is full",
            "grabstream worker --roles relay,sweep   # on a machine with free cores; or raise "
            "GRAB_OUTBOX_EVENTS_MAX",
            min((shard.oldest_unjournaled_at for shard in fullest if shard.oldest_unjournaled_at),
            default=None),
        )
    ]  # fmt: skip


def not_swept(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Holds and offers that should have ended long ago."""
    findings = []
    for overdue, means, field, late_ms in (
        (
            "holds have passed their deadline and have not ended",
            "units that were not paid for do not return to their offers",
            "oldest_hold_at",
            HOLD_LATE_MS,
        ),
        (
            "offers are due and were not closed, retired or served from their queue",
            "units and money that no user took do not return to the issuer",
            "oldest_due_at",
            SWEEP_LATE_MS,
        ),
    ):
        late = [
            shard
            for shard in readings.shards
            if (at := getattr(shard, field)) and readings.time_ms - at > late_ms
        ]
        for shards, why, command in (
            (
                [shard for shard in late if shard.relay is None],
                "no worker sweeps",
                "grabstream worker --roles relay,sweep",
            ),
            (
                [shard for shard in late if shard.relay is not None],
                "the sweeper cannot keep up or fails, or the worker has no role `sweep`",
                "grabstream status   # names the shard's worker: read its log; if it only lags, give it or "
                "the shard's Redis another core",
            ),
        ):
            if shards:
                oldest_at = min(getattr(shard, field) for shard in shards)
                what = (
                    f"{shard_list(shard.number for shard in shards)}: {overdue}, the oldest "
                    f"{(readings.time_ms - oldest_at) / 1000:,.1f} s ago: {why}"
                )
                findings.append(Finding("stuck", what, means, command, oldest_at))
    return findings


def other_shards(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """A system that was created with another number of shards."""
    numbers = {shard.fields["shards"] for shard in readings.shards} - {None, str(settings.shards)}
    if not numbers:
        return []
    [number, *_] = sorted(map(str, numbers))
    return [
        Finding(
            "stuck", f"GRAB_SHARDS is {settings.shards}, but this system has "
            f"{counted(int(number), 'shards')}",
            "every command sent with this setting is answered fenced", f"export GRAB_SHARDS={number}",
        )
    ]  # fmt: skip
