"""Rows of `--peers`: this system and what people use instead, in turn. Each peer is installed from its
registry into a temporary folder, and is used as its own documentation proposes.

- `hot-row-20`, `hot-row-200`: a row of PostgreSQL that all callers decrement, and a row inserted for each, in
  one prepared statement that commits, over a pool of 8 sessions. It is durable when answered; ours is then
  `journaled` (`acks=all` in Kafka). It has no journal, holds or books, and needs PostgreSQL alone.
- `bullmq`: a job added and finished by BullMQ, each with one Lua call; ours a hold and its confirmation,
  which stay in the outbox. Both on one private Redis, in turn. BullMQ delays, repeats and schedules jobs; it
  has no stock, limits or books.
- `eventsourcing`: a table of balances from stored events by `ProjectionRunner`; ours is the whole ledger from
  the journal. The library commits each event separately, with its tracking, models any domain, and needs
  PostgreSQL alone. A first projection and a rebuild are the same work there.
"""

import asyncio
import os
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

from bench.checkouts import sessions
from bench.deciding import LIMITS, answered_singles
from bench.pieces import payment, stock
from bench.replaying import build, fill_journal
from bench.serving import said
from bench.stage import envelope, grabs, private_redis, server_seconds, system, taken_over_gate
from bench.streaming import cpu_seconds, until_booked
from grabstream.connections.opening import open_gate
from grabstream.ops.initialization import make_system
from grabstream.projections import versions
from grabstream.projections.database.sessions import system_name
from grabstream.runtime.collecting import collect_rarely
from grabstream.settings import load_settings
from grabstream.workshop.rehearsal.stage import take_down

EVENTSOURCING = "eventsourcing[postgres]==9.5.6"
BULLMQ = "bullmq@6.7.0"
IOREDIS = "ioredis@5.8.2"
#: The row lets one session in at a time: more of them only wait for it.
SESSIONS = 8
CALLERS = 20
#: Jobs that a worker of BullMQ works on at once.
CONCURRENCY = 100
OFFERS = 8
SECONDS_MAX = 1_800
HERE = Path(__file__).resolve().parent
TAKE = (
    "WITH taken AS (UPDATE offers SET remaining = remaining - 1 WHERE id = 'e' AND remaining > 0 "
    "RETURNING remaining) INSERT INTO grabs SELECT %s, 'e', %s, remaining FROM taken RETURNING place"
)


@contextmanager
def python_with(package: str) -> Iterator[Path]:
    """Installs a package of PyPI into a new environment; yields its Python."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder, "bin/python")
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package], check=True
        )
        yield python


@contextmanager
def node_with(*packages: str) -> Iterator[Path]:
    """Installs packages of npm into a new folder; yields the folder."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", *packages], cwd=folder, check=True
        )
        yield Path(folder)


@asynccontextmanager
async def _new_schema(postgres: str) -> AsyncIterator[str]:
    name = f"bench_peer_{secrets.token_hex(4)}"
    async with await psycopg.AsyncConnection.connect(postgres, autocommit=True) as connection:
        await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
        try:
            yield name
        finally:
            await connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f}"


