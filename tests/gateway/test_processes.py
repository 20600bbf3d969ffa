"""Several processes of a gateway on one port: each serves, one that dies is started again, and all end."""

import asyncio
import contextlib
import os
import re
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from grabstream.settings import Settings
from grabstream.workshop.services import free_ports
from tests.conftest import until, wait_until
from tests.gateway.conftest import Door
from tests.support.command_line import env_of, grabstream
from tests.support.gateways import GatewayProcess, calling

PROCESSES = 2


def pids(gateway: GatewayProcess) -> dict[int, int]:
    """The process of each number: the last one that was started."""
    found = re.findall(rf"process (\d) of {PROCESSES} is (\d+)", gateway.text())
    return {int(number): int(pid) for number, pid in found}


def runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def of_both(gateway: GatewayProcess, count: int = PROCESSES) -> None:
    """Waits until `count` processes have listened."""
    wait_until(lambda: gateway.text().count("listening on http") >= count, 60, "the processes")


async def requests_of(port: int) -> float:
    """Requests that a process has counted in its metrics."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as got:
        text = await got.text()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("grabstream_http_requests_total{")
    )


def two_ports() -> int:
    """A free port of which the next one is free, too."""
    while True:
        [first] = free_ports(1)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first


@pytest.mark.long
async def test_each_process_serves_the_port_and_one_that_dies_is_started_again(
    door: Door, offer: str, tmp_path: Path
) -> None:
    metrics = two_ports()
    words = ("--processes", str(PROCESSES))
    with GatewayProcess(
        door.settings, tmp_path / "log", *words, metrics_listen=f"127.0.0.1:{metrics}"
    ) as gateway:
        of_both(gateway)
        path = f"/v1/offers/{offer}/grabs"

        async def grab(number: int) -> int:
            # A separate connection: the kernel chooses the process for each.
            async with calling(gateway.port) as caller:
                got = await caller.post(path, {"user": f"u{number}"}, f"k{number}")
                return int(got.body["place"])

        async with calling(gateway.port) as caller:
            await caller.open(offer, total=200)
        places = await asyncio.gather(*(grab(number) for number in range(60)))
        assert sorted(places) == list(range(1, 61))
        counted = [await requests_of(metrics + number) for number in range(PROCESSES)]
        assert min(counted) > 0, f"the kernel gives connections to both: {counted}"
        assert sum(counted) >= 61

        before = pids(gateway)
        os.kill(before[1], signal.SIGKILL)
        await until(lambda: pids(gateway)[1] != before[1], 30, "another process")
        of_both(gateway, PROCESSES + 1)
        assert pids(gateway)[2] == before[2]
        assert runs(before[2]), "the other one has not ended"
        assert "process 1 of 2 ended with code -9; it is started again" in gateway.text()
        again = await asyncio.gather(*(grab(number) for number in range(60)))
        assert again == places, "a repeat gets the first answer, by whichever process"
        assert await requests_of(metrics) > 0, "the new process has the port of the metrics of the old one"

        assert await asyncio.to_thread(gateway.stop) == 0
        assert not any(map(runs, {*before.values(), *pids(gateway).values()}))
        assert gateway.text().count("stopped") == PROCESSES
        assert "Traceback" not in gateway.text()


@pytest.mark.long
async def test_processes_end_with_the_one_that_has_started_them(door: Door, tmp_path: Path) -> None:
    """No process keeps the port after kill -9 of the one that watches."""
    with GatewayProcess(door.settings, tmp_path / "log", "--processes", str(PROCESSES)) as gateway:
        of_both(gateway)
        left = pids(gateway).values()
        assert len(left) == PROCESSES
        assert all(map(runs, left))
        gateway.process.kill()
        await until(lambda: not any(map(runs, left)), 25, "the end of all processes")
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", gateway.port)


@pytest.mark.long
def test_a_port_of_several_processes_is_taken(door: Door, tmp_path: Path) -> None:
    words = ("--processes", str(PROCESSES))
    with GatewayProcess(door.settings, tmp_path / "log", *words) as gateway:
        of_both(gateway)
        environment = env_of(door.settings)
        done = grabstream("gateway", "--port", str(gateway.port), *words, **environment)
        assert (done.returncode, "Address already in use" in done.stderr) == (2, True)


@pytest.mark.long
def test_processes_that_cannot_start_end_with_the_reason(settings: Settings) -> None:
    [port] = free_ports(1)
    away = {**env_of(settings), "redis_url": f"redis://127.0.0.1:{port}/0"}
    done = grabstream("gateway", "--port", "0", "--processes", str(PROCESSES), **away)
    assert (done.returncode, "GRAB_REDIS_URL" in done.stderr) == (3, True)
    assert "started again" not in done.stderr
