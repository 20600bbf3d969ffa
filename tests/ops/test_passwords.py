"""Passwords: servers that require them, and no output, error or argument of any program that shows one."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, LiteralString, NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import psycopg
import pytest
import redis as sync_redis
from pydantic import SecretStr

from grabstream.crypto.sealing import new_seal_key
from grabstream.ops.cli import VERBS
from grabstream.settings import Settings, child_environment
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import Postgres, Redis
from tests.conftest import until
from tests.support import backup_recipes
from tests.support.command_line import env_of, grabstream

#: No output may contain either; the second is one that the servers refuse.
PASSWORD: Final = "hunter2-Passw0rd"
WRONG: Final = "hunter2-Wr0ng"
#: Every verb, with arguments that a system without offers accepts. `up` and `down` are those of this machine.
WORDS: Final = {
    "open": "open OFFERS --format csv", "amend": "amend o --set total=9", "load": "load o --codes FILE",
    "pause": "pause o",
    "resume": "resume o", "close": "close o", "adjust": "adjust --help", "grants": "grants",
    "grab": "grab o u",
    "confirm": "confirm o g --payment p --paid 5 --currency CNY", "release": "release o g",
    "extend": "extend o g", "return": "return o g --reason r", "redeem": "redeem o g --order r",
    "unredeem": "unredeem o g --order r", "ticket": "ticket o u --key-id k --expires 1h",
    "approve": "approve --help",
    "offers": "offers", "show": "show o",
    "why": "why u o", "at": "at 2026-01-01T00:00:00Z", "verify-fair": "verify-fair o",
    "checkpoint": "checkpoint", "prove": "prove o u g --against nothing.json",
    "verify-proof": "verify-proof nothing.json",
    "result": "result", "whatif": "whatif WHATIF", "status": "status",
    "init": "init", "worker": "worker --roles dance", "gateway": "gateway --port 0 --host 192.0.2.1",
    "keys": "keys list", "doctor": "doctor", "verify": "verify",
    "dismiss": "dismiss 1 --reason e --operator o",
    "set-aside": "set-aside ledger 0 --dry-run", "retry": "retry ledger 0", "webhooks": "webhooks list",
    "config": "config", "schemas": "schemas", "reseal": "reseal", "completion": "completion bash",
    "forget": "forget u --by x",
    "rebuild": "rebuild ledger", "replay": "replay", "export": "export archive --dry-run",
    "verify-archive": "verify-archive archive",
    "dump": "dump --json",
    "follow": "follow json:loads",
    "rehearse": "rehearse --help", "fake-payments": "fake-payments --help",
}  # fmt: skip
ELSEWHERE: Final = {"up", "down"}


class Locked(NamedTuple):
    """Servers that want a password of the user `app`."""

    redis: int
    postgres: int

    def settings(self, common: Settings, password: str) -> Settings:
        return common.model_copy(
            update={
                "redis_url": f"redis://app:{password}@127.0.0.1:{self.redis}/0",
                "postgres": f"postgresql://app:{password}@127.0.0.1:{self.postgres}/grabstream",
                "seal_keys": SecretStr(new_seal_key()),
            }
        )

    def refuse_sessions(self) -> None:
        """PostgreSQL ends all sessions of the user, and refuses new ones."""
        self._execute("ALTER ROLE app NOLOGIN")
        self._execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'")

    def admit_sessions(self) -> None:
        """PostgreSQL admits the user again."""
        self._execute("ALTER ROLE app LOGIN")

    def _execute(self, statement: LiteralString) -> None:
        address = f"postgresql://grabstream@127.0.0.1:{self.postgres}/grabstream"
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(statement)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("locked")
    ports = Locked(*free_ports(2))
    redis, postgres = Redis(folder, ports.redis), Postgres(folder, ports.postgres)
    with contextlib.ExitStack() as stack:
        for server in (redis, postgres):
            server.prepare(lambda line: None)
            stack.callback(server.remove) if isinstance(server, Postgres) else None
            stack.callback(server.kill)
            server.start()
        with sync_redis.Redis(port=ports.redis) as client:
            client.execute_command("ACL", "SETUSER", "app", "on", f">{PASSWORD}", "~*", "&*", "+@all")
            client.execute_command("ACL", "SETUSER", "default", "off")
        access = postgres.data / "pg_hba.conf"
        access.write_text(f"host all app 127.0.0.1/32 scram-sha-256\n{access.read_text()}")
        address = f"postgresql://grabstream@127.0.0.1:{ports.postgres}/grabstream"
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE app LOGIN PASSWORD '{PASSWORD}'".encode())
            connection.execute("GRANT CREATE, CONNECT, TEMPORARY ON DATABASE grabstream TO app")
            connection.execute("SELECT pg_reload_conf()")
        yield ports


class Arguments:
    """Watches the arguments of all processes of this machine, which every user may read."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Arguments":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            for name in os.listdir("/proc"):
                with contextlib.suppress(OSError):
                    if name.isdigit():
                        self.seen.add(Path("/proc", name, "cmdline").read_text(errors="replace"))

    def shown(self) -> list[str]:
        return [line for line in self.seen if PASSWORD in line or WRONG in line]


