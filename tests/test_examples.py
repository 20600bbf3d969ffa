"""Runs each example as its text describes, against one running system."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from grabstream import (
    AnyCommand,
    Confirm,
    EnvelopeTerms,
    Grab,
    GrabConfirmed,
    GrabGranted,
    GrabHeld,
    Open,
    Return,
    Settings,
    StockTerms,
    decode_line,
    open_gate,
    singles,
)
from grabstream.ops.initialization import make_system
from grabstream.settings import child_environment
from grabstream.streams.clients import started
from grabstream.workshop.rehearsal.stage import take_down
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import NIGHTLY, Worker, wait_until
from tests.streams.replaying.test_documented import examples
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
#: A payment after the end of its hold, whose unit is taken again.
LATE: Final[list[AnyCommand]] = [
    Open(
        id="open-3",
        offer="friday:case",
        terms=StockTerms(issuer="shop", total=2, price=1_900, currency="CNY", hold_ms=200, late="retake"),
    ),
    Grab(id="cid-1", offer="friday:case", user="cid"),
    Confirm(id="pay-3", offer="friday:case", grab="cid-1", payment="pay-3", paid=1_900, currency="CNY"),
]
#: What follows the name of the agent in the changelogs of its tables.
AGENT_CHANGELOGS: Final = ("-grabs-changelog", "-last-seq-changelog")


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
            words, cwd=folder, env=self.environment, capture_output=True, text=True, timeout=600
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
        """Waits until the read models have all decided events."""

        def caught_up() -> bool:
            lines = self.run("grabstream", "replay", "--into", "-").splitlines()
            [(booked,)] = self.rows("SELECT sum(seq)::bigint FROM cursors WHERE projection LIKE 'ledger%'")
            last = {event.shard: event.last_seq for event in map(decode_line, map(str.encode, lines))}
            return bool(booked == sum(last.values()))

        wait_until(caught_up, 60, "the books")

    def until_published(self) -> None:
        """Waits until `grab.events` has all decided events."""
        topic = f"{self.settings.prefix}.events"
        lines = self.run("grabstream", "replay", "--into", "-").splitlines()
        events = sum(decode_line(line.encode()).seqs for line in lines)

        def published() -> bool:
            words = ("kcat", "-C", "-b", self.settings.kafka, "-t", topic, "-e", "-q", "-f", "%p %h\n")
            return len(set(re.findall(r"ce_id=[0-9-]+", self.run(*words)))) >= events

        wait_until(published, 60, "the events")

    def grabs_by_minute(self) -> dict[tuple[str, int], int]:
        """How many grabs each offer had in each minute (ms since 1970 UTC), by the journal."""
        lines = self.run("grabstream", "replay", "--into", "-").encode().splitlines()
        return Counter(
            (event.offer, event.at // 60_000 * 60_000)
            for line in lines
            for event in singles(decode_line(line))
            if isinstance(event, GrabGranted | GrabHeld)
        )


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
        asyncio.run(delete_topics_of_agent(settings))


async def topics_of_agent(settings: Settings) -> dict[str, int]:
    """The topics that the Faust agent created, with the numbers of their partitions."""
    async with started(AIOKafkaAdminClient(bootstrap_servers=settings.kafka)) as client:
        names = [name for name in await client.list_topics() if name.startswith(f"{settings.prefix}.demand")]
        described = await client.describe_topics(names) if names else []
    return {topic["topic"]: len(topic["partitions"]) for topic in described}


async def delete_topics_of_agent(settings: Settings) -> None:
    if names := list(await topics_of_agent(settings)):
        async with started(AIOKafkaAdminClient(bootstrap_servers=settings.kafka)) as client:
            await client.delete_topics(names)


@pytest.mark.long
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


@pytest.mark.long
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
    printed = [one.communicate(timeout=600)[0] for one in running]
    for user, line in zip(("gina", "hugo"), printed, strict=True):
        assert re.fullmatch(rf"{user}-1 granted \d+\n", line)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Node.js example, installed."""
    need_node("the example examples/service-node")
    folder = tmp_path_factory.mktemp("node") / "service-node"
    shutil.copytree(EXAMPLES / "service-node", folder, ignore=shutil.ignore_patterns("node_modules"))
    done = subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.long
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