async def hot_row(runs: int, count: int, callers: int) -> dict[str, Any]:
    """Rows `hot-row-…`: grabs a second of one offer, each answered when it is durable."""
    ours, theirs, booked, our_cpu, their_cpu = [], [], [], [], []
    async with system(("decide,relay,sweep", "project")) as (settings, workers):
        with redis.Redis.from_url(settings.redis_url) as client:
            pids = [worker.pid for worker in workers] + [int(client.info("server")["process_id"])]
        async with open_gate(settings) as gate:
            for run in range(runs):
                offer = f"e{run}"
                await gate.decide([envelope(offer, count)], patience_ms=30_000, timeout_ms=30_000)
                before = (await until_booked(settings, 1)).decided
                if not run:
                    # By now the projector has its sessions.
                    name = f"{system_name(settings.schema_)}%"
                    pids += sessions(settings.postgres, "application_name LIKE %s", name)
                    pids = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
                waiting = iter(grabs(offer, count, start=run * count))

                async def caller(waiting: Any = waiting) -> None:
                    for command in waiting:
                        [answer] = await gate.decide([command], timeout_ms=60_000)
                        assert answer.positive, answer

                cpu = time.process_time() + sum(map(cpu_seconds, pids))
                began = time.perf_counter()
                await asyncio.gather(*(caller() for _ in range(callers)))
                ours.append(count / (time.perf_counter() - began))
                await until_booked(settings, before + count)
                booked.append(count / (time.perf_counter() - began))
                our_cpu.append((time.process_time() + sum(map(cpu_seconds, pids)) - cpu) / count * 1e6)
                rate, used = await _hot_row(settings.postgres, count, callers)
                theirs.append(rate)
                their_cpu.append(used)
    return {
        "ours": ours,
        "theirs": theirs,
        "unit": "grabs/s",
        "profile": {
            "grabs/s": {"ours until the books have them": _median(booked)},
            "CPU µs a grab": {
                "all of ours but Kafka, until the books have it": _median(our_cpu),
                "callers, sessions of PostgreSQL": _median(their_cpu),
            },
            "started as": {"hot row": f"one statement a grab, {SESSIONS} sessions, synchronous_commit on"},
        },
    }


async def _hot_row(postgres: str, count: int, callers: int) -> tuple[float, float]:
    """Grabs a second of the hot row, and µs of a processor for each."""
    async with _new_schema(postgres) as schema:
        connections = [
            await psycopg.AsyncConnection.connect(
                postgres, autocommit=True, prepare_threshold=0, options=f"-c search_path={schema}"
            )
            for _ in range(min(SESSIONS, callers))
        ]
        free: asyncio.Queue[Any] = asyncio.Queue()
        await connections[0].execute("CREATE TABLE offers (id text PRIMARY KEY, remaining bigint NOT NULL)")
        await connections[0].execute(
            "CREATE TABLE grabs (id text PRIMARY KEY, offer text NOT NULL, user_id text NOT NULL, "
            "place bigint NOT NULL, UNIQUE (offer, user_id))"
        )
        await connections[0].execute("INSERT INTO offers VALUES ('e', %s)", (count,))
        for connection in connections:
            free.put_nowait(connection)
        waiting = iter(range(count))

        async def caller() -> None:
            for number in waiting:
                connection = await free.get()
                taken = await connection.execute(TAKE, (f"g{number:031d}", f"u{number:031d}"))
                assert await taken.fetchone() is not None
                free.put_nowait(connection)

        pids = [connection.info.backend_pid for connection in connections]
        cpu = time.process_time() + sum(map(cpu_seconds, pids))
        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        seconds = time.perf_counter() - began
        used = time.process_time() + sum(map(cpu_seconds, pids)) - cpu
        for connection in connections:
            await connection.close()
    return count / seconds, used / count * 1e6


async def jobs(runs: int, count: int) -> dict[str, Any]:
    """Row `bullmq`: holds confirmed a second, against jobs added and finished, by 20 callers each."""
    ours, theirs = [], []
    spent: dict[str, list[float]] = {"our Redis": [], "our client": [], "its Redis": [], "its client": []}

    def spend(side: str, server: float, client: float) -> None:
        spent[f"{side} Redis"].append(server / count * 1e6)
        spent[f"{side} client"].append(client / count * 1e6)

    program = ["node", str(HERE / "peer_jobs.mjs")]
    with node_with(BULLMQ, IOREDIS) as folder, private_redis() as port:
        plain = redis.Redis(port=port)
        for _ in range(runs):
            gate, client = await taken_over_gate(port, LIMITS)
            await gate.decide([stock(count)], "decided", timeout_ms=60_000)
            holds, payments = grabs("s", count), [payment(number) for number in range(count)]
            before = server_seconds(plain), time.process_time(), time.perf_counter()
            await answered_singles(gate, holds, CALLERS)
            await answered_singles(gate, payments, CALLERS)
            ours.append(count / (time.perf_counter() - before[2]))
            spend("our", server_seconds(plain) - before[0], time.process_time() - before[1])
            await gate.close()
            await client.aclose()
            plain.flushall()
            plan = {"port": port, "count": count, "callers": CALLERS, "concurrency": CONCURRENCY}
            server = server_seconds(plain)
            found = await asyncio.to_thread(said, program, plan, SECONDS_MAX, cwd=folder)
            theirs.append(count / found["seconds"])
            spend("its", server_seconds(plain) - server, found["cpu_seconds"])
    return {
        "ours": ours,
        "theirs": theirs,
        "unit": "pairs/s",
        "profile": {
            "CPU µs a pair": {name: _median(values) for name, values in spent.items()},
            "started as": {
                f"{BULLMQ}, {IOREDIS}": f"{CALLERS} callers of Queue.add, "
                f"then a Worker with concurrency {CONCURRENCY}"
            },
        },
    }


