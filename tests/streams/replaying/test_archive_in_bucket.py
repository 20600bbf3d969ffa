"""Archives in an S3-compatible store, a separate server process: an export loses and doubles no line, also
when it is killed at any step, or another one begins meanwhile; archives are read as those in folders; damage
and refusals are named.
"""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import SecretStr

from grabstream import Settings, read_lines_sync
from grabstream.models.calendar import DAY_MS
from grabstream.models.journal import GENESIS, chain
from grabstream.settings import child_environment
from grabstream.streams.buckets import StoreAway, StoreError, StoreLogin, StoreRefused
from grabstream.streams.history.archive import ArchiveSystem, BadArchive
from grabstream.streams.history.stores import open_store
from grabstream.streams.replaying.archive_sink import exporting
from tests.conftest import wait_until
from tests.streams.replaying.test_archive import (
    STEPS,
    Archived,
    archived,
    bodies_or_none,
    cut_journal,
    lines_of,
    state_of,
)
from tests.support.command_line import env_of, grabstream
from tests.support.object_stores import ObjectStore, env_of_store, proxy, running_store, silent_server
from tests.support.projecting import SHARD
from tests.support.random_history import NOW, journal_history, project, random_history

__all__ = ["archived"]

#: By day, an export stops where its file is there and does not count yet.
SOME_STEPS = [
    step if step == "export.renamed" else pytest.param(step, marks=pytest.mark.nightly) for step in STEPS
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with running_store(tmp_path_factory.mktemp("store")) as running:
        yield running


class Stored(NamedTuple):
    """An archive at an address, and what to call it by."""

    store: ObjectStore
    settings: Settings
    bucket: str
    folder: Path

    @property
    def address(self) -> str:
        return f"s3://{self.bucket}/of/sale"

    def run(
        self, *words: str, login: StoreLogin | None = None, **settings: str
    ) -> "subprocess.CompletedProcess[str]":
        given = env_of(self.settings) | env_of_store(login or self.store.login)
        return grabstream(*words, **(given | settings))

    def export(self, *words: str, verb: str = "export", **settings: str) -> dict[str, Any]:
        done = self.run(verb, self.address, "--json", *words, **settings)
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def bodies(self) -> list[bytes]:
        """The lines of all files, as a tool reads them that does not know the manifest."""
        folder = self.folder / os.urandom(4).hex()
        folder.mkdir()
        return bodies_or_none(self.store.download(self.bucket, "of/sale", folder))

    def read(self) -> Iterator[bytes]:
        """The lines, as a program reads them."""
        login = self.store.login
        changed = {
            "s3_endpoint": login.endpoint, "s3_region": login.region, "s3_access_key": login.access_key,
            "s3_secret_key": SecretStr(login.secret_key),
        }  # fmt: skip
        settings = self.settings.model_copy(update=changed)
        for line in read_lines_sync(settings, shard=SHARD, source="archive", archive=self.address):
            yield line.text

    def files(self) -> list[str]:
        return [key for key in self.store.keys(self.bucket) if key.endswith(".parquet")]


@pytest.fixture
def stored(store: ObjectStore, archived: Archived, tmp_path: Path) -> Stored:
    return Stored(store, archived.settings, store.bucket(), tmp_path)


# -- exporting -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("step", SOME_STEPS)
def test_an_export_killed_at_a_step_loses_and_doubles_no_line(
    stored: Stored, archived: Archived, step: str
) -> None:
    for times in (1, 2):
        done = stored.run("export", stored.address, fail_at=f"{step}:{times}")
        assert done.returncode == -signal.SIGKILL, done.stderr
        there = stored.bodies()
        assert there == archived.lines[: len(there)]
        assert stored.export(verb="verify-archive")["checked"]
    report = stored.export()
    assert stored.bodies() == archived.lines
    assert report["shards"][SHARD]["head"] == chain(GENESIS, archived.lines)[-1].hex()
    assert stored.export(verb="verify-archive")["lines"] == len(archived.lines)
    assert stored.export()["files"] == 0


@pytest.mark.long
@pytest.mark.parametrize("step", SOME_STEPS)
def test_an_export_that_slept_while_another_one_ran_changes_nothing(
    stored: Stored, archived: Archived, step: str
) -> None:
    """It ends with a message; no file of it stays."""
    environment = child_environment(
        **env_of(stored.settings), **env_of_store(stored.store.login), fail_at=f"{step}:2:stop"
    )
    command = [sys.executable, "-m", "grabstream.ops.cli", "export", stored.address]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: state_of(process.pid) == "T", 60, "the export stops itself")
    try:
        stored.export()
    finally:
        os.kill(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=120)
    assert (process.returncode, "another process exports into s3://" in said) == (1, True), said
    assert stored.bodies() == archived.lines
    assert stored.export(verb="verify-archive")["lines"] == len(archived.lines)