def assert_masked(what: str, text: str) -> None:
    for secret in (PASSWORD, WRONG):
        assert secret not in text, f"{what} shows a password:\n{text}"


def run_verb(verb: str, settings: Settings, folder: Path, code: set[int]) -> str:
    """Runs a verb, with details in the log; returns what it printed."""
    (folder / "FILE").write_text("CODE\n")
    (folder / "OFFERS").write_text("offer,kind,issuer,total\no,coupon,shop,9\n")
    (folder / "WHATIF").write_text("offer: o\n")
    words = WORDS[verb].split()
    environment = {**env_of(settings), "shards": str(settings.shards), "patience_ms": "500"}
    done = grabstream("-v", *words, folder=folder, **environment)
    said = done.stdout + done.stderr
    assert_masked(verb, said)
    assert done.returncode in code, (verb, done.returncode, said)
    assert "Traceback" not in said, said
    return said


def test_the_table_has_every_verb() -> None:
    assert set(WORDS) | ELSEWHERE == set(VERBS)


ADDRESS: Final = "postgresql://app@h:1/d"


@pytest.mark.parametrize(
    ("address", "has_password"),
    [
        (ADDRESS, False),
        ("postgresql://app@h:1/d?application_name=a:b@c", False),
        ("host=h port=1 user=app dbname=d", False),
        ("postgresql://app@h/d?passfile=/home/a:b@c", False),
        (f"postgresql://app:{PASSWORD}@h:1/d", True),
        (f"postgresql://app:{PASSWORD}@h", True),
        (f"postgresql://app@h/d?password={PASSWORD}", True),
        (f"{ADDRESS}?sslpassword={PASSWORD}", True),
        (f"host=h user=app password={PASSWORD}", True),
        (f"host=h user=app password = '{PASSWORD}'", True),
    ],
)
def test_backups_begin_only_without_a_password_in_the_address(
    address: str, has_password: bool, tmp_path: Path
) -> None:
    settings = Settings(postgres=address, seal_keys=SecretStr(new_seal_key()))
    done = backup_recipes.execute("", settings, tmp_path)
    assert done.returncode == int(has_password), done.stderr
    assert ("PGPASSFILE" in done.stderr) == has_password
    assert_masked("the page of backups", done.stdout + done.stderr)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_backup_or_restore_shows_a_password(locked: Locked, settings: Settings, tmp_path: Path) -> None:
    """Every program that the commands of docs/backup.md start is in front of one that notes its arguments."""
    system = locked.settings(settings, PASSWORD)
    noted, shims = tmp_path / "noted", tmp_path / "shims"
    shims.mkdir()
    for name in ("pg_dump", "pg_restore", "psql"):
        shim = shims / name
        shim.write_text(f'#!/bin/sh\necho {name} "$@" >> {noted}\nexec {shutil.which(name)} "$@"\n')
        shim.chmod(0o755)
    path = f"{shims}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    run_verb("init", system, tmp_path, {0})
    for name in ("backup", "restore", "anew"):
        # As it is in the settings of workers; then as the page says.
        backup_recipes.execute(name, system, tmp_path, PATH=path)
        backup_recipes.run_recipe(name, system, tmp_path, PATH=path)
    assert_masked("an argument", noted.read_text())
    assert {line.split()[0] for line in noted.read_text().splitlines()} == {"pg_dump", "pg_restore", "psql"}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_verb_shows_a_password(locked: Locked, settings: Settings, tmp_path: Path) -> None:
    good = locked.settings(settings, PASSWORD)
    with Arguments() as arguments:
        run_verb("init", good, tmp_path, {0})
        for verb in WORDS:
            run_verb(verb, good, tmp_path, {0, 1, 2, 3})
        shown = json.loads(grabstream("config", "--json", **env_of(good)).stdout)
        assert shown["GRAB_POSTGRES"]["value"].startswith("postgresql://app:…@")
    assert arguments.shown() == []


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "server",
    [
        pytest.param("redis", marks=pytest.mark.nightly),
        pytest.param("postgres", marks=pytest.mark.nightly),
        "both",
    ],
)
def test_no_verb_shows_a_password_when_servers_refuse_it(
    locked: Locked, settings: Settings, tmp_path: Path, server: str
) -> None:
    good, bad = (locked.settings(settings, password) for password in (PASSWORD, WRONG))
    update = {
        "redis": {"redis_url": bad.redis_url},
        "postgres": {"postgres": bad.postgres},
        "both": {"redis_url": bad.redis_url, "postgres": bad.postgres},
    }[server]
    run_verb("init", good, tmp_path, {0})
    refused = good.model_copy(update=update)
    for verb in (
        "init",
        "doctor",
        "status",
        "grab",
        "show",
        "verify",
        "reseal",
        "keys",
        "webhooks",
        "rebuild",
    ):
        run_verb(verb, refused, tmp_path, {0, 1, 2, 3})


