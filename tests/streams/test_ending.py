"""A process that is asked to stop ends within a bound, even if a server hangs: here PostgreSQL, which accepts
connections and data, and answers nothing.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from grabstream.connections.opening import open_gate, open_redis
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.ops.console.stopping import END_SECONDS_MAX
from grabstream.settings import Settings, child_environment
from grabstream.streams.worker import RestartingRole, Service, run_worker
from tests.conftest import until
from tests.support.command_line import env_of
from tests.support.projecting import rows

pytestmark = pytest.mark.long


class HangingProxy:
    """A TCP proxy before PostgreSQL. After `hang` it forwards nothing, but still accepts connections."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._open = asyncio.Event()
        self._open.set()
        self.port = 0

    def hang(self) -> None:
        self._open.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        from_server, to_server = await asyncio.open_connection(self._host, self._port)

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                await self._open.wait()
                target.write(data)
            target.close()

        ends = await asyncio.gather(
            carry(reader, to_server), carry(from_server, writer), return_exceptions=True
        )
        assert ends


@asynccontextmanager
async def hanging(settings: Settings) -> AsyncIterator[tuple[HangingProxy, Settings]]:
    """Yields a proxy, and the settings with its address."""
    known = conninfo_to_dict(settings.postgres)
    proxy = HangingProxy(str(known["host"]), int(str(known["port"])))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield (
            proxy,
            settings.model_copy(
                update={"postgres": settings.postgres.replace(f":{known['port']}/", f":{port}/")}
            ),
        )
    finally:
        server.close()


async def test_a_worker_ends_within_its_bound_while_postgresql_hangs(
    system: Settings, worker: Callable[..., Any]
) -> None:
    """A worker with all roles continues to decide, ends within the bound, and releases its leases at once."""
    async with hanging(system) as (proxy, settings):
        running = worker(settings, "decide,relay,sweep,project,publish,verify")
        terms = EnvelopeTerms(issuer="alice", funding="pay", asset="CNY", total=900, parts=9)
        async with open_gate(system) as gate:
            await gate.decide([Open(id="o", offer="e", terms=terms)], patience_ms=30_000)
            await until(lambda: _booked(system, 1), 60, "the books")
            proxy.hang()
            [answer] = await gate.decide([Grab(id="g", offer="e", user="u")], patience_ms=30_000)
            assert answer.outcome == "granted"
        began = time.monotonic()
        running.process.terminate()
        redis = open_redis(system)
        try:

            async def free() -> bool:
                return not [
                    key async for key in redis.scan_iter(match=f"{system.prefix}:*:lease", count=1_000)
                ]

            await until(free, END_SECONDS_MAX, "the release of the leases")
        finally:
            await redis.aclose()
        await asyncio.to_thread(running.process.wait, END_SECONDS_MAX + 5)
        assert time.monotonic() - began < END_SECONDS_MAX + 2


async def test_a_rebuild_ends_within_its_bound_while_postgresql_hangs(system: Settings) -> None:
    async with hanging(system) as (proxy, settings):
        process = subprocess.Popen(
            [sys.executable, "-m", "grabstream.ops.cli", "rebuild", "ledger", "--jobs", "1"],
            env=child_environment(**env_of(settings), fail_at="rebuild.finished:1:stop"),
            stderr=subprocess.PIPE,
        )
        stopped = (
            "SELECT count(*) FROM read_models WHERE (projection, phase, state) = ('ledger', "
            "'following', 'building')"
        )

        async def finished() -> bool:
            return await rows(system, stopped) == [(1,)]

        await until(finished, 60, "the end of the load")
        await until(lambda: ") T " in Path(f"/proc/{process.pid}/stat").read_text(), 60, "its stop")
        proxy.hang()
        process.terminate()
        process.send_signal(signal.SIGCONT)  # the next statement hangs
        try:
            assert await asyncio.to_thread(process.wait, END_SECONDS_MAX + 10) == 143
        finally:
            process.kill()


async def _booked(settings: Settings, seq: int) -> bool:
    return await rows(settings, "SELECT DISTINCT max(seq) FROM cursors GROUP BY projection") == [(seq,)]


async def test_run_worker_names_roles_that_do_not_end_and_restarts_failed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A role that ignores the stop is named within the bound; a role that restarts is restarted after an
    error.
    """
    monkeypatch.setattr("grabstream.streams.worker.STOP_SECONDS", 0.5)
    stop, begun = asyncio.Event(), 0

    async def stubborn(_: asyncio.Event) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if left_alone.is_set():
                    raise

    async def failing(stop: asyncio.Event) -> None:
        nonlocal begun
        begun += 1
        if begun == 1:
            raise KeyError(0)
        stop.set()

    left_alone = asyncio.Event()
    began = time.monotonic()
    restarts = {"project": 0}
    roles = {
        "stubborn": Service(stubborn),
        "project": RestartingRole("project", Service(failing), restarts),
    }
    assert await run_worker(roles, stop) == ["stubborn"]
    assert restarts == {"project": 1}
    assert begun == 2
    assert time.monotonic() - began < END_SECONDS_MAX
    left_alone.set()
