"""Tasks end when they are cancelled, whatever the clients they stand on do with a cancellation."""

import asyncio
import contextlib
from typing import Any

import pytest

from lua.keys import ShardKeys
from streams.sweeper import Sweeper


async def test_a_sweeper_ends_although_its_client_swallows_the_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeper = Sweeper(None, ShardKeys("p", 0), 1, 1_000)
    inside = asyncio.Event()

    async def swallowing(*_: Any) -> int:
        # As a client does whose answer comes at the same moment.
        if not inside.is_set():
            inside.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        return 0

    monkeypatch.setattr(sweeper, "sweep", swallowing)
    monkeypatch.setattr(sweeper, "flush_demand", lambda: asyncio.sleep(0))
    running = asyncio.create_task(sweeper.run())
    await inside.wait()
    running.cancel()
    done, _ = await asyncio.wait({running}, timeout=3)
    assert done
    assert running.cancelled()
