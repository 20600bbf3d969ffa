"""Metrics and health of real workers and gateways."""

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grabstream.connections.opening import open_gate
from grabstream.metrics.answering import Answering
from grabstream.metrics.catalogue import METRICS
from grabstream.metrics.exposition import Exposition, Samples
from grabstream.metrics.listening import CONNECTIONS_MAX, listening
from grabstream.metrics.state import State
from grabstream.metrics.worker_metrics import Since
from grabstream.models.commands import Grab, Open
from grabstream.models.offers import CouponTerms
from grabstream.ops.commands.operate.worker import worker_state
from grabstream.runtime.measures import Histogram
from grabstream.settings import Settings
from grabstream.streams.clients import OUTAGES
from tests.conftest import Worker, until
from tests.metrics.scraping import Scraped, ask, port_of, read, scrape
from tests.support.gateways import Caller, GatewayProcess, calling

ALL_ROLES = "decide,relay,sweep,project,publish,verify,webhooks"
ANY_PORT = "127.0.0.1:0"
#: None of them names a user, an offer or a command.
LABELS = {
    "command", "function", "kind", "operation", "outcome", "part", "place", "projection", "read_model",
    "reason", "result", "role", "server", "shard", "state", "status", "table", "version", "what",
}  # fmt: skip


def exposed(scraped: Scraped) -> dict[str, str]:
    return {name: kind for name, kind in scraped.kinds.items() if name.startswith("grabstream_")}


def expected(process: str) -> dict[str, str]:
    """Names as the parser gives them: without the end of counters."""
    return {
        metric.name.removesuffix("_total"): metric.kind for metric in METRICS if process in metric.processes
    }


