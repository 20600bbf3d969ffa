"""Rebuilding a read model: a new version next to the live one, loaded at bulk speed, compared, and shown in
one transaction.

1. Load into tables without most indexes up to the position of the live version; then add sums, constraints
and indexes.
2. Follow with the functions that the workers use.
3. Lock the live version's cursors for a moment, bring the new version to exactly these cursors, and compare
both in one snapshot.
4. Follow to the journal's end; lock the live cursors again, wait until no reader has an older snapshot, and
replace the views.

Cursors and rows are always committed together, so a stopped or killed build resumes where it was.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import AsyncConnection, IsolationLevel, sql

from grabstream.models.journal import Cursor
from grabstream.projections import cursors, versions
from grabstream.projections.account_sums import AccountSums
from grabstream.projections.checking.difference import TableDifference, compare
from grabstream.projections.cursors import Apply, CursorMoved
from grabstream.projections.database.locks import LockTaken, lock_or_raise
from grabstream.projections.database.merging import plan_by_keys
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.definitions import definition_of
from grabstream.projections.read_models import READ_MODELS, Rows
from grabstream.projections.tables import set_aside
from grabstream.projections.tables.set_aside import SetAsideRecord
from grabstream.projections.versions import Version
from grabstream.streams.follower import GROUP_EVENTS_MAX, Chunk, Follower, Group
from grabstream.streams.history.stores import Store
from grabstream.streams.rebuilding.loading import distribute, in_processes
from grabstream.streams.rebuilding.reading import RebuildSource, RebuildStopped, Servers, open_rebuild_source
from grabstream.streams.rebuilding.switching import Busy, Switch, cursors_of

log = logging.getLogger(__name__)

#: What is loaded in one transaction: so many events, or fewer where each has a line of its own.
LOAD_EVENTS: Final = 50_000
LOAD_LINES: Final = 10_000
#: So many events are loaded first, to see how long the others will take.
SAMPLE_EVENTS: Final = 50_000
#: Where loading the others needs less processor time here, processes save no more than their start takes,
#: 0.4 s each.
PROCESSES_SECONDS_MIN: Final = 2.0
#: A build that lags behind the live version by fewer events is finished, and follows from there.
NEAR_EVENTS: Final = 20_000
POLL_SECONDS: Final = 0.05
LOCK_PATIENCE_SECONDS: Final = 2.0


class RebuildProgress(NamedTuple):
    """The progress of a build in a phase: events done of `total`, and events per second."""

    phase: str
    done: int = 0
    total: int = 0
    rate: float = 0.0


ReportRebuild = Callable[[RebuildProgress], None]
#: Called with the name of each step; crash tests end the process there.
CrashStep = Callable[[str], None]


class _ShardGroup(Group):
    """A group of one shard, so that errors name its events."""

    def takes(self, shard: int) -> bool:
        return not self.chunks or shard in self.chunks


class _LoadingGroup(_ShardGroup):
    """A group that keeps rows in place of facts, and adds their transfers to `sums`. Rows are made as soon as
    events are decoded: while these are in the cache of the processor, that takes two thirds of the time.
    """

    def __init__(self, new_rows: Callable[[], Rows], sums: AccountSums | None) -> None:
        super().__init__()
        self.rows = new_rows()
        self._sums = sums

    def add(self, chunk: Chunk) -> None:
        super().add(chunk)
        self.chunks[chunk.shard][-1] = chunk._replace(facts=())
        self.rows.add(chunk.facts)
        if self._sums is not None:
            self._sums.add(fact.transfers for fact in chunk.facts)


class Rebuild:
    """The rebuild of one projection; `open_rebuild` makes it. Only one runs at a time."""

    def __init__(
        self, where: Servers, projection: str, lock_connection: AsyncConnection[Any],
        writer: AsyncConnection[Any],
        report: ReportRebuild = lambda progress: None, step: CrashStep = lambda name: None, jobs: int = 1,
    ) -> None:  # fmt: skip
        self._where = where
        self._projection = projection
        self._model = READ_MODELS[projection]
        #: Reads the live version and locks its cursors. The writer's unqualified names mean the new version.
        self._lock_connection = lock_connection
        self._writer = writer
        self._report = report
        self._step = step
        self._jobs = jobs
        self._cursors: dict[int, Cursor] = {}
        #: The sums of what was loaded, while this process has loaded all of it.
        self._sums: AccountSums | None = None

    # -- building --------------------------------------------------------------------------------------------

    async def live(self) -> Version:
        """The live version; raises RebuildStopped if there is none."""
        version = await versions.in_state(self._lock_connection, self._where.schema, self._projection, "live")
        if version is None:
            raise RebuildStopped(
                f"{self._projection} has no live version in schema {self._where.schema}: run `grabstream "
                "init`"
            )
        return version

    async def is_lost(self, version: Version) -> bool:
        """Whether the tables of a version are gone."""
        return bool(await versions.lost(self._lock_connection, [version]))

    async def begun(self, source: str, skips_set_aside: bool) -> Version | None:
        """An unfinished build that can be resumed: of this code's definition, from the same source."""
        version = await versions.in_state(
            self._lock_connection, self._where.schema, self._projection, "building"
        )
        wanted = (definition_of(self._projection).number, source, skips_set_aside)
        if (
            version is None
            or (version.definition, version.source, version.skips_set_aside) != wanted
            or await self.is_lost(version)
        ):
            return None
        return version

    async def in_state(self, state: str) -> Version:
        """The version in a state, `building` or `previous`; raises RebuildStopped if there is none."""
        version = await versions.in_state(self._lock_connection, self._where.schema, self._projection, state)
        if version is None:
            words = "previous version to return to" if state == "previous" else "unfinished build"
            raise RebuildStopped(f"{self._projection} has no {words}")
        return version

    async def set_aside(self) -> list[SetAsideRecord]:
        """The records that were set aside for the live version."""
        return await set_aside.load(self._lock_connection, self._projection)

    async def events(self) -> int:
        """The number of events of the live version, over all shards."""
        return sum(cursor.seq for cursor in (await self._cursors_of(await self.live())).values())

    async def build(self, source: RebuildSource) -> Version:
        """Builds a new version, or resumes a build, until it is complete and close to the live one; returns
        it.
        """
        await versions.sweep(self._lock_connection, self._where.schema, self._projection)
        skips = source.skips_set_aside
        building = await self.begun(source.name, skips) or await self._begin(source.name, skips)
        await self._use(building)
        try:
            if building.phase == "loading":
                await self._load(source, self._live_cursors)
                building = await self._finish(building)
            await self._catch_up(source, await self._live_cursors())
        except RebuildStopped as error:
            lacking = 0 if skips else len(await self.set_aside())
            if not lacking:
                raise
            records = (
                "1 record was set aside that is"
                if lacking == 1
                else f"{lacking} records were set aside that are"
            )
            raise RebuildStopped(
                f"{error}. For the live version, {records} read again now: --skip-set-aside skips them"
            ) from None
        return building

    async def rebuild_lost(self, source: RebuildSource, patience_seconds: float) -> Version:
        """Builds a new version up to the source's end and shows it, if the live version's tables are gone."""
        await versions.sweep(self._lock_connection, self._where.schema, self._projection)
        building = await self.begun(source.name, source.skips_set_aside) or await self._begin(
            source.name, source.skips_set_aside
        )
        await self._use(building)

        async def ends() -> dict[int, Cursor]:
            ends_of_source = {shard: await source.end(shard) for shard in range(self._where.shards)}
            if None in ends_of_source.values():
                # The audit trail has no offsets; it ends at the cursors of its read model.
                trail = await versions.in_state(self._lock_connection, self._where.schema, "audit", "live")
                assert trail is not None
                return await self._cursors_of(trail)
            return {shard: end for shard, end in ends_of_source.items() if end is not None}

        if building.phase == "loading":
            await self._load(source, ends)
            building = await self._finish(building)

        async def near() -> None:
            await self._catch_up(source, await ends())

        async def reach(locked_cursors: Mapping[int, Cursor]) -> None:
            """Does nothing: no worker writes the live version."""

        await Switch(
            self._lock_connection, self._where.schema, None, building, near, reach, False, self._wait
        ).run(patience_seconds)
        return building._replace(state="live", phase="agreed")

    async def _live_cursors(self) -> dict[int, Cursor]:
        return await self._cursors_of(await self.live())

    async def _begin(self, source: str, skips_set_aside: bool) -> Version:
        stale = await versions.in_state(
            self._lock_connection, self._where.schema, self._projection, "building"
        )
        if stale is not None:
            log.warning(
                "%s was begun with another definition, from another source, with another --skip-set-aside, "
                "or its tables are gone: starting again",
                stale.schema,
            )
            await versions.discard(self._lock_connection, self._where.schema, stale)
        async with self._writer.transaction():
            return await versions.create(
                self._writer,
                self._where.schema,
                self._projection,
                self._where.shards,
                source,
                skips_set_aside,
            )

    async def _use(self, version: Version) -> None:
        await versions.use_version(self._writer, self._where.schema, version)
        self._cursors = await cursors.load(self._writer, self._projection)

    async def _load(
        self, source: RebuildSource, targets_now: Callable[[], Awaitable[dict[int, Cursor]]]
    ) -> None:
        is_begun = any(cursor.seq for cursor in self._cursors.values())
        self._sums = AccountSums() if self._model.finish_here and not is_begun else None
        while True:
            targets = await targets_now()
            if self._jobs > 1:
                began, before = time.process_time(), sum(self._events_to(targets).values())
                await self._load_here(source, targets, SAMPLE_EVENTS)
                seconds, work = time.process_time() - began, self._events_to(targets)
                left = sum(work.values())
                if left and seconds / (before - left) * left > PROCESSES_SECONDS_MIN:
                    await self._load_in_processes(source, targets, distribute(work, self._jobs))
            await self._load_here(source, targets)
            if sum(self._events_to(await targets_now()).values()) < NEAR_EVENTS:
                return

    def _events_to(self, targets: Mapping[int, Cursor]) -> dict[int, int]:
        """By shard: the number of events to its target, without shards that are there."""
        return {
            shard: target.seq - self._cursors[shard].seq
            for shard, target in targets.items()
            if target.seq > self._cursors[shard].seq
        }

    async def _load_here(
        self, source: RebuildSource, targets: Mapping[int, Cursor], events_max: float = math.inf
    ) -> None:
        new_group = partial(_LoadingGroup, self._model.rows, self._sums) if self._model.rows else _ShardGroup
        load = self._model.load
        await self._carry(source, targets, load, LOAD_EVENTS, "loading", events_max, new_group=new_group)

    async def _load_in_processes(
        self, source: RebuildSource, targets: Mapping[int, Cursor], shard_groups: list[list[int]]
    ) -> None:
        began, total = time.monotonic(), sum(target.seq for target in targets.values())
        first = sum(cursor.seq for cursor in self._cursors.values())
        self._sums = None

        async def update_progress() -> None:
            self._cursors = await cursors.load(self._writer, self._projection)
            done = sum(cursor.seq for cursor in self._cursors.values())
            self._report(
                RebuildProgress(
                    "loading", done, max(total, done), (done - first) / (time.monotonic() - began)
                )
            )

        try:
            await in_processes(
                load_some_shards,
                (self._where, self._projection, source.name, source.skips_set_aside, source.archive),
                targets,
                shard_groups,
                update_progress,
            )
        finally:
            self._cursors = await cursors.load(self._writer, self._projection)

    async def load_shards(self, source: RebuildSource, targets: Mapping[int, Cursor]) -> None:
        """Loads some shards into the version that is being built; one of several processes calls this."""
        building = await self.begun(source.name, source.skips_set_aside)
        if building is None:
            raise RebuildStopped(f"no version of {self._projection} is being built")
        await self._use(building)
        await self._load_here(source, targets)

    async def _finish(self, building: Version) -> Version:
        done = sum(cursor.seq for cursor in self._cursors.values())
        self._report(RebuildProgress("sums, constraints and indexes", done, done))
        try:
            async with self._writer.transaction():
                await self._writer.execute("SET LOCAL maintenance_work_mem = '256MB'")
                await self._writer.execute("SET LOCAL work_mem = '256MB'")
                # PostgreSQL cannot know how many accounts there are, and would hash them.
                await self._writer.execute("SET LOCAL enable_hashagg = off")
                await versions.complete(self._writer, self._projection, self._write_sums)
                building = await versions.set_phase(self._writer, self._where.schema, building, "following")
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            raise RebuildStopped(
                f"PostgreSQL refuses the rows that were loaded into {building.schema}: {error}"
            ) from None
        self._step("rebuild.finished")
        await self._analyze(building)
        return building

    async def _write_sums(self, connection: AsyncConnection[Any]) -> None:
        if self._model.finish_here:
            sums, self._sums = self._sums, None
            await self._model.finish_here(connection, sums)
        else:
            await self._model.finish(connection)

    async def _analyze(self, building: Version) -> None:
        """Collects the statistics of the tables, by two sessions."""
        tables = iter(definition_of(self._projection).tables)

        async def analyze(connection: AsyncConnection[Any]) -> None:
            for table in tables:
                await connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(building.schema, table)))

        async with asyncio.TaskGroup() as group:
            group.create_task(analyze(self._writer))
            group.create_task(analyze(self._lock_connection))

    async def _catch_up(
        self, source: RebuildSource, targets: Mapping[int, Cursor], frozen: bool = False
    ) -> None:
        await self._carry(source, targets, self._model.apply, GROUP_EVENTS_MAX, "following", frozen=frozen)

    async def _carry(
        self,
        source: RebuildSource,
        targets: Mapping[int, Cursor],
        apply: Apply,
        group_events: int,
        phase: str,
        events_max: float = math.inf,
        frozen: bool = False,
        new_group: Callable[[], Group] = _ShardGroup,
    ) -> None:
        """Brings every shard from its cursor to its target, one group per transaction, until `events_max` or
        somewhat more events are written.
        """
        began, done = time.monotonic(), sum(cursor.seq for cursor in self._cursors.values())
        first, total = done, max(sum(target.seq for target in targets.values()), done)
        skipped = await source.set_aside()

        async def save(group: Group) -> None:
            nonlocal done
            await self._write(group, apply, frozen, skipped)
            done += group.seqs
            rate = (done - first) / max(time.monotonic() - began, 1e-6)
            self._report(RebuildProgress(phase, done, max(total, done), rate))

        async def chunks() -> AsyncGenerator[Chunk, None]:
            for shard, target in targets.items():
                cursor = self._cursors[shard]
                if cursor.next_offset < target.next_offset or cursor.seq < target.seq:
                    async with aclosing(source.chunks(shard, cursor, target, skipped)) as of_shard:
                        async for chunk in of_shard:
                            yield chunk
                            # Rows of the group before go on to PostgreSQL between two records, not between
                            # two answers of Kafka, which have many.
                            await asyncio.sleep(0)

        await Follower(save, group_events, LOAD_LINES, new_group).follow(chunks(), events_max)

    async def _write(
        self, group: Group, apply: Apply, frozen: bool, skipped: Sequence[SetAsideRecord]
    ) -> None:
        [(shard, (_, after))] = group.moves.items()
        before = self._cursors[shard]
        moves = {shard: (before, after)}
        try:
            async with self._writer.transaction():
                if apply is self._model.apply:
                    await plan_by_keys(self._writer, local=True)
                if isinstance(group, _LoadingGroup):
                    await cursors.advance(self._writer, self._projection, moves, frozen)
                    await group.rows.copy(self._writer)
                else:
                    await cursors.write(self._writer, self._projection, moves, group.facts, apply, frozen)
                if passed := _between(skipped, shard, before, after):
                    await set_aside.carry_over(self._writer, passed)
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            raise RebuildStopped(
                f"shard {shard}, seq {before.seq + 1} to {after.seq}: PostgreSQL refuses its events: {error}"
            ) from None
        self._cursors[shard] = after
        self._step("rebuild.committed")

    # -- aligning and comparing ------------------------------------------------------------------------------

    async def _cursors_of(self, version: Version, lock: bool = False) -> dict[int, Cursor]:
        return await cursors_of(self._lock_connection, version, lock)

    async def difference(self, source: RebuildSource, building: Version) -> list[TableDifference]:
        """Compares both versions at the same cursors. The live version is locked only while the new one
        catches up, not during the comparison.
        """
        live = await self.live()
        await self._catch_up(source, await self._cursors_of(live))
        async with await connect(self._where.postgres, self._where.schema, autocommit=False) as snapshot:
            await snapshot.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            async with self._lock_connection.transaction():
                locked_cursors = await self._cursors_of(live, lock=True)
                await self._catch_up(source, locked_cursors)
                _require_same(self._projection, locked_cursors, self._cursors)
                # The first statement takes the snapshot in which all others read.
                await snapshot.execute("SELECT 1")
            self._report(RebuildProgress("comparing"))
            return await compare(snapshot, definition_of(self._projection), live, building)

    # -- showing ---------------------------------------------------------------------------------------------

    async def agree(self, building: Version) -> Version:
        """Records that the differences are accepted: an interrupted switch need not compare again."""
        return await versions.set_phase(self._lock_connection, self._where.schema, building, "agreed")

    async def switch(
        self, source: RebuildSource, building: Version, keep: bool, patience_seconds: float
    ) -> Version:
        """Shows the new version in one transaction; returns the one that was live. Raises RebuildStopped if
        readers keep the views locked.
        """
        live = await self.live()

        async def near() -> None:
            # A version that lags behind the live one must not be shown, or readers would go back; one ahead
            # may.
            await self._catch_up(source, await self._cursors_of(live))
            ends = {shard: await source.end(shard) for shard in self._cursors}
            await self._catch_up(source, {shard: end for shard, end in ends.items() if end is not None})

        async def reach(locked_cursors: Mapping[int, Cursor]) -> None:
            await self._catch_up(source, locked_cursors)

        await Switch(
            self._lock_connection, self._where.schema, live, building, near, reach, keep, self._wait
        ).run(patience_seconds)
        return live

    async def undo(
        self, source: RebuildSource, accept: bool, patience_seconds: float
    ) -> tuple[Version, Version]:
        """Shows the previous version again; returns the version that was live, and the one that is. Raises
        RebuildStopped if readers would go back in time.
        """
        live, previous = await self.live(), await self.in_state("previous")
        for version in (live, previous):
            if await self.is_lost(version):
                raise RebuildStopped(
                    f"the tables in schema {version.schema} are gone: run `grabstream rebuild "
                    f"{self._projection}`"
                )
        await self._use(previous)
        ours = previous.definition == definition_of(self._projection).number
        # A version of the same definition is frozen since it was replaced. One of another definition is kept
        # current by workers that have its code.
        frozen = ours and previous.definition == live.definition

        async def catch_up(targets: Mapping[int, Cursor]) -> None:
            self._cursors = await cursors.load(self._writer, self._projection)
            try:
                if ours:
                    await self._catch_up(source, targets, frozen)
            except CursorMoved as moved:
                raise Busy(f"a worker keeps it current at the same time ({moved})") from None

        async def near() -> None:
            await catch_up(await self._cursors_of(live))

        async def reach(locked_cursors: Mapping[int, Cursor]) -> None:
            await catch_up(locked_cursors)
            self._cursors = await cursors.load(self._writer, self._projection)
            lagging = [
                f"shard {shard}: seq {self._cursors[shard].seq} of {locked_cursors[shard].seq}"
                for shard in locked_cursors
                if self._cursors[shard].seq < locked_cursors[shard].seq
            ]
            if lagging and not accept:
                raise Busy(
                    f"{previous.schema} lags behind the live version ({'; '.join(lagging[:3])}), and readers "
                    "would go back in time: "
                    f"run workers of the release that has definition {previous.definition}, or --accept"
                )

        await Switch(
            self._lock_connection, self._where.schema, live, previous, near, reach, True, self._wait
        ).run(patience_seconds)
        return live._replace(state="previous"), previous._replace(state="live")

    def _wait(self, reason: str) -> None:
        self._report(RebuildProgress(f"waiting to switch: {reason}"))

    # -- dropping --------------------------------------------------------------------------------------------

    async def drop(self, state: str) -> Version | None:
        """Drops the version in a state, `building` or `previous`; returns it, None if there was none."""
        version = await versions.in_state(self._lock_connection, self._where.schema, self._projection, state)
        if version is not None:
            await versions.discard(self._lock_connection, self._where.schema, version)
        return version


