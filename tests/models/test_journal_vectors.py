"""Golden vectors of the journal: this project's reader and one in another language find the same."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.journal_vectors import (
    FOLDER,
    SUMS,
    VECTORS,
    dump_of,
    keys_text,
    read_dump,
    verdict_of,
)
from tests.support.nodejs import need_node

VERIFIER = Path(__file__).parents[2] / "examples" / "verify-journal.mjs"


def test_files_are_those_of_the_vectors() -> None:
    """The files are never edited: others test their readers with them."""
    sums = dict(reversed(line.split("  ")) for line in SUMS.read_text().splitlines())
    names = {f"{name}.{kind}" for name in VECTORS for kind in ("jsonl", "verdict.json")}
    assert set(sums) == names == {path.name for path in FOLDER.iterdir()} - {SUMS.name}
    for name, digest in sums.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize("name", VECTORS)
def test_reader_finds_the_verdict(name: str) -> None:
    vector = VECTORS[name]
    dump = (FOLDER / f"{name}.jsonl").read_text()
    expected = json.loads((FOLDER / f"{name}.verdict.json").read_text())
    assert dump == dump_of(vector.records)
    found = verdict_of(read_dump(dump), keys_text(vector.keys))
    assert found == expected
    assert {
        int(shard): (one["verdict"], one["seq"], one["ignored"]) for shard, one in found["shards"].items()
    } == vector.expected


def test_reader_in_another_language_finds_the_same() -> None:
    """All vectors in one process of Node.js: most of its time would be its start."""
    need_node("the verifier examples/verify-journal.mjs")
    done = subprocess.run(
        ["node", VERIFIER, "--vectors", FOLDER], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        *(f"{name}: as expected" for name in sorted(VECTORS, key=lambda name: f"{name}.jsonl"))
    ]


def test_reader_in_another_language_notices_a_wrong_verdict(tmp_path: Path) -> None:
    need_node("the verifier examples/verify-journal.mjs")
    for kind in ("jsonl", "verdict.json"):
        (tmp_path / f"gap.{kind}").write_text((FOLDER / f"gap.{kind}").read_text())
    verdict = tmp_path / "gap.verdict.json"
    verdict.write_text(verdict.read_text().replace('"seq": 3', '"seq": 4'))
    done = subprocess.run(
        ["node", VERIFIER, "--vectors", tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "gap: expected" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["singles.jsonl"], 0, "shard 0: whole: seq 11, head "),
        (["gap.jsonl"], 1, "shard 0: gap at offset 2: "),
        (["forged.jsonl"], 1, "shard 0: corrupt at offset 15: "),
        (["forged.jsonl", "--keys", keys_text(["k1", "k2"])], 0, "18 records ignored"),
        (["singles.jsonl", "--keys", "k1"], 2, "--keys"),
        (["singles.jsonl", "--keys", "k1:AAAA"], 2, "--keys"),
        (["none.jsonl"], 2, "none.jsonl"),
        (["SHA256SUMS"], 2, "line 1"),
        (["singles.jsonl", "gap.jsonl"], 2, "one FILE"),
        (["singles.jsonl", "--topic", "other.journal"], 2, "other.journal"),
    ],
)
def test_verifier_by_hand(words: list[str], code: int, said: str) -> None:
    need_node("the verifier examples/verify-journal.mjs")
    done = subprocess.run(
        ["node", VERIFIER, *words], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False,
        env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