@pytest.mark.every_change("every metric of a worker")
async def test_a_worker_exposes_every_metric_of_the_catalogue_and_nothing_else(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    process = worker(system, ALL_ROLES, metrics_listen=ANY_PORT)
    port = port_of(process.log)
    await until(lambda: ask(port, "/health/ready")[0] == 200, 60, "ready")
    async with open_gate(system) as gate:
        await gate.decide(
            [Open(id="open", offer="o", terms=CouponTerms(issuer="shop", total=5))], patience_ms=20_000
        )
        await gate.decide([Grab(id=f"g{number}", offer="o", user=f"u{number}") for number in range(7)])

    def caught_up() -> bool:
        scraped = scrape(port)
        return scraped.total("grabstream_projection_events_total") == 4 * 6 and not scraped.total(
            "grabstream_read_model_lag_events"
        )

    await until(caught_up, 60, "read models")
    scraped = scrape(port)
    assert exposed(scraped) == expected("worker")
    assert scraped.total("grabstream_relay_events_total") == 6
    assert scraped.value("grabstream_leases_held") == system.shards
    assert scraped.value("grabstream_shards_relayed") == system.shards
    assert scraped.total("grabstream_shard_relayed") == system.shards
    assert scraped.total("grabstream_relay_takeovers_total") == system.shards
    assert scraped.total("grabstream_function_seconds_count", function="trim") >= 1
    assert scraped.total("grabstream_outbox_events") == 0
    assert scraped.total("grabstream_shard_seq") == scraped.total("grabstream_published_seq") == 6
    assert scraped.value("grabstream_ready") == 1
    servers = ("redis", "kafka", "postgresql")
    assert [scraped.value("grabstream_server_up", server=name) for name in servers] == [1, 1, 1]
    assert scraped.total("grabstream_table_bytes") > 0
    assert scraped.kinds["process_resident_memory_bytes"] == "gauge"
    assert ask(port, "/health/live") == (200, {"status": "live"})
    assert ask(port, "/elsewhere")[0] == 404
    took_over = f"relays shards 0 to {system.shards - 1}: took over 0 to {system.shards - 1}"
    await until(lambda: took_over in process.log.read_text(), 60, "the line about takeovers")
    assert process.stop() == 0
    # One line says that the worker is ready, at its start, one which shards it has taken over, one that it
    # has given them up, and one that it has stopped.
    said = re.findall(r"grabstream\.worker: (.*)", process.log.read_text())
    of_state = [line for line in said if not line.startswith("metrics and health on ")]
    assert sum(line.startswith("ready: roles decide, relay, ") for line in of_state[:2]) == 1
    assert took_over in of_state[:2]
    assert of_state[2] == f"relays no shards: gave up 0 to {system.shards - 1}"
    assert of_state[3].startswith("stopped: SIGTERM; roles decide, relay, ")
    assert len(of_state) == 4


async def test_a_gateway_exposes_every_metric_of_the_catalogue_and_nothing_else(
    system: Settings, worker: Callable[..., Worker], tmp_path: Path
) -> None:
    worker(system, "decide,relay,sweep,project")
    with GatewayProcess(system, tmp_path / "gateway.log", metrics_listen=ANY_PORT) as gateway:
        port = port_of(tmp_path / "gateway.log")
        async with calling(gateway.port) as caller:

            async def is_open() -> bool:
                body = {"offer": "o", "terms": {"kind": "coupon", "issuer": "shop", "total": 2}}
                return (await caller.post("/v1/offers", body, "open")).status == 201

            await until(is_open, 60, "an offer")
            for number in range(3):
                await caller.post("/v1/offers/o/grabs", {"user": f"u{number}"}, f"g{number}")
            await until(lambda: _is_found(caller, "/v1/offers/o"), 60, "the offer's row")
            await caller.send("GET", "/v1/offers/o")
            assert (await caller.send("GET", "/health/ready")).body == {"status": "ok"}
            assert (await caller.send("GET", "/health/live")).body == {"status": "ok"}
            await caller.send("GET", "/v2/nothing")
        scraped = scrape(port)
        assert exposed(scraped) == expected("gateway")
        requests = partial(scraped.value, "grabstream_http_requests_total")
        assert requests(operation="grab", status="200") + requests(operation="grab", status="201") == 2
        assert requests(operation="grab", status="409") == 1
        assert requests(operation="none", status="404") == 1
        assert scraped.value("grabstream_http_request_seconds_count", operation="grab") == 3
        answers = partial(scraped.value, "grabstream_answers_total", command="grab")
        assert (answers(outcome="granted"), answers(outcome="sold_out")) == (2, 1)
        assert scraped.value("grabstream_http_cache_hits_total") >= 1
        assert scraped.value("grabstream_http_cache_misses_total") >= 1
        assert scraped.value("grabstream_http_requests_max") == system.gateway_requests_max
        assert ask(port, "/health/ready") == (
            200, {"status": "ready", "roles_not_started": [], "servers": {"redis": "answers"}}
        )  # fmt: skip


async def _is_found(caller: Caller, path: str) -> bool:
    return (await caller.send("GET", path)).status == 200


@pytest.mark.long
async def test_a_second_worker_on_the_same_port_works_without_metrics_and_says_so(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    first = worker(system, "decide", metrics_listen=ANY_PORT)
    port = port_of(first.log)
    second = worker(system, "decide", metrics_listen=f"127.0.0.1:{port}")
    await until(lambda: "ready: roles decide" in second.log.read_text(), 60, "the second worker")
    said = second.log.read_text()
    assert f"no metrics: cannot listen on 127.0.0.1:{port} (GRAB_METRICS_LISTEN)" in said
    assert ask(port, "/health/live")[0] == 200
    assert second.stop() == 0


@pytest.mark.long
async def test_connections_beyond_the_bound_are_closed_and_others_are_answered_again(
    system: Settings, worker: Callable[..., Worker]
) -> None:
    port = port_of(worker(system, "decide", metrics_listen=ANY_PORT).log)
    async with AsyncExitStack() as stack:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS_MAX)]
        for _, writer in silent:
            stack.callback(writer.close)
        refused, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)
        async with asyncio.timeout(90):
            assert await refused.read() == b""

    async def answers() -> bool:
        try:
            return (await asyncio.to_thread(ask, port, "/health/live"))[0] == 200
        except OSError:
            return False

    await until(answers, 10, "an answer")


async def test_a_listener_that_nobody_asks_sets_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), list[float]()

    async def state() -> State:
        return State((), {})

    async with listening(ANY_PORT, Exposition("worker", {}), state, logging.getLogger("test")) as port:
        assert port is not None
        call_at = loop.call_at

        def counted(when: float, *rest: Any, **options: Any) -> Any:
            timers.append(when)
            return call_at(when, *rest, **options)

        monkeypatch.setattr(loop, "call_at", counted)
        # Enough turns of the loop for whatever would begin one.
        for _ in range(100):
            await asyncio.sleep(0)
        assert timers == []
        assert (await asyncio.to_thread(ask, port, "/health/ready"))[0] == 200


