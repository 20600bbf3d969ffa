"""Rows `parts`, `held` and `offers`: does the cost of a decision grow with the parts of its envelope, the
holds of its offer, or the offers of its campaign? Each size has its own Redis; they take turns, with the same
number of calls of the same size. The rows compare processor time of the thread of Redis, which also depends
on how much of the data is in the caches of the processor.

`python -m bench.growth` compares instructions, which do not; needs valgrind, and a quarter of an hour.
"""

import asyncio
import re
import statistics
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from itertools import count as counting
from pathlib import Path
from typing import Any, Final, Protocol

import redis

from bench.deciding import LIMITS
from bench.functions import started_redis
from bench.stage import envelope, grabs, private_redis, server_seconds, taken_over_gate
from grabstream.gate.calls import now_ms
from grabstream.lua.keys import KeySpace
from grabstream.models.commands import AnyCommand, Close, Confirm, Grab, Open, Release
from grabstream.models.offers import Limit, StockTerms
from grabstream.streams.deciding.sweeper import Sweeper

HOLD_MS = 3_600_000
#: Commands of a call; grabs of the smaller offer, about; and holds between two turns of row `held`.
CALL, FEW, STEP = 100, 1_000, 500
MANY, FEW_SIDE = "many", "few"
DOUBLING = ", while hashes double"
Costs = dict[str, list[float]]

_SUMMARY: Final = re.compile(r"^summary: (\d+)", re.MULTILINE)


class Meter(Protocol):
    """Measures a private Redis."""

    port: int

    def begin(self) -> None:
        """Begins to count."""

    def end(self) -> float:
        """The count since `begin`."""


class ProcessorTime:
    """Counts µs of the thread of a Redis that runs scripts."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._client = redis.Redis(port=port)
        self._before = 0.0

    def begin(self) -> None:
        """Begins to count."""
        self._before = server_seconds(self._client)

    def end(self) -> float:
        """The µs since `begin`."""
        return (server_seconds(self._client) - self._before) * 1e6


class Instructions:
    """Counts thousands of instructions of a Redis under callgrind, which runs it fast in between."""

    def __init__(self, port: int, process: int, dumps: Path) -> None:
        self.port = port
        self._process = process
        self._dumps = dumps
        self._dumped = 0

    def begin(self) -> None:
        """Begins to count."""
        self._control("--instr=on")
        self._control("--zero")

    def end(self) -> float:
        """The thousands of instructions since `begin`."""
        self._control("--dump")
        self._control("--instr=off")
        self._dumped += 1
        counted = _SUMMARY.search(self._dumps.with_name(f"{self._dumps.name}.{self._dumped}").read_text())
        assert counted is not None
        return int(counted[1]) / 1000

    def _control(self, what: str) -> None:
        command = ["callgrind_control", what, str(self._process)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


Measured = Callable[[], AbstractContextManager[Meter]]


@contextmanager
def processor_time() -> Iterator[Meter]:
    """Measures a private Redis by its processor time."""
    with private_redis() as port:
        yield ProcessorTime(port)


@contextmanager
def instructions() -> Iterator[Meter]:
    """Measures a private Redis by its instructions."""
    with tempfile.TemporaryDirectory() as folder:
        dumps = Path(folder) / "dump"
        command = [
            "valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={dumps}",
            f"--log-file={folder}/log",
        ]  # fmt: skip
        with started_redis(command, Path(folder)) as (port, process):
            yield Instructions(port, process, dumps)


class Shard:
    """A gate and a sweeper on a private Redis, whose clock the measurement sets."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.port = meter.port
        self.plain = redis.Redis(port=self.port)
        self.now = now_ms()
        self.numbers = counting()

    async def begin(self) -> None:
        """Opens a gate on new shards."""
        self.gate, self.client = await taken_over_gate(self.port, LIMITS, clock=lambda: self.now)

    async def end(self) -> None:
        """Closes the gate and the clients."""
        await self.gate.close()
        await self.client.aclose()
        self.plain.close()

    async def send(self, commands: Sequence[AnyCommand], size: int = CALL) -> None:
        """Sends commands in calls of the same size, one after the other."""
        for start in range(0, len(commands), size):
            answers = await self.gate.decide(commands[start : start + size], "decided", timeout_ms=120_000)
            assert all(answer.positive for answer in answers), answers[-1]

    async def cost(self, commands: Sequence[AnyCommand], size: int = CALL) -> float:
        """What commands in calls of the same size cost."""
        self.meter.begin()
        await self.send(commands, size)
        spent = self.meter.end()
        self.empty_outboxes()
        return spent

    async def sweep(self, offer: str) -> tuple[float, int]:
        """The cost of handling what is due in the shard of an offer, and the amount."""
        self.meter.begin()
        ended = await self.sweep_shard(KeySpace("bench", 8).shard_of_offer(offer))
        spent = self.meter.end()
        self.empty_outboxes()
        return spent, ended

    async def sweep_shard(self, number: int) -> int:
        """Handles what is due in a shard; returns the amount."""
        keys = KeySpace("bench", 8)
        return await Sweeper(self.client, keys.shard(number), keys.shards, 10**9).sweep(self.now)

    def empty_outboxes(self) -> None:
        """Does what relays do."""
        for shard in range(8):
            self.plain.xtrim(KeySpace("bench", 8).shard(shard).outbox, maxlen=0, approximate=False)

    def holds(self, offer: str, count: int) -> list[Grab]:
        """Grabs of new users with ids of 32 characters."""
        return [
            Grab(id=f"g{number:031d}", offer=offer, user=f"u{number:031d}")
            for number, _ in zip(self.numbers, range(count), strict=False)
        ]


