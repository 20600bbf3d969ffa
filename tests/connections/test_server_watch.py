"""The watch of the servers says that a server does not answer, and does not take its own pause for one."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from grabstream.connections import server_watch
from tests.conftest import until

Ask = Callable[[], Awaitable[None]]


async def said(caplog: pytest.LogCaptureFixture, openings: list[Ask], asks: int) -> list[str]:
    """What the watch logs about a server whose openings behave as given, the last one repeatedly, until it
    has logged something, or has asked a number of times.
    """
    opened_times, asked = 0, 0

    async def ask() -> None:
        nonlocal asked
        asked += 1

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Ask]:
        nonlocal opened_times
        opened_times += 1
        await openings[min(opened_times, len(openings)) - 1]()
        yield ask

    with caplog.at_level(logging.INFO):
        task = asyncio.create_task(server_watch._watch("Redis (r)", opened))
        try:
            await until(lambda: caplog.messages or asked >= asks, 60, "the server was asked")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    return caplog.messages


async def _stand_still() -> None:
    time.sleep(2 * server_watch.ANSWER_SECONDS_MAX)
    await asyncio.Event().wait()


async def _at_once() -> None: ...


async def _never() -> None:
    await asyncio.Event().wait()


async def _refuse() -> None:
    raise ConnectionRefusedError("refused")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_watch, "ANSWER_SECONDS_MAX", 0.5)
    monkeypatch.setattr(server_watch, "ASK_EVERY_SECONDS", 0.01)


async def test_a_process_that_stood_still_blames_no_server(caplog: pytest.LogCaptureFixture) -> None:
    """A worker imports for seconds when it starts on a busy machine; no server could answer it in time."""
    assert await said(caplog, [_stand_still, _at_once], 3) == []


@pytest.mark.parametrize(("server", "why"), [(_never, "TimeoutError"), (_refuse, "refused")])
async def test_a_server_that_does_not_answer_at_the_start_is_reported(
    caplog: pytest.LogCaptureFixture, server: Ask, why: str
) -> None:
    [message] = await said(caplog, [server], 1)
    assert message.startswith("Redis (r) does not answer: ")
    assert why in message
