"""A call of 1, 20 and 100 grabs as a function of the library, against the same script run by EVALSHA.
Compared are the instructions that Redis executes for a call, counted by callgrind, so that the other
processes of the machine do not change the result.

`python -m bench.functions`; needs valgrind. It prints a row for each size: instructions of a call both ways,
and their ratio.
"""

import asyncio
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import redis

from bench.stage import envelope, grabs, taken_over_gate
from grabstream.gate.calls import GateLimits
from grabstream.lua import running
from grabstream.workshop.services import free_ports

#: Grabs of a call, and calls that are counted.
SIZES: Final = {1: 400, 20: 100, 100: 40}
_COUNTED: Final = re.compile(r"Collected : (\d+)")


@contextmanager
def counted_redis(log: Path) -> Iterator[int]:
    """A Redis under callgrind; yields its port. Its instructions are in `log` after the block."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", f"--log-file={log}"]
    with started_redis(command, log.parent) as (port, _):
        yield port


@contextmanager
def started_redis(command: Sequence[str], folder: Path) -> Iterator[tuple[int, int]]:
    """A Redis without an append-only file that another program runs; yields its port and its process."""
    [port] = free_ports(1)
    server = subprocess.Popen(
        [*command, "redis-server", "--port", str(port), "--save", "", "--hz", "1"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                redis.Redis(port=port).ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield port, server.pid
        redis.Redis(port=port).shutdown(nosave=True)
        server.wait(60)
    finally:
        server.kill()


async def instructions(size: int, count: int, plain: bool) -> int:
    """The instructions of a whole measurement: its start, an offer, and `count` calls of `size` grabs."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with counted_redis(log) as port:
            running.is_plain = lambda client, state: plain  # type: ignore[assignment]
            limits = GateLimits(timeout_ms=600_000, outbox_events_max=10**9, clock_skew_ms_max=10**9)
            gate, client = await taken_over_gate(port, limits)
            everything = grabs("e", 100 * 100, 20)
            await gate.decide([envelope("e", 50_000)], "decided")
            await gate.decide(everything[:1], "decided")
            for number in range(count):
                begin = 1 + number * size
                answers = await gate.decide(everything[begin : begin + size], "decided")
                assert {answer.outcome for answer in answers} == {"granted"}
            await gate.close()
            await client.aclose()
        counted = _COUNTED.search(log.read_text())
        assert counted is not None
        return int(counted[1])


async def main() -> None:
    """Prints the table."""
    for size, count in SIZES.items():
        costs = []
        for plain in (True, False):
            # The difference of two measurements leaves out what is not of these calls.
            few, many = [await instructions(size, n, plain) for n in (count // 4, count)]
            costs.append((many - few) / (count - count // 4) / 1000)
        print(
            f"{size:>3} grabs: EVALSHA {costs[0]:,.0f}, FCALL {costs[1]:,.0f} thousand instructions a "
            f"call, ratio {costs[1] / costs[0]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    asyncio.run(main())
