"""`grabstream at`: it shows what the read models showed at an earlier time."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pytest
from click.testing import CliRunner

from grabstream.ops.commands.read.at import at as at_verb
from grabstream.ops.formats.moments import BadMoment, parse_time, show_time
from grabstream.projections.database.sessions import system_name
from grabstream.settings import child_environment
from grabstream.streams.replaying import replay_schema
from grabstream.streams.replaying.replay_schema import ReplayDefinition, open_schema, temporary_schema
from grabstream.streams.replaying.selection import Wanted
from grabstream.workshop.rehearsal.run import open_books
from tests.conftest import until
from tests.streams.replaying.histories import WAITS_FOR_US, RecordedSystem, schemas, tables
from tests.support.command_line import env_of, grabstream


def at(system: RecordedSystem, *words: str) -> "subprocess.CompletedProcess[str]":
    return grabstream("at", *words, **env_of(system.settings))


def in_json(row: Sequence[Any]) -> tuple[Any, ...]:
    """A row as `--json` has it: times as texts."""
    return tuple(str(value) if isinstance(value, datetime) else value for value in row)


async def test_at_shows_what_the_read_models_showed_then(recorded: RecordedSystem) -> None:
    for source in ("journal", "audit"):
        done = at(recorded, show_time(recorded.at_ms), "--json", "--source", source)
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert {shard["shard"]: shard["seq"] for shard in shown["shards"] if shard["seq"]} == recorded.seqs
        offers = sorted(shown["offers"], key=lambda offer: offer["offer"])
        assert [tuple(offer.values()) for offer in offers] == list(map(in_json, recorded.then["offers"]))
        assert sorted((hold["offer"], hold["grab"], hold["held"]) for hold in shown["holds"]) == [
            (row[0], row[1], row[11]) for row in recorded.then["grabs"] if row[11] > 0
        ]
        balances = sorted(
            (balance["user_id"], balance["asset"], balance["available"], balance["held"])
            for balance in shown["balances"]
        )
        assert balances == [row for row in recorded.then["balances"] if row[2] or row[3]]
    # A millisecond earlier, the last event had not happened.
    last = recorded.histories[2].events[recorded.seqs[2] - 1]
    shown = json.loads(at(recorded, str(last.at - 1), "--json").stdout)
    assert {shard["shard"]: shard["seq"] for shard in shown["shards"]}[2] == sum(
        event.at < last.at for event in recorded.histories[2].events
    )
    assert await schemas(recorded.settings, f"{recorded.settings.schema_}_") == []


@pytest.mark.long
async def test_at_shows_one_offer_or_one_user(recorded: RecordedSystem) -> None:
    envelope = recorded.histories[2].envelope
    done = at(recorded, show_time(recorded.at_ms), "--offer", envelope, "--json")
    [details] = json.loads(done.stdout)["details"]
    [expected] = [row for row in recorded.then["offers"] if row[0] == envelope]
    assert tuple(details["offer"].values()) == in_json(expected)
    grabs = [row for row in recorded.then["grabs"] if row[0] == envelope]
    assert sorted((grab["grab"], grab["amount"]) for grab in details["grabs"]) == sorted(
        (row[1], row[5]) for row in grabs
    )
    assert details["luckiest"]["amount"] == max(row[5] for row in grabs)
    user = json.loads(at(recorded, str(recorded.at_ms), "--user", "u1", "--json").stdout)
    assert sorted((grab["offer"], grab["grab"], grab["state"]) for grab in user["grabs"]) == [
        (row[0], row[1], row[3]) for row in recorded.then["grabs"] if row[2] == "u1"
    ]
    balances = user["balances"]
    assert sorted((balance["asset"], balance["available"], balance["held"]) for balance in balances) == [
        row[1:] for row in recorded.then["balances"] if row[0] == "u1" and (row[2] or row[3])
    ]
    words = at(
        recorded, show_time(recorded.at_ms), "--offer", envelope, "--offer", recorded.histories[2].names[0]
    ).stdout
    assert "Luckiest grab" in words
    assert re.search(r"of 30 parts taken: [\d,]+\.\d\d CNY of 99\.99 CNY; left \d+ parts?, ", words)
    assert "u1" in at(recorded, show_time(recorded.at_ms), "--user", "u1").stdout
    assert "Balances (at most 3)" in at(recorded, show_time(recorded.at_ms), "--limit", "3").stdout


@pytest.mark.long
async def test_at_keeps_its_schema_on_request(recorded: RecordedSystem) -> None:
    schema = recorded.into("kept")
    assert at(recorded, show_time(recorded.at_ms), "--keep", schema).returncode == 0
    assert await tables(recorded.settings, schema) == recorded.then
    # The second call only reads the schema.
    assert json.loads(at(recorded, str(recorded.at_ms), "--keep", schema, "--json").stdout)["balances"]
    assert await tables(recorded.settings, schema) == recorded.then


@pytest.mark.long
async def test_a_time_before_the_first_event_and_an_unknown_offer_are_refused(
    recorded: RecordedSystem,
) -> None:
    done = at(recorded, "2020-01-01")
    assert (
        done.returncode,
        f"first event is of {show_time(recorded.histories[2].events[0].at)}" in done.stderr,
    ) == (1, True), done.stderr
    done = at(recorded, show_time(recorded.at_ms), "--offer", "never-heard-of")
    assert (done.returncode, "no offer 'never-heard-of'" in done.stderr) == (1, True), done.stderr


@pytest.mark.long
async def test_at_drops_its_schema_when_interrupted(recorded: RecordedSystem) -> None:
    """Interrupted after it has made its schema and begun to read, it drops the schema. The next call drops a
    schema that a kill -9 left.
    """
    settings, start = recorded.settings, f"{recorded.settings.schema_}__at_"
    command = [
        sys.executable,
        "-m",
        "grabstream.ops.cli",
        "at",
        show_time(recorded.at_ms),
        "--source",
        "audit",
    ]
    for number, remaining in ((signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        async with await open_books(settings) as books, books.transaction():
            await books.execute("LOCK TABLE audit IN ACCESS EXCLUSIVE MODE")
            running = subprocess.Popen(
                command,
                env=child_environment(**env_of(settings)),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

            async def waits(books: Any = books) -> bool:
                return await (await books.execute(WAITS_FOR_US)).fetchone() is not None

            await until(waits, 120, "the wait of its first read")
            assert len(await schemas(settings, start)) == 1
            running.send_signal(number)
            await until(lambda running=running: running.poll() is not None, 20, "the end")
        assert running.returncode == (128 + number if number != signal.SIGKILL else -number)
        assert len(await schemas(settings, start)) == remaining
    assert at(recorded, show_time(recorded.at_ms)).returncode == 0
    assert await schemas(settings, start) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("2999-01-01",), "after 2099"), (("2099-01-01",), "in the future"), (("noon",), "is not a time"),
        (("5",), "before 1973"),
        (("2026-01-01", "--keep", "A B"), "cannot name a schema"),
        (("2026-01-01", "--user", "a/b"), "--user"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(words: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(at_verb, list(words))
    assert done.exit_code == 2, done.output
    assert reason in " ".join(done.output.split())


def test_times_are_parsed_in_several_forms() -> None:
    moment = 1_794_391_203_250
    for text in (
        "2026-11-11 10:00:03.250",
        "2026-11-11T10:00:03.250Z",
        "2026-11-11 18:00:03.250+08:00",
        str(moment),
        show_time(moment),
    ):
        assert parse_time(text) == moment, text
    assert parse_time("2026-11-11") == moment - 36_003_250
    with pytest.raises(BadMoment):
        parse_time("11/11/2026")


@pytest.mark.long
async def test_at_leaves_schemas_in_use_and_kept_schemas_alone(recorded: RecordedSystem) -> None:
    """A call drops neither the schema of another running call nor a schema that was kept. A schema in use
    cannot be kept by another call.
    """
    settings = recorded.settings
    start = f"{settings.schema_}__at_"
    kept, definition = f"{start}0123abcd", ReplayDefinition(settings.prefix, "journal", (2,), Wanted(), {})
    assert at(recorded, show_time(recorded.at_ms), "--keep", kept).returncode == 0
    async with temporary_schema(settings.postgres, settings.schema_) as in_use:
        async with open_schema(
            settings.postgres, in_use, settings.schema_, settings.shards, definition, temporary=True
        ):
            pass
        together = [asyncio.to_thread(at, recorded, show_time(recorded.at_ms), "--json") for _ in range(4)]
        for done in await asyncio.gather(*together):
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["balances"]
        assert await schemas(settings, start) == sorted((kept, in_use))
        done = at(recorded, show_time(recorded.at_ms), "--keep", in_use)
        message = (
            f"schema {in_use} is being written by another replay: "
            f"{system_name(settings.schema_)}: process {os.getpid()} on "
        )
        assert (done.returncode, message in done.stderr) == (1, True), done.stderr
    assert await schemas(settings, start) == [kept]
    assert await tables(settings, kept) == recorded.then


async def test_a_schema_that_is_being_dumped_is_not_dropped(
    recorded: RecordedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump of the schema delays neither this call of `at` nor the next one; a later call may keep the
    schema that was left.
    """
    settings, start = recorded.settings, f"{recorded.settings.schema_}__at_"
    monkeypatch.setattr(replay_schema, "DROP_LOCK_MS", 100)
    definition = ReplayDefinition(settings.prefix, "journal", tuple(range(settings.shards)), Wanted(), {})
    async with await open_books(settings) as dump, dump.transaction():
        async with temporary_schema(settings.postgres, settings.schema_) as schema:
            async with open_schema(
                settings.postgres, schema, settings.schema_, settings.shards, definition, temporary=True
            ):
                pass
            await dump.execute(f"LOCK TABLE {schema}.audit IN ACCESS SHARE MODE".encode())
        assert await schemas(settings, start) == [schema]
        async with temporary_schema(settings.postgres, settings.schema_):
            pass
        assert await schemas(settings, start) == [schema]
    async with open_schema(settings.postgres, schema, settings.schema_, settings.shards, definition):
        pass
    async with temporary_schema(settings.postgres, settings.schema_):
        assert await schemas(settings, start) == [schema]
