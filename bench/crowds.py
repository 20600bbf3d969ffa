"""Rows over HTTP with servers of their own, of which everything is counted: the processor time of all
processes, and a crowd of three times what is served.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.http_load import ACCEPTED
from bench.serving import GRABS, ROLES, Shop, load, median_of, shop
from bench.stage import own_servers
from bench.streaming import RATE, cpu_seconds_of_all, until_booked
from grabstream.workshop.services import ServerSet

#: Processor time of all processes that a journaled grab may take.
GRAB_US_ALLOWED = 400.0
#: How many times as long as a run the load is there before the first one: a broker that has just started
#: compiles itself for about a minute, and takes up to four times the processor time meanwhile.
WARM_UP = 5
#: Connections of the crowd whose grabs are the capacity; and of one of three times as many grabs, each of
#: which waits for at most the 0.5 s after which it is refused.
CAPACITY_CONNECTIONS, OVERLOAD_CONNECTIONS = 400, 4_000
OVERLOAD = 3.0
RECOVERY_SECONDS_ALLOWED = 2.0
#: After the overload, half a second without any refusal or late answers is calm.
SLICE_SECONDS, CALM_SLICES = 0.1, 5


def processes(open_shop: Shop, servers: ServerSet) -> dict[str, int]:
    """The processes of a system and its servers, by name."""
    workers = {roles: worker.pid for roles, worker in zip(ROLES, open_shop.workers, strict=True)}
    kinds = {server.kind: pid for server in servers.all if (pid := server.pid) is not None}
    return {"gateway": open_shop.gateway.pid, **workers, **kinds}


async def machine(runs: int, seconds: float) -> dict[str, Any]:
    """Row `machine`: processor time of all processes (gateway, workers, Redis, Kafka, PostgreSQL with its
    sessions) of a journaled grab over HTTP at RATE a second, until it is booked, against GRAB_US_ALLOWED.
    What the processes do while nothing happens is in it, the client is not. The broker is warm.
    """
    spent: list[dict[str, float]] = []
    found: list[dict[str, Any]] = []
    with own_servers() as servers:
        async with shop(servers) as open_shop:
            pids = processes(open_shop, servers)
            await asyncio.to_thread(load, open_shop.gateway, GRABS, seconds * WARM_UP, RATE)
            await until_booked(open_shop.settings, 0)
            for _ in range(runs):
                before = {name: cpu_seconds_of_all(pid) for name, pid in pids.items()}
                found.append(await asyncio.to_thread(load, open_shop.gateway, GRABS, seconds, RATE))
                await until_booked(open_shop.settings, 0)
                count = found[-1]["count"]
                spent.append(
                    {n: (cpu_seconds_of_all(pid) - before[n]) / count * 1e6 for n, pid in pids.items()}
                )
    return {
        "ours": [sum(one.values()) for one in spent],
        "theirs": [GRAB_US_ALLOWED] * runs,
        "unit": "µs of processor time a grab",
        "profile": {
            "CPU µs a grab": {
                **{name: median_of(spent, name) for name in spent[0]},
                "apart from these, the client": median_of(found, "client_us"),
            },
            "requests/s": {"asked for": str(RATE), "had": median_of(found, "rate")},
            "ms": {"p50": median_of(found, "p50_ms"), "p99": median_of(found, "p99_ms")},
            "the machine": {"load": f"{os.getloadavg()[0]:.1f}"},
        },
    }


async def overload(runs: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Rows `overload`: half of what CAPACITY_CONNECTIONS connections are served, then OVERLOAD times as much
    as they are served, then half again. p99 of accepted grabs in the overload against before; the gateway's
    memory at its end against its middle; and the seconds after it until no grab is refused for half a second,
    and the median is below the p99 of half load again, against RECOVERY_SECONDS_ALLOWED.
    """
    found: list[dict[str, Any]] = []
    room = {"gateway_address_connections_max": str(2 * OVERLOAD_CONNECTIONS)}
    with own_servers() as servers:
        async with shop(servers, **room) as open_shop:
            for _ in range(runs):
                full = await asyncio.to_thread(
                    load, open_shop.gateway, GRABS, seconds, connections=CAPACITY_CONNECTIONS
                )
                await until_booked(open_shop.settings, 0)
                found.append(await _phases(open_shop, full["rate"], seconds))
                await until_booked(open_shop.settings, 0)
    profile = {
        "grabs/s": {
            name: median_of(found, name) for name in ("capacity", "sent", "accepted", "refused", "unsent")
        },
        "ms": {
            "p99 at half load": median_of(found, "half_p99_ms"),
            "p50 in the overload": median_of(found, "p50_ms"), "p99": median_of(found, "p99_ms"),
            "longest": median_of(found, "longest_ms"), "p99 of refusals": median_of(found, "refused_p99_ms"),
        },
        "MB of the gateway": {
            name: median_of(found, f"{name}_mb") for name in ("before", "middle", "end", "after")
        },
        "the machine": {"load": f"{os.getloadavg()[0]:.1f}"},
    }  # fmt: skip

    def row(ours: str, theirs: str, unit: str) -> dict[str, Any]:
        return {"ours": [one[ours] for one in found], "theirs": [one[theirs] for one in found], "unit": unit}

    return {
        "overload": {**row("p99_ms", "half_p99_ms", "ms p99"), "profile": profile},
        "overload-memory": row("end_mb", "middle_mb", "MB"),
        "overload-recovery": row("recovery_seconds", "recovery_seconds_allowed", "s"),
    }


