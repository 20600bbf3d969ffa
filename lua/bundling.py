"""Sends calls that several tasks make at the same moment in one request to each server. A request costs a
worker far more than the calls in it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from redis.exceptions import AskError, MovedError, TryAgainError

from grabstream.lua.ending import end

#: The position of the first key in FCALL, EVALSHA and EVAL.
_FIRST_KEY: Final = 3


class _Call(NamedTuple):
    words: tuple[Any, ...]
    reply: "asyncio.Future[Any]"


class Bundled:
    """A client of Redis for `run_script`, which bundles calls of scripts.

    Each call has its own reply or error. Servers are asked apart: one that hangs delays the calls of its own
    keys only. A request that is not answered within `seconds_max` raises TimeoutError in its calls.
    """

    def __init__(self, redis: Any, seconds_max: float) -> None:
        self._redis = redis
        self._seconds_max = seconds_max
        self._waiting: list[_Call] = []
        self._requests: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Ends requests that are not answered yet."""
        await end(self._requests)

    async def execute_command(self, *words: Any) -> Any:
        """Runs the call of a script, together with those that other tasks make now; returns its reply."""
        call = _Call(words, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if len(self._waiting) == 1:
            # It begins after the tasks that are ready now.
            self._start(self._send_all())
        return await call.reply

    async def hexists(self, key: str, field: str) -> Any:
        """HEXISTS, not bundled: `run_script` asks it after rare errors only."""
        return await self._redis.hexists(key, field)

    def _start(self, sending: Any) -> None:
        request = asyncio.create_task(sending)
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def _send_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        # Only a client of a cluster has several servers.
        server_name = getattr(self._redis, "server_name", None)
        if server_name is None:
            await self._send(waiting)
            return
        by_server: dict[str, list[_Call]] = {}
        for call in waiting:
            by_server.setdefault(server_name(call.words[_FIRST_KEY]), []).append(call)
        for calls in by_server.values():
            self._start(self._send(calls))

    async def _send(self, calls: Sequence[_Call]) -> None:
        # Callers that were cancelled meanwhile are not to be found holding what they asked for.
        calls = [call for call in calls if not call.reply.done()]
        replies: Sequence[Any]
        try:
            async with (
                asyncio.timeout(self._seconds_max),
                self._redis.pipeline(transaction=False) as pipe,
            ):
                for call in calls:
                    pipe.execute_command(*call.words)
                replies = await pipe.execute(raise_on_error=False)
        except asyncio.CancelledError:
            for call in calls:
                call.reply.cancel()
            raise
        except Exception as error:
            replies = [error] * len(calls)
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, MovedError | AskError | TryAgainError):
                # The server has not run it. The others do not wait for where it leads.
                self._start(self._send_again(call))
            else:
                _settle(call, reply)

    async def _send_again(self, call: _Call) -> None:
        """Sends a call that a server of a cluster redirected, by itself."""
        try:
            async with asyncio.timeout(self._seconds_max):
                reply = await self._redis.execute_command(*call.words)
        except asyncio.CancelledError:
            call.reply.cancel()
            raise
        except Exception as error:
            reply = error
        _settle(call, reply)


def _settle(call: _Call, reply: Any) -> None:
    if call.reply.done():
        return
    if isinstance(reply, BaseException):
        call.reply.set_exception(reply)
    else:
        call.reply.set_result(reply)
