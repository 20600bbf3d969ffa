"""The recipes of docs/recipes.md for tools that read an archive, run as a reader runs them."""

import csv
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from grabstream.models.calendar import DAY_MS
from grabstream.models.events import GrabGranted, decode_event
from grabstream.models.journal import GENESIS, Cursor, chain
from grabstream.models.runs import decode_line
from grabstream.streams.history.archive import ArchiveSystem
from grabstream.streams.history.sources import Lines
from grabstream.streams.history.stores import FolderStore
from grabstream.streams.replaying.archive_encoder import Encoder
from grabstream.streams.replaying.archive_sink import ArchiveSink, exporting
from grabstream.workshop.services.servers import PROJECT
from tests.streams.replaying.test_documented import examples
from tests.support.projecting import SHARD
from tests.support.random_history import NOW, random_history
from tests.support.runs import as_runs

Rows = list[tuple[str, int, int]]


async def archive(folder: Path) -> Rows:
    """Writes an archive of some days with runs; returns what the recipes must find: offer, grabs, amount."""
    history = random_history(11, 300, NOW - 1_000 * DAY_MS)
    lines = as_runs(history.lines)
    hashes = chain(GENESIS, lines)
    last_seqs = [decode_line(line).last_seq for line in lines]
    after = Cursor(last_seqs[-1], hashes[-1], 1, 1, "a")
    system = ArchiveSystem("test", "journal", SHARD + 1)
    with Encoder() as encoder:
        async with exporting(FolderStore(folder), system) as opened, ArchiveSink(opened, encoder) as sink:
            await sink.write(SHARD, Lines(after, lines, hashes, last_seqs))
            await sink.flush()
    assert sink.files > 1
    amounts: dict[str, list[int]] = {}
    for event in map(decode_event, history.lines):
        if isinstance(event, GrabGranted):
            amounts.setdefault(event.offer, []).append(event.amount)
    assert amounts
    return [(offer, len(given), sum(given)) for offer, given in sorted(amounts.items())]


@pytest.mark.long
@pytest.mark.parametrize("tool", ["polars", "pandas"])
async def test_recipe_in_python(tool: str, tmp_path: Path) -> None:
    expected = await archive(tmp_path / "archive")
    [code] = [one for one in examples("recipes.md") if f"import {tool}" in one]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    names, *rows = csv.reader(done.stdout.splitlines())
    assert names == ["offer", "grabs", "amount"]
    assert [(offer, int(grabs), int(amount)) for offer, grabs, amount in rows] == expected


async def test_recipe_in_duckdb(tmp_path: Path) -> None:
    expected = await archive(tmp_path / "archive")
    page = (PROJECT / "docs" / "recipes.md").read_text()
    query = page.partition("## DuckDB")[2].partition("```sql\n")[2].partition("```")[0]
    assert duckdb.sql(query.replace("'archive/", f"'{tmp_path}/archive/")).fetchall() == expected
