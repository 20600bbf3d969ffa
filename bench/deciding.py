"""Rows 1, 2, 7 and 11: decisions in lists, single decisions, and memory, on one private Redis; and what
decisions cost on two servers that differ in one thing (`Side`, `in_turns`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis
import redis.asyncio

from bench import classic
from bench.stage import envelope, gate_of, grabs, private_redis, server_seconds, taken_over_gate
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.models.commands import AnyCommand, Grab

LIMITS = GateLimits(outbox_events_max=10**9, queue_commands_max=10**6)
LIST = 32
#: Decisions of one side before the other side's turn.
TURN = 20_000

Load = Callable[[Gate, Sequence[Grab]], Awaitable[float]]


async def answered_lists(gate: Gate, wanted: Sequence[AnyCommand]) -> float:
    """Commands per second of 100 callers, each of which sends lists of 32 and awaits the answers."""
    lists = iter([wanted[start : start + LIST] for start in range(0, len(wanted), LIST)])

    async def caller() -> None:
        for commands in lists:
            answers = await gate.decide(commands, "decided", timeout_ms=60_000)
            assert answers[-1].positive, answers[-1]

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(100)))
    return len(wanted) / (time.perf_counter() - began)


async def answered_singles(
    gate: Gate, wanted: Sequence[AnyCommand], callers: int, is_sold_out: bool = False
) -> float:
    """Commands per second of concurrent callers, each of which sends one command and awaits its answer."""
    waiting = iter(wanted)

    async def caller() -> None:
        for command in waiting:
            [answer] = await gate.decide([command], "decided", timeout_ms=60_000)
            assert answer.positive is not is_sold_out, answer

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return len(wanted) / (time.perf_counter() - began)


def _profile(client: "redis.Redis", count: int) -> dict[str, float]:
    """Microseconds of the server per grab, by Redis command; the rest of the script's time is Lua."""
    stats = client.info("commandstats")
    spent = {name.removeprefix("cmdstat_"): values["usec"] / count for name, values in stats.items()}
    inside = {name: round(spent.get(name, 0.0), 2) for name in ("hmget", "hset", "xadd", "getrange")}
    script = spent.get("fcall", 0.0) or spent.get("evalsha", 0.0)
    return {"script": round(script, 2), **inside, "lua": round(script - sum(inside.values()), 2)}


async def decisions(runs: int, count: int, id_length: int = 32) -> dict[str, Any]:
    """Row 1: decisions per second of callers with lists, against the classic script in pipelines."""
    ours, theirs, profile = [], [], {}
    with private_redis() as port:
        plain = redis.Redis(port=port)
        for run in range(runs):
            gate, client = await taken_over_gate(port, LIMITS)
            await gate.decide([envelope("e", count)], "decided", timeout_ms=60_000)
            wanted = grabs("e", count, id_length)
            plain.config_resetstat()
            ours.append(await answered_lists(gate, wanted))
            profile = _profile(plain, count)
            await gate.close()
            await client.aclose()
            plain.flushall()
            theirs.append(
                classic.rate_of(
                    classic.pipelined(port, classic.prepare(plain, count, id_length), count, id_length)
                )
            )
            plain.flushall()
    return {"ours": ours, "theirs": theirs, "unit": "grabs/s", "profile": {"µs of Redis a grab": profile}}


async def singles(runs: int, count: int, callers: int, is_sold_out: bool = False) -> dict[str, Any]:
    """Rows 2 and 11: single grabs of concurrent callers of one gate, against as many callers of the classic
    script with redis-py; granted, or refused because nothing is left.
    """
    ours, theirs = [], []
    parts = 1 if is_sold_out else count
    with private_redis() as port:
        plain = redis.Redis(port=port)
        for run in range(runs):
            gate, client = await taken_over_gate(port, LIMITS)
            await gate.decide([envelope("e", parts)], "decided", timeout_ms=60_000)
            wanted = grabs("e", count + parts)[parts:] if is_sold_out else grabs("e", count)
            if is_sold_out:
                await gate.decide(grabs("e", 1), "decided")
            ours.append(await answered_singles(gate, wanted, callers, is_sold_out))
            await gate.close()
            await client.aclose()
            plain.flushall()
            sha = classic.prepare(plain, parts, 32)
            if is_sold_out:
                plain.evalsha(sha, 3, *classic.KEYS, "first")
            theirs.append(await _classic_singles(port, sha, count, callers, is_sold_out))
            plain.flushall()
    return {"ours": ours, "theirs": theirs, "unit": "grabs/s"}