@pytest.mark.long
async def test_a_worker_runs_with_files_and_logs_no_password(
    locked: Locked, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = locked.settings(settings, PASSWORD)
    values = {
        "REDIS_URL": good.redis_url,
        "SEAL_KEYS": good.seal_keys.get_secret_value(),
        # Without its password, which is in the password file of libpq.
        "POSTGRES": good.postgres.replace(f":{PASSWORD}", ""),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRAB_")}
    environment = {
        **inherited,
        "GRAB_PREFIX": good.prefix,
        "GRAB_SCHEMA": good.schema_,
        "GRAB_KAFKA": good.kafka,
        "GRAB_SHARDS": str(good.shards),
    }
    for name, value in values.items():
        file = tmp_path / name.lower()
        file.write_text(f"{value}\n")
        file.chmod(0o600)
        environment[f"GRAB_{name}_FILE"] = str(file)
    passwords = tmp_path / "pgpass"
    passwords.write_text(f"127.0.0.1:{locked.postgres}:*:app:{PASSWORD}\n")
    passwords.chmod(0o600)
    command = [sys.executable, "-m", "grabstream.ops.cli", "-v"]

    def run(*words: str, code: int = 0, **more: str) -> str:
        done = subprocess.run(
            [*command, *words], env={**environment, **more}, capture_output=True, text=True, cwd=tmp_path,
            timeout=120,
        )  # fmt: skip
        assert_masked(" ".join(words), done.stdout + done.stderr)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    # libpq finds no password, and the fix names the setting.
    assert "GRAB_POSTGRES" in run("init", code=3)
    environment["PGPASSFILE"] = str(passwords)
    assert "Topics created" in run("init")
    log = tmp_path / "worker.log"
    with log.open("wb") as output, Arguments() as arguments:
        worker = subprocess.Popen([*command, "worker"], env=environment, stderr=output, cwd=tmp_path)
        try:
            await until(lambda: "ready" in log.read_text(), 60, "the worker is ready")
            offers = "offer,kind,issuer,total\no,coupon,shop,9\n"
            opened = subprocess.run(
                [*command, "open", "-", "--format", "csv"], input=offers, env=environment, text=True,
                capture_output=True, cwd=tmp_path, timeout=120,
            )  # fmt: skip
            assert opened.returncode == 0, opened.stderr
            assert "granted" in await asyncio.to_thread(run, "grab", "o", "u", GRAB_PATIENCE_MS="30000")
            # All sessions break, and new ones are refused for a while: the log says so, without the password.
            locked.refuse_sessions()
            await until(lambda: "not permitted to log in" in log.read_text(), 60, "the refusal")
            locked.admit_sessions()
            await asyncio.to_thread(run, "rebuild", "ledger")
            worker.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(worker.wait, 60) == 0
        finally:
            worker.kill()
            worker.wait()
    assert_masked("worker", log.read_text())
    assert arguments.shown() == []


@pytest.mark.long
async def test_a_gateway_logs_no_password(locked: Locked, settings: Settings, tmp_path: Path) -> None:
    good, bad = (locked.settings(settings, password) for password in (PASSWORD, WRONG))
    run_verb("init", good, tmp_path, {0})
    log = tmp_path / "gateway.log"
    command = [sys.executable, "-m", "grabstream.ops.cli", "-v", "gateway", "--port", "0"]
    with log.open("wb") as output, Arguments() as arguments:
        refused = child_environment(**{**env_of(good), "postgres": bad.postgres})
        assert subprocess.run(command, env=refused, stderr=output, stdout=output, timeout=240).returncode == 3
        assert "PostgreSQL refuses the login of GRAB_POSTGRES" in log.read_text()
        gateway = subprocess.Popen(
            command, env=child_environment(**env_of(good)), stderr=output, stdout=output
        )
        try:
            await until(lambda: "http://127.0.0.1:" in log.read_text(), 60, "the gateway listens")
            [port] = re.findall(r"http://127\.0\.0\.1:(\d+)", log.read_text())[:1]
            # PostgreSQL refuses its sessions from now on; grabs could be decided meanwhile.
            locked.refuse_sessions()
            with urlopen(f"http://127.0.0.1:{port}/openapi.json") as answer:
                assert_masked("the document", answer.read().decode())
            with pytest.raises(HTTPError) as raised:
                urlopen(f"http://127.0.0.1:{port}/v1/offers/o")
            assert raised.value.code == 503
            assert_masked("an answer", raised.value.read().decode())
            gateway.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(gateway.wait, 60) == 0
        finally:
            gateway.kill()
            gateway.wait()
            locked.admit_sessions()
    assert "not permitted to log in" in log.read_text()
    assert_masked("the gateway", log.read_text())
    assert arguments.shown() == []


@pytest.mark.long
def test_a_traceback_with_settings_shows_no_password(locked: Locked, settings: Settings) -> None:
    good: Any = locked.settings(settings, PASSWORD)
    key = good.seal_keys.get_secret_value().partition(":")[2]
    for shown in (repr(good), str(good), f"{good!s:.2000}"):
        assert_masked("the settings", shown)
        assert key not in shown
    assert child_environment(postgres=good.postgres)["GRAB_POSTGRES"] == good.postgres
