"""Row `client`: the processor time of a call of `AsyncClient` and `Client`, against that of aiohttp alone.

`python -m bench.clients PORT`, a plan as JSON on standard input, is the process of the callers: it makes
grabs, and prints their count, the time they took, and its own processor time as one line of JSON.
"""

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp

from bench.serving import OFFERS, offer_name, said, shop
from bench.streaming import until_booked
from grabstream import AsyncClient, Client

CALLERS = 20
KINDS = ("async_client", "client", "aiohttp")


async def call(runs: int, calls: int) -> dict[str, Any]:
    """The µs of processor time that a process of callers needs for a journaled grab."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    async with shop() as (settings, server, _):
        for run in range(runs + 1):
            for kind in KINDS:
                plan = {"kind": kind, "calls": calls if run else calls // 10, "stem": secrets.token_hex(6)}
                one = await asyncio.to_thread(
                    said, [sys.executable, "-m", "bench.clients", str(server.port)], plan, 600
                )
                await until_booked(settings, 0)
                if run:
                    found[kind].append(one)
    return {
        "ours": [one["cpu_us"] for one in found["async_client"]],
        "theirs": [one["cpu_us"] for one in found["aiohttp"]],
        "unit": "µs CPU a call",
        "profile": {
            "CPU µs a call": {
                kind: ", ".join(f"{one['cpu_us']:.0f}" for one in ones) for kind, ones in found.items()
            },
            "grabs/s": {
                kind: ", ".join(f"{one['rate']:.0f}" for one in ones) for kind, ones in found.items()
            },
        },
    }


def _granted(outcome: str) -> None:
    if outcome != "granted":
        raise RuntimeError(f"a grab was answered {outcome}")


async def _gathered(grab: Callable[[int], Awaitable[str]], calls: int) -> None:
    """Makes the calls by CALLERS tasks."""
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            _granted(await grab(number))

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def _by_async_client(url: str, stem: str, calls: int) -> None:
    async with AsyncClient(url) as client:

        async def grab(number: int) -> str:
            return (await client.grab(offer_name(number % OFFERS), f"{stem}-{number}")).outcome

        await _gathered(grab, calls)


async def _by_aiohttp(url: str, stem: str, calls: int) -> None:
    """What one would write by hand, without repeats."""
    async with aiohttp.ClientSession() as session:

        async def grab(number: int) -> str:
            path = f"{url}/v1/offers/{offer_name(number % OFFERS)}/grabs"
            headers = {"Idempotency-Key": secrets.token_hex(16)}
            async with session.post(path, json={"user": f"{stem}-{number}"}, headers=headers) as reply:
                outcome: str = (await reply.json())["outcome"]
                return outcome

        await _gathered(grab, calls)


def _by_client(url: str, stem: str, calls: int) -> None:
    with Client(url) as client, ThreadPoolExecutor(CALLERS) as threads:

        def grab(number: int) -> str:
            return client.grab(offer_name(number % OFFERS), f"{stem}-{number}").outcome

        for outcome in threads.map(grab, range(calls)):
            _granted(outcome)


def main() -> None:
    """Plays a plan."""
    url = f"http://127.0.0.1:{sys.argv[1]}"
    plan = json.load(sys.stdin)
    kind, stem, calls = plan["kind"], plan["stem"], plan["calls"]
    used, began = time.process_time(), time.perf_counter()
    if kind == "client":
        _by_client(url, stem, calls)
    else:
        asyncio.run((_by_async_client if kind == "async_client" else _by_aiohttp)(url, stem, calls))
    seconds = time.perf_counter() - began
    print(json.dumps({"cpu_us": (time.process_time() - used) / calls * 1e6, "rate": calls / seconds}))


if __name__ == "__main__":
    main()
