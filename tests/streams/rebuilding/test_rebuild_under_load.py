"""A rebuild with a changed definition under traffic: no reader ever sees rows of two versions, or a state
older than one it has seen before.
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

from grabstream.projections.database.migrate import use_schema
from grabstream.settings import Settings, child_environment
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

#: Read in one transaction: applied events, grabs counted by offers, titles of the new and of the old version.
LOOK = (
    "SELECT (SELECT sum(seq) FROM cursors WHERE projection = 'balances')::bigint, coalesce(sum(grabs), "
    "0)::bigint, "
    "count(*) FILTER (WHERE title LIKE '%!'), count(*) FILTER (WHERE title NOT LIKE '%!') FROM offers"
)


class Reader:
    """Reads without pause, at two isolation levels, and collects contradictions."""

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
        events, counted, new_titles, old_titles = look[:4]
        if (events, counted) < newest or counted < newest[1]:
            self.wrong.append(f"back in time: {look} after {newest}")
        if counted != grabs:
            self.wrong.append(f"offers count {counted} grabs, there are {grabs}")
        if new_titles and old_titles:
            self.wrong.append(f"{new_titles} titles of the new version and {old_titles} of the old one")
        form = "new" if new_titles else "old"
        if not self.forms or self.forms[-1] != form:
            self.forms.append(form)


def start(settings: Settings, log: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Starts the command line of the other release."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.streams.rebuilding.changed", *words],
            env=child_environment(**env_of(settings)),
            stdout=output,
            stderr=output,
        )


@pytest.mark.nightly
async def test_a_switch_under_load_shows_no_mixture_of_versions(
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
                lambda: "grabstream rebuild balances" in log.read_text(), 60, "the wait of the newer worker"
            )
            await crowd.begin()
            await crowd.until_answered(0.2)
            rebuild = await asyncio.to_thread(
                start(system, tmp_path / "rebuild.json", "rebuild", "balances", "--json").wait, 120
            )
            output = (tmp_path / "rebuild.json").read_text()
            assert rebuild == 0, output
            tables = json.loads(output[output.index("{") :])["difference"]
            difference = {table["table"]: table for table in tables}
            assert difference["offers_1"]["declared"] == {"title": difference["offers_1"]["rows_old"]}
            assert not [
                table
                for table in difference.values()
                if table["missing"] or table["extra"] or table["rows_changed"]
            ]
            await crowd.adds_up()
            # The workers of the previous release still write the previous version, up to the same events.
            kept = await version_in(system, "balances", "previous")
            live = await version_in(system, "balances")
            seqs = "SELECT shard, seq FROM {}.projection_cursors ORDER BY shard"
            live_seqs = await rows(system, seqs.format(live.schema))

            async def same() -> bool:
                return await rows(system, seqs.format(kept.schema)) == live_seqs

            await until(same, 30, "the cursors of the previous version")
        before, after = await digests(system, kept), await digests(system, live)
        assert {table for table in before if before[table] != after[table]} == {"offers_1"}
        # In a thread: the readers must continue, or the switch would wait for their snapshots.
        assert (
            await asyncio.to_thread(grabstream, "rebuild", "undo", "balances", **env_of(system))
        ).returncode == 0
        await until(lambda: readers.forms.count("old") > 1, 30, "a read of the previous version")
    finally:
        for task in reading:
            task.cancel()
        ended = await asyncio.gather(*reading, return_exceptions=True)
        newer.terminate()
        await asyncio.to_thread(newer.wait, 30)
    assert all(isinstance(result, asyncio.CancelledError) for result in ended), ended
    assert not readers.wrong, readers.wrong[:5]
    assert readers.forms[:2] == ["old", "new"]
    assert readers.looks > 50
    # No event was published a second time.
    [(events,)] = await rows(system, "SELECT sum(seq)::int FROM cursors WHERE projection = 'audit'")
    assert await published(system) == events


async def published(settings: Settings) -> int:
    """The number of records on the topic of single events, with repeats."""
    async with open_reader(settings.kafka, Topics(settings.prefix).events) as reader:
        return sum([await reader.end(shard) for shard in range(settings.shards)])


def test_workers_of_another_definition_have_another_consumer_group(monkeypatch: Any) -> None:
    assert group_of("grab", ["ledger", "audit", "events"]) == "grab.ledger:1-audit:1-events"
    changed = agents.definition_of("balances")._replace(number=9)
    monkeypatch.setattr(agents, "definition_of", lambda name: changed)
    assert group_of("grab", ["balances"]) == "grab.balances:9"
