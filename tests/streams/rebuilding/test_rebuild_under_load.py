"""A changed projection under live traffic: the switch, and no reader ever sees a mixture, nor goes back in
time.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection, IsolationLevel

from grabstream.ops.settings import Settings, child_environment
from grabstream.projections.database.migrate import use_schema
from grabstream.streams.journal import open_reader
from grabstream.streams.projecting import agents
from grabstream.streams.projecting.agents import group_of
from grabstream.streams.topics import Topics
from tests.conftest import until
from tests.streams.traffic import traffic
from tests.support.command_line import env_of, grabstream
from tests.support.leases import until_relayed_by
from tests.support.projecting import rows
from tests.support.rebuilding import digests, version_in

#: One transaction's look at offers and grabs: events, grabs that offers count and grabs there are, titles
#: shouted and not.
LOOK = (
    "SELECT (SELECT sum(seq) FROM cursors WHERE projection = 'balances')::bigint, coalesce(sum(grabs), "
    "0)::bigint, "
    "count(*) FILTER (WHERE title LIKE '%!'), count(*) FILTER (WHERE title NOT LIKE '%!') FROM offers"
)


class Reader:
    """Reads all the time, in transactions of both kinds, and keeps what is wrong."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.wrong: list[str] = []
        self.looks = 0
        self.forms: list[str] = []

    async def run(self, level: IsolationLevel) -> None:
        async with await AsyncConnection.connect(self._settings.postgres, autocommit=True) as connection:
            await use_schema(connection, self._settings.schema_)
            await connection.set_isolation_level(level)
            newest = (0, 0)
            while True:
                if level == IsolationLevel.REPEATABLE_READ:
                    async with connection.transaction():
                        look, grabs = (
                            await self._look(connection, LOOK),
                            await self._look(connection, "SELECT count(*) FROM grabs"),
                        )
                else:
                    look = await self._look(
                        connection, LOOK.replace("FROM offers", ", (SELECT count(*) FROM grabs) FROM offers")
                    )
                    grabs = look[4:]
                self._check(newest, look, grabs[0])
                newest = (look[0], look[1])
                await asyncio.sleep(0.01)

    async def _look(self, connection: AsyncConnection[Any], query: str) -> Any:
        return await (await connection.execute(query.encode())).fetchone()

    def _check(self, newest: tuple[int, int], look: Any, grabs: int) -> None:
        self.looks += 1
        events, counted, shouted, spoken = look[:4]
        if (events, counted) < newest or counted < newest[1]:
            self.wrong.append(f"back in time: {look} after {newest}")
        if counted != grabs:
            self.wrong.append(f"offers count {counted} grabs, there are {grabs}")
        if shouted and spoken:
            self.wrong.append(f"{shouted} titles of the new version and {spoken} of the old one")
        form = "new" if shouted else "old"
        if not self.forms or self.forms[-1] != form:
            self.forms.append(form)


def start(settings: Settings, log: Path, *words: str) -> "subprocess.Popen[bytes]":
    """The other release's command line."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.streams.rebuilding.changed", *words],
            env=child_environment(**env_of(settings)),
            stdout=output,
            stderr=output,
        )


@pytest.mark.nightly
async def test_a_changed_projection_under_load(
    system: Settings, worker: Callable[..., Any], tmp_path: Path
) -> None:
    deciding = worker(system, "decide,relay,sweep")
    worker(system, "project,publish")
    await until_relayed_by(system, deciding)
    log = tmp_path / "newer.log"
    newer = start(system, log, "-v", "worker", "--roles", "project")
    readers = Reader(system)
    reading = [
        asyncio.create_task(readers.run(level))
        for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ)
    ]
    try:
        async with traffic(system, 12_000) as crowd:
            await until(
                lambda: "grabstream rebuild balances" in log.read_text(), 60, "the newer worker's wait"
            )
            await crowd.begin()
            await crowd.until_answered(0.2)
            rebuild = await asyncio.to_thread(
                start(system, tmp_path / "rebuild.json", "rebuild", "balances", "--json").wait, 120
            )
            said = (tmp_path / "rebuild.json").read_text()
            assert rebuild == 0, said
            found = {one["table"]: one for one in json.loads(said[said.index("{") :])["difference"]}
            assert found["offers_1"]["declared"] == {"title": found["offers_1"]["rows_old"]}
            assert not [
                one for one in found.values() if one["missing"] or one["extra"] or one["rows_changed"]
            ]
            await crowd.adds_up()
            # The other version goes on too, by workers of the release before, and is complete at the same
            # events.
            kept = await version_in(system, "balances", "previous")
            live = await version_in(system, "balances")
            seqs = "SELECT shard, seq FROM {}.projection_cursors ORDER BY shard"
            until_same = await rows(system, seqs.format(live.schema))

            async def same() -> bool:
                return await rows(system, seqs.format(kept.schema)) == until_same

            await until(same, 30, "the previous version's cursors")
        before, after = await digests(system, kept), await digests(system, live)
        assert {table for table in before if before[table] != after[table]} == {"offers_1"}
        # In a thread: a reader that stood still with its snapshot would keep the switch waiting.
        assert (
            await asyncio.to_thread(grabstream, "rebuild", "balances", "--undo", **env_of(system))
        ).returncode == 0
        await until(lambda: readers.forms.count("old") > 1, 30, "a look at what was undone")
    finally:
        for task in reading:
            task.cancel()
        ended = await asyncio.gather(*reading, return_exceptions=True)
        newer.terminate()
        await asyncio.to_thread(newer.wait, 30)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended
    assert not readers.wrong, readers.wrong[:5]
    assert readers.forms[:2] == ["old", "new"]
    assert readers.looks > 50
    # Nothing was published a second time by all this.
    [(events,)] = await rows(system, "SELECT sum(seq)::int FROM cursors WHERE projection = 'audit'")
    assert await published(system) == events


async def published(settings: Settings) -> int:
    """How many events are in the topic of single events, repeats counted."""

    async with open_reader(settings.kafka, Topics(settings.prefix).events) as reader:
        return sum([await reader.end(shard) for shard in range(settings.shards)])


def test_workers_of_another_definition_are_in_a_group_of_their_own(monkeypatch: Any) -> None:

    assert group_of("grab", ["ledger", "audit", "events"]) == "grab.ledger:2-audit-events"
    changed = agents.definition_of("balances")._replace(number=9)
    monkeypatch.setattr(agents, "definition_of", lambda name: changed)
    assert group_of("grab", ["balances"]) == "grab.balances:9"
