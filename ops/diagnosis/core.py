"""What Redis says: may it forget, are its shards deciding, relayed, swept, and is there room in their
outboxes.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from grabstream.lua.keys import LAYOUT, SHARD_FIELDS, KeySpace, ShardKeys
from grabstream.lua.server import server_epoch_of
from grabstream.lua.trouble import is_trouble
from grabstream.models.bounds import quoted
from grabstream.ops.connections.redis_servers import ANSWER_SECONDS_MAX, masters, of_each, within
from grabstream.ops.diagnosis.findings import RESTORE, Finding, address, of_shards
from grabstream.ops.settings import Settings
from grabstream.streams.relaying.takeover import CANNOT_BE_MADE, JOURNAL_LOST

#: An event that has waited so long for the journal is not on its way any more.
RELAY_LATE_MS: Final = 10_000
#: The sweeper comes by four times a second, and never leaves holds for anything else; offers may have to wait
#: for others.
HOLD_LATE_MS: Final = 1_000
SWEEP_LATE_MS: Final = 10_000
FULL_SHARE: Final = 0.8
MEMORY_FULL_SHARE: Final = 0.9

_number = re.compile(r"\d+")
_event_at = re.compile(rb'"at":(\d+)').search


class ShardReadings(NamedTuple):
    """A shard as Redis has it, and the life of the server it is on; times in ms since 1970 UTC, None where
    there is nothing of the kind.
    """

    number: int
    server_epoch: str
    fields: dict[str, str | None]
    relay: str | None
    oldest_unjournaled_at: int | None
    oldest_due_at: int | None
    oldest_hold_at: int | None

    @property
    def waiting(self) -> int:
        """Events decided and not yet in the journal."""
        return int(self.fields["seq"] or 0) - int(self.fields["journaled_seq"] or 0)


class ServerReadings(NamedTuple):
    """A server that decides; `name` in words. `clock_ahead_ms`: its clock against this machine's."""

    name: str
    info: dict[str, Any]
    config: dict[str, str]
    time_ms: int
    clock_ahead_ms: int

    @property
    def server_epoch(self) -> str:
        """The server's life."""
        return str(self.info["run_id"]) + str(self.info["master_replid"])

    @property
    def started_at(self) -> int:
        """When the server started, ms since 1970 UTC."""
        return self.time_ms - int(self.info["uptime_in_seconds"]) * 1000


class CoreReadings(NamedTuple):
    """The servers (several in a cluster), and the shards on them, as far as they answer; `silent` are
    addresses of servers that do not, `unknown` the shards of which nobody says anything.
    """

    servers: list[ServerReadings]
    shards: list[ShardReadings]
    silent: Sequence[str] = ()
    unknown: Sequence[int] = ()

    @property
    def time_ms(self) -> int:
        """The time there, ms since 1970 UTC."""
        return max(server.time_ms for server in self.servers)

    @property
    def clock_ahead_ms(self) -> int:
        """The clock that is furthest from this machine's, against it."""
        return max((server.clock_ahead_ms for server in self.servers), key=abs)

    def started_at(self, server_epoch: str) -> int:
        """When the server of a life started, ms since 1970 UTC; 0 when it is not there."""
        return next((server.started_at for server in self.servers if server.server_epoch == server_epoch), 0)


async def read_core(redis: Any, keys: KeySpace, clock: Any) -> CoreReadings:
    """Reads everything once; `clock` gives this machine's time in ms. Raises the client's own errors when no
    server answers.
    """
    found = await masters(redis)
    reading = [within(_read_server(server, name, clock)) for name, server in found]
    states = {number: keys.shard(number).state for number in range(keys.shards)}
    # A server that hangs keeps back what is its own, and no more.
    servers, shards = await asyncio.gather(
        asyncio.gather(*reading, return_exceptions=True),
        of_each(redis, states, lambda number: _read_shard(redis, keys.shard(number))),
    )
    answered = [server for server in servers if isinstance(server, ServerReadings)]
    for problem in servers:
        if isinstance(problem, BaseException) and not (answered and is_trouble(problem)):
            raise problem
    silent = [
        name
        for (name, _), server in zip(found, servers, strict=True)
        if not isinstance(server, ServerReadings)
    ]
    return CoreReadings(
        answered, list(shards.values()), silent, [number for number in states if number not in shards]
    )


