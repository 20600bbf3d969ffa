"""Rows over HTTP: the gateway against the same server with another application. Gateway, workers, Redis,
Kafka, PostgreSQL and the client share the cores of this machine, so processor time is printed next to the
rates.
"""

import asyncio
import json
import os
import re
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import redis

from bench import classic
from bench.http_load import ACCEPTED
from bench.stage import PROGRAM, system
from bench.streaming import cpu_seconds_of_all, until_booked
from grabstream.connections.opening import open_gate
from grabstream.models.commands import Open
from grabstream.models.offers import CouponTerms
from grabstream.settings import Settings, child_environment
from grabstream.streams.topics import Topics
from grabstream.workshop.services import ServerSet, free_ports

ROLES = ("decide,relay,sweep", "project")
OFFERS = 20
VISITORS = 100
CONNECTIONS = 128
PROCESSES = 2
LISTEN_SECONDS_MAX = 60
GRABS, MIX, LISTS = 0, 3, 5
_listens = re.compile(r"listening on http://\S+:(\d+);").findall


class MeasuredServer(NamedTuple):
    """A server that is measured."""

    port: int
    pid: int


class Shop(NamedTuple):
    """A system that runs."""

    settings: Settings
    gateway: MeasuredServer
    workers: list["subprocess.Popen[bytes]"]


@contextmanager
def gateway(
    settings: Settings, processes: int = 1, program: Sequence[str] = PROGRAM, **others: str
) -> Iterator[MeasuredServer]:
    """Runs a gateway of a system in `processes` processes; `others` are further settings of it, `program` as
    for `system`.
    """
    environment = child_environment(
        prefix=settings.prefix, schema=settings.schema_, redis_url=settings.redis_url, kafka=settings.kafka,
        postgres=settings.postgres, seal_keys=settings.seal_keys.get_secret_value(),
        outbox_events_max="10000000", **others,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "gateway.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *program, "gateway", "--port", "0",
                 "--processes", str(processes)],
                env=environment, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            until = time.monotonic() + LISTEN_SECONDS_MAX
            while len(found := _listens(log.read_text())) < processes:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the gateway does not listen: {log.read_text()}")
                time.sleep(0.05)
            yield MeasuredServer(int(found[0]), process.pid)
        finally:
            process.terminate()
            process.wait(30)


