"""The steps of rebuilding one read model, as the verbs of `rebuild` use them."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from grabstream.connections.opening import check_system, where_of
from grabstream.models.bounds import counted
from grabstream.ops.commands.rebuild.results import RebuildResult
from grabstream.projections.checking.difference import TableDifference
from grabstream.projections.definitions import definition_of
from grabstream.projections.versions import Version
from grabstream.settings import Settings
from grabstream.streams.rebuilding.reading import RebuildSource, open_rebuild_source
from grabstream.streams.rebuilding.rebuild import Rebuild, RebuildStopped

#: The versions that can be dropped, by name: their states.
STATES: Final = {"previous": "previous", "unfinished": "building"}


class EventSource(NamedTuple):
    """The source: `journal`, `audit`, or `archive` and its place; and whether records set aside by operators
    are skipped.
    """

    name: str
    archive: Path | str | None
    skips_set_aside: bool


class SwitchOptions(NamedTuple):
    """Options of a switch: whether to switch although rows differ, whether to keep the old version, and how
    many seconds to wait for readers.
    """

    accept: bool
    keep: bool
    patience_seconds: float


class ModelRebuild(NamedTuple):
    """The rebuild of one read model, by verb."""

    settings: Settings
    projection: str
    opened: Rebuild
    live: Version
    is_lost: bool

    @classmethod
    async def of(cls, settings: Settings, projection: str, opened: Rebuild) -> "ModelRebuild":
        """The rebuild of a read model; raises RebuildStopped if it has no live version."""
        live = await opened.live()
        return cls(settings, projection, opened, live, await opened.is_lost(live))

    # -- the verbs -------------------------------------------------------------------------------------------

    async def rebuild(self, source: EventSource, how: SwitchOptions) -> RebuildResult:
        """Builds a new version, compares it, and shows it."""
        began = time.monotonic()
        async with self._events(source) as events:
            if self.is_lost:
                new = await self.opened.rebuild_lost(events, how.patience_seconds)
                done = (
                    f"{new.schema} is live, rebuilt from the {source.name}: the tables in schema "
                    f"{self.live.schema} were gone"
                )
                return self._result(done, new=new, build_seconds=_seconds_since(began))
            new = await self.opened.build(events)
            seconds = _seconds_since(began)
            result = await self._switch(events, new, how)
        return msgspec.structs.replace(result, build_seconds=seconds)

    async def build(self, source: EventSource) -> RebuildResult:
        """Builds a new version, or continues an unfinished one."""
        self._require_tables()
        began = time.monotonic()
        async with self._events(source) as events:
            new = await self.opened.build(events)
        done = (
            f"{new.schema} is complete and not shown: `grabstream rebuild switch {self.projection}` shows it"
        )
        return self._result(done, new=new, build_seconds=_seconds_since(began))

    async def compare(self) -> RebuildResult:
        """Compares the unfinished version with the live one."""
        async with self._unfinished() as (events, new):
            compared = await self._compared(events, new)
        if compared.refused:
            return compared
        done = (
            f"{new.schema} is compared and not shown: `grabstream rebuild switch {self.projection}` shows it"
        )
        return msgspec.structs.replace(compared, done=done)

    async def switch(self, how: SwitchOptions) -> RebuildResult:
        """Compares the unfinished version with the live one, and shows it."""
        async with self._unfinished() as (events, new):
            return await self._switch(events, new, how)

    async def undo(self, source: EventSource, accept: bool, patience_seconds: float) -> RebuildResult:
        """Shows the previous version again."""
        self._require_tables()
        async with self._events(source) as events:
            was, now = await self.opened.undo(events, accept, patience_seconds)
        return self._result(f"{now.schema} is live again, {was.schema} is the previous version", new=now)

    async def drop(self, which: Sequence[str], dry_run: bool) -> RebuildResult:
        """Drops the versions with these names of STATES."""
        dropped = []
        for state in dict.fromkeys(STATES[name] for name in which):
            version = await (self._in_state(state) if dry_run else self.opened.drop(state))
            if version is not None:
                dropped.append(version.schema)
        if not dropped:
            return self._result("nothing: there was no such version")
        return self._result(f"{'would drop' if dry_run else 'dropped'} {', '.join(dropped)}")

    # -- what they would do ----------------------------------------------------------------------------------

    async def plan(self, source: EventSource) -> RebuildResult:
        """What a rebuild would do."""
        if self.is_lost:
            return self._result(
                f"would build a new version from the {source.name} and show it: the tables in schema "
                f"{self.live.schema} are gone"
            )
        built = await self.plan_build(source)
        return msgspec.structs.replace(built, done=f"{built.done}; then compare and switch")

    async def plan_build(self, source: EventSource) -> RebuildResult:
        """What a build would do."""
        self._require_tables()
        kept_as = "audit" if source.name == "audit" else "journal"
        begun = await self.opened.begun(kept_as, source.skips_set_aside)
        definition = definition_of(self.projection)
        declared = ", ".join(sorted(definition.declared_since(self.live.definition))) or "no columns"
        how = f"continue {begun.schema} ({begun.phase})" if begun else "build a new version"
        return self._result(
            f"would {how} of definition {definition.number} from the {source.name}, with the "
            f"{counted(await self.opened.events(), 'events')} of {self.live.schema} (definition "
            f"{self.live.definition}) and newer ones; {declared} may differ"
        )

    async def plan_switch(self) -> RebuildResult:
        """What a switch would do."""
        new = await self._complete()
        compared = "" if new.phase == "agreed" else f"compare it with {self.live.schema} and "
        return self._result(f"would {compared}switch to {new.schema} (definition {new.definition})")

    async def plan_undo(self) -> RebuildResult:
        """What an undo would do."""
        self._require_tables()
        previous = await self.opened.in_state("previous")
        return self._result(
            f"would show {previous.schema} (definition {previous.definition}) again; {self.live.schema} "
            "would be the previous version"
        )

    # -- parts of them ---------------------------------------------------------------------------------------

    def _result(self, done: str, **rest: Any) -> RebuildResult:
        return RebuildResult(projection=self.projection, before=self.live, done=done, **rest)

    async def _in_state(self, state: str) -> Version | None:
        try:
            return await self.opened.in_state(state)
        except RebuildStopped:
            return None

    def _require_tables(self) -> None:
        if self.is_lost:
            raise RebuildStopped(
                f"the tables in schema {self.live.schema} are gone: run `grabstream rebuild "
                f"{self.projection}` to rebuild them"
            )

    async def _complete(self) -> Version:
        """The unfinished version, if it is complete; raises RebuildStopped otherwise."""
        self._require_tables()
        building = await self._in_state("building")
        if building is None:
            lacking = f"{self.projection} has no new version"
        elif await self.opened.begun(building.source, building.skips_set_aside) is None:
            lacking = f"{building.schema} has another definition, or its tables are gone"
        elif building.phase == "loading":
            lacking = f"{building.schema} is not complete"
        else:
            return building
        raise RebuildStopped(f"{lacking}: run `grabstream rebuild build {self.projection}` first")

    @asynccontextmanager
    async def _events(self, source: EventSource) -> AsyncIterator[RebuildSource]:
        skipped = self.projection if source.skips_set_aside else None
        archive = None if source.archive is None else self.settings.store(source.archive)
        async with open_rebuild_source(source.name, where_of(self.settings), skipped, archive) as events:
            yield events

    @asynccontextmanager
    async def _unfinished(self) -> AsyncIterator[tuple[RebuildSource, Version]]:
        """The unfinished version, close to the live one, and the source from which it was built."""
        building = await self._complete()
        if building.source != "audit":
            await check_system(self.settings)
        source = EventSource(building.source, None, building.skips_set_aside)
        async with self._events(source) as events:
            yield events, await self.opened.build(events)

    async def _compared(self, events: RebuildSource, new: Version) -> RebuildResult:
        """The differences; `refused` is set if rows differ in a way that is not declared."""
        tables = await self.opened.difference(events, new)
        undeclared = [difference.table for difference in tables if difference.undeclared]
        if not undeclared:
            return self._result("", new=new, difference=tables)
        set_aside = [] if new.skips_set_aside else await self.opened.set_aside()
        return self._result(
            f"stopped: rows of {', '.join(undeclared)} differ, see above",
            new=new, refused=True, difference=tables, set_aside=[record.in_words() for record in set_aside],
        )  # fmt: skip

    async def _switch(self, events: RebuildSource, new: Version, how: SwitchOptions) -> RebuildResult:
        """Compares the new version, unless that was done before an interruption, and shows it."""
        tables: list[TableDifference] = []
        if new.phase != "agreed":
            compared = await self._compared(events, new)
            if compared.refused and not how.accept:
                return compared
            tables = compared.difference
            new = await self.opened.agree(new)
        old = await self.opened.switch(events, new, how.keep, how.patience_seconds)
        kept = (
            f"{old.schema} is kept: `grabstream rebuild undo {self.projection}` shows it again"
            if how.keep
            else f"{old.schema} was dropped"
        )
        done = f"{new.schema} is live; {kept}"
        return self._result(done, new=new._replace(state="live"), difference=tables)


def _seconds_since(began: float) -> float:
    return round(time.monotonic() - began, 2)
