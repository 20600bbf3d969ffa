"""Row `tigerfans`: checkouts over HTTP, against a checkout of github.com/renerocksai/tigerfans, in turn, on
the PostgreSQL of the settings.

TigerFans is started as its Makefile does it for a load test with PostgreSQL alone (`start` below), from the
folder that `--tigerfans` names, with the Python of its `venv`. It is not part of this repository.
"""

import asyncio
import base64
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import redis
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from bench.checkout_load import CURRENCY, PRICES, CheckoutPlan
from bench.serving import LISTEN_SECONDS_MAX, MeasuredServer, gateway, median_of, said
from bench.stage import system
from bench.streaming import cpu_seconds, until_booked
from grabstream.connections.opening import open_gate
from grabstream.models.commands import Open
from grabstream.models.offers import StockTerms
from grabstream.projections.database.sessions import system_name
from grabstream.settings import Settings, load_settings
from grabstream.workshop.services import free_ports

CONNECTIONS = 50
#: How many checkouts TigerFans gets; its reservations sum up all earlier ones, so more of them are slower.
CHECKOUTS = 1_000
#: How many this system gets, so that a run takes a second or more.
OUR_CHECKOUTS = 5_000
#: As TigerFans has them (RESERVATION_TTL_SECONDS, TicketAmount_Class_A).
HOLD_MS = 300_000
TICKETS = 5_000_000
_throughput = re.compile(r"PAID: (\d+) .*Throughput: ([0-9.]+) ops/s", re.DOTALL).search


@contextmanager
def start(folder: Path, postgres: str, secret: str) -> Iterator[MeasuredServer]:
    """Runs TigerFans on a database: the configuration `pg`, `pg` of its load tests, a pool of 10 sessions,
    one worker of uvicorn, no access log; its webhook is its own port.
    """
    [port] = free_ports(1)
    environment = {
        **os.environ,
        "ACCT_BACKEND": "pg", "PAYSESSION_BACKEND": "pg", "DATABASE_URL": postgres, "DB_POOL_SIZE": "10",
        "MOCK_WEBHOOK_URL": f"http://127.0.0.1:{port}/payments/webhook", "MOCK_SECRET": secret,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as logs:
        log = Path(logs, "tigerfans.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [folder / "venv/bin/python", "-m", "uvicorn", "tigerfans.server:app", "--host", "127.0.0.1",
                 "--port", str(port), "--workers=1", "--no-access-log"],
                cwd=folder, env=environment, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            until = time.monotonic() + LISTEN_SECONDS_MAX
            while "Uvicorn running on" not in log.read_text():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"TigerFans does not listen: {log.read_text()}")
                time.sleep(0.05)
            yield MeasuredServer(port, process.pid)
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def new_database(postgres: str) -> Iterator[str]:
    """Creates a database on the server of a DSN, and yields its URL; dropped afterwards."""
    name = f"tigerfans_{secrets.token_hex(4)}"
    known = conninfo_to_dict(postgres)
    password = f":{known['password']}" if known.get("password") else ""
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield f"postgresql://{known['user']}{password}@{known['host']}:{known['port']}/{name}"
        finally:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def buy(server: MeasuredServer, side: str, total: int, secret: str) -> dict[str, Any]:
    """Buys `total` tickets; raises when a checkout does not end as it must."""
    plan = CheckoutPlan(side, total, CONNECTIONS, secrets.token_hex(6), secret)
    before = cpu_seconds(server.pid)
    found = said([sys.executable, "-m", "bench.checkout_load", str(server.port)], plan._asdict(), 300)
    found["rate"] = total / found["seconds"]
    found["server_us"] = (cpu_seconds(server.pid) - before) / total * 1e6
    found["client_us"] = found["client_cpu_seconds"] / total * 1e6
    return found


def theirs(folder: Path, postgres: str, side: str, total: int) -> dict[str, Any]:
    """Checkouts of TigerFans on a new database. `own_client`: by its own load client, with its httpx; it also
    follows the redirect, and asks for the order until it is paid.
    """
    secret = secrets.token_hex(32)
    with new_database(postgres) as url, start(folder, url, secret) as server:
        if side == "own_client":
            found = _by_own_client(folder, server, total)
        else:
            buy(server, side, CONNECTIONS, secret)
            before = _spent(_tigerfans_pids(server, url))
            found = buy(server, side, total, secret)
            found["all_us"] = _since(before, _spent(_tigerfans_pids(server, url))) / total * 1e6
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT count(*) FROM orders WHERE status = 'PAID'").fetchone()
        assert row
        if row[0] < 0.99 * total:
            raise RuntimeError(f"{total} tickets were bought, {row[0]} are in the table orders")
        return found


def sessions(postgres: str, condition: str, value: str) -> list[int]:
    """The processes of PostgreSQL that serve some sessions."""
    with psycopg.connect(postgres) as connection:
        rows = connection.execute(f"SELECT pid FROM pg_stat_activity WHERE {condition}".encode(), [value])
        return [row[0] for row in rows]


def _tigerfans_pids(server: MeasuredServer, url: str) -> list[int]:
    return [server.pid, *sessions(url, "datname = %s", str(conninfo_to_dict(url)["dbname"]))]


