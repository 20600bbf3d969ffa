"""Traces of real processes, as a collector gets them."""

import threading
from collections.abc import Callable, Iterator
from gzip import decompress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiokafka import AIOKafkaProducer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from grabstream import vocabulary
from grabstream.client.over_kafka import KafkaClient
from grabstream.models.answers import Answer
from grabstream.models.commands import Grab, encode_command
from grabstream.runtime.traces import Span, Traces, ids_of, traceparent_of
from grabstream.settings import Settings
from grabstream.streams import brokers
from grabstream.streams.clients import started
from grabstream.streams.topics import Topics
from tests.conftest import until
from tests.support.gateways import Caller, GatewayProcess, calling

CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{CALLER[0]}-{CALLER[1]}-01".encode()


class Sent(NamedTuple):
    """A span as it was sent: ids in hex."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    links: list[str]
    attributes: dict[str, Any]
    nanoseconds: int


class Collector:
    """Takes spans. It answers nothing while it hangs."""

    def __init__(self) -> None:
        self.spans: list[Sent] = []
        self.released = threading.Event()
        self.released.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = decompress(body)
                collector.released.wait(60)
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing is logged."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, request: Any) -> None:
        for of_resource in request.resource_spans:
            named = {one.key: one.value.string_value for one in of_resource.resource.attributes}
            for of_scope in of_resource.scope_spans:
                for one in of_scope.spans:
                    attributes = {
                        each.key.removeprefix("grabstream."): getattr(
                            each.value, each.value.WhichOneof("value")
                        )
                        for each in one.attributes
                    }
                    links = [link.trace_id.hex() for link in one.links]
                    self.spans.append(
                        Sent(
                            named["service.name"], one.name, one.trace_id.hex(), one.span_id.hex(),
                            one.parent_span_id.hex(), links, attributes,
                            one.end_time_unix_nano - one.start_time_unix_nano,
                        )
                    )  # fmt: skip

    def of(self, trace: str) -> dict[str, Sent]:
        """The spans of a trace, by their name; commits by the read model."""
        return {one.attributes.get("projection", one.name): one for one in self.spans if one.trace == trace}


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.released.set()
    one.server.shutdown()
    one.server.server_close()


async def open_sale(caller: Caller) -> None:
    """Opens an offer as soon as its shard decides."""
    terms = {"kind": "coupon", "issuer": "shop", "total": 5}

    async def is_open() -> bool:
        return (await caller.post("/v1/offers", {"offer": "sale", "terms": terms}, "open")).status == 201

    await until(is_open, 60, "an offer")


@pytest.mark.long
async def test_an_event_is_traced_through_all_processes(
    system: Settings, worker: Callable[..., Any], collector: Collector, tmp_path: Path
) -> None:
    traces = {"traces_url": collector.url, "traces_one_in": "1"}
    working = worker(system, **traces)
    with GatewayProcess(system, tmp_path / "log", gate_timeout_ms="20000", **traces) as gateway:
        async with calling(gateway.port) as caller:
            await open_sale(caller)
            got = await caller.post(
                "/v1/offers/sale/grabs", {"user": "anna"}, traceparent=TRACEPARENT.decode()
            )
            assert (got.status, got.body["outcome"]) == (201, "granted"), got
        assert gateway.stop() == 0
    event = f"{got.body['shard']}-{got.body['seq']}"
    trace = sha256(f"{system.prefix}/{event}".encode()).hexdigest()
    expected = {"decide", "append to the journal", "ledger", "balances", "audit", "events"}
    await until(lambda: collector.of(trace[:32]).keys() >= expected, 60, "all spans")
    found = collector.of(trace[:32])
    assert found.keys() == expected
    first = found["decide"]
    assert (first.service, first.span, first.parent) == ("grabstream-gateway", trace[32:48], "")
    assert first.attributes == {
        "shard": got.body["shard"], "seq": got.body["seq"], "function": "grab", "commands": 1,
        "offer": "sale", "command": got.body["id"], "outcome": "granted",
    }  # fmt: skip
    for name in expected - {"decide"}:
        assert (found[name].service, found[name].parent) == ("grabstream-worker", first.span)
    [request] = collector.of(CALLER[0]).values()
    assert (request.name, request.parent, request.links) == ("HTTP request", CALLER[1], [trace[:32]])
    assert request.nanoseconds > found["append to the journal"].nanoseconds > 0
    assert "anna" not in repr(collector.spans)
    assert working.stop() == 0


@pytest.mark.long
async def test_a_command_of_a_topic_has_its_span_in_the_trace_of_its_sender(
    system: Settings, worker: Callable[..., Any], collector: Collector
) -> None:
    """Two records each name a span of their sender, of which the one is not sampled; the third names none."""
    working = worker(system, traces_url=collector.url, traces_one_in="1")
    unsampled = f"00-{'a' * 32}-{'b' * 16}-00".encode()
    terms = vocabulary.CouponTerms(issuer="shop", total=5)
    async with KafkaClient(system.kafka, prefix=system.prefix) as client:
        await client.open(terms, "sale", id="open")
    async with started(AIOKafkaProducer(**brokers.at(system.brokers))) as producer:
        for number, value in enumerate([TRACEPARENT, unsampled, None]):
            grab = encode_command(Grab(id=f"g{number}", offer="sale", user="anna"))
            headers = [] if value is None else [("traceparent", value)]
            await producer.send_and_wait(Topics(system.prefix).commands, grab, headers=headers)

    def served() -> dict[str, Sent]:
        return {one.attributes["command"]: one for one in collector.spans if one.name == "command of a topic"}

    await until(lambda: served().keys() >= {"g0", "g1", "g2"}, 60, "all spans")
    spans = served()
    assert (spans["g0"].trace, spans["g0"].parent) == CALLER
    [link] = spans["g0"].links
    for other in (spans["g1"], spans["g2"]):
        event = f"{other.attributes['shard']}-{other.attributes['seq']}"
        assert other.trace == sha256(f"{system.prefix}/{event}".encode()).hexdigest()[:32]
        assert not other.links
    event = f"{spans['g0'].attributes['shard']}-{spans['g0'].attributes['seq']}"
    assert link == sha256(f"{system.prefix}/{event}".encode()).hexdigest()[:32]
    assert working.stop() == 0


@pytest.mark.long
async def test_a_collector_that_hangs_delays_nothing(
    system: Settings, worker: Callable[..., Any], collector: Collector, tmp_path: Path
) -> None:
    collector.released.clear()
    traces = {"traces_url": collector.url, "traces_one_in": "1"}
    working = worker(system, "decide,relay", **traces)
    with GatewayProcess(system, tmp_path / "log", gate_timeout_ms="20000", **traces) as gateway:
        async with calling(gateway.port) as caller:
            await open_sale(caller)
            got = await caller.post("/v1/offers/sale/grabs", {"user": "anna"})
            assert got.status == 201, got
        assert gateway.stop() == 0
        assert "Traceback" not in gateway.text()
    assert working.stop() == 0


@pytest.mark.parametrize(
    ("first", "last", "traced"), [(1, 9, []), (10, 10, [10]), (9, 31, [10, 20, 30]), (11, 10, [])]
)
def test_events_whose_seq_is_a_multiple_are_traced(first: int, last: int, traced: list[int]) -> None:
    assert list(Traces(10, print).range_of(first, last)) == traced


def test_repeats_and_refusals_are_not_traced() -> None:
    taken: list[Span] = []
    answers = [
        Answer("a", "granted", 0, offer="o", shard=1, seq=10),
        Answer("b", "granted", 0, offer="o", shard=1, seq=20, repeated=True),
        Answer("c", "sold_out", 32, offer="o"),
        Answer("d", "granted", 0, offer="o", shard=1, seq=11),
        Answer("e", "already_taken", 26, offer="o", shard=1, seq=10),
    ]
    Traces(10, taken.append).answered("decide", answers, 0.5)
    [span] = taken
    assert (span.shard, span.seq, span.ended_ns - span.began_ns) == (1, 10, 500_000_000)


def test_ids_differ_by_prefix_shard_and_seq() -> None:
    names = [("a", 1, 12), ("a", 11, 2), ("a/1", 1, 2), ("a", 1, 2), ("b", 1, 2)]
    assert len({ids_of(*name).trace for name in names}) == len(names)


@pytest.mark.parametrize(
    "values",
    [
        [], [b""], [None], [b"00"], [f"01-{CALLER[0]}-{CALLER[1]}-01".encode()],
        [f"00-{'0' * 32}-{CALLER[1]}-01".encode()], [f"00-{CALLER[0]}-{'0' * 16}-01".encode()],
        [f"00-{CALLER[0].upper()}-{CALLER[1]}-01".encode()], [TRACEPARENT + b"\n"], [b"\xff" * 55],
        [TRACEPARENT, TRACEPARENT],
    ],
)  # fmt: skip
def test_what_is_not_a_traceparent_is_ignored(values: list[bytes | None]) -> None:
    assert traceparent_of([(b"traceparent", value) for value in values]) == ""


def test_a_traceparent_is_read_beside_other_headers() -> None:
    headers = [(b"a", b"b"), (b"traceparent", TRACEPARENT), (b"tracestate", None)]
    assert traceparent_of(headers) == TRACEPARENT.decode()