async def _phases(open_shop: Shop, capacity: float, seconds: float) -> dict[str, Any]:
    """Half of the capacity, an overload, and half again, each for `seconds`; returns what came of it."""
    memory: list[tuple[float, float]] = []
    loading = asyncio.create_task(
        asyncio.to_thread(
            load, open_shop.gateway, GRABS, 3 * seconds, connections=OVERLOAD_CONNECTIONS,
            expected=(*ACCEPTED, "503", "504"), with_answers=True,
            phases=[(capacity * part, seconds) for part in (0.5, OVERLOAD, 0.5)],
        )
    )  # fmt: skip
    while not loading.done():
        memory.append((time.perf_counter(), resident_mb(open_shop.gateway.pid)))
        await asyncio.wait({loading}, timeout=0.05)
    result = await loading
    begins = [result["began"] + number * seconds for number in range(4)]
    before, during, after = (
        [answer for answer in result["answers"] if begin <= answer[0] < end]
        for begin, end in itertools.pairwise(begins)
    )
    half, accepted = _milliseconds(before), _milliseconds(during)
    refused = sorted(1000 * latency for _, latency, status in during if status not in ACCEPTED) or [0.0]
    half_p99_ms = _part(half, 0.99)
    times = {"before": begins[1], "middle": begins[1] + seconds / 2, "end": begins[2], "after": begins[3]}
    return {
        "capacity": capacity, "sent": len(during) / seconds, "accepted": len(accepted) / seconds,
        "refused": (len(during) - len(accepted)) / seconds, "unsent": result["unsent"] / seconds,
        "half_p99_ms": half_p99_ms, "p50_ms": _part(accepted, 0.5), "p99_ms": _part(accepted, 0.99),
        "longest_ms": accepted[-1], "refused_p99_ms": _part(refused, 0.99),
        "recovery_seconds": recovery_seconds(after, begins[2], half_p99_ms),
        "recovery_seconds_allowed": RECOVERY_SECONDS_ALLOWED,
        **{f"{name}_mb": [mb for at, mb in memory if at <= until][-1] for name, until in times.items()},
    }  # fmt: skip


def resident_mb(pid: int) -> float:
    """The resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _milliseconds(answers: Sequence[tuple[float, float, str]]) -> list[float]:
    """How long accepted grabs took, in order."""
    return sorted(1000 * latency for _, latency, status in answers if status in ACCEPTED)


def _part(ordered: Sequence[float], part: float) -> float:
    return ordered[int(len(ordered) * part)]


def recovery_seconds(
    answers: Sequence[tuple[float, float, str]], began: float, median_ms_max: float
) -> float:
    """Seconds from `began` to the first CALM_SLICES in which each grab that was due was accepted, and the
    median of each slice was within a bound; until the end where there are none.
    """
    slices: dict[int, list[tuple[float, float, str]]] = {}
    for answer in answers:
        slices.setdefault(int((answer[0] - began) / SLICE_SECONDS), []).append(answer)
    calm = {
        number
        for number, part in slices.items()
        if all(status in ACCEPTED for _, _, status in part)
        and _part(_milliseconds(part), 0.5) <= median_ms_max
    }
    last = max(slices)
    return SLICE_SECONDS * next(
        (number for number in range(last) if calm >= {*range(number, number + CALM_SLICES)}), last + 1
    )
