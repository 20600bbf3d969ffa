"""The fake payment provider as a process of a test, and a payment side that never answers."""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

from grabstream.settings import child_environment
from tests.conftest import wait_until
from tests.support.receipts import KEYS_TEXT

_ready = re.compile(r"for tests only: http://127\.0\.0\.1:(\d+)/pay")


class ProviderProcess:
    """`grabstream fake-payments` on a free port."""

    def __init__(self, log: Path, *words: str) -> None:
        self.log = log
        self._words = words
        self._output = log.open("ab")
        self.port = 0

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grabstream.ops.cli", "fake-payments", "--port", "0", *self._words],
            env=child_environment(payment_keys=KEYS_TEXT),
            stdout=self._output,
            stderr=self._output,
        )
        wait_until(lambda: _ready.search(self.text()) or self.process.poll() is not None, 60, "a provider")
        found = _ready.search(self.text())
        assert found, self.text()
        self.port = int(found[1])
        return self

    @property
    def query_url(self) -> str:
        """Where workers ask."""
        return f"http://127.0.0.1:{self.port}/query"

    def text(self) -> str:
        """The log."""
        return self.log.read_text()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            code = self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            self._output.close()
        assert kind is not None or code == 0, self.text()


class Silent:
    """A payment side that accepts connections, reads, and never answers. It counts the connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.port = 0

    @property
    def query_url(self) -> str:
        """Where workers ask."""
        return f"http://127.0.0.1:{self.port}/query"


@contextlib.asynccontextmanager
async def silent() -> AsyncIterator[Silent]:
    """Such a payment side."""
    side, ended = Silent(), asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        side.connections += 1
        with contextlib.suppress(ConnectionError):
            while await reader.read(65_536) and not ended.is_set():
                pass
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    side.port = server.sockets[0].getsockname()[1]
    try:
        yield side
    finally:
        ended.set()
        server.close()
