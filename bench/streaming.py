"""Rows 3, 5 and 6: the complete path through Kafka and PostgreSQL."""

import asyncio
import contextlib
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import psycopg
import redis
import redis.asyncio
from aiokafka import AIOKafkaProducer

from bench import classic
from bench.stage import envelope, grabs, private_redis, system
from grabstream.connections.opening import gate_limits, key_space, open_redis, sealer
from grabstream.gate.gate import Gate
from grabstream.models.commands import encode_command
from grabstream.settings import Settings, load_settings
from grabstream.streams import brokers
from grabstream.streams.topics import Topics
from grabstream.streams.worker import ROLES
from grabstream.workshop.rehearsal.run import RehearsalProgress, open_books, read_progress

RATE = 2_000
OFFERS = 8
SCHEMA = "bench_classic"


async def until_booked(settings: Settings, events_min: int) -> RehearsalProgress:
    """Returns when at least `events_min` events are decided and every read model has all of them."""
    client = open_redis(settings)
    try:
        async with await open_books(settings) as books:
            while True:
                progress = await read_progress(client, key_space(settings), books)
                if progress.decided >= events_min and progress.complete:
                    return progress
                await asyncio.sleep(0.02)
    finally:
        await client.aclose()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, in seconds, in steps of 10 ms."""
    return sum(_ticks(pid)[:2]) / 100


def cpu_seconds_of_all(pid: int) -> float:
    """As `cpu_seconds`, with that of its children, also of those that have ended."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    total = sum(_ticks(pid))
    for child in children:
        # One that has ended meanwhile is a part of its parent's time.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += sum(_ticks(child))
    return total / 100


def _ticks(pid: int) -> list[int]:
    """Processor time of a process (user, system) and of its children that have ended (user, system)."""
    with open(f"/proc/{pid}/stat") as stat:
        return [int(ticks) for ticks in stat.read().rpartition(")")[2].split()[11:15]]


async def idle(runs: int, seconds: int) -> dict[str, Any]:
    """Row 12: the percentage of a core that a worker with all roles takes while nothing happens, against two
    percent; and what it makes Redis take.
    """
    ours, redis_percents = [], []
    async with system((",".join(ROLES),)) as (settings, [worker]):
        server = redis.asyncio.Redis.from_url(settings.redis_url)
        # Nothing begins any more: groups are joined, and read models are caught up.
        await asyncio.sleep(20)
        for _ in range(runs):
            before = cpu_seconds(worker.pid), await _redis_cpu_seconds(server)
            await asyncio.sleep(seconds)
            ours.append((cpu_seconds(worker.pid) - before[0]) / seconds * 100)
            redis_percents.append((await _redis_cpu_seconds(server) - before[1]) / seconds * 100)
        await server.aclose()
    profile = {"percent of a core": {"Redis": f"{statistics.median(redis_percents):.2f}"}}
    return {"ours": ours, "theirs": [2.0] * runs, "unit": "% of a core", "profile": profile}


async def _redis_cpu_seconds(server: Any) -> float:
    used = await server.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


async def pipeline(runs: int, count: int) -> dict[str, Any]:
    """Row 3: grabs per second from commands in Kafka to committed rows of ledger, balances and audit, against
    the classic script with its updater.
    """
    ours, theirs, profile = [], [], {}
    for _ in range(runs):
        async with system(("decide,relay,sweep", "project")) as (settings, workers):
            rate, profile = await booked(settings, workers, count)
            ours.append(rate)
        theirs.append(await asyncio.to_thread(_pipeline_classic, count))
    return {"ours": ours, "theirs": theirs, "unit": "grabs/s", "profile": {"CPU µs a grab": profile}}


