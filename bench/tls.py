"""Rows `tls`, `tls-singles` and `secured`: what TLS and logins cost, against the same without them."""

import asyncio
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from bench.deciding import Side, answered_lists, answered_singles, in_turns
from bench.stage import private_redis, settings_at, system
from bench.streaming import booked
from grabstream.connections.opening import open_redis
from grabstream.gate.gate import Gate
from grabstream.models.commands import Grab
from grabstream.workshop.services import LocalServices, SecureServices, free_ports
from grabstream.workshop.services.certificates import CertificateAuthority
from grabstream.workshop.services.secure import HOST, SecureRedis

WITH, WITHOUT = "with TLS", "without"
#: Callers that send one grab each; with few, a call carries few grabs.
CALLERS = 20


@contextmanager
def redis_with_tls() -> Iterator[tuple[dict[str, str], "redis.Redis"]]:
    """Runs a private Redis that serves TLS and users, otherwise as `private_redis`; yields the settings of
    its administrator, and a client.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = CertificateAuthority(folder / "certificates")
        certificate = authority.certificate("server", (HOST,))
        server = SecureRedis(folder, free_ports(1)[0], authority, certificate, secrets.token_hex(16))
        server.start()
        try:
            with server.client() as client:
                client.config_set("auto-aof-rewrite-percentage", 0)
                yield server.environment(), client
        finally:
            server.kill()


async def decisions(runs: int, count: int) -> dict[str, Any]:
    """Rows `tls` and `tls-singles`: decisions per second of processor time (thread of Redis, and the process
    that sends), of 100 callers with lists and of 20 callers with one grab each, over TLS and without.
    """

    async def singles(gate: Gate, wanted: Sequence[Grab]) -> float:
        return await answered_singles(gate, wanted, CALLERS)

    with ExitStack() as stack:
        port = stack.enter_context(private_redis())
        plain = {"redis_url": f"redis://{HOST}:{port}/0"}, redis.Redis(port=port)
        without, with_tls = _side(*plain), _side(*stack.enter_context(redis_with_tls()))
        return {
            row: await in_turns((WITHOUT, without), (WITH, with_tls), load, runs, size)
            for row, load, size in (("tls", answered_lists, count), ("tls-singles", singles, count // 4))
        }


def _side(where: dict[str, str], server: "redis.Redis") -> Side:
    settings = settings_at(where)
    return Side(lambda: open_redis(settings), server)


async def pipeline(runs: int, count: int) -> dict[str, Any]:
    """Row `secured`: grabs per second from commands in Kafka to committed rows, with TLS and logins on all
    three servers, against the same servers without; each has its own set, with heaps of the same size.
    """
    rates: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    profile: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        sets = {
            WITH: SecureServices(Path(name) / "secured", *free_ports(4)),
            WITHOUT: LocalServices(Path(name) / "plain", *free_ports(4)),
        }
        for servers in sets.values():
            stack.callback(servers.remove)
            await asyncio.to_thread(servers.up)
        for run in range(runs):
            for side in (WITH, WITHOUT) if run % 2 == 0 else (WITHOUT, WITH):
                servers = sets[side]
                processes = {server.kind: pid for server in servers.all if (pid := server.pid) is not None}
                async with system(("decide,relay,sweep", "project"), servers) as (settings, workers):
                    rate, spent = await booked(settings, workers, count, processes)
                rates[side].append(rate)
                profile[f"{side}, run {run + 1}, CPU µs a grab"] = spent
    return {"ours": rates[WITH], "theirs": rates[WITHOUT], "unit": "grabs/s", "profile": profile}
