"""A call of 1, 20 and 100 grabs as a function of the library, against the same script run by EVALSHA; and in
a shard that writes runs, against one that writes an event a grab. Compared are the instructions that
Redis executes for a call, counted by callgrind, so that the other processes of the machine do not change the
result.

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
from typing import Any, Final

import redis

from bench.stage import envelope, grabs, taken_over_gate
from grabstream.lua.gate import calls
from grabstream.lua.gate.calls import GateLimits
from grabstream.lua.keys import LAYOUT, LAYOUT_MIN
from grabstream.models.commands import Open
from grabstream.models.offers import Limit, StockTerms
from grabstream.ops.services import free_ports

#: Grabs of a call, and calls that are counted.
SIZES: Final = {1: 400, 20: 100, 100: 40}
LIMITS: Final = (Limit("user", "offer", 9), Limit("user", "day", 5), Limit("user", "hour", 3))
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


async def instructions(
    opening: Open, size: int, count: int, plain: bool = False, layout: int = LAYOUT
) -> int:
    """The instructions of a whole measurement: its start, an offer, and so many calls of `size` grabs."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with counted_redis(log) as port:
            calls.is_plain = lambda client, state: plain  # type: ignore[assignment]
            limits = GateLimits(timeout_ms=600_000, outbox_events_max=10**9, clock_skew_ms_max=10**9)
            gate, client = await taken_over_gate(port, limits, layout=layout)
            everything = grabs("e", 100 * 100, 20)
            await gate.decide([opening], "decided")
            await gate.decide(everything[:1], "decided")
            for number in range(count):
                begin = 1 + number * size
                answers = await gate.decide(everything[begin : begin + size], "decided")
                expected = "held" if isinstance(opening.terms, StockTerms) else "granted"
                assert {answer.outcome for answer in answers} == {expected}
            await gate.close()
            await client.aclose()
        counted = _COUNTED.search(log.read_text())
        assert counted is not None
        return int(counted[1])


async def main() -> None:
    """Prints the tables."""
    terms = StockTerms(
        issuer="bench", total=50_000, hold_ms=3_600_000, price=5, currency="CNY", limits=LIMITS
    )
    held = Open(id="open", offer="e", terms=terms)
    for size, count in SIZES.items():
        await _compare(
            "envelope", size, count, envelope("e", 50_000), "EVALSHA", {"plain": True}, "FCALL", {}
        )
    for name, opening in (("envelope", envelope("e", 50_000)), ("holds under three limits", held)):
        for size, count in SIZES.items():
            single = {"layout": LAYOUT_MIN}
            await _compare(name, size, count, opening, "an event a grab", single, "runs", {})


async def _compare(
    name: str, size: int, count: int, opening: Open, before: str, of_before: Any, after: str, of_after: Any
) -> None:
    """Prints a row: the instructions of a call in two ways."""
    of_call = []
    for way in (of_before, of_after):
        # The difference of two measurements leaves out what is not of these calls.
        few, many = [await instructions(opening, size, n, **way) for n in (count // 4, count)]
        of_call.append((many - few) / (count - count // 4) / 1000)
    print(
        f"{name}, {size:>3} grabs: {before} {of_call[0]:,.0f}, {after} {of_call[1]:,.0f} thousand "
        f"instructions a call, ratio {of_call[1] / of_call[0]:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    asyncio.run(main())
