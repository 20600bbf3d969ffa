"""The metrics of a gateway, and whether it is ready."""

from grabstream.connections.key_files import KeyFiles
from grabstream.gate.gate import Gate
from grabstream.gateway.app import Application, Bounds
from grabstream.gateway.bounds import STREAMS_MAX
from grabstream.gateway.caching import Cache
from grabstream.metrics.answering import Answering
from grabstream.metrics.exposition import Exposition, Samples, add_gate, add_readiness
from grabstream.metrics.state import State


class GatewayMetrics:
    """Reads the metrics of one gateway. It is ready while Redis answers: it decides without PostgreSQL."""

    def __init__(
        self,
        application: Application,
        gate: Gate,
        cache: Cache,
        answering: Answering,
        bounds: Bounds,
        key_files: KeyFiles,
    ) -> None:
        self._application = application
        self._gate = gate
        self._cache = cache
        self._answering = answering
        self._bounds = bounds
        self._key_files = key_files
        self.exposition = Exposition("gateway", {"process": self._own})

    async def state(self) -> State:
        """Whether the gateway is ready."""
        return State((), {"redis": await self.is_ready()})

    async def is_ready(self) -> bool:
        """Whether Redis answers."""
        return await self._answering.redis()

    async def _own(self, samples: Samples) -> None:
        servers = await self._answering.servers()
        add_readiness(samples, servers["redis"], servers)
        samples.set("grabstream_key_files_refused", len(self._key_files.refused))
        add_gate(samples, self._gate.measures, self._gate.queued, self._gate.calls_in_flight)
        measures = self._application.measures
        for operation, operation_measures in list(measures.operations.items()):
            for status, count in list(operation_measures.statuses.items()):
                samples.set("grabstream_http_requests_total", count, operation=operation, status=status)
            if any(operation_measures.statuses.values()):
                seconds = operation_measures.seconds
                samples.histogram("grabstream_http_request_seconds", seconds, operation=operation)
        samples.set("grabstream_http_requests_in_work", self._application.in_work)
        samples.set("grabstream_http_requests_max", self._bounds.requests_max)
        samples.set("grabstream_http_commands_in_work", self._application.commands_in_work)
        samples.set("grabstream_http_commands_max", self._application.commands_bound)
        samples.set("grabstream_http_connections", measures.connections())
        samples.set("grabstream_http_connections_max", self._bounds.connections_max)
        for what, count in measures.shed.items():
            samples.set("grabstream_http_shed_total", count, what=what)
        streams = self._application.streams
        samples.set("grabstream_http_streams", streams.count)
        samples.set("grabstream_http_streams_max", STREAMS_MAX)
        samples.set("grabstream_http_stream_events_total", streams.measures.events)
        for result, count in streams.measures.slow.items():
            samples.set("grabstream_http_streams_slow_total", count, result=result)
        samples.set("grabstream_http_cache_hits_total", self._cache.hits)
        samples.set("grabstream_http_cache_misses_total", self._cache.misses)
