"""A `grabstream gateway` process, and a client that sends it requests."""

import contextlib
import json
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp
from yarl import URL

from grabstream.settings import Settings, child_environment
from tests.conftest import wait_until
from tests.support.command_line import env_of

_ready = re.compile(r"listening on http://(\S+):(\d+);")


def environment_of(settings: Settings, **overrides: str) -> dict[str, str]:
    """The environment of a gateway of a system."""
    return child_environment(**{**env_of(settings), "shards": str(settings.shards)}, **overrides)


class GatewayProcess:
    """A gateway of a test, on a free port. `start` waits until it listens."""

    def __init__(self, settings: Settings, log: Path, *words: str, **overrides: str) -> None:
        self.log = log
        self._output = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grabstream.ops.cli", "gateway", "--port", "0", *words],
            env=environment_of(settings, **overrides),
            stdout=self._output,
            stderr=self._output,
        )
        self.port = 0

    def start(self) -> Self:
        """Waits until it listens."""
        wait_until(lambda: _ready.search(self.text()) or self.process.poll() is not None, 180, "a gateway")
        found = _ready.search(self.text())
        assert found, self.text()
        self.port = int(found[2])
        return self

    def text(self) -> str:
        """The log."""
        return self.log.read_text()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal; returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        try:
            return self.process.wait(25)
        finally:
            self.kill()

    def kill(self) -> None:
        """kill -9, if it runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._output.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Got(NamedTuple):
    """An answer: status, headers, bytes, and the document if it is JSON."""

    status: int
    headers: Any
    raw: bytes
    body: Any


class Message(NamedTuple):
    """A message of a stream of events."""

    place: str
    type: str
    text: str


class Caller:
    """Sends requests to a gateway. `always` are headers of every request, unless a request has its own."""

    def __init__(self, port: int, session: aiohttp.ClientSession, **always: str) -> None:
        self.port = port
        self._session = session
        self._always = always

    def having(self, secret: str | None, **always: str) -> "Caller":
        """A client with these credentials, and further headers of every request."""
        given = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        return Caller(self.port, self._session, **{**given, **always})

    async def send(
        self, method: str, path: str, body: Any = None, key: str | None = None, **headers: str
    ) -> Got:
        """Sends a request; `path` is sent as it is. A body that is not bytes is sent as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in {**self._always, **headers}.items()}
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        if key is not None:
            sent["Idempotency-Key"] = key
        url = URL(f"http://127.0.0.1:{self.port}{path}", encoded=True)
        async with self._session.request(
            method, url, data=body, headers=sent, skip_auto_headers=["Content-Type"], allow_redirects=False
        ) as answer:
            # A stream does not end; its head is checked.
            is_stream = answer.headers.get("content-type") == "text/event-stream"
            raw = b"" if is_stream else await answer.read()
            is_json = "json" in answer.headers.get("content-type", "")
            return Got(answer.status, answer.headers, raw, json.loads(raw) if is_json and raw else None)

    async def follow(
        self, path: str, place: str | None = None, every: bool = False
    ) -> AsyncGenerator[Message, None]:
        """The messages of a stream, until it ends; `place` is the id after which it resumes. Messages without
        data have the type ''. Ends the connection when it is closed. `every`: also messages without an id.
        """
        sent = {**self._always, **({} if place is None else {"Last-Event-ID": place})}
        url = URL(f"http://127.0.0.1:{self.port}{path}", encoded=True)
        async with self._session.get(url, headers=sent) as answer:
            assert answer.status == 200, (answer.status, await answer.read())
            assert answer.headers["content-type"] == "text/event-stream"
            fields: dict[str, str] = {}
            async for raw in answer.content:
                line = raw.decode().rstrip("\n")
                if line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                    continue
                if "id" in fields or (every and "event" in fields):
                    yield Message(fields.get("id", ""), fields.get("event", ""), fields.get("data", ""))
                fields = {}

    async def post(self, path: str, body: Any = None, key: str | None = None, **headers: str) -> Got:
        """POST, with a new key unless one is given."""
        return await self.send("POST", path, {} if body is None else body, key or new_key(), **headers)

    async def open(self, offer: str, **terms: Any) -> Got:
        """Opens an offer; by default, of one coupon."""
        given = {"kind": "coupon", "issuer": "shop", "total": 1, **terms}
        got = await self.post("/v1/offers", {"offer": offer, "terms": given})
        assert got.status == 201, got
        return got


def new_key() -> str:
    """A key that no other request has."""
    return secrets.token_hex(8)


@contextlib.asynccontextmanager
async def calling(port: int) -> AsyncIterator[Caller]:
    """A client with many connections."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(60)
    ) as session:
        yield Caller(port, session)
