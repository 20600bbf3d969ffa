"""Local servers: taken ports, process ids of other processes, and sets that are started and stopped again."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import redis
import yaml
from click.testing import CliRunner

from grabstream.crypto.sealing import Sealer
from grabstream.ops.cli import grabstream
from grabstream.settings import REDIS_PORT, child_environment
from grabstream.workshop.commands import services as services_verbs
from grabstream.workshop.services import LocalServices, ServiceError, free_ports
from grabstream.workshop.services.process import _start_time
from grabstream.workshop.services.servers import PROJECT, Redis, kafka_version
from scripts import ports
from tests.conftest import until


def test_a_taken_port_is_named_with_the_setting_to_change(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceError, match=rf"port {port} for redis is taken.*GRAB_REDIS_URL"):
            Redis(tmp_path, port).start()


def test_ports_of_a_run_differ_also_from_the_one_after_that_of_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([[7, 8, 9], [6], [9], [7], [20], [30]])
    monkeypatch.setattr(ports, "free_ports", lambda count: next(drawn))
    monkeypatch.setattr(ports, "is_taken", lambda port: port == 21)
    assert ports.ports_of_run() == (7, 30, 9)


def test_beside_other_programs_a_run_of_its_own_gets_free_ports() -> None:
    """Settings that say where a server is are left as they are."""
    environment = {
        name: value for name, value in child_environment().items()
        if name not in ("GRAB_REDIS_URL", "GRAB_KAFKA", "GRAB_POSTGRES")
    } | {"GRAB_SERVICES": "processes"}  # fmt: skip

    def printed(**more: str) -> str:
        words = [sys.executable, "-m", "scripts.ports"]
        return subprocess.run(
            words, cwd=PROJECT, env=environment | more, check=True, capture_output=True, text=True
        ).stdout

    with contextlib.ExitStack() as taken:
        with contextlib.suppress(OSError):  # otherwise the servers of this very run have it
            taken.enter_context(socket.create_server(("127.0.0.1", REDIS_PORT)))
        said = printed()
        assert printed(GRAB_KAFKA="127.0.0.1:29092") == ""
    found = dict(re.findall(r"^export GRAB_(\w+)=\S*?127\.0\.0\.1:(\d+)", said, re.MULTILINE))
    assert found.keys() == {"REDIS_URL", "KAFKA", "POSTGRES"}
    assert len({*found.values(), str(REDIS_PORT), str(int(found["KAFKA"]) + 1)}) == 5


def test_another_process_with_the_same_id_is_not_stopped(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        server = Redis(tmp_path, 1)
        server.pid_file.write_text(f"{other.pid} 12345")
        assert server.pid is None
        assert server.stop() is False
        assert other.poll() is None
        assert _start_time(other.pid) is not None
    finally:
        other.kill()
        other.wait()


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    server = Redis(tmp_path, free_ports(1)[0])
    server.command = lambda: ["redis-server", "--no-such-option", "1"]  # type: ignore[method-assign]
    with pytest.raises(ServiceError, match="redis ended with code 1: see .*redis.log"):
        server.start()
    assert server.pid is None


@pytest.mark.long
def test_data_survive_a_stop_and_a_kill(private_services: LocalServices) -> None:
    services = private_services
    redis.Redis(port=services.redis.port).set("kept", "1")
    with psycopg.connect(services.environment()["postgres"], autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS one")
    assert services.redis.start() is False
    for end in (services.redis.stop, services.redis.kill, services.postgres.stop, services.postgres.kill):
        assert end() is True
        assert end() is False
        services.up()
    assert redis.Redis(port=services.redis.port).get("kept") == b"1"
    with psycopg.connect(services.environment()["postgres"]) as connection:
        assert connection.execute("SELECT one FROM kept").fetchone() == (1,)
    assert all(pid is not None and os.path.exists(f"/proc/{pid}") for pid in services.status().values())


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="data are outside the directory only when root runs PostgreSQL")
def test_temporary_servers_leave_nothing_outside_their_directory(tmp_path: Path) -> None:
    services = LocalServices(tmp_path / "s", *free_ports(4))
    for kept in (False, True):
        if kept:
            services.up()
            services.down()
        services.up(temporary=True)
        assert services.postgres.data.exists()
        assert services.down() == ["redis", "kafka", "postgres"]
        assert services.postgres.data.exists() == kept
    services.remove()
    assert not services.postgres.data.exists()


@pytest.fixture
def no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings have the default addresses, not those of the servers that the tests use."""
    for name in ("GRAB_REDIS_URL", "GRAB_KAFKA", "GRAB_POSTGRES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_addresses")
def test_local_servers_have_the_ports_of_the_settings_in_either_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for address in ("postgresql://u:p@127.0.0.1:15999/d", "host=127.0.0.1 port=15999 dbname=d"):
        monkeypatch.setenv("GRAB_POSTGRES", address)
        assert services_verbs.local_services().postgres.port == 15999
    monkeypatch.setenv("GRAB_POSTGRES", "host=books.example port=15999")
    with pytest.raises(ServiceError, match=r"books\.example:15999, but `up` starts servers on this"):
        services_verbs.local_services()


