"""`python -m bench.http_load PORT`, a plan as JSON on standard input: sends requests over HTTP, and prints
what came back as one line of JSON. A separate process, on raw connections, so that it costs less than what it
measures; it counts its own processor time, too.
"""

import asyncio
import json
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import uvloop

TICK_SECONDS: Final = 0.001
DRAIN_SECONDS: Final = 30.0
#: Of this many requests, `lists` are lists.
MIX: Final = 5
ACCEPTED: Final = ("200", "201")


class HttpPlan(NamedTuple):
    """What is sent: of five requests, `lists` are lists for visitors in turn; the others are grabs of the
    offers in turn, each of a new user, whose name begins with `stem`. With a rate, as many requests a second
    begin, whether those before are answered or not; without one, each connection has one request at a time.
    With `phases` (requests a second, seconds), one follows the other, and a request that is due while no
    connection is free is not sent. `with_answers` asks for each answer by itself.
    """

    lists: int
    offers: list[str]
    visitors: int
    stem: str
    seconds: float
    connections: int
    rate: float = 0.0
    phases: Sequence[tuple[float, float]] = ()
    with_answers: bool = False

    @property
    def open_loop(self) -> Sequence[tuple[float, float]]:
        """The phases in which requests begin at a rate; none without a rate."""
        return self.phases or ([(self.rate, self.seconds)] if self.rate else [])


def requests(plan: HttpPlan) -> Iterator[bytes]:
    """The requests of a plan, without end."""
    lists = [
        f"GET /v1/offers?order=random&visitor=v{number} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        for number in range(plan.visitors)
    ]
    heads = [
        f"POST /v1/offers/{offer}/grabs HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        "Content-Type: application/json\r\n".encode()
        for offer in plan.offers
    ]
    number = 0
    while True:
        number += 1
        if number * plan.lists % MIX < plan.lists:
            yield lists[number % len(lists)]
        else:
            name = b"%s-%d" % (plan.stem.encode(), number)
            body = b'{"user":"%s"}' % name
            yield b"%sIdempotency-Key: %s\r\nContent-Length: %d\r\n\r\n%s" % (
                heads[number % len(heads)], name, len(body), body,
            )  # fmt: skip


class HttpLoad:
    """All connections, and what came back."""

    def __init__(self, plan: HttpPlan) -> None:
        self.is_open_loop = bool(plan.open_loop)
        self.until = 0.0
        self.free: deque[Connection] = deque()
        #: When requests were due that wait for a free connection.
        self.due: deque[float] = deque()
        self.statuses: Counter[str] = Counter()
        #: When each answered request was due, the seconds to its answer, and its status.
        self.answers: list[tuple[float, float, str]] = []
        self.unsent = 0
        self.bytes = 0
        self.next = requests(plan).__next__


class Connection(asyncio.Protocol):
    """One connection, which has one request at a time."""

    def __init__(self, load: HttpLoad) -> None:
        self._load = load
        self._head = b""
        self._left = 0
        self._status = ""
        self._began = 0.0
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """The connection is free."""
        self._transport = transport
        self._load.free.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        """A request without an answer is lost."""
        if self._began:
            self._load.statuses["lost"] += 1

    def send(self, began: float) -> None:
        """Sends the next request, which was due at a time."""
        self._began = began
        self._transport.write(self._load.next())

    def data_received(self, data: bytes) -> None:
        """A piece of an answer."""
        self._load.bytes += len(data)
        if self._left:
            self._left -= len(data)
        else:
            head = self._head + data
            end = head.find(b"\r\n\r\n")
            if end < 0:
                self._head = head
                return
            self._head = b""
            start = head.index(b"content-length: ") + 16
            self._status = head[9:12].decode()
            self._left = int(head[start : head.index(b"\r", start)]) - (len(head) - end - 4)
        if not self._left:
            self._answered()

    def _answered(self) -> None:
        load, now = self._load, time.perf_counter()
        load.statuses[self._status] += 1
        load.answers.append((self._began, now - self._began, self._status))
        self._began = 0.0
        if load.is_open_loop:
            if load.due:
                self.send(load.due.popleft())
            else:
                load.free.append(self)
        elif now < load.until:
            self.send(now)
        else:
            load.free.append(self)


async def run(port: int, plan: HttpPlan) -> dict[str, Any]:
    """Plays a plan."""
    loop = asyncio.get_running_loop()
    load = HttpLoad(plan)
    await asyncio.gather(
        *(
            loop.create_connection(lambda: Connection(load), "127.0.0.1", port)
            for _ in range(plan.connections)
        )
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    load.until = began + plan.seconds
    if load.is_open_loop:
        phase_began = began
        for rate, phase_seconds in plan.open_loop:
            await _send_at(load, rate, phase_began, phase_seconds, waits=not plan.phases)
            phase_began += phase_seconds
    else:
        while load.free:
            load.free.popleft().send(time.perf_counter())
        await asyncio.sleep(plan.seconds)
    drained = time.perf_counter() + DRAIN_SECONDS
    while len(load.free) < plan.connections and time.perf_counter() < drained:
        await asyncio.sleep(TICK_SECONDS)
    seconds = time.perf_counter() - began
    now = resource.getrusage(resource.RUSAGE_SELF)
    ordered = sorted(latency for _, latency, status in load.answers if status in ACCEPTED)
    return {
        "began": began,
        "seconds": seconds,
        "statuses": load.statuses,
        "unsent": load.unsent,
        "client_cpu_seconds": now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
        "bytes": load.bytes,
        "p50_ms": ordered[len(ordered) // 2] * 1000,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1000,
        "answers": load.answers if plan.with_answers else [],
    }


async def _send_at(load: HttpLoad, rate: float, began: float, seconds: float, waits: bool) -> None:
    """Begins `rate` requests a second for `seconds`; `waits`: one that finds no free connection waits."""
    sent = 0
    while sent < rate * seconds:
        while sent < rate * seconds and began + sent / rate <= time.perf_counter():
            due = began + sent / rate
            sent += 1
            if load.free:
                load.free.popleft().send(due)
            elif waits:
                load.due.append(due)
            else:
                load.unsent += 1
        await asyncio.sleep(TICK_SECONDS)


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run(int(sys.argv[1]), HttpPlan(**json.load(sys.stdin))))))
