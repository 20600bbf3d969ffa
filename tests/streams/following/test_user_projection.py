"""A user projection: runs the code of docs/user-projections.md unchanged, live, through a kill, in a rebuild,
and with the test on that page.
"""

import asyncio
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from grabstream.connections.opening import system_of
from grabstream.models.events import GrabGranted, GrabHeld
from grabstream.settings import Settings, child_environment
from grabstream.streams.following import user_projection as own
from grabstream.streams.following.user_projection import CannotRun, Projection, rebuild
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.streams.replaying.histories import MixedHistory, drop, journal, schemas
from tests.support.command_line import env_of
from tests.support.projecting import rows

pytestmark = pytest.mark.long

DOCUMENT = Path(__file__).parents[3] / "docs" / "user-projections.md"


class Folder:
    """A folder with the two files of docs/user-projections.md, with a schema of this test, and
    `grabstream follow` in it.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path, self.settings, self.schema = path, settings, f"{settings.schema_}_reports"
        blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[:2]
        self.module, self.test = (
            block.replace('"reports"', f'"{self.schema}"').replace("reports.", f"{self.schema}.")
            for block in blocks
        )
        self.write(self.module)
        (path / "test_grabs_per_minute.py").write_text(self.test)

    def write(self, text: str) -> None:
        (self.path / "grabs_per_minute.py").write_text(text)

    def follow(self, *words: str, **settings: str) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable,
            "-m",
            "grabstream.ops.cli",
            "follow",
            "grabs_per_minute:PROJECTION",
            *words,
        ]
        with (self.path / "log").open("ab") as log:
            return subprocess.Popen(
                command, env=self.environment(**settings), cwd=self.path, stdout=log, stderr=log
            )

    def environment(self, **settings: str) -> dict[str, str]:
        root = str(Path(__file__).parents[3])
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return child_environment(**env_of(self.settings), **settings) | {"PATH": path, "PYTHONPATH": root}

    def projection(self) -> Projection:
        spec = importlib.util.spec_from_file_location("grabs_per_minute", self.path / "grabs_per_minute.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        projection = module.PROJECTION
        assert isinstance(projection, Projection)
        return projection

    async def counted(self) -> dict[tuple[str, int], int]:
        counts = await rows(self.settings, f"SELECT offer, minute, grabs FROM {self.schema}.grabs_per_minute")
        return {(offer, minute): grabs for offer, minute, grabs in counts}

    async def seqs(self) -> dict[int, int]:
        """The seq of each shard's cursor; empty before the schema exists."""
        if self.schema not in await schemas(self.settings, self.schema):
            return {}
        return dict(await rows(self.settings, f"SELECT shard, seq FROM {self.schema}.projection_cursors"))

    async def reached(self, expected: dict[int, int]) -> None:
        async def all_reached() -> bool:
            seqs = await self.seqs()
            return all(seqs.get(shard) == seq for shard, seq in expected.items())

        await until(all_reached, 30, f"{expected}: {(self.path / 'log').read_text()[-2000:]}")


@pytest.fixture
async def folder(system: Settings, tmp_path: Path) -> AsyncIterator[Folder]:
    yield Folder(tmp_path, system)
    await drop(system, *(name for name in await schemas(system, system.schema_) if name != system.schema_))


@asynccontextmanager
async def following(folder: Folder) -> AsyncIterator["subprocess.Popen[bytes]"]:
    running = folder.follow()
    try:
        yield running
    finally:
        running.kill()
        await asyncio.to_thread(running.wait)