async def test_a_part_that_cannot_be_read_is_left_out_and_counted() -> None:
    async def away(samples: Samples) -> None:
        raise ConnectionError("away")

    async def own(samples: Samples) -> None:
        samples.set("grabstream_leases_held", 3)

    exposition = Exposition("worker", {"redis": away, "process": own})
    text, kind = await exposition.text("")
    scraped = read(text.decode())
    assert kind.startswith("text/plain")
    assert scraped.value("grabstream_leases_held") == 3
    assert scraped.value("grabstream_unread_parts_total", part="redis") == 1
    assert scraped.value("grabstream_unread_parts_total", part="process") == 0


async def test_servers_are_asked_once_for_all_who_ask_within_a_second() -> None:
    asked = 0

    async def up() -> None:
        nonlocal asked
        asked += 1

    async def away() -> None:
        raise ConnectionError("away")

    answering = Answering({"redis": up, "postgresql": away})
    found = await asyncio.gather(*(answering.servers() for _ in range(20)))
    assert found == [{"redis": True, "postgresql": False}] * 20
    assert await answering.redis()
    assert asked == 1


# -- parts ---------------------------------------------------------------------------------------------------


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum) == ([2, 2, 1], pytest.approx(8.65))
    samples = Samples()
    samples.histogram("grabstream_relay_cycle_seconds", histogram)
    [family] = [one for one in samples.families("worker") if one.name == "grabstream_relay_cycle_seconds"]
    assert [(one.labels.get("le"), one.value) for one in family.samples[:3]] == [
        ("0.1", 2), ("1.0", 4), ("+Inf", 5),
    ]  # fmt: skip


def test_what_is_not_in_the_catalogue_cannot_be_exposed() -> None:
    samples = Samples()
    with pytest.raises(KeyError):
        samples.set("grabstream_something", 1)
    with pytest.raises(KeyError, match="labels"):
        samples.set("grabstream_ready", 1, user="u")


def test_names_follow_the_conventions_of_prometheus() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"grabstream(_[a-z]+)+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "histogram") <= metric.name.endswith("_seconds")
        assert metric.meaning.endswith(".")
        assert set(metric.labels) <= LABELS
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_age_of_a_lag_counts_from_when_its_events_were_first_seen() -> None:
    since = Since()
    since.note(100.0, {0: 5, 1: 0})
    since.note(110.0, {0: 9, 1: 0})
    since.note(120.0, {0: 9, 1: 3})
    assert since.seconds(130.0, 0, 4) == 30.0
    assert since.seconds(130.0, 0, 5) == 20.0
    assert since.seconds(130.0, 0, 9) == 0.0
    assert since.seconds(130.0, 1, 2) == 10.0
    since.note(140.0, {0: 7})  # decisions were lost
    assert since.seconds(145.0, 0, 6) == 5.0
    assert since.seconds(145.0, 2, 0) == 0.0


@pytest.mark.parametrize(
    ("roles", "away", "missing", "stopping", "ready", "servers"),
    [
        ("decide,relay", (), (), False, True, {"kafka": True, "redis": True}),
        ("decide,relay", ("PostgreSQL (x)",), (), False, True, {"kafka": True, "redis": True}),
        ("decide,relay", ("Redis (redis://x)",), (), False, False, {"kafka": True, "redis": False}),
        ("project", ("Redis (redis://x)",), (), False, True, {"kafka": True, "postgresql": True}),
        ("project", ("PostgreSQL (x)",), (), False, False, {"kafka": True, "postgresql": False}),
        ("decide", (), ("decide",), False, False, {"kafka": True, "redis": True}),
        ("decide", (), (), True, False, {"kafka": True, "redis": True}),
    ],
)
def test_a_worker_is_ready_when_its_roles_have_started_and_their_servers_answer(
    roles: str, away: tuple[str, ...], missing: tuple[str, ...], stopping: bool, ready: bool,
    servers: dict[str, bool], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(OUTAGES, "_away", set(away))
    state = worker_state(roles.split(","), missing, stopping)
    assert (state.is_ready, state.servers) == (ready, servers)
