"""`python -m tests.soak` (a step of `make nightly`): an hour of steady load over all roles, on the servers of
the settings and its own Redis. Memory of every process must stay flat, read models must keep up, no answer
may be wrong, and at the end `verify` must find nothing.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import redis
from aiohttp import web
from pydantic import SecretStr

from grabstream.client.over_http import AsyncClient
from grabstream.client.over_kafka import KafkaClient
from grabstream.connections.opening import gate_limits, key_space, open_redis, sealer
from grabstream.crypto.sealing import Sealer, new_seal_key
from grabstream.gate.gate import Gate
from grabstream.ops.console.output import console, table
from grabstream.ops.verification.verifying import verify
from grabstream.projections.tables import webhooks
from grabstream.settings import Settings, load_settings
from grabstream.streams.webhooks.messages import SEALED_FOR, new_secret
from grabstream.workshop.rehearsal.run import open_books, read_progress
from grabstream.workshop.rehearsal.stage import GATEWAY, Stage, set_up
from grabstream.workshop.services import free_ports
from grabstream.workshop.services.servers import Redis
from tests.conftest import until
from tests.soak.load import GateClient, Load
from tests.soak.verdict import MIB, TooShort, Trend, of_memory, trend
from tests.support.processes import resident_bytes

PROCESSES: Final = ("decide,relay,sweep", "project,publish,verify", "webhooks", GATEWAY)
#: What the workers get in addition to their addresses.
ENVIRONMENT: Final = {"GRAB_WEBHOOK_HTTP": "true", "GRAB_WEBHOOK_PRIVATE_ADDRESSES": "true"}
SAMPLES: Final = 360
SAMPLE_SECONDS_MIN: Final = 1.0
#: How far read models may be behind, in seconds of load: at any time, and more at the end than before.
LAG_SECONDS_MAX: Final = 60.0
LAG_GROWTH_SECONDS_MAX: Final = 10.0
#: How long read models and webhooks may take to catch up at the end.
CATCH_UP_SECONDS: Final = 300.0
#: What Redis keeps of each payment, and of each offer, for 180 days after it has retired; and of each
#: refusal, until a hundred thousand others of its shard have come. In bytes, rounded up.
KEPT: Final = {"payment": 200, "offer": 1_000, "refusal": 400}
LOGS: Final = Path(".services") / "soak.log"

Values = list[tuple[float, float]]


class Result(NamedTuple):
    """What was measured, what it comes to, and what is wrong."""

    seconds: float
    outcomes: dict[str, int]
    memory: dict[str, Trend]
    lag: Trend
    lag_max: float
    #: Seconds until the slowest answer, of each door.
    slowest: dict[str, float]
    problems: list[str]
    series: dict[str, Values]


class Sampler:
    """Reads series until `ending` is set; `series` has (seconds since the start, value) by name."""

    def __init__(self, sources: dict[str, Callable[[], float]], every: float) -> None:
        self._sources, self._every = sources, every
        self.series: dict[str, Values] = {name: [] for name in sources}

    async def run(self, ending: asyncio.Event) -> None:
        """Reads a value of each series, again and again."""
        began = time.monotonic()
        while not ending.is_set():
            for name, read in self._sources.items():
                self.series[name].append((time.monotonic() - began, float(await asyncio.to_thread(read))))
            await asyncio.sleep(self._every)


def judged(
    series: dict[str, Values], lag: Values, seconds: float, kept: dict[str, float], events_a_second: float
) -> tuple[dict[str, Trend], Trend, list[str]]:
    """The trends of memory and lag, and what is wrong with them; `kept` is what a process keeps by design, in
    bytes. Raises TooShort.
    """
    problems = []
    memory = {name: of_memory(values, seconds, kept.get(name, 0.0)) for name, values in series.items()}
    problems += [
        f"the memory of {name} grows: {one.first / MIB:.1f}, then {one.middle / MIB:.1f}, then "
        f"{one.last / MIB:.1f} MiB, and {one.allowed / MIB:.1f} more than at first are allowed"
        for name, one in memory.items()
        if one.grows
    ]
    behind = trend(lag, seconds, LAG_GROWTH_SECONDS_MAX * events_a_second)
    if behind.grows:
        problems.append(
            f"read models are more and more behind: {behind.first:,.0f}, then {behind.middle:,.0f}, then "
            f"{behind.last:,.0f} events"
        )
    worst = max(value for _, value in lag)
    if worst > LAG_SECONDS_MAX * events_a_second:
        problems.append(
            f"read models were {worst:,.0f} events behind, which is more than {LAG_SECONDS_MAX:.0f} s of load"
        )
    return memory, behind, problems


@asynccontextmanager
async def receiver() -> AsyncIterator[tuple[str, list[int]]]:
    """A receiver of webhooks, which takes everything; its URL, and how many events it has taken."""
    taken = [0]

    async def take(request: web.Request) -> web.Response:
        await request.read()
        taken[0] += 1
        return web.Response(status=204)

    application = web.Application()
    application.router.add_post("/hook", take)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/hook", taken
    finally:
        await runner.cleanup()


async def subscribe(settings: Settings, url: str) -> None:
    """Sends all events from now on to a URL."""
    of_key = Sealer.from_text(settings.seal_keys.get_secret_value())
    async with await open_books(settings) as books:
        secret = of_key.seal(0, "soak", SEALED_FOR, new_secret())
        await webhooks.add(books, "soak", url, (), (), secret, 0)


async def soak(seconds: float, rate: int, say: Callable[[str], None]) -> Result:
    """Runs the load, and returns what has come of it. Raises WorkerEnded or Unexpected, alone or in a group,
    AssertionError when the end is not caught up with, and TooShort.
    """
    name = f"soak{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="grabstream-soak-"))
        server = Redis(Path(folder), free_ports(1)[0])
        stack.callback(server.kill)
        await asyncio.to_thread(server.start)
        settings = load_settings().model_copy(
            update={
                "prefix": name,
                "schema_": name,
                "seal_keys": SecretStr(new_seal_key()),
                "redis_url": f"redis://127.0.0.1:{server.port}/0",
            }
        )
        stage = await stack.enter_async_context(set_up(settings, LOGS, False, PROCESSES))
        url, taken = await stack.enter_async_context(receiver())
        await subscribe(settings, url)
        client = open_redis(settings)
        stack.push_async_callback(client.aclose)
        gate = Gate(client, key_space(settings), sealer(settings), gate_limits(settings))
        gate.start()
        stack.push_async_callback(gate.close)
        http = await stack.enter_async_context(
            AsyncClient(f"http://127.0.0.1:{await stage.gateway_port()}", timeout_seconds=60)
        )
        by_kafka = await stack.enter_async_context(
            KafkaClient(settings.kafka, settings.prefix, timeout_seconds=60, **settings.kafka_options())
        )
        load = Load((GateClient(gate), by_kafka, http), http, rate)
        return await _watched(settings, stage, server, client, load, seconds, taken, say)


async def _watched(
    settings: Settings,
    stage: Stage,
    server: Redis,
    client: Any,
    load: Load,
    seconds: float,
    taken: list[int],
    say: Callable[[str], None],
) -> Result:
    plain = redis.Redis(port=server.port)
    redis_process = server.pid
    assert redis_process is not None
    sources: dict[str, Callable[[], float]] = {
        roles: (lambda pid=pid: resident_bytes(pid)) for roles, pid in stage.processes.items()
    }
    sources["Redis"] = lambda: resident_bytes(redis_process)
    sources["Redis, used_memory"] = lambda: float(plain.info("memory")["used_memory"])
    every = max(SAMPLE_SECONDS_MIN, seconds / SAMPLES)
    sampler, lag = Sampler(sources, every), list[tuple[float, float]]()
    began = time.monotonic()
    ending = asyncio.Event()

    async def watch() -> None:
        said_at = 0.0
        async with await open_books(settings) as books:
            while not ending.is_set():
                stage.check()
                progress = await read_progress(client, key_space(settings), books)
                now = time.monotonic() - began
                lag.append((now, float(progress.decided - min(progress.read_models.values()))))
                if now - said_at > 60:
                    said_at = now
                    events = f"{progress.decided:,} events, {lag[-1][1]:,.0f} behind"
                    say(f"{now:,.0f} of {seconds:,.0f} s: {events}")
                await asyncio.sleep(every)

    async with asyncio.TaskGroup() as around:
        around.create_task(sampler.run(ending))
        around.create_task(watch())
        await load.run(seconds)
        ending.set()
    say("the load has ended: read models and webhooks catch up")
    async with await open_books(settings) as books:

        async def missing() -> str:
            """What is not caught up with yet; empty if everything is."""
            stage.check()
            # Holds that are not paid end, and offers retire, which is an event.
            offers = await (
                await books.execute(
                    "SELECT string_agg(offer || ' is ' || state, ', ') FROM "
                    "(SELECT offer, state FROM offers WHERE state <> 'retired' LIMIT 5) AS present"
                )
            ).fetchone()
            progress = await read_progress(client, key_space(settings), books)
            waiting = await webhooks.undelivered(books, None, None, 1)
            found = [
                "" if progress.complete else f"stages differ: {progress}",
                (offers and offers[0]) or "",
                f"not delivered: {waiting[0]}" if waiting else "",
            ]
            return "; ".join(filter(None, found))

        async def is_level() -> bool:
            return not await missing()

        try:
            await until(is_level, CATCH_UP_SECONDS, "the last event in read models and webhooks")
        except AssertionError as error:
            raise AssertionError(f"{error}: {await missing()}") from None
        events = (await read_progress(client, key_space(settings), books)).decided
    counted = load.outcomes
    kept = (
        KEPT["payment"] * counted["confirm: confirmed"]
        + KEPT["offer"] * counted["open: opened"]
        + KEPT["refusal"] * sum(counted[name] for name in counted if name.endswith(("_out", "_reached")))
    )
    memory, behind, problems = judged(
        sampler.series, lag, seconds, {"Redis": kept, "Redis, used_memory": kept}, events / seconds
    )
    if not load.followed:
        problems.append("no event came in the streams over HTTP")
    if not taken[0]:
        problems.append("no event came to the webhook")
    say("verify")
    checks = await verify(settings, wait_seconds=CATCH_UP_SECONDS)
    problems += [f"verify, {check.name}: {problem}" for check in checks for problem in check.problems[:3]]
    series = sampler.series | {"lag": lag}
    outcomes = dict(sorted(counted.items())) | {
        "sent again": load.repeated, "events in streams": load.followed, "events to webhooks": taken[0],
    }  # fmt: skip
    slowest = dict(zip(("gate", "Kafka", "HTTP"), load.slowest, strict=True))
    worst = max(value for _, value in lag)
    return Result(seconds, outcomes, memory, behind, worst, slowest, problems, series)


def _print(result: Result) -> None:
    rows = [
        (
            name,
            *(f"{value / MIB:,.1f}" for value in one),
            "grows" if one.grows else "flat",
        )
        for name, one in result.memory.items()
    ]
    console.print(table("Memory, MiB", ("process", "first", "middle", "last", "allowed", ""), rows))
    lag = result.lag
    console.print(
        f"events behind: {lag.first:,.0f}, then {lag.middle:,.0f}, then {lag.last:,.0f}; at most "
        f"{result.lag_max:,.0f}",
        highlight=False,
    )
    console.print(", ".join(f"{what} {count:,}" for what, count in result.outcomes.items()), highlight=False)
    slowest = ", ".join(f"{door} {seconds:.1f}" for door, seconds in result.slowest.items())
    console.print(f"slowest answer, s: {slowest}", highlight=False)
    for problem in result.problems:
        console.print(problem, style="red", highlight=False, markup=False, soft_wrap=True)


@click.command()
@click.option("--seconds", default=3_600, show_default=True, type=click.IntRange(30, 86_400))
@click.option(
    "--rate",
    default=30,
    show_default=True,
    type=click.IntRange(9, 3_000),
    help="Grabs a second, of all doors.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result, with all series, as JSON.")
def main(seconds: int, rate: int, as_json: bool) -> None:
    """Steady load over all roles. Exit 1: memory grows, read models lag, an answer or `verify` is wrong."""
    # The load has its own retries; what a gate logs about them would hide the verdict.
    logging.getLogger("grabstream").setLevel(logging.CRITICAL)
    os.environ |= ENVIRONMENT
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def say(line: str) -> None:
        if not as_json:
            console.print(line, highlight=False, soft_wrap=True)

    try:
        result = asyncio.run(soak(seconds, rate, say))
    except KeyboardInterrupt:
        sys.exit(130)
    except TooShort as error:
        click.echo(f"no verdict: {error}", err=True)
        sys.exit(2)
    except Exception:
        console.print_exception()
        click.echo(f"the logs of the workers: {LOGS}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(result._asdict(), ensure_ascii=False))
    else:
        _print(result)
    sys.exit(bool(result.problems))


if __name__ == "__main__":
    main()
