"""Runs each example as its text describes, against one running system."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from grabstream import (
    AnyCommand,
    Confirm,
    EnvelopeTerms,
    Grab,
    GrabConfirmed,
    GrabGranted,
    Open,
    Return,
    Settings,
    StockTerms,
    decode_line,
    open_gate,
    singles,
)
from grabstream.ops.initialization import make_system
from grabstream.ops.rehearsal.stage import take_down
from grabstream.ops.services.servers import PROJECT
from grabstream.ops.settings import child_environment
from tests.conftest import Worker, wait_until
from tests.support.command_line import env_of
from tests.support.nodejs import need_node

EXAMPLES: Final = PROJECT / "examples"
OPENS: Final[list[AnyCommand]] = [
    Open(
        id="open-1",
        offer="lunch",
        terms=EnvelopeTerms(issuer="alice", funding="pay-1", asset="CNY", total=1_000, parts=20),
    ),
    Open(
        id="open-2",
        offer="friday:phone",
        terms=StockTerms(
            issuer="shop", total=9, price=9_900, currency="CNY", hold_ms=600_000, max_per_grab=3
        ),
    ),
]
GRABS: Final[list[AnyCommand]] = [
    Grab(id="g-1", offer="lunch", user="bob"),
    Grab(id="g-2", offer="lunch", user="carol"),
    Grab(id="ann-1", offer="friday:phone", user="ann", quantity=3),
    Grab(id="bob-1", offer="friday:phone", user="bob", quantity=2),
    Confirm(id="pay-2", offer="friday:phone", grab="ann-1", payment="pay-2", paid=3 * 9_900, currency="CNY"),
    Return(id="back-1", offer="friday:phone", grab="ann-1", quantity=1),
]


class Stage:
    """A system with a worker, two offers and some grabs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return child_environment(**env_of(self.settings)) | {"PATH": path}

    def run(self, *words: str, folder: Path = EXAMPLES) -> str:
        done = subprocess.run(
            words, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.settings.postgres) as connection:
            connection.execute(f"SET search_path TO {self.settings.schema_}".encode())
            return connection.execute(query.encode()).fetchall()

    def answers(self, *commands: AnyCommand) -> list[Any]:
        """The answers of a gate. The first call waits until the worker has started."""

        async def decide() -> list[Any]:
            async with open_gate(self.settings) as gate:
                return await gate.decide(commands, patience_ms=30_000)

        return asyncio.run(decide())

    def until_booked(self) -> None:
        """Waits until the read models have all events so far."""

        def caught_up() -> bool:
            lines = self.run("grabstream", "replay", "--into", "-").splitlines()
            [(booked,)] = self.rows("SELECT sum(seq)::bigint FROM cursors WHERE projection LIKE 'ledger%'")
            last = {event.shard: event.last_seq for event in map(decode_line, map(str.encode, lines))}
            return bool(booked == sum(last.values()))

        wait_until(caught_up, 60, "the books")


