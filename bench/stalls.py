"""Row `stall`: the longest request of many connections, and what each part of the system did at that time."""

import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import redis.asyncio
from aiokafka import AIOKafkaProducer

from bench.crowds import processes
from bench.http_load import ACCEPTED
from bench.serving import GRABS, Shop, load, shop
from bench.stage import own_servers
from bench.streaming import until_booked
from grabstream.runtime.ending import end
from grabstream.streams import brokers
from grabstream.streams.topics import Topics
from grabstream.workshop.services import LocalServices

CONNECTIONS = 400
SECONDS_ALLOWED = 0.5
#: A busy machine may refuse some.
ANSWERED = (*ACCEPTED, "503", "504")
PAUSE_SECONDS = 0.05
STALLS_SHOWN = 3
#: Redis records what takes longer.
REDIS_MS = 20
_checkpoint = re.compile(r"^(\S+ \S+) \S+ \[\d+\] LOG:  (checkpoint (?:starting|complete).*)$", re.MULTILINE)


class Sample(NamedTuple):
    """Seconds so far of a process and its children: used, and waited for a core; or of the machine: used, and
    waited for the disk.
    """

    at: float
    used: float
    waited: float


class Happened(NamedTuple):
    """Something that took its time, and ended."""

    what: str
    ended: float
    seconds: float


class Stall(NamedTuple):
    """The longest request of its time, and the number of those that were slow beside it."""

    began: float
    ended: float
    count: int


async def longest(runs: int, seconds: float) -> dict[str, Any]:
    """The longest request of CONNECTIONS connections with one journaled grab each, in seconds, against
    SECONDS_ALLOWED. So that a minute has what a longer time would have, a checkpoint of PostgreSQL begins
    after a third of it, and a rewrite of the file of Redis after two thirds.

    The profile says what happened in the longest stalls: what each part took to answer a question of its own
    kind (the gateway `/health`, Redis PING, Kafka a send, PostgreSQL a commit), the time that each used and
    waited for a core, and collections of garbage, late loops, checkpoints, and delays that Redis names.
    """
    slowest, profile = [], {}
    with own_servers() as servers, tempfile.TemporaryDirectory() as folder:
        async with shop(servers, ("bench.watched", folder)) as open_shop:
            await asyncio.to_thread(load, open_shop.gateway, GRABS, seconds / 10, connections=CONNECTIONS)
            for run in range(1, runs + 1):
                async with watching(open_shop, servers, Path(folder)) as watch:
                    disturbing = asyncio.create_task(watch.disturb(seconds / 3))
                    found = await asyncio.to_thread(
                        load, open_shop.gateway, GRABS, seconds, connections=CONNECTIONS,
                        expected=ANSWERED, with_answers=True,
                    )  # fmt: skip
                    await disturbing
                stalls = longest_stalls(found["answers"])
                slowest.append(stalls[0].ended - stalls[0].began)
                profile |= _profile(f"run {run}", found, watch, stalls)
                await until_booked(open_shop.settings, 0)
    return {"ours": slowest, "theirs": [SECONDS_ALLOWED] * runs, "unit": "s", "profile": profile}


def _profile(
    run: str, found: dict[str, Any], watch: "Watch", stalls: Sequence[Stall]
) -> dict[str, dict[str, str]]:
    """What is said of a run: in all, beside each disturbance, and in each stall."""
    profile = {
        run: {
            "requests/s": f"{found['rate']:,.0f}", "p50 ms": f"{found['p50_ms']:.0f}",
            "p99 ms": f"{found['p99_ms']:.0f}",
            "refused": str(found["count"] - found["statuses"]["201"]),
            "load": f"{os.getloadavg()[0]:.1f}",
        }
    }  # fmt: skip
    for what, ended, seconds in watch.disturbances:
        began = ended - seconds
        beside = [latency for due, latency, _ in found["answers"] if due < ended and due + latency > began]
        profile[f"{run}, beside {what}"] = {
            "took": f"{seconds:.2f} s", "longest request": f"{max(beside, default=0):.2f} s",
        }  # fmt: skip
    for stall in stalls:
        profile[f"{run}, {stall.began - found['began']:.1f} s"] = watch.told(stall)
    return profile


def longest_stalls(answers: Sequence[tuple[float, float, str]]) -> list[Stall]:
    """The longest requests that did not overlap, with the number of those that waited meanwhile at least half
    as long.
    """
    stalls: list[Stall] = []
    for began, latency, _ in sorted(answers, key=lambda answer: -answer[1]):
        ended = began + latency
        if any(began < stall.ended and ended > stall.began for stall in stalls):
            continue
        count = sum(1 for at, one, _ in answers if one >= latency / 2 and at < ended and at + one > began)
        stalls.append(Stall(began, ended, count))
        if len(stalls) == STALLS_SHOWN:
            break
    return stalls


