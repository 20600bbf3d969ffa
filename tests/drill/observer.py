"""The observer: polls every shard and records when it was fenced, by the clock of its Redis server."""

import asyncio
from typing import Any, Final, NamedTuple

from redis.exceptions import RedisError

from grabstream.connections.opening import key_space, open_redis
from grabstream.lua.loader import SCRIPTS
from grabstream.settings import Settings

LOOK_EVERY_SECONDS: Final = 0.02
#: Returns {fenced, server epoch, term, time ms} in one call, with the include of the deciding scripts.
LOOK: Final = (
    "#!lua flags=no-writes\n"
    + (SCRIPTS / "includes" / "shard.lua").read_text()
    + "local held = redis.call('HMGET', KEYS[1], 'server_epoch', 'term')\n"
    + "local epoch = server_epoch()\n"
    + "return {held[1] == epoch and 0 or 1, epoch, held[2] or '0', string.format('%.0f', time_of_server())}\n"
)


class Fenced(NamedTuple):
    """A shard was fenced from `from_ms` to `until_ms`, without a takeover in between."""

    shard: int
    term: int
    from_ms: int
    until_ms: int


class Observer:
    """Polls the shards of a system; `spans` are the times in which they were fenced."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.spans: list[Fenced] = []

    def start(self) -> None:
        """Starts to poll."""
        self._tasks = [asyncio.create_task(self._follow(shard)) for shard in range(self._settings.shards)]

    async def stop(self) -> None:
        """Ends, by a flag, since the Redis client may suppress a cancellation."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _follow(self, shard: int) -> None:
        client = open_redis(self._settings)
        key = key_space(self._settings).shard(shard).state
        before: tuple[str, int, int] | None = None
        try:
            while not self._stopping:
                try:
                    before = self._seen(shard, before, await client.execute_command("EVAL", LOOK, 1, key))
                except (RedisError, OSError):
                    before = None
                await asyncio.sleep(LOOK_EVERY_SECONDS)
        finally:
            await client.aclose()

    def _seen(
        self, shard: int, before: tuple[str, int, int] | None, reply: list[Any]
    ) -> tuple[str, int, int] | None:
        """Adds a span from the previous poll to this one if the shard was fenced in both; returns the values
        of this poll, or None if it is not fenced.
        """
        fenced, server_epoch, term, time_ms = reply[0], reply[1].decode(), int(reply[2]), int(reply[3])
        if not fenced:
            return None
        if before is not None and before[:2] == (server_epoch, term):
            self.spans.append(Fenced(shard, term, before[2], time_ms))
        return (server_epoch, term, time_ms)
