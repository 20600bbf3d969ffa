"""Archives: `grabstream export` loses and doubles no line, also when it is killed at any step; other tools
read the files; read models are rebuilt from them after the journal was cut; a damaged archive is refused.
"""

import asyncio
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow
import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from pyarrow import parquet

from grabstream import EventCursor, Point, Settings, read_events, read_lines
from grabstream.models.calendar import DAY_MS
from grabstream.models.events import GrabConfirmed, GrabGranted, GrabHeld, decode_event
from grabstream.models.journal import GENESIS, chain
from grabstream.models.runs import decode_line
from grabstream.ops.commands.rebuild.export import _size
from grabstream.ops.diagnosis.examination import JOURNAL_CHECK, examine
from grabstream.ops.verification import read_model_comparison
from grabstream.ops.verification.verifying import verify
from grabstream.settings import child_environment
from grabstream.streams.journal import JournalReader, open_reader
from grabstream.streams.projecting.projector import CatchUp
from grabstream.streams.replaying.archive_columns import COLUMN_NAMES
from grabstream.streams.topics import Topics
from grabstream.workshop.rehearsal.run import open_books
from grabstream.workshop.rehearsal.stage import take_down
from grabstream.workshop.services.servers import PROJECT
from tests.conftest import make_system, some_by_tier, until, wait_until
from tests.streams.replaying.test_documented import examples
from tests.support.command_line import env_of, grabstream
from tests.support.diagnosis import findings_of
from tests.support.projecting import SHARD, JournalWriter, catching_up, running, until_at_seq
from tests.support.random_history import NOW, History, journal_history, project, random_history
from tests.support.runs import as_runs
from tests.support.stopped_shards import WHY, call_json, until_stopped

STEPS = ("export.written", "export.renamed", "export.committed")


class Archived(NamedTuple):
    """A system whose journal has runs over some days, its lines, and an archive of them."""

    settings: Settings
    history: History
    lines: list[bytes]
    folder: Path


def lines_of(history: History) -> list[bytes]:
    return as_runs(history.lines)


def export(
    settings: Settings, folder: Path, *words: str, verb: str = "export", **more: str
) -> dict[str, Any]:
    done = grabstream(verb, str(folder), "--json", *words, **env_of(settings), **more)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def files_in(folder: Path) -> str:
    return f"read_parquet('{folder}/day=*/shard=*/*.parquet', hive_partitioning = true)"


def bodies(folder: Path) -> list[bytes]:
    """The lines of all files, as a tool reads them that does not know the manifest."""
    rows = duckdb.sql(f"SELECT body FROM {files_in(folder)} ORDER BY shard, seq").fetchall()
    return [body.encode() for [body] in rows]


@pytest.fixture(scope="module")
def archived(servers: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archived]:
    name = f"test{secrets.token_hex(5)}"
    settings = servers.model_copy(update={"prefix": name, "schema_": name})
    history = random_history(7, 500, NOW - 1_000 * DAY_MS)
    lines = lines_of(history)
    folder = tmp_path_factory.mktemp("archive") / "archive"

    async def prepare() -> None:
        await make_system(settings)
        await project(settings, history, random.Random(1), lines)

    asyncio.run(prepare())
    export(settings, folder)
    yield Archived(settings, history, lines, folder)
    asyncio.run(take_down(settings))


# -- what is exported ----------------------------------------------------------------------------------------