async def rebuilt(runs: int, count: int) -> dict[str, Any]:
    """Row `eventsourcing`: events a second from the stored events to a read model."""
    ours, theirs, our_cpu, their_cpu, server_cpu = [], [], [], [], []
    collect_rarely()
    name = f"bench{secrets.token_hex(4)}"
    settings = load_settings().model_copy(update={"prefix": name, "schema_": name})
    events = count // settings.shards * settings.shards
    with python_with(EVENTSOURCING) as python:
        async with (
            _new_schema(settings.postgres) as schema,
            await psycopg.AsyncConnection.connect(settings.postgres, autocommit=True) as connection,
        ):
            where = _environment(settings.postgres, schema)
            plan = {"count": count, "offers": OFFERS}
            append = [str(python), str(HERE / "peer_events.py"), "append"]
            await asyncio.to_thread(said, append, plan, SECONDS_MAX, env=where)
            await make_system(settings)
            try:
                await versions.use_read_model(connection, name, "ledger")
                for shard, end in (await fill_journal(settings, count)).items():
                    await connection.execute(
                        "UPDATE projection_cursors SET (seq, head, next_offset, term, owner) = "
                        "(%s, %s, %s, %s, %s) WHERE shard = %s",
                        (*end, shard),
                    )
                for _ in range(runs):
                    before = sum(os.times()[:4])
                    ours.append(events / await build(settings))
                    our_cpu.append((sum(os.times()[:4]) - before) / events * 1e6)
                    await connection.execute(
                        sql.SQL("DROP TABLE IF EXISTS {0}.balances, {0}.balances_tracking").format(
                            sql.Identifier(schema)
                        )
                    )
                    found = await asyncio.to_thread(
                        said, [*append[:2], "project"], plan, SECONDS_MAX, env=where
                    )
                    theirs.append(count / found["seconds"])
                    their_cpu.append(found["cpu_seconds"] / count * 1e6)
                    server_cpu.append(found["server_seconds"] / count * 1e6)
            finally:
                await take_down(settings)
    return {
        "ours": ours,
        "theirs": theirs,
        "unit": "events/s",
        "profile": {
            "CPU µs an event": {
                "our Python (without PostgreSQL)": _median(our_cpu),
                "Python of eventsourcing": _median(their_cpu),
                "its sessions of PostgreSQL": _median(server_cpu),
            },
            "started as": {
                EVENTSOURCING: "PostgresApplicationRecorder, ProjectionRunner, a transaction an event, "
                "synchronous_commit off as in ours"
            },
        },
    }


def _environment(postgres: str, schema: str) -> dict[str, str]:
    known = conninfo_to_dict(postgres)
    return {
        **os.environ,
        "PERSISTENCE_MODULE": "eventsourcing.postgres",
        "POSTGRES_DBNAME": str(known["dbname"]), "POSTGRES_HOST": str(known["host"]),
        "POSTGRES_PORT": str(known["port"]), "POSTGRES_USER": str(known["user"]),
        "POSTGRES_PASSWORD": str(known.get("password") or "unused"), "POSTGRES_SCHEMA": schema,
        "PGAPPNAME": schema, "PGOPTIONS": f"-c search_path={schema} -c synchronous_commit=off",
    }  # fmt: skip
