"""A few cells of the kill matrix in every run: faults of Redis, PostgreSQL and a worker, and every shape of
traffic; and the drill's own functions.
"""

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from click.testing import CliRunner

from grabstream.models.answers import Answer
from grabstream.models.commands import Grab
from tests.conftest import Worker, some_by_tier
from tests.drill.__main__ import main
from tests.drill.cells import SHORT, Cell, cells, play
from tests.drill.checks import Journaled, decided_while_fenced, ended_by_themselves, missing
from tests.drill.faults import FAULTS
from tests.drill.gaps import waited
from tests.drill.observer import Fenced
from tests.drill.stage import Servers, servers
from tests.drill.traffic import SHAPES

pytestmark = pytest.mark.long


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill_servers() -> AsyncIterator[Servers]:
    """Servers that cells may kill."""
    async with servers(cluster=False) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", some_by_tier(SHORT, 2))
async def test_a_cell_passes(drill_servers: Servers, name: str) -> None:
    verdict = await play(drill_servers, Cell(*name.split("×")), seed=1)
    assert verdict.passed, verdict


def test_every_cell_can_be_selected_by_name() -> None:
    single, cluster = cells("single"), cells("cluster")
    assert {cell.fault for cell in (*single, *cluster)} == set(FAULTS)
    assert (
        len({cell.name for cell in single})
        == len(single)
        == sum(len(fault.shapes or SHAPES) for fault in FAULTS.values() if "single" in fault.where)
    )
    assert {cell.name for cell in single} >= set(SHORT)
    assert [cell.name for cell in cells("single", ["redis.aof*×ho*"])] == ["redis.aof_tail×holds"]
    listed = CliRunner().invoke(main, ["--list", "--cell", "kafka.leaderless×*", "--cluster"])
    assert listed.output.split() == [f"kafka.leaderless×{shape}" for shape in SHAPES]
    refused = CliRunner().invoke(main, ["--cell", "redis.meteor×*"])
    assert refused.exit_code == 2
    assert "--list prints them" in refused.output


@pytest.mark.parametrize(
    ("code", "problem_count"),
    [("raise SystemExit(70)", 1), ("raise RuntimeError", 1), ("", 0), (None, 0)],
    ids=["exit code 70", "an exception", "exit code 0", "killed"],
)
def test_a_worker_that_ended_with_an_error_is_a_problem(
    tmp_path: Path, code: str | None, problem_count: int
) -> None:
    log = tmp_path / "worker.log"
    log.write_text("RuntimeError: the handler is closed")
    command = [sys.executable, "-c", "import time; time.sleep(60)" if code is None else code]
    worker = Worker.__new__(Worker)
    worker.log, worker.process = log, subprocess.Popen(command, stderr=subprocess.DEVNULL)
    if code is None:
        worker.kill()
    else:
        worker.process.wait()
    problems = ended_by_themselves([worker])
    assert len(problems) == problem_count
    assert all("handler is closed" in problem for problem in problems)


def test_checks_report_wrong_data() -> None:
    """Each check reports data that are wrong: a check that cannot fail proves nothing."""
    command = Grab(id="g", offer="e", user="u")
    answer = Answer("g", "granted", 0, "e", grab="g", amount=5, shard=0, seq=7)
    event = {"command": "g", "offer": "e", "amount": 5, "at": 1_000}
    journal = {(0, 7): Journaled(3, event)}
    assert waited({0: 0.2, 1: 0.2}, {0: 9.0, 1: 0.9}, {0}) == []
    [slow] = waited({0: 0.2, 1: 0.2}, {0: 9.0, 1: 1.1}, {0})
    assert slow.startswith("shard 1: no answer for 1.10 s, 1.00 s at most")
    # On a loaded machine, all shards are slower.
    assert waited({0: 0.2, 1: 0.5}, {0: 1.4, 1: 1.4}, ()) == []
    assert missing([(command, answer)], journal) == []
    for wrong in (
        {},
        {(0, 7): Journaled(3, {**event, "command": "x"})},
        {(0, 7): Journaled(3, {**event, "amount": 6})},
    ):
        assert len(missing([(command, answer)], wrong)) == 1
    assert len(decided_while_fenced([Fenced(0, 3, 990, 1_010)], journal)) == 1
    for harmless in (Fenced(0, 4, 990, 1_010), Fenced(1, 3, 990, 1_010), Fenced(0, 3, 1_000, 1_010)):
        assert decided_while_fenced([harmless], journal) == []
