"""A rehearsal that is stopped removes its system, and does not look like one whose checks failed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg import Connection

from grabstream.settings import Settings, child_environment
from tests.conftest import wait_until
from tests.support.command_line import env_of

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_rehearsal_removes_its_system(
    settings: Settings, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    log = tmp_path / "log"
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{program}from grabstream.ops import main; main()", "-v", "rehearse"],
            env=child_environment(**env_of(settings)), stdout=output, stderr=output,
        )  # fmt: skip
    try:
        wait_until(lambda: "calibration" in log.read_text(), 60, "the first grabs")
        [prefix] = {
            word for word in log.read_text().replace(",", " ").replace(")", " ").split()
            if word.startswith("rehearsal") and "x" in word and word.isalnum()
        }  # fmt: skip
        process.send_signal(number)
        assert process.wait(60) == code
    finally:
        process.kill()
        process.wait()
    assert "grabstream: stopped" in log.read_text()
    with Connection.connect(settings.postgres) as books:
        found = books.execute("SELECT count(*) FROM pg_namespace WHERE starts_with(nspname, %s)", (prefix,))
        assert found.fetchone() == (0,)