@pytest.mark.long
def test_verifier_in_node_finds_the_heads_of_the_books(stage: Stage, tmp_path: Path) -> None:
    """In the output of `grabstream dump`, and of kcat."""
    need_node("the verifier examples/verify-journal.mjs")
    stage.until_booked()
    dump = tmp_path / "journal.jsonl"
    dump.write_text(stage.run("grabstream", "dump"))
    settings = stage.settings
    kcat = tmp_path / "kcat.jsonl"
    kcat.write_text(
        stage.run("kcat", "-C", "-b", settings.kafka, "-t", f"{settings.prefix}.journal", "-e", "-q", "-J")
    )
    booked = {
        shard: (seq, head.hex())
        for shard, seq, head in stage.rows("SELECT shard, seq, head FROM cursors WHERE projection = 'ledger'")
    }
    assert sum(seq for seq, _ in booked.values()) >= len(OPENS + GRABS)
    for file in (dump, kcat):
        found = json.loads(stage.run("node", "verify-journal.mjs", "--json", str(file)))
        assert found["topic"] == f"{settings.prefix}.journal"
        assert {one["verdict"] for one in found["shards"].values()} == {"whole"}
        assert {int(shard): (one["seq"], one["head"]) for shard, one in found["shards"].items()} == booked
    planned = json.loads(stage.run("grabstream", "dump", "--dry-run", "--json", "--shard", "0"))
    assert planned["records"] == sum(json.loads(line)["partition"] == 0 for line in dump.open())


def test_notebook_is_stored_without_output() -> None:
    found = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.long
def test_notebook_runs(stage: Stage, tmp_path: Path) -> None:
    """Its numbers are those of the ledger, and its charts those of docs/notebook.md. A payment came late and
    took its unit again: it went from the offer to a wallet, but was not granted at once.
    """
    opened, held = stage.answers(*LATE[:2])
    assert (opened.outcome, held.outcome) == ("opened", "held")
    expired = "SELECT 1 FROM grabs WHERE offer = 'friday:case' AND state = 'expired'"
    wait_until(lambda: stage.rows(expired), 60, "the end of the hold")
    [confirmed] = stage.answers(LATE[2])
    assert confirmed.outcome == "confirmed"
    stage.until_booked()
    charts = str(PROJECT / "scripts" / "notebook_charts.py")
    # The folder of a script is not a place for modules: `limits` is a library, too.
    output = stage.run(sys.executable, "-P", charts, ".", folder=tmp_path)
    [(amount,)] = stage.rows("SELECT sum(amount)::bigint FROM transfers WHERE debit = 'offer:lunch'")
    printed = output.splitlines()
    assert any(re.fullmatch(r"lunch +envelope +\d+", line) for line in printed)
    assert any(line.startswith("place 1: ") for line in printed)
    assert "4 of 6 held units were paid" in printed
    assert "6 units held, 4 confirmed: events and views agree" in printed
    assert re.search(
        r"^friday:case +1 late payments, 1 served, 0 CNY to be given back$", output, re.MULTILINE
    )
    assert any(re.fullmatch(r"friday:phone +9 offered +2 grabs +0 refused", line) for line in printed)
    assert any(line.startswith("double_mean 1,000/20, place 1: ") for line in printed)
    assert printed[-1] == f"1 offers, {amount:,} units of value: events and books agree"
    made = {path.name for path in tmp_path.glob("*.svg")}
    pictures = list((PROJECT / "docs" / "images").glob("notebook-*"))
    page = (PROJECT / "docs" / "notebook.md").read_text()
    assert len(made) == 6
    assert {path.name for path in pictures} == set(re.findall(r"\(images/(.*?)\)", page)) == made
    for path in pictures:
        assert path.read_text().rstrip().endswith("</svg>")


