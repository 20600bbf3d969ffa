"""The time machine: what a live system showed at a moment, shown again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from grabstream.ops.commands.read.at import at as at_verb
from grabstream.ops.formats.moments import BadMoment, parse_time, show_time
from grabstream.ops.rehearsal.run import open_books
from grabstream.ops.settings import child_environment
from grabstream.projections.database.sessions import system_name
from grabstream.streams.replaying import replay_schema
from grabstream.streams.replaying.replay_schema import Definition, open_schema, temporary_schema
from grabstream.streams.replaying.selection import Wanted
from tests.conftest import until
from tests.streams.replaying.histories import WAITS_FOR_US, System, schemas, tables
from tests.support.command_line import env_of, grabstream


def at(system: System, *words: str) -> "subprocess.CompletedProcess[str]":
    return grabstream("at", *words, **env_of(system.settings))


async def test_it_shows_what_was_recorded_then(told: System) -> None:
    for source in ("journal", "audit"):
        done = at(told, show_time(told.at_ms), "--json", "--source", source)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert {one["shard"]: one["seq"] for one in found["shards"] if one["seq"]} == told.places
        assert [tuple(one.values()) for one in sorted(found["offers"], key=lambda one: one["offer"])] == [
            tuple(row) for row in told.then["offers"]
        ]
        assert sorted((one["offer"], one["grab"], one["held"]) for one in found["holds"]) == [
            (row[0], row[1], row[11]) for row in told.then["grabs"] if row[11] > 0
        ]
        balances = sorted(
            (one["user_id"], one["asset"], one["available"], one["held"]) for one in found["balances"]
        )
        assert balances == [row for row in told.then["balances"] if row[2] or row[3]]
    # A millisecond before, the last event had not happened.
    last = told.histories[2].events[told.places[2] - 1]
    found = json.loads(at(told, str(last.at - 1), "--json").stdout)
    assert {one["shard"]: one["seq"] for one in found["shards"]}[2] == sum(
        event.at < last.at for event in told.histories[2].events
    )
    assert await schemas(told.settings, f"{told.settings.schema_}_") == []


async def test_one_offer_and_one_user(told: System) -> None:
    envelope = told.histories[2].envelope
    done = at(told, show_time(told.at_ms), "--offer", envelope, "--json")
    [found] = json.loads(done.stdout)["details"]
    [expected] = [row for row in told.then["offers"] if row[0] == envelope]
    assert tuple(found["offer"].values()) == expected
    grabs = [row for row in told.then["grabs"] if row[0] == envelope]
    assert sorted((one["grab"], one["amount"]) for one in found["grabs"]) == sorted(
        (row[1], row[5]) for row in grabs
    )
    assert found["luckiest"]["amount"] == max(row[5] for row in grabs)
    found = json.loads(at(told, str(told.at_ms), "--user", "u1", "--json").stdout)
    assert sorted((one["offer"], one["grab"], one["state"]) for one in found["grabs"]) == [
        (row[0], row[1], row[3]) for row in told.then["grabs"] if row[2] == "u1"
    ]
    assert sorted((one["asset"], one["available"], one["held"]) for one in found["balances"]) == [
        row[1:] for row in told.then["balances"] if row[0] == "u1" and (row[2] or row[3])
    ]
    words = at(told, show_time(told.at_ms), "--offer", envelope, "--offer", told.histories[2].names[0]).stdout
    assert "The luckiest" in words
    assert "9,999" in words
    assert "u1" in at(told, show_time(told.at_ms), "--user", "u1").stdout
    assert "Balances (at most 3)" in at(told, show_time(told.at_ms), "--limit", "3").stdout


async def test_kept(told: System) -> None:
    schema = told.into("kept")
    assert at(told, show_time(told.at_ms), "--keep", schema).returncode == 0
    assert await tables(told.settings, schema) == told.then
    # Asked again it is only looked at.
    assert json.loads(at(told, str(told.at_ms), "--keep", schema, "--json").stdout)["balances"]
    assert await tables(told.settings, schema) == told.then


async def test_times_before_everything(told: System) -> None:
    done = at(told, "2020-01-01")
    assert (
        done.returncode,
        f"first event is of {show_time(told.histories[2].events[0].at)}" in done.stderr,
    ) == (1, True), done.stderr
    done = at(told, show_time(told.at_ms), "--offer", "never-heard-of")
    assert (done.returncode, "no offer 'never-heard-of'" in done.stderr) == (1, True), done.stderr


async def test_ctrl_c_leaves_nothing(told: System) -> None:
    """Stopped with its schema made and its reading begun, it takes the schema away. What a kill -9 left goes
    at the next call.
    """
    settings, left = told.settings, f"{told.settings.schema_}__at_"
    command = [sys.executable, "-m", "grabstream.ops.cli", "at", show_time(told.at_ms), "--source", "audit"]
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

            await until(waits, 30, "its reading")
            assert len(await schemas(settings, left)) == 1
            running.send_signal(number)
            await until(lambda running=running: running.poll() is not None, 20, "the end")
        assert running.returncode == (128 + number if number != signal.SIGKILL else -number)
        assert len(await schemas(settings, left)) == remaining
    assert at(told, show_time(told.at_ms)).returncode == 0
    assert await schemas(settings, left) == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("2999-01-01",), "after 2099"), (("2099-01-01",), "in the future"), (("noon",), "is not a time"),
        (("5",), "before 1973"),
        (("2026-01-01", "--keep", "A B"), "no name of a schema"), (("2026-01-01", "--user", "a/b"), "--user"),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_named(words: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(at_verb, list(words))
    assert done.exit_code == 2, done.output
    assert reason in " ".join(done.output.split())


def test_times_as_people_write_them() -> None:
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


async def test_two_at_once_and_names_like_its_own(told: System) -> None:
    """Nobody drops what another one looks into, nor what was to be kept; nobody goes on with what another one
    looks into.
    """
    settings = told.settings
    start = f"{settings.schema_}__at_"
    kept, definition = f"{start}0123abcd", Definition(settings.prefix, "journal", (2,), Wanted(), {})
    assert at(told, show_time(told.at_ms), "--keep", kept).returncode == 0
    async with temporary_schema(settings.postgres, settings.schema_) as looked_into:
        async with open_schema(
            settings.postgres, looked_into, settings.schema_, settings.shards, definition, temporary=True
        ):
            pass
        together = [asyncio.to_thread(at, told, show_time(told.at_ms), "--json") for _ in range(4)]
        for done in await asyncio.gather(*together):
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["balances"]
        assert await schemas(settings, start) == sorted((kept, looked_into))
        done = at(told, show_time(told.at_ms), "--keep", looked_into)
        told_who = (
            f"schema {looked_into} is being written by another replay: "
            f"{system_name(settings.schema_)}: process {os.getpid()} on "
        )
        assert (done.returncode, told_who in done.stderr) == (1, True), done.stderr
    assert await schemas(settings, start) == [kept]
    assert await tables(settings, kept) == told.then


async def test_a_schema_that_is_looked_at_is_left_to_the_next(
    told: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump of it holds up neither this `at` nor the next one; and who keeps what was left has it."""
    settings, start = told.settings, f"{told.settings.schema_}__at_"
    monkeypatch.setattr(replay_schema, "DROP_LOCK_MS", 100)
    definition = Definition(settings.prefix, "journal", tuple(range(settings.shards)), Wanted(), {})
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
