"""Row `replica`: decisions in lists on a Redis with one replica and `min-replicas-to-write 1`, against one
without a replica, measured as processor time per decision, since all servers share the cores of this machine.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from bench.deciding import LIMITS, answered_lists
from bench.stage import envelope, grabs, private_redis, server_seconds, taken_over_gate
from grabstream.models.commands import Grab
from grabstream.ops.services import free_ports
from grabstream.ops.services.servers import Redis

WITH, WITHOUT = "with a replica", "without"
#: How long a replica may take to follow its master, in seconds.
FOLLOWS_SECONDS_MAX = 60
#: Decisions of one side before the other side's turn.
TURN = 20_000


@contextmanager
def replica_of(port: int) -> Iterator[int]:
    """Runs a replica of a private Redis, which from then on refuses to write when the replica does not
    follow; yields the port of the replica.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = Redis(Path(folder), free_ports(1)[0])
        server.start()
        try:
            with redis.Redis(port=server.port) as replica, redis.Redis(port=port) as master:
                replica.config_set("auto-aof-rewrite-percentage", 0)
                replica.replicaof("127.0.0.1", port)
                until_followed(master, replica)
                master.config_set("min-replicas-to-write", 1)
            yield server.port
        finally:
            server.kill()


def until_followed(master: "redis.Redis", replica: "redis.Redis") -> None:
    """Returns when the replica has everything that the master has written."""
    deadline = time.monotonic() + FOLLOWS_SECONDS_MAX
    while True:
        of_master, of_replica = master.info("replication"), replica.info("replication")
        if (
            of_replica.get("master_link_status") == "up"
            and of_master["master_repl_offset"] == of_replica["slave_repl_offset"]
        ):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the replica does not follow: {of_replica}")
        time.sleep(0.05)


class Side:
    """A gate of one side, and what its decisions have cost in the present run, in seconds."""

    def __init__(self, port: int, replica_port: int | None) -> None:
        self.master = redis.Redis(port=port)
        self.replica = redis.Redis(port=replica_port) if replica_port else None
        self.port = port
        self.spent = [0.0] * 4

    async def begin(self, count: int) -> None:
        """Opens an envelope in an empty Redis."""
        self.gate, self.client = await taken_over_gate(self.port, LIMITS)
        await self.gate.decide([envelope("e", count)], "decided", timeout_ms=60_000)
        self.spent = [0.0] * 4

    async def end(self) -> None:
        """Closes the gate and its client."""
        await self.gate.close()
        await self.client.aclose()

    async def decide(self, wanted: Sequence[Grab]) -> None:
        """Adds what these decisions cost: seconds of the master, the process that sends, and the replica, and
        seconds by the clock.
        """
        if self.replica is not None:
            until_followed(self.master, self.replica)
        before = self._seconds()
        rate = await answered_lists(self.gate, wanted)
        after = self._seconds()
        if self.replica is not None:
            # What the replica still applies then would disturb the other side.
            until_followed(self.master, self.replica)
            after[2] = server_seconds(self.replica)
        spent = [now - then for now, then in zip(after, before, strict=True)]
        self.spent = [sum(pair) for pair in zip(self.spent, [*spent, len(wanted) / rate], strict=True)]

    def _seconds(self) -> list[float]:
        of_replica = server_seconds(self.replica) if self.replica is not None else 0.0
        return [server_seconds(self.master), time.process_time(), of_replica]


async def decisions(runs: int, count: int) -> dict[str, Any]:
    """Row `replica`: decisions per second of processor time (thread of the master, and the process that
    sends), with a replica and without. The sides take turns all the time, so that what else the machine does
    meets both.
    """
    rates: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    profile: dict[str, dict[str, float]] = {}
    wanted = grabs("e", count)
    with ExitStack() as stack:
        alone, master = (stack.enter_context(private_redis()) for _ in range(2))
        sides = {WITHOUT: Side(alone, None), WITH: Side(master, stack.enter_context(replica_of(master)))}
        for run in range(runs):
            for side in sides.values():
                await side.begin(count)
            for turn, start in enumerate(range(0, count, TURN)):
                for name in (WITHOUT, WITH) if turn % 2 == 0 else (WITH, WITHOUT):
                    await sides[name].decide(wanted[start : start + TURN])
            for name, side in sides.items():
                of_master, of_sender, of_replica, seconds = side.spent
                rates[name].append(count / (of_master + of_sender))
                profile[f"{name}, run {run + 1}"] = {
                    "decisions/s": round(count / seconds),
                    "µs of Redis": round(of_master / count * 1e6, 2),
                    "µs of client": round(of_sender / count * 1e6, 2),
                    "µs of the replica": round(of_replica / count * 1e6, 2),
                }
                await side.end()
    return {
        "ours": rates[WITH],
        "theirs": rates[WITHOUT],
        "unit": "decisions/s of a core",
        "profile": profile,
    }
