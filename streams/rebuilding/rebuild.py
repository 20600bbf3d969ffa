"""Rebuilding a read model: a new version beside the live one, loaded at bulk speed, compared, and shown in
one transaction.

1. load into bare tables up to where the live version is, then finish (sums, constraints, indexes) · 2. follow
   with what the workers apply · 3. hold the live version's cursors for a moment, feed the new version up to
   exactly them, and compare both in one snapshot ·
4. follow to the journal's end; hold the live cursors again, wait until no reader has an older snapshot, and
   replace the views. Cursors and rows are committed together throughout, so a build that was stopped, or
   killed, goes on where it was.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import AsyncConnection, IsolationLevel, sql

from grabstream.models.journal import Cursor
from grabstream.projections import cursors, versions
from grabstream.projections.checking.difference import TableDifference, compare
from grabstream.projections.cursors import CursorMoved
from grabstream.projections.database.locks import Held, hold
from grabstream.projections.database.migrate import use_schema
from grabstream.projections.database.sessions import connect
from grabstream.projections.definitions import definition_of
from grabstream.projections.read_models import READ_MODELS, Apply
from grabstream.projections.records import set_aside
from grabstream.projections.records.set_aside import SetAside
from grabstream.projections.versions import Version
from grabstream.streams.history.chunks import Chunk, gathered, read_ahead
from grabstream.streams.rebuilding.loading import deal, in_processes
from grabstream.streams.rebuilding.reading import RebuildRefused, RebuildSource, Servers, open_rebuild_source
from grabstream.streams.rebuilding.switching import Busy, Switch, cursors_of

log = logging.getLogger(__name__)

CHUNK_EVENTS: Final = 10_000
FOLLOW_EVENTS: Final = 2_000
CHUNKS_AHEAD: Final = 1
#: With fewer events to load, starting processes takes longer than loading.
PROCESSES_EVENTS_MIN: Final = 100_000
#: A build whose distance to the live version is below this is finished, and follows from there.
NEAR_EVENTS: Final = 20_000
POLL_SECONDS: Final = 0.05
LOCK_PATIENCE_SECONDS: Final = 2.0


class RebuildProgress(NamedTuple):
    """How far a build is in a step: events done of `total`, and how many a second."""

    step: str
    done: int = 0
    total: int = 0
    rate: float = 0.0

    @property
    def seconds_left(self) -> float | None:
        """At this rate; None when nothing is known yet."""
        return (self.total - self.done) / self.rate if self.rate else None


ReportRebuild = Callable[[RebuildProgress], None]
#: Called with the name of every step that a crash test may want to end the process at.
Step = Callable[[str], None]


class Rebuild:
    """The rebuilding of one projection; `open_rebuild` makes it. Only one at a time does it."""

    def __init__(
        self, where: Servers, projection: str, control: AsyncConnection[Any], writer: AsyncConnection[Any],
        report: ReportRebuild = lambda progress: None, step: Step = lambda name: None, jobs: int = 1,
    ) -> None:  # fmt: skip
        self._where = where
        self._projection = projection
        self._model = READ_MODELS[projection]
        #: reads the live version and holds its cursors; the writer's names are those of the new version
        self._control = control
        self._writer = writer
        self._report = report
        self._step = step
        self._jobs = jobs
        self._own: dict[int, Cursor] = {}

    # -- building --------------------------------------------------------------------------------------------

    async def live(self) -> Version:
        """The version that is shown; raises NoReadModel or Refused when there is none."""
        found = await versions.in_state(self._control, self._where.schema, self._projection, "live")
        if found is None:
            raise RebuildRefused(
                f"{self._projection} has no live version in schema {self._where.schema}: run `grabstream "
                "init`"
            )
        return found

    async def is_lost(self, version: Version) -> bool:
        """Whether the tables of a version are gone."""
        return bool(await versions.lost(self._control, [version]))

    async def begun(self, source: str, keeps_set_aside: bool) -> Version | None:
        """A build that was begun and can go on: of this code's definition, from the same source."""
        found = await versions.in_state(self._control, self._where.schema, self._projection, "building")
        wanted = (definition_of(self._projection).number, source, keeps_set_aside)
        if (
            found is None
            or (found.definition, found.source, found.keeps_set_aside) != wanted
            or await self.is_lost(found)
        ):
            return None
        return found

    async def in_state(self, state: str) -> Version:
        """The version in a state, `building` or `previous`; raises Refused when there is none."""
        found = await versions.in_state(self._control, self._where.schema, self._projection, state)
        if found is None:
            words = "previous version to go back to" if state == "previous" else "version that was begun"
            raise RebuildRefused(f"{self._projection} has no {words}")
        return found

    async def set_aside(self) -> list[SetAside]:
        """What the live version lacks."""
        return await set_aside.load(self._control, self._projection)

    async def events(self) -> int:
        """How many events the live version has, all shards together."""
        return sum(cursor.seq for cursor in (await self._cursors_of(await self.live())).values())

    async def build(self, source: RebuildSource) -> Version:
        """Makes a new version, or goes on with one, until it is complete and near the live one; returns
        it.
        """
        await versions.sweep(self._control, self._where.schema, self._projection)
        keeps = source.skips_set_aside
        building = await self.begun(source.name, keeps) or await self._begin(source.name, keeps)
        await self._use(building)
        try:
            if building.phase == "loading":
                await self._load(source, self._live_cursors)
                building = await self._finish(building)
            await self._follow(source, await self._live_cursors())
        except RebuildRefused as error:
            lacking = 0 if keeps else len(await self.set_aside())
            if not lacking:
                raise
            records = "1 record, which is" if lacking == 1 else f"{lacking} records, which are"
            raise RebuildRefused(
                f"{error}. The live version was let past {records} read again now: --keep-set-aside goes "
                "past them"
            ) from None
        return building

    async def restore(self, source: RebuildSource, patience_seconds: float) -> Version:
        """Makes a new version up to the source's end and shows it, where the live one's tables are gone."""
        await versions.sweep(self._control, self._where.schema, self._projection)
        building = await self.begun(source.name, source.skips_set_aside) or await self._begin(
            source.name, source.skips_set_aside
        )
        await self._use(building)

        async def ends() -> dict[int, Cursor]:
            found = {shard: await source.end(shard) for shard in range(self._where.shards)}
            if None in found.values():
                # The audit trail knows no offsets; it ends where its own cursors are.
                trail = await versions.in_state(self._control, self._where.schema, "audit", "live")
                assert trail is not None
                return await self._cursors_of(trail)
            return {shard: end for shard, end in found.items() if end is not None}

        if building.phase == "loading":
            await self._load(source, ends)
            building = await self._finish(building)

        async def near() -> None:
            await self._follow(source, await ends())

        async def reach(held: Mapping[int, Cursor]) -> None:
            """Nobody writes the live version."""

        await Switch(self._control, self._where.schema, None, building, near, reach, False, self._wait).run(
            patience_seconds
        )
        return building._replace(state="live", phase="agreed")

    async def _live_cursors(self) -> dict[int, Cursor]:
        return await self._cursors_of(await self.live())

    async def _begin(self, source: str, keeps_set_aside: bool) -> Version:
        useless = await versions.in_state(self._control, self._where.schema, self._projection, "building")
        if useless is not None:
            log.warning(
                "%s was begun with another definition, from another source, with another --keep-set-aside, "
                "or is gone: begun anew",
                useless.schema,
            )
            await versions.discard(self._control, self._where.schema, useless)
        async with self._writer.transaction():
            return await versions.create(
                self._writer,
                self._where.schema,
                self._projection,
                self._where.shards,
                source,
                keeps_set_aside,
            )

    async def _use(self, version: Version) -> None:
        await versions.use_version(self._writer, self._where.schema, version)
        self._own = await cursors.load(self._writer, self._projection)

    async def _load(
        self, source: RebuildSource, targets_now: Callable[[], Awaitable[dict[int, Cursor]]]
    ) -> None:
        while True:
            targets = await targets_now()
            work = {
                shard: target.seq - self._own[shard].seq
                for shard, target in targets.items()
                if target.seq > self._own[shard].seq
            }
            if self._jobs > 1 and sum(work.values()) >= PROCESSES_EVENTS_MIN:
                await self._load_in_processes(source, targets, deal(work, self._jobs))
            await self._carry(source, targets, self._model.load, CHUNK_EVENTS, "loading")
            now = await targets_now()
            if sum(now[shard].seq - self._own[shard].seq for shard in now) < NEAR_EVENTS:
                return

    async def _load_in_processes(
        self, source: RebuildSource, targets: Mapping[int, Cursor], hands: list[list[int]]
    ) -> None:
        began, total = time.monotonic(), sum(target.seq for target in targets.values())
        first = sum(cursor.seq for cursor in self._own.values())

        async def look() -> None:
            self._own = await cursors.load(self._writer, self._projection)
            done = sum(cursor.seq for cursor in self._own.values())
            self._report(
                RebuildProgress(
                    "loading", done, max(total, done), (done - first) / (time.monotonic() - began)
                )
            )

        try:
            await in_processes(
                load_part,
                (self._where, self._projection, source.name, source.skips_set_aside),
                targets,
                hands,
                look,
            )
        finally:
            self._own = await cursors.load(self._writer, self._projection)

    async def load_shards(self, source: RebuildSource, targets: Mapping[int, Cursor]) -> None:
        """Loads some shards only, into the version that is being built: what one of several processes
        does.
        """
        building = await self.begun(source.name, source.skips_set_aside)
        if building is None:
            raise RebuildRefused(f"nothing of {self._projection} is being built")
        await self._use(building)
        await self._carry(source, targets, self._model.load, CHUNK_EVENTS, "loading")

    async def _finish(self, building: Version) -> Version:
        done = sum(cursor.seq for cursor in self._own.values())
        self._report(RebuildProgress("sums, constraints and indexes", done, done))
        try:
            async with self._writer.transaction():
                await self._writer.execute("SET LOCAL maintenance_work_mem = '256MB'")
                await self._writer.execute("SET LOCAL work_mem = '256MB'")
                await self._model.finish(self._writer)
                await versions.complete(self._writer, self._projection)
                building = await versions.set_phase(self._writer, self._where.schema, building, "following")
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            raise RebuildRefused(
                f"PostgreSQL refuses what {building.schema} was loaded with: {error}"
            ) from None
        self._step("rebuild.finished")
        for table in definition_of(self._projection).tables:
            await self._writer.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(building.schema, table)))
        return building

    async def _follow(
        self, source: RebuildSource, targets: Mapping[int, Cursor], frozen: bool = False
    ) -> None:
        await self._carry(source, targets, self._model.apply, FOLLOW_EVENTS, "following", frozen)

    async def _carry(
        self,
        source: RebuildSource,
        targets: Mapping[int, Cursor],
        apply: Apply,
        chunk_events: int,
        step: str,
        frozen: bool = False,
    ) -> None:
        """Carries every shard from its own cursor to its target, a chunk a transaction."""
        began, done = time.monotonic(), sum(cursor.seq for cursor in self._own.values())
        total = max(sum(target.seq for target in targets.values()), done)
        first = done
        skipped = await source.set_aside()
        for shard, target in targets.items():
            if self._own[shard].next_offset >= target.next_offset and self._own[shard].seq >= target.seq:
                continue
            chunks = gathered(source.chunks(shard, self._own[shard], target, skipped), chunk_events)
            async with aclosing(read_ahead(chunks, CHUNKS_AHEAD)) as read:
                async for chunk in read:
                    passed = _between(skipped, shard, self._own[shard], chunk.after)
                    await self._write(chunk, apply, frozen, passed)
                    done += len(chunk.facts)
                    self._report(
                        RebuildProgress(
                            step, done, max(total, done), (done - first) / max(time.monotonic() - began, 1e-6)
                        )
                    )

    async def _write(self, chunk: Chunk, apply: Apply, frozen: bool, skipped: Sequence[SetAside]) -> None:
        shard, after = chunk.shard, chunk.after
        try:
            async with self._writer.transaction():
                await cursors.advance(
                    self._writer, self._projection, {shard: (self._own[shard], after)}, frozen
                )
                if skipped:
                    await set_aside.carry_over(self._writer, skipped)
                if chunk.facts:
                    await apply(self._writer, chunk.facts)
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            raise RebuildRefused(
                f"shard {shard}, seq {self._own[shard].seq + 1} to {after.seq}: PostgreSQL refuses its "
                f"events: {error}"
            ) from None
        self._own[shard] = after
        self._step("rebuild.committed")

    # -- aligning and comparing ------------------------------------------------------------------------------

    async def _cursors_of(self, version: Version, lock: bool = False) -> dict[int, Cursor]:
        return await cursors_of(self._control, version, lock)

    async def difference(self, source: RebuildSource, building: Version) -> list[TableDifference]:
        """Compares both versions at the same cursors: the live one stands still for as long as it takes to
        get there, not to compare.
        """
        live = await self.live()
        await self._follow(source, await self._cursors_of(live))
        async with await connect(self._where.postgres, self._where.schema, autocommit=False) as snapshot:
            await snapshot.set_isolation_level(IsolationLevel.REPEATABLE_READ)
            async with self._control.transaction():
                held = await self._cursors_of(live, lock=True)
                await self._follow(source, held)
                _require_same(self._projection, held, self._own)
                # The first statement takes the snapshot that all others read in.
                await snapshot.execute("SELECT 1")
            self._report(RebuildProgress("comparing"))
            return await compare(snapshot, definition_of(self._projection), live, building)

    # -- showing ---------------------------------------------------------------------------------------------

    async def agree(self, building: Version) -> Version:
        """Writes down that the differences are accepted: a switch that is cut off need not compare again."""
        return await versions.set_phase(self._control, self._where.schema, building, "agreed")

    async def switch(
        self, source: RebuildSource, building: Version, keep: bool, patience_seconds: float
    ) -> Version:
        """Shows the new version in one transaction; returns the one that was live. Raises RebuildRefused when
        readers do not let go.
        """
        live = await self.live()

        async def near() -> None:
            # Behind the live version it may not be shown; ahead of it, it may: readers never go back.
            await self._follow(source, await self._cursors_of(live))
            ends = {shard: await source.end(shard) for shard in self._own}
            await self._follow(source, {shard: end for shard, end in ends.items() if end is not None})

        async def reach(held: Mapping[int, Cursor]) -> None:
            await self._follow(source, held)

        await Switch(self._control, self._where.schema, live, building, near, reach, keep, self._wait).run(
            patience_seconds
        )
        return live

    async def undo(
        self, source: RebuildSource, accept: bool, patience_seconds: float
    ) -> tuple[Version, Version]:
        """Shows the previous version again; returns what was live, and what is. Raises Refused when it would
        lead readers back in time.
        """
        live, previous = await self.live(), await self.in_state("previous")
        for one in (live, previous):
            if await self.is_lost(one):
                raise RebuildRefused(
                    f"the tables in schema {one.schema} are gone: `grabstream rebuild {self._projection}`, "
                    "without --undo"
                )
        await self._use(previous)
        ours = previous.definition == definition_of(self._projection).number
        # A version of the same definition stood still, frozen, since it was replaced; another one is kept by
        # workers that have its code.
        frozen = ours and previous.definition == live.definition

        async def follow(targets: Mapping[int, Cursor]) -> None:
            self._own = await cursors.load(self._writer, self._projection)
            try:
                if ours:
                    await self._follow(source, targets, frozen)
            except CursorMoved as moved:
                raise Busy(f"a worker keeps it current at the same time ({moved})") from None

        async def near() -> None:
            await follow(await self._cursors_of(live))

        async def reach(held: Mapping[int, Cursor]) -> None:
            await follow(held)
            self._own = await cursors.load(self._writer, self._projection)
            after = [
                f"shard {shard}: seq {self._own[shard].seq} of {held[shard].seq}"
                for shard in held
                if self._own[shard].seq < held[shard].seq
            ]
            if after and not accept:
                raise Busy(
                    f"{previous.schema} is behind the live version ({'; '.join(after[:3])}), and readers "
                    "would go back in time: "
                    f"run workers of the release that has definition {previous.definition}, or --accept"
                )

        await Switch(self._control, self._where.schema, live, previous, near, reach, True, self._wait).run(
            patience_seconds
        )
        return live._replace(state="previous"), previous._replace(state="live")

    def _wait(self, reason: str) -> None:
        self._report(RebuildProgress(f"waiting to switch: {reason}"))

    # -- what is no longer needed ----------------------------------------------------------------------------

    async def drop(self, state: str) -> Version | None:
        """Drops the version in a state, `building` or `previous`; returns it, or None when there was none."""
        found = await versions.in_state(self._control, self._where.schema, self._projection, state)
        if found is not None:
            await versions.discard(self._control, self._where.schema, found)
        return found