async def _classic_singles(port: int, sha: str, count: int, callers: int, is_sold_out: bool) -> float:
    numbers = iter(range(count))
    clients = [redis.asyncio.Redis(port=port, single_connection_client=True) for _ in range(callers)]

    async def caller(client: Any) -> None:
        for number in numbers:
            taken = await client.evalsha(sha, 3, *classic.KEYS, f"u{number:031d}")
            assert (taken is None) is is_sold_out

    for client in clients:
        await client.ping()
    began = time.perf_counter()
    await asyncio.gather(*(caller(client) for client in clients))
    seconds = time.perf_counter() - began
    for client in clients:
        await client.aclose()
    return count / seconds


async def memory(runs: int, count: int) -> dict[str, Any]:
    """Row 7: bytes of Redis memory per stored grab after the outbox was relayed, with ids of 32 characters on
    both sides.
    """
    ours, theirs = [], []
    with private_redis() as port:
        plain = redis.Redis(port=port)
        for run in range(runs):
            gate, client = await taken_over_gate(port, LIMITS)
            before = plain.info("memory")["used_memory"]
            await gate.decide([envelope("e", count)], "decided", timeout_ms=120_000)
            for start in range(0, count, 100_000):
                await answered_lists(gate, grabs("e", min(100_000, count - start), start=start))
                for key in plain.scan_iter(match="*:outbox"):
                    plain.xtrim(key, maxlen=0, approximate=False)
            ours.append((plain.info("memory")["used_memory"] - before) / count)
            await gate.close()
            await client.aclose()
            plain.flushall()
            before = plain.info("memory")["used_memory"]
            sha = classic.prepare(plain, count, 32)
            pipe = plain.pipeline(transaction=False)
            for number in range(count):
                pipe.evalsha(sha, 3, *classic.KEYS, f"u{number:031d}")
                if number % 2_000 == 1_999:
                    pipe.execute()
            pipe.execute()
            theirs.append((plain.info("memory")["used_memory"] - before) / count)
            plain.flushall()
    return {"ours": ours, "theirs": theirs, "unit": "bytes/grab"}


class Side:
    """A gate of one side, and what its decisions have cost in the present run, in seconds of a processor: of
    the thread of Redis, and of the process that sends; and `seconds` by the clock. `connect` makes the client
    of the gate, `server` is another one.
    """

    def __init__(self, connect: Callable[[], Any], server: "redis.Redis") -> None:
        self._connect, self._server = connect, server
        self.server_seconds = self.sender_seconds = self.seconds = 0.0

    async def begin(self, count: int) -> None:
        """Opens an envelope in an empty Redis."""
        self._client = self._connect()
        self._gate = await gate_of(self._client, LIMITS)
        await self._gate.decide([envelope("e", count)], "decided", timeout_ms=60_000)
        self.server_seconds = self.sender_seconds = self.seconds = 0.0

    async def end(self) -> None:
        """Closes the gate and its client."""
        await self._gate.close()
        await self._client.aclose()

    async def decide(self, load: Load, wanted: Sequence[Grab]) -> None:
        """Adds what these decisions cost."""
        before = server_seconds(self._server), time.process_time()
        rate = await load(self._gate, wanted)
        self.server_seconds += server_seconds(self._server) - before[0]
        self.sender_seconds += time.process_time() - before[1]
        self.seconds += len(wanted) / rate

    def profile(self, count: int) -> dict[str, float]:
        """For `count` decisions: decisions per second, and processor µs for each."""
        return {
            "decisions/s": round(count / self.seconds),
            "µs of Redis": round(self.server_seconds / count * 1e6, 2),
            "µs of client": round(self.sender_seconds / count * 1e6, 2),
        }


async def in_turns(
    theirs: tuple[str, Side], ours: tuple[str, Side], load: Load, runs: int, count: int
) -> dict[str, Any]:
    """Decisions per second of processor time (thread of Redis, and the process that sends) of two sides with
    their names, which take turns all the time, so that what else the machine does meets both.
    """
    sides = (theirs, ours)
    rates: dict[str, list[float]] = {name: [] for name, _ in sides}
    profile: dict[str, dict[str, float]] = {}
    wanted = grabs("e", count)
    for run in range(runs):
        for _, side in sides:
            await side.begin(count)
        for turn, start in enumerate(range(0, count, TURN)):
            for _, side in sides if turn % 2 == 0 else sides[::-1]:
                await side.decide(load, wanted[start : start + TURN])
        for name, side in sides:
            rates[name].append(count / (side.server_seconds + side.sender_seconds))
            profile[f"{name}, run {run + 1}"] = side.profile(count)
            await side.end()
    return {
        "ours": rates[ours[0]],
        "theirs": rates[theirs[0]],
        "unit": "decisions/s of a core",
        "profile": profile,
    }
