"""Sends traces to a collector over OTLP (docs/tracing.md), by the SDK of OpenTelemetry. It batches spans in
its own thread, and drops them when the collector does not take them: tracing delays no decision.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from typing import Any, Final

from grabstream.runtime.traces import Ids, Span, Traces, ids_of, use_traces
from grabstream.settings import Settings

SEND_SECONDS_MAX: Final = 2.0
CLOSE_SECONDS_MAX: Final = 3.0
#: The name of a span, by the work.
_NAMES: Final = {
    "decide": "decide", "relay": "append to the journal", "request": "HTTP request",
    "answer": "command of a topic", "project": "commit",
}  # fmt: skip
#: The next ids that the SDK gives to a span.
_next_ids: Final[ContextVar[Ids | None]] = ContextVar("next ids", default=None)


@contextmanager
def tracing(settings: Settings, process: str) -> Iterator[None]:
    """Traces this process (`worker`, `gateway`) inside the block, if the settings name a collector. After it,
    unsent spans are sent, for at most CLOSE_SECONDS_MAX.
    """
    if settings.traces_url is None:
        yield
        return
    exporter = _Exporter(settings.traces_url, settings.prefix, process)
    use_traces(Traces(settings.traces_one_in, exporter.take))
    try:
        yield
    finally:
        use_traces(None)
        exporter.close()


class _Exporter:
    def __init__(self, url: str, prefix: str, process: str) -> None:
        # What few processes need takes half a second to import.
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        class KnownIds(RandomIdGenerator):
            """Ids that are known, else random ones."""

            def generate_trace_id(self) -> int:
                ids = _next_ids.get()
                return ids.trace if ids else super().generate_trace_id()

            def generate_span_id(self) -> int:
                ids = _next_ids.get()
                return ids.span if ids else super().generate_span_id()

        # The SDK repeats each failure with a traceback.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._trace = trace
        self._prefix = prefix
        named = {"service.name": f"grabstream-{process}", "service.namespace": prefix}
        version = {"service.version": metadata.version("grabstream")}
        self._provider = TracerProvider(
            ALWAYS_ON, Resource.create({**named, **version}), shutdown_on_exit=False, id_generator=KnownIds()
        )
        exporter = OTLPSpanExporter(url, timeout=SEND_SECONDS_MAX)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("grabstream")

    def take(self, span: Span) -> None:
        """Ends a span, which the thread of the SDK sends."""
        trace, ids = self._trace, ids_of(self._prefix, span.shard, span.seq)
        first = trace.SpanContext(ids.trace, ids.span, is_remote=True, trace_flags=trace.TraceFlags(1))
        context, links, token = trace.set_span_in_context(trace.NonRecordingSpan(first)), [], None
        if span.work == "decide":
            context, token = trace.set_span_in_context(trace.INVALID_SPAN), _next_ids.set(ids)
        elif (cause := _context_of(trace, span.cause)) is not None:
            # The caller's trace gets the span, and the span says which trace is that of the event.
            context, links = trace.set_span_in_context(trace.NonRecordingSpan(cause)), [trace.Link(first)]
        try:
            served = span.work in ("request", "answer")
            started = self._tracer.start_span(
                _NAMES[span.work], context, trace.SpanKind.SERVER if served else trace.SpanKind.INTERNAL,
                {"grabstream.shard": span.shard, "grabstream.seq": span.seq}
                | {f"grabstream.{name}": value for name, value in span.attributes.items()},
                links, span.began_ns,
            )  # fmt: skip
        finally:
            if token is not None:
                _next_ids.reset(token)
        started.end(span.ended_ns)

    def close(self) -> None:
        """Sends the remaining spans, for at most CLOSE_SECONDS_MAX: for a collector that hangs, the SDK would
        wait 30 s.
        """
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS_MAX)


def _context_of(trace: Any, traceparent: str) -> Any:
    """The span that caused a span of ours; None without one, or if it is not kept."""
    if not traceparent:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    if not int(flags, 16) & 1:
        return None
    return trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
    )
