"""The process that encodes an archive: its errors are those of the export, and it does not outlive it."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import BufferReader, parquet

from grabstream.models.journal import Corrupt
from grabstream.streams.replaying.archive_encoder import Encoder, EncoderEnded
from tests.streams.replaying.test_archive_columns import part
from tests.support.random_history import NOW, random_history
from tests.support.runs import as_runs


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    return as_runs(random_history(5, 50, NOW).lines)


def bodies(content: bytes) -> list[bytes]:
    [column] = parquet.read_table(BufferReader(content), columns=["body"]).columns
    return [body.encode() for body in column.to_pylist()]


def test_a_process_makes_one_file_after_another(lines: list[bytes]) -> None:
    with Encoder() as encoder:
        for _ in range(2):
            for some in (lines[:3], lines[3:7], lines[7:]):
                encoder.add(part(some))
            assert bodies(encoder.complete()) == lines


def test_lines_that_contradict_their_place_are_refused(lines: list[bytes]) -> None:
    with Encoder() as encoder, pytest.raises(Corrupt, match="has other numbers"):
        encoder.add(part(lines[:3])._replace(shard=99))
        encoder.complete()


def test_a_process_that_was_killed_is_named(lines: list[bytes]) -> None:
    with Encoder() as encoder:
        encoder.add(part(lines[:3]))
        os.kill(encoder.process.pid, signal.SIGKILL)
        with pytest.raises(EncoderEnded, match="has ended with -9"):
            encoder.complete()


def test_the_process_ends_with_its_parent() -> None:
    """Also when the parent was killed: nothing is left that waits for ever."""
    code = (
        "import os\n"
        "from grabstream.streams.replaying.archive_encoder import Encoder\n"
        "print(Encoder().process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False, timeout=60)
    assert parent.returncode == -signal.SIGKILL
    try:
        ended = os.pidfd_open(int(parent.stdout))
    except ProcessLookupError:
        return
    with open(ended, "rb"):
        readable, _, _ = select.select([ended], [], [], 60)
    assert readable


def test_modules_of_the_working_directory_are_not_its_own(
    lines: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyarrow.py").write_text("raise SystemExit('another pyarrow')")
    monkeypatch.chdir(tmp_path)
    with Encoder() as encoder:
        encoder.add(part(lines))
        assert bodies(encoder.complete()) == lines
