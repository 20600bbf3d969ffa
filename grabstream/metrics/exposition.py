"""The text that Prometheus reads: all parts of a process's metrics, read on request."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from importlib import metadata
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family

from grabstream.metrics.catalogue import BY_NAME, Metric, Process, metrics_of
from grabstream.models.outcomes import OUTCOME_NAMES
from grabstream.runtime.measures import FUNCTION_SECONDS, GateMeasures, Histogram
from grabstream.runtime.trouble import is_trouble
from grabstream.streams.clients import error_text

log = logging.getLogger(__name__)

#: How long a part may take. Prometheus itself waits 10 s by default.
PART_SECONDS_MAX: Final = 3.0
#: Requests within this time get the same numbers.
KEPT_SECONDS: Final = 1.0

Labels = tuple[str, ...]


class Samples:
    """The values of metrics, by name and values of labels. A name or label that is not in the catalogue
    raises KeyError.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[Labels, float]] = defaultdict(dict)
        self.histograms: dict[str, dict[Labels, Histogram]] = defaultdict(dict)

    def set(self, name: str, value: float, **labels: object) -> None:
        """Sets the value of a counter or gauge."""
        self.values[name][_labels(BY_NAME[name], labels)] = value

    def histogram(self, name: str, value: Histogram, **labels: object) -> None:
        """Sets the value of a histogram."""
        self.histograms[name][_labels(BY_NAME[name], labels)] = value

    def families(self, process: Process) -> list[Family]:
        """The metrics of a process, also those without values."""
        return [self._family(metric) for metric in metrics_of(process)]

    def _family(self, metric: Metric) -> Family:
        if metric.kind == "histogram":
            histogram_family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
            for labels, histogram in self.histograms[metric.name].items():
                histogram_family.add_metric(labels, _buckets(histogram), histogram.sum)
            return histogram_family
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family: Family = kind(metric.name, metric.meaning, labels=metric.labels)
        for labels, value in self.values[metric.name].items():
            family.add_metric(labels, value)  # type: ignore[attr-defined]
        return family


def _labels(metric: Metric, labels: Mapping[str, object]) -> Labels:
    if labels.keys() != set(metric.labels):
        raise KeyError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
    return tuple(str(labels[name]) for name in metric.labels)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], list(histogram.counts), strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


#: Reads a part of the metrics into samples.
Part = Callable[[Samples], Awaitable[None]]


class Exposition:
    """The metrics of one process. `parts` are read at the same time; one that fails or takes too long is left
    out and counted.
    """

    def __init__(self, process: Process, parts: Mapping[str, Part]) -> None:
        self._process = process
        self._parts = parts
        self._unread = dict.fromkeys(parts, 0)
        self._process_registry = CollectorRegistry()
        ProcessCollector(registry=self._process_registry)
        PlatformCollector(registry=self._process_registry)
        GCCollector(registry=self._process_registry)
        self._reading: asyncio.Task[list[Family]] | None = None
        self._read_at = 0.0

    async def text(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the form that suits the header Accept."""
        families = await self._families()

        class Read:
            def collect(_) -> Iterable[Family]:
                yield from families

        registry = CollectorRegistry()
        registry.register(Read())
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    async def _families(self) -> list[Family]:
        """The result of a read, shared by concurrent requests."""
        if self._reading is None or (
            self._reading.done() and time.monotonic() > self._read_at + KEPT_SECONDS
        ):
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)

    async def _read(self) -> list[Family]:
        samples = Samples()
        await asyncio.gather(*(self._read_part(name, part, samples) for name, part in self._parts.items()))
        samples.set("grabstream_build_info", 1, version=metadata.version("grabstream"))
        for name, count in self._unread.items():
            samples.set("grabstream_unread_parts_total", count, part=name)
        self._read_at = time.monotonic()
        return [*samples.families(self._process), *self._process_registry.collect()]

    async def _read_part(self, name: str, part: Part, samples: Samples) -> None:
        try:
            async with asyncio.timeout(PART_SECONDS_MAX):
                await part(samples)
        except BaseException as error:
            if is_trouble(error):
                log.info("metrics: %s cannot be read: %s", name, error_text(error))
            elif isinstance(error, Exception):
                log.error("metrics: %s cannot be read", name, exc_info=True)
            else:
                raise
            self._unread[name] += 1


def add_gate(samples: Samples, measures: GateMeasures, queued: int, calls_in_flight: int) -> None:
    """Adds what a gate has counted."""
    for command, codes in list(measures.answers.items()):
        for code, count in list(codes.items()):
            if code in OUTCOME_NAMES:
                samples.set("grabstream_answers_total", count, command=command, outcome=OUTCOME_NAMES[code])
    samples.set("grabstream_answers_unknown_total", measures.unknown)
    for reason, count in measures.not_decided.items():
        samples.set("grabstream_calls_not_decided_total", count, reason=reason)
    for state, count in measures.lost_answers.items():
        samples.set("grabstream_lost_answers_total", count, state=state)
    for place, count in measures.refusals_dropped.items():
        samples.set("grabstream_refusals_dropped_total", count, place=place)
    samples.set("grabstream_gate_queued_commands", queued)
    samples.set("grabstream_gate_calls_in_flight", calls_in_flight)
    for function, seconds in list(FUNCTION_SECONDS.items()):
        samples.histogram("grabstream_function_seconds", seconds, function=function)


def add_readiness(samples: Samples, is_ready: bool, servers: Mapping[str, bool]) -> None:
    """Adds whether the process is ready, and which servers answer it."""
    samples.set("grabstream_ready", int(is_ready))
    for server, answers in servers.items():
        samples.set("grabstream_server_up", int(answers), server=server)
