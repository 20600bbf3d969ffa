"""Measures script calls on a private Redis: the processor time of the Redis thread, and the cost that each
script counts.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha1
from typing import Any, Final, NamedTuple

import pytest
import redis.asyncio

from grabstream.connections.opening import cancellable
from grabstream.gate import calls as gate_calls
from grabstream.gate.calls import GateLimits
from grabstream.gate.gate import Gate
from grabstream.lua import loader
from grabstream.lua.keys import KeySpace, ShardKeys
from grabstream.lua.loader import Script
from grabstream.models.answers import Answer
from grabstream.models.commands import AnyCommand, Grab, Open
from grabstream.models.offers import EnvelopeTerms
from grabstream.streams.deciding import sweeper
from grabstream.streams.deciding.sweeper import Sweeper
from grabstream.streams.relaying import ownership
from tests.support.plain_scripts import use_plain_scripts
from tests.support.shards import NOW, SEALER, take_over

#: The greatest cost of a call, in µs of the Redis thread (lua/includes/cost.lua), and of the command that may
#: exceed it at the end of the call.
CALL_COST_MAX: Final = int(re.findall(r"call_max = (\d+)", loader.load("grab").text)[0])
COMMAND_COST_MAX: Final = 3_000
#: µs of the Redis thread per plain grab on a quiet machine, in a call of PLAIN_GRABS grabs.
PLAIN_GRAB_US: Final = 3.8
PLAIN_GRABS: Final = 500
#: Times are checked with this factor: how much slower than a quiet machine this machine may be.
SLOWER: Final = 4

_CALL_MAX: Final = re.compile(r"\bcall_max = \d+")
_SPEND: Final = "cost = cost + microseconds"


class Call(NamedTuple):
    """A call of a script: its processor time in ms of the Redis thread, and the cost it counted."""

    script: str
    cpu_ms: float
    cost: float


@cache
def changed(name: str, call_max: int | None = None, counted: bool = False) -> Script:
    """The script with another bound of cost, or, if `counted`, one that stores its cost in the key `cost`."""
    text = loader.assemble(name)
    if call_max is not None:
        text = _CALL_MAX.sub(f"call_max = {call_max}", text)
    if counted and "call_max = " in text:
        assert text.count(_SPEND) == 1, f"{name}: the line that counts cost is not {_SPEND!r}"
        text = text.replace(_SPEND, f"{_SPEND} redis.call('SET', 'cost', cost)")
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


@contextmanager
def scripts(call_max: int | None = None, counted: bool = False) -> Iterator[None]:
    """Within it, scripts have another bound of cost (1: one command per call), or store their cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "load", lambda name: changed(name, call_max, counted))
        use_plain_scripts(patch)
        yield


class MeasuredShard:
    """A shard alone on its server, with a gate and a sweeper. `calls` has the script calls made during the
    last `measuring`.
    """

    def __init__(self, port: int) -> None:
        self.redis = cancellable(redis.asyncio.Redis(port=port))
        self.space = KeySpace("own", 1)
        self.now = NOW
        self.calls: list[Call] = []
        #: The time of a plain grab during `longest_of`, at best, as a multiple of that on a quiet machine.
        self.slowness = 1.0

    async def begin(self) -> None:
        await self.redis.flushall()
        await take_over(self.redis, self.space)
        limits = GateLimits(timeout_ms=3_600_000, queue_commands_max=10**8, outbox_events_max=10**9)
        self.gate = Gate(self.redis, self.space, SEALER, limits, clock=lambda: self.now)
        self.sweeper = Sweeper(self.redis, self.keys, 1, 10**15)

    @property
    def keys(self) -> ShardKeys:
        return self.space.shard(0)

    async def decide(self, commands: Sequence[AnyCommand]) -> list[Answer]:
        return await self.gate.decide(commands, "decided")

    async def cpu_ms(self) -> float:
        """Processor time of the Redis thread since the server started, in ms."""
        info = await self.redis.info("cpu")
        return 1_000 * float(info["used_cpu_sys_main_thread"] + info["used_cpu_user_main_thread"])

    @contextmanager
    def measuring(self, counted: bool = False) -> Iterator[list[Call]]:
        """Measures script calls, one at a time; with `counted`, also their cost."""
        self.calls = []
        real, one_at_a_time = gate_calls.run_script, asyncio.Lock()

        async def run(client: Any, name: str, keys: Sequence[str], arguments: Sequence[object]) -> Any:
            async with one_at_a_time:
                if counted:
                    await self.redis.delete("cost")
                before = await self.cpu_ms()
                reply = await real(client, name, keys, arguments)
                took = await self.cpu_ms() - before
                self.calls.append(
                    Call(name, took, float(await self.redis.get("cost") or 0) if counted else 0)
                )
                return reply

        with pytest.MonkeyPatch.context() as patch, scripts(counted=counted):
            for module in (gate_calls, sweeper, ownership):
                patch.setattr(module, "run_script", run)
            yield self.calls

    async def calls_of(self, act: Callable[[], Awaitable[object]]) -> list[tuple[str, float]]:
        """The script and the time (ms of the Redis thread) of each call that `act` makes, in order."""
        with self.measuring() as calls:
            await act()
        return [(call.script, call.cpu_ms) for call in calls]

    async def longest_of(
        self,
        prepare: Callable[[], Awaitable[object]],
        act: Callable[[], Awaitable[object]],
        repetitions: int = 3,
    ) -> dict[str, float]:
        """The longest call of each script that `act` makes after `prepare`, in ms of the Redis thread.

        Both are repeated on an empty server. For each call the shortest repetition counts, since other
        processes on the machine make calls longer.
        """
        for name in loader.script_names():
            await self.redis.script_load(loader.load(name).text)
        repeated: list[list[tuple[str, float]]] = []
        plain_grabs_ms: list[float] = []
        for _ in range(repetitions):
            await self._restart()
            plain_grabs_ms += await self._plain_calls()
            await self._restart()
            await prepare()
            repeated.append(await self.calls_of(act))
        self.slowness = max(1.0, min(plain_grabs_ms) * 1_000 / PLAIN_GRABS / PLAIN_GRAB_US)
        assert len({tuple(name for name, _ in calls) for calls in repeated}) == 1, (
            "each repetition makes the same calls"
        )
        longest: dict[str, float] = {}
        for calls in zip(*repeated, strict=True):
            script = calls[0][0]
            longest[script] = max(longest.get(script, 0.0), min(took for _, took in calls))
        return longest

    async def _restart(self) -> None:
        await self.gate.close()
        await self.begin()

    async def _plain_calls(self) -> list[float]:
        """The times of calls of PLAIN_GRABS plain grabs, in ms."""
        terms = EnvelopeTerms(issuer="a", funding="f", asset="CNY", total=10**9, parts=5 * PLAIN_GRABS)
        await self.decide([Open(id="o", offer="o", terms=terms)])

        async def act() -> None:
            for start in range(0, 5 * PLAIN_GRABS, PLAIN_GRABS):
                await self.decide(
                    [Grab(id=f"g{n}", offer="o", user=f"u{n}") for n in range(start, start + PLAIN_GRABS)]
                )

        return [took for _, took in await self.calls_of(act)]

    async def end(self) -> None:
        await self.gate.close()
        await self.redis.aclose()


def longest(calls: Sequence[Call]) -> dict[str, Call]:
    """The greatest time and the greatest cost among the calls of each script."""
    by_script: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_script[call.script].append(call)
    return {
        name: Call(name, max(call.cpu_ms for call in of), max(call.cost for call in of))
        for name, of in sorted(by_script.items())
    }
