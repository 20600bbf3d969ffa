"""A switch: a port that forwards to a server, so that clients can be moved to another one while those
connected stay where they are.
"""

import asyncio
from contextlib import suppress


class Switch:
    """Forwards from a port of its own to `target`, a port of this machine; both may be changed and cut at any
    time.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        #: How many answers to a COMMIT are still to be lost, and how many were.
        self.commits_to_lose = 0
        self.commits_lost = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> None:
        """Begins to listen."""
        self.port = port
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", port)

    async def close(self) -> None:
        """Ends, with all connections."""
        if self._server is not None:
            self._server.close()
        await self.cut()

    def point_at(self, target: int) -> None:
        """From now on new connections go to another port; those that are there stay."""
        self.target = target

    async def cut(self) -> None:
        """Ends all connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        lost = asyncio.Event()
        ways = [
            asyncio.create_task(self._forward(reader, there_writer, lost)),
            asyncio.create_task(self._back(there_reader, writer, lost)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            there_writer.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if self.commits_to_lose and b"COMMIT" in data:
                    self.commits_to_lose -= 1
                    lost.set()
                writer.write(data)
                await writer.drain()

    async def _back(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if lost.is_set():
                    # The server has carried it out and says so; nobody will ever hear it.
                    self.commits_lost += 1
                    return
                writer.write(data)
                await writer.drain()
