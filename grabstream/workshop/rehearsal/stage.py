"""The stage: a separate system for the rehearsal (topics, schema, keys) with workers, removed afterwards."""

import asyncio
import contextlib
import logging
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient

from grabstream.connections.opening import open_redis
from grabstream.gate.gate import Gate
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand
from grabstream.models.outcomes import OutcomeUnknown
from grabstream.ops.initialization import make_system
from grabstream.projections.database.sessions import connect
from grabstream.projections.versions import drop_all
from grabstream.runtime.trouble import is_trouble
from grabstream.settings import Settings, child_environment
from grabstream.streams import brokers
from grabstream.streams.clients import error_text, started
from grabstream.streams.topics import Topics, retention_ms

log = logging.getLogger(__name__)

#: The roles of two processes, since a small machine has two cores: one decides and relays, one writes the
#: read models.
WORKERS = ("decide,relay,sweep", "project,publish,verify")
STOP_SECONDS = 6.0
#: How long the gate tries to get commands decided before it says that their outcome is unknown.
PATIENCE_MS = 30_000
GATEWAY = "gateway"
#: How long the rehearsal waits without progress: no process is ready, no event, no answer.
STILL_SECONDS = 300.0
#: What a look counts for at most: a process that gets no time, or sleeps with its machine, sees no progress.
LOOK_SECONDS_MAX = 5.0
#: How often the removal of the system from a server is tried, and how long it waits before the next try.
REMOVALS_MAX = 3
REMOVAL_PAUSE_SECONDS = 2.0
_listening = re.compile(rb"listening on http://127\.0\.0\.1:(\d+);").search


class CannotGoOn(Exception):
    """The rehearsal cannot continue: there is no progress, a process of it has ended, an envelope was not
    opened, or the gateway answered a status that no repeat changes.
    """