def counted_in(history: MixedHistory, last: int) -> Counter[tuple[str, int]]:
    return Counter(
        (event.offer, event.at // 60_000)
        for event in history.events[:last]
        if isinstance(event, GrabGranted | GrabHeld)
    )


async def test_the_code_of_the_page_counts_every_event_once(folder: Folder) -> None:
    """Live, through a kill -9 and a clean stop; and the test on the page passes."""
    history, cut = MixedHistory(11, 4, 300, runs=True), random.Random(5)
    half, end = history.last_seqs[len(history.last_seqs) // 2], len(history.lines)
    await journal(folder.settings, history, cut, 1, half)
    killed = folder.follow(fail_at="grabs_per_minute.committed")
    assert await asyncio.to_thread(killed.wait, 30) == -signal.SIGKILL
    assert 0 < (await folder.seqs())[4] <= half
    running = folder.follow()
    await folder.reached({4: half})
    assert await folder.counted() == counted_in(history, half)
    await journal(folder.settings, history, cut, half + 1)
    await folder.reached({4: end})
    running.terminate()
    assert await asyncio.to_thread(running.wait, 20) == 128 + signal.SIGTERM
    live = await folder.counted()
    assert live == counted_in(history, end)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_grabs_per_minute.py"]
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        cwd=folder.path,
        env=folder.environment(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert await folder.counted() == live
    assert await folder.seqs() == {**dict.fromkeys(range(8), 0), 4: end}
    assert await schemas(folder.settings, folder.schema) == [folder.schema]


async def test_a_rebuild_replaces_a_version_that_is_followed_and_read(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new version replaces the old one in one transaction: readers see either. The follower of the old
    version ends and logs the reason.
    """
    history, cut = MixedHistory(12, 6, 300), random.Random(5)
    half, end = len(history.lines) // 2, len(history.lines)
    await journal(folder.settings, history, cut, 1, half)
    async with following(folder) as old:
        await folder.reached({6: half})
        before = counted_in(history, half)
        # The new version counts every grab as a hundred. While it is built, the journal grows, and the old
        # version follows it.
        folder.write(
            folder.module.replace(
                "list(grabs.values())", "[100 * count for count in grabs.values()]"
            ).replace("apply=apply)", "apply=apply, version=2)")
        )
        projection, system = folder.projection(), system_of(folder.settings)
        monkeypatch.setattr(own, "LEFT_RECORDS_MAX", 0)
        with pytest.raises(CannotRun, match=r"grabs_per_minute\.1: rebuild it as grabs_per_minute\.2"):
            await own.prepare(projection, system)
        grown = False

        async def grow(connection: Any, facts: Any) -> None:
            nonlocal grown
            await projection.apply(connection, facts)
            if not grown:
                grown = True
                await journal(folder.settings, history, cut, half + 1)
                await folder.reached({6: end})
                assert await folder.counted() == counted_in(history, end)

        seen: list[int] = []

        async def read() -> None:
            async with await open_books(folder.settings) as books:
                while True:
                    cursor = await books.execute(
                        f"SELECT sum(grabs)::bigint FROM {folder.schema}.grabs_per_minute".encode()
                    )
                    seen.append((await cursor.fetchone() or (0,))[0])
                    await asyncio.sleep(0.005)

        reading = asyncio.create_task(read())
        events = await rebuild(projection._replace(apply=grow), system)
        assert events == end
        await until(lambda: seen[-1] % 100 == 0 and seen[-1] > 100, 10, "the new version")
        reading.cancel()
        assert (await asyncio.gather(reading, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        assert set(seen) <= {sum(counted_in(history, seq).values()) for seq in range(half, end + 1)} | {
            100 * sum(counted_in(history, end).values())
        }
        assert seen[0] >= sum(before.values())
        # The next event ends the old follower; the new follower applies it.
        more = MixedHistory(13, 1, 20)
        await journal(folder.settings, more, cut)
        assert await asyncio.to_thread(old.wait, 30) == 1
        log = (folder.path / "log").read_text()
        assert "another version" in log
        assert "Traceback" not in log
    async with following(folder):
        await folder.reached({6: end, 1: len(more.lines)})
    expected = counted_in(history, end) + counted_in(more, len(more.lines))
    assert await folder.counted() == {key: 100 * count for key, count in expected.items()}


async def test_a_follower_of_a_replaced_version_ends_without_new_events(folder: Folder) -> None:
    history = MixedHistory(14, 2, 30)
    await journal(folder.settings, history, random.Random(5))
    async with following(folder) as old:
        await folder.reached({2: len(history.lines)})
        await rebuild(folder.projection()._replace(version=2), system_of(folder.settings))
        assert await asyncio.to_thread(old.wait, 30) == 1
    assert (
        (folder.path / "log")
        .read_text()
        .splitlines()[-1]
        .startswith("grabstream: grabs_per_minute.1 is no longer in schema")
    )


async def test_tables_that_postgresql_refuses_are_reported(folder: Folder) -> None:
    folder.write(folder.module.replace("CREATE TABLE", "CREATE TABEL"))
    for words in ((), ("--rebuild",)):
        done = folder.follow(*words)
        assert await asyncio.to_thread(done.wait, 30) == 1
    log = (folder.path / "log").read_text()
    assert log.count("PostgreSQL refuses its `tables`: syntax error") == 2
    assert "Traceback" not in log
    assert folder.schema not in await schemas(folder.settings, folder.schema)


async def test_a_schema_without_the_projection_is_refused(folder: Folder) -> None:
    async with await open_books(folder.settings) as books:
        await books.execute(f"CREATE SCHEMA {folder.schema}".encode())
    for words in ((), ("--rebuild",)):
        done = folder.follow(*words)
        assert await asyncio.to_thread(done.wait, 30) == 1
    assert (folder.path / "log").read_text().count("contains no projection") == 2
    folder.write(folder.module.replace(folder.schema, folder.settings.schema_))
    for words in ((), ("--rebuild",)):
        done = folder.follow(*words)
        assert await asyncio.to_thread(done.wait, 30) == 1
    assert await rows(folder.settings, "SELECT count(*) FROM offers") == [(0,)]
    folder.write("PROJECTION = 1")
    assert await asyncio.to_thread(folder.follow().wait, 30) == 2