def _between(
    records: Sequence[SetAsideRecord], shard: int, before: Cursor, after: Cursor
) -> list[SetAsideRecord]:
    """The set-aside records between two cursors of a shard."""
    return [
        record
        for record in records
        if record.shard == shard
        and (
            before.seq < record.first_seq <= after.seq
            if record.event_count
            else before.next_offset <= record.journal_offset < after.next_offset
        )
    ]


def _require_same(projection: str, live: Mapping[int, Cursor], new: Mapping[int, Cursor]) -> None:
    for shard, cursor in live.items():
        if new[shard].seq > cursor.seq:
            # A switch that was interrupted had brought the new version to the journal's end.
            raise RebuildStopped(
                f"{projection}, shard {shard}: the new version is ahead, at {_cursor_text(new[shard])}; the "
                f"live one is at {_cursor_text(cursor)}: wait until workers have caught up, or run "
                f"`grabstream rebuild switch {projection}`"
            )
        if new[shard] != cursor:
            raise RebuildStopped(
                f"{projection}, shard {shard}: the live version is at {_cursor_text(cursor)}, the new one "
                f"reached {_cursor_text(new[shard])}: "
                "they are of different histories; `grabstream verify` shows which one the journal has"
            )


def _cursor_text(cursor: Cursor) -> str:
    return f"seq {cursor.seq}, hash {cursor.head.hex()[:12]}…, offset {cursor.next_offset}"