@pytest.fixture(scope="module")
def stage(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    name = f"test{os.urandom(5).hex()}"
    settings = servers.model_copy(update={"prefix": name, "schema_": name})
    asyncio.run(make_system(settings))
    worker = Worker(
        settings, "decide,relay,sweep,project,publish", tmp_path_factory.mktemp("examples") / "log"
    )
    try:
        made = Stage(settings)
        outcomes = [answer.outcome for answer in made.answers(*OPENS, *GRABS)]
        expected = "opened opened granted granted held held confirmed returned"
        assert outcomes == expected.split()
        yield made
    finally:
        worker.stop()
        asyncio.run(take_down(settings))


def test_service_gets_its_answers(stage: Stage) -> None:
    """A repeat with the same id gets the first answer. A refusal is an answer too."""
    printed = stage.run(sys.executable, "service.py", "lunch", "erin", "--id", "erin-1")
    assert re.fullmatch(r"erin-1 granted \d+\n", printed)
    assert stage.run(sys.executable, "service.py", "lunch", "erin", "--id", "erin-1") == printed
    assert re.fullmatch(
        r"[0-9a-f-]{36} already_taken \d+\n", stage.run(sys.executable, "service.py", "lunch", "erin")
    )
    assert (
        stage.run(sys.executable, "service.py", "nosuch", "erin", "--id", "erin-3")
        == "erin-3 no_such_offer None\n"
    )


def test_each_instance_of_a_service_finds_its_own_answers(stage: Stage) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "service.py", "lunch", user, "--id", f"{user}-1"],
            cwd=EXAMPLES,
            env=stage.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for user in ("gina", "hugo")
    ]
    printed = [one.communicate(timeout=120)[0] for one in running]
    for user, line in zip(("gina", "hugo"), printed, strict=True):
        assert re.fullmatch(rf"{user}-1 granted \d+\n", line)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Node.js example, installed."""
    need_node("the example examples/service-node")
    folder = tmp_path_factory.mktemp("node") / "service-node"
    shutil.copytree(EXAMPLES / "service-node", folder, ignore=shutil.ignore_patterns("node_modules"))
    done = subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_service_in_node_gets_its_answers(stage: Stage, node: Path) -> None:
    printed = stage.run("node", "service.mjs", "lunch", "frank", "frank-1", folder=node)
    assert re.fullmatch(r"frank-1 granted \d+\n", printed)
    assert stage.run("node", "service.mjs", "lunch", "frank", "frank-1", folder=node) == printed
    refused = stage.run("node", "service.mjs", "lunch", "frank", folder=node)
    assert re.fullmatch(r"[0-9a-f-]{36} already_taken \d+\n", refused)


def test_lock_file_of_node_names_no_registry() -> None:
    locked = json.loads((EXAMPLES / "service-node" / "package-lock.json").read_text())
    package = json.loads((EXAMPLES / "service-node" / "package.json").read_text())
    assert locked["packages"][""]["dependencies"] == package["dependencies"]
    for name, one in locked["packages"].items():
        assert "resolved" not in one
        assert not name or one["integrity"].startswith("sha512-")


def cells(notebook: Path) -> list[str]:
    """The code of a notebook, which must be stored without output."""
    found = json.loads(notebook.read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    return ["".join(cell["source"]) for cell in code]


#: Runs cells as a notebook does: one after the other, in one namespace, with `await` at the top.
RUNS_CELLS: Final = """
import ast, asyncio, json, sys
async def run(cells):
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        code = compile(cell, f"<cell {number}>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if (waiting := eval(code, names)) is not None:
            await waiting
asyncio.run(run(json.load(sys.stdin)))
"""


def test_notebook_runs(stage: Stage, tmp_path: Path) -> None:
    stage.until_booked()
    done = subprocess.run(
        [sys.executable, "-c", RUNS_CELLS],
        input=json.dumps(cells(EXAMPLES / "notebook.ipynb")),
        cwd=tmp_path,
        env=stage.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    [(amount,)] = stage.rows("SELECT sum(amount)::bigint FROM transfers WHERE debit = 'offer:lunch'")
    printed = done.stdout.splitlines()
    assert any(re.fullmatch(r"lunch +envelope +\d+", line) for line in printed)
    assert any(line.startswith("place 1: ") for line in printed)
    assert "3 of 5 held units were paid" in printed
    assert printed[-1] == f"1 offers, {amount:,} units of value: events and books agree"


def test_points_are_counted(stage: Stage, tmp_path: Path) -> None:
    """In a schema of the test. A rebuild ends at the end of the journal."""
    schema = f"{stage.settings.schema_}_loyalty"
    text = (EXAMPLES / "points" / "points.py").read_text()
    assert 'schema="loyalty"' in text
    (tmp_path / "points.py").write_text(text.replace('schema="loyalty"', f'schema="{schema}"'))
    try:
        stage.run("grabstream", "follow", "points:PROJECTION", "--rebuild", folder=tmp_path)
        points = dict(stage.rows(f"SELECT user_id, points FROM {schema}.points"))
    finally:
        with psycopg.connect(stage.settings.postgres) as connection:
            connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())
    assert {name: points[name] for name in ("ann", "bob", "carol")} == {"ann": 20, "bob": 10, "carol": 10}


def test_replay_job_writes_the_same_file_from_both_sources(stage: Stage, tmp_path: Path) -> None:
    """From both sources the same bytes. The command refuses a day that is not over, so the test calls what it
    calls.
    """
    today = datetime.now(UTC).date()
    words = [sys.executable, "replay_job.py", str(today), "--folder", str(tmp_path)]
    done = subprocess.run(
        words, cwd=EXAMPLES, env=stage.environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "the day is not over" in done.stderr) == (2, True)
    empty = stage.run(sys.executable, "replay_job.py", "2024-02-29", "--folder", str(tmp_path))
    columns = "shard,seq,at,offer,user,grab,quantity,amount,asset"
    assert Path(empty.strip()).read_text().splitlines() == [columns]
    stage.until_booked()
    lines = stage.run("grabstream", "replay", "--into", "-").encode().splitlines()
    events: list[Any] = [event for line in lines for event in singles(decode_line(line))]
    day = datetime.fromtimestamp(events[-1].at / 1000, UTC).date()
    written = {}
    for source in ("journal", "audit"):
        code = (
            "import asyncio, datetime, pathlib, grabstream, replay_job\n"
            f"day, folder = datetime.date.fromisoformat('{day}'), pathlib.Path({str(tmp_path)!r})\n"
            f"asyncio.run(replay_job.export(grabstream.load_settings(), day, folder, {source!r}))\n"
        )
        stage.run(sys.executable, "-c", code)
        written[source] = (tmp_path / f"grabs-{day}.csv").read_text()
    assert written["journal"] == written["audit"]
    assert [path.suffix for path in tmp_path.iterdir()] == [".csv", ".csv"]
    expected = [
        ",".join(str(getattr(event, column)) for column in columns.split(","))
        for event in events
        if isinstance(event, GrabGranted | GrabConfirmed)
        if datetime.fromtimestamp(event.at / 1000, UTC).date() == day
    ]
    assert expected
    assert written["journal"].splitlines() == [columns, *expected]


def test_readme_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    named = set(re.findall(r"^\| \[[^\]]+\]\(([^)]+)\)", table, re.MULTILINE))
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."],
        cwd=EXAMPLES,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    there = {name.partition("/")[0] for name in listed}
    assert named == there - {"README.md"}