async def booked(
    settings: Settings, workers: list[Any], count: int, servers: Mapping[str, int] | None = None
) -> tuple[float, dict[str, float]]:
    """Grabs per second from commands in Kafka to committed rows, and µs of processor time a grab of each
    worker, and of these servers (by name: process).
    """
    client = open_redis(settings)
    gate = Gate(client, key_space(settings), sealer(settings), gate_limits(settings))
    gate.start()
    offers = [envelope(f"e{number}", count // OFFERS + 1) for number in range(OFFERS)]
    await gate.decide(offers, patience_ms=30_000, timeout_ms=30_000)
    await until_booked(settings, OFFERS)
    await gate.close()
    await client.aclose()
    # The worker is stopped while the commands are sent, so that their producer is not part of the
    # measurement.
    workers[0].send_signal(signal.SIGSTOP)
    producer = AIOKafkaProducer(
        **brokers.at(settings.brokers), acks="all", linger_ms=5, max_batch_size=256 * 1024
    )
    await producer.start()
    for number in range(OFFERS):
        for grab in grabs(f"e{number}", count // OFFERS, start=number * count):
            await producer.send(Topics(settings.prefix).commands, encode_command(grab), partition=number)
    await producer.stop()
    names = ("decide+relay", "project")
    processes = {name: worker.pid for name, worker in zip(names, workers, strict=True)}
    processes |= servers or {}
    before = {name: cpu_seconds_of_all(pid) for name, pid in processes.items()}
    began = time.perf_counter()
    workers[0].send_signal(signal.SIGCONT)
    await until_booked(settings, OFFERS + count // OFFERS * OFFERS)
    seconds = time.perf_counter() - began
    return count / seconds, {
        name: round((cpu_seconds_of_all(pid) - before[name]) / count * 1e6, 1)
        for name, pid in processes.items()
    }


def _pipeline_classic(count: int) -> float:
    with private_redis() as port:
        sha = classic.prepare(redis.Redis(port=port), count, 32)
        postgres = load_settings().postgres
        updater = classic.update_database(port, postgres, SCHEMA, count)
        next(updater)  # makes the tables; no part is taken yet
        began = time.perf_counter()
        # Users are random, so a few grab twice: there are more grabs than parts.
        crowd = classic.pipelined(port, sha, count + count // 100, 32, wait=False)
        done = 0
        while done < count:
            done = next(updater, count)
        seconds = time.perf_counter() - began
        crowd.wait()
        with psycopg.connect(postgres, autocommit=True) as connection:
            connection.execute(f'DROP SCHEMA "{SCHEMA}" CASCADE'.encode())
        return count / seconds


async def _open_loop(count: int, call: Callable[[int], Awaitable[float]]) -> list[float]:
    """Starts RATE calls per second, without waiting for earlier ones; returns the sorted seconds from the
    intended start of each call to its end.
    """
    began = time.perf_counter() + 0.1

    async def timed(number: int) -> float:
        intended = began + number / RATE
        return await call(number) - intended

    tasks = []
    for number in range(count):
        await asyncio.sleep(max(began + number / RATE - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(timed(number)))
    return sorted(await asyncio.gather(*tasks))


def _p99_ms(ordered: list[float]) -> float:
    return ordered[int(len(ordered) * 0.99)] * 1000


async def latency(runs: int, count: int) -> dict[str, Any]:
    """Rows 5 and 6: latency of a `journaled` answer, and of a ledger row, at 2 thousand grabs per second."""
    answered, sent, booked, committed = [], [], [], []
    async with system(("decide,relay,sweep", "project")) as (settings, _):
        client = open_redis(settings)
        gate = Gate(client, key_space(settings), sealer(settings), gate_limits(settings))
        gate.start()
        for run in range(runs):
            offer = f"e{run}"
            await gate.decide([envelope(offer, 2 * count + 10)], patience_ms=30_000, timeout_ms=30_000)
            await until_booked(settings, 1)
            answered.append(await _answers(gate, offer, count))
            booked.append(await _bookings(settings, gate, offer, count))
            sent.append(await _by_hand(settings, count, commit=False))
            committed.append(await _by_hand(settings, count, commit=True))
        await gate.close()
        await client.aclose()
    return {
        "5": {"ours": answered, "theirs": sent, "unit": "ms p99"},
        "6": {"ours": booked, "theirs": committed, "unit": "ms p99"},
    }


async def _answers(gate: Gate, offer: str, count: int) -> float:
    wanted = grabs(offer, count)

    async def call(number: int) -> float:
        [answer] = await gate.decide([wanted[number]], timeout_ms=10_000)
        assert answer.code == 0, answer
        return time.perf_counter()

    return _p99_ms(await _open_loop(count, call))


async def _bookings(settings: Settings, gate: Gate, offer: str, count: int) -> float:
    wanted = grabs(offer, count, start=count)
    shard = key_space(settings).shard_of_offer(offer)
    visible, moved = 0, asyncio.Condition()

    async def follow() -> None:
        nonlocal visible
        async with await open_books(settings) as books:
            while True:
                rows = await books.execute(
                    "SELECT seq FROM cursors WHERE projection = 'ledger' AND shard = %s", (shard,)
                )
                row = await rows.fetchone()
                async with moved:
                    visible = row[0] if row else 0
                    moved.notify_all()
                await asyncio.sleep(0.001)

    async def call(number: int) -> float:
        [answer] = await gate.decide([wanted[number]], "decided", timeout_ms=10_000)
        seq = answer.seq or 0
        async with moved:
            await moved.wait_for(lambda: visible >= seq)
        return time.perf_counter()

    following = asyncio.create_task(follow())
    try:
        return _p99_ms(await _open_loop(count, call))
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def _by_hand(settings: Settings, count: int, commit: bool) -> float:
    """p99 in ms of one call of the classic script, one awaited send with acks=all, and with `commit` one
    committed row.
    """
    plain = redis.Redis.from_url(settings.redis_url)
    sha = classic.prepare(plain, count, 32)
    # On a slow machine, more calls wait than a pool has connections: they wait for a free one.
    pool = redis.asyncio.BlockingConnectionPool.from_url(settings.redis_url, max_connections=64, timeout=None)
    client = redis.asyncio.Redis(connection_pool=pool)
    producer = AIOKafkaProducer(**brokers.at(settings.brokers), acks="all", enable_idempotence=True)
    await producer.start()
    connections = [
        await psycopg.AsyncConnection.connect(settings.postgres, autocommit=True) for _ in range(8)
    ]
    free: asyncio.Queue[Any] = asyncio.Queue()
    await connections[0].execute("DROP TABLE IF EXISTS bench_by_hand")
    await connections[0].execute("CREATE TABLE bench_by_hand (id text, user_id text, body text)")
    for connection in connections:
        free.put_nowait(connection)

    async def call(number: int) -> float:
        user = f"u{number:031d}"
        taken = await client.evalsha(sha, 3, *classic.KEYS, user)
        await producer.send_and_wait(Topics(settings.prefix).rejected, taken)
        if commit:
            connection = await free.get()
            try:
                await connection.execute(
                    "INSERT INTO bench_by_hand VALUES (%s, %s, %s)", (f"g{number}", user, taken.decode())
                )
            finally:
                free.put_nowait(connection)
        return time.perf_counter()

    try:
        return _p99_ms(await _open_loop(count, call))
    finally:
        await connections[0].execute("DROP TABLE bench_by_hand")
        for connection in connections:
            await connection.close()
        await producer.stop()
        await client.aclose()
        plain.delete(*classic.KEYS)