@contextmanager
def reference(kind: str, **arguments: Any) -> Iterator[MeasuredServer]:
    """Runs the same server with another application (`http_reference`)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.http_reference"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        json.dump({"kind": kind, **arguments}, process.stdin)
        process.stdin.close()
        yield MeasuredServer(int(process.stdout.readline()), process.pid)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@contextmanager
def bare_uvicorn() -> Iterator[MeasuredServer]:
    """Runs uvicorn with its defaults, and an application that answers a constant (`http_reference`)."""
    [port] = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "bench.http_reference:bare", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + LISTEN_SECONDS_MAX
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.05)
        yield MeasuredServer(port, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def load(
    server: MeasuredServer,
    lists: int,
    seconds: float,
    rate: float = 0.0,
    connections: int = CONNECTIONS,
    expected: Sequence[str] = ACCEPTED,
    **more: Any,
) -> dict[str, Any]:
    """Sends `lists` lists of five requests, and grabs, for `seconds`; `more` of the plan as in `HttpPlan`.
    Raises when the status of an answer is not an expected one.
    """
    plan = {
        "lists": lists, "offers": [offer_name(number) for number in range(OFFERS)], "visitors": VISITORS,
        "stem": secrets.token_hex(6), "seconds": seconds, "connections": connections, "rate": rate,
        **more,
    }  # fmt: skip
    before = cpu_seconds_of_all(server.pid)
    found = said([sys.executable, "-m", "bench.http_load", str(server.port)], plan, seconds + 120)
    if set(found["statuses"]) - set(expected):
        raise RuntimeError(f"not all requests were served: {found['statuses']}")
    found["count"] = sum(found["statuses"].values())
    found["rate"] = found["count"] / found["seconds"]
    found["server_us"] = (cpu_seconds_of_all(server.pid) - before) / found["count"] * 1e6
    found["client_us"] = found["client_cpu_seconds"] / found["count"] * 1e6
    return found


def said(program: list[str], plan: dict[str, Any], seconds_max: float, **where: Any) -> Any:
    """What a program says, as JSON, about a plan that it gets as JSON; `where`: its `env` and `cwd`."""
    done = subprocess.run(
        program, input=json.dumps(plan), stdout=subprocess.PIPE, text=True, timeout=seconds_max, check=True,
        **where,
    )  # fmt: skip
    return json.loads(done.stdout)


def offer_name(number: int) -> str:
    """The id of an offer of the shop."""
    return f"sale{number}"


@asynccontextmanager
async def shop(
    servers: ServerSet | None = None, program: Sequence[str] = PROGRAM, **others: str
) -> AsyncIterator[Shop]:
    """A system with workers with ROLES and OFFERS offers that never sell out, and its gateway; arguments as
    for `system` and `gateway`.
    """
    async with system(ROLES, servers, program) as (settings, workers):
        async with open_gate(settings) as gate:
            offers = [
                Open(
                    id=offer_name(number), offer=offer_name(number),
                    terms=CouponTerms(issuer="bench", total=10_000_000, title=f"Sale number {number}"),
                )
                for number in range(OFFERS)
            ]  # fmt: skip
            await gate.decide(offers, patience_ms=30_000, timeout_ms=30_000)
        await until_booked(settings, OFFERS)
        with gateway(settings, program=program, **others) as server:
            yield Shop(settings, server, workers)


def _asked(server: MeasuredServer, path: str, body: bytes | None = None) -> str:
    headers = {"Content-Type": "application/json", "Idempotency-Key": secrets.token_hex(8)}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", body, headers)
    with urllib.request.urlopen(request, timeout=30) as found:
        return str(found.read().decode())


async def _in_turn(
    settings: Settings, runs: int, seconds: float, lists: int, sides: Sequence[tuple[MeasuredServer, int]]
) -> list[list[dict[str, Any]]]:
    """What `load` finds of servers in turn, for each of them; each has a number of connections."""
    found: list[list[dict[str, Any]]] = [[] for _ in sides]
    for server, connections in sides:
        await asyncio.to_thread(load, server, lists, seconds / 4, connections=connections)
    for _ in range(runs):
        for runs_of_server, (server, connections) in zip(found, sides, strict=True):
            runs_of_server.append(
                await asyncio.to_thread(load, server, lists, seconds, connections=connections)
            )
            # What the workers still do must not disturb the other side.
            await until_booked(settings, 0)
    return found


async def _against(
    runs: int, seconds: float, lists: int, other: Callable[[Settings, MeasuredServer], Any]
) -> dict[str, Any]:
    """The gateway and the other server in turn: requests a second, and what they cost."""
    async with shop() as (settings, server, _):
        with other(settings, server) as against:
            sides = ((server, CONNECTIONS), (against, CONNECTIONS))
            ours, theirs = await _in_turn(settings, runs, seconds, lists, sides)
    return {
        "ours": [one["rate"] for one in ours],
        "theirs": [one["rate"] for one in theirs],
        "unit": "requests/s",
        "profile": {
            "CPU µs a request": {
                "gateway": median_of(ours, "server_us"), "other server": median_of(theirs, "server_us"),
                "client of the gateway": median_of(ours, "client_us"),
                "client of the other": median_of(theirs, "client_us"),
            },
            "the machine": {"load": f"{os.getloadavg()[0]:.1f}"},
        },
    }  # fmt: skip


def median_of(runs: list[dict[str, Any]], name: str) -> str:
    """The median of a value of several runs."""
    return f"{statistics.median(one[name] for one in runs):.1f}"


def _constant(settings: Settings, server: MeasuredServer) -> Any:
    """The same server with constants as long as the answers of the gateway."""
    return reference(
        "constant",
        get=_asked(server, "/v1/offers?order=random&visitor=v0"),
        post=_asked(server, f"/v1/offers/{offer_name(0)}/grabs", b'{"user":"somebody"}'),
    )


def _items(settings: Settings, server: MeasuredServer) -> Any:
    """The same server, with one call of Redis for each item of the list."""
    offers = json.loads(_asked(server, "/v1/offers?order=random&visitor=v0"))["offers"]
    keys = {f"item:{offer['offer']}": json.dumps(offer, separators=(",", ":")) for offer in offers}
    with redis.Redis.from_url(settings.redis_url) as client:
        client.mset(keys)
    return reference("items", redis_url=settings.redis_url, keys=list(keys))


async def mix(runs: int, seconds: float) -> dict[str, Any]:
    """Row 9: of five requests, three lists and two grabs, against the same server answering constants."""
    return await _against(runs, seconds, MIX, _constant)


async def grabs(runs: int, seconds: float) -> dict[str, Any]:
    """Journaled grabs over HTTP, against the same server answering a constant."""
    return await _against(runs, seconds, GRABS, _constant)


async def against_uvicorn(runs: int, seconds: float, lists: int) -> dict[str, Any]:
    """What a request costs the gateway, against the constant of a bare uvicorn, which logs each request. Only
    processor time is compared: rates depend more on what else the machine does.
    """
    async with shop() as (settings, server, _):
        with bare_uvicorn() as against:
            sides = ((server, CONNECTIONS), (against, CONNECTIONS))
            ours, theirs = await _in_turn(settings, runs, seconds, lists, sides)
    return {
        "ours": [one["server_us"] for one in ours],
        "theirs": [one["server_us"] for one in theirs],
        "unit": "µs of processor time a request",
        "profile": {
            "requests/s": {"gateway": median_of(ours, "rate"), "uvicorn": median_of(theirs, "rate")},
            "the machine": {"load": f"{os.getloadavg()[0]:.1f}"},
        },
    }  # fmt: skip


async def processes(runs: int, seconds: float) -> dict[str, Any]:
    """Journaled grabs over HTTP for each second of the gateway's processor time, in PROCESSES processes
    against one, with as many connections for each process. All others share the cores of this machine, so
    the clock says nothing about it.
    """
    async with shop() as (settings, server, _):
        with gateway(settings, PROCESSES) as several:
            sides = ((several, PROCESSES * CONNECTIONS), (server, CONNECTIONS))
            many, alone = await _in_turn(settings, runs, seconds, GRABS, sides)
    return {
        "ours": [1e6 / one["server_us"] for one in many],
        "theirs": [1e6 / one["server_us"] for one in alone],
        "unit": "requests a second of processor time",
        "profile": {
            "requests/s": {
                f"{PROCESSES} processes": median_of(many, "rate"), "one": median_of(alone, "rate"),
            },
            "the machine": {"load": f"{os.getloadavg()[0]:.1f}"},
        },
    }  # fmt: skip


async def lists(runs: int, seconds: float) -> dict[str, Any]:
    """Lists over HTTP, against the same server answering a constant of the same length."""
    return await _against(runs, seconds, LISTS, _constant)


async def items(runs: int, seconds: float) -> dict[str, Any]:
    """Lists over HTTP, against the same server with one call of Redis for each item."""
    return await _against(runs, seconds, LISTS, _items)


@contextmanager
def _by_hand(settings: Settings) -> Iterator[tuple[MeasuredServer, Callable[[], str]]]:
    """The same server with one call of the classic script and one awaited send a request; and a function that
    fills its list of parts, which is enough for one run.
    """
    with redis.Redis.from_url(settings.redis_url) as plain:

        def fill() -> str:
            return classic.prepare(plain, 300_000, 32)

        topic = Topics(settings.prefix).rejected
        where = {"redis_url": settings.redis_url, "kafka": settings.kafka, "topic": topic}
        with reference("by_hand", **where, sha=fill()) as against:
            yield against, fill
        plain.delete(*classic.KEYS)


async def lone(runs: int, seconds: float) -> dict[str, Any]:
    """Row `lone`: p50 of a caller who is alone, each grab journaled, over HTTP, against one call of the
    classic script and one awaited send in the same server. Nothing else happens, so each grab pays for waking
    up each process on its way.
    """
    async with shop() as (settings, server, _):
        with _by_hand(settings) as (against, _):
            ours, theirs = await _in_turn(settings, runs, seconds, GRABS, ((server, 1), (against, 1)))
    return {
        "ours": [one["p50_ms"] for one in ours],
        "theirs": [one["p50_ms"] for one in theirs],
        "unit": "ms p50",
        "profile": {
            "p99 ms": {"ours": median_of(ours, "p99_ms"), "classic": median_of(theirs, "p99_ms")},
            "CPU µs a request": {
                "gateway": median_of(ours, "server_us"), "classic": median_of(theirs, "server_us"),
            },
            "the machine": {"load": f"{os.getloadavg()[0]:.1f}"},
        },
    }  # fmt: skip


async def latency(runs: int, seconds: float) -> dict[str, Any]:
    """p99 of a journaled grab over HTTP at half of the load that the gateway can serve, against one call of
    the classic script and one awaited send, in the same server, at half of what that can serve.
    """
    ours, theirs, rates = [], [], []
    async with shop() as (settings, server, _):
        with _by_hand(settings) as (against, fill):
            for each in (server, against):
                await asyncio.to_thread(load, each, GRABS, seconds / 4)
            for _ in range(runs):
                fill()
                for each, found in ((server, ours), (against, theirs)):
                    full = await asyncio.to_thread(load, each, GRABS, seconds)
                    await until_booked(settings, 0)
                    half = await asyncio.to_thread(load, each, GRABS, seconds, full["rate"] / 2)
                    await until_booked(settings, 0)
                    found.append(half)
                rates.append((ours[-1]["rate"], theirs[-1]["rate"]))
    return {
        "ours": [one["p99_ms"] for one in ours],
        "theirs": [one["p99_ms"] for one in theirs],
        "unit": "ms p99",
        "profile": {
            "p50 ms": {"ours": median_of(ours, "p50_ms"), "classic": median_of(theirs, "p50_ms")},
            "requests/s": {
                "ours": ", ".join(f"{rate:,.0f}" for rate, _ in rates),
                "classic": ", ".join(f"{rate:,.0f}" for _, rate in rates),
            },
            "the machine": {"load": f"{os.getloadavg()[0]:.1f}"},
        },
    }
