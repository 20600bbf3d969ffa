"""What a measurement runs on: a private Redis, and a new system with workers on the Kafka and PostgreSQL of
the settings, or on its own set of servers.
"""

import asyncio
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from pydantic import SecretStr

from grabstream.crypto.sealing import Sealer, new_seal_key
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.lua.running import run_script
from grabstream.lua.script_client import ScriptClient
from grabstream.lua.server import let_callers_set_time, raise_term
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.ops.initialization import make_system
from grabstream.settings import SECRETS, Settings, child_environment, load_settings
from grabstream.workshop.rehearsal.stage import take_down
from grabstream.workshop.services import LocalServices, ServerSet, free_ports
from grabstream.workshop.services.servers import Redis

SEALER = Sealer({"bench": bytes(32)})
#: The module that workers and gateways run.
PROGRAM = ("grabstream.ops.cli",)


@contextmanager
def private_redis() -> Iterator[int]:
    """Runs a private Redis (AOF synchronised every second, never rewritten, so that no rewrite disturbs a
    measurement); yields its port.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = Redis(Path(folder), free_ports(1)[0])
        server.start()
        try:
            redis.Redis(port=server.port).config_set("auto-aof-rewrite-percentage", 0)
            yield server.port
        finally:
            server.kill()


@contextmanager
def own_servers() -> Iterator[LocalServices]:
    """Runs a set of servers that nothing else uses, so that what they do belongs to the measurement."""
    with tempfile.TemporaryDirectory() as name:
        servers = LocalServices(Path(name) / "servers", *free_ports(4))
        try:
            servers.up()
            yield servers
        finally:
            servers.remove()


def server_seconds(client: "redis.Redis") -> float:
    """Processor time used by the Redis thread that runs scripts, in seconds. It does not count the time in
    which other processes kept the thread from running.
    """
    used = client.info("cpu")
    return float(used["used_cpu_user_main_thread"]) + float(used["used_cpu_sys_main_thread"])


async def taken_over_gate(
    port: int,
    limits: GateLimits,
    prefix: str = "bench",
    clock: Callable[[], int] | None = None,
) -> tuple[Gate, Any]:
    """A gate on new shards without a relay, so that the outboxes only grow; and its client."""
    client = ScriptClient(port=port)
    return await gate_of(client, limits, prefix, clock), client


async def gate_of(
    client: Any,
    limits: GateLimits,
    prefix: str = "bench",
    clock: Callable[[], int] | None = None,
) -> Gate:
    """As `taken_over_gate`, with an existing client; empties its server."""
    await client.flushall()
    keys = KeySpace(prefix, 8)
    await take_over(client, keys)
    return Gate(client, keys, SEALER, limits, clock)


async def take_over(client: Any, keys: KeySpace) -> None:
    """Lets new shards decide, without a relay."""
    for number in range(keys.shards):
        state = keys.shard(number).state
        await let_callers_set_time(client, state)
        (term, server_epoch, *_), _ = await raise_term(client, state, 0, "bench")
        await run_script(client, "reconcile", [state], [term, "bench", server_epoch, "0", keys.shards])


def envelope(offer: str, parts: int) -> Open:
    """An envelope of `parts` parts with the law `equal`, which opens fast."""
    terms = EnvelopeTerms(
        issuer="bench",
        funding="bench",
        asset="CNY",
        total=parts * 150,
        parts=parts,
        law="equal",
        seed="ab" * 16,
    )
    return Open(id=f"open-{offer}", offer=offer, terms=terms)


def grabs(offer: str, count: int, id_length: int = 32, start: int = 0) -> list[Grab]:
    """Grabs of distinct users, with ids of the given length."""
    number_length = id_length - 1
    return [
        Grab(id=f"g{number:0{number_length}d}", offer=offer, user=f"u{number:0{number_length}d}")
        for number in range(start, start + count)
    ]


@asynccontextmanager
async def system(
    roles: Sequence[str], servers: ServerSet | None = None, program: Sequence[str] = PROGRAM
) -> AsyncIterator[tuple[Settings, list["subprocess.Popen[bytes]"]]]:
    """Runs a system with a worker for each of `roles`, on these servers, or else on the Kafka and PostgreSQL
    of the settings and a private Redis; removed afterwards. `program`: a module that runs the command line,
    and its own arguments.
    """
    name = f"bench{secrets.token_hex(4)}"
    with ExitStack() as stack:
        if servers is None:
            port = stack.enter_context(private_redis())
            where = {"redis_url": f"redis://127.0.0.1:{port}/0"}
        else:
            where = servers.environment()
        settings = settings_at(where).model_copy(
            update={
                "prefix": name,
                "schema_": name,
                "seal_keys": SecretStr(new_seal_key()),
                "issuer_seeds": True,
            }
        )
        await make_system(settings)
        addresses = {"kafka": settings.kafka, "postgres": settings.postgres} | where
        environment = child_environment(
            **addresses, prefix=name, schema=name, seal_keys=settings.seal_keys.get_secret_value(),
            outbox_events_max="10000000", gate_queue_max="1000000",
        )  # fmt: skip
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", *program, "worker", "--roles", worker_roles],
                env=environment,
                stderr=subprocess.DEVNULL,
            )
            for worker_roles in roles
        ]
        try:
            yield settings, workers
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGCONT)
                worker.terminate()
            for worker in workers:
                await asyncio.to_thread(worker.wait, 30)
            await take_down(settings)


def settings_at(where: dict[str, str]) -> Settings:
    """The settings, with the addresses and logins of these servers (`ServerSet.environment`)."""
    return load_settings().model_copy(
        update={name: SecretStr(value) if name in SECRETS else value for name, value in where.items()}
    )
