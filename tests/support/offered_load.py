"""`python -m tests.support.offered_load PORT OFFER STEM SECONDS CONNECTIONS [RATE]`: grabs of an offer, sent
to a gateway over CONNECTIONS connections; prints what came back as one line of JSON.

With a rate, as many grabs a second are sent, whether those before are answered or not, as long as a
connection is free. Without one, each connection sends the next grab when it has the answer of the one before.
A separate process, and no HTTP library, so that it costs less than what it measures.
"""

import asyncio
import json
import resource
import sys
import time
from collections import Counter, deque
from typing import Any, Final

import uvloop

TICK_SECONDS: Final = 0.002
#: How long answers may come after the last request.
DRAIN_SECONDS: Final = 30.0


class Load:
    """What is sent and comes back, on all connections."""

    def __init__(self, offer: str, stem: str, until: float) -> None:
        self.until = until
        self.is_closed_loop = False
        self.free: deque[Connection] = deque()
        self.sent = self.lost = 0
        self.statuses: Counter[int] = Counter()
        self.without_retry_after = 0
        self.latencies: dict[int, list[float]] = {}
        self._head = f"POST /v1/offers/{offer}/grabs HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
        self._stem = stem

    def request(self) -> bytes:
        """The next grab, of a new user."""
        self.sent += 1
        name = f"{self._stem}-{self.sent}".encode()
        body = b'{"user":"%s"}' % name
        return b"%sIdempotency-Key: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
            self._head, name, len(body), body,
        )  # fmt: skip

    @property
    def answered(self) -> int:
        """How many requests have an answer."""
        return sum(self.statuses.values())


class Connection(asyncio.Protocol):
    """One connection, which has one request at a time."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._received = b""
        self._sent_at = 0.0
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._load.free.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._load.lost += bool(self._sent_at)

    def send(self) -> None:
        """Sends the next grab."""
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.request())

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        lowered = head.lower()
        start = lowered.index(b"content-length: ") + 16
        if len(body) < int(lowered[start : start + 8].partition(b"\r")[0]):
            return
        self._received = b""
        now = time.perf_counter()
        load, status = self._load, int(head[9:12])
        load.statuses[status] += 1
        load.latencies.setdefault(status, []).append(now - self._sent_at)
        load.without_retry_after += status in (429, 503) and b"retry-after: " not in lowered
        self._sent_at = 0.0
        if load.is_closed_loop and now < load.until:
            self.send()
        else:
            load.free.append(self)


async def _offer(port: int, offer: str, stem: str, seconds: float, connections: int, rate: float) -> Any:
    loop = asyncio.get_running_loop()
    load = Load(offer, stem, 0)
    for start in range(0, connections, 200):
        await asyncio.gather(
            *(
                loop.create_connection(lambda: Connection(load), "127.0.0.1", port)
                for _ in range(start, min(start + 200, connections))
            )
        )
    began = time.perf_counter()
    load.until = began + seconds
    if rate:
        while (now := time.perf_counter()) < load.until:
            for _ in range(min(int((now - began) * rate) - load.sent, len(load.free))):
                load.free.popleft().send()
            await asyncio.sleep(TICK_SECONDS)
    else:
        load.is_closed_loop = True
        while load.free:
            load.free.popleft().send()
        await asyncio.sleep(seconds)
    sent_for = time.perf_counter() - began
    while load.answered + load.lost < load.sent and time.perf_counter() < load.until + DRAIN_SECONDS:
        await asyncio.sleep(TICK_SECONDS)
    return {
        "sent": load.sent, "sent_seconds": sent_for, "seconds": time.perf_counter() - began,
        "wanted": int(rate * seconds), "unanswered": load.sent - load.answered,
        "without_retry_after": load.without_retry_after, "statuses": load.statuses,
        "latency_ms": {status: _quantiles(values) for status, values in load.latencies.items()},
    }  # fmt: skip


def _quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        name: round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1_000, 2)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }


if __name__ == "__main__":
    port, offer, stem, seconds, connections, *rate = sys.argv[1:]
    # Each connection is an open file.
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    result = uvloop.run(
        _offer(int(port), offer, stem, float(seconds), int(connections), float(rate[0]) if rate else 0.0)
    )
    print(json.dumps(result))