@pytest.mark.nightly
def test_an_export_stops_on_ctrl_c_and_continues(stored: Stored, archived: Archived) -> None:
    environment = child_environment(
        **env_of(stored.settings), **env_of_store(stored.store.login), fail_at="export.committed:2:stop"
    )
    command = [sys.executable, "-m", "grabstream.ops.cli", "export", stored.address]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: state_of(process.pid) == "T", 60, "the export stops itself")
    process.send_signal(signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=240)
    assert (process.returncode, "repeat the command to continue" in said) == (130, True), said
    stored.export()
    assert stored.bodies() == archived.lines


@pytest.mark.nightly
def test_an_answer_that_is_lost_is_not_taken_for_another_export(stored: Stored, archived: Archived) -> None:
    """The client repeats the PUT of the manifest, and the store refuses the second one."""
    lost: list[str] = []

    def drops(method: str, path: str, status: int) -> bool:
        if method == "PUT" and path.endswith("/manifest.json") and status == 200 and len(lost) < 3:
            lost.append(path)
            return len(lost) % 2 == 1
        return False

    with proxy(stored.store, drops) as endpoint:
        login = stored.store.login._replace(endpoint=endpoint)
        done = stored.run("export", stored.address, login=login)
    assert (done.returncode, len(lost)) == (0, 3), done.stderr
    assert stored.bodies() == archived.lines


@pytest.mark.long
async def test_read_models_are_rebuilt_from_a_bucket(
    system: Settings, store: ObjectStore, tmp_path: Path
) -> None:
    """After the journal was cut, equal in every row; a replay and a program read the same lines."""
    stored = Stored(store, system, store.bucket(), tmp_path)
    history = random_history(7, 200, NOW - 1_000 * DAY_MS)
    lines = lines_of(history)
    part = len(lines) * 2 // 3
    await journal_history(system, lines[:part], random.Random(1))
    would = stored.export("--dry-run")
    assert (would["to_read"] > 0, store.keys(stored.bucket)) == (True, [])
    stored.export()
    [manifest] = [key for key in store.keys(stored.bucket) if key.endswith("manifest.json")]
    content = store.client.get_object(Bucket=stored.bucket, Key=manifest)["Body"].read()
    await project(system, history, random.Random(2), lines)
    await cut_journal(system, json.loads(content)["ends"][str(SHARD)]["next_offset"])
    words = ("--archive", stored.address)
    done = stored.run("replay", "--into", "-", "--source", "archive", *words)
    assert done.stdout.encode().splitlines() == lines, done.stderr
    for name in ("ledger", "balances", "audit"):
        done = stored.run("rebuild", name, "--from", "archive", *words, "--json", login=store.reader)
        assert done.returncode == 0, done.stdout + done.stderr
        differences = json.loads(done.stdout)["difference"]
        assert differences
        assert not any(table["missing"] or table["extra"] or table["rows_changed"] for table in differences)
    assert await asyncio.to_thread(lambda: list(stored.read())) == lines
    assert stored.export("--source", "audit")["lines"] == len(lines) - part
    assert stored.bodies() == lines


@pytest.mark.nightly
def test_an_archive_of_a_folder_continues_in_a_bucket(stored: Stored, archived: Archived) -> None:
    """It was copied there; and one of a bucket is an archive in a folder."""
    for path in archived.folder.rglob("*"):
        if path.is_file():
            key = f"of/sale/{path.relative_to(archived.folder)}"
            stored.store.client.put_object(Bucket=stored.bucket, Key=key, Body=path.read_bytes())
    assert stored.export()["lines"] == 0
    assert stored.export(verb="verify-archive")["lines"] == len(archived.lines)
    folder = stored.store.download(stored.bucket, "of/sale", stored.folder / "copy")
    assert stored.run("verify-archive", str(folder)).returncode == 0


# -- damage and refusals -------------------------------------------------------------------------------------


class Damage(NamedTuple):
    """What is done to an object, and the error."""

    change: Callable[[Any, str, str], object]
    says: str


