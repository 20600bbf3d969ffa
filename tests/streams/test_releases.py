"""What a release wrote is read by every later one: its journal gives the same chain, the same records of
`grab.events`, the same rows, and the same answers to repeated commands.

The files of a release are never edited. `python -m tests.support.release_history` writes those of the next
release, before it is tagged.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from grabstream.lua.keys import KeySpace
from grabstream.settings import Settings
from tests.support.journal_vectors import keys_text, read_dump, verdict_of
from tests.support.release_history import (
    FOLDERS,
    KEYS,
    RELEASED,
    SHARDS,
    answers_again,
    as_repeated,
    digests_of_tables,
    published,
    read_commands,
    read_records,
    rows_of_views,
    sums_of,
)

pytestmark = pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])


def test_files_of_a_release_are_unchanged(folder: Path) -> None:
    assert (folder / "SHA256SUMS").read_text() == sums_of(folder)
    assert {path.stem for path in RELEASED.glob("*.json")} <= {
        folder.name.removeprefix("release-") for folder in FOLDERS
    }


def test_tables_of_a_release_are_changed_by_new_files_only(folder: Path) -> None:
    """A migration is never edited, and other tables of a read model are another definition."""
    released = json.loads((folder / "tables.json").read_text())
    present = digests_of_tables()
    migrations = {name for name in released if name.endswith(".sql")}
    assert migrations <= present.keys()
    for name in released.keys() & present.keys():
        assert present[name] == released[name], name


def test_reader_finds_the_same_chain(folder: Path) -> None:
    records = read_dump((folder / "journal.jsonl").read_text())
    verdict = json.loads((folder / "journal.verdict.json").read_text())
    assert verdict_of(records, keys_text(KEYS)) == verdict
    assert {shard["verdict"] for shard in verdict["shards"].values()} == {"whole"}


def test_publisher_writes_the_same_records(folder: Path) -> None:
    chunks = read_records((folder / "journal.jsonl").read_text())
    assert published(chunks) == (folder / "events.jsonl").read_text()


async def test_read_models_have_the_same_rows(folder: Path, servers: Settings, prefix: str) -> None:
    chunks = read_records((folder / "journal.jsonl").read_text())
    expected = json.loads((folder / "views.json").read_text())
    columns = {view: found["columns"] for view, found in expected.items()}
    now_ms = read_commands(folder)[-1].at
    found = await rows_of_views(servers.postgres, prefix, chunks, now_ms, columns)
    for view, rows in expected.items():
        assert found[view] == rows, view


async def test_restored_shards_give_the_first_answers(folder: Path, redis_client: Any, prefix: str) -> None:
    chunks = read_records((folder / "journal.jsonl").read_text())
    answered = await answers_again(redis_client, KeySpace(prefix, SHARDS), chunks, read_commands(folder))
    assert len(answered) > 90
    for sent, again in answered:
        assert json.loads(again) == as_repeated(sent.answer), sent.command