@pytest.mark.long
def test_events_are_as_their_schemas_say(stage: Stage) -> None:
    """The recipe of docs/recipes.md, with what kcat prints."""
    stage.until_published()
    settings = stage.settings
    kcat = ("kcat", "-C", "-b", settings.kafka, "-t", f"{settings.prefix}.events", "-e", "-q", "-J")
    printed = stage.run(*kcat)
    [code] = [one for one in examples("recipes.md") if "ce_dataschema" in one]

    def check(records: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", code],
            input=records,
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=240,
        )

    done = check(printed)
    assert done.returncode == 0, done.stderr
    count = len(printed.splitlines())
    assert count >= len(OPENS + GRABS)
    assert done.stdout == f"{count} events are as their schemas say\n"
    wrong = check(printed.replace('\\"quantity\\":1', '\\"quantity\\":\\"1\\"', 1))
    assert (wrong.returncode, "'1' is not of type 'integer'" in wrong.stderr) == (1, True)


@pytest.mark.long
def test_agent_counts_grabs_by_minute(stage: Stage) -> None:
    """The counts are those of the events; at night, also when the agent is started again. All its topics are
    there before it starts: Faust would skip the records that come before it knows a changelog.
    """
    stage.run(sys.executable, "-c", "import asyncio, demand_agent as d; asyncio.run(d.create_topics())")
    names = [f"{stage.settings.prefix}.demand{rest}" for rest in ("", *AGENT_CHANGELOGS)]
    topics = dict.fromkeys(names, stage.settings.shards)
    assert asyncio.run(topics_of_agent(stage.settings)) == topics
    stage.until_published()
    expected = stage.grabs_by_minute()
    assert sum(expected.values()) >= 4
    with running_agent(stage) as counted:
        wait_until(lambda: counted() == expected, 120, "the counts of the events")
    assert asyncio.run(topics_of_agent(stage.settings)) == topics
    if not NIGHTLY:
        return
    # What the table has is read again, and counted on.
    [answer] = stage.answers(Grab(id="agent-1", offer="lunch", user="agent"))
    assert answer.outcome == "granted"
    stage.until_published()
    expected = stage.grabs_by_minute()
    with running_agent(stage) as counted:
        wait_until(lambda: counted() == expected, 120, "the counts of one grab more")


@contextmanager
def running_agent(stage: Stage) -> Iterator[Callable[[], dict[tuple[str, int], int]]]:
    """Runs the agent; what it yields reads the counts from its topic."""
    topic = f"{stage.settings.prefix}.demand"
    words = [sys.executable, "demand_agent.py", "worker", "--without-web", "-l", "warn"]
    with tempfile.TemporaryFile() as log:
        agent = subprocess.Popen(words, cwd=EXAMPLES, env=stage.environment, stdout=log, stderr=log)

        def counted() -> dict[tuple[str, int], int]:
            log.seek(0)
            assert agent.poll() is None, log.read().decode()
            kcat = ["kcat", "-C", "-b", stage.settings.kafka, "-t", topic, "-e", "-q"]
            lines = subprocess.run(kcat, capture_output=True, text=True, timeout=240).stdout.splitlines()
            return {(one["offer"], one["minute"]): one["grabs"] for one in map(json.loads, lines)}

        try:
            yield counted
        finally:
            agent.terminate()
            try:
                agent.wait(30)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
                raise


@pytest.mark.long
@pytest.mark.requirement("F2")
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


@pytest.mark.long
def test_replay_job_writes_the_same_file_from_both_sources(stage: Stage, tmp_path: Path) -> None:
    """From both sources the same bytes. The command refuses a day that is not over, so the test calls what it
    calls.
    """
    today = datetime.now(UTC).date()
    words = [sys.executable, "replay_job.py", str(today), "--folder", str(tmp_path)]
    done = subprocess.run(
        words, cwd=EXAMPLES, env=stage.environment, capture_output=True, text=True, timeout=240
    )
    assert (done.returncode, f"{today} is not over in UTC" in done.stderr) == (2, True)
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
