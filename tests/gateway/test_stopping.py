"""Starting and stopping a gateway: exit codes, and no answer is lost that was promised."""

import asyncio
import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import redis.asyncio

from grabstream.lua.keys import KeySpace
from grabstream.settings import Settings
from grabstream.workshop.services import free_ports
from tests.conftest import Worker, until
from tests.gateway.conftest import until_all_decide, until_open
from tests.support.command_line import env_of, grabstream
from tests.support.gateways import GatewayProcess, calling


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_requests_in_work_get_their_answers_when_it_is_stopped(
    system: Settings, tmp_path: Path, worker: Callable[..., Worker], number: signal.Signals, code: int
) -> None:
    running = worker(system)
    with GatewayProcess(system, tmp_path / "log", gate_timeout_ms="60000") as gateway:
        await until_all_decide(gateway.port, system.shards)
        async with calling(gateway.port) as caller:
            await caller.open("x", total=50)
            running.signal(signal.SIGSTOP)
            held = [
                asyncio.create_task(caller.post("/v1/offers/x/grabs", {"user": f"u{n}"}, f"k{n}"))
                for n in range(20)
            ]
            seen = redis.asyncio.Redis.from_url(system.redis_url)
            state = KeySpace(system.prefix, system.shards).shard_of_offer("x")
            keys = KeySpace(system.prefix, system.shards).shard(state)

            async def are_decided() -> bool:
                return int(await seen.hget(keys.state, "seq") or 0) >= 21

            await until(are_decided, 20, "twenty decisions")
            await seen.aclose()
            ends = asyncio.get_running_loop().run_in_executor(None, gateway.stop, number)

            async def accepts_nothing() -> bool:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
                except OSError:
                    return True
                writer.close()
                return False

            await until(accepts_nothing, 10, "the end of listening")
            running.signal(signal.SIGCONT)
            answers = await asyncio.gather(*held)
            assert {got.status for got in answers} == {201}
            assert await ends == code
        assert "Traceback" not in gateway.text()


@pytest.mark.long
async def test_answer_that_does_not_come_in_time_is_unknown_and_can_be_repeated(
    system: Settings, tmp_path: Path, worker: Callable[..., Worker]
) -> None:
    """A relay stands still: what was decided is not known to be journaled, and the request says so. The same
    request gets the answer when the relay continues.
    """
    running = worker(system)
    with GatewayProcess(system, tmp_path / "log", gate_timeout_ms="1500") as gateway:
        await until_all_decide(gateway.port, system.shards)
        async with calling(gateway.port) as caller:
            await until_open(caller, "x", 5)
            running.signal(signal.SIGSTOP)
            got = await caller.post("/v1/offers/x/grabs", {"user": "ann"}, "k")
            assert (got.status, got.body["type"]) == (504, "/problems/outcome_unknown")
            assert "It is unknown whether the command was decided" in got.body["detail"]
            assert got.body["detail"].lower().count("again") == 1
            assert got.headers["idempotency-key"] == "k"
            assert "outcome" not in got.body
            assert got.headers["retry-after"] == "1"
            running.signal(signal.SIGCONT)

            async def is_answered() -> bool:
                got = await caller.post("/v1/offers/x/grabs", {"user": "ann"}, "k")
                assert got.status in (201, 503, 504)
                return got.status == 201 and got.body["place"] == 1

            await until(is_answered, 30, "the answer")
            taken = await caller.post("/v1/offers/x/grabs", {"user": "bob"}, "k2")
            assert taken.body["place"] == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_without_authentication_it_serves_this_machine_only(settings: Settings, host: str) -> None:
    done = grabstream("gateway", "--host", host, "--port", "0", **env_of(settings))
    assert done.returncode == 2
    assert "without authentication" in done.stderr
    assert "127.0.0.1" in done.stderr


def test_taken_port_is_named(settings: Settings) -> None:
    [port] = free_ports(1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        done = grabstream("gateway", "--port", str(port), **env_of(settings))
    assert done.returncode == 2
    assert f"port {port}: Address already in use" in done.stderr


def test_missing_servers_and_settings_have_their_exit_codes(settings: Settings) -> None:
    [port] = free_ports(1)
    away = {**env_of(settings), "redis_url": f"redis://127.0.0.1:{port}/0"}
    done = grabstream("gateway", "--port", "0", **away)
    assert (done.returncode, "GRAB_REDIS_URL" in done.stderr) == (3, True)
    done = grabstream("gateway", "--port", "0", **{**env_of(settings), "seal_keys": ""}, folder=Path("/"))
    assert (done.returncode, "GRAB_SEAL_KEYS" in done.stderr) == (2, True)


@pytest.mark.long
def test_log_lines_are_json(system: Settings, tmp_path: Path) -> None:
    with GatewayProcess(system, tmp_path / "log", "--json") as gateway:
        assert gateway.stop() == 0
        lines = [json.loads(line) for line in gateway.text().splitlines()]
        assert [line["level"] for line in lines] == ["INFO", "INFO"]
        assert lines[0]["message"].startswith("listening on http://127.0.0.1:")
        assert lines[0]["at"].endswith("+00:00")