async def decide_all(
    gate: Gate, commands: Sequence[AnyCommand], check: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Sends commands through the gate until all are decided: after an unknown outcome, `busy` or `fenced` it
    sends them again with the same ids, so that those decided before get their first answer again. `check` is
    called before each attempt.
    """
    while True:
        check()
        try:
            answers = await gate.decide(commands, patience_ms=PATIENCE_MS)
        except OutcomeUnknown:
            continue
        if all(answer.decided for answer in answers):
            return answers


class WorkerEnded(CannotGoOn):
    """A worker or the gateway of the rehearsal has ended; the text names its log."""


class Patience:
    """Ends a wait after STILL_SECONDS without progress."""

    def __init__(self) -> None:
        self._seen: object = None
        self._looked = math.inf
        self._still = 0.0

    def observe(self, seen: object, status: str, busy: bool = False) -> None:
        """Compares `seen` with the last call. Raises CannotGoOn with the status when it was the same for
        STILL_SECONDS; time during which `busy` is true does not count.
        """
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        if seen != self._seen or busy:
            self._seen, self._still = seen, 0.0
            return
        self._still += min(max(since, 0.0), LOOK_SECONDS_MAX)
        if self._still > STILL_SECONDS:
            raise CannotGoOn(f"no progress for {STILL_SECONDS:.0f} s: {status}")


class Stage:
    """The running workers, and the gateway if there is one."""

    def __init__(self, workers: dict[str, "subprocess.Popen[bytes]"], log: Path, gateway_log: Path) -> None:
        self._workers = workers
        self._log = log
        self._gateway_log = gateway_log

    @property
    def processes(self) -> dict[str, int]:
        """The process of each set of roles, and of the gateway."""
        return {roles: worker.pid for roles, worker in self._workers.items()}

    def check(self) -> None:
        """Raises WorkerEnded when a worker has ended."""
        for roles, worker in self._workers.items():
            if worker.poll() is not None:
                who = roles if roles == GATEWAY else f"worker for {roles}"
                raise WorkerEnded(f"the {who} ended with code {worker.returncode}: see {self._log}")

    async def gateway_port(self) -> int:
        """The port of the gateway, when it listens; raises CannotGoOn when it does not for long."""
        patience = Patience()
        while (found := _listening(self._gateway_log.read_bytes())) is None:
            self.check()
            patience.observe("starting", f"the gateway does not listen: see {self._log}")
            await asyncio.sleep(0.05)
        return int(found[1])


@asynccontextmanager
async def set_up(
    settings: Settings, log: Path, keep: bool, processes: Sequence[str] = WORKERS
) -> AsyncIterator[Stage]:
    """Makes a system, and starts a worker for each set of roles, and a gateway where GATEWAY is among them.
    At the end it stops them, and removes the system unless `keep`.
    """
    await make_system(settings)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = child_environment(
        prefix=settings.prefix, schema=settings.schema_, seal_keys=settings.seal_keys.get_secret_value(),
        redis_url=settings.redis_url, kafka=settings.kafka, postgres=settings.postgres,
        shards=str(settings.shards),
        # The gateway is for the rehearsal, on this machine; its crowd has no credentials, and one address.
        gateway_authentication="none", gateway_hosts="",
        gateway_address_connections_max=str(settings.gateway_connections_max),
    )  # fmt: skip
    workers = {}
    # Rehearsals in one folder share the log; each reads the port of its gateway in its own file.
    folder = tempfile.TemporaryDirectory(prefix="grabstream-rehearsal-")
    gateway_log = Path(folder.name) / "gateway.log"
    try:
        with log.open("wb") as shared, gateway_log.open("wb") as own:
            for roles in processes:
                output = own if roles == GATEWAY else shared
                words = [GATEWAY, "--port", "0"] if roles == GATEWAY else ["worker", "--roles", roles]
                command = [sys.executable, "-P", "-m", "grabstream.ops.cli", *words]
                workers[roles] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)  # noqa: ASYNC220 - forks at once
        yield Stage(workers, log, gateway_log)
    finally:
        await asyncio.to_thread(stop_workers, list(workers.values()))
        with log.open("ab") as shared:
            shared.write(gateway_log.read_bytes())
        folder.cleanup()
        if not keep:
            await _remove(settings)


async def _remove(settings: Settings) -> None:
    """Removes the system from each server. What a server does not do in time changes no verdict: it is only
    reported.
    """
    await _try_to_remove("topics", _delete_topics, settings)
    await _try_to_remove("schemas", _drop_schemas, settings)
    await _try_to_remove("keys", _delete_keys, settings)


async def _try_to_remove(
    what: str, remove: Callable[[Settings], Awaitable[None]], settings: Settings
) -> None:
    for left in reversed(range(REMOVALS_MAX)):
        try:
            await remove(settings)
            return
        except Exception as error:
            if not is_trouble(error):
                raise
            if not left:
                log.warning(
                    "the %s of the rehearsal, with the prefix and schema %s, are not removed: %s",
                    what, settings.prefix, error_text(error),
                )  # fmt: skip
                return
        await asyncio.sleep(REMOVAL_PAUSE_SECONDS)


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
    await _delete_topics(settings)
    await _drop_schemas(settings)
    await _delete_keys(settings)


async def _delete_topics(settings: Settings) -> None:
    async with started(AIOKafkaAdminClient(**brokers.at(settings.brokers))) as client:
        await client.delete_topics(list(retention_ms(Topics(settings.prefix))))


async def _drop_schemas(settings: Settings) -> None:
    async with await connect(settings.postgres, settings.schema_) as connection:
        await drop_all(connection, settings.schema_)


async def _delete_keys(settings: Settings) -> None:
    redis = open_redis(settings)
    try:
        keys = [key async for key in redis.scan_iter(match=f"{settings.prefix}:*", count=1_000)]
        for start in range(0, len(keys), 500):
            await redis.unlink(*keys[start : start + 500])
    finally:
        await redis.aclose()
