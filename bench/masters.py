"""Row `masters`: decisions on one, two and three Redis masters, measured as processor time per decision,
since all masters share the cores of this machine.
"""

import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from bench.deciding import LIMITS, answered_lists
from bench.stage import SEALER, envelope, grabs, take_over
from grabstream.connections.opening import open_redis
from grabstream.gate.gate import Gate
from grabstream.lua.keys import KeySpace
from grabstream.settings import load_settings
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.cluster import join_redis
from grabstream.workshop.services.servers import Redis

SHARDS = 12
MASTERS = (1, 2, 3)


@asynccontextmanager
async def masters(count: int) -> AsyncIterator[tuple[Gate, list[int]]]:
    """Yields a gate, and the ports of `count` masters without replicas, over which its shards are spread
    evenly.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ports, buses = free_ports(count), free_ports(count)
        servers = [
            Redis(Path(folder) / str(port), port, f"redis-{port}", bus)
            for port, bus in zip(ports, buses, strict=True)
        ]
        for server in servers:
            server.start()
            stack.callback(server.kill)
            with redis.Redis(port=server.port) as client:
                client.config_set("auto-aof-rewrite-percentage", 0)
        join_redis(servers, count)
        url = "redis-cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        client = open_redis(load_settings().model_copy(update={"redis_url": url}))
        keys = KeySpace(_even_prefix(count), SHARDS)
        await take_over(client, keys)
        gate = Gate(client, keys, SEALER, LIMITS)
        try:
            yield gate, ports
        finally:
            await gate.close()
            await client.aclose()


def _even_prefix(count: int) -> str:
    """A prefix whose shards are spread evenly over the masters. The slot of a shard is a hash, and an uneven
    spread would change the result.
    """
    for number in range(100_000):
        keys = KeySpace(f"bench{number}", SHARDS)
        slots = [_slot(keys.shard(shard).state) for shard in range(SHARDS)]
        if {sum(slot * count // 16_384 == master for slot in slots) for master in range(count)} == {
            SHARDS // count
        }:
            return keys.prefix
    raise RuntimeError(f"no prefix spreads {SHARDS} shards over {count} masters")


def _slot(key: str) -> int:
    return int(key_slot(key.encode()))


def _server_seconds(ports: list[int]) -> float:
    """Processor time of all masters so far, in seconds."""
    total = 0.0
    for port in ports:
        with redis.Redis(port=port) as client:
            used = client.info("cpu")
            total += used["used_cpu_user"] + used["used_cpu_sys"]
    return total


async def _measure(count: int, decisions: int) -> dict[str, float]:
    async with masters(count) as (gate, ports):
        offers = [f"e{number}" for number in range(SHARDS * 4)]
        each = decisions // len(offers)
        await gate.decide([envelope(offer, each) for offer in offers], "decided", timeout_ms=60_000)
        by_offer = [grabs(offer, each) for offer in offers]
        wanted = [by_offer[index % len(offers)][index // len(offers)] for index in range(each * len(offers))]
        # Each list of 32 names one offer, as the lists of a service usually do.
        lists = sorted(
            range(len(wanted)), key=lambda index: (index // (32 * len(offers)), index % len(offers))
        )
        client_before, server_before = time.process_time(), _server_seconds(ports)
        rate = await answered_lists(gate, [wanted[index] for index in lists])
        client, server = time.process_time() - client_before, _server_seconds(ports) - server_before
        return {
            "decisions/s": round(rate),
            "µs of Redis": round(server / len(wanted) * 1e6, 2),
            "µs of client": round(client / len(wanted) * 1e6, 2),
        }


async def work_per_decision(runs: int, decisions: int) -> dict[str, Any]:
    """Row `masters`: µs of processor time per decision (Redis and client) on three masters, against one."""
    profile: dict[str, Any] = {}
    ours, theirs = [], []
    for _ in range(runs):
        for count in MASTERS:
            profile[f"{count} masters"] = await _measure(count, decisions)
        for results, count in ((theirs, MASTERS[0]), (ours, MASTERS[-1])):
            times = profile[f"{count} masters"]
            results.append(times["µs of Redis"] + times["µs of client"])
    return {"ours": ours, "theirs": theirs, "unit": "µs/decision", "profile": profile}