def flip(client: Any, bucket: str, key: str) -> None:
    content = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    content[len(content) // 2] ^= 1
    client.put_object(Bucket=bucket, Key=key, Body=bytes(content))


def cut(client: Any, bucket: str, key: str) -> None:
    content = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    client.put_object(Bucket=bucket, Key=key, Body=content[:-1])


def double(client: Any, bucket: str, key: str) -> None:
    other = key.replace(".parquet", "")[:-16] + "0123456789abcdef.parquet"
    client.copy_object(Bucket=bucket, Key=other, CopySource={"Bucket": bucket, "Key": key})


DAMAGES = {
    "a flipped byte": Damage(flip, "other bytes"),
    "a truncated object": Damage(cut, "bytes were exported, but it has"),
    "a missing object": Damage(
        lambda client, bucket, key: client.delete_object(Bucket=bucket, Key=key), "there is no such file"
    ),
    "an object of a lost export": Damage(double, "Export again, which removes it"),
}


@pytest.mark.long
def test_a_damaged_archive_is_refused(stored: Stored, archived: Archived) -> None:
    """Before a line of the damaged file is handed on; the message names the object."""
    stored.export()
    key = stored.files()[1]
    whole = stored.store.client.get_object(Bucket=stored.bucket, Key=key)["Body"].read()
    for name, damage in DAMAGES.items():
        damage.change(stored.store.client, stored.bucket, key)
        read: list[bytes] = []
        with pytest.raises(BadArchive, match=re.escape(damage.says)) as raised:
            read += stored.read()
        # The other object of the last one has another writer in its name.
        assert f"s3://{stored.bucket}/{key[: len(key) - 24]}" in str(raised.value), name
        assert read == archived.lines[: len(read)]
        stored.store.client.put_object(Bucket=stored.bucket, Key=key, Body=whole)
    # The last one is repaired by an export.
    assert stored.export()["lines"] == 0
    assert stored.bodies() == archived.lines
    assert list(stored.read()) == archived.lines
    manifest = "of/sale/manifest.json"
    cut(stored.store.client, stored.bucket, manifest)
    with pytest.raises(BadArchive, match="is not a manifest"):
        list(stored.read())
    stored.store.client.delete_object(Bucket=stored.bucket, Key=manifest)
    with pytest.raises(BadArchive, match="there is no such object"):
        list(stored.read())
    done = stored.run("export", stored.address)
    assert (done.returncode, "but no manifest.json" in done.stderr) == (1, True), done.stderr


async def begin(stored: Stored, login: StoreLogin, address: str) -> None:
    """Begins an export."""
    async with exporting(open_store(address, login), ArchiveSystem(stored.settings.prefix, "journal", 8)):
        pass


@pytest.mark.long
async def test_refusals_of_a_store_are_named(stored: Stored) -> None:
    """With the setting, the bucket or the right."""
    login = stored.store.login
    await begin(stored, login, stored.address)
    nowhere = f"s3://{stored.bucket}-x/of/sale"
    cases: tuple[tuple[StoreLogin, str, type[StoreError], tuple[str, ...]], ...] = (
        (login, nowhere, StoreRefused, (f"the bucket {stored.bucket}-x does not exist", "GRAB_S3_ENDPOINT")),
        (
            login._replace(secret_key="x" * 40),
            stored.address,
            StoreAway,
            ("credentials", "GRAB_S3_SECRET_KEY"),
        ),
        (
            login._replace(access_key="A" * 20),
            stored.address,
            StoreAway,
            ("credentials", "GRAB_S3_ACCESS_KEY"),
        ),
        (stored.store.reader, stored.address, StoreRefused, ("access is denied", "s3:PutObject")),
        (stored.store.writer, stored.address, StoreRefused, ("access is denied", "s3:GetObject")),
    )
    for given, address, kind, says in cases:
        with pytest.raises(kind) as raised:
            await begin(stored, given, address)
        assert all(word in str(raised.value) for word in says), (says, raised.value)
        assert "x" * 40 not in str(raised.value)
    assert login.secret_key not in repr(open_store(stored.address, login))
    with silent_server() as endpoint, pytest.raises(StoreAway, match="GRAB_S3_TIMEOUT_MS"):
        await begin(stored, login._replace(endpoint=endpoint, timeout_ms=100), stored.address)


@pytest.mark.long
def test_exit_codes_are_those_of_the_page(stored: Stored) -> None:
    login = stored.store.login
    words = ("replay", "--into", "-", "--source", "archive", "--archive")
    done = stored.run(*words, f"s3://{stored.bucket}-x/of/sale")
    assert (done.returncode, "does not exist" in done.stderr) == (1, True), done.stderr
    away = login._replace(endpoint="http://127.0.0.1:9")
    done = stored.run("export", stored.address, login=away)
    assert (done.returncode, "127.0.0.1:9 cannot be reached" in done.stderr) == (3, True), done.stderr
    done = stored.run("export", stored.address, s3_secret_key="")
    assert (done.returncode, "set both, or neither" in done.stderr) == (2, True), done.stderr