class Watch:
    """What is known of all parts of a system."""

    def __init__(self, open_shop: Shop, servers: LocalServices, folder: Path) -> None:
        self.processes = processes(open_shop, servers)
        self.servers = servers
        self.samples: dict[str, list[Sample]] = {name: [] for name in (*self.processes, "the machine")}
        self.happened: list[Happened] = []
        self.disturbances: list[Happened] = []
        self._folder = folder
        #: From the clock of the day to the monotonic one.
        self._offset = time.perf_counter() - time.time()

    async def sample(self) -> None:
        """Looks at all processes, until it is cancelled."""
        while True:
            for name, pid in self.processes.items():
                self.samples[name].append(_sample(pid))
            self.samples["the machine"].append(_machine())
            await asyncio.sleep(PAUSE_SECONDS)

    async def ask(self, what: str, question: Callable[[], Awaitable[Any]]) -> None:
        """Asks a part again and again, until it is cancelled."""
        while True:
            began = time.perf_counter()
            try:
                await question()
                says = "answers"
            except Exception as error:
                says = f"fails, {type(error).__name__}"
            ended = time.perf_counter()
            self.happened.append(Happened(f"{what} {says}", ended, ended - began))
            await asyncio.sleep(PAUSE_SECONDS)

    async def disturb(self, pause: float) -> None:
        """Begins a checkpoint after a pause, and a rewrite of the file of Redis after a second one."""
        await asyncio.sleep(pause)
        async with self._disturbing("a checkpoint"), await _connected(self.servers) as connection:
            await connection.execute("CHECKPOINT")
        await asyncio.sleep(pause)
        async with (
            self._disturbing("a rewrite of the file of Redis"),
            redis.asyncio.Redis(port=self.servers.redis.port) as client,
        ):
            await client.bgrewriteaof()
            while (await client.info("persistence"))["aof_rewrite_in_progress"]:
                await asyncio.sleep(PAUSE_SECONDS)

    @asynccontextmanager
    async def _disturbing(self, what: str) -> AsyncIterator[None]:
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self.disturbances.append(Happened(what, ended, ended - began))

    async def collect(self) -> None:
        """Adds what processes and servers have noted themselves."""
        for name, pid in self.processes.items():
            file = self._folder / f"{pid}.ndjson"
            for line in file.read_text().splitlines() if file.exists() else ():
                what, *times = json.loads(line)
                self.happened.append(Happened(f"{name}, {what}", *times))
        for day, what in _checkpoint.findall(self.servers.postgres.log_file.read_text()):
            at = datetime.fromisoformat(day).timestamp() + self._offset
            self.happened.append(Happened(f"PostgreSQL, {what}", at, 0.0))
        async with redis.asyncio.Redis(port=self.servers.redis.port) as client:
            for event, *_ in await client.execute_command("LATENCY", "LATEST"):
                for at, ms in await client.execute_command("LATENCY", "HISTORY", event):
                    self.happened.append(
                        Happened(f"Redis, {event.decode()}", at + self._offset + 1, ms / 1000)
                    )

    def told(self, stall: Stall) -> dict[str, str]:
        """What happened in a stall. Of what is told more than once, the longest."""
        worst: dict[str, float] = {}
        for what, ended, seconds in (*self.happened, *self.disturbances):
            if ended > stall.began and ended - seconds < stall.ended:
                worst[what] = max(worst.get(what, 0.0), seconds)
        told = {"longest": f"{stall.ended - stall.began:.2f} s of {stall.count} slow requests"}
        for name, samples in self.samples.items():
            inside = [one for one in samples if stall.began - 0.1 <= one.at <= stall.ended + 0.1]
            if len(inside) > 1:
                at, used, waited = (last - first for first, last in zip(inside[0], inside[-1], strict=True))
                told[name] = f"used {used:.2f} and waited {waited:.2f} of {at:.2f} s"
        for what, seconds in sorted(worst.items(), key=lambda one: -one[1]):
            told[what] = f"{seconds * 1000:.0f} ms"
        return told


@asynccontextmanager
async def watching(open_shop: Shop, servers: LocalServices, folder: Path) -> AsyncIterator[Watch]:
    """Watches all parts of a system."""
    watch = Watch(open_shop, servers, folder)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(redis.asyncio.Redis(port=servers.redis.port))
        await client.config_set("latency-monitor-threshold", REDIS_MS)
        await client.execute_command("LATENCY", "RESET")
        connection = await stack.enter_async_context(await _connected(servers))
        producer = AIOKafkaProducer(**brokers.at(open_shop.settings.kafka), acks="all")
        await producer.start()
        stack.push_async_callback(producer.stop)
        topic = Topics(open_shop.settings.prefix).rejected

        async def health() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", open_shop.gateway.port)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                await reader.read()
            finally:
                writer.close()

        questions: dict[str, Callable[[], Awaitable[Any]]] = {
            "gateway": health,
            "Redis": client.ping,
            "Kafka": lambda: producer.send_and_wait(topic, b"bench"),
            "PostgreSQL": lambda: connection.execute("SELECT pg_logical_emit_message(true, 'bench', '')"),
            "what watches": lambda: asyncio.sleep(0),
        }
        tasks = [asyncio.create_task(watch.ask(name, question)) for name, question in questions.items()]
        tasks.append(asyncio.create_task(watch.sample()))
        try:
            yield watch
        finally:
            # A client may swallow a cancellation.
            await end(tasks, again_seconds=PAUSE_SECONDS)
        await watch.collect()


async def _connected(servers: LocalServices) -> "psycopg.AsyncConnection[Any]":
    return await psycopg.AsyncConnection.connect(servers.environment()["postgres"], autocommit=True)


def _sample(pid: int) -> Sample:
    """All threads of a process and of its children."""
    used = waited = 0
    for path in _threads(pid):
        try:
            took, delayed, _ = path.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        used += int(took)
        waited += int(delayed)
    return Sample(time.perf_counter(), used / 1e9, waited / 1e9)


def _threads(pid: int) -> Iterator[Path]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for process in (str(pid), *children):
        yield from Path(f"/proc/{process}/task").glob("*/schedstat")


def _machine() -> Sample:
    """The seconds of all cores that were not idle, and those in which some task waited for the disk: 0 where
    the kernel does not count them.
    """
    user, nice, system, _, _, *others = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    busy = sum(map(int, (user, nice, system, *others[:3])))
    pressure = Path("/proc/pressure/io")
    waited = pressure.read_text().split("total=", 1)[1].split()[0] if pressure.exists() else "0"
    return Sample(time.perf_counter(), busy / 100, int(waited) / 1e6)