def test_an_archive_has_every_line_and_its_fields(archived: Archived) -> None:
    assert bodies(archived.folder) == archived.lines
    names = [
        column for column, *_ in duckdb.sql(f"DESCRIBE SELECT * FROM {files_in(archived.folder)}").fetchall()
    ]
    assert names == [*COLUMN_NAMES, "day", "shard"]
    rows = duckdb.sql(
        f'SELECT shard, seq, seqs, type, offer, offer_seq, "at", epoch_ms(at_time), hash FROM '
        f"{files_in(archived.folder)} ORDER BY seq"
    ).fetchall()
    events = list(map(decode_line, archived.lines))
    assert rows == [
        (event.shard, event.seq, event.seqs, event.__struct_config__.tag, event.offer, event.offer_seq,
         event.at, event.at, hash_)
        for event, hash_ in zip(events, chain(GENESIS, archived.lines), strict=True)
    ]  # fmt: skip
    days = duckdb.sql(
        f"SELECT count(*), count(DISTINCT day), count(*) FILTER (day <> CAST(at_time AT TIME ZONE 'UTC' AS "
        f"date)) FROM {files_in(archived.folder)}"
    ).fetchall()[0]
    assert (days[1] > 2, days[2]) == (True, 0)
    singles = duckdb.sql(
        "SELECT seq + i - 1, grabs[i], users[i], quantities[i], amounts[i], asset, place + i - 1 FROM ("
        f"SELECT *, unnest(range(1, seqs + 1)) AS i FROM {files_in(archived.folder)} "
        "WHERE type = 'grab.granted') ORDER BY 1"
    ).fetchall()
    assert singles == [
        (event.seq, event.grab, event.user, event.quantity, event.amount, event.asset, event.place)
        for event in map(decode_event, archived.history.lines)
        if isinstance(event, GrabGranted)
    ]


