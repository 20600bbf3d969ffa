"""The stage: a separate system for the rehearsal (topics, schema, keys) with workers, removed afterwards."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient

from grabstream.ops.connections.opening import open_redis
from grabstream.ops.initialization import make_system
from grabstream.ops.settings import Settings, child_environment
from grabstream.projections.database.sessions import connect
from grabstream.projections.versions import drop_all
from grabstream.streams.clients import started
from grabstream.streams.topics import Topics, retention_ms

#: The roles of two processes, since a small machine has two cores: one decides and relays, one writes the
#: read models.
WORKERS = ("decide,relay,sweep", "project,publish,verify")
STOP_SECONDS = 6.0


class CannotGoOn(Exception):
    """The rehearsal cannot continue: there is no progress, or an envelope was not opened."""


class WorkerEnded(CannotGoOn):
    """A worker of the rehearsal has ended; the text names its log."""


class Stage:
    """The running workers."""

    def __init__(self, workers: dict[str, "subprocess.Popen[bytes]"], log: Path) -> None:
        self._workers = workers
        self._log = log

    def check(self) -> None:
        """Raises WorkerEnded when a worker has ended."""
        for roles, worker in self._workers.items():
            if worker.poll() is not None:
                raise WorkerEnded(
                    f"the worker for {roles} ended with code {worker.returncode}: see {self._log}"
                )


@asynccontextmanager
async def set_up(
    settings: Settings, log: Path, keep: bool, processes: Sequence[str] = WORKERS
) -> AsyncIterator[Stage]:
    """Makes a system, and starts a worker for each set of roles. At the end it stops the workers, and removes
    the system unless `keep`.
    """
    await make_system(settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = child_environment(
        prefix=settings.prefix, schema=settings.schema_, seal_keys=settings.seal_keys.get_secret_value(),
        redis_url=settings.redis_url, kafka=settings.kafka, postgres=settings.postgres,
        shards=str(settings.shards),
    )  # fmt: skip
    workers = {}
    try:
        with log.open("wb") as output:
            for roles in processes:
                command = [sys.executable, "-m", "grabstream.ops.cli", "worker", "--roles", roles]
                workers[roles] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)  # noqa: ASYNC220 - forks at once
        yield Stage(workers, log)
    finally:
        await asyncio.to_thread(stop_workers, list(workers.values()))
        if not keep:
            await take_down(settings)


def stop_workers(workers: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Stops worker processes with SIGTERM, and kills those that have not ended after STOP_SECONDS."""
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(signal.SIGTERM)
    # Their system is removed, so they need not end cleanly.
    deadline = time.monotonic() + STOP_SECONDS
    for worker in workers:
        try:
            worker.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


async def take_down(settings: Settings) -> None:
    """Deletes topics, schemas and keys of a system. Only for systems that were made for one use."""
    async with started(AIOKafkaAdminClient(bootstrap_servers=settings.kafka)) as client:
        await client.delete_topics(list(retention_ms(Topics(settings.prefix))))
    async with await connect(settings.postgres, settings.schema_) as connection:
        await drop_all(connection, settings.schema_)
    redis = open_redis(settings)
    try:
        keys = [key async for key in redis.scan_iter(match=f"{settings.prefix}:*", count=1_000)]
        for start in range(0, len(keys), 500):
            await redis.unlink(*keys[start : start + 500])
    finally:
        await redis.aclose()