def result(costs: dict[str, Costs], decisions: dict[str, int]) -> dict[str, Any]:
    """The row: the operation whose cost grew most, and the others in the profile, all for a command."""
    ours, theirs = (
        {name: [spent / decisions[name] for spent in costs[side][name]] for name in costs[side]}
        for side in (MANY, FEW_SIDE)
    )
    ratios = {name: [many / few for many, few in zip(ours[name], theirs[name], strict=True)] for name in ours}
    most = max(
        (name for name in ratios if not name.endswith(DOUBLING)),
        key=lambda name: statistics.median(ratios[name]),
    )
    profile = {
        name: {
            "ratio": f"{statistics.median(of):.2f} ({min(of):.2f} – {max(of):.2f})",
            "beside many": f"{statistics.median(ours[name]):.1f}",
            "beside few": f"{statistics.median(theirs[name]):.1f}",
        }
        for name, of in ratios.items()
    }
    return {"ours": ours[most], "theirs": theirs[most], "unit": f"µs/{most}", "profile": profile}


def _turns(number: int) -> tuple[str, str]:
    """Both sides; every other time in the other order."""
    return (MANY, FEW_SIDE) if number % 2 == 0 else (FEW_SIDE, MANY)


@asynccontextmanager
async def _both(measured: Measured) -> AsyncIterator[dict[str, Shard]]:
    """A shard for each side."""
    with ExitStack() as stack:
        shards = {side: Shard(stack.enter_context(measured())) for side in (MANY, FEW_SIDE)}
        for shard in shards.values():
            await shard.begin()
        try:
            yield shards
        finally:
            for shard in shards.values():
                await shard.end()


def _no_costs(names: Sequence[str], runs: int) -> dict[str, Costs]:
    return {side: {name: [0.0] * runs for name in names} for side in (MANY, FEW_SIDE)}