def test_up_of_an_installed_package_names_the_settings_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services_verbs, "PROJECT", tmp_path)
    monkeypatch.setattr(services_verbs, "_write_seal_key", lambda: pytest.fail("it goes on"))
    with pytest.raises(ServiceError, match="needs a checkout of the project.* GRAB_KAFKA and GRAB_POSTGRES"):
        CliRunner().invoke(grabstream, ["up"], catch_exceptions=False)


@pytest.mark.usefixtures("no_addresses")
def test_down_names_the_deleted_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAB_SERVICES", "processes")
    monkeypatch.setattr(services_verbs, "PROJECT", tmp_path)
    data = tmp_path / ".services" / "redis"
    data.mkdir(parents=True)
    output = CliRunner().invoke(grabstream, ["down", "--remove"]).output
    assert "Deleted:" in output
    assert ".services" in output
    assert not data.exists()
    again = CliRunner().invoke(grabstream, ["down", "--remove", "--json"]).output
    assert json.loads(again) == {"stopped": [], "deleted": []}


def test_git_ignores_built_files() -> None:
    for folder in ("build", "dist"):
        assert subprocess.run(["git", "check-ignore", "-q", f"{folder}/x"], cwd=PROJECT).returncode == 0


def _with_children(process: int) -> list[int]:
    children = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True).stdout.split()
    return [process, *map(int, children)]


@pytest.mark.nightly
async def test_a_worker_logs_when_it_is_ready_and_each_outage_of_a_server_once(
    private_services: LocalServices, prefix: str, tmp_path: Path
) -> None:
    services = private_services
    environment = services.environment() | {
        "prefix": prefix, "schema": prefix, "shards": "4", "seal_keys": services_verbs.new_seal_key()
    }  # fmt: skip
    command = [sys.executable, "-m", "grabstream.ops.cli"]
    subprocess.run([*command, "init"], env=child_environment(**environment), check=True, timeout=300)
    log = tmp_path / "worker.log"

    def logged(words: str) -> int:
        return log.read_text().count(words)

    with (
        log.open("w") as output,
        subprocess.Popen([*command, "worker"], env=child_environment(**environment), stderr=output) as worker,
    ):
        try:
            await until(lambda: logged("ready: roles decide, relay, sweep, project"), 240, "the worker")
            assert logged("4 shards, of which this worker relays 0, 1, 2, 3") == 1
            for number, (name, server) in enumerate(
                (("Redis", services.redis), ("Kafka", services.kafka), ("PostgreSQL", services.postgres)), 1
            ):
                server.kill()
                await until(lambda: logged("does not answer") == number, 240, f"{name} away")  # noqa: B023
                assert len(re.findall(rf"ERROR .*: {name} \(.*\) does not answer", log.read_text())) == 1
                server.start()
                await until(lambda: logged("answers again") == number, 240, f"{name} back")  # noqa: B023
                assert len(re.findall(rf"{name} \(.*\) answers again", log.read_text())) == 1
            # A server that hangs is logged in the same way: here PostgreSQL with all of its processes.
            assert services.postgres.pid is not None
            hung = _with_children(services.postgres.pid)
            for process in hung:
                os.kill(process, signal.SIGSTOP)
            try:
                await until(lambda: logged("does not answer: TimeoutError") == 1, 240, "PostgreSQL hangs")
            finally:
                for process in hung:
                    os.kill(process, signal.SIGCONT)
            await until(lambda: logged("answers again") == 4, 240, "PostgreSQL continues")
        finally:
            worker.terminate()
    assert worker.returncode == 0
    # Lease, relay and sweeper of each shard met the outages too, but do not log them again.
    assert not re.findall(r"(WARNING|ERROR) .*(lease of|sweeping) shard", log.read_text())
    assert logged("ready:") == 1


@pytest.mark.long
def test_the_init_step_of_compose_makes_a_seal_key_once(tmp_path: Path) -> None:
    step = yaml.safe_load((PROJECT / "compose.yaml").read_text())["services"]["seal-key"]
    command = [*step["entrypoint"], *(word.replace("$$", "$") for word in step["command"])]
    # The step must find no seal key, neither in this environment nor in the project's .env.
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    texts = []
    for _ in range(2):
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=240)
        texts.append((tmp_path / ".env").read_text())
    assert texts[0] == texts[1]
    Sealer.from_text(texts[0].removeprefix("GRAB_SEAL_KEYS=").strip())
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    given = tmp_path / "given"
    given.mkdir()
    environment["GRAB_SEAL_KEYS"] = services_verbs.new_seal_key()
    subprocess.run(command, cwd=given, env=environment, check=True, timeout=240)
    assert not (given / ".env").exists()


def test_the_kafka_version_is_read_from_compose() -> None:
    assert kafka_version().count(".") == 2
