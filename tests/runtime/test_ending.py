"""`end` returns within its time limit, whatever tasks do with their cancellation."""

import asyncio
import contextlib

import pytest

from grabstream.runtime.ending import end


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while swallowed < 2:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            swallowed += 1
        await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end([task], seconds=60, again_seconds=0.01)
    assert task.cancelled()
    assert swallowed == 2


async def test_a_task_that_never_ends_is_logged_and_left_running(caplog: pytest.LogCaptureFixture) -> None:
    release = asyncio.Event()

    async def cleans_up_for_ever() -> None:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()

    async def fails() -> None:
        raise ValueError

    tasks = [asyncio.create_task(cleans_up_for_ever()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    await end(tasks, seconds=0.05)
    assert not tasks[0].done()
    assert "cleans_up_for_ever" in caplog.text
    with pytest.raises(ValueError, match=r"\A\Z"):
        tasks[1].result()
    release.set()
    await tasks[0]