def _between(records: Sequence[SetAside], shard: int, before: Cursor, after: Cursor) -> list[SetAside]:
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


def _require_same(projection: str, live: Mapping[int, Cursor], ours: Mapping[int, Cursor]) -> None:
    for shard, cursor in live.items():
        if ours[shard] != cursor:
            raise RebuildRefused(
                f"{projection}, shard {shard}: the live version is at {_place(cursor)}, the new one came to "
                f"{_place(ours[shard])}: "
                "they are of different histories; `grabstream verify` says which one the journal has"
            )


def _place(cursor: Cursor) -> str:
    return f"seq {cursor.seq}, hash {cursor.head.hex()[:12]}…, offset {cursor.next_offset}"


async def load_part(
    where: Servers, projection: str, source_name: str, keeps_set_aside: bool, targets: Mapping[int, Cursor],
    step: Step
) -> None:  # fmt: skip
    """Loads some shards in a process of its own, for a rebuild that another process conducts and reports."""
    past = projection if keeps_set_aside else None
    async with (
        _connections(where) as (control, writer),
        open_rebuild_source(source_name, where, past) as source,
    ):
        await Rebuild(where, projection, control, writer, step=step).load_shards(source, targets)


@asynccontextmanager
async def _connections(where: Servers) -> AsyncIterator[tuple[AsyncConnection[Any], AsyncConnection[Any]]]:
    async with (
        await connect(where.postgres, where.schema) as control,
        await connect(where.postgres, where.schema) as writer,
    ):
        await use_schema(control, where.schema)
        await use_schema(writer, where.schema)
        # A commit that PostgreSQL forgets in a crash takes its cursor along.
        await writer.execute("SET synchronous_commit = off")
        yield control, writer