def test_examples_of_the_page_run(archived: Archived, tmp_path: Path) -> None:
    """The queries in DuckDB, with the sums of the events; and the chain, verified without our code."""
    page = (PROJECT / "docs" / "archive.md").read_text()
    queries = [part.partition("```")[0] for part in page.split("```sql\n")[1:]]
    (tmp_path / "archive").symlink_to(archived.folder)
    connection = duckdb.connect()
    connection.execute(queries[0].replace("'archive/", f"'{archived.folder}/"))
    by_offer, by_day, closed = [connection.execute(query).fetchall() for query in queries[1:]]
    events: list[Any] = list(map(decode_event, archived.history.lines))
    granted = [event for event in events if isinstance(event, GrabGranted)]
    assert by_offer == [
        (offer, len(amounts), sum(amounts))
        for offer in sorted({event.offer for event in granted})
        for amounts in [[event.amount for event in granted if event.offer == offer]]
    ]
    assert sum(paid for *_, paid in by_day) == sum(getattr(event, "paid", 0) for event in events) > 0
    assert len(closed) == sum(event.__struct_config__.tag == "offer.closed" for event in events)
    [verify] = examples("archive.md")
    done = subprocess.run(
        [sys.executable, "-c", verify], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    head = chain(GENESIS, archived.lines)[-1].hex()
    assert done.stdout == f"shard {SHARD}: {len(archived.history.lines)} events, head {head}\n"


def test_views_of_duckdb_have_what_the_events_say(archived: Archived) -> None:
    """Views of examples/grabstream.sql."""
    text = (PROJECT / "examples" / "grabstream.sql").read_text().replace("'archive/", f"'{archived.folder}/")
    connection = duckdb.connect()
    connection.execute(text)
    events: list[Any] = list(map(decode_event, archived.history.lines))
    assert connection.execute(
        "SELECT seq, type, offer, grab, user_id, quantity, amount, place FROM grabs ORDER BY seq"
    ).fetchall() == [
        (event.seq, event.__struct_config__.tag, event.offer, event.grab, event.user, event.quantity,
         event.amount, event.place)
        for event in events if isinstance(event, GrabGranted | GrabHeld)
    ]  # fmt: skip
    paid = [event for event in events if isinstance(event, GrabConfirmed) and event.paid]
    assert paid
    assert connection.execute("SELECT seq, payment, paid FROM payments ORDER BY seq").fetchall() == [
        (event.seq, event.payment, event.paid) for event in paid
    ]
    assert connection.execute("SELECT count(*) FROM lines").fetchone() == (len(archived.lines),)
    last = len(archived.history.lines)
    head = chain(GENESIS, archived.lines)[-1]
    whole = (SHARD, last, head, 0, 0)
    assert connection.execute("SELECT * FROM chain").fetchall() == [whole]
    # A damaged copy in place of the files: a line that differs, a hash that does, a line that is missing.
    connection.execute("CREATE TABLE copied AS SELECT * FROM lines")
    fifth = connection.execute("SELECT seq FROM copied ORDER BY seq LIMIT 1 OFFSET 4").fetchone()
    assert fifth is not None
    for damage, gaps, wrong_hashes in (
        ("* REPLACE (CASE seq WHEN ? THEN body || ' ' ELSE body END AS body)", 0, 1),
        ("* REPLACE (CASE seq WHEN ? THEN hash[1:31] || '!'::BLOB ELSE hash END AS hash)", 0, 2),
        ("* FROM copied WHERE seq <> ? --", 1, 1),
    ):
        sql = f"SELECT {damage} FROM copied".replace("?", str(fifth[0]))
        connection.execute(f"CREATE OR REPLACE VIEW lines AS {sql}")
        found = connection.execute("SELECT gaps, wrong_hashes FROM chain").fetchall()
        assert found == [(gaps, wrong_hashes)], damage


@pytest.mark.long
async def test_an_export_continues_where_the_last_one_ended(system: Settings, tmp_path: Path) -> None:
    """From either source; nothing new makes no file, and changes no byte."""
    history = random_history(7, 200, NOW - 1_000 * DAY_MS)
    lines = lines_of(history)
    part = len(lines) // 2
    folder = tmp_path / "new" / "archive"
    assert export(system, folder)["files"] == 0
    await journal_history(system, lines[:part], random.Random(1))
    would = export(system, folder, "--dry-run")
    assert (would["dry_run"], would["to_read"] > 0, bodies_or_none(folder)) == (True, True, [])
    assert export(system, folder)["lines"] == part
    assert bodies(folder) == lines[:part]
    # The whole history: its first lines are in the journal twice now, as after a takeover.
    await project(system, history, random.Random(2), lines)
    report = export(system, folder, "--source", "audit")
    assert (report["lines"], report["shards"][SHARD]["seq"]) == (len(lines) - part, len(history.lines))
    assert bodies(folder) == lines
    before = (folder / "manifest.json").read_bytes()
    assert export(system, folder, "--source", "audit")["files"] == 0
    assert (folder / "manifest.json").read_bytes() == before
    # The offset of the journal moves on over what the archive has.
    assert export(system, folder)["lines"] == 0
    assert bodies(folder) == lines
    assert export(system, folder)["lines"] == 0


def bodies_or_none(folder: Path) -> list[bytes]:
    return bodies(folder) if list(folder.glob("day=*/shard=*/*.parquet")) else []


@pytest.mark.long
@pytest.mark.parametrize("step", some_by_tier(STEPS, 2))
def test_an_export_killed_at_a_step_loses_and_doubles_no_line(
    archived: Archived, step: str, tmp_path: Path
) -> None:
    """Also when it is killed there again and again, as often as there are files."""
    folder = tmp_path / "archive"
    for times in (1, 1, 2):
        done = grabstream("export", str(folder), **env_of(archived.settings), fail_at=f"{step}:{times}")
        assert done.returncode == -signal.SIGKILL, done.stderr
        there = bodies_or_none(folder)
        assert there == archived.lines[: len(there)]
        # What the manifest has can be used at once.
        assert export(archived.settings, folder, verb="verify-archive")["checked"]
    export(archived.settings, folder)
    assert bodies(folder) == archived.lines
    assert export(archived.settings, folder, verb="verify-archive")["lines"] == len(archived.lines)


@pytest.mark.long
def test_an_export_stops_on_sigterm_and_continues(archived: Archived, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    process = stopped_export(archived, folder)
    try:
        other = grabstream("export", str(folder), **env_of(archived.settings))
        assert (other.returncode, "another process exports" in other.stderr) == (1, True)
    finally:
        process.terminate()
        os.kill(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=240)
    assert (process.returncode, "repeat the command to continue" in said) == (143, True), said
    export(archived.settings, folder)
    assert bodies(folder) == archived.lines


@pytest.mark.long
def test_an_export_whose_encoder_is_killed_ends_and_continues(archived: Archived, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    process = stopped_export(archived, folder)
    tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
    [encoder] = [int(child) for task in tasks for child in task.read_text().split()]
    os.kill(encoder, signal.SIGKILL)
    os.kill(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=240)
    assert (process.returncode, "encodes Parquet has ended with -9; repeat the command" in said) == (1, True)
    export(archived.settings, folder)
    assert bodies(folder) == archived.lines


def stopped_export(archived: Archived, folder: Path) -> subprocess.Popen[str]:
    """An export that has stopped itself after its second file."""
    environment = child_environment(**env_of(archived.settings), fail_at="export.committed:2:stop")
    command = [sys.executable, "-m", "grabstream.ops.cli", "export", str(folder)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: state_of(process.pid) == "T", 60, "the export stops itself")
    return process


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# -- reading it again ----------------------------------------------------------------------------------------


@pytest.mark.long
async def test_an_archive_is_read_from_any_point_and_cursor(archived: Archived) -> None:
    """The same as from the journal; and a cursor continues in any source."""
    events = list(map(decode_event, archived.history.lines))
    cut = random.Random(3)
    sources: list[dict[str, Any]] = [
        {"source": "archive", "archive": archived.folder}, {"source": "journal"}, {"source": "audit"}
    ]  # fmt: skip
    for _ in range(12):
        seq = cut.randint(1, len(events))
        for first in (Point(seq=seq), Point(at=events[seq - 1].at)):
            words: dict[str, Any] = {
                "shard": SHARD,
                "first": first,
                "until": Point(seq=min(seq + 40, len(events))),
            }
            found, expected = [
                [line async for line in read_lines(archived.settings, **words, **source)]
                for source in sources[:2]
            ]
            assert found == expected
    text, read = EventCursor().encode(), []
    while len(read) < len(events):
        cursor = EventCursor.decode(text)
        until = Point(seq=len(read) + cut.choice((1, 3, 50)))
        source = cut.choice(sources)
        read += [
            event
            async for event in read_events(
                archived.settings, shard=SHARD, until=until, cursor=cursor, **source
            )
        ]
        text = cursor.encode()
    assert read == events


@pytest.mark.long
async def test_read_models_are_rebuilt_after_the_journal_was_cut(system: Settings, tmp_path: Path) -> None:
    """From the archive and the rest of the journal: equal in every row. Without the archive, the error names
    the fix.
    """
    history = random_history(7, 200, NOW - 1_000 * DAY_MS)
    lines = lines_of(history)
    folder = tmp_path / "archive"
    part = len(lines) * 2 // 3
    await journal_history(system, lines[:part], random.Random(1))
    export(system, folder)
    end = json.loads((folder / "manifest.json").read_text())["ends"][str(SHARD)]
    await project(system, history, random.Random(2), lines)
    await cut_journal(system, end["next_offset"])
    words = ("--source", "archive", "--archive", str(folder))
    done = grabstream("replay", "--into", "-", *words, **env_of(system))
    assert done.stdout.encode().splitlines() == lines, done.stderr
    for name in ("ledger", "balances", "audit"):
        rebuild = ("rebuild", name, "--from", "archive", "--archive", str(folder), "--json")
        done = grabstream(*rebuild, **env_of(system))
        assert done.returncode == 0, done.stdout + done.stderr
        differences = json.loads(done.stdout)["difference"]
        assert differences
        assert not any(table["missing"] or table["extra"] or table["rows_changed"] for table in differences)
    checks = verified(system, 0, "--archive", str(folder))
    for name in ("chain of every shard", "audit bytes = journal"):
        assert checks[name]["checked"] == len(history.lines)
    [lost] = verified(system, 1)["chain of every shard"]["problems"]
    assert f"the journal begins at offset {end['next_offset']}" in lost
    for refused in (("rebuild", "ledger"), ("replay", "--into", "-")):
        done = grabstream(*refused, **env_of(system))
        assert done.returncode == 1
        assert f"the journal begins at offset {end['next_offset']}" in done.stderr, done.stderr
    # The next export continues in what is left, and then all of it is in the archive.
    assert export(system, folder)["lines"] == len(lines) - part
    verified(system, 0, "--archive", str(folder))
    done = grabstream("rebuild", "ledger", "--from", "archive", "--archive", str(folder), **env_of(system))
    assert done.returncode == 0, done.stdout + done.stderr


async def test_a_journal_that_has_lost_its_end_is_named_beside_an_archive_too(
    system: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = random_history(7, 60, NOW - 1_000 * DAY_MS)
    await project(system, history, random.Random(2), lines_of(history))
    folder = tmp_path / "archive"
    export(system, folder)
    end_of = JournalReader.end

    async def half(reader: JournalReader, shard: int) -> int:
        return await end_of(reader, shard) // 2

    monkeypatch.setattr(JournalReader, "end", half)
    decoded: list[bytes] = []
    monkeypatch.setattr(
        read_model_comparison, "decode_line", lambda line: decoded.append(line) or decode_line(line)
    )
    for archive in (None, system.store(folder)):
        decoded.clear()
        checks = {check.name: check for check in await verify(system, 0, quick=True, archive=archive)}
        assert "the journal has lost its end" in "; ".join(checks["chain of every shard"].problems)
        # Lines of an archive were decoded when they were read from it.
        assert bool(decoded) is (archive is None)


@pytest.mark.long
async def test_a_journal_that_ends_before_the_archive_is_named_by_export_and_doctor(
    system: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no read model has these lines; with what repairs it."""
    folder = tmp_path / "archive"
    await journal_history(system, lines_of(random_history(7, 60, NOW - 1_000 * DAY_MS)), random.Random(2))
    export(system, folder)
    store, check = system.store(folder), JOURNAL_CHECK
    assert findings_of(await examine(system, archive=store), check) == []
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["ends"][str(SHARD)]["next_offset"] += 5
    (folder / "manifest.json").write_text(json.dumps(manifest))
    end = manifest["ends"][str(SHARD)]["next_offset"]
    for words in ((), ("--dry-run",)):
        done = grabstream("export", str(folder), *words, **env_of(system))
        assert done.returncode == 1, done.stdout
        assert (
            f"the journal has lost its end: shard {SHARD} ends at offset {end - 5}, and {folder} has its "
            f"lines up to offset {end}" in done.stderr
        )
        assert f"`grabstream doctor --archive {folder}`" in done.stderr
    [finding] = findings_of(await examine(system, archive=store), check)
    assert f"{folder} has further lines" in finding.what
    assert "which the audit trail lacks" in finding.means
    assert "kafka-topics.sh" in finding.command
    assert "rebuild journal --from audit --new-journal" in finding.command
    done = grabstream("export", str(folder), "--source", "audit", **env_of(system))
    assert done.returncode == 1
    assert f"the audit trail of shard {SHARD} ends at seq 0, and {folder}" in done.stderr
    (folder / "manifest.json").write_text("{}")
    done = grabstream("doctor", "--archive", str(folder), **env_of(system))
    assert (done.returncode, "it is not a manifest" in done.stderr) == (1, True)


@pytest.mark.long
async def test_an_archive_with_a_line_that_cannot_be_read_is_not_complete(
    system: Settings, tmp_path: Path
) -> None:
    lines = lines_of(random_history(7, 100, NOW - 1_000 * DAY_MS))
    last_seqs = [decode_line(line).last_seq for line in lines]
    at = next(index for index, line in enumerate(lines) if b'"grabs"' in line and index > 20)
    event = json.loads(lines[at])
    del event["left"]
    lines[at] = json.dumps(event, separators=(",", ":")).encode()
    async with AIOKafkaProducer(bootstrap_servers=system.kafka, acks="all") as producer:
        journal = JournalWriter(system, producer)
        await journal.marker(1, "a")
        for index in range(len(lines)):
            await journal.block(lines, index + 1, index + 1, last_seqs=last_seqs)
    folder = tmp_path / "archive"
    export(system, folder)
    done = grabstream("verify-archive", str(folder), **env_of(system))
    assert done.returncode == 1
    assert f"the event of seq {event['seq']} cannot be decoded" in done.stderr


@pytest.mark.long
async def test_a_line_that_was_set_aside_is_exported_as_text(system: Settings, tmp_path: Path) -> None:
    """Readers of the archive treat it as those of the journal do."""
    lines = lines_of(random_history(7, 60, NOW - 1_000 * DAY_MS))
    last_seqs = [decode_line(line).last_seq for line in lines]
    at = next(index for index in range(len(lines) - 1, 3, -1) if b'"grabs"' not in lines[index])
    seq = last_seqs[at]
    lines[at] = lines[at][:-1]  # no JSON
    names, folder = ("ledger", "balances", "audit"), tmp_path / "archive"
    async with AIOKafkaProducer(bootstrap_servers=system.kafka, acks="all") as producer:
        journal = JournalWriter(system, producer)
        await journal.marker(1, "a")
        for index in range(len(lines)):
            await journal.block(lines, index + 1, index + 1, last_seqs=last_seqs)
    refused = grabstream("export", str(folder), **env_of(system))
    assert (refused.returncode, "Once it is set aside" in refused.stderr) == (1, True)
    async with catching_up(system, *names):
        for name in names:
            await until_stopped(system, name)
            code, done = await call_json(system, "set-aside", name, str(SHARD), *WHY, "--yes")
            assert (code, done["moved"]) == (0, True), done
        await until_at_seq(system, last_seqs[-1])
    report = export(system, folder)
    assert (report["lines"], bodies(folder)) == (len(lines), lines)
    found = duckdb.sql(f"SELECT * FROM {files_in(folder)} WHERE type IS NULL")
    [row] = [dict(zip(found.columns, values, strict=True)) for values in found.fetchall()]
    assert (row["seq"], row["seqs"], row["shard"]) == (seq, 1, SHARD)
    assert row["hash"] == chain(GENESIS, lines)[at]
    assert {name for name, value in row.items() if value is not None} == {
        "seq", "seqs", "hash", "body", "day", "shard",
    }  # fmt: skip
    checked = export(system, folder, verb="verify-archive")
    assert (checked["lines"], checked["set_aside"]) == (len(lines), 1)
    archive = ("--archive", str(folder))
    checks = verified(system, 0, *archive)
    assert checks["chain of every shard"]["checked"] == verified(system, 0)["chain of every shard"]["checked"]
    for source in (("journal",), ("archive", *archive)):
        done = grabstream("replay", "--into", "-", "--source", *source, **env_of(system))
        assert (done.returncode, "cannot be decoded" in done.stderr) == (1, True), done.stderr
        rebuild = ("rebuild", "ledger", "--from", *source)
        done = grabstream(*rebuild, **env_of(system))
        assert (done.returncode, "--skip-set-aside" in done.stderr) == (1, True), done.stderr
        done = grabstream(*rebuild, "--skip-set-aside", **env_of(system))
        assert done.returncode == 0, done.stdout + done.stderr


def verified(settings: Settings, code: int, *words: str) -> dict[str, Any]:
    """The checks of `grabstream verify --quick` by name: nothing here decides, so Redis has no keys."""
    done = grabstream("verify", "--quick", "--wait", "0", "--json", *words, **env_of(settings))
    assert done.returncode == code, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)}


def test_small_exports_are_told_in_kilobytes() -> None:
    assert (_size(0), _size(9_409), _size(32_000_000)) == ("0.0 kB", "9.4 kB", "32.0 MB")


@pytest.mark.long
async def test_shards_without_events_are_rebuilt(system: Settings, tmp_path: Path) -> None:
    """The journal of such a shard has markers only: from before the export, also after it, or also some that
    the read models do not know yet.
    """
    history = random_history(7, 20, NOW - 1_000 * DAY_MS)
    folder = tmp_path / "archive"
    before, after, unknown = [shard for shard in range(system.shards) if shard != SHARD][:3]
    for shard in (before, after, unknown):
        await write_marker(system, shard, 1)
    await project(system, history, random.Random(1))
    await read_to_the_end(system, before, unknown)
    await write_marker(system, unknown, 2)
    export(system, folder)
    await write_marker(system, after, 2)
    await read_to_the_end(system, after)
    done = grabstream("rebuild", "ledger", "--from", "archive", "--archive", str(folder), **env_of(system))
    assert done.returncode == 0, done.stdout + done.stderr


async def write_marker(settings: Settings, shard: int, term: int) -> None:
    """Writes the marker of a takeover."""
    producer = AIOKafkaProducer(bootstrap_servers=settings.kafka, acks="all")
    await producer.start()
    try:
        await JournalWriter(settings, producer, shard).marker(term, f"owner-{term}")
    finally:
        await producer.stop()


async def read_to_the_end(settings: Settings, *shards: int) -> None:
    """Returns when the ledger has read the journal of shards to its end."""
    async with open_reader(settings.kafka, Topics(settings.prefix).journal) as reader:
        ends = {shard: await reader.end(shard) for shard in shards}
    async with running(settings, "ledger") as [projector], await open_books(settings) as books:
        for shard in shards:
            await projector.put(CatchUp(shard))

        async def at_ends() -> bool:
            query = "SELECT shard, next_offset FROM cursors WHERE projection = 'ledger'"
            offsets = dict(await (await books.execute(query)).fetchall())
            return all(offsets[shard] == end for shard, end in ends.items())

        await until(at_ends, 30, f"the ledger at {ends}")


async def cut_journal(settings: Settings, offset: int) -> None:
    """Deletes the records of the shard before an offset, as an operator does."""
    topic = Topics(settings.prefix).journal
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.kafka)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic, SHARD): RecordsToDelete(before_offset=offset)})
    finally:
        await admin.close()
    async with open_reader(settings.kafka, topic) as reader:
        assert await reader.beginning(SHARD) == offset > 0


# -- damage --------------------------------------------------------------------------------------------------


def second(folder: Path) -> Path:
    return sorted(folder.glob("day=*/shard=*/*.parquet"))[1]


def flip(folder: Path) -> None:
    content = bytearray(second(folder).read_bytes())
    content[len(content) // 2] ^= 1
    second(folder).write_bytes(content)


def truncate(folder: Path) -> None:
    os.truncate(second(folder), second(folder).stat().st_size - 1)


def overlap(folder: Path) -> None:
    first, last = second(folder).stem.split("-")
    shutil.copy(second(folder), second(folder).with_name(f"{first}-{int(last) - 1:015d}.parquet"))


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def without_texts(folder: Path) -> None:
    """A file that was rewritten, with its hash in the manifest."""
    path = second(folder)
    table = parquet.read_table(path, partitioning=None)
    place = table.schema.get_field_index("body")
    field = table.schema.field(place).with_nullable(True)
    parquet.write_table(table.set_column(place, field, pyarrow.nulls(len(table), field.type)), path)
    content = path.read_bytes()
    edit(lambda one: one["files"][1].update(sha256=sha256(content).hexdigest(), bytes=len(content)))(folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], Sequence[str]]] = {
    "a flipped byte": (flip, ("{second}", f"shard {SHARD}, seq ", "other bytes")),
    "lines without a text": (without_texts, ("{second}", f"shard {SHARD}, seq ", "lines without a text")),
    "a missing file": (lambda folder: second(folder).unlink(), ("{second}", f"shard {SHARD}, seq ")),
    "a truncated file": (truncate, ("{second}", f"shard {SHARD}, seq ")),
    "an overlap": (overlap, ("does not name this file", f"shard {SHARD}, from seq ")),
    "a file left out": (edit(lambda one: one["files"].pop(1)), (f"of shard {SHARD}", "one is missing")),
    "a file twice": (edit(lambda one: one["files"].insert(1, one["files"][1])), ("files overlap",)),
    "the last file left out": (edit(lambda one: one["files"].pop()), (f"shard {SHARD} ends at seq",)),
    "another hash": (
        edit(lambda one: one["files"][1].update(head="0" * 64)), ("does not follow the file before it",)
    ),
    "another system": (edit(lambda one: one.update(journal="0" * 32)), ("belongs to another system",)),
    "another prefix": (edit(lambda one: one.update(prefix="x")), ("belongs to another system",)),
    "a path": (edit(lambda one: one["files"][0].update(day="../..")), ("cannot be a file of this archive",)),
    "a newer format": (edit(lambda one: one.update(format=2)), ("format 2",)),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), ("manifest.json",)),
    "half a manifest": (
        lambda folder: os.truncate(folder / "manifest.json", 300), ("manifest.json: it is not a manifest",)
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", DAMAGES)
async def test_a_damaged_archive_is_refused(archived: Archived, name: str, tmp_path: Path) -> None:
    """By a replay, before it prints a line of the damaged file; and the archive is not changed."""
    damage, expected = DAMAGES[name]
    folder = tmp_path / "archive"
    shutil.copytree(archived.folder, folder)
    file = second(folder)
    damage(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    words = ("--source", "archive", "--archive", str(folder))
    verbs: list[tuple[str, ...]] = [("replay", "--into", "-", *words)]
    if name in ("a flipped byte", "lines without a text"):
        verbs.append(("rebuild", "ledger", "--from", "archive", "--archive", str(folder)))
        verbs.append(("verify-archive", str(folder)))
    else:
        verbs.append(("export", str(folder)))
    for verb in verbs:
        done = grabstream(*verb, **env_of(archived.settings))
        assert (done.returncode, "Traceback" in done.stderr) == (1, False), (verb, done.stderr)
        for text in expected:
            if verb[0] != "export" or "manifest" not in name:
                assert text.format(second=file) in done.stderr.replace("\n", ""), (verb, done.stderr)
        if verb[0] == "replay":
            printed = done.stdout.encode().splitlines()
            assert printed == archived.lines[: len(printed)]
            assert len(printed) < len(archived.lines)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("replay", "--into", "-", "--source", "archive"), "name it with --archive"),
        (("replay", "--into", "-", "--archive", "."), "--archive is only for --source archive"),
        (("rebuild", "ledger", "--from", "archive"), "name it with --archive"),
        (("rebuild", "ledger", "--archive", "."), "--archive is only for --from archive"),
        (("export", "x", "--shard", "8"), "--shard 8: the system has 8 shards"),
        (("export", "s3://"), "is not an address: write s3://bucket/prefix"),
        (("export", "s3://bucket/a//b"), "single / between them"),
        (
            ("replay", "--into", "-", "--source", "archive", "--archive", "s3://B_"),
            "write s3://bucket/prefix",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(words: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    done = grabstream(*words, folder=tmp_path)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_an_export_into_a_folder_with_other_files_is_refused(archived: Archived, tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    done = grabstream("export", str(tmp_path), **env_of(archived.settings))
    assert (done.returncode, "letters.txt" in done.stderr) == (1, True), done.stderr
    assert (tmp_path / "letters.txt").read_text() == "dear"
    done = grabstream("export", "/proc/nowhere", **env_of(archived.settings))
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