async def _read_server(redis: Any, address: str, clock: Any) -> ServerReadings:
    info: dict[str, Any] = await redis.info()
    before = clock()
    seconds, microseconds = await redis.time()
    time_ms = int(seconds) * 1000 + int(microseconds) // 1000
    ahead = time_ms - (before + clock()) // 2
    config: dict[str, str] = {}
    for name in ("appendonly", "maxmemory-policy", "dir", "save"):
        found = await redis.config_get(name)
        config.update({_text(key): _text(value) for key, value in found.items()})
    return ServerReadings(f"Redis {address}".strip(), info, config, time_ms, ahead)


async def _read_shard(redis: Any, keys: ShardKeys) -> ShardReadings:
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hmget(keys.state, list(SHARD_FIELDS))
        pipe.get(keys.lease)
        pipe.zrange(keys.due, 0, 0, withscores=True)
        pipe.zrange(keys.holds, 0, 0, withscores=True)
        values, relay, due, holds = await pipe.execute()
    fields = {name: value and _text(value) for name, value in zip(SHARD_FIELDS, values, strict=True)}
    oldest = None
    journaled = int(fields["journaled_seq"] or 0)
    if int(fields["seq"] or 0) > journaled:
        entry = await redis.xrange(keys.outbox, min=f"{journaled + 1}-0", count=1) or await redis.xrange(
            keys.outbox, count=1
        )
        found = _event_at(next(iter(entry[0][1].values()))) if entry else None
        oldest = int(found.group(1)) if found else None
    first_due, first_hold = (int(found[0][1]) if found else None for found in (due, holds))
    server_epoch = await server_epoch_of(redis, keys.state)
    return ShardReadings(
        keys.shard, server_epoch, fields, relay and _text(relay), oldest, first_due, first_hold
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# -- checks --------------------------------------------------------------------------------------------------


def may_evict(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """A core that forgets by itself."""
    return [
        Finding(
            "stuck", f"{server.name} may evict keys: its maxmemory-policy is "
                     f"{server.config['maxmemory-policy']}",
            "what was decided can vanish without a word; workers and gates refuse to start on it",
            f"{_cli(server, settings)} CONFIG SET maxmemory-policy noeviction",
        )
        for server in readings.servers
        if server.config["maxmemory-policy"] != "noeviction"
    ]  # fmt: skip


def _cli(server: ServerReadings, settings: Settings) -> str:
    """How a command is given to a server by hand."""
    host, _, port = server.name.removeprefix("Redis").strip().rpartition(":")
    return (
        f"redis-cli -h {host} -p {port}"
        if port
        else f"redis-cli -u {address('GRAB_REDIS_URL', settings.redis_url)}"
    )


def may_lose(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """A core that keeps nothing on its disk, or cannot."""
    found = []
    for server in readings.servers:
        if server.config["appendonly"] != "yes":
            found.append(
                Finding(
                    "risk", f"{server.name} writes no append-only file: appendonly is off",
                    "a restart loses every answer that was not journaled, and recovery has all the rest to "
                    "rebuild",
                    f"{_cli(server, settings)} CONFIG SET appendonly yes",
                )
            )  # fmt: skip
        elif server.info.get("aof_last_write_status") != "ok":
            found.append(
                Finding(
                    "stuck",
                    f"{server.name} cannot write its append-only file (aof_last_write_status is not "
                    "ok)",
                    "it refuses to decide until it can: grabs are answered busy",
                    f"df -h {server.config['dir']}   # make room, or mend the disk",
                )
            )  # fmt: skip
    return found


def memory_is_short(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Little of maxmemory is left."""
    found = []
    for server in readings.servers:
        used, most = int(server.info["used_memory"]), int(server.info["maxmemory"])
        if most and used >= MEMORY_FULL_SHARE * most:
            found.append(
                Finding(
                    "stuck" if used >= most else "risk",
                    f"{server.name} uses {used / 2**20:,.0f} of "
                    f"{most / 2**20:,.0f} MiB",
                    "when it is full, grabs and new offers are answered busy; what ends holds and offers "
                    "goes on",
                    f"{_cli(server, settings)} CONFIG SET maxmemory {2 * most}   # or close and retire "
                    "offers",
                )
            )  # fmt: skip
    return found


def silent(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Servers of the cluster that do not answer, and the shards that stand still with them."""
    if not readings.silent and not readings.unknown:
        return []
    shards = f": nothing is known of {of_shards(readings.unknown)}" if readings.unknown else ""
    who = ", ".join(f"Redis {name}" for name in readings.silent) or "Redis"
    return [
        Finding(
            "stuck", f"{who} does not answer within {ANSWER_SECONDS_MAX:.0f} s{shards}",
            "its shards decide nothing until it answers, or until a replica has taken its place; all other "
            "shards go on",
            "; ".join(f"redis-cli -h {name.rpartition(':')[0]} -p {name.rpartition(':')[2]} PING" for name
            in readings.silent)
            or "grabstream status",
        )
    ]  # fmt: skip


def fenced(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Shards that decide nothing; what differs only in its numbers is told once, in the words of its first
    shard.
    """
    alike: dict[tuple[str, str], list[tuple[int, str, int | None]]] = {}
    for shard in readings.shards:
        reason = _why_fenced(readings, shard) or _wrong_layout(shard, settings)
        if reason is not None:
            words, command, since = reason
            alike.setdefault((_number.sub("#", words), command), []).append((shard.number, words, since))
    found = []
    for (_, command), shards in alike.items():
        first, words, _ = shards[0]
        if any(other != words for _, other, _ in shards):
            words = f"in shard {first}, {words} (the others say the same with other numbers)"
        what = f"{of_shards(number for number, _, _ in shards)}: fenced: {words}"
        since = min((since for *_, since in shards if since), default=None)
        found.append(
            Finding("stuck", what, "nothing is decided there: grabs are answered fenced", command, since)
        )
    return found


def _why_fenced(readings: CoreReadings, shard: ShardReadings) -> tuple[str, str, int | None] | None:
    """Why a shard is fenced, in words, the way out, and since when (ms since 1970 UTC); None when it is
    not.
    """
    server_epoch, fault = shard.fields["life"], shard.fields["fault"]
    # What was never taken over and has no relay is told below, as such.
    if server_epoch == shard.server_epoch or (server_epoch is None and shard.relay is None):
        return None
    restarted = server_epoch is not None
    since = None
    if restarted or (shard.fields["seq"] and not shard.fields["partial"]):
        # It was not fenced when it decided its last event, nor before this life of the server began. What is
        # being rebuilt has the time of events long past.
        since = max(readings.started_at(shard.server_epoch), int(shard.fields["time"] or 0)) or None
    if (
        restarted
        and shard.relay is not None
        and not fault
        and shard.fields["term"] == shard.fields["history"] is not None
    ):
        # The relay that owns the shard has reconciled it under this term, and nobody has taken it over since.
        fault = (
            f"its server epoch is {quoted(server_epoch)}, the server has another: Redis was restarted a "
            "moment ago, or somebody changed the field by hand"
        )
        return (
            fault,
            f"restart the worker {shard.relay}: whoever takes the shard over compares it with the journal",
            since,
        )
    if restarted and (shard.relay is None or not fault):
        fault = "Redis has started anew or was promoted, and no relay has reconciled the shard since"
    if shard.relay is None:
        command = "grabstream worker --roles relay,sweep"
    elif fault and JOURNAL_LOST in fault:
        command = RESTORE
    elif fault and fault.startswith(CANNOT_BE_MADE):
        command = "grabstream rebuild redis"
    else:
        command = (
            "nothing: its relay is at work, the shard mends itself   # if it does not: that worker's "
            "log says what stands in the way"
        )
    return fault or "its relay has not taken it over yet", command, since


def _wrong_layout(shard: ShardReadings, settings: Settings) -> tuple[str, str, int | None] | None:
    """The same for a shard whose keys name another layout than the scripts write."""
    layout = shard.fields["layout"] or ("1" if shard.fields["seq"] else str(LAYOUT))
    if shard.fields["life"] is None or layout == str(LAYOUT):
        return None
    words = f"it says that its keys have layout {quoted(layout)}, this program writes {LAYOUT}"
    if layout.isascii() and layout.isdigit() and int(layout) < LAYOUT:
        return (
            words,
            f"restart the worker {shard.relay or 'that relays it'}: whoever takes the shard over rebuilds it "
            "from the journal",
            None,
        )
    # Scripts of this program leave it alone, the owner's too.
    state = ShardKeys(settings.prefix, shard.number).state
    back = f"redis-cli -u {address('GRAB_REDIS_URL', settings.redis_url)} HSET {state} layout {LAYOUT}"
    return (
        words,
        f"{back}   # if no newer program was ever started here, the number was set by hand; else upgrade "
        "this one",
        None,
    )


def not_relayed(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Shards without a relay, and shards whose relay does not get on."""
    found = []
    without = [shard for shard in readings.shards if shard.relay is None]
    if without:
        waiting = sum(shard.waiting for shard in without)
        decides = all(shard.fields["life"] == shard.server_epoch for shard in without)
        found.append(
            Finding(
                "stuck",
                f"{of_shards(shard.number for shard in without)}: no relay; {waiting:,} events wait "
                "for the journal",
                ("" if decides else "nothing is decided where none has come yet, ")
                + "answers that wait for the journal do not come, holds and offers do not end",
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
        found.append(
            Finding(
                "stuck", f"{of_shards(shard.number for shard in late)}: the relay ({holders}) does not bring "
                f"{sum(shard.waiting for shard in late):,} events to the journal",
                "answers that wait for the journal do not come",
                "restart that worker; its log says what stands in the way (is Kafka there? see the other "
                "findings)",
                min(shard.oldest_unjournaled_at or 0 for shard in late),
            )
        )  # fmt: skip
    return found


def outbox_is_full(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Shards that are near the bound at which grabs are answered busy, or beyond it."""
    most = settings.outbox_events_max
    full = [shard for shard in readings.shards if shard.waiting >= FULL_SHARE * most]
    if not full:
        return []
    beyond = any(shard.waiting >= most for shard in full)
    return [
        Finding(
            "stuck" if beyond else "risk",
            f"{of_shards(shard.number for shard in full)}: the outbox holds "
            f"{max(shard.waiting for shard in full):,} of {most:,} events",
            "grabs are answered busy until the relay has caught up" if beyond
            else "grabs will be answered busy when it is full",
            "grabstream worker --roles relay,sweep   # with more cores, or a greater GRAB_OUTBOX_EVENTS_MAX",
            min((shard.oldest_unjournaled_at for shard in full if shard.oldest_unjournaled_at), default=None),
        )
    ]  # fmt: skip


def not_swept(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """Holds and offers whose time is long over."""
    found = []
    for words, means, name, late_ms in (
        (
            "holds that are over have not ended",
            "units nobody pays for are not given back",
            "oldest_hold_at",
            HOLD_LATE_MS,
        ),
        (
            "offers that are due were not closed, served on or retired",
            "what nobody took does not go back",
            "oldest_due_at",
            SWEEP_LATE_MS,
        ),
    ):
        late = [
            (shard, readings.time_ms - at)
            for shard in readings.shards
            if (at := getattr(shard, name)) and readings.time_ms - at > late_ms
        ]
        for shards, why, command in (
            (
                [one for one in late if one[0].relay is None],
                "no sweeper comes by",
                "grabstream worker --roles relay,sweep",
            ),
            (
                [one for one in late if one[0].relay is not None],
                "the sweeper beside its relay has more to do than it can, or its log names what it cannot "
                "handle (or nobody was given the "
                "role `sweep`)",
                "grabstream status   # which worker has the shard: read its log; give it a core, or the "
                "shard's Redis",
            ),
        ):
            if shards:
                how_late = ", ".join(f"{late_ms / 1000:,.1f} s" for _, late_ms in shards)
                what = (
                    f"{of_shards(shard.number for shard, _ in shards)}: {words}, the oldest is {how_late} "
                    f"late: {why}"
                )
                found.append(
                    Finding("stuck", what, means, command, min(getattr(shard, name) for shard, _ in shards))
                )
    return found


def other_shards(readings: CoreReadings, settings: Settings) -> list[Finding]:
    """A system that was made with another number of shards."""
    numbers = {shard.fields["shards"] for shard in readings.shards} - {None, str(settings.shards)}
    if not numbers:
        return []
    [number, *_] = sorted(map(str, numbers))
    return [
        Finding(
            "stuck", f"GRAB_SHARDS is {settings.shards}, but this system has {number} shards",
            "every command from here is refused as fenced", f"export GRAB_SHARDS={number}",
        )
    ]  # fmt: skip