async def parts(
    runs: int, many: int, measured: Measured = processor_time, steps: int | None = None
) -> dict[str, Any]:
    """Row `parts`: grabs of an envelope of `many` parts, of which most are taken, against envelopes of a
    thousand, of which half are taken: up to 512 users, Redis keeps their hash in another form.
    """
    steps, grabs_per_step = steps or max(many // 10_000, 10), FEW * 2 // 5
    taken = FEW * 11 // 20
    first = many - runs * steps * grabs_per_step
    costs = _no_costs(["grab"], runs)
    async with _both(measured) as shards:
        large, small = shards[MANY], shards[FEW_SIDE]
        await large.send([envelope("e", many)])
        for start in range(0, first, 100_000):
            await large.send(grabs("e", min(100_000, first - start), start=start), 500)
            large.empty_outboxes()
        for number in range(runs * steps):
            offer = f"e{number}"
            await small.send([envelope(offer, FEW)])
            await small.send(grabs(offer, taken))
            wanted = {
                MANY: grabs("e", grabs_per_step, start=first + number * grabs_per_step),
                FEW_SIDE: grabs(offer, grabs_per_step, start=taken),
            }
            for side in _turns(number):
                costs[side]["grab"][number // steps] += await shards[side].cost(wanted[side])
    return result(costs, {"grab": steps * grabs_per_step})


def _stock(offer: str, total: int) -> Open:
    terms = StockTerms(
        issuer="bench", total=total, price=100, currency="CNY", hold_ms=HOLD_MS,
        limits=(Limit("user", "offer", 5),),
    )  # fmt: skip
    return Open(id=f"open-{offer}", offer=offer, terms=terms)


def _payments(held: Sequence[Grab]) -> list[Confirm]:
    return [
        Confirm(
            id=f"p{grab.id[1:]}", offer=grab.offer, grab=grab.id, payment=f"pay{grab.id}", paid=100,
            currency="CNY",
        )
        for grab in held
    ]  # fmt: skip


def _releases(held: Sequence[Grab]) -> list[Release]:
    return [Release(id=f"r{grab.id[1:]}", offer=grab.offer, grab=grab.id) for grab in held]


async def held(
    runs: int, many: int, measured: Measured = processor_time, steps: int | None = None
) -> dict[str, Any]:
    """Row `held`: holds, payments, releases and expiries in an offer with `many` holds, against offers with
    less than two thousand. The profile also has them while the hashes of the large offer double, which Redis
    does bucket by bucket, in the calls that follow.
    """
    steps, names = steps or max(many // 62_500, 2), ("hold", "confirm", "release", "expiry")
    costs = _no_costs([*names, *(f"{name}{DOUBLING}" for name in names)], runs)
    doubled_at = 1 << (many - 1).bit_length()
    assert many + runs * steps * STEP < doubled_at, "no hash doubles while the row is measured"
    async with _both(measured) as shards:
        large, small = shards[MANY], shards[FEW_SIDE]
        await large.send([_stock("s", 10 * many)])
        # The oldest holds end first: as many at a time as half of those that a step makes.
        standing: list[int] = []
        await _fill(large, "s", many, standing)
        for number in range(2 * runs * steps):
            if number == runs * steps:
                await _fill(large, "s", doubled_at + FEW - many - number * STEP, standing)
            offer, phase = f"s{number}", "" if number < runs * steps else DOUBLING
            await small.send([_stock(offer, 10 * FEW)])
            # Ends what earlier offers of the shard still hold.
            await small.sweep_shard(KeySpace("bench", 8).shard_of_offer(offer))
            offer_times: list[int] = []
            await _fill(small, offer, FEW * 3 // 2, offer_times)
            for side in _turns(number):
                if side is MANY:
                    spent = await _settle(large, "s", standing[number])
                else:
                    spent = await _settle(small, offer, offer_times[0])
                for name, name_cost in zip(names, spent, strict=True):
                    costs[side][name + phase][number // steps % runs] += name_cost
    each = steps * STEP
    counts = {"hold": each, "confirm": each // 4, "release": each // 4, "expiry": each // 2}
    return result(costs, counts | {f"{name}{DOUBLING}": count for name, count in counts.items()})


async def _fill(shard: Shard, offer: str, count: int, standing: list[int]) -> None:
    """Makes about `count` holds, whose deadlines are a second apart for each half of STEP; adds the times at
    which they were made.
    """
    for _ in range(0, count, STEP // 2):
        shard.now += 1_000
        standing.append(shard.now)
        await shard.send(shard.holds(offer, STEP // 2), STEP // 2)
        shard.empty_outboxes()


async def _settle(shard: Shard, offer: str, end_of: int) -> list[float]:
    """Holds units; pays a quarter of them, and releases a quarter; ends the holds, half as many, that were
    made at the time `end_of`. Returns the cost of each.
    """
    wanted = shard.holds(offer, STEP)
    spent = [
        await shard.cost(wanted),
        await shard.cost(_payments(wanted[: STEP // 4])),
        await shard.cost(_releases(wanted[STEP // 4 : STEP // 2])),
    ]
    shard.now = end_of + HOLD_MS
    expiry_cost, ended = await shard.sweep(offer)
    assert ended == STEP // 2, ended
    return [*spent, expiry_cost]


async def offers(
    runs: int, many: int, measured: Measured = processor_time, steps: int | None = None
) -> dict[str, Any]:
    """Row `offers`: grabs, holds, payments and releases in a campaign with `many` open offers and as many
    that have retired, against a campaign with only the two offers of the measurement, plus as many offers of
    other campaigns, so that Redis has the same data; alone in a call, and in calls of a hundred.
    """
    steps = steps or max(many // 500, 5)
    sizes = {"alone": 1, "in a hundred": CALL}
    counts = {"alone": CALL, "in a hundred": 4 * CALL}
    names = [f"{name} {size}" for size in sizes for name in ("grab", "hold", "confirm", "release")]
    costs = _no_costs(names, runs)
    async with _both(measured) as shards:
        await _open_others(shards[MANY], "c:", many)
        await _open_others(shards[FEW_SIDE], "", many)
        for shard in shards.values():
            await shard.send([envelope("c:e", 1_000_000)])
            await shard.send([_campaign_stock("c:s", 1_000_000, 0)])
            # Redis keeps small hashes in another form.
            await shard.send([*shard.holds("c:e", FEW), *shard.holds("c:s", FEW)])
        for number in range(runs * steps):
            for size, call_size in sizes.items():
                count = counts[size]
                for side in _turns(number):
                    shard = shards[side]
                    units = shard.holds("c:s", count)
                    commands: dict[str, Sequence[AnyCommand]] = {
                        "grab": shard.holds("c:e", count // 2),
                        "hold": units,
                        "confirm": _payments(units[: count // 2]),
                        "release": _releases(units[count // 2 :]),
                    }
                    for name, wanted in commands.items():
                        spent = await shard.cost(wanted, call_size)
                        costs[side][f"{name} {size}"][number // steps] += spent / len(wanted)
    return result(costs, dict.fromkeys(names, steps))


def _campaign_stock(offer: str, total: int, retire_after_ms: int) -> Open:
    """Stock whose users are counted in the whole campaign."""
    terms = StockTerms(
        issuer="bench", total=total, price=100, currency="CNY", hold_ms=HOLD_MS,
        limits=(Limit("user", "offer", 5, "campaign"),), retire_after_ms=retire_after_ms,
    )  # fmt: skip
    return Open(id=f"open-{offer}", offer=offer, terms=terms)


async def _open_others(shard: Shard, campaign: str, many: int) -> None:
    """Opens `many` offers with one held unit each, and as many that have retired; each in its own campaign,
    unless one is given.
    """
    gone = [f"{campaign}gone{number}" for number in range(many)]
    await shard.send([_campaign_stock(offer, 1, 1) for offer in gone], 16)
    await shard.send([Close(id=f"close-{offer}", offer=offer) for offer in gone], 64)
    shard.now += 10
    for number in range(8):
        await shard.sweep_shard(number)
    kept = [f"{campaign}kept{number}" for number in range(many)]
    await shard.send([_campaign_stock(offer, 5, 0) for offer in kept], 16)
    await shard.send([shard.holds(offer, 1)[0] for offer in kept], 64)
    shard.empty_outboxes()


async def main() -> None:
    """Prints the instructions of each command."""
    for name, measure in (
        ("a million parts", partial(parts, 1, 1_000_000, instructions, 2)),
        ("10 thousand offers", partial(offers, 1, 10_000, instructions, 1)),
        ("a million holds", partial(held, 1, 1_000_000, instructions, 1)),
    ):
        measured = await measure()
        for command, of in measured["profile"].items():
            print(
                f"{name}, {command}: {of['beside many']} thousand instructions, {of['beside few']} beside "
                f"few, ratio {of['ratio'].split()[0]}",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(main())
