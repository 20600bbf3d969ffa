"""A switch: a port that forwards to a server. New connections can be moved to another server while existing
ones stay.
"""

import asyncio
from contextlib import suppress


class Switch:
    """Forwards from `port` to `target`, both ports of this machine. The target may be changed, and
    connections cut, at any time.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        #: How many replies to a COMMIT shall still be lost, and how many were lost.
        self.commits_to_lose = 0
        self.commits_lost = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int) -> None:
        """Starts to listen."""
        self.port = port
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", port)

    async def close(self) -> None:
        """Stops to listen and ends all connections."""
        if self._server is not None:
            self._server.close()
        await self.cut()

    def point_at(self, target: int) -> None:
        """Forwards new connections to another port; existing connections stay."""
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
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        lost = asyncio.Event()
        directions = [
            asyncio.create_task(self._forward_requests(reader, target_writer, lost)),
            asyncio.create_task(self._forward_replies(target_reader, writer, lost)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            writer.close()
            target_writer.close()

    async def _forward_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if self.commits_to_lose and b"COMMIT" in data:
                    self.commits_to_lose -= 1
                    lost.set()
                writer.write(data)
                await writer.drain()

    async def _forward_replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if lost.is_set():
                    # The server has executed the COMMIT; its reply is dropped with the connection.
                    self.commits_lost += 1
                    return
                writer.write(data)
                await writer.drain()