@asynccontextmanager
async def open_rebuild(
    where: Servers,
    projection: str,
    report: ReportRebuild = lambda progress: None,
    step: Step = lambda name: None,
    jobs: int = 1,
) -> AsyncIterator[Rebuild]:
    """A rebuild with connections of its own, loading in so many processes; raises Refused when another one of
    it runs.
    """
    async with _connections(where) as (control, writer):
        await hold_projection(control, where.schema, projection, f"rebuild of {projection}")
        try:
            yield Rebuild(where, projection, control, writer, report, step, jobs)
        except CursorMoved as moved:
            raise RebuildRefused(f"{moved}: another process wrote it; the same command goes on") from None


async def hold_projection(connection: AsyncConnection[Any], schema: str, projection: str, work: str) -> None:
    """Makes sure that nobody else makes, shows or drops versions of a projection until the connection ends;
    raises RebuildRefused.
    """
    deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            # Held by the session: it goes with the process, however that ends.
            return await hold(connection, f"grabstream-rebuild-{schema}-{projection}", work)
        except Held as held:
            if time.monotonic() > deadline:
                raise RebuildRefused(f"another rebuild of {projection} is running: {held}") from None
        await asyncio.sleep(POLL_SECONDS)


__all__ = ["Busy", "Rebuild", "RebuildProgress", "RebuildRefused", "Servers", "open_rebuild"]