async def load_some_shards(
    where: Servers, projection: str, source_name: str, skips_set_aside: bool, archive: Store | None,
    targets: Mapping[int, Cursor], step: CrashStep
) -> None:  # fmt: skip
    """Loads some shards in a separate process, for a rebuild that another process controls and reports."""
    skips_for = projection if skips_set_aside else None
    async with (
        _connections(where) as (lock_connection, writer),
        open_rebuild_source(source_name, where, skips_for, archive) as source,
    ):
        await Rebuild(where, projection, lock_connection, writer, step=step).load_shards(source, targets)


@asynccontextmanager
async def _connections(where: Servers) -> AsyncIterator[tuple[AsyncConnection[Any], AsyncConnection[Any]]]:
    async with (
        await connect(where.postgres, where.schema) as lock_connection,
        await connect(where.postgres, where.schema) as writer,
    ):
        await use_schema(lock_connection, where.schema)
        await use_schema(writer, where.schema)
        # If PostgreSQL loses a commit in a crash, it loses the cursor as well.
        await writer.execute("SET synchronous_commit = off")
        yield lock_connection, writer


@asynccontextmanager
async def open_rebuild(
    where: Servers,
    projection: str,
    report: ReportRebuild = lambda progress: None,
    step: CrashStep = lambda name: None,
    jobs: int = 1,
) -> AsyncIterator[Rebuild]:
    """A rebuild with its connections, loading in `jobs` processes; raises RebuildStopped if another rebuild
    of the projection runs.
    """
    async with _connections(where) as (lock_connection, writer):
        await hold_projection(lock_connection, where.schema, projection, f"rebuild of {projection}")
        try:
            yield Rebuild(where, projection, lock_connection, writer, report, step, jobs)
        except CursorMoved as moved:
            raise RebuildStopped(f"{moved}: another process wrote it; the same command resumes") from None


async def hold_projection(connection: AsyncConnection[Any], schema: str, projection: str, work: str) -> None:
    """Locks a projection until the connection ends, so that no other process makes, shows or drops versions
    of it; raises RebuildStopped.
    """
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            # The session holds the lock, so it is released when the process ends, however it ends.
            return await lock_or_raise(connection, f"grabstream-rebuild-{schema}-{projection}", work)
        except LockTaken as held:
            if time.monotonic() > deadline:
                raise RebuildStopped(f"another rebuild of {projection} is running: {held}") from None
        await asyncio.sleep(POLL_SECONDS)


__all__ = ["Busy", "Rebuild", "RebuildProgress", "RebuildStopped", "Servers", "open_rebuild"]
