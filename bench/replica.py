"""Row `replica`: decisions in lists on a Redis with one replica and `min-replicas-to-write 1`, against one
without a replica, measured as processor time per decision, since all servers share the cores of this machine.
Row `file`: the same with a replica on both sides, where only the replica writes an append-only file, against
both servers writing one.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from bench.deciding import Load, Side, answered_lists, in_turns
from bench.stage import private_redis, server_seconds
from grabstream.gate.gate import Gate
from grabstream.lua.script_client import ScriptClient
from grabstream.models.answers import Answer
from grabstream.models.commands import Grab
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import Redis

#: How long a replica may take to follow its master, in seconds.
FOLLOWS_SECONDS_MAX = 60


@contextmanager
def replica_of(port: int) -> Iterator[int]:
    """Runs a replica of a private Redis, which then refuses writes when the replica does not follow; yields
    the port of the replica.
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
        master_info, replica_info = master.info("replication"), replica.info("replication")
        if (
            replica_info.get("master_link_status") == "up"
            and master_info["master_repl_offset"] == replica_info["slave_repl_offset"]
        ):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the replica does not follow: {replica_info}")
        time.sleep(0.05)


class _TimedGate:
    """A gate, and how long each call of it took, in seconds."""

    def __init__(self, gate: Gate, seconds: list[float]) -> None:
        self._gate = gate
        self._seconds = seconds

    async def decide(self, *commands: Any, **options: Any) -> list[Answer]:
        """As the gate's."""
        began = time.perf_counter()
        answers: list[Answer] = await self._gate.decide(*commands, **options)
        self._seconds.append(time.perf_counter() - began)
        return answers


class ReplicatedSide(Side):
    """The side with a replica, which does its work within the turn; what that costs is stated apart."""

    def __init__(self, port: int, replica_port: int) -> None:
        super().__init__(lambda: ScriptClient(port=port), redis.Redis(port=port))
        self._replica = redis.Redis(port=replica_port)
        self._replica_seconds = 0.0

    async def begin(self, count: int) -> None:
        """Opens an envelope in an empty Redis."""
        await super().begin(count)
        self._replica_seconds = 0.0

    async def decide(self, load: Load, wanted: Sequence[Grab]) -> None:
        """Adds what these decisions cost."""
        until_followed(self._server, self._replica)
        before = server_seconds(self._replica)
        await super().decide(load, wanted)
        # What the replica still applies then would disturb the other side.
        until_followed(self._server, self._replica)
        self._replica_seconds += server_seconds(self._replica) - before

    def profile(self, count: int) -> dict[str, float]:
        """As of any side, and µs of the replica."""
        return super().profile(count) | {"µs of the replica": round(self._replica_seconds / count * 1e6, 2)}


class FileSide(ReplicatedSide):
    """A side that also measures how long callers wait, and what the whole process of the master costs and
    writes: its file is synchronised by another thread.
    """

    async def begin(self, count: int) -> None:
        """Opens an envelope in an empty Redis."""
        await super().begin(count)
        self._waits: list[float] = []
        self._process_seconds = self._written = 0.0

    async def decide(self, load: Load, wanted: Sequence[Grab]) -> None:
        """Adds what these decisions cost."""

        async def timed(gate: Gate, commands: Sequence[Grab]) -> float:
            return await load(_TimedGate(gate, self._waits), commands)  # type: ignore[arg-type]

        before = self._process()
        await super().decide(timed, wanted)
        seconds, written = self._process()
        self._process_seconds += seconds - before[0]
        self._written += written - before[1]

    def _process(self) -> tuple[float, int]:
        """Processor time of all threads of the master, in seconds, and the bytes it has written to disks."""
        used = self._server.info("cpu")
        pid = self._server.info("server")["process_id"]
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"]), int(fields["write_bytes"])

    def profile(self, count: int) -> dict[str, float]:
        """As of any side with a replica, and the rest; waits in ms."""
        waits = statistics.quantiles(self._waits, n=1_000)
        return super().profile(count) | {
            "µs of the whole master": round(self._process_seconds / count * 1e6, 2),
            "bytes to disk": round(self._written / count),
            **{
                f"wait {name}, ms": round(waits[at] * 1e3, 1)
                for name, at in (("p50", 499), ("p99", 989), ("p99.9", 998))
            },
        }


async def file_of_replica(runs: int, count: int) -> dict[str, Any]:
    """Row `file`: decisions per second of processor time (thread of the master, and the process that sends),
    where only the replica writes a file, and where both do.
    """
    with ExitStack() as stack:
        both, only = (stack.enter_context(private_redis()) for _ in range(2))
        with redis.Redis(port=only) as master:
            master.config_set("appendonly", "no")
        sides = [FileSide(port, stack.enter_context(replica_of(port))) for port in (both, only)]
        return await in_turns(
            ("both write a file", sides[0]), ("only the replica", sides[1]), answered_lists, runs, count
        )


async def decisions(runs: int, count: int) -> dict[str, Any]:
    """Row `replica`: decisions per second of processor time (thread of the master, and the process that
    sends), with a replica and without.
    """
    with ExitStack() as stack:
        alone, master = (stack.enter_context(private_redis()) for _ in range(2))
        without = Side(lambda: ScriptClient(port=alone), redis.Redis(port=alone))
        with_replica = ReplicatedSide(master, stack.enter_context(replica_of(master)))
        return await in_turns(
            ("without", without), ("with a replica", with_replica), answered_lists, runs, count
        )