def _system_pids(settings: Settings, server: MeasuredServer, workers: list[Any]) -> list[int]:
    with redis.Redis.from_url(settings.redis_url) as client:
        redis_pid = int(client.info("server")["process_id"])
    name = f"{system_name(settings.schema_)}%"
    session_pids = sessions(settings.postgres, "application_name LIKE %s", name)
    return [server.pid, redis_pid, *(worker.pid for worker in workers), *session_pids]


def _spent(pids: list[int]) -> dict[int, float]:
    """Processor time used by processes, in seconds."""
    return {pid: cpu_seconds(pid) for pid in pids if Path(f"/proc/{pid}").exists()}


def _since(before: dict[int, float], after: dict[int, float]) -> float:
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def _by_own_client(folder: Path, server: MeasuredServer, total: int) -> dict[str, Any]:
    before = cpu_seconds(server.pid)
    done = subprocess.run(
        [folder / "venv/bin/python", "bench/load_client.py", "--base", f"http://127.0.0.1:{server.port}",
         "--concurrency", str(CONNECTIONS), "--total", str(total)],
        cwd=folder, stdout=subprocess.PIPE, text=True, timeout=300, check=True,
    )  # fmt: skip
    found = _throughput(done.stdout)
    if found is None or int(found[1]) < 0.99 * total:
        raise RuntimeError(f"not all tickets were bought: {done.stdout}")
    return {"rate": float(found[2]), "server_us": (cpu_seconds(server.pid) - before) / total * 1e6}


@asynccontextmanager
async def box_office(secret: str) -> AsyncIterator[tuple[Settings, MeasuredServer, list[Any]]]:
    """A system with books, audit and recovery, two classes of tickets, and its gateway."""
    async with system(("decide,relay,sweep", "project")) as (settings, workers):
        async with open_gate(settings) as gate:
            offers = [
                Open(
                    id=f"ticket:{name}", offer=f"ticket:{name}",
                    terms=StockTerms(
                        issuer="bench", total=TICKETS, price=price, currency=CURRENCY, hold_ms=HOLD_MS
                    ),
                )
                for name, price in PRICES.items()
            ]  # fmt: skip
            await gate.decide(offers, patience_ms=30_000, timeout_ms=30_000)
        await until_booked(settings, len(offers))
        with gateway(
            settings, payment_keys=f"bench:{base64.b64encode(bytes.fromhex(secret)).decode()}"
        ) as server:
            yield settings, server, list(workers)


async def checkouts(folder: Path, runs: int, divisor: int) -> dict[str, Any]:
    """The row: checkouts a second of this system and of TigerFans, in turn."""
    ours: list[dict[str, Any]] = []
    side_results: dict[str, list[dict[str, Any]]] = {
        "tigerfans": [],
        "tigerfans_webhook": [],
        "own_client": [],
    }
    booked = []
    secret = secrets.token_hex(32)
    postgres = load_settings().postgres
    async with box_office(secret) as (settings, server, workers):
        await asyncio.to_thread(buy, server, "gateway", CONNECTIONS * 4, secret)
        total = OUR_CHECKOUTS // divisor
        for _ in range(runs):
            began = time.monotonic()
            before = (await until_booked(settings, 0)).decided
            spent = _spent(_system_pids(settings, server, workers))
            ours.append(await asyncio.to_thread(buy, server, "gateway", total, secret))
            after = (await until_booked(settings, 0)).decided
            now = _spent(_system_pids(settings, server, workers))
            ours[-1]["all_us"] = _since(spent, now) / total * 1e6
            booked.append(total / (time.monotonic() - began))
            if after - before != 2 * total:
                raise RuntimeError(
                    f"{total} tickets were bought, and {after - before} events are in the books"
                )
            for side, found in side_results.items():
                found.append(await asyncio.to_thread(theirs, folder, postgres, side, CHECKOUTS // divisor))
    medians = {side: statistics.median(one["rate"] for one in found) for side, found in side_results.items()}
    theirs_by_load = side_results["tigerfans"]
    return {
        "ours": [one["rate"] for one in ours],
        "theirs": [one["rate"] for one in theirs_by_load],
        "unit": "checkouts/s",
        "profile": {
            "checkouts/s": {
                "ours until the books have them": f"{statistics.median(booked):.0f}",
                "TigerFans, the load signs the webhook": f"{medians['tigerfans_webhook']:.0f}",
                "TigerFans by its own load client": f"{medians['own_client']:.0f}",
            },
            "CPU µs a checkout": {
                "gateway, workers, Redis, sessions of PostgreSQL": median_of(ours, "all_us"),
                "TigerFans, its sessions of PostgreSQL": median_of(theirs_by_load, "all_us"),
                "the gateway alone": median_of(ours, "server_us"),
                "TigerFans alone": median_of(theirs_by_load, "server_us"),
                "client of the gateway": median_of(ours, "client_us"),
                "client of TigerFans": median_of(theirs_by_load, "client_us"),
            },
            "ms a checkout": {
                "p50": median_of(ours, "p50_ms"), "p99": median_of(ours, "p99_ms"),
                "p50 of TigerFans": median_of(theirs_by_load, "p50_ms"),
                "p99 of TigerFans": median_of(theirs_by_load, "p99_ms"),
            },
            "the machine": {"load": f"{os.getloadavg()[0]:.1f}"},
        },
    }  # fmt: skip
