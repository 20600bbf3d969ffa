"""The metrics of a worker: the counters of its roles, its shards in Redis, and the books in PostgreSQL."""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from psycopg import AsyncConnection
from psycopg.errors import UndefinedTable

from grabstream.connections.key_files import KeyFiles
from grabstream.connections.opening import checked_database, key_space
from grabstream.connections.redis_servers import ask_each
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.lua.packed_values import first_event_at
from grabstream.metrics.exposition import Exposition, Samples, add_gate, add_readiness
from grabstream.metrics.state import Ask
from grabstream.projections import cursors
from grabstream.projections.checking import verified
from grabstream.projections.tables import set_aside, webhooks
from grabstream.projections.versions import NoReadModel
from grabstream.settings import Settings
from grabstream.streams.clients import TROUBLES
from grabstream.streams.measures import WorkerMeasures

#: Roles whose workers read the books for metrics; other workers need no PostgreSQL.
ROLES_OF_BOOKS: Final = frozenset({"project", "publish", "verify", "webhooks"})
#: Numbers of events of one shard that are remembered, each with its time.
REMEMBERED_MAX: Final = 512


class Since:
    """For how long read models have lacked events, by its readings: when each number of events of a shard was
    first seen.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[float, int]]] = {}

    def note(self, now: float, seqs: Mapping[int, int]) -> None:
        """Notes the number of events of each shard."""
        for shard, seq in seqs.items():
            seen = self._seen.setdefault(shard, deque(maxlen=REMEMBERED_MAX))
            if seen and seen[-1][1] > seq:
                seen.clear()  # decisions were lost
            if not seen or seen[-1][1] < seq:
                seen.append((now, seq))

    def seconds(self, now: float, shard: int, seq: int) -> float:
        """For how long there have been events after `seq`."""
        return next((now - at for at, number in self._seen.get(shard, ()) if number > seq), 0.0)


class WorkerMetrics:
    """Reads the metrics of one worker. `state` returns whether it is ready."""

    def __init__(
        self, settings: Settings, roles: Iterable[str], redis: Any, measures: WorkerMeasures, state: Ask,
        key_files: KeyFiles,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._redis = redis
        self._keys: KeySpace = key_space(settings)
        self._measures = measures
        self._state = state
        self._key_files = key_files
        self._since = Since()
        parts = {"process": self._own, "redis": self._shards}
        if ROLES_OF_BOOKS & set(roles):
            parts["books"] = self._books
        self.exposition = Exposition("worker", parts)

    async def _own(self, samples: Samples) -> None:
        measures = self._measures
        state = await self._state()
        add_readiness(samples, state.is_ready, state.servers)
        samples.set("grabstream_key_files_refused", len(self._key_files.refused))
        add_gate(samples, measures.gate, *measures.gate_load())
        samples.set(
            "grabstream_command_records_waiting", sum(read() for read in measures.records_waiting.values())
        )
        samples.set("grabstream_commands_rejected_total", measures.rejected)
        samples.set("grabstream_shards", self._settings.shards)
        samples.set("grabstream_outbox_events_max", self._settings.outbox_events_max)
        samples.set("grabstream_leases_held", len(measures.leases_held()))
        relayed = measures.shards_relayed()
        samples.set("grabstream_shards_relayed", sum(relayed.values()))
        for shard, is_relayed in relayed.items():
            samples.set("grabstream_shard_relayed", int(is_relayed), shard=shard)
        relay = measures.relay
        samples.set("grabstream_relay_events_total", relay.events)
        samples.set("grabstream_relay_takeovers_total", relay.takeovers)
        samples.histogram("grabstream_relay_cycle_seconds", relay.cycle_seconds)
        for reason, count in relay.ended.items():
            samples.set("grabstream_relay_ended_total", count, reason=reason)
        for kind, count in measures.recoveries.items():
            samples.set("grabstream_recoveries_total", count, kind=kind)
        samples.set("grabstream_lost_decisions_total", measures.lost_decisions)
        for function, count in measures.swept.items():
            samples.set("grabstream_swept_total", count, function=function)
        for name, projection_measures in measures.projections.items():
            samples.set("grabstream_projection_events_total", projection_measures.events, projection=name)
            samples.set("grabstream_projection_failures_total", projection_measures.failures, projection=name)
            samples.set(
                "grabstream_projection_ignored_records_total", projection_measures.ignored, projection=name
            )
            samples.histogram(
                "grabstream_projection_transaction_seconds",
                projection_measures.transaction_seconds,
                projection=name,
            )
        published = measures.projections.get("events")
        for shard, seq in published.seqs.items() if published else ():
            samples.set("grabstream_published_seq", seq, shard=shard)
        troubles = TROUBLES.present()
        samples.set("grabstream_trouble_seconds", troubles[0].seconds if troubles else 0.0)
        for role, count in measures.restarts.items():
            samples.set("grabstream_role_restarts_total", count, role=role)
        for result, count in measures.webhooks.items():
            samples.set("grabstream_webhook_requests_total", count, result=result)

    # -- Redis -----------------------------------------------------------------------------------------------

    async def _shards(self, samples: Samples) -> None:
        """The outboxes, and what is overdue, of the shards whose leases this worker holds."""
        held = self._measures.leases_held()
        if held:
            states = {shard: self._keys.shard(shard).state for shard in held}
            await ask_each(self._redis, states, lambda shard: self._shard(samples, self._keys.shard(shard)))

    async def _shard(self, samples: Samples, keys: ShardKeys) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(keys.state, ["seq", "journaled_seq"])
            pipe.xrange(keys.outbox, count=1)
            pipe.zrange(keys.due, 0, 0, withscores=True)
            pipe.zrange(keys.holds, 0, 0, withscores=True)
            (seq, journaled), entries, *due = await pipe.execute()
        now_ms = time.time() * 1000
        waiting = max(0, int(seq or 0) - int(journaled or 0))
        at = first_event_at(entries) if waiting else None
        overdue_ms = max([0.0, *(now_ms - first[0][1] for first in due if first)])
        samples.set("grabstream_shard_seq", int(seq or 0), shard=keys.shard)
        samples.set("grabstream_outbox_events", waiting, shard=keys.shard)
        samples.set(
            "grabstream_outbox_age_seconds",
            0.0 if at is None else max(0.0, now_ms - at) / 1000,
            shard=keys.shard,
        )
        samples.set("grabstream_overdue_seconds", overdue_ms / 1000, shard=keys.shard)

    async def _seqs(self) -> dict[int, int]:
        """The number of events of every shard."""
        states = {number: self._keys.shard(number).state for number in range(self._settings.shards)}
        found = await ask_each(self._redis, states, lambda number: self._redis.hget(states[number], "seq"))
        return {number: int(seq or 0) for number, seq in found.items()}

    # -- PostgreSQL ------------------------------------------------------------------------------------------

    async def _books(self, samples: Samples) -> None:
        """The positions of the read models, and their faults."""
        async with checked_database(self._settings) as connection:
            try:
                rows = await connection.execute("SELECT projection, shard, seq FROM cursors")
                positions = await rows.fetchall()
                progress = await verified.progress(connection)
                await self._faults(samples, connection)
            except (UndefinedTable, NoReadModel) as error:
                # A system that is being made or restored.
                raise OSError(f"PostgreSQL: {str(error).strip()}") from None
            await _sizes(samples, connection, self._settings.schema_)
        # Read after the cursors, so that no read model is ahead.
        seqs, now = await self._seqs(), time.monotonic()
        self._since.note(now, seqs)
        self._lags(samples, positions, seqs, now)
        proved = {shard: shard_progress.seq for shard, shard_progress in progress.items()}
        samples.set(
            "grabstream_verified_lag_events",
            sum(max(0, seq - proved.get(shard, 0)) for shard, seq in seqs.items()),
        )
        compared = [
            shard_progress.compared_at for shard_progress in progress.values() if shard_progress.compared_at
        ]
        if compared:
            age = datetime.now(UTC) - min(compared)
            samples.set("grabstream_verified_age_seconds", max(0.0, age.total_seconds()))

    def _lags(
        self, samples: Samples, positions: Sequence[tuple[str, int, int]], seqs: Mapping[int, int], now: float
    ) -> None:
        events: dict[str, int] = {}
        seconds: dict[str, float] = {}
        for name, shard, seq in positions:
            lag = max(0, seqs.get(shard, seq) - seq)
            events[name] = events.get(name, 0) + lag
            age = self._since.seconds(now, shard, seq) if lag else 0.0
            seconds[name] = max(seconds.get(name, 0.0), age)
        for name in events:
            samples.set("grabstream_read_model_lag_events", events[name], read_model=name)
            samples.set("grabstream_read_model_lag_seconds", seconds[name], read_model=name)
            samples.values["grabstream_stopped_shards"].setdefault((name,), 0)

    async def _faults(self, samples: Samples, connection: AsyncConnection[Any]) -> None:
        stopped: dict[str, int] = {}
        for stop in await cursors.stops(connection):
            stopped[stop.projection] = stopped.get(stop.projection, 0) + 1
        for name, count in stopped.items():
            samples.set("grabstream_stopped_shards", count, read_model=name)
        samples.set("grabstream_findings", len(await verified.open_findings(connection)))
        samples.set("grabstream_set_aside_records", len(await set_aside.load(connection)))
        for state in ("waiting", "parked"):
            backlogs = await webhooks.backlogs(connection, state)
            samples.set("grabstream_webhook_events", sum(backlogs.values()), state=state)


async def _sizes(samples: Samples, connection: AsyncConnection[Any], schema: str) -> None:
    """The sizes of the tables of a system: of its schema, and of all versions of its read models."""
    rows = await connection.execute(
        "SELECT c.relname, sum(pg_total_relation_size(c.oid))::bigint FROM pg_class AS c "
        "JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.relkind = 'r' AND (n.nspname = %s "
        "OR n.nspname IN (SELECT schema FROM read_models)) GROUP BY c.relname",
        (schema,),
    )
    for table, size in await rows.fetchall():
        samples.set("grabstream_table_bytes", int(size), table=table)
